// Walks over the columns of (rows, cols) on a GPU, and sums over their rows, one or more of each
// column: through kColumnPartials partial sums, each over a fixed range of rows.
#pragma once

#include "cuda_util.cuh"

namespace needle::NEEDLE_DEVICE {

// A block has 32 neighbouring columns, which are neighbouring threads, and 8 lines of threads,
// which share its rows.
constexpr int kColumns = 32, kLines = kBlock / kColumns;
__device__ inline int64_t column_of_thread() {
  return int64_t(blockIdx.x) * kColumns + int(threadIdx.x) % kColumns;
}
__device__ inline int line_of_thread() { return int(threadIdx.x) / kColumns; }

// For kernels that do something for each element of a column:
// for (row = first_line_row(); row < rows; row += line_row_step())
inline LaunchConfig columns_config(int64_t rows, int64_t cols) {
  const int64_t tiles = ceil_div(cols, kColumns);
  const int64_t blocks = blocks_for(tiles * ceil_div(rows, kLines));
  return {dim3(unsigned(tiles), unsigned(ceil_div(blocks, tiles))), dim3(kBlock), 0, stream()};
}
__device__ inline int64_t first_line_row() {
  return int64_t(blockIdx.y) * kLines + line_of_thread();
}
__device__ inline int64_t line_row_step() { return int64_t(gridDim.y) * kLines; }

// For sum_columns: blockIdx.y is the partial.
inline int column_partials(int64_t rows) { return int(std::min<int64_t>(rows, kColumnPartials)); }
inline LaunchConfig column_partials_config(int64_t rows, int64_t cols) {
  return {dim3(unsigned(ceil_div(cols, kColumns)), unsigned(column_partials(rows))), dim3(kBlock),
          0, stream()};
}

// partials (column_partials(rows), cols): the Sums of element(row, column) over the rows of each.
template <class Sums, class Element>
__device__ void sum_columns(Sums* partials, int64_t rows, int64_t cols, const Element& element) {
  NEEDLE_SHARED(Sums, of_line, kLines, kColumns);
  const int column = int(threadIdx.x) % kColumns, line = line_of_thread();
  const int64_t c = column_of_thread(), partial = blockIdx.y;
  const int64_t rows_each = ceil_div(rows, kColumnPartials);
  const int64_t end = rows < (partial + 1) * rows_each ? rows : (partial + 1) * rows_each;
  Sums sums{};
  if (c < cols) {
    for (int64_t row = partial * rows_each + line; row < end; row += kLines)
      sums = AddSums{}(sums, element(row, c));
  }
  of_line[line][column] = sums;
  __syncthreads();
  if (line == 0 && c < cols) {
    for (int i = 1; i < kLines; ++i) sums = AddSums{}(sums, of_line[i][column]);
    partials[partial * cols + c] = sums;
  }
}

// Of column c.
template <class Sums>
__device__ Sums column_total(const Sums* partials, int count, int64_t cols, int64_t c) {
  Sums total{};
  for (int p = 0; p < count; ++p) total = AddSums{}(total, partials[p * cols + c]);
  return total;
}

}  // namespace needle::NEEDLE_DEVICE
