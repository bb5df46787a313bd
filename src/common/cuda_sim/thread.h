// The record of a running CUDA thread and what kernels ask of the scheduler. Header side: no
// scheduling here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "types.h"

#define NEEDLE_SIM_HIDDEN __attribute__((visibility("hidden")))

namespace needle::sim {

constexpr int kWarpSize = 32;
constexpr int kMaxBlockThreads = 1024;
constexpr int kMaxWorkers = 16;
// A fiber's piece of address space: its top is the stack, what is below is closed. That is more
// than the 512 KB of local variables that a CUDA thread may have, so that what overflows ends there
// and not in the stack of a neighbour.
constexpr int kStackShift = 20;
constexpr size_t kSlotBytes = size_t(1) << kStackShift;
constexpr size_t kStackBytes = 128 * 1024;

// A place in the source. Default arguments fill it in at the call: unlike a return address it
// survives loop unrolling and jump threading, which copy a barrier's call instruction.
struct Site {
  const char* file;
  int line;
};
#define NEEDLE_SIM_SITE ::needle::sim::Site site = {__builtin_FILE(), __builtin_LINE()}

inline bool same_site(Site a, Site b) {
  return a.line == b.line && (a.file == b.file || std::strcmp(a.file, b.file) == 0);
}

// The part of a running block that index variables read; the scheduler's Block derives from it.
struct BlockIndex {
  uint3 block_idx;
  dim3 block_dim;
  dim3 grid_dim;
};

// What the lanes of one warp operation have published: frame[i] is null for lanes that do not take
// part.
struct Lanes {
  uint32_t active;
  void* frame[kWarpSize];
};

struct Collective {
  const char* name;
  void (*run)(Lanes& lanes);
};

struct CopyQueue;  // cp.async copies that are under way

// A suspended flow of control. For a hand-written switch `saved` is the stack pointer, below the
// saved registers; with ucontext it is a ucontext_t. AddressSanitizer must know the bounds of the
// stack that a switch leads to.
struct Context {
  void* saved;
  void* asan_fake_stack;
  const void* stack_bottom;
  size_t stack_bytes;
};

// One per stack. A stack carries one CUDA thread after the other, so the record is filled in anew
// for each.
struct alignas(128) Thread {
  uint3 thread_idx;
  uint32_t rank;  // linear index in the block
  BlockIndex* block;
  const char* waits_for;  // null while running or ready
  Site wait_site;
  Context context;  // with what stands above it, a barrier touches one cache line
  // A warp operation that waits for other lanes.
  const Collective* collective;
  void* frame;
  uint32_t mask;
  CopyQueue* copies;
};

// Stacks lie side by side in one reservation and records in one table, so a thread finds its record
// from the address of any of its frames, without thread-local storage (whose initial-exec form a
// Python module cannot have).
NEEDLE_SIM_HIDDEN extern char* stack_region;
NEEDLE_SIM_HIDDEN extern Thread thread_table[kMaxWorkers * kMaxBlockThreads];

inline __attribute__((always_inline)) Thread& self() {
  return thread_table[(static_cast<char*>(__builtin_frame_address(0)) - stack_region) >>
                      kStackShift];
}
inline bool on_fiber_stack(const void* p) {
  return size_t(static_cast<const char*>(p) - stack_region) <
             kSlotBytes * kMaxWorkers * kMaxBlockThreads &&
         stack_region != nullptr;
}

enum class BarrierKind { kPlain, kCount, kAnd, kOr };

NEEDLE_SIM_HIDDEN int block_barrier(BarrierKind kind, int predicate, Site site);
// Every lane of `mask` calls with the address of its frame; the last to come runs `op` once over
// all of them.
NEEDLE_SIM_HIDDEN void collective(uint32_t mask, void* frame, const Collective& op, Site site);
NEEDLE_SIM_HIDDEN void* shared_memory(const void* declaration, const char* name, size_t bytes,
                                      size_t alignment);
NEEDLE_SIM_HIDDEN void* dynamic_shared();
// Ends the launch with an error that names kernel, block and thread.
[[noreturn]] NEEDLE_SIM_HIDDEN void fault(const std::string& what, Site site);

NEEDLE_SIM_HIDDEN void fence(bool whole_device);

NEEDLE_SIM_HIDDEN void async_copy(void* shared, const void* global, int bytes, int source_bytes,
                                  Site site);
NEEDLE_SIM_HIDDEN void async_commit();
NEEDLE_SIM_HIDDEN void async_wait(int groups_left);

template <class T>
T& shared_variable(const void* declaration, const char* name) {
  return *static_cast<T*>(shared_memory(declaration, name, sizeof(T), alignof(T)));
}

// Reads and writes that the runtime does for a thread (ldmatrix, cp.async), told to the race
// detector if it is linked.
NEEDLE_SIM_HIDDEN void note_access(const void* address, size_t bytes, bool write);

}  // namespace needle::sim

// No macros, as threadIdx is one: host code calls variables of its own so. A worker sets its own
// before it runs a block.
NEEDLE_SIM_HIDDEN extern __thread dim3 blockDim, gridDim;
