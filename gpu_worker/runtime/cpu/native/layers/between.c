/* What lies between two products: attention, and what is computed position by position.
 *
 * What a product gives is added to the hidden state as it is, or waits in `added`, until the next one's inputs are prepared. So
 * norms, additions and activations of a position take one pass.
 */
#include "between.h"

#include "../arithmetic/functions.h"
#include "../products/kernels/tiles.h"
#include "latents.h"
#include "rows.h"

#include <omp.h>

static void attention(const Layer *l, const Plan *p, Scratch *d) {
  const Step *s = &p->step;
  const Heads *c = &l->heads;
  const Cut *cut = p->cuts + l->shape;
  const int64_t group = c->heads / c->kv_heads, head = c->head_dim * (l->output_gate ? 2 : 1);
  const int64_t stride = l->latents ? c->heads * head : l->maps[QKV].n;
  const float *of_all = l->latents ? s->queries : s->qkv;
#pragma omp for schedule(dynamic, 1)
  for (int64_t i = cut->n_units - 1; i >= 0; i--) { /* from the end: the longest first */
    const Unit *u = cut->units + i, *next = i < omp_get_num_threads() ? u : u - omp_get_num_threads();
    const Queries queries = {of_all + u->span->t * stride + u->head * group * head, stride, head, l->output_gate};
    attend(c, u, next, queries, (Activations){s->mixed, p->packed}, d);
  }
}

/* x [all positions, width] -> those of a plan */
static void gather_rows(const Plan *p, Activations x, int64_t width) {
  for (int64_t i = 0; i < p->step.t; i++) {
    float *rows = x.at;
    if (!x.packed) memmove(rows + i * width, rows + p->inputs[i] * width, sizeof(float) * (size_t)width);
    for (int64_t c = 0; x.packed && c < width; c += DEPTH)
      memmove(packed_at(x.at, width, i, c), packed_at(x.at, width, p->inputs[i], c), sizeof(uint16_t) * DEPTH);
  }
}

/* What a product gave is added to a position's hidden state. */
static void add(const Norm *norm, float factor, float *given, float *hidden, int n) {
  normalise(given, norm, given, n);
  for (int c = 0; c < n; c++) hidden[c] += factor * given[c];
}

static void add_mixer(const Model *m, const Layer *l, const Step *s, int64_t t) {
  float *hidden = s->hidden + t * m->hidden;
  if (!mixer_is_added(l)) add(&l->mixer_out_norm, l->residual, s->added + t * m->hidden, hidden, m->hidden);
  if (l->post_norm) normalise(hidden, &l->mixer_norm, hidden, m->hidden);
}

static void add_feed_forward(const Model *m, const Layer *l, const Step *s, int64_t t) {
  float *hidden = s->hidden + t * m->hidden;
  if (!feed_forward_is_added(l))
    add(&l->feed_forward_out_norm, l->residual, s->added + t * m->hidden, hidden, m->hidden);
  if (l->post_norm) normalise(hidden, &l->feed_forward_norm, hidden, m->hidden);
}

/* The end of a layer, up to its scalar. */
static void end_layer(const Model *m, const Layer *l, const Step *s, int64_t t) {
  float *hidden = s->hidden + t * m->hidden;
  if (l->per_layer) add(&l->per_layer_norm, 1, s->added + t * m->hidden, hidden, m->hidden);
  else add_feed_forward(m, l, s, t);
  for (int c = 0; l->scalar != 1 && c < m->hidden; c++) hidden[c] *= l->scalar;
}

static const Norm none = {NO_NORM, 0, NULL, NULL};

/* The inputs of the product after a norm. row: a thread's own scratch */
static void set_normed(const Model *m, const Plan *p, const Norm *norm, int64_t t, float *row) {
  const Step *s = &p->step;
  normalise(s->hidden + t * m->hidden, norm, p->packed ? row : s->normed + t * m->hidden, m->hidden);
  if (p->packed) pack_row(row, m->hidden, t, s->normed);
}

/* The inputs of DOWN. */
static void set_acted(const Layer *l, const Plan *p, int64_t t, float *row) {
  const Step *s = &p->step;
  const int n = l->inner;
  float *gates = s->gates + t * l->maps[GATE_UP].n, *ups = l->gated ? gates + n : NULL;
  float *to = p->packed ? row : s->acted + t * n;
  if (!bend(&l->bend, gates, ups, to, n)) activate(l->activation, gates, ups, to, n);
  if (p->packed) pack_row(row, n, t, s->acted);
}

