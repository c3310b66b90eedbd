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
#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512VNNI__) && defined(DOT) && !defined(NO_TILES)
#define TILES /* it multiplies tiles of them, and of bytes: tiles.c */
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

/* What one register holds. Of a vector that takes two, compilers keep sums in memory, and they compare its lanes one by
 * one. */
#if defined(__AVX2__) && !defined(__AVX512F__)
#include <immintrin.h>
#define WIDTH 8
#else
#define WIDTH LANES
#endif
#ifdef __ARM_NEON
#include <arm_neon.h>
#endif
typedef float vp __attribute__((vector_size(4 * WIDTH), aligned(4)));
typedef int32_t vpi __attribute__((vector_size(4 * WIDTH), aligned(4)));
typedef uint32_t vpu __attribute__((vector_size(4 * WIDTH), aligned(4)));
typedef int8_t vpb __attribute__((vector_size(WIDTH), aligned(1)));
typedef uint16_t vph __attribute__((vector_size(2 * WIDTH), aligned(2)));

INLINE vp part_at(const float *p) { return *(const vp *)p; }
INLINE vpi widen_part(const void *p) { /* WIDTH bytes */
#if WIDTH == 8
  return (vpi)_mm256_cvtepi8_epi32(_mm_loadl_epi64(p));
#else
  return widen_bytes(p);
#endif
}
INLINE void set_part(float *p, vp v) { *(vp *)p = v; }
INLINE vp splat_part(float x) { return x - (vp){0}; }

INLINE vf load(const float *p) { return *(const vf *)p; }
INLINE void store(float *p, vf v) { *(vf *)p = v; }
INLINE vf splat(float x) { return x - (vf){0}; }

/* sums + a * b, rounded once where one instruction does both. The compiler itself never rounds a product and a sum once
 * (build.py): it would in the loop for some rows and not in that for others. */
#if WIDTH == 8 && defined(__FMA__)
INLINE vp add_times_part(vp sums, vp a, vp b) { return (vp)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sums); }
#elif defined(__AVX512F__)
INLINE vp add_times_part(vp sums, vp a, vp b) { return (vp)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sums); }
#elif defined(__ARM_NEON) && defined(__ARM_FEATURE_FMA)
INLINE vp add_times_part(vp sums, vp a, vp b) {
  typedef union { vp whole; float32x4_t fours[WIDTH / 4]; } Fours;
  Fours to = {sums}, x = {a}, y = {b};
#pragma GCC unroll 4
  for (int i = 0; i < WIDTH / 4; i++) to.fours[i] = vfmaq_f32(to.fours[i], x.fours[i], y.fours[i]);
  return to.whole;
}
#else
INLINE vp add_times_part(vp sums, vp a, vp b) { return sums + a * b; }
#endif
#if WIDTH == LANES
#define add_times add_times_part
#else
INLINE vf add_times(vf sums, vf a, vf b) {
  typedef union { vf whole; vp parts[LANES / WIDTH]; } Halves;
  Halves to = {sums}, x = {a}, y = {b};
#pragma GCC unroll 2
  for (int i = 0; i < LANES / WIDTH; i++) to.parts[i] = add_times_part(to.parts[i], x.parts[i], y.parts[i]);
  return to.whole;
}
#endif

/* WIDTH floats -> bfloat16 */
INLINE void narrow_part(vp x, uint16_t *out) {
#ifdef DOT
  narrow16(x, out);
#else
  for (int i = 0; i < WIDTH; i++) out[i] = to_bf16(x[i]);
#endif
}

/* WIDTH numbers of 16 bits */
INLINE vpu widen_part_of_bits(const void *p) {
#ifdef __AVX512F__
  return widen_halves(p);
#else
  return __builtin_convertvector(*(const vph *)p, vpu);
#endif
}

/* WIDTH numbers in bfloat16 -> floats */
INLINE vp widen_part_of_halves(const void *p) { return (vp)(widen_part_of_bits(p) << 16); }

/* n floats -> bfloat16 */
INLINE void narrow(const float *x, int64_t n, uint16_t *out) {
  int64_t c = 0;
  for (; c + WIDTH <= n; c += WIDTH) narrow_part(part_at(x + c), out + c);
  for (; c < n; c++) out[c] = to_bf16(x[c]);
}

INLINE vp blend(vpi where, vp yes, vp no) { return (vp)(((vpi)yes & where) | ((vpi)no & ~where)); }

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

#if WIDTH == 8
INLINE vp larger(vp a, vp b) { return (vp)_mm256_max_ps((__m256)a, (__m256)b); }

INLINE float sum_part(vp v) {
  const v4 c = (v4)_mm256_castps256_ps128((__m256)v) + (v4)_mm256_extractf128_ps((__m256)v, 1);
  return (c[0] + c[2]) + (c[1] + c[3]);
}

INLINE float largest(vp v) {
  __m128 c = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  c = _mm_max_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
}
#else
#ifdef __AVX512F__
INLINE vp larger(vp a, vp b) { return (vp)_mm512_max_ps((__m512)a, (__m512)b); }
#else
INLINE vp larger(vp a, vp b) { return blend(a > b, a, b); }
#endif

INLINE float sum_part(vp v) { return sum(v); }

INLINE float largest(vp v) {
  v = larger(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  v = larger(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3));
  v = larger(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1));
  return v[0] > v[1] ? v[0] : v[1];
}
#endif

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
#if WIDTH == 8
/* 8 x 8 numbers of 16 x 16 change places with those across the diagonal. */
INLINE void transpose_eight(const vu *from, int column, __m256 out[8]) {
  __m256 in[8], pairs[8], fours[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) in[i] = _mm256_loadu_ps((const float *)(from + i) + column);
#pragma GCC unroll 8
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_ps(in[i], in[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_ps(in[i], in[i + 1]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    const __m256 a = pairs[i / 4 * 4 + i % 4 / 2], b = pairs[i / 4 * 4 + i % 4 / 2 + 2];
    fours[i] = i % 2 ? _mm256_shuffle_ps(a, b, 0xEE) : _mm256_shuffle_ps(a, b, 0x44);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 4; i++) {
    out[i] = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20);
    out[i + 4] = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31);
  }
}

INLINE void transpose(vu rows[LANES]) {
  __m256 a[8], b[8];
  for (int at = 0; at < 2; at++) {
    transpose_eight(rows + 8 * at, 8 * at, a);
    for (int i = 0; i < 8; i++) _mm256_storeu_ps((float *)(rows + 8 * at + i) + 8 * at, a[i]);
  }
  transpose_eight(rows, 8, a);
  transpose_eight(rows + 8, 0, b);
  for (int i = 0; i < 8; i++) {
    _mm256_storeu_ps((float *)(rows + 8 + i), a[i]);
    _mm256_storeu_ps((float *)(rows + i) + 8, b[i]);
  }
}
#else
INLINE void transpose(vu rows[LANES]) { EXCHANGE(8) EXCHANGE(4) EXCHANGE(2) EXCHANGE(1) }
#endif
