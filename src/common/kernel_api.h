// The contract of a compiled backend: every function that a device module offers, once.
//
// Included by backend.h inside `namespace needle::NEEDLE_DEVICE { ... }`, so a backend that lacks a
// kernel does not link. The names are the names Python sees (bindings.h adds only the op tables of
// ewise_ops.def); the numpy backend and the meta backend have the same names, and a test compares
// them.
//
// Rules that hold for all of them:
//  * kernels never allocate: outputs and workspace come from the caller;
//  * arrays are contiguous unless strides stand beside them; strides and offsets count elements;
//  * `out`, `dx`, ... are written completely unless `accumulate` says "add to what is there";
//  * arrays of one call share one floating dtype unless a line says otherwise; 16-bit types are
//    stored in 16 bits and computed in float32; sums accumulate in float32 (float64 for float64);
//  * results are bitwise the same from run to run and for every number of threads.

// --- moving data --------------------------------------------------------------------------
void fill(const Array& out, Scalar value);
// out[i] = i
void arange(const Array& out);
// out[out_strides . i + out_offset] = convert(a[a_strides . i + a_offset]) for every i in shape.
// Converts between any two dtypes, as dtype.h's convert does.
void strided_copy(const Array& a, const Dims& a_strides, int64_t a_offset, const Array& out,
                  const Dims& out_strides, int64_t out_offset, const Dims& shape);
void strided_fill(const Array& out, const Dims& strides, int64_t offset, const Dims& shape,
                  Scalar value);

// --- elementwise: one row in ewise_ops.def is one op ------------------------------------------
// A View is an array with strides, offset and shape; an empty `strides` means contiguous.
// `out` is contiguous, its dtype is the dtype of the inputs, or bool for comparison/logical/test
// rows. `out` may be an input (in place) when that input is contiguous. A Scalar beside 16-bit
// floats is a float32, not rounded to 16 bits.
void ewise_unary(UnaryOp op, const View& a, const Array& out);
void ewise_binary(BinaryOp op, const View& a, const View& b, const Array& out);
void scalar_binary(BinaryOp op, const View& a, Scalar b, const Array& out);   // op(a, b)
void rscalar_binary(BinaryOp op, Scalar a, const View& b, const Array& out);  // op(a, b)
// out = condition ? a : b; condition is bool, a, b and out share a dtype.
void where(const View& condition, const View& a, const View& b, const Array& out);

// --- reductions over the middle axis of (outer, reduce, inner) --------------------------------
// sum max min prod: out (outer, inner), dtype of a. sum and prod: or what they are summed in, int64
// of integers, float32 of 16-bit floats. max and min propagate NaN. argmax/argmin: out int64, first
// of equals, the first NaN before all. Of these four `reduce` is at least 1. sumsq: sum of squares
// of floats, out float32 (float64 for float64 input).
void reduce(ReduceOp op, const Array& a, const Array& out, int64_t outer, int64_t reduce,
            int64_t inner);

// --- matrix products --------------------------------------------------------------------------
// out[batch] (m, n) = op(a[batch]) @ op(b[batch]), or += with accumulate; out contiguous.
// op(a) is (m, k): a is stored with row stride lda and unit column stride, as (m, k), or as
// (k, m) when trans_a. Batch strides may be 0 (broadcast). Every numeric dtype; out may be
// float32 where a and b are 16-bit floats. k == 0 gives zeros.
void matmul(const Array& a, int64_t a_offset, const Dims& a_batch_strides, int64_t lda,
            bool trans_a, const Array& b, int64_t b_offset, const Dims& b_batch_strides,
            int64_t ldb, bool trans_b, const Array& out, const Dims& batch_shape, int64_t m,
            int64_t k, int64_t n, bool accumulate);

// --- convolution --------------------------------------------------------------------------------
// Windows of `image` (images, rows[0], cols[0], channels): rows and cols are window_axis of
// windows.h, and pixels outside of the image are zeros. A window's elements are in the order of the
// kernel's: rows, columns, channels. Every numeric dtype. out (windows, out_channels) = windows
// (windows, elements) @ kernel (elements, out_channels).
void conv_forward(const Array& image, const Array& kernel, const Array& out, int64_t images,
                  int64_t channels, const Dims& rows, const Dims& cols, int64_t out_channels);
