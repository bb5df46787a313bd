// needle's own product. The inner loop multiplies kRows rows of A with kCols columns of B. Columns
// are packed into panels that it reads in order; rows are read where they lie, or, where that would
// be slow, from panels that all threads pack once. Each task packs a strip of B that stays in its
// core's L2 and multiplies the rows of A with it, so that some threads wait for memory while others
// compute, and so that B is packed once and not, as a BLAS called per tile would, once per tile.
//
// A may also be the windows of an image, or their elements. A patch of the image is copied with the
// zeros around it, and the inner loop reads windows, which overlap, where they lie in the patch.
//
// 16-bit floats become float as they are packed, and are rounded once, when their sum is complete.
// bfloat16 stays as it is where the processor multiplies it (bfloat16_cpu.h): k goes by words of
// two elements then.
//
// Each element of C is a chain of multiply-adds in ascending k, one chain per depth of k, and
// depths depend on the operands' shapes alone: neither threads nor tasks change a bit.
#include "gemm_cpu.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <limits>
#include <mutex>
#include <thread>
#include <type_traits>

#include "bfloat16_cpu.h"
#include "few_rows_cpu.h"
#include "inner_loops_cpu.h"
#include "integers.h"
#include "lane_gemm_cpu.h"
#include "parallel.h"

#ifdef NEEDLE_OPENBLAS
#include <cblas.h>
#endif

namespace needle::cpu {
namespace {

// An operand as it is stored: its lines, rows of op(A) or columns of op(B), of k elements, lie
// along memory, ld from their neighbours, or across it. from(line, p) is what begins there.
template <class In>
struct Stored {
  const In* data;
  int64_t ld;
  bool along;
  Stored from(int64_t line, int64_t p) const {
    return {data + (along ? line * ld + p : p * ld + line), ld, along};
  }
};

// A and B are stored as In, C as Out; the inner loop reads words of its P, which is In or float,
// and sums in T. Elements of a word follow each other in k.
template <class In, class Out, class Loop = VectorLoop<accum_t<In>>>
struct Own {
  using T = accum_t<In>;
  using P = typename Loop::P;
  using Mode = typename Loop::Mode;
  static constexpr bool kReadable = std::is_same_v<In, P>;  // by the inner loop, where it lies
  static constexpr int kWord = Loop::kWord, kGroup = Loop::kGroup * kWord;  // in elements of k
  static constexpr int kRows = Loop::kRows, kCols = Loop::kCols, kLane = kLanes<T>;
  // Packed rows of A stay in the last-level cache, a strip of B in L2. Depth and strip in words.
  static constexpr int64_t kDepth = 4096 / sizeof(T), kM = 1032 / kRows * kRows,
                           kStrip = (512 << 10) / sizeof(T);
  static constexpr int64_t kSummed = 1024;  // columns of C that are summed before they are rounded
  static constexpr int64_t kMinRows = 96, kMinCols = 2 * kCols;  // of a task
  static constexpr int64_t kPacked = 4 * kRows;                  // rows of A a task packs at least
  static constexpr int64_t kMostRows = 32;                       // of any loop
  // Times kRows: rows of a task, up to which packing B beforehand takes longer than on the way.
  static constexpr int64_t kFewRowGroups = 12;
  static constexpr int64_t kTask = 1 << 20;  // multiply-adds of a task that is worth handing out
  static_assert(kStrip >= kMinCols * kDepth && kRows <= kMostRows);
  // Words from a row to the next in a panel of A: an odd number of vectors keeps a panel's rows in
  // different sets of the cache.
  static constexpr int64_t stride_for(int64_t words) {
    return (ceil_div(words, int64_t(kLane)) | 1) * kLane;
  }
  static constexpr int64_t kStride = stride_for(kDepth);

  struct Workspace {
    alignas(64) std::byte panels[kM * kStride * sizeof(T)], strip[kStrip * sizeof(T)];
    alignas(64) std::byte windows[kMostRows * kStride * sizeof(T)];
    T sums[kM * kSummed];
  };
  static auto& workspace() { return of_this_thread<typename Own<T, T>::Workspace>(); }

  // Rows that lie a multiple of this apart share a set of the first cache, which has fewer ways
  // than kRows: a line would be gone before the loop has read all of it.
  static constexpr int64_t kSets = 4096 / sizeof(P);

