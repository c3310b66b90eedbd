/* Attention over latents: what is stored of a position is one vector [turning | latent], which all heads share as their key
 * and as their value.
 *
 * Queries are brought into the space of the latents, and sums of latents out of it, by matrices of each head. Their inputs and
 * outputs lie head by head, so that each matrix multiplies all positions in one go.
 */
#include "latents.h"

#include "rows.h"

/* y [heads, rows, n], each head with its matrix of x [heads, rows, k] */
static void multiply_heads(const Linear *each, int heads, int64_t rows, const float *x, float *y, Workspace *b) {
  const int64_t units = units_of(each, rows);
  b->held = NULL;
#pragma omp for schedule(guided, 1)
  for (int64_t i = 0; i < heads * units; i++) {
    const int64_t h = i / units;
    linear_unit(each + h, i % units, rows, x + h * rows * each->k, y + h * rows * each->n, b);
  }
  b->held = NULL;
}

void set_query_inputs(const Layer *l, const Step *s) {
  const int64_t n = l->maps[NET_GATES].k;
#pragma omp for schedule(static)
  for (int64_t t = 0; t < s->t; t++)
    normalise(s->qkv + t * l->maps[QKV].n, &l->latents->query_norm, s->mixed + t * n, (int)n);
}

/* The queries of position r, and its key, which are those of position t of a step. given: its heads' [own | turning]; stored:
 * its [latent | turning]; row: room for a key */
static void finish_latent_position(const Layer *l, const Step *s, int64_t r, int64_t t, const float *given, const float *stored,
                                   float *row) {
  const Latents *of = l->latents;
  const Heads *c = &l->heads;
  const int64_t d = c->head_dim, each = of->own + of->turning;
  const float *turn = l->rotary ? l->rotary + s->rotary[t] * l->rotary_dims : NULL;
  for (int64_t h = 0; h < c->heads; h++) {
    float *q = s->queries + (r * c->heads + h) * d;
    memcpy(q, given + h * each + of->own, sizeof(float) * (size_t)of->turning);
    if (turn) rotate(q, turn, l->rotary_dims, l->neighbours);
    memcpy(q + of->turning, s->head_out + (h * s->t + r) * of->rank, sizeof(float) * (size_t)of->rank);
  }
  memcpy(row, stored + of->rank, sizeof(float) * (size_t)of->turning);
  if (turn) rotate(row, turn, l->rotary_dims, l->neighbours);
  normalise(stored, &of->norm, row + of->turning, of->rank);
  write_kv(c->kv_kind, c->keys, slot_of(c, s->rows[t], s->positions[t]) * d, row, (int)d);
}

void finish_latent_heads(const Layer *l, const Step *s, const int64_t *inputs, Workspace *b) {
  const Latents *of = l->latents;
  const int64_t apart = l->maps[QKV].n, ranked = l->maps[NET_GATES].n, each = of->own + of->turning;
  const float *queries = ranked ? s->gates : s->qkv;
  const int64_t stride = ranked ? ranked : apart;
#pragma omp for schedule(static)
  for (int64_t t = 0; t < s->t; t++)
    for (int64_t h = 0; h < l->heads.heads; h++)
      memcpy(s->head_in + (h * s->t + t) * of->own, queries + t * stride + h * each, sizeof(float) * (size_t)of->own);
  multiply_heads(of->keys, l->heads.heads, s->t, s->head_in, s->head_out, b);
#pragma omp for schedule(static)
  for (int64_t t = 0; t < s->t; t++)
    finish_latent_position(l, s, t, inputs[t], queries + t * stride, s->qkv + (t + 1) * apart - l->heads.head_dim, b->inputs);
}

void finish_latents(const Layer *l, const Step *s, Workspace *b) {
  const Latents *of = l->latents;
  const int64_t d = l->heads.head_dim, heads = l->heads.heads;
#pragma omp for schedule(static)
  for (int64_t t = 0; t < s->t; t++)
    for (int64_t h = 0; h < heads; h++)
      memcpy(s->head_in + (h * s->t + t) * of->rank, s->mixed + (t * heads + h) * d + of->turning, sizeof(float) * (size_t)of->rank);
  multiply_heads(of->values, (int)heads, s->t, s->head_in, s->head_out, b);
#pragma omp for schedule(static)
  for (int64_t t = 0; t < s->t; t++)
    for (int64_t h = 0; h < heads; h++)
      memcpy(s->mixed + (t * heads + h) * of->value, s->head_out + (h * s->t + t) * of->value, sizeof(float) * (size_t)of->value);
}