// dkernel (elements, out_channels) = windows^T @ dy (windows, out_channels), or += with accumulate;
// float32 where the others are 16-bit floats.
void conv_backward(const Array& image, const Array& dy, const Array& dkernel, int64_t images,
                   int64_t channels, const Dims& rows, const Dims& cols, int64_t out_channels,
                   bool accumulate);

// --- softmax family: rows x cols ----------------------------------------------------------------
void softmax_forward(const Array& x, const Array& y, int64_t rows, int64_t cols);
void softmax_backward(const Array& y, const Array& dy, const Array& dx, int64_t rows, int64_t cols);
void log_softmax_forward(const Array& x, const Array& y, int64_t rows, int64_t cols);
void log_softmax_backward(const Array& y, const Array& dy, const Array& dx, int64_t rows,
                          int64_t cols);
// lse, dlse: (rows). A row of all -inf gives -inf (and a zero gradient).
void logsumexp_forward(const Array& x, const Array& lse, int64_t rows, int64_t cols);
void logsumexp_backward(const Array& x, const Array& lse, const Array& dlse, const Array& dx,
                        int64_t rows, int64_t cols);

// --- layer norm over the last axis ---------------------------------------------------------------
// mean, rstd: (rows), float32 (float64 for float64). Biased variance.
void layer_norm_forward(const Array& x, const Array& weight, const Array& bias, const Array& y,
                        const Array& mean, const Array& rstd, int64_t rows, int64_t cols,
                        double eps);
// workspace: COLUMN_PARTIALS x 2 x cols of mean's dtype (partial sums of dweight and dbias).
void layer_norm_backward(const Array& dy, const Array& x, const Array& weight, const Array& mean,
                         const Array& rstd, const Array& dx, const Array& dweight,
                         const Array& dbias, const Array& workspace, int64_t rows, int64_t cols);

// --- batch norm over the rows --------------------------------------------------------------------
// mean, var: (cols), float32 (float64 for float64). Biased variance. rows is at least 1. workspace:
// COLUMN_PARTIALS x 2 x cols of mean's dtype.
void batch_norm_forward(const Array& x, const Array& weight, const Array& bias, const Array& y,
                        const Array& mean, const Array& var, const Array& workspace, int64_t rows,
                        int64_t cols, double eps);
void batch_norm_backward(const Array& dy, const Array& x, const Array& weight, const Array& mean,
                         const Array& var, const Array& dx, const Array& dweight,
                         const Array& dbias, const Array& workspace, int64_t rows, int64_t cols,
                         double eps);

// --- one position of an LSTM ---------------------------------------------------------------------
// gates (rows, 4 hidden), in place: i, f, g, o before their sigmoids and tanh (of g), then after.
// c = f c_before + i g; h = o tanh(c). c, c_before: (rows, hidden), float32 (float64 for float64).
void lstm_cell_forward(const Array& gates, const Array& c_before, const Array& c, const Array& h,
                       int64_t rows, int64_t hidden);
// gates in place: what forward left there, then the gradients of what it found. dh + dh_next is the
// gradient of h; dc, float32 (float64), in place: the gradient of c, then of c_before.
void lstm_cell_backward(const Array& gates, const Array& c_before, const Array& c, const Array& dh,
                        const Array& dh_next, const Array& dc, int64_t rows, int64_t hidden);

// --- rotary embedding (GPT-NeoX halves) ----------------------------------------------------------
// x: (B, H, T, D) with strides x_strides (4) and offset, out contiguous or strided likewise; the
// first `rot` of D are rotated: with h = rot/2, (x[i], x[i+h]) -> (x[i] c - x[i+h] s, x[i+h] c +
// x[i] s), i < h. cos, sin: (>= T, rot/2) float32, row t for position t. inverse rotates back (the
// gradient).
void rotary(const Array& x, const Dims& x_strides, int64_t x_offset, const Array& cos,
            const Array& sin, const Array& out, const Dims& out_strides, int64_t B, int64_t H,
            int64_t T, int64_t D, int64_t rot, bool inverse);

// --- embedding: one_hot(ids) @ weight ------------------------------------------------------------
// weight (vocab, dim) of any dtype, ids (n) int32 or int64, out (n, dim). CPU: IndexError names the
// first bad id. cuda: sets the host thread's error flag, read at the next sync; the row is filled
// with NaN (integers: 0).
void embedding_forward(const Array& weight, const Array& ids, const Array& out, int64_t n,
                       int64_t vocab, int64_t dim);
