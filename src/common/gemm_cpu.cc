#include "gemm_cpu.h"

#include <algorithm>

#ifdef NEEDLE_OPENBLAS
#include <cblas.h>
#endif
#ifdef __SSE__
#include <xmmintrin.h>
#endif

namespace needle::cpu {
namespace {

// Subnormal numbers count as zero inside a product: each one costs a hundred cycles, and the
// gradients of a confident softmax are full of them.
struct FlushSubnormals {
#ifdef __SSE__
  static constexpr unsigned kFlushToZero = 0x8000, kDenormalsAreZero = 0x0040;
  unsigned before = _mm_getcsr();
  FlushSubnormals() { _mm_setcsr(before | kFlushToZero | kDenormalsAreZero); }
  ~FlushSubnormals() { _mm_setcsr(before); }
#endif
};

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64, kRows = 12;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32, kRows = 6;
#else
constexpr int kVectorBytes = 16, kRows = 4;
#endif

// C (m x n) in blocks of kRows x kCols registers: kRows * 2 accumulators, two vectors of B, one
// broadcast of A. Panels of A (kM x kK) and B (kK x kN) are packed so that the inner loop reads
// both in order: A stays in L2, a panel of B in L1.
template <class T>
struct Own {
  typedef T Vector __attribute__((vector_size(kVectorBytes), aligned(sizeof(T)), may_alias));
  static constexpr int kLanes = kVectorBytes / sizeof(T);
  static constexpr int kCols = 2 * kLanes;
  static constexpr int64_t kK = 256, kM = 16 * kRows, kN = 16 * kCols;

  struct Buffers {
    alignas(64) T a[kM * kK];
    alignas(64) T b[kK * kN];
  };

  // Panels of kRows rows: element (i, p) at [panel][p][i], rows beyond m are zero.
  static void pack_a(bool ta, int64_t m, int64_t k, const T* a, int64_t lda, T* to) {
    for (int64_t i0 = 0; i0 < m; i0 += kRows, to += kRows * k) {
      const int64_t rows = std::min<int64_t>(kRows, m - i0);
      if (rows < kRows) std::fill(to, to + kRows * k, T(0));
      if (ta) {
        for (int64_t p = 0; p < k; ++p)
          for (int64_t i = 0; i < rows; ++i) to[p * kRows + i] = a[p * lda + i0 + i];
      } else {
        for (int64_t i = 0; i < rows; ++i)
          for (int64_t p = 0; p < k; ++p) to[p * kRows + i] = a[(i0 + i) * lda + p];
      }
    }
  }

  static void pack_b(bool tb, int64_t k, int64_t n, const T* b, int64_t ldb, T* to) {
    for (int64_t j0 = 0; j0 < n; j0 += kCols, to += kCols * k) {
      const int64_t cols = std::min<int64_t>(kCols, n - j0);
      if (cols < kCols) std::fill(to, to + kCols * k, T(0));
      if (tb) {
        for (int64_t j = 0; j < cols; ++j)
          for (int64_t p = 0; p < k; ++p) to[p * kCols + j] = b[(j0 + j) * ldb + p];
      } else {
        for (int64_t p = 0; p < k; ++p)
          for (int64_t j = 0; j < cols; ++j) to[p * kCols + j] = b[p * ldb + j0 + j];
      }
    }
  }

  static void micro(int64_t k, const T* a, const T* b, T alpha, T beta, T* c, int64_t ldc,
                    int64_t rows, int64_t cols) {
    Vector sum[kRows][2] = {};
    for (int64_t p = 0; p < k; ++p, a += kRows, b += kCols) {
      const Vector b0 = *reinterpret_cast<const Vector*>(b);
      const Vector b1 = *reinterpret_cast<const Vector*>(b + kLanes);
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i) {
        sum[i][0] += a[i] * b0;
        sum[i][1] += a[i] * b1;
      }
    }
    if (rows == kRows && cols == kCols) {
      for (int i = 0; i < kRows; ++i)
        for (int j = 0; j < 2; ++j) {
          Vector* to = reinterpret_cast<Vector*>(c + i * ldc + j * kLanes);
          *to = beta == T(0) ? alpha * sum[i][j] : alpha * sum[i][j] + beta * *to;
        }
      return;
    }
    T edge[kRows][kCols];
    for (int i = 0; i < kRows; ++i)
      for (int j = 0; j < 2; ++j) *reinterpret_cast<Vector*>(&edge[i][j * kLanes]) = sum[i][j];
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < cols; ++j) {
        T& to = c[i * ldc + j];
        to = beta == T(0) ? alpha * edge[i][j] : alpha * edge[i][j] + beta * to;
      }
  }

