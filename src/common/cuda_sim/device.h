// Indices, barriers, fences, and the device functions that the host's headers do not have.
#pragma once

#include <cmath>
#include <cstdio>
#include <ctime>
#include <limits>
#include <type_traits>

#include "half.h"
#include "thread.h"

// In CUDA they need no namespace.
using std::isfinite;
using std::isinf;
using std::isnan;
using std::signbit;

constexpr int warpSize = needle::sim::kWarpSize;

inline void __syncthreads(NEEDLE_SIM_SITE) {
  needle::sim::block_barrier(needle::sim::BarrierKind::kPlain, 0, site);
}
inline int __syncthreads_count(int predicate, NEEDLE_SIM_SITE) {
  return needle::sim::block_barrier(needle::sim::BarrierKind::kCount, predicate, site);
}
inline int __syncthreads_and(int predicate, NEEDLE_SIM_SITE) {
  return needle::sim::block_barrier(needle::sim::BarrierKind::kAnd, predicate, site);
}
inline int __syncthreads_or(int predicate, NEEDLE_SIM_SITE) {
  return needle::sim::block_barrier(needle::sim::BarrierKind::kOr, predicate, site);
}
inline void __threadfence() { needle::sim::fence(true); }
inline void __threadfence_block() { needle::sim::fence(false); }
inline void __threadfence_system() { needle::sim::fence(true); }
[[noreturn]] inline void __trap(NEEDLE_SIM_SITE) {
  needle::sim::fault("__trap() was called", site);
}
inline void __nanosleep(unsigned) {}
inline long long clock64() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000LL + now.tv_nsec;
}

// CUDA's overloads of min and max, of which a call with other types fits no one best. With a NaN
// they give the other number.
#define NEEDLE_SIM_MIN_MAX(A, B)                                                     \
  inline std::common_type_t<A, B> min(A a, B b) { return needle::sim::least(a, b); } \
  inline std::common_type_t<A, B> max(A a, B b) { return needle::sim::most(a, b); }
#define NEEDLE_SIM_INTEGERS(T)      \
  NEEDLE_SIM_MIN_MAX(T, T)          \
  NEEDLE_SIM_MIN_MAX(unsigned T, T) \
  NEEDLE_SIM_MIN_MAX(T, unsigned T) \
  NEEDLE_SIM_MIN_MAX(unsigned T, unsigned T)
namespace needle::sim {
template <class A, class B, class T = std::common_type_t<A, B>>
T least(A a, B b) {
  if constexpr (std::is_floating_point_v<T>) return std::fmin(T(a), T(b));
  return T(b) < T(a) ? T(b) : T(a);
}
template <class A, class B, class T = std::common_type_t<A, B>>
T most(A a, B b) {
  if constexpr (std::is_floating_point_v<T>) return std::fmax(T(a), T(b));
  return T(a) < T(b) ? T(b) : T(a);
}
}  // namespace needle::sim
NEEDLE_SIM_INTEGERS(int)
NEEDLE_SIM_INTEGERS(long)
NEEDLE_SIM_INTEGERS(long long)
NEEDLE_SIM_MIN_MAX(float, float)
NEEDLE_SIM_MIN_MAX(float, double)
NEEDLE_SIM_MIN_MAX(double, float)
NEEDLE_SIM_MIN_MAX(double, double)
#undef NEEDLE_SIM_MIN_MAX
#undef NEEDLE_SIM_INTEGERS
template <class A, class B>
void min(needle::sim::Small<A>, needle::sim::Small<B>) = delete;  // that is __hmin
template <class A, class B>
void max(needle::sim::Small<A>, needle::sim::Small<B>) = delete;

namespace needle::sim {
template <class T>
inline constexpr bool is_loaded =
    (std::is_arithmetic_v<T> && sizeof(T) <= 8 && !std::is_same_v<T, bool>) ||
    is_one_of<T, __half, __half2, __nv_bfloat16, __nv_bfloat162, char2, char4, uchar2, uchar4,
              short2, short4, ushort2, ushort4, int2, int4, uint2, uint4, longlong2, ulonglong2,
              float2, float4, double2>;
}  // namespace needle::sim
#define NEEDLE_SIM_LOAD(name)                                                            \
  template <class T>                                                                     \
  __forceinline__ T name(const T* p) {                                                   \
    static_assert(needle::sim::is_loaded<T>,                                             \
                  "CUDA has " #name                                                      \
                  " for numbers, vectors of 2 or 4 to 16 bytes and 16-bit floats only"); \
    return *p;                                                                           \
  }
