// The functions that ewise_ops.def calls, for device code: precise versions (no fast-math), float,
// double and integers.
#pragma once

#include <cmath>
#include <type_traits>

#include "launch.h"

namespace needle::NEEDLE_DEVICE {

#define NEEDLE_MATH(name)                                                   \
  __device__ __forceinline__ float m_##name(float x) { return name##f(x); } \
  __device__ __forceinline__ double m_##name(double x) { return ::name(x); }
NEEDLE_MATH(exp)
NEEDLE_MATH(log)
NEEDLE_MATH(sqrt)
NEEDLE_MATH(sin)
NEEDLE_MATH(cos)
NEEDLE_MATH(tanh)
NEEDLE_MATH(erf)
#undef NEEDLE_MATH

// Signed integers wrap around, as numpy's do; C++ wants that said.
template <class T>
__device__ __forceinline__ T m_abs(T x) {
  if constexpr (std::is_signed<T>::value && std::is_integral<T>::value) {
    using U = typename std::make_unsigned<T>::type;
    return x < 0 ? T(U(0) - U(x)) : x;
  } else if constexpr (std::is_integral<T>::value) {
    return x;
  } else {
    return T(fabs(x));
  }
}
template <class T>
__device__ __forceinline__ T m_sign(T x) {
  if constexpr (std::is_unsigned<T>::value) {
    return T(x != T(0));
  } else {
    return x != x ? x : T((x > T(0)) - (x < T(0)));  // NaN stays NaN
  }
}

__device__ __forceinline__ float m_pow(float a, float b) { return powf(a, b); }
__device__ __forceinline__ double m_pow(double a, double b) { return ::pow(a, b); }
// Integer powers wrap around; a negative exponent gives the truncated reciprocal.
template <class T, class = typename std::enable_if<std::is_integral<T>::value>::type>
__device__ __forceinline__ T m_pow(T base, T exponent) {
  if constexpr (std::is_signed<T>::value) {
    if (exponent < T(0))
      return base == T(1) ? T(1) : base == T(-1) ? (exponent & T(1) ? T(-1) : T(1)) : T(0);
  }
  using U = typename std::make_unsigned<T>::type;
  U result = 1, factor = U(base);
  for (U left = U(exponent); left != 0; left = U(left >> 1)) {
    if (left & 1) result = U(uint64_t(result) * factor);
    factor = U(uint64_t(factor) * factor);
  }
  return T(result);
}

template <class T>
__device__ __forceinline__ T m_sigmoid(T x) {
  return T(1) / (T(1) + m_exp(-x));
}
template <class T>
__device__ __forceinline__ T m_silu_backward(T x, T dy) {
  const T s = m_sigmoid(x);
  return dy * s * (T(1) + x * (T(1) - s));
}

// gelu(x) = x Phi(x); its slope is Phi(x) + x phi(x).
template <class T>
__device__ __forceinline__ T m_gelu_erf(T x) {
  return T(0.5) * x * (T(1) + m_erf(x * T(0.70710678118654752440)));
}
template <class T>
__device__ __forceinline__ T m_gelu_erf_backward(T x, T dy) {
  const T density = m_exp(T(-0.5) * x * x) * T(0.39894228040143267794);
  return dy * (T(0.5) * (T(1) + m_erf(x * T(0.70710678118654752440))) + x * density);
}

// gelu(x) = x (1 + tanh(u)) / 2 with u = sqrt(2/pi) (x + 0.044715 x^3). The factor of x is
// sigmoid(2 u), which loses no digits below 0.
template <class T>
__device__ __forceinline__ T gelu_tanh_share(T x) {
  return m_sigmoid(T(2 * 0.79788456080286535588) * (x + T(0.044715) * x * x * x));
}
template <class T>
__device__ __forceinline__ T m_gelu_tanh(T x) {
  return x * gelu_tanh_share(x);
}
template <class T>
__device__ __forceinline__ T m_gelu_tanh_backward(T x, T dy) {
  const T s = gelu_tanh_share(x);
  const T slope = T(2 * 0.79788456080286535588) * (T(1) + T(3 * 0.044715) * x * x);
  return dy * (s + x * s * (T(1) - s) * slope);
}

}  // namespace needle::NEEDLE_DEVICE
