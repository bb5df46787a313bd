// The Python face of a compiled backend: Array, the kernels of kernel_api.h by their own names, the
// course's names on top. Included once per device, by src/ndarray_backend_<device>, whose
// PYBIND11_MODULE calls bind_backend(m).
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "backend.h"
#include "bindings_casters.h"
#include "bindings_dlpack.h"

#define NEEDLE_STRING_(x) #x
#define NEEDLE_STRING(x) NEEDLE_STRING_(x)

namespace needle::NEEDLE_DEVICE {

namespace py = pybind11;

// --- calling kernels -----------------------------------------------------------------------------

// Whether kernels are under way when their calls return, so that a copy may have to wait for them.
constexpr bool kAsynchronous = std::string_view(NEEDLE_STRING(NEEDLE_DEVICE)) != "cpu";

// Lets other Python threads run during large work, and while this one waits for a device; for small
// work the hand-over costs more than the kernel. A daemon thread that comes back after the
// interpreter has gone waits here for the end of the process, as it does in Python 3.14: Python up
// to 3.13 unwinds it, through frames that would drop Python objects without the lock.
class Unlocked {
 public:
  explicit Unlocked(int64_t elements, bool waits = false)
      : state_(elements >= kLargeElements || waits ? PyEval_SaveThread() : nullptr) {}
  ~Unlocked() {
    if (!state_) return;
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {
      for (;;) pause();
    }
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  static constexpr int64_t kLargeElements = 1 << 15;
  PyThreadState* state_;
};

inline void wait_for_device() {
  Unlocked unlocked(0, kAsynchronous);
  sync();
}

inline int64_t elements_of(const Array& array) { return array.size(); }
template <class T>
int64_t elements_of(const T&) {
  return 0;
}

// Bound<kernel>::call is the kernel with the interpreter's lock released when one of its arrays is
// large.
template <auto kernel>
struct Bound;
template <class... Args, void (*kernel)(Args...)>
struct Bound<kernel> {
  static void call(Args... args) {
    int64_t largest = 0;
    ((largest = std::max(largest, elements_of(args))), ...);
    Unlocked unlocked(largest);
    kernel(args...);
  }
};

// A view whose every element lies inside its array; anything else is an IndexError rather than a
// crash.
inline View checked(const Array& array, const Dims& shape, const Dims& strides, int64_t offset) {
  if (strides.size() != shape.size())
    throw std::invalid_argument("a view has " + std::to_string(shape.size()) + " dimensions and " +
                                std::to_string(strides.size()) + " strides");
  int64_t low = offset, high = offset;
  bool empty = false, inside = true;
  for (size_t i = 0; i < shape.size(); ++i) {
    if (shape[i] < 0)
      throw std::invalid_argument("a view has a length of " + std::to_string(shape[i]));
    if (shape[i] == 0) empty = true;
    int64_t reach = 0, &end = strides[i] < 0 ? low : high;
    if (__builtin_mul_overflow(shape[i] - 1, strides[i], &reach) ||
        __builtin_add_overflow(end, reach, &end))
      inside = false;
  }
  if (!empty && (!inside || low < 0 || high >= array.size()))
    throw std::out_of_range(
        "a view reaches " +
        (inside ? "elements " + std::to_string(low) + " to " + std::to_string(high) : "far") +
        " of an array of " + std::to_string(array.size()));
  return View{array, shape, strides, offset};
}

inline View whole(const Array& array, const Dims& shape) {
  static const Dims contiguous;
  if (array.size() < shape[0])
    throw std::out_of_range("an operand has " + std::to_string(array.size()) +
                            " elements, out has " + std::to_string(shape[0]));
  return View{array, shape, contiguous, 0};
}

// --- binding, family by family -------------------------------------------------------------------

// Python's answer to who asks for an array, a number; where it is large enough to be asked for.
inline py::object& site_hook() {
  static auto* hook = new py::object(py::none());  // never destroyed: the interpreter goes first
  return *hook;
}
inline int64_t site_of(int64_t size, DType dtype) {
  if (size < allocator().site_bytes() / dtype_size(dtype)) return 0;
  return site_hook()(size * dtype_size(dtype)).cast<int64_t>();
}

inline void bind_array(py::module_& m) {
  py::class_<Array>(m, "Array", py::module_local())
      // What py::init does, but for a failure to register the array: that would end the process.
      .def(
          "__init__",
          [](py::detail::value_and_holder& self, int64_t size, const std::string& dtype) {
            const DType type = dtype_from_name(dtype);
            auto array = std::make_unique<Array>(allocator(), size, type, site_of(size, type));
            self.value_ptr() = array.get();
            try {
              self.type->init_instance(self.inst, nullptr);
            } catch (...) {
              self.value_ptr() = nullptr;
              throw;
            }
            array.release();
          },
          py::detail::is_new_style_constructor(), py::arg("size"), py::arg("dtype") = "float32")
      .def_property_readonly("size", &Array::size)
      .def_property_readonly("dtype", [](const Array& a) { return dtype_name(a.dtype()); })
      .def_property_readonly("nbytes", &Array::nbytes)
      .def_property_readonly("serial", [](const Array& a) { return a.storage().serial; })
      .def("ptr", [](const Array& a) { return reinterpret_cast<uintptr_t>(a.ptr()); })
      .def("view", &Array::view, py::arg("offset"), py::arg("size"))
      .def_property(
          "last_write", [](const Array& a) { return a.storage().last_write; },
          [](const Array& a, int64_t stamp) { a.storage().last_write = stamp; })
      .def_property(
          "category", [](const Array& a) { return a.storage().category; },
          [](const Array& a, int category) { a.storage().set_category(category); });
}

inline py::dict stats_dict(const MemoryStats& s) {
  py::dict d;
  d["device"] = NEEDLE_STRING(NEEDLE_DEVICE);
  d["live"] = s.live;
  d["peak"] = s.peak;
  d["reserved"] = s.reserved;
  d["peak_reserved"] = s.peak_reserved;
  d["borrowed"] = s.borrowed;
  d["limit"] = s.limit;
  d["allocations"] = s.allocations;
  d["live_arrays"] = s.live_arrays;
  py::list now, at_peak;
  for (int64_t bytes : s.by_category) now.append(bytes);
  for (int64_t bytes : s.by_category_at_peak) at_peak.append(bytes);
  d["by_category"] = now;
  d["by_category_at_peak"] = at_peak;
  return d;
}

inline py::list event_list(const std::vector<MemoryEvent>& events) {
  py::list list(events.size());
  size_t i = 0;
  for (const MemoryEvent& e : events)
    list[i++] = py::make_tuple(int(e.kind), e.serial, e.nbytes, e.category, e.site);
  return list;
}

// A class of the package's errors module; `otherwise` where this module was imported alone.
inline PyObject* package_error(py::module_& m, const char* wanted, PyObject* otherwise) {
  const auto name = m.attr("__name__").cast<std::string>();
  const auto parent = name.rfind('.');
  const auto root = parent == std::string::npos ? parent : name.rfind('.', parent - 1);
  if (root == std::string::npos) return otherwise;
  const auto errors = py::module_::import((name.substr(0, root) + ".errors").c_str());
  return py::object(errors.attr(wanted)).release().ptr();
}

// OutOfMemory becomes the package's OutOfMemoryError(message, requested_bytes, stats).
inline void bind_memory(py::module_& m) {
  m.def("memory_stats", [] { return stats_dict(allocator().stats()); });
  m.def("reset_peak", [] { return stats_dict(allocator().reset_peak()); });
  m.def("empty_cache", [] {
    wait_for_device();
    allocator().empty_cache();
  });
  m.def("set_limit", [](int64_t bytes) { allocator().set_limit(bytes); });
  m.def("set_current_category", &Allocator::set_current_category);
  // From min_bytes on, hook(nbytes) is called before an array is made, and names who makes it.
  m.def("set_site_hook", [](py::object hook, int64_t min_bytes) {
    site_hook() = hook;
    allocator().set_site_bytes(hook.is_none() ? INT64_MAX : min_bytes);
  });
  // Lists of (kind, serial, nbytes, category, site); kind: 1 made, -1 freed, 0 retagged.
  m.def("memory_holders", [] { return event_list(allocator().holders()); });
  m.def("start_memory_log", [] { allocator().start_log(); });
  m.def("take_memory_log", [] { return event_list(allocator().take_log()); });

  static PyObject* const error_class = package_error(m, "OutOfMemoryError", PyExc_MemoryError);
  py::register_local_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const OutOfMemory& e) {
      const std::string text = std::string("[" NEEDLE_STRING(NEEDLE_DEVICE) "] ") + e.what();
      try {
        const py::object error = py::handle(error_class)(text, e.requested, stats_dict(e.stats));
        PyErr_SetObject(error_class, error.ptr());
      } catch (py::error_already_set& raised) {  // Ctrl-C, which pybind11 would forget for `e`
        raised.restore();
      }
    }
  });
}

