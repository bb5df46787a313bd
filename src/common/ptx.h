// Instructions that CUDA C++ has no name for, as functions: tensor-core products, ldmatrix,
// cp.async, ex2. Each has two bodies, PTX and emulator, and kernels use them without an #ifdef.
// launch.h includes this file.
//
// The lanes of a warp hold a matrix in pieces ("fragments"). With g = lane / 4 and t = lane % 4:
//   acc (16 x 8):  acc[0], acc[1] = (g, 2t), (g, 2t+1)      acc[2], acc[3] = (g+8, 2t), (g+8, 2t+1)
//   16-bit a (16 x 16, pairs):
//     a[0] = (g, 2t..)  a[1] = (g+8, 2t..)  a[2] = (g, 2t+8..)  a[3] = (g+8, 2t+8..)
//   16-bit b (16 x 8, pairs down a column):  b[0] = (2t.., g)  b[1] = (2t+8.., g)
//   tf32 a (16 x 8):  a[0] = (g, t)  a[1] = (g+8, t)  a[2] = (g, t+4)  a[3] = (g+8, t+4)
//   tf32 b (8 x 8):   b[0] = (t, g)  b[1] = (t+4, g)
// source: PTX ISA 8.7, "Matrix Fragments for mma.m16n8k16" and "... mma.m16n8k8".
//
// All lanes of a warp call together. mma and cp.async need sm_80 (on sm_75 mma traps and cp.async
// copies at once); callers choose the kernel by compute capability, and what such a kernel does
// stands in with_tensor_cores.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "dtype.h"

#if !defined(__CUDACC__)
#include "cuda_sim/tensor.h"
#endif

namespace needle::ptx {

template <class T>
constexpr bool is_half = std::is_same<T, float16>::value || std::is_same<T, __half>::value;
template <class T>
constexpr bool is_bfloat16 =
    std::is_same<T, bfloat16>::value || std::is_same<T, __nv_bfloat16>::value;

// Two 16-bit numbers in a register, `low` in the lower half: the lower column (or row) of a
// fragment's pair.
template <class T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  static_assert(is_half<T> || is_bfloat16<T>, "pack: float16 or bfloat16");
  uint32_t bits;
  if constexpr (is_half<T>) {
    const __half2 pair = __floats2half2_rn(low, high);
    memcpy(&bits, &pair, sizeof bits);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    memcpy(&bits, &pair, sizeof bits);
  }
  return bits;
}

// f(), which is not even compiled for GPUs that have no such instructions.
template <class F>
__device__ __forceinline__ void with_tensor_cores(F f) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  __trap();
#else
  f();
#endif
}

#if defined(__CUDACC__)

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// acc += a @ b, 16-bit inputs, float32 sums.
template <class T>
__device__ __forceinline__ void mma_m16n8k16(float (&acc)[4], const uint32_t (&a)[4],
                                             const uint32_t (&b)[2]) {
  static_assert(is_half<T> || is_bfloat16<T>, "mma_m16n8k16: float16 or bfloat16");
#if __CUDA_ARCH__ >= 800
  if constexpr (is_half<T>)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};\n"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};\n"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
  __trap();
#endif
}

// 2^x, within 2^-22 of it (PTX ISA, ex2.approx.ftz.f32); what is below the smallest normal number
// is 0.
__device__ __forceinline__ float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// float32 rounded to the 10-bit mantissa that mma_m16n8k8_tf32 reads.
__device__ __forceinline__ uint32_t to_tf32(float x) {
  uint32_t bits = __float_as_uint(x);
#if __CUDA_ARCH__ >= 800
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
#endif
  return bits;
}

__device__ __forceinline__ void mma_m16n8k8_tf32(float (&acc)[4], const uint32_t (&a)[4],
                                                 const uint32_t (&b)[2]) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};\n"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
  __trap();
#endif
}

