/* Vectors of 16 lanes in the compiler's own terms, and the arithmetic that the kernels share. */
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t vi __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES), aligned(2)));
typedef int8_t vb __attribute__((vector_size(LANES), aligned(1)));

/* What compilers of today make of the general form is several times slower than the instruction for it. */
#ifdef __AVX512F__
#include <immintrin.h>
#ifdef __AVX512BF16__
/* The processor multiplies bfloat16 itself: a lane's sum of floats takes two products at a time. */
#define DOT
INLINE vf add_pairs(vf sums, vu a, vu b) { return (vf)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b); }
INLINE vu pair_at(const void *halves, int64_t i) {
  uint32_t pair;
  memcpy(&pair, (const uint16_t *)halves + i, 4);
  return pair - (vu){0};
}
INLINE void narrow16(vf x, uint16_t *out) { _mm256_storeu_si256((__m256i *)out, (__m256i)_mm512_cvtneps_pbh((__m512)x)); }
#endif
#if defined(__AMX_BF16__) && defined(DOT) && !defined(NO_TILES)
#define TILES /* it multiplies tiles of them: tiles.c */
#elif defined(DOT)
#define BY_VECTORS
#endif
INLINE vu widen_halves(const void *p) { return (vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256(p)); }
INLINE vi widen_bytes(const void *p) { return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128(p)); }
#else
INLINE vu widen_halves(const void *p) { return __builtin_convertvector(*(const vh *)p, vu); }
INLINE vi widen_bytes(const void *p) { return __builtin_convertvector(*(const vb *)p, vi); }
#endif

INLINE uint16_t to_bf16(float x) { /* round to nearest even */
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

INLINE vf load(const float *p) { return *(const vf *)p; }
INLINE void store(float *p, vf v) { *(vf *)p = v; }
INLINE vf splat(float x) { return x - (vf){0}; }

#ifndef DOT
INLINE void narrow16(vf x, uint16_t *out) {
  for (int i = 0; i < LANES; i++) out[i] = to_bf16(x[i]);
}
#endif

/* n floats -> bfloat16 */
INLINE void narrow(const float *x, int64_t n, uint16_t *out) {
  int64_t c = 0;
  for (; c + LANES <= n; c += LANES) narrow16(load(x + c), out + c);
  for (; c < n; c++) out[c] = to_bf16(x[c]);
}

INLINE vf pick(vi where, vf yes, vf no) { return (vf)(((vi)yes & where) | ((vi)no & ~where)); }

/* Floats in eight bits, e4m3: a sign, 4 bits of exponent and 3 of mantissa. The largest is 448, the smallest are multiples
 * of 2^-9. bfloat16 holds each exactly. */
#define MOST_E4M3 448.0f

/* n floats -> e4m3, to the nearest; those that are too large -> the largest. n: of whole vectors */
INLINE void narrow_e4m3(const float *x, int64_t n, uint8_t *out) {
  for (int64_t c = 0; c < n; c += LANES) {
    const vf in = load(x + c);
    const vu sign = (vu)in & 0x80000000u;
    vf size = (vf)((vu)in ^ sign);
    size = pick(size > MOST_E4M3, splat(MOST_E4M3), size);
    const vu bits = (vu)size, large = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3);
    const vu small = (vu)(size * 0x1p9f + 0x1p23f) & 0xFF; /* the sum's low bits hold the nearest integer */
    vi found = (vi)pick(size < 0x1p-6f, (vf)small, (vf)large);
    found = (vi)pick(size == size, (vf)found, (vf)((vi){0} + 0x7F)) | (vi)(sign >> 24);
    *(vb *)(out + c) = __builtin_convertvector(found, vb);
  }
}

#ifdef __AVX512VBMI__
/* The bfloat16 of a number without sign, and those of all, in bytes. */
#define MULTIPLE_OF_E4M3(c) ((c) == 0 ? 0 : (c) == 1 ? 0x3B00 : (c) < 4 ? 0x3B00 + ((c) << 6) : 0x3B80 + ((c) << 5))
#define OF_E4M3(c) ((c) < 8 ? MULTIPLE_OF_E4M3(c) : (c) < 0x7F ? ((c) << 4) + (120 << 7) : 0x7FC0)
#define LOW_BYTE(c) OF_E4M3(c) & 0xFF
#define HIGH_BYTE(c) OF_E4M3(c) >> 8
#define EACH_OF_8(of, c) \
  of(c), of((c) + 1), of((c) + 2), of((c) + 3), of((c) + 4), of((c) + 5), of((c) + 6), of((c) + 7)
#define EACH_OF_64(of, c) \
  EACH_OF_8(of, c), EACH_OF_8(of, (c) + 8), EACH_OF_8(of, (c) + 16), EACH_OF_8(of, (c) + 24), \
  EACH_OF_8(of, (c) + 32), EACH_OF_8(of, (c) + 40), EACH_OF_8(of, (c) + 48), EACH_OF_8(of, (c) + 56)
static const uint8_t e4m3_low[128] = {EACH_OF_64(LOW_BYTE, 0), EACH_OF_64(LOW_BYTE, 64)};
static const uint8_t e4m3_high[128] = {EACH_OF_64(HIGH_BYTE, 0), EACH_OF_64(HIGH_BYTE, 64)};
#endif

