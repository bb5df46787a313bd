// The inner loops of needle's products (gemm_cpu.cc): kRows rows of A times kCols packed columns of
// B, whose sums stay in registers. Of a loop, P is what the elements are that it reads, and k is
// counted in words of kWord such, kGroup words at a time. From kWide columns on, what it reads of A
// takes less time than what it multiplies.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "integers.h"
#include "simd_cpu.h"
#include "tiles_cpu.h"

#ifdef __SSE__
#include <xmmintrin.h>
#endif

namespace needle::cpu {

// The words along k in the order in which they are multiplied: runs of the same length, which begin
// at[i] elements from the first row of A. B's follow each other.
struct Runs {
  int64_t count, length;
  const int64_t* at;
};
inline constexpr int64_t kBegin = 0;
inline Runs one_run(int64_t length) { return {1, length, &kBegin}; }

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

// By vectors, each of which an element of A is multiplied with.
template <class P_>
struct VectorLoop {
  using P = P_;
  using T = accum_t<P>;
  struct Exact {};
  using Mode = std::conditional_t<std::is_same_v<T, float>, FlushSubnormals, Exact>;
  static constexpr int kWord = cpu::kWord<P>, kGroup = 1, kLane = kLanes<T>;
  static constexpr int kRows = kVectorRegisters >= 32 ? 12 : 6,
                       kCols = 2 * kLane;  // registers: 2 kRows sums, 2 of B, an A
  static constexpr int64_t kWide = 2 * kCols;
  static constexpr bool kAcross = true;    // reads rows that do not lie along memory, too
  static constexpr bool kByLines = false;  // reads as much of a row at once as a line of the cache
  static constexpr bool kHalves = false;   // two halves of the rows may lie anywhere
  using RowStride = int64_t;
  // How many of so many evenly spaced rows, and of what follows them, are worth reading at once.
  static int64_t at_once(int64_t left) { return left < kRows ? 0 : kRows; }

  // B as it is stored, its rows ld elements apart, which the first rows of A to be multiplied with
  // it pack on the way.
  struct Unpacked {
    const P* data;
    int64_t ld;
  };
  static constexpr bool kPacks = kWord == 1;

  // The first R of kRows rows of C and as many of a panel's columns as V vectors have, of which
  // rows x cols are there. The rows of A lie along memory, lda elements apart, or across it, a word
  // lda elements from the next. A panel that is packed on the way is whole.
  template <bool across, int R, int V, bool packs, class Out>
  static void micro(const Runs& runs, const P* a, int64_t lda,
                    std::conditional_t<packs, P, const P>* b, bool accumulate, Out* c, int64_t ldc,
                    int64_t rows, int64_t cols, Unpacked unpacked) {
    constexpr int64_t kAhead = 8 * kCols * kWord;  // panels of B come from L2 or beyond
    [[maybe_unused]] constexpr int64_t kRowsAhead = 12;
    for (int64_t i = 0; i < rows; ++i)
      for (int j = 0; j < V; ++j) __builtin_prefetch(c + i * ldc + j * kLane, 1);
    Vec<T> sum[R][V] = {};
    const int64_t* at = runs.at;
    // No run is empty, and there is one. g++ keeps floats' sums in registers if it knows that, and
    // pairs' (add_product is assembly there) if it does not.
    if (kWord == 1 && runs.count <= 0) __builtin_unreachable();
    for (int64_t left = runs.count; left > 0; --left) {
      const P* from = a + *at++;
      int64_t p = runs.length;
#pragma clang loop unroll(disable)  // it would run out of registers
      do {
        Words<P> words[V];
#pragma GCC unroll 2
        for (int j = 0; j < V; ++j) {
          if constexpr (packs) {
            __builtin_prefetch(unpacked.data + kRowsAhead * unpacked.ld + j * kLane);
            words[j] = load(unpacked.data + j * kLane);
            store(b + j * kLane, words[j]);
          } else {
            __builtin_prefetch(b + kAhead + j * kLane * kWord);
            words[j] = load_words(b + j * kLane * kWord);
          }
        }
        if constexpr (packs) unpacked.data += unpacked.ld;
#pragma GCC unroll 16
        for (int i = 0; i < R; ++i) {
          const P* x = from + i * (across ? kWord : lda);
#pragma GCC unroll 2
          for (int j = 0; j < V; ++j) sum[i][j] = add_product(sum[i][j], x, words[j]);
        }
        from += across ? lda : kWord;
        b += kCols * kWord;
      } while (--p > 0);
    }
    if (rows == R && cols == V * kLane) {
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
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < cols; ++j) {
        Out& to = c[i * ldc + j];
        to = Out(accumulate ? T(to) + edge[i][j] : edge[i][j]);
      }
  }

