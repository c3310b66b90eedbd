/* A decoder's forward on a CPU, all layers in one call.
 *
 * Why it exists: at the batch sizes of decoding, a CPU is bound by reading weights once and by getting from one
 * small operation to the next. Here a step is one parallel region, weights are read as they are stored (float32,
 * bfloat16 or int8) and widened in registers, and attention reads the paged KV cache in place.
 *
 * The other property that matters: what is computed for a position depends on that position alone. Every sum
 * runs over its terms in one fixed order, whatever the batch, the number of threads or the blocking; so a
 * sequence gets the same bits alone and among others, in one prefill and in chunks.
 *
 * Vectors are those of the compiler (vector_size), not of one instruction set.
 */
#include <omp.h>

#include "vectors.h"

#define NB 4  /* weight rows of a block: what `sum4` adds up */
/* Input rows of a block: NB * MB accumulators must fit the registers. */
#ifdef __AVX512F__
#define MB 6
#else
#define MB 1
#endif
#define TILE 96 /* input rows that stay in the second-level cache while the weights pass by */

enum { F32 = 0, BF16 = 1, INT8 = 2 };

typedef struct {
  const void *weight; /* [n, k] */
  const float *scale; /* [n], for INT8 */
  const float *bias;  /* [n] or null */
  int32_t n, k, kind, pad;
} Linear;

typedef struct {
  const float *input_norm, *q_norm, *k_norm, *post_norm;
  Linear qkv, out, gate_up, down;
  int64_t window;
} Layer;

typedef struct {
  int32_t n_layers, hidden, inner, heads, kv_heads, head_dim, kv_kind, page_size;
  float eps, scale;
  const float *rotary; /* [positions, head_dim]: cos | sin */
  const float *norm;
  Layer *layers;
  Linear head;
  char *keys, *values; /* [layers, slots, kv_heads, head_dim] */
  int64_t n_slots, columns;
  const int32_t *table; /* [rows, columns] */
} Model;

/* What compilers of today make of the general form is several times slower than the instruction for it. */
#ifdef __AVX512F__
#include <immintrin.h>
INLINE vu widen_halves(const void *p) { return (vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256(p)); }
INLINE vi widen_bytes(const void *p) { return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128(p)); }
#else
INLINE vu widen_halves(const void *p) { return __builtin_convertvector(*(const vh *)p, vu); }
INLINE vi widen_bytes(const void *p) { return __builtin_convertvector(*(const vb *)p, vi); }
#endif

INLINE vf widen(int kind, const void *base, int64_t i) {
  if (kind == F32) return load((const float *)base + i);
  if (kind == BF16) return (vf)(widen_halves((const uint16_t *)base + i) << 16);
  return __builtin_convertvector(widen_bytes((const int8_t *)base + i), vf);
}

INLINE float widen1(int kind, const void *base, int64_t i) {
  if (kind == F32) return ((const float *)base)[i];
  if (kind == BF16) {
    uint32_t bits = (uint32_t)((const uint16_t *)base)[i] << 16;
    float out;
    memcpy(&out, &bits, 4);
    return out;
  }
  return (float)((const int8_t *)base)[i];
}

INLINE int64_t size_of(int kind) { return kind == F32 ? 4 : kind == BF16 ? 2 : 1; }

