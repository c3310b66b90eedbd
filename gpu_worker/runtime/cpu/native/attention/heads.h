/* The attention of one layer: its heads, and where its keys and values lie. */
#pragma once
#include "../products/packed/matrix.h"

#define MOST_WIDTH 1024 /* of a head */

/* Which positions a query sees: up to its own; up to its limit, where the step has limits; up to its limit, and the window
 * reaches as far to later ones. */
enum { CAUSAL = 0, PREFIX = 1, BIDIRECTIONAL = 2 };

typedef struct {
  int32_t heads, kv_heads, head_dim, kv_kind, page_size;
  int32_t mask;
  int64_t window;     /* positions that a query sees, its own included; 0: all */
  float scale;        /* of the products of queries and keys */
  float cap;          /* scores s become cap tanh(s / cap); 0: none */
  const float *sinks; /* [heads] one more score, which takes a share of the weights and has no value; or null */
  const float *bias;  /* [heads, columns of distances] added to scores as powers of 2, by key minus query; or null */
  int64_t distances;  /* these columns, the distance 0 in their middle */
  const char *keys, *values; /* [slots, kv_heads, head_dim] */
  int64_t columns;
  const int32_t *table; /* [rows, columns] */
} Heads;

INLINE int64_t slot_of(const Heads *c, int64_t row, int64_t position) {
  const int32_t *pages = c->table + row * c->columns;
  if (c->page_size == 1) return pages[position];
  return (int64_t)pages[position / c->page_size] * c->page_size + position % c->page_size;
}
