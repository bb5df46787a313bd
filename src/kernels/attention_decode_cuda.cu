// Attention of one new position per sequence to the keys and values before it: a block of threads
// for each (batch, head).
//
// The block first puts its own k and v into the caches, then walks the key blocks that the layout
// names with a running maximum and sum: a warp takes one key at a time for the scores, a thread one
// or two features of the values.
#include "../common/cuda_util.cuh"
#include "../common/ewise_math_cuda.h"

namespace needle::NEEDLE_DEVICE {
namespace {

constexpr int kThreads = 128, kMaxHead = 256, kMaxBlock = 128;

template <class T>
struct DecodeArguments {
  using A = accum_t<T>;
  const T *q, *k, *v;
  int64_t q_b, q_h, k_b, k_h, v_b, v_h;  // strides
  T *keys, *values, *out;
  const int32_t *positions, *row_ptr, *col_idx;
  int64_t B, H, S, D, layout_heads, block;
  A scale;
};

template <class T>
__global__ void __launch_bounds__(kThreads)
    attention_decode_kernel(DecodeArguments<T> g, ErrorFlag* flag) {
  using A = accum_t<T>;
  constexpr int kFeatures = kMaxHead / kThreads;  // of a thread
  NEEDLE_SHARED(A, q, kMaxHead);
  NEEDLE_SHARED(A, scores, kMaxBlock);
  const int thread = int(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
  const int64_t lines = ceil_div(g.S, g.block);
  for (int64_t head = blockIdx.x; head < g.B * g.H; head += gridDim.x) {
    const int64_t b = head / g.H, h = head % g.H, position = g.positions[b];
    T* const out = g.out + head * g.D;
    if (position < 0 || position >= g.S) {
      if (thread == 0) report_bad_id(flag, BadId::attention_decode, position, b, g.S);
      for (int64_t d = thread; d < g.D; d += kThreads) out[d] = T(float(NAN));
      continue;
    }
    T* const keys = g.keys + head * g.S * g.D;
    T* const values = g.values + head * g.S * g.D;
    __syncthreads();  // q is read to the end by the head before
    for (int64_t d = thread; d < g.D; d += kThreads) {
      q[d] = A(g.q[b * g.q_b + h * g.q_h + d]) * g.scale;
      keys[position * g.D + d] = g.k[b * g.k_b + h * g.k_h + d];
      values[position * g.D + d] = g.v[b * g.v_b + h * g.v_h + d];
    }
    A sums[kFeatures] = {}, max = A(-INFINITY), total = A(0);
    const int32_t* const line = g.row_ptr + h % g.layout_heads * lines + position / g.block;
    for (int64_t e = line[0]; e < line[1]; ++e) {
      const int64_t first = g.col_idx[e] * g.block;
      const int64_t left = position + 1 - first;
      const int n = int(left < g.block ? left : g.block);
      if (n <= 0) break;
      __syncthreads();  // the scores before are read; at first, q and the new rows are there
      for (int j = warp; j < n; j += kThreads / kWarp) {
        const T* const key = keys + (first + j) * g.D;
        A dot = 0;
        for (int64_t d = lane; d < g.D; d += kWarp) dot += q[d] * A(key[d]);
        dot = sum_lanes<kWarp>(dot);
        if (lane == 0) scores[j] = dot;
      }
      __syncthreads();
      A largest = max;
      for (int j = 0; j < n; ++j) largest = scores[j] > largest ? scores[j] : largest;
      const A decay = m_exp(max - largest);
      max = largest;
      total *= decay;
      for (int i = 0; i < kFeatures; ++i) sums[i] *= decay;
      for (int j = 0; j < n; ++j) {
        const A p = m_exp(scores[j] - max);
        total += p;
        for (int i = 0; i < kFeatures; ++i)
          if (thread + i * kThreads < g.D)
            sums[i] += p * A(values[(first + j) * g.D + thread + i * kThreads]);
      }
    }
    for (int i = 0; i < kFeatures; ++i)
      if (thread + i * kThreads < g.D)
        out[thread + i * kThreads] = T(total == A(0) ? A(0) : sums[i] / total);
  }
}

}  // namespace

void attention_decode(const Array& q, const Dims& q_strides, const Array& k, const Dims& k_strides,
                      const Array& v, const Dims& v_strides, const Array& key_cache,
                      const Array& value_cache, const Array& positions, const Array& out,
                      const Array& row_ptr, const Array& col_idx, int64_t B, int64_t H, int64_t S,
                      int64_t D, int64_t layout_heads, int64_t block, double scale) {
  if (D > kMaxHead || block < 1 || block > kMaxBlock)
    throw std::invalid_argument("[attention_decode] head size " + std::to_string(D) + ", block " +
                                std::to_string(block) + " (at most " + std::to_string(kMaxHead) +
                                " and " + std::to_string(kMaxBlock) + ")");
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
    launch<attention_decode_kernel<E>>(grid_of(blocks_for(B * H), kThreads), g, error_flag());
  });
}

}  // namespace needle::NEEDLE_DEVICE
