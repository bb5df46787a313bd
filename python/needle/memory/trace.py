"""What happened to a device's memory, event by event: who was live when, and who made it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from threading import get_ident

from ..backend_ndarray.device import BackendDevice
from ..backend_ndarray.host_memory import CATEGORIES, FREED, MADE, RETAGGED
from ..backend_selection import as_device
from ..errors import GraphError
from ..nn.nn_basic import Module, Parameter, _all_parts, _child_modules, _named
from ..objects import objects_of
from . import sites
from .sites import NOWHERE, Reference, Site
from .units import readable, table


@dataclass(frozen=True)
class Holder:
    """One piece of memory. made: index of the event that made it, -1 if it was there before. module: dotted path, "" if unknown."""

    serial: int
    nbytes: int
    category: str
    site: Site
    module: str = ""
    made: int = -1

    def __str__(self) -> str:
        known = self.site is not NOWHERE
        module = f"{self.module or '-'}: " if known or self.module else ""
        where = f"{module}{self.site if known else 'its line was not recorded'}"
        return f"{readable(self.nbytes)}  {self.category}  {where}"


class ModuleNames:
    """Names for memory on a device: dotted paths of the live modules, parameters and buffers, from the outermost modules on.

    If there are several outermost modules, a path begins with the type of its own; the second and later ones of a type are
    numbered in the order in which they were made.
    """

    def __init__(self, device: BackendDevice):
        found = [(m, _own_parameters(m)) for m in objects_of(Module)]  # not by parameters(), which a program may define anew
        first = {id(m): min(p._number for p in ps) for m, ps in found if any(p.device == device for p in ps)}
        modules = [m for m, _ in found if id(m) in first]
        children = {id(child) for m in modules for child in _child_modules(m.__dict__)}
        roots = [m for m in modules if id(m) not in children]
        self.modules: dict[Reference, str] = {}
        self.parameters: dict[Reference, str] = {}
        self.serials: dict[int, str] = {}
        made: Counter[str] = Counter()
        for root in sorted(roots, key=lambda m: first[id(m)]):
            name = type(root).__name__
            made[name] += 1
            if made[name] > 1:
                name += str(made[name])
            prefix = name + "." if len(roots) > 1 else ""
            for path, part in _all_parts(root):
                if isinstance(part, Module):
                    self.modules.setdefault(Reference(part), (prefix + path).rstrip(".") or name)
                else:
                    self.parameters.setdefault(Reference(part), prefix + path)
                    self.serials.setdefault(part.realize_cached_data().serial, prefix + path)

    def of(self, serial: int, site: Site) -> str:
        """The module that memory belongs to; for a parameter of the outermost module the parameter's own name; "" if unknown."""
        name = self.serials.get(serial) or (self.parameters.get(site.parameter, "") if site.parameter else "")
        if not name and site.forward is not None:
            return self.of(0, site.forward)
        called = (self.modules[m] for m in site.modules if m in self.modules)  # a module made for one call is gone by now
        return name.rpartition(".")[0] or name or next(called, "")


def _own_parameters(module: Module) -> list[Parameter]:
    return [t for _, t in _named(module) if isinstance(t, Parameter)]


def _holder(event: tuple, names: ModuleNames, made: int = -1) -> Holder:
    _, serial, nbytes, category, number = event
    site = sites.site(number)
    return Holder(serial, nbytes, CATEGORIES[category], site, names.of(serial, site), made)


def holders(device: BackendDevice) -> list[Holder]:
    """Who holds memory of ``device`` now, the largest first."""
    names = ModuleNames(device)
    return sorted((_holder(event, names) for event in device.require().memory_holders()), key=lambda h: -h.nbytes)


def grouped(found: Iterable[Holder]) -> list[tuple[Holder, int]]:
    """Holders of one category, site and module taken together: (with the sum of their bytes, how many), the largest first."""
    groups: dict[tuple, list[Holder]] = {}
    for h in found:
        groups.setdefault((h.category, h.site, h.module), []).append(h)
    sums = [(replace(some[0], nbytes=sum(h.nbytes for h in some)), len(some)) for some in groups.values()]
    return sorted(sums, key=lambda pair: -pair[0].nbytes)


