/* The paged KV cache, as attention reads it. */
#pragma once
#include "../products/matrix.h"

typedef struct {
  int32_t heads, kv_heads, head_dim, kv_kind, page_size;
  float scale;
  const char *keys, *values; /* [layers, slots, kv_heads, head_dim] */
  int64_t n_slots, columns; /* n_slots 0: all layers use the same ones */
  const int32_t *table; /* [rows, columns] */
} Cache;

INLINE int64_t slot_of(const Cache *c, int64_t row, int64_t position) {
  const int32_t *pages = c->table + row * c->columns;
  if (c->page_size == 1) return pages[position];
  return (int64_t)pages[position / c->page_size] * c->page_size + position % c->page_size;
}
