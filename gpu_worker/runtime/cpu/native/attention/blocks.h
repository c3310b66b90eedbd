/* A block of the cache: where its positions lie, and its keys and values packed for many queries. */
#pragma once
#include "../arithmetic/e4m3.h"
#include "scratch.h"
#include "spans.h"

INLINE float widen1(int kind, const char *base, int64_t i) {
  if (kind == F32) return ((const float *)base)[i];
  uint32_t bits = (uint32_t)((const uint16_t *)base)[i] << 16;
  float out;
  memcpy(&out, &bits, 4);
  return out;
}

/* What many queries read next: the first `bytes` at each of some positions. */
typedef struct {
  const char *pool;
  const int64_t *at, *end; /* from the pool to each position */
  int64_t bytes, done; /* done: of the position `at` */
} Prefetch;

/* Positions that a few queries read next: beside each line that is read, the same line of these is prefetched. */
typedef struct {
  const char *pool;  /* of the first of the unit's heads */
  const int64_t *at; /* from there to each position */
  int64_t n, size;   /* at least LANES positions, this many bytes a number */
} Next;

/* Position i, the line with number c of its heads. */
INLINE void prefetch(const Next *next, int64_t i, int64_t c) {
  __builtin_prefetch(next->pool + next->at[i] + c * next->size, 0, NEAR);
}

INLINE void prefetch_line(Prefetch *a) {
  if (a->at == a->end) return;
  __builtin_prefetch(a->pool + *a->at + a->done, 0, NEAR);
  const int whole = (a->done += 64) >= a->bytes;
  a->at += whole;
  a->done = whole ? 0 : a->done;
}

INLINE void prefetch_lines(Prefetch *a, int64_t n) {
  while (n-- && a->at < a->end) prefetch_line(a);
}

INLINE int64_t lines_of(const Prefetch *a) { return (a->end - a->at) * parts(a->bytes, 64); }

/* 16 keys at `at[j]` -> out[dimension * PANEL + j]; half: out[dimension / 2 * PANEL + j], in pairs, or where these lie in
 * tiles. A pair of bfloat16 changes place as one lane. */
INLINE void transpose_keys(int kind, const char *keys, const int64_t at[LANES], int width, void *out) {
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
INLINE void pack_values(int kind, const char *first, const char *second, int width, void *out) {
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
INLINE void find_block(const Heads *c, int64_t row, int64_t base, int n, Block *b) {
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
INLINE int64_t bytes_to(const Heads *c, int head) { return (int64_t)head * c->head_dim * size_of(c->kv_kind); }

INLINE Prefetch prefetch_of(const Heads *c, const char *pool, const Unit *u, const Block *b, int from, int n) {
  const int end = (int)smaller(from + n, b->n);
  return (Prefetch){pool + bytes_to(c, u->head), b->at + from, b->at + end,
                 (int64_t)u->n_heads * c->head_dim * size_of(c->kv_kind), 0};
}

/* Positions of a pool as the products read them: the bytes from `pool` to each. */
typedef struct {
  const char *pool;
  int64_t at[VALUES_AT_ONCE];
} Rows;

/* pool: of the first of `n_heads` heads */
INLINE Rows rows_of(int stored, const Heads *c, const char *pool, const int64_t *at, int count, int n_heads,
                    const Scratch *d) {
  const int64_t n = (int64_t)n_heads * c->head_dim;
  Rows rows = {stored == E4M3 ? (const char *)d->widened : pool, {0}};
  for (int64_t j = 0; j < count; j++) {
    if (stored == E4M3) widen_e4m3((const uint8_t *)pool + at[j], n, d->widened + j * n);
    rows.at[j] = stored == E4M3 ? 2 * j * n : at[j];
  }
  return rows;
}

/* The block's keys as `multiply` takes them. */
INLINE void transpose_all_keys(int kind, int stored, const Heads *c, const char *keys, const Block *b, Scratch *d) {
  const int half = HALF_INPUTS(kind), width = c->head_dim, padded = (int)parts(width, PANEL) * PANEL;
  for (int j = 0; j < b->n; j += LANES) {
    const Rows rows = rows_of(stored, c, keys, b->at + j, LANES, 1, d);
    char *panel = (char *)d->keys + j / PANEL * PANEL * padded * (half ? 2 : 4);
    transpose_keys(kind, rows.pool, rows.at, width, panel + j % PANEL / LANES * (half ? HALF_LANES : LANES) * 4);
  }
}

/* Where `pack_values` puts the values at positions j and j + 1. */
INLINE char *place_of_values(int half, int j, const Scratch *d) {
  const int64_t lanes = half ? j / DEPTH * DEPTH / 2 * PANEL + j % DEPTH / 2 * PAIR_LANES : j * PANEL;
  return (char *)d->values + lanes * 4;
}

/* The block's values as `multiply` takes them. */
INLINE void pack_all_values(int kind, int stored, const Heads *c, const char *values, const Block *b, Scratch *d) {
  const int half = HALF_INPUTS(kind), width = c->head_dim;
  for (int j0 = 0; j0 < b->n; j0 += LANES) {
    const Rows rows = rows_of(stored, c, values, b->at + j0, LANES, 1, d);
    for (int j = j0; j < smaller(j0 + LANES, b->n); j += 2) {
      const char *second = j + 1 < b->n ? rows.pool + rows.at[j + 1 - j0] : NULL;
      pack_values(kind, rows.pool + rows.at[j - j0], second, width, place_of_values(half, j, d));
    }
  }
#ifdef TILES
  static const char zeros[2 * MOST_WIDTH];
  for (int j = (int)parts(b->n, 2) * 2; half && j % DEPTH; j += 2) /* what has no weight must be a number */
    pack_values(kind, zeros, NULL, (int)parts(width, PANEL) * PANEL, place_of_values(half, j, d));
#endif
}
