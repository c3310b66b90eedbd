/* What the three interfaces share: refusals, the rules of a capture, the limits of a launch, and the counts. */
#include "pretend.h"

#include <execinfo.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { MOST_FRAMES = 64 };

_Atomic(Stream *) captured_stream;
_Thread_local enum cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;
_Thread_local cudaError_t last_error;

static atomic_long refused, launched, captured, replayed, copied, pageable;
static FILE *log_file;

__attribute__((constructor)) static void open_log(void) {
    const char *path = getenv("PRETEND_LOG");
    if (path != NULL)
        log_file = fopen(path, "a");
}

void note(const char *format, ...) {
    if (log_file == NULL)
        return;
    va_list values;
    va_start(values, format);
    vfprintf(log_file, format, values);
    va_end(values);
}

void pretend_counts(Counts *counts) {
    counts->refused = refused;
    counts->launched = launched;
    counts->captured = captured;
    counts->replayed = replayed;
    counts->copied = copied;
    counts->pageable = pageable;
    counts->peak = peak_memory();
    counts->memory = card_memory;
}

/* ---------------------------------------------------------------- refusals */

cudaError_t refuse(cudaError_t error, const char *call, const char *why) {
    refused++;
    last_error = error;
    fprintf(stderr, "pretended card: %s refused with error %d: %s\n", call, error, why);
    if (getenv("PRETEND_BACKTRACE") != NULL) {
        void *frames[MOST_FRAMES];
        backtrace_symbols_fd(frames, backtrace(frames, MOST_FRAMES), STDERR_FILENO);
    }
    return error;
}

/* PG, "Invalidation": a call that a capture forbids also spoils the capture. */
cudaError_t refuse_capture(Stream *stream, const char *call, const char *why) {
    stream->invalid = true;
    return refuse(cudaErrorStreamCaptureUnsupported, call, why);
}

/* cudaThreadExchangeStreamCaptureMode: which threads a capture keeps from potentially unsafe calls. */
cudaError_t refuse_unsafe(const char *call) {
    Stream *stream = captured_stream;
    if (stream == NULL || stream->mode == cudaStreamCaptureModeRelaxed)
        return cudaSuccess;
    if (thread_mode == cudaStreamCaptureModeRelaxed)
        return cudaSuccess;
    bool global = thread_mode == cudaStreamCaptureModeGlobal && stream->mode == cudaStreamCaptureModeGlobal;
    if (!global && !pthread_equal(stream->thread, pthread_self()))
        return cudaSuccess;
    return refuse_capture(stream, call, "potentially unsafe while a stream is captured");
}

/* Stricter than CUDA, which refuses only the legacy stream, and only beside blocking streams (PG, "Prohibited and
 * Unhandled Operations"): what the capturing thread sends elsewhere would be missing from the graph. */
cudaError_t enqueue(Stream *stream, const char *call) {
    Stream *capturing = captured_stream;
    if (capturing == NULL || capturing == stream || !pthread_equal(capturing->thread, pthread_self()))
        return cudaSuccess;
    return refuse_capture(capturing, call, "work for another stream than the one that this thread captures");
}

/* ---------------------------------------------------------------- launches */

static cudaError_t count_launch(Stream *stream, const char *call) {
    cudaError_t error = enqueue(stream, call);
    if (error != cudaSuccess)
        return error;
    if (stream != NULL && stream->capture != 0) {
        stream->launches++;
        captured++;
    } else {
        launched++;
    }
    return cudaSuccess;
}

cudaError_t launch_product(Stream *stream, const char *call) {
    note("%s\n", call);
    return count_launch(stream, call);
}

cudaError_t launch(Stream *stream, const Kernel *kernel, dim3 grid, dim3 block, size_t shared, const char *call) {
    note("%s %s grid %u,%u,%u block %u,%u,%u shared %zu\n", call, kernel->name, grid.x, grid.y, grid.z, block.x,
         block.y, block.z, shared);
    if (grid.x == 0 || grid.y == 0 || grid.z == 0 || block.x == 0 || block.y == 0 || block.z == 0)
        return refuse(cudaErrorInvalidConfiguration, call, "an empty grid or block");
    if (grid.x > MAX_GRID_X || grid.y > MAX_GRID_YZ || grid.z > MAX_GRID_YZ)
        return refuse(cudaErrorInvalidConfiguration, call, "a grid that is too large");
    if ((size_t)block.x * block.y * block.z > MAX_THREADS || block.z > MAX_THREADS_Z)
        return refuse(cudaErrorInvalidConfiguration, call, "a block that is too large");
    if (shared > (size_t)kernel->shared)
        return refuse(cudaErrorInvalidValue, call, "more shared memory than the kernel was allowed");
    return count_launch(stream, call);
}

/* PG, "Compute Capability 9.x", Shared Memory: above 48 KB only where the kernel's attribute allows it. */
cudaError_t allow_shared(Kernel *kernel, int shared, const char *call) {
    if (shared > SHARED_OPT_IN)
        return refuse(cudaErrorInvalidValue, call, "more shared memory than a block can have");
    if (shared > kernel->shared)
        kernel->shared = shared;
    return cudaSuccess;
}

void *new_object(size_t size) {
    void *object = calloc(1, size);
    if (object == NULL)
        abort();
    return object;
}

void count_replay(size_t launches) {
    replayed++;
    launched += (long)launches;
}

void count_copy(bool of_pageable) {
    copied++;
    pageable += of_pageable;
}

/* The legacy stream and the thread's default stream (handles 0 to 2) are NULL: neither can be captured here. */
Stream *stream_of(cudaStream_t handle) {
    return handle > cudaStreamPerThread ? (Stream *)handle : NULL;
}
