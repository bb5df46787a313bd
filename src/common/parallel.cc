#include "parallel.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "machine.h"

namespace needle::cpu {
namespace {

// Long enough to catch the next job of a busy stretch without the delay of waking a sleeping
// thread, short enough to cost little where another process wants the core.
constexpr auto kSpin = std::chrono::microseconds(200);

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

template <class Done>
bool spin_until(Done done) {
  const auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 16; ++i) {
      if (done()) return true;
      relax();
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

// A thread's share of the tasks is the same part of each job, so that what it wrote in one is near
// it in the next: processors are slow at passing cache lines from core to core, and slower from one
// group of cores to another. Whoever is done with its own share takes from the others'.
struct alignas(64) Share {
  std::atomic<int64_t> next;
  int64_t end;
};

struct Job {
  const std::function<void(int64_t)>* task;
  int64_t n_tasks;
  std::atomic<bool> failed{false};
  std::exception_ptr error{};  // written once, by whoever sets `failed`
};

thread_local bool inside_task = false;

// Workers sleep on `wake_`. A job lives on its caller's stack: a worker may touch it only between
// enter and leave, which the caller waits for.
class Pool {
 public:
  explicit Pool(int threads) : threads_(threads), shares_(new Share[size_t(threads)]) {
    try {
      workers_.reserve(size_t(threads));
      for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
    } catch (const std::system_error&) {  // no more threads to be had
    } catch (const std::bad_alloc&) {     // no memory for one
    }
  }
  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
      generation_.fetch_add(1);
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  int threads() const { return threads_; }

  void run(Job& job) {
    const auto helpers = std::min(int64_t(workers_.size()), job.n_tasks - 1);
    for (int i = 0; i < threads_; ++i) {  // nobody is at work
      shares_[i].next.store(share_start(job.n_tasks, i), std::memory_order_relaxed);
      shares_[i].end = share_start(job.n_tasks, i + 1);
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job_ = &job;
      generation_.fetch_add(1, std::memory_order_release);
    }
    for (int64_t i = 0; i < helpers; ++i) wake_.notify_one();
    run_tasks(job, 0);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job_ = nullptr;  // nobody enters any more
    }
    const auto idle = [this] { return active_.load(std::memory_order_acquire) == 0; };
    if (spin_until(idle)) return;
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, idle);
  }

  std::mutex busy;  // held by the caller whose job runs

 private:
  int64_t share_start(int64_t n_tasks, int thread) const {
    return n_tasks / threads_ * thread + n_tasks % threads_ * thread / threads_;
  }

  void run_tasks(Job& job, int thread) {
    inside_task = true;
    for (int i = 0; i < threads_; ++i) {
      Share& share = shares_[(thread + i) % threads_];
      while (share.next.load(std::memory_order_relaxed) < share.end) {
        const int64_t task = share.next.fetch_add(1, std::memory_order_relaxed);
        if (task >= share.end) break;
        if (job.failed.load(std::memory_order_relaxed)) continue;
        try {
          (*job.task)(task);
        } catch (...) {
          if (!job.failed.exchange(true)) job.error = std::current_exception();
        }
      }
    }
    inside_task = false;
  }

  void work(int thread) {
    uint64_t seen = 0;
    for (;;) {
      const auto fresh = [&] { return generation_.load(std::memory_order_acquire) != seen; };
      spin_until(fresh);
      Job* job;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, fresh);
        if (stop_) return;
        seen = generation_.load(std::memory_order_relaxed);
        job = job_;
        if (job == nullptr) continue;
        active_.fetch_add(1, std::memory_order_relaxed);
      }
      run_tasks(*job, thread);
      if (active_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        std::lock_guard<std::mutex> lock(mutex_);  // the caller: before its check, or asleep
        done_.notify_one();
      }
    }
  }

  const int threads_;
  const std::unique_ptr<Share[]> shares_;  // before the workers, who read it
  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::atomic<uint64_t> generation_{0};
  std::atomic<int> active_{0};
  Job* job_ = nullptr;
  bool stop_ = false;
};

constexpr int kMaxThreads = 4096;

int checked_threads(const char* op, const std::string& text) {
  char* end = nullptr;
  const long n = std::strtol(text.c_str(), &end, 10);
  if (text.empty() || *end != '\0' || n < 1 || n > kMaxThreads)
    throw std::invalid_argument(std::string("[") + op + "] no such number of threads: " + text +
                                " (1 to " + std::to_string(kMaxThreads) + ")");
  return int(n);
}

int default_threads() {
  const char* text = std::getenv("NEEDLE_NUM_THREADS");
  return text && *text ? checked_threads("NEEDLE_NUM_THREADS", text) : usable_cores();
}

using PoolPointer = std::shared_ptr<Pool>;
std::mutex pool_mutex;
std::atomic<int> wanted_threads{0};

// Whoever runs a job holds the pool, so that a change of size lets it finish. Never destroyed at
// exit: its threads may be asleep while statics go away.
PoolPointer& the_pool() {
  static PoolPointer* pool = new PoolPointer;
  return *pool;
}

// A forked child has no workers and perhaps a locked mutex: it starts afresh.
void forget_pool() {
  new (&pool_mutex) std::mutex;
  new (&the_pool()) PoolPointer;
  inside_task = false;
}

PoolPointer get_pool() {
  std::lock_guard<std::mutex> lock(pool_mutex);
  PoolPointer& pool = the_pool();
  if (pool == nullptr) {
    static const int registered = pthread_atfork(nullptr, nullptr, forget_pool);
    (void)registered;
    pool = std::make_shared<Pool>(num_threads());
  }
  return pool;
}

}  // namespace

int num_threads() {
  int n = wanted_threads.load();
  if (n == 0) {
    n = default_threads();
    wanted_threads.store(n);
  }
  return n;
}

void set_num_threads(int64_t wanted) {
  const int n = checked_threads("set_num_threads", std::to_string(wanted));
  PoolPointer old;  // joined after the lock is gone, here or by whoever runs a job on it
  std::lock_guard<std::mutex> lock(pool_mutex);
  wanted_threads.store(n);
  if (the_pool() != nullptr && the_pool()->threads() != n) old.swap(the_pool());
}

void parallel_for(int64_t n_tasks, const std::function<void(int64_t)>& task) {
  if (n_tasks <= 0) return;
  if (n_tasks > 1 && !inside_task && num_threads() > 1) {
    const PoolPointer pool = get_pool();
    std::unique_lock<std::mutex> busy(pool->busy, std::try_to_lock);
    if (busy.owns_lock()) {  // else another thread's job has the workers: run here
      Job job{&task, n_tasks};
      pool->run(job);
      if (job.error) std::rethrow_exception(job.error);
      return;
    }
  }
  for (int64_t i = 0; i < n_tasks; ++i) task(i);
}

}  // namespace needle::cpu
