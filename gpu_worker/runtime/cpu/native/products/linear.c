/* Products: a matrix's panels among the threads of a region, and what becomes of the sums. */
#include "linear.h"

#include "../arithmetic/functions.h"
#include "kernels/groups.h"
#include "kernels/panels.h"
#include "kernels/tiles.h"
#include "packed/pack.h"

#include <omp.h>

/* From the first of some activations to the output c of row j, row by row. */
INLINE Activations from_output(Activations y, int64_t ldy, int64_t j, int64_t c) {
  return (Activations){(char *)y.at + (j * ldy + c) * (y.packed ? 2 : 4), y.packed};
}

INLINE void act_rows(int activation, const float *x, int64_t ldx, const float *ups, Activations y, int64_t ldy, int m,
                     int n) {
  const int full = n / WIDTH * WIDTH;
  for (int j = 0; j < m; j++) {
    const int64_t in = j * ldx, out = j * ldy;
    for (int c = 0; c < full; c += WIDTH) {
      const vp acted = act(activation, part_at(x + in + c)), made = ups ? acted * part_at(ups + in + c) : acted;
      if (y.packed) narrow_part(made, (uint16_t *)y.at + out + c);
      else set_part((float *)y.at + out + c, made);
    }
    if (full < n) activate(activation, x + in + full, ups ? ups + in + full : NULL, (float *)y.at + out + full, n - full);
  }
}

/* y [m][ldy] = the activation of x [m][ldx], times ups where they are not null. n: whole vectors where y is packed */
static void activate_rows(int activation, const float *x, int64_t ldx, const float *ups, Activations y, int64_t ldy, int m,
                          int n) {
  /* constants, so that each case is a loop of its own */
  if (activation == GELU && !ups && y.packed) act_rows(GELU, x, ldx, NULL, (Activations){y.at, 1}, ldy, m, n);
  else if (activation == GELU && !ups) act_rows(GELU, x, ldx, NULL, (Activations){y.at, 0}, ldy, m, n);
  else if (activation == GELU) act_rows(GELU, x, ldx, ups, y, ldy, m, n);
  else if (activation == SILU) act_rows(SILU, x, ldx, ups, y, ldy, m, n);
  else if (activation == RELU) act_rows(RELU, x, ldx, ups, y, ldy, m, n);
  else if (activation == RELU2) act_rows(RELU2, x, ldx, ups, y, ldy, m, n);
  else act_rows(GELU_TANH, x, ldx, ups, y, ldy, m, n);
}

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
  }
  if (how == ACTED) activate_rows(l->activation, y, ldy, NULL, (Activations){y, 0}, ldy, m, (int)n);
}

/* y [m, PANEL] = activation(gates) * ups, whose sums [m][PAIR] are those of panels p and q. */
static void finish_gated(const Linear *l, int64_t p, int64_t q, int m, float *sums, Activations y, int64_t ldy) {
  if (l->bias || l->scale) {
    finish(l, p, m, sums, PAIR, sums, PAIR, SET);
    finish(l, q, m, sums + PANEL, PAIR, sums + PANEL, PAIR, SET);
  }
  activate_rows(l->activation, sums, PAIR, sums + PANEL, y, ldy, m, PANEL);
}

/* The outputs of panels p and q, of which those of q lie `apart` behind, whose sums [m][PAIR] are given. */
INLINE void finish_pair(const Linear *l, int64_t p, int64_t q, int m, Activations y, int64_t apart, int64_t ldy, How how,
                        float *sums) {
  if (how == GATED) {
    finish_gated(l, p, q, m, sums, y, ldy);
    return;
  }
  if (how != ACTED) {
    finish(l, p, m, sums, PAIR, y.at, ldy, how);
    finish(l, q, m, sums + PANEL, PAIR, (float *)y.at + apart, ldy, how);
    return;
  }
  finish(l, p, m, sums, PAIR, sums, PAIR, SET);
  finish(l, q, m, sums + PANEL, PAIR, sums + PANEL, PAIR, SET);
  activate_rows(l->activation, sums, PAIR, NULL, y, ldy, m, PANEL);
  activate_rows(l->activation, sums + PANEL, PAIR, NULL, from_output(y, ldy, 0, apart), ldy, m, PANEL);
}

