"""Transforms of images (H, W, C). Random numbers come from numpy's global stream."""

from __future__ import annotations

import numpy as np

from ..errors import check_count, check_number


class Transform:
    """A function of an image: ``__call__(x)`` gives it changed."""

    def __call__(self, x):
        raise NotImplementedError


class RandomFlipHorizontal(Transform):
    """Mirrors the image with probability p. raises: TypeError or ValueError for a p that is no number from 0 to 1."""

    def __init__(self, p=0.5):
        check_number("RandomFlipHorizontal", "p", p, most=1)
        self.p = p

    def __call__(self, img):
        return img[:, ::-1, :] if np.random.rand() < self.p else img


class RandomCrop(Transform):
    """Shifts the image by up to ``padding`` pixels each way; zeros come in. raises: ShapeError for no whole number from 0."""

    def __init__(self, padding=3):
        self.padding = check_count("RandomCrop", "padding", padding, 0)

    def __call__(self, img):
        p = self.padding
        shift_x, shift_y = np.random.randint(low=-p, high=p + 1, size=2)
        padded = np.pad(img, ((p, p), (p, p), (0, 0)))
        height, width = img.shape[:2]
        return padded[p + shift_x : p + shift_x + height, p + shift_y : p + shift_y + width, :]