/* The inputs of ROUTER, and of experts. */
static void set_routed(const Model *m, const Plan *p, const Layer *l, int64_t t, float *row) {
  const Experts *e = l->experts;
  const Step *s = &p->step;
  const int dense = l->maps[GATE_UP].n > 0;
  if (!dense) add_mixer(m, l, s, t);
  if (e->of_stream) {
    const Norm norm = {RMS, e->eps, e->scale, NULL};
    float *to = s->streamed + t * m->hidden;
    const float by = 1.0f / sqrtf((float)m->hidden);
    normalise(s->hidden + t * m->hidden, &norm, to, m->hidden);
    for (int c = 0; c < m->hidden; c++) to[c] *= by;
  }
  if (e->dense_gate)
    s->openings[t] = sigmoid(splat_part(product_of(s->normed + t * m->hidden, e->dense_gate, m->hidden)))[0];
  if (e->norm.kind != NO_NORM) set_normed(m, p, &e->norm, t, row);
  else if (!dense) set_normed(m, p, &l->feed_forward_norm, t, row);
}

/* The inputs of PER_LAYER_OUT, of layer i. */
static void set_per_layer(const Layer *l, const Plan *p, int64_t i, int64_t t, float *row) {
  const Step *s = &p->step;
  const int n = l->per_layer;
  const float *given = s->per_layer + p->inputs[t] * s->per_layer_stride + i * n;
  activate(l->per_layer_activation, s->gates + t * n, given, p->packed ? row : s->acted + t * n, n);
  if (p->packed) pack_row(row, n, t, s->acted);
}

/* From embeddings to the first layer's inputs. */
static void finish_embeddings(const Model *m, const Step *s) {
  if (!s->extra && m->embedding_norm.kind == NO_NORM) return;
#pragma omp for schedule(static)
  for (int64_t t = 0; t < s->t; t++) {
    float *hidden = s->hidden + t * m->hidden;
    for (int c = 0; s->extra && c < m->hidden; c++) hidden[c] += s->extra[t * m->hidden + c];
    normalise(hidden, &m->embedding_norm, hidden, m->hidden);
  }
}

/* The per-layer inputs of all layers, from the first one's inputs. */
static void project_per_layer(const Model *m, const Step *s, Workspace *b) {
  if (!m->per_layer_projection.n) return;
  linear(&m->per_layer_projection, s->t, (Activations){s->hidden, 0}, (Activations){s->projected, 0}, SET, b);
  const int width = m->per_layer_width;
#pragma omp for schedule(static)
  for (int64_t at = 0; at < s->t * s->per_layer_stride; at += width) {
    float *given = s->per_layer + at, *projected = s->projected + at;
    for (int c = 0; c < width; c++) projected[c] *= m->per_layer_projection_factor;
    normalise(projected, &m->per_layer_norm, projected, width);
    for (int c = 0; c < width; c++)
      given[c] = m->per_layer_factor * (m->per_layer_embedding_factor * given[c] + projected[c]);
  }
}

void finish_inputs(const Model *m, const Step *s, Workspace *b) {
  finish_embeddings(m, s);
  project_per_layer(m, s, b);
}

/* The outputs of a mixer that stores values, y: behind a norm of each head times the gate z; of a scan times z behind a norm
 * of each group of heads. */
static void set_read(const Layer *l, const Recurrent *r, const float *x, float *y) {
  const int64_t size = (int64_t)r->each * r->value_dim;
  for (int64_t head = 0; head < r->key_heads; head++, y += size) {
    const float *values = x + r->values.first + head * r->values.apart, *z = x + r->z.first + head * r->z.apart;
    if (r->rule == SCAN) {
      const Norm norm = {l->net_norm.kind, l->net_norm.eps, l->net_norm.weight + head * size, NULL};
      activate(SILU, z, values, y, (int)size);
      normalise(y, &norm, y, (int)size);
      continue;
    }
    for (int64_t i = 0; i < size; i += r->value_dim) normalise(values + i, &l->net_norm, y + i, r->value_dim);
    activate(SILU, z, y, y, (int)size);
  }
}

/* The inputs of OUT, after a mixer that keeps a state. */
static void set_recurrent(const Layer *l, const Plan *p, int64_t t, float *row) {
  const Step *s = &p->step;
  const Recurrent *r = l->recurrent;
  const int64_t n = l->maps[OUT].k;
  const float *x = s->qkv + t * l->maps[QKV].n;
  float *to = p->packed ? row : s->mixed + t * n;
  if (r->rule != SHORT) set_read(l, r, x, to);
  else
    for (int64_t c = 0; c < n; c++) to[c] = x[n + c] * x[c];
  if (p->packed) pack_row(row, n, t, s->mixed);
}

