// out[batch] = op(a[batch]) @ op(b[batch]) on a GPU, or += with accumulate: by cuBLASLt where that
// is open (cublaslt.h), else by the kernels here.
//
// One block of threads forms one tile of one matrix of the batch: matmul_kernel by
// tile_product_cuda.cuh, matmul_mma_kernel by tensor_core_product_cuda.cuh (16-bit floats, compute
// capability 8.0 and later, rows aligned to 16 bytes). Sums run over k in ascending order in
// float32 (float64 for float64), so the grid does not change a result.
//
// Where `out` has few tiles and k is long, as in the gradient of a weight or the product of a
// single row, k is cut into equal parts, which are items of a larger batch and are added up
// afterwards, in their order. The cut depends on the shape alone.
#include "../common/cublaslt.h"
#include "products_cuda.cuh"

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
    product.add(g.m - row0, g.n - col0, along(a, b), int(ceil_div(g.k, Product::kDepth)),
                Slices<Product::kDepth, T>(a, b, g.k));
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

template <class T>
bool fits_tensor_cores(const MatmulArguments<T>& g) {
  bool fits = may_use_tensor_cores() && copies_in_chunks(g.a + g.batch.offset[0], g.lda) &&
              copies_in_chunks(g.b + g.batch.offset[1], g.ldb);
  for (int d = 0; d < g.batch.ndim; ++d)
    fits = fits && g.batch.strides[0][d] % kChunk == 0 && g.batch.strides[1][d] % kChunk == 0;
  return fits;
}

template <class T>
void run(const MatmulArguments<T>& g) {
  if (g.k > INT32_MAX)  // products count it in 32 bits
    throw std::invalid_argument("[matmul] an inner dimension of " + std::to_string(g.k) +
                                " has no kernel on this device (less than 2^31)");
  with_product<T>(g.m, g.n, g.batches, fits_tensor_cores(g), [&](auto choice) {
    using Product = typename decltype(choice)::Product;
    if constexpr (Product::kTensorCores)
      launch<matmul_mma_kernel<Product>>(choice.config(), g);
    else
      launch<matmul_kernel<Product>>(choice.config(), g);
  });
}

// The parts are whole slices of every product, of which none is deeper than 32.
int64_t parts_of(int64_t outputs, int64_t tiles_of_64, int64_t k, int64_t item_bytes) {
  int64_t parts = most_parts(outputs, tiles_of_64, k, item_bytes);
  while (parts > 1 && k % (parts * 32) != 0) --parts;
  return parts;
}

const void* address(const Array& x, int64_t offset) {
  return static_cast<const char*>(x.ptr()) + offset * dtype_size(x.dtype());
}

}  // namespace

void matmul(const Array& a, int64_t a_offset, const Dims& a_batch_strides, int64_t lda,
            bool trans_a, const Array& b, int64_t b_offset, const Dims& b_batch_strides,
            int64_t ldb, bool trans_b, const Array& out, const Dims& batch_shape, int64_t m,
            int64_t k, int64_t n, bool accumulate) {
  const int64_t batches = size_of(batch_shape), outputs = batches * m * n;
  if (outputs == 0) return;
  const auto batch =
      make_walk<2>(batch_shape, {{&a_batch_strides, a_offset}, {&b_batch_strides, b_offset}});
  const auto batch_stride = [&](int operand) {
    return batch.ndim == 0 ? 0 : batch.strides[operand][0];
  };
  if (batch.ndim <= 1 &&
      multiply_by_cublaslt({a.dtype(),
                            {address(a, batch.offset[0]), lda, trans_a, batch_stride(0)},
                            {address(b, batch.offset[1]), ldb, trans_b, batch_stride(1)},
                            out.ptr(),
                            out.dtype(),
                            m,
                            k,
                            n,
                            batches,
                            accumulate}))
    return;
  dispatch_num(a.dtype(), "matmul", [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = accum_t<T>;
    const auto into = [&](auto* to) {
      using Out = std::remove_pointer_t<decltype(to)>;
      MatmulArguments<T> g{};
      g.a = a.data<T>(), g.b = b.data<T>(), g.out = to, g.lda = lda, g.ldb = ldb;
      g.m = m, g.k = k, g.n = n, g.batches = batches, g.batch = batch;
      g.trans_a = trans_a, g.trans_b = trans_b, g.accumulate = accumulate;
      g.float_out = !std::is_same<T, Out>::value;
      const int64_t parts =
          parts_of(outputs, batches * ceil_div(m, 64) * ceil_div(n, 64), k, int64_t(sizeof(A)));
      if (parts == 1) return run(g);
      const Scratch held = scratch(parts * outputs * int64_t(sizeof(A)));
      A* const products = static_cast<A*>(held.memory);
      Dims shape = batch_shape, a_strides = a_batch_strides, b_strides = b_batch_strides;
      shape.insert(shape.begin(), parts);
      a_strides.insert(a_strides.begin(), k / parts * (trans_a ? lda : 1));
      b_strides.insert(b_strides.begin(), k / parts * (trans_b ? 1 : ldb));
      g.batch = make_walk<2>(shape, {{&a_strides, a_offset}, {&b_strides, b_offset}});
      g.out = products, g.float_out = !std::is_same<T, A>::value, g.accumulate = false;
      g.k = k / parts, g.batches = batches * parts;
      run(g);
      launch<sum_parts_kernel<A, Out>>(grid_stride(outputs), static_cast<const A*>(products), to,
                                       parts, outputs, accumulate);
    };
    if constexpr (sizeof(T) == 2) {
      if (out.dtype() == DType::kFloat32) return into(out.data<float>());
    }
    into(out.data<T>());
  });
}

}  // namespace needle::NEEDLE_DEVICE
