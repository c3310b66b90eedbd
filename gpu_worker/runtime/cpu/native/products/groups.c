/* Sums of a panel whose weights have scales by group (groups.h). */
#include "groups.h"

#include "pack.h"

#define AHEAD 4096 /* bytes: codes that are asked for before they are needed */

/* Beside at most DIRECT rows codes become numbers in registers, for FEW rows at a time. Beside more they do once for all
 * rows, in memory that the first cache holds: WIDENED bytes. Then registers hold the sums and totals of SOME rows. */
#ifdef __AVX512F__
#define DIRECT 16
#define FEW 8
#define SOME 6
#else
#define DIRECT 2
#define FEW 2
#define SOME 3
#endif
#define MOST (FEW > SOME ? FEW : SOME)
#define WIDENED 8192

/* How a sum is made: of codes; of what they have become, floats [inputs][PANEL] or pairs of bfloat16 [inputs / 2][PANEL];
 * of codes beside bytes. */
enum { OF_CODES, OF_NUMBERS, OF_INTEGERS };

/* Inputs that are rounded are bytes, or floats where the processor has no products of bytes. */
#if defined(BY_FOUR) || WIDTH == 8
#define ROUNDED_SIZE 1
#else
#define ROUNDED_SIZE 4
#endif

/* ---------------------------------------------------------------- runs */

/* x, `i` inputs further on. */
INLINE const char *input_at(int form, int halves, const char *x, int64_t i) {
  return x + i * (form == OF_INTEGERS ? 1 : halves ? 2 : 4);
}

/* The values of two inputs' codes, or pairs of them. */
INLINE void two_of(int kind, int halves, const Groups *g, const char *w, int i, vp values[2][PARTS]) {
#ifdef DOT
  if (halves) {
    two_halves(kind, g, w, i, (vpu *)values[0]);
    return;
  }
#endif
  (void)halves;
  two_values(kind, g, w, i, values);
}

INLINE void ask_ahead(int kind, const char *w, int i) {
  if (i % (kind == FOUR ? 4 : 2) == 0) __builtin_prefetch(w + i * step_of(kind) / EIGHT + AHEAD, 0, 3);
}

/* sums += inputs i, one of each row, times values, or inputs i and i + 1 times pairs of them. */
INLINE void add_input(int halves, int mb, int odd, const char *x, int i, vp values[2][PARTS], vp sums[MOST][PARTS]) {
#pragma GCC unroll 16
  for (int j = 0; j < mb; j++) {
#ifdef DOT
    if (halves) {
      const vu in = pair_at(x, j * KC + i);
#pragma GCC unroll 4
      for (int part = 0; part < PARTS; part++) sums[j][part] = add_pairs(sums[j][part], (vu)values[0][part], in);
      continue;
    }
#endif
    const vp in = spread(((const float *)x)[j * KC + i]);
#pragma GCC unroll 4
    for (int part = 0; part < PARTS; part++) sums[j][part] += values[odd][part] * in;
  }
  (void)halves;
}

/* sums += those of n inputs, a multiple of EIGHT */
INLINE void sum_codes(int kind, int halves, int mb, int n, const Groups *g, const char *x, const char *w, vp sums[MOST][PARTS]) {
  for (int i = 0; i < n; i += EIGHT, w += step_of(kind))
#pragma GCC unroll 4
    for (int k = 0; k < EIGHT; k += 2) {
      vp values[2][PARTS];
      ask_ahead(kind, w, k);
      two_of(kind, halves, g, w, k, values);
#pragma GCC unroll 2
      for (int odd = 0; odd < 2 - halves; odd++) add_input(halves, mb, odd, x, i + k + odd, values, sums);
    }
}

INLINE void sum_numbers(int halves, int mb, int n, const char *x, const float *w, vp sums[MOST][PARTS]) {
  for (int i = 0; i < n; i += 1 + halves, w += PANEL) {
#if WIDTH == 8 /* a value in a register at a time, and the inputs of all rows */
#pragma GCC unroll 4
    for (int part = 0; part < PARTS; part++) {
      const vp value = part_at(w + part * WIDTH);
#pragma GCC unroll 4
      for (int j = 0; j < mb; j++) sums[j][part] += value * spread(((const float *)x)[j * KC + i]);
    }
#else
    vp values[2][PARTS];
#pragma GCC unroll 2
    for (int part = 0; part < PARTS; part++) values[0][part] = part_at(w + part * WIDTH);
    add_input(halves, mb, 0, x, i, values, sums);
#endif
  }
}

