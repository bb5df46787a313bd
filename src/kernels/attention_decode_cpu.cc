// Attention of one new position per sequence to the keys and values before it.
//
// A task is one (batch, head). It walks the key blocks that the layout names with a running maximum
// and sum; rows of the caches are read once, whole vectors along the head dimension.
#include <algorithm>
#include <cmath>
#include <string>

#include "../common/backend.h"
#include "../common/ids.h"
#include "../common/parallel.h"
#include "../common/simd_cpu.h"

namespace needle::cpu {
namespace {

constexpr int64_t kMaxBlock = 128;
constexpr int64_t kTaskElements = 32 << 10;  // of the keys, below which a task is not worth it

// y += factor * x
template <class T, class A = accum_t<T>>
void add_scaled(A factor, const T* x, A* y, int64_t n) {
  for_vectors<A>(n, [&](int64_t i, auto... lanes) {
    store(y + i, load(y + i, lanes...) + factor * load(x + i, lanes...), lanes...);
  });
}

// One head: keys and values (S, D), the last one at `position`; [begin, end) are its key blocks.
template <class T, class A = accum_t<T>>
void decode_head(const T* query, const T* keys, const T* values, int64_t position, int64_t D,
                 const int32_t* begin, const int32_t* end, int64_t block, A scale, T* out) {
  alignas(64) A q[kMaxHead], sums[kMaxHead] = {}, scores[kMaxBlock];
  for (int64_t d = 0; d < D; ++d) q[d] = A(query[d]) * scale;
  const A lowest = -std::numeric_limits<A>::infinity();
  A max = lowest, total = 0;
  for (const int32_t* at = begin; at < end; ++at) {
    const int64_t first = *at * block, n = std::min(block, position + 1 - first);
    if (n <= 0) break;
    A largest = max;
    for (int64_t j = 0; j < n; ++j) {
      scores[j] = dot(q, keys + (first + j) * D, D);
      largest = std::max(largest, scores[j]);
    }
    const A shift = largest == lowest ? A(0) : largest;  // no weight yet
    const A decay = std::exp(max - shift);
    max = largest;
    total *= decay;
    for (int64_t d = 0; d < D; ++d) sums[d] *= decay;
    for (int64_t j = 0; j < n; ++j) {
      const A p = std::exp(scores[j] - shift);
      total += p;
      add_scaled(p, values + (first + j) * D, sums, D);
    }
  }
  for (int64_t d = 0; d < D; ++d) out[d] = T(total == 0 ? A(0) : sums[d] / total);
}

}  // namespace

void attention_decode(const Array& q, const Dims& q_strides, const Array& k, const Dims& k_strides,
                      const Array& v, const Dims& v_strides, const Array& key_cache,
                      const Array& value_cache, const Array& positions, const Array& out,
                      const Array& row_ptr, const Array& col_idx, int64_t B, int64_t H, int64_t S,
                      int64_t D, int64_t layout_heads, int64_t block, double scale) {
  if (D > kMaxHead || block < 1 || block > kMaxBlock)
    throw std::invalid_argument("[attention_decode] head size " + std::to_string(D) + ", block " +
                                std::to_string(block) + " (at most " + std::to_string(kMaxHead) +
                                " and " + std::to_string(kMaxBlock) + ")");
  const int32_t *position = positions.data<int32_t>(), *rows = row_ptr.data<int32_t>(),
                *blocks = col_idx.data<int32_t>();
  check_ids(position, B, S, BadId::attention_decode);
  int64_t longest = 0;
  for (int64_t b = 0; b < B; ++b) longest = std::max<int64_t>(longest, id_at(position, b, S) + 1);
  const int64_t lines = ceil_div(S, block);
  dispatch_float(q.dtype(), "attention_decode", [&](auto tag) {
    using E = typename decltype(tag)::type;
    parallel_ranges(B * H, 1 + kTaskElements / (longest * D + 1), [&](int64_t begin, int64_t end) {
      for (int64_t head = begin; head < end; ++head) {
        const int64_t b = head / H, h = head % H, at = id_at(position, b, S);
        if (at < 0) continue;
        E *keys = key_cache.data<E>() + head * S * D,
          *values = value_cache.data<E>() + head * S * D;
        std::copy_n(k.data<E>() + b * k_strides[0] + h * k_strides[1], D, keys + at * D);
        std::copy_n(v.data<E>() + b * v_strides[0] + h * v_strides[1], D, values + at * D);
        const int32_t* line = rows + h % layout_heads * lines + at / block;
        decode_head<E>(q.data<E>() + b * q_strides[0] + h * q_strides[1], keys, values, at, D,
                       blocks + line[0], blocks + line[1], block, accum_t<E>(scale),
                       out.data<E>() + head * D);
      }
    });
  });
}

}  // namespace needle::cpu
