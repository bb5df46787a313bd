// Updates in place, one thread per element. SGD:
//   g = grad + weight_decay param, u = momentum u + (1 - momentum) g, param = param - lr u
// Adam and AdamW (Kingma & Ba 2014, Loshchilov & Hutter 2019):
//   g = grad grad_scale + l2 param, m = beta1 m + (1 - beta1) g, v = beta2 v + (1 - beta2) g^2,
//   m_hat = m / (1 - beta1^step), v_hat = v / (1 - beta2^step),
//   param = param (1 - lr weight_decay) - lr m_hat / (sqrt(v_hat) + eps)
// unscale, before it in mixed precision: grad = grad factor, and whether that is finite.
#include "../common/cuda_util.cuh"
#include "../common/ewise_math_cuda.h"

namespace needle::NEEDLE_DEVICE {
namespace {

// In each kernel all is read before anything is written.
template <class T, class G, class A = accum_t<T>>
__global__ void sgd_step_kernel(T* param, const G* grad, A* u, A lr, A momentum, A rest, A decay,
                                int64_t n) {
  for (int64_t i = first_index(); i < n; i += index_step()) {
    const A w = A(param[i]);
    A g = A(grad[i]);
    if (decay != 0) g += decay * w;
    if (u) u[i] = g = momentum * u[i] + rest * g;
    param[i] = T(w - lr * g);
  }
}

template <class A>
struct AdamNumbers {
  A lr, beta1, beta2, one_minus_beta1, one_minus_beta2, eps, l2, decay, correction1, correction2;
};

template <class T, class G, class A = accum_t<T>>
__global__ void adam_step_kernel(T* param, const G* grad, A* m, A* v, const float* grad_scale,
                                 AdamNumbers<A> h, int64_t n) {
  const A scale = A(*grad_scale);
  for (int64_t i = first_index(); i < n; i += index_step()) {
    const A w = A(param[i]);
    A g = A(grad[i]) * scale;
    if (h.l2 != 0) g += h.l2 * w;
    const A mi = h.beta1 * m[i] + h.one_minus_beta1 * g;
    const A vi = h.beta2 * v[i] + h.one_minus_beta2 * g * g;
    m[i] = mi;
    v[i] = vi;
    param[i] = T(w * h.decay - h.lr * (mi / h.correction1) / (m_sqrt(vi / h.correction2) + h.eps));
  }
}

// x - x is 0 for all but infinities and NaN.
template <class T>
__global__ void unscale_kernel(T* grad, accum_t<T> factor, int32_t* nonfinite, int64_t n) {
  using A = accum_t<T>;
  bool bad = false;
  in_fours(
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
  if (param.size() == 0) return;
  dispatch_update(param.dtype(), grad.dtype(), "sgd_step", [&](auto tag, auto grad_tag) {
    using T = typename decltype(tag)::type;
    using G = typename decltype(grad_tag)::type;
    using A = accum_t<T>;
    launch<sgd_step_kernel<T, G>>(grid_stride(param.size()), param.data<T>(), grad.data<G>(),
                                  u.size() ? u.data<A>() : nullptr, A(lr), A(momentum),
                                  A(1 - momentum), A(weight_decay), param.size());
  });
}

void adam_step(const Array& param, const Array& grad, const Array& m, const Array& v,
               const Array& grad_scale, double lr, double beta1, double beta2, double eps,
               double l2, double weight_decay, int64_t step) {
  if (param.size() == 0) return;
  dispatch_update(param.dtype(), grad.dtype(), "adam_step", [&](auto tag, auto grad_tag) {
    using T = typename decltype(tag)::type;
    using G = typename decltype(grad_tag)::type;
    using A = accum_t<T>;
    const AdamNumbers<A> numbers{A(lr),
                                 A(beta1),
                                 A(beta2),
                                 A(1 - beta1),
                                 A(1 - beta2),
                                 A(eps),
                                 A(l2),
                                 A(1 - lr * weight_decay),
                                 A(1 - std::pow(beta1, double(step))),
                                 A(1 - std::pow(beta2, double(step)))};
    launch<adam_step_kernel<T, G>>(grid_stride(param.size()), param.data<T>(), grad.data<G>(),
                                   m.data<A>(), v.data<A>(), grad_scale.data<float>(), numbers,
                                   param.size());
  });
}

void unscale(const Array& grad, double factor, const Array& nonfinite) {
  if (grad.size() == 0) return;
  dispatch_float(grad.dtype(), "unscale", [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch<unscale_kernel<T>>(grid_stride(grad.size()), grad.data<T>(), accum_t<T>(factor),
                              nonfinite.data<int32_t>(), grad.size());
  });
}

}  // namespace needle::NEEDLE_DEVICE
