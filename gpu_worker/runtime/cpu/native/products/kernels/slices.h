/* Panels of weights by group (groups.h), in slices of inputs. Two files compute them, and compile beside each other. */
#pragma once
#include "../packed/codes.h"
#include "../packed/pack.h"

#define AHEAD 4096 /* bytes: codes that are prefetched */

/* Beside at most DIRECT rows codes become numbers in registers, for FEW rows at a time. Beside more they do once for all
 * rows, in memory that the first cache holds: WIDENED bytes. Registers hold the sums and totals of SOME rows, but the totals
 * of FEW rows wait in memory. */
#ifdef __AVX512F__
#define DIRECT 32
#define FEW 8
#define SOME 6
#else
#define DIRECT 2
#define FEW 2
#define SOME 3
#endif
#define MOST (FEW > SOME ? FEW : SOME)
#ifndef APART
#define APART 0 /* whether even and odd terms are added up apart, as tiles do */
#endif
#define LONGEST_RUN 32
#define WIDENED 16384

/* Bytes of an input: a float, a bfloat16, or an integer. Where the processor has no products of bytes, an integer is a
 * float, too. */
enum { FLOATS = 4, HALVES = 2, BYTES = 1 };
#if defined(BY_FOUR) || WIDTH == 8
#define BY_BYTES
#define ROUNDED BYTES
#else
#define ROUNDED FLOATS
#endif

/* ---------------------------------------------------------------- runs */

/* The values of two inputs' codes, or pairs of them. */
INLINE void two_of(int kind, int size, const Groups *g, const char *w, int i, vp values[2][PARTS]) {
#ifdef DOT
  if (size == HALVES) {
    two_halves(kind, g, w, i, (vpu *)values[0]);
    return;
  }
#endif
  (void)size;
  two_values(kind, g, w, i, values);
}

INLINE void prefetch_ahead(int kind, const char *w, int i) {
  if (i % (kind == FOUR ? 4 : 2) == 0) __builtin_prefetch(w + i * step_of(kind) / EIGHT + AHEAD, 0, 3);
}

/* sums += inputs i, one of each row, times values, or inputs i and i + 1 times pairs of them. */
INLINE void add_input(int size, int mb, int odd, const char *x, int i, vp values[2][PARTS], vp sums[MOST][PARTS]) {
#pragma GCC unroll 16
  for (int j = 0; j < mb; j++) {
#ifdef DOT
    if (size == HALVES) {
      const vu in = pair_at(x, j * KC + i);
#pragma GCC unroll 4
      for (int part = 0; part < PARTS; part++) sums[j][part] = add_pairs(sums[j][part], (vu)values[0][part], in);
      continue;
    }
#endif
    const vp in = splat_part(((const float *)x)[j * KC + i]);
#pragma GCC unroll 4
    for (int part = 0; part < PARTS; part++) sums[j][part] = add_times_part(sums[j][part], values[odd][part], in);
  }
  (void)size;
}

/* sums += those of n inputs, a multiple of EIGHT */
INLINE void sum_codes(int kind, int size, int mb, int n, const Groups *g, const char *x, const char *w,
                      vp sums[1 + APART][MOST][PARTS]) {
  for (int i = 0; i < n; i += EIGHT, w += step_of(kind))
#pragma GCC unroll 4
    for (int k = 0; k < EIGHT; k += 2) {
      vp values[2][PARTS];
      prefetch_ahead(kind, w, k);
      two_of(kind, size, g, w, k, values);
#pragma GCC unroll 2
      for (int odd = 0; odd < size / 2; odd++) add_input(size, mb, odd, x, i + k + odd, values, sums[APART & odd]);
    }
}

INLINE void sum_numbers(int size, int mb, int n, const char *x, const float *w, vp sums[MOST][PARTS]) {
  for (int i = 0; i < n; i += FLOATS / size, w += PANEL) {
#if WIDTH == 8 /* a value in a register at a time, and the inputs of all rows */
#pragma GCC unroll 4
    for (int part = 0; part < PARTS; part++) {
      const vp value = part_at(w + part * WIDTH);
#pragma GCC unroll 4
      for (int j = 0; j < mb; j++)
        sums[j][part] = add_times_part(sums[j][part], value, splat_part(((const float *)x)[j * KC + i]));
    }
#else
    vp values[2][PARTS];
#pragma GCC unroll 2
    for (int part = 0; part < PARTS; part++) values[0][part] = part_at(w + part * WIDTH);
    add_input(size, mb, 0, x, i, values, sums);
#endif
  }
}

#ifdef BY_BYTES
typedef uint8_t Codes __attribute__((vector_size(BY_SHUFFLE), aligned(1)));

