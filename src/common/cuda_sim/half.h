// __half and __nv_bfloat16 with the intrinsics of cuda_fp16.h and cuda_bf16.h. Arithmetic is done
// in float32 and rounded to 16 bits, which for + - * / gives the correctly rounded result; what
// float32 would round in a way that shows is rounded to odd on its way.
#pragma once

#include <cmath>
#include <type_traits>

#include "../dtype.h"
#include "types.h"

namespace needle::sim {

inline float for_small(float value) { return value; }
inline float for_small(double value) { return round_to_odd(value); }
template <class T>
float for_small(T value) {
  static_assert(std::is_integral_v<T> || std::is_same_v<T, long double>);
  if constexpr (std::is_integral_v<T> && sizeof(T) == 8) {
    // Beyond 53 bits the last that a double always holds stands for those below it.
    constexpr T exact = T(1) << 53;
    const T low = value & 0x7ff;
    if (low != 0 && (value > exact || (std::is_signed_v<T> && value < T(0) - exact)))
      return round_to_odd(static_cast<double>((value - low) | 0x800));
  }
  return round_to_odd(static_cast<double>(value));
}

// a * b + c, rounded once, from a float32 that is rounded to odd. A product of two 16-bit floats is
// exact in double, and so is what a sum of doubles loses (Knuth 1969, two-sum).
inline float fma_for_small(double a, double b, double c) {
  const double product = a * b, sum = product + c, part = sum - product;
  const double lost = (product - (sum - part)) + (c - part);
  auto bits = bit_cast<int64_t>(sum);
  if ((lost > 0 || lost < 0) && bits % 2 == 0) bits += (lost > 0) == (sum > 0) ? 1 : -1;
  return round_to_odd(bit_cast<double>(bits));
}

template <class Format>
struct Small {
  uint16_t bits;

  Small() = default;
  template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>>
  Small(T value) : bits(Format(for_small(value)).bits) {}
  static Small from_bits(unsigned short b) {
    Small s;
    s.bits = b;
    return s;
  }
  __forceinline__ operator float() const {
    Format f;
    f.bits = bits;
    return f;
  }
  __forceinline__ Small& operator+=(Small b) { return *this = *this + b; }
  __forceinline__ Small& operator-=(Small b) { return *this = *this - b; }
  __forceinline__ Small& operator*=(Small b) { return *this = *this * b; }
  __forceinline__ Small& operator/=(Small b) { return *this = *this / b; }

  __forceinline__ Small& operator++() { return *this += Small(1); }
  __forceinline__ Small& operator--() { return *this -= Small(1); }
  Small operator++(int) {
    const Small before = *this;
    ++*this;
    return before;
  }
  Small operator--(int) {
    const Small before = *this;
    --*this;
    return before;
  }

  friend Small operator+(Small a) { return a; }
  friend Small operator-(Small a) { return from_bits(a.bits ^ 0x8000u); }
  // clang-format off
#define OP(op) \
  friend Small operator op(Small a, Small b) { return Small(float(a) op float(b)); }
  OP(+) OP(-) OP(*) OP(/)
#undef OP
#define OP(op) \
  friend bool operator op(Small a, Small b) { return float(a) op float(b); }
  OP(==) OP(!=) OP(<) OP(<=) OP(>) OP(>=)
#undef OP
  // clang-format on
};

template <class T>
struct __align__(4) SmallPair {
  T x, y;
  SmallPair() = default;
  SmallPair(T x_, T y_) : x(x_), y(y_) {}
  friend SmallPair operator+(SmallPair a) { return a; }
  friend SmallPair operator-(SmallPair a) { return {-a.x, -a.y}; }
  // clang-format off
#define OP(op) \
  friend SmallPair operator op(SmallPair a, SmallPair b) { return {a.x op b.x, a.y op b.y}; } \
  friend SmallPair& operator op##=(SmallPair& a, SmallPair b) { return a = a op b; }
  OP(+) OP(-) OP(*) OP(/)
#undef OP
#define OP(op) \
  friend bool operator op(SmallPair a, SmallPair b) { return (a.x op b.x) && (a.y op b.y); }
  OP(==) OP(!=) OP(<) OP(<=) OP(>) OP(>=)  // != too: of both, as __hbneu2
#undef OP
#define OP(op)                                                              \
  friend SmallPair& operator op(SmallPair& a) { return op a.x, op a.y, a; } \
  friend SmallPair operator op(SmallPair& a, int) { return {a.x op, a.y op}; }
  OP(++) OP(--)
#undef OP
  // clang-format on
};

}  // namespace needle::sim

