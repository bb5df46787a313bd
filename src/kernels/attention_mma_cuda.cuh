// Attention (attention_cuda.cu) for 16-bit floats on tensor cores: compute capability 8.0 and
// later, rows aligned to 16 bytes, heads of up to 256. What forward and backward share.
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
#pragma once

#include "../common/ewise_math_cuda.h"
#include "attention_cuda.cuh"

namespace needle::NEEDLE_DEVICE {

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
  uint32_t a[J / 2][4];
#pragma unroll
  for (int j = 0; j < J; ++j)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      a[j / 2][j % 2 * 2 + half] = ptx::pack<T>(weights[j][2 * half], weights[j][2 * half + 1]);
#pragma unroll
  for (int d = 0; d < 8 * DJ; d += 16) {
    if (first_d + d >= D) continue;
#pragma unroll
    for (int j = 0; j < J; j += 2) {
      uint32_t b[4];
      values.template load_b<false>(b, first_d + d, 8 * j);
      mma_pair<T>(sums[d / 8], sums[d / 8 + 1], a[j / 2], b);
    }
  }
}

// Exponentials are those of base 2, which the hardware has.
constexpr float kLog2E = 1.44269504088896340736f;
// A query's lse in base 2: inf where it sees nothing, which makes its weights 0.
__device__ inline float base2(float lse) { return lse == -INFINITY ? INFINITY : lse * kLog2E; }

enum class Side { queries, keys };

// A block of threads owns a tile of lines of one side: `Own` operands (q, and dout for its
// gradient; or k and v). The lines of the other side, of two operands, come a step at a time.
template <class T, int DMax, int kStep, Side Owned, int Own>
struct AttentionTiles {
  using Tile = SwizzledTile<T, DMax>;
  static constexpr bool kOwnsQueries = Owned == Side::queries;
  // A stage holds two operands, and where they are q and dout a float lse and delta a query.
  static constexpr int kStatistics = kOwnsQueries ? 0 : 2 * kStep * int(sizeof(float) / sizeof(T));
  static constexpr int kStageElements = 2 * kStep * DMax + kStatistics;

  // Up to kStep lines of one block of the other side. Two of them stay in registers.
  struct Step {
    Span lines;
    bool masked, skipped;
    // Whether every query of the tile sees every key of a full step.
    __device__ bool whole() const { return !masked && lines.count == kStep; }
  };

  const AttentionArguments<T>& g;
  T* shared;

  static int64_t shared_bytes(int lines) {
    return (int64_t(Own) * lines * DMax + kStages * kStageElements) * int64_t(sizeof(T));
  }
  NEEDLE_HD static int64_t extent(const AttentionArguments<T>& g) {
    return kOwnsQueries ? g.queries : g.keys;
  }

  __device__ Tile own(int operand) const { return {shared + operand * lines_of_block() * DMax}; }
  __device__ Tile other(int stage, int operand) const {
    return {own(Own).data + stage * kStageElements + operand * kStep * DMax};
  }
  __device__ float* lse(int stage) const { return reinterpret_cast<float*>(other(stage, 2).data); }
  __device__ float* delta(int stage) const { return lse(stage) + kStep; }

  // f(tile) for the tiles of this block of threads.
  template <class F>
  __device__ void for_each(F f) const {
    ptx::with_tensor_cores([&] {
      const int lines = lines_of_block();
      for (int64_t t = blockIdx.x; t < tiles_of(g, extent(g), lines); t += gridDim.x) {
        const TileLines tile = lines_of_tile(g, extent(g), lines, t);
        if (tile.span.count > 0) f(tile);
      }
    });
  }

