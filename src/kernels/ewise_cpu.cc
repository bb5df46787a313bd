// Elementwise ops: out[i] = f(a[i]) and out[i] = f(a[i], b[i]), one row of ewise_ops.def each, and
// `where`.
//
// For each row and each type that arithmetic is done in there is one loop over contiguous memory,
// which g++ vectorizes. Everything else is brought to that form in pieces of kChunk elements, of
// one long row or of several short ones, or tiles where an operand is transposed, that stay in the
// first cache: strided operands are gathered, 16-bit floats converted, a number repeated. Types
// that need no conversion are moved by their width, so that this is compiled once for each width.
#include <algorithm>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

#include "../common/backend.h"
#include "../common/ewise_math_cpu.h"
#include "../common/lane_gemm_cpu.h"
#include "../common/rows_cpu.h"
#include "../common/strided_cpu.h"

#pragma GCC diagnostic ignored "-Wint-in-bool-context"  // a * b on bools means a and b

namespace needle::cpu {
namespace {

constexpr int64_t kChunk = 1024, kTile = kTileRows * kTileCols;
constexpr int64_t kLongRow = 128;  // elements, from which a row is worth a loop of its own
constexpr int64_t kRepeats = 256;  // of a number that stands for a row, at a time
// Elements per task: of cheap ops, and of those that take a function's time per element.
constexpr int64_t kGrain = 1 << 15, kExpensiveGrain = 1 << 13;

template <Kind kind, class C>
constexpr bool accepts() {
  if (kind == Kind::FLT || kind == Kind::TEST) return std::is_floating_point_v<C>;
  return kind != Kind::NUM || !std::is_same_v<C, bool>;
}

// --- one loop per row and arithmetic type --------------------------------------------------------

using Loop = void (*)(const void* a, const void* b, void* out, int64_t n);  // unary rows: no b
struct Row {
  Loop loop;  // null: not for this type
  bool bool_out, expensive;
  const char* name;
};

// Rows that are written for vectors, for which g++ would not find the best instructions.
template <class Op, class C>
constexpr bool kByVectors = false;

// ivdep: out is an input or does not overlap one.
template <class Op, Kind kind, class C>
Row row_of(const char* name) {
  using Out = std::conditional_t<gives_bool(kind), bool, C>;
  Row row{nullptr, gives_bool(kind), kind == Kind::FLT, name};
  if constexpr (accepts<kind, C>())
    row.loop = [](const void* a_, const void* b_, void* out_, int64_t n) {
      const C *a = static_cast<const C*>(a_), *b = static_cast<const C*>(b_);
      Out* out = static_cast<Out*>(out_);
      if constexpr (kByVectors<Op, C>) {
        if constexpr (Op::kInputs == 1)
          map_row(a, out, n, [](Vec<C> x) { return Op::apply(x); });
        else
          map_row(a, b, out, n, [](Vec<C> x, Vec<C> y) { return Op::apply(x, y); });
      } else {
#pragma GCC ivdep
        for (int64_t i = 0; i < n; ++i) {
          if constexpr (Op::kInputs == 1)
            out[i] = Out(Op::apply(a[i]));
          else
            out[i] = Out(Op::apply(a[i], b[i]));
        }
      }
    };
  return row;
}

#define NEEDLE_UNARY(name, kind, expression) \
  struct Unary_##name {                      \
    static constexpr int kInputs = 1;        \
    template <class T>                       \
    NEEDLE_INLINE static auto apply(T x) {   \
      return expression;                     \
    }                                        \
  };
#define NEEDLE_BINARY(name, kind, expression)   \
  struct Binary_##name {                        \
    static constexpr int kInputs = 2;           \
    template <class T>                          \
    NEEDLE_INLINE static auto apply(T a, T b) { \
      return expression;                        \
    }                                           \
  };
#include "../common/ewise_ops.def"

#define BY_VECTORS(op, C) \
  template <>             \
  constexpr bool kByVectors<op, C> = true;
