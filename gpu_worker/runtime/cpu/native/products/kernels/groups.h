/* Weights whose inputs form groups, each with a scale for an output and maybe a zero:
 *
 *     weight = (value of the code - zero) * scale of the group * scale of the output
 *
 * A code has four bits (FOUR) and stands for one of 16 values, or it is a number of six bits (SIX) or a byte (INT8, E4M3).
 * Values are exact in bfloat16.
 *
 * A sum runs over a run of 32 inputs (16 where groups are that short) from zero in the order of the inputs, on tiles over even
 * ones and odd ones apart; zero times the sum of these inputs is taken away; the rest times the scale is added to the sum of
 * the runs before. Every number of rows makes these sums, so a row gets the same bits beside any others.
 *
 * Inputs are floats. In a model in bfloat16 they are bfloat16 where the processor multiplies it (DOT), two at a time; the
 * sums are floats. Inputs that are rounded (INT8) are integers from -127 to 127, and a step for each run: the sum of a run is
 * that of integers, so it is exact in any order, and the step multiplies what is left when zeros have been taken away.
 *
 * Panels of bytes lie as pack.h says, those of four and six bits as codes.h says. Scales and zeros of a panel are rows of 32,
 * [groups][PANEL], apart from the codes. */
#pragma once
#include "../packed/codes.h"

#define CODES_AHEAD 4096 /* bytes: the codes that lie this far behind are prefetched */

/* Whether a product's inputs are bfloat16. */
INLINE int half_inputs(const Linear *l) { return l->groups ? l->groups->inputs == BF16 : HALF_INPUTS(l->kind); }

/* Whether the one row of a product may be multiplied where it lies. */
INLINE int as_it_is(const Linear *l) {
  return !half_inputs(l) && !(l->groups && (l->groups->inputs == INT8 || l->groups->zeros));
}

/* x [m, k] -> what product_of_groups takes: [ceil(k / KC)][m][KC] floats, bfloat16 or integers, then as many floats for each
 * run: sums, steps, and where sums of bytes start. */
void group_inputs(const Linear *l, const float *x, int64_t ldx, int64_t m, void *out);

/* sums [m][lds] = x W of a panel. x: what group_inputs made, or one row that is `as_it_is`. */
void product_of_groups(const Linear *l, int64_t p, int m, const char *x, float *sums, int64_t lds, Workspace *b);

/* A product's inputs as group_inputs makes them. For each run and row, [runs][m]: the sum of its inputs; the step of those
 * that are rounded, and where the sum of bytes starts: a value is the first one plus its code. */
typedef struct {
  char *numbers;
  float *sums, *steps;
  int32_t *starts;
} GroupInputs;

#ifdef TILES
/* c [m][ldc] = x W of a panel, of inputs in bfloat16; c has whole tiles of rows. */
void panel_on_tiles(const Linear *l, int64_t p, int64_t m, const GroupInputs *x, float *c, int64_t ldc, Workspace *b);
#endif
