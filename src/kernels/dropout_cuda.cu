// Dropout, one thread per counter of Philox, four elements each.
#include "../common/cuda_util.cuh"
#include "../common/philox.h"

namespace needle::NEEDLE_DEVICE {
namespace {

template <class T>
__global__ void dropout_kernel(const T* x, T* out, int64_t n, float p, accum_t<T> keep_probability,
                               uint64_t seed, uint64_t offset) {
  using A = accum_t<T>;
  for (int64_t q = first_index(); q * 4 < n; q += index_step()) {
    const Philox random = philox(offset + uint64_t(q), seed);
    A four[4] = {};
    for (int j = 0; j < 4 && q * 4 + j < n; ++j) {
      if (uniform(random.word[j]) >= p) four[j] = A(x[q * 4 + j]) / keep_probability;
    }
    store_run(out + q * 4, four, n - q * 4);
  }
}

}  // namespace

void dropout(const Array& x, const Array& out, double p, uint64_t seed, uint64_t offset) {
  dispatch_float(out.dtype(), "dropout", [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch<dropout_kernel<T>>(grid_stride(ceil_div(out.size(), 4)), x.data<T>(), out.data<T>(),
                              out.size(), float(p), accum_t<T>(1 - p), seed, offset);
  });
}

}  // namespace needle::NEEDLE_DEVICE
