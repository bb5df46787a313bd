"""Python's frames: whose code they run, their locals, and letting go what those of a failed call still hold."""

from __future__ import annotations

import gc
import inspect
import os
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from types import AsyncGeneratorType, CoroutineType, FrameType, FunctionType, GeneratorType
from typing import Any

from ..objects import objects_of

_NEEDLE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_MODELS = os.path.join(_NEEDLE, "models") + os.sep  # written as a user would write them, and shown as the user's
SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
PAUSED = {GeneratorType: "gi_frame", CoroutineType: "cr_frame", AsyncGeneratorType: "ag_frame"}

_is_core: dict[str, bool] = {}


def frame_of(paused: Any) -> FrameType | None:
    """The frame of a generator or the like; None at its end."""
    return getattr(paused, PAUSED[type(paused)])


def is_needles(filename: str) -> bool:
    """Whether a file is needle's own. A path that was found by ``sys.path.append("../python")`` has the dots in it; a name such as
    ``<stdin>`` is of no file, which matters to who works in needle's folder.
    """
    return not filename.startswith("<") and _absolute(filename).startswith(_NEEDLE)


def _absolute(filename: str) -> str:
    try:
        return os.path.abspath(filename)
    except FileNotFoundError:  # the working directory is gone
        return filename


def is_core(filename: str) -> bool:
    """Whether a file is needle's own, the models left out."""
    known = _is_core.get(filename)
    if known is None:
        known = _is_core[filename] = is_needles(filename) and not _absolute(filename).startswith(_MODELS)
    return known


def running() -> Iterator[FrameType]:
    """The frames of the program's functions that run, needle's own left out; the garbage collector does not see their locals."""
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None:
            if not is_core(frame.f_code.co_filename) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
                yield frame
            frame = frame.f_back
    del top  # this function's own frame is among them: a cycle that would keep every frame below it


def locals_of(frame: FrameType) -> dict[str, Any]:
    """The frame's locals by name.

    Before Python 3.13 a function's frame keeps the copy that ``f_locals`` makes, and with it arrays that the function has let go
    since: that copy is emptied at once. Not where it is somebody else's as well: a program that called ``locals()``, or a debugger,
    after which the interpreter writes the copy back into the function's variables.
    """
    names = frame.f_locals
    found = dict(names)
    if type(names) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED and frame.f_trace is None:
        if sys.getrefcount(names) == 3:  # the frame's, the one in this function and getrefcount's own
            names.clear()
    return found


def forget_old_copies() -> None:
    """Renews the copies of locals that could not be emptied, and those that a profiler had made: they may hold arrays that running
    and waiting functions have let go since.
    """
    if sys.version_info < (3, 13):
        for frame in chain(running(), map(frame_of, objects_of(*PAUSED))):
            if frame is not None and not is_core(frame.f_code.co_filename):
                locals_of(frame)


def read(frame: FrameType, *names: str) -> list[Any]:
    """The values of some locals, None for those that are not there."""
    return [*map(locals_of(frame).get, names)]


def clear_returned(frames: list[FrameType]) -> None:
    """Clears the locals of those frames of a traceback that have returned, and what their functions hold."""
    over = {frame for frame in frames if _cleared(frame)}
    for frame in frames:
        locals_of(frame)  # empties the copy that a notebook or a debugger has had made to show them, which outlives the frame's own
    while _empty_functions(over):  # the function of one may have been held by that of another
        pass


def _cleared(frame: FrameType) -> bool:
    """Clears the locals of a frame that has returned. False for one that still runs, or is to go on."""
    if frame.f_code.co_flags & SUSPENDED and locals_of(frame) and _waits(frame):  # one without locals has been cleared
        return False
    try:
        frame.clear()
    except RuntimeError:
        return False
    return True


def _waits(frame: FrameType) -> bool:
    """Whether a generator or a coroutine waits in this frame: it may have caught the error, and clearing the frame would end it."""
    return any(frame_of(o) is frame for o in objects_of(*PAUSED))


def _empty_functions(frames: Iterable[FrameType]) -> int:
    """Clears what the functions of these frames, which have returned, hold: from Python 3.11 on a frame keeps its function. Only
    functions that nothing else refers to, but closures of such functions: they will not be called again. Returns how many things
    there were to clear.
    """

    def found() -> Iterator[FunctionType]:
        return (f for frame in frames for f in gc.get_referents(frame) if type(f) is FunctionType and f.__code__ is frame.f_code)

    functions, count = _with_those_in_closures(found()), -1
    while len(functions) != count:
        count = len(functions)
        cells = _unshared(cell for f in functions for cell in f.__closure__ or ())
        inside = (x for cell in cells for x in gc.get_referents(cell))
        unshared = {id(x) for x in _unshared(chain(found(), inside, functions))}
        functions = [f for f in functions if id(f) in unshared]
        del cells, inside
    cleared = 0
    for f in functions:
        cleared += bool(f.__defaults__ or f.__kwdefaults__ or f.__dict__)
        f.__defaults__ = f.__kwdefaults__ = None
        f.__dict__.clear()  # what it wraps
    for cell in _unshared(cell for f in functions for cell in f.__closure__ or ()):
        cleared += len(gc.get_referents(cell))
        del cell.cell_contents
    return cleared


def _with_those_in_closures(functions: Iterable[FunctionType]) -> list[FunctionType]:
    found = list(dict.fromkeys(functions))
    for f in found:  # which grows
        inside = (x for cell in f.__closure__ or () for x in gc.get_referents(cell))
        found.extend(x for x in {id(x): x for x in inside if type(x) is FunctionType}.values() if x not in found)
    return found


def _unshared(found: Iterable[Any]) -> list[Any]:
    """Those that nothing refers to but the places where they were found: one for each time that an object is in ``found``."""
    entries: dict[int, list] = {}  # id: the object, and in how many places it was found
    for item in found:
        entries.setdefault(id(item), [item, 0])[1] += 1
    item = None
    nobodys = [object(), 0]
    alone = sys.getrefcount(nobodys[0])
    return [entry[0] for entry in entries.values() if sys.getrefcount(entry[0]) == alone + entry[1]]
