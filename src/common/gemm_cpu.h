// Products of matrices of floats: C = op(A) op(B), or C += with accumulate, row-major.
//
// op(A) is (m, k), op(B) is (k, n), C is (m, n); lda, ldb, ldc are the row strides of what is
// stored: (m, k), or (k, m) when ta; likewise b.
#pragma once

#include <cstdint>

#include "parallel.h"
#include "windows_cpu.h"

namespace needle::cpu {

// On one thread, for use inside a task of the pool; of float or double. Through OpenBLAS where it
// was built in.
template <class T>
void gemm_tile(bool ta, bool tb, int64_t m, int64_t n, int64_t k, const T* a, int64_t lda,
               const T* b, int64_t ldb, bool accumulate, T* c, int64_t ldc);

// On the whole pool, by needle's own kernel; of 16-bit floats, too, into such or into float. Bits
// do not depend on the number of threads.
template <class In, class Out>
void gemm_own(bool ta, bool tb, int64_t m, int64_t n, int64_t k, const In* a, int64_t lda,
              const In* b, int64_t ldb, bool accumulate, Out* c, int64_t ldc);

// C (windows, n) = A B with A the windows and B (elements, n).
template <class T>
void gemm_windows(const Windows<T>& a, int64_t n, const T* b, T* c);
// C (elements, n) = or += A^T B with A a block of windows, and B (windows of the block, n).
template <class T>
void gemm_of_windows(const Windows<T>& a, const WindowBlock& block, int64_t n, const T* b,
                     bool accumulate, accum_t<T>* c);

// out (size) = or += the sums that part(i, to) puts into `to`, a task each, added in the order of i
// = 0 .. parts-1. Room: parts * size at most.
template <int64_t Room, class T, class F>
void add_parts(int64_t parts, int64_t size, bool accumulate, T* out, F&& part) {
  struct Sums {
    T of_part[Room];
  };
  T* const sums = of_this_thread<Sums>().of_part;
  parallel_for(parts, [&](int64_t i) { part(i, sums + i * size); });
  constexpr int64_t kAtOnce = 2048;
  parallel_ranges(size, kAtOnce, [&](int64_t begin, int64_t end) {
    if (!accumulate) std::fill(out + begin, out + end, T(0));
    for (const T* of_part = sums; of_part < sums + parts * size; of_part += size)
      for (int64_t i = begin; i < end; ++i) out[i] += of_part[i];
  });
}

// Whether gemm_own is the faster way to each of `batch` products of this size, rather than tiles on
// the pool.
template <class T>
bool gemm_own_pays(int64_t batch, int64_t m, int64_t n, int64_t k);

}  // namespace needle::cpu