  // Words of so many elements along k, those that fill up the last group included.
  static int64_t words_of(int64_t k) { return round_up(k, int64_t(kGroup)) / kWord; }

  // Zeros in panels of Width columns: in those beyond `cols` and in words beyond k.
  template <int Width>
  static void clear_beyond(int64_t k, int64_t cols, P* to, int64_t distance) {
    for (int64_t i = 0; i * Width < cols; ++i, to += distance)
      std::fill(to + ((i + 1) * Width > cols ? 0 : ceil_div(k, int64_t(kWord)) * kWord * Width),
                to + words_of(k) * kWord * Width, P(0.f));
  }

  // Panels of Width columns, those beyond `cols` zero: word (p, j) of a panel at [p][j], and
  // `distance` words from a panel to the next. Rows are read across all panels at once: memory
  // gives what lies side by side the fastest. The rows of a word lie `Apart` from each other.
  template <int Width, int Apart = 1>
  static void pack_columns(int64_t k, int64_t cols, const In* from, int64_t ld, P* to,
                           int64_t distance) {
    const int64_t whole = cols / Width, rest = cols % Width;
    distance *= kWord;
    clear_beyond<Width>(k, cols, to, distance);
    constexpr int64_t kAhead = 6;  // rows, each on a page of its own, which hardware stops at
    for (int64_t p = 0; p < k; to += kWord * Width) {
      const In* const row = from + p * ld;
      if (p + kAhead < k)
        for (int w = 0; w < kWord; ++w)
          for (int64_t j = 0; j < cols; j += kLane)
            __builtin_prefetch(row + (kAhead + w * Apart) * ld + j);
      if constexpr (kWord == 1) {
        for (int64_t i = 0; i < whole; ++i) convert_run(row + i * Width, Width, to + i * distance);
        if (rest > 0) std::copy_n(row + whole * Width, rest, to + whole * distance);
      } else {
        const bool both = p + Apart < k;
        for (int64_t i = 0; i < whole; ++i)
          pair_rows(row + i * Width, Apart * ld, both, Width, to + i * distance);
        if (rest > 0) pair_rows(row + whole * Width, Apart * ld, both, rest, to + whole * distance);
      }
      if (++p % Apart == 0) p += (kWord - 1) * Apart;
    }
  }

  // Panels of kRows rows, kRows strides long, those beyond `rows` zero: word (i, p) of a
  // panel at [i][p], or at [p][i] where rows do not lie along memory and the loop reads such, so
  // that each is a copy in order of it.
  static void pack_a(int64_t rows, int64_t k, Stored<In> a, P* to) {
    const int64_t stride = stride_for(words_of(k));
    if (a.along)
      return pack_rows(rows, k, to,
                       [&](int64_t i, P* row) { convert_run(a.data + i * a.ld, k, row); });
    if constexpr (Loop::kAcross) {
      pack_columns<kRows>(k, rows, a.data, a.ld, to, kRows * stride);
    } else {
      pack_rows(rows, k, to, [](int64_t, P*) {});
      transpose_tile(reinterpret_cast<const uint16_t*>(a.data), a.ld, k, rows,
                     reinterpret_cast<uint16_t*>(to), stride * kWord);
    }
  }
  template <class CopyRow>
  static void pack_rows(int64_t rows, int64_t k, P* to, CopyRow copy) {
    const int64_t whole = round_up(k, kGroup), stride = stride_for(whole / kWord);
    for (int64_t i = 0; i < round_up(rows, kRows); ++i, to += stride * kWord) {
      if (i < rows) copy(i, to);
      std::fill(to + (i < rows ? k : 0), to + whole, P(0.f));
    }
  }

  // Panels of kCols columns, those beyond `cols` zero: word (p, j) of a panel at [p][j].
  static void pack_b(int64_t k, int64_t cols, Stored<In> stored, P* to) {
    const int64_t words = words_of(k);
    const In* const b = stored.data;
    const int64_t ldb = stored.ld;
    if (!stored.along) return pack_columns<kCols>(k, cols, b, ldb, to, words * kCols);
    clear_beyond<kCols>(k, cols, to, words * kCols * kWord);
    for (int64_t j = 0; j < cols; j += kCols) {
      const int64_t there = std::min<int64_t>(kCols, cols - j);
      if constexpr (kWord == 1)
        transpose_tile(b + j * ldb, ldb, there, k, to + j * k, kCols);
      else
        transpose_pairs(b + j * ldb, ldb, there, k, to + j * words * kWord, kCols);
    }
  }

