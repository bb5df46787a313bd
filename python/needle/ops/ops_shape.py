"""Ops that move elements about: views, stacking, padding with zeros."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import accumulate
from typing import Any

from .. import dtype as dt
from ..autograd import Tensor, TensorTuple, TensorTupleOp, check_tensors
from ..backend_ndarray.ndarray import NDArray
from ..backend_ndarray.ndarray import check_one_device as _check_one_device
from ..backend_ndarray.ndarray import empty as _empty
from ..backend_ndarray.ndarray import write_parts as _write_parts
from ..backend_ndarray.shapes import frozen, normalize_axis, pad_widths
from ..errors import ShapeError
from ._reads import _NoRead
from .ops_tuple import make_tuple


class Reshape(_NoRead):
    """The same elements in row-major order under another shape; one length may be -1."""

    def __init__(self, shape):
        self.shape = frozen(shape)

    def compute(self, a):
        return (a if a._contiguous else a.compact()).reshape(self.shape)

    def gradient(self, out_grad, node):
        return reshape(out_grad, node.inputs[0].shape)


def reshape(a: Tensor, shape) -> Tensor:
    """The same elements in row-major order under another shape; one length may be -1. raises: ShapeError."""
    return Reshape(shape)(a)


class Transpose(_NoRead):
    """Swaps two axes, by default the last two."""

    def __init__(self, axes=None):
        self.axes = frozen(axes)

    def compute(self, a):
        if self.axes is not None and (not isinstance(self.axes, (tuple, list)) or len(self.axes) != 2):
            raise ShapeError(f"[transpose] swaps exactly two axes, got {self.axes} (permute takes a whole order)")
        i, j = self.axes if self.axes is not None else (-2, -1)
        order = list(range(a.ndim))
        i, j = normalize_axis(i, a.ndim, "transpose"), normalize_axis(j, a.ndim, "transpose")
        order[i], order[j] = j, i
        return a.permute(order)

    def gradient(self, out_grad, node):
        return Transpose(self.axes)(out_grad)


def transpose(a: Tensor, axes=None) -> Tensor:
    """a with two axes swapped, by default the last two. raises: ShapeError for another number of axes."""
    return Transpose(axes)(a)


class Permute(_NoRead):
    """The axes in another order, numpy's transpose."""

    def __init__(self, axes):
        self.axes = frozen(axes)

    def compute(self, a):
        return a.permute(self.axes)

    def gradient(self, out_grad, node):
        n = len(self.axes)
        order = [a % n for a in self.axes]
        return permute(out_grad, [order.index(i) for i in range(n)])


def permute(a: Tensor, axes) -> Tensor:
    """The axes in another order, numpy's transpose. raises: ShapeError if ``axes`` is no order of all of them."""
    return Permute(axes)(a)


class Flip(_NoRead):
    """The elements in reverse order along ``axes`` (None: all)."""

    def __init__(self, axes=None):
        self.axes = frozen(axes)

    def compute(self, a):
        return a.flip(self.axes)

    def gradient(self, out_grad, node):
        return flip(out_grad, self.axes)


def flip(a: Tensor, axes=None) -> Tensor:
    """The elements in reverse order along ``axes``: an int, several, or None for all. raises: ShapeError for another axis."""
    return Flip(axes)(a)


class Pad(_NoRead):
    """Zeros around the array: one (left, right) pair per axis."""

    def __init__(self, widths):
        self.widths = pad_widths(widths)

    def compute(self, a):
        return a.pad(self.widths)

    def gradient(self, out_grad, node):
        shape = node.inputs[0].shape
        return out_grad[tuple(slice(left, left + n) for n, (left, _) in zip(shape, self.widths))]


def pad(a: Tensor, widths) -> Tensor:
    """Zeros around a: ``widths`` is one (left, right) pair per axis. raises: ShapeError for other widths."""
    return Pad(widths)(a)


