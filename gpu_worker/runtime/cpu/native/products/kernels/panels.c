/* Products with weights that were rearranged once (pack.h).
 *
 * A product is: take one input, multiply the vector beside it, add to the sums of a panel's 32 outputs. No sum crosses
 * lanes, weights are read in order, and each output is one chain of additions over k = 0, 1, 2, ... That chain is
 * the same for one input row and for 500, however they are blocked: the same bits in any batch.
 *
 * Where the processor multiplies bfloat16 (DOT), inputs are rounded to it beside weights in it; the sums are floats.
 * Where it multiplies tiles of bfloat16 (TILES), tiles.c makes these products, in its own order of the terms.
 */
#include "panels.h"

#include "../packed/pack.h"
#include "groups.h"
#include "tiles.h"

/* Six rows take two vectors, half a panel, where 16 registers hold the sums beside what is multiplied. One or two take
 * the whole panel: else a sum would wait for itself. */
#if WIDTH == 8
#define TILE_ROWS 6
#define VECTORS_OF(mb) ((mb) > 2 ? PARTS / 2 : PARTS)
#else
#define TILE_ROWS MB
#define VECTORS_OF(mb) PARTS
#endif

/* The weights of AT_ONCE inputs to the first n vectors of outputs. */
INLINE void widen(int kind, int n, const char *at, vp rows[2][PARTS]) {
#pragma GCC unroll 4
  for (int part = 0; part < n; part++) {
    const char *p = at + part * WIDTH * AT_ONCE(kind) * size_of(kind);
    if (kind == F32) rows[0][part] = part_at((const float *)p);
    else if (kind == INT8) rows[0][part] = __builtin_convertvector(widen_part(p), vp);
    else {
      const vpu pairs = *(const vpu *)p;
      rows[0][part] = (vp)(pairs << 16);
      rows[1][part] = (vp)(pairs & 0xFFFF0000u);
    }
  }
}

/* ---------------------------------------------------------------- products */

/* w: the weights of inputs i .. i + AT_ONCE - 1. n: vectors of outputs */
INLINE void add_products(int kind, int mb, int n, int64_t i, const void *x, const char *w, vp acc[TILE_ROWS][PARTS]) {
#ifdef BY_VECTORS
  if (HALF_INPUTS(kind)) {
    vu pairs[2];
    pairs_of(kind, w, pairs);
#pragma GCC unroll 16
    for (int j = 0; j < mb; j++) {
      const vu in = pair_at(x, j * KC + i);
      acc[j][0] = add_pairs(acc[j][0], pairs[0], in);
      acc[j][1] = add_pairs(acc[j][1], pairs[1], in);
    }
    return;
  }
#endif
  const int at_once = AT_ONCE(kind);
  vp rows[2][PARTS];
  widen(kind, n, w, rows);
#pragma GCC unroll 2
  for (int odd = 0; odd < at_once; odd++)
#pragma GCC unroll 16
    for (int j = 0; j < mb; j++) {
      const vp in = splat_part(((const float *)x)[j * KC + i + odd]);
#pragma GCC unroll 4
      for (int part = 0; part < n; part++) acc[j][part] = add_times_part(acc[j][part], rows[odd][part], in);
    }
}

/* The first n vectors of outputs. */
INLINE void tile_of(int kind, int mb, int n, int kc, const void *x, const char *w, int64_t ldw, float *c, int64_t ldc,
                    int add, const NextWeights *ahead) {
  vp acc[TILE_ROWS][PARTS];
#pragma GCC unroll 16
  for (int j = 0; j < mb; j++)
#pragma GCC unroll 4
    for (int part = 0; part < n; part++) acc[j][part] = add ? part_at(c + j * ldc + part * WIDTH) : (vp){0};
  const char *next = ahead->at;
  for (int64_t i = 0; i < kc; i += AT_ONCE(kind), w += ldw) {
    if (next) {
      __builtin_prefetch(next, 0, 2);
      if (ahead->step > 64) __builtin_prefetch(next + 64, 0, 2);
      next += ahead->step;
    }
    add_products(kind, mb, n, i, x, w, acc);
  }
#pragma GCC unroll 16
  for (int j = 0; j < mb; j++)
#pragma GCC unroll 4
    for (int part = 0; part < n; part++) *(vp *)(c + j * ldc + part * WIDTH) = acc[j][part];
}

