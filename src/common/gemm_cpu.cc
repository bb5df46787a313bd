// needle's own product. The inner loop multiplies kRows rows of A with kCols columns of B. Columns
// are packed into panels that it reads in order; rows are read where they lie, or, where that would
// be slow, from panels that all threads pack once. Each task packs a strip of B that stays in its
// core's L2 and multiplies the rows of A with it, so that some threads wait for memory while others
// compute, and so that B is packed once and not, as a BLAS called per tile would, once per tile.
//
// 16-bit floats become float as they are packed, and are rounded once, when their sum is complete.
// Where the processor multiplies pairs of bfloat16 (multiplies_pairs), they stay as they are: k
// goes by words of two elements then.
//
// Each element of C is a chain of multiply-adds in ascending k, one chain per depth of k, and
// depths depend on k alone: neither threads nor tasks change a bit.
#include "gemm_cpu.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <limits>
#include <type_traits>

#include "integers.h"
#include "lane_gemm_cpu.h"
#include "parallel.h"

#ifdef NEEDLE_OPENBLAS
#include <cblas.h>
#endif
#ifdef __SSE__
#include <xmmintrin.h>
#endif

namespace needle::cpu {
namespace {

// Subnormal numbers count as zero inside a product: processors are slow at them, and the gradients
// of a confident softmax are full of them.
struct FlushSubnormals {
#ifdef __SSE__
  static constexpr unsigned kFlushToZero = 0x8000, kDenormalsAreZero = 0x0040;
  unsigned before = _mm_getcsr();
  FlushSubnormals() { _mm_setcsr(before | kFlushToZero | kDenormalsAreZero); }
  ~FlushSubnormals() { _mm_setcsr(before); }
#endif
};

constexpr int kRows = kVectorRegisters >= 32 ? 12 : 6;

// to = from, of the same type or widened.
template <class From, class T>
void copy_row(const From* from, int64_t n, T* to) {
  if constexpr (std::is_same_v<From, T>)
    std::memcpy(to, from, size_t(n) * sizeof(T));
  else
    for_vectors<T>(
        n, [&](int64_t i, auto... lanes) { store(to + i, load(from + i, lanes...), lanes...); });
}

// A and B are stored as In, C as Out; the inner loop reads words of P, which is In or float, and
// sums in T. Elements of a word follow each other in k.
template <class In, class Out, class P = accum_t<In>>
struct Own {
  using T = accum_t<In>;
  static constexpr bool kReadable = std::is_same_v<In, P>;  // by the inner loop, where it lies
  static constexpr int kWord = cpu::kWord<P>;
  static constexpr int kLane = kLanes<T>,
                       kCols = 2 * kLane;  // registers: 2 kRows sums, 2 of B, an A
  // Packed rows of A stay in the last-level cache, a strip of B in L2. Depth and strip in words.
  static constexpr int64_t kDepth = 4096 / sizeof(T), kM = 1032, kStrip = (512 << 10) / sizeof(T);
  static constexpr int64_t kSummed = 1024;  // columns of C that are summed before they are rounded
  static constexpr int64_t kMinRows = 96, kMinCols = 2 * kCols;  // of a task
  static constexpr int64_t kPacked = 4 * kRows;                  // rows of A a task packs
  static_assert(kM % kRows == 0 && kStrip >= kMinCols * kDepth);
  // Words of a row in a panel of A; the excess keeps a panel's rows in different sets of the cache.
  static constexpr int64_t kStride = kDepth + kLane;

  struct Workspace {
    alignas(64) std::byte panels[kM * kStride * sizeof(T)], strip[kStrip * sizeof(T)];
    T sums[kM * kSummed];
  };
  static auto& workspace() { return of_this_thread<typename Own<T, T>::Workspace>(); }

  struct Exact {};
  using Mode = std::conditional_t<std::is_same_v<T, float>, FlushSubnormals, Exact>;

  // Rows that lie a multiple of this apart share a set of the first cache, which has fewer ways
  // than kRows.
  static constexpr int64_t kSets = 4096 / sizeof(P);

