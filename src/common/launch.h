// The one header a kernel file includes. Under nvcc it is CUDA plus thin wrappers; under g++ or
// clang (-x c++) it is the emulator of cuda_sim/, and the same source runs on a machine without a
// GPU.
//
//   template <class T>
//   __global__ void scale_kernel(T* x, T factor, int64_t n) {
//     NEEDLE_SHARED(float, tile, 16, 17);      // __shared__ float tile[16][17]; without dims: one
//     float NEEDLE_DYNAMIC_SHARED(float, scratch);   // float* scratch: the config.smem bytes of
//     this launch
//     ...
//   }
//   launch<scale_kernel<float>>({grid, block}, x, 2.0f, n);                 // throws CudaError,
//   naming the kernel launch<scale_kernel<float>>({grid, block, smem_bytes, stream}, x, 2.0f, n);
//   allow_dynamic_shared<scale_kernel<float>>(smem_bytes);                  // once, before asking
//   for more than 48 KB
//
// Kernels contain no #ifdef and no inline PTX: ptx.h has mma, ldmatrix and cp.async as functions. A
// __device__ function in a header is `inline` or a template. Loops of barriers, shuffles and
// atomics are written as in CUDA.
// __reduce_*_sync exists from sm_80 on: a kernel that is also compiled for sm_75 reduces with
// shuffles. launch_counts() says which kernels ran.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#else
#include "cuda_sim/cuda_sim.h"
#endif

namespace needle {

struct CudaError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void cuda_check(cudaError_t error, const char* what) {
  if (error != cudaSuccess)
    throw CudaError(std::string("[") + what + "] " + cudaGetErrorString(error));
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

[[gnu::noinline]] inline KernelRecord& register_kernel(const char* pretty) {
  auto* made = new KernelRecord;  // lives as long as the process
  made->full_name = kernel_name_from(pretty);
  made->name = base_name_of(made->full_name);
  made->next = kernel_records().load();
  while (!kernel_records().compare_exchange_weak(made->next, made)) {
  }
  return *made;
}

template <auto K>
KernelRecord& kernel_record() {
  static KernelRecord& record = register_kernel(__PRETTY_FUNCTION__);
  return record;
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

template <class T, size_t... Dims>
struct SharedType;
template <class T>
struct SharedType<T> {
  using type = T;
};
template <class T, size_t First, size_t... Rest>
struct SharedType<T, First, Rest...> {
  using type = typename SharedType<T, Rest...>::type[First];
};

#if defined(__CUDACC__)

#define NEEDLE_SHARED(type_, name, ...) \
  __shared__ __align__(16) typename ::needle::SharedType<type_, ##__VA_ARGS__>::type name
#define NEEDLE_DYNAMIC_SHARED(type_, name)                                \
  extern __shared__ __align__(128) unsigned char needle_dynamic_shared[]; \
  type_* const name = reinterpret_cast<type_*>(needle_dynamic_shared)

// What follows every launch; a function of its own, as there are a thousand kernels.
[[gnu::noinline]] inline void check_and_count(KernelRecord& kernel, const LaunchConfig& config) {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess)
    throw CudaError("[" + kernel.full_name + "] launch failed: " + cudaGetErrorString(error));
  kernel.count(config);
}

template <auto K, class... Args>
void launch(const LaunchConfig& config, Args&&... args) {
  KernelRecord& kernel = kernel_record<K>();
  K<<<config.grid, config.block, config.smem, config.stream>>>(std::forward<Args>(args)...);
  check_and_count(kernel, config);
}

#else

#define NEEDLE_SHARED(type_, name, ...)                                                          \
  static constexpr char name##_declaration = 0;                                                  \
  auto& name =                                                                                   \
      ::needle::sim::shared_variable<typename ::needle::SharedType<type_, ##__VA_ARGS__>::type>( \
          &name##_declaration, #name)
#define NEEDLE_DYNAMIC_SHARED(type_, name) \
  type_* const name = static_cast<type_*>(::needle::sim::dynamic_shared())

[[gnu::noinline]] inline void check_and_count(KernelRecord& kernel, const LaunchConfig& config,
                                              const std::string& refused_or_fault) {
  if (!refused_or_fault.empty()) throw CudaError(refused_or_fault);
  kernel.count(config);
}

template <auto K, class... Args>
void launch(const LaunchConfig& config, Args&&... args) {
  KernelRecord& kernel = kernel_record<K>();
  const std::string refused_or_fault =
      sim::launch<K>(kernel.full_name.c_str(), config.grid, config.block, config.smem,
                     config.stream, std::forward<Args>(args)...);
  check_and_count(kernel, config, refused_or_fault);
}

#endif

// What the hardware asks for before a launch may have more than 48 KB of dynamic shared memory.
template <auto K>
void allow_dynamic_shared(size_t bytes) {
  const cudaError_t error =
      cudaFuncSetAttribute(reinterpret_cast<const void*>(K),
                           cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (error != cudaSuccess)
    throw CudaError("[" + kernel_record<K>().full_name + "] " + std::to_string(bytes) +
                    " bytes of dynamic shared memory: " + cudaGetErrorString(error));
}

}  // namespace needle

#include "ptx.h"
