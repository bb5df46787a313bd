"""CIFAR-10's Python format. source: Krizhevsky 2009."""

from __future__ import annotations

import os
import pickle

import numpy as np

from ...errors import DataError
from ..data_basic import Dataset


class CIFAR10Dataset(Dataset):
    """Images (3, 32, 32) float32 in 0..1 and their classes. ``p`` is kept for the course's signature."""

    def __init__(self, base_folder: str, train: bool, p: float | None = 0.5, transforms: list | None = None):
        super().__init__(transforms)
        self.p = p
        images, labels = [], []
        for name in [f"data_batch_{i}" for i in range(1, 6)] if train else ["test_batch"]:
            path = os.path.join(base_folder, name)
            try:
                with open(path, "rb") as file:
                    batch = pickle.load(file, encoding="bytes")
            except (OSError, pickle.UnpicklingError, EOFError) as error:
                raise DataError(f"[cifar10] cannot read {path}: {error}") from error
            images.append(np.asarray(batch[b"data"]))
            labels.append(np.asarray(batch[b"labels"]))
        self.X = np.concatenate(images).reshape(-1, 3, 32, 32).astype(np.float32) / 255
        self.y = np.concatenate(labels)

    def __getitem__(self, index) -> tuple:
        image = self.X[index]
        if not self.transforms:
            return image, self.y[index]
        if image.ndim == 3:
            return self.apply_transforms(image), self.y[index]
        return np.stack([self.apply_transforms(x) for x in image]), self.y[index]

    def __len__(self) -> int:
        return len(self.y)
