// What a kernel file sees when it is compiled as plain C++: CUDA's names, on top of the emulator.
// The order matters: the index macros come last, so that no header of the standard library meets them.
#pragma once

#include "types.h"
#include "thread.h"
#include "runtime_api.h"
#include "launch_sim.h"
#include "half.h"
#include "atomics.h"
#include "warp.h"
#include "device.h"
