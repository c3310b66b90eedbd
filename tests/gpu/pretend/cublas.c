/* cuBLAS, as torch calls it: a handle knows its stream, and a product is one launch.
 *
 * Its headers want those of CUDA's C++ library, which torch does not bring. What is declared here instead has the
 * same calling convention: handles and descriptors are pointers, enumerations are ints. */
#include "pretend.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef enum { SUCCESS = 0, NOT_INITIALIZED = 1, EXECUTION_FAILED = 13 } Status;

typedef struct {
    cudaStream_t stream;
} Handle;

/* cublasLtMatmulHeuristicResult_t */
typedef struct {
    uint64_t algorithm[8];
    size_t workspace;
    Status state;
    float waves;
    int reserved[4];
} Heuristic;

static Status product(cudaStream_t stream, const char *call) {
    cudaError_t error = launch_product(stream_of(stream), call);
    return error == cudaSuccess ? SUCCESS : EXECUTION_FAILED;
}

/* cuBLAS, "cublasCreate()": it allocates memory on the device. */

Status cublasCreate_v2(Handle **handle) {
    if (refuse_unsafe("cublasCreate") != cudaSuccess)
        return NOT_INITIALIZED;
    *handle = new_object(sizeof **handle);
    return SUCCESS;
}

Status cublasSetStream_v2(Handle *handle, cudaStream_t stream) {
    handle->stream = stream;
    return SUCCESS;
}

Status cublasSetWorkspace_v2(Handle *handle, void *workspace, size_t size) {
    return SUCCESS;
}

Status cublasSetMathMode(Handle *handle, int mode) {
    return SUCCESS;
}

Status cublasGetMathMode(Handle *handle, int *mode) {
    *mode = 0;
    return SUCCESS;
}

Status cublasSgemm_v2(Handle *handle, int transa, int transb, int m, int n, int k, const float *alpha,
                      const float *a, int lda, const float *b, int ldb, const float *beta, float *c, int ldc) {
    return product(handle->stream, "cublasSgemm");
}

Status cublasGemmEx(Handle *handle, int transa, int transb, int m, int n, int k, const void *alpha, const void *a,
                    int type_a, int lda, const void *b, int type_b, int ldb, const void *beta, void *c, int type_c,
                    int ldc, int compute, int algorithm) {
    return product(handle->stream, "cublasGemmEx");
}

/* ---------------------------------------------------------------- cublasLt: every descriptor is empty */

Status cublasLtMatmulDescCreate(void **descriptor, int compute, int scale) {
    *descriptor = new_object(1);
    return SUCCESS;
}

Status cublasLtMatmulDescDestroy(void *descriptor) {
    free(descriptor);
    return SUCCESS;
}

Status cublasLtMatmulDescSetAttribute(void *descriptor, int attribute, const void *value, size_t size) {
    return SUCCESS;
}

Status cublasLtMatmulPreferenceCreate(void **preference) {
    *preference = new_object(1);
    return SUCCESS;
}

Status cublasLtMatmulPreferenceDestroy(void *preference) {
    free(preference);
    return SUCCESS;
}

Status cublasLtMatmulPreferenceSetAttribute(void *preference, int attribute, const void *value, size_t size) {
    return SUCCESS;
}

Status cublasLtMatrixLayoutCreate(void **layout, int type, uint64_t rows, uint64_t columns, int64_t stride) {
    *layout = new_object(1);
    return SUCCESS;
}

Status cublasLtMatrixLayoutDestroy(void *layout) {
    free(layout);
    return SUCCESS;
}

Status cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d,
                                      void *preference, int wanted, Heuristic *results, int *found) {
    memset(results, 0, sizeof *results);
    *found = 1;
    return SUCCESS;
}

Status cublasLtMatmul(void *handle, void *operation, const void *alpha, const void *a, void *layout_a,
                      const void *b, void *layout_b, const void *beta, const void *c, void *layout_c, void *d,
                      void *layout_d, const void *algorithm, void *workspace, size_t size, cudaStream_t stream) {
    return product(stream, "cublasLtMatmul");
}
