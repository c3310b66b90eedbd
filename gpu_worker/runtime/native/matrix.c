/* Linear maps over weights that were rearranged once into panels of 32 outputs.
 *
 * A panel holds, for one input after another, the weights that lead to its outputs:
 *
 *     k = 0:  w[n0, 0]  w[n0 + 1, 0]  ...  w[n0 + 31, 0]
 *     k = 1:  w[n0, 1]  w[n0 + 1, 1]  ...
 *
 * or, in bfloat16, for two inputs after the next two:
 *
 *     k = 0, 1:  w[n0, 0] w[n0, 1]   w[n0 + 1, 0] w[n0 + 1, 1]  ...
 *
 * so a product is: take one input, multiply the vector beside it, add to the sums of 32 outputs. No sum crosses
 * lanes, weights are read in order, and each output is one chain of additions over k = 0, 1, 2, ... That chain is
 * the same for one input row and for 500, however they are blocked: the same bits in any batch.
 *
 * A panel takes the bytes that its rows took, so weights are rearranged where they lie.
 *
 * Where the processor multiplies bfloat16 (DOT), inputs are rounded to it beside weights in it; the sums are floats.
 */
#include "matrix.h"

#include <omp.h>

/* Input rows whose sums the registers hold. */
#ifdef __AVX512F__
#define MB 12
#else
#define MB 3
#endif

/* ---------------------------------------------------------------- panels */

/* Where the weight from input c to output n lies. A pair of bfloat16 makes one float's bits: the even one is shifted
 * up, the odd one masked. */
INLINE int64_t place(int kind, int64_t c, int n) {
  return kind == BF16 ? (c / 2 * PANEL + n) * 2 + c % 2 : c * PANEL + n;
}

/* rows [n <= PANEL, k] -> panel [k][PANEL], padded with zeros */
static void pack_panel(int kind, const char *rows, int n, int64_t k, char *panel) {
  const int64_t size = size_of(kind);
  if (n < PANEL) memset(panel, 0, (size_t)(k * PANEL * size));
  for (int64_t from = 0; from < k; from += 64) { /* a few lines of each row at a time */
    const int64_t to = smaller(k, from + 64);
    for (int i = 0; i < n; i++)
      for (int64_t c = from; c < to; c++) {
        const int64_t at = place(kind, c, i);
        if (kind == F32) ((float *)panel)[at] = ((const float *)rows)[i * k + c];
        else if (kind == BF16) ((uint16_t *)panel)[at] = ((const uint16_t *)rows)[i * k + c];
        else panel[at] = rows[i * k + c];
      }
  }
}

/* Rearranges the weights [n, k] of `l` in place; the last rows go to `tail`, [k][PANEL]. copies: scratch, one panel
 * for each thread. */
void petiole_pack(const Linear *l, char *copies, int32_t n_threads) {
  const int64_t bytes = l->k * PANEL * size_of(l->kind), whole = l->n / PANEL;
#pragma omp parallel for schedule(static) num_threads(n_threads)
  for (int64_t p = 0; p < whole; p++) {
    char *panel = (char *)l->weight + p * bytes, *rows = copies + omp_get_thread_num() * bytes;
    memcpy(rows, panel, (size_t)bytes);
    pack_panel(l->kind, rows, PANEL, l->k, panel);
  }
  if (l->n % PANEL) pack_panel(l->kind, l->weight + whole * bytes, l->n % PANEL, l->k, (char *)l->tail);
}

INLINE const char *panel_of(const Linear *l, int64_t p) {
  return p < l->n / PANEL ? l->weight + p * l->k * PANEL * size_of(l->kind) : l->tail;
}

#define AT_ONCE(kind) ((kind) == BF16 ? 2 : 1)

/* Rows i .. i + AT_ONCE - 1 of a panel. */
INLINE void widen(int kind, const void *panel, int64_t i, vf rows[2][2]) {
#pragma GCC unroll 2
  for (int half = 0; half < 2; half++) {
    const char *p = (const char *)panel + (i * PANEL + half * LANES * AT_ONCE(kind)) * size_of(kind);
    if (kind == F32) rows[0][half] = load((const float *)p);
    else if (kind == INT8) rows[0][half] = __builtin_convertvector(widen_bytes(p), vf);
    else {
      const vu pairs = *(const vu *)p;
      rows[0][half] = (vf)(pairs << 16);
      rows[1][half] = (vf)(pairs & 0xFFFF0000u);
    }
  }
}

