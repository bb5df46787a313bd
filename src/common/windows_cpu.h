// The windows of an image, copied some elements at a time for the products of convolutions.
#pragma once

#include <algorithm>

#include "simd_cpu.h"
#include "windows.h"

namespace needle::cpu {

// The windows of an image as a matrix (windows, elements), which is not written down.
template <class T>
struct Windows {
  const T* image;  // (N, H, W, channels)
  int64_t images, channels;
  WindowAxis rows, cols;
  int64_t count() const { return images * rows.windows * cols.windows; }
  int64_t elements() const { return rows.size * cols.size * channels; }
};

// Windows one after the other, of each n elements from the p-th on.
template <class In>
class WindowReader {
 public:
  WindowReader(const Windows<In>& w, int64_t window, int64_t p, int64_t n)
      : w_(w), size_(w.cols.size * w.channels), length_(w.cols.n * w.channels), n_(n) {
    const int64_t line = window / w.cols.windows;
    place_ = window % w.cols.windows;
    line_ = line % w.rows.windows;
    image_ = line / w.rows.windows;
    row_ = p / size_;
    first_ = p % size_;
  }

  // Those that are not in the image are zero.
  template <class P>
  void next(P* to) {
    const int64_t x = (place_ * w_.cols.stride - w_.cols.before) * w_.channels;
    int64_t y = line_ * w_.rows.stride - w_.rows.before + row_, left = n_;
    for (int64_t q = first_; left > 0; q = 0, ++y) {
      const int64_t count = std::min(left, size_ - q);
      const bool inside = y >= 0 && y < w_.rows.n;
      const int64_t begin = inside ? std::clamp<int64_t>(-x - q, 0, count) : count;
      const int64_t end = std::clamp(length_ - x - q, begin, count);
      for (int64_t i = 0; i < begin; ++i) to[i] = P(0.f);
      if (begin < end)
        convert_run(w_.image + (image_ * w_.rows.n + y) * length_ + x + q + begin, end - begin,
                    to + begin);
      for (int64_t i = end; i < count; ++i) to[i] = P(0.f);
      to += count;
      left -= count;
    }
    if (++place_ < w_.cols.windows) return;
    place_ = 0;
    if (++line_ < w_.rows.windows) return;
    line_ = 0;
    ++image_;
  }

 private:
  const Windows<In>& w_;
  int64_t size_, length_, n_;     // of a window's row, of an image's, of what is read
  int64_t image_, line_, place_;  // of the window
  int64_t row_, first_;           // of its first element
};

}  // namespace needle::cpu
