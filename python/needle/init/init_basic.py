"""Constant and random Tensors. Random numbers come from numpy's global stream, one call each, as in the course.

Shapes are given as numbers, ``rand(2, 3)``, or as one tuple. device: default ``cpu()``. dtype: default float32 (``randb``: bool).
requires_grad: default False.
"""

from __future__ import annotations

import numpy as np

from ..autograd import Tensor
from ..backend_ndarray import kernels
from ..backend_ndarray.shapes import as_shape
from ..backend_selection import as_device


def _lengths(shape: tuple) -> tuple:
    """The shape given as one tuple or list, or as several numbers."""
    return as_shape(shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape)


def _check(op: str, fits: bool, said: str) -> None:
    if not fits:
        raise ValueError(f"[{op}] {said}")


def rand(*shape, low=0.0, high=1.0, device=None, dtype="float32", requires_grad=False) -> Tensor:
    """Uniform from low to high, which rounding may reach. raises: ValueError unless low <= high, and high - low is a float32."""
    fits = 0 <= high - low <= float(np.finfo(np.float32).max)
    _check("rand", fits, f"low is {low}, high is {high} (accepted: low <= high, of which the difference is a float32)")
    device = as_device(device)
    array = device.rand(*_lengths(shape)) * (high - low) + low
    return Tensor(array, device=device, dtype=dtype, requires_grad=requires_grad)


def randn(*shape, mean=0.0, std=1.0, device=None, dtype="float32", requires_grad=False) -> Tensor:
    """Normal with the given mean and standard deviation. raises: ValueError for a std below 0."""
    _check("randn", std >= 0, f"std is {std} (accepted: 0 or more)")
    device = as_device(device)
    array = device.randn(*_lengths(shape)) * std + mean
    return Tensor(array, device=device, dtype=dtype, requires_grad=requires_grad)


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
    _check("randb", 0 <= p <= 1, f"p is {p} (accepted: 0 to 1)")
    device = as_device(device)
    return Tensor(device.rand(*_lengths(shape)) <= p, device=device, dtype=dtype, requires_grad=requires_grad)


def one_hot(n: int, i, device=None, dtype="float32", requires_grad=False) -> Tensor:
    """(*i.shape, n) with 1 at the ids ``i`` (a Tensor), made on the device. raises: IndexError for an id outside 0..n-1."""
    device = as_device(device)
    ids = i.realize_cached_data() if isinstance(i, Tensor) else i
    return Tensor.make_const(device.one_hot(n, ids, dtype=dtype), requires_grad=requires_grad)


def zeros_like(array, *, device=None, requires_grad=False) -> Tensor:
    """Zeros of the shape, dtype and, if none is given, device of ``array``."""
    return constant(*array.shape, c=0.0, device=device or array.device, dtype=array.dtype, requires_grad=requires_grad)


def ones_like(array, *, device=None, requires_grad=False) -> Tensor:
    """Ones of the shape, dtype and, if none is given, device of ``array``."""
    return constant(*array.shape, c=1.0, device=device or array.device, dtype=array.dtype, requires_grad=requires_grad)


def arange(n: int, device=None, dtype="float32") -> Tensor:
    """0, 1, ..., n - 1."""
    return Tensor.make_const(kernels.arange(n, dtype or "float32", as_device(device)))


__all__ = ["arange", "constant", "one_hot", "ones", "ones_like", "rand", "randb", "randn", "zeros", "zeros_like"]
