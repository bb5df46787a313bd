"""What a run shows: a live line on a terminal, plain lines elsewhere, metrics.jsonl, report.html."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from needle import files
from needle.errors import DataError
from pythia_app import page
from pythia_app.events import Events
from pythia_app.page import METRICS, About

PRINTED_EVERY_STEPS = 10
DRAWN_EVERY_SECONDS, DRAWN_SHARE = 20.0, 0.01  # at most so often, and of the time at most so much


def kind(row: dict[str, Any]) -> tuple[int, bool, bool]:
    """Tells rows apart: (step, whether it is of a training step, whether it is of an evaluation); a sample's is neither."""
    return row["step"], "loss" in row, "held_out_loss" in row


def mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:,.0f} MiB"


def duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes}:{seconds:02d}"


class Reporter:
    """Context manager that writes metrics.jsonl and report.html and prints progress and warnings. It restores the terminal.

    first: the step that the run continues from; rows of later steps, of a run that ended without saving them, are removed, and
    damaged ones, whose number is said.
    tensorboard: the rows also go to event files in ``folder / "tensorboard"``.
    unread: whether stdout has taken no more. Nothing is raised then, so that a run can save before it ends.
    """

    def __init__(self, folder: Path, about: About, first: int = 0, tensorboard: bool = False):
        self.folder, self.path, self.about, self.first = folder, folder / METRICS, about, first
        self.tensorboard = tensorboard
        self._events: Events | None = None
        self._live: Any = None
        self._history = page.History(self.path)
        self._kept: set[tuple[int, bool, bool]] = set()  # rows of ``first`` that are there already
        self._warnings = warnings.catch_warnings()
        self._draw_at = 0.0
        self.unread = False

    def __enter__(self) -> Reporter:
        files.remove_abandoned(self.folder / page.PAGE)  # which this run may not write
        damaged = 0
        with files.write_whole(self.path) as file:
            for row, _ in page.rows(self.path):
                if row is None:
                    damaged += 1
                elif 0 < row["step"] <= self.first:
                    file.write(json.dumps(row).encode() + b"\n")
                    if row["step"] == self.first:
                        self._kept.add(kind(row))
        if damaged and self.first:  # a run that begins keeps no row
            self.say(f"damaged lines of {self.path}, left out: {damaged:,}")
        if self.tensorboard:
            with files.writing(self.folder / "tensorboard", "checkpoint_dir"):
                self._events = Events(self.folder / "tensorboard", self.first)
        if sys.stdout.isatty():
            try:
                from rich.live import Live

                live = Live(refresh_per_second=4)
                if live.console.is_interactive:  # TERM=dumb is not: a live line would come only at the end
                    self._live = live.__enter__()
            except ModuleNotFoundError:
                pass
        self._warnings.__enter__()
        warnings.showwarning = lambda message, *_: self.say(str(message))
        return self

    def __exit__(self, *exc) -> None:
        try:
            self.draw(now=True)
            if self._events is not None:
                self._events.close()
        except OSError as error:
            self.say(f"no more events for TensorBoard: {files.reason(error)}")
        finally:
            self._warnings.__exit__(*exc)
            if self._live is not None:
                with self._output():
                    self._live.__exit__(*exc)
                self._live = None

    def say(self, text: str) -> None:
        with self._output():
            if self._live is not None:
                self._live.console.out(text, highlight=False)  # neither wrapped nor taken for markup
            else:
                print(text, flush=True)

    @contextlib.contextmanager
    def _output(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # `tee` has gone, by the same Ctrl-C perhaps, or the terminal; or stdout is a file on a full disk
            if not self.unread and not isinstance(error, BrokenPipeError):
                with contextlib.suppress(OSError):
                    print(f"stdout cannot be written: {files.reason(error)}", file=sys.stderr)
            self.unread = True

    def step(self, row: dict[str, Any], seconds_left: float) -> None:
        """One optimizer step: row has step, loss, tokens_per_second, live_bytes, peak_bytes."""
        if self.about.utilization:
            row = {**row, "mfu": row["tokens_per_second"] * self.about.utilization}
        self.record(row)
        line = (
            f"step {row['step']:>5}/{self.about.steps}  loss {row['loss']:.3f}  {row['tokens_per_second']:,.0f} tokens/s  "
            f"memory {mib(row['live_bytes'])}, peak {mib(row['peak_bytes'])}  left {duration(seconds_left)}"
        )
        if self._live is not None:
            self._live.update(line)  # shown by a thread of the line's own
        elif row["step"] % PRINTED_EVERY_STEPS == 0 or row["step"] in (1, self.about.steps):
            self.say(line)
        self.draw()

    def record(self, row: dict[str, Any]) -> None:
        """Adds one line to metrics.jsonl, with the time; null for what is no finite number.

        An evaluation that is made again has its line already: the run was killed during it, or had made all its steps before. So
        its events, which are not written again, come first.
        """
        if kind(row) in self._kept:
            return
        found = {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in row.items()}
        if self._events is not None:
            with files.writing(self.folder / "tensorboard", "checkpoint_dir"):
                self._events.add(found)
                if "loss" not in row:
                    self._events.flush()
        with files.writing(self.path, "checkpoint_dir"), open(self.path, "a") as file:
            file.write(json.dumps({**found, "time": time.time()}) + "\n")

    def flush(self) -> None:
        """Waits until the rows are on the disk, before a checkpoint after whose steps a killed run goes on. Where there is no room
        the next row says so.
        """
        with contextlib.suppress(OSError):
            files.flush(self.path)
            if self._events is not None:
                self._events.flush()

    def draw(self, now: bool = False) -> None:
        """Writes report.html, if it is due or ``now``. If it cannot be written that is said once, and the run goes on."""
        start = time.perf_counter()
        if start < self._draw_at and not (now and math.isfinite(self._draw_at)):
            return
        try:
            page.write(self.folder, self.about, self._history)
            end = time.perf_counter()
            self._draw_at = end + max(DRAWN_EVERY_SECONDS, (end - start) / DRAWN_SHARE)
        except DataError as error:
            self.say(f"no {page.PAGE}: {error}")
            self._draw_at = math.inf
