// Elementwise ops on a GPU: out[i] = f(a[i]) and out[i] = f(a[i], b[i]), one row of ewise_ops.def
// each, and `where`.
//
// An operand is contiguous, strided (broadcast axes have stride 0) or one number. Rows that are
// contiguous or broadcast move 16 bytes per instruction where addresses allow it. 16-bit floats are
// computed in float32.
#include "../common/cuda_util.cuh"
#include "../common/ewise_math_cuda.h"

namespace needle::NEEDLE_DEVICE {
namespace {

// --- the table as types: apply() is the row's expression, kind says which dtypes it takes --------

template <UnaryOp>
struct Unary;
template <BinaryOp>
struct Binary;
// What a row gives for T, before rounding to 16 bits; an expression of small integers is an int.
template <Kind kind, class T>
using result_t = typename std::conditional<gives_bool(kind), bool, T>::type;
#define NEEDLE_UNARY(name, kind_, expression)        \
  template <>                                        \
  struct Unary<UnaryOp::name> {                      \
    static constexpr Kind kind = Kind::kind_;        \
    template <class T>                               \
    __device__ static result_t<kind, T> apply(T x) { \
      return result_t<kind, T>(expression);          \
    }                                                \
  };
#define NEEDLE_BINARY(name, kind_, expression)            \
  template <>                                             \
  struct Binary<BinaryOp::name> {                         \
    static constexpr Kind kind = Kind::kind_;             \
    template <class T>                                    \
    __device__ static result_t<kind, T> apply(T a, T b) { \
      return result_t<kind, T>(expression);               \
    }                                                     \
  };
#include "../common/ewise_ops.def"

template <Kind kind, class F>
void dispatch_kind(DType dtype, const char* name, F&& f) {
  if constexpr (kind == Kind::ANY || kind == Kind::CMP || kind == Kind::LOGIC) {
    dispatch_any(dtype, f);
  } else if constexpr (kind == Kind::NUM) {
    dispatch_num(dtype, name, f);
  } else {
    dispatch_float(dtype, name, f);
  }
}

// --- kernels -------------------------------------------------------------------------------------

// A null pointer stands for the number beside it, which is not rounded to 16 bits.
template <class T>
struct Operand {
  using A = accum_t<T>;
  const T* data;
  A number;
  __device__ A at(int64_t i) const { return data != nullptr ? A(data[i]) : number; }
  template <int N>
  __device__ void vector_at(int64_t i, bool broadcast, A (&x)[N]) const {
    if (data == nullptr || broadcast) {
      const A one = at(i);
#pragma unroll
      for (int j = 0; j < N; ++j) x[j] = one;
    } else {
      const auto loaded = *reinterpret_cast<const Vec<T, N>*>(data + i);
#pragma unroll
      for (int j = 0; j < N; ++j) x[j] = A(loaded.v[j]);
    }
  }
};

// Both kernels: in vectors of N elements where the operands have them (go_by_vectors), and what is
// left, or all of it, one by one.
template <class Op, class T, class R, int N>
__global__ void ewise_unary_kernel(Operand<T> a, R* out, Walk<1> walk, int64_t n, int64_t vectors) {
  for (int64_t i = first_index(); i < vectors; i += index_step()) {
    accum_t<T> x[N];
    a.vector_at(walk(i).of[0], walk.broadcasts(0), x);
    Vec<R, N> y;
#pragma unroll
    for (int j = 0; j < N; ++j) y.v[j] = R(Op::apply(x[j]));
    reinterpret_cast<Vec<R, N>*>(out)[i] = y;
  }
#pragma unroll 1
  for (int64_t i = vectors * N + first_index(); i < n; i += index_step())
    out[i] = R(Op::apply(a.at((vectors > 0 ? walk.element(i) : walk(i)).of[0])));
}

template <class Op, class T, class R, int N>
__global__ void ewise_binary_kernel(Operand<T> a, Operand<T> b, R* out, Walk<2> walk, int64_t n,
                                    int64_t vectors) {
  for (int64_t i = first_index(); i < vectors; i += index_step()) {
    const auto at = walk(i);
    accum_t<T> x[N], y[N];
    a.vector_at(at.of[0], walk.broadcasts(0), x);
    b.vector_at(at.of[1], walk.broadcasts(1), y);
    Vec<R, N> z;
#pragma unroll
    for (int j = 0; j < N; ++j) z.v[j] = R(Op::apply(x[j], y[j]));
    reinterpret_cast<Vec<R, N>*>(out)[i] = z;
  }
#pragma unroll 1
  for (int64_t i = vectors * N + first_index(); i < n; i += index_step()) {
    const auto at = vectors > 0 ? walk.element(i) : walk(i);
    out[i] = R(Op::apply(a.at(at.of[0]), b.at(at.of[1])));
  }
}

template <class B>
__global__ void where_kernel(const bool* condition, const B* a, const B* b, B* out, Walk<3> walk,
                             int64_t n) {
  for (int64_t i = first_index(); i < n; i += index_step()) {
    const auto at = walk(i);
    out[i] = condition[at.of[0]] ? a[at.of[1]] : b[at.of[2]];
  }
}

// --- launchers -----------------------------------------------------------------------------------

template <class T>
constexpr int vector_length() {
  return sizeof(T) == 1 ? 8 : 16 / int(sizeof(T));  // sixteen bytes at a time would be much code
}

// How a kernel goes through its operands: the first `vectors` times `length` elements by vectors,
// the others one by one.
template <int N>
struct Way {
  Walk<N> walk;
  int64_t vectors;
  LaunchConfig config;
};

// A view may be null: its kernel has a number there. Nothing here depends on the op, and little on
// dtypes, so it is compiled once and not for every kernel.
template <int N>
[[gnu::noinline]] Way<N> way_through(const View* const (&views)[N], const Array& out, int length) {
  WalkOperand operands[N] = {};
  bool aligned[N];
  const Dims* shape = nullptr;
  for (int o = 0; o < N; ++o) {
    const View* view = views[o];
    aligned[o] = true;
    if (view == nullptr) continue;
    const int64_t item = dtype_size(view->array.dtype());
    const char* first = static_cast<const char*>(view->array.ptr()) + view->offset * item;
    aligned[o] = aligned_to(first, length * item);
    operands[o] = {&view->strides, view->offset};
    shape = &view->shape;
  }
  const int64_t n = out.size();
  Way<N> way;
  way.walk = make_walk<N>(*shape, operands);
  const bool by_vectors = aligned_to(out.ptr(), length * dtype_size(out.dtype())) &&
                          go_by_vectors(way.walk, length, aligned);
  way.vectors = by_vectors ? n / length : 0;
  way.config = grid_stride(by_vectors ? ceil_div(n, length) : n);
  return way;
}

template <class Op>
void unary(const char* name, const View& a, const Array& out) {
  dispatch_kind<Op::kind>(a.array.dtype(), name, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using R = result_t<Op::kind, T>;
    constexpr int N = vector_length<T>();
    const Way<1> way = way_through<1>({&a}, out, N);
    launch<ewise_unary_kernel<Op, T, R, N>>(way.config, Operand<T>{a.array.data<T>(), {}},
                                            out.data<R>(), way.walk, out.size(), way.vectors);
  });
}

// One of the views may be null: then its number is used.
template <class Op>
void binary(const char* name, const View* a, const View* b, Scalar number, const Array& out) {
  dispatch_kind<Op::kind>((a != nullptr ? a : b)->array.dtype(), name, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using R = result_t<Op::kind, T>;
    constexpr int N = vector_length<T>();
    const auto operand = [&](const View* view) {
      return Operand<T>{view != nullptr ? view->array.data<T>() : nullptr, number.to<accum_t<T>>()};
    };
    const Way<2> way = way_through<2>({a, b}, out, N);
    launch<ewise_binary_kernel<Op, T, R, N>>(way.config, operand(a), operand(b), out.data<R>(),
                                             way.walk, out.size(), way.vectors);
  });
}

