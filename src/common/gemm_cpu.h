// Single-threaded matrix products for use inside tasks of the pool: C = alpha op(A) op(B) + beta C,
// row-major.
#pragma once

#include <cstdint>

namespace needle::cpu {

// op(A) is (m, k), op(B) is (k, n), C is (m, n); lda, ldb, ldc are the row strides of what is
// stored: (m, k), or (k, m) when ta; likewise b. beta == 0 does not read C. Through OpenBLAS where
// it was built in, else gemm_own.
void gemm_tile(bool ta, bool tb, int64_t m, int64_t n, int64_t k, float alpha, const float* a,
               int64_t lda, const float* b, int64_t ldb, float beta, float* c, int64_t ldc);
void gemm_tile(bool ta, bool tb, int64_t m, int64_t n, int64_t k, double alpha, const double* a,
               int64_t lda, const double* b, int64_t ldb, double beta, double* c, int64_t ldc);

// needle's own kernel: packed panels, a block of C in vector registers.
void gemm_own(bool ta, bool tb, int64_t m, int64_t n, int64_t k, float alpha, const float* a,
              int64_t lda, const float* b, int64_t ldb, float beta, float* c, int64_t ldc);
void gemm_own(bool ta, bool tb, int64_t m, int64_t n, int64_t k, double alpha, const double* a,
              int64_t lda, const double* b, int64_t ldb, double beta, double* c, int64_t ldc);

const char* gemm_library();  // "openblas" or "own"

}  // namespace needle::cpu
