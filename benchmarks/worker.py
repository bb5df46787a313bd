"""The worker side of a benchmark: one process, one case, driven over stdin and stdout. Needs only the standard library.

A contestant is a script that ends with ``serve(pythia_step, ...)``: functions, called with ``args``, that build everything
(model, data) and return a ``Case``; ``Case.step`` then does the work once, ``Case.finish`` waits until it is done. ``serve`` does
the timing.

One line in, one line of JSON out:

    setup NAME {"batch_size": 8, ...}   ->  {"versions": {...}, "threads": 4}      builds the case
    step N R                            ->  {"seconds": [...], "value": 10.9}      N times: seconds of a step, of R before a wait
    memory                              ->  {"peak_rss_bytes": ..., "rss_bytes": ..., "device_peak_bytes": ...}
    quit                                                                           ends the process

An error in a case ends the process with a traceback on stderr; the harness then reports it. What libraries print goes
to stderr too, so that it cannot mix with the answers.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

PYTHIA_SIZES = {"14m": (128, 4, 512), "70m": (512, 8, 2048)}  # the peers': width, heads, feed-forward; 6 layers


@dataclass
class Case:
    """A prepared benchmark. ``step`` returns a figure to record (the loss, a checksum) or None; ``finish`` waits for the device.

    ``device_memory``: an accelerator's peaks since setup, by name; ``facts`` are recorded.
    """

    step: Callable[[], float | None]
    versions: dict[str, str] = field(default_factory=dict)
    threads: int | None = None
    device_memory: Callable[[], dict[str, int]] = dict
    facts: dict = field(default_factory=dict)
    finish: Callable[[], None] = lambda: None


def memory_bytes() -> dict[str, int]:
    """Peak and present resident set of this process.

    Linux's VmHWM, because ru_maxrss of a child starts at the size its parent had when it started the child.
    """
    try:
        with open("/proc/self/status") as file:
            fields = dict(line.split(":", 1) for line in file)
    except FileNotFoundError:
        unit = 1 if sys.platform == "darwin" else 1024
        return {"peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    kib = {key: int(fields[name].split()[0]) for key, name in (("peak_rss_bytes", "VmHWM"), ("rss_bytes", "VmRSS"))}
    return {key: value * 1024 for key, value in kib.items()}


def _forget_peak() -> None:
    """The peak of a process that goes on with another case starts again, where Linux allows it."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def timed_steps(case: Case, count: int, repeat: int) -> dict:
    seconds, value = [], None
    for _ in range(count):
        start = time.perf_counter()
        for _ in range(repeat):
            value = case.step()
        case.finish()
        seconds.append((time.perf_counter() - start) / repeat)
    return {"seconds": seconds, "value": value}


def serve(*makers: Callable[..., Case]) -> None:
    """Answer commands until ``quit`` or the end of input. A case is asked for by the name of the function that makes it."""
    cases = {make.__name__: make for make in makers}
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    case: Case | None = None
    for line in sys.stdin:
        command, _, rest = line.strip().partition(" ")
        if command == "quit":
            return
        if command == "setup":
            name, _, args = rest.partition(" ")
            if name not in cases:
                raise SystemExit(f"[worker] unknown case: {name} ({', '.join(cases)})")
            case = None  # gives its memory back first, which may be in a cycle
            gc.collect()
            _forget_peak()
            case = cases[name](**json.loads(args))
            answer = {"versions": {"python": sys.version.split()[0], **case.versions}, "threads": case.threads, **case.facts}
        elif command == "step" and case is not None:
            answer = timed_steps(case, *map(int, rest.split()))
        elif command == "memory" and case is not None:
            answer = {**memory_bytes(), **case.device_memory()}
        else:
            raise SystemExit(f"[worker] unknown command, or no case yet: {line.strip()} (setup, step, memory, quit)")
        answers.write(json.dumps(answer) + "\n")
