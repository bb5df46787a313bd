// Softmax, log-softmax and log-sum-exp over rows on a GPU: a warp per short row, a block per long
// one.
//
// softmax: y = exp(x - max) / sum             dx = y (dy - sum(y dy))
// log_softmax: y = x - max - log(sum)         dx = dy - exp(y) sum(dy)
// logsumexp: lse = max + log(sum)             dx = exp(x - lse) dlse, 0 where lse is -inf
#include "online_softmax_cuda.cuh"

namespace needle::NEEDLE_DEVICE {
namespace {

template <int Lanes, class T>
__global__ void softmax_forward_kernel(const T* x, T* y, int64_t rows, int64_t cols) {
  using A = accum_t<T>;
  for (int64_t row = first_row<Lanes>(); row < rows; row += row_step<Lanes>()) {
    const int64_t at = row * cols;
    const auto seen = softmax_of_row<Lanes>(x + at, cols);
    const A sum = seen.sum + (seen.max - seen.max);  // NaN where the largest is infinite
    for_columns<Lanes>(
        cols, [&](int64_t c) { return x[at + c]; },
        [&](int64_t c, A value) { y[at + c] = T(m_exp(value - seen.max) / sum); });
  }
}

// What a backward pass reads of a column.
template <class A>
struct Pair {
  A y, dy;
};
template <class T>
__device__ Pair<accum_t<T>> pair_at(const T* y, const T* dy, int64_t i) {
  return {accum_t<T>(y[i]), accum_t<T>(dy[i])};
}

template <int Lanes, class T>
__global__ void softmax_backward_kernel(const T* y, const T* dy, T* dx, int64_t rows,
                                        int64_t cols) {
  using A = accum_t<T>;
  for (int64_t row = first_row<Lanes>(); row < rows; row += row_step<Lanes>()) {
    const auto pair = [&, at = row * cols](int64_t c) { return pair_at(y, dy, at + c); };
    A dot = 0;
    for_columns<Lanes>(cols, pair, [&](int64_t, Pair<A> p) { dot += p.y * p.dy; });
    dot = sum_lanes<Lanes>(dot);
    for_columns<Lanes>(cols, pair,
                       [&](int64_t c, Pair<A> p) { dx[row * cols + c] = T(p.y * (p.dy - dot)); });
  }
}

template <int Lanes, class T>
__global__ void log_softmax_forward_kernel(const T* x, T* y, int64_t rows, int64_t cols) {
  using A = accum_t<T>;
  for (int64_t row = first_row<Lanes>(); row < rows; row += row_step<Lanes>()) {
    const int64_t at = row * cols;
    const auto seen = softmax_of_row<Lanes>(x + at, cols);
    const A log_sum = m_log(seen.sum);
    for_columns<Lanes>(
        cols, [&](int64_t c) { return x[at + c]; },
        [&](int64_t c, A value) { y[at + c] = T(value - seen.max - log_sum); });
  }
}

template <int Lanes, class T>
__global__ void log_softmax_backward_kernel(const T* y, const T* dy, T* dx, int64_t rows,
                                            int64_t cols) {
  using A = accum_t<T>;
  for (int64_t row = first_row<Lanes>(); row < rows; row += row_step<Lanes>()) {
    const auto pair = [&, at = row * cols](int64_t c) { return pair_at(y, dy, at + c); };
    A total = 0;
    for_columns<Lanes>(cols, pair, [&](int64_t, Pair<A> p) { total += p.dy; });
    total = sum_lanes<Lanes>(total);
    for_columns<Lanes>(cols, pair, [&](int64_t c, Pair<A> p) {
      dx[row * cols + c] = T(p.dy - m_exp(p.y) * total);
    });
  }
}

template <int Lanes, class T>
__global__ void logsumexp_forward_kernel(const T* x, T* lse, int64_t rows, int64_t cols) {
  for (int64_t row = first_row<Lanes>(); row < rows; row += row_step<Lanes>()) {
    const auto seen = softmax_of_row<Lanes>(x + row * cols, cols);
    if (threadIdx.x % Lanes == 0) lse[row] = T(seen.lse());
  }
}

template <int Lanes, class T>
__global__ void logsumexp_backward_kernel(const T* x, const T* lse, const T* dlse, T* dx,
                                          int64_t rows, int64_t cols) {
  using A = accum_t<T>;
  for (int64_t row = first_row<Lanes>(); row < rows; row += row_step<Lanes>()) {
    const int64_t at = row * cols;
    const A total = A(lse[row]), d = A(dlse[row]);
    for_columns<Lanes>(
        cols, [&](int64_t c) { return x[at + c]; },
        [&](int64_t c, T value) {
          dx[at + c] = T((total == A(-INFINITY) ? A(0) : m_exp(A(value) - total)) * d);
        });
  }
}

}  // namespace

// `kernel` is a template over <Lanes, T>, of the arrays `first` and those that follow.
#define NEEDLE_LAUNCH_ROWS(op, kernel, first, ...)                                     \
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
  NEEDLE_LAUNCH_ROWS("logsumexp", logsumexp_forward_kernel, x, lse.data<T>());
}

void logsumexp_backward(const Array& x, const Array& lse, const Array& dlse, const Array& dx,
                        int64_t rows, int64_t cols) {
  NEEDLE_LAUNCH_ROWS("logsumexp_backward", logsumexp_backward_kernel, x, lse.data<T>(),
                     dlse.data<T>(), dx.data<T>());
}

}  // namespace needle::NEEDLE_DEVICE
