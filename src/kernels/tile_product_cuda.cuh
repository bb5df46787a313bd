// The inner part of every matrix product on a GPU: one block of threads forms one Tile x Tile piece
// of C += A B.
//
// Slices of A and B, kDepth deep, are staged in shared memory; each thread keeps a square of C in
// registers, so that an element read from shared memory is used several times. The next slice is
// fetched from global memory while the present one is multiplied. matmul, BlockSparseMatmulKernel
// and convolutions differ only in which slices they name. tensor_core_product_cuda.cuh is
// the same for tensor cores.
#pragma once

#include "../common/cuda_util.cuh"

namespace needle::NEEDLE_DEVICE {

// A matrix in global memory: element (r, c) is data[r * row_stride + c * col_stride]; one of the
// strides is 1.
template <class T>
struct MatrixRef {
  const T* data;
  int64_t row_stride, col_stride;
  NEEDLE_HD T operator()(int64_t row, int64_t col) const {
    return data[row * row_stride + col * col_stride];
  }
};

// (rows, cols) stored with unit column stride and row stride `ld`, or as its transpose when trans.
template <class T>
NEEDLE_HD MatrixRef<T> matrix_ref(const T* data, int64_t ld, bool trans) {
  return trans ? MatrixRef<T>{data, 1, ld} : MatrixRef<T>{data, ld, 1};
}
template <class T>
NEEDLE_HD MatrixRef<T> submatrix(MatrixRef<T> a, int64_t row, int64_t col) {
  return {a.data + row * a.row_stride + col * a.col_stride, a.row_stride, a.col_stride};
}
template <class T>
NEEDLE_HD MatrixRef<T> turned(MatrixRef<T> a) {
  return {a.data, a.col_stride, a.row_stride};
}

// What products of T are summed in: integers wrap around, so they are summed unsigned.
template <class T>
struct ProductSum {
  using type = accum_t<T>;
};
template <>
struct ProductSum<uint8_t> {
  using type = uint32_t;
};
template <>
struct ProductSum<int32_t> {
  using type = uint32_t;
};
template <>
struct ProductSum<int64_t> {
  using type = uint64_t;
};

// A stretch of the inner dimension: a is (rows, depth), b is (depth, cols). A product takes the
// first kDepth of it, or all if it is shorter.
template <class A, class B>
struct Slice {
  A a;
  B b;
  int depth;
};
template <class T>
using MatrixSlice = Slice<MatrixRef<T>, MatrixRef<T>>;

// Which operands lie contiguous along the inner dimension.
struct Along {
  bool a, b;
};
template <class T>
__device__ Along along(MatrixRef<T> a, MatrixRef<T> b) {
  return {a.col_stride == 1, b.row_stride == 1};
}

// Gives the slices of a (rows, depth) and b (depth, cols), Depth by Depth.
template <int Depth, class T>
class Slices {
 public:
  Slices() = default;
  __device__ Slices(MatrixRef<T> a, MatrixRef<T> b, int64_t depth)
      : next_{a, b, int(depth)}, a_step_(Depth * a.col_stride), b_step_(Depth * b.row_stride) {}

  __device__ MatrixSlice<T> operator()() {
    const MatrixSlice<T> slice = next_;
    next_.a.data += a_step_;
    next_.b.data += b_step_;
    next_.depth -= Depth;
    return slice;
  }

 private:
  MatrixSlice<T> next_{};
  int64_t a_step_ = 0, b_step_ = 0;
};

template <class T_, int Tile>
class TileProduct {
 public:
  using T = T_;
  using A = typename ProductSum<T>::type;
  static constexpr int kRows = Tile, kCols = Tile;
  static constexpr int kDepth = Tile >= 128 ? 8 : 16;
  static constexpr int kThreads = 256;
  static constexpr bool kTensorCores = false;

  __device__ TileProduct() {
    for (int i = 0; i < kSide; ++i)
      for (int j = 0; j < kSide; ++j) sum_[i][j] = A(0);
  }

