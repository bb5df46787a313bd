"""report.html: a run as one page that needs no network, made of its metrics.jsonl."""

from __future__ import annotations

import html
import json
import math
import re
import shutil
import time
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from needle.backend_ndarray.block_layout import BlockLayout
from needle.backend_ndarray.host_memory import CATEGORIES
from needle.errors import DataError
from needle.files import write_whole
from needle.memory.picture import COLOURS
from pythia_app import CONTROLS

METRICS, PAGE = "metrics.jsonl", "report.html"
MOST_POINTS, MOST_SAMPLES, MOST_CHARACTERS, MOST_CELLS = 1000, 32, 4000, 128
FIGURES = ("loss", "lr", "grad_norm", "tokens_per_second", "mfu", "live_bytes", "peak_bytes")
MIB = 2.0**20
BLUE, ORANGE, GREY = ("#0072b2", "#56b4e9"), ("#d55e00", "#f0a04b"), ("#777777", "#999999")  # in the light, in the dark


@dataclass(frozen=True)
class About:
    """What a page says about its run beside the metrics.

    max_grad_norm: the norm to which gradients are clipped. mask: HTML. utilization: the part of the device's FLOP/s that one token
    per second needs; 0: unknown.
    """

    title: str
    steps: int
    max_grad_norm: float
    mask: str
    facts: dict[str, str]
    utilization: float = 0.0


class History:
    """The rows of a metrics.jsonl as columns.

    If a step comes again, it replaces everything from that step on: the run was killed and continued from an earlier checkpoint.
    What is absent, infinite or no number is NaN. held_out: (step, loss). samples: (step, prompt, text).
    """

    def __init__(self, path: Path):
        self.steps = array("q")
        self.figures = {name: array("d") for name in (*FIGURES, *CATEGORIES)}
        self.held_out: list[tuple[int, float]] = []
        self.samples: list[tuple[int, str, str]] = []
        self.unigram_entropy = math.nan
        self._path, self._read_bytes = path, 0

    def read(self) -> None:
        """Adds the rows that were appended to the file since the last call."""
        for row, end in rows(self._path, self._read_bytes):
            if row is not None:
                self._add(row, row["step"])
            self._read_bytes = end

    def _add(self, row: dict[str, Any], step: int) -> None:
        if "loss" in row:
            self._forget_from(step)
            by_category = row.get("peak_by_category")
            figures = {**row, **(by_category if isinstance(by_category, dict) else {})}
            self.steps.append(step)
            for name, column in self.figures.items():
                column.append(number(figures.get(name)))
        if "held_out_loss" in row:
            self.held_out = [found for found in self.held_out if found[0] < step] + [(step, number(row["held_out_loss"]))]
            self.unigram_entropy = number(row.get("unigram_entropy"))
        if "sample" in row:
            texts = (str(row.get(name, ""))[:MOST_CHARACTERS] for name in ("prompt", "sample"))
            self.samples = [found for found in self.samples if found[0] < step] + [(step, *texts)]

    def _forget_from(self, step: int) -> None:
        if self.steps and step <= self.steps[-1]:
            at = bisect_left(self.steps, step)
            for column in (self.steps, *self.figures.values()):
                del column[at:]
            self.held_out = [found for found in self.held_out if found[0] < step]
            self.samples = [found for found in self.samples if found[0] < step]


def rows(path: Path, start: int = 0) -> Iterator[tuple[dict[str, Any] | None, int]]:
    """(row, byte at which it ends) of each line of a metrics.jsonl from byte ``start`` on; None for a line that is no row. A last
    line that is unfinished is none yet.
    """
    if not path.is_file():
        return
    with open(path, "rb") as file:
        file.seek(start)
        for line in file:
            if not line.endswith(b"\n"):
                return
            start += len(line)
            if line.isspace():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            good = isinstance(row, dict) and type(row.get("step")) is int and 0 <= row["step"] < 1 << 62
            yield row if good else None, start


def number(value: Any) -> float:
    """``value`` as a float; NaN if it is no number, or infinite."""
    if type(value) not in (int, float):
        return math.nan
    try:
        return float(value) if math.isfinite(value) else math.nan
    except OverflowError:
        return math.nan


