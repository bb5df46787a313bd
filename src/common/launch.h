// The one header a kernel file includes (most do through cuda_util.cuh). Under nvcc it is CUDA plus
// thin wrappers; under g++ or clang (-x c++) it is the emulator of cuda_sim/, and the same source
// runs on a machine without a GPU.
//
//   template <class T>
//   __global__ void scale_kernel(T* x, T factor, int64_t n) {
//     NEEDLE_SHARED(float, tile, 16, 17);      // __shared__ float tile[16][17]
//     NEEDLE_SHARED(float, sum);               // __shared__ float sum
//     NEEDLE_DYNAMIC_SHARED(float, scratch);   // float* scratch, of the launch's smem_bytes
//     ...
//   }
//
//   launch<scale_kernel<float>>({grid, block}, x, 2.0f, n);  // a CudaError names the kernel
//   launch<scale_kernel<float>>({grid, block, smem_bytes, stream()}, x, 2.0f, n);
//   allow_dynamic_shared<scale_kernel<float>>(smem_bytes);   // once, before more than 48 KB
//
// Kernels contain no #ifdef and no inline PTX: ptx.h has mma, ldmatrix and cp.async as functions. A
// __device__ function in a header is `inline` or a template. Loops of barriers, shuffles and
// atomics are written as in CUDA.
// __reduce_*_sync exists from sm_80 on: a kernel that is also compiled for sm_75 reduces with
// shuffles. launch_counts() says which kernels ran.
#pragma once

#include <cstddef>
#include <string>

#include "cuda_api.h"
#if NEEDLE_EMULATED
#include "cuda_sim/cuda_sim.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

namespace needle {

template <auto K>
KernelRecord& kernel_record() {
  static KernelRecord& record = register_kernel(__PRETTY_FUNCTION__);
  return record;
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

// What follows every launch; a function of its own, as there are a thousand kernels. False: launch
// it again. The first launch of a kernel takes memory of the device, where its code goes.
[[gnu::noinline]] inline bool check_and_count(KernelRecord& kernel, const LaunchConfig& config,
                                              bool again) {
  const cudaError_t error = cudaGetLastError();
  if (error == cudaErrorMemoryAllocation && !again && give_back_memory()) return false;
  if (error != cudaSuccess) throw_cuda_error("[" + kernel.full_name + "] launch failed: ", error);
  kernel.count(config);
  return true;
}

#if !NEEDLE_EMULATED

#define NEEDLE_SHARED(type_, name, ...) \
  __shared__ __align__(16) typename ::needle::SharedType<type_, ##__VA_ARGS__>::type name
#define NEEDLE_DYNAMIC_SHARED(type_, name)                                \
  extern __shared__ __align__(128) unsigned char needle_dynamic_shared[]; \
  type_* const name = reinterpret_cast<type_*>(needle_dynamic_shared)

template <auto K, class... Args>
void start(const KernelRecord&, const LaunchConfig& config, const Args&... args) {
  K<<<config.grid, config.block, config.smem, config.stream>>>(args...);
}

#else

#define NEEDLE_SHARED(type_, name, ...)                                                          \
  static constexpr char name##_declaration = 0;                                                  \
  auto& name =                                                                                   \
      ::needle::sim::shared_variable<typename ::needle::SharedType<type_, ##__VA_ARGS__>::type>( \
          &name##_declaration, #name)
#define NEEDLE_DYNAMIC_SHARED(type_, name) \
  type_* const name = static_cast<type_*>(::needle::sim::dynamic_shared())

[[gnu::noinline]] inline void check_run(const std::string& refused_or_fault) {
  if (!refused_or_fault.empty()) throw CudaError(refused_or_fault);
}

template <auto K, class... Args>
void start(const KernelRecord& kernel, const LaunchConfig& config, const Args&... args) {
  check_run(sim::launch<K>(kernel.full_name.c_str(), config.grid, config.block, config.smem,
                           config.stream, args...));
}

#endif

template <auto K, class... Args>
void launch(const LaunchConfig& config, const Args&... args) {
  KernelRecord& kernel = kernel_record<K>();
  for (bool again = false;; again = true) {
    start<K>(kernel, config, args...);
    if (check_and_count(kernel, config, again)) return;
  }
}

// What the hardware asks for before a launch may have more than 48 KB of dynamic shared memory.
template <auto K>
void allow_dynamic_shared(size_t bytes) {
  const auto ask = [&] {
    return cudaFuncSetAttribute(reinterpret_cast<const void*>(K),
                                cudaFuncAttributeMaxDynamicSharedMemorySize,
                                static_cast<int>(bytes));
  };
  cudaError_t error = ask();
  if (error == cudaErrorMemoryAllocation && give_back_memory()) error = ask();  // as a launch
  if (error != cudaSuccess)
    throw_cuda_error("[" + kernel_record<K>().full_name + "] " + std::to_string(bytes) +
                         " bytes of dynamic shared memory: ",
                     error);
}

}  // namespace needle

#include "ptx.h"
