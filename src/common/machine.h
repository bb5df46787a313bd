// What this process may have of its machine: of the processors and of the memory.
// source: cgroups(7), and the kernel's documentation of control groups, versions 2 and 1; proc(5).
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <thread>
#ifdef __linux__
#include <sched.h>
#endif

namespace needle {

// Calls f(folder, version 2?) for the control group that the process is in, as far as it has this
// controller, and for those around it.
template <class F>
void for_control_groups(const std::string& controller, F&& f) {
  std::ifstream groups("/proc/self/cgroup");  // lines of "number:controllers:/group/in/groups"
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':'), second = line.find(":/", first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const bool version_2 = controllers == ",,";
    if (!version_2 && controllers.find("," + controller + ",") == std::string::npos) continue;
    const std::string root = version_2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/" + controller;
    // In a container the root alone may be there: the name is the machine's.
    for (std::string group = line.substr(second + 1);; group.resize(group.rfind('/'))) {
      f(root + group + "/", version_2);
      if (group.empty()) break;
    }
  }
}

// The number that a file begins with; -1: none, as where it says "max".
inline int64_t number_in(const std::string& path) {
  int64_t found = -1;
  return std::ifstream(path) >> found ? found : -1;
}

// The last number of each line by its first word.
inline std::map<std::string, int64_t> numbers_in(const std::string& path) {
  std::map<std::string, int64_t> found;
  std::ifstream file(path);
  for (std::string line, name, word; std::getline(file, line);) {
    std::istringstream words(line);
    for (words >> name; words >> word;) {
      char* end = nullptr;
      const int64_t number = std::strtoll(word.c_str(), &end, 10);
      if (*end == '\0') found[name] = number;
    }
  }
  return found;
}

// How many processors it may run on.
inline int usable_processors() {
#ifdef __linux__  // elsewhere a process has no mask of them
  cpu_set_t usable;
  if (sched_getaffinity(0, sizeof(usable), &usable) == 0) return CPU_COUNT(&usable);
#endif
  return std::max(1, int(std::thread::hardware_concurrency()));
}

// The same, cut by the quotas of its control group and of those around it, as of a container or a
// batch job.
inline int usable_cores() {
  int64_t cores = usable_processors();
  for_control_groups("cpu", [&](const std::string& folder, bool version_2) {
    int64_t quota = -1, period = -1;  // of the CPU's time, together
    if (version_2) {
      std::ifstream(folder + "cpu.max") >> quota >> period;
    } else {
      quota = number_in(folder + "cpu.cfs_quota_us");
      period = number_in(folder + "cpu.cfs_period_us");
    }
    if (quota > 0 && period > 0) cores = std::min(cores, (quota - 1) / period + 1);
  });
  return int(std::max<int64_t>(cores, 1));
}

// In bytes; 0: unknown. total: the least of what the machine has and the control groups may have.
// free: what can be had of it now, without anything being swapped out. most: with that.
struct Memory {
  int64_t total = 0, free = 0, most = 0;
};

inline Memory usable_memory() {
  auto machine = numbers_in("/proc/meminfo");             // in KiB
  auto zfs = numbers_in("/proc/spl/kstat/zfs/arcstats");  // whose files MemAvailable leaves out
  const int64_t all = int64_t(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  const int64_t swap = machine["SwapFree:"] << 10;
  Memory found{std::max<int64_t>(all, 0), machine["MemAvailable:"] << 10, 0};
  if (found.free > 0)
    found.most = found.free + swap + std::max<int64_t>(zfs["size"] - zfs["c_min"], 0);
  const auto cut = [](int64_t& bytes, int64_t most) {
    bytes = std::max<int64_t>(bytes > 0 ? std::min(bytes, most) : most, 1);
  };
  for_control_groups("memory", [&](const std::string& folder, bool version_2) {
    const auto file = [&](const char* in_2, const char* in_1) {
      return folder + "memory." + (version_2 ? in_2 : in_1);
    };
    int64_t limit = number_in(file("max", "limit_in_bytes"));
    const int64_t high = number_in(folder + "memory.high");  // beyond which a process hardly moves
    if (high >= 0) limit = limit < 0 ? high : std::min(limit, high);
    const int64_t used = number_in(file("current", "usage_in_bytes"));
    if (limit < 0 || (all > 0 && limit >= all)) return;
    cut(found.total, limit);
    if (used < 0) return;
    auto parts = numbers_in(file("stat", "stat"));
    const std::string sum = version_2 ? "" : "total_";  // with the groups inside
    const int64_t of_files = parts[sum + "inactive_file"] + parts[sum + "active_file"];
    const int64_t free = limit - used + of_files + parts["slab_reclaimable"];
    const int64_t swap_most = number_in(folder + "memory.swap.max");
    const int64_t swap_left = swap_most - number_in(folder + "memory.swap.current");
    cut(found.free, free);
    cut(found.most, free + (swap_most < 0 ? swap : std::clamp<int64_t>(swap_left, 0, swap)));
  });
  return found;
}

}  // namespace needle
