"""A shuffled order of any length that takes no memory."""

from __future__ import annotations

import math

import numpy as np

_ROUNDS = 8


def shuffled(places: np.ndarray, count: int, seed: int, epoch: int) -> np.ndarray:
    """The values at ``places`` of a permutation of range(count), which ``seed`` and ``epoch`` alone determine: (n,) int64.

    places: (n,) integers in range(count).
    source: the generalized Feistel cipher with cycle walking of Black & Rogaway 2002, "Ciphers with arbitrary finite domains". A
    number is a pair (row, column) on the smallest grid that holds ``count`` cells. Each round adds a hash of one half to the
    other, which is invertible. A result outside range(count) goes through the rounds again.
    """
    rows = math.isqrt(count - 1) + 1
    columns = -(-count // rows)
    keys = np.random.SeedSequence((seed, epoch)).generate_state(_ROUNDS, np.uint64)
    out = np.array(places, np.uint64)
    walking = np.arange(len(out))
    while len(walking):
        row, column = np.divmod(out[walking], np.uint64(columns))
        for i in range(0, _ROUNDS, 2):
            row = (row + _hash(column ^ keys[i]) % np.uint64(rows)) % np.uint64(rows)
            column = (column + _hash(row ^ keys[i + 1]) % np.uint64(columns)) % np.uint64(columns)
        out[walking] = row * np.uint64(columns) + column
        walking = walking[out[walking] >= count]
    return out.astype(np.int64)


def _hash(x: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele, Lea & Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
