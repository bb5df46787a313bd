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

// .sync.aligned: the whole warp, or the result is undefined.
inline constexpr uint32_t kAllLanes = 0xffffffffu;
inline void check_whole_warp(const Lanes& lanes, const char* name, Site site) {
  if (lanes.active != kAllLanes)
    fault(std::string(name) + " with lanes missing from the warp", site);
}

struct MmaFrame {
  float* acc;
  const uint32_t* a;
  const uint32_t* b;
  Site site;
};

// Element `e` of a register: one of two 16-bit numbers, or a tf32.
template <class T>
float element(uint32_t word, int e) {
  if constexpr (std::is_same_v<T, float>) {
    word &= ~0x1fffu;
    float f;
    std::memcpy(&f, &word, sizeof f);
    return f;
  } else {
    T value;
    value.bits = static_cast<uint16_t>(word >> (16 * e));
    return value;
  }
}

template <class T, int K>
void mma_lanes(Lanes& lanes) {
  check_whole_warp(lanes, "mma",
                   static_cast<MmaFrame*>(
                       lanes.frame[31] ? lanes.frame[31] : lanes.frame[__builtin_ctz(lanes.active)])
                       ->site);
  constexpr int kPerWord = std::is_same_v<T, float> ? 1 : 2;
  float a[16][K], b[K][8], sum[16][8];
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const auto& frame = *static_cast<MmaFrame*>(lanes.frame[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int e = 0; e < kPerWord; ++e) {
      for (int r = 0; r < 4; ++r)
        a[g + 8 * (r % 2)][kPerWord * t + e + K / 2 * (r / 2)] = element<T>(frame.a[r], e);
      for (int r = 0; r < 2; ++r) b[kPerWord * t + e + K / 2 * r][g] = element<T>(frame.b[r], e);
    }
    for (int r = 0; r < 4; ++r) sum[g + 8 * (r / 2)][2 * t + r % 2] = frame.acc[r];
  }
  for (int m = 0; m < 16; ++m)
    for (int k = 0; k < K; ++k)
      for (int n = 0; n < 8; ++n) sum[m][n] += a[m][k] * b[k][n];
  for (int lane = 0; lane < kWarpSize; ++lane)
    for (int r = 0; r < 4; ++r)
      static_cast<MmaFrame*>(lanes.frame[lane])->acc[r] =
          sum[lane / 4 + 8 * (r / 2)][2 * (lane % 4) + r % 2];
}

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
void load_matrix_lanes(Lanes& lanes) {
  check_whole_warp(lanes, "ldmatrix",
                   static_cast<LoadMatrixFrame*>(lanes.frame[__builtin_ctz(lanes.active)])->site);
  for (int lane = 0; lane < kWarpSize; ++lane)
    for (int i = 0; i < N; ++i) {
      uint16_t pair[2];
      for (int e = 0; e < 2; ++e) {
        const int column = 2 * (lane % 4) + e;
        const int r = Transposed ? column : lane / 4, c = Transposed ? lane / 4 : column;
        std::memcpy(&pair[e], static_cast<LoadMatrixFrame*>(lanes.frame[8 * i + r])->row + 2 * c,
                    2);
      }
      static_cast<LoadMatrixFrame*>(lanes.frame[lane])->r[i] = pair[0] | uint32_t(pair[1]) << 16;
    }
}

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
