// Vectors as a type for the fused CPU kernels: one native register wide, on the compiler's vector
// extensions, so that a loop over `kLanes<A>` elements is vectorized by construction (sums too,
// without -ffast-math).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "dtype.h"

#if defined(__AVX__)
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

// Some lanes in one instruction; sanitizers do not see what that touches. AVX2 loads them of float
// and double alone; it stores them, too, but on many processors slowly.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define NEEDLE_MASKED
#elif defined(__AVX2__) && !defined(__AVX512F__) && defined(__F16C__)
#define NEEDLE_MASKED_LOADS
alignas(32) inline constexpr int32_t kSomeWords[16] = {-1, -1, -1, -1, -1, -1, -1, -1};
#endif
#endif

#ifdef NEEDLE_MASKED
constexpr bool kStoresSome = true;  // lanes in one instruction
#else
constexpr bool kStoresSome = false;
#endif

// Loads convert 16-bit floats to float, stores round back; n < kLanes loads or stores the first n
// lanes alone, the others are `fill`.
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
NEEDLE_INLINE Vec<accum_t<T>> load(const T* from, int64_t n, accum_t<T> fill = 0) {
  using A = accum_t<T>;
#ifdef NEEDLE_MASKED
  const unsigned some = (1u << n) - 1;
  const Vec<A> rest = broadcast(fill);
  if constexpr (std::is_same_v<T, float>) {
    return (Vec<A>)_mm512_mask_loadu_ps((__m512)rest, __mmask16(some), from);
  } else if constexpr (std::is_same_v<T, double>) {
    return (Vec<A>)_mm512_mask_loadu_pd((__m512d)rest, __mmask8(some), from);
  } else {
    const HalfBits halves = (HalfBits)_mm256_maskz_loadu_epi16(__mmask16(some), from);
    return (Vec<A>)_mm512_mask_mov_ps((__m512)rest, __mmask16(some), (__m512)widened<T>(halves));
  }
#else
#ifdef NEEDLE_MASKED_LOADS
  if constexpr (std::is_same_v<T, A>) {
    __m256i some;
    memcpy(&some, kSomeWords + 8 - n * (sizeof(T) / 4), sizeof some);
    if constexpr (std::is_same_v<T, float>)
      return (Vec<A>)_mm256_blendv_ps((__m256)broadcast(fill), _mm256_maskload_ps(from, some),
                                      (__m256)some);
    else
      return (Vec<A>)_mm256_blendv_pd((__m256d)broadcast(fill), _mm256_maskload_pd(from, some),
                                      (__m256d)some);
  }
#endif
  A lanes[kLanes<A>];
  for (int l = 0; l < kLanes<A>; ++l) lanes[l] = l < n ? A(from[l]) : fill;
  Vec<A> v;
  memcpy(&v, lanes, sizeof v);
  return v;
#endif
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
#ifdef NEEDLE_MASKED
  const unsigned some = (1u << n) - 1;
  if constexpr (std::is_same_v<T, float>)
    _mm512_mask_storeu_ps(to, __mmask16(some), (__m512)v);
  else if constexpr (std::is_same_v<T, double>)
    _mm512_mask_storeu_pd(to, __mmask8(some), (__m512d)v);
  else
    _mm256_mask_storeu_epi16(to, __mmask16(some), (__m256i)narrowed<T>(v));
#else
  for (int64_t l = 0; l < n; ++l) to[l] = T(v[l]);
#endif
}

// What the inner loop of a product multiplies: words, of the size of a sum, which are float or
// double, or pairs of bfloat16.
template <class P>
constexpr int kWord = int(sizeof(accum_t<P>) / sizeof(P));  // elements
template <class P>
using Words = std::conditional_t<kWord<P> == 1, Vec<accum_t<P>>, WordBits>;
template <class P>
NEEDLE_INLINE Words<P> load_words(const P* from) {
  Words<P> v;
  memcpy(&v, from, sizeof v);
  return v;
}
// sum + the word at a times the words b: the product of the elements, or the sum of two such.
template <class P>
NEEDLE_INLINE Vec<accum_t<P>> add_product(Vec<accum_t<P>> sum, const P* a, Words<P> b) {
  if constexpr (kWord<P> == 1) {
    return sum + *a * b;
  } else {
    static_assert(std::is_same_v<P, bfloat16>);
#if defined(__AVX512F__)  // in assembly: this may be compiled for any processor with AVX-512
    uint32_t pair;
    memcpy(&pair, a, sizeof pair);
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(WordBits{} + pair), "v"(b));
#endif
    return sum;
  }
}