using __half = needle::sim::Small<needle::float16>;
using __half2 = needle::sim::SmallPair<__half>;
using half = __half;
using half2 = __half2;
using __nv_bfloat16 = needle::sim::Small<needle::bfloat16>;
using __nv_bfloat162 = needle::sim::SmallPair<__nv_bfloat16>;
using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;

inline __half __float2half(float f) { return f; }
inline __half __float2half_rn(float f) { return f; }
inline __half __double2half(double d) { return needle::round_to_odd(d); }
inline float __half2float(__half h) { return h; }
inline unsigned short __half_as_ushort(__half h) { return h.bits; }
inline __half __ushort_as_half(unsigned short b) { return __half::from_bits(b); }
inline __half2 __halves2half2(__half a, __half b) { return {a, b}; }
inline __half2 __half2half2(__half a) { return {a, a}; }
inline __half2 __float2half2_rn(float f) { return {f, f}; }
inline __half2 __floats2half2_rn(float a, float b) { return {a, b}; }
inline __half2 __float22half2_rn(float2 f) { return {f.x, f.y}; }
inline float2 __half22float2(__half2 h) { return {h.x, h.y}; }
inline __half __low2half(__half2 h) { return h.x; }
inline __half __high2half(__half2 h) { return h.y; }
inline __half2 __low2half2(__half2 h) { return {h.x, h.x}; }
inline __half2 __high2half2(__half2 h) { return {h.y, h.y}; }
inline __half2 __lows2half2(__half2 a, __half2 b) { return {a.x, b.x}; }
inline __half2 __highs2half2(__half2 a, __half2 b) { return {a.y, b.y}; }
inline __half2 __lowhigh2highlow(__half2 h) { return {h.y, h.x}; }
inline __half2 make_half2(__half a, __half b) { return {a, b}; }
inline short __half_as_short(__half h) { return static_cast<short>(h.bits); }
inline __half __short_as_half(short b) { return __half::from_bits(static_cast<unsigned short>(b)); }

inline __nv_bfloat16 __float2bfloat16(float f) { return f; }
inline __nv_bfloat16 __float2bfloat16_rn(float f) { return f; }
inline __nv_bfloat16 __double2bfloat16(double d) { return needle::round_to_odd(d); }
inline float __bfloat162float(__nv_bfloat16 h) { return h; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 h) { return h.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short b) { return __nv_bfloat16::from_bits(b); }
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 a, __nv_bfloat16 b) { return {a, b}; }
inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 a) { return {a, a}; }
inline __nv_bfloat162 __float2bfloat162_rn(float f) { return {f, f}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) { return {a, b}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 f) { return {f.x, f.y}; }
inline float2 __bfloat1622float2(__nv_bfloat162 h) { return {h.x, h.y}; }
inline __nv_bfloat16 __low2bfloat16(__nv_bfloat162 h) { return h.x; }
inline __nv_bfloat16 __high2bfloat16(__nv_bfloat162 h) { return h.y; }
inline __nv_bfloat162 __low2bfloat162(__nv_bfloat162 h) { return {h.x, h.x}; }
inline __nv_bfloat162 __high2bfloat162(__nv_bfloat162 h) { return {h.y, h.y}; }
inline __nv_bfloat162 __lows2bfloat162(__nv_bfloat162 a, __nv_bfloat162 b) { return {a.x, b.x}; }
inline __nv_bfloat162 __highs2bfloat162(__nv_bfloat162 a, __nv_bfloat162 b) { return {a.y, b.y}; }
inline __nv_bfloat162 make_bfloat162(__nv_bfloat16 a, __nv_bfloat16 b) { return {a, b}; }
inline short __bfloat16_as_short(__nv_bfloat16 h) { return static_cast<short>(h.bits); }
inline __nv_bfloat16 __short_as_bfloat16(short b) {
  return __nv_bfloat16::from_bits(static_cast<unsigned short>(b));
}

// The __h... family is the same for both formats, and for pairs element by element.
// clang-format off
#define UNARY(name, R, expression) \
  template <class F> R name(needle::sim::Small<F> a) { return R(expression); }
