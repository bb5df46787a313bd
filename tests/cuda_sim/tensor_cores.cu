// mma.sync, ldmatrix, cp.async and ex2 against plain loops, all lanes, on random numbers. The
// layouts are our reading of the PTX manual, and CUTLASS's; this same program, compiled by nvcc, is
// what a GPU has to confirm (benchmarks/gpu_check.py).
#include <cmath>
#include <random>

#include "check.h"

using namespace needle;

namespace {

std::mt19937 random_bits(5);

// Integers, whose products have exact sums in any order; or numbers of all sizes below 2.
template <class T>
std::vector<T> random_numbers(int n, bool exact) {
  std::vector<T> numbers(n);
  for (T& x : numbers) {
    const float unit = float(random_bits() % 1024) / 512 - 1;  // tf32 holds it
    x = T(exact ? std::floor(unit * 16) : unit * std::exp2(-float(random_bits() % 8)) * 2);
  }
  return numbers;
}

// Sums of products whose sizes add up to `size`: exact, or with what a tensor core may lose when it
// aligns up to 17 addends to the largest and cuts off what lies below its last bit, of 24 or more.
bool close(float found, double expected, bool exact, double size) {
  return exact ? found == expected : std::fabs(found - expected) <= 17 * 0x1p-22 * size;
}

// c (16 x 8) = a (16 x 16, rows) @ b. `b_rows`: b is stored (16, 8) and read with ldmatrix.trans,
// else (8, 16).
template <class T>
__global__ void mma_kernel(const T* a, const T* b, float* c, bool b_rows) {
  NEEDLE_SHARED(T, a_tile, 16, 16);
  NEEDLE_SHARED(T, b_tile, 128);
  const int lane = threadIdx.x;
  ptx::cp_async<16>(&a_tile[lane / 2][lane % 2 * 8], a + lane * 8);
  ptx::cp_async_commit();
  for (int i = lane; i < 32; i += 32) ptx::cp_async<8>(&b_tile[i * 4], b + i * 4);
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  __syncwarp();
  uint32_t a_frag[4], b_frag[2], b_single[1];
  ptx::ldmatrix(a_frag, &a_tile[lane % 16][lane / 16 * 8]);
  if (b_rows) {
    ptx::ldmatrix_trans(b_frag, &b_tile[lane % 16 * 8]);
    ptx::ldmatrix_trans(b_single, &b_tile[lane % 8 * 8]);
  } else {
    ptx::ldmatrix(b_frag, &b_tile[lane % 8 * 16 + lane / 8 % 2 * 8]);
    ptx::ldmatrix(b_single, &b_tile[lane % 8 * 16]);
  }
  if (b_single[0] != b_frag[0]) __trap();
  float acc[4] = {1.0f, 1.0f, 1.0f, 1.0f};
  ptx::mma_m16n8k16<T>(acc, a_frag, b_frag);
  for (int r = 0; r < 4; ++r) c[(lane / 4 + r / 2 * 8) * 8 + lane % 4 * 2 + r % 2] = acc[r];
}

template <class T>
void half_precision() {
  for (int round = 0; round < 16; ++round) {
    const bool exact = round % 2, b_rows = round / 2 % 2;
    const auto a = random_numbers<T>(256, exact), b = random_numbers<T>(128, exact);
    Buffer<T> a_device(a), b_device(b);
    Buffer<float> c(128);
    launch<mma_kernel<T>>({1, 32}, a_device.get(), b_device.get(), c.get(), b_rows);
    const auto result = c.host();
    for (int m = 0; m < 16; ++m)
      for (int n = 0; n < 8; ++n) {
        double sum = 1, size = 1;
        for (int k = 0; k < 16; ++k) {
          const double product =
              double(float(a[m * 16 + k])) * float(b[b_rows ? k * 8 + n : n * 16 + k]);
          sum += product;
          size += std::fabs(product);
        }
        CHECK(close(result[m * 8 + n], sum, exact, size));
      }
  }
}

// fragments (32 lanes, N) of N matrices of 8 x 8.
template <int N, bool trans>
__global__ void ldmatrix_kernel(const uint16_t* matrices, uint32_t* fragments) {
  NEEDLE_SHARED(uint4, rows, 8 * N);
  const int lane = threadIdx.x;
  if (lane < 8 * N) rows[lane] = reinterpret_cast<const uint4*>(matrices)[lane];
  __syncwarp();
  uint32_t r[N];
  if (trans)
    ptx::ldmatrix_trans(r, &rows[lane % (8 * N)]);
  else
    ptx::ldmatrix(r, &rows[lane % (8 * N)]);
  for (int i = 0; i < N; ++i) {
    volatile uint32_t* fragment = fragments + lane * N + i;
    *fragment = r[i];
    __threadfence_block();
    *fragment = *fragment;
    __threadfence();
  }
}

template <int N, bool trans>
void load_matrices() {
  std::vector<uint16_t> matrices(64 * N);
  for (uint16_t& x : matrices) x = uint16_t(random_bits());
  Buffer<uint16_t> matrices_device(matrices);
  Buffer<uint32_t> fragments(32 * N);
  launch<ldmatrix_kernel<N, trans>>({1, 32}, matrices_device.get(), fragments.get());
  const auto result = fragments.host();
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < N; ++i) {
      const int g = lane / 4, t = lane % 4 * 2;
      const auto at = [&](int j) {
        return uint32_t(matrices[i * 64 + (trans ? (t + j) * 8 + g : g * 8 + t + j)]);
      };
      CHECK(result[lane * N + i] == (at(0) | at(1) << 16));
    }
}

