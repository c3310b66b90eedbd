/* Rearranges codes, scales and zeros into panels (codes.h). */
#include "codes.h"

#include <omp.h>

#define TOGETHER 4 /* panels that a thread takes: threads finish together even if one of them shares its processor */
#define LINE 64 /* bytes of each row that are rearranged at a time: as many words as lanes */

/* The codes of EIGHT inputs, for each of 16 outputs a word in `first` and for the others in `second` -> their places among those
 * of a panel: see `nibble_at`. */
INLINE void put_eight(int inputs, vu first, vu second, char *row) {
#if BY_SHUFFLE == 64
#pragma GCC unroll 2
  for (int four = 0; four < 2; four++, first >>= 16, second >>= 16, row += BY_SHUFFLE) {
    const vu both[2] = {first & 0xFFFF, second & 0xFFFF};
    vu spread[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
#ifdef BY_FOUR
      if (inputs == INT8) {
        const vu pairs = (both[i] & 0xFF) | (both[i] & 0xFF00) << 8;
        spread[i] = (pairs & 0x000F000F) | (pairs & 0x00F000F0) << 4;
        continue;
      }
#endif
      spread[i] = (both[i] & 0x0F0F) | (both[i] & 0xF0F0) << 12;
    }
    *(vu *)row = spread[0] | spread[1] << 4;
  }
  (void)inputs;
#elif BY_SHUFFLE == 32
  for (int two = 0; two < EIGHT / 2; two++, first >>= 8, second >>= 8) {
    const vu spread = (first & 0x0F) | (first & 0xF0) << 4 | (second & 0x0F) << 4 | (second & 0xF0) << 8;
    for (int o = 0; o < LANES; o++) ((uint16_t *)row)[two * LANES + o / 4 % 2 * 8 + o / 8 * 4 + o % 4] = (uint16_t)spread[o];
  }
  (void)inputs;
#else
  *(vu *)row = first, ((vu *)row)[1] = second;
  (void)inputs;
#endif
}

/* Compilers convert lane by lane. */
INLINE vb lowest_bytes(vu words) {
#ifdef __AVX512F__
  return (vb)_mm512_cvtepi32_epi8((__m512i)words);
#else
  return __builtin_convertvector((vi)words, vb);
#endif
}

/* Codes of a byte: those of four inputs. */
INLINE void put_four(vu first, vu second, char *row) {
  for (int input = 0; input < 4; input++, first >>= 8, second >>= 8, row += PANEL) {
    *(vb *)row = lowest_bytes(first);
    *(vb *)(row + LANES) = lowest_bytes(second);
  }
}

#if BY_SHUFFLE == 64
/* The upper two bits of EIGHT inputs, for each of 16 outputs in the lower half of a word in `first` and for the others in
 * `second` -> their places: see `upper_at`. */
INLINE void put_upper(vu first, vu second, char *row) {
  const vu both[2] = {first, second};
  vu spread[2];
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) spread[i] = (both[i] & 0x3333) | (both[i] >> 2 & 0x3333) << 16;
  *(vu *)row = spread[0] | spread[1] << 2;
}
#endif

#define SIXES (4 * LINE) /* inputs whose upper bits are a line */

/* `some` bytes of each of n <= PANEL rows, as many words as lanes at most -> for each word those of all rows */
INLINE void turn_words(const char *rows, int n, int64_t row, int64_t some, vu words[2][LANES]) {
  memset(words, 0, 2 * LANES * sizeof(vu));
  for (int i = 0; i < n; i++) memcpy(&words[i / LANES][i % LANES], rows + i * row, (size_t)some);
  transpose(words[0]);
  transpose(words[1]);
}

