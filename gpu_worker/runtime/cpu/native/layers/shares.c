/* Shares of a step: if the caches hold the weights, each thread computes its own sequences. */
#include "shares.h"

#define LEAST 8              /* positions of a share: fewer do not make up for reading all weights */
#define CACHED (64ll << 20) /* bytes of weights that every thread may read for itself */
#define UNEQUAL 8            /* the largest share may exceed the mean by 1 / UNEQUAL of it */
#define READ_COST 32         /* a float of the KV cache that is read costs about as much as so many multiply-adds */

/* Positions [from, to), for thread i. */
static Step part_of(const Model *m, const Step *s, int64_t from, int64_t to, int i) {
  const int64_t q = (int64_t)m->cache.heads * m->cache.head_dim;
  const int64_t wide = q + 2 * (int64_t)m->cache.kv_heads * m->cache.head_dim;
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
                .hidden = s->hidden + from * m->hidden,
                .normed = s->normed + from * m->hidden,
                .qkv = s->qkv + from * wide,
                .mixed = s->mixed + from * q,
                .gates = s->gates + from * m->layers->gate_up.n,
                .acted = s->acted + from * m->inner,
                .adapters = s->adapters ? s->adapters + from : NULL,
                .reduced = s->reduced + from * s->reduced_stride,
                .reduced_stride = s->reduced_stride,
                .halves = s->halves,
                .o = end - first,
                .outputs = s->outputs + first,
                .logits = s->logits + first * m->head.n,
                .scratch = s->scratch + i * s->scratch_stride,
                .progress = s->progress};
}

static int64_t terms(const Linear *l) { return (int64_t)l->n * l->k; }

static int64_t terms_of_layer(const Layer *l) {
  return terms(&l->qkv) + terms(&l->out) + terms(&l->gate_up) + terms(&l->down);
}

/* What a position costs in a layer, in multiply-adds. */
static int64_t cost(const Model *m, int64_t position) {
  return terms_of_layer(m->layers) + READ_COST * 2 * (position + 1) * m->cache.kv_heads * m->cache.head_dim;
}

int share(const Model *m, const Step *s, Step *shares) {
  const int64_t weights = (m->n_layers * terms_of_layer(m->layers) + terms(&m->head)) * size_of(m->head.kind);
  const int n = s->n_threads;
  int64_t total = 0, done = 0, from = 0, before = 0;
  int made = 0;
  if (n == 1 || s->t < n * LEAST || weights > CACHED) return 0;
  for (int64_t t = 0; t < s->t; t++) total += cost(m, s->positions[t]);
  for (int64_t t = 0; t < s->t; t++) {
    const int last = t + 1 == s->t;
    done += cost(m, s->positions[t]);
    if (!last && (done < total / n * (made + 1) || s->rows[t] == s->rows[t + 1])) continue;
    if (made == n || t + 1 - from < LEAST || (done - before) * n > total + total / UNEQUAL) return 0;
    shares[made] = part_of(m, s, from, t + 1, made);
    made++;
    before = done;
    from = t + 1;
  }
  return made == n;
}
