"""CIFAR-10's Python format. source: Krizhevsky 2009."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from ... import files
from ...errors import DataError, check_flag, check_number
from ..data_basic import Dataset


class _Type:
    """Stands for numpy's dtype while a file is loaded: by a state of that, the file could name any memory."""

    def __init__(self, code: str, *_: Any):
        self.code, self.order = code, "|"

    def __setstate__(self, state: tuple) -> None:
        self.order = state[1]

    def values(self, data: Any, shape: tuple, order: Any) -> np.ndarray:
        if not re.fullmatch(r"[biuf][1248]", self.code):
            raise pickle.UnpicklingError(f"it has an array of {self.code}, which no file of CIFAR-10 has")
        return np.frombuffer(data, np.dtype(self.order + self.code)).reshape(shape, order=order)


class _Array:
    """Stands for numpy's array likewise."""

    def __setstate__(self, state: tuple) -> None:
        _, shape, dtype, is_fortran, data = state
        self.array = dtype.values(data, shape, "F" if is_fortran else "C")

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self.array


_MAKERS: dict[str, Callable] = {
    "numpy.ndarray": _Array,
    "numpy.dtype": _Type,
    "_codecs.encode": lambda text, _: text.encode("latin1"),  # bytes, in protocols that have none
    "multiarray._reconstruct": lambda *_: _Array(),
    "numeric._frombuffer": lambda data, dtype, shape, order, *_: dtype.values(data, shape, order),
}


class _Unpickler(pickle.Unpickler):
    """Loads tables of arrays and lists, and calls nothing but the above: a pickle can name any function."""

    def find_class(self, module: str, name: str) -> Any:
        maker = re.sub(r"^numpy\._?core\.", "", f"{module}.{name}")
        if maker not in _MAKERS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no file of CIFAR-10 does")
        return _MAKERS[maker]


class CIFAR10Dataset(Dataset):
    """Images (3, 32, 32) float32 in 0..1 and their classes. ``p`` is kept for the course's signature.

    raises: DataError for files that are missing or no part of CIFAR-10; TypeError for a ``train`` that is neither True nor False.
    """

    def __init__(self, base_folder: str, train: bool, p: float | None = 0.5, transforms: list | None = None):
        super().__init__(transforms)
        check_flag("CIFAR10Dataset", "train", train)
        if p is not None:
            check_number("CIFAR10Dataset", "p", p, most=1)  # MNISTDataset has the transforms in this place
        self.p = p
        images, labels = [], []
        for name in [f"data_batch_{i}" for i in range(1, 6)] if train else ["test_batch"]:
            path = os.path.join(base_folder, name)
            try:
                with open(path, "rb") as file:
                    batch = _Unpickler(file, encoding="bytes").load()
                images.append(np.asarray(batch[b"data"]).reshape(-1, 3, 32, 32))
                labels.append(np.asarray(batch[b"labels"]).reshape(len(images[-1])))
            except Exception as error:  # damaged pickles fail in any way
                raise DataError(f"[cifar10] cannot read {path}: {type(error).__name__}: {files.reason(error)}") from error
        self.X = np.concatenate(images).astype(np.float32) / 255
        self.y = np.concatenate(labels)

    def __getitem__(self, index) -> tuple:
        images = self._transformed(np.moveaxis(self.X[index], -3, -1))  # transforms are of (H, W, C)
        return np.moveaxis(images, -1, -3), self.y[index]

    def __len__(self) -> int:
        return len(self.y)