/* rows [n <= PANEL][k / 4 * 3] of codes of six bits -> a panel, as `pack_codes` */
static void pack_sixes(const char *rows, int n, int64_t k, char *out) {
  const int64_t row = bytes_of_codes(SIX, k);
#if BY_SHUFFLE == 64
  vu lower[2][LANES], upper[2][LANES];
  for (int64_t from = 0; from < k; from += SIXES) {
    turn_words(rows + k / 2 + from / 4, n, row, smaller(SIXES, k - from) / 4, upper);
    for (int64_t at = from; at < smaller(from + SIXES, k); at += 2 * LINE) {
      const int64_t some = smaller(2 * LINE, k - at);
      turn_words(rows + at / 2, n, row, some / 2, lower);
      for (int64_t i = 0; i < some / EIGHT; i++, out += ROW6) {
        const int64_t word = (at - from) / 16 + i / 2;
        put_eight(F32, lower[0][i], lower[1][i], out);
        put_upper(upper[0][word] >> i % 2 * 16, upper[1][word] >> i % 2 * 16, out + ROW4);
      }
    }
  }
#else
  memset(out, 0, (size_t)(row * PANEL));
  for (int o = 0; o < n; o++)
    for (int64_t c = 0; c < k; c++) {
      const uint8_t low = (uint8_t)rows[o * row + c / 2] >> c % 2 * 4 & 15;
      const uint8_t high = (uint8_t)rows[o * row + k / 2 + c / 4] >> c % 4 * 2 & 3;
      const int64_t lower = lower_at(o, c % EIGHT), upper = upper_at(o, c % EIGHT);
      char *eight = out + c / EIGHT * ROW6;
      eight[lower / 2] |= (char)(low << lower % 2 * 4);
      eight[ROW4 + upper / 4] |= (char)(high << upper % 4 * 2);
    }
#endif
}

/* rows [n <= PANEL][k] -> a panel. Outputs after the last have codes of zero bits. */
static void pack_codes(int kind, int inputs, const char *rows, int n, int64_t k, char *out) {
  const int64_t bytes = bytes_of_codes(kind, k);
  if (kind == SIX) {
    pack_sixes(rows, n, k, out);
    return;
  }
  for (int64_t from = 0; from < bytes; from += LINE) {
    const int64_t some = smaller(LINE, bytes - from);
    vu words[2][LANES];
    turn_words(rows + from, n, bytes, some, words);
    for (int i = 0; i < some / 4; i++, out += 4 * PANEL) {
      if (kind == FOUR) put_eight(inputs, words[0][i], words[1][i], out);
      else put_four(words[0][i], words[1][i], out);
    }
  }
}

INLINE void turn_numbers(const char *rows, int n, int64_t groups, int64_t size, char *out) {
  for (int i = 0; i < n; i++)
    for (int64_t c = 0; c < groups; c++) memcpy(out + (c * PANEL + i) * size, rows + (i * groups + c) * size, (size_t)size);
}

/* rows [n <= PANEL][groups] -> [groups][PANEL], padded with zeros. size: of a number */
static void pack_numbers(const char *rows, int n, int64_t groups, int64_t size, char *out) {
  if (n < PANEL) memset(out, 0, (size_t)(groups * PANEL * size));
  if (size == 1) turn_numbers(rows, n, groups, 1, out); /* constants */
  else if (size == 2) turn_numbers(rows, n, groups, 2, out);
  else turn_numbers(rows, n, groups, 4, out);
}

/* The factors of panel p, which has n outputs. */
static void pack_factors(const Linear *l, const Groups *g, int64_t p, int n, int full, char *copy) {
  const int64_t factors = factors_of(g, l->k), bytes = factors * 2;
  const char *from[2] = {g->factors, g->zero_factors}, *tails[2] = {g->tail_factors, g->tail_zero_factors};
  for (int i = 0; i < 2; i++) {
    if (!from[i]) continue;
    char *at = (char *)from[i] + p * bytes * PANEL;
    memcpy(copy, at, (size_t)(bytes * n));
    pack_numbers(copy, n, factors, 2, full ? at : (char *)tails[i]);
  }
}

/* The value of the code of input c to output o of a panel. */
static float value_at(const Linear *l, const char *panel, int64_t c, int64_t o) {
  if (l->kind == SIX) return (float)six_at(panel + c / EIGHT * ROW6, o, c % EIGHT);
  if (l->kind != FOUR) return ((const int8_t *)panel)[c * PANEL + o];
  const int64_t nibble = nibble_at(l->groups->inputs, o, c % EIGHT);
  return l->groups->values[(uint8_t)panel[c / EIGHT * ROW4 + nibble / 2] >> nibble % 2 * 4 & 15];
}

