/* Sums of a panel whose weights have scales by group (groups.h). */
#include "groups.h"

#include "tiles.h"
#ifdef TILES
#define APART 1
#endif
#include "slices.h"

#define LARGEST 127.0f
#define LEAST_PEAK 0x1p-100f /* inputs below are zeros */
#define TO_INTEGER 0x1.8p23f /* added to a float and taken away, it leaves the nearest integer, the even one of two */

#ifdef TILES
/* Rows that vectors multiply, bfloat16 as floats, and rounded ones; tiles multiply more. */
#define VECTORS_MOST 4
#define ROUNDED_MOST 12
#else
#define VECTORS_MOST 0
#endif

/* Bytes of an input of m rows. */
INLINE int64_t size_of_input(const Groups *g, int64_t m) {
  return g->inputs == INT8 ? ROUNDED : g->inputs == BF16 && m > VECTORS_MOST ? HALVES : FLOATS;
}

static GroupInputs group_inputs_at(const Linear *l, int64_t m, void *at) {
  const int64_t n = parts(l->k, run_of(l->groups)) * m;
  float *sums = (float *)((char *)at + parts(l->k, KC) * m * KC * size_of_input(l->groups, m));
  return (GroupInputs){at, sums, sums + n, (int32_t *)sums + 2 * n};
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
INLINE float round_run(const float *x, int n, char *out, float *step) {
  vp in[LONGEST_RUN / WIDTH] = {0}, peaks = {0}, sums = {0};
  int8_t bytes[LONGEST_RUN];
  memcpy(in, x, sizeof(float) * (size_t)n);
#pragma GCC unroll 4
  for (int i = 0; i < LONGEST_RUN / WIDTH; i++) peaks = larger((vp)((vpi)in[i] & INT32_MAX), peaks);
  const float peak = largest(peaks), times = peak >= LEAST_PEAK ? LARGEST / peak : 0;
#pragma GCC unroll 4
  for (int i = 0; i < LONGEST_RUN / WIDTH; i++) {
    in[i] = in[i] * times + TO_INTEGER - TO_INTEGER;
    sums += in[i]; /* integers: exact in any order */
    *(vpb *)(bytes + i * WIDTH) = __builtin_convertvector(__builtin_convertvector(in[i], vpi), vpb);
  }
  if (ROUNDED == BYTES) memcpy(out, bytes, (size_t)n);
  else memcpy(out, in, sizeof(float) * (size_t)n);
  *step = times > 0 ? peak / LARGEST : 0;
  return sum_part(sums);
}

/* A run of n inputs, number `at` among those of all rows. size: bytes of an input */
INLINE void group_run(const Linear *l, int64_t size, const float *x, int n, char *numbers, int64_t at, const GroupInputs *to) {
  const Groups *g = l->groups;
  const int halves = size == HALVES;
  if (g->inputs == INT8) {
    const float sum = round_run(x, n, numbers, to->steps + at);
    to->sums[at] = g->offsets ? sum * to->steps[at] : sum;
    if (ROUNDED == BYTES) to->starts[at] = (int32_t)(g->values[0] * sum);
    return;
  }
  if (halves) {
    narrow(x, n, (uint16_t *)numbers);
    memset(numbers + n * HALVES, 0, (size_t)(run_of(g) - n) * HALVES); /* a tile has whole runs */
  } else if (half_inputs(l)) {
    uint16_t rounded[LONGEST_RUN];
    narrow(x, n, rounded);
    for (int i = 0; i < n; i += EIGHT)
      for (int k = 0; k < EIGHT; k++) ((uint32_t *)numbers)[i + k] = (uint32_t)rounded[i + k] << 16;
  } else memcpy(numbers, x, sizeof(float) * (size_t)n);
  if (g->zeros) to->sums[at] = sum_of(halves, numbers, n);
}

void group_inputs(const Linear *l, const float *x, int64_t ldx, int64_t m, void *out) {
  const GroupInputs to = group_inputs_at(l, m, out);
  const int64_t run = run_of(l->groups), size = size_of_input(l->groups, m);
  char *numbers = to.numbers;
  for (int64_t from = 0; from < l->k; from += KC)
    for (int64_t j = 0; j < m; j++, numbers += KC * size)
      for (int64_t i = from; i < smaller(from + KC, l->k); i += run) {
        const int64_t n = smaller(run, l->k - i), at = i / run * m + j;
        const float *in = x + j * ldx + i;
        char *to_run = numbers + (i - from) * size;
        if (n == LONGEST_RUN) group_run(l, size, in, LONGEST_RUN, to_run, at, &to); /* a constant */
        else group_run(l, size, in, (int)n, to_run, at, &to);
      }
}

#ifdef TILES
static void panel_of_halves(const Linear *l, int64_t p, int m, const GroupInputs *x, float *c, int64_t ldc,
                            Workspace *b) {
  if (m > VECTORS_MOST) panel_on_tiles(l, p, m, x, c, ldc, b);
  else {
    OF_KINDS_AND_ALONE(FLOATS)
  }
}

static void panel_of_bytes(const Linear *l, int64_t p, int m, const GroupInputs *x, float *c, int64_t ldc, Workspace *b) {
  if (m > ROUNDED_MOST) panel_on_tiles(l, p, m, x, c, ldc, b);
  else panel_of_rounded(l, p, m, x, c, ldc, b);
}
#else
#define panel_of_bytes panel_of_rounded
#ifdef DOT
static void panel_of_halves(const Linear *l, int64_t p, int m, const GroupInputs *x, float *c, int64_t ldc,
                            Workspace *b) {
  OF_KINDS_AND_ALONE(HALVES)
}
#else
#define panel_of_halves panel_of_floats
#endif
#endif

void product_of_groups(const Linear *l, int64_t p, int m, const char *x, float *sums, int64_t lds, Workspace *b) {
  const GroupInputs in = group_inputs_at(l, m, (void *)x);
  if (l->groups->inputs == INT8) panel_of_bytes(l, p, m, &in, sums, lds, b);
  else if (half_inputs(l)) panel_of_halves(l, p, m, &in, sums, lds, b);
  else panel_of_floats(l, p, m, &in, sums, lds, b);
}
