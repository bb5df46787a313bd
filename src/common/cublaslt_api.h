// What needle calls of cublasLt.h, declared here so that no header is needed to build;
// tests/cuda_sim/cublaslt_header.cc compares the two. Matrices are in columns there.
#pragma once

#include <cstddef>
#include <cstdint>

namespace needle::cublaslt {

struct Handle;      // cublasLtHandle_t is a pointer to it, and so on
struct MatmulDesc;  // what is computed
struct Layout;      // of one matrix, or a batch
struct Preference;  // what an algorithm may ask for

struct Algorithm {
  uint64_t data[8];
};
struct Heuristic {
  Algorithm algorithm;
  size_t workspace_bytes;
  int status;
  float waves;
  int reserved[4];
};

// cublasStatus_t, cudaDataType, cublasComputeType_t and cublasOperation_t
enum : int {
  kSuccess = 0,
  kAllocFailed = 3,
  kInvalidValue = 7,
  kArchMismatch = 8,
  kNotSupported = 15
};
enum : int { kReal32 = 0, kReal64 = 1, kReal16 = 2, kRealBfloat16 = 14 };
enum : int { kCompute32 = 68, kCompute64 = 70 };
enum : int { kPlain = 0, kTransposed = 1 };

// Attributes, with the type of their values.
enum : int { kDescTransA = 3, kDescTransB = 4 };               // int32_t
enum : int { kLayoutBatchCount = 5, kLayoutBatchStride = 6 };  // int32_t; int64_t, in elements
enum : int {
  kPreferenceWorkspaceBytes = 1,  // size_t: at most
  kPreferenceReductions = 3,      // uint32_t: of the parts of a long k, a mask
  kPreferenceAlignmentA = 5,      // uint32_t, in bytes; 6, 7 and 8 for B, C and D
};
constexpr uint32_t kReduceInComputeType = 2;

// Every function with a status, by its name without "cublasLt".
#define NEEDLE_CUBLASLT_FUNCTIONS(F)                                                               \
  F(Create, (Handle**))                                                                            \
  F(MatmulDescCreate, (MatmulDesc**, int compute_type, int scale_type))                            \
  F(MatmulDescSetAttribute, (MatmulDesc*, int attribute, const void* value, size_t bytes))         \
  F(MatmulDescDestroy, (MatmulDesc*))                                                              \
  F(MatrixLayoutCreate, (Layout**, int type, uint64_t rows, uint64_t cols, int64_t ld))            \
  F(MatrixLayoutSetAttribute, (Layout*, int attribute, const void* value, size_t bytes))           \
  F(MatrixLayoutDestroy, (Layout*))                                                                \
  F(MatmulPreferenceCreate, (Preference**))                                                        \
  F(MatmulPreferenceSetAttribute, (Preference*, int attribute, const void* value, size_t bytes))   \
  F(MatmulPreferenceDestroy, (Preference*))                                                        \
  F(MatmulAlgoGetHeuristic, (Handle*, MatmulDesc*, Layout * a, Layout * b, Layout * c, Layout * d, \
                             Preference*, int asked, Heuristic*, int* found))                      \
  F(Matmul, (Handle*, MatmulDesc*, const void* alpha, const void* a, Layout*, const void* b,       \
             Layout*, const void* beta, const void* c, Layout*, void* d, Layout*,                  \
             const Algorithm*, void* workspace, size_t workspace_bytes, void* stream))

}  // namespace needle::cublaslt
