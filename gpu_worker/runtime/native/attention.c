/* Attention in blocks: a span of queries meets 128 cached positions at a time.
 *
 *              keys 0-127   128-255   256-383
 *   query 250      all      up to 250    -        most, total, sums: carried from block to block, and
 *   query 251      all      up to 251    -        rescaled when a later block has a higher score
 *   ...
 *   query 260      all         all     up to 260
 *
 * A block's keys and values are laid out once for all queries of the span and all heads of the group. Blocks begin
 * at multiples of 128 positions of the sequence, whoever asks; and a position that a query does not see has the
 * weight 0, which changes no sum. So a query gets the same bits alone as among others.
 */
#include "attention.h"

#define KEYS 128 /* at most KC */
#define QUERIES 192 /* rows of a span: its queries, times the heads of a group */
#define NOTHING -1e30f

int64_t span_length(const Cache *c) {
  const int64_t n = QUERIES / (c->heads / c->kv_heads);
  return n ? n : 1;
}

/* Cuts a step into spans; returns their number, at most `t`. */
int64_t find_spans(const Cache *c, int64_t t, const int64_t *rows, const int64_t *positions, Span *spans) {
  const int64_t most = span_length(c);
  int64_t n = 0;
  for (int64_t i = 0; i < t; i++) {
    Span *last = spans + n - 1;
    if (n && last->row == rows[i] && last->first + last->n == positions[i] && last->n < most) last->n++;
    else spans[n++] = (Span){i, 1, rows[i], positions[i]};
  }
  return n;
}

/* ---------------------------------------------------------------- a block of the cache */

INLINE float widen1(int kind, const char *base, int64_t i) {
  if (kind == F32) return ((const float *)base)[i];
  uint32_t bits = (uint32_t)((const uint16_t *)base)[i] << 16;
  float out;
  memcpy(&out, &bits, 4);
  return out;
}

/* 16 keys at `at[j]` -> out[dimension * PANEL + j]; half: out[dimension / 2 * PANEL + j], in pairs. A pair of
 * bfloat16 changes place as one lane. */
INLINE void turn_keys(int kind, const char *at[LANES], int width, void *out) {
  const int step = kind == F32 ? LANES : 2 * LANES, full = width / step * step;
  for (int c = 0; c < full; c += step) {
    vu rows[LANES];
#pragma GCC unroll 16
    for (int j = 0; j < LANES; j++) rows[j] = *(const vu *)(at[j] + c * size_of(kind));
    transpose(rows);
#pragma GCC unroll 16
    for (int j = 0; j < LANES; j++) {
      if (kind == F32) store((float *)out + (c + j) * PANEL, (vf)rows[j]);
      else if (HALF_INPUTS(kind)) *(vu *)((uint32_t *)out + (c / 2 + j) * PANEL) = rows[j];
      else {
        store((float *)out + (c + 2 * j) * PANEL, (vf)(rows[j] << 16));
        store((float *)out + (c + 2 * j + 1) * PANEL, (vf)(rows[j] & 0xFFFF0000u));
      }
    }
  }
  for (int c = full; c < width; c++)
    for (int j = 0; j < LANES; j++)
      if (HALF_INPUTS(kind)) ((uint16_t *)out)[(c / 2 * PANEL + j) * 2 + c % 2] = ((const uint16_t *)at[j])[c];
      else ((float *)out)[c * PANEL + j] = widen1(kind, at[j], c);
}

/* The values at two neighbours, the second perhaps null: out[position * PANEL + dimension], or both as pairs. */
INLINE void lay_values(int kind, const char *first, const char *second, int width, void *out) {
  for (int c = 0; c < width; c += LANES) {
    const int64_t at = c / PANEL * KEYS * PANEL + c % PANEL;
    const char *a = first + c * size_of(kind), *b = second + c * size_of(kind);
    if (HALF_INPUTS(kind)) {
      const vu low = widen_halves(a), high = second ? widen_halves(b) << 16 : (vu){0};
      *(vu *)((uint32_t *)out + c / PANEL * (KEYS / 2) * PANEL + c % PANEL) = low | high;
      continue;
    }
    store((float *)out + at, kind == F32 ? load((const float *)a) : (vf)(widen_halves(a) << 16));
    if (second) store((float *)out + at + PANEL, kind == F32 ? load((const float *)b) : (vf)(widen_halves(b) << 16));
  }
}

