"""Time of saving and loading Pythia-70M with its optimizer state, beside writing and reading that many bytes on the same disk.

    python benchmarks/checkpoint.py --folder runs/disk --rounds 7

The four take turns. Writing is measured until the bytes are on the disk; reading both from the disk (the file's pages are
dropped from memory before each turn) and from memory. Saving includes checksums, loading their verification. Appends a JSON line
per row to benchmarks/results/checkpoint.jsonl.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import time
from pathlib import Path

from interleave import HERE, append_results, machine

sys.path[:0] = [str(HERE.parent / "python"), str(HERE.parent / "apps")]

import numpy as np

import needle as ndl
from needle.checkpoints import CheckpointFolder, random_state, read_folder
from needle.models import Pythia, PythiaConfig, load_published
from needle.optim import AdamW
from pythia_app import checkpoint
from pythia_app.options import CHANGEABLE, FIXED

BLOCK_BYTES = 8 << 20


def make(size: str) -> tuple[Pythia, AdamW]:
    """A model whose optimizer has taken a step."""
    model = Pythia(PythiaConfig.named(size), device=ndl.cpu())
    optimizer = AdamW(model.parameter_groups())
    ids = ndl.Tensor(np.arange(16)[None], device=ndl.cpu(), dtype="int32", requires_grad=False)
    model.loss(ids, ids).backward()
    optimizer.step()
    optimizer.reset_grad()
    return model, optimizer


def write_plainly(path: Path, nbytes: int) -> None:
    block = np.random.default_rng(0).bytes(BLOCK_BYTES)
    with open(path, "wb", buffering=0) as file:
        for start in range(0, nbytes, BLOCK_BYTES):
            file.write(block[: nbytes - start])
        os.fsync(file.fileno())


def read_plainly(path: Path) -> None:
    """Into memory that is new, as a model's is."""
    with open(path, "rb", buffering=0) as file:
        file.readinto(memoryview(bytearray(path.stat().st_size)))


def forget(paths: list[Path]) -> None:
    """The system drops what it keeps of the files in memory."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def seconds(action, *args) -> float:
    start = time.perf_counter()
    action(*args)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmark-checkpoint"), help="on the disk to measure; is removed")
    parser.add_argument("--model", default="70m")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    options.folder.mkdir(parents=True)
    try:
        measure(options)
    finally:
        shutil.rmtree(options.folder)


def measure(options: argparse.Namespace) -> None:
    folder, plain = CheckpointFolder(options.folder / "run", keep_last=1), options.folder / "plain"
    model, optimizer = make(options.model)
    options_kept = dict.fromkeys(CHANGEABLE + FIXED, 0)  # null is refused in those that make the model
    state = {"step": 1, "steps": 2, "data": {}, "options": options_kept, "scaler": None, "metrics": {}}
    state["random"] = random_state(model)

    def save() -> Path:
        return checkpoint.save(folder, model, optimizer, state)

    def load() -> None:
        path = checkpoint.find(folder.path).path
        load_published(fresh, read_folder(path))
        checkpoint.load_optimizer(path, fresh, other)

    files = list(save().iterdir())
    nbytes = sum(path.stat().st_size for path in files)
    fresh, other = make(options.model)
    times: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        times.setdefault("write", []).append(seconds(write_plainly, plain, nbytes))
        times.setdefault("save", []).append(seconds(save))
        files = [path for path in (options.folder / "run").rglob("*") if path.is_file()]
        for where in ("disk", "memory"):
            if where == "disk":
                forget([plain, *files])
            times.setdefault(f"read from {where}", []).append(seconds(read_plainly, plain))
            if where == "disk":
                forget([plain, *files])
            times.setdefault(f"load from {where}", []).append(seconds(load))
    about, records = machine(), []
    print(f"Pythia-{options.model} with optimizer state: {nbytes:,} bytes, {options.rounds} rounds, medians")
    for ours, plainly in (("save", "write"), ("load from disk", "read from disk"), ("load from memory", "read from memory")):
        ratio = statistics.median(a / b for a, b in zip(times[ours], times[plainly]))
        mine, theirs = statistics.median(times[ours]), statistics.median(times[plainly])
        print(f"{ours:17} {mine:6.2f} s   {plainly:16} {theirs:6.2f} s   ratio in a turn {ratio:.2f}")
        row = {"case": ours, "model": options.model, "bytes": nbytes, "seconds": times[ours], "plain_seconds": times[plainly]}
        records.append({**about, **row, "ratio": ratio})
    append_results(HERE / "results" / "checkpoint.jsonl", records)


if __name__ == "__main__":
    main()
