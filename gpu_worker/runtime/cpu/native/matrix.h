/* Products with weights in panels. See matrix.c. */
#pragma once
#include "vectors.h"

#define PANEL 32 /* outputs side by side: two vectors */
#define PAIR (2 * PANEL)
#define KC 256   /* terms of a sum that are added up in registers in one go; the row length of packed inputs */
/* Input rows that stay in the second-level cache while the weights pass by. */
#ifdef TILES
#define ROWS 256
#else
#define ROWS 192
#endif

/* Only with DOT: INT8_HALF, with inputs in bfloat16; TWELVE, bfloat16 in 12 bits. E4M3: of keys and values. */
enum { F32 = 0, BF16 = 1, INT8 = 2, INT8_HALF = 3, E4M3 = 4, TWELVE = 5 };

typedef struct {
  const char *weight; /* whole blocks: [n / block][k][block]; see pack.h */
  const char *tail;   /* the block of the last n % block outputs, padded, or null */
  const float *scale; /* [n], for both kinds of INT8, and for TWELVE */
  const float *bias;  /* [n] or null */
  int32_t n, k, kind, block; /* k is even for BF16 and INT8_HALF; block is a multiple of PANEL */
  void *library;        /* the same weights as a library has them, or null; see library.h */
  int64_t library_from; /* so many rows or more are the library's */
  int64_t stride;       /* from one block to the next, in bytes */
} Linear;

/* A thread's own memory for products of at most `rows` inputs of at most `k` terms. */
typedef struct {
  void *packed;      /* of the first thread, for all: the inputs of a map as tiles.h packs them */
  void *inputs;      /* [ceil(k / KC)][rows][KC] or, for wide tiles, [rows][k]: float, or bfloat16 where HALF_INPUTS.
                      * With TILES those of an adapter's map, as tiles.h packs them, or a row before it is packed */
  const float *held; /* whose copy `inputs` is */
  int whole_rows;    /* whether that is [rows][k] */
  float *sums;       /* [2][ROWS][PAIR] */
  void *panel;       /* widened weights: [KC][PANEL] floats, or [k / 2][PAIR] pairs of bfloat16, or two chunks of tiles.c */
  const char *widened; /* with TILES: the weights whose chunk lies in `panel`, or null */
  int in_other;        /* whether it is the second one there */
  void (*meanwhile)(void *of); /* other work that is done beside products on tiles, or null */
  void *of;
} Bench;

/* Beside bfloat16 with DOT, inputs are bfloat16; bytes are exact in it, too. */
#ifdef DOT
#define HALF_INPUTS(kind) ((kind) == BF16 || (kind) == INT8_HALF || (kind) == TWELVE)
#else
#define HALF_INPUTS(kind) ((void)(kind), 0)
#endif

INLINE int64_t size_of(int kind) { return kind == F32 ? 4 : kind == BF16 || kind == TWELVE ? 2 : 1; }
INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t parts(int64_t n, int64_t size) { return (n + size - 1) / size; }

/* Memory that the caller holds, taken piece by piece. Without any, `used` tells how much there must be. */
typedef struct {
  char *memory;
  int64_t used;
} Scratch;

INLINE void *take(Scratch *s, int64_t bytes) {
  void *at = s->memory ? s->memory + s->used : NULL;
  s->used += parts(bytes, 64) * 64;
  return at;
}

INLINE float *take_floats(Scratch *s, int64_t n) { return take(s, n * (int64_t)sizeof(float)); }

Bench new_bench(int64_t rows, int64_t k, Scratch *s);

/* c [m, PANEL] (+)= x [m, kc] w [kc, PANEL]. Rows of x are KC apart, those of c `ldc`. `half`: x and w are bfloat16,
 * w in pairs [ceil(kc / 2)][PANEL][2]; an odd kc is rounded up. Only with DOT. With TILES w lies as `multiply_tiles` takes
 * it, and whole tiles are multiplied: c has rows up to a multiple of 16, and behind the last of kc, up to a multiple of
 * DEPTH, x has zeros, and w has numbers. */
void multiply(int half, int m, int kc, const void *x, const void *w, float *c, int64_t ldc, int add);

/* y [m, n at panel p] (+)= x Wt + b, for m <= ROWS inputs. Forget `held` when x has changed. */
void outputs(const Linear *l, int64_t p, int m, const float *x, int64_t ldx, float *y, int64_t ldy, int add, Bench *b);

/* Rows of a packed embedding: out [t, k]. Called by every thread of a region. */
void embed(const Linear *l, int64_t t, const int64_t *ids, float *out);

/* Inputs or outputs of a map: floats, row by row, or `packed` in bfloat16, as tiles.h packs inputs. */
typedef struct {
  void *at;
  int packed;
} Activations;

/* What becomes of y. GATED: y [m, n / 2] = silu(gates) * ups, where x Wt + b is gates | ups, and n / 2 is a multiple of
 * PANEL. */
typedef enum { SET, ADD, GATED } How;

/* y [m, n] (+)= x Wt + b; y may be packed where GATED. Called by every thread of a region; ends with a barrier. */
void linear(const Linear *l, int64_t m, Activations x, Activations y, How how, Bench *b);
