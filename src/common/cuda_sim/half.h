// __half and __nv_bfloat16 with the intrinsics of cuda_fp16.h and cuda_bf16.h. Arithmetic is done in float32 and rounded
// once, which for + - * / gives the correctly rounded 16-bit result.
#pragma once

#include <cmath>
#include <type_traits>

#include "../dtype.h"
#include "types.h"

namespace needle::sim {

template <class Format>
struct Small {
  uint16_t bits;

  Small() = default;
  template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>>
  Small(T value) : bits(Format(static_cast<float>(value)).bits) {}
  static Small from_bits(unsigned short b) {
    Small s;
    s.bits = b;
    return s;
  }
  operator float() const {
    Format f;
    f.bits = bits;
    return f;
  }
  Small& operator+=(Small b) { return *this = *this + b; }
  Small& operator-=(Small b) { return *this = *this - b; }
  Small& operator*=(Small b) { return *this = *this * b; }
  Small& operator/=(Small b) { return *this = *this / b; }

#define OP(op) \
  friend Small operator op(Small a, Small b) { return Small(float(a) op float(b)); }
  OP(+) OP(-) OP(*) OP(/)
#undef OP
#define OP(op) \
  friend bool operator op(Small a, Small b) { return float(a) op float(b); }
  OP(==) OP(!=) OP(<) OP(<=) OP(>) OP(>=)
#undef OP
  friend Small operator-(Small a) { return from_bits(a.bits ^ 0x8000u); }
};

template <class T>
struct __align__(4) SmallPair {
  T x, y;
  SmallPair() = default;
  SmallPair(T x_, T y_) : x(x_), y(y_) {}
#define OP(op) \
  friend SmallPair operator op(SmallPair a, SmallPair b) { return {a.x op b.x, a.y op b.y}; }
  OP(+) OP(-) OP(*) OP(/)
#undef OP
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
inline __half __double2half(double d) { return float(d); }
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

inline __nv_bfloat16 __float2bfloat16(float f) { return f; }
inline __nv_bfloat16 __float2bfloat16_rn(float f) { return f; }
inline __nv_bfloat16 __double2bfloat16(double d) { return float(d); }
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

// The __h... family is the same for both formats, and for pairs element by element.
#define NEEDLE_SIM_SMALL template <class F> inline
#define NEEDLE_SIM_S needle::sim::Small<F>
#define NEEDLE_SIM_PAIR needle::sim::SmallPair<needle::sim::Small<F>>
#define UNARY(name, expression)                                                            \
  NEEDLE_SIM_SMALL NEEDLE_SIM_S name(NEEDLE_SIM_S a) { return NEEDLE_SIM_S(expression); }
#define PAIRED(name, expression)                                                                            \
  NEEDLE_SIM_SMALL NEEDLE_SIM_S name(NEEDLE_SIM_S a, NEEDLE_SIM_S b) { return NEEDLE_SIM_S(expression); }   \
  NEEDLE_SIM_SMALL NEEDLE_SIM_PAIR name##2(NEEDLE_SIM_PAIR a, NEEDLE_SIM_PAIR b) {                          \
    return {name(a.x, b.x), name(a.y, b.y)};                                                                \
  }
#define COMPARE(name, op) \
  NEEDLE_SIM_SMALL bool name(NEEDLE_SIM_S a, NEEDLE_SIM_S b) { return float(a) op float(b); }
PAIRED(__hadd, float(a) + float(b))
PAIRED(__hsub, float(a) - float(b))
PAIRED(__hmul, float(a) * float(b))
PAIRED(__hmax, std::fmax(float(a), float(b)))
PAIRED(__hmin, std::fmin(float(a), float(b)))
NEEDLE_SIM_SMALL NEEDLE_SIM_S __hdiv(NEEDLE_SIM_S a, NEEDLE_SIM_S b) { return a / b; }
NEEDLE_SIM_SMALL NEEDLE_SIM_PAIR __h2div(NEEDLE_SIM_PAIR a, NEEDLE_SIM_PAIR b) { return a / b; }
NEEDLE_SIM_SMALL NEEDLE_SIM_S __hfma(NEEDLE_SIM_S a, NEEDLE_SIM_S b, NEEDLE_SIM_S c) {
  return NEEDLE_SIM_S(std::fma(float(a), float(b), float(c)));
}
NEEDLE_SIM_SMALL NEEDLE_SIM_PAIR __hfma2(NEEDLE_SIM_PAIR a, NEEDLE_SIM_PAIR b, NEEDLE_SIM_PAIR c) {
  return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
}
COMPARE(__heq, ==) COMPARE(__hne, !=) COMPARE(__hlt, <) COMPARE(__hle, <=) COMPARE(__hgt, >) COMPARE(__hge, >=)
NEEDLE_SIM_SMALL bool __hisnan(NEEDLE_SIM_S a) { return std::isnan(float(a)); }
NEEDLE_SIM_SMALL int __hisinf(NEEDLE_SIM_S a) { return std::isinf(float(a)) ? (float(a) > 0 ? 1 : -1) : 0; }
NEEDLE_SIM_SMALL NEEDLE_SIM_S __hneg(NEEDLE_SIM_S a) { return -a; }
NEEDLE_SIM_SMALL NEEDLE_SIM_S __habs(NEEDLE_SIM_S a) { return NEEDLE_SIM_S::from_bits(a.bits & 0x7fffu); }
UNARY(hexp, std::exp(float(a)))
UNARY(hexp2, std::exp2(float(a)))
UNARY(hlog, std::log(float(a)))
UNARY(hsqrt, std::sqrt(float(a)))
UNARY(hrsqrt, 1.0f / std::sqrt(float(a)))
UNARY(hrcp, 1.0f / float(a))
UNARY(hsin, std::sin(float(a)))
UNARY(hcos, std::cos(float(a)))
NEEDLE_SIM_SMALL float __low2float(NEEDLE_SIM_PAIR h) { return h.x; }
NEEDLE_SIM_SMALL float __high2float(NEEDLE_SIM_PAIR h) { return h.y; }
#undef UNARY
#undef PAIRED
#undef COMPARE
#undef NEEDLE_SIM_SMALL
#undef NEEDLE_SIM_S
#undef NEEDLE_SIM_PAIR
