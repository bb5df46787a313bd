// Rotary embedding on a GPU, GPT-NeoX halves: with h = rot / 2 and i < h,
// (x[i], x[i+h]) -> (x[i] c - x[i+h] s, x[i+h] c + x[i] s); elements from rot on are copied.
// `inverse` negates s.
#include "../common/cuda_util.cuh"

namespace needle::NEEDLE_DEVICE {
namespace {

// A thread owns N neighbouring pairs, or N elements that are copied, so the call may be in place.
// The walk goes over (B, H, T, D - h) in vectors of N: offsets in x, out and the tables, and which
// of the D - h it is.
template <class T, int N>
__global__ void rotary_kernel(const T* x, const float* cos, const float* sin, T* out, Walk<4> walk,
                              int64_t half, int64_t x_half, int64_t out_half, int64_t n,
                              bool inverse) {
  using A = accum_t<T>;
  using V = Vec<T, N>;
  for (int64_t i = first_index(); i < n; i += index_step()) {
    const auto at = walk(i);
    const T* const from = x + at.of[0];
    T* const to = out + at.of[1];
    if (at.of[3] < half) {
      const V first = *reinterpret_cast<const V*>(from);
      const V second = *reinterpret_cast<const V*>(from + x_half);
      const auto cosines = *reinterpret_cast<const Vec<float, N>*>(cos + at.of[2]);
      const auto sines = *reinterpret_cast<const Vec<float, N>*>(sin + at.of[2]);
      V rotated_first, rotated_second;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const A a = A(first.v[j]), b = A(second.v[j]);
        const A c = A(cosines.v[j]), s = A(inverse ? -sines.v[j] : sines.v[j]);
        rotated_first.v[j] = T(a * c - b * s);
        rotated_second.v[j] = T(b * c + a * s);
      }
      *reinterpret_cast<V*>(to) = rotated_first;
      *reinterpret_cast<V*>(to + out_half) = rotated_second;
    } else {
      *reinterpret_cast<V*>(to + out_half) = *reinterpret_cast<const V*>(from + x_half);
    }
  }
}

}  // namespace

void rotary(const Array& x, const Dims& x_strides, int64_t x_offset, const Array& cos,
            const Array& sin, const Array& out, const Dims& out_strides, int64_t B, int64_t H,
            int64_t T, int64_t D, int64_t rot, bool inverse) {
  const int64_t half = rot / 2, n = B * H * T * (D - half);
  const Dims table{0, 0, half, 1}, element{0, 0, 0, 1};
  auto walk = make_walk<4>({B, H, T, D - half},
                           {{&x_strides, x_offset}, {&out_strides}, {&table}, {&element}});
  dispatch_float(x.dtype(), "rotary", [&](auto tag) {
    using E = typename decltype(tag)::type;
    constexpr int N = 16 / int(sizeof(E));
    const E* from = x.data<E>();
    E* to = out.data<E>();
    const float *c = cos.data<float>(), *s = sin.data<float>();
    const auto run = [&](auto length) {
      constexpr int kLength = decltype(length)::value;
      launch<rotary_kernel<E, kLength>>(grid_stride(n / kLength), from, c, s, to, walk, half,
                                        half * x_strides[3], half * out_strides[3], n / kLength,
                                        inverse);
    };
    const bool tables_aligned = aligned_for<Vec<float, N>>(c) && aligned_for<Vec<float, N>>(s);
    // A head may be one element, seen D times: the gradient of a sum is.
    const bool by_vectors = half % N == 0 && n % N == 0 && !walk.broadcasts(0) &&
                            go_by_vectors(walk, N,
                                          {aligned_for<Vec<E, N>>(from + x_offset),
                                           aligned_for<Vec<E, N>>(to), tables_aligned, true});
    by_vectors ? run(Int<N>{}) : run(Int<1>{});
  });
}

}  // namespace needle::NEEDLE_DEVICE
