// Stacks and the switch between them. Internal to the runtime.
#pragma once

#include "thread.h"

#if defined(__SANITIZE_ADDRESS__)
#define NEEDLE_SIM_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define NEEDLE_SIM_ASAN 1
#endif
#endif
#ifndef NEEDLE_SIM_ASAN
#define NEEDLE_SIM_ASAN 0
#endif

namespace needle::sim {

// Reserves the region of all stacks once per process. Stacks get memory when they are first used.
void reserve_stacks();

// Makes stack number `index` ready to start `entry` with the switch that first leads there.
void prepare_fiber(int index, Context& context, void (*entry)());

void switch_context(Context& from, Context& to);
// The same for a flow that will never run again.
[[noreturn]] void leave_context(Context& from, Context& to);
// First thing in `entry`: completes the switch.
void arrived();
// Tells the context of an ordinary thread, which this is called on, about its stack.
void describe_own_stack(Context& context);

// After a fault: stacks of the worker hold frames that nobody will unwind.
void forget_frames(int first_index, int count);

}  // namespace needle::sim
