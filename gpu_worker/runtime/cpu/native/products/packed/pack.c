/* Rearranges weights (pack.h): a block takes no more bytes than its rows took. */
#include "pack.h"

#include <omp.h>
#include <sys/mman.h>
#include <unistd.h>

/* rows [n <= PANEL, k] -> one block [k][PANEL], padded with zeros */
static void pack_block(int kind, const char *rows, int n, int64_t k, char *out) {
  const int64_t size = size_of(kind), squares = kind == BF16 && n == PANEL ? k / (2 * LANES) * 2 * LANES : 0;
  if (n < PANEL) memset(out, 0, (size_t)(k * PANEL * size));
  for (int64_t c = 0; c < squares; c += 2 * LANES) /* pairs of bfloat16 change place as one lane */
    for (int i = 0; i < n; i += LANES) {
      vu square[LANES];
      for (int j = 0; j < LANES; j++) square[j] = *(const vu *)((const uint16_t *)rows + (i + j) * k + c);
      transpose(square);
      for (int j = 0; j < LANES; j++) *(vu *)((uint32_t *)out + (c / 2 + j) * PANEL + i) = square[j];
    }
  for (int64_t from = squares; from < k; from += 64) { /* a few lines of each row at a time */
    const int64_t to = smaller(k, from + 64);
    for (int i = 0; i < n; i++)
      for (int64_t c = from; c < to; c++) {
        const int64_t at = place(kind, c, i);
        if (kind == F32) ((float *)out)[at] = ((const float *)rows)[i * k + c];
        else if (kind == BF16) ((uint16_t *)out)[at] = ((const uint16_t *)rows)[i * k + c];
        else out[at] = rows[i * k + c];
      }
  }
}

/* ---------------------------------------------------------------- twelve bits */

#ifdef DOT
enum { NOT_SCALED = 128, ALL_ZERO };

/* The power of two that scales the k weights to an output so that most lie within LEVELS, or ALL_ZERO. NOT_SCALED where
 * that is not without loss: a weight is infinite, not a number or subnormal, or would be after it. */
static int scaling(const uint16_t *w, int64_t k) {
  int32_t counts[4][256] = {0}; /* of exponents; four, so that no addition waits for the one before */
  int subnormal = 0, within = 0, best = 0, top = 127, lowest = 256, highest = 0;
  for (int64_t c = 0; c < k; c++) {
    const unsigned size = w[c] & 0x7FFFu;
    counts[c % 4][size >> 7]++;
    subnormal |= size - 1 < 0x7F;
  }
  for (int e = 1; e < 256; e++) {
    for (int i = 1; i < 4; i++) counts[0][e] += counts[i][e];
    if (!counts[0][e]) continue;
    within = 0;
    for (int i = e < LEVELS ? 1 : e - LEVELS + 1; i <= e; i++) within += counts[0][i];
    if (within > best) best = within, top = e;
    lowest = lowest == 256 ? e : lowest;
    highest = e;
  }
  if (!highest) return subnormal ? NOT_SCALED : ALL_ZERO;
  return subnormal || highest == 255 || highest - top > 127 || lowest - top < -126 ? NOT_SCALED : 127 - top;
}

/* A row of a panel in bfloat16 -> in 12 bits, for `widen_twelve`. kept: the weights in bfloat16 as they are kept. Returns
 * whether they fit. */
