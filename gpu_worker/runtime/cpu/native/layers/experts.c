/* Mixtures of experts: which experts a position takes, and their outputs.
 *
 * Pairs of a position and an expert are sorted by expert. So each expert that somebody chose multiplies its positions in one
 * go, and no weight of another expert is read. Threads divide experts and panels alike: a unit is some panels of one expert.
 * The outputs of a position are added in the order of its experts, and a product's sums do not depend on other rows, so a
 * position gets the same bits in any batch.
 */
#include "experts.h"

#include "rows.h"

#define LEAST_SUM 1e-20f

/* Scores [n] become probabilities, if they are not logits. */
static void finish_scores(const Experts *e, float *scores) {
  if (e->score == SIGMOID)
    for (int i = 0; i < e->n; i++) scores[i] = 1.0f / (1.0f + expf(-scores[i]));
  if (e->score != SOFTMAX) return;
  float most = scores[0], total = 0;
  for (int i = 1; i < e->n; i++) most = scores[i] > most ? scores[i] : most;
  for (int i = 0; i < e->n; i++) total += scores[i] = expf(scores[i] - most);
  for (int i = 0; i < e->n; i++) scores[i] /= total;
}

/* The `count` best of n, of which equal ones count in their order. */
static void mark_top_k(const float *by, int n, int count, char *marks) {
  memset(marks, 0, (size_t)n);
  for (; count; count--) {
    int best = -1;
    for (int i = 0; i < n; i++)
      if (!marks[i] && (best < 0 || by[i] > by[best])) best = i;
    marks[best] = 1;
  }
}

/* Experts outside the best groups are never chosen. */
static void mask_groups(const Experts *e, float *by) {
  const int size = e->n / e->groups;
  float sums[e->groups];
  char kept[e->groups];
  for (int g = 0; g < e->groups; g++) {
    float first = -INFINITY, second = -INFINITY;
    for (int i = g * size; i < (g + 1) * size; i++) {
      const float x = by[i];
      if (x > first) second = first, first = x;
      else if (x > second) second = x;
    }
    sums[g] = e->of_group > 1 && size > 1 ? first + second : first;
  }
  mark_top_k(sums, e->groups, e->best_groups, kept);
  for (int i = 0; i < e->n; i++)
    if (!kept[i / size]) by[i] = -INFINITY;
}

/* The experts of a position, ascending, and how much each counts. */
static void choose(const Experts *e, float *scores, int32_t *chosen, float *shares) {
  float by[e->n], total = 0;
  char marks[e->n];
  finish_scores(e, scores);
  for (int i = 0; i < e->n; i++) by[i] = e->correction ? scores[i] + e->correction[i] : scores[i];
  if (e->groups > e->best_groups) mask_groups(e, by);
  mark_top_k(by, e->n, e->chosen, marks);
  for (int i = 0, j = 0; i < e->n; i++)
    if (marks[i]) chosen[j++] = i;
  float most = scores[chosen[0]];
  for (int j = 1; j < e->chosen; j++) most = scores[chosen[j]] > most ? scores[chosen[j]] : most;
  for (int j = 0; j < e->chosen; j++) {
    const float score = scores[chosen[j]];
    total += shares[j] = e->score == OF_CHOSEN ? expf(score - most) : score;
  }
  const float by_sum = e->score == OF_CHOSEN ? total : e->normalised ? total + LEAST_SUM : 1.0f;
  for (int j = 0; j < e->chosen; j++)
    shares[j] = shares[j] / by_sum * e->factor * (e->shares ? e->shares[chosen[j]] : 1.0f);
}

/* Where the pairs of each expert begin, and the units of its two matrices: [n + 1] each. */
typedef struct {
  int64_t *starts, *up, *down;
} Routes;

static Routes routes_of(const Step *s, const Experts *e) {
  const int64_t n = e->n + 1;
  return (Routes){s->routes, s->routes + n, s->routes + 2 * n};
}

