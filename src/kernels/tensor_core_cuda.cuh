// What the tensor-core kernels share: tiles of 16-bit floats in shared memory, the fragments made
// of them, and the pipeline that fills them. The instructions themselves are in ptx.h.
//
// ldmatrix reads eight rows of 16 bytes at a time, cp.async writes eight chunks of 16 bytes at a
// time; each wants the eight in different banks (128 bytes hold every bank once). Tiles are stored
// without padding, the chunks of a row exchanged by an exclusive or with the row's number, which
// gives both; swizzle_is_conflict_free proves it when the kernels are compiled.
#pragma once

#include "../common/cuda_util.cuh"

namespace needle::NEEDLE_DEVICE {

// What is compiled for sm_75 has no tensor-core kernels, and a later GPU may have to do with it:
// code for sm_80 runs on no GPU from sm_90 on, PTX for sm_75 on all.
inline bool may_use_tensor_cores() { return code_capability() >= 80; }

constexpr int kChunk = 8;  // 16-bit elements of the 16 bytes that ldmatrix and cp.async move

// Where chunk `chunk` of row `row` lies, in chunks, when a row has Chunks (a power of two).
template <int Chunks>
NEEDLE_HD constexpr int swizzled(int row, int chunk) {
  constexpr int kRowsPer128Bytes = Chunks < 8 ? 8 / Chunks : 1;
  constexpr int kMask = Chunks < 8 ? Chunks - 1 : 7;
  return row * Chunks + (chunk ^ (row / kRowsPer128Bytes & kMask));
}

template <int Chunks>
constexpr bool swizzle_is_conflict_free() {
  for (int first = 0; first < 64; first += 8) {
    for (int chunk = 0; chunk < Chunks; ++chunk) {
      int read = 0;  // by ldmatrix: one chunk of eight rows
      for (int i = 0; i < 8; ++i) read |= 1 << swizzled<Chunks>(first + i, chunk) % 8;
      if (read != 0xff) return false;
    }
    int written = 0;  // by cp.async: eight chunks of the tile, row after row
    for (int i = first; i < first + 8; ++i)
      written |= 1 << swizzled<Chunks>(i / Chunks, i % Chunks) % 8;
    if (written != 0xff) return false;
  }
  return true;
}

// Whether cp.async can copy rows of `stride` 16-bit elements, 16 bytes at a time.
inline bool copies_in_chunks(const void* first, int64_t stride) {
  return reinterpret_cast<uintptr_t>(first) % 16 == 0 && stride % kChunk == 0;
}

// A tile of rows of Cols elements in shared memory, aligned to 16 bytes.
template <class T, int Cols>
struct SwizzledTile {
  static constexpr int kChunks = Cols / kChunk;
  static_assert(sizeof(T) == 2 && (kChunks & (kChunks - 1)) == 0, "16-bit floats, a power of two");
  static_assert(swizzle_is_conflict_free<kChunks>(), "two of eight chunks share a bank");

  T* data;

  // Starts copying `tile_rows` rows, by `threads` threads, from a matrix with unit column stride of
  // which (rows, cols) elements are there: zeros beyond, where `from` may point outside the matrix.
  // `from` and `stride` are multiples of 16 bytes. A thread has the same columns of all its rows,
  // so that little is computed for each chunk.
  __device__ __forceinline__ void copy(int tile_rows, int threads, const T* from, int64_t stride,
                                       int rows, int cols) const {
    static_assert(kChunks <= kWarp, "whole rows at a time");
    const int at_once = threads / kChunks;  // rows
    const int first = int(threadIdx.x) / kChunks, col = int(threadIdx.x) % kChunks * kChunk;
    const int inside = max(0, min(cols - col, kChunk)) * int(sizeof(T));
    const T* source = from + first * stride + col;
#pragma unroll
    for (int above = 0; above < tile_rows; above += at_once, source += at_once * stride) {
      const int row = above + first;
      if (tile_rows % at_once == 0 || row < tile_rows)
        ptx::cp_async<16>(at(row, col), source, row < rows ? inside : 0);
    }
  }

