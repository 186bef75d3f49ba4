// Streams, events, captures and graphs. All that is enqueued has run at once.
#include "null_cuda.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

atomic_long null_cuda_counts[NUM_COUNTS];
pthread_mutex_t null_cuda_lock = PTHREAD_MUTEX_INITIALIZER;

typedef struct Graph {
  size_t num_nodes;
} Graph;

typedef struct Stream {
  struct Stream *next;
  Graph *graph;  // while it captures
  enum cudaStreamCaptureMode mode;
  pthread_t owner;
  unsigned long long capture;  // counts captures of all streams
  int is_capturing, is_spoiled;
} Stream;

typedef struct Event {
  struct timespec at;
  Stream *captured_in;
  unsigned long long capture;
  int is_recorded;
} Event;

static Stream legacy_stream;
static Stream *streams = &legacy_stream;
static atomic_ullong num_captures;
static __thread cudaError_t last_error;
static __thread enum cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

long null_cuda_count(int which) { return null_cuda_counts[which]; }

const char *cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidResourceHandle: return "cudaErrorInvalidResourceHandle";
    case cudaErrorIllegalState: return "cudaErrorIllegalState";
    case cudaErrorNotSupported: return "cudaErrorNotSupported";
    case cudaErrorStreamCaptureUnsupported: return "cudaErrorStreamCaptureUnsupported";
    case cudaErrorStreamCaptureInvalidated: return "cudaErrorStreamCaptureInvalidated";
    case cudaErrorStreamCaptureIsolation: return "cudaErrorStreamCaptureIsolation";
    case cudaErrorStreamCaptureWrongThread: return "cudaErrorStreamCaptureWrongThread";
    case cudaErrorCapturedEvent: return "cudaErrorCapturedEvent";
    default: return "cudaErrorUnknown";
  }
}
const char *cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }
cudaError_t cudaPeekAtLastError(void) { return last_error; }
cudaError_t cudaGetLastError(void) {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t refuse(cudaError_t error, const char *call) {
  last_error = error;
  null_cuda_counts[REFUSALS]++;
  fprintf(stderr, "null CUDA: %s: %s\n", call, cudaGetErrorName(error));
  return error;
}

static Stream *known(cudaStream_t stream) {
  // Null, and the names of the legacy stream and a thread's own.
  return (size_t)stream <= 2 ? &legacy_stream : (Stream *)stream;
}
int is_capturing(cudaStream_t stream) { return known(stream)->is_capturing; }

static cudaError_t spoil_capture(Stream *stream, cudaError_t error, const char *call) {
  stream->is_spoiled = 1;
  return refuse(error, call);
}
cudaError_t spoil(cudaStream_t stream, cudaError_t error, const char *call) {
  return spoil_capture(known(stream), error, call);
}
cudaError_t check_unsafe(const char *call) {
  if (thread_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  for (Stream *stream = streams; stream; stream = stream->next) {
    if (!stream->is_capturing) continue;
    int is_mine = pthread_equal(stream->owner, pthread_self());
    if (stream->mode == cudaStreamCaptureModeGlobal ||
        (stream->mode == cudaStreamCaptureModeThreadLocal && is_mine))
      return spoil_capture(stream, cudaErrorStreamCaptureUnsupported, call);
  }
  return cudaSuccess;
}
cudaError_t enqueue(cudaStream_t stream, const char *what) {
  (void)what;
  if (is_capturing(stream)) known(stream)->graph->num_nodes++;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *made, unsigned flags, int priority) {
  (void)flags, (void)priority;
  Stream *stream = calloc(1, sizeof *stream);
  pthread_mutex_lock(&null_cuda_lock);
  stream->next = streams;
  streams = stream;
  pthread_mutex_unlock(&null_cuda_lock);
  *made = (cudaStream_t)stream;
  return cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
  (void)stream;
  *priority = 0;
  return cudaSuccess;
}
static cudaError_t wait_for(cudaStream_t stream, const char *call) {
  if (is_capturing(stream)) return spoil(stream, cudaErrorStreamCaptureUnsupported, call);
  return check_unsafe(call);
}
cudaError_t cudaStreamQuery(cudaStream_t stream) { return wait_for(stream, "cudaStreamQuery"); }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return wait_for(stream, "cudaStreamSynchronize");
}
cudaError_t cudaDeviceSynchronize(void) {
  /* "It is also invalid to synchronize a broader handle which encompasses an active stream capture,
     such as a device": also in a thread that does not capture. */
  for (Stream *stream = streams; stream; stream = stream->next)
    if (stream->is_capturing && stream->mode != cudaStreamCaptureModeRelaxed)
      return spoil_capture(stream, cudaErrorStreamCaptureUnsupported, "cudaDeviceSynchronize");
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
  Stream *own = known(stream);
  if (own == &legacy_stream)
    return refuse(cudaErrorStreamCaptureUnsupported, "cudaStreamBeginCapture");
  if (own->is_capturing) return refuse(cudaErrorIllegalState, "cudaStreamBeginCapture");
  own->graph = calloc(1, sizeof(Graph));
  own->mode = mode;
  own->owner = pthread_self();
  own->capture = ++num_captures;
  own->is_spoiled = 0;
  own->is_capturing = 1;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *made) {
  Stream *own = known(stream);
  *made = NULL;
  if (!own->is_capturing) return refuse(cudaErrorIllegalState, "cudaStreamEndCapture");
  if (own->mode != cudaStreamCaptureModeRelaxed && !pthread_equal(own->owner, pthread_self()))
    return refuse(cudaErrorStreamCaptureWrongThread, "cudaStreamEndCapture");
  own->is_capturing = 0;
  if (own->is_spoiled) return refuse(cudaErrorStreamCaptureInvalidated, "cudaStreamEndCapture");
  *made = (cudaGraph_t)own->graph;
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  Stream *own = known(stream);
  *status = !own->is_capturing  ? cudaStreamCaptureStatusNone
            : own->is_spoiled   ? cudaStreamCaptureStatusInvalidated
                                : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *count) {
  cudaStreamIsCapturing(stream, status);
  if (id) *id = known(stream)->capture;
  if (graph) *graph = (cudaGraph_t)known(stream)->graph;
  if (nodes) *nodes = NULL;
  if (edges) *edges = NULL;
  if (count) *count = 0;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
  enum cudaStreamCaptureMode before = thread_mode;
  thread_mode = *mode;
  *mode = before;
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *made, cudaGraph_t graph,
                                          unsigned long long flags) {
  (void)flags;
  Graph *copy = malloc(sizeof *copy);
  *copy = *(Graph *)graph;
  *made = (cudaGraphExec_t)copy;
  return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
  (void)nodes;
  *count = ((Graph *)graph)->num_nodes;
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  (void)graph;
  null_cuda_counts[REPLAYS]++;
  return enqueue(stream, "cudaGraphLaunch");
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  free(graph);
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  free(graph);
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *made, unsigned flags) {
  (void)flags;
  *made = (cudaEvent_t)calloc(1, sizeof(Event));
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *made) { return cudaEventCreateWithFlags(made, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  free(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  (void)flags;
  Event *own = (Event *)event;
  Stream *in = known(stream);
  clock_gettime(CLOCK_MONOTONIC, &own->at);
  own->is_recorded = 1;
  own->captured_in = in->is_capturing ? in : NULL;
  own->capture = in->capture;
  return enqueue(stream, "cudaEventRecord");
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}
static int is_of_capture(const Event *event) {
  const Stream *in = event->captured_in;
  return in && in->is_capturing && in->capture == event->capture;
}
static cudaError_t wait_for_event(cudaEvent_t event, const char *call) {
  const Event *own = (Event *)event;
  if (is_of_capture(own)) return spoil_capture(own->captured_in, cudaErrorCapturedEvent, call);
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) { return wait_for_event(event, "cudaEventQuery"); }
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return wait_for_event(event, "cudaEventSynchronize");
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  (void)flags;
  const Event *awaited = (Event *)event;
  // Into a capture only what is of the same capture leads. (Streams that join one are not shown.)
  if (is_capturing(stream) && !is_of_capture(awaited))
    return spoil(stream, cudaErrorStreamCaptureIsolation, "cudaStreamWaitEvent");
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t first, cudaEvent_t second) {
  const Event *from = (Event *)first, *to = (Event *)second;
  if (!from->is_recorded || !to->is_recorded)
    return refuse(cudaErrorInvalidResourceHandle, "cudaEventElapsedTime");
  *milliseconds = 1e3f * (float)(to->at.tv_sec - from->at.tv_sec) +
                  1e-6f * (float)(to->at.tv_nsec - from->at.tv_nsec);
  return cudaSuccess;
}