  // The width of strips, at most `widest` and not much less, with which threads that are equally
  // fast are done with n columns the soonest: nine strips take two threads as long as ten.
  static int64_t even_width(int64_t n, int64_t widest) {
    const auto columns_of_a_thread = [&](int64_t width) {
      return ceil_div(ceil_div(n, width), int64_t(num_threads())) * width;
    };
    int64_t best = widest;
    for (int64_t width = widest - kCols; width >= std::max(kMinCols, widest / 2); width -= kCols)
      if (columns_of_a_thread(width) < columns_of_a_thread(best)) best = width;
    return best;
  }

  // C (rows, n) from rows of A and all columns of B, depth deep.
  static void multiply(int64_t rows, int64_t n, int64_t depth, Stored<In> a, Stored<In> b,
                       bool accumulate, Out* c, int64_t ldc) {
    P* const panels = reinterpret_cast<P*>(workspace().panels);
    const int64_t words = words_of(depth), stride = stride_for(words) * kWord;
    const int64_t threads = num_threads();
    const bool readable =
        kReadable && a.along && depth % kGroup == 0 && (Loop::kByLines || a.ld % kSets != 0);
    const int64_t in_place = readable ? rows / kRows * kRows : 0;
    const int64_t share = kPacked * ceil_div(kDepth / 4, words);
    parallel_for(ceil_div(rows - in_place, share), [&](int64_t task) {
      [[maybe_unused]] const Mode mode;
      const int64_t i = in_place + task * share;
      pack_a(std::min(share, rows - i), depth, a.from(i, 0), panels + i * stride);
    });

    // Four tasks per thread, for cores that are not equally fast, by splitting the columns; rows,
    // for which B is packed again, are split only where that leaves less than two. All of A is read
    // for each strip, so that they are wider the more rows there are, if the loop outruns memory.
    const int64_t most = kStrip / words / kCols * kCols;
    const int64_t least =
        std::clamp(rows / (2 * threads) / kCols * kCols, kMinCols, std::min(Loop::kWide, most));
    const int64_t width =
        even_width(n, std::clamp(round_up(ceil_div(n, 4 * threads), kCols), least, most));
    const int64_t strips = ceil_div(n, width);
    const int64_t groups = std::min(ceil_div(rows, kMinRows), ceil_div(2 * threads, strips));
    const int64_t height = round_up(ceil_div(rows, groups), kRows);
    const auto multiply_task = [&](int64_t task) {
      [[maybe_unused]] const Mode mode;
      const int64_t j0 = task % strips * width, cols = std::min(width, n - j0);
      const int64_t i0 = task / strips * height, i1 = std::min(rows, i0 + height);
      P* const strip = reinterpret_cast<P*>(workspace().strip);
      // Where few rows follow, the first pack B as they are multiplied with it, but for a last
      // panel that is not whole.
      int64_t on_the_way = 0;
      if constexpr (kReadable && Loop::kPacks)
        if (!b.along && i1 - i0 <= kFewRowGroups * kRows) on_the_way = cols / kCols * kCols;
      P* const rest = strip + on_the_way * words * kWord;
      if (on_the_way < cols) pack_b(depth, cols - on_the_way, b.from(j0 + on_the_way, 0), rest);
      const Runs run = one_run(words);
      for (int64_t i = i0; i < i1; i += kRows) {
        const int64_t there = std::min<int64_t>(kRows, i1 - i);
        const P* from = panels + i * stride;
        int64_t ld = stride;
        if constexpr (kReadable)
          if (i < in_place) from = a.data + i * a.ld, ld = a.ld;
        Out* const to = c + i * ldc + j0;
        const auto multiply = [&](auto across, int64_t lda) {
          if constexpr (kReadable && Loop::kPacks)
            if (i == i0 && on_the_way > 0) {
              Loop::template multiply_rows<across, true>(there, on_the_way, run, from, lda, strip,
                                                         accumulate, to, ldc,
                                                         {b.from(j0, 0).data, b.ld});
              return Loop::template multiply_rows<across>(there, cols - on_the_way, run, from, lda,
                                                          rest, accumulate, to + on_the_way, ldc);
            }
          Loop::template multiply_rows<across>(there, cols, run, from, lda, strip, accumulate, to,
                                               ldc);
        };
        if constexpr (Loop::kAcross)
          if (!a.along) {
            multiply(std::true_type{}, kRows * kWord);
            continue;
          }
        multiply(std::false_type{}, ld);
      }
    };
    parallel_ranges(strips * ceil_div(rows, height), kTask / (width * height * depth) + 1,
                    [&](int64_t task, int64_t end) {
                      for (; task < end; ++task) multiply_task(task);
                    });
  }

