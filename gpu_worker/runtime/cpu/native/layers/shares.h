/* Shares of a step. See shares.c. */
#pragma once
#include "model.h"

/* Cuts a step between sequences into `n_threads` shares of like cost. False where there is no such cut. */
int share(const Model *m, const Step *s, Step *shares);
