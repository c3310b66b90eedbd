/* Products on tiles (AMX). See tiles.c. */
#pragma once
#include "vectors.h"

#ifdef TILES
#define SIDE 16  /* rows of a tile, and outputs of a product */
#define DEPTH 32 /* terms that a row of a tile holds */
#define TILE 1024 /* bytes */

/* Where a product's inputs lie, in whole tiles of rows: the bytes from one row to the next, from DEPTH terms to the next
 * ones, and from two tiles of rows to the next two. */
typedef struct {
  const char *at;
  int64_t row, step, block;
} Inputs;

/* Between these two calls a thread has tiles as these products take them. end_tiles takes what begin_tiles gave. */
uint32_t begin_tiles(void);
void end_tiles(uint32_t before);

/* What is read next and lies far away is asked for line by line, while other things are computed. */
typedef struct {
  const char *at;
  int64_t lines; /* of 64 bytes, for each DEPTH terms of two tiles of rows */
} Next;

INLINE void ask_for_lines(Next *next) {
  for (int64_t i = 0; i < next->lines; i++, next->at += 64) __builtin_prefetch(next->at, 0, 2);
}

/* The compiler does not know that instructions on tiles read and write memory. */
#define SETTLE_MEMORY() __asm__ volatile("" ::: "memory")

/* The sums of one or two tiles of rows begin, from c [rows, 2 SIDE] or from 0. */
INLINE void begin_sums(int two, const float *c, int64_t ldc, int add) {
  const int64_t stride = ldc * (int64_t)sizeof(float);
  const float *lower = c + SIDE * ldc;
  if (add) {
    _tile_loadd(0, c, stride);
    _tile_loadd(1, c + SIDE, stride);
    if (two) _tile_loadd(2, lower, stride);
    if (two) _tile_loadd(3, lower + SIDE, stride);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    if (two) _tile_zero(2);
    if (two) _tile_zero(3);
  }
}

/* DEPTH terms more. w: two tiles of pairs of weights. */
INLINE void add_terms(int two, Inputs x, const char *w) {
  _tile_loadd(6, w, 64);
  _tile_loadd(4, x.at, x.row);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(7, w + TILE, 64);
  _tile_dpbf16ps(1, 4, 7);
  if (!two) return;
  _tile_loadd(5, x.at + SIDE * x.row, x.row);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}

INLINE void end_sums(int two, float *c, int64_t ldc) {
  const int64_t stride = ldc * (int64_t)sizeof(float);
  float *lower = c + SIDE * ldc;
  _tile_stored(0, c, stride);
  _tile_stored(1, c + SIDE, stride);
  if (two) _tile_stored(2, lower, stride);
  if (two) _tile_stored(3, lower + SIDE, stride);
}

/* c [m, 2 SIDE] (+)= x [m, n DEPTH] w. c: of whole tiles of rows. w: n times two tiles of pairs of bfloat16. next: or null */
void multiply_tiles(int64_t m, int64_t n, Inputs x, const char *w, float *c, int64_t ldc, int add, Next *next);

/* The rows of a block of inputs: of few inputs one tile, else two. */
INLINE int64_t block_rows(int64_t m) { return m > SIDE ? 2 * SIDE : SIDE; }

INLINE Inputs packed_inputs(const uint16_t *at, int64_t m, int64_t k) {
  const int64_t rows = block_rows(m);
  return (Inputs){(const char *)at, 2 * DEPTH, rows * 2 * DEPTH, (k + DEPTH - 1) / DEPTH * rows * 2 * DEPTH};
}

/* Rows [from, to) of x [m, k] -> bfloat16 in blocks of rows, [ceil(k / DEPTH)][rows][DEPTH]. Terms behind the last are 0. */
void pack_inputs(const float *x, int64_t ldx, int64_t m, int64_t from, int64_t to, int64_t k, uint16_t *out);

/* The bytes that these take. */
INLINE int64_t packed_size(int64_t m, int64_t k) {
  const Inputs x = packed_inputs(NULL, m, k);
  return (m + 2 * SIDE - 1) / (2 * SIDE) * x.block;
}
#else
INLINE uint32_t begin_tiles(void) { return 0; }
INLINE void end_tiles(uint32_t before) { (void)before; }
INLINE int64_t packed_size(int64_t m, int64_t k) { return (void)m, (void)k, 0; }
#endif
