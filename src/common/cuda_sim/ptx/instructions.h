// What the instructions of PTX do: op_fma_rn<float> is fma.rn.f32. translate.py makes the calls;
// its template arguments are the instruction's types, result first. An instruction that nvcc comes
// to use and that is not here is refused. source: PTX ISA 9.0, chapter 9.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "../cuda_sim.h"
#include "../scheduler.h"
#include "../tensor.h"
#include "kernels.h"

#define PLACE(file, line) \
  Site { file, line }

namespace needle::sim::ptx {

// --- registers -----------------------------------------------------------------------------------

struct tf32 {
  uint32_t bits;
};
template <class T>
struct alignas(4) two {
  T low, high;
};
template <class T>
using Unsigned = typename std::make_unsigned<T>::type;
template <size_t bytes>
using Bits = std::conditional_t<
    bytes == 1, uint8_t,
    std::conditional_t<bytes == 2, uint16_t, std::conditional_t<bytes == 4, uint32_t, uint64_t>>>;

// A register's bits as another type. Integers are cut, or extended by the sign of what they were
// loaded as.
template <class To, class From>
To as(From x) {
  if constexpr (std::is_integral_v<To> && std::is_integral_v<From>)
    return static_cast<To>(x);
  else
    return bit_cast<To>(x);
}
template <class Register, class T>
void set(Register& r, T value) {
  r = as<Register>(value);
}

template <int i, int n, class T>
auto part(T whole) {
  return Bits<sizeof(T) / n>(as<Bits<sizeof(T)>>(whole) >> (8 * sizeof(T) / n * i));
}
template <class T, class... Part>
T join(Part... parts) {
  Bits<sizeof(T)> whole = 0;
  int shift = 0;
  ((whole |= Bits<sizeof(T)>(as<Bits<sizeof(Part)>>(parts)) << shift, shift += 8 * sizeof(Part)),
   ...);
  return as<T>(whole);
}

inline const uint3& tid() { return self().thread_idx; }
inline const uint3& ctaid() { return self().block->block_idx; }
inline const dim3& ntid() { return self().block->block_dim; }
inline const dim3& nctaid() { return self().block->grid_dim; }

// --- memory --------------------------------------------------------------------------------------

inline uint64_t address_of(const void* p) { return reinterpret_cast<uint64_t>(p); }
inline uint32_t address_of(uint32_t shared) { return shared; }
inline char* pointer(uint64_t address, int64_t offset) {
  return reinterpret_cast<char*>(address + static_cast<uint64_t>(offset));
}
// Addresses of shared memory have 32 bits: the lower ones here.
inline uint32_t shared_address(const void* p) { return static_cast<uint32_t>(address_of(p)); }
inline char* shared_pointer(uint32_t address, int offset) {
  char* const base = static_cast<Block*>(self().block)->arena();
  return base +
         static_cast<int32_t>(address + static_cast<uint32_t>(offset) - shared_address(base));
}

inline void check_aligned(const void* p, size_t bytes, const char* what, Site site) {
  if (address_of(p) % bytes != 0) misaligned(what, bytes, site);
}

template <class T, int n>
struct Vector {
  T value[n];
};
template <class T, int n>
Vector<T, n> op_ld(const char* from, Site site) {
  check_aligned(from, n * sizeof(T), "ld", site);
  Vector<T, n> loaded;
  std::memcpy(&loaded, from, sizeof loaded);
  return loaded;
}
template <class T, int n>
void op_st(char* to, Site site, Vector<T, n> stored) {
  check_aligned(to, n * sizeof(T), "st", site);
  std::memcpy(to, &stored, sizeof stored);
}

template <class T>
T op_atom_global_cas(char* p, T compare, T value, Site site) {
  return atomicCAS(reinterpret_cast<T*>(p), compare, value, site);
}
template <class T>
T op_atom_global_or(char* p, T value, Site site) {
  return atomicOr(reinterpret_cast<T*>(p), value, site);
}
template <class T>
T op_atom_global_add(char* p, T value, Site site) {
  return atomicAdd(reinterpret_cast<T*>(p), value, site);
}

inline void op_cp_async_cg_shared_global(char* to, const char* from, int bytes, int source_bytes,
                                         Site site) {
  async_copy(to, from, bytes, source_bytes, site);
}
inline void op_cp_async_ca_shared_global(char* to, const char* from, int bytes, int source_bytes,
                                         Site site) {
  async_copy(to, from, bytes, source_bytes, site);
}
inline void op_cp_async_commit_group(Site) { async_commit(); }
inline void op_cp_async_wait_group(int left, Site) { async_wait(left); }

// --- moves and bits ------------------------------------------------------------------------------

template <class T>
T op_selp(T a, T b, bool p) {
  return p ? a : b;
}
// clang-format off
template <class T> T op_and(T a, T b) { return T(a & b); }
template <class T> T op_or(T a, T b) { return T(a | b); }
template <class T> T op_xor(T a, T b) { return T(a ^ b); }
template <class T> T op_not(T a) { return T(~a); }
template <> inline bool op_not(bool a) { return !a; }
template <class T> uint32_t op_popc(T a) { return static_cast<uint32_t>(__builtin_popcountll(a)); }
template <class T> uint32_t op_clz(T a) {
  uint32_t n = 0;
  while (n < 8 * sizeof(T) && (a >> (8 * sizeof(T) - 1 - n)) == 0) ++n;
  return n;
}
// clang-format on
template <class T>
T op_shl(T a, uint32_t n) {
  return n < 8 * sizeof(T) ? T(a << n) : T(0);
}
template <class T>
T op_shr(T a, uint32_t n) {
  return n < 8 * sizeof(T) ? T(a >> n) : a < T(0) ? T(-1) : T(0);
}
// `length` bits of a into b, from bit `start` on.
template <class T>
T op_bfi(T a, T b, T start, T length) {
  const int bits = 8 * sizeof(T), n = int(length & 0xff), at = int(start & 0xff);
  if (at >= bits || n == 0) return b;
  const T ones = n >= bits ? ~T(0) : (T(1) << n) - 1;
  return (b & ~(ones << at)) | ((a & ones) << at);
}
// Four of the eight bytes of a and b, or their signs.
template <class T>
T op_prmt(T a, T b, T selector) {
  const uint64_t both = uint64_t(b) << 32 | a;
  T result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t which = selector >> (4 * i), byte = (both >> (8 * (which & 7))) & 0xff;
    result |= ((which & 8) == 0 ? byte : byte & 0x80 ? 0xffu : 0) << (8 * i);
  }
  return result;
}

