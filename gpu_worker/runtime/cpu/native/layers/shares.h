/* Shares of a step. See shares.c. */
#pragma once
#include "model.h"

/* What one thread computes in a step, in multiply-adds, attention included. INT64_MAX if it should not: one thread alone
 * computes small steps of small models (`small` in model.h), for several would wait for each other after each product, and for
 * the host's thread. */
int64_t petiole_cost(const Model *m, const Step *s);

/* Cuts a step between sequences into `n_threads` shares of like cost. False where there is no such cut. */
int share(const Model *m, const Step *s, Step *shares);

/* Some sequences of a share, from position `from` on: as many as are computed at a time. Returns where the next ones begin. */
int64_t next_part(const Model *m, const Step *share, int64_t from, Step *part);
