// The kernels that nvcc's PTX has, found by those of the C++ compiler: launch_sim.h runs the one in
// place of the other.
#pragma once

#include <cstddef>

#include "../thread.h"

namespace needle::sim::ptx {

struct KernelOfPtx {
  const char* name;           // mangled, as the C++ compiler does
  void (*run)(char* params);  // one CUDA thread
  unsigned max_threads;       // of a block, by its __launch_bounds__
};

// Called as the module is loaded. Kernels of the same name are the same, from a template that
// several files use, but for those of anonymous namespaces, which kernel_of then refuses.
bool register_kernels(const KernelOfPtx* kernels, size_t count);

// What nvcc made of the kernel at this address. Throws std::runtime_error if there is nothing.
const KernelOfPtx& kernel_of(const void* function);

// One CUDA thread of it, from that thread.
void run(const KernelOfPtx& kernel, char* params);

[[noreturn]] void misaligned(const char* instruction, size_t bytes, Site site);

}  // namespace needle::sim::ptx