  // Panels of Width columns, those beyond `cols` zero: word (p, j) of a panel at [p][j], and
  // `distance` words from a panel to the next. Rows are read across all panels at once: memory
  // gives what lies side by side the fastest.
  template <int Width>
  static void pack_columns(int64_t k, int64_t cols, const In* from, int64_t ld, P* to,
                           int64_t distance) {
    const int64_t whole = cols / Width, rest = cols % Width;
    distance *= kWord;
    if (rest > 0) std::fill_n(to + whole * distance, Width * round_up(k, kWord), P(0.f));
    constexpr int64_t kAhead = 6;  // rows, each on a page of its own, which hardware stops at
    for (int64_t p = 0; p < k; p += kWord, from += kWord * ld, to += kWord * Width) {
      if (p + kAhead < k)
        for (int w = 0; w < kWord; ++w)
          for (int64_t j = 0; j < cols; j += kLane)
            __builtin_prefetch(from + (kAhead + w) * ld + j);
      if constexpr (kWord == 1) {
        for (int64_t i = 0; i < whole; ++i) copy_row(from + i * Width, Width, to + i * distance);
        if (rest > 0) std::copy_n(from + whole * Width, rest, to + whole * distance);
      } else {
        const bool both = p + 1 < k;
        for (int64_t i = 0; i < whole; ++i)
          pair_rows(from + i * Width, ld, both, Width, to + i * distance);
        if (rest > 0) pair_rows(from + whole * Width, ld, both, rest, to + whole * distance);
      }
    }
  }

  // Words of n elements of a row and of those below them, or zeros.
  static void pair_rows(const In* from, int64_t ld, bool both, int64_t n, P* to) {
    int64_t j = 0;
    for (; j + kLane <= n; j += kLane) {
      HalfBits upper, lower = {};
      std::memcpy(&upper, from + j, sizeof upper);
      if (both) std::memcpy(&lower, from + ld + j, sizeof lower);
      const WordBits words =
          __builtin_convertvector(upper, WordBits) | __builtin_convertvector(lower, WordBits) << 16;
      std::memcpy(to + j * kWord, &words, sizeof words);
    }
    for (; j < n; ++j) {
      to[j * kWord] = from[j];
      to[j * kWord + 1] = both ? from[ld + j] : P(0.f);
    }
  }

  // Panels of kRows rows, kRows * kStride words each, those beyond `rows` zero: word (i, p) of a
  // panel at [i][p], or at [p][i] when ta, so that each is a copy in order of memory.
  static void pack_a(bool ta, int64_t rows, int64_t k, const In* a, int64_t lda, P* to) {
    if (ta) return pack_columns<kRows>(k, rows, a, lda, to, kRows * kStride);
    const int64_t whole = round_up(k, kWord);
    for (int64_t i = 0; i < round_up(rows, kRows); ++i, a += lda, to += kStride * kWord) {
      if (i < rows) copy_row(a, k, to);
      std::fill(to + (i < rows ? k : 0), to + whole, P(0.f));
    }
  }

  // Panels of kCols columns, those beyond `cols` zero: word (p, j) of a panel at [p][j].
  static void pack_b(bool tb, int64_t k, int64_t cols, const In* b, int64_t ldb, P* to) {
    const int64_t words = ceil_div(k, kWord);
    if (!tb) return pack_columns<kCols>(k, cols, b, ldb, to, words * kCols);
    if (cols % kCols)
      std::fill_n(to + cols / kCols * kCols * words * kWord, kCols * words * kWord, P(0.f));
    for (int64_t j = 0; j < cols; j += kCols) {
      const int64_t there = std::min<int64_t>(kCols, cols - j);
      if constexpr (kWord == 1)
        transpose_tile(b + j * ldb, ldb, there, k, to + j * k, kCols);
      else
        transpose_pairs(b + j * ldb, ldb, there, k, to + j * words * kWord, kCols);
    }
  }

