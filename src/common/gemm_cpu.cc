// needle's own product. The inner loop multiplies kRows rows of A with kCols columns of B. Columns
// are packed into panels that it reads in order; rows are read where they lie, or, where that would
// be slow, from panels that all threads pack once. Each task packs a strip of B that stays in its
// core's L2 and multiplies the rows of A with it, so that some threads wait for memory while others
// compute, and so that B is packed once and not, as a BLAS called per tile would, once per tile.
//
// An operand may also be the windows of an image, which are packed from it: as rows of A those that
// the inner loop is about to read, as B a strip.
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

#include "few_rows_cpu.h"
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

// An operand is lines, rows of op(A) or columns of op(B), of k elements; from(line, p) is the part
// of it that begins there.

// As it is stored: a line lies along memory, ld from its neighbours, or across it.
template <class In>
struct Stored {
  const In* data;
  int64_t ld;
  bool along;
  Stored from(int64_t line, int64_t p) const {
    return {data + (along ? line * ld + p : p * ld + line), ld, along};
  }
};

// Windows as lines of A, and their elements as lines of B.
template <class In>
struct WindowLines {
  const Windows<In>& windows;
  int64_t window, element;
  WindowLines from(int64_t line, int64_t p) const { return {windows, window + line, element + p}; }
};
template <class In>
struct ElementLines {
  const Windows<In>& windows;
  int64_t window, element;
  ElementLines from(int64_t line, int64_t p) const { return {windows, window + p, element + line}; }
};

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

  static constexpr int64_t kWindows = 16;  // whose elements are copied to a strip at a time

  struct Workspace {
    alignas(64) std::byte panels[kM * kStride * sizeof(T)], strip[kStrip * sizeof(T)];
    alignas(64) std::byte windows[kWindows * kStride * sizeof(T)];  // or kRows of them
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
        for (int64_t i = 0; i < whole; ++i) convert_run(from + i * Width, Width, to + i * distance);
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
  // panel at [i][p], or at [p][i] where rows do not lie along memory, so that each is a copy in
  // order of it.
  static void pack_a(int64_t rows, int64_t k, Stored<In> a, P* to) {
    if (!a.along) return pack_columns<kRows>(k, rows, a.data, a.ld, to, kRows * kStride);
    pack_rows(rows, k, to, [&](int64_t i, P* row) { convert_run(a.data + i * a.ld, k, row); });
  }
  static void pack_a(int64_t rows, int64_t k, WindowLines<In> a, P* to) {
    WindowReader<In> reader(a.windows, a.window, a.element, k);
    pack_rows(rows, k, to, [&](int64_t, P* row) { reader.next(row); });
  }
  template <class CopyRow>
  static void pack_rows(int64_t rows, int64_t k, P* to, CopyRow copy) {
    const int64_t whole = round_up(k, kWord);
    for (int64_t i = 0; i < round_up(rows, kRows); ++i, to += kStride * kWord) {
      if (i < rows) copy(i, to);
      std::fill(to + (i < rows ? k : 0), to + whole, P(0.f));
    }
  }

  // Panels of kCols columns, those beyond `cols` zero: word (p, j) of a panel at [p][j].
  static void pack_b(int64_t k, int64_t cols, ElementLines<In> b, P* to) {
    const int64_t words = ceil_div(k, kWord);
    In* const some = reinterpret_cast<In*>(workspace().windows);
    WindowReader<In> reader(b.windows, b.window, b.element, cols);
    for (int64_t p = 0; p < k; p += kWindows) {
      const int64_t count = std::min(kWindows, k - p);
      for (int64_t i = 0; i < count; ++i) reader.next(some + i * kStride);
      pack_columns<kCols>(count, cols, some, kStride, to + p * kCols, words * kCols);
    }
  }
  static void pack_b(int64_t k, int64_t cols, Stored<In> stored, P* to) {
    const int64_t words = ceil_div(k, kWord);
    const In* const b = stored.data;
    const int64_t ldb = stored.ld;
    if (!stored.along) return pack_columns<kCols>(k, cols, b, ldb, to, words * kCols);
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

  // The first R of kRows rows of C and as many of a panel's columns as V vectors have, of which
  // rows x cols are there; k is in words. Element (i, j) of C is c[i * ldc + j], or c[j * ldc + i]
  // when turned.
  template <bool ta, bool turned, int R, int V>
  static void micro(int64_t k, const P* a, int64_t lda, const P* b, bool accumulate, Out* c,
                    int64_t ldc, int64_t rows, int64_t cols) {
    constexpr int64_t kAhead = 8 * kCols * kWord;  // panels of B come from L2 or beyond
    for (int64_t i = 0; i < (turned ? 0 : rows); ++i)
      for (int j = 0; j < V; ++j) __builtin_prefetch(c + i * ldc + j * kLane, 1);
    Vec<T> sum[R][V] = {};
#pragma clang loop unroll(disable)  // it would run out of registers
    for (int64_t p = 0; p < k; ++p, b += kCols * kWord) {
      Words<P> words[V];
#pragma GCC unroll 2
      for (int j = 0; j < V; ++j) {
        __builtin_prefetch(b + kAhead + j * kLane * kWord);
        words[j] = load_words(b + j * kLane * kWord);
      }
#pragma GCC unroll 16
      for (int i = 0; i < R; ++i) {
        const P* x = a + (ta ? (p * kRows + i) * kWord : i * lda + p * kWord);
#pragma GCC unroll 2
        for (int j = 0; j < V; ++j) sum[i][j] = add_product(sum[i][j], x, words[j]);
      }
    }
    if (!turned && rows == R && cols == V * kLane) {
#pragma GCC unroll 16
      for (int i = 0; i < R; ++i)
        for (int j = 0; j < V; ++j) {
          Out* to = c + i * ldc + j * kLane;
          store(to, accumulate ? load(to) + sum[i][j] : sum[i][j]);
        }
      return;
    }
    T edge[R][V * kLane];
    for (int i = 0; i < R; ++i)
      for (int j = 0; j < V; ++j) store(&edge[i][j * kLane], sum[i][j]);
    for (int64_t outer = 0; outer < (turned ? cols : rows); ++outer)
      for (int64_t inner = 0; inner < (turned ? rows : cols); ++inner) {
        const T sum = turned ? edge[inner][outer] : edge[outer][inner];
        Out& to = c[outer * ldc + inner];
        to = Out(accumulate ? T(to) + sum : sum);
      }
  }

  // The one for so many rows and columns.
  template <bool ta, bool turned>
  static auto micro_for(int64_t rows, int64_t cols) {
    constexpr int kHalf = kRows / 2;
    if (rows > kHalf)
      return cols > kLane ? micro<ta, turned, kRows, 2> : micro<ta, turned, kRows, 1>;
    return cols > kLane ? micro<ta, turned, kHalf, 2> : micro<ta, turned, kHalf, 1>;
  }

  // Where elements of windows are the columns of B, C^T is wanted and written.
  template <class B>
  static constexpr bool is_turned = std::is_same_v<B, ElementLines<In>>;

  // The width of strips, at most `widest` and not much less, with which threads that are equally
  // fast are done with n columns the soonest: nine strips take two threads as long as ten.
  static int64_t even_width(int64_t n, int64_t widest) {
    const auto columns_of_a_thread = [&](int64_t width) {
      return ceil_div(ceil_div(n, width), int64_t(num_threads())) * width;
    };
    int64_t best = widest;
    for (int64_t width = widest - kCols; width >= std::max(kMinCols, widest / 2); width -= kCols)
      if (columns_of_a_thread(width) < columns_of_a_thread(best)) best = width;
    return best;
  }

  // C (rows, n) from rows of A and all columns of B, depth deep.
  template <class A, class B>
  static void multiply(int64_t rows, int64_t n, int64_t depth, A a, B b, bool accumulate, Out* c,
                       int64_t ldc) {
    constexpr bool kStored = std::is_same_v<A, Stored<In>>, kTurned = is_turned<B>;
    P* const panels = reinterpret_cast<P*>(workspace().panels);
    const int64_t words = ceil_div(depth, kWord), threads = num_threads();
    int64_t in_place = 0;  // rows
    bool across = false;
    if constexpr (kStored) {
      across = !a.along;
      if (kReadable && a.along && a.ld % kSets != 0 && depth % kWord == 0)
        in_place = rows / kRows * kRows;
      parallel_for(ceil_div(rows - in_place, kPacked), [&](int64_t task) {
        [[maybe_unused]] const Mode mode;
        const int64_t i = in_place + task * kPacked;
        pack_a(std::min(kPacked, rows - i), depth, a.from(i, 0), panels + i * kStride * kWord);
      });
    }

    // Four tasks per thread, for cores that are not equally fast, by splitting the columns; rows,
    // for which B is packed again, are split only where that leaves less than two. Windows are many
    // and are copied for each strip: they are split.
    const int64_t widest = std::is_same_v<B, Stored<In>>
                               ? kStrip / words / kCols * kCols
                               : std::min(kStrip / words, kDepth) / kCols * kCols;
    const int64_t tasks = (kStored ? 2 : 4) * threads;
    const int64_t width =
        kStored
            ? even_width(n, std::clamp(round_up(ceil_div(n, 4 * threads), kCols), kMinCols, widest))
            : std::min(round_up(n, kCols), widest);
    const int64_t strips = ceil_div(n, width);
    const int64_t groups = std::min(ceil_div(rows, kMinRows), ceil_div(tasks, strips));
    const int64_t height = round_up(ceil_div(rows, groups), kRows);
    parallel_for(strips * ceil_div(rows, height), [&](int64_t task) {
      [[maybe_unused]] const Mode mode;
      const int64_t j0 = task % strips * width, cols = std::min(width, n - j0);
      const int64_t i0 = task / strips * height, i1 = std::min(rows, i0 + height);
      P* const strip = reinterpret_cast<P*>(workspace().strip);
      pack_b(depth, cols, b.from(j0, 0), strip);
      for (int64_t i = i0; i < i1; i += kRows) {
        const int64_t there = std::min<int64_t>(kRows, i1 - i);
        const P* from = panels + i * kStride * kWord;
        int64_t ld = kStride * kWord;
        if constexpr (!kStored) {
          P* const some = reinterpret_cast<P*>(workspace().windows);
          pack_a(there, depth, a.from(i, 0), some);
          from = some;
        } else if constexpr (kReadable) {
          if (i < in_place) from = a.data + i * a.ld, ld = a.ld;
        }
        for (int64_t j = 0; j < cols; j += kCols) {
          const int64_t left = std::min<int64_t>(kCols, cols - j);
          const auto part = across ? micro_for<true, kTurned>(there, left)
                                   : micro_for<false, kTurned>(there, left);
          part(words, from, ld, strip + j * words * kWord, accumulate,
               c + (kTurned ? (j0 + j) * ldc + i : i * ldc + j0 + j), ldc, there, left);
        }
      }
    });
  }

  template <class A, class B>
  static void gemm(int64_t m, int64_t n, int64_t k, A a, B b, bool accumulate, Out* c,
                   int64_t ldc) {
    // Depths of equal size, of whole words.
    const int64_t even = round_up(ceil_div(k, ceil_div(k, kDepth * kWord)), kWord);
    const auto all_depths = [&](auto kernel, int64_t i, int64_t rows, int64_t j, int64_t cols,
                                bool add, auto* to, int64_t ld) {
      for (int64_t p = 0; p < k; p += even)
        kernel(rows, cols, std::min(even, k - p), a.from(i, p), b.from(j, p), add || p > 0, to, ld);
    };
    if (std::is_same_v<Out, T> || even >= k) {
      const int64_t most = std::is_same_v<A, Stored<In>> ? kM : m;
      for (int64_t i = 0; i < m; i += most)
        all_depths(multiply<A, B>, i, std::min(most, m - i), 0, n, accumulate,
                   c + (is_turned<B> ? i : i * ldc), ldc);
      return;
    }
    T* const sums = workspace().sums;
    for (int64_t i = 0; i < m; i += kM)
      for (int64_t j = 0; j < n; j += kSummed) {
        static_assert(!is_turned<B> || std::is_same_v<Out, T>);
        const int64_t rows = std::min(kM, m - i), cols = std::min(kSummed, n - j);
        all_depths(Own<In, T, P>::template multiply<A, B>, i, rows, j, cols, false, sums, kSummed);
        parallel_for(rows, [&](int64_t row) {
          const T* from = sums + row * kSummed;
          Out* to = c + (i + row) * ldc + j;
          for (int64_t x = 0; x < cols; ++x) to[x] = Out(accumulate ? T(to[x]) + from[x] : from[x]);
        });
      }
  }
};

template <class In, class Out, class A, class B>
void gemm_of(int64_t m, int64_t n, int64_t k, A a, B b, bool accumulate, Out* c, int64_t ldc) {
  if constexpr (std::is_same_v<In, bfloat16>)
    if (multiplies_pairs()) return Own<In, Out, In>::gemm(m, n, k, a, b, accumulate, c, ldc);
  Own<In, Out>::gemm(m, n, k, a, b, accumulate, c, ldc);
}

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
  gemm_of<In>(m, n, k, Stored<In>{a, lda, !ta}, Stored<In>{b, ldb, tb}, accumulate, c, ldc);
}

