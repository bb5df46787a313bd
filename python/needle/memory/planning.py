"""Planning: the step is run on the ``meta`` device, which has shapes and an allocator and no data, so that it makes and frees
exactly the allocations of a real run."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import numpy as np

from ..amp import GradScaler
from ..autograd import runs_in_its_call
from ..backend_ndarray.device import BackendDevice, drop_device_caches, meta
from ..backend_selection import as_device
from ..errors import GraphError, ShapeError, check_count, type_name
from ..locks import process_lock
from ..nn.nn_basic import Module
from ..objects import searching
from . import sites
from .accounting import peak
from .frames import is_needles
from .trace import Holder, by_category, by_module, module_table, trace
from .units import parse_bytes, readable, table

Build = Callable[[BackendDevice], Callable[[], Any]]


def _put_right() -> None:
    """In a forked child, whose parent has another thread that plans."""
    global _runs_on_meta
    _runs_on_meta = False
    if _collecting:
        gc.enable()
    if meta().is_loaded:
        meta().require().count_with_everyones()
        meta().require().on_read(None)


planning = process_lock(_put_right)  # the meta device has one allocator: threads plan in turns
_runs_on_meta = False  # whether a plan does
_collecting = False  # whether garbage is collected again after the plan that runs


@dataclass(frozen=True)
class Plan:
    """What a run of some steps takes from its device's allocator. Bytes are exact; what lies outside of the allocator (a GPU's
    context, libraries, the interpreter) is not in them, nor is what a GPU packs a strided array into while ``numpy()`` reads it.

    peak_bytes: the most that is live.
    peak_step, peak_op, peak_module, peak_place: when that is: the step (from 1; 0 while building), the op, the module, the line.
    by_category, by_module: bytes live at the peak. holders: who holds them, the largest first.
    step_bytes: bytes live between steps. trace: all events.
    reads: the places in the program where values were read. A plan has none and gave NaN or 0; what the program decides by them
    may go another way in a real run.
    """

    device: str
    peak_bytes: int
    peak_step: int
    peak_op: str
    peak_module: str
    peak_place: str
    by_category: dict[str, int]
    by_module: dict[str, dict[str, int]]
    holders: list[Holder]
    step_bytes: int
    trace: trace
    reads: list[str]

    @property
    def where(self) -> str:
        """The peak and its moment, in a line."""
        when = f"step {self.peak_step}" if self.peak_step else "building the model"
        what = f"{self.peak_op}{f' of {self.peak_module}' if self.peak_module else ''}, {self.peak_place}"
        peak = f"peak {readable(self.peak_bytes)} ({self.peak_bytes:,} bytes), {when}: {what}"
        return f"{peak}; between steps {readable(self.step_bytes)}"

    def table(self, depth: int = 2) -> str:
        """Bytes at the peak by module, its path cut to ``depth`` names, and category."""
        return module_table(by_module(self.holders, depth))

    def __repr__(self) -> str:  # what a notebook shows
        said = f"{self.table()}\n{self.where}"
        if self.reads:
            places = ", ".join(self.reads)
            said += f"\nvalues were read at {places}, where a plan has NaN or 0: a run that decides by them may take more or less"
        return said


def plan(build: Build, steps: int = 2, device: BackendDevice | None = None) -> Plan:
    """What ``build(device)`` and ``steps`` calls of the function it returns take, found by running them on ``meta``.

    ``build`` makes a model, an optimizer and data on the device it is given and returns the function that makes one training step.
    The second step is the first with all the optimizer's state. device: another one runs it for real, to be compared.
    Meanwhile Python's collector is off, and afterwards numpy's global stream is where it was: numbers that other threads drew from
    it (``nn.Dropout`` does) come again.
    raises: TypeError if ``build`` is or returns no function, or returns a generator or coroutine, which no call runs; ShapeError if
    nothing was made on ``meta``, or for ``steps`` that cannot be; GraphError inside of another plan.
    """
    device = meta() if device is None else as_device(device)
    reads: dict[str, None] = {}
    t = trace(device)
    with planning, searching, _alone(device), _reads_noted(reads):
        try:
            with t:
                step = _built(build, steps, device)
                for i in range(steps):
                    t.mark(f"step {i + 1}")
                    step()
                t.mark("after")
                live = device.require().memory_stats()["live"]
        finally:
            t._end()  # Ctrl-C as the ``with`` ends would skip it
    # t names modules when it ends, which is why the step is still alive here.
    del step
    base = t.start_bytes
    _check_used(t.peak_bytes - base, device)
    holders = [h for h in t.holders() if h.made >= 0]
    site = t.peak_site
    return Plan(
        device=device.name,
        peak_bytes=t.peak_bytes - base,
        peak_step=int(t.mark_at(t.peak_index).removeprefix("step ") or 0),
        peak_op=site.what,
        peak_module=t.peak_module,
        peak_place=(site.forward or site).place,
        by_category=by_category(holders),
        by_module=by_module(holders),
        holders=holders,
        step_bytes=live - base,
        trace=t,
        reads=list(reads),
    )


# Where the search for a reading line ends: outside of plan() there is no planned program, and a scaler decides by what it reads as
# in a run without trouble.
_ENDS = {plan.__code__, GradScaler.step.__code__, GradScaler.update.__code__}


def peak_bytes(build: Build, steps: int = 2, device: BackendDevice | None = None) -> int:
    """``plan(...).peak_bytes`` by the allocator's own counters: faster, since there is no trace; ``Plan.reads`` is not found."""
    device = meta() if device is None else as_device(device)
    with planning, searching, _alone(device), peak(device) as found:
        step = _built(build, steps, device)
        for _ in range(steps):
            step()
    _check_used(found.above_start, device)
    return found.above_start


