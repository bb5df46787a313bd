// The CUDA backend's module: its device, stream and memory, the error flags, and everything of
// bindings.h. The same file compiled by a C++ compiler against cuda_sim/ is the module of the
// emulated device.
//
// Nothing touches the driver at import: a module built with CUDA imports on a machine without a
// GPU, where enabled() is false. All work goes to one stream in order, so memory can be reused as
// soon as it is freed. The stream is a blocking one: work that others put on the legacy default
// stream (DLPack) is ordered with it.
#include <pthread.h>

#include <atomic>
#include <cstring>
#include <utility>

#include "common/bindings.h"
#include "common/cublaslt.h"
#include "common/cuda_device.h"

namespace needle::NEEDLE_DEVICE {
namespace {

// CUDA cannot be used in the child of a process that has used it, if only to count GPUs; there a
// mutex of the Device may be another thread's for ever, too.
bool forked = false;
void watch_forks() {
  [[maybe_unused]] static const int once = pthread_atfork(nullptr, nullptr, [] { forked = true; });
}

int attribute_of(int gpu, cudaDeviceAttr which) {
  int value = 0;
  cuda_check(cudaDeviceGetAttribute(&value, which, gpu), "cudaDeviceGetAttribute");
  return value;
}

// Why the thread's current GPU, which would be the device, does not do: empty if it does.
std::string why_unusable() {
  int gpu = 0, capability = 0;
  cuda_check(cudaGetDevice(&gpu), "cudaGetDevice");
  const std::string name = "GPU " + std::to_string(gpu) + ": ";
  if (attribute_of(gpu, cudaDevAttrMemoryPoolsSupported) == 0)
    return name + "it has no memory pools (cudaMallocAsync)";
  // A GPU that is full has the code all the same.
  const cudaError_t error = ask_code_capability(capability);
  if (error == cudaSuccess) return "";
  cudaGetLastError();
  return error == cudaErrorMemoryAllocation ? "" : name + cudaGetErrorString(error);
}

// How many GPUs can be used, and CUDA's word for why there is none: no driver, or one too old, or a
// GPU for which this module has no code, is an answer, not an error to be found by the next launch.
std::pair<int, std::string> devices() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    cudaGetLastError();
    return {0, cudaGetErrorString(error)};
  }
  if (!NEEDLE_EMULATED) watch_forks();
  const std::string why = count > 0 ? why_unusable() : "";
  return {why.empty() ? count : 0, why};
}
int device_count() { return devices().first; }

// Pinned memory through which small host arrays are copied, so that from_numpy need not wait for
// the device.
class StagingRing {
 public:
  static constexpr int64_t kSlotBytes = int64_t(1) << 20;

  void copy(const void* from, void* to, int64_t bytes, cudaStream_t stream) {
    Slot& slot = slots_[next_];
    next_ = (next_ + 1) % kSlots;
    if (slot.copied == nullptr)
      cuda_check(cudaEventCreateWithFlags(&slot.copied, cudaEventDisableTiming), "cudaEventCreate");
    if (slot.memory == nullptr)
      cuda_check(cudaMallocHost(&slot.memory, size_t(kSlotBytes)), "cudaMallocHost");
    // At once where nothing has been recorded.
    cuda_check(cudaEventSynchronize(slot.copied), "cudaEventSynchronize");
    std::memcpy(slot.memory, from, size_t(bytes));
    cuda_check(cudaMemcpyAsync(to, slot.memory, size_t(bytes), cudaMemcpyHostToDevice, stream),
               "cudaMemcpyAsync");
    cuda_check(cudaEventRecord(slot.copied, stream), "cudaEventRecord");
  }

 private:
  static constexpr int kSlots = 4;
  struct Slot {
    void* memory = nullptr;
    cudaEvent_t copied = nullptr;
  };
  Slot slots_[kSlots];
  int next_ = 0;
};

// A thread beyond these shares the flag of an earlier one.
constexpr int kFlags = 64;
constexpr size_t kFlagBytes = kFlags * sizeof(ErrorFlag);