// Loads N (1, 2, 4) matrices of 8 x 8 16-bit elements from shared memory. Lane 8 i + r gives the
// address of row r of matrix i (16 bytes, aligned to 16); afterwards r[i] holds (lane / 4, 2 (lane
// % 4)..) of matrix i, or, with `trans`, of its transpose.
template <int N>
__device__ __forceinline__ void ldmatrix(uint32_t (&r)[N], const void* row) {
  static_assert(N == 1 || N == 2 || N == 4, "ldmatrix: 1, 2 or 4 matrices");
  const uint32_t address = shared_address(row);
  if constexpr (N == 1)
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];\n"
                 : "=r"(r[0])
                 : "r"(address)
                 : "memory");
  else if constexpr (N == 2)
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];\n"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(address)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
template <int N>
__device__ __forceinline__ void ldmatrix_trans(uint32_t (&r)[N], const void* row) {
  static_assert(N == 1 || N == 2 || N == 4, "ldmatrix_trans: 1, 2 or 4 matrices");
  const uint32_t address = shared_address(row);
  if constexpr (N == 1)
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];\n"
                 : "=r"(r[0])
                 : "r"(address)
                 : "memory");
  else if constexpr (N == 2)
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];\n"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(address)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// Starts copying Bytes (4, 8, 16) from global to shared memory, both aligned to Bytes. The first
// `source_bytes` come from `global`, the rest is filled with zeros; with 0 nothing is read, and the
// address may be any (CUTLASS relies on that, too).
template <int Bytes>
__device__ __forceinline__ void cp_async(void* shared, const void* global,
                                         int source_bytes = Bytes) {
  static_assert(Bytes == 4 || Bytes == 8 || Bytes == 16, "cp_async: 4, 8 or 16 bytes");
#if __CUDA_ARCH__ >= 800
  if constexpr (Bytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(shared)),
                 "l"(global), "r"(source_bytes)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;\n" ::"r"(shared_address(shared)),
                 "l"(global), "n"(Bytes), "r"(source_bytes)
                 : "memory");
#else
  for (int i = 0; i < Bytes; ++i)
    static_cast<char*>(shared)[i] =
        i < source_bytes ? static_cast<const char*>(global)[i] : char(0);
#endif
}
// Closes a group of copies.
__device__ __forceinline__ void cp_async_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;\n" ::: "memory");
#endif
}
// Waits until at most N of this thread's groups are under way. Other threads see the data after a
// barrier.
template <int N>
__device__ __forceinline__ void cp_async_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : "memory");
#endif
}

#else

// What touches memory is inlined at every level of optimization: the race detector knows the place
// of an access by its code address.
inline float exp2(float x) {
  const float y = std::exp2(x);
  return y < std::numeric_limits<float>::min() ? 0.0f : y;
}
inline uint32_t to_tf32(float x) { return sim::to_tf32(x); }

template <class T>
void mma_m16n8k16(float (&acc)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                  NEEDLE_SIM_SITE) {
  static_assert(is_half<T> || is_bfloat16<T>, "mma_m16n8k16: float16 or bfloat16");
  sim::mma<std::conditional_t<is_half<T>, float16, bfloat16>, 16>(acc, a, b, site);
}
inline void mma_m16n8k8_tf32(float (&acc)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                             NEEDLE_SIM_SITE) {
  sim::mma<float, 8>(acc, a, b, site);
}
template <int N>
__forceinline__ void ldmatrix(uint32_t (&r)[N], const void* row, NEEDLE_SIM_SITE) {
  sim::load_matrices<N, false>(r, row, site);
}
template <int N>
__forceinline__ void ldmatrix_trans(uint32_t (&r)[N], const void* row, NEEDLE_SIM_SITE) {
  sim::load_matrices<N, true>(r, row, site);
}
template <int Bytes>
__forceinline__ void cp_async(void* shared, const void* global, int source_bytes = Bytes,
                              NEEDLE_SIM_SITE) {
  static_assert(Bytes == 4 || Bytes == 8 || Bytes == 16, "cp_async: 4, 8 or 16 bytes");
  sim::async_copy(shared, global, Bytes, source_bytes, site);
}
inline void cp_async_commit() { sim::async_commit(); }
template <int N>
void cp_async_wait() {
  sim::async_wait(N);
}

#endif

}  // namespace needle::ptx
