// What this process may have of its machine: of the processors and of the memory.
#pragma once

#include <cstdint>

namespace needle {

// How many processors it may run on.
int usable_processors();

// The same, cut by the quotas of its control group and of those around it, as of a container or a
// batch job.
int usable_cores();

// In bytes; 0: unknown. total: the least of what the machine has and the control groups may have.
// free: what can be had of it now, without others being swapped out. most: with that.
struct Memory {
  int64_t total = 0, free = 0, most = 0;
};
Memory usable_memory();

}  // namespace needle
