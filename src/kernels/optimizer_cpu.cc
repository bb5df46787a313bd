// One pass in place each. SGD:
//   g = grad + weight_decay param, u = momentum u + (1 - momentum) g, param = param - lr u
// Adam and AdamW (Kingma & Ba 2014, Loshchilov & Hutter 2019):
//   g = grad grad_scale + l2 param, m = beta1 m + (1 - beta1) g, v = beta2 v + (1 - beta2) g^2,
//   m_hat = m / (1 - beta1^step), v_hat = v / (1 - beta2^step),
//   param = param (1 - lr weight_decay) - lr m_hat / (sqrt(v_hat) + eps)
// Up to seven streams of memory; the arithmetic hides behind them.
// unscale, before it in mixed precision: grad = grad factor, and whether that is finite.
#include <cmath>

#include "../common/backend.h"
#include "../common/parallel.h"

namespace needle::cpu {
namespace {

template <class P, class G, class A = accum_t<P>>
void sgd_range(P* __restrict param, const G* __restrict grad, A* __restrict u, int64_t n, A lr,
               A momentum, A rest, A decay) {
  for (int64_t i = 0; i < n; ++i) {
    A g = A(grad[i]);
    if (decay != 0) g += decay * A(param[i]);
    if (u) u[i] = g = momentum * u[i] + rest * g;
    param[i] = P(A(param[i]) - lr * g);
  }
}

template <class P, class G, class A = accum_t<P>>
void adam_range(P* __restrict param, const G* __restrict grad, A* __restrict m, A* __restrict v,
                int64_t n, A scale, A lr, A beta1, A beta2, A rest1, A rest2, A eps, A l2, A decay,
                A correction1, A correction2) {
  for (int64_t i = 0; i < n; ++i) {
    A g = A(grad[i]) * scale;
    if (l2 != 0) g += l2 * A(param[i]);
    const A mean = beta1 * m[i] + rest1 * g;
    const A square = beta2 * v[i] + rest2 * g * g;
    m[i] = mean;
    v[i] = square;
    param[i] = P(A(param[i]) * decay -
                 lr * (mean * correction1) / (std::sqrt(square * correction2) + eps));
  }
}

// Whether anything in the range is infinite or NaN afterwards: only then is x - x not 0.
template <class G, class A = accum_t<G>>
bool unscale_range(G* grad, int64_t n, A factor) {
  bool bad = false;
  for (int64_t i = 0; i < n; ++i) {
    grad[i] = G(A(grad[i]) * factor);
    bad |= A(grad[i]) - A(grad[i]) != A(0);
  }
  return bad;
}

}  // namespace

void sgd_step(const Array& param, const Array& grad, const Array& u, double lr, double momentum,
              double weight_decay) {
  dispatch_update(param.dtype(), grad.dtype(), "sgd_step", [&](auto tag, auto grad_tag) {
    using P = typename decltype(tag)::type;
    using G = typename decltype(grad_tag)::type;
    using A = accum_t<P>;
    P* params = param.data<P>();
    const G* grads = grad.data<G>();
    A* means = u.size() ? u.data<A>() : nullptr;
    parallel_ranges(param.size(), 32768, [&](int64_t begin, int64_t end) {
      sgd_range(params + begin, grads + begin, means ? means + begin : nullptr, end - begin, A(lr),
                A(momentum), A(1 - momentum), A(weight_decay));
    });
  });
}

void adam_step(const Array& param, const Array& grad, const Array& m, const Array& v,
               const Array& grad_scale, double lr, double beta1, double beta2, double eps,
               double l2, double weight_decay, int64_t step) {
  const float scale = *grad_scale.data<float>();
  dispatch_update(param.dtype(), grad.dtype(), "adam_step", [&](auto tag, auto grad_tag) {
    using P = typename decltype(tag)::type;
    using G = typename decltype(grad_tag)::type;
    using A = accum_t<P>;
    P* params = param.data<P>();
    const G* grads = grad.data<G>();
    A *means = m.data<A>(), *squares = v.data<A>();
    parallel_ranges(param.size(), 32768, [&](int64_t begin, int64_t end) {
      adam_range(params + begin, grads + begin, means + begin, squares + begin, end - begin,
                 A(scale), A(lr), A(beta1), A(beta2), A(1 - beta1), A(1 - beta2), A(eps), A(l2),
                 A(1 - lr * weight_decay), A(1 / (1 - std::pow(beta1, step))),
                 A(1 / (1 - std::pow(beta2, step))));
    });
  });
}

void unscale(const Array& grad, double factor, const Array& nonfinite) {
  int32_t* flag = nonfinite.data<int32_t>();
  dispatch_float(grad.dtype(), "unscale", [&](auto tag) {
    using G = typename decltype(tag)::type;
    G* grads = grad.data<G>();
    parallel_ranges(grad.size(), 32768, [&](int64_t begin, int64_t end) {
      if (unscale_range(grads + begin, end - begin, accum_t<G>(factor)))
        __atomic_store_n(flag, 1, __ATOMIC_RELAXED);
    });
  });
}

}  // namespace needle::cpu
