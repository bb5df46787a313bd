// Cross entropy of rows of logits against class numbers.
//   lse = max + log sum exp(logits - max), in two parts, loss = lse - logits[target]
//   dlogits = (exp(logits - lse) - one_hot(target)) dloss, in place if asked
// A row whose target is ignore_index has loss 0 and gradient 0. Two reads of the logits forward,
// one backward.
#include "../common/backend.h"
#include "../common/ids.h"
#include "../common/rows_cpu.h"

namespace needle::cpu {
void cross_entropy_forward(const Array& logits, const Array& targets, const Array& loss,
                           const Array& lse, int64_t rows, int64_t cols, int64_t ignore_index) {
  dispatch_ids(targets, "cross_entropy", [&](auto id_tag) {
    const auto* target = targets.data<typename decltype(id_tag)::type>();
    check_ids(target, rows, cols, BadId::cross_entropy, ignore_index);
    dispatch_float(logits.dtype(), "cross_entropy", [&](auto tag) {
      using T = typename decltype(tag)::type;
      using A = accum_t<T>;
      const T* x = logits.data<T>();
      A *losses = loss.data<A>(), *parts = lse.data<A>();
      for_rows(rows, cols, [&](int64_t r) {
        const auto sum = row_logsumexp(x + r * cols, cols);
        parts[2 * r] = sum.shift;
        parts[2 * r + 1] = sum.log_sum;
        losses[r] =
            target[r] == ignore_index ? A(0) : sum.shift - A(x[r * cols + target[r]]) + sum.log_sum;
      });
    });
  });
}

void cross_entropy_backward(const Array& logits, const Array& targets, const Array& lse,
                            const Array& dloss, const Array& dlogits, int64_t rows, int64_t cols,
                            int64_t ignore_index) {
  dispatch_ids(targets, "cross_entropy", [&](auto id_tag) {
    const auto* target = targets.data<typename decltype(id_tag)::type>();
    check_ids(target, rows, cols, BadId::cross_entropy, ignore_index);
    dispatch_float(logits.dtype(), "cross_entropy", [&](auto tag) {
      using T = typename decltype(tag)::type;
      using A = accum_t<T>;
      const T* x = logits.data<T>();
      const A *parts = lse.data<A>(), *grads = dloss.data<A>();
      T* dx = dlogits.data<T>();
      for_rows(rows, cols, [&](int64_t r) {
        const T* row = x + r * cols;
        T* drow = dx + r * cols;
        if (target[r] == ignore_index) {
          std::fill_n(drow, cols, T(0.f));
          return;
        }
        const A shift = parts[2 * r], log_sum = parts[2 * r + 1], grad = grads[r];
        const A at_target = A(row[target[r]]);  // before it is overwritten
        map_row(row, drow, cols, [&](Vec<A> v) { return vexp<A>(v - shift - log_sum) * grad; });
        drow[target[r]] = T((vexp<A>(broadcast(at_target - shift - log_sum))[0] - A(1)) * grad);
      });
    });
  });
}

}  // namespace needle::cpu