/* The codes of a vector's inputs to the two halves of a panel. widened: they are bytes */
INLINE void codes_at(int widened, const char *w, Codes codes[2]) {
  const Codes *at = (const Codes *)w;
  codes[0] = widened ? at[0] : at[0] & 15;
  codes[1] = widened ? at[1] : at[0] >> 4;
}

INLINE void widen_bytes_of(int n, const char *w, Codes *out) {
  for (int i = 0; i < n * PANEL / 2; i += BY_SHUFFLE, out += 2) {
    __builtin_prefetch(w + i + AHEAD, 0, 3);
    codes_at(0, w + i, out);
  }
}
#endif

#ifdef BY_FOUR
/* totals += codes of n inputs times bytes */
INLINE void sum_bytes(int widened, int mb, int n, const int8_t *x, const char *w, vpi totals[MOST][PARTS]) {
#pragma GCC unroll 8
  for (int i = 0; i < n; i += 4, w += BY_SHUFFLE * (1 + widened)) {
    Codes codes[2];
    codes_at(widened, w, codes);
    if (!widened) __builtin_prefetch(w + AHEAD, 0, 3);
#pragma GCC unroll 16
    for (int j = 0; j < mb; j++) {
      int32_t four;
      memcpy(&four, x + j * KC + i, sizeof(four));
#pragma GCC unroll 2
      for (int part = 0; part < PARTS; part++)
        totals[j][part] = (vpi)_mm512_dpbusd_epi32((__m512i)totals[j][part], (__m512i)codes[part], _mm512_set1_epi32(four));
    }
  }
}
#elif defined(BY_BYTES)
/* The same, for EIGHT inputs or twice as many: so a sum of products has 16 bits. */
INLINE void sum_few_bytes(int widened, int mb, int n, const int8_t *x, const char *w, vpi totals[MOST][PARTS]) {
  __m256i sums[MOST][2] = {0};
#pragma GCC unroll 8
  for (int i = 0; i < n; i += 2, w += PANEL * (1 + widened)) {
    Codes codes[2];
    codes_at(widened, w, codes);
#pragma GCC unroll 3
    for (int j = 0; j < mb; j++) {
      int16_t pair;
      memcpy(&pair, x + j * KC + i, sizeof(pair));
      const __m256i in = _mm256_set1_epi16(pair);
#pragma GCC unroll 2
      for (int half = 0; half < 2; half++)
        sums[j][half] = _mm256_add_epi16(sums[j][half], _mm256_maddubs_epi16((__m256i)codes[half], in));
    }
  }
#pragma GCC unroll 3
  for (int j = 0; j < mb; j++)
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      const __m256i found = sums[j][half], signs = _mm256_srai_epi16(found, 15);
      __m256i *total = (__m256i *)totals[j] + 2 * half;
      total[0] = _mm256_add_epi32(total[0], _mm256_unpacklo_epi16(found, signs));
      total[1] = _mm256_add_epi32(total[1], _mm256_unpackhi_epi16(found, signs));
    }
}

INLINE void sum_bytes(int widened, int mb, int n, const int8_t *x, const char *w, vpi totals[MOST][PARTS]) {
  const int step = PANEL / 2 * (1 + widened);
  int i = 0;
  for (; i + 2 * EIGHT <= n; i += 2 * EIGHT) sum_few_bytes(widened, mb, 2 * EIGHT, x + i, w + i * step, totals);
  if (i < n) sum_few_bytes(widened, mb, EIGHT, x + i, w + i * step, totals);
}
#endif

/* ---------------------------------------------------------------- slices */

/* A product's inputs as group_inputs makes them. For each run and row, [runs][m]: the sum of its inputs, of rounded ones
 * beside offsets times their step; the step of those that are rounded, and where the sum of bytes starts: a value is the first
 * one plus its code. */
typedef struct {
  char *numbers;
  float *sums, *steps;
  int32_t *starts;
} GroupInputs;

/* Inputs from number `from` on, n of them: whole runs, or the last ones. For each run and row what GroupInputs has, where it
 * is needed, or null. apart: from one run to the next */
typedef struct {
  int64_t from;
  int n, run;
  const float *sums, *steps;
  const int32_t *starts;
  int64_t apart;
} Slice;

#define ANY -1 /* a kind of scales that is not known when compiled, and maybe zeros or steps beside them */

/* c [mb, PANEL] += the sums of a slice's runs, each of them scaled. x: [mb][KC]. w: of the slice. scales: their kind where
 * there is nothing beside them, or ANY */
