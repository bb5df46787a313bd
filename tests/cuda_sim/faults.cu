// Planted faults that the emulator itself reports: each prints its message; then an innocent kernel
// must still run.
#include <functional>
#include <map>

#include "check.h"

using namespace needle;

namespace {

__global__ void divergent_barrier_kernel() {
  if (threadIdx.x < 16)
    __syncthreads();
  else
    __syncthreads();
}

__global__ void deadlock_kernel() {
  if (threadIdx.x < 40)
    __syncthreads();
  else
    __syncwarp();  // lanes 40 to 63: of the second warp, lanes 0 to 7 never come
}

__global__ void divergent_shuffle_kernel(int* out) {
  if (threadIdx.x == 3)
    out[3] = __shfl_xor_sync(0xffffffffu, 1, 1);
  else
    out[threadIdx.x] = __shfl_down_sync(0xffffffffu, 1, 1);
}

__global__ void lane_not_in_mask_kernel() { __syncwarp(0xfu); }

__global__ void empty_kernel() {}

__global__ void static_shared_kernel() {
  NEEDLE_SHARED(float, wide, 49, 256);
  wide[0][0] = 1.0f;
}

__global__ void no_dynamic_shared_kernel() {
  NEEDLE_DYNAMIC_SHARED(float, none);
  none[0] = 1.0f;
}

__global__ void both_shared_kernel() {
  NEEDLE_SHARED(int, one);
  NEEDLE_DYNAMIC_SHARED(int, many);
  many[0] = one = 1;
}

__global__ void outside_shared_kernel(int reach) {
  NEEDLE_SHARED(int, first, 32);
  NEEDLE_SHARED(int, second, 32);
  int* p = first;
  p[int(threadIdx.x) + reach] = second[threadIdx.x] = 1;
}

__global__ void outside_dynamic_shared_kernel(int reach) {
  NEEDLE_DYNAMIC_SHARED(int, scratch);
  scratch[threadIdx.x + reach] = 1;
}

__global__ void null_kernel(int* p) {
  if (blockIdx.x == 1 && threadIdx.x == 5) *p = 1;
}

__global__ void division_kernel(int* out, int zero) { *out = 7 / zero; }

__global__ void recursion_kernel(int* out, int depth) {
  volatile char local[4096];
  local[depth % 4096] = 1;
  if (depth > 0) recursion_kernel(out, depth - 1);
  *out += local[depth % 4096];
}

// A frame that would end in the stack of the thread before.
__device__ [[gnu::noinline]] int large_frame(int i) {
  volatile int local[75 * 1024];
  local[i] = i;
  return local[i];
}
__global__ void large_frame_kernel(int* out) {
  __syncthreads();
  // Of an index that it knows, clang would keep that element alone.
  if (threadIdx.x == 31) *out = large_frame(*out - 1);
  __syncthreads();
}

__global__ void trap_kernel() {
  if (threadIdx.x == 2) __trap();
}

__global__ void misaligned_copy_kernel(const char* x, int bytes) {
  NEEDLE_SHARED(char, tile, 64);
  ptx::cp_async<16>(tile, x + 4, bytes);
}

__global__ void copy_beyond_kernel(const char* x) {
  NEEDLE_SHARED(char, tile, 24);
  ptx::cp_async<16>(tile + 16, x);
}

__global__ void misaligned_atomic_kernel(char* x) {
  atomicAdd(reinterpret_cast<int*>(x + 4 * threadIdx.x + threadIdx.x / 3), 1);
}
__global__ void misaligned_pair_kernel(__half* x) {
  atomicAdd(reinterpret_cast<__half2*>(x + 1), __half2{});
}

__global__ void double_kernel(int* x) { x[threadIdx.x] *= 2; }

using Case = std::function<void(int* scratch)>;
const std::map<std::string, Case> kCases = {
    {"divergent_barrier", [](int*) { launch<divergent_barrier_kernel>({2, 32}); }},
    {"deadlock", [](int*) { launch<deadlock_kernel>({1, 64}); }},
    {"divergent_shuffle", [](int* p) { launch<divergent_shuffle_kernel>({1, 32}, p); }},
    {"lane_not_in_mask", [](int*) { launch<lane_not_in_mask_kernel>({1, 32}); }},
    {"block_too_large", [](int*) { launch<empty_kernel>({1, 1025}); }},
    {"block_axis_too_large", [](int*) { launch<empty_kernel>({1, dim3(1, 1, 65)}); }},
    {"grid_too_large", [](int*) { launch<empty_kernel>({dim3(1, 65536), 1}); }},
    {"empty_grid", [](int*) { launch<empty_kernel>({0, 32}); }},
    {"empty_block", [](int*) { launch<empty_kernel>({1, dim3(32, 0)}); }},
    {"shared_without_opt_in", [](int*) { launch<empty_kernel>({1, 32, 48 * 1024 + 1}); }},
    {"shared_beyond_device", [](int*) { allow_dynamic_shared<empty_kernel>(227 * 1024 + 1); }},
    {"static_shared_too_large", [](int*) { launch<static_shared_kernel>({1, 32}); }},
    {"shared_beside_dynamic", [](int*) { launch<both_shared_kernel>({1, 1, 48 * 1024}); }},
    {"shared_beside_opted_in",
     [](int*) {
       allow_dynamic_shared<both_shared_kernel>(227 * 1024);
       launch<both_shared_kernel>({1, 1, 64});
     }},
    {"no_dynamic_shared", [](int*) { launch<no_dynamic_shared_kernel>({1, 32}); }},
    {"beyond_shared", [](int*) { launch<outside_shared_kernel>({2, 32}, 1); }},
    {"before_shared", [](int*) { launch<outside_shared_kernel>({1, 32}, -32); }},
    {"farther_beyond_shared", [](int*) { launch<outside_shared_kernel>({2, 32}, 300); }},
    {"far_beyond_shared", [](int*) { launch<outside_shared_kernel>({2, 32}, 60000); }},
    {"far_before_shared", [](int*) { launch<outside_shared_kernel>({2, 32}, -60000); }},
    {"beyond_larger_shared",  // in what the launch before this one has had, too
     [](int*) {
       launch<outside_dynamic_shared_kernel>({1, 32, 48 * 1024}, 0);
       launch<outside_shared_kernel>({1, 32}, 8000);
     }},
    {"copy_beyond_shared",
     [](int* p) { launch<copy_beyond_kernel>({1, 1}, reinterpret_cast<const char*>(p)); }},
    {"beyond_dynamic_shared", [](int*) { launch<outside_dynamic_shared_kernel>({1, 32, 128}, 1); }},
    {"null_pointer", [](int*) { launch<null_kernel>({2, 32}, static_cast<int*>(nullptr)); }},
    {"impossible_pointer",
     [](int*) { launch<null_kernel>({2, 32}, reinterpret_cast<int*>(uintptr_t(1) << 60)); }},
    {"division_by_zero", [](int* p) { launch<division_kernel>({1, 1}, p, 0); }},
    {"stack_overflow", [](int* p) { launch<recursion_kernel>({1, 1}, p, 1000); }},
    {"large_frame", [](int* p) { launch<large_frame_kernel>({1, 32}, p); }},
    {"trap", [](int*) { launch<trap_kernel>({1, 32}); }},
    {"misaligned_copy",
     [](int* p) { launch<misaligned_copy_kernel>({1, 1}, reinterpret_cast<const char*>(p), 16); }},
    {"misaligned_empty_copy",
     [](int* p) { launch<misaligned_copy_kernel>({1, 1}, reinterpret_cast<const char*>(p), 0); }},
    {"misaligned_atomic",
     [](int* p) { launch<misaligned_atomic_kernel>({1, 4}, reinterpret_cast<char*>(p)); }},
    {"misaligned_pair",
     [](int* p) { launch<misaligned_pair_kernel>({1, 1}, reinterpret_cast<__half*>(p)); }},
};

}  // namespace

int main(int argc, char** argv) {
  Buffer<int> scratch(std::vector<int>(64, 1));
  for (int i = 1; i < argc; ++i) {
    try {
      kCases.at(argv[i])(scratch.get());
      std::printf("%s: not caught\n", argv[i]);
    } catch (const CudaError& error) {
      std::printf("%s: %s\n", argv[i], error.what());
    }
    Buffer<int> x(std::vector<int>(64, 21));
    launch<double_kernel>({1, 64}, x.get());
    for (int value : x.host()) CHECK(value == 42);
  }
}
