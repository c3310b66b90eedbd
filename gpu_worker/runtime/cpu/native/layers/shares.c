/* Shares of a step: if the caches hold the weights, each thread computes its own sequences. It takes some of them at a time
 * from the first layer to the last, so that its own cache holds what one product makes for the next. */
#include "shares.h"

#define LEAST 8              /* positions of a share: fewer do not make up for reading all weights */
#define CACHED (64ll << 20) /* bytes of weights that every thread may read for itself */
#define AT_A_TIME 256        /* positions that a thread takes at a time, or one sequence */
#define UNEQUAL 8            /* the largest share may exceed the mean by 1 / UNEQUAL of it */
#define ALONE_BYTES (32ll << 20) /* of weights, which one thread reads from the caches */
#define READ_COST 32         /* a float of the KV cache that is read costs about as much as this many multiply-adds */

/* Positions [from, to) of a step, in the same memory for what lies between products. */
static Step part_of(const Model *m, const Step *s, int64_t from, int64_t to) {
  int64_t first = 0, end;
  while (first < s->o && s->outputs[first] < s->from + from) first++;
  for (end = first; end < s->o && s->outputs[end] < s->from + to;) end++;
  Step part = *s;
  part.t = to - from;
  part.from += from;
  if (s->token_ids) part.token_ids += from;
  part.positions += from;
  part.rotary += from;
  if (s->limits) part.limits += from;
  part.rows += from;
  if (s->copies) part.copies += from;
  if (s->extra) part.extra += from * m->hidden;
  if (s->per_layer) part.per_layer += from * s->per_layer_stride;
  part.hidden += from * m->hidden;
  if (s->adapters) part.adapters += from;
  part.o = end - first;
  part.outputs += first;
  if (s->logits) part.logits += first * m->head.n;
  return part;
}

/* That part for thread i, in memory of its own. */
static Step share_of(const Model *m, const Step *s, int64_t from, int64_t to, int i) {
  Step share = part_of(m, s, from, to);
  if (s->projected) share.projected += from * s->per_layer_stride;
  share.normed += from * m->hidden;
  share.qkv += from * m->widths.qkv;
  share.mixed += from * m->widths.mixed;
  share.gates += from * m->widths.gates;
  share.acted += from * m->widths.acted;
  share.added += from * m->hidden;
  share.reduced += from * s->reduced_stride;
  share.scratch += i * s->scratch_stride;
  share.n_threads = 1;
  if (i) share.progress = NULL; /* the caller's thread alone reports: it may hold the interpreter */
  return share;
}

int64_t next_part(const Model *m, const Step *s, int64_t from, Step *part) {
  int64_t to = from + 1, end = from;
  for (; to <= s->t; to++) {
    if (to < s->t && s->rows[to] == s->rows[to - 1]) continue;
    if (end > from && to - from > AT_A_TIME) break;
    end = to;
  }
  *part = part_of(m, s, from, end);
  return end;
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

static int64_t bytes_of_weights(const Model *m, const Cost *c) {
  return (c->terms + (int64_t)m->head.n * m->head.k) * size_of(m->head.kind);
}

int64_t petiole_cost(const Model *m, const Step *s) {
  const Cost each = cost_of(m);
  int64_t total = s->o * m->head.n * m->head.k;
  if (bytes_of_weights(m, &each) > ALONE_BYTES) return INT64_MAX;
  for (int64_t i = 0; i < m->n_layers; i++)
    if (m->layers[i].experts) return INT64_MAX; /* whose weights are not counted */
  for (int64_t t = 0; t < s->t; t++) total += cost(&each, s->positions[t]);
  return total;
}

int share(const Model *m, const Step *s, Step *shares) {
  const Cost each = cost_of(m);
  const int64_t weights = bytes_of_weights(m, &each);
  const int n = s->n_threads;
  int64_t total = 0, done = 0, from = 0, before = 0;
  int made = 0;
  for (int64_t i = 0; i < m->n_layers; i++)
    if (m->layers[i].experts || m->layers[i].latents) return 0; /* what they make lies in the memory of the whole step */
  if (n == 1 || s->t < n * LEAST || weights > CACHED) return 0;
  for (int64_t t = 0; t < s->t; t++) total += cost(&each, s->positions[t]);
  for (int64_t t = 0; t < s->t; t++) {
    const int last = t + 1 == s->t;
    done += cost(&each, s->positions[t]);
    if (!last && (done < total / n * (made + 1) || s->rows[t] == s->rows[t + 1])) continue;
    if (made == n || t + 1 - from < LEAST || (done - before) * n > total + total / UNEQUAL) return 0;
    shares[made] = share_of(m, s, from, t + 1, made);
    made++;
    before = done;
    from = t + 1;
  }
  return made == n;
}