INLINE void add_slice(int widened, int kind, int size, int scales, int mb, const Slice *s, const Groups *g,
                      const Panel *panel, const char *x, const char *w, float *c, int64_t ldc) {
  const int scale_kind = scales == ANY ? g->scale_kind : scales;
  const char *zeros_at = scales == ANY ? panel->zeros : NULL;
  const int64_t step = widened ? size * EIGHT * PANEL : step_of(kind);
  const float *inputs = s->sums, *steps = scales == ANY ? s->steps : NULL;
  const int32_t *starts = s->starts;
  const int offsets = scales == ANY && g->offsets;
  int64_t group = s->from / g->size, next = (group + 1) * g->size - s->from;
  const int held = mb <= SOME; /* totals lie in registers */
  vp totals[MOST][PARTS];
#pragma GCC unroll 16
  for (int j = 0; j < mb; j++)
#pragma GCC unroll 4
    for (int part = 0; held && part < PARTS; part++) totals[j][part] = part_at(c + j * ldc + part * WIDTH);
  for (int i = 0; i < s->n; i += s->run, w += s->run / EIGHT * step) {
    const int n = (int)smaller(s->run, s->n - i);
    const char *in = x + i * size;
    vp sums[1 + APART][MOST][PARTS] = {0};
#ifdef BY_BYTES
    if (size == BYTES) {
      vpi integers[MOST][PARTS];
#pragma GCC unroll 16
      for (int j = 0; j < mb; j++)
#pragma GCC unroll 4
        for (int part = 0; part < PARTS; part++) integers[j][part] = starts[j] - (vpi){0};
      sum_bytes(widened, mb, n, (const int8_t *)in, w, integers);
#pragma GCC unroll 16
      for (int j = 0; j < mb; j++)
#pragma GCC unroll 4
        for (int part = 0; part < PARTS; part++) sums[0][j][part] = __builtin_convertvector(integers[j][part], vp);
    } else
#endif
    if (widened) sum_numbers(size, mb, n, in, (const float *)w, sums[0]);
    else if (scales != ANY && n == LONGEST_RUN) {
#pragma GCC unroll 4
      for (int k = 0; k < LONGEST_RUN; k += EIGHT)
        sum_codes(kind, size, mb, EIGHT, g, in + k * size, w + k / EIGHT * step, sums);
    } else sum_codes(kind, size, mb, n, g, in, w, sums);
    if (i >= next) group++, next += g->size;
#pragma GCC unroll 4
    for (int part = 0; part < PARTS; part++) {
      const int64_t at = group * PANEL + part * WIDTH;
      vp scale = numbers_at(scale_kind, panel->scales, at), zeros = zeros_at ? numbers_at(g->zero_kind, zeros_at, at) : (vp){0};
      if (scales == ANY && panel->factors) {
        const int64_t shared = (group >> g->shift) * PANEL + part * WIDTH;
        scale *= numbers_at(HALF, panel->factors, shared);
        if (zeros_at) zeros *= numbers_at(HALF, panel->zero_factors, shared);
      }
#pragma GCC unroll 16
      for (int j = 0; j < mb; j++) {
        vp total = APART ? sums[0][j][part] + sums[APART][j][part] : sums[0][j][part];
        if (zeros_at && !offsets) total = add_times_part(total, -zeros, splat_part(inputs[j]));
        if (steps) total *= splat_part(steps[j]);
        const vp added = zeros_at && offsets ? zeros * splat_part(inputs[j]) : (vp){0};
        float *to = c + j * ldc + part * WIDTH;
        vp sum = add_times_part(held ? totals[j][part] : part_at(to), total, scale);
        if (zeros_at && offsets) sum += added;
        if (held) totals[j][part] = sum;
        else set_part(to, sum);
      }
    }
    if (inputs) inputs += s->apart;
    if (steps) steps += s->apart;
    if (starts) starts += s->apart;
  }
#pragma GCC unroll 16
  for (int j = 0; j < mb; j++)
#pragma GCC unroll 4
    for (int part = 0; held && part < PARTS; part++) set_part(c + j * ldc + part * WIDTH, totals[j][part]);
}

INLINE int rows_at_once(int widened) { return widened ? SOME : FEW; }

/* constants, so that each case is unrolled */
INLINE void add_rows(int widened, int kind, int size, int scales, int mb, const Slice *s, const Groups *g,
                     const Panel *panel, const char *x, const char *w, float *c, int64_t ldc) {
#define CASE(mb) \
  case mb: \
    if (mb <= rows_at_once(widened)) add_slice(widened, kind, size, scales, mb, s, g, panel, x, w, c, ldc); \
    break;
  switch (mb) {
    CASE(1) CASE(2) CASE(3)
#if MOST == 8
    CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#endif
  }
#undef CASE
}

