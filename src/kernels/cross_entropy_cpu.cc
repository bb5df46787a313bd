// Cross entropy of rows of logits against class numbers.
//   lse = max + log sum exp(logits - max), in two parts, loss = lse - logits[target]
//   dlogits = (exp(logits - lse) - one_hot(target)) dloss, in place if asked
// A row whose target is ignore_index has loss 0 and gradient 0. Two reads of the logits forward,
// one backward.
#include "../common/backend.h"
#include "../common/ids.h"
#include "../common/rows_cpu.h"

namespace needle::cpu {
namespace {

// The target of a row, -1 for one that is to be ignored.
template <class I>
int64_t class_at(const I* target, int64_t r, int64_t cols, int64_t ignore_index) {
  const int64_t t = id_at(target, r, cols);
  return t == ignore_index ? -1 : t;
}

}  // namespace

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
        const int64_t t = class_at(target, r, cols, ignore_index);
        losses[r] = t < 0 ? A(0) : sum.shift - A(x[r * cols + t]) + sum.log_sum;
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
        const int64_t t = class_at(target, r, cols, ignore_index);
        if (t < 0) {
          std::fill_n(drow, cols, T(0.f));
          return;
        }
        const A shift = parts[2 * r], log_sum = parts[2 * r + 1], grad = grads[r];
        const A at_target = A(row[t]);  // before it is overwritten
        map_row(row, drow, cols, [&](Vec<A> v) { return vexp<A>(v - shift - log_sum) * grad; });
        drow[t] = T((vexp<A>(broadcast(at_target - shift - log_sum))[0] - A(1)) * grad);
      });
    });
  });
}

}  // namespace needle::cpu