  // += the products of the `slices` slices that next() gives one after another, with (rows, cols)
  // of the tile inside the matrix. Has barriers.
  template <class Next>
  __device__ void add(int64_t rows, int64_t cols, Along along, int slices, Next next) {
    NEEDLE_SHARED(A, a_slice, kDepth, kTile + kPad);
    NEEDLE_SHARED(A, b_slice, kDepth, kTile + kPad);
    if (slices == 0) return;
    A a_next[kPerThread], b_next[kPerThread];
    const auto fetch_both = [&] {
      const auto slice = next();
      fetch(slice.a, along.a, rows, slice.depth, a_next);
      fetch(turned(slice.b), along.b, cols, slice.depth, b_next);
    };
    fetch_both();
    for (int s = 0; s < slices; ++s) {
      __syncthreads();  // all are done with the slice before
      store(a_next, along.a, a_slice);
      store(b_next, along.b, b_slice);
      __syncthreads();
      if (s + 1 < slices) fetch_both();
#pragma unroll
      for (int k = 0; k < kDepth; ++k) {
        A x[kSide], y[kSide];
#pragma unroll
        for (int i = 0; i < kSide; ++i) x[i] = a_slice[k][place(int(threadIdx.x) / 16, i)];
#pragma unroll
        for (int j = 0; j < kSide; ++j) y[j] = b_slice[k][place(int(threadIdx.x) % 16, j)];
#pragma unroll
        for (int i = 0; i < kSide; ++i)
#pragma unroll
          for (int j = 0; j < kSide; ++j) sum_[i][j] += x[i] * y[j];
      }
    }
  }

  // f(row, col, sums) for the runs of elements in a row that this thread holds; the caller cuts the
  // tail.
  template <class F>
  __device__ void for_each_run(F f) const {
#pragma unroll
    for (int i = 0; i < kSide; ++i)
#pragma unroll
      for (int j = 0; j < kSide; j += kGroup) {
        A run[kGroup];
#pragma unroll
        for (int e = 0; e < kGroup; ++e) run[e] = sum_[i][j + e];
        f(place(int(threadIdx.x) / 16, i), place(int(threadIdx.x) % 16, j), run);
      }
  }

 private:
  static constexpr int kTile = Tile;
  static constexpr int kSide = kTile / 16;  // each of 16 x 16 threads holds kSide x kSide elements
  static constexpr int kGroup = kSide < 4 ? kSide : 4;
  static constexpr int kPad = 4;
  static constexpr int kPerThread = kTile * kDepth / kThreads;
  static_assert(kTile % 16 == 0 && kTile * kDepth % kThreads == 0,
                "every thread stages the same number of elements");

  // Row or column i of thread t: groups of four neighbours, read by one instruction, interleaved
  // over the 16 threads.
  __device__ static int place(int t, int i) {
    return i / kGroup * (16 * kGroup) + t * kGroup + i % kGroup;
  }

  // Where this thread's element e of a slice stands; neighbouring threads go along the unit stride.
  __device__ static void position(bool along_depth, int e, int& line, int& k) {
    const int at = e * kThreads + int(threadIdx.x);
    line = along_depth ? at / kDepth : at % kTile;
    k = along_depth ? at % kDepth : at / kTile;
  }

  template <class Operand>
  __device__ static void fetch(const Operand& operand, bool along_depth, int64_t lines,
                               int64_t depth, A (&next)[kPerThread]) {
#pragma unroll
    for (int e = 0; e < kPerThread; ++e) {
      int line, k;
      position(along_depth, e, line, k);
      const bool inside = line < lines && k < depth;
      next[e] = inside ? A(accum_t<T>(operand(line, k))) : A(0);
    }
  }

  __device__ static void store(const A (&next)[kPerThread], bool along_depth,
                               A (&slice)[kDepth][kTile + kPad]) {
#pragma unroll
    for (int e = 0; e < kPerThread; ++e) {
      int line, k;
      position(along_depth, e, line, k);
      slice[k][line] = next[e];
    }
  }

  A sum_[kSide][kSide];
};

}  // namespace needle::NEEDLE_DEVICE
