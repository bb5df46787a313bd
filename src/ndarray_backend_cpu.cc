// The CPU backend's module: its memory, the pool's size, and everything of bindings.h.
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#ifdef __GLIBC__
#include <malloc.h>
#endif

#include "common/asan.h"
#include "common/bindings.h"
#include "common/integers.h"
#include "common/machine.h"
#include "common/parallel.h"

namespace needle::cpu {
namespace {

constexpr int64_t kMapped = 256 << 10;  // bytes from which a block is pages of its own
constexpr int64_t kHugePage = 2 << 20;

// What is left to the rest of the process: the interpreter, libraries, small blocks.
constexpr int64_t kSpare = 32 << 20;

// Small blocks from the heap; large ones as pages, which go back to the system when released. From
// 4 MiB on they start at a huge page's boundary and ask for huge pages: 512 times fewer faults.
class HostMemory : public MemorySource {
 public:
  void* allocate(int64_t bytes) override {
    if (NEEDLE_ASAN || bytes < kMapped) {
      void* ptr = nullptr;
      return posix_memalign(&ptr, 64, size_t(bytes)) == 0 ? ptr : nullptr;
    }
    if (!is_there(bytes)) return nullptr;
    void* ptr = pages(bytes);
    if (ptr != nullptr) mapped_ += bytes;
    return ptr;
  }
  void release(void* ptr, int64_t bytes) override {
    if (NEEDLE_ASAN || bytes < kMapped) {
      std::free(ptr);
    } else {
      munmap(ptr, size_t(bytes));
      mapped_ -= bytes;
    }
  }
  void trim() override {
    known_ = mapped_;
#ifdef __GLIBC__
    malloc_trim(0);  // whose free pages between blocks in use stay otherwise
#endif
  }

 private:
  // Linux promises memory that it does not have, and kills a process that takes it. Asked only for
  // more than has been seen to be there: that takes longer than a small kernel.
  bool is_there(int64_t bytes) {
    if (mapped_ + bytes <= known_) return true;
    const int64_t most = usable_memory().most;
    if (most > 0 && bytes > most - kSpare) return false;
    known_ = mapped_ + std::max(bytes, most / 8);
    return true;
  }

  static void* pages(int64_t bytes) {
    if (bytes < 2 * kHugePage) return map(bytes);
    char* raw = static_cast<char*>(map(bytes + kHugePage));
    if (raw == nullptr) return nullptr;
    const auto address = reinterpret_cast<uintptr_t>(raw);
    const int64_t before = round_up(int64_t(address), kHugePage) - int64_t(address);
    if (before > 0) munmap(raw, size_t(before));
    if (before < kHugePage) munmap(raw + before + bytes, size_t(kHugePage - before));
#ifdef MADV_HUGEPAGE
    madvise(raw + before, size_t(bytes), MADV_HUGEPAGE);
#endif
    return raw + before;
  }
  static void* map(int64_t bytes) {
    void* p =
        mmap(nullptr, size_t(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return p == MAP_FAILED ? nullptr : p;
  }

  int64_t mapped_ = 0;  // bytes of pages
  int64_t known_ = 0;   // how many there can be
};

}  // namespace

Allocator& allocator() {
  // Never destroyed: arrays may outlive statics.
  static auto* const instance = new Allocator(*new HostMemory, Caching::kRanges);
  return *instance;
}

DLDevice dlpack_device() { return {kDLCPU, 0}; }
void sync() {}
void copy_to_host(const Array& from, void* to) {
  std::memcpy(to, from.ptr(), size_t(from.nbytes()));
}
void copy_from_host(const void* from, const Array& to) {
  std::memcpy(to.ptr(), from, size_t(to.nbytes()));
}

// out (m/8, p/8, 8, 8) = a (m/8, n/8, 8, 8) @ b (n/8, p/8, 8, 8), all in tiles; in
// kernels/matmul_cpu.cc.
[[gnu::visibility("hidden")]] void matmul_tiled(const Array& a, const Array& b, const Array& out,
                                                int64_t m, int64_t n, int64_t p);

#ifdef NEEDLE_LEVELS
// The level of x86-64 (GCC's and Clang's -march=x86-64-v3, v4) whose build of this module the
// processor can run; empty for this one.
std::string best_level() {
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                  __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  const bool v4 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vl");
  return v3 && v4 ? "v4" : v3 ? "v3" : "";
}
#endif

}  // namespace needle::cpu

PYBIND11_MODULE(NEEDLE_MODULE, m) {
  using namespace needle::cpu;
  bind_backend(m);
  m.def("machine_memory", [] {
    const needle::Memory found = needle::usable_memory();
    return py::make_tuple(found.total, found.free);
  });
  m.def("num_threads", &num_threads);
  m.def("set_num_threads", &set_num_threads);
  m.def("matmul_tiled", &Bound<&matmul_tiled>::call);
  m.attr("__tile_size__") = 8;
#ifdef NEEDLE_LEVELS
  m.def("best_level", &best_level);
#endif
}
