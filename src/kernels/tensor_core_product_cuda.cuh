// TileProduct (tile_product_cuda.cuh) for 16-bit floats on tensor cores: compute capability 8.0 and
// later, float32 sums, the same interface.
//
// Slices of A and B lie in shared memory as they lie in global memory, so that both are copied 16
// bytes at a time without passing through registers; ldmatrix, plain or transposing, makes
// fragments of either layout. Each of WarpRows x WarpCols warps holds its part of C in registers.
// The largest tile, 128 x 128 by eight warps of 64 x 32, does 32 multiplications per element read
// from global memory and takes 48 KB, three stages of 16 KB: all that needs no opting in.
#pragma once

#include "tensor_core_cuda.cuh"
#include "tile_product_cuda.cuh"

namespace needle::NEEDLE_DEVICE {

// Starts copying (lines, depth) elements of an operand whose lines lie along the rows of the tile,
// or across them.
template <bool Along, class T, int Cols>
__device__ __forceinline__ void copy_operand(const SwizzledTile<T, Cols>& tile, int tile_rows,
                                             int threads, const MatrixRef<T>& operand, int lines,
                                             int depth) {
  tile.copy(tile_rows, threads, operand.data, Along ? operand.row_stride : operand.col_stride,
            Along ? lines : depth, Along ? depth : lines);
}

template <class T_, int Rows, int Cols, int WarpRows, int WarpCols>
class TensorCoreProduct {
 public:
  using T = T_;
  using A = float;
  static constexpr int kRows = Rows, kCols = Cols;
  static constexpr int kDepth = Rows == 16 || Cols == 16 ? 16 : 32;  // 16: blocks of 16
  static constexpr int kThreads = WarpRows * WarpCols * kWarp;
  static constexpr bool kTensorCores = true;

  __device__ TensorCoreProduct() {
    for (int i = 0; i < kI; ++i)
      for (int j = 0; j < kJ; ++j)
        for (int r = 0; r < 4; ++r) sum_[i][j][r] = 0.0f;
  }

  template <class Next>
  __device__ void add(int64_t rows, int64_t cols, Along along, int slices, Next next) {
    NEEDLE_SHARED(T, shared, kStages, (kRows + kCols) * kDepth);
    if (slices == 0) return;
    const int lines[2] = {int(min(rows, int64_t(Rows))), int(min(cols, int64_t(Cols)))};
    __syncthreads();  // the stages may still be read by the addition before
    // A loop for each layout: one loop for all four holds the addresses of all four in registers.
    if (along.a) {
      along.b ? add_slices<true, true>(shared, lines, slices, next)
              : add_slices<true, false>(shared, lines, slices, next);
    } else {
      along.b ? add_slices<false, true>(shared, lines, slices, next)
              : add_slices<false, false>(shared, lines, slices, next);
    }
  }

  template <class F>
  __device__ void for_each_run(F f) const {
    const int lane = int(threadIdx.x) % kWarp;
#pragma unroll
    for (int i = 0; i < kI; ++i)
#pragma unroll
      for (int j = 0; j < kJ; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const A run[2] = {sum_[i][j][2 * half], sum_[i][j][2 * half + 1]};
          f(first_row() + 16 * i + 8 * half + lane / 4, first_col() + 8 * j + lane % 4 * 2, run);
        }
  }

 private:
  static constexpr int kWarpRows = Rows / WarpRows, kWarpCols = Cols / WarpCols;  // of one warp
  static constexpr int kI = kWarpRows / 16, kJ = kWarpCols / 8;                   // fragments
  static constexpr int kStages = Rows * Cols >= 128 * 128 ? 3 : 4;
  static_assert(sizeof(T) == 2 && kWarpRows % 16 == 0 && kWarpCols % 16 == 0, "whole fragments");

  __device__ static int first_row() { return int(threadIdx.x) / kWarp / WarpCols * kWarpRows; }
  __device__ static int first_col() { return int(threadIdx.x) / kWarp % WarpCols * kWarpCols; }

  using Stages = T[kStages][(Rows + Cols) * kDepth];

  template <bool AAlong, bool BAlong, class Next>
  __device__ void add_slices(Stages& shared, const int (&lines)[2], int slices, Next& next) {
    pipeline<kStages>(
        slices,
        [&](int stage) {
          const auto slice = next();
          const int depth = min(slice.depth, kDepth);
          T* const a = shared[stage];
          copy<AAlong, Rows>(a, slice.a, lines[0], depth);
          copy<BAlong, Cols>(a + Rows * kDepth, turned(slice.b), lines[1], depth);
        },
        [&](int, int stage) { multiply<AAlong, BAlong>(shared[stage]); });
  }

  template <bool IsAlong, int Lines, class Operand>
  __device__ static void copy(T* to, const Operand& operand, int lines, int depth) {
    const SwizzledTile<T, IsAlong ? kDepth : Lines> tile{to};
    copy_operand<IsAlong>(tile, IsAlong ? Lines : kDepth, kThreads, operand, lines, depth);
  }

  template <bool AAlong, bool BAlong>
  __device__ void multiply(T* slices) {
    const SwizzledTile<T, AAlong ? kDepth : Rows> a_tile{slices};
    const SwizzledTile<T, BAlong ? kDepth : Cols> b_tile{slices + kRows * kDepth};
#pragma unroll
    for (int k = 0; k < kDepth; k += 16) {
      uint32_t a[kI][4], b[kJ / 2][4];
#pragma unroll
      for (int i = 0; i < kI; ++i) a_tile.template load_a<AAlong>(a[i], first_row() + 16 * i, k);
#pragma unroll
      for (int j = 0; j < kJ / 2; ++j)
        b_tile.template load_b<BAlong>(b[j], first_col() + 16 * j, k);
#pragma unroll
      for (int i = 0; i < kI; ++i)
#pragma unroll
        for (int j = 0; j < kJ / 2; ++j)
          mma_pair<T>(sum_[i][2 * j], sum_[i][2 * j + 1], a[i], b[j]);
    }
  }

  float sum_[kI][kJ][4];
};

}  // namespace needle::NEEDLE_DEVICE
