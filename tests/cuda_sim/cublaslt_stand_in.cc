// Stands for libcublasLt where there is no GPU: the same functions by plain loops over host memory,
// refusing what the documentation says the library refuses. Reads its matrices in columns.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "cublaslt_api.h"
#include "dtype.h"

namespace needle::cublaslt {

constexpr int kNotInitialized = 1;

struct Handle {};
struct MatmulDesc {
  int compute, scale;
  int32_t trans_a = kPlain, trans_b = kPlain;
};
struct Layout {
  int type;
  int64_t rows, cols, ld;
  int32_t batches = 1;
  int64_t batch_stride = 0;

  int64_t bytes_of_item() const { return type == kReal64 ? 8 : type == kReal32 ? 4 : 2; }
  double get(const void* data, int64_t at) const {
    switch (type) {
      case kReal64:
        return static_cast<const double*>(data)[at];
      case kReal32:
        return static_cast<const float*>(data)[at];
      case kReal16:
        return float(static_cast<const float16*>(data)[at]);
      default:
        return float(static_cast<const bfloat16*>(data)[at]);
    }
  }
  void set(void* data, int64_t at, double value) const {
    switch (type) {
      case kReal64:
        static_cast<double*>(data)[at] = value;
        break;
      case kReal32:
        static_cast<float*>(data)[at] = float(value);
        break;
      case kReal16:
        static_cast<float16*>(data)[at] = float16(float(value));
        break;
      default:
        static_cast<bfloat16*>(data)[at] = bfloat16(float(value));
    }
  }
};
struct Preference {
  size_t workspace_bytes = 0;
  uint32_t reductions = 7;
  uint32_t alignment[4] = {256, 256, 256, 256};
};

template <class T>
int take(T& attribute, const void* value, size_t bytes) {
  if (bytes != sizeof(T)) return kInvalidValue;
  std::memcpy(&attribute, value, bytes);
  return kSuccess;
}

template <class T>
int destroy(T* made) {
  delete made;
  return kSuccess;
}

// (m, k) @ (k, n) of the descriptors, or why not.
struct Shapes {
  int64_t m, n, k;
  int status = kSuccess;

  Shapes(const MatmulDesc& desc, const Layout& a, const Layout& b, const Layout& c,
         const Layout& d) {
    const bool ta = desc.trans_a == kTransposed, tb = desc.trans_b == kTransposed;
    m = ta ? a.cols : a.rows, k = ta ? a.rows : a.cols, n = tb ? b.rows : b.cols;
    const bool fit = (tb ? b.cols : b.rows) == k && d.rows == m && d.cols == n && c.rows == m &&
                     c.cols == n && c.type == d.type;
    bool batches_fit = true;
    for (const Layout* l : {&a, &b, &c, &d}) batches_fit = batches_fit && l->batches == d.batches;
    const bool wide = a.type == kReal64;
    const bool types = a.type == b.type && desc.compute == (wide ? kCompute64 : kCompute32) &&
                       desc.scale == (wide ? kReal64 : kReal32) &&
                       (d.type == a.type || (d.type == kReal32 && !wide));
    if (!fit || !batches_fit)
      status = kInvalidValue;
    else if (!types)
      status = kNotSupported;
  }
};

}  // namespace needle::cublaslt

using namespace needle::cublaslt;

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED size_t cublasLtGetVersion() { return 130000; }
EXPORTED const char* cublasLtGetStatusString(int status) {
  static thread_local char text[32];
  std::snprintf(text, sizeof text, "stand-in status %d", status);
  return text;
}

EXPORTED int cublasLtCreate(Handle** made) {
  if (std::getenv("CUBLASLT_STAND_IN_FAILS") != nullptr) return kNotInitialized;
  *made = new Handle;
  return kSuccess;
}

EXPORTED int cublasLtMatmulDescCreate(MatmulDesc** made, int compute, int scale) {
  *made = new MatmulDesc{compute, scale};
  return kSuccess;
}
EXPORTED int cublasLtMatmulDescSetAttribute(MatmulDesc* desc, int attribute, const void* value,
                                            size_t bytes) {
  if (attribute == kDescTransA) return take(desc->trans_a, value, bytes);
  if (attribute == kDescTransB) return take(desc->trans_b, value, bytes);
  return kInvalidValue;
}
EXPORTED int cublasLtMatmulDescDestroy(MatmulDesc* desc) { return destroy(desc); }

EXPORTED int cublasLtMatrixLayoutCreate(Layout** made, int type, uint64_t rows, uint64_t cols,
                                        int64_t ld) {
  if (rows == 0 || cols == 0 || ld < int64_t(rows)) return kInvalidValue;
  *made = new Layout{type, int64_t(rows), int64_t(cols), ld};
  return kSuccess;
}
EXPORTED int cublasLtMatrixLayoutSetAttribute(Layout* layout, int attribute, const void* value,
                                              size_t bytes) {
  if (attribute == kLayoutBatchCount) return take(layout->batches, value, bytes);
  if (attribute == kLayoutBatchStride) return take(layout->batch_stride, value, bytes);
  return kInvalidValue;
}
EXPORTED int cublasLtMatrixLayoutDestroy(Layout* layout) { return destroy(layout); }

