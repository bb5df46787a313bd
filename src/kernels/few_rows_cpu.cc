#include "../common/few_rows_cpu.h"

#include <algorithm>

#include "../common/integers.h"
#include "../common/parallel.h"

namespace needle::cpu {
namespace {

constexpr int64_t kWidest = 2048;    // columns of a task
constexpr int64_t kCache = 512;      // columns whose sums stay in L1 for any number of rows
constexpr int64_t kParts = 8;        // tasks that keep a pool of usual size evenly busy
constexpr int64_t kPartDepth = 128;  // rows of B, below which adding a part's sums costs too much
constexpr int64_t kPartBytes = 128 << 10;  // of B, below which a task is not worth handing out
constexpr int64_t kSumsTask = 16 << 10;    // sums of parts, below which adding them is not either
constexpr int64_t kFactors = 512;          // columns of A that are brought in order at a time
constexpr int64_t kSetBytes = 2048;        // rows of B multiples of it apart share two sets of L1
constexpr int64_t kCopied = 128;           // columns of B copied at a time

// Elements from one row of sums to the next: rows of B often lie a power of two apart and share a
// set of the cache, which has no ways left for sums that do, too.
template <class A>
constexpr int64_t sums_stride(int64_t width) {
  constexpr int64_t kLine = 64 / sizeof(A);
  return round_up(width, kLine) + kLine;
}

// Rows of B that are multiplied with so many of A at a time: with many of A they are soon computed
// on and late to arrive, and few of B would have their sums moved too often. 64 for more
// than 8 rows won a little on Zen 4 and cost an LSTM 15 % on a Xeon (Skylake).
constexpr int64_t kDeepest = 32;
constexpr int64_t depth_for(int64_t rows) { return rows > 8 ? kDeepest : rows > 4 ? 16 : 8; }

// What a thread works in.
template <class A>
struct Scratch {
  A sums[kParts * kFewRows * sums_stride<A>(kWidest)];  // of the tasks of a product it began
  A factors[kFactors * kFewRows];
  alignas(64) A copy[kDeepest * kCopied];  // vectors of it lie in one line each
};

// sums (m, width) += x (depth, m) transposed times `depth` rows of b, fetching those at `next`
// meanwhile; m <= M. Rows of sums are whole vectors. Not inlined into those of larger M: g++ does
// not compile the loops of so large a function well.
template <int M, class A, class B, class T>
__attribute__((noinline)) void add_rows(int64_t m, int64_t depth, int64_t width, const A* x,
                                        const B* b, int64_t ldb, A* sums, int64_t ld_sums,
                                        const T* next, int64_t ld_next) {
  if constexpr (M > 1)
    if (m < M) return add_rows<M - 1>(m, depth, width, x, b, ldb, sums, ld_sums, next, ld_next);
  constexpr int kWide = M > 8 ? 1 : 2;     // vectors of a row of B at a time
  if (depth < 1) __builtin_unreachable();  // or g++ moves the sums to memory for a loop of none
  int64_t j = 0;
  // Inlined, or for a large M g++ keeps the sums in memory.
  const auto step = [&](auto vectors, const B* from, int64_t ld) __attribute__((always_inline)) {
    constexpr int W = vectors;
    Vec<A> sum[M][W];
    for (int i = 0; i < M; ++i)
      for (int w = 0; w < W; ++w) sum[i][w] = load(sums + i * ld_sums + j + w * kLanes<A>);
    const A* factor = x;
    const T* fetched = next + j;
#pragma GCC unroll 1
    for (int64_t p = 0; p < depth; ++p, factor += M, from += ld, fetched += ld_next) {
      __builtin_prefetch(fetched, 0, 2);  // to L2: L1 has no room for it yet
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
    step(std::integral_constant<int, kWide>{}, b + j, ldb);
  B filled_up[kDeepest * kLanes<A>];  // the last columns, as whole vectors
  for (; j < width; j += kLanes<A>) {
    const int64_t cols = width - j;
    const bool whole = cols >= kLanes<A>;
    for (int64_t p = 0; !whole && p < depth; ++p)
      store(filled_up + p * kLanes<A>, load(b + p * ldb + j, cols));
    step(std::integral_constant<int, 1>{}, whole ? b + j : filled_up, whole ? ldb : kLanes<A>);
  }
}

// sums (m, width) = a (m, k) times k rows of b. What a group of rows has read of b is in the cache
// for the next, or, where its rows would push each other out, in a copy.
template <class T, class A = accum_t<T>>
void multiply(int64_t m, int64_t k, int64_t width, const T* a, int64_t a_row, int64_t a_col,
              const T* b, int64_t ldb, A* sums, int64_t ld_sums) {
  Scratch<A>& scratch = of_this_thread<Scratch<A>>();
  const int64_t groups = ceil_div(m, kRowGroup), group = ceil_div(m, groups);  // of equal size
  const bool copies = groups > 1 && ldb * int64_t(sizeof(T)) % kSetBytes == 0;
  const int64_t rows = copies ? kDeepest : depth_for(group);
  const int64_t piece = copies ? kCopied : std::max(kCache, round_up(kWidest / m, kLanes<A>));
  for (int64_t i = 0; i < m; ++i) std::fill_n(sums + i * ld_sums, round_up(width, kLanes<A>), A(0));
  for (int64_t p0 = 0; p0 < k; p0 += kFactors) {
    const int64_t deep = std::min(kFactors, k - p0);
    for (int64_t i0 = 0; i0 < m; i0 += group)  // what meets one row of B in line
      for (int64_t i = i0, M = std::min(group, m - i0); i < i0 + M; ++i)
        for (int64_t p = 0; p < deep; ++p)
          scratch.factors[i0 * deep + p * M + i - i0] = A(a[i * a_row + (p0 + p) * a_col]);
    for (int64_t j = 0; j < width; j += piece)
      for (int64_t p = 0; p < deep; p += rows) {
        const int64_t depth = std::min(rows, deep - p), cols = std::min(piece, width - j);
        const T* const from = b + (p0 + p) * ldb + j;
        for (int64_t q = 0; copies && q < depth; ++q)
          convert_run(from + q * ldb, cols, scratch.copy + q * kCopied);
        for (int64_t i = 0; i < m; i += group) {
          const int64_t M = std::min(group, m - i);
          const A* const x = scratch.factors + i * deep + p * M;
          A* const to = sums + i * ld_sums + j;
          const T* const next = from + rows * ldb;
          if (copies)
            add_rows<kRowGroup>(M, depth, cols, x, scratch.copy, kCopied, to, ld_sums, next, ldb);
          else
            add_rows<kRowGroup>(M, depth, cols, x, from, ldb, to, ld_sums, next, ldb);
        }
      }
  }
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
  A* const sums = of_this_thread<Scratch<A>>().sums;  // (tasks, m, stride)
  const int64_t task_bytes = width * depth * int64_t(sizeof(T));

  // Row i of C, in a strip, from the sums of its parts.
  const auto finish = [&](int64_t i, int64_t strip, const A* first) {
    const int64_t j0 = strip * width, cols = std::min(width, n - j0);
    const A* const from = first + i * stride;
    Out* const to = c + i * n + j0;
    for_vectors<A>(cols, [&](int64_t j, auto... lanes) {
      Vec<A> sum = load(from + j, lanes...);
      for (int64_t part = 1; part < down; ++part)
        sum += load(from + part * m * stride + j, lanes...);
      store(to + j, accumulate ? load(to + j, lanes...) + sum : sum, lanes...);
    });
  };
  parallel_ranges(
      across * down, std::max<int64_t>(1, kPartBytes / (task_bytes + 1)),
      [&](int64_t begin, int64_t end) {
        for (int64_t task = begin; task < end; ++task) {
          const int64_t strip = task / down, j0 = strip * width, p0 = task % down * depth;
          A* const mine = down > 1 ? sums + task * m * stride : of_this_thread<Scratch<A>>().sums;
          multiply(m, std::min(depth, k - p0), std::min(width, n - j0), a + p0 * a_col, a_row,
                   a_col, b + p0 * ldb + j0, ldb, mine, stride);
          for (int64_t i = 0; down == 1 && i < m; ++i) finish(i, strip, mine);
        }
      });
  if (down > 1)
    parallel_ranges(m, kSumsTask / (n * down) + 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        for (int64_t strip = 0; strip < across; ++strip)
          finish(i, strip, sums + strip * down * m * stride);
    });
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
