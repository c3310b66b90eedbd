/* Sums of a panel whose weights have scales by group (groups.h). */
#include "groups.h"

#include "pack.h"

#include <omp.h>

#define RUN 32 /* the longest */

/* Beside at most this many rows codes become floats in registers, beside more in memory that the first cache holds. */
#ifdef __AVX512F__
#define DIRECT 4
#else
#define DIRECT 2
#endif

/* ---------------------------------------------------------------- values */

/* From the codes of EIGHT inputs to those of the next. */
INLINE int64_t step_of(int kind) { return kind == FOUR ? ROW4 : EIGHT * PANEL; }

#if WIDTH == 8
/* The values of two inputs' four-bit codes: bytes of bfloat16 come from tables and meet, in a float's lane, in the order
 * even input, odd input. */
INLINE void values_of_four(const Groups *g, const char *codes, vp values[2][PARTS]) {
  const __m256i low = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)g->halves[0]));
  const __m256i high = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)g->halves[1]));
  const __m256i mask = _mm256_set1_epi8(15), both = _mm256_loadu_si256((const __m256i *)codes);
#pragma GCC unroll 2
  for (int half = 0; half < 2; half++) {
    const __m256i index = _mm256_and_si256(half ? _mm256_srli_epi16(both, 4) : both, mask);
    const __m256i first = _mm256_shuffle_epi8(low, index), second = _mm256_shuffle_epi8(high, index);
    const vpu pairs[2] = {(vpu)_mm256_unpacklo_epi8(first, second), (vpu)_mm256_unpackhi_epi8(first, second)};
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      values[0][2 * half + i] = (vp)(pairs[i] << 16);
      values[1][2 * half + i] = (vp)(pairs[i] & 0xFFFF0000u);
    }
  }
}
#else
/* The values of WIDTH outputs' codes for input i of EIGHT. */
INLINE vp value_of_four(const Groups *g, const char *codes, int i) {
  const vpu lanes = *(const vpu *)codes >> 4 * i;
#ifdef __AVX512F__
  return (vp)_mm512_permutexvar_ps((__m512i)lanes, _mm512_loadu_ps(g->values)); /* reads four bits */
#else
  vp found = {0};
  for (int lane = 0; lane < WIDTH; lane++) found[lane] = g->values[lanes[lane] & 15];
  return found;
#endif
}
#endif

/* The values of WIDTH codes of eight bits. */
INLINE vp value_of_byte(int kind, const char *codes) {
  const vpi wide = widen_part(codes);
  if (kind == INT8) return __builtin_convertvector(wide, vp);
  const vpi size = wide & 0x7F, small = size < 8; /* e4m3: see e4m3.h. There is no code that is not a number */
  const vpi large = (size << 20) + (120 << 23);
  const vpi found = (small & (vpi)(__builtin_convertvector(size, vp) * 0x1p-9f)) | (~small & large);
  return (vp)(found | (wide & (vpi)((vpu){0} + 0x80000000u)));
}

/* The values of inputs i and i + 1. row: the codes of EIGHT inputs to a panel */
INLINE void two_values(int kind, const Groups *g, const char *row, int i, vp values[2][PARTS]) {
#if WIDTH == 8
  if (kind == FOUR) {
    values_of_four(g, row + i / 2 * PANEL, values);
    return;
  }
#endif
#pragma GCC unroll 2
  for (int odd = 0; odd < 2; odd++)
#pragma GCC unroll 4
    for (int part = 0; part < PARTS; part++) {
#if WIDTH != 8
      if (kind == FOUR) values[odd][part] = value_of_four(g, row + part * WIDTH * EIGHT / 2, i + odd);
      else
#endif
        values[odd][part] = value_of_byte(kind, row + (i + odd) * PANEL + part * WIDTH);
    }
  (void)g;
}

/* WIDTH scales or zeros, from number `i` of them on. */
INLINE vp numbers_at(int kind, const char *from, int64_t i) {
  if (kind == F32) return part_at((const float *)from + i);
  const uint16_t *halves = (const uint16_t *)from + i;
#if defined(__AVX512F__)
  if (kind == HALF) return (vp)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)halves));
#elif WIDTH == 8 && defined(__F16C__)
  if (kind == HALF) return (vp)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)halves));
