// What kernels may use, each checked against its meaning. The driver runs this in every thread
// order.
#include <cmath>

#include "check.h"

using namespace needle;

namespace {

__global__ void indices_kernel(int* out) {
  const int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  const int threads = blockDim.x * blockDim.y * blockDim.z;
  out[block * threads + thread] = block * 1000 + thread;
}

void indices() {
  const dim3 gridDim(3, 2, 4), blockDim(5, 4, 3);  // as some host code calls its own
  Buffer<int> out(24 * 60);
  launch<indices_kernel>({gridDim, blockDim}, out.get());
  const auto values = out.host();
  for (int b = 0; b < 24; ++b)
    for (int t = 0; t < 60; ++t) CHECK(values[b * 60 + t] == b * 1000 + t);
}

__global__ void barriers_kernel(int* out, int early) {
  NEEDLE_SHARED(int, ring, 96);
  NEEDLE_SHARED(int, total);
  NEEDLE_DYNAMIC_SHARED(int, counts);
  const int t = threadIdx.x;
  if (t >= early) return;  // threads that have left no longer count
  int value = t;
  for (int step = 0; step < 5; ++step) {
    ring[t] = value;
    __syncthreads();
    value = ring[(t + 1) % early] + 1;
    __syncthreads();
  }
  if (t == 0) total = 7;
  counts[t] = __syncthreads_count(t % 3 == 0);
  const int all = __syncthreads_and(t < early), not_all = __syncthreads_and(t != 5);
  const int any = __syncthreads_or(t == 5), none = __syncthreads_or(t == 1000);
  out[t] = value + (all && !not_all && any && !none ? 0 : 100000) + (total == 7 ? 0 : 200000);
  out[96 + t] = counts[early - 1 - t];
}

void barriers() {
  for (int early : {96, 70}) {
    Buffer<int> out(192);
    launch<barriers_kernel>({1, 96, 96 * sizeof(int)}, out.get(), early);
    const auto values = out.host();
    for (int t = 0; t < early; ++t) {
      CHECK(values[t] == (t + 5) % early + 5);
      CHECK(values[96 + t] == (early + 2) / 3);
    }
  }
}

__global__ void warps_kernel(unsigned* out, float* sums) {
  const unsigned all = 0xffffffffu;
  const int t = threadIdx.x, lane = t % 32;
  unsigned bad = 0;
  bad |= (__shfl_sync(all, t, 3) != t - lane + 3) << 0;
  bad |= (__shfl_sync(all, lane, 9, 8) != (lane & ~7) + 1) << 1;
  bad |= (__shfl_up_sync(all, lane, 4) != (lane < 4 ? lane : lane - 4)) << 2;
  bad |= (__shfl_up_sync(all, lane, 1, 16) != (lane % 16 == 0 ? lane : lane - 1)) << 3;
  bad |= (__shfl_down_sync(all, lane, 4) != (lane > 27 ? lane : lane + 4)) << 4;
  bad |= (__shfl_down_sync(all, lane, 3, 8) != (lane % 8 > 4 ? lane : lane + 3)) << 5;
  bad |= (__shfl_xor_sync(all, lane, 5) != (lane ^ 5)) << 6;
  bad |= (__shfl_xor_sync(all, double(lane), 16) != double(lane ^ 16)) << 7;
  bad |= (__ballot_sync(all, lane % 5 == 0) != 0x42108421u) << 8;
  bad |= (__any_sync(all, lane == 31) == 0 || __any_sync(all, lane == 32) != 0) << 9;
  bad |= (__all_sync(all, lane < 32) == 0 || __all_sync(all, lane < 31) != 0) << 10;
  bad |= (__match_any_sync(all, lane % 4) != 0x11111111u << lane % 4) << 11;
  int same = -1;
  bad |= (__match_all_sync(all, 3.5f, &same) != all || same != 1) << 12;
  bad |= (__match_all_sync(all, lane / 31, &same) != 0 || same != 0) << 13;
  // Part of a warp, the other part elsewhere.
  if (lane < 16)
    bad |= (__shfl_xor_sync(0xffffu, lane, 1) != (lane ^ 1)) << 14;
  else if (lane < 24)
    bad |= (__ballot_sync(0x00ff0000u, 1) != 0x00ff0000u) << 15;
  __syncwarp();
  float s = 1.0f + lane;
  for (int offset = 16; offset > 0; offset /= 2) s += __shfl_down_sync(all, s, offset);
  if (lane == 0) sums[t / 32] = s;
  out[t] = bad;
}

void warps() {
  Buffer<unsigned> out(128);
  Buffer<float> sums(4);
  launch<warps_kernel>({1, 128}, out.get(), sums.get());
  for (unsigned bad : out.host()) CHECK(bad == 0);
  for (float s : sums.host()) CHECK(s == 528.0f);
}

__global__ void reduce_sync_kernel(int* out) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800  // older ones do not have them
  const unsigned all = 0xffffffffu;
  const int lane = threadIdx.x;
  const int results[] = {__reduce_add_sync(all, lane),
                         __reduce_min_sync(all, lane - 5),
                         __reduce_max_sync(all, lane - 5),
                         static_cast<int>(__reduce_and_sync(all, unsigned(lane) | 64u)),
                         static_cast<int>(__reduce_or_sync(all, unsigned(lane))),
                         static_cast<int>(__reduce_xor_sync(all, 1u << lane))};
  if (lane == 31)
    for (int i = 0; i < 6; ++i) out[i] = results[i];
#endif
}

