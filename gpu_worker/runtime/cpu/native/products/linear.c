/* Products: a matrix's panels among the threads of a region, and what becomes of the sums. */
#include "linear.h"

#include "../arithmetic/functions.h"

#include "groups.h"
#include "pack.h"
#include "panels.h"
#include "tiles.h"

#include <omp.h>

/* y [m, PANEL], the outputs of a panel, (+)= sums [m][lds] * scale + bias, or the activation of that */
static void finish(const Linear *l, int64_t p, int m, const float *sums, int64_t lds, float *y, int64_t ldy, How how) {
  const int add = how == ADD;
  const int64_t n0 = p * PANEL, n = smaller(PANEL, l->n - n0);
  for (int j = 0; j < m; j++) {
    const float *in = sums + j * lds;
    float *out = y + j * ldy;
    const int64_t full = n / WIDTH * WIDTH;
    for (int64_t c = 0; c < full; c += WIDTH) {
      vp total = part_at(in + c);
      if (l->scale) total *= part_at(l->scale + n0 + c);
      if (l->bias) total += part_at(l->bias + n0 + c);
      set_part(out + c, add ? part_at(out + c) + total : total);
    }
    for (int64_t c = full; c < n; c++) {
      float total = in[c];
      if (l->scale) total *= l->scale[n0 + c];
      if (l->bias) total += l->bias[n0 + c];
      out[c] = add ? out[c] + total : total;
    }
    if (how == ACTED) activate(l->activation, out, NULL, out, (int)n);
  }
}