/* ---------------------------------------------------------------- panels */

/* The codes of n inputs -> floats [n][PANEL], pairs of bfloat16 [n / 2][PANEL], or bytes as codes_at takes them */
INLINE void widen_codes(int kind, int size, int n, const Groups *g, const char *w, float *out) {
#ifdef BY_BYTES
  if (size == BYTES) {
    widen_bytes_of(n, w, (Codes *)out);
    return;
  }
#endif
  for (int i = 0; i < n; i += EIGHT, w += step_of(kind))
#pragma GCC unroll 4
    for (int k = 0; k < EIGHT; k += 2) {
      vp values[2][PARTS];
      prefetch_ahead(kind, w, k);
      two_of(kind, size, g, w, k, values);
#pragma GCC unroll 2
      for (int odd = 0; odd < size / 2; odd++, out += PANEL)
#pragma GCC unroll 4
        for (int part = 0; part < PARTS; part++) set_part(out + part * WIDTH, values[odd][part]);
    }
}

/* x: what group_inputs made */
INLINE void panel_of_kind(int kind, int size, int scales, const Linear *l, int64_t p, int m, const GroupInputs *x, float *c,
                          int64_t ldc, Workspace *b) {
  const Groups *g = l->groups;
  const Panel panel = panel_at(l, p);
  const int widened = scales == ANY && m > DIRECT;
  const int64_t at_once = widened ? smaller(KC, WIDENED / PANEL / size) : KC, run = run_of(g);
  const char *w = panel.codes;
  for (int j = 0; j < m; j++) memset(c + j * ldc, 0, sizeof(float) * PANEL);
  for (int64_t from = 0; from < l->k; from += at_once, w += at_once / EIGHT * step_of(kind)) {
    const char *in = x->numbers + (from / KC * m * KC + from % KC) * size;
    Slice s = {from, (int)smaller(at_once, l->k - from), (int)run, NULL, NULL, NULL, m};
    if (panel.zeros) s.sums = x->sums + from / run * m;
    if (g->inputs == INT8) s.steps = x->steps + from / run * m;
    if (size == BYTES) s.starts = x->starts + from / run * m;
    if (widened) widen_codes(kind, size, s.n, g, w, b->panel);
    for (int left = (int)parts(m, rows_at_once(widened)), at = 0; left; left--) {
      const int mb = (m - at) / left;
      const char *rows = in + at * KC * size;
      if (widened) add_rows(1, kind, size, ANY, mb, &s, g, &panel, rows, b->panel, c + at * ldc, ldc);
      else add_rows(0, kind, size, scales, mb, &s, g, &panel, rows, w, c + at * ldc, ldc);
      at += mb;
      if (s.sums) s.sums += mb;
      if (s.steps) s.steps += mb;
      if (s.starts) s.starts += mb;
    }
  }
}

/* constants, so that each case is a loop of its own */
#define OF_KIND(size, kind, scales) panel_of_kind(kind, size, scales, l, p, m, x, c, ldc, b)
#define OF_KINDS(size) \
  if (l->kind == FOUR) OF_KIND(size, FOUR, ANY); \
  else if (l->kind == SIX) OF_KIND(size, SIX, ANY); \
  else if (l->kind == INT8) OF_KIND(size, INT8, ANY); \
  else OF_KIND(size, E4M3, ANY);
/* Four bits with these scales alone are quicker where that is known. */
#define OF_KINDS_AND_ALONE(size) \
  const int alone = l->groups->zeros || m > DIRECT ? ANY : l->groups->scale_kind; \
  if (l->kind == FOUR && alone == POWER) OF_KIND(size, FOUR, POWER); \
  else if (l->kind == FOUR && alone == HALF) OF_KIND(size, FOUR, HALF); \
  else OF_KINDS(size)

/* c [m][ldc] = x W of a panel, of inputs that are floats, or were rounded. */
void panel_of_floats(const Linear *l, int64_t p, int m, const GroupInputs *x, float *c, int64_t ldc, Workspace *b);
void panel_of_rounded(const Linear *l, int64_t p, int m, const GroupInputs *x, float *c, int64_t ldc, Workspace *b);

#ifdef TILES
/* The same of inputs in bfloat16 or rounded, for more rows than vectors multiply; c has whole tiles of rows. See
 * group_tiles.c. */
void panel_on_tiles(const Linear *l, int64_t p, int64_t m, const GroupInputs *x, float *c, int64_t ldc, Workspace *b);
#endif