void reduce_sync() {
  if (device_attribute(cudaDevAttrComputeCapabilityMajor) < 8) return;
  Buffer<int> out(6);
  launch<reduce_sync_kernel>({1, 32}, out.get());
  CHECK((out.host() == std::vector<int>{496, -5, 26, 64, 31, -1}));
}

__global__ void atomics_kernel(int* i, unsigned* u, unsigned long long* ull, float* f, double* d,
                               __half* h, __nv_bfloat16* b) {
  atomicAdd(i, 1);
  atomicSub(i + 1, 2);
  atomicMax(i + 2, int(threadIdx.x));
  atomicMin(i + 3, -int(threadIdx.x));
  atomicOr(u, 1u << threadIdx.x % 32);
  atomicXor(u + 1, 1u);
  atomicInc(u + 2, 9);
  atomicDec(u + 5, 9);
  atomicAnd(u + 6, ~(1u << threadIdx.x % 31));
  atomicAdd(ull, 1ull << 33);
  atomicAdd(f, 0.5f);
  atomicAdd(d, 0.25);
  if (threadIdx.x % 16 == 0) atomicAdd(h, __float2half(1.0f)), atomicAdd(b, __float2bfloat16(1.0f));
  for (unsigned seen = 0;;) {  // a lock-free maximum
    if (seen >= threadIdx.x) break;
    const unsigned old = atomicCAS(u + 3, seen, unsigned(threadIdx.x));
    if (old == seen) break;
    seen = old;
  }
  if (threadIdx.x == 0) atomicExch(u + 4, 77u);
}

void atomics() {
  Buffer<int> i(std::vector<int>{0, 0, 0, 0});
  Buffer<unsigned> u(std::vector<unsigned>{0, 0, 0, 0, 0, 0, 0xffffffffu});
  Buffer<unsigned long long> ull(std::vector<unsigned long long>{0});
  Buffer<float> f(std::vector<float>{0});
  Buffer<double> d(std::vector<double>{0});
  Buffer<__half> h(std::vector<__half>{__float2half(0)});
  Buffer<__nv_bfloat16> b(std::vector<__nv_bfloat16>{__float2bfloat16(0)});
  launch<atomics_kernel>({8, 256}, i.get(), u.get(), ull.get(), f.get(), d.get(), h.get(), b.get());
  CHECK((i.host() == std::vector<int>{2048, -4096, 255, -255}));
  CHECK((u.host() ==
         std::vector<unsigned>{0xffffffffu, 0, 2048 % 10, 255, 77, 10 - 2048 % 10, 1u << 31}));
  CHECK(ull.host()[0] == 2048ull << 33);
  CHECK(f.host()[0] == 1024.0f && d.host()[0] == 512.0);
  CHECK(__half2float(h.host()[0]) == 128.0f && __bfloat162float(b.host()[0]) == 128.0f);
}

