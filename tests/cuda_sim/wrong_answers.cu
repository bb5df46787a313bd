// Faults that no message names, but that the emulator makes visible in the result: NaN where
// nothing was written, a warp that does not run in lockstep, copies that arrive late, streams that
// run only when awaited.
#include <cmath>

#include "check.h"

using namespace needle;

namespace {

__global__ void uninitialized_kernel(float* out) {
  NEEDLE_SHARED(float, tile, 32);
  if (threadIdx.x < 31) tile[threadIdx.x] = 1.0f;  // the tail is forgotten
  __syncthreads();
  out[threadIdx.x] = tile[31 - threadIdx.x];
}

// Volta and later do not promise lockstep: the sum needs __syncwarp between reading and writing.
__global__ void warp_synchronous_kernel(float* out) {
  NEEDLE_SHARED(float, tile, 64);
  volatile float* t = tile;
  t[threadIdx.x] = 1.0f;
  t[threadIdx.x + 32] = 0.0f;
  for (int offset = 16; offset > 0; offset /= 2)
    t[threadIdx.x] = t[threadIdx.x] + t[threadIdx.x + offset];
  if (threadIdx.x == 0) *out = t[0];
}

__global__ void no_wait_kernel(const float* x, float* out) {
  NEEDLE_SHARED(float, tile, 32);
  ptx::cp_async<4>(&tile[threadIdx.x], x + threadIdx.x);
  ptx::cp_async_commit();
  __syncthreads();
  out[threadIdx.x] = tile[threadIdx.x];
}

__global__ void add_one_kernel(float* x) { x[threadIdx.x] += 1.0f; }

bool all_equal(const std::vector<float>& values, float expected) {
  for (float value : values)
    if (!(value == expected)) return false;
  return true;
}

// Two streams that should be joined by an event, and a result that should be awaited.
bool streams(bool join, bool wait) {
  Buffer<float> x(std::vector<float>(32, 1.0f));
  std::vector<float> result(32, 0.0f);
  cudaStream_t first, second;
  cudaEvent_t event;
  cudaStreamCreate(&first);
  cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking);
  cudaEventCreate(&event);
  launch<add_one_kernel>({1, 32, 0, first}, x.get());
  cudaEventRecord(event, first);
  if (join) cudaStreamWaitEvent(second, event);
  launch<add_one_kernel>({1, 32, 0, second}, x.get());
  cudaMemcpyAsync(result.data(), x.get(), 128, cudaMemcpyDeviceToHost, second);
  if (wait) cudaStreamSynchronize(second);
  const bool right = all_equal(result, 3.0f);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  CHECK(cudaEventQuery(event) == cudaSuccess);
  cudaEventDestroy(event);
  cudaStreamDestroy(first);
  cudaStreamDestroy(second);
  return right;
}

// The default stream and a blocking one wait for each other without being told.
bool default_stream() {
  Buffer<float> x(std::vector<float>(32, 1.0f));
  cudaStream_t stream;
  cudaStreamCreate(&stream);
  launch<add_one_kernel>({1, 32, 0, stream}, x.get());
  launch<add_one_kernel>({1, 32}, x.get());
  launch<add_one_kernel>({1, 32, 0, stream}, x.get());
  const bool right = all_equal(x.host(), 4.0f);
  cudaStreamDestroy(stream);
  return right;
}

}  // namespace

int main() {
  Buffer<float> x(std::vector<float>(32, 1.0f)), out(32), copied(32), sum(1);
  launch<uninitialized_kernel>({1, 32}, out.get());
  std::printf("uninitialized: %s\n",
              std::isnan(out.host()[0]) && out.host()[1] == 1.0f ? "NaN" : "unnoticed");
  launch<warp_synchronous_kernel>({1, 32}, sum.get());
  std::printf("warp_synchronous: %s\n", sum.host()[0] == 32.0f ? "unnoticed" : "wrong");
  launch<no_wait_kernel>({1, 32}, x.get(), copied.get());
  std::printf("no_wait: %s\n", std::isnan(copied.host()[0]) ? "NaN" : "unnoticed");
  std::printf("streams: %s\n", streams(true, true) ? "right" : "wrong");
  std::printf("streams_not_joined: %s\n", streams(false, true) ? "right" : "wrong");
  std::printf("streams_not_awaited: %s\n", streams(true, false) ? "right" : "wrong");
  std::printf("default_stream: %s\n", default_stream() ? "right" : "wrong");
}