#ifdef BY_FOUR
/* totals += codes of n inputs times bytes */
INLINE void sum_integers(int mb, int n, const int8_t *x, const char *w, vpi totals[MOST][PARTS]) {
  const __m512i mask = _mm512_set1_epi8(15);
  for (int i = 0; i < n; i += 4, w += BY_SHUFFLE) {
    const __m512i both = _mm512_loadu_si512(w);
    const __m512i codes[PARTS] = {_mm512_and_si512(both, mask), _mm512_and_si512(_mm512_srli_epi16(both, 4), mask)};
    __builtin_prefetch(w + AHEAD, 0, 3);
#pragma GCC unroll 16
    for (int j = 0; j < mb; j++) {
      int32_t four;
      memcpy(&four, x + j * KC + i, sizeof(four));
#pragma GCC unroll 2
      for (int part = 0; part < PARTS; part++)
        totals[j][part] = (vpi)_mm512_dpbusd_epi32((__m512i)totals[j][part], codes[part], _mm512_set1_epi32(four));
    }
  }
}
#elif WIDTH == 8
/* The same, for EIGHT inputs or twice as many: so a sum of products has 16 bits. */
INLINE void sum_few_integers(int mb, int n, const int8_t *x, const char *w, vpi totals[MOST][PARTS]) {
  const __m256i mask = _mm256_set1_epi8(15);
  __m256i sums[MOST][2] = {0};
#pragma GCC unroll 8
  for (int i = 0; i < n; i += 2, w += PANEL) {
    const __m256i both = _mm256_loadu_si256((const __m256i *)w), lower = _mm256_and_si256(both, mask);
    const __m256i upper = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
#pragma GCC unroll 2
    for (int j = 0; j < mb; j++) {
      int16_t pair;
      memcpy(&pair, x + j * KC + i, sizeof(pair));
      const __m256i in = _mm256_set1_epi16(pair);
      sums[j][0] = _mm256_add_epi16(sums[j][0], _mm256_maddubs_epi16(lower, in));
      sums[j][1] = _mm256_add_epi16(sums[j][1], _mm256_maddubs_epi16(upper, in));
    }
  }
#pragma GCC unroll 2
  for (int j = 0; j < mb; j++)
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      const __m256i found = sums[j][half], signs = _mm256_srai_epi16(found, 15);
      __m256i *total = (__m256i *)totals[j] + 2 * half;
      total[0] = _mm256_add_epi32(total[0], _mm256_unpacklo_epi16(found, signs));
      total[1] = _mm256_add_epi32(total[1], _mm256_unpackhi_epi16(found, signs));
    }
}

INLINE void sum_integers(int mb, int n, const int8_t *x, const char *w, vpi totals[MOST][PARTS]) {
  int i = 0;
  for (; i + 2 * EIGHT <= n; i += 2 * EIGHT) sum_few_integers(mb, 2 * EIGHT, x + i, w + i / 2 * PANEL, totals);
  if (i < n) sum_few_integers(mb, EIGHT, x + i, w + i / 2 * PANEL, totals);
}
#endif

/* ---------------------------------------------------------------- slices */

/* A product's inputs as group_inputs makes them. Sums and steps are those of each run and row, [runs][m]. */
typedef struct {
  char *numbers;
  float *sums, *steps;
} GroupInputs;

/* Where the parts of a panel lie. */
typedef struct {
  const char *codes, *scales, *zeros;
} Panel;

static Panel panel_at(const Linear *l, int64_t p) {
  const Groups *g = l->groups;
  const int64_t at = p * parts(l->k, g->size) * PANEL;
  if (p >= l->n / PANEL) return (Panel){weights_to(l, p * PANEL), g->tail_scales, g->zeros ? g->tail_zeros : NULL};
  return (Panel){weights_to(l, p * PANEL), g->scales + at * size_of_number(g->scale_kind),
                 g->zeros ? g->zeros + at * size_of_number(g->zero_kind) : NULL};
}

/* Inputs from number `from` on, n of them: whole runs, or the last ones. For each run and row: the sum of its inputs, where
 * it is needed, and the step of inputs that are rounded, or null. apart: from one run to the next */
typedef struct {
  int64_t from;
  int n, run;
  const float *sums, *steps;
  int64_t apart;
} Slice;

