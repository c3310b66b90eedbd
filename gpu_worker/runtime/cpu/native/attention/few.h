/* A few queries attend to keys and values in place. */
#pragma once
#include "blocks.h"

/* sums + the products of dimension j, or of two, of 16 keys with a query that begins at `at` */
INLINE vf add_key(int kind, vf sums, vu keys, const void *queries, int64_t at, int j) {
  if (kind == F32) return add_times(sums, (vf)keys, splat(((const float *)queries)[at + j]));
#ifdef BY_VECTORS
  return add_pairs(sums, keys, pair_at(queries, at + 2 * j));
#else
  const float *q = (const float *)queries + at + 2 * j;
  sums = add_times(sums, (vf)(keys << 16), splat(q[0]));
  return add_times(sums, (vf)(keys & 0xFFFF0000u), splat(q[1]));
#endif
}

/* scores [m][KC] of 16 keys (+)= the products over the dimensions from k on, a vector's worth. q: where the first query has
 * those; c: number k of the heads */
INLINE void score_some(int kind, const char *keys, const int64_t at[LANES], int k, int m, const void *queries, int64_t q,
                       float *scores, const Next *next, int64_t c) {
  vu rows[LANES];
#pragma GCC unroll 16
  for (int j = 0; j < LANES; j++) {
    rows[j] = *(const vu *)(keys + at[j] + k * size_of(kind));
    prefetch(next, j, c);
    if (next->n > LANES) prefetch(next, LANES + j, c);
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
        const float *in = (const float *)queries + at_query[r] * KC + q + 2 * j;
        even[r] = add_times(even[r], first, splat(in[0]));
        odd[r] = add_times(odd[r], second, splat(in[1]));
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
    for (int j = 0; j < LANES; j++) sums = add_key(kind, sums, rows[j], queries, i * KC + q, j);
    store(scores + i * KC, sums);
  }
}

/* The sums of two queries, or of one twice, += their weights from j0 on x n values, in some vectors of dimensions from
 * k on. c: number k of the heads */
INLINE void add_some(int kind, int vectors, const char *values, const int64_t *at, int n, int j0, int k, int i0,
                     int i1, int padded, Scratch *d, const Next *next, int64_t c) {
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
          prefetch(next, j, c + v * LANES);
          prefetch(next, j + 1, c + v * LANES);
        }
        const vf first = (vf)(widen_halves(values + at[j] + within) << 16);
        const vf second = j + 1 < n ? (vf)(widen_halves(values + at[j + 1] + within) << 16) : (vf){0};
#pragma GCC unroll 2
        for (int r = 0; r < 2; r++) {
          const float *in = (const float *)d->weights + rows[r] + j;
          even[r][v] = add_times(even[r][v], first, splat(in[0]));
          odd[r][v] = add_times(odd[r][v], second, splat(in[1]));
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
      if (!i0 && j < next->n && (v % 2 == 0 || kind == F32)) prefetch(next, j, c + v * LANES);
#ifdef BY_VECTORS
      if (kind == BF16) {
        const char *second = values + at[j + 1] + within;
        if (!i0 && j < next->n && v % 2 == 0) prefetch(next, j + 1, c + v * LANES);
        const vu pairs = widen_halves(first) | (j + 1 < n ? widen_halves(second) << 16 : (vu){0});
        for (int r = 0; r < 2; r++) sums[r][v] = add_pairs(sums[r][v], pairs, pair_at(d->weights, rows[r] + j));
        continue;
      }
#endif
      const vf value = kind == F32 ? load((const float *)first) : (vf)(widen_halves(first) << 16);
      for (int r = 0; r < 2; r++)
        sums[r][v] = add_times(sums[r][v], value, splat(((const float *)d->weights)[rows[r] + j]));
    }
  for (int r = 0; r < 2; r++)
    for (int v = 0; v < vectors; v++) store(to[r] + v * LANES, sums[r][v]);
}
