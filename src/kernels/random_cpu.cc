// Random numbers by counter: element i is made of word i % 4 of Philox 4x32-10 with counter offset
// + i / 4 and key seed.
//
// uniform = (word >> 8) 2^-24; in float64 (word 2^21 + next word >> 11) 2^-53, next in the ring of
// four. normal: Box-Muller on the pairs (u0, u1), (u2, u3): sqrt(-2 ln(1 - u0)) times cos and sin
// of 2 pi u1.
#include <algorithm>
#include <cmath>

#include "../common/backend.h"
#include "../common/ewise_math_cpu.h"
#include "../common/parallel.h"
#include "../common/philox.h"

namespace needle::cpu {
namespace {

// Groups of four that are made at once, in buffers that stay in the first cache.
constexpr int64_t kGroups = 128;
constexpr int64_t kGrain = 1 << 14;  // elements per task, a multiple of 4 * kGroups

// Uniform numbers of type C for groups first .. first + n, four to a group, in order.
template <class C>
void uniform_groups(uint64_t seed, uint64_t offset, int64_t first, int64_t n, C* u) {
  for (int64_t g = 0; g < n; ++g) {
    const Philox r = philox(offset + uint64_t(first + g), seed);
    for (int i = 0; i < 4; ++i) {
      if constexpr (std::is_same_v<C, double>)
        u[4 * g + i] = double(uint64_t(r.word[i]) << 21 | r.word[(i + 1) % 4] >> 11) * 0x1p-53;
      else
        u[4 * g + i] = float(int32_t(r.word[i] >> 8)) * 0x1p-24f;
    }
  }
}

// body(at, n, u): the uniform numbers u of elements at .. at + n, for all of 0 .. size.
template <class C, class Body>
void for_uniform(int64_t size, uint64_t seed, uint64_t offset, const Body& body) {
  parallel_ranges(size, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; at += 4 * kGroups) {
      const int64_t n = std::min(4 * kGroups, end - at);
      alignas(64) C u[4 * kGroups];
      uniform_groups<C>(seed, offset, at / 4, (n + 3) / 4, u);
      body(at, n, u);
    }
  });
}

// cos and sin of 2 pi u for u in [0, 1): a quarter turn's polynomials, then the quadrant.
inline void turn(float u, float& cosine, float& sine) {
  const float quarter = std::floor(4.f * u + 0.5f);
  const float x = (u - 0.25f * quarter) * 6.28318530718f;  // |x| <= pi / 4, the difference exact
  const float s = x * x;
  const float sin_x =
      x + x * s * (-1.6666654611e-1f + s * (8.3321608736e-3f - s * 1.9515295891e-4f));
  const float cos_x =
      1.f - 0.5f * s +
      s * s * (4.166664568298827e-2f + s * (-1.388731625493765e-3f + s * 2.443315711809948e-5f));
  const int32_t q = int32_t(quarter) & 3;
  const float c = q & 1 ? sin_x : cos_x, d = q & 1 ? cos_x : sin_x;
  cosine = q == 1 || q == 2 ? -c : c;
  sine = q >= 2 ? -d : d;
}
inline void turn(double u, double& cosine, double& sine) {
  cosine = std::cos(6.283185307179586477 * u);
  sine = std::sin(6.283185307179586477 * u);
}

}  // namespace

void random_uniform(const Array& out, uint64_t seed, uint64_t offset) {
  dispatch_float(out.dtype(), "random_uniform", [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = accum_t<T>;
    T* to = out.data<T>();
    for_uniform<C>(out.size(), seed, offset, [&](int64_t at, int64_t n, const C* u) {
      for (int64_t i = 0; i < n; ++i) to[at + i] = T(u[i]);
    });
  });
}

void random_normal(const Array& out, uint64_t seed, uint64_t offset) {
  dispatch_float(out.dtype(), "random_normal", [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = accum_t<T>;
    T* to = out.data<T>();
    for_uniform<C>(out.size(), seed, offset, [&](int64_t at, int64_t n, C* u) {
      const int64_t pairs = (n + 3) / 4 * 2;
      for (int64_t p = 0; p < pairs; ++p) {
        const C radius = m_sqrt(C(-2) * m_log(C(1) - u[2 * p]));
        C cosine, sine;
        turn(u[2 * p + 1], cosine, sine);
        u[2 * p] = radius * cosine;
        u[2 * p + 1] = radius * sine;
      }
      for (int64_t i = 0; i < n; ++i) to[at + i] = T(u[i]);
    });
  });
}

void dropout(const Array& x, const Array& out, double p, uint64_t seed, uint64_t offset) {
  if (!(p >= 0 && p <= 1))
    throw std::invalid_argument("[dropout] p is no probability: " + std::to_string(p) +
                                " (0 to 1)");
  if (x.size() < out.size())
    throw std::out_of_range("[dropout] x has " + std::to_string(x.size()) + " elements, out has " +
                            std::to_string(out.size()));
  dispatch_float(out.dtype(), "dropout", [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = accum_t<T>;
    const T* from = x.data<T>();
    T* to = out.data<T>();
    const float threshold = float(p);
    const C kept = C(1 - p);
    for_uniform<float>(out.size(), seed, offset, [&](int64_t at, int64_t n, const float* u) {
      for (int64_t i = 0; i < n; ++i)
        to[at + i] = T(u[i] >= threshold ? C(from[at + i]) / kept : C(0));
    });
  });
}

}  // namespace needle::cpu