/* n numbers in e4m3 -> bfloat16. n: of whole vectors */
INLINE void widen_e4m3(const uint8_t *x, int64_t n, uint16_t *out) {
  int64_t c = 0;
#ifdef __AVX512VBMI__
  const __m512i *low = (const __m512i *)e4m3_low, *high = (const __m512i *)e4m3_high;
  const __m512i low0 = _mm512_loadu_si512(low), low1 = _mm512_loadu_si512(low + 1);
  const __m512i high0 = _mm512_loadu_si512(high), high1 = _mm512_loadu_si512(high + 1);
  const __m512i order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0), sign = _mm512_set1_epi8((char)0x80);
  for (; c + 64 <= n; c += 64) { /* the even and the odd eighths, which are interleaved apart, beside each other */
    const __m512i in = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(x + c));
    const __m512i lows = _mm512_permutex2var_epi8(low0, in, low1), sizes = _mm512_permutex2var_epi8(high0, in, high1);
    const __m512i highs = _mm512_ternarylogic_epi64(sizes, in, sign, 0xF8); /* sizes | (in & sign) */
    _mm512_storeu_si512(out + c, _mm512_unpacklo_epi8(lows, highs));
    _mm512_storeu_si512(out + c + 32, _mm512_unpackhi_epi8(lows, highs));
  }
#endif
  for (; c < n; c += LANES) {
    const vi in = widen_bytes(x + c), size = in & 0x7F;
    const vf large = (vf)((size << 20) + (120 << 23)), small = __builtin_convertvector(size, vf) * 0x1p-9f;
    const vf found = pick(size == 0x7F, splat(NAN), pick(size < 8, small, large));
    *(vh *)(out + c) = __builtin_convertvector(((vu)found | ((vu)in & 0x80000000u)) >> 16, vh);
  }
}

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

#ifdef __AVX512F__
INLINE vf larger(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
#else
INLINE vf larger(vf a, vf b) { return pick(a > b, a, b); }
#endif

INLINE float largest(vf v) {
  v = larger(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  v = larger(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3));
  v = larger(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1));
  return v[0] > v[1] ? v[0] : v[1];
}

/* rows[i][j] <-> rows[j][i]: halves of 16 rows change places, then quarters, ... */
#define EACH_LANE(of, step) \
  of(step, 0), of(step, 1), of(step, 2), of(step, 3), of(step, 4), of(step, 5), of(step, 6), of(step, 7), \
  of(step, 8), of(step, 9), of(step, 10), of(step, 11), of(step, 12), of(step, 13), of(step, 14), of(step, 15)
#define TO_UPPER(step, lane) ((lane) & (step) ? LANES + (lane) - (step) : (lane))
#define TO_LOWER(step, lane) ((lane) & (step) ? LANES + (lane) : (lane) + (step))
#define EXCHANGE(step) \
  _Pragma("GCC unroll 16") for (int i = 0; i < LANES; i++) { \
    if (i & (step)) continue; \
    vu a = rows[i], b = rows[i + (step)]; \
    rows[i] = __builtin_shufflevector(a, b, EACH_LANE(TO_UPPER, step)); \
    rows[i + (step)] = __builtin_shufflevector(a, b, EACH_LANE(TO_LOWER, step)); \
  }
INLINE void transpose(vu rows[LANES]) { EXCHANGE(8) EXCHANGE(4) EXCHANGE(2) EXCHANGE(1) }

#define LOG2_E 1.44269504f

#ifdef __AVX512DQ__
/* 2^x for x < 128, to about one unit in the last place; 0 below -126. The polynomial is that with the least relative error
 * for x - floor(x) among those that are 1 at 0. */
INLINE vf vexp2(vf x) {
  const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  const vf r = (vf)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  vf p = splat(1.8671298442e-3f);
  p = p * r + 9.0170307907e-3f;
  p = p * r + 5.5799912799e-2f;
  p = p * r + 2.4016445022e-1f;
  p = p * r + 6.9315131180e-1f;
  p = p * r + 1.0f;
  return (vf)_mm512_maskz_scalef_ps(normal, (__m512)p, (__m512)x);
}
#else
/* e^x, to about one unit in the last place; 0 below -87, and from 88 on e^88. */
INLINE vf vexp(vf x) {
  const vi small = x < -87.0f;
  x = pick(small, splat(-87.0f), x);
  x = pick(x > 88.0f, splat(88.0f), x);
  vf rounded = x * LOG2_E + 12582912.0f; /* the sum's low bits hold the nearest integer */
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
  return pick(small, (vf){0}, p * (vf)(((vi)rounded - 0x4B400000 + 127) << 23));
}

INLINE vf vexp2(vf x) { return vexp(x / LOG2_E); }
#endif

/* 1 / (1 + e^-x) */
INLINE vf sigmoid(vf x) {
#ifdef __AVX512DQ__
  const vf e = vexp2((vf)_mm512_min_ps(_mm512_set1_ps(125.0f), (__m512)(x * -LOG2_E))), d = 1.0f + e;
  const vf r = (vf)_mm512_rcp14_ps((__m512)d);
  return r * (2.0f - d * r); /* a step of Newton's: a division would take longer than all the rest */
#else
  return 1.0f / (1.0f + vexp(-x));
#endif
}

/* y [n] = silu(gates) * ups */
INLINE void silu_mul(const float *gates, const float *ups, float *y, int n) {
  int full = n / LANES * LANES;
  for (int c = 0; c < full; c += LANES) store(y + c, load(gates + c) * sigmoid(load(gates + c)) * load(ups + c));
  for (int c = full; c < n; c++) y[c] = gates[c] * sigmoid(splat(gates[c]))[0] * ups[c];
}
