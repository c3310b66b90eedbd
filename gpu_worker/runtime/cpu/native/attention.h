/* Attention over the paged KV cache. See attention.c. */
#pragma once
#include "matrix.h"

typedef struct {
  int32_t heads, kv_heads, head_dim, kv_kind, page_size;
  float scale;
  const char *keys, *values; /* [layers, slots, kv_heads, head_dim] */
  int64_t n_slots, columns; /* n_slots 0: all layers use the same ones */
  const int32_t *table; /* [rows, columns] */
} Cache;

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

/* A thread's own memory. `width`: the head's, in whole panels; `m` = queries of a span times heads of a group; `all` =
 * those of all key heads of a unit, in whole tiles. With HALF_INPUTS beside a cache in bfloat16, what is multiplied lies
 * there in bfloat16, keys and values in pairs; with TILES these pairs lie in tiles, and a few queries lie as floats. */
typedef struct {
  void *queries; /* [all][KC] */
  float *scores; /* [all][KC] */
  void *weights; /* [all][KC]: the scores themselves, or rounded */
  float *sums;   /* [all][width] */
  void *keys;    /* [KEYS / PANEL][width][PANEL], the head's dimension downwards */
  void *values;  /* [width / PANEL][KEYS][PANEL] */
  uint16_t *widened; /* [LANES, with TILES twice as many][key heads of a unit][head_dim], for a cache in eight bits */
  float *most, *total; /* [all]: highest score so far, sum of weights */
  int64_t *first, *last; /* [all]: the positions that each sees */
  float *now, *by;     /* [m]: highest score with this block, 2^(most - now) */
} Desk;

int64_t span_length(const Cache *c);
int64_t find_spans(const Cache *c, int64_t n_inputs, const int64_t *inputs, const int64_t *rows,
                   const int64_t *positions, const int64_t *limits, Span *spans);
int64_t find_units(const Cache *c, const Span *spans, int64_t n, int n_threads, Unit *units);
Desk new_desk(const Cache *c, int64_t length, Scratch *s);

INLINE int64_t slot_of(const Cache *c, int64_t row, int64_t position) {
  const int32_t *pages = c->table + row * c->columns;
  if (c->page_size == 1) return pages[position];
  return (int64_t)pages[position / c->page_size] * c->page_size + position % c->page_size;
}

/* queries: of the span's first position, at the first group's first head; `q_stride`: from one position to the next. out
 * [t, heads * head_dim]. `next`: what this thread computes next, as far as one knows: its keys and values are asked for. */
void attend(const Cache *c, int64_t layer, int64_t window, const Unit *u, const Unit *next, const float *queries,
            int64_t q_stride, Activations out, Desk *d);
