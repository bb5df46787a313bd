"""PyTorch's side of the benchmarks. Needs torch and numpy; see worker.py for the protocol."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from torch_pythia import Pythia, generate, make_optimizer, train_step

from worker import PYTHIA_SIZES, Case, serve


def _place(device: str) -> str:
    """torch's name of needle's device; what needle's emulator does is compared with the CPU. The peak starts again."""
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return "cpu" if device == "cuda_sim" else device


def _case(step: Callable[[], float | None], device: str) -> Case:
    versions = {"torch": str(torch.__version__)}
    if torch.device(device).type != "cuda":
        return Case(step, versions, torch.get_num_threads())
    versions |= {"device": torch.cuda.get_device_name(), "cudnn": str(torch.backends.cudnn.version())}

    def memory() -> dict[str, int]:
        peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        return dict(zip(("device_peak_bytes", "device_peak_reserved_bytes"), peaks))

    return Case(step, versions, torch.get_num_threads(), memory, finish=torch.cuda.synchronize)


def pythia_step(
    batch_size: int,
    seq_len: int,
    vocab_size: int,
    device: str = "cpu",
    pattern: str | None = None,
    model_size: str = "70m",
    precision: str = "fp32",
) -> Case:
    """A training step of Pythia on the same random tokens every time; the value is the loss. Dense whatever ``pattern`` says.

    precision: fp32, or bf16, which is autocast.
    """
    device = _place(device)
    torch.manual_seed(0)
    model = Pythia(vocab_size, seq_len, *PYTHIA_SIZES[model_size]).to(device)
    optimizer = make_optimizer(model)
    tokens = np.random.default_rng(0).integers(0, vocab_size, (batch_size, seq_len + 1))
    ids, targets = (torch.from_numpy(part.copy()).to(device) for part in (tokens[:, :-1], tokens[:, 1:]))
    region = torch.autocast(torch.device(device).type, torch.bfloat16, enabled=precision == "bf16")
    return _case(lambda: train_step(model, optimizer, ids, targets, region).item(), device)


def generation(
    prompt: int,
    new_tokens: int,
    vocab_size: int,
    device: str = "cpu",
    pattern: str | None = None,
    batch_size: int = 1,
    dtype: str = "float32",
) -> Case:
    """Pythia-70M reads a prompt and goes on for ``new_tokens``, the likeliest ones; the value is the last."""
    device = _place(device)
    torch.manual_seed(0)
    model = Pythia(vocab_size, prompt + new_tokens).to(device, getattr(torch, dtype))
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, vocab_size, (batch_size, prompt))).to(device)
    return _case(lambda: float(generate(model, ids, new_tokens)[0, -1]), device)


def read(megabytes: float, device: str = "cpu") -> Case:
    """The sum of an array of so many bytes: how fast memory can be read."""
    x = torch.ones(int(megabytes * 1e6 / 4), device=_place(device))
    return _case(lambda: x.sum().item(), device)


def _array(rng, shape: tuple[int, ...], device: str, dtype: str) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32)).to(device, getattr(torch, dtype))


def attention(
    seq_len: int,
    backward: bool,
    device: str = "cpu",
    heads: int = 8,
    head_dim: int = 64,
    density: float = 1,
    dtype: str = "float32",
) -> Case:
    """Dense causal attention, B 1; with ``backward``, the gradients of q, k and v too.

    Dense whatever ``density`` says: it is what needle's block-sparse attention is compared with.
    """
    device = _place(device)
    rng = np.random.default_rng(0)
    q, k, v, grad = (_array(rng, (1, heads, seq_len, head_dim), device, dtype) for _ in range(4))

    def forward() -> None:
        with torch.no_grad():
            F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward_backward() -> None:
        for x in (q, k, v):
            x.grad = None
        F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(grad)

    if backward:
        for x in (q, k, v):
            x.requires_grad_()
    return _case(forward_backward if backward else forward, device)