/* c [mb, PANEL] += the sums of a slice's runs, each of them scaled. x: [mb][KC]. w: of the slice */
INLINE void add_slice(int form, int kind, int halves, int mb, const Slice *s, const Groups *g, const Panel *panel,
                      const char *x, const char *w, float *c, int64_t ldc) {
  const int64_t step = form == OF_NUMBERS ? (int64_t)sizeof(float) * EIGHT * PANEL / (1 + halves) : step_of(kind);
  const float *inputs = s->sums, *steps = s->steps;
  int64_t group = s->from / g->size, next = (group + 1) * g->size - s->from;
  vp totals[MOST][PARTS];
#pragma GCC unroll 16
  for (int j = 0; j < mb; j++)
#pragma GCC unroll 4
    for (int part = 0; part < PARTS; part++) totals[j][part] = part_at(c + j * ldc + part * WIDTH);
  for (int i = 0; i < s->n; i += s->run, w += s->run / EIGHT * step) {
    const int n = (int)smaller(s->run, s->n - i);
    const char *in = input_at(form, halves, x, i);
    vp sums[MOST][PARTS] = {0};
#if ROUNDED_SIZE == 1
    if (form == OF_INTEGERS) {
      vpi integers[MOST][PARTS];
#pragma GCC unroll 16
      for (int j = 0; j < mb; j++)
#pragma GCC unroll 4
        for (int part = 0; part < PARTS; part++) integers[j][part] = (int32_t)(g->values[0] * inputs[j]) - (vpi){0};
      sum_integers(mb, n, (const int8_t *)in, w, integers); /* a value is the first one plus the code */
#pragma GCC unroll 16
      for (int j = 0; j < mb; j++)
#pragma GCC unroll 4
        for (int part = 0; part < PARTS; part++) sums[j][part] = __builtin_convertvector(integers[j][part], vp);
    } else
#endif
    if (form == OF_NUMBERS) sum_numbers(halves, mb, n, in, (const float *)w, sums);
    else sum_codes(kind, halves, mb, n, g, in, w, sums);
    if (i >= next) group++, next += g->size;
#pragma GCC unroll 4
    for (int part = 0; part < PARTS; part++) {
      const int64_t at = group * PANEL + part * WIDTH;
      const vp scales = numbers_at(g->scale_kind, panel->scales, at);
      const vp zeros = panel->zeros ? numbers_at(g->zero_kind, panel->zeros, at) : (vp){0};
#pragma GCC unroll 16
      for (int j = 0; j < mb; j++) {
        vp total = sums[j][part];
        if (panel->zeros) total -= zeros * spread(inputs[j]);
        if (steps) total *= spread(steps[j]);
        totals[j][part] += total * scales;
      }
    }
    if (inputs) inputs += s->apart;
    if (steps) steps += s->apart;
  }
#pragma GCC unroll 16
  for (int j = 0; j < mb; j++)
#pragma GCC unroll 4
    for (int part = 0; part < PARTS; part++) set_part(c + j * ldc + part * WIDTH, totals[j][part]);
}