// --- arithmetic ----------------------------------------------------------------------------------

// Integers wrap (the compiler is told so), and what the language leaves open about a division is
// decided.
// clang-format off
template <class T> T op_add(T a, T b) { return T(a + b); }
template <class T> T op_sub(T a, T b) { return T(a - b); }
template <class T> T op_mul(T a, T b) { return a * b; }
template <class T> T op_add_rn(T a, T b) { return a + b; }
template <class T> T op_sub_rn(T a, T b) { return a - b; }
template <class T> T op_mul_rn(T a, T b) { return a * b; }
template <class T> T op_div_rn(T a, T b) { return a / b; }
template <class T> T op_rcp_rn(T a) { return 1 / a; }
template <class T> T op_sqrt_rn(T a) { return std::sqrt(a); }
template <class T> T op_fma_rn(T a, T b, T c) { return std::fma(a, b, c); }
template <class T> T op_neg(T a) { return T(-a); }
template <class T> T op_abs(T a) { return std::is_integral_v<T> ? (a < 0 ? T(-a) : a) : T(std::fabs(a)); }
template <class T> T op_copysign(T sign, T a) { return std::copysign(a, sign); }
template <class T> T op_mul_lo(T a, T b) { return T(Unsigned<T>(a) * uint64_t(Unsigned<T>(b))); }
template <class T> T op_mad_lo(T a, T b, T c) { return T(op_mul_lo(a, b) + c); }
// clang-format on
template <class T>
using Wide =
    std::conditional_t<std::is_signed_v<T>, std::conditional_t<sizeof(T) == 2, int32_t, int64_t>,
                       std::conditional_t<sizeof(T) == 2, uint32_t, uint64_t>>;
template <class T>
Wide<T> op_mul_wide(T a, T b) {
  static_assert(sizeof(T) <= 4);
  return Wide<T>(a) * Wide<T>(b);
}
template <class T>
Wide<T> op_mad_wide(T a, T b, Unsigned<Wide<T>> c) {
  return op_mul_wide(a, b) + Wide<T>(c);
}
template <class T>
T op_mul_hi(T a, T b) {
  static_assert(sizeof(T) <= 4);
  return T((Wide<T>(a) * Wide<T>(b)) >> (8 * sizeof(T)));
}
template <class T>
T op_div(T a, T b) {
  return b == 0 ? T(-1) : std::is_signed_v<T> && b == T(-1) ? T(-a) : T(a / b);
}
template <class T>
T op_rem(T a, T b) {
  return b == 0 ? a : std::is_signed_v<T> && b == T(-1) ? T(0) : T(a % b);
}
// Of a number and NaN the number, of zeros the negative (positive) one.
template <class T>
T op_min(T a, T b) {
  if constexpr (std::is_integral_v<T>)
    return a < b ? a : b;
  else
    return a != a ? b : b != b ? a : a == b ? (std::signbit(a) ? a : b) : a < b ? a : b;
}
template <class T>
T op_max(T a, T b) {
  if constexpr (std::is_integral_v<T>)
    return a > b ? a : b;
  else
    return a != a ? b : b != b ? a : a == b ? (std::signbit(a) ? b : a) : a > b ? a : b;
}

