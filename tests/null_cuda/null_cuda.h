// What the parts of the CUDA that computes nothing share; __init__.py says what it is.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>

// Only CUDA's own names are to stand in for others', in a process that has this from the beginning.
#define OURS __attribute__((visibility("hidden")))

#define MULTIPROCESSORS 132
#define DEVICE_BYTES (141ull << 30)
#define SHARED_BYTES 232448

// What was done, for whoever asks by `null_cuda_count`.
enum { LAUNCHES, REPLAYS, COPIES, REFUSALS, NUM_COUNTS };
extern OURS atomic_long null_cuda_counts[NUM_COUNTS];

extern OURS pthread_mutex_t null_cuda_lock;

// A refusal: told on stderr, counted, and the calling thread's last error.
OURS cudaError_t refuse(cudaError_t error, const char *call);

// A call that is not to be made while a capture restricts the calling thread; it ends the capture.
OURS cudaError_t check_unsafe(const char *call);

// Something goes to a stream, and into the graph if it is capturing.
OURS cudaError_t enqueue(cudaStream_t stream, const char *what);

OURS int is_capturing(cudaStream_t stream);
// The capture that is under way in the stream will give no graph.
OURS cudaError_t spoil(cudaStream_t stream, cudaError_t error, const char *call);

OURS int is_device_memory(const void *pointer);
OURS int is_pinned_memory(const void *pointer);
