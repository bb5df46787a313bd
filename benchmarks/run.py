"""Run benchmarks: needle beside PyTorch, in turns, on this machine.

    python benchmarks/run.py step --torch-python ../torch-env/bin/python
    python benchmarks/run.py step --busy 1                   # one core busy elsewhere
    python benchmarks/run.py step --threads 1 2 4            # scaling
    python benchmarks/run.py attention adds --rounds 5 --waits passive
    BEAM=2 python benchmarks/run.py tinygrad --tinygrad-python ../tinygrad-env/bin/python

Prints a table and appends one JSON line per contestant and row to benchmarks/results/<group>.jsonl. PyTorch runs once
per way of waiting (--waits); its best is the one to compare with.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from interleave import HERE, WAITS, Contestant, Row, Worker, append_results, cores, gpu, machine, measure

NEEDLE_WORKER = HERE / "needle_worker.py"
TORCH_WORKER = HERE / "peers" / "torch_worker.py"
TINYGRAD_WORKER = HERE / "peers" / "tinygrad_worker.py"


def _step(batch_size: int, seq_len: int, vocab_size: int, **more) -> Row:
    args = {"batch_size": batch_size, "seq_len": seq_len, "vocab_size": vocab_size, **more}
    return Row("pythia_step", args, tokens=batch_size * seq_len)


def _attention(seq_len: int, backward: bool, density: float = 1, **more) -> Row:
    args = {"seq_len": seq_len, "backward": backward, "density": density, **more}
    return Row("attention", args, tokens=seq_len, settle=1, steps=3)


def _gemm(m: int, k: int, n: int, **more) -> Row:
    return Row("gemm", {"m": m, "k": k, "n": n, **more}, ops=2 * m * k * n, settle=1, steps=5)


def _product(kind: str, size: int, density: float, **more) -> Row:
    return Row("product", {"kind": kind, "size": size, "density": density, **more}, settle=1, steps=5)


def _generation(prompt: int, vocab_size: int = 10000, batch_size: int = 1, **more) -> Row:
    args = {"prompt": prompt, "new_tokens": 32, "vocab_size": vocab_size, "batch_size": batch_size, **more}
    return Row("generation", args, tokens=32 * batch_size, warmup=1)


def _conv(channels: int, side: int, case: str = "conv") -> Row:
    return Row(case, {"channels": channels, "side": side, "batch_size": 64}, settle=1, steps=5)


def _recurrent(kind: str) -> Row:
    return Row("recurrent", {"kind": kind, "width": 512, "positions": 40, "batch_size": 16}, settle=1, steps=5)


def _batch_norm(rows: int, width: int) -> Row:
    return Row("batch_norm", {"rows": rows, "width": width}, warmup=20, settle=5, steps=20)


def _loss(rows: int, vocab_size: int) -> Row:
    return Row("loss", {"rows": rows, "vocab_size": vocab_size}, tokens=rows, settle=1, steps=3)


def _with(rows: list[Row], **more) -> list[Row]:
    return [replace(row, args={**row.args, **more}) for row in rows]


LOCAL = {"pattern": "local"}  # own block and the one before it
SHARES = (1 / 2, 1 / 4, 1 / 8)  # of the blocks, beside all of them
ATTENTION = [_attention(seq_len, backward) for seq_len in (2048, 8192) for backward in (False, True)]
NORMS = [_batch_norm(100, 100), _batch_norm(32768, 16)]  # those of a course's perceptron and of its convolutions
LAYERS = 6  # of Pythia-70M
BF16 = {"dtype": "bfloat16"}
GROUPS: dict[str, list[Row]] = {
    "step": [_step(8, 128, 50304), _step(2, 512, 50304), _step(8, 128, 10000)],
    "long": [_step(2, 512, 10000), _step(1, 2048, 10000), _step(1, 8192, 10000)],
    "generation": [_generation(512), _generation(2048), _generation(8160)],
    # A decoded token reads every parameter but the embeddings of other ids, 44.7 million here: the bytes of the last row.
    "decoding": [
        _generation(16, 50304),
        _generation(16, 50304, batch_size=8),
        Row("read", {"megabytes": 178.7}, settle=1, steps=5),
    ],
    "attention": ATTENTION,
    "loss": [_loss(rows, vocab_size) for rows in (1024, 4096) for vocab_size in (10000, 50304)],
    "layers": [
        *(_conv(*size) for size in ((16, 32), (64, 32), (128, 16))),
        *(_conv(*size, "residual_block") for size in ((64, 32), (128, 16))),
        _recurrent("RNN"), _recurrent("LSTM"), *NORMS,
    ],
    "adds": [Row("adds", {"count": 200}, ops=200, warmup=50, settle=10, steps=50)],
    "gemm": [_gemm(1024, 512, 50304), _gemm(1024, 512, 2048), _gemm(1024, 2048, 512), _gemm(512, 512, 512)],
    # Small: tinygrad takes minutes to compile a step, and with BEAM=2 more to find the fastest kernels.
    "tinygrad": [_gemm(512, 512, 512), _gemm(1024, 512, 2048), _step(4, 128, 2048, model_size="14m")],
    "gpu_step": [
        replace(_step(*shape, 50304, pattern=pattern, precision=precision), settle=1, steps=3)
        for precision in ("fp32", "bf16")
        for shape in ((8, 2048), (32, 512))
        for pattern in (None, "local")
    ],
    "gpu_gemm": [
        _gemm(*shape, **more)
        for more in ({}, BF16)
        for shape in ((16384, 512, 50304), (16384, 512, 2048), (512, 16384, 512), (4096, 4096, 4096), (512, 512, 512))
    ],
    "gpu_generation": [_generation(2016, 50304, batch_size=batch_size) for batch_size in (1, 8)],
    "gpu_attention": [*ATTENTION, *_with(ATTENTION, **BF16)],
    "gpu_products": [_product(kind, 4096, 1, **more) for more in ({}, BF16) for kind in ("sdd", "dsd", "dds")],
    "smoke": [replace(row, warmup=0, settle=0) for row in (
        _step(1, 192, 512, pattern="local", model_size="14m"), _step(1, 64, 512, model_size="14m", precision="bf16"),
        _gemm(64, 64, 64), _gemm(64, 64, 64, **BF16),
        _attention(128, True, 1 / 2), _attention(128, True, 1 / 2, **BF16),
        *(_product(kind, 128, 1 / 2) for kind in ("sdd", "dsd", "dds")), _product("sdd", 128, 1 / 2, **BF16),
    )],
}  # fmt: skip


def _of_some_ms(row: Row) -> Row:
    """With as many steps to a sample as keep a large GPU busy for some 8 ms, so that what one wait costs does not show."""
    size, heads, head_dim = row.args.get("size", 0), 8, 64
    causal = 2 * row.args.get("seq_len", 0) ** 2 * heads * head_dim
    flops = {"gemm": row.ops, "product": 2 * size**3, "attention": causal * (3.5 if row.args.get("backward") else 1)}[row.case]
    wanted = {"float32": 4e11, "bfloat16": 4e12}[row.args.get("dtype", "float32")]
    return replace(row, repeat=int(min(200, max(1, wanted / flops))))


GROUPS["step_bf16"] = _with(GROUPS["step"], precision="bf16")
GROUPS["decoding_bf16"] = _with(GROUPS["decoding"][:2], **BF16)
GROUPS["layers_bf16"] = _with(GROUPS["layers"][: -len(NORMS)], **BF16)
for group in ("attention", "gemm"):
    GROUPS[f"{group}_bf16"] = _with(GROUPS[group], **BF16)
for group in ("gpu_gemm", "gpu_attention", "gpu_products"):
    GROUPS[group] = [_of_some_ms(row) for row in GROUPS[group]]


def _beside(group: str, row: Row) -> dict[str, Row]:
    """What runs in the same turns as a row, by name: shares of the blocks; the sparse model and the attention of both; the loss by
    whole logits; on a GPU the product by needle's own kernel; PyTorch's convolution of images whose channels lie side by side."""
    if group in ("attention", "attention_bf16", "gpu_attention", "gpu_products"):
        return {f"needle-{share:g}": replace(row, args={**row.args, "density": share}) for share in SHARES}
    if group == "loss":
        return {"needle-dense": replace(row, args={**row.args, "dense": True})}
    if group == "gpu_gemm":
        return {"needle-own": replace(row, args={**row.args, "own": True})}
    if group == "generation":
        return {"needle-local": replace(row, args={**row.args, **LOCAL})}
    if row.case in ("conv", "residual_block"):
        return {"torch-channels-last": replace(row, args={**row.args, "channels_last": True})}
    if group != "long":
        return {}
    shape = {name: row.args[name] for name in ("batch_size", "seq_len")}
    attention = {**shape, "backward": True}
    return {
        "needle-local": _step(vocab_size=row.args["vocab_size"], **shape, **LOCAL),
        "attention": Row("attention", attention),
        "attention-local": Row("attention", {**attention, **LOCAL}),
    }


def _add_prediction(records: list[dict]) -> None:
    """Amdahl's law beside the sparse step: the dense one with its attention done in less time.

    bound_s: attention in its density's share of the time. predicted_s: in the time that sparse attention took alone.
    """
    by_name = {record["contestant"]: record for record in records}
    if not {"needle", "needle-local", "attention", "attention-local"} <= by_name.keys():
        return
    dense, local = by_name["needle"]["median_s"], by_name["needle-local"]
    attention, attention_local = (LAYERS * by_name[name]["median_s"] for name in ("attention", "attention-local"))
    local["attention_share_of_dense"] = attention / dense
    local["bound_s"] = dense - attention * (1 - local["density"])
    local["predicted_s"] = dense - attention + attention_local


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="+", choices=GROUPS)
    parser.add_argument("--torch-python", default=sys.executable, help="a Python that has torch (default: this one)")
    parser.add_argument("--tinygrad-python", help="a Python that has tinygrad (default: without it; it does gemm and pythia_step)")
    parser.add_argument("--needle-python", default=sys.executable, help="a Python that has needle (default: this one)")
    parser.add_argument("--only", choices=("needle", "torch"), help="run one side alone")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda_sim (default: cpu)")
    parser.add_argument("--threads", type=int, nargs="+", default=[cores()], help="threads per run (default: all cores)")
    parser.add_argument("--waits", nargs="+", choices=WAITS, default=["passive", "default"], help="how PyTorch waits")
    parser.add_argument("--busy", type=int, default=0, help="cores kept busy beside (default: 0)")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contestant (default: 7)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no row after so long (default: never)")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder for the JSON lines")
    options = parser.parse_args()

    end = time.monotonic() + options.seconds
    contestants = _contestants(options)
    rows = [(group, threads, row) for group in options.groups for threads in options.threads for row in GROUPS[group]]
    failed, here = False, gpu() if options.device == "cuda" else {}
    # Starting a process on a GPU takes seconds, so there it goes on from row to row; and a kernel that hangs must end.
    kept: dict[str, Worker] | None = None if options.device == "cpu" else {}
    limit_s = None if options.device == "cpu" else 120
    try:
        for group, threads, row in rows:
            if time.monotonic() > end:
                print(f"{row.case} {row.args}: not begun for lack of time", flush=True)
                failed = True
                continue
            more = {name: _on(options.device, other) for name, other in _beside(group, row).items()}
            records = measure(
                _on(options.device, row),
                contestants + [_contestant(name, other, options) for name, other in more.items() if _wanted(name, options.only)],
                threads=threads,
                rounds=options.rounds,
                busy=options.busy,
                limit_s=limit_s,
                kept=kept,
            )
            for record in records:
                if "error" in record:
                    print(f"{record['case']} {record['args']}: {record['error']}", flush=True)
                    failed = True
            records = [record for record in records if "error" not in record]
            if not records:
                continue
            _add_prediction(records)
            append_results(options.results / f"{group}.jsonl", [{**machine(), **here, **record} for record in records])
            _print(records)
    finally:
        for worker in (kept or {}).values():
            worker.close()
    return 1 if failed else 0


def _wanted(name: str, only: str | None) -> bool:
    return only is None or name.startswith("torch") == (only == "torch")


def _contestant(name: str, row: Row, options: argparse.Namespace) -> Contestant:
    if name.startswith("torch"):
        return Contestant(name, options.torch_python, TORCH_WORKER, row=row)
    return Contestant(name, options.needle_python, NEEDLE_WORKER, row=row)


def _contestants(options: argparse.Namespace) -> list[Contestant]:
    found = []
    if options.only != "torch":
        found.append(Contestant("needle", options.needle_python, NEEDLE_WORKER))
    if options.only != "needle":
        if subprocess.run([options.torch_python, "-c", "import torch"], capture_output=True).returncode:
            raise SystemExit(f"[benchmarks] {options.torch_python} has no torch (--torch-python, or --only needle)")
        waits = options.waits if options.device == "cpu" else ["default"]
        found += [Contestant(f"torch-{way}", options.torch_python, TORCH_WORKER, way) for way in waits]
    if options.tinygrad_python:
        found.append(Contestant("tinygrad", options.tinygrad_python, TINYGRAD_WORKER))
    return found


def _on(device: str, row: Row) -> Row:
    return replace(row, args={**row.args, "device": device})


def _print(records: list[dict]) -> None:
    first = records[0]
    args = " ".join(f"{key}={value}" for key, value in first["args"].items())
    print(f"{first['case']} {args} threads={first['threads']} busy={first['busy_cores']}")
    for r in records:
        rate = f"{r['tokens_per_s']:10.0f} tok/s" if "tokens_per_s" in r else ""
        if r["case"] == "gemm":
            rate = f"{1e-3 / r['us_per_op']:10.1f} GFLOP/s"
        elif "us_per_op" in r:
            rate = f"{r['us_per_op']:10.2f} us/op"
        device = f"{r['device_peak_bytes'] / 1e6:8.0f} MB device" if "device_peak_bytes" in r else ""
        print(
            f"  {r['contestant']:19s} {r['median_s'] * 1e3:10.2f} ms ({r['p10_s'] * 1e3:.2f} to {r['p90_s'] * 1e3:.2f})"
            f" {rate}  x{r.get('time_over_first', math.nan):.3g}  {r['peak_rss_bytes'] / 1e6:8.0f} MB peak{device}",
            flush=True,
        )
        if "bound_s" in r:
            share, density, bound_ms, predicted_ms = (
                r["attention_share_of_dense"], r["density"], r["bound_s"] * 1e3, r["predicted_s"] * 1e3
            )  # fmt: skip
            print(
                f"    attention: {share:.2f} of the dense step, sparse density {density:.3f}; by Amdahl's law {bound_ms:.2f} ms,",
                end=" ",
            )
            print(f"with the attention measured alone {predicted_ms:.2f} ms")


if __name__ == "__main__":
    sys.exit(main())
