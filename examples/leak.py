"""A leak, found and named, then mended: python examples/leak.py

After each training step the model looks at a held-out batch and keeps the loss Tensor on ``self`` for later. No backward frees that
graph, so the Tensor holds it with all of its arrays, and memory grows at every step. needle says who does it.
"""

from __future__ import annotations

import warnings

import numpy as np

import needle as ndl
from needle import memory, nn
from needle.optim import SGD


class Judged(nn.Module):
    """A network that remembers how well it did on held-out data."""

    def __init__(self, mend: bool):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
        self.loss_of, self.mend = nn.SoftmaxLoss(), mend
        self.history: list[ndl.Tensor] = []

    def loss(self, x: ndl.Tensor, y: ndl.Tensor) -> ndl.Tensor:
        return self.loss_of(self.layers(x), y)

    def judge(self, x: ndl.Tensor, y: ndl.Tensor) -> None:
        loss = self.loss(x, y)
        self.history.append(loss.detach() if self.mend else loss)


def train(mend: bool, steps: int = 12) -> tuple[list[int], list[memory.Leak]]:
    """Bytes live on the device after each step, and what is found at the end."""
    rng = np.random.default_rng(0)
    model = Judged(mend)
    optimizer = SGD(model.parameters(), lr=0.1)
    x = ndl.Tensor(rng.standard_normal((64, 256)), requires_grad=False)
    y = ndl.Tensor(rng.integers(0, 10, 64), requires_grad=False)
    live = []
    with memory.LeakCheck() as check:
        for _ in range(steps):
            model.loss(x, y).backward()
            optimizer.step()
            optimizer.reset_grad()
            model.judge(x, y)
            check.step()
            live.append(memory.stats().live)
        return live, memory.leaks()


def main() -> None:
    for mend in (False, True):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            live, leaks = train(mend)
        print("with .detach():" if mend else "as it was written:")
        print(f"  live after step 2: {memory.readable(live[1])}, after step {len(live)}: {memory.readable(live[-1])}")
        for warning in caught:
            print(f"  {warning.category.__name__} after the second step: {warning.message}")
        for leak in leaks:
            print(f"  leaks() at the end: {leak}")


if __name__ == "__main__":
    main()
