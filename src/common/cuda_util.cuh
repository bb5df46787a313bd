// What every CUDA kernel file shares: the device (cuda_device.h), launch shapes, strided walks,
// aligned vectors, and reductions over a warp or a block.
#pragma once

#include <algorithm>

#include "cuda_device.h"
#include "integers.h"
#include "launch.h"

namespace needle::NEEDLE_DEVICE {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kBlock = 256;  // threads of a block where nothing else decides

__device__ inline void report_bad_id(ErrorFlag* flag, BadId op, int64_t value, int64_t position,
                                     int64_t limit) {
  if (atomicCAS(&flag->code, int(BadId::none), int(op)) != int(BadId::none)) return;
  flag->value = value;
  flag->position = position;
  flag->limit = limit;
}

// --- launch shapes -------------------------------------------------------------------------------

// Enough blocks to fill the device, no more: kernels loop over what is left (a grid-stride loop).
// At least one, as a launch must have: arrays without elements are no case of their own.
inline unsigned blocks_for(int64_t work_items) {
  const int64_t enough = int64_t(multiprocessors()) * 16;
  return unsigned(std::max<int64_t>(1, std::min(work_items, enough)));
}
inline LaunchConfig grid_stride(int64_t n, int block = kBlock) {
  return LaunchConfig{dim3(blocks_for(ceil_div(n, block))), dim3(unsigned(block)), 0, stream()};
}
inline LaunchConfig grid_of(int64_t blocks, int block = kBlock, int64_t shared_bytes = 0) {
  return LaunchConfig{dim3(unsigned(blocks)), dim3(unsigned(block)), size_t(shared_bytes),
                      stream()};
}

// The same for a kernel whose dynamic shared memory may need the opting in. It is opted in for all
// that the device has: the limit is the kernel's, and another host thread may be about to launch it
// with more.
template <auto Kernel>
LaunchConfig grid_with_shared(int64_t work_items, int block, int64_t shared_bytes) {
  if (shared_bytes > max_shared_bytes())
    throw std::invalid_argument("[" + kernel_record<Kernel>().name + "] a block needs " +
                                std::to_string(shared_bytes) + " bytes of shared memory (at most " +
                                std::to_string(max_shared_bytes()) + " on this device)");
  if (shared_bytes > 48 * 1024) allow_dynamic_shared<Kernel>(size_t(max_shared_bytes()));
  return grid_of(blocks_for(work_items), block, shared_bytes);
}

__device__ inline int64_t first_index() { return int64_t(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ inline int64_t index_step() { return int64_t(gridDim.x) * blockDim.x; }

// use(i, load(i)) for i = first, first + step, ... < end. AtOnce loads are under way together, or
// memory would stand idle; where `use` stores, perhaps in place, the compiler could not know that
// they may.
template <int AtOnce = 4, class Load, class Use>
__device__ void in_groups(int64_t first, int64_t step, int64_t end, Load load, Use use) {
  for (int64_t i = first; i < end; i += AtOnce * step) {
    decltype(load(i)) loaded[AtOnce];
#pragma unroll
    for (int j = 0; j < AtOnce; ++j)
      if (i + j * step < end) loaded[j] = load(i + j * step);
#pragma unroll
    for (int j = 0; j < AtOnce; ++j)
      if (i + j * step < end) use(i + j * step, loaded[j]);
  }
}

// --- vectors: N elements moved by one instruction ------------------------------------------------

template <class T, int N>
struct alignas(sizeof(T) * N) Vec {
  T v[N];
};

inline bool aligned_to(const void* pointer, int64_t bytes) {
  return int64_t(reinterpret_cast<uintptr_t>(pointer)) % bytes == 0;
}
template <class T>
bool aligned_for(const void* pointer) {
  return aligned_to(pointer, sizeof(T));
}

// sums of a thread that lie side by side, to memory, or added to what is there; `inside` of them
// are within the matrix.
template <class T, class A, int N>
__device__ void store_run(T* to, const A (&sums)[N], int64_t inside, bool accumulate = false) {
  using Run = Vec<T, N>;
  const auto sum = [&](int i, T before) {
    return T(accumulate ? accum_t<T>(before) + accum_t<T>(sums[i]) : accum_t<T>(sums[i]));
  };
  if (inside >= N && reinterpret_cast<uintptr_t>(to) % sizeof(Run) == 0) {
    Run run{};
    if (accumulate) run = *reinterpret_cast<const Run*>(to);
#pragma unroll
    for (int i = 0; i < N; ++i) run.v[i] = sum(i, run.v[i]);
    *reinterpret_cast<Run*>(to) = run;
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (i < inside) to[i] = sum(i, accumulate ? to[i] : T{});
  }
}

// --- walking strided operands --------------------------------------------------------------------

constexpr int kMaxDims = 12;

// Division by a constant as a multiplication (Granlund & Montgomery 1994); right for 0 <= n < 2^31.
struct FastDivisor {
  uint32_t divisor = 1, multiplier = 0, shift = 0;
  FastDivisor() = default;
  explicit FastDivisor(uint32_t d) : divisor(d) {
    while ((uint64_t(1) << shift) < d) ++shift;
    multiplier = uint32_t(((uint64_t(1) << 32) * ((uint64_t(1) << shift) - d)) / d + 1);
  }
  __device__ uint32_t divide(uint32_t n) const {
    return (uint32_t((uint64_t(n) * multiplier) >> 32) + n) >> shift;
  }
};

// The offsets of element i, or of vector i (go_by_vectors), of N operands that share a shape.
// Dimensions that are contiguous in every operand are merged.
template <int N>
struct Walk {
  int ndim = 0;
  bool wide = false;  // 2^31 elements or more: divide in 64 bits
  int64_t shape[kMaxDims];
  FastDivisor divisor[kMaxDims];
  int64_t strides[N][kMaxDims];
  int64_t offset[N];

  struct Offsets {
    int64_t of[N];
  };

  // Not unrolled: this is in every strided kernel of every dtype.
  __device__ Offsets operator()(int64_t i) const {
    Offsets at;
    for (int o = 0; o < N; ++o) at.of[o] = offset[o];
#pragma unroll 1
    for (int d = ndim - 1; d > 0; --d) {
      const int64_t q = wide ? i / shape[d] : divisor[d].divide(uint32_t(i));
      const int64_t r = i - q * shape[d];
      i = q;
      for (int o = 0; o < N; ++o) at.of[o] += r * strides[o][d];
    }
    for (int o = 0; o < N; ++o) at.of[o] += i * strides[o][0];
    return at;
  }

  // Whether the operand has the same element all along the last dimension.
  NEEDLE_HD bool broadcasts(int o) const { return ndim > 0 && strides[o][ndim - 1] == 0; }

  // Element i, where the walk goes by vectors of a single dimension.
  __device__ Offsets element(int64_t i) const {
    Offsets at;
    for (int o = 0; o < N; ++o) at.of[o] = offset[o] + (broadcasts(o) ? 0 : i);
    return at;
  }
};

struct WalkOperand {
  const Dims* strides;  // null or empty: contiguous
  int64_t offset = 0;
};

template <int N>
[[gnu::noinline]] Walk<N> make_walk(const Dims& shape, const WalkOperand (&operands)[N]) {
  Walk<N> walk;
  const int rank = int(shape.size());
  std::vector<Dims> strides(N, Dims(size_t(rank), 0));
  int64_t size = 1;
  for (int d = rank - 1; d >= 0; --d) {
    for (int o = 0; o < N; ++o) {
      const Dims* given = operands[o].strides;
      strides[o][d] = given != nullptr && !given->empty() ? (*given)[size_t(d)] : size;
    }
    size *= shape[size_t(d)];
  }
  walk.wide = size >= (int64_t(1) << 31);
  for (int o = 0; o < N; ++o) walk.offset[o] = operands[o].offset;
  for (int d = 0; d < rank && size > 0; ++d) {  // without elements it is a walk of no dimensions
    const int64_t extent = shape[size_t(d)];
    if (extent == 1) continue;
    bool merges = walk.ndim > 0;
    for (int o = 0; o < N && merges; ++o)
      merges = walk.strides[o][walk.ndim - 1] == extent * strides[o][d];
    if (!merges && walk.ndim == kMaxDims)
      throw std::invalid_argument("an array of more than " + std::to_string(kMaxDims) +
                                  " dimensions that do not merge has no kernel on this device");
    const int at = merges ? walk.ndim - 1 : walk.ndim++;
    walk.shape[at] = merges ? walk.shape[at] * extent : extent;
    for (int o = 0; o < N; ++o) walk.strides[o][at] = strides[o][d];
  }
  if (walk.ndim == 0)
    for (int o = 0; o < N; ++o) walk.strides[o][0] = 0;
  for (int d = 0; d < walk.ndim && !walk.wide; ++d)
    walk.divisor[d] = FastDivisor(uint32_t(walk.shape[d]));
  return walk;
}

// Makes `walk` go by vectors of `length` elements, where each operand has them: side by side in
// the last dimension and aligned (that of the first one says the caller), or broadcast along it.
// The last dimension is whole vectors; a single one may leave elements over.
template <int N>
[[gnu::noinline]] bool go_by_vectors(Walk<N>& walk, int length, const bool (&first_is_aligned)[N]) {
  const int last = walk.ndim - 1;
  if (last < 0 || walk.shape[last] < length || (last > 0 && walk.shape[last] % length != 0))
    return false;
  for (int o = 0; o < N; ++o) {
    if (walk.broadcasts(o)) continue;
    if (!first_is_aligned[o] || walk.strides[o][last] != 1) return false;
    for (int d = 0; d < last; ++d)
      if (walk.strides[o][d] % length != 0) return false;
  }
  walk.shape[last] /= length;
  for (int o = 0; o < N; ++o) walk.strides[o][last] *= length;
  if (!walk.wide) walk.divisor[last] = FastDivisor(uint32_t(walk.shape[last]));
  return true;
}

// --- reductions ----------------------------------------------------------------------------------

// Combines the values of the `Lanes` neighbouring threads (32: a warp; more: the whole block of
// that many threads) and gives the result to each. `combine` must be commutative; the order is
// fixed, so results repeat bit by bit. With more than 32 lanes it has barriers: every thread of the
// block must come here.
template <int Lanes, class T, class Combine>
__device__ T reduce_lanes(T value, Combine combine) {
  static_assert(Lanes % kWarp == 0, "whole warps");
  for (int step = kWarp / 2; step > 0; step /= 2) value = combine(value, value.shuffle_xor(step));
  if constexpr (Lanes > kWarp) {
    NEEDLE_SHARED(T, partial, Lanes / kWarp);
    __syncthreads();  // the buffer may still be read from the reduction before
    if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = value;
    __syncthreads();
    value = partial[0];
    for (int w = 1; w < Lanes / kWarp; ++w) value = combine(value, partial[w]);
  }
  return value;
}

// Values that reduce_lanes can exchange.
template <class A>
struct Sum {
  A value;
  __device__ Sum shuffle_xor(int step) const { return {__shfl_xor_sync(kAllLanes, value, step)}; }
};
template <class A>
struct TwoSums {
  A first, second;
  __device__ TwoSums shuffle_xor(int step) const {
    return {__shfl_xor_sync(kAllLanes, first, step), __shfl_xor_sync(kAllLanes, second, step)};
  }
};

struct AddSums {
  template <class A>
  __device__ Sum<A> operator()(Sum<A> a, Sum<A> b) const {
    return {a.value + b.value};
  }
  template <class A>
  __device__ TwoSums<A> operator()(TwoSums<A> a, TwoSums<A> b) const {
    return {a.first + b.first, a.second + b.second};
  }
};

template <int Lanes, class A>
__device__ A sum_lanes(A value) {
  return reduce_lanes<Lanes>(Sum<A>{value}, AddSums{}).value;
}

// Rows are handled by a warp each when they are short and by a block each when they are long.
// f(Int<Lanes>).
template <int Value>
using Int = std::integral_constant<int, Value>;
template <class F>
void dispatch_row_lanes(int64_t cols, F&& f) {
  if (cols <= 1024) return f(Int<kWarp>{});
  f(Int<kBlock>{});
}
inline LaunchConfig rows_config(int64_t rows, int lanes) {
  return grid_of(blocks_for(ceil_div(rows, kBlock / lanes)));
}
// for (row = first_row<Lanes>(); row < rows; row += row_step<Lanes>()): uniform over a block when
// Lanes is kBlock.
template <int Lanes>
__device__ int64_t first_row() {
  return int64_t(blockIdx.x) * (kBlock / Lanes) + threadIdx.x / Lanes;
}
template <int Lanes>
__device__ int64_t row_step() {
  return int64_t(gridDim.x) * (kBlock / Lanes);
}
// use(c, load(c)) for the columns that this thread has of a row.
template <int Lanes, class Load, class Use>
__device__ void for_columns(int64_t cols, Load load, Use use) {
  in_groups(threadIdx.x % Lanes, Lanes, cols, load, use);
}

}  // namespace needle::NEEDLE_DEVICE
