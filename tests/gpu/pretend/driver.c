/* CUDA's driver, as Triton calls it to load and launch what it has compiled; torch asks it about pointers. */
#include "pretend.h"

#include <stdlib.h>
#include <string.h>

CUresult cuDriverGetVersion(int *version) {
    return (CUresult)cudaDriverGetVersion(version);
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    *device = 0;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    return (CUresult)cudaDeviceGetAttribute(value, (enum cudaDeviceAttr)attribute, device);
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    static int one;
    *context = (CUcontext)&one;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device) {
    return cuDeviceGet(device, 0);
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    *flags = 0;
    *active = 1;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = cudaGetErrorString((cudaError_t)error);
    return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr address) {
    Area area;
    if (attribute != CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
        return (CUresult)refuse(cudaErrorNotSupported, "cuPointerGetAttribute", "an attribute of no use here");
    if (!find_area((void *)address, &area))
        return CUDA_ERROR_INVALID_VALUE;
    *(CUdeviceptr *)value = address;
    return CUDA_SUCCESS;
}

/* PG, "Lazy Loading": loading may synchronize, so that kernels are to be loaded before a capture. */
CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    static int one;
    *module = (CUmodule)&one;
    return (CUresult)refuse_unsafe("cuModuleLoadData");
}

CUresult cuModuleUnload(CUmodule module) {
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    Kernel *kernel = new_object(sizeof *kernel);
    *kernel = (Kernel){NULL, strdup(name), SHARED_DEFAULT, NULL};
    *function = (CUfunction)kernel;
    return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    *value = 0;
    if (attribute == CU_FUNC_ATTRIBUTE_NUM_REGS)
        *value = 64;
    if (attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)
        *value = MAX_THREADS;
    return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
    if (attribute >= CU_FUNC_ATTRIBUTE_MAX) /* of a later driver: Triton does without */
        return CUDA_ERROR_INVALID_VALUE;
    if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)
        return CUDA_SUCCESS;
    return (CUresult)allow_shared((Kernel *)function, value, "cuFuncSetAttribute");
}

CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) {
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra) {
    dim3 grid = {config->gridDimX, config->gridDimY, config->gridDimZ};
    dim3 block = {config->blockDimX, config->blockDimY, config->blockDimZ};
    return (CUresult)launch(stream_of(config->hStream), (Kernel *)function, grid, block, config->sharedMemBytes,
                            "cuLaunchKernelEx");
}

/* Triton's modules are linked with these, and call none of them where a context is current. */

static CUresult refuse_context(const char *call) {
    return (CUresult)refuse(cudaErrorNotSupported, call, "the context is fixed");
}

CUresult cuCtxSetCurrent(CUcontext context) {
    return refuse_context("cuCtxSetCurrent");
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    return refuse_context("cuDevicePrimaryCtxRetain");
}

CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
    return refuse_context("cuCtxGetLimit");
}

CUresult cuCtxSetLimit(CUlimit limit, size_t value) {
    return refuse_context("cuCtxSetLimit");
}