static void mix_recurrent(const Plans *plans, const Layer *l, const Plan *p, Room *own) {
  const Step *s = &p->step;
  const int64_t inputs = l->maps[QKV].n, apart = l->maps[NET_GATES].n;
  const Advance a = {plans->stretches, plans->n_stretches, s->t, s->copies, s->qkv, apart ? s->gates : s->qkv, inputs,
                     apart ? apart : inputs};
  advance_states(l->recurrent, &a, own->recurrent);
#pragma omp for schedule(static)
  for (int64_t t = 0; t < s->t; t++) set_recurrent(l, p, t, own->workspace.inputs);
}

/* What comes before OUT: attention, or a mixer that keeps a state. */
static void run_mixer(const Model *m, const Plans *plans, const Layer *l, const Plan *p, Room *own) {
  const Plan *all = plan_at(m, plans, (l - m->layers) * MAPS + QKV);
  if (l->recurrent) mix_recurrent(plans, l, all, own);
  else if (l->latents) {
    finish_latent_heads(l, &all->step, all->inputs, &own->workspace);
    attention(l, p, &own->scratch);
  } else {
#pragma omp for schedule(static)
    for (int64_t t = 0; t < all->step.t; t++) finish_heads(l, &all->step, t, all->inputs[t], own->workspace.inputs);
    attention(l, p, &own->scratch);
  }
  if (p->step.t != all->step.t) {
#pragma omp single
    {
      gather_rows(p, (Activations){p->step.hidden, 0}, m->hidden);
      gather_rows(p, (Activations){p->step.normed, p->packed}, m->hidden);
      gather_rows(p, (Activations){p->step.mixed, p->packed}, l->latents ? l->heads.heads * l->heads.head_dim : l->maps[OUT].k);
    }
  }
  if (l->latents) finish_latents(l, &p->step, &own->workspace);
}

void prepare(const Model *m, const Plans *plans, int64_t at, Room *own) {
  float *row = own->workspace.inputs;
  const int64_t i = at / MAPS;
  const Layer *l = m->layers + i;
  const Plan *p = plan_at(m, plans, at);
  const Step *s = &p->step;
  const Norm *norm = i == m->n_layers ? &m->norm : at % MAPS == QKV ? &l->mixer_norm : &l->feed_forward_norm;
  const int own_norm = i < m->n_layers && l->feed_forward_norm.kind != NO_NORM;
  if (i < m->n_layers && l->post_norm) norm = &none;
  const int is_made = i < m->n_layers && (is_gated(l, s) || is_acted(l, p)); /* what DOWN takes */
  switch (at % MAPS) {
    case QKV:
#pragma omp for schedule(static)
      for (int64_t t = 0; t < s->t; t++) {
        if (i > 0) end_layer(m, l - 1, s, t);
        if (i < m->n_layers || s->logits) set_normed(m, p, norm, t, row);
      }
      return;
    case NET_GATES:
      if (l->latents) set_query_inputs(l, s);
      return; /* else they are those of QKV */
    case OUT: run_mixer(m, plans, l, p, own); return;
    case GATE_UP:
      if (l->parallel && !own_norm && mixer_is_added(l)) return;
#pragma omp for schedule(static)
      for (int64_t t = 0; t < s->t; t++) {
        if (!l->parallel || !own_norm) add_mixer(m, l, s, t);
        if (!l->parallel || own_norm) set_normed(m, p, norm, t, row);
      }
      return;
    case DOWN:
      if (is_made && !(l->parallel && own_norm)) return;
#pragma omp for schedule(static)
      for (int64_t t = 0; t < s->t; t++) {
        if (!is_made) set_acted(l, p, t, row);
        if (l->parallel && own_norm) add_mixer(m, l, s, t);
      }
      return;
    case ROUTER:
#pragma omp for schedule(static)
      for (int64_t t = 0; t < s->t; t++) set_routed(m, p, l, t, row);
      return;
    case PER_LAYER_GATE:
#pragma omp for schedule(static)
      for (int64_t t = 0; t < s->t; t++) {
        add_feed_forward(m, l, s, t);
        set_normed(m, p, &none, t, row);
      }
      return;
    default:
#pragma omp for schedule(static)
      for (int64_t t = 0; t < s->t; t++) set_per_layer(l, p, i, t, row);
  }
}

void finish_logits(const Model *m, const Step *s) {
  if (m->logits_factor == 1 && m->logits_cap == 0) return;
#pragma omp for schedule(static)
  for (int64_t i = 0; i < s->t; i++) {
    float *logits = s->logits + i * m->head.n;
    for (int64_t c = 0; c < m->head.n; c++) logits[c] *= m->logits_factor;
    const float cap = m->logits_cap;
    for (int64_t c = 0; cap != 0 && c < m->head.n; c += WIDTH) {
      const size_t n = (size_t)smaller(WIDTH, m->head.n - c) * sizeof(float);
      vp some = {0};
      memcpy(&some, logits + c, n);
      some = cap * vtanh(some / cap);
      memcpy(logits + c, &some, n);
    }
  }
}
