// cp.async: copies that are under way until their thread waits for them. NEEDLE_SIM_CP_ASYNC=late
// (the default) makes them as late as the hardware may, so that a missing wait leaves the old
// bytes; =early as soon as it may.
#include <algorithm>
#include <string>
#include <vector>

#include "scheduler.h"

namespace needle::sim {

struct Copy {
  void* to;
  const void* from;
  int bytes, source_bytes;
  const void* issued_at;  // code address, for the race detector
};

struct CopyQueue {
  std::vector<std::vector<Copy>> groups;  // committed, oldest first
  std::vector<Copy> open;
};

namespace {

void perform(const Copy& copy) {
  const auto note = [&](const void* address, int bytes, bool write) {
    if (race_hooks) race_hooks->access(address, static_cast<size_t>(bytes), write, copy.issued_at);
  };
  note(copy.to, copy.bytes, true);
  if (copy.source_bytes > 0) {
    note(copy.from, copy.source_bytes, false);
    std::memcpy(copy.to, copy.from, static_cast<size_t>(copy.source_bytes));
  }
  std::memset(static_cast<char*>(copy.to) + copy.source_bytes, 0,
              static_cast<size_t>(copy.bytes - copy.source_bytes));
}

CopyQueue& queue_of(Thread& thread) {
  if (!thread.copies)
    thread.copies = new CopyQueue;  // stays with the stack, which stays with the process
  return *thread.copies;
}

}  // namespace

void async_copy(void* shared, const void* global, int bytes, int source_bytes, Site site) {
  const auto aligned = [&](const void* p) {
    return reinterpret_cast<uintptr_t>(p) % static_cast<size_t>(bytes) == 0;
  };
  if (!aligned(shared) || (source_bytes > 0 && !aligned(global)))
    fault("misaligned address: cp.async of " + std::to_string(bytes) + " bytes", site);
  if (source_bytes < 0 || source_bytes > bytes)
    fault("cp.async of " + std::to_string(source_bytes) + " source bytes into " +
              std::to_string(bytes),
          site);
  const Copy copy{shared, global, bytes, source_bytes, __builtin_return_address(0)};
  if (async_copies_are_early())
    perform(copy);
  else
    queue_of(self()).open.push_back(copy);
}

void async_commit() {
  CopyQueue& queue = queue_of(self());
  queue.groups.push_back(std::move(queue.open));
  queue.open.clear();
}

void async_wait(int groups_left) {
  CopyQueue& queue = queue_of(self());
  const size_t left = static_cast<size_t>(groups_left);
  if (queue.groups.size() <= left) return;
  const auto end = queue.groups.end() - groups_left;
  for (auto group = queue.groups.begin(); group != end; ++group)
    for (const Copy& copy : *group) perform(copy);
  queue.groups.erase(queue.groups.begin(), end);
}

void drop_async_copies(Thread& thread) {
  if (!thread.copies) return;
  thread.copies->groups.clear();
  thread.copies->open.clear();
}

bool async_copy_under_way(const Block& block, const void* address) {
  const auto writes = [address](const Copy& copy) {
    const char* to = static_cast<const char*>(copy.to);
    return address >= to && address < to + copy.bytes;
  };
  for (const Warp& warp : block.warps)
    for (const Thread* thread : warp.lane) {
      if (!thread || !thread->copies) continue;
      const CopyQueue& queue = *thread->copies;
      if (std::any_of(queue.open.begin(), queue.open.end(), writes)) return true;
      for (const auto& group : queue.groups)
        if (std::any_of(group.begin(), group.end(), writes)) return true;
    }
  return false;
}

}  // namespace needle::sim
