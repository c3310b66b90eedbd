/* Rearranges codes, scales and zeros into panels (codes.h). */
#include "codes.h"

#include <omp.h>

/* rows [n <= PANEL][k] -> a panel. Outputs after the last have codes of zero bits. */
static void pack_codes(int kind, int inputs, const uint8_t *rows, int n, int64_t k, uint8_t *out) {
  const int64_t row = kind == FOUR ? k / 2 : k;
  memset(out, 0, (size_t)(PANEL * row));
  if (kind != FOUR) {
    for (int64_t from = 0; from < k; from += 64) /* a line of each row at a time */
      for (int i = 0; i < n; i++)
        for (int64_t c = from; c < smaller(k, from + 64); c++) out[c * PANEL + i] = rows[i * row + c];
    return;
  }
  for (int i = 0; i < n; i++)
    for (int64_t c = 0; c < k / EIGHT; c++) {
      const uint8_t *codes = rows + i * row + c * EIGHT / 2;
      uint8_t *row = out + c * ROW4;
#pragma GCC unroll 8
      for (int input = 0; input < EIGHT; input++) {
        const int64_t nibble = nibble_at(inputs, i, input);
        row[nibble / 2] |= (uint8_t)((codes[input / 2] >> input % 2 * 4 & 15) << nibble % 2 * 4);
      }
    }
}

/* rows [n <= PANEL][groups] -> [groups][PANEL], padded with zeros. size: of a number */
static void pack_numbers(const char *rows, int n, int64_t groups, int64_t size, char *out) {
  memset(out, 0, (size_t)(groups * PANEL * size));
  for (int i = 0; i < n; i++)
    for (int64_t c = 0; c < groups; c++)
      memcpy(out + (c * PANEL + i) * size, rows + (i * groups + c) * size, (size_t)size);
}

/* The bytes that each thread of `petiole_pack_groups` copies at a time, at most. */
int64_t petiole_pack_groups_copies(const Linear *l) {
  const Groups *g = l->groups;
  return PANEL * larger_of(l->kind == FOUR ? l->k / 2 : l->k, parts(l->k, g->size) * (int64_t)sizeof(float));
}

/* Rearranges codes [n, k], scales and zeros [n, groups] in place, a panel at a time. The last rows go to the tails. */
void petiole_pack_groups(Linear *l, Groups *g, char *copies, int32_t n_threads) {
  const int64_t n_groups = parts(l->k, g->size), whole = l->n / PANEL, last = l->n % PANEL;
  const int64_t each = petiole_pack_groups_copies(l), s = size_of_number(g->scale_kind), z = size_of_number(g->zero_kind);
  const int64_t of_scales = n_groups * PANEL * s, of_zeros = n_groups * PANEL * z;
  l->stride = PANEL * (l->kind == FOUR ? l->k / 2 : l->k);
  for (int i = 0; i < 16; i++) {
    const uint16_t half = to_bf16(g->values[i]);
    g->halves[byte_at(i, 0)] = (uint8_t)half;
    g->halves[byte_at(i, 1)] = (uint8_t)(half >> 8);
  }
#pragma omp parallel for schedule(static) num_threads(n_threads)
  for (int64_t p = 0; p < whole + (last > 0); p++) {
    const int full = p < whole, n = full ? PANEL : (int)last;
    char *copy = copies + omp_get_thread_num() * each, *codes = (char *)l->weight + p * l->stride;
    char *scales = (char *)g->scales + p * of_scales, *zeros = (char *)g->zeros + p * of_zeros;
    memcpy(copy, codes, (size_t)(l->stride / PANEL * n));
    pack_codes(l->kind, g->inputs, (const uint8_t *)copy, n, l->k, (uint8_t *)(full ? codes : l->tail));
    memcpy(copy, scales, (size_t)(of_scales / PANEL * n));
    pack_numbers(copy, n, n_groups, s, full ? scales : (char *)g->tail_scales);
    if (!g->zeros) continue;
    memcpy(copy, zeros, (size_t)(of_zeros / PANEL * n));
    pack_numbers(copy, n, n_groups, z, full ? zeros : (char *)g->tail_zeros);
  }
}
