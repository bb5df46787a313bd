// The functions that ewise_ops.def calls, for CPU code. Those of float that contain an exponential,
// a sine or a cosine are written for vectors (simd_cpu.h), the others so that g++ vectorizes loops
// over them; each says its error against float64 in units of the last place (ulp).
// float64 goes through libm. NaN, infinities and signed zeros come out as numpy's do.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "dtype.h"
#include "simd_cpu.h"

namespace needle::cpu {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

using Floats = Vec<float>;
NEEDLE_INLINE Mask<float> bits_of(Floats x) { return bit_cast<Mask<float>>(x); }
NEEDLE_INLINE Floats absolute(Floats x) { return bit_cast<Floats>(bits_of(x) & 0x7fffffff); }
NEEDLE_INLINE Floats with_sign_of(Floats sign, Floats x) {
  return bit_cast<Floats>((bits_of(sign) & INT32_MIN) | bits_of(x));
}

NEEDLE_INLINE Floats m_exp(Floats x) { return vexp<float>(x); }

// 1 ulp. x = 2^e m with m in [sqrt(1/2), sqrt(2)), then Cephes' polynomial in m - 1.
inline float m_log(float x) {
  const bool small = x < std::numeric_limits<float>::min();
  const float scaled = small ? x * 0x1p23f : x;
  const int32_t bits = bit_cast<int32_t>(scaled);
  const int32_t exponent = (bits - 0x3f3504f3) >> 23;
  const float e = float(exponent) - (small ? 23.f : 0.f);
  const float z = bit_cast<float>(bits - int32_t(uint32_t(exponent) << 23)) - 1.f;
  const float q = polynomial(z, 7.0376836292e-2f, -1.1514610310e-1f, 1.1676998740e-1f,
                             -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f,
                             2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f);
  float y = q * z * z * z;
  y += e * -2.12194440e-4f;
  y -= 0.5f * z * z;
  y = (z + y) + e * 0.693359375f;
  y = x == kInfinity ? x : y;
  y = x == 0.f ? -kInfinity : y;
  return x < 0.f || x != x ? std::numeric_limits<float>::quiet_NaN() : y;
}

// 2.5 ulp. With t = e^(-2|x|) - 1 = 2^n (e^r - 1) + (2^n - 1): tanh |x| = -t / (t + 2).
NEEDLE_INLINE Floats m_tanh(Floats x) {
  const Floats least = broadcast(-30.f);
  Floats y = absolute(x) * -2.f;
  y = y < least ? least : y;
  const ExpParts<float> parts(y);
  const Floats power = power_of_two<float>(bits_of(parts.shifted));
  const Floats rest = ExpConstants<float>::tail(parts.r) * parts.r * parts.r + parts.r;
  const Floats t = power * rest + (power - 1.f);
  return with_sign_of(x, absolute(t / (t + 2.f)));
}

// 2.3 ulp; e^(-|x|) never overflows.
NEEDLE_INLINE Floats m_sigmoid(Floats x) {
  const Floats e = m_exp(-absolute(x)), one = broadcast(1.f);
  return (x < Floats{} ? e : one) / (one + e);
}

// 1 ulp. Minimax polynomials of N. Juffa, BSD-2: x + x p(x^2) near 0, 1 - e^(q(|x|)) beyond.
NEEDLE_INLINE Floats m_erf(Floats x) {
  const Floats t = absolute(x), s = x * x;
  const Floats high = polynomial(t, -1.72853470e-5f, 3.83197126e-4f) * s +
                      polynomial(t, -3.88396438e-3f, 2.42546219e-2f);
  Floats r = polynomial(t, high, -1.06777877e-1f, -6.34846687e-1f, -1.28717512e-1f, -t);
  r = t > broadcast(4.f) ? broadcast(-20.f) : r;  // erf is 1 there, and the polynomial ends
  const Floats far = with_sign_of(x, 1.f - vexp_negative<float>(r));
  const Floats near = polynomial(s, -5.96761703e-4f, 4.99119423e-3f, -2.67681349e-2f,
                                 1.12819925e-1f, -3.76125336e-1f, 1.28379166e-1f) *
                          x +
                      x;
  return t > broadcast(0.927734375f) ? far : near;  // near for NaN
}

// sin(r + n pi / 2) by series, for |r| <= pi / 4; of numbers or of vectors.
template <class Angle, class Turns>
NEEDLE_INLINE Angle sine_series(Angle r, Turns n) {
  const Angle s = r * r;
  const Angle odd =
      polynomial(s, -1. / 39916800, 1. / 362880, -1. / 5040, 1. / 120, -1. / 6) * s * r + r;
  const Angle even = polynomial(s, -1. / 3628800, 1. / 40320, -1. / 720, 1. / 24, -.5, 1.);
  const Angle y = (n & 1) != 0 ? even : odd;
  return (n & 2) != 0 ? -y : y;
}

// Angles of powers of two in quarter turns, 2^p 2 / pi modulo 4. A float is a whole number m of 24
// bits times such a power, by its exponent, and m times `high` is exact (after Payne & Hanek 1983).
struct Quarters {
  double high[256], low[256];
  Quarters() {
    constexpr int kDigits[] = {0xA2F983, 0x6E4E44, 0x1529FC, 0x2757D1, 0xF534DD,
                               0xC0DB62, 0x95993C, 0x439041, 0xFE5163, 0xABDEBB};  // of 2 / pi
    for (int e = 0; e < 256; ++e) {
      high[e] = low[e] = 0;
      int power = std::max(e, 1) - 150;
      for (const int digit : kDigits) {
        const double part = std::fmod(std::ldexp(digit, power -= 24), 4);
        const double grid = std::floor(part * 0x1p27) * 0x1p-27;
        high[e] = std::fmod(high[e] + grid, 4);
        low[e] += part - grid;
      }
    }
    high[255] = std::numeric_limits<double>::quiet_NaN();
  }
};
inline const Quarters kQuarters;

// sin(|x| + ahead pi / 2) of any float.
inline float far_sine(float x, int64_t ahead) {
  const int32_t bits = bit_cast<int32_t>(x), e = (bits >> 23) & 255;
  const double m = (bits & 0x7fffff) | (e > 0 ? 0x800000 : 0);
  const double quarters = m * kQuarters.high[e];
  const double shifted = quarters + 0x1.8p52;  // rounds, as in ExpParts
  const double r =
      (quarters - (shifted - 0x1.8p52) + m * kQuarters.low[e]) * 1.57079632679489661923;
  return float(sine_series(r, bit_cast<int64_t>(shifted) + ahead));
}

// The same of a vector, 0.53 ulp. Below 2^20 the nearest quarter turn has at most 20 bits, and
// times the first 33 bits of pi / 2 it is exact (after Cody & Waite 1980).
NEEDLE_INLINE Floats sine(Floats x, int64_t ahead) {
  typedef float Half __attribute__((vector_size(kVectorBytes / 2)));
  x = absolute(x);
  Half halves[2];
  memcpy(halves, &x, sizeof x);
  for (Half& half : halves) {
    const Vec<double> angle = __builtin_convertvector(half, Vec<double>);
    const Vec<double> shifted = angle * 0.63661977236758134308 + 0x1.8p52, n = shifted - 0x1.8p52;
    const Vec<double> r = (angle - n * 0x1.921fb544p0) - n * 0x1.0b4611a626331p-34;
    const Mask<double> turns = bit_cast<Mask<double>>(shifted) + ahead;
    half = __builtin_convertvector(sine_series(r, turns), Half);
  }
  Floats y;
  memcpy(&y, halves, sizeof y);
  if (!(sum_lanes<float>(x) < 0x1p20f))  // or NaN
    for (int l = 0; l < kLanes<float>; ++l)
      if (!(x[l] < 0x1p20f)) y[l] = far_sine(x[l], ahead);
  return y;
}
NEEDLE_INLINE Floats m_sin(Floats x) { return sine(x, 0) * with_sign_of(x, broadcast(1.f)); }
NEEDLE_INLINE Floats m_cos(Floats x) { return sine(x, 1); }

inline double m_exp(double x) { return std::exp(x); }
inline double m_log(double x) { return std::log(x); }
inline double m_sin(double x) { return std::sin(x); }
inline double m_cos(double x) { return std::cos(x); }
inline double m_tanh(double x) { return std::tanh(x); }
inline double m_erf(double x) { return std::erf(x); }
inline double m_sigmoid(double x) {
  const double e = std::exp(-std::fabs(x));
  return (x < 0 ? e : 1.0) / (1.0 + e);
}

template <class T>
inline T m_sqrt(T x) {
  return std::sqrt(x);
}

template <class T>
inline T m_abs(T x) {
  if constexpr (std::is_floating_point_v<T>) {
    return std::fabs(x);
  } else {
    return T(x < T(0) ? T(-x) : x);
  }
}
template <class T>
inline T m_sign(T x) {
  return x != x ? x : T(T(x > T(0)) - T(x < T(0)));  // NaN stays NaN
}

// Integer powers wrap around; a negative exponent gives the truncated reciprocal.
template <class T>
inline T m_pow(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    return std::pow(a, b);
  } else {
    if (b < T(0)) return a == T(1) ? T(1) : a == T(-1) ? T(b & 1 ? -1 : 1) : T(0);
    T result = 1;
    for (; b != T(0); b = T(b >> 1), a = T(a * a))
      if (b & 1) result = T(result * a);
    return result;
  }
}