INLINE uint16_t to_bf16(float x) { /* round to nearest even */
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

/* ---------------------------------------------------------------- linear maps */

/* NB weight rows times mb <= MB input rows. `w`: the block's first row, of `kind`. */
INLINE void block(int kind, int nb, int mb, const Linear *l, const char *w, const float *x, float *y, int n0, int add) {
  const int64_t k = l->k, full = k / LANES * LANES, row = k * size_of(kind);
  vf acc[NB][MB];
#pragma GCC unroll 8
  for (int i = 0; i < nb; i++)
#pragma GCC unroll 8
    for (int j = 0; j < mb; j++) acc[i][j] = (vf){0};
  for (int64_t c = 0; c < full; c += LANES) {
    vf wide[NB];
#pragma GCC unroll 8
    for (int i = 0; i < nb; i++) wide[i] = widen(kind, w + i * row, c);
#pragma GCC unroll 8
    for (int j = 0; j < mb; j++) {
      vf in = load(x + j * k + c);
#pragma GCC unroll 8
      for (int i = 0; i < nb; i++) acc[i][j] += wide[i] * in;
    }
  }
#pragma GCC unroll 8
  for (int j = 0; j < mb; j++) {
    float *out = y + (int64_t)j * l->n + n0;
    if (nb == NB && full == k) {
      v4 total = sum4(acc[0][j], acc[1][j], acc[2][j], acc[3][j]);
      if (l->kind == INT8) total *= *(const v4 *)(l->scale + n0);
      if (l->bias) total += *(const v4 *)(l->bias + n0);
      *(v4 *)out = add ? *(v4 *)out + total : total;
      continue;
    }
    for (int i = 0; i < nb; i++) {
      float total = sum(acc[i][j]);
      for (int64_t c = full; c < k; c++) total += widen1(kind, w + i * row, c) * x[j * k + c];
      if (l->kind == INT8) total *= l->scale[n0 + i];
      if (l->bias) total += l->bias[n0 + i];
      out[i] = add ? out[i] + total : total;
    }
  }
}

#define BLOCK_CASE(kind, nb, mb) \
  case mb: block(kind, nb, mb, l, w, x, y, n0, add); break;
#define BLOCKS(kind, nb) \
  switch (mb) { /* constants, so that each case is unrolled */ \
    BLOCK_CASE(kind, nb, 1) BLOCK_CASE(kind, nb, 2) BLOCK_CASE(kind, nb, 3) BLOCK_CASE(kind, nb, 4) \
    BLOCK_CASE(kind, nb, 5) BLOCK_CASE(kind, nb, 6) }
#define BLOCK_FUNCTION(name, kind) \
  static void name(int nb, int mb, const Linear *l, const char *w, const float *x, float *y, int n0, int add) { \
    if (nb == NB) { BLOCKS(kind, NB) } else for (int i = 0; i < nb; i++) { \
      const char *all = w; w += (int64_t)i * l->k * size_of(kind); int first = n0; n0 += i; \
      BLOCKS(kind, 1) w = all; n0 = first; } }
BLOCK_FUNCTION(block_f32, F32)
BLOCK_FUNCTION(block_bf16, BF16)
BLOCK_FUNCTION(block_int8, INT8)

static void rows_of(int nb, int m, const Linear *l, int n0, const float *x, float *y, int add, float *scratch) {
  const char *w = (const char *)l->weight + (int64_t)n0 * l->k * size_of(l->kind);
  int kind = l->kind;
  if (kind != F32 && m > MB) { /* widen once for all the input rows */
    const int64_t count = (int64_t)nb * l->k, full = count / LANES * LANES;
    if (kind == BF16) for (int64_t c = 0; c < full; c += LANES) store(scratch + c, widen(BF16, w, c));
    else for (int64_t c = 0; c < full; c += LANES) store(scratch + c, widen(INT8, w, c));
    for (int64_t c = full; c < count; c++) scratch[c] = widen1(kind, w, c);
    w = (const char *)scratch;
    kind = F32;
  }
  for (int at = 0; at < m; at += MB) {
    int mb = m - at < MB ? m - at : MB;
    const float *in = x + (int64_t)at * l->k;
    float *out = y + (int64_t)at * l->n;
    if (kind == F32) block_f32(nb, mb, l, w, in, out, n0, add);
    else if (kind == BF16) block_bf16(nb, mb, l, w, in, out, n0, add);
    else block_int8(nb, mb, l, w, in, out, n0, add);
  }
}

/* y [m, n] (+)= x Wt + b. Called by every thread of a region; ends with a barrier. */
static void linear(const Linear *l, int m, const float *x, float *y, int add, float *scratch) {
  const int n_blocks = (l->n + NB - 1) / NB, tiles = (m + TILE - 1) / TILE;
  const int chunk = n_blocks / (16 * omp_get_num_threads()) + 1;
#pragma omp for schedule(dynamic, chunk)
  for (int unit = 0; unit < tiles * n_blocks; unit++) {
    int tile = unit / n_blocks * TILE, n0 = unit % n_blocks * NB;
    int rows = m - tile < TILE ? m - tile : TILE, nb = l->n - n0 < NB ? l->n - n0 : NB;
    rows_of(nb, rows, l, n0, x + (int64_t)tile * l->k, y + (int64_t)tile * l->n, add, scratch);
  }
}

/* ---------------------------------------------------------------- small parts */

static void rms_norm(const float *x, const float *weight, float *y, int n, float eps) {
  vf squares = {0};
  int full = n / LANES * LANES;
  for (int c = 0; c < full; c += LANES) squares += load(x + c) * load(x + c);
  float total = sum(squares);
  for (int c = full; c < n; c++) total += x[c] * x[c];
  float by = 1.0f / sqrtf(total / n + eps);
  for (int c = 0; c < full; c += LANES) store(y + c, load(weight + c) * (load(x + c) * by));
  for (int c = full; c < n; c++) y[c] = weight[c] * (x[c] * by);
}

static void rotate(float *x, const float *table, int d) {
  int half = d / 2;
  for (int c = 0; c < half; c++) {
    float low = x[c], high = x[c + half];
    x[c] = low * table[c] - high * table[c + half];
    x[c + half] = high * table[c] + low * table[c + half];
  }
}

/* gate | up -> silu(gate) * up */
static void silu_mul(const float *x, float *y, int n) {
  int full = n / LANES * LANES;
  for (int c = 0; c < full; c += LANES) store(y + c, load(x + c) / (1.0f + vexp(-load(x + c))) * load(x + n + c));
  for (int c = full; c < n; c++) y[c] = x[c] / (1.0f + vexp(splat(-x[c]))[0]) * x[n + c];
}

static void keep(int kind, char *pool, int64_t at, const float *x, int n) {
  if (kind == F32) memcpy((float *)pool + at, x, 4 * n);
  else for (int c = 0; c < n; c++) ((uint16_t *)pool)[at + c] = to_bf16(x[c]);
}

/* ---------------------------------------------------------------- attention */

INLINE int64_t slot_of(const Model *m, const int32_t *pages, int64_t p) {
  return m->page_size == 1 ? pages[p] : (int64_t)pages[p / m->page_size] * m->page_size + p % m->page_size;
}

/* s [n]: scores -> unnormalised weights, padded with zeros to whole vectors; returns their sum. */
static float softmax(float *s, int64_t n) {
  const int64_t padded = (n + LANES - 1) / LANES * LANES;
  float most = s[0];
  for (int64_t j = 1; j < n; j++) most = s[j] > most ? s[j] : most;
  for (int64_t j = n; j < padded; j++) s[j] = -INFINITY;
  vf sums = {0};
  for (int64_t j = 0; j < padded; j += LANES) {
    vf e = vexp(load(s + j) - most);
    store(s + j, e);
    sums += e;
  }
  return sum(sums);
}

/* `nq` queries [nq, d] of one position and one key head, over the row's cached positions [first, last].
 * keys, values: the layer's, at that head. scores: [nq, stride] scratch. */
INLINE void attend(int kind, int d, int nq, const Model *m, const char *keys, const char *values,
                   const int32_t *pages, int64_t first, int64_t last, const float *q, float *out, float *scores,
                   int64_t stride) {
  const int64_t token = (int64_t)m->kv_heads * m->head_dim, n = last - first + 1;
  for (int64_t j = 0; j < n; j++) {
    const int64_t at = slot_of(m, pages, first + j) * token;
    vf acc[2] = {{0}, {0}};
#pragma GCC unroll 8
    for (int c = 0; c < d; c += LANES) {
      vf k = widen(kind, keys, at + c);
#pragma GCC unroll 2
      for (int i = 0; i < nq; i++) acc[i] += k * load(q + i * d + c);
    }
    for (int i = 0; i < nq; i++) scores[i * stride + j] = sum(acc[i]) * m->scale;
  }
  float total[2];
  for (int i = 0; i < nq; i++) total[i] = softmax(scores + i * stride, n);
  for (int from = 0; from < d; from += 128) { /* as many sums as the registers hold */
    const int width = d - from < 128 ? d - from : 128;
    vf acc[2][128 / LANES];
#pragma GCC unroll 2
    for (int i = 0; i < nq; i++)
#pragma GCC unroll 8
      for (int c = 0; c < 128 / LANES; c++) acc[i][c] = (vf){0};
    for (int64_t j = 0; j < n; j++) {
      const int64_t at = slot_of(m, pages, first + j) * token + from;
#pragma GCC unroll 8
      for (int c = 0; c < width / LANES; c++) {
        vf v = widen(kind, values, at + c * LANES);
#pragma GCC unroll 2
        for (int i = 0; i < nq; i++) acc[i][c] += scores[i * stride + j] * v;
      }
    }
    for (int i = 0; i < nq; i++)
      for (int c = 0; c < width / LANES; c++) store(out + i * d + from + c * LANES, acc[i][c] * (1.0f / total[i]));
  }
}

#define ATTEND(kind, d, nq) attend(kind, d, nq, m, keys, values, pages, first, last, q, out, scores, stride)
#define ATTEND_WIDTH(kind, nq) \
  { if (m->head_dim == 64) ATTEND(kind, 64, nq); else if (m->head_dim == 128) ATTEND(kind, 128, nq); \
    else ATTEND(kind, m->head_dim, nq); }
#define ATTEND_FUNCTION(name, nq) \
  static void name(const Model *m, const char *keys, const char *values, const int32_t *pages, int64_t first, \
                   int64_t last, const float *q, float *out, float *scores, int64_t stride) { \
    if (m->kv_kind == F32) ATTEND_WIDTH(F32, nq) else ATTEND_WIDTH(BF16, nq) }
ATTEND_FUNCTION(attend_one, 1)
ATTEND_FUNCTION(attend_two, 2)

/* ---------------------------------------------------------------- the forward */

typedef struct {
  int64_t t;                /* positions of the step */
  const int64_t *positions; /* [t] */
  const int64_t *rows;      /* [t] page-table rows */
  float *hidden;            /* [t, hidden], in and out */
  float *normed;            /* [t, hidden] */
  float *qkv;               /* [t, q + 2 kv] */
  float *mixed;             /* [t, q] */
  float *gates;             /* [t, 2 inner] */
  float *acted;             /* [t, inner] */
  int32_t n_threads;
} Step;

static void rotate_and_keep(const Model *m, const Layer *l, int64_t i, const Step *s) {
  const int d = m->head_dim, wide = (m->heads + 2 * m->kv_heads) * d;
  const int64_t pool = (int64_t)m->kv_heads * d, offset = i * m->n_slots * pool;
#pragma omp for schedule(static)
  for (int64_t t = 0; t < s->t; t++) {
    float *q = s->qkv + t * wide, *k = q + m->heads * d, *v = k + m->kv_heads * d;
    int64_t p = s->positions[t];
    const float *table = m->rotary + p * d;
    int64_t page = m->table[s->rows[t] * m->columns + p / m->page_size];
    int64_t at = offset + (page * m->page_size + p % m->page_size) * pool;
    for (int h = 0; h < m->heads + m->kv_heads; h++) {
      const float *weight = h < m->heads ? l->q_norm : l->k_norm;
      if (weight) rms_norm(q + h * d, weight, q + h * d, d, m->eps);
      rotate(q + h * d, table, d);
    }
    keep(m->kv_kind, m->keys, at, k, (int)pool);
    keep(m->kv_kind, m->values, at, v, (int)pool);
  }
}

static void attention(const Model *m, const Layer *l, int64_t i, const Step *s, float **scores, int64_t *stride) {
  const int d = m->head_dim, group = m->heads / m->kv_heads, wide = (m->heads + 2 * m->kv_heads) * d;
  const int64_t bytes = i * m->n_slots * m->kv_heads * d * size_of(m->kv_kind);
#pragma omp for schedule(dynamic, 1)
  for (int64_t unit = 0; unit < s->t * m->kv_heads; unit++) {
    int64_t t = unit / m->kv_heads, last = s->positions[t];
    int head = (int)(unit % m->kv_heads);
    int64_t first = l->window && last >= l->window ? last - l->window + 1 : 0;
    if (last - first + 1 + LANES > *stride) {
      *stride = (last - first + 1 + LANES) * 2;
      free(*scores);
      *scores = malloc(sizeof(float) * 2 * *stride);
    }
    const char *keys = m->keys + bytes + (int64_t)head * d * size_of(m->kv_kind);
    const char *values = m->values + bytes + (int64_t)head * d * size_of(m->kv_kind);
    const int32_t *pages = m->table + s->rows[t] * m->columns;
    const float *q = s->qkv + t * wide + head * group * d;
    float *out = s->mixed + (t * m->heads + head * group) * d;
    int g = 0;
    for (; g + 2 <= group; g += 2) attend_two(m, keys, values, pages, first, last, q + g * d, out + g * d, *scores, *stride);
    if (g < group) attend_one(m, keys, values, pages, first, last, q + g * d, out + g * d, *scores, *stride);
  }
}

static int64_t widest(const Model *m) {
  int64_t q = (int64_t)m->heads * m->head_dim, k = m->hidden > m->inner ? m->hidden : m->inner;
  return q > k ? q : k;
}

void petiole_forward(const Model *m, const Step *s) {
#pragma omp parallel num_threads(s->n_threads)
  {
    float *scratch = malloc(sizeof(float) * NB * widest(m)), *scores = NULL;
    int64_t stride = 0;
    for (int64_t i = 0; i < m->n_layers; i++) {
      const Layer *l = m->layers + i;
#pragma omp for schedule(static)
      for (int64_t t = 0; t < s->t; t++)
        rms_norm(s->hidden + t * m->hidden, l->input_norm, s->normed + t * m->hidden, m->hidden, m->eps);
      linear(&l->qkv, (int)s->t, s->normed, s->qkv, 0, scratch);
      rotate_and_keep(m, l, i, s);
      attention(m, l, i, s, &scores, &stride);
      linear(&l->out, (int)s->t, s->mixed, s->hidden, 1, scratch);
#pragma omp for schedule(static)
      for (int64_t t = 0; t < s->t; t++)
        rms_norm(s->hidden + t * m->hidden, l->post_norm, s->normed + t * m->hidden, m->hidden, m->eps);
      linear(&l->gate_up, (int)s->t, s->normed, s->gates, 0, scratch);
#pragma omp for schedule(static)
      for (int64_t t = 0; t < s->t; t++) silu_mul(s->gates + t * 2 * m->inner, s->acted + t * m->inner, m->inner);
      linear(&l->down, (int)s->t, s->acted, s->hidden, 1, scratch);
    }
    free(scratch);
    free(scores);
  }
}

/* hidden [o, hidden] -> logits [o, vocab]; normed: [o, hidden] scratch */
void petiole_logits(const Model *m, int64_t o, const float *hidden, float *normed, float *logits, int32_t n_threads) {
#pragma omp parallel num_threads(n_threads)
  {
    float *scratch = malloc(sizeof(float) * NB * m->hidden);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < o; i++)
      rms_norm(hidden + i * m->hidden, m->norm, normed + i * m->hidden, m->hidden, m->eps);
    linear(&m->head, (int)o, normed, logits, 0, scratch);
    free(scratch);
  }
}
