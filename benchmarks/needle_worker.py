"""needle's side of the benchmarks; see worker.py for the protocol and peers/torch_worker.py for the other side."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

import needle as ndl
from needle import amp, nn, ops
from needle.backend_ndarray.block_layout import BlockLayout, dense_layout
from needle.models import Pythia, PythiaConfig
from needle.optim import AdamW
from worker import Case, serve


def _device(name: str):
    device = getattr(ndl, name)()
    device.require().empty_cache()
    device.require().reset_peak()
    return device


def _case(step: Callable[[], float | None], device, **facts) -> Case:
    def memory() -> dict[str, int]:
        stats = device.memory_stats()
        return {"device_peak_bytes": stats["peak"], "device_peak_reserved_bytes": stats["peak_reserved"]}

    versions = {"needle": "0.1.0", "numpy": np.__version__}
    if device.is_gpu:
        versions["device"] = device.device_properties()["name"]
        versions["cublasLt"] = str(device.cublaslt_in_use()[1] or None)
    return Case(step, versions, device.num_threads(), memory, facts, device.sync)


def _array(rng, shape, device, requires_grad: bool = False, dtype: str = "float32") -> ndl.Tensor:
    return ndl.Tensor(rng.standard_normal(shape, dtype=np.float32), device=device, dtype=dtype, requires_grad=requires_grad)


def pythia_step(
    batch_size: int,
    seq_len: int,
    vocab_size: int,
    device: str = "cpu",
    pattern: str | None = None,
    model_size: str = "70m",
    precision: str = "fp32",
) -> Case:
    """A training step of Pythia on the same random tokens every time; the value is the loss. precision: fp32, bf16 (autocast)."""
    where = _device(device)
    config = PythiaConfig.named(model_size, vocab_size=vocab_size, max_seq_len=seq_len)
    if pattern:
        config = config.with_sparse(pattern, block=64)
    model = Pythia(config, device=where, seed=0)
    optimizer = AdamW(model.parameter_groups(), lr=1e-3)
    tokens = np.random.default_rng(0).integers(0, vocab_size, (batch_size, seq_len + 1))
    ids, targets = (
        ndl.Tensor(part.copy(), device=where, dtype="int32", requires_grad=False) for part in (tokens[:, :-1], tokens[:, 1:])
    )

    def step() -> float:
        optimizer.reset_grad()
        with amp.autocast.named(precision, where):
            loss = model.loss(ids, targets)
        loss.backward()
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
        return loss.item()

    layout = config.layout(seq_len)
    return _case(step, where, blocks=layout.nnz_total, density=layout.density)


def _causal_layout(seq_len: int, density: float) -> BlockLayout:
    """The diagonal, and of each row's other causal blocks the nearest, as many as make ``density`` of all up to that row."""
    if density == 1:
        return dense_layout(seq_len, seq_len, 64)
    n = seq_len // 64
    mask = np.zeros((n, n), bool)
    for i in range(n):
        wanted = round(density * (i + 1) * (i + 2) / 2) - mask.sum()
        mask[i, i + 1 - max(1, wanted) : i + 1] = True
    return BlockLayout(mask, 64, causal=True)


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
    where = _device(device)
    config = PythiaConfig.named("70m", vocab_size=vocab_size, max_seq_len=prompt + new_tokens)
    if pattern:
        config = config.with_sparse(pattern, block=64)
    model = Pythia(config, device=where, dtype=dtype, seed=0)
    ids = np.random.default_rng(0).integers(0, vocab_size, (batch_size, prompt))
    return _case(lambda: float(model.generate(ids, max_new_tokens=new_tokens)[0, -1]), where)


def read(megabytes: float, device: str = "cpu") -> Case:
    """The sum of an array of so many bytes: how fast memory can be read."""
    where = _device(device)
    x = ndl.ones(int(megabytes * 1e6 / 4), device=where)
    return _case(lambda: ops.summation(x).item(), where)


def attention(
    seq_len: int,
    backward: bool,
    device: str = "cpu",
    heads: int = 8,
    head_dim: int = 64,
    density: float = 1,
    batch_size: int = 1,
    pattern: str | None = None,
    dtype: str = "float32",
) -> Case:
    """Causal attention over ``density`` of the causal blocks, or those of ``pattern``; with ``backward``, all gradients too."""
    where = _device(device)
    rng = np.random.default_rng(0)
    shape = (batch_size, heads, seq_len, head_dim)
    q, k, v = (_array(rng, shape, where, requires_grad=backward, dtype=dtype) for _ in range(3))
    grad = _array(rng, shape, where, dtype=dtype)
    layout = PythiaConfig().with_sparse(pattern).layout(seq_len) if pattern else _causal_layout(seq_len, density)

    def step() -> None:
        out = ops.attention(q, k, v, layout)
        if backward:
            out.backward(grad)

    return _case(step, where, blocks=layout.nnz_total)


