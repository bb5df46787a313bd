"""Graphs kept by mistake: which Tensors still hold the graph of an earlier step, who refers to them, and where they were made."""

from __future__ import annotations

import gc
import inspect
import sys
import types
import warnings
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np

from ..amp import kept_casts
from ..autograd import Value
from ..backend_ndarray.ndarray import write_stamp
from ..backend_selection import NDArray
from ..errors import GraphError
from ..graph import Node, differentiable_order
from . import sites
from .units import readable

_DEPTH = 11  # objects between a name and a Tensor, dicts of attributes among them
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_NO_WAY = (type, types.ModuleType, types.FrameType, Node)  # too much leads to these, or nothing


class LeakWarning(UserWarning):
    """A graph of an earlier step is still alive."""


@dataclass(frozen=True)
class Leak:
    """Tensors under one name that hold graphs.

    name: as the program knows it. place: file and line where the latest of the Tensors was made, "" if lines were not recorded.
    steps: how many steps the graphs are from; 0 without a LeakCheck. nbytes: of arrays that no other Tensor holds. tensors: how
    many there are.
    """

    name: str
    place: str
    steps: int
    nbytes: int
    tensors: int

    def __str__(self) -> str:
        what = f"the graph of {_several(self.steps, 'step')}" if self.steps else _several(self.tensors, "graph")
        where = f" ({self.place})" if self.place else ""
        return f"`{self.name}`{where} keeps {what} alive, {readable(self.nbytes)}: use `.detach()` or `.item()`"


