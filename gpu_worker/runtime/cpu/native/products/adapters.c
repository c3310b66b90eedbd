/* LoRA adapters: first A x for all runs of inputs that share an adapter, then B (A x), panel by panel.
 *
 * The products are those of panels.c, so a position gets the same bits whatever adapters lie beside it.
 */
#include "adapters.h"

#include "linear.h"

int low_rank_fits(const LowRank *r, const Linear *l, int64_t reduced_stride) {
  int64_t n = 0, k = 0;
  if (r->parts < 1 || r->parts > (int64_t)(sizeof(r->b) / sizeof(r->b[0]))) return 0;
  for (int64_t part = 0; part < r->parts; part++) {
    if (r->b[part].k != r->b[0].k) return 0;
    n += r->b[part].n;
    k += r->b[part].k;
  }
  return r->a.k == l->k && r->a.n == k && k <= reduced_stride && n == l->n;
}

/* Cuts `n_inputs` of a step into runs of at most ROWS of them, but leaves out inputs without an adapter. Returns the
 * number of runs. */
int64_t find_runs(int64_t n_inputs, const int64_t *inputs, const LowRank *const *adapters, Run *runs) {
  int64_t n = 0;
  for (int64_t i = 0; i < n_inputs; i++) {
    const LowRank *maps = adapters[inputs[i]];
    Run *last = runs + n - 1;
    if (!maps) continue;
    if (n && last->maps == maps && last->t + last->n == i && last->n < ROWS) last->n++;
    else runs[n++] = (Run){i, 1, maps};
  }
  return n;
}

void add_low_rank(const Run *runs, int64_t n_runs, int64_t at, const float *x, int64_t k, float *y, int64_t n,
                float *reduced, int64_t reduced_stride, Workspace *b) {
  b->held = NULL;
#pragma omp for schedule(dynamic, 1) collapse(2)
  for (int64_t i = 0; i < n_runs; i++)
    for (int64_t p = 0; p < parts(reduced_stride, PANEL); p++)
      if (p < parts(runs[i].maps[at].a.n, PANEL))
        outputs(&runs[i].maps[at].a, p, (int)runs[i].n, x + runs[i].t * k, k,
                reduced + runs[i].t * reduced_stride, reduced_stride, SET, b);
  b->held = NULL;
#pragma omp for schedule(dynamic, 4) collapse(2)
  for (int64_t i = 0; i < n_runs; i++)
    for (int64_t unit = 0; unit < parts(n, PANEL) + 2; unit++) { /* each part has a panel that is not full, at most */
      const LowRank *r = runs[i].maps + at;
      int64_t p = unit, part = 0, first = 0;
      while (part < r->parts && p >= parts(r->b[part].n, PANEL)) {
        p -= parts(r->b[part].n, PANEL);
        first += r->b[part++].n;
      }
      if (part == r->parts) continue;
      outputs(&r->b[part], p, (int)runs[i].n, reduced + runs[i].t * reduced_stride + part * r->b[part].k,
              reduced_stride, y + runs[i].t * n + first, n, ADD, b);
    }
}
