/* LoRA adapters of a mixed batch. See adapters.c. */
#pragma once
#include "packed/matrix.h"

/* What an adapter adds to one matrix: y += B (A x), one B for each part of the matrix's outputs. */
typedef struct {
  Linear a;    /* [parts * rank, k] */
  Linear b[3]; /* [outputs of the part, rank] */
  int64_t parts;
} LowRank;

/* `n` inputs, from the one on that comes as number `t`, have the same adapter: its matrices, [layers][ADAPTED]. */
typedef struct {
  int64_t t, n;
  const LowRank *maps;
} Run;

/* Whether a low-rank pair has the sizes of a matrix, and A x has room in `reduced_stride` floats. */
int low_rank_fits(const LowRank *r, const Linear *l, int64_t reduced_stride);

int64_t find_runs(int64_t n_inputs, const int64_t *inputs, const LowRank *const *adapters, Run *runs);

/* Adds what the adapters make of x [t, k] to y [t, n]. `at`: of the matrix among an adapter's; reduced:
 * [t, reduced_stride] for A x. Called by every thread of a region; ends with a barrier. */
void add_low_rank(const Run *runs, int64_t n_runs, int64_t at, const float *x, int64_t k, float *y, int64_t n,
                float *reduced, int64_t reduced_stride, Workspace *b);
