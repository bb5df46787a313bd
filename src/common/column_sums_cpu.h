// Sums over the rows of (rows, cols), one or more of each column.
#pragma once

#include <algorithm>

#include "backend.h"
#include "parallel.h"
#include "simd_cpu.h"

namespace needle::cpu {

// The first `width` of partials (kColumnPartials, width) = the sums to which add(begin, end, sums)
// adds rows begin .. end - 1. They go through groups of rows, fixed by the number of rows alone,
// and are added up in order: the same bits for any number of threads.
template <class A, class F>
void column_sums(int64_t rows, int64_t width, A* partials, F&& add) {
  constexpr int64_t kTask = 16 << 10;  // sums and summands that are worth handing out
  // Of 8 rows at least: a group's sums are as much to clear and to add up as a row is.
  const int64_t groups = std::clamp<int64_t>(ceil_div(rows, 8), 1, kColumnPartials);
  const int64_t of_group = ceil_div(rows, groups) * width;
  parallel_ranges(groups, kTask / (of_group + 1) + 1, [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) {
      A* const sums = partials + group * width;
      std::fill_n(sums, width, A(0));
      add(group * rows / groups, (group + 1) * rows / groups, sums);
    }
  });
  if (groups == 1) return;
  parallel_ranges(width, kTask / groups, [&](int64_t begin, int64_t end) {
    for_vectors<A>(end - begin, [&](int64_t i, auto... n) {
      A* const to = partials + begin + i;
      Vec<A> sum = load(to, n...);
      for (int64_t group = 1; group < groups; ++group) sum += load(to + group * width, n...);
      store(to, sum, n...);
    });
  });
}

}  // namespace needle::cpu
