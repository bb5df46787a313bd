// Layer norm over the last axis of (rows, cols), biased variance.
//   xhat = (x - mean) rstd, rstd = 1 / sqrt(mean((x - mean)^2) + eps), y = xhat weight + bias
//   g = dy weight, dx = rstd (g - mean(g) - xhat mean(g xhat)), dweight = sum_rows dy xhat, dbias =
//   sum_rows dy
#include "../common/backend.h"
#include "../common/column_sums_cpu.h"
#include "../common/rows_cpu.h"

namespace needle::cpu {

void layer_norm_forward(const Array& x, const Array& weight, const Array& bias, const Array& y,
                        const Array& mean, const Array& rstd, int64_t rows, int64_t cols,
                        double eps) {
  dispatch_float(x.dtype(), "layer_norm", [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = accum_t<T>;
    const T *xs = x.data<T>(), *w = weight.data<T>(), *b = bias.data<T>();
    T* ys = y.data<T>();
    A *means = mean.data<A>(), *rstds = rstd.data<A>();
    for_rows(rows, cols, [&](int64_t r) {
      const T* row = xs + r * cols;
      T* out = ys + r * cols;
      const A m = row_sum(row, cols, A(0), [](Vec<A> v) { return v; }) / A(cols);
      const A squares = row_sum(row, cols, m, [&](Vec<A> v) { return (v - m) * (v - m); });
      const A s = A(1) / std::sqrt(squares / A(cols) + A(eps));
      means[r] = m;
      rstds[r] = s;
      for_vectors<A>(cols, [&](int64_t i, auto... n) {
        const Vec<A> xhat = (load(row + i, n...) - m) * s;
        store(out + i, xhat * load(w + i, n...) + load(b + i, n...), n...);
      });
    });
  });
}

namespace {

// One row of dx; adds the row to dw = sum dy xhat and db = sum dy.
template <class T, class A = accum_t<T>>
void backward_row(const T* dy, const T* x, const T* w, A mean, A rstd, T* dx, A* dw, A* db,
                  int64_t cols) {
  Vec<A> sum{}, dot{};
  const auto add = [&](Vec<A> row, int64_t i, auto... n) {
    const Vec<A> g = load(dy + i, n...), xhat = (row - mean) * rstd, gw = g * load(w + i, n...);
    store(dw + i, load(dw + i, n...) + g * xhat, n...);
    store(db + i, load(db + i, n...) + g, n...);
    sum += gw;
    dot += gw * xhat;
  };
  for_vectors<A>(
      cols, [&](int64_t i) { add(load(x + i), i); },
      [&](int64_t i, int64_t n) { add(load(x + i, n, mean), i, n); });
  const A mean_g = sum_lanes<A>(sum) / A(cols), mean_gx = sum_lanes<A>(dot) / A(cols);
  for_vectors<A>(cols, [&](int64_t i, auto... n) {
    const Vec<A> gw = load(dy + i, n...) * load(w + i, n...);
    store(dx + i, (gw - mean_g - (load(x + i, n...) - mean) * rstd * mean_gx) * rstd, n...);
  });
}

}  // namespace

void layer_norm_backward(const Array& dy, const Array& x, const Array& weight, const Array& mean,
                         const Array& rstd, const Array& dx, const Array& dweight,
                         const Array& dbias, const Array& workspace, int64_t rows, int64_t cols) {
  dispatch_float(x.dtype(), "layer_norm", [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = accum_t<T>;
    const T *dys = dy.data<T>(), *xs = x.data<T>(), *w = weight.data<T>();
    const A *means = mean.data<A>(), *rstds = rstd.data<A>();
    T *dxs = dx.data<T>(), *dw = dweight.data<T>(), *db = dbias.data<T>();
    A* partials = workspace.data<A>();
    column_sums(rows, 2 * cols, partials, [&](int64_t begin, int64_t end, A* sums) {
      for (int64_t r = begin; r < end; ++r)
        backward_row(dys + r * cols, xs + r * cols, w, means[r], rstds[r], dxs + r * cols, sums,
                     sums + cols, cols);
    });
    convert_run(partials, cols, dw);
    convert_run(partials + cols, cols, db);
  });
}

}  // namespace needle::cpu