void embed(const Linear *l, int64_t t, const int64_t *ids, float *out) {
#pragma omp for schedule(static)
  for (int64_t i = 0; i < t; i++) {
    const char *panel = panel_of(l, ids[i] / PANEL);
    const int n = (int)(ids[i] % PANEL);
    for (int64_t c = 0; c < l->k; c++) __builtin_prefetch(panel + place(l->kind, c, n) * size_of(l->kind));
    for (int64_t c = 0; c < l->k; c++) {
      const int64_t at = place(l->kind, c, n);
      uint32_t bits = l->kind == F32 ? ((const uint32_t *)panel)[at] : (uint32_t)((const uint16_t *)panel)[at] << 16;
      memcpy(out + i * l->k + c, &bits, 4);
    }
  }
}

/* ---------------------------------------------------------------- products */

INLINE int64_t input_size(int kind) { return HALF_INPUTS(kind) ? 2 : 4; }

INLINE void add_products(int kind, int mb, int64_t i, const void *x, const void *w, vf acc[MB][2]) {
#ifdef DOT
  if (HALF_INPUTS(kind)) {
    const vu *pairs = (const vu *)((const char *)w + i * PANEL * 2);
    const vu low = pairs[0], high = pairs[1];
#pragma GCC unroll 16
    for (int j = 0; j < mb; j++) {
      uint32_t pair;
      memcpy(&pair, (const uint16_t *)x + j * KC + i, 4);
      acc[j][0] = add_pairs(acc[j][0], low, pair - (vu){0});
      acc[j][1] = add_pairs(acc[j][1], high, pair - (vu){0});
    }
    return;
  }
#endif
  vf rows[2][2];
  widen(kind, w, i, rows);
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

INLINE void tile(int kind, int mb, int kc, const void *x, const void *w, float *c, int64_t ldc, int add, const Ahead *ahead) {
  vf acc[MB][2];
#pragma GCC unroll 16
  for (int j = 0; j < mb; j++) {
    acc[j][0] = add ? load(c + j * ldc) : (vf){0};
    acc[j][1] = add ? load(c + j * ldc + LANES) : (vf){0};
  }
  const char *next = ahead ? ahead->at : NULL;
  const int64_t step = ahead ? ahead->step : 0;
  for (int64_t i = 0; i < kc; i += AT_ONCE(kind)) {
    if (ahead) {
      __builtin_prefetch(next, 0, 2);
      __builtin_prefetch(next + 64, 0, 2);
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

#define TILE_CASE(kind, mb) case mb: tile(kind, mb, kc, x, w, c, ldc, add, AHEAD); break;
#define TILE_FUNCTION(name, kind) \
  static void name(int mb, int kc, const void *x, const void *w, float *c, int64_t ldc, int add, const Ahead *ahead) { \
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
#undef AHEAD
#define AHEAD NULL
TILE_FUNCTION(near_f32, F32)
TILE_FUNCTION(near_bf16, BF16)

typedef void (*Tile)(int mb, int kc, const void *x, const void *w, float *c, int64_t ldc, int add, const Ahead *ahead);

/* In tiles of about the same number of rows. */
INLINE void in_tiles(Tile tile, int kind, int m, int kc, const void *x, const void *w, float *c, int64_t ldc, int add) {
  const int n = (int)parts(m, MB), rows = parts(kc, AT_ONCE(kind));
  const int64_t step = AT_ONCE(kind) * PANEL * size_of(kind) / n;
  for (int left = n, at = 0; left; left--) {
    const int mb = (m - at) / left;
    const Ahead ahead = {(const char *)w + (rows * (AT_ONCE(kind) * PANEL * size_of(kind) + (n - left) * step)), step};
    tile(mb, kc, (const char *)x + at * KC * input_size(kind), w, c + at * ldc, ldc, add, &ahead);
    at += mb;
  }
}

void multiply(int half, int m, int kc, const void *x, const void *w, float *c, int64_t ldc, int add) {
  if (half) in_tiles(near_bf16, BF16, m, kc, x, w, c, ldc, add);
  else in_tiles(near_f32, F32, m, kc, x, w, c, ldc, add);
}

/* [kc][PANEL] floats */
INLINE void widen_panel(int kind, int kc, const char *w, float *out) {
  for (int i = 0; i < kc; i += AT_ONCE(kind)) {
    vf rows[2][2];
    widen(kind, w, i, rows);
    for (int odd = 0; odd < AT_ONCE(kind); odd++) {
      store(out + (i + odd) * PANEL, rows[odd][0]);
      store(out + (i + odd) * PANEL + LANES, rows[odd][1]);
    }
  }
}

/* sums [m, PANEL] = x W. x: [ceil(k / KC)][m][KC] */
static void product(const Linear *l, const char *panel, int m, const char *x, Bench *b) {
  const int64_t row = PANEL * size_of(l->kind);
  for (int64_t from = 0; from < l->k; from += KC, x += m * KC * input_size(l->kind)) {
    const int kc = (int)smaller(KC, l->k - from);
    const char *w = panel + from * row;
    if (l->kind == F32 || HALF_INPUTS(l->kind) || m <= 2 * MB) {
      if (l->kind == F32) in_tiles(tile_f32, F32, m, kc, x, w, b->sums, PANEL, from > 0);
      else if (l->kind == BF16) in_tiles(tile_bf16, BF16, m, kc, x, w, b->sums, PANEL, from > 0);
      else in_tiles(tile_int8, INT8, m, kc, x, w, b->sums, PANEL, from > 0);
      continue;
    }
    if (l->kind == BF16) widen_panel(BF16, kc, w, b->panel); /* once for all the rows */
    else widen_panel(INT8, kc, w, b->panel);
    multiply(0, m, kc, x, b->panel, b->sums, PANEL, from > 0);
  }
}

/* y [m, n at p] (+)= sums * scale + bias */
static void finish(const Linear *l, int64_t p, int m, const float *sums, float *y, int64_t ldy, int add) {
  const int64_t n0 = p * PANEL, n = smaller(PANEL, l->n - n0);
  for (int j = 0; j < m; j++) {
    const float *in = sums + j * PANEL;
    float *out = y + j * ldy + n0;
    if (n == PANEL && !l->bias && l->kind != INT8) {
      for (int c = 0; c < PANEL; c += LANES) store(out + c, add ? load(out + c) + load(in + c) : load(in + c));
      continue;
    }
    for (int64_t c = 0; c < n; c++) {
      float total = in[c];
      if (l->kind == INT8) total *= l->scale[n0 + c];
      if (l->bias) total += l->bias[n0 + c];
      out[c] = add ? out[c] + total : total;
    }
  }
}

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

void outputs(const Linear *l, int64_t p, int m, const float *x, int64_t ldx, float *y, int64_t ldy, int add, Bench *b) {
  const int as_is = m == 1 && !HALF_INPUTS(l->kind);
  if (!as_is && x != b->held) slice(l->kind, x, ldx, m, l->k, b->inputs);
  b->held = x;
  product(l, panel_of(l, p), m, as_is ? (const char *)x : b->inputs, b);
  finish(l, p, m, b->sums, y, ldy, add);
}

void linear(const Linear *l, int64_t m, const float *x, float *y, int add, Bench *b) {
  const int64_t panels = parts(l->n, PANEL), blocks = parts(m, ROWS);
  const int chunk = (int)(blocks > 1 ? 1 : panels / (8 * omp_get_num_threads()) + 1);
  b->held = NULL;
#pragma omp for schedule(dynamic, chunk)
  for (int64_t unit = 0; unit < blocks * panels; unit++) {
    const int64_t first = unit / panels * ROWS;
    const int rows = (int)smaller(ROWS, m - first);
    outputs(l, unit % panels, rows, x + first * l->k, l->k, y + first * l->n, l->n, add, b);
  }
}

/* ---------------------------------------------------------------- memory */

Bench new_bench(int64_t rows, int64_t k, Scratch *s) {
  rows = smaller(rows, ROWS);
  return (Bench){.inputs = take_floats(s, parts(k, KC) * KC * rows),
                 .sums = take_floats(s, rows * PANEL),
                 .panel = take_floats(s, KC * PANEL)};
}
