// Convolution: each window of an image times the kernel, and the kernel's gradient, each window
// times its gradient. Products of matrices, whose inner loop gets the windows a few at a time
// (gemm_cpu.h): there is no array of them.
#include <algorithm>

#include "../common/backend.h"
#include "../common/gemm_cpu.h"
#include "../common/parallel.h"

namespace needle::cpu {
namespace {

template <class T>
Windows<T> windows_of(const Array& image, int64_t images, int64_t channels, const Dims& rows,
                      const Dims& cols) {
  return {image.data<T>(), images, channels, window_axis(rows), window_axis(cols)};
}

// f(element, value) for the elements of a window that are in the image.
template <class T, class F>
void for_window(const Windows<T>& w, int64_t window, F&& f) {
  const int64_t line = window / w.cols.windows, image = line / w.rows.windows;
  const int64_t y0 = line % w.rows.windows * w.rows.stride - w.rows.before;
  const int64_t x0 = window % w.cols.windows * w.cols.stride - w.cols.before;
  for (int64_t k = std::max<int64_t>(-y0, 0); k < std::min(w.rows.size, w.rows.n - y0); ++k)
    for (int64_t l = std::max<int64_t>(-x0, 0); l < std::min(w.cols.size, w.cols.n - x0); ++l) {
      const T* pixel = w.image + ((image * w.rows.n + y0 + k) * w.cols.n + x0 + l) * w.channels;
      for (int64_t c = 0; c < w.channels; ++c) f((k * w.cols.size + l) * w.channels + c, pixel[c]);
    }
}

constexpr int64_t kParts = 8;               // into which the windows of a small result are cut
constexpr int64_t kPartWindows = 512;       // the least of a part
constexpr int64_t kPartialSums = 64 << 10;  // elements of all parts: they are added by one thread

// out (elements, n) = or += windows^T @ dy (windows, n). Of a small result, whose elements are too
// few for tasks of their own, a task is a part of the windows; the parts' sums are added in their
// order.
template <class T>
void add_up_windows(const Windows<T>& windows, int64_t n, const T* dy, bool accumulate,
                    accum_t<T>* out) {
  const int64_t count = windows.count(), size = windows.elements() * n;
  const Cut parts(windows.all(), std::max(ceil_div(count, kParts), kPartWindows));
  if (parts.count() < kParts || size > kPartialSums / parts.count())
    return gemm_of_windows(windows, windows.all(), n, dy, accumulate, out);
  add_parts<kPartialSums>(parts.count(), size, accumulate, out, [&](int64_t i, accum_t<T>* to) {
    const WindowBlock part = parts[i];
    gemm_of_windows(windows, part, n, dy + parts.first(part) * n, false, to);
  });
}

}  // namespace

void conv_forward(const Array& image, const Array& kernel, const Array& out, int64_t images,
                  int64_t channels, const Dims& rows, const Dims& cols, int64_t out_channels) {
  dispatch_num(image.dtype(), "conv", [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto windows = windows_of<T>(image, images, channels, rows, cols);
    const T* const factors = kernel.data<T>();
    T* const to = out.data<T>();
    if constexpr (is_float(DTypeOf<T>::value))
      if (windows.count() * windows.elements() * out_channels > 0)
        return gemm_windows(windows, out_channels, factors, to);
    parallel_ranges(windows.count(), 1, [&](int64_t i, int64_t) {
      T* const sums = to + i * out_channels;
      std::fill_n(sums, out_channels, T(0));
      for_window(windows, i, [&](int64_t element, T value) {
        for (int64_t o = 0; o < out_channels; ++o)
          sums[o] = T(sums[o] + value * factors[element * out_channels + o]);
      });
    });
  });
}

void conv_backward(const Array& image, const Array& dy, const Array& dkernel, int64_t images,
                   int64_t channels, const Dims& rows, const Dims& cols, int64_t out_channels,
                   bool accumulate) {
  dispatch_num(image.dtype(), "conv", [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto windows = windows_of<T>(image, images, channels, rows, cols);
    const T* const factors = dy.data<T>();
    auto* const to = dkernel.data<accum_t<T>>();
    if constexpr (is_float(DTypeOf<T>::value))
      if (windows.count() * windows.elements() * out_channels > 0)
        return add_up_windows(windows, out_channels, factors, accumulate, to);
    if (!accumulate) std::fill_n(to, windows.elements() * out_channels, accum_t<T>(0));
    parallel_ranges(out_channels, 1, [&](int64_t o, int64_t) {
      for (int64_t i = 0; i < windows.count(); ++i)
        for_window(windows, i, [&](int64_t element, T value) {
          auto& sum = to[element * out_channels + o];
          sum = accum_t<T>(sum + value * factors[i * out_channels + o]);
        });
    });
  });
}

}  // namespace needle::cpu