__global__ void small_floats_kernel(float* out) {
  const __half a = __float2half(1.5f), b = __float2half(2.0f);
  const __nv_bfloat16 c = __float2bfloat16(1.5f), d = __float2bfloat16(2.0f);
  out[0] = __half2float(__hadd(a, b));
  out[1] = __half2float(__hfma(a, b, a));
  out[2] = __low2float(__hmul2(__halves2half2(a, b), __half2half2(b)));
  out[3] = __high2float(__hadd2(__floats2bfloat162_rn(1.0f, 2.0f), __bfloat162bfloat162(d)));
  out[4] = __half2float(__float2half(65520.0f));             // infinity
  out[5] = __half2float(__float2half(5.9604645e-8f));        // the smallest half
  out[6] = __bfloat162float(__float2bfloat16(1.00390625f));  // a tie, to even
  out[7] = __hgt(b, a) && __hle(c, d) && __hisnan(__float2half(NAN)) ? 1.0f : 0.0f;
  const float2 pair = __bfloat1622float2(__float22bfloat162_rn(make_float2(3.0f, 4.0f)));
  out[8] = pair.x * 10 + pair.y;
  out[9] = __half2float(__ushort_as_half(0x3c00)) + __half_as_ushort(a);
  out[10] = __half2float(__double2half(1 + 0x1p-11 + 0x1p-40));  // a tie for float, not for these
  out[11] = __bfloat162float(__double2bfloat16(1 + 0x1p-8 + 0x1p-40));
}

// Of doubles, of integers and of a product and a sum.
template <class H>
__global__ void rounding_kernel(const double* reals, const long long* integers, const H* factors,
                                H* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  out[i] = H(reals[i]);
  out[n + i] = H(integers[i]);
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800  // older ones have no such bfloat16
  out[2 * n + i] = __hfma(factors[3 * i], factors[3 * i + 1], factors[3 * i + 2]);
#endif
}

// In units of 2^-80, which all numbers here are multiples of.
using Exact = __int128;
Exact exact(double x) { return static_cast<Exact>(std::ldexp(x, 80)); }

// Whether no other is as near to x in 2^-shift, or of two the one whose last bit is 0.
template <class H>
bool is_rounded(Exact x, H h, int shift = 0) {
  uint16_t bits;
  memcpy(&bits, &h, sizeof bits);
  const auto distance = [&](uint16_t of) {
    H other;
    memcpy(static_cast<void*>(&other), &of, sizeof of);
    const Exact apart = x - exact(std::ldexp(double(float(other)), -shift));
    return apart < 0 ? -apart : apart;
  };
  const Exact own = distance(bits);
  for (int step : {-1, 1}) {
    if (own == 0 || (bits % 0x8000 == 0 && step < 0)) continue;
    const Exact other = distance(static_cast<uint16_t>(bits + step));
    if (other < own || (other == own && bits % 2 == 1)) return false;
  }
  return true;
}

