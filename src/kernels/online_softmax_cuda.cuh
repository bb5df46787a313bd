// Maximum and sum of exponentials of a row in one pass (Milakov & Gimelshein 2018,
// arXiv:1805.02867).
#pragma once

#include "../common/cuda_util.cuh"
#include "../common/ewise_math_cuda.h"

namespace needle::NEEDLE_DEVICE {

// sum = sum of exp(x - max) over the elements seen. A NaN makes `sum` NaN; a row of -inf leaves max
// at -inf.
template <class A>
struct OnlineSoftmax {
  A max, sum;
  __device__ static OnlineSoftmax empty() { return {A(-INFINITY), A(0)}; }
  __device__ void add(A x) {
    if (x > max) {
      sum = sum * m_exp(max - x) + A(1);
      max = x;
    } else {
      sum += x == max ? A(1) : m_exp(x - max);
    }
  }
  __device__ A lse() const { return max + m_log(sum); }
  __device__ OnlineSoftmax shuffle_xor(int step) const {
    return {__shfl_xor_sync(kAllLanes, max, step), __shfl_xor_sync(kAllLanes, sum, step)};
  }
};

struct MergeSoftmax {
  template <class A>
  __device__ OnlineSoftmax<A> operator()(OnlineSoftmax<A> a, OnlineSoftmax<A> b) const {
    const A top = a.max > b.max ? a.max : b.max;
    return {top, scaled(a, top) + scaled(b, top)};
  }
  template <class A>
  __device__ static A scaled(OnlineSoftmax<A> s, A top) {
    return s.max == top ? s.sum : s.sum * m_exp(s.max - top);
  }
};

// Of the row x[0 .. cols), by `Lanes` neighbouring threads; each gets the result.
template <int Lanes, class T>
__device__ OnlineSoftmax<accum_t<T>> softmax_of_row(const T* x, int64_t cols) {
  auto seen = OnlineSoftmax<accum_t<T>>::empty();
  for_columns<Lanes>(
      cols, [&](int64_t c) { return x[c]; }, [&](int64_t, T value) { seen.add(value); });
  return reduce_lanes<Lanes>(seen, MergeSoftmax{});
}

}  // namespace needle::NEEDLE_DEVICE