#endif
  const vpu wide = __builtin_convertvector(*(const vph *)halves, vpu);
  if (kind == BF16) return (vp)(wide << 16);
  const vp size = (vp)((wide & 0x7FFF) << 13) * 0x1p112f; /* finite */
  return (vp)((vpu)size | (wide & 0x8000) << 16);
}

/* ---------------------------------------------------------------- runs */

/* Scales and zeros of a run's group, and for each row the sums of the run's inputs, or null where there are no zeros, and
 * the steps of inputs that are rounded, or null. */
typedef struct {
  vp scales[PARTS], zeros[PARTS];
  const float *inputs, *steps;
} Scaling;

/* c [mb, PANEL] += the sums of a run, scaled. */
INLINE void add_run(int mb, vp sums[MB][PARTS], const Scaling *s, float *c, int64_t ldc) {
#pragma GCC unroll 16
  for (int j = 0; j < mb; j++)
#pragma GCC unroll 4
    for (int part = 0; part < PARTS; part++) {
      vp total = sums[j][part];
      if (s->inputs) total -= s->zeros[part] * spread(s->inputs[j]);
      if (s->steps) total *= spread(s->steps[j]);
      *(vp *)(c + j * ldc + part * WIDTH) += total * s->scales[part];
    }
}

/* Codes become floats in registers. n: a multiple of EIGHT */
INLINE void run_of_codes(int kind, int mb, int n, const Groups *g, const float *x, int64_t ldx, const char *w,
                         const Scaling *s, float *c, int64_t ldc) {
  vp sums[MB][PARTS] = {0};
  for (int i = 0; i < n; i += EIGHT, w += step_of(kind))
#pragma GCC unroll 4
    for (int k = 0; k < EIGHT; k += 2) {
      vp values[2][PARTS];
      two_values(kind, g, w, k, values);
#pragma GCC unroll 2
      for (int odd = 0; odd < 2; odd++)
#pragma GCC unroll 16
        for (int j = 0; j < mb; j++) {
          const vp in = spread(x[j * ldx + i + k + odd]);
#pragma GCC unroll 4
          for (int part = 0; part < PARTS; part++) sums[j][part] += values[odd][part] * in;
        }
    }
  add_run(mb, sums, s, c, ldc);
}

/* They have become floats, [n][PANEL]. */
INLINE void run_of_floats(int mb, int n, const float *x, const float *w, const Scaling *s, float *c, int64_t ldc) {
  vp sums[MB][PARTS] = {0};
  for (int i = 0; i < n; i++, w += PANEL)
#pragma GCC unroll 4
    for (int part = 0; part < PARTS; part++) {
      const vp value = part_at(w + part * WIDTH);
#pragma GCC unroll 16
      for (int j = 0; j < mb; j++) sums[j][part] += value * spread(x[j * KC + i]);
    }
  add_run(mb, sums, s, c, ldc);
}

/* constants, so that each case is unrolled */
INLINE void some_of_codes(int kind, int mb, int n, const Groups *g, const float *x, int64_t ldx, const char *w,
                          const Scaling *s, float *c, int64_t ldc) {
#define CASE(mb) case mb: run_of_codes(kind, mb, n, g, x, ldx, w, s, c, ldc); break;
  switch (mb) {
    CASE(1) CASE(2)
#if DIRECT == 4
    CASE(3) CASE(4)
#endif
  }
#undef CASE
}

static void some_of_floats(int mb, int n, const float *x, const float *w, const Scaling *s, float *c, int64_t ldc) {
#define CASE(mb) case mb: run_of_floats(mb, n, x, w, s, c, ldc); break;
  switch (mb) {
    CASE(1) CASE(2) CASE(3)
#if MB == 12
    CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
  }
#undef CASE
}

/* The codes of a run -> [n][PANEL] floats */
INLINE void widen_run(int kind, int n, const Groups *g, const char *w, float *out) {
  for (int i = 0; i < n; i += EIGHT, w += step_of(kind))
#pragma GCC unroll 4
    for (int k = 0; k < EIGHT; k += 2) {
      vp values[2][PARTS];
      two_values(kind, g, w, k, values);
#pragma GCC unroll 2
      for (int odd = 0; odd < 2; odd++)
#pragma GCC unroll 4
        for (int part = 0; part < PARTS; part++) *(vp *)(out + (i + k + odd) * PANEL + part * WIDTH) = values[odd][part];
    }
}

