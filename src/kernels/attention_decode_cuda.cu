// Attention of one new position per sequence to the keys and values before it.
//
// The keys that the layout names for a position are cut into parts, a block of threads each, so
// that a single sequence keeps all multiprocessors busy (Dao et al. 2023, "Flash-Decoding"). A warp
// takes kAtOnce keys at a time, features lying among its lanes, with a running maximum and sum of
// its own. A block merges what its warps found, a second kernel what the parts of a head did. The
// cut depends on shapes alone, so results repeat bit by bit.
#include "../common/cuda_util.cuh"
#include "../common/ewise_math_cuda.h"

namespace needle::NEEDLE_DEVICE {
namespace {

constexpr int kWarps = 4, kThreads = kWarps * kWarp;
constexpr int kAtOnce = 4;  // keys whose rows a warp has under way
constexpr int64_t kPartKeys =
    128;  // of a part, where the scratch memory has room for so many parts

template <class T>
struct DecodeArguments {
  using A = accum_t<T>;
  const T *q, *k, *v;
  int64_t q_b, q_h, k_b, k_h, v_b, v_h;  // strides
  T *keys, *values, *out;
  const int32_t *positions, *row_ptr, *col_idx;
  int64_t B, H, S, D, layout_heads, block;
  int64_t parts, part_entries;  // of a head; key blocks of the layout in a part
  A* partial;                   // (B, H, parts) records, where there are several
  A scale;
};

// What a stretch of keys comes to, a record of D + 2 numbers: the values' sum weighted by exp(score
// - maximum), the maximum, and the sum of the weights.
template <class A>
struct Merged {
  A sum, max, total;  // of one feature, and of all
};
template <class A>
__device__ Merged<A> merge_records(const A* records, int64_t n, int64_t D, int64_t d) {
  Merged<A> all{A(0), A(-INFINITY), A(0)};
  for (int64_t i = 0; i < n; ++i) {
    const A max = records[i * (D + 2) + D];
    all.max = max > all.max ? max : all.max;
  }
  const A shift = all.max == A(-INFINITY) ? A(0) : all.max;  // no key anywhere
  for (int64_t i = 0; i < n; ++i) {
    const A weight = m_exp(records[i * (D + 2) + D] - shift);
    all.sum += weight * records[i * (D + 2) + d];
    all.total += weight * records[i * (D + 2) + D + 1];
  }
  return all;
}
template <class T, class A>
__device__ T mean_of(const Merged<A>& all) {
  return T(all.total == A(0) ? A(0) : all.sum / all.total);
}

// Lane l of a warp holds the features l + 32 i, i < Features.
template <class T, int Features>
__global__ void __launch_bounds__(kThreads)
    attention_decode_kernel(DecodeArguments<T> g, ErrorFlag* flag) {
  using A = accum_t<T>;
  NEEDLE_SHARED(A, records, kWarps * (Features * kWarp + 2));
  const int thread = int(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
  const int D = int(g.D), block = int(g.block);
  for (int64_t t = blockIdx.x; t < g.B * g.H * g.parts; t += gridDim.x) {
    const int64_t head = t / g.parts, part = t % g.parts;
    const int64_t b = head / g.H, h = head % g.H, position = g.positions[b];
    const bool inside = position >= 0 && position < g.S;
    const T *new_key = g.k + b * g.k_b + h * g.k_h, *new_value = g.v + b * g.v_b + h * g.v_h;
    T *const keys = g.keys + head * g.S * D, *const values = g.values + head * g.S * D;
    int64_t entry = 0;
    int count = 0;  // of the part's keys, of which the last block may have fewer
    if (inside) {
      const int32_t* const line =
          g.row_ptr + h % g.layout_heads * ceil_div(g.S, g.block) + position / block;
      entry = line[0] + part * g.part_entries;
      const int64_t end = min(int64_t(line[1]), entry + g.part_entries);
      if (entry < end)
        count = int(end - 1 - entry) * block +
                int(min(g.block, position + 1 - g.col_idx[end - 1] * g.block));
    }
    if (part == 0) {  // others do not read these rows of the caches, which may not be there yet
      if (!inside && thread == 0) report_bad_id(flag, BadId::attention_decode, position, b, g.S);
      for (int d = thread; d < D && inside; d += kThreads) {
        keys[position * D + d] = new_key[d];
        values[position * D + d] = new_value[d];
      }
    }
    A q[Features], sums[Features] = {}, top = A(-INFINITY), total = inside ? A(0) : A(NAN);
#pragma unroll
    for (int i = 0; i < Features; ++i) {
      const int d = lane + i * kWarp;
      q[i] = d < D ? A(g.q[b * g.q_b + h * g.q_h + d]) * g.scale : A(0);
    }
    for (int first = warp * kAtOnce; first < count; first += kWarps * kAtOnce) {
      A scores[kAtOnce], value[kAtOnce][Features];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const bool there = first + j < count;
        const int n = there ? first + j : first;
        const int64_t row = g.col_idx[entry + n / block] * g.block + n % block;
        const T* const from_key = row == position ? new_key : keys + row * D;
        const T* const from_value = row == position ? new_value : values + row * D;
        scores[j] = A(0);
#pragma unroll
        for (int i = 0; i < Features; ++i) {
          const int d = lane + i * kWarp;
          scores[j] += d < D ? q[i] * A(from_key[d]) : A(0);
          value[j][i] = there && d < D ? A(from_value[d]) : A(0);
        }
      }
      A largest = top;
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        scores[j] = sum_lanes<kWarp>(scores[j]);
        if (first + j >= count) scores[j] = A(-INFINITY);
        largest = scores[j] > largest ? scores[j] : largest;
      }
      const A shift = largest == A(-INFINITY) ? A(0) : largest;  // no weight yet
      const A decay = m_exp(top - shift);
      top = largest;
      total *= decay;
#pragma unroll
      for (int i = 0; i < Features; ++i) sums[i] *= decay;
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const A p = m_exp(scores[j] - shift);
        total += p;
#pragma unroll
        for (int i = 0; i < Features; ++i) sums[i] += p * value[j][i];
      }
    }
    __syncthreads();  // the records of the part before are read
    A* const mine = records + warp * (D + 2);
#pragma unroll
    for (int i = 0; i < Features; ++i)
      if (lane + i * kWarp < D) mine[lane + i * kWarp] = sums[i];
    if (lane == 0) {
      mine[D] = top;
      mine[D + 1] = total;
    }
    __syncthreads();
    for (int d = thread; d < D; d += kThreads) {
      const Merged<A> all = merge_records(records, kWarps, D, d);
      if (g.parts == 1) {
        g.out[head * D + d] = mean_of<T>(all);
        continue;
      }
      A* const record = g.partial + t * (D + 2);
      record[d] = all.sum;
      if (d == 0) {
        record[D] = all.max;
        record[D + 1] = all.total;
      }
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) attention_decode_merge_kernel(DecodeArguments<T> g) {
  for (int64_t head = blockIdx.x; head < g.B * g.H; head += gridDim.x)
    for (int64_t d = threadIdx.x; d < g.D; d += kThreads)
      g.out[head * g.D + d] =
          mean_of<T>(merge_records(g.partial + head * g.parts * (g.D + 2), g.parts, g.D, d));
}

// f(Int<features of a lane>).
template <class F>
void dispatch_features(int64_t D, F&& f) {
  if (D <= 2 * kWarp) return f(Int<2>{});
  if (D <= 4 * kWarp) return f(Int<4>{});
  if (D <= 8 * kWarp) return f(Int<8>{});
  throw std::invalid_argument("[attention_decode] head size " + std::to_string(D) + " (at most " +
                              std::to_string(kMaxHead) + ")");
}

}  // namespace

void attention_decode(const Array& q, const Dims& q_strides, const Array& k, const Dims& k_strides,
                      const Array& v, const Dims& v_strides, const Array& key_cache,
                      const Array& value_cache, const Array& positions, const Array& out,
                      const Array& row_ptr, const Array& col_idx, int64_t B, int64_t H, int64_t S,
                      int64_t D, int64_t layout_heads, int64_t block, double scale) {
  if (B * H * D == 0) return;
  dispatch_float(q.dtype(), "attention_decode", [&](auto tag) {
    using E = typename decltype(tag)::type;
    DecodeArguments<E> g{};
    g.q = q.data<E>(), g.k = k.data<E>(), g.v = v.data<E>();
    g.q_b = q_strides[0], g.q_h = q_strides[1], g.k_b = k_strides[0], g.k_h = k_strides[1];
    g.v_b = v_strides[0], g.v_h = v_strides[1];
    g.keys = key_cache.data<E>(), g.values = value_cache.data<E>(), g.out = out.data<E>();
    g.positions = positions.data<int32_t>();
    g.row_ptr = row_ptr.data<int32_t>(), g.col_idx = col_idx.data<int32_t>();
    g.B = B, g.H = H, g.S = S, g.D = D, g.layout_heads = layout_heads, g.block = block;
    g.scale = accum_t<E>(scale);

    const int64_t record_bytes = (D + 2) * int64_t(sizeof(accum_t<E>));
    const int64_t most = std::max<int64_t>(kScratchBytes / (B * H * record_bytes), 1);
    const int64_t entries = ceil_div(S, block);  // of a line, at most
    g.part_entries = std::max(ceil_div(kPartKeys, block), ceil_div(entries, most));
    g.parts = ceil_div(entries, g.part_entries);
    const Scratch held = g.parts > 1 ? scratch(B * H * g.parts * record_bytes) : Scratch{};
    g.partial = static_cast<accum_t<E>*>(held.memory);
    dispatch_features(D, [&](auto features) {
      constexpr auto kKernel = attention_decode_kernel<E, decltype(features)::value>;
      launch<kKernel>(grid_of(blocks_for(B * H * g.parts), kThreads), g, error_flag());
    });
    if (g.parts > 1)
      launch<attention_decode_merge_kernel<E>>(grid_of(blocks_for(B * H), kThreads), g);
  });
}

}  // namespace needle::NEEDLE_DEVICE
