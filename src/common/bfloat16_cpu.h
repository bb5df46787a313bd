// The ways to multiply bfloat16 on a CPU: as floats, by pairs of neighbours (AVX-512 BF16), by
// tiles (Intel AMX).
#pragma once

#include <cstdlib>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "simd_cpu.h"
#include "tiles_cpu.h"

namespace needle::cpu {

enum class Bfloat16Way { floats, pairs, tiles };

inline Bfloat16Way chosen_bfloat16_way() {
  bool pairs = false, pairs_pay = false;
#if defined(__AVX512F__)
  pairs = __builtin_cpu_supports("avx512bf16");
  // Intel's processors (Sapphire Rapids) take longer for a pair than for two multiply-adds of
  // float, AMD's (Zen 4, Zen 5) half as long.
  pairs_pay = pairs && !__builtin_cpu_is("intel");
#endif
  const char* const wanted = std::getenv("NEEDLE_BFLOAT16");
  const std::string name = wanted ? wanted : "";
  if (name.empty())
    return tiles::available() ? Bfloat16Way::tiles
           : pairs_pay        ? Bfloat16Way::pairs
                              : Bfloat16Way::floats;
  if (name == "float32") return Bfloat16Way::floats;
  if (name == "pairs" && pairs) return Bfloat16Way::pairs;
  if (name == "tiles" && tiles::available()) return Bfloat16Way::tiles;
  throw std::invalid_argument("NEEDLE_BFLOAT16 is \"" + name +
                              "\" (accepted by this processor: float32" + (pairs ? ", pairs" : "") +
                              (tiles::available() ? ", tiles" : "") + ")");
}
// The fastest way that the processor has, or the one that NEEDLE_BFLOAT16 names; the same all the
// time. raises: invalid_argument for a name that is none or is not this processor's.
inline Bfloat16Way bfloat16_way() {
  static const Bfloat16Way way = chosen_bfloat16_way();
  return way;
}

inline bool multiplies_pairs() { return bfloat16_way() == Bfloat16Way::pairs; }

// Whether products of T go by tiles.
template <class T>
bool by_tiles() {
  if constexpr (std::is_same_v<T, bfloat16>) return bfloat16_way() == Bfloat16Way::tiles;
  return false;
}

// While one lives this thread may use tiles, if products of T do.
template <class T>
struct UseTilesFor {
  std::optional<tiles::Use> use;
  UseTilesFor() {
    if constexpr (tiles::kCompiled)
      if (by_tiles<T>()) use.emplace();
  }
};

}  // namespace needle::cpu
