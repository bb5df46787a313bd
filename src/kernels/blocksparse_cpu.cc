// The three block-sparse products. S has blocks (block x block) where its layout says, zeros
// elsewhere.
//   sdd:  S = op(a) op(b), at the layout's blocks alone
//   dsd:  out = op(S) op(b)        dds:  out = op(a) op(S)
// They are closed under differentiation: of out = S b, dS = dout b^T (sdd) and db = S^T dout (dsd
// with the transposed index), and so on. A task owns one tile of the output and adds its products
// in the order of the index, so sums do not depend on threads; a row or column of the layout
// without blocks gives zeros.
#include <algorithm>

#include "../common/backend.h"
#include "../common/bfloat16_cpu.h"
#include "../common/lane_gemm_cpu.h"
#include "../common/parallel.h"

namespace needle::cpu {
namespace {

constexpr int64_t kStrip = 64;      // columns of a tile, along the vector lanes
constexpr int64_t kMaxBlock = 128;  // rows of a tile, and of one step along k

// One thread's workspace.
template <class A>
struct Scratch {
  alignas(64) A a[kMaxBlock * kMaxBlock];
  alignas(64) A b[kMaxBlock * kStrip];
  alignas(64) A c[kMaxBlock * kStrip];
};

// to (rows, cols) = from, converted.
template <class From, class To>
void copy_tile(const From* from, int64_t ld_from, int64_t rows, int64_t cols, To* to,
               int64_t ld_to) {
  for (int64_t i = 0; i < rows; ++i) convert_run(from + i * ld_from, cols, to + i * ld_to);
}

// A stored matrix with row stride ld, read as it is or transposed.
template <class T>
struct Operand {
  const T* data;
  int64_t ld;
  bool trans;