INLINE void tile(int kind, int mb, int kc, const void *x, const char *w, int64_t ldw, float *c, int64_t ldc, int add,
                 const NextWeights *ahead) {
  const int n = VECTORS_OF(mb), sides = PARTS / n;
  const int64_t step = ahead ? ahead->step / sides : 0, rows = parts(kc, AT_ONCE(kind));
#pragma GCC unroll 2
  for (int side = 0; side < sides; side++) {
    const NextWeights share = {ahead ? ahead->at + side * step * rows : NULL, step};
    const int64_t first = side * n * WIDTH;
    tile_of(kind, mb, n, kc, x, w + first * AT_ONCE(kind) * size_of(kind), ldw, c + first, ldc, add, &share);
  }
}

#define TILE_CASE(kind, mb) case mb: tile(kind, mb, kc, x, w, ldw, c, ldc, add, AHEAD); break;
#define TILE_FUNCTION(name, kind) \
  static void name(int mb, int kc, const void *x, const char *w, int64_t ldw, float *c, int64_t ldc, int add, \
                   const NextWeights *ahead) { \
    (void)ahead; \
    switch (mb) { /* constants, so that each case is unrolled */ \
      TILE_CASE(kind, 1) TILE_CASE(kind, 2) TILE_CASE(kind, 3) MORE_TILES(kind) } }
#if TILE_ROWS == 12
#define MORE_TILES(kind) \
  TILE_CASE(kind, 4) TILE_CASE(kind, 5) TILE_CASE(kind, 6) TILE_CASE(kind, 7) TILE_CASE(kind, 8) \
  TILE_CASE(kind, 9) TILE_CASE(kind, 10) TILE_CASE(kind, 11) TILE_CASE(kind, 12)
#elif TILE_ROWS == 6
#define MORE_TILES(kind) TILE_CASE(kind, 4) TILE_CASE(kind, 5) TILE_CASE(kind, 6)
#else
#define MORE_TILES(kind)
#endif
#define AHEAD ahead
TILE_FUNCTION(tile_f32, F32)
TILE_FUNCTION(tile_bf16, BF16)
TILE_FUNCTION(tile_int8, INT8)
#ifdef BY_VECTORS
TILE_FUNCTION(tile_int8_half, INT8_HALF)
TILE_FUNCTION(tile_twelve, TWELVE)
#endif
TILE_FUNCTION(near_f32, F32)
#undef AHEAD
#define AHEAD NULL
#ifndef TILES
TILE_FUNCTION(near_bf16, BF16)
#endif

#ifdef __AVX512F__
#define VECTORS (PAIR / LANES)

/* The weights of AT_ONCE inputs to the outputs of a pair of panels. */
INLINE void pair_of_weights(int kind, const char *w, int64_t apart, vu weights[VECTORS]) {
#pragma GCC unroll 4
  for (int v = 0; kind == F32 && v < VECTORS; v++) weights[v] = ((const vu *)(w + v / 2 * apart))[v % 2];
#ifdef BY_VECTORS
  if (kind == F32) return;
  pairs_of(kind, w, weights);
  pairs_of(kind, w + apart, weights + 2);
#endif
}

/* Inputs i .. i + AT_ONCE - 1 in each lane. */
INLINE vu inputs_at(int kind, const void *x, int64_t i) {
#ifdef BY_VECTORS
  if (kind != F32) return pair_at(x, i);
#endif
  return (void)kind, (vu)splat(((const float *)x)[i]);
}