#define BOTH_BY_VECTORS(op) BY_VECTORS(op, float) BY_VECTORS(op, double)
BOTH_BY_VECTORS(Unary_exp)
BY_VECTORS(Unary_log, double)
BOTH_BY_VECTORS(Unary_sin)
BOTH_BY_VECTORS(Unary_cos)
BOTH_BY_VECTORS(Unary_tanh)
BOTH_BY_VECTORS(Unary_sigmoid)
BY_VECTORS(Unary_erf, float)
BOTH_BY_VECTORS(Unary_silu)
BY_VECTORS(Unary_gelu_erf, float)
BOTH_BY_VECTORS(Unary_gelu_tanh)
BY_VECTORS(Binary_power, float)
BOTH_BY_VECTORS(Binary_silu_backward)
BY_VECTORS(Binary_gelu_erf_backward, float)
BOTH_BY_VECTORS(Binary_gelu_tanh_backward)
#undef BOTH_BY_VECTORS
#undef BY_VECTORS

template <class C>
Row row_of(UnaryOp op) {
  switch (op) {
#define NEEDLE_UNARY(name, kind, expression) \
  case UnaryOp::name:                        \
    return row_of<Unary_##name, Kind::kind, C>(#name);
#include "../common/ewise_ops.def"
  }
  throw std::invalid_argument("unknown unary op");
}
template <class C>
Row row_of(BinaryOp op) {
  switch (op) {
#define NEEDLE_BINARY(name, kind, expression) \
  case BinaryOp::name:                        \
    return row_of<Binary_##name, Kind::kind, C>(#name);
#include "../common/ewise_ops.def"
  }
  throw std::invalid_argument("unknown binary op");
}

// --- operands ------------------------------------------------------------------------------------

// What a piece is brought into.
template <class C>
struct Piece {
  Piece() {}  // not zeros
  alignas(64) C values[kTile];
};

// An input, of storage type S, seen as contiguous pieces of the arithmetic type C.
template <class S, class C>
class Operand {
 public:
  using Type = C;
  explicit Operand(const View& view)
      : base_(static_cast<const S*>(view.array.ptr()) + view.offset),
        strides_(view.strides),
        walk_(view.shape, {view.contiguous() ? &view.shape : &view.strides}),
        contiguous_(view.contiguous() || (walk_.rank == 1 && walk_.strides[0][0] == 1)) {}
  // A number, of which the piece is full.
  explicit Operand(const Piece<C>& number)
      : strides_(kNone), walk_(kNone, {&kNone}), contiguous_(true), number_(number.values) {}

  bool direct() const { return contiguous_ && std::is_same_v<S, C> && !number_; }
  bool transposed() const { return !contiguous_ && walk_.across(0) != 0; }
  const Dims& strides(const Dims& compact) const { return strides_.empty() ? compact : strides_; }
  const C* from(int64_t at) const { return reinterpret_cast<const C*>(base_) + at; }  // when direct

  // Elements at .. at + n: in place when direct, else brought into `piece`.
  const C* get(int64_t at, int64_t n, C* piece) const {
    if (number_) return number_;
    if (direct()) return from(at);
    if (contiguous_) {
      gather(base_ + at, 1, n, piece);
      return piece;
    }
    const int64_t width = walk_.shape[0];
    if (walk_.rank == 2 && walk_.strides[0][1] == 0 && n > width) {  // copies of one row
      const int64_t stride = walk_.strides[0][0], first = at % width;
      gather(base_ + first * stride, stride, width - first, piece);
      gather(base_, stride, first, piece + width - first);
      for (int64_t there = width; there < n; there *= 2)
        std::copy_n(piece, std::min(there, n - there), piece + there);
      return piece;
    }
    C* to = piece;
    walk_.rows(at, at + n, [&](int64_t count, const std::array<int64_t, 1>& offset) {
      gather(base_ + offset[0], walk_.strides[0][0], count, to);
      to += count;
    });
    return piece;
  }

  // n elements of a row, `stride` apart, from offset on. `again`: the piece has at least as many of
  // the same row, which it may be full of.
  const C* row(int64_t offset, int64_t stride, int64_t n, C* piece, bool again) const {
    if (number_) return number_;
    if (again && stride == 0) return piece;
    if (stride == 1 && std::is_same_v<S, C>) return from(offset);
    gather(base_ + offset, stride, n, piece);
    return piece;
  }

