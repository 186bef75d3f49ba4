// One H200: its properties, and kernels that are launched and do nothing. Runtime, driver, cuBLAS.
#define _GNU_SOURCE
#include "null_cuda.h"

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static cudaError_t launch(cudaStream_t stream) {
  null_cuda_counts[LAUNCHES]++;
  return enqueue(stream, "a kernel");
}

// Properties

static int attribute(int which) {
  switch (which) {
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X: return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: return INT32_MAX;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: return 48 << 10;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: return SHARED_BYTES;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: return 228 << 10;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: return 32;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: return 65536;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: return 65536;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return MULTIPROCESSORS;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: return 1980000;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: return 3201000;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: return 6144;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: return 60 << 20;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: return 2048;
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING: return 1;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return 9;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: return 0;
    case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH: return 1;
    default: return 0;
  }
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr which, int device) {
  (void)device;
  *value = attribute((int)which);  // the runtime numbers them as the driver does
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *about, int device) {
  (void)device;
  memset(about, 0, sizeof *about);
  strcpy(about->name, "NVIDIA H200");
  about->totalGlobalMem = DEVICE_BYTES;
  about->sharedMemPerBlock = 48 << 10;
  about->sharedMemPerBlockOptin = SHARED_BYTES;
  about->sharedMemPerMultiprocessor = 228 << 10;
  about->regsPerBlock = about->regsPerMultiprocessor = 65536;
  about->warpSize = 32;
  about->maxThreadsPerBlock = about->maxThreadsDim[0] = about->maxThreadsDim[1] = 1024;
  about->maxThreadsDim[2] = 64;
  about->maxGridSize[0] = INT32_MAX;
  about->maxGridSize[1] = about->maxGridSize[2] = UINT16_MAX;
  about->maxThreadsPerMultiProcessor = 2048;
  /* torch divides by it where it selects the k largest of a large vocabulary. */
  about->maxBlocksPerMultiProcessor = 32;
  about->major = 9;
  about->multiProcessorCount = MULTIPROCESSORS;
  about->l2CacheSize = 60 << 20;
  about->memoryBusWidth = 6144;
  about->textureAlignment = 512;
  about->concurrentKernels = about->unifiedAddressing = about->cooperativeLaunch = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int *count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return device ? cudaErrorInvalidDevice : cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { return *version = CUDA_VERSION, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { return *version = CUDA_VERSION, cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
  (void)device, (void)peer;
  return *can = 0, cudaSuccess;
}

// Kernels of torch's own libraries

static __thread struct {
  dim3 grid, block;
  size_t shared;
  void *stream;
} configuration;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
  configuration.grid = grid;
  configuration.block = block;
  configuration.shared = shared;
  configuration.stream = stream;
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared = configuration.shared;
  *(void **)stream = configuration.stream;
  return cudaSuccess;
}
void **__cudaRegisterFatBinary(void *binary) {
  static void *handle;
  (void)binary;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
void __cudaUnregisterFatBinary(void **handle) { (void)handle; }
void __cudaRegisterFunction(void **handle) { (void)handle; }
void __cudaRegisterVar(void **handle) { (void)handle; }
cudaError_t __cudaGetKernel(void **kernel, const void *function) {
  *kernel = (void *)function;
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                               cudaStream_t stream) {
  (void)kernel, (void)grid, (void)block, (void)arguments, (void)shared;
  return launch(stream);
}
cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments,
                             size_t shared, cudaStream_t stream) {
  (void)function, (void)grid, (void)block, (void)arguments, (void)shared;
  return launch(stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *how, const void *function,
                                void **arguments) {
  (void)function, (void)arguments;
  return launch(how->stream);
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *about, const void *function) {
  (void)function;
  memset(about, 0, sizeof *about);
  about->maxThreadsPerBlock = 1024;
  about->numRegs = 32;
  about->binaryVersion = about->ptxVersion = 90;
  about->maxDynamicSharedSizeBytes = 48 << 10;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute which, int value) {
  (void)function, (void)which, (void)value;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *function,
                                                                   int size, size_t shared,
                                                                   unsigned flags) {
  (void)function, (void)size, (void)shared, (void)flags;
  return *count = 2, cudaSuccess;
}

// The driver, by which Triton and Inductor launch

static int context, module, function;

CUresult cuInit(unsigned flags) { return (void)flags, CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { return *version = CUDA_VERSION, CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *count) { return *count = 1, CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int index) { return *device = index, CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice device) {
  (void)device;
  return *value = attribute((int)which), CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *made, CUdevice device) {
  (void)device;
  return *made = (CUcontext)&context, CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
  (void)device;
  return *flags = 0, *active = 1, CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *current) {
  return *current = (CUcontext)&context, CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext current) { return (void)current, CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit which) {
  (void)which;
  return *value = 1 << 20, CUDA_SUCCESS;
}
CUresult cuCtxSetLimit(CUlimit which, size_t value) {
  (void)which, (void)value;
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char **text) {
  (void)error;
  return *text = "refused by the CUDA that computes nothing", CUDA_SUCCESS;
}
CUresult cuModuleLoadData(CUmodule *made, const void *image) {
  (void)image;
  if (check_unsafe("cuModuleLoadData")) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  return *made = (CUmodule)&module, CUDA_SUCCESS;
}
CUresult cuModuleLoad(CUmodule *made, const char *path) { return cuModuleLoadData(made, path); }
CUresult cuModuleUnload(CUmodule loaded) { return (void)loaded, CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction *found, CUmodule loaded, const char *name) {
  (void)loaded, (void)name;
  return *found = (CUfunction)&function, CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute which, CUfunction of) {
  (void)of;
  *value = which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024
           : which == CU_FUNC_ATTRIBUTE_NUM_REGS            ? 64
                                                            : 0;
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction of, CUfunction_attribute which, int value) {
  (void)of, (void)which, (void)value;
  return CUDA_SUCCESS;
}
CUresult cuFuncSetCacheConfig(CUfunction of, CUfunc_cache preferred) {
  (void)of, (void)preferred;
  return CUDA_SUCCESS;
}
CUresult cuLaunchKernel(CUfunction of, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                        unsigned by, unsigned bz, unsigned shared, CUstream stream,
                        void **arguments, void **extra) {
  (void)of, (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)shared;
  (void)arguments, (void)extra;
  return (CUresult)launch((cudaStream_t)stream);
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *how, CUfunction of, void **arguments,
                          void **extra) {
  (void)of, (void)arguments, (void)extra;
  return (CUresult)launch((cudaStream_t)how->hStream);
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *count, CUfunction of, int size,
                                                     size_t shared) {
  (void)of, (void)size, (void)shared;
  return *count = 2, CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction of, const CUlaunchConfig *how) {
  (void)of, (void)how;
  return *count = MULTIPROCESSORS / 2, CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute which, CUdeviceptr pointer) {
  int is_known = is_device_memory((void *)pointer) || is_pinned_memory((void *)pointer);
  if (which != CU_POINTER_ATTRIBUTE_DEVICE_POINTER) return CUDA_ERROR_NOT_SUPPORTED;
  return is_known ? (*(CUdeviceptr *)value = pointer, CUDA_SUCCESS) : CUDA_ERROR_INVALID_VALUE;
}

// Functions of the driver that torch asks for by name, and may do without.
static CUresult not_there(void) { return CUDA_ERROR_NOT_SUPPORTED; }

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **found, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result) {
  (void)version, (void)flags;
  *found = dlsym(RTLD_DEFAULT, name);
  if (!*found) *found = (void *)not_there;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// cuBLAS. Its own header would want all of a product's arguments; the first one will do, by what C
// compilers agree on for x86-64 and AArch64.

typedef struct Blas {
  cudaStream_t stream;
  int math_mode, pointer_mode;
} Blas;

int cublasCreate_v2(Blas **made) {
  if (check_unsafe("cublasCreate")) return 1;  // CUBLAS_STATUS_NOT_INITIALIZED
  return *made = calloc(1, sizeof(Blas)), 0;
}
int cublasDestroy_v2(Blas *blas) { return free(blas), 0; }
int cublasSetStream_v2(Blas *blas, cudaStream_t stream) { return blas->stream = stream, 0; }
int cublasSetWorkspace_v2(Blas *blas) { return (void)blas, 0; }
int cublasSetMathMode(Blas *blas, int mode) { return blas->math_mode = mode, 0; }
int cublasGetMathMode(Blas *blas, int *mode) { return *mode = blas->math_mode, 0; }
int cublasSetPointerMode_v2(Blas *blas, int mode) { return blas->pointer_mode = mode, 0; }
int cublasGetPointerMode_v2(Blas *blas, int *mode) { return *mode = blas->pointer_mode, 0; }
static int product(Blas *blas) { return launch(blas->stream); }
int cublasGemmEx(Blas *blas) { return product(blas); }
int cublasGemmStridedBatchedEx(Blas *blas) { return product(blas); }
int cublasSgemm_v2(Blas *blas) { return product(blas); }
int cublasSgemmStridedBatched(Blas *blas) { return product(blas); }
int cublasSgemv_v2(Blas *blas) { return product(blas); }
int cublasSdot_v2(Blas *blas) { return product(blas); }

size_t cublasLtGetVersion(void) { return 130100; }
static int opaque(void **made) { return *made = calloc(1, 512), 0; }
int cublasLtMatmulDescCreate(void **made) { return opaque(made); }
int cublasLtMatrixLayoutCreate(void **made) { return opaque(made); }
int cublasLtMatmulPreferenceCreate(void **made) { return opaque(made); }
int cublasLtMatmulDescDestroy(void *made) { return free(made), 0; }
int cublasLtMatrixLayoutDestroy(void *made) { return free(made), 0; }
int cublasLtMatmulPreferenceDestroy(void *made) { return free(made), 0; }
int cublasLtMatmulDescSetAttribute(void *made) { return (void)made, 0; }
int cublasLtMatrixLayoutSetAttribute(void *made) { return (void)made, 0; }
int cublasLtMatmulPreferenceSetAttribute(void *made) { return (void)made, 0; }
int cublasLtMatmulAlgoGetHeuristic(void *blas, void *what, void *a, void *b, void *c, void *d,
                                   void *preference, int wanted, void *results, int *found) {
  (void)blas, (void)what, (void)a, (void)b, (void)c, (void)d, (void)preference, (void)wanted;
  (void)results;  // torch has it zeroed: an algorithm that takes no workspace, in a good state
  return *found = 1, 0;
}
int cublasLtMatmul(void *blas, void *what, void *alpha, void *a, void *layout_a, void *b,
                   void *layout_b, void *beta, void *c, void *layout_c, void *d, void *layout_d,
                   void *algorithm, void *workspace, size_t size, cudaStream_t stream) {
  (void)blas, (void)what, (void)alpha, (void)a, (void)layout_a, (void)b, (void)layout_b, (void)beta;
  (void)c, (void)layout_c, (void)d, (void)layout_d, (void)algorithm, (void)workspace, (void)size;
  return launch(stream);
}
