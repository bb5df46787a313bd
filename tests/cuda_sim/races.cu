// Planted races, and the same kernels without them. Built with the race detector; each case prints
// what the launch said.
#include "check.h"

using namespace needle;

namespace {

// A reduction in shared memory. `first` and `second` are its two barriers.
__global__ void block_sum_kernel(const float* x, float* out, bool first, bool second) {
  NEEDLE_SHARED(float, part, 2);
  for (int round = 0; round < 2; ++round) {
    float s = x[threadIdx.x] + round;
    for (int offset = 16; offset > 0; offset /= 2) s += __shfl_down_sync(0xffffffffu, s, offset);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = s;
    if (first) __syncthreads();
    if (threadIdx.x == 0) out[round] = part[0] + part[1];
    if (second) __syncthreads();
  }
}

__global__ void warp_kernel(float* out, bool sync) {
  NEEDLE_SHARED(float, tile, 32);
  tile[threadIdx.x] = threadIdx.x;
  if (sync)
    __syncwarp();
  else
    __shfl_sync(0xffffffffu, 1, 0);  // orders no memory
  out[threadIdx.x] = tile[31 - threadIdx.x];
}

// Half a warp synchronises; the other half does not.
__global__ void half_warp_kernel(float* out, int partner) {
  NEEDLE_SHARED(float, tile, 32);
  const int lane = threadIdx.x;
  tile[lane] = lane;
  if (lane < 16) {
    __syncwarp(0xffffu);
    out[lane] = tile[lane ^ partner];
  }
}

__global__ void blocks_kernel(float* out, bool apart) {
  out[apart ? blockIdx.x * blockDim.x + threadIdx.x : threadIdx.x] = 1.0f;
}

__global__ void atomic_kernel(int* count, bool plain) {
  atomicAdd(count, 1);
  if (plain && blockIdx.x == 1) *count = 0;
}

// Thread 0's own atomic addition does not hide that its plain write comes at any time.
__global__ void counter_kernel(int* out, bool sync) {
  NEEDLE_SHARED(int, counter);
  if (threadIdx.x == 0) counter = 0;
  if (sync) __syncthreads();
  atomicAdd(&counter, 1);
  __syncthreads();
  if (threadIdx.x == 0) *out = counter;
}

// Three readers and then a writer, which only the farthest reader is not ordered with.
__global__ void readers_kernel(float* out, bool apart) {
  NEEDLE_SHARED(float, value);
  if (threadIdx.x == 0) value = 1.0f;
  __syncthreads();
  if (threadIdx.x != 33 || apart) out[threadIdx.x] = value;
  if (apart) __syncthreads();
  if (threadIdx.x == 33) value = 2.0f;
}

__global__ void copy_kernel(const float* x, float* out, bool wait) {
  NEEDLE_SHARED(float, tile, 128);
  ptx::cp_async<16>(&tile[threadIdx.x * 4], x + threadIdx.x * 4);
  ptx::cp_async_commit();
  if (wait) {
    ptx::cp_async_wait<0>();
    __syncthreads();
  } else {
    __syncthreads();
    ptx::cp_async_wait<0>();
  }
  out[threadIdx.x] = tile[threadIdx.x * 4 ^ 64];
}

// A two-stage pipeline. Without its second barrier a copy may overtake the threads that still read
// the stage; if fewer copies are waited for than must be, a stage has what it had before.
__global__ void pipeline_kernel(const float* x, float* out, bool second, bool wait) {
  NEEDLE_SHARED(float, stage, 2, 64);
  const int t = threadIdx.x;
  float sum = 0;
  for (int i = 0; i < 2; ++i) stage[i][t] = 0;
  __syncthreads();
  for (int i = 0; i < 5; ++i) {
    if (i < 4) ptx::cp_async<4>(&stage[i % 2][t], x + i * 64 + t);
    ptx::cp_async_commit();
    if (i == 0) continue;
    if (wait)
      ptx::cp_async_wait<1>();
    else
      ptx::cp_async_wait<2>();
    __syncthreads();
    sum += stage[(i - 1) % 2][63 - t];
    if (second) __syncthreads();
  }
  out[t] = sum;
}

__global__ void matrix_kernel(uint32_t* out, bool sync) {
  NEEDLE_SHARED(uint16_t, rows, 8, 8);
  const int lane = threadIdx.x;
  rows[lane / 4][lane % 4 * 2] = rows[lane / 4][lane % 4 * 2 + 1] = 1;
  if (sync) __syncwarp();
  uint32_t r[1];
  ptx::ldmatrix(r, rows[lane % 8]);
  out[lane] = r[0];
}

__global__ void halves_kernel(float* out, bool sync) {
  NEEDLE_SHARED(__half, halves, 64);
  halves[threadIdx.x] = __float2half(1.0f);
  if (sync) __syncthreads();
  out[threadIdx.x] = float(halves[63 - threadIdx.x]) + float(__ldg(&halves[63 - threadIdx.x]));
}

__global__ void tail_kernel(float* out, int written) {
  NEEDLE_SHARED(float, tile, 32);
  if (int(threadIdx.x) < written) tile[threadIdx.x] = 1.0f;
  __syncthreads();
  out[threadIdx.x] = tile[31 - threadIdx.x];
}

__global__ void reach_kernel(float* out, int reach) {
  NEEDLE_SHARED(float, tile, 32);
  const float* p = tile;
  tile[threadIdx.x] = 1.0f;
  __syncthreads();
  out[threadIdx.x] = p[int(threadIdx.x) + reach];
}

__global__ void no_wait_kernel(const float* x, float* out) {
  NEEDLE_SHARED(float, tile, 128);
  ptx::cp_async<16>(&tile[threadIdx.x * 4], x + threadIdx.x * 4);
  ptx::cp_async_commit();
  __syncthreads();
  out[threadIdx.x] = tile[threadIdx.x * 4 ^ 64];
}

// A struct is copied with its padding, which nobody writes.
struct Padded {
  float value;
  int64_t position;
};
__global__ void padded_kernel(int64_t* out) {
  NEEDLE_SHARED(Padded, states, 32);
  states[threadIdx.x].value = 1.0f;
  states[threadIdx.x].position = threadIdx.x;
  __syncthreads();
  const Padded state = states[31 - threadIdx.x];
  out[threadIdx.x] = state.position + int64_t(state.value);
}

__global__ void struct_kernel(float4* x, bool apart) {
  x[apart ? threadIdx.x : threadIdx.x / 2] = make_float4(1, 2, 3, 4);
}

}  // namespace

