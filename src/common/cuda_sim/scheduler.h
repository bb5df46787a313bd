// One worker runs one block at a time: its CUDA threads take turns on fibers. Internal to the
// runtime.
#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "fiber.h"
#include "launch_sim.h"
#include "thread.h"

namespace needle::sim {

constexpr size_t kSharedBytesDefault = 48 * 1024;
size_t max_shared_bytes();  // after opting in
std::string text(dim3 v);   // "(x,y,z)"

struct Warp {
  uint32_t live = 0;     // lanes that have not exited
  uint32_t waiting = 0;  // lanes in a collective
  Thread* lane[kWarpSize] = {};
};

struct SharedVariable {
  const void* declaration;
  const char* name;
  char* address;
  size_t bytes;
};

// The blocks of a worker follow each other in one object: fibers, arena and lists stay.
class Block : public BlockIndex {
 public:
  explicit Block(int worker);

  void begin_launch() { first_of_launch_ = true; }

  // Runs block `index` of the launch. Returns the text of a fault, empty if there was none.
  std::string run(const Launch& launch, uint64_t index, const OrderOption& order);

  int barrier(Thread& thread, BarrierKind kind, int predicate, Site site);
  void collective(Thread& thread, uint32_t mask, void* frame, const Collective& op, Site site);
  char* shared(const void* declaration, const char* name, size_t bytes, size_t alignment);
  [[noreturn]] void fault(Thread& thread, const std::string& what, Site site,
                          bool list_waiting = false);

  // For messages: where a thread is, what lies at an address.
  std::string place_of(uint64_t block, unsigned rank) const;
  std::string describe(const void* address) const;
  bool in_shared(const void* address) const;
  bool beside_shared(const void* address, size_t bytes) const;  // in no variable, or not wholly
  char* arena() const { return arena_; }

  const Launch* launch = nullptr;
  uint64_t linear_index = 0;
  uint32_t epoch = 0;  // block barriers completed
  Warp warps[kMaxBlockThreads / kWarpSize];

 private:
  static void runner();
  void start_thread(Thread& thread);
  void exit_thread(Thread& thread);
  Thread* next(Thread* idle_runner);
  Thread* take_fiber();
  void make_ready(Thread* thread);
  void suspend(Thread& thread);
  void complete_barrier();
  bool complete_collective(Warp& warp, uint32_t mask, Thread& any);
  [[noreturn]] void deadlock(Thread& thread);
  [[noreturn]] void divergent_barrier(Thread& thread, BarrierKind kind, Site site);
  [[noreturn]] void divergent_warp(Thread& thread, const Thread& other);
  [[noreturn]] void not_in_mask(Thread& thread);
  std::string waiting_threads() const;
  void open_arena(size_t bytes);
  void leave_arena();
  std::string written_outside_shared() const;  // a fault's text, empty if there was none
  uint64_t random();

  const int worker_;
  OrderOption order_;
  uint64_t random_state_ = 0;
  unsigned n_threads_ = 0, started_ = 0, live_ = 0;
  std::vector<unsigned> start_order_;  // for kRandom

  // A ring of threads that may go on.
  Thread* ready_[kMaxBlockThreads];
  unsigned ready_head_ = 0, ready_count_ = 0;

  Thread* at_barrier_[kMaxBlockThreads];
  unsigned n_at_barrier_ = 0;
  BarrierKind barrier_kind_ = BarrierKind::kPlain;
  Site barrier_site_{};
  unsigned barrier_true_ = 0, barrier_arrived_ = 0;
  int barrier_result_ = 0;

  Thread* idle_[kMaxBlockThreads];  // parked runners
  unsigned n_idle_ = 0, n_made_ = 0;
  Context main_{};

  std::vector<SharedVariable> shared_;
  char* arena_ = nullptr;
  size_t arena_used_ = 0, arena_open_ = 0, arena_filled_ = 0, shared_bytes_ = 0;
  bool first_of_launch_ = true;
  std::string fault_;
};

// Drops copies that nobody waited for; the stack's next thread starts with none.
void drop_async_copies(Thread& thread);

// Held by the host thread that runs a grid or what waits in a stream; recursive, since work that
// waits for another stream runs that stream's work.
extern std::recursive_mutex host_mutex;

// What the race detector, where it is linked, wants to hear.
struct RaceHooks {
  void (*begin_launch)();
  void (*begin_block)();
  void (*sync_warp)(Thread& thread, uint32_t mask);        // once per __syncwarp, by its last lane
  void (*fence)(const Thread& thread, bool whole_device);  // or of the block alone
  void (*access)(const void* address, size_t bytes, bool write, const void* pc);
  // Between the two, a cp.async may write at any time.
  void (*begin_copy)(const void* to, size_t bytes, const void* pc);
  void (*end_copy)(const void* to, size_t bytes, const void* pc);
};
extern const RaceHooks* race_hooks;

// "a.cu:12", or module and offset where there is no debug information.
std::string describe_code_address(const void* pc);

}  // namespace needle::sim
