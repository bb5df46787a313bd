// The functions that ewise_ops.def calls, for CPU code. Those that contain an exponential, a sine
// or a cosine, and of float a power, are written for vectors (simd_cpu.h), the others so that g++
// vectorizes loops over them; each says its error in units of the last place (ulp). What there is
// for float alone goes through libm in float64. NaN, infinities and signed zeros come out as
// numpy's do.
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
using Doubles = Vec<double>;
NEEDLE_INLINE Mask<float> bits_of(Floats x) { return bit_cast<Mask<float>>(x); }
NEEDLE_INLINE Mask<double> bits_of(Doubles x) { return bit_cast<Mask<double>>(x); }
NEEDLE_INLINE Floats absolute(Floats x) { return bit_cast<Floats>(bits_of(x) & INT32_MAX); }
NEEDLE_INLINE Doubles absolute(Doubles x) { return bit_cast<Doubles>(bits_of(x) & INT64_MAX); }
NEEDLE_INLINE Floats with_sign_of(Floats sign, Floats x) {
  return bit_cast<Floats>((bits_of(sign) & INT32_MIN) | bits_of(x));
}
NEEDLE_INLINE Doubles with_sign_of(Doubles sign, Doubles x) {
  return bit_cast<Doubles>((bits_of(sign) & INT64_MIN) | bits_of(x));
}

// f of floats by their values as double, in halves of a vector.
template <class F, class... X>
NEEDLE_INLINE Floats in_double(F&& f, X... x) {
#if defined(__AVX512F__)  // g++ 12 converts by quarters, and puts halves together in memory
  const auto half_of = [](Floats v, auto h) __attribute__((always_inline)) {
    const __m256 half = (__m256)_mm512_maskz_extractf64x4_pd(0xf, (__m512d)v, decltype(h)::value);
    return (Doubles)_mm512_maskz_cvtps_pd(0xff, half);
  };
  const auto narrow = [](Doubles v) __attribute__((always_inline)) {
    return (__m256d)_mm512_maskz_cvtpd_ps(0xff, (__m512d)v);
  };
  using Low = std::integral_constant<int, 0>;
  using High = std::integral_constant<int, 1>;
  const __m512d low = _mm512_castpd256_pd512(narrow(f(half_of(x, Low())...)));
  return (Floats)_mm512_maskz_insertf64x4(0xff, low, narrow(f(half_of(x, High())...)), 1);
#else
  typedef float Half __attribute__((vector_size(kVectorBytes / 2)));
  const auto half_of = [](const Floats& whole, int h) __attribute__((always_inline)) {
    Half half;
    memcpy(&half, reinterpret_cast<const char*>(&whole) + h * sizeof half, sizeof half);
    return __builtin_convertvector(half, Doubles);
  };
  Floats y;
  for (int h = 0; h < 2; ++h) {
    const Half half = __builtin_convertvector(f(half_of(x, h)...), Half);
    memcpy(reinterpret_cast<char*>(&y) + h * sizeof half, &half, sizeof half);
  }
  return y;
#endif
}

NEEDLE_INLINE Floats m_exp(Floats x) { return vexp<float>(x); }
NEEDLE_INLINE Doubles m_exp(Doubles x) { return vexp<double>(x); }

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

// 1 ulp, after fdlibm: x = 2^e m as above, and log m = 2 artanh(s) with s = (m - 1) / (m + 1).
NEEDLE_INLINE Doubles m_log(Doubles x) {
  const Doubles zero{}, least = broadcast(std::numeric_limits<double>::min());
  const Doubles scaled = x < least ? x * 0x1p54 : x;
  const Mask<double> exponent = (bits_of(scaled) - 0x3fe6a09e667f3bcd) >> 52;
  const Doubles m = bit_cast<Doubles>(bits_of(scaled) - (exponent << 52));
  const Doubles round = broadcast(0x1.8p52);  // as a number: exponent is in its low bits
  const Doubles e =
      bit_cast<Doubles>(exponent + bits_of(round)) - round - (x < least ? 54. + zero : zero);
  const Doubles f = m - 1., s = f / (f + 2.), z = s * s, half_square = f * f * .5;
  const Doubles rest = polynomial(z, 2. / 21, 2. / 19, 2. / 17, 2. / 15, 2. / 13, 2. / 11, 2. / 9,
                                  2. / 7, 2. / 5, 2. / 3) *
                       z;
  constexpr double kLn2High = 0x1.62e42feep-1, kLn2Low = 0x1.a39ef35793c76p-33;
  Doubles y = e * kLn2High - ((half_square - (s * (half_square + rest) + e * kLn2Low)) - f);
  const Doubles infinite = broadcast(std::numeric_limits<double>::infinity());
  y = x == infinite ? infinite : y;
  y = x == zero ? -infinite : y;
  return x >= zero ? y : broadcast(std::numeric_limits<double>::quiet_NaN());
}

