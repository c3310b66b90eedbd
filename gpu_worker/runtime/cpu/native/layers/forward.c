/* A decoder's forward on a CPU, from token ids to logits in one call.
 *
 * If the caches hold the weights, each thread computes its own share of the sequences from the first layer to the last
 * (`share`): no thread waits, and the output of one product is in the thread's own cache for the next one. One thread alone
 * computes a few positions of a small model (`petiole_cost`). For large weights, few sequences or one long prompt, all threads
 * work together: they divide the outputs of each matrix, so that each weight is read once, and wait for each other after the
 * product.
 *
 * Activations are float32, or packed in bfloat16 (`can_pack`). Weights and the KV cache are read as they are stored, and
 * widened in registers. If the processor multiplies bfloat16 (DOT), activations are rounded to bfloat16 instead. The
 * result for a position depends on that position alone: every sum runs over its terms in one fixed order, whatever the
 * batch, the number of threads or the blocking. So a sequence gets the same bits alone and among others, in one prefill
 * and in chunks. products/kernels/panels.c and attention/attend.c say how.
 *
 * A model is data: layers of any sizes, with what their plan says (model.h). Nothing reads what layers make of a position
 * without logits, except its keys and values, and the states of its row. So after the last ones that are stored the outputs
 * alone are computed.
 *
 * Vectors are those of the compiler (vector_size), not of one instruction set.
 */
#include <omp.h>

#include "../products/kernels/tiles.h"
#include "../products/packed/codes.h"
#include "../products/packed/pack.h"
#include "between.h"
#include "experts.h"
#include "rows.h"
#include "shares.h"

#ifndef REPORT_S
#define REPORT_S 1.0
#endif

/* What the adapters add to a product. */
static void add_adapters(const Model *m, const Map *map, int64_t at, const Plan *p, Workspace *b) {
  const Step *s = &p->step;
  const int64_t own = p->n_runs ? adapted_at(m->layers + at / MAPS, at % MAPS) : -1;
  if (own >= 0)
    add_low_rank(p->runs, p->n_runs, at / MAPS * ADAPTED + own, map->x.at, map->l->k, map->y.at, map->l->n, s->reduced, s->reduced_stride, b);
}

/* Says that a long step makes progress. */
static void report_progress(const Step *s, double *last) {
  const double now = omp_get_wtime();
  if (!s->progress || now - *last < REPORT_S) return;
  *last = now;
  s->progress();
}

/* A step or a share of one, on `n_threads` threads. */
static void compute(const Model *m, const Step *s, int n_threads) {
  const Room first = new_room(m, s, &(Arena){s->scratch, 0});
  const Plans plans = new_plans(m, s, n_threads, &first);
  const int64_t head = (int64_t)m->n_layers * MAPS;
  double reported = omp_get_wtime();
#pragma omp parallel num_threads(n_threads)
  {
    const uint32_t before = begin_tiles();
    Room own = new_room(m, s, &(Arena){s->scratch + omp_get_thread_num() * s->scratch_stride, 0});
    own.workspace.packed = first.workspace.packed;
    if (s->token_ids) embed_tokens(&m->head, s->t, s->token_ids, m->embedding_factor, s->hidden);
    finish_inputs(m, s, &own.workspace);
    for (int64_t at = 0; at <= head; at++) {
      const Plan *plan = plan_at(m, &plans, at);
      const Map map = map_at(m, plan, at);
      if (at < head && !map.l->n) continue;
      prepare(m, &plans, at, &own);
      if (at == head && !s->logits) break;
      linear(map.l, map.rows, map.x, map.y, map.how, &own.workspace);
      if (at < head) add_adapters(m, &map, at, plan, &own.workspace);
      else finish_logits(m, &plan->step);
      if (at < head && at % MAPS == ROUTER) mix_experts(m, plan, m->layers + at / MAPS, &own);
      if (omp_get_thread_num() == 0) report_progress(s, &reported);
    }
    end_tiles(before);
  }
}

/* Whether all adapters of a step have the sizes of the model's matrices. Others would write beyond a row's outputs. */
static int adapters_fit(const Model *m, const Step *s) {
  const LowRank *last = NULL;
  for (int64_t t = 0; s->adapters && t < s->t; t++) {
    const LowRank *maps = s->adapters[t];
    if (!maps || maps == last) continue;
    for (int64_t i = 0; i < m->n_layers; i++) {
      const Layer *l = m->layers + i;
      for (int64_t map = 0, at; map < MAPS; map++)
        if ((at = adapted_at(l, map)) >= 0 && !low_rank_fits(maps + i * ADAPTED + at, l->maps + map, s->reduced_stride)) return 0;
    }
    last = maps;
  }
  return 1;
}

/* A share, some sequences at a time. The outputs' hidden states become its first ones. */
static void compute_share(const Model *m, const Step *share) {
  Step part;
  for (int64_t from = 0, done = 0; from < share->t; done += part.o) {
    from = next_part(m, share, from, &part);
    compute(m, &part, 1);
    if (part.hidden != share->hidden + done * m->hidden)
      memmove(share->hidden + done * m->hidden, part.hidden, sizeof(float) * (size_t)(part.o * m->hidden));
  }
}

/* Returns 0, or -1 if an adapter does not fit: then nothing is computed. */
int32_t petiole_forward(const Model *m, const Step *s) {
  Step shares[s->n_threads];
  if (!adapters_fit(m, s)) return -1;
  if (!share(m, s, shares)) {
    compute(m, s, petiole_cost(m, s) <= m->small ? 1 : s->n_threads);
    return 0;
  }
#pragma omp parallel for schedule(static, 1) num_threads(s->n_threads)
  for (int i = 0; i < s->n_threads; i++) compute_share(m, shares + i);
  for (int i = 0; i < s->n_threads; i++) /* of each share its outputs' */
    memmove(s->hidden + (shares[i].outputs - s->outputs) * m->hidden, shares[i].hidden,
            sizeof(float) * (size_t)(shares[i].o * m->hidden));
  return 0;
}

/* The bytes of scratch that each thread of `petiole_join` needs. */
int64_t petiole_join_scratch(const Linear *join, int64_t t) {
  Arena none = {NULL, 0};
  new_workspace(t, join->k, &none);
  return none.used;
}

/* The inputs of a layer that drafts, out [t, hidden]: a product of what is known of each position and of the token behind it.
 * That is known [t, hidden] behind both of its norms, and the embedding of token_ids [t], which stands in `out` already where
 * these are null. both: room for [t, 2 hidden]. */
void petiole_join(const Model *m, const Linear *join, const Norm *token_norm, const Norm *known_norms, int64_t t,
                  const int64_t *token_ids, const float *known, float *out, float *both, char *scratch, int64_t stride,
                  int32_t n_threads) {
  const int64_t n = m->hidden;
  const Workspace first = new_workspace(t, join->k, &(Arena){scratch, 0});
#pragma omp parallel num_threads(n_threads)
  {
    Workspace own = new_workspace(t, join->k, &(Arena){scratch + omp_get_thread_num() * stride, 0});
    own.packed = first.packed;
    const uint32_t before = begin_tiles();
    if (token_ids) embed_tokens(&m->head, t, token_ids, m->embedding_factor, out);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < t; i++) {
      float *token = both + 2 * i * n, *behind = token + n;
      normalise(out + i * n, token_norm, token, n);
      normalise(known + i * n, known_norms, behind, n);
      normalise(behind, known_norms + 1, behind, n);
    }
    linear(join, t, (Activations){both, 0}, (Activations){out, 0}, SET, &own);
    end_tiles(before);
  }
}
