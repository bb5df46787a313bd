// Moving data: fill, arange, and copies between strided views with conversion between any two
// dtypes.
//
// out[out_strides . i + out_offset] = convert(a[a_strides . i + a_offset]). Copies of one dtype
// move bits; a transposition goes by tiles.
#include <algorithm>
#include <cstring>

#include "../common/backend.h"
#include "../common/lane_gemm_cpu.h"
#include "../common/parallel.h"
#include "../common/simd_cpu.h"
#include "../common/strided_cpu.h"

namespace needle::cpu {
namespace {

constexpr int64_t kGrain = 1 << 16;  // elements per task
constexpr int64_t kLeastAcross = 2;  // elements side by side in out that tiles are worth it for

template <class T>
void copy_row(const T* from, int64_t from_stride, T* to, int64_t to_stride, int64_t n) {
  if (from_stride == 1 && to_stride == 1)
    std::memmove(to, from, size_t(n) * sizeof(T));
  else if (from_stride == 0 && to_stride == 1)
    std::fill(to, to + n, *from);
  else if (from_stride == -1 && to_stride == 1)
    for (int64_t i = 0; i < n; ++i) to[i] = from[-i];
  else
    for (int64_t i = 0; i < n; ++i) to[i * to_stride] = from[i * from_stride];
}

template <class T>
void copy_walk(const T* from, T* to, const Walk<2>& walk) {
  const int64_t from_stride = walk.strides[0][0], to_stride = walk.strides[1][0];
  if (const int across = to_stride == 1 ? walk.across(0, kLeastAcross) : 0) {
    const int64_t to_row = walk.strides[1][across];
    return walk.tiles(across, kGrain, [&](const auto& at, int64_t rows, int64_t cols) {
      transpose_tile(from + at[0], from_stride, cols, rows, to + at[1], to_row);
    });
  }
  parallel_ranges(walk.size, kGrain, [&](int64_t begin, int64_t end) {
    walk.rows(begin, end, [&](int64_t count, const std::array<int64_t, 2>& at) {
      copy_row(from + at[0], from_stride, to + at[1], to_stride, count);
    });
  });
}

// --- conversion: only consecutive elements know both dtypes, strided ones are moved by their width
// to and from a piece of a row. A loop for each pair of dtypes and strides would take minutes to
// compile.

constexpr int64_t kPiece = 256;

using ConvertRow = void (*)(const char* from, char* to, int64_t n);
template <class From, class To>
void convert_row(const char* from, char* to, int64_t n) {
  convert_run(reinterpret_cast<const From*>(from), n, reinterpret_cast<To*>(to));
}

using MoveRow = void (*)(const char* from, int64_t from_stride, char* to, int64_t to_stride,
                         int64_t n);
template <class T>
void move_row(const char* from, int64_t from_stride, char* to, int64_t to_stride, int64_t n) {
  constexpr int64_t width = sizeof(T);
  for (int64_t i = 0; i < n; ++i)
    std::memcpy(to + i * to_stride * width, from + i * from_stride * width, sizeof(T));
}

using TransposeTile = void (*)(const char* from, int64_t ld_from, int64_t rows, int64_t cols,
                               char* to, int64_t ld_to);
template <class T>
void turn_tile(const char* from, int64_t ld_from, int64_t rows, int64_t cols, char* to,
               int64_t ld_to) {
  transpose_tile(reinterpret_cast<const T*>(from), ld_from, rows, cols, reinterpret_cast<T*>(to),
                 ld_to);
}

struct Conversion {
  ConvertRow convert;
  MoveRow gather, scatter;
  TransposeTile transpose;
  int64_t from_bytes, to_bytes;
};

Conversion conversion(DType from_dtype, DType to_dtype) {
  Conversion c{nullptr, nullptr, nullptr, nullptr, dtype_size(from_dtype), dtype_size(to_dtype)};
  dispatch_any(from_dtype, [&](auto from) {
    dispatch_any(to_dtype, [&](auto to) {
      using From = typename decltype(from)::type;
      using To = typename decltype(to)::type;
      c.convert = convert_row<From, To>;
    });
  });
  const auto mover = [](DType dtype) {
    MoveRow move = nullptr;
    dispatch_bytes(dtype_size(dtype),
                   [&](auto tag) { move = move_row<typename decltype(tag)::type>; });
    return move;
  };
  c.gather = mover(from_dtype);
  c.scatter = mover(to_dtype);
  dispatch_bytes(c.from_bytes,
                 [&](auto tag) { c.transpose = turn_tile<typename decltype(tag)::type>; });
  return c;
}

void convert_walk(const char* from, char* to, const Conversion& c, const Walk<2>& walk) {
  const int64_t from_stride = walk.strides[0][0], to_stride = walk.strides[1][0];
  if (const int across = to_stride == 1 ? walk.across(0, kLeastAcross) : 0) {
    const int64_t to_row = walk.strides[1][across];
    return walk.tiles(across, kGrain, [&](const auto& at, int64_t rows, int64_t cols) {
      alignas(64) char turned[kTileRows * kTileCols * 8];
      c.transpose(from + at[0] * c.from_bytes, from_stride, cols, rows, turned, cols);
      char* target = to + at[1] * c.to_bytes;
      if (to_row == cols) return c.convert(turned, target, rows * cols);
      for (int64_t i = 0; i < rows; ++i)
        c.convert(turned + i * cols * c.from_bytes, target + i * to_row * c.to_bytes, cols);
    });
  }
  parallel_ranges(walk.size, kGrain, [&](int64_t begin, int64_t end) {
    alignas(8) char gathered[kPiece * 8], converted[kPiece * 8];
    walk.rows(begin, end, [&](int64_t count, const std::array<int64_t, 2>& at) {
      const char* x = from + at[0] * c.from_bytes;
      char* y = to + at[1] * c.to_bytes;
      if (from_stride == 1 && to_stride == 1) return c.convert(x, y, count);
      for (int64_t i = 0; i < count; i += kPiece) {
        const int64_t n = std::min(kPiece, count - i);
        const char* piece = x + i * from_stride * c.from_bytes;
        if (from_stride != 1) c.gather(piece, from_stride, gathered, 1, n);
        char* target = y + i * to_stride * c.to_bytes;
        c.convert(from_stride == 1 ? piece : gathered, to_stride == 1 ? target : converted, n);
        if (to_stride != 1) c.scatter(converted, 1, target, to_stride, n);
      }
    });
  });
}

template <class T>
void fill_walk(T* to, const Walk<1>& walk, T value) {
  parallel_ranges(walk.size, kGrain, [&](int64_t begin, int64_t end) {
    walk.rows(begin, end, [&](int64_t count, const std::array<int64_t, 1>& at) {
      T* row = to + at[0];
      const int64_t stride = walk.strides[0][0];
      if (stride == 1)
        std::fill(row, row + count, value);
      else
        for (int64_t i = 0; i < count; ++i) row[i * stride] = value;
    });
  });
}

}  // namespace

void fill(const Array& out, Scalar value) { strided_fill(out, {1}, 0, {out.size()}, value); }

void arange(const Array& out) {
  dispatch_any(out.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    T* to = out.data<T>();
    parallel_ranges(out.size(), kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) to[i] = convert<T>(i);
    });
  });
}

