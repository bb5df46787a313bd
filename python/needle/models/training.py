"""One optimizer step of a language model, and the plan of a run of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from .. import amp
from ..autograd import Tensor
from ..backend_ndarray.block_layout import BLOCK_SIZES
from ..backend_ndarray.device import BackendDevice
from ..backend_ndarray.host_memory import DATA
from ..backend_ndarray.ndarray import NDArray, full
from ..errors import DataError, ShapeError, check_count
from ..memory.planning import Build, peak_bytes, smallest
from ..memory.units import parse_bytes, readable
from ..optim import AdamW
from .pythia import Pythia, PythiaConfig


class Step(NamedTuple):
    """What ``train_step`` returns: the mean loss in nats, and the joint norm of the gradients before clipping."""

    loss: float
    grad_norm: float


def train_step(
    model: Pythia,
    optimizer: AdamW,
    micro_batches: Iterable[tuple[Tensor, ...]],
    count: int = 1,
    max_norm: float = 1.0,
    precision: str = "fp32",
    scaler: amp.GradScaler | None = None,
) -> Step:
    """One step on ``count`` micro-batches of (ids, targets), each (B, T).

    The gradient is that of the mean loss over all of them, clipped to the joint norm ``max_norm``; it is dropped after the update.
    precision: fp32, bf16 or fp16, of products. scaler: the loss scaler, for fp16; default none.
    Waits for the device between micro-batches and at the end; in fp16 before the update, too.
    raises: ShapeError for a ``count`` that is no whole number of at least 1, DataError for fewer micro-batches; IndexError for an
    id outside the vocabulary. On a GPU that comes after the update, which has made the parameters NaN.
    """
    scaler = scaler or amp.GradScaler(enabled=False)
    scaler.forget()  # Ctrl-C may have come into a step before this
    total = 0.0
    loss: Tensor | float = 0.0
    source = iter(micro_batches)
    for i in range(check_count("train_step", "count", count)):
        total += float(loss)
        batch = next(source, None)
        if batch is None:
            raise DataError(f"[train_step] micro_batches ended after {i} (accepted: at least count, {count})")
        ids, targets = batch
        with amp.autocast.named(precision, model.device):
            loss = model.loss(ids, targets)
        scaler.scale(loss if count == 1 else loss * (1 / count)).backward(accumulate=i > 0)
        loss = loss.detach()  # read when the update is on its way too, or a GPU would stand idle until that comes
        del batch, ids, targets
    scaler.unscale_(optimizer)
    norm = optimizer.clip_grad_norm(max_norm)
    scaler.step(optimizer)
    optimizer.reset_grad()
    scaler.update()
    return Step((total + float(loss)) / count, float(norm))


def plannable(config: PythiaConfig, batch_size: int, seq_len: int, accumulation_steps: int = 1, precision: str = "fp32") -> Build:
    """The ``build`` of ``needle.memory.plan`` for training with AdamW: what ``train_step`` allocates, with ids that are all zero.

    batch_size, seq_len: of a micro-batch. accumulation_steps: micro-batches of a step; more than two hold no more memory than two,
    and are planned as that. precision: as in ``train_step``.
    """
    count = min(accumulation_steps, 2)

    def build(device: BackendDevice):
        model = Pythia(config, device=device)
        optimizer = AdamW(model.parameter_groups(0.1))
        scaler = amp.GradScaler(enabled=precision == "fp16")
        batch = lambda: tuple(_as_data(full((batch_size, seq_len), 0, "int32", device)) for _ in range(2))  # noqa: E731
        source = iter(batch, None)
        return lambda: train_step(model, optimizer, source, count, precision=precision, scaler=scaler)

    return build


def _as_data(array: NDArray) -> Tensor:
    """``array`` as if it came from numpy, where that of a large plan would not fit into this machine."""
    array.category = DATA
    return Tensor.make_const(array)


def checkpointed(
    config: PythiaConfig,
    checkpoint_layers: int | str,
    batch_size: int,
    seq_len: int,
    accumulation_steps: int = 1,
    precision: str = "fp32",
) -> PythiaConfig:
    """``config`` with layers checkpointed.

    checkpoint_layers: a number: as in PythiaConfig. An amount of memory like "600MiB": as few layers, one at a time, as keep the
    planned peak of training within it; if all of them are not enough, all of them, two or more at a time. The rest: as in
    ``plannable``.
    raises: ShapeError if that is not enough either.
    """
    if not isinstance(checkpoint_layers, str):
        return replace(config, checkpoint_layers=checkpoint_layers)
    limit = parse_bytes(checkpoint_layers, "checkpoint_layers")

    @cache
    def peak_of(layers: int | tuple[int, ...]) -> int:
        changed = replace(config, checkpoint_layers=layers)
        return peak_bytes(plannable(changed, batch_size, seq_len, accumulation_steps, precision))

    ways = sorted({-(-config.layers // parts) for parts in range(1, config.layers + 1)})
    best = 1 if peak_of(1) <= limit else min(ways, key=peak_of)
    if peak_of(best) > limit:
        least = f"at least {readable(peak_of(best))}, {peak_of(best):,} bytes"
        raise ShapeError(f"[checkpoint_layers] {readable(limit)} is not enough (accepted: {least})")
    layers = best if best > 1 else (1,) * smallest(lambda n: peak_of((1,) * n), limit, config.layers)
    return replace(config, checkpoint_layers=layers)


def check_blocks(seq_len: int, block: int) -> None:
    """raises: ShapeError if sequences for block-sparse attention are not whole blocks, of a size that the kernels take."""
    if block not in BLOCK_SIZES:
        raise ShapeError(f"[block_size] is {block} (accepted: multiples of 16 up to 128)")
    if seq_len % block:
        nearest = max(seq_len // block, 1) * block
        raise ShapeError(f"[seq_len] is {seq_len}, no multiple of the block size {block} (accepted: {nearest}, for example)")


def layers_or_bytes(text: str) -> int | str:
    """``checkpoint_layers`` from a command line. raises: ShapeError for what is neither a count nor an amount of memory."""
    try:
        return int(text)
    except ValueError:
        parse_bytes(text, "checkpoint_layers")
        return text