  using Patch = cpu::Patch<In, P, kRows>;
  static constexpr int64_t kPackedAhead = 4;                  // times kRows
  static constexpr int64_t kPatch = (128 << 10) / sizeof(T);  // stays in L2, beside a strip

  // C (windows of a block, n) from a part of the windows and B's rows for it.
  static void multiply_windows(const Windows<In>& windows, const WindowPart& part,
                               const WindowBlock& whole, int64_t n, Stored<In> b, bool accumulate,
                               Out* c, int64_t ldc) {
    const int64_t words = words_of(part.elements()), step = windows.step();
    const int64_t width = std::min(round_up(n, kCols), kStrip / words / kCols * kCols);
    const int64_t strips = ceil_div(n, width);
    const int64_t groups =
        std::min(ceil_div(whole.count(), kMinRows), ceil_div(int64_t(4) * num_threads(), strips));
    const Cut tasks(whole, ceil_div(whole.count(), groups));
    const bool in_place = part.length % kGroup == 0 && Loop::at_once(whole.width) > 0 &&
                          (Loop::kByLines || step % kSets != 0);
    const int64_t stride = stride_for(words) * kWord;
    // What was just written is slow to read: several times kRows are packed before they are read.
    const int64_t packed =
        in_place ? kRows : std::min(kPackedAhead, kStride * kWord / stride) * kRows;
    parallel_for(strips * tasks.count(), [&](int64_t task) {
      [[maybe_unused]] const Mode mode;
      const int64_t j0 = task % strips * width, cols = std::min(width, n - j0);
      P* const strip = reinterpret_cast<P*>(workspace().strip);
      P* const some = reinterpret_cast<P*>(workspace().windows);
      pack_b(part.elements(), cols, b.from(j0, 0), strip);
      const WindowBlock mine = tasks[task / strips];
      const Cut blocks(mine, Patch::most(windows, part, mine.width, kPatch * kWord));
      for (int64_t at = 0; at < blocks.count(); ++at) {
        const Patch patch(windows, part, blocks[at], reinterpret_cast<P*>(workspace().panels));
        for (int64_t line = 0; line < patch.block.lines; ++line) patch.copy_line(line);
        int64_t row_at[kDepth * kWord];
        for (int64_t row = 0; row < part.rows; ++row) row_at[row] = row * patch.row_size();
        const Runs rows{part.rows, part.length / kWord, row_at};
        Out* to = c + (tasks.first(mine) + blocks.first(patch.block)) * ldc + j0;
        const int64_t count = patch.block.count();
        typename Patch::Place next{patch};
        for (int64_t i = 0; i < count;) {
          if (int64_t there = in_place ? Loop::at_once(next.left()) : 0) {
            const P* const first = next.window();
            typename Loop::RowStride lda = step;
            next.advance(there);
            if constexpr (Loop::kHalves)
              if (there == kRows / 2 && i + there < count && next.left() >= there) {
                lda.next = next.window() - first;
                next.advance(there);
                there = kRows;
              }
            Loop::template multiply_rows<false>(there, cols, rows, first, lda, strip, accumulate,
                                                to + i * ldc, ldc);
            i += there;
            continue;
          }
          // Of several lines, or not all there.
          const int64_t there = std::min(packed, count - i);
          pack_rows(there, part.elements(), some, [&](int64_t, P* copy) {
            const P* const window = next.window();
            for (int64_t row = 0; row < part.rows; ++row, copy += part.length)
              convert_run(window + row_at[row], part.length, copy);
            next.advance(1);
          });
          for (int64_t row = 0; row < there; row += kRows)
            Loop::template multiply_rows<false>(std::min<int64_t>(kRows, there - row), cols,
                                                one_run(words), some + row * stride, stride, strip,
                                                accumulate, to + (i + row) * ldc, ldc);
          i += there;
        }
      }
    });
  }

