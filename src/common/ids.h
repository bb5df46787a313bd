// Ids outside their range: what they are told, on CPU and CUDA.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

namespace needle {

enum class BadId : int { none, embedding, one_hot, cross_entropy, attention_decode };

// The id `value` at `position`, where 0 .. limit-1 are accepted.
inline std::string bad_id_text(BadId op, int64_t value, int64_t position, int64_t limit) {
  constexpr const char* kWords[][3] = {{"", "", ""},
                                       {"[embedding] id ", " at position ", "vocabulary"},
                                       {"[one_hot] id ", " at position ", "depth"},
                                       {"[cross_entropy] target ", " at position ", "classes"},
                                       {"[attention_decode] position ", " of sequence ", "cache"}};
  const auto& [id, place, range] = kWords[int(op)];
  return id + std::to_string(value) + place + std::to_string(position) + " is outside the " +
         range + " (0.." + std::to_string(limit - 1) + ")";
}

// Throws for the first id outside 0 .. limit-1 that is not `ignored`.
template <class I>
void check_ids(const I* ids, int64_t n, int64_t limit, BadId op,
               std::optional<int64_t> ignored = {}) {
  int64_t bad = 0;
  for (int64_t i = 0; i < n; ++i) bad += uint64_t(ids[i]) >= uint64_t(limit);
  if (bad == 0) return;
  for (int64_t i = 0; i < n; ++i) {
    if (uint64_t(ids[i]) < uint64_t(limit) || ids[i] == ignored) continue;
    throw std::out_of_range(bad_id_text(op, ids[i], i, limit));
  }
}

// An id where it is used, -1 for one outside 0 .. limit-1. Read once, so that what was looked at is
// what is used: another thread may write the ids after they were checked.
template <class I>
int64_t id_at(const I* ids, int64_t i, int64_t limit) {
  const int64_t id = static_cast<const volatile I*>(ids)[i];
  return uint64_t(id) < uint64_t(limit) ? id : -1;
}

}  // namespace needle
