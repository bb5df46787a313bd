// Rotary embedding on a GPU, GPT-NeoX halves: with h = rot / 2 and i < h,
// (x[i], x[i+h]) -> (x[i] c - x[i+h] s, x[i+h] c + x[i] s); elements from rot on are copied.
// `inverse` negates s.
#include "../common/cuda_util.cuh"

namespace needle::NEEDLE_DEVICE {
namespace {

// A thread owns a pair, or one element that is copied, so the call may be in place. The walk goes
// over (B, H, T, D - h): offsets in x, out and the tables, and which of the D - h it is.
template <class T>
__global__ void rotary_kernel(const T* x, const float* cos, const float* sin, T* out, Walk<4> walk,
                              int64_t half, int64_t x_half, int64_t out_half, int64_t n,
                              bool inverse) {
  using A = accum_t<T>;
  for (int64_t i = first_index(); i < n; i += index_step()) {
    const auto at = walk(i);
    const T* const from = x + at.of[0];
    T* const to = out + at.of[1];
    if (at.of[3] < half) {
      const A c = A(cos[at.of[2]]), s = A(inverse ? -sin[at.of[2]] : sin[at.of[2]]);
      const A first = A(from[0]), second = A(from[x_half]);
      to[0] = T(first * c - second * s);
      to[out_half] = T(second * c + first * s);
    } else {
      to[out_half] = from[x_half];
    }
  }
}

}  // namespace

void rotary(const Array& x, const Dims& x_strides, int64_t x_offset, const Array& cos,
            const Array& sin, const Array& out, const Dims& out_strides, int64_t B, int64_t H,
            int64_t T, int64_t D, int64_t rot, bool inverse) {
  const int64_t half = rot / 2, n = B * H * T * (D - half);
  if (n == 0) return;
  const Dims table{0, 0, half, 1}, element{0, 0, 0, 1};
  const auto walk = make_walk<4>({B, H, T, D - half},
                                 {{&x_strides, x_offset}, {&out_strides}, {&table}, {&element}});
  dispatch_float(x.dtype(), "rotary", [&](auto tag) {
    using E = typename decltype(tag)::type;
    launch<rotary_kernel<E>>(grid_stride(n), x.data<E>(), cos.data<float>(), sin.data<float>(),
                             out.data<E>(), walk, half, half * x_strides[3], half * out_strides[3],
                             n, inverse);
  });
}

}  // namespace needle::NEEDLE_DEVICE
