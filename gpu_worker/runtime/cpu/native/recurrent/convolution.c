/* A causal convolution of each channel with a kernel of its own.
 *
 * An output is a sum of `kernel` products in one order: a position gets the same bits wherever a sequence is cut. Outputs
 * take the place of their own inputs, from the last position to the first, because only later positions read those inputs.
 */
#include "convolution.h"

#include "../products/packed/matrix.h"

/* n numbers in bfloat16 -> floats */
static void widen_inputs(const uint16_t *x, int64_t n, float *out) {
  int64_t i = 0;
  for (; i + WIDTH <= n; i += WIDTH) set_part(out + i, widen_part_of_halves(x + i));
  for (; i < n; i++) {
    const uint32_t bits = (uint32_t)x[i] << 16;
    memcpy(out + i, &bits, 4);
  }
}

static void round_inputs(const Convolution *c, float *x, int64_t n) {
  if (c->kind != BF16) return;
  uint16_t halves[n];
  narrow(x, n, halves);
  widen_inputs(halves, n, x);
}

static int64_t stored_at(const Convolution *c, int64_t place, int64_t i, int64_t from) {
  return (place * (c->kernel - 1) + i) * c->channels + from;
}

static void read_inputs(const Convolution *c, int64_t at, int64_t n, float *out) {
  if (c->kind == BF16) widen_inputs((const uint16_t *)c->inputs + at, n, out);
  else memcpy(out, (const float *)c->inputs + at, sizeof(float) * (size_t)n);
}

static void write_inputs(const Convolution *c, int64_t at, int64_t n, const float *in) {
  if (c->kind == BF16) narrow(in, n, (uint16_t *)c->inputs + at);
  else memcpy((float *)c->inputs + at, in, sizeof(float) * (size_t)n);
}

/* The inputs of position t of a stretch, which begins at x, or of one of the positions before it. */
static const float *inputs_of(const Convolution *c, int64_t t, const float *x, int64_t stride, const float *before,
                              int64_t n) {
  return t < 0 ? before + (c->kernel - 1 + t) * n : x + t * stride;
}

void convolve(const Convolution *c, int64_t from, int64_t n, const Stretch *s, const int64_t *copies, float *x,
              int64_t stride, float *before) {
  const int64_t width = c->kernel - 1, whole = n / LANES * LANES;
  const float *weight = c->weight + from, *bias = c->bias ? c->bias + from : NULL;
  x += s->t * stride;
  for (int64_t i = 0; i < width; i++) read_inputs(c, stored_at(c, s->row, i, from), n, before + i * n);
  for (int64_t t = 0; t < s->n; t++) round_inputs(c, x + t * stride, n);
  for (int64_t t = 0; t < s->n; t++) {
    const int64_t copy = copies ? copies[s->t + t] : -1, last = t + 1 == s->n;
    for (int64_t i = 0; i < width && (last || copy >= 0); i++) {
      const float *in = inputs_of(c, t + 1 - width + i, x, stride, before, n);
      if (last) write_inputs(c, stored_at(c, s->row, i, from), n, in);
      if (copy >= 0) write_inputs(c, stored_at(c, copy, i, from), n, in);
    }
  }
  for (int64_t t = s->n - 1; t >= 0; t--) {
    const float *in[c->kernel];
    float *y = x + t * stride;
    for (int64_t k = 0; k < c->kernel; k++) in[k] = inputs_of(c, t - width + k, x, stride, before, n);
    for (int64_t i = 0; i < whole; i += LANES) {
      vf total = load(weight + i) * load(in[0] + i);
      for (int64_t k = 1; k < c->kernel; k++) total += load(weight + k * c->channels + i) * load(in[k] + i);
      store(y + i, bias ? total + load(bias + i) : total);
    }
    for (int64_t i = whole; i < n; i++) {
      float total = weight[i] * in[0][i];
      for (int64_t k = 1; k < c->kernel; k++) total += weight[k * c->channels + i] * in[k][i];
      y[i] = bias ? total + bias[i] : total;
    }
  }
}