// Made when first needed, kept until the process ends: arrays may outlive the interpreter's
// modules.
struct Device {
  cudaStream_t stream = nullptr;
  cudaMemPool_t pool = nullptr;  // the driver's default one
  int id = 0, multiprocessors = 0, code_capability = 0;
  size_t total_bytes = 0;
  int64_t scratch_bytes = kScratchBytes;
  void* scratch = nullptr;
  ErrorFlag* flags = nullptr;       // on the device, one for each host thread
  ErrorFlag* flags_copy = nullptr;  // pinned, where a sync reads them
  ErrorFlag told[kFlags] = {};      // to another thread, which has waited first
  StagingRing staging;
  std::mutex mutex, scratch_mutex;  // the first: of staging, flags_copy and told

  Device() {
    if (device_count() == 0)
      throw CudaError("[" NEEDLE_STRING(NEEDLE_DEVICE) "] no CUDA device was found: " +
                      devices().second);
    cuda_check(cudaGetDevice(&id), "cudaGetDevice");
    multiprocessors = attribute(cudaDevAttrMultiProcessorCount);
    cuda_check(ask_code_capability(code_capability), "cudaFuncGetAttributes");
    if (attribute(cudaDevAttrComputeCapabilityMajor) >= 9) scratch_bytes = 4 * kScratchBytes;
    size_t free_bytes = 0;
    cuda_check(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo");
    try {
      take_memory(free_bytes);
    } catch (...) {  // it is tried again at the next use
      cudaFreeHost(flags_copy), cudaFree(flags), cudaFree(scratch);
      if (stream != nullptr) cudaStreamDestroy(stream);
      cudaGetLastError();
      throw;
    }
    if (NEEDLE_EMULATED) hold_across_fork();
  }

  void take_memory(size_t free_bytes) {
    cuda_check(cudaStreamCreate(&stream), "cudaStreamCreate");
    // Freed memory stays with the driver's pool across syncs; empty_cache() gives it back.
    uint64_t keep_all = UINT64_MAX;
    cuda_check(cudaDeviceGetDefaultMemPool(&pool, id), "cudaDeviceGetDefaultMemPool");
    cuda_check(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep_all),
               "cudaMemPoolSetAttribute");
    // Before any array: afterwards there may be no room, and what needs it is no array's maker.
    const cudaError_t error = cudaMalloc(&scratch, size_t(scratch_bytes));
    if (error == cudaErrorMemoryAllocation)
      throw CudaOutOfMemory("out of memory: the first use takes " +
                            std::to_string(scratch_bytes >> 20) + " MiB for kernels; " +
                            std::to_string(free_bytes >> 20) + " of " +
                            std::to_string(total_bytes >> 20) + " MiB are free");
    cuda_check(error, "cudaMalloc");
    cuda_check(cudaMalloc(&flags, kFlagBytes), "cudaMalloc");
    cuda_check(cudaMemsetAsync(flags, 0, kFlagBytes, stream), "cudaMemsetAsync");
    void* pinned = nullptr;
    cuda_check(cudaMallocHost(&pinned, kFlagBytes), "cudaMallocHost");
    flags_copy = static_cast<ErrorFlag*>(pinned);
  }

  // Where a child would wait for ever for a mutex that another thread held. What is registered
  // later is held first, and a launch that has the right to scratch memory may want the
  // allocator's mutex: that one is registered before.
  void hold_across_fork() {
    allocator();
    static Device* const only = this;
    const auto unlock = [] {
      only->mutex.unlock();
      only->scratch_mutex.unlock();
    };
    pthread_atfork([] { std::lock(only->mutex, only->scratch_mutex); }, unlock, unlock);
  }

  int attribute(cudaDeviceAttr which) const { return attribute_of(id, which); }
};

Device& device_in_use() {
  static Device* const instance = new Device;
  return *instance;
}

// The same, made the calling thread's too, on which its kernels are launched: a thread of the host
// begins with the first GPU, and others (torch.cuda.set_device) may have chosen another since.
// Where that fails, so does the call that follows.
Device& device() {
  if (forked)
    throw CudaError(
        "[cuda] this process was forked from one that used the GPU (accepted: multiprocessing's "
        "\"spawn\" or \"forkserver\")");
  Device& d = device_in_use();
  int chosen = -1;
  if (cudaGetDevice(&chosen) != cudaSuccess || chosen != d.id) cudaSetDevice(d.id);
  return d;
}