/* x [EIGHTs] -> their sum */
INLINE float sum_of(const float *x, int n) {
  float lanes[EIGHT] = {0};
  for (int i = 0; i < n; i += EIGHT)
    for (int k = 0; k < EIGHT; k++) lanes[k] += x[i + k];
  return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
}

/* ---------------------------------------------------------------- panels */

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

/* inputs: the sums of the run's inputs, where there are zeros */
INLINE Scaling scaling_at(const Groups *g, const Panel *panel, int64_t from, const float *inputs, const float *steps) {
  Scaling s = {.inputs = panel->zeros ? inputs : NULL, .steps = steps};
#pragma GCC unroll 4
  for (int part = 0; part < PARTS; part++) {
    s.scales[part] = numbers_at(g->scale_kind, panel->scales, from / g->size * PANEL + part * WIDTH);
    if (panel->zeros) s.zeros[part] = numbers_at(g->zero_kind, panel->zeros, from / g->size * PANEL + part * WIDTH);
  }
  return s;
}

INLINE void panel_of_kind(int kind, const Linear *l, int64_t p, int m, const float *x, float *sums, int64_t lds, Bench *b) {
  const Groups *g = l->groups;
  const int64_t run = run_of(g);
  const Panel panel = panel_at(l, p);
  const char *w = panel.codes;
  const int n_tiles = (int)parts(m, m > DIRECT ? MB : DIRECT);
  float inputs[ROWS];
  for (int j = 0; j < m; j++) memset(sums + j * lds, 0, sizeof(float) * PANEL);
  for (int64_t from = 0; from < l->k; from += run, w += run / EIGHT * step_of(kind)) {
    const int n = (int)smaller(run, l->k - from);
    const float *in = x + from / KC * m * KC + from % KC;
    Scaling s = scaling_at(g, &panel, from, inputs, NULL);
    for (int j = 0; s.inputs && j < m; j++) inputs[j] = sum_of(in + j * KC, n);
    if (m > DIRECT) widen_run(kind, n, g, w, b->panel);
    for (int left = n_tiles, first = 0; left; left--) {
      const int mb = (m - first) / left;
      if (m > DIRECT) some_of_floats(mb, n, in + first * KC, b->panel, &s, sums + first * lds, lds);
      else some_of_codes(kind, mb, n, g, in + first * KC, KC, w, &s, sums + first * lds, lds);
      first += mb;
      if (s.inputs) s.inputs += mb;
    }
  }
}

/* ---------------------------------------------------------------- rounded inputs */

#define MOST 127.0f
#define LEAST_PEAK 0x1p-100f /* inputs below are zeros */
#define TO_INTEGER 0x1.8p23f /* added to a float and taken away, it leaves the nearest integer, the even one of two */

/* A product's inputs as round_inputs makes them. */
typedef struct {
  int8_t *bytes;
  float *steps, *sums;
} Rounded;

static Rounded rounded_at(const Linear *l, int64_t m, void *at) {
  int8_t *bytes = at;
  float *steps = (float *)(bytes + parts(l->k, KC) * m * KC);
  return (Rounded){bytes, steps, steps + parts(l->k, run_of(l->groups)) * m};
}

void round_inputs(const Linear *l, const float *x, int64_t ldx, int64_t m, void *out) {
  const Rounded r = rounded_at(l, m, out);
  const int64_t run = run_of(l->groups);
  for (int64_t from = 0; from < l->k; from += run)
    for (int64_t j = 0; j < m; j++) {
      const int n = (int)smaller(run, l->k - from);
      const float *in = x + j * ldx + from;
      int8_t *bytes = r.bytes + from / KC * m * KC + j * KC + from % KC;
      float peak = 0;
      int sum = 0;
      for (int i = 0; i < n; i++) peak = fabsf(in[i]) > peak ? fabsf(in[i]) : peak;
      const float times = peak >= LEAST_PEAK ? MOST / peak : 0;
      for (int i = 0; i < n; i++) bytes[i] = (int8_t)(int)(in[i] * times + TO_INTEGER - TO_INTEGER);
      for (int i = 0; i < n; i++) sum += bytes[i];
      r.steps[from / run * m + j] = times > 0 ? peak / MOST : 0;
      r.sums[from / run * m + j] = (float)sum;
    }
}

