/* CUDA's runtime, continued: kernels and their launches. */
#include "pretend.h"

#include <stdlib.h>

typedef struct {
    dim3 grid;
    dim3 block;
    size_t shared;
    cudaStream_t stream;
} Launch;

static pthread_mutex_t kernels_lock = PTHREAD_MUTEX_INITIALIZER;
static Kernel *kernels;
static _Thread_local Launch pushed; /* f<<<...>>>(...) pushes, evaluates its arguments, and pops */

/* Libraries register their kernels when they are loaded, as compiled by nvcc (crt/host_runtime.h). */

void **__cudaRegisterFatBinary(void *binary) {
    static void *handle;
    return &handle;
}

void __cudaRegisterFatBinaryEnd(void **handle) {
}

void __cudaUnregisterFatBinary(void **handle) {
}

void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int external, size_t size,
                       int constant, int global) {
}

void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int threads,
                            void *thread, void *block, void *block_size, void *grid_size, int *warp_size) {
    Kernel *kernel = new_object(sizeof *kernel);
    pthread_mutex_lock(&kernels_lock);
    *kernel = (Kernel){host, name, SHARED_DEFAULT, kernels};
    kernels = kernel;
    pthread_mutex_unlock(&kernels_lock);
}

static Kernel *kernel_of(const void *code) {
    pthread_mutex_lock(&kernels_lock);
    Kernel *kernel = kernels;
    while (kernel != NULL && kernel->code != code)
        kernel = kernel->next;
    pthread_mutex_unlock(&kernels_lock);
    return kernel;
}

static cudaError_t unknown_kernel(const char *call) {
    return refuse(cudaErrorInvalidDeviceFunction, call, "an unknown kernel");
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
    pushed = (Launch){grid, block, shared, stream};
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = pushed.grid;
    *block = pushed.block;
    *shared = pushed.shared;
    *(cudaStream_t *)stream = pushed.stream;
    return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *code) {
    *kernel = (cudaKernel_t)kernel_of(code);
    return *kernel != NULL ? cudaSuccess : unknown_kernel("__cudaGetKernel");
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                               cudaStream_t stream) {
    return launch(stream_of(stream), (Kernel *)kernel, grid, block, shared, "__cudaLaunchKernel");
}

cudaError_t cudaLaunchKernel(const void *code, dim3 grid, dim3 block, void **arguments, size_t shared,
                             cudaStream_t stream) {
    const Kernel *kernel = kernel_of(code);
    if (kernel == NULL)
        return unknown_kernel("cudaLaunchKernel");
    return launch(stream_of(stream), kernel, grid, block, shared, "cudaLaunchKernel");
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *code, void **arguments) {
    const Kernel *kernel = kernel_of(code);
    if (kernel == NULL)
        return unknown_kernel("cudaLaunchKernelExC");
    return launch(stream_of(config->stream), kernel, config->gridDim, config->blockDim, config->dynamicSmemBytes,
                  "cudaLaunchKernelExC");
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *code) {
    *attributes = (struct cudaFuncAttributes){
        .maxThreadsPerBlock = MAX_THREADS,
        .numRegs = 64,
        .ptxVersion = 90,
        .binaryVersion = 90,
    };
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *code, enum cudaFuncAttribute attribute, int value) {
    Kernel *kernel = kernel_of(code);
    if (kernel == NULL)
        return unknown_kernel("cudaFuncSetAttribute");
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize)
        return cudaSuccess;
    return allow_shared(kernel, value, "cudaFuncSetAttribute");
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *code, int threads,
                                                                   size_t shared, unsigned flags) {
    *n = 2;
    return cudaSuccess;
}
