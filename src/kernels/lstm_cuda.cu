// One position of an LSTM on a GPU, behind its products: gates (rows, 4 hidden) in the order i, f,
// g, o, c = f c_before + i g, h = o tanh(c). A thread has one element of c and its four gates.
#include "../common/cuda_util.cuh"
#include "../common/ewise_math_cuda.h"

namespace needle::NEEDLE_DEVICE {
namespace {

template <class T>
__global__ void lstm_cell_forward_kernel(T* gates, const accum_t<T>* c_before, accum_t<T>* c, T* h,
                                         int64_t n, int64_t hidden) {
  using A = accum_t<T>;
  for (int64_t k = first_index(); k < n; k += index_step()) {
    T* const i = gates + k / hidden * 4 * hidden + k % hidden;
    T *const f = i + hidden, *const g = f + hidden, *const o = g + hidden;
    const A in = m_sigmoid(A(*i)), forget = m_sigmoid(A(*f));
    const A update = m_tanh(A(*g)), show = m_sigmoid(A(*o));
    const A now = forget * c_before[k] + in * update;
    *i = T(in), *f = T(forget), *g = T(update), *o = T(show);
    c[k] = now;
    h[k] = T(show * m_tanh(now));
  }
}

template <class T>
__global__ void lstm_cell_backward_kernel(T* gates, const accum_t<T>* c_before, const accum_t<T>* c,
                                          const T* dh, const T* dh_next, accum_t<T>* dc, int64_t n,
                                          int64_t hidden) {
  using A = accum_t<T>;
  for (int64_t k = first_index(); k < n; k += index_step()) {
    T* const i = gates + k / hidden * 4 * hidden + k % hidden;
    T *const f = i + hidden, *const g = f + hidden, *const o = g + hidden;
    const A in = A(*i), forget = A(*f), update = A(*g), show = A(*o);
    const A shown = m_tanh(c[k]), dy = A(dh[k]) + A(dh_next[k]);
    const A d = dc[k] + dy * show * (A(1) - shown * shown);
    *i = T(d * update * in * (A(1) - in));
    *f = T(d * c_before[k] * forget * (A(1) - forget));
    *g = T(d * in * (A(1) - update * update));
    *o = T(dy * shown * show * (A(1) - show));
    dc[k] = d * forget;
  }
}

}  // namespace

void lstm_cell_forward(const Array& gates, const Array& c_before, const Array& c, const Array& h,
                       int64_t rows, int64_t hidden) {
  const int64_t n = rows * hidden;
  dispatch_float(gates.dtype(), "lstm_cell", [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = accum_t<T>;
    launch<lstm_cell_forward_kernel<T>>(grid_stride(n), gates.data<T>(), c_before.data<A>(),
                                        c.data<A>(), h.data<T>(), n, hidden);
  });
}

void lstm_cell_backward(const Array& gates, const Array& c_before, const Array& c, const Array& dh,
                        const Array& dh_next, const Array& dc, int64_t rows, int64_t hidden) {
  const int64_t n = rows * hidden;
  dispatch_float(gates.dtype(), "lstm_cell_backward", [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = accum_t<T>;
    launch<lstm_cell_backward_kernel<T>>(grid_stride(n), gates.data<T>(), c_before.data<A>(),
                                         c.data<A>(), dh.data<T>(), dh_next.data<T>(), dc.data<A>(),
                                         n, hidden);
  });
}

}  // namespace needle::NEEDLE_DEVICE
