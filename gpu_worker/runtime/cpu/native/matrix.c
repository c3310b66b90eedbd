/* Linear maps over weights that were rearranged once (pack.h).
 *
 * A product is: take one input, multiply the vector beside it, add to the sums of a panel's 32 outputs. No sum crosses
 * lanes, weights are read in order, and each output is one chain of additions over k = 0, 1, 2, ... That chain is
 * the same for one input row and for 500, however they are blocked: the same bits in any batch.
 *
 * Where the processor multiplies bfloat16 (DOT), inputs are rounded to it beside weights in it; the sums are floats.
 * Where it multiplies tiles of bfloat16 (TILES), tiles.c makes these products, in its own order of the terms.
 */
#include "pack.h"
#include "tiles.h"

#include <omp.h>

/* Input rows whose sums the registers hold. */
#ifdef __AVX512F__
#define MB 12
#else
#define MB 3
#endif

/* The weights of AT_ONCE inputs to the outputs of a panel. */
INLINE void widen(int kind, const char *at, vf rows[2][2]) {
#pragma GCC unroll 2
  for (int half = 0; half < 2; half++) {
    const char *p = at + half * LANES * AT_ONCE(kind) * size_of(kind);
    if (kind == F32) rows[0][half] = load((const float *)p);
    else if (kind == INT8) rows[0][half] = __builtin_convertvector(widen_bytes(p), vf);
    else {
      const vu pairs = *(const vu *)p;
      rows[0][half] = (vf)(pairs << 16);
      rows[1][half] = (vf)(pairs & 0xFFFF0000u);
    }
  }
}

/* ---------------------------------------------------------------- products */

INLINE int64_t input_size(int kind) { return HALF_INPUTS(kind) ? 2 : 4; }

/* w: the weights of inputs i .. i + AT_ONCE - 1 */
INLINE void add_products(int kind, int mb, int64_t i, const void *x, const char *w, vf acc[MB][2]) {
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
  vf rows[2][2];
  widen(kind, w, rows);
  for (int odd = 0; odd < AT_ONCE(kind); odd++)
#pragma GCC unroll 16
    for (int j = 0; j < mb; j++) {
      const vf in = splat(((const float *)x)[j * KC + i + odd]);
      acc[j][0] += rows[odd][0] * in;
      acc[j][1] += rows[odd][1] * in;
    }
}

/* Weights come from far away: while a tile is computed, it asks for its share of those that are needed next. */
typedef struct {
  const char *at;
  int64_t step; /* bytes for each row or pair of rows */
} Ahead;

INLINE void tile(int kind, int mb, int kc, const void *x, const char *w, int64_t ldw, float *c, int64_t ldc, int add,
                 const Ahead *ahead) {
  vf acc[MB][2];
#pragma GCC unroll 16
  for (int j = 0; j < mb; j++) {
    acc[j][0] = add ? load(c + j * ldc) : (vf){0};
    acc[j][1] = add ? load(c + j * ldc + LANES) : (vf){0};
  }
  const char *next = ahead ? ahead->at : NULL;
  const int64_t step = ahead ? ahead->step : 0;
  for (int64_t i = 0; i < kc; i += AT_ONCE(kind), w += ldw) {
    if (ahead) {
      __builtin_prefetch(next, 0, 2);
      if (step > 64) __builtin_prefetch(next + 64, 0, 2);
      next += step;
    }
    add_products(kind, mb, i, x, w, acc);
  }
#pragma GCC unroll 16
  for (int j = 0; j < mb; j++) {
    store(c + j * ldc, acc[j][0]);
    store(c + j * ldc + LANES, acc[j][1]);
  }
}

#define TILE_CASE(kind, mb) case mb: tile(kind, mb, kc, x, w, ldw, c, ldc, add, AHEAD); break;
#define TILE_FUNCTION(name, kind) \
  static void name(int mb, int kc, const void *x, const char *w, int64_t ldw, float *c, int64_t ldc, int add, \
                   const Ahead *ahead) { \
    (void)ahead; \
    switch (mb) { /* constants, so that each case is unrolled */ \
      TILE_CASE(kind, 1) TILE_CASE(kind, 2) TILE_CASE(kind, 3) MORE_TILES(kind) } }
