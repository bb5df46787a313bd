// Dropout: which elements are kept is a matter of a counter, so that backward, a recomputation and
// another device make the same mask again.
#include <algorithm>

#include "../common/backend.h"
#include "../common/parallel.h"
#include "../common/philox.h"

namespace needle::cpu {

// Made at once, in two loops that become vector code; a task's elements are a multiple of them.
constexpr int64_t kNumbers = 512;

void dropout(const Array& x, const Array& out, double p, uint64_t seed, uint64_t offset) {
  if (!(p >= 0 && p <= 1))
    throw std::invalid_argument("[dropout] p is no probability: " + std::to_string(p) +
                                " (0 to 1)");
  if (x.size() < out.size())
    throw std::out_of_range("[dropout] x has " + std::to_string(x.size()) + " elements, out has " +
                            std::to_string(out.size()));
  dispatch_float(out.dtype(), "dropout", [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = accum_t<T>;
    const T* from = x.data<T>();
    T* to = out.data<T>();
    const float threshold = float(p);
    const C kept = C(1 - p);
    parallel_ranges(out.size(), 1 << 14, [&](int64_t begin, int64_t end) {
      for (int64_t first = begin; first < end; first += kNumbers) {
        alignas(64) float u[kNumbers];
        for (int64_t g = 0; g < kNumbers / 4; ++g) {
          const Philox random = philox(offset + uint64_t(first / 4 + g), seed);
          for (int i = 0; i < 4; ++i) u[4 * g + i] = uniform(random.word[i]);
        }
        const int64_t n = std::min(kNumbers, end - first);
        for (int64_t i = 0; i < n; ++i)
          to[first + i] = T(u[i] >= threshold ? C(from[first + i]) / kept : C(0));
      }
    });
  });
}

}  // namespace needle::cpu
