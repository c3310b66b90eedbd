/* Attention in blocks: a span of queries attends to 128 cached positions at a time.
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
 * a block is first packed once, and prefetches the next one. Then the first TOGETHER rows of them go from scores to
 * sums, then the next ones. In both cases keys and values in eight bits are first widened to bfloat16, 16 positions at a
 * time, and the sums are the same chains of additions. (With TILES the sums are those of tiles.c, and a few queries take
 * values 32 at a time.) Blocks begin at multiples of 128 positions of the sequence, for any query. A position that a query
 * does not see has the weight 0, which changes no sum. So a query gets the same bits alone as among others.
 */
#include "attend.h"

#include "../products/kernels/panels.h"
#include "blocks.h"
#include "few.h"
#include "softmax.h"

/* Where the first block begins that the unit's queries see. */
INLINE int64_t first_base(const Heads *c, const Unit *u) {
  return c->window && u->span->first >= c->window ? (u->span->first - c->window + 1) / KEYS * KEYS : 0;
}

/* The end of the positions that they see. */
INLINE int64_t end_of(const Heads *c, const Unit *u) {
  const int64_t reached = u->span->first + u->span->n - 1 + c->window;
  return c->window && c->mask == BIDIRECTIONAL ? smaller(u->span->end, reached) : u->span->end;
}

INLINE void find_block_of(const Heads *c, const Unit *u, int64_t base, Block *b) {
  find_block(c, u->span->row, base, (int)smaller(KEYS, end_of(c, u) - base), b);
}