  // The same of chunks that lie anywhere: source(row, col) is where the chunk is, or null for
  // zeros.
  template <class Source>
  __device__ __forceinline__ void copy_chunks(int tile_rows, int threads, int rows, int cols,
                                              const T* any, Source source) const {
    const int at_once = threads / kChunks;  // rows
    const int first = int(threadIdx.x) / kChunks, col = int(threadIdx.x) % kChunks * kChunk;
#pragma unroll
    for (int above = 0; above < tile_rows; above += at_once) {
      const int row = above + first;
      if (tile_rows % at_once != 0 && row >= tile_rows) continue;
      const T* const from = row < rows && col < cols ? source(row, col) : nullptr;
      ptx::cp_async<16>(at(row, col), from ? from : any, from ? 16 : 0);
    }
  }

  // mma's a, element (line, k) of lines 16: of a tile of (line, k) when KAlong, else of (k, line).
  template <bool KAlong>
  __device__ void load_a(uint32_t (&a)[4], int line, int k) const {
    if constexpr (KAlong) {
      load<false, true>(a, line, k);
    } else {
      load<true, false>(a, k, line);
    }
  }
  // mma's b for lines `line` .. + 7 in b[0], b[1], and for the next eight in b[2], b[3].
  template <bool KAlong>
  __device__ void load_b(uint32_t (&b)[4], int line, int k) const {
    if constexpr (KAlong) {
      load<false, false>(b, line, k);
    } else {
      load<true, true>(b, k, line);
    }
  }

 private:
  __device__ T* at(int row, int col) const {
    return data + swizzled<kChunks>(row, col / kChunk) * kChunk;
  }
  // The 16 x 16 elements at (row, col) as four 8 x 8 matrices, the second below the first (Down) or
  // to its right.
  template <bool Transposed, bool Down>
  __device__ void load(uint32_t (&r)[4], int row, int col) const {
    const int lane = int(threadIdx.x) % kWarp, second = lane / 8 % 2, third = lane / 16;
    const T* const line = at(row + lane % 8 + 8 * (Down ? second : third),  //
                             col + 8 * (Down ? third : second));
    if constexpr (Transposed) {
      ptx::ldmatrix_trans<4>(r, line);
    } else {
      ptx::ldmatrix<4>(r, line);
    }
  }
};

// Two neighbouring 16 x 8 accumulators += a times both halves of load_b's b.
template <class T>
__device__ void mma_pair(float (&left)[4], float (&right)[4], const uint32_t (&a)[4],
                         const uint32_t (&b)[4]) {
  const uint32_t b_left[2] = {b[0], b[1]}, b_right[2] = {b[2], b[3]};
  ptx::mma_m16n8k16<T>(left, a, b_left);
  ptx::mma_m16n8k16<T>(right, a, b_right);
}

// use(step, stage) for steps 0 .. steps - 1, each after what load(stage), called once for each step
// in their order, copied for it has arrived; the Stages - 1 steps after it are on their way
// meanwhile. One barrier a step: behind it the data of all threads is there, and nobody reads the
// stage of the step before any more, which is the next to be filled. What load starts before the
// first step may also be started before the call.
template <int Stages, class Load, class Use>
__device__ void pipeline(int steps, Load load, Use use) {
  static_assert(Stages >= 2, "one stage to read, one to fill");
  for (int s = 0; s < Stages - 1; ++s) {
    if (s < steps) load(s);
    ptx::cp_async_commit();
  }
  int stage = 0, filled = Stages - 1;
  for (int s = 0; s < steps; ++s) {
    ptx::cp_async_wait<Stages - 2>();
    __syncthreads();
    if (s + Stages - 1 < steps) load(filled);
    ptx::cp_async_commit();
    use(s, stage);
    stage = stage + 1 == Stages ? 0 : stage + 1;
    filled = filled + 1 == Stages ? 0 : filled + 1;
  }
}

}  // namespace needle::NEEDLE_DEVICE
