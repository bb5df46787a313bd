"""What a run shows: a live line on a terminal, plain lines elsewhere, metrics.jsonl, a picture of the loss."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from needle.data.text_files import write_atomically
from needle.errors import DataError

METRICS = "metrics.jsonl"


def mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:,.0f} MiB"


def duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes}:{seconds:02d}"


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """raises: DataError, in one line, where ``path`` cannot be written."""
    try:
        yield
    except OSError as error:
        raise DataError(f"[checkpoint_dir] cannot write {path}: {error.strerror or error} (room in a writable folder)") from error


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Holds the run's folder, so that two processes cannot mix their files. raises: DataError if another one holds it."""
    try:
        import fcntl
    except ModuleNotFoundError:  # Windows
        yield
        return
    place = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(place)
        raise DataError(f"[checkpoint_dir] another process is training in {folder} (another folder)") from None
    except OSError:  # a file system without locks
        pass
    try:
        yield
    finally:
        os.close(place)


def read_metrics(path: Path) -> list[dict]:
    """The rows of a metrics.jsonl; a line that a killed run left unfinished is passed over."""
    rows = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return rows


class Reporter:
    """Writes metrics.jsonl and says how the run goes, warnings included. Used as a context, so that the terminal is left as it
    was.

    first: the step that the run goes on from. Rows of later steps belong to a run that ended without saving them.
    """

    def __init__(self, folder: Path, steps: int, first: int = 0, every: int = 10):
        self.path, self.steps, self.first, self.every = folder / METRICS, steps, first, every
        self._live = None
        self._warnings = warnings.catch_warnings()

    def __enter__(self) -> Reporter:
        kept = [row for row in read_metrics(self.path) if 0 < row["step"] <= self.first]
        with write_atomically(self.path) as file:
            file.write("".join(json.dumps(row) + "\n" for row in kept).encode())
        if sys.stdout.isatty():
            try:
                from rich.live import Live

                self._live = Live(refresh_per_second=4)
                self._live.__enter__()
            except ModuleNotFoundError:
                self._live = None
        self._warnings.__enter__()
        warnings.showwarning = lambda message, *_: self.say(str(message))
        return self

    def __exit__(self, *exc) -> None:
        self._warnings.__exit__(*exc)
        if self._live is not None:
            self._live.__exit__(*exc)
            self._live = None

    def say(self, text: str) -> None:
        if self._live is not None:
            self._live.console.print(text, highlight=False)
        else:
            print(text, flush=True)

    def step(self, row: dict, seconds_left: float) -> None:
        """One optimizer step: row has step, loss, tokens_per_second, live_bytes, peak_bytes."""
        self.record(row)
        line = (
            f"step {row['step']:>5}/{self.steps}  loss {row['loss']:.3f}  {row['tokens_per_second']:,.0f} tokens/s  "
            f"memory {mib(row['live_bytes'])}, peak {mib(row['peak_bytes'])}  left {duration(seconds_left)}"
        )
        if self._live is not None:
            self._live.update(line)
        elif row["step"] % self.every == 0 or row["step"] in (1, self.steps):
            print(line, flush=True)

    def record(self, row: dict) -> None:
        """One line in metrics.jsonl, with the time."""
        with writing(self.path), open(self.path, "a") as file:
            file.write(json.dumps({**row, "time": time.time()}) + "\n")


def loss_picture(path: Path, unigram: float) -> bool:
    """Draws the losses of the run's metrics.jsonl beside ``path``. False without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ModuleNotFoundError:
        return False
    rows = read_metrics(path.parent / METRICS)
    train = [(r["step"], r["loss"]) for r in rows if "loss" in r]
    held = [(r["step"], r["held_out_loss"]) for r in rows if "held_out_loss" in r]
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    if train:
        axes.plot(*zip(*train, strict=True), linewidth=1, alpha=0.7, label="training batch")
    if held:
        axes.plot(*zip(*held, strict=True), marker="o", label="held-out text")
    axes.axhline(unigram, linestyle="--", color="grey", label="token frequencies alone")
    axes.set(xlabel="optimizer step", ylabel="cross entropy (nats per token)", title="Pythia on needle")
    axes.legend()
    with writing(path):
        figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


def table(rows: list[dict], columns: list[str]) -> str:
    """Right-aligned columns under their names."""
    cells = [columns] + [[str(row[c]) for c in columns] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join("  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in cells)
