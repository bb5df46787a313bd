"""The backend without data: shapes, dtypes and an allocator's account, for planning.

It has every function of the reference backend; a kernel here does nothing, since all memory is allocated by its caller.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .. import dtype as dt
from . import ndarray_backend_numpy as _reference
from .host_memory import ALLOCATOR_FUNCTIONS, HostAllocator, HostArray, Storage

__device_name__ = "meta"
_allocator = _everyones = HostAllocator("meta")


def _count_with(allocator: HostAllocator) -> None:
    global _allocator
    _allocator = allocator
    globals().update({name: getattr(allocator, name) for name in ALLOCATOR_FUNCTIONS})


def count_apart() -> None:
    """Begins an account: what was live before, as a model of an earlier plan, neither counts in it nor is subtracted when freed."""
    own = HostAllocator("meta")
    own.allocations = _allocator.allocations  # no serial number comes twice
    _count_with(own)


def count_with_everyones() -> None:
    """Ends such an account, if there is one."""
    _everyones.allocations = _allocator.allocations
    _count_with(_everyones)


_count_with(_everyones)


class Array(HostArray):
    """A size and a dtype; no memory."""

    __slots__ = ()

    def __init__(self, size: int, dtype: str = "float32"):
        if size < 0:
            raise ValueError(f"impossible array size {size}")
        super().__init__(size, dtype, Storage(_allocator, size * dt.ROWS[dtype].itemsize))

    def view(self, offset: int, size: int) -> Array:
        part = Array.__new__(Array)
        HostArray.__init__(part, size, self.dtype, self.storage)
        return part

    def ptr(self) -> int:
        return id(self.storage)


def num_threads() -> int:
    return 1


_when_read: Callable[[], None] | None = None  # a plan listens


def on_read(listener: Callable[[], None] | None) -> None:
    """Has ``listener`` called, None: no longer, whenever somebody asks for values."""
    global _when_read
    _when_read = listener


def to_numpy(a, shape, strides, offset):
    """NaN, or zero for dtypes without one: there is nothing to read."""
    if _when_read is not None:
        _when_read()
    np_dtype = dt.to_numpy(a.dtype)
    return np.full(shape, np.nan if dt.is_float(a.dtype) else 0, np_dtype)


def _nothing(*args, **kwargs):
    """A kernel that has no data to work on."""


def _elementwise(name):
    def entry(a, *args):
        _reference._check_kernel(name, a.dtype)

    return entry


for _name in dir(_reference):
    _function = getattr(_reference, _name)
    if not _name.startswith("_") and callable(_function) and _name not in globals():
        _form, _, _op = _name.partition("_")
        globals()[_name] = _elementwise(_op) if _form in ("ewise", "scalar", "rscalar") else _nothing