template <class H>
void roundings(int digits, long long largest) {
  constexpr int n = 4096;
  uint64_t state = 1;
  const auto random = [&](uint64_t below) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (state >> 33) % below;
  };
  std::vector<double> reals(n);
  std::vector<long long> integers(n);
  std::vector<H> factors(3 * n);
  for (int i = 0; i < n; ++i) {
    // Near the middle between two, for those that float16 does not have as subnormals.
    const auto middle = [&] { return (1 << digits) + 2 * int64_t(random(1 << (digits - 1))) + 1; };
    reals[i] = std::ldexp(double(middle()), int(random(20)) - 27) *
               (1 + (int(random(3)) - 1) * std::ldexp(1, -int(random(52) + 1)));
    if (random(2)) reals[i] = -reals[i];
    const int zeros = int(random(62 - digits));
    integers[i] = ((middle() << zeros) + (zeros ? int(random(3)) - 1 : 0)) % largest;
    if (random(2)) integers[i] = -integers[i];
    for (int j = 0; j < 3; ++j) {  // few digits each, and what is added often far smaller
      const double few = double(random(1 << digits) >> random(digits)) * (random(2) ? -1 : 1);
      factors[3 * i + j] =
          H(float(std::ldexp(few, j < 2 ? int(random(8)) - digits : -int(random(48)) - 16)));
    }
  }
  Buffer<double> reals_(reals);
  Buffer<long long> integers_(integers);
  Buffer<H> factors_(factors), out(3 * n);
  launch<rounding_kernel<H>>({n / 256, 256}, reals_.get(), integers_.get(), factors_.get(),
                             out.get(), n);
  const auto rounded = out.host();
  for (int i = 0; i < n; ++i) {
    CHECK(is_rounded(exact(reals[i]), rounded[i]));
    CHECK(is_rounded(integers[i] * (Exact(1) << 40), rounded[n + i], 40));
    const auto factor = [&](int j) { return double(float(factors[3 * i + j])); };
    if (device_attribute(cudaDevAttrComputeCapabilityMajor) >= 8)
      CHECK(is_rounded(exact(factor(0) * factor(1)) + exact(factor(2)), rounded[2 * n + i]));
  }
}

void small_floats() {
  Buffer<float> out(12);
  launch<small_floats_kernel>({1, 1}, out.get());
  const auto v = out.host();
  const float expected[] = {3.5f, 4.5f, 3.0f,  4.0f,          INFINITY,     5.9604645e-8f,
                            1.0f, 1.0f, 34.0f, 1.0f + 0x3e00, 1 + 0x1p-10f, 1 + 0x1p-7f};
  for (int i = 0; i < 12; ++i) CHECK(v[i] == expected[i]);
  roundings<__half>(11, 65520);
  roundings<__nv_bfloat16>(8, INT64_MAX);
}

__global__ void device_functions_kernel(const float4* x, float* out) {
  const float4 v = __ldg(x);
  out[0] = v.x + v.y + v.z + v.w;
  out[1] = __expf(1.0f) - expf(1.0f) + rsqrtf(4.0f) + __fdividef(1.0f, 4.0f);
  out[2] = float(min(3, 5) + max(2u, 7u)) + max(1.5f, 2.5f) + min(NAN, 1.0f);
  out[3] = float(__popc(0xf0fu) + __clz(1) + __ffs(8) + int(__brev(1u) >> 31) +
                 int(__umulhi(1u << 31, 6u)));
  out[4] = __int_as_float(__float_as_int(2.25f)) + __saturatef(3.0f) + __fmaf_rn(2.0f, 3.0f, 1.0f);
  out[5] = float(__funnelshift_l(0x80000000u, 1u, 1));
}

void device_functions() {
  Buffer<float4> x(std::vector<float4>{make_float4(1, 2, 3, 4)});
  Buffer<float> out(6);
  launch<device_functions_kernel>({1, 1}, x.get(), out.get());
  const auto v = out.host();
  const float expected[] = {10.0f, 0.75f, 13.5f, 8 + 31 + 4 + 1 + 3, 10.25f, 3.0f};
  for (int i = 0; i < 6; ++i) CHECK(std::fabs(v[i] - expected[i]) < 1e-6f);
}

