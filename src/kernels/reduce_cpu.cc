// Reductions over the middle axis: out[o, i] = reduce over r of a[o, r, i].
//
// Rows (inner == 1) are cut into segments, each reduced in kLanes running values that g++ keeps in
// vector registers; columns are reduced in strips of kStrip neighbours, kGroup rows at a time. The
// cuts depend on the shape alone. Partial sums of segments and groups are added in float64, so that
// the error of a float32 sum does not grow with its length.
#include <algorithm>
#include <limits>

#include "../common/backend.h"
#include "../common/parallel.h"

namespace needle::cpu {
namespace {

constexpr int64_t kLanes = 64;      // running values of a row
constexpr int64_t kFewLanes = 16;   // the same of a short row
constexpr int64_t kSegment = 1024;  // elements of a row reduced before their result is combined
constexpr int64_t kStrip = 64;      // neighbouring columns reduced together
constexpr int64_t kGroup = 16;      // rows of a strip reduced before their result is combined
constexpr int64_t kWork = 1 << 15;  // elements per task
constexpr int64_t kMaxPieces = 64;  // of one row, or one strip, when there are few of them
constexpr int64_t kStored = 64;     // results of rows that are stored together

// Each operation: R is the type of running values, W that of combined ones, `take` adds an element,
// `join` a partial result.
template <class C, class RunningT, class WideT>
struct Types {
  using R = RunningT;
  using W = WideT;
};
template <class C>
using SumTypes = std::conditional_t<std::is_floating_point_v<C>, Types<C, C, double>,
                                    Types<C, int64_t, int64_t>>;
template <class C>
struct Sum : SumTypes<C> {
  using R = typename SumTypes<C>::R;
  using W = typename SumTypes<C>::W;
  static constexpr R first() { return 0; }
  static R take(R running, C x) { return running + R(x); }
  static W join(W a, W b) { return a + b; }
};
template <class C>
struct SumSquares : Sum<C> {
  using R = typename Sum<C>::R;
  static R take(R running, C x) { return running + R(x) * R(x); }
};
template <class C>
struct Product : SumTypes<C> {
  using R = typename SumTypes<C>::R;
  using W = typename SumTypes<C>::W;
  static constexpr R first() { return 1; }
  static R take(R running, C x) { return running * R(x); }
  static W join(W a, W b) { return a * b; }
};
// NaN wins: a running NaN is kept because no comparison with it is true.
template <class C, bool largest>
struct Extreme : Types<C, C, C> {
  static constexpr C first() {
    using Limits = std::numeric_limits<C>;
    if constexpr (Limits::has_infinity) return largest ? -Limits::infinity() : Limits::infinity();
    return largest ? Limits::lowest() : Limits::max();
  }
  static C take(C running, C x) {
    return ((largest ? x > running : x < running) | (x != x)) ? x : running;
  }
  static C join(C a, C b) { return take(a, b); }
};

// Puts n results into out, from element `at` on, as the type that is wanted there.
template <class W>
using Store = void (*)(const W* results, int64_t n, void* out, int64_t at);
template <class W, class Out>
void store_as(const W* results, int64_t n, void* out, int64_t at) {
  Out* to = static_cast<Out*>(out) + at;
  for (int64_t i = 0; i < n; ++i) to[i] = Out(accum_t<Out>(results[i]));
}

// --- rows ----------------------------------------------------------------------------------------

template <class Op, int64_t lanes, class W>
W join_lanes(W* wide) {
  if constexpr (lanes == 1) {
    return wide[0];
  } else {
#pragma GCC ivdep
#pragma GCC unroll 1
    for (int64_t l = 0; l < lanes / 2; ++l) wide[l] = Op::join(wide[l], wide[l + lanes / 2]);
    return join_lanes<Op, lanes / 2>(wide);
  }
}

// Lanes are joined in pairs, so that few results wait for another; those without an element hold
// Op::first(), which changes nothing.
template <class Op, class S, class C, int64_t lanes_>
typename Op::W reduce_segment(const S* x, int64_t n) {
  typename Op::R lanes[lanes_];
  for (int64_t l = 0; l < lanes_; ++l) lanes[l] = Op::first();
  int64_t i = 0;
  for (; i + lanes_ <= n; i += lanes_)
    if constexpr (lanes_ == kLanes) {
      for (int64_t l = 0; l < lanes_; ++l) lanes[l] = Op::take(lanes[l], C(x[i + l]));
    } else {  // unrolled, g++ would take them one by one
#pragma GCC unroll 1
      for (int64_t l = 0; l < lanes_; ++l) lanes[l] = Op::take(lanes[l], C(x[i + l]));
    }
  for (int64_t l = 0; i < n; ++i, ++l) lanes[l] = Op::take(lanes[l], C(x[i]));
  typename Op::W wide[lanes_];
  for (int64_t l = 0; l < lanes_; ++l) wide[l] = lanes[l];
  return join_lanes<Op, lanes_>(wide);
}

template <class Op, class S, class C>
typename Op::W reduce_few(const S* x, int64_t n) {
  auto total = typename Op::W(Op::first());
  for (int64_t i = 0; i < n; ++i)
    total = Op::join(total, typename Op::W(Op::take(Op::first(), C(x[i]))));
  return total;
}

// Rows that take longer one by one. Sums of float in as many lanes as there are elements do not.
template <class Op>
bool are_short(int64_t n) {
  constexpr bool kWidens = !std::is_same_v<typename Op::R, typename Op::W>;
  return n <= 2 * kFewLanes && !(kWidens && n % kFewLanes == 0);
}

// results[i] = reduce_few of row i, for `rows` <= kStored: side by side, since in each of them an
// element waits for the one before.
template <class Op, class S, class C>
void reduce_short(const S* x, int64_t rows, int64_t n, typename Op::W* results) {
  using W = typename Op::W;
  for (int64_t i = 0; i < rows; ++i) results[i] = W(Op::first());
  for (int64_t r = 0; r < n; ++r, ++x)
    for (int64_t i = 0; i < rows; ++i)
      results[i] = Op::join(results[i], W(Op::take(Op::first(), C(x[i * n]))));
}

template <class Op, class S, class C>
typename Op::W reduce_row(const S* x, int64_t n) {
  if (n < kFewLanes) return reduce_few<Op, S, C>(x, n);
  if (n < kLanes) return reduce_segment<Op, S, C, kFewLanes>(x, n);
  auto total = reduce_segment<Op, S, C, kLanes>(x, std::min(n, kSegment));
  for (int64_t i = kSegment; i < n; i += kSegment)
    total = Op::join(total, reduce_segment<Op, S, C, kLanes>(x + i, std::min(kSegment, n - i)));
  return total;
}

template <class Op, class S, class C>
void reduce_rows(const S* x, void* out, Store<typename Op::W> store, int64_t rows, int64_t n) {
  using W = typename Op::W;
  // One long row after another, each by all threads; or many rows, some to a task.
  if (rows < kMaxPieces && n > 2 * kWork) {
    const int64_t piece = std::max(kWork, ceil_div(n, kMaxPieces));
    const int64_t pieces = ceil_div(n, piece);
    for (int64_t row = 0; row < rows; ++row) {
      W partial[kMaxPieces];
      parallel_for(pieces, [&](int64_t p) {
        const int64_t begin = p * piece;
        partial[p] = reduce_row<Op, S, C>(x + row * n + begin, std::min(piece, n - begin));
      });
      for (int64_t p = 1; p < pieces; ++p) partial[0] = Op::join(partial[0], partial[p]);
      store(partial, 1, out, row);
    }
    return;
  }
  const int64_t grain = std::max<int64_t>(1, kWork / std::max<int64_t>(n, 1));
  parallel_ranges(rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t first = begin; first < end; first += kStored) {
      W results[kStored];
      const int64_t some = std::min(kStored, end - first);
      const S* row = x + first * n;
      if (are_short<Op>(n))
        reduce_short<Op, S, C>(row, some, n, results);
      else
        for (int64_t i = 0; i < some; ++i) results[i] = reduce_row<Op, S, C>(row + i * n, n);
      store(results, some, out, first);
    }
  });
}

