/* Products on tiles (AMX). See tiles.c. */
#pragma once
#include "../packed/matrix.h"

#define SIDE 16   /* rows of a tile, and outputs */
#define DEPTH 32  /* terms that a row of a tile holds */
#define TILE 1024 /* bytes */

#ifdef TILES
/* Where a product's inputs lie, in whole tiles of rows, for `sums_on_tiles` in whole blocks: the bytes from one row to the
 * next, from DEPTH terms to the next ones, and from one block, two tiles of rows, to the next. */
typedef struct {
  const char *at;
  int64_t row, step, block;
} Inputs;

/* Inputs [m, k] that lie in blocks of rows: [ceil(k / DEPTH)][2 SIDE][DEPTH]. */
INLINE Inputs packed_inputs(const void *at, int64_t k) {
  return (Inputs){at, 2 * DEPTH, 2 * TILE, parts(k, DEPTH) * 2 * TILE};
}

/* The place of input c in row j. */
INLINE uint16_t *packed_at(void *at, int64_t k, int64_t j, int64_t c) {
  const Inputs x = packed_inputs(at, k);
  return (uint16_t *)((char *)at + j / (2 * SIDE) * x.block + c / DEPTH * x.step + j % (2 * SIDE) * x.row) + c % DEPTH;
}

/* The bytes that such inputs take: with k a multiple of DEPTH no more than floats, if m is at least SIDE. */
INLINE int64_t packed_size(int64_t m, int64_t k) { return parts(m, 2 * SIDE) * packed_inputs(NULL, k).block; }

/* Row j of an input [k] -> bfloat16 at its place, and zeros after the last. */
void pack_row(const float *x, int64_t k, int64_t j, void *out);

/* Between these two calls a thread may multiply on tiles. end_tiles takes what begin_tiles gave. */
uint32_t begin_tiles(void);
void end_tiles(uint32_t before);

/* Gives tiles of inputs and of sums no more rows than m >= 1 inputs need, so that fewer lines are loaded. With 2 SIDE
 * inputs or more they have all their rows, as after begin_tiles; `multiply_tiles` expects that. */
void fit_tiles(int64_t m);

/* The same where every tile of inputs has the same rows, of this many bytes: see group_tiles.c. */
void fit_runs(int64_t m, int64_t bytes);

/* The compiler does not know that instructions on tiles read and write memory. */
#define SETTLE_MEMORY() __asm__ volatile("" ::: "memory")

/* c [m, PANEL] (+)= x [m, n DEPTH] w. c has whole tiles of rows. w: pairs of bfloat16, [n][2][SIDE][SIDE][2]: of DEPTH
 * terms those to the first SIDE outputs, then those to the others. */
void multiply_tiles(int64_t m, int64_t n, Inputs x, const char *w, float *c, int64_t ldc, int add);

/* Panels of outputs that are computed together: so each chunk of the inputs is read once for all of them. */
typedef struct {
  int64_t n, at[MOST_PANELS];
} Panels;

/* sums [now->n][ROWS][PANEL], of which m in whole blocks are written: those of these panels, for m <= ROWS inputs. next: the
 * panel whose weights are read then, or -1. `b->meanwhile` is called after each block of inputs and chunk of terms. */
void sums_on_tiles(const Linear *l, const Panels *now, int64_t next, int64_t m, Inputs x, float *sums, Workspace *b);
#else
/* Without tiles packed inputs lie row by row. */
INLINE int64_t packed_size(int64_t m, int64_t k) { return (void)m, (void)k, 0; }
INLINE uint16_t *packed_at(void *at, int64_t k, int64_t j, int64_t c) { return (uint16_t *)at + j * k + c; }
INLINE void pack_row(const float *x, int64_t k, int64_t j, void *out) { narrow(x, k, packed_at(out, k, j, 0)); }
INLINE uint32_t begin_tiles(void) { return 0; }
INLINE void end_tiles(uint32_t before) { (void)before; }
#endif
