// Block-sparse products on a GPU: sdd (dense x dense -> blocks), dsd (blocks x dense) and dds
// (dense x blocks).
//
// One kernel, BlockSparseMatmulKernel, in three modes. A block of threads forms one tile (part of a
// stored block, or of the dense result) by the same tile products as matmul; only where A and B lie
// differs. Blocks are summed in the ascending order of the index, so results repeat bit by bit.
// Empty block rows give zeros.
#include "tile_product_cuda.cuh"

namespace needle::NEEDLE_DEVICE {
namespace {

enum class Mode { sdd, dsd, dds };

template <class T>
struct SparseArguments {
  const T* dense_a;  // sdd: a; dds: a; dsd: b
  const T* dense_b;  // sdd: b
  const T* blocks;   // dsd, dds
  T* out;            // sdd: blocks; dsd, dds: the dense result
  const int32_t *line_ptr, *cross_idx, *entry;
  int64_t batch, m, n, k, nnz, heads, block;
  bool trans_a, trans_b, trans_s;
};

// The line (block row) whose entries contain e: the last one that starts at or before e and is not
// empty.
__device__ inline int64_t line_of_entry(const int32_t* line_ptr, int64_t lines, int64_t e) {
  int64_t low = 0, high = lines;  // line_ptr[low] <= e < line_ptr[high]
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (line_ptr[middle] <= e) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Tile t of the stored blocks: blocks[item, e] (+)= op(a)[row block] op(b)[column block].
template <class Product, class T>
__device__ void sdd_tile(const SparseArguments<T>& g, int64_t t) {
  constexpr int kTile = Product::kTile;
  const int64_t side = ceil_div(g.block, kTile), lines = g.m / g.block;
  const int64_t row0 = t / side % side * kTile, col0 = t % side * kTile;
  const int64_t e = t / (side * side) % g.nnz, item = t / (side * side) / g.nnz;
  const int32_t* line_ptr = g.line_ptr + item % g.heads * lines;
  Product product;
  if (line_ptr[0] + e < line_ptr[lines]) {  // else padding: heads may have fewer blocks than nnz
    const int64_t row = line_of_entry(line_ptr, lines, line_ptr[0] + e) * g.block + row0;
    const int64_t col = int64_t(g.cross_idx[line_ptr[0] + e]) * g.block + col0;
    const auto a = matrix_ref(g.dense_a + item * g.m * g.k, g.trans_a ? g.m : g.k, g.trans_a);
    const auto b = matrix_ref(g.dense_b + item * g.k * g.n, g.trans_b ? g.k : g.n, g.trans_b);
    product.add(submatrix(a, row, 0), submatrix(b, 0, col), g.block - row0, g.block - col0, g.k);
  }
  T* out = g.out + ((item * g.nnz + e) * g.block + row0) * g.block + col0;
  product.for_each([&](int r, int c, typename Product::A value) {
    if (row0 + r < g.block && col0 + c < g.block) out[r * g.block + c] = T(value);
  });
}

// Tile t of the dense result, in the block row of op(S) (dsd) or the block column of op(S) (dds)
// that it lies in.
template <Mode mode, class Product, class T>
__device__ void dense_tile(const SparseArguments<T>& g, int64_t t) {
  constexpr int kTile = Product::kTile;
  const int64_t line_extent = mode == Mode::dsd ? g.m : g.n;   // along the lines of the index
  const int64_t other_extent = mode == Mode::dsd ? g.n : g.m;  // along the dense operand
  const int64_t lines = line_extent / g.block, line_tiles = ceil_div(g.block, kTile);
  const int64_t other_tiles = ceil_div(other_extent, kTile);
  // Tiles that share a line are neighbours: they read the same stored blocks.
  const int64_t other0 = t % other_tiles * kTile, in_line0 = t / other_tiles % line_tiles * kTile;
  const int64_t line = t / (other_tiles * line_tiles) % lines,
                item = t / (other_tiles * line_tiles) / lines;
  const int32_t* line_ptr = g.line_ptr + item % g.heads * lines;
  const int64_t first = line_ptr[0];

  Product product;
  for (int64_t e = line_ptr[line]; e < line_ptr[line + 1]; ++e) {
    const int64_t cross = int64_t(g.cross_idx[e]) * g.block;
    const T* stored = g.blocks + (item * g.nnz + g.entry[e] - first) * g.block * g.block;
    const auto s = matrix_ref(stored, g.block, g.trans_s);  // op of this block of S
    if constexpr (mode == Mode::dsd) {
      const auto b = matrix_ref(g.dense_a + item * g.k * g.n, g.trans_b ? g.k : g.n, g.trans_b);
      product.add(submatrix(s, in_line0, 0), submatrix(b, cross, other0), g.block - in_line0,
                  g.n - other0, g.block);
    } else {
      const auto a = matrix_ref(g.dense_a + item * g.m * g.k, g.trans_a ? g.m : g.k, g.trans_a);
      product.add(submatrix(a, other0, cross), submatrix(s, 0, in_line0), g.m - other0,
                  g.block - in_line0, g.block);
    }
  }
  const int64_t row0 = mode == Mode::dsd ? line * g.block + in_line0 : other0;
  const int64_t col0 = mode == Mode::dsd ? other0 : line * g.block + in_line0;
  const int64_t row_end = mode == Mode::dsd ? (line + 1) * g.block : g.m;
  const int64_t col_end = mode == Mode::dsd ? g.n : (line + 1) * g.block;
  T* out = g.out + item * g.m * g.n;
  product.for_each([&](int r, int c, typename Product::A value) {
    if (row0 + r < row_end && col0 + c < col_end) out[(row0 + r) * g.n + col0 + c] = T(value);
  });
}

template <Mode mode, class Product>
__global__ void __launch_bounds__(Product::kThreads)
    BlockSparseMatmulKernel(SparseArguments<typename Product::T> g, int64_t tiles) {
  for (int64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
    if constexpr (mode == Mode::sdd) {
      sdd_tile<Product>(g, t);
    } else {
      dense_tile<mode, Product>(g, t);
    }
  }
}

template <Mode mode, class Product>
void run(const SparseArguments<typename Product::T>& g) {
  const int64_t side = ceil_div(g.block, Product::kTile);
  const int64_t tiles = mode == Mode::sdd ? g.batch * g.nnz * side * side
                        : mode == Mode::dsd
                            ? g.batch * (g.m / g.block) * side * ceil_div(g.n, Product::kTile)
                            : g.batch * (g.n / g.block) * side * ceil_div(g.m, Product::kTile);
  if (tiles == 0) return;
  launch<BlockSparseMatmulKernel<mode, Product>>(grid_of(blocks_for(tiles), Product::kThreads), g,
                                                 tiles);
}

template <Mode mode, class T>
void run_for_block(const SparseArguments<T>& g) {
  if (g.block <= 16) return run<mode, TileProduct<T, 16>>(g);
  if (g.block <= 32) return run<mode, TileProduct<T, 32>>(g);
  run<mode, TileProduct<T, 64>>(g);
}

}  // namespace

void blocksparse_sdd(const Array& a, bool trans_a, const Array& b, bool trans_b,
                     const Array& blocks, const Array& row_ptr, const Array& col_idx, int64_t batch,
                     int64_t m, int64_t n, int64_t k, int64_t nnz, int64_t layout_heads,
                     int64_t block) {
  dispatch_float(blocks.dtype(), "blocksparse_sdd", [&](auto tag) {
    using T = typename decltype(tag)::type;
    run_for_block<Mode::sdd, T>({a.data<T>(), b.data<T>(), nullptr, blocks.data<T>(),
                                 row_ptr.data<int32_t>(), col_idx.data<int32_t>(), nullptr, batch,
                                 m, n, k, nnz, layout_heads, block, trans_a, trans_b, false});
  });
}

void blocksparse_dsd(const Array& blocks, bool trans_s, const Array& b, bool trans_b,
                     const Array& out, const Array& row_ptr, const Array& col_idx,
                     const Array& entry, int64_t batch, int64_t m, int64_t n, int64_t k,
                     int64_t nnz, int64_t layout_heads, int64_t block) {
  dispatch_float(out.dtype(), "blocksparse_dsd", [&](auto tag) {
    using T = typename decltype(tag)::type;
    run_for_block<Mode::dsd, T>({b.data<T>(), nullptr, blocks.data<T>(), out.data<T>(),
                                 row_ptr.data<int32_t>(), col_idx.data<int32_t>(),
                                 entry.data<int32_t>(), batch, m, n, k, nnz, layout_heads, block,
                                 false, trans_b, trans_s});
  });
}

void blocksparse_dds(const Array& a, bool trans_a, const Array& blocks, bool trans_s,
                     const Array& out, const Array& col_ptr, const Array& row_idx,
                     const Array& entry, int64_t batch, int64_t m, int64_t n, int64_t k,
                     int64_t nnz, int64_t layout_heads, int64_t block) {
  dispatch_float(out.dtype(), "blocksparse_dds", [&](auto tag) {
    using T = typename decltype(tag)::type;
    run_for_block<Mode::dds, T>({a.data<T>(), nullptr, blocks.data<T>(), out.data<T>(),
                                 col_ptr.data<int32_t>(), row_idx.data<int32_t>(),
                                 entry.data<int32_t>(), batch, m, n, k, nnz, layout_heads, block,
                                 trans_a, false, trans_s});
  });
}

}  // namespace needle::NEEDLE_DEVICE
