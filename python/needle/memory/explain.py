"""The text of an OutOfMemoryError: who asked, who holds the memory, what the step needs, and the change that makes it fit."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar, copy_context
from threading import get_ident
from typing import Any

from ..backend_ndarray.device import BackendDevice
from ..backend_ndarray.host_memory import CATEGORIES
from ..errors import OutOfMemoryError
from . import sites
from .planning import Build, peak_bytes, planning
from .room import available, capacity, card
from .trace import ModuleNames, grouped, holders
from .units import readable

HOLDERS_SHOWN = 5
PATIENCE_S = 30.0  # with which an explanation waits for its turn to plan


class advise:
    """Context manager: an OutOfMemoryError inside also says what the step needs and which change makes it fit, found by planning.

    build_for(**change): gives the ``build`` of ``memory.plan`` for the run as it is, or with a change.
    changes: (text for the user, arguments for build_for), in the order in which they are tried. steps: that a plan runs.
    The innermost one of the thread counts; in a thread that has none, the innermost of all. Make it before the run makes its
    model: what a device holds by then counts as taken by others.
    """

    def __init__(self, build_for: Callable[..., Build], changes: Sequence[tuple[str, dict[str, Any]]] = (), steps: int = 2):
        self.build_for, self.changes, self.steps = build_for, list(changes), steps
        # A failure may come in the middle of backward, where no graph is recorded, or in a region of autocast or remat.
        self._context = copy_context()
        self._before = {d: d.require().memory_stats()["allocations"] for d in sites.used_devices()}

    def __enter__(self) -> advise:
        self._thread = get_ident()
        _advisers.append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        _advisers.remove(self)

    def taken(self, device: BackendDevice) -> int:
        """Bytes of ``device`` that were held when this was made, and still are."""
        last = self._before.get(device, 0)
        return sum(nbytes for _, serial, nbytes, *_ in device.require().memory_holders() if serial <= last)

    def text(self, budget: int, there: str = "{} is there") -> str:
        """Two lines: what the step needs, and, if that is above ``budget`` bytes, the first change that keeps it within them.

        there: how the budget is said.
        """
        return self._context.copy().run(self._text, budget, there)  # two threads may fail at once

    def _text(self, budget: int, there: str) -> str:
        needed = peak_bytes(self.build_for(), self.steps)
        said = [readable(needed), readable(budget)]
        if said[0] == said[1]:  # a limit that was read off a plan, rounded
            said = [f"{needed:,} bytes", f"{budget:,} bytes"]
        lines = [f"the step needs {said[0]} at its peak (planned); {there.format(said[1])}"]
        if needed <= budget:
            lines.append("so it would fit: something is held that the plan does not have (needle.memory.leaks() tells of graphs)")
            return "\n".join(lines)
        least: tuple[int, str] | None = None
        for what, change in self.changes:
            peak = peak_bytes(self.build_for(**change), self.steps)
            if peak <= budget:
                return "\n".join([*lines, f"what fits: {what}, peak {readable(peak)} (planned)"])
            least = min(least or (peak, what), (peak, what))
        if least is not None and least[0] < needed:
            amount = readable(least[0])
            amount = f"{least[0]:,} bytes" if amount in said else amount
            lines.append(f"none of the changes tried fits; the least is {amount}, with {least[1]} (planned)")
        elif least is not None:
            lines.append(f"none of the changes tried needs less: {', '.join(what for what, _ in self.changes)}")
        return "\n".join(lines)


_advisers: list[advise] = []


def _adviser() -> advise | None:
    own = [a for a in _advisers if a._thread == get_ident()]
    return next(reversed(own or _advisers), None)


_explaining = ContextVar("explaining", default=False)


def explain(error: OutOfMemoryError, message: str) -> str:
    """``message`` with all that is known about it, a line each."""
    device = next((d for d in sites.used_devices() if d.name == error.stats.get("device")), None)
    if device is None or _explaining.get():
        return message
    lines = [message]
    try:
        _explaining.set(True)
        lines.extend(_lines(device, error))  # which adds one by one: lines found before a failure stay
    except Exception as trouble:  # an explanation must never hide the failure that it explains
        if str(trouble) != message:  # the device that cannot be begun with is asked about itself
            lines.append(f"(no more could be said: {type(trouble).__name__}: {trouble})")
    finally:
        _explaining.set(False)
        sites.remember_failure(error)  # last: the planning above asks for memory, too
    return "\n  ".join("\n".join(lines).splitlines())


def _lines(device: BackendDevice, error: OutOfMemoryError) -> Iterator[str]:
    caller = sites.calling(sys._getframe(2))
    module = ModuleNames(device).of(0, caller)
    line = caller.forward or caller  # of a gradient: where its op was called
    yield f"asked by {caller.what}{f' of {module}' if module else ''}, {line.place}: {line.code}"
    by_category = zip(CATEGORIES, error.stats["by_category"])
    yield "live: " + (", ".join(f"{name} {readable(n)}" for name, n in by_category if n) or "nothing")
    groups = grouped(holders(device))[:HOLDERS_SHOWN]
    if groups:
        yield "largest holders:"
        yield from (f"  {h}{f', {n} pieces' if n > 1 else ''}" for h, n in groups)
    budget = capacity(device)
    if budget and error.requested_bytes > budget:
        yield f"this one request is larger than all of {device}, {readable(budget)}: no allocator setting can help"
    elif error.stats["live"] + error.requested_bytes <= budget:
        if device.is_gpu:
            total, room = card(device)
            held = f"{readable(max(0, total - room))} are other processes', the driver's, or for kernels (scratch memory)"
        else:
            free = readable(max(0, available(device) - error.stats["reserved"]))
            held = f"{free} are free, a little of which is for the rest of the process, or it may not have them (ulimit -v)"
        yield f"the system gave no more of {readable(budget)}: {held}"
        budget = error.stats["live"]  # all that is sure to be there
    elif budget and not error.stats["limit"]:
        whose = "" if device.is_gpu else ", of the machine or of this process's container or job"
        yield f"all of {device} is {readable(budget)}{whose}"
    adviser = _adviser()
    if adviser is not None:
        taken = adviser.taken(device)
        if taken:
            yield f"{readable(taken)} were taken before the run"
        if not planning.acquire(timeout=PATIENCE_S):  # not for ever: who plans may wait for what this thread holds
            yield "what the step needs is not known: another thread is planning"
            return
        try:
            text = adviser.text(max(budget - taken, 0))
        finally:
            planning.release()
        yield text
    else:
        yield "what the step needs, and what would fit: needle.memory.plan, or run it inside needle.memory.advise"


OutOfMemoryError.explain = explain
