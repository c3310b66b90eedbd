/* Attention over the paged KV cache. See attend.c. */
#pragma once
#include "scratch.h"
#include "spans.h"

/* A scratch for the layers of several shapes and steps of `t` positions. */
Scratch new_scratch(const Heads *const *shapes, int64_t n, int64_t t, Arena *s);

/* The queries of each position: those of its heads `head` apart, and after each its gate, where these are gated. */
typedef struct {
  const float *at;
  int64_t stride, head;
  int gated;
} Queries;

/* queries: of the span's first position, at the unit's first head. out [t, heads * head_dim], times the sigmoid of the
 * gates. `next`: what this thread computes next, as far as one knows: its keys and values are prefetched. */
void attend(const Heads *c, const Unit *u, const Unit *next, Queries queries, Activations out, Scratch *d);
