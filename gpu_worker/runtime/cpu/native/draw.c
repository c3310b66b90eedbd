/* The Gumbel maximum over a vocabulary. */
#include "arithmetic/vectors.h"

INLINE vpu hash_lanes(vpu x) {
  x ^= x >> 16;
  x *= 0x7FEB352Du;
  x ^= x >> 15;
  x *= 0x846CA68Bu;
  return x ^ x >> 16;
}

/* Gumbel noise of 31 random bits; see noise.py. */
static float gumbel(uint32_t bits) {
  float u = ((float)bits + 0.5f) * 0x1p-31f;
  return -logf(-log1pf(-(u < 1.0f - 0x1p-24f ? u : 1.0f - 0x1p-24f)));
}

/* tokens[i] = argmax over v of scores[i][v] + gumbel(keys[i], v).
 * Noise is at most -ln(u), which the exponent of u's bits bounds; logarithms are taken only where that bound could
 * still win, a few times a row. */
void petiole_draw(int64_t rows, int64_t vocab, const float *scores, const uint32_t *keys, int64_t *tokens,
                  int32_t n_threads) {
#pragma omp parallel for num_threads(n_threads) schedule(dynamic, 1)
  for (int64_t i = 0; i < rows; i++) {
    const float *row = scores + i * vocab;
    float best = -INFINITY;
    int64_t token = 0;
    vpu lane;
    for (int j = 0; j < WIDTH; j++) lane[j] = j;
    for (int64_t v = 0; v < vocab; v += WIDTH) {
      vpu bits = hash_lanes(hash_lanes((lane + (uint32_t)v) * 0x9E3779B1u + keys[2 * i]) ^ keys[2 * i + 1]) >> 1;
      vpi exponent = (vpi)__builtin_convertvector((vpi)bits, vp) >> 23; /* of bits, plus 127; 0 for no bits */
      vp bound = __builtin_convertvector(31 + 127 + 1 - exponent, vp) * 0.6931472f;
      bound = blend((vpi)(bits == 0), splat_part(23.0f), bound);
      float score[WIDTH];
      int n = vocab - v < WIDTH ? (int)(vocab - v) : WIDTH;
      if (n == WIDTH) set_part(score, part_at(row + v) + bound);
      else for (int j = 0; j < n; j++) score[j] = row[v + j] + bound[j];
      for (int j = 0; j < n; j++) {
        if (!(score[j] > best)) continue;
        float exact = row[v + j] + gumbel(bits[j]);
        if (exact > best) best = exact, token = v + j;
      }
    }
    tokens[i] = token;
  }
}
