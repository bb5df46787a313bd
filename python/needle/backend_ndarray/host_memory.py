"""The allocator of the devices written in Python: counts of bytes, with the figures that the C++ allocator has."""

from __future__ import annotations

from collections.abc import Callable
from threading import local

from ..errors import OutOfMemoryError

# What an array is for: the number is its place here. 0 is what nobody has said anything else about.
CATEGORIES = ("activation", "parameter", "gradient", "optimizer state", "workspace", "data")
ACTIVATION, PARAMETER, GRADIENT, OPTIMIZER_STATE, WORKSPACE, DATA = range(len(CATEGORIES))
MADE, RETAGGED, FREED = 1, 0, -1  # kinds of a memory event: MemoryEvent in allocator.h


class _OfThisThread(local):
    category = ACTIVATION  # of what is allocated: one thread may be in its backward while another is in its forward


class HostAllocator:
    """Counts and lists the Storage objects that hold memory. All figures are in bytes.

    The methods that ``ALLOCATOR_FUNCTIONS`` names are those of the C++ allocator: ``allocator.h`` says what each does.
    """

    def __init__(self, device_name: str):
        self.device_name = device_name
        self.live = self.peak = self.borrowed = self.limit = 0
        self.allocations = self.peak_serial = 0
        self.current = _OfThisThread()
        self.by_category = [0] * len(CATEGORIES)
        self.by_category_at_peak = [0] * len(CATEGORIES)
        self.held: dict[int, tuple] = {}  # serial: (MADE, serial, nbytes, category, site)
        self.log: list[tuple] | None = None
        self.site_hook: Callable[[int], int] | None = None
        self.site_bytes = 0

    def take(self, storage: Storage, nbytes: int) -> None:
        """Counts a new storage and gives it its number, category and site. raises: OutOfMemoryError beyond the limit."""
        if self.limit and self.live + nbytes > self.limit:
            raise self.out_of_memory(nbytes)
        site = self.site_hook(nbytes) if self.site_hook is not None and nbytes >= self.site_bytes else 0
        self.allocations += 1
        storage.serial, storage.nbytes, storage.category, storage.site = self.allocations, nbytes, self.current.category, site
        self.live += nbytes
        self.by_category[storage.category] += nbytes
        storage.allocator = self  # no call between the counts and this: Ctrl-C may be raised in one
        self._put(storage)
        if self.live > self.peak:
            self.peak, self.peak_serial = self.live, storage.serial
            self.by_category_at_peak = list(self.by_category)

    def out_of_memory(self, nbytes: int) -> OutOfMemoryError:
        """The error to raise where ``nbytes`` more cannot be had, or are beyond the limit."""
        account = f"{nbytes} bytes requested, {self.live} bytes live{f', limit {self.limit} bytes' if self.limit else ''}"
        return OutOfMemoryError(f"[{self.device_name}] out of memory: {account}", nbytes, self.memory_stats())

    def give_back(self, storage: Storage) -> None:
        """Counts a storage no longer."""
        self.live -= storage.nbytes
        self.by_category[storage.category] -= storage.nbytes
        event = self.held.pop(storage.serial, None)  # None: Ctrl-C came before it was there
        if self.log is not None and event is not None:
            self.log.append((FREED, *event[1:]))

    def retag(self, storage: Storage, category: int) -> None:
        """Counts a storage in another category."""
        if category == storage.category:
            return
        self.by_category[storage.category] -= storage.nbytes
        self.by_category[category] += storage.nbytes
        storage.category = category
        if storage.serial == self.peak_serial and self.live == self.peak:  # who made it gives it its category next
            self.by_category_at_peak = list(self.by_category)
        self._put(storage, RETAGGED)

    def _put(self, storage: Storage, kind: int = MADE) -> None:
        rest = storage.serial, storage.nbytes, storage.category, storage.site
        self.held[storage.serial] = (MADE, *rest)
        if self.log is not None:
            self.log.append((kind, *rest))

    def memory_stats(self) -> dict:
        return {
            "device": self.device_name,
            "live": self.live,
            "peak": self.peak,
            "reserved": self.live,
            "peak_reserved": self.peak,
            "borrowed": self.borrowed,
            "limit": self.limit,
            "allocations": self.allocations,
            "live_arrays": len(self.held),
            "by_category": list(self.by_category),
            "by_category_at_peak": list(self.by_category_at_peak),
        }

    def reset_peak(self) -> dict:
        """Counts the peak from what is live now. Returns the account before that."""
        before = self.memory_stats()
        self.peak, self.peak_serial = self.live, 0
        self.by_category_at_peak = list(self.by_category)
        return before

    def empty_cache(self) -> None:
        """Nothing is cached here: memory goes back at once."""

    def set_limit(self, nbytes: int) -> None:
        self.limit = max(int(nbytes), 0)

    def set_current_category(self, category: int) -> int:
        before, self.current.category = self.current.category, category
        return before

    def set_site_hook(self, hook: Callable[[int], int] | None, min_bytes: int) -> None:
        self.site_hook, self.site_bytes = hook, min_bytes

    def memory_holders(self) -> list[tuple]:
        return list(self.held.values())

    def start_memory_log(self) -> None:
        self.log = []

    def take_memory_log(self) -> list[tuple]:
        log, self.log = self.log or [], None
        return log


# What a module of kernels offers of its allocator, under these names.
ALLOCATOR_FUNCTIONS = (
    "memory_stats", "reset_peak", "empty_cache", "set_limit", "set_current_category", "set_site_hook", "memory_holders",
    "start_memory_log", "take_memory_log",
)  # fmt: skip


class Storage:
    """Memory with an owner: taken from an allocator when made, given back when the last array on it goes."""

    __slots__ = ("allocator", "nbytes", "category", "serial", "site", "last_write")
    allocator: HostAllocator
    nbytes: int
    category: int
    serial: int
    site: int

    def __init__(self, allocator: HostAllocator, nbytes: int):
        allocator.take(self, nbytes)
        self.last_write = 0

    def __del__(self):
        try:
            allocator = self.allocator
        except AttributeError:  # take() refused
            return
        allocator.give_back(self)


class HostArray:
    """What ``Array`` of both Python devices has: size, dtype, and the storage behind it."""

    __slots__ = ("size", "dtype", "storage")

    def __init__(self, size: int, dtype: str, storage: Storage):
        self.size = size
        self.dtype = dtype
        self.storage = storage

    @property
    def nbytes(self) -> int:
        return self.storage.nbytes

    @property
    def last_write(self) -> int:
        return self.storage.last_write

    @last_write.setter
    def last_write(self, stamp: int) -> None:
        self.storage.last_write = stamp

    @property
    def category(self) -> int:
        return self.storage.category

    @category.setter
    def category(self, category: int) -> None:
        self.storage.allocator.retag(self.storage, category)

    @property
    def serial(self) -> int:
        return self.storage.serial
