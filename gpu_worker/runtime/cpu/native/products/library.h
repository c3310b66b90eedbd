/* Products that a library makes of the same weights. See library.c. */
#pragma once
#include "packed/matrix.h"

/* torch's C interface, by address. Each returns 0, or a number where it failed. */
typedef struct {
  int32_t (*from_memory)(void *data, int64_t n_dims, const int64_t *sizes, const int64_t *strides, int64_t offset,
                         int32_t dtype, int32_t device_type, int32_t device_index, void **tensor);
  int32_t (*multiply)(void *x, void *weights, void **bias, const char *then, const double **scalars,
                      int64_t n_scalars, const char **algorithm, void **y);
  int32_t (*data_of)(void *tensor, void **data);
  int32_t (*release)(void *tensor);
  int32_t dtype; /* torch's number for bfloat16 */
} Library;

/* Whether the library is to make the product of `m` inputs. */
INLINE int of_library(const Linear *l, int64_t m) { return l->library && m >= l->library_from; }

/* y [m, n] (+)= x Wt + b, outside of any region. halves: scratch, [m, k]. Returns 0 where the library fails: y is
 * as it was. */
int library_linear(const Library *library, const Linear *l, int64_t m, const float *x, float *y, int add,
                   uint16_t *halves, int n_threads);
