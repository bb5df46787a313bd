"""Writes docs/memory.md: what other projects have published about memory, and what needle takes for the same.

    python benchmarks/memory_page.py                  # all of it; minutes to an hour, by the machine
    python benchmarks/memory_page.py --only trainer   # one section, printed

"Planned" is the peak of the allocator on the device without data; "measured" is the same counter after a real run on the CPU. They
are compared here, and have to be equal. RSS is the peak of a whole process, run for itself.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

import needle as ndl
from needle import memory, nn, ops
from needle.amp import PRECISIONS
from needle.backend_ndarray.block_layout import dense_layout
from needle.backend_ndarray.kernels import DEFAULT_CHUNK_BYTES
from needle.data.text import TokenBatches, load_text
from needle.memory import readable
from needle.memory.planning import Build
from needle.models import PythiaConfig, plannable, train_step
from needle.models.pythia import Pythia
from needle.optim import AdamW
from worker import memory_bytes

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "memory.md"
LOGITS_CHUNK = 64 << 20
HEAD = """# Memory: what others have published, and what needle takes

Written by `python benchmarks/memory_page.py`. Planned: the peak of the allocator on the device without data. Measured: the same
counter after a real run on the CPU; where both are given, the script has found them equal. GiB are 2^30 bytes, MB are 10^6.
"""


def pythia(size: str, vocab_size: int, seq_len: int, checkpoint_layers: int = 0) -> PythiaConfig:
    config = PythiaConfig.named(size, vocab_size=vocab_size, max_seq_len=seq_len)
    return replace(config, checkpoint_layers=checkpoint_layers)


def rows(*cells: list[str]) -> str:
    """A table of Markdown, the first row being its head."""
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "---|" * len(cells[0]), *lines[1:]])


def in_a_process(job: str, **arguments: object) -> dict:
    """The result of WORK[job] in a process of its own, with the peak of its RSS."""
    command = [sys.executable, __file__, "--work", job, json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{job} {arguments}: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def peak_rss() -> int:
    return memory_bytes()["peak_rss_bytes"]


# --- what runs in a process of its own ---


def work_steps(size: str, vocab_size: int, batch_size: int, seq_len: int, checkpoint_layers: int) -> dict:
    """Two training steps on the CPU."""
    before = peak_rss()
    found = plannable(pythia(size, vocab_size, seq_len, checkpoint_layers), batch_size, seq_len)
    peak = memory.peak_bytes(found, device=ndl.cpu())
    grown, stats = peak_rss() - before, memory.stats(ndl.cpu())
    return {"peak": peak, "by_category": stats.by_category_at_peak, "reserved": stats.peak_reserved, "rss_grown": grown}


def head(tokens: int, vocab_size: int, width: int) -> Build:
    """The loss of a language model's last layer and its gradients, hidden states (tokens, width) coming in."""

    def build(device):
        weight = nn.Parameter(ndl.init.zeros(width, vocab_size, device=device))
        hidden = ndl.Tensor(np.zeros((tokens, width), np.float32), device=device)
        targets = ndl.Tensor(np.zeros(tokens, np.int32), device=device, dtype="int32", requires_grad=False)
        return lambda: ops.linear_cross_entropy(hidden, weight, targets, chunk_bytes=LOGITS_CHUNK).backward()

    return build


def work_head(tokens: int, vocab_size: int, width: int) -> dict:
    return {"peak": memory.peak_bytes(head(tokens, vocab_size, width), steps=1, device=ndl.cpu())}


def work_trainer(text: str, cache: str, steps: int, checkpoint_layers: int) -> dict:
    """Trains 5.14M parameters on a file, tokenizing it first if it is not in the cache."""
    imported = peak_rss()
    data = load_text(text, vocab_size=788, cache_dir=cache)
    loaded = peak_rss()
    model = Pythia(pythia("31m", data.vocab_size, 128, checkpoint_layers))
    optimizer = AdamW(model.parameter_groups(0.1), lr=1e-3)
    int32 = lambda x: ndl.Tensor(x, dtype="int32", requires_grad=False)  # noqa: E731
    source = (tuple(map(int32, pair)) for pair in TokenBatches(data.train, 32, 128))
    losses = [train_step(model, optimizer, source).loss for _ in range(steps)]
    return {
        "imported": imported, "loaded": loaded, "rss": peak_rss(), "peak": memory.stats().peak, "tokens": len(data.train),
        "losses": losses, "parts": memory.process(),
    }  # fmt: skip


