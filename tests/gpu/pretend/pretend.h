/* A pretended CUDA card: what stands in for CUDA's runtime, driver and cuBLAS where there is no GPU.
 *
 * Loaded with LD_PRELOAD, it answers the calls that torch, FlashInfer and Triton make before the real libraries
 * can. A function that is missing here is the real library's, which fails for want of a driver.
 *
 *     memory     device memory is address space that nobody can read or write; pinned memory is real
 *     work       nothing is computed, everything is complete at once, and what is read back is zero
 *     capture    what CUDA forbids while a stream is captured is refused; one stream at a time is captured
 *     refusals   are counted, and a line on stderr says what was refused and why
 *
 * The rules are those of the CUDA Runtime API's reference, named by the function whose section states them, and of
 * the CUDA Programming Guide (PG), named by section.
 *
 * Environment: PRETEND_NAME and PRETEND_MEMORY (bytes) change the card, which calls itself a "pretended H100"
 * so that nobody takes a benchmark's file for a measurement; PRETEND_BACKTRACE=1 adds the C stack of each
 * refused call; PRETEND_LOG names a file that gets a line for each launch, copy and capture. */
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>

#if CUDART_VERSION < 13000
#error "the headers must be those of CUDA 13"
#endif

/* PG, "Technical Specifications per Compute Capability", 9.0. */
enum {
    MULTIPROCESSORS = 132,
    MAX_THREADS = 1024,
    MAX_THREADS_Z = 64,
    MAX_GRID_X = 0x7fffffff,
    MAX_GRID_YZ = 65535,
    REGISTERS = 65536,
    SHARED_DEFAULT = 48 << 10,
    SHARED_OPT_IN = 227 << 10,
    SHARED_MULTIPROCESSOR = 228 << 10,
};

typedef struct {
    unsigned long capture; /* the number of the capture under way; 0: none */
    enum cudaStreamCaptureMode mode;
    pthread_t thread; /* the one that captures */
    _Atomic bool invalid; /* spoilt, by any thread */
    size_t launches; /* in this capture */
} Stream;

typedef struct Kernel {
    const void *code; /* the host's function by which it is launched */
    const char *name;
    int shared; /* the most bytes of dynamic shared memory of a block */
    struct Kernel *next;
} Kernel;

/* What a run came to: calls that were refused, launches outside and within captures (those of a graph count again
 * whenever it is replayed), replays of graphs, copies, and of these the ones of pageable memory of the host; and bytes
 * of device memory, the most at a time and the card's. */
typedef struct {
    long refused;
    long launched;
    long captured;
    long replayed;
    long copied;
    long pageable;
    size_t peak;
    size_t memory;
} Counts;

void pretend_counts(Counts *counts);

/* What follows is hidden: a preloaded library's names take precedence in the whole process. */
#pragma GCC visibility push(hidden)

/* card.c */
extern _Atomic(Stream *) captured_stream;
extern _Thread_local enum cudaStreamCaptureMode thread_mode;
extern _Thread_local cudaError_t last_error;

void note(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Each returns an error if it refused the call. */
cudaError_t refuse(cudaError_t error, const char *call, const char *why);
cudaError_t refuse_capture(Stream *stream, const char *call, const char *why);
cudaError_t refuse_unsafe(const char *call);
cudaError_t enqueue(Stream *stream, const char *call);
cudaError_t launch(Stream *stream, const Kernel *kernel, dim3 grid, dim3 block, size_t shared, const char *call);
cudaError_t launch_product(Stream *stream, const char *call);
cudaError_t allow_shared(Kernel *kernel, int shared, const char *call);

void *new_object(size_t size); /* zeroed */
void count_replay(size_t launches);
void count_copy(bool pageable);
Stream *stream_of(cudaStream_t handle);

/* memory.c */
typedef struct {
    char *start;
    size_t size;
    enum cudaMemoryType type;
} Area;

extern size_t card_memory;

bool find_area(const void *address, Area *found);
size_t free_memory(void);
size_t peak_memory(void);

#pragma GCC visibility pop
