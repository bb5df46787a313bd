// Attention over a block layout, never storing more than one tile of scores.
//
//   s = scale q k^T (masked to -inf), lse = log sum_j exp(s_ij), p = exp(s - lse), out = p v
//   dv = p^T dout, dp = dout v^T, delta_i = dout_i . out_i,
//   ds = scale p * (dp - delta), dq = ds k, dk = ds^T q
//
// A tile is up to 64 queries against a run of adjacent key blocks. Queries lie along the vector
// lanes: scores are kept as S^T (keys, queries), so that row maxima and sums are plain vector
// operations, and both products read k and v where they are (lane_gemm). Forward carries a running
// maximum and sum (Milakov & Gimelshein 2018; Dao et al. 2022). Of bfloat16, products of two inputs
// go by pairs where the processor multiplies those, and p and ds stay float32; where it has tiles
// all products go by those, for which p and ds are rounded.
//
// Backward has two ways that give the same bits: all three gradients of one (batch, head) in one
// task, five products per tile, when there are heads enough to feed the pool; else dq by query
// tiles and dk, dv by key tiles (keys along the lanes, by the transposed index), seven products,
// any number of tasks. 16-bit types always take the second, whose sums stay in float32. Every
// element of a gradient is the same chain of additions in both: ascending, whatever the tiles.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "../common/backend.h"
#include "../common/bfloat16_cpu.h"
#include "../common/lane_gemm_cpu.h"
#include "../common/parallel.h"

