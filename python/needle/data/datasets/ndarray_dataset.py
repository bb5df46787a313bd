"""Arrays in memory as a data set."""

from __future__ import annotations

import numpy as np

from ...errors import DataError
from ..data_basic import Dataset


class NDArrayDataset(Dataset):
    """Arrays of one length, indexed together: numpy's, or what numpy takes for one. raises: DataError if the lengths differ."""

    def __init__(self, *arrays):
        super().__init__()
        arrays = tuple(np.asarray(a) for a in arrays)
        lengths = [len(a) if a.ndim else None for a in arrays]
        if len(set(lengths)) != 1 or None in lengths:
            raise DataError(f"[NDArrayDataset] the arrays' lengths are {lengths} (accepted: one array or more, of one length)")
        self.arrays = arrays

    def __len__(self) -> int:
        return len(self.arrays[0])

    def __getitem__(self, i) -> tuple:
        return tuple(a[i] for a in self.arrays)
