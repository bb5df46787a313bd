// The processor's tiles (Intel AMX): eight registers of 16 rows of 16 words, and an instruction
// that multiplies two of them. A word is a float, or a pair of bfloat16 that follow each other.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "integers.h"
#include "simd_cpu.h"

#if defined(__linux__) && defined(__AVX512F__)
#if __has_include(<amxtileintrin.h>) || __has_include(<amxintrin.h>)
#define NEEDLE_TILES  // the compiler's assembler knows them
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace needle::cpu::tiles {

constexpr int kSide = 16;  // rows of a tile, and words of a row

#ifdef NEEDLE_TILES
constexpr bool kCompiled = true;
#else
constexpr bool kCompiled = false;
#endif

// Whether the processor multiplies tiles of bfloat16 and the system lets this process do so, for
// which it is asked once: signal handlers' stacks must be larger from then on. Where they are not
// kCompiled, gemm, pair and round_sums do not exist.
bool available();

// While one lives this thread may use tiles, all of them whole.
struct Use {
  Use();
  ~Use();
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;
};

// Words of k elements, filled up to whole tiles.
constexpr int64_t words_of(int64_t k) { return round_up(k, int64_t(2 * kSide)) / 2; }

// The rows (m, k) of a left operand as gemm takes them: where they lie or, where tiles would reach
// beyond them, copied to `buffer` with zeros up to words_of(k).
struct Rows {
  const bfloat16* data;
  int64_t stride;
};
inline Rows rows_of(const bfloat16* from, int64_t ld, int64_t m, int64_t k, bfloat16* buffer) {
  const int64_t width = 2 * words_of(k);
  if (m % kSide == 0 && k == width) return {from, ld};
  for (int64_t i = 0; i < m; ++i) {
    bfloat16* const copy = buffer + i * width;
    convert_run(from + i * ld, k, copy);
    std::fill(copy + k, copy + width, bfloat16(0.f));
  }
  return {buffer, width};
}

// Rows lie `stride` elements apart, and each kSide of them `next` elements from those before.
struct RowStride {
  int64_t stride, next;
  RowStride(int64_t stride) : stride(stride), next(kSide * stride) {}
};

// C (m, n) = A B, or C += with accumulate: A (m, k) by its rows, B (k, n) by rows of words. k and
// ldb count words, lda and ldc elements; m, n and k are multiples of kSide. Sums are rounded to
// nearest; subnormal numbers are zero.
void gemm(int64_t m, int64_t n, int64_t k, const bfloat16* a, RowStride lda, const bfloat16* b,
          int64_t ldb, float* c, int64_t ldc, bool accumulate);

// The words of two vectors' elements, rounded to bfloat16.
WordBits pair(Vec<float> first, Vec<float> second);

// to (n) = sums of gemm, rounded to bfloat16.
void round_sums(const float* sums, int64_t n, bfloat16* to);

inline bool available() {
#ifdef NEEDLE_TILES
  static const bool answer = [] {
    constexpr unsigned kBfloat16 = 1u << 22, kTiles = 1u << 24, kPairs = 1u << 5;
    // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA
    constexpr long kAskForState = 0x1023, kTileData = 18;
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kBfloat16) && (d & kTiles) &&
           __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & kPairs) &&
           syscall(SYS_arch_prctl, kAskForState, kTileData) == 0;
  }();
  return answer;
#else
  return false;
#endif
}