inline const char* numpy_dtype(DType dtype) {
  return dtype == DType::kBFloat16 ? "uint16" : dtype_name(dtype);
}

inline py::array to_numpy(const Array& a, const Dims& shape, const Dims& strides, int64_t offset) {
  const View view = checked(a, shape, strides, offset);
  py::array result(py::dtype(numpy_dtype(a.dtype())), shape);
  const int64_t n = view.size();
  if (n == 0) return result;
  const Dims compact = compact_strides(shape);
  void* to = result.mutable_data();
  Unlocked unlocked(n, kAsynchronous);
  if (strides == compact) {
    copy_to_host(a.view(offset, n), to);
  } else if (kAsynchronous) {
    const Array packed(allocator(), n, a.dtype());
    strided_copy(a, strides, offset, packed, compact, 0, shape);
    copy_to_host(packed, to);
  } else {  // straight into numpy's memory
    const Array host(nullptr, to, n, a.dtype());
    strided_copy(a, strides, offset, host, compact, 0, shape);
  }
  return result;
}

inline void from_numpy(py::array a, const Array& out) {
  const py::dtype wanted(numpy_dtype(out.dtype()));
  if (!a.dtype().equal(wanted) || !(a.flags() & py::array::c_style))
    a = py::module_::import("numpy").attr("ascontiguousarray")(a, wanted);
  if (a.size() != out.size())
    throw std::invalid_argument("[from_numpy] sizes differ: the numpy array has " +
                                std::to_string(a.size()) + " elements, out has " +
                                std::to_string(out.size()));
  // True is any byte but 0 to numpy, 1 to C++ and to kernels.
  if (out.dtype() == DType::kBool) a = a.attr("view")("uint8").attr("astype")("bool");
  const void* from = a.data();
  Unlocked unlocked(out.size(), kAsynchronous);
  if (out.size() > 0) copy_from_host(from, out);
}

