// How Python numbers and tuples become Scalar and Dims.
#pragma once

#include <pybind11/pybind11.h>

#include <limits>

#include "array.h"

namespace pybind11::detail {

// A Python number fills both members: exact as int64, and as double. Floats beyond int64 saturate,
// NaN is 0 there.
template <>
struct type_caster<needle::Scalar> {
  PYBIND11_TYPE_CASTER(needle::Scalar, const_name("int | float | bool"));

  bool load(handle source, bool) {
    PyObject* o = source.ptr();
    if (PyFloat_Check(o)) {
      set(PyFloat_AS_DOUBLE(o));
      return true;
    }
    if (PyLong_Check(o)) return set_integer(o);
    if (PyIndex_Check(o)) {  // numpy's integers
      const object integer = reinterpret_steal<object>(PyNumber_Index(o));
      if (integer) return set_integer(integer.ptr());
      PyErr_Clear();  // an array that is no scalar: perhaps it has a __float__
    }
    if (!PyNumber_Check(o)) return false;
    const double d = PyFloat_AsDouble(o);  // numpy's floats and bools, 0-dimensional arrays
    if (d == -1.0 && PyErr_Occurred()) {
      PyErr_Clear();
      return false;
    }
    set(d);
    return true;
  }

 private:
  void set(double d) {
    value.d = d;
    value.i = d != d        ? 0
              : d >= 0x1p63 ? std::numeric_limits<int64_t>::max()
              : d < -0x1p63 ? std::numeric_limits<int64_t>::min()
                            : int64_t(d);
  }
  bool set_integer(PyObject* o) {
    int overflow = 0;
    value.i = PyLong_AsLongLongAndOverflow(o, &overflow);
    if (overflow == 0) {
      value.d = double(value.i);
      return true;
    }
    const double d = PyLong_AsDouble(o);
    if (d == -1.0 && PyErr_Occurred()) throw error_already_set();
    set(d);
    return true;
  }
};

// Shapes and strides: any sequence of integers.
template <>
struct type_caster<needle::Dims> {
  PYBIND11_TYPE_CASTER(needle::Dims, const_name("tuple[int, ...]"));

  bool load(handle source, bool) {
    if (!PyTuple_Check(source.ptr()) && !PyList_Check(source.ptr())) return false;
    const Py_ssize_t n = PySequence_Fast_GET_SIZE(source.ptr());
    PyObject** items = PySequence_Fast_ITEMS(source.ptr());
    value.resize(size_t(n));
    for (Py_ssize_t i = 0; i < n; ++i) {
      if (PyFloat_Check(items[i])) return false;
      value[size_t(i)] = PyLong_AsLongLong(items[i]);
      if (value[size_t(i)] == -1 && PyErr_Occurred()) {
        PyErr_Clear();
        return false;
      }
    }
    return true;
  }

  static handle cast(const needle::Dims& dims, return_value_policy, handle) {
    tuple result(dims.size());
    for (size_t i = 0; i < dims.size(); ++i) result[i] = int_(dims[i]);
    return result.release();
  }
};

}  // namespace pybind11::detail
