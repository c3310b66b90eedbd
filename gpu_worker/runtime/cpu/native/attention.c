/* Attention in blocks: a span of queries meets 128 cached positions at a time.
 *
 *              keys 0-127   128-255   256-383
 *   query 250      all      up to 250    -        most, total, sums: carried from block to block, and
 *   query 251      all      up to 251    -        rescaled when a later block has a higher score
 *   ...
 *   query 260      all         all     up to 260
 *
 * A few queries read a block's keys and values in place, 16 positions at a time at all key heads of the unit, which is
 * nearly the order of the memory. Beside each line that is read the same line of the next 16 positions is prefetched,
 * because prefetching all lines at once would queue up. For many queries (those of the span times the heads of the group)
 * a block is first laid out once, and prefetches the next one. Then the first TOGETHER rows of them go from scores to
 * sums, then the next ones. In both cases keys and values in eight bits are first widened to bfloat16, 16 positions at a
 * time, and the sums are the same chains of additions. (With TILES the sums are those of tiles.c, and a few queries take
 * values 32 at a time.) Blocks begin at multiples of 128 positions of the sequence, for any query. A position that a query
 * does not see has the weight 0, which changes no sum. So a query gets the same bits alone as among others.
 */
#include "attention.h"
#include "tiles.h"

#define KEYS 128 /* at most KC */
#define FEW 8 /* so many queries meet the keys where those lie; for more, keys are laid out once */
#define HEADS 64 /* of a unit, at most */
#define UNITS 4 /* so many units each thread should have */
#define NOTHING -1e30f

/* Tiles multiply many queries. A few are multiplied in place by vectors of floats, which were rounded to bfloat16, in the
 * order of tiles.c: of each DEPTH terms the even and the odd ones apart. */
#ifdef TILES
#define IN_PLACE(kind) F32 /* the type of what a few queries and their weights lie in */
#define VALUES_AT_ONCE DEPTH
#define PAIR_LANES SIDE       /* from one row of pairs to the next */
#define HALF_LANES (TILE / 4) /* from the pairs of a panel's first outputs to those of its last */
#define NEAR 1                /* how near lines are prefetched: 3 is the first cache, 1 one of those farther away */
#define QUERIES 384           /* rows of a span: its queries, times the heads of a group */
#define TOGETHER (2 * SIDE)   /* of many rows, those that go from scores to sums at a time: the first cache holds them */
#else
#define IN_PLACE(kind) (kind)
#define VALUES_AT_ONCE LANES
#define PAIR_LANES PANEL
#define HALF_LANES LANES
#define NEAR 3
#define QUERIES 192
#define TOGETHER QUERIES
#endif

int64_t span_length(const Cache *c) {
  const int64_t n = QUERIES / (c->heads / c->kv_heads);
  return n ? n : 1;
}

/* Cuts `n_inputs` of a step into spans; returns their number. */
int64_t find_spans(const Cache *c, int64_t n_inputs, const int64_t *inputs, const int64_t *rows,
                   const int64_t *positions, const int64_t *limits, Span *spans) {
  const int64_t most = span_length(c);
  int64_t n = 0;
  for (int64_t i = 0; i < n_inputs; i++) {
    const int64_t t = inputs[i];
    Span *last = spans + n - 1;
    if (n && last->row == rows[t] && last->first + last->n == positions[t] && last->n < most) last->n++;
    else spans[n++] = (Span){t, 1, rows[t], positions[t], limits ? limits + t : NULL, 0};
    const int64_t end = limits ? limits[t] : positions[t] + 1;
    if (end > spans[n - 1].end) spans[n - 1].end = end;
  }
  return n;
}

/* Whether so many queries read keys and values in place. */
INLINE int is_few(const Cache *c, int64_t m) {
  return m <= FEW && c->head_dim % (c->kv_kind == F32 ? LANES : 2 * LANES) == 0;
}

/* Cuts spans into units; returns their number, at most one for each key head of each position. Many queries are a
 * unit at each head. Few are one at as many heads as leave units enough for the threads. */
