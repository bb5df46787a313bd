// Attention (attention_cuda.cu) for 16-bit floats on tensor cores: compute capability 8.0 and
// later, rows aligned to 16 bytes, heads of up to 256.
//
// Every product is one of two. A warp owns 16 lines of its tile (queries; in dkdv, keys) and walks
// the other side kStep lines at a time: `dot` gives it the 16 x kStep products with those lines,
// and `add_weighted` adds their sum, weighted by what became of the products, to a result of 16 x
// D. The accumulators of the first lie among the lanes as the second wants its left operand, so the
// weights never leave the registers. Results and softmax are float32; the weights are rounded to
// the 16 bits of the operands, ds before the factor `scale`, which is near 1 / sqrt(D).
//
// The lines that a step reads arrive by cp.async while the step before is computed. kStep is 64
// lines of 64, 32 of 128, 16 of 256: two stages of two operands take 32 KB.
#include "../common/ewise_math_cuda.h"
#include "attention_cuda.cuh"
#include "tensor_core_cuda.cuh"

namespace needle::NEEDLE_DEVICE {
namespace {

constexpr int kMaxWarps = 4, kStages = 2, kWarpLines = 16;

__device__ inline int lines_of_block() { return int(blockDim.x) / kWarp * kWarpLines; }
__device__ inline int first_of_warp() { return int(threadIdx.x) / kWarp * kWarpLines; }

// Where element r of this lane's part of accumulator j stands (ptx.h).
__device__ inline int line_of(int r) { return int(threadIdx.x) % kWarp / 4 + r / 2 * 8; }
__device__ inline int column_of(int j, int r) { return 8 * j + int(threadIdx.x) % 4 * 2 + r % 2; }

template <int J>
__device__ void clear(float (&sums)[J][4]) {
#pragma unroll
  for (int j = 0; j < J; ++j)
#pragma unroll
    for (int r = 0; r < 4; ++r) sums[j][r] = 0.0f;
}

// products = lines first_of_warp() .. + 15 of `own` times all lines of `other`, over D elements.
template <class T, int DMax, int J>
__device__ void dot(const SwizzledTile<T, DMax>& own, const SwizzledTile<T, DMax>& other, int D,
                    float (&products)[J][4]) {
  clear(products);
#pragma unroll
  for (int d = 0; d < DMax; d += 16) {
    if (d >= D) continue;
    uint32_t a[4];
    own.template load_a<true>(a, first_of_warp(), d);
#pragma unroll
    for (int j = 0; j < J; j += 2) {
      uint32_t b[4];
      other.template load_b<true>(b, 8 * j, d);
      mma_pair<T>(products[j], products[j + 1], a, b);
    }
  }
}

// sums (16 x 8 DJ) += weights (16 x 8 J) times the 8 J lines of `values`, columns from first_d on.
template <class T, int DMax, int J, int DJ>
__device__ void add_weighted(const float (&weights)[J][4], const SwizzledTile<T, DMax>& values,
                             int first_d, int D, float (&sums)[DJ][4]) {
#pragma unroll
  for (int j = 0; j < J; j += 2) {
    uint32_t a[4];
#pragma unroll
    for (int half = 0; half < 4; ++half)
      a[half] = ptx::pack<T>(weights[j + half / 2][half % 2 * 2],
                             weights[j + half / 2][half % 2 * 2 + 1]);
#pragma unroll
    for (int d = 0; d < 8 * DJ; d += 16) {
      if (first_d + d >= D) continue;
      uint32_t b[4];
      values.template load_b<false>(b, first_d + d, 8 * j);
      mma_pair<T>(sums[d / 8], sums[d / 8 + 1], a, b);
    }
  }
}

// This warp's lines of a result, to memory: factor[0], factor[1] for the two lines of a lane.
template <class T, int DJ>
__device__ void write_lines(const HeadsRef<T>& to, const TileLines& tile, int first_d, int64_t D,
                            const float (&sums)[DJ][4], const float (&factor)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int line = first_of_warp() + line_of(2 * half);
    if (line >= tile.span.count) continue;
    T* const row = to.row(tile.b, tile.h, tile.span.first + line);
#pragma unroll
    for (int j = 0; j < DJ; ++j) {
      const float run[2] = {sums[j][2 * half] * factor[half], sums[j][2 * half + 1] * factor[half]};
      const int d = first_d + column_of(j, 0);
      store_run(row + d, run, D - d);
    }
  }
}

// The steps along a line of the layout: Size lines of one of its blocks at a time.
template <int Size>
struct Steps {
  const Layout& layout;
  int64_t extent;
  int first, pieces, count;

