/* Linear maps over weights that were rearranged once into blocks of outputs.
 *
 * A block holds, for one input after another, the weights that lead to its outputs:
 *
 *     k = 0:  w[n0, 0]  w[n0 + 1, 0]  ...  w[n0 + block - 1, 0]
 *     k = 1:  w[n0, 1]  w[n0 + 1, 1]  ...
 *
 * or, in bfloat16, for two inputs after the next two:
 *
 *     k = 0, 1:  w[n0, 0] w[n0, 1]   w[n0 + 1, 0] w[n0 + 1, 1]  ...
 *
 * A block has one panel of 32 outputs, or two side by side where a library reads the same weights (library.h). A
 * product is: take one input, multiply the vector beside it, add to the sums of a panel's 32 outputs. No sum crosses
 * lanes, weights are read in order, and each output is one chain of additions over k = 0, 1, 2, ... That chain is
 * the same for one input row and for 500, however they are blocked: the same bits in any batch.
 *
 * A block takes the bytes that its rows took, so weights are rearranged where they lie.
 *
 * Where the processor multiplies bfloat16 (DOT), inputs are rounded to it beside weights in it; the sums are floats.
 *
 * There, weights in bfloat16 are kept in 12 bits, without loss (BF12). Of the 8 bits of an exponent, most say nothing: the
 * exponents of nearly all weights to an output are among the 15 highest. So a weight is a byte, its sign and mantissa,
 * and 4 bits: 0 for zero, else how far its exponent lies below the output's highest, from 1 on. For two inputs and 32
 * outputs:
 *
 *     64 bytes, 32 bytes of twice 4 bits
 *
 * Where one of these weights has a lower exponent, all 64 lie behind the block in bfloat16. The first 4 bytes tell where,
 * and the byte behind the 64 is RAW. An output's weights are scaled so that the highest exponent is that of 1. The output
 * is scaled back, which is exact for powers of two: the same bits as from bfloat16.
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
INLINE int64_t place(int kind, int64_t block, int64_t c, int64_t n) {
  return kind == BF16 ? (c / 2 * block + n) * 2 + c % 2 : c * block + n;
}

/* rows [n <= block, k] -> one block [k][block], padded with zeros */
static void pack_block(int kind, int64_t block, const char *rows, int n, int64_t k, char *out) {
  const int64_t size = size_of(kind), squares = kind == BF16 && n == block ? k / (2 * LANES) * 2 * LANES : 0;
  if (n < block) memset(out, 0, (size_t)(k * block * size));
  for (int64_t c = 0; c < squares; c += 2 * LANES) /* pairs of bfloat16 change place as one lane */
    for (int i = 0; i < n; i += LANES) {
      vu square[LANES];
      for (int j = 0; j < LANES; j++) square[j] = *(const vu *)((const uint16_t *)rows + (i + j) * k + c);
      transpose(square);
      for (int j = 0; j < LANES; j++) *(vu *)((uint32_t *)out + (c / 2 + j) * block + i) = square[j];
    }
  for (int64_t from = squares; from < k; from += 64) { /* a few lines of each row at a time */
    const int64_t to = smaller(k, from + 64);
    for (int i = 0; i < n; i++)
      for (int64_t c = from; c < to; c++) {
        const int64_t at = place(kind, block, c, i);
        if (kind == F32) ((float *)out)[at] = ((const float *)rows)[i * k + c];
        else if (kind == BF16) ((uint16_t *)out)[at] = ((const uint16_t *)rows)[i * k + c];
        else out[at] = rows[i * k + c];
      }
  }
}

/* ---------------------------------------------------------------- twelve bits */

#define ROW12 96 /* bytes for two inputs and a panel's outputs */
#define RAW 0xFF /* instead of the 4 bits of two weights, which are both the lowest exponent: no such pair is kept */
#define MOST12 15

INLINE int exponent(uint16_t bits) { return bits >> 7 & 0xFF; }

