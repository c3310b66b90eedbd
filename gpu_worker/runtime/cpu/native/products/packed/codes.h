/* Codes of weights with groups (groups.h): how they lie in a panel, and the numbers that they stand for.
 *
 * A panel of four bits holds the codes of EIGHT inputs, then those of the next EIGHT. Among these they lie as `nibble_at`
 * says, so that few instructions make vectors of numbers of them. A permutation looks the value of a code in bfloat16 up, or
 * shuffles of bytes its two bytes, which are then interleaved. Those of two inputs make a lane, which is a pair of bfloat16
 * or, by halves, two floats.
 *
 * A panel of six bits holds the lower four bits of EIGHT inputs (`lower_at`), their upper two bits (`upper_at`), then the next
 * EIGHT. */
#pragma once
#include "matrix.h"

/* Kinds of scales and zeros beside F32, BF16 and INT8: float16, and the exponent of a float, which is a power of two. */
enum { HALF = 6, POWER = 8 };

typedef struct Groups {
  const char *scales, *zeros;           /* of whole panels; zeros may be null */
  const char *tail_scales, *tail_zeros; /* of the panel that is not full, or null */
  int64_t size;                         /* inputs of a group */
  int32_t scale_kind, zero_kind;
  float values[16];      /* of four-bit codes */
  uint8_t halves[32];    /* the bytes of these in bfloat16, where byte_at says */
  int32_t inputs;        /* F32, BF16 or INT8; codes of four bits beside INT8 are integers, one after the other */
  int32_t offsets;       /* zeros are offsets */
  const char *factors, *zero_factors;           /* float16: of the scales and zeros that are steps, or null */
  const char *tail_factors, *tail_zero_factors; /* of the panel that is not full, or null */
  int32_t shift;                                /* 2^shift groups share a factor */
} Groups;

INLINE int64_t size_of_number(int kind) { return kind == F32 ? 4 : kind == POWER || kind == INT8 ? 1 : 2; }

/* The factors of an output's scales. */
INLINE int64_t factors_of(const Groups *g, int64_t k) { return parts(parts(k, g->size), (int64_t)1 << g->shift); }

#define EIGHT 8

/* Bytes of the four-bit codes of EIGHT inputs to a panel. */
#define ROW4 (EIGHT * PANEL / 2)

#ifdef __AVX512BW__
#define BY_SHUFFLE 64 /* bytes of a shuffle */
#elif WIDTH == 8
#define BY_SHUFFLE 32
#endif

/* The processor multiplies bytes: a lane's sum of integers takes four products at a time. */
#if defined(__AVX512VNNI__) && defined(BY_SHUFFLE)
#define BY_FOUR
#endif

/* Bytes of the codes of six bits of EIGHT inputs to a panel. */
#define ROW6 (ROW4 / 2 * 3)

/* From the codes of EIGHT inputs to those of the next. */
INLINE int64_t step_of(int kind) { return kind == FOUR ? ROW4 : kind == SIX ? ROW6 : EIGHT * PANEL; }

/* Bytes of the codes of k inputs to an output. */
INLINE int64_t bytes_of_codes(int kind, int64_t k) { return step_of(kind) * k / (EIGHT * PANEL); }

/* The place of the code of output o and input k among the nibbles of EIGHT inputs, two a byte, the lower first. inputs: what
 * the weights meet. */
INLINE int64_t nibble_at(int inputs, int64_t o, int64_t k) {
#ifdef BY_FOUR
  /* Four inputs in a vector. A lane has those to one output, to a first one in the lower halves. */
  if (inputs == INT8) return (k / 4 * BY_SHUFFLE + o % LANES * 4 + k % 4) * 2 + o / LANES;
#endif
  (void)inputs;
#if BY_SHUFFLE == 64
  /* Four inputs in a vector, each two of them in a lane. A half of the lane has four codes: of the first two inputs those to
   * one output and to that 16 further on, then of the others. */
  return (k / 4 * BY_SHUFFLE + o % 16 * 4 + k % 2 * 2) * 2 + k / 2 % 2 * 2 + o / 16;
#elif BY_SHUFFLE == 32
  /* Two inputs in a vector. A byte's lower half belongs to the first 16 outputs. Bytes are interleaved by halves of 16: first
   * those of 4 outputs, then those of 4 others, so each part of 8 lies in both halves. */
  return (k / 2 * PANEL + o / 4 % 2 * 16 + o / 8 % 2 * 8 + o % 4 * 2 + k % 2) * 2 + o / 16;
#else
  return o * EIGHT + k; /* an output's codes are a lane */
#endif
}

