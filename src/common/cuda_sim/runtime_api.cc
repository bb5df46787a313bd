// Memory, streams and events of the CUDA runtime, on host memory.
#include "runtime_api.h"

#ifdef __APPLE__
#include <malloc/malloc.h>
#else
#include <malloc.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "../machine.h"
#include "fiber.h"
#include "launch_sim.h"
#include "scheduler.h"

#if NEEDLE_ASAN
#include <sanitizer/asan_interface.h>
#endif

namespace needle::sim {

namespace {

// What the heap gave for a request.
size_t block_bytes(void* pointer) {
#ifdef __APPLE__
  return malloc_size(pointer);
#else
  return malloc_usable_size(pointer);
#endif
}

}  // namespace

struct Stream {
  struct Item {
    uint64_t sequence;  // over all streams
    std::function<std::string()> work;
  };
  bool blocking = true;  // waits for the default stream, and it for this one
  bool is_default = false;
  std::deque<Item> items;
  uint64_t asked_at = 0;  // the last item when somebody asked in vain
};

struct Event {
  Stream* stream = nullptr;
  uint64_t sequence = 0;  // of the last record
  bool done = true;
  bool asked = false;  // in vain, since then
  std::chrono::steady_clock::time_point time{};
};

namespace {

uint64_t enqueued = 0;
Stream default_stream{true, true, {}, 0};
std::vector<Stream*>& streams() {
  static std::vector<Stream*> all{&default_stream};
  return all;
}
std::atomic<size_t> bytes_in_use{0}, bytes_in_pool{0};
thread_local cudaError_t last_error = cudaSuccess;
thread_local std::string last_fault;

Stream& stream_or_default(cudaStream_t stream) { return stream ? *stream : default_stream; }

void run_until(Stream& stream, uint64_t sequence, std::string& fault);

void run_first(Stream& stream, std::string& fault) {
  Stream::Item item = std::move(stream.items.front());
  stream.items.pop_front();
  if (stream.blocking)
    for (Stream* other : streams())
      if (other != &stream && other->blocking && (other->is_default || stream.is_default))
        run_until(*other, item.sequence, fault);
  std::string text = item.work();
  if (fault.empty()) fault = std::move(text);
}

// Everything of `stream` enqueued up to `sequence`.
void run_until(Stream& stream, uint64_t sequence, std::string& fault) {
  while (!stream.items.empty() && stream.items.front().sequence <= sequence)
    run_first(stream, fault);
}

cudaError_t wait_for(Stream& stream, uint64_t sequence) {
  std::lock_guard<std::recursive_mutex> lock(host_mutex);
  std::string fault;
  run_until(stream, sequence, fault);
  if (stream.is_default)  // what the default stream comes after is done as well when it is
    for (Stream* other : streams())
      if (other->blocking) run_until(*other, sequence, fault);
  if (fault.empty()) return cudaSuccess;
  last_fault = std::move(fault);
  return remember(cudaErrorLaunchFailure);
}

// At once, or when somebody waits.
template <class F>
cudaError_t do_or_enqueue(cudaStream_t stream, F&& work) {
  if (streams_are_lazy())
    enqueue(stream, [work] {
      work();
      return std::string();
    });
  else
    work();
  return cudaSuccess;
}

size_t total_bytes() {
  static const size_t of_host = static_cast<size_t>(usable_memory().total);
  const size_t wanted = static_cast<size_t>(memory_mib()) << 20;
  return wanted ? wanted : of_host;
}
size_t free_bytes() {
  const size_t total = total_bytes();
  return total - std::min<size_t>(total, bytes_in_use);
}

// A GPU takes them, more or less, for the code of a kernel, when it is first launched.
constexpr size_t kLaunchBytes = size_t(1) << 20;

}  // namespace

cudaError_t remember(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

bool has_room_for_launch() { return free_bytes() >= kLaunchBytes; }

// CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
size_t max_shared_bytes() {
  switch (compute_capability()) {
    case 75:
      return 64 * 1024;
    case 80:
    case 87:
      return 163 * 1024;
    case 86:
    case 89:
    case 120:
      return 99 * 1024;
    default:
      return 227 * 1024;
  }
}

void enqueue(cudaStream_t stream, std::function<std::string()> work) {
  std::lock_guard<std::recursive_mutex> lock(host_mutex);
  stream_or_default(stream).items.push_back({++enqueued, std::move(work)});
}

}  // namespace needle::sim

using namespace needle::sim;

// --- memory --------------------------------------------------------------------------------------

// Exact sizes, so that AddressSanitizer sees the first byte past the end; 0xff, so that what nobody
// wrote is NaN.
cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  *pointer = nullptr;
  if (bytes == 0) return cudaSuccess;
  if (bytes > free_bytes() || posix_memalign(pointer, 256, bytes) != 0) {
    *pointer = nullptr;
    return remember(cudaErrorMemoryAllocation);
  }
  std::memset(*pointer, 0xff, bytes);
  bytes_in_use += block_bytes(*pointer);
  return cudaSuccess;
}
cudaError_t cudaFree(void* pointer) {
  const cudaError_t error = cudaDeviceSynchronize();
  if (pointer) bytes_in_use -= block_bytes(pointer);
  std::free(pointer);
  return error;
}
cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t) {
  const cudaError_t error = cudaMalloc(pointer, bytes);
  if (error == cudaSuccess) bytes_in_pool += block_bytes(*pointer);
  return error;
}
cudaError_t cudaFreeAsync(void* pointer, cudaStream_t stream) {
  return do_or_enqueue(stream, [pointer] {
    if (pointer) {
      bytes_in_use -= block_bytes(pointer);
      bytes_in_pool -= block_bytes(pointer);
    }
    std::free(pointer);
  });
}
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr attribute, void* value) {
  if (attribute != cudaMemPoolAttrReservedMemCurrent) return remember(cudaErrorInvalidValue);
  *static_cast<uint64_t*>(value) = bytes_in_pool;
  return cudaSuccess;
}
cudaError_t cudaMallocHost(void** pointer, size_t bytes) {
  *pointer = std::malloc(bytes ? bytes : 1);
  return *pointer ? cudaSuccess : remember(cudaErrorMemoryAllocation);
}
cudaError_t cudaFreeHost(void* pointer) {
  std::free(pointer);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  // "The memory areas may not overlap": what a GPU makes of that is not said.
  const auto first = reinterpret_cast<uintptr_t>(to), source = reinterpret_cast<uintptr_t>(from);
  if (first < source + bytes && source < first + bytes) return remember(cudaErrorInvalidValue);
  return do_or_enqueue(stream, [=] { std::memcpy(to, from, bytes); });
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  const cudaError_t error = cudaMemcpyAsync(to, from, bytes, kind, nullptr);
  return error == cudaSuccess ? cudaStreamSynchronize(nullptr) : error;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  return do_or_enqueue(stream, [=] { std::memset(to, value, bytes); });
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  return cudaMemsetAsync(to, value, bytes, nullptr);  // it is no more awaited than on a GPU
}
cudaError_t cudaMallocPitch(void** pointer, size_t* pitch, size_t row_bytes, size_t rows) {
  *pitch = (row_bytes + 511) / 512 * 512;
  return cudaMalloc(pointer, *pitch * rows);
}
cudaError_t cudaMemcpy2D(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                         size_t row_bytes, size_t rows, cudaMemcpyKind) {
  if (row_bytes > to_pitch || row_bytes > from_pitch) return remember(cudaErrorInvalidPitchValue);
  do_or_enqueue(nullptr, [=] {
    for (size_t row = 0; row < rows; ++row)
      std::memcpy(static_cast<char*>(to) + row * to_pitch,
                  static_cast<const char*>(from) + row * from_pitch, row_bytes);
  });
  return cudaStreamSynchronize(nullptr);
}
#if NEEDLE_ASAN
void cuda_sim_narrow(void* area, size_t bytes, size_t area_bytes, cudaStream_t stream) {
  do_or_enqueue(stream, [=] {
    __asan_unpoison_memory_region(area, bytes);
    __asan_poison_memory_region(static_cast<char*>(area) + bytes, area_bytes - bytes);
  });
}
#else
void cuda_sim_narrow(void*, size_t, size_t, cudaStream_t) {}
#endif
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *total = total_bytes();
  *free = free_bytes();
  return cudaSuccess;
}