def _built(build: Build, steps: int, device: BackendDevice) -> Callable[[], Any]:
    check_count("plan", "steps", steps, 0)
    if not callable(build) or isinstance(build, Module):
        accepted = "a function of a device, which gives that of one training step"
        raise TypeError(f"[plan] build is of type {type_name(build)} (accepted: {accepted})")
    step = build(device)
    if not callable(step) or not runs_in_its_call(step):
        kind = "generator or coroutine" if callable(step) else type_name(step)
        raise TypeError(f"[plan] build returned a {kind} (accepted: the function that makes one training step)")
    return step


def _check_used(peak: int, device: BackendDevice) -> None:
    """A build that overlooks its argument runs elsewhere, for real, and would seem to need nothing."""
    if not peak and device == meta():
        raise ShapeError(f"[plan] nothing was made on {device} (accepted: a build that makes all on the device it is given)")


@contextmanager
def _reads_noted(places: dict[str, None]):
    """Collects in ``places`` the lines of the program that read values on ``meta``."""

    def note() -> None:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code not in _ENDS:
            if not is_needles(frame.f_code.co_filename):
                places[sites.Site(frame.f_code.co_filename, frame.f_lineno, "").place] = None
                return
            frame = frame.f_back

    mod = meta().require()
    mod.on_read(note)
    try:
        yield
    finally:
        mod.on_read(None)


@contextmanager
def _alone(device: BackendDevice):
    """Nothing kept from before on the device, no collection of garbage in the middle, and numpy's random stream as it was. On meta
    also an account without limit and sites: reading the stack is a quarter of the time, and a trace turns that on itself.
    """
    global _collecting, _runs_on_meta
    gc.collect()
    drop_device_caches()
    stream, collecting = np.random.get_state(), gc.isenabled()
    mod, on_meta = device.require(), device == meta()
    if on_meta and _runs_on_meta:
        raise GraphError("[plan] asked for by what is itself being planned (accepted: one plan after the other)")
    try:
        if collecting:
            _collecting = True
            gc.disable()
        if on_meta:
            _runs_on_meta = True
            mod.count_apart()
        yield
    except Exception as error:
        if on_meta and hasattr(error, "add_note"):  # from Python 3.11 on
            error.add_note(f"[plan] this ran on {device}, which has to have every array, and where .item() and .numpy() give NaN")
        raise
    finally:
        # What a later plan needs comes first, and calls nothing: Ctrl-C may come at any moment.
        if on_meta:
            _runs_on_meta = False
        if collecting:
            gc.enable()
            _collecting = False
        if on_meta:
            mod.count_with_everyones()
        np.random.set_state(stream)
        sites.apply(device)
        drop_device_caches()


