"""How much memory there is for a device's arrays: of the machine, the GPU, and the control group that the process runs in."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from ..backend_ndarray.device import BackendDevice
from ..backend_selection import as_device


def capacity(device: BackendDevice) -> int:
    """Bytes that the device's allocator can give at most: the least of its limit and the GPU's memory, or the machine's and what
    the control groups around the process may have, as those of a container or a batch job. 0: unknown.
    """
    device = as_device(device)
    limit = device.require().memory_stats()["limit"]
    known = [limit] if limit else []
    if device.is_gpu:
        known.append(card(device)[0])
    else:
        known += (most for most, _ in _control_groups())
        with contextlib.suppress(ValueError, OSError, AttributeError):
            known.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min(known, default=0)


def available(device: BackendDevice) -> int:
    """Bytes that the device's allocator can have now: what it holds, and what no other process has, nor the driver. 0: unknown.

    The code of kernels is loaded as they are first used, and comes on top on a GPU. On a CPU what others have may be swapped out:
    Linux only, elsewhere ``capacity``. source: proc(5), MemAvailable.
    """
    device = as_device(device)
    known = [capacity(device)]
    if device.is_gpu:
        known.append(max(1, card(device)[1]))
    else:
        held = device.require().memory_stats()["reserved"]
        known += (max(1, free + held) for _, free in _control_groups())
        with contextlib.suppress(OSError, StopIteration):
            line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable:"))
            known.append((int(line.split()[1]) << 10) + held)
    return min(known)


def card(device: BackendDevice) -> tuple[int, int]:
    """Bytes of a GPU's memory, and how many of them are free or needle's."""
    module = device.require()
    found = module.device_properties()
    return found["total_bytes"], found["free_bytes"] + max(found["pool_bytes"], module.memory_stats()["reserved"])


def _control_groups() -> Iterator[tuple[int, int]]:
    """Bytes that this process's control group may have, and how many of them are free; the same of each group around it.

    Free is what files have, too, which the kernel takes back. source: cgroups(7), and the kernel's documentation of control groups,
    versions 2 and 1.
    """
    with contextlib.suppress(OSError):
        for line in os.fsdecode(Path("/proc/self/cgroup").read_bytes()).splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            root, limit, usage, prefix = _VERSION_1 if controllers else _VERSION_2
            group = PurePosixPath(name).relative_to("/")
            for path in (group, *group.parents):  # of a container maybe the last alone is there: the name is the machine's
                with contextlib.suppress(OSError, ValueError):  # "max": no limit
                    most = int(Path(root, path, limit).read_text())
                    used = int(Path(root, path, usage).read_text())
                    stat = dict(entry.split() for entry in Path(root, path, "memory.stat").read_text().splitlines())
                    yield most, most - used + int(stat[f"{prefix}inactive_file"]) + int(stat[f"{prefix}active_file"])


# Where the groups are, and their files: the limit, what is used, and what the sums over a group's own groups begin with.
_VERSION_2 = ("/sys/fs/cgroup", "memory.max", "memory.current", "")
_VERSION_1 = ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