class trace:
    """Records every allocation of ``device`` in a region, with the line, op and module that asked for it.

    ``with trace() as t: ...``, then ``t.peak_bytes``, ``t.holders()`` (who was live at the peak), ``t.by_module()``,
    ``t.timeline()``; before the region has ended these raise GraphError. One at a time per device. While it is on an allocation
    takes longer; results and lifetimes are unchanged.
    """

    def __init__(self, device: BackendDevice | None = None):
        self.device = as_device(device)
        self.marks: list[tuple[int, str]] = []  # (allocations before it, text)
        self._seen: tuple[list[Holder], list[tuple[int, Holder]]] | None = None
        self._given: dict[int, Reference] = {}  # Parameters by the serials of arrays that they were given in the region

    def __enter__(self) -> trace:
        if self.device in _active:
            raise GraphError(f"[memory.trace] {self.device} is being traced already (accepted: one trace at a time)")
        mod = self.device.require()
        self.marks, self._seen, self._given = [], None, {}
        self.__dict__.pop("live", None)  # of a region before this one
        self.__dict__.pop("peak_index", None)
        self._thread = get_ident()
        try:
            _active[self.device] = self
            sites.trace_all(self.device, True)
            self._first = mod.memory_holders()
            mod.start_memory_log()
        except BaseException:  # Ctrl-C may come at any moment
            self._end()
            raise
        return self

    def mark(self, text: str) -> None:
        """Names this moment. Events belong to ``text`` from the first allocation after it on."""
        self.marks.append((self.device.require().memory_stats()["allocations"], text))

    def __exit__(self, *exc: object) -> None:
        if not hasattr(self, "_first"):
            raise GraphError(f"[memory.trace] this region on {self.device} has not begun (accepted: one that has)")
        try:
            log = self._end()
        finally:
            self._end()  # if Ctrl-C came before it had
        names = ModuleNames(self.device)
        for serial, parameter in self._given.items():
            names.serials.setdefault(serial, names.parameters.get(parameter, ""))
        first, events = [_holder(event, names) for event in self._first], []
        made: dict[int, int] = {}
        for i, event in enumerate(log):
            if event[0] == MADE:
                made[event[1]] = i
            events.append((event[0], _holder(event, names, made.get(event[1], -1))))
        self._seen = first, events
        del self._first

    def _end(self) -> list[tuple]:
        """Nothing is recorded any more. Returns the events; none where the region has ended."""
        if _active.get(self.device) is not self:
            return []
        try:
            return self.device.require().take_memory_log()
        finally:
            _active.pop(self.device, None)
            self._given = sites.trace_all(self.device, False)

    # --- what was seen ---

    def _all_seen(self) -> tuple[list[Holder], list[tuple[int, Holder]]]:
        if self._seen is None:
            raise GraphError(f"[memory.trace] the region on {self.device} has not ended (accepted: figures of one that has)")
        return self._seen

    @property
    def first(self) -> list[Holder]:
        """Who was live as the trace began."""
        return self._all_seen()[0]

    @property
    def events(self) -> list[tuple[int, Holder]]:
        """(MADE, RETAGGED or FREED, whose memory) of each event."""
        return self._all_seen()[1]

    @cached_property
    def live(self) -> list[int]:
        """Bytes live before the first event, and after each event."""
        now = sum(h.nbytes for h in self.first)
        found = [now]
        for kind, holder in self.events:
            now += holder.nbytes * kind
            found.append(now)
        return found

    @property
    def start_bytes(self) -> int:
        """Bytes live as the trace began."""
        return self.live[0]

    @cached_property
    def peak_index(self) -> int:
        """Number of events after which the most was live, and the memory that made it so had its category."""
        peak = max(range(len(self.live)), key=self.live.__getitem__)
        if peak:
            made = self.events[peak - 1][1].serial
            for i, (kind, holder) in enumerate(self.events[peak:], peak + 1):
                if kind == RETAGGED and holder.serial == made and self.live[i] == self.live[peak]:
                    peak = i
        return peak

    @property
    def peak_bytes(self) -> int:
        """Bytes live at the peak."""
        return self.live[self.peak_index]

    def holders(self, index: int | None = None) -> list[Holder]:
        """Who was live after ``index`` events (at the peak), the largest first."""
        held = {h.serial: h for h in self.first}
        for kind, holder in self.events[: self.peak_index if index is None else index]:
            if kind == FREED:
                held.pop(holder.serial, None)
            else:
                held[holder.serial] = holder
        return sorted(held.values(), key=lambda h: -h.nbytes)

    def by_category(self, index: int | None = None) -> dict[str, int]:
        """Bytes live after ``index`` events (at the peak) by category."""
        return by_category(self.holders(index))

    def by_module(self, depth: int = 2, index: int | None = None) -> dict[str, dict[str, int]]:
        """Bytes live after ``index`` events (at the peak) by module, its path cut to ``depth`` names, and category."""
        return by_module(self.holders(index), depth)

    @property
    def peak_site(self) -> Site:
        """Who asked for the memory that made the peak."""
        return self.events[self.peak_index - 1][1].site if self.peak_index else NOWHERE

    @property
    def peak_module(self) -> str:
        """The module that the memory which made the peak belongs to."""
        return self.events[self.peak_index - 1][1].module if self.peak_index else ""

    def mark_at(self, index: int) -> str:
        """The mark that the event before ``index`` belongs to."""
        serial = max((h.serial for kind, h in self.events[:index] if kind == MADE), default=0)
        return next((text for start, text in reversed(self.marks) if serial > start), "")

    def mark_positions(self) -> list[tuple[int, str]]:
        """(number of events before it, text) of each mark."""
        found = []
        for start, text in self.marks:
            found.append(
                (next((i for i, (kind, h) in enumerate(self.events) if kind == MADE and h.serial > start), len(self.events)), text)
            )
        return found

    def timeline(self) -> list[dict]:
        """One row per event: kind (made, freed, retagged), bytes, category, live (all bytes), op, module, place, phase, and made:
        the row that made the memory, -1 if it was there before.
        """
        words = {MADE: "made", FREED: "freed", RETAGGED: "retagged"}
        return [
            {
                "kind": words[kind], "bytes": h.nbytes, "category": h.category, "live": self.live[i + 1], "op": h.site.what,
                "module": h.module, "place": (h.site.forward or h.site).place, "phase": h.site.phase, "made": h.made,
            }
            for i, (kind, h) in enumerate(self.events)
        ]  # fmt: skip

    def table(self, depth: int = 2) -> str:
        """Bytes at the peak by module and category, as text."""
        return module_table(self.by_module(depth))


