// Block-sparse products on a GPU: sdd (dense x dense -> blocks), dsd (blocks x dense) and dds
// (dense x blocks).
//
// One kernel, BlockSparseMatmulKernel, in three modes; BlockSparseMatmulKernelMma is the same on
// tensor cores (16-bit floats, compute capability 8.0 and later, dense rows aligned to 16 bytes). A
// block of threads forms one tile (part of a stored block, or of the dense result) by the same tile
// products as matmul; only the slices of A and B differ, which go on from one stored block to the
// next. Blocks are summed in the ascending order of the index, so results repeat bit by bit. Empty
// block rows give zeros.
#include "tensor_core_product_cuda.cuh"

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

// Tile t of the stored blocks: blocks[item, e] = op(a)[row block] op(b)[column block].
template <class Product, class T>
__device__ void sdd_tile(const SparseArguments<T>& g, int64_t t) {
  const int64_t row_tiles = ceil_div(g.block, Product::kRows);
  const int64_t col_tiles = ceil_div(g.block, Product::kCols), tiles = row_tiles * col_tiles;
  const int64_t row0 = t / col_tiles % row_tiles * Product::kRows;
  const int64_t col0 = t % col_tiles * Product::kCols;
  const int64_t e = t / tiles % g.nnz, item = t / tiles / g.nnz, lines = g.m / g.block;
  const int32_t* line_ptr = g.line_ptr + item % g.heads * lines;
  Product product;
  if (line_ptr[0] + e < line_ptr[lines]) {  // else padding: heads may have fewer blocks than nnz
    const int64_t row = line_of_entry(line_ptr, lines, line_ptr[0] + e) * g.block + row0;
    const int64_t col = int64_t(g.cross_idx[line_ptr[0] + e]) * g.block + col0;
    const auto a = submatrix(
        matrix_ref(g.dense_a + item * g.m * g.k, g.trans_a ? g.m : g.k, g.trans_a), row, 0);
    const auto b = submatrix(
        matrix_ref(g.dense_b + item * g.k * g.n, g.trans_b ? g.k : g.n, g.trans_b), 0, col);
    product.add(g.block - row0, g.block - col0, along(a, b), int(ceil_div(g.k, Product::kDepth)),
                Slices<Product::kDepth, T>(a, b, g.k));
  }
  T* out = g.out + ((item * g.nnz + e) * g.block + row0) * g.block + col0;
  product.for_each_run([&](int r, int c, const auto& sums) {
    if (row0 + r < g.block) store_run(out + r * g.block + c, sums, g.block - col0 - c);
  });
}

// Gives the slices of the entries first .. end - 1 of the index: of each its stored block, and what
// this multiplies of the dense operand. `block` and `dense` are those of stored block 0 and of
// block 0 of the inner dimension, moved to the tile. The index is read one block ahead, or every
// block would wait for it.
template <Mode mode, int Depth, class T>
class BlockSlices {
 public:
  __device__ BlockSlices(const SparseArguments<T>& g, MatrixRef<T> block, MatrixRef<T> dense,
                         int first, int end)
      : g_(g), block_(block), dense_(dense), e_(first), end_(end) {
    read_index();
  }

  __device__ MatrixSlice<T> operator()() {
    if (left_ == 0) {
      const MatrixRef<T> block{block_.data + entry_ * g_.block * g_.block, block_.row_stride,
                               block_.col_stride};
      const int64_t k = cross_ * g_.block;
      slices_ = mode == Mode::dsd ? Slices<Depth, T>(block, submatrix(dense_, k, 0), g_.block)
                                  : Slices<Depth, T>(submatrix(dense_, 0, k), block, g_.block);
      left_ = int(ceil_div(g_.block, Depth));
      ++e_;
      read_index();
    }
    --left_;
    return slices_();
  }

 private:
  __device__ void read_index() {
    if (e_ >= end_) return;
    entry_ = g_.entry[e_];
    cross_ = g_.cross_idx[e_];
  }

  const SparseArguments<T>& g_;
  const MatrixRef<T> block_, dense_;
  int e_, end_, left_ = 0;
  int64_t entry_ = 0, cross_ = 0;
  Slices<Depth, T> slices_;
};