#if MB == 12
#define MORE_TILES(kind) \
  TILE_CASE(kind, 4) TILE_CASE(kind, 5) TILE_CASE(kind, 6) TILE_CASE(kind, 7) TILE_CASE(kind, 8) \
  TILE_CASE(kind, 9) TILE_CASE(kind, 10) TILE_CASE(kind, 11) TILE_CASE(kind, 12)
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
#undef AHEAD
#define AHEAD NULL
TILE_FUNCTION(near_f32, F32)
#ifndef TILES
TILE_FUNCTION(near_bf16, BF16)
#endif

#define WIDE (MB / 2)
#ifdef BY_VECTORS
#define VECTORS (PAIR / LANES)

/* c [mb][PAIR] (+)= x [mb, kc] W, for a pair of panels, the second one's weights `apart` bytes behind the first one's. Six
 * rows meet four vectors, so that a load feeds more products than in a tile of one panel; the sums are the same chains.
 * lines: of 64 bytes that are asked for in a step. widened: room for the pairs that bytes become, or null. */
INLINE void wide_tile(int kind, int lines, int mb, int64_t kc, const uint16_t *x, int64_t ldx, const char *w, int64_t apart,
                      int64_t ldw, float *c, int add, const Ahead *ahead, vu *widened) {
  vf acc[WIDE][VECTORS];
#pragma GCC unroll 8
  for (int j = 0; j < mb; j++)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) acc[j][v] = add ? load(c + (j * VECTORS + v) * LANES) : (vf){0};
  const char *next = ahead->at;
  for (int64_t i = 0; i < kc; i += 2, w += ldw, next += ahead->step) {
    vu pairs[VECTORS];
#pragma GCC unroll 4
    for (int line = 0; line < lines; line++) __builtin_prefetch(next + line * 64, 0, 2);
    pairs_of(kind, w, pairs);
    pairs_of(kind, w + apart, pairs + 2);
    if (widened)
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++) *widened++ = pairs[v];
#pragma GCC unroll 8
    for (int j = 0; j < mb; j++) {
      const vu in = pair_at(x, j * ldx + i);
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++) acc[j][v] = add_pairs(acc[j][v], pairs[v], in);
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
  static void name(int mb, int64_t kc, const uint16_t *x, int64_t ldx, const char *w, int64_t apart, int64_t ldw, \
                   float *c, int add, const Ahead *ahead, vu *widened) { \
    (void)widened; \
    switch (mb) { /* constants, so that each case is unrolled */ \
      WIDE_CASE(kind, lines, 1) WIDE_CASE(kind, lines, 2) WIDE_CASE(kind, lines, 3) \
      WIDE_CASE(kind, lines, 4) WIDE_CASE(kind, lines, 5) WIDE_CASE(kind, lines, 6) } }
#define WIDENED widened
WIDE_FUNCTION(wide_of_bytes, INT8_HALF, 1)
#undef WIDENED
#define WIDENED NULL
WIDE_FUNCTION(wide_of_twelve, TWELVE, 1)
WIDE_FUNCTION(wide_alone, BF16, 4) /* the only tile of its rows asks for all weights that come next */
WIDE_FUNCTION(wide_of_many, BF16, 1)
#endif

typedef void (*Tile)(int mb, int kc, const void *x, const char *w, int64_t ldw, float *c, int64_t ldc, int add,
                     const Ahead *ahead);

/* In tiles of about the same number of rows. `ldw`: from one row of weights to the next, in bytes. */
INLINE void in_tiles(Tile tile, int kind, int m, int kc, const void *x, const char *w, int64_t ldw, float *c,
                     int64_t ldc, int add) {
  const int n = (int)parts(m, MB), rows = parts(kc, AT_ONCE(kind));
  const int64_t step = ldw / n;
  for (int left = n, at = 0; left; left--) {
    const int mb = (m - at) / left;
    const Ahead ahead = {w + rows * (ldw + (n - left) * step), step};
    tile(mb, kc, (const char *)x + at * KC * input_size(kind), w, ldw, c + at * ldc, ldc, add, &ahead);
    at += mb;
  }
}

