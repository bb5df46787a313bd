// Arrays to and from DLPack capsules, without copying.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#include "array.h"
#include "bindings_casters.h"
#include "dlpack.h"

namespace needle {

inline DLDataType dlpack_dtype(DType dtype) {
  const uint8_t bits = uint8_t(dtype_size(dtype) * 8);
  switch (dtype) {
    case DType::kBFloat16:
      return {kDLBfloat, bits, 1};
    case DType::kInt32:
    case DType::kInt64:
      return {kDLInt, bits, 1};
    case DType::kUInt8:
      return {kDLUInt, bits, 1};
    case DType::kBool:
      return {kDLBool, bits, 1};
    default:
      return {kDLFloat, bits, 1};
  }
}

inline DType dtype_from_dlpack(DLDataType wanted) {
  for (int i = 0; i <= int(DType::kBool); ++i) {
    const DLDataType have = dlpack_dtype(DType(i));
    if (have.code == wanted.code && have.bits == wanted.bits && wanted.lanes == 1) return DType(i);
  }
  throw std::invalid_argument(
      "[from_dlpack] unsupported dtype: DLPack code " + std::to_string(wanted.code) + " with " +
      std::to_string(wanted.bits) +
      " bits (float16/32/64, bfloat16, int32, int64, uint8 and bool are accepted)");
}

template <typename Managed>
inline constexpr const char* kCapsuleName = "dltensor";
template <>
inline constexpr const char* kCapsuleName<DLManagedTensorVersioned> = "dltensor_versioned";

// What an exported tensor holds on to: its memory, and the shape and strides that the struct points
// at.
template <typename Managed>
struct DLPackExport {
  Managed managed{};
  std::shared_ptr<Storage> storage;
  Dims shape, strides;
};

template <typename Managed>
pybind11::capsule dlpack_export(const Array& array, Dims shape, Dims strides, int64_t offset,
                                DLDevice device) {
  auto owner = std::make_unique<DLPackExport<Managed>>();
  owner->storage = array.shared_storage();
  owner->shape = std::move(shape);
  owner->strides = std::move(strides);
  if constexpr (std::is_same_v<Managed, DLManagedTensorVersioned>) owner->managed.version = {1, 0};
  DLTensor& t = owner->managed.dl_tensor;
  t.data = static_cast<char*>(array.ptr()) + offset * dtype_size(array.dtype());
  t.device = device;
  t.ndim = int32_t(owner->shape.size());
  t.dtype = dlpack_dtype(array.dtype());
  t.shape = owner->shape.data();
  t.strides = owner->strides.data();
  t.byte_offset = 0;
  owner->managed.manager_ctx = owner.get();
  owner->managed.deleter = [](Managed* self) {
    delete static_cast<DLPackExport<Managed>*>(self->manager_ctx);
  };
  // A consumer renames the capsule; one that nobody consumed frees the tensor itself.
  constexpr const char* name = kCapsuleName<Managed>;
  PyObject* capsule = PyCapsule_New(&owner.release()->managed, name, [](PyObject* o) {
    if (!PyCapsule_IsValid(o, name)) return;
    auto* managed = static_cast<Managed*>(PyCapsule_GetPointer(o, name));
    managed->deleter(managed);
  });
  if (capsule == nullptr) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::capsule>(capsule);
}

// Whether all elements of the axes from ``axis`` on are 0 or 1, which is what C++ reads a bool
// from.
inline bool are_bools(const uint8_t* at, const Dims& shape, const Dims& strides, size_t axis) {
  if (axis == shape.size()) return *at <= 1;
  const int64_t n = shape[axis], stride = strides[axis];
  bool all = true;
  if (axis + 1 == shape.size())
    for (int64_t i = 0; i < n; ++i) all &= at[i * stride] <= 1;
  else
    for (int64_t i = 0; i < n && all; ++i)
      all = are_bools(at + i * stride, shape, strides, axis + 1);
  return all;
}

// (Array, shape, strides) on the capsule's memory, which is released with the last Array on it.
inline pybind11::tuple dlpack_import(pybind11::capsule capsule, Allocator& allocator,
                                     DLDevice device) {
  if (!PyCapsule_IsValid(capsule.ptr(), "dltensor"))
    throw std::invalid_argument("[from_dlpack] not an unconsumed DLPack capsule (\"dltensor\")");
  auto* managed = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
  const DLTensor& t = managed->dl_tensor;
  if (t.device.device_type != device.device_type || t.device.device_id != device.device_id)
    throw std::invalid_argument(
        "[from_dlpack] memory of device type " + std::to_string(t.device.device_type) + ", id " +
        std::to_string(t.device.device_id) + " (this device is type " +
        std::to_string(device.device_type) + ", id " + std::to_string(device.device_id) + ")");
  const DType dtype = dtype_from_dlpack(t.dtype);
  const Dims shape(t.shape, t.shape + t.ndim);
  Dims strides(shape.size());
  int64_t reach = 1, count = 1;
  for (size_t i = shape.size(); i-- > 0; count *= shape[i]) {
    strides[i] = t.strides ? t.strides[i] : count;
    if (strides[i] < 0 && shape[i] > 1)
      throw std::invalid_argument("[from_dlpack] a negative stride (make the array contiguous)");
    reach += (shape[i] - 1) * strides[i];
  }
  if (count == 0) reach = 0;
  void* data = static_cast<char*>(t.data) + t.byte_offset;
  if (reinterpret_cast<uintptr_t>(data) % dtype_size(dtype) != 0)
    throw std::invalid_argument("[from_dlpack] memory that is not aligned to its elements of " +
                                std::to_string(dtype_size(dtype)) + " bytes (make a copy)");
  if (dtype == DType::kBool && device.device_type == kDLCPU &&
      !are_bools(static_cast<const uint8_t*>(data), shape, strides, 0))
    throw std::invalid_argument(
        "[from_dlpack] bytes of bool that are neither 0 nor 1 (make a copy)");
  auto release = [managed] {
    if (managed->deleter == nullptr) return;
    pybind11::gil_scoped_acquire locked;  // the producer may be a Python object
    managed->deleter(managed);
  };
  auto storage = std::make_shared<Storage>(allocator, data, reach * dtype_size(dtype), release);
  PyCapsule_SetName(capsule.ptr(), "used_dltensor");
  return pybind11::make_tuple(Array(std::move(storage), data, reach, dtype), pybind11::cast(shape),
                              pybind11::cast(strides));
}

}  // namespace needle
