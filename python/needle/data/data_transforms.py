"""Transforms of an image (H, W, C), one at a time. Random numbers come from numpy's global stream."""

from __future__ import annotations

import numpy as np

from ..errors import ShapeError, check_count, check_number


class Transform:
    """A function of an image: ``__call__(x)`` gives it changed."""

    def __call__(self, x):
        raise NotImplementedError


def _check_image(transform: str, img: np.ndarray) -> None:
    if img.ndim != 3:
        raise ShapeError(f"[{transform}] image has shape {img.shape} (accepted: (H, W, C), and of a batch one after the other)")


class RandomFlipHorizontal(Transform):
    """Mirrors the image with probability p. raises: TypeError or ValueError for a p that is no number from 0 to 1;
    ShapeError for what is not (H, W, C)."""

    def __init__(self, p=0.5):
        check_number("RandomFlipHorizontal", "p", p, most=1)
        self.p = p

    def __call__(self, img):
        _check_image("RandomFlipHorizontal", img)
        return img[:, ::-1, :] if np.random.rand() < self.p else img


class RandomCrop(Transform):
    """Shifts the image by up to ``padding`` pixels each way; zeros come in. raises: ShapeError for no whole number from 0, and for
    what is not (H, W, C)."""

    def __init__(self, padding=3):
        self.padding = check_count("RandomCrop", "padding", padding, 0)

    def __call__(self, img):
        _check_image("RandomCrop", img)
        p = self.padding
        down, right = np.random.randint(low=-p, high=p + 1, size=2)
        height, width, channels = img.shape
        padded = np.zeros((height + 2 * p, width + 2 * p, channels), img.dtype)  # np.pad takes seven times as long
        padded[p : p + height, p : p + width] = img
        return padded[p + down : p + down + height, p + right : p + right + width]
