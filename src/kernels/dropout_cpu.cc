// Dropout: which elements are kept is a matter of a counter, so that backward, a recomputation and
// another device make the same mask again.
#include <algorithm>

#include "../common/backend.h"
#include "../common/parallel.h"
#include "../common/philox.h"

namespace needle::cpu {

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
    parallel_ranges(ceil_div(out.size(), 4), 1 << 12, [&](int64_t begin, int64_t end) {
      for (int64_t group = begin; group < end; ++group) {
        const Philox random = philox(offset + uint64_t(group), seed);
        const int64_t n = std::min<int64_t>(4, out.size() - 4 * group);
        for (int64_t i = 0; i < n; ++i) {
          const int64_t at = 4 * group + i;
          to[at] = T(uniform(random.word[i]) >= threshold ? C(from[at]) / kept : C(0));
        }
      }
    });
  });
}

}  // namespace needle::cpu
