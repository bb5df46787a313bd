// What a kernel's translation unit includes: arrays, the op enums, and the contract of kernel_api.h declared in the namespace
// of the device being compiled (the build defines NEEDLE_DEVICE as cpu, cuda or cuda_sim).
#pragma once

#include "array.h"

namespace needle {

enum class UnaryOp : int {
#define NEEDLE_UNARY(name, kind, expression) name,
#include "ewise_ops.def"
};
enum class BinaryOp : int {
#define NEEDLE_BINARY(name, kind, expression) name,
#include "ewise_ops.def"
};
enum class ReduceOp : int { sum, max, min, prod, sumsq, argmax, argmin };

constexpr int kLayerNormPartials = 64;  // LAYER_NORM_PARTIALS in kernels.py

namespace NEEDLE_DEVICE {

Allocator& allocator();
#include "kernel_api.h"

}  // namespace NEEDLE_DEVICE
}  // namespace needle
