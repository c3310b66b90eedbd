/* Mixtures of experts. See experts.c. Called by every thread of a region; ends with a barrier. */
#pragma once
#include "plans.h"

/* From a router's scores to the output of a layer's feed-forward, in `added`. */
void mix_experts(const Model *m, const Plan *p, const Layer *l, Room *own);
