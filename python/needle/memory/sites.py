"""Where memory is asked for: the line of the user's code, the op, the module. A site is made by looking at the Python stack.

Allocators ask for a site when an allocation is large (``LARGE_BYTES``), and for every allocation while a trace is on. Equal sites
have one number, which is all that a piece of memory carries. So there are as many sites as places and modules, not as many as
allocations; those of modules that are gone are forgotten.
"""

from __future__ import annotations

import itertools
import linecache
import os
import sys
import traceback
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, NamedTuple

from .. import autograd, backward, graph
from ..autograd import NDArray, Tensor, Value
from ..backend_ndarray import device as device_module
from ..backend_ndarray.device import BackendDevice, meta
from ..backend_selection import all_devices
from ..errors import OutOfMemoryError
from ..graph import Node
from ..nn.nn_basic import Module, Parameter
from ..optim import SGD, Optimizer, _Moments
from .frames import clear_returned, is_core, read

LARGE_BYTES = 8 << 20  # pieces of this size are few and slow to make: reading the stack costs little beside that


class Reference:
    """A weak reference that can be a key for its object even if that is not hashable, like a Module that is a dataclass.

    It has a ``weakref.ref`` and is none itself: up to Python 3.12, where the last reference to one of a subclass goes deep in a row
    of objects that are being freed, and its object after it, the interpreter follows a null pointer.
    """

    __slots__ = ("_found", "_id")

    def __init__(self, found: Any):
        self._found = weakref.ref(found)
        self._id = id(found)

    def __call__(self) -> Any:
        return self._found()

    def __hash__(self) -> int:
        return self._id

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Reference) and self._id == other._id and self() is other() is not None)


class Site(NamedTuple):
    """A place where memory is asked for.

    file, line, function: the innermost frame outside needle's core. op: the op that computes, if one does; phase: ``forward``,
    ``backward``, ``recompute``, ``optimizer`` or "". modules: the Modules that are being called, the innermost first. parameter:
    one that is involved. Both are weak references, since a later object may have the same id. forward: for a gradient, where its
    op was called.
    """

    file: str
    line: int
    function: str
    op: str = ""
    phase: str = ""
    modules: tuple[Reference, ...] = ()
    parameter: Reference | None = None
    forward: Site | None = None

    def has_gone(self) -> bool:
        """Whether one of its modules, or its parameter, does not exist any more."""
        gone = self.parameter is not None and self.parameter() is None
        return gone or any(m() is None for m in self.modules) or (self.forward is not None and self.forward.has_gone())

    @property
    def place(self) -> str:
        """``pythia.py:134``; ``In[3]:2`` in a notebook."""
        return f"{_cell(self.file) or os.path.basename(self.file)}:{self.line}" if self.file else "?"

    @property
    def code(self) -> str:
        """The source line."""
        return linecache.getline(self.file, self.line).strip()

    @property
    def what(self) -> str:
        """``MatMul``, ``gradient of MatMul``, ``AdamW``, or the function's name."""
        if self.phase == "backward" and self.op:
            return f"gradient of {self.op}"
        if self.phase == "recompute":
            return f"{self.op} again"
        return self.op or self.function

    def __str__(self) -> str:
        shown = self.forward or self
        return f"{self.what}, {shown.place}"


