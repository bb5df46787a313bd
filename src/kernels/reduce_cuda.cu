// Reductions over the middle axis of (outer, reduce, inner) on a GPU.
//
// A block of 256 threads is split into `lanes` threads per output; each lane takes every lanes-th
// element, then the lanes are combined by a tree in shared memory. When there are few outputs, the
// axis is cut into `splits` parts, whose results go to scratch memory and are reduced in the same
// way by a second kernel. Lanes and splits depend on the shape alone, so results repeat bit by bit.
// max, min, argmax and argmin: NaN wins, the first of equals is taken.
#include "../common/cuda_util.cuh"

namespace needle::NEEDLE_DEVICE {
namespace {

constexpr int kThreads = kBlock;

// The type a sum or product is formed in. Integers are summed in 64 bits, unsigned so that they
// wrap around.
template <class T>
using total_t = typename std::conditional<std::is_integral<T>::value, uint64_t, accum_t<T>>::type;

template <class T>
struct SumOf {
  using State = total_t<T>;
  __device__ static State identity() { return State(0); }
  __device__ static State from(T x, int64_t) { return State(accum_t<T>(x)); }
  __device__ static State combine(State a, State b) { return a + b; }
  template <class Out>
  __device__ static Out result(State s) {
    return Out(accum_t<Out>(s));
  }
};
template <class T>
struct SumOfSquares : SumOf<T> {
  using State = total_t<T>;
  __device__ static State from(T x, int64_t) { return State(accum_t<T>(x)) * State(accum_t<T>(x)); }
};
template <class T>
struct ProductOf : SumOf<T> {
  using State = total_t<T>;
  __device__ static State identity() { return State(1); }
  __device__ static State combine(State a, State b) { return a * b; }
};

// The extreme value and where it stands; position -1 is "nothing yet".
template <class T, bool Largest>
struct Extreme {
  struct State {
    accum_t<T> value;
    int64_t position;
  };
  __device__ static State identity() { return {accum_t<T>(0), -1}; }
  __device__ static State from(T x, int64_t position) { return {accum_t<T>(x), position}; }
  __device__ static State combine(State a, State b) {
    if (a.position < 0) return b;
    if (b.position < 0) return a;
    const bool a_nan = a.value != a.value, b_nan = b.value != b.value;
    if (a_nan != b_nan) return a_nan ? a : b;
    if (!a_nan && a.value != b.value) return (a.value > b.value) == Largest ? a : b;
    return a.position < b.position ? a : b;
  }
  template <class Out>
  __device__ static Out result(State s) {
    return Out(s.value);
  }
};
template <class T, bool Largest>
struct ExtremePosition : Extreme<T, Largest> {
  template <class Out>
  __device__ static Out result(typename Extreme<T, Largest>::State s) {
    return Out(s.position);
  }
};

// Of what the splits came to.
template <class Op>
struct OfPartials : Op {
  __device__ static typename Op::State from(typename Op::State partial, int64_t) { return partial; }
};

// Combines the `lanes` states of each output of a block; the first lane of each has the result.
// Lanes of one output are `stride` threads apart.
template <class Op>
__device__ typename Op::State combine_lanes(typename Op::State state, int lane, int lanes,
                                            int stride) {
  NEEDLE_SHARED(typename Op::State, states, kThreads);
  states[threadIdx.x] = state;
  for (int half = lanes / 2; half > 0; half /= 2) {
    __syncthreads();
    if (lane < half)
      states[threadIdx.x] =
          Op::combine(states[threadIdx.x], states[int(threadIdx.x) + half * stride]);
  }
  state = states[threadIdx.x];
  __syncthreads();
  return state;
}

// One tile: kThreads / lanes neighbouring outputs of one split. When inner is 1 neighbouring
// threads are lanes of one output, otherwise they are neighbouring outputs; either way they read
// neighbouring elements.
template <class Op, class T, class Out>
__device__ void reduce_tiles(const T* a, Out* out, typename Op::State* partial, int64_t outputs,
                             int64_t reduce, int64_t inner, int lanes, int64_t splits,
                             int64_t split_length) {
  const int per_tile = kThreads / lanes;
  const int lane = inner == 1 ? int(threadIdx.x) % lanes : int(threadIdx.x) / per_tile;
  const int slot = inner == 1 ? int(threadIdx.x) / lanes : int(threadIdx.x) % per_tile;
  const int64_t tiles = ceil_div(outputs, per_tile);
  for (int64_t tile = blockIdx.x; tile < tiles * splits; tile += gridDim.x) {
    const int64_t output = tile % tiles * per_tile + slot, split = tile / tiles;
    typename Op::State state = Op::identity();
    if (output < outputs) {
      const T* line = a + output / inner * reduce * inner + output % inner;
      const int64_t end = reduce < (split + 1) * split_length ? reduce : (split + 1) * split_length;
#pragma unroll 4
      for (int64_t r = split * split_length + lane; r < end; r += lanes)
        state = Op::combine(state, Op::from(line[r * inner], r));
    }
    state = combine_lanes<Op>(state, lane, lanes, inner == 1 ? 1 : per_tile);
    if (lane == 0 && output < outputs) {
      if (splits == 1) {
        out[output] = Op::template result<Out>(state);
      } else {
        partial[split * outputs + output] = state;
      }
    }
  }
}

template <class Op, class T, class Out>
__global__ void reduce_kernel(const T* a, Out* out, typename Op::State* partial, int64_t outputs,
                              int64_t reduce, int64_t inner, int lanes, int64_t splits,
                              int64_t split_length) {
  reduce_tiles<Op>(a, out, partial, outputs, reduce, inner, lanes, splits, split_length);
}

// partial: (splits, outputs).
template <class Op, class Out>
__global__ void reduce_partials_kernel(const typename Op::State* partial, Out* out, int64_t outputs,
                                       int64_t splits, int lanes) {
  reduce_tiles<OfPartials<Op>>(partial, out, nullptr, outputs, splits, outputs, lanes, 1, splits);
}

int64_t power_of_two_up_to(int64_t n, int64_t most) {
  int64_t p = 1;
  while (p * 2 <= n && p * 2 <= most) p *= 2;
  return p;
}

constexpr int64_t kElementsPerLane = 8;      // a lane should have some work of its own
constexpr int64_t kWantedTiles = 1024;       // tiles below which the axis is split
constexpr int64_t kLeastSplitLength = 4096;  // elements that are worth a block

// Of one output, each with some elements of its own; when outputs are neighbours, whole warps stay
// on neighbouring elements.
int lanes_for(int64_t reduce, int64_t inner, int64_t elements_per_lane) {
  const int64_t most = inner == 1 ? kThreads : kThreads / power_of_two_up_to(inner, kWarp);
  return int(power_of_two_up_to(ceil_div(reduce, elements_per_lane), most));
}

template <class Op, class T, class Out>
void reduce_as(const Array& a, const Array& out, int64_t outer, int64_t reduce, int64_t inner) {
  using State = typename Op::State;
  const int64_t outputs = outer * inner;
  if (outputs == 0) return;
  const int lanes = lanes_for(reduce, inner, kElementsPerLane);
  const int64_t tiles = ceil_div(outputs, kThreads / lanes);
  int64_t splits = ceil_div(reduce * (kThreads / lanes), kLeastSplitLength);
  if (splits > kWantedTiles / tiles) splits = kWantedTiles / tiles;
  if (splits > kScratchBytes / int64_t(sizeof(State)) / outputs)
    splits = kScratchBytes / int64_t(sizeof(State)) / outputs;
  if (splits < 1) splits = 1;
  const int64_t split_length =
      splits == 1 ? reduce : ceil_div(ceil_div(reduce, splits), lanes) * lanes;
  if (splits > 1) splits = ceil_div(reduce, split_length);

  const Scratch held = splits == 1 ? Scratch{} : scratch(splits * outputs * int64_t(sizeof(State)));
  State* const partial = static_cast<State*>(held.memory);
  launch<reduce_kernel<Op, T, Out>>(grid_of(blocks_for(tiles * splits), kThreads), a.data<T>(),
                                    out.data<Out>(), partial, outputs, reduce, inner, lanes, splits,
                                    split_length);
  if (splits == 1) return;
  const int partial_lanes = lanes_for(splits, outputs, 1);
  launch<reduce_partials_kernel<Op, Out>>(
      grid_of(blocks_for(ceil_div(outputs, kThreads / partial_lanes)), kThreads),
      static_cast<const State*>(partial), out.data<Out>(), outputs, splits, partial_lanes);
}

// Results are stored in the dtype of `a`, or that of wider sums: int64, float32.
template <template <class> class Op, class T>
void reduce_values(const Array& a, const Array& out, int64_t outer, int64_t reduce, int64_t inner) {
  using Wide = typename std::conditional<std::is_integral<T>::value, int64_t, accum_t<T>>::type;
  if constexpr (!std::is_same<T, Wide>::value) {
    if (out.dtype() == DTypeOf<Wide>::value)
      return reduce_as<Op<T>, T, Wide>(a, out, outer, reduce, inner);
  }
  reduce_as<Op<T>, T, T>(a, out, outer, reduce, inner);
}
template <class T>
using Largest = Extreme<T, true>;
template <class T>
using Smallest = Extreme<T, false>;

}  // namespace

void reduce(ReduceOp op, const Array& a, const Array& out, int64_t outer, int64_t reduce,
            int64_t inner) {
  dispatch_any(a.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    switch (op) {
      case ReduceOp::sum:
        return reduce_values<SumOf, T>(a, out, outer, reduce, inner);
      case ReduceOp::max:
        return reduce_values<Largest, T>(a, out, outer, reduce, inner);
      case ReduceOp::min:
        return reduce_values<Smallest, T>(a, out, outer, reduce, inner);
      case ReduceOp::prod:
        return reduce_values<ProductOf, T>(a, out, outer, reduce, inner);
      case ReduceOp::argmax:
        return reduce_as<ExtremePosition<T, true>, T, int64_t>(a, out, outer, reduce, inner);
      case ReduceOp::argmin:
        return reduce_as<ExtremePosition<T, false>, T, int64_t>(a, out, outer, reduce, inner);
      case ReduceOp::sumsq:
        if constexpr (!std::is_integral<T>::value) {
          return reduce_as<SumOfSquares<T>, T, accum_t<T>>(a, out, outer, reduce, inner);
        } else {
          throw std::invalid_argument(std::string("[reduce_sumsq] needs a floating dtype, got ") +
                                      dtype_name(a.dtype()));
        }
    }
  });
}

}  // namespace needle::NEEDLE_DEVICE