template <class T>
void gemm_windows(const Windows<T>& a, int64_t n, const T* b, T* c) {
  constexpr int64_t kDepth = 1024;
  const int64_t m = a.count(), k = a.elements();
  if (few_rows_pay<T>(m, n, k) && (sizeof(T) > 2 || k <= kDepth)) {
    struct Rows {
      T of[kFewRows * kDepth];
    };
    T* const rows = of_this_thread<Rows>().of;
    for (int64_t p = 0; p < k; p += kDepth) {
      const int64_t depth = std::min(kDepth, k - p);
      WindowReader<T> reader(a, 0, p, depth);
      for (int64_t i = 0; i < m; ++i) reader.next(rows + i * depth);
      few_rows_gemm(m, n, depth, rows, depth, 1, b + p * n, n, p > 0, c);
    }
    return;
  }
  gemm_of<T>(m, n, k, WindowLines<T>{a, 0, 0}, Stored<T>{b, n, false}, false, c, n);
}

template <class T>
void gemm_of_windows(const Windows<T>& a, int64_t first, int64_t count, int64_t n, const T* b,
                     bool accumulate, accum_t<T>* c) {
  gemm_of<T>(n, a.elements(), count, Stored<T>{b + first * n, n, false},
             ElementLines<T>{a, first, 0}, accumulate, c, n);
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
#define WINDOWS(T)                                                                            \
  template void gemm_windows(const Windows<T>&, int64_t, const T*, T*);                       \
  template void gemm_of_windows(const Windows<T>&, int64_t, int64_t, int64_t, const T*, bool, \
                                accum_t<T>*);
WINDOWS(float)
WINDOWS(double)
WINDOWS(float16)
WINDOWS(bfloat16)
OWN(float, float)
OWN(double, double)
OWN(float16, float16)
OWN(float16, float)
OWN(bfloat16, bfloat16)
OWN(bfloat16, float)
#undef TILE
#undef OWN
#undef WINDOWS

}  // namespace needle::cpu
