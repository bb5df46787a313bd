"""Graphs kept by mistake: which Tensors still hold the graph of an earlier step, who refers to them, and where they were made."""

from __future__ import annotations

import os
import warnings
import weakref
from bisect import bisect_left
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from threading import get_ident

from ..amp import kept_casts
from ..autograd import Value
from ..backend_ndarray.ndarray import write_stamp
from ..backend_selection import NDArray
from ..errors import GraphError
from ..graph import Node, differentiable_order
from ..objects import in_turn, objects_of
from . import sites
from .frames import forget_old_copies
from .names import names_of
from .units import readable


class LeakWarning(UserWarning):
    """A graph of an earlier step is still alive."""


@dataclass(frozen=True)
class Leak:
    """Tensors under one name that hold graphs.

    name: as the program knows it. place: file and line where the latest of the Tensors was made, "" if lines were not recorded.
    steps: how many steps the graphs are from; 0 without a LeakCheck. nbytes: of arrays that no other Tensor holds. tensors: how
    many there are. is_part: whether the array of one of them is a part of a larger one, which its ``detach()`` would keep.
    """

    name: str
    place: str
    steps: int
    nbytes: int
    tensors: int
    is_part: bool = False

    def __str__(self) -> str:
        what = f"the graph of {_several(self.steps, 'step')}" if self.steps else _several(self.tensors, "graph")
        where = f" ({self.place})" if self.place else ""
        cure = "use `.detach()` or `.item()`"
        if self.is_part:
            cure = "use `.item()` or `.numpy()` (`.detach()` would keep all of an array of which this is a part)"
        if self.name.endswith(".grad"):
            cure = "set it to None, as `reset_grad()` does"
        return f"`{self.name}`{where} keeps {what} alive, {readable(self.nbytes)}: {cure}"


def _several(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


class LeakCheck:
    """Looks after each step for graphs that an earlier step left behind, and warns once per name.

    Put ``with LeakCheck() as check:`` around the loop and ``check.step()`` at the end of each step. Other threads' graphs are not
    looked at, since their steps end at other times; those of all coroutines that take turns in a thread are. A step costs one weak
    reference per graph node. The program's objects are searched, which is slow, only if a node outlives the step after its own, and
    from then on each time that twice as many nodes have.
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
        self._thread = get_ident()
        self._ends = [write_stamp()]
        try:
            _checks.append(self)
            sites.mark_nodes(self, True)
            sites.node_listeners.append(self._note)
        except BaseException:  # Ctrl-C may come at any moment
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            sites.mark_nodes(self, False)
        finally:
            if self._note in sites.node_listeners:
                sites.node_listeners.remove(self._note)
            if self in _checks:
                _checks.remove(self)

    def _note(self, node: Node) -> None:
        if get_ident() == self._thread:
            self._nodes.append(weakref.ref(node))

    def step(self) -> list[Leak]:
        """The end of a step: what earlier ones left behind, the largest first; [] too where no search was due (``found`` has all
        so far, and ``leaks()`` searches at once). raises: GraphError outside of the context.
        """
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
        leaks = find(kept, self._ends)
        for leak in leaks:
            if self.warn and leak.name not in self.found:
                warnings.warn(str(leak), LeakWarning, stacklevel=2)
            self.found[leak.name] = leak
        return leaks


_checks: list[LeakCheck] = []


def _end_those_of_others() -> None:
    """In a forked child: the threads that would end them are not there."""
    for other in [c for c in _checks if c._thread != get_ident()]:
        other.__exit__()


os.register_at_fork(after_in_child=_end_those_of_others)


def leaks() -> list[Leak]:
    """Tensors that hold a graph, by the name that keeps them, the largest first.

    Inside a LeakCheck of this thread: graphs of steps before the one that runs. Otherwise every graph there is. What ``gc.freeze``
    has put aside is searched, too: the search takes that back.
    """
    check = next((c for c in reversed(_checks) if c._thread == get_ident()), None)
    return find(None, []) if check is None else find(check._before, check._ends)


def find(among: list[weakref.ref[Node]] | None, ends: list[int]) -> list[Leak]:
    """The leaks among these nodes (None: all).

    ends: the ticks of the write clock at which the first step began, and then those at which steps ended.
    """
    with in_turn():
        return _find(among, ends)


def _find(among: list[weakref.ref[Node]] | None, ends: list[int]) -> list[Leak]:
    forget_old_copies()
    nodes = None if among is None else {r() for r in among}
    # A Tensor that could not be made is a handle without a node, which a traceback may keep.
    values = [x for x in objects_of(Value) if hasattr(x, "_node")]
    handles = [x for x in values if x.op is not None]
    casts = {cast._as_node() for cast in kept_casts()}  # a region around the whole loop has them by right, one per parameter
    is_old = lambda n: n.op is not None and (nodes is None or n in nodes) and n not in casts  # noqa: E731
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
        old = [n for n in _under(held) if is_old(n)]
        site = sites.of_node(max((x._as_node() for x in held), key=attrgetter("born")))
        steps = len({bisect_left(ends, n.born) for n in old}) if ends else 0
        pieces = _pieces([*held, *map(_grad_of, held)], old)
        nbytes = sum(pieces[key] for key in pieces.keys() - needed)
        is_part = any(isinstance(x._data, NDArray) and x._data.is_part() for x in held)
        found.append(Leak(name, site.place if site else "", steps, nbytes, len(held), is_part))
    return sorted(found, key=lambda leak: -leak.nbytes)


def _under(handles: list[Value]) -> list[Node]:
    return differentiable_order([x._as_node() for x in handles])


def _grad_of(handle: Value) -> Value | None:
    return getattr(handle, "_grad", None)


def _pieces(handles: list[Value | None], nodes: list[Node]) -> dict[tuple[str, int], int]:
    """Bytes of each piece of memory behind handles, nodes, and what went into these with no graph: data, masks."""
    seen: dict[tuple[str, int], int] = {}
    of_handles = (x._data for x in handles if x is not None)
    of_inputs = (leaf.array for n in nodes for leaf in n.inputs if leaf.op is None)
    for value in chain(of_handles, (n.array for n in nodes), of_inputs):
        for array in value if isinstance(value, tuple) else (value,):
            if isinstance(array, NDArray):
                seen[array.device.name, array.serial] = array.buffer_bytes
    return seen