  __device__ Steps(const Layout& layout_, int64_t line, int64_t extent_)
      : layout(layout_),
        extent(extent_),
        first(layout_.ptr[line]),
        pieces(int(ceil_div(layout_.block, Size))),
        count((layout_.ptr[line + 1] - first) * pieces) {}
  __device__ bool masked(int s) const { return layout.partial[first + s / pieces] != 0; }
  __device__ Span span(int s) const {
    return span_of(layout.idx[first + s / pieces], s % pieces * Size, Size, layout.block, extent);
  }
};

template <class T, int DMax>
__device__ void copy_lines(const SwizzledTile<T, DMax>& tile, int tile_lines,
                           const HeadsRef<const T>& from, int64_t b, int64_t h, Span lines,
                           int64_t D) {
  tile.copy(tile_lines, int(blockDim.x), from.row(b, h, lines.first), from.stride_row,
            int(lines.count), int(D));
}

// --- forward ------------------------------------------------------------------------------------

template <class T, int DMax, int kStep>
__global__ void __launch_bounds__(kMaxWarps* kWarp)
    attention_forward_mma_kernel(AttentionArguments<T> g) {
  using Tile = SwizzledTile<T, DMax>;
  constexpr int J = kStep / 8, DJ = DMax / 8;
  NEEDLE_DYNAMIC_SHARED(T, shared);
  const int tile_lines = lines_of_block(), D = int(g.D);
  const Tile q{shared};
  const auto k_of = [&](int stage) {
    return Tile{shared + (tile_lines + 2 * stage * kStep) * DMax};
  };
  const auto v_of = [&](int stage) { return Tile{k_of(stage).data + kStep * DMax}; };

  for (int64_t t = blockIdx.x; t < tiles_of(g, g.queries, tile_lines); t += gridDim.x) {
    const TileLines tile = lines_of_tile(g, g.queries, tile_lines, t);
    const Span rows = tile.span;
    if (rows.count <= 0) continue;
    const Steps<kStep> steps(g.layout, tile.index_line, g.keys);
    float top[2] = {-INFINITY, -INFINITY}, total[2] = {};  // total: this lane's share
    float sums[DJ][4];
    clear(sums);
    __syncthreads();  // the tile before is read to the end
    if (steps.count > 0) copy_lines(q, tile_lines, g.q, tile.b, tile.h, rows, g.D);
    pipeline<kStages>(
        steps.count,
        [&](int s, int stage) {
          const Span cols = steps.span(s);
          if (apart(g, rows, cols, steps.masked(s))) return;
          copy_lines(k_of(stage), kStep, g.k, tile.b, tile.h, cols, g.D);
          copy_lines(v_of(stage), kStep, g.v, tile.b, tile.h, cols, g.D);
        },
        [&](int s, int stage) {
          const Span cols = steps.span(s);
          const bool masked = steps.masked(s);
          if (apart(g, rows, cols, masked)) return;
          float weights[J][4];
          dot(q, k_of(stage), D, weights);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int64_t query = rows.first + first_of_warp() + line_of(2 * half);
            const int64_t past = masked ? g.q_start + query - cols.first + 1 : cols.count;
            const int seen = int(min(cols.count, past));  // columns below it
            float largest = top[half];
#pragma unroll
            for (int j = 0; j < J; ++j)
#pragma unroll
              for (int r = 2 * half; r < 2 * half + 2; ++r) {
                weights[j][r] = column_of(j, r) < seen ? weights[j][r] * g.scale : -INFINITY;
                largest = weights[j][r] > largest ? weights[j][r] : largest;
              }
#pragma unroll
            for (int step = 2; step > 0; step /= 2) {  // the four lanes of a line
              const float other = __shfl_xor_sync(kAllLanes, largest, step);
              largest = other > largest ? other : largest;
            }
            // While nothing is seen the maximum is -inf: shift by 0, so that every weight is
            // exp(-inf) = 0.
            const float shift = largest == -INFINITY ? 0.0f : largest;
            const float shrink = m_exp(top[half] - shift);
            top[half] = largest;
            total[half] *= shrink;
#pragma unroll
            for (int j = 0; j < J; ++j)
#pragma unroll
              for (int r = 2 * half; r < 2 * half + 2; ++r) {
                weights[j][r] = m_exp(weights[j][r] - shift);
                total[half] += weights[j][r];
              }
#pragma unroll
            for (int j = 0; j < DJ; ++j)
#pragma unroll
              for (int r = 2 * half; r < 2 * half + 2; ++r) sums[j][r] *= shrink;
          }
          add_weighted(weights, v_of(stage), 0, D, sums);
        });
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int step = 2; step > 0; step /= 2)
        total[half] += __shfl_xor_sync(kAllLanes, total[half], step);
      factor[half] = total[half] == 0.0f ? 0.0f : 1.0f / total[half];
      const int line = first_of_warp() + line_of(2 * half);
      if (threadIdx.x % 4 == 0 && line < rows.count)
        g.lse[(tile.b * g.H + tile.h) * g.queries + rows.first + line] =
            total[half] == 0.0f ? -INFINITY : top[half] + m_log(total[half]);
    }
    write_lines(g.out, tile, 0, g.D, sums, factor);
  }
}

