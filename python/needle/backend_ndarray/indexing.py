"""a[index] as numpy has it, which is how Tensors are indexed: NDArray's own brackets are the course's.

Basic indices give views. With arrays among them (numpy's advanced indexing) reading is a gather of rows by number, as an embedding
is, and numpy itself says which numbers those are. A row is what the last axes hold that the index leaves alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from types import EllipsisType
from typing import Any

import numpy as np

from .. import dtype as dt
from ..errors import ShapeError, type_name
from . import kernels
from .ndarray import NDArray, full

_BASIC = (int, np.integer, slice, type(None), EllipsisType)


class ArrayIndex(tuple):
    """An index with numpy arrays in it, of whole numbers or bool, beside basic indices."""


def is_basic(items: Sequence) -> bool:
    """Whether there is no array among them. True and False count as numbers, which NDArray refuses."""
    return all([isinstance(item, _BASIC) for item in items])


def on_host(items: tuple) -> tuple:
    """Items of which some are arrays, lists or ranges, as they are now; an array without axes is its number. Waits for a GPU.

    raises: IndexError for what is neither whole numbers nor a mask, and for a mask on ``meta``.
    """
    found = [item if isinstance(item, _BASIC) and not isinstance(item, bool) else _item_on_host(item) for item in items]
    return tuple(found) if is_basic(found) else ArrayIndex(found)


def _item_on_host(item: Any) -> int | np.ndarray:
    if isinstance(item, (bool, np.bool_)) or not (isinstance(item, (list, range)) or hasattr(item, "__array__")):
        accepted = "int, slice, None, ..., arrays of whole numbers, masks"
        raise IndexError(f"[getitem] unsupported index of type {type_name(item)} (accepted: {accepted})")
    if isinstance(item, NDArray) and item.device.name == "meta":
        if item.dtype == "bool":
            raise IndexError("[getitem] how many a mask on meta() selects is not known (accepted: a mask of numpy's)")
        return np.zeros(item.shape, np.int64)
    try:
        values = np.array(item)
    except ValueError:
        raise IndexError("[getitem] an index is a list of lists of different lengths (accepted: an array)") from None
    kind = values.dtype.kind
    if kind == "b" and values.ndim:
        return values
    if kind == "b" or (kind not in "iu" and values.size and not isinstance(item, NDArray)):
        raise IndexError(f"[getitem] an index is an array of {values.dtype} (accepted: whole numbers or bool)")
    with np.errstate(invalid="ignore"):
        whole = values.astype(np.int64)
    if kind not in "iu" and (whole != values).any():  # Tensors of numbers are floats unless told otherwise
        raise IndexError(f"[getitem] {values[whole != values][0]} in an index is no whole number of 64 bits")
    return whole if whole.ndim else int(whole)


def read(a: NDArray, index: Any) -> NDArray:
    """a[index]: a view, of an ArrayIndex a copy. raises: IndexError."""
    if not isinstance(index, ArrayIndex):
        return _view(a, index)
    rows = _Rows(a._shape, index)
    numbers = rows.numbers()
    return _gathered(rows.matrix(a), numbers).reshape(numbers.shape + rows.row)


def spread(dy: NDArray, shape: tuple[int, ...], index: Any) -> NDArray:
    """Zeros of ``shape`` with dy at ``index``, added where that names an element more than once: the gradient of ``read``."""
    if not isinstance(index, ArrayIndex):
        out = full(shape, 0, dy._dtype, dy._device)
        _view(out, index)[...] = dy
        return out
    if not dt.is_float(dy._dtype):
        return spread(dy.astype("float64"), shape, index).astype(dy._dtype)
    rows = _Rows(shape, index)
    return kernels.embedding_backward(rows.matrix(dy), _ids(rows.numbers().reshape(-1), dy), prod(rows.axes)).reshape(shape)


def assign(a: NDArray, index: Any, value: NDArray | float) -> None:
    """a[index] = value in place; of several values for one element the last stays. raises: IndexError, ShapeError."""
    if not isinstance(index, ArrayIndex):
        view = _view(a, index)
        view[...] = _fitted(value, view._shape) if isinstance(value, NDArray) else value
        return
    a._check_writable()
    rows = _Rows(a._shape, index)
    numbers = rows.numbers()
    shape = numbers.shape + rows.row
    if not isinstance(value, NDArray):
        value = full((1,), dt.checked_number("setitem", value, a._dtype), a._dtype, a._device)
    value = rows.matrix(_fitted(value, shape).to(a._device).astype(a._dtype, copy=False).broadcast_to(shape))
    if value._shares(a):  # which would be read and written at the same time
        value = value.copy()
    numbers = numbers.reshape(-1)
    ids = np.where(rows.are_last(numbers), numbers, -1)
    matrix = rows.matrix(a)
    kernels.put_rows(value, _ids(ids, a), matrix)
    if not a._contiguous:
        a[...] = matrix.reshape(a._shape)


def written_last(shape: tuple[int, ...], index: Any) -> np.ndarray | None:
    """Which elements of a value stay when ``assign`` writes it into an array of ``shape``, a mask that broadcasts to the value's
    shape; None if all do, whatever numbers the index has.
    """
    if not isinstance(index, ArrayIndex) or all([item.dtype == bool for item in index if isinstance(item, np.ndarray)]):
        return None
    rows = _Rows(shape, index)
    numbers = rows.numbers()
    return rows.are_last(numbers.reshape(-1)).reshape(numbers.shape + (1,) * len(rows.row))


def _view(a: NDArray, index: Any) -> NDArray:
    shape, strides, offset, ints = a._indexed(index)
    for axis in reversed(ints):  # which NDArray keeps
        del shape[axis], strides[axis]
    return a._view(tuple(shape), tuple(strides), offset)


def _fitted(value: NDArray, shape: tuple[int, ...]) -> NDArray:
    """``value`` without the axes of length 1 that it has in front of those of ``shape``.

    raises: ShapeError if it does not broadcast: NDArray's own assignment, the course's, takes as many elements in any shape.
    """
    extra = max(0, value.ndim - len(shape))
    fitted = value._shape[extra:]
    if value.size != prod(fitted) or any([n not in (1, wanted) for n, wanted in zip(reversed(fitted), reversed(shape))]):
        raise ShapeError(f"[setitem] value is {value._shape}, a[index] is {shape} (accepted: what broadcasts to it)")
    return value._view(fitted, value._strides[extra:]) if extra else value  # reshape refuses what is not contiguous


class _Rows:
    """An array of ``shape`` as rows of shape ``row``, which lie along its first axes, of lengths ``axes``."""

    def __init__(self, shape: tuple[int, ...], index: ArrayIndex):
        items = list(index)
        ellipses = sum([item is Ellipsis for item in items])
        if not ellipses:
            items.append(Ellipsis)
        masks = [item.ndim - 1 for item in items if isinstance(item, np.ndarray) and item.dtype == bool]  # one for several axes
        unnamed = len(shape) - sum([item is not None and item is not Ellipsis for item in items]) - sum(masks)
        if ellipses > 1:
            raise IndexError(f"[getitem] an index has more than one ... for shape {shape}")
        if unnamed < 0:
            raise IndexError(f"[getitem] too many indices for shape {shape}")
        first = len(shape)  # of the axes of a row
        while items[-1] is Ellipsis or (isinstance(items[-1], slice) and items[-1] == slice(None)):
            first -= unnamed if items.pop() is Ellipsis else 1
        self.axes, self.row, self._items = shape[:first], shape[first:], tuple(items)

    def numbers(self) -> np.ndarray:
        """Which rows the index names, in the shape that numpy gives them. raises: IndexError, in numpy's words."""
        mask = self._items[0]
        if len(self._items) == 1 and isinstance(mask, np.ndarray) and mask.dtype == bool and mask.shape == self.axes:
            return np.flatnonzero(mask)  # the same, without an array of 8 bytes for each bool
        try:
            return np.arange(prod(self.axes)).reshape(self.axes)[self._items]
        except IndexError as error:
            raise IndexError(f"[getitem] {error}") from None

    def are_last(self, numbers: np.ndarray) -> np.ndarray:
        """Of each of ``numbers``, (n), whether it does not come again."""
        if (numbers[1:] > numbers[:-1]).all():
            return np.ones(numbers.size, bool)
        places = np.arange(numbers.size)
        last = np.empty(prod(self.axes), np.int64)
        last[numbers] = places
        return last[numbers] == places

    def matrix(self, x: NDArray) -> NDArray:
        """(rows, elements of a row); a copy unless ``x``, which ends in the axes of a row, is contiguous."""
        count = prod(x._shape[: x.ndim - len(self.row)])
        return (x if x._contiguous else x.compact()).reshape((count, prod(self.row)))


def _ids(numbers: np.ndarray, beside: NDArray) -> NDArray:
    return NDArray(numbers, device=beside._device, dtype="int64")


def _gathered(matrix: NDArray, numbers: np.ndarray) -> NDArray:
    return kernels.take_rows(matrix, _ids(numbers, matrix))
