// Convolution on a GPU: each window of an image times the kernel, and the kernel's gradient, each
// window times its gradient.
//
// Products of matrices by tile_product_cuda.cuh and, of 16-bit floats whose channels are multiples
// of eight, tensor_core_product_cuda.cuh, which read the windows where they lie in the image: there
// is no array of them. (Implicit GEMM; Chetlur et al. 2014, cuDNN.) Sums are in the order of
// matmul_cuda.cu's; the gradient's, over all windows, are cut into parts, which are added up in
// their order.
#include "../common/windows.h"
#include "products_cuda.cuh"

namespace needle::NEEDLE_DEVICE {
namespace {

template <class T>
struct ConvArguments {
  const T *image, *other;  // the kernel (elements, outputs), or the gradient (windows, outputs)
  void* out;               // of T, or, of the gradient, of its sums
  bool accumulate;         // of the gradient
  int64_t windows, elements, outputs;
  int64_t parts, part;  // of how many windows each
  int64_t pixel_rows, row_length, row_before, row_stride, col_before, col_stride;
  uint32_t size;  // elements of a row of a window; as col_before and col_stride, times channels
  FastDivisor by_size, by_rows, by_cols;  // by_rows, by_cols: windows
};

// The windows as a matrix (windows, elements), from one of its elements on.
template <class T>
struct WindowRef {
  const ConvArguments<T>& g;
  int64_t window, element;