namespace needle::cpu {
namespace {

constexpr int64_t kTile = 64;    // queries (keys in the dk, dv pass) along the lanes
constexpr int64_t kChunk = 128;  // the longest run of the other side
// The same in partial blocks: finer, so that less is computed and masked.
constexpr int64_t kPartial = 32;

// One thread's workspace.
template <class A>
struct Scratch {
  alignas(64) A q_lanes[kMaxHead * kTile], dout_lanes[kMaxHead * kTile];
  alignas(64) A out_lanes[kMaxHead * kTile], out2_lanes[kMaxHead * kTile];
  alignas(64) A scores[kChunk * kTile], dscores[kChunk * kTile];
  alignas(64) A rows[kChunk * kMaxHead], rows2[kChunk * kMaxHead];  // converted 16-bit rows
  alignas(64) A max[kTile], sum[kTile], limit[kTile], lse[kTile], delta[kTile];
};

// What it has besides for products by tiles; a row of `turned` is a feature.
struct TileScratch {
  alignas(64) bfloat16 copies[kChunk * kMaxHead], turned[kMaxHead * kChunk];
  alignas(64) bfloat16 weights[kChunk * kTile];  // in pairs of rows
};

// One (batch, head) of a (B, H, T, D) array.
template <class T>
struct Rows {
  T* data;
  int64_t stride;
  Rows(const Array& array, const Dims& strides, int64_t b, int64_t h)
      : data(array.data<std::remove_const_t<T>>() + b * strides[0] + h * strides[1]),
        stride(strides[2]) {}
  T* row(int64_t i) const { return data + i * stride; }
};

template <class A>
struct Matrix {
  const A* data;
  int64_t stride;
};

// Rows first .. first + n in the accumulate type: where they are, or converted into `buffer`.
template <class T, class A = accum_t<T>>
Matrix<A> fetch(const Rows<T>& from, int64_t first, int64_t n, int64_t D, A* buffer) {
  if constexpr (sizeof(T) == sizeof(A)) {
    (void)n, (void)D, (void)buffer;
    return {from.row(first), from.stride};
  } else {
    for (int64_t i = 0; i < n; ++i) convert_run(from.row(first + i), D, buffer + i * D);
    return {buffer, D};
  }
}

// Whether rows of bfloat16 are multiplied by pairs of their elements, in tiles or one by one.
bool by_pairs(int64_t D) { return by_tiles<bfloat16>() || (D % 2 == 0 && multiplies_pairs()); }

// lanes (D, kTile), or (D / 2, kTile) of pairs, = the transpose of n rows; lanes up to `width`
// beyond n are zero, and words that fill up tiles.
template <class T, class A = accum_t<T>>
void to_lanes(const Rows<const T>& from, int64_t first, int64_t n, int64_t width, int64_t D,
              A* lanes) {
  const auto clear_beyond = [&](int64_t words) {
    for (int64_t d = 0; d < words && n < width; ++d)
      std::fill(lanes + d * kTile + n, lanes + d * kTile + width, A(0));
  };
  if constexpr (std::is_same_v<T, bfloat16>)
    if (by_pairs(D)) {
      const int64_t words = ceil_div(D, 2);
      transpose_pairs(from.row(first), from.stride, n, D, reinterpret_cast<T*>(lanes), kTile);
      if (by_tiles<T>()) std::fill(lanes + words * kTile, lanes + tiles::words_of(D) * kTile, A(0));
      return clear_beyond(words);
    }
  transpose_tile(from.row(first), from.stride, n, D, lanes, kTile);
  clear_beyond(D);
}

// What multiply_lanes alone reads; pairs it reads where they are.
template <class T, class A = accum_t<T>>
Matrix<A> fetch_for_lanes(const Rows<const T>& from, int64_t first, int64_t n, int64_t D,
                          A* buffer) {
  if constexpr (std::is_same_v<T, bfloat16>)
    if (by_pairs(D)) return {};
  return fetch<const T>(from, first, n, D, buffer);
}
// What add_weighted reads, and multiply_lanes perhaps.
template <class T, class A = accum_t<T>>
Matrix<A> fetch_for_sums(const Rows<const T>& from, int64_t first, int64_t n, int64_t D,
                         A* buffer) {
  if (by_tiles<T>()) return {};
  return fetch<const T>(from, first, n, D, buffer);
}

// to (n, begin .. end) = n rows from `first` on, which are `fetched`, times what to_lanes made.
template <class T, class A = accum_t<T>>
void multiply_lanes(const Rows<const T>& from, int64_t first, const Matrix<A>& fetched, int64_t n,
                    int64_t begin, int64_t end, int64_t D, const A* lanes, A* to) {
  if constexpr (std::is_same_v<T, bfloat16> && tiles::kCompiled)
    if (by_tiles<T>()) {
      const tiles::Rows rows =
          tiles::rows_of(from.row(first), from.stride, n, D, of_this_thread<TileScratch>().copies);
      return tiles::gemm(round_up(n, tiles::kSide), end - begin, tiles::words_of(D), rows.data,
                         rows.stride, reinterpret_cast<const T*>(lanes + begin), kTile, to + begin,
                         kTile, false);
    }
  if constexpr (std::is_same_v<T, bfloat16>)
    if (by_pairs(D))
      return lane_gemm<T>(n, end - begin, D / 2, from.row(first), from.stride, 2,
                          reinterpret_cast<const T*>(lanes + begin), kTile, to + begin, kTile,
                          false);
  lane_gemm(n, end - begin, D, fetched.data, fetched.stride, 1, lanes + begin, kTile, to + begin,
            kTile, false);
}

// sums (D, begin .. end) = or += the transpose of n rows from `first` on, which are `fetched`,
// times `weights` (n, begin .. end).
template <class T, class A = accum_t<T>>
void add_weighted(const Rows<const T>& from, int64_t first, const Matrix<A>& fetched, int64_t n,
                  int64_t begin, int64_t end, int64_t D, const A* weights, A* sums,
                  bool accumulate) {
  if constexpr (std::is_same_v<T, bfloat16> && tiles::kCompiled)
    if (by_tiles<T>()) {
      TileScratch& s = of_this_thread<TileScratch>();
      const int64_t words = tiles::words_of(n);
      transpose_to_words(from.row(first), from.stride, n, D, s.turned, kChunk);
      for (int64_t word = 0; word < words; ++word)
        for (int64_t lane = begin; lane < end; lane += kLanes<A>) {
          const int64_t j = word / kLanes<A> * kLanes<A> + word;
          const auto row = [&](int64_t i) {
            return i < n ? load(weights + i * kTile + lane) : Vec<A>{};
          };
          const WordBits pairs = tiles::pair(row(j), row(j + kLanes<A>));
          std::memcpy(s.weights + 2 * (word * kTile + lane), &pairs, sizeof pairs);
        }
      return tiles::gemm(round_up(D, tiles::kSide), end - begin, words, s.turned, kChunk,
                         s.weights + 2 * begin, kTile, sums + begin, kTile, accumulate);
    }
  lane_gemm(D, end - begin, n, fetched.data, 1, fetched.stride, weights + begin, kTile,
            sums + begin, kTile, accumulate);
}

// The block layout as attention reads it: block -> the blocks of the other side.
struct BlockIndex {
  const int32_t *row_ptr, *col_idx;
  const uint8_t* partial;
  int64_t block;
  int64_t rows;    // blocks of this side per head
  int64_t others;  // elements of the other side