  static void gemm(bool ta, bool tb, int64_t m, int64_t n, int64_t k, T alpha, const T* a,
                   int64_t lda, const T* b, int64_t ldb, T beta, T* c, int64_t ldc) {
    static thread_local Buffers buffers;
    for (int64_t p0 = 0; p0 < k || p0 == 0; p0 += kK) {
      const int64_t depth = std::min(kK, k - p0);
      const T keep = p0 == 0 ? beta : T(1);
      for (int64_t j0 = 0; j0 < n; j0 += kN) {
        const int64_t cols = std::min(kN, n - j0);
        pack_b(tb, depth, cols, tb ? b + j0 * ldb + p0 : b + p0 * ldb + j0, ldb, buffers.b);
        for (int64_t i0 = 0; i0 < m; i0 += kM) {
          const int64_t rows = std::min(kM, m - i0);
          pack_a(ta, rows, depth, ta ? a + p0 * lda + i0 : a + i0 * lda + p0, lda, buffers.a);
          for (int64_t j = 0; j < cols; j += kCols)
            for (int64_t i = 0; i < rows; i += kRows)
              micro(depth, buffers.a + i * depth, buffers.b + j * depth, alpha, keep,
                    c + (i0 + i) * ldc + j0 + j, ldc, std::min<int64_t>(kRows, rows - i),
                    std::min<int64_t>(kCols, cols - j));
        }
      }
      if (k == 0) break;
    }
  }
};

#ifdef NEEDLE_OPENBLAS
// The pool hands out the parallelism; the library's own threads stay asleep.
[[maybe_unused]] const bool single_threaded = (scipy_openblas_set_num_threads(1), true);
CBLAS_TRANSPOSE flag(bool t) { return t ? CblasTrans : CblasNoTrans; }
#endif

}  // namespace

void gemm_own(bool ta, bool tb, int64_t m, int64_t n, int64_t k, float alpha, const float* a,
              int64_t lda, const float* b, int64_t ldb, float beta, float* c, int64_t ldc) {
  Own<float>::gemm(ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}
void gemm_own(bool ta, bool tb, int64_t m, int64_t n, int64_t k, double alpha, const double* a,
              int64_t lda, const double* b, int64_t ldb, double beta, double* c, int64_t ldc) {
  Own<double>::gemm(ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

#ifdef NEEDLE_OPENBLAS
void gemm_tile(bool ta, bool tb, int64_t m, int64_t n, int64_t k, float alpha, const float* a,
               int64_t lda, const float* b, int64_t ldb, float beta, float* c, int64_t ldc) {
  const FlushSubnormals flush;
  scipy_cblas_sgemm(CblasRowMajor, flag(ta), flag(tb), int(m), int(n), int(k), alpha, a, int(lda),
                    b, int(ldb), beta, c, int(ldc));
}
void gemm_tile(bool ta, bool tb, int64_t m, int64_t n, int64_t k, double alpha, const double* a,
               int64_t lda, const double* b, int64_t ldb, double beta, double* c, int64_t ldc) {
  scipy_cblas_dgemm(CblasRowMajor, flag(ta), flag(tb), int(m), int(n), int(k), alpha, a, int(lda),
                    b, int(ldb), beta, c, int(ldc));
}
const char* gemm_library() { return "openblas"; }
#else
void gemm_tile(bool ta, bool tb, int64_t m, int64_t n, int64_t k, float alpha, const float* a,
               int64_t lda, const float* b, int64_t ldb, float beta, float* c, int64_t ldc) {
  const FlushSubnormals flush;
  gemm_own(ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}
void gemm_tile(bool ta, bool tb, int64_t m, int64_t n, int64_t k, double alpha, const double* a,
               int64_t lda, const double* b, int64_t ldb, double beta, double* c, int64_t ldc) {
  gemm_own(ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}
const char* gemm_library() { return "own"; }
#endif

}  // namespace needle::cpu
