// Embedding on a GPU: out[i] = weight[ids[i]], its gradient, weight[ids[i]] = rows[i], and one_hot.
//
// dweight[v] = sum of dy[i] over the i with ids[i] = v, in ascending i, so results repeat bit by
// bit: positions are counted by id, placed into their id's range, put in order within the range,
// and summed, each dweight row by its own threads. An id out of range sets the error flag, read at
// the next sync; its row of `out` is NaN, of integers 0.
#include "../common/cuda_util.cuh"

namespace needle::NEEDLE_DEVICE {
namespace {

// move(i, place) for the vectors i of n rows and their place among those of `vocab` rows, by id; -1
// where an id is out of range, which is reported unless it is `ignored` (0, an id like any other,
// stands for none).
template <class Id, class Move>
__device__ void for_vectors_by_id(const Id* ids, int64_t n, int64_t vocab, int64_t vectors_per_row,
                                  int64_t ignored, ErrorFlag* flag, Move move) {
  for (int64_t i = first_index(); i < n * vectors_per_row; i += index_step()) {
    const int64_t position = i / vectors_per_row, c = i % vectors_per_row, id = ids[position];
    const bool inside = id >= 0 && id < vocab;
    if (!inside && c == 0 && (ignored == 0 || id != ignored))
      report_bad_id(flag, BadId::embedding, id, position, vocab);
    move(i, inside ? id * vectors_per_row + c : -1);
  }
}

template <class T, int N, class Id>
__global__ void embedding_forward_kernel(const T* weight, const Id* ids, T* out, int64_t n,
                                         int64_t vocab, int64_t vectors_per_row, ErrorFlag* flag) {
  using V = Vec<T, N>;
  for_vectors_by_id(ids, n, vocab, vectors_per_row, 0, flag, [&](int64_t i, int64_t place) {
    V value;
    if (place >= 0) {
      value = reinterpret_cast<const V*>(weight)[place];
    } else {
      for (int j = 0; j < N; ++j)
        value.v[j] = std::is_integral<T>::value ? T(0) : T(accum_t<T>(NAN));
    }
    reinterpret_cast<V*>(out)[i] = value;
  });
}

template <class T, int N, class Id>
__global__ void embedding_put_kernel(const T* rows, const Id* ids, T* weight, int64_t n,
                                     int64_t vocab, int64_t vectors_per_row, ErrorFlag* flag) {
  using V = Vec<T, N>;
  for_vectors_by_id(ids, n, vocab, vectors_per_row, -1, flag, [&](int64_t i, int64_t place) {
    if (place >= 0) reinterpret_cast<V*>(weight)[place] = reinterpret_cast<const V*>(rows)[i];
  });
}

// --- gradient: `ends` (vocab + 1) and `positions` (n) lie in the workspace -----------------------

template <class Id>
__global__ void embedding_count_kernel(const Id* ids, int32_t* counts, int64_t n, int64_t vocab,
                                       ErrorFlag* flag) {
  for (int64_t i = first_index(); i < n; i += index_step()) {
    const int64_t id = ids[i];
    if (id >= 0 && id < vocab) {
      atomicAdd(&counts[id], 1);
    } else {
      report_bad_id(flag, BadId::embedding, id, i, vocab);
    }
  }
}

// counts[v] becomes the end of v's range, counts[vocab] the number of all. One block; each warp
// owns a stretch and reads a line of it at a time.
constexpr int kScanThreads = 1024;
__global__ void embedding_scan_kernel(int32_t* counts, int64_t vocab) {
  constexpr int kWarps = kScanThreads / kWarp;
  NEEDLE_SHARED(int32_t, sums, kWarps);
  const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp;
  const int64_t each = ceil_div(vocab, kScanThreads) * kWarp;
  const int64_t first = warp * each, end = vocab < first + each ? vocab : first + each;
  int32_t total = 0;
  for (int64_t v = first + lane; v < end; v += kWarp) total += counts[v];
  total = sum_lanes<kWarp>(total);
  if (lane == 0) sums[warp] = total;
  __syncthreads();
  int32_t before = 0;
  for (int w = 0; w < warp; ++w) before += sums[w];
  for (int64_t v = first + lane; v - lane < end; v += kWarp) {
    int32_t sum = v < end ? counts[v] : 0;
    for (int step = 1; step < kWarp; step *= 2) {
      const int32_t left = __shfl_up_sync(kAllLanes, sum, unsigned(step));
      if (lane >= step) sum += left;
    }
    if (v < end) counts[v] = before + sum;
    before += __shfl_sync(kAllLanes, sum, kWarp - 1);
  }
  if (threadIdx.x == kScanThreads - 1) counts[vocab] = before;
}

// Takes places from the back of each range, so afterwards ends[v] is where v's range starts and
// ends[v + 1] where it ends.
template <class Id>
__global__ void embedding_place_kernel(const Id* ids, int32_t* ends, int32_t* positions, int64_t n,
                                       int64_t vocab) {
  for (int64_t i = first_index(); i < n; i += index_step()) {
    const int64_t id = ids[i];
    if (id >= 0 && id < vocab) positions[atomicAdd(&ends[id], -1) - 1] = int32_t(i);
  }
}

// Puts each range in ascending order. A short range is sorted by counting what is smaller; a long
// one is found again by looking through all ids in order, which costs n for each of at most n /
// kShortRange ranges.
constexpr int kShortRange = 1024, kSortThreads = 128;
template <class Id>
__global__ void embedding_sort_kernel(const Id* ids, const int32_t* starts, int32_t* positions,
                                      int64_t n, int64_t vocab) {
  NEEDLE_SHARED(int32_t, range, kShortRange);
  NEEDLE_SHARED(int32_t, found_by_warp, kSortThreads / kWarp);
  const int me = int(threadIdx.x), lane = me % kWarp, warp = me / kWarp;
  for (int64_t v = blockIdx.x; v < vocab; v += gridDim.x) {
    const int32_t start = starts[v], count = starts[v + 1] - start;
    if (count <= 1) continue;
    if (count <= kShortRange) {
      for (int i = me; i < count; i += kSortThreads) range[i] = positions[start + i];
      __syncthreads();
      for (int i = me; i < count; i += kSortThreads) {
        int rank = 0;
        for (int j = 0; j < count; ++j) rank += range[j] < range[i];
        positions[start + rank] = range[i];
      }
      __syncthreads();
    } else {
      int32_t next = start;
      for (int64_t i0 = 0; i0 < n; i0 += kSortThreads) {
        const bool mine = i0 + me < n && int64_t(ids[i0 + me]) == v;
        const unsigned found = __ballot_sync(kAllLanes, mine);
        if (lane == 0) found_by_warp[warp] = __popc(found);
        __syncthreads();
        int32_t before = __popc(found & ((1u << lane) - 1u)), all = 0;
        for (int w = 0; w < kSortThreads / kWarp; ++w) {
          if (w < warp) before += found_by_warp[w];
          all += found_by_warp[w];
        }
        if (mine) positions[next + before] = int32_t(i0 + me);
        next += all;
        __syncthreads();
      }
    }
  }
}

template <class T>
__global__ void embedding_sum_kernel(const T* dy, const int32_t* starts, const int32_t* positions,
                                     T* dweight, int64_t vocab, int64_t dim, bool accumulate) {
  using A = accum_t<T>;
  const int64_t column_tiles = ceil_div(dim, blockDim.x);
  for (int64_t t = blockIdx.x; t < vocab * column_tiles; t += gridDim.x) {
    const int64_t v = t / column_tiles, c = t % column_tiles * blockDim.x + threadIdx.x;
    const int32_t first = starts[v], end = starts[v + 1];
    if (c >= dim || (accumulate && first == end)) continue;
    A total = accumulate ? A(dweight[v * dim + c]) : A(0);
    // An id that comes often is one long chain of additions.
    in_groups<16>(
        first, 1, end, [&](int64_t p) { return A(dy[int64_t(positions[p]) * dim + c]); },
        [&](int64_t, A row) { total += row; });
    dweight[v * dim + c] = T(total);
  }
}

template <class T, class Id>
__global__ void one_hot_kernel(const Id* ids, T* out, int64_t n, int64_t depth, ErrorFlag* flag) {
  for (int64_t i = first_index(); i < n * depth; i += index_step()) {
    const int64_t position = i / depth, c = i % depth, id = ids[position];
    if (c == 0 && (id < 0 || id >= depth)) report_bad_id(flag, BadId::one_hot, id, position, depth);
    out[i] = T(accum_t<T>(c == id ? 1 : 0));
  }
}

// move(T, Id, N) for rows of `dim` elements that are moved N at a time.
template <class Move>
void move_rows(const Array& weight, const Array& rows, const Array& ids, int64_t dim, Move move) {
  dispatch_any(weight.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int N = 16 / int(sizeof(T));
    dispatch_ids(ids, "embedding", [&](auto id_tag) {
      if (dim % N == 0 && aligned_for<Vec<T, N>>(weight.ptr()) &&
          aligned_for<Vec<T, N>>(rows.ptr())) {
        move(tag, id_tag, Int<N>{});
      } else {
        move(tag, id_tag, Int<1>{});
      }
    });
  });
}

}  // namespace

