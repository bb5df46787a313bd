// Policy: small blocks go straight to the source, whose own caching is good at them. Large blocks
// are kept when freed, because fresh pages cost more than most kernels: as ranges of pages, cut to
// the request and joined with their neighbours when free again; where the source wants its blocks
// back whole, one serves requests down to 7/8 of its size. What is reserved stays close to the peak
// of what was ever live: a request that would carry it past that first gives back what is kept. And
// when the source had no more, what is freed goes back to it, until it gives again: others are
// short, too.
#include "allocator.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "asan.h"
#include "integers.h"

namespace needle {
namespace {

constexpr int64_t kLarge = 256 << 10;         // bytes from which blocks are cached
const int64_t kPage = sysconf(_SC_PAGESIZE);  // 4 KiB; up to 64 on ARM
// How far reserved may exceed the peak of live, beside 1/32 of it.
constexpr int64_t kHeadroom = 8 << 20;

int64_t block_size(int64_t bytes) {
  if (NEEDLE_ASAN) return std::max<int64_t>(bytes, 1);  // which watches what lies behind it
  return bytes >= kLarge ? round_up(bytes, kPage) : round_up(std::max<int64_t>(bytes, 1), 64);
}

std::string readable(int64_t bytes) {
  char text[64];
  if (bytes >= (int64_t(1) << 30))
    std::snprintf(text, sizeof(text), "%.2f GiB", double(bytes) / double(1 << 30));
  else if (bytes >= (1 << 20))
    std::snprintf(text, sizeof(text), "%.2f MiB", double(bytes) / double(1 << 20));
  else
    std::snprintf(text, sizeof(text), "%lld bytes", static_cast<long long>(bytes));
  return text;
}

// Of this thread: one may be in its backward while another is in its forward. A module of kernels
// has one allocator.
thread_local int current_category = 0;

}  // namespace

OutOfMemory::OutOfMemory(int64_t requested_, const MemoryStats& stats_)
    : OutOfMemory("out of memory: " + readable(requested_) + " requested", stats_) {
  requested = requested_;
}

OutOfMemory::OutOfMemory(const std::string& what, const MemoryStats& stats_)
    : requested(0), stats(stats_) {
  text = what + ", " + readable(stats.live) + " live, " + readable(stats.reserved) + " reserved";
  if (stats.limit > 0) text += ", limit " + readable(stats.limit);
}

// Held across fork: a child has none but the forking thread, so another that was inside would never
// come out.
Allocator::Allocator(MemorySource& source, Caching caching)
    : source_(source), caching_(NEEDLE_ASAN ? Caching::kNone : caching) {
  static Allocator* const only = this;
  pthread_atfork([] { only->mutex_.lock(); }, [] { only->mutex_.unlock(); },
                 [] { only->mutex_.unlock(); });
}

void Allocator::hold(Holder& holder, int64_t bytes, int64_t site) {
  std::lock_guard<std::mutex> lock(mutex_);
  holder.ptr = take(bytes);
  holder.nbytes = bytes;
  holder.category = current_category;
  holder.serial = ++stats_.allocations;
  holder.site = site;
  holder.older = newest_;
  (newest_ ? newest_->newer : oldest_) = &holder;
  newest_ = &holder;
  ++stats_.live_arrays;
  count(holder.category, bytes);
  if (logging_) record(MemoryEvent::kMade, holder);
}

void Allocator::let_go(Holder& holder) noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  (holder.older ? holder.older->newer : oldest_) = holder.newer;
  (holder.newer ? holder.newer->older : newest_) = holder.older;
  --stats_.live_arrays;
  count(holder.category, -holder.nbytes);
  if (logging_) record(MemoryEvent::kFreed, holder);
  give_back(holder.ptr, holder.nbytes);
}

void Allocator::set_category(Holder& holder, int category) {
  if (category < 0 || category >= kCategories) category = 0;
  if (category == holder.category) return;
  std::lock_guard<std::mutex> lock(mutex_);
  stats_.by_category[holder.category] -= holder.nbytes;
  stats_.by_category[category] += holder.nbytes;
  holder.category = category;
  if (holder.serial == peak_serial_ && stats_.live == stats_.peak)
    stats_.by_category_at_peak = stats_.by_category;
  if (logging_) record(MemoryEvent::kRetagged, holder);
}

int Allocator::set_current_category(int category) {
  const int before = current_category;
  current_category = category < 0 || category >= kCategories ? 0 : category;
  return before;
}

void Allocator::record(MemoryEvent::Kind kind, const Holder& holder) noexcept {
  try {
    log_.push_back({kind, holder.serial, holder.nbytes, holder.site, holder.category});
  } catch (const std::bad_alloc&) {  // whoever takes the log is told
    log_has_gap_ = true;
  }
}

std::vector<MemoryEvent> Allocator::holders() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<MemoryEvent> found;
  for (const Holder* h = oldest_; h != nullptr; h = h->newer)
    found.push_back({MemoryEvent::kMade, h->serial, h->nbytes, h->site, h->category});
  return found;
}

void Allocator::start_log() {
  std::lock_guard<std::mutex> lock(mutex_);
  log_.clear();
  log_has_gap_ = false;
  logging_ = true;
}

std::vector<MemoryEvent> Allocator::take_log() {
  std::lock_guard<std::mutex> lock(mutex_);
  logging_ = false;
  if (log_has_gap_) throw std::bad_alloc();
  return std::exchange(log_, {});
}

