/* CUDA's runtime: the device, streams, captures, graphs, events. */
#include "pretend.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

/* ---------------------------------------------------------------- the device */

cudaError_t cudaGetDeviceCount(int *count) {
    *count = 1;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device) {
    *device = 0;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
    return device == 0 ? cudaSuccess : refuse(cudaErrorInvalidDevice, "cudaSetDevice", "there is one device");
}

cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError(void) {
    return last_error;
}

const char *cudaGetErrorString(cudaError_t error) {
    static _Thread_local char text[64];
    snprintf(text, sizeof text, "the pretended card refused this with error %d", error);
    return text;
}

const char *cudaGetErrorName(cudaError_t error) {
    return cudaGetErrorString(error);
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    const char *name = getenv("PRETEND_NAME");
    *properties = (struct cudaDeviceProp){
        .totalGlobalMem = card_memory,
        .major = 9,
        .multiProcessorCount = MULTIPROCESSORS,
        .warpSize = 32,
        .maxThreadsPerBlock = MAX_THREADS,
        .maxThreadsPerMultiProcessor = 2 * MAX_THREADS,
        .maxBlocksPerMultiProcessor = 32,
        .maxThreadsDim = {MAX_THREADS, MAX_THREADS, MAX_THREADS_Z},
        .maxGridSize = {MAX_GRID_X, MAX_GRID_YZ, MAX_GRID_YZ},
        .regsPerBlock = REGISTERS,
        .regsPerMultiprocessor = REGISTERS,
        .sharedMemPerBlock = SHARED_DEFAULT,
        .sharedMemPerBlockOptin = SHARED_OPT_IN,
        .sharedMemPerMultiprocessor = SHARED_MULTIPROCESSOR,
        .l2CacheSize = 50 << 20,
        .unifiedAddressing = 1,
    };
    snprintf(properties->name, sizeof properties->name, "%s", name != NULL ? name : "pretended H100");
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    static const int values[cudaDevAttrMax] = {
        [cudaDevAttrMaxThreadsPerBlock] = MAX_THREADS,
        [cudaDevAttrMaxGridDimX] = MAX_GRID_X,
        [cudaDevAttrMaxSharedMemoryPerBlock] = SHARED_DEFAULT,
        [cudaDevAttrMaxSharedMemoryPerBlockOptin] = SHARED_OPT_IN,
        [cudaDevAttrMaxSharedMemoryPerMultiprocessor] = SHARED_MULTIPROCESSOR,
        [cudaDevAttrMaxRegistersPerBlock] = REGISTERS,
        [cudaDevAttrMultiProcessorCount] = MULTIPROCESSORS,
        [cudaDevAttrMaxThreadsPerMultiProcessor] = 2 * MAX_THREADS,
        [cudaDevAttrWarpSize] = 32,
        [cudaDevAttrComputeCapabilityMajor] = 9,
    };
    *value = attribute < cudaDevAttrMax ? values[attribute] : 0;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void) {
    return refuse_unsafe("cudaDeviceSynchronize");
}

/* ---------------------------------------------------------------- streams and captures */

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    *stream = new_object(sizeof(Stream));
    return cudaSuccess;
}

