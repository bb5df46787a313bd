// The windows of an image, as the products of convolutions read them.
#pragma once

#include <algorithm>

#include "integers.h"
#include "simd_cpu.h"
#include "windows.h"

namespace needle::cpu {

// Of each window `length` elements from the first-th on, in each of `rows` rows from the row-th on.
struct WindowPart {
  int64_t row, rows, first, length;
  int64_t elements() const { return rows * length; }
};

// Windows that follow each other: `width` of each line from the place-th on; all of a line where
// there are several lines.
struct WindowBlock {
  int64_t line, lines, place, width;
  int64_t count() const { return lines * width; }
};

// A block cut into blocks of at most so many windows, of whole lines where one fits.
class Cut {
 public:
  Cut(const WindowBlock& whole, int64_t most)
      : whole_(whole),
        lines_(std::max<int64_t>(most / whole.width, 1)),
        width_(std::min(most, whole.width)),
        pieces_(ceil_div(whole.width, width_)) {}
  int64_t count() const { return ceil_div(whole_.lines, lines_) * pieces_; }
  WindowBlock operator[](int64_t i) const {
    const int64_t line = i / pieces_ * lines_, place = i % pieces_ * width_;
    return {whole_.line + line, std::min(lines_, whole_.lines - line), whole_.place + place,
            std::min(width_, whole_.width - place)};
  }
  // The index of its first window in the whole.
  int64_t first(const WindowBlock& part) const {
    return (part.line - whole_.line) * whole_.width + part.place - whole_.place;
  }

 private:
  WindowBlock whole_;
  int64_t lines_, width_, pieces_;  // of a block; blocks of a line
};

// The windows of an image as a matrix (windows, elements), which is not written down. Windows in
// the same row of an image are a line; they overlap in it.
template <class T>
struct Windows {
  const T* image;  // (N, H, W, channels)
  int64_t images, channels;
  WindowAxis rows, cols;
  int64_t lines() const { return images * rows.windows; }
  int64_t count() const { return lines() * cols.windows; }
  int64_t row_elements() const { return cols.size * channels; }
  int64_t elements() const { return rows.size * row_elements(); }
  WindowBlock all() const { return {0, lines(), 0, cols.windows}; }
  // From a window to the next of its line, in elements of the image.
  int64_t step() const { return cols.stride * channels; }
  // Elements of the image that a row of so many windows has.
  int64_t width(const WindowPart& part, int64_t windows) const {
    return (windows - 1) * step() + part.length;
  }
  // Rows of the image that a line of a block adds to those of the line before.
  int64_t new_rows(const WindowPart& part, const WindowBlock& block, int64_t line) const {
    const bool first = line == 0 || (block.line + line) % rows.windows == 0;
    return first ? part.rows : std::min(part.rows, rows.stride);
  }

  // f(part, p) for parts of at most so many elements (even, at least 2), the window's p-th the
  // first; all rows are split alike.
  template <class F>
  void for_parts(int64_t most, F&& f) const {
    const int64_t whole = row_elements();
    if (whole <= most) {
      const int64_t count = ceil_div(rows.size, ceil_div(rows.size, most / whole));
      for (int64_t row = 0; row < rows.size; row += count)
        f(WindowPart{row, std::min(count, rows.size - row), 0, whole}, row * whole);
      return;
    }
    const int64_t length = round_up(ceil_div(whole, ceil_div(whole, most)), 2);
    for (int64_t row = 0; row < rows.size; ++row)
      for (int64_t first = 0; first < whole; first += length)
        f(WindowPart{row, 1, first, std::min(length, whole - first)}, row * whole + first);
  }

  // Of `count` windows of a line, from the place-th on, the part's last so many rows, one after the
  // other; what is not in the image is zero.
  template <class P>
  void copy_rows(const WindowPart& part, int64_t line, int64_t place, int64_t count,
                 int64_t last_rows, P* to) const {
    const int64_t size = width(part, count), length = cols.n * channels;
    const int64_t x = place * step() - cols.before * channels + part.first;
    const int64_t begin = std::clamp<int64_t>(-x, 0, size);
    const int64_t end = std::clamp(length - x, begin, size);
    const int64_t origin = line % rows.windows * rows.stride - rows.before + part.row;
    const T* const pixels = image + line / rows.windows * rows.n * length;
    for (int64_t row = part.rows - last_rows; row < part.rows; ++row, to += size) {
      const int64_t y = origin + row;
      if (y < 0 || y >= rows.n) {
        std::fill_n(to, size, P(0.f));
        continue;
      }
      std::fill_n(to, begin, P(0.f));
      convert_run(pixels + y * length + x + begin, end - begin, to + begin);
      std::fill_n(to + end, size - end, P(0.f));
    }
  }
};

// Part of the windows of a block, copied from the image with the zeros around it; kTogether windows
// of a line are read at once.
template <class In, class P, int kTogether>
struct Patch {
  static constexpr int64_t kLines = 256;  // the most of a block
  const Windows<In>& windows;
  const WindowPart& part;
  const WindowBlock block;
  P* const data;
  int64_t line_at[kLines];  // where a line's first window begins

  Patch(const Windows<In>& windows, const WindowPart& part, const WindowBlock& block, P* data)
      : windows(windows), part(part), block(block), data(data) {
    int64_t rows = 0;
    for (int64_t line = 0; line < block.lines; ++line) {
      rows += new_rows(line);
      line_at[line] = (rows - part.rows) * row_size();
    }
  }
  int64_t row_size() const { return windows.width(part, block.width); }
  int64_t new_rows(int64_t line) const { return windows.new_rows(part, block, line); }
  void copy_line(int64_t line) const {
    const int64_t rows = new_rows(line);
    windows.copy_rows(part, block.line + line, block.place, block.width, rows,
                      data + line_at[line] + (part.rows - rows) * row_size());
  }

  // A window of the patch.
  struct Place {
    const Patch& patch;
    int64_t line = 0, place = 0;
    const P* window() const {
      return patch.data + patch.line_at[line] + place * patch.windows.step();
    }
    int64_t left() const { return patch.block.width - place; }  // of its line
    void advance(int64_t n) {
      for (place += n; place >= patch.block.width; place -= patch.block.width) ++line;
    }
  };

  // The most windows of a block whose patch has at most so many elements, where its lines are so
  // wide; at least one.
  static int64_t most(const Windows<In>& windows, const WindowPart& part, int64_t width,
                      int64_t elements) {
    const int64_t of_row = elements / part.rows, whole = windows.width(part, width);
    if (whole <= of_row) return std::min(of_row / whole, kLines) * width;
    const int64_t fit = std::max<int64_t>(of_row - part.length, 0) / windows.step() + 1;
    return fit > kTogether ? fit / kTogether * kTogether : fit;
  }
};

}  // namespace needle::cpu