  // Where an element lies, or null where that is not in the image.
  __device__ const T* at(int64_t row, int64_t col) const {
    const auto w = uint32_t(window + row), e = uint32_t(element + col);
    const uint32_t line = g.by_cols.divide(w), image = g.by_rows.divide(line);
    const uint32_t row_of_window = g.by_size.divide(e);
    const int64_t y = int64_t(line - image * g.by_rows.divisor) * g.row_stride - g.row_before +
                      int64_t(row_of_window);
    const int64_t x = int64_t(w - line * g.by_cols.divisor) * g.col_stride - g.col_before +
                      int64_t(e - row_of_window * g.size);
    if (y < 0 || y >= g.pixel_rows || x < 0 || x >= g.row_length) return nullptr;
    return g.image + (image * g.pixel_rows + y) * g.row_length + x;
  }
  __device__ T operator()(int64_t row, int64_t col) const {
    const T* const from = at(row, col);
    return from ? *from : T{};
  }
};
template <class T>
__device__ WindowRef<T> submatrix(const WindowRef<T>& w, int64_t row, int64_t col) {
  return {w.g, w.window + row, w.element + col};
}

// The same transposed.
template <class T>
struct ElementRef {
  WindowRef<T> windows;
  __device__ T operator()(int64_t row, int64_t col) const { return windows(col, row); }
};
template <class T>
__device__ ElementRef<T> submatrix(const ElementRef<T>& e, int64_t row, int64_t col) {
  return {submatrix(e.windows, col, row)};
}

// The rows of a tile are windows: lines of it, or the depth.
template <bool Along, class T, int Cols>
__device__ void copy_operand(const SwizzledTile<T, Cols>& tile, int tile_rows, int threads,
                             const WindowRef<T>& windows, int lines, int depth) {
  tile.copy_chunks(tile_rows, threads, Along ? lines : depth, Along ? depth : lines,
                   windows.g.image, [&](int row, int col) { return windows.at(row, col); });
}
template <bool Along, class T, int Cols>
__device__ void copy_operand(const SwizzledTile<T, Cols>& tile, int tile_rows, int threads,
                             const ElementRef<T>& elements, int lines, int depth) {
  copy_operand<Along>(tile, tile_rows, threads, elements.windows, lines, depth);
}

// Slices of a, which is windows, and b.
template <int Depth, class A, class T>
__device__ auto slices_of(A a, MatrixRef<T> b, int64_t depth) {
  return [=, k = 0]() mutable {
    const Slice<A, MatrixRef<T>> slice{submatrix(a, 0, k), submatrix(b, k, 0), int(depth) - k};
    k += Depth;
    return slice;
  };
}

template <class Product>
__device__ void conv_forward_tiles(const ConvArguments<typename Product::T>& g) {
  using T = typename Product::T;
  const int64_t col_tiles = ceil_div(g.outputs, Product::kCols);
  for (int64_t t = blockIdx.x; t < ceil_div(g.windows, Product::kRows) * col_tiles;
       t += gridDim.x) {
    const int64_t row0 = t / col_tiles * Product::kRows, col0 = t % col_tiles * Product::kCols;
    const WindowRef<T> a{g, row0, 0};
    const auto b = matrix_ref(g.other + col0, g.outputs, false);
    Product product;
    product.add(g.windows - row0, g.outputs - col0, {true, false},
                int(ceil_div(g.elements, Product::kDepth)),
                slices_of<Product::kDepth>(a, b, g.elements));
    T* const out = static_cast<T*>(g.out) + row0 * g.outputs + col0;
    product.for_each_run([&](int row, int col, const auto& sums) {
      if (row0 + row < g.windows)
        store_run(out + row * g.outputs + col, sums, g.outputs - col0 - col);
    });
  }
}

template <class Product>
__device__ void conv_backward_tiles(const ConvArguments<typename Product::T>& g) {
  using T = typename Product::T;
  using A = accum_t<T>;
  const int64_t row_tiles = ceil_div(g.elements, Product::kRows),
                col_tiles = ceil_div(g.outputs, Product::kCols);
  for (int64_t t = blockIdx.x; t < g.parts * row_tiles * col_tiles; t += gridDim.x) {
    const int64_t part = t / (row_tiles * col_tiles), first = part * g.part;
    const int64_t row0 = t / col_tiles % row_tiles * Product::kRows;
    const int64_t col0 = t % col_tiles * Product::kCols;
    const int64_t depth = min(g.part, g.windows - first);
    const ElementRef<T> a{{g, first, row0}};
    const auto b = matrix_ref(g.other + first * g.outputs + col0, g.outputs, false);
    Product product;
    product.add(g.elements - row0, g.outputs - col0, {false, false},
                int(ceil_div(depth, Product::kDepth)), slices_of<Product::kDepth>(a, b, depth));
    A* const out = static_cast<A*>(g.out) + (part * g.elements + row0) * g.outputs + col0;
    product.for_each_run([&](int row, int col, const auto& sums) {
      if (row0 + row < g.elements)
        store_run(out + row * g.outputs + col, sums, g.outputs - col0 - col, g.accumulate);
    });
  }
}

template <class Product>
__global__ void __launch_bounds__(Product::kThreads)
    conv_forward_kernel(ConvArguments<typename Product::T> g) {
  conv_forward_tiles<Product>(g);
}
template <class Product>
__global__ void __launch_bounds__(Product::kThreads)
    conv_backward_kernel(ConvArguments<typename Product::T> g) {
  conv_backward_tiles<Product>(g);
}
// The same on tensor cores, under names of their own to be counted by.
template <class Product>
__global__ void __launch_bounds__(Product::kThreads)
    conv_forward_mma_kernel(ConvArguments<typename Product::T> g) {
  ptx::with_tensor_cores([&] { conv_forward_tiles<Product>(g); });
}
template <class Product>
__global__ void __launch_bounds__(Product::kThreads)
    conv_backward_mma_kernel(ConvArguments<typename Product::T> g) {
  ptx::with_tensor_cores([&] { conv_backward_tiles<Product>(g); });
}

template <class T>
ConvArguments<T> arguments(const Array& image, const Array& other, int64_t images, int64_t channels,
                           const Dims& along_rows, const Dims& along_cols, int64_t outputs) {
  const WindowAxis rows = window_axis(along_rows), cols = window_axis(along_cols);
  ConvArguments<T> g{};
  g.image = image.data<T>(), g.other = other.data<T>();
  g.windows = images * rows.windows * cols.windows, g.outputs = outputs;
  g.elements = rows.size * cols.size * channels;
  if (std::max(g.windows, g.elements) > INT32_MAX)  // which are divided in 32 bits
    throw std::invalid_argument("[conv] " + std::to_string(g.windows) + " windows of " +
                                std::to_string(g.elements) +
                                " elements have no kernel on this device (less than 2^31 each)");
  g.pixel_rows = rows.n, g.row_before = rows.before, g.row_stride = rows.stride;
  g.row_length = cols.n * channels, g.col_before = cols.before * channels;
  g.col_stride = cols.stride * channels, g.size = uint32_t(cols.size * channels);
  const auto divisor = [](int64_t n) { return FastDivisor(uint32_t(std::max<int64_t>(n, 1))); };
  g.by_size = divisor(g.size), g.by_rows = divisor(rows.windows), g.by_cols = divisor(cols.windows);
  return g;
}

// A chunk of channels is in the image as a whole, or not at all.
template <class T>
bool fits_tensor_cores(const ConvArguments<T>& g, int64_t channels) {
  return may_use_tensor_cores() && copies_in_chunks(g.image, channels) &&
         copies_in_chunks(g.other, g.outputs);
}

}  // namespace

void conv_forward(const Array& image, const Array& kernel, const Array& out, int64_t images,
                  int64_t channels, const Dims& rows, const Dims& cols, int64_t out_channels) {
  dispatch_num(image.dtype(), "conv", [&](auto tag) {
    using T = typename decltype(tag)::type;
    auto g = arguments<T>(image, kernel, images, channels, rows, cols, out_channels);
    g.out = out.data<T>();
    if (g.windows * g.outputs == 0) return;
    with_product<T>(g.windows, g.outputs, 1, fits_tensor_cores(g, channels), [&](auto choice) {
      using Product = typename decltype(choice)::Product;
      if constexpr (Product::kTensorCores)
        launch<conv_forward_mma_kernel<Product>>(choice.config(), g);
      else
        launch<conv_forward_kernel<Product>>(choice.config(), g);
    });
  });
}

void conv_backward(const Array& image, const Array& dy, const Array& dkernel, int64_t images,
                   int64_t channels, const Dims& rows, const Dims& cols, int64_t out_channels,
                   bool accumulate) {
  dispatch_num(image.dtype(), "conv", [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = accum_t<T>;
    auto g = arguments<T>(image, dy, images, channels, rows, cols, out_channels);
    const int64_t size = g.outputs * g.elements;
    if (size == 0) return;
    g.parts = most_parts(size, ceil_div(g.elements, 64) * ceil_div(g.outputs, 64), g.windows,
                         int64_t(sizeof(A)));
    g.part = std::max<int64_t>(ceil_div(g.windows, g.parts), 1);
    g.parts = std::max<int64_t>(ceil_div(g.windows, g.part), 1);  // of which none is empty
    A* const to = dkernel.data<A>();
    const Scratch held = g.parts > 1 ? scratch(g.parts * size * int64_t(sizeof(A))) : Scratch{};
    g.out = g.parts > 1 ? held.memory : to;
    g.accumulate = accumulate && g.parts == 1;
    with_product<T>(g.elements, g.outputs, g.parts, fits_tensor_cores(g, channels),
                    [&](auto choice) {
                      using Product = typename decltype(choice)::Product;
                      if constexpr (Product::kTensorCores)
                        launch<conv_backward_mma_kernel<Product>>(choice.config(), g);
                      else
                        launch<conv_backward_kernel<Product>>(choice.config(), g);
                    });
    if (g.parts > 1)
      launch<sum_parts_kernel<A, A>>(grid_stride(size), static_cast<const A*>(held.memory), to,
                                     g.parts, size, accumulate);
  });
}

}  // namespace needle::NEEDLE_DEVICE
