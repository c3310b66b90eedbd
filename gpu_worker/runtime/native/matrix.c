/* Linear maps over weights that were rearranged once into panels of 32 outputs.
 *
 * A panel holds, for one input after another, the weights that lead to its outputs:
 *
 *     k = 0:  w[n0, 0]  w[n0 + 1, 0]  ...  w[n0 + 31, 0]
 *     k = 1:  w[n0, 1]  w[n0 + 1, 1]  ...                    (bfloat16: see `place`)
 *
 * so a product is: take one input, multiply the vector beside it, add to the sums of 32 outputs. No sum crosses
 * lanes, weights are read in order, and each output is one chain of additions over k = 0, 1, 2, ... That chain is
 * the same for one input row and for 500, however they are blocked: the same bits in any batch.
 *
 * A panel takes the bytes that its rows took, so weights are rearranged where they lie.
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

/* Where output n of a panel lies. A bfloat16 is the upper half of a float: even places are shifted up, odd ones
 * masked, and both are vectors of neighbours. */
INLINE int place(int kind, int n) { return kind == BF16 ? 2 * (n % LANES) + n / LANES : n; }

/* rows [n <= PANEL, k] -> panel [k][PANEL], padded with zeros */
static void pack_panel(int kind, const char *rows, int n, int64_t k, char *panel) {
  const int64_t size = size_of(kind);
  if (n < PANEL) memset(panel, 0, (size_t)(k * PANEL * size));
  for (int64_t from = 0; from < k; from += 64) { /* a few lines of each row at a time */
    const int64_t to = smaller(k, from + 64);
    for (int i = 0; i < n; i++) {
      const int at = place(kind, i);
      if (kind == F32) for (int64_t c = from; c < to; c++) ((float *)panel)[c * PANEL + at] = ((const float *)rows)[i * k + c];
      else if (kind == BF16) for (int64_t c = from; c < to; c++) ((uint16_t *)panel)[c * PANEL + at] = ((const uint16_t *)rows)[i * k + c];
      else for (int64_t c = from; c < to; c++) panel[c * PANEL + at] = rows[i * k + c];
    }
  }
}

/* Rearranges the weights [n, k] of `l` in place; the last rows go to `tail`, [k][PANEL]. */
void petiole_pack(const Linear *l, int32_t n_threads) {
  const int64_t bytes = l->k * PANEL * size_of(l->kind), whole = l->n / PANEL;
#pragma omp parallel num_threads(n_threads)
  {
    char *rows = malloc((size_t)bytes);
#pragma omp for schedule(static)
    for (int64_t p = 0; p < whole; p++) {
      char *panel = (char *)l->weight + p * bytes;
      memcpy(rows, panel, (size_t)bytes);
      pack_panel(l->kind, rows, PANEL, l->k, panel);
    }
    free(rows);
  }
  if (l->n % PANEL) pack_panel(l->kind, l->weight + whole * bytes, l->n % PANEL, l->k, (char *)l->tail);
}

INLINE const char *panel_of(const Linear *l, int64_t p) {
  return p < l->n / PANEL ? l->weight + p * l->k * PANEL * size_of(l->kind) : l->tail;
}

/* Row i of a panel. */
INLINE void widen(int kind, const void *panel, int64_t i, vf *low, vf *high) {
  if (kind == F32) {
    *low = load((const float *)panel + i * PANEL);
    *high = load((const float *)panel + i * PANEL + LANES);
  } else if (kind == BF16) {
    vu both = *(const vu *)((const char *)panel + i * PANEL * 2);
    *low = (vf)(both << 16);
    *high = (vf)(both & 0xFFFF0000u);
  } else {
    const char *p = (const char *)panel + i * PANEL;
    *low = __builtin_convertvector(widen_bytes(p), vf);
    *high = __builtin_convertvector(widen_bytes(p + LANES), vf);
  }
}

/* vocabulary rows of a packed embedding: out [t, k] */
void petiole_embed(const Linear *l, int64_t t, const int64_t *ids, float *out) {
  for (int64_t i = 0; i < t; i++) {
    const int at = place(l->kind, (int)(ids[i] % PANEL));
    const char *panel = panel_of(l, ids[i] / PANEL);
    for (int64_t c = 0; c < l->k; c++) {
      if (l->kind == F32) {
        out[i * l->k + c] = ((const float *)panel)[c * PANEL + at];
        continue;
      }
      uint32_t bits = (uint32_t)((const uint16_t *)panel)[c * PANEL + at] << 16;
      memcpy(out + i * l->k + c, &bits, 4);
    }
  }
}

/* ---------------------------------------------------------------- products */