// 2.5 ulp. With t = e^(-2|x|) - 1 = 2^n (e^r - 1) + (2^n - 1): tanh |x| = -t / (t + 2).
template <class A>
NEEDLE_INLINE Vec<A> tanh_of(Vec<A> x) {
  const Vec<A> least = broadcast(A(-60));
  Vec<A> y = absolute(x) * A(-2);
  y = y < least ? least : y;
  const ExpParts<A> parts(y);
  const Vec<A> power = power_of_two<A>(bits_of(parts.shifted));
  const Vec<A> rest = ExpConstants<A>::tail(parts.r) * parts.r * parts.r + parts.r;
  const Vec<A> t = power * rest + (power - A(1));
  return with_sign_of(x, absolute(t / (t + A(2))));
}
NEEDLE_INLINE Floats m_tanh(Floats x) { return tanh_of<float>(x); }
NEEDLE_INLINE Doubles m_tanh(Doubles x) { return tanh_of<double>(x); }

// 2.3 ulp; e^(-|x|) never overflows.
template <class A>
NEEDLE_INLINE Vec<A> sigmoid_of(Vec<A> x) {
  const Vec<A> e = m_exp(-absolute(x)), one = broadcast(A(1));
  return (x < Vec<A>{} ? e : one) / (one + e);
}
NEEDLE_INLINE Floats m_sigmoid(Floats x) { return sigmoid_of<float>(x); }
NEEDLE_INLINE Doubles m_sigmoid(Doubles x) { return sigmoid_of<double>(x); }

