/* Sums of a panel with scales by group (groups.h), of inputs in bfloat16 or rounded to bytes, on tiles (tiles.h).
 *
 * One instruction adds up a run of inputs: of bfloat16 even terms and odd ones apart, as tiles.c says; sums of bytes are
 * integers, exact in any order. Its sums go from zero through memory to the registers that hold the totals, where they are
 * scaled, while the next runs are multiplied.
 *
 * The codes of KC inputs become pairs of bfloat16, or fours of bytes, in tiles that stay in the first-level cache: two for
 * each run, of SIDE outputs each. While these are multiplied, the next codes are widened.
 *
 * A few rows are multiplied by vectors: bfloat16 as floats, in the same order of the terms (APART in slices.h). Codes go from
 * memory to registers, and nothing is stored and loaded again.
 */
#include "slices.h"

#include "tiles.h"

#ifdef TILES
#define RUNS (KC / SHORTEST_RUN) /* of KC inputs, at most */
#define UNDER_WAY 4              /* runs whose sums lie in memory */
#define LAG 2                    /* runs later, sums have come from memory */

/* What a panel's weights from KC inputs become. run: its inputs */
typedef struct {
  char *tiles; /* [runs][2] */
  int64_t runs, run;
  float scales[RUNS][PANEL], zeros[RUNS][PANEL];
} Widened;

/* Codes that become tiles, EIGHT inputs at a time. */
typedef struct {
  const char *codes;
  int64_t at, n, end; /* inputs: the next ones; from n up to `end`, whole runs, there are zeros */
  char *out;
  Widened *to;
} Widening;

/* ---------------------------------------------------------------- weights */

/* Bytes of the weights of a run to SIDE outputs. size: bytes of a weight, as of an input */
INLINE int64_t bytes_of_tile(int size, const Widened *w) { return w->run * size * SIDE; }

/* The values of four inputs' codes to a panel, bytes. */
INLINE void four_bytes(const Groups *g, const char *w, vpu values[PARTS]) {
  Codes codes[PARTS];
  codes_at(0, w, codes);
#pragma GCC unroll 2
  for (int part = 0; part < PARTS; part++) values[part] = (vpu)(codes[part] + (uint8_t)(int8_t)g->values[0]);
}

INLINE void widen_eight(int kind, int size, const Groups *g, Widening *from) {
  if (from->at == from->end) return;
  const int known = from->at < from->n;
  const int64_t tile = bytes_of_tile(size, from->to);
  char *out = from->out;
#pragma GCC unroll 4
  for (int i = 0; i < EIGHT; i += FLOATS / size, out += 64) {
    vpu values[PARTS] = {0};
    if (known) {
      prefetch_ahead(kind, from->codes, i);
      if (size == BYTES) four_bytes(g, from->codes + i * step_of(kind) / EIGHT, values);
      else two_halves(kind, g, from->codes, i, values);
    }
    *(vu *)out = (vu)values[0];
    *(vu *)(out + tile) = (vu)values[1];
  }
  from->at += EIGHT;
  from->out = from->at & (from->to->run - 1) ? out : out + tile; /* behind those to the other outputs */
  from->codes += step_of(kind);
}

/* The numbers of runs from input `from` on, of groups that may share a factor. */
INLINE void numbers_of_runs(const Groups *g, int64_t from, const Widened *to, int kind, const char *numbers, const char *factors,
                            float out[RUNS][PANEL]) {
  for (int64_t r = 0; r < to->runs; r++) {
    const int64_t group = (from + r * to->run) / g->size;
#pragma GCC unroll 2
    for (int part = 0; part < PARTS; part++) {
      vp found = numbers_at(kind, numbers, group * PANEL + part * WIDTH);
      if (factors) found *= numbers_at(HALF, factors, (group >> g->shift) * PANEL + part * WIDTH);
      set_part(out[r] + part * WIDTH, found);
    }
  }
}

/* Begins to widen the weights from KC inputs on. */
INLINE Widening widen_from(const Linear *l, const Panel *panel, int64_t from, Widened *to) {
  const Groups *g = l->groups;
  const int64_t n = smaller(KC, l->k - from);
  to->runs = from < l->k ? parts(n, to->run) : 0;
  numbers_of_runs(g, from, to, g->scale_kind, panel->scales, panel->factors, to->scales);
  if (panel->zeros) numbers_of_runs(g, from, to, g->zero_kind, panel->zeros, panel->zero_factors, to->zeros);
  return (Widening){panel->codes + from / EIGHT * step_of(l->kind), 0, n, to->runs * to->run, to->tiles, to};
}

/* ---------------------------------------------------------------- sums */

/* out [SIDE][SIDE] = the sums of a run: floats, or integers of bytes. (Constants choose the registers, so that two runs are
 * under way.) */
#define SUM_RUN(size, sums, inputs, weights, x, w, out) \
  do { \
    _tile_zero(sums); \
    _tile_loadd(weights, w, 64); \
    _tile_loadd(inputs, x, KC * size); \
    if (size == BYTES) _tile_dpbssd(sums, inputs, weights); \
    else _tile_dpbf16ps(sums, inputs, weights); \
    _tile_stored(sums, out, 64); \
  } while (0)

/* totals [rows] += a run's sums, scaled. sums, steps: of the rows' inputs */
INLINE void scale_run(int size, int rows, int zeros, int offsets, const float *scales, const float *zero, const float *sums,
                      const float *steps, const char *run, vf totals[SIDE]) {
  const vf by = load(scales), away = zeros ? load(zero) : (vf){0};
#pragma GCC unroll 16
  for (int j = 0; j < rows; j++, run += 64) {
    vf total = size == BYTES ? __builtin_convertvector(*(const vi *)run, vf) : *(const vf *)run;
    if (zeros && !offsets) total = add_times(total, -away, splat(sums[j]));
    if (size == BYTES) total *= splat(steps[j]);
    totals[j] = add_times(totals[j], total, by);
    if (zeros && offsets) totals[j] += away * splat(sums[j]);
  }
}