// --- backward -----------------------------------------------------------------------------------

// From a product q k^T and its dout v^T: the weight p, and ds without the factor `scale`. A query
// that sees nothing has an lse of -inf.
__device__ inline void to_weight_and_ds(float& product, float& dp, bool seen, float scale,
                                        float lse, float delta) {
  product = seen && lse != -INFINITY ? m_exp(product * scale - lse) : 0.0f;
  dp = seen && lse != -INFINITY ? product * (dp - delta) : 0.0f;
}

template <class T, int DMax, int kStep>
__global__ void __launch_bounds__(kMaxWarps* kWarp)
    attention_dq_mma_kernel(AttentionArguments<T> g) {
  using Tile = SwizzledTile<T, DMax>;
  constexpr int J = kStep / 8, DJ = DMax / 8;
  NEEDLE_DYNAMIC_SHARED(T, shared);
  const int tile_lines = lines_of_block(), D = int(g.D);
  const Tile q{shared}, dout{shared + tile_lines * DMax};
  const auto k_of = [&](int stage) {
    return Tile{shared + (2 * tile_lines + 2 * stage * kStep) * DMax};
  };
  const auto v_of = [&](int stage) { return Tile{k_of(stage).data + kStep * DMax}; };

  for (int64_t t = blockIdx.x; t < tiles_of(g, g.queries, tile_lines); t += gridDim.x) {
    const TileLines tile = lines_of_tile(g, g.queries, tile_lines, t);
    const Span rows = tile.span;
    if (rows.count <= 0) continue;
    const Steps<kStep> steps(g.layout, tile.index_line, g.keys);
    float lse[2], delta[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int line = first_of_warp() + line_of(2 * half);
      const int64_t at = (tile.b * g.H + tile.h) * g.queries + rows.first + line;
      lse[half] = line < rows.count ? g.lse[at] : -INFINITY;
      delta[half] = line < rows.count ? g.delta[at] : 0.0f;
    }
    float dq[DJ][4];
    clear(dq);
    __syncthreads();  // the tile before is read to the end
    if (steps.count > 0) {
      copy_lines(q, tile_lines, g.q, tile.b, tile.h, rows, g.D);
      copy_lines(dout, tile_lines, g.dout, tile.b, tile.h, rows, g.D);
    }
    pipeline<kStages>(
        steps.count,
        [&](int s, int stage) {
          const Span cols = steps.span(s);
          if (apart(g, rows, cols, steps.masked(s))) return;
          copy_lines(k_of(stage), kStep, g.k, tile.b, tile.h, cols, g.D);
          copy_lines(v_of(stage), kStep, g.v, tile.b, tile.h, cols, g.D);
        },
        [&](int s, int stage) {
          const Span cols = steps.span(s);
          const bool masked = steps.masked(s);
          if (apart(g, rows, cols, masked)) return;
          float weights[J][4], ds[J][4];
          dot(q, k_of(stage), D, weights);
          dot(dout, v_of(stage), D, ds);
#pragma unroll
          for (int r = 0; r < 4; ++r) {
            const int64_t query = rows.first + first_of_warp() + line_of(r);
            const int64_t past = masked ? g.q_start + query - cols.first + 1 : cols.count;
            const int seen = int(min(cols.count, past));
#pragma unroll
            for (int j = 0; j < J; ++j)
              to_weight_and_ds(weights[j][r], ds[j][r], column_of(j, r) < seen, g.scale, lse[r / 2],
                               delta[r / 2]);
          }
          add_weighted(ds, k_of(stage), 0, D, dq);
        });
    const float factor[2] = {g.scale, g.scale};
    write_lines(g.dq, tile, 0, g.D, dq, factor);
  }
}