#ifdef TILES
#define SOME 8              /* rows that are finished at a time */
#define MOST_NEAR (1 << 20) /* bytes of inputs that stay in the second-level cache while one panel after the other passes by */

/* Some panels of outputs for ROWS inputs at most. */
typedef struct {
  const Linear *l;
  int64_t p, n, first, rows, done; /* its first panel, and how many; its inputs; how many of them are finished */
  Activations y;
  How how;
  float *sums; /* [n][ROWS][PANEL]; where GATED those of the gates, then those of what they are multiplied by */
} MapUnit;

/* y [n, PANEL] = activation(gates) * ups, for panel j and rows from `at` on. */
static void finish_gates(const MapUnit *u, int64_t j, int64_t at, int64_t n) {
  float *gates = u->sums + (j * ROWS + at) * PANEL, *ups = gates + u->n * ROWS * PANEL;
  const int64_t ldy = u->l->n / 2, p = u->p + j;
  if (u->l->bias || u->l->scale) {
    finish(u->l, p, (int)n, gates, PANEL, gates, PANEL, SET);
    finish(u->l, p + ldy / PANEL, (int)n, ups, PANEL, ups, PANEL, SET);
  }
  for (int64_t i = 0; i < n; i++) {
    float *to = u->y.packed ? gates + i * PANEL : (float *)u->y.at + (u->first + at + i) * ldy + p * PANEL;
    activate(u->l->activation, gates + i * PANEL, ups + i * PANEL, to, PANEL);
    if (u->y.packed) narrow(to, PANEL, packed_at(u->y.at, ldy, u->first + at + i, p * PANEL));
  }
}

static void finish_some(MapUnit *u, int64_t most) {
  const int64_t n = smaller(most, u->rows - u->done), at = u->done;
  float *y = (float *)u->y.at + (u->first + at) * u->l->n + u->p * PANEL;
  for (int64_t j = 0; j < u->n; j++)
    if (u->how == GATED) finish_gates(u, j, at, n);
    else finish(u->l, u->p + j, (int)n, u->sums + (j * ROWS + at) * PANEL, PANEL, y + j * PANEL, u->l->n, u->how);
  u->done += n;
}

static void finish_meanwhile(void *unit) { finish_some(unit, SOME); }

/* The sums of a unit. Meanwhile the one before is finished. */
static void compute_unit_on_tiles(MapUnit *u, MapUnit *before, Inputs x, Workspace *b) {
  const int64_t panels = parts(u->l->n, PANEL), outputs = u->how == GATED ? panels / 2 : panels;
  Panels now = {u->how == GATED ? 2 * u->n : u->n, {0}};
  for (int64_t j = 0; j < now.n; j++) now.at[j] = j < u->n ? u->p + j : outputs + u->p + j - u->n;
  b->meanwhile = before->done < before->rows ? finish_meanwhile : NULL;
  b->of = before;
  x.at += u->first / (2 * SIDE) * x.block;
  sums_on_tiles(u->l, &now, (u->p + u->n) % outputs, u->rows, x, u->sums, b);
  b->meanwhile = NULL;
  finish_some(before, ROWS);
}