// A bit for each line that is not as it should be.
__global__ void integers_kernel(unsigned* bad, int* words, float x, int one) {
  const float inf = INFINITY * x;  // x and one are 1, which a compiler does not know
  *bad |= (__popcll(0xf00000000000000fll * one) != 8 || __clzll(1ll * one) != 63) << 0;
  *bad |= (__clzll(0ll) != 64 || __ffsll(1ll << 40) != 41 || __ffsll(0ll) != 0) << 1;
  *bad |= (__mulhi(-(one << 30), 8) != -2 || __umul64hi(1ull << 63, 6ull * one) != 3) << 2;
  *bad |= (__funnelshift_r(2u * one, 1u, 1) != 0x80000001u) << 3;
  *bad |= (__float2int_rn(2.5f * x) != 2 || __float2int_rn(-3.5f * x) != -4) << 4;
  *bad |= (__float2int_rz(-2.7f * x) != -2 || __float2int_rd(-2.2f * x) != -3) << 5;
  *bad |= (__float2int_ru(2.2f * x) != 3 || __float2int_rz(inf) != 0x7fffffff) << 6;
  *bad |= (__float2int_rz(-inf) != int(0x80000000u) || __float2int_rz(inf - inf) != 0) << 7;
  *bad |= (__int2float_rn(16777217 * one) != 16777216.0f) << 8;
  *bad |= (__uint2float_rn(0xffffffffu * one) != 4294967296.0f) << 9;
  *bad |= (__uint_as_float(0x40100000u * one) != 2.25f || __float_as_uint(2.25f * x) != 0x40100000u)
          << 10;
  *bad |= (__longlong_as_double(0x4002000000000000ll * one) != 2.25) << 11;
  *bad |= (__double_as_longlong(2.25 * x) != 0x4002000000000000ll) << 12;
  __stcg(words, 5 * one);
  __stcs(words + 1, 6 * one);
  const long long before = clock64();
  __threadfence();
  __threadfence_block();
  __threadfence_system();
  __nanosleep(1);
  *bad |= (__ldcg(words) != 5 || __ldcs(words + 1) != 6) << 13;
  *bad |= (__ldca(words) != 5 || __ldcv(words + 1) != 6) << 15;
  *bad |= (__brevll(1ull * one) != 1ull << 63 || __mul64hi(-(1ll << 62), 8 * one) != -2) << 16;
  *bad |= (__byte_perm(0x33221100u * one, 0x77665544, 0x7f02) != 0x77770022) << 17;
  *bad |= (__dp4a(0x7f80ff02, 0x7f800302 * one, -1) != 127 * 127 + 128 * 128 - 3 + 4 - 1) << 18;
  *bad |= (__dp4a(0xff0000ffu, 0xff000002u * one, 1u) != 255 * 255 + 255 * 2 + 1) << 19;
  *bad |= (__dp4a(make_char4(-1, 2, 0, 0), make_char4(5, 6, 0, 0), one) != 8) << 20;
  *bad |= (__mul24(0x0ffffffe, 3 * one) != -6 || __umul24(0xff000003u, 4u * one) != 12) << 21;
  *bad |= (__mul24(0x7fffff, 0x7fffff * one) != int(0xff000001u)) << 22;
  *bad |= (__double2int_rn(2.5 * x) != 2 || __double2int_rz(1e10 * x) != 0x7fffffff) << 23;
  *bad |= (__float2uint_rn(3e9f * x) != 3000000000u || __float2uint_rz(-1 * x) != 0) << 24;
  *bad |= (__float2uint_ru(0.5f * x) != 1 || __float2uint_rd(inf) != 0xffffffffu) << 25;
  *bad |= (__float2ll_rn(1e18f * x) != 999999984306749440 || __double2ll_rd(-0.5 * x) != -1) << 26;
  *bad |= (__float2ll_rn(inf - inf) != 1ll << 63 || __float2uint_rn(inf - inf) != 0) << 27;
  *bad |= (__double2int_rn(double(inf - inf)) != int(1u << 31)) << 28;
  *bad |= (__half2int_rn(__int2half_rn(4097 * one)) != 4096) << 29;
  *bad |= (__half2int_rz(__float2half(-2.75f * x)) != -2) << 30;
  *bad |= (__half_as_short(__short_as_half(-2 * one)) != -2 ? 1u : 0u) << 31;
  *bad |= (clock64() < before || __activemask() != 1) << 14;
}

