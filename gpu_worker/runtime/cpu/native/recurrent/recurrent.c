/* What a mixer that keeps a state makes of a step: its convolution, and what it stores.
 *
 * Threads divide heads, or channels, and the rows of the step. What one of them computes of a row follows the order of
 * positions, and no sum crosses threads, so neither other rows nor the number of threads changes a bit.
 */
#include "recurrent.h"

#include <float.h>

#include "../arithmetic/functions.h"
#include "rules.h"

#define CHANNELS 128    /* of a short convolution, that a thread computes in one go */
#define LEAST_LENGTH 1e-6f /* under the root of the length of queries and keys */
#define LINEAR 20.0f    /* softplus(x) is x from here on */

static int64_t value_heads(const Recurrent *r) { return (int64_t)r->key_heads * r->each; }

static int64_t widest(const Recurrent *r) { return r->rule == SHORT ? CHANNELS : larger_of(r->key_dim, r->value_dim); }

int64_t petiole_recurrent_room(const Recurrent *r) {
  return larger_of((r->convolution.kernel - 1) * widest(r), (int64_t)r->key_dim * PANEL);
}

/* x [n] gets the length `length` */
static void set_length(float *x, int64_t n, float length) {
  vf squares = {0};
  const int64_t whole = n / LANES * LANES;
  for (int64_t i = 0; i < whole; i += LANES) squares += load(x + i) * load(x + i);
  float total = sum(squares);
  for (int64_t i = whole; i < n; i++) total += x[i] * x[i];
  const float by = length / sqrtf(total + LEAST_LENGTH);
  for (int64_t i = 0; i < n; i++) x[i] *= by;
}

/* Head i of queries, then keys, then values, after the convolution and its activation. The delta rule takes queries and keys
 * of their lengths. */
static void finish_head(const Recurrent *r, const Advance *a, const Stretch *s, int64_t i, float *room) {
  const int64_t keys = r->key_heads, value = i - 2 * keys, dim = value < 0 ? r->key_dim : r->value_dim;
  const Part part = i < keys ? r->queries : value < 0 ? r->keys : r->values;
  const int64_t own = value < 0 ? i % keys : value, each = value < 0 ? 1 : r->each;
  float *x = a->inputs + part.first + own / each * part.apart + own % each * dim;
  convolve(&r->convolution, part.channel + own * dim, dim, s, a->copies, x, a->inputs_stride, room);
  for (int64_t t = s->t; t < s->t + s->n; t++) {
    float *at = x + t * a->inputs_stride;
    activate(SILU, at, NULL, at, (int)dim);
    if (value < 0 && r->rule == DELTA_RULE) set_length(at, dim, i < keys ? 1.0f / sqrtf((float)dim) : 1.0f);
  }
}

static int64_t gate_of(const Recurrent *r, Part part, int64_t i) { return part.first + i / r->each * part.apart + i % r->each; }

/* In the delta rule b becomes the share of the way to the new values, and a how much of what is stored is kept. In a scan a
 * becomes the time that a position takes. */
static void finish_head_gates(const Recurrent *r, float *gates) {
  for (int64_t i = 0; i < value_heads(r); i++) {
    float *a = gates + gate_of(r, r->a, i), *b = gates + gate_of(r, r->b, i);
    const float x = *a + r->bias[i];
    *a = x > LINEAR ? x : log1pf(expf(x));
    if (r->rule == SCAN) continue;
    *b = 1.0f / (1.0f + expf(-*b));
    *a = expf(r->fading[i] * *a);
  }
}

/* PANEL numbers -> codes and their scale */
static void round_line(const float *x, int8_t *codes, float *scale) {
  float most = 0.0f;
  for (int i = 0; i < PANEL; i++) most = fmaxf(most, fabsf(x[i]));
  *scale = most / 127.0f;
  const float by = *scale > FLT_MIN ? 1.0f / *scale : 0.0f;
  for (int i = 0; i < PANEL; i++) codes[i] = (int8_t)fminf(fmaxf(rintf(x[i] * by), -127.0f), 127.0f);
}

/* What a head has stored at n dimensions, from number `at` of its place on -> the copy at another place */
static void copy_lines(const Recurrent *r, const float *stored, int64_t place, int64_t of_place, int64_t at, int64_t n) {
  for (int64_t k = 0; k < r->key_dim; k++) {
    const int64_t to = (r->codes ? place - r->places : place) * of_place + at + k * n;
    if (r->codes)
      round_line(stored + k * PANEL, r->codes + to, r->scales + to / PANEL);
    else
      memcpy(r->matrices + to, stored + k * PANEL, sizeof(float) * (size_t)n);
  }
}