  // The tile whose first element is at offset, row after row. Not inlined, or g++ warns of pieces
  // that a tile without rows would leave as they are.
  [[gnu::noinline]] const C* tile(int64_t offset, int64_t row_stride, int64_t stride, int64_t rows,
                                  int64_t cols, C* piece) const {
    if (number_) return number_;
    if (row_stride == 1) {
      transpose_tile(base_ + offset, stride, cols, rows, piece, cols);
      return piece;
    }
    for (int64_t i = 0; i < rows; ++i)
      gather(base_ + offset + i * row_stride, stride, cols, piece + i * cols);
    return piece;
  }

 private:
  static void gather(const S* row, int64_t stride, int64_t n, C* to) {
    if (stride == 1)
      convert_run(row, n, to);
    else if (stride == 0)
      std::fill(to, to + n, C(*row));
    else
      for (int64_t i = 0; i < n; ++i) to[i] = C(row[i * stride]);
  }

  inline static const Dims kNone;

  const S* base_ = nullptr;
  const Dims& strides_;
  Walk<1> walk_;
  bool contiguous_;
  const C* number_ = nullptr;
};

void check_out(const char* name, DType in, const Array& out, bool bool_out, int64_t n) {
  const DType wanted = bool_out ? DType::kBool : in;
  if (out.dtype() != wanted)
    throw std::invalid_argument(std::string("[") + name + "] out is " + dtype_name(out.dtype()) +
                                " (" + dtype_name(wanted) + " is wanted)");
  if (out.size() != n)
    throw std::invalid_argument(std::string("[") + name + "] out has " +
                                std::to_string(out.size()) + " elements, the operands have " +
                                std::to_string(n));
}

// loop(pieces of in..., results, n) for all elements of `shape`, which is that of every input and
// of out. Between S and C results are rounded to 16 bits.
template <class S, class C, class Loop, class... In, size_t... k>
void compute(const Dims& shape, const Array& out, bool bool_out, bool expensive, const Loop& loop,
             std::index_sequence<k...>, const In&... in) {
  const int64_t item = bool_out ? 1 : int64_t(sizeof(S));
  const int64_t grain = expensive ? kExpensiveGrain : kGrain;
  const bool rounds = !bool_out && !std::is_same_v<S, C>;
  char* const base = static_cast<char*>(out.ptr());
  // Results first .. first + n of a piece to elements at .. at + n.
  const auto put = [&](const C* results, int64_t first, int64_t at, int64_t n) {
    if (rounds) {
      convert_run(results + first, n, reinterpret_cast<S*>(base) + at);
    } else {
      const char* from = reinterpret_cast<const char*>(results) + first * item;
      std::memcpy(base + at * item, from, size_t(n * item));
    }
  };

  const auto piecewise = [&](int64_t at, int64_t n, const typename In::Type*... inputs) {
    Piece<C> results;
    void* const to = rounds ? results.values : static_cast<void*>(base + at * item);
    loop(inputs..., to, n);
    if (rounds) put(results.values, 0, at, n);
  };
  if (!rounds && (in.direct() && ...))
    return parallel_ranges(out.size(), grain, [&](int64_t begin, int64_t end) {
      loop(in.from(begin)..., base + begin * item, end - begin);
    });
  constexpr int kOut = sizeof...(In);
  const Dims compact = compact_strides(shape);
  const Walk<kOut + 1> walk(shape, {&in.strides(compact)..., &compact});
  const auto& strides = walk.strides;
  if ((in.transposed() || ...))
    if (const int across = std::max({walk.across(k)...}))
      return walk.tiles(across, grain, [&](const auto& at, int64_t rows, int64_t cols) {
        Piece<C> results;
        loop(in.tile(at[k], strides[k][across], strides[k][0], rows, cols,
                     Piece<typename In::Type>().values)...,
             results.values, rows * cols);
        for (int64_t i = 0; i < rows; ++i)
          put(results.values, i * cols, at[kOut] + i * strides[kOut][across], cols);
      });
  parallel_ranges(out.size(), grain, [&](int64_t begin, int64_t end) {
    std::tuple<Piece<typename In::Type>...> pieces;
    if (walk.shape[0] >= kLongRow) {
      const int64_t chunk = ((strides[k][0] == 0) || ...) ? kRepeats : kChunk;
      return walk.rows(begin, end, [&](int64_t count, const auto& at) {
        for (int64_t j = 0; j < count; j += chunk) {
          const int64_t n = std::min(chunk, count - j);
          piecewise(at[kOut] + j, n,
                    in.row(at[k] + j * strides[k][0], strides[k][0], n, std::get<k>(pieces).values,
                           j > 0)...);
        }
      });
    }
    for (int64_t at = begin; at < end; at += kChunk) {
      const int64_t n = std::min(kChunk, end - at);
      piecewise(at, n, in.get(at, n, std::get<k>(pieces).values)...);
    }
  });
}

