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

static void rotate_and_keep(const Model *m, const Layer *l, int64_t i, const Step *s) {
  const Cache *cache = &m->cache;
  const int d = cache->head_dim, wide = (cache->heads + 2 * cache->kv_heads) * d;
  const int64_t token = (int64_t)cache->kv_heads * d;
#pragma omp for schedule(static)
  for (int64_t t = 0; t < s->t; t++) {
    float *q = s->qkv + t * wide, *k = q + cache->heads * d, *v = k + token;
    const int64_t at = (i * cache->n_slots + slot_of(cache, s->rows[t], s->positions[t])) * token;
    for (int h = 0; h < cache->heads + cache->kv_heads; h++) {
      const float *weight = h < cache->heads ? l->q_norm : l->k_norm;
      if (weight) rms_norm(q + h * d, weight, q + h * d, d, m->eps);
      if (m->rotary) rotate(q + h * d, m->rotary + s->rotary[t] * d, d);
    }
    keep(cache->kv_kind, cache->keys, at, k, (int)token);
    keep(cache->kv_kind, cache->values, at, v, (int)token);
  }
}

static void attention(const Model *m, int64_t layer, const Plan *p, Desk *d) {
  const Step *s = &p->step;
  const Cache *cache = &m->cache;
  const int64_t window = m->layers[layer].window, q = (int64_t)cache->heads * cache->head_dim;
  const int64_t wide = q + 2 * (int64_t)cache->kv_heads * cache->head_dim;
  const int64_t group = q / cache->kv_heads;
#pragma omp for schedule(dynamic, 1)
  for (int64_t i = p->n_units - 1; i >= 0; i--) { /* from the end: the longest first */
    const Unit *u = p->units + i, *next = i < omp_get_num_threads() ? u : u - omp_get_num_threads();
    attend(cache, layer, window, u, next, s->qkv + u->span->t * wide + u->head * group, wide,
           (Activations){s->mixed, p->packed}, d);
  }
}

/* row: a thread's own scratch */
static void norms(const Model *m, const Plan *p, const Norm *norm, float *row) {
  const Step *s = &p->step;
#pragma omp for schedule(static)
  for (int64_t t = 0; t < s->t; t++) {
    normalise(s->hidden + t * m->hidden, norm, p->packed ? row : s->normed + t * m->hidden, m->hidden, m->eps);
    if (p->packed) pack_row(row, m->hidden, t, s->normed);
  }
}

/* What the adapters add to a map. */
static void deltas(const Map *map, int64_t at, const Plan *p, Bench *b) {
  const Step *s = &p->step;
  if (p->n_runs)
    add_deltas(p->runs, p->n_runs, at, map->x.at, map->l->k, map->y.at, map->l->n, s->reduced, s->reduced_stride, b);
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

/* What comes before a map: its inputs. */
static void prepare(const Model *m, const Plans *plans, int64_t at, Room *own) {
  float *row = own->bench.inputs;
  const int64_t i = at / MAPS;
  const Layer *l = m->layers + i;
  const Plan *p = plan_at(m, plans, at);
  const Step *s = &p->step;
  if (i == m->n_layers) norms(m, p, &m->norm, row);
  else if (at % MAPS == QKV) norms(m, p, &l->input_norm, row);
  else if (at % MAPS == GATE_UP) {
    if (l->post_norm.weight) norms(m, p, &l->post_norm, row);
  } else if (at % MAPS == OUT) {
    rotate_and_keep(m, l, i, &plans->all.step);
    attention(m, i, p, &own->desk);
    if (s->t == plans->all.step.t) return;
#pragma omp single
    {
      pick_rows(p, (Activations){s->hidden, 0}, m->hidden);
      pick_rows(p, (Activations){s->normed, p->packed}, m->hidden);
      pick_rows(p, (Activations){s->mixed, p->packed}, (int64_t)m->cache.heads * m->cache.head_dim);
    }
  } else if (!is_gated(m, l, s)) {
    const int64_t gates = l->gate_up.n, gated = gates > m->inner;
#pragma omp for schedule(static)
    for (int64_t t = 0; t < s->t; t++) {
      const float *in = s->gates + t * gates;
      float *to = p->packed ? row : s->acted + t * m->inner;
      if (gated) silu_mul(in, in + m->inner, to, m->inner);
      else gelu(in, to, m->inner);
      if (p->packed) pack_row(row, m->inner, t, s->acted);
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
  const int64_t head = (int64_t)m->n_layers * MAPS, n_maps = head + (s->logits != NULL);
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
      if (!from && !stage && s->token_ids) embed(&m->head, s->t, s->token_ids, s->hidden);
      for (int64_t at = from; at < smaller(end + 1, n_maps); at++) {
        const Plan *plan = plan_at(m, &plans, at);
        const Map map = map_at(m, plan, at);
        const int reached = at == from ? stage : NOTHING_YET;
        if (reached < PREPARED) prepare(m, &plans, at, &own);
        if (at == end) break;
        if (reached < MULTIPLIED) linear(map.l, map.rows, map.x, map.y, map.how, &own.bench);
        if (at < head) deltas(&map, at, plan, &own.bench);
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
      const Linear *of[MAPS] = {&m->layers[i].qkv, &m->layers[i].out, &m->layers[i].gate_up, &m->layers[i].down};
      for (int64_t at = 0; at < MAPS; at++)
        if (!delta_fits(deltas + i * MAPS + at, of[at], s->reduced_stride)) return 0;
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