  // use(step, stage) for each step along the tile's line of the layout, unless no query sees any
  // key there.
  template <class Use>
  __device__ void walk(const TileLines& tile, Use use) const {
    static_assert(kStages == 2, "two steps are known at a time");
    const Layout& layout = g.layout;
    int entry = layout.ptr[tile.index_line], piece = 0;
    const int end = layout.ptr[tile.index_line + 1], pieces = int(ceil_div(layout.block, kStep));
    const int steps = (end - entry) * pieces;
    int block = 0;
    bool partial = false;
    const auto read_index = [&] {  // an entry ahead, or its first step would wait for it
      if (entry >= end) return;
      block = layout.idx[entry];
      partial = layout.partial[entry] != 0;
    };
    Step present, coming;
    const auto next_step = [&] {
      present = coming;
      const Span lines = span_of(block, int64_t(piece) * kStep, kStep, layout.block,
                                 kOwnsQueries ? g.keys : g.queries);
      const bool skipped =
          kOwnsQueries ? apart(g, tile.span, lines, partial) : apart(g, lines, tile.span, partial);
      coming = {lines, partial, skipped};
      if (++piece < pieces) return;
      piece = 0;
      ++entry;
      read_index();
    };
    read_index();
    __syncthreads();  // the tile before is read to the end
    if (steps > 0) {
      copy_own(0, kOwnsQueries ? g.q : g.k, tile);
      if constexpr (Own > 1) copy_own(1, kOwnsQueries ? g.dout : g.v, tile);
    }
    pipeline<kStages>(
        steps,
        [&](int stage) {
          next_step();
          if (coming.skipped) return;
          copy_step(other(stage, 0), kOwnsQueries ? g.k : g.q, tile, coming);
          copy_step(other(stage, 1), kOwnsQueries ? g.v : g.dout, tile, coming);
          if constexpr (!kOwnsQueries) {
            const int64_t at = first_query(tile) + coming.lines.first;
            for (int i = int(threadIdx.x); i < kStep; i += int(blockDim.x)) {
              const int bytes = i < coming.lines.count ? 4 : 0;
              ptx::cp_async<4>(lse(stage) + i, g.lse + at + i, bytes);
              ptx::cp_async<4>(delta(stage) + i, g.delta + at + i, bytes);
            }
          }
        },
        [&](int s, int stage) {
          const Step step = s + 1 < steps ? present : coming;
          if (!step.skipped) use(step, stage);
        });
  }

  // Where a head's queries begin in lse and delta.
  __device__ int64_t first_query(const TileLines& tile) const {
    return (tile.b * g.H + tile.h) * g.queries;
  }

  // How many keys of a step query `line` of this warp sees.
  __device__ int keys_seen(const TileLines& tile, const Step& step, int line) const {
    const int64_t query = g.q_start + tile.span.first + first_of_warp() + line;
    return step.masked ? int(min(int64_t(step.lines.count), query - step.lines.first + 1))
                       : step.lines.count;
  }

  // This warp's lines of a result, to memory: factor[0], factor[1] for the two lines of a lane.
  template <int DJ>
  __device__ void write(const HeadsRef<T>& to, const TileLines& tile, int first_d,
                        const float (&sums)[DJ][4], const float (&factor)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int line = first_of_warp() + line_of(2 * half);
      if (line >= tile.span.count) continue;
      T* const row = to.row(tile.b, tile.h, tile.span.first + line);
#pragma unroll
      for (int j = 0; j < DJ; ++j) {
        const float run[2] = {sums[j][2 * half] * factor[half],
                              sums[j][2 * half + 1] * factor[half]};
        const int d = first_d + column_of(j, 0);
        store_run(row + d, run, g.D - d);
      }
    }
  }

 private:
  __device__ void copy_own(int operand, const HeadsRef<const T>& from,
                           const TileLines& tile) const {
    own(operand).copy(lines_of_block(), int(blockDim.x), from.row(tile.b, tile.h, tile.span.first),
                      from.stride_row, tile.span.count, int(g.D));
  }
  // The usual number of threads has code of its own, which needs no loop.
  __device__ void copy_step(const Tile& to, const HeadsRef<const T>& from, const TileLines& tile,
                            const Step& step) const {
    constexpr int kMost = kMaxWarps * kWarp;
    const T* const first = from.row(tile.b, tile.h, step.lines.first);
    if (blockDim.x == kMost) {
      to.copy(kStep, kMost, first, from.stride_row, step.lines.count, int(g.D));
    } else {
      to.copy(kStep, int(blockDim.x), first, from.stride_row, step.lines.count, int(g.D));
    }
  }
};

// --- launching ----------------------------------------------------------------------------------

// f(Int<head dimension>, Int<lines of a step>); half steps for blocks below 64.
template <class F>
void dispatch_shape(int64_t D, int64_t block, F&& f) {
  if (D > 128) return f(Int<256>{}, Int<16>{});
  if (D > 64) return f(Int<128>{}, Int<32>{});
  if (block > 32) return f(Int<64>{}, Int<64>{});
  f(Int<64>{}, Int<32>{});
}

// Warps enough for a block of the layout, or for all lines; blockIdx.y counts `parts`.
template <auto Kernel, class Tiles, class T>
void launch_tiles(const AttentionArguments<T>& g, unsigned parts = 1) {
  const int64_t extent = Tiles::extent(g), longest = std::min(g.layout.block, extent);
  const int warps = int(std::min(ceil_div(longest, kWarpLines), int64_t(kMaxWarps)));
  const int lines = warps * kWarpLines;
  LaunchConfig config = grid_with_shared<Kernel>(tiles_of(g, extent, lines), warps * kWarp,
                                                 Tiles::shared_bytes(lines));
  config.grid.y = parts;
  launch<Kernel>(config, g);
}

}  // namespace needle::NEEDLE_DEVICE