  // kRows x kCols of C, of which rows x cols are there; k is in words.
  template <bool ta>
  static void micro(int64_t k, const P* a, int64_t lda, const P* b, bool accumulate, Out* c,
                    int64_t ldc, int64_t rows, int64_t cols) {
    constexpr int64_t kAhead = 8 * kCols * kWord;  // panels of B come from L2 or beyond
    for (int64_t i = 0; i < rows; ++i)
      for (int j = 0; j < 2; ++j) __builtin_prefetch(c + i * ldc + j * kLane, 1);
    Vec<T> sum[kRows][2] = {};
#pragma clang loop unroll(disable)  // it would run out of registers
    for (int64_t p = 0; p < k; ++p, b += kCols * kWord) {
      __builtin_prefetch(b + kAhead);
      __builtin_prefetch(b + kAhead + kLane * kWord);
      const Words<P> b0 = load_words(b), b1 = load_words(b + kLane * kWord);
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i) {
        const P* x = a + (ta ? (p * kRows + i) * kWord : i * lda + p * kWord);
        sum[i][0] = add_product(sum[i][0], x, b0);
        sum[i][1] = add_product(sum[i][1], x, b1);
      }
    }
    if (rows == kRows && cols == kCols) {
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i)
        for (int j = 0; j < 2; ++j) {
          Out* to = c + i * ldc + j * kLane;
          store(to, accumulate ? load(to) + sum[i][j] : sum[i][j]);
        }
      return;
    }
    T edge[kRows][kCols];
    for (int i = 0; i < kRows; ++i)
      for (int j = 0; j < 2; ++j) store(&edge[i][j * kLane], sum[i][j]);
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < cols; ++j)
        c[i * ldc + j] = Out(accumulate ? T(c[i * ldc + j]) + edge[i][j] : edge[i][j]);
  }

  // C (rows, n) from rows of A and all columns of B, depth deep.
  static void multiply(bool ta, bool tb, int64_t rows, int64_t n, int64_t depth, const In* a,
                       int64_t lda, const In* b, int64_t ldb, bool accumulate, Out* c,
                       int64_t ldc) {
    P* const panels = reinterpret_cast<P*>(workspace().panels);
    const int64_t words = ceil_div(depth, kWord);
    const bool as_they_lie = kReadable && !ta && lda % kSets != 0 && depth % kWord == 0;
    const int64_t in_place = as_they_lie ? rows / kRows * kRows : 0;  // rows
    parallel_for(ceil_div(rows - in_place, kPacked), [&](int64_t task) {
      [[maybe_unused]] const Mode mode;
      const int64_t i = in_place + task * kPacked;
      pack_a(ta, std::min(kPacked, rows - i), depth, a + (ta ? i : i * lda), lda,
             panels + i * kStride * kWord);
    });

    // Four tasks per thread, for cores that are not equally fast, by splitting the columns; rows,
    // for which B is packed again, are split only where that leaves less than two.
    const int64_t threads = num_threads();
    const int64_t width = std::clamp(round_up(ceil_div(n, 4 * threads), kCols), kMinCols,
                                     kStrip / words / kCols * kCols);
    const int64_t strips = ceil_div(n, width);
    const int64_t groups = std::min(ceil_div(rows, kMinRows), ceil_div(2 * threads, strips));
    const int64_t height = round_up(ceil_div(rows, groups), kRows);
    parallel_for(strips * ceil_div(rows, height), [&](int64_t task) {
      [[maybe_unused]] const Mode mode;
      const int64_t j0 = task % strips * width, cols = std::min(width, n - j0);
      const int64_t i0 = task / strips * height, i1 = std::min(rows, i0 + height);
      P* const strip = reinterpret_cast<P*>(workspace().strip);
      pack_b(tb, depth, cols, b + (tb ? j0 * ldb : j0), ldb, strip);
      for (int64_t i = i0; i < i1; i += kRows) {
        const P* from = panels + i * kStride * kWord;
        if constexpr (kReadable)
          if (i < in_place) from = a + i * lda;
        for (int64_t j = 0; j < cols; j += kCols)
          (ta ? micro<true>
              : micro<false>)(words, from, i < in_place ? lda : kStride * kWord,
                              strip + j * words * kWord, accumulate, c + i * ldc + j0 + j, ldc,
                              std::min<int64_t>(kRows, i1 - i), std::min<int64_t>(kCols, cols - j));
      }
    });
  }

  static void gemm(bool ta, bool tb, int64_t m, int64_t n, int64_t k, const In* a, int64_t lda,
                   const In* b, int64_t ldb, bool accumulate, Out* c, int64_t ldc) {
    // Depths of equal size, of whole words.
    const int64_t even = round_up(ceil_div(k, ceil_div(k, kDepth * kWord)), kWord);
    const auto all_depths = [&](auto kernel, int64_t i, int64_t j, int64_t cols, bool add, auto* to,
                                int64_t ld) {
      for (int64_t p = 0; p < k; p += even)
        kernel(ta, tb, std::min(kM, m - i), cols, std::min(even, k - p),
               a + (ta ? p * lda + i : i * lda + p), lda, b + (tb ? j * ldb + p : p * ldb + j), ldb,
               add || p > 0, to, ld);
    };
    if (std::is_same_v<Out, T> || even >= k) {
      for (int64_t i = 0; i < m; i += kM)
        all_depths(multiply, i, 0, n, accumulate, c + i * ldc, ldc);
      return;
    }
    T* const sums = workspace().sums;
    for (int64_t i = 0; i < m; i += kM)
      for (int64_t j = 0; j < n; j += kSummed) {
        const int64_t rows = std::min(kM, m - i), cols = std::min(kSummed, n - j);
        all_depths(Own<In, T, P>::multiply, i, j, cols, false, sums, kSummed);
        parallel_for(rows, [&](int64_t row) {
          const T* from = sums + row * kSummed;
          Out* to = c + (i + row) * ldc + j;
          for (int64_t x = 0; x < cols; ++x) to[x] = Out(accumulate ? T(to[x]) + from[x] : from[x]);
        });
      }
  }
};

