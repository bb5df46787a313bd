"""Constant and random Tensors. Random numbers come from numpy's global stream, one call each, as in the course."""

from __future__ import annotations

from .. import backend_selection
from ..autograd import Tensor
from ..backend_ndarray import kernels


def rand(*shape, low=0.0, high=1.0, device=None, dtype="float32", requires_grad=False) -> Tensor:
    """Uniform in [low, high)."""
    device = device or backend_selection.cpu()
    array = device.rand(*shape) * (high - low) + low
    return Tensor(array, device=device, dtype=dtype, requires_grad=requires_grad)


def randn(*shape, mean=0.0, std=1.0, device=None, dtype="float32", requires_grad=False) -> Tensor:
    """Normal with the given mean and standard deviation."""
    device = device or backend_selection.cpu()
    array = device.randn(*shape) * std + mean
    return Tensor(array, device=device, dtype=dtype, requires_grad=requires_grad)


def constant(*shape, c=1.0, device=None, dtype="float32", requires_grad=False) -> Tensor:
    device = device or backend_selection.cpu()
    return Tensor.make_const(device.full(shape, c, dtype), requires_grad=requires_grad)


def ones(*shape, device=None, dtype="float32", requires_grad=False) -> Tensor:
    return constant(*shape, c=1.0, device=device, dtype=dtype, requires_grad=requires_grad)


def zeros(*shape, device=None, dtype="float32", requires_grad=False) -> Tensor:
    return constant(*shape, c=0.0, device=device, dtype=dtype, requires_grad=requires_grad)


def randb(*shape, p=0.5, device=None, dtype="bool", requires_grad=False) -> Tensor:
    """True with probability p: where a uniform number is at most p."""
    device = device or backend_selection.cpu()
    return Tensor(device.rand(*shape) <= p, device=device, dtype=dtype, requires_grad=requires_grad)


def one_hot(n: int, i, device=None, dtype="float32", requires_grad=False) -> Tensor:
    """(*i.shape, n) with 1 at the ids ``i`` (a Tensor), made on the device. raises: IndexError for an id outside 0..n-1."""
    device = device or backend_selection.cpu()
    ids = i.realize_cached_data() if isinstance(i, Tensor) else i
    if isinstance(i, Tensor) and i.device != device:
        ids = ids.to(device)
    return Tensor.make_const(device.one_hot(n, ids, dtype=dtype), requires_grad=requires_grad)


def zeros_like(array, *, device=None, requires_grad=False) -> Tensor:
    return constant(*array.shape, c=0.0, device=device or array.device, dtype=array.dtype, requires_grad=requires_grad)


def ones_like(array, *, device=None, requires_grad=False) -> Tensor:
    return constant(*array.shape, c=1.0, device=device or array.device, dtype=array.dtype, requires_grad=requires_grad)


def arange(n: int, device=None, dtype="float32") -> Tensor:
    """0, 1, ..., n - 1."""
    return Tensor.make_const(kernels.arange(n, dtype, device or backend_selection.cpu()))


__all__ = ["arange", "constant", "one_hot", "ones", "ones_like", "rand", "randb", "randn", "zeros", "zeros_like"]
