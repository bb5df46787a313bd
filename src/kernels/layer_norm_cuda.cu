// Layer norm over the last axis on a GPU: a warp per short row, a block per long one.
//
// normal = (x - mean) rstd, y = normal weight + bias, rstd = 1 / sqrt(variance + eps)
// g = dy weight: dx = rstd (g - mean(g) - normal mean(g normal)); dweight = sum(dy normal), dbias =
// sum(dy) over rows. The row sums go through kLayerNormPartials partial sums, each over a fixed
// range of rows.
#include "../common/cuda_util.cuh"
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

// Block (column tile, partial): the 32 columns of a tile are neighbouring threads, the 8 lines of
// threads share the rows.
constexpr int kColumns = 32, kLines = kBlock / kColumns;
template <class T>
__global__ void layer_norm_partials_kernel(const T* dy, const T* x, const accum_t<T>* mean,
                                           const accum_t<T>* rstd, accum_t<T>* workspace,
                                           int64_t rows, int64_t cols) {
  using A = accum_t<T>;
  NEEDLE_SHARED(A, weight_sums, kLines, kColumns);
  NEEDLE_SHARED(A, bias_sums, kLines, kColumns);
  const int column = int(threadIdx.x) % kColumns, line = int(threadIdx.x) / kColumns;
  const int64_t c = int64_t(blockIdx.x) * kColumns + column, partial = blockIdx.y;
  const int64_t rows_each = ceil_div(rows, kLayerNormPartials);
  const int64_t end = rows < (partial + 1) * rows_each ? rows : (partial + 1) * rows_each;
  A dweight = 0, dbias = 0;
  if (c < cols) {
    for (int64_t row = partial * rows_each + line; row < end; row += kLines) {
      const A g = A(dy[row * cols + c]);
      dweight += g * ((A(x[row * cols + c]) - mean[row]) * rstd[row]);
      dbias += g;
    }
  }
  weight_sums[line][column] = dweight;
  bias_sums[line][column] = dbias;
  __syncthreads();
  if (line == 0 && c < cols) {
    for (int i = 1; i < kLines; ++i) {
      dweight += weight_sums[i][column];
      dbias += bias_sums[i][column];
    }
    workspace[(partial * 2) * cols + c] = dweight;
    workspace[(partial * 2 + 1) * cols + c] = dbias;
  }
}

template <class T>
__global__ void layer_norm_dparams_kernel(const accum_t<T>* workspace, T* dweight, T* dbias,
                                          int partials, int64_t cols) {
  using A = accum_t<T>;
  for (int64_t i = first_index(); i < 2 * cols; i += index_step()) {
    A total = 0;  // i runs over dweight's columns, then dbias's, as each partial does
    for (int p = 0; p < partials; ++p) total += workspace[p * 2 * cols + i];
    if (i < cols) {
      dweight[i] = T(total);
    } else {
      dbias[i - cols] = T(total);
    }
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
    const int partials = int(std::min<int64_t>(rows, kLayerNormPartials));
    if (rows > 0) {
      dispatch_row_lanes(cols, [&](auto lanes) {
        constexpr int kLanes = decltype(lanes)::value;
        launch<layer_norm_dx_kernel<kLanes, T>>(rows_config(rows, kLanes), dy.data<T>(),
                                                x.data<T>(), weight.data<T>(), mean.data<A>(),
                                                rstd.data<A>(), dx.data<T>(), rows, cols);
      });
      const LaunchConfig tiles{dim3(unsigned(ceil_div(cols, kColumns)), unsigned(partials)),
                               dim3(kBlock), 0, stream()};
      launch<layer_norm_partials_kernel<T>>(tiles, dy.data<T>(), x.data<T>(), mean.data<A>(),
                                            rstd.data<A>(), workspace.data<A>(), rows, cols);
    }
    launch<layer_norm_dparams_kernel<T>>(grid_stride(2 * cols), workspace.data<A>(),
                                         dweight.data<T>(), dbias.data<T>(), partials, cols);
  });
}

}  // namespace needle::NEEDLE_DEVICE