// Tile t of the dense result, in the block row of op(S) (dsd) or the block column of op(S) (dds)
// that it lies in.
template <Mode mode, class Product, class T>
__device__ void dense_tile(const SparseArguments<T>& g, int64_t t) {
  constexpr bool kRowLines = mode == Mode::dsd;
  constexpr int kInLine = kRowLines ? Product::kRows : Product::kCols;  // along the lines
  constexpr int kAcross = kRowLines ? Product::kCols : Product::kRows;  // along the dense operand
  const int64_t lines = (kRowLines ? g.m : g.n) / g.block, extent = kRowLines ? g.n : g.m;
  const int64_t line_tiles = ceil_div(g.block, kInLine), other_tiles = ceil_div(extent, kAcross);
  // Tiles that share a line are neighbours: they read the same stored blocks.
  const int64_t other0 = t % other_tiles * kAcross,
                inside0 = t / other_tiles % line_tiles * kInLine;
  const int64_t line = t / (other_tiles * line_tiles) % lines,
                item = t / (other_tiles * line_tiles) / lines;
  const int32_t* line_ptr = g.line_ptr + item % g.heads * lines;
  const int first = line_ptr[line], end = line_ptr[line + 1];
  const int64_t stored = item * g.nnz - line_ptr[0];  // of the head's first entry
  const auto block =
      submatrix(matrix_ref(g.blocks + stored * g.block * g.block, g.block, g.trans_s),  // op of S
                kRowLines ? inside0 : 0, kRowLines ? 0 : inside0);
  const auto dense =
      kRowLines
          ? submatrix(matrix_ref(g.dense_a + item * g.k * g.n, g.trans_b ? g.k : g.n, g.trans_b), 0,
                      other0)
          : submatrix(matrix_ref(g.dense_a + item * g.m * g.k, g.trans_a ? g.m : g.k, g.trans_a),
                      other0, 0);

  Product product;
  product.add(kRowLines ? g.block - inside0 : extent - other0,
              kRowLines ? extent - other0 : g.block - inside0,
              kRowLines ? along(block, dense) : along(dense, block),
              (end - first) * int(ceil_div(g.block, Product::kDepth)),
              BlockSlices<mode, Product::kDepth, T>(g, block, dense, first, end));
  const int64_t in_line0 = line * g.block + inside0, in_line_end = (line + 1) * g.block;
  const int64_t row0 = kRowLines ? in_line0 : other0, row_end = kRowLines ? in_line_end : g.m;
  const int64_t col0 = kRowLines ? other0 : in_line0, col_end = kRowLines ? g.n : in_line_end;
  T* out = g.out + item * g.m * g.n + row0 * g.n + col0;
  product.for_each_run([&](int r, int c, const auto& sums) {
    if (row0 + r < row_end) store_run(out + r * g.n + c, sums, col_end - col0 - c);
  });
}

template <Mode mode, class Product>
__device__ void sparse_tiles(const SparseArguments<typename Product::T>& g, int64_t tiles) {
  for (int64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
    if constexpr (mode == Mode::sdd) {
      sdd_tile<Product>(g, t);
    } else {
      dense_tile<mode, Product>(g, t);
    }
  }
}

template <Mode mode, class Product>
__global__ void __launch_bounds__(Product::kThreads)
    BlockSparseMatmulKernel(SparseArguments<typename Product::T> g, int64_t tiles) {
  sparse_tiles<mode, Product>(g, tiles);
}

// The same on tensor cores, under a name of its own to be counted by.
template <Mode mode, class Product>
__global__ void __launch_bounds__(Product::kThreads)
    BlockSparseMatmulKernelMma(SparseArguments<typename Product::T> g, int64_t tiles) {
  ptx::with_tensor_cores([&] { sparse_tiles<mode, Product>(g, tiles); });
}

template <Mode mode, class Product>
void run(const SparseArguments<typename Product::T>& g) {
  const int64_t rows =
      mode == Mode::dds ? ceil_div(g.m, Product::kRows) : ceil_div(g.block, Product::kRows);
  const int64_t cols =
      mode == Mode::dsd ? ceil_div(g.n, Product::kCols) : ceil_div(g.block, Product::kCols);
  const int64_t lines = mode == Mode::sdd   ? g.nnz
                        : mode == Mode::dsd ? g.m / g.block
                                            : g.n / g.block;
  const int64_t tiles = g.batch * lines * rows * cols;
  const LaunchConfig config = grid_of(blocks_for(tiles), Product::kThreads);
  if constexpr (Product::kTensorCores)
    launch<BlockSparseMatmulKernelMma<mode, Product>>(config, g, tiles);
  else
    launch<BlockSparseMatmulKernel<mode, Product>>(config, g, tiles);
}

// Of the dense operands; the blocks' rows are multiples of 16 elements.
template <Mode mode, class T>
bool fits_tensor_cores(const SparseArguments<T>& g) {
  const int64_t lda = g.trans_a ? g.m : g.k, ldb = g.trans_b ? g.k : g.n;
  return may_use_tensor_cores() && copies_in_chunks(g.dense_a, mode == Mode::dsd ? ldb : lda) &&
         copies_in_chunks(mode == Mode::sdd ? g.dense_b : g.blocks,
                          mode == Mode::sdd ? ldb : g.block);
}

// Tiles as high (dsd), as wide (dds) as a block, up to 64.
template <Mode mode, class T>
void run_for_block(const SparseArguments<T>& g) {
  if constexpr (sizeof(T) == 2) {
    if (fits_tensor_cores<mode>(g)) {
      constexpr bool kTall = mode == Mode::dds, kWide = mode == Mode::dsd;
      constexpr int kRows16 = kTall ? 64 : 16, kCols16 = kWide ? 64 : 16;
      constexpr int kRows32 = kTall ? 64 : 32, kCols32 = kWide ? 64 : 32;
      using Small = TensorCoreProduct<T, kRows16, kCols16, kRows16 / 16, kCols16 / 16>;
      using Medium = TensorCoreProduct<T, kRows32, kCols32, 2, 2>;
      using Large = TensorCoreProduct<T, 64, 64, 2, 2>;
      if (g.block <= 16) return run<mode, Small>(g);
      if (g.block <= 32) return run<mode, Medium>(g);
      return run<mode, Large>(g);
    }
  }
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
