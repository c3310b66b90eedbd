/* From scores to weights, block by block. */
#pragma once
#include "../arithmetic/functions.h"
#include "scratch.h"

/* Hides those of scores [padded], at positions base, base + 1, ..., that do not lie in [first, last]. */
INLINE void mask_scores(float *scores, int padded, int64_t base, int64_t first, int64_t last) {
  vpi lane;
  for (int j = 0; j < WIDTH; j++) lane[j] = j;
  const int from = first > base ? (int)smaller(first - base, KEYS) : 0;
  const int to = last < base ? -1 : (int)smaller(last - base, KEYS);
  for (int j = 0; j < padded; j += WIDTH) {
    const vpi at = lane + j;
    set_part(scores + j, blend((at >= from) & (at <= to), part_at(scores + j), splat_part(-INFINITY)));
  }
}

/* The end of what row i sees among n positions from `base` on. */
INLINE int end_seen(const Scratch *d, int i, int64_t base, int n) {
  return d->last[i] < base ? 0 : (int)smaller(d->last[i] + 1 - base, n);
}

/* Rounded to bfloat16. */
INLINE vp to_halves(vp x) {
  uint16_t halves[WIDTH];
  narrow_part(x, halves);
  return widen_part_of_halves(halves);
}

/* scores [m][KC] of n positions from `base` on -> unnormalised weights: floats, which are rounded to bfloat16 where
 * `rounded`, and lie in it where `half`. cap: of scores, or 0. Zeros fill up VALUES_AT_ONCE. Rescales what was summed up
 * before. */
INLINE void softmax_block(int rounded, int half, float cap, int64_t base, int m, int n, int width, Scratch *d) {
  const int padded = (int)parts(n, VALUES_AT_ONCE) * VALUES_AT_ONCE;
  for (int i = 0; i < m; i++) { /* row by row in short loops: the processor overlaps the rows */
    float *row = d->scores + i * KC;
    const int shown = (int)parts(end_seen(d, i, base, n), LANES) * LANES;
    if (cap != 0)
      for (int j = 0; j < shown; j += WIDTH) set_part(row + j, cap * vtanh(part_at(row + j) / cap));
    if (d->first[i] > base || d->last[i] < base + shown - 1) mask_scores(row, shown, base, d->first[i], d->last[i]);
    vp highest = splat_part(d->most[i]);
    for (int j = 0; j < shown; j += WIDTH) highest = larger(part_at(row + j), highest);
    d->now[i] = largest(highest);
  }
  for (int i = 0; i < m; i += WIDTH) set_part(d->by + i, vexp2(part_at(d->most + i) - part_at(d->now + i)));
  for (int i = 0; i < m; i++) {
    float *row = d->scores + i * KC;
    uint16_t *halves = (uint16_t *)d->weights + i * KC;
    const int end = end_seen(d, i, base, n);
    vp sums = {0};
    for (int j = 0; j < padded; j += WIDTH) {
      const vp e = j < end ? vexp2(part_at(row + j) - d->now[i]) : (vp){0};
      sums += e;
      if (half) narrow_part(e, halves + j);
      else set_part(row + j, rounded ? to_halves(e) : e);
    }
    d->total[i] = d->total[i] * d->by[i] + sum_part(sums);
    if (d->now[i] == d->most[i]) continue;
    for (int k = 0; k < width; k += LANES) store(d->sums + i * width + k, load(d->sums + i * width + k) * d->by[i]);
    d->most[i] = d->now[i];
  }
}