INLINE vf add_inputs(int kind, vf sums, vu weights, vu inputs) {
#ifdef BY_VECTORS
  if (kind != F32) return add_pairs(sums, weights, inputs);
#endif
  return (void)kind, add_times(sums, (vf)weights, (vf)inputs);
}

/* c [mb][PAIR] (+)= x [mb, kc] W, for a pair of panels, the second one's weights `apart` bytes after the first one's. Six
 * rows take four vectors, so that a load feeds more products than in a tile of one panel; the sums are the same chains.
 * lines: of 64 bytes that are prefetched in a step. widened: room for the pairs that bytes become, or null. */
INLINE void wide_tile(int kind, int lines, int mb, int64_t kc, const void *x, int64_t ldx, const char *w, int64_t apart,
                      int64_t ldw, float *c, int add, const NextWeights *ahead, vu *widened) {
  vf acc[WIDE][VECTORS];
#pragma GCC unroll 8
  for (int j = 0; j < mb; j++)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) acc[j][v] = add ? load(c + (j * VECTORS + v) * LANES) : (vf){0};
  const char *next = ahead->at;
  for (int64_t i = 0; i < kc; i += AT_ONCE(kind), w += ldw, next += ahead->step) {
    vu weights[VECTORS];
#pragma GCC unroll 4
    for (int line = 0; line < lines; line++) __builtin_prefetch(next + line * 64, 0, 2);
    pair_of_weights(kind, w, apart, weights);
    if (widened)
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++) *widened++ = weights[v];
#pragma GCC unroll 8
    for (int j = 0; j < mb; j++) {
      const vu in = inputs_at(kind, x, j * ldx + i);
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++) acc[j][v] = add_inputs(kind, acc[j][v], weights[v], in);
    }
  }
#pragma GCC unroll 8
  for (int j = 0; j < mb; j++)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) store(c + (j * VECTORS + v) * LANES, acc[j][v]);
}

#define WIDE_CASE(kind, lines, mb) \
  case mb: wide_tile(kind, lines, mb, kc, x, ldx, w, apart, ldw, c, add, ahead, WIDENED); break;
#define WIDE_FUNCTION(name, kind, lines) \
  void name(int mb, int64_t kc, const void *x, int64_t ldx, const char *w, int64_t apart, int64_t ldw, \
                   float *c, int add, const NextWeights *ahead, vu *widened) { \
    (void)widened; \
    switch (mb) { /* constants, so that each case is unrolled */ \
      WIDE_CASE(kind, lines, 1) WIDE_CASE(kind, lines, 2) WIDE_CASE(kind, lines, 3) \
      WIDE_CASE(kind, lines, 4) WIDE_CASE(kind, lines, 5) WIDE_CASE(kind, lines, 6) } }
#ifdef BY_VECTORS
#define WIDENED widened
WIDE_FUNCTION(wide_of_bytes, INT8_HALF, 1)
#undef WIDENED
#endif
#define WIDENED NULL
WIDE_FUNCTION(wide_of_floats, F32, 1)
#ifdef BY_VECTORS
WIDE_FUNCTION(wide_of_twelve, TWELVE, 1)
WIDE_FUNCTION(wide_alone, BF16, 4) /* the only tile of its rows asks for all weights that come next */
WIDE_FUNCTION(wide_of_many, BF16, 1)
#endif
#endif

typedef void (*Tile)(int mb, int kc, const void *x, const char *w, int64_t ldw, float *c, int64_t ldc, int add,
                     const NextWeights *ahead);

/* In tiles of about the same number of rows. `ldw`: from one row of weights to the next, in bytes. next: the weights that
 * are needed next, of `row` bytes for each row of these. */
