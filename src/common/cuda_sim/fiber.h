// Stacks and the switch between them. Internal to the runtime.
#pragma once

#include "../asan.h"
#include "thread.h"

#if NEEDLE_ASAN
#include <sanitizer/common_interface_defs.h>
#endif

#if (!defined(__x86_64__) && !defined(__aarch64__)) || defined(NEEDLE_SIM_FORCE_UCONTEXT)
#define NEEDLE_SIM_UCONTEXT 1
#else
#define NEEDLE_SIM_UCONTEXT 0
extern "C" __attribute__((visibility("hidden"))) void needle_sim_switch(
    void** save_stack_pointer, void* stack_pointer) asm("needle_sim_switch");  // macOS: without _
#endif

namespace needle::sim {

// Reserves the region of all stacks once per process. Stacks get memory when they are first used.
void reserve_stacks();

// Makes stack number `index` ready to start `entry` with the switch that first leads there.
void prepare_fiber(int index, Context& context, void (*entry)());

#if NEEDLE_SIM_UCONTEXT
void swap_stacks(Context& from, Context& to);
#else
inline void swap_stacks(Context& from, Context& to) { needle_sim_switch(&from.saved, to.saved); }
#endif

// Inline, as the frames of a waiting thread are what a barrier's cache misses are made of.
inline __attribute__((always_inline)) void switch_context(Context& from, Context& to) {
#if NEEDLE_ASAN
  __sanitizer_start_switch_fiber(&from.asan_fake_stack, to.stack_bottom, to.stack_bytes);
  swap_stacks(from, to);
  __sanitizer_finish_switch_fiber(from.asan_fake_stack, nullptr, nullptr);
#else
  swap_stacks(from, to);
#endif
}

// The same for a flow that will never run again.
[[noreturn]] inline void leave_context(Context& from, Context& to) {
#if NEEDLE_ASAN
  __sanitizer_start_switch_fiber(nullptr, to.stack_bottom, to.stack_bytes);
#endif
  swap_stacks(from, to);
  __builtin_trap();
}

// First thing in `entry` of prepare_fiber: completes the switch.
inline void arrived() {
#if NEEDLE_ASAN
  __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
}

// Tells the context of an ordinary thread, which this is called on, about its stack.
void describe_own_stack(Context& context);

// After a fault: stacks of the worker hold frames that nobody will unwind.
void forget_frames(int first_index, int count);

}  // namespace needle::sim