/* What a position brings to head i of values. x, gates: of this position */
static Change change_of(const Recurrent *r, int64_t i, const float *x, const float *gates) {
  const int64_t head = i / r->run % r->key_heads;
  const float *query = x + r->queries.first + head * r->queries.apart, *key = x + r->keys.first + head * r->keys.apart;
  const float a = gates[gate_of(r, r->a, i)];
  if (r->rule == SCAN) return (Change){query, key, expf(r->fading[i] * a), a, r->skip[i]};
  return (Change){query, key, a, gates[gate_of(r, r->b, i)], 0.0f};
}

/* The rule at up to PANEL dimensions, from `from` on, of head i of values. */
static void store_values(const Recurrent *r, const Advance *a, const Stretch *s, int64_t i, int64_t from, float *room) {
  const int64_t d = r->key_dim, n = smaller(PANEL, r->value_dim - from);
  const int64_t of_place = value_heads(r) * d * r->value_dim, at = d * (i * r->value_dim + from);
  float *own = r->matrices + s->row * of_place + at, *stored = own;
  if (n < PANEL) {
    stored = memset(room, 0, sizeof(float) * (size_t)(d * PANEL));
    for (int64_t k = 0; k < d; k++) memcpy(stored + k * PANEL, own + k * n, sizeof(float) * (size_t)n);
  }
  for (int64_t t = s->t; t < s->t + s->n; t++) {
    float *x = a->inputs + t * a->inputs_stride;
    float *values = x + r->values.first + i / r->each * r->values.apart + i % r->each * r->value_dim + from;
    const Change change = change_of(r, i, x, a->gates + t * a->gates_stride);
    float some[PANEL] = {0};
    memcpy(some, values, sizeof(float) * (size_t)n);
    if (r->rule == SCAN) apply_scan(stored, d, &change, some);
    else apply_delta_rule(stored, d, &change, some);
    memcpy(values, some, sizeof(float) * (size_t)n);
    const int64_t copy = a->copies ? a->copies[t] : -1, last = t + 1 == s->t + s->n;
    if (copy >= 0) copy_lines(r, stored, copy, of_place, at, n);
    for (int64_t k = 0; k < d && last && n < PANEL; k++)
      memcpy(own + k * n, stored + k * PANEL, sizeof(float) * (size_t)n);
  }
}

static void advance_values(const Recurrent *r, const Advance *a, float *room) {
  const int64_t heads = value_heads(r), blocks = parts(r->value_dim, PANEL);
#pragma omp for schedule(static) nowait
  for (int64_t t = 0; t < a->t; t++) finish_head_gates(r, a->gates + t * a->gates_stride);
#pragma omp for schedule(dynamic, 1) collapse(2)
  for (int64_t i = 0; i < a->n; i++)
    for (int64_t head = 0; head < 2 * r->key_heads + heads; head++) finish_head(r, a, a->stretches + i, head, room);
#pragma omp for schedule(dynamic, 1) collapse(2)
  for (int64_t i = 0; i < a->n; i++)
    for (int64_t unit = 0; unit < heads * blocks; unit++)
      store_values(r, a, a->stretches + i, unit / blocks, unit % blocks * PANEL, room);
}

/* A few channels between their gates: b * x, then the convolution. */
static void advance_channels(const Recurrent *r, const Advance *a, const Stretch *s, int64_t from, float *room) {
  const int64_t channels = r->convolution.channels, n = smaller(CHANNELS, channels - from);
  for (int64_t t = s->t; t < s->t + s->n; t++) {
    float *b = a->inputs + t * a->inputs_stride + from;
    const float *x = b + 2 * channels;
    for (int64_t i = 0; i < n; i++) b[i] *= x[i];
  }
  convolve(&r->convolution, from, n, s, a->copies, a->inputs + from, a->inputs_stride, room);
}

void advance_states(const Recurrent *r, const Advance *a, float *room) {
  if (r->rule != SHORT) {
    advance_values(r, a, room);
    return;
  }
#pragma omp for schedule(dynamic, 1) collapse(2)
  for (int64_t i = 0; i < a->n; i++)
    for (int64_t from = 0; from < r->convolution.channels; from += CHANNELS)
      advance_channels(r, a, a->stretches + i, from, room);
}
