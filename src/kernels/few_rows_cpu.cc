#include "../common/few_rows_cpu.h"

#include <algorithm>
#include <cmath>

#include "../common/integers.h"
#include "../common/parallel.h"

namespace needle::cpu {
namespace {

constexpr int64_t kWidest = 2048;    // columns of a task
constexpr int64_t kCache = 512;      // columns whose sums stay in L1 for any number of rows
constexpr int64_t kParts = 8;        // tasks that keep a pool of usual size evenly busy
constexpr int64_t kPartDepth = 128;  // rows of B, below which adding a part's sums costs too much
constexpr int64_t kPartBytes = 128 << 10;  // of B, below which a task is not worth handing out

// Elements from one row of sums to the next: rows of B often lie a power of two apart and share a
// set of the cache, which has no ways left for sums that do, too.
template <class A>
constexpr int64_t sums_stride(int64_t width) {
  constexpr int64_t kLine = 64 / sizeof(A);
  return round_up(width, kLine) + kLine;
}

// Rows of B that are multiplied with so many of A at a time: with many of A they are soon computed
// on and late to arrive, and few of B would have their sums moved too often.
constexpr int64_t depth_for(int64_t rows) { return rows > 8 ? 32 : rows > 4 ? 16 : 8; }

// sums (M, width) += x (depth, M) transposed times `depth` rows of b, fetching the rows after them
// meanwhile.
template <int M, class T, class A = accum_t<T>>
NEEDLE_INLINE void add_rows(int64_t depth, int64_t width, const A* x, const T* b, int64_t ldb,
                            A* sums, int64_t ld_sums) {
  constexpr int kWide = M > 8 ? 1 : 2;  // vectors of a row of B at a time
  int64_t j = 0;
  const auto step = [&](auto vectors) {
    constexpr int W = vectors;
    Vec<A> sum[M][W];
    for (int i = 0; i < M; ++i)
      for (int w = 0; w < W; ++w) sum[i][w] = load(sums + i * ld_sums + j + w * kLanes<A>);
    const A* factor = x;
    const T* from = b + j;
#pragma GCC unroll 1
    for (int64_t p = 0; p < depth; ++p, factor += M, from += ldb) {
      __builtin_prefetch(from + depth_for(M) * ldb, 0, 2);  // to L2: L1 has no room for it yet
      Vec<A> row[W];
      for (int w = 0; w < W; ++w) row[w] = load(from + w * kLanes<A>);
      asm("" ::: "memory");  // or g++ would load a vector of B again for each of its uses
      for (int i = 0; i < M; ++i)
        for (int w = 0; w < W; ++w) sum[i][w] += factor[i] * row[w];
    }
    for (int i = 0; i < M; ++i)
      for (int w = 0; w < W; ++w) store(sums + i * ld_sums + j + w * kLanes<A>, sum[i][w]);
  };
  for (; j + kWide * kLanes<A> <= width; j += kWide * kLanes<A>)
    step(std::integral_constant<int, kWide>{});
  for (; j + kLanes<A> <= width; j += kLanes<A>) step(std::integral_constant<int, 1>{});
  for (; j < width; ++j)
    for (int i = 0; i < M; ++i)
      for (int64_t p = 0; p < depth; ++p)
        sums[i * ld_sums + j] = std::fma(x[p * M + i], A(b[p * ldb + j]), sums[i * ld_sums + j]);
}

// The same for the first M or fewer of `m` rows of A, which begin at a. Not inlined into those of
// larger M: g++ does not compile the loops of so large a function well.
template <int M, class T, class A = accum_t<T>>
__attribute__((noinline)) void add_group(int64_t m, int64_t depth, int64_t width, const T* a,
                                         int64_t a_row, int64_t a_col, const T* b, int64_t ldb,
                                         A* sums, int64_t ld_sums) {
  if constexpr (M > 1)
    if (m < M) return add_group<M - 1>(m, depth, width, a, a_row, a_col, b, ldb, sums, ld_sums);
  A x[depth_for(kRowGroup) * M];  // of the depth that the largest group asks for
  for (int64_t q = 0; q < depth; ++q)
    for (int i = 0; i < M; ++i) x[q * M + i] = A(a[i * a_row + q * a_col]);
  add_rows<M>(depth, width, x, b, ldb, sums, ld_sums);
}

// sums (m, width) = a (m, k) times k rows of b. What a group of rows has read of b is in the cache
// for the next.
template <class T, class A = accum_t<T>>
void multiply(int64_t m, int64_t k, int64_t width, const T* a, int64_t a_row, int64_t a_col,
              const T* b, int64_t ldb, A* sums, int64_t ld_sums) {
  // Whole vectors: without multiply-adds in the processor, columns that are left over round
  // differently.
  const int64_t piece = std::max(kCache, round_up(kWidest / m, kLanes<A>));
  const int64_t group = ceil_div(m, ceil_div(m, kRowGroup));  // groups of equal size
  const int64_t rows = depth_for(group);
  for (int64_t i = 0; i < m; ++i) std::fill_n(sums + i * ld_sums, width, A(0));
  for (int64_t j = 0; j < width; j += piece)
    for (int64_t p = 0; p < k; p += rows)
      for (int64_t i = 0; i < m; i += group)
        add_group<kRowGroup>(std::min(group, m - i), std::min(rows, k - p),
                             std::min(piece, width - j), a + i * a_row + p * a_col, a_row, a_col,
                             b + p * ldb + j, ldb, sums + i * ld_sums + j, ld_sums);
}

// The parts' sums of the product that the calling thread is at.
template <class A>
struct PartialSums {
  A sums[kParts * kFewRows * sums_stride<A>(kWidest)];
};
template <class A>
A* partial_sums() {
  return of_this_thread<PartialSums<A>>().sums;
}

}  // namespace

// A deep B is cut into runs of rows, which are contiguous memory, and the sums of the parts added
// in their order; a wide one into strips of columns. The cut depends on k and n alone.
template <class T, class Out>
void few_rows_gemm(int64_t m, int64_t n, int64_t k, const T* a, int64_t a_row, int64_t a_col,
                   const T* b, int64_t ldb, bool accumulate, Out* c) {
  using A = accum_t<T>;
  const int64_t worth = n * k * int64_t(sizeof(T)) / kPartBytes;
  const int64_t tasks = std::clamp<int64_t>(worth, 1, kParts), widest = ceil_div(n, kWidest);
  const int64_t parts = std::clamp<int64_t>(std::min(k / kPartDepth, tasks / widest), 1, kParts);
  const int64_t strips = std::max(parts > 1 ? widest : ceil_div(n, kWidest / 2), tasks / parts);
  const int64_t width = std::min(n, round_up(ceil_div(n, strips), 64 / int64_t(sizeof(T))));
  const int64_t depth = round_up(ceil_div(k, parts), depth_for(1));
  const int64_t across = ceil_div(n, width), down = ceil_div(k, depth);
  const int64_t stride = sums_stride<A>(width);
  A* const sums = partial_sums<A>();  // (tasks, m, stride)
  const int64_t task_bytes = width * depth * int64_t(sizeof(T));

  const auto finish = [&](int64_t strip, const A* first, int64_t count) {
    const int64_t j0 = strip * width, cols = std::min(width, n - j0);
    for (int64_t i = 0; i < m; ++i) {
      const A* const from = first + i * stride;
      Out* const to = c + i * n + j0;
      for_vectors<A>(cols, [&](int64_t j, auto... lanes) {
        Vec<A> sum = load(from + j, lanes...);
        for (int64_t part = 1; part < count; ++part)
          sum += load(from + part * m * stride + j, lanes...);
        store(to + j, accumulate ? load(to + j, lanes...) + sum : sum, lanes...);
      });
    }
  };
  parallel_ranges(across * down, std::max<int64_t>(1, kPartBytes / (task_bytes + 1)),
                  [&](int64_t begin, int64_t end) {
                    for (int64_t task = begin; task < end; ++task) {
                      const int64_t strip = task / down, j0 = strip * width,
                                    p0 = task % down * depth;
                      A* const mine = down > 1 ? sums + task * m * stride : partial_sums<A>();
                      multiply(m, std::min(depth, k - p0), std::min(width, n - j0), a + p0 * a_col,
                               a_row, a_col, b + p0 * ldb + j0, ldb, mine, stride);
                      if (down == 1) finish(strip, mine, 1);
                    }
                  });
  for (int64_t strip = 0; down > 1 && strip < across; ++strip)
    finish(strip, sums + strip * down * m * stride, down);
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
