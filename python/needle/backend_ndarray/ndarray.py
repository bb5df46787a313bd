"""NDArray: a strided view over a flat buffer of a device.

The class keeps shape, strides and offset and leaves every computation to its device's module, whose functions
``src/common/kernel_api.h`` lists. Strides and offsets count elements.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable
from functools import reduce, wraps
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np

from .. import dtype as dt
from ..errors import DeviceError, DTypeError, ShapeError, check_flag, type_name
from .device import BackendDevice, all_devices, as_device, cpu, cpu_numpy, cuda, cuda_sim, default_device, meta
from .host_memory import DATA, WORKSPACE
from .shapes import (
    as_shape,
    axis_order,
    broadcast_shape,
    broadcast_strides,
    compact_strides,
    is_contiguous,
    memory_order,
    normalize_axes,
    pad_widths,
    reach,
    reduced_axes,
    reduced_shape,
    reduction,
    slice_range,
)

__all__ = [
    "NDArray", "BackendDevice", "cpu", "cuda", "cuda_sim", "cpu_numpy", "meta", "default_device", "all_devices",
    "as_device", "array", "empty", "full", "broadcast_to", "reshape", "maximum", "log", "exp", "tanh", "sum", "flip", "prod",
    "where", "asarray", "from_dlpack", "matmul", "write_stamp",
]  # fmt: skip

# write_stamp() is the next tick of the clock that orders in-place writes and the making of graph nodes.
write_stamp: Callable[[], int] = itertools.count(1).__next__
writes = SimpleNamespace(last=0)  # the tick of the last write in place to any memory
_ALL = slice(None)
_SCALARS = (int, float, bool, np.number, np.bool_)


def _as_numpy_calls_it(reduction: Callable[[NDArray, Any, bool], NDArray]) -> Callable[..., NDArray]:
    """Has a reduction take ``dtype`` and ``out``, which np.sum and its like pass on. raises: DTypeError if one is not None."""

    @wraps(reduction)
    def called(self, axis=None, keepdims=False, dtype=None, out=None):
        if dtype is not None or out is not None:
            raise DTypeError(f"[{reduction.__name__}] dtype or out is given (accepted: axis and keepdims)")
        return reduction(self, axis, keepdims)

    return called


class NDArray:
    """An array of one dtype on one device; ``NDArray(other)`` copies, views share memory.

    other: NDArray, numpy array, anything with ``__array__``, nested lists, or a number.
    device: where it goes; default: that of ``other``, else ``default_device()``.
    dtype: default: that of an NDArray; float32 for the rest, integers included (numpy's own on a device with ``numpy_semantics``).
    raises: DTypeError, DeviceError, ShapeError for lists of different lengths.
    """

    __slots__ = ("_shape", "_strides", "_offset", "_device", "_handle", "_dtype", "_contiguous", "_of_bools", "__weakref__")
    __array_priority__ = 1000
    _shape: tuple[int, ...]
    _strides: tuple[int, ...]
    _offset: int
    _device: BackendDevice
    _handle: Any
    _dtype: str
    _contiguous: bool

    def __init__(self, other: Any, device: BackendDevice | str | None = None, dtype: str | None = None):
        if isinstance(other, NDArray):
            device = other._device if device is None else as_device(device)
            dtype = dt.name_of(dtype) if dtype is not None else other._dtype
            made = other._copy_to(device, dtype)
        else:
            device = as_device(device)
            values = _as_numpy(other)
            if dtype is None:
                dtype = dt.storable(values.dtype) if device.numpy_semantics else "float32"
            dtype = dt.name_of(dtype)
            if not isinstance(other, np.ndarray) and dtype in dt.LIMITS and values.dtype.kind in "iuf" and values.size:
                for end in (values.min(), values.max()):  # numpy refuses a list of what it would wrap in an array, too
                    dt.checked_number("array", end, dtype)
            made = _from_values(values, device, dtype)
            if values.dtype.kind == "b" and dtype != "bool":
                self._of_bools = True
        self._take(made)

    def _take(self, made: NDArray) -> None:
        self._shape, self._strides, self._offset = made._shape, made._strides, made._offset
        self._device, self._handle, self._dtype = made._device, made._handle, made._dtype
        self._contiguous = made._contiguous

    def is_of_bools(self) -> bool:
        """Whether it was made of bools as numbers: as an index it might be meant as a mask."""
        return hasattr(self, "_of_bools")

    @staticmethod
    def make(shape, strides=None, device=None, handle=None, offset=0, dtype=None) -> NDArray:
        """An array of ``shape``, uninitialised unless ``handle`` gives its memory.

        strides, offset: in elements of that memory; default row-major, from its first. dtype: of new memory, default float32.
        raises: ShapeError for a shape that is none, strides of another number, and elements outside of the memory.
        """
        self = NDArray.__new__(NDArray)
        self._shape = shape = as_shape(shape)
        self._device = device = as_device(device)
        self._offset = offset
        if strides is None:
            self._strides = compact_strides(shape)
            self._contiguous = True
        else:
            self._strides = tuple(strides)
            if len(self._strides) != len(shape):
                raise ShapeError(f"[view] shape {shape} and strides {self._strides} differ in length")
            self._contiguous = is_contiguous(shape, self._strides)
        if handle is None:
            handle = device.require().Array(math.prod(shape), dtype or "float32")
        self._handle = handle
        self._dtype = handle.dtype
        first, last = reach(shape, self._strides, offset)
        if first < 0 or last >= handle.size:
            raise ShapeError(
                f"[view] shape {shape} with strides {self._strides} reaches elements {first} to {last} (accepted: 0 to "
                f"{handle.size - 1})"
            )
        return self

    @staticmethod
    def compact_strides(shape) -> tuple[int, ...]:
        """Strides of a row-major array of ``shape``."""
        return compact_strides(tuple(shape))

    # --- what it is --------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        """Length of each axis."""
        return self._shape

    @property
    def strides(self) -> tuple[int, ...]:
        """Elements from one index to the next, for each axis."""
        return self._strides

    @property
    def device(self) -> BackendDevice:
        """The device that holds the memory."""
        return self._device

    @property
    def dtype(self) -> str:
        """The dtype by name, as "float32"."""
        return self._dtype

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self._shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self._shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements seen through this view."""
        return self.size * dt.ROWS[self._dtype].itemsize

    @property
    def category(self) -> int:
        """An index into ``host_memory.CATEGORIES``: what the memory behind this array is for, all of it."""
        return self._handle.category

    @category.setter
    def category(self, category: int) -> None:
        self._handle.category = category

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the memory behind this array, which may hold more than this view shows."""
        return self._handle.nbytes

    @property
    def serial(self) -> int:
        """The number of the allocation behind this array, counted by its device."""
        return self._handle.serial

    def __repr__(self) -> str:
        return f"NDArray({self}, device={self._device})"

    def __str__(self) -> str:
        options = np.get_printoptions()
        if self.size <= options["threshold"]:
            return str(self.numpy())
        return np.array2string(self._ends(options["edgeitems"], 0), threshold=0)  # numpy would leave out the middle, too

    def _ends(self, n: int, axis: int) -> np.ndarray:
        """The first n + 1 and the last n elements along ``axis`` and those behind it; nothing else is read."""
        if axis == self.ndim:
            return self.numpy()
        length = self._shape[axis]
        if length <= 2 * n + 1:
            return self._ends(n, axis + 1)
        first, last = (self[(slice(None),) * axis + (part,)] for part in (slice(0, n + 1), slice(length - n, length)))
        return np.concatenate([first._ends(n, axis + 1), last._ends(n, axis + 1)], axis)

    def __len__(self) -> int:
        if not self._shape:
            raise ShapeError("[len] a 0-d array has no length")
        return self._shape[0]

    def __iter__(self):
        for i in range(len(self)):
            yield self._view(self._shape[1:], self._strides[1:], self._offset + i * self._strides[0])

    def __bool__(self) -> bool:
        return bool(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __format__(self, spec: str) -> str:
        return format(self.item() if spec else str(self), spec)

    def item(self):
        """The one element as a Python number. raises: ShapeError if there is not exactly one."""
        if self.size != 1:
            raise ShapeError(f"[item] the array has {self.size} elements, shape {self._shape} (accepted: exactly one)")
        return self.numpy().reshape(()).item()

    # --- to and from elsewhere ---------------------------------------------------------------------

    def numpy(self) -> np.ndarray:
        """A copy in numpy."""
        strides = compact_strides(self._shape) if self._contiguous else self._strides  # axes of length 1 may have any stride
        values = self._device.require().to_numpy(self._handle, self._shape, strides, self._offset)
        return values.view(dt.to_numpy("bfloat16")) if self._dtype == "bfloat16" else values

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        if copy is False:
            raise ValueError("[array] numpy gets a copy of an NDArray (np.from_dlpack shares the memory)")
        values = self.numpy()
        return values if dtype is None else values.astype(dtype, copy=False)

    def __dlpack_device__(self) -> tuple[int, int]:
        mod = self._device.require()
        return mod.dlpack_device() if hasattr(mod, "dlpack_device") else (1, 0)  # (1, 0) is the CPU

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        """A DLPack capsule that shares this memory, or has a copy of it (the CPU devices, cuda and cuda_sim).

        stream: of CUDA, on which a GPU's memory will be read, as DLPack numbers them. The default one (None, 1) waits for that of
        ``cuda()`` by itself; for another, this call waits for the device, unless the consumer asks for nothing (-1).
        max_version: the latest DLPack version that the consumer reads; numpy writes only to memory that comes as version 1.
        """
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(f"[dlpack] memory of {self._device} cannot be had as that of DLPack device {tuple(dl_device)}")
        if copy:
            return self.copy().__dlpack__(stream=stream, max_version=max_version)
        if any(stride < 0 and n > 1 for n, stride in zip(self._shape, self._strides)):  # which torch aborts on
            raise BufferError("[dlpack] a negative stride (accepted: none; copy() gives an array without)")
        mod = self._device.require()
        if self._device.is_gpu and stream not in (None, 1, -1):
            mod.sync()
        if hasattr(mod, "to_dlpack"):
            versioned = max_version is not None and max_version[0] >= 1
            return mod.to_dlpack(self._handle, self._shape, self._strides, self._offset, versioned)
        if self._device.name != "cpu_numpy":
            raise DeviceError(f"[dlpack] {self._device} has no memory to share")
        values = mod._strided(self._handle, self._shape, self._strides, self._offset)
        return values.__dlpack__() if max_version is None else values.__dlpack__(max_version=max_version)

    def to(self, device: BackendDevice | str) -> NDArray:
        """This array on ``device``; itself if it is there already."""
        device = as_device(device)
        return self if device == self._device else self._copy_to(device, self._dtype)

    def _copy_to(self, device: BackendDevice, dtype: str) -> NDArray:
        if device == self._device:
            return self._converted(dtype)
        made = _from_values(self.astype(dtype, copy=False).numpy(), device, dtype)
        made.category = self.category
        return made

    def _converted(self, dtype: str) -> NDArray:
        """A new contiguous array with these elements in ``dtype``."""
        out = _new(self._shape, dtype, self._device)
        self._device.require().strided_copy(self._handle, self._strides, self._offset, out._handle, out._strides, 0, self._shape)
        return out

    def astype(self, dtype: Any, copy: bool = True) -> NDArray:
        """These elements in another dtype; a copy also when the dtype is the same, unless copy=False."""
        name = dt.name_of(dtype)
        return self if name == self._dtype and not copy else self._converted(name)

    def copy(self) -> NDArray:
        """A compact array with these elements."""
        return self._converted(self._dtype)

    __copy__ = copy

    def __deepcopy__(self, memo: dict) -> NDArray:
        made = self.copy()
        made.category = self.category
        return made

    def __reduce__(self):
        if self._device.numpy_semantics:  # the course's array is numpy's then, and its submissions are pickled
            return np.array, (self.numpy(),)
        raise TypeError("[pickle] arrays are not pickled (accepted: .numpy(); files: needle.checkpoints)")

    # --- memory ---------------------------------------------------------------------------------------

    def is_compact(self) -> bool:
        """Row-major, and the whole of its buffer."""
        return self._contiguous and self._handle.size == self.size

    def is_part(self) -> bool:
        """Whether its buffer holds more than these elements."""
        return self._handle.size > self.size

    def compact(self) -> NDArray:
        """This array if it is compact, else a compact copy."""
        return self if self.is_compact() else self._converted(self._dtype)

    def contiguous_handle(self):
        """A device handle on exactly these elements, row-major: for kernels. Copies only if the view is strided."""
        if not self._contiguous:
            return self._converted(self._dtype)._handle
        n = math.prod(self._shape)
        handle = self._handle
        return handle if handle.size == n else handle.view(self._offset, n)

    @property
    def last_write(self) -> int:
        """Tick of the last write in place to this memory, through any view; 0 if there was none."""
        return self._handle.last_write

    @last_write.setter
    def last_write(self, stamp: int) -> None:
        self._handle.last_write = stamp

    def mark_written(self) -> None:
        """Stamps this memory as written now."""
        self._handle.last_write = writes.last = write_stamp()

    def add_in_place(self, other: NDArray | float) -> None:
        """self += other for a compact self; other broadcasts to it and is cast to its dtype. raises: ShapeError for a part."""
        self._in_place(other, "add_in_place", "ewise_add")

    def mul_in_place(self, other: NDArray | float) -> None:
        """self *= other for a compact self; other broadcasts to it and is cast to its dtype. raises: ShapeError for a part."""
        self._in_place(other, "mul_in_place", "ewise_mul")

    def combine_in_place(self, name: str, other: Any) -> bool:
        """self = self + other if ``name`` is "add", "sub" and so on, without another array, and True; False, and nothing is done,
        where that would be of another shape or dtype, where self is not compact, and for what is neither a number nor an array.
        """
        if not (dt.is_float(self._dtype) and self.is_compact()):
            return False
        if isinstance(other, (int, float)):
            getattr(self._device.require(), f"scalar_{name}")(self._handle, other, self._handle)
            self.mark_written()
            return True
        if not isinstance(other, NDArray) or (other._dtype, other._device) != (self._dtype, self._device) or self._overlaps(other):
            return False
        if other.ndim > self.ndim or any([n not in (1, m) for n, m in zip(other._shape[::-1], self._shape[::-1])]):
            return False
        self._write_combined(f"ewise_{name}", other._broadcast(self._shape))
        return True

    def _write_combined(self, kernel: str, other: NDArray) -> None:
        getattr(self._device.require(), kernel)(
            self._handle, self._strides, self._offset, other._handle, other._strides, other._offset, self._handle, self._shape
        )
        self.mark_written()

    def _in_place(self, other: NDArray | float, op: str, kernel: str) -> None:
        if not self.is_compact():  # the kernels write all of a buffer
            raise ShapeError(f"[{op}] {self._shape} is a part of its memory, or strided (accepted: a compact array)")
        if not isinstance(other, NDArray):
            other = full((), dt.checked_number(op, other, self._dtype), self._dtype, self._device)
        check_one_device(op, self, other)
        other = other.astype(self._dtype, copy=False)._broadcast(self._shape, op)
        self._write_combined(kernel, other.copy() if self._overlaps(other) else other)

    def is_broadcast(self) -> bool:
        """Whether one element in memory stands for several, as broadcast_to makes it."""
        if 0 not in self._strides or 0 in self._shape:
            return False
        return any(stride == 0 and n > 1 for n, stride in zip(self._shape, self._strides))

    def _check_writable(self) -> None:
        if self.is_broadcast():
            raise ShapeError(f"[write] the array is broadcast: {self._shape} with strides {self._strides} (call compact first)")

    def fill(self, value) -> None:
        """Sets every element in place."""
        self._fill("fill", value)

    def _fill(self, op: str, value: Any) -> None:
        self._check_writable()
        value, order = dt.checked_number(op, value, self._dtype), memory_order(self._strides)
        to = self if order is None else self.permute(order)
        self._device.require().strided_fill(to._handle, to._strides, to._offset, to._shape, value)
        self.mark_written()

    # --- views -----------------------------------------------------------------------------------------

    def as_strided(self, shape, strides) -> NDArray:
        """The same memory seen with any shape and strides, from the same offset. raises: ShapeError if it ends before that."""
        return NDArray.make(shape, strides, self._device, self._handle, self._offset)

    def _shares(self, other: NDArray) -> bool:
        """Whether this view and another may share elements."""
        mine, others = self._handle, other._handle
        if mine is not others and mine.serial and others.serial:  # 0 is borrowed memory, which may be anybody's
            return False
        (start, stop), (other_start, other_stop) = self._addresses(), other._addresses()
        return start < other_stop and other_start < stop

    def _overlaps(self, other: NDArray) -> bool:
        """Whether this view and another may share elements without being the same view."""
        return self._shares(other) and not (
            (self._shape, self._strides, self._dtype) == (other._shape, other._strides, other._dtype)
            and self._addresses() == other._addresses()
        )

    def _addresses(self) -> tuple[int, int]:
        """(address of the first byte, address behind the last byte)."""
        first, last = reach(self._shape, self._strides, self._offset)
        itemsize, base = dt.ROWS[self._dtype].itemsize, self._handle.ptr()
        return base + first * itemsize, base + (last + 1) * itemsize

    def _view(self, shape: tuple[int, ...], strides: tuple[int, ...], offset: int | None = None) -> NDArray:
        """A view of this memory, without the checks of ``make``."""
        view = NDArray.__new__(NDArray)
        view._shape = shape
        view._strides = strides
        view._offset = self._offset if offset is None or 0 in shape else offset  # without elements it could be beyond the memory
        view._device = self._device
        view._handle = self._handle
        view._dtype = self._dtype
        view._contiguous = is_contiguous(shape, strides)
        return view

    @property
    def flat(self) -> NDArray:
        """All elements along one axis, a view. raises: ShapeError if this is not contiguous."""
        return self.reshape((self.size,))

    def reshape(self, new_shape, *more) -> NDArray:
        """The same elements in row-major order under another shape; one length may be -1.

        Shares memory when this view is contiguous. raises: ShapeError if the sizes differ or it is not contiguous.
        """
        shape = as_shape((new_shape, *more) if more else new_shape, least=-1)
        if -1 in shape:
            known = -math.prod(shape)
            if shape.count(-1) > 1 or known <= 0 or self.size % known:
                raise ShapeError(f"[reshape] cannot reshape {self._shape} to {shape}")
            shape = tuple(self.size // known if n == -1 else n for n in shape)
        if math.prod(shape) != self.size:
            raise ShapeError(f"[reshape] sizes differ: {self._shape} has {self.size} elements, {shape} has {math.prod(shape)}")
        if not self._contiguous:
            raise ShapeError(f"[reshape] {self._shape} with strides {self._strides} is not contiguous (call compact first)")
        return self._view(shape, compact_strides(shape))

    def permute(self, new_axes) -> NDArray:
        """The axes in another order, numpy's transpose. Shares memory."""
        shape, strides = self._shape, self._strides
        try:  # before the cache, to which (0.0, 1) is (0, 1)
            axes = axis_order(tuple(map(operator.index, new_axes)), len(shape)) if isinstance(new_axes, Iterable) else None
        except TypeError:
            raise ShapeError(f"[permute] an axis of {new_axes} is no whole number") from None
        if axes is None:
            raise ShapeError(f"[permute] {new_axes} is not an order of the axes of {shape}")
        return self._view(tuple([shape[a] for a in axes]), tuple([strides[a] for a in axes]))

    @property
    def T(self) -> NDArray:
        """The axes in reverse order. Shares memory."""
        return self._view(self._shape[::-1], self._strides[::-1])

    def broadcast_to(self, new_shape) -> NDArray:
        """The array repeated along axes of length 1 and new leading axes, by stride 0. Shares memory."""
        return self._broadcast(as_shape(new_shape))

    def _broadcast(self, shape: tuple[int, ...], op: str = "broadcast_to") -> NDArray:
        if shape == self._shape:
            return self
        return self._view(shape, broadcast_strides(self._shape, self._strides, shape, op))

    def flip(self, axes) -> NDArray:
        """The elements in reverse order along ``axes``, as a new compact array."""
        strides, offset = list(self._strides), self._offset
        for axis in normalize_axes(axes, self.ndim, "flip"):
            offset += max(self._shape[axis] - 1, 0) * strides[axis]
            strides[axis] = -strides[axis]
        return self._view(self._shape, tuple(strides), offset).copy()

    def pad(self, axes) -> NDArray:
        """Zeros around the array: one (left, right) pair per axis."""
        axes = pad_widths(axes)
        if len(axes) != self.ndim or any(left < 0 or right < 0 for left, right in axes):
            raise ShapeError(f"[pad] one pair of non-negative widths per axis of {self._shape} is needed, got {axes}")
        shape = tuple(n + left + right for n, (left, right) in zip(self._shape, axes))
        out = full(shape, 0, self._dtype, self._device)
        out[tuple(slice(left, left + n) for n, (left, _) in zip(self._shape, axes))] = self
        return out

    # --- indexing -----------------------------------------------------------------------------------------

    def process_slice(self, sl: slice, dim: int) -> slice:
        """``sl`` along axis ``dim`` with start, stop and step as numpy resolves them."""
        span = slice_range(sl, self._shape[dim])
        return slice(span.start, span.stop, span.step)

    def __getitem__(self, idxs) -> NDArray:
        """Basic indexing, a view. As in the course an int keeps its axis: ``A[1, 2]`` has shape (1, 1)."""
        shape, strides, offset, _ = self._indexed(idxs)
        return self._view(tuple(shape), tuple(strides), offset)

    def _indexed(self, idxs) -> tuple[list[int], list[int], int, list[int]]:
        """Shape, strides and offset of a view, and which of its axes an int is the index of. raises: IndexError."""
        items = list(idxs) if isinstance(idxs, tuple) else [idxs]
        unnamed = self.ndim - len([item for item in items if item is not None])
        if any([item is Ellipsis for item in items]):
            at = [item is Ellipsis for item in items].index(True)
            items[at : at + 1] = [_ALL] * (unnamed + 1)
        else:
            items += [_ALL] * unnamed
        shape, strides, offset, axis, ints = [], [], self._offset, 0, []
        for item in items:
            if item is None:
                shape.append(1)
                strides.append(0)
                continue
            if axis >= self.ndim:
                raise IndexError(f"[getitem] too many indices for shape {self._shape}: {idxs}")
            n, stride = self._shape[axis], self._strides[axis]
            if item is _ALL:
                shape.append(n)
                strides.append(stride)
            elif isinstance(item, slice):
                span = slice_range(item, n)
                shape.append(len(span))
                strides.append(stride * span.step)
                offset += span.start * stride
            elif isinstance(item, (int, np.integer)) and not isinstance(item, (bool, np.bool_)):
                if not -n <= item < n:
                    raise IndexError(f"[getitem] index {item} is out of range for axis {axis} of length {n}")
                ints.append(len(shape))
                shape.append(1)
                strides.append(stride)
                offset += int(item) % n * stride
            elif item is Ellipsis:
                raise IndexError(f"[getitem] an index has more than one ... for shape {self._shape}")
            else:
                accepted = "int, slice, None, ...; a Tensor takes arrays, too"
                raise IndexError(f"[getitem] unsupported index of type {type(item).__name__} (accepted: {accepted})")
            axis += 1
        return shape, strides, offset, ints

    def __setitem__(self, idxs, other) -> None:
        """Writes into the view in place. other: a number, or an array that broadcasts to it or has as many elements."""
        self._check_writable()
        self[idxs].copy_from(other)

    def copy_from(self, other: Any) -> None:
        """self[...] = other."""
        if isinstance(other, _SCALARS):
            self._fill("setitem", other)
            return
        self._check_writable()
        if isinstance(other, NDArray):
            source = other.to(self._device)
        else:
            source = NDArray(other, device=self._device, dtype="float32" if self._dtype == "bfloat16" else self._dtype)
        if self._overlaps(source):
            source = source.copy()
        if source._shape != self._shape:
            source = (
                source.compact().reshape(self._shape) if source.size == self.size else source._broadcast(self._shape, "setitem")
            )
        to, order = self, memory_order(self._strides)
        if order is not None:
            to, source = self.permute(order), source.permute(order)
        copy = self._device.require().strided_copy
        copy(source._handle, source._strides, source._offset, to._handle, to._strides, to._offset, to._shape)
        self.mark_written()

    # --- elementwise ------------------------------------------------------------------------------------------

    def _unary(self, op: str, dtype: str | None = None) -> NDArray:
        out = _new(self._shape, dtype or self._dtype, self._device)
        function = getattr(self._device.mod, op)
        if self._contiguous and self._offset == 0:
            function(self._handle, out._handle)
        else:
            function(self._handle, self._strides, self._offset, out._handle, self._shape)
        return out

    def _float_unary(self, op: str, dtype: str | None = None) -> NDArray:
        x = self if dt.is_float(self._dtype) else self.astype(self._device.default_float)
        return x._unary(op, dtype)

    def _binary(
        self, other, kernel: str, scalar_kernel: str, to_bool: bool = False, to_float: bool = False, op: str | None = None
    ) -> NDArray:
        """op: what errors name where that is not what the kernels are named after."""
        device = self._device
        if not isinstance(other, NDArray):
            if isinstance(other, _SCALARS):
                return self._with_scalar(other, scalar_kernel, to_bool, to_float, op)
            other = self._operand(other)
            if other is NotImplemented:
                return other
        if other._device is not device:
            check_one_device(op or _called(kernel), self, other)
        a, b = self, other
        if a._dtype != b._dtype or (to_float and not dt.is_float(a._dtype)):
            dtype = dt.promote(a._dtype, b._dtype)
            if to_float and not dt.is_float(dtype):
                dtype = device.default_float
            a, b = a.astype(dtype, copy=False), b.astype(dtype, copy=False)
        function, dtype = getattr(device.mod, kernel), "bool" if to_bool else a._dtype
        if a._shape != b._shape:
            shape = broadcast_shape(a._shape, b._shape, op or kernel)
            a, b = a._broadcast(shape), b._broadcast(shape)
        elif a._contiguous and b._contiguous and a._offset == 0 == b._offset:
            out = _new(a._shape, dtype, device, a._strides)
            function(a._handle, b._handle, out._handle)
            return out
        out = _new(a._shape, dtype, device)
        function(a._handle, a._strides, a._offset, b._handle, b._strides, b._offset, out._handle, out._shape)
        return out

    def _method(self, other: Any, name: str, to_bool: bool = False, op: str | None = None) -> NDArray:
        """``_binary`` for methods. raises: DTypeError where an operator would return NotImplemented."""
        found = self._binary(other, f"ewise_{name}", f"scalar_{name}", to_bool, False, op)
        if found is NotImplemented:
            raise DTypeError(f"[{op or name}] cannot combine an NDArray with {type_name(other)} (accepted: NDArray, array, number)")
        return found

    def _operand(self, other: Any) -> Any:
        """An array-like as the other side of an operator: floats do not widen floats, integers and bools keep their dtype."""
        is_bfloat16 = isinstance(other, np.generic) and other.dtype.kind == "V"  # no np.number, as numpy's own scalars are
        if not is_bfloat16 and not isinstance(other, (np.ndarray, list, tuple)):
            return NotImplemented
        values, device = _as_numpy(other), self._device
        dtype = None if device.numpy_semantics else dt.storable(values.dtype)
        if dtype is not None and dt.is_float(self._dtype):
            dtype = self._dtype
        elif dtype is not None and dt.is_float(dtype):
            dtype = device.default_float
        return NDArray(values, device=device, dtype=dtype)

    def _with_scalar(self, value, kernel: str, to_bool: bool = False, to_float: bool = False, op: str | None = None) -> NDArray:
        a = self
        if isinstance(value, np.generic):
            value = value.item()
            if isinstance(value, complex):
                raise DTypeError(f"[{op or _called(kernel)}] cannot combine an array with a complex number: {value}")
        dtype = dt.with_scalar(a._dtype, value, a._device.default_float)
        if to_float and not dt.is_float(dtype):
            dtype = a._device.default_float
        limits = dt.LIMITS.get(dtype)
        if limits is not None and not limits[0] <= value <= limits[1]:
            if not to_bool:
                raise OverflowError(f"[{op or _called(kernel)}] {value} is outside {dtype} (accepted: {limits[0]} to {limits[1]})")
            dtype, value = "float32", math.inf if value > 0 else -math.inf  # compares with every integer as the value does
        if to_bool and dt.ROWS[dtype].itemsize == 2:  # kernels compare in float32, in which few numbers would equal an element
            value = dt.nearest(dtype, value)
        if dtype != a._dtype:
            a = a.astype(dtype)
        out = _new(a._shape, "bool" if to_bool else dtype, a._device)
        function = getattr(a._device.mod, kernel)
        if a._contiguous and a._offset == 0:
            function(a._handle, value, out._handle)
        else:
            function(a._handle, a._strides, a._offset, value, out._handle, a._shape)
        return out

    def __add__(self, other):
        return self._binary(other, "ewise_add", "scalar_add")

    __radd__ = __add__

    def __sub__(self, other):
        return self._binary(other, "ewise_sub", "scalar_sub")

    def __rsub__(self, other):
        if isinstance(other, _SCALARS):
            return self._with_scalar(other, "rscalar_sub")
        other = self._operand(other)
        return other if other is NotImplemented else other - self

    def __mul__(self, other):
        return self._binary(other, "ewise_mul", "scalar_mul")

    __rmul__ = __mul__

    def __truediv__(self, other):
        return self._binary(other, "ewise_div", "scalar_div", to_float=True)

    def __rtruediv__(self, other):
        if isinstance(other, _SCALARS):
            return self._with_scalar(other, "rscalar_div", to_float=True)
        other = self._operand(other)
        return other if other is NotImplemented else other / self

    def __pow__(self, other):
        if not isinstance(other, NDArray) and isinstance(other, (int, np.integer)) and other < 0:
            other = float(other)
        if isinstance(other, (float, np.floating)) and other == 0.5:  # as numpy does: pow would make inf of -inf
            return self.sqrt()
        return self._binary(other, "ewise_power", "scalar_power")

    def __rpow__(self, other):
        if isinstance(other, _SCALARS):
            return self._with_scalar(other, "rscalar_power")
        other = self._operand(other)
        return other if other is NotImplemented else other**self

    def __neg__(self):
        return self._unary("ewise_negate") if self._dtype != "bool" else self * -1

    def __abs__(self):
        return self._unary("ewise_abs") if self._dtype != "bool" else self.copy()

    def maximum(self, other):
        """The larger of each two elements, NaN if one of them is; ``other``: an array that broadcasts, or a number."""
        return self._method(other, "maximum")

    def minimum(self, other):
        """The smaller of each two elements, NaN if one of them is."""
        return self._method(other, "minimum")

    # Comparisons are numpy's: with NaN all are False but !=.
    def __eq__(self, other):
        return self._binary(other, "ewise_eq", "scalar_eq", to_bool=True)

    def __ne__(self, other):
        return self._binary(other, "ewise_ne", "scalar_ne", to_bool=True)

    def __lt__(self, other):
        return self._binary(other, "ewise_lt", "scalar_lt", to_bool=True)

    def __le__(self, other):
        return self._binary(other, "ewise_le", "scalar_le", to_bool=True)

    def __gt__(self, other):
        return self._binary(other, "ewise_gt", "scalar_gt", to_bool=True)

    def __ge__(self, other):
        return self._binary(other, "ewise_ge", "scalar_ge", to_bool=True)

    __hash__ = None  # type: ignore[assignment]

    def __contains__(self, value: Any) -> bool:
        return bool(self._method(value, "eq", to_bool=True).any())

    def logical_and(self, other):
        """Whether both are not zero, as bool."""
        return self._method(other, "logical_and", to_bool=True)

    def logical_or(self, other):
        """Whether one or both are not zero, as bool."""
        return self._method(other, "logical_or", to_bool=True)

    def logical_xor(self, other):
        """Whether just one is not zero, as bool."""
        return self._method(other, "logical_xor", to_bool=True)

    def logical_not(self):
        """Whether it is zero, as bool."""
        return self._unary("ewise_logical_not", "bool")

    def isnan(self):
        """Which elements are NaN, as bool."""
        return self._float_unary("ewise_isnan", "bool")

    def isinf(self):
        """Which elements are infinite, as bool."""
        return self._float_unary("ewise_isinf", "bool")

    def isfinite(self):
        """Which elements are neither infinite nor NaN, as bool."""
        return self._float_unary("ewise_isfinite", "bool")

    def log(self):
        """Natural logarithm; integers become floats."""
        return self._float_unary("ewise_log")

    def exp(self):
        """e to the power of each element; integers become floats."""
        return self._float_unary("ewise_exp")

    def tanh(self):
        """Hyperbolic tangent; integers become floats."""
        return self._float_unary("ewise_tanh")

    def sqrt(self):
        """Square root; integers become floats."""
        return self._float_unary("ewise_sqrt")

    # --- reductions -----------------------------------------------------------------------------------------------

    def _reduce(self, op: str, kernel: str, axis, keepdims: bool, dtype: str | None = None, of_nothing=None) -> NDArray:
        check_flag(op, "keepdims", keepdims)  # sum(0, 1), for example, is not over two axes
        axes = reduced_axes(axis, self.ndim, op)
        shape = reduced_shape(self._shape, axes, keepdims)
        if axis is None and not keepdims and not self._device.numpy_semantics:
            shape = (1,)
        dtype, adds = dtype or self._dtype, kernel in ("reduce_sum", "reduce_prod")
        if not adds and not all([self._shape[i] for i in axes]):
            if of_nothing is not None:
                return full(shape, of_nothing, dtype, self._device)
            raise ShapeError(f"[{op}] nothing to reduce: axes {axes} of {self._shape} have no elements")
        if kernel != "reduce_prod" and self.is_broadcast():
            return self._reduce_once(op, kernel, axes, dtype).reshape(shape)
        order, (*steps, last), turned = reduction(self._shape, self._strides, axes)
        x = self if self._contiguous else self.permute(order)
        kept = dt.accumulator(dtype) if steps and adds and dt.is_float(dtype) else dtype
        function = getattr(self._device.require(), kernel)
        for outer, length, inner in steps:
            part = _new((outer, inner), kept, self._device)
            part.category = WORKSPACE
            function(x.contiguous_handle(), part._handle, outer, length, inner)
            x = part
        out = _new(turned[0] if turned else shape, kept, self._device)
        function(x.contiguous_handle(), out._handle, *last)
        if turned:
            out = out.permute(turned[1]).compact().reshape(shape)
        return out.astype(dtype, copy=False)

    def _reduce_once(self, op: str, kernel: str, axes: tuple[int, ...], dtype: str) -> NDArray:
        """The reduction of a broadcast array, with its axes, from what it repeats: sums are multiplied, maxima stay."""
        repeated = [i for i, (n, stride) in enumerate(zip(self._shape, self._strides)) if n > 1 and stride == 0]
        once = self._view(tuple([1 if i in repeated else n for i, n in enumerate(self._shape)]), self._strides)
        times = math.prod([self._shape[i] for i in repeated if i in axes])
        if kernel == "reduce_sum" and times > 1:
            wide = dt.accumulator(dtype) if dt.is_float(dtype) else dtype
            reduced = (once._reduce(op, kernel, axes, True, wide) * times).astype(dtype, copy=False)
        else:
            reduced = once._reduce(op, kernel, axes, True, dtype)
        return reduced._broadcast(reduced_shape(self._shape, axes, True)).compact()

    def _sum_dtype(self) -> str:
        """The dtype of sums and products. Kernels widen element by element, so there is no wide copy."""
        return self._dtype if dt.is_float(self._dtype) else "int64"

    @_as_numpy_calls_it
    def sum(self, axis=None, keepdims=False) -> NDArray:
        """Sum over one axis, several, or all (None), which gives shape (1,). Integers and bool sum to int64.

        keepdims, here and in the other reductions: leave the axes, with length 1. raises: ShapeError for an axis that is not there,
        TypeError for a keepdims that is neither True nor False.
        """
        return self._reduce("sum", "reduce_sum", axis, keepdims, self._sum_dtype())

    @_as_numpy_calls_it
    def prod(self, axis=None, keepdims=False) -> NDArray:
        """Product over one axis, several, or all (None). Integers and bool give int64."""
        return self._reduce("prod", "reduce_prod", axis, keepdims, self._sum_dtype())

    @_as_numpy_calls_it
    def max(self, axis=None, keepdims=False) -> NDArray:
        """Maximum; NaN wins, as in numpy. raises: ShapeError over no elements."""
        return self._reduce("max", "reduce_max", axis, keepdims)

    @_as_numpy_calls_it
    def min(self, axis=None, keepdims=False) -> NDArray:
        """Minimum; NaN wins, as in numpy. raises: ShapeError over no elements."""
        return self._reduce("min", "reduce_min", axis, keepdims)

    @_as_numpy_calls_it
    def mean(self, axis=None, keepdims=False) -> NDArray:
        """Arithmetic mean over one axis, several, or all (None). The sum behind it has the range of float32 or int64 at least."""
        axes = normalize_axes(axis, self.ndim, "mean")
        wide = dt.accumulator(self._dtype) if dt.is_float(self._dtype) else self._sum_dtype()
        total = self._reduce("mean", "reduce_sum", axis if axis is None else axes, keepdims, wide)
        mean = total / math.prod(self._shape[i] for i in axes)
        return mean.astype(self._dtype, copy=False) if dt.is_float(self._dtype) else mean

    @_as_numpy_calls_it
    def any(self, axis=None, keepdims=False) -> NDArray:
        """Whether an element is not zero, as bool; False over none."""
        return self.astype("bool", copy=False)._reduce("any", "reduce_max", axis, keepdims, of_nothing=False)

    @_as_numpy_calls_it
    def all(self, axis=None, keepdims=False) -> NDArray:
        """Whether every element is not zero, as bool; True over none."""
        return self.astype("bool", copy=False)._reduce("all", "reduce_min", axis, keepdims, of_nothing=True)

    def argmax(self, axis: int | None = None, keepdims=False) -> NDArray:
        """Index of the first maximum, int64; NaN counts as largest."""
        return self._arg("argmax", axis, keepdims)

    def argmin(self, axis: int | None = None, keepdims=False) -> NDArray:
        """Index of the first minimum, int64; NaN counts as smallest."""
        return self._arg("argmin", axis, keepdims)

    def _arg(self, op: str, axis: int | None, keepdims: bool) -> NDArray:
        x = self if self._contiguous or axis is not None else self.copy()  # counted in their order, not in that in memory
        return x._reduce(op, f"reduce_{op}", axis, keepdims, "int64")

    # --- matrix product --------------------------------------------------------------------------------------------

    def __matmul__(self, other: Any) -> NDArray:
        other = other if isinstance(other, NDArray) else self._operand(other)
        return other if other is NotImplemented else matmul(self, other)

    def __rmatmul__(self, other: Any) -> NDArray:
        other = self._operand(other)
        return other if other is NotImplemented else matmul(other, self)


def _new(shape: tuple[int, ...], dtype: str, device: BackendDevice, strides: tuple[int, ...] | None = None) -> NDArray:
    """An uninitialised contiguous array, without the checks of ``NDArray.make``. strides: those of ``shape``, if known already."""
    self = NDArray.__new__(NDArray)
    self._shape = shape
    self._strides = strides or compact_strides(shape)
    self._offset = 0
    self._device = device
    self._handle = device.Array(math.prod(shape), dtype)
    self._dtype = dtype
    self._contiguous = True
    return self


def _called(kernel: str) -> str:
    """What users call the operation of an elementwise kernel: the kernel's name is that behind one of its form, as in ewise_add."""
    return kernel.partition("_")[2]


def check_one_device(op: str, a: NDArray, b: NDArray) -> None:
    """raises: DeviceError if two arrays of one op are on different devices."""
    if a._device is not b._device and a._device != b._device:
        raise DeviceError(f"[{op}] arrays are on different devices: {a._device} and {b._device}")


def _as_numpy(x: Any) -> np.ndarray:
    try:
        return np.asarray(x)
    except ValueError as error:  # lists of different lengths
        raise ShapeError(f"[array] {error}") from None
    except TypeError:
        if not hasattr(x, "__dlpack__"):
            raise
        return from_dlpack(x).numpy()  # torch's bfloat16, and what lies on a GPU


def _from_values(values: np.ndarray, device: BackendDevice, dtype: str) -> NDArray:
    if values.dtype.kind not in "fiubOV" or (values.dtype.kind == "V" and values.dtype.name != "bfloat16"):
        raise DTypeError(f"[array] cannot store numpy dtype {values.dtype} (accepted: {', '.join(dt.ROWS)})")
    if values.dtype == np.uint64 and dtype == "int64" and values.size:
        dt.checked_number("array", values.max(), dtype)  # numpy would wrap it around
    if values.dtype.kind == "O" and any(x is None for x in values.flat):  # which numpy takes for NaN
        raise DTypeError("[array] cannot store None")
    with np.errstate(all="ignore"):
        try:
            values = np.ascontiguousarray(values, dtype=dt.to_numpy(dtype)).reshape(values.shape)
        except (OverflowError, TypeError, ValueError) as error:  # too large, or no numbers
            raise DTypeError(f"[array] cannot store these values as {dtype}: {error}") from None
    mod = device.require()
    out = _new(values.shape, dtype, device)
    if dtype == "bfloat16":
        values = values.view(np.uint16)
    mod.from_numpy(values, out._handle)
    out.category = DATA
    return out


def _matrix_form(x: NDArray) -> tuple[NDArray, int, bool]:
    """(x or a compact copy, leading stride, transposed): how the last two axes lie in memory."""
    rows, cols = x._shape[-2:]
    row_stride, col_stride = x._strides[-2:]
    if (col_stride == 1 or cols == 1) and (row_stride >= cols or rows == 1):
        return x, max(row_stride, cols, 1) if rows != 1 else max(cols, 1), False
    if (row_stride == 1 or rows == 1) and (col_stride >= rows or cols == 1):
        return x, max(col_stride, rows, 1) if cols != 1 else max(rows, 1), True
    return x.copy(), max(cols, 1), False


def _inner_differ(a: NDArray, b: NDArray) -> ShapeError:
    return ShapeError(f"[matmul] inner dimensions differ: a is {a._shape}, b is {b._shape}")


def matmul(a: NDArray, b: NDArray, out: NDArray | None = None, accumulate: bool = False) -> NDArray:
    """(..., m, k) @ (..., k, n) -> (..., m, n), leading axes broadcast without copies; 1-D as in numpy.

    out: where to put it (contiguous; float32 also for 16-bit a and b); with ``accumulate`` the product is added to what is there.
    raises: ShapeError if the inner dimensions differ or ``out`` does not fit; DTypeError for bool and for what is no NDArray.
    """
    try:
        check_one_device("matmul", a, b)
    except AttributeError:
        raise DTypeError(f"[matmul] cannot multiply {type_name(a)} with {type_name(b)} (accepted: two NDArrays)") from None
    if len(a._shape) > 1 and len(b._shape) > 1:
        return _matmul(a, b, out, accumulate)
    if a.ndim == 0 or b.ndim == 0:
        raise ShapeError(f"[matmul] needs at least one dimension: a is {a._shape}, b is {b._shape}")
    row, column = a.ndim == 1, b.ndim == 1  # as a matrix of one
    if a._shape[-1] != b._shape[0 if column else -2]:
        raise _inner_differ(a, b)
    a = a._view((1,) + a._shape, (0,) + a._strides) if row else a
    b = b._view(b._shape + (1,), b._strides + (0,)) if column else b
    if out is not None:
        leading = out._shape[: max(out.ndim - (not row) - (not column), 0)]
        out = out.reshape(leading + (a._shape[-2], b._shape[-1]))
    product = _matmul(a, b, out, accumulate)
    shape = product._shape
    return product.reshape(shape[:-2] + (() if row else shape[-2:-1]) + (() if column else shape[-1:]))


def _matmul(a: NDArray, b: NDArray, out: NDArray | None, accumulate: bool) -> NDArray:
    """``matmul`` of at least two axes each."""
    if a._shape[-1] != b._shape[-2]:
        raise _inner_differ(a, b)
    if a._dtype != b._dtype:
        dtype = dt.promote(a._dtype, b._dtype)
        a, b = a.astype(dtype, copy=False), b.astype(dtype, copy=False)
    if a._dtype == "bool":
        raise DTypeError("[matmul] no product of bool arrays (accepted: any number dtype)")
    try:
        batch = broadcast_shape(a._shape[:-2], b._shape[:-2], "matmul")
    except ShapeError:
        raise ShapeError(f"[matmul] leading axes do not broadcast: a is {a._shape}, b is {b._shape}") from None
    m, k, n = a._shape[-2], a._shape[-1], b._shape[-1]
    full_shape = (*batch, m, n)
    if out is not None:
        if out._shape != full_shape or not out._contiguous:
            raise ShapeError(f"[matmul] out is {out._shape} with strides {out._strides} (accepted: {full_shape}, contiguous)")
        a = a.copy() if a._shares(out) else a  # out is written before all of them is read
        b = b.copy() if b._shares(out) else b
        out.mark_written()
    if batch and len(b._shape) == 2 and a._contiguous:  # one large product instead of many
        m, batch = math.prod(a._shape[:-1]), ()
        a = a._view((m, k), (k, 1))
    a, lda, trans_a = _matrix_form(a)
    b, ldb, trans_b = _matrix_form(b)
    if batch:
        a = a.broadcast_to(batch + (m, k))
        b = b.broadcast_to(batch + (k, n))
    if out is None:
        out, accumulate = _new(full_shape, a._dtype, a._device), False
    a._device.require().matmul(
        a._handle, a._offset, a._strides[:-2], lda, trans_a, b._handle, b._offset, b._strides[:-2], ldb, trans_b,
        out.contiguous_handle(), batch, m, k, n, accumulate,
    )  # fmt: skip
    return out


# --- functions of the course's module ---


def array(a, dtype="float32", device=None) -> NDArray:
    """An NDArray of ``a``. dtype None: as ``NDArray(a)`` chooses."""
    return NDArray(a, device=device, dtype=dtype)


def empty(shape, dtype="float32", device=None) -> NDArray:
    """An uninitialised array."""
    device = as_device(device)
    device.require()
    return _new(as_shape(shape), dt.name_of(dtype or "float32"), device)


def write_parts(out: NDArray, arrays: Iterable[NDArray], strides: tuple[int, ...], offsets: Iterable[int]) -> None:
    """Copies each array to its offset in ``out``, a new array, where its elements lie ``strides`` apart.

    No graph can have read a new array, so that nothing is stamped as written in place.
    """
    copy = out._device.require().strided_copy
    for a, offset in zip(arrays, offsets):
        copy(a._handle, a._strides, a._offset, out._handle, strides, offset, a._shape)


def full(shape, fill_value, dtype="float32", device=None) -> NDArray:
    """An array of ``fill_value``."""
    out = empty(shape, dtype, device)
    out._device.require().fill(out._handle, dt.checked_number("full", fill_value, out._dtype))
    return out


def broadcast_to(array: NDArray, new_shape) -> NDArray:
    """``array.broadcast_to(new_shape)``."""
    return array.broadcast_to(new_shape)


def reshape(array: NDArray, new_shape) -> NDArray:
    """``array.reshape(new_shape)``."""
    return array.reshape(new_shape)


def maximum(a: NDArray, b) -> NDArray:
    """``a.maximum(b)``."""
    return a.maximum(b)


def log(a: NDArray) -> NDArray:
    """``a.log()``."""
    return a.log()


def exp(a: NDArray) -> NDArray:
    """``a.exp()``."""
    return a.exp()


def tanh(a: NDArray) -> NDArray:
    """``a.tanh()``."""
    return a.tanh()


def sum(a: NDArray, axis=None, keepdims=False) -> NDArray:
    """``a.sum(axis, keepdims)``."""
    return a.sum(axis=axis, keepdims=keepdims)


def flip(a: NDArray, axes) -> NDArray:
    """``a.flip(axes)``."""
    return a.flip(axes)


def where(condition: NDArray, a, b) -> NDArray:
    """a where condition holds, else b; the three broadcast. a or b may be a number."""
    if not isinstance(condition, NDArray):
        raise DTypeError(f"[where] condition is of type {type_name(condition)} (accepted: an NDArray)")
    device = condition._device
    wanted = [x._dtype for x in (a, b) if isinstance(x, NDArray)]
    dtype = reduce(dt.promote, wanted) if wanted else device.default_float
    for x in (a, b):
        if isinstance(x, NDArray):
            check_one_device("where", condition, x)
        else:
            dtype = dt.with_scalar(dtype, x, device.default_float)
            dt.checked_number("where", x, dtype)
    a, b = (x if isinstance(x, NDArray) else full((1,) * condition.ndim, x, dtype, device) for x in (a, b))
    shape = broadcast_shape(broadcast_shape(condition._shape, a._shape, "where"), b._shape, "where")
    c = condition.astype("bool", copy=False).broadcast_to(shape)
    a, b = a.astype(dtype, copy=False).broadcast_to(shape), b.astype(dtype, copy=False).broadcast_to(shape)
    out = _new(shape, dtype, device)
    device.require().where(
        c._handle, c._strides, c._offset, a._handle, a._strides, a._offset, b._handle, b._strides, b._offset,
        out._handle, shape,
    )  # fmt: skip
    return out


def from_dlpack(x: Any) -> NDArray:
    """An NDArray that shares the memory of ``x`` (numpy, torch, ...), with its dtype. CPU memory comes to ``cpu()``, copied where
    that is numpy's (``NEEDLE_BACKEND=np``).

    On a GPU both sides must work on CUDA's default stream, as they do unless told otherwise: with another stream, wait for the
    device before either frees memory that they share.
    raises: DTypeError for what has no DLPack; ValueError for a dtype or a layout that needle has not, and for bytes of bool that
    are neither 0 nor 1.
    """
    if not hasattr(x, "__dlpack_device__"):
        raise DTypeError(f"[from_dlpack] cannot share the memory of {type(x).__name__} (accepted: what has __dlpack__)")
    kind, _ = x.__dlpack_device__()
    if kind == 1 and default_device().numpy_semantics:
        return NDArray(np.from_dlpack(x), default_device())
    device = {1: cpu(), 2: cuda()}.get(int(kind))
    if device is None:
        raise DeviceError(f"[from_dlpack] memory of DLPack device type {int(kind)} (accepted: CPU, CUDA)")
    # 1 is CUDA's legacy default stream, which that of cuda() waits for. Unasked, PyTorch makes nothing wait for its current one.
    capsule = x.__dlpack__(stream=1) if kind == 2 else x.__dlpack__()
    handle, shape, strides = device.require().from_dlpack(capsule)
    return NDArray.make(shape, strides, device, handle)


def asarray(x: Any, device: BackendDevice | None = None) -> NDArray:
    """``x`` as an NDArray that keeps its dtype; an NDArray already on ``device`` comes back itself."""
    if isinstance(x, NDArray):
        return x if device is None else x.to(device)
    values = _as_numpy(x)
    return NDArray(values, device=device, dtype=dt.storable(values.dtype))
