/* Products on tiles: registers of 16 rows by 64 bytes, which AMX multiplies.
 *
 * One instruction takes 16 inputs, 32 terms of their sums and 16 outputs. It sums the even terms and the odd ones in their
 * order, each from zero, and adds both to what the output had:  c + ((a0 b0 + a2 b2 + ...) + (a1 b1 + a3 b3 + ...)).  A row
 * gets the same bits whatever rows are beside it, and attend.c makes the same sums of a few rows without tiles. A product
 * and its sum are rounded once, so a product may be too small for a normal float; sums that are so small are zeros. Vectors
 * make the same sums by `add_times`, because `begin_tiles` makes such numbers zeros for a thread's other arithmetic, too.
 *
 * An instruction takes as long for one row as for 16. Four sums are under way at a time, those of two tiles of rows by two
 * of outputs, so that each tile that is loaded is multiplied twice, and no product waits for the one before:
 *
 *                    outputs 0-15   16-31
 *     rows  0-15          c0          c1         for each DEPTH terms: two tiles of inputs and two of weights are
 *     rows 16-31          c2          c3         loaded, and four products are added
 *
 * Weights lie far away, and seldom as tiles take them. A chunk of a panel at a time is widened to pairs of bfloat16, in
 * memory that stays in the first-level cache. While a chunk is multiplied with one block of inputs after another, the next
 * chunk is widened, a few rows for each four products, and the weights after it are prefetched: so the processor reads and
 * multiplies at the same time. After each block there is time for other work (`meanwhile`).
 *
 * One or two inputs are multiplied by vectors of floats, in the same order of the terms (`sums_of_few`).
 */
#include "tiles.h"

#ifdef TILES
#include "../packed/pack.h"

#define CHUNK 256       /* terms widened at a time: two chunks and a block of inputs fill the first cache */
#define MANY (8 * SIDE) /* inputs. Beside fewer, which are multiplied sooner, a chunk is half as long */

#define FEW 2           /* this many inputs, or one, vectors multiply */
#define BEHIND 6144     /* bytes: the weights that lie this far after those that are read are prefetched */

/* Of two tiles of inputs and their sums the rows, and the bytes of a row of inputs. Each four bytes of these meet a row of
 * weights. */
static void fit(uint8_t first, uint8_t second, uint8_t x) {
  const uint8_t weights = x / 4;
  const struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } tiles = {1, 0, {0}, {64, 64, 64, 64, x, x, 64, 64}, {first, first, second, second, first, second, weights, weights}};
  SETTLE_MEMORY();
  _tile_loadconfig(&tiles);
}

void fit_tiles(int64_t m) {
  fit((uint8_t)smaller(m, SIDE), (uint8_t)smaller(m > SIDE ? m - SIDE : SIDE, SIDE), 2 * DEPTH);
}

void fit_runs(int64_t m, int64_t bytes) {
  const uint8_t rows = (uint8_t)smaller(m, SIDE);
  fit(rows, rows, (uint8_t)bytes);
}

uint32_t begin_tiles(void) {
  fit_tiles(2 * SIDE);
  const uint32_t before = _mm_getcsr();
  _mm_setcsr(before | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON);
  return before;
}

void end_tiles(uint32_t before) {
  _tile_release();
  _mm_setcsr(before);
}

/* ---------------------------------------------------------------- sums of one or two tiles of rows */

/* They begin from c [rows, PANEL], or from 0. */
INLINE void begin_sums(int two, const float *c, int64_t ldc, int add) {
  const int64_t stride = ldc * (int64_t)sizeof(float);
  const float *lower = c + SIDE * ldc;
  SETTLE_MEMORY();
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

/* DEPTH terms more. w: two tiles of weights. */
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
  SETTLE_MEMORY();
}

/* w: weights as tiles take them */
INLINE void multiply_rows(int two, int64_t n, Inputs x, const char *w, float *c, int64_t ldc, int add) {
  begin_sums(two, c, ldc, add);
  for (int64_t i = 0; i < n; i++, x.at += x.step, w += 2 * TILE) add_terms(two, x, w);
  end_sums(two, c, ldc);
}

void multiply_tiles(int64_t m, int64_t n, Inputs x, const char *w, float *c, int64_t ldc, int add) {
  for (; m > 0; m -= 2 * SIDE, x.at += x.block, c += 2 * SIDE * ldc)
    if (m > SIDE) multiply_rows(1, n, x, w, c, ldc, add);
    else multiply_rows(0, n, x, w, c, ldc, add);
}

/* ---------------------------------------------------------------- sums of a panel */

/* Rows of weights that are widened, a few at a time. */
typedef struct {
  const char *w, *ask; /* the next one, and what is prefetched meanwhile */
  int64_t ldw, row, rows, end; /* from `rows` up to `end`, whole tiles, there are zeros */
  char *out;
} Widening;

/* Prefetches row i of weights. (In 12 bits two rows take three lines.) */
INLINE void prefetch_row(int kind, int64_t i, const char *at) {
  if (kind != TWELVE || i % 2 == 0) __builtin_prefetch(at, 0, 2);
  if (kind != INT8_HALF) __builtin_prefetch(at + 64, 0, 2);
}

