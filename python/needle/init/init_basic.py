"""Constant and random Tensors. Random numbers come from numpy's global stream, one call each, as in the course.

Shapes are given as numbers, ``rand(2, 3)``, or as one tuple. device: default ``cpu()``. dtype: default float32 (``randb``: bool).
requires_grad: default False. raises: TypeError for a parameter of a distribution that is no number.
"""

from __future__ import annotations

import numpy as np

from .. import dtype as dt
from ..autograd import Tensor
from ..backend_ndarray import kernels
from ..backend_ndarray.shapes import as_shape
from ..backend_selection import NDArray, as_device
from ..errors import DTypeError, check_number, check_real, type_name


def _lengths(shape: tuple) -> tuple:
    """The shape given as one tuple or list, or as several numbers."""
    return as_shape(shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape)


def _wide(dtype) -> str:
    """What numbers are drawn and scaled in, before they become those of ``dtype``."""
    return "float64" if dtype is not None and dt.name_of(dtype) == "float64" else "float32"


def _drawn(array: NDArray, dtype, requires_grad: bool) -> Tensor:
    """The fresh ``array`` as a Tensor of ``dtype`` (None: its own)."""
    return Tensor.make_const(array if dtype is None else array.astype(dtype, copy=False), requires_grad=requires_grad)


def rand(*shape, low=0.0, high=1.0, device=None, dtype="float32", requires_grad=False) -> Tensor:
    """Uniform from low to high, which rounding may reach. raises: ValueError unless low <= high, and high - low is a float32."""
    check_real("rand", "low", low)
    check_real("rand", "high", high)
    if not 0 <= high - low <= float(np.finfo(np.float32).max):
        raise ValueError(f"[rand] low is {low}, high is {high} (accepted: low <= high, of which the difference is a float32)")
    return _drawn(as_device(device).rand(*_lengths(shape), dtype=_wide(dtype)) * (high - low) + low, dtype, requires_grad)


def randn(*shape, mean=0.0, std=1.0, device=None, dtype="float32", requires_grad=False) -> Tensor:
    """Normal with the given mean and standard deviation. raises: ValueError for a std that is not 0 or more, or infinite."""
    check_real("randn", "mean", mean)
    check_number("randn", "std", std)
    return _drawn(as_device(device).randn(*_lengths(shape), dtype=_wide(dtype)) * std + mean, dtype, requires_grad)


def constant(*shape, c=1.0, device=None, dtype="float32", requires_grad=False) -> Tensor:
    """Of ``shape``, every element ``c``."""
    device = as_device(device)
    return Tensor.make_const(device.full(_lengths(shape), c, dtype), requires_grad=requires_grad)


def ones(*shape, device=None, dtype="float32", requires_grad=False) -> Tensor:
    """Of ``shape``, every element 1."""
    return constant(*shape, c=1.0, device=device, dtype=dtype, requires_grad=requires_grad)


def zeros(*shape, device=None, dtype="float32", requires_grad=False) -> Tensor:
    """Of ``shape``, every element 0."""
    return constant(*shape, c=0.0, device=device, dtype=dtype, requires_grad=requires_grad)


def randb(*shape, p=0.5, device=None, dtype="bool", requires_grad=False) -> Tensor:
    """True with probability p: where a uniform number is at most p. raises: ValueError for a p that is no probability."""
    check_number("randb", "p", p, most=1)
    return _drawn(as_device(device).rand(*_lengths(shape)) <= p, dtype, requires_grad)


def one_hot(n: int, i, device=None, dtype="float32", requires_grad=False) -> Tensor:
    """(*i.shape, n) with 1 at the ids ``i`` (a Tensor), made on the device. raises: IndexError for an id outside 0..n-1."""
    device = as_device(device)
    ids = i.realize_cached_data() if isinstance(i, Tensor) else i
    return Tensor.make_const(device.one_hot(n, ids, dtype=dtype), requires_grad=requires_grad)


def _like(op: str, array, c: float, device, requires_grad: bool) -> Tensor:
    if not hasattr(array, "device"):
        raise DTypeError(f"[{op}] array is of type {type_name(array)} (accepted: a Tensor, or an NDArray)")
    return constant(*array.shape, c=c, device=device or array.device, dtype=array.dtype, requires_grad=requires_grad)


def zeros_like(array, *, device=None, requires_grad=False) -> Tensor:
    """Zeros of the shape, dtype and, if none is given, device of ``array``."""
    return _like("zeros_like", array, 0.0, device, requires_grad)


def ones_like(array, *, device=None, requires_grad=False) -> Tensor:
    """Ones of the shape, dtype and, if none is given, device of ``array``."""
    return _like("ones_like", array, 1.0, device, requires_grad)


def arange(n: int, device=None, dtype="float32") -> Tensor:
    """0, 1, ..., n - 1."""
    return Tensor.make_const(kernels.arange(n, dtype or "float32", as_device(device)))


__all__ = ["arange", "constant", "one_hot", "ones", "ones_like", "rand", "randb", "randn", "zeros", "zeros_like"]
