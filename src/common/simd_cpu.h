// Vectors as a type for the fused CPU kernels: one native register wide, on the compiler's vector
// extensions, so that a loop over `kLanes<A>` elements is vectorized by construction (sums too,
// without -ffast-math).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#include "dtype.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace needle::cpu {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64, kVectorRegisters = 32;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32, kVectorRegisters = 16;
#elif defined(__aarch64__)
constexpr int kVectorBytes = 16, kVectorRegisters = 32;
#else
constexpr int kVectorBytes = 16, kVectorRegisters = 16;
#endif

#define NEEDLE_INLINE __attribute__((always_inline)) inline

template <class A>
struct VecTypes;
template <>
struct VecTypes<float> {
  typedef float vec __attribute__((vector_size(kVectorBytes)));
  typedef int32_t mask __attribute__((vector_size(kVectorBytes)));
};
template <>
struct VecTypes<double> {
  typedef double vec __attribute__((vector_size(kVectorBytes)));
  typedef int64_t mask __attribute__((vector_size(kVectorBytes)));
};
template <class A>
using Vec = typename VecTypes<A>::vec;
template <class A>
using Mask = typename VecTypes<A>::mask;  // of a comparison: all ones or all zeros per lane
template <class A>
constexpr int kLanes = kVectorBytes / int(sizeof(A));

template <class A>
NEEDLE_INLINE Vec<A> broadcast(A value) {
  return value - Vec<A>{};
}

// A register of float as the bits of float16 or bfloat16, and back: by the processor's instructions
// where it has them.
typedef uint16_t HalfBits __attribute__((vector_size(kVectorBytes / 2)));
typedef uint32_t WordBits __attribute__((vector_size(kVectorBytes)));

template <class T>
NEEDLE_INLINE Vec<float> widened(HalfBits halves) {
#if defined(__F16C__) && defined(__AVX512F__)
  // maskz: of the plain one g++ 12 says that it reads what it has not set.
  if constexpr (std::is_same_v<T, float16>)
    return (Vec<float>)_mm512_maskz_cvtph_ps(0xffff, (__m256i)halves);
#elif defined(__F16C__)
  if constexpr (std::is_same_v<T, float16>) return (Vec<float>)_mm256_cvtph_ps((__m128i)halves);
#endif
  const WordBits bits = __builtin_convertvector(halves, WordBits);
  if constexpr (std::is_same_v<T, float16>) return from_float16_bits<Vec<float>>(bits);
  return from_bfloat16_bits<Vec<float>>(bits);
}
template <class T>
NEEDLE_INLINE HalfBits narrowed(Vec<float> v) {
#if defined(__F16C__) && defined(__AVX512F__)
  if constexpr (std::is_same_v<T, float16>)
    return (HalfBits)_mm512_maskz_cvtps_ph(0xffff, (__m512)v, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__F16C__)
  if constexpr (std::is_same_v<T, float16>)
    return (HalfBits)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT);
#endif
  WordBits bits;
  if constexpr (std::is_same_v<T, float16>)
    bits = to_float16_bits<WordBits>(v);
  else
    bits = to_bfloat16_bits<WordBits>(v);
  return __builtin_convertvector(bits, HalfBits);
}

// Loads convert 16-bit floats to float, stores round back; n < kLanes loads or stores the first n
// lanes alone.
template <class T>
NEEDLE_INLINE Vec<accum_t<T>> load(const T* from) {
  if constexpr (sizeof(T) == sizeof(accum_t<T>)) {
    Vec<T> v;
    memcpy(&v, from, sizeof v);
    return v;
  } else {
    HalfBits halves;
    memcpy(&halves, from, sizeof halves);
    return widened<T>(halves);
  }
}
template <class T>
NEEDLE_INLINE Vec<accum_t<T>> load(const T* from, int64_t n, accum_t<T> fill) {
  using A = accum_t<T>;
  A lanes[kLanes<A>];
  for (int l = 0; l < kLanes<A>; ++l) lanes[l] = l < n ? A(from[l]) : fill;
  Vec<A> v;
  memcpy(&v, lanes, sizeof v);
  return v;
}
template <class T>
NEEDLE_INLINE void store(T* to, Vec<accum_t<T>> v) {
  if constexpr (sizeof(T) == sizeof(accum_t<T>)) {
    memcpy(to, &v, sizeof v);
  } else {
    const HalfBits halves = narrowed<T>(v);
    memcpy(to, &halves, sizeof halves);
  }
}
template <class T>
NEEDLE_INLINE void store(T* to, Vec<accum_t<T>> v, int64_t n) {
  for (int64_t l = 0; l < n; ++l) to[l] = T(v[l]);
}

// Over 0 .. n: whole(offset) for each whole vector, then rest(offset, lanes).
template <class A, class Whole, class Rest>
NEEDLE_INLINE void for_vectors(int64_t n, Whole&& whole, Rest&& rest) {
  int64_t i = 0;
  for (; i + kLanes<A> <= n; i += kLanes<A>) whole(i);
  if (i < n) rest(i, n - i);
}

