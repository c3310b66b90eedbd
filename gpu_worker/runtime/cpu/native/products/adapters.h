/* LoRA adapters of a mixed batch. See adapters.c. */
#pragma once
#include "matrix.h"

/* What an adapter adds to one linear map: y += B (A x), one B for each part of the map's outputs. */
typedef struct {
  Linear a;    /* [parts * rank, k] */
  Linear b[3]; /* [outputs of the part, rank] */
  int64_t parts;
} Delta;

/* `n` inputs, from the one on that comes as number `t`, have the same adapter: its deltas, [layers][maps]. */
typedef struct {
  int64_t t, n;
  const Delta *deltas;
} Run;

/* Whether a delta has the sizes of a linear map, and A x has room in `reduced_stride` floats. */
int delta_fits(const Delta *d, const Linear *l, int64_t reduced_stride);

int64_t find_runs(int64_t n_inputs, const int64_t *inputs, const Delta *const *adapters, Run *runs);

/* Adds what the adapters make of x [t, k] to y [t, n]. `at`: of the linear map in an adapter's deltas; reduced:
 * [t, reduced_stride] for A x. Called by every thread of a region; ends with a barrier. */
void add_deltas(const Run *runs, int64_t n_runs, int64_t at, const float *x, int64_t k, float *y, int64_t n,
                float *reduced, int64_t reduced_stride, Bench *b);
