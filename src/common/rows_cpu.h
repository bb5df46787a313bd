// Passes over one contiguous row that softmax and cross entropy share, and how rows are dealt to
// the pool.
#pragma once

#include "parallel.h"
#include "simd_cpu.h"

namespace needle::cpu {

// body(row) for every row, in parallel, in tasks of at least a few thousand elements.
template <class F>
void for_rows(int64_t rows, int64_t cols, F&& body) {
  const int64_t grain = cols >= 8192 ? 1 : 8192 / (cols + 1) + 1;
  parallel_ranges(rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) body(r);
  });
}

// y[i] = f(vector of x at i) over a row; x may be y.
template <class T, class F>
NEEDLE_INLINE void map_row(const T* x, T* y, int64_t n, F&& f) {
  for_vectors<accum_t<T>>(
      n, [&](int64_t i, auto... lanes) { store(y + i, f(load(x + i, lanes...)), lanes...); });
}
template <class T, class F>
NEEDLE_INLINE void map_row(const T* a, const T* b, T* y, int64_t n, F&& f) {
  for_vectors<accum_t<T>>(n, [&](int64_t i, auto... lanes) {
    store(y + i, f(load(a + i, lanes...), load(b + i, lanes...)), lanes...);
  });
}

// The largest element that is not NaN; -inf if there is none. Four vectors at a time: one compare
// waits for the last.
template <class T, class A = accum_t<T>>
A row_max(const T* x, int64_t n) {
  const A lowest = -std::numeric_limits<A>::infinity();
  constexpr int L = kLanes<A>;
  const auto larger = [](Vec<A> a, Vec<A> b) { return b > a ? b : a; };
  Vec<A> m[4] = {broadcast(lowest), broadcast(lowest), broadcast(lowest), broadcast(lowest)};
  int64_t i = 0;
  for (; i + 4 * L <= n; i += 4 * L)
    for (int u = 0; u < 4; ++u) m[u] = larger(m[u], load(x + i + u * L));
  for_vectors<A>(
      n - i, [&](int64_t j) { m[0] = larger(m[0], load(x + i + j)); },
      [&](int64_t j, int64_t lanes) { m[1] = larger(m[1], load(x + i + j, lanes, lowest)); });
  return max_lanes<A>(larger(larger(m[0], m[1]), larger(m[2], m[3])));
}

// sum_i f(i-th vector), where f sees `fill` beyond the end and must give 0 for it.
// In parts: beside the sum of a long row each later element would be rounded away.
template <class T, class F, class A = accum_t<T>>
NEEDLE_INLINE A row_sum(const T* x, int64_t n, A fill, F&& f) {
  constexpr int L = kLanes<A>;
  constexpr int64_t kPart = int64_t{1} << 14;
  Vec<A> total{};
  for (int64_t begin = 0; begin < n; begin += kPart) {
    const int64_t end = std::min(n, begin + kPart);
    Vec<A> even{}, odd{};
    int64_t i = begin;
    for (; i + 2 * L <= end; i += 2 * L) {
      even += f(load(x + i));
      odd += f(load(x + i + L));
    }
    for_vectors<A>(
        end - i, [&](int64_t j) { even += f(load(x + i + j)); },
        [&](int64_t j, int64_t lanes) { odd += f(load(x + i + j, lanes, fill)); });
    total += even + odd;
  }
  return sum_lanes<A>(total);
}

// log sum exp x = shift + log_sum, in two parts: x - shift - log_sum has the digits that the
// rounded sum of a large shift and a small log_sum would lose.
template <class A>
struct LogSumExp {
  A shift, log_sum;
  A value() const { return shift + log_sum; }
};

// -inf for a row of -inf alone, NaN if any element is NaN.
template <class T, class A = accum_t<T>>
LogSumExp<A> row_logsumexp(const T* x, int64_t n) {
  const A infinity = std::numeric_limits<A>::infinity();
  const A max = row_max(x, n);
  const A shift = max == infinity || max == -infinity ? A(0) : max;
  const A sum = row_sum(x, n, -infinity, [&](Vec<A> v) { return vexp<A>(v - shift); });
  return {shift, std::log(sum)};
}

}  // namespace needle::cpu