EXPORTED int cublasLtMatmulPreferenceCreate(Preference** made) {
  *made = new Preference;
  return kSuccess;
}
EXPORTED int cublasLtMatmulPreferenceSetAttribute(Preference* preference, int attribute,
                                                  const void* value, size_t bytes) {
  if (attribute == kPreferenceWorkspaceBytes)
    return take(preference->workspace_bytes, value, bytes);
  if (attribute == kPreferenceReductions) return take(preference->reductions, value, bytes);
  if (attribute < kPreferenceAlignmentA || attribute > kPreferenceAlignmentA + 3)
    return kInvalidValue;
  return take(preference->alignment[attribute - kPreferenceAlignmentA], value, bytes);
}
EXPORTED int cublasLtMatmulPreferenceDestroy(Preference* preference) { return destroy(preference); }

// The algorithm keeps what it was advised for: the alignments, and a workspace that it needs where
// k is long. Products of a single column have none.
EXPORTED int cublasLtMatmulAlgoGetHeuristic(Handle*, MatmulDesc* desc, Layout* a, Layout* b,
                                            Layout* c, Layout* d, Preference* preference, int asked,
                                            Heuristic* advice, int* found) {
  const Shapes shapes(*desc, *a, *b, *c, *d);
  if (shapes.status != kSuccess) return shapes.status;
  if (asked < 1 || preference->reductions != kReduceInComputeType) return kInvalidValue;
  *found = 0;
  if (shapes.n == 1) return kNotSupported;
  for (int i = 0; i < 4; ++i) advice->algorithm.data[i] = preference->alignment[i];
  advice->workspace_bytes = shapes.k > 64 ? preference->workspace_bytes : 0;
  advice->algorithm.data[4] = advice->workspace_bytes;
  advice->status = kSuccess;
  *found = 1;
  return kSuccess;
}

// The first so many products find no memory.
static bool refuses() {
  static int so_far = 0;
  const char* const times = std::getenv("CUBLASLT_STAND_IN_REFUSES");
  return times != nullptr && so_far++ < std::atoi(times);
}
// All products are declined, whatever was advised.
static bool declines() { return std::getenv("CUBLASLT_STAND_IN_DECLINES") != nullptr; }

EXPORTED int cublasLtMatmul(Handle* handle, MatmulDesc* desc, const void* alpha, const void* a,
                            Layout* a_layout, const void* b, Layout* b_layout, const void* beta,
                            const void* c, Layout* c_layout, void* d, Layout* d_layout,
                            const Algorithm* algorithm, void* workspace, size_t workspace_bytes,
                            void*) {
  if (handle == nullptr) return kNotInitialized;
  if (refuses()) return kAllocFailed;
  if (declines()) return kNotSupported;
  const Shapes shapes(*desc, *a_layout, *b_layout, *c_layout, *d_layout);
  if (shapes.status != kSuccess) return shapes.status;
  const void* const addresses[] = {a, b, c, d};
  const Layout* const layouts[] = {a_layout, b_layout, c_layout, d_layout};
  for (int i = 0; i < 4; ++i) {
    const int64_t apart =
        layouts[i]->batches > 1 ? layouts[i]->batch_stride * layouts[i]->bytes_of_item() : 0;
    if (reinterpret_cast<uintptr_t>(addresses[i]) % algorithm->data[i] != 0 ||
        apart % int64_t(algorithm->data[i]) != 0)
      return kInvalidValue;
  }
  if (workspace_bytes < algorithm->data[4] || (workspace_bytes > 0 && workspace == nullptr))
    return kInvalidValue;
  if (workspace_bytes > 0) std::memset(workspace, 0xff, workspace_bytes);
  const bool wide = desc->scale == kReal64;
  const double scale =
      wide ? *static_cast<const double*>(alpha) : *static_cast<const float*>(alpha);
  const double keep = wide ? *static_cast<const double*>(beta) : *static_cast<const float*>(beta);
  const bool ta = desc->trans_a == kTransposed, tb = desc->trans_b == kTransposed;
  for (int64_t batch = 0; batch < d_layout->batches; ++batch) {
    const int64_t a0 = batch * a_layout->batch_stride, b0 = batch * b_layout->batch_stride;
    const int64_t c0 = batch * c_layout->batch_stride, d0 = batch * d_layout->batch_stride;
    for (int64_t row = 0; row < shapes.m; ++row) {
      for (int64_t col = 0; col < shapes.n; ++col) {
        double sum = 0;
        for (int64_t i = 0; i < shapes.k; ++i)
          sum += a_layout->get(a, a0 + (ta ? i + row * a_layout->ld : row + i * a_layout->ld)) *
                 b_layout->get(b, b0 + (tb ? col + i * b_layout->ld : i + col * b_layout->ld));
        double value = scale * sum;
        if (keep != 0) value += keep * c_layout->get(c, c0 + row + col * c_layout->ld);
        d_layout->set(d, d0 + row + col * d_layout->ld, value);
      }
    }
  }
  return kSuccess;
}