WORK: dict[str, Callable[..., dict]] = {"steps": work_steps, "head": work_head, "trainer": work_trainer}


# --- sections ---


def section_pythia() -> Iterator[str]:
    yield "## Pythia-70M with a vocabulary of 10,000, micro-batches of 32 x 128\n"
    yield 'Published: "40 GB and more" before a rewrite, "about 1.7 GB" after it. One training step with AdamW in fp32:\n'
    table = [["layers computed again", "planned", "measured", "parameters", "optimizer", "gradients", "activations", "workspace"]]
    for layers in (0, 1):
        planned = memory.peak_bytes(plannable(pythia("70m", 10_000, 128, layers), 32, 128))
        got = in_a_process("steps", size="70m", vocab_size=10_000, batch_size=32, seq_len=128, checkpoint_layers=layers)
        parts = [readable(got["by_category"][c]) for c in ("parameter", "optimizer state", "gradient", "activation", "workspace")]
        table.append(["each" if layers else "none", readable(planned), same(planned, got["peak"]), *parts])
    yield rows(*table) + "\n"


def same(planned: int, measured: int) -> str:
    if planned != measured:
        raise RuntimeError(f"planned {planned:,} bytes, measured {measured:,}")
    return f"{measured:,} bytes"


def section_torch() -> Iterator[str]:
    yield "## Beside PyTorch\n"
    yield (
        "Pythia-70M with its own vocabulary of 50,304, fp32: live bytes at the peak less parameters and optimizer state. PyTorch's "
        "figures (eager, sdpa) are 849 and 3,395 MB by formula. Explained: the measured peak, as a part of what the process's peak "
        "RSS grew by in building the model and making two steps; and the same with what the allocator keeps for reuse. The rest is "
        "code of libraries that is used for the first time, the kernels' scratch (some 1 MB per thread) and Python's own heap.\n"
    )
    table = [
        [
            "micro-batch", "layers computed again", "planned peak", "measured peak", "less parameters and states", "of PyTorch's",
            "RSS grew by", "explained", "with what is kept",
        ]
    ]  # fmt: skip
    for batch, seq_len, theirs in ((8, 128, 849e6), (8, 512, 3395e6)):
        for layers in (0, 1):
            config = pythia("70m", 50_304, seq_len, layers)
            planned = memory.peak_bytes(plannable(config, batch, seq_len))
            got = in_a_process("steps", size="70m", vocab_size=50_304, batch_size=batch, seq_len=seq_len, checkpoint_layers=layers)
            ours = planned - 3 * 4 * config.parameter_count()
            cells = [f"{batch} x {seq_len}", "each" if layers else "none", readable(planned), same(planned, got["peak"])]
            cells += [f"{ours / 1e6:,.0f} MB", f"{ours / theirs:.3f}"]
            explained = (f"{got[what] / got['rss_grown']:.1%}" for what in ("peak", "reserved"))
            table.append([*cells, f"{got['rss_grown'] / 1e6:,.0f} MB", *explained])
    yield rows(*table) + "\n"


def section_logits() -> Iterator[str]:
    yield "## Logits\n"
    width, vocab_size = 512, 50_257
    yield (
        "Published for a vocabulary of 50,257: 49.08, 12.30, 6.15, 3.08 and 1.54 GiB of logits (right: 49.08, 12.27, 6.13, 3.07, "
        f"1.53). `ops.linear_cross_entropy` never has them whole. Forward and backward with hidden states {width} wide and "
        f"`chunk_bytes` of {readable(LOGITS_CHUNK)} ({readable(DEFAULT_CHUNK_BYTES)} if not asked), "
        "measured on the CPU up to 2^16 tokens:\n"
    )
    table = [["batch", "logits", "hidden, weight, their gradients, targets", "planned peak", "beyond them", "measured"]]
    for batch, seq_len in ((512, 512), (256, 256), (128, 256), (64, 256), (32, 256)):
        tokens = batch * seq_len
        planned = memory.peak_bytes(head(tokens, vocab_size, width), steps=1)
        needed = 4 * (2 * width * (tokens + vocab_size) + tokens)
        job = {"tokens": tokens, "vocab_size": vocab_size, "width": width}
        got = same(planned, in_a_process("head", **job)["peak"]) if tokens <= 1 << 16 else "planned only"
        cells = [f"{batch} x {seq_len}", readable(4 * tokens * vocab_size), readable(needed), readable(planned)]
        table.append([*cells, readable(planned - needed), got])
    yield rows(*table) + "\n"


