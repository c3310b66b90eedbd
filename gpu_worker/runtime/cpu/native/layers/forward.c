/* A decoder's forward on a CPU, from token ids to logits in one call.
 *
 * If the caches hold the weights, each thread computes its own share of the sequences from the first layer to the last
 * (`share`): no thread waits, and the output of one map is in the thread's own cache for the next map. For large weights,
 * few sequences or one long prompt, all threads work together: they divide the outputs of each map, so that each weight
 * is read once, and meet after the map.
 *
 * Activations are float32, or packed in bfloat16 (`can_pack`). Weights and the KV cache are read as they are stored, and
 * widened in registers. If the processor multiplies bfloat16 (DOT), activations are rounded to bfloat16 instead. The
 * result for a position depends on that position alone: every sum runs over its terms in one fixed order, whatever the
 * batch, the number of threads or the blocking. So a sequence gets the same bits alone and among others, in one prefill
 * and in chunks. products/panels.c and attention/attend.c say how.
 *
 * Nothing reads what the last layer makes of a position without logits, except its key and value. So behind these that
 * layer computes the outputs alone.
 *
 * Vectors are those of the compiler (vector_size), not of one instruction set.
 */
#include <omp.h>

#include "../arithmetic/functions.h"
#include "../products/pack.h"
#include "../products/tiles.h"
#include "plans.h"
#include "rows.h"
#include "shares.h"

#ifndef REPORT_S
#define REPORT_S 1.0
#endif

static void attention(const Layer *l, const Plan *p, Desk *d) {
  const Step *s = &p->step;
  const Heads *c = &l->heads;
  const Cut *cut = p->cuts + l->shape;
  const int64_t group = c->heads / c->kv_heads, stride = l->maps[QKV].n, head = c->head_dim * (l->output_gate ? 2 : 1);
#pragma omp for schedule(dynamic, 1)
  for (int64_t i = cut->n_units - 1; i >= 0; i--) { /* from the end: the longest first */
    const Unit *u = cut->units + i, *next = i < omp_get_num_threads() ? u : u - omp_get_num_threads();
    const Queries queries = {s->qkv + u->span->t * stride + u->head * group * head, stride, head, l->output_gate};
    attend(c, u, next, queries, (Activations){s->mixed, p->packed}, d);
  }
}

/* What the adapters add to a map. */
static void deltas(const Map *map, int64_t at, const Plan *p, Bench *b) {
  const Step *s = &p->step;
  const int64_t delta = at / MAPS * ADAPTED + at % MAPS;
  if (p->n_runs && at % MAPS < ADAPTED)
    add_deltas(p->runs, p->n_runs, delta, map->x.at, map->l->k, map->y.at, map->l->n, s->reduced, s->reduced_stride, b);
}

/* x [all positions, width] -> those of a plan */
static void pick_rows(const Plan *p, Activations x, int64_t width) {
  for (int64_t i = 0; i < p->step.t; i++) {
    float *rows = x.at;
    if (!x.packed) memmove(rows + i * width, rows + p->inputs[i] * width, sizeof(float) * (size_t)width);
    for (int64_t c = 0; x.packed && c < width; c += DEPTH)
      memmove(packed_at(x.at, width, i, c), packed_at(x.at, width, p->inputs[i], c), sizeof(uint16_t) * DEPTH);
  }
}

/* What a map gave is added to a position's hidden state. */
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
  if (l->side) add(&l->side_norm, 1, s->added + t * m->hidden, hidden, m->hidden);
  else add_feed_forward(m, l, s, t);
  for (int c = 0; l->scalar != 1 && c < m->hidden; c++) hidden[c] *= l->scalar;
}

static const Norm none = {NO_NORM, 0, NULL, NULL};

/* The inputs of the map behind a norm. row: a thread's own scratch */
static void set_normed(const Model *m, const Plan *p, const Norm *norm, int64_t t, float *row) {
  const Step *s = &p->step;
  normalise(s->hidden + t * m->hidden, norm, p->packed ? row : s->normed + t * m->hidden, m->hidden);
  if (p->packed) pack_row(row, m->hidden, t, s->normed);
}

/* Those of DOWN. */
static void set_acted(const Layer *l, const Plan *p, int64_t t, float *row) {
  const Step *s = &p->step;
  const int n = l->inner;
  float *gates = s->gates + t * l->maps[GATE_UP].n, *ups = l->gated ? gates + n : NULL;
  float *to = p->packed ? row : s->acted + t * n;
  for (int c = 0; l->clamp != 0 && c < n; c++) {
    float *up = ups ? ups + c : gates + c;
    if (ups && gates[c] > l->clamp) gates[c] = l->clamp;
    *up = *up > l->clamp ? l->clamp : *up < -l->clamp ? -l->clamp : *up;
  }
  activate(l->activation, gates, ups, to, n);
  if (p->packed) pack_row(row, n, t, s->acted);
}

