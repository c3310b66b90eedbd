/* A step as attention computes it: spans of neighbouring positions of a row, and units of a span at some heads. */
#include "spans.h"

int64_t span_length(const Heads *c) {
  const int64_t n = QUERIES / (c->heads / c->kv_heads);
  return n ? n : 1;
}

/* Cuts `n_inputs` of a step into spans; returns their number. alone: whether only their queries lie in memory. */
int64_t find_spans(const Heads *c, int64_t n_inputs, const int64_t *inputs, int alone, const int64_t *rows,
                   const int64_t *positions, const int64_t *limits, Span *spans) {
  const int64_t most = span_length(c);
  int64_t n = 0;
  for (int64_t i = 0; i < n_inputs; i++) {
    const int64_t t = inputs[i];
    Span *last = spans + n - 1;
    if (n && last->row == rows[t] && last->first + last->n == positions[t] && last->n < most) last->n++;
    else spans[n++] = (Span){alone ? i : t, 1, rows[t], positions[t], limits ? limits + t : NULL, 0};
    const int64_t end = limits ? limits[t] : positions[t] + 1;
    if (end > spans[n - 1].end) spans[n - 1].end = end;
  }
  return n;
}

/* Cuts spans into units; returns their number, at most one for each key head of each position. Many queries are a
 * unit at each head. Few are one at as many heads as leave units enough for the threads. */
int64_t find_units(const Heads *c, const Span *spans, int64_t n, int n_threads, Unit *units) {
  const int group = c->heads / c->kv_heads;
  int together = c->kv_heads;
  while (together > HEADS || (together > 1 && n * (c->kv_heads / together) < UNITS * n_threads))
    together = together % 2 ? 1 : together / 2;
  int64_t found = 0;
  for (int64_t i = 0; i < n; i++) {
    const int each = is_few(c, spans[i].n * group) ? together : 1;
    for (int head = 0; head < c->kv_heads; head += each) units[found++] = (Unit){spans + i, head, each};
  }
  return found;
}
