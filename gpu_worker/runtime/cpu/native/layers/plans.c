/* Plans of a step: its positions as attention computes them, its matrices, and the memory of a thread. */
#include "plans.h"

#include "../products/kernels/tiles.h"

Map map_at(const Model *m, const Plan *p, int64_t at) {
  const Step *s = &p->step;
  const Activations normed = {s->normed, p->packed}, mixed = {s->mixed, p->packed}, acted = {s->acted, p->packed};
  const Activations qkv = {s->qkv, 0}, hidden = {s->hidden, 0}, gates = {s->gates, 0}, logits = {s->logits, 0};
  const Activations added = {s->added, 0}, streamed = {s->streamed, 0}, scores = {s->scores, 0};
  if (at == (int64_t)m->n_layers * MAPS) return (Map){&m->head, s->t, normed, logits, SET};
  const Layer *layer = m->layers + at / MAPS;
  const Linear *l = layer->maps + at % MAPS;
  switch (at % MAPS) {
    case QKV: return (Map){l, s->t, normed, qkv, SET};
    case NET_GATES: return (Map){l, s->t, layer->latents ? mixed : normed, gates, SET};
    case OUT: return mixer_is_added(layer) ? (Map){l, s->t, mixed, hidden, ADD} : (Map){l, s->t, mixed, added, SET};
    case GATE_UP:
      if (is_gated(layer, s)) return (Map){l, s->t, normed, acted, GATED};
      return is_acted(layer, p) ? (Map){l, s->t, normed, acted, ACTED} : (Map){l, s->t, normed, gates, SET};
    case DOWN:
      return feed_forward_is_added(layer) ? (Map){l, s->t, acted, hidden, ADD} : (Map){l, s->t, acted, added, SET};
    case ROUTER: return (Map){l, s->t, layer->experts && layer->experts->of_stream ? streamed : normed, scores, SET};
    case PER_LAYER_GATE: return (Map){l, s->t, normed, gates, SET};
    default: return (Map){l, s->t, acted, added, SET};
  }
}

Room new_room(const Model *m, const Step *s, Arena *arena) {
  Room r;
  int64_t heads = 0;
  for (int64_t i = 0; i < m->n_shapes; i++) heads += m->shapes[i]->kv_heads;
  for (int i = 0; i < PLANS; i++) {
    r.lists[i].inputs = allocate(arena, s->t * (int64_t)sizeof(int64_t));
    r.lists[i].cuts = allocate(arena, m->n_shapes * (int64_t)sizeof(Cut));
    r.lists[i].spans = allocate(arena, m->n_shapes * s->t * (int64_t)sizeof(Span));
    r.lists[i].units = allocate(arena, heads * s->t * (int64_t)sizeof(Unit));
    r.lists[i].runs = allocate(arena, s->t * (int64_t)sizeof(Run));
  }
  r.stretches = allocate(arena, s->t * (int64_t)sizeof(Stretch));
  r.workspace = new_workspace(s->t, larger_of(m->widths.terms, s->reduced_stride), arena);
  r.scratch = new_scratch(m->shapes, m->n_shapes, s->t, arena);
  r.recurrent = allocate_floats(arena, m->widths.room);
  return r;
}

/* The bytes of scratch that each thread of a step needs. */
int64_t petiole_scratch(const Model *m, const Step *s) {
  Arena none = {NULL, 0};
  new_room(m, s, &none);
  return none.used;
}

/* Whether what the matrices of a step take can be packed: they all multiply in bfloat16, on tiles, or without logits in wide
 * tiles of many rows. Packed it is no larger, which on tiles takes SIDE rows. */
static int can_pack(const Model *m, const Step *s) {
#ifdef DOT
#ifdef TILES
  const int64_t least = SIDE, outputs = 1;
#else
  const int64_t least = 2 * MB, outputs = PAIR;
  if (s->logits) return 0;
#endif
  if (s->t < least || s->adapters || m->hidden % DEPTH) return 0;
  for (int64_t i = 0; i < m->n_layers; i++) {
    const Layer *l = m->layers + i;
    if (l->experts || l->latents || l->inner % DEPTH || l->maps[OUT].k % DEPTH || l->heads.head_dim % DEPTH || l->per_layer % DEPTH) return 0;
    for (int64_t map = 0; map < MAPS; map++)
      if (l->maps[map].n && (!HALF_INPUTS(l->maps[map].kind) || l->maps[map].n % outputs)) return 0;
  }
  return !s->logits || HALF_INPUTS(m->head.kind);
#else
  return (void)m, (void)s, 0;
#endif
}

/* A plan of the first `n` inputs of a list. alone: whether only theirs lie in the step's memory. */
static Plan new_plan(const Model *m, const Step *s, int64_t n, int alone, int n_threads, const Lists *l) {
  Plan p = {.step = *s, .inputs = l->inputs, .cuts = l->cuts, .runs = l->runs, .packed = can_pack(m, s)};
  Unit *units = l->units;
  p.step.t = n;
  for (int64_t i = 0; i < m->n_shapes; i++) {
    const Heads *c = m->shapes[i];
    Span *spans = l->spans + i * s->t;
    const int64_t n_spans = find_spans(c, n, l->inputs, alone, s->rows, s->positions, s->limits, spans);
    l->cuts[i] = (Cut){units, find_units(c, spans, n_spans, n_threads, units)};
    units += s->t * c->kv_heads;
  }
  p.n_runs = s->adapters ? find_runs(n, l->inputs, s->adapters, l->runs) : 0;
  return p;
}

/* Plans of positions or of outputs alone. */
static Plans plans_of(const Model *m, const Step *s, int n_threads, const Lists lists[PLANS]) {
  for (int64_t i = 0; i < s->t; i++) lists[0].inputs[i] = i;
  for (int64_t i = 0; i < s->o; i++) lists[1].inputs[i] = lists[2].inputs[i] = s->outputs[i] - s->from;
  const Plan all = new_plan(m, s, s->t, 0, n_threads, lists);
  if (s->o == s->t) return (Plans){all, all, all, NULL, 0};
  const Plan last = new_plan(m, s, s->o, 0, n_threads, lists + 1);
  const Plan behind = m->last_kept + 1 < m->n_layers ? new_plan(m, s, s->o, 1, n_threads, lists + 2) : last;
  return (Plans){all, last, behind, NULL, 0};
}

Plans new_plans(const Model *m, const Step *s, int n_threads, const Room *room) {
  Plans plans = plans_of(m, s, n_threads, room->lists);
  plans.stretches = room->stretches;
  plans.n_stretches = find_stretches(s->t, s->rows, room->stretches);
  return plans;
}

const Plan *plan_at(const Model *m, const Plans *plans, int64_t at) {
  const int64_t last = m->last_kept * (int64_t)MAPS;
  return at <= last + NET_GATES ? &plans->all : at < last + MAPS ? &plans->last : &plans->behind;
}
