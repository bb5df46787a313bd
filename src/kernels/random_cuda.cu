// Counter-based random numbers on a GPU: Philox 4x32-10 (Salmon et al. 2011), one thread per
// counter, four elements each.
//
// Element i depends on (seed, offset + i / 4, i % 4) alone. uniform: 24 bits of the element's word;
// in float64 53 bits, the low 21 from the neighbouring word. normal: Box-Muller on elements (0, 1)
// and (2, 3) of a counter.
#include "../common/cuda_util.cuh"
#include "../common/ewise_math_cuda.h"
#include "../common/philox.h"

namespace needle::NEEDLE_DEVICE {
namespace {

template <class A>
__device__ A uniform_of(const Philox& words, int j) {
  if constexpr (std::is_same<A, double>::value) {
    return double((uint64_t(words.word[j]) << 21) | (words.word[(j + 1) % 4] >> 11)) * 0x1p-53;
  } else {
    return float(words.word[j] >> 8) * 0x1p-24f;
  }
}

template <class T>
__global__ void random_uniform_kernel(T* out, int64_t n, uint64_t seed, uint64_t offset) {
  for (int64_t q = first_index(); q * 4 < n; q += index_step()) {
    const Philox words = philox(offset + uint64_t(q), seed);
    accum_t<T> four[4];
    for (int j = 0; j < 4; ++j) four[j] = uniform_of<accum_t<T>>(words, j);
    store_run(out + q * 4, four, n - q * 4);
  }
}

template <class T>
__global__ void random_normal_kernel(T* out, int64_t n, uint64_t seed, uint64_t offset) {
  using A = accum_t<T>;
  for (int64_t q = first_index(); q * 4 < n; q += index_step()) {
    const Philox words = philox(offset + uint64_t(q), seed);
    A four[4];
    for (int j = 0; j < 4; j += 2) {
      const A radius = m_sqrt(A(-2) * m_log(A(1) - uniform_of<A>(words, j)));  // of (0, 1]
      const A angle = A(6.283185307179586) * uniform_of<A>(words, j + 1);
      four[j] = radius * m_cos(angle);
      four[j + 1] = radius * m_sin(angle);
    }
    store_run(out + q * 4, four, n - q * 4);
  }
}

template <class T>
__global__ void dropout_kernel(const T* x, T* out, int64_t n, float p, accum_t<T> keep_probability,
                               uint64_t seed, uint64_t offset) {
  using A = accum_t<T>;
  for (int64_t q = first_index(); q * 4 < n; q += index_step()) {
    const Philox words = philox(offset + uint64_t(q), seed);
    A four[4] = {};
    for (int j = 0; j < 4 && q * 4 + j < n; ++j) {
      const bool keep = uniform_of<float>(words, j) >= p && keep_probability > A(0);
      if (keep) four[j] = A(x[q * 4 + j]) / keep_probability;
    }
    store_run(out + q * 4, four, n - q * 4);
  }
}

}  // namespace

void random_uniform(const Array& out, uint64_t seed, uint64_t offset) {
  if (out.size() == 0) return;
  dispatch_float(out.dtype(), "random_uniform", [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch<random_uniform_kernel<T>>(grid_stride(ceil_div(out.size(), 4)), out.data<T>(),
                                     out.size(), seed, offset);
  });
}

void random_normal(const Array& out, uint64_t seed, uint64_t offset) {
  if (out.size() == 0) return;
  dispatch_float(out.dtype(), "random_normal", [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch<random_normal_kernel<T>>(grid_stride(ceil_div(out.size(), 4)), out.data<T>(), out.size(),
                                    seed, offset);
  });
}

void dropout(const Array& x, const Array& out, double p, uint64_t seed, uint64_t offset) {
  if (out.size() == 0) return;
  dispatch_float(out.dtype(), "dropout", [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch<dropout_kernel<T>>(grid_stride(ceil_div(out.size(), 4)), x.data<T>(), out.data<T>(),
                              out.size(), float(p), accum_t<T>(1 - p), seed, offset);
  });
}

}  // namespace needle::NEEDLE_DEVICE