#if WIDTH == 8
/* totals += the sums of n inputs, EIGHT or twice as many: so a sum of products has 16 bits. */
INLINE void add_integers(int mb, int n, const int8_t *x, const char *w, __m256i totals[2][PARTS]) {
  const __m256i mask = _mm256_set1_epi8(15);
  __m256i sums[2][2] = {0};
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
      __m256i *total = totals[j] + 2 * half;
      total[0] = _mm256_add_epi32(total[0], _mm256_unpacklo_epi16(found, signs));
      total[1] = _mm256_add_epi32(total[1], _mm256_unpackhi_epi16(found, signs));
    }
}

/* The sums of a run, of `mb` rows. A value is the first one plus the code. */
INLINE void run_of_integers(int mb, int n, const Groups *g, const int8_t *x, const char *w, const float *inputs,
                            const Scaling *s, float *c, int64_t ldc) {
  __m256i totals[2][PARTS];
#pragma GCC unroll 2
  for (int j = 0; j < mb; j++)
#pragma GCC unroll 4
    for (int part = 0; part < PARTS; part++) totals[j][part] = _mm256_set1_epi32((int)(g->values[0] * inputs[j]));
  int i = 0;
  for (; i + 2 * EIGHT <= n; i += 2 * EIGHT) add_integers(mb, 2 * EIGHT, x + i, w + i / 2 * PANEL, totals);
  if (i < n) add_integers(mb, EIGHT, x + i, w + i / 2 * PANEL, totals);
  vp found[MB][PARTS];
#pragma GCC unroll 2
  for (int j = 0; j < mb; j++)
#pragma GCC unroll 4
    for (int part = 0; part < PARTS; part++) found[j][part] = (vp)_mm256_cvtepi32_ps(totals[j][part]);
  add_run(mb, found, s, c, ldc);
}
#else
/* Integers as floats: their sums are exact, too. */
INLINE void run_of_integers(int mb, int n, const Groups *g, const int8_t *x, const char *w, const float *inputs,
                            const Scaling *s, float *c, int64_t ldc) {
  float wide[2][RUN];
  (void)inputs;
  for (int j = 0; j < mb; j++)
    for (int i = 0; i < n; i++) wide[j][i] = x[j * KC + i];
  some_of_codes(FOUR, mb, n, g, wide[0], RUN, w, s, c, ldc);
}
#endif

static void panel_of_rounded(const Linear *l, int64_t p, int m, void *x, float *sums, int64_t lds) {
  const Groups *g = l->groups;
  const int64_t run = run_of(g);
  const Panel panel = panel_at(l, p);
  const Rounded in = rounded_at(l, m, x);
  const char *w = panel.codes;
  for (int j = 0; j < m; j++) memset(sums + j * lds, 0, sizeof(float) * PANEL);
  for (int64_t from = 0; from < l->k; from += run, w += run / EIGHT * ROW4) {
    const int n = (int)smaller(run, l->k - from);
    const int8_t *bytes = in.bytes + from / KC * m * KC + from % KC;
    const float *inputs = in.sums + from / run * m;
    Scaling s = scaling_at(g, &panel, from, inputs, in.steps + from / run * m);
    for (int j = 0; j < m; j += 2) {
      if (j + 1 < m) run_of_integers(2, n, g, bytes + j * KC, w, inputs + j, &s, sums + j * lds, lds);
      else run_of_integers(1, n, g, bytes + j * KC, w, inputs + j, &s, sums + j * lds, lds);
      s.steps += 2;
      if (s.inputs) s.inputs += 2;
    }
  }
}

void product_of_groups(const Linear *l, int64_t p, int m, const float *x, float *sums, int64_t lds, Bench *b) {
  if (l->groups->rounded) {
    panel_of_rounded(l, p, m, (void *)x, sums, lds);
    return;
  }
  /* constants, so that each case is a loop of its own */
  if (l->kind == FOUR) panel_of_kind(FOUR, l, p, m, x, sums, lds, b);
  else if (l->kind == INT8) panel_of_kind(INT8, l, p, m, x, sums, lds, b);
  else panel_of_kind(E4M3, l, p, m, x, sums, lds, b);
}

