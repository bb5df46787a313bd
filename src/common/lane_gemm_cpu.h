// Products and transposes of tiles that lie in cache, for use inside one pool task. Nothing is
// packed: elements of A are read one at a time, through any two strides, and multiplied with whole
// vectors of a row of B. So a caller chooses what runs along the vector lanes, and gets both A and
// A^T for free.
//
// Each element of C is one chain of fused multiply-adds in ascending k, whatever the tile it falls
// into, so splitting m or n differently, or continuing a sum over k with `accumulate`, gives the
// same bits.
#pragma once

#include "simd_cpu.h"

namespace needle::cpu {

// C (m, n) = A (m, k) B (k, n), or C += with accumulate. A element (i, p) is a[i * a_row + p *
// a_col]; rows of B and C are contiguous. float and double; and bfloat16, where k counts pairs, as
// which B lies, ldb of them in a row: where the processor multiplies them, and n is of whole
// vectors.
template <class P>
void lane_gemm(int64_t m, int64_t n, int64_t k, const P* a, int64_t a_row, int64_t a_col,
               const P* b, int64_t ldb, accum_t<P>* c, int64_t ldc, bool accumulate);

// to (cols, rows) = the transpose of from (rows, cols), both with contiguous rows. From and To are
// float or double; or a 16-bit float and float; or unsigned numbers of one width, whose bits stay.
template <class From, class To>
void transpose_tile(const From* from, int64_t ld_from, int64_t rows, int64_t cols, To* to,
                    int64_t ld_to);

// The same of words, which are two elements that follow each other in a row of `from`, with a zero
// after the last of an odd number: to (ceil(cols / 2), rows), ld_to in words.
void transpose_pairs(const bfloat16* from, int64_t ld_from, int64_t rows, int64_t cols,
                     bfloat16* to, int64_t ld_to);

// to = the words of n elements of a row and those below them, ld_from further on, or zeros.
inline void pair_rows(const bfloat16* from, int64_t ld_from, bool both, int64_t n, bfloat16* to) {
  int64_t j = 0;
  for (; j + kLanes<float> <= n; j += kLanes<float>) {
    HalfBits upper, lower = {};
    memcpy(&upper, from + j, sizeof upper);
    if (both) memcpy(&lower, from + ld_from + j, sizeof lower);
    const WordBits words =
        __builtin_convertvector(upper, WordBits) | __builtin_convertvector(lower, WordBits) << 16;
    memcpy(to + 2 * j, &words, sizeof words);
  }
  for (; j < n; ++j) {
    to[2 * j] = from[j];
    to[2 * j + 1] = both ? from[ld_from + j] : bfloat16(0.f);
  }
}

// The transpose of transpose_pairs with the words along a row of `to`, each of two elements that
// lie kLanes<float> rows apart: to (cols, words), where element t of each 2 kLanes rows is the
// first of word t, if t is less than kLanes, or the second of word t - kLanes. Zeros fill up the
// last such group of rows, and rows of `to` up to a multiple of 2 kLanes.
void transpose_to_words(const bfloat16* from, int64_t ld_from, int64_t rows, int64_t cols,
                        bfloat16* to, int64_t ld_to);

}  // namespace needle::cpu
