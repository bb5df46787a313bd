#include "../common/lane_gemm_cpu.h"

#include <algorithm>
#include <type_traits>

#include "../common/integers.h"

namespace needle::cpu {
namespace {

// C (rows, vectors) in registers: rows x vectors sums, `vectors` of B and one element of A.
template <class P, int rows, int vectors, bool whole, class A = accum_t<P>>
NEEDLE_INLINE void lane_gemm_tile(int64_t k, const P* a, int64_t a_row, int64_t a_col, const P* b,
                                  int64_t ldb, A* c, int64_t ldc, bool accumulate, int64_t lanes) {
  static_assert(whole || vectors == 1, "only a single vector may be cut");
  constexpr int L = kLanes<A>;
  Vec<A> sum[rows][vectors];
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < vectors; ++v) {
      if (!accumulate)
        sum[r][v] = Vec<A>{};
      else if constexpr (whole)
        sum[r][v] = load(c + r * ldc + v * L);
      else
        sum[r][v] = load(c + r * ldc, lanes);
    }
  for (int64_t p = 0; p < k; ++p, a += a_col, b += ldb * kWord<P>) {
    Words<P> bv[vectors];
#pragma GCC unroll 16
    for (int v = 0; v < vectors; ++v) {
      if constexpr (whole)
        bv[v] = load_words(b + v * L * kWord<P>);
      else
        bv[v] = load(b, lanes);
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 16
      for (int v = 0; v < vectors; ++v) sum[r][v] = add_product(sum[r][v], a + r * a_row, bv[v]);
  }
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < vectors; ++v) {
      if constexpr (whole)
        store(c + r * ldc + v * L, sum[r][v]);
      else
        store(c + r * ldc, sum[r][v], lanes);
    }
}

// All m rows of a strip of `vectors` vectors.
template <class P, int vectors, bool whole, class A = accum_t<P>>
void lane_gemm_strip(int64_t m, int64_t k, const P* a, int64_t a_row, int64_t a_col, const P* b,
                     int64_t ldb, A* c, int64_t ldc, bool accumulate, int64_t lanes) {
  constexpr int kRows = 6;
  int64_t i = 0;
  for (; i + kRows <= m; i += kRows)
    lane_gemm_tile<P, kRows, vectors, whole>(k, a + i * a_row, a_row, a_col, b, ldb, c + i * ldc,
                                             ldc, accumulate, lanes);
  a += i * a_row;
  c += i * ldc;
  switch (m - i) {
#define ROWS(r)                                                                                  \
  case r:                                                                                        \
    lane_gemm_tile<P, r, vectors, whole>(k, a, a_row, a_col, b, ldb, c, ldc, accumulate, lanes); \
    break;
    ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5)
#undef ROWS
  }
}

// The permutation that swaps the off-diagonal step x step squares of two rows: one stage of a
// transpose in registers.
template <class A, int step, bool high, size_t... lane>
NEEDLE_INLINE Vec<A> swap_squares(Vec<A> a, Vec<A> b, std::index_sequence<lane...>) {
  constexpr int L = kLanes<A>;
#if defined(__clang__)
  return high ? __builtin_shufflevector(a, b, int(lane & step ? lane + L : lane + step)...)
              : __builtin_shufflevector(a, b, int(lane & step ? lane - step + L : lane)...);
#else
  return high
             ? __builtin_shuffle(a, b, Mask<A>{(lane & step ? int(lane) + L : int(lane) + step)...})
             : __builtin_shuffle(a, b,
                                 Mask<A>{(lane & step ? int(lane) - step + L : int(lane))...});
#endif
}
template <class A, int step>
NEEDLE_INLINE void transpose_stage(Vec<A>* row) {
  constexpr auto lanes = std::make_index_sequence<kLanes<A>>{};
#pragma GCC unroll 16
  for (int i = 0; i < kLanes<A>; ++i) {
    if (i & step) continue;
    const Vec<A> a = row[i], b = row[i + step];
    row[i] = swap_squares<A, step, false>(a, b, lanes);
    row[i + step] = swap_squares<A, step, true>(a, b, lanes);
  }
}

