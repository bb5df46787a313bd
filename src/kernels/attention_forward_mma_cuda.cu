// Attention on tensor cores, forward (attention_mma_cuda.cuh).
#include "attention_mma_cuda.cuh"

namespace needle::NEEDLE_DEVICE {
namespace {

template <class T, int DMax, int kStep>
using ForwardTiles = AttentionTiles<T, DMax, kStep, Side::queries, 1>;

template <class T, int DMax, int kStep>
__global__ void __launch_bounds__(kMaxWarps* kWarp)
    attention_forward_mma_kernel(AttentionArguments<T> g) {
  constexpr int J = kStep / 8, DJ = DMax / 8;
  NEEDLE_DYNAMIC_SHARED(T, shared);
  const ForwardTiles<T, DMax, kStep> tiles{g, shared};
  tiles.for_each([&](const TileLines& tile) {
    const int first_line = first_of_warp(), D = int(g.D);
    const float scale = g.scale * kLog2E;
    float top[2] = {-INFINITY, -INFINITY}, total[2] = {};  // total: this lane's share
    float sums[DJ][4];
    clear(sums);
    tiles.walk(tile, [&](const auto& step, int stage) {
      float weights[J][4];
      dot(tiles.own(0), tiles.other(stage, 0), D, weights);
#pragma unroll
      for (int j = 0; j < J; ++j)
#pragma unroll
        for (int r = 0; r < 4; ++r) weights[j][r] *= scale;
      if (!step.whole()) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int seen = tiles.keys_seen(tile, step, line_of(2 * half));
#pragma unroll
          for (int j = 0; j < J; ++j)
#pragma unroll
            for (int r = 2 * half; r < 2 * half + 2; ++r)
              if (column_of(j, r) >= seen) weights[j][r] = -INFINITY;
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float largest = top[half];
#pragma unroll
        for (int j = 0; j < J; ++j)
#pragma unroll
          for (int r = 2 * half; r < 2 * half + 2; ++r) largest = fmaxf(largest, weights[j][r]);
#pragma unroll
        for (int lanes = 2; lanes > 0; lanes /= 2)  // the four lanes of a line
          largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, lanes));
        // While nothing is seen the maximum is -inf: shift by 0, so that every weight is
        // 2^-inf = 0.
        const float shift = largest == -INFINITY ? 0.0f : largest;
        const float shrink = ptx::exp2(top[half] - shift);
        top[half] = largest;
        total[half] *= shrink;
#pragma unroll
        for (int j = 0; j < J; ++j)
#pragma unroll
          for (int r = 2 * half; r < 2 * half + 2; ++r) {
            weights[j][r] = ptx::exp2(weights[j][r] - shift);
            total[half] += weights[j][r];
          }
#pragma unroll
        for (int j = 0; j < DJ; ++j)
#pragma unroll
          for (int r = 2 * half; r < 2 * half + 2; ++r) sums[j][r] *= shrink;
      }
      add_weighted(weights, tiles.other(stage, 1), 0, D, sums);
    });
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int step = 2; step > 0; step /= 2)
        total[half] += __shfl_xor_sync(kAllLanes, total[half], step);
      factor[half] = total[half] == 0.0f ? 0.0f : 1.0f / total[half];
      const int line = first_line + line_of(2 * half);
      if (threadIdx.x % 4 == 0 && line < tile.span.count)
        g.lse[tiles.first_query(tile) + tile.span.first + line] =
            total[half] == 0.0f ? -INFINITY : top[half] / kLog2E + m_log(total[half]);
    }
    tiles.write(g.out, tile, 0, sums, factor);
  });
}

}  // namespace

template <class T>
void attention_forward_mma(const AttentionArguments<T>& g) {
  if constexpr (is_compiled<T>) {
    dispatch_shape(g.D, g.layout.block, [&](auto head_dim, auto step) {
      constexpr int kDMax = decltype(head_dim)::value, kStep = decltype(step)::value;
      launch_tiles<attention_forward_mma_kernel<T, kDMax, kStep>, ForwardTiles<T, kDMax, kStep>>(g);
    });
  }
}
template void attention_forward_mma(const AttentionArguments<float16>&);
template void attention_forward_mma(const AttentionArguments<bfloat16>&);

}  // namespace needle::NEEDLE_DEVICE
