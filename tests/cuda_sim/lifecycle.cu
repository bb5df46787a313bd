// What surrounds launches: many threads and a fork, errors of lazy streams, refused memory, the
// cost of waiting.
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <thread>

#include "check.h"

using namespace needle;

namespace {

__global__ void sum_kernel(int* out, int rounds) {
  NEEDLE_SHARED(int, tile, 256);
  int s = 0;
  for (int i = 0; i < rounds; ++i) {
    tile[threadIdx.x] = i;
    __syncthreads();
    s += tile[255 - threadIdx.x];
    __syncthreads();
  }
  out[blockIdx.x * blockDim.x + threadIdx.x] = s;
}

bool sums_are_right() {
  Buffer<int> out(64 * 256);
  launch<sum_kernel>({64, 256}, out.get(), 10);
  for (int value : out.host())
    if (value != 45) return false;
  return true;
}

__global__ void fail_in_block_kernel(unsigned block) {
  if (blockIdx.x == block && threadIdx.x == 1) __trap();
  __syncthreads();
}

void launches_from_threads() {
  std::vector<std::thread> threads;
  std::vector<int> right(4);
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&right, i] { right[i] = sums_are_right() && sums_are_right(); });
  for (auto& thread : threads) thread.join();
  for (int ok : right) CHECK(ok);
}

void launches_after_fork() {
  CHECK(sums_are_right());
  const pid_t child = fork();
  if (child == 0) _exit(sums_are_right() && sums_are_right() ? 0 : 1);
  int status = 0;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK(sums_are_right());
}

void faults_among_workers() {
  for (unsigned block : {0u, 31u, 63u}) {
    std::string message;
    try {
      launch<fail_in_block_kernel>({64, 256}, block);
    } catch (const CudaError& error) {
      message = error.what();
    }
    CHECK(message.find("block (" + std::to_string(block) + ",0,0), thread (1,0,0)") !=
          std::string::npos);
    CHECK(sums_are_right());
  }
}

// A lazy launch fails when it is awaited, and the text says which kernel it was.
void lazy_faults() {
  setenv("NEEDLE_SIM_STREAMS", "lazy", 1);
  launch<fail_in_block_kernel>({1, 32}, 0u);
  const cudaError_t error = cudaDeviceSynchronize();
  CHECK(error == cudaErrorLaunchFailure);
  CHECK(std::string(cudaGetErrorString(error)).find("fail_in_block_kernel") != std::string::npos);
  CHECK(cudaGetLastError() == cudaErrorLaunchFailure && cudaGetLastError() == cudaSuccess);
  setenv("NEEDLE_SIM_STREAMS", "eager", 1);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
}

__global__ void store_kernel(int* out, int value) { *out = value; }

// A lazy stream's work is not done when its event is asked for, but a loop that asks comes to an
// end.
void lazy_queries() {
  setenv("NEEDLE_SIM_STREAMS", "lazy", 1);
  int* out = nullptr;
  CHECK(cudaMallocHost(reinterpret_cast<void**>(&out), sizeof(int)) == cudaSuccess);
  cudaEvent_t event;
  cudaEventCreate(&event);
  for (int round = 1; round <= 2; ++round) {
    *out = 0;
    launch<store_kernel>({1, 1}, out, round);
    cudaEventRecord(event);
    CHECK(cudaEventQuery(event) == cudaErrorNotReady && *out == 0);
    while (cudaEventQuery(event) == cudaErrorNotReady) {
    }
    CHECK(*out == round);
  }
  cudaEventDestroy(event);
  cudaFreeHost(out);
  setenv("NEEDLE_SIM_STREAMS", "eager", 1);
}

void refused_memory() {
  void* p = nullptr;
  CHECK(cudaMalloc(&p, size_t(1) << 50) == cudaErrorMemoryAllocation && p == nullptr);
  size_t free_bytes = 0, total_bytes = 0;
  CHECK(cudaMemGetInfo(&free_bytes, &total_bytes) == cudaSuccess && free_bytes <= total_bytes);
  cudaDeviceProp properties;
  CHECK(cudaGetDeviceProperties(&properties, 0) == cudaSuccess && properties.major == 9);
  CHECK(cudaSetDevice(1) == cudaErrorInvalidDevice);
  CHECK(cudaGetLastError() == cudaErrorInvalidDevice && cudaGetLastError() == cudaSuccess);
}

void refused_copies() {
  Buffer<int> x(std::vector<int>(64, 1));
  const auto kind = cudaMemcpyDeviceToDevice;
  CHECK(cudaMemcpy(x.get(), x.get() + 31, 128, kind) == cudaErrorInvalidValue);
  CHECK(cudaGetLastError() == cudaErrorInvalidValue);
  CHECK(cudaMemcpy(x.get(), x.get() + 32, 128, kind) == cudaSuccess);
}

__constant__ float factors[4];
__global__ void scale_kernel(float* x, size_t pitch) {
  float* row = reinterpret_cast<float*>(reinterpret_cast<char*>(x) + threadIdx.y * pitch);
  row[threadIdx.x] *= factors[threadIdx.x];
}

