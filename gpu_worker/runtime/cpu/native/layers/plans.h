/* What is computed of a step, in what order, and in which memory. See plans.c. */
#pragma once
#include "../attention/attend.h"
#include "../products/linear.h"
#include "model.h"

/* Positions as attention computes them in layers of one shape. */
typedef struct {
  const Unit *units;
  int64_t n_units;
} Cut;

/* What is computed of a step: all positions, or its outputs. */
typedef struct {
  Step step; /* `t` and `o`: this many positions */
  const int64_t *inputs; /* [t] the step's that these are, ascending */
  const Cut *cuts; /* [shapes] */
  const Run *runs;
  int64_t n_runs;
  int packed; /* whether normed, mixed and acted are packed in bfloat16 */
} Plan;

/* Up to the last keys and values, or states, that are stored all positions are computed, after those the outputs alone. In
 * the `last` layer that stores some their queries lie among those of all, in layers `behind` it by themselves. */
typedef struct {
  Plan all, last, behind;
  const Stretch *stretches; /* of all */
  int64_t n_stretches;
} Plans;

/* A step's matrices, in their order: MAPS for each layer, then the head. Some have no outputs. */
typedef struct {
  const Linear *l;
  int64_t rows;
  Activations x, y;
  How how;
} Map;

#define PLANS 3

/* Arena that all threads read. */
typedef struct {
  int64_t *inputs;
  Cut *cuts;   /* [shapes] */
  Span *spans; /* [shapes][t] */
  Unit *units; /* [shapes][t, key heads] */
  Run *runs;
} Lists;

/* A thread's scratch. The lists are those of the first thread. */
typedef struct {
  Lists lists[PLANS];
  Stretch *stretches; /* [t] */
  Workspace workspace;
  Scratch scratch;
  float *recurrent; /* see petiole_recurrent_room */
} Room;

Room new_room(const Model *m, const Step *s, Arena *arena);
Plans new_plans(const Model *m, const Step *s, int n_threads, const Room *room);
const Plan *plan_at(const Model *m, const Plans *plans, int64_t at);
Map map_at(const Model *m, const Plan *p, int64_t at);

/* Whether the matrix of gates and ups multiplies them, too. An adapter changes them before. */
INLINE int is_gated(const Layer *l, const Step *s) {
  return l->gated && !is_bent(&l->bend) && l->inner % PANEL == 0 && !s->adapters;
}

/* Whether the map of a feed-forward without gates computes its activation, too. */
INLINE int is_acted(const Layer *l, const Plan *p) {
#ifdef TILES
  if (p->packed) return 0;
#endif
  return !l->gated && !is_bent(&l->bend) && !p->step.adapters;
}

/* Whether what OUT gives is added to the hidden state as it is. */
INLINE int mixer_is_added(const Layer *l) {
  const int apart = l->parallel && l->feed_forward_norm.kind != NO_NORM;
  return l->mixer_out_norm.kind == NO_NORM && l->residual == 1 && !apart;
}

/* Whether what DOWN gives is added to it as it is. */
INLINE int feed_forward_is_added(const Layer *l) {
  return l->feed_forward_out_norm.kind == NO_NORM && l->residual == 1 && !l->experts;
}
