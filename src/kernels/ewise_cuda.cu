// Elementwise ops on a GPU: out[i] = f(a[i]) and out[i] = f(a[i], b[i]), one row of ewise_ops.def
// each, and `where`.
//
// An operand is contiguous, strided (broadcast axes have stride 0) or one number. Contiguous
// operands move 16 bytes per instruction where addresses allow it. 16-bit floats are computed in
// float32.
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

template <class T>
__device__ accum_t<T> load(const T* p, int64_t i) {
  return accum_t<T>(p[i]);
}

// --- kernels -------------------------------------------------------------------------------------

// Both kernels: in vectors of N elements where every operand is contiguous and aligned for them,
// and what is left, or all of it, one by one.
template <class Op, class T, class R, int N>
__global__ void ewise_unary_kernel(const T* a, R* out, Walk<1> walk, int64_t n, bool vectors) {
  int64_t done = 0;
  if (vectors) {
    done = n / N * N;
    for (int64_t i = first_index(); i < n / N; i += index_step()) {
      const Vec<T, N> x = reinterpret_cast<const Vec<T, N>*>(a + walk.offset[0])[i];
      Vec<R, N> y;
#pragma unroll
      for (int j = 0; j < N; ++j) y.v[j] = R(Op::apply(accum_t<T>(x.v[j])));
      reinterpret_cast<Vec<R, N>*>(out)[i] = y;
    }
  }
#pragma unroll 1
  for (int64_t i = done + first_index(); i < n; i += index_step())
    out[i] = R(Op::apply(load(a, walk(i).of[0])));
}

// A null pointer stands for the number beside it, which is not rounded to 16 bits.
template <class T>
struct Operand {
  const T* data;
  accum_t<T> number;
  __device__ accum_t<T> at(int64_t i) const { return data != nullptr ? load(data, i) : number; }
  __device__ accum_t<T> of(T loaded) const { return data != nullptr ? accum_t<T>(loaded) : number; }
};

template <class Op, class T, class R, int N>
__global__ void ewise_binary_kernel(Operand<T> a, Operand<T> b, R* out, Walk<2> walk, int64_t n,
                                    bool vectors) {
  int64_t done = 0;
  if (vectors) {
    done = n / N * N;
    for (int64_t i = first_index(); i < n / N; i += index_step()) {
      Vec<T, N> x{}, y{};
      if (a.data != nullptr) x = reinterpret_cast<const Vec<T, N>*>(a.data + walk.offset[0])[i];
      if (b.data != nullptr) y = reinterpret_cast<const Vec<T, N>*>(b.data + walk.offset[1])[i];
      Vec<R, N> z;
#pragma unroll
      for (int j = 0; j < N; ++j) z.v[j] = R(Op::apply(a.of(x.v[j]), b.of(y.v[j])));
      reinterpret_cast<Vec<R, N>*>(out)[i] = z;
    }
  }
#pragma unroll 1
  for (int64_t i = done + first_index(); i < n; i += index_step()) {
    const auto at = walk(i);
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

template <class Op>
void unary(const char* name, const View& a, const Array& out) {
  const int64_t n = out.size();
  dispatch_kind<Op::kind>(a.array.dtype(), name, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using R = result_t<Op::kind, T>;
    constexpr int N = vector_length<T>();
    const T* x = a.array.data<T>();
    R* y = out.data<R>();
    const bool vectors =
        a.contiguous() && aligned_for<Vec<T, N>>(x + a.offset) && aligned_for<Vec<R, N>>(y);
    launch<ewise_unary_kernel<Op, T, R, N>>(grid_stride(vectors ? ceil_div(n, N) : n), x, y,
                                            make_walk<1>(a.shape, {{&a.strides, a.offset}}), n,
                                            vectors);
  });
}

// One of the views may be null: then its number is used.
template <class Op>
void binary(const char* name, const View* a, const View* b, Scalar number, const Array& out) {
  const int64_t n = out.size();
  const View& shaped = a != nullptr ? *a : *b;
  dispatch_kind<Op::kind>(shaped.array.dtype(), name, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using R = result_t<Op::kind, T>;
    constexpr int N = vector_length<T>();
    const accum_t<T> value = number.to<accum_t<T>>();
    Operand<T> x{a != nullptr ? a->array.data<T>() : nullptr, value};
    Operand<T> y{b != nullptr ? b->array.data<T>() : nullptr, value};
    R* z = out.data<R>();
    const auto in_vectors = [](const View* view, const T* data) {
      return view == nullptr || (view->contiguous() && aligned_for<Vec<T, N>>(data + view->offset));
    };
    const bool vectors =
        in_vectors(a, x.data) && in_vectors(b, y.data) && aligned_for<Vec<R, N>>(z);
    const auto walk = make_walk<2>(
        shaped.shape, {{a != nullptr ? &a->strides : nullptr, a != nullptr ? a->offset : 0},
                       {b != nullptr ? &b->strides : nullptr, b != nullptr ? b->offset : 0}});
    launch<ewise_binary_kernel<Op, T, R, N>>(grid_stride(vectors ? ceil_div(n, N) : n), x, y, z,
                                             walk, n, vectors);
  });
}

void binary_by_name(BinaryOp op, const View* a, const View* b, Scalar number, const Array& out) {
  if (out.size() == 0) return;
  switch (op) {
#define NEEDLE_BINARY(name, kind, expression) \
  case BinaryOp::name:                        \
    return binary<Binary<BinaryOp::name>>(#name, a, b, number, out);
#include "../common/ewise_ops.def"
  }
}

}  // namespace

void ewise_unary(UnaryOp op, const View& a, const Array& out) {
  if (out.size() == 0) return;
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
  if (n == 0) return;
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
