// What the test programs share: device buffers and a check that names its line.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "launch.h"

#define CHECK(condition)                                                        \
  do {                                                                          \
    if (!(condition)) {                                                         \
      std::printf("%s:%d: CHECK(%s) failed\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                             \
    }                                                                           \
  } while (0)

inline int device_attribute(cudaDeviceAttr which) {
  int value = 0;
  needle::cuda_check(cudaDeviceGetAttribute(&value, which, 0), "cudaDeviceGetAttribute");
  return value;
}

template <class T>
class Buffer {
 public:
  explicit Buffer(size_t n) : n_(n) {
    needle::cuda_check(cudaMalloc(reinterpret_cast<void**>(&p_), n * sizeof(T)), "Buffer");
  }
  explicit Buffer(const std::vector<T>& values) : Buffer(values.size()) {
    needle::cuda_check(cudaMemcpy(p_, values.data(), n_ * sizeof(T), cudaMemcpyHostToDevice),
                       "Buffer");
  }
  ~Buffer() { cudaFree(p_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  T* get() const { return p_; }
  std::vector<T> host() const {
    std::vector<T> values(n_);
    needle::cuda_check(cudaMemcpy(values.data(), p_, n_ * sizeof(T), cudaMemcpyDeviceToHost),
                       "Buffer");
    return values;
  }

 private:
  T* p_ = nullptr;
  size_t n_;
};