/* The rows of a block, from KC inputs on. x: of the first run. sums, steps: of each run's inputs, [runs][apart] */
typedef struct {
  const char *x;
  const float *sums, *steps;
  int64_t apart;
} Block;

/* c [rows, SIDE] += the sums of all runs, scaled, while some of the next weights are widened. half: which outputs of the
 * panel. */
INLINE void add_runs(int kind, int size, int rows, int zeros, int offsets, const Groups *g, const Widened *w, int half,
                     const Block *in, float *c, int64_t ldc, Widening *next) {
  char found[UNDER_WAY][TILE] __attribute__((aligned(64)));
  const int64_t bytes = w->run * size, tile = bytes_of_tile(size, w);
  const char *weights = w->tiles + half * tile;
  vf totals[SIDE];
#pragma GCC unroll 16
  for (int j = 0; j < rows; j++) totals[j] = load(c + j * ldc);
  for (int64_t r = 0; r < w->runs + LAG; r++) {
    if (r < w->runs) {
      SETTLE_MEMORY();
      if (r % 2) SUM_RUN(size, 1, 5, 7, in->x + r * bytes, weights + r * 2 * tile, found[r % UNDER_WAY]);
      else SUM_RUN(size, 0, 4, 6, in->x + r * bytes, weights + r * 2 * tile, found[r % UNDER_WAY]);
      SETTLE_MEMORY();
      widen_eight(kind, size, g, next);
      if (w->run == DEPTH) widen_eight(kind, size, g, next);
    }
    if (r < LAG) continue;
    const int64_t i = r - LAG, at = i * in->apart;
    scale_run(size, rows, zeros, offsets, w->scales[i] + half * SIDE, w->zeros[i] + half * SIDE, in->sums + at,
              in->steps + at, found[i % UNDER_WAY], totals);
  }
#pragma GCC unroll 16
  for (int j = 0; j < rows; j++) store(c + j * ldc, totals[j]);
}

/* All rows. After the last one some are computed that nobody reads. */
INLINE void add_all_runs(int kind, int size, int zeros, int offsets, const Groups *g, int64_t m, const Widened *w,
                         const Block *first, float *c, int64_t ldc, Widening *next) {
  for (int64_t j = 0; j < m; j += SIDE)
    for (int half = 0; half < 2; half++) {
      const Block in = {first->x + j * KC * size, first->sums + j, first->steps + j, m};
      float *to = c + j * ldc + half * SIDE;
      /* constants, so that each case is unrolled */
      if (m - j == 1) add_runs(kind, size, 1, zeros, offsets, g, w, half, &in, to, ldc, next);
      else if (m - j <= 4) add_runs(kind, size, 4, zeros, offsets, g, w, half, &in, to, ldc, next);
      else if (m - j <= 8) add_runs(kind, size, 8, zeros, offsets, g, w, half, &in, to, ldc, next);
      else add_runs(kind, size, SIDE, zeros, offsets, g, w, half, &in, to, ldc, next);
    }
}

INLINE void sums_of_runs(int kind, int size, const Linear *l, int64_t p, int64_t m, const GroupInputs *x, float *c,
                         int64_t ldc, Workspace *b) {
  const Groups *g = l->groups;
  const Panel panel = panel_at(l, p);
  const int64_t run = run_of(g);
  Widened both[2] = {{.tiles = b->panel, .run = run}, {.tiles = (char *)b->panel + KC * 64, .run = run}};
  for (int64_t j = 0; j < m; j++) memset(c + j * ldc, 0, sizeof(float) * PANEL);
  Widening next = widen_from(l, &panel, 0, both);
  for (int64_t from = 0; from < l->k; from += KC) {
    while (next.at < next.end) widen_eight(kind, size, g, &next);
    const Widened *w = next.to;
    const Block in = {x->numbers + from * m * size, x->sums + from / run * m, x->steps + from / run * m, m};
    next = widen_from(l, &panel, from + KC, both + (w == both));
    if (!panel.zeros) add_all_runs(kind, size, 0, 0, g, m, w, &in, c, ldc, &next);
    else if (!g->offsets) add_all_runs(kind, size, 1, 0, g, m, w, &in, c, ldc, &next);
    else add_all_runs(kind, size, 1, 1, g, m, w, &in, c, ldc, &next);
  }
}

void panel_on_tiles(const Linear *l, int64_t p, int64_t m, const GroupInputs *x, float *c, int64_t ldc, Workspace *b) {
  const int64_t bytes = run_of(l->groups) * (l->groups->inputs == INT8 ? BYTES : HALVES);
  const int fits = m >= SIDE && bytes == DEPTH * HALVES;
  if (!fits) fit_runs(m, bytes);
  if (l->groups->inputs == INT8) sums_of_runs(FOUR, BYTES, l, p, m, x, c, ldc, b);
  else if (l->kind == FOUR) sums_of_runs(FOUR, HALVES, l, p, m, x, c, ldc, b);
  else if (l->kind == SIX) sums_of_runs(SIX, HALVES, l, p, m, x, c, ldc, b);
  else if (l->kind == INT8) sums_of_runs(INT8, HALVES, l, p, m, x, c, ldc, b);
  else sums_of_runs(E4M3, HALVES, l, p, m, x, c, ldc, b);
  if (!fits) fit_tiles(2 * SIDE);
}
#endif
