"""The allocator of the devices written in Python: counts of bytes, with the figures that the C++ allocator has."""

from __future__ import annotations

from ..errors import OutOfMemoryError

CATEGORIES = ("other", "parameter", "gradient", "optimizer state", "activation", "workspace", "data")


class HostAllocator:
    """Counts what Storage objects take and give back. All figures are in bytes."""

    def __init__(self, device_name: str):
        self.device_name = device_name
        self.live = self.peak = self.borrowed = self.limit = 0
        self.allocations = self.live_arrays = 0
        self.current_category = 0
        self.by_category = [0] * 8
        self.by_category_at_peak = [0] * 8

    def take(self, nbytes: int, category: int) -> None:
        if self.limit and self.live + nbytes > self.limit:
            raise OutOfMemoryError(
                f"[{self.device_name}] out of memory: {nbytes} bytes asked, {self.live} live (limit {self.limit})",
                nbytes,
                self.memory_stats(),
            )
        self.allocations += 1
        self.live_arrays += 1
        self.live += nbytes
        self.by_category[category] += nbytes
        if self.live > self.peak:
            self.peak = self.live
            self.by_category_at_peak = list(self.by_category)

    def give_back(self, nbytes: int, category: int) -> None:
        self.live_arrays -= 1
        self.live -= nbytes
        self.by_category[category] -= nbytes

    def memory_stats(self) -> dict:
        return {
            "live": self.live,
            "peak": self.peak,
            "reserved": self.live,
            "peak_reserved": self.peak,
            "borrowed": self.borrowed,
            "limit": self.limit,
            "allocations": self.allocations,
            "live_arrays": self.live_arrays,
            "by_category": list(self.by_category),
            "by_category_at_peak": list(self.by_category_at_peak),
        }

    def reset_peak(self) -> None:
        self.peak = self.live
        self.by_category_at_peak = list(self.by_category)

    def empty_cache(self) -> None:
        """Nothing is cached here: memory goes back at once."""

    def set_limit(self, nbytes: int) -> None:
        self.limit = int(nbytes)

    def set_current_category(self, category: int) -> None:
        self.current_category = category


class Storage:
    """Memory with an owner: taken from an allocator when made, given back when the last array on it goes."""

    __slots__ = ("allocator", "nbytes", "category", "last_write")

    def __init__(self, allocator: HostAllocator, nbytes: int):
        self.nbytes = 0  # so that __del__ is right when take() refuses
        self.category = allocator.current_category
        allocator.take(nbytes, self.category)
        self.allocator = allocator
        self.nbytes = nbytes
        self.last_write = 0

    def __del__(self):
        if hasattr(self, "allocator"):
            self.allocator.give_back(self.nbytes, self.category)


class HostArray:
    """What both Python devices' ``Array`` share: size, dtype, and the storage behind it."""

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
        storage = self.storage
        storage.allocator.by_category[storage.category] -= storage.nbytes
        storage.allocator.by_category[category] += storage.nbytes
        storage.category = category
