/* Sums of panels of outputs. See panels.c. */
#pragma once
#include "../packed/matrix.h"

/* Weights come from far away: while a tile is computed, it asks for its share of those that are needed next. */
typedef struct {
  const char *at;
  int64_t step; /* bytes for each row or pair of rows */
} NextWeights;

/* c [m, PANEL] (+)= x [m, kc] w [kc, PANEL]. Rows of x are KC apart, those of c `ldc`. `half`: x and w are bfloat16,
 * w in pairs [ceil(kc / 2)][PANEL][2]; an odd kc is rounded up. Only with DOT. With TILES w lies as `multiply_tiles` takes
 * it, and whole tiles are multiplied: c has rows up to a multiple of 16, and after the last of kc, up to a multiple of
 * DEPTH, x has zeros, and w has numbers. */
void multiply(int half, int m, int kc, const void *x, const void *w, float *c, int64_t ldc, int add);

/* sums [m][lds] = x W. x: [ceil(k / KC)][m][KC] */
void product(const Linear *l, int64_t p, int m, const char *x, float *sums, int64_t lds, Workspace *b);

#define WIDE (MB / 2)
#ifdef __AVX512F__
/* c [mb][PAIR] (+)= x [mb, kc] W, for mb <= WIDE inputs and a pair of panels. See `wide_tile`. */
typedef void Wide(int mb, int64_t kc, const void *x, int64_t ldx, const char *w, int64_t apart, int64_t ldw, float *c,
                  int add, const NextWeights *ahead, vu *widened);
Wide wide_of_floats;
#ifdef BY_VECTORS
Wide wide_of_bytes, wide_of_twelve, wide_alone, wide_of_many;
#endif
#endif
