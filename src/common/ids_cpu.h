// Index arrays on the CPU: int32 or int64, checked before anything is written.
#pragma once

#include <stdexcept>
#include <string>

#include "array.h"

namespace needle::cpu {

// f(pointer) with the C++ type of an int32 or int64 array.
template <class F>
void dispatch_ids(const Array& ids, const char* op, F&& f) {
  if (ids.dtype() == DType::kInt32)
    f(static_cast<const int32_t*>(ids.ptr()));
  else if (ids.dtype() == DType::kInt64)
    f(static_cast<const int64_t*>(ids.ptr()));
  else
    throw std::invalid_argument(std::string("[") + op + "] ids have a bad dtype: " +
                                dtype_name(ids.dtype()) + " (int32 or int64)");
}

// Throws for the first id outside 0 .. limit-1 that is not `ignored`; `id` and `range` name the two
// in the text.
template <class I>
void check_ids(const I* ids, int64_t n, int64_t limit, const char* op, const char* id,
               const char* range, int64_t ignored = 0) {
  int64_t bad = 0;
  for (int64_t i = 0; i < n; ++i) bad += uint64_t(ids[i]) >= uint64_t(limit);
  if (bad == 0) return;
  for (int64_t i = 0; i < n; ++i) {
    if (uint64_t(ids[i]) < uint64_t(limit) || (ignored != 0 && ids[i] == ignored)) continue;
    throw std::out_of_range(std::string("[") + op + "] " + id + " " + std::to_string(ids[i]) +
                            " at position " + std::to_string(i) + " is outside the " + range +
                            " (0.." + std::to_string(limit - 1) + ")");
  }
}

}  // namespace needle::cpu
