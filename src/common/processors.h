// The processors of this machine.
#pragma once

#include <algorithm>
#include <cstdio>
#include <thread>
#ifdef __linux__
#include <sched.h>
#endif

namespace needle {

// How many this process may use.
inline int usable_processors() {
#ifdef __linux__  // elsewhere a process has no mask of them
  cpu_set_t usable;
  if (sched_getaffinity(0, sizeof(usable), &usable) == 0) return CPU_COUNT(&usable);
#endif
  return std::max(1, int(std::thread::hardware_concurrency()));
}

// The same, cut by a container's CPU quota.
inline int usable_cores() {
  int cores = usable_processors();
  if (std::FILE* file = std::fopen("/sys/fs/cgroup/cpu.max", "r")) {
    long long quota = 0, period = 0;
    if (std::fscanf(file, "%lld %lld", &quota, &period) == 2 && quota > 0 && period > 0)
      cores = std::min<int>(cores, int((quota + period - 1) / period));
    std::fclose(file);
  }
  return std::max(cores, 1);
}

}  // namespace needle
