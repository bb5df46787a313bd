// Compiles where cublaslt_api.h says the same as NVIDIA's header.
#include <cublasLt.h>

#include <array>
#include <type_traits>

#include "cublaslt_api.h"

namespace needle::cublaslt {

constexpr size_t size_if(size_t pointer, size_t size) { return pointer == 0 ? size : 1000; }

// What each argument is: a pointer, or a number of so many bytes.
template <class Result, class... Arguments>
constexpr std::array<size_t, sizeof...(Arguments)> kinds(Result (*)(Arguments...)) {
  static_assert(sizeof(Result) == sizeof(int), "a status");
  return {size_if(std::is_pointer<Arguments>::value, sizeof(Arguments))...};
}
template <size_t N, size_t M>
constexpr bool same(const std::array<size_t, N>& a, const std::array<size_t, M>& b) {
  if (N != M) return false;
  for (size_t i = 0; i < N; ++i)
    if (a[i] != b[i]) return false;
  return true;
}

#define NEEDLE_COMPARE(name, arguments)               \
  constexpr int(*declared##name) arguments = nullptr; \
  static_assert(same(kinds(declared##name), kinds(decltype (&cublasLt##name)(nullptr))), #name);
NEEDLE_CUBLASLT_FUNCTIONS(NEEDLE_COMPARE)

static_assert(std::is_same<decltype(&cublasLtGetVersion), size_t (*)()>::value, "");
static_assert(sizeof(Algorithm) == sizeof(cublasLtMatmulAlgo_t), "");
static_assert(sizeof(Heuristic) == sizeof(cublasLtMatmulHeuristicResult_t), "");
static_assert(offsetof(Heuristic, workspace_bytes) ==
                  offsetof(cublasLtMatmulHeuristicResult_t, workspaceSize),
              "");
static_assert(offsetof(Heuristic, status) == offsetof(cublasLtMatmulHeuristicResult_t, state), "");

#define NEEDLE_SAME(ours, theirs) static_assert(int(ours) == int(theirs), #theirs)
NEEDLE_SAME(kSuccess, CUBLAS_STATUS_SUCCESS);
NEEDLE_SAME(kAllocFailed, CUBLAS_STATUS_ALLOC_FAILED);
NEEDLE_SAME(kNotSupported, CUBLAS_STATUS_NOT_SUPPORTED);
NEEDLE_SAME(kReal32, CUDA_R_32F);
NEEDLE_SAME(kReal64, CUDA_R_64F);
NEEDLE_SAME(kReal16, CUDA_R_16F);
NEEDLE_SAME(kRealBfloat16, CUDA_R_16BF);
NEEDLE_SAME(kCompute32, CUBLAS_COMPUTE_32F);
NEEDLE_SAME(kCompute64, CUBLAS_COMPUTE_64F);
NEEDLE_SAME(kPlain, CUBLAS_OP_N);
NEEDLE_SAME(kTransposed, CUBLAS_OP_T);
NEEDLE_SAME(kDescTransA, CUBLASLT_MATMUL_DESC_TRANSA);
NEEDLE_SAME(kDescTransB, CUBLASLT_MATMUL_DESC_TRANSB);
NEEDLE_SAME(kLayoutBatchCount, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT);
NEEDLE_SAME(kLayoutBatchStride, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET);
NEEDLE_SAME(kPreferenceWorkspaceBytes, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES);
NEEDLE_SAME(kPreferenceReductions, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK);
NEEDLE_SAME(kPreferenceAlignmentA, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES);
NEEDLE_SAME(kPreferenceAlignmentA + 1, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES);
NEEDLE_SAME(kPreferenceAlignmentA + 2, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES);
NEEDLE_SAME(kPreferenceAlignmentA + 3, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES);
NEEDLE_SAME(kReduceInComputeType, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);

}  // namespace needle::cublaslt
