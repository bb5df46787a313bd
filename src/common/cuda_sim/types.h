// Qualifiers, dim3 and the vector types.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__  // nothing, as libstdc++ has an __attribute__((__noinline__))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

// clang-format off
// row(prefix, element, alignments of the 1-, 2-, 3- and 4-vectors), as in CUDA's vector_types.h.
#define NEEDLE_SIM_VECTORS(row)                    \
  row(char, signed char, 1, 2, 1, 4)               \
  row(uchar, unsigned char, 1, 2, 1, 4)            \
  row(short, short, 2, 4, 2, 8)                    \
  row(ushort, unsigned short, 2, 4, 2, 8)          \
  row(int, int, 4, 8, 4, 16)                       \
  row(uint, unsigned int, 4, 8, 4, 16)             \
  row(longlong, long long, 8, 16, 8, 16)           \
  row(ulonglong, unsigned long long, 8, 16, 8, 16) \
  row(float, float, 4, 8, 4, 16)                   \
  row(double, double, 8, 16, 8, 16)

#define ROW(prefix, T, a1, a2, a3, a4)                                      \
  struct __align__(a1) prefix##1 { T x; };                                  \
  struct __align__(a2) prefix##2 { T x, y; };                               \
  struct __align__(a3) prefix##3 { T x, y, z; };                            \
  struct __align__(a4) prefix##4 { T x, y, z, w; };                         \
  constexpr prefix##1 make_##prefix##1(T x) { return {x}; }                 \
  constexpr prefix##2 make_##prefix##2(T x, T y) { return {x, y}; }         \
  constexpr prefix##3 make_##prefix##3(T x, T y, T z) { return {x, y, z}; } \
  constexpr prefix##4 make_##prefix##4(T x, T y, T z, T w) { return {x, y, z, w}; }
NEEDLE_SIM_VECTORS(ROW)
#undef ROW
// clang-format on

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
  constexpr operator uint3() const { return {x, y, z}; }
};

namespace needle::sim {

// For what CUDA has overloads, of these types and no others.
template <class T, class... Types>
inline constexpr bool is_one_of = (std::is_same_v<T, Types> || ...);

// Of an argument that converts to another's type.
template <class T>
using no_deduce = std::enable_if_t<true, T>;

}  // namespace needle::sim