/* The place of the lower four bits of a code of six among the nibbles of EIGHT inputs, and that of the upper two among fields of
 * two bits, four a byte, the lowest first. */
INLINE int64_t lower_at(int64_t o, int64_t k) {
#if BY_SHUFFLE == 64
  return nibble_at(F32, o, k);
#else /* an input's, whose first half is the lower one of each byte */
  return k * PANEL + o % 16 * 2 + o / 16;
#endif
}
INLINE int64_t upper_at(int64_t o, int64_t k) {
#if BY_SHUFFLE == 64 /* in the lane of the lower four bits, in the same half */
  return (o % 16 * 2 + k % 2) * 8 + k / 2 * 2 + o / 16;
#else /* two inputs in 16 bytes */
  return (k / 2 * 16 + o % 16) * 4 + o / 16 * 2 + k % 2;
#endif
}

INLINE int six_at(const char *row, int64_t o, int64_t k) {
  const int64_t lower = lower_at(o, k), upper = upper_at(o, k);
  const int low = (uint8_t)row[lower / 2] >> lower % 2 * 4 & 15, high = (uint8_t)row[ROW4 + upper / 4] >> upper % 4 * 2 & 3;
  return (low | high << 4) - 32;
}

/* The place of the lower byte of a value in bfloat16, or of the upper one, among those of 16. */
INLINE int byte_at(int value, int upper) {
#if BY_SHUFFLE == 64
  return 2 * value + upper;
#else
  return 16 * upper + value;
#endif
}

/* ---------------------------------------------------------------- four bits */

#if BY_SHUFFLE == 64
/* The values of inputs i and i + 1 of EIGHT to a panel, i even: pairs of bfloat16. A code is looked up with the bit above it,
 * so the table is there twice. */
INLINE void pairs_of_four(const Groups *g, const char *row, int i, vpu pairs[PARTS]) {
  const __m512i table = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)g->halves));
  const __m512i codes = _mm512_loadu_si512(row + i / 4 * BY_SHUFFLE);
#pragma GCC unroll 2
  for (int part = 0; part < PARTS; part++)
    pairs[part] = (vpu)_mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4 * (i % 4 + part)), table);
}
#elif BY_SHUFFLE == 32
INLINE void pairs_of_four(const Groups *g, const char *row, int i, vpu pairs[PARTS]) {
  const __m256i low = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)g->halves));
  const __m256i high = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(g->halves + 16)));
  const __m256i mask = _mm256_set1_epi8(15), both = _mm256_loadu_si256((const __m256i *)(row + i / 2 * BY_SHUFFLE));
#pragma GCC unroll 2
  for (int half = 0; half < 2; half++) {
    const __m256i index = _mm256_and_si256(half ? _mm256_srli_epi16(both, 4) : both, mask);
    const __m256i first = _mm256_shuffle_epi8(low, index), second = _mm256_shuffle_epi8(high, index);
    pairs[2 * half] = (vpu)_mm256_unpacklo_epi8(first, second);
    pairs[2 * half + 1] = (vpu)_mm256_unpackhi_epi8(first, second);
  }
}
#endif