/* Positions [base, base + n) of the span's row at one key head. */
INLINE void lay_block(int kind, const Cache *c, int64_t layer, int64_t row, int head, int64_t base, int n, Desk *d) {
  const int width = c->head_dim, padded = (int)parts(width, PANEL) * PANEL;
  const int64_t size = size_of(kind), token = (int64_t)c->kv_heads * width;
  const int64_t pool = layer * c->n_slots * token + (int64_t)head * width, unit = HALF_INPUTS(kind) ? 2 : 4;
  for (int j0 = 0; j0 < n; j0 += LANES) {
    const char *keys[LANES], *values[LANES];
    for (int j = 0; j < LANES; j++) {
      const int64_t position = base + smaller(j0 + j, n - 1); /* repeats the last: nobody looks at it */
      const int64_t at = (pool + slot_of(c, row, position) * token) * size;
      keys[j] = c->keys + at;
      values[j] = j0 + j < n ? c->values + at : NULL;
      const int64_t next = (pool + slot_of(c, row, base + smaller(j0 + j + LANES, n - 1)) * token) * size;
      for (int64_t line = 0; line < width * size; line += 64) {
        __builtin_prefetch(c->keys + next + line);
        __builtin_prefetch(c->values + next + line);
      }
    }
    for (int j = 0; j < LANES && values[j]; j += 2)
      lay_values(kind, values[j], values[j + 1], width, (char *)d->values + (j0 + j) * PANEL * unit);
    turn_keys(kind, keys, width, (char *)d->keys + j0 / PANEL * padded * PANEL * unit + j0 % PANEL * 4);
  }
}

/* ---------------------------------------------------------------- softmax */

/* Hides those of scores [padded], at positions base, base + 1, ..., that do not lie in [first, last]. */
INLINE void hide(float *scores, int padded, int64_t base, int64_t first, int64_t last) {
  vi lane;
  for (int j = 0; j < LANES; j++) lane[j] = j;
  const int from = first > base ? (int)smaller(first - base, KEYS) : 0;
  const int to = last < base ? -1 : (int)smaller(last - base, KEYS);
  for (int j = 0; j < padded; j += LANES) {
    const vi at = lane + j;
    store(scores + j, pick((at >= from) & (at <= to), load(scores + j), splat(-INFINITY)));
  }
}

/* scores [m][KC], the first n of each row -> unnormalised weights; rescales what was summed up before. */
INLINE void weigh(int m, int n, int width, Desk *d) {
  const int padded = (int)parts(n, LANES) * LANES;
  for (int i = 0; i < m; i++) { /* row by row in short loops: the processor overlaps the rows */
    const float *row = d->scores + i * KC;
    vf highest = splat(d->most[i]);
    for (int j = 0; j < padded; j += LANES) highest = larger(load(row + j), highest);
    d->now[i] = largest(highest);
  }
  for (int i = 0; i < m; i += LANES) store(d->by + i, vexp(load(d->most + i) - load(d->now + i)));
  for (int i = 0; i < m; i++) {
    float *row = d->scores + i * KC;
    vf sums = {0};
    for (int j = 0; j < padded; j += LANES) {
      const vf e = vexp(load(row + j) - d->now[i]);
      store(row + j, e);
      sums += e;
    }
    d->total[i] = d->total[i] * d->by[i] + sum(sums);
    if (d->now[i] == d->most[i]) continue;
    for (int k = 0; k < width; k += LANES) store(d->sums + i * width + k, load(d->sums + i * width + k) * d->by[i]);
    d->most[i] = d->now[i];
  }
}

