// The one place where a device's memory comes from: it counts every byte, knows who holds it, keeps
// freed blocks for reuse, and can be given a limit.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <new>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace needle {

// How large freed blocks are kept for reuse: not at all; each as it is; or as ranges of pages that
// are cut and joined at will, for a source that takes any part of what it gave back.
enum class Caching { kNone, kBlocks, kRanges };

// Where raw memory comes from: the heap on a CPU, the driver on a GPU. allocate returns nullptr
// when there is none.
struct MemorySource {
  virtual ~MemorySource() = default;
  virtual void* allocate(int64_t bytes) = 0;
  virtual void release(void* ptr, int64_t bytes) = 0;
  virtual void trim() {}  // gives back to the system what the source itself keeps
};

constexpr int kCategories = 6;  // CATEGORIES in host_memory.py

// All in bytes. live: held by arrays; reserved: taken from the source, live or cached; borrowed:
// made elsewhere (DLPack).
struct MemoryStats {
  int64_t live = 0, peak = 0, reserved = 0, peak_reserved = 0, borrowed = 0, limit = 0;
  int64_t allocations = 0;  // how many there have been
  int64_t live_arrays = 0;
  std::array<int64_t, kCategories> by_category{};
  std::array<int64_t, kCategories> by_category_at_peak{};
};

struct OutOfMemory : std::bad_alloc {
  OutOfMemory(int64_t requested_, const MemoryStats& stats_);
  // The driver's own want: `what` says of what.
  OutOfMemory(const std::string& what, const MemoryStats& stats_);
  const char* what() const noexcept override { return text.c_str(); }
  int64_t requested;
  MemoryStats stats;
  std::string text;
};

// A piece of memory that is held. Holders of one allocator form a list, the oldest first.
struct Holder {
  void* ptr = nullptr;
  int64_t nbytes = 0;
  int category = 0;
  int64_t serial = 0;  // how many allocations there had been
  int64_t site = 0;    // who asked, as needle.memory numbers it; 0: not recorded
  Holder *older = nullptr, *newer = nullptr;
};

// What happened to a holder while the log was on.
struct MemoryEvent {
  enum Kind : int { kFreed = -1, kRetagged = 0, kMade = 1 };
  Kind kind;
  int64_t serial, nbytes, site;
  int category;
};

class Allocator {
 public:
  Allocator(MemorySource& source, Caching caching);
  Allocator(const Allocator&) = delete;
  Allocator& operator=(const Allocator&) = delete;

  // Fills in the holder. Zero bytes gives a valid, unique-enough pointer. Throws OutOfMemory when
  // the source or the limit refuses.
  void hold(Holder& holder, int64_t bytes, int64_t site);
  void let_go(Holder& holder) noexcept;
  void set_category(Holder& holder, int category);
  void count_borrowed(int64_t bytes);

  // Asks Python for a site only where an allocation is at least this large.
  int64_t site_bytes() const { return site_bytes_; }
  void set_site_bytes(int64_t bytes) { site_bytes_ = bytes; }
  std::vector<MemoryEvent> holders() const;  // as if each had just been made, the oldest first
  void start_log();
  std::vector<MemoryEvent> take_log();  // and stops it; throws bad_alloc if an event found no room

  // The category of what this thread allocates from now on; gives the one before.
  static int set_current_category(int category);

  MemoryStats stats() const;
  MemoryStats reset_peak();       // the account before that
  void empty_cache();             // gives cached blocks back to the source
  void set_limit(int64_t bytes);  // of live bytes; 0 lifts it

 private:
  void* take(int64_t bytes);
  char* take_cached(int64_t size);
  void keep(char* ptr, int64_t size) noexcept;
  void forget(char* ptr, int64_t size) noexcept;
  void give_back(void* ptr, int64_t bytes) noexcept;
  void release(void* ptr, int64_t size) noexcept;
  void count(int category, int64_t bytes);
  void record(MemoryEvent::Kind kind, const Holder& holder) noexcept;
  void release_cached(int64_t reserved);

  MemorySource& source_;
  const Caching caching_;
  mutable std::mutex mutex_;
  MemoryStats stats_;
  int64_t peak_serial_ = 0;  // of the holder that made the peak, which may get its category next
  int64_t site_bytes_ = INT64_MAX;
  Holder *oldest_ = nullptr, *newest_ = nullptr;
  bool logging_ = false, log_has_gap_ = false;
  std::vector<MemoryEvent> log_;
  std::map<char*, int64_t> cached_;                     // what is kept, by where it is
  std::set<std::pair<int64_t, char*>> cached_by_size_;  // the same
  int64_t cached_bytes_ = 0;
  bool scarce_ = false;  // the source had no more when it was last asked
  int64_t top_ = 0;      // the most bytes ever in blocks that were in use
  std::unordered_map<void*, int64_t> block_bytes_;  // real sizes of large blocks in use
};

}  // namespace needle
