// What mma.sync and ldmatrix do to the fragments of a warp (layouts: ptx.h).
#pragma once

#include <type_traits>

#include "../dtype.h"
#include "thread.h"

namespace needle::sim {

// Round to nearest, ties away, to 10 bits of mantissa, as cvt.rna.tf32.f32 does.
inline uint32_t to_tf32(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return x != x ? bits : (bits + 0x1000u) & ~0x1fffu;
}

inline constexpr uint32_t kAllLanes = 0xffffffffu;

struct MmaFrame {
  float* acc;
  const uint32_t* a;
  const uint32_t* b;
  Site site;
};

// The sums of a whole warp, in tensor.cc, which is optimized where kernels are not. T: float16,
// bfloat16, or float for tf32.
template <class T, int K>
NEEDLE_SIM_HIDDEN void mma_lanes(Lanes& lanes);

template <class T, int K>
void mma(float (&acc)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Site site) {
  static constexpr Collective op{"mma.sync", mma_lanes<T, K>};
  MmaFrame frame{acc, a, b, site};
  collective(kAllLanes, &frame, op, site);
}

struct LoadMatrixFrame {
  uint32_t* r;
  const char* row;
  Site site;
};

template <int N, bool Transposed>
NEEDLE_SIM_HIDDEN void load_matrix_lanes(Lanes& lanes);

template <int N, bool Transposed>
__forceinline__ void load_matrices(uint32_t (&r)[N], const void* row, Site site) {
  static_assert(N == 1 || N == 2 || N == 4, "ldmatrix: 1, 2 or 4 matrices");
  static constexpr Collective op{Transposed ? "ldmatrix.trans" : "ldmatrix",
                                 load_matrix_lanes<N, Transposed>};
  if (self().rank % kWarpSize < 8 * N) {
    if (reinterpret_cast<uintptr_t>(row) % 16 != 0) fault("misaligned address: ldmatrix row", site);
    note_access(row, 16, false);
  }
  LoadMatrixFrame frame{r, static_cast<const char*>(row), site};
  collective(kAllLanes, &frame, op, site);
}

}  // namespace needle::sim
