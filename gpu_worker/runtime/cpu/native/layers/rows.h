/* Norms, rotation and storage of one position. */
#pragma once
#include "../arithmetic/e4m3.h"
#include "model.h"

INLINE void rms_norm(const float *x, const float *weight, float *y, int n, float eps) {
  vf squares = {0};
  int full = n / LANES * LANES;
  for (int c = 0; c < full; c += LANES) squares += load(x + c) * load(x + c);
  float total = sum(squares);
  for (int c = full; c < n; c++) total += x[c] * x[c];
  float by = 1.0f / sqrtf(total / n + eps);
  for (int c = 0; c < full; c += LANES) store(y + c, load(weight + c) * (load(x + c) * by));
  for (int c = full; c < n; c++) y[c] = weight[c] * (x[c] * by);
}

INLINE void layer_norm(const float *x, const Norm *norm, float *y, int n, float eps) {
  vf sums = {0}, squares = {0};
  int full = n / LANES * LANES;
  for (int c = 0; c < full; c += LANES) sums += load(x + c);
  float total = sum(sums);
  for (int c = full; c < n; c++) total += x[c];
  const float mean = total / n;
  for (int c = 0; c < full; c += LANES) squares += (load(x + c) - mean) * (load(x + c) - mean);
  total = sum(squares);
  for (int c = full; c < n; c++) total += (x[c] - mean) * (x[c] - mean);
  const float by = 1.0f / sqrtf(total / n + eps);
  for (int c = 0; c < full; c += LANES)
    store(y + c, load(norm->weight + c) * ((load(x + c) - mean) * by) + load(norm->bias + c));
  for (int c = full; c < n; c++) y[c] = norm->weight[c] * ((x[c] - mean) * by) + norm->bias[c];
}

INLINE void normalise(const float *x, const Norm *norm, float *y, int n, float eps) {
  if (norm->bias) layer_norm(x, norm, y, n, eps);
  else rms_norm(x, norm->weight, y, n, eps);
}

INLINE void rotate(float *x, const float *table, int d) {
  int half = d / 2;
  for (int c = 0; c < half; c++) {
    float low = x[c], high = x[c + half];
    x[c] = low * table[c] - high * table[c + half];
    x[c + half] = high * table[c] + low * table[c + half];
  }
}

INLINE void keep(int kind, const char *pool, int64_t at, const float *x, int n) {
  if (kind == F32) memcpy((float *)pool + at, x, 4 * n);
  else if (kind == E4M3) narrow_e4m3(x, n, (uint8_t *)pool + at);
  else narrow(x, n, (uint16_t *)pool + at);
}
