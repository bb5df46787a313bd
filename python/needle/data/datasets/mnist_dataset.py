"""MNIST's file format. source: LeCun, Cortes & Burges, the MNIST database."""

from __future__ import annotations

import struct

import numpy as np

from ... import files
from ...errors import DataError
from ..data_basic import Dataset

IMAGES_MAGIC, LABELS_MAGIC = 2051, 2049
SIDE = 28  # of an image, in pixels


def _read(path: str, header: int, item: int) -> bytes:
    """The header, as many items as that says, and at most one byte behind them, if there are more."""
    import gzip  # here, not above: few programs read MNIST, and all import this
    import zlib

    try:
        with gzip.open(path, "rb") as file:
            begin = file.read(header)
            return begin + file.read(int.from_bytes(begin[4:8], "big") * item + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"[mnist] cannot read {path}: {files.reason(error)} (a gzip-compressed MNIST file)") from error


def parse_mnist(image_filename: str, label_filename: str) -> tuple[np.ndarray, np.ndarray]:
    """(images (n, 784) float32 in 0..1, labels (n,) uint8). raises: DataError for other or truncated files."""
    images, labels = _read(image_filename, 16, SIDE * SIDE), _read(label_filename, 8, 1)
    if len(images) < 16 or len(labels) < 8:
        raise DataError(f"[mnist] {image_filename} or {label_filename} is truncated")
    magic, n, rows, cols = struct.unpack(">IIII", images[:16])
    label_magic, label_count = struct.unpack(">II", labels[:8])
    if (magic, rows, cols) != (IMAGES_MAGIC, SIDE, SIDE) or label_magic != LABELS_MAGIC or n != label_count:
        raise DataError(f"[mnist] {image_filename} and {label_filename} are not images and labels of one MNIST set")
    for path, found, wanted in ((image_filename, len(images), 16 + n * rows * cols), (label_filename, len(labels), 8 + n)):
        if found != wanted:
            how = f"is truncated: {found} bytes" if found < wanted else "goes on behind its end"
            raise DataError(f"[mnist] {path} {how} (accepted: {wanted} bytes for {n} items)")
    pixels = np.frombuffer(images, np.uint8, offset=16).reshape(n, rows * cols).astype(np.float32)
    return pixels / np.float32(255), np.frombuffer(labels, np.uint8, offset=8).copy()


class MNISTDataset(Dataset):
    """Images as (28, 28, 1) for one item, (n, 28, 28, 1) for several; transforms see one image at a time."""

    def __init__(self, image_filename: str, label_filename: str, transforms: list | None = None):
        super().__init__(transforms)
        images, self.labels = parse_mnist(image_filename, label_filename)
        self.images = images.reshape(-1, SIDE, SIDE, 1)

    def __getitem__(self, index) -> tuple:
        return self._transformed(self.images[index]), self.labels[index]

    def __len__(self) -> int:
        return len(self.labels)