// to[i] = convert<To>(from[i]), in other memory; between float and a 16-bit float by vectors.
template <class From, class To>
void convert_run(const From* from, int64_t n, To* to) {
  constexpr bool kBothFloat =
      std::is_same_v<accum_t<From>, float> && std::is_same_v<accum_t<To>, float>;
  int64_t i = 0;
  if constexpr (kBothFloat && sizeof(From) != sizeof(To))
    for (; i + kLanes<float> <= n; i += kLanes<float>) store(to + i, load(from + i));
  for (; i < n; ++i) to[i] = convert<To>(from[i]);
}

template <class A>
NEEDLE_INLINE A sum_lanes(Vec<A> v) {
  A total = 0;
  for (int l = 0; l < kLanes<A>; ++l) total += v[l];
  return total;
}
template <class A>
NEEDLE_INLINE A max_lanes(Vec<A> v) {
  A largest = v[0];
  for (int l = 1; l < kLanes<A>; ++l) largest = v[l] > largest ? v[l] : largest;
  return largest;
}

// sum_i x[i] y[i]; x and y may differ in width.
template <class X, class Y, class A = accum_t<X>>
A dot(const X* x, const Y* y, int64_t n) {
  Vec<A> sum{};
  for_vectors<A>(
      n, [&](int64_t i) { sum += load(x + i) * load(y + i); },
      [&](int64_t i, int64_t lanes) {
        sum += load(x + i, lanes, A(0)) * load(y + i, lanes, A(0));
      });
  return sum_lanes<A>(sum);
}

// The numbers that differ between the two precisions of vexp.
template <class A>
struct ExpConstants;
template <>
struct ExpConstants<float> {
  static constexpr float low = -104.f, high = 89.f, normal = -86.5f, round = 0x1.8p23f,
                         ln2_high = 0x1.62e4p-1f, ln2_low = 0x1.7f7d1cp-20f;
  static constexpr int terms = 7, mantissa_bits = 23, bias = 127;
};
template <>
struct ExpConstants<double> {
  static constexpr double low = -746., high = 710., normal = -707., round = 0x1.8p52,
                          ln2_high = 0x1.62e42fefa38p-1, ln2_low = 0x1.ef35793c7673p-45;
  static constexpr int terms = 13, mantissa_bits = 52, bias = 1023;
};

// x = n ln 2 + r with |r| <= ln 2 / 2: gives e^r by its series, and n in the low bits of n_bits.
template <class A>
NEEDLE_INLINE Vec<A> exp_parts_of(Vec<A> x, Mask<A>& n_bits) {
  using C = ExpConstants<A>;
  const Vec<A> shifted = x * A(1.4426950408889634) + C::round;
  const Vec<A> n = shifted - C::round;
  const Vec<A> r = (x - n * C::ln2_high) - n * C::ln2_low;
  A inverse_factorial[C::terms + 1] = {1};
  for (int k = 1; k <= C::terms; ++k) inverse_factorial[k] = inverse_factorial[k - 1] / A(k);
  Vec<A> series = broadcast(inverse_factorial[C::terms]);
#pragma GCC unroll 16
  for (int k = C::terms - 1; k >= 0; --k) series = series * r + inverse_factorial[k];
  memcpy(&n_bits, &shifted, sizeof n_bits);
  return series;
}

// e^x without branches, within 1.5 ulp. -inf gives 0, inf gives inf, NaN stays (comparisons with it
// are false). 2^n is applied in two halves, so that results below the smallest normal number and
// above the largest come out right. Where the result is 0 nothing small is computed on the way,
// since arithmetic on subnormal numbers is slow.
template <class A>
NEEDLE_INLINE Vec<A> vexp(Vec<A> x) {
  using C = ExpConstants<A>;
  const Vec<A> high = broadcast(C::high);
  const Mask<A> zero = x < broadcast(C::low);
  x = zero ? Vec<A>{} : x;
  x = x > high ? high : x;
  Mask<A> n_bits, round_bits;
  const Vec<A> series = exp_parts_of<A>(x, n_bits), round = broadcast(C::round);
  memcpy(&round_bits, &round, sizeof round_bits);
  n_bits -= round_bits;
  const Mask<A> half = n_bits >> 1;
  const Mask<A> first_bits = (half + C::bias) << C::mantissa_bits;
  const Mask<A> second_bits = (n_bits - half + C::bias) << C::mantissa_bits;
  Vec<A> first, second;
  memcpy(&first, &first_bits, sizeof first);
  memcpy(&second, &second_bits, sizeof second);
  return zero ? Vec<A>{} : series * first * second;
}

// e^x for x that are at most a little above 0, with less work: results too small for a normal
// number are 0, and 2^n is applied at once: as a factor, of which NaN stays NaN whatever its bits.
template <class A>
NEEDLE_INLINE Vec<A> vexp_negative(Vec<A> x) {
  using C = ExpConstants<A>;
  Mask<A> n_bits;
  const Vec<A> series = exp_parts_of<A>(x, n_bits);
  const Mask<A> power_bits = (n_bits + C::bias) << C::mantissa_bits;
  Vec<A> power;
  memcpy(&power, &power_bits, sizeof power);
  return x < broadcast(C::normal) ? Vec<A>{} : series * power;
}

}  // namespace needle::cpu