// The power of a number that is known beforehand: a few exponents, and those of their gradients,
// are worth a loop of their own.
#define NEEDLE_POWER(name, expression) \
  struct Power_##name {                \
    static constexpr int kInputs = 1;  \
    template <class T>                 \
    static T apply(T x) {              \
      return expression;               \
    }                                  \
  };
NEEDLE_POWER(cube, x * x * x)
// pow(-inf, -1/2) is 0, pow(-0, -1/2) is inf
NEEDLE_POWER(inverse_half, m_abs(x) == T(INFINITY) ? T(0) : T(1) / (m_sqrt(x) + T(0)))
NEEDLE_POWER(inverse_square, T(1) / x * (T(1) / x))  // x * x ends sooner
NEEDLE_POWER(inverse_three_halves, Power_inverse_half::apply(x) / m_abs(x))
#undef NEEDLE_POWER
template <class C>
Row power_row(double exponent) {
  if (exponent == 2) return row_of<C>(UnaryOp::square);
  if (exponent == 3) return row_of<Power_cube, Kind::NUM, C>("power");
  if (exponent == -0.5) return row_of<Power_inverse_half, Kind::NUM, C>("power");
  if (exponent == -1) return row_of<C>(UnaryOp::reciprocal);
  if (exponent == -1.5) return row_of<Power_inverse_three_halves, Kind::FLT, C>("power");
  if (exponent == -2) return row_of<Power_inverse_square, Kind::FLT, C>("power");
  return {nullptr, false, false, "power"};
}

// What find(Tag<C>) gives for the type that arithmetic with dtype is done in.
template <class Find>
Row row_for(DType dtype, const Find& find) {
  Row row{};
  dispatch_any(dtype, [&](auto tag) { row = find(Tag<accum_t<typename decltype(tag)::type>>{}); });
  return row;
}
template <class Op>
Row row_for(Op op, DType dtype) {
  const Row row =
      row_for(dtype, [&](auto tag) { return row_of<typename decltype(tag)::type>(op); });
  if (row.loop == nullptr)
    throw std::invalid_argument(std::string("[") + row.name + "] no kernel for dtype " +
                                dtype_name(dtype) + " (astype gives another)");
  return row;
}

// f(S, C): what elements of dtype are moved as, and brought to the loops as. Integers may be moved
// as floats, whose bits stay as they are: g++ has better loops for those.
template <class F>
void dispatch_moved(DType dtype, const F& f) {
  if (dtype == DType::kFloat16) return f(Tag<float16>{}, Tag<float>{});
  if (dtype == DType::kBFloat16) return f(Tag<bfloat16>{}, Tag<float>{});
  switch (dtype_size(dtype)) {
    case 1:
      return f(Tag<uint8_t>{}, Tag<uint8_t>{});
    case 4:
      return f(Tag<float>{}, Tag<float>{});
    default:
      return f(Tag<double>{}, Tag<double>{});
  }
}