/* The scratch from a row on. */
INLINE Scratch scratch_from(const Scratch *d, int half, int row, int padded) {
  Scratch own = *d;
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

/* Biases by distance are added to the scores of `rows` rows from row r on, at n positions from `base` on. m: rows of a
 * head of keys */
INLINE void add_bias(const Heads *c, const Unit *u, int r, int rows, int m, int64_t base, int n, const Scratch *own) {
  const int group = c->heads / c->kv_heads;
  for (int i = 0; c->bias && i < rows; i++, r++) {
    const int64_t head = (u->head + r / m) * group + r % group, at = u->span->first + r % m / group;
    const float *bias = c->bias + head * c->distances + c->distances / 2 + base - at;
    for (int j = 0; j < n; j++) own->scores[i * KC + j] += bias[j];
  }
}

/* Many rows attend to a block, TOGETHER at a time. keys, values: of the pool's first position, at the unit's head.
 * ahead: the next block's keys and values, which are prefetched, some lines before each product */
INLINE void attend_many(int kind, int stored, const Heads *c, const Unit *u, const char *keys, const char *values, const Block *b, int m,
                        int64_t base, Prefetch ahead[2], Scratch *d) {
  const int half = HALF_INPUTS(kind), width = c->head_dim, padded = (int)parts(width, PANEL) * PANEL;
  const int64_t lines = 2 * lines_of(ahead) / (parts(m, TOGETHER) * (KEYS / PANEL + padded / PANEL)) + 1;
  transpose_all_keys(kind, stored, c, keys, b, d);
  pack_all_values(kind, stored, c, values, b, d);
  for (int first = 0; first < m; first += TOGETHER) {
    const int rows = (int)smaller(TOGETHER, m - first);
    int seen = 0; /* positions of the block, by any of these rows */
    for (int i = first; i < first + rows; i++) {
      const int end = end_seen(d, i, base, b->n);
      seen = end > seen ? end : seen;
    }
    if (!seen) continue;
    Scratch own = scratch_from(d, half, first, padded);
    for (int j = 0; j < seen; j += PANEL) {
      prefetch_lines(ahead + (ahead->at == ahead->end), lines);
      for (int k = 0; k < width; k += KC) {
        const char *queries = (char *)own.queries + k / KC * d->slice * (half ? 2 : 4);
        const char *panel = (char *)d->keys + ((int64_t)j * padded + k * PANEL) * (half ? 2 : 4);
        multiply(half, rows, (int)smaller(KC, width - k), queries, panel, own.scores + j, KC, k > 0);
      }
    }
    add_bias(c, u, first, rows, m, base, seen, &own);
    softmax_block(half, half, c->cap * LOG2_E, base, rows, seen, padded, &own);
    for (int k = 0; k < padded; k += PANEL) {
      prefetch_lines(ahead + (ahead->at == ahead->end), lines);
      multiply(half, rows, seen, own.weights, (char *)d->values + k * KEYS * (half ? 2 : 4), own.sums + k, padded, 1);
    }
  }
}

/* The place of dimension k of query r, in numbers. */
INLINE int64_t query_at(const Scratch *d, int64_t r, int k) { return k / KC * d->slice + r * KC + k % KC; }

/* Rows of a scratch: row r is query r % m at head r / m of a unit. */
INLINE void pack_queries(int rounded, int half, const Heads *c, const Unit *u, const Queries *queries, int m,
                         Scratch *d) {
  const Span *s = u->span;
  const int width = c->head_dim, group = c->heads / c->kv_heads;
  const int padded = (int)parts(width, PANEL) * PANEL, full = width / LANES * LANES;
  const float by = c->scale * LOG2_E; /* weights are powers of 2 */
  for (int r = 0; r < u->n_heads * m; r++) {
    const float *in = queries->at + r % m / group * queries->stride + (r / m * group + r % group) * queries->head;
    for (int k0 = 0; k0 < padded; k0 += KC) {
      float *scaled = half ? d->scores : (float *)d->queries + query_at(d, r, k0);
      const int end = (int)smaller(KC, padded - k0), whole = (int)smaller(KC, full - k0);
      for (int k = 0; k < whole; k += LANES) store(scaled + k, load(in + k0 + k) * by);
      for (int k = whole; k < end; k++) scaled[k] = k0 + k < width ? in[k0 + k] * by : 0;
      if (half) narrow(scaled, end, (uint16_t *)d->queries + query_at(d, r, k0));
      else if (rounded) for (int k = 0; k < end; k += WIDTH) set_part(scaled + k, to_halves(part_at(scaled + k)));
    }
    d->most[r] = c->sinks ? c->sinks[(u->head + r / m) * group + r % group] * LOG2_E : NOTHING;
    d->total[r] = c->sinks ? 1 : 0;
    const int64_t at = s->first + r % m / group;
    d->first[r] = c->window && at >= c->window ? at - c->window + 1 : 0;
    d->last[r] = s->limits && c->mask != CAUSAL ? s->limits[r % m / group] - 1 : at;
    if (c->window && c->mask == BIDIRECTIONAL) d->last[r] = smaller(d->last[r], at + c->window - 1);
  }
}

/* Panels that are wider than a head end in numbers, those of another layer perhaps. */
INLINE void pad_panels(const Heads *c, Scratch *d) {
  const int64_t width = parts(c->head_dim, PANEL) * PANEL;
  if (d->padded_from == c->head_dim) return;
  d->padded_from = c->head_dim;
  if (width == c->head_dim) return;
  memset(d->values, 0, sizeof(float) * (size_t)(KEYS * width));
  memset(d->keys, 0, sizeof(float) * (size_t)(KEYS * width));
}

/* kind: of the products; stored: of the cache */
INLINE void attend_kind(int kind, int stored, const Heads *c, const Unit *u, const Unit *next, const Queries *queries,
                        Activations out, Scratch *d) {
  const Span *s = u->span;
  const int width = c->head_dim, group = c->heads / c->kv_heads, m = (int)s->n * group, all = u->n_heads * m;
  const int few = is_few(c, m), rounded = HALF_INPUTS(kind), half = few ? HALF_INPUTS(IN_PLACE(kind)) : rounded;
  const int padded = (int)parts(width, PANEL) * PANEL;
  pack_queries(rounded, half, c, u, queries, m, d);
  pad_panels(c, d);
  memset(d->sums, 0, sizeof(float) * (size_t)(all * padded));
  const int vectors = width % (4 * LANES) ? 1 : 4, step = kind == F32 ? LANES : 2 * LANES;
  const int64_t head = width * size_of(kind), size = size_of(stored);
  const char *keys = c->keys + bytes_to(c, u->head), *values = c->values + bytes_to(c, u->head);
  const int64_t end = end_of(c, u);
  Block block, ahead;
  find_block_of(c, u, first_base(c, u), &block);
  for (int64_t base = first_base(c, u); base < end; base += KEYS, block = ahead) {
    const int more = base + KEYS < end, shown = (int)parts(block.n, LANES) * LANES;
    const Unit *then = more ? u : next;
    find_block_of(c, then, more ? base + KEYS : first_base(c, next), &ahead);
    if (!few) {
      Prefetch to[] = {prefetch_of(c, c->keys, then, &ahead, 0, KEYS),
                    prefetch_of(c, c->values, then, &ahead, 0, KEYS)};
      attend_many(kind, stored, c, u, keys, values, &block, m, base, to, d);
      continue;
    }
    Scratch own[HEADS];
    for (int h = 0; h < u->n_heads; h++) own[h] = scratch_from(d, half, h * m, padded);
    for (int j = 0; j < shown; j += LANES) {
      const Rows rows = rows_of(stored, c, keys, block.at + j, LANES, u->n_heads, d);
      const Next to = j + LANES < shown ? (Next){keys, block.at + j + LANES, LANES, size}
                                        : (Next){values, block.at, VALUES_AT_ONCE, size};
      for (int h = 0; h < u->n_heads; h++)
        for (int k = 0; k < width; k += step)
          score_some(kind, rows.pool + h * head, rows.at, k, m, own[h].queries, query_at(d, 0, k), own[h].scores + j, &to,
                     h * width + k);
    }
    for (int h = 0; h < u->n_heads; h++) {
      add_bias(c, u, h * m, m, m, base, block.n, own + h);
      softmax_block(rounded, half, c->cap * LOG2_E, base, m, block.n, padded, own + h);
    }
    for (int j = 0; j < shown; j += VALUES_AT_ONCE) {
      const int n = (int)smaller(VALUES_AT_ONCE, block.n - j);
      const Rows rows = rows_of(stored, c, values, block.at + j, n, u->n_heads, d);
      const Next to = j + VALUES_AT_ONCE < shown ? (Next){values, block.at + j + n, VALUES_AT_ONCE, size}
                                                 : (Next){c->keys + bytes_to(c, then->head), ahead.at, LANES, size};
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
    const float *gates = queries->at + r % m / group * queries->stride + (r / m * group + r % group) * queries->head + width;
    const float share = 1.0f / d->total[r];
    float *sums = d->sums + r * padded;
    for (int k = 0; k < padded; k += LANES) store(sums + k, load(sums + k) * share);
    for (int k = 0; queries->gated && k < width; k += WIDTH)
      set_part(sums + k, part_at(sums + k) * sigmoid(part_at(gates + k)));
    if (!out.packed) memcpy((float *)out.at + t * n + at, sums, sizeof(float) * (size_t)width);
    else for (int k = 0; k < width; k += LANES) narrow(sums + k, LANES, packed_at(out.at, n, t, at + k));
  }
}

void attend(const Heads *c, const Unit *u, const Unit *next, Queries queries, Activations out, Scratch *d) {
  switch (c->kv_kind) { /* constants, so that each case is a function of its own */
    case F32: attend_kind(F32, F32, c, u, next, &queries, out, d); break;
    case BF16: attend_kind(BF16, BF16, c, u, next, &queries, out, d); break;
    default: attend_kind(BF16, E4M3, c, u, next, &queries, out, d);
  }
}

/* ---------------------------------------------------------------- memory */

Scratch new_scratch(const Heads *const *shapes, int64_t n, int64_t t, Arena *s) {
  int64_t m = 0, all = 0, width = 0, widened = 0;
  int rounded = 0;
  for (int64_t i = 0; i < n; i++) {
    const Heads *c = shapes[i];
    const int64_t rows = smaller(t, span_length(c)) * (c->heads / c->kv_heads), few = smaller(rows, FEW) * c->kv_heads;
    m = larger_of(m, rows);
    all = larger_of(all, larger_of(rows, few));
    width = larger_of(width, parts(c->head_dim, PANEL) * PANEL);
    if (c->kv_kind == E4M3) widened = larger_of(widened, (int64_t)VALUES_AT_ONCE * c->kv_heads * c->head_dim * 2);
    rounded |= c->kv_kind != F32 && HALF_INPUTS(BF16);
  }
  const int64_t n_rows = parts(all, 2 * SIDE) * 2 * SIDE, slice = n_rows * KC;
  Scratch d = {.queries = allocate_floats(s, parts(width, KC) * slice), .scores = allocate_floats(s, slice),
            .sums = allocate_floats(s, n_rows * width),
            .keys = allocate_floats(s, KEYS * width), .values = allocate_floats(s, KEYS * width),
            .most = allocate_floats(s, all + LANES), .now = allocate_floats(s, m + LANES),
            .by = allocate_floats(s, m + LANES),
            .total = allocate_floats(s, all + LANES), .first = allocate(s, all * (int64_t)sizeof(int64_t)),
            .last = allocate(s, all * (int64_t)sizeof(int64_t)), .slice = slice};
  d.weights = rounded ? allocate_floats(s, slice / 2) : d.scores;
  if (widened) d.widened = allocate(s, widened);
  return d;
}
