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
#pragma GCC ivdep
        for (int64_t k = 0; k < hidden; ++k) {
          const A in = m_sigmoid(A(i[k])), forget = m_sigmoid(A(f[k]));
          const A update = m_tanh(A(g[k])), show = m_sigmoid(A(o[k]));
          const A now = forget * before[k] + in * update;
          i[k] = T(in), f[k] = T(forget), g[k] = T(update), o[k] = T(show);
          state[k] = now;
          out[k] = T(show * m_tanh(now));
        }
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
#pragma GCC ivdep
        for (int64_t k = 0; k < hidden; ++k) {
          const A in = A(i[k]), forget = A(f[k]), update = A(g[k]), show = A(o[k]);
          const A shown = m_tanh(state[k]), dy = A(here[k]) + A(next[k]);
          const A d = carried[k] + dy * show * (A(1) - shown * shown);
          i[k] = T(d * update * in * (A(1) - in));
          f[k] = T(d * before[k] * forget * (A(1) - forget));
          g[k] = T(d * in * (A(1) - update * update));
          o[k] = T(dy * shown * show * (A(1) - show));
          carried[k] = d * forget;
        }
      }
    });
  });
}

}  // namespace needle::cpu
