"""Dtypes: one row each, and the promotion of two to one.

A dtype is its name, a ``str``, as in the course. bfloat16 in numpy comes from ``ml_dtypes``, imported when first needed.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from .errors import DTypeError


class Row(NamedTuple):
    """What needle knows of a dtype: its name, the bytes of an element, and how it is promoted."""

    name: str
    itemsize: int
    kind: str  # f float, i integer, b bool
    rank: int  # of two dtypes the higher rank wins; two of the same rank (the 16-bit floats) give float32


ROWS = {
    row.name: row
    for row in (
        Row("float32", 4, "f", 5),
        Row("float16", 2, "f", 4),
        Row("bfloat16", 2, "f", 4),
        Row("float64", 8, "f", 6),
        Row("int32", 4, "i", 2),
        Row("int64", 8, "i", 3),
        Row("uint8", 1, "i", 1),
        Row("bool", 1, "b", 0),
    )
}
_KINDS = {name: row.kind for name, row in ROWS.items()}
_NUMPY: dict[str, np.dtype] = {name: np.dtype(name) for name in ROWS if name != "bfloat16"}
_FROM_NUMPY: dict[Any, str] = {dtype: name for name, dtype in _NUMPY.items()}


def name_of(dtype: Any) -> str:
    """The needle name of a dtype given as a name, a numpy dtype or type, or ``float``/``int``/``bool``.

    raises: DTypeError for one that needle does not have.
    """
    if isinstance(dtype, str) and dtype in ROWS:
        return dtype
    if isinstance(dtype, np.dtype) and dtype in _FROM_NUMPY:
        return _FROM_NUMPY[dtype]
    try:
        name = np.dtype(dtype).name
    except (TypeError, ValueError):
        name = str(dtype)
    if name not in ROWS:
        raise DTypeError(f"[dtype] unknown dtype: {dtype!r} (accepted: {', '.join(ROWS)})")
    return name


def to_numpy(name: str) -> np.dtype:
    """The numpy dtype of a name; bfloat16 needs the package ``ml_dtypes``."""
    found = _NUMPY.get(name)
    if found is None:
        if name != "bfloat16":
            raise DTypeError(f"[dtype] unknown dtype: {name!r} (accepted: {', '.join(ROWS)})")
        try:
            import ml_dtypes
        except ModuleNotFoundError:
            raise DTypeError("[dtype] bfloat16 in numpy needs the package ml_dtypes: pip install ml_dtypes") from None
        found = _NUMPY[name] = np.dtype(ml_dtypes.bfloat16)
        _FROM_NUMPY[found] = name
    return found


def storable(dtype: Any) -> str:
    """The needle dtype that numpy data of ``dtype`` is stored as: its own, or the next one that holds it.

    raises: DTypeError for data that are not numbers.
    """
    dtype = np.dtype(dtype)
    if dtype.name in ROWS:
        return dtype.name
    wider = {"int8": "int32", "int16": "int32", "uint16": "int32", "uint32": "int64", "uint64": "int64"}
    if dtype.name in wider:
        return wider[dtype.name]
    if dtype.kind in "fO":  # longdouble; object arrays of Python numbers
        return "float64"
    raise DTypeError(f"[dtype] cannot store numpy dtype {dtype} (accepted: {', '.join(ROWS)})")


def is_float(name: str) -> bool:
    """Whether the dtype of that name is floating."""
    return _KINDS[name] == "f"


def promote(a: str, b: str) -> str:
    """The dtype of ``a op b``: floats win over integers, integers over bool, wider over narrower."""
    if a == b:
        return a
    row_a, row_b = ROWS[a], ROWS[b]
    if row_a.rank == row_b.rank:
        return "float32"
    return a if row_a.rank > row_b.rank else b


def accumulator(name: str) -> str:
    """The dtype that sums and statistics of floats of that name are kept in: accum_t in dtype.h."""
    return promote(name, "float32")


def with_scalar(name: str, scalar: Any, default_float: str) -> str:
    """The dtype of an array of ``name`` combined with a Python number, which never widens within its own kind."""
    kind = _KINDS[name]
    if kind == "f" or isinstance(scalar, (bool, np.bool_)):
        return name
    if isinstance(scalar, (int, np.integer)):
        return "int64" if kind == "b" else name
    return default_float


# The least and the greatest value of the integer dtypes.
LIMITS = {"int32": (-(2**31), 2**31 - 1), "int64": (-(2**63), 2**63 - 1), "uint8": (0, 255)}


def nearest(name: str, value: float) -> float:
    """``value`` as an array of the 16-bit float dtype ``name`` keeps it."""
    with np.errstate(over="ignore"):
        if name == "float16":
            return float(np.float16(value))
        single = np.float32(value)
    if not np.isfinite(single):
        return float(single)
    bits = int(single.view(np.uint32))  # bfloat16 is the upper half
    bits += 0x7FFF + (bits >> 16 & 1)
    return float(np.uint32(bits & 0xFFFF0000).view(np.float32))


def checked_number(op: str, value: Any, dtype: str) -> int | float:
    """``value`` as the Python number that every element of an array of ``dtype`` is to be set to; a fraction is cut off.

    raises: DTypeError for what is no number; OverflowError where the dtype ends before it.
    """
    if hasattr(value, "item"):  # numpy's scalars, arrays of one element
        with suppress(ValueError):
            value = value.item()
    if not isinstance(value, (int, float)):
        raise DTypeError(f"[{op}] {value!r} is no real number")
    limits = LIMITS.get(dtype)
    if limits is not None and not limits[0] - 1 < value < limits[1] + 1:
        raise OverflowError(f"[{op}] {value} is outside {dtype} (accepted: {limits[0]} to {limits[1]})")
    if not is_float(dtype):
        return value
    try:
        return float(value)
    except OverflowError:
        raise OverflowError(f"[{op}] a whole number of {int(value).bit_length()} bits is outside {dtype}") from None
