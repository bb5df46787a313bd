// The updates of updates.h in place, one thread per element.
// unscale, before it in mixed precision: grad = grad factor, and whether that is finite.
#include "../common/cuda_util.cuh"
#include "../common/updates.h"

namespace needle::NEEDLE_DEVICE {
namespace {

template <class T, class G, class A = accum_t<T>>
__global__ void sgd_step_kernel(T* param, const G* grad, A* u, SgdUpdate<A> update, int64_t n) {
  for (int64_t i = first_index(); i < n; i += index_step()) {
    const A w = A(param[i]), g = A(grad[i]);
    param[i] = T(u ? update(w, g, u[i]) : update(w, g));
  }
}

template <class T, class G, class A = accum_t<T>>
__global__ void adam_step_kernel(T* param, const G* grad, A* m, A* v, const float* grad_scale,
                                 AdamUpdate<A> update, int64_t n) {
  const A scale = A(*grad_scale);
  for (int64_t i = first_index(); i < n; i += index_step()) {
    A mean = m[i], square = v[i];  // all is read before anything is written
    const A w = update(A(param[i]), A(grad[i]) * scale, mean, square);
    m[i] = mean;
    v[i] = square;
    param[i] = T(w);
  }
}

// x - x is 0 for all but infinities and NaN.
template <class T>
__global__ void unscale_kernel(T* grad, accum_t<T> factor, int32_t* nonfinite, int64_t n) {
  using A = accum_t<T>;
  bool bad = false;
  in_groups(
      first_index(), index_step(), n, [&](int64_t i) { return grad[i]; },
      [&](int64_t i, T value) {
        const T scaled = T(A(value) * factor);
        grad[i] = scaled;
        bad |= A(scaled) - A(scaled) != A(0);
      });
  if (bad) atomicOr(nonfinite, 1);
}

}  // namespace

void sgd_step(const Array& param, const Array& grad, const Array& u, double lr, double momentum,
              double weight_decay) {
  dispatch_update(param.dtype(), grad.dtype(), "sgd_step", [&](auto tag, auto grad_tag) {
    using T = typename decltype(tag)::type;
    using G = typename decltype(grad_tag)::type;
    using A = accum_t<T>;
    launch<sgd_step_kernel<T, G>>(grid_stride(param.size()), param.data<T>(), grad.data<G>(),
                                  u.size() ? u.data<A>() : nullptr,
                                  SgdUpdate<A>(lr, momentum, weight_decay), param.size());
  });
}

void adam_step(const Array& param, const Array& grad, const Array& m, const Array& v,
               const Array& grad_scale, double lr, double beta1, double beta2, double eps,
               double l2, double weight_decay, int64_t step) {
  dispatch_update(param.dtype(), grad.dtype(), "adam_step", [&](auto tag, auto grad_tag) {
    using T = typename decltype(tag)::type;
    using G = typename decltype(grad_tag)::type;
    using A = accum_t<T>;
    launch<adam_step_kernel<T, G>>(grid_stride(param.size()), param.data<T>(), grad.data<G>(),
                                   m.data<A>(), v.data<A>(), grad_scale.data<float>(),
                                   AdamUpdate<A>(lr, beta1, beta2, eps, l2, weight_decay, step),
                                   param.size());
  });
}

void unscale(const Array& grad, double factor, const Array& nonfinite) {
  dispatch_float(grad.dtype(), "unscale", [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch<unscale_kernel<T>>(grid_stride(grad.size()), grad.data<T>(), accum_t<T>(factor),
                              nonfinite.data<int32_t>(), grad.size());
  });
}

}  // namespace needle::NEEDLE_DEVICE
