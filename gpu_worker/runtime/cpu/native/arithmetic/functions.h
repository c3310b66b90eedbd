/* Functions of vectors: exponentials, and the activations that follow from them. */
#pragma once
#include "erf.h"

#define LOG2_E 1.44269504f

/* 2^x for x < 128, to about one unit in the last place; 0 below -126. The polynomial is that with the least relative error
 * for x - floor(x) among those that are 1 at 0. */
INLINE vp vexp2(vp x) {
#ifdef __AVX512DQ__
  const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  const vp r = (vp)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#else
  const vpi small = x < -126.0f;
  x = blend(small, splat_part(-126.0f), x);
  const vp floor = (x - 0.5f) + 12582912.0f; /* the sum's low bits hold this integer, or that below where x is one */
  const vp r = x - (floor - 12582912.0f);
#endif
  vp p = splat_part(1.8671298442e-3f);
  p = add_times_part(splat_part(9.0170307907e-3f), p, r);
  p = add_times_part(splat_part(5.5799912799e-2f), p, r);
  p = add_times_part(splat_part(2.4016445022e-1f), p, r);
  p = add_times_part(splat_part(6.9315131180e-1f), p, r);
  p = add_times_part(splat_part(1.0f), p, r);
#ifdef __AVX512DQ__
  return (vp)_mm512_maskz_scalef_ps(normal, (__m512)p, (__m512)x);
#else
  return blend(small, (vp){0}, p * (vp)(((vpi)floor - 0x4B400000 + 127) << 23));
#endif
}

/* 1 / (1 + e^-x) */
INLINE vp sigmoid(vp x) {
#ifdef __AVX512DQ__
  const vp e = vexp2((vp)_mm512_min_ps(_mm512_set1_ps(125.0f), (__m512)(x * -LOG2_E))), d = 1.0f + e;
  const vp r = (vp)_mm512_rcp14_ps((__m512)d);
  return r * add_times_part(splat_part(2.0f), -d, r); /* a step of Newton's: a division would take longer than all the rest */
#else
  const vp by = x * -LOG2_E;
  return 1.0f / (1.0f + vexp2(blend(by > 125.0f, splat_part(125.0f), by)));
#endif
}

INLINE vp vtanh(vp x) { return 2.0f * sigmoid(2.0f * x) - 1.0f; }

/* x (1 + tanh(s)) / 2 with s = sqrt(2 / pi) (x + 0.044715 x^3), which is x / (1 + e^-2s) */
INLINE vp gelu_of_tanh(vp x) { return x * sigmoid(x * (x * x * 0.0713548163f + 1.5957691216f)); }

/* x (1 + erf(z)) / 2 with z = x / sqrt(2). The complement of erf(|z|) is e^-zz t p(t) with t = 1 / (1 + |z| / 2). The
 * polynomial is that with the least relative error, 4e-8. */
INLINE vp gelu_of_erf(vp x) {
#ifdef __AVX512F__
  return gelu_of_table(x); /* without the division and the exponential */
#else
  const vp z = blend(x < 0, -x, x) * 0.7071067812f, t = 1.0f / (1.0f + 0.5f * z);
  vp p = splat_part(-0.05906894566f);
  p = add_times_part(splat_part(0.2845748923f), p, t);
  p = add_times_part(splat_part(-0.487199752f), p, t);
  p = add_times_part(splat_part(0.2780669949f), p, t);
  p = add_times_part(splat_part(-0.02662555551f), p, t);
  p = add_times_part(splat_part(0.2026868248f), p, t);
  p = add_times_part(splat_part(0.2431037731f), p, t);
  p = add_times_part(splat_part(0.2823753072f), p, t);
  p = add_times_part(splat_part(0.2820864179f), p, t);
  const vp beyond = 0.5f * t * p * vexp2(z * z * -LOG2_E);
  return x * blend(x < 0, beyond, 1.0f - beyond);
#endif
}

enum { SILU = 0, GELU = 1, GELU_TANH = 2, RELU = 3, RELU2 = 4 };

INLINE vp act(int activation, vp x) {
  if (activation == SILU) return x * sigmoid(x);
  if (activation == RELU || activation == RELU2) {
    const vp y = larger(splat_part(0), x); /* NaN stays */
    return activation == RELU ? y : y * y;
  }
  return activation == GELU ? gelu_of_erf(x) : gelu_of_tanh(x);
}

INLINE void act_all(int activation, const float *x, const float *ups, float *y, int n) {
  const int full = n / WIDTH * WIDTH;
  for (int c = 0; c < full; c += WIDTH) {
    const vp acted = act(activation, part_at(x + c));
    set_part(y + c, ups ? acted * part_at(ups + c) : acted);
  }
  for (int c = full; c < n; c++) {
    const float acted = act(activation, splat_part(x[c]))[0];
    y[c] = ups ? acted * ups[c] : acted;
  }
}

/* What differs from an activation alone. clamp: gates are at most this, and ups between minus and plus this; 0: none.
 * slope: silu(x) is x sigmoid(slope x). offset: added to ups. */
typedef struct {
  float clamp, slope, offset;
} Bend;

INLINE int is_bent(const Bend *b) { return b->clamp != 0 || b->slope != 1 || b->offset != 0; }

/* x [n] and ups, in place; the activation is left to `activate` where the slope is 1. Returns whether it is done. */
INLINE int bend(const Bend *b, float *x, float *ups, float *y, int n) {
  for (int c = 0; b->clamp != 0 && c < n; c++) {
    float *up = ups ? ups + c : x + c;
    if (ups && x[c] > b->clamp) x[c] = b->clamp;
    *up = *up > b->clamp ? b->clamp : *up < -b->clamp ? -b->clamp : *up;
  }
  for (int c = 0; ups && b->offset != 0 && c < n; c++) ups[c] += b->offset;
  if (b->slope == 1) return 0;
  const int full = n / WIDTH * WIDTH;
  for (int c = 0; c < full; c += WIDTH) {
    const vp g = part_at(x + c), acted = g * sigmoid(b->slope * g);
    set_part(y + c, ups ? acted * part_at(ups + c) : acted);
  }
  for (int c = full; c < n; c++) y[c] = x[c] * sigmoid(splat_part(b->slope * x[c]))[0] * (ups ? ups[c] : 1.0f);
  return 1;
}

/* y [n] = the activation of x, times ups where they are not null */
INLINE void activate(int activation, const float *x, const float *ups, float *y, int n) {
  switch (activation) { /* constants, so that each case is a loop of its own */
    case SILU: act_all(SILU, x, ups, y, n); break;
    case GELU: act_all(GELU, x, ups, y, n); break;
    case RELU: act_all(RELU, x, ups, y, n); break;
    case RELU2: act_all(RELU2, x, ups, y, n); break;
    default: act_all(GELU_TANH, x, ups, y, n);
  }
}