void compute_unary(const Row& row, const View& a, const Array& out) {
  const DType dtype = a.array.dtype();
  check_out(row.name, dtype, out, row.bool_out, a.size());
  dispatch_moved(dtype, [&](auto s, auto c) {
    using S = typename decltype(s)::type;
    using C = typename decltype(c)::type;
    const auto loop = [&](const C* x, void* to, int64_t n) { row.loop(x, nullptr, to, n); };
    compute<S, C>(a.shape, out, row.bool_out, row.expensive, loop, std::make_index_sequence<1>(),
                  Operand<S, C>(a));
  });
}

// One of a and b may be missing: it is the number.
void compute_binary(const Row& row, const View* a, const View* b, Scalar number, const Array& out) {
  const View& view = a ? *a : *b;
  const DType dtype = view.array.dtype();
  check_out(row.name, dtype, out, row.bool_out, view.size());
  dispatch_moved(dtype, [&](auto s, auto c) {
    using S = typename decltype(s)::type;
    using C = typename decltype(c)::type;
    Piece<C> numbers;
    if (!a || !b)
      dispatch_any(dtype, [&](auto tag) {
        using A = accum_t<typename decltype(tag)::type>;
        std::fill_n(reinterpret_cast<A*>(numbers.values), std::min(out.size(), kTile),
                    number.to<A>());
      });
    const auto operand = [&](const View* of) {
      return of ? Operand<S, C>(*of) : Operand<S, C>(numbers);
    };
    compute<S, C>(view.shape, out, row.bool_out, row.expensive, row.loop,
                  std::make_index_sequence<2>(), operand(a), operand(b));
  });
}

void check_same(const char* name, const View& a, const View& b) {
  if (a.array.dtype() != b.array.dtype())
    throw std::invalid_argument(std::string("[") + name + "] dtypes differ: a is " +
                                dtype_name(a.array.dtype()) + ", b is " +
                                dtype_name(b.array.dtype()));
}

}  // namespace

void ewise_unary(UnaryOp op, const View& a, const Array& out) {
  compute_unary(row_for(op, a.array.dtype()), a, out);
}

void ewise_binary(BinaryOp op, const View& a, const View& b, const Array& out) {
  const Row row = row_for(op, a.array.dtype());
  check_same(row.name, a, b);
  compute_binary(row, &a, &b, {}, out);
}

void scalar_binary(BinaryOp op, const View& a, Scalar b, const Array& out) {
  const DType dtype = a.array.dtype();
  if (op == BinaryOp::power) {
    const Row power = row_for(dtype, [&](auto tag) {
      using C = typename decltype(tag)::type;
      if constexpr (std::is_floating_point_v<C>) return power_row<C>(b.d);
      return Row{};
    });
    if (power.loop) return compute_unary(power, a, out);
  }
  compute_binary(row_for(op, dtype), &a, nullptr, b, out);
}

void rscalar_binary(BinaryOp op, Scalar a, const View& b, const Array& out) {
  compute_binary(row_for(op, b.array.dtype()), nullptr, &b, a, out);
}

void where(const View& condition, const View& a, const View& b, const Array& out) {
  check_same("where", a, b);
  check_out("where", a.array.dtype(), out, false, a.size());
  if (condition.array.dtype() != DType::kBool)
    throw std::invalid_argument(std::string("[where] the condition is ") +
                                dtype_name(condition.array.dtype()) + " (bool is wanted)");
  const Operand<uint8_t, uint8_t> c(condition);
  // Moved by their width, not computed with.
  dispatch_bytes(dtype_size(out.dtype()), [&](auto tag) {
    using T = typename decltype(tag)::type;
    // Both sides are read: else this is a loop of branches.
    const auto loop = [](const uint8_t* cs, const T* as, const T* bs, void* to_, int64_t n) {
      T* to = static_cast<T*>(to_);
#pragma GCC ivdep
      for (int64_t i = 0; i < n; ++i) {
        const T yes = as[i], no = bs[i];
        to[i] = cs[i] != 0 ? yes : no;
      }
    };
    compute<T, T>(a.shape, out, false, false, loop, std::make_index_sequence<3>(), c,
                  Operand<T, T>(a), Operand<T, T>(b));
  });
}

}  // namespace needle::cpu