int64_t find_units(const Cache *c, const Span *spans, int64_t n, int n_threads, Unit *units) {
  const int group = c->heads / c->kv_heads;
  int together = c->kv_heads;
  while (together > HEADS || (together > 1 && n * (c->kv_heads / together) < UNITS * n_threads))
    together = together % 2 ? 1 : together / 2;
  int64_t found = 0;
  for (int64_t i = 0; i < n; i++) {
    const int each = is_few(c, spans[i].n * group) ? together : 1;
    for (int head = 0; head < c->kv_heads; head += each) units[found++] = (Unit){spans + i, head, each};
  }
  return found;
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
#ifdef BY_VECTORS
  return add_pairs(sums, keys, pair_at(queries, at + 2 * j));
#else
  const float *q = (const float *)queries + at + 2 * j;
  sums += (vf)(keys << 16) * splat(q[0]);
  return sums + (vf)(keys & 0xFFFF0000u) * splat(q[1]);
#endif
}

/* What many queries read next: the first `bytes` at each of some positions. */
typedef struct {
  const char *pool;
  const int64_t *at, *end; /* from the pool to each position */
  int64_t bytes, done; /* done: of the position `at` */
} Ahead;

/* Positions that a few queries read next: beside each line that is read, the same line of these is asked for. */
typedef struct {
  const char *pool;  /* of the first of the unit's heads */
  const int64_t *at; /* from there to each position */
  int64_t n, size;   /* at least LANES positions, so many bytes a number */
} Next;

/* Position i, the line with number c of its heads. */
INLINE void ask_for(const Next *next, int64_t i, int64_t c) {
  __builtin_prefetch(next->pool + next->at[i] + c * next->size, 0, NEAR);
}

INLINE void ask_for_line(Ahead *a) {
  if (a->at == a->end) return;
  __builtin_prefetch(a->pool + *a->at + a->done, 0, NEAR);
  const int whole = (a->done += 64) >= a->bytes;
  a->at += whole;
  a->done = whole ? 0 : a->done;
}

INLINE void ask_for_lines(Ahead *a, int64_t n) {
  while (n-- && a->at < a->end) ask_for_line(a);
}

INLINE int64_t lines_of(const Ahead *a) { return (a->end - a->at) * parts(a->bytes, 64); }

/* scores [m][KC] of 16 keys (+)= the products over the dimensions from k on, a vector's worth. c: number k of the heads */
INLINE void score_some(int kind, const char *keys, const int64_t at[LANES], int k, int m, const void *queries,
                       float *scores, const Next *next, int64_t c) {
  vu rows[LANES];
#pragma GCC unroll 16
  for (int j = 0; j < LANES; j++) {
    rows[j] = *(const vu *)(keys + at[j] + k * size_of(kind));
    ask_for(next, j, c);
    if (next->n > LANES) ask_for(next, LANES + j, c);
  }
  transpose(rows);
#ifdef TILES
  for (int i = 0; kind == BF16 && i < m; i += 2) { /* two queries, or one twice: their sums do not wait for each other */
    const int at_query[] = {i, (int)smaller(i + 1, m - 1)};
    vf even[2] = {0}, odd[2] = {0};
#pragma GCC unroll 16
    for (int j = 0; j < LANES; j++) {
      const vf first = (vf)(rows[j] << 16), second = (vf)(rows[j] & 0xFFFF0000u);
#pragma GCC unroll 2
      for (int r = 0; r < 2; r++) {
        const float *q = (const float *)queries + at_query[r] * KC + k + 2 * j;
        even[r] += first * splat(q[0]);
        odd[r] += second * splat(q[1]);
      }
    }
    vf before[2];
    for (int r = 0; r < 2; r++) before[r] = k ? load(scores + at_query[r] * KC) : (vf){0};
    for (int r = 0; r < 2; r++) store(scores + at_query[r] * KC, before[r] + (even[r] + odd[r]));
  }
  if (kind == BF16) return;
#endif
  for (int i = 0; i < m; i++) {
    vf sums = k ? load(scores + i * KC) : (vf){0};
#pragma GCC unroll 16
    for (int j = 0; j < LANES; j++) sums = add_key(kind, sums, rows[j], queries, i * KC + k, j);
    store(scores + i * KC, sums);
  }
}

