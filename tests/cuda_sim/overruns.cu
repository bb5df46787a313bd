// Planted faults for AddressSanitizer and UndefinedBehaviorSanitizer, one per run: the process ends
// with their report.
#include "check.h"

using namespace needle;

namespace {

__global__ void fill_kernel(float* x, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i <= n) x[i] = 1.0f;  // < n is meant
}

__global__ void shared_overrun_kernel(float* out, int reach) {
  NEEDLE_SHARED(float, tile, 32);
  float* p = tile;
  p[threadIdx.x] = 1.0f;
  __syncthreads();
  out[threadIdx.x] = p[threadIdx.x + reach];
}

__global__ void dynamic_overrun_kernel(float* out, int reach) {
  NEEDLE_DYNAMIC_SHARED(float, scratch);
  scratch[threadIdx.x + reach] = 1.0f;
  out[threadIdx.x] = 0.0f;
}

__global__ void bounds_kernel(float* out, int reach) {
  NEEDLE_SHARED(float, tile, 8, 4);
  out[threadIdx.x] = tile[threadIdx.x % 8][reach];
}

__global__ void vector_kernel(const float* x, float* out) {
  const float4 v = *reinterpret_cast<const float4*>(x + 1);
  out[0] = v.x;
}

}  // namespace

int main(int, char** argv) {
  const std::string name = argv[1];
  Buffer<float> x(100), out(64);
  if (name == "global") launch<fill_kernel>({4, 32}, x.get(), 100);
  if (name == "shared") launch<shared_overrun_kernel>({1, 32}, out.get(), 1);
  if (name == "dynamic_shared") launch<dynamic_overrun_kernel>({1, 32, 128}, out.get(), 1);
  if (name == "bounds") launch<bounds_kernel>({1, 8}, out.get(), 4);
  if (name == "misaligned") launch<vector_kernel>({1, 1}, x.get(), out.get());
  if (name == "clean") {
    launch<fill_kernel>({4, 32}, x.get(), 99);
    launch<shared_overrun_kernel>({2, 32}, out.get(), 0);
    launch<dynamic_overrun_kernel>({2, 32, 128}, out.get(), 0);
    launch<bounds_kernel>({1, 8}, out.get(), 3);
  }
  std::puts("end");
}