// A block of threads owns keys. Two results of 16 x 256 are more than the registers hold: such
// heads are cut in two, blockIdx.y.
template <class T, int DMax, int kStep>
struct KeysBackward {
  static constexpr int kCols = DMax > 128 ? 128 : DMax, kParts = DMax / kCols;
  // Of a stage: q, dout, and a float lse and delta for each query.
  static constexpr int kStageElements = 2 * kStep * DMax + 2 * kStep * int(sizeof(float) / 2);
};

template <class T, int DMax, int kStep>
__global__ void __launch_bounds__(kMaxWarps* kWarp)
    attention_dkdv_mma_kernel(AttentionArguments<T> g) {
  using Tile = SwizzledTile<T, DMax>;
  using Shape = KeysBackward<T, DMax, kStep>;
  constexpr int J = kStep / 8, DJ = Shape::kCols / 8;
  NEEDLE_DYNAMIC_SHARED(T, shared);
  const int tile_lines = lines_of_block(), D = int(g.D);
  const int first_d = int(blockIdx.y) * Shape::kCols;
  const Tile k{shared}, v{shared + tile_lines * DMax};
  const auto q_of = [&](int stage) {
    return Tile{shared + 2 * tile_lines * DMax + stage * Shape::kStageElements};
  };
  const auto dout_of = [&](int stage) { return Tile{q_of(stage).data + kStep * DMax}; };
  const auto lse_of = [&](int stage) {  // kStep of them, then kStep of delta
    return reinterpret_cast<float*>(dout_of(stage).data + kStep * DMax);
  };

  for (int64_t t = blockIdx.x; t < tiles_of(g, g.keys, tile_lines); t += gridDim.x) {
    const TileLines tile = lines_of_tile(g, g.keys, tile_lines, t);
    const Span cols = tile.span;
    if (cols.count <= 0) continue;
    const Steps<kStep> steps(g.layout, tile.index_line, g.queries);
    float dk[DJ][4], dv[DJ][4];
    clear(dk);
    clear(dv);
    __syncthreads();  // the tile before is read to the end
    if (steps.count > 0) {
      copy_lines(k, tile_lines, g.k, tile.b, tile.h, cols, g.D);
      copy_lines(v, tile_lines, g.v, tile.b, tile.h, cols, g.D);
    }
    pipeline<kStages>(
        steps.count,
        [&](int s, int stage) {
          const Span rows = steps.span(s);
          if (apart(g, rows, cols, steps.masked(s))) return;
          copy_lines(q_of(stage), kStep, g.q, tile.b, tile.h, rows, g.D);
          copy_lines(dout_of(stage), kStep, g.dout, tile.b, tile.h, rows, g.D);
          const int64_t at = (tile.b * g.H + tile.h) * g.queries + rows.first;
          for (int i = int(threadIdx.x); i < int(rows.count); i += int(blockDim.x)) {
            ptx::cp_async<4>(lse_of(stage) + i, g.lse + at + i);
            ptx::cp_async<4>(lse_of(stage) + kStep + i, g.delta + at + i);
          }
        },
        [&](int s, int stage) {
          const Span rows = steps.span(s);
          const bool masked = steps.masked(s);
          if (apart(g, rows, cols, masked)) return;
          float weights[J][4], ds[J][4];  // of (key, query)
          dot(k, q_of(stage), D, weights);
          dot(v, dout_of(stage), D, ds);
          const float* const lse = lse_of(stage);
#pragma unroll
          for (int r = 0; r < 4; ++r) {
            const int64_t key = cols.first + first_of_warp() + line_of(r);
            const int64_t first_seeing = masked ? key - g.q_start - rows.first : 0;
#pragma unroll
            for (int j = 0; j < J; ++j) {
              const int row = column_of(j, r);
              const bool inside = row < rows.count;
              to_weight_and_ds(weights[j][r], ds[j][r], inside && row >= first_seeing, g.scale,
                               inside ? lse[row] : 0.0f, inside ? lse[kStep + row] : 0.0f);
            }
          }
          add_weighted(weights, dout_of(stage), first_d, D, dv);
          add_weighted(ds, q_of(stage), first_d, D, dk);
        });
    const float factor[2] = {g.scale, g.scale}, one[2] = {1.0f, 1.0f};
    write_lines(g.dk, tile, first_d, g.D, dk, factor);
    write_lines(g.dv, tile, first_d, g.D, dv, one);
  }
}

