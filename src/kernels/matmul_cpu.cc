// Matrix products: out[batch] = op(a[batch]) @ op(b[batch]), or += with accumulate.
//
// A few rows times a matrix (few_rows_cpu.h), or a matrix times a vector, is a matter of reading
// the matrix. Large products go to needle's own kernel where that is the faster (gemm_cpu.h). Deep
// ones with a small result are cut into parts of k, whose sums are added in order. Others are cut
// into tiles of `out`, by the shape alone, and the pool hands them out; each is one single-threaded
// GEMM, by lane_gemm where it is small. 16-bit floats are converted to float32 piece by piece for
// it, in buffers of fixed size, one set per thread; bfloat16 is not where it goes by the
// processor's tiles (bfloat16_cpu.h). The product of 16-bit floats may stay in float32.
#include <algorithm>

#include "../common/backend.h"
#include "../common/bfloat16_cpu.h"
#include "../common/few_rows_cpu.h"
#include "../common/gemm_cpu.h"
#include "../common/integers.h"
#include "../common/lane_gemm_cpu.h"
#include "../common/parallel.h"
#include "../common/simd_cpu.h"

namespace needle::cpu {
namespace {

constexpr int64_t kTaskFlops = 4 << 20;  // below this a task is not worth handing out
constexpr int64_t kEnoughTiles = 16;     // tiles that keep a pool of usual size evenly busy
// Operations of a tile, and its depth, that outweigh what the processor's own tiles cost besides.
constexpr int64_t kLeastByTiles = 1 << 15, kLeastDepthByTiles = 32;
constexpr int64_t kWidest = 1024;    // side of the largest tile
constexpr int64_t kHalfSide = 256;   // the same for 16-bit floats, and the depth of their pieces
constexpr int64_t kParts = 8;        // into which a deep product is cut, at most
constexpr int64_t kPartDepth = 512;  // the least k of a part
// Multiply-adds of vectors that take no longer than a call: fewer where the last columns are stored
// one by one, more again where a BLAS would transpose B.
constexpr int64_t kSmall = kStoresSome ? 1024 : 64, kSmallTurned = kStoresSome ? 1024 : 512;
constexpr int64_t kTurned = 1024;        // elements of a small B that are transposed, at most
constexpr int64_t kCall = 8 << 10;       // the time that a product takes besides, in operations
constexpr int64_t kReadTask = 64 << 10;  // elements of A, below which a task is not worth it either
constexpr int64_t kPartialSums = 32 << 10;  // elements of all parts: they are added by one thread

struct Product {
  int64_t m, k, n, lda, ldb;
  bool trans_a, trans_b, accumulate;
};

// Large tiles spend less time on packing, many tiles balance better: halve the longer side while
// there are too few.
struct Tiling {
  int64_t rows, cols, down, across;
  Tiling(const Product& p, int64_t batch, int64_t widest)
      : rows(std::min(p.m, widest)), cols(std::min(p.n, widest)) {
    const auto count = [&] { return batch * ceil_div(p.m, rows) * ceil_div(p.n, cols); };
    while (count() < kEnoughTiles && std::max(rows, cols) > 64 && rows * cols * p.k >= kTaskFlops) {
      int64_t& side = rows >= cols ? rows : cols;
      side = round_up(ceil_div(side, 2), 32);
    }
    down = ceil_div(p.m, rows);
    across = ceil_div(p.n, cols);
  }
};

// Element (i, j) of op(x): where it is stored.
int64_t place(bool trans, int64_t i, int64_t j, int64_t ld) {
  return trans ? j * ld + i : i * ld + j;
}

// to (rows, cols), packed = the part of x (row stride ld) that starts at `from`.
template <class T>
void widen(const T* from, int64_t ld, int64_t rows, int64_t cols, float* to) {
  for (int64_t i = 0; i < rows; ++i) convert_run(from + i * ld, cols, to + i * cols);
}

// A tile that takes lane_gemm less time than a BLAS, which packs both operands.
template <class T>
bool is_small(const Product& p, int64_t rows, int64_t cols) {
  const int64_t vectors = rows * p.k * ceil_div(cols, int64_t(kLanes<T>));
  if (!p.trans_b) return vectors <= kSmall;
  return vectors <= kSmallTurned && cols * p.k <= std::min(64 * rows, kTurned);
}

// One tile: rows i0 .. i0 + rows and columns j0 .. j0 + cols of out.
template <class T, class Out>
void tile(const Product& p, const T* a, const T* b, Out* out, int64_t i0, int64_t rows, int64_t j0,
          int64_t cols) {
  if constexpr (std::is_floating_point_v<T>) {
    a += place(p.trans_a, i0, 0, p.lda);
    b += place(p.trans_b, 0, j0, p.ldb);
    out += i0 * p.n + j0;
    if (!is_small<T>(p, rows, cols))
      return gemm_tile(p.trans_a, p.trans_b, rows, cols, p.k, a, p.lda, b, p.ldb, p.accumulate, out,
                       p.n);
    T turned[kTurned];
    if (p.trans_b) transpose_tile(b, p.ldb, cols, p.k, turned, cols);
    lane_gemm(rows, cols, p.k, a, p.trans_a ? 1 : p.lda, p.trans_a ? p.lda : 1,
              p.trans_b ? turned : b, p.trans_b ? cols : p.ldb, out, p.n, p.accumulate);
  } else if constexpr (sizeof(T) == 2) {
    if (by_tiles<T>() && p.k >= kLeastDepthByTiles && rows * cols * p.k >= kLeastByTiles)
      return gemm_own(p.trans_a, p.trans_b, rows, cols, p.k, a + place(p.trans_a, i0, 0, p.lda),
                      p.lda, b + place(p.trans_b, 0, j0, p.ldb), p.ldb, p.accumulate,
                      out + i0 * p.n + j0, p.n);
    struct Wide {
      alignas(64) float a[kHalfSide * kHalfSide], b[kHalfSide * kHalfSide],
          c[kHalfSide * kHalfSide];
    };
    Wide& wide = of_this_thread<Wide>();
    constexpr bool kInPlace = std::is_same_v<Out, float>;
    float* sum = wide.c;
    int64_t ld = cols;
    if constexpr (kInPlace)
      sum = out + i0 * p.n + j0, ld = p.n;
    else if (p.accumulate)
      widen(out + i0 * p.n + j0, p.n, rows, cols, sum);
    for (int64_t k0 = 0; k0 < p.k; k0 += kHalfSide) {
      const int64_t depth = std::min(kHalfSide, p.k - k0);
      widen(a + place(p.trans_a, i0, k0, p.lda), p.lda, p.trans_a ? depth : rows,
            p.trans_a ? rows : depth, wide.a);
      widen(b + place(p.trans_b, k0, j0, p.ldb), p.ldb, p.trans_b ? cols : depth,
            p.trans_b ? depth : cols, wide.b);
      gemm_tile(p.trans_a, p.trans_b, rows, cols, depth, wide.a, p.trans_a ? rows : depth, wide.b,
                p.trans_b ? depth : cols, k0 > 0 || p.accumulate, sum, ld);
    }
    if constexpr (!kInPlace)
      for (int64_t i = 0; i < rows; ++i)
        convert_run(sum + i * cols, cols, out + (i0 + i) * p.n + j0);
  } else {
    for (int64_t i = i0; i < i0 + rows; ++i) {
      T* row = out + i * p.n + j0;
      if (!p.accumulate) std::fill(row, row + cols, T(0));
      for (int64_t k = 0; k < p.k; ++k) {
        const T factor = a[place(p.trans_a, i, k, p.lda)];
        const T* from = b + place(p.trans_b, k, j0, p.ldb);
        const int64_t step = p.trans_b ? p.ldb : 1;
        for (int64_t j = 0; j < cols; ++j) row[j] = T(row[j] + factor * from[j * step]);
      }
    }
  }
}

int64_t batch_offset(int64_t item, const Dims& shape, const Dims& strides) {
  int64_t offset = 0;
  for (size_t d = shape.size(); d-- > 0; item /= shape[d]) offset += item % shape[d] * strides[d];
  return offset;
}

// One b for every item of the batch, and the items of a follow each other: one tall product.
bool one_tall_product(const Product& p, const Dims& shape, const Dims& a_strides,
                      const Dims& b_strides) {
  if (p.trans_a) return false;
  int64_t next = p.m * p.lda;
  for (size_t d = shape.size(); d-- > 0; next *= shape[d])
    if (shape[d] > 1 && (b_strides[d] != 0 || a_strides[d] != next)) return false;
  return true;
}

// Into how many parts of k a product is cut: a deep one of few elements, since every tile of those
// would read all of A or of B, from other cores' caches too.
int64_t parts_of(const Product& p) {
  return std::min(
      {kParts, kPartialSums / (p.m * p.n), p.k / kPartDepth, 2 * p.m * p.n * p.k / kTaskFlops});
}

template <class T>
void multiply_by_parts(const Product& p, int64_t parts, const T* a, const T* b, T* out) {
  add_parts<kPartialSums>(parts, p.m * p.n, p.accumulate, out, [&](int64_t part, T* to) {
    const int64_t k0 = part * p.k / parts;
    Product piece = p;
    piece.k = (part + 1) * p.k / parts - k0;
    piece.accumulate = false;
    tile(piece, a + place(p.trans_a, 0, k0, p.lda), b + place(p.trans_b, k0, 0, p.ldb), to, 0, p.m,
         0, p.n);
  });
}

// to[r] = dot of row r of a and b, for kAtOnce rows: their sums do not wait for each other.
constexpr int64_t kAtOnce = 4;
template <class T, class A = accum_t<T>>
void dots(const T* a, int64_t lda, const T* b, int64_t k, A* to) {
  Vec<A> sums[kAtOnce] = {};
  for_vectors<A>(k, [&](int64_t p, auto... lanes) {
    const Vec<A> factor = load(b + p, lanes...);
    for (int r = 0; r < kAtOnce; ++r) sums[r] += load(a + r * lda + p, lanes...) * factor;
  });
  for (int r = 0; r < kAtOnce; ++r) to[r] = sum_lanes<A>(sums[r]);
}

// Of a product with one column, which is a matter of reading A. Not where rows of A are so short
// that adding up a vector's lanes is most of the work, or b has gaps.
template <class T>
bool times_vector(const Product& p) {
  return p.n == 1 && (p.trans_a || ((p.trans_b || p.ldb == 1) && p.k >= 8 * kLanes<accum_t<T>>));
}

// out (m) = or += op(a) times a vector.
template <class T, class Out>
void multiply_vector(const Product& p, const T* a, const T* b, Out* out) {
  if (p.trans_a)
    return few_rows_gemm(1, p.m, p.k, b, 0, p.trans_b ? 1 : p.ldb, a, p.lda, p.accumulate, out);
  parallel_ranges(p.m, kReadTask / p.k + kAtOnce, [&](int64_t begin, int64_t end) {
    accum_t<T> found[kAtOnce];
    for (int64_t i = begin; i < end; i += kAtOnce) {
      const int64_t rows = std::min(kAtOnce, end - i);
      const T* const from = a + i * p.lda;
      if (rows == kAtOnce)
        dots(from, p.lda, b, p.k, found);
      else
        for (int64_t r = 0; r < rows; ++r) found[r] = dot(from + r * p.lda, b, p.k);
      for (int64_t r = 0; r < rows; ++r)
        out[i + r] = Out(p.accumulate ? accum_t<T>(out[i + r]) + found[r] : found[r]);
    }
  });
}

template <class T, class Out>
void multiply(Product p, const T* a, const Dims& a_strides, const T* b, const Dims& b_strides,
              Out* out, const Dims& shape) {
  int64_t batch = size_of(shape);
  if (batch * p.m * p.n == 0) return;
  if (p.k == 0) {
    if (!p.accumulate) std::fill(out, out + batch * p.m * p.n, Out(0.f));
    return;
  }
  if (batch > 1 && one_tall_product(p, shape, a_strides, b_strides)) {
    p.m *= batch;
    batch = 1;
  }
  const auto at = [&](const T* x, const Dims& strides, int64_t item) {
    return x + (batch > 1 ? batch_offset(item, shape, strides) : 0);
  };
  if constexpr (is_float(DTypeOf<T>::value)) {
    if (batch == 1 && times_vector<T>(p))
      return multiply_vector(p, at(a, a_strides, 0), at(b, b_strides, 0), out);
    if (batch == 1 && few_rows_pay<T>(p.m, p.n, p.k) && !p.trans_b) {
      few_rows_gemm(p.m, p.n, p.k, at(a, a_strides, 0), p.trans_a ? 1 : p.lda,
                    p.trans_a ? p.lda : 1, at(b, b_strides, 0), p.ldb, p.accumulate, out);
      return;
    }
    if constexpr (std::is_floating_point_v<T>)
      if (const int64_t parts = parts_of(p);
          batch == 1 && parts > 1 &&
          !(kVectorBytes == 64 && p.n >= 256 && gemm_own_pays<T>(batch, p.m, p.n, p.k)))
        return multiply_by_parts(p, parts, at(a, a_strides, 0), at(b, b_strides, 0), out);
    if (gemm_own_pays<T>(batch, p.m, p.n, p.k)) {
      for (int64_t item = 0; item < batch; ++item)
        gemm_own(p.trans_a, p.trans_b, p.m, p.n, p.k, at(a, a_strides, item), p.lda,
                 at(b, b_strides, item), p.ldb, p.accumulate, out + item * p.m * p.n, p.n);
      return;
    }
  }
  const Tiling tiling(p, batch, sizeof(T) == 2 ? kHalfSide : kWidest);
  const int64_t per_item = tiling.down * tiling.across;
  const int64_t grain =
      std::max<int64_t>(1, kTaskFlops / (2 * tiling.rows * tiling.cols * p.k + kCall));
  parallel_ranges(batch * per_item, grain, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t item = task / per_item, place = task % per_item;
      const int64_t i0 = place % tiling.down * tiling.rows, j0 = place / tiling.down * tiling.cols;
      tile(p, at(a, a_strides, item), at(b, b_strides, item), out + item * p.m * p.n, i0,
           std::min(tiling.rows, p.m - i0), j0, std::min(tiling.cols, p.n - j0));
    }
  });
}

}  // namespace

