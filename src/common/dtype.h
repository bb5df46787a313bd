// Element types: one row each, the 16-bit floats, and the dispatch from a run-time dtype to a C++
// type.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define NEEDLE_HD __host__ __device__
#else
#define NEEDLE_HD
#endif

namespace needle {

template <class To, class From>
NEEDLE_HD inline To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast between different sizes");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

// The float32 next to `value` that has a last bit of 1, where none is equal to it. Rounded on to 16
// bits it gives what `value` itself would: it is never the middle between two 16-bit floats that
// `value` lies beside. source: Boldo & Melquiond 2008, rounding to odd.
NEEDLE_HD inline float round_to_odd(double value) {
  const float nearest = float(value);
  uint32_t bits = bit_cast<uint32_t>(nearest);
  if (double(nearest) != value && bits % 2 == 0)
    bits += (double(nearest) > value) == (value > 0) ? -1 : 1;
  return bit_cast<float>(bits);
}

// The 16-bit floats' bits, from and to float32, for a number or for the compiler's vectors of them:
// F is float or floats, U is uint32_t or as many of these, of which the lower half is used.
//
// bfloat16 is the upper half of a float32; conversion rounds to nearest even and keeps NaN.
template <class F, class U>
NEEDLE_HD inline F from_bfloat16_bits(const U& bits) {
  return bit_cast<F>(U(bits << 16));
}
template <class U, class F>
NEEDLE_HD inline U to_bfloat16_bits(const F& value) {
  const U u = bit_cast<U>(value);
  const U nan = (u >> 16) | 0x40u, rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return (u & 0x7fffffffu) > 0x7f800000u ? nan : rounded;
}
// float16 is IEEE binary16.
template <class F, class U>
NEEDLE_HD inline F from_float16_bits(const U& bits) {
  const U sign = (bits & 0x8000u) << 16, magnitude = (bits & 0x7fffu) << 13;
  const U special = magnitude + 0x70000000u, normal = magnitude + 0x38000000u;
  const U subnormal =
      bit_cast<U>(F(bit_cast<F>(U(magnitude + 0x38800000u)) - bit_cast<float>(0x38800000u)));
  const U finite = magnitude >= 0x00800000u ? normal : subnormal;
  return bit_cast<F>(U(sign | (magnitude >= 0x0f800000u ? special : finite)));
}
template <class U, class F>
NEEDLE_HD inline U to_float16_bits(const F& value) {
  const U u = bit_cast<U>(value);
  const U sign = (u >> 16) & 0x8000u, magnitude = u & 0x7fffffffu;
  const U nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  const U normal = (magnitude + 0xc8000fffu + ((magnitude >> 13) & 1u)) >> 13;
  // Adding 0.5 puts a subnormal half's bits, rounded to nearest even, at the bottom of the word.
  const U subnormal = bit_cast<U>(F(bit_cast<F>(magnitude) + 0.5f)) - 0x3f000000u;
  U half = magnitude < 0x38800000u ? subnormal : normal;
  half = magnitude >= 0x477ff000u ? 0x7c00u + U() : half;  // rounds past the largest
  return sign | (magnitude > 0x7f800000u ? nan : half);
}

// Device code converts by the hardware's instructions, which round alike.
struct bfloat16 {
  uint16_t bits;
  bfloat16() = default;
  NEEDLE_HD explicit bfloat16(float value) {
#if defined(__CUDA_ARCH__)
    bits = __bfloat16_as_ushort(__float2bfloat16_rn(value));
#else
    bits = uint16_t(to_bfloat16_bits<uint32_t>(value));
#endif
  }
  NEEDLE_HD operator float() const { return from_bfloat16_bits<float>(uint32_t(bits)); }
};
struct float16 {
  uint16_t bits;
  float16() = default;
  NEEDLE_HD explicit float16(float value) {
#if defined(__CUDA_ARCH__)
    bits = __half_as_ushort(__float2half_rn(value));
#else
    bits = uint16_t(to_float16_bits<uint32_t>(value));
#endif
  }
  NEEDLE_HD operator float() const {
#if defined(__CUDA_ARCH__)
    return __half2float(__ushort_as_half(bits));
#else
    return from_float16_bits<float>(uint32_t(bits));
#endif
  }
};

// NEEDLE_DTYPES(row): row(enumerator, C++ type, Python name). The order is the numbering.
#define NEEDLE_FLOAT_DTYPES(row)                                            \
  row(kFloat32, float, "float32") row(kFloat16, needle::float16, "float16") \
      row(kBFloat16, needle::bfloat16, "bfloat16") row(kFloat64, double, "float64")
#define NEEDLE_INT_DTYPES(row) \
  row(kInt32, int32_t, "int32") row(kInt64, int64_t, "int64") row(kUInt8, uint8_t, "uint8")
#define NEEDLE_DTYPES(row) NEEDLE_FLOAT_DTYPES(row) NEEDLE_INT_DTYPES(row) row(kBool, bool, "bool")

enum class DType : uint8_t {
#define ROW(e, type, name) e,
  NEEDLE_DTYPES(ROW)
#undef ROW
};

template <class T>
struct DTypeOf;
#define ROW(e, type, name)                   \
  template <>                                \
  struct DTypeOf<type> {                     \
    static constexpr DType value = DType::e; \
  };
NEEDLE_DTYPES(ROW)
#undef ROW

inline const char* dtype_name(DType dtype) {
  switch (dtype) {
#define ROW(e, type, name) \
  case DType::e:           \
    return name;
    NEEDLE_DTYPES(ROW)
#undef ROW
  }
  return "?";
}

inline int64_t dtype_size(DType dtype) {
  switch (dtype) {
#define ROW(e, type, name) \
  case DType::e:           \
    return sizeof(type);
    NEEDLE_DTYPES(ROW)
#undef ROW
  }
  return 0;
}

inline DType dtype_from_name(const std::string& wanted) {
#define ROW(e, type, name) \
  if (wanted == name) return DType::e;
  NEEDLE_DTYPES(ROW)
#undef ROW
  throw std::invalid_argument("unknown dtype '" + wanted + "'");
}

constexpr bool is_float(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16 ||
         dtype == DType::kFloat64;
}

// The type that arithmetic on T is done in: float for 16-bit floats, T otherwise.
template <class T>
struct AccumOf {
  using type = T;
};
template <>
struct AccumOf<float16> {
  using type = float;
};
template <>
struct AccumOf<bfloat16> {
  using type = float;
};
template <class T>
using accum_t = typename AccumOf<T>::type;

// Between any two dtypes. float -> integer cuts off the fraction; what does not fit, NaN too,
// becomes the least integer, as in numpy on x86 (a GPU alone would take the nearest, and 0 for
// NaN), and uint8 is the last byte of an int64. x -> bool is x != 0; NaN -> true.
template <class To, class From>
NEEDLE_HD inline To convert(From value) {
  using A = accum_t<From>;
  const A x = A(value);
  if constexpr (std::is_same_v<To, bool>) {
    return x != A(0);
  } else if constexpr (std::is_integral_v<To> && std::is_floating_point_v<A>) {
    using Whole = std::conditional_t<std::is_same_v<To, uint8_t>, int64_t, To>;
    constexpr Whole least = std::numeric_limits<Whole>::min();
    return To(x >= A(least) && x < -A(least) ? Whole(x) : least);
  } else if constexpr (std::is_same_v<To, float16> && std::is_same_v<From, double>) {
    return To(round_to_odd(x));
  } else {
    return To(accum_t<To>(x));
  }
}

template <class T>
struct Tag {
  using type = T;
};

// The dtypes that kernels are compiled for: all, but where NEEDLE_ONLY_DTYPES names fewer, between
// commas (",float32,bfloat16,"), to compile faster.
#if defined(NEEDLE_ONLY_DTYPES)
constexpr std::string_view kCompiledDtypes = NEEDLE_ONLY_DTYPES;
#else
#define ROW(e, type, name) name ","
constexpr std::string_view kCompiledDtypes = "," NEEDLE_DTYPES(ROW);
#undef ROW
#endif

template <class T>
constexpr bool is_compiled = false;
#define ROW(e, type, name)                  \
  template <>                               \
  inline constexpr bool is_compiled<type> = \
      kCompiledDtypes.find("," name ",") != std::string_view::npos;
NEEDLE_DTYPES(ROW)
#undef ROW

// f(Tag<T>{}) with the C++ type of dtype; anything outside the list is an error that names it.
#define ROW(e, type, name)                                     \
  case DType::e:                                               \
    if constexpr (is_compiled<type>)                           \
      return void(f(Tag<type>{}));                             \
    else                                                       \
      throw std::invalid_argument(                             \
          "this build has no " name ": it was compiled for " + \
          std::string(kCompiledDtypes.substr(1, kCompiledDtypes.size() - 2)));
template <class F>
void dispatch_any(DType dtype, F&& f) {
  switch (dtype) { NEEDLE_DTYPES(ROW) }
}
template <class F>
void dispatch_num(DType dtype, const char* op, F&& f) {
  switch (dtype) {
    NEEDLE_FLOAT_DTYPES(ROW)
    NEEDLE_INT_DTYPES(ROW)
    default:
      throw std::invalid_argument(std::string("[") + op + "] no kernel for dtype " +
                                  dtype_name(dtype) + " (astype gives another)");
  }
}
template <class F>
void dispatch_float(DType dtype, const char* op, F&& f) {
  switch (dtype) {
    NEEDLE_FLOAT_DTYPES(ROW)
    default:
      throw std::invalid_argument(std::string("[") + op + "] needs a floating dtype, got " +
                                  dtype_name(dtype));
  }
}
#undef ROW

// f(Tag, Tag) of a parameter and its gradient: any floating dtypes, but float64 with float64 alone.
template <class F>
void dispatch_update(DType param, DType grad, const char* op, F&& f) {
  dispatch_float(param, op, [&](auto tag) {
    // tag as a copy: captured by reference, it is of no type to GCC 12.
    dispatch_float(grad, op, [&, tag](auto grad_tag) {
      using T = typename decltype(tag)::type;
      using G = typename decltype(grad_tag)::type;
      if constexpr (std::is_same_v<accum_t<T>, accum_t<G>>)
        f(tag, grad_tag);
      else
        throw std::invalid_argument(std::string("[") + op + "] gradient has a bad dtype: " +
                                    dtype_name(grad) + " (float64 with float64 parameters alone)");
    });
  });
}

// f(Tag<an unsigned integer as wide>): data that is only moved needs no type.
template <class F>
void dispatch_bytes(int64_t bytes, F&& f) {
  switch (bytes) {
    case 1:
      return f(Tag<uint8_t>{});
    case 2:
      return f(Tag<uint16_t>{});
    case 4:
      return f(Tag<uint32_t>{});
    default:
      return f(Tag<uint64_t>{});
  }
}

// A Python number: kernels pick the member that fits their type.
struct Scalar {
  double d = 0;
  int64_t i = 0;
  template <class T>
  NEEDLE_HD T to() const;
};
template <class T>
NEEDLE_HD inline T Scalar::to() const {
  return T(i);
}
template <>
NEEDLE_HD inline float Scalar::to<float>() const {
  return float(d);
}
template <>
NEEDLE_HD inline double Scalar::to<double>() const {
  return d;
}
template <>
NEEDLE_HD inline float16 Scalar::to<float16>() const {
  return float16(round_to_odd(d));
}
template <>
NEEDLE_HD inline bfloat16 Scalar::to<bfloat16>() const {
  return bfloat16(float(d));
}
template <>
NEEDLE_HD inline bool Scalar::to<bool>() const {
  return d != 0;
}

}  // namespace needle
