/* What is computed of a step, in what order, and in which memory. See plans.c. */
#pragma once
#include "../attention/attend.h"
#include "../products/linear.h"
#include "model.h"

/* What is computed of a step: all positions, or its outputs. */
typedef struct {
  Step step; /* `t` and `o`: so many positions */
  const int64_t *inputs; /* [t] those, ascending */
  const Unit *units;
  int64_t n_units;
  const Run *runs;
  int64_t n_runs;
  int packed; /* whether normed, mixed and acted are packed in bfloat16 */
} Plan;

/* Up to the keys and values of the last layer all positions are computed, behind those the outputs. */
typedef struct {
  Plan all, last;
} Plans;

/* A step's linear maps, in their order: MAPS for each layer, then the head. */
typedef struct {
  const Linear *l;
  int64_t rows;
  Activations x, y;
  How how;
} Map;

/* Scratch that all threads read. */
typedef struct {
  int64_t *inputs;
  Span *spans;
  Unit *units;
  Run *runs;
} Lists;

/* A thread's scratch. The lists are those of the first thread. */
typedef struct {
  Lists lists[2];
  Bench bench;
  Desk desk;
} Room;

Room new_room(const Model *m, const Step *s, Scratch *scratch);
Plans new_plans(const Model *m, const Step *s, int n_threads, const Lists lists[2]);
const Plan *plan_at(const Model *m, const Plans *plans, int64_t at);
Map map_at(const Model *m, const Plan *p, int64_t at);

/* Whether the map of gates and ups multiplies them, too. An adapter changes them before. */
INLINE int is_gated(const Model *m, const Layer *l, const Step *s) {
  return l->gate_up.n > m->inner && m->inner % PANEL == 0 && !l->gate_up.library && !s->adapters;
}