INLINE void attend_kind(int kind, const Cache *c, int64_t layer, int64_t window, const Span *s, int head,
                        const float *queries, int64_t q_stride, float *out, int64_t out_stride, Desk *d) {
  const int half = HALF_INPUTS(kind), unit = half ? 2 : 4;
  const int width = c->head_dim, group = c->heads / c->kv_heads, m = (int)s->n * group;
  const int padded = (int)parts(width, PANEL) * PANEL;
  for (int i = 0; i < m; i++) {
    const float *in = queries + i / group * q_stride + i % group * width;
    float *scaled = half ? d->scores : (float *)d->queries + i * KC;
    for (int k = 0; k < width; k++) scaled[k] = in[k] * c->scale;
    if (half) narrow(scaled, width, (uint16_t *)d->queries + i * KC);
    d->most[i] = NOTHING;
    d->total[i] = 0;
  }
  memset(d->sums, 0, sizeof(float) * (size_t)(m * padded));
  const int64_t end = s->first + s->n, seen = window && s->first >= window ? s->first - window + 1 : 0;
  for (int64_t base = seen / KEYS * KEYS; base < end; base += KEYS) {
    const int n = (int)smaller(KEYS, end - base);
    lay_block(kind, c, layer, s->row, head, base, n, d);
    for (int j = 0; j < n; j += PANEL)
      multiply(half, m, width, d->queries, (char *)d->keys + j * padded * unit, d->scores + j, KC, 0);
    const int shown = (int)parts(n, LANES) * LANES;
    for (int i = 0; i < m; i++) {
      const int64_t last = s->first + i / group, first = window && last >= window ? last - window + 1 : 0;
      if (first > base || last < base + shown - 1) hide(d->scores + i * KC, shown, base, first, last);
    }
    weigh(m, n, padded, d);
    for (int i = 0; half && i < m; i++) narrow(d->scores + i * KC, shown, (uint16_t *)d->weights + i * KC);
    for (int k = 0; k < padded; k += PANEL)
      multiply(half, m, n, d->weights, (char *)d->values + k * KEYS * unit, d->sums + k, padded, 1);
  }
  for (int i = 0; i < m; i++) {
    float *to = out + i / group * out_stride + i % group * width;
    const float by = 1.0f / d->total[i];
    for (int k = 0; k < width; k++) to[k] = d->sums[i * padded + k] * by;
  }
}

void attend(const Cache *c, int64_t layer, int64_t window, const Span *s, int head, const float *queries,
            int64_t q_stride, float *out, int64_t out_stride, Desk *d) {
  if (c->kv_kind == F32) attend_kind(F32, c, layer, window, s, head, queries, q_stride, out, out_stride, d);
  else attend_kind(BF16, c, layer, window, s, head, queries, q_stride, out, out_stride, d);
}

/* ---------------------------------------------------------------- memory */

static float *floats(int64_t n) { return aligned_alloc(64, (size_t)parts(n * 4, 64) * 64); }

Desk new_desk(const Cache *c, int64_t length) {
  const int64_t m = length * (c->heads / c->kv_heads), width = parts(c->head_dim, PANEL) * PANEL;
  Desk d = {.queries = floats(m * KC), .scores = floats(m * KC), .sums = floats(m * width),
            .keys = floats(KEYS * width), .values = floats(KEYS * width), .most = floats(m + LANES),
            .now = floats(m + LANES), .by = floats(m + LANES), .total = floats(m + LANES)};
  d.weights = HALF_INPUTS(c->kv_kind) ? floats(m * KC / 2) : d.scores;
  memset(d.values, 0, sizeof(float) * (size_t)(KEYS * width)); /* where a panel is wider than the head */
  return d;
}

void free_desk(Desk *d) {
  if (d->weights != d->scores) free(d->weights);
  free(d->queries);
  free(d->scores);
  free(d->sums);
  free(d->keys);
  free(d->values);
  free(d->most);
  free(d->now);
  free(d->by);
  free(d->total);
}