inline void copy_checked(const Array& a, const Dims& a_strides, int64_t a_offset, const Array& out,
                         const Dims& out_strides, int64_t out_offset, const Dims& shape) {
  const View from = checked(a, shape, a_strides, a_offset);
  checked(out, shape, out_strides, out_offset);
  Unlocked unlocked(from.size());
  strided_copy(a, a_strides, a_offset, out, out_strides, out_offset, shape);
}

inline void fill_checked(const Array& out, const Dims& strides, int64_t offset, const Dims& shape,
                         Scalar value) {
  const View to = checked(out, shape, strides, offset);
  Unlocked unlocked(to.size());
  strided_fill(out, strides, offset, shape, value);
}

inline void bind_movement(py::module_& m) {
  m.def("to_numpy", &to_numpy);
  m.def("from_numpy", &from_numpy);
  m.def("to_dlpack", [](const Array& a, Dims shape, Dims strides, int64_t offset, bool versioned) {
    checked(a, shape, strides, offset);
    wait_for_device();
    const auto make =
        versioned ? dlpack_export<DLManagedTensorVersioned> : dlpack_export<DLManagedTensor>;
    return make(a, std::move(shape), std::move(strides), offset, dlpack_device());
  });
  m.def("dlpack_device", [] {
    const DLDevice device = dlpack_device();
    return py::make_tuple(int(device.device_type), device.device_id);
  });
  m.def("from_dlpack", [](py::capsule capsule) {
    return dlpack_import(std::move(capsule), allocator(), dlpack_device());
  });
  m.def("fill", &Bound<&fill>::call);
  m.def("arange", &Bound<&arange>::call);
  m.def("strided_copy", &copy_checked);
  m.def("strided_fill", &fill_checked);
  // The course's names for the same.
  m.def("compact", [](const Array& a, const Array& out, const Dims& shape, const Dims& strides,
                      int64_t offset) {
    copy_checked(a, strides, offset, out, compact_strides(shape), 0, shape);
  });
  m.def("ewise_setitem", [](const Array& a, const Array& out, const Dims& shape,
                            const Dims& strides, int64_t offset) {
    copy_checked(a, compact_strides(shape), 0, out, strides, offset, shape);
  });
  m.def("scalar_setitem",
        [](int64_t, Scalar value, const Array& out, const Dims& shape, const Dims& strides,
           int64_t offset) { fill_checked(out, strides, offset, shape, value); });
}

