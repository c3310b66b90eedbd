/* A mixer that keeps a state. See recurrent.c. */
#pragma once
#include "convolution.h"

/* Where a part of each head of keys lies among a matrix's outputs: that of the first, and how far one is from the next.
 * channel: of the first, in the convolution, whose channels have the part of one head after that of another. */
typedef struct {
  int32_t first, apart, channel;
} Part;

/* SHORT: a convolution between two gates, whose inputs' matrix gives [b | c | x]. Others store values under keys, after a
 * convolution of queries, keys and values: a gated delta net, and the scan of Mamba-2. */
enum { SHORT = 0, DELTA_RULE = 1, SCAN = 2 };

typedef struct {
  Convolution convolution;
  int32_t rule;
  int32_t key_heads, each, run, key_dim, value_dim; /* each: heads of values that a head of keys serves, run: in a row */
  Part queries, keys, values, z; /* among the outputs of the matrix of inputs */
  Part b, a;                     /* of the matrix of gates; a scan has `a` alone, of the matrix of inputs */
  const float *fading, *bias, *skip; /* [heads of values]; skip: of a scan */
  float *matrices;               /* [places][heads of values][value_dim / PANEL][key_dim][PANEL]; the last block is narrower */
  int8_t *codes;                 /* or null: copies are rounded, from place `places` on, laid out as matrices are */
  float *scales;                 /* one for each PANEL of codes */
  int64_t places;                /* of matrices */
} Recurrent;

/* The positions of a step, and what the products made of them: overwritten. */
typedef struct {
  const Stretch *stretches;
  int64_t n, t;          /* stretches, positions */
  const int64_t *copies; /* [t] the place to which the state after a position is copied, or -1; or null: there are none */
  float *inputs, *gates; /* of a scan the same */
  int64_t inputs_stride, gates_stride;
} Advance;

/* Floats of a thread's room. */
int64_t petiole_recurrent_room(const Recurrent *r);

/* Advances the states of all rows. The outputs stand where the inputs had values, or b. Called by every thread of a region;
 * ends with a barrier. */
void advance_states(const Recurrent *r, const Advance *a, float *room);

/* What a position costs beside the products, in multiply-adds. */
INLINE int64_t recurrent_cost(const Recurrent *r) {
  return (int64_t)r->convolution.kernel * r->convolution.channels + 3ll * r->key_heads * r->each * r->key_dim * r->value_dim;
}