// --- columns -------------------------------------------------------------------------------------

// total[j] = reduction of x[r * stride + j] over `rows` rows, for j < cols <= kStrip. Of few
// columns that are all there are, a row of the loop is several of the array.
template <class Op, class S, class C>
void reduce_strip(const S* x, int64_t rows, int64_t stride, int64_t cols, typename Op::W* total) {
  using W = typename Op::W;
  const int64_t joined = cols == stride ? std::min(kStrip / cols, rows) : 1;
  const int64_t width = joined * cols;
  for (int64_t j = 0; j < cols; ++j) total[j] = W(Op::first());
  for (int64_t r0 = 0; r0 < rows; r0 += kGroup * joined) {
    typename Op::R running[kStrip];
    for (int64_t j = 0; j < kStrip; ++j) running[j] = Op::first();
    const int64_t end = std::min(rows, r0 + kGroup * joined);
    for (int64_t r = r0; r < end; r += joined) {
      const S* row = x + r * stride;
      const int64_t n = std::min(width, (end - r) * cols);
      if (n == kStrip)
        for (int64_t j = 0; j < kStrip; ++j) running[j] = Op::take(running[j], C(row[j]));
      else
        for (int64_t j = 0; j < n; ++j) running[j] = Op::take(running[j], C(row[j]));
    }
    for (int64_t j = 0; j < width; j += cols)
      for (int64_t k = 0; k < cols; ++k) total[k] = Op::join(total[k], W(running[j + k]));
  }
}

