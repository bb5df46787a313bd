// From a launch to its blocks: the checks that the driver makes, and a pool of workers.
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <system_error>
#include <thread>

#include "../machine.h"
#include "faults.h"
#include "scheduler.h"

namespace needle::sim {

std::recursive_mutex host_mutex;

namespace {

std::map<const void*, size_t>& opted_in() {
  static std::map<const void*, size_t> bytes;
  return bytes;
}

size_t opted_in_bytes(const void* function) {
  const std::lock_guard<std::recursive_mutex> lock(host_mutex);
  const auto found = opted_in().find(function);
  return found == opted_in().end() ? 0 : found->second;
}

// A grid that is being run. Workers draw blocks from `next` until there are none or one has
// faulted.
struct Grid {
  const Launch& launch;
  OrderOption order;
  uint64_t n_blocks;
  std::atomic<uint64_t> next{0};
  std::mutex fault_mutex{};
  std::string fault{};

  uint64_t block_at(uint64_t i) const {
    if (order.order == Order::kReverse) return n_blocks - 1 - i;
    if (order.order == Order::kForward) return i;
    uint64_t stride = (order.seed * 2654435761u + 1) % n_blocks | 1;
    while (std::gcd(stride, n_blocks) != 1) stride += 2;
    return (stride % n_blocks * i + order.seed) % n_blocks;
  }

  void work(Block& block) {
    block.begin_launch();
    for (uint64_t i; (i = next++) < n_blocks;) {
      std::string text = block.run(launch, block_at(i), order);
      if (text.empty()) continue;
      next = n_blocks;
      std::lock_guard<std::mutex> lock(fault_mutex);
      if (fault.empty()) fault = std::move(text);
    }
  }
};

// A worker's fibers never leave it, since they are found by its index.
Block& block_of_worker(int worker) {
  static std::unique_ptr<Block> blocks[kMaxWorkers];
  if (!blocks[worker]) blocks[worker] = std::make_unique<Block>(worker);
  return *blocks[worker];
}

// Threads that sleep until there is a grid. The caller works too and does not wait for those that
// woke too late.
class Pool {
 public:
  explicit Pool(int helpers) {
    try {
      for (int i = 1; i <= helpers; ++i) {
        Block& block = block_of_worker(i);
        std::thread([this, &block] { serve(block); }).detach();
      }
    } catch (const std::system_error&) {  // no more threads to be had
    }
  }

  void run(Grid& grid) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      grid_ = &grid;
      ++generation_;
    }
    wake_.notify_all();
    grid.work(block_of_worker(0));
    std::unique_lock<std::mutex> lock(mutex_);
    grid_ = nullptr;
    done_.wait(lock, [&] { return busy_ == 0; });
  }

 private:
  void serve(Block& block) {
    prepare_thread_for_faults();
    uint64_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return grid_ && generation_ != seen; });
      seen = generation_;
      Grid& grid = *grid_;
      ++busy_;
      lock.unlock();
      grid.work(block);
      lock.lock();
      if (--busy_ == 0) done_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  Grid* grid_ = nullptr;
  uint64_t generation_ = 0;
  int busy_ = 0;
};

// Cores this process may use, or NEEDLE_NUM_THREADS. Sanitizers see one worker.
int worker_count() {
  if (NEEDLE_ASAN || race_hooks) return 1;
  const int wanted = wanted_workers();
  return std::clamp(wanted ? wanted : usable_cores(), 1, kMaxWorkers);
}

Pool* pool = nullptr;

// Held across fork, so that a child never starts inside somebody's grid. The child makes the mutex
// anew, whose owner is a thread of its parent, and the pool. Registered as the module is loaded:
// the last registered is called first, and others take their mutexes before this one.
[[maybe_unused]] const int registered =
    pthread_atfork([] { host_mutex.lock(); }, [] { host_mutex.unlock(); },
                   [] {
                     new (&host_mutex) std::recursive_mutex;
                     pool = nullptr;
                   });

constexpr uint64_t kThreadsWorthWaking = 1024;

}  // namespace

std::string check_launch(const Launch& launch) {
  // What the kernel will ask for, within which nothing can be thrown.
  order_option(), async_copies_are_early(), compute_capability(), multiprocessors(), memory_mib(),
      wanted_workers();
  const dim3 grid = launch.grid, block = launch.block;
  const std::string refused = std::string("[") + launch.kernel_name + "] launch refused: ";
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || block.x == 0 || block.y == 0 || block.z == 0)
    return refused + "empty grid " + text(grid) + " or block " + text(block);
  if (grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535)
    return refused + "grid " + text(grid) + " (at most 2147483647, 65535, 65535)";
  const uint64_t threads = uint64_t(block.x) * block.y * block.z;
  if (block.x > 1024 || block.y > 1024 || block.z > 64 || threads > kMaxBlockThreads)
    return refused + "block " + text(block) + " has " + std::to_string(threads) +
           " threads (at most 1024; per axis 1024, 1024, 64)";
  const size_t limit = std::max(opted_in_bytes(launch.function), kSharedBytesDefault);
  if (launch.smem > limit)
    return refused + std::to_string(launch.smem) + " bytes of dynamic shared memory (at most " +
           std::to_string(limit) +
           (limit == kSharedBytesDefault ? "; allow_dynamic_shared asks for more)"
                                         : ", as asked for)");
  return "";
}

std::string run_grid(Launch launch) {
  reserve_stacks();
  launch.opted_in = opted_in_bytes(launch.function);
  launch.copies_are_early = async_copies_are_early();
  const OrderOption order = order_option();
  const std::lock_guard<std::recursive_mutex> lock(host_mutex);
  prepare_thread_for_faults();
  if (race_hooks) race_hooks->begin_launch();

  const uint64_t n_blocks = uint64_t(launch.grid.x) * launch.grid.y * launch.grid.z;
  const uint64_t n_threads = n_blocks * launch.block.x * launch.block.y * launch.block.z;
  Grid grid{launch, order, n_blocks};
  const int workers = worker_count();
  if (workers == 1 || n_blocks == 1 || order.reproducible || n_threads < kThreadsWorthWaking) {
    grid.work(block_of_worker(0));
  } else {
    if (!pool) pool = new Pool(workers - 1);  // lives as long as the process: its threads never end
    pool->run(grid);
  }
  return std::move(grid.fault);
}

}  // namespace needle::sim

cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute, int value) {
  using namespace needle::sim;
  if (value < 0 || static_cast<size_t>(value) > max_shared_bytes())
    return remember(cudaErrorInvalidValue);
  const std::lock_guard<std::recursive_mutex> lock(host_mutex);
  opted_in()[function] = static_cast<size_t>(value);
  return cudaSuccess;
}
