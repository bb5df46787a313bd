// What a kernel's translation unit includes: arrays, the op enums, and the contract of kernel_api.h
// declared in the namespace of the device being compiled (the build defines NEEDLE_DEVICE as cpu,
// cuda or cuda_sim).
#pragma once

#include "array.h"
#include "dlpack.h"

namespace needle {

enum class UnaryOp : int {
#define NEEDLE_UNARY(name, kind, expression) name,
#include "ewise_ops.def"
};
enum class BinaryOp : int {
#define NEEDLE_BINARY(name, kind, expression) name,
#include "ewise_ops.def"
};
// The kinds of row in ewise_ops.def.
enum class Kind { ANY, NUM, FLT, TEST, CMP, LOGIC };
constexpr bool gives_bool(Kind kind) {
  return kind == Kind::TEST || kind == Kind::CMP || kind == Kind::LOGIC;
}
enum class ReduceOp : int { sum, max, min, prod, sumsq, argmax, argmin };

constexpr int kColumnPartials = 64;  // COLUMN_PARTIALS in kernels.py

// Hidden by their declarations too: a kernel that nobody defines is then an error of the linker,
// not of the import.
#pragma GCC visibility push(hidden)
namespace NEEDLE_DEVICE {

// What a device has beside its kernels, in src/ndarray_backend_<device>.
Allocator& allocator();
DLDevice dlpack_device();
// Returns when everything asked so far is done, and raises what went wrong on the device.
void sync();
void copy_to_host(const Array& from, void* to);  // all of `from`; both wait until the copy is done
void copy_from_host(const void* from, const Array& to);  // all of `to`

#include "kernel_api.h"

}  // namespace NEEDLE_DEVICE
#pragma GCC visibility pop
}  // namespace needle
