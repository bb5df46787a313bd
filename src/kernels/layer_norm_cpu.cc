// Layer norm over the last axis of (rows, cols), biased variance.
//   xhat = (x - mean) rstd, rstd = 1 / sqrt(mean((x - mean)^2) + eps), y = xhat weight + bias
//   g = dy weight, dx = rstd (g - mean(g) - xhat mean(g xhat)), dweight = sum_rows dy xhat, dbias =
//   sum_rows dy
// The sums over rows go through kLayerNormPartials groups of rows, fixed by the number of rows
// alone, and are added up in order: the same bits for any number of threads.
#include <algorithm>

#include "../common/backend.h"
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
      for_vectors<A>(
          cols,
          [&](int64_t i) { store(out + i, (load(row + i) - m) * s * load(w + i) + load(b + i)); },
          [&](int64_t i, int64_t n) {
            const Vec<A> xhat = (load(row + i, n, A(0)) - m) * s;
            store(out + i, xhat * load(w + i, n, A(0)) + load(b + i, n, A(0)), n);
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
  for_vectors<A>(
      cols,
      [&](int64_t i) {
        const Vec<A> g = load(dy + i), xhat = (load(x + i) - mean) * rstd, gw = g * load(w + i);
        store(dw + i, load(dw + i) + g * xhat);
        store(db + i, load(db + i) + g);
        sum += gw;
        dot += gw * xhat;
      },
      [&](int64_t i, int64_t n) {
        const Vec<A> g = load(dy + i, n, A(0)), xhat = (load(x + i, n, mean) - mean) * rstd;
        const Vec<A> gw = g * load(w + i, n, A(0));
        store(dw + i, load(dw + i, n, A(0)) + g * xhat, n);
        store(db + i, load(db + i, n, A(0)) + g, n);
        sum += gw;
        dot += gw * xhat;
      });
  const A mean_g = sum_lanes<A>(sum) / A(cols), mean_gx = sum_lanes<A>(dot) / A(cols);
  const auto result = [&](Vec<A> g, Vec<A> v, Vec<A> weight) {
    return (g * weight - mean_g - (v - mean) * rstd * mean_gx) * rstd;
  };
  for_vectors<A>(
      cols, [&](int64_t i) { store(dx + i, result(load(dy + i), load(x + i), load(w + i))); },
      [&](int64_t i, int64_t n) {
        store(dx + i, result(load(dy + i, n, A(0)), load(x + i, n, A(0)), load(w + i, n, A(0))), n);
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
    // Of 8 rows at least: a group's sums are as much to clear and to add up as a row is.
    const int64_t groups = std::min<int64_t>(ceil_div(rows, 8), kLayerNormPartials);
    parallel_for(groups, [&](int64_t group) {
      A *group_dw = partials + group * 2 * cols, *group_db = group_dw + cols;
      std::fill_n(group_dw, 2 * cols, A(0));
      for (int64_t r = group * rows / groups; r < (group + 1) * rows / groups; ++r)
        backward_row(dys + r * cols, xs + r * cols, w, means[r], rstds[r], dxs + r * cols, group_dw,
                     group_db, cols);
    });
    parallel_ranges(cols, 256, [&](int64_t begin, int64_t end) {
      const auto add_up = [&](int64_t c, auto... n) {
        Vec<A> sum_w{}, sum_b{};
        for (int64_t group = 0; group < groups; ++group) {
          const A* from = partials + group * 2 * cols + c;
          if constexpr (sizeof...(n) == 0)
            sum_w += load(from), sum_b += load(from + cols);
          else
            sum_w += load(from, n..., A(0)), sum_b += load(from + cols, n..., A(0));
        }
        store(dw + c, sum_w, n...);
        store(db + c, sum_b, n...);
      };
      for_vectors<A>(
          end - begin, [&](int64_t c) { add_up(begin + c); },
          [&](int64_t c, int64_t n) { add_up(begin + c, n); });
    });
  });
}

}  // namespace needle::cpu
