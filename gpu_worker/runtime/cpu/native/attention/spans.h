/* What one call of `attend` computes. See spans.c. */
#pragma once
#include "scratch.h"

/* Positions `first` .. `first + n - 1` of one row: the step's inputs `t` .. `t + n - 1`. */
typedef struct {
  int64_t t, n, row, first;
  const int64_t *limits; /* [n] the end of the positions that each sees, or null: all up to itself */
  int64_t end;           /* the largest of those */
} Span;

/* What one call computes: a span at some neighbouring key heads. */
typedef struct {
  const Span *span;
  int head, n_heads;
} Unit;

int64_t span_length(const Heads *c);
int64_t find_spans(const Heads *c, int64_t n_inputs, const int64_t *inputs, int alone, const int64_t *rows,
                   const int64_t *positions, const int64_t *limits, Span *spans);
int64_t find_units(const Heads *c, const Span *spans, int64_t n, int n_threads, Unit *units);

/* Whether this many queries read keys and values in place. */
INLINE int is_few(const Heads *c, int64_t m) {
  return m <= FEW && c->head_dim % (c->kv_kind == F32 ? LANES : 2 * LANES) == 0;
}
