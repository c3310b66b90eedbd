/* Plans of a step: its positions as attention computes them, its maps, and the memory of a thread. */
#include "plans.h"

#include "../products/tiles.h"

Map map_at(const Model *m, const Plan *p, int64_t at) {
  const Step *s = &p->step;
  const Activations normed = {s->normed, p->packed}, mixed = {s->mixed, p->packed}, acted = {s->acted, p->packed};
  const Activations qkv = {s->qkv, 0}, hidden = {s->hidden, 0}, gates = {s->gates, 0}, logits = {s->logits, 0};
  if (at == (int64_t)m->n_layers * MAPS) return (Map){&m->head, s->t, normed, logits, SET};
  const Layer *l = m->layers + at / MAPS;
  switch (at % MAPS) {
    case QKV: return (Map){&l->qkv, s->t, normed, qkv, SET};
    case OUT: return (Map){&l->out, s->t, mixed, hidden, ADD};
    case GATE_UP:
      if (is_gated(m, l, s)) return (Map){&l->gate_up, s->t, normed, acted, GATED};
      return (Map){&l->gate_up, s->t, normed, gates, SET};
    default: return (Map){&l->down, s->t, acted, hidden, ADD};
  }
}

/* The most terms of a sum, those of an adapter's B among them. */
static int64_t widest(const Model *m, const Step *s) {
  const int64_t of[] = {m->hidden, m->inner, (int64_t)m->cache.heads * m->cache.head_dim, s->reduced_stride};
  int64_t k = 0;
  for (int i = 0; i < 4; i++) k = of[i] > k ? of[i] : k;
  return k;
}

Room new_room(const Model *m, const Step *s, Scratch *scratch) {
  Room r;
  for (int i = 0; i < 2; i++) {
    r.lists[i].inputs = take(scratch, s->t * (int64_t)sizeof(int64_t));
    r.lists[i].spans = take(scratch, s->t * (int64_t)sizeof(Span));
    r.lists[i].units = take(scratch, s->t * m->cache.kv_heads * (int64_t)sizeof(Unit));
    r.lists[i].runs = take(scratch, s->t * (int64_t)sizeof(Run));
  }
  r.bench = new_bench(s->t, widest(m, s), scratch);
  r.desk = new_desk(&m->cache, smaller(s->t, span_length(&m->cache)), scratch);
  return r;
}

/* The bytes of scratch that each thread of a step needs. */
int64_t petiole_scratch(const Model *m, const Step *s) {
  Scratch none = {NULL, 0};
  new_room(m, s, &none);
  return none.used;
}

/* Whether what the maps of a step take can be packed: they all multiply on tiles, and packed it is no larger, which takes
 * SIDE rows. */
static int can_pack(const Model *m, const Step *s) {
#ifdef TILES
  if (s->t < SIDE || s->adapters || m->library || m->hidden % DEPTH || m->inner % DEPTH || m->cache.head_dim % DEPTH)
    return 0;
  for (int64_t i = 0; i < m->n_layers; i++) {
    const Layer *l = m->layers + i;
    if (!HALF_INPUTS(l->qkv.kind) || !HALF_INPUTS(l->out.kind)) return 0;
    if (!HALF_INPUTS(l->gate_up.kind) || !HALF_INPUTS(l->down.kind)) return 0;
  }
  return !s->logits || HALF_INPUTS(m->head.kind);
#else
  return (void)m, (void)s, 0;
#endif
}

/* A plan of the first `n` inputs of a list. */
static Plan new_plan(const Model *m, const Step *s, int64_t n, int n_threads, const Lists *l) {
  Plan p = {.step = *s, .inputs = l->inputs, .units = l->units, .runs = l->runs, .packed = can_pack(m, s)};
  p.step.t = n;
  const int64_t n_spans = find_spans(&m->cache, n, l->inputs, s->rows, s->positions, s->limits, l->spans);
  p.n_units = find_units(&m->cache, l->spans, n_spans, n_threads, l->units);
  p.n_runs = s->adapters ? find_runs(n, l->inputs, s->adapters, l->runs) : 0;
  return p;
}

Plans new_plans(const Model *m, const Step *s, int n_threads, const Lists lists[2]) {
  for (int64_t i = 0; i < s->t; i++) lists[0].inputs[i] = i;
  for (int64_t i = 0; i < s->o; i++) lists[1].inputs[i] = s->outputs[i] - s->from;
  const Plan all = new_plan(m, s, s->t, n_threads, lists);
  return (Plans){all, s->o == s->t ? all : new_plan(m, s, s->o, n_threads, lists + 1)};
}

const Plan *plan_at(const Model *m, const Plans *plans, int64_t at) {
  return at <= (m->n_layers - 1) * (int64_t)MAPS + QKV ? &plans->all : &plans->last;
}
