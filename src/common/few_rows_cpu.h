// Products of a few rows with a large matrix, for which reading the matrix is all the work: the
// case of a model that decodes one token at a time.
#pragma once

#include <cstdint>

#include "simd_cpu.h"

namespace needle::cpu {

constexpr int64_t kFewRows = 16;
constexpr int kRowGroup = kVectorRegisters >= 32 ? 16 : 6;  // rows whose sums stay in registers

// Whether reading B (k, n) is most of the work: with more than 8 rows it is not where elements of
// 16 bits are converted again for each group of them, nor where B is small.
template <class T>
bool few_rows_pay(int64_t m, int64_t n, int64_t k) {
  return m <= kFewRows / 2 ||
         (m <= kFewRows && (sizeof(T) > 2 || m <= kRowGroup) && n * k >= int64_t(1) << 18);
}

// C (m, n) = A (m, k) B (k, n), or C += with accumulate; m <= kFewRows. Element (i, p) of A is a[i
// * a_row + p * a_col]; B and C have contiguous rows, those of C follow each other. B is read once,
// where it is, by the whole pool. Neither threads nor the other rows change a bit of a row of C.
// Floating types; C may be float where A and B are 16 bits wide.
template <class T, class Out>
void few_rows_gemm(int64_t m, int64_t n, int64_t k, const T* a, int64_t a_row, int64_t a_col,
                   const T* b, int64_t ldb, bool accumulate, Out* c);

}  // namespace needle::cpu
