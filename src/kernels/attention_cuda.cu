// Attention over a block layout on a GPU: softmax(scale q k^T + mask) v without a T x S array.
//
// Forward (Dao et al. 2022, arXiv:2205.14135): a block of threads owns Rows queries of one query
// block and walks the key blocks that the layout names, Cols keys at a time, with a running maximum
// and sum; it keeps out and one lse per row. Backward recomputes p = exp(scale q k^T - lse) and,
// with dp = dout v^T and delta = sum(dout out),
//   ds = scale p (dp - delta),  dq = ds k  (walking the rows of the layout),
//   dv = p^T dout,  dk = ds^T q  (walking its columns, by the transposed index).
// Nothing is added from two blocks of threads, so results repeat bit by bit. Accumulates in float32
// (float64). attention_mma_cuda.cuh does the same for 16-bit floats on tensor cores.
#include "../common/ewise_math_cuda.h"
#include "attention_cuda.cuh"

namespace needle::NEEDLE_DEVICE {
namespace {

// 256 threads as 16 x 16: thread (y, x) holds the elements (y + 16 i, x + 16 j) of a tile.
constexpr int kSide = 16;
__device__ inline int thread_y() { return int(threadIdx.x) / kSide; }
__device__ inline int thread_x() { return int(threadIdx.x) % kSide; }

// Shared memory is read 16 bytes at a time, in fewer instructions: kAtOnce elements that lie side
// by side. A row of a tile takes kAtOnce more than it has, to spread the banks.
template <class A>
constexpr int kAtOnce = 16 / int(sizeof(A));
template <class A>
__device__ Vec<A, kAtOnce<A>> read(const A* from) {
  return *reinterpret_cast<const Vec<A, kAtOnce<A>>*>(from);
}
// The column of a result that this thread's sum j stands for: neighbours in groups of kAtOnce.
template <class A>
__device__ int column_of_sum(int j) {
  constexpr int kGroup = kAtOnce<A>;
  return j / kGroup * (kSide * kGroup) + thread_x() * kGroup + j % kGroup;
}

// A thread's sums of a row of a result, to memory.
template <int J, class T, class A>
__device__ void write_row(T* row, const A (&sums)[J], int64_t D) {
#pragma unroll
  for (int j = 0; j < J; j += kAtOnce<A>) {
    A run[kAtOnce<A>];
#pragma unroll
    for (int k = 0; k < kAtOnce<A>; ++k) run[k] = sums[j + k];
    store_run(row + column_of_sum<A>(j), run, D - column_of_sum<A>(j));
  }
}

// Rows x depth elements to shared memory, zeros past `rows`.
template <int Rows, int Pitch, class T, class A>
__device__ void load_tile(A* tile, const HeadsRef<const T>& from, int64_t b, int64_t h,
                          int64_t row0, int64_t rows, int64_t D) {
  const T* source = from.row(b, h, row0);
  for (int r = int(threadIdx.x) / kWarp; r < Rows; r += kBlock / kWarp)
    for (int d = int(threadIdx.x) % kWarp; d < D; d += kWarp)
      tile[r * Pitch + d] = r < rows ? A(source[r * from.stride_row + d]) : A(0);
}

// sums[i][j] = rows (y + 16 i) of x times rows (x + 16 j) of y, over D and the zeros after it.
template <int I, int J, int Pitch, class A>
__device__ void multiply_rows(const A* x, const A* y, int64_t D, A (&sums)[I][J]) {
  constexpr int N = kAtOnce<A>;
  for (int i = 0; i < I; ++i)
    for (int j = 0; j < J; ++j) sums[i][j] = A(0);
  for (int d = 0; d < D; d += N) {
    Vec<A, N> a[I], b[J];
#pragma unroll
    for (int i = 0; i < I; ++i) a[i] = read(x + (thread_y() + kSide * i) * Pitch + d);
#pragma unroll
    for (int j = 0; j < J; ++j) b[j] = read(y + (thread_x() + kSide * j) * Pitch + d);
#pragma unroll
    for (int e = 0; e < N; ++e)
#pragma unroll
      for (int i = 0; i < I; ++i)
#pragma unroll
        for (int j = 0; j < J; ++j) sums[i][j] += a[i].v[e] * b[j].v[e];
  }
}

// sums[i][j] += sum over n < N of weights(row y + 16 i, n) values(n, column_of_sum(j)). weights(r,
// n) lies at r * Pitch + n, or, when Turned, at n * Pitch + r.
template <int N, bool Turned, int WeightPitch, int Pitch, int I, int J, class A>
__device__ void multiply_add(const A* weights, const A* values, A (&sums)[I][J]) {
  constexpr int kGroup = kAtOnce<A>;
  static_assert(N % kGroup == 0 && J % kGroup == 0, "whole vectors");
  for (int n = 0; n < N; n += kGroup) {
    Vec<A, kGroup> a[I];
#pragma unroll
    for (int i = 0; i < I; ++i) {
      const int row = thread_y() + kSide * i;
      if constexpr (!Turned) a[i] = read(weights + row * WeightPitch + n);
#pragma unroll
      for (int e = 0; e < kGroup && Turned; ++e) a[i].v[e] = weights[(n + e) * WeightPitch + row];
    }
#pragma unroll
    for (int e = 0; e < kGroup; ++e)
#pragma unroll
      for (int j = 0; j < J; j += kGroup) {
        const auto b = read(values + (n + e) * Pitch + column_of_sum<A>(j));
#pragma unroll
        for (int i = 0; i < I; ++i)
#pragma unroll
          for (int k = 0; k < kGroup; ++k) sums[i][j + k] += a[i].v[e] * b.v[k];
      }
  }
}

// Zeroes the columns D .. DMax of a tile once; load_tile never writes there, the products read
// there.
template <int Rows, int DMax, int Pitch, class A>
__device__ void clear_tail(A* tile, int64_t D) {
  const int tail = DMax - int(D);
  for (int i = int(threadIdx.x); i < Rows * tail; i += kBlock)
    tile[i / tail * Pitch + int(D) + i % tail] = A(0);
}

template <class T, int DMax, int Rows, int Cols>
struct ForwardShape {
  using A = accum_t<T>;
  static constexpr int kPitch = DMax + kAtOnce<A>, kWeightPitch = Cols + kAtOnce<A>;
  static constexpr int kSharedBytes =
      int(sizeof(A)) * (Rows * kPitch + Cols * kPitch + Rows * kWeightPitch);
};

template <class T, int DMax, int Rows, int Cols>
__global__ void __launch_bounds__(kBlock) attention_forward_kernel(AttentionArguments<T> g) {
  using A = accum_t<T>;
  using Shape = ForwardShape<T, DMax, Rows, Cols>;
  constexpr int I = Rows / kSide, J = Cols / kSide, DJ = DMax / kSide;
  NEEDLE_DYNAMIC_SHARED(A, shared);
  A* const q_tile = shared;
  A* const kv_tile = q_tile + Rows * Shape::kPitch;
  A* const weights = kv_tile + Cols * Shape::kPitch;
  const Layout& layout = g.layout;
  clear_tail<Rows, DMax, Shape::kPitch>(q_tile, g.D);
  clear_tail<Cols, DMax, Shape::kPitch>(kv_tile, g.D);

  for (int64_t t = blockIdx.x; t < tiles_of(g, g.queries, Rows); t += gridDim.x) {
    const auto [b, h, at, rows] = lines_of_tile(g, g.queries, Rows, t);
    if (rows.count <= 0) continue;
    __syncthreads();  // the tile before is read to the end
    load_tile<Rows, Shape::kPitch>(q_tile, g.q, b, h, rows.first, rows.count, g.D);
    A top[I], total[I], sums[I][DJ];  // total: this thread's share of the row's sum
    for (int i = 0; i < I; ++i) {
      top[i] = A(-INFINITY);
      total[i] = A(0);
      for (int j = 0; j < DJ; ++j) sums[i][j] = A(0);
    }
    for (int64_t e = layout.ptr[at]; e < layout.ptr[at + 1]; ++e) {
      const bool masked = layout.partial[e] != 0;
      for (int64_t c0 = 0; c0 < layout.block; c0 += Cols) {
        const Span cols = span_of(layout.idx[e], c0, Cols, layout.block, g.keys);
        if (apart(g, rows, cols, masked)) break;
        __syncthreads();
        load_tile<Cols, Shape::kPitch>(kv_tile, g.k, b, h, cols.first, cols.count, g.D);
        __syncthreads();
        A s[I][J];
        multiply_rows<I, J, Shape::kPitch>(q_tile, kv_tile, g.D, s);
#pragma unroll
        for (int i = 0; i < I; ++i) {
          const int64_t query = rows.first + thread_y() + kSide * i;
          A largest = top[i];
#pragma unroll
          for (int j = 0; j < J; ++j) {
            const int col = thread_x() + kSide * j;
            const bool seen = col < cols.count && !(masked && cols.first + col > g.q_start + query);
            s[i][j] = seen ? s[i][j] * g.scale : A(-INFINITY);
            largest = s[i][j] > largest ? s[i][j] : largest;
          }
          for (int step = kSide / 2; step > 0; step /= 2) {
            const A other = __shfl_xor_sync(kAllLanes, largest, step);
            largest = other > largest ? other : largest;
          }
          // While nothing is seen the maximum is -inf: shift by 0, so that every weight is
          // exp(-inf) = 0.
          const A shift = largest == A(-INFINITY) ? A(0) : largest;
          const A shrink = m_exp(top[i] - shift);
          top[i] = largest;
          total[i] *= shrink;
#pragma unroll
          for (int j = 0; j < J; ++j) {
            const A p = m_exp(s[i][j] - shift);
            total[i] += p;
            weights[(thread_y() + kSide * i) * Shape::kWeightPitch + thread_x() + kSide * j] = p;
          }
#pragma unroll
          for (int j = 0; j < DJ; ++j) sums[i][j] *= shrink;
        }
        __syncthreads();  // k is read, the weights are written
        load_tile<Cols, Shape::kPitch>(kv_tile, g.v, b, h, cols.first, cols.count, g.D);
        __syncthreads();
        multiply_add<Cols, false, Shape::kWeightPitch, Shape::kPitch>(weights, kv_tile, sums);
      }
    }
#pragma unroll
    for (int i = 0; i < I; ++i) {
      for (int step = kSide / 2; step > 0; step /= 2)
        total[i] += __shfl_xor_sync(kAllLanes, total[i], step);
      const int row = thread_y() + kSide * i;
      if (row >= rows.count) continue;
      T* out = g.out.row(b, h, rows.first + row);
      for (int j = 0; j < DJ; ++j) sums[i][j] = total[i] == A(0) ? A(0) : sums[i][j] / total[i];
      write_row(out, sums[i], g.D);
      if (thread_x() == 0)
        g.lse[(b * g.H + h) * g.queries + rows.first + row] =
            total[i] == A(0) ? A(-INFINITY) : top[i] + m_log(total[i]);
    }
  }
}

// --- backward ------------------------------------------------------------------------------------

template <class T>
__global__ void attention_delta_kernel(AttentionArguments<T> g) {
  using A = accum_t<T>;
  for (int64_t head = blockIdx.y; head < g.B * g.H; head += gridDim.y) {
    const int64_t b = head / g.H, h = head % g.H;
    const T *const first_dout = g.dout.row(b, h, 0), *const first_out = g.out.row(b, h, 0);
    for (int64_t row = first_row<kWarp>(); row < g.queries; row += row_step<kWarp>()) {
      const T* dout = first_dout + row * g.dout.stride_row;
      const T* out = first_out + row * g.out.stride_row;
      A dot = 0;
      for (int64_t d = threadIdx.x % kWarp; d < g.D; d += kWarp) dot += A(dout[d]) * A(out[d]);
      dot = sum_lanes<kWarp>(dot);
      if (threadIdx.x % kWarp == 0) g.delta[head * g.queries + row] = dot;
    }
  }
}

template <class T, int DMax, int Rows, int Cols>
struct BackwardShape {
  using A = accum_t<T>;
  static constexpr int kPitch = DMax + kAtOnce<A>, kWeightPitch = Cols + kAtOnce<A>;
  static constexpr int kSharedBytes =
      int(sizeof(A)) * (2 * (Rows + Cols) * kPitch + 2 * Rows * kWeightPitch + 2 * Rows);
};

// The tiles of one (queries, keys) pair in shared memory, and what both gradient passes compute
// from them.
template <class T, int DMax, int Rows, int Cols>
struct BackwardTiles {
  using A = accum_t<T>;
  using Shape = BackwardShape<T, DMax, Rows, Cols>;
  static constexpr int I = Rows / kSide, J = Cols / kSide;
  A *q, *dout, *k, *v, *p, *ds, *lse, *delta;

