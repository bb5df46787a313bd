// Attention on tensor cores, backward (attention_mma_cuda.cuh): the gradients of queries, and those
// of keys and values.
#include "attention_mma_cuda.cuh"

namespace needle::NEEDLE_DEVICE {
namespace {

// From products q k^T and their dout v^T: the weights p, and ds without the factor `scale`. `scale`
// is that of base 2; lse(j, r) and delta(j, r) are of an element's query, lse in base 2.
template <int J, class Lse, class Delta>
__device__ void to_weights_and_ds(float (&products)[J][4], float (&dp)[J][4], float scale, Lse lse,
                                  Delta delta) {
#pragma unroll
  for (int j = 0; j < J; ++j)
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      products[j][r] = ptx::exp2(products[j][r] * scale - lse(j, r));
      dp[j][r] = products[j][r] * (dp[j][r] - delta(j, r));
    }
}

// Both are 0 where seen(j, r) says that the key is not seen.
template <int J, class Seen>
__device__ void mask(float (&weights)[J][4], float (&ds)[J][4], Seen seen) {
#pragma unroll
  for (int j = 0; j < J; ++j)
#pragma unroll
    for (int r = 0; r < 4; ++r)
      if (!seen(j, r)) weights[j][r] = ds[j][r] = 0.0f;
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
    const float scale = g.scale * kLog2E;
    float lse[2], delta[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int line = first_of_warp() + line_of(2 * half);
      const bool inside = line < tile.span.count;
      const int64_t at = tiles.first_query(tile) + tile.span.first + line;
      lse[half] = base2(inside ? g.lse[at] : -INFINITY);
      delta[half] = inside ? g.delta[at] : 0.0f;
    }
    float dq[DMax / 8][4];
    clear(dq);
    tiles.walk(tile, [&](const auto& step, int stage) {
      float weights[J][4], ds[J][4];
      dot(tiles.own(0), tiles.other(stage, 0), D, weights);
      dot(tiles.own(1), tiles.other(stage, 1), D, ds);
      to_weights_and_ds(
          weights, ds, scale, [&](int, int r) { return lse[r / 2]; },
          [&](int, int r) { return delta[r / 2]; });
      if (!step.whole()) {
        const int seen[2] = {tiles.keys_seen(tile, step, line_of(0)),
                             tiles.keys_seen(tile, step, line_of(2))};
        mask(weights, ds, [&](int j, int r) { return column_of(j, r) < seen[r / 2]; });
      }
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
    const float scale = g.scale * kLog2E;
    float dk[kCols / 8][4], dv[kCols / 8][4];
    clear(dk);
    clear(dv);
    tiles.walk(tile, [&](const auto& step, int stage) {
      float weights[J][4], ds[J][4];  // of (key, query)
      dot(tiles.own(0), tiles.other(stage, 0), D, weights);
      dot(tiles.own(1), tiles.other(stage, 1), D, ds);
      to_weights_and_ds(
          weights, ds, scale,
          [&](int j, int r) { return base2(tiles.lse(stage)[column_of(j, r)]); },
          [&](int j, int r) { return tiles.delta(stage)[column_of(j, r)]; });
      if (!step.whole()) {
        int first_seeing[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int64_t key = tile.span.first + first_of_warp() + line_of(2 * half);
          first_seeing[half] = step.masked ? int(key - g.q_start - step.lines.first) : 0;
        }
        mask(weights, ds, [&](int j, int r) {
          const int row = column_of(j, r);
          return row < step.lines.count && row >= first_seeing[r / 2];
        });
      }
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
