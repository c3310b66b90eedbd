/* Floats in eight bits, as the KV cache may keep them. */
#pragma once
#include "vectors.h"

/* Floats in eight bits, e4m3: a sign, 4 bits of exponent and 3 of mantissa. The largest is 448, the smallest are multiples
 * of 2^-9. bfloat16 holds each exactly. */
#define MOST_E4M3 448.0f

/* n floats -> e4m3, to the nearest; those that are too large -> the largest. n: of whole vectors */
INLINE void narrow_e4m3(const float *x, int64_t n, uint8_t *out) {
  for (int64_t c = 0; c < n; c += WIDTH) {
    const vp in = part_at(x + c);
    const vpu sign = (vpu)in & 0x80000000u;
    vp size = (vp)((vpu)in ^ sign);
    size = blend(size > MOST_E4M3, splat_part(MOST_E4M3), size);
    const vpu bits = (vpu)size, large = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3);
    const vpu small = (vpu)(size * 0x1p9f + 0x1p23f) & 0xFF; /* the sum's low bits hold the nearest integer */
    vpi found = (vpi)blend(size < 0x1p-6f, (vp)small, (vp)large);
    found = (vpi)blend(size == size, (vp)found, (vp)((vpi){0} + 0x7F)) | (vpi)(sign >> 24);
    *(vpb *)(out + c) = __builtin_convertvector(found, vpb);
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
  for (; c < n; c += WIDTH) {
    const vpi in = widen_part(x + c), size = in & 0x7F;
    const vp large = (vp)((size << 20) + (120 << 23)), small = __builtin_convertvector(size, vp) * 0x1p-9f;
    const vp found = blend(size == 0x7F, splat_part(NAN), blend(size < 8, small, large));
    *(vph *)(out + c) = __builtin_convertvector(((vpu)found | ((vpu)in & 0x80000000u)) >> 16, vph);
  }
}