// Memory in the order of the stream: freeing waits for nothing, and what is freed serves the work
// that comes after.
class DeviceMemory : public MemorySource {
 public:
  void* allocate(int64_t bytes) override {
    // Which error the driver has for more than the card can hold is not said anywhere.
    if (size_t(bytes) > device().total_bytes) return nullptr;
    void* ptr = nullptr;
    const cudaError_t error = cudaMallocAsync(&ptr, size_t(bytes), device().stream);
    if (error == cudaSuccess) return ptr;
    if (error != cudaErrorMemoryAllocation) cuda_check(error, "cudaMallocAsync");
    cudaGetLastError();  // answered by what it returns, not by the next launch
    return nullptr;
  }
  void release(void* ptr, int64_t) override {
    if (forked) return;  // the memory is the parent's
    // In any thread, perhaps one of another library that works on another GPU. It fails only when
    // the driver is already shutting down.
    cudaFreeAsync(ptr, device_in_use().stream);
  }
  void trim() override {
    // Not for needle's stream alone: another library's may still read what was shared with it.
    const Device& d = device();
    cuda_check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    cuda_check(cudaMemPoolTrimTo(d.pool, 0), "cudaMemPoolTrimTo");
  }
};

}  // namespace

cudaStream_t stream() { return device().stream; }
// Needed for every launch, so they are asked once; the emulated device may change them at run time.
int multiprocessors() {
  return NEEDLE_EMULATED ? device().attribute(cudaDevAttrMultiProcessorCount)
                         : device().multiprocessors;
}
int code_capability() {
  int capability = device().code_capability;
  if (NEEDLE_EMULATED) cuda_check(ask_code_capability(capability), "cudaFuncGetAttributes");
  return capability;
}
// Asked each time, which costs nothing to speak of.
int64_t max_shared_bytes() { return device().attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin); }

namespace {

int own_flag() {
  static std::atomic<unsigned> threads{0};
  thread_local const unsigned number = threads++;
  return int(number % kFlags);
}

}  // namespace

ErrorFlag* error_flag() { return device().flags + own_flag(); }

int64_t scratch_bytes() { return device().scratch_bytes; }

Scratch scratch(int64_t bytes) {
  Device& d = device();
  if (bytes > d.scratch_bytes) throw std::logic_error("more scratch memory asked than there is");
  Scratch held{d.scratch, std::unique_lock<std::mutex>(d.scratch_mutex)};
#if NEEDLE_EMULATED
  cuda_sim_narrow(d.scratch, size_t(bytes), size_t(d.scratch_bytes), stream());
#endif
  return held;
}

void copy_on_device(void* to, const void* from, int64_t bytes) {
  if (to == from) return;  // x[:] = x, and CUDA's areas may not overlap
  cuda_check(cudaMemcpyAsync(to, from, size_t(bytes), cudaMemcpyDeviceToDevice, stream()),
             "cudaMemcpyAsync");
}

Allocator& allocator() {
  // Never destroyed: arrays may outlive statics.
  static auto* const instance = new Allocator(*new DeviceMemory, Caching::kBlocks);
  return *instance;
}

DLDevice dlpack_device() {
  if (NEEDLE_EMULATED) return {kDLCPU, 0};  // its memory is the host's
  return {kDLCUDA, device().id};
}

// Throws for a bad id of the calling thread's kernels. One of another thread's is thrown by who
// waits first, too: that thread may have handed its arrays on, to be read here, and never wait.
void sync() {
  Device& d = device();
  const int own = own_flag();
  ErrorFlag found{};
  {
    std::lock_guard<std::mutex> lock(d.mutex);
    cuda_check(cudaMemcpyAsync(d.flags_copy, d.flags, kFlagBytes, cudaMemcpyDeviceToHost, d.stream),
               "cudaMemcpyAsync");
    cuda_check(cudaStreamSynchronize(d.stream), "sync");
    const auto take = [&](int i) {
      found = d.flags_copy[i];
      if (found.code != int(BadId::none))
        cuda_check(cudaMemsetAsync(d.flags + i, 0, sizeof(ErrorFlag), d.stream), "sync");
      return found.code != int(BadId::none);
    };
    const ErrorFlag told = std::exchange(d.told[own], ErrorFlag{});
    if (!take(own)) found = told;
    for (int i = 0; found.code == int(BadId::none) && i < kFlags; ++i)
      if (take(i)) d.told[i] = found;
  }
  if (found.code != int(BadId::none))
    throw std::out_of_range(
        bad_id_text(BadId(found.code), found.value, found.position, found.limit));
}

