// Walking arrays by shape and strides on the CPU: neighbouring dimensions that can be one are made
// one, then rows.
#pragma once

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>

#include "array.h"
#include "parallel.h"

namespace needle::cpu {

constexpr int kMaxRank = 16;
constexpr int64_t kTileRows = 32, kTileCols = 64;

// N arrays walked together. Dimension 0 is the innermost; sizes of 1 are gone; rank is at least 1.
template <int N>
struct Walk {
  int rank = 0;
  int64_t size = 1;
  std::array<int64_t, kMaxRank> shape{};
  std::array<std::array<int64_t, kMaxRank>, N> strides{};

  Walk(const Dims& dims, const std::array<const Dims*, N>& dim_strides) {
    for (size_t d = dims.size(); d-- > 0;) {
      size *= dims[d];
      if (dims[d] == 1) continue;
      bool merges = rank > 0;
      for (int k = 0; k < N && merges; ++k)
        merges = (*dim_strides[k])[d] == shape[rank - 1] * strides[k][rank - 1];
      if (merges) {
        shape[rank - 1] *= dims[d];
        continue;
      }
      if (rank == kMaxRank)
        throw std::invalid_argument("a view has more than " + std::to_string(kMaxRank) +
                                    " dimensions that cannot be merged");
      shape[rank] = dims[d];
      for (int k = 0; k < N; ++k) strides[k][rank] = (*dim_strides[k])[d];
      ++rank;
    }
    if (rank == 0) {
      shape[0] = 1;
      for (int k = 0; k < N; ++k) strides[k][0] = 1;
      rank = 1;
    }
  }

  // body(count, offsets) for each innermost row, or part of one, of the elements begin .. end in C
  // order.
  template <class Body>
  void rows(int64_t begin, int64_t end, Body&& body) const {
    std::array<int64_t, kMaxRank> index{};
    std::array<int64_t, N> offsets{};
    int64_t rest = begin;
    for (int d = 0; d < rank; ++d) {
      index[d] = rest % shape[d];
      rest /= shape[d];
      for (int k = 0; k < N; ++k) offsets[k] += index[d] * strides[k][d];
    }
    for (int64_t at = begin; at < end;) {
      const int64_t count = std::min(shape[0] - index[0], end - at);
      body(count, offsets);
      at += count;
      if (at >= end) return;
      for (int k = 0; k < N; ++k) offsets[k] -= index[0] * strides[k][0];
      index[0] = 0;
      for (int d = 1; d < rank; ++d) {
        for (int k = 0; k < N; ++k) offsets[k] += strides[k][d];
        if (++index[d] < shape[d]) break;
        for (int k = 0; k < N; ++k) offsets[k] -= shape[d] * strides[k][d];
        index[d] = 0;
      }
    }
  }

  // The dimension of array k's unit stride where going by tiles is worth it: it is not the
  // innermost, and both are long, the innermost at least `least`. 0: there is none.
  int across(int k, int64_t least = 8) const {
    if (strides[k][0] == 0 || strides[k][0] == 1 || shape[0] < least) return 0;
    for (int d = 1; d < rank; ++d)
      if (strides[k][d] == 1 && shape[d] >= 8) return d;
    return 0;
  }

  // body(offsets, rows, cols) for tiles of dimensions `across` and 0, of which all arrays
  // use whole cache lines; about `grain` elements a task.
  template <class Body>
  void tiles(int across, int64_t grain, Body&& body) const {
    const int64_t bands = ceil_div(shape[across], kTileRows), cols = shape[0];
    const auto band = [&](int64_t task) {
      const int64_t row = task % bands * kTileRows, rows = std::min(kTileRows, shape[across] - row);
      std::array<int64_t, N> offsets{};
      for (int k = 0; k < N; ++k) offsets[k] = row * strides[k][across];
      int64_t rest = task / bands;
      for (int d = 1; d < rank; ++d) {
        if (d == across) continue;
        for (int k = 0; k < N; ++k) offsets[k] += rest % shape[d] * strides[k][d];
        rest /= shape[d];
      }
      for (int64_t col = 0; col < cols; col += kTileCols) {
        body(offsets, rows, std::min(kTileCols, cols - col));
        for (int k = 0; k < N; ++k) offsets[k] += kTileCols * strides[k][0];
      }
    };
    const int64_t tasks = size / (shape[across] * cols) * bands;
    grain = std::max<int64_t>(1, grain / (kTileRows * cols));
    parallel_ranges(tasks, grain, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) band(task);
    });
  }
};

}  // namespace needle::cpu