void integers() {
  Buffer<unsigned> bad(std::vector<unsigned>{0});
  Buffer<int> words(2);
  launch<integers_kernel>({1, 1}, bad.get(), words.get(), 1.0f, 1);
  CHECK(bad.host()[0] == 0);
}

__global__ void float_functions_kernel(unsigned* bad, float x) {
  const auto near = [](float a, float b) { return fabsf(a - b) < 1e-5f; };
  *bad |= (__fadd_rn(x, 2) != 3 || __fsub_rn(x, 2) != -1 || __fmul_rn(x, 2) != 2) << 0;
  *bad |= (__fdiv_rn(x, 4) != 0.25f || __frcp_rn(4 * x) != 0.25f) << 1;
  *bad |= (__fsqrt_rn(9 * x) != 3 || __frsqrt_rn(4 * x) != 0.5f) << 2;
  *bad |= !near(__exp10f(2 * x) / 100, 1) << 3;
  *bad |= (!near(__logf(2.718281828f * x), 1) || !near(__log2f(8 * x), 3)) << 4;
  *bad |= (!near(__log10f(100 * x), 2) || !near(__powf(2 * x, 3), 8)) << 5;
  *bad |= (!near(__sinf(x), 0.84147098f) || !near(__cosf(x), 0.54030231f)) << 6;
  *bad |= !near(__tanf(x), 1.55740772f) << 7;
  *bad |= (!isnan(x * NAN) || !isinf(x * INFINITY) || isfinite(x * INFINITY)) << 9;
  *bad |= (signbit(x) || !signbit(-0.0 * x)) << 10;
  *bad |= (__dadd_rn(x, 2) != 3 || __dsub_rn(x, 2) != -1 || __dmul_rn(x, 2) != 2) << 11;
  *bad |= (__ddiv_rn(x, 4) != 0.25 || __dsqrt_rn(9 * x) != 3 || __drcp_rn(4 * x) != 0.25) << 12;
  *bad |= (__fma_rn(x + 0x1p-52, x - 0x1p-52, -1) != -0x1p-104) << 13;
  *bad |= (fdividef(x, 4) != 0.25f || rsqrt(4.0 * x) != 0.5) << 8;
}

