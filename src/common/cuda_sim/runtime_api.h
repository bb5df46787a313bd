// The part of the CUDA runtime API that needle uses, on host memory. Streams run at once or, with
// NEEDLE_SIM_STREAMS=lazy, only when somebody waits for them, which shows a missing
// synchronisation.
#pragma once

#include <cstddef>

#include "thread.h"

#define CUDART_VERSION 13000

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidDevice = 101,
  cudaErrorInvalidResourceHandle = 400,
  cudaErrorNotReady = 600,
  cudaErrorLaunchFailure = 719,
};
enum cudaMemcpyKind {
  cudaMemcpyHostToHost,
  cudaMemcpyHostToDevice,
  cudaMemcpyDeviceToHost,
  cudaMemcpyDeviceToDevice,
  cudaMemcpyDefault
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
  cudaDevAttrMemoryPoolsSupported = 115,
};

namespace needle::sim {
struct Stream;
struct Event;
}  // namespace needle::sim
using cudaStream_t = needle::sim::Stream*;
using cudaEvent_t = needle::sim::Event*;

struct cudaDeviceProp {
  char name[256];
  size_t totalGlobalMem;
  size_t sharedMemPerBlock;
  size_t sharedMemPerBlockOptin;
  int major, minor;
  int multiProcessorCount;
  int warpSize;
  int maxThreadsPerBlock;
};

struct cudaFuncAttributes {
  int ptxVersion;
};

constexpr unsigned cudaStreamDefault = 0, cudaStreamNonBlocking = 1;
constexpr unsigned cudaEventDefault = 0, cudaEventDisableTiming = 2;

#define NEEDLE_SIM_API NEEDLE_SIM_HIDDEN cudaError_t
NEEDLE_SIM_API cudaMalloc(void** pointer, size_t bytes);
NEEDLE_SIM_API cudaFree(void* pointer);
NEEDLE_SIM_API cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t stream);
NEEDLE_SIM_API cudaFreeAsync(void* pointer, cudaStream_t stream);
NEEDLE_SIM_API cudaMallocHost(void** pointer, size_t bytes);
NEEDLE_SIM_API cudaFreeHost(void* pointer);
NEEDLE_SIM_API cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind);
NEEDLE_SIM_API cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                               cudaStream_t stream = nullptr);
NEEDLE_SIM_API cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream = nullptr);
NEEDLE_SIM_API cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes);

NEEDLE_SIM_API cudaStreamCreate(cudaStream_t* stream);
NEEDLE_SIM_API cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
NEEDLE_SIM_API cudaStreamDestroy(cudaStream_t stream);
NEEDLE_SIM_API cudaStreamSynchronize(cudaStream_t stream);
NEEDLE_SIM_API cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags = 0);
NEEDLE_SIM_API cudaDeviceSynchronize();
NEEDLE_SIM_API cudaEventCreate(cudaEvent_t* event);
NEEDLE_SIM_API cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
NEEDLE_SIM_API cudaEventDestroy(cudaEvent_t event);
NEEDLE_SIM_API cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr);
NEEDLE_SIM_API cudaEventSynchronize(cudaEvent_t event);
NEEDLE_SIM_API cudaEventQuery(cudaEvent_t event);

NEEDLE_SIM_API cudaGetDeviceCount(int* count);
NEEDLE_SIM_API cudaGetDevice(int* device);
NEEDLE_SIM_API cudaSetDevice(int device);
NEEDLE_SIM_API cudaGetDeviceProperties(cudaDeviceProp* properties, int device);
NEEDLE_SIM_API cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
NEEDLE_SIM_API cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value);
NEEDLE_SIM_API cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* function);

NEEDLE_SIM_API cudaGetLastError();
// For a failed launch the text is the emulator's: kernel, block, thread, place.
NEEDLE_SIM_HIDDEN const char* cudaGetErrorString(cudaError_t error);
#undef NEEDLE_SIM_API

template <class T>
cudaError_t cudaMalloc(T** pointer, size_t bytes) {
  return cudaMalloc(reinterpret_cast<void**>(pointer), bytes);
}
template <class T>
cudaError_t cudaMallocAsync(T** pointer, size_t bytes, cudaStream_t stream) {
  return cudaMallocAsync(reinterpret_cast<void**>(pointer), bytes, stream);
}
template <class R, class... A>
cudaError_t cudaFuncSetAttribute(R (*function)(A...), cudaFuncAttribute attribute, int value) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(function), attribute, value);
}

// Freed memory goes back to the heap at once, so a memory pool has what is in use, nothing to keep
// or to trim.
using cudaMemPool_t = void*;
enum cudaMemPoolAttr {
  cudaMemPoolAttrReleaseThreshold = 4,    // uint64_t
  cudaMemPoolAttrReservedMemCurrent = 5,  // uint64_t
};
NEEDLE_SIM_HIDDEN cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute,
                                                      void* value);
inline cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) {
  *pool = nullptr;
  return cudaSuccess;
}
inline cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) {
  return cudaSuccess;
}
inline cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }

// The emulator's own: what follows on the stream may touch the first bytes of an area alone, which
// a build with AddressSanitizer sees to.
NEEDLE_SIM_HIDDEN void cuda_sim_narrow(void* area, size_t bytes, size_t area_bytes,
                                       cudaStream_t stream);
