// Layer norm over the last axis on a GPU: a warp per short row, a block per long one.
//
// normal = (x - mean) rstd, y = normal weight + bias, rstd = 1 / sqrt(variance + eps)
// g = dy weight: dx = rstd (g - mean(g) - normal mean(g normal)); dweight = sum(dy normal), dbias =
// sum(dy) over rows.
#include "../common/columns_cuda.cuh"
#include "../common/ewise_math_cuda.h"

namespace needle::NEEDLE_DEVICE {
namespace {

template <int Lanes, class T>
__global__ void layer_norm_forward_kernel(const T* x, const T* weight, const T* bias, T* y,
                                          accum_t<T>* mean, accum_t<T>* rstd, int64_t rows,
                                          int64_t cols, accum_t<T> eps) {
  using A = accum_t<T>;
  for (int64_t row = first_row<Lanes>(); row < rows; row += row_step<Lanes>()) {
    const auto element = [&, at = row * cols](int64_t c) { return A(x[at + c]); };
    A total = 0;
    for_columns<Lanes>(cols, element, [&](int64_t, A value) { total += value; });
    const A m = sum_lanes<Lanes>(total) / A(cols);
    // Of the deviations: a second pass over cached data is exact where E[x^2] - m^2 is not.
    A squares = 0;
    for_columns<Lanes>(cols, element,
                       [&](int64_t, A value) { squares += (value - m) * (value - m); });
    const A r = A(1) / m_sqrt(sum_lanes<Lanes>(squares) / A(cols) + eps);
    for_columns<Lanes>(cols, element, [&](int64_t c, A value) {
      y[row * cols + c] = T((value - m) * r * A(weight[c]) + A(bias[c]));
    });
    if (threadIdx.x % Lanes == 0) {
      mean[row] = m;
      rstd[row] = r;
    }
  }
}

template <int Lanes, class T>
__global__ void layer_norm_dx_kernel(const T* dy, const T* x, const T* weight,
                                     const accum_t<T>* mean, const accum_t<T>* rstd, T* dx,
                                     int64_t rows, int64_t cols) {
  using A = accum_t<T>;
  struct Column {
    A g, normal;
  };
  for (int64_t row = first_row<Lanes>(); row < rows; row += row_step<Lanes>()) {
    const A m = mean[row], r = rstd[row];
    const auto column = [&, at = row * cols](int64_t c) {
      return Column{A(dy[at + c]) * A(weight[c]), (A(x[at + c]) - m) * r};
    };
    TwoSums<A> sums{A(0), A(0)};  // of g and of g normal
    for_columns<Lanes>(cols, column, [&](int64_t, Column of) {
      sums.first += of.g;
      sums.second += of.g * of.normal;
    });
    sums = reduce_lanes<Lanes>(sums, AddSums{});
    const A mean_g = sums.first / A(cols), mean_gn = sums.second / A(cols);
    for_columns<Lanes>(cols, column, [&](int64_t c, Column of) {
      dx[row * cols + c] = T(r * (of.g - mean_g - of.normal * mean_gn));
    });
  }
}

// Of dy normal and of dy.
template <class T>
__global__ void layer_norm_partials_kernel(const T* dy, const T* x, const accum_t<T>* mean,
                                           const accum_t<T>* rstd, TwoSums<accum_t<T>>* partials,
                                           int64_t rows, int64_t cols) {
  using A = accum_t<T>;
  sum_columns(partials, rows, cols, [&](int64_t row, int64_t c) {
    const A g = A(dy[row * cols + c]);
    return TwoSums<A>{g * ((A(x[row * cols + c]) - mean[row]) * rstd[row]), g};
  });
}

template <class T>
__global__ void layer_norm_dparams_kernel(const TwoSums<accum_t<T>>* partials, T* dweight, T* dbias,
                                          int count, int64_t cols) {
  for (int64_t c = first_index(); c < cols; c += index_step()) {
    const TwoSums<accum_t<T>> total = column_total(partials, count, cols, c);
    dweight[c] = T(total.first);
    dbias[c] = T(total.second);
  }
}

}  // namespace

void layer_norm_forward(const Array& x, const Array& weight, const Array& bias, const Array& y,
                        const Array& mean, const Array& rstd, int64_t rows, int64_t cols,
                        double eps) {
  dispatch_float(x.dtype(), "layer_norm", [&](auto tag) {
    using T = typename decltype(tag)::type;
    dispatch_row_lanes(cols, [&](auto lanes) {
      constexpr int kLanes = decltype(lanes)::value;
      launch<layer_norm_forward_kernel<kLanes, T>>(
          rows_config(rows, kLanes), x.data<T>(), weight.data<T>(), bias.data<T>(), y.data<T>(),
          mean.data<accum_t<T>>(), rstd.data<accum_t<T>>(), rows, cols, accum_t<T>(eps));
    });
  });
}

void layer_norm_backward(const Array& dy, const Array& x, const Array& weight, const Array& mean,
                         const Array& rstd, const Array& dx, const Array& dweight,
                         const Array& dbias, const Array& workspace, int64_t rows, int64_t cols) {
  if (cols == 0) return;
  dispatch_float(x.dtype(), "layer_norm_backward", [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = accum_t<T>;
    auto* const partials = reinterpret_cast<TwoSums<A>*>(workspace.data<A>());
    if (rows > 0) {
      dispatch_row_lanes(cols, [&](auto lanes) {
        constexpr int kLanes = decltype(lanes)::value;
        launch<layer_norm_dx_kernel<kLanes, T>>(rows_config(rows, kLanes), dy.data<T>(),
                                                x.data<T>(), weight.data<T>(), mean.data<A>(),
                                                rstd.data<A>(), dx.data<T>(), rows, cols);
      });
      launch<layer_norm_partials_kernel<T>>(column_partials_config(rows, cols), dy.data<T>(),
                                            x.data<T>(), mean.data<A>(), rstd.data<A>(), partials,
                                            rows, cols);
    }
    launch<layer_norm_dparams_kernel<T>>(
        grid_stride(cols), static_cast<const TwoSums<A>*>(partials), dweight.data<T>(),
        dbias.data<T>(), column_partials(rows), cols);
  });
}

}  // namespace needle::NEEDLE_DEVICE
