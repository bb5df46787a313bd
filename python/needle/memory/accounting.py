"""What a device holds: bytes live, at the peak and reserved, by category; and what the process's memory is made of."""

from __future__ import annotations

from dataclasses import dataclass

from ..backend_ndarray.device import BackendDevice, drop_device_caches
from ..backend_ndarray.host_memory import CATEGORIES
from ..backend_selection import all_devices, as_device
from ..locks import process_lock
from . import sites
from .units import parse_bytes, readable, table


@dataclass(frozen=True)
class MemoryStats:
    """A device's account, in bytes.

    live: held by arrays, live_arrays of them. peak: the most that was live since ``reset_peak``. reserved: taken from the system,
    live or cached. peak_reserved: the most of that since ``reset_peak``. borrowed: made elsewhere and only used here (DLPack).
    limit: of live bytes; 0: none. allocations: how many there have been. by_category, by_category_at_peak: what live and peak are
    made of.
    """

    device: str
    live: int
    peak: int
    reserved: int
    peak_reserved: int
    borrowed: int
    limit: int
    allocations: int
    live_arrays: int
    by_category: dict[str, int]
    by_category_at_peak: dict[str, int]

    def __str__(self) -> str:
        rows = [["", "live", "at the peak"], ["all", readable(self.live), readable(self.peak)]]
        for name in CATEGORIES:
            rows.append([name, readable(self.by_category[name]), readable(self.by_category_at_peak[name])])
        rest = f"reserved {readable(self.reserved)}, borrowed {readable(self.borrowed)}, {self.live_arrays:,} arrays"
        return f"{self.device}: {rest}{f', limit {readable(self.limit)}' if self.limit else ''}\n{table(rows, '  ')}"


def by_name(counts: list[int]) -> dict[str, int]:
    """An allocator's list of bytes by category as a dict."""
    return dict(zip(CATEGORIES, counts))


def stats(device: BackendDevice | None = None) -> MemoryStats:
    """The account of ``device`` (the default one) now."""
    device = as_device(device)
    sites.free_failed_frames()
    raw = device.require().memory_stats()
    earlier = _earlier_peaks.get(device, (0, []))
    if earlier[0] > raw["peak"]:
        raw["peak"], raw["by_category_at_peak"] = earlier
    raw["peak_reserved"] = max(raw["peak_reserved"], _earlier_reserved.get(device, 0))
    return MemoryStats(
        **{**raw, "by_category": by_name(raw["by_category"]), "by_category_at_peak": by_name(raw["by_category_at_peak"])}
    )


def reset_peak(device: BackendDevice | None = None) -> None:
    """Counts the peak from what is live now."""
    device = as_device(device)
    with _peaks:
        _begin_anew(device)
        for earlier in (_earlier_peaks, _earlier_reserved):
            earlier.pop(device, None)


def empty_cache(device: BackendDevice | None = None) -> None:
    """Gives memory that no array holds back to the system, and drops what needle keeps between calls (indices, tables)."""
    drop_device_caches()
    as_device(device).require().empty_cache()


def set_limit(limit: int | str | None, device: BackendDevice | None = None) -> None:
    """Refuses, with OutOfMemoryError, what would take the live bytes of ``device`` over ``limit``; None or 0 lifts it.

    limit: bytes, "2GiB", or the name of a GPU. raises: ShapeError for what is no amount of memory.
    """
    device = as_device(device)
    nbytes = 0 if limit is None or limit == 0 else parse_bytes(limit)
    device.require().set_limit(nbytes)
    sites.watch(device, nbytes)


# The allocator has one peak, which each measured region resets. Of each device: the highest peak that was reset, with its
# categories; the same of reserved bytes; and the regions that are being measured.
_earlier_peaks: dict[BackendDevice, tuple[int, list[int]]] = {}
_earlier_reserved: dict[BackendDevice, int] = {}
_regions: dict[BackendDevice, list[peak]] = {}
_peaks = process_lock()  # around changes of these, and around a peak on its way from the allocator to them