// --- streams and events --------------------------------------------------------------------------

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  std::lock_guard<std::recursive_mutex> lock(host_mutex);
  *stream = new Stream{!(flags & cudaStreamNonBlocking), false, {}, 0};
  streams().push_back(*stream);
  return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  if (!stream) return remember(cudaErrorInvalidResourceHandle);
  const cudaError_t error = cudaStreamSynchronize(stream);
  std::lock_guard<std::recursive_mutex> lock(host_mutex);
  auto& all = streams();
  all.erase(std::remove(all.begin(), all.end(), stream), all.end());
  delete stream;
  return error;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return wait_for(stream_or_default(stream), UINT64_MAX);
}
// As cudaEventQuery: who asks again waits.
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  std::lock_guard<std::recursive_mutex> lock(host_mutex);
  Stream& asked = stream_or_default(stream);
  if (asked.items.empty() || asked.asked_at == asked.items.back().sequence)
    return cudaStreamSynchronize(stream);
  asked.asked_at = asked.items.back().sequence;
  return cudaErrorNotReady;
}
cudaError_t cudaDeviceReset() { return cudaDeviceSynchronize(); }
cudaError_t cudaDeviceSynchronize() {
  std::lock_guard<std::recursive_mutex> lock(host_mutex);
  cudaError_t result = cudaSuccess;
  const std::vector<Stream*> all = streams();
  for (Stream* stream : all) {
    const cudaError_t error = wait_for(*stream, UINT64_MAX);
    if (result == cudaSuccess) result = error;
  }
  return result;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new Event;
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, cudaEventDefault);
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  if (!event) return remember(cudaErrorInvalidResourceHandle);
  const cudaError_t error = cudaEventSynchronize(event);
  delete event;
  return error;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  std::lock_guard<std::recursive_mutex> lock(host_mutex);
  event->stream = &stream_or_default(stream);
  event->done = event->asked = false;
  const uint64_t mine = event->sequence = enqueued + 1;
  return do_or_enqueue(stream, [event, mine] {
    if (event->sequence > mine) return;  // recorded again since
    event->done = true;
    event->time = std::chrono::steady_clock::now();
  });
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return event->done ? cudaSuccess : wait_for(*event->stream, event->sequence);
}
// Who asks again waits: a loop that asks until the event has happened must end.
cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (event->done || event->asked) return cudaEventSynchronize(event);
  event->asked = true;
  return cudaErrorNotReady;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  if (!start->stream || !end->stream) return remember(cudaErrorInvalidResourceHandle);
  if (!start->done || !end->done) return cudaErrorNotReady;
  *milliseconds = std::chrono::duration<float, std::milli>(end->time - start->time).count();
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  std::lock_guard<std::recursive_mutex> lock(host_mutex);
  if (event->done) return cudaSuccess;
  Stream* awaited = event->stream;
  const uint64_t sequence = event->sequence;
  enqueue(stream, [awaited, sequence] {
    std::string fault;
    run_until(*awaited, sequence, fault);
    return fault;
  });
  return cudaSuccess;
}

