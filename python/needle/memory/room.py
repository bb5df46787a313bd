"""How much memory there is for a device's arrays: of the GPU, or of the machine as far as this process may use it."""

from __future__ import annotations

import contextlib
import os

from ..backend_ndarray.device import BackendDevice, cpu
from ..backend_selection import as_device


def capacity(device: BackendDevice) -> int:
    """Bytes that the device's allocator can give at most: the least of its limit and the GPU's memory, or the machine's and what
    the process's control groups may have, as those of a container or a batch job. 0: unknown.
    """
    device = as_device(device)
    limit = device.require().memory_stats()["limit"]
    total = card(device)[0] if device.is_gpu else _machine()[0]
    return min((n for n in (limit, total) if n), default=0)


def available(device: BackendDevice) -> int:
    """Bytes that the device's allocator can have now: what it holds, and what no other process has, nor the driver. 0: unknown.

    The code of kernels is loaded as they are first used, and comes on top on a GPU. On a CPU what others have may be swapped out:
    Linux only, elsewhere ``capacity``. source: proc(5), MemAvailable.
    """
    device = as_device(device)
    known = [capacity(device)]
    if device.is_gpu:
        known.append(max(1, card(device)[1]))
    elif free := _machine()[1]:
        known.append(free + device.require().memory_stats()["reserved"])
    return min(known)


def card(device: BackendDevice) -> tuple[int, int]:
    """Bytes of a GPU's memory, and how many of them are free or needle's."""
    module = device.require()
    found = module.device_properties()
    return found["total_bytes"], found["free_bytes"] + max(found["pool_bytes"], module.memory_stats()["reserved"])


def _machine() -> tuple[int, int]:
    """Bytes of memory that this process may have, and how many of them are free; 0: unknown."""
    if cpu().enabled():
        return cpu().require().machine_memory()
    with contextlib.suppress(ValueError, OSError, AttributeError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), 0
    return 0, 0
