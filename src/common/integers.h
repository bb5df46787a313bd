// Integer arithmetic that host and device code share (constexpr is enough for device code).
#pragma once

#include <cstdint>

namespace needle {

constexpr int64_t ceil_div(int64_t n, int64_t d) { return (n + d - 1) / d; }
constexpr int64_t round_up(int64_t n, int64_t to) { return ceil_div(n, to) * to; }

}  // namespace needle
