// The inner part of every matrix product on a GPU: one block of threads forms one Tile x Tile piece
// of C += A B.
//
// Slices of A and B, kDepth deep, are staged in shared memory; each thread keeps a square of C in
// registers, so that an element read from shared memory is used several times. The next slice is
// fetched from global memory while the present one is multiplied. matmul and
// BlockSparseMatmulKernel differ only in which A and B they pass.
#pragma once

#include "../common/cuda_util.cuh"

namespace needle::NEEDLE_DEVICE {

// A matrix in global memory: element (r, c) is data[r * row_stride + c * col_stride]; one of the
// strides is 1.
template <class T>
struct MatrixRef {
  const T* data;
  int64_t row_stride, col_stride;
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

template <class T_, int Tile_>
class TileProduct {
 public:
  using T = T_;
  using A = typename ProductSum<T>::type;
  static constexpr int kTile = Tile_;
  static constexpr int kThreads = 256;
  static constexpr int kSharedBytes = 0;  // of dynamic shared memory

  __device__ TileProduct() {
    for (int i = 0; i < kSide; ++i)
      for (int j = 0; j < kSide; ++j) sum_[i][j] = A(0);
  }

  // += a b, where a is (rows, depth) and b is (depth, cols), rows and cols at most Tile. Has
  // barriers.
  __device__ void add(MatrixRef<T> a, MatrixRef<T> b, int64_t rows, int64_t cols, int64_t depth) {
    NEEDLE_SHARED(A, a_slice, kDepth, kTile + kPad);
    NEEDLE_SHARED(A, b_slice, kDepth, kTile + kPad);
    const MatrixRef<T> b_turned{b.data, b.col_stride, b.row_stride};
    A a_next[kPerThread], b_next[kPerThread];
    fetch(a, rows, depth, 0, a_next);
    fetch(b_turned, cols, depth, 0, b_next);
    for (int64_t k0 = 0; k0 < depth; k0 += kDepth) {
      __syncthreads();  // all are done with the slice before
      store(a, a_next, a_slice);
      store(b_turned, b_next, b_slice);
      __syncthreads();
      if (k0 + kDepth < depth) {
        fetch(a, rows, depth, k0 + kDepth, a_next);
        fetch(b_turned, cols, depth, k0 + kDepth, b_next);
      }
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

  // f(row, col, sum) for the elements of the tile that this thread holds; the caller cuts the tail.
  template <class F>
  __device__ void for_each(F f) const {
#pragma unroll
    for (int i = 0; i < kSide; ++i)
#pragma unroll
      for (int j = 0; j < kSide; ++j)
        f(place(int(threadIdx.x) / 16, i), place(int(threadIdx.x) % 16, j), sum_[i][j]);
  }

 private:
  static constexpr int kDepth = kTile >= 128 ? 8 : 16;
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
  __device__ static void position(const MatrixRef<T>& m, int e, int& line, int& k) {
    const int at = e * kThreads + int(threadIdx.x);
    const bool along_depth = m.col_stride == 1;
    line = along_depth ? at / kDepth : at % kTile;
    k = along_depth ? at % kDepth : at / kTile;
  }

  __device__ static void fetch(const MatrixRef<T>& m, int64_t lines, int64_t depth, int64_t k0,
                               A (&next)[kPerThread]) {
#pragma unroll
    for (int e = 0; e < kPerThread; ++e) {
      int line, k;
      position(m, e, line, k);
      const bool inside = line < lines && k0 + k < depth;
      next[e] =
          inside ? A(accum_t<T>(m.data[line * m.row_stride + (k0 + k) * m.col_stride])) : A(0);
    }
  }

  __device__ static void store(const MatrixRef<T>& m, const A (&next)[kPerThread],
                               A (&slice)[kDepth][kTile + kPad]) {
#pragma unroll
    for (int e = 0; e < kPerThread; ++e) {
      int line, k;
      position(m, e, line, k);
      slice[k][line] = next[e];
    }
  }

  A sum_[kSide][kSide];
};

}  // namespace needle::NEEDLE_DEVICE
