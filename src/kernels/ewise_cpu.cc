// Elementwise ops: out[i] = f(a[i]) and out[i] = f(a[i], b[i]), one row of ewise_ops.def each, and
// `where`.
//
// For each row and each type that arithmetic is done in there is one loop over contiguous memory,
// which g++ vectorizes. Everything else is brought to that form in pieces of kChunk elements that
// stay in the first cache: strided operands are gathered, 16-bit floats converted, a scalar
// repeated.
#include <algorithm>
#include <type_traits>

#include "../common/backend.h"
#include "../common/ewise_math_cpu.h"
#include "../common/parallel.h"
#include "../common/strided_cpu.h"

#pragma GCC diagnostic ignored "-Wint-in-bool-context"  // a * b on bools means a and b

namespace needle::cpu {
namespace {

constexpr int64_t kChunk = 1024;
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

// ivdep: out is an input or does not overlap one.
template <class Op, Kind kind, class C>
Row row_of(const char* name) {
  using Out = std::conditional_t<gives_bool(kind), bool, C>;
  Row row{nullptr, gives_bool(kind), kind == Kind::FLT, name};
  if constexpr (accepts<kind, C>())
    row.loop = [](const void* a_, const void* b_, void* out_, int64_t n) {
      const C *a = static_cast<const C*>(a_), *b = static_cast<const C*>(b_);
      Out* out = static_cast<Out*>(out_);
#pragma GCC ivdep
      for (int64_t i = 0; i < n; ++i) {
        if constexpr (Op::kInputs == 1)
          out[i] = Out(Op::apply(a[i]));
        else
          out[i] = Out(Op::apply(a[i], b[i]));
      }
    };
  return row;
}

#define NEEDLE_UNARY(name, kind, expression) \
  struct Unary_##name {                      \
    static constexpr int kInputs = 1;        \
    template <class T>                       \
    static auto apply(T x) {                 \
      return expression;                     \
    }                                        \
  };
#define NEEDLE_BINARY(name, kind, expression) \
  struct Binary_##name {                      \
    static constexpr int kInputs = 2;         \
    template <class T>                        \
    static auto apply(T a, T b) {             \
      return expression;                      \
    }                                         \
  };
#include "../common/ewise_ops.def"

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

// An input of storage type S seen as contiguous pieces of the arithmetic type C.
template <class S, class C>
class Operand {
 public:
  explicit Operand(const View& view)
      : base_(view.array.data<S>() + view.offset),
        walk_(view.shape, {view.contiguous() ? &view.shape : &view.strides}),
        contiguous_(view.contiguous() || (walk_.rank == 1 && walk_.strides[0][0] == 1)) {}

  bool direct() const { return contiguous_ && std::is_same_v<S, C>; }
  const C* from(int64_t at) const { return reinterpret_cast<const C*>(base_) + at; }  // when direct

  // Elements at .. at + n: in place when direct, else brought into `piece`.
  const C* get(int64_t at, int64_t n, C* piece) const {
    if (direct()) return from(at);
    if (contiguous_) {
      for (int64_t i = 0; i < n; ++i) piece[i] = C(base_[at + i]);
      return piece;
    }
    C* to = piece;
    const int64_t stride = walk_.strides[0][0];
    walk_.rows(at, at + n, [&](int64_t count, const std::array<int64_t, 1>& offset) {
      const S* row = base_ + offset[0];
      if (stride == 1)
        for (int64_t i = 0; i < count; ++i) to[i] = C(row[i]);
      else if (stride == 0)
        std::fill(to, to + count, C(*row));
      else
        for (int64_t i = 0; i < count; ++i) to[i] = C(row[i * stride]);
      to += count;
    });
    return piece;
  }

 private:
  const S* base_;
  Walk<1> walk_;
  bool contiguous_;
};

// A number, as pieces that are full of it.
template <class C>
class Repeated {
 public:
  Repeated(C value, int64_t n) { std::fill(piece_, piece_ + std::min(n, kChunk), value); }
  bool direct() const { return false; }
  const C* from(int64_t) const { return piece_; }
  const C* get(int64_t, int64_t, C*) const { return piece_; }

 private:
  alignas(64) C piece_[kChunk];
};