static void linear_on_tiles(const Linear *l, int64_t m, Activations x, Activations y, How how, Workspace *b) {
  const int64_t share = how == GATED ? 2 : 1, panels = parts(l->n, PANEL) / share;
  const int64_t each = packed_size(smaller(m, ROWS), l->k) > MOST_NEAR ? MOST_PANELS / share : 1, units_each = parts(panels, each);
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
  for (int64_t i = 0; i < parts(m, ROWS) * units_each; i++) {
    const int64_t first = i / units_each * ROWS, p = i % units_each * each;
    units[at] = (MapUnit){l, p, smaller(each, panels - p), first, smaller(ROWS, m - first), 0, y, how,
                          b->sums + at * MOST_PANELS * ROWS * PANEL};
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
static void sums_of(const Linear *l, int64_t p, int m, const float *x, int64_t ldx, float *sums, int64_t lds,
                    Workspace *b) {
#ifdef TILES
  if (HALF_INPUTS(l->kind)) {
    for (int j = 0; x != b->held && j < m; j++) pack_row(x + j * ldx, l->k, j, b->inputs);
    b->held = x;
    sums_on_tiles(l, &(Panels){1, {p}}, -1, m, packed_inputs(b->inputs, l->k), sums, b); /* only adapters come here: lds is PANEL */
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

void outputs(const Linear *l, int64_t p, int m, const float *x, int64_t ldx, float *y, int64_t ldy, How how,
             Workspace *b) {
  sums_of(l, p, m, x, ldx, b->sums, PANEL, b);
  finish(l, p, m, b->sums, PANEL, y + p * PANEL, ldy, how);
}

#ifdef __AVX512F__
#ifdef BY_VECTORS
#define WIDE_HALVES(kind) HALF_INPUTS(kind)
#else
#define WIDE_HALVES(kind) 0
#endif

/* Whether wide tiles compute a pair of panels for m rows: for so many that the tiles ask for all lines of the next weights.
 * In 12 bits these are three tiles, in bfloat16 five. */
INLINE int is_wide(const Linear *l, int64_t m) {
  return (WIDE_HALVES(l->kind) || (l->kind == F32 && !l->groups)) && m > (l->kind == TWELVE ? 2 : 4) * WIDE;
}

/* The tile of a kind of weights, for n tiles of rows. */
INLINE Wide *wide_of(int kind, int64_t n) {
#ifdef BY_VECTORS
  if (kind != F32) return n == 1 ? wide_alone : kind == TWELVE ? wide_of_twelve : kind == BF16 ? wide_of_many : wide_of_bytes;
#endif
  return (void)kind, (void)n, wide_of_floats;
}

/* Rows of k inputs as wide tiles take them: floats, or bfloat16. */
static const void *wide_inputs(const Linear *l, int m, Activations x, Workspace *b) {
  if (l->kind == F32 || x.packed) return x.at;
  for (int j = 0; (x.at != b->held || b->form != WHOLE_ROWS) && j < m; j++)
    narrow((const float *)x.at + j * l->k, l->k, (uint16_t *)b->inputs + j * l->k);
  b->held = x.at;
  b->form = WHOLE_ROWS;
  return b->inputs;
}

/* The outputs of panels p and q, in wide tiles. */
static void pair_of_outputs(const Linear *l, int64_t p, int64_t q, int m, Activations x, Activations y, int64_t ldy, How how,
                            Workspace *b) {
  const char *w = weights_to(l, p * PANEL);
  const int64_t k = l->k, ldw = row_of(l->kind), row = 2 * ldw;
  const int64_t apart = weights_to(l, q * PANEL) - w;
  const int n = (int)parts(m, WIDE), at_once = AT_ONCE(l->kind);
  const int64_t terms = n > 1 ? k : KC; /* of many rows, all: no sum waits in memory */
  const char *inputs = wide_inputs(l, m, x, b);
  for (int64_t from = 0; from < k; from += terms, w += terms / at_once * ldw) {
    const int64_t kc = smaller(terms, k - from), rows = parts(kc, at_once);
    for (int left = n, at = 0; left; left--) {
      const int mb = (m - at) / left;
      const void *in = inputs + (at * k + from) * input_size(l->kind);
      const int64_t share = rows * (n - left) * (row / n), panel = n > 1 ? l->stride : rows / 2 * row;
      /* The next pair lies after this one. If the panels lie apart, each one's next lies after it. */
      const char *next = w - before_rows(l) + share;
      if (q == p + 1) next += 2 * panel;
      else next += share < panel ? panel : apart;
      const NextWeights ahead = {next, row / n};
#ifdef BY_VECTORS
      if (l->kind == INT8_HALF && left < n) /* widened by the first tile */
        wide_of_many(mb, kc, in, k, b->panel, row_of(BF16), 2 * row_of(BF16), b->sums, from > 0, &ahead, NULL);
      else
#endif
        wide_of(l->kind, n)(mb, kc, in, k, w, apart, ldw, b->sums, from > 0, &ahead, b->panel);
      if (from + kc == k) finish_pair(l, p, q, mb, from_output(y, ldy, at, p * PANEL), (q - p) * PANEL, ldy, how, b->sums);
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
  return how == GATED || is_wide(l, m) ? 2 : 1;
}

/* Unit `i` of a matrix, for ROWS inputs at most. What is packed is computed in wide tiles, whatever the number of rows. */
INLINE void compute_unit(const Linear *l, int64_t i, int64_t m, Activations x, Activations y, How how, Workspace *b) {
  const int64_t each = x.packed ? 2 : unit_of(l, m, how), panels = parts(l->n, PANEL), units = parts(panels, each);
  const int64_t first = i / units * ROWS, p0 = i % units * (how == GATED ? 1 : each), rows = smaller(ROWS, m - first);
  const int64_t q = how == GATED ? p0 + units : p0 + 1, ldy = how == GATED ? l->n / 2 : l->n;
  x = from_output(x, l->k, first, 0);
  y = from_output(y, ldy, first, 0);
  if (x.packed || (is_wide(l, rows) && (q + 1) * PANEL <= l->n)) pair_of_outputs(l, p0, q, (int)rows, x, y, ldy, how, b);
  else if (how == GATED) {
    sums_of(l, p0, (int)rows, x.at, l->k, b->sums, PAIR, b);
    sums_of(l, q, (int)rows, x.at, l->k, b->sums + PANEL, PAIR, b);
    finish_gated(l, p0, q, (int)rows, b->sums, from_output(y, ldy, 0, p0 * PANEL), ldy);
  } else
    for (int64_t p = p0; p < smaller(p0 + each, panels); p++)
      outputs(l, p, (int)rows, x.at, l->k, y.at, l->n, how, b);
}

int64_t units_of(const Linear *l, int64_t m) {
  return parts(m, ROWS) * parts(parts(l->n, PANEL), unit_of(l, m, SET));
}

void linear_unit(const Linear *l, int64_t unit, int64_t m, const float *x, float *y, Workspace *b) {
  compute_unit(l, unit, m, (Activations){(void *)x, 0}, (Activations){y, 0}, SET, b);
}

void linear(const Linear *l, int64_t m, Activations x, Activations y, How how, Workspace *b) {
  const int64_t each = x.packed ? 2 : unit_of(l, m, how);
  const int64_t units = parts(m, ROWS) * parts(parts(l->n, PANEL), each); /* 0 if a chunk wants no logits */
  b->held = NULL;
#ifdef TILES
  if (HALF_INPUTS(l->kind)) {
    linear_on_tiles(l, m, x, y, how, b);
    return;
  }
#endif
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

/* Whether such products are made on tiles. */
int32_t petiole_tiles(void) {
#ifdef TILES
  return 1;
#else
  return 0;
#endif
}

/* The instructions that products are made with, for the log; half: of a model in bfloat16. */
const char *petiole_instructions(int32_t half) {
#if defined(TILES)
  if (half) return "AMX";
#elif defined(DOT)
  if (half) return "AVX-512 with bfloat16";
#endif
  (void)half;
#if defined(__AVX512F__)
  return "AVX-512";
#elif defined(__AVX2__)
  return "AVX2";
#else
  return "vectors of the compiler";
#endif
}

/* ---------------------------------------------------------------- memory */

Workspace new_workspace(int64_t rows, int64_t k, Arena *s) {
  const int64_t all = rows;
  rows = smaller(rows, ROWS);
  const int64_t tiled = parts(rows, 2 * SIDE) * 2 * SIDE;
  return (Workspace){.packed = allocate(s, packed_size(all, k)),
                 .inputs = allocate_floats(s, (parts(k, KC) * KC + 2 * parts(k, SHORTEST_RUN)) * tiled),
                 .sums = allocate_floats(s, 2 * MOST_PANELS * ROWS * PANEL),
                 .panel = allocate_floats(s, parts(k, KC) * KC * PANEL)};
}

/* The bytes of scratch that each thread of `petiole_linear` needs. */
int64_t petiole_linear_scratch(const Linear *l, int64_t m) {
  Arena none = {NULL, 0};
  new_workspace(m, l->k, &none);
  return none.used;
}

/* One product by itself, so that it can be measured. */
void petiole_linear(const Linear *l, int64_t m, const float *x, float *y, char *scratch, int64_t stride,
                    int32_t n_threads) {
  const Workspace first = new_workspace(m, l->k, &(Arena){scratch, 0});
#pragma omp parallel num_threads(n_threads)
  {
    Workspace own = new_workspace(m, l->k, &(Arena){scratch + omp_get_thread_num() * stride, 0});
    own.packed = first.packed;
    const uint32_t before = begin_tiles();
    linear(l, m, (Activations){(void *)x, 0}, (Activations){y, 0}, SET, &own);
    end_tiles(before);
  }
}
