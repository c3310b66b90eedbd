/* Shares of a step: if the caches hold the weights, each thread computes its own sequences. */
#include "shares.h"

#define LEAST 8              /* positions of a share: fewer do not make up for reading all weights */
#define CACHED (64ll << 20) /* bytes of weights that every thread may read for itself */
#define UNEQUAL 8            /* the largest share may exceed the mean by 1 / UNEQUAL of it */
#define READ_COST 32         /* a float of the KV cache that is read costs about as much as this many multiply-adds */

/* Positions [from, to), for thread i. */
static Step part_of(const Model *m, const Step *s, int64_t from, int64_t to, int i) {
  int64_t first = 0, end;
  while (first < s->o && s->outputs[first] < from) first++;
  for (end = first; end < s->o && s->outputs[end] < to;) end++;
  return (Step){.t = to - from,
                .from = from,
                .token_ids = s->token_ids ? s->token_ids + from : NULL,
                .positions = s->positions + from,
                .rotary = s->rotary + from,
                .limits = s->limits ? s->limits + from : NULL,
                .rows = s->rows + from,
                .copies = s->copies ? s->copies + from : NULL,
                .extra = s->extra ? s->extra + from * m->hidden : NULL,
                .per_layer = s->per_layer ? s->per_layer + from * s->per_layer_stride : NULL,
                .projected = s->projected ? s->projected + from * s->per_layer_stride : NULL,
                .per_layer_stride = s->per_layer_stride,
                .hidden = s->hidden + from * m->hidden,
                .normed = s->normed + from * m->hidden,
                .qkv = s->qkv + from * m->widths.qkv,
                .mixed = s->mixed + from * m->widths.mixed,
                .gates = s->gates + from * m->widths.gates,
                .acted = s->acted + from * m->widths.acted,
                .added = s->added + from * m->hidden,
                .adapters = s->adapters ? s->adapters + from : NULL,
                .reduced = s->reduced + from * s->reduced_stride,
                .reduced_stride = s->reduced_stride,
                .halves = s->halves,
                .o = end - first,
                .outputs = s->outputs + first,
                .logits = s->logits ? s->logits + first * m->head.n : NULL,
                .scratch = s->scratch + i * s->scratch_stride,
                .progress = s->progress};
}

/* What a model computes for each position, in multiply-adds, and reads for each position before it. */
typedef struct {
  int64_t terms, read;
} Cost;

static Cost cost_of(const Model *m) {
  Cost c = {0, 0};
  for (int64_t i = 0; i < m->n_layers; i++) {
    const Layer *l = m->layers + i;
    for (int64_t map = 0; map < MAPS; map++) c.terms += (int64_t)l->maps[map].n * l->maps[map].k;
    c.read += 2 * (int64_t)l->heads.kv_heads * l->heads.head_dim;
    if (l->recurrent) c.terms += recurrent_cost(l->recurrent);
  }
  return c;
}

static int64_t cost(const Cost *c, int64_t position) { return c->terms + READ_COST * (position + 1) * c->read; }

int share(const Model *m, const Step *s, Step *shares) {
  const Cost each = cost_of(m);
  const int64_t weights = (each.terms + (int64_t)m->head.n * m->head.k) * size_of(m->head.kind);
  const int n = s->n_threads;
  int64_t total = 0, done = 0, from = 0, before = 0;
  int made = 0;
  for (int64_t i = 0; i < m->n_layers; i++)
    if (m->layers[i].experts) return 0; /* their pairs lie in the memory of the whole step */
  if (n == 1 || s->t < n * LEAST || weights > CACHED) return 0;
  for (int64_t t = 0; t < s->t; t++) total += cost(&each, s->positions[t]);
  for (int64_t t = 0; t < s->t; t++) {
    const int last = t + 1 == s->t;
    done += cost(&each, s->positions[t]);
    if (!last && (done < total / n * (made + 1) || s->rows[t] == s->rows[t + 1])) continue;
    if (made == n || t + 1 - from < LEAST || (done - before) * n > total + total / UNEQUAL) return 0;
    shares[made] = part_of(m, s, from, t + 1, made);
    made++;
    before = done;
    from = t + 1;
  }
  return made == n;
}
