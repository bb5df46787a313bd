// Invalid addresses in a kernel become a launch's error instead of the process's end. Internal to
// the runtime.
#pragma once

namespace needle::sim {

// Gives the calling thread a stack for its signal handler and, once per process, installs it. A
// stack overflow has no room of its own to report in.
void prepare_thread_for_faults();

}  // namespace needle::sim
