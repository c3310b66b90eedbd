/* What one position stores, and what it reads. See rules.c. */
#pragma once
#include "../products/packed/matrix.h"

/* What one position brings, at some dimensions of a head's values. */
typedef struct {
  const float *query, *key; /* [key_dim] */
  float kept, share;        /* how much of what is stored is kept; how much of the values is added */
  float skip;               /* of the scan: a factor of the values, which are added to the outputs */
} Change;

/* stored [key_dim][PANEL], in place; values [PANEL] become outputs. */
void apply_delta_rule(float *stored, int64_t key_dim, const Change *c, float *values);
void apply_scan(float *stored, int64_t key_dim, const Change *c, float *values);
