// Attention on tensor cores, backward (attention_mma_cuda.cuh): the gradients of queries, and those
// of keys and values.
#include "attention_mma_cuda.cuh"

namespace needle::NEEDLE_DEVICE {
namespace {

// Of an element of q k^T: whether it is seen, and its query's lse, -inf when it sees nothing, and
// delta.
struct Seen {
  bool seen;
  float lse, delta;
};

// From products q k^T and their dout v^T: the weights p, and ds without the factor `scale`. at(j,
// r) gives the Seen of an element.
template <int J, class At>
__device__ void to_weights_and_ds(float (&products)[J][4], float (&dp)[J][4], float scale, At at) {
#pragma unroll
  for (int j = 0; j < J; ++j)
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const Seen query = at(j, r);
      const bool seen = query.seen && query.lse != -INFINITY;
      products[j][r] = seen ? m_exp(products[j][r] * scale - query.lse) : 0.0f;
      dp[j][r] = seen ? products[j][r] * (dp[j][r] - query.delta) : 0.0f;
    }
}

template <class T, int DMax, int kStep>
using QueriesTiles = AttentionTiles<T, DMax, kStep, Side::queries, 2>;

template <class T, int DMax, int kStep>
__global__ void __launch_bounds__(kMaxWarps* kWarp)
    attention_dq_mma_kernel(AttentionArguments<T> g) {
  constexpr int J = kStep / 8;
  NEEDLE_DYNAMIC_SHARED(T, shared);
  const QueriesTiles<T, DMax, kStep> tiles{g, shared};
  tiles.for_each([&](const TileLines& tile) {
    const int D = int(g.D);
    float lse[2], delta[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int line = first_of_warp() + line_of(2 * half);
      const bool inside = line < tile.span.count;
      const int64_t at = tiles.first_query(tile) + tile.span.first + line;
      lse[half] = inside ? g.lse[at] : -INFINITY;
      delta[half] = inside ? g.delta[at] : 0.0f;
    }
    float dq[DMax / 8][4];
    clear(dq);
    tiles.walk(tile, [&](Span cols, bool masked, int stage) {
      float weights[J][4], ds[J][4];
      dot(tiles.own(0), tiles.other(stage, 0), D, weights);
      dot(tiles.own(1), tiles.other(stage, 1), D, ds);
      int seen[2];  // columns below it
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t query = tile.span.first + first_of_warp() + line_of(2 * half);
        const int64_t past = masked ? g.q_start + query - cols.first + 1 : cols.count;
        seen[half] = int(min(cols.count, past));
      }
      to_weights_and_ds(weights, ds, g.scale, [&](int j, int r) {
        return Seen{column_of(j, r) < seen[r / 2], lse[r / 2], delta[r / 2]};
      });
      add_weighted(ds, tiles.other(stage, 0), 0, D, dq);
    });
    const float factor[2] = {g.scale, g.scale};
    tiles.write(g.dq, tile, 0, dq, factor);
  });
}

template <class T, int DMax, int kStep>
using KeysTiles = AttentionTiles<T, DMax, kStep, Side::keys, 2>;

// Two results of 16 x 256 are more than the registers hold: such heads are cut in two, blockIdx.y.
constexpr int columns_of_part(int d_max) { return d_max > 128 ? 128 : d_max; }

template <class T, int DMax, int kStep>
__global__ void __launch_bounds__(kMaxWarps* kWarp)
    attention_dkdv_mma_kernel(AttentionArguments<T> g) {
  constexpr int J = kStep / 8, kCols = columns_of_part(DMax);
  NEEDLE_DYNAMIC_SHARED(T, shared);
  const KeysTiles<T, DMax, kStep> tiles{g, shared};
  tiles.for_each([&](const TileLines& tile) {
    const int first_d = int(blockIdx.y) * kCols, D = int(g.D);
    float dk[kCols / 8][4], dv[kCols / 8][4];
    clear(dk);
    clear(dv);
    tiles.walk(tile, [&](Span rows, bool masked, int stage) {
      float weights[J][4], ds[J][4];  // of (key, query)
      dot(tiles.own(0), tiles.other(stage, 0), D, weights);
      dot(tiles.own(1), tiles.other(stage, 1), D, ds);
      int first_seeing[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t key = tile.span.first + first_of_warp() + line_of(2 * half);
        first_seeing[half] = masked ? int(key - g.q_start - rows.first) : 0;
      }
      to_weights_and_ds(weights, ds, g.scale, [&](int j, int r) {
        const int row = column_of(j, r);
        const bool inside = row < rows.count;
        return Seen{inside && row >= first_seeing[r / 2], inside ? tiles.lse(stage)[row] : 0.0f,
                    inside ? tiles.delta(stage)[row] : 0.0f};
      });
      add_weighted(weights, tiles.other(stage, 1), first_d, D, dv);
      add_weighted(ds, tiles.other(stage, 0), first_d, D, dk);
    });
    const float factor[2] = {g.scale, g.scale}, one[2] = {1.0f, 1.0f};
    tiles.write(g.dk, tile, first_d, dk, factor);
    tiles.write(g.dv, tile, first_d, dv, one);
  });
}

}  // namespace

template <class T>
void attention_dq_mma(const AttentionArguments<T>& g) {
  if constexpr (is_compiled<T>) {
    dispatch_shape(g.D, g.layout.block, [&](auto head_dim, auto step) {
      constexpr int kDMax = decltype(head_dim)::value, kStep = decltype(step)::value;
      launch_tiles<attention_dq_mma_kernel<T, kDMax, kStep>, QueriesTiles<T, kDMax, kStep>>(g);
    });
  }
}

template <class T>
void attention_dkdv_mma(const AttentionArguments<T>& g) {
  if constexpr (is_compiled<T>) {
    dispatch_shape(g.D, g.layout.block, [&](auto head_dim, auto step) {
      constexpr int kDMax = decltype(head_dim)::value, kStep = decltype(step)::value;
      launch_tiles<attention_dkdv_mma_kernel<T, kDMax, kStep>, KeysTiles<T, kDMax, kStep>>(
          g, kDMax / columns_of_part(kDMax));
    });
  }
}

template void attention_dq_mma(const AttentionArguments<float16>&);
template void attention_dq_mma(const AttentionArguments<bfloat16>&);
template void attention_dkdv_mma(const AttentionArguments<float16>&);
template void attention_dkdv_mma(const AttentionArguments<bfloat16>&);

}  // namespace needle::NEEDLE_DEVICE