  __device__ explicit BackwardTiles(A* shared) {
    q = shared;
    dout = q + Rows * Shape::kPitch;
    k = dout + Rows * Shape::kPitch;
    v = k + Cols * Shape::kPitch;
    p = v + Cols * Shape::kPitch;
    ds = p + Rows * Shape::kWeightPitch;
    lse = ds + Rows * Shape::kWeightPitch;
    delta = lse + Rows;
  }

  __device__ void clear_tails(int64_t D) {
    clear_tail<Rows, DMax, Shape::kPitch>(q, D);
    clear_tail<Rows, DMax, Shape::kPitch>(dout, D);
    clear_tail<Cols, DMax, Shape::kPitch>(k, D);
    clear_tail<Cols, DMax, Shape::kPitch>(v, D);
  }

  __device__ void load_queries(const AttentionArguments<T>& g, int64_t b, int64_t h, Span rows) {
    load_tile<Rows, Shape::kPitch>(q, g.q, b, h, rows.first, rows.count, g.D);
    load_tile<Rows, Shape::kPitch>(dout, g.dout, b, h, rows.first, rows.count, g.D);
    for (int r = int(threadIdx.x); r < Rows; r += kBlock) {
      const int64_t at = (b * g.H + h) * g.queries + rows.first + r;
      lse[r] = r < rows.count ? g.lse[at] : A(-INFINITY);
      delta[r] = r < rows.count ? g.delta[at] : A(0);
    }
  }

