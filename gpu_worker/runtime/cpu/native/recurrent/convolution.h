/* A causal convolution of each channel. See convolution.c. */
#pragma once
#include "stretches.h"

typedef struct {
  int32_t kernel, channels;
  int32_t kind;        /* of stored inputs: F32 or BF16. All inputs are rounded to it, so nobody sees what was stored */
  const float *weight; /* [kernel][channels] */
  const float *bias;   /* [channels] or null */
  char *inputs;        /* [places][kernel - 1][channels]: the last inputs of each state */
} Convolution;

/* The channels `from` .. `from + n - 1` of a stretch, in place: inputs become outputs. x: where those channels of the step's
 * first position lie; stride: from one position to the next. copies: see `Advance`. The state of the row moves after the
 * stretch. before: room for [kernel - 1][n]. */
void convolve(const Convolution *c, int64_t from, int64_t n, const Stretch *s, const int64_t *copies, float *x,
              int64_t stride, float *before);
