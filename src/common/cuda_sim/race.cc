// A race detector for kernels. Kernel files are compiled with -fsanitize=thread and linked against
// the hooks below instead of libtsan: every load and store calls one. This file is compiled without
// the flag, and is empty unless NEEDLE_RACE is defined. Kernels need g++ and
// -fno-tree-loop-distribute-patterns: clang, and loops that became a memset, leave accesses without
// a hook.
//
// Two accesses to a byte, at least one a write and not both atomic, race unless they come from one
// thread, from one block with a __syncthreads between, or from one warp with a __syncwarp between
// that both lanes took part in. Shuffles order nothing. Since this is decided from who synchronised
// with whom, and not from the order in which threads happened to run, one run in one order is
// enough.
//
// Nor do they race if the first comes before a __threadfence, behind which its thread, or another
// that a barrier has told of the fence, changes something atomically, and an atomic operation finds
// that before the second: a counter of finished blocks, a flag, a lock. (The fence that the second
// thread would need is not asked for, as the CUDA C++ Programming Guide's own example has none;
// volatile accesses are plain ones.) This depends on who came first, so it is seen for the orders
// that were run.
//
// A read of shared memory none of which the block has written is reported too: an initialization
// that was forgotten, or a copy that was not waited for. (Not of single bytes: the padding of a
// struct is read with it.) So is a write to shared memory beside its variables.
#if defined(NEEDLE_RACE)

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "scheduler.h"