template <class Op, class S, class C>
void reduce_columns(const S* x, void* out, Store<typename Op::W> store, int64_t outer, int64_t rows,
                    int64_t inner) {
  using W = typename Op::W;
  const int64_t strips = ceil_div(inner, kStrip), units = outer * strips;
  const auto strip_of = [&](int64_t unit, int64_t r0, int64_t r1, W* total) {
    const int64_t j0 = unit % strips * kStrip;
    reduce_strip<Op, S, C>(x + (unit / strips * rows + r0) * inner + j0, r1 - r0, inner,
                           std::min(kStrip, inner - j0), total);
  };
  const auto put = [&](int64_t unit, const W* total) {
    const int64_t j0 = unit % strips * kStrip;
    store(total, std::min(kStrip, inner - j0), out, unit / strips * inner + j0);
  };
  // Few strips of many rows: cut the rows as well.
  const int64_t pieces_wanted =
      std::min(kMaxPieces / std::max<int64_t>(units, 1), rows * std::min(inner, kStrip) / kWork);
  if (pieces_wanted > 1) {
    const int64_t piece = round_up(ceil_div(rows, pieces_wanted), kGroup);
    const int64_t pieces = ceil_div(rows, piece);
    W partial[kMaxPieces][kStrip];
    parallel_for(units * pieces, [&](int64_t task) {
      const int64_t r0 = task % pieces * piece;
      strip_of(task / pieces, r0, std::min(rows, r0 + piece), partial[task]);
    });
    for (int64_t unit = 0; unit < units; ++unit) {
      W* total = partial[unit * pieces];
      const int64_t cols = std::min(kStrip, inner - unit % strips * kStrip);
      for (int64_t p = 1; p < pieces; ++p)
        for (int64_t j = 0; j < cols; ++j)
          total[j] = Op::join(total[j], partial[unit * pieces + p][j]);
      put(unit, total);
    }
    return;
  }
  const int64_t grain =
      std::max<int64_t>(1, kWork / std::max<int64_t>(1, rows * std::min(inner, kStrip)));
  parallel_ranges(units, grain, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      W total[kStrip];
      strip_of(unit, 0, rows, total);
      put(unit, total);
    }
  });
}