/* constants, so that each case is unrolled */
INLINE void add_rows(int form, int kind, int halves, int mb, const Slice *s, const Groups *g, const Panel *panel,
                     const char *x, const char *w, float *c, int64_t ldc) {
#define CASE(mb) \
  case mb: \
    if (mb <= (form == OF_NUMBERS ? SOME : FEW)) add_slice(form, kind, halves, mb, s, g, panel, x, w, c, ldc); \
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

/* The codes of n inputs -> floats [n][PANEL] or pairs [n / 2][PANEL] */
INLINE void widen_codes(int kind, int halves, int n, const Groups *g, const char *w, float *out) {
  for (int i = 0; i < n; i += EIGHT, w += step_of(kind))
#pragma GCC unroll 4
    for (int k = 0; k < EIGHT; k += 2) {
      vp values[2][PARTS];
      ask_ahead(kind, w, k);
      two_of(kind, halves, g, w, k, values);
#pragma GCC unroll 2
      for (int odd = 0; odd < 2 - halves; odd++, out += PANEL)
#pragma GCC unroll 4
        for (int part = 0; part < PARTS; part++) set_part(out + part * WIDTH, values[odd][part]);
    }
}

/* x: what group_inputs made */
INLINE void panel_of_kind(int form, int kind, int halves, const Linear *l, int64_t p, int m, const GroupInputs *x, float *c,
                          int64_t ldc, Bench *b) {
  const Groups *g = l->groups;
  const Panel panel = panel_at(l, p);
  const int widened = form == OF_CODES && m > DIRECT, most = widened ? SOME : FEW;
  const int64_t at_once = widened ? WIDENED / PANEL / (halves ? 2 : 4) : KC, run = run_of(g);
  const char *w = panel.codes;
  for (int j = 0; j < m; j++) memset(c + j * ldc, 0, sizeof(float) * PANEL);
  for (int64_t from = 0; from < l->k; from += at_once, w += at_once / EIGHT * step_of(kind)) {
    const char *in = input_at(form, halves, x->numbers, from / KC * m * KC + from % KC);
    Slice s = {from, (int)smaller(at_once, l->k - from), (int)run, NULL, NULL, m};
    if (panel.zeros || form == OF_INTEGERS) s.sums = x->sums + from / run * m;
    if (g->inputs == INT8) s.steps = x->steps + from / run * m;
    if (widened) widen_codes(kind, halves, s.n, g, w, b->panel);
    for (int left = (int)parts(m, most), at = 0; left; left--) {
      const int mb = (m - at) / left;
      const char *rows = input_at(form, halves, in, at * KC);
      if (widened) add_rows(OF_NUMBERS, kind, halves, mb, &s, g, &panel, rows, b->panel, c + at * ldc, ldc);
      else add_rows(form, kind, halves, mb, &s, g, &panel, rows, w, c + at * ldc, ldc);
      at += mb;
      if (s.sums) s.sums += mb;
      if (s.steps) s.steps += mb;
    }
  }
}

/* ---------------------------------------------------------------- inputs */

#define LARGEST 127.0f
#define LEAST_PEAK 0x1p-100f /* inputs below are zeros */
#define TO_INTEGER 0x1.8p23f /* added to a float and taken away, it leaves the nearest integer, the even one of two */

/* Bytes of an input. */
INLINE int64_t size_of_input(const Groups *g) { return g->inputs == INT8 ? ROUNDED_SIZE : g->inputs == BF16 ? 2 : 4; }

static GroupInputs inputs_at(const Linear *l, int64_t m, void *at) {
  float *sums = (float *)((char *)at + parts(l->k, KC) * m * KC * size_of_input(l->groups));
  return (GroupInputs){at, sums, sums + parts(l->k, run_of(l->groups)) * m};
}

/* x [EIGHTs] -> their sum */
INLINE float sum_of(int halves, const char *x, int n) {
  float lanes[EIGHT] = {0};
  for (int i = 0; i < n; i += EIGHT)
    for (int k = 0; k < EIGHT; k++) {
      const uint32_t wide = halves ? (uint32_t)((const uint16_t *)x)[i + k] << 16 : ((const uint32_t *)x)[i + k];
      float value;
      memcpy(&value, &wide, sizeof(value));
      lanes[k] += value;
    }
  return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
}

/* n inputs -> integers, whose sum is returned, and a step */
static float round_run(const float *x, int n, char *out, float *step) {
  float peak = 0, sum = 0;
  for (int i = 0; i < n; i++) peak = fabsf(x[i]) > peak ? fabsf(x[i]) : peak;
  const float times = peak >= LEAST_PEAK ? LARGEST / peak : 0;
  for (int i = 0; i < n; i++) {
    const float integer = x[i] * times + TO_INTEGER - TO_INTEGER;
    if (ROUNDED_SIZE == 1) out[i] = (char)(int)integer;
    else ((float *)out)[i] = integer;
    sum += integer;
  }
  *step = times > 0 ? peak / LARGEST : 0;
  return sum;
}

void group_inputs(const Linear *l, const float *x, int64_t ldx, int64_t m, void *out) {
  const GroupInputs to = inputs_at(l, m, out);
  const int64_t run = run_of(l->groups), size = size_of_input(l->groups);
  const int rounded = l->groups->inputs == INT8, halves = half_inputs(l);
  for (int64_t from = 0; from < l->k; from += run)
    for (int64_t j = 0; j < m; j++) {
      const int n = (int)smaller(run, l->k - from);
      const float *in = x + j * ldx + from;
      char *numbers = to.numbers + (from / KC * m * KC + j * KC + from % KC) * size;
      const int64_t at = from / run * m + j;
      if (rounded) to.sums[at] = round_run(in, n, numbers, to.steps + at);
      else if (halves) narrow(in, n, (uint16_t *)numbers);
      else memcpy(numbers, in, sizeof(float) * (size_t)n);
      if (!rounded && l->groups->zeros) to.sums[at] = sum_of(halves, numbers, n);
    }
}

/* constants, so that each case is a loop of its own */
#define OF_KIND(halves, kind) panel_of_kind(OF_CODES, kind, halves, l, p, m, &in, sums, lds, b)
#define OF_KINDS(halves) \
  if (l->kind == FOUR) OF_KIND(halves, FOUR); \
  else if (l->kind == INT8) OF_KIND(halves, INT8); \
  else OF_KIND(halves, E4M3);

void product_of_groups(const Linear *l, int64_t p, int m, const char *x, float *sums, int64_t lds, Bench *b) {
  const GroupInputs in = inputs_at(l, m, (void *)x);
  if (l->groups->inputs == INT8)
    panel_of_kind(ROUNDED_SIZE == 1 ? OF_INTEGERS : OF_CODES, FOUR, 0, l, p, m, &in, sums, lds, b);
#ifdef DOT
  else if (half_inputs(l)) { OF_KINDS(1) }
#endif
  else { OF_KINDS(0) }
}
