/* Vectors of 16 lanes in the compiler's own terms, and the arithmetic that both kernels share. */
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16
#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t vi __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES), aligned(2)));
typedef int8_t vb __attribute__((vector_size(LANES), aligned(1)));

INLINE vf load(const float *p) { return *(const vf *)p; }
INLINE void store(float *p, vf v) { *(vf *)p = v; }
INLINE vf splat(float x) { return x - (vf){0}; }

INLINE vf pick(vi where, vf yes, vf no) { return (vf)(((vi)yes & where) | ((vi)no & ~where)); }

typedef float v8 __attribute__((vector_size(32)));
typedef float v4 __attribute__((vector_size(16), aligned(4)));

INLINE v4 fold(vf v) {
  union { vf v; v8 h[2]; } a = {v};
  union { v8 v; v4 h[2]; } b = {a.h[0] + a.h[1]};
  return b.h[0] + b.h[1];
}

INLINE float sum(vf v) {
  v4 c = fold(v);
  return (c[0] + c[2]) + (c[1] + c[3]);
}

/* Four sums at once, each in the order of `sum`. */
INLINE v4 sum4(vf a, vf b, vf c, vf d) {
  v4 p = fold(a), q = fold(b), r = fold(c), t = fold(d);
  v4 pq = __builtin_shufflevector(p, q, 0, 4, 1, 5) + __builtin_shufflevector(p, q, 2, 6, 3, 7);
  v4 rt = __builtin_shufflevector(r, t, 0, 4, 1, 5) + __builtin_shufflevector(r, t, 2, 6, 3, 7);
  return __builtin_shufflevector(pq, rt, 0, 1, 4, 5) + __builtin_shufflevector(pq, rt, 2, 3, 6, 7);
}

/* e^x, to about one unit in the last place; 0 below -87. */
INLINE vf vexp(vf x) {
  vi small = x < -87.0f;
  x = pick(small, splat(-87.0f), x);
  x = pick(x > 88.0f, splat(88.0f), x);
  vf rounded = x * 1.44269504f + 12582912.0f; /* the sum's low bits hold the nearest integer */
  vi n = (vi)rounded - 0x4B400000;
  vf t = rounded - 12582912.0f;
  vf r = x - t * 0.693359375f;
  r = r - t * -2.12194440e-4f;
  vf p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  return pick(small, (vf){0}, p * (vf)((n + 127) << 23));
}
