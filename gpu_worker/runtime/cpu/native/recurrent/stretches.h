/* The neighbouring positions of one row in a step. */
#pragma once
#include "../arithmetic/arena.h"

/* The step's positions `t` .. `t + n - 1`, all of one row. */
typedef struct {
  int64_t t, n, row;
} Stretch;

/* Returns how many stretches `t` positions have. */
INLINE int64_t find_stretches(int64_t t, const int64_t *rows, Stretch *stretches) {
  int64_t n = 0;
  for (int64_t i = 0; i < t; i++) {
    if (n && stretches[n - 1].row == rows[i]) stretches[n - 1].n++;
    else stretches[n++] = (Stretch){i, 1, rows[i]};
  }
  return n;
}
