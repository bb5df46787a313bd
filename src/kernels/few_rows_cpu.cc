#include "../common/few_rows_cpu.h"

#include <algorithm>
#include <cmath>

#include "../common/integers.h"
#include "../common/parallel.h"
#include "../common/simd_cpu.h"

namespace needle::cpu {
namespace {

constexpr int kGroup = 8;          // rows of A whose sums stay in registers
constexpr int64_t kDepth = 8;      // rows of B taken at a time, so that sums are seldom moved
constexpr int64_t kWidest = 2048;  // columns of a task
constexpr int64_t kCache = 512;    // columns whose sums stay in L1 for any number of rows
constexpr int64_t kParts = 8;      // tasks that keep a pool of usual size evenly busy
constexpr int64_t kPartBytes = 128 << 10;  // of B, below which a task is not worth handing out

// sums (M, width) += x (M, depth) times `depth` rows of b, fetching the rows after them meanwhile.
template <int M, class T, class A = accum_t<T>>
NEEDLE_INLINE void add_rows(int64_t depth, int64_t width, const A* x, const T* b, int64_t ldb,
                            A* sums, int64_t ld_sums) {
  const auto step = [&](int64_t j, int64_t rows) {
    Vec<A> sum[M];
    for (int i = 0; i < M; ++i) sum[i] = load(sums + i * ld_sums + j);
#pragma GCC unroll 8
    for (int64_t p = 0; p < rows; ++p) {
      __builtin_prefetch(b + (p + kDepth) * ldb + j);
      const Vec<A> row = load(b + p * ldb + j);
      for (int i = 0; i < M; ++i) sum[i] += x[i * kDepth + p] * row;
    }
    for (int i = 0; i < M; ++i) store(sums + i * ld_sums + j, sum[i]);
  };
  int64_t j = 0;
  for (; j + kLanes<A> <= width; j += kLanes<A>) depth == kDepth ? step(j, kDepth) : step(j, depth);
  for (; j < width; ++j)
    for (int i = 0; i < M; ++i)
      for (int64_t p = 0; p < depth; ++p)
        sums[i * ld_sums + j] =
            std::fma(x[i * kDepth + p], A(b[p * ldb + j]), sums[i * ld_sums + j]);
}

// The same for the first M or fewer of `m` rows of A, which begin at a.
template <int M, class T, class A = accum_t<T>>
void add_group(int64_t m, int64_t depth, int64_t width, const T* a, int64_t a_row, int64_t a_col,
               const T* b, int64_t ldb, A* sums, int64_t ld_sums) {
  if constexpr (M > 1)
    if (m < M) return add_group<M - 1>(m, depth, width, a, a_row, a_col, b, ldb, sums, ld_sums);
  A x[M * kDepth];
  for (int i = 0; i < M; ++i)
    for (int64_t q = 0; q < depth; ++q) x[i * kDepth + q] = A(a[i * a_row + q * a_col]);
  add_rows<M>(depth, width, x, b, ldb, sums, ld_sums);
}

// sums (m, width) = a (m, k) times k rows of b. What a group of rows has read of b is in the cache
// for the next.
template <class T, class A = accum_t<T>>
void multiply(int64_t m, int64_t k, int64_t width, const T* a, int64_t a_row, int64_t a_col,
              const T* b, int64_t ldb, A* sums, int64_t ld_sums) {
  const int64_t piece = std::max(kCache, kWidest / m);
  for (int64_t i = 0; i < m; ++i) std::fill_n(sums + i * ld_sums, width, A(0));
  for (int64_t j = 0; j < width; j += piece)
    for (int64_t p = 0; p < k; p += kDepth)
      for (int64_t i = 0; i < m; i += kGroup)
        add_group<kGroup>(m - i, std::min(kDepth, k - p), std::min(piece, width - j),
                          a + i * a_row + p * a_col, a_row, a_col, b + p * ldb + j, ldb,
                          sums + i * ld_sums + j, ld_sums);
}

// The parts' sums of the product that the calling thread is at.
template <class A>
struct PartialSums {
  A sums[kParts * kFewRows * kWidest];
};
template <class A>
A* partial_sums() {
  return of_this_thread<PartialSums<A>>().sums;
}

}  // namespace

// A narrow B is cut into runs of rows, which are contiguous memory, and the sums of the parts added
// in their order; a wide one into strips of columns. The cut depends on k and n alone.
template <class T, class Out>
void few_rows_gemm(int64_t m, int64_t n, int64_t k, const T* a, int64_t a_row, int64_t a_col,
                   const T* b, int64_t ldb, bool accumulate, Out* c) {
  using A = accum_t<T>;
  const int64_t strips = ceil_div(n, kWidest);
  const int64_t worth = n * k * int64_t(sizeof(T)) / kPartBytes;
  const int64_t parts = std::clamp<int64_t>(std::min(worth, kParts / strips), 1, kParts);
  const int64_t width = parts > 1 ? ceil_div(n, strips) : std::min<int64_t>(n, kWidest / 2);
  const int64_t depth = round_up(ceil_div(k, parts), kDepth);
  const int64_t across = ceil_div(n, width), down = ceil_div(k, depth);
  A* const sums = partial_sums<A>();  // (tasks, m, width)
  const int64_t task_bytes = width * depth * int64_t(sizeof(T));

  const auto finish = [&](int64_t strip, const A* first, int64_t count) {
    const int64_t j0 = strip * width, cols = std::min(width, n - j0);
    for (int64_t i = 0; i < m; ++i) {
      const A* const from = first + i * width;
      Out* const to = c + i * n + j0;
      for_vectors<A>(cols, [&](int64_t j, auto... lanes) {
        Vec<A> sum = load(from + j, lanes...);
        for (int64_t part = 1; part < count; ++part)
          sum += load(from + part * m * width + j, lanes...);
        store(to + j, accumulate ? load(to + j, lanes...) + sum : sum, lanes...);
      });
    }
  };
  parallel_ranges(across * down, std::max<int64_t>(1, kPartBytes / (task_bytes + 1)),
                  [&](int64_t begin, int64_t end) {
                    for (int64_t task = begin; task < end; ++task) {
                      const int64_t strip = task / down, j0 = strip * width,
                                    p0 = task % down * depth;
                      A* const mine = down > 1 ? sums + task * m * width : partial_sums<A>();
                      multiply(m, std::min(depth, k - p0), std::min(width, n - j0), a + p0 * a_col,
                               a_row, a_col, b + p0 * ldb + j0, ldb, mine, width);
                      if (down == 1) finish(strip, mine, 1);
                    }
                  });
  for (int64_t strip = 0; down > 1 && strip < across; ++strip)
    finish(strip, sums + strip * down * m * width, down);
}

#define INSTANTIATE(T, Out)                                                                    \
  template void few_rows_gemm(int64_t, int64_t, int64_t, const T*, int64_t, int64_t, const T*, \
                              int64_t, bool, Out*);
INSTANTIATE(float, float)
INSTANTIATE(double, double)
INSTANTIATE(float16, float16)
INSTANTIATE(float16, float)
INSTANTIATE(bfloat16, bfloat16)
INSTANTIATE(bfloat16, float)
#undef INSTANTIATE

}  // namespace needle::cpu