__global__ void tf32_kernel(const float* a, const float* b, float* c) {
  const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
  const uint32_t a_frag[4] = {ptx::to_tf32(a[g * 8 + t]), ptx::to_tf32(a[(g + 8) * 8 + t]),
                              ptx::to_tf32(a[g * 8 + t + 4]), ptx::to_tf32(a[(g + 8) * 8 + t + 4])};
  const uint32_t b_frag[2] = {ptx::to_tf32(b[t * 8 + g]), ptx::to_tf32(b[(t + 4) * 8 + g])};
  float acc[4] = {};
  ptx::mma_m16n8k8_tf32(acc, a_frag, b_frag);
  for (int r = 0; r < 4; ++r) c[(g + r / 2 * 8) * 8 + 2 * t + r % 2] = acc[r];
}

void tf32() {
  for (int round = 0; round < 8; ++round) {
    const bool exact = round % 2;
    auto a = random_numbers<float>(128, exact), b = random_numbers<float>(64, exact);
    a[0] = 1.0f + 1.0f / 4096;  // beyond 10 bits of mantissa: rounds to 1
    Buffer<float> a_device(a), b_device(b), c(128);
    launch<tf32_kernel>({1, 32}, a_device.get(), b_device.get(), c.get());
    a[0] = 1.0f;
    const auto result = c.host();
    for (int m = 0; m < 16; ++m)
      for (int n = 0; n < 8; ++n) {
        double sum = 0, size = 0;
        for (int k = 0; k < 8; ++k) {
          sum += double(a[m * 8 + k]) * b[k * 8 + n];
          size += std::fabs(double(a[m * 8 + k]) * b[k * 8 + n]);
        }
        CHECK(close(result[m * 8 + n], sum, exact, size));
      }
  }
}

// A two-stage pipeline whose last piece is short and filled with zeros.
__global__ void pipeline_kernel(const float* x, float* out, int n) {
  NEEDLE_SHARED(float, stage, 2, 128);
  const int t = threadIdx.x, pieces = (n + 127) / 128;
  const auto fetch = [&](int piece) {
    const int first = piece * 128 + t * 4, left = n - first;
    const int bytes = left >= 4 ? 16 : left > 0 ? left * 4 : 0;
    if (piece < pieces) ptx::cp_async<16>(&stage[piece % 2][t * 4], x + (bytes ? first : 0), bytes);
    ptx::cp_async_commit();
  };
  float sum = 0.0f;
  fetch(0);
  for (int piece = 0; piece < pieces; ++piece) {
    fetch(piece + 1);
    ptx::cp_async_wait<1>();
    __syncthreads();
    for (int i = 0; i < 4; ++i) sum += stage[piece % 2][(t * 4 + 37 + i) % 128];
    __syncthreads();
  }
  out[t] = sum;
}

