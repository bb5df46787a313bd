"""Graphs kept by mistake: which Tensors still hold the graph of an earlier step, who refers to them, and where they were made."""

from __future__ import annotations

import gc
import inspect
import sys
import types
import warnings
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

from ..autograd import Value
from ..backend_ndarray.ndarray import write_stamp
from ..backend_selection import NDArray
from ..graph import Node, differentiable_order
from . import sites
from .units import readable

_DEPTH = 5  # containers between a name and a Tensor
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)


class LeakWarning(UserWarning):
    """A graph of an earlier step is still alive."""


@dataclass(frozen=True)
class Leak:
    """Tensors under one name that hold graphs. name: as the program knows it. place: file and line where the latest of the Tensors
    was made, "" if lines were not recorded then. steps: of how many steps; 0 without a LeakCheck. nbytes: of arrays that live only
    for it.
    """

    name: str
    place: str
    steps: int
    nbytes: int
    tensors: int

    def __str__(self) -> str:
        what = f"the graph of {self.steps} step{'s' if self.steps != 1 else ''}" if self.steps else f"{self.tensors} graphs"
        where = f" ({self.place})" if self.place else ""
        return f"`{self.name}`{where} keeps {what} alive, {readable(self.nbytes)}: use `.detach()` or `.item()`"


class LeakCheck:
    """Looks after each step for graphs that an earlier step left behind, and warns once per name.

    ``with LeakCheck() as check:`` around the loop, ``check.step()`` at the end of each step. A step costs a weak reference per
    graph node; only when one of them outlives the step after it are the program's objects searched. ``found``: the leaks, by name,
    as last seen.
    """

    def __init__(self, warn: bool = True):
        self.warn = warn
        self.found: dict[str, Leak] = {}
        self._ends: list[int] = []
        self._search_from = 1  # nodes that outlived their step; searching is slow, so the next time is when they have doubled
        self._nodes: list[weakref.ref[Node]] = []
        self._before: list[weakref.ref[Node]] = []

    def __enter__(self) -> LeakCheck:
        _checks.append(self)
        sites.mark_nodes(True)
        sites.node_listeners.append(self._note)
        self._ends = [write_stamp()]
        return self

    def __exit__(self, *exc: object) -> None:
        _checks.remove(self)
        sites.node_listeners.remove(self._note)
        sites.mark_nodes(False)

    def _note(self, node: Node) -> None:
        self._nodes.append(weakref.ref(node))

    def step(self) -> list[Leak]:
        """The end of a step: what earlier ones left behind, the largest first."""
        kept = [r for r in self._before if r() is not None]
        begin = self._ends[-1]
        self._ends.append(write_stamp())
        self._before, self._nodes = kept + self._nodes, []
        if len(kept) < self._search_from:
            return []
        self._search_from = 2 * len(kept) + 1
        leaks = find(begin, self._ends)
        for leak in leaks:
            if self.warn and leak.name not in self.found:
                warnings.warn(str(leak), LeakWarning, stacklevel=2)
            self.found[leak.name] = leak
        return leaks


_checks: list[LeakCheck] = []


def leaks() -> list[Leak]:
    """Tensors that hold a graph, by the name that keeps them, the largest first.

    Inside a LeakCheck: graphs of steps before the one that runs. Otherwise every graph there is.
    """
    return find(_checks[-1]._ends[-1], _checks[-1]._ends) if _checks else find(None, [])


def find(before: int | None, ends: list[int]) -> list[Leak]:
    """The leaks among nodes made before tick ``before`` of the write clock (None: all). ends: the ticks at which steps ended."""
    graphs = [(x, _old_nodes(x, before)) for x in gc.get_objects() if isinstance(x, Value)]
    graphs = [pair for pair in graphs if pair[1]]
    groups: dict[str, list[tuple[Value, set[Node]]]] = {}
    for pair in graphs:
        groups.setdefault(referrer(pair[0], {id(pair)}), []).append(pair)
    found = []
    for name, pairs in groups.items():
        nodes = set().union(*(old for _, old in pairs))
        steps = {sum(n.time > end for end in ends) for n in nodes}
        latest = max((h._node for h, _ in pairs if h._node is not None), key=lambda n: n.time)
        site = sites.of_node(latest)
        nbytes = _bytes([n.array for n in nodes] + [h._data for h, _ in pairs])
        found.append(Leak(name, site.place if site else "", len(steps) if ends else 0, nbytes, len(pairs)))
    return sorted(found, key=lambda leak: -leak.nbytes)


