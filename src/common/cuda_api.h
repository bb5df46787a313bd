// CUDA's runtime API for host code, or the emulator's: errors as exceptions, the shape of a launch,
// and which kernels were launched. launch.h is the same with what kernels need.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>

// NEEDLE_GPU: host code of the module for GPUs, which the C++ compiler compiles.
#if defined(__CUDACC__) || defined(NEEDLE_GPU)
#include <cuda_runtime.h>
#define NEEDLE_EMULATED 0
#else
#include "cuda_sim/runtime_api.h"
#define NEEDLE_EMULATED 1
#endif

namespace needle {

struct CudaError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct CudaOutOfMemory : CudaError {
  using CudaError::CudaError;
};

// CUDA keeps an error of any call until it is asked for the last one, which follows every launch:
// taken back here, or the next launch would be said to have failed too.
[[noreturn, gnu::noinline]] inline void throw_cuda_error(const std::string& what,
                                                         cudaError_t error) {
  cudaGetLastError();
  const std::string text = what + cudaGetErrorString(error);
  if (error == cudaErrorMemoryAllocation) throw CudaOutOfMemory(text);
  throw CudaError(text);
}
inline void cuda_check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw_cuda_error(std::string("[") + what + "] ", error);
}

// What gives back to the driver the memory that the module keeps for reuse: the module's own word,
// since a program of kernels alone keeps none.
inline std::atomic<void (*)()>& memory_keeper() {
  static std::atomic<void (*)()> keeper{nullptr};
  return keeper;
}
// For a call that found no memory, which is then worth a second try: whether there is a keeper.
inline bool give_back_memory() {
  cudaGetLastError();
  void (*const give_back)() = memory_keeper();
  if (give_back != nullptr) give_back();
  return give_back != nullptr;
}

struct LaunchConfig {
  dim3 grid;
  dim3 block;
  size_t smem = 0;  // bytes of dynamic shared memory
  cudaStream_t stream = nullptr;
};

// One per kernel that has been launched, in a list that only grows.
struct KernelRecord {
  std::string full_name;  // with namespaces and template arguments
  std::string name;       // without
  std::atomic<int64_t> launches{0};
  std::atomic<int64_t> blocks{0}, threads{0};  // of the largest grid, and of the largest block
  KernelRecord* next = nullptr;

  void count(const LaunchConfig& config) {
    ++launches;
    keep_largest(blocks, config.grid);
    keep_largest(threads, config.block);
  }

 private:
  static void keep_largest(std::atomic<int64_t>& largest, dim3 extent) {
    const int64_t size = int64_t(extent.x) * extent.y * extent.z;
    for (int64_t known = largest; size > known && !largest.compare_exchange_weak(known, size);) {
    }
  }
};

// Compiled with hidden visibility, so that two modules built from one source (cuda, cuda_sim) do
// not share a list.
inline std::atomic<KernelRecord*>& kernel_records() {
  static std::atomic<KernelRecord*> head{nullptr};
  return head;
}

// "auto needle::kernel_record() [with auto K = ns::name<args>; ...]" (g++, nvcc), "[K =
// &ns::name<args>]" (clang).
inline std::string kernel_name_from(const std::string& pretty) {
  const size_t start = pretty.find("K = ") + 4;
  size_t end = start;
  for (int depth = 0; end < pretty.size(); ++end) {
    const char c = pretty[end];
    if (depth == 0 && (c == ';' || c == ']')) break;
    depth += (c == '<' || c == '(' || c == '[') - (c == '>' || c == ')' || c == ']');
  }
  const size_t first = pretty[start] == '&' ? start + 1 : start;
  return pretty.substr(first, end - first);
}

inline std::string base_name_of(const std::string& full) {
  const std::string head = full.substr(0, full.find('<'));
  const size_t colon = head.rfind("::");
  return colon == std::string::npos ? head : head.substr(colon + 2);
}

inline KernelRecord& register_name(const std::string& full_name) {
  auto* made = new KernelRecord;  // lives as long as the process
  made->full_name = full_name;
  made->name = base_name_of(made->full_name);
  made->next = kernel_records().load();
  while (!kernel_records().compare_exchange_weak(made->next, made)) {
  }
  return *made;
}
[[gnu::noinline]] inline KernelRecord& register_kernel(const char* pretty) {
  return register_name(kernel_name_from(pretty));
}

struct LaunchCount {
  int64_t launches = 0, blocks = 0, threads = 0;
};

// What was launched since the start or the last reset, by kernel name without namespaces and
// template arguments.
inline std::map<std::string, LaunchCount> launch_counts() {
  std::map<std::string, LaunchCount> counts;
  for (KernelRecord* r = kernel_records().load(); r; r = r->next) {
    if (r->launches == 0) continue;
    LaunchCount& count = counts[r->name];
    count.launches += r->launches;
    count.blocks = std::max<int64_t>(count.blocks, r->blocks);
    count.threads = std::max<int64_t>(count.threads, r->threads);
  }
  return counts;
}
inline void reset_launch_counts() {
  for (KernelRecord* r = kernel_records().load(); r; r = r->next)
    r->launches = r->blocks = r->threads = 0;
}

}  // namespace needle