/* Where the weight to output n from the first or second (odd) input lies among the 64. */
INLINE int place12(int n, int odd) { return n % 16 / 4 * 16 + n / 16 * 8 + n % 4 * 2 + odd; }

/* The highest exponent of k weights; 0 if all are zero; -1 if they do not fit: one is infinite, not a number, or so small
 * that scaling would change it. */
static int highest(const uint16_t *w, int64_t k) {
  int most = 0, least = 255;
  for (int64_t c = 0; c < k; c++) {
    const int e = exponent(w[c]);
    if (e == 0 && w[c] & 0x7F) return -1;
    most = e > most ? e : most;
    least = e && e < least ? e : least;
  }
  return most == 255 || (most && least - most + 127 < 1) ? -1 : most;
}

/* w, whose output has this highest exponent, in bfloat16 as it is kept */
INLINE uint16_t scaled12(uint16_t w, int most) { return exponent(w) ? (uint16_t)(w + (127 - most) * 128) : w; }

/* rows [n <= PANEL, k] -> a block in 12 bits, or where out is null nothing. Rows behind the last are ones. Returns how
 * many rows of 64 weights are raw, or -1 if some weights do not fit. scale: [n], out */
static int64_t pack12(const uint16_t *rows, int n, int64_t k, char *out, float *scale) {
  int most[PANEL];
  int64_t n_raw = 0;
  for (int i = 0; i < PANEL; i++) {
    if ((most[i] = i < n ? highest(rows + i * k, k) : 127) < 0) return -1;
    if (i < n) scale[i] = most[i] ? ldexpf(1.0f, most[i] - 127) : 1.0f;
  }
  for (int64_t c = 0; c < k; c += 2) {
    uint8_t row[ROW12] = {0};
    uint16_t raw[PANEL * 2];
    int fits = 1;
    for (int i = 0; i < PANEL; i++)
      for (int odd = 0; odd < 2; odd++) {
        const uint16_t w = i < n ? scaled12(rows[i * k + c + odd], most[i]) : 0x3F80;
        const int code = exponent(w) ? 128 - exponent(w) : 0, at = place12(i, odd);
        raw[i * 2 + odd] = w;
        fits &= code <= MOST12;
        row[at] = (uint8_t)(w >> 8 & 0x80) | (w & 0x7F);
        row[64 + at / 2] |= (uint8_t)((code & 15) << at % 2 * 4);
      }
    fits &= row[64] != RAW;
    if (!fits && out) {
      char *to = out + k / 2 * ROW12 + n_raw * (int64_t)sizeof(raw);
      const int32_t there = (int32_t)(to - (out + c / 2 * ROW12));
      memcpy(to, raw, sizeof(raw));
      memcpy(row, &there, sizeof(there));
      row[64] = RAW;
    }
    n_raw += !fits;
    if (out) memcpy(out + c / 2 * ROW12, row, ROW12);
  }
  return n_raw;
}

/* Packs the weights of `l` in 12 bits, if that makes them shorter. */
static int pack_all12(Linear *l, uint16_t *copies, int n_threads) {
  const int64_t k = l->k, panels = parts(l->n, PANEL), bytes = PANEL * k * 2;
  int64_t most = 0, unfit = 0;
#pragma omp parallel for schedule(static) reduction(max : most, unfit) num_threads(n_threads)
  for (int64_t p = 0; p < panels; p++) {
    const int64_t n = smaller(PANEL, l->n - p * PANEL);
    const int64_t raws = pack12((const uint16_t *)l->weight + p * PANEL * k, (int)n, k, NULL, (float *)l->scale + p * PANEL);
    unfit = unfit | (raws < 0);
    most = raws > most ? raws : most;
  }
  const int64_t stride = k / 2 * ROW12 + most * PANEL * 4;
  if (unfit || stride > bytes / 10 * 9) return 0;
  l->stride = stride;
#pragma omp parallel num_threads(n_threads)
  for (int64_t first = 0; first < panels; first += n_threads) { /* a block never reaches into rows that are not read */
    const int64_t p = first + omp_get_thread_num(), n = smaller(PANEL, l->n - p * PANEL);
    uint16_t *rows = copies + omp_get_thread_num() * PANEL * k;
    char *out = n < PANEL ? (char *)l->tail : (char *)l->weight + p * stride;
    if (p < panels) memcpy(rows, l->weight + p * bytes, (size_t)(n * k * 2));
#pragma omp barrier
    if (p < panels) pack12(rows, (int)n, k, out, (float *)l->scale + p * PANEL);
#pragma omp barrier
  }
  return 1;
}

