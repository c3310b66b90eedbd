/* A model and a step, as the caller lays them out. */
#pragma once
#include "../attention/cache.h"
#include "../products/adapters.h"
#include "../products/library.h"

/* With a bias a LayerNorm, else an RMSNorm. */
typedef struct {
  const float *weight, *bias;
} Norm;

/* Without a post_norm, attention and MLP stand side by side: both begin from the input norm. */
typedef struct {
  Norm input_norm, post_norm;
  const float *q_norm, *k_norm;
  Linear qkv, out, gate_up, down; /* gate_up: of `inner` outputs it has no gate, and its activation is a GELU */
  int64_t window;
} Layer;

typedef struct {
  int32_t n_layers, hidden, inner;
  float eps;
  const float *rotary; /* [positions, head_dim]: cos | sin; or null */
  Norm norm;
  Layer *layers;
  Linear head;
  Cache cache;
  const Library *library; /* or null */
} Model;

typedef struct {
  int64_t t, from;          /* positions of the step, or of the share of it that begins at `from` */
  const int64_t *token_ids; /* [t], or null: hidden holds their embeddings */
  const int64_t *positions; /* [t] */
  const int64_t *rotary;    /* [t] the positions by which queries and keys are rotated */
  const int64_t *limits;    /* [t] the end of the positions that each sees, or null: all up to itself */
  const int64_t *rows;      /* [t] page-table rows */
  float *hidden;            /* [t, hidden]; in the end [o, hidden], the outputs' alone, before the last norm */
  float *normed;            /* [t, hidden], and like `mixed` and `acted` maybe packed */
  float *qkv;               /* [t, q + 2 kv] */
  float *mixed;             /* [t, q] */
  float *gates;             /* [t, outputs of gate_up]; unused where gate_up is gated */
  float *acted;             /* [t, inner] */
  const Delta *const *adapters; /* [t] deltas, [layers][MAPS], or null; null where the step has none */
  float *reduced;           /* [t, most outputs of an A], where there are adapters */
  int64_t reduced_stride;
  uint16_t *halves;         /* [t, most terms of a sum], for the library */
  int64_t o;                /* positions whose results are wanted */
  const int64_t *outputs;   /* [o] those, ascending */
  float *logits;            /* [o, vocab], out; or null */
  int32_t n_threads;
  char *scratch;            /* [threads] of `scratch_stride` bytes; see petiole_scratch */
  int64_t scratch_stride;
  void (*progress)(void);   /* called every REPORT_S seconds of a step, between two maps; or null */
} Step;

/* The order of an adapter's deltas in a layer. */
enum { QKV = 0, OUT = 1, GATE_UP = 2, DOWN = 3, MAPS = 4 };