// dweight (vocab, dim) += or = the sum of dy rows by id, in ascending position order.
// workspace int32: n + vocab + 1.
void embedding_backward(const Array& dy, const Array& ids, const Array& dweight,
                        const Array& workspace, int64_t n, int64_t vocab, int64_t dim,
                        bool accumulate);
inline void check_countable(const char* kernel, int64_t n) {  // ids are counted in 32 bits
  if (n > INT32_MAX)
    throw std::invalid_argument("[" + std::string(kernel) + "] " + std::to_string(n) +
                                " ids have no kernel on this device (less than 2^31)");
}
// weight[ids[i]] = rows[i], (n, dim), for those i whose id is not -1; no other id comes twice.
void embedding_put(const Array& rows, const Array& ids, const Array& weight, int64_t n,
                   int64_t vocab, int64_t dim);
// out (n, depth) of any dtype; ids int32 or int64; an id outside 0..depth-1 is an IndexError.
void one_hot(const Array& ids, const Array& out, int64_t n, int64_t depth);

// --- cross entropy -------------------------------------------------------------------------------
// logits (rows, cols), targets (rows) int32 or int64, loss (rows) and lse (rows, 2) float32
// (float64 for float64). lse is the sum of two parts, the largest logit and log sum exp(logits -
// largest): rounded to one number it would lose the digits of the second beside a large first. A
// row whose target is ignore_index has loss 0 and gradient 0.
void cross_entropy_forward(const Array& logits, const Array& targets, const Array& loss,
                           const Array& lse, int64_t rows, int64_t cols, int64_t ignore_index);
// dlogits = (softmax(logits) - one_hot(targets)) * dloss[row]; dlogits may be logits (in place).
void cross_entropy_backward(const Array& logits, const Array& targets, const Array& lse,
                            const Array& dloss, const Array& dlogits, int64_t rows, int64_t cols,
                            int64_t ignore_index);

// --- optimizer -----------------------------------------------------------------------------------
// Updates in place on param and its state u, m, v, which is float32 (float64 for float64). grad may
// have another floating dtype than param, but float64 goes with float64 alone.
// Momentum; u is empty where there is none.
void sgd_step(const Array& param, const Array& grad, const Array& u, double lr, double momentum,
              double weight_decay);
// Adam (Kingma & Ba 2014) with l2, which adds l2 param to the gradient, and with weight_decay,
// which does not pass through the moments (Loshchilov & Hutter 2019). grad_scale: one float32 on
// the device that multiplies every gradient (clipping, unscaling).
void adam_step(const Array& param, const Array& grad, const Array& m, const Array& v,
               const Array& grad_scale, double lr, double beta1, double beta2, double eps,
               double l2, double weight_decay, int64_t step);
// grad *= factor in place; nonfinite, one int32, becomes 1 if that leaves an infinity or a NaN in
// grad.
void unscale(const Array& grad, double factor, const Array& nonfinite);

// --- attention over a block layout ---------------------------------------------------------------
// softmax(scale * q k^T + mask) v without a T x S array. q, out: (B, H, T, D); k, v: (B, H, S, D);
// last axis contiguous, the other three strides are given as (B, H, T). lse: (B, H, T) float32
// (float64 for float64). The layout names the key blocks of each query block: for head h (h %
// layout_heads), query block i, the entries row_ptr[hh * nq + i] .. row_ptr[hh * nq + i + 1] of
// col_idx (int32, ascending), with partial (uint8) = 1 where elements must be masked by `key <=
// q_start + query`. nq = ceil(T / block), nk = ceil(S / block); tails are cut. Queries with no key
// at all give out = 0 and lse = -inf. D is at most kMaxHead, as kernels.py's MAX_HEAD.
constexpr int64_t kMaxHead = 256;
void attention_forward(const Array& q, const Dims& q_strides, const Array& k, const Dims& k_strides,
                       const Array& v, const Dims& v_strides, const Array& out,
                       const Dims& out_strides, const Array& lse, const Array& row_ptr,
                       const Array& col_idx, const Array& partial, int64_t B, int64_t H, int64_t T,
                       int64_t S, int64_t D, int64_t layout_heads, int64_t block, int64_t q_start,
                       double scale);
