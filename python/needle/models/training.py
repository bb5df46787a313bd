"""One optimizer step of a language model, and the plan of a run of them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..autograd import Tensor
from ..backend_ndarray.device import BackendDevice
from ..memory.planning import Build
from ..optim import AdamW
from .pythia import Pythia, PythiaConfig


def train_step(
    model: Pythia, optimizer: AdamW, micro_batches: Iterable[tuple[Tensor, ...]], count: int = 1, max_norm: float = 1.0
) -> float:
    """One step on ``count`` micro-batches of (ids, targets), each (B, T); the mean of their losses, in nats.

    The gradient is that of the mean over all of them, its norm clipped to ``max_norm``; none is left afterwards.
    """
    total = 0.0
    source = iter(micro_batches)
    for _ in range(count):
        ids, targets = next(source)
        loss = model.loss(ids, targets)
        (loss if count == 1 else loss * (1 / count)).backward(accumulate=count > 1)
        total += loss.item()
        del ids, targets, loss
    optimizer.clip_grad_norm(max_norm)
    optimizer.step()
    optimizer.reset_grad()
    return total / count


def plannable(config: PythiaConfig, batch_size: int, seq_len: int, accumulation_steps: int = 1) -> Build:
    """The ``build`` of ``needle.memory.plan`` for training with AdamW: what ``train_step`` allocates, with ids that are all
    zero.
    """

    def build(device: BackendDevice):
        model = Pythia(config, device=device)
        optimizer = AdamW(model.parameter_groups(0.1))

        zeros = np.zeros((batch_size, seq_len), np.int32)
        batch = lambda: tuple(Tensor(zeros, device=device, dtype="int32", requires_grad=False) for _ in range(2))  # noqa: E731
        source = iter(batch, None)
        return lambda: train_step(model, optimizer, source, accumulation_steps)

    return build
