/* Products. See linear.c. */
#pragma once
#include "packed/matrix.h"

Workspace new_workspace(int64_t rows, int64_t k, Arena *s);

/* y [m, n at panel p] (+)= x Wt + b, for m <= ROWS inputs. Forget `held` when x has changed. */
void outputs(const Linear *l, int64_t p, int m, const float *x, int64_t ldx, float *y, int64_t ldy, How how,
             Workspace *b);

/* A matrix in units, each for one thread, for any number of inputs: see `linear`. */
int64_t units_of(const Linear *l, int64_t m);
void linear_unit(const Linear *l, int64_t unit, int64_t m, const float *x, float *y, Workspace *b);

/* y [m, n] (+)= x Wt + b; y may be packed where GATED. Called by every thread of a region; ends with a barrier. */
void linear(const Linear *l, int64_t m, Activations x, Activations y, How how, Workspace *b);