  // From the first to the second window of a word, and of what it multiplies.
  static constexpr int kApart = kGroup / kWord;

  // Whether no word of pair_elements is of two lines, however a block has to be cut for its patch:
  // that has room for many windows.
  static bool pairs_elements(const Windows<In>& windows, const WindowBlock& block) {
    return block.width % kWord == 0 && windows.rows.size * windows.step() <= kPatch;
  }
  // Words of the new rows of a patch's line: each element with that of the next window. A word lies
  // kWord times as far from the first as its first element does in the patch.
  static void pair_elements(const Patch& patch, int64_t line, P* words) {
    const int64_t size = patch.row_size(), step = patch.windows.step(), rows = patch.part.rows;
    for (int64_t row = rows - patch.new_rows(line); row < rows; ++row) {
      const int64_t at = patch.line_at[line] + row * size;
      pair_rows(patch.data + at, step, true, size - step, words + at * kWord);
    }
  }

  // A row for each of kRows elements of a patch's windows.
  static const P* pack_elements(const Patch& patch, int64_t place) {
    P* const to = reinterpret_cast<P*>(workspace().windows);
    const int64_t depth = patch.block.count(), stride = stride_for(words_of(depth)) * kWord;
    const int64_t step = patch.windows.step();
    typename Patch::Place next{patch};
    for (int64_t k = 0; k < depth; k += kGroup) {
      const int64_t there = std::min<int64_t>(kGroup, depth - k);
      if (next.place + there <= patch.block.width) {
        transpose_to_words(next.window() + place, step, there, kRows, to + k, stride);
        next.advance(there);
        continue;
      }
      P some[kGroup][kRows];
      for (int64_t i = 0; i < there;) {
        const P* window = next.window() + place;
        const int64_t run = std::min(there - i, patch.block.width - next.place);
        for (const int64_t end = i + run; i < end; ++i, window += step)
          memcpy(some[i], window, sizeof some[i]);
        next.advance(run);
      }
      transpose_to_words(some[0], kRows, there, kRows, to + k, stride);
    }
    return to;
  }

  // Words of windows, and columns of C, that multiply_elements takes at a time.
  static constexpr int64_t kGradientDepth = 512, kGradientCols = kStrip / kGradientDepth;

  // C (elements, n) = or += a part of a block's windows, transposed, times B (windows, n).
  static void multiply_elements(const Windows<In>& windows, const WindowPart& part,
                                const WindowBlock& whole, int64_t n, Stored<In> b, bool accumulate,
                                Out* c, int64_t ldc) {
    const int64_t threads = num_threads(), step = windows.step();
    P* const strip = reinterpret_cast<P*>(workspace().strip);
    P* const panels = reinterpret_cast<P*>(workspace().panels);
    // Words of two windows each are copies of what a patch has, beside it.
    constexpr bool paired = Loop::kAcross && kWord > 1;
    // The last rows are read beyond their end.
    const int64_t room = kM * kStride * kWord / (paired ? 1 + kWord : 1) - kRows;
    const Cut blocks(
        whole, std::min(kGradientDepth * kWord, Patch::most(windows, part, whole.width, room)));
    const int64_t tiles = ceil_div(part.length, int64_t(kRows));
    for (int64_t i = 0; i < blocks.count(); ++i) {
      const Patch patch(windows, part, blocks[i], panels);
      const int64_t width = patch.block.width, depth = patch.block.count();
      const int64_t words = words_of(depth);
      const In* const rows_of_b = b.from(0, blocks.first(patch.block)).data;
      constexpr int64_t kShare = 64;  // windows
      static_assert(kShare % kGroup == 0);
      parallel_ranges(patch.block.lines, ceil_div(kShare, width), [&](int64_t line, int64_t end) {
        [[maybe_unused]] const Mode mode;
        for (; line < end; ++line) {
          patch.copy_line(line);
          if constexpr (paired) pair_elements(patch, line, panels + room);
        }
      });
      parallel_ranges(depth, kShare, [&](int64_t first, int64_t end) {
        [[maybe_unused]] const Mode mode;
        pack_columns<kCols, kApart>(end - first, n, rows_of_b + first * b.ld, b.ld,
                                    strip + first * kCols, words * kCols);
      });
      int64_t line_at[Patch::kLines];  // in words
      for (int64_t line = 0; line < patch.block.lines; ++line)
        line_at[line] = patch.line_at[line] * kWord;
      const int64_t all = part.rows * tiles, share = ceil_div(all, 4 * threads);
      parallel_ranges(all, share, [&](int64_t tile, int64_t end) {
        [[maybe_unused]] const Mode mode;
        for (; tile < end; ++tile) {
          const int64_t row = tile / tiles, element = tile % tiles * kRows;
          const int64_t place = row * patch.row_size() + element;
          const auto multiply = [&](auto across, const Runs& runs, const P* a, int64_t lda) {
            Loop::template multiply_rows<across>(
                std::min<int64_t>(kRows, part.length - element), n, runs, a, lda, strip,
                accumulate || i > 0, c + (row * windows.row_elements() + element) * ldc, ldc);
          };
          if constexpr (Loop::kAcross)
            multiply(std::true_type{}, {patch.block.lines, width / kWord, line_at},
                     panels + (paired ? room : 0) + place * kWord, kWord * kWord * step);
          else
            multiply(std::false_type{}, one_run(words), pack_elements(patch, place),
                     stride_for(words) * kWord);
        }
      });
    }
  }

