"""By which name the program reaches an object: a variable, an attribute, a closure or a traceback."""

from __future__ import annotations

import contextlib
import gc
import sys
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import numpy as np

from ..autograd import Tensor, Value
from ..backend_selection import NDArray
from ..backward import GradientSource
from ..graph import Node
from ..objects import objects_but, objects_of
from .frames import PAUSED, SUSPENDED, frame_of, is_core, locals_of, running

_DEPTH = 11  # objects between a name and a Tensor, dicts of attributes among them
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_OF_TYPES = vars(type)
_UNTRACKED = frozenset((np.ndarray, dict, tuple))  # types of which the garbage collector does not know all objects
_NO_WAY = (type, types.ModuleType, types.FrameType, Node)  # too much leads to these, or nothing


def names_of(targets: list[Any]) -> list[str]:
    """The nearest name by which the program reaches each target: a variable, an attribute, a closure or a traceback.

    Each pass over the program's objects finds who refers to what the pass before found, starting from all targets at once: there
    may be thousands of them.
    """
    variables = [item for frame in running() for item in locals_of(frame).items()]
    objects = _that_may_lead([value for _, value in variables])
    called = {id(value): name for name, value in variables}
    del variables
    titles: dict[int, str] = {}  # of objects, by the id of the dict of their attributes
    names: dict[int, str] = {}  # of objects on the way up, by id, as all here is
    parts: dict[int, list[int]] = {}  # of those that have no name for them
    in_frames: set[int] = set()
    on_the_way = {id(x): x for x in targets}
    ours = {id(targets), id(on_the_way), id(objects)}
    level, seen = set(on_the_way), set(on_the_way)
    for _ in range(_DEPTH):
        names.update((key, called[key]) for key in level & called.keys())
        level -= names.keys()
        if not level:
            break
        above: set[int] = set()
        for r in objects:
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
        keys = {id(value): name for name, value in _items(on_the_way[key])}
        for part in parts[key]:
            names.setdefault(part, f"{title}.{keys.get(part, '')}")
    nearest = _handed_down(names, parts, on_the_way)
    in_a_traceback = _handed_down(dict.fromkeys(in_frames, "a kept traceback"), parts, on_the_way)
    return [nearest.get(id(x)) or in_a_traceback.get(id(x)) or f"a {type(x).__name__} that no name leads to" for x in targets]


def _handed_down(names: dict[int, str], parts: dict[int, list[int]], objects: dict[int, Any]) -> dict[int, str]:
    """``names``, and for each object without one the name of the nearest object that contains it, directly or through others."""

    def handed(key: int, part: int) -> str:
        is_gradient = issubclass(type(objects[key]), Tensor) and getattr(objects[key], "_grad", None) is objects[part]
        return f"{known[key]}.grad" if is_gradient else known[key]

    known, row = dict(names), list(names)
    while row:
        below: dict[int, str] = {}
        for key in row:
            for part in parts.get(key, ()):
                if part not in known and not below.get(part, "").isidentifier():
                    name = handed(key, part)
                    below[part] = name if part not in below or name.isidentifier() else below[part]
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


def _that_may_lead(values: list[Any]) -> list[Any]:
    """The objects that may be on the way to a Tensor, found from those that the garbage collector shows and from ``values``:
    also tuples, numpy's arrays of objects, and dicts that it does not track because they hold nothing else.
    """
    # Few Tensors lead to another. Other threads go on, and what is listed here cannot be freed.
    objects = objects_but(Node, NDArray, Value) + [x for x in objects_of(Value) if _leads(x)]
    # Without the empty dicts, which locals_of must not find in another's hands.
    objects = [x for x in objects if type(x) is not dict or x]
    row: list[Any] = []
    seen: set[int] = set()

    def look(values: Iterable) -> None:
        for x in values:
            if type(x) in _UNTRACKED and (type(x) is tuple or not gc.is_tracked(x)) and id(x) not in seen:
                seen.add(id(x))
                row.append(x)

    look(values)
    look(chain.from_iterable(map(gc.get_referents, objects)))
    look(chain.from_iterable(map(gc.get_referents, row)))  # which grows meanwhile: tuples of tuples may be many, and deep
    found: dict[int, Any] = {id(x): x for x in row if type(x) is tuple and gc.is_tracked(x)}
    leading = [x for x in row if type(x) is np.ndarray and x.dtype.hasobject]
    holders: dict[int, list[Any]] = {}
    for value in row if leading else ():
        for x in gc.get_referents(value):
            if type(x) in _UNTRACKED:
                holders.setdefault(id(x), []).append(value)
    for value in leading:  # which grows
        if id(value) not in found:
            found[id(value)] = value
            leading.extend(holders.get(id(value), ()))
    return objects + list(found.values())