  // The part that begins at element (i, j).
  Operand from(int64_t i, int64_t j) const {
    return {trans ? data + j * ld + i : data + i * ld + j, ld, trans};
  }
};

// What multiply does, by the processor's tiles: of bfloat16.
template <class T>
void multiply_tiles(int64_t m, int64_t n, int64_t k, const Operand<T>& a, const Operand<T>& b,
                    bool accumulate, Scratch<float>& s) {
  const int64_t words = tiles::words_of(k);
  T* const rows = reinterpret_cast<T*>(s.a);
  T* const columns = reinterpret_cast<T*>(s.b);
  tiles::Rows left{rows, 2 * words};
  if (a.trans) {
    transpose_tile(reinterpret_cast<const uint16_t*>(a.data), a.ld, k, m,
                   reinterpret_cast<uint16_t*>(rows), left.stride);
    for (int64_t i = 0; i < m; ++i)
      std::fill(rows + i * left.stride + k, rows + (i + 1) * left.stride, T(0.f));
  } else {
    left = tiles::rows_of(a.data, a.ld, m, k, rows);
  }
  if (b.trans)
    transpose_pairs(b.data, b.ld, n, k, columns, kStrip);
  else
    for (int64_t p = 0; p < k; p += 2)
      pair_rows(b.data + p * b.ld, b.ld, p + 1 < k, n, columns + p * kStrip);
  std::fill(columns + ceil_div(k, 2) * 2 * kStrip, columns + words * 2 * kStrip, T(0.f));
  tiles::gemm(round_up(m, tiles::kSide), round_up(n, tiles::kSide), words, left.data, left.stride,
              columns, kStrip, s.c, kStrip, accumulate);
}

// C (m, n) in the scratch = or += a (m, k) b (k, n): the left operand where it is or, transposed or
// of 16 bits, copied; rows of the right one, which lie along the lanes, always copied, since rows
// of a wide matrix that lie a power of two apart would push each other out of the cache.
template <class T, class A = accum_t<T>>
void multiply(int64_t m, int64_t n, int64_t k, const Operand<T>& a, const Operand<T>& b,
              bool accumulate) {
  Scratch<A>& s = of_this_thread<Scratch<A>>();
  if constexpr (std::is_same_v<T, bfloat16> && tiles::kCompiled)
    if (by_tiles<T>()) return multiply_tiles(m, n, k, a, b, accumulate, s);
  const A* left = s.a;
  int64_t row = k, col = 1;
  if (a.trans) {
    copy_tile(a.data, a.ld, k, m, s.a, m);
    row = 1, col = m;
  } else if constexpr (std::is_same_v<T, A>) {
    left = a.data, row = a.ld;
  } else {
    copy_tile(a.data, a.ld, m, k, s.a, k);
  }
  if (b.trans)
    transpose_tile(b.data, b.ld, n, k, s.b, kStrip);
  else
    copy_tile(b.data, b.ld, k, n, s.b, kStrip);
  lane_gemm(m, n, k, left, row, col, s.b, kStrip, s.c, kStrip, accumulate);
}

void check_block(int64_t block) {
  if (block < 1 || block > kMaxBlock)
    throw std::invalid_argument("[blocksparse] bad block size: " + std::to_string(block) +
                                " (1 to " + std::to_string(kMaxBlock) + ")");
}

}  // namespace

void blocksparse_sdd(const Array& a, bool trans_a, const Array& b, bool trans_b,
                     const Array& blocks, const Array& row_ptr, const Array& col_idx, int64_t batch,
                     int64_t m, int64_t n, int64_t k, int64_t nnz, int64_t layout_heads,
                     int64_t block) {
  check_block(block);
  const int32_t *rows = row_ptr.data<int32_t>(), *cols = col_idx.data<int32_t>();
  const int64_t nb_rows = m / block;
  dispatch_float(a.dtype(), "blocksparse_sdd", [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = accum_t<T>;
    const T *as = a.data<T>(), *bs = b.data<T>();
    T* out = blocks.data<T>();
    parallel_for(batch * nnz, [&](int64_t task) {
      const int64_t item = task / nnz, head = item % layout_heads;
      const int32_t* head_rows = rows + head * nb_rows;
      const int64_t e = head_rows[0] + task % nnz;
      T* to = out + task * block * block;
      if (e >= head_rows[nb_rows]) {  // a head with fewer blocks than another
        std::fill_n(to, block * block, T(0.f));
        return;
      }
      const int64_t i =
          (std::upper_bound(head_rows, head_rows + nb_rows + 1, e) - head_rows - 1) * block;
      const int64_t j = int64_t(cols[e]) * block;
      const Operand<T> op_a{as + item * m * k, trans_a ? m : k, trans_a};
      const Operand<T> op_b{bs + item * k * n, trans_b ? k : n, trans_b};
      [[maybe_unused]] const UseTilesFor<T> use;
      Scratch<A>& s = of_this_thread<Scratch<A>>();
      for (int64_t strip = 0; strip < block; strip += kStrip) {
        const int64_t width = std::min(kStrip, block - strip);
        if (k == 0) std::fill_n(s.c, block * kStrip, A(0));
        for (int64_t p = 0; p < k; p += kMaxBlock) {
          const int64_t depth = std::min(kMaxBlock, k - p);
          multiply(block, width, depth, op_a.from(i, p), op_b.from(p, j + strip), p > 0);
        }
        copy_tile(s.c, kStrip, block, width, to + strip, block);
      }
    });
  });
}

void blocksparse_dsd(const Array& blocks, bool trans_s, const Array& b, bool trans_b,
                     const Array& out, const Array& row_ptr, const Array& col_idx,
                     const Array& entry, int64_t batch, int64_t m, int64_t n, int64_t k,
                     int64_t nnz, int64_t layout_heads, int64_t block) {
  check_block(block);
  const int32_t *rows = row_ptr.data<int32_t>(), *cols = col_idx.data<int32_t>();
  const int32_t* entries = entry.data<int32_t>();
  const int64_t nb_rows = m / block, strips = ceil_div(n, kStrip);
  dispatch_float(b.dtype(), "blocksparse_dsd", [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = accum_t<T>;
    const T *ss = blocks.data<T>(), *bs = b.data<T>();
    T* outs = out.data<T>();
    parallel_for(batch * nb_rows * strips, [&](int64_t task) {
      const int64_t item = task / strips / nb_rows, i = task / strips % nb_rows,
                    j = task % strips * kStrip;
      const int32_t* head_rows = rows + item % layout_heads * nb_rows;
      const int64_t width = std::min(kStrip, n - j);
      const Operand<T> op_b{bs + item * k * n, trans_b ? k : n, trans_b};
      [[maybe_unused]] const UseTilesFor<T> use;
      Scratch<A>& s = of_this_thread<Scratch<A>>();
      if (head_rows[i] == head_rows[i + 1]) std::fill_n(s.c, block * kStrip, A(0));
      for (int64_t e = head_rows[i]; e < head_rows[i + 1]; ++e) {
        const T* stored = ss + (item * nnz + entries[e] - head_rows[0]) * block * block;
        multiply<T>(block, width, block, {stored, block, trans_s}, op_b.from(cols[e] * block, j),
                    e > head_rows[i]);
      }
      copy_tile(s.c, kStrip, block, width, outs + item * m * n + i * block * n + j, n);
    });
  });
}

void blocksparse_dds(const Array& a, bool trans_a, const Array& blocks, bool trans_s,
                     const Array& out, const Array& col_ptr, const Array& row_idx,
                     const Array& entry, int64_t batch, int64_t m, int64_t n, int64_t k,
                     int64_t nnz, int64_t layout_heads, int64_t block) {
  check_block(block);
  const int32_t *cols = col_ptr.data<int32_t>(), *rows = row_idx.data<int32_t>();
  const int32_t* entries = entry.data<int32_t>();
  const int64_t nb_cols = n / block, per_block = ceil_div(block, kStrip);
  const int64_t strips = nb_cols * per_block, panels = ceil_div(m, kMaxBlock);
  dispatch_float(a.dtype(), "blocksparse_dds", [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = accum_t<T>;
    const T *as = a.data<T>(), *ss = blocks.data<T>();
    T* outs = out.data<T>();
    parallel_for(batch * panels * strips, [&](int64_t task) {
      const int64_t item = task / strips / panels, i = task / strips % panels * kMaxBlock;
      const int64_t column = task % strips / per_block, strip = task % strips % per_block * kStrip;
      const int32_t* head_cols = cols + item % layout_heads * nb_cols;
      const int64_t height = std::min(kMaxBlock, m - i), width = std::min(kStrip, block - strip);
      const Operand<T> op_a{as + item * m * k, trans_a ? m : k, trans_a};
      [[maybe_unused]] const UseTilesFor<T> use;
      Scratch<A>& s = of_this_thread<Scratch<A>>();
      if (head_cols[column] == head_cols[column + 1]) std::fill_n(s.c, height * kStrip, A(0));
      for (int64_t e = head_cols[column]; e < head_cols[column + 1]; ++e) {
        const T* stored = ss + (item * nnz + entries[e] - head_cols[0]) * block * block;
        const Operand<T> part = Operand<T>{stored, block, trans_s}.from(0, strip);
        multiply(height, width, block, op_a.from(i, rows[e] * block), part, e > head_cols[column]);
      }
      copy_tile(s.c, kStrip, height, width, outs + item * m * n + i * n + column * block + strip,
                n);
    });
  });
}

}  // namespace needle::cpu