void matmul(const Array& a, int64_t a_offset, const Dims& a_batch_strides, int64_t lda,
            bool trans_a, const Array& b, int64_t b_offset, const Dims& b_batch_strides,
            int64_t ldb, bool trans_b, const Array& out, const Dims& batch_shape, int64_t m,
            int64_t k, int64_t n, bool accumulate) {
  if (a_batch_strides.size() != batch_shape.size() || b_batch_strides.size() != batch_shape.size())
    throw std::invalid_argument("[matmul] batch strides and batch shape differ in length");
  // BLAS wants a row stride of at least the row's length, even where there is one row only.
  const Product p{m,
                  k,
                  n,
                  std::max({lda, trans_a ? m : k, int64_t(1)}),
                  std::max({ldb, trans_b ? k : n, int64_t(1)}),
                  trans_a,
                  trans_b,
                  accumulate};
  if ((p.lda != lda && (trans_a ? k : m) > 1) || (p.ldb != ldb && (trans_b ? n : k) > 1))
    throw std::invalid_argument("[matmul] a row stride is shorter than its row");
  dispatch_num(a.dtype(), "matmul", [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto into = [&](auto* to) {
      multiply(p, static_cast<const T*>(a.data<T>()) + a_offset, a_batch_strides,
               static_cast<const T*>(b.data<T>()) + b_offset, b_batch_strides, to, batch_shape);
    };
    if constexpr (sizeof(T) == 2)
      if (out.dtype() == DType::kFloat32) return into(out.data<float>());
    into(out.data<T>());
  });
}

