/* What stands around attention over latents. See latents.c. Called by every thread of a region; each function ends with a
 * barrier. */
#pragma once
#include "plans.h"

/* What NET_GATES makes queries of, in `mixed`. */
void set_query_inputs(const Layer *l, const Step *s);

/* Queries of all positions, in `queries`; their keys are stored. inputs [t]: which of the step's these are. */
void finish_latent_heads(const Layer *l, const Step *s, const int64_t *inputs, Workspace *b);

/* From sums of keys to the inputs of OUT, both in `mixed`. */
void finish_latents(const Layer *l, const Step *s, Workspace *b);