/* 16 keys at `at[j]` -> out[dimension * PANEL + j]; half: out[dimension / 2 * PANEL + j], in pairs, or where these lie in
 * tiles. A pair of bfloat16 changes place as one lane. */
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
      else if (HALF_INPUTS(kind)) *(vu *)((uint32_t *)out + c / 2 * PANEL + j * PAIR_LANES) = rows[j];
      else {
        store((float *)out + (c + 2 * j) * PANEL, (vf)(rows[j] << 16));
        store((float *)out + (c + 2 * j + 1) * PANEL, (vf)(rows[j] & 0xFFFF0000u));
      }
    }
  }
  for (int c = full; c < width; c++)
    for (int j = 0; j < LANES; j++)
      if (HALF_INPUTS(kind))
        ((uint16_t *)out)[(full / 2 * PANEL + (c - full) / 2 * PAIR_LANES + j) * 2 + c % 2] =
            ((const uint16_t *)(keys + at[j]))[c];
      else ((float *)out)[c * PANEL + j] = widen1(kind, keys + at[j], c);
}

/* The values at two neighbours, the second perhaps null: out[position * PANEL + dimension], or both as pairs. */
INLINE void lay_values(int kind, const char *first, const char *second, int width, void *out) {
  for (int c = 0; c < width; c += LANES) {
    const int64_t at = c / PANEL * KEYS * PANEL + c % PANEL;
    const char *a = first + c * size_of(kind), *b = second + c * size_of(kind);
    if (HALF_INPUTS(kind)) {
      const vu low = widen_halves(a), high = second ? widen_halves(b) << 16 : (vu){0};
      *(vu *)((uint32_t *)out + c / PANEL * (KEYS / 2) * PANEL + c % PANEL / LANES * HALF_LANES) = low | high;
      continue;
    }
    store((float *)out + at, kind == F32 ? load((const float *)a) : (vf)(widen_halves(a) << 16));
    if (second) store((float *)out + at + PANEL, kind == F32 ? load((const float *)b) : (vf)(widen_halves(b) << 16));
  }
}

/* Where the n positions of a block lie: the bytes from those of a pool's first position to each. Behind the last that
 * one again, so that whole vectors can be read. */
typedef struct {
  int64_t at[KEYS];
  int n;
} Block;

/* Positions [base, base + n) of a row. */
INLINE void find_block(const Cache *c, int64_t row, int64_t base, int n, Block *b) {
  const int64_t token = (int64_t)c->kv_heads * c->head_dim * size_of(c->kv_kind), page = c->page_size * token;
  const int32_t *pages = c->table + row * c->columns + base / c->page_size;
  int64_t within = base % c->page_size;
  b->n = n;
  if (c->page_size == 1)
    for (int j = 0; j < n; j++) b->at[j] = pages[j] * token;
  else
    for (int j = 0; j < n; within = 0) {
      const int end = (int)smaller(n, j + c->page_size - within);
      for (int64_t at = *pages++ * page + within * token; j < end; j++, at += token) b->at[j] = at;
    }
  for (int j = n; j < KEYS; j++) b->at[j] = b->at[n - 1];
}

/* From a pool's beginning to the first position, at one key head. */
INLINE int64_t bytes_to(const Cache *c, int64_t layer, int head) {
  return (layer * c->n_slots * c->kv_heads + head) * c->head_dim * size_of(c->kv_kind);
}

INLINE Ahead ahead_of(const Cache *c, int64_t layer, const char *pool, const Unit *u, const Block *b, int from, int n) {
  const int end = (int)smaller(from + n, b->n);
  return (Ahead){pool + bytes_to(c, layer, u->head), b->at + from, b->at + end,
                 (int64_t)u->n_heads * c->head_dim * size_of(c->kv_kind), 0};
}

/* Positions of a pool as the products read them: the bytes from `pool` to each. */
typedef struct {
  const char *pool;
  int64_t at[VALUES_AT_ONCE];
} Rows;

/* pool: of the first of `n_heads` heads */
INLINE Rows rows_of(int stored, const Cache *c, const char *pool, const int64_t *at, int count, int n_heads,
                    const Desk *d) {
  const int64_t n = (int64_t)n_heads * c->head_dim;
  Rows rows = {stored == E4M3 ? (const char *)d->widened : pool, {0}};
  for (int64_t j = 0; j < count; j++) {
    if (stored == E4M3) widen_e4m3((const uint8_t *)pool + at[j], n, d->widened + j * n);
    rows.at[j] = stored == E4M3 ? 2 * j * n : at[j];
  }
  return rows;
}