// What files with a main of their own use of the runtime.
void host_functions() {
  float *rows = nullptr, *pinned = nullptr, *managed = nullptr;
  size_t pitch = 0;
  CHECK(cudaMallocPitch(&rows, &pitch, 4 * sizeof(float), 2) == cudaSuccess && pitch >= 16);
  CHECK(cudaMallocHost(&pinned, 32) == cudaSuccess);
  CHECK(cudaMallocManaged(&managed, 32) == cudaSuccess);
  for (int i = 0; i < 8; ++i) pinned[i] = float(i);
  const float scales[] = {1, 2, 3};
  CHECK(cudaMemcpyToSymbol(factors, scales, 12, 4) == cudaSuccess);
  CHECK(cudaMemcpyToSymbol(factors, scales, 4) == cudaSuccess);
  CHECK(cudaMemcpy2D(rows, pitch, pinned, 16, 16, 2, cudaMemcpyHostToDevice) == cudaSuccess);
  cudaEvent_t start, end;
  cudaEventCreate(&start);
  cudaEventCreate(&end);
  cudaEventRecord(start);
  launch<scale_kernel>({1, dim3(4, 2)}, rows, pitch);
  cudaEventRecord(end);
  CHECK(cudaMemcpy2D(managed, 16, rows, pitch, 16, 2, cudaMemcpyDefault) == cudaSuccess);
  for (int i = 0; i < 8; ++i) CHECK(managed[i] == pinned[i] * (i % 4 ? i % 4 : 1));
  float milliseconds = -1;
  CHECK(cudaEventElapsedTime(&milliseconds, start, end) == cudaSuccess && milliseconds >= 0);
  CHECK(cudaMemset(managed, 0, 32) == cudaSuccess && cudaDeviceSynchronize() == cudaSuccess);
  CHECK(managed[7] == 0 && cudaStreamQuery(nullptr) == cudaSuccess);
  const cudaError error = cudaMemcpy2D(rows, 8, pinned, 16, 16, 2, cudaMemcpyDefault);
  CHECK(error == cudaErrorInvalidPitchValue && cudaPeekAtLastError() == error);
  CHECK(cudaGetLastError() == error && cudaPeekAtLastError() == cudaSuccess);
  CHECK(cudaGetErrorName(error) == std::string("cudaErrorInvalidPitchValue"));
  cudaDeviceProp properties;
  CHECK(cudaGetDeviceProperties(&properties, 0) == cudaSuccess);
  CHECK(properties.maxThreadsDim[2] == 64 && properties.maxGridSize[1] == 65535);
  CHECK(properties.regsPerBlock == 65536);
  setenv("NEEDLE_SIM_STREAMS", "lazy", 1);
  launch<store_kernel>({1, 1}, reinterpret_cast<int*>(managed), 7);
  CHECK(cudaStreamQuery(nullptr) == cudaErrorNotReady && managed[0] == 0);
  while (cudaStreamQuery(nullptr) == cudaErrorNotReady) continue;
  CHECK(managed[0] != 0);
  setenv("NEEDLE_SIM_STREAMS", "eager", 1);
  cudaEventDestroy(start);
  cudaEventDestroy(end);
  cudaFree(rows);
  cudaFree(managed);
  cudaFreeHost(pinned);
  CHECK(cudaDeviceReset() == cudaSuccess);
}

__global__ void wait_kernel(int rounds) {
  for (int i = 0; i < rounds; ++i) __syncthreads();
}

__global__ void shuffle_kernel(int rounds, int* out) {
  int value = threadIdx.x;
  for (int i = 0; i < rounds; ++i) value = __shfl_xor_sync(0xffffffffu, value, 1);
  out[threadIdx.x] = value;
}

template <class F>
double best_ns(F&& run) {
  double best = HUGE_VAL;
  for (int repeat = 0; repeat < 5; ++repeat) {
    const auto start = std::chrono::steady_clock::now();
    run();
    const std::chrono::duration<double, std::nano> spent = std::chrono::steady_clock::now() - start;
    best = std::fmin(best, spent.count());
  }
  return best;
}

// Printed, not checked: figures for the documentation.
void costs() {
  Buffer<int> out(1024);
  for (unsigned threads : {32u, 256u, 1024u}) {
    const int rounds = 200000 / int(threads);
    const double barrier_ns = best_ns([&] { launch<wait_kernel>({1, threads}, rounds); });
    const double shuffle_ns =
        best_ns([&] { launch<shuffle_kernel>({1, threads}, rounds, out.get()); });
    std::printf("block of %u: __syncthreads %.1f ns per thread, shuffle %.1f ns per thread\n",
                threads, barrier_ns / rounds / threads, shuffle_ns / rounds / threads);
  }
  const double launches_ns = best_ns([&] {
    for (int i = 0; i < 1000; ++i) launch<wait_kernel>({1, 1}, 0);
  });
  std::printf("launch: %.2f us\n", launches_ns / 1000 / 1000);
}

}  // namespace

int main() {
  launches_from_threads();
  launches_after_fork();
  faults_among_workers();
  lazy_faults();
  lazy_queries();
  refused_memory();
  refused_copies();
  host_functions();
  costs();
  std::puts("ok");
}