void copy_to_host(const Array& from, void* to) {
  cuda_check(
      cudaMemcpyAsync(to, from.ptr(), size_t(from.nbytes()), cudaMemcpyDeviceToHost, stream()),
      "cudaMemcpyAsync");
  sync();
}

void copy_from_host(const void* from, const Array& to) {
  Device& d = device();
  if (to.nbytes() <= StagingRing::kSlotBytes) {
    std::lock_guard<std::mutex> lock(d.mutex);
    d.staging.copy(from, to.ptr(), to.nbytes(), d.stream);
    return;
  }
  cuda_check(cudaMemcpyAsync(to.ptr(), from, size_t(to.nbytes()), cudaMemcpyHostToDevice, d.stream),
             "cudaMemcpyAsync");
  cuda_check(cudaStreamSynchronize(d.stream), "copy_from_host");
}

namespace {

py::dict device_properties() {
  cudaDeviceProp p;
  size_t free_bytes = 0, total_bytes = 0;
  cuda_check(cudaGetDeviceProperties(&p, device().id), "cudaGetDeviceProperties");
  cuda_check(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo");
  uint64_t pool_bytes = 0;
  cuda_check(cudaMemPoolGetAttribute(device().pool, cudaMemPoolAttrReservedMemCurrent, &pool_bytes),
             "cudaMemPoolGetAttribute");
  py::dict d;
  d["name"] = std::string(p.name);
  d["compute_capability"] = py::make_tuple(p.major, p.minor);
  d["multiprocessors"] = p.multiProcessorCount;
  d["total_bytes"] = total_bytes;
  d["free_bytes"] = free_bytes;
  d["pool_bytes"] = pool_bytes;  // of the driver's pool, from which arrays are, used or not
  d["shared_bytes_per_block"] = p.sharedMemPerBlock;
  d["shared_bytes_per_block_optin"] = p.sharedMemPerBlockOptin;
  d["warp_size"] = p.warpSize;
  return d;
}

// CudaError becomes the package's KernelError; one of memory becomes OutOfMemory, of which
// bind_memory, called before, makes OutOfMemoryError.
void bind_cuda_errors(py::module_& m) {
  static PyObject* const error_class = package_error(m, "KernelError", PyExc_RuntimeError);
  py::register_local_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const CudaOutOfMemory& e) {
      throw OutOfMemory(e.what(), allocator().stats());
    } catch (const CudaError& e) {
      PyErr_SetString(error_class, e.what());
    }
  });
}

}  // namespace
}  // namespace needle::NEEDLE_DEVICE

PYBIND11_MODULE(NEEDLE_MODULE, m) {
  using namespace needle::NEEDLE_DEVICE;
  bind_backend(m);
  bind_cuda_errors(m);
  needle::memory_keeper() = [] { allocator().empty_cache(); };
  m.def("device_count", &device_count);
  m.def("why_absent", [] { return devices().second; });
  m.def("device_properties", &device_properties);
  m.def("launch_counts", [] {
    py::dict counts;
    for (const auto& [name, count] : needle::launch_counts())
      counts[py::str(name)] = count.launches;
    return counts;
  });
  // Kernel name -> (blocks of its largest grid, threads of its largest block).
  m.def("launch_extents", [] {
    py::dict extents;
    for (const auto& [name, count] : needle::launch_counts())
      extents[py::str(name)] = py::make_tuple(count.blocks, count.threads);
    return extents;
  });
  m.def("reset_launch_counts", &needle::reset_launch_counts);
  m.attr("cudart_major") = CUDART_VERSION / 1000;
  // Products by the cuBLASLt at this path, or ("") by needle's own kernels.
  m.def("use_cublaslt", &use_cublaslt, py::arg("path"));
  m.def("cublaslt_in_use", &cublaslt_in_use);  // (path, version); ("", 0)
  m.def("num_threads", [] { return 1; });      // of the host: kernels decide on the device's
  m.def("set_num_threads", [](int) {});
  m.attr("__tile_size__") = 4;  // the course's; nothing here is in such tiles
}