def _old_nodes(handle: Value, before: int | None) -> set[Node]:
    node = handle._node
    if node is None or node.op is None:
        return set()
    return {n for n in differentiable_order(node) if n.op is not None and (before is None or n.time <= before)}


def _bytes(values: list[Any]) -> int:
    """Bytes of the different pieces of memory behind arrays (or tuples of arrays)."""
    seen: dict[tuple[str, int], int] = {}
    for value in values:
        for array in value if isinstance(value, tuple) else (value,):
            if isinstance(array, NDArray):
                seen[repr(array.device), array.serial] = array.buffer_bytes
    return sum(seen.values())


# --- who refers to it ---


def referrer(target: Any, ours: set[int]) -> str:
    """The name by which the program reaches ``target``: a variable, an attribute, a closure, a traceback; as far as it can be
    found.

    ours: ids of objects that only this search has made.
    """
    running = _running_locals()
    level, seen = [target], {*ours, id(running)}
    below: dict[int, Any] = {}  # by id: what a container on the way up holds
    seen.add(id(below))
    for _ in range(_DEPTH):
        named = next((running[id(item)] for item in level if id(item) in running), "")
        if named:
            return named
        seen.add(id(level))
        above: list[Any] = []
        for r in gc.get_referrers(*level):
            if id(r) in seen:
                continue
            seen.add(id(r))
            item = next((item for item in level if any(x is item for x in gc.get_referents(r))), level[0])
            name = _name_in(r, item, below.get(id(item)))
            if name:
                return name
            if isinstance(r, (*_CONTAINERS, types.CellType)):
                below[id(r)] = item
                above.append(r)
        level = above
    return f"a {type(target).__name__} that no name leads to"


def _running_locals() -> dict[int, str]:
    """Names of the locals of all functions that are running, by the value's id; the collector does not see those. Needle's own are
    left out.
    """
    found: dict[int, str] = {}
    for top in sys._current_frames().values():
        frame: types.FrameType | None = top
        while frame is not None:
            if not sites.is_core(frame.f_code.co_filename) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
                found.update((id(value), name) for name, value in sites.locals_of(frame).items())
            frame = frame.f_back
    del top  # this function's own frame is among them: a cycle that would keep every frame below it
    return found


def _name_in(r: Any, item: Any, inner: Any) -> str:
    """What ``r`` calls ``item`` (which holds ``inner``), if r has names for things: globals, an object, a returned frame, a
    closure.
    """
    if isinstance(r, types.FrameType):
        key = _key(sites.locals_of(r), item)
        return f"{key} in {r.f_code.co_name}, kept by a traceback" if key and not sites.is_core(r.f_code.co_filename) else ""
    if isinstance(r, types.FunctionType):
        names = [n for n, cell in zip(r.__code__.co_freevars, r.__closure__ or ()) if r.__closure__ is item and cell is inner]
        return f"{names[0]} in the closure of {r.__name__}" if names else ""
    if type(r) is dict:
        module = sys.modules.get(str(r.get("__name__")))
        if module is not None and vars(module) is r:
            return _key(r, item)
        owner = next(
            (o for o in gc.get_referrers(r) if not isinstance(o, types.FrameType) and getattr(o, "__dict__", None) is r), None
        )
        return f"{type(owner).__name__}.{_key(r, item)}" if owner is not None else ""
    if isinstance(r, (*_CONTAINERS, Value, Node, NDArray, weakref.ref, types.CellType)):
        return ""
    attributes = dict(getattr(r, "__dict__", {}))
    for kind in type(r).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        attributes.update((n, getattr(r, n, None)) for n in ((slots,) if isinstance(slots, str) else slots))
    key = _key(attributes, item)
    return f"{r.__name__ if isinstance(r, type) else type(r).__name__}.{key}" if key else ""


def _key(names: dict, item: Any) -> str:
    return next((str(k) for k, v in names.items() if v is item), "")
