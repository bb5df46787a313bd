"""Penn Treebank as the course reads it: words, one line a sentence."""

from __future__ import annotations

import os

import numpy as np

from ... import files
from ...autograd import Tensor
from ...errors import DataError, check_count


class Dictionary:
    """Words and their ids, in order of appearance."""

    def __init__(self) -> None:
        self.word2idx: dict[str, int] = {}
        self.idx2word: list[str] = []

    def add_word(self, word: str) -> int:
        """The id of ``word``, a new one if it was not there."""
        if word not in self.word2idx:
            self.word2idx[word] = len(self.idx2word)
            self.idx2word.append(word)
        return self.word2idx[word]

    def __len__(self) -> int:
        return len(self.idx2word)


class Corpus:
    """train.txt and test.txt of a folder as lists of ids, '<eos>' after each line.

    max_lines: how many lines of each file are read at most, None for all. raises: DataError if one cannot be read.
    """

    def __init__(self, base_dir: str, max_lines: int | None = None):
        self.dictionary = Dictionary()
        self.train = self.tokenize(os.path.join(base_dir, "train.txt"), max_lines)
        self.test = self.tokenize(os.path.join(base_dir, "test.txt"), max_lines)

    def tokenize(self, path: str, max_lines: int | None = None) -> list[int]:
        """Ids of the words of a file, new words getting new ids. raises: DataError if it cannot be read."""
        ids = []
        try:
            with open(path, encoding="utf-8") as file:
                for number, line in enumerate(file):
                    if max_lines is not None and number >= max_lines:
                        break
                    ids += [self.dictionary.add_word(word) for word in [*line.split(), "<eos>"]]
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"[ptb] cannot read {path}: {files.reason(error)}") from error
        return ids


def batchify(data, batch_size: int, device, dtype) -> np.ndarray:
    """(len(data) // batch_size, batch_size): column b is the b-th piece of the text; what is left over is cut.

    dtype: of the array, which is numpy's. device: without effect; ``get_batch`` takes one.
    raises: DataError for more columns than ids, or less than one: there would be nothing to train on.
    """
    batch_size = check_count("batchify", "batch_size", batch_size, 1, len(data), DataError)
    rows = len(data) // batch_size
    return np.array(data[: rows * batch_size], dtype=dtype).reshape(batch_size, rows).T


def get_batch(batches: np.ndarray, i: int, bptt: int, device=None, dtype=None) -> tuple[Tensor, Tensor]:
    """Positions i .. i + bptt as X (positions, batch), and what follows each as y (positions * batch,).

    raises: DataError for an i that is no position before the last, or a bptt below 1.
    """
    i = check_count("get_batch", "i", i, 0, max(len(batches) - 2, 0), DataError)
    n = min(check_count("get_batch", "bptt", bptt, error=DataError), len(batches) - 1 - i)
    parts = batches[i : i + n], batches[i + 1 : i + 1 + n].reshape(-1)
    X, y = (Tensor(part, device=device, dtype=dtype, requires_grad=False) for part in parts)
    return X, y