  // f(first, n, partial) over pieces of runs of adjacent full blocks, and of single partial ones,
  // ascending. The split depends on the layout alone.
  template <class F>
  void for_runs(int64_t head, int64_t row, F&& f) const {
    int64_t e = row_ptr[head * rows + row];
    const int64_t end = row_ptr[head * rows + row + 1];
    while (e < end) {
      int64_t last = e + 1;
      while (!partial[e] && last < end && !partial[last] && col_idx[last] == col_idx[last - 1] + 1)
        ++last;
      const int64_t stop = std::min((col_idx[last - 1] + 1) * block, others);
      const int64_t piece = partial[e] ? kPartial : kChunk;
      for (int64_t first = col_idx[e] * block; first < stop; first += piece)
        f(first, std::min(piece, stop - first), partial[e] != 0);
      e = last;
    }
  }
};

template <class A>
struct Problem {
  int64_t B, H, T, S, D, layout_heads, block, q_start;
  A scale;
  BlockIndex by_query, by_key;
};

BlockIndex block_index(const Array& ptr, const Array& idx, const Array& partial, int64_t block,
                       int64_t size, int64_t others) {
  return {ptr.data<int32_t>(),     idx.data<int32_t>(),
          partial.data<uint8_t>(), block,
          ceil_div(size, block),   others};
}

template <class A>
Problem<A> problem(const Array& row_ptr, const Array& col_idx, const Array& partial, int64_t B,
                   int64_t H, int64_t T, int64_t S, int64_t D, int64_t layout_heads, int64_t block,
                   int64_t q_start, double scale) {
  if (D > kMaxHead)
    throw std::invalid_argument("[attention] head size is too large: " + std::to_string(D) +
                                " (at most " + std::to_string(kMaxHead) + ")");
  if (block < 1)
    throw std::invalid_argument("[attention] bad block size: " + std::to_string(block) +
                                " (at least 1)");
  const BlockIndex by_query = block_index(row_ptr, col_idx, partial, block, T, S);
  return {B, H, T, S, D, layout_heads, block, q_start, A(scale), by_query, by_query};
}

// f(b, h, layout head, block, first, n) for every tile of at most kTile elements of the blocks of
// this side, in parallel; within a (batch, head) the last tile first, for a causal layout gives
// that the most work.
template <class F>
void for_tiles(int64_t B, int64_t H, int64_t layout_heads, int64_t block, int64_t size,
               int64_t first_head, F&& f) {
  const int64_t per_block = ceil_div(block, kTile), blocks = ceil_div(size, block);
  const int64_t per_head = blocks * per_block;
  parallel_for((B * H - first_head) * per_head, [&](int64_t task) {
    const int64_t head = first_head + task / per_head, tile = per_head - 1 - task % per_head;
    const int64_t row = tile / per_block, first = row * block + tile % per_block * kTile;
    const int64_t n = std::min({kTile, (row + 1) * block - first, size - first});
    if (n > 0) f(head / H, head % H, head % H % layout_heads, row, first, n);
  });
}

// Sums (D, kTile) that runs add to, each from lane `begin` on: the first run writes instead, so
// that nobody need clear them before. Lanes that it leaves out are cleared.
template <class A>
class LaneSums {
 public:
  LaneSums(A* lanes, int64_t D) : lanes_(lanes), D_(D) {}
  // Whether this run is the first.
  bool begin_run(int64_t begin) {
    const bool first = !started_;
    started_ = true;
    for (int64_t d = 0; first && begin > 0 && d < D_; ++d)
      std::fill_n(lanes_ + d * kTile, begin, A(0));
    return first;
  }
  // Without a run they are zero.
  void finish() {
    if (!started_) std::fill_n(lanes_, D_ * kTile, A(0));
  }

