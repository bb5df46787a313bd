// The CUDA backend's device as host code sees it; kept by ndarray_backend_cuda.cc.
#pragma once

#include <mutex>

#include "backend.h"
#include "cuda_api.h"
#include "ids.h"

namespace needle::NEEDLE_DEVICE {

cudaStream_t stream();  // all work of this backend runs in order on this stream
int multiprocessors();  // how many the device has
// 75 is 7.5. Of the code that the device runs, which may be older than the device: where the
// kernels were compiled for no later one, the driver compiles their PTX.
int code_capability();
cudaError_t ask_code_capability(int& capability);  // the error says that it runs none
// Memory of the backend's own, for partial results inside one operation, which holds the right to
// it until all its kernels are launched: the next operation, perhaps of another host thread, may
// overwrite it then, which stream order makes safe. Throws when more than scratch_bytes() are
// asked. Needle's own kernels keep to kScratchBytes, so that their sums are split alike on every
// GPU.
constexpr int64_t kScratchBytes = int64_t(8) << 20;
int64_t scratch_bytes();  // 32 MiB from compute capability 9 on, as cuBLAS advises, else 8
struct Scratch {
  void* memory = nullptr;
  std::unique_lock<std::mutex> right;
};
Scratch scratch(int64_t bytes);
int64_t max_shared_bytes();  // dynamic shared memory that a block may have after opting in
void copy_on_device(void* to, const void* from, int64_t bytes);  // stream-ordered

// An id outside its range, found by a kernel: the first one of a host thread's kernels is kept, and
// raised as IndexError at that thread's next sync.
struct ErrorFlag {
  int code;  // a BadId, which atomicCAS does not take
  int64_t value, position, limit;
};
ErrorFlag* error_flag();  // the calling thread's

}  // namespace needle::NEEDLE_DEVICE
