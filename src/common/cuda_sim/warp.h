// Warp operations: each is a frame that a lane publishes and a loop over the frames, run once by
// the last lane.
#pragma once

#include "half.h"
#include "thread.h"

namespace needle::sim {

template <class T>
struct ShuffleFrame {
  T value, result;
  int source;  // lane, or -1 for one's own value
};

template <class T>
void shuffle_lanes(Lanes& lanes) {
  for (int i = 0; i < kWarpSize; ++i) {
    auto* frame = static_cast<ShuffleFrame<T>*>(lanes.frame[i]);
    if (!frame) continue;
    const int source = frame->source < 0 ? i : frame->source;
    // The value of a lane that takes no part is undefined; all bits set is NaN and shows.
    if (lanes.frame[source])
      frame->result = static_cast<ShuffleFrame<T>*>(lanes.frame[source])->value;
    else
      std::memset(static_cast<void*>(&frame->result), 0xff, sizeof(T));
  }
}

template <class T>
inline constexpr bool is_number = (std::is_arithmetic_v<T> || std::is_enum_v<T>) && sizeof(T) <= 8;
template <class T>
inline constexpr bool is_shuffled =
    is_number<T> || is_one_of<T, __half, __half2, __nv_bfloat16, __nv_bfloat162>;

template <class T>
T shuffle(uint32_t mask, T value, int source, const Collective& op, Site site) {
  ShuffleFrame<T> frame{value, value, source};
  collective(mask, &frame, op, site);
  return frame.result;
}

inline int lane_id() { return static_cast<int>(self().rank % kWarpSize); }

// One frame for everything that maps a value per lane to one result per lane.
template <class T, class R>
struct VoteFrame {
  T value;
  R result;
};
template <class T, class R, R (*Combine)(const Lanes&, T mine)>
void vote_lanes(Lanes& lanes) {
  for (void* frame : lanes.frame)
    if (frame) {
      auto* vote = static_cast<VoteFrame<T, R>*>(frame);
      vote->result = Combine(lanes, vote->value);
    }
}
template <class T, class R, R (*Combine)(const Lanes&, T mine)>
R vote(uint32_t mask, T value, const Collective& op, Site site) {
  VoteFrame<T, R> frame{value, {}};
  collective(mask, &frame, op, site);
  return frame.result;
}
template <class T, class R>
uint32_t lanes_equal_to(const Lanes& lanes, T wanted) {
  uint32_t found = 0;
  for (int i = 0; i < kWarpSize; ++i)
    if (lanes.frame[i] &&
        std::memcmp(&static_cast<VoteFrame<T, R>*>(lanes.frame[i])->value, &wanted, sizeof(T)) == 0)
      found |= 1u << i;
  return found;
}
template <class T, class F>
T fold_lanes(const Lanes& lanes, F&& f) {
  bool first = true;
  T total{};
  for (void* frame : lanes.frame)
    if (frame) {
      const T value = static_cast<VoteFrame<T, T>*>(frame)->value;
      total = first ? value : f(total, value);
      first = false;
    }
  return total;
}
inline void no_exchange(Lanes&) {}
inline constexpr Collective kSyncWarp{"__syncwarp", no_exchange};

inline unsigned ballot_lanes(const Lanes& lanes, unsigned) {
  return lanes_equal_to<unsigned, unsigned>(lanes, 1u);
}
template <class T>
unsigned match_any_lanes(const Lanes& lanes, T mine) {
  return lanes_equal_to<T, unsigned>(lanes, mine);
}
template <class T>
unsigned match_all_lanes(const Lanes& lanes, T mine) {
  const unsigned equal = lanes_equal_to<T, unsigned>(lanes, mine);
  return equal == lanes.active ? equal : 0;
}

}  // namespace needle::sim

inline void __syncwarp(unsigned mask = 0xffffffffu, NEEDLE_SIM_SITE) {
  char frame;
  needle::sim::collective(mask, &frame, needle::sim::kSyncWarp, site);
}

