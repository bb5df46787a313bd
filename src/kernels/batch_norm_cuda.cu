// Batch norm over the rows of (rows, cols) on a GPU, biased variance.
//
// r = 1 / sqrt(var + eps), y = (x - mean) weight r + bias
// dbias = sum dy, dweight = r sum dy (x - mean),
// dx = weight r (dy - dbias / rows - (x - mean) r dweight / rows)
// The deviations from the mean add up to the error that it has by rounding, which is taken out of
// both statistics. source: Chan, Golub & LeVeque 1983.
#include "../common/columns_cuda.cuh"
#include "../common/ewise_math_cuda.h"

namespace needle::NEEDLE_DEVICE {
namespace {

template <class T>
__global__ void batch_norm_sums_kernel(const T* x, Sum<accum_t<T>>* partials, int64_t rows,
                                       int64_t cols) {
  using A = accum_t<T>;
  sum_columns(partials, rows, cols,
              [&](int64_t row, int64_t c) { return Sum<A>{A(x[row * cols + c])}; });
}

template <class A>
__global__ void batch_norm_means_kernel(const Sum<A>* partials, A* mean, int count, int64_t rows,
                                        int64_t cols) {
  for (int64_t c = first_index(); c < cols; c += index_step())
    mean[c] = column_total(partials, count, cols, c).value / A(rows);
}

// Of the deviations and of their squares.
template <class T>
__global__ void batch_norm_deviations_kernel(const T* x, const accum_t<T>* mean,
                                             TwoSums<accum_t<T>>* partials, int64_t rows,
                                             int64_t cols) {
  using A = accum_t<T>;
  sum_columns(partials, rows, cols, [&](int64_t row, int64_t c) {
    const A deviation = A(x[row * cols + c]) - mean[c];
    return TwoSums<A>{deviation, deviation * deviation};
  });
}

template <class A>
__global__ void batch_norm_statistics_kernel(const TwoSums<A>* partials, A* mean, A* var, int count,
                                             int64_t rows, int64_t cols) {
  for (int64_t c = first_index(); c < cols; c += index_step()) {
    const TwoSums<A> total = column_total(partials, count, cols, c);
    const A error = total.first / A(rows), v = total.second / A(rows) - error * error;
    mean[c] += error;
    var[c] = v < A(0) ? A(0) : v;
  }
}

template <class T>
__global__ void batch_norm_forward_kernel(const T* x, const T* weight, const T* bias,
                                          const accum_t<T>* mean, const accum_t<T>* var, T* y,
                                          int64_t rows, int64_t cols, accum_t<T> eps) {
  using A = accum_t<T>;
  const int64_t c = column_of_thread();
  if (c >= cols) return;
  const A m = mean[c], scale = A(weight[c]) / m_sqrt(var[c] + eps), b = A(bias[c]);
  for (int64_t row = first_line_row(); row < rows; row += line_row_step())
    y[row * cols + c] = T((A(x[row * cols + c]) - m) * scale + b);
}

// Of dy and of dy (x - mean).
template <class T>
__global__ void batch_norm_partials_kernel(const T* dy, const T* x, const accum_t<T>* mean,
                                           TwoSums<accum_t<T>>* partials, int64_t rows,
                                           int64_t cols) {
  using A = accum_t<T>;
  sum_columns(partials, rows, cols, [&](int64_t row, int64_t c) {
    const A g = A(dy[row * cols + c]);
    return TwoSums<A>{g, g * (A(x[row * cols + c]) - mean[c])};
  });
}

// The totals take the place of the first partial sums.
template <class T>
__global__ void batch_norm_dparams_kernel(TwoSums<accum_t<T>>* partials, const accum_t<T>* var,
                                          T* dweight, T* dbias, int count, int64_t cols,
                                          accum_t<T> eps) {
  using A = accum_t<T>;
  for (int64_t c = first_index(); c < cols; c += index_step()) {
    const TwoSums<A> total = column_total(partials, count, cols, c);
    dweight[c] = T(total.second / m_sqrt(var[c] + eps));
    dbias[c] = T(total.first);
    partials[c] = total;
  }
}

template <class T>
__global__ void batch_norm_dx_kernel(const T* dy, const T* x, const T* weight,
                                     const accum_t<T>* mean, const accum_t<T>* var,
                                     const TwoSums<accum_t<T>>* totals, T* dx, int64_t rows,
                                     int64_t cols, accum_t<T> eps) {
  using A = accum_t<T>;
  const int64_t c = column_of_thread();
  if (c >= cols) return;
  const A m = mean[c], r = A(1) / m_sqrt(var[c] + eps), scale = A(weight[c]) * r;
  const A shift = totals[c].first / A(rows), slope = r * r * totals[c].second / A(rows);
  for (int64_t row = first_line_row(); row < rows; row += line_row_step()) {
    const int64_t at = row * cols + c;
    dx[at] = T(scale * (A(dy[at]) - shift - (A(x[at]) - m) * slope));
  }
}

}  // namespace

void batch_norm_forward(const Array& x, const Array& weight, const Array& bias, const Array& y,
                        const Array& mean, const Array& var, const Array& workspace, int64_t rows,
                        int64_t cols, double eps) {
  if (rows * cols == 0) return;
  dispatch_float(x.dtype(), "batch_norm", [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = accum_t<T>;
    const LaunchConfig by_partials = column_partials_config(rows, cols);
    const int count = column_partials(rows);
    A *const means = mean.data<A>(), *const vars = var.data<A>();
    auto* const sums = reinterpret_cast<Sum<A>*>(workspace.data<A>());
    launch<batch_norm_sums_kernel<T>>(by_partials, x.data<T>(), sums, rows, cols);
    launch<batch_norm_means_kernel<A>>(grid_stride(cols), static_cast<const Sum<A>*>(sums), means,
                                       count, rows, cols);
    auto* const two_sums = reinterpret_cast<TwoSums<A>*>(workspace.data<A>());
    launch<batch_norm_deviations_kernel<T>>(by_partials, x.data<T>(), means, two_sums, rows, cols);
    launch<batch_norm_statistics_kernel<A>>(grid_stride(cols),
                                            static_cast<const TwoSums<A>*>(two_sums), means, vars,
                                            count, rows, cols);
    launch<batch_norm_forward_kernel<T>>(columns_config(rows, cols), x.data<T>(), weight.data<T>(),
                                         bias.data<T>(), means, vars, y.data<T>(), rows, cols,
                                         A(eps));
  });
}

void batch_norm_backward(const Array& dy, const Array& x, const Array& weight, const Array& mean,
                         const Array& var, const Array& dx, const Array& dweight,
                         const Array& dbias, const Array& workspace, int64_t rows, int64_t cols,
                         double eps) {
  if (rows * cols == 0) return;
  dispatch_float(x.dtype(), "batch_norm_backward", [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = accum_t<T>;
    auto* const partials = reinterpret_cast<TwoSums<A>*>(workspace.data<A>());
    launch<batch_norm_partials_kernel<T>>(column_partials_config(rows, cols), dy.data<T>(),
                                          x.data<T>(), mean.data<A>(), partials, rows, cols);
    launch<batch_norm_dparams_kernel<T>>(grid_stride(cols), partials, var.data<A>(),
                                         dweight.data<T>(), dbias.data<T>(), column_partials(rows),
                                         cols, A(eps));
    launch<batch_norm_dx_kernel<T>>(
        columns_config(rows, cols), dy.data<T>(), x.data<T>(), weight.data<T>(), mean.data<A>(),
        var.data<A>(), static_cast<const TwoSums<A>*>(partials), dx.data<T>(), rows, cols, A(eps));
  });
}

}  // namespace needle::NEEDLE_DEVICE
