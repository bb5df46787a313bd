// Products by NVIDIA's cuBLASLt, opened at run time: nothing is linked, and where the library is
// absent or has no way to do a product, matmul_cuda.cu does it.
#pragma once

#include <string>
#include <utility>

#include "dtype.h"

namespace needle::NEEDLE_DEVICE {

// A matrix of each batch, its rows `ld` elements apart, which is no less than a row has;
// `transposed`: used the other way round.
struct GemmOperand {
  const void* data;
  int64_t ld;
  bool transposed;
  int64_t batch_stride;  // 0: one matrix for all
};

// out (batches, m, n; contiguous) = or += op(a) (m, k) @ op(b) (k, n).
struct Gemm {
  DType dtype;  // of a and b
  GemmOperand a, b;
  void* out;
  DType out_dtype;
  int64_t m, k, n, batches;
  bool accumulate;
};

// Opens the library at `path` for all products from now on; "": none. Throws CudaError, leaving
// things as they were.
void use_cublaslt(const std::string& path);
// Its path and version (130000 for 13.0.0), or "" and 0.
std::pair<std::string, size_t> cublaslt_in_use();

// False where nothing was done.
bool multiply_by_cublaslt(const Gemm& gemm);

}  // namespace needle::NEEDLE_DEVICE