namespace needle::sim {

namespace {

struct Access {
  uint32_t launch = 0;  // 0: none
  uint32_t block = 0;
  uint32_t epoch = 0;       // block barriers passed before it
  uint32_t warp_clock = 0;  // the lane's own clock
  int32_t code = 0;         // address of the instruction, from kAnchor
  uint16_t thread = 0;
  bool atomic = false;
};

// The last plain write, two atomic ones, which stand beside it as they race with other accesses
// than the plain one before them does, and two readers. An atomic write or a reader is dropped only
// for one that barriers order it before, or for one further away. And the cp.async that is under
// way to the byte: until its thread has waited for it, no other access is ordered with it.
struct Cell {
  Access write, copy, atomic_write[2], read[2];
};

bool same_moment(const Access& a, const Access& b) {
  return a.block == b.block && a.thread == b.thread && a.epoch == b.epoch &&
         a.warp_clock == b.warp_clock;
}

constexpr size_t kPageBytes = 1024;
struct Page {
  Cell cells[kPageBytes];
};

// Pages are kept from launch to launch, whose number tells which entries are stale, until they are
// so many (about 300 MB) that memory might run out.
constexpr size_t kMostPages = 2000;
uint32_t launch_number = 0;
std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages;
uintptr_t last_page_number = ~uintptr_t(0);
Page* last_page = nullptr;

// clocks[w][i][j]: what lane i of warp w knows of lane j.
uint32_t clocks[kMaxBlockThreads / kWarpSize][kWarpSize][kWarpSize];

const char* const kAnchor = reinterpret_cast<const char*>(&race_hooks);

Cell& cell_of(uintptr_t address) {
  if (address / kPageBytes != last_page_number) {
    last_page_number = address / kPageBytes;
    std::unique_ptr<Page>& page = pages[last_page_number];
    if (!page) page = std::make_unique<Page>();
    last_page = page.get();
  }
  return last_page->cells[address % kPageBytes];
}

// Whether `earlier` was done, in every order, when a thread of the same block was at `now` and knew
// this of the lanes of its warp.
bool before(const Access& earlier, const Access& now, const uint32_t* lanes) {
  return earlier.epoch < now.epoch || (earlier.thread / kWarpSize == now.thread / kWarpSize &&
                                       lanes[earlier.thread % kWarpSize] >= earlier.warp_clock);
}

const uint32_t* lanes_of(const Access& now) {
  return clocks[now.thread / kWarpSize][now.thread % kWarpSize];
}

// What the thread does from here on is news to all others.
void next_moment(unsigned thread) {
  ++clocks[thread / kWarpSize][thread % kWarpSize][thread % kWarpSize];
}

struct Fence {
  Access at;
  uint32_t lanes[kWarpSize];  // what its thread knew
  bool whole_device;          // or of the block alone
  uint32_t releases;          // that the launch had
};
// What an atomic write leaves at its place: all that was done before the fences that its thread
// knows of, its own and those that a barrier has told it of, and itself.
struct Release {
  Access write;
  uint32_t lanes[kWarpSize];
  uint32_t number;  // counts those of the launch
};
struct Place {
  std::unordered_map<uint32_t, std::vector<Release>> of_block;
  std::vector<Release> informed;  // whose threads had found releases before their own fence
};
// An atomic operation, and the releases that it finds at its place: the first `count` of the
// launch.
struct Acquire {
  Access at;
  const Place* place;
  uint32_t count;
};
constexpr uint64_t kNoBlock = ~uint64_t(0);
// Of the present launch: by address, and by block where the memory is shared; by block and thread;
// by block.
std::map<std::pair<uintptr_t, uint64_t>, Place> places;
std::map<std::pair<uint32_t, uint16_t>, std::vector<Fence>> fences;
std::unordered_map<uint32_t, std::vector<Acquire>> acquires;
uint32_t release_count = 0;

// The last fence of a thread of its block that a release has behind it and that `block` can see, or
// null.
const Fence* fence_behind(const Release& release, uint16_t thread, uint32_t block) {
  const auto of_thread = fences.find({release.write.block, thread});
  if (of_thread == fences.end()) return nullptr;
  const std::vector<Fence>& all = of_thread->second;
  const auto earlier = [&](const Fence& fence) { return fence.releases <= release.number; };
  auto fence = std::partition_point(all.begin(), all.end(), earlier);
  while (fence != all.begin()) {
    --fence;
    if ((fence->whole_device || fence->at.block == block) &&
        before(fence->at, release.write, release.lanes))
      return &*fence;
  }
  return nullptr;
}

// Whether chains of releases and acquires bring `earlier` to `now`.
bool passed_on(const Access& earlier, const Access& now) {
  Fence start{now, {}, true, 0};
  std::memcpy(start.lanes, lanes_of(now), sizeof start.lanes);
  std::vector<Fence> left{start};
  std::map<std::pair<const Place*, uint32_t>, uint32_t> followed;
  while (!left.empty()) {
    const Fence point = left.back();
    left.pop_back();
    for (const Acquire& acquire : acquires[point.at.block]) {
      if (!before(acquire.at, point.at, point.lanes)) continue;
      const auto brings = [&](const Release& release, uint16_t thread) {
        const Fence* fence = fence_behind(release, thread, point.at.block);
        return fence != nullptr && before(earlier, fence->at, fence->lanes);
      };
      const auto of_block = acquire.place->of_block.find(earlier.block);
      if (of_block != acquire.place->of_block.end())
        for (const Release& release : of_block->second)
          if (release.number < acquire.count &&
              ((earlier.atomic && same_moment(earlier, release.write)) ||
               brings(release, release.write.thread) || brings(release, earlier.thread)))
            return true;
      uint32_t& from = followed[{acquire.place, point.at.block}];
      for (const Release& release : acquire.place->informed) {
        if (release.number < from || release.number >= acquire.count) continue;
        const Fence* fence = fence_behind(release, release.write.thread, point.at.block);
        if (fence != nullptr) left.push_back(*fence);
      }
      if (from < acquire.count) from = acquire.count;
    }
  }
  return false;
}

// Before and after an atomic operation.
void acquire(uintptr_t address, const Access& now, bool shared) {
  const auto place = places.find({address, shared ? now.block : kNoBlock});
  if (place == places.end()) return;
  std::vector<Acquire>& all = acquires[now.block];
  if (!all.empty() && all.back().place == &place->second && same_moment(all.back().at, now))
    all.pop_back();
  all.push_back({now, &place->second, release_count});
}
void release(uintptr_t address, const Access& now, bool shared) {
  if (fences.empty()) return;
  Release left{now, {}, release_count++};
  std::memcpy(left.lanes, lanes_of(now), sizeof left.lanes);
  Place& place = places[{address, shared ? now.block : kNoBlock}];
  place.of_block[now.block].push_back(left);
  const Fence* own = fence_behind(left, now.thread, now.block);
  for (const Acquire& acquire : acquires[now.block])
    if (own != nullptr && before(acquire.at, own->at, own->lanes)) {
      place.informed.push_back(left);
      break;
    }
  next_moment(now.thread);
}

// threadIdx, blockDim and the like, which kernels read where the scheduler keeps them.
bool is_index(const void* address, const Block& block) {
  const auto within = [&](const void* start, size_t bytes) {
    return static_cast<size_t>(static_cast<const char*>(address) -
                               static_cast<const char*>(start)) < bytes;
  };
  return within(&stack_region, sizeof stack_region) || within(thread_table, sizeof thread_table) ||
         within(&block, sizeof block) || within(&blockDim, sizeof blockDim) ||
         within(&gridDim, sizeof gridDim);
}

// Whether `earlier` (made before, in the order of this run) happens before what `now` does in every
// order, but for fences.
bool ordered_by_barriers(const Access& earlier, const Access& now, bool shared) {
  if (earlier.launch != now.launch) return true;
  if (earlier.block != now.block)
    return shared;  // the next block's shared memory is another memory
  return earlier.thread == now.thread || before(earlier, now, lanes_of(now));
}

// The same with fences, in those orders in which an atomic operation found what another left.
bool ordered(const Access& earlier, const Access& now, bool shared) {
  return ordered_by_barriers(earlier, now, shared) || (!places.empty() && passed_on(earlier, now));
}

// An update writes what it makes of what it reads.
enum class Kind { kRead, kWrite, kUpdate, kCopy };

std::string name_of(const Access& access, Kind kind) {
  const char* name = kind == Kind::kRead ? "read" : kind == Kind::kCopy ? "cp.async" : "write";
  return std::string(access.atomic ? "atomic " : "") + name + " (" +
         describe_code_address(kAnchor + access.code) + ")";
}

[[noreturn]] void report(Block& block, Thread& thread, uintptr_t address, const Access& earlier,
                         Kind earlier_kind, const Access& now, Kind kind) {
  block.fault(thread,
              "data race on " + block.describe(reinterpret_cast<const void*>(address)) + ": " +
                  name_of(now, kind) + " and an earlier " + name_of(earlier, earlier_kind) +
                  " by " + block.place_of(earlier.block, earlier.thread) +
                  (earlier_kind == Kind::kCopy ? " that may still be under way"
                                               : " with no synchronisation between"),
              {"", 0});
}

[[noreturn]] void report_uninitialized(Block& block, Thread& thread, const void* address,
                                       const Access& now, bool copied) {
  block.fault(thread,
              "uninitialized " + block.describe(address) + ": " + name_of(now, Kind::kRead) +
                  (copied ? " of what a cp.async writes that has not been waited for"
                          : " of what no thread of the block has written"),
              {"", 0});
}

[[noreturn]] void report_beside(Block& block, Thread& thread, const void* address, size_t bytes,
                                const Access& now, Kind kind) {
  // An access may begin within a variable and end outside.
  if (!block.beside_shared(address, 1)) address = static_cast<const char*>(address) + bytes - 1;
  block.fault(thread, name_of(now, kind) + " to " + block.describe(address), {"", 0});
}

void note(Access (&two)[2], const Access& now, bool shared) {
  for (Access& slot : two)
    if (ordered_by_barriers(slot, now, shared) &&
        (slot.launch != now.launch || slot.atomic || !now.atomic)) {
      slot = now;
      return;
    }
  const auto near = [](const Access& a, const Access& b) {
    return a.block == b.block && a.thread / kWarpSize == b.thread / kWarpSize;
  };
  if (near(two[0], two[1])) two[1] = now;
}

Access access_of(const Thread& thread, bool atomic, const void* pc) {
  const Block& block = *static_cast<const Block*>(thread.block);
  Access now;
  now.launch = launch_number;
  now.block = static_cast<uint32_t>(block.linear_index);
  now.epoch = block.epoch;
  now.thread = static_cast<uint16_t>(thread.rank);
  now.warp_clock = lanes_of(now)[thread.rank % kWarpSize];
  // The call instruction, not the one it returns to.
  now.code = static_cast<int32_t>(static_cast<const char*>(pc) - 1 - kAnchor);
  now.atomic = atomic;
  return now;
}

void access(const void* start, size_t bytes, Kind kind, bool atomic, const void* pc) {
  if (!on_fiber_stack(__builtin_frame_address(0)) || on_fiber_stack(start)) return;
  Thread& thread = self();
  Block& block = *static_cast<Block*>(thread.block);
  if (is_index(start, block)) return;
  const Access now = access_of(thread, atomic, pc);
  const bool shared = block.in_shared(start);
  const bool write = kind != Kind::kRead;
  if (write && shared && block.beside_shared(start, bytes))
    report_beside(block, thread, start, bytes, now, kind);
  bool initialized = !shared || kind == Kind::kWrite || kind == Kind::kCopy;
  Access copy;  // that the access reaches into
  uintptr_t copied = 0;
  const auto first = reinterpret_cast<uintptr_t>(start);
  if (atomic) acquire(first, now, shared);
  for (uintptr_t address = first; address < first + bytes; ++address) {
    Cell& cell = cell_of(address);
    const auto races = [&](const Access& earlier) {
      return !(earlier.atomic && atomic) && !ordered(earlier, now, shared);
    };
    for (const Access* writer : {&cell.write, &cell.atomic_write[0], &cell.atomic_write[1]})
      if (races(*writer)) report(block, thread, address, *writer, Kind::kWrite, now, kind);
    if (!initialized)
      for (const Access* writer : {&cell.write, &cell.atomic_write[0], &cell.atomic_write[1]})
        initialized |= writer->launch == now.launch && writer->block == now.block;
    if (!copied && cell.copy.launch == now.launch && cell.copy.block == now.block) {
      copy = cell.copy;
      copied = address;
    }
    if (write) {
      for (const Access& reader : cell.read)
        if (races(reader)) report(block, thread, address, reader, Kind::kRead, now, kind);
      if (atomic)
        note(cell.atomic_write, now, shared);
      else
        (kind == Kind::kCopy ? cell.copy : cell.write) = now;
    } else {
      note(cell.read, now, shared);
    }
  }
  if (atomic && write) release(first, now, shared);
  if (!initialized) report_uninitialized(block, thread, start, now, copied != 0);
  if (copied) report(block, thread, copied, copy, Kind::kCopy, now, kind);
}

// --- what the scheduler tells --------------------------------------------------------------------

void begin_launch() {
  ++launch_number;
  places.clear();
  fences.clear();
  acquires.clear();
  release_count = 0;
  if (pages.size() <= kMostPages) return;
  pages.clear();
  last_page_number = ~uintptr_t(0);
}

void begin_block() {
  for (auto& warp : clocks)
    for (int i = 0; i < kWarpSize; ++i)
      for (int j = 0; j < kWarpSize; ++j) warp[i][j] = i == j;
}

// Every lane of the mask learns what any of them knew; what it does from here on is news again.
void sync_warp(Thread& thread, uint32_t mask) {
  auto& warp = clocks[thread.rank / kWarpSize];
  uint32_t joined[kWarpSize] = {};
  for (int i = 0; i < kWarpSize; ++i)
    if (mask >> i & 1)
      for (int j = 0; j < kWarpSize; ++j)
        if (warp[i][j] > joined[j]) joined[j] = warp[i][j];
  for (int i = 0; i < kWarpSize; ++i)
    if (mask >> i & 1) {
      for (int j = 0; j < kWarpSize; ++j) warp[i][j] = joined[j];
      ++warp[i][i];
    }
}

void fence(const Thread& thread, bool whole_device) {
  Fence fence{access_of(thread, false, kAnchor), {}, whole_device, release_count};
  std::memcpy(fence.lanes, lanes_of(fence.at), sizeof fence.lanes);
  fences[{fence.at.block, fence.at.thread}].push_back(fence);
  next_moment(thread.rank);
}

void runtime_access(const void* start, size_t bytes, bool write, const void* pc) {
  access(start, bytes, write ? Kind::kWrite : Kind::kRead, false, pc);
}

void begin_copy(const void* to, size_t bytes, const void* pc) {
  access(to, bytes, Kind::kCopy, false, pc);
}

void end_copy(const void* to, size_t bytes, const void* pc) {
  for (size_t i = 0; i < bytes; ++i) cell_of(reinterpret_cast<uintptr_t>(to) + i).copy = Access();
  access(to, bytes, Kind::kWrite, false, pc);
}

const RaceHooks hooks{begin_launch,   begin_block, sync_warp, fence,
                      runtime_access, begin_copy,  end_copy};
const bool installed = (race_hooks = &hooks) != nullptr;

}  // namespace

}  // namespace needle::sim

