// cuBLASLt's matrices are in columns, needle's in rows: out = a @ b in rows is out^T = b^T @ a^T in
// columns, over the same memory, so a and b change places and nothing is copied.
//
// A product is prepared (descriptors, layouts, the algorithm that the library advises) once for
// each shape and alignment, and kept.
#include "cublaslt.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>

#include "cublaslt_api.h"
#include "cuda_device.h"

namespace needle::NEEDLE_DEVICE {
namespace {

using namespace cublaslt;

constexpr size_t kMostPrepared = 4096;      // shapes of a long run; then they are found again
constexpr int64_t kMostBatches = 65535;     // beyond it the library's kernels differ
constexpr int64_t kLargestAlignment = 256;  // that any algorithm asks for

struct Library {
  void* shared_object = nullptr;
  std::string path;
#define NEEDLE_DECLARE(name, arguments) int(*name) arguments = nullptr;
  NEEDLE_CUBLASLT_FUNCTIONS(NEEDLE_DECLARE)
#undef NEEDLE_DECLARE
  size_t (*GetVersion)() = nullptr;
  const char* (*GetStatusString)(int) = nullptr;

  explicit Library(const std::string& path_) : path(path_) {
    shared_object = dlopen(path.c_str(), RTLD_LAZY | RTLD_LOCAL);
    if (shared_object == nullptr) throw CudaError(std::string("[cublasLt] ") + dlerror());
#define NEEDLE_FIND(name, arguments) find(name, "cublasLt" #name);
    NEEDLE_CUBLASLT_FUNCTIONS(NEEDLE_FIND)
#undef NEEDLE_FIND
    find(GetVersion, "cublasLtGetVersion");
    find(GetStatusString, "cublasLtGetStatusString");
  }

  void check(int status, const char* what) const {
    if (status == kSuccess) return;
    const std::string text = std::string("[") + what + "] " + GetStatusString(status) + " (" +
                             path + "; NEEDLE_CUBLASLT=0 does without it)";
    if (status == kAllocFailed) throw CudaOutOfMemory(text);
    throw CudaError(text);
  }
  // Of a call that may need memory of the device beside needle's.
  template <class F>
  int status_of(F call) const {
    const int status = call();
    return status == kAllocFailed && give_back_memory() ? call() : status;
  }

 private:
  template <class F>
  void find(F& function, const char* name) const {
    function = reinterpret_cast<F>(dlsym(shared_object, name));
    if (function == nullptr) throw CudaError("[cublasLt] " + path + " has no function " + name);
  }
};

using Alignments = std::array<int64_t, 3>;  // of a, b and out, in bytes

int data_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return kReal32;
    case DType::kFloat64:
      return kReal64;
    case DType::kFloat16:
      return kReal16;
    case DType::kBFloat16:
      return kRealBfloat16;
    default:
      return -1;
  }
}

template <class T>
using Owned = std::unique_ptr<T, int (*)(T*)>;

// Three ways to say that the library has none for this product on this GPU.
bool refuses(int status) {
  return status == kNotSupported || status == kArchMismatch || status == kInvalidValue;
}

// A product but for its addresses.
class Prepared {
 public:
  Prepared(const Library& lt, Handle* handle, const Gemm& g, const Alignments& alignment)
      : lt_(lt),
        desc_(nullptr, lt.MatmulDescDestroy),
        a_(layout(data_type(g.dtype), g.k, g.m, g.a, g.batches)),
        b_(layout(data_type(g.dtype), g.n, g.k, g.b, g.batches)),
        out_(
            layout(data_type(g.out_dtype), g.n, g.m, {nullptr, g.n, false, g.m * g.n}, g.batches)) {
    const bool wide = g.dtype == DType::kFloat64;
    MatmulDesc* desc = nullptr;
    lt.check(lt.MatmulDescCreate(&desc, wide ? kCompute64 : kCompute32, wide ? kReal64 : kReal32),
             "cublasLtMatmulDescCreate");
    desc_.reset(desc);
    const auto transpose = [&](int which, bool transposed) {
      const int32_t value = transposed ? kTransposed : kPlain;
      lt.check(lt.MatmulDescSetAttribute(desc, which, &value, sizeof value),
               "cublasLtMatmulDescSetAttribute");
    };
    transpose(kDescTransA, g.b.transposed);
    transpose(kDescTransB, g.a.transposed);
    ask_for_algorithm(handle, alignment);
  }

  // Whether the library has a way to do it.
  bool found() const { return found_; }

  // Whether it was done. What was advised may be refused only now; then nothing has begun.
  bool run(Handle* handle, const Gemm& g) {
    const auto multiply = [&](const auto one) {
      const auto alpha = one, beta = g.accumulate ? one : one - one;
      Scratch held;
      if (workspace_bytes_ > 0) held = scratch(int64_t(workspace_bytes_));
      const auto call = [&] {
        return lt_.Matmul(handle, desc_.get(), &alpha, g.b.data, b_.get(), g.a.data, a_.get(),
                          &beta, g.out, out_.get(), g.out, out_.get(), &algorithm_, held.memory,
                          workspace_bytes_, stream());
      };
      const int status = lt_.status_of(call);
      if (!refuses(status)) lt_.check(status, "cublasLtMatmul");
      if (status != kSuccess) found_ = false;
      return status == kSuccess;
    };
    return g.dtype == DType::kFloat64 ? multiply(1.0) : multiply(1.0f);
  }

