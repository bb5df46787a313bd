#include "heap.h"

#include <atomic>
#include <cstdlib>
#include <new>

namespace {
std::atomic<int64_t> asked{0}, refused{0};
std::atomic<bool> all_after{false};
}  // namespace

void refuse(int64_t number, bool for_good) {
  refused = 0;
  asked = 0;
  all_after = for_good;
  refused = number;
}
int64_t requests_since() { return asked; }

void* operator new(std::size_t bytes) {
  const int64_t number = ++asked, first = refused;
  const bool fails = first > 0 && (number == first || (all_after && number > first));
  void* const ptr = fails ? nullptr : std::malloc(bytes > 0 ? bytes : 1);
  if (ptr == nullptr) throw std::bad_alloc();
  return ptr;
}
void operator delete(void* ptr) noexcept { std::free(ptr); }
void operator delete(void* ptr, std::size_t) noexcept { std::free(ptr); }