@np.errstate(all="ignore")  # a file may say anything
def write(folder: Path, about: About, history: History) -> None:
    """Writes the folder's report.html, or replaces it at once. raises: DataError without plotly or without room."""
    history.read()
    try:
        script = resources.files("plotly") / "package_data" / "plotly.min.js"
    except ModuleNotFoundError as error:
        raise DataError(f"{error} (pip install plotly)") from None
    charts = [chart for chart in _charts(history, about) if chart["lines"]]
    parts = {
        "title": _visible(about.title),
        "progress": _progress(history, about),
        "tiles": "".join(f"<div><b>{value}</b><span>{name}</span></div>" for name, value in _tiles(history)),
        "charts": "\n".join(
            f'<section><h2>{c["title"]}</h2><p class="soft">{c["says"]}</p><div class="chart" id="{c["id"]}"></div></section>'
            for c in charts
        ),
        "mask": about.mask,
        "facts": "".join(f"<dt>{_visible(name)}</dt><dd>{_visible(value)}</dd>" for name, value in about.facts.items()),
        "samples": _samples(history),
        "data": json.dumps(charts, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
    }
    head, tail = Path(__file__).with_name("page.html").read_text(encoding="utf-8").split("{{plotly}}")
    with write_whole(folder / PAGE) as file, script.open("rb") as source:
        file.write(_filled(head, parts))
        shutil.copyfileobj(source, file)
        file.write(_filled(tail, parts))


def _filled(template: str, parts: dict[str, str]) -> bytes:
    """In one pass, so that what is put in may hold any text."""
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template).encode("utf-8", "replace")


