"""Shapes, strides and axes, without an array. Strides and offsets count elements."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from ..errors import ShapeError, as_whole, shown


# A program has few shapes and asks for their strides at every op.
@lru_cache(maxsize=4096)
def compact_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a row-major array of ``shape``."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


@lru_cache(maxsize=4096)
def is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = 1
    for n, stride in zip(reversed(shape), reversed(strides)):
        if n == 0:
            return True
        if n != 1 and stride != expected:
            return False
        expected *= n
    return True


@lru_cache(maxsize=4096)
def memory_order(strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """The axes by falling strides: in this order a view is written from one end of its memory to the other. None: they are so."""
    order = tuple(sorted(range(len(strides)), key=lambda i: -abs(strides[i])))
    return None if order == tuple(range(len(strides))) else order


def frozen(lengths: Any) -> Any:
    """Lengths or axes as an op keeps them until backward, when the caller's list may hold others: several as a tuple."""
    if isinstance(lengths, tuple) or isinstance(lengths, str) or not isinstance(lengths, Iterable):
        return lengths
    return tuple(lengths)


def as_shape(shape: Any, least: int = 0) -> tuple[int, ...]:
    """The length, or the lengths, as a tuple. raises: ShapeError for one that is no whole number of at least ``least``."""
    try:
        one = hasattr(shape, "__index__") and not getattr(shape, "ndim", 0)  # which numpy's array of lengths has, too
        lengths = (operator.index(shape),) if one else tuple(map(operator.index, shape))
    except TypeError:
        raise ShapeError(f"[shape] {shape!r} is no shape (accepted: a whole number, or several)") from None
    _check_lengths(lengths, least)
    return lengths


@lru_cache(maxsize=4096)
def _check_lengths(lengths: tuple[int, ...], least: int) -> None:
    if lengths and min(lengths) < least:
        raise ShapeError(f"[shape] {lengths} has a length below {least}")
    if math.prod([n or 1 for n in lengths]) >= 2**63:  # also of an empty array: its strides are int64
        raise ShapeError(f"[shape] {lengths} has 2**63 elements or more")


@lru_cache(maxsize=1024)
def axis_order(axes: tuple[int, ...], ndim: int) -> tuple[int, ...] | None:
    """``axes`` counted from the front; None if they are no order of all axes. raises: ShapeError for one out of range."""
    found = tuple([normalize_axis(a, ndim, "permute") for a in axes])
    return found if sorted(found) == list(range(ndim)) else None


def normalize_axis(axis: Any, ndim: int, op: str) -> int:
    """``axis`` counted from the front. raises: ShapeError if it is no whole number or outside -ndim..ndim-1."""
    found = as_whole(axis)
    if found is None:
        raise ShapeError(f"[{op}] axis {shown(axis)} is no whole number")
    if not -ndim <= found < ndim:
        raise ShapeError(f"[{op}] axis {found} is out of range for {ndim} dimensions")
    return found + ndim if found < 0 else found


def normalize_axes(axes: Any, ndim: int, op: str) -> tuple[int, ...]:
    """The axes, counted from the front, ascending; None means all. raises: ShapeError for repeated or outside ones."""
    if axes is None:
        return tuple(range(ndim))
    axes = frozen(axes)
    if not isinstance(axes, tuple):
        return (normalize_axis(axes, ndim, op),)
    found = sorted([normalize_axis(a, ndim, op) for a in axes])
    if len(set(found)) != len(found):
        raise ShapeError(f"[{op}] repeated axis in {axes}")
    return tuple(found)


def reduced_axes(axes: Any, ndim: int, op: str) -> tuple[int, ...]:
    """``normalize_axes`` of a reduction. raises: ShapeError also for (): to numpy that is no axis, to PyTorch it is all."""
    found = normalize_axes(axes, ndim, op)
    if axes is not None and not found:
        raise ShapeError(f"[{op}] axis () names no axis (accepted: None, an int, or a tuple of ints)")
    return found


def pad_widths(widths: Any) -> tuple[tuple[int, int], ...]:
    """One (left, right) per axis. raises: ShapeError for what are no pairs of whole numbers."""
    try:
        return tuple([(operator.index(left), operator.index(right)) for left, right in widths])
    except (TypeError, ValueError):
        raise ShapeError(f"[pad] {widths!r} are no widths (accepted: one (left, right) per axis)") from None