// Over 0 .. n: whole(offset) for each whole vector, then rest(offset, lanes).
template <class A, class Whole, class Rest>
NEEDLE_INLINE void for_vectors(int64_t n, Whole&& whole, Rest&& rest) {
  int64_t i = 0;
  for (; i + kLanes<A> <= n; i += kLanes<A>) whole(i);
  if (i < n) rest(i, n - i);
}
// With one function, f(offset, lanes...): load(x + i, lanes...) is a vector whole or cut.
template <class A, class F>
NEEDLE_INLINE void for_vectors(int64_t n, F&& f) {
  for_vectors<A>(n, f, f);
}

// to[i] = convert<To>(from[i]), in other memory; between float and a 16-bit float by vectors.
template <class From, class To>
void convert_run(const From* from, int64_t n, To* to) {
  constexpr bool kBothFloat =
      std::is_same_v<accum_t<From>, float> && std::is_same_v<accum_t<To>, float>;
  if constexpr (std::is_same_v<From, To>) {
    if constexpr (std::is_floating_point_v<From>)
      if (n <= 8 * kLanes<From>)  // a call takes longer
        return for_vectors<From>(n, [&](int64_t i, auto... lanes) {
          store(to + i, load(from + i, lanes...), lanes...);
        });
    std::copy_n(from, n, to);
  } else if constexpr (kBothFloat && sizeof(From) != sizeof(To))
    for_vectors<float>(
        n, [&](int64_t i, auto... lanes) { store(to + i, load(from + i, lanes...), lanes...); });
  else
    for (int64_t i = 0; i < n; ++i) to[i] = convert<To>(from[i]);
}

// Whether a comparison holds in any lane.
template <class M>
NEEDLE_INLINE bool any_lane(M mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi64_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX__)
  return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#else
  uint64_t words[kVectorBytes / sizeof(uint64_t)];
  memcpy(words, &mask, sizeof words);
  return (words[0] | words[1]) != 0;
#endif
}

template <class A>
NEEDLE_INLINE A sum_lanes(Vec<A> v) {
  A lanes[kLanes<A>];  // in pairs, so that few additions wait for another
  memcpy(lanes, &v, sizeof v);
  for (int half = kLanes<A> / 2; half > 0; half /= 2)
    for (int l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  return lanes[0];
}
template <class A>
NEEDLE_INLINE A max_lanes(Vec<A> v) {
  A lanes[kLanes<A>];
  memcpy(lanes, &v, sizeof v);
  for (int half = kLanes<A> / 2; half > 0; half /= 2)
    for (int l = 0; l < half; ++l)
      lanes[l] = lanes[l + half] > lanes[l] ? lanes[l + half] : lanes[l];
  return lanes[0];
}

// sum_i x[i] y[i]; x and y may differ in width.
template <class X, class Y, class A = accum_t<X>>
A dot(const X* x, const Y* y, int64_t n) {
  Vec<A> sum{};
  for_vectors<A>(  // by two functions: where they are one, g++ calls this in loops over short rows
      n, [&](int64_t i) { sum += load(x + i) * load(y + i); },
      [&](int64_t i, int64_t lanes) { sum += load(x + i, lanes) * load(y + i, lanes); });
  return sum_lanes<A>(sum);
}

// A polynomial in x by its coefficients, the highest first; of numbers or of vectors.
template <class F, class First, class... Rest>
NEEDLE_INLINE F polynomial(F x, First first, Rest... coefficients) {
  F sum = F{} + first;
  ((sum = sum * x + coefficients), ...);
  return sum;
}

// What differs between the two precisions of vexp. Below `low` e^x is 0, above `high` infinite;
// below `normal` vexp_negative gives 0. tail: e^r is 1 + r + r^2 tail(r), of float by a polynomial
// fitted for |r| <= ln 2 / 2 (error 0.06 of 2^-24), of double by its series.
template <class A>
struct ExpConstants;
template <>
struct ExpConstants<float> {
  static constexpr float low = -104.f, high = 89.f, normal = -86.5f, round = 0x1.8p23f,
                         ln2_high = 0x1.62e4p-1f, ln2_low = 0x1.7f7d1cp-20f;
  static constexpr int mantissa_bits = 23, bias = 127;
  NEEDLE_INLINE static Vec<float> tail(Vec<float> r) {
    return polynomial(r, 0x1.6a23d0p-10f, 0x1.123a20p-7f, 0x1.5558f2p-5f, 0x1.555492p-3f,
                      0x1.fffffcp-2f);
  }
};
template <>
struct ExpConstants<double> {
  static constexpr double low = -746., high = 710., normal = -707., round = 0x1.8p52,
                          ln2_high = 0x1.62e42fefa38p-1, ln2_low = 0x1.ef35793c7673p-45;
  static constexpr int mantissa_bits = 52, bias = 1023;
  NEEDLE_INLINE static Vec<double> tail(Vec<double> r) {
    return polynomial(r, 1. / 6227020800, 1. / 479001600, 1. / 39916800, 1. / 3628800, 1. / 362880,
                      1. / 40320, 1. / 5040, 1. / 720, 1. / 120, 1. / 24, 1. / 6, 1. / 2);
  }
};

// x = n ln 2 + r with |r| <= ln 2 / 2. Adding 1.5 * 2^(mantissa bits) rounds to an integer, n, that
// stands in the low bits of the sum, `shifted`.
template <class A>
struct ExpParts {
  Vec<A> shifted, n, r;
  NEEDLE_INLINE explicit ExpParts(Vec<A> x) {
    using C = ExpConstants<A>;
    shifted = x * A(1.4426950408889634) + C::round;
    n = shifted - C::round;
    r = (x - n * C::ln2_high) - n * C::ln2_low;
  }
  NEEDLE_INLINE Vec<A> series() const {  // e^r
    return (ExpConstants<A>::tail(r) * r + A(1)) * r + A(1);
  }
};
// 2^n, where that is a normal number; of n the last bits suffice.
template <class A>
NEEDLE_INLINE Vec<A> power_of_two(Mask<A> n) {
  using C = ExpConstants<A>;
  return bit_cast<Vec<A>>(Mask<A>((n + C::bias) << C::mantissa_bits));
}

// e^x where x is not below `least`, else 0, of x that are not above C::high; NaN stays.
template <class A>
NEEDLE_INLINE Vec<A> exp_from(Vec<A> x, A least) {
  const ExpParts<A> parts(x);
  const Vec<A> series = parts.series();
#if defined(__AVX512F__)
  // The lanes without a result compute nothing small: arithmetic on subnormal numbers is slow.
  if constexpr (sizeof(A) == 4) {
    const auto some = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(least), _CMP_NLT_UQ);
    return (Vec<A>)_mm512_maskz_scalef_ps(some, (__m512)series, (__m512)parts.n);
  } else {
    const auto some = _mm512_cmp_pd_mask((__m512d)x, _mm512_set1_pd(least), _CMP_NLT_UQ);
    return (Vec<A>)_mm512_maskz_scalef_pd(some, (__m512d)series, (__m512d)parts.n);
  }
#else
  // In two factors, for n beyond what one number's exponent can be.
  const Mask<A> n = bit_cast<Mask<A>>(parts.shifted) -
                    bit_cast<Mask<A>>(broadcast(ExpConstants<A>::round)),
                half = n >> 1;
  return x < broadcast(least) ? Vec<A>{}
                              : series * power_of_two<A>(half) * power_of_two<A>(n - half);
#endif
}

