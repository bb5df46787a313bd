"""Kernel calls made again without the Python around them: for a step that is the same each time, such as a decoded token."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import current_thread
from types import ModuleType
from typing import Any

from ..locks import process_lock
from .device import BackendDevice
from .host_memory import ALLOCATOR_FUNCTIONS

_READS = ("to_numpy", "to_dlpack", "_strided")  # the last shares the memory of cpu_numpy
_NO_KERNELS = (
    *ALLOCATOR_FUNCTIONS, "Array", "from_numpy", "from_dlpack", "dlpack_device", "sync", "num_threads", "set_num_threads",
    "machine_memory", "best_level", "on_read", "count_apart", "count_with_everyones", "device_count", "why_absent",
    "device_properties", "launch_counts", "launch_extents", "reset_launch_counts", "use_cublaslt", "cublaslt_in_use",
)  # fmt: skip
_swapped: list[tuple[BackendDevice, ModuleType]] = []  # and the modules that they had


def _put_back() -> None:
    """In a forked child, whose parent has another thread that records."""
    while _swapped:
        device, mod = _swapped.pop()
        device.mod = mod


_swapping = process_lock(_put_back)  # devices are everybody's


class Recording:
    """The kernel calls of a function, which runs once and can be made again on the same arrays.

        recording = Recording(device)
        y = recording.record(lambda: f(x))  # computed, and recorded
        x[:] = other                        # an NDArray from outside takes new values
        recording.replay()                  # y has those of f(other)

    The arrays made inside live as long as the recording. All else is constant: numbers, branches taken, arrays made from those
    of others inside, and which memory a name such as a parameter stood for. Calls of other threads meanwhile are not recorded.
    """

    def __init__(self, device: BackendDevice):
        self._device = device
        self._calls: list[Callable[[], Any]] = []

    def record(self, function: Callable[[], Any]) -> Any:
        """What ``function`` gives.

        raises: RuntimeError where it reads values, since what is done with them could not be done again; DeviceError for an absent
        device.
        """
        # No context manager of its own: Ctrl-C as a caller's ``with`` begins or ends would skip a part of its code.
        self._device.require()
        with _swapping:
            mod = self._device.require()  # what it is now that nobody else swaps it
            try:
                _swapped.append((self._device, mod))
                self._device.mod = _Listener(mod, self._calls)
                return function()
            finally:
                self._device.mod = mod
                del _swapped[-1:]

    def replay(self) -> None:
        """Makes the calls again, in their order."""
        for call in self._calls:
            call()


class _Listener(ModuleType):
    """A device's module that notes down which kernels the thread that made it calls."""

    def __init__(self, mod: ModuleType, calls: list[Callable[[], Any]]):
        super().__init__(mod.__name__)
        self._mod, self._calls, self._thread = mod, calls, current_thread()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._mod, name)
        if current_thread() is not self._thread or name in _NO_KERNELS or not callable(found):
            return found
        if name in _READS:
            raise RuntimeError(f"[recording] {name}: values are read in a block that is recorded")

        def record(*args: Any, **kwargs: Any) -> Any:
            call = partial(found, *args, **kwargs)
            result = call()
            self._calls.append(call)
            return result

        return record