def slice_range(part: slice, n: int) -> range:
    """The places that a slice names of n. raises: ValueError for a step of 0, TypeError for what is no whole number."""
    try:
        return range(*part.indices(n))
    except (TypeError, ValueError) as error:
        if type(error) not in (TypeError, ValueError):  # of a program's own __index__
            raise
        raise type(error)(f"[getitem] {part}: {error}") from None


@lru_cache(maxsize=4096)
def reduced_shape(shape: tuple[int, ...], axes: tuple[int, ...], keepdims: bool = False) -> tuple[int, ...]:
    """``shape`` without ``axes``, which count from the front; keepdims: with length 1 there."""
    if keepdims:
        return tuple([1 if i in axes else n for i, n in enumerate(shape)])
    return tuple([n for i, n in enumerate(shape) if i not in axes])


@lru_cache(maxsize=4096)
def reduction(
    shape: tuple[int, ...], strides: tuple[int, ...], axes: tuple[int, ...]
) -> tuple[tuple[int, ...], list[tuple[int, int, int]], tuple[tuple[int, ...], tuple[int, ...]] | None]:
    """(order, steps, turned): ``axes``, which count from the front, are reduced by steps one after the other of the array permuted
    to ``order``, each over the middle axis of its (outer, length, inner).

    The order is that in memory, which needs no copy, if it has no gaps. Of axes that are apart in it the longest are first, so that
    the least is left to the next step. turned: if the other axes are not in it as they are in the shape, their lengths as they are
    in it, and the order that brings them back.
    """
    order = memory_order(strides) or tuple(range(len(shape)))
    if not is_contiguous(tuple([shape[i] for i in order]), tuple([strides[i] for i in order])):
        order = tuple(range(len(shape)))
    others = [i for i in order if i not in axes and shape[i] != 1]
    back = tuple(sorted(range(len(others)), key=others.__getitem__))
    turned = None if others == sorted(others) else (tuple([shape[i] for i in others]), back)
    parts = [
        (math.prod([shape[i] for i in part]), reduced)
        for reduced, part in itertools.groupby([i for i in order if shape[i] != 1], lambda i: i in axes)
    ]
    steps = []
    while any([reduced for _, reduced in parts]):
        at = max([i for i, (_, reduced) in enumerate(parts) if reduced], key=lambda i: parts[i][0])
        lengths = [n for n, _ in parts]
        steps.append((math.prod(lengths[:at]), lengths[at], math.prod(lengths[at + 1 :])))
        del parts[at]
    return order, steps or [(1, 1, math.prod(shape))], turned


@lru_cache(maxsize=4096)
def broadcast_shape(a: tuple[int, ...], b: tuple[int, ...], op: str) -> tuple[int, ...]:
    """The shape that both broadcast to. op: what errors name, or an elementwise kernel. raises: ShapeError if there is none."""
    if a == b or not b:
        return a
    shape = []
    for n, m in itertools.zip_longest(reversed(a), reversed(b), fillvalue=1):
        if n != m and n != 1 and m != 1:
            raise ShapeError(f"[{op.removeprefix('ewise_')}] shapes do not broadcast: {a} and {b}")
        shape.append(m if n == 1 else n)
    return tuple(reversed(shape))


@lru_cache(maxsize=4096)
def broadcast_strides(shape: tuple[int, ...], strides: tuple[int, ...], wanted: tuple[int, ...], op: str) -> tuple[int, ...]:
    """Strides under which the array has the shape ``wanted``. raises: ShapeError if it does not broadcast to that."""
    extra = len(wanted) - len(shape)
    if extra < 0 or any([n != m and n != 1 for n, m in zip(shape, wanted[extra:])]):
        raise ShapeError(f"[{op}] {shape} does not broadcast to {wanted}")
    return (0,) * extra + tuple([0 if n == 1 else s for n, s in zip(shape, strides)])


def reach(shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> tuple[int, int]:
    """The first and the last element of a buffer that a view of it shows; (0, -1) for an empty view."""
    if 0 in shape:
        return 0, -1
    first = last = offset
    for n, stride in zip(shape, strides):
        if stride < 0:
            first += (n - 1) * stride
        else:
            last += (n - 1) * stride
    return first, last
