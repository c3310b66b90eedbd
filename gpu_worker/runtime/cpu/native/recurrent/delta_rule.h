/* The gated delta rule. See delta_rule.c. */
#pragma once
#include "../products/packed/matrix.h"

/* What one position brings, at some dimensions of a head's values. */
typedef struct {
  const float *query, *key; /* [key_dim] */
  float kept, share;        /* how much of what is stored is kept; of the way to the new values */
} Change;

/* stored [key_dim][PANEL], in place; values [PANEL] become outputs. */
void apply_delta_rule(float *stored, int64_t key_dim, const Change *c, float *values);
