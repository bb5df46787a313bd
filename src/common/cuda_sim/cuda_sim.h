// What a kernel file sees when it is compiled as plain C++: CUDA's names, on top of the emulator.
#pragma once

#include "atomics.h"
#include "half.h"
#include "launch_sim.h"
#include "runtime_api.h"
#include "thread.h"
#include "types.h"
#include "warp.h"

// Last: its macros (threadIdx, __expf) should meet no header of the standard library.
#include "device.h"