// --- the device ----------------------------------------------------------------------------------

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  return device == 0 ? cudaSuccess : remember(cudaErrorInvalidDevice);
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (device != 0) return remember(cudaErrorInvalidDevice);
  switch (attribute) {
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(max_shared_bytes());
      return cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
      *value = multiprocessors();
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
      *value = compute_capability() / 10;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = compute_capability() % 10;
      return cudaSuccess;
    case cudaDevAttrMemoryPoolsSupported:
      *value = 1;
      return cudaSuccess;
  }
  return remember(cudaErrorInvalidValue);
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (device != 0) return remember(cudaErrorInvalidDevice);
  *properties = {"needle cuda_sim",          total_bytes(),
                 kSharedBytesDefault,        max_shared_bytes(),
                 compute_capability() / 10,  compute_capability() % 10,
                 multiprocessors(),          kWarpSize,
                 kMaxBlockThreads,           {1024, 1024, 64},
                 {0x7fffffff, 65535, 65535}, 65536};
  return cudaSuccess;
}

// As if compiled for just this device.
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  attributes->ptxVersion = compute_capability();
  return cudaSuccess;
}

cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError() { return last_error; }
const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
#define NAME(name) \
  case name:       \
    return #name;
    NAME(cudaSuccess)
    NAME(cudaErrorInvalidValue)
    NAME(cudaErrorMemoryAllocation)
    NAME(cudaErrorInvalidPitchValue)
    NAME(cudaErrorInvalidDevice)
    NAME(cudaErrorInvalidResourceHandle)
    NAME(cudaErrorNotReady)
    NAME(cudaErrorLaunchFailure)
#undef NAME
  }
  return "unrecognized error code";
}
const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorInvalidPitchValue:
      return "invalid pitch argument";
    case cudaErrorInvalidDevice:
      return "invalid device ordinal";
    case cudaErrorInvalidResourceHandle:
      return "invalid resource handle";
    case cudaErrorNotReady:
      return "device not ready";
    case cudaErrorLaunchFailure:
      return last_fault.empty() ? "unspecified launch failure" : last_fault.c_str();
  }
  return "unrecognized error code";
}
