"""Data sets by index, and the loader that makes batches of them."""

from __future__ import annotations

from collections import deque

import numpy as np

from ..autograd import Tensor
from ..backend_selection import Device, as_device
from ..errors import check_count, check_flag, type_name

_BATCH = "accepted: all items of a batch at once, as x[indices] of numpy gives them"


class Dataset:
    """Items by index, with transforms applied to the first array of each. An index is an int; a loader gives an array of ints."""

    def __init__(self, transforms: list | None = None):
        self.transforms = transforms

    def __getitem__(self, index) -> tuple:
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError

    def apply_transforms(self, x):
        """One item, not a batch, after all transforms, in their order."""
        for transform in self.transforms or ():
            x = transform(x)
        return x

    def _transformed(self, images: np.ndarray) -> np.ndarray:
        """One image, or several of them, each after all transforms."""
        if not len(images):
            return images
        if images.ndim == 3 or not self.transforms:
            return self.apply_transforms(images)
        return np.stack([self.apply_transforms(image) for image in images])


class DataLoader:
    """Batches of a data set as tuples of Tensors, float32 on ``device`` (the default one), without gradient; the last may be short.
    What the data set gives as a Tensor or NDArray keeps its dtype and, where no ``device`` is given, its device.

    The data set is asked for all items of a batch at once, by an array of indices; if it gives no tuple or list, batches have one
    part. batch_size: None stands for 1. shuffle: draw one permutation per pass from numpy's global stream, when the pass
    begins. As in the course the loader is its own iterator: starting a pass ends the one before.
    raises: ValueError for another batch_size than a whole number of at least 1; TypeError for what has no items or no length and,
    from ``next``, for a data set that takes one index only, and for a part whose first axis is not that of the items.
    """

    def __init__(self, dataset: Dataset, batch_size: int | None = 1, shuffle: bool = False, device: Device | str | None = None):
        check_flag("DataLoader", "shuffle", shuffle)
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise TypeError(f"[DataLoader] dataset is of type {type_name(dataset)} (accepted: a Dataset, with items and a length)")
        self.dataset = dataset
        self.batch_size = 1 if batch_size is None else check_count("DataLoader", "batch_size", batch_size, error=ValueError)
        self.shuffle = shuffle
        self.device = None if device is None else as_device(device)
        self.ordering: list[np.ndarray] = []
        self._left: deque[np.ndarray] = deque()

    def __iter__(self) -> DataLoader:
        n = len(self.dataset)
        order = np.random.permutation(n) if self.shuffle else np.arange(n)
        self.ordering = [order[i : i + self.batch_size] for i in range(0, n, self.batch_size)]
        self._left = deque(self.ordering)
        return self

    def __next__(self) -> tuple[Tensor, ...]:
        left = self._left
        try:
            indices = left.popleft()  # at once: another thread may take the next batch
        except IndexError:
            raise StopIteration from None
        try:
            parts = self._items(indices)
        except BaseException:  # Ctrl-C too: no item is left out by it
            left.appendleft(indices)
            raise
        if isinstance(parts, dict):
            raise TypeError(f"[DataLoader] {type(self.dataset).__name__} gave a dict (accepted: an array, or a tuple of arrays)")
        parts = parts if isinstance(parts, (tuple, list)) else (parts,)
        batch = tuple(Tensor(part, device=self.device, requires_grad=False) for part in parts)
        for part in batch:
            if part.shape[:1] != indices.shape:  # one item, or the items along another axis: what was meant for one index
                gave = f"{type(self.dataset).__name__} gave a part of shape {part.shape} for {len(indices)} items"
                raise TypeError(f"[DataLoader] {gave} ({_BATCH})")
        return batch

    def _items(self, indices: np.ndarray):
        try:
            return self.dataset[indices]
        except Exception as error:  # an array in the place of an int fails in any way, and in words that name no index
            try:
                for index in indices:
                    self.dataset[int(index)]  # one that fails by itself says what is wrong
            except StopIteration as ended:  # which would pass for the end of the pass
                raise RuntimeError(f"[DataLoader] {type(self.dataset).__name__} raised StopIteration for an item") from ended
            wrong = f"{type(self.dataset).__name__} takes one index, no array of them"
            raise TypeError(f"[DataLoader] {wrong} ({_BATCH})") from error

    def __len__(self) -> int:
        return -(-len(self.dataset) // self.batch_size)