// The course's tiled product: out (m/8, p/8, 8, 8) = a (m/8, n/8, 8, 8) @ b (n/8, p/8, 8, 8); m, n,
// p are multiples of 8. One tile of out stays in registers while the tiles of a row of a and a
// column of b go by.
void matmul_tiled(const Array& a, const Array& b, const Array& out, int64_t m, int64_t n,
                  int64_t p) {
  constexpr int64_t kSide = 8, kTile = kSide * kSide;
  if (m % kSide || n % kSide || p % kSide)
    throw std::invalid_argument("[matmul_tiled] sizes are no multiples of 8: " + std::to_string(m) +
                                ", " + std::to_string(n) + ", " + std::to_string(p));
  if (a.size() < m * n || b.size() < n * p || out.size() < m * p)
    throw std::out_of_range("[matmul_tiled] an array is smaller than its shape says");
  const int64_t rows = m / kSide, inner = n / kSide, cols = p / kSide;
  const float *x = a.data<float>(), *y = b.data<float>();
  float* to = out.data<float>();
  const int64_t grain = std::max<int64_t>(1, kTaskFlops / (2 * kTile * std::max<int64_t>(n, 1)));
  parallel_ranges(rows * cols, grain, [&](int64_t begin, int64_t end) {
    typedef float Row __attribute__((vector_size(kSide * sizeof(float)), aligned(4), may_alias));
    for (int64_t at = begin; at < end; ++at) {
      Row sum[kSide] = {};
      for (int64_t q = 0; q < inner; ++q) {
        const float* x_tile = x + (at / cols * inner + q) * kTile;
        const Row* y_tile = reinterpret_cast<const Row*>(y + (q * cols + at % cols) * kTile);
#pragma GCC unroll 8
        for (int64_t k = 0; k < kSide; ++k)
#pragma GCC unroll 8
          for (int64_t i = 0; i < kSide; ++i) sum[i] += x_tile[i * kSide + k] * y_tile[k];
      }
      for (int64_t i = 0; i < kSide; ++i)
        *reinterpret_cast<Row*>(to + at * kTile + i * kSide) = sum[i];
    }
  });
}

}  // namespace needle::cpu
