// Which of the products of tile_product_cuda.cuh and tensor_core_product_cuda.cuh a matrix product
// is made of, and into how many parts a deep one is cut.
#pragma once

#include "tensor_core_product_cuda.cuh"

namespace needle::NEEDLE_DEVICE {

template <class Product>
int64_t tiles_of(int64_t m, int64_t n, int64_t items) {
  return ceil_div(m, Product::kRows) * ceil_div(n, Product::kCols) * items;
}

template <class Product_>
struct Choice {
  using Product = Product_;
  int64_t tiles;  // of all items
  LaunchConfig config() const { return grid_of(blocks_for(tiles), Product::kThreads); }
};

// launch(choice): of (m, n) products of T, `items` of them, by the largest tile that still gives
// every multiprocessor one.
template <class T, class Launch>
void with_product(int64_t m, int64_t n, int64_t items, bool tensor_cores, Launch launch) {
  const bool wide = m > 64 && n > 64, medium = m > 32 && n > 32;
  const auto by = [&](auto type) {
    using Product = typename decltype(type)::Product;
    launch(Choice<Product>{tiles_of<Product>(m, n, items)});
  };
  if constexpr (sizeof(T) == 2) {
    if (tensor_cores) {
      using Large = TensorCoreProduct<T, 128, 128, 2, 4>;
      if (wide && tiles_of<Large>(m, n, items) >= multiprocessors()) return by(Choice<Large>{});
      if (medium) return by(Choice<TensorCoreProduct<T, 64, 64, 2, 2>>{});
      return by(Choice<TensorCoreProduct<T, 32, 32, 2, 2>>{});
    }
  }
  if constexpr (sizeof(T) <= 4 && !std::is_integral<T>::value) {
    using Large = TileProduct<T, 128>;
    if (wide && tiles_of<Large>(m, n, items) >= multiprocessors()) return by(Choice<Large>{});
  }
  if (medium) return by(Choice<TileProduct<T, 64>>{});
  by(Choice<TileProduct<T, 32>>{});
}

// Of a product of parts, out (n) = or += the sum of its (parts, n), in their order.
template <class T, class Out>
__global__ void sum_parts_kernel(const T* products, Out* out, int64_t parts, int64_t n,
                                 bool accumulate) {
  for (int64_t i = first_index(); i < n; i += index_step()) {
    T total = products[i];
    for (int64_t part = 1; part < parts; ++part) total = T(total + products[part * n + i]);
    out[i] = Out(accumulate ? T(accum_t<Out>(out[i]) + total) : total);
  }
}

// Into how many parts of k a product is cut whose `outputs` are few and deep, at most. The answer
// depends on the shape alone; `item_bytes` is the size of a sum.
inline int64_t most_parts(int64_t outputs, int64_t tiles_of_64, int64_t k, int64_t item_bytes) {
  constexpr int64_t kEnoughTiles = 256;  // of 64 x 64: some for every multiprocessor
  constexpr int64_t kLeastDepth = 256;   // of a part that is worth its tiles' writing and reading
  return std::max<int64_t>(1, std::min({kEnoughTiles / tiles_of_64, k / kLeastDepth,
                                        kScratchBytes / (outputs * item_bytes)}));
}

}  // namespace needle::NEEDLE_DEVICE