inline void bind_unary(py::module_& m, const std::string& name, UnaryOp op) {
  m.def(name.c_str(), [op](const Array& a, const Array& out) {
    const Dims shape{out.size()};
    const View view = whole(a, shape);
    Unlocked unlocked(out.size());
    ewise_unary(op, view, out);
  });
  m.def(name.c_str(), [op](const Array& a, const Dims& strides, int64_t offset, const Array& out,
                           const Dims& shape) {
    const View view = checked(a, shape, strides, offset);
    Unlocked unlocked(out.size());
    ewise_unary(op, view, out);
  });
}

// compute(out); where a comparison is to go into an array of numbers, as in the course, 0 and 1.
template <class Compute>
void with_truth_as_numbers(bool is_comparison, const Array& out, const Compute& compute) {
  if (!is_comparison || out.dtype() == DType::kBool) return compute(out);
  const Array truth(allocator(), out.size(), DType::kBool);
  compute(truth);
  strided_copy(truth, {1}, 0, out, {1}, 0, {out.size()});
}

inline void bind_binary(py::module_& m, const std::string& name, BinaryOp op, bool is_comparison) {
  const std::string ewise = "ewise_" + name;
  m.def(ewise.c_str(), [op, is_comparison](const Array& a, const Array& b, const Array& out) {
    const Dims shape{out.size()};
    const View x = whole(a, shape), y = whole(b, shape);
    Unlocked unlocked(out.size());
    with_truth_as_numbers(is_comparison, out, [&](const Array& to) { ewise_binary(op, x, y, to); });
  });
  m.def(ewise.c_str(),
        [op](const Array& a, const Dims& a_strides, int64_t a_offset, const Array& b,
             const Dims& b_strides, int64_t b_offset, const Array& out, const Dims& shape) {
          const View x = checked(a, shape, a_strides, a_offset);
          const View y = checked(b, shape, b_strides, b_offset);
          Unlocked unlocked(out.size());
          ewise_binary(op, x, y, out);
        });
  // compute(array, number, out)
  const auto with_number = [&](const std::string& called, auto compute) {
    m.def(called.c_str(), [=](const Array& a, Scalar number, const Array& out) {
      const Dims shape{out.size()};
      const View x = whole(a, shape);
      Unlocked unlocked(out.size());
      with_truth_as_numbers(is_comparison, out, [&](const Array& to) { compute(x, number, to); });
    });
    m.def(called.c_str(), [=](const Array& a, const Dims& strides, int64_t offset, Scalar number,
                              const Array& out, const Dims& shape) {
      const View x = checked(a, shape, strides, offset);
      Unlocked unlocked(out.size());
      compute(x, number, out);
    });
  };
  with_number("scalar_" + name,
              [op](const View& a, Scalar b, const Array& out) { scalar_binary(op, a, b, out); });
  with_number("rscalar_" + name,
              [op](const View& b, Scalar a, const Array& out) { rscalar_binary(op, a, b, out); });
}