INLINE void values_of_four(const Groups *g, const char *row, int i, vp values[2][PARTS]) {
#ifdef BY_SHUFFLE
  vpu pairs[PARTS];
  pairs_of_four(g, row, i, pairs);
#pragma GCC unroll 4
  for (int part = 0; part < PARTS; part++) {
    values[0][part] = (vp)(pairs[part] << 16);
    values[1][part] = (vp)(pairs[part] & 0xFFFF0000u);
  }
#else
  for (int odd = 0; odd < 2; odd++)
    for (int part = 0; part < PARTS; part++) {
      const vpu lanes = ((const vpu *)row)[part] >> 4 * (i + odd);
      for (int lane = 0; lane < WIDTH; lane++) values[odd][part][lane] = g->values[lanes[lane] & 15];
    }
#endif
}

/* ---------------------------------------------------------------- six bits */

#if BY_SHUFFLE == 64
/* The numbers from -32 to 31 in bfloat16. */
static const uint16_t six_halves[64] = {
    0xC200, 0xC1F8, 0xC1F0, 0xC1E8, 0xC1E0, 0xC1D8, 0xC1D0, 0xC1C8,
    0xC1C0, 0xC1B8, 0xC1B0, 0xC1A8, 0xC1A0, 0xC198, 0xC190, 0xC188,
    0xC180, 0xC170, 0xC160, 0xC150, 0xC140, 0xC130, 0xC120, 0xC110,
    0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040, 0xC000, 0xBF80,
    0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0,
    0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170,
    0x4180, 0x4188, 0x4190, 0x4198, 0x41A0, 0x41A8, 0x41B0, 0x41B8,
    0x41C0, 0x41C8, 0x41D0, 0x41D8, 0x41E0, 0x41E8, 0x41F0, 0x41F8};

/* The values of inputs i and i + 1 of EIGHT to a panel, i even: pairs of bfloat16. A code is looked up with the bits above
 * it, of which six count. */
INLINE void pairs_of_six(const char *row, int i, vpu pairs[PARTS]) {
  const __m512i first = _mm512_loadu_si512(six_halves), second = _mm512_loadu_si512(six_halves + 32);
  const __m512i lower = _mm512_loadu_si512(row + i / 4 * BY_SHUFFLE), upper = _mm512_loadu_si512(row + ROW4);
  const __m512i four = _mm512_set1_epi16(15);
#pragma GCC unroll 2
  for (int part = 0; part < PARTS; part++) {
    const int field = i + part;
    const __m512i low = _mm512_srli_epi16(lower, 4 * (i % 4 + part));
    const __m512i high = field < 2 ? _mm512_slli_epi16(upper, 4 - 2 * field) : _mm512_srli_epi16(upper, 2 * field - 4);
    const __m512i codes = _mm512_ternarylogic_epi32(four, low, high, 0xCA); /* low where `four` has ones */
    pairs[part] = (vpu)_mm512_permutex2var_epi16(first, codes, second);
  }
}
#endif

INLINE void values_of_six(const char *row, int i, vp values[2][PARTS]) {
#if BY_SHUFFLE == 64
  vpu pairs[PARTS];
  pairs_of_six(row, i, pairs);
#pragma GCC unroll 2
  for (int part = 0; part < PARTS; part++) {
    values[0][part] = (vp)(pairs[part] << 16);
    values[1][part] = (vp)(pairs[part] & 0xFFFF0000u);
  }
#else
#pragma GCC unroll 2
  for (int odd = 0; odd < 2; odd++)
#pragma GCC unroll 4
    for (int part = 0; part < PARTS; part++) {
      const int o = part * WIDTH;
      const vpi low = widen_part(row + (i + odd) * PANEL / 2 + o % 16) >> o / 16 * 4 & 15;
      const vpi high = widen_part(row + ROW4 + i / 2 * 16 + o % 16) >> (o / 16 * 2 + odd) * 2 & 3;
      values[odd][part] = __builtin_convertvector((low | high << 4) - 32, vp);
    }
#endif
}

/* ---------------------------------------------------------------- all codes */

