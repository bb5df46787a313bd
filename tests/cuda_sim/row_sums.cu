#include <cstdio>
#include <vector>

#include "launch.h"

using namespace needle;

// out[row] = the sum of x[row, :]. A block of two warps takes one row after the other.
__global__ void row_sums_kernel(const float* x, float* out, int rows, int cols) {
  NEEDLE_SHARED(float, part, 2);
  for (int row = blockIdx.x; row < rows; row += gridDim.x) {
    float sum = 0;
    for (int col = threadIdx.x; col < cols; col += blockDim.x) sum += x[row * cols + col];
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) out[row] = part[0] + part[1];
  }
}

int main() {
  const int rows = 6, cols = 100;
  std::vector<float> values(rows * cols), sums(rows);
  for (int i = 0; i < rows * cols; ++i) values[i] = float(i / cols + 1);
  float *x, *out;
  cudaMalloc(&x, values.size() * sizeof(float));
  cudaMalloc(&out, rows * sizeof(float));
  cudaMemcpy(x, values.data(), values.size() * sizeof(float), cudaMemcpyHostToDevice);
  try {
    launch<row_sums_kernel>({2, 64}, x, out, rows, cols);
    cudaMemcpy(sums.data(), out, rows * sizeof(float), cudaMemcpyDeviceToHost);
    for (float sum : sums) std::printf("%g ", sum);
    std::puts("");
  } catch (const CudaError& error) {
    std::puts(error.what());
  }
}
