/* Sizes, and memory that is taken piece by piece. */
#pragma once
#include "vectors.h"

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger_of(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t parts(int64_t n, int64_t size) { return (n + size - 1) / size; }

/* Memory that the caller holds, taken piece by piece. Without any, `used` tells how much there must be. */
typedef struct {
  char *memory;
  int64_t used;
} Arena;

INLINE void *allocate(Arena *s, int64_t bytes) {
  void *at = s->memory ? s->memory + s->used : NULL;
  s->used += parts(bytes, 64) * 64;
  return at;
}

INLINE float *allocate_floats(Arena *s, int64_t n) { return allocate(s, n * (int64_t)sizeof(float)); }