// With a carry in and out.
template <class T>
T carried(uint64_t sum, bool& carry) {
  static_assert(std::is_same_v<T, uint32_t>, "no carry of others");
  carry = sum >> 32 & 1;
  return static_cast<uint32_t>(sum);
}
// clang-format off
template <class T> T op_add_cc(T a, T b, bool& carry) { return carried<T>(uint64_t(a) + b, carry); }
template <class T> T op_addc_cc(T a, T b, bool& carry) { return carried<T>(uint64_t(a) + b + carry, carry); }
template <class T> T op_addc(T a, T b, bool carry) { return a + b + carry; }
template <class T> T op_sub_cc(T a, T b, bool& carry) { return carried<T>(uint64_t(a) - b, carry); }
template <class T> T op_subc_cc(T a, T b, bool& carry) { return carried<T>(uint64_t(a) - b - carry, carry); }
template <class T> T op_subc(T a, T b, bool carry) { return a - b - carry; }
template <class T> T op_mad_lo_cc(T a, T b, T c, bool& carry) { return op_add_cc(op_mul_lo(a, b), c, carry); }
template <class T> T op_madc_lo_cc(T a, T b, T c, bool& carry) { return op_addc_cc(op_mul_lo(a, b), c, carry); }
template <class T> T op_madc_hi_cc(T a, T b, T c, bool& carry) { return op_addc_cc(op_mul_hi(a, b), c, carry); }
template <class T> T op_madc_hi(T a, T b, T c, bool carry) { return op_addc(op_mul_hi(a, b), c, carry); }
// clang-format on

// Rounded down: a double holds the product, and what the sum leaves out is known.
template <class T>
T op_fma_rm(T a, T b, T c) {
  static_assert(std::is_same_v<T, float>);
  const double product = double(a) * b, sum = product + c, back = sum - product;
  const double left_out = (product - (sum - back)) + (c - back);
  if (sum == 0) return std::signbit(product) || std::signbit(c) ? -0.0f : 0.0f;
  const float nearest = static_cast<float>(sum);
  const bool is_above = nearest > sum || (nearest == sum && left_out < 0);
  return is_above ? std::nextafter(nearest, -std::numeric_limits<float>::infinity()) : nearest;
}

// Approximations are within an error that their users allow for; numbers below the normal ones are
// 0.
template <class T>
T flushed(T a) {
  return std::fabs(a) < std::numeric_limits<T>::min() ? std::copysign(T(0), a) : a;
}
template <class T>
T op_ex2_approx_ftz(T a) {
  return flushed(std::exp2(flushed(a)));
}
template <class T>
T op_rcp_approx_ftz(T a) {
  T result = flushed(1 / flushed(a));
  if constexpr (std::is_same_v<T, double>) result = as<double>(as<uint64_t>(result) >> 32 << 32);
  return result;
}

// --- comparisons ---------------------------------------------------------------------------------

template <class T>
bool unordered(T a, T b) {
  return a != a || b != b;
}
// clang-format off
template <class T> bool op_setp_eq(T a, T b) { return a == b; }
template <class T> bool op_setp_ne(T a, T b) { return a != b && !unordered(a, b); }
template <class T> bool op_setp_lt(T a, T b) { return a < b; }
template <class T> bool op_setp_le(T a, T b) { return a <= b; }
template <class T> bool op_setp_gt(T a, T b) { return a > b; }
template <class T> bool op_setp_ge(T a, T b) { return a >= b; }
template <class T> bool op_setp_equ(T a, T b) { return a == b || unordered(a, b); }
template <class T> bool op_setp_neu(T a, T b) { return a != b; }
template <class T> bool op_setp_ltu(T a, T b) { return !(a >= b); }
template <class T> bool op_setp_leu(T a, T b) { return !(a > b); }
template <class T> bool op_setp_gtu(T a, T b) { return !(a <= b); }
template <class T> bool op_setp_geu(T a, T b) { return !(a < b); }
template <class T> bool op_setp_num(T a, T b) { return !unordered(a, b); }
template <class T> bool op_setp_nan(T a, T b) { return unordered(a, b); }
// clang-format on

// --- conversions ---------------------------------------------------------------------------------

