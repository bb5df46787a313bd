// The processors of this machine.
#pragma once

#include <algorithm>
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

}  // namespace needle
