/* A thread's memory for attention, and how much it computes at a time. */
#pragma once
#include "../products/kernels/tiles.h"
#include "heads.h"

#define KEYS 128 /* at most KC */
#define FEW 8 /* this many queries read the keys in place; for more, keys are packed once */
#define HEADS 64 /* of a unit, at most */
#define UNITS 2 /* this many units each thread should have */
#define NOTHING -1e30f

/* Tiles multiply many queries. A few are multiplied in place by vectors of floats, which were rounded to bfloat16, in the
 * order of tiles.c: of each DEPTH terms the even and the odd ones apart. */
#ifdef TILES
#define IN_PLACE(kind) F32 /* the type of what a few queries and their weights lie in */
#define VALUES_AT_ONCE DEPTH
#define PAIR_LANES SIDE       /* from one row of pairs to the next */
#define HALF_LANES (TILE / 4) /* from the pairs of a panel's first outputs to those of its last */
#define NEAR 1                /* how near lines are prefetched: 3 is the first cache, 2 the second, 1 one farther away */
#define QUERIES 384           /* rows of a span: its queries, times the heads of a group */
#define TOGETHER (2 * SIDE)   /* of many rows, those that go from scores to sums at a time: the first cache holds them */
#else
#define IN_PLACE(kind) (kind)
#define VALUES_AT_ONCE LANES
#define PAIR_LANES PANEL
#define HALF_LANES LANES
#define NEAR 2
#define QUERIES 192
#define TOGETHER QUERIES
#endif

/* A thread's own memory. `width`: the head's, in whole panels; `m` = queries of a span times heads of a group; `all` =
 * those of all key heads of a unit, in whole tiles. With HALF_INPUTS beside a cache in bfloat16, what is multiplied lies
 * there in bfloat16, keys and values in pairs; with TILES these pairs lie in tiles, and a few queries lie as floats. */
typedef struct {
  void *queries; /* [ceil(width / KC)][all][KC] */
  float *scores; /* [all][KC] */
  void *weights; /* [all][KC]: the scores themselves, or rounded */
  float *sums;   /* [all][width] */
  void *keys;    /* [KEYS / PANEL][width][PANEL], the head's dimension downwards */
  void *values;  /* [width / PANEL][KEYS][PANEL] */
  uint16_t *widened; /* [LANES, with TILES twice as many][key heads of a unit][head_dim], for a cache in eight bits */
  float *most, *total; /* [all]: highest score so far, sum of weights */
  int64_t *first, *last; /* [all]: the positions that each sees */
  float *now, *by;     /* [m]: highest score with this block, 2^(most - now) */
  int64_t slice;       /* from KC dimensions of all queries to the next ones */
  int padded_from;     /* the width of a head from which on keys and values have numbers in whole panels, or 0 */
} Scratch;
