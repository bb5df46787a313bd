// The CPU backend's pool alone, so that a sanitizer sees every access. Prints ok.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "parallel.h"

using namespace needle::cpu;

namespace {

// What a job writes, its caller reads without a lock: the pool must order the two.
bool each_task_runs_once(int64_t n) {
  std::vector<int> runs(size_t(n), 0);
  parallel_for(n, [&](int64_t i) { ++runs[size_t(i)]; });
  for (int count : runs)
    if (count != 1) return false;
  return true;
}

void ranges() {
  for (int64_t n : {0, 1, 99, 100, 101, 1234}) {
    std::vector<int> covered(size_t(n), 0);
    parallel_ranges(n, 100, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) ++covered[size_t(i)];
    });
    for (int count : covered) CHECK(count == 1);
  }
}

void exceptions() {
  for (int repeat = 0; repeat < 50; ++repeat) {
    std::string caught;
    try {
      parallel_for(64, [](int64_t i) {
        if (i % 7 == 3) throw std::runtime_error("task failed");
      });
    } catch (const std::runtime_error& error) {
      caught = error.what();
    }
    CHECK(caught == "task failed");
    CHECK(each_task_runs_once(64));
  }
}

void nested() {
  std::atomic<int> total{0};
  parallel_for(8, [&](int64_t) { parallel_for(8, [&](int64_t) { ++total; }); });
  CHECK(total == 64);
}

// The rest of the share of a thread that is held up is taken over: here, until that has been done.
void takes_over() {
  std::atomic<int> others{0};
  bool seen = false;
  parallel_for(64, [&](int64_t i) {
    if (i != 16) return void(++others);
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (!(seen = others == 63) && std::chrono::steady_clock::now() < end)
      std::this_thread::yield();
  });
  CHECK(seen);
}

// Callers that find the pool taken run their job themselves; its size changes under them.
void many_callers() {
  std::atomic<int> running{4};
  std::atomic<bool> right{true};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller)
    callers.emplace_back([&] {
      for (int repeat = 0; repeat < 1000; ++repeat)
        if (!each_task_runs_once(1 + repeat % 4)) right = false;
      --running;
    });
  for (int n = 2; running > 0; n ^= 1) set_num_threads(n);
  for (auto& caller : callers) caller.join();
  CHECK(right);
  set_num_threads(4);
}

void forked() {
  CHECK(each_task_runs_once(100));
  const pid_t child = fork();
  if (child == 0) std::_Exit(each_task_runs_once(100) ? 0 : 1);
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK(each_task_runs_once(100));
}

}  // namespace

int main(int argc, char** argv) {
  set_num_threads(4);
  for (int repeat = 0; repeat < 200; ++repeat) CHECK(each_task_runs_once(repeat));
  ranges();
  exceptions();
  nested();
  takes_over();
  many_callers();
  if (argc < 2 || std::string(argv[1]) != "no-fork") forked();
  std::puts("ok");
}
