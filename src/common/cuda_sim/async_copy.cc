// cp.async: copies that are under way until their thread waits for them. NEEDLE_SIM_CP_ASYNC=late
// (the default) makes them as late as the hardware may, so that a missing wait leaves the old
// bytes; =early as soon as it may.
#include <string>
#include <vector>

#include "scheduler.h"

namespace needle::sim {

struct Copy {
  void* to;
  const void* from;
  int bytes, source_bytes;
  bool moved;             // already
  const void* issued_at;  // code address, for the race detector
};

struct CopyQueue {
  std::vector<std::vector<Copy>> groups;  // committed, oldest first
  std::vector<Copy> open;
};

namespace {

void move(const Copy& copy) {
  if (copy.source_bytes > 0)
    std::memcpy(copy.to, copy.from, static_cast<size_t>(copy.source_bytes));
  std::memset(static_cast<char*>(copy.to) + copy.source_bytes, 0,
              static_cast<size_t>(copy.bytes - copy.source_bytes));
}

void note_source(const Copy& copy) {
  if (copy.source_bytes > 0)
    race_hooks->access(copy.from, static_cast<size_t>(copy.source_bytes), false, copy.issued_at);
}

void finish(const Copy& copy) {
  if (race_hooks) {
    note_source(copy);
    race_hooks->end_copy(copy.to, static_cast<size_t>(copy.bytes), copy.issued_at);
  }
  if (!copy.moved) move(copy);
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
  if (!aligned(shared) || !aligned(global))
    fault("misaligned address: cp.async of " + std::to_string(bytes) + " bytes", site);
  if (source_bytes < 0 || source_bytes > bytes)
    fault("cp.async of " + std::to_string(source_bytes) + " source bytes into " +
              std::to_string(bytes),
          site);
  Block& block = *static_cast<Block*>(self().block);
  if (block.beside_shared(shared, static_cast<size_t>(bytes)))
    fault("cp.async of " + std::to_string(bytes) + " bytes to " + block.describe(shared), site);
  const bool early = block.launch->copies_are_early;
  const Copy copy{shared, global, bytes, source_bytes, early, __builtin_return_address(0)};
  if (race_hooks) {
    note_source(copy);
    race_hooks->begin_copy(copy.to, static_cast<size_t>(copy.bytes), copy.issued_at);
  }
  if (copy.moved) move(copy);
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
    for (const Copy& copy : *group) finish(copy);
  queue.groups.erase(queue.groups.begin(), end);
}

void drop_async_copies(Thread& thread) {
  if (!thread.copies) return;
  thread.copies->groups.clear();
  thread.copies->open.clear();
}

}  // namespace needle::sim
