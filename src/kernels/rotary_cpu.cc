// Rotary embedding in GPT-NeoX's halves: with h = rot / 2 and i < h, at position t,
//   out[i]     = x[i] cos[t, i] - x[i + h] sin[t, i]
//   out[i + h] = x[i + h] cos[t, i] + x[i] sin[t, i]
// The other D - rot elements are copied; inverse turns the other way, which is the gradient. out
// may be x.
#include "../common/backend.h"
#include "../common/parallel.h"

namespace needle::cpu {

void rotary(const Array& x, const Dims& x_strides, int64_t x_offset, const Array& cos,
            const Array& sin, const Array& out, const Dims& out_strides, int64_t B, int64_t H,
            int64_t T, int64_t D, int64_t rot, bool inverse) {
  dispatch_float(x.dtype(), "rotary", [&](auto tag) {
    using E = typename decltype(tag)::type;
    using A = accum_t<E>;
    const E* from = x.data<E>() + x_offset;
    E* to = out.data<E>();
    const float *cosines = cos.data<float>(), *sines = sin.data<float>();
    const int64_t half = rot / 2, xs = x_strides[3], os = out_strides[3];
    const A sign = inverse ? A(-1) : A(1);
    parallel_ranges(B * H * T, 1 + 8192 / (D + 1), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const int64_t t = row % T, h = row / T % H, b = row / T / H;
        const E* in = from + b * x_strides[0] + h * x_strides[1] + t * x_strides[2];
        E* result = to + b * out_strides[0] + h * out_strides[1] + t * out_strides[2];
#pragma GCC ivdep  // out is x or does not overlap it
        for (int64_t i = 0; i < half; ++i) {
          const A c = A(cosines[t * half + i]), s = sign * A(sines[t * half + i]);
          const A first = A(in[i * xs]), second = A(in[(i + half) * xs]);
          result[i * os] = E(first * c - second * s);
          result[(i + half) * os] = E(second * c + first * s);
        }
        if (in == result && xs == os) continue;
        for (int64_t i = 2 * half; i < D; ++i) result[i * os] = in[i * xs];
      }
    });
  });
}

}  // namespace needle::cpu