// --- launchers ----------------------------------------------------------------------------------

template <class T>
bool rows_in_chunks(const HeadsRef<T>& x) {
  return copies_in_chunks(x.data, x.stride_row) && x.stride_b % kChunk == 0 &&
         x.stride_h % kChunk == 0;
}

// f(head dimension, lines of a step), both integral constants; half steps for blocks below 64.
template <class F>
void dispatch_shape(int64_t D, int64_t block, F&& f) {
  if (D > 128) return f(RowLanes<256>{}, RowLanes<16>{});
  if (D > 64) return f(RowLanes<128>{}, RowLanes<32>{});
  if (block > 32) return f(RowLanes<64>{}, RowLanes<64>{});
  f(RowLanes<64>{}, RowLanes<32>{});
}

// Warps enough for a block of the layout, or for all `extent` lines.
template <auto Kernel, class T>
void launch_tiles(const AttentionArguments<T>& g, int64_t extent, int own_operands, int d_max,
                  int64_t stage_elements, unsigned parts = 1) {
  const int64_t longest = min(g.layout.block, extent);
  const int warps = int(min(ceil_div(longest, kWarpLines), int64_t(kMaxWarps)));
  const int lines = warps * kWarpLines;
  const int64_t elements = own_operands * lines * d_max + kStages * stage_elements;
  LaunchConfig config = grid_with_shared<Kernel>(tiles_of(g, extent, lines), warps * kWarp,
                                                 elements * int64_t(sizeof(T)));
  config.grid.y = parts;
  launch<Kernel>(config, g);
}

}  // namespace

template <class T>
bool attention_fits_tensor_cores(const AttentionArguments<T>& g) {
  return has_tensor_cores() && g.D <= 256 && rows_in_chunks(g.q) && rows_in_chunks(g.k) &&
         rows_in_chunks(g.v) && rows_in_chunks(g.dout);
}

template <class T>
void attention_forward_mma(const AttentionArguments<T>& g) {
  dispatch_shape(g.D, g.layout.block, [&](auto head_dim, auto step) {
    constexpr int kDMax = decltype(head_dim)::value, kStep = decltype(step)::value;
    launch_tiles<attention_forward_mma_kernel<T, kDMax, kStep>>(g, g.queries, 1, kDMax,
                                                                2 * kStep * kDMax);
  });
}

template <class T>
void attention_dq_mma(const AttentionArguments<T>& g) {
  dispatch_shape(g.D, g.layout.block, [&](auto head_dim, auto step) {
    constexpr int kDMax = decltype(head_dim)::value, kStep = decltype(step)::value;
    launch_tiles<attention_dq_mma_kernel<T, kDMax, kStep>>(g, g.queries, 2, kDMax,
                                                           2 * kStep * kDMax);
  });
}

template <class T>
void attention_dkdv_mma(const AttentionArguments<T>& g) {
  dispatch_shape(g.D, g.layout.block, [&](auto head_dim, auto step) {
    constexpr int kDMax = decltype(head_dim)::value, kStep = decltype(step)::value;
    using Shape = KeysBackward<T, kDMax, kStep>;
    launch_tiles<attention_dkdv_mma_kernel<T, kDMax, kStep>>(g, g.keys, 2, kDMax,
                                                             Shape::kStageElements, Shape::kParts);
  });
}

#define NEEDLE_INSTANTIATE(T)                                              \
  template bool attention_fits_tensor_cores(const AttentionArguments<T>&); \
  template void attention_forward_mma(const AttentionArguments<T>&);       \
  template void attention_dq_mma(const AttentionArguments<T>&);            \
  template void attention_dkdv_mma(const AttentionArguments<T>&);
NEEDLE_INSTANTIATE(float16)
NEEDLE_INSTANTIATE(bfloat16)
#undef NEEDLE_INSTANTIATE

}  // namespace needle::NEEDLE_DEVICE
