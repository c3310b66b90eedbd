/* Weights whose inputs form groups, each with a scale for an output and maybe a zero:
 *
 *     weight = (value of the code - zero) * scale of the group * scale of the output
 *
 * Inputs that are `rounded` are integers from -127 to 127, and a step for each run: the sum of a run is that of integers, so it
 * is exact in any order, and the step multiplies what is left when zeros have been taken away.
 *
 * A code has four bits (FOUR) and stands for one of 16 values, or it is a byte (INT8, E4M3) and its own value.
 *
 * Values are exact in float32. A sum runs over a run of 32 inputs (16 where groups are that short) from zero in the order
 * of the inputs; zero times the sum of these inputs is taken away; the rest times the scale is added to the sum of the runs
 * before. Every number of rows makes these sums, so a row gets the same bits beside any others.
 *
 * Panels of bytes lie as pack.h says. Those of four bits hold the codes of 8 inputs, then those of the next 8. Among these
 * they lie as `nibble_at` says, so that few instructions make vectors of floats of them. Scales and zeros of a panel are
 * rows of 32, [groups][PANEL], apart from the codes. */
#pragma once
#include "matrix.h"

#define HALF 6 /* numbers in float16; F32 and BF16 are the other kinds of scales and zeros */
#define EIGHT 8 /* inputs whose four-bit codes lie together */

typedef struct Groups {
  const char *scales, *zeros;           /* of whole panels; zeros may be null */
  const char *tail_scales, *tail_zeros; /* of the panel that is not full, or null */
  int64_t size;                         /* inputs of a group */
  int32_t scale_kind, zero_kind;
  float values[16];      /* of four-bit codes */
  uint8_t halves[2][16]; /* the bytes of these in bfloat16, the lower ones first */
  int32_t rounded;       /* whether inputs are; codes of four bits are integers then, one after the other */
} Groups;

INLINE int64_t size_of_number(int kind) { return kind == F32 ? 4 : 2; }

/* Inputs that are summed up before they are scaled. */
INLINE int64_t run_of(const Groups *g) { return g->size % 32 && g->size % 32 == 16 ? 16 : 32; }

/* Bytes of the four-bit codes of EIGHT inputs to a panel. */
#define ROW4 (EIGHT * PANEL / 2)

/* The place of the code of output o and input k among a row's nibbles, two a byte, the lower first. */
#if WIDTH == 8
/* AVX2: two inputs in a vector of bytes, so that an input meets all outputs while it is in a register. A byte's lower half
 * belongs to the first 16 outputs. A look-up gives the bytes of bfloat16 by halves of 16 bytes, and within a half first those
 * of 4 outputs and then those of 4 others are interleaved: each of a part of 8 lies in both halves. */
INLINE int64_t nibble_at(int64_t o, int64_t k) {
  const int64_t upper = o / 16, part = o / 8 % 2, half = o / 4 % 2;
  return (k / 2 * PANEL + half * 16 + part * 8 + o % 4 * 2 + k % 2) * 2 + upper;
}
#else
INLINE int64_t nibble_at(int64_t o, int64_t k) { return o * EIGHT + k; } /* an output's codes are a lane */
#endif

/* Runs of inputs that are rounded: 0 where they are not. */
INLINE int64_t rounded_runs(const Linear *l) { return l->groups && l->groups->rounded ? run_of(l->groups) : 0; }

/* x [m, k] -> bytes [ceil(k / KC)][m][KC], then floats [ceil(k / run)][m]: steps, and as many: the sums of each run's bytes */
void round_inputs(const Linear *l, const float *x, int64_t ldx, int64_t m, void *out);

/* sums [m][lds] = x W of a panel; x: [ceil(k / KC)][m][KC], or what round_inputs made */
void product_of_groups(const Linear *l, int64_t p, int m, const float *x, float *sums, int64_t lds, Bench *b);
