/* A matrix: where its weights lie, and the memory of a thread that multiplies with them. */
#pragma once
#include "../../arithmetic/arena.h"

#define PANEL 32 /* outputs side by side: two vectors */
#define PARTS (PANEL / WIDTH) /* registers that hold a number for each of them */
#define PAIR (2 * PANEL)
#define KC 256   /* terms of a sum that are added up in registers in one go; the row length of packed inputs */
/* Input rows whose sums the registers hold. */
#ifdef __AVX512F__
#define MB 12
#else
#define MB 3
#endif
#define WHOLE_ROWS -1
/* Input rows that stay in the second-level cache while the weights pass by. */
#ifdef TILES
#define ROWS 256
#else
#define ROWS 192
#endif
#define MOST_PANELS 4 /* that a thread computes together */

/* Only with DOT: INT8_HALF, with inputs in bfloat16; TWELVE, bfloat16 in 12 bits. Only with groups: FOUR, codes of four bits,
 * and SIX, numbers from -32 to 31. E4M3: with groups, or of keys and values. */
enum { F32 = 0, BF16 = 1, INT8 = 2, INT8_HALF = 3, E4M3 = 4, TWELVE = 5, FOUR = 7, SIX = 9 };

typedef struct {
  const char *weight; /* whole blocks: [n / PANEL][k][PANEL]; see pack.h */
  const char *tail;   /* the block of the last n % PANEL outputs, padded, or null */
  const float *scale; /* [n], for both kinds of INT8, for TWELVE, and maybe beside groups */
  const float *bias;  /* [n] or null */
  int32_t n, k, kind;   /* k is even for BF16 and INT8_HALF */
  int64_t stride;       /* from one block to the next, in bytes */
  const struct Groups *groups; /* of inputs that share a scale, see groups.h; or null */
  int32_t activation;   /* of outputs or gates, where ACTED or GATED: see functions.h */
} Linear;

/* A thread's own memory for products of at most `rows` inputs of at most `k` terms. */
typedef struct {
  void *packed;      /* of the first thread, for all: the inputs of a matrix as tiles.h packs them */
  void *inputs;      /* [ceil(k / KC)][rows][KC] or, for wide tiles, [rows][k]: float, or bfloat16 where HALF_INPUTS. What
                      * group_inputs makes.
                      * With TILES those of an adapter's matrix, as tiles.h packs them, or a row before it is packed */
  const float *held; /* whose copy `inputs` is */
  int64_t form;      /* of that copy: 0: sliced; WHOLE_ROWS: [rows][k] */
  float *sums;       /* [2][MOST_PANELS][ROWS][PANEL] */
  void *panel;       /* widened weights: [KC][PANEL] floats, or [k / 2][PAIR] pairs of bfloat16, or two chunks of tiles.c or group_tiles.c */
  const char *widened; /* with TILES: the weights whose chunk lies in `panel`, or null */
  int in_other;        /* whether it is the second one there */
  void (*meanwhile)(void *of); /* other work that is done beside products on tiles, or null */
  void *of;
} Workspace;

/* Beside bfloat16 with DOT, inputs are bfloat16; bytes are exact in it, too. */
#ifdef DOT
#define HALF_INPUTS(kind) ((kind) == BF16 || (kind) == INT8_HALF || (kind) == TWELVE)
#else
#define HALF_INPUTS(kind) ((void)(kind), 0)
#endif

INLINE int64_t input_size(int kind) { return HALF_INPUTS(kind) ? 2 : 4; }
INLINE int64_t size_of(int kind) { return kind == F32 ? 4 : kind == BF16 || kind == TWELVE ? 2 : 1; }

/* Inputs or outputs of a matrix: floats, row by row, or `packed` in bfloat16, as tiles.h says. */
typedef struct {
  void *at;
  int packed;
} Activations;

/* What becomes of y. ACTED: y = activation(x Wt + b). GATED: y [m, n / 2] = activation(gates) * ups, where x Wt + b is
 * gates | ups, and n / 2 is a multiple of PANEL. */
typedef enum { SET, ADD, ACTED, GATED } How;
