/* Blocks of GGUF files -> the canonical form of codes, row by row, exactly as `checkpoint/gguf/blocks.py` reads them. How the
 * types lie is said there. */
#include "blocks.h"

#include <omp.h>
#include <string.h>

#define LARGEST 256 /* inputs of a block */
#define MOST_GROUPS 16

/* What one block holds. codes: places in the type's table, or numbers with a sign. */
typedef struct {
  uint8_t codes[LARGEST];
  char scales[MOST_GROUPS * 2], offsets[MOST_GROUPS * 2];
} Block;

typedef struct {
  int values, bytes;
  int groups;       /* of a block */
  int number;       /* bytes of a scale, and of an offset */
  int coded;        /* codes are places in a table */
  int at_d, at_m;   /* where the float16 lie; -1: there is none */
  int steps;        /* scales are steps of d, and offsets of m; else they are d and m */
} Type;

INLINE Type type_of(int kind) {
  switch (kind) {
    case Q4_0: return (Type){32, 18, 1, 2, 1, 0, -1, 0};
    case Q4_1: return (Type){32, 20, 1, 2, 1, 0, 2, 0};
    case Q5_0: return (Type){32, 22, 1, 2, 0, 0, -1, 0};
    case Q5_1: return (Type){32, 24, 1, 2, 0, 0, 2, 0};
    case Q8_0: return (Type){32, 34, 1, 2, 0, 0, -1, 0};
    case IQ4_NL: return (Type){32, 18, 1, 2, 1, 0, -1, 0};
    case MXFP4: return (Type){32, 17, 1, 1, 1, -1, -1, 0};
    case Q2_K: return (Type){256, 84, 16, 1, 1, 80, 82, 1};
    case Q3_K: return (Type){256, 110, 16, 1, 1, 108, -1, 1};
    case Q4_K: return (Type){256, 144, 8, 1, 1, 0, 2, 1};
    case Q5_K: return (Type){256, 176, 8, 1, 0, 0, 2, 1};
    case Q6_K: return (Type){256, 210, 16, 1, 0, 208, -1, 1};
    case IQ4_XS: return (Type){256, 136, 8, 1, 1, 0, -1, 1};
    default: return (Type){0};
  }
}

/* Compilers make no vectors of loops this short. */
typedef uint8_t Bytes __attribute__((vector_size(16)));
typedef uint16_t Pairs __attribute__((vector_size(32)));

/* n bytes of two fields of four bits: the lower ones, then the upper ones. */
INLINE void nibbles(const uint8_t *from, int n, uint8_t *to) {
  for (int i = 0; i < n; i += (int)sizeof(Bytes)) {
    Bytes both;
    memcpy(&both, from + i, sizeof(both));
    const Bytes low = both & 15, high = both >> 4;
    memcpy(to + i, &low, sizeof(low));
    memcpy(to + n + i, &high, sizeof(high));
  }
}

/* Adds a field of each of n bytes: its `bits` bits from bit `at` on, moved up by `up`. */
INLINE void add_fields(const uint8_t *from, int n, int at, int bits, int up, uint8_t *to) {
  for (int i = 0; i < n; i++) to[i] |= (uint8_t)((from[i] >> at & ((1 << bits) - 1)) << up);
}

/* Bit i of 32 becomes bit 4 of code i. */
INLINE void add_fifth(const uint8_t *from, uint8_t *to) {
  uint32_t bits;
  memcpy(&bits, from, sizeof(bits));
  for (int i = 0; i < 32; i++) to[i] |= (uint8_t)((bits >> i & 1) << 4);
}

INLINE void subtract(int n, int number, uint8_t *codes) {
  for (int i = 0; i < n; i++) codes[i] = (uint8_t)(codes[i] - number);
}

/* Scales and minimums of six bits of Q4_K and Q5_K. */
INLINE void six_bits(const uint8_t *from, Block *b) {
  for (int i = 0; i < 4; i++) {
    b->scales[i] = (char)(from[i] & 63);
    b->offsets[i] = (char)(from[4 + i] & 63);
    b->scales[4 + i] = (char)((from[8 + i] & 15) | (from[i] >> 6) << 4);
    b->offsets[4 + i] = (char)(from[8 + i] >> 4 | (from[4 + i] >> 6) << 4);
  }
}

