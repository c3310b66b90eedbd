/* Where the numbers of blocks of GGUF files go. */
#pragma once
#include "../../arithmetic/arena.h"

/* ggml's numbers of types. */
enum {
  Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13, Q6_K = 14,
  IQ4_NL = 20, IQ4_XS = 23, MXFP4 = 39,
};

#define AT_A_TIME 4096 /* blocks */
#define LARGE_PAGE (1 << 21) /* bytes: two threads that write to a new one at the same time both clear it */

/* n rows of k inputs. The form may be wider than the type's own: numbers in place of codes of four bits, and groups of which
 * a group of the type has several. */
typedef struct {
  const char *blocks;
  char *codes, *scales;
  char *zeros, *factors, *zero_factors; /* where the type has them */
  int64_t n, k;
  int64_t finer;    /* groups in a group of the type */
  int32_t bits;     /* of a code: four, six or eight */
  int8_t table[16]; /* the numbers that codes of four bits become */
} BlocksInto;
