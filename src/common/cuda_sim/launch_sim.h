// From launch<K>(config, args...) to a grid of blocks.
#pragma once

#include <cstring>
#include <functional>
#include <string>
#include <tuple>
#include <utility>

#if NEEDLE_PTX
#include "ptx/kernels.h"
#endif
#include "runtime_api.h"
#include "settings.h"
#include "thread.h"

namespace needle::sim {

struct Launch {
  const char* kernel_name;
  const void* function;
  dim3 grid, block;
  size_t smem;
  void (*run)(void* args);  // one CUDA thread
  void* args;
  // Set when it begins: bytes of dynamic shared memory that were asked for beforehand, and whether
  // cp.async moves at once.
  size_t opted_in = 0;
  bool copies_are_early = false;
};

// Each returns an error text, empty if all is well.
NEEDLE_SIM_HIDDEN std::string check_launch(const Launch& launch);
NEEDLE_SIM_HIDDEN std::string run_grid(Launch launch);

// Whether the device has the memory that a launch may take.
NEEDLE_SIM_HIDDEN bool has_room_for_launch();

// `error`, which cudaGetLastError then gives once.
NEEDLE_SIM_HIDDEN cudaError_t remember(cudaError_t error);
NEEDLE_SIM_HIDDEN void enqueue(cudaStream_t stream, std::function<std::string()> work);

#if NEEDLE_PTX

template <auto K>
const ptx::KernelOfPtx& kernel_of() {
  static const ptx::KernelOfPtx& kernel = ptx::kernel_of(reinterpret_cast<const void*>(K));
  return kernel;
}

// As the members of a struct lie.
template <class... Params>
void lay_out(char* to, const std::tuple<Params...>& values) {
  size_t at = 0;
  const auto add = [&](const auto& value) {
    constexpr size_t align = alignof(decltype(value)), bytes = sizeof(value);
    at = (at + align - 1) / align * align;
    std::memcpy(to + at, static_cast<const void*>(&value), bytes);
    at += bytes;
  };
  std::apply([&](const auto&... value) { (add(value), ...); }, values);
}

template <auto K, class... Params>
void run_thread(void* args) {
  alignas(16) char params[((sizeof(Params) + alignof(Params)) + ... + 1)];  // as many at most
  lay_out(params, *static_cast<std::tuple<Params...>*>(args));
  ptx::run(kernel_of<K>(), params);
}

#else

template <auto K, class... Params>
void run_thread(void* args) {
  std::apply(K, *static_cast<std::tuple<Params...>*>(args));
}

#endif

// What depends on the parameters' types alone stands apart from what depends on the kernel: there
// are hundreds of kernels.
template <class... Params>
std::string launch_values(Launch launch, cudaStream_t stream, std::tuple<Params...> values) {
  std::string refused = check_launch(launch);
  if (!refused.empty()) return refused;
  if (!has_room_for_launch()) {
    remember(cudaErrorMemoryAllocation);
    return {};
  }
  if (streams_are_lazy()) {
    enqueue(stream, [launch, values]() mutable {
      launch.args = &values;
      return run_grid(launch);
    });
    return {};
  }
  launch.args = &values;
  return run_grid(launch);
}

template <auto K, class... Params, class... Args>
std::string launch_as(void (*)(Params...), Launch launch, cudaStream_t stream, Args&&... args) {
  static_assert(sizeof...(Params) == sizeof...(Args), "launch: wrong number of kernel arguments");
#if NEEDLE_PTX
  kernel_of<K>();  // it is looked for here, where an exception can be thrown
#endif
  launch.run = run_thread<K, Params...>;
  return launch_values(launch, stream, std::tuple<Params...>(std::forward<Args>(args)...));
}

// Runs K, or hands it to a lazy stream. Returns an error text, empty if all is well.
template <auto K, class... Args>
std::string launch(const char* name, dim3 grid, dim3 block, size_t smem, cudaStream_t stream,
                   Args&&... args) {
  const Launch launch{name, reinterpret_cast<const void*>(K), grid, block, smem, nullptr, nullptr};
  return launch_as<K>(K, launch, stream, std::forward<Args>(args)...);
}

}  // namespace needle::sim