void multiply(int half, int m, int kc, const void *x, const void *w, float *c, int64_t ldc, int add) {
#ifdef TILES
  const Inputs inputs = {x, 2 * KC, 2 * DEPTH, 2 * SIDE * 2 * KC};
  if (half) multiply_tiles(m, parts(kc, DEPTH), inputs, w, c, ldc, add);
#else
  if (half) in_tiles(near_bf16, BF16, m, kc, x, w, row_of(BF16, PANEL), c, ldc, add);
#endif
  else in_tiles(near_f32, F32, m, kc, x, w, row_of(F32, PANEL), c, ldc, add);
}

/* [kc][PANEL] floats */
INLINE void widen_panel(int kind, int kc, const char *w, int64_t ldw, float *out) {
  for (int i = 0; i < kc; i += AT_ONCE(kind), w += ldw) {
    vf rows[2][2];
    widen(kind, w, rows);
    for (int odd = 0; odd < AT_ONCE(kind); odd++) {
      store(out + (i + odd) * PANEL, rows[odd][0]);
      store(out + (i + odd) * PANEL + LANES, rows[odd][1]);
    }
  }
}

/* sums [m][lds] = x W. x: [ceil(k / KC)][m][KC] */
static void product(const Linear *l, int64_t p, int m, const char *x, float *sums, int64_t lds, Bench *b) {
  const char *w = weights_to(l, p * PANEL);
  const int64_t ldw = row_of(l->kind, l->block);
  b->widened = NULL;
  for (int64_t from = 0; from < l->k; from += KC, x += m * KC * input_size(l->kind), w += KC / AT_ONCE(l->kind) * ldw) {
    const int kc = (int)smaller(KC, l->k - from);
    if (l->kind == F32 || HALF_INPUTS(l->kind) || m <= 2 * MB) {
      if (l->kind == F32) in_tiles(tile_f32, F32, m, kc, x, w, ldw, sums, lds, from > 0);
      else if (l->kind == BF16) in_tiles(tile_bf16, BF16, m, kc, x, w, ldw, sums, lds, from > 0);
#ifdef BY_VECTORS
      else if (l->kind == INT8_HALF) in_tiles(tile_int8_half, INT8_HALF, m, kc, x, w, ldw, sums, lds, from > 0);
      else if (l->kind == TWELVE) in_tiles(tile_twelve, TWELVE, m, kc, x, w, ldw, sums, lds, from > 0);
#endif
      else in_tiles(tile_int8, INT8, m, kc, x, w, ldw, sums, lds, from > 0);
      continue;
    }
    if (l->kind == BF16) widen_panel(BF16, kc, w, ldw, b->panel); /* once for all the rows */
    else widen_panel(INT8, kc, w, ldw, b->panel);
    multiply(0, m, kc, x, b->panel, sums, lds, from > 0);
  }
}

/* y [m, PANEL], the outputs of a panel, (+)= sums [m][lds] * scale + bias */
static void finish(const Linear *l, int64_t p, int m, const float *sums, int64_t lds, float *y, int64_t ldy, int add) {
  const int64_t n0 = p * PANEL, n = smaller(PANEL, l->n - n0);
  for (int j = 0; j < m; j++) {
    const float *in = sums + j * lds;
    float *out = y + j * ldy;
    if (n == PANEL && !l->bias) {
      for (int c = 0; c < PANEL; c += LANES) {
        const vf total = l->scale ? load(in + c) * load(l->scale + n0 + c) : load(in + c);
        store(out + c, add ? load(out + c) + total : total);
      }
      continue;
    }
    for (int64_t c = 0; c < n; c++) {
      float total = in[c];
      if (l->scale) total *= l->scale[n0 + c];
      if (l->bias) total += l->bias[n0 + c];
      out[c] = add ? out[c] + total : total;
    }
  }
}

/* y [m, PANEL] = silu(gates) * ups, whose sums [m][PAIR] are those of panels p and q. */
static void finish_gated(const Linear *l, int64_t p, int64_t q, int m, float *sums, float *y, int64_t ldy) {
  if (l->bias || l->scale) {
    finish(l, p, m, sums, PAIR, sums, PAIR, 0);
    finish(l, q, m, sums + PANEL, PAIR, sums + PANEL, PAIR, 0);
  }
  for (int j = 0; j < m; j++) silu_mul(sums + j * PAIR, sums + j * PAIR + PANEL, y + j * ldy, PANEL);
}

