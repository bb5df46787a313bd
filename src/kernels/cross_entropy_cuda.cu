// Cross entropy over rows of logits on a GPU: a warp per short row, a block per long one.
//
// lse = max + log(sum), in two parts, loss = lse - logits[target]; dlogits = (exp(logits - lse) -
// one_hot(target)) dloss. Rows whose target is ignore_index have loss 0 and gradient 0. A target
// out of range sets the error flag; its loss is NaN.
#include "online_softmax_cuda.cuh"

namespace needle::NEEDLE_DEVICE {
namespace {

template <int Lanes, class T, class Id>
__global__ void cross_entropy_forward_kernel(const T* logits, const Id* targets, accum_t<T>* loss,
                                             accum_t<T>* lse, int64_t rows, int64_t cols,
                                             int64_t ignore_index, ErrorFlag* flag) {
  using A = accum_t<T>;
  for (int64_t row = first_row<Lanes>(); row < rows; row += row_step<Lanes>()) {
    const auto seen = softmax_of_row<Lanes>(logits + row * cols, cols);
    if (threadIdx.x % Lanes != 0) continue;
    const int64_t target = targets[row];
    const bool inside = target >= 0 && target < cols;
    const A log_sum = m_log(seen.sum);
    lse[2 * row] = seen.max;
    lse[2 * row + 1] = log_sum;
    if (target == ignore_index) {
      loss[row] = A(0);
    } else if (inside) {
      loss[row] = seen.max - A(logits[row * cols + target]) + log_sum;
    } else {
      report_bad_id(flag, BadId::cross_entropy, target, row, cols);
      loss[row] = A(NAN);
    }
  }
}

// In place is right: a thread reads and writes its own elements alone.
template <class T, class Id>
__global__ void cross_entropy_backward_kernel(const T* logits, const Id* targets,
                                              const accum_t<T>* lse, const accum_t<T>* dloss,
                                              T* dlogits, int64_t rows, int64_t cols,
                                              int64_t ignore_index) {
  using A = accum_t<T>;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const int64_t target = targets[row];
    const A shift = lse[2 * row], log_sum = lse[2 * row + 1], scale = dloss[row];
    for_columns<kBlock>(
        cols, [&](int64_t c) { return logits[row * cols + c]; },
        [&](int64_t c, A logit) {
          const A p = m_exp(logit - shift - log_sum);
          dlogits[row * cols + c] = T(target == ignore_index ? A(0) : (p - A(c == target)) * scale);
        });
  }
}

}  // namespace

void cross_entropy_forward(const Array& logits, const Array& targets, const Array& loss,
                           const Array& lse, int64_t rows, int64_t cols, int64_t ignore_index) {
  dispatch_float(logits.dtype(), "cross_entropy", [&](auto tag) {
    using T = typename decltype(tag)::type;
    dispatch_ids(targets, "cross_entropy", [&](auto id_tag) {
      using Id = typename decltype(id_tag)::type;
      dispatch_row_lanes(cols, [&](auto lanes) {
        constexpr int kLanes = decltype(lanes)::value;
        launch<cross_entropy_forward_kernel<kLanes, T, Id>>(
            rows_config(rows, kLanes), logits.data<T>(), targets.data<Id>(),
            loss.data<accum_t<T>>(), lse.data<accum_t<T>>(), rows, cols, ignore_index,
            error_flag());
      });
    });
  });
}

void cross_entropy_backward(const Array& logits, const Array& targets, const Array& lse,
                            const Array& dloss, const Array& dlogits, int64_t rows, int64_t cols,
                            int64_t ignore_index) {
  dispatch_float(logits.dtype(), "cross_entropy_backward", [&](auto tag) {
    using T = typename decltype(tag)::type;
    dispatch_ids(targets, "cross_entropy_backward", [&](auto id_tag) {
      using Id = typename decltype(id_tag)::type;
      launch<cross_entropy_backward_kernel<T, Id>>(
          grid_of(blocks_for(rows)), logits.data<T>(), targets.data<Id>(), lse.data<accum_t<T>>(),
          dloss.data<accum_t<T>>(), dlogits.data<T>(), rows, cols, ignore_index);
    });
  });
}

}  // namespace needle::NEEDLE_DEVICE