void strided_copy(const Array& a, const Dims& a_strides, int64_t a_offset, const Array& out,
                  const Dims& out_strides, int64_t out_offset, const Dims& shape) {
  const Walk<2> walk(shape, {&a_strides, &out_strides});
  if (walk.size == 0) return;
  if (a.dtype() == out.dtype()) {
    dispatch_bytes(dtype_size(a.dtype()), [&](auto tag) {
      using T = typename decltype(tag)::type;
      copy_walk(static_cast<const T*>(a.ptr()) + a_offset, static_cast<T*>(out.ptr()) + out_offset,
                walk);
    });
    return;
  }
  const Conversion c = conversion(a.dtype(), out.dtype());
  convert_walk(static_cast<const char*>(a.ptr()) + a_offset * c.from_bytes,
               static_cast<char*>(out.ptr()) + out_offset * c.to_bytes, c, walk);
}

void strided_fill(const Array& out, const Dims& strides, int64_t offset, const Dims& shape,
                  Scalar value) {
  const Walk<1> walk(shape, {&strides});
  if (walk.size == 0) return;
  // By width, as copies are: g++ fills with one element of a class type after the other.
  dispatch_any(out.dtype(), [&](auto tag) {
    const auto element = value.to<typename decltype(tag)::type>();
    dispatch_bytes(sizeof element, [&](auto width) {
      using Bits = typename decltype(width)::type;
      if constexpr (sizeof(Bits) == sizeof element) {
        Bits bits;
        std::memcpy(&bits, &element, sizeof bits);
        fill_walk(static_cast<Bits*>(out.ptr()) + offset, walk, bits);
      }
    });
  });
}

}  // namespace needle::cpu