template <class Op, class S, class C>
void reduce_all(const S* x, void* out, Store<typename Op::W> store, int64_t outer, int64_t n,
                int64_t inner) {
  if (inner == 1)
    reduce_rows<Op, S, C>(x, out, store, outer, n);
  else
    reduce_columns<Op, S, C>(x, out, store, outer, n, inner);
}

// --- the index of the largest or smallest: the first of equals, and the first NaN before anything

template <bool largest, class S, class C>
void reduce_arg(const S* x, int64_t* out, int64_t outer, int64_t n, int64_t inner) {
  const int64_t grain = std::max<int64_t>(1, kWork / n);
  const auto beats = [](C a, C b) { return (largest ? a > b : a < b) || (a != a && b == b); };
  if (inner == 1) {
    using Op = Extreme<C, largest>;
    parallel_ranges(outer, grain, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const S* values = x + row * n;
        const C best = reduce_row<Op, S, C>(values, n);
        int64_t at = 0;
        while (!(C(values[at]) == best || (best != best && C(values[at]) != C(values[at])))) ++at;
        out[row] = at;
      }
    });
    return;
  }
  parallel_ranges(outer * inner, grain, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      const S* values = x + unit / inner * n * inner + unit % inner;
      int64_t at = 0;
      for (int64_t r = 1; r < n; ++r)
        if (beats(C(values[r * inner]), C(values[at * inner]))) at = r;
      out[unit] = at;
    }
  });
}

void check_out(bool accepted, DType in, DType out) {
  if (!accepted)
    throw std::invalid_argument(std::string("[reduce] out is ") + dtype_name(out) +
                                " for an input of " + dtype_name(in));
}

}  // namespace

void reduce(ReduceOp op, const Array& a, const Array& out, int64_t outer, int64_t reduce,
            int64_t inner) {
  if (outer * inner == 0) return;
  const DType in = a.dtype(), wanted = out.dtype();
  // Bools, 0 and 1, are reduced as bytes.
  dispatch_any(in == DType::kBool ? DType::kUInt8 : in, [&](auto tag) {
    using S = typename decltype(tag)::type;
    using C = accum_t<S>;
    constexpr bool kFloat = std::is_floating_point_v<C>;
    const S* x = static_cast<const S*>(a.ptr());
    const auto all = [&](auto op_tag, auto store) {
      reduce_all<typename decltype(op_tag)::type, S, C>(x, out.ptr(), store, outer, reduce, inner);
    };
    if (op == ReduceOp::argmax) {
      reduce_arg<true, S, C>(x, out.data<int64_t>(), outer, reduce, inner);
    } else if (op == ReduceOp::argmin) {
      reduce_arg<false, S, C>(x, out.data<int64_t>(), outer, reduce, inner);
    } else if (op == ReduceOp::max || op == ReduceOp::min) {
      check_out(wanted == in, in, wanted);
      if (op == ReduceOp::max)
        all(Tag<Extreme<C, true>>{}, store_as<C, S>);
      else
        all(Tag<Extreme<C, false>>{}, store_as<C, S>);
    } else if (op == ReduceOp::sumsq) {
      if constexpr (kFloat) {
        using Out = std::conditional_t<std::is_same_v<S, double>, double, float>;
        check_out(wanted == DTypeOf<Out>::value, in, wanted);
        all(Tag<SumSquares<C>>{}, store_as<double, Out>);
      } else {
        throw std::invalid_argument(std::string("[reduce_sumsq] needs a floating dtype, got ") +
                                    dtype_name(in));
      }
    } else {
      using W = typename Sum<C>::W;
      using Wide = std::conditional_t<kFloat, C, int64_t>;
      Store<W> store = store_as<W, S>;
      if (wanted == DTypeOf<Wide>::value)
        store = store_as<W, Wide>;
      else if (wanted == DType::kBool)
        store = store_as<W, bool>;
      check_out(wanted == in || wanted == DTypeOf<Wide>::value, in, wanted);
      if (op == ReduceOp::sum)
        all(Tag<Sum<C>>{}, store);
      else
        all(Tag<Product<C>>{}, store);
    }
  });
}

}  // namespace needle::cpu
