// Embedding: one_hot(ids) @ weight, at the cost of a gather; its gradient, a scatter-add by id;
// rows put in their places by id; and one_hot itself.
//   out[i] = weight[ids[i]],  dweight[w] (+)= sum of dy[i] over ids[i] == w, i ascending
// Backward sorts the positions by id (a counting sort, stable), so that one task owns a row of
// dweight: no races, one order.
#include <algorithm>

#include "../common/backend.h"
#include "../common/ids.h"
#include "../common/parallel.h"
#include "../common/simd_cpu.h"

namespace needle::cpu {
namespace {

int64_t rows_per_task(int64_t dim) { return 1 + 16384 / (dim + 1); }

}  // namespace

void embedding_forward(const Array& weight, const Array& ids, const Array& out, int64_t n,
                       int64_t vocab, int64_t dim) {
  dispatch_ids(ids, "embedding", [&](auto id_tag) {
    const auto* id = ids.data<typename decltype(id_tag)::type>();
    check_ids(id, n, vocab, BadId::embedding);
    const int64_t row_bytes = dim * dtype_size(weight.dtype());
    const char* from = static_cast<const char*>(weight.ptr());
    char* to = static_cast<char*>(out.ptr());
    parallel_ranges(n, rows_per_task(dim), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        if (const int64_t w = id_at(id, i, vocab); w >= 0)
          memcpy(to + i * row_bytes, from + w * row_bytes, row_bytes);
    });
  });
}

void embedding_backward(const Array& dy, const Array& ids, const Array& dweight,
                        const Array& workspace, int64_t n, int64_t vocab, int64_t dim,
                        bool accumulate) {
  check_countable("embedding_backward", n);
  int32_t* first = workspace.data<int32_t>();  // (vocab + 1): where the positions of an id start
  int32_t* positions = first + vocab + 1;      // (n): positions by id, ascending within an id
  dispatch_ids(ids, "embedding", [&](auto id_tag) {
    const auto* id = ids.data<typename decltype(id_tag)::type>();
    check_ids(id, n, vocab, BadId::embedding);
    std::fill_n(first, vocab + 1, 0);
    for (int64_t i = 0; i < n; ++i) ++first[id_at(id, i, vocab) + 1];
    first[0] = 0;  // where those outside were counted, if there are any by now
    for (int64_t w = 0; w < vocab; ++w) first[w + 1] += first[w];
    std::fill_n(positions, n, 0);  // where ids change meanwhile, not all places are written
    for (int64_t i = 0; i < n; ++i)
      if (const int64_t w = id_at(id, i, vocab); w >= 0 && first[w] < n)
        positions[first[w]++] = int32_t(i);
    // first[w] has moved on to the start of w + 1.
  });
  const auto start = [&](int64_t w) { return w == 0 ? 0 : first[w - 1]; };
  dispatch_float(dy.dtype(), "embedding", [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = accum_t<T>;
    const T* grads = dy.data<T>();
    T* dw = dweight.data<T>();
    parallel_ranges(vocab, rows_per_task(dim), [&](int64_t begin, int64_t end) {
      // Most ids come not at all where few elements of many are indexed.
      if (!accumulate) std::fill(dw + begin * dim, dw + end * dim, T(0.f));
      for (int64_t w = begin; w < end; ++w) {
        if (start(w) == first[w]) continue;
        T* const to = dw + w * dim;
        for_vectors<A>(dim, [&](int64_t c, auto... lanes) {
          Vec<A> sum{};
          for (int32_t e = start(w); e < first[w]; ++e)
            sum += load(grads + positions[e] * dim + c, lanes...);
          store(to + c, accumulate ? load(to + c, lanes...) + sum : sum, lanes...);
        });
      }
    });
  });
}

void embedding_put(const Array& rows, const Array& ids, const Array& weight, int64_t n,
                   int64_t vocab, int64_t dim) {
  dispatch_ids(ids, "embedding", [&](auto id_tag) {
    const auto* id = ids.data<typename decltype(id_tag)::type>();
    check_ids(id, n, vocab, BadId::embedding, -1);
    const int64_t row_bytes = dim * dtype_size(weight.dtype());
    const char* from = static_cast<const char*>(rows.ptr());
    char* to = static_cast<char*>(weight.ptr());
    parallel_ranges(n, rows_per_task(dim), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        if (const int64_t w = id_at(id, i, vocab); w >= 0)
          memcpy(to + w * row_bytes, from + i * row_bytes, row_bytes);
    });
  });
}

void one_hot(const Array& ids, const Array& out, int64_t n, int64_t depth) {
  dispatch_ids(ids, "one_hot", [&](auto id_tag) {
    const auto* id = ids.data<typename decltype(id_tag)::type>();
    check_ids(id, n, depth, BadId::one_hot);
    dispatch_any(out.dtype(), [&](auto tag) {
      using T = typename decltype(tag)::type;
      T* to = out.data<T>();
      parallel_ranges(n, rows_per_task(depth), [&](int64_t begin, int64_t end) {
        std::fill(to + begin * depth, to + end * depth, T(0));
        for (int64_t i = begin; i < end; ++i)
          if (const int64_t w = id_at(id, i, depth); w >= 0) to[i * depth + w] = T(1);
      });
    });
  });
}

}  // namespace needle::cpu