 private:
  A* lanes_;
  int64_t D_;
  bool started_ = false;
};

// --- forward -------------------------------------------------------------------------------------

// One run's scores S^T (n, begin .. width) become exp(s - max) against the new running maximum; sum
// and, unless this is the first run, out follow.
template <class A, bool masked>
void online_softmax(A* scores, int64_t n, int64_t begin, int64_t width, int64_t D, A scale,
                    bool first, Scratch<A>& s) {
  const Vec<A> minus_infinity = broadcast(-std::numeric_limits<A>::infinity());
  for (int64_t lane = begin; lane < width; lane += kLanes<A>) {
    A* column = scores + lane;
    const Vec<A> old_max = load(s.max + lane), limit = load(s.limit + lane);
    Vec<A> max = old_max;
    for (int64_t j = 0; j < n; ++j) {
      Vec<A> x = load(column + j * kTile) * scale;
      if constexpr (masked) x = broadcast(A(j)) > limit ? minus_infinity : x;
      store(column + j * kTile, x);
      max = x > max ? x : max;
    }
    const Vec<A> shift = max == minus_infinity ? Vec<A>{} : max;  // no key yet: exp(-inf - 0) = 0
    const Vec<A> decay = vexp_negative<A>(old_max - shift);
    Vec<A> sum{};
    for (int64_t j = 0; j < n; ++j) {
      const Vec<A> p = vexp_negative<A>(load(column + j * kTile) - shift);
      store(column + j * kTile, p);
      sum += p;
    }
    store(s.max + lane, max);
    store(s.sum + lane, load(s.sum + lane) * decay + sum);
    for (int64_t d = 0; d < D && !first; ++d)
      store(s.out_lanes + d * kTile + lane, load(s.out_lanes + d * kTile + lane) * decay);
  }
}

// The lanes before this one, whole vectors of queries, see none of a partial run's keys.
template <class A>
int64_t first_lane(int64_t first_query, int64_t first_key) {
  return std::max<int64_t>(0, first_key - first_query) / kLanes<A> * kLanes<A>;
}

// limit[i]: the last key of the run (counted from first_key) that query i may see.
template <class A>
void causal_limits(int64_t first_query, int64_t first_key, int64_t width, A* limit) {
  for (int64_t i = 0; i < width; ++i)
    limit[i] = A(std::clamp<int64_t>(first_query + i - first_key, -1, kChunk));
}

template <class T, class A = accum_t<T>>
void forward_tile(const Problem<A>& p, int64_t layout_head, int64_t block_row, int64_t first,
                  int64_t nq, const Rows<const T>& q, const Rows<const T>& k,
                  const Rows<const T>& v, const Rows<T>& out, A* lse) {
  [[maybe_unused]] const UseTilesFor<T> use;
  Scratch<A>& s = of_this_thread<Scratch<A>>();
  const int64_t D = p.D, width = round_up(nq, kLanes<A>);
  to_lanes(q, first, nq, width, D, s.q_lanes);
  std::fill_n(s.max, kTile, -std::numeric_limits<A>::infinity());
  std::fill_n(s.sum, kTile, A(0));
  LaneSums<A> out_sums(s.out_lanes, D);

  p.by_query.for_runs(layout_head, block_row, [&](int64_t key, int64_t n, bool partial) {
    if (partial) n = std::min(n, p.q_start + first + nq - key);  // no query here sees the rest
    if (n <= 0) return;
    const int64_t begin = partial ? first_lane<A>(p.q_start + first, key) : 0;
    const Matrix<A> keys = fetch_for_lanes(k, key, n, D, s.rows);
    multiply_lanes(k, key, keys, n, begin, width, D, s.q_lanes, s.scores);
    const bool first_run = out_sums.begin_run(begin);
    if (partial) causal_limits(p.q_start + first, key, width, s.limit);
    const auto softmax = partial ? online_softmax<A, true> : online_softmax<A, false>;
    softmax(s.scores, n, begin, width, D, p.scale, first_run, s);
    const Matrix<A> values = fetch_for_sums(v, key, n, D, s.rows);
    add_weighted(v, key, values, n, begin, width, D, s.scores, s.out_lanes, !first_run);
  });
  out_sums.finish();

  // Without a key the maximum is -inf and the sum 0: log gives -inf, and out stays 0.
  for (int64_t i = 0; i < nq; ++i) lse[first + i] = s.max[i] + std::log(s.sum[i]);
  for (int64_t lane = 0; lane < width; lane += kLanes<A>) {
    const Vec<A> sum = load(s.sum + lane), inverse = sum == Vec<A>{} ? Vec<A>{} : A(1) / sum;
    for (int64_t d = 0; d < D; ++d)
      store(s.out_lanes + d * kTile + lane, load(s.out_lanes + d * kTile + lane) * inverse);
  }
  transpose_tile(s.out_lanes, kTile, D, nq, out.row(first), out.stride);
}

// --- backward ------------------------------------------------------------------------------------

// scores (n, begin .. width) raw products -> p; dscores likewise dp -> ds. lse and delta
// belong to the lanes (queries along the lanes) or to the rows (keys along the lanes). Masked are
// the elements with j > limit (lanes), or, when keys lie along the lanes, the lanes greater than
// limit[j].
template <class A, bool masked, bool queries_on_lanes>
void softmax_gradient(A* scores, A* dscores, int64_t n, int64_t begin, int64_t width, A scale,
                      const A* lse, const A* delta, const A* limit) {
  Vec<A> lane_numbers;
  for (int l = 0; l < kLanes<A>; ++l) lane_numbers[l] = A(l);
  for (int64_t lane = begin; lane < width; lane += kLanes<A>) {
    Vec<A> lane_lse{}, lane_delta{}, lane_limit{};
    if (queries_on_lanes) {
      lane_lse = load(lse + lane), lane_delta = load(delta + lane);
      if (masked) lane_limit = load(limit + lane);
    }
    for (int64_t j = 0; j < n; ++j) {
      A *x = scores + j * kTile + lane, *dx = dscores + j * kTile + lane;
      const Vec<A> row_lse = queries_on_lanes ? lane_lse : broadcast(lse[j]);
      const Vec<A> row_delta = queries_on_lanes ? lane_delta : broadcast(delta[j]);
      Vec<A> probability = vexp_negative<A>(load(x) * scale - row_lse);
      if constexpr (masked) {
        if constexpr (queries_on_lanes)
          probability = broadcast(A(j)) > lane_limit ? Vec<A>{} : probability;
        else
          probability = lane_numbers + A(lane) > broadcast(limit[j]) ? Vec<A>{} : probability;
      }
      store(x, probability);
      store(dx, probability * (load(dx) - row_delta) * scale);
    }
  }
}

// Rows without a key have lse = -inf; +inf makes their probabilities zero.
template <class A>
void load_lse(const A* lse, int64_t n, int64_t width, A* to) {
  const A infinity = std::numeric_limits<A>::infinity();
  for (int64_t i = 0; i < width; ++i) to[i] = i < n && lse[i] != -infinity ? lse[i] : infinity;
}

// dq of one tile of queries; with_keys (T must be the accumulate type): adds the tile's part of dk
// and dv as well.
template <class T, bool with_keys, class A = accum_t<T>>
void backward_query_tile(const Problem<A>& p, int64_t layout_head, int64_t block_row, int64_t first,
                         int64_t nq, const Rows<const T>& dout, const Rows<const T>& q,
                         const Rows<const T>& k, const Rows<const T>& v, const A* lse,
                         const A* delta, const Rows<T>& dq, const Rows<T>& dk, const Rows<T>& dv) {
  [[maybe_unused]] const UseTilesFor<T> use;
  Scratch<A>& s = of_this_thread<Scratch<A>>();
  const int64_t D = p.D, width = round_up(nq, kLanes<A>);
  to_lanes(q, first, nq, width, D, s.q_lanes);
  to_lanes(dout, first, nq, width, D, s.dout_lanes);
  load_lse(lse + first, nq, width, s.lse);
  for (int64_t i = 0; i < width; ++i) s.delta[i] = i < nq ? delta[first + i] : A(0);
  LaneSums<A> dq_sums(s.out_lanes, D);

  p.by_query.for_runs(layout_head, block_row, [&](int64_t key, int64_t n, bool partial) {
    if (partial) n = std::min(n, p.q_start + first + nq - key);
    if (n <= 0) return;
    const int64_t begin = partial ? first_lane<A>(p.q_start + first, key) : 0;
    const Matrix<A> keys = fetch_for_sums(k, key, n, D, s.rows);
    const Matrix<A> values = fetch_for_lanes(v, key, n, D, s.rows2);
    multiply_lanes(k, key, keys, n, begin, width, D, s.q_lanes, s.scores);
    multiply_lanes(v, key, values, n, begin, width, D, s.dout_lanes, s.dscores);
    if (partial) causal_limits(p.q_start + first, key, width, s.limit);
    const auto gradient =
        partial ? softmax_gradient<A, true, true> : softmax_gradient<A, false, true>;
    gradient(s.scores, s.dscores, n, begin, width, p.scale, s.lse, s.delta, s.limit);
    add_weighted(k, key, keys, n, begin, width, D, s.dscores, s.out_lanes,
                 !dq_sums.begin_run(begin));
    if constexpr (with_keys) {
      lane_gemm(n, D, nq - begin, s.scores + begin, kTile, 1, dout.row(first + begin), dout.stride,
                dv.row(key), dv.stride, true);
      lane_gemm(n, D, nq - begin, s.dscores + begin, kTile, 1, q.row(first + begin), q.stride,
                dk.row(key), dk.stride, true);
    }
  });

  dq_sums.finish();
  transpose_tile(s.out_lanes, kTile, D, nq, dq.row(first), dq.stride);
}

// dk and dv of one tile of keys.
template <class T, class A = accum_t<T>>
void backward_key_tile(const Problem<A>& p, int64_t layout_head, int64_t block_row, int64_t first,
                       int64_t nk, const Rows<const T>& dout, const Rows<const T>& q,
                       const Rows<const T>& k, const Rows<const T>& v, const A* lse, const A* delta,
                       const Rows<T>& dk, const Rows<T>& dv) {
  [[maybe_unused]] const UseTilesFor<T> use;
  Scratch<A>& s = of_this_thread<Scratch<A>>();
  const int64_t D = p.D, width = round_up(nk, kLanes<A>);
  A row_lse[kChunk], limit[kChunk];
  to_lanes(k, first, nk, width, D, s.q_lanes);
  to_lanes(v, first, nk, width, D, s.dout_lanes);
  std::fill_n(s.out_lanes, D * kTile, A(0));
  std::fill_n(s.out2_lanes, D * kTile, A(0));

  p.by_key.for_runs(layout_head, block_row, [&](int64_t query, int64_t n, bool partial) {
    int64_t end = width;
    if (partial) {  // queries before the tile's first key see none, others none after themselves
      const int64_t skip = std::max<int64_t>(0, first - p.q_start - query);
      query += skip, n -= skip;
      end = std::min(width, round_up(p.q_start + query + n - first, kLanes<A>));
    }
    if (n <= 0) return;
    const Matrix<A> queries = fetch_for_sums(q, query, n, D, s.rows);
    const Matrix<A> douts = fetch_for_sums(dout, query, n, D, s.rows2);
    multiply_lanes(q, query, queries, n, 0, end, D, s.q_lanes, s.scores);
    multiply_lanes(dout, query, douts, n, 0, end, D, s.dout_lanes, s.dscores);
    load_lse(lse + query, n, n, row_lse);
    if (partial) causal_limits(p.q_start + query, first, n, limit);
    const auto gradient =
        partial ? softmax_gradient<A, true, false> : softmax_gradient<A, false, false>;
    gradient(s.scores, s.dscores, n, 0, end, p.scale, row_lse, delta + query, limit);
    add_weighted(dout, query, douts, n, 0, end, D, s.scores, s.out2_lanes, true);
    add_weighted(q, query, queries, n, 0, end, D, s.dscores, s.out_lanes, true);
  });

  transpose_tile(s.out_lanes, kTile, D, nk, dk.row(first), dk.stride);
  transpose_tile(s.out2_lanes, kTile, D, nk, dv.row(first), dv.stride);
}

// All gradients of one (batch, head).
template <class T>
void backward_head(const Problem<T>& p, int64_t layout_head, const Rows<const T>& dout,
                   const Rows<const T>& q, const Rows<const T>& k, const Rows<const T>& v,
                   const T* lse, const T* delta, const Rows<T>& dq, const Rows<T>& dk,
                   const Rows<T>& dv) {
  for (int64_t j = 0; j < p.S; ++j) {
    std::fill_n(dk.row(j), p.D, T(0));
    std::fill_n(dv.row(j), p.D, T(0));
  }
  for (int64_t row = 0; row < p.by_query.rows; ++row) {
    const int64_t stop = std::min((row + 1) * p.block, p.T);
    for (int64_t first = row * p.block; first < stop; first += kTile)
      backward_query_tile<T, true>(p, layout_head, row, first, std::min(kTile, stop - first), dout,
                                   q, k, v, lse, delta, dq, dk, dv);
  }
}

// delta (B, H, T) = sum_d dout * out
template <class T, class A = accum_t<T>>
void row_products(const Array& dout, const Dims& dout_strides, const Array& out,
                  const Dims& out_strides, A* delta, int64_t B, int64_t H, int64_t T_, int64_t D) {
  parallel_ranges(B * H * T_, 512, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t head = i / T_;
      const T* a = Rows<const T>(dout, dout_strides, head / H, head % H).row(i % T_);
      const T* b = Rows<const T>(out, out_strides, head / H, head % H).row(i % T_);
      delta[i] = dot(a, b, D);
    }
  });
}

}  // namespace