  // C = or += the sums that were computed for it.
  static void round_sums(int64_t rows, int64_t cols, bool accumulate, Out* c, int64_t ldc) {
    const T* const sums = workspace().sums;
    parallel_for(rows, [&](int64_t row) {
      const T* from = sums + row * kSummed;
      Out* to = c + row * ldc;
      for (int64_t x = 0; x < cols; ++x) to[x] = Out(accumulate ? T(to[x]) + from[x] : from[x]);
    });
  }

  static void gemm(int64_t m, int64_t n, int64_t k, Stored<In> a, Stored<In> b, bool accumulate,
                   Out* c, int64_t ldc) {
    // Depths of equal size, of whole groups.
    const int64_t even = round_up(ceil_div(k, ceil_div(k, kDepth * kWord)), kGroup);
    const auto all_depths = [&](auto multiply, int64_t i, int64_t rows, int64_t j, int64_t cols,
                                bool add, auto* to, int64_t ld) {
      for (int64_t p = 0; p < k; p += even)
        multiply(rows, cols, std::min(even, k - p), a.from(i, p), b.from(j, p), add || p > 0, to,
                 ld);
    };
    const bool exact = std::is_same_v<Out, T> || even >= k;
    const int64_t block = exact ? kM * kStride / stride_for(even / kWord) / kRows * kRows : kM;
    for (int64_t i = 0; i < m; i += block) {
      const int64_t rows = std::min(block, m - i);
      if (exact) all_depths(multiply, i, rows, 0, n, accumulate, c + i * ldc, ldc);
      for (int64_t j = 0; j < (exact ? 0 : n); j += kSummed) {
        const int64_t cols = std::min(kSummed, n - j);
        all_depths(Own<In, T, Loop>::multiply, i, rows, j, cols, false, workspace().sums, kSummed);
        round_sums(rows, cols, accumulate, c + i * ldc + j, ldc);
      }
    }
  }

  // C (elements, n) = or += a block's windows, transposed, times B (windows of the block, n).
  static void gemm_of_windows(const Windows<In>& windows, const WindowBlock& block, int64_t n,
                              const In* b, bool accumulate, Out* c) {
    windows.for_parts(kDepth, [&](const WindowPart& part, int64_t p) {
      for (int64_t j = 0; j < n; j += kGradientCols)
        multiply_elements(windows, part, block, std::min(kGradientCols, n - j),
                          Stored<In>{b + j, n, false}, accumulate, c + p * n + j, n);
    });
  }

