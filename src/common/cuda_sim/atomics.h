// atomicAdd and its relatives. They order nothing, as on the GPU: relaxed, with __threadfence for
// more. Inlined at every level of optimization: the race detector knows the place of an access by
// its code address.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>

#include "half.h"
#include "thread.h"

namespace needle::sim {

// A GPU refuses an atomic operation whose bytes are not aligned as one.
template <class T>
__forceinline__ T* atomic_address(T* address, Site site) {
  if (reinterpret_cast<uintptr_t>(address) % sizeof(T) != 0)
    fault("misaligned address: atomic operation on " + std::to_string(sizeof(T)) + " bytes", site);
  return address;
}

template <class T>
using Word = std::conditional_t<sizeof(T) == 2, uint16_t,
                                std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>;

// Any read-modify-write on 2, 4 or 8 bytes; returns the old value.
template <class T, class F>
__forceinline__ T atomic_update(T* address, F&& next, Site site) {
  using Word = sim::Word<T>;
  static_assert(sizeof(Word) == sizeof(T));
  Word* word = reinterpret_cast<Word*>(atomic_address(address, site));
  Word seen = __atomic_load_n(word, __ATOMIC_RELAXED);
  for (;;) {
    T old;
    std::memcpy(static_cast<void*>(&old), &seen, sizeof(T));
    const T wanted = next(old);
    Word replacement;
    std::memcpy(&replacement, &wanted, sizeof(T));
    if (__atomic_compare_exchange_n(word, &seen, replacement, true, __ATOMIC_RELAXED,
                                    __ATOMIC_RELAXED))
      return old;
  }
}

}  // namespace needle::sim

template <class T>
__forceinline__ T atomicAdd(T* address, needle::sim::no_deduce<T> value, NEEDLE_SIM_SITE) {
  static_assert(needle::sim::is_one_of<T, int, unsigned, unsigned long long, float, double, __half,
                                       __half2, __nv_bfloat16, __nv_bfloat162>,
                "CUDA has atomicAdd for int, unsigned, unsigned long long, float, double and "
                "16-bit floats only");
  if constexpr (std::is_integral_v<T>)
    return __atomic_fetch_add(needle::sim::atomic_address(address, site), value, __ATOMIC_RELAXED);
  else
    return needle::sim::atomic_update(address, [=](T old) { return T(old + value); }, site);
}
template <class T>
__forceinline__ T atomicSub(T* address, needle::sim::no_deduce<T> value, NEEDLE_SIM_SITE) {
  static_assert(needle::sim::is_one_of<T, int, unsigned>,
                "CUDA has atomicSub for int and unsigned only");
  return __atomic_fetch_sub(needle::sim::atomic_address(address, site), value, __ATOMIC_RELAXED);
}
template <class T>
__forceinline__ T atomicAnd(T* address, needle::sim::no_deduce<T> value, NEEDLE_SIM_SITE) {
  static_assert(needle::sim::is_one_of<T, int, unsigned, long long, unsigned long long>,
                "CUDA has atomicAnd for int, unsigned, long long and unsigned long long only");
  return __atomic_fetch_and(needle::sim::atomic_address(address, site), value, __ATOMIC_RELAXED);
}
template <class T>
__forceinline__ T atomicOr(T* address, needle::sim::no_deduce<T> value, NEEDLE_SIM_SITE) {
  static_assert(needle::sim::is_one_of<T, int, unsigned, long long, unsigned long long>,
                "CUDA has atomicOr for int, unsigned, long long and unsigned long long only");
  return __atomic_fetch_or(needle::sim::atomic_address(address, site), value, __ATOMIC_RELAXED);
}
template <class T>
__forceinline__ T atomicXor(T* address, needle::sim::no_deduce<T> value, NEEDLE_SIM_SITE) {
  static_assert(needle::sim::is_one_of<T, int, unsigned, long long, unsigned long long>,
                "CUDA has atomicXor for int, unsigned, long long and unsigned long long only");
  return __atomic_fetch_xor(needle::sim::atomic_address(address, site), value, __ATOMIC_RELAXED);
}
template <class T>
__forceinline__ T atomicExch(T* address, needle::sim::no_deduce<T> value, NEEDLE_SIM_SITE) {
  static_assert(needle::sim::is_one_of<T, int, unsigned, unsigned long long, float>,
                "CUDA has atomicExch for int, unsigned, unsigned long long and float only");
  using Word = needle::sim::Word<T>;  // not an update: what nobody has set may be exchanged
  Word word;
  T old;
  std::memcpy(&word, &value, sizeof(T));
  word = __atomic_exchange_n(reinterpret_cast<Word*>(needle::sim::atomic_address(address, site)),
                             word, __ATOMIC_RELAXED);
  std::memcpy(static_cast<void*>(&old), &word, sizeof(T));
  return old;
}
template <class T>
__forceinline__ T atomicMin(T* address, needle::sim::no_deduce<T> value, NEEDLE_SIM_SITE) {
  static_assert(needle::sim::is_one_of<T, int, unsigned, long long, unsigned long long>,
                "CUDA has atomicMin for int, unsigned, long long and unsigned long long only");
  return needle::sim::atomic_update(
      address, [=](T old) { return old < value ? old : value; }, site);
}
template <class T>
__forceinline__ T atomicMax(T* address, needle::sim::no_deduce<T> value, NEEDLE_SIM_SITE) {
  static_assert(needle::sim::is_one_of<T, int, unsigned, long long, unsigned long long>,
                "CUDA has atomicMax for int, unsigned, long long and unsigned long long only");
  return needle::sim::atomic_update(
      address, [=](T old) { return old < value ? value : old; }, site);
}
__forceinline__ unsigned atomicInc(unsigned* address, unsigned limit, NEEDLE_SIM_SITE) {
  return needle::sim::atomic_update(
      address, [=](unsigned old) { return old >= limit ? 0u : old + 1; }, site);
}
__forceinline__ unsigned atomicDec(unsigned* address, unsigned limit, NEEDLE_SIM_SITE) {
  return needle::sim::atomic_update(
      address, [=](unsigned old) { return old == 0 || old > limit ? limit : old - 1; }, site);
}
template <class T>
__forceinline__ T atomicCAS(T* address, needle::sim::no_deduce<T> compare,
                            needle::sim::no_deduce<T> value, NEEDLE_SIM_SITE) {
  static_assert(needle::sim::is_one_of<T, unsigned short, int, unsigned, unsigned long long>,
                "CUDA has atomicCAS for unsigned short, int, unsigned and unsigned long long only");
  __atomic_compare_exchange_n(needle::sim::atomic_address(address, site), &compare, value, false,
                              __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return compare;
}