void attention_forward(const Array& q, const Dims& q_strides, const Array& k, const Dims& k_strides,
                       const Array& v, const Dims& v_strides, const Array& out,
                       const Dims& out_strides, const Array& lse, const Array& row_ptr,
                       const Array& col_idx, const Array& partial, int64_t B, int64_t H, int64_t T,
                       int64_t S, int64_t D, int64_t layout_heads, int64_t block, int64_t q_start,
                       double scale) {
  dispatch_float(q.dtype(), "attention", [&](auto tag) {
    using E = typename decltype(tag)::type;
    using A = accum_t<E>;
    const auto p =
        problem<A>(row_ptr, col_idx, partial, B, H, T, S, D, layout_heads, block, q_start, scale);
    for_tiles(
        B, H, layout_heads, block, T, 0,
        [&](int64_t b, int64_t h, int64_t layout_head, int64_t row, int64_t first, int64_t n) {
          forward_tile<E>(p, layout_head, row, first, n, {q, q_strides, b, h}, {k, k_strides, b, h},
                          {v, v_strides, b, h}, {out, out_strides, b, h},
                          lse.data<A>() + (b * H + h) * T);
        });
  });
}

void attention_backward(const Array& dout, const Dims& dout_strides, const Array& q,
                        const Dims& q_strides, const Array& k, const Dims& k_strides,
                        const Array& v, const Dims& v_strides, const Array& out,
                        const Dims& out_strides, const Array& lse, const Array& delta,
                        const Array& dq, const Dims& dq_strides, const Array& dk,
                        const Dims& dk_strides, const Array& dv, const Dims& dv_strides,
                        const Array& row_ptr, const Array& col_idx, const Array& partial,
                        const Array& col_ptr, const Array& row_idx, const Array& t_partial,
                        int64_t B, int64_t H, int64_t T, int64_t S, int64_t D, int64_t layout_heads,
                        int64_t block, int64_t q_start, double scale) {
  dispatch_float(q.dtype(), "attention", [&](auto tag) {
    using E = typename decltype(tag)::type;
    using A = accum_t<E>;
    auto p =
        problem<A>(row_ptr, col_idx, partial, B, H, T, S, D, layout_heads, block, q_start, scale);
    p.by_key = block_index(col_ptr, row_idx, t_partial, block, S, T);
    row_products<E>(dout, dout_strides, out, out_strides, delta.data<A>(), B, H, T, D);

    // As many whole heads as divide evenly among the threads go one per task; the rest, tile by
    // tile.
    int64_t whole_heads = 0;
    if constexpr (std::is_same_v<E, A>) {
      const int64_t threads = num_threads();
      whole_heads = B * H / threads * threads;
      parallel_for(whole_heads, [&](int64_t head) {
        const int64_t b = head / H, h = head % H;
        backward_head<E>(p, h % layout_heads, {dout, dout_strides, b, h}, {q, q_strides, b, h},
                         {k, k_strides, b, h}, {v, v_strides, b, h}, lse.data<A>() + head * T,
                         delta.data<A>() + head * T, {dq, dq_strides, b, h}, {dk, dk_strides, b, h},
                         {dv, dv_strides, b, h});
      });
    }
    for_tiles(
        B, H, layout_heads, block, T, whole_heads,
        [&](int64_t b, int64_t h, int64_t layout_head, int64_t row, int64_t first, int64_t n) {
          const int64_t at = (b * H + h) * T;
          backward_query_tile<E, false>(
              p, layout_head, row, first, n, {dout, dout_strides, b, h}, {q, q_strides, b, h},
              {k, k_strides, b, h}, {v, v_strides, b, h}, lse.data<A>() + at, delta.data<A>() + at,
              {dq, dq_strides, b, h}, {dk, dk_strides, b, h}, {dv, dv_strides, b, h});
        });
    for_tiles(
        B, H, layout_heads, block, S, whole_heads,
        [&](int64_t b, int64_t h, int64_t layout_head, int64_t row, int64_t first, int64_t n) {
          const int64_t at = (b * H + h) * T;
          backward_key_tile<E>(p, layout_head, row, first, n, {dout, dout_strides, b, h},
                               {q, q_strides, b, h}, {k, k_strides, b, h}, {v, v_strides, b, h},
                               lse.data<A>() + at, delta.data<A>() + at, {dk, dk_strides, b, h},
                               {dv, dv_strides, b, h});
        });
  });
}

}  // namespace needle::cpu