def product(kind: str, size: int, density: float, device: str = "cpu", dtype: str = "float32") -> Case:
    """One of sdd, dsd, dds of (size, size) matrices, the sparse one with ``density`` of its blocks."""
    where = _device(device)
    rng = np.random.default_rng(0)
    n = size // 64
    layout = BlockLayout(rng.permutation(n * n).reshape(n, n) < density * n * n, 64)
    blocks = _array(rng, (1, layout.nnz, 64, 64), where, dtype=dtype)
    a, b = (_array(rng, (1, size, size), where, dtype=dtype) for _ in range(2))
    calls = {
        "sdd": lambda: ops.sdd(a, b, layout), "dsd": lambda: ops.dsd(blocks, b, layout), "dds": lambda: ops.dds(a, blocks, layout)
    }  # fmt: skip
    return _case(lambda: calls[kind]() and None, where, blocks=layout.nnz)


def _layer(layer: nn.Module, shape: tuple[int, ...], device, dtype: str = "float32") -> Case:
    """A layer's forward and all gradients, on an input of ``shape``, which its (first) output has, too."""
    x = _array(np.random.default_rng(0), shape, device, requires_grad=True, dtype=dtype)
    grad = _array(np.random.default_rng(1), shape, device, dtype=dtype)

    def step() -> None:
        out = layer(x)
        (out[0] if isinstance(out, tuple) else out).backward(grad)

    return _case(step, device)


def conv(channels: int, side: int, batch_size: int, device: str = "cpu", dtype: str = "float32") -> Case:
    """A layer of 3 x 3 kernels on images of side x side pixels, forward and all gradients."""
    where = _device(device)
    layer = nn.Conv(channels, channels, 3, device=where, dtype=dtype)
    return _layer(layer, (batch_size, channels, side, side), where, dtype)


def residual_block(channels: int, side: int, batch_size: int, device: str = "cpu", dtype: str = "float32") -> Case:
    """Two 3 x 3 convolutions, each with batch norm and ReLU, and their input added, forward and all gradients."""
    where = _device(device)
    made = {"device": where, "dtype": dtype}
    parts = [(nn.Conv(channels, channels, 3, **made), nn.BatchNorm2d(channels, **made), nn.ReLU()) for _ in range(2)]
    block = nn.Residual(nn.Sequential(*parts[0], *parts[1]))
    return _layer(block, (batch_size, channels, side, side), where, dtype)


def recurrent(kind: str, width: int, positions: int, batch_size: int, device: str = "cpu", dtype: str = "float32") -> Case:
    """A layer of nn.RNN or nn.LSTM over a sequence, forward and all gradients."""
    where = _device(device)
    return _layer(getattr(nn, kind)(width, width, device=where, dtype=dtype), (positions, batch_size, width), where, dtype)


def batch_norm(rows: int, width: int, device: str = "cpu") -> Case:
    """A layer of nn.BatchNorm1d in training, forward and all gradients."""
    where = _device(device)
    return _layer(nn.BatchNorm1d(width, device=where), (rows, width), where)


def adds(count: int, device: str = "cpu") -> Case:
    """``count`` chained additions x + c of 4 x 4 arrays, forward and backward: nothing but overhead."""
    where = _device(device)
    x = ndl.ones(4, 4, device=where, requires_grad=True)
    c = ndl.ones(4, 4, device=where)
    grad = ndl.ones(4, 4, device=where)

    def step() -> None:
        y = x
        for _ in range(count):
            y = y + c
        y.backward(grad)

    return _case(step, where)


def loss(rows: int, vocab_size: int, dense: bool = False, width: int = 512, device: str = "cpu") -> Case:
    """The mean cross-entropy of (rows, width) @ (width, vocab_size) and both gradients; ``dense``: with whole logits."""
    where = _device(device)
    rng = np.random.default_rng(0)
    hidden = _array(rng, (rows, width), where, requires_grad=True)
    weight = ndl.Tensor(0.05 * rng.standard_normal((width, vocab_size), dtype=np.float32), device=where)
    targets = ndl.Tensor(rng.integers(0, vocab_size, rows), device=where, dtype="int32", requires_grad=False)

    def step() -> float:
        hidden.grad = weight.grad = None
        value = ops.cross_entropy(hidden @ weight, targets) if dense else ops.linear_cross_entropy(hidden, weight, targets)
        value.backward()
        return value.item()

    return _case(step, where)


def gemm(m: int, k: int, n: int, device: str = "cpu", dtype: str = "float32", own: bool = False) -> Case:
    """(m, k) @ (k, n); own: by needle's kernel where a library would do it."""
    where = _device(device)
    if own:
        where.use_cublaslt("")
    rng = np.random.default_rng(0)
    a, b = _array(rng, (m, k), where, dtype=dtype), _array(rng, (k, n), where, dtype=dtype)

    def step() -> None:
        ops.matmul(a, b)

    return _case(step, where)


if __name__ == "__main__":
    os.environ.setdefault("NEEDLE_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", ""))
    serve(pythia_step, generation, read, attention, product, conv, residual_block, recurrent, batch_norm, adds, loss, gemm)
