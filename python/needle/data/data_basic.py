"""Data sets by index, and the loader that makes batches of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..autograd import Tensor


class Dataset:
    """Items by index, with transforms applied to the first array of each."""

    def __init__(self, transforms: list | None = None):
        self.transforms = transforms

    def __getitem__(self, index) -> tuple:
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError

    def apply_transforms(self, x):
        """x after all transforms, in their order."""
        for transform in self.transforms or ():
            x = transform(x)
        return x


class DataLoader:
    """Batches of a data set as tuples of Tensors, float32 on the default device, without gradient; the last may be short.

    The data set is asked for all items of a batch at once, by an array of indices. shuffle: draw one permutation per pass from
    numpy's global stream.
    """

    def __init__(self, dataset: Dataset, batch_size: int | None = 1, shuffle: bool = False):
        self.dataset = dataset
        self.batch_size = batch_size or 1
        self.shuffle = shuffle
        self.ordering: list[np.ndarray] = []
        self._next = 0

    def _order(self) -> None:
        n = len(self.dataset)
        order = np.random.permutation(n) if self.shuffle else np.arange(n)
        self.ordering = np.array_split(order, range(self.batch_size, n, self.batch_size))

    def __iter__(self) -> Iterator:
        self._order()
        self._next = 0
        return self

    def __next__(self) -> tuple[Tensor, ...]:
        if self._next >= len(self.ordering):
            raise StopIteration
        batch = self.dataset[self.ordering[self._next]]
        self._next += 1
        return tuple(Tensor(part, requires_grad=False) for part in batch)

    def __len__(self) -> int:
        return -(-len(self.dataset) // self.batch_size)