// The intrinsics that both formats have. What + - * / give here is exact in either.
template <class H, class H2>
__device__ unsigned wrong_intrinsics(H a, H b, H2 ab, float (*wide)(H), H (*narrow)(float)) {
  const auto is = [&](H h, float f) { return wide(h) == f; };
  const auto are = [&](H2 h, float f, float g) { return is(h.x, f) && is(h.y, g); };
  const auto near = [&](H h, float f) { return fabsf(wide(h) - f) < 0.01f * fabsf(f); };
  H2 ba = ab;
  ba.x = b, ba.y = a;  // ab is (1.5, -3)
  unsigned bad = 0;
  bad |= (!is(__hsub(a, b), 4.5f) || !is(__hmul(a, b), -4.5f) || !is(__hdiv(b, a), -2)) << 0;
  bad |= (!is(__hneg(a), -1.5f) || !is(__habs(b), 3)) << 1;
  bad |= (!is(__hmax(a, b), 1.5f) || !is(__hmin(a, b), -3)) << 2;
  bad |= (!is(__hmax(narrow(NAN), b), -3) || !is(__hmin(a, narrow(NAN)), 1.5f)) << 3;
  bad |= (1 / wide(__hmax(narrow(-0.0f), narrow(0.0f))) < 0) << 14;
  bad |= (1 / wide(__hmin(narrow(0.0f), narrow(-0.0f))) > 0) << 15;
  bad |= (__heq(a, b) || !__hne(a, b) || __hlt(a, b) || !__hge(a, b)) << 4;
  bad |= (__hne(narrow(NAN), a) || __heq(narrow(NAN), narrow(NAN))) << 5;
  bad |= (__hisinf(narrow(INFINITY)) != 1 || __hisinf(narrow(-INFINITY)) != -1) << 6;
  bad |= (!near(hexp(a), 4.4817f) || !near(hexp2(b), 0.125f) || !near(hlog(a), 0.4055f)) << 7;
  bad |= (!near(hsqrt(a), 1.2247f) || !near(hrsqrt(a), 0.8165f) || !near(hrcp(b), -0.3333f)) << 8;
  bad |= (!near(hsin(a), 0.9975f) || !near(hcos(a), 0.0707f)) << 9;
  bad |= (!are(__hsub2(ab, ba), 4.5f, -4.5f) || !are(__h2div(ab, ba), -0.5f, -2)) << 10;
  bad |= (!are(__hmax2(ab, ba), 1.5f, 1.5f) || !are(__hmin2(ab, ba), -3, -3)) << 11;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800  // older ones have no such bfloat16
  bad |= !are(__hfma2(ab, ab, ba), -0.75f, 10.5f) << 12;
#endif
  bad |= (__low2float(ab) != 1.5f || __high2float(ab) != -3) << 13;
  H2 c = ab;
  c += ba;
  c *= ab;
  bad |= (!are(c, -2.25f, 4.5f) || !are(-ab, -1.5f, 3) || !are(__hneg2(ab), -1.5f, 3)) << 16;
  bad |= (!are(c++, -2.25f, 4.5f) || !are(--c, -2.25f, 4.5f)) << 17;
  bad |= (!(ab == ab) || ab == ba || !(ab != ba) || !(c < __hadd2(c, __habs2(c)))) << 18;
  bad |= (!are(__habs2(ab), 1.5f, 3) || !near(h2rcp(ba).x, -0.3333f)) << 19;
  bad |= (!near(h2exp(ab).x, 4.4817f) || !near(h2log(ab).x, 0.4055f)) << 20;
  bad |= (!near(h2sqrt(ab).x, 1.2247f) || !near(h2rsqrt(ab).x, 0.8165f)) << 21;
  bad |= (!near(hlog2(a), 0.585f) || !is(hfloor(a), 1) || !is(hceil(a), 2)) << 22;
  bad |= (!is(hrint(narrow(2.5f)), 2) || !is(htrunc(b + a), -1)) << 23;
  return bad;
}

__global__ void small_float_functions_kernel(unsigned* bad) {
  const __half2 h = __float22half2_rn(make_float2(1.5f, -3.0f));
  const __nv_bfloat162 b = __floats2bfloat162_rn(1.5f, -3.0f);
  bad[0] = wrong_intrinsics(__low2half(h), __high2half(h), h, __half2float, __float2half_rn);
  bad[1] = wrong_intrinsics(__low2bfloat16(b), __high2bfloat16(b), b, __bfloat162float,
                            __float2bfloat16_rn);
  const float2 wide = __half22float2(__floats2half2_rn(2.0f, 4.0f));
  bad[2] = wide.x != 2 || wide.y != 4;
  bad[2] |= (__high2float(__float2half2_rn(5.0f)) != 5) << 1;
  bad[2] |= (__low2float(__float2bfloat162_rn(5.0f)) != 5) << 2;
  bad[2] |= (__high2float(__halves2bfloat162(b.x, b.y)) != -3) << 3;
  const __half2 lows = __lows2half2(h, make_half2(h.y, h.x));
  bad[2] |= (__low2float(lows) != 1.5f || __high2float(lows) != -3) << 5;
  bad[2] |= (__high2float(__low2half2(h)) != 1.5f || __low2float(__high2half2(h)) != -3) << 6;
  bad[2] |= (__low2float(make_bfloat162(b.y, b.x)) != -3) << 7;
  bad[2] |= (__bfloat16_as_ushort(__ushort_as_bfloat16(0x3fc0)) != 0x3fc0) << 4;
}