def _several(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


class LeakCheck:
    """Looks after each step for graphs that an earlier step left behind, and warns once per name.

    Put ``with LeakCheck() as check:`` around the loop and ``check.step()`` at the end of each step. A step costs one weak reference
    per graph node. The program's objects are searched only if a node outlives the step after its own.
    warn: whether to warn with LeakWarning. ``found``: the leaks by name, as last seen.
    """

    def __init__(self, warn: bool = True):
        self.warn = warn
        self.found: dict[str, Leak] = {}
        self._ends: list[int] = []
        self._search_from = 1  # surviving nodes that start a search; it is slow, so the next one waits until they have doubled
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
        """The end of a step: what earlier ones left behind, the largest first. raises: GraphError outside of the context."""
        if self not in _checks:
            raise GraphError("[LeakCheck] step() outside of its context (accepted: inside `with LeakCheck() as check:`)")
        kept = [r for r in self._before if r() is not None]
        begin = self._ends[-1]
        if not kept:  # then no node is older than ``begin``
            self._ends, self._search_from = [begin], 1
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
    """The leaks among nodes made up to tick ``before`` of the write clock (None: all).

    ends: the tick at which the first step began, then those at which steps ended. Nodes made before the first belong to no step.
    """
    # By type alone: isinstance would ask each object of the program for its class. An op that failed has left a handle without a
    # node, which its traceback may keep.
    values = [x for x in gc.get_objects() if issubclass(type(x), Value) and hasattr(x, "_node")]
    handles = [x for x in values if x.op is not None]
    casts = {cast._as_node() for cast in kept_casts()}  # a region around the whole loop has them by right, one per parameter
    is_old = lambda n: n.op is not None and (before is None or ends[0] < n.born <= before) and n not in casts  # noqa: E731
    leads: set[Node] = set()  # to an old node: that, and what is above it
    for node in _under(handles):
        if is_old(node) or not leads.isdisjoint(node.inputs):
            leads.add(node)
    handles = [x for x in handles if x._node in leads]
    owned = {id(x) for x in chain(handles, map(_grad_of, handles))}
    needed = _pieces([x for x in values if id(x) not in owned], [])
    del values  # it would be on the way to names
    groups: dict[str, list[Value]] = {}
    for handle, name in zip(handles, names_of(handles)):
        groups.setdefault(name, []).append(handle)
    found = []
    for name, held in groups.items():
        nodes = [n for n in _under(held) if is_old(n)]
        site = sites.of_node(max((x._as_node() for x in held), key=attrgetter("born")))
        steps = len({bisect_left(ends, n.born) for n in nodes}) if ends else 0
        pieces = _pieces(held, nodes)
        nbytes = sum(pieces[key] for key in pieces.keys() - needed)
        found.append(Leak(name, site.place if site else "", steps, nbytes, len(held)))
    return sorted(found, key=lambda leak: -leak.nbytes)


def _under(handles: list[Value]) -> list[Node]:
    return differentiable_order([x._as_node() for x in handles])


def _grad_of(handle: Value) -> Value | None:
    return getattr(handle, "_grad", None)


def _pieces(handles: list[Value], nodes: list[Node]) -> dict[tuple[str, int], int]:
    """Bytes of each piece of memory behind handles, their gradients, nodes, and what went into these with no graph: data, masks."""
    seen: dict[tuple[str, int], int] = {}
    of_handles = (x._data for x in chain(handles, map(_grad_of, handles)) if x is not None)
    of_inputs = (leaf.array for n in nodes for leaf in n.inputs if leaf.op is None)
    for value in chain(of_handles, (n.array for n in nodes), of_inputs):
        for array in value if isinstance(value, tuple) else (value,):
            if isinstance(array, NDArray):
                seen[array.device.name, array.serial] = array.buffer_bytes
    return seen


# --- who refers to it ---


def names_of(targets: list[Any]) -> list[str]:
    """The nearest name by which the program reaches each target: a variable, an attribute, a closure or a traceback.

    Each pass over the program's objects finds who refers to what the pass before found, starting from all targets at once: there
    may be thousands of them.
    """
    running = _running_locals()
    hidden = _unknown_to_the_collector(running)
    called = {id(value): name for name, value in running}
    del running
    titles: dict[int, str] = {}  # of objects, by the id of the dict of their attributes
    names: dict[int, str] = {}  # of objects on the way up, by id, as all here is
    parts: dict[int, list[int]] = {}  # of those that have no name for them
    in_frames: set[int] = set()
    on_the_way = {id(x): x for x in targets}
    ours = {id(targets), id(on_the_way), id(hidden)}
    level, seen = set(on_the_way), set(on_the_way)
    for _ in range(_DEPTH):
        names.update((key, called[key]) for key in level & called.keys())
        level -= names.keys()
        if not level:
            break
        above: set[int] = set()
        # Without the empty dicts, which sites.locals_of must not find in another's hands.
        for r in chain([r for r in gc.get_objects() if type(r) is not dict or r], hidden):
            hits = level.intersection(map(id, _held_by(r)))
            if not hits or id(r) in ours:
                continue
            for key in hits:
                item = on_the_way[key]
                if type(item) is dict and _owns(r, item):
                    titles[key] = _title(r)
                    continue
                name = _name_in(r, item)
                if issubclass(type(r), types.FrameType):
                    in_frames.add(key)
                if name:
                    if name.isidentifier() or key not in names:  # a variable says more than an attribute as near
                        names[key] = name
                elif issubclass(type(r), types.FunctionType) and item is r.__closure__:
                    cells = zip(map(id, r.__closure__ or ()), r.__code__.co_freevars)
                    names.update((cell, f"{n} in the closure of {r.__name__}") for cell, n in cells if cell in seen)
                elif not issubclass(type(r), _NO_WAY):
                    on_the_way[id(r)] = r
                    parts.setdefault(id(r), []).append(key)
                    above.add(id(r))
        level = above - seen
        seen |= above
    for key, title in titles.items():
        keys = {id(value): name for name, value in on_the_way[key].items()}
        for part in parts[key]:
            names.setdefault(part, f"{title}.{keys.get(part, '')}")
    nearest = _handed_down(names, parts)
    in_a_traceback = _handed_down(dict.fromkeys(in_frames, "a kept traceback"), parts)
    return [nearest.get(id(x)) or in_a_traceback.get(id(x)) or f"a {type(x).__name__} that no name leads to" for x in targets]


def _handed_down(names: dict[int, str], parts: dict[int, list[int]]) -> dict[int, str]:
    """``names``, and for each object without one the name of the nearest object that contains it, directly or through others."""
    known, row = dict(names), list(names)
    while row:
        below: dict[int, str] = {}
        for key in row:
            for part in parts.get(key, ()):
                if part not in known and not below.get(part, "").isidentifier():
                    below[part] = known[key] if part not in below or known[key].isidentifier() else below[part]
        known.update(below)
        row = list(below)
    return known


def _held_by(r: Any) -> Iterable:
    held = gc.get_referents(r)
    return chain(held, _elements(r)) if issubclass(type(r), np.ndarray) else held


def _elements(array: np.ndarray) -> Iterable:
    """The objects in an array, also those in its fields, which numpy does not show to the garbage collector."""
    array = np.asarray(array)  # not as a subclass has them
    if array.dtype.names:
        return chain.from_iterable(_elements(array[name]) for name in array.dtype.names)
    return array.flat if array.dtype.hasobject else ()


def _unknown_to_the_collector(running: list[tuple[str, Any]]) -> list[Any]:
    """numpy's arrays of objects, and dicts and tuples that the garbage collector does not track because they hold nothing else."""
    found: dict[int, Any] = {}
    for value in chain((value for _, value in running), chain.from_iterable(map(gc.get_referents, gc.get_objects()))):
        if type(value) in (np.ndarray, dict, tuple):  # looked at here, since most are something else
            _leads_to_array(value, found)
    return list(found.values())


def _leads_to_array(value: Any, found: dict[int, Any]) -> bool:
    """Whether ``value`` is such an array or leads to one. If so, it and all on the way are put into ``found``, by id."""
    if type(value) is np.ndarray:
        leads = value.dtype.hasobject
    else:
        known = type(value) not in (dict, tuple) or gc.is_tracked(value)
        leads = not known and any([_leads_to_array(inner, found) for inner in gc.get_referents(value)])
    if leads:
        found[id(value)] = value
    return leads


def _running_locals() -> list[tuple[str, Any]]:
    """Names and values of the locals of all running functions but needle's own; the garbage collector does not see those."""
    found: list[tuple[str, Any]] = []
    for top in sys._current_frames().values():
        frame: types.FrameType | None = top
        while frame is not None:
            if not sites.is_core(frame.f_code.co_filename) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
                found.extend(sites.locals_of(frame).items())
            frame = frame.f_back
    del top  # this function's own frame is among them: a cycle that would keep every frame below it
    return found


def _name_in(r: Any, item: Any) -> str:
    """What ``r`` calls ``item``, if r is something with names: globals, an object, a generator, a frame that has returned."""
    if issubclass(type(r), types.FrameType):
        key = _key(sites.locals_of(r), item)
        if not key or sites.is_core(r.f_code.co_filename):
            return ""
        paused = None  # from Python 3.11 on such an object has no frame that could be seen here
        if r.f_code.co_flags & sites.SUSPENDED:
            paused = next((o for o in gc.get_referrers(r) if type(o) in sites.PAUSED), None)
        return f"{key} in {_paused_title(paused) if paused is not None else f'{r.f_code.co_name}, kept by a traceback'}"
    if type(r) in sites.PAUSED:
        frame = getattr(r, sites.PAUSED[type(r)])
        key = _key(sites.locals_of(frame), item) if frame is not None else ""
        return f"{key} in {_paused_title(r)}" if key else ""
    if type(r) is dict:
        name = r.get("__name__")
        return _key(r, item) if type(name) is str and _attribute(sys.modules.get(name), "__dict__") is r else ""
    if issubclass(type(r), (*_CONTAINERS, Value, Node, NDArray, np.ndarray, weakref.ref, types.CellType)):
        return ""
    attributes = dict(_attribute(r, "__dict__") or {})
    for kind in type(r).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        attributes.update((n, _attribute(r, n)) for n in ((slots,) if isinstance(slots, str) else slots))
    key = _key(attributes, item)
    return f"{_title(r)}.{key}" if key else ""


def _owns(owner: Any, names: dict) -> bool:
    """Whether the dict is of the attributes of ``owner``."""
    if issubclass(type(owner), type):
        return any(x is names for x in gc.get_referents(owner)) and "__module__" in names
    return not issubclass(type(owner), types.FrameType) and _attribute(owner, "__dict__") is names


def _attribute(owner: Any, name: str) -> Any:
    """The attribute; None if there is none, or if the class's own lookup fails: a search must not end somebody's training."""
    try:
        return getattr(owner, name, None)
    except Exception:
        return None


def _paused_title(paused: Any) -> str:
    return f"the {type(paused).__name__} {paused.__name__}"


def _title(owner: Any) -> str:
    return str(_attribute(owner if issubclass(type(owner), (type, types.FunctionType)) else type(owner), "__name__"))


def _key(names: dict, item: Any) -> str:
    return next((str(k) for k, v in names.items() if v is item), "")