#ifdef NEEDLE_OPENBLAS
// The pool hands out the parallelism; the library's own threads stay asleep.
[[maybe_unused]] const bool single_threaded = (scipy_openblas_set_num_threads(1), true);
CBLAS_TRANSPOSE flag(bool t) { return t ? CblasTrans : CblasNoTrans; }
template <class... Sizes>
bool fit_int(Sizes... sizes) {
  return ((sizes <= std::numeric_limits<int>::max()) && ...);
}
#endif

}  // namespace

template <class In, class Out>
void gemm_own(bool ta, bool tb, int64_t m, int64_t n, int64_t k, const In* a, int64_t lda,
              const In* b, int64_t ldb, bool accumulate, Out* c, int64_t ldc) {
  if constexpr (std::is_same_v<In, bfloat16>)
    if (multiplies_pairs())
      return Own<In, Out, In>::gemm(ta, tb, m, n, k, a, lda, b, ldb, accumulate, c, ldc);
  Own<In, Out>::gemm(ta, tb, m, n, k, a, lda, b, ldb, accumulate, c, ldc);
}

bool gemm_own_pays(int64_t m, int64_t n, int64_t k) {
// Compiled for any x86-64, needle's kernel has vectors of 128 bits, and OpenBLAS takes the
// processor's own.
#if defined(NEEDLE_OPENBLAS) && !defined(__AVX2__)
  (void)m, (void)n, (void)k;
  return false;
#else
  return m >= 4 * kRows && n >= 64 && k >= 64 && 2 * m * n * k >= (32 << 20);
#endif
}

template <class T>
void gemm_tile(bool ta, bool tb, int64_t m, int64_t n, int64_t k, const T* a, int64_t lda,
               const T* b, int64_t ldb, bool accumulate, T* c, int64_t ldc) {
#ifdef NEEDLE_OPENBLAS
  if (fit_int(m, n, k, lda, ldb, ldc)) {
    [[maybe_unused]] const typename Own<T, T>::Mode mode;
    const auto multiply = [&](auto function) {
      function(CblasRowMajor, flag(ta), flag(tb), int(m), int(n), int(k), T(1), a, int(lda), b,
               int(ldb), T(accumulate), c, int(ldc));
    };
    if constexpr (std::is_same_v<T, float>)
      return multiply(scipy_cblas_sgemm);
    else
      return multiply(scipy_cblas_dgemm);
  }
#endif
  gemm_own(ta, tb, m, n, k, a, lda, b, ldb, accumulate, c, ldc);
}

#define TILE(T)                                                                               \
  template void gemm_tile(bool, bool, int64_t, int64_t, int64_t, const T*, int64_t, const T*, \
                          int64_t, bool, T*, int64_t);
#define OWN(In, Out)                                                                           \
  template void gemm_own(bool, bool, int64_t, int64_t, int64_t, const In*, int64_t, const In*, \
                         int64_t, bool, Out*, int64_t);
TILE(float)
TILE(double)
OWN(float, float)
OWN(double, double)
OWN(float16, float16)
OWN(float16, float)
OWN(bfloat16, bfloat16)
OWN(bfloat16, float)
#undef TILE
#undef OWN

}  // namespace needle::cpu