// --- what instrumented code calls ----------------------------------------------------------------

#define PC __builtin_return_address(0)
#define HOOK extern "C" __attribute__((visibility("hidden")))

using needle::sim::access;
using needle::sim::Kind;

// clang-format off
#define SIZED(n)                                                                          \
  HOOK void __tsan_read##n(void* p) { access(p, n, Kind::kRead, false, PC); }             \
  HOOK void __tsan_write##n(void* p) { access(p, n, Kind::kWrite, false, PC); }           \
  HOOK void __tsan_unaligned_read##n(void* p) { access(p, n, Kind::kRead, false, PC); }   \
  HOOK void __tsan_unaligned_write##n(void* p) { access(p, n, Kind::kWrite, false, PC); } \
  HOOK void __tsan_volatile_read##n(void* p) { access(p, n, Kind::kRead, false, PC); }    \
  HOOK void __tsan_volatile_write##n(void* p) { access(p, n, Kind::kWrite, false, PC); }
SIZED(1) SIZED(2) SIZED(4) SIZED(8) SIZED(16)

HOOK void __tsan_read_range(void* p, size_t bytes) { access(p, bytes, Kind::kRead, false, PC); }
HOOK void __tsan_write_range(void* p, size_t bytes) { access(p, bytes, Kind::kWrite, false, PC); }
HOOK void __tsan_init() {}
HOOK void __tsan_func_entry(void*) {}
HOOK void __tsan_func_exit() {}
HOOK void __tsan_vptr_update(void**, void*) {}
HOOK void __tsan_vptr_read(void**) {}
HOOK void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
HOOK void __tsan_atomic_signal_fence(int) { __atomic_signal_fence(__ATOMIC_SEQ_CST); }

