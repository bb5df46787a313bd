"""The harness side of a benchmark: contestants as processes that take turns, so that a noisy machine is noisy for all.

Between its turns a contestant is stopped (SIGSTOP): a thread pool that spins while it waits cannot slow the others.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
WAITS = {
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "default": {},
    "active": {"OMP_WAIT_POLICY": "active"},
}


@dataclass(frozen=True)
class Row:
    """One line of a table: a case, its arguments, and how to measure it.

    ``tokens`` or ``ops`` is what one step processes (for rates). Each turn does ``settle`` samples unrecorded and ``steps``
    recorded ones; a sample is the mean of ``repeat`` steps, for which a device is waited once.
    """

    case: str
    args: dict
    tokens: int | None = None
    ops: int | None = None
    steps: int = 1
    settle: int = 0
    warmup: int = 2
    repeat: int = 1


@dataclass(frozen=True)
class Contestant:
    """``name`` is what the report calls it; ``python`` runs ``script``; ``waits`` is a key of WAITS; ``row``: what it runs, if that
    is not what the others run."""

    name: str
    python: str
    script: Path
    waits: str = "default"
    row: Row | None = None


class WorkerError(RuntimeError):
    """A contestant ended or answered nonsense; its own stderr says why."""


class Worker:
    """A running contestant, stopped unless it is its turn. ``limit_s``: an answer that takes longer ends it."""

    def __init__(self, contestant: Contestant, threads: int, limit_s: float | None = None):
        self.contestant, self.limit_s = contestant, limit_s
        counts = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NEEDLE_NUM_THREADS")}
        environment = {**os.environ, **counts, **WAITS[contestant.waits]}
        self._process = subprocess.Popen(
            [contestant.python, str(contestant.script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def begin(self, row: Row) -> None:
        """Builds the row's case and warms it up."""
        self.row = row
        self._process.send_signal(signal.SIGCONT)
        self.setup = self._ask(f"setup {row.case} {json.dumps(row.args)}")
        self.seconds: list[float] = []
        self.first_value: float | None = None
        self.last_value: float | None = None
        if row.warmup:
            self.first_value = self._ask("step 1 1")["value"]
            self._ask(f"step {row.warmup - 1} 1")
        self._process.send_signal(signal.SIGSTOP)

    def turn(self) -> None:
        row = self.row
        self._process.send_signal(signal.SIGCONT)
        if row.settle:
            self._ask(f"step {row.settle} {row.repeat}")
        answer = self._ask(f"step {row.steps} {row.repeat}")
        self.seconds += answer["seconds"]
        self.last_value = answer["value"]
        self._process.send_signal(signal.SIGSTOP)

    def memory(self) -> dict[str, int]:
        self._process.send_signal(signal.SIGCONT)
        try:
            return self._ask("memory")
        finally:
            self._process.send_signal(signal.SIGSTOP)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()

    def _ask(self, line: str) -> dict:
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; the empty answer below says so
        late = threading.Timer(self.limit_s, self._process.kill) if self.limit_s else None
        if late:
            late.start()
        answer = self._process.stdout.readline()
        if late:
            late.cancel()
        if not answer:
            raise WorkerError(f"[{self.contestant.name}] ended with code {self._process.wait()} on: {line}")
        return json.loads(answer)


@contextlib.contextmanager
def busy_cores(count: int) -> Iterator[None]:
    """``count`` processes that do nothing but keep a core busy."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measure(
    row: Row,
    contestants: list[Contestant],
    *,
    threads: int,
    rounds: int,
    busy: int = 0,
    limit_s: float | None = None,
    kept: dict[str, Worker] | None = None,
) -> list[dict]:
    """Run ``rounds`` of turns, A B A B ..., and give one record per contestant. The first is what ratios refer to.

    A contestant that fails is out, and its record has an ``error`` and no figures. kept: workers by name that go on from row to
    row, because starting a process on a GPU takes seconds. Those that did not fail stay in it, stopped; the caller closes them.
    """
    workers: dict[str, Worker] = {}
    errors: dict[str, str] = {}

    def each(do: Callable[[Worker], None]) -> None:
        for name, worker in list(workers.items()):
            try:
                do(worker)
            except WorkerError as error:
                errors[name] = str(error)
                workers.pop(name).close()

    try:
        for contestant in contestants:
            worker = kept.pop(contestant.name, None) if kept else None
            workers[contestant.name] = worker or Worker(contestant, threads, limit_s)
        rows = {contestant.name: contestant.row or row for contestant in contestants}
        each(lambda worker: worker.begin(rows[worker.contestant.name]))
        with busy_cores(busy):
            for _ in range(rounds):
                each(Worker.turn)
        found = {}
        each(lambda worker: found.update({worker.contestant.name: _record(worker, threads, busy)}))
        if kept is not None:
            kept.update(workers)
            workers = {}
    finally:
        for worker in workers.values():
            worker.close()
    first = found.get(contestants[0].name)
    for record in found.values() if first else ():
        record["time_over_first"] = record["median_s"] / first["median_s"]
    failed = {
        name: {"case": rows[name].case, "args": rows[name].args, "contestant": name, "error": errors[name]} for name in errors
    }
    return [found.get(name) or failed[name] for name in rows]


def _record(worker: Worker, threads: int, busy: int) -> dict:
    row = worker.row
    median = statistics.median(worker.seconds)
    ordered = sorted(worker.seconds)
    record = {
        "case": row.case,
        "args": row.args,
        "contestant": worker.contestant.name,
        "waits": worker.contestant.waits,
        "threads": threads,
        "busy_cores": busy,
        "median_s": median,
        "p10_s": ordered[len(ordered) // 10],
        "p90_s": ordered[-1 - len(ordered) // 10],
        "samples": len(ordered),
        "repeat": row.repeat,
        "first_value": worker.first_value,
        "last_value": worker.last_value,
        **worker.memory(),
        **worker.setup,
    }
    if row.tokens:
        record["tokens_per_s"] = row.tokens / median
    if row.ops:
        record["us_per_op"] = median / row.ops * 1e6
    return record


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _git(*command: str) -> str:
    return subprocess.run(["git", "-C", str(HERE), *command], capture_output=True, text=True, check=True).stdout.strip()


def machine() -> dict:
    """What the figures depend on: date, commit, CPU, number of usable cores."""
    cpu = platform.processor()
    with contextlib.suppress(FileNotFoundError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        # The figures of the group before change nothing that is measured.
        if _git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(exclude)results"):
            commit += "-dirty"
    except (FileNotFoundError, subprocess.CalledProcessError):
        commit = os.environ.get("NEEDLE_COMMIT", "unknown")
    now = datetime.datetime.now(datetime.timezone.utc)
    return {
        "date": now.isoformat(timespec="seconds"),
        "commit": commit,
        "cpu": cpu,
        "cores": cores(),
        "load_1min": os.getloadavg()[0],
        "system": f"{platform.system()} {platform.release()}",
    }


@functools.cache
def gpu() -> dict:
    """The first GPU, its driver and clocks, by nvidia-smi; {} where that is not to be had."""
    names = ["name", "driver_version", "memory.total", "clocks.max.sm", "power.limit"]
    asked = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader"]
    try:
        said = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    except (FileNotFoundError, subprocess.CalledProcessError):
        return {}
    return {"gpu": dict(zip(names, said.splitlines()[0].split(", ")))} if said else {}


def append_results(path: Path, records: list[dict]) -> None:
    """One JSON line per record."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        for record in records:
            file.write(json.dumps(record) + "\n")
