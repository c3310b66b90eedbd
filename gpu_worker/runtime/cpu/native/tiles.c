/* Products on tiles: registers of 16 rows by 64 bytes, which AMX multiplies.
 *
 * One instruction takes 16 inputs, 32 terms of their sums and 16 outputs. It sums the even terms and the odd ones in their
 * order, each from zero, and adds both to what the output had:  c + ((a0 b0 + a2 b2 + ...) + (a1 b1 + a3 b3 + ...)).  A row
 * gets the same bits whatever rows are beside it, and attention.c makes the same sums of a few rows without tiles. Numbers
 * too small for a normal float are zeros here. `begin_tiles` makes them zeros for a thread's other arithmetic, too.
 *
 * An instruction takes as long for one row as for 16. Four sums are under way at a time, those of two tiles of rows by two
 * of outputs, so that each tile that is loaded is multiplied twice, and no product waits for the one before:
 *
 *                    outputs 0-15   16-31
 *     rows  0-15          c0          c1         for each DEPTH terms: two tiles of inputs and two of weights are
 *     rows 16-31          c2          c3         loaded, and four products are added
 *
 * Weights lie far away, and seldom as tiles take them. A chunk of a panel at a time is widened to pairs of bfloat16, in
 * memory that stays in the first-level cache.
 *
 * Of few inputs the memory is the limit. While weights are widened, those before are multiplied, and those of the next
 * chunk are asked for, line by line: a processor waits for few lines at a time. Of many inputs the tiles are the limit.
 * While a chunk is multiplied with one block of inputs after another, the next chunk is widened, a few rows for each four
 * products; and after each block there is time for other work (`meanwhile`).
 */
#include "tiles.h"

#ifdef TILES
#include "pack.h"

#define CHUNK 128         /* terms whose weights are widened at a time, beside few inputs */
#define CHUNK_OF_MANY 256 /* the same beside many: two chunks and a block of inputs fill the first cache */
#define FOUR 4            /* rows of weights that are widened without a branch between them */
#define FAR (16 << 10)    /* bytes: beside many inputs, weights that come so far behind are asked for */

/* The compiler does not know that instructions on tiles read and write memory. */
#define SETTLE_MEMORY() __asm__ volatile("" ::: "memory")

uint32_t begin_tiles(void) {
  struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } tiles = {.palette = 1};
  for (int i = 0; i < 8; i++) tiles.bytes[i] = 2 * DEPTH, tiles.rows[i] = SIDE;
  SETTLE_MEMORY();
  _tile_loadconfig(&tiles);
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

/* ---------------------------------------------------------------- few inputs */

/* FOUR rows of weights, as far as there are so many -> pairs of bfloat16. Meanwhile `lines` are asked for. */
INLINE const char *widen_rows(int kind, int lines, int64_t rows, const char *w, int64_t ldw, char *out, const char *ahead) {
#pragma GCC unroll 4
  for (int r = 0; r < FOUR; r++, w += ldw) {
    vu pairs[2] = {{0}, {0}};
#pragma GCC unroll 2
    for (int line = r * lines / FOUR; line < (r + 1) * lines / FOUR; line++)
      __builtin_prefetch(ahead + 64 * line, 0, 1);
    if (r < rows) pairs_of(kind, w, pairs);
    *(vu *)(out + r * 64) = pairs[0];
    *(vu *)(out + TILE + r * 64) = pairs[1];
  }
  return w;
}

/* sums [rows, PANEL] (+)= x W for one or two tiles of rows and `kc` terms, whose widened weights stay in `panel`. ask: what
 * is asked for */
INLINE void multiply_widened(int kind, int lines, int two, int64_t kc, Inputs x, const char *w, int64_t ldw, char *panel,
                             float *sums, int add, const char *ask) {
  begin_sums(two, sums, PANEL, add);
  for (int64_t left = kc / 2; left > 0; left -= SIDE, panel += 2 * TILE) {
    for (int r = 0; r < SIDE; r += FOUR, ask += 64 * lines)
      if (left >= SIDE) w = widen_rows(kind, lines, FOUR, w, ldw, panel + r * 64, ask);
      else w = widen_rows(kind, lines, left - r, w, ldw, panel + r * 64, ask);
    SETTLE_MEMORY();
    if (left == kc / 2) continue;
    add_terms(two, x, panel - 2 * TILE);
    x.at += x.step;
  }
  add_terms(two, x, panel - 2 * TILE);
  end_sums(two, sums, PANEL);
}