 private:
  // Of `outer` rows with `inner` elements, or the other way round where it is transposed.
  Owned<Layout> layout(int type, int64_t inner, int64_t outer, const GemmOperand& x,
                       int64_t batches) const {
    if (x.transposed) std::swap(inner, outer);
    Layout* made = nullptr;
    lt_.check(lt_.MatrixLayoutCreate(&made, type, uint64_t(inner), uint64_t(outer), x.ld),
              "cublasLtMatrixLayoutCreate");
    Owned<Layout> owned(made, lt_.MatrixLayoutDestroy);
    const int32_t count = int32_t(batches);
    lt_.check(lt_.MatrixLayoutSetAttribute(made, kLayoutBatchCount, &count, sizeof count),
              "cublasLtMatrixLayoutSetAttribute");
    lt_.check(lt_.MatrixLayoutSetAttribute(made, kLayoutBatchStride, &x.batch_stride,
                                           sizeof x.batch_stride),
              "cublasLtMatrixLayoutSetAttribute");
    return owned;
  }

  void ask_for_algorithm(Handle* handle, const Alignments& alignment) {
    Preference* made = nullptr;
    lt_.check(lt_.MatmulPreferenceCreate(&made), "cublasLtMatmulPreferenceCreate");
    const Owned<Preference> preference(made, lt_.MatmulPreferenceDestroy);
    const auto prefer = [&](int attribute, auto value) {
      lt_.check(lt_.MatmulPreferenceSetAttribute(made, attribute, &value, sizeof value),
                "cublasLtMatmulPreferenceSetAttribute");
    };
    prefer(kPreferenceWorkspaceBytes, size_t(scratch_bytes()));
    prefer(kPreferenceReductions, kReduceInComputeType);
    const int64_t of_operand[] = {alignment[1], alignment[0], alignment[2], alignment[2]};
    for (int i = 0; i < 4; ++i) prefer(kPreferenceAlignmentA + i, uint32_t(of_operand[i]));
    Heuristic advice{};
    int count = 0;
    const int status = lt_.MatmulAlgoGetHeuristic(handle, desc_.get(), b_.get(), a_.get(),
                                                  out_.get(), out_.get(), made, 1, &advice, &count);
    if (!refuses(status)) lt_.check(status, "cublasLtMatmulAlgoGetHeuristic");
    found_ = status == kSuccess && count == 1 && advice.status == kSuccess;
    algorithm_ = advice.algorithm;
    workspace_bytes_ = advice.workspace_bytes;
  }

  const Library& lt_;
  Owned<MatmulDesc> desc_;
  Owned<Layout> a_, b_, out_;
  Algorithm algorithm_{};
  size_t workspace_bytes_ = 0;
  std::atomic<bool> found_{false};
};

// A library that is open, with what was prepared by it.
struct Session {
  explicit Session(const std::string& path) : lt(path) {}

  std::shared_ptr<Prepared> prepared(const Gemm& g) {
    // Of every matrix of a batch.
    const auto aligned = [&](const void* first, DType dtype, int64_t batch_stride) {
      const auto bits = reinterpret_cast<uintptr_t>(first) |
                        uintptr_t(g.batches > 1 ? batch_stride * dtype_size(dtype) : 0) |
                        uintptr_t(kLargestAlignment);
      return int64_t(bits & -bits);
    };
    const Alignments alignment{aligned(g.a.data, g.dtype, g.a.batch_stride),
                               aligned(g.b.data, g.dtype, g.b.batch_stride),
                               aligned(g.out, g.out_dtype, g.m * g.n)};
    const Key key{int64_t(g.dtype),
                  int64_t(g.out_dtype),
                  g.m,
                  g.k,
                  g.n,
                  g.batches,
                  g.a.ld,
                  g.b.ld,
                  g.a.transposed,
                  g.b.transposed,
                  g.a.batch_stride,
                  g.b.batch_stride,
                  alignment[0],
                  alignment[1],
                  alignment[2]};
    stream();  // the library's handle is of the thread's GPU, and so is what it advises
    std::lock_guard<std::mutex> lock(mutex);
    if (handle == nullptr)
      lt.check(lt.status_of([&] { return lt.Create(&handle); }), "cublasLtCreate");
    const auto known = all.find(key);
    if (known != all.end()) return known->second;
    if (all.size() >= kMostPrepared) all.clear();
    return all[key] = std::make_shared<Prepared>(lt, handle, g, alignment);
  }

  const Library lt;
  Handle* handle = nullptr;

 private:
  using Key = std::array<int64_t, 15>;
  std::mutex mutex;
  std::map<Key, std::shared_ptr<Prepared>> all;
};

std::atomic<Session*> session{nullptr};  // the one in use

// Kept once it is open: another thread may be inside.
Session* session_of(const std::string& path) {
  static std::mutex mutex;
  static auto* const opened = new std::map<std::string, std::unique_ptr<Session>>;
  std::lock_guard<std::mutex> lock(mutex);
  auto& kept = (*opened)[path];
  if (kept == nullptr) kept = std::make_unique<Session>(path);
  return kept.get();
}

}  // namespace

void use_cublaslt(const std::string& path) { session = path.empty() ? nullptr : session_of(path); }

std::pair<std::string, size_t> cublaslt_in_use() {
  const Session* const s = session;
  if (s == nullptr) return {"", 0};
  return {s->lt.path, s->lt.GetVersion()};
}

bool multiply_by_cublaslt(const Gemm& g) {
  Session* const s = session;
  if (s == nullptr || g.k == 0 || g.batches > kMostBatches || data_type(g.dtype) < 0 ||
      g.a.batch_stride < 0 || g.b.batch_stride < 0)
    return false;
  const auto prepared = s->prepared(g);
  if (!prepared->found() || !prepared->run(s->handle, g)) return false;
  static KernelRecord& record = register_name("cublaslt_matmul");
  ++record.launches;
  return true;
}

}  // namespace needle::NEEDLE_DEVICE
