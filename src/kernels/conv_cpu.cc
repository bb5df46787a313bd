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

constexpr int64_t kPartWindows = 512;      // the least of a part
constexpr int64_t kPartialSums = 5 << 18;  // elements of all parts

// out (elements, n) = or += windows^T @ dy (windows, n). A task is one of 16 or 8 parts of the
// windows, whose sums are added in the order of the parts. Where those would be too many sums or
// too few windows, threads share the elements, and wait for each other at every block of windows.
template <class T>
void add_up_windows(const Windows<T>& windows, int64_t n, const T* dy, bool accumulate,
                    accum_t<T>* out) {
  const int64_t count = windows.count(), size = windows.elements() * n;
  for (const int64_t wanted : {16, 8}) {
    const int64_t each = ceil_div(count, wanted), line = windows.cols.windows;
    const Cut parts(windows.all(), each > line ? round_up(each, line) : each);
    if (each < kPartWindows || parts.count() * size > kPartialSums) continue;
    return add_parts<kPartialSums>(parts.count(), size, accumulate, out, [&](int64_t i, auto* to) {
      const WindowBlock part = parts[i];
      gemm_of_windows(windows, part, n, dy + parts.first(part) * n, false, to);
    });
  }
  gemm_of_windows(windows, windows.all(), n, dy, accumulate, out);
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