NEEDLE_SIM_LOAD(__ldg)
NEEDLE_SIM_LOAD(__ldca)
NEEDLE_SIM_LOAD(__ldcg)
NEEDLE_SIM_LOAD(__ldcs)
NEEDLE_SIM_LOAD(__ldcv)
NEEDLE_SIM_LOAD(__ldlu)
#undef NEEDLE_SIM_LOAD
#define NEEDLE_SIM_STORE(name)                                                           \
  template <class T>                                                                     \
  __forceinline__ void name(T* p, needle::sim::no_deduce<T> value) {                     \
    static_assert(needle::sim::is_loaded<T>,                                             \
                  "CUDA has " #name                                                      \
                  " for numbers, vectors of 2 or 4 to 16 bytes and 16-bit floats only"); \
    *p = value;                                                                          \
  }
NEEDLE_SIM_STORE(__stcg)
NEEDLE_SIM_STORE(__stcs)
NEEDLE_SIM_STORE(__stwb)
NEEDLE_SIM_STORE(__stwt)
#undef NEEDLE_SIM_STORE

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
inline int __clzll(long long x) {
  return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64;
}
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
  unsigned reversed = 0;
  for (int i = 0; i < 32; ++i) reversed |= ((x >> i) & 1u) << (31 - i);
  return reversed;
}
inline unsigned long long __brevll(unsigned long long x) {
  return static_cast<unsigned long long>(__brev(unsigned(x))) << 32 | __brev(unsigned(x >> 32));
}
// Bytes of y and x, from 7 to 0, that the nibbles of `selector` name.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t bytes = uint64_t(y) << 32 | x;
  unsigned chosen = 0;
  for (int i = 0; i < 4; ++i)
    chosen |= unsigned(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return chosen;
}
inline int __dp4a(char4 a, char4 b, int c) {
  return int(unsigned(a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w) + unsigned(c));
}
inline unsigned __dp4a(uchar4 a, uchar4 b, unsigned c) {
  return unsigned(a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w) + c;
}
inline int __dp4a(int a, int b, int c) {
  return __dp4a(needle::bit_cast<char4>(a), needle::bit_cast<char4>(b), c);
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
  return __dp4a(needle::bit_cast<uchar4>(a), needle::bit_cast<uchar4>(b), c);
}
// Of the lower 24 bits of each the lower 32 of the product.
inline unsigned __umul24(unsigned a, unsigned b) { return (a & 0xffffffu) * (b & 0xffffffu); }
inline int __mul24(int a, int b) {
  const auto low = [](int x) { return static_cast<long long>(int(unsigned(x) << 8) >> 8); };
  return int(low(a) * low(b));
}
inline unsigned __umulhi(unsigned a, unsigned b) {
  return unsigned((static_cast<unsigned long long>(a) * b) >> 32);
}
inline int __mulhi(int a, int b) { return int((static_cast<long long>(a) * b) >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>((static_cast<unsigned __int128>(a) * b) >> 64);
}
inline long long __mul64hi(long long a, long long b) {
  return static_cast<long long>((static_cast<__int128>(a) * b) >> 64);
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return unsigned(((uint64_t(high) << 32 | low) << (shift & 31)) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return unsigned((uint64_t(high) << 32 | low) >> (shift & 31));
}
#define NEEDLE_SIM_BITS(name, To, From)   \
  inline To name(From value) {            \
    To to;                                \
    std::memcpy(&to, &value, sizeof(To)); \
    return to;                            \
  }
NEEDLE_SIM_BITS(__float_as_int, int, float)
NEEDLE_SIM_BITS(__float_as_uint, unsigned, float)
NEEDLE_SIM_BITS(__int_as_float, float, int)
NEEDLE_SIM_BITS(__uint_as_float, float, unsigned)
NEEDLE_SIM_BITS(__double_as_longlong, long long, double)
NEEDLE_SIM_BITS(__longlong_as_double, double, long long)
#undef NEEDLE_SIM_BITS
namespace needle::sim {
// The nearest To there is, where C++ has no answer. NaN is 0 as a number of 32 bits of a float, and
// otherwise 1 at the top. source: PTX ISA 9.0, cvt.
template <class To, class From>
To to_integer(From x) {
  constexpr int bits = 8 * sizeof(To);
  if (x != x) return sizeof(From) == 4 && bits == 32 ? 0 : To(1ull << (bits - 1));
  if (x >= std::ldexp(From(1), std::numeric_limits<To>::digits))
    return std::numeric_limits<To>::max();
  if (x < From(std::numeric_limits<To>::min())) return std::numeric_limits<To>::min();
  return To(x);
}
}  // namespace needle::sim
#define NEEDLE_SIM_TO_INTEGER(name, To, From)                                            \
  inline To name##_rz(From x) { return needle::sim::to_integer<To>(std::trunc(x)); }     \
  inline To name##_rn(From x) { return needle::sim::to_integer<To>(std::nearbyint(x)); } \
  inline To name##_rd(From x) { return needle::sim::to_integer<To>(std::floor(x)); }     \
  inline To name##_ru(From x) { return needle::sim::to_integer<To>(std::ceil(x)); }
NEEDLE_SIM_TO_INTEGER(__float2int, int, float)
NEEDLE_SIM_TO_INTEGER(__float2uint, unsigned, float)
NEEDLE_SIM_TO_INTEGER(__float2ll, long long, float)
NEEDLE_SIM_TO_INTEGER(__float2ull, unsigned long long, float)
NEEDLE_SIM_TO_INTEGER(__double2int, int, double)
NEEDLE_SIM_TO_INTEGER(__double2uint, unsigned, double)
NEEDLE_SIM_TO_INTEGER(__double2ll, long long, double)
NEEDLE_SIM_TO_INTEGER(__double2ull, unsigned long long, double)
NEEDLE_SIM_TO_INTEGER(__half2int, int, float)  // a half converts
NEEDLE_SIM_TO_INTEGER(__half2uint, unsigned, float)
NEEDLE_SIM_TO_INTEGER(__bfloat162int, int, float)
NEEDLE_SIM_TO_INTEGER(__bfloat162uint, unsigned, float)
#undef NEEDLE_SIM_TO_INTEGER
inline __half __int2half_rn(int x) { return x; }
inline __half __uint2half_rn(unsigned x) { return x; }
inline __half __short2half_rn(short x) { return x; }
inline __half __ushort2half_rn(unsigned short x) { return x; }
inline __nv_bfloat16 __int2bfloat16_rn(int x) { return x; }
inline __nv_bfloat16 __uint2bfloat16_rn(unsigned x) { return x; }
inline double __int2double_rn(int x) { return x; }
inline double __uint2double_rn(unsigned x) { return x; }
inline double __ll2double_rn(long long x) { return static_cast<double>(x); }
inline float __ll2float_rn(long long x) { return static_cast<float>(x); }
inline float __ull2float_rn(unsigned long long x) { return static_cast<float>(x); }
inline float __double2float_rn(double x) { return static_cast<float>(x); }
inline float __int2float_rn(int x) { return float(x); }
inline float __uint2float_rn(unsigned x) { return float(x); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __drcp_rn(double a) { return 1.0 / a; }
inline double __dsqrt_rn(double a) { return std::sqrt(a); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __frsqrt_rn(float a) { return 1.0f / std::sqrt(a); }
inline float __fdividef(float a, float b) { return a / b; }
inline float fdividef(float a, float b) { return a / b; }
inline float __saturatef(float x) { return std::fmin(std::fmax(x, 0.0f), 1.0f); }

// Templates, since newer C libraries have rsqrtf as a C function, which an overload may not
// redefine.
template <class T>
float rsqrtf(T x) {
  return 1.0f / std::sqrt(static_cast<float>(x));
}
template <class T>
T rsqrt(T x) {
  return T(1) / std::sqrt(x);
}
// Macros, since glibc's math.h declares __expf and the like without defining them.
#define __expf(x) expf(x)
#define __exp10f(x) exp10f(x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __log10f(x) log10f(x)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __tanf(x) tanf(x)
#define __powf(x, y) powf(x, y)

#define threadIdx (::needle::sim::self().thread_idx)
#define blockIdx (::needle::sim::self().block->block_idx)