  // C (windows, n) from B (elements, n).
  static void gemm_windows(const Windows<In>& windows, int64_t n, Stored<In> b, Out* c) {
    const auto all_parts = [&](auto multiply, const WindowBlock& block, int64_t j, int64_t cols,
                               auto* to, int64_t ld) {
      windows.for_parts(kDepth * kWord, [&](const WindowPart& part, int64_t p) {
        multiply(windows, part, block, cols, b.from(j, p), p > 0, to, ld);
      });
    };
    if (std::is_same_v<Out, T> || windows.elements() <= kDepth * kWord)
      return all_parts(multiply_windows, windows.all(), 0, n, c, n);
    const Cut blocks(windows.all(), kM);
    for (int64_t i = 0; i < blocks.count(); ++i)
      for (int64_t j = 0; j < n; j += kSummed) {
        const int64_t cols = std::min(kSummed, n - j);
        all_parts(Own<In, T, Loop>::multiply_windows, blocks[i], j, cols, workspace().sums,
                  kSummed);
        round_sums(blocks[i].count(), cols, false, c + blocks.first(blocks[i]) * n + j, n);
      }
  }
};

constexpr int64_t kLeastByTiles = 1 << 18;  // multiply-adds of a product
// Short rows, as an image of three channels has, would leave most of a tile empty.
template <class T>
bool windows_by_tiles(const Windows<T>& windows) {
  constexpr int64_t kLeastRow = 12;
  return by_tiles<T>() && windows.row_elements() >= kLeastRow;
}

#ifdef NEEDLE_OPENBLAS
// The pool hands out the parallelism; the library's own threads stay asleep.
[[maybe_unused]] const bool single_threaded = (scipy_openblas_set_num_threads(1), true);
CBLAS_TRANSPOSE flag(bool t) { return t ? CblasTrans : CblasNoTrans; }
template <class... Sizes>
bool fit_int(Sizes... sizes) {
  return ((sizes <= std::numeric_limits<int>::max()) && ...);
}
#endif

}  // namespace

template <class In, class Out>
void gemm_own(bool ta, bool tb, int64_t m, int64_t n, int64_t k, const In* a, int64_t lda,
              const In* b, int64_t ldb, bool accumulate, Out* c, int64_t ldc) {
  const Stored<In> rows{a, lda, !ta}, columns{b, ldb, tb};
  if constexpr (std::is_same_v<In, bfloat16>) {
    if constexpr (tiles::kCompiled)
      if (by_tiles<In>())
        return Own<In, Out, TileLoop>::gemm(m, n, k, rows, columns, accumulate, c, ldc);
    if (multiplies_pairs())
      return Own<In, Out, VectorLoop<In>>::gemm(m, n, k, rows, columns, accumulate, c, ldc);
  }
  Own<In, Out>::gemm(m, n, k, rows, columns, accumulate, c, ldc);
}

template <class T>
void gemm_windows(const Windows<T>& a, int64_t n, const T* b, T* c) {
  constexpr int64_t kDepth = 1024;
  const int64_t m = a.count(), k = a.elements(), wide = a.cols.windows;
  if (few_rows_pay<T>(m, n, k) && (sizeof(T) > 2 || k <= kDepth)) {
    struct Rows {
      T of[kFewRows * kDepth];
    };
    T* const rows = of_this_thread<Rows>().of;
    a.for_parts(kDepth, [&](const WindowPart& part, int64_t p) {
      const int64_t depth = part.elements();
      for (int64_t i = 0; i < m; ++i)
        a.copy_rows(part, i / wide, i % wide, 1, part.rows, rows + i * depth);
      few_rows_gemm(m, n, depth, rows, depth, 1, b + p * n, n, p > 0, c);
    });
    return;
  }
  const Stored<T> columns{b, n, false};
  if constexpr (tiles::kCompiled && std::is_same_v<T, bfloat16>)
    if (windows_by_tiles(a)) return Own<T, T, TileLoop>::gemm_windows(a, n, columns, c);
  if constexpr (std::is_same_v<T, bfloat16>)
    if (multiplies_pairs() && a.row_elements() % 2 == 0)  // no word is of two rows
      return Own<T, T, VectorLoop<T>>::gemm_windows(a, n, columns, c);
  Own<T, T>::gemm_windows(a, n, columns, c);
}

template <class T>
void gemm_of_windows(const Windows<T>& a, const WindowBlock& block, int64_t n, const T* b,
                     bool accumulate, accum_t<T>* c) {
  if constexpr (tiles::kCompiled && std::is_same_v<T, bfloat16>)
    if (windows_by_tiles(a) && a.elements() * n * block.count() >= kLeastByTiles)
      return Own<T, float, TileLoop>::gemm_of_windows(a, block, n, b, accumulate, c);
  if constexpr (std::is_same_v<T, bfloat16>)
    if (multiplies_pairs() && Own<T, float, VectorLoop<T>>::pairs_elements(a, block))
      return Own<T, float, VectorLoop<T>>::gemm_of_windows(a, block, n, b, accumulate, c);
  Own<T, accum_t<T>>::gemm_of_windows(a, block, n, b, accumulate, c);
}

template <class T>
bool gemm_own_pays(int64_t batch, int64_t m, int64_t n, int64_t k) {
  constexpr int64_t kLeast = 16 << 20;
  if (by_tiles<T>())
    return m > kFewRows && m * n >= 256 && m * n * k >= (batch > 1 ? kLeast : kLeastByTiles);
// Compiled for any x86-64, needle's kernel has vectors of 128 bits, and OpenBLAS takes the
// processor's own.
#if defined(NEEDLE_OPENBLAS) && !defined(__AVX2__)
  return false;
#else
  // A product takes no less time than one of kDeep: it has C to write.
  constexpr int64_t kDeep = 64, kLeastOfOne = 1 << 20;
  // With shorter vectors small products have not been measured.
  const bool small = kVectorBytes == 64 && batch == 1;
  return m >= (small ? 1 : 4) * VectorLoop<float>::kRows && n >= 64 &&
         m * n * std::max(k, kDeep) >= (small ? kLeastOfOne : kLeast);
#endif
}

#ifdef NEEDLE_OPENBLAS
// A call of OpenBLAS, which takes its buffers under a lock that a forked child would wait for if
// another thread held it. So fork waits for the calls that run, and calls wait for fork.
class BlasCall {
 public:
  BlasCall() {
    [[maybe_unused]] static const int once = pthread_atfork(hold, let_go, let_go);
    while (++running_, forking_) {
      --running_;
      std::lock_guard<std::mutex> wait(mutex_);
    }
  }
  ~BlasCall() { --running_; }

