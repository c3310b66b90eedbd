/* Attention over the paged KV cache. See attend.c. */
#pragma once
#include "desk.h"
#include "spans.h"

Desk new_desk(const Cache *c, int64_t length, Scratch *s);

/* queries: of the span's first position, at the first group's first head; `q_stride`: from one position to the next. out
 * [t, heads * head_dim]. `next`: what this thread computes next, as far as one knows: its keys and values are asked for. */
void attend(const Cache *c, int64_t layer, int64_t window, const Unit *u, const Unit *next, const float *queries,
            int64_t q_stride, Activations out, Desk *d);
