/* How weights lie in memory.
 *
 * They are rearranged once into blocks of the 32 outputs of a panel. A block holds, for one input after another, the weights
 * that lead to its outputs:
 *
 *     k = 0:  w[n0, 0]  w[n0 + 1, 0]  ...  w[n0 + 31, 0]
 *     k = 1:  w[n0, 1]  w[n0 + 1, 1]  ...
 *
 * or, in bfloat16, for two inputs after the next two:
 *
 *     k = 0, 1:  w[n0, 0] w[n0, 1]   w[n0 + 1, 0] w[n0 + 1, 1]  ...
 *
 * TWELVE, bfloat16 in 12 bits without loss: of the 8 bits of an exponent most say little. Nearly all weights to an output
 * lie within 16 powers of two, so all are scaled by the power of two that makes the exponents of these 127, 126, ..., 112.
 * The two bytes of such a weight are
 *
 *     sign  0 1 1 1  three bits of the exponent     kept as 4 bits
 *     lowest bit of the exponent, mantissa          kept as it is
 *
 * Two inputs and 32 outputs make a row of 64 bytes and 32 bytes of twice 4 bits. Where one of its weights does not fit, all
 * 64 lie before the block's rows in bfloat16: the row's first 4 bytes tell how far before the row, and its byte 64 is RAW.
 * Sums are scaled back. For powers of two that is exact: the same bits as from bfloat16. (DFloat11 of Zhang et al., 2025,
 * shortens exponents too, to codes of variable lengths.)
 */
#pragma once
#include "matrix.h"

/* So many inputs have their weights to an output side by side. */
#define AT_ONCE(kind) ((kind) == BF16 || (kind) == INT8_HALF || (kind) == TWELVE ? 2 : 1)

#define ROW12 (3 * PANEL) /* bytes of a row in 12 bits */
#define CODES (2 * PANEL) /* where its 4 bits for each weight begin */
#define RAW 0x80          /* the first of their bytes; where it is that anyway, the row is raw, too */
#define LEVELS 16         /* exponents */
#define OWN_BITS 0x87     /* of a weight's first byte: those that are kept */
#define COMMON 0x38       /* the others */

/* Where the weight from input c to output n lies. A pair of bfloat16 makes one float's bits: the even one is shifted
 * up, the odd one masked. */
INLINE int64_t place(int kind, int64_t c, int64_t n) {
  return kind == BF16 ? (c / 2 * PANEL + n) * 2 + c % 2 : c * PANEL + n;
}

/* From the weights of AT_ONCE inputs to those of the next, in bytes. */
INLINE int64_t row_of(int kind) { return kind == TWELVE ? ROW12 : PANEL * AT_ONCE(kind) * size_of(kind); }

/* The block of output n. */
INLINE const char *block_of(const Linear *l, int64_t n) {
  const int64_t block = n / PANEL;
  return block < l->n / PANEL ? l->weight + block * l->stride : l->tail;
}

/* The bytes before the rows of a block. */
INLINE int64_t before_rows(const Linear *l) { return l->kind == TWELVE ? l->stride - l->k / 2 * ROW12 : 0; }

/* Where the weights of AT_ONCE inputs to output n begin. In 12 bits, those to its panel. */
INLINE const char *weights_to(const Linear *l, int64_t n) {
  const int64_t within = l->kind == TWELVE ? before_rows(l) : place(l->kind, 0, n % PANEL) * size_of(l->kind);
  return block_of(l, n) + within;
}

/* The weights of a row that is RAW, in bfloat16: the order of a row of a panel. */
INLINE const void *raw_of(const char *row) {
  int32_t distance;
  memcpy(&distance, row, sizeof(distance));
  return row - distance;
}

#ifdef DOT
#define FIRST_BYTES 56, 57, 58, 59, 60, 61, 62, 63, 184, 185, 186, 187, 188, 189, 190, 191
static const uint8_t first_bytes[] = {FIRST_BYTES, FIRST_BYTES, FIRST_BYTES, FIRST_BYTES};

/* A row in 12 bits -> pairs of bfloat16. The low 4 bits of its 32 bytes belong to the first 32 of its 64, the high ones to
 * the others. (All these instructions run beside those that multiply; a rotation, say, would not.) */
INLINE void widen_twelve(const char *row, vu pairs[2]) {
  if (__builtin_expect((uint8_t)row[CODES] == RAW, 0)) {
    for (int half = 0; half < 2; half++) pairs[half] = ((const vu *)raw_of(row))[half];
    return;
  }
  const __m512i twice = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)(row + CODES)));
  const __m512i codes = _mm512_and_si512(_mm512_mask_srli_epi32(twice, 0xFF00, twice, 4), _mm512_set1_epi8(15));
  const __m512i first = _mm512_shuffle_epi8(_mm512_loadu_si512(first_bytes), codes);
  __m512i second = _mm512_loadu_si512(row);
  __asm__("" : "+v"(second)); /* loaded once */
  pairs[0] = (vu)_mm512_unpacklo_epi8(second, first);
  pairs[1] = (vu)_mm512_unpackhi_epi8(second, first);
}

/* The weights of two inputs to 16 outputs, as pairs of bfloat16. */
INLINE vu pairs_at(int kind, const char *w, int half) {
  if (kind == BF16) return ((const vu *)w)[half];
  const vf even = __builtin_convertvector(widen_bytes(w + half * LANES), vf);
  const vf odd = __builtin_convertvector(widen_bytes(w + PANEL + half * LANES), vf);
  return (vu)even >> 16 | ((vu)odd & 0xFFFF0000u);
}

/* The weights of two inputs to a panel's outputs, as pairs of bfloat16. */
INLINE void pairs_of(int kind, const char *w, vu pairs[2]) {
  if (kind == TWELVE) widen_twelve(w, pairs);
  else
    for (int half = 0; half < 2; half++) pairs[half] = pairs_at(kind, w, half);
}
#endif

/* Rows of a packed embedding, times `factor`: out [t, k]. Called by every thread of a region. */
void embed(const Linear *l, int64_t t, const int64_t *ids, float factor, float *out);