static int shorten(const uint16_t *weights, const uint16_t *exponents, __m512i kept[2], char *row) {
  __m512i first[2], second[2];
  __mmask32 unfit = 0;
  for (int half = 0; half < 2; half++) {
    const __m512i w = _mm512_loadu_si512(weights + half * PANEL), by = _mm512_loadu_si512(exponents + half * PANEL);
    const __mmask32 some = _mm512_test_epi16_mask(w, _mm512_set1_epi16(0x7FFF)); /* zero stays zero */
    kept[half] = _mm512_mask_add_epi16(w, some, w, by);
    first[half] = _mm512_srli_epi16(kept[half], 8);
    second[half] = _mm512_and_si512(kept[half], _mm512_set1_epi16(0xFF));
    const __m512i others = _mm512_and_si512(first[half], _mm512_set1_epi16(0xFF ^ OWN_BITS));
    unfit |= _mm512_cmpneq_epi16_mask(others, _mm512_set1_epi16(COMMON));
    const __m512i sign = _mm512_slli_epi16(_mm512_srli_epi16(first[half], 7), 3);
    first[half] = _mm512_or_si512(sign, _mm512_and_si512(first[half], _mm512_set1_epi16(7)));
  }
  const __m512i codes = _mm512_packus_epi16(first[0], first[1]);
  const __m256i upper = _mm256_slli_epi16(_mm512_extracti64x4_epi64(codes, 1), 4);
  _mm512_storeu_si512(row, _mm512_packus_epi16(second[0], second[1]));
  _mm256_storeu_si256((__m256i *)(row + CODES), _mm256_or_si256(_mm512_castsi512_si256(codes), upper));
  return !unfit && (uint8_t)row[CODES] != RAW;
}

/* block: a panel in bfloat16, [k / 2][PANEL][2] -> rows in 12 bits, or where that is null nothing. Returns how many of them
 * are RAW. */
static int64_t shorten_block(const uint16_t *block, const uint16_t *exponents, int64_t k, char *rows) {
  int64_t n_raw = 0;
  for (int64_t i = 0; i < k / 2; i++) {
    char row[ROW12];
    __m512i kept[2];
    const int fits = shorten(block + i * 2 * PANEL, exponents, kept, row);
    n_raw += !fits;
    if (!rows) continue;
    if (!fits) {
      const int32_t distance = (int32_t)(i * ROW12 + n_raw * (int64_t)sizeof(kept));
      memcpy(rows - n_raw * (int64_t)sizeof(kept), kept, sizeof(kept));
      memcpy(row, &distance, sizeof(distance));
      row[CODES] = (char)RAW;
    }
    memcpy(rows + i * ROW12, row, ROW12);
  }
  return n_raw;
}

/* The rows of panel p -> a block in bfloat16. Outputs without any weight but zero, which are scaled by 0, have ones, and so
 * have those after the last. exponents: what is to be added to the weights' bits, [PANEL][2] */
static void block_of_panel(const Linear *l, int64_t p, uint16_t *block, uint16_t *exponents) {
  const int64_t n = smaller(PANEL, l->n - p * PANEL);
  pack_block(BF16, l->weight + p * l->k * PANEL * 2, (int)n, l->k, (char *)block);
  for (int64_t i = 0; i < PANEL; i++) {
    const float scale = i < n ? l->scale[p * PANEL + i] : 0;
    exponents[2 * i] = exponents[2 * i + 1] = scale > 0 ? (uint16_t)(ilogbf(scale) * -128) : 0;
    for (int64_t c = 0; scale == 0 && c < l->k; c++) block[place(BF16, c, i)] = 127 << 7;
  }
}

/* The pages between two addresses become the system's. */
static void release_pages(const char *from, const char *to) {
  const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), first = ((uintptr_t)from + page - 1) / page * page;
  const uintptr_t last = (uintptr_t)to / page * page;
  if (first < last) madvise((void *)first, last - first, MADV_DONTNEED);
}

/* Packs weights in 12 bits into `to`, and gives the memory where they lay back. Returns whether they fit and that saves a
 * tenth; else they are as they were. */
static int pack_twelve(Linear *l, uint16_t *copies, char *to, int n_threads) {
  const int64_t k = l->k, panels = parts(l->n, PANEL), bytes = k * PANEL * 2;
  const uint16_t *weights = (const uint16_t *)l->weight;
  float *scales = (float *)l->scale;
  int64_t most_raw = 0;
  int unfit = 0;
#pragma omp parallel for schedule(static) reduction(max : most_raw) reduction(| : unfit) num_threads(n_threads)
  for (int64_t p = 0; p < panels; p++) {
    uint16_t *block = copies + omp_get_thread_num() * k * PANEL, exponents[2 * PANEL];
    for (int64_t i = p * PANEL; i < smaller((p + 1) * PANEL, l->n); i++) {
      const int by = scaling(weights + i * k, k);
      unfit |= by == NOT_SCALED;
      scales[i] = by == ALL_ZERO ? 0 : ldexpf(1.0f, -by);
    }
    block_of_panel(l, p, block, exponents);
    const int64_t n_raw = shorten_block(block, exponents, k, NULL);
    most_raw = n_raw > most_raw ? n_raw : most_raw;
  }
  l->stride = k / 2 * ROW12 + most_raw * PANEL * 4;
  if (unfit || l->stride > bytes / 10 * 9) return 0;
#pragma omp parallel for schedule(static) num_threads(n_threads)
  for (int64_t p = 0; p < panels; p++) {
    uint16_t *block = copies + omp_get_thread_num() * k * PANEL, exponents[2 * PANEL];
    char *rows = p < l->n / PANEL ? to + p * l->stride : (char *)l->tail;
    block_of_panel(l, p, block, exponents);
    shorten_block(block, exponents, k, rows + before_rows(l));
  }
  release_pages(l->weight, l->weight + (int64_t)l->n * k * 2);
  l->weight = to;
  return 1;
}
#endif