/* The block's keys as `multiply` takes them. */
INLINE void turn_all_keys(int kind, int stored, const Cache *c, const char *keys, const Block *b, Desk *d) {
  const int half = HALF_INPUTS(kind), width = c->head_dim, padded = (int)parts(width, PANEL) * PANEL;
  for (int j = 0; j < b->n; j += LANES) {
    const Rows rows = rows_of(stored, c, keys, b->at + j, LANES, 1, d);
    char *panel = (char *)d->keys + j / PANEL * PANEL * padded * (half ? 2 : 4);
    turn_keys(kind, rows.pool, rows.at, width, panel + j % PANEL / LANES * (half ? HALF_LANES : LANES) * 4);
  }
}

/* Where `lay_values` puts the values at positions j and j + 1. */
INLINE char *place_of_values(int half, int j, const Desk *d) {
  const int64_t lanes = half ? j / DEPTH * DEPTH / 2 * PANEL + j % DEPTH / 2 * PAIR_LANES : j * PANEL;
  return (char *)d->values + lanes * 4;
}

/* The block's values as `multiply` takes them. */
INLINE void lay_all_values(int kind, int stored, const Cache *c, const char *values, const Block *b, Desk *d) {
  const int half = HALF_INPUTS(kind), width = c->head_dim;
  for (int j0 = 0; j0 < b->n; j0 += LANES) {
    const Rows rows = rows_of(stored, c, values, b->at + j0, LANES, 1, d);
    for (int j = j0; j < smaller(j0 + LANES, b->n); j += 2) {
      const char *second = j + 1 < b->n ? rows.pool + rows.at[j + 1 - j0] : NULL;
      lay_values(kind, rows.pool + rows.at[j - j0], second, width, place_of_values(half, j, d));
    }
  }
#ifdef TILES
  static const char zeros[2 * KC];
  for (int j = (int)parts(b->n, 2) * 2; half && j % DEPTH; j += 2) /* what has no weight must be a number */
    lay_values(kind, zeros, NULL, (int)parts(width, PANEL) * PANEL, place_of_values(half, j, d));
#endif
}

/* The sums of two queries, or of one twice, += their weights from j0 on x n values, in some vectors of dimensions from
 * k on. c: number k of the heads */
INLINE void add_some(int kind, int vectors, const char *values, const int64_t *at, int n, int j0, int k, int i0,
                     int i1, int padded, Desk *d, const Next *next, int64_t c) {
  float *to[2] = {d->sums + i0 * padded + k, d->sums + i1 * padded + k};
  const int rows[2] = {i0 * KC + j0, i1 * KC + j0};
#ifdef TILES
  if (kind == BF16) {
    vf even[2][4] = {0}, odd[2][4] = {0};
    for (int j = 0; j < n; j += 2)
#pragma GCC unroll 4
      for (int v = 0; v < vectors; v++) {
        const int64_t within = (k + v * LANES) * 2;
        if (!i0 && v % 2 == 0 && j < next->n) {
          ask_for(next, j, c + v * LANES);
          ask_for(next, j + 1, c + v * LANES);
        }
        const vf first = (vf)(widen_halves(values + at[j] + within) << 16);
        const vf second = j + 1 < n ? (vf)(widen_halves(values + at[j + 1] + within) << 16) : (vf){0};
#pragma GCC unroll 2
        for (int r = 0; r < 2; r++) {
          even[r][v] += first * splat(((const float *)d->weights)[rows[r] + j]);
          odd[r][v] += second * splat(((const float *)d->weights)[rows[r] + j + 1]);
        }
      }
    vf before[2][4];
    for (int r = 0; r < 2; r++)
      for (int v = 0; v < vectors; v++) before[r][v] = load(to[r] + v * LANES);
    for (int r = 0; r < 2; r++)
      for (int v = 0; v < vectors; v++) store(to[r] + v * LANES, before[r][v] + (even[r][v] + odd[r][v]));
    return;
  }
#endif
  vf sums[2][4];
  for (int r = 0; r < 2; r++)
    for (int v = 0; v < vectors; v++) sums[r][v] = load(to[r] + v * LANES);
  for (int j = 0; j < n; j += HALF_INPUTS(kind) ? 2 : 1)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) {
      const int64_t within = (k + v * LANES) * size_of(kind);
      const char *first = values + at[j] + within;
      if (!i0 && j < next->n && (v % 2 == 0 || kind == F32)) ask_for(next, j, c + v * LANES);
#ifdef BY_VECTORS
      if (kind == BF16) {
        const char *second = values + at[j + 1] + within;
        if (!i0 && j < next->n && v % 2 == 0) ask_for(next, j + 1, c + v * LANES);
        const vu pairs = widen_halves(first) | (j + 1 < n ? widen_halves(second) << 16 : (vu){0});
        for (int r = 0; r < 2; r++) sums[r][v] = add_pairs(sums[r][v], pairs, pair_at(d->weights, rows[r] + j));
        continue;
      }
#endif
      const vf value = kind == F32 ? load((const float *)first) : (vf)(widen_halves(first) << 16);
      for (int r = 0; r < 2; r++) sums[r][v] += value * splat(((const float *)d->weights)[rows[r] + j]);
    }
  for (int r = 0; r < 2; r++)
    for (int v = 0; v < vectors; v++) store(to[r] + v * LANES, sums[r][v]);
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

