#include "scheduler.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <sstream>
#include <stdexcept>

#if NEEDLE_ASAN
#include <sanitizer/asan_interface.h>
#endif

__thread dim3 blockDim, gridDim;

namespace needle::sim {

Thread thread_table[kMaxWorkers * kMaxBlockThreads];
const RaceHooks* race_hooks = nullptr;

namespace {

// Room before and after each shared variable, so that what reaches outside meets something. Under
// AddressSanitizer that is poison. Otherwise it is 0xff, which is looked at when the block is over,
// up to the end of the last variable's page; the pages behind it, and as many in front of the
// arena, are closed.
constexpr size_t kSharedGap = 128;
constexpr size_t kArenaBytes = 1 << 20;

size_t whole_pages(size_t bytes) {
  static const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

bool is_untouched(const char* from, const char* to) {
  return from == to ||
         (*from == '\xff' && std::memcmp(from, from + 1, static_cast<size_t>(to - from) - 1) == 0);
}

Block& block_of(Thread& thread) { return *static_cast<Block*>(thread.block); }

const char* barrier_name(BarrierKind kind) {
  switch (kind) {
    case BarrierKind::kCount:
      return "__syncthreads_count";
    case BarrierKind::kAnd:
      return "__syncthreads_and";
    case BarrierKind::kOr:
      return "__syncthreads_or";
    default:
      return "__syncthreads";
  }
}

std::string text(Site site) { return std::string(site.file) + ":" + std::to_string(site.line); }
std::string hex(uint32_t mask) {
  std::ostringstream out;
  out << "0x" << std::hex << mask;
  return out.str();
}

uint3 unflatten(uint64_t index, dim3 extent) {
  return {unsigned(index % extent.x), unsigned(index / extent.x % extent.y),
          unsigned(index / extent.x / extent.y)};
}

}  // namespace

std::string text(dim3 v) {
  return "(" + std::to_string(v.x) + "," + std::to_string(v.y) + "," + std::to_string(v.z) + ")";
}

Block::Block(int worker) : worker_(worker) {
  void* memory =
      mmap(nullptr, 2 * kArenaBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::runtime_error("cuda_sim: no memory for shared memory");
  arena_ = static_cast<char*>(memory) + kArenaBytes;
  if (NEEDLE_ASAN) open_arena(kArenaBytes);
}

std::string Block::run(const Launch& launch_, uint64_t index, const OrderOption& order) {
  launch = &launch_;
  order_ = order;
  linear_index = index;
  block_idx = unflatten(index, launch->grid);
  blockDim = block_dim = launch->block;
  gridDim = grid_dim = launch->grid;
  n_threads_ = live_ = block_dim.x * block_dim.y * block_dim.z;
  started_ = ready_head_ = ready_count_ = n_at_barrier_ = barrier_arrived_ = barrier_true_ = 0;
  epoch = 0;
  fault_.clear();
  for (unsigned first = 0, w = 0; first < n_threads_; first += kWarpSize, ++w) {
    const unsigned lanes = std::min(n_threads_ - first, unsigned(kWarpSize));
    warps[w] = Warp();
    warps[w].live = lanes == kWarpSize ? ~0u : (1u << lanes) - 1;
  }
  random_state_ = order.seed * 0x9e3779b97f4a7c15ull + index + 1;
  if (order.order == Order::kRandom) {
    start_order_.resize(n_threads_);
    std::iota(start_order_.begin(), start_order_.end(), 0u);
    for (unsigned i = n_threads_; i > 1; --i)
      std::swap(start_order_[i - 1], start_order_[random() % i]);
  }
#if NEEDLE_ASAN
  __asan_poison_memory_region(arena_, kArenaBytes);
#endif
  shared_.clear();
  arena_used_ = shared_bytes_ = 0;
  if (launch->smem > 0) {
    shared(nullptr, "dynamic shared memory", launch->smem, 128);
    shared_bytes_ = 0;
  }
  if (race_hooks) race_hooks->begin_block();

  describe_own_stack(main_);
  switch_context(main_, next(nullptr)->context);
  if (!fault_.empty()) {
    for (unsigned i = 0; i < n_made_; ++i)
      drop_async_copies(thread_table[static_cast<unsigned>(worker_ * kMaxBlockThreads) + i]);
    n_idle_ = n_made_ = 0;  // no stack can be trusted to be parked
    forget_frames(worker_ * kMaxBlockThreads, kMaxBlockThreads);
  } else if (!NEEDLE_ASAN) {
    fault_ = written_outside_shared();
  }
  if (!NEEDLE_ASAN) leave_arena();
  return std::move(fault_);
}

// --- threads and fibers --------------------------------------------------------------------------

// A fiber takes thread after thread while nobody waits: a kernel without barriers is one fiber in a
// loop.
void Block::runner() {
  arrived();
  Thread& thread = self();
  Block& block = block_of(thread);
  for (;;) {
    block.start_thread(thread);
    block.launch->run(block.launch->args);
    block.exit_thread(thread);
    Thread* following = block.next(&thread);
    if (following == &thread) continue;
    if (!following && block.live_ > 0)
      block.fault(thread, "deadlock: the threads that are left wait for each other", {"", 0}, true);
    block.idle_[block.n_idle_++] = &thread;
    switch_context(thread.context, following ? following->context : block.main_);
  }
}

Thread* Block::take_fiber() {
  if (n_idle_ > 0) return idle_[--n_idle_];
  const int index = worker_ * kMaxBlockThreads + static_cast<int>(n_made_++);
  Thread& thread = thread_table[index];
  thread.block = this;
  prepare_fiber(index, thread.context, runner);
  return &thread;
}

void Block::start_thread(Thread& thread) {
  const unsigned i = started_++;
  thread.rank = order_.order == Order::kForward   ? i
                : order_.order == Order::kReverse ? n_threads_ - 1 - i
                                                  : start_order_[i];
  thread.thread_idx = unflatten(thread.rank, block_dim);
  thread.waits_for = nullptr;
  warps[thread.rank / kWarpSize].lane[thread.rank % kWarpSize] = &thread;
}

// Threads that have exited no longer count, so an exit may be what others were waiting for.
void Block::exit_thread(Thread& thread) {
  drop_async_copies(thread);
  --live_;
  Warp& warp = warps[thread.rank / kWarpSize];
  const uint32_t lane = 1u << thread.rank % kWarpSize;
  warp.live &= ~lane;
  if (n_at_barrier_ > 0 && n_at_barrier_ == live_) complete_barrier();
  for (uint32_t left = warp.waiting; left != 0;) {
    Thread& waiter = *warp.lane[__builtin_ctz(left)];
    left &= ~waiter.mask;
    if (waiter.mask & lane) complete_collective(warp, waiter.mask, waiter);
  }
}

// The thread or runner to go on with: `idle_runner` itself if it may start another thread, null if
// there is nothing.
Thread* Block::next(Thread* idle_runner) {
  const bool can_start = started_ < n_threads_;
  if (ready_count_ > 0 && !(can_start && order_.order == Order::kRandom && random() % 2)) {
    unsigned taken = ready_head_;
    if (order_.order == Order::kReverse) {
      taken = (ready_head_ + ready_count_ - 1) % kMaxBlockThreads;
    } else {
      if (order_.order == Order::kRandom)
        std::swap(ready_[ready_head_],
                  ready_[(ready_head_ + random() % ready_count_) % kMaxBlockThreads]);
      ready_head_ = (ready_head_ + 1) % kMaxBlockThreads;
    }
    --ready_count_;
    return ready_[taken];
  }
  if (!can_start) return nullptr;
  return idle_runner ? idle_runner : take_fiber();
}

void Block::make_ready(Thread* thread) {
  thread->waits_for = nullptr;
  ready_[(ready_head_ + ready_count_++) % kMaxBlockThreads] = thread;
}

void Block::suspend(Thread& thread) {
  Thread* following = next(nullptr);
  if (!following) deadlock(thread);
  switch_context(thread.context, following->context);
}

uint64_t Block::random() {
  random_state_ ^= random_state_ << 13;
  random_state_ ^= random_state_ >> 7;
  random_state_ ^= random_state_ << 17;
  return random_state_ >> 11;
}

// --- barriers and warp operations ----------------------------------------------------------------

int Block::barrier(Thread& thread, BarrierKind kind, int predicate, Site site) {
  if (n_at_barrier_ == 0) {
    barrier_kind_ = kind;
    barrier_site_ = site;
  } else if (kind != barrier_kind_ || !same_site(site, barrier_site_)) {
    divergent_barrier(thread, kind, site);
  }
  barrier_true_ += predicate != 0;
  ++barrier_arrived_;
  if (n_at_barrier_ + 1 == live_) {
    complete_barrier();
  } else {
    at_barrier_[n_at_barrier_++] = &thread;
    thread.waits_for = barrier_name(kind);
    thread.wait_site = site;
    suspend(thread);
  }
  return barrier_result_;
}

// The result stands until the next barrier completes, and that needs every thread to have read it.
void Block::complete_barrier() {
  switch (barrier_kind_) {
    case BarrierKind::kAnd:
      barrier_result_ = barrier_true_ == barrier_arrived_;
      break;
    case BarrierKind::kOr:
      barrier_result_ = barrier_true_ > 0;
      break;
    default:
      barrier_result_ = static_cast<int>(barrier_true_);
  }
  for (unsigned i = 0; i < n_at_barrier_; ++i) make_ready(at_barrier_[i]);
  n_at_barrier_ = barrier_true_ = barrier_arrived_ = 0;
  ++epoch;
}

void Block::collective(Thread& thread, uint32_t mask, void* frame, const Collective& op,
                       Site site) {
  Warp& warp = warps[thread.rank / kWarpSize];
  const uint32_t lane = 1u << thread.rank % kWarpSize;
  thread.mask = mask;
  thread.frame = frame;
  thread.collective = &op;
  thread.wait_site = site;
  if (!(mask & lane)) not_in_mask(thread);
  warp.waiting |= lane;
  for (uint32_t others = warp.waiting & mask & ~lane; others != 0; others &= others - 1) {
    const Thread& other = *warp.lane[__builtin_ctz(others)];
    if (!(other.mask & lane))
      continue;  // that lane is at something this one takes no part in, and may yet come
    if (other.mask != mask || other.collective->run != op.run || !same_site(other.wait_site, site))
      divergent_warp(thread, other);
    break;  // the others agree with this one
  }
  if (!complete_collective(warp, mask, thread)) {
    thread.waits_for = op.name;
    suspend(thread);
  }
}

// If every live lane of `mask` has come: runs the operation and wakes all but the one that is
// running.
__attribute__((noinline)) bool Block::complete_collective(Warp& warp, uint32_t mask, Thread& any) {
  const uint32_t wanted = mask & warp.live;
  if ((warp.waiting & wanted) != wanted) return false;
  Lanes lanes{wanted, {}};
  for (uint32_t left = wanted; left != 0; left &= left - 1) {
    const int i = __builtin_ctz(left);
    if (warp.lane[i]->mask != mask) return false;
    lanes.frame[i] = warp.lane[i]->frame;
  }
  any.collective->run(lanes);
  if (race_hooks && any.collective->name == std::string("__syncwarp"))
    race_hooks->sync_warp(any, wanted);
  warp.waiting &= ~wanted;
  for (uint32_t left = wanted; left != 0; left &= left - 1) {
    Thread* thread = warp.lane[__builtin_ctz(left)];
    if (thread->waits_for) make_ready(thread);
  }
  return true;
}

// --- shared memory -------------------------------------------------------------------------------

void Block::open_arena(size_t bytes) {
  bytes = whole_pages(bytes);
  if (bytes <= arena_open_) return;
  mprotect(arena_, bytes, PROT_READ | PROT_WRITE);
  arena_open_ = bytes;
  if (bytes <= arena_filled_ || NEEDLE_ASAN) return;
  std::memset(arena_ + arena_filled_, 0xff, bytes - arena_filled_);
  arena_filled_ = bytes;
}

// What is open is all 0xff for the next block. Of the pages that an earlier launch had open, those
// that this one's first block had no need of are closed: blocks of one kernel seldom differ.
void Block::leave_arena() {
  if (!fault_.empty()) std::memset(arena_, 0xff, arena_open_);
  if (shared_.empty()) return;
  for (const SharedVariable& variable : shared_)
    std::memset(variable.address, 0xff, variable.bytes);
  const size_t used = whole_pages(arena_used_);
  if (first_of_launch_ && used < arena_open_) {
    mprotect(arena_ + used, arena_open_ - used, PROT_NONE);
    arena_open_ = used;
  }
  first_of_launch_ = false;
}

// The first thread to arrive at a declaration reserves the variable.
char* Block::shared(const void* declaration, const char* name, size_t bytes, size_t alignment) {
  for (const SharedVariable& variable : shared_)
    if (variable.declaration == declaration) return variable.address;
  shared_bytes_ += bytes;
  const size_t step = std::max<size_t>(alignment, 16);
  char* address = arena_ + (arena_used_ + kSharedGap + step - 1) / step * step;
  arena_used_ = static_cast<size_t>(address - arena_) + bytes;
  if (declaration &&
      (shared_bytes_ > kSharedBytesDefault || arena_used_ + kSharedGap > kArenaBytes))
    fault(self(),
          std::string("static shared memory: ") + std::to_string(shared_bytes_) + " bytes with `" +
              name + "` (at most " + std::to_string(kSharedBytesDefault) + ")",
          {"", 0});
  // Hardware refuses the opting in that leaves no room for the static part, or the launch.
  const size_t both = shared_bytes_ + std::max(launch->smem, launch->opted_in);
  const size_t most = launch->opted_in > 0 ? max_shared_bytes() : kSharedBytesDefault;
  if (declaration && both > most)
    fault(self(),
          "shared memory: " + std::to_string(both) + " bytes, static and dynamic (at most " +
              std::to_string(most) + ")",
          {"", 0});
  open_arena(arena_used_);
#if NEEDLE_ASAN
  __asan_unpoison_memory_region(address, bytes);
  std::memset(address, 0xff, bytes);
#endif
  shared_.push_back({declaration, name, address, bytes});
  return address;
}

std::string Block::written_outside_shared() const {
  if (shared_.empty()) return {};
  const auto told = [&](const char* where, const SharedVariable& variable) {
    return std::string("[") + launch->kernel_name + "] a write " + where + " shared memory `" +
           variable.name + "`: block " + text(block_idx);
  };
  if (!is_untouched(arena_, shared_[0].address)) return told("before", shared_[0]);
  for (size_t i = 0; i < shared_.size(); ++i) {
    const bool last = i + 1 == shared_.size();
    if (!is_untouched(shared_[i].address + shared_[i].bytes,
                      last ? arena_ + arena_open_ : shared_[i + 1].address))
      return told("beyond", shared_[i]);
  }
  return {};
}

// --- faults --------------------------------------------------------------------------------------

std::string Block::place_of(uint64_t block, unsigned rank) const {
  return "block " + text(unflatten(block, grid_dim)) + ", thread " +
         text(unflatten(rank, block_dim));
}

bool Block::in_shared(const void* address) const {
  const char* const byte = static_cast<const char*>(address);
  return byte >= arena_ - kArenaBytes && byte < arena_ + kArenaBytes;
}

bool Block::beside_shared(const void* address, size_t bytes) const {
  if (!in_shared(address)) return false;
  for (const SharedVariable& variable : shared_) {
    const auto offset = static_cast<size_t>(static_cast<const char*>(address) - variable.address);
    if (offset < variable.bytes && bytes <= variable.bytes - offset) return false;
  }
  return true;
}

std::string Block::describe(const void* address) const {
  std::string beside = "shared memory before its variables";
  for (const SharedVariable& variable : shared_) {
    const std::ptrdiff_t offset = static_cast<const char*>(address) - variable.address;
    if (offset >= 0 && static_cast<size_t>(offset) < variable.bytes)
      return std::string("shared memory `") + variable.name + "` + " + std::to_string(offset) +
             " bytes";
    if (offset >= 0) beside = std::string("shared memory beyond `") + variable.name + "`";
  }
  if (in_shared(address)) return beside;
  std::ostringstream out;
  out << "global memory " << address;
  return out.str();
}

// "threads 0-30 wait at __syncwarp (a.cu:12)", a line for each place.
std::string Block::waiting_threads() const {
  std::vector<const Thread*> waiting;
  for (unsigned i = 0; i < n_made_; ++i) {
    const Thread& thread = thread_table[static_cast<unsigned>(worker_ * kMaxBlockThreads) + i];
    if (thread.waits_for) waiting.push_back(&thread);
  }
  std::sort(waiting.begin(), waiting.end(),
            [](const Thread* a, const Thread* b) { return a->rank < b->rank; });
  std::string lines;
  for (size_t i = 0; i < waiting.size();) {
    size_t end = i + 1;
    while (end < waiting.size() && waiting[end]->rank == waiting[end - 1]->rank + 1 &&
           same_site(waiting[end]->wait_site, waiting[i]->wait_site))
      ++end;
    lines += "\n  ";
    lines += end - i > 1 ? "threads " + text(waiting[i]->thread_idx) + " to " +
                               text(waiting[end - 1]->thread_idx) + " wait"
                         : "thread " + text(waiting[i]->thread_idx) + " waits";
    lines += std::string(" at ") + waiting[i]->waits_for + " (" + text(waiting[i]->wait_site) + ")";
    i = end;
  }
  return lines;
}

// Functions of their own, since room for the texts in the frames of waiting threads would slow
// every barrier.
__attribute__((noinline)) void Block::deadlock(Thread& thread) {
  fault(thread, std::string("deadlock at ") + thread.waits_for, thread.wait_site, true);
}
__attribute__((noinline)) void Block::divergent_barrier(Thread& thread, BarrierKind kind,
                                                        Site site) {
  fault(thread,
        std::string("divergent barrier: ") + barrier_name(kind) + " here, while others are at " +
            barrier_name(barrier_kind_) + " (" + text(barrier_site_) + ")",
        site, true);
}

__attribute__((noinline)) void Block::divergent_warp(Thread& thread, const Thread& other) {
  fault(thread,
        std::string("divergent warp operation: ") + thread.collective->name + " with mask " +
            hex(thread.mask) + " here, while lane " + std::to_string(other.rank % kWarpSize) +
            " is at " + other.collective->name + " with mask " + hex(other.mask) + " (" +
            text(other.wait_site) + ")",
        thread.wait_site, true);
}
__attribute__((noinline)) void Block::not_in_mask(Thread& thread) {
  fault(thread,
        std::string(thread.collective->name) + ": mask " + hex(thread.mask) +
            " does not name the calling lane " + std::to_string(thread.rank % kWarpSize),
        thread.wait_site);
}

void Block::fault(Thread& thread, const std::string& what, Site site, bool list_waiting) {
  thread.waits_for = nullptr;
  fault_ = std::string("[") + launch->kernel_name + "] " + what + ": " +
           place_of(linear_index, thread.rank);
  if (site.line) fault_ += ", " + text(site);
  if (list_waiting) fault_ += waiting_threads();
  leave_context(thread.context, main_);
}

// --- what kernels call ---------------------------------------------------------------------------

int block_barrier(BarrierKind kind, int predicate, Site site) {
  Thread& thread = self();
  return block_of(thread).barrier(thread, kind, predicate, site);
}
void collective(uint32_t mask, void* frame, const Collective& op, Site site) {
  Thread& thread = self();
  block_of(thread).collective(thread, mask, frame, op, site);
}
void* shared_memory(const void* declaration, const char* name, size_t bytes, size_t alignment) {
  return block_of(self()).shared(declaration, name, bytes, alignment);
}
void* dynamic_shared() {
  Block& block = block_of(self());
  if (block.launch->smem == 0)
    block.fault(self(), "dynamic shared memory is used, but the launch asked for none", {"", 0});
  return block.shared(nullptr, "", 0, 1);
}
void fault(const std::string& what, Site site) {
  Thread& thread = self();
  block_of(thread).fault(thread, what, site);
}
void fence(bool whole_device) {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  if (race_hooks) race_hooks->fence(self(), whole_device);
}
void note_access(const void* address, size_t bytes, bool write) {
  if (race_hooks) race_hooks->access(address, bytes, write, __builtin_return_address(0));
}

}  // namespace needle::sim
