// Index arrays on the CPU: checked before anything is written.
#pragma once

#include <stdexcept>
#include <string>

#include "array.h"

namespace needle::cpu {

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