/* from: a block -> its codes, and its scales and offsets if these are steps */
INLINE void read_block(int kind, const uint8_t *from, Block *b) {
  switch (kind) {
    case Q4_0:
    case IQ4_NL: nibbles(from + 2, 16, b->codes); break;
    case Q4_1: nibbles(from + 4, 16, b->codes); break;
    case Q5_0:
      nibbles(from + 6, 16, b->codes);
      add_fifth(from + 2, b->codes);
      subtract(32, 16, b->codes);
      break;
    case Q5_1:
      nibbles(from + 8, 16, b->codes);
      add_fifth(from + 4, b->codes);
      break;
    case Q8_0: memcpy(b->codes, from + 2, 32); break;
    case MXFP4:
      nibbles(from + 1, 16, b->codes);
      b->scales[0] = (char)from[0];
      break;
    case Q2_K:
      for (int i = 0; i < 16; i++) b->scales[i] = (char)(from[i] & 15), b->offsets[i] = (char)(from[i] >> 4);
      memset(b->codes, 0, 256);
      for (int run = 0; run < 8; run++) add_fields(from + 16 + run / 4 * 32, 32, run % 4 * 2, 2, 0, b->codes + run * 32);
      break;
    case Q3_K:
      for (int i = 0; i < 16; i++)
        b->scales[i] = (char)(((from[96 + i % 8] >> i / 8 * 4 & 15) | (from[104 + i % 4] >> i / 4 * 2 & 3) << 4) - 32);
      memset(b->codes, 0, 256);
      for (int run = 0; run < 8; run++) {
        add_fields(from + 32 + run / 4 * 32, 32, run % 4 * 2, 2, 0, b->codes + run * 32);
        add_fields(from, 32, run, 1, 2, b->codes + run * 32);
      }
      subtract(256, -4, b->codes);
      break;
    case Q4_K:
      six_bits(from + 4, b);
      for (int run = 0; run < 4; run++) nibbles(from + 16 + run * 32, 32, b->codes + run * 64);
      break;
    case Q5_K:
      six_bits(from + 4, b);
      for (int run = 0; run < 4; run++) nibbles(from + 48 + run * 32, 32, b->codes + run * 64);
      for (int run = 0; run < 8; run++) add_fields(from + 16, 32, run, 1, 4, b->codes + run * 32);
      break;
    case Q6_K:
      memcpy(b->scales, from + 192, 16);
      for (int run = 0; run < 2; run++) nibbles(from + run * 64, 64, b->codes + run * 128);
      for (int run = 0; run < 8; run++) add_fields(from + 128 + run / 4 * 32, 32, run % 4 * 2, 2, 4, b->codes + run * 32);
      subtract(256, 32, b->codes);
      break;
    case IQ4_XS:
      for (int i = 0; i < 8; i++)
        b->scales[i] = (char)(((from[4 + i / 2] >> i % 2 * 4 & 15) | (from[2 + i / 4] >> i % 4 * 2 & 3) << 4) - 32);
      for (int run = 0; run < 8; run++) nibbles(from + 8 + run * 16, 16, b->codes + run * 32);
      break;
  }
}

/* codes [n], a byte each -> two a byte */
INLINE void put_pairs(const uint8_t *codes, int n, uint8_t *to) {
  for (int i = 0; i < n; i += (int)sizeof(Pairs)) {
    Pairs both;
    memcpy(&both, codes + i, sizeof(both));
    const Bytes pairs = __builtin_convertvector((both | both >> 4) & 0xFF, Bytes);
    memcpy(to + i / 2, &pairs, sizeof(pairs));
  }
}

/* codes [n], six bits in a byte each -> the lower four bits, two a byte, and the upper two, four a byte */
INLINE void put_sixes(const uint8_t *codes, int n, uint8_t *lower, uint8_t *upper) {
  typedef uint32_t Fours __attribute__((vector_size(32)));
  typedef uint8_t Each __attribute__((vector_size(8)));
  uint8_t four_bits[LARGEST];
  for (int i = 0; i < n; i++) four_bits[i] = codes[i] & 15;
  put_pairs(four_bits, n, lower);
  for (int i = 0; i < n; i += (int)sizeof(Fours)) {
    Fours four;
    memcpy(&four, codes + i, sizeof(four));
    four = four >> 4 & 0x03030303;
    const Each each = __builtin_convertvector((four | four >> 6 | four >> 12 | four >> 18) & 0xFF, Each);
    memcpy(upper + i / 4, &each, sizeof(each));
  }
}

/* The codes of n inputs, of which the first is input `at` of a row. */
INLINE void put_codes(const Type *t, const BlocksInto *to, uint8_t *codes, int64_t at, uint8_t *row) {
  const int n = t->values;
  if (t->coded && to->bits != 4)
    for (int c = 0; c < n; c++) codes[c] = (uint8_t)to->table[codes[c]];
  if (to->bits == 4) put_pairs(codes, n, row + at / 2);
  else if (to->bits == 8) memcpy(row + at, codes, (size_t)n);
  else {
    for (int c = 0; c < n; c++) codes[c] = (uint8_t)(codes[c] + 32);
    put_sixes(codes, n, row + at / 2, row + to->k / 2 + at / 4);
  }
}

