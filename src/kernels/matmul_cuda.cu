// out[batch] = op(a[batch]) @ op(b[batch]) on a GPU, or += with accumulate.
//
// One block of threads forms one tile of one matrix of the batch (tile_product_cuda.cuh). Sums run
// over k in ascending order in float32 (float64 for float64), so neither the tile size nor the grid
// changes a result.
#include "tile_product_cuda.cuh"

namespace needle::NEEDLE_DEVICE {
namespace {

template <class T, class Out>
struct MatmulArguments {
  const T *a, *b;
  Out* out;
  int64_t lda, ldb, m, k, n, batches;
  bool trans_a, trans_b, accumulate;
  Walk<2> batch;  // offsets of a's and b's matrices
};

template <class Product, class Out>
__device__ void matmul_tiles(const MatmulArguments<typename Product::T, Out>& g) {
  constexpr int kTile = Product::kTile;
  const int64_t row_tiles = ceil_div(g.m, kTile), col_tiles = ceil_div(g.n, kTile);
  for (int64_t t = blockIdx.x; t < g.batches * row_tiles * col_tiles; t += gridDim.x) {
    const int64_t item = t / (row_tiles * col_tiles);
    const int64_t row0 = t / col_tiles % row_tiles * kTile, col0 = t % col_tiles * kTile;
    const auto at = g.batch(item);
    Product product;
    product.add(submatrix(matrix_ref(g.a + at.of[0], g.lda, g.trans_a), row0, 0),
                submatrix(matrix_ref(g.b + at.of[1], g.ldb, g.trans_b), 0, col0), g.m - row0,
                g.n - col0, g.k);
    Out* out = g.out + (item * g.m + row0) * g.n + col0;
    product.for_each([&](int row, int col, typename Product::A value) {
      if (row0 + row >= g.m || col0 + col >= g.n) return;
      using A = accum_t<Out>;
      Out& target = out[row * g.n + col];
      target = Out(g.accumulate ? A(target) + A(value) : A(value));
    });
  }
}

template <class Product, class Out>
__global__ void __launch_bounds__(Product::kThreads)
    matmul_kernel(MatmulArguments<typename Product::T, Out> g) {
  matmul_tiles<Product, Out>(g);
}

int64_t tiles_of(int64_t m, int64_t n, int64_t batches, int64_t tile) {
  return ceil_div(m, tile) * ceil_div(n, tile) * batches;
}

template <class Product, class Out>
void run(const MatmulArguments<typename Product::T, Out>& g) {
  const int64_t tiles = tiles_of(g.m, g.n, g.batches, Product::kTile);
  launch<matmul_kernel<Product, Out>>(grid_of(blocks_for(tiles), Product::kThreads), g);
}

}  // namespace

void matmul(const Array& a, int64_t a_offset, const Dims& a_batch_strides, int64_t lda,
            bool trans_a, const Array& b, int64_t b_offset, const Dims& b_batch_strides,
            int64_t ldb, bool trans_b, const Array& out, const Dims& batch_shape, int64_t m,
            int64_t k, int64_t n, bool accumulate) {
  if (out.size() == 0) return;
  int64_t batches = 1;
  for (int64_t d : batch_shape) batches *= d;
  const auto batch =
      make_walk<2>(batch_shape, {{&a_batch_strides, a_offset}, {&b_batch_strides, b_offset}});
  dispatch_num(a.dtype(), "matmul", [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto into = [&](auto* to) {
      using Out = std::remove_pointer_t<decltype(to)>;
      const MatmulArguments<T, Out> g{a.data<T>(), b.data<T>(), to,      lda,        ldb,  m, k, n,
                                      batches,     trans_a,     trans_b, accumulate, batch};
      // The largest tile that still gives every multiprocessor one.
      if (sizeof(T) <= 4 && !std::is_integral<T>::value &&
          tiles_of(m, n, batches, 128) >= multiprocessors() && m > 64 && n > 64) {
        if constexpr (sizeof(T) <= 4 && !std::is_integral<T>::value)
          run<TileProduct<T, 128>, Out>(g);
      } else if (m > 32 && n > 32) {
        run<TileProduct<T, 64>, Out>(g);
      } else {
        run<TileProduct<T, 32>, Out>(g);
      }
    };
    if constexpr (sizeof(T) == 2) {
      if (out.dtype() == DType::kFloat32) return into(out.data<float>());
    }
    into(out.data<T>());
  });
}

}  // namespace needle::NEEDLE_DEVICE