INLINE void tile(int kind, int mb, int kc, const float *x, const void *w, float *c, int64_t ldc, int add) {
  vf acc[MB][2];
#pragma GCC unroll 16
  for (int j = 0; j < mb; j++) {
    acc[j][0] = add ? load(c + j * ldc) : (vf){0};
    acc[j][1] = add ? load(c + j * ldc + LANES) : (vf){0};
  }
  for (int64_t i = 0; i < kc; i++) {
    vf low, high;
    widen(kind, w, i, &low, &high);
    if (mb <= 4) __builtin_prefetch((const char *)w + i * PANEL * size_of(kind) + 2048);
#pragma GCC unroll 16
    for (int j = 0; j < mb; j++) {
      vf in = splat(x[j * KC + i]);
      acc[j][0] += low * in;
      acc[j][1] += high * in;
    }
  }
#pragma GCC unroll 16
  for (int j = 0; j < mb; j++) {
    store(c + j * ldc, acc[j][0]);
    store(c + j * ldc + LANES, acc[j][1]);
  }
}

#define TILE_CASE(kind, mb) case mb: tile(kind, mb, kc, x, w, c, ldc, add); break;
#define TILE_FUNCTION(name, kind) \
  static void name(int mb, int kc, const float *x, const void *w, float *c, int64_t ldc, int add) { \
    switch (mb) { /* constants, so that each case is unrolled */ \
      TILE_CASE(kind, 1) TILE_CASE(kind, 2) TILE_CASE(kind, 3) MORE_TILES(kind) } }
#if MB == 12
#define MORE_TILES(kind) \
  TILE_CASE(kind, 4) TILE_CASE(kind, 5) TILE_CASE(kind, 6) TILE_CASE(kind, 7) TILE_CASE(kind, 8) \
  TILE_CASE(kind, 9) TILE_CASE(kind, 10) TILE_CASE(kind, 11) TILE_CASE(kind, 12)
#else
#define MORE_TILES(kind)
#endif
TILE_FUNCTION(tile_f32, F32)
TILE_FUNCTION(tile_bf16, BF16)
TILE_FUNCTION(tile_int8, INT8)

/* In tiles of about the same number of rows. */
INLINE void multiply_kind(int kind, int m, int kc, const float *x, const void *w, float *c, int64_t ldc, int add) {
  for (int tiles = (int)parts(m, MB), at = 0; tiles; tiles--) {
    const int mb = (m - at) / tiles;
    if (kind == F32) tile_f32(mb, kc, x + at * KC, w, c + at * ldc, ldc, add);
    else if (kind == BF16) tile_bf16(mb, kc, x + at * KC, w, c + at * ldc, ldc, add);
    else tile_int8(mb, kc, x + at * KC, w, c + at * ldc, ldc, add);
    at += mb;
  }
}

void multiply(int m, int kc, const float *x, const float *w, float *c, int64_t ldc, int add) {
  multiply_kind(F32, m, kc, x, w, c, ldc, add);
}

/* sums [m, PANEL] = x W. x: [ceil(k / KC)][m][KC] */
static void product(const Linear *l, const char *panel, int m, const float *x, Bench *b) {
  const int64_t row = PANEL * size_of(l->kind);
  for (int64_t from = 0; from < l->k; from += KC, x += m * KC) {
    const int kc = (int)smaller(KC, l->k - from);
    const char *w = panel + from * row;
    if (l->kind == F32 || m <= 2 * MB) {
      multiply_kind(l->kind, m, kc, x, w, b->sums, PANEL, from > 0);
      continue;
    }
    for (int i = 0; i < kc; i++) { /* widen once for all the rows */
      vf low, high;
      if (l->kind == BF16) widen(BF16, w, i, &low, &high);
      else widen(INT8, w, i, &low, &high);
      store(b->panel + i * PANEL, low);
      store(b->panel + i * PANEL + LANES, high);
    }
    multiply(m, kc, x, b->panel, b->sums, PANEL, from > 0);
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

/* x [m, k] -> [ceil(k / KC)][m][KC] */
static void slice(const float *x, int64_t ldx, int64_t m, int64_t k, float *out) {
  for (int64_t from = 0; from < k; from += KC)
    for (int64_t j = 0; j < m; j++, out += KC)
      memcpy(out, x + j * ldx + from, sizeof(float) * (size_t)smaller(KC, k - from));
}

void outputs(const Linear *l, int64_t p, int m, const float *x, int64_t ldx, float *y, int64_t ldy, int add, Bench *b) {
  if (m > 1 && x != b->held) slice(x, ldx, m, l->k, b->inputs);
  b->held = x;
  product(l, panel_of(l, p), m, m > 1 ? b->inputs : x, b);
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

static float *floats(int64_t n) { return aligned_alloc(64, (size_t)parts(n * 4, 64) * 64); }

Bench new_bench(int64_t rows, int64_t k) {
  rows = smaller(rows, ROWS);
  return (Bench){floats(parts(k, KC) * KC * rows), NULL, floats(rows * PANEL), floats(KC * PANEL)};
}

void free_bench(Bench *b) {
  free(b->inputs);
  free(b->sums);
  free(b->panel);
}