/* ---------------------------------------------------------------- packing */

/* rows [n <= PANEL][k] -> a panel. Outputs after the last have codes of zero bits. */
static void pack_codes(int kind, const uint8_t *rows, int n, int64_t k, uint8_t *out) {
  const int64_t row = kind == FOUR ? k / 2 : k;
  memset(out, 0, (size_t)(PANEL * row));
  if (kind != FOUR) {
    for (int64_t from = 0; from < k; from += 64) /* a line of each row at a time */
      for (int i = 0; i < n; i++)
        for (int64_t c = from; c < smaller(k, from + 64); c++) out[c * PANEL + i] = rows[i * row + c];
    return;
  }
  for (int i = 0; i < n; i++)
    for (int64_t c = 0; c < k / EIGHT; c++) {
      const uint8_t *codes = rows + i * row + c * EIGHT / 2;
      uint8_t *row = out + c * ROW4;
#pragma GCC unroll 8
      for (int input = 0; input < EIGHT; input++) {
        const int64_t nibble = nibble_at(i, input);
        row[nibble / 2] |= (uint8_t)((codes[input / 2] >> input % 2 * 4 & 15) << nibble % 2 * 4);
      }
    }
}

/* rows [n <= PANEL][groups] -> [groups][PANEL], padded with zeros. size: of a number */
static void pack_numbers(const char *rows, int n, int64_t groups, int64_t size, char *out) {
  memset(out, 0, (size_t)(groups * PANEL * size));
  for (int i = 0; i < n; i++)
    for (int64_t c = 0; c < groups; c++)
      memcpy(out + (c * PANEL + i) * size, rows + (i * groups + c) * size, (size_t)size);
}

/* The bytes that each thread of `petiole_pack_groups` copies at a time, at most. */
int64_t petiole_pack_groups_copies(const Linear *l) {
  const Groups *g = l->groups;
  return PANEL * larger_of(l->kind == FOUR ? l->k / 2 : l->k, parts(l->k, g->size) * (int64_t)sizeof(float));
}

/* Rearranges codes [n, k], scales and zeros [n, groups] in place, a panel at a time. The last rows go to the tails. */
void petiole_pack_groups(Linear *l, Groups *g, char *copies, int32_t n_threads) {
  const int64_t n_groups = parts(l->k, g->size), whole = l->n / PANEL, last = l->n % PANEL;
  const int64_t each = petiole_pack_groups_copies(l), s = size_of_number(g->scale_kind), z = size_of_number(g->zero_kind);
  const int64_t of_scales = n_groups * PANEL * s, of_zeros = n_groups * PANEL * z;
  l->stride = PANEL * (l->kind == FOUR ? l->k / 2 : l->k);
  for (int i = 0; i < 16; i++) {
    const uint16_t half = to_bf16(g->values[i]);
    g->halves[0][i] = (uint8_t)half;
    g->halves[1][i] = (uint8_t)(half >> 8);
  }
#pragma omp parallel for schedule(static) num_threads(n_threads)
  for (int64_t p = 0; p < whole + (last > 0); p++) {
    const int full = p < whole, n = full ? PANEL : (int)last;
    char *copy = copies + omp_get_thread_num() * each, *codes = (char *)l->weight + p * l->stride;
    char *scales = (char *)g->scales + p * of_scales, *zeros = (char *)g->zeros + p * of_zeros;
    memcpy(copy, codes, (size_t)(l->stride / PANEL * n));
    pack_codes(l->kind, (const uint8_t *)copy, n, l->k, (uint8_t *)(full ? codes : l->tail));
    memcpy(copy, scales, (size_t)(of_scales / PANEL * n));
    pack_numbers(copy, n, n_groups, s, full ? scales : (char *)g->tail_scales);
    if (!g->zeros) continue;
    memcpy(copy, zeros, (size_t)(of_zeros / PANEL * n));
    pack_numbers(copy, n, n_groups, z, full ? zeros : (char *)g->tail_zeros);
  }
}