def _cell(file: str) -> str:
    """The name of a notebook's cell, ``In[3]``, for that of the file that IPython pretends it to be; "" for other files."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    name_of = getattr(getattr(shell, "compile", None), "format_code_name", None)  # from IPython 8 on
    kind_and_name = name_of and name_of(file)
    return kind_and_name[1] if kind_and_name else ""


NOWHERE = Site("", 0, "")
_sites: dict[int, Site] = {}
_numbers: dict[Site, int] = {}
_next_number = itertools.count(1).__next__
_most = 1024  # as many sites are kept before those of modules that are gone are looked for


def site(number: int) -> Site:
    """The site with that number; ``NOWHERE`` for 0."""
    return _sites.get(number, NOWHERE)


# --- reading the stack ---


_Tell = Callable[[FrameType, dict[str, Any]], None]  # adds what a frame knows to what its inner frames knew


def _from_make(frame: FrameType, found: dict[str, Any]) -> None:
    if "op" not in found:
        op, inputs = read(frame, "op", "inputs")
        found["op"], found["phase"], found["parameter"] = op.name, "forward", _parameter_of(inputs)


def _from_node(phase: str) -> _Tell:
    def tell(frame: FrameType, found: dict[str, Any]) -> None:
        (node,) = read(frame, "node")
        found["op"], found["phase"], found["forward"] = node.op.name, phase, of_node(node)
        found["parameter"] = _parameter_of(n.live_handle() for n in node.inputs)

    return tell


def _parameter_of(inputs: Iterable[Any]) -> Reference | None:
    return _reference(next((x for x in inputs if isinstance(x, Parameter)), None))


def _reference(parameter: Tensor | None) -> Reference | None:
    return None if parameter is None else Reference(parameter)


def _from_backward(frame: FrameType, found: dict[str, Any]) -> None:
    if "phase" not in found:
        found["phase"], found["parameter"] = "backward", _reference(read(frame, "handle")[0])


def _from_optimizer(frame: FrameType, found: dict[str, Any]) -> None:
    if "phase" not in found:
        owner, p = read(frame, "self", "p")
        found["op"], found["phase"], found["parameter"] = type(owner).__name__, "optimizer", _reference(p)


def _from_module(frame: FrameType, found: dict[str, Any]) -> None:
    found.setdefault("modules", []).extend(map(Reference, read(frame, "self")))


# What to read in the frames of some of needle's functions. By id(code): to hash a code object is to hash all that is in it.
_TELLING: dict[int, _Tell] = {
    id(function.__code__): tell
    for function, tell in (
        (autograd.Value.make_from_op, _from_make),
        (backward.push_gradients, _from_node("backward")),
        (graph.recompute, _from_node("recompute")),
        (backward.set_gradients, _from_backward),
        (backward.gradients, _from_backward),
        (Module.__call__, _from_module),
        *((f, _from_optimizer) for f in (SGD.step, _Moments._update, Optimizer.make_states, Optimizer.clip_grad_norm)),
    )
}


def calling(frame: FrameType | None) -> Site:
    """The site of what runs in ``frame``."""
    found: dict[str, Any] = {}
    user: FrameType | None = None
    while frame is not None:
        code = frame.f_code
        tell = _TELLING.get(id(code))
        if tell is not None:
            tell(frame, found)
        elif user is None and not is_core(code.co_filename):
            user = frame
        frame = frame.f_back
    file, line, function = (user.f_code.co_filename, user.f_lineno, user.f_code.co_name) if user else ("", 0, "")
    where = (file, line, function, found.get("op", ""), found.get("phase", ""))
    return Site(*where, tuple(found.get("modules", ())), found.get("parameter"), found.get("forward"))


def number(found: Site) -> int:
    """The number of a site; equal sites have the same."""
    known = _numbers.get(found)
    if known is None:
        if len(_sites) >= _most:
            _forget_what_has_gone()
        known = _numbers[found] = _next_number()
        _sites[known] = found
    return known


def _forget_what_has_gone() -> None:
    """A module that is made for each call has a site for each. Sites that live memory, or a trace, still names stay."""
    global _most
    if not _tracing:
        named = {event[-1] for device in used_devices() for event in device.require().memory_holders()}
        for known, found in [*_sites.items()]:
            if known not in named and found.has_gone():
                _sites.pop(known, None)  # another thread may be at it too
                _numbers.pop(found, None)
    _most = max(1024, 2 * len(_sites))


def _hook(nbytes: int) -> int:
    free_failed_frames()
    return number(calling(sys._getframe(1)))


node_listeners: list[Callable[[Node], None]] = []


def _mark_node(node: Node) -> None:
    """Sets the node's site: all that the stack tells while a trace is on, else the user's line alone."""
    frame: FrameType | None = sys._getframe(1)
    if _tracing:
        node.site = calling(frame)
    else:
        while frame is not None and is_core(frame.f_code.co_filename):
            frame = frame.f_back
        node.site = (frame.f_code, frame.f_lineno) if frame is not None else None
    for listener in node_listeners:
        listener(node)


def of_node(node: Node) -> Site | None:
    """Where the node was made, if that was recorded."""
    if node.site is None or isinstance(node.site, Site):
        return node.site
    code, line = node.site
    return Site(code.co_filename, line, code.co_name)


# --- switching it on ---

_limits: dict[BackendDevice, int] = {}
_tracing: set[BackendDevice] = set()
_marking: set[Any] = set()  # who wants to know where graph nodes are made
_given: dict[BackendDevice, dict[int, Reference]] = {}  # of traced devices: Parameters by the serials of arrays assigned to them


def watch(device: BackendDevice, limit: int = 0) -> None:
    """Has the device record the sites of large allocations: from LARGE_BYTES on, or from a 1024th of ``limit``."""
    _limits[device] = limit
    apply(device)


def apply(device: BackendDevice) -> None:
    """Sets the device's hook to what traces, limits and failures now need."""
    limit = _limits.get(device, 0)
    smallest = min(LARGE_BYTES, limit // 1024) if limit else LARGE_BYTES
    device.set_site_hook(_hook, 0 if device in _tracing or _returning else smallest)


def trace_all(device: BackendDevice, wanted: bool) -> dict[int, Reference]:
    """Records the site of each allocation of ``device``, and of each graph node, while ``wanted``. Returns the Parameters that were
    given other arrays meanwhile, by the serials of these.
    """
    given = _given.pop(device, {})
    if wanted:
        _given[device] = {}
    (_tracing.add if wanted else _tracing.discard)(device)
    autograd._data_given = _note_given if _given else None
    mark_nodes(device, wanted)
    apply(device)
    return given


def _note_given(value: Value, array: NDArray) -> None:
    given = _given.get(array.device)
    if given is not None and isinstance(value, Parameter):
        given[array.serial] = Reference(value)


def mark_nodes(whom: Any, wanted: bool) -> None:
    """Records where graph nodes are made, while ``wanted`` by anyone."""
    (_marking.add if wanted else _marking.discard)(whom)
    autograd._node_made = _mark_node if _marking else None


# --- after a failure ---

# Not a WeakSet, which can't be looked through while another thread adds to it.
_failed: set[weakref.ref[OutOfMemoryError]] = set()
_returning = False  # whether some frames of those tracebacks may still be running


def remember_failure(error: OutOfMemoryError) -> None:
    """The frames of ``error``'s traceback hold arrays; they are let go when needle is next asked for memory."""
    global _returning
    _failed.add(weakref.ref(error, _failed.discard))
    _returning = True
    _apply_all()


def free_failed_frames() -> None:
    """Clears the locals of those frames of OutOfMemoryErrors' tracebacks that have returned.

    A notebook keeps the traceback of the last error, and its frames every array that the failed step had made. The frame that
    caught it returns later, and the functions of the others are let go when the program has others for them.
    """
    global _returning
    if not (_returning or len(_failed)):  # asked for each large allocation
        return
    failed = [error for reference in _failed.copy() if (error := reference()) is not None]
    handled, shown = sys.exc_info()[1], getattr(sys, "last_value", None)
    wrappers = [error for error in (handled, shown) if error is not None and _leads_to(failed, error)]
    clear_returned([frame for error in (*failed, *wrappers) for frame, _ in traceback.walk_tb(error.__traceback__)])
    if _returning and handled not in wrappers:  # else it is on its way up: more frames may return before it is over
        _returning = False
        _apply_all()


def _leads_to(failed: list[OutOfMemoryError], error: BaseException) -> bool:
    """Whether ``error`` is one of these, or was raised from one. By identity: an exception need not be hashable."""
    row = [error]
    for found in row:  # which grows
        row.extend(e for e in (found.__cause__, found.__context__) if e is not None and not any(e is seen for seen in row))
    return any(found is one for found in row for one in failed)


def used_devices() -> list[BackendDevice]:
    """The devices that have been used, also those that needle does not know by name."""
    return [d for d in dict.fromkeys([*all_devices(), meta(), *_limits]) if d.is_loaded]


def _apply_all() -> None:
    for device in used_devices():
        apply(device)


device_module.when_loaded = watch
_apply_all()  # devices that were used before this module was imported