void pipeline() {
  for (int n : {1, 128, 131, 500}) {
    std::vector<float> x(n);
    float expected = 0;
    for (int i = 0; i < n; ++i) expected += x[i] = float(i % 9);
    Buffer<float> x_device(x), out(32);
    launch<pipeline_kernel>({1, 32}, x_device.get(), out.get(), n);
    float sum = 0;
    for (float part : out.host()) sum += part;
    CHECK(sum == expected);
  }
}

// Thread t has t bytes of its copy from global memory, as the tail of a row of 16-bit floats has
// two of sixteen; the rest is zeros.
template <int Bytes>
__global__ void short_copies_kernel(const uint8_t* x, uint8_t* out) {
  NEEDLE_SHARED(uint8_t, stage, (Bytes + 1) * Bytes);
  const int t = threadIdx.x;
  // Without bytes to read the address may be any; this one is a tebibyte away.
  ptx::cp_async<Bytes>(&stage[t * Bytes], t == 0 ? x + (int64_t(1) << 40) : x + t * Bytes, t);
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  for (int i = 0; i < Bytes; ++i) out[t * Bytes + i] = stage[t * Bytes + i];
}

template <int Bytes>
void short_copies() {
  std::vector<uint8_t> x((Bytes + 1) * Bytes);
  for (uint8_t& byte : x) byte = uint8_t(random_bits() | 1);
  Buffer<uint8_t> x_device(x), out(x.size());
  launch<short_copies_kernel<Bytes>>({1, Bytes + 1}, x_device.get(), out.get());
  const auto result = out.host();
  for (int t = 0; t <= Bytes; ++t)
    for (int i = 0; i < Bytes; ++i) CHECK(result[t * Bytes + i] == (i < t ? x[t * Bytes + i] : 0));
}

__global__ void exp2_kernel(const float* x, float* out) {
  out[threadIdx.x] = ptx::exp2(x[threadIdx.x]);
}

void powers_of_two() {
  std::vector<float> x = {0,       1,    -1,     10,        127.5f,   128, -125.5f,
                          -126.5f, -149, -1e30f, -INFINITY, INFINITY, NAN};
  while (x.size() < 256) x.push_back(float(random_bits() % 65536) / 256 - 128);
  Buffer<float> x_device(x), out(x.size());
  launch<exp2_kernel>({1, unsigned(x.size())}, x_device.get(), out.get());
  const auto result = out.host();
  for (size_t i = 0; i < x.size(); ++i) {
    const double exact = std::exp2(double(x[i]));
    if (exact < 0x1p-126)
      CHECK(result[i] == 0);
    else if (exact < 0x1p128)
      CHECK(std::fabs(result[i] - exact) <= 0x1p-22 * exact);
    else  // infinite, or not a number
      CHECK(std::isnan(x[i]) ? std::isnan(result[i]) : std::isinf(result[i]));
  }
}

}  // namespace

int main() {
  if (device_attribute(cudaDevAttrComputeCapabilityMajor) >= 8) {
    half_precision<float16>();
    half_precision<bfloat16>();
#if !NEEDLE_PTX  // which finds kernels by name, and this is the name of CUDA's type alone
    half_precision<__half>();
    half_precision<__nv_bfloat16>();
#endif
    tf32();
  }
  load_matrices<1, false>();
  load_matrices<2, false>();
  load_matrices<4, false>();
  load_matrices<1, true>();
  load_matrices<2, true>();
  load_matrices<4, true>();
  pipeline();
  short_copies<4>();
  short_copies<8>();
  short_copies<16>();
  powers_of_two();
  std::puts("ok");
}
