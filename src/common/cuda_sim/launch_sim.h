// From launch<K>(config, args...) to a grid of blocks.
#pragma once

#include <functional>
#include <string>
#include <tuple>
#include <utility>

#include "runtime_api.h"
#include "thread.h"

namespace needle::sim {

struct Launch {
  const char* kernel_name;
  const void* function;
  dim3 grid, block;
  size_t smem;
  void (*run)(void* args);  // one CUDA thread
  void* args;
};

// Each returns an error text, empty if all is well.
NEEDLE_SIM_HIDDEN std::string check_launch(const Launch& launch);
NEEDLE_SIM_HIDDEN std::string run_grid(const Launch& launch);

NEEDLE_SIM_HIDDEN bool streams_are_lazy();
NEEDLE_SIM_HIDDEN void enqueue(cudaStream_t stream, std::function<std::string()> work);

template <auto K, class... Params>
void run_thread(void* args) {
  std::apply(K, *static_cast<std::tuple<Params...>*>(args));
}

template <auto K, class... Params, class... Args>
bool launch_as(void (*)(Params...), const char* name, dim3 grid, dim3 block, size_t smem,
               cudaStream_t stream, std::string& error, Args&&... args) {
  static_assert(sizeof...(Params) == sizeof...(Args), "launch: wrong number of kernel arguments");
  std::tuple<Params...> values(std::forward<Args>(args)...);
  Launch launch{name, reinterpret_cast<const void*>(K), grid,   block,
                smem, run_thread<K, Params...>,         &values};
  error = check_launch(launch);
  if (!error.empty()) return false;
  if (streams_are_lazy()) {
    enqueue(stream, [launch, values]() mutable {
      launch.args = &values;
      return run_grid(launch);
    });
    return true;
  }
  error = run_grid(launch);
  return error.empty();
}

template <auto K, class... Args>
bool launch(const char* name, dim3 grid, dim3 block, size_t smem, cudaStream_t stream,
            std::string& error, Args&&... args) {
  return launch_as<K>(K, name, grid, block, smem, stream, error, std::forward<Args>(args)...);
}

}  // namespace needle::sim
