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

  const T* at(int64_t i, int64_t j) const { return trans ? data + j * ld + i : data + i * ld + j; }
};

// Elements (i .. i + m, p .. p + k) of a left operand as lane_gemm wants it: where they are, or
// copied next to each other.
template <class A>
struct Left {
  const A* data;
  int64_t row, col;
};
template <class T, class A = accum_t<T>>
Left<A> left(const Operand<T>& a, int64_t i, int64_t p, int64_t m, int64_t k, A* buffer) {
  if (a.trans) {
    copy_tile(a.at(i, p), a.ld, k, m, buffer, m);
    return {buffer, 1, m};
  }
  if constexpr (std::is_same_v<T, A>) {
    return {a.at(i, p), a.ld, 1};
  } else {
    copy_tile(a.at(i, p), a.ld, m, k, buffer, k);
    return {buffer, k, 1};
  }
}

// Elements (p .. p + k, j .. j + n) of a right operand, rows along the lanes: always copied, since
// rows of a wide matrix that lie a power of two apart would push each other out of the cache.
template <class T, class A = accum_t<T>>
const A* right(const Operand<T>& b, int64_t p, int64_t j, int64_t k, int64_t n, A* buffer) {
  if (b.trans)
    transpose_tile(b.at(p, j), b.ld, n, k, buffer, kStrip);
  else
    copy_tile(b.at(p, j), b.ld, k, n, buffer, kStrip);
  return buffer;
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
      Scratch<A>& s = of_this_thread<Scratch<A>>();
      for (int64_t strip = 0; strip < block; strip += kStrip) {
        const int64_t width = std::min(kStrip, block - strip);
        if (k == 0) std::fill_n(s.c, block * kStrip, A(0));
        for (int64_t p = 0; p < k; p += kMaxBlock) {
          const int64_t depth = std::min(kMaxBlock, k - p);
          const Left<A> l = left(op_a, i, p, block, depth, s.a);
          const A* r = right(op_b, p, j + strip, depth, width, s.b);
          lane_gemm(block, width, depth, l.data, l.row, l.col, r, kStrip, s.c, kStrip, p > 0);
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
      Scratch<A>& s = of_this_thread<Scratch<A>>();
      if (head_rows[i] == head_rows[i + 1]) std::fill_n(s.c, block * kStrip, A(0));
      for (int64_t e = head_rows[i]; e < head_rows[i + 1]; ++e) {
        const T* stored = ss + (item * nnz + entries[e] - head_rows[0]) * block * block;
        const Left<A> l = left<T>({stored, block, trans_s}, 0, 0, block, block, s.a);
        const A* r = right(op_b, cols[e] * block, j, block, width, s.b);
        lane_gemm(block, width, block, l.data, l.row, l.col, r, kStrip, s.c, kStrip,
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
      Scratch<A>& s = of_this_thread<Scratch<A>>();
      if (head_cols[column] == head_cols[column + 1]) std::fill_n(s.c, height * kStrip, A(0));
      for (int64_t e = head_cols[column]; e < head_cols[column + 1]; ++e) {
        const T* stored = ss + (item * nnz + entries[e] - head_cols[0]) * block * block;
        const Left<A> l = left(op_a, i, rows[e] * block, height, block, s.a);
        const A* r = right<T>({stored, block, trans_s}, 0, strip, block, width, s.b);
        lane_gemm(height, width, block, l.data, l.row, l.col, r, kStrip, s.c, kStrip,
                  e > head_cols[column]);
      }
      copy_tile(s.c, kStrip, height, width, outs + item * m * n + i * n + column * block + strip,
                n);
    });
  });
}

}  // namespace needle::cpu