/* Number i of those of a kind, which lie in whole panels. */
static float one_number(int kind, const char *from, int64_t i) {
  return numbers_at(kind, from, i / WIDTH * WIDTH)[i % WIDTH];
}

/* Row `id` of a packed embedding of codes, times `factor`: out [k] */
static void embed_codes(const Linear *l, int64_t id, float factor, float *out) {
  const Groups *g = l->groups;
  const int64_t p = id / PANEL, o = id % PANEL, n_groups = parts(l->k, g->size);
  const Panel panel = panel_at(l, p);
  for (int64_t group = 0; group < n_groups; group++) {
    const int64_t at = group * PANEL + o, shared = (group >> g->shift) * PANEL + o;
    float scale = one_number(g->scale_kind, panel.scales, at), zero = panel.zeros ? one_number(g->zero_kind, panel.zeros, at) : 0;
    if (panel.factors) scale *= one_number(HALF, panel.factors, shared);
    if (panel.zero_factors) zero *= one_number(HALF, panel.zero_factors, shared);
    for (int64_t c = group * g->size; c < smaller((group + 1) * g->size, l->k); c++) {
      const float value = value_at(l, panel.codes, c, o);
      const float weight = g->offsets ? value * scale + zero : (value - zero) * scale;
      out[c] = weight * (l->scale ? l->scale[id] : 1) * factor;
    }
  }
}

void embed_tokens(const Linear *l, int64_t t, const int64_t *ids, float factor, float *out) {
  if (!l->groups) {
    embed(l, t, ids, factor, out);
    return;
  }
#pragma omp for schedule(static)
  for (int64_t i = 0; i < t; i++) embed_codes(l, ids[i], factor, out + i * l->k);
}

/* `embed_tokens` by the calling thread alone. */
void petiole_embed(const Linear *l, int64_t t, const int64_t *ids, float factor, float *out) {
  embed_tokens(l, t, ids, factor, out);
}

/* The bytes that each thread of `petiole_pack_groups` copies at a time, at most. */
int64_t petiole_pack_groups_copies(const Linear *l) {
  const Groups *g = l->groups;
  return PANEL * larger_of(bytes_of_codes(l->kind, l->k), parts(l->k, g->size) * (int64_t)sizeof(float));
}

/* Rearranges codes [n, k], scales and zeros [n, groups] in place, a panel at a time. The last rows go to the tails. */
void petiole_pack_groups(Linear *l, Groups *g, char *copies, int32_t n_threads) {
  const int64_t n_groups = parts(l->k, g->size), whole = l->n / PANEL, last = l->n % PANEL;
  const int64_t each = petiole_pack_groups_copies(l), s = size_of_number(g->scale_kind), z = size_of_number(g->zero_kind);
  const int64_t of_scales = n_groups * PANEL * s, of_zeros = n_groups * PANEL * z;
  l->stride = PANEL * bytes_of_codes(l->kind, l->k);
  for (int i = 0; i < 16; i++) {
    const uint16_t half = to_bf16(g->values[i]);
    g->halves[byte_at(i, 0)] = (uint8_t)half;
    g->halves[byte_at(i, 1)] = (uint8_t)(half >> 8);
  }
#pragma omp parallel for schedule(dynamic, TOGETHER) num_threads(n_threads)
  for (int64_t p = 0; p < whole + (last > 0); p++) {
    const int full = p < whole, n = full ? PANEL : (int)last;
    char *copy = copies + omp_get_thread_num() * each, *codes = (char *)l->weight + p * l->stride;
    char *scales = (char *)g->scales + p * of_scales, *zeros = (char *)g->zeros + p * of_zeros;
    memcpy(copy, codes, (size_t)(l->stride / PANEL * n));
    pack_codes(l->kind, g->inputs, copy, n, l->k, full ? codes : (char *)l->tail);
    memcpy(copy, scales, (size_t)(of_scales / PANEL * n));
    pack_numbers(copy, n, n_groups, s, full ? scales : (char *)g->tail_scales);
    pack_factors(l, g, p, n, full, copy);
    if (!g->zeros) continue;
    memcpy(copy, zeros, (size_t)(of_zeros / PANEL * n));
    pack_numbers(copy, n, n_groups, z, full ? zeros : (char *)g->tail_zeros);
  }
}