// 0.51 ulp: e^(b log |a|), and what C says of signs, whole and infinite exponents.
NEEDLE_INLINE Floats m_pow(Floats base, Floats exponent) {
  const auto power = [](Doubles a, Doubles b) __attribute__((always_inline)) {
    const Doubles zero{}, one = broadcast(1.);
    const Doubles infinite = broadcast(std::numeric_limits<double>::infinity());
    const Doubles none = broadcast(std::numeric_limits<double>::quiet_NaN());
    const Doubles size = absolute(a), large = broadcast(0x1p30);
    Doubles log = b * m_log(size);
    log = ((size == one) & (absolute(b) == infinite)) ? zero : log;
    const Doubles y = m_exp(log);
    Doubles n = b < -large ? -large : b;  // a float that large is even
    n = n > large ? large : n;
    const Doubles shifted = n + 0x1.8p52;  // rounds, as in ExpParts
    const Mask<double> odd = (bits_of(shifted) & 1) != 0, whole = shifted - 0x1.8p52 == n;
    Doubles found = odd & whole ? with_sign_of(a, y) : y;
    found = (a < zero) & (size != infinite) & ~whole ? none : found;
    return ((b == zero) | (a == one)) ? one : found;
  };
  return in_double(power, base, exponent);
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

// sin(r + n pi / 2) from sin r and cos r; of numbers or of vectors.
template <class Angle, class Turns>
NEEDLE_INLINE Angle turned(Angle sin, Angle cos, Turns n) {
  const Angle y = (n & 1) != 0 ? cos : sin;
  return (n & 2) != 0 ? -y : y;
}

// The same by series, for |r| <= pi / 4.
template <class Angle, class Turns>
NEEDLE_INLINE Angle sine_series(Angle r, Turns n) {
  const Angle s = r * r;
  const Angle odd =
      polynomial(s, -1. / 39916800, 1. / 362880, -1. / 5040, 1. / 120, -1. / 6) * s * r + r;
  const Angle even = polynomial(s, -1. / 3628800, 1. / 40320, -1. / 720, 1. / 24, -.5, 1.);
  return turned(odd, even, n);
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
  x = absolute(x);
  const auto near = [&](Doubles angle) __attribute__((always_inline)) {
    const Doubles shifted = angle * 0.63661977236758134308 + 0x1.8p52, n = shifted - 0x1.8p52;
    const Doubles r = (angle - n * 0x1.921fb544p0) - n * 0x1.0b4611a626331p-34;
    return sine_series(r, bits_of(shifted) + ahead);
  };
  Floats y = in_double(near, x);
  if (any_lane(~(x < broadcast(0x1p20f))))  // or NaN
    for (int l = 0; l < kLanes<float>; ++l)
      if (!(x[l] < 0x1p20f)) y[l] = far_sine(x[l], ahead);
  return y;
}

// Of doubles, 0.8 ulp. Below 2^16 quarter turns, those times the first 37 bits of pi / 2 and times
// the next 37 are exact, and the angle that is left has two parts.
NEEDLE_INLINE Doubles sine(Doubles x, int64_t ahead) {
  x = absolute(x);
  const Doubles shifted = x * 0x1.45f306dc9c883p-1 + 0x1.8p52, n = shifted - 0x1.8p52;
  const Doubles first = x - n * 0x1.921fb54440000p+0, second = n * 0x1.68c234c4c0000p-39;
  const Doubles sum = first - second, taken = sum - first;
  const Doubles lost = (first - (sum - taken)) - (second + taken);  // after Knuth
  const Doubles rest = lost - n * 0x1.98a2e03707345p-77;
  const Doubles r = sum + rest, low = rest - (r - sum), s = r * r;

  const Doubles odd = r + (polynomial(s, 1. / 355687428096000, -1. / 1307674368000, 1. / 6227020800,
                                      -1. / 39916800, 1. / 362880, -1. / 5040, 1. / 120, -1. / 6) *
                               s * r +
                           low * (1. - .5 * s));
  const Doubles half = .5 * s, most = 1. - half;
  const Doubles even =
      most +
      (((1. - most) - half) + (polynomial(s, 1. / 20922789888000, -1. / 87178291200, 1. / 479001600,
                                          -1. / 3628800, 1. / 40320, -1. / 720, 1. / 24) *
                                   s * s -
                               r * low));
  Doubles y = turned(odd, even, bits_of(shifted) + ahead);
  if (any_lane(~(x < broadcast(1e5))))
    for (int l = 0; l < kLanes<double>; ++l)
      if (!(x[l] < 1e5)) y[l] = ahead ? std::cos(x[l]) : std::sin(x[l]);
  return y;
}

NEEDLE_INLINE Floats m_sin(Floats x) { return sine(x, 0) * with_sign_of(x, broadcast(1.f)); }
NEEDLE_INLINE Floats m_cos(Floats x) { return sine(x, 1); }
NEEDLE_INLINE Doubles m_sin(Doubles x) { return sine(x, 0) * with_sign_of(x, broadcast(1.)); }
NEEDLE_INLINE Doubles m_cos(Doubles x) { return sine(x, 1); }

inline double m_erf(double x) { return std::erf(x); }

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

// The numbers that go with T: T itself, or those of a vector.
template <class T>
using Number = std::conditional_t<std::is_same_v<T, Floats>, float,
                                  std::conditional_t<std::is_same_v<T, Doubles>, double, T>>;

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

// gelu(x) = x (1 + tanh(u)) / 2 with u = sqrt(2/pi) (x + 0.044715 x^3). The factor of x is
// sigmoid(2 u), which loses no digits below 0.
template <class T>
inline T gelu_tanh_share(T x) {
  using N = Number<T>;
  return m_sigmoid(N(2 * 0.79788456080286535588) * (x + N(0.044715) * x * x * x));
}
template <class T>
inline T m_gelu_tanh(T x) {
  return x * gelu_tanh_share(x);
}
template <class T>
inline T m_gelu_tanh_backward(T x, T dy) {
  using N = Number<T>;
  const T s = gelu_tanh_share(x);
  const T slope = N(2 * 0.79788456080286535588) * (N(1) + N(3 * 0.044715) * x * x);
  return dy * (s + x * s * (N(1) - s) * slope);
}

}  // namespace needle::cpu
