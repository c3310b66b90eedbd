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
#include "attend.h"

#include "../products/panels.h"
#include "blocks.h"
#include "few.h"
#include "softmax.h"

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
