/* What lies between two products. See between.c. Called by every thread of a region; each function ends with a barrier. */
#pragma once
#include "plans.h"

/* From embeddings to the first layer's inputs, and the per-layer inputs of all layers. */
void finish_inputs(const Model *m, const Step *s, Workspace *b);

/* What comes before a product: its inputs, and before them what the product before it gave. */
void prepare(const Model *m, const Plans *plans, int64_t at, Room *own);

/* What becomes of logits. */
void finish_logits(const Model *m, const Step *s);