def _layer(
    layer: torch.nn.Module,
    shape: tuple[int, ...],
    device: str,
    dtype: str = "float32",
    channels_last: bool = False,
) -> Case:
    """A layer's forward and all gradients, on an input of ``shape``, which its (first) output has, too.

    channels_last: a pixel's channels lie side by side in images, their gradients and kernels.
    """
    device = _place(device)
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    layer.to(device, getattr(torch, dtype), memory_format=memory_format)
    x, grad = (_array(np.random.default_rng(seed), shape, device, dtype).contiguous(memory_format=memory_format) for seed in (0, 1))
    x.requires_grad_()

    def step() -> None:
        x.grad = None
        layer.zero_grad()
        out = layer(x)
        (out[0] if isinstance(out, tuple) else out).backward(grad)

    return _case(step, device)


def conv(
    channels: int, side: int, batch_size: int, channels_last: bool = False, device: str = "cpu", dtype: str = "float32"
) -> Case:
    """A layer of 3 x 3 kernels on images of side x side pixels, forward and all gradients."""
    layer = torch.nn.Conv2d(channels, channels, 3, padding=1)
    return _layer(layer, (batch_size, channels, side, side), device, dtype, channels_last)


class _Residual(torch.nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


def residual_block(
    channels: int, side: int, batch_size: int, channels_last: bool = False, device: str = "cpu", dtype: str = "float32"
) -> Case:
    """Two 3 x 3 convolutions, each with batch norm and ReLU, and their input added, forward and all gradients."""
    conv, norm, relu = torch.nn.Conv2d, torch.nn.BatchNorm2d, torch.nn.ReLU
    parts = [(conv(channels, channels, 3, padding=1), norm(channels), relu()) for _ in range(2)]
    return _layer(_Residual(*parts[0], *parts[1]), (batch_size, channels, side, side), device, dtype, channels_last)


def recurrent(kind: str, width: int, positions: int, batch_size: int, device: str = "cpu", dtype: str = "float32") -> Case:
    """A layer of nn.RNN or nn.LSTM over a sequence, forward and all gradients."""
    return _layer(getattr(torch.nn, kind)(width, width), (positions, batch_size, width), device, dtype)


def batch_norm(rows: int, width: int, device: str = "cpu") -> Case:
    """A layer of BatchNorm1d in training, forward and all gradients."""
    return _layer(torch.nn.BatchNorm1d(width), (rows, width), device)


def adds(count: int, device: str = "cpu") -> Case:
    """``count`` chained additions x + c of 4 x 4 arrays, forward and backward: nothing but overhead."""
    device = _place(device)
    x = torch.ones(4, 4, device=device, requires_grad=True)
    c = torch.ones(4, 4, device=device)
    grad = torch.ones(4, 4, device=device)

    def step() -> None:
        x.grad = None
        y = x
        for _ in range(count):
            y = y + c
        y.backward(grad)

    return _case(step, device)


def loss(rows: int, vocab_size: int, width: int = 512, device: str = "cpu") -> Case:
    """The mean cross-entropy of (rows, width) @ (width, vocab_size) and both gradients."""
    device = _place(device)
    rng = np.random.default_rng(0)
    hidden = torch.from_numpy(rng.standard_normal((rows, width), dtype=np.float32)).to(device).requires_grad_()
    weight = torch.from_numpy(0.05 * rng.standard_normal((width, vocab_size), dtype=np.float32)).to(device).requires_grad_()
    targets = torch.from_numpy(rng.integers(0, vocab_size, rows)).to(device)

    def step() -> float:
        hidden.grad = weight.grad = None
        value = F.cross_entropy(hidden @ weight, targets)
        value.backward()
        return value.item()

    return _case(step, device)


def gemm(m: int, k: int, n: int, device: str = "cpu", dtype: str = "float32") -> Case:
    """(m, k) @ (k, n); float32 without TF32."""
    device = _place(device)
    rng = np.random.default_rng(0)
    a, b = (_array(rng, shape, device, dtype) for shape in ((m, k), (k, n)))

    def step() -> None:
        a @ b

    return _case(step, device)


def product(kind: str, size: int, density: float, device: str = "cpu", dtype: str = "float32") -> Case:
    """The dense product that a block-sparse one of any ``kind`` and ``density`` is compared with."""
    return gemm(size, size, size, device, dtype)


if __name__ == "__main__":
    torch.set_float32_matmul_precision("highest")  # no TF32, as in needle
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    serve(pythia_step, generation, read, attention, product, conv, residual_block, recurrent, batch_norm, adds, loss, gemm)