#ifdef TILES
#define SOME 8 /* rows that are finished at a time */

/* A panel, or both of the same outputs, for ROWS inputs at most. */
typedef struct {
  const Linear *l;
  int64_t p, q, first, rows, done; /* its panel, or both; its inputs; how many of them are finished */
  Activations y;
  How how;
  float *sums; /* [rows][PANEL], twice where GATED */
} MapUnit;

/* y [n, PANEL] = silu(gates) * ups, for rows from `at` on. */
static void finish_gates(const MapUnit *u, int64_t at, int64_t n) {
  float *gates = u->sums + at * PANEL, *ups = gates + ROWS * PANEL;
  const int64_t ldy = u->l->n / 2;
  if (u->l->bias || u->l->scale) {
    finish(u->l, u->p, (int)n, gates, PANEL, gates, PANEL, 0);
    finish(u->l, u->q, (int)n, ups, PANEL, ups, PANEL, 0);
  }
  for (int64_t j = 0; j < n; j++) {
    float *to = u->y.packed ? gates + j * PANEL : (float *)u->y.at + (u->first + at + j) * ldy + u->p * PANEL;
    silu_mul(gates + j * PANEL, ups + j * PANEL, to, PANEL);
    if (u->y.packed) narrow(to, PANEL, packed_at(u->y.at, ldy, u->first + at + j, u->p * PANEL));
  }
}

static void finish_some(MapUnit *u, int64_t most) {
  const int64_t n = smaller(most, u->rows - u->done), at = u->done;
  float *y = (float *)u->y.at + (u->first + at) * u->l->n + u->p * PANEL;
  if (u->how == GATED) finish_gates(u, at, n);
  else finish(u->l, u->p, (int)n, u->sums + at * PANEL, PANEL, y, u->l->n, u->how == ADD);
  u->done += n;
}

static void finish_meanwhile(void *unit) { finish_some(unit, SOME); }

/* The sums of a unit. Meanwhile the one before is finished. */
static void compute_unit_on_tiles(MapUnit *u, MapUnit *before, Inputs x, Bench *b) {
  const Linear *l = u->l;
  const int64_t panels = parts(l->n, PANEL), units = u->how == GATED ? panels / 2 : panels, next = (u->p + 1) % units;
  b->meanwhile = before->done < before->rows ? finish_meanwhile : NULL;
  b->of = before;
  x.at += u->first / (2 * SIDE) * x.block;
  sums_on_tiles(l, u->p, u->how == GATED ? u->q : next, u->rows, x, u->sums, b);
  if (u->how == GATED) sums_on_tiles(l, u->q, next, u->rows, x, u->sums + ROWS * PANEL, b);
  b->meanwhile = NULL;
  finish_some(before, ROWS);
}

static void linear_on_tiles(const Linear *l, int64_t m, Activations x, Activations y, How how, Bench *b) {
  const int64_t panels = parts(l->n, PANEL), each = how == GATED ? panels / 2 : panels;
  MapUnit units[2] = {{.l = l}, {.l = l}};
  b->widened = NULL;
  if (!x.packed) {
#pragma omp for schedule(static)
    for (int64_t j = 0; j < m; j++) pack_row((const float *)x.at + j * l->k, l->k, j, b->packed);
  }
  const Inputs inputs = packed_inputs(x.packed ? x.at : b->packed, l->k);
  int at = 0;
  if (m) fit_tiles(m);
#pragma omp for schedule(guided, 1) nowait
  for (int64_t i = 0; i < parts(m, ROWS) * each; i++) {
    const int64_t first = i / each * ROWS, p = i % each;
    units[at] = (MapUnit){l, p, p + each, first, smaller(ROWS, m - first), 0, y, how, b->sums + at * ROWS * PAIR};
    compute_unit_on_tiles(units + at, units + !at, inputs, b);
    at = !at;
  }
  finish_some(units, ROWS);
  finish_some(units + 1, ROWS);
  fit_tiles(2 * SIDE);
#pragma omp barrier
}
#endif

