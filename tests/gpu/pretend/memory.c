/* Memory of the card and pinned memory of the host, and copies between them. */
#include "pretend.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { PAGE = 4096 };

static const size_t CONTEXT = 600u << 20; /* what a CUDA context takes of the card */

size_t card_memory = 85000000000u;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Area *areas;
static size_t n_areas, room;
static _Atomic size_t used, peak; /* bytes of the card */

__attribute__((constructor)) static void read_size(void) {
    const char *size = getenv("PRETEND_MEMORY");
    if (size != NULL)
        card_memory = strtoull(size, NULL, 10);
    used = CONTEXT;
    peak = CONTEXT;
}

size_t free_memory(void) {
    return used < card_memory ? card_memory - used : 0;
}

size_t peak_memory(void) {
    return peak;
}

/* Locked by the caller. Returns the number of areas if no area holds the address. */
static size_t index_of(const void *address) {
    const char *at = address;
    size_t i = 0;
    while (i < n_areas && !(at >= areas[i].start && at < areas[i].start + areas[i].size))
        i++;
    return i;
}

bool find_area(const void *address, Area *found) {
    pthread_mutex_lock(&lock);
    size_t i = index_of(address);
    bool known = i < n_areas;
    if (known)
        *found = areas[i];
    pthread_mutex_unlock(&lock);
    return known;
}

/* Locked by the caller. */
static bool add_area(Area area) {
    if (n_areas == room) {
        Area *larger = realloc(areas, (2 * room + 64) * sizeof *areas);
        if (larger == NULL)
            return false;
        areas = larger;
        room = 2 * room + 64;
    }
    areas[n_areas++] = area;
    return true;
}

static cudaError_t allocate(void **address, size_t size, enum cudaMemoryType type, const char *call) {
    bool on_card = type == cudaMemoryTypeDevice;
    size = (size + PAGE - 1) / PAGE * PAGE;
    if (size == 0) {
        *address = NULL;
        return cudaSuccess;
    }
    pthread_mutex_lock(&lock);
    void *start = MAP_FAILED;
    if (!on_card || size <= free_memory()) {
        int access = on_card ? PROT_NONE : PROT_READ | PROT_WRITE;
        start = mmap(NULL, size, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    }
    bool done = start != MAP_FAILED && add_area((Area){start, size, type});
    if (done && on_card) {
        used += size;
        if (used > peak)
            peak = used;
    }
    pthread_mutex_unlock(&lock);
    if (!done)
        return refuse(cudaErrorMemoryAllocation, call, "out of memory");
    *address = start;
    return cudaSuccess;
}

static cudaError_t release(void *address, const char *call) {
    if (address == NULL)
        return cudaSuccess;
    pthread_mutex_lock(&lock);
    size_t i = index_of(address);
    bool known = i < n_areas && areas[i].start == address;
    if (known) {
        if (areas[i].type == cudaMemoryTypeDevice)
            used -= areas[i].size;
        munmap(address, areas[i].size);
        areas[i] = areas[--n_areas];
    }
    pthread_mutex_unlock(&lock);
    return known ? cudaSuccess : refuse(cudaErrorInvalidValue, call, "no such allocation");
}

/* cudaThreadExchangeStreamCaptureMode: allocations are potentially unsafe, since no graph repeats them. */

cudaError_t cudaMalloc(void **address, size_t size) {
    cudaError_t error = refuse_unsafe("cudaMalloc");
    return error != cudaSuccess ? error : allocate(address, size, cudaMemoryTypeDevice, "cudaMalloc");
}

cudaError_t cudaFree(void *address) {
    cudaError_t error = refuse_unsafe("cudaFree");
    return error != cudaSuccess ? error : release(address, "cudaFree");
}

cudaError_t cudaHostAlloc(void **address, size_t size, unsigned flags) {
    cudaError_t error = refuse_unsafe("cudaHostAlloc");
    return error != cudaSuccess ? error : allocate(address, size, cudaMemoryTypeHost, "cudaHostAlloc");
}

cudaError_t cudaFreeHost(void *address) {
    cudaError_t error = refuse_unsafe("cudaFreeHost");
    return error != cudaSuccess ? error : release(address, "cudaFreeHost");
}

cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
    *available = free_memory();
    *total = card_memory;
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *address) {
    Area area;
    memset(attributes, 0, sizeof *attributes);
    if (!find_area(address, &area))
        return cudaSuccess;
    attributes->type = area.type;
    attributes->devicePointer = (void *)address;
    attributes->hostPointer = area.type == cudaMemoryTypeHost ? (void *)address : NULL;
    return cudaSuccess;
}

/* ---------------------------------------------------------------- copies */

static bool exceeds(const Area *area, const void *address, size_t size) {
    return size > (size_t)(area->start + area->size - (const char *)address);
}

static cudaError_t copy(void *to, const void *from, size_t size, Stream *stream, const char *call) {
    Area target, source;
    bool known_target = find_area(to, &target);
    bool known_source = find_area(from, &source);
    note("%s %zu bytes\n", call, size);
    count_copy(!known_target || !known_source);
    cudaError_t error = enqueue(stream, call);
    if (error != cudaSuccess)
        return error;
    if ((known_target && exceeds(&target, to, size)) || (known_source && exceeds(&source, from, size)))
        return refuse(cudaErrorInvalidValue, call, "a copy beyond an allocation");
    if (stream != NULL && stream->capture != 0) {
        /* "API synchronization behavior": through pageable memory, a copy may synchronize with its stream. */
        if (!known_target || !known_source)
            return refuse_capture(stream, call, "a captured copy of pageable memory");
        return cudaSuccess;
    }
    if (known_target && target.type == cudaMemoryTypeDevice)
        return cudaSuccess;
    if (known_source && source.type == cudaMemoryTypeDevice)
        memset(to, 0, size);
    else
        memmove(to, from, size);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind,
                            cudaStream_t stream) {
    return copy(to, from, size, stream_of(stream), "cudaMemcpyAsync");
}

cudaError_t cudaMemsetAsync(void *address, int value, size_t size, cudaStream_t stream) {
    Area area;
    cudaError_t error = enqueue(stream_of(stream), "cudaMemsetAsync");
    if (error != cudaSuccess)
        return error;
    if (!find_area(address, &area) || exceeds(&area, address, size))
        return refuse(cudaErrorInvalidValue, "cudaMemsetAsync", "not within an allocation");
    return cudaSuccess;
}