  __device__ void load_keys(const AttentionArguments<T>& g, int64_t b, int64_t h, Span cols) {
    load_tile<Cols, Shape::kPitch>(k, g.k, b, h, cols.first, cols.count, g.D);
    load_tile<Cols, Shape::kPitch>(v, g.v, b, h, cols.first, cols.count, g.D);
  }

  __device__ void weights(const AttentionArguments<T>& g, Span rows, Span cols, bool masked) {
    A s[I][J], dp[I][J];
    multiply_rows<I, J, Shape::kPitch>(q, k, g.D, s);
    multiply_rows<I, J, Shape::kPitch>(dout, v, g.D, dp);
    for (int i = 0; i < I; ++i) {
      const int row = thread_y() + kSide * i;
      for (int j = 0; j < J; ++j) {
        const int col = thread_x() + kSide * j;
        const bool seen = lse[row] != A(-INFINITY) && col < cols.count &&
                          !(masked && cols.first + col > g.q_start + rows.first + row);
        const A weight = seen ? m_exp(s[i][j] * g.scale - lse[row]) : A(0);
        p[row * Shape::kWeightPitch + col] = weight;
        ds[row * Shape::kWeightPitch + col] =
            seen ? weight * (dp[i][j] - delta[row]) * g.scale : A(0);
      }
    }
  }
};

template <int Lines, int DJ, class T, class A>
__device__ void write_tile(const HeadsRef<T>& to, int64_t b, int64_t h, Span lines, int64_t D,
                           A (&sums)[Lines][DJ]) {
  for (int i = 0; i < Lines; ++i) {
    const int line = thread_y() + kSide * i;
    if (line >= lines.count) continue;
    T* out = to.row(b, h, lines.first + line);
    write_row(out, sums[i], D);
  }
}

template <class T, int DMax, int Rows, int Cols>
__global__ void __launch_bounds__(kBlock) attention_dq_kernel(AttentionArguments<T> g) {
  using A = accum_t<T>;
  using Tiles = BackwardTiles<T, DMax, Rows, Cols>;
  using Shape = BackwardShape<T, DMax, Rows, Cols>;
  constexpr int I = Rows / kSide, DJ = DMax / kSide;
  NEEDLE_DYNAMIC_SHARED(A, shared);
  Tiles tiles(shared);
  tiles.clear_tails(g.D);
  const Layout& layout = g.layout;
  for (int64_t t = blockIdx.x; t < tiles_of(g, g.queries, Rows); t += gridDim.x) {
    const auto [b, h, at, rows] = lines_of_tile(g, g.queries, Rows, t);
    if (rows.count <= 0) continue;
    __syncthreads();
    tiles.load_queries(g, b, h, rows);
    A dq[I][DJ];
    for (int i = 0; i < I; ++i)
      for (int j = 0; j < DJ; ++j) dq[i][j] = A(0);
    for (int64_t e = layout.ptr[at]; e < layout.ptr[at + 1]; ++e) {
      const bool masked = layout.partial[e] != 0;
      for (int64_t c0 = 0; c0 < layout.block; c0 += Cols) {
        const Span cols = span_of(layout.idx[e], c0, Cols, layout.block, g.keys);
        if (apart(g, rows, cols, masked)) break;
        __syncthreads();
        tiles.load_keys(g, b, h, cols);
        __syncthreads();
        tiles.weights(g, rows, cols, masked);
        __syncthreads();
        multiply_add<Cols, false, Shape::kWeightPitch, Shape::kPitch>(tiles.ds, tiles.k, dq);
      }
    }
    write_tile(g.dq, b, h, rows, g.D, dq);
  }
}

template <class T, int DMax, int Rows, int Cols>
__global__ void __launch_bounds__(kBlock) attention_dkdv_kernel(AttentionArguments<T> g) {
  using A = accum_t<T>;
  using Tiles = BackwardTiles<T, DMax, Rows, Cols>;
  using Shape = BackwardShape<T, DMax, Rows, Cols>;
  constexpr int J = Cols / kSide, DJ = DMax / kSide;
  NEEDLE_DYNAMIC_SHARED(A, shared);
  Tiles tiles(shared);
  tiles.clear_tails(g.D);
  const Layout& layout = g.layout;  // the transposed index: lines are key blocks
  for (int64_t t = blockIdx.x; t < tiles_of(g, g.keys, Cols); t += gridDim.x) {
    const auto [b, h, at, cols] = lines_of_tile(g, g.keys, Cols, t);
    if (cols.count <= 0) continue;
    __syncthreads();
    tiles.load_keys(g, b, h, cols);
    A dk[J][DJ], dv[J][DJ];
    for (int i = 0; i < J; ++i)
      for (int j = 0; j < DJ; ++j) dk[i][j] = dv[i][j] = A(0);
    for (int64_t e = layout.ptr[at]; e < layout.ptr[at + 1]; ++e) {
      const bool masked = layout.partial[e] != 0;
      for (int64_t r0 = 0; r0 < layout.block; r0 += Rows) {
        const Span rows = span_of(layout.idx[e], r0, Rows, layout.block, g.queries);
        if (apart(g, rows, cols, masked)) continue;
        __syncthreads();
        tiles.load_queries(g, b, h, rows);
        __syncthreads();
        tiles.weights(g, rows, cols, masked);
        __syncthreads();
        multiply_add<Rows, true, Shape::kWeightPitch, Shape::kPitch>(tiles.p, tiles.dout, dv);
        multiply_add<Rows, true, Shape::kWeightPitch, Shape::kPitch>(tiles.ds, tiles.q, dk);
      }
    }
    write_tile(g.dv, b, h, cols, g.D, dv);
    write_tile(g.dk, b, h, cols, g.D, dk);
  }
}

// --- launchers: tiles as large as 48 KB of shared memory allow, down to 16 x 16 ------------------

template <class F>
void dispatch_head_dim(int64_t D, F&& f) {
  if (D <= 64) return f(Int<64>{});
  if (D <= 128) return f(Int<128>{});
  if (D <= kMaxHead) return f(Int<kMaxHead>{});
  throw std::invalid_argument("[attention] head dimension " + std::to_string(D) +
                              " has no kernel on this device (up to " + std::to_string(kMaxHead) +
                              ")");
}

// Each on tensor cores where they can take it.
template <class T>
void forward(const AttentionArguments<T>& g) {
  if constexpr (sizeof(T) == 2) {
    if (fits_tensor_cores(g)) return attention_forward_mma(g);
  }
  dispatch_head_dim(g.D, [&](auto head_dim) {
    constexpr int kDMax = decltype(head_dim)::value, kRowBytes = kDMax * int(sizeof(accum_t<T>));
    constexpr int kRows = kRowBytes <= 256 ? 64 : kRowBytes <= 512 ? 32 : 16;
    constexpr int kCols = kRows < 32 ? 16 : 32;
    constexpr auto kKernel = attention_forward_kernel<T, kDMax, kRows, kCols>;
    constexpr int kShared = ForwardShape<T, kDMax, kRows, kCols>::kSharedBytes;
    launch<kKernel>(grid_with_shared<kKernel>(tiles_of(g, g.queries, kRows), kBlock, kShared), g);
  });
}

// f(Int<queries and keys of a tile>, Int<head dimension>).
template <class T, class F>
void dispatch_backward(int64_t D, F&& f) {
  dispatch_head_dim(D, [&](auto head_dim) {
    constexpr bool kSmall = decltype(head_dim)::value * sizeof(accum_t<T>) <= 256;
    f(Int<kSmall ? 32 : 16>{}, head_dim);
  });
}

template <class T>
void queries_backward(const AttentionArguments<T>& g) {
  if (g.queries == 0) return;
  LaunchConfig delta = rows_config(ceil_div(g.queries, 4), kWarp);  // a head is found for four
  delta.grid.y = blocks_for(g.B * g.H);
  launch<attention_delta_kernel<T>>(delta, g);
  if constexpr (sizeof(T) == 2) {
    if (fits_tensor_cores(g)) return attention_dq_mma(g);
  }
  dispatch_backward<T>(g.D, [&](auto size, auto head_dim) {
    constexpr int kSize = decltype(size)::value, kDMax = decltype(head_dim)::value;
    constexpr auto kKernel = attention_dq_kernel<T, kDMax, kSize, kSize>;
    constexpr int kShared = BackwardShape<T, kDMax, kSize, kSize>::kSharedBytes;
    launch<kKernel>(grid_with_shared<kKernel>(tiles_of(g, g.queries, kSize), kBlock, kShared), g);
  });
}

template <class T>
void keys_backward(const AttentionArguments<T>& g) {
  if (g.keys == 0) return;
  if constexpr (sizeof(T) == 2) {
    if (fits_tensor_cores(g)) return attention_dkdv_mma(g);
  }
  dispatch_backward<T>(g.D, [&](auto size, auto head_dim) {
    constexpr int kSize = decltype(size)::value, kDMax = decltype(head_dim)::value;
    constexpr auto kKernel = attention_dkdv_kernel<T, kDMax, kSize, kSize>;
    constexpr int kShared = BackwardShape<T, kDMax, kSize, kSize>::kSharedBytes;
    launch<kKernel>(grid_with_shared<kKernel>(tiles_of(g, g.keys, kSize), kBlock, kShared), g);
  });
}

template <class T>
AttentionArguments<T> common_arguments(const Array& row_ptr, const Array& col_idx,
                                       const Array& partial, int64_t B, int64_t H, int64_t queries,
                                       int64_t keys, int64_t D, int64_t heads, int64_t block,
                                       int64_t q_start, double scale) {
  AttentionArguments<T> g{};
  g.layout = {row_ptr.data<int32_t>(), col_idx.data<int32_t>(), partial.data<uint8_t>(), heads,
              block};
  g.B = B;
  g.H = H;
  g.queries = queries;
  g.keys = keys;
  g.D = D;
  g.q_start = q_start;
  g.scale = accum_t<T>(scale);
  return g;
}

}  // namespace

void attention_forward(const Array& q, const Dims& q_strides, const Array& k, const Dims& k_strides,
                       const Array& v, const Dims& v_strides, const Array& out,
                       const Dims& out_strides, const Array& lse, const Array& row_ptr,
                       const Array& col_idx, const Array& partial, int64_t B, int64_t H, int64_t T,
                       int64_t S, int64_t D, int64_t layout_heads, int64_t block, int64_t q_start,
                       double scale) {
  if (B * H * T == 0) return;
  dispatch_float(q.dtype(), "attention_forward", [&](auto tag) {
    using E = typename decltype(tag)::type;
    auto g = common_arguments<E>(row_ptr, col_idx, partial, B, H, T, S, D, layout_heads, block,
                                 q_start, scale);
    g.q = heads_ref<const E>(q, q_strides);
    g.k = heads_ref<const E>(k, k_strides);
    g.v = heads_ref<const E>(v, v_strides);
    g.out = heads_ref<E>(out, out_strides);
    g.lse = lse.data<accum_t<E>>();
    forward(g);
  });
}

void attention_backward(const Array& dout, const Dims& dout_strides, const Array& q,
                        const Dims& q_strides, const Array& k, const Dims& k_strides,
                        const Array& v, const Dims& v_strides, const Array& out,
                        const Dims& out_strides, const Array& lse, const Array& delta,
                        const Array& dq, const Dims& dq_strides, const Array& dk,
                        const Dims& dk_strides, const Array& dv, const Dims& dv_strides,
                        const Array& row_ptr, const Array& col_idx, const Array& partial,
                        const Array& col_ptr, const Array& row_idx, const Array& t_partial,
                        int64_t B, int64_t H, int64_t T, int64_t S, int64_t D, int64_t layout_heads,
                        int64_t block, int64_t q_start, double scale) {
  if (B * H == 0) return;
  dispatch_float(q.dtype(), "attention_backward", [&](auto tag) {
    using E = typename decltype(tag)::type;
    auto g = common_arguments<E>(row_ptr, col_idx, partial, B, H, T, S, D, layout_heads, block,
                                 q_start, scale);
    g.q = heads_ref<const E>(q, q_strides);
    g.k = heads_ref<const E>(k, k_strides);
    g.v = heads_ref<const E>(v, v_strides);
    g.dout = heads_ref<const E>(dout, dout_strides);
    g.out = heads_ref<E>(out, out_strides);
    g.dq = heads_ref<E>(dq, dq_strides);
    g.dk = heads_ref<E>(dk, dk_strides);
    g.dv = heads_ref<E>(dv, dv_strides);
    g.lse = lse.data<accum_t<E>>();
    g.delta = delta.data<accum_t<E>>();
    queries_backward(g);
    g.layout.ptr = col_ptr.data<int32_t>();
    g.layout.idx = row_idx.data<int32_t>();
    g.layout.partial = t_partial.data<uint8_t>();
    keys_backward(g);
  });
}

}  // namespace needle::NEEDLE_DEVICE