#define EACH(name, pair_name, expression)                                                       \
  template <class F, class R = needle::sim::Small<F>>                                           \
  R name(needle::sim::Small<F> a) {                                                             \
    return R(expression);                                                                       \
  }                                                                                             \
  template <class F>                                                                            \
  needle::sim::SmallPair<needle::sim::Small<F>> pair_name(                                      \
      needle::sim::SmallPair<needle::sim::Small<F>> a) {                                        \
    return {name(a.x), name(a.y)};                                                              \
  }
#define BINARY(name, R, expression) \
  template <class F> R name(needle::sim::Small<F> a, needle::sim::Small<F> b) { return R(expression); }
#define PAIRED(name, pair_name, expression)                                                     \
  template <class F, class R = needle::sim::Small<F>>                                           \
  R name(needle::sim::Small<F> a, needle::sim::Small<F> b) {                                    \
    return R(expression);                                                                       \
  }                                                                                             \
  template <class F>                                                                            \
  needle::sim::SmallPair<needle::sim::Small<F>> pair_name(                                      \
      needle::sim::SmallPair<needle::sim::Small<F>> a,                                          \
      needle::sim::SmallPair<needle::sim::Small<F>> b) {                                        \
    return {name(a.x, b.x), name(a.y, b.y)};                                                    \
  }
PAIRED(__hadd, __hadd2, float(a) + float(b))
PAIRED(__hsub, __hsub2, float(a) - float(b))
PAIRED(__hmul, __hmul2, float(a) * float(b))
PAIRED(__hdiv, __h2div, float(a) / float(b))
// Of two zeros the largest is +0 if one is, the smallest -0.
PAIRED(__hmax, __hmax2, a == b ? R::from_bits(a.bits & b.bits) : R(std::fmax(float(a), float(b))))
PAIRED(__hmin, __hmin2, a == b ? R::from_bits(a.bits | b.bits) : R(std::fmin(float(a), float(b))))
BINARY(__heq, bool, float(a) == float(b))
BINARY(__hne, bool, float(a) < float(b) || float(a) > float(b))  // false for NaN, as all of these
BINARY(__hlt, bool, float(a) < float(b))
BINARY(__hle, bool, float(a) <= float(b))
BINARY(__hgt, bool, float(a) > float(b))
BINARY(__hge, bool, float(a) >= float(b))
UNARY(__hisnan, bool, std::isnan(float(a)))
UNARY(__hisinf, int, std::isinf(float(a)) ? (float(a) > 0 ? 1 : -1) : 0)
EACH(__hneg, __hneg2, -a)
EACH(__habs, __habs2, R::from_bits(a.bits & 0x7fffu))
EACH(hexp, h2exp, std::exp(float(a)))
EACH(hexp2, h2exp2, std::exp2(float(a)))
EACH(hexp10, h2exp10, std::pow(10.0, double(float(a))))
EACH(hlog, h2log, std::log(float(a)))
EACH(hlog2, h2log2, std::log2(float(a)))
EACH(hlog10, h2log10, std::log10(float(a)))
EACH(hsqrt, h2sqrt, std::sqrt(float(a)))
EACH(hrsqrt, h2rsqrt, 1.0f / std::sqrt(float(a)))
EACH(hrcp, h2rcp, 1.0f / float(a))
EACH(hsin, h2sin, std::sin(float(a)))
EACH(hcos, h2cos, std::cos(float(a)))
EACH(htanh, h2tanh, std::tanh(float(a)))
EACH(hfloor, h2floor, std::floor(float(a)))
EACH(hceil, h2ceil, std::ceil(float(a)))
EACH(hrint, h2rint, std::nearbyint(float(a)))
EACH(htrunc, h2trunc, std::trunc(float(a)))
#undef EACH
#undef UNARY
#undef BINARY
#undef PAIRED
// clang-format on

template <class F>
needle::sim::Small<F> __hfma(needle::sim::Small<F> a, needle::sim::Small<F> b,
                             needle::sim::Small<F> c) {
  return needle::sim::fma_for_small(float(a), float(b), float(c));
}
template <class T>
needle::sim::SmallPair<T> __hfma2(needle::sim::SmallPair<T> a, needle::sim::SmallPair<T> b,
                                  needle::sim::SmallPair<T> c) {
  return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
}
template <class T>
float __low2float(needle::sim::SmallPair<T> h) {
  return h.x;
}
template <class T>
float __high2float(needle::sim::SmallPair<T> h) {
  return h.y;
}