inline void bind_ewise(py::module_& m) {
#define NEEDLE_UNARY(name, kind, expression) bind_unary(m, "ewise_" #name, UnaryOp::name);
#define NEEDLE_BINARY(name, kind, expression) \
  bind_binary(m, #name, BinaryOp::name, std::string(#kind) == "CMP");
#include "ewise_ops.def"
  m.def("where", [](const Array& c, const Dims& c_strides, int64_t c_offset, const Array& a,
                    const Dims& a_strides, int64_t a_offset, const Array& b, const Dims& b_strides,
                    int64_t b_offset, const Array& out, const Dims& shape) {
    const View condition = checked(c, shape, c_strides, c_offset);
    const View x = checked(a, shape, a_strides, a_offset);
    const View y = checked(b, shape, b_strides, b_offset);
    Unlocked unlocked(out.size());
    where(condition, x, y, out);
  });
}

inline void bind_reduce(py::module_& m) {
  const std::pair<const char*, ReduceOp> rows[] = {
      {"reduce_sum", ReduceOp::sum},       {"reduce_max", ReduceOp::max},
      {"reduce_min", ReduceOp::min},       {"reduce_prod", ReduceOp::prod},
      {"reduce_sumsq", ReduceOp::sumsq},   {"reduce_argmax", ReduceOp::argmax},
      {"reduce_argmin", ReduceOp::argmin},
  };
  for (const auto& [name, op_] : rows) {
    const ReduceOp op = op_;
    const bool of_nothing = op == ReduceOp::sum || op == ReduceOp::prod || op == ReduceOp::sumsq;
    const auto run = [op, of_nothing](const Array& a, const Array& out, int64_t outer,
                                      int64_t reduce_size, int64_t inner) {
      int64_t results = 0, elements = 0;
      if (std::min({outer, reduce_size, inner}) < 0 ||
          __builtin_mul_overflow(outer, inner, &results) ||
          __builtin_mul_overflow(results, reduce_size, &elements) || a.size() < elements ||
          out.size() < results)
        throw std::out_of_range("[reduce] an array is smaller than its shape says");
      if (reduce_size == 0 && outer * inner > 0 && !of_nothing)
        throw std::invalid_argument(
            "[reduce] an axis of length 0 has no largest or smallest element");
      Unlocked unlocked(a.size());
      reduce(op, a, out, outer, reduce_size, inner);
    };
    m.def(name, run);
    // The course's form: rows of reduce_size elements.
    m.def(name, [run](const Array& a, const Array& out, int64_t reduce_size) {
      run(a, out, out.size(), reduce_size, 1);
    });
  }
}

inline void bind_matmul(py::module_& m) {
  m.def("matmul", &Bound<&matmul>::call);
  // The course's form: (m, n) @ (n, p), all compact.
  m.def("matmul", [](const Array& a, const Array& b, const Array& out, int64_t rows, int64_t inner,
                     int64_t cols) {
    if (a.size() < rows * inner || b.size() < inner * cols || out.size() < rows * cols)
      throw std::out_of_range("[matmul] an array is smaller than its shape says");
    Unlocked unlocked(std::max(a.size(), b.size()));
    const int64_t one = 1;  // the least that a row stride may be
    matmul(a, 0, {}, std::max(inner, one), false, b, 0, {}, std::max(cols, one), false, out, {},
           rows, inner, cols, false);
  });
}

inline void bind_fused(py::module_& m) {
#define NEEDLE_BIND(name) m.def(#name, &Bound<&name>::call);
  NEEDLE_BIND(conv_forward)
  NEEDLE_BIND(conv_backward)
  NEEDLE_BIND(softmax_forward)
  NEEDLE_BIND(softmax_backward)
  NEEDLE_BIND(log_softmax_forward)
  NEEDLE_BIND(log_softmax_backward)
  NEEDLE_BIND(logsumexp_forward)
  NEEDLE_BIND(logsumexp_backward)
  NEEDLE_BIND(layer_norm_forward)
  NEEDLE_BIND(layer_norm_backward)
  NEEDLE_BIND(batch_norm_forward)
  NEEDLE_BIND(batch_norm_backward)
  NEEDLE_BIND(lstm_cell_forward)
  NEEDLE_BIND(lstm_cell_backward)
  NEEDLE_BIND(rotary)
  NEEDLE_BIND(embedding_forward)
  NEEDLE_BIND(embedding_backward)
  NEEDLE_BIND(embedding_put)
  NEEDLE_BIND(one_hot)
  NEEDLE_BIND(cross_entropy_forward)
  NEEDLE_BIND(cross_entropy_backward)
  NEEDLE_BIND(sgd_step)
  NEEDLE_BIND(adam_step)
  NEEDLE_BIND(unscale)
  NEEDLE_BIND(attention_forward)
  NEEDLE_BIND(attention_backward)
  NEEDLE_BIND(attention_decode)
  NEEDLE_BIND(blocksparse_sdd)
  NEEDLE_BIND(blocksparse_dsd)
  NEEDLE_BIND(blocksparse_dds)
  NEEDLE_BIND(dropout)
#undef NEEDLE_BIND
}

inline void bind_backend(py::module_& m) {
  m.attr("__device_name__") = NEEDLE_STRING(NEEDLE_DEVICE);
  m.def("sync", &wait_for_device);
  bind_array(m);
  bind_memory(m);
  bind_movement(m);
  bind_ewise(m);
  bind_reduce(m);
  bind_matmul(m);
  bind_fused(m);
}

}  // namespace needle::NEEDLE_DEVICE