/* Those of SIDE_OUT, of layer i. */
static void set_side(const Layer *l, const Plan *p, int64_t i, int64_t t, float *row) {
  const Step *s = &p->step;
  const float *side = s->side + p->inputs[t] * s->side_stride + i * l->side;
  activate(l->side_activation, s->gates + t * l->side, side, p->packed ? row : s->acted + t * l->side, l->side);
  if (p->packed) pack_row(row, l->side, t, s->acted);
}

/* From embeddings to the first layer's inputs. */
static void finish_inputs(const Model *m, const Step *s) {
  if (!s->extra && m->embedding_norm.kind == NO_NORM) return;
#pragma omp for schedule(static)
  for (int64_t t = 0; t < s->t; t++) {
    float *hidden = s->hidden + t * m->hidden;
    for (int c = 0; s->extra && c < m->hidden; c++) hidden[c] += s->extra[t * m->hidden + c];
    normalise(hidden, &m->embedding_norm, hidden, m->hidden);
  }
}

/* The side inputs of all layers, from the first one's inputs. */
static void project_sides(const Model *m, const Step *s, Bench *b) {
  if (!m->side_projection.n) return;
  linear(&m->side_projection, s->t, (Activations){s->hidden, 0}, (Activations){s->projected, 0}, SET, b);
  const int width = m->side_width;
#pragma omp for schedule(static)
  for (int64_t at = 0; at < s->t * s->side_stride; at += width) {
    float *side = s->side + at, *projected = s->projected + at;
    for (int c = 0; c < width; c++) projected[c] *= m->side_projection_factor;
    normalise(projected, &m->side_norm, projected, width);
    for (int c = 0; c < width; c++) side[c] = m->side_factor * (m->side_embedding_factor * side[c] + projected[c]);
  }
}

/* What comes before OUT: attention. */
static void mix(const Model *m, const Plans *plans, const Layer *l, const Plan *p, Room *own) {
  const Plan *all = plan_at(m, plans, (l - m->layers) * MAPS + QKV);
#pragma omp for schedule(static)
  for (int64_t t = 0; t < all->step.t; t++) finish_heads(l, &all->step, t, all->inputs[t], own->bench.inputs);
  attention(l, p, &own->desk);
  if (p->step.t == all->step.t) return;
#pragma omp single
  {
    pick_rows(p, (Activations){p->step.hidden, 0}, m->hidden);
    pick_rows(p, (Activations){p->step.normed, p->packed}, m->hidden);
    pick_rows(p, (Activations){p->step.mixed, p->packed}, (int64_t)l->heads.heads * l->heads.head_dim);
  }
}

/* What comes before a map: its inputs, and before them what the map before it gave. */
static void prepare(const Model *m, const Plans *plans, int64_t at, Room *own) {
  float *row = own->bench.inputs;
  const int64_t i = at / MAPS;
  const Layer *l = m->layers + i;
  const Plan *p = plan_at(m, plans, at);
  const Step *s = &p->step;
  const Norm *norm = i == m->n_layers ? &m->norm : at % MAPS == QKV ? &l->mixer_norm : &l->feed_forward_norm;
  const int own_norm = i < m->n_layers && l->feed_forward_norm.kind != NO_NORM;
  if (i < m->n_layers && l->post_norm) norm = &none;
  switch (at % MAPS) {
    case QKV:
#pragma omp for schedule(static)
      for (int64_t t = 0; t < s->t; t++) {
        if (i > 0) end_layer(m, l - 1, s, t);
        if (i < m->n_layers || s->logits) set_normed(m, p, norm, t, row);
      }
      return;
    case OUT: mix(m, plans, l, p, own); return;
    case GATE_UP:
      if (l->parallel && !own_norm && mixer_is_added(l)) return;
#pragma omp for schedule(static)
      for (int64_t t = 0; t < s->t; t++) {
        if (!l->parallel || !own_norm) add_mixer(m, l, s, t);
        if (!l->parallel || own_norm) set_normed(m, p, norm, t, row);
      }
      return;
    case DOWN:
      if (is_gated(l, s) && !(l->parallel && own_norm)) return;
#pragma omp for schedule(static)
      for (int64_t t = 0; t < s->t; t++) {
        if (!is_gated(l, s)) set_acted(l, p, t, row);
        if (l->parallel && own_norm) add_mixer(m, l, s, t);
      }
      return;
    case SIDE_GATE:
#pragma omp for schedule(static)
      for (int64_t t = 0; t < s->t; t++) {
        add_feed_forward(m, l, s, t);
        set_normed(m, p, &none, t, row);
      }
      return;
    default:
#pragma omp for schedule(static)
      for (int64_t t = 0; t < s->t; t++) set_side(l, p, i, t, row);
  }
}