def _leads(value: Value) -> bool:
    """Whether it may hold a Tensor: as its gradient, or in an attribute, for which only derived classes have room."""
    return type(value) is not Tensor or any(getattr(value, name, None) is not None for name in ("_grad", "_source"))


def _name_in(r: Any, item: Any) -> str:
    """What ``r`` calls ``item``, if r is something with names: globals, an object, a generator, a frame that has returned."""
    if issubclass(type(r), types.FrameType):
        key = _key(locals_of(r), item)
        if not key or is_core(r.f_code.co_filename):
            return ""
        paused = None  # from Python 3.11 on such an object has no frame that could be seen here
        if r.f_code.co_flags & SUSPENDED:
            paused = next((o for o in objects_of(*PAUSED) if frame_of(o) is r), None)
        return f"{key} in {_paused_title(paused) if paused is not None else f'{r.f_code.co_name}, kept by a traceback'}"
    if type(r) in PAUSED:
        frame = frame_of(r)
        key = _key(locals_of(frame), item) if frame is not None else ""
        return f"{key} in {_paused_title(r)}" if key else ""
    if type(r) is dict:
        return _key(r, item) if _is_namespace(r) else ""
    if issubclass(type(r), (*_CONTAINERS, Value, GradientSource, Node, NDArray, np.ndarray, weakref.ref, types.CellType)):
        return ""
    attributes = _attributes(r)
    key = "" if attributes is None else _key(attributes, item)
    key = key or next((name for name, value in _slots(r) if value is item), "")
    return f"{_title(r)}.{key}" if key else ""


def _is_namespace(names: dict) -> bool:
    """Whether the dict is a module's, or another one that code runs in: what a profiler or doctest gives a program for globals."""
    name = names.get("__name__")
    return "__builtins__" in names or (type(name) is str and _attributes(sys.modules.get(name)) is names)


def _owns(owner: Any, names: dict) -> bool:
    """Whether the dict is of the attributes of ``owner``."""
    if issubclass(type(owner), type):
        return any(x is names for x in gc.get_referents(owner)) and "__module__" in names
    return not issubclass(type(owner), types.FrameType) and _attributes(owner) is names


def _attributes(owner: Any) -> dict | None:
    """The dict of the owner's attributes, if it has one. Nothing here runs code of the owner's class: that might fail, or do
    something, and a search must not end somebody's training.
    """
    for names in _definitions(type(owner)):
        if type(names.get("__dict__")) in (types.GetSetDescriptorType, types.MemberDescriptorType):
            found = names["__dict__"].__get__(owner)
            return found if issubclass(type(found), dict) else None
    return None


def _slots(owner: Any) -> Iterator[tuple[str, Any]]:
    for names in _definitions(type(owner)):
        for name, member in names.items() if "__slots__" in names else ():
            if type(member) is types.MemberDescriptorType:
                with contextlib.suppress(AttributeError):  # it is empty
                    yield name, member.__get__(owner)


def _definitions(kind: type) -> Iterator[dict[str, Any]]:
    """What the class defines, and those that it is derived from; whatever a metaclass says."""
    for one in _OF_TYPES["__mro__"].__get__(kind):
        yield dict(_OF_TYPES["__dict__"].__get__(one))


def _paused_title(paused: Any) -> str:
    return f"the {type(paused).__name__} {paused.__name__}"


def _title(owner: Any) -> str:
    if issubclass(type(owner), types.FunctionType):
        return owner.__name__
    return _OF_TYPES["__name__"].__get__(owner if issubclass(type(owner), type) else type(owner))


def _key(names: dict, item: Any) -> str:
    return next((name for name, value in _items(names) if value is item), "")


def _items(names: dict) -> Iterator[tuple[str, Any]]:
    """As they are now: another thread may add some. Keys need not be strings."""
    return ((key if issubclass(type(key), str) else f"a {type(key).__name__}", value) for key, value in dict.copy(names).items())