def section_leaks() -> Iterator[str]:
    yield "## Graphs kept by stored Tensors\n"
    yield "Published: 10 to 15 GiB held by Tensors that a model kept on `self`. `examples/leak.py` does that, and prints:\n"
    done = subprocess.run([sys.executable, ROOT / "examples" / "leak.py"], capture_output=True, text=True, check=True)
    yield f"```\n{done.stdout}```\n"


def section_gpus() -> Iterator[str]:
    yield "## What fits on which GPU\n"
    yield (
        "Planned, not run on these GPUs: the largest micro-batch of 512 tokens per sequence, dense attention, AdamW, with 512 MiB "
        "left to the driver and libraries. Parameters, their gradients and the optimizer's state are float32 in each precision.\n"
    )
    for size in ("70m", "410m"):
        settings = [
            (f"Pythia-{size}, {p}, {'each layer' if c else 'none'} computed again", {"precision": p, "layers": c})
            for p in PRECISIONS
            for c in (0, 1)
        ]
        peak_of = functools.cache(
            lambda batch, precision, layers, size=size: memory.peak_bytes(
                plannable(pythia(size, 50_304, 512, layers), batch, 512, precision=precision)
            )
        )
        tables = {gpu: memory.fitting_table(peak_of, gpu, settings, 512 << 20) for gpu in ("T4", "L4", "A100-40")}
        yield from (f"{gpu}, {readable(memory.GPUS[gpu])}:\n\n```\n{text}\n```\n" for gpu, text in tables.items())


def section_trainer() -> Iterator[str]:
    yield "## A small trainer on the CPU\n"
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.py"
        size = gather(text, 24_000_000)
        yield (
            "Published: 1.32 GB for 24 MB of text, in a CPU trainer with 65 threads. The same shape (vocabulary 788, width 256, "
            "6 layers, feed-forward 1,024, 5.14M parameters; 32 x 128 tokens) trained with all cores, fp32, on "
            f"{size / 1e6:.1f} MB of Python source; peak RSS of the process, text and tokenizer included:\n"
        )
        table = [["layers computed again", "tokens", "after imports", "after loading", "peak RSS", "of which arrays", "loss"]]
        for layers in (0, 1):
            with tempfile.TemporaryDirectory() as cache:
                job = {"text": str(text), "cache": cache, "checkpoint_layers": layers}
                first = in_a_process("trainer", steps=1, **job)
                got = in_a_process("trainer", steps=40, **job)
            sizes = [f"{got[name] / 1e6:,.0f} MB" for name in ("imported", "loaded", "rss", "peak")]
            change = f"{got['losses'][0]:.2f} to {got['losses'][-1]:.2f} in {len(got['losses'])} steps"
            table.append(["each" if layers else "none", f"{got['tokens']:,}", *sizes, change])
        yield rows(*table) + "\n"
        yield f"The first run trains the tokenizer and encodes the text, with a peak of {first['loaded'] / 1e6:,.0f} MB.\n"


def gather(path: Path, size: int) -> int:
    """Writes ``size`` bytes of the Python files of this installation, repeated if they are too few."""
    with open(path, "wb") as out:
        while out.tell() < size:
            for file in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
                data = file.read_bytes()
                if out.tell() < size and data.isascii():
                    out.write(data[: size - out.tell()])
    return path.stat().st_size