INLINE void sums_of_few(int kind, int lines, const Linear *l, int64_t p, int64_t next, int64_t m, Inputs x, float *sums,
                        Bench *b) {
  const char *w = weights_to(l, p * PANEL);
  const int64_t ldw = row_of(kind, l->block), raw = before_rows(l);
  b->widened = NULL;
  for (int64_t from = 0; from < l->k; from += CHUNK, w += CHUNK / 2 * ldw) {
    const int64_t kc = smaller(CHUNK, l->k - from), n = parts(kc, DEPTH);
    const char *then = from + CHUNK < l->k ? w + CHUNK / 2 * ldw : next < 0 ? w : weights_to(l, next * PANEL) - raw;
    if (m > SIDE) multiply_widened(kind, lines, 1, kc, x, w, ldw, b->panel, sums, from > 0, then);
    else multiply_widened(kind, lines, 0, kc, x, w, ldw, b->panel, sums, from > 0, then);
    if (m > 2 * SIDE) {
      Inputs others = x;
      others.at += x.block;
      multiply_tiles(m - 2 * SIDE, n, others, b->panel, sums + 2 * SIDE * PANEL, PANEL, from > 0);
    }
    x.at += n * x.step;
  }
}

/* ---------------------------------------------------------------- many inputs */

/* Rows of weights that are widened, a few at a time. */
typedef struct {
  const char *w; /* the next one */
  int64_t ldw, row, rows, end; /* from `rows` up to `end` there are zeros */
  char *out;
} Widening;

INLINE Widening widening_of(int64_t kc, const char *w, int64_t ldw, char *out) {
  return (Widening){w, ldw, 0, kc / 2, parts(kc, DEPTH) * SIDE, out};
}

INLINE void widen_some(int kind, int64_t n, Widening *to) {
  for (const int64_t end = smaller(to->end, to->row + n); to->row < end; to->row++, to->w += to->ldw) {
    char *out = to->out + to->row / SIDE * 2 * TILE + to->row % SIDE * 64;
    vu pairs[2] = {{0}, {0}};
    __builtin_prefetch(to->w + FAR, 0, 2);
    __builtin_prefetch(to->w + FAR + 64, 0, 2);
    if (to->row < to->rows) pairs_of(kind, to->w, pairs);
    *(vu *)out = pairs[0];
    *(vu *)(out + TILE) = pairs[1];
  }
}

/* multiply_rows, while rows of weights are widened, `each` for DEPTH terms. */
INLINE void multiply_and_widen(int kind, int two, int64_t n, Inputs x, const char *w, float *c, int add, int64_t each,
                               Widening *next) {
  begin_sums(two, c, PANEL, add);
  for (int64_t i = 0; i < n; i++, x.at += x.step, w += 2 * TILE) {
    add_terms(two, x, w);
    widen_some(kind, each, next);
  }
  end_sums(two, c, PANEL);
}

INLINE void sums_of_many(int kind, const Linear *l, int64_t p, int64_t next, int64_t m, Inputs x, float *sums, Bench *b) {
  const int64_t ldw = row_of(kind, l->block), k = l->k, blocks = parts(m, 2 * SIDE);
  const char *w = weights_to(l, p * PANEL);
  char *panel = b->panel, *other = panel + CHUNK_OF_MANY * 64;
  if (b->widened != w) {
    Widening first = widening_of(smaller(CHUNK_OF_MANY, k), w, ldw, panel);
    widen_some(kind, first.end, &first);
  } else if (b->in_other) other = panel, panel += CHUNK_OF_MANY * 64;
  for (int64_t from = 0; from < k; from += CHUNK_OF_MANY) {
    const int64_t n = parts(smaller(CHUNK_OF_MANY, k - from), DEPTH), last = from + CHUNK_OF_MANY >= k;
    const int none = last && next < 0;
    const char *then = none ? NULL : last ? weights_to(l, next * PANEL) : w + CHUNK_OF_MANY / 2 * ldw;
    const int64_t kc = none ? 0 : smaller(CHUNK_OF_MANY, last ? k : k - from - CHUNK_OF_MANY);
    Widening beside = widening_of(kc, then, ldw, other);
    const int64_t each = parts(beside.end, n * blocks);
    Inputs block = x;
    float *c = sums;
    for (int64_t left = m; left > 0; left -= 2 * SIDE, block.at += x.block, c += 2 * SIDE * PANEL) {
      if (left <= SIDE) multiply_and_widen(kind, 0, n, block, panel, c, from > 0, each, &beside);
      else if (each == 2) multiply_and_widen(kind, 1, n, block, panel, c, from > 0, 2, &beside);
      else multiply_and_widen(kind, 1, n, block, panel, c, from > 0, each, &beside);
      if (b->meanwhile) b->meanwhile(b->of);
    }
    char *widened = other;
    other = panel, panel = widened;
    x.at += n * x.step;
    w = then;
  }
  b->widened = w;
  b->in_other = panel != b->panel;
}

void sums_on_tiles(const Linear *l, int64_t p, int64_t next, int64_t m, Inputs x, float *sums, Bench *b) {
#define EACH_SIZE(kind, lines) \
  if (m > FEW_INPUTS) sums_of_many(kind, l, p, next, m, x, sums, b); \
  else sums_of_few(kind, lines, l, p, next, m, x, sums, b);
  if (l->kind == BF16) { EACH_SIZE(BF16, 8) } /* constants, so that each case is a function of its own */
  else if (l->kind == TWELVE) { EACH_SIZE(TWELVE, 6) }
  else { EACH_SIZE(INT8_HALF, 4) }
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
