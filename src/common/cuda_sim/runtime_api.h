// The part of the CUDA runtime API that needle and small programs use, on host memory. Streams run
// at once or, with NEEDLE_SIM_STREAMS=lazy, only when somebody waits for them, which shows a
// missing synchronisation.
#pragma once

#include <cstddef>
#include <type_traits>

#include "thread.h"

#define CUDART_VERSION 13000

enum cudaError {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidPitchValue = 12,
  cudaErrorInvalidDevice = 101,
  cudaErrorInvalidResourceHandle = 400,
  cudaErrorNotReady = 600,
  cudaErrorLaunchFailure = 719,
};
using cudaError_t = cudaError;
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
  int maxThreadsDim[3];
  int maxGridSize[3];
  int regsPerBlock;
};

struct cudaFuncAttributes {
  int ptxVersion;
};

constexpr unsigned cudaStreamDefault = 0, cudaStreamNonBlocking = 1;
constexpr unsigned cudaEventDefault = 0, cudaEventBlockingSync = 1, cudaEventDisableTiming = 2;
constexpr unsigned cudaHostAllocDefault = 0, cudaHostAllocPortable = 1, cudaHostAllocMapped = 2;
constexpr unsigned cudaMemAttachGlobal = 1, cudaMemAttachHost = 2;

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
NEEDLE_SIM_API cudaMemset(void* to, int value, size_t bytes);
// Rows, each a pitch behind the one before.
NEEDLE_SIM_API cudaMallocPitch(void** pointer, size_t* pitch, size_t row_bytes, size_t rows);
NEEDLE_SIM_API cudaMemcpy2D(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                            size_t row_bytes, size_t rows, cudaMemcpyKind kind);
NEEDLE_SIM_API cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes);

NEEDLE_SIM_API cudaStreamCreate(cudaStream_t* stream);
NEEDLE_SIM_API cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
NEEDLE_SIM_API cudaStreamDestroy(cudaStream_t stream);
NEEDLE_SIM_API cudaStreamSynchronize(cudaStream_t stream);
NEEDLE_SIM_API cudaStreamQuery(cudaStream_t stream);
NEEDLE_SIM_API cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags = 0);
NEEDLE_SIM_API cudaDeviceSynchronize();
NEEDLE_SIM_API cudaDeviceReset();  // memory that is not freed stays
NEEDLE_SIM_API cudaEventCreate(cudaEvent_t* event);
NEEDLE_SIM_API cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
NEEDLE_SIM_API cudaEventDestroy(cudaEvent_t event);
NEEDLE_SIM_API cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr);
NEEDLE_SIM_API cudaEventSynchronize(cudaEvent_t event);
NEEDLE_SIM_API cudaEventQuery(cudaEvent_t event);
// By the clock of the emulator's host.
NEEDLE_SIM_API cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end);

NEEDLE_SIM_API cudaGetDeviceCount(int* count);
NEEDLE_SIM_API cudaGetDevice(int* device);
NEEDLE_SIM_API cudaSetDevice(int device);
NEEDLE_SIM_API cudaGetDeviceProperties(cudaDeviceProp* properties, int device);
NEEDLE_SIM_API cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
NEEDLE_SIM_API cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value);
NEEDLE_SIM_API cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* function);

NEEDLE_SIM_API cudaGetLastError();
NEEDLE_SIM_API cudaPeekAtLastError();
NEEDLE_SIM_HIDDEN const char* cudaGetErrorName(cudaError_t error);
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
template <class T>
cudaError_t cudaMallocHost(T** pointer, size_t bytes, unsigned = cudaHostAllocDefault) {
  return cudaMallocHost(reinterpret_cast<void**>(pointer), bytes);
}
template <class T>
cudaError_t cudaHostAlloc(T** pointer, size_t bytes, unsigned) {
  return cudaMallocHost(reinterpret_cast<void**>(pointer), bytes);
}
template <class T>
cudaError_t cudaMallocManaged(T** pointer, size_t bytes, unsigned = cudaMemAttachGlobal) {
  return cudaMalloc(reinterpret_cast<void**>(pointer), bytes);
}
template <class T>
cudaError_t cudaMallocPitch(T** pointer, size_t* pitch, size_t row_bytes, size_t rows) {
  return cudaMallocPitch(reinterpret_cast<void**>(pointer), pitch, row_bytes, rows);
}
// Of __device__ and __constant__ variables, which here are the host's.
template <class T>
cudaError_t cudaMemcpyToSymbol(T& symbol, const void* from, size_t bytes, size_t offset = 0,
                               cudaMemcpyKind kind = cudaMemcpyHostToDevice) {
  void* const to = const_cast<std::remove_const_t<T>*>(&symbol);
  return cudaMemcpy(static_cast<char*>(to) + offset, from, bytes, kind);
}
template <class T>
cudaError_t cudaMemcpyFromSymbol(void* to, const T& symbol, size_t bytes, size_t offset = 0,
                                 cudaMemcpyKind kind = cudaMemcpyDeviceToHost) {
  const void* const from = &symbol;
  return cudaMemcpy(to, static_cast<const char*>(from) + offset, bytes, kind);
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