static void sort_pairs(const Step *s, const Experts *e, const Routes *r) {
  const int64_t n_pairs = s->t * e->chosen;
  memset(r->starts, 0, sizeof(int64_t) * (size_t)(e->n + 1));
  for (int64_t i = 0; i < n_pairs; i++) r->starts[s->chosen[i] + 1]++;
  r->up[0] = r->down[0] = 0;
  for (int i = 0; i < e->n; i++) {
    const int64_t rows = r->starts[i + 1];
    e->taken[i] += rows;
    r->up[i + 1] = r->up[i] + (rows ? units_of(e->gate_up + i, rows) : 0);
    r->down[i + 1] = r->down[i] + (rows ? units_of(e->down + i, rows) : 0);
    r->starts[i + 1] += r->starts[i];
  }
  for (int64_t i = 0; i < n_pairs; i++) s->places[i] = (int32_t)r->starts[s->chosen[i]]++; /* each start moves to its end */
  for (int i = e->n; i; i--) r->starts[i] = r->starts[i - 1];
  r->starts[0] = 0;
}

/* y of all pairs, each with the matrix of its expert. */
static void multiply_pairs(const Linear *each, int n, const int64_t *starts, const int64_t *units, const float *x, float *y,
                           Workspace *b) {
  int64_t expert = 0;
  b->held = NULL;
#pragma omp for schedule(guided, 1)
  for (int64_t i = 0; i < units[n]; i++) {
    while (units[expert + 1] <= i) expert++;
    const Linear *l = each + expert;
    const int64_t from = starts[expert], rows = starts[expert + 1] - from;
    linear_unit(l, i - units[expert], rows, x + from * l->k, y + from * l->n, b);
  }
}

/* The weighted sum of a position's experts. */
static void add_experts(const Model *m, const Layer *l, const Step *s, int64_t t, float *row) {
  const Experts *e = l->experts;
  float *added = s->added + t * m->hidden;
  memset(row, 0, sizeof(float) * (size_t)m->hidden);
  for (int64_t j = t * e->chosen; j < (t + 1) * e->chosen; j++) {
    const float *given = s->pairs + (int64_t)s->places[j] * m->hidden, share = s->shares[j];
    for (int c = 0; c < m->hidden; c++) row[c] += share * given[c];
  }
  normalise(row, &e->out_norm, row, m->hidden);
  if (l->maps[DOWN].n) {
    normalise(added, &e->dense_out_norm, added, m->hidden);
    const float opening = e->dense_gate ? s->openings[t] : 1.0f;
    for (int c = 0; c < m->hidden; c++) added[c] = added[c] * opening + row[c];
  } else memcpy(added, row, sizeof(float) * (size_t)m->hidden);
}

void mix_experts(const Model *m, const Plan *p, const Layer *l, Room *own) {
  const Experts *e = l->experts;
  const Step *s = &p->step;
  const int64_t k = e->chosen, outputs = e->gate_up[0].n, inner = e->inner;
  const Routes r = routes_of(s, e);
#pragma omp for schedule(static)
  for (int64_t t = 0; t < s->t; t++) choose(e, s->scores + t * e->n, s->chosen + t * k, s->shares + t * k);
#pragma omp single
  sort_pairs(s, e, &r);
#pragma omp for schedule(static)
  for (int64_t i = 0; i < s->t * k; i++)
    memcpy(s->pairs + (int64_t)s->places[i] * m->hidden, s->normed + i / k * m->hidden, sizeof(float) * (size_t)m->hidden);
  multiply_pairs(e->gate_up, e->n, r.starts, r.up, s->pairs, s->pair_gates, &own->workspace);
#pragma omp for schedule(static)
  for (int64_t i = 0; i < s->t * k; i++) {
    float *gates = s->pair_gates + i * outputs, *ups = e->gated ? gates + inner : NULL, *to = s->pair_acted + i * inner;
    if (!bend(&e->bend, gates, ups, to, (int)inner)) activate(e->activation, gates, ups, to, (int)inner);
  }
  multiply_pairs(e->down, e->n, r.starts, r.down, s->pair_acted, s->pairs, &own->workspace);
#pragma omp for schedule(static)
  for (int64_t t = 0; t < s->t; t++) add_experts(m, l, s, t, own->workspace.inputs);
  own->workspace.held = NULL;
}
