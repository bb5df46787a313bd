"""The course's NEEDLE_BACKEND=np: numpy's dtypes and shapes. One code path: it is the reference device under a preset.

As ``array_api`` it has the functions of ``backend_ndarray`` and, for ops of one's own, all others of numpy.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy

from . import backend_ndarray
from .backend_ndarray.device import BackendDevice as Device


class CPUDevice(Device):
    """The reference backend with numpy's semantics; repr ``needle.cpu()``."""

    def __init__(self) -> None:
        super().__init__("cpu_numpy", "ndarray_backend_numpy", numpy_semantics=True, label="needle.cpu()")


@lru_cache(maxsize=None)
def cpu() -> CPUDevice:
    return CPUDevice()


def default_device() -> Device:
    return cpu()


def all_devices() -> list[Device]:
    return [cpu()]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(backend_ndarray if hasattr(backend_ndarray, name) else numpy, name)