/* numbers [n] of `size` bytes, each `times` times */
INLINE void put_numbers(const char *numbers, int n, int size, int64_t times, char *to) {
  if (times == 1) {
    memcpy(to, numbers, (size_t)(n * size));
    return;
  }
  for (int i = 0; i < n; i++)
    for (int64_t j = 0; j < times; j++) memcpy(to + (i * times + j) * size, numbers + i * size, (size_t)size);
}

INLINE void put_half(const uint8_t *from, int negative, char *to) {
  to[0] = (char)from[0];
  to[1] = (char)(from[1] ^ (negative ? 0x80 : 0));
}

INLINE int is_number(const uint8_t *half) { return (half[1] & 0x7C) != 0x7C; }

/* Whether the numbers of which a block's scales are made are finite. */
INLINE int is_finite(int kind, const uint8_t *from) {
  const Type t = type_of(kind);
  int found = kind != MXFP4 || *from != 0xFF;
  if (t.at_d >= 0) found &= is_number(from + t.at_d);
  if (t.at_m >= 0) found &= is_number(from + t.at_m);
  return found;
}

/* Row `row`. Returns whether its scales are finite. */
INLINE int read_row(int kind, const BlocksInto *to, int64_t row) {
  const Type t = type_of(kind);
  const int64_t blocks = to->k / t.values, groups = t.groups * to->finer;
  const uint8_t *from = (const uint8_t *)to->blocks + row * blocks * t.bytes;
  uint8_t *codes = (uint8_t *)to->codes + row * (to->k * to->bits / 8);
  char *scales = to->scales + row * blocks * groups * t.number, *zeros = to->zeros;
  if (t.at_m >= 0) zeros += row * blocks * groups * t.number;
  int finite = 1;
  for (int64_t i = 0; i < blocks; i++, from += t.bytes) {
    Block b;
    read_block(kind, from, &b);
    finite &= is_finite(kind, from);
    if (!t.steps && t.at_d >= 0) memcpy(b.scales, from + t.at_d, 2);
    if (!t.steps && t.at_m >= 0) memcpy(b.offsets, from + t.at_m, 2);
    put_codes(&t, to, b.codes, i * t.values, codes);
    put_numbers(b.scales, t.groups, t.number, to->finer, scales + i * groups * t.number);
    if (t.at_m >= 0) put_numbers(b.offsets, t.groups, t.number, to->finer, zeros + i * groups * t.number);
    if (!t.steps) continue;
    put_half(from + t.at_d, 0, to->factors + (row * blocks + i) * 2);
    if (t.at_m >= 0) put_half(from + t.at_m, 1, to->zero_factors + (row * blocks + i) * 2);
  }
  return finite;
}

#define EACH_KIND(DO) \
  DO(Q4_0) DO(Q4_1) DO(Q5_0) DO(Q5_1) DO(Q8_0) DO(IQ4_NL) DO(MXFP4) DO(Q2_K) DO(Q3_K) DO(Q4_K) DO(Q5_K) DO(Q6_K) DO(IQ4_XS)

int32_t petiole_knows_blocks(int32_t kind) { return type_of(kind).values > 0; }

/* Returns whether the numbers of which the scales are made are finite. */
int32_t petiole_read_blocks(int32_t kind, const BlocksInto *to, int32_t n_threads) {
  const int64_t in_page = LARGE_PAGE * 8 / (to->k * to->bits), rows = larger_of(1, smaller(in_page, to->n / n_threads));
  int finite = 1;
#pragma omp parallel for schedule(dynamic, rows) num_threads(n_threads) reduction(& : finite)
  for (int64_t row = 0; row < to->n; row++) switch (kind) {
#define CASE(one) \
  case one: finite &= read_row(one, to, row); break;
      EACH_KIND(CASE)
    }
  return finite;
}

INLINE int are_finite(int kind, const uint8_t *from, int64_t n) {
  int found = 1;
  for (int64_t i = 0; i < n; i++) found &= is_finite(kind, from + i * type_of(kind).bytes);
  return found;
}

/* The same of n blocks that nobody reads. */
int32_t petiole_finite_blocks(int32_t kind, const uint8_t *blocks, int64_t n, int32_t n_threads) {
  const Type t = type_of(kind);
  int finite = 1;
#pragma omp parallel for schedule(static) num_threads(n_threads) reduction(& : finite)
  for (int64_t first = 0; first < n; first += AT_A_TIME) {
    const uint8_t *from = blocks + first * t.bytes;
    const int64_t some = smaller(AT_A_TIME, n - first);
    switch (kind) {
#define CHECK(one) \
  case one: finite &= are_finite(one, from, some); break;
      EACH_KIND(CHECK)
    }
  }
  return finite;
}