 private:
  static void hold() {
    mutex_.lock();
    forking_ = true;
    while (running_ != 0) std::this_thread::yield();
  }
  static void let_go() {
    forking_ = false;
    mutex_.unlock();
  }

  static inline std::mutex mutex_;
  static inline std::atomic<int> running_{0};
  static inline std::atomic<bool> forking_{false};
};
#endif

template <class T>
void gemm_tile(bool ta, bool tb, int64_t m, int64_t n, int64_t k, const T* a, int64_t lda,
               const T* b, int64_t ldb, bool accumulate, T* c, int64_t ldc) {
#ifdef NEEDLE_OPENBLAS
  if (fit_int(m, n, k, lda, ldb, ldc)) {
    [[maybe_unused]] const typename Own<T, T>::Mode mode;
    const BlasCall call;
    const auto multiply = [&](auto function) {
      function(CblasRowMajor, flag(ta), flag(tb), int(m), int(n), int(k), T(1), a, int(lda), b,
               int(ldb), T(accumulate), c, int(ldc));
    };
    if constexpr (std::is_same_v<T, float>)
      return multiply(scipy_cblas_sgemm);
    else
      return multiply(scipy_cblas_dgemm);
  }
#endif
  gemm_own(ta, tb, m, n, k, a, lda, b, ldb, accumulate, c, ldc);
}

#define PAYS(T) template bool gemm_own_pays<T>(int64_t, int64_t, int64_t, int64_t);
PAYS(float)
PAYS(double)
PAYS(float16)
PAYS(bfloat16)
#undef PAYS
#define TILE(T)                                                                               \
  template void gemm_tile(bool, bool, int64_t, int64_t, int64_t, const T*, int64_t, const T*, \
                          int64_t, bool, T*, int64_t);
#define OWN(In, Out)                                                                           \
  template void gemm_own(bool, bool, int64_t, int64_t, int64_t, const In*, int64_t, const In*, \
                         int64_t, bool, Out*, int64_t);
TILE(float)
TILE(double)
#define WINDOWS(T)                                                                              \
  template void gemm_windows(const Windows<T>&, int64_t, const T*, T*);                         \
  template void gemm_of_windows(const Windows<T>&, const WindowBlock&, int64_t, const T*, bool, \
                                accum_t<T>*);
WINDOWS(float)
WINDOWS(double)
WINDOWS(float16)
WINDOWS(bfloat16)
OWN(float, float)
OWN(double, double)
OWN(float16, float16)
OWN(float16, float)
OWN(bfloat16, bfloat16)
OWN(bfloat16, float)
#undef TILE
#undef OWN
#undef WINDOWS

}  // namespace needle::cpu