/* x [m, k] -> [ceil(k / KC)][m][KC], as the products with this kind of weights take it */
static void slice(int kind, const float *x, int64_t ldx, int64_t m, int64_t k, char *out) {
  for (int64_t from = 0; from < k; from += KC)
    for (int64_t j = 0; j < m; j++, out += KC * input_size(kind)) {
      const float *in = x + j * ldx + from;
      const int64_t n = smaller(KC, k - from);
      if (HALF_INPUTS(kind)) narrow(in, n, (uint16_t *)out);
      else memcpy(out, in, sizeof(float) * (size_t)n);
    }
}

/* sums [m][lds]: those of a panel, for m <= ROWS inputs */
static void sums_of(const Linear *l, int64_t p, int m, const float *x, int64_t ldx, float *sums, int64_t lds, Bench *b) {
#ifdef TILES
  if (HALF_INPUTS(l->kind)) {
    for (int j = 0; x != b->held && j < m; j++) pack_row(x + j * ldx, l->k, j, b->inputs);
    b->held = x;
    sums_on_tiles(l, p, -1, m, packed_inputs(b->inputs, l->k), sums, b); /* only adapters come here: lds is PANEL */
    return;
  }
#endif
  const int as_is = m == 1 && !HALF_INPUTS(l->kind);
  if (!as_is && (x != b->held || b->whole_rows)) slice(l->kind, x, ldx, m, l->k, b->inputs);
  b->held = x;
  b->whole_rows = 0;
  product(l, p, m, as_is ? (const char *)x : b->inputs, sums, lds, b);
}

void outputs(const Linear *l, int64_t p, int m, const float *x, int64_t ldx, float *y, int64_t ldy, int add, Bench *b) {
  sums_of(l, p, m, x, ldx, b->sums, PANEL, b);
  finish(l, p, m, b->sums, PANEL, y + p * PANEL, ldy, add);
}

#ifdef BY_VECTORS
/* Whether wide tiles compute a pair of panels for m rows: for many rows, and for few where a block holds both panels. */
INLINE int is_wide(const Linear *l, int64_t m) {
  return HALF_INPUTS(l->kind) && (m > 2 * MB || (m <= WIDE && l->block == PAIR));
}

/* The outputs of panels p and q, in wide tiles. */
static void pair_of_outputs(const Linear *l, int64_t p, int64_t q, int m, const float *x, float *y, int64_t ldy, How how,
                            Bench *b) {
  const char *w = weights_to(l, p * PANEL);
  const int64_t k = l->k, row = row_of(l->kind, PAIR), ldw = row_of(l->kind, l->block);
  const int64_t apart = weights_to(l, q * PANEL) - w;
  const int n = (int)parts(m, WIDE), bytes = l->kind == INT8_HALF;
  const int64_t terms = n > 1 ? k : KC; /* of many rows, all: no sum waits in memory */
  uint16_t *halves = b->inputs;
  for (int j = 0; (x != b->held || !b->whole_rows) && j < m; j++) narrow(x + j * k, k, halves + j * k);
  b->held = x;
  b->whole_rows = 1;
  for (int64_t from = 0; from < k; from += terms, w += terms / 2 * ldw) {
    const int64_t kc = smaller(terms, k - from);
    for (int left = n, at = 0; left; left--) {
      const int mb = (m - at) / left;
      const uint16_t *in = halves + at * k + from;
      const int64_t share = kc / 2 * (n - left) * (row / n), panel = n > 1 ? l->stride * PANEL / l->block : kc / 4 * row;
      /* The next pair lies behind this one. If the panels lie apart, each one's next lies behind it. */
      const char *next = w - before_rows(l) + share;
      if (q == p + 1) next += 2 * panel;
      else next += share < panel ? panel : apart;
      const Ahead ahead = {next, row / n};
      if (bytes && left < n) /* widened by the first tile */
        wide_of_many(mb, kc, in, k, b->panel, row_of(BF16, PANEL), row_of(BF16, PAIR), b->sums, from > 0, &ahead, NULL);
      else
        (n == 1 ? wide_alone : l->kind == TWELVE ? wide_of_twelve : bytes ? wide_of_bytes : wide_of_many)(
            mb, kc, in, k, w, apart, ldw, b->sums, from > 0, &ahead, b->panel);
      if (from + kc == k && how == GATED) finish_gated(l, p, q, mb, b->sums, y + at * ldy + p * PANEL, ldy);
      else if (from + kc == k) {
        finish(l, p, mb, b->sums, PAIR, y + at * ldy + p * PANEL, ldy, how == ADD);
        finish(l, q, mb, b->sums + PANEL, PAIR, y + at * ldy + q * PANEL, ldy, how == ADD);
      }
      at += mb;
    }
  }
}
#else
INLINE int is_wide(const Linear *l, int64_t m) { return (void)l, (void)m, 0; }
#define pair_of_outputs(...) (void)0
#endif

