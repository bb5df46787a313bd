// The functions that ewise_ops.def calls, for CPU code. The float versions are free of branches and
// table look-ups, so that g++ vectorizes loops over them; each says its error against float64 in
// units of the last place (ulp). float64 goes through libm. NaN, infinities and signed zeros come
// out as numpy's do.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "dtype.h"

namespace needle::cpu {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A polynomial in x by its coefficients, the highest first.
template <class... Rest>
inline float polynomial(float x, float sum, Rest... coefficients) {
  ((sum = sum * x + coefficients), ...);
  return sum;
}

// x = n ln 2 + r with |r| <= ln 2 / 2. Adding 1.5 * 2^23 rounds to an integer that stands in the
// low bits of the sum.
struct ExpParts {
  int32_t n;
  float r;
};
inline ExpParts exp_parts(float x) {
  const float shifted = x * 1.44269504f + 0x1.8p23f;
  const float n = shifted - 0x1.8p23f;
  return {bit_cast<int32_t>(shifted) - bit_cast<int32_t>(0x1.8p23f),
          (x - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f};
}
// e^r - 1 - r = r^2 (1/2 + r/6 + ...), the series as far as float sees it.
inline float exp_tail(float r) {
  return polynomial(r, 1.f / 5040, 1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, 0.5f) * r * r;
}
// -126 <= n <= 127
inline float power_of_two(int32_t n) { return bit_cast<float>((n + 127) << 23); }

// 1 ulp. 2^n is applied in two halves, so that the smallest and the largest results come out right.
inline float m_exp(float x) {
  x = x < -104.f ? -104.f : x;  // comparisons are false for NaN, which so passes through
  x = x > 89.f ? 89.f : x;
  const ExpParts p = exp_parts(x);
  const int32_t half = p.n >> 1;
  return (1.f + (p.r + exp_tail(p.r))) * power_of_two(half) * power_of_two(p.n - half);
}

// 2 ulp. 2^n (e^r - 1) + (2^n - 1), halved inside so that n = 128 does not overflow early.
inline float m_expm1(float x) {
  float c = x < -30.f ? -30.f : x;
  c = c > 89.f ? 89.f : c;
  const ExpParts p = exp_parts(c);
  const float half = power_of_two(p.n - 1);
  const float y = 2.f * (half * (p.r + exp_tail(p.r)) + (half - 0.5f));
  return x == 0.f ? x : y;
}

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

// 2 ulp. With t = e^(-2|x|) - 1: tanh |x| = -t / (t + 2).
inline float m_tanh(float x) {
  const float t = m_expm1(-2.f * std::fabs(x));
  return std::copysign(-t / (t + 2.f), x);
}

// 2 ulp; e^(-|x|) never overflows.
inline float m_sigmoid(float x) {
  const float e = m_exp(-std::fabs(x));
  return (x < 0.f ? e : 1.f) / (1.f + e);
}

// 1 ulp. Minimax polynomials of N. Juffa, BSD-2: x + x p(x^2) near 0, 1 - e^(q(|x|)) beyond.
inline float m_erf(float x) {
  const float t = std::fabs(x), s = x * x;
  const float high = polynomial(t, -1.72853470e-5f, 3.83197126e-4f) * s +
                     polynomial(t, -3.88396438e-3f, 2.42546219e-2f);
  float r = polynomial(t, high, -1.06777877e-1f, -6.34846687e-1f, -1.28717512e-1f, -t);
  r = t > 4.f ? -20.f : r;  // erf is 1 there, and the polynomial ends
  const float far = std::copysign(1.f - m_exp(r), x);
  const float near = polynomial(s, -5.96761703e-4f, 4.99119423e-3f, -2.67681349e-2f, 1.12819925e-1f,
                                -3.76125336e-1f, 1.28379166e-1f) *
                         x +
                     x;
  return x != x ? x : t > 0.927734375f ? far : near;
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

// sin(x + ahead pi / 2), 0.53 ulp: by series in float64 at the angle r from the nearest quarter n.
inline float sine(float x, int64_t ahead) {
  const int32_t bits = bit_cast<int32_t>(x), e = (bits >> 23) & 255;
  const double m = (bits & 0x7fffff) | (e > 0 ? 0x800000 : 0);
  const double quarters = m * kQuarters.high[e];
  const double shifted = quarters + 0x1.8p52;
  const double r =
      (quarters - (shifted - 0x1.8p52) + m * kQuarters.low[e]) * 1.57079632679489661923;
  const int64_t n = bit_cast<int64_t>(shifted) + ahead;
  const double s = r * r;
  const double odd =
      r + r * s * (-1. / 6 + s * (1. / 120 + s * (-1. / 5040 + s * (1. / 362880 - s / 39916800))));
  const double even =
      1 + s * (-.5 + s * (1. / 24 + s * (-1. / 720 + s * (1. / 40320 - s / 3628800))));
  return float(n & 1 ? even : odd) * (n & 2 ? -1.f : 1.f);
}
inline float m_sin(float x) { return std::copysign(1.f, x) * sine(x, 0); }
inline float m_cos(float x) { return sine(x, 1); }

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

template <class T>
inline T m_silu_backward(T x, T dy) {
  const T s = m_sigmoid(x);
  return dy * s * (T(1) + x * (T(1) - s));
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
inline Normal<float> m_normal(float x) {
  float t = std::fabs(x);
  t = t > 5.75f ? 5.75f : t;  // NaN passes through
  const float q =
      polynomial(t, 3.07473691e-8f, -9.57478164e-7f, 1.34250000e-5f, -1.13219794e-4f,
                 6.50790578e-4f, -2.76062777e-3f, 9.21831746e-3f, -2.56418381e-2f, 6.20050356e-2f,
                 -1.32827148e-1f, 2.49975219e-1f, -3.98940712e-1f, 4.99999970e-1f);
  const float e = m_exp(-0.5f * x * x), beyond = q * e;
  return {x < 0.f ? beyond : 1.f - beyond, e * 0.398942280f};
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
inline T m_gelu_tanh(T x) {
  const T u = T(0.79788456080286535588) * (x + T(0.044715) * x * x * x);
  return T(0.5) * x * (T(1) + m_tanh(u));
}
template <class T>
inline T m_gelu_tanh_backward(T x, T dy) {
  const T t = m_tanh(T(0.79788456080286535588) * (x + T(0.044715) * x * x * x));
  const T slope = T(0.79788456080286535588) * (T(1) + T(3 * 0.044715) * x * x);
  return dy * (T(0.5) * (T(1) + t) + T(0.5) * x * (T(1) - t * t) * slope);
}

}  // namespace needle::cpu
