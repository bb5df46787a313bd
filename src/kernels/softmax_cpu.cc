// Softmax, log-softmax and log-sum-exp over the rows of (rows, cols).
//   softmax:      y = exp(x - max) / sum exp(x - max)       dx = y (dy - sum dy y)
//   log_softmax:  y = x - max - log sum exp(x - max)        dx = dy - exp(y) sum dy
//   logsumexp:    lse = max + log sum exp(x - max)          dx = exp(x - lse) dlse
// One read of a row for its maximum, one for its sum.
#include "../common/backend.h"
#include "../common/rows_cpu.h"

namespace needle::cpu {
namespace {

template <class T>
void softmax_row(const T* x, T* y, int64_t cols) {
  using A = accum_t<T>;
  const A lowest = -std::numeric_limits<A>::infinity();
  const A max = row_max(x, cols);
  const auto numerator = [&](Vec<A> v) { return vexp<A>(v - max); };
  if constexpr (std::is_same_v<T, A>) {
    Vec<A> sums{};
    A rest = 0;
    for_vectors<A>(
        cols,
        [&](int64_t i) {
          const Vec<A> e = numerator(load(x + i));
          store(y + i, e);
          sums += e;
        },
        [&](int64_t i, int64_t lanes) {
          const Vec<A> e = numerator(load(x + i, lanes, lowest));
          store(y + i, e, lanes);
          for (int64_t l = 0; l < lanes; ++l) rest += e[l];
        });
    const A inverse = A(1) / (sum_lanes<A>(sums) + rest);
    map_row(y, y, cols, [&](Vec<A> e) { return e * inverse; });
  } else {  // rounding once: the exponentials are computed again
    const A inverse = A(1) / row_sum(x, cols, lowest, numerator);
    map_row(x, y, cols, [&](Vec<A> v) { return numerator(v) * inverse; });
  }
}

}  // namespace

void softmax_forward(const Array& x, const Array& y, int64_t rows, int64_t cols) {
  dispatch_float(x.dtype(), "softmax", [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* from = x.data<T>();
    T* to = y.data<T>();
    for_rows(rows, cols, [&](int64_t r) { softmax_row(from + r * cols, to + r * cols, cols); });
  });
}

void softmax_backward(const Array& y, const Array& dy, const Array& dx, int64_t rows,
                      int64_t cols) {
  dispatch_float(y.dtype(), "softmax", [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = accum_t<T>;
    const T *ys = y.data<T>(), *dys = dy.data<T>();
    T* dxs = dx.data<T>();
    for_rows(rows, cols, [&](int64_t r) {
      const A total = dot(ys + r * cols, dys + r * cols, cols);
      map_row(ys + r * cols, dys + r * cols, dxs + r * cols, cols,
              [&](Vec<A> p, Vec<A> g) { return p * (g - total); });
    });
  });
}

void log_softmax_forward(const Array& x, const Array& y, int64_t rows, int64_t cols) {
  dispatch_float(x.dtype(), "log_softmax", [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = accum_t<T>;
    const T* from = x.data<T>();
    T* to = y.data<T>();
    for_rows(rows, cols, [&](int64_t r) {
      const auto lse = row_logsumexp(from + r * cols, cols);
      map_row(from + r * cols, to + r * cols, cols,
              [&](Vec<A> v) { return v - lse.shift - lse.log_sum; });
    });
  });
}

void log_softmax_backward(const Array& y, const Array& dy, const Array& dx, int64_t rows,
                          int64_t cols) {
  dispatch_float(y.dtype(), "log_softmax", [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = accum_t<T>;
    const T *ys = y.data<T>(), *dys = dy.data<T>();
    T* dxs = dx.data<T>();
    for_rows(rows, cols, [&](int64_t r) {
      const A total = row_sum(dys + r * cols, cols, A(0), [](Vec<A> g) { return g; });
      map_row(ys + r * cols, dys + r * cols, dxs + r * cols, cols,
              [&](Vec<A> logp, Vec<A> g) { return g - vexp<A>(logp) * total; });
    });
  });
}

void logsumexp_forward(const Array& x, const Array& lse, int64_t rows, int64_t cols) {
  dispatch_float(x.dtype(), "logsumexp", [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* from = x.data<T>();
    T* to = lse.data<T>();
    for_rows(rows, cols,
             [&](int64_t r) { to[r] = T(row_logsumexp(from + r * cols, cols).value()); });
  });
}

void logsumexp_backward(const Array& x, const Array& lse, const Array& dlse, const Array& dx,
                        int64_t rows, int64_t cols) {
  dispatch_float(x.dtype(), "logsumexp", [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = accum_t<T>;
    const T *xs = x.data<T>(), *sums = lse.data<T>(), *grads = dlse.data<T>();
    T* dxs = dx.data<T>();
    for_rows(rows, cols, [&](int64_t r) {
      const A infinity = std::numeric_limits<A>::infinity();
      const A sum = A(sums[r]), grad = A(grads[r]);
      const A shift = sum == -infinity ? infinity : sum;  // nothing to share: exp(-inf) = 0
      map_row(xs + r * cols, dxs + r * cols, cols,
              [&](Vec<A> v) { return vexp<A>(v - shift) * grad; });
    });
  });
}

}  // namespace needle::cpu
