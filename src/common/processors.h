// The processors of this machine.
#pragma once

#include <algorithm>
#include <fstream>
#include <limits>
#include <string>
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

// How many are busy when a control group takes all the time that it may have.
inline int cores_of_group(const std::string& folder, bool version_2) {
  long long quota = 0, period = 0;  // "max", or -1: no quota
  if (version_2) {
    std::ifstream(folder + "/cpu.max") >> quota >> period;
  } else {
    std::ifstream(folder + "/cpu.cfs_quota_us") >> quota;
    std::ifstream(folder + "/cpu.cfs_period_us") >> period;
  }
  constexpr int all = std::numeric_limits<int>::max();
  return quota > 0 && period > 0 ? int(std::min<long long>((quota - 1) / period + 1, all)) : all;
}

// The processors this process may use, cut by the quotas of its control group and of those around
// it, as of a container or a batch job. source: cgroups(7), the kernel's documentation of both
// versions.
inline int usable_cores() {
  int cores = usable_processors();
  std::ifstream groups("/proc/self/cgroup");  // lines of "number:controllers:/group/in/groups"
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':'), second = line.find(":/", first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const bool version_2 = controllers == ",,";
    if (!version_2 && controllers.find(",cpu,") == std::string::npos) continue;
    const std::string root = version_2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/cpu";
    // Of a container the root alone may be there: the name is the machine's.
    for (std::string group = line.substr(second + 1);; group.resize(group.rfind('/'))) {
      cores = std::min(cores, cores_of_group(root + group, version_2));
      if (group.empty()) break;
    }
  }
  return std::max(cores, 1);
}

}  // namespace needle
