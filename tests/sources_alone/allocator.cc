// The allocator alone, with a heap that refuses each of its own requests in turn, once or for good:
// the account stays right, and nothing is lost. Prints ok.
#include "allocator.h"

#include <vector>

#include "check.h"
#include "heap.h"
#include "parallel.h"

using namespace needle;

namespace {

bool for_good = false;

// Counts pages that it never gives: the allocator doesn't look into them.
struct Pages : MemorySource {
  void* allocate(int64_t bytes) override {
    char* const ptr = next;
    next += bytes + (1 << 20);
    given += bytes;
    return ptr;
  }
  void release(void*, int64_t bytes) override { given -= bytes; }
  char* next = reinterpret_cast<char*>(1 << 20);
  int64_t given = 0;
};

constexpr int kHolders = 6;
Holder holders[kHolders];
bool held[kHolders];

bool hold(Allocator& allocator, int i, int64_t bytes) {
  if (held[i]) return false;
  try {
    allocator.hold(holders[i] = {}, bytes, 0);
    return held[i] = true;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

void let_go(Allocator& allocator, int i) {
  if (held[i]) allocator.let_go(holders[i]);
  held[i] = false;
}

// Blocks that are kept, cut, joined, logged.
void use(Allocator& allocator) {
  const int64_t MiB = 1 << 20;
  for (int i = 0; i < 4; ++i) hold(allocator, i, (i + 1) * MiB);
  hold(allocator, 4, 100);
  allocator.start_log();
  let_go(allocator, 1);
  let_go(allocator, 2);
  hold(allocator, 1, MiB / 2);
  hold(allocator, 2, 2 * MiB);
  hold(allocator, 5, 4 * MiB);
  let_go(allocator, 4);
  try {
    allocator.take_log();
  } catch (const std::bad_alloc&) {
  }
  for (int i = 0; i < kHolders; ++i) let_go(allocator, i);
}

void refuse_in_turn(Allocator& allocator, Pages& pages) {
  refuse(0, false);
  use(allocator);
  const int64_t requests = requests_since();
  CHECK(requests > 10);
  allocator.empty_cache();
  for (int64_t turn = 1; turn <= requests; ++turn) {
    refuse(turn, for_good);
    use(allocator);
    refuse(0, false);
    CHECK(allocator.stats().live == 0 && allocator.stats().live_arrays == 0);
    CHECK(allocator.stats().reserved == pages.given);
    allocator.empty_cache();
    CHECK(allocator.stats().reserved == 0 && pages.given == 0);
  }
}

// A log from which an event is missing is none.
void a_gap_is_told(Allocator& allocator) {
  hold(allocator, 0, 1 << 20);
  allocator.start_log();
  hold(allocator, 1, 100);  // nor is it part of the next
  refuse(1, true);
  let_go(allocator, 0);
  refuse(0, false);
  bool told = false;
  try {
    allocator.take_log();
  } catch (const std::bad_alloc&) {
    told = true;
  }
  CHECK(told);
  allocator.start_log();
  hold(allocator, 0, 1 << 20);
  CHECK(allocator.take_log().size() == 1);
  let_go(allocator, 0);
  let_go(allocator, 1);
}

// The pool takes the threads that it gets.
void a_pool_that_is_refused() {
  for (int64_t turn = 1; turn < 20; ++turn) {
    refuse(turn, false);
    std::vector<int> runs;
    try {
      cpu::set_num_threads(2 + int(turn % 3));
      runs.resize(8);
      cpu::parallel_for(8, [&](int64_t i) { ++runs[size_t(i)]; });
    } catch (const std::bad_alloc&) {
      runs.clear();
    }
    refuse(0, false);
    for (int count : runs) CHECK(count == 1);
  }
}

}  // namespace

int main(int argc, char**) {
  Pages pages;
  Allocator allocator(pages, argc > 1 ? Caching::kBlocks : Caching::kRanges);
  for (bool wanted : {false, true}) {
    for_good = wanted;
    refuse_in_turn(allocator, pages);
  }
  a_gap_is_told(allocator);
  a_pool_that_is_refused();
  std::puts("ok");
}
