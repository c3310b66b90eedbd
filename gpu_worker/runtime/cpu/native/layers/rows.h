/* Norms, rotation and storage of one position. */
#pragma once
#include "../arithmetic/e4m3.h"
#include "model.h"

/* y *= weight, y += bias, where there are any */
INLINE void scale_and_shift(const Norm *norm, float *y, int n) {
  for (int c = 0; norm->weight && c < n; c++) y[c] *= norm->weight[c];
  for (int c = 0; norm->bias && c < n; c++) y[c] += norm->bias[c];
}

INLINE void rms_norm(const float *x, const Norm *norm, float *y, int n) {
  vf squares = {0};
  int full = n / LANES * LANES;
  for (int c = 0; c < full; c += LANES) squares += load(x + c) * load(x + c);
  float total = sum(squares);
  for (int c = full; c < n; c++) total += x[c] * x[c];
  const float by = 1.0f / sqrtf(total / n + norm->eps), *weight = norm->weight;
  if (!weight || norm->bias) {
    for (int c = 0; c < n; c++) y[c] = x[c] * by;
    scale_and_shift(norm, y, n);
    return;
  }
  for (int c = 0; c < full; c += LANES) store(y + c, load(weight + c) * (load(x + c) * by));
  for (int c = full; c < n; c++) y[c] = weight[c] * (x[c] * by);
}

INLINE float product_of(const float *x, const float *y, int n) {
  vf products = {0};
  const int full = n / LANES * LANES;
  for (int c = 0; c < full; c += LANES) products += load(x + c) * load(y + c);
  float total = sum(products);
  for (int c = full; c < n; c++) total += x[c] * y[c];
  return total;
}

INLINE void layer_norm(const float *x, const Norm *norm, float *y, int n) {
  vf sums = {0}, squares = {0};
  int full = n / LANES * LANES;
  for (int c = 0; c < full; c += LANES) sums += load(x + c);
  float total = sum(sums);
  for (int c = full; c < n; c++) total += x[c];
  const float mean = total / n;
  for (int c = 0; c < full; c += LANES) squares += (load(x + c) - mean) * (load(x + c) - mean);
  total = sum(squares);
  for (int c = full; c < n; c++) total += (x[c] - mean) * (x[c] - mean);
  const float by = 1.0f / sqrtf(total / n + norm->eps);
  if (!norm->weight || !norm->bias) {
    for (int c = 0; c < n; c++) y[c] = (x[c] - mean) * by;
    scale_and_shift(norm, y, n);
    return;
  }
  for (int c = 0; c < full; c += LANES)
    store(y + c, load(norm->weight + c) * ((load(x + c) - mean) * by) + load(norm->bias + c));
  for (int c = full; c < n; c++) y[c] = norm->weight[c] * ((x[c] - mean) * by) + norm->bias[c];
}

/* y [n]: the norm of x, which may be the same memory. Without a norm x itself. */
INLINE void normalise(const float *x, const Norm *norm, float *y, int n) {
  if (norm->kind == RMS) rms_norm(x, norm, y, n);
  else if (norm->kind == LAYER_NORM) layer_norm(x, norm, y, n);
  else if (x != y) memcpy(y, x, sizeof(float) * (size_t)n);
}

/* The norm of some heads, each by itself or all at once, in place. `apart`: from one to the next. */
INLINE void normalise_heads(const Norm *norm, int whole, float *x, int heads, int64_t apart, int d) {
  if (norm->kind == NO_NORM) return;
  if (whole) normalise(x, norm, x, heads * d);
  else
    for (int h = 0; h < heads; h++) normalise(x + h * apart, norm, x + h * apart, d);
}

/* x [d] turns by a row of a table */
INLINE void rotate(float *x, const float *table, int d, int neighbours) {
  int half = d / 2;
  for (int c = 0; neighbours && c < half; c++) {
    float low = x[2 * c], high = x[2 * c + 1];
    x[2 * c] = low * table[c] - high * table[c + half];
    x[2 * c + 1] = high * table[c] + low * table[c + half];
  }
  if (neighbours) return;
  for (int c = 0; c < half; c++) {
    float low = x[c], high = x[c + half];
    x[c] = low * table[c] - high * table[c + half];
    x[c + half] = high * table[c] + low * table[c + half];
  }
}

INLINE void write_kv(int kind, const char *pool, int64_t at, const float *x, int n) {
  if (kind == F32) memcpy((float *)pool + at, x, 4 * n);
  else if (kind == E4M3) narrow_e4m3(x, n, (uint8_t *)pool + at);
  else narrow(x, n, (uint16_t *)pool + at);
}

/* The queries, keys and values in row r, those of position t of a step, get their norms and rotation. Keys and values are
 * stored. row: room for values */
INLINE void finish_heads(const Layer *l, const Step *s, int64_t r, int64_t t, float *row) {
  const Heads *c = &l->heads;
  const int d = c->head_dim, apart = l->output_gate ? 2 * d : d, token = c->kv_heads * d;
  float *q = s->qkv + r * l->maps[QKV].n, *k = q + (int64_t)c->heads * apart, *v = k + token;
  normalise_heads(&l->q_norm, l->norm_whole, q, c->heads, apart, d);
  if (l->values_are_keys && !l->borrowed) v = memcpy(row, k, sizeof(float) * (size_t)token);
  const float *turn = l->rotary ? l->rotary + s->rotary[t] * l->rotary_dims : NULL;
  for (int h = 0; turn && h < c->heads; h++) rotate(q + (int64_t)h * apart, turn, l->rotary_dims, l->neighbours);
  for (int h = 0; l->growth && h < c->heads; h++)
    for (int i = 0; i < d; i++) q[(int64_t)h * apart + i] *= l->growth[s->rotary[t]];
  if (l->borrowed) return;
  normalise_heads(&l->k_norm, l->norm_whole, k, c->kv_heads, d, d);
  normalise_heads(&l->v_norm, 0, v, c->kv_heads, d, d);
  for (int h = 0; turn && h < c->kv_heads; h++) rotate(k + (int64_t)h * d, turn, l->rotary_dims, l->neighbours);
  const int64_t at = slot_of(c, s->rows[t], s->positions[t]) * token;
  write_kv(c->kv_kind, c->keys, at, k, token);
  write_kv(c->kv_kind, c->values, at, v, token);
}