void* Allocator::take(int64_t bytes) {
  const int64_t size = block_size(bytes);
  if (stats_.limit > 0 && stats_.live + bytes > stats_.limit) throw OutOfMemory(bytes, stats_);
  const bool cacheable = caching_ != Caching::kNone && size >= kLarge;
  void* ptr = cacheable ? take_cached(size) : nullptr;
  if (ptr == nullptr) {
    if (cacheable) {
      const int64_t top = std::max(top_, stats_.reserved - cached_bytes_ + size);
      release_cached(top + top / 32 + kHeadroom - size);
    }
    ptr = source_.allocate(size);
    if (ptr == nullptr) {  // what is kept may lie in the way, here or at the source
      release_cached(0);
      source_.trim();
      ptr = source_.allocate(size);
    }
    scarce_ = ptr == nullptr || (scarce_ && !cacheable);
    if (ptr == nullptr) throw OutOfMemory(bytes, stats_);
    try {
      if (cacheable) block_bytes_[ptr] = size;
    } catch (const std::bad_alloc&) {
      source_.release(ptr, size);
      throw;
    }
    stats_.reserved += size;
  }
  stats_.peak_reserved = std::max(stats_.peak_reserved, stats_.reserved);
  top_ = std::max(top_, stats_.reserved - cached_bytes_);
  return ptr;
}

// The smallest kept block that is large enough; nullptr if there is none.
char* Allocator::take_cached(int64_t size) {
  const auto found = cached_by_size_.lower_bound({size, nullptr});
  if (found == cached_by_size_.end()) return nullptr;
  const auto [real, ptr] = *found;
  const int64_t rest = real - size;
  if (caching_ == Caching::kBlocks && rest > real / 8) return nullptr;
  const bool cut = caching_ == Caching::kRanges && rest >= kLarge;
  block_bytes_[ptr] = cut ? size : real;
  forget(ptr, real);
  if (cut) keep(ptr + size, rest);
  return ptr;
}

void Allocator::give_back(void* ptr, int64_t bytes) noexcept {
  const int64_t size = block_size(bytes);
  if (caching_ == Caching::kNone || size < kLarge) return release(ptr, size);
  const auto found = block_bytes_.find(ptr);
  const int64_t real = found->second;
  block_bytes_.erase(found);
  if (scarce_)
    release(ptr, real);
  else
    keep(static_cast<char*>(ptr), real);
}

void Allocator::release(void* ptr, int64_t size) noexcept {
  source_.release(ptr, size);
  stats_.reserved -= size;
}

// What there is no memory to write down goes back to the source.
void Allocator::keep(char* ptr, int64_t size) noexcept {
  if (caching_ == Caching::kRanges) {
    const auto after = cached_.lower_bound(ptr);
    const auto next = after != cached_.end() ? *after : std::pair<char* const, int64_t>{};
    const auto last =
        after != cached_.begin() ? *std::prev(after) : std::pair<char* const, int64_t>{};
    if (next.first == ptr + size) {
      forget(next.first, next.second);
      size += next.second;
    }
    if (last.first != nullptr && last.first + last.second == ptr) {
      forget(last.first, last.second);
      ptr = last.first;
      size += last.second;
    }
  }
  try {
    cached_.emplace(ptr, size);
    cached_by_size_.emplace(size, ptr);
    cached_bytes_ += size;
  } catch (const std::bad_alloc&) {
    cached_.erase(ptr);
    release(ptr, size);
  }
}

void Allocator::forget(char* ptr, int64_t size) noexcept {
  cached_bytes_ -= size;
  cached_.erase(ptr);
  cached_by_size_.erase({size, ptr});
}

// Gives back what is kept, the largest first, until at most `reserved` bytes are reserved.
void Allocator::release_cached(int64_t reserved) {
  while (!cached_.empty() && stats_.reserved > reserved) {
    const auto [size, ptr] = *std::prev(cached_by_size_.end());
    forget(ptr, size);
    const int64_t excess = round_up(stats_.reserved - reserved, kPage);
    const bool cut = caching_ == Caching::kRanges && excess >= kLarge && size - excess >= kLarge;
    const int64_t given = cut ? excess : size;
    release(ptr + size - given, given);
    if (cut) keep(ptr, size - given);
  }
}

void Allocator::count(int category, int64_t bytes) {
  stats_.live += bytes;
  stats_.by_category[category] += bytes;
  if (stats_.live > stats_.peak) {
    stats_.peak = stats_.live;
    stats_.by_category_at_peak = stats_.by_category;
    peak_serial_ = stats_.allocations;
  }
}

void Allocator::count_borrowed(int64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  stats_.borrowed += bytes;
}

MemoryStats Allocator::stats() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return stats_;
}

MemoryStats Allocator::reset_peak() {
  std::lock_guard<std::mutex> lock(mutex_);
  const MemoryStats before = stats_;
  stats_.peak = stats_.live;
  stats_.by_category_at_peak = stats_.by_category;
  peak_serial_ = 0;
  stats_.peak_reserved = stats_.reserved;
  return before;
}

void Allocator::empty_cache() {
  std::lock_guard<std::mutex> lock(mutex_);
  release_cached(0);
  source_.trim();
  top_ = stats_.reserved;
}

void Allocator::set_limit(int64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  stats_.limit = std::max<int64_t>(bytes, 0);
}

}  // namespace needle