/* The number of panels in a unit: what one thread takes at a time. */
INLINE int64_t unit_of(const Linear *l, int64_t m, How how) {
  return how == GATED || is_wide(l, m) ? 2 : l->block / PANEL;
}

/* Unit `i` of a map, for ROWS inputs at most. */
INLINE void compute_unit(const Linear *l, int64_t i, int64_t m, const float *x, float *y, How how, Bench *b) {
  const int64_t each = unit_of(l, m, how), panels = parts(l->n, PANEL), units = parts(panels, each);
  const int64_t first = i / units * ROWS, p0 = i % units * (how == GATED ? 1 : each), rows = smaller(ROWS, m - first);
  const int64_t q = how == GATED ? p0 + units : p0 + 1, ldy = how == GATED ? l->n / 2 : l->n;
  x += first * l->k;
  y += first * ldy;
  if (is_wide(l, rows) && (q + 1) * PANEL <= l->n) pair_of_outputs(l, p0, q, (int)rows, x, y, ldy, how, b);
  else if (how == GATED) {
    sums_of(l, p0, (int)rows, x, l->k, b->sums, PAIR, b);
    sums_of(l, q, (int)rows, x, l->k, b->sums + PANEL, PAIR, b);
    finish_gated(l, p0, q, (int)rows, b->sums, y + p0 * PANEL, ldy);
  } else
    for (int64_t p = p0; p < smaller(p0 + each, panels); p++)
      outputs(l, p, (int)rows, x, l->k, y, l->n, how == ADD, b);
}

void linear(const Linear *l, int64_t m, Activations x, Activations y, How how, Bench *b) {
  const int64_t units = parts(m, ROWS) * parts(parts(l->n, PANEL), unit_of(l, m, how)); /* 0 if a chunk wants no logits */
  b->held = NULL;
#ifdef TILES
  if (HALF_INPUTS(l->kind)) {
    linear_on_tiles(l, m, x, y, how, b);
    return;
  }
#endif
  if (m > ROWS) {
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < units; i++) compute_unit(l, i, m, x.at, y.at, how, b);
  } else { /* neighbours in memory one after the other, but the last few to whoever is free */
#pragma omp for schedule(guided, 1)
    for (int64_t i = 0; i < (m ? units : 0); i++) compute_unit(l, i, m, x.at, y.at, how, b);
  }
}

/* Whether inputs beside weights in bfloat16 are bfloat16, and may be beside bytes. */
int32_t petiole_halves(void) { return HALF_INPUTS(BF16); }

/* Whether such products are made on tiles. */
int32_t petiole_tiles(void) {
#ifdef TILES
  return 1;
#else
  return 0;
#endif
}

/* ---------------------------------------------------------------- memory */

Bench new_bench(int64_t rows, int64_t k, Scratch *s) {
  const int64_t all = rows;
  rows = smaller(rows, ROWS);
  const int64_t tiled = parts(rows, 2 * SIDE) * 2 * SIDE;
  return (Bench){.packed = take(s, packed_size(all, k)),
                 .inputs = take_floats(s, parts(k, KC) * KC * tiled),
                 .sums = take_floats(s, 2 * ROWS * PAIR),
                 .panel = take_floats(s, parts(k, KC) * KC * PANEL)};
}