/* PG, "Prohibited and Unhandled Operations": a captured stream has no work to wait for. */
cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    Stream *stream = stream_of(handle);
    if (stream != NULL && stream->capture != 0)
        return refuse_capture(stream, "cudaStreamSynchronize", "the stream is captured");
    return refuse_unsafe("cudaStreamSynchronize");
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    enum cudaStreamCaptureMode before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, enum cudaStreamCaptureMode mode) {
    static atomic_ulong n_captures;
    Stream *stream = stream_of(handle);
    Stream *none = NULL;
    if (stream == NULL)
        return refuse(cudaErrorStreamCaptureUnsupported, "cudaStreamBeginCapture", "a default stream");
    if (stream->capture != 0)
        return refuse(cudaErrorIllegalState, "cudaStreamBeginCapture", "the stream is captured");
    stream->mode = mode;
    stream->thread = pthread_self();
    stream->invalid = false;
    stream->launches = 0;
    if (!atomic_compare_exchange_strong(&captured_stream, &none, stream))
        return refuse(cudaErrorNotSupported, "cudaStreamBeginCapture", "only one stream at a time is captured");
    stream->capture = ++n_captures;
    note("begin capture\n");
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *graph) {
    Stream *stream = stream_of(handle);
    *graph = NULL;
    if (stream == NULL || stream->capture == 0)
        return refuse(cudaErrorIllegalState, "cudaStreamEndCapture", "the stream is not captured");
    /* cudaStreamEndCapture: by the thread that began it, unless the mode is relaxed. */
    if (stream->mode != cudaStreamCaptureModeRelaxed && !pthread_equal(stream->thread, pthread_self()))
        return refuse(cudaErrorStreamCaptureWrongThread, "cudaStreamEndCapture", "another thread began it");
    stream->capture = 0;
    captured_stream = NULL;
    note("end capture of %zu launches\n", stream->launches);
    if (stream->invalid)
        return refuse(cudaErrorStreamCaptureInvalidated, "cudaStreamEndCapture", "a call spoilt the capture");
    size_t *launches = new_object(sizeof *launches);
    *launches = stream->launches;
    *graph = (cudaGraph_t)launches;
    return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **dependencies, const cudaGraphEdgeData **edges,
                                     size_t *n_dependencies) {
    Stream *stream = stream_of(handle);
    *status = cudaStreamCaptureStatusNone;
    if (stream == NULL || stream->capture == 0)
        return cudaSuccess;
    *status = stream->invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
    if (id != NULL)
        *id = stream->capture;
    if (graph != NULL) /* a graph is the number of its launches, which have no nodes */
        *graph = (cudaGraph_t)&stream->launches;
    if (dependencies != NULL)
        *dependencies = NULL;
    if (edges != NULL)
        *edges = NULL;
    if (n_dependencies != NULL)
        *n_dependencies = 0;
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    return cudaStreamGetCaptureInfo(stream, status, NULL, NULL, NULL, NULL, NULL);
}

/* A graph is the number of its launches, a size_t. */

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *n) {
    if (nodes != NULL)
        return refuse(cudaErrorNotSupported, "cudaGraphGetNodes", "nodes are not pretended");
    *n = *(size_t *)graph;
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *executable, cudaGraph_t graph,
                                          unsigned long long flags) {
    size_t *launches = new_object(sizeof *launches);
    *launches = *(size_t *)graph;
    *executable = (cudaGraphExec_t)launches;
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t handle) {
    Stream *stream = stream_of(handle);
    if (stream != NULL && stream->capture != 0)
        return refuse_capture(stream, "cudaGraphLaunch", "a graph within a graph is not pretended");
    cudaError_t error = enqueue(stream, "cudaGraphLaunch");
    if (error != cudaSuccess)
        return error;
    note("replay\n");
    count_replay(*(size_t *)executable);
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    free(graph);
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
    free(executable);
    return cudaSuccess;
}

/* ---------------------------------------------------------------- events */

typedef struct {
    struct timespec recorded;
    unsigned long capture; /* of its stream then */
} Event;

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    *event = new_object(sizeof(Event));
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    free(event);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream) {
    Event *event = (Event *)handle;
    cudaError_t error = enqueue(stream_of(stream), "cudaEventRecord");
    if (error != cudaSuccess)
        return error;
    clock_gettime(CLOCK_MONOTONIC, &event->recorded);
    event->capture = stream_of(stream) != NULL ? stream_of(stream)->capture : 0;
    return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    return cudaEventRecord(event, stream);
}

/* cudaErrorCapturedEvent: what was recorded in a capture never happens on the device. */
static cudaError_t inspect_event(cudaEvent_t event, const char *call) {
    if (((Event *)event)->capture != 0)
        return refuse(cudaErrorCapturedEvent, call, "the event was recorded in a capture");
    return refuse_unsafe(call);
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
    return inspect_event(event, "cudaEventQuery");
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    return inspect_event(event, "cudaEventSynchronize");
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    struct timespec from = ((Event *)start)->recorded;
    struct timespec to = ((Event *)end)->recorded;
    *milliseconds = (float)(to.tv_sec - from.tv_sec) * 1e3f + (float)(to.tv_nsec - from.tv_nsec) / 1e6f;
    return cudaSuccess;
}

/* PG, "Cross-stream Dependencies and Events": a captured stream waits for events of its own capture alone. Another
 * stream that waits for them would join the capture, which is not pretended. */
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned flags) {
    Stream *stream = stream_of(handle);
    unsigned long here = stream != NULL ? stream->capture : 0;
    unsigned long there = ((Event *)event)->capture;
    if (here == there)
        return cudaSuccess;
    if (here == 0)
        return refuse(cudaErrorCapturedEvent, "cudaStreamWaitEvent", "the event was recorded in a capture");
    stream->invalid = true;
    return refuse(cudaErrorStreamCaptureIsolation, "cudaStreamWaitEvent", "the event is not of this capture");
}
