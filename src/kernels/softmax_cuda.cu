// Softmax, log-softmax and log-sum-exp over rows on a GPU: a warp per short row, a block per long
// one.
//
// softmax: y = exp(x - max) / sum             dx = y (dy - sum(y dy))
// log_softmax: y = x - lse                    dx = dy - exp(y) sum(dy)
// logsumexp: lse = max + log(sum)             dx = exp(x - lse) dlse, 0 where lse is -inf
#include "online_softmax_cuda.cuh"

namespace needle::NEEDLE_DEVICE {
namespace {

template <int Lanes, class T>
__global__ void softmax_forward_kernel(const T* x, T* y, int64_t rows, int64_t cols) {
  using A = accum_t<T>;
  for (int64_t row = first_row<Lanes>(); row < rows; row += row_step<Lanes>()) {
    const auto seen = softmax_of_row<Lanes>(x + row * cols, cols);
    const A sum = seen.sum + (seen.max - seen.max);  // NaN where the largest is infinite
    for (int64_t c = threadIdx.x % Lanes; c < cols; c += Lanes)
      y[row * cols + c] = T(m_exp(A(x[row * cols + c]) - seen.max) / sum);
  }
}

template <int Lanes, class T>
__global__ void softmax_backward_kernel(const T* y, const T* dy, T* dx, int64_t rows,
                                        int64_t cols) {
  using A = accum_t<T>;
  for (int64_t row = first_row<Lanes>(); row < rows; row += row_step<Lanes>()) {
    A dot = 0;
    for (int64_t c = threadIdx.x % Lanes; c < cols; c += Lanes)
      dot += A(y[row * cols + c]) * A(dy[row * cols + c]);
    dot = sum_lanes<Lanes>(dot);
    for (int64_t c = threadIdx.x % Lanes; c < cols; c += Lanes)
      dx[row * cols + c] = T(A(y[row * cols + c]) * (A(dy[row * cols + c]) - dot));
  }
}

template <int Lanes, class T>
__global__ void log_softmax_forward_kernel(const T* x, T* y, int64_t rows, int64_t cols) {
  using A = accum_t<T>;
  for (int64_t row = first_row<Lanes>(); row < rows; row += row_step<Lanes>()) {
    const A lse = softmax_of_row<Lanes>(x + row * cols, cols).lse();
    for (int64_t c = threadIdx.x % Lanes; c < cols; c += Lanes)
      y[row * cols + c] = T(A(x[row * cols + c]) - lse);
  }
}

template <int Lanes, class T>
__global__ void log_softmax_backward_kernel(const T* y, const T* dy, T* dx, int64_t rows,
                                            int64_t cols) {
  using A = accum_t<T>;
  for (int64_t row = first_row<Lanes>(); row < rows; row += row_step<Lanes>()) {
    A total = 0;
    for (int64_t c = threadIdx.x % Lanes; c < cols; c += Lanes) total += A(dy[row * cols + c]);
    total = sum_lanes<Lanes>(total);
    for (int64_t c = threadIdx.x % Lanes; c < cols; c += Lanes)
      dx[row * cols + c] = T(A(dy[row * cols + c]) - m_exp(A(y[row * cols + c])) * total);
  }
}

template <int Lanes, class T>
__global__ void logsumexp_forward_kernel(const T* x, T* lse, int64_t rows, int64_t cols) {
  for (int64_t row = first_row<Lanes>(); row < rows; row += row_step<Lanes>()) {
    const auto seen = softmax_of_row<Lanes>(x + row * cols, cols);
    if (threadIdx.x % Lanes == 0) lse[row] = T(seen.lse());
  }
}

template <class T>
__global__ void logsumexp_backward_kernel(const T* x, const T* lse, const T* dlse, T* dx, int64_t n,
                                          int64_t cols) {
  using A = accum_t<T>;
  for (int64_t i = first_index(); i < n; i += index_step()) {
    const A total = A(lse[i / cols]);
    dx[i] = T((total == A(-INFINITY) ? A(0) : m_exp(A(x[i]) - total)) * A(dlse[i / cols]));
  }
}

}  // namespace

// F is a forward or backward kernel template over <Lanes, T>; the arguments are its arrays.
#define NEEDLE_LAUNCH_ROWS(op, kernel, first, ...)                                     \
  if (rows * cols == 0) return;                                                        \
  dispatch_float((first).dtype(), op, [&](auto tag) {                                  \
    using T = typename decltype(tag)::type;                                            \
    dispatch_row_lanes(cols, [&](auto lanes) {                                         \
      constexpr int kLanes = decltype(lanes)::value;                                   \
      launch<kernel<kLanes, T>>(rows_config(rows, kLanes), (first).template data<T>(), \
                                __VA_ARGS__, rows, cols);                              \
    });                                                                                \
  })

void softmax_forward(const Array& x, const Array& y, int64_t rows, int64_t cols) {
  NEEDLE_LAUNCH_ROWS("softmax", softmax_forward_kernel, x, y.data<T>());
}

void softmax_backward(const Array& y, const Array& dy, const Array& dx, int64_t rows,
                      int64_t cols) {
  NEEDLE_LAUNCH_ROWS("softmax_backward", softmax_backward_kernel, y, dy.data<T>(), dx.data<T>());
}

void log_softmax_forward(const Array& x, const Array& y, int64_t rows, int64_t cols) {
  NEEDLE_LAUNCH_ROWS("log_softmax", log_softmax_forward_kernel, x, y.data<T>());
}

void log_softmax_backward(const Array& y, const Array& dy, const Array& dx, int64_t rows,
                          int64_t cols) {
  NEEDLE_LAUNCH_ROWS("log_softmax_backward", log_softmax_backward_kernel, y, dy.data<T>(),
                     dx.data<T>());
}

void logsumexp_forward(const Array& x, const Array& lse, int64_t rows, int64_t cols) {
  if (cols == 0) return fill(lse, Scalar{-INFINITY, 0});
  NEEDLE_LAUNCH_ROWS("logsumexp", logsumexp_forward_kernel, x, lse.data<T>());
}

void logsumexp_backward(const Array& x, const Array& lse, const Array& dlse, const Array& dx,
                        int64_t rows, int64_t cols) {
  if (rows * cols == 0) return;
  dispatch_float(x.dtype(), "logsumexp_backward", [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch<logsumexp_backward_kernel<T>>(grid_stride(rows * cols), x.data<T>(), lse.data<T>(),
                                         dlse.data<T>(), dx.data<T>(), rows * cols, cols);
  });
}

}  // namespace needle::NEEDLE_DEVICE
