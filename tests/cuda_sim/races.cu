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

__global__ void count_kernel(float* out, bool set) {
  NEEDLE_SHARED(int, count);
  if (set && threadIdx.x == 0) atomicExch(&count, 0);
  __syncthreads();
  atomicAdd(&count, 1);
  __syncthreads();
  out[threadIdx.x] = float(count);
}

__global__ void reach_kernel(float* out, int reach) {
  NEEDLE_SHARED(float, tile, 32);
  const float* p = tile;
  tile[threadIdx.x] = 1.0f;
  __syncthreads();
  out[threadIdx.x] = p[int(threadIdx.x) + reach];
}

__global__ void write_beside_kernel(float* out, int reach) {
  NEEDLE_SHARED(float, tile, 32);
  float* p = tile;
  p[int(threadIdx.x) + reach] = 1.0f;
  __syncthreads();
  out[threadIdx.x] = tile[threadIdx.x];
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

enum Fences { kNone, kBlock, kDevice };
__device__ void pass(Fences fences) {
  if (fences == kBlock) __threadfence_block();
  if (fences == kDevice) __threadfence();
}

// The last block to finish adds up what all blocks have left, and clears their counter.
__global__ void last_block_kernel(float* sums, unsigned* finished, Fences fences) {
  NEEDLE_SHARED(bool, is_last);
  if (threadIdx.x == 0) {
    sums[blockIdx.x] = 1.0f;
    pass(fences);
    is_last = atomicInc(finished, gridDim.x) == gridDim.x - 1;
  }
  __syncthreads();
  if (is_last && threadIdx.x == 40) {
    float sum = 0;
    for (unsigned i = 0; i < gridDim.x; ++i) sum += sums[i];
    sums[0] = sum;
    *finished = 0;
  }
}

// The whole block's results, of which a barrier tells the thread with the fence.
__global__ void all_results_kernel(float* out, unsigned* finished, bool barrier) {
  out[blockIdx.x * 64 + threadIdx.x] = 1.0f;
  if (barrier) __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence();
  if (atomicAdd(finished, 1u) == gridDim.x - 1) out[0] = out[63] + out[64 * gridDim.x - 1];
}

// Each thread fences its own result, and a barrier, or one of a warp, tells thread 0 of the fences.
__global__ void fenced_apart_kernel(float* out, unsigned* finished, int fencing, bool barrier) {
  const int t = threadIdx.x;
  out[blockIdx.x * 64 + t] = 1.0f;
  if (t < fencing) __threadfence();
  if (barrier)
    __syncthreads();
  else
    __syncwarp();
  const int other = blockIdx.x == 0 ? gridDim.x - 1 : 0;
  if (t == 0 && atomicAdd(finished, 1u) == gridDim.x - 1) out[0] = out[64 * other + blockDim.x - 1];
}

// A sum of all blocks, in which the last one has a part too.
__global__ void atomic_sum_kernel(int* out, int* sum, unsigned* finished, Fences fences) {
  if (threadIdx.x != 0) return;
  atomicAdd(sum, 1);
  pass(fences);
  if (atomicAdd(finished, 1u) == gridDim.x - 1) *out = *sum;
}

// A lock around an addition that is not atomic.
__global__ void lock_kernel(float* sum, int* lock, Fences fences) {
  if (threadIdx.x != 0) return;
  while (atomicCAS(lock, 0, 1) != 0) continue;
  __threadfence();
  *sum += 1.0f;
  pass(fences);
  atomicExch(lock, 0);
}

// Blocks in the order of their tickets: each goes on when the one before has raised its flag, and
// the last one reads what the first one wrote.
__global__ void chain_kernel(float* out, int* ticket, int* flags, bool late) {
  if (threadIdx.x != 0) return;
  const int place = atomicAdd(ticket, 1);
  if (place == 0 && !late) out[0] = 1.0f;
  while (place > 0 && atomicAdd(&flags[place - 1], 0) == 0) continue;
  __threadfence();
  if (place == 0 && late) out[0] = 1.0f;
  atomicExch(&flags[place], 1);
  if (place == int(gridDim.x) - 1) out[1] = out[0];
}

// The last thread of a block to come reads what the others wrote.
__global__ void last_thread_kernel(float* out, Fences fences) {
  NEEDLE_SHARED(float, values, 64);
  NEEDLE_SHARED(int, arrived);
  if (threadIdx.x == 0) arrived = 0;
  __syncthreads();
  values[threadIdx.x] = 1.0f;
  pass(fences);
  if (atomicAdd(&arrived, 1) == 63) out[blockIdx.x] = values[5] + values[63];
}

// A thread that asked for the flag before it was raised, or has left the asking to another, knows
// nothing of what was written ahead of it.
__global__ void flag_kernel(float* out, int* flag, int asks, bool again) {
  NEEDLE_SHARED(float, value);
  const int lane = threadIdx.x;
  if (lane == 0) {
    __threadfence_block();
    atomicAdd(flag, 1);
    atomicAdd(flag, 1);
  }
  __syncwarp();
  if (lane == 1) {
    value = 1.0f;
    __threadfence_block();
    atomicAdd(flag, 1);
  }
  __shfl_sync(0xffffffffu, 1, 0);  // orders no memory
  if (lane == asks && again) atomicAdd(flag, 1);
  __shfl_sync(0xffffffffu, 1, 0);
  if (lane == 0) *out = value;
}

// The second block to come reads what the first wrote ahead of its fence, or counted behind it.
__global__ void second_block_kernel(int* out, int* numbers, bool own_flag, bool behind) {
  NEEDLE_SHARED(int, flag);
  if (threadIdx.x != 0) return;
  flag = 0;
  int *ticket = numbers, *count = numbers + 1;
  const bool first = atomicAdd(ticket, 1) == 0;
  if (first) out[0] = 1;
  __threadfence();
  if (first) atomicAdd(count, 1);
  atomicAdd(own_flag ? &flag : numbers + 2, 1);
  if (!first) out[1] = behind ? *count : out[0];
}

// What each step costs must not grow with the number of releases so far.
__global__ void busy_counter_kernel(float* out, unsigned* count) {
  for (int i = 0; i < 10; ++i) {
    out[threadIdx.x] = float(i);
    __threadfence();
    atomicAdd(count, 1u);
  }
}

__global__ void busy_queue_kernel(float* out, int* head, int items) {
  NEEDLE_SHARED(int, item);
  for (;;) {
    if (threadIdx.x == 0) {
      __threadfence();
      item = atomicAdd(head, 1);
    }
    __syncthreads();
    const int mine = item;
    __syncthreads();
    if (mine >= items) return;
    out[threadIdx.x] = float(mine);
  }
}

// An addition by comparison, which is right whatever the first look finds, and a flag that all set
// to the same: harmless, and reported unless all of it is atomic.
__global__ void add_kernel(double* sum, bool atomic) {
  auto* word = reinterpret_cast<unsigned long long*>(sum);
  unsigned long long seen = atomic ? atomicAdd(word, 0ull) : *word, assumed;
  do {
    assumed = seen;
    const double next = __longlong_as_double(static_cast<long long>(assumed)) + 1;
    seen = atomicCAS(word, assumed, static_cast<unsigned long long>(__double_as_longlong(next)));
  } while (seen != assumed);
}
__global__ void raise_kernel(int* flag, bool atomic) {
  if (atomic)
    atomicExch(flag, 1);
  else
    *flag = 1;
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
  Buffer<int> count(std::vector<int>{0, 0});
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
  report("count", [&] { launch<count_kernel>({1, 64}, o, true); });
  report("count_of_nothing", [&] { launch<count_kernel>({1, 64}, o, false); });
  report("within", [&] { launch<reach_kernel>({1, 32}, o, 0); });
  report("beyond", [&] { launch<reach_kernel>({1, 32}, o, 1); });
  report("before", [&] { launch<reach_kernel>({1, 32}, o, -1); });
  report("write_within", [&] { launch<write_beside_kernel>({1, 32}, o, 0); });
  report("write_beyond", [&] { launch<write_beside_kernel>({1, 32}, o, 1); });
  report("write_far_beyond", [&] { launch<write_beside_kernel>({1, 32}, o, 20000); });
  report("write_far_before", [&] { launch<write_beside_kernel>({1, 32}, o, -20000); });
  report("no_wait", [&] { launch<no_wait_kernel>({1, 32}, x.get(), o); });
  report("padded", [&] { launch<padded_kernel>({1, 32}, positions.get()); });
  report("struct", [&] { launch<struct_kernel>({1, 64}, vectors.get(), true); });
  // Counters, flags and locks are 0 before each.
  Buffer<unsigned> finished(std::vector<unsigned>(40, 0u));
  Buffer<int> flags(std::vector<int>(160, 0));
  unsigned* f = finished.get();
  int* g = flags.get();
  report("last_block", [&] { launch<last_block_kernel>({5, 64}, o, f, kDevice); });
  report("last_block_unfenced", [&] { launch<last_block_kernel>({5, 64}, o, f, kNone); });
  report("last_block_block_fence", [&] { launch<last_block_kernel>({5, 64}, o, f + 20, kBlock); });
  report("all_results", [&] { launch<all_results_kernel>({4, 64}, o, f + 30, true); });
  report("all_results_unsynced", [&] { launch<all_results_kernel>({4, 64}, o, f + 31, false); });
  report("lock", [&] { launch<lock_kernel>({3, 64}, o, g, kDevice); });
  report("lock_unfenced", [&] { launch<lock_kernel>({3, 64}, o, g + 10, kNone); });
  report("chain", [&] { launch<chain_kernel>({4, 32}, o, g + 20, g + 21, false); });
  report("chain_late", [&] { launch<chain_kernel>({4, 32}, o, g + 30, g + 31, true); });
  report("last_thread", [&] { launch<last_thread_kernel>({2, 64}, o, kBlock); });
  report("last_thread_unfenced", [&] { launch<last_thread_kernel>({1, 64}, o, kNone); });
  report("flag", [&] { launch<flag_kernel>({1, 32}, o, g + 40, 0, true); });
  report("flag_asked_early", [&] { launch<flag_kernel>({1, 32}, o, g + 40, 0, false); });
  report("flag_asked_by_other", [&] { launch<flag_kernel>({1, 32}, o, g + 40, 2, true); });
  int* n = count.get();
  report("second_block", [&] { launch<second_block_kernel>({2, 32}, n, g + 50, false, false); });
  report("own_flag", [&] { launch<second_block_kernel>({2, 32}, n, g + 60, true, false); });
  report("behind_fence", [&] { launch<second_block_kernel>({2, 32}, n, g + 70, false, true); });
  Buffer<float> many(1000);
  report("busy_counter", [&] { launch<busy_counter_kernel>({1, 1000}, many.get(), f + 32); });
  report("atomic_sum", [&] { launch<atomic_sum_kernel>({4, 32}, n, g + 80, f + 33, kDevice); });
  report("atomic_sum_unfenced",
         [&] { launch<atomic_sum_kernel>({4, 32}, n, g + 81, f + 34, kNone); });
  report("fenced_apart", [&] { launch<fenced_apart_kernel>({3, 64}, o, f + 35, 64, true); });
  report("fenced_in_warp", [&] { launch<fenced_apart_kernel>({3, 32}, o, f + 36, 32, false); });
  report("half_fenced", [&] { launch<fenced_apart_kernel>({3, 64}, o, f + 37, 32, true); });
  report("half_fenced_in_warp",
         [&] { launch<fenced_apart_kernel>({3, 32}, o, f + 38, 16, false); });
  report("fenced_unsynced", [&] { launch<fenced_apart_kernel>({3, 64}, o, f + 39, 64, false); });
  Buffer<double> total(std::vector<double>(1, 0.0));
  report("added", [&] { launch<add_kernel>({2, 64}, total.get(), true); });
  CHECK(total.host()[0] == 128);
  report("added_plain_look", [&] { launch<add_kernel>({2, 64}, total.get(), false); });
  report("raised", [&] { launch<raise_kernel>({2, 64}, n, true); });
  report("raised_plain", [&] { launch<raise_kernel>({2, 64}, n, false); });
  report("busy_queue", [&] { launch<busy_queue_kernel>({1, 32}, o, g + 82, 20000); });
  report("struct_meets", [&] { launch<struct_kernel>({1, 64}, vectors.get(), false); });
}