// The numbers that go with T: T itself, or float for floats.
template <class T>
using Number = std::conditional_t<std::is_same_v<T, Floats>, float, T>;

template <class T>
inline T m_silu_backward(T x, T dy) {
  const Number<T> one = 1;
  const T s = m_sigmoid(x);
  return dy * s * (one + x * (one - s));
}

// The normal distribution: Phi(x) and phi(x).
template <class T>
struct Normal {
  T integral, density;
};
inline Normal<double> m_normal(double x) {
  return {0.5 * std::erfc(x * -0.70710678118654752440),
          std::exp(-0.5 * x * x) * 0.39894228040143267794};
}
// Phi within 1.2e-7 everywhere: 1 ulp of its largest value. Phi(-t) e^(t^2 / 2) is a polynomial in
// t, fitted for the least error of Phi (Lawson's iteration); beyond the last t it stays what it is
// there, and the exponential, which the density needs too, takes the tail to zero.
NEEDLE_INLINE Normal<Floats> m_normal(Floats x) {
  const Floats last = broadcast(5.75f);
  Floats t = absolute(x);
  t = t > last ? last : t;  // NaN passes through
  const Floats q =
      polynomial(t, 3.07473691e-8f, -9.57478164e-7f, 1.34250000e-5f, -1.13219794e-4f,
                 6.50790578e-4f, -2.76062777e-3f, 9.21831746e-3f, -2.56418381e-2f, 6.20050356e-2f,
                 -1.32827148e-1f, 2.49975219e-1f, -3.98940712e-1f, 4.99999970e-1f);
  const Floats e = vexp_to_zero<float>(x * x * -0.5f), beyond = q * e;
  return {x < Floats{} ? beyond : 1.f - beyond, e * 0.398942280f};
}

// gelu(x) = x Phi(x); its slope is Phi(x) + x phi(x).
template <class T>
inline T m_gelu_erf(T x) {
  return x * m_normal(x).integral;
}
template <class T>
inline T m_gelu_erf_backward(T x, T dy) {
  const Normal<T> n = m_normal(x);
  return dy * (n.integral + x * n.density);
}

// gelu(x) = x (1 + tanh(u)) / 2 with u = sqrt(2/pi) (x + 0.044715 x^3).
template <class T>
inline T gelu_tanh_of(T x) {
  using N = Number<T>;
  return m_tanh(N(0.79788456080286535588) * (x + N(0.044715) * x * x * x));
}
template <class T>
inline T m_gelu_tanh(T x) {
  using N = Number<T>;
  return N(0.5) * x * (N(1) + gelu_tanh_of(x));
}
template <class T>
inline T m_gelu_tanh_backward(T x, T dy) {
  using N = Number<T>;
  const T t = gelu_tanh_of(x);
  const T slope = N(0.79788456080286535588) * (N(1) + N(3 * 0.044715) * x * x);
  return dy * (N(0.5) * (N(1) + t) + N(0.5) * x * (N(1) - t * t) * slope);
}

}  // namespace needle::cpu