# A micro-batch more may take less: linear_cross_entropy makes its chunks of rows equal, which are fewer or smaller then.
DIP = 4


def largest(peak_of: Callable[[int], int], memory: int | str, most: int = 1 << 16) -> int:
    """The largest n from 1 to ``most`` with peak_of(n) <= memory; 0 if there is none. peak_of must be non-decreasing, but for dips
    shorter than ``DIP``.

    Peaks grow along straight lines with a few bends: the next guess is where the line through the two nearest known ones meets
    the memory, and the middle after three guesses that did not halve what is left.
    """
    limit = parse_bytes(memory)
    known: dict[int, int] = {}
    below, good, bad = 0, 0, most + 1
    guess, slow = 1, 0
    while bad - good > 1:
        known[guess], left = peak_of(guess), bad - good
        if known[guess] <= limit:
            below, good = good, guess
        else:
            bad = guess
        if good == 0:
            break
        low, high = (good, bad) if bad in known else (below, good)
        slope = max(1, (known[high] - known[low]) // (high - low)) if low else limit
        guess = good + (limit - known[good]) // slope
        if bad not in known:
            guess = max(guess, 2 * good)
        else:
            slow = slow + 1 if bad - good > left // 2 else 0
            guess = guess if slow < 3 else (good + bad) // 2
        guess = max(good + 1, min(bad - 1, guess))
    more = range(min(good + DIP, most), bad, -1) if good else ()
    return next((n for n in more if (known[n] if n in known else peak_of(n)) <= limit), good)


def smallest(peak_of: Callable[[int], int], memory: int | str, most: int) -> int:
    """The smallest n from 0 to ``most`` with peak_of(n) <= memory; peak_of must be non-increasing.

    With n the number of modules that ``needle.remat`` is applied to, this is how few have to be computed again.
    raises: ShapeError if there is none, with the least there is.
    """
    limit = parse_bytes(memory)
    least = peak_of(most)
    if least > limit:
        raise ShapeError(f"[plan] {readable(limit)} is not enough (accepted: at least {readable(least)}, {least:,} bytes)")
    bad, good = -1, most
    while good - bad > 1:
        guess = (bad + good) // 2
        if peak_of(guess) <= limit:
            good = guess
        else:
            bad = guess
    return good


def fitting_table(
    peak_of: Callable[..., int],
    memory: int | str,
    settings: Iterable[tuple[str, dict[str, Any]]],
    reserve: int = 0,
    most: int = 1 << 14,
) -> str:
    """What fits into ``memory``: one row per setting, with the largest micro-batch and its peak.

    peak_of(batch, **changes): the peak for a micro-batch of ``batch`` sequences, as ``peak_bytes`` gives it. It is called with the
    same arguments more than once, so wrap it in ``functools.cache``. settings: (text of the row, changes). reserve: bytes kept free
    for what the allocator does not count. most: the largest micro-batch that is tried.
    raises: ShapeError if the reserve is all there is.
    """
    budget = parse_bytes(memory) - reserve
    if budget <= 0:
        raise ShapeError(f"[plan] {readable(parse_bytes(memory))} is not more than the reserve of {readable(reserve)}")
    rows = [["setting", "largest micro-batch", "its peak", "peak of 1"]]
    for text, changes in settings:
        peak = partial(peak_of, **changes)
        best = largest(peak, budget, most)
        shown = f"{best}" if best < most else f"{best} or more"
        rows.append([text, shown if best else "none", readable(peak(best)) if best else "-", readable(peak(1))])
    return table(rows)