// A float that is integral, or beyond the integers, which end at their largest and smallest. NaN is
// 0, but where a side has 64 bits the highest bit alone.
template <class To, class From>
To to_integer(From x) {
  using Limits = std::numeric_limits<To>;
  if (x != x)
    return sizeof(To) == 8 || sizeof(From) == 8 ? To(uint64_t(1) << (8 * sizeof(To) - 1)) : To(0);
  if (x >= std::ldexp(From(1), Limits::digits)) return Limits::max();
  if (x < From(Limits::min())) return Limits::min();
  return static_cast<To>(x);
}
template <class To, class From>
To integral(From rounded) {
  if constexpr (std::is_integral_v<To>)
    return to_integer<To>(rounded);
  else
    return rounded;
}
// clang-format off
template <class To, class From> To op_cvt(From x) { return static_cast<To>(x); }
template <class To, class From> To op_cvt_rn(From x) {
  static_assert(sizeof(To) > 2 || std::is_same_v<From, float>, "would be rounded twice");
  return static_cast<To>(x);
}
template <class To, class From> To op_cvt_rn(From high, From low) { return {decltype(To::low)(low), decltype(To::high)(high)}; }
template <class To, class From> To op_cvt_rna(From x) { return {to_tf32(x)}; }
template <class To, class From> To op_cvt_rni(From x) { return integral<To>(std::nearbyint(x)); }
template <class To, class From> To op_cvt_rzi(From x) { return integral<To>(std::trunc(x)); }
template <class To, class From> To op_cvt_rmi(From x) { return integral<To>(std::floor(x)); }
template <class To, class From> To op_cvt_rpi(From x) { return integral<To>(std::ceil(x)); }
template <class To, class From> To op_cvt_sat(From x) {
  static_assert(std::is_same_v<To, From> && std::is_floating_point_v<To>);
  return x > 0 ? (x < 1 ? x : To(1)) : To(0);
}
// clang-format on

// --- threads -------------------------------------------------------------------------------------

[[noreturn]] inline void op_trap(Site site) { fault("trap", site); }
inline void op_bar_sync(int barrier, Site site) {
  if (barrier != 0) fault("bar.sync of another barrier than 0", site);
  block_barrier(BarrierKind::kPlain, 0, site);
}
inline void op_bar_warp_sync(unsigned mask, Site site) { __syncwarp(mask, site); }

// The lanes that a shuffle stays within: `limits` has the last of them in its lower bits, and in
// bits 8 to 12 the mask that tells which segment of the warp they are.
struct Segment {
  int lane, first, last;
  explicit Segment(uint32_t limits) : lane(lane_id()) {
    const int mask = limits >> 8 & 31;
    first = lane & mask, last = first | (limits & ~mask & 31);
  }
};
// A lane whose source is outside keeps its own value.
template <class T>
T exchange(T value, int from, bool is_inside, uint32_t mask, Site site, bool* was_inside) {
  static constexpr Collective op{"shfl.sync", shuffle_lanes<T>};
  if (was_inside) *was_inside = is_inside;
  return shuffle(mask, value, is_inside ? from : -1, op, site);
}
template <class T>
T op_shfl_sync_up(T a, T by, T limits, T mask, Site site, bool* was_inside = nullptr) {
  const Segment s(limits);
  const int from = s.lane - int(by & 31);
  return exchange(a, from, from >= s.last, mask, site, was_inside);
}
template <class T>
T op_shfl_sync_down(T a, T by, T limits, T mask, Site site, bool* was_inside = nullptr) {
  const Segment s(limits);
  const int from = s.lane + int(by & 31);
  return exchange(a, from, from <= s.last, mask, site, was_inside);
}
template <class T>
T op_shfl_sync_bfly(T a, T by, T limits, T mask, Site site, bool* was_inside = nullptr) {
  const Segment s(limits);
  const int from = s.lane ^ int(by & 31);
  return exchange(a, from, from <= s.last, mask, site, was_inside);
}
template <class T>
T op_shfl_sync_idx(T a, T which, T limits, T mask, Site site, bool* was_inside = nullptr) {
  const Segment s(limits);
  const int from = s.first | int(which & ~(limits >> 8) & 31);
  return exchange(a, from, from <= s.last, mask, site, was_inside);
}
template <class T>
T op_vote_sync_ballot(bool value, T mask, Site site) {
  return __ballot_sync(mask, value, site);
}

// What a warp's registers hold of a matrix is what the emulator says for kernels, too (tensor.h):
// in question here are the operands, and their order.
template <class D, class A, class B, class C>
void op_mma_m16n8k16(float (&acc)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Site site) {
  static_assert(std::is_same_v<D, float> && std::is_same_v<A, B> && std::is_same_v<C, float>);
  mma<A, 16>(acc, a, b, site);
}
template <class D, class A, class B, class C>
void op_mma_m16n8k8(float (&acc)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Site site) {
  static_assert(std::is_same_v<D, float> && std::is_same_v<A, tf32> && std::is_same_v<B, tf32> &&
                std::is_same_v<C, float>);
  mma<float, 8>(acc, a, b, site);
}
template <int n, bool transposed>
void op_ldmatrix(uint32_t (&r)[n], const char* row, Site site) {
  load_matrices<n, transposed>(r, row, site);
}

}  // namespace needle::sim::ptx