// e^x without branches, within 1 ulp. -inf gives 0, inf gives inf, NaN stays (comparisons with it
// are false), and results below the smallest normal number come out right.
template <class A>
NEEDLE_INLINE Vec<A> vexp(Vec<A> x) {
  using C = ExpConstants<A>;
#if defined(__AVX512F__)  // of two where one is NaN the processor takes the second
  if constexpr (sizeof(A) == 4)
    x = (Vec<A>)_mm512_maskz_min_ps(0xffff, _mm512_set1_ps(C::high), (__m512)x);
  else
    x = (Vec<A>)_mm512_maskz_min_pd(0xff, _mm512_set1_pd(C::high), (__m512d)x);
  return exp_from<A>(x, C::low);
#else
  const Mask<A> zero = x < broadcast(C::low);
  x = zero ? Vec<A>{} : x;  // computes nothing small on the way
  x = x > broadcast(C::high) ? broadcast(C::high) : x;
  return zero ? Vec<A>{} : exp_from<A>(x, C::low);
#endif
}

// e^x, whose smallest results are right too, for x that are at most 0.
template <class A>
NEEDLE_INLINE Vec<A> vexp_to_zero(Vec<A> x) {
#if defined(__AVX512F__)
  return exp_from<A>(x, ExpConstants<A>::low);
#else
  return vexp<A>(x);
#endif
}

// e^x for x that are at most a little above 0, with less work: results too small for a normal
// number are 0.
template <class A>
NEEDLE_INLINE Vec<A> vexp_negative(Vec<A> x) {
#if defined(__AVX512F__)
  return exp_from<A>(x, ExpConstants<A>::normal);
#else
  const ExpParts<A> parts(x);
  const Vec<A> power = power_of_two<A>(bit_cast<Mask<A>>(parts.shifted));
  return x < broadcast(ExpConstants<A>::normal) ? Vec<A>{} : parts.series() * power;
#endif
}

}  // namespace needle::cpu