/* Rearranges the weights [n, k] of `l` in place; the last rows go to `tail`, [k][block]. Those that do not fit into 12
 * bits become BF16. copies: scratch, one block for each thread. */
void petiole_pack(Linear *l, char *copies, int32_t n_threads) {
  if (l->kind == BF12) {
    if (pack_all12(l, (uint16_t *)copies, n_threads)) return;
    l->kind = BF16;
    l->scale = NULL;
  }
  const int64_t bytes = l->stride = l->k * l->block * size_of(l->kind), whole = l->n / l->block;
#pragma omp parallel for schedule(static) num_threads(n_threads)
  for (int64_t b = 0; b < whole; b++) {
    char *block = (char *)l->weight + b * bytes, *rows = copies + omp_get_thread_num() * bytes;
    memcpy(rows, block, (size_t)bytes);
    pack_block(l->kind, l->block, rows, l->block, l->k, block);
  }
  if (l->n % l->block)
    pack_block(l->kind, l->block, l->weight + whole * bytes, l->n % l->block, l->k, (char *)l->tail);
}

#define AT_ONCE(kind) ((kind) == BF16 || (kind) == INT8_HALF || (kind) == BF12 ? 2 : 1)

/* From the weights of AT_ONCE inputs to those of the next, in bytes. */
INLINE int64_t row_of(int kind, int64_t block) {
  return kind == BF12 ? block / PANEL * ROW12 : block * AT_ONCE(kind) * size_of(kind);
}

/* The block of output n. */
INLINE const char *block_of(const Linear *l, int64_t n) {
  const int64_t block = n / l->block;
  return block < l->n / l->block ? l->weight + block * l->stride : l->tail;
}

/* Where the weights of AT_ONCE inputs to output n begin. */
INLINE const char *weights_to(const Linear *l, int64_t n) {
  const int64_t within = n % l->block;
  return block_of(l, n) + (l->kind == BF12 ? 0 : place(l->kind, l->block, 0, within) * size_of(l->kind));
}

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

/* The weights to output n, in bfloat16 as they are kept. */
static void embed12(const Linear *l, int64_t n, float *out) {
  const char *rows = block_of(l, n);
  const int in = (int)(n % PANEL);
  for (int64_t c = 0; c < l->k; c++) {
    const uint8_t *row = (const uint8_t *)rows + c / 2 * ROW12;
    const int at = place12(in, c % 2), code = row[64 + at / 2] >> at % 2 * 4 & 15;
    uint32_t bits = (row[at] & 0x80u) << 8 | (row[at] & 0x7F) | (code ? (128u - code) << 7 : 0);
    if (row[64] == RAW) {
      int32_t there;
      uint16_t raw;
      memcpy(&there, row, sizeof(there));
      memcpy(&raw, row + there + (in * 2 + c % 2) * 2, sizeof(raw));
      bits = raw;
    }
    bits <<= 16;
    memcpy(out + c, &bits, sizeof(bits));
    out[c] *= l->scale[n];
  }
}

