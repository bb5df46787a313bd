"""By which name the program reaches an object: a variable, an attribute, a closure or a traceback."""

from __future__ import annotations

import gc
import sys
import types
import weakref
from collections import deque
from collections.abc import Iterable
from itertools import chain
from typing import Any

import numpy as np

from ..autograd import Value
from ..backend_selection import NDArray
from ..graph import Node
from .frames import PAUSED, SUSPENDED, is_core, locals_of, running

_DEPTH = 11  # objects between a name and a Tensor, dicts of attributes among them
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_NO_WAY = (type, types.ModuleType, types.FrameType, Node)  # too much leads to these, or nothing


def names_of(targets: list[Any]) -> list[str]:
    """The nearest name by which the program reaches each target: a variable, an attribute, a closure or a traceback.

    Each pass over the program's objects finds who refers to what the pass before found, starting from all targets at once: there
    may be thousands of them.
    """
    variables = [item for frame in running() for item in locals_of(frame).items()]
    hidden = _unknown_to_the_collector(variables)
    called = {id(value): name for name, value in variables}
    del variables
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
        # Without the empty dicts, which locals_of must not find in another's hands.
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


def _unknown_to_the_collector(variables: list[tuple[str, Any]]) -> list[Any]:
    """numpy's arrays of objects, and dicts and tuples that the garbage collector does not track because they hold nothing else."""
    found: dict[int, Any] = {}
    for value in chain((value for _, value in variables), chain.from_iterable(map(gc.get_referents, gc.get_objects()))):
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


def _name_in(r: Any, item: Any) -> str:
    """What ``r`` calls ``item``, if r is something with names: globals, an object, a generator, a frame that has returned."""
    if issubclass(type(r), types.FrameType):
        key = _key(locals_of(r), item)
        if not key or is_core(r.f_code.co_filename):
            return ""
        paused = None  # from Python 3.11 on such an object has no frame that could be seen here
        if r.f_code.co_flags & SUSPENDED:
            paused = next((o for o in gc.get_referrers(r) if type(o) in PAUSED), None)
        return f"{key} in {_paused_title(paused) if paused is not None else f'{r.f_code.co_name}, kept by a traceback'}"
    if type(r) in PAUSED:
        frame = getattr(r, PAUSED[type(r)])
        key = _key(locals_of(frame), item) if frame is not None else ""
        return f"{key} in {_paused_title(r)}" if key else ""
    if type(r) is dict:
        return _key(r, item) if _is_namespace(r) else ""
    if issubclass(type(r), (*_CONTAINERS, Value, Node, NDArray, np.ndarray, weakref.ref, types.CellType)):
        return ""
    attributes = dict(_attribute(r, "__dict__") or {})
    for kind in type(r).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        attributes.update((n, _attribute(r, n)) for n in ((slots,) if isinstance(slots, str) else slots))
    key = _key(attributes, item)
    return f"{_title(r)}.{key}" if key else ""


def _is_namespace(names: dict) -> bool:
    """Whether the dict is a module's, or another one that code runs in: what a profiler or doctest gives a program for globals."""
    name = names.get("__name__")
    return "__builtins__" in names or (type(name) is str and _attribute(sys.modules.get(name), "__dict__") is names)


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