#ifdef NEEDLE_TILES  // in assembly: this may be compiled for any processor with AVX-512
inline Use::Use() {
  struct alignas(64) Shapes {
    uint8_t palette = 1, first_row = 0, unused[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } shapes;
  for (int tile = 0; tile < 8; ++tile) shapes.row_bytes[tile] = 64, shapes.rows[tile] = kSide;
  asm volatile("ldtilecfg %0" : : "m"(shapes));
}
inline Use::~Use() { asm volatile("tilerelease"); }

// The tiles by their numbers; rows in memory lie `stride` bytes apart.
template <int tile>
void zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(tile));
}
template <int tile>
void load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(tile) : "memory");
}
// What is read once, in order: it does not drive out of the first cache what is read again.
template <int tile>
void load_passing(const void* from, int64_t stride) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(tile) : "memory");
}
template <int tile>
void store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(tile) : "memory");
}
// Row i, word j of `sums` += the products of row i of `a` with word j of all rows of `b`.
template <int sums, int a, int b>
void add_products() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sums), "i"(a), "i"(b));
}

// R by V tiles of C, which stay in registers.
template <int R, int V>
void multiply(int64_t k, const bfloat16* a, RowStride lda, const bfloat16* b, int64_t ldb, float* c,
              int64_t ldc, bool accumulate) {
  // f(tile, where it lies) for each tile of C.
  const auto each = [&](auto f) {
    f(std::integral_constant<int, 0>{}, c);
    if constexpr (V == 2) f(std::integral_constant<int, 1>{}, c + kSide);
    if constexpr (R == 2) f(std::integral_constant<int, 2>{}, c + kSide * ldc);
    if constexpr (R == 2 && V == 2) f(std::integral_constant<int, 3>{}, c + kSide * (ldc + 1));
  };
  const int64_t a_bytes = lda.stride * sizeof(*a), b_bytes = ldb * 2 * sizeof(*b),
                c_bytes = ldc * sizeof(*c);
  each([&](auto tile, float* at) {
    if (accumulate)
      load<tile>(at, c_bytes);
    else
      zero<tile>();
  });
  for (int64_t p = 0; p < k; p += kSide, a += 2 * kSide, b += 2 * kSide * ldb) {
    load<4>(a, a_bytes);
    load_passing<6>(b, b_bytes);
    add_products<0, 4, 6>();
    if constexpr (V == 2) {
      load_passing<7>(b + 2 * kSide, b_bytes);
      add_products<1, 4, 7>();
    }
    if constexpr (R == 2) {
      load<5>(a + lda.next, a_bytes);
      add_products<2, 5, 6>();
      if constexpr (V == 2) add_products<3, 5, 7>();
    }
  }
  each([&](auto tile, float* at) { store<tile>(at, c_bytes); });
}

inline void gemm(int64_t m, int64_t n, int64_t k, const bfloat16* a, RowStride lda,
                 const bfloat16* b, int64_t ldb, float* c, int64_t ldc, bool accumulate) {
  for (int64_t j = 0; j < n; j += 2 * kSide)
    for (int64_t i = 0; i < m; i += 2 * kSide) {
      const bool tall = i + kSide < m, wide = j + kSide < n;
      const auto part = tall   ? wide ? multiply<2, 2> : multiply<2, 1>
                        : wide ? multiply<1, 2>
                               : multiply<1, 1>;
      part(k, a + i / kSide * lda.next, lda, b + 2 * j, ldb, c + i * ldc + j, ldc, accumulate);
    }
}

// Subnormal numbers become zero, which no sum of gemm is.
inline HalfBits rounded(Vec<float> v) {
  HalfBits bits;
  asm("vcvtneps2bf16 %1, %0" : "=v"(bits) : "v"(v));
  return bits;
}

inline WordBits pair(Vec<float> first, Vec<float> second) {
  return __builtin_convertvector(rounded(first), WordBits) |
         __builtin_convertvector(rounded(second), WordBits) << 16;
}

inline void round_sums(const float* sums, int64_t n, bfloat16* to) {
  int64_t i = 0;
  for (; i + kSide <= n; i += kSide) {
    const HalfBits bits = rounded(cpu::load(sums + i));
    memcpy(to + i, &bits, sizeof bits);
  }
  convert_run(sums + i, n - i, to + i);
}
#else
inline Use::Use() = default;
inline Use::~Use() = default;
#endif

}  // namespace needle::cpu::tiles
