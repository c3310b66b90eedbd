/* Products of torch's own library (oneDNN), which knows instructions of processors that the C code here does not know.
 *
 * It reads weights in bfloat16 where pack.c has packed them: in blocks of 64 outputs, or of 32, their orders are the
 * same, byte for byte, so either may compute any number of rows. It is called through torch's C interface, without
 * Python: a step is one call, and no lock is taken. Inputs and outputs of the library are bfloat16.
 *
 * The sums of a row may run in another order beside other rows. So to choose the library is to give up "the same bits in
 * any batch" (products.py).
 */
#include "library.h"

#include "linear.h"
#include "kernels/tiles.h"

#include <omp.h>

int library_linear(const Library *library, const Linear *l, int64_t m, const float *x, float *y, int add,
                   uint16_t *halves, int n_threads) {
  const int64_t sizes[] = {m, l->k}, strides[] = {l->k, 1};
  void *inputs = NULL, *product = NULL, *data = NULL;
#pragma omp parallel for schedule(static) num_threads(n_threads)
  for (int64_t i = 0; i < m; i++) narrow(x + i * l->k, l->k, halves + i * l->k);
  int failed = library->from_memory(halves, 2, sizes, strides, 0, library->dtype, 0, 0, &inputs) ||
               library->multiply(inputs, l->library, NULL, "none", NULL, 0, NULL, &product) ||
               library->data_of(product, &data);
  if (!failed) {
    const uint16_t *sums = data;
#pragma omp parallel for schedule(static) num_threads(n_threads)
    for (int64_t i = 0; i < m; i++) {
      float *out = y + i * l->n;
      for (int64_t c = 0; c < l->n; c += LANES) { /* n is a multiple of 32 */
        vf total = (vf)(widen_halves(sums + i * l->n + c) << 16);
        if (l->bias) total += load(l->bias + c);
        store(out + c, add ? load(out + c) + total : total);
      }
    }
  }
  if (product) library->release(product);
  if (inputs) library->release(inputs);
  return !failed;
}

/* The bytes of scratch that each thread of `petiole_linear` needs. */
int64_t petiole_linear_scratch(const Linear *l, int64_t m) {
  Arena none = {NULL, 0};
  new_workspace(m, l->k, &none);
  return none.used;
}

/* One product by itself, so that it can be measured. Returns 0 where the library fails. */
int32_t petiole_linear(const Library *library, const Linear *l, int64_t m, const float *x, float *y,
                       uint16_t *halves, char *scratch, int64_t stride, int32_t n_threads) {
  if (of_library(l, m)) return library_linear(library, l, m, x, y, 0, halves, n_threads);
  const Workspace first = new_workspace(m, l->k, &(Arena){scratch, 0});
#pragma omp parallel num_threads(n_threads)
  {
    Workspace own = new_workspace(m, l->k, &(Arena){scratch + omp_get_thread_num() * stride, 0});
    own.packed = first.packed;
    const uint32_t before = begin_tiles();
    linear(l, m, (Activations){(void *)x, 0}, (Activations){y, 0}, SET, &own);
    end_tiles(before);
  }
  return 1;
}