/* y [m, PANEL] = activation(gates) * ups, whose sums [m][PAIR] are those of panels p and q. */
static void finish_gated(const Linear *l, int64_t p, int64_t q, int m, float *sums, float *y, int64_t ldy) {
  if (l->bias || l->scale) {
    finish(l, p, m, sums, PAIR, sums, PAIR, SET);
    finish(l, q, m, sums + PANEL, PAIR, sums + PANEL, PAIR, SET);
  }
  for (int j = 0; j < m; j++) activate(l->activation, sums + j * PAIR, sums + j * PAIR + PANEL, y + j * ldy, PANEL);
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

/* y [n, PANEL] = activation(gates) * ups, for rows from `at` on. */
static void finish_gates(const MapUnit *u, int64_t at, int64_t n) {
  float *gates = u->sums + at * PANEL, *ups = gates + ROWS * PANEL;
  const int64_t ldy = u->l->n / 2;
  if (u->l->bias || u->l->scale) {
    finish(u->l, u->p, (int)n, gates, PANEL, gates, PANEL, SET);
    finish(u->l, u->q, (int)n, ups, PANEL, ups, PANEL, SET);
  }
  for (int64_t j = 0; j < n; j++) {
    float *to = u->y.packed ? gates + j * PANEL : (float *)u->y.at + (u->first + at + j) * ldy + u->p * PANEL;
    activate(u->l->activation, gates + j * PANEL, ups + j * PANEL, to, PANEL);
    if (u->y.packed) narrow(to, PANEL, packed_at(u->y.at, ldy, u->first + at + j, u->p * PANEL));
  }
}

static void finish_some(MapUnit *u, int64_t most) {
  const int64_t n = smaller(most, u->rows - u->done), at = u->done;
  float *y = (float *)u->y.at + (u->first + at) * u->l->n + u->p * PANEL;
  if (u->how == GATED) finish_gates(u, at, n);
  else finish(u->l, u->p, (int)n, u->sums + at * PANEL, PANEL, y, u->l->n, u->how);
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

/* x [m, k] -> [ceil(k / KC)][m][KC], floats or bfloat16 */
static void slice(int halves, const float *x, int64_t ldx, int64_t m, int64_t k, char *out) {
  for (int64_t from = 0; from < k; from += KC)
    for (int64_t j = 0; j < m; j++, out += KC * (halves ? 2 : 4)) {
      const float *in = x + j * ldx + from;
      const int64_t n = smaller(KC, k - from);
      if (halves) narrow(in, n, (uint16_t *)out);
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
  const int as_is = m == 1 && as_it_is(l);
  if (!as_is && (x != b->held || b->form != 0)) {
    if (l->groups) group_inputs(l, x, ldx, m, b->inputs);
    else slice(HALF_INPUTS(l->kind), x, ldx, m, l->k, b->inputs);
  }
  b->held = x;
  b->form = 0;
  product(l, p, m, as_is ? (const char *)x : b->inputs, sums, lds, b);
}

void outputs(const Linear *l, int64_t p, int m, const float *x, int64_t ldx, float *y, int64_t ldy, How how, Bench *b) {
  sums_of(l, p, m, x, ldx, b->sums, PANEL, b);
  finish(l, p, m, b->sums, PANEL, y + p * PANEL, ldy, how);
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
  for (int j = 0; (x != b->held || b->form != WHOLE_ROWS) && j < m; j++) narrow(x + j * k, k, halves + j * k);
  b->held = x;
  b->form = WHOLE_ROWS;
  for (int64_t from = 0; from < k; from += terms, w += terms / 2 * ldw) {
    const int64_t kc = smaller(terms, k - from);
    for (int left = n, at = 0; left; left--) {
      const int mb = (m - at) / left;
      const uint16_t *in = halves + at * k + from;
      const int64_t share = kc / 2 * (n - left) * (row / n), panel = n > 1 ? l->stride * PANEL / l->block : kc / 4 * row;
      /* The next pair lies after this one. If the panels lie apart, each one's next lies after it. */
      const char *next = w - before_rows(l) + share;
      if (q == p + 1) next += 2 * panel;
      else next += share < panel ? panel : apart;
      const NextWeights ahead = {next, row / n};
      if (bytes && left < n) /* widened by the first tile */
        wide_of_many(mb, kc, in, k, b->panel, row_of(BF16, PANEL), row_of(BF16, PAIR), b->sums, from > 0, &ahead, NULL);
      else
        (n == 1 ? wide_alone : l->kind == TWELVE ? wide_of_twelve : bytes ? wide_of_bytes : wide_of_many)(
            mb, kc, in, k, w, apart, ldw, b->sums, from > 0, &ahead, b->panel);
      if (from + kc == k && how == GATED) finish_gated(l, p, q, mb, b->sums, y + at * ldy + p * PANEL, ldy);
      else if (from + kc == k) {
        finish(l, p, mb, b->sums, PAIR, y + at * ldy + p * PANEL, ldy, how);
        finish(l, q, mb, b->sums + PANEL, PAIR, y + at * ldy + q * PANEL, ldy, how);
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

/* Unit `i` of a matrix, for ROWS inputs at most. */
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
      outputs(l, p, (int)rows, x, l->k, y, l->n, how, b);
}

int64_t units_of(const Linear *l, int64_t m) {
  return parts(m, ROWS) * parts(parts(l->n, PANEL), unit_of(l, m, SET));
}

void linear_unit(const Linear *l, int64_t unit, int64_t m, const float *x, float *y, Bench *b) {
  compute_unit(l, unit, m, x, y, SET, b);
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

/* The instructions that products are made with, for the log. */
const char *petiole_instructions(void) {
#if defined(TILES)
  return "AMX";
#elif defined(DOT)
  return "AVX-512 with bfloat16";
#elif defined(__AVX512F__)
  return "AVX-512";
#elif defined(__AVX2__)
  return "AVX2";
#else
  return "vectors of the compiler";
#endif
}

/* ---------------------------------------------------------------- memory */

Bench new_bench(int64_t rows, int64_t k, Scratch *s) {
  const int64_t all = rows;
  rows = smaller(rows, ROWS);
  const int64_t tiled = parts(rows, 2 * SIDE) * 2 * SIDE;
  return (Bench){.packed = take(s, packed_size(all, k)),
                 .inputs = take_floats(s, (parts(k, KC) * KC + 2 * parts(k, SHORTEST_RUN)) * tiled),
                 .sums = take_floats(s, 2 * ROWS * PAIR),
                 .panel = take_floats(s, parts(k, KC) * KC * PANEL)};
}
