// One position of an LSTM, behind its products: gates (rows, 4 hidden) in the order i, f, g, o,
// c = f c_before + i g, h = o tanh(c).
#include "../common/backend.h"
#include "../common/ewise_math_cpu.h"
#include "../common/parallel.h"

namespace needle::cpu {
namespace {

int64_t rows_per_task(int64_t hidden) { return 1 + 2048 / (hidden + 1); }

}  // namespace

void lstm_cell_forward(const Array& gates, const Array& c_before, const Array& c, const Array& h,
                       int64_t rows, int64_t hidden) {
  dispatch_float(gates.dtype(), "lstm_cell", [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = accum_t<T>;
    parallel_ranges(rows, rows_per_task(hidden), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        T* const i = gates.data<T>() + row * 4 * hidden;
        T *const f = i + hidden, *const g = f + hidden, *const o = g + hidden;
        const A* const before = c_before.data<A>() + row * hidden;
        A* const state = c.data<A>() + row * hidden;
        T* const out = h.data<T>() + row * hidden;
        for_vectors<A>(hidden, [&](int64_t k, auto... n) {
          const Vec<A> in = m_sigmoid(load(i + k, n...)), forget = m_sigmoid(load(f + k, n...));
          const Vec<A> update = m_tanh(load(g + k, n...)), show = m_sigmoid(load(o + k, n...));
          const Vec<A> now = forget * load(before + k, n...) + in * update;
          store(i + k, in, n...), store(f + k, forget, n...);
          store(g + k, update, n...), store(o + k, show, n...);
          store(state + k, now, n...);
          store(out + k, show * m_tanh(now), n...);
        });
      }
    });
  });
}

void lstm_cell_backward(const Array& gates, const Array& c_before, const Array& c, const Array& dh,
                        const Array& dh_next, const Array& dc, int64_t rows, int64_t hidden) {
  dispatch_float(gates.dtype(), "lstm_cell_backward", [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = accum_t<T>;
    parallel_ranges(rows, rows_per_task(hidden), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        T* const i = gates.data<T>() + row * 4 * hidden;
        T *const f = i + hidden, *const g = f + hidden, *const o = g + hidden;
        const A *const before = c_before.data<A>() + row * hidden, *const state =
                                                                       c.data<A>() + row * hidden;
        const T *const here = dh.data<T>() + row * hidden, *const next =
                                                               dh_next.data<T>() + row * hidden;
        A* const carried = dc.data<A>() + row * hidden;
        for_vectors<A>(hidden, [&](int64_t k, auto... n) {
          const Vec<A> in = load(i + k, n...), forget = load(f + k, n...);
          const Vec<A> update = load(g + k, n...), show = load(o + k, n...);
          const Vec<A> shown = m_tanh(load(state + k, n...));
          const Vec<A> dy = load(here + k, n...) + load(next + k, n...);
          const Vec<A> d = load(carried + k, n...) + dy * show * (A(1) - shown * shown);
          store(i + k, d * update * in * (A(1) - in), n...);
          store(f + k, d * load(before + k, n...) * forget * (A(1) - forget), n...);
          store(g + k, d * in * (A(1) - update * update), n...);
          store(o + k, dy * shown * show * (A(1) - show), n...);
          store(carried + k, d * forget, n...);
        });
      }
    });
  });
}

}  // namespace needle::cpu
