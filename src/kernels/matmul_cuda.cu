// out[batch] = op(a[batch]) @ op(b[batch]) on a GPU, or += with accumulate.
//
// One block of threads forms one tile of one matrix of the batch: matmul_kernel by
// tile_product_cuda.cuh, matmul_mma_kernel by tensor_core_product_cuda.cuh (16-bit floats, compute
// capability 8.0 and later, rows aligned to 16 bytes). Sums run over k in ascending order in
// float32 (float64 for float64), so the grid does not change a result.
#include "tensor_core_product_cuda.cuh"

namespace needle::NEEDLE_DEVICE {
namespace {

template <class T>
struct MatmulArguments {
  const T *a, *b;
  void* out;  // of T, or of float where `float_out`
  int64_t lda, ldb, m, k, n, batches;
  bool trans_a, trans_b, accumulate, float_out;
  Walk<2> batch;  // offsets of a's and b's matrices
};

template <class Product>
__device__ void matmul_tiles(const MatmulArguments<typename Product::T>& g) {
  using T = typename Product::T;
  const int64_t row_tiles = ceil_div(g.m, Product::kRows),
                col_tiles = ceil_div(g.n, Product::kCols);
  for (int64_t t = blockIdx.x; t < g.batches * row_tiles * col_tiles; t += gridDim.x) {
    const int64_t item = t / (row_tiles * col_tiles);
    const int64_t row0 = t / col_tiles % row_tiles * Product::kRows;
    const int64_t col0 = t % col_tiles * Product::kCols;
    const auto at = g.batch(item);
    const auto a = submatrix(matrix_ref(g.a + at.of[0], g.lda, g.trans_a), row0, 0);
    const auto b = submatrix(matrix_ref(g.b + at.of[1], g.ldb, g.trans_b), 0, col0);
    Product product;
    product.add(g.m - row0, g.n - col0, int(ceil_div(g.k, Product::kDepth)), [&](int s) {
      const int64_t k0 = int64_t(s) * Product::kDepth;
      return Slice<T>{submatrix(a, 0, k0), submatrix(b, k0, 0), g.k - k0};
    });
    const auto write = [&](auto* out) {
      out += (item * g.m + row0) * g.n + col0;
      product.for_each_run([&](int row, int col, const auto& sums) {
        if (row0 + row < g.m)
          store_run(out + row * g.n + col, sums, g.n - col0 - col, g.accumulate);
      });
    };
    if constexpr (sizeof(T) == 2) {
      if (g.float_out) {
        write(static_cast<float*>(g.out));
        continue;
      }
    }
    write(static_cast<T*>(g.out));
  }
}

template <class Product>
__global__ void __launch_bounds__(Product::kThreads)
    matmul_kernel(MatmulArguments<typename Product::T> g) {
  matmul_tiles<Product>(g);
}

// The same on tensor cores, under a name of its own to be counted by.
template <class Product>
__global__ void __launch_bounds__(Product::kThreads)
    matmul_mma_kernel(MatmulArguments<typename Product::T> g) {
  ptx::with_tensor_cores([&] { matmul_tiles<Product>(g); });
}

template <class Product, class T>
int64_t tiles_of(const MatmulArguments<T>& g) {
  return ceil_div(g.m, Product::kRows) * ceil_div(g.n, Product::kCols) * g.batches;
}
template <class Product, class T>
LaunchConfig config_of(const MatmulArguments<T>& g) {
  return grid_of(blocks_for(tiles_of<Product>(g)), Product::kThreads);
}

template <class T>
bool fits_tensor_cores(const MatmulArguments<T>& g) {
  bool fits = may_use_tensor_cores() && copies_in_chunks(g.a + g.batch.offset[0], g.lda) &&
              copies_in_chunks(g.b + g.batch.offset[1], g.ldb);
  for (int d = 0; d < g.batch.ndim; ++d)
    fits = fits && g.batch.strides[0][d] % kChunk == 0 && g.batch.strides[1][d] % kChunk == 0;
  return fits;
}

// The largest tile that still gives every multiprocessor one.
template <class T>
void run(const MatmulArguments<T>& g) {
  const bool wide = g.m > 64 && g.n > 64, medium = g.m > 32 && g.n > 32;
  if constexpr (sizeof(T) == 2) {
    if (fits_tensor_cores(g)) {
      using Large = TensorCoreProduct<T, 128, 128, 2, 4>;
      using Medium = TensorCoreProduct<T, 64, 64, 2, 2>;
      using Small = TensorCoreProduct<T, 32, 32, 2, 2>;
      if (wide && tiles_of<Large>(g) >= multiprocessors())
        return launch<matmul_mma_kernel<Large>>(config_of<Large>(g), g);
      if (medium) return launch<matmul_mma_kernel<Medium>>(config_of<Medium>(g), g);
      return launch<matmul_mma_kernel<Small>>(config_of<Small>(g), g);
    }
  }
  if constexpr (sizeof(T) <= 4 && !std::is_integral<T>::value) {
    using Large = TileProduct<T, 128>;
    if (wide && tiles_of<Large>(g) >= multiprocessors())
      return launch<matmul_kernel<Large>>(config_of<Large>(g), g);
  }
  using Medium = TileProduct<T, 64>;
  using Small = TileProduct<T, 32>;
  if (medium) return launch<matmul_kernel<Medium>>(config_of<Medium>(g), g);
  launch<matmul_kernel<Small>>(config_of<Small>(g), g);
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
    const bool float_out = sizeof(T) == 2 && out.dtype() == DType::kFloat32;
    run(MatmulArguments<T>{a.data<T>(), b.data<T>(),
                           float_out ? static_cast<void*>(out.data<float>()) : out.data<T>(), lda,
                           ldb, m, k, n, batches, trans_a, trans_b, accumulate, float_out, batch});
  });
}

}  // namespace needle::NEEDLE_DEVICE