void binary_by_name(BinaryOp op, const View* a, const View* b, Scalar number, const Array& out) {
  switch (op) {
#define NEEDLE_BINARY(name, kind, expression) \
  case BinaryOp::name:                        \
    return binary<Binary<BinaryOp::name>>(#name, a, b, number, out);
#include "../common/ewise_ops.def"
  }
}

}  // namespace

void ewise_unary(UnaryOp op, const View& a, const Array& out) {
  switch (op) {
#define NEEDLE_UNARY(name, kind, expression) \
  case UnaryOp::name:                        \
    return unary<Unary<UnaryOp::name>>(#name, a, out);
#include "../common/ewise_ops.def"
  }
}

void ewise_binary(BinaryOp op, const View& a, const View& b, const Array& out) {
  binary_by_name(op, &a, &b, Scalar{}, out);
}

void scalar_binary(BinaryOp op, const View& a, Scalar b, const Array& out) {
  binary_by_name(op, &a, nullptr, b, out);
}

void rscalar_binary(BinaryOp op, Scalar a, const View& b, const Array& out) {
  binary_by_name(op, nullptr, &b, a, out);
}

void where(const View& condition, const View& a, const View& b, const Array& out) {
  const int64_t n = out.size();
  const auto walk = make_walk<3>(
      a.shape,
      {{&condition.strides, condition.offset}, {&a.strides, a.offset}, {&b.strides, b.offset}});
  dispatch_bytes(dtype_size(out.dtype()), [&](auto tag) {
    using B = typename decltype(tag)::type;
    launch<where_kernel<B>>(
        grid_stride(n), condition.array.data<bool>(), static_cast<const B*>(a.array.ptr()),
        static_cast<const B*>(b.array.ptr()), static_cast<B*>(out.ptr()), walk, n);
  });
}

}  // namespace needle::NEEDLE_DEVICE