// A square of as many rows as a register has lanes.
template <class A>
NEEDLE_INLINE void transpose_square(Vec<A>* row) {
  constexpr int L = kLanes<A>;
  transpose_stage<A, 1>(row);
  if constexpr (L > 2) transpose_stage<A, 2>(row);
  if constexpr (L > 4) transpose_stage<A, 4>(row);
  if constexpr (L > 8) transpose_stage<A, 8>(row);
}

// What a register's lanes hold while elements are moved: of whole numbers their bits, with zeros
// before narrow ones.
template <class T>
using Moved = std::conditional_t<std::is_integral_v<T>,
                                 std::conditional_t<sizeof(T) == sizeof(double), double, float>, T>;
template <class T>
using Lane = accum_t<Moved<T>>;
typedef uint8_t ByteBits __attribute__((vector_size(kVectorBytes / 4)));

template <class T>
NEEDLE_INLINE Vec<Lane<T>> load_lanes(const T* from) {
  if constexpr (std::is_same_v<T, uint8_t>) {  // in two steps, for which g++ knows instructions
    ByteBits bits;
    memcpy(&bits, from, sizeof(bits));
    return (Vec<float>)__builtin_convertvector(__builtin_convertvector(bits, HalfBits), WordBits);
  } else if constexpr (std::is_same_v<T, uint16_t>) {
    HalfBits bits;
    memcpy(&bits, from, sizeof(bits));
    return (Vec<float>)__builtin_convertvector(bits, WordBits);
  } else {
    return load(reinterpret_cast<const Moved<T>*>(from));
  }
}
template <class T>
NEEDLE_INLINE void store_lanes(T* to, Vec<Lane<T>> v) {
  if constexpr (std::is_same_v<T, uint8_t>) {
    const auto bits =
        __builtin_convertvector(__builtin_convertvector((WordBits)v, HalfBits), ByteBits);
    memcpy(to, &bits, sizeof(bits));
  } else if constexpr (std::is_same_v<T, uint16_t>) {
    const auto bits = __builtin_convertvector((WordBits)v, HalfBits);
    memcpy(to, &bits, sizeof(bits));
  } else {
    store(reinterpret_cast<Moved<T>*>(to), v);
  }
}

}  // namespace

template <class P>
void lane_gemm(int64_t m, int64_t n, int64_t k, const P* a, int64_t a_row, int64_t a_col,
               const P* b, int64_t ldb, accum_t<P>* c, int64_t ldc, bool accumulate) {
  constexpr int L = kLanes<accum_t<P>>, kVectors = kVectorRegisters >= 32 ? 4 : 2;
  int64_t j = 0;
  const auto strips = [&](auto vectors) {
    for (; j + vectors * L <= n; j += vectors * L)
      lane_gemm_strip<P, vectors, true>(m, k, a, a_row, a_col, b + j * kWord<P>, ldb, c + j, ldc,
                                        accumulate, L);
  };
  strips(std::integral_constant<int, kVectors>{});
  strips(std::integral_constant<int, 2>{});
  strips(std::integral_constant<int, 1>{});
  if constexpr (kWord<P> == 1)
    if (j < n)
      lane_gemm_strip<P, 1, false>(m, k, a, a_row, a_col, b + j, ldb, c + j, ldc, accumulate,
                                   n - j);
}

template <class From, class To>
void transpose_tile(const From* from, int64_t ld_from, int64_t rows, int64_t cols, To* to,
                    int64_t ld_to) {
  using A = Lane<From>;
  static_assert(std::is_same_v<A, Lane<To>>, "one precision");
  constexpr int L = kLanes<A>;
  const int64_t whole_rows = rows - rows % L, whole_cols = cols - cols % L;
  for (int64_t i = 0; i < whole_rows; i += L)
    for (int64_t j = 0; j < whole_cols; j += L) {
      Vec<A> square[L];
#pragma GCC unroll 16
      for (int r = 0; r < L; ++r) square[r] = load_lanes(from + (i + r) * ld_from + j);
      transpose_square<A>(square);
#pragma GCC unroll 16
      for (int r = 0; r < L; ++r) store_lanes(to + (j + r) * ld_to + i, square[r]);
    }
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = i < whole_rows ? whole_cols : 0; j < cols; ++j)
      if constexpr (std::is_same_v<From, To>)
        to[j * ld_to + i] = from[i * ld_from + j];
      else
        to[j * ld_to + i] = To(A(from[i * ld_from + j]));
}

