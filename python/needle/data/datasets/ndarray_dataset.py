from __future__ import annotations

from ..data_basic import Dataset


class NDArrayDataset(Dataset):
    """Arrays indexed together; the length is the first one's."""

    def __init__(self, *arrays):
        super().__init__()
        self.arrays = arrays

    def __len__(self) -> int:
        return self.arrays[0].shape[0]

    def __getitem__(self, i) -> tuple:
        return tuple(a[i] for a in self.arrays)