def _first(op: str, args: Sequence[NDArray]) -> NDArray:
    """The first array. raises: ShapeError if there is none; DeviceError if another is on another device."""
    if not args:
        raise ShapeError(f"[{op}] no arrays (accepted: at least one)")
    for a in args:
        _check_one_device(op, args[0], a)
    return args[0]


def _widest(args) -> str:
    return reduce(dt.promote, [a.dtype for a in args])


def _slices(a: NDArray, axis: int) -> list[NDArray]:
    """Views, one for each place along ``axis``, without it."""
    shape, strides = a.shape[:axis] + a.shape[axis + 1 :], a.strides[:axis] + a.strides[axis + 1 :]
    return [a._view(shape, strides, a._offset + i * a.strides[axis]) for i in range(a.shape[axis])]


def _as_tuple(op: str, args: Any) -> TensorTuple:
    """Several Tensors as one value. raises: DTypeError for what are none."""
    try:
        return args if isinstance(args, TensorTuple) else make_tuple(*args)
    except TypeError:  # of make_tuple, or of Python where args is one thing
        check_tensors(op, *(args if hasattr(args, "__iter__") else (args,)))
        raise


class Stack(_NoRead):
    """Equal-shaped arrays along a new axis, written into one array. Takes a TensorTuple."""

    takes_tuple = True

    def __init__(self, axis: int):
        self.axis = axis

    def compute(self, args):
        first = _first("stack", args)
        if any(a.shape != first.shape for a in args):
            raise ShapeError(f"[stack] shapes differ: {[a.shape for a in args]}")
        axis = normalize_axis(self.axis, first.ndim + 1, "stack")
        out = _empty(first.shape[:axis] + (len(args),) + first.shape[axis:], _widest(args), first.device)
        strides = out.strides
        _write_parts(out, args, strides[:axis] + strides[axis + 1 :], [i * strides[axis] for i in range(len(args))])
        return out

    def gradient(self, out_grad, node):
        return split(out_grad, self.axis)


def stack(args, axis: int) -> Tensor:
    """Tensors of one shape along a new axis ``axis``. raises: ShapeError if their shapes differ."""
    return Stack(axis)(_as_tuple("stack", args))


class Split(TensorTupleOp):
    """The slices along ``axis``, without it: undoes stack. The slices are views."""

    reads_inputs = False
    reads_output = False

    def __init__(self, axis: int):
        self.axis = axis

    def compute(self, a):
        return tuple(_slices(a, normalize_axis(self.axis, a.ndim, "split")))

    def gradient(self, out_grad, node):
        return stack(out_grad, self.axis)


def split(a: Tensor, axis: int) -> TensorTuple:
    """The slices of a along ``axis``, each without it. raises: ShapeError for an axis that is not there."""
    return Split(axis)(a)


class Concatenate(_NoRead):
    """Arrays joined along an axis that they have, written into one array. Takes a TensorTuple."""

    takes_tuple = True

    def __init__(self, axis: int):
        self.axis = axis

    def compute(self, args):
        first = _first("concatenate", args)
        axis = normalize_axis(self.axis, first.ndim, "concatenate")
        rest = [a.shape[:axis] + a.shape[axis + 1 :] for a in args]
        if any(r != rest[0] for r in rest):
            raise ShapeError(f"[concatenate] shapes differ beside axis {axis}: {[a.shape for a in args]}")
        *starts, length = accumulate([a.shape[axis] for a in args], initial=0)
        out = _empty(first.shape[:axis] + (length,) + first.shape[axis + 1 :], _widest(args), first.device)
        _write_parts(out, args, out.strides, [start * out.strides[axis] for start in starts])
        return out

    def gradient(self, out_grad, node):
        parts, start = [], 0
        axis = self.axis % out_grad.ndim
        for shape in node.inputs[0].shapes:
            n = shape[axis]
            parts.append(out_grad[(slice(None),) * axis + (slice(start, start + n),)])
            start += n
        return make_tuple(*parts)


def concatenate(args, axis: int = 0) -> Tensor:
    """Tensors joined along an axis that they have. raises: ShapeError if they differ in another one."""
    return Concatenate(axis)(_as_tuple("concatenate", args))