/* The end of what row i sees among n positions from `base` on. */
INLINE int end_seen(const Desk *d, int i, int64_t base, int n) {
  return d->last[i] < base ? 0 : (int)smaller(d->last[i] + 1 - base, n);
}

/* Rounded to bfloat16. */
INLINE vf to_halves(vf x) {
  uint16_t halves[LANES];
  narrow16(x, halves);
  return (vf)(widen_halves(halves) << 16);
}

/* scores [m][KC] of n positions from `base` on -> unnormalised weights: floats, which are rounded to bfloat16 where
 * `rounded`, and lie in it where `half`. Zeros fill up VALUES_AT_ONCE. Rescales what was summed up before. */
INLINE void weigh(int rounded, int half, int64_t base, int m, int n, int width, Desk *d) {
  const int padded = (int)parts(n, VALUES_AT_ONCE) * VALUES_AT_ONCE;
  for (int i = 0; i < m; i++) { /* row by row in short loops: the processor overlaps the rows */
    float *row = d->scores + i * KC;
    const int shown = (int)parts(end_seen(d, i, base, n), LANES) * LANES;
    if (d->first[i] > base || d->last[i] < base + shown - 1) hide(row, shown, base, d->first[i], d->last[i]);
    vf highest = splat(d->most[i]);
    for (int j = 0; j < shown; j += LANES) highest = larger(load(row + j), highest);
    d->now[i] = largest(highest);
  }
  for (int i = 0; i < m; i += LANES) store(d->by + i, vexp2(load(d->most + i) - load(d->now + i)));
  for (int i = 0; i < m; i++) {
    float *row = d->scores + i * KC;
    uint16_t *halves = (uint16_t *)d->weights + i * KC;
    const int end = end_seen(d, i, base, n);
    vf sums = {0};
    for (int j = 0; j < padded; j += LANES) {
      const vf e = j < end ? vexp2(load(row + j) - d->now[i]) : (vf){0};
      sums += e;
      if (half) narrow16(e, halves + j);
      else store(row + j, rounded ? to_halves(e) : e);
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

INLINE void find_block_of(const Cache *c, const Unit *u, int64_t base, Block *b) {
  find_block(c, u->span->row, base, (int)smaller(KEYS, u->span->end - base), b);
}

/* The desk from a row on. */
INLINE Desk desk_from(const Desk *d, int half, int row, int padded) {
  Desk own = *d;
  own.queries = (char *)d->queries + (int64_t)row * KC * (half ? 2 : 4);
  own.scores += row * KC;
  own.weights = half ? (void *)((uint16_t *)d->weights + (int64_t)row * KC) : own.scores;
  own.sums += row * padded;
  own.most += row;
  own.total += row;
  own.first += row;
  own.last += row;
  return own;
}

/* Many rows meet a block, TOGETHER at a time. keys, values: of the pool's first position, at the unit's head. ahead: the
 * next block's keys and values, which are asked for, some lines before each product */
INLINE void meet_many(int kind, int stored, const Cache *c, const char *keys, const char *values, const Block *b, int m,
                      int64_t base, Ahead ahead[2], Desk *d) {
  const int half = HALF_INPUTS(kind), width = c->head_dim, padded = (int)parts(width, PANEL) * PANEL;
  const int64_t lines = 2 * lines_of(ahead) / (parts(m, TOGETHER) * (KEYS / PANEL + padded / PANEL)) + 1;
  turn_all_keys(kind, stored, c, keys, b, d);
  lay_all_values(kind, stored, c, values, b, d);
  for (int first = 0; first < m; first += TOGETHER) {
    const int rows = (int)smaller(TOGETHER, m - first);
    int seen = 0; /* positions of the block, by any of these rows */
    for (int i = first; i < first + rows; i++) {
      const int end = end_seen(d, i, base, b->n);
      seen = end > seen ? end : seen;
    }
    if (!seen) continue;
    Desk own = desk_from(d, half, first, padded);
    for (int j = 0; j < seen; j += PANEL) {
      ask_for_lines(ahead + (ahead->at == ahead->end), lines);
      multiply(half, rows, width, own.queries, (char *)d->keys + j * padded * (half ? 2 : 4), own.scores + j, KC, 0);
    }
    weigh(half, half, base, rows, seen, padded, &own);
    for (int k = 0; k < padded; k += PANEL) {
      ask_for_lines(ahead + (ahead->at == ahead->end), lines);
      multiply(half, rows, seen, own.weights, (char *)d->values + k * KEYS * (half ? 2 : 4), own.sums + k, padded, 1);
    }
  }
}

/* kind: of the products; stored: of the cache */
INLINE void attend_kind(int kind, int stored, const Cache *c, int64_t layer, int64_t window, const Unit *u,
                        const Unit *next, const float *queries, int64_t q_stride, Activations out, Desk *d) {
  const Span *s = u->span;
  const int width = c->head_dim, group = c->heads / c->kv_heads, m = (int)s->n * group, all = u->n_heads * m;
  const int few = is_few(c, m), rounded = HALF_INPUTS(kind), half = few ? HALF_INPUTS(IN_PLACE(kind)) : rounded;
  const int padded = (int)parts(width, PANEL) * PANEL, full = width / LANES * LANES;
  const float by = c->scale * LOG2_E; /* weights are powers of 2 */
  for (int r = 0; r < all; r++) { /* row r: head r / m, query r % m */
    const float *in = queries + r % m / group * q_stride + (r / m * group + r % group) * width;
    float *scaled = half ? d->scores : (float *)d->queries + r * KC;
    for (int k = 0; k < full; k += LANES) store(scaled + k, load(in + k) * by);
    for (int k = full; k < padded; k++) scaled[k] = k < width ? in[k] * by : 0;
    if (half) narrow(scaled, padded, (uint16_t *)d->queries + r * KC);
    else if (rounded) for (int k = 0; k < width; k += LANES) store(scaled + k, to_halves(load(scaled + k)));
    d->most[r] = NOTHING;
    d->total[r] = 0;
    const int64_t at = s->first + r % m / group;
    d->first[r] = window && at >= window ? at - window + 1 : 0;
    d->last[r] = s->limits ? s->limits[r % m / group] - 1 : at;
  }
  memset(d->sums, 0, sizeof(float) * (size_t)(all * padded));
  const int vectors = width % (4 * LANES) ? 1 : 4, step = kind == F32 ? LANES : 2 * LANES;
  const int64_t head = width * size_of(kind), size = size_of(stored);
  const char *keys = c->keys + bytes_to(c, layer, u->head), *values = c->values + bytes_to(c, layer, u->head);
  const int64_t end = s->end;
  Block block, ahead;
  find_block_of(c, u, first_base(u, window), &block);
  for (int64_t base = first_base(u, window); base < end; base += KEYS, block = ahead) {
    const int more = base + KEYS < end, shown = (int)parts(block.n, LANES) * LANES;
    const Unit *then = more ? u : next;
    find_block_of(c, then, more ? base + KEYS : first_base(next, window), &ahead);
    if (!few) {
      Ahead to[] = {ahead_of(c, layer, c->keys, then, &ahead, 0, KEYS),
                    ahead_of(c, layer, c->values, then, &ahead, 0, KEYS)};
      meet_many(kind, stored, c, keys, values, &block, m, base, to, d);
      continue;
    }
    Desk own[HEADS];
    for (int h = 0; h < u->n_heads; h++) own[h] = desk_from(d, half, h * m, padded);
    for (int j = 0; j < shown; j += LANES) {
      const Rows rows = rows_of(stored, c, keys, block.at + j, LANES, u->n_heads, d);
      const Next to = j + LANES < shown ? (Next){keys, block.at + j + LANES, LANES, size}
                                        : (Next){values, block.at, VALUES_AT_ONCE, size};
      for (int h = 0; h < u->n_heads; h++)
        for (int k = 0; k < width; k += step)
          score_some(kind, rows.pool + h * head, rows.at, k, m, own[h].queries, own[h].scores + j, &to,
                     h * width + k);
    }
    for (int h = 0; h < u->n_heads; h++) weigh(rounded, half, base, m, block.n, padded, own + h);
    for (int j = 0; j < shown; j += VALUES_AT_ONCE) {
      const int n = (int)smaller(VALUES_AT_ONCE, block.n - j);
      const Rows rows = rows_of(stored, c, values, block.at + j, n, u->n_heads, d);
      const Next to = j + VALUES_AT_ONCE < shown ? (Next){values, block.at + j + n, VALUES_AT_ONCE, size}
                                                 : (Next){c->keys + bytes_to(c, layer, then->head), ahead.at, LANES, size};
      for (int h = 0; h < u->n_heads; h++)
        for (int i = 0; i < m; i += 2)
          for (int k = 0; k < width; k += vectors * LANES) {
            const int other = (int)smaller(i + 1, m - 1);
            const char *at = rows.pool + h * head;
            const int64_t number = h * width + k;
            if (vectors == 4) add_some(kind, 4, at, rows.at, n, j, k, i, other, padded, own + h, &to, number);
            else add_some(kind, 1, at, rows.at, n, j, k, i, other, padded, own + h, &to, number);
          }
    }
  }
  for (int r = 0; r < all; r++) {
    const int64_t t = s->t + r % m / group, at = ((u->head + r / m) * group + r % group) * width, n = c->heads * width;
    const float share = 1.0f / d->total[r];
    float *sums = d->sums + r * padded;
    for (int k = 0; k < padded; k += LANES) store(sums + k, load(sums + k) * share);
    if (!out.packed) memcpy((float *)out.at + t * n + at, sums, sizeof(float) * (size_t)width);
    else for (int k = 0; k < width; k += LANES) narrow(sums + k, LANES, packed_at(out.at, n, t, at + k));
  }
}

void attend(const Cache *c, int64_t layer, int64_t window, const Unit *u, const Unit *next, const float *queries,
            int64_t q_stride, Activations out, Desk *d) {
  switch (c->kv_kind) { /* constants, so that each case is a function of its own */
    case F32: attend_kind(F32, F32, c, layer, window, u, next, queries, q_stride, out, d); break;
    case BF16: attend_kind(BF16, BF16, c, layer, window, u, next, queries, q_stride, out, d); break;
    default: attend_kind(BF16, E4M3, c, layer, window, u, next, queries, q_stride, out, d);
  }
}

/* ---------------------------------------------------------------- memory */

Desk new_desk(const Cache *c, int64_t length, Scratch *s) {
  const int64_t m = length * (c->heads / c->kv_heads), few = smaller(m, FEW) * c->kv_heads, all = m > few ? m : few;
  const int64_t width = parts(c->head_dim, PANEL) * PANEL, n_rows = parts(all, 2 * SIDE) * 2 * SIDE;
  Desk d = {.queries = take_floats(s, n_rows * KC), .scores = take_floats(s, n_rows * KC),
            .sums = take_floats(s, n_rows * width),
            .keys = take_floats(s, KEYS * width), .values = take_floats(s, KEYS * width),
            .most = take_floats(s, all + LANES), .now = take_floats(s, m + LANES), .by = take_floats(s, m + LANES),
            .total = take_floats(s, all + LANES), .first = take(s, all * (int64_t)sizeof(int64_t)),
            .last = take(s, all * (int64_t)sizeof(int64_t))};
  d.weights = c->kv_kind != F32 && HALF_INPUTS(BF16) ? take_floats(s, n_rows * KC / 2) : d.scores;
  if (c->kv_kind == E4M3) d.widened = take(s, (int64_t)VALUES_AT_ONCE * c->kv_heads * c->head_dim * 2);
  if (d.values && width > c->head_dim) {
    memset(d.values, 0, sizeof(float) * (size_t)(KEYS * width));
    memset(d.keys, 0, sizeof(float) * (size_t)(KEYS * width));
  }
  return d;
}