INLINE void in_tiles(Tile tile, int kind, int m, int kc, const void *x, const char *w, int64_t ldw, float *c,
                     int64_t ldc, int add, const char *next, int64_t row) {
  const int n = (int)parts(m, TILE_ROWS), rows = parts(kc, AT_ONCE(kind));
  const int64_t step = row / n;
  for (int left = n, at = 0; left; left--) {
    const int mb = (m - at) / left;
    const NextWeights ahead = {next + rows * (n - left) * step, step};
    tile(mb, kc, (const char *)x + at * KC * input_size(kind), w, ldw, c + at * ldc, ldc, add, &ahead);
    at += mb;
  }
}

/* With weights that have become floats. next, row: as in `in_tiles`, of weights that have not. */
INLINE void near(int m, int kc, const void *x, const void *w, float *c, int64_t ldc, int add, const char *next,
                 int64_t row) {
  in_tiles(near_f32, F32, m, kc, x, w, row_of(F32), c, ldc, add, next, row);
}

void multiply(int half, int m, int kc, const void *x, const void *w, float *c, int64_t ldc, int add) {
#ifdef TILES
  const Inputs inputs = {x, 2 * KC, 2 * DEPTH, 2 * SIDE * 2 * KC};
  if (half) multiply_tiles(m, parts(kc, DEPTH), inputs, w, c, ldc, add);
#else
  if (half) in_tiles(near_bf16, BF16, m, kc, x, w, row_of(BF16), c, ldc, add, w, 0);
#endif
  else near(m, kc, x, w, c, ldc, add, w, 0);
}

/* [kc][PANEL] floats */
INLINE void widen_panel(int kind, int kc, const char *w, int64_t ldw, float *out) {
  const int at_once = AT_ONCE(kind);
  for (int i = 0; i < kc; i += at_once, w += ldw) {
    vp rows[2][PARTS];
    widen(kind, PARTS, w, rows);
#pragma GCC unroll 2
    for (int odd = 0; odd < at_once; odd++)
#pragma GCC unroll 4
      for (int part = 0; part < PARTS; part++) *(vp *)(out + (i + odd) * PANEL + part * WIDTH) = rows[odd][part];
  }
}

void product(const Linear *l, int64_t p, int m, const char *x, float *sums, int64_t lds, Workspace *b) {
  const char *w = weights_to(l, p * PANEL);
  const int64_t ldw = row_of(l->kind);
  b->widened = NULL;
  if (l->groups) {
    product_of_groups(l, p, m, x, sums, lds, b);
    return;
  }
  for (int64_t from = 0; from < l->k; from += KC, x += m * KC * input_size(l->kind), w += KC / AT_ONCE(l->kind) * ldw) {
    const int kc = (int)smaller(KC, l->k - from);
    const char *next = w + parts(kc, AT_ONCE(l->kind)) * ldw;
    if (l->kind == F32 || HALF_INPUTS(l->kind) || m <= (l->kind == BF16 ? 4 : 2) * MB) {
      if (l->kind == F32) in_tiles(tile_f32, F32, m, kc, x, w, ldw, sums, lds, from > 0, next, ldw);
      else if (l->kind == BF16) in_tiles(tile_bf16, BF16, m, kc, x, w, ldw, sums, lds, from > 0, next, ldw);
#ifdef BY_VECTORS
      else if (l->kind == INT8_HALF) in_tiles(tile_int8_half, INT8_HALF, m, kc, x, w, ldw, sums, lds, from > 0, next, ldw);
      else if (l->kind == TWELVE) in_tiles(tile_twelve, TWELVE, m, kc, x, w, ldw, sums, lds, from > 0, next, ldw);
#endif
      else in_tiles(tile_int8, INT8, m, kc, x, w, ldw, sums, lds, from > 0, next, ldw);
      continue;
    }
    if (l->kind == BF16) widen_panel(BF16, kc, w, ldw, b->panel); /* once for all the rows */
    else widen_panel(INT8, kc, w, ldw, b->panel);
    near(m, kc, x, b->panel, sums, lds, from > 0, next, ldw / AT_ONCE(l->kind));
  }
}
