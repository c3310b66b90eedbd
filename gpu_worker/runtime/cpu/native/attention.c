/* Attention in blocks: a span of queries meets 128 cached positions at a time.
 *
 *              keys 0-127   128-255   256-383
 *   query 250      all      up to 250    -        most, total, sums: carried from block to block, and
 *   query 251      all      up to 251    -        rescaled when a later block has a higher score
 *   ...
 *   query 260      all         all     up to 260
 *
 * Few queries meet a block's keys and values where those lie, and every line that is read asks for the same line of
 * the next block: that many at once would queue up. For many queries (those of the span times the heads of the group)
 * a block is laid out once. The sums are the same chains of additions either way; blocks begin at multiples of 128
 * positions of the sequence, whoever asks; and a position that a query does not see has the weight 0, which changes
 * no sum. So a query gets the same bits alone as among others.
 */
#include "attention.h"

#define KEYS 128 /* at most KC */
#define QUERIES 192 /* rows of a span: its queries, times the heads of a group */
#define FEW 8 /* so many queries meet the keys where those lie; for more, keys are laid out once */
#define NOTHING -1e30f

int64_t span_length(const Cache *c) {
  const int64_t n = QUERIES / (c->heads / c->kv_heads);
  return n ? n : 1;
}

/* Cuts a step into spans; returns their number, at most `t`. */
int64_t find_spans(const Cache *c, int64_t t, const int64_t *rows, const int64_t *positions, const int64_t *limits,
                   Span *spans) {
  const int64_t most = span_length(c);
  int64_t n = 0;
  for (int64_t i = 0; i < t; i++) {
    Span *last = spans + n - 1;
    if (n && last->row == rows[i] && last->first + last->n == positions[i] && last->n < most) last->n++;
    else spans[n++] = (Span){i, 1, rows[i], positions[i], limits ? limits + i : NULL, 0};
    const int64_t end = limits ? limits[i] : positions[i] + 1;
    if (end > spans[n - 1].end) spans[n - 1].end = end;
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

/* sums + the products of dimension j, or of two, of 16 keys with a query that begins at `at` */
INLINE vf add_key(int kind, vf sums, vu keys, const void *queries, int64_t at, int j) {
  if (kind == F32) return sums + (vf)keys * splat(((const float *)queries)[at + j]);
#ifdef DOT
  return add_pairs(sums, keys, pair_at(queries, at + 2 * j));
#else
  const float *q = (const float *)queries + at + 2 * j;
  sums += (vf)(keys << 16) * splat(q[0]);
  return sums + (vf)(keys & 0xFFFF0000u) * splat(q[1]);
#endif
}

/* scores [m][KC] of 16 keys (+)= the products over the dimensions from k on, a vector's worth */
INLINE void score_some(int kind, const char *keys, const int64_t at[LANES], const int64_t next[LANES], int k, int m,
                       const void *queries, float *scores) {
  vu rows[LANES];
#pragma GCC unroll 16
  for (int j = 0; j < LANES; j++) {
    rows[j] = *(const vu *)(keys + at[j] + k * size_of(kind));
    __builtin_prefetch(keys + next[j] + k * size_of(kind), 0, 2);
  }
  transpose(rows);
  for (int i = 0; i < m; i++) {
    vf sums = k ? load(scores + i * KC) : (vf){0};
#pragma GCC unroll 16
    for (int j = 0; j < LANES; j++) sums = add_key(kind, sums, rows[j], queries, i * KC + k, j);
    store(scores + i * KC, sums);
  }
}

/* 16 keys at `at[j]` -> out[dimension * PANEL + j]; half: out[dimension / 2 * PANEL + j], in pairs. A pair of
 * bfloat16 changes place as one lane. */
INLINE void turn_keys(int kind, const char *keys, const int64_t at[LANES], int width, void *out) {
  const int step = kind == F32 ? LANES : 2 * LANES, full = width / step * step;
  for (int c = 0; c < full; c += step) {
    vu rows[LANES];
#pragma GCC unroll 16
    for (int j = 0; j < LANES; j++) rows[j] = *(const vu *)(keys + at[j] + c * size_of(kind));
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
      if (HALF_INPUTS(kind))
        ((uint16_t *)out)[(c / 2 * PANEL + j) * 2 + c % 2] = ((const uint16_t *)(keys + at[j]))[c];
      else ((float *)out)[c * PANEL + j] = widen1(kind, keys + at[j], c);
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

/* Where the positions of a block lie: the bytes from the pool's begin to each one's key or value. Behind the last
 * that one again, so that whole vectors can be read. */
typedef struct {
  int64_t at[KEYS];
} Block;

/* Positions [base, base + n) of the span's row at one key head. */
INLINE void find_block(int kind, const Cache *c, int64_t layer, int64_t row, int head, int64_t base, int n,
                       Block *b) {
  const int64_t size = size_of(kind), token = (int64_t)c->kv_heads * c->head_dim * size, page = c->page_size * token;
  const int64_t pool = layer * c->n_slots * token + (int64_t)head * c->head_dim * size;
  const int32_t *pages = c->table + row * c->columns + base / c->page_size;
  int64_t within = base % c->page_size;
  if (c->page_size == 1)
    for (int j = 0; j < n; j++) b->at[j] = pool + pages[j] * token;
  else
    for (int j = 0; j < n; within = 0) {
      const int end = (int)smaller(n, j + c->page_size - within);
      for (int64_t at = pool + *pages++ * page + within * token; j < end; j++, at += token) b->at[j] = at;
    }
  for (int j = n; j < KEYS; j++) b->at[j] = b->at[n - 1];
}

/* scores [m][KC] of n positions, each product of a query and a key one chain of additions over the dimensions. */
INLINE void score(int kind, const Cache *c, const Block *b, const Block *next, int m, int n, Desk *d) {
  const int half = HALF_INPUTS(kind), width = c->head_dim, padded = (int)parts(width, PANEL) * PANEL;
  const int step = kind == F32 ? LANES : 2 * LANES, few = m <= FEW && width % step == 0;
  for (int j0 = 0; j0 < n; j0 += PANEL) {
    const int end = (int)smaller(j0 + PANEL, parts(n, LANES) * LANES);
    if (few) {
      for (int k = 0; k < width; k += step)
        for (int j = j0; j < end; j += LANES) /* two chains at a time */
          score_some(kind, c->keys, b->at + j, next->at + j, k, m, d->queries, d->scores + j);
      continue;
    }
    char *to = (char *)d->keys + j0 * padded * (half ? 2 : 4);
    for (int j = j0; j < end; j += LANES) turn_keys(kind, c->keys, b->at + j, width, to + j % PANEL * 4);
    multiply(half, m, width, d->queries, to, d->scores + j0, KC, 0);
  }
}

/* The sums of two queries, or of one twice, += their weights of n positions x the values there: so many vectors of
 * dimensions from k on. */
INLINE void add_some(int kind, int vectors, const char *pool, const Block *b, const Block *next, int k, int i0, int i1,
                     int n, int padded, Desk *d) {
  float *to[2] = {d->sums + i0 * padded + k, d->sums + i1 * padded + k};
  const int rows[2] = {i0 * KC, i1 * KC};
  vf sums[2][4];
  for (int r = 0; r < 2; r++)
    for (int v = 0; v < vectors; v++) sums[r][v] = load(to[r] + v * LANES);
  for (int j = 0; j < n; j += HALF_INPUTS(kind) ? 2 : 1)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) {
      const char *at = pool + b->at[j] + (k + v * LANES) * size_of(kind);
      if (!i0) __builtin_prefetch(pool + next->at[j] + (k + v * LANES) * size_of(kind), 0, 2);
#ifdef DOT
      if (kind == BF16) {
        const char *other = pool + b->at[j + 1] + (k + v * LANES) * 2;
        const vu pairs = widen_halves(at) | (j + 1 < n ? widen_halves(other) << 16 : (vu){0});
        for (int r = 0; r < 2; r++) sums[r][v] = add_pairs(sums[r][v], pairs, pair_at(d->weights, rows[r] + j));
        continue;
      }
#endif
      const vf values = kind == F32 ? load((const float *)at) : (vf)(widen_halves(at) << 16);
      for (int r = 0; r < 2; r++) sums[r][v] += values * splat(((const float *)d->weights)[rows[r] + j]);
    }
  for (int r = 0; r < 2; r++)
    for (int v = 0; v < vectors; v++) store(to[r] + v * LANES, sums[r][v]);
}

/* sums [m][padded width] += weights [m][KC] x values of n positions, in the order of the positions. */
INLINE void add_values(int kind, const Cache *c, const Block *b, const Block *next, int m, int n, Desk *d) {
  const int half = HALF_INPUTS(kind), width = c->head_dim, padded = (int)parts(width, PANEL) * PANEL;
  if (m <= FEW) {
    const int vectors = width % (4 * LANES) ? 1 : 4;
    for (int i = 0; i < m; i += 2)
      for (int k = 0; k < width; k += vectors * LANES)
        if (vectors == 4) add_some(kind, 4, c->values, b, next, k, i, (int)smaller(i + 1, m - 1), n, padded, d);
        else add_some(kind, 1, c->values, b, next, k, i, (int)smaller(i + 1, m - 1), n, padded, d);
    return;
  }
  for (int j = 0; j < n; j += 2) {
    const char *second = j + 1 < n ? c->values + b->at[j + 1] : NULL;
    lay_values(kind, c->values + b->at[j], second, width, (char *)d->values + j * PANEL * (half ? 2 : 4));
  }
  for (int k = 0; k < padded; k += PANEL)
    multiply(half, m, n, d->weights, (char *)d->values + k * KEYS * (half ? 2 : 4), d->sums + k, padded, 1);
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

/* Where the first block begins that the unit's queries see. */
INLINE int64_t first_base(const Unit *u, int64_t window) {
  return window && u->span->first >= window ? (u->span->first - window + 1) / KEYS * KEYS : 0;
}

/* The block that begins at `base`; returns how many positions it has. */
INLINE int find_block_of(int kind, const Cache *c, int64_t layer, const Unit *u, int64_t base, Block *b) {
  const int n = (int)smaller(KEYS, u->span->end - base);
  find_block(kind, c, layer, u->span->row, u->head, base, n, b);
  return n;
}

INLINE void attend_kind(int kind, const Cache *c, int64_t layer, int64_t window, const Unit *u, const Unit *next,
                        const float *queries, int64_t q_stride, float *out, int64_t out_stride, Desk *d) {
  const int half = HALF_INPUTS(kind);
  const Span *s = u->span;
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
  const int64_t end = s->end;
  for (int64_t base = first_base(u, window); base < end; base += KEYS) {
    Block block, ahead;
    const int n = find_block_of(kind, c, layer, u, base, &block);
    if (base + KEYS < end) find_block_of(kind, c, layer, u, base + KEYS, &ahead);
    else find_block_of(kind, c, layer, next, first_base(next, window), &ahead);
    score(kind, c, &block, &ahead, m, n, d);
    const int shown = (int)parts(n, LANES) * LANES;
    for (int i = 0; i < m; i++) {
      const int64_t own = s->first + i / group, first = window && own >= window ? own - window + 1 : 0;
      const int64_t last = s->limits ? s->limits[i / group] - 1 : own;
      if (first > base || last < base + shown - 1) hide(d->scores + i * KC, shown, base, first, last);
    }
    weigh(m, n, padded, d);
    for (int i = 0; half && i < m; i++) narrow(d->scores + i * KC, shown, (uint16_t *)d->weights + i * KC);
    add_values(kind, c, &block, &ahead, m, n, d);
  }
  for (int i = 0; i < m; i++) {
    float *to = out + i / group * out_stride + i % group * width;
    const float by = 1.0f / d->total[i];
    for (int k = 0; k < width; k++) to[k] = d->sums[i * padded + k] * by;
  }
}

void attend(const Cache *c, int64_t layer, int64_t window, const Unit *u, const Unit *next, const float *queries,
            int64_t q_stride, float *out, int64_t out_stride, Desk *d) {
  if (c->kv_kind == F32) attend_kind(F32, c, layer, window, u, next, queries, q_stride, out, out_stride, d);
  else attend_kind(BF16, c, layer, window, u, next, queries, q_stride, out, out_stride, d);
}

/* ---------------------------------------------------------------- memory */

Desk new_desk(const Cache *c, int64_t length, Scratch *s) {
  const int64_t m = length * (c->heads / c->kv_heads), width = parts(c->head_dim, PANEL) * PANEL;
  Desk d = {.queries = take_floats(s, m * KC), .scores = take_floats(s, m * KC), .sums = take_floats(s, m * width),
            .keys = take_floats(s, KEYS * width), .values = take_floats(s, KEYS * width),
            .most = take_floats(s, m + LANES), .now = take_floats(s, m + LANES), .by = take_floats(s, m + LANES),
            .total = take_floats(s, m + LANES)};
  d.weights = HALF_INPUTS(c->kv_kind) ? take_floats(s, m * KC / 2) : d.scores;
  if (d.values && width > c->head_dim) memset(d.values, 0, sizeof(float) * (size_t)(KEYS * width));
  return d;
}