void embed(const Linear *l, int64_t t, const int64_t *ids, float *out) {
#pragma omp for schedule(static)
  for (int64_t i = 0; i < t; i++) {
    if (l->kind == BF12) {
      embed12(l, ids[i], out + i * l->k);
      continue;
    }
    const char *w = weights_to(l, ids[i]);
    for (int64_t c = 0; c < l->k; c++) __builtin_prefetch(w + place(l->kind, l->block, c, 0) * size_of(l->kind));
    for (int64_t c = 0; c < l->k; c++) {
      const int64_t at = place(l->kind, l->block, c, 0);
      uint32_t bits = l->kind == F32 ? ((const uint32_t *)w)[at] : (uint32_t)((const uint16_t *)w)[at] << 16;
      memcpy(out + i * l->k + c, &bits, 4);
    }
  }
}

/* ---------------------------------------------------------------- products */

INLINE int64_t input_size(int kind) { return HALF_INPUTS(kind) ? 2 : 4; }

#ifdef DOT
/* The weights of two inputs to 16 outputs, as pairs of bfloat16. */
INLINE vu pairs_at(int kind, const char *w, int half) {
  if (kind == BF16) return ((const vu *)w)[half];
  const vf even = __builtin_convertvector(widen_bytes(w + half * LANES), vf);
  const vf odd = __builtin_convertvector(widen_bytes(w + PANEL + half * LANES), vf);
  return (vu)even >> 16 | ((vu)odd & 0xFFFF0000u);
}
#endif

#ifdef DOT
/* Two exponents in bytes of bfloat16, by their 4 bits */
#define OF_12(of) of(0), of(127), of(126), of(125), of(124), of(123), of(122), of(121), of(120), of(119), of(118), \
  of(117), of(116), of(115), of(114), of(113)
#define UPPER_12(e) (e) >> 1
#define LOWER_12(e) (e) << 7 & 0xFF
static const uint8_t upper12[16] = {OF_12(UPPER_12)}, lower12[16] = {OF_12(LOWER_12)};

/* The weights of two inputs to a panel's outputs, as pairs of bfloat16. */
INLINE void load_pairs(int kind, const char *w, vu pairs[2]) {
  if (kind == BF12) {
    if (__builtin_expect((uint8_t)w[64] == RAW, 0)) {
      int32_t there;
      memcpy(&there, w, sizeof(there));
      for (int half = 0; half < 2; half++) pairs[half] = ((const vu *)(w + there))[half];
      return;
    }
    const __m512i upper = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)upper12));
    const __m512i lower = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)lower12));
    const __m512i byte = _mm512_loadu_si512(w), twice4 = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(w + 64)));
    const __m512i both = _mm512_or_si512(twice4, _mm512_slli_epi16(twice4, 4));
    const __m512i code = _mm512_and_si512(both, _mm512_set1_epi8(15));
    /* a | (b & c) */
    const __m512i high = _mm512_ternarylogic_epi64(_mm512_shuffle_epi8(upper, code), byte, _mm512_set1_epi8((char)0x80), 0xF8);
    const __m512i low = _mm512_ternarylogic_epi64(_mm512_shuffle_epi8(lower, code), byte, _mm512_set1_epi8(0x7F), 0xF8);
    pairs[0] = (vu)_mm512_unpacklo_epi8(low, high);
    pairs[1] = (vu)_mm512_unpackhi_epi8(low, high);
    return;
  }
  for (int half = 0; half < 2; half++) pairs[half] = pairs_at(kind, w, half);
}
#endif