void transpose_pairs(const bfloat16* from, int64_t ld_from, int64_t rows, int64_t cols,
                     bfloat16* to, int64_t ld_to) {
  constexpr int L = kLanes<float>;
  const int64_t whole_rows = rows - rows % L, whole_words = cols / 2 - cols / 2 % L;
  for (int64_t i = 0; i < whole_rows; i += L)
    for (int64_t p = 0; p < whole_words; p += L) {
      Vec<float> square[L];  // only moved, whatever the bits would be as a float
#pragma GCC unroll 16
      for (int r = 0; r < L; ++r)
        memcpy(&square[r], from + (i + r) * ld_from + 2 * p, kVectorBytes);
      transpose_square<float>(square);
#pragma GCC unroll 16
      for (int r = 0; r < L; ++r) memcpy(to + 2 * ((p + r) * ld_to + i), &square[r], kVectorBytes);
    }
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t p = i < whole_rows ? whole_words : 0; p < ceil_div(cols, 2); ++p) {
      bfloat16* const pair = to + 2 * (p * ld_to + i);
      pair[0] = from[i * ld_from + 2 * p];
      pair[1] = 2 * p + 1 < cols ? from[i * ld_from + 2 * p + 1] : bfloat16(0.f);
    }
}

void transpose_to_words(const bfloat16* from, int64_t ld_from, int64_t rows, int64_t cols,
                        bfloat16* to, int64_t ld_to) {
  constexpr int L = kLanes<float>;
  constexpr uint32_t kLow = 0xffff;
  for (int64_t i = 0; i < rows; i += 2 * L)
    for (int64_t j = 0; j < cols; j += 2 * L) {
      const int64_t bytes = std::min<int64_t>(2 * L, cols - j) * sizeof(bfloat16);
      const int64_t there = std::min<int64_t>(2 * L, rows - i);
      Vec<float> halves[2 * L];  // only moved
      const bfloat16* row = from + i * ld_from + j;
      if (bytes < kVectorBytes || there < 2 * L) std::fill_n(halves, 2 * L, Vec<float>{});
      if (bytes == kVectorBytes)
        for (int64_t r = 0; r < there; ++r, row += ld_from) memcpy(&halves[r], row, kVectorBytes);
      else
        for (int64_t r = 0; r < there; ++r, row += ld_from) memcpy(&halves[r], row, bytes);
      transpose_square<float>(halves);
      transpose_square<float>(halves + L);
      bfloat16* column = to + j * ld_to + i;
      for (int w = 0; w < L; ++w, column += 2 * ld_to) {
        const WordBits first = (WordBits)halves[w], second = (WordBits)halves[L + w];
        const WordBits even = (first & kLow) | second << 16, odd = first >> 16 | (second & ~kLow);
        memcpy(column, &even, kVectorBytes);
        memcpy(column + ld_to, &odd, kVectorBytes);
      }
    }
}

template void lane_gemm(int64_t, int64_t, int64_t, const float*, int64_t, int64_t, const float*,
                        int64_t, float*, int64_t, bool);
template void lane_gemm(int64_t, int64_t, int64_t, const bfloat16*, int64_t, int64_t,
                        const bfloat16*, int64_t, float*, int64_t, bool);
template void lane_gemm(int64_t, int64_t, int64_t, const double*, int64_t, int64_t, const double*,
                        int64_t, double*, int64_t, bool);
#define TRANSPOSE(From, To) \
  template void transpose_tile(const From*, int64_t, int64_t, int64_t, To*, int64_t);
TRANSPOSE(float, float)
TRANSPOSE(double, double)
TRANSPOSE(float16, float)
TRANSPOSE(float, float16)
TRANSPOSE(bfloat16, float)
TRANSPOSE(float, bfloat16)
TRANSPOSE(uint8_t, uint8_t)
TRANSPOSE(uint16_t, uint16_t)
TRANSPOSE(uint32_t, uint32_t)
TRANSPOSE(uint64_t, uint64_t)
#undef TRANSPOSE

}  // namespace needle::cpu