template <class F>
void report(const char* name, F&& run) {
  try {
    run();
    std::printf("%s: clean\n", name);
  } catch (const CudaError& error) {
    std::printf("%s: %s\n", name, error.what());
  }
}

int main() {
  Buffer<float> x(std::vector<float>(256, 1.0f)), out(256);
  Buffer<int> count(std::vector<int>{0});
  Buffer<float4> vectors(64);
  Buffer<int64_t> positions(32);
  Buffer<uint32_t> words(32);
  float* o = out.get();
  report("block_sum", [&] { launch<block_sum_kernel>({2, 64}, x.get(), o + 0, true, true); });
  report("block_sum_one_block", [&] { launch<block_sum_kernel>({1, 64}, x.get(), o, true, true); });
  report("no_first_barrier", [&] { launch<block_sum_kernel>({1, 64}, x.get(), o, false, true); });
  report("no_second_barrier", [&] { launch<block_sum_kernel>({1, 64}, x.get(), o, true, false); });
  report("warp", [&] { launch<warp_kernel>({1, 32}, o, true); });
  report("no_syncwarp", [&] { launch<warp_kernel>({1, 32}, o, false); });
  report("half_warp", [&] { launch<half_warp_kernel>({1, 32}, o, 1); });
  report("half_warp_reaches_out", [&] { launch<half_warp_kernel>({1, 32}, o, 16); });
  report("blocks", [&] { launch<blocks_kernel>({2, 64}, o, true); });
  report("blocks_meet", [&] { launch<blocks_kernel>({2, 64}, o, false); });
  report("atomic", [&] { launch<atomic_kernel>({2, 64}, count.get(), false); });
  report("atomic_and_plain", [&] { launch<atomic_kernel>({2, 64}, count.get(), true); });
  report("counter", [&] { launch<counter_kernel>({1, 64}, count.get(), true); });
  report("counter_too_soon", [&] { launch<counter_kernel>({1, 64}, count.get(), false); });
  report("readers", [&] { launch<readers_kernel>({1, 64}, o, true); });
  report("readers_and_writer", [&] { launch<readers_kernel>({1, 64}, o, false); });
  report("copy", [&] { launch<copy_kernel>({1, 32}, x.get(), o, true); });
  report("copy_waits_after_barrier", [&] { launch<copy_kernel>({1, 32}, x.get(), o, false); });
  report("pipeline", [&] { launch<pipeline_kernel>({1, 64}, x.get(), o, true, true); });
  report("copy_overtakes", [&] { launch<pipeline_kernel>({1, 64}, x.get(), o, false, true); });
  report("stale_stage", [&] { launch<pipeline_kernel>({1, 64}, x.get(), o, true, false); });
  report("matrix", [&] { launch<matrix_kernel>({1, 32}, words.get(), true); });
  report("matrix_too_soon", [&] { launch<matrix_kernel>({1, 32}, words.get(), false); });
  report("halves", [&] { launch<halves_kernel>({1, 64}, o, true); });
  report("halves_too_soon", [&] { launch<halves_kernel>({1, 64}, o, false); });
  report("tail", [&] { launch<tail_kernel>({1, 32}, o, 32); });
  report("uninitialized", [&] { launch<tail_kernel>({1, 32}, o, 31); });
  report("within", [&] { launch<reach_kernel>({1, 32}, o, 0); });
  report("beyond", [&] { launch<reach_kernel>({1, 32}, o, 1); });
  report("before", [&] { launch<reach_kernel>({1, 32}, o, -1); });
  report("no_wait", [&] { launch<no_wait_kernel>({1, 32}, x.get(), o); });
  report("padded", [&] { launch<padded_kernel>({1, 32}, positions.get()); });
  report("struct", [&] { launch<struct_kernel>({1, 64}, vectors.get(), true); });
  report("struct_meets", [&] { launch<struct_kernel>({1, 64}, vectors.get(), false); });
}
