// Memory of a device that the host may not touch: pages without access, and nothing behind them.
// What is copied to them is dropped, and what is copied from them is zeros, since nothing computed it.
#include "null_cuda.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

// Torch asks for multiples of 2 MiB of what is larger than 1 MiB.
#define GRANULE (2ull << 20)
// What a context takes of a real one.
#define CONTEXT_BYTES (512ull << 20)
// Addresses, of which there are more than memory: they are not used twice.
#define ADDRESS_BYTES (64ull << 40)

typedef struct Block {
  struct Block *next;
  char *start;
  size_t size;
} Block;

static char *base;
static size_t top, in_use;
static Block *device_blocks, *pinned_blocks;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void reserve(void) {
  base = mmap(NULL, ADDRESS_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) abort();
}
int is_device_memory(const void *pointer) {
  pthread_once(&once, reserve);
  return (const char *)pointer >= base && (const char *)pointer < base + ADDRESS_BYTES;
}
static void add(Block **blocks, char *start, size_t size) {
  Block *block = malloc(sizeof *block);
  *block = (Block){*blocks, start, size};
  *blocks = block;
}
// Takes the block out of its list; 0 where there is none.
static size_t take(Block **blocks, const void *start) {
  for (Block **at = blocks; *at; at = &(*at)->next) {
    Block *block = *at;
    if (block->start != start) continue;
    size_t size = block->size;
    *at = block->next;
    free(block);
    return size;
  }
  return 0;
}

cudaError_t cudaMalloc(void **made, size_t size) {
  pthread_once(&once, reserve);
  cudaError_t error = check_unsafe("cudaMalloc");
  if (error) return error;
  size = (size + GRANULE - 1) / GRANULE * GRANULE;
  pthread_mutex_lock(&null_cuda_lock);
  int fits = in_use + size <= DEVICE_BYTES - CONTEXT_BYTES && top + size <= ADDRESS_BYTES;
  *made = fits ? base + top : NULL;
  if (fits) {
    add(&device_blocks, *made, size);
    top += size;
    in_use += size;
  }
  pthread_mutex_unlock(&null_cuda_lock);
  return fits ? cudaSuccess : refuse(cudaErrorMemoryAllocation, "cudaMalloc");
}
cudaError_t cudaFree(void *start) {
  cudaError_t error = check_unsafe("cudaFree");
  if (error || !start) return error;
  pthread_mutex_lock(&null_cuda_lock);
  size_t size = take(&device_blocks, start);
  in_use -= size;
  pthread_mutex_unlock(&null_cuda_lock);
  return size ? cudaSuccess : refuse(cudaErrorInvalidValue, "cudaFree");
}
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
  *total = DEVICE_BYTES;
  *free_bytes = DEVICE_BYTES - CONTEXT_BYTES - in_use;
  return cudaSuccess;
}

static void pin(void *start, size_t size) {
  pthread_mutex_lock(&null_cuda_lock);
  add(&pinned_blocks, start, size);
  pthread_mutex_unlock(&null_cuda_lock);
}
static cudaError_t unpin(void *start, const char *call) {
  pthread_mutex_lock(&null_cuda_lock);
  size_t size = take(&pinned_blocks, start);
  pthread_mutex_unlock(&null_cuda_lock);
  return size ? cudaSuccess : refuse(cudaErrorInvalidValue, call);
}
int is_pinned_memory(const void *pointer) {
  int found = 0;
  pthread_mutex_lock(&null_cuda_lock);
  for (Block *block = pinned_blocks; block && !found; block = block->next)
    found = (const char *)pointer >= block->start && (const char *)pointer < block->start + block->size;
  pthread_mutex_unlock(&null_cuda_lock);
  return found;
}
cudaError_t cudaHostAlloc(void **made, size_t size, unsigned flags) {
  (void)flags;
  cudaError_t error = check_unsafe("cudaHostAlloc");
  if (error) return error;
  if (posix_memalign(made, 4096, size)) return refuse(cudaErrorMemoryAllocation, "cudaHostAlloc");
  pin(*made, size);
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void *start) {
  cudaError_t error = check_unsafe("cudaFreeHost");
  if (error || (error = unpin(start, "cudaFreeHost"))) return error;
  free(start);
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void *start, size_t size, unsigned flags) {
  (void)flags;
  pin(start, size);
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void *start) { return unpin(start, "cudaHostUnregister"); }

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *about, const void *pointer) {
  memset(about, 0, sizeof *about);
  about->type = is_device_memory(pointer)   ? cudaMemoryTypeDevice
                : is_pinned_memory(pointer) ? cudaMemoryTypeHost
                                            : cudaMemoryTypeUnregistered;
  about->device = about->type == cudaMemoryTypeUnregistered ? cudaInvalidDeviceId : 0;
  about->devicePointer = (void *)pointer;
  if (about->type != cudaMemoryTypeDevice) about->hostPointer = (void *)pointer;
  return cudaSuccess;
}

static void copy(void *to, const void *from, size_t size) {
  null_cuda_counts[COPIES]++;
  if (is_device_memory(to)) return;
  if (is_device_memory(from))
    memset(to, 0, size);
  else
    memmove(to, from, size);
}
static int is_pageable(const void *pointer) {
  return !is_device_memory(pointer) && !is_pinned_memory(pointer);
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind,
                            cudaStream_t stream) {
  (void)kind;
  if (is_capturing(stream)) {
    if (is_pageable(to) || is_pageable(from))
      return spoil(stream, cudaErrorStreamCaptureUnsupported, "cudaMemcpyAsync of pageable memory");
  } else {
    copy(to, from, size);
  }
  return enqueue(stream, "cudaMemcpyAsync");
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
  (void)kind;
  cudaError_t error = check_unsafe("cudaMemcpy");
  if (!error) copy(to, from, size);
  return error;
}
cudaError_t cudaMemsetAsync(void *start, int value, size_t size, cudaStream_t stream) {
  (void)start, (void)value, (void)size;
  return enqueue(stream, "cudaMemsetAsync");
}