#define FETCH(bits, op)                                                         \
  HOOK uint##bits##_t __tsan_atomic##bits##_fetch_##op(uint##bits##_t* p,       \
                                                       uint##bits##_t v, int) { \
    access(p, bits / 8, Kind::kUpdate, true, PC);                               \
    return __atomic_fetch_##op(p, v, __ATOMIC_SEQ_CST);                         \
  }
#define EXCHANGE(bits, strength)                                                 \
  HOOK int __tsan_atomic##bits##_compare_exchange_##strength(                    \
      uint##bits##_t* p, uint##bits##_t* expected, uint##bits##_t v, int, int) { \
    access(p, bits / 8, Kind::kUpdate, true, PC);                                \
    return __atomic_compare_exchange_n(p, expected, v, false, __ATOMIC_SEQ_CST,  \
                                       __ATOMIC_SEQ_CST);                        \
  }
#define ATOMIC(bits)                                                                \
  FETCH(bits, add) FETCH(bits, sub) FETCH(bits, and)                                \
  FETCH(bits, or) FETCH(bits, xor) FETCH(bits, nand)                                \
  EXCHANGE(bits, strong) EXCHANGE(bits, weak)                                       \
  HOOK uint##bits##_t __tsan_atomic##bits##_load(const uint##bits##_t* p, int) {    \
    access(p, bits / 8, Kind::kRead, true, PC);                                     \
    return __atomic_load_n(p, __ATOMIC_SEQ_CST);                                    \
  }                                                                                 \
  HOOK void __tsan_atomic##bits##_store(uint##bits##_t* p, uint##bits##_t v, int) { \
    access(p, bits / 8, Kind::kWrite, true, PC);                                    \
    __atomic_store_n(p, v, __ATOMIC_SEQ_CST);                                       \
  }                                                                                 \
  HOOK uint##bits##_t __tsan_atomic##bits##_exchange(uint##bits##_t* p,             \
                                                     uint##bits##_t v, int) {       \
    access(p, bits / 8, Kind::kWrite, true, PC);                                    \
    return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST);                             \
  }                                                                                 \
  HOOK uint##bits##_t __tsan_atomic##bits##_compare_exchange_val(                   \
      uint##bits##_t* p, uint##bits##_t expected, uint##bits##_t v, int, int) {     \
    access(p, bits / 8, Kind::kUpdate, true, PC);                                   \
    __atomic_compare_exchange_n(p, &expected, v, false, __ATOMIC_SEQ_CST,           \
                                __ATOMIC_SEQ_CST);                                  \
    return expected;                                                                \
  }
ATOMIC(8) ATOMIC(16) ATOMIC(32) ATOMIC(64)
// clang-format on

#endif  // NEEDLE_RACE
