/* Codes of weights with groups (groups.h): how they lie in a panel, and the numbers that they stand for.
 *
 * A panel of four bits holds the codes of EIGHT inputs, then those of the next EIGHT. Among these they lie as `nibble_at`
 * says, so that few instructions make vectors of numbers of them. A permutation looks the value of a code in bfloat16 up, or
 * shuffles of bytes its two bytes, which are then interleaved. Those of two inputs make a lane, which is a pair of bfloat16
 * or, by halves, two floats. */
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

/* From the codes of EIGHT inputs to those of the next. */
INLINE int64_t step_of(int kind) { return kind == FOUR ? ROW4 : EIGHT * PANEL; }

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