INLINE void widen_row(int kind, int64_t i, const char *w, const char *ask, char *out) {
  vu pairs[2];
  prefetch_row(kind, i, ask);
  pairs_of(kind, w, pairs);
  *(vu *)(out + i * 64) = pairs[0];
  *(vu *)(out + TILE + i * 64) = pairs[1];
}

/* n: a divisor of SIDE */
INLINE void widen_some(int kind, int n, Widening *to) {
  if (to->row == to->end) return;
  char *out = to->out + to->row / SIDE * 2 * TILE + to->row % SIDE * 64;
  const int64_t left = to->rows - to->row;
  if (n <= left)
#pragma GCC unroll 16
    for (int i = 0; i < n; i++) widen_row(kind, i, to->w + i * to->ldw, to->ask + i * to->ldw, out);
  else
    for (int i = 0; i < n; i++)
      if (i < left) widen_row(kind, i, to->w + i * to->ldw, to->ask + i * to->ldw, out);
      else *(vu *)(out + i * 64) = *(vu *)(out + TILE + i * 64) = (vu){0};
  to->row += n;
  to->w += n * to->ldw;
  to->ask += n * to->ldw;
}

INLINE void widen_all(int kind, Widening *to) {
  while (to->row < to->end) widen_some(kind, SIDE, to);
}

/* multiply_rows, while rows of weights are widened, `each` for DEPTH terms. */
INLINE void multiply_and_widen(int kind, int two, int each, int64_t n, Inputs x, const char *w, float *c, int add,
                               Widening *next) {
  begin_sums(two, c, PANEL, add);
  for (int64_t i = 0; i < n; i++, x.at += x.step, w += 2 * TILE) {
    add_terms(two, x, w);
    widen_some(kind, each, next);
  }
  end_sums(two, c, PANEL);
}

/* `each` at least. */
INLINE void multiply_block(int kind, int two, int64_t each, int64_t n, Inputs x, const char *w, float *c, int add,
                           Widening *next) {
  if (each <= 2) multiply_and_widen(kind, two, 2, n, x, w, c, add, next); /* constants, so that each case is unrolled */
  else if (each <= 4) multiply_and_widen(kind, two, 4, n, x, w, c, add, next);
  else if (each <= 8) multiply_and_widen(kind, two, 8, n, x, w, c, add, next);
  else multiply_and_widen(kind, two, SIDE, n, x, w, c, add, next);
}

/* The weights of panels whose chunks are read in turns: the first chunk of each, then the second of each. */
typedef struct {
  const char *at[MOST_PANELS + 1]; /* after the last panel: what is read next, or null */
  int64_t n, k, chunk, chunks, ldw;
} Reading;

/* A chunk of a panel. */
typedef struct {
  int64_t chunk, panel;
} Place;

INLINE Place after(const Reading *r, Place p) {
  return p.panel + 1 < r->n ? (Place){p.chunk, p.panel + 1} : (Place){p.chunk + 1, 0};
}

INLINE const char *weights_at(const Reading *r, Place p) {
  const int64_t bytes = r->chunk / 2 * r->ldw;
  return p.chunk < r->chunks ? r->at[p.panel] + p.chunk * bytes : r->at[r->n] + (p.chunk - r->chunks + p.panel) * bytes;
}

/* A chunk, to be widened. */
INLINE Widening chunk_at(const Reading *r, Place p, char *out) {
  const int64_t terms = r->k - (p.chunk < r->chunks ? p.chunk : 0) * r->chunk;
  const int64_t kc = p.chunk < r->chunks || r->at[r->n] ? smaller(r->chunk, terms) : 0;
  const char *ask = weights_at(r, after(r, p)) + (r->n > 1 ? 0 : BEHIND - CHUNK / 4 * r->ldw);
  return (Widening){weights_at(r, p), ask, r->ldw, 0, kc / 2, parts(kc, DEPTH) * SIDE, out};
}

/* The first chunk may have been widened beside the last one of the panels before. (Of a matrix's inputs, the last ones may
 * be fewer than those before, and need no more of it.) */