/* What becomes of logits. */
static void finish_logits(const Model *m, const Step *s) {
  if (m->logits_factor == 1 && m->logits_cap == 0) return;
#pragma omp for schedule(static)
  for (int64_t i = 0; i < s->t; i++) {
    float *logits = s->logits + i * m->head.n;
    for (int64_t c = 0; c < m->head.n; c++) logits[c] *= m->logits_factor;
    const float cap = m->logits_cap;
    for (int64_t c = 0; cap != 0 && c < m->head.n; c += LANES) {
      const size_t n = (size_t)smaller(LANES, m->head.n - c) * sizeof(float);
      vf some = {0};
      memcpy(&some, logits + c, n);
      some = cap * hyperbolic_tangent(some / cap);
      memcpy(logits + c, &some, n);
    }
  }
}

/* Says that a long step makes progress. */
static void report(const Step *s, double *last) {
  const double now = omp_get_wtime();
  if (!s->progress || now - *last < REPORT_S) return;
  *last = now;
  s->progress();
}

/* What has been done of a map. */
enum { NOTHING_YET = 0, PREPARED = 1, MULTIPLIED = 2 };

/* A step or a share of one, on `n_threads` threads. The threads run one region up to each map that is the library's,
 * which has threads of its own. Returns how many maps the library has failed at: they are computed here. */
static int compute(const Model *m, const Step *s, int n_threads, const Library *library) {
  const Room first = new_room(m, s, &(Scratch){s->scratch, 0});
  const Plans plans = new_plans(m, s, n_threads, first.lists);
  const int64_t head = (int64_t)m->n_layers * MAPS, n_maps = head + 1;
  int stage = NOTHING_YET, failures = 0; /* of the map `from` */
  double reported = omp_get_wtime();
  for (int64_t from = 0, end; from < n_maps; from = end) {
    for (end = stage ? from + 1 : from; end < n_maps; end++) {
      const Map map = map_at(m, plan_at(m, &plans, end), end);
      if (library && of_library(map.l, map.rows)) break;
    }
#pragma omp parallel num_threads(n_threads)
    {
      const uint32_t before = begin_tiles();
      Room own = new_room(m, s, &(Scratch){s->scratch + omp_get_thread_num() * s->scratch_stride, 0});
      own.bench.packed = first.bench.packed;
      if (!from && !stage && s->token_ids) embed(&m->head, s->t, s->token_ids, m->embedding_factor, s->hidden);
      if (!from && !stage) {
        finish_inputs(m, s);
        project_sides(m, s, &own.bench);
      }
      for (int64_t at = from; at < smaller(end + 1, n_maps); at++) {
        const Plan *plan = plan_at(m, &plans, at);
        const Map map = map_at(m, plan, at);
        const int reached = at == from ? stage : NOTHING_YET;
        if (at < head && !map.l->n) continue;
        if (reached < PREPARED) prepare(m, &plans, at, &own);
        if (at == end || (at == head && !s->logits)) break;
        if (reached < MULTIPLIED) linear(map.l, map.rows, map.x, map.y, map.how, &own.bench);
        if (at < head) deltas(&map, at, plan, &own.bench);
        else finish_logits(m, &plan->step);
        if (omp_get_thread_num() == 0) report(s, &reported);
      }
      end_tiles(before);
    }
    if (end == n_maps) break;
    const Map map = map_at(m, plan_at(m, &plans, end), end);
    const int made = library_linear(library, map.l, map.rows, map.x.at, map.y.at, map.how == ADD, s->halves, n_threads);
    stage = made ? MULTIPLIED : PREPARED;
    failures += !made;
  }
  return failures;
}

/* Whether all adapters of a step have the sizes of the model's maps. Others would write beyond a row's outputs. */
static int adapters_fit(const Model *m, const Step *s) {
  const Delta *last = NULL;
  for (int64_t t = 0; s->adapters && t < s->t; t++) {
    const Delta *deltas = s->adapters[t];
    if (!deltas || deltas == last) continue;
    for (int64_t i = 0; i < m->n_layers; i++) {
      for (int64_t at = 0; at < ADAPTED; at++)
        if (!delta_fits(deltas + i * ADAPTED + at, m->layers[i].maps + at, s->reduced_stride)) return 0;
    }
    last = deltas;
  }
  return 1;
}

/* Returns how many maps the library has failed at, or -1 if an adapter does not fit: then nothing is computed. Shares are computed without it: its threads are those of a step. */
int32_t petiole_forward(const Model *m, const Step *s) {
  Step shares[s->n_threads];
  if (!adapters_fit(m, s)) return -1;
  if (!share(m, s, shares)) return compute(m, s, s->n_threads, m->library);
#pragma omp parallel for schedule(static, 1) num_threads(s->n_threads)
  for (int i = 0; i < s->n_threads; i++) compute(m, shares + i, 1, NULL);
  for (int i = 0; i < s->n_threads; i++) /* of each share its outputs' */
    memmove(s->hidden + (shares[i].outputs - s->outputs) * m->hidden, shares[i].hidden,
            sizeof(float) * (size_t)(shares[i].o * m->hidden));
  return 0;
}
