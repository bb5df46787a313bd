"""a[index] as numpy has it, which is how Tensors are indexed: NDArray's own brackets are the course's.

Basic indices give views. With arrays among them (numpy's advanced indexing) reading is a gather of rows by number, as an embedding
is. A row is what the last axes hold that the index leaves alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import prod
from types import EllipsisType
from typing import Any

import numpy as np

from .. import dtype as dt
from ..errors import ShapeError, type_name
from . import kernels
from .ndarray import NDArray, full
from .shapes import slice_range

_BASIC = (int, np.integer, slice, type(None), EllipsisType)
_SHORT_ROW = 16  # bytes: what it takes to gather a longer row by its number is less than what it takes to copy it twice


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
    if isinstance(item, NDArray) and item.is_of_bools():
        raise IndexError(f"[getitem] an index is {item.dtype} made of bools (accepted: whole numbers, or dtype='bool' for a mask)")
    if isinstance(item, NDArray) and item.device.name == "meta":
        if item.dtype == "bool":
            raise IndexError("[getitem] how many a mask on meta() selects is not known (accepted: a mask of numpy's)")
        return np.zeros(item.shape, np.int64) if item.ndim else 0
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
    along = _along(a._shape, index, dt.ROWS[a._dtype].itemsize)
    if along is not None:
        order, places = along
        return read(a.permute(order), places).permute(np.argsort(order))
    rows = _Rows(a._shape, index)
    numbers = rows.numbers()
    return _gathered(rows.matrix(a), numbers).reshape(numbers.shape + rows.row)


def spread(dy: NDArray, shape: tuple[int, ...], index: Any) -> NDArray:
    """Zeros of ``shape`` with dy at ``index``, added where that names an element more than once: the gradient of ``read``."""
    if not isinstance(index, ArrayIndex):
        out = full(shape, 0, dy._dtype, dy._device)
        _view(out, index).copy_from(dy)
        return out
    if not dt.is_float(dy._dtype):
        return spread(dy.astype("float64"), shape, index).astype(dy._dtype)
    along = _along(shape, index, dt.ROWS[dy._dtype].itemsize)
    if along is not None:
        order, places = along
        return spread(dy.permute(order), tuple([shape[i] for i in order]), places).permute(np.argsort(order))
    rows = _Rows(shape, index)
    numbers, dy = rows.numbers().reshape(-1), rows.matrix(dy)
    count, row_size = prod(rows.axes), prod(rows.row)
    # Of many rows few are named where one of each sample's classes is: to sort their numbers then takes less time, and fewer bytes,
    # than to count how often each row comes, from measured sizes on (2,048 numbers are what the calls cost at least).
    if 32 * (numbers.size + 2048) * (row_size + 1) > count:
        return kernels.embedding_backward(dy, _ids(numbers, dy), count).reshape(shape)
    named, which = np.unique(numbers, return_inverse=True)
    sums = kernels.embedding_backward(dy, _ids(which, dy), numbers.size)
    out = full((count, row_size), 0, dy._dtype, dy._device)
    kernels.put_rows(sums, _ids(np.pad(named, (0, numbers.size - named.size), constant_values=-1), dy), out)
    return out.reshape(shape)


def assign(a: NDArray, index: Any, value: NDArray | float) -> None:
    """a[index] = value in place; of several values for one element the last stays. raises: IndexError, ShapeError."""
    if not isinstance(index, ArrayIndex):
        view = _view(a, index)
        view.copy_from(_fitted(value, view._shape) if isinstance(value, NDArray) else value)
        return
    a._check_writable()
    along = _along(a._shape, index, dt.ROWS[a._dtype].itemsize)
    if along is not None:
        order, places = along
        if isinstance(value, NDArray):
            shape = tuple([places[0].size if i == order[0] else n for i, n in enumerate(a._shape)])
            value = _fitted(value, shape).broadcast_to(shape).permute(order)
        return assign(a.permute(order), places, value)
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
        a.copy_from(matrix.reshape(a._shape))


def written_last(shape: tuple[int, ...], index: Any) -> np.ndarray | None:
    """Which elements of a value stay when ``assign`` writes it into an array of ``shape``, a mask that broadcasts to the value's
    shape; None if all do, whatever numbers the index has.
    """
    if not isinstance(index, ArrayIndex) or all([item.dtype == bool for item in index if isinstance(item, np.ndarray)]):
        return None
    along = _along(shape, index, 0)  # there are no elements to copy
    if along is not None:
        (axis, *_), places = along
        return _Rows(shape[axis:], places).are_last(places[0]).reshape(-1, *[1] * (len(shape) - axis - 1))
    rows = _Rows(shape, index)
    numbers = rows.numbers()
    return rows.are_last(numbers.reshape(-1)).reshape(numbers.shape + (1,) * len(rows.row))


def _along(shape: tuple[int, ...], index: ArrayIndex, itemsize: int) -> tuple[tuple[int, ...], ArrayIndex] | None:
    """For an index that names places of one axis and takes the others whole, as ``x[:, places]``: the order of axes in which that
    one is first, and the index in this order, whose result has it, too.

    There each place is a row; in their own order each element or two of the result would need a number. None where rows are long
    anyway, for the first axis, and where numbers are fewer bytes than the copy that has the axis first.
    """
    items, ndim = list(index), len(shape)
    (at, *more) = [i for i, item in enumerate(items) if isinstance(item, np.ndarray)]
    others = [item for i, item in enumerate(items) if i != at]
    ellipses = sum([item is Ellipsis for item in others])
    if more or ellipses > 1 or len(items) - ellipses > ndim or items[at].ndim != 1:
        return None
    if not all([item is Ellipsis or (isinstance(item, slice) and item == slice(None)) for item in others]):
        return None
    axis = ndim - len(items) + at if any([item is Ellipsis for item in items[:at]]) else at
    if axis == 0 or prod(shape[axis + 1 :]) * itemsize > _SHORT_ROW:
        return None
    places = _places(items[at], axis, shape[axis : axis + 1])
    if shape[axis] * itemsize > places.size * places.itemsize:
        return None
    return (axis, *range(axis), *range(axis + 1, ndim)), ArrayIndex((places,))


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
    wanted = (1,) * extra + shape[len(shape) - len(fitted) :]
    if any([n not in (1, w) for n, w in zip(value._shape, wanted)]):
        raise ShapeError(f"[setitem] value is {value._shape}, a[index] is {shape} (accepted: what broadcasts to it)")
    return value._view(fitted, value._strides[extra:]) if extra else value  # reshape refuses what is not contiguous


class _Rows:
    """An array of ``shape`` as rows of shape ``row``, which lie along its first axes, of lengths ``axes``."""

    def __init__(self, shape: tuple[int, ...], index: ArrayIndex):
        items = list(index)
        ellipses = sum([item is Ellipsis for item in items])
        if not ellipses:
            items.append(Ellipsis)
        self._unnamed = len(shape) - sum([_named_axes(item) for item in items])  # which ... stands for
        if ellipses > 1:
            raise IndexError(f"[getitem] an index has more than one ... for shape {shape}")
        if self._unnamed < 0:
            raise IndexError(f"[getitem] too many indices for shape {shape}")
        first = len(shape)  # of the axes of a row
        while items[-1] is Ellipsis or (isinstance(items[-1], slice) and items[-1] == slice(None)):
            first -= self._unnamed if items.pop() is Ellipsis else 1
        self.axes, self.row, self._items = shape[:first], shape[first:], tuple(items)

    def numbers(self) -> np.ndarray:
        """Which rows the index names, in the shape that numpy gives them. raises: IndexError.

        Arrays, and ints beside them, are broadcast together; every other item has axes of its own. Those of the arrays come where
        the arrays stand, but first if something stands between them.
        """
        arrays: list[np.ndarray] = []  # what each item adds to a number, and what items that are no arrays add
        parts: list[np.ndarray] = []
        axis = at = 0
        for item in self._items:
            end = axis + (self._unnamed if item is Ellipsis else _named_axes(item))
            part = _places(item, axis, self.axes[axis:end])
            step = prod(self.axes[end:])
            part = part if step == 1 else part * step
            if isinstance(item, (int, np.integer, np.ndarray)):
                at = len(parts) if not arrays or len(parts) == at else 0
                arrays.append(part)
            else:
                parts.append(part)
            axis = end
        try:
            parts.insert(at, reduce(np.add, arrays))
        except ValueError as error:
            raise IndexError(f"[getitem] {str(error).strip()}") from None
        return reduce(np.add.outer, parts)

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


def _named_axes(item: Any) -> int:
    if item is None or item is Ellipsis:
        return 0
    return item.ndim if isinstance(item, np.ndarray) and item.dtype == bool else 1


def _places(item: Any, axis: int, lengths: tuple[int, ...]) -> np.ndarray:
    """What an item names of axes of these lengths, of which ``axis`` is the first, taken for one. raises: IndexError."""
    if item is None:
        return np.zeros(1, np.int64)
    if item is Ellipsis:
        return np.arange(prod(lengths)).reshape(lengths)
    if isinstance(item, slice):
        span = slice_range(item, lengths[0])
        return np.arange(span.start, span.stop, span.step)
    if isinstance(item, np.ndarray) and item.dtype == bool:
        if item.shape != lengths:
            at = axis + [a == b for a, b in zip(item.shape, lengths)].index(False)
            raise IndexError(f"[getitem] boolean index did not match indexed array along axis {at}: {item.shape} for {lengths}")
        return np.flatnonzero(item)
    places, (length,) = np.asarray(item), lengths
    low, high = (places.min(), places.max()) if places.size else (0, -1)
    if low < -length or high >= length:
        outside = low if low < -length else high
        raise IndexError(f"[getitem] index {outside} is out of bounds for axis {axis} with size {length}")
    return np.where(places < 0, places + length, places) if low < 0 else places


def _ids(numbers: np.ndarray, beside: NDArray) -> NDArray:
    return NDArray(numbers, device=beside._device, dtype="int64")


def _gathered(matrix: NDArray, numbers: np.ndarray) -> NDArray:
    return kernels.take_rows(matrix, _ids(numbers, matrix))
