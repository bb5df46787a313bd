// Array: a flat, typed, shared piece of device memory; View: an array seen through shape, strides
// and offset.
#pragma once

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "allocator.h"
#include "dtype.h"

namespace needle {

using Dims = std::vector<int64_t>;

inline int64_t size_of(const Dims& shape) {
  int64_t n = 1;
  for (int64_t d : shape) n *= d;
  return n;
}

inline Dims compact_strides(const Dims& shape) {
  Dims strides(shape.size());
  int64_t stride = 1;
  for (size_t i = shape.size(); i-- > 0; stride *= shape[i]) strides[i] = stride;
  return strides;
}

// The memory behind one or more Arrays. `last_write` is a stamp that Python sets when it writes in
// place: a recomputation compares it with the time its node was made.
struct Storage : Holder {
  Storage(Allocator& owner, int64_t bytes, int64_t site_ = 0) : allocator(&owner) {
    owner.hold(*this, bytes, site_);
  }
  // Memory that came from outside (DLPack): counted as borrowed, released by `release`.
  Storage(Allocator& owner, void* borrowed, int64_t bytes, std::function<void()> release_)
      : allocator(&owner), release(std::move(release_)) {
    ptr = borrowed;
    nbytes = bytes;
    allocator->count_borrowed(nbytes);
  }
  ~Storage() {
    if (release) {
      allocator->count_borrowed(-nbytes);
      release();
    } else {
      allocator->let_go(*this);
    }
  }
  Storage(const Storage&) = delete;
  Storage& operator=(const Storage&) = delete;

  void set_category(int wanted) {
    if (release)
      category = wanted;
    else
      allocator->set_category(*this, wanted);
  }

  Allocator* allocator;
  int64_t last_write = 0;
  std::function<void()> release;
};

class Array {
 public:
  Array(Allocator& allocator, int64_t size, DType dtype, int64_t site = 0)
      : storage_(std::make_shared<Storage>(allocator, checked_bytes(size, dtype), site)),
        ptr_(storage_->ptr),
        size_(size),
        dtype_(dtype) {}
  Array(std::shared_ptr<Storage> storage, void* ptr, int64_t size, DType dtype)
      : storage_(std::move(storage)), ptr_(ptr), size_(size), dtype_(dtype) {}

  int64_t size() const { return size_; }
  DType dtype() const { return dtype_; }
  int64_t nbytes() const { return size_ * dtype_size(dtype_); }
  void* ptr() const { return ptr_; }
  Storage& storage() const { return *storage_; }
  const std::shared_ptr<Storage>& shared_storage() const { return storage_; }

  // The elements offset .. offset + size of this array, sharing its memory.
  Array view(int64_t offset, int64_t size) const {
    if (offset < 0 || size < 0 || offset > size_ || size > size_ - offset)
      throw std::out_of_range("view outside its array");
    return Array(storage_, static_cast<char*>(ptr_) + offset * dtype_size(dtype_), size, dtype_);
  }

  template <class T>
  T* data() const {
    if (DTypeOf<T>::value != dtype_)
      throw std::invalid_argument(std::string("array is ") + dtype_name(dtype_) +
                                  ", kernel wants " + dtype_name(DTypeOf<T>::value));
    return static_cast<T*>(ptr_);
  }

 private:
  static int64_t checked_bytes(int64_t size, DType dtype) {
    int64_t bytes = 0;
    if (size < 0 || __builtin_mul_overflow(size, dtype_size(dtype), &bytes))
      throw std::invalid_argument("impossible array size " + std::to_string(size));
    return bytes;
  }

  std::shared_ptr<Storage> storage_;
  void* ptr_;
  int64_t size_;
  DType dtype_;
};

// f(Tag<type>) for the type of ids, int32 or int64.
template <class F>
void dispatch_ids(const Array& ids, const char* op, F&& f) {
  if (ids.dtype() == DType::kInt32) return f(Tag<int32_t>{});
  if (ids.dtype() == DType::kInt64) return f(Tag<int64_t>{});
  throw std::invalid_argument(std::string("[") + op + "] ids have a bad dtype: " +
                              dtype_name(ids.dtype()) + " (int32 or int64)");
}

struct View {
  const Array& array;
  const Dims& shape;
  const Dims& strides;  // empty: contiguous from offset
  int64_t offset = 0;

  bool contiguous() const { return strides.empty(); }
  int64_t size() const { return size_of(shape); }
};

}  // namespace needle
