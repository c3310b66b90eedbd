/* Products on tiles (AMX). See tiles.c. */
#pragma once
#include "matrix.h"

#define SIDE 16   /* rows of a tile, and outputs */
#define DEPTH 32  /* terms that a row of a tile holds */
#define TILE 1024 /* bytes */

#ifdef TILES
/* Where a product's inputs lie, in whole tiles of rows: the bytes from one row to the next, from DEPTH terms to the next
 * ones, and from two tiles of rows to the next two. */
typedef struct {
  const char *at;
  int64_t row, step, block;
} Inputs;

/* Inputs [m, k] that lie in blocks of rows: [ceil(k / DEPTH)][rows][DEPTH]. A few of them are one tile. */
INLINE Inputs packed_inputs(const void *at, int64_t m, int64_t k) {
  const int64_t rows = m > SIDE ? 2 * SIDE : SIDE;
  return (Inputs){at, 2 * DEPTH, rows * 2 * DEPTH, parts(k, DEPTH) * rows * 2 * DEPTH};
}

/* The bytes that such inputs take. */
INLINE int64_t packed_size(int64_t m, int64_t k) { return parts(m, 2 * SIDE) * packed_inputs(NULL, m, k).block; }

/* Rows [from, to) of x [m, k] -> bfloat16 where `packed_inputs` says. Terms behind the last are 0. */
void pack_inputs(const float *x, int64_t ldx, int64_t m, int64_t from, int64_t to, int64_t k, void *out);

/* Between these two calls a thread may multiply on tiles. end_tiles takes what begin_tiles gave. */
uint32_t begin_tiles(void);
void end_tiles(uint32_t before);

/* c [m, PANEL] (+)= x [m, n DEPTH] w. c has whole tiles of rows. w: pairs of bfloat16, [n][2][SIDE][SIDE][2]: of DEPTH
 * terms those to the first SIDE outputs, then those to the others. */
void multiply_tiles(int64_t m, int64_t n, Inputs x, const char *w, float *c, int64_t ldc, int add);

/* sums [m in whole tiles][lds]: those of panel p, for m <= ROWS inputs. next: the panel whose weights are read then. */
void sums_on_tiles(const Linear *l, int64_t p, int64_t next, int64_t m, Inputs x, float *sums, int64_t lds, Bench *b);
#else
INLINE int64_t packed_size(int64_t m, int64_t k) { return (void)m, (void)k, 0; }
INLINE uint32_t begin_tiles(void) { return 0; }
INLINE void end_tiles(uint32_t before) { (void)before; }
#endif
