/* LoRA adapters: first A x for all runs of inputs that share an adapter, then B (A x), panel by panel.
 *
 * The products are those of panels.c, so a position gets the same bits whatever adapters lie beside it.
 */
#include "adapters.h"

#include "linear.h"

int delta_fits(const Delta *d, const Linear *l, int64_t reduced_stride) {
  int64_t n = 0, k = 0;
  if (d->parts < 1 || d->parts > (int64_t)(sizeof(d->b) / sizeof(d->b[0]))) return 0;
  for (int64_t part = 0; part < d->parts; part++) {
    if (d->b[part].k != d->b[0].k) return 0;
    n += d->b[part].n;
    k += d->b[part].k;
  }
  return d->a.k == l->k && d->a.n == k && k <= reduced_stride && n == l->n;
}

/* Cuts `n_inputs` of a step into runs of at most ROWS of them, but leaves out inputs without an adapter. Returns the
 * number of runs. */
int64_t find_runs(int64_t n_inputs, const int64_t *inputs, const Delta *const *adapters, Run *runs) {
  int64_t n = 0;
  for (int64_t i = 0; i < n_inputs; i++) {
    const Delta *deltas = adapters[inputs[i]];
    Run *last = runs + n - 1;
    if (!deltas) continue;
    if (n && last->deltas == deltas && last->t + last->n == i && last->n < ROWS) last->n++;
    else runs[n++] = (Run){i, 1, deltas};
  }
  return n;
}

void add_deltas(const Run *runs, int64_t n_runs, int64_t at, const float *x, int64_t k, float *y, int64_t n,
                float *reduced, int64_t reduced_stride, Bench *b) {
  b->held = NULL;
#pragma omp for schedule(dynamic, 1) collapse(2)
  for (int64_t i = 0; i < n_runs; i++)
    for (int64_t p = 0; p < parts(reduced_stride, PANEL); p++)
      if (p < parts(runs[i].deltas[at].a.n, PANEL))
        outputs(&runs[i].deltas[at].a, p, (int)runs[i].n, x + runs[i].t * k, k,
                reduced + runs[i].t * reduced_stride, reduced_stride, 0, b);
  b->held = NULL;
#pragma omp for schedule(dynamic, 4) collapse(2)
  for (int64_t i = 0; i < n_runs; i++)
    for (int64_t unit = 0; unit < parts(n, PANEL) + 2; unit++) { /* each part has a panel that is not full, at most */
      const Delta *d = runs[i].deltas + at;
      int64_t p = unit, part = 0, first = 0;
      while (part < d->parts && p >= parts(d->b[part].n, PANEL)) {
        p -= parts(d->b[part].n, PANEL);
        first += d->b[part++].n;
      }
      if (part == d->parts) continue;
      outputs(&d->b[part], p, (int)runs[i].n, reduced + runs[i].t * reduced_stride + part * d->b[part].k,
              reduced_stride, y + runs[i].t * n + first, n, 1, b);
    }
}
