"""How far the losses of bfloat16 and float16 are from float32's, beside those of float32 with another seed.

    python benchmarks/precision.py --dataset FOLDER --steps 200

Trains a model four times with apps/train_pythia.py, on the same text in the same order (``--in_order``: a seed would change it).
Prints the greatest and the mean distance of a step's loss from float32's, and that of the means over the last tenth of the steps.
Appends a JSON line per run to benchmarks/results/precision.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from interleave import HERE, append_results, machine

ROOT = HERE.parent
RUNS = {"fp32": (), "bf16": ("--precision", "bf16"), "fp16": ("--precision", "fp16"), "other weights": ("--seed", "1")}


def losses(folder: Path, options: argparse.Namespace, flags: tuple[str, ...]) -> list[float]:
    """One per step."""
    command = [sys.executable, str(ROOT / "apps" / "train_pythia.py"), "--model", options.model, "--sparse", "--in_order"]
    command += ["--dataset", options.dataset, "--max_steps", str(options.steps), "--checkpoint_dir", str(folder), *flags]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT / "python")}, stdout=subprocess.DEVNULL, check=True)
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="stdlib", help="as train_pythia.py has it")
    parser.add_argument("--model", default="14m")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = {name: losses(Path(folder) / name.replace(" ", "_"), options, flags) for name, flags in RUNS.items()}
    records, exact, last = [], found["fp32"], options.steps // 10
    for name, values in found.items():
        distances = [abs(a - b) for a, b in zip(values, exact, strict=True)]
        row = {"greatest": max(distances), "mean": statistics.mean(distances)}
        row["last_tenth"] = statistics.mean(values[-last:]) - statistics.mean(exact[-last:])
        print(f"{name:13}  from fp32: at most {row['greatest']:.4f}, mean {row['mean']:.4f}, at the end {row['last_tenth']:+.4f}")
        about = {"model": options.model, "dataset": Path(options.dataset).name, "steps": options.steps, "run": name}
        records.append({**machine(), **about, **row, "losses": values})
    append_results(HERE / "results" / "precision.jsonl", records)


if __name__ == "__main__":
    main()
