// The CPU backend's one thread pool: passive waits after a short spin, a share of the work for each
// thread, taken over by the others where it is late.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "integers.h"

namespace needle::cpu {

// Size of the pool, the caller included; set from NEEDLE_NUM_THREADS, else the cores this process
// may use. Where the system gives fewer threads the pool does with those.
int num_threads();
void set_num_threads(int64_t n);

// Runs task(i) for 0 <= i < n_tasks, each once, on the pool; returns when all are done. The first
// exception is rethrown here. Called from inside a task it runs in the calling thread.
void parallel_for(int64_t n_tasks, const std::function<void(int64_t)>& task);

// Splits 0 .. n into pieces of `grain` (the last shorter), a split that does not depend on the
// number of threads, so that per-piece partial results are reproducible. One piece runs in the
// caller without touching the pool.
template <class F>
void parallel_ranges(int64_t n, int64_t grain, F&& body) {
  const int64_t pieces = ceil_div(n, grain);
  if (pieces <= 1) {
    if (n > 0) body(int64_t(0), n);
    return;
  }
  parallel_for(pieces, [&](int64_t i) { body(i * grain, i + 1 == pieces ? n : (i + 1) * grain); });
}

// The calling thread's Workspace, a type of fixed size: made at its first use and left as it was at
// the last; pages that nothing touches cost nothing.
template <class Workspace>
Workspace& of_this_thread() {
  static thread_local const std::unique_ptr<Workspace> mine(new Workspace);
  return *mine;
}

}  // namespace needle::cpu