/* The values of WIDTH codes of eight bits. */
INLINE vp value_of_byte(int kind, const char *codes) {
  const vpi wide = widen_part(codes);
  if (kind == INT8) return __builtin_convertvector(wide, vp);
  const vpi size = wide & 0x7F, small = size < 8; /* e4m3: see e4m3.h. There is no code that is not a number */
  const vpi large = (size << 20) + (120 << 23);
  const vpi found = (small & (vpi)(__builtin_convertvector(size, vp) * 0x1p-9f)) | (~small & large);
  return (vp)(found | (wide & (vpi)((vpu){0} + 0x80000000u)));
}

/* The values of inputs i and i + 1, i even. row: the codes of EIGHT inputs to a panel */
INLINE void two_values(int kind, const Groups *g, const char *row, int i, vp values[2][PARTS]) {
  if (kind == FOUR) {
    values_of_four(g, row, i, values);
    return;
  }
  if (kind == SIX) {
    values_of_six(row, i, values);
    return;
  }
#pragma GCC unroll 2
  for (int odd = 0; odd < 2; odd++)
#pragma GCC unroll 4
    for (int part = 0; part < PARTS; part++)
      values[odd][part] = value_of_byte(kind, row + (i + odd) * PANEL + part * WIDTH);
}

#ifdef DOT
/* The same as pairs of bfloat16. */
INLINE void two_halves(int kind, const Groups *g, const char *row, int i, vpu pairs[PARTS]) {
  if (kind == FOUR) {
    pairs_of_four(g, row, i, pairs);
    return;
  }
  if (kind == SIX) {
    pairs_of_six(row, i, pairs);
    return;
  }
  vp values[2][PARTS];
  two_values(kind, g, row, i, values);
#pragma GCC unroll 4
  for (int part = 0; part < PARTS; part++)
    pairs[part] = (vpu)values[0][part] >> 16 | ((vpu)values[1][part] & 0xFFFF0000u);
}
#endif

/* WIDTH scales or zeros, from number `i` of them on. */
INLINE vp numbers_at(int kind, const char *from, int64_t i) {
  if (kind == F32) return part_at((const float *)from + i);
  if (kind == INT8) return __builtin_convertvector(widen_part(from + i), vp);
  if (kind == POWER) return (vp)((vpu)widen_part(from + i) << 24 >> 1);
  const uint16_t *halves = (const uint16_t *)from + i;
#if defined(__AVX512F__)
  if (kind == HALF) return (vp)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)halves));
#elif WIDTH == 8 && defined(__F16C__)
  if (kind == HALF) return (vp)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)halves));
#endif
  const vpu wide = widen_part_of_bits(halves);
  if (kind == BF16) return (vp)(wide << 16);
  const vp size = (vp)((wide & 0x7FFF) << 13) * 0x1p112f; /* finite */
  return (vp)((vpu)size | (wide & 0x8000) << 16);
}

#define SHORTEST_RUN 16
/* Inputs that are summed up before they are scaled. */
INLINE int64_t run_of(const Groups *g) { return g->size % 32 == SHORTEST_RUN ? SHORTEST_RUN : 32; }

#include "pack.h"

/* Where the parts of a panel lie. */
typedef struct {
  const char *codes, *scales, *zeros, *factors, *zero_factors;
} Panel;

INLINE const char *further(const char *from, int64_t bytes) { return from ? from + bytes : NULL; }

INLINE Panel panel_at(const Linear *l, int64_t p) {
  const Groups *g = l->groups;
  const int64_t at = p * parts(l->k, g->size) * PANEL, shared = p * factors_of(g, l->k) * PANEL * 2;
  const char *codes = weights_to(l, p * PANEL);
  if (p >= l->n / PANEL) return (Panel){codes, g->tail_scales, g->tail_zeros, g->tail_factors, g->tail_zero_factors};
  return (Panel){codes, g->scales + at * size_of_number(g->scale_kind), further(g->zeros, at * size_of_number(g->zero_kind)),
                 further(g->factors, shared), further(g->zero_factors, shared)};
}

/* Rows of a packed embedding, also one of codes of four bits or integers: see `embed`. */
void embed_tokens(const Linear *l, int64_t t, const int64_t *ids, float factor, float *out);