void embedding_forward(const Array& weight, const Array& ids, const Array& out, int64_t n,
                       int64_t vocab, int64_t dim) {
  move_rows(weight, out, ids, dim, [&](auto tag, auto id_tag, auto at_once) {
    using T = typename decltype(tag)::type;
    using Id = typename decltype(id_tag)::type;
    constexpr int N = at_once;
    launch<embedding_forward_kernel<T, N, Id>>(grid_stride(n * dim / N), weight.data<T>(),
                                               ids.data<Id>(), out.data<T>(), n, vocab, dim / N,
                                               error_flag());
  });
}

void embedding_put(const Array& rows, const Array& ids, const Array& weight, int64_t n,
                   int64_t vocab, int64_t dim) {
  move_rows(weight, rows, ids, dim, [&](auto tag, auto id_tag, auto at_once) {
    using T = typename decltype(tag)::type;
    using Id = typename decltype(id_tag)::type;
    constexpr int N = at_once;
    launch<embedding_put_kernel<T, N, Id>>(grid_stride(n * dim / N), rows.data<T>(), ids.data<Id>(),
                                           weight.data<T>(), n, vocab, dim / N, error_flag());
  });
}

void embedding_backward(const Array& dy, const Array& ids, const Array& dweight,
                        const Array& workspace, int64_t n, int64_t vocab, int64_t dim,
                        bool accumulate) {
  check_countable("embedding_backward", n);
  int32_t* ends = workspace.data<int32_t>();
  int32_t* positions = ends + vocab + 1;
  fill(workspace.view(0, vocab + 1), Scalar{0, 0});
  if (n > 0) {
    dispatch_ids(ids, "embedding_backward", [&](auto id_tag) {
      using Id = typename decltype(id_tag)::type;
      launch<embedding_count_kernel<Id>>(grid_stride(n), ids.data<Id>(), ends, n, vocab,
                                         error_flag());
      launch<embedding_scan_kernel>(grid_of(1, kScanThreads), ends, vocab);
      launch<embedding_place_kernel<Id>>(grid_stride(n), ids.data<Id>(), ends, positions, n, vocab);
      launch<embedding_sort_kernel<Id>>(grid_of(blocks_for(vocab), kSortThreads), ids.data<Id>(),
                                        static_cast<const int32_t*>(ends), positions, n, vocab);
    });
  }
  dispatch_float(dy.dtype(), "embedding_backward", [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int threads = 128;
    launch<embedding_sum_kernel<T>>(grid_of(blocks_for(vocab * ceil_div(dim, threads)), threads),
                                    dy.data<T>(), static_cast<const int32_t*>(ends),
                                    static_cast<const int32_t*>(positions), dweight.data<T>(),
                                    vocab, dim, accumulate);
  });
}

void one_hot(const Array& ids, const Array& out, int64_t n, int64_t depth) {
  dispatch_any(out.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    dispatch_ids(ids, "one_hot", [&](auto id_tag) {
      using Id = typename decltype(id_tag)::type;
      launch<one_hot_kernel<T, Id>>(grid_stride(n * depth), ids.data<Id>(), out.data<T>(), n, depth,
                                    error_flag());
    });
  });
}

}  // namespace needle::NEEDLE_DEVICE