  // kRows rows of A, or fewer, times panels of B, whose columns are all of C's.
  template <bool across, bool packs = false, class Out>
  static void multiply_rows(int64_t rows, int64_t cols, const Runs& runs, const P* a, int64_t lda,
                            std::conditional_t<packs, P, const P>* b, bool accumulate, Out* c,
                            int64_t ldc, Unpacked unpacked = {}) {
    constexpr int kHalf = kRows / 2;
    for (int64_t j = 0; j < cols; j += kCols, b += runs.count * runs.length * kCols * kWord) {
      const int64_t left = std::min<int64_t>(kCols, cols - j);
      const auto part = rows > kHalf   ? left > kLane ? micro<across, kRows, 2, packs, Out>
                                                      : micro<across, kRows, 1, packs, Out>
                        : left > kLane ? micro<across, kHalf, 2, packs, Out>
                                       : micro<across, kHalf, 1, packs, Out>;
      part(runs, a, lda, b, accumulate, c + j, ldc, rows, left, unpacked);
      if constexpr (packs) unpacked.data += kCols;
    }
  }
};

// By the processor's tiles, where those are available().
struct TileLoop {
  using P = bfloat16;
  using Mode = tiles::Use;
  static constexpr int kWord = 2, kGroup = tiles::kSide, kRows = 2 * tiles::kSide, kCols = kRows;
  static constexpr int64_t kWide = 8 * kCols;
  static constexpr bool kAcross = false, kByLines = true, kHalves = true, kPacks = false;
  using RowStride = tiles::RowStride;
  static int64_t at_once(int64_t left) {
    constexpr int64_t kMost = kRows / 4;  // rows that are read, multiplied and left out
    return left < kRows / 2 ? 0 : left < kRows - kMost ? kRows / 2 : std::min<int64_t>(left, kRows);
  }

  // rows x cols of C from a panel of B.
  template <class Out>
  static void micro(const Runs& runs, const P* a, RowStride lda, const P* b, bool accumulate,
                    Out* c, int64_t ldc, int64_t rows, int64_t cols) {
    const int64_t height = round_up(rows, tiles::kSide), width = round_up(cols, tiles::kSide);
    const auto add_runs = [&](float* sums, int64_t ld) {
      for (int64_t i = 0; i < runs.count; ++i)
        tiles::gemm(height, width, runs.length, a + runs.at[i], lda,
                    b + i * runs.length * kCols * kWord, kCols, sums, ld, accumulate || i > 0);
    };
    if constexpr (std::is_same_v<Out, float>)
      if (rows == height && cols == width) return add_runs(c, ldc);
    alignas(64) float sums[kRows][kCols];
    if (accumulate)
      for (int64_t i = 0; i < rows; ++i) convert_run(c + i * ldc, cols, sums[i]);
    add_runs(sums[0], kCols);
    for (int64_t i = 0; i < rows; ++i)
      if constexpr (std::is_same_v<Out, bfloat16>)
        tiles::round_sums(sums[i], cols, c + i * ldc);
      else
        convert_run(sums[i], cols, c + i * ldc);
  }

  // kRows rows of A, or fewer, times panels of B, whose columns are all of C's.
  template <bool across, class Out>
  static void multiply_rows(int64_t rows, int64_t cols, const Runs& runs, const P* a, RowStride lda,
                            const P* b, bool accumulate, Out* c, int64_t ldc) {
    static_assert(!across);
    for (int64_t j = 0; j < cols; j += kCols, b += runs.count * runs.length * kCols * kWord) {
      const int64_t left = std::min<int64_t>(kCols, cols - j);
      micro(runs, a, lda, b, accumulate, c + j, ldc, rows, left);
    }
  }
};

}  // namespace needle::cpu