/* w: the weights of inputs i .. i + AT_ONCE - 1 */
INLINE void add_products(int kind, int mb, int64_t i, const void *x, const char *w, vf acc[MB][2]) {
#ifdef DOT
  if (HALF_INPUTS(kind)) {
    vu pairs[2];
    load_pairs(kind, w, pairs);
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
#ifdef DOT
TILE_FUNCTION(tile_int8_half, INT8_HALF)
TILE_FUNCTION(tile_bf12, BF12)
#endif
#undef AHEAD
#define AHEAD NULL
TILE_FUNCTION(near_f32, F32)
TILE_FUNCTION(near_bf16, BF16)

#define WIDE (MB / 2)
#ifdef DOT
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
    load_pairs(kind, w, pairs);
    load_pairs(kind, w + apart, pairs + 2);
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
WIDE_FUNCTION(wide_of_twelve, BF12, 1)
#undef WIDENED
#define WIDENED NULL
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
  if (half) in_tiles(near_bf16, BF16, m, kc, x, w, row_of(BF16, PANEL), c, ldc, add);
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
  if (l->kind == BF12)
    for (const char *raw = w + l->k / 2 * ldw; raw < w + l->stride; raw += 64) __builtin_prefetch(raw, 0, 2);
  for (int64_t from = 0; from < l->k; from += KC, x += m * KC * input_size(l->kind), w += KC / AT_ONCE(l->kind) * ldw) {
    const int kc = (int)smaller(KC, l->k - from);
    if (l->kind == F32 || HALF_INPUTS(l->kind) || m <= 2 * MB) {
      if (l->kind == F32) in_tiles(tile_f32, F32, m, kc, x, w, ldw, sums, lds, from > 0);
      else if (l->kind == BF16) in_tiles(tile_bf16, BF16, m, kc, x, w, ldw, sums, lds, from > 0);
#ifdef DOT
      else if (l->kind == INT8_HALF) in_tiles(tile_int8_half, INT8_HALF, m, kc, x, w, ldw, sums, lds, from > 0);
      else if (l->kind == BF12) in_tiles(tile_bf12, BF12, m, kc, x, w, ldw, sums, lds, from > 0);
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
  for (int j = 0; j < m; j++) silu_mul(sums + j * PAIR, y + j * ldy, PANEL);
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

/* sums [m][lds]: those of a panel, for m <= ROWS inputs */
static void sums_of(const Linear *l, int64_t p, int m, const float *x, int64_t ldx, float *sums, int64_t lds, Bench *b) {
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

#ifdef DOT
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
  const int n = (int)parts(m, WIDE), shortened = l->kind != BF16;
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
      const char *next = w + 2 * panel + share;
      if (q != p + 1) next = share < panel ? w + panel + share : w + apart + share;
      const Ahead ahead = {next, row / n};
      if (shortened && left < n) /* widened by the first tile */
        wide_of_many(mb, kc, in, k, b->panel, row_of(BF16, PANEL), row_of(BF16, PAIR), b->sums, from > 0, &ahead, NULL);
      else
        (n == 1 ? wide_alone : l->kind == BF12 ? wide_of_twelve : shortened ? wide_of_bytes : wide_of_many)(
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

void linear(const Linear *l, int64_t m, const float *x, float *y, How how, Bench *b) {
  const int64_t units = parts(m, ROWS) * parts(parts(l->n, PANEL), unit_of(l, m, how)); /* 0 if a chunk wants no logits */
  b->held = NULL;
  if (m > ROWS) {
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < units; i++) compute_unit(l, i, m, x, y, how, b);
  } else { /* neighbours in memory one after the other, but the last few to whoever is free */
#pragma omp for schedule(guided, 1)
    for (int64_t i = 0; i < (m ? units : 0); i++) compute_unit(l, i, m, x, y, how, b);
  }
}

/* Whether inputs beside weights in bfloat16 are bfloat16, and may be beside bytes. */
int32_t petiole_halves(void) { return HALF_INPUTS(BF16); }

/* ---------------------------------------------------------------- memory */

Bench new_bench(int64_t rows, int64_t k, Scratch *s) {
  rows = smaller(rows, ROWS);
  return (Bench){.inputs = take_floats(s, parts(k, KC) * KC * rows),
                 .sums = take_floats(s, (rows > WIDE ? rows : WIDE) * PAIR),
                 .panel = take_floats(s, parts(k, KC) * KC * PANEL)};
}
