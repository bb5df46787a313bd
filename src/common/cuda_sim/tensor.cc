#include "tensor.h"

namespace needle::sim {

namespace {

// .sync.aligned: the whole warp, or the result is undefined.
void check_whole_warp(const Lanes& lanes, const char* name, Site site) {
  if (lanes.active != kAllLanes)
    fault(std::string(name) + " with lanes missing from the warp", site);
}

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

}  // namespace

template <class T, int K>
void mma_lanes(Lanes& lanes) {
  check_whole_warp(lanes, "mma",
                   static_cast<MmaFrame*>(lanes.frame[__builtin_ctz(lanes.active)])->site);
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

template void mma_lanes<float16, 16>(Lanes&);
template void mma_lanes<bfloat16, 16>(Lanes&);
template void mma_lanes<float, 8>(Lanes&);

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

template void load_matrix_lanes<1, false>(Lanes&);
template void load_matrix_lanes<1, true>(Lanes&);
template void load_matrix_lanes<2, false>(Lanes&);
template void load_matrix_lanes<2, true>(Lanes&);
template void load_matrix_lanes<4, false>(Lanes&);
template void load_matrix_lanes<4, true>(Lanes&);

}  // namespace needle::sim