class GroupedQueryLayer(nn.Module):
    """Attention of 8 query heads on 2 key heads of 64, and a gated feed-forward of 1,536; both added to what came in."""

    def __init__(self, device):
        super().__init__()
        linear = lambda n, m: nn.Linear(n, m, bias=False, device=device)  # noqa: E731
        self.norms = [nn.LayerNorm(512, device=device) for _ in range(2)]
        self.q, self.kv, self.out = linear(512, 512), linear(512, 256), linear(512, 512)
        self.gate, self.up, self.down = linear(512, 1536), linear(512, 1536), linear(1536, 512)

    def forward(self, x):
        B, T, C = x.shape
        h = self.norms[0](x)
        q = self.q(h).reshape((B, T, 8, 64)).transpose((1, 2))
        kv = ops.split(self.kv(h).reshape((B, T, 2, 2, 64)), 2)
        k, v = (
            ops.broadcast_to(part.transpose((1, 2)).reshape((B, 2, 1, T, 64)), (B, 2, 4, T, 64)).reshape((B, 8, T, 64))
            for part in (kv[0], kv[1])
        )
        attended = ops.attention(q, k, v, dense_layout(T, T))
        x = x + self.out(attended.transpose((1, 2)).reshape((B, T, C)))
        h = self.norms[1](x)
        return x + self.down(ops.silu(self.gate(h)) * self.up(h))


class GroupedQueryModel(nn.Module):
    """8 such layers of width 512 over a vocabulary of 151,936 whose output matrix is its own."""

    def __init__(self, device):
        super().__init__()
        self.device = device
        self.embed = nn.Embedding(151_936, 512, device=device)
        self.layers = [GroupedQueryLayer(device) for _ in range(8)]
        self.norm = nn.LayerNorm(512, device=device)
        self.head = nn.Parameter(ndl.init.zeros(512, 151_936, device=device))

    def loss(self, ids, targets):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        B, T, C = x.shape
        return ops.linear_cross_entropy(self.norm(x).reshape((B * T, C)), self.head, targets.reshape((B * T,)))


def grouped_query(again: bool) -> Build:
    def build(device):
        model = GroupedQueryModel(device)
        if again:
            for layer in model.layers:
                nn.remat(layer)
        optimizer = AdamW(model.parameters())
        zeros = np.zeros((8, 2048), np.int32)
        batch = tuple(ndl.Tensor(zeros, device=device, dtype="int32", requires_grad=False) for _ in range(2))

        return lambda: train_step(model, optimizer, iter([batch]))

    return build


def section_budget() -> Iterator[str]:
    yield '## The "512M" model that did not fit into 44 GB\n'
    gathered = 4 * 8 * 2048 * 1024 * 8 * 64
    parameters = sum(p.size for p in GroupedQueryModel(ndl.meta()).parameters())
    yield (
        f'Published: a model "of 512M", weights of "7 to 8 GB", out of memory at 51 GB of 44. Its 8 layers (width 512, 8 query and '
        f"2 key heads of 64, feed-forward of 1,536, vocabulary 151,936, untied) are {parameters / 1e6:.1f}M parameters as counted "
        f"here (183.7M as published in the error's report): {readable(4 * parameters)} in fp32. What failed was the copy of the "
        f"keys that each query attends to, [8, 2048, 1024, 8, 64]: {readable(gathered)} in fp32, and as many values in bf16, "
        f"{readable(gathered / 2)}. Attention by blocks reads keys where they are. Planned for 8 x 2,048 tokens, "
        "fp32:\n"
    )
    table = [["layers computed again", "peak", "parameters", "gradients", "optimizer", "activations", "workspace"]]
    for again in (False, True):
        plan = memory.plan(grouped_query(again))
        parts = [plan.by_category.get(c, 0) for c in ("parameter", "gradient", "optimizer state", "activation", "workspace")]
        table.append(["each" if again else "none", readable(plan.peak_bytes), *map(readable, parts)])
    yield rows(*table) + "\n"


SECTIONS = {
    "pythia": section_pythia,
    "torch": section_torch,
    "logits": section_logits,
    "leaks": section_leaks,
    "gpus": section_gpus,
    "trainer": section_trainer,
    "budget": section_budget,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SECTIONS, help="print one section")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        print(json.dumps(WORK[options.work[0]](**json.loads(options.work[1]))))
        return 0
    if options.only:
        print("\n".join(SECTIONS[options.only]()))
        return 0
    text = HEAD + "".join("\n" + "\n".join(section()) for section in SECTIONS.values())
    PAGE.write_text(text)
    print(f"written: {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
