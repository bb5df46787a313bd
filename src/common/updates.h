// What optimizers do to one element, on CPU and CUDA.
#pragma once

#include <cmath>

#include "dtype.h"

namespace needle {

// g = grad + weight_decay w, u = momentum u + (1 - momentum) g, w = w - lr u.
template <class A>
struct SgdUpdate {
  A lr, momentum, rest, decay;

  SgdUpdate(double lr, double momentum, double weight_decay)
      : lr(A(lr)), momentum(A(momentum)), rest(A(1 - momentum)), decay(A(weight_decay)) {}

  // The new w, without and with momentum.
  NEEDLE_HD A operator()(A w, A g) const { return w - lr * (decay != 0 ? g + decay * w : g); }
  NEEDLE_HD A operator()(A w, A g, A& u) const {
    u = momentum * u + rest * (decay != 0 ? g + decay * w : g);
    return w - lr * u;
  }
};

// g = grad + l2 w, m = beta1 m + (1 - beta1) g, v = beta2 v + (1 - beta2) g^2,
// m_hat = m / (1 - beta1^step), v_hat = v / (1 - beta2^step),
// w = w (1 - lr weight_decay) - lr m_hat / (sqrt(v_hat) + eps).
// Adam: Kingma & Ba 2014. AdamW, without l2: Loshchilov & Hutter 2019.
template <class A>
struct AdamUpdate {
  A lr, beta1, beta2, rest1, rest2, eps, l2, decay, correction1, correction2;

  AdamUpdate(double lr, double beta1, double beta2, double eps, double l2, double weight_decay,
             int64_t step)
      : lr(A(lr)),
        beta1(A(beta1)),
        beta2(A(beta2)),
        rest1(A(1 - beta1)),
        rest2(A(1 - beta2)),
        eps(A(eps)),
        l2(A(l2)),
        decay(A(1 - lr * weight_decay)),
        correction1(A(1 / (1 - std::pow(beta1, double(step))))),
        correction2(A(1 / (1 - std::pow(beta2, double(step))))) {}

  // The new w.
  NEEDLE_HD A operator()(A w, A g, A& m, A& v) const {
    if (l2 != 0) g += l2 * w;
    m = beta1 * m + rest1 * g;
    v = beta2 * v + rest2 * g * g;
    return w * decay - lr * (m * correction1) / (std::sqrt(v * correction2) + eps);
  }
};

}  // namespace needle