/* ---------------------------------------------------------------- every kind */

/* Rearranges the weights [n, k] of `l`: TWELVE into `to`, which has room for them as they are, other kinds in place. The
 * last rows go to `tail`, [k][block]. TWELVE becomes BF16 where 12 bits do not do. copies: scratch, one block for each
 * thread. */
void petiole_pack(Linear *l, char *copies, char *to, int32_t n_threads) {
#ifdef DOT
  if (l->kind == TWELVE && pack_twelve(l, (uint16_t *)copies, to, n_threads)) return;
#else
  (void)to;
#endif
  if (l->kind == TWELVE) l->kind = BF16, l->scale = NULL;
  const int64_t bytes = l->stride = l->k * PANEL * size_of(l->kind), whole = l->n / PANEL;
#pragma omp parallel for schedule(static) num_threads(n_threads)
  for (int64_t b = 0; b < whole; b++) {
    char *block = (char *)l->weight + b * bytes, *rows = copies + omp_get_thread_num() * bytes;
    memcpy(rows, block, (size_t)bytes);
    pack_block(l->kind, rows, PANEL, l->k, block);
  }
  if (l->n % PANEL) pack_block(l->kind, l->weight + whole * bytes, l->n % PANEL, l->k, (char *)l->tail);
}

/* The weight from input c to output n of the block with these rows, not yet scaled. */
static float weight_of(const Linear *l, const char *rows, int64_t c, int64_t n) {
  uint32_t bits;
  if (l->kind != TWELVE) {
    const int64_t at = place(l->kind, c, n);
    bits = l->kind == F32 ? ((const uint32_t *)rows)[at] : (uint32_t)((const uint16_t *)rows)[at] << 16;
  } else {
    const uint8_t *row = (const uint8_t *)rows + c / 2 * ROW12, *codes = row + CODES;
    const int64_t e = 2 * n + c % 2, eighth = e / 8;
    const int64_t at = (eighth < 4 ? 2 * eighth : 2 * eighth - 7) * 8 + e % 8; /* where `widen_twelve` interleaves from */
    const uint32_t code = codes[at % 32] >> at / 32 * 4 & 15;
    if (*codes == RAW) bits = (uint32_t)((const uint16_t *)raw_of((const char *)row))[e] << 16;
    else bits = (code >> 3 << 7 | COMMON | (code & 7)) << 24 | (uint32_t)row[at] << 16;
  }
  float weight;
  memcpy(&weight, &bits, sizeof(weight));
  return weight;
}

void embed(const Linear *l, int64_t t, const int64_t *ids, float factor, float *out) {
  const int64_t row = row_of(l->kind), n_rows = l->k / AT_ONCE(l->kind);
#pragma omp for schedule(static)
  for (int64_t i = 0; i < t; i++) {
    const char *rows = block_of(l, ids[i]) + before_rows(l), *first = weights_to(l, ids[i]);
    const float scale = (l->kind == TWELVE ? l->scale[ids[i]] : 1) * factor; /* twelve bits: a power of two */
    for (int64_t at = 0; at < n_rows; at++) __builtin_prefetch(first + at * row);
    for (int64_t c = 0; c < l->k; c++) out[i * l->k + c] = weight_of(l, rows, c, ids[i] % PANEL) * scale;
  }
}
