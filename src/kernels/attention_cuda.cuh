// What the two ways to compute attention on a GPU share: on CUDA cores (attention_cuda.cu, which
// says what is computed) and on tensor cores (attention_mma_cuda.cuh).
#pragma once

#include "tensor_core_cuda.cuh"

namespace needle::NEEDLE_DEVICE {

// A (B, H, rows, D) operand with a contiguous last axis.
template <class T>
struct HeadsRef {
  T* data;
  int64_t stride_b, stride_h, stride_row;
  __device__ T* row(int64_t b, int64_t h, int64_t r) const {
    return data + b * stride_b + h * stride_h + r * stride_row;
  }
};
template <class T>
HeadsRef<T> heads_ref(const Array& a, const Dims& strides) {
  return {a.data<typename std::remove_const<T>::type>(), strides[0], strides[1], strides[2]};
}

struct Layout {
  const int32_t *ptr, *idx;  // of query blocks' lines, or of key blocks' in the transposed index
  const uint8_t* partial;
  int64_t heads, block;
};

template <class T>
struct AttentionArguments {
  using A = accum_t<T>;
  HeadsRef<const T> q, k, v, dout;
  HeadsRef<T> out, dq, dk, dv;  // out: forward only
  A *lse, *delta;
  Layout layout;
  int64_t B, H, queries, keys, D, q_start;
  A scale;
};

// Lines of a head; none if count <= 0. 32 bits, as registers are scarce.
struct Span {
  int first, count;
};
// Of a tile of `size` lines that begins `inside` lines into block `line`, those below `extent`.
__device__ inline Span span_of(int64_t line, int64_t inside, int64_t size, int64_t block,
                               int64_t extent) {
  const int64_t first = line * block + inside;
  int64_t end = (line + 1) * block < extent ? (line + 1) * block : extent;
  if (first + size < end) end = first + size;
  return {int(first), int(end - first)};
}

// A block of threads owns `size` lines of one block of queries (or keys) of a head: tile t of
// tiles_of. `index_line` is their line of the layout.
struct TileLines {
  int b, h, index_line;
  Span span;
};
template <class T>
NEEDLE_HD int64_t tiles_of(const AttentionArguments<T>& g, int64_t extent, int64_t size) {
  return g.B * g.H * ceil_div(extent, g.layout.block) * ceil_div(g.layout.block, size);
}
template <class T>
__device__ TileLines lines_of_tile(const AttentionArguments<T>& g, int64_t extent, int64_t size,
                                   int64_t t) {
  const int64_t block = g.layout.block, pieces = ceil_div(block, size);
  const int64_t lines = ceil_div(extent, block), line = t / pieces % lines;
  const int64_t h = t / pieces / lines % g.H, b = t / pieces / lines / g.H;
  return {int(b), int(h), int(h % g.layout.heads * lines + line),
          span_of(line, t % pieces * size, size, block, extent)};
}

// Whether no query of `rows` may see any key of `cols`.
template <class T>
__device__ bool apart(const AttentionArguments<T>& g, Span rows, Span cols, bool masked) {
  return rows.count <= 0 || cols.count <= 0 ||
         (masked && cols.first > g.q_start + rows.first + rows.count - 1);
}

// --- on tensor cores; T is float16 or bfloat16 ---------------------------------------------------

template <class T>
bool rows_in_chunks(const HeadsRef<T>& x) {
  return copies_in_chunks(x.data, x.stride_row) && x.stride_b % kChunk == 0 &&
         x.stride_h % kChunk == 0;
}
// A null dout stands for forward.
template <class T>
bool fits_tensor_cores(const AttentionArguments<T>& g) {
  return may_use_tensor_cores() && g.D <= kMaxHead && rows_in_chunks(g.q) && rows_in_chunks(g.k) &&
         rows_in_chunks(g.v) && rows_in_chunks(g.dout);
}

// Compiled in attention_forward_mma_cuda.cu and attention_backward_mma_cuda.cu.
template <class T>
void attention_forward_mma(const AttentionArguments<T>& g);
template <class T>
void attention_dq_mma(const AttentionArguments<T>& g);
template <class T>
void attention_dkdv_mma(const AttentionArguments<T>& g);

}  // namespace needle::NEEDLE_DEVICE