def _charts(history: History, about: About) -> list[dict[str, Any]]:
    """What page.html draws: each chart its lines, each line its points."""
    column = {name: np.array(values) for name, values in history.figures.items()}
    width = max(1, -(-len(history.steps) // MOST_POINTS))  # steps that one point stands for
    x = [int(step) for step in history.steps[width - 1 :: width]]
    if len(x) * width < len(history.steps):
        x.append(int(history.steps[-1]))

    def line(name: str, label: str, colour: tuple[str, str], format: str, unit: str = "", scale: float = 1, band=False, **more):
        mean, low, high = thinned(column[name] / scale, width)
        if np.isnan(mean).all():
            return []
        edges = {"low": _plain(low), "high": _plain(high)} if band and width > 1 else {}
        return [{"name": label, "x": x, "y": _plain(mean), **edges, "colour": colour, "format": format, "unit": unit, **more}]

    def level(value: float, label: str, format: str):
        if not x or not math.isfinite(value):
            return []
        ends = {"x": [x[0], x[-1]], "y": _plain([value] * 2)}
        return [{"name": label, **ends, "colour": GREY, "format": format, "unit": "", "kind": "level"}]

    held = [found for found in history.held_out if math.isfinite(found[1])]
    held = [held[i] for i in _spread(len(held), MOST_POINTS)]
    held_out = {
        "name": "held-out text", "x": [step for step, _ in held], "y": _plain([loss for _, loss in held]), "colour": ORANGE,
        "format": ".3f", "unit": "", "kind": "points" if len(held) <= 50 else "line",
    }  # fmt: skip
    speed = line("tokens_per_second", "tokens/s", BLUE, ",.0f", band=True)
    mfu = line("mfu", "MFU", BLUE, ".1%", right=True, hidden=True)
    top = 1.1 * float(np.nanmax(column["tokens_per_second"])) if speed else 1.0
    ratio = float(np.nanmedian(column["mfu"] / column["tokens_per_second"])) if mfu else 0.0
    memory = []
    for name, colour in COLOURS.items():
        memory += line(name, name, (colour, colour), ",.1f", " MiB", MIB, kind="area")
    memory += line("live_bytes", "after the step", GREY, ",.1f", " MiB", MIB, kind="level")

    def chart(id: str, title: str, says: str, ticks: str, lines: list[dict[str, Any]], **more):
        return {"id": id, "title": title, "says": says, "ticks": ticks, "lines": lines, **more}

    thin, seen = "", None
    if width > 1:
        thin = f" A point is the mean of {width} steps, the band their least and most."
        later = column["loss"][len(x) * width // 50 :]  # beside the start of a long run nothing else would be seen
        if not np.isnan(later).all():
            seen = [float(np.nanmin(later)), float(np.nanmax(later))]
            thin += " The start lies above; a double click shows all."
    loss = line("loss", "training batch", BLUE, ".3f", band=True) + [held_out][: len(held)]
    loss += level(history.unigram_entropy, "token frequencies alone", ".3f")
    norm = line("grad_norm", "norm", BLUE, ".4g", band=True)
    norm += level(about.max_grad_norm, "clipped to", ".4g") if norm else []
    axes = {"range": _plain([0, top]), "right": _plain([0, top * ratio])}
    shares = "; on the right the share of the machine (MFU)" if mfu else ""
    return [
        chart("loss", "Loss", f"Cross entropy in nats per token.{thin}", "", loss, range=seen),
        chart("lr", "Learning rate", "Of each step.", "~g", line("lr", "learning rate", BLUE, ".3e"), zero=True),
        chart("norm", "Gradient norm", "Of all gradients together, before clipping.", "~g", norm, log=True),
        chart("speed", "Tokens per second", f"Of each step{shares}.", "~s", speed + mfu, **axes),
        chart("memory", "Memory", "What arrays hold at the peak of each step, in MiB.", ",", memory),
    ]


def thinned(values: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean, minimum and maximum of each ``width`` consecutive values, without NaN; NaN where all of them are."""
    padded = np.full((-(-len(values) // width), width), np.nan)
    padded.flat[: len(values)] = values
    there = ~np.isnan(padded)
    least, most = (np.where(there, padded, rest) for rest in (np.inf, -np.inf))
    count = there.sum(1)
    found = (np.where(there, padded, 0).sum(1) / np.maximum(count, 1), least.min(1), most.max(1))
    mean, low, high = (np.where(count > 0, each, np.nan) for each in found)
    return mean, low, high


def _plain(values) -> list[float | None]:
    """Numbers for JSON, short; None is a gap."""
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in values]


def _spread(count: int, most: int) -> list[int]:
    """At most ``most`` evenly spread indices below ``count``, the first and the last among them."""
    return sorted({round(i) for i in np.linspace(0, count - 1, min(count, most))})


def _progress(history: History, about: About) -> str:
    done = history.steps[-1] if history.steps else 0
    return f"step {done:,} of {about.steps:,}, as of {time.strftime('%Y-%m-%d %H:%M:%S')}"


def _tiles(history: History) -> list[tuple[str, str]]:
    """The figures that a glance is for; speeds are medians of the last 100 steps."""
    last = {name: np.array(values[-100:]) for name, values in history.figures.items()}

    def shown(name: str, value: float, text: str) -> list[tuple[str, str]]:
        return [(name, text.format(value))] if math.isfinite(value) else []

    loss = next((value for value in reversed(last["loss"]) if math.isfinite(value)), math.nan)
    held = history.held_out[-1][1] if history.held_out else math.nan
    peak = np.array(history.figures["peak_bytes"]) / MIB
    return [
        *shown("loss", loss, "{:.3f}"),
        *shown("held-out loss", held, "{:.3f}"),
        *shown("perplexity", math.exp(min(held, 50)), "{:,.1f}"),
        *shown("tokens/s", _median(last["tokens_per_second"]), "{:,.0f}"),
        *shown("MFU", _median(last["mfu"]), "{:.1%}"),
        *shown("peak memory", max(peak[~np.isnan(peak)], default=math.nan), "{:,.0f} MiB"),
    ]


def _median(values: np.ndarray) -> float:
    there = values[~np.isnan(values)]
    return float(np.median(there)) if len(there) else math.nan


def mask_picture(layout: BlockLayout) -> str:
    """The first head's block mask as SVG with a caption. Above 128 blocks a cell stands for several, in a shade for how many of
    them exist.
    """
    edge = -(-max(layout.block_rows, layout.block_cols) // MOST_CELLS)
    rows, cols = -(-layout.block_rows // edge), -(-layout.block_cols // edge)
    share = np.zeros((rows * edge, cols * edge))
    share[: layout.block_rows, : layout.block_cols] = layout.mask[0]
    share = share.reshape(rows, edge, cols, edge).mean((1, 3))
    drawn = []
    for row in range(rows):
        ends = np.flatnonzero(np.diff(share[row])) + 1
        for start, stop in zip([0, *ends], [*ends, cols]):
            if share[row, start]:
                drawn.append(
                    f'<rect x="{start}" y="{row}" width="{stop - start}" height="1" opacity="{max(share[row, start], 0.15):.2g}"/>'
                )
    each = f"block of {layout.block}" if edge == 1 else f"{edge} x {edge} blocks of {layout.block}"
    return (
        f'<svg viewBox="0 0 {cols} {rows}" role="img" aria-label="block mask">{"".join(drawn)}</svg>'
        f"<figcaption>{layout.nnz_total:,} blocks of {layout.block} x {layout.block} positions: density {layout.density:.2f} of "
        f"those that do not lie in the future. Queries from top to bottom, keys from left to right; a cell: {each}.</figcaption>"
    )


def _samples(history: History) -> str:
    """The newest first, and the newest three open."""
    losses = dict(history.held_out)
    shown = [history.samples[i] for i in _spread(len(history.samples), MOST_SAMPLES)][::-1]
    found = []
    for index, (step, prompt, text) in enumerate(shown):
        loss = losses.get(step, math.nan)
        found.append(
            f"<details{' open' if index < 3 else ''}><summary>step {step:,}"
            + (f' <span class="soft">held-out loss {loss:.3f}</span>' if math.isfinite(loss) else "")
            + f'</summary><pre dir="auto"><i>{_visible(prompt)}</i>{_visible(text)}</pre></details>'
        )
    return f'<section id="samples"><h2>Samples over time</h2>{"".join(found)}</section>' if found else ""


def _visible(text: str) -> str:
    """For HTML."""
    return html.escape(text.translate(CONTROLS))