void functions() {
  Buffer<unsigned> bad(std::vector<unsigned>(4, 0));
  launch<float_functions_kernel>({1, 1}, bad.get() + 3, 1.0f);
  launch<small_float_functions_kernel>({1, 1}, bad.get());
  for (unsigned found : bad.host()) CHECK(found == 0);
}

template <class T>
__global__ void add_kernel(T* x, T value, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] += value;
}

void launch_records() {
  reset_launch_counts();
  Buffer<int> x(std::vector<int>(100, 1));
  launch<add_kernel<int>>({4, 32}, x.get(), 2, 100);
  launch<add_kernel<int>>({4, 32}, x.get(), int64_t(3), 100);  // arguments convert as in a call
  Buffer<double> y(std::vector<double>(100, 1));
  launch<add_kernel<double>>({4, 32}, y.get(), 2, 100);
  for (int value : x.host()) CHECK(value == 6);
  const auto counts = launch_counts();
  CHECK(counts.size() == 1 && counts.at("add_kernel").launches == 3);
  CHECK(counts.at("add_kernel").blocks == 4 && counts.at("add_kernel").threads == 32);
  reset_launch_counts();
  CHECK(launch_counts().empty());
}

#if NEEDLE_EMULATED && !defined(NEEDLE_RACE)
// The emulator's fresh memory, global and shared, is all ones: NaN, so that what nobody wrote
// shows. (The race detector calls the read of shared memory an error: races.cu.)
__global__ void fresh_kernel(float* out) {
  NEEDLE_SHARED(float, fresh, 32);
  NEEDLE_DYNAMIC_SHARED(float, dynamic);
  out[blockIdx.x * 64 + threadIdx.x] = fresh[threadIdx.x];
  out[blockIdx.x * 64 + 32 + threadIdx.x] = dynamic[threadIdx.x];
  __syncthreads();
  fresh[threadIdx.x] = dynamic[threadIdx.x] = 1.0f;  // and the next block's is fresh again
}

void fresh_memory() {
  Buffer<float> out(129);
  launch<fresh_kernel>({2, 32, 128}, out.get());
  for (float value : out.host()) CHECK(std::isnan(value));
}
#endif

__global__ void opted_in_kernel(char* out, int bytes) {
  NEEDLE_DYNAMIC_SHARED(char, big);
  big[bytes - 1] = 3;
  *out = big[bytes - 1];
}

void large_shared_memory() {
  const int bytes = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  CHECK(bytes > 48 * 1024);
  allow_dynamic_shared<opted_in_kernel>(bytes);
  Buffer<char> out(1);
  launch<opted_in_kernel>({1, 1, size_t(bytes)}, out.get(), bytes);
  CHECK(out.host()[0] == 3);
  // What is refused is told once: launches after it are not said to have failed.
  bool refused = false;
  try {
    allow_dynamic_shared<opted_in_kernel>(bytes + 1);
  } catch (const CudaError&) {
    refused = true;
  }
  CHECK(refused);
  launch<opted_in_kernel>({1, 1, size_t(bytes)}, out.get(), bytes);
}

}  // namespace

int main() {
  indices();
  barriers();
  warps();
  reduce_sync();
  atomics();
  small_floats();
  device_functions();
  integers();
  functions();
  launch_records();
#if NEEDLE_EMULATED && !defined(NEEDLE_RACE)
  fresh_memory();
#endif
  large_shared_memory();
  std::puts("ok");
}