INLINE void sums_of_panels(int kind, const Linear *l, const Panels *now, int64_t next, int64_t m, Inputs x, float *sums,
                           Workspace *b) {
  const int64_t chunk = m < MANY ? CHUNK / 2 : CHUNK;
  Reading r = {{0}, now->n, l->k, chunk, parts(l->k, chunk), row_of(kind)};
  for (int64_t j = 0; j < r.n; j++) r.at[j] = weights_to(l, now->at[j] * PANEL);
  r.at[r.n] = next < 0 ? NULL : weights_to(l, next * PANEL);
  char *panel = b->panel, *other = panel + CHUNK * 64;
  if (b->widened != r.at[0]) {
    Widening first = chunk_at(&r, (Place){0, 0}, panel);
    widen_all(kind, &first);
  } else if (b->in_other) other = panel, panel += CHUNK * 64;
  for (Place p = {0, 0}; p.chunk < r.chunks; p = after(&r, p)) {
    const int64_t n = parts(smaller(chunk, l->k - p.chunk * chunk), DEPTH);
    Widening beside = chunk_at(&r, after(&r, p), other);
    const int64_t each = parts(beside.end, n * parts(m, 2 * SIDE));
    Inputs block = x;
    float *c = sums + p.panel * ROWS * PANEL;
    for (int64_t left = m; left > 0; left -= 2 * SIDE, block.at += x.block, c += 2 * SIDE * PANEL) {
      if (left > SIDE) multiply_block(kind, 1, each, n, block, panel, c, p.chunk > 0, &beside);
      else multiply_block(kind, 0, each, n, block, panel, c, p.chunk > 0, &beside);
      if (b->meanwhile) b->meanwhile(b->of);
    }
    widen_all(kind, &beside);
    char *widened = other;
    other = panel, panel = widened;
    if (p.panel + 1 == r.n) x.at += n * x.step;
  }
  b->widened = r.at[r.n];
  b->in_other = panel != b->panel;
}

/* The weights of two inputs to a panel's outputs. */
INLINE void floats_of(int kind, const char *w, vf even[2], vf odd[2]) {
  vu pairs[2];
  if (kind != INT8_HALF) pairs_of(kind, w, pairs);
#pragma GCC unroll 2
  for (int half = 0; half < 2; half++) {
    const char *at = w + half * LANES;
    even[half] = kind == INT8_HALF ? __builtin_convertvector(widen_bytes(at), vf) : (vf)(pairs[half] << 16);
    odd[half] = kind == INT8_HALF ? __builtin_convertvector(widen_bytes(at + PANEL), vf) : (vf)(pairs[half] & 0xFFFF0000u);
  }
}

/* The sums of a few inputs, by vectors. Weights go from memory to registers: nothing is stored and loaded again. */
INLINE void sums_of_few(int kind, int m, const Linear *l, int64_t p, Inputs x, float *sums) {
  const char *w = weights_to(l, p * PANEL);
  const int64_t ldw = row_of(kind);
  vf total[FEW][2] = {0};
  for (int64_t from = 0; from < l->k; from += DEPTH, x.at += x.step) {
    vf even[FEW][2] = {0}, odd[FEW][2] = {0};
    float terms[FEW][2][LANES];
    for (int j = 0; j < m; j++) {
      const vu pairs = *(const vu *)(x.at + j * x.row);
      store(terms[j][0], (vf)(pairs << 16));
      store(terms[j][1], (vf)(pairs & 0xFFFF0000u));
    }
    const int64_t rows = smaller(DEPTH, l->k - from) / 2;
#pragma GCC unroll 4
    for (int64_t i = 0; i < rows; i++, w += ldw) {
      vf first[2], second[2];
      prefetch_row(kind, i, w + BEHIND);
      floats_of(kind, w, first, second);
#pragma GCC unroll 2
      for (int j = 0; j < m; j++)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
          even[j][half] = add_times(even[j][half], first[half], splat(terms[j][0][i]));
          odd[j][half] = add_times(odd[j][half], second[half], splat(terms[j][1][i]));
        }
    }
    for (int j = 0; j < m; j++)
      for (int half = 0; half < 2; half++) total[j][half] += even[j][half] + odd[j][half];
  }
  for (int j = 0; j < m; j++)
    for (int half = 0; half < 2; half++) store(sums + j * PANEL + half * LANES, total[j][half]);
}

INLINE void sums_of_kind(int kind, const Linear *l, const Panels *now, int64_t next, int64_t m, Inputs x, float *sums,
                         Workspace *b) {
  if (m > FEW) sums_of_panels(kind, l, now, next, m, x, sums, b);
  else
    for (int64_t j = 0; j < now->n; j++, sums += ROWS * PANEL)
      if (m == 1) sums_of_few(kind, 1, l, now->at[j], x, sums);
      else sums_of_few(kind, FEW, l, now->at[j], x, sums);
}

void sums_on_tiles(const Linear *l, const Panels *now, int64_t next, int64_t m, Inputs x, float *sums, Workspace *b) {
  /* constants, so that each case is a function of its own */
  if (l->kind == BF16) sums_of_kind(BF16, l, now, next, m, x, sums, b);
  else if (l->kind == TWELVE) sums_of_kind(TWELVE, l, now, next, m, x, sums, b);
  else sums_of_kind(INT8_HALF, l, now, next, m, x, sums, b);
}

/* ---------------------------------------------------------------- inputs */

void pack_row(const float *x, int64_t k, int64_t j, void *out) {
  for (int64_t c = 0; c < k; c += DEPTH) {
    const int64_t n = smaller(DEPTH, k - c);
    uint16_t *at = packed_at(out, k, j, c);
    narrow(x + c, n, at);
    if (n < DEPTH) memset(at + n, 0, sizeof(uint16_t) * (size_t)(DEPTH - n));
  }
}
#endif
