// Batch norm over the rows of (rows, cols), biased variance.
//   r = 1 / sqrt(var + eps), y = (x - mean) weight r + bias
//   dbias = sum dy, dweight = r sum dy (x - mean),
//   dx = weight r (dy - dbias / rows - (x - mean) r dweight / rows)
// The deviations from the mean add up to the error that it has by rounding, which is taken out of
// both statistics. source: Chan, Golub & LeVeque 1983.
#include <cmath>

#include "../common/backend.h"
#include "../common/column_sums_cpu.h"
#include "../common/rows_cpu.h"

namespace needle::cpu {

void batch_norm_forward(const Array& x, const Array& weight, const Array& bias, const Array& y,
                        const Array& mean, const Array& var, const Array& workspace, int64_t rows,
                        int64_t cols, double eps) {
  dispatch_float(x.dtype(), "batch_norm", [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = accum_t<T>;
    const T *xs = x.data<T>(), *w = weight.data<T>(), *b = bias.data<T>();
    T* ys = y.data<T>();
    A *means = mean.data<A>(), *vars = var.data<A>(), *sums = workspace.data<A>();
    column_sums(rows, cols, sums, [&](int64_t begin, int64_t end, A* sum) {
      for (int64_t r = begin; r < end; ++r)
        for_vectors<A>(cols, [&](int64_t c, auto... n) {
          store(sum + c, load(sum + c, n...) + load(xs + r * cols + c, n...), n...);
        });
    });
    for (int64_t c = 0; c < cols; ++c) means[c] = sums[c] / A(rows);
    column_sums(rows, 2 * cols, sums, [&](int64_t begin, int64_t end, A* sum) {
      A* const squares = sum + cols;
      for (int64_t r = begin; r < end; ++r)
        for_vectors<A>(cols, [&](int64_t c, auto... n) {
          const Vec<A> deviation = load(xs + r * cols + c, n...) - load(means + c, n...);
          store(sum + c, load(sum + c, n...) + deviation, n...);
          store(squares + c, load(squares + c, n...) + deviation * deviation, n...);
        });
    });
    for (int64_t c = 0; c < cols; ++c) {
      const A error = sums[c] / A(rows), v = sums[cols + c] / A(rows) - error * error;
      means[c] += error;
      vars[c] = v < 0 ? A(0) : v;
    }
    A* const scale = sums;
    for (int64_t c = 0; c < cols; ++c) scale[c] = A(w[c]) / std::sqrt(vars[c] + A(eps));
    for_rows(rows, cols, [&](int64_t r) {
      const T* row = xs + r * cols;
      T* out = ys + r * cols;
      for_vectors<A>(cols, [&](int64_t c, auto... n) {
        const Vec<A> deviation = load(row + c, n...) - load(means + c, n...);
        store(out + c, deviation * load(scale + c, n...) + load(b + c, n...), n...);
      });
    });
  });
}

void batch_norm_backward(const Array& dy, const Array& x, const Array& weight, const Array& mean,
                         const Array& var, const Array& dx, const Array& dweight,
                         const Array& dbias, const Array& workspace, int64_t rows, int64_t cols,
                         double eps) {
  dispatch_float(x.dtype(), "batch_norm_backward", [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = accum_t<T>;
    const T *dys = dy.data<T>(), *xs = x.data<T>(), *w = weight.data<T>();
    const A *means = mean.data<A>(), *vars = var.data<A>();
    T *dxs = dx.data<T>(), *dw = dweight.data<T>(), *db = dbias.data<T>();
    A *const shift = workspace.data<A>(), *const slope = shift + cols, *const scale = slope + cols;
    column_sums(rows, 2 * cols, shift, [&](int64_t begin, int64_t end, A* sums) {
      for (int64_t r = begin; r < end; ++r)
        for_vectors<A>(cols, [&](int64_t c, auto... n) {
          const Vec<A> g = load(dys + r * cols + c, n...);
          const Vec<A> deviation = load(xs + r * cols + c, n...) - load(means + c, n...);
          store(sums + c, load(sums + c, n...) + g, n...);
          store(sums + cols + c, load(sums + cols + c, n...) + g * deviation, n...);
        });
    });
    for (int64_t c = 0; c < cols; ++c) {
      const A r = A(1) / std::sqrt(vars[c] + A(eps)), of_weight = r * slope[c];
      dw[c] = T(of_weight);
      db[c] = T(shift[c]);
      shift[c] /= A(rows);
      slope[c] = r * of_weight / A(rows);
      scale[c] = A(w[c]) * r;
    }
    for_rows(rows, cols, [&](int64_t r) {
      const int64_t row = r * cols;
      for_vectors<A>(cols, [&](int64_t c, auto... n) {
        const Vec<A> deviation = load(xs + row + c, n...) - load(means + c, n...);
        const Vec<A> g = load(dys + row + c, n...) - load(shift + c, n...);
        store(dxs + row + c, load(scale + c, n...) * (g - deviation * load(slope + c, n...)), n...);
      });
    });
  });
}

}  // namespace needle::cpu
