// Windows along an axis of an image: what a convolution multiplies with its kernel.
#pragma once

#include "array.h"

namespace needle {

// Of n pixels: `windows` windows of `size` pixels each, their starts `stride` pixels apart, the
// first of them `before` pixels ahead of the image.
struct WindowAxis {
  int64_t n, size, stride, before, windows;
};

inline WindowAxis window_axis(const Dims& of) {
  if (of.size() != 5 || of[0] < 0 || of[1] < 0 || of[2] < 1 || of[4] < 0)
    throw std::invalid_argument(
        "[conv] windows along an axis are n, size, stride, before, windows");
  return {of[0], of[1], of[2], of[3], of[4]};
}

}  // namespace needle
