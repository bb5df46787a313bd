"""tinygrad's side of the benchmarks. Needs tinygrad, numpy and clang; see worker.py for the protocol.

Set BEAM=2 to have tinygrad search for faster kernels: once per kernel, which takes minutes.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

if "OMP_NUM_THREADS" in os.environ:
    os.environ.setdefault("NUM_CPU_THREADS", os.environ["OMP_NUM_THREADS"])  # read when tinygrad is imported

import numpy as np
from tinygrad import Context, Device, Tensor, TinyJit, nn
from tinygrad.helpers import BEAM, NUM_CPU_THREADS

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from worker import PYTHIA_SIZES, Case, serve


def _case(step: Callable[[], float | None]) -> Case:
    versions = {"tinygrad": version("tinygrad"), "beam": str(BEAM.value)}
    return Case(step, versions, NUM_CPU_THREADS.value, finish=Device[Device.DEFAULT].synchronize)


def _check(device: str) -> None:
    if device == "cuda":
        raise SystemExit("[worker] tinygrad is compared on the CPU only")


class Block:
    """Parallel residual: x + attention(norm1(x)) + mlp(norm2(x))."""

    def __init__(self, width: int, heads: int, feed_forward: int):
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.dense = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, feed_forward), nn.Linear(feed_forward, width)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, T, C = x.shape
        packed = self.qkv(self.norm1(x)).reshape(B, T, self.heads, 3, C // self.heads).permute(3, 0, 2, 1, 4)
        q, k = (rotate(packed[i], cos, sin) for i in (0, 1))  # (B, H, T, D)
        attended = q.scaled_dot_product_attention(k, packed[2], is_causal=True)
        attended = self.dense(attended.transpose(1, 2).reshape(B, T, C))
        return x + attended + self.down(self.up(self.norm2(x)).gelu("none"))


class Pythia:
    """The model of torch_pythia.py."""

    def __init__(self, vocab_size: int, seq_len: int, width: int, heads: int, feed_forward: int, layers: int = 6):
        self.embed_in = nn.Embedding(vocab_size, width)
        self.blocks = [Block(width, heads, feed_forward) for _ in range(layers)]
        self.norm = nn.LayerNorm(width)
        self.embed_out = nn.Linear(width, vocab_size, bias=False)
        rotary = width // heads // 4
        angles = np.arange(seq_len)[:, None] * 10000.0 ** (-np.arange(0, rotary, 2) / rotary)
        self.angles = [Tensor(np.tile(f(angles), 2).astype(np.float32)).is_param_(False) for f in (np.cos, np.sin)]  # (T, rotary)
        for name, parameter in nn.state.get_state_dict(self).items():
            if parameter.ndim == 2 and parameter.is_param:
                residual = name.endswith(("dense.weight", "down.weight"))
                std = 2 / (layers * math.sqrt(width)) if residual else math.sqrt(2 / (5 * width))
                parameter.assign(Tensor.normal(*parameter.shape, std=std)).realize()

    def __call__(self, ids: Tensor) -> Tensor:
        x = self.embed_in(ids)  # (B, T, C)
        for block in self.blocks:
            x = block(x, *self.angles)
        return self.embed_out(self.norm(x))  # (B, T, V)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the first ``cos.shape[-1]`` dimensions of x (B, H, T, D)."""
    rotary = cos.shape[-1]
    turned, rest = x[..., :rotary], x[..., rotary:]
    a, b = turned.chunk(2, dim=-1)
    return (turned * cos + b.neg().cat(a, dim=-1) * sin).cat(rest, dim=-1)


def pythia_step(
    batch_size: int, seq_len: int, vocab_size: int, device: str = "cpu", model_size: str = "70m", precision: str = "fp32"
) -> Case:
    """A training step of Pythia on the same random tokens every time; the value is the loss."""
    _check(device)
    if precision != "fp32":
        raise SystemExit("[worker] tinygrad is compared in fp32 only")
    Tensor.manual_seed(0)
    model = Pythia(vocab_size, seq_len, *PYTHIA_SIZES[model_size])
    parameters = [p for p in nn.state.get_parameters(model) if p.is_param]
    optimizer = nn.optim.OptimizerGroup(*(
        nn.optim.AdamW([p for p in parameters if (p.ndim >= 2) == matrices], lr=1e-3, b1=0.9, b2=0.95, weight_decay=decay)
        for matrices, decay in ((True, 0.1), (False, 0.0))
    ))  # fmt: skip
    tokens = np.random.default_rng(0).integers(0, vocab_size, (batch_size, seq_len + 1)).astype(np.int32)
    ids, targets = (Tensor(part.copy()).realize() for part in (tokens[:, :-1], tokens[:, 1:]))

    @TinyJit
    def train(ids: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(ids).sparse_categorical_crossentropy(targets)
        loss.backward()
        return loss.realize(*optimizer.schedule_step())

    def step() -> float:
        with Context(TRAINING=1):
            return train(ids, targets).item()

    return _case(step)


def gemm(m: int, k: int, n: int, device: str = "cpu", dtype: str = "float32") -> Case:
    """(m, k) @ (k, n)."""
    _check(device)
    rng = np.random.default_rng(0)
    a, b = (Tensor(rng.standard_normal(shape, dtype=np.float32)).cast(dtype).realize() for shape in ((m, k), (k, n)))
    product = TinyJit(lambda a, b: (a @ b).realize())

    def step() -> None:
        product(a, b)

    return _case(step)


if __name__ == "__main__":
    serve(pythia_step, gemm)