def _begin_anew(device: BackendDevice) -> dict:
    """Notes the allocator's peak in all that measure it, and resets it. Returns the account before that. With ``_peaks`` held."""
    sites.free_failed_frames()
    raw = device.require().reset_peak()
    found = raw["peak"], raw["by_category_at_peak"]
    _earlier_peaks[device] = max(_earlier_peaks.get(device, found), found)
    _earlier_reserved[device] = max(_earlier_reserved.get(device, 0), raw["peak_reserved"])
    for region in _regions.get(device, ()):
        region._highest = max(region._highest, found)
    return raw


class peak:
    """Measures the peak of a region: ``with peak() as p: ...``, then ``p.bytes``. Regions may be nested or overlap.

    device: the default one if not given. After the block: ``bytes`` live at the peak, ``above_start`` of them more than when the
    block began, ``by_category`` at the peak.
    """

    def __init__(self, device: BackendDevice | None = None):
        self.device = as_device(device)
        self.bytes = self.above_start = 0
        self.by_category: dict[str, int] = {}

    def __enter__(self) -> peak:
        with _peaks:
            raw = _begin_anew(self.device)
            self._start = raw["live"]
            self._highest: tuple[int, list[int]] = raw["live"], raw["by_category"]
            self._all = _regions.setdefault(self.device, [])
            try:
                self._all.append(self)
            except BaseException:  # Ctrl-C may come at any moment
                if self in self._all:
                    self._all.remove(self)
                raise
        return self

    def __exit__(self, *exc: object) -> None:
        with _peaks:
            try:
                _begin_anew(self.device)
            finally:
                self._all.remove(self)
        self.bytes, self.by_category = self._highest[0], by_name(self._highest[1])
        self.above_start = self.bytes - self._start


def process(device: BackendDevice | None = None) -> dict[str, int]:
    """What this process's resident memory (RSS) is made of, in bytes: the parts add up to ``rss``.

    arrays: live on the CPU devices. cached: kept by their allocators for reuse. (Both include pages that were never touched, by
    which rest comes out too small.) libraries: code and data of files. rest: heaps, with what freed small arrays have left in
    them, stacks, numpy's arrays.
    On a GPU also device_framework (live), device_cached (by needle, and by the driver's pool, which keeps what needle gives back
    until ``empty_cache``), device_context_and_others (what the driver counts beyond these, the kernels' scratch memory among it)
    and device_total.
    Linux only: elsewhere ``rss`` is 0. source: proc(5).
    """
    device = as_device(device)
    found = {"rss": 0, "arrays": 0, "cached": 0, "libraries": 0, "rest": 0}
    fields: dict[str, int] = {}
    try:
        with open("/proc/self/status") as lines:
            for line in lines:
                if line.startswith(("VmRSS", "RssAnon", "RssFile", "RssShmem")):
                    name, value = line.split(":")
                    fields[name] = int(value.split()[0]) << 10
    except OSError:
        return found
    found["rss"] = fields["VmRSS"]
    found["libraries"] = fields.get("RssFile", 0) + fields.get("RssShmem", 0)
    anonymous = found["rss"] - found["libraries"]
    used = [d for d in all_devices() if d.is_loaded]  # asking must not import a backend
    host = [d.require().memory_stats() for d in used if d.is_host]
    found["arrays"] = min(sum(s["live"] for s in host), anonymous)
    found["cached"] = min(sum(s["reserved"] - s["live"] for s in host), anonymous - found["arrays"])
    found["rest"] = anonymous - found["arrays"] - found["cached"]
    if device.is_gpu and device.mod is not None:
        raw, card = device.mod.memory_stats(), device.mod.device_properties()
        found["device_framework"] = raw["live"]
        pool = max(card["pool_bytes"], raw["reserved"])
        found["device_cached"] = pool - raw["live"]
        found["device_context_and_others"] = max(0, card["total_bytes"] - card["free_bytes"] - pool)
        found["device_total"] = card["total_bytes"]
    return found