// delta: workspace (B, H, T), dtype of lse: sum_d dout * out. The transposed index: for key block j
// of head hh the entries col_ptr[hh * nk + j] .. of row_idx (query blocks, ascending) and
// t_partial.
void attention_backward(const Array& dout, const Dims& dout_strides, const Array& q,
                        const Dims& q_strides, const Array& k, const Dims& k_strides,
                        const Array& v, const Dims& v_strides, const Array& out,
                        const Dims& out_strides, const Array& lse, const Array& delta,
                        const Array& dq, const Dims& dq_strides, const Array& dk,
                        const Dims& dk_strides, const Array& dv, const Dims& dv_strides,
                        const Array& row_ptr, const Array& col_idx, const Array& partial,
                        const Array& col_ptr, const Array& row_idx, const Array& t_partial,
                        int64_t B, int64_t H, int64_t T, int64_t S, int64_t D, int64_t layout_heads,
                        int64_t block, int64_t q_start, double scale);

// One new position of each sequence, positions[b] (int32) of batch item b: its k and v, (B, H, D)
// as q, become rows of the caches (B, H, S, D), which are contiguous, and out (B, H, D),
// contiguous, is softmax(scale * q k^T) v over the cached rows up to it that lie in the key blocks
// of the layout's query block positions[b] / block. No other row is read. q, k, v: strides of (B,
// H), last axis contiguous. The layout is causal, of ceil(S / block) blocks each way. A position
// outside 0..S-1: CPU: IndexError; cuda: the host thread's error flag, and out is NaN.
void attention_decode(const Array& q, const Dims& q_strides, const Array& k, const Dims& k_strides,
                      const Array& v, const Dims& v_strides, const Array& key_cache,
                      const Array& value_cache, const Array& positions, const Array& out,
                      const Array& row_ptr, const Array& col_idx, int64_t B, int64_t H, int64_t S,
                      int64_t D, int64_t layout_heads, int64_t block, double scale);

// --- block-sparse products -----------------------------------------------------------------------
// A block-sparse (m, n) matrix is blocks (batch, nnz, block, block) and an index. Batch item b uses
// layout head b % layout_heads. Head hh owns blocks row_ptr[hh * nb_rows] .. row_ptr[(hh + 1) *
// nb_rows] (entries of heads follow each other in one numbering, 0 .. nnz_total-1); the blocks of
// batch item b are stored at blocks[b, e - first(hh)] with nnz the largest number of entries of any
// head. sdd: blocks = op(a) @ op(b) at the layout's blocks only. a (batch, m, k), b (batch, k, n),
// transposed in storage when trans. m = nb_rows * block, n = nb_cols * block.
void blocksparse_sdd(const Array& a, bool trans_a, const Array& b, bool trans_b,
                     const Array& blocks, const Array& row_ptr, const Array& col_idx, int64_t batch,
                     int64_t m, int64_t n, int64_t k, int64_t nnz, int64_t layout_heads,
                     int64_t block);
// dsd: out (batch, m, n) = op(S) @ op(b). op(S) is (m, k). The index given is that of op(S)'s block
// rows: row_ptr (heads * m/block + 1), col_idx, and `entry` (int32), the storage position of each
// entry (for S itself entry[e] = e; for S^T the transposed index), where trans_s says that each
// stored block is used transposed.
void blocksparse_dsd(const Array& blocks, bool trans_s, const Array& b, bool trans_b,
                     const Array& out, const Array& row_ptr, const Array& col_idx,
                     const Array& entry, int64_t batch, int64_t m, int64_t n, int64_t k,
                     int64_t nnz, int64_t layout_heads, int64_t block);
// dds: out (batch, m, n) = op(a) @ op(S). op(S) is (k, n). The index given is that of op(S)'s block
// columns: col_ptr (heads * n/block + 1), row_idx (block rows, ascending), entry as above.
void blocksparse_dds(const Array& a, bool trans_a, const Array& blocks, bool trans_s,
                     const Array& out, const Array& col_ptr, const Array& row_idx,
                     const Array& entry, int64_t batch, int64_t m, int64_t n, int64_t k,
                     int64_t nnz, int64_t layout_heads, int64_t block);

// --- counter-based random numbers ----------------------------------------------------------------
// out = keep ? x / (1 - p) : 0, keep iff u_i >= p, where u_i in [0, 1) are the upper 24 bits of
// word i % 4 of Philox with counter offset + i / 4 and key seed: the same on any device, however
// the work is split. Its own gradient.
void dropout(const Array& x, const Array& out, double p, uint64_t seed, uint64_t offset);
