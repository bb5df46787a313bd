// The updates of updates.h, one pass in place each: up to seven streams of memory, behind which the
// arithmetic hides.
// unscale, before it in mixed precision: grad = grad factor, and whether that is finite.
#include "../common/backend.h"
#include "../common/parallel.h"
#include "../common/updates.h"

namespace needle::cpu {
namespace {

template <class P, class G, class A = accum_t<P>>
void sgd_range(P* __restrict param, const G* __restrict grad, A* __restrict u, SgdUpdate<A> update,
               int64_t begin, int64_t end) {
  if (u)
    for (int64_t i = begin; i < end; ++i) param[i] = P(update(A(param[i]), A(grad[i]), u[i]));
  else
    for (int64_t i = begin; i < end; ++i) param[i] = P(update(A(param[i]), A(grad[i])));
}

template <class P, class G, class A = accum_t<P>>
void adam_range(P* __restrict param, const G* __restrict grad, A* __restrict m, A* __restrict v,
                A scale, AdamUpdate<A> update, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i)
    param[i] = P(update(A(param[i]), A(grad[i]) * scale, m[i], v[i]));
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
    const SgdUpdate<A> update(lr, momentum, weight_decay);
    parallel_ranges(param.size(), 32768, [&](int64_t begin, int64_t end) {
      sgd_range(param.data<P>(), grad.data<G>(), u.size() ? u.data<A>() : nullptr, update, begin,
                end);
    });
  });
}

void adam_step(const Array& param, const Array& grad, const Array& m, const Array& v,
               const Array& grad_scale, double lr, double beta1, double beta2, double eps,
               double l2, double weight_decay, int64_t step) {
  dispatch_update(param.dtype(), grad.dtype(), "adam_step", [&](auto tag, auto grad_tag) {
    using P = typename decltype(tag)::type;
    using G = typename decltype(grad_tag)::type;
    using A = accum_t<P>;
    const A scale = A(*grad_scale.data<float>());
    const AdamUpdate<A> update(lr, beta1, beta2, eps, l2, weight_decay, step);
    parallel_ranges(param.size(), 32768, [&](int64_t begin, int64_t end) {
      adam_range(param.data<P>(), grad.data<G>(), m.data<A>(), v.data<A>(), scale, update, begin,
                 end);
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