def by_category(found: Iterable[Holder]) -> dict[str, int]:
    """Bytes by category."""
    sums = dict.fromkeys(CATEGORIES, 0)
    for h in found:
        sums[h.category] += h.nbytes
    return sums


def by_module(found: Iterable[Holder], depth: int = 2) -> dict[str, dict[str, int]]:
    """Bytes by module, its path cut to ``depth`` names, and category."""
    rows: dict[str, dict[str, int]] = {}
    for h in found:
        row = rows.setdefault(".".join(h.module.split(".")[:depth]), dict.fromkeys(CATEGORIES, 0))
        row[h.category] += h.nbytes
    return rows


def module_table(by_module: dict[str, dict[str, int]]) -> str:
    """Rows of modules, columns of categories, with the sums."""
    used = [c for c in CATEGORIES if any(row[c] for row in by_module.values())]
    rows = [["module", *used, "all"]]
    for name, row in sorted(by_module.items(), key=lambda item: _natural(item[0])):
        rows.append([name or "(elsewhere)", *[readable(row[c]) if row[c] else "-" for c in used], readable(sum(row.values()))])
    sums = [sum(row[c] for row in by_module.values()) for c in used]
    rows.append(["all", *[readable(n) for n in sums], readable(sum(sums))])
    return table(rows)


def _natural(name: str) -> list:
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in name.split(".")] if name else [(2, 0, "")]


_active: dict[BackendDevice, trace] = {}


def _end_those_of_others() -> None:
    """In a forked child: the threads that would end them are not there."""
    for other in [t for t in _active.values() if t._thread != get_ident()]:
        other._end()


os.register_at_fork(after_in_child=_end_those_of_others)
