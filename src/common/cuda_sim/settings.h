// The emulator's variables, read anew each time, so that a process may change its own. All throw
// std::invalid_argument for a value that the variable does not have.
#pragma once

#include <cstdint>

namespace needle::sim {

enum class Order { kForward, kReverse, kRandom };

struct OrderOption {
  Order order = Order::kForward;
  uint64_t seed = 0;
  bool reproducible = false;  // set explicitly: blocks run on one worker
};

OrderOption order_option();     // NEEDLE_SIM_ORDER=forward|reverse|random:SEED
bool async_copies_are_early();  // NEEDLE_SIM_CP_ASYNC=late|early
bool streams_are_lazy();        // NEEDLE_SIM_STREAMS=eager|lazy
int compute_capability();       // NEEDLE_SIM_SM=75|80|90|...
int multiprocessors();          // NEEDLE_SIM_MULTIPROCESSORS=0|1|2|...
int memory_mib();               // NEEDLE_SIM_MEMORY=1 to 999999; 0 where it is not set
int wanted_workers();           // NEEDLE_NUM_THREADS=1 to 4096; 0 where it is not set

}  // namespace needle::sim