// The operand that unary rows have not.
struct NoOperand {
  bool direct() const { return true; }
  const void* from(int64_t) const { return nullptr; }
  const void* get(int64_t, int64_t, void*) const { return nullptr; }
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

// step(at, n, to) computes elements at .. at + n into `to`, of the loop's own output type; S -> C
// says whether pieces are rounded to 16 bits on their way out.
template <class S, class C, class Step>
void for_chunks(const Array& out, bool bool_out, bool whole, bool expensive, const Step& step) {
  const int64_t item = bool_out ? 1 : int64_t(sizeof(S));
  char* const base = static_cast<char*>(out.ptr());
  const bool rounds = !bool_out && !std::is_same_v<S, C>;
  parallel_ranges(out.size(), expensive ? kExpensiveGrain : kGrain,
                  [&](int64_t begin, int64_t end) {
                    if (whole && !rounds) return step(begin, end - begin, base + begin * item);
                    for (int64_t at = begin; at < end; at += kChunk) {
                      const int64_t n = std::min(kChunk, end - at);
                      if (!rounds) {
                        step(at, n, base + at * item);
                        continue;
                      }
                      alignas(64) C piece[kChunk];
                      step(at, n, reinterpret_cast<char*>(piece));
                      S* to = reinterpret_cast<S*>(base) + at;
                      for (int64_t i = 0; i < n; ++i) to[i] = S(piece[i]);
                    }
                  });
}

template <class S, class C, class A, class B>
void run(const Row& row, const A& a, const B& b, const Array& out) {
  const bool whole = a.direct() && b.direct();
  for_chunks<S, C>(out, row.bool_out, whole, row.expensive, [&](int64_t at, int64_t n, char* to) {
    if (whole) return row.loop(a.from(at), b.from(at), to, n);
    alignas(64) C a_piece[kChunk], b_piece[kChunk];
    row.loop(a.get(at, n, a_piece), b.get(at, n, b_piece), to, n);
  });
}

// The power of a number that is known beforehand: a few exponents are worth a loop of their own.
struct Power_cube {
  static constexpr int kInputs = 1;
  template <class T>
  static T apply(T x) {
    return x * x * x;
  }
};
struct Power_half {  // pow(-inf, 1/2) is inf, pow(-0, 1/2) is 0
  static constexpr int kInputs = 1;
  template <class T>
  static T apply(T x) {
    return m_abs(x) == T(INFINITY) ? m_abs(x) : m_sqrt(x) + T(0);
  }
};
template <class C>
Row power_row(double exponent) {
  if (exponent == 2) return row_of<C>(UnaryOp::square);
  if (exponent == 3) return row_of<Power_cube, Kind::NUM, C>("power");
  if (exponent == 0.5) return row_of<Power_half, Kind::NUM, C>("power");
  if (exponent == -1) return row_of<C>(UnaryOp::reciprocal);
  return {nullptr, false, false, "power"};
}

void require(const Row& row, DType dtype) {
  if (row.loop == nullptr)
    throw std::invalid_argument(std::string("[") + row.name + "] no kernel for dtype " +
                                dtype_name(dtype));
}

// f(S, C): the storage type of dtype and the type its arithmetic is done in.
template <class F>
void dispatch_types(DType dtype, F&& f) {
  dispatch_any(dtype, [&](auto tag) {
    using S = typename decltype(tag)::type;
    f(tag, Tag<accum_t<S>>{});
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
  dispatch_types(a.array.dtype(), [&](auto s, auto c) {
    using S = typename decltype(s)::type;
    using C = typename decltype(c)::type;
    const Row row = row_of<C>(op);
    require(row, a.array.dtype());
    check_out(row.name, a.array.dtype(), out, row.bool_out, a.size());
    run<S, C>(row, Operand<S, C>(a), NoOperand{}, out);
  });
}

void ewise_binary(BinaryOp op, const View& a, const View& b, const Array& out) {
  dispatch_types(a.array.dtype(), [&](auto s, auto c) {
    using S = typename decltype(s)::type;
    using C = typename decltype(c)::type;
    const Row row = row_of<C>(op);
    require(row, a.array.dtype());
    check_same(row.name, a, b);
    check_out(row.name, a.array.dtype(), out, row.bool_out, a.size());
    run<S, C>(row, Operand<S, C>(a), Operand<S, C>(b), out);
  });
}

void scalar_binary(BinaryOp op, const View& a, Scalar b, const Array& out) {
  dispatch_types(a.array.dtype(), [&](auto s, auto c) {
    using S = typename decltype(s)::type;
    using C = typename decltype(c)::type;
    const Row row = row_of<C>(op);
    require(row, a.array.dtype());
    check_out(row.name, a.array.dtype(), out, row.bool_out, a.size());
    const Operand<S, C> x(a);
    if constexpr (std::is_floating_point_v<C>) {
      if (op == BinaryOp::power) {
        const Row power = power_row<C>(b.d);
        if (power.loop) return run<S, C>(power, x, NoOperand{}, out);
      }
    }
    run<S, C>(row, x, Repeated<C>(b.to<C>(), out.size()), out);
  });
}

void rscalar_binary(BinaryOp op, Scalar a, const View& b, const Array& out) {
  dispatch_types(b.array.dtype(), [&](auto s, auto c) {
    using S = typename decltype(s)::type;
    using C = typename decltype(c)::type;
    const Row row = row_of<C>(op);
    require(row, b.array.dtype());
    check_out(row.name, b.array.dtype(), out, row.bool_out, b.size());
    run<S, C>(row, Repeated<C>(a.to<C>(), out.size()), Operand<S, C>(b), out);
  });
}

void where(const View& condition, const View& a, const View& b, const Array& out) {
  check_same("where", a, b);
  check_out("where", a.array.dtype(), out, false, a.size());
  dispatch_any(out.dtype(), [&](auto tag) {
    // Moved, not computed with: 16-bit floats stay as they are.
    using T = typename decltype(tag)::type;
    const Operand<bool, bool> c(condition);
    const Operand<T, T> x(a), y(b);
    for_chunks<T, T>(out, false, false, false, [&](int64_t at, int64_t n, char* to_) {
      alignas(64) bool c_piece[kChunk];
      alignas(64) T a_piece[kChunk], b_piece[kChunk];
      const bool* cs = c.get(at, n, c_piece);
      const T *as = x.get(at, n, a_piece), *bs = y.get(at, n, b_piece);
      T* to = reinterpret_cast<T*>(to_);
#pragma GCC ivdep
      for (int64_t i = 0; i < n; ++i) to[i] = cs[i] ? as[i] : bs[i];
    });
  });
}

}  // namespace needle::cpu
