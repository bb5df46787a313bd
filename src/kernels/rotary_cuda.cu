// Rotary embedding on a GPU, GPT-NeoX halves: with h = rot / 2 and i < h,
// (x[i], x[i+h]) -> (x[i] c - x[i+h] s, x[i+h] c + x[i] s); elements from rot on are copied.
// `inverse` negates s.
#include "../common/cuda_util.cuh"

namespace needle::NEEDLE_DEVICE {
namespace {

struct RotaryShape {
  int64_t H, T, D, half;
  int64_t x_strides[4], out_strides[4];
};

// A thread owns a pair, or one element that is copied, so the call may be in place.
template <class T>
__global__ void rotary_kernel(const T* x, const float* cos, const float* sin, T* out, RotaryShape s,
                              int64_t n, bool inverse) {
  using A = accum_t<T>;
  const int64_t per_position = s.D - s.half;
  for (int64_t i = first_index(); i < n; i += index_step()) {
    const int64_t d = i % per_position, t = i / per_position % s.T;
    const int64_t h = i / per_position / s.T % s.H, b = i / per_position / s.T / s.H;
    const T* from = x + b * s.x_strides[0] + h * s.x_strides[1] + t * s.x_strides[2];
    T* to = out + b * s.out_strides[0] + h * s.out_strides[1] + t * s.out_strides[2];
    if (d < s.half) {
      const A c = A(cos[t * s.half + d]),
              sn = A(inverse ? -sin[t * s.half + d] : sin[t * s.half + d]);
      const A first = A(from[d * s.x_strides[3]]), second = A(from[(d + s.half) * s.x_strides[3]]);
      to[d * s.out_strides[3]] = T(first * c - second * sn);
      to[(d + s.half) * s.out_strides[3]] = T(second * c + first * sn);
    } else {
      to[(d + s.half) * s.out_strides[3]] = from[(d + s.half) * s.x_strides[3]];
    }
  }
}

}  // namespace

void rotary(const Array& x, const Dims& x_strides, int64_t x_offset, const Array& cos,
            const Array& sin, const Array& out, const Dims& out_strides, int64_t B, int64_t H,
            int64_t T, int64_t D, int64_t rot, bool inverse) {
  RotaryShape s{H, T, D, rot / 2, {}, {}};
  for (size_t d = 0; d < 4; ++d) {
    s.x_strides[d] = x_strides[d];
    s.out_strides[d] = out_strides[d];
  }
  const int64_t n = B * H * T * (D - rot / 2);
  if (n == 0) return;
  dispatch_float(x.dtype(), "rotary", [&](auto tag) {
    using E = typename decltype(tag)::type;
    launch<rotary_kernel<E>>(grid_stride(n), x.data<E>() + x_offset, cos.data<float>(),
                             sin.data<float>(), out.data<E>(), s, n, inverse);
  });
}

}  // namespace needle::NEEDLE_DEVICE