// As in CUDA: width cuts the warp into pieces, and a source outside the piece leaves one's own
// value.
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, NEEDLE_SIM_SITE) {
  using namespace needle::sim;
  static_assert(is_shuffled<T>, "CUDA shuffles numbers and 16-bit floats only");
  static constexpr Collective op{"__shfl_sync", shuffle_lanes<T>};
  const int lane = lane_id();
  return shuffle(mask, value, (lane & ~(width - 1)) | (source & (width - 1)), op, site);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, NEEDLE_SIM_SITE) {
  using namespace needle::sim;
  static_assert(is_shuffled<T>, "CUDA shuffles numbers and 16-bit floats only");
  static constexpr Collective op{"__shfl_up_sync", shuffle_lanes<T>};
  const int lane = lane_id(), source = lane - static_cast<int>(delta);
  return shuffle(mask, value, source < (lane & ~(width - 1)) ? -1 : source, op, site);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, NEEDLE_SIM_SITE) {
  using namespace needle::sim;
  static_assert(is_shuffled<T>, "CUDA shuffles numbers and 16-bit floats only");
  static constexpr Collective op{"__shfl_down_sync", shuffle_lanes<T>};
  const int lane = lane_id(), source = lane + static_cast<int>(delta);
  return shuffle(mask, value, source > (lane | (width - 1)) ? -1 : source, op, site);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, NEEDLE_SIM_SITE) {
  using namespace needle::sim;
  static_assert(is_shuffled<T>, "CUDA shuffles numbers and 16-bit floats only");
  static constexpr Collective op{"__shfl_xor_sync", shuffle_lanes<T>};
  const int lane = lane_id(), source = lane ^ lane_mask;
  return shuffle(mask, value, source > (lane | (width - 1)) ? -1 : source, op, site);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, NEEDLE_SIM_SITE) {
  using namespace needle::sim;
  static constexpr Collective op{"__ballot_sync", vote_lanes<unsigned, unsigned, ballot_lanes>};
  return vote<unsigned, unsigned, ballot_lanes>(mask, predicate != 0, op, site);
}
inline int __any_sync(unsigned mask, int predicate, NEEDLE_SIM_SITE) {
  using namespace needle::sim;
  static constexpr Collective op{"__any_sync", vote_lanes<unsigned, unsigned, ballot_lanes>};
  return vote<unsigned, unsigned, ballot_lanes>(mask, predicate != 0, op, site) != 0;
}
inline int __all_sync(unsigned mask, int predicate, NEEDLE_SIM_SITE) {
  using namespace needle::sim;
  static constexpr Collective op{"__all_sync", vote_lanes<unsigned, unsigned, ballot_lanes>};
  return vote<unsigned, unsigned, ballot_lanes>(mask, predicate == 0, op, site) == 0;
}
template <class T>
unsigned __match_any_sync(unsigned mask, T value, NEEDLE_SIM_SITE) {
  using namespace needle::sim;
  static_assert(is_number<T>, "CUDA has __match_any_sync for numbers only");
  static constexpr Collective op{"__match_any_sync", vote_lanes<T, unsigned, match_any_lanes<T>>};
  return vote<T, unsigned, match_any_lanes<T>>(mask, value, op, site);
}
template <class T>
unsigned __match_all_sync(unsigned mask, T value, int* predicate, NEEDLE_SIM_SITE) {
  using namespace needle::sim;
  static_assert(is_number<T>, "CUDA has __match_all_sync for numbers only");
  static constexpr Collective op{"__match_all_sync", vote_lanes<T, unsigned, match_all_lanes<T>>};
  const unsigned equal = vote<T, unsigned, match_all_lanes<T>>(mask, value, op, site);
  *predicate = equal != 0;
  return equal;
}

#define NEEDLE_SIM_WARP_REDUCE(name, T, expression)                                            \
  namespace needle::sim {                                                                      \
  inline T name##_lanes(const Lanes& lanes, T) {                                               \
    return fold_lanes<T>(lanes, [](T a, T b) { return expression; });                          \
  }                                                                                            \
  }                                                                                            \
  inline T __reduce_##name##_sync(unsigned mask, T value, NEEDLE_SIM_SITE) {                   \
    using namespace needle::sim;                                                               \
    static constexpr Collective op{"__reduce_" #name "_sync", vote_lanes<T, T, name##_lanes>}; \
    return vote<T, T, name##_lanes>(mask, value, op, site);                                    \
  }
NEEDLE_SIM_WARP_REDUCE(add, unsigned, a + b)
NEEDLE_SIM_WARP_REDUCE(add, int, int(unsigned(a) + unsigned(b)))
NEEDLE_SIM_WARP_REDUCE(min, unsigned, a < b ? a : b)
NEEDLE_SIM_WARP_REDUCE(min, int, a < b ? a : b)
NEEDLE_SIM_WARP_REDUCE(max, unsigned, a < b ? b : a)
NEEDLE_SIM_WARP_REDUCE(max, int, a < b ? b : a)
NEEDLE_SIM_WARP_REDUCE(and, unsigned, a& b)
NEEDLE_SIM_WARP_REDUCE(or, unsigned, a | b)
NEEDLE_SIM_WARP_REDUCE(xor, unsigned, a ^ b)
#undef NEEDLE_SIM_WARP_REDUCE

inline unsigned __activemask() { return 1u << needle::sim::lane_id(); }
