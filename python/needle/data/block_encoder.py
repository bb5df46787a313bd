"""Encodes blocks of text: what the threads of ``prepare`` do."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from .text_blocks import Block, Cutter, Source, texts_of
from .text_tokenizer import TextTokenizer
from .token_cache import token_dtype

_PART_BYTES = 1 << 12  # documents are encoded in parts of this size; longer parts take more time per byte
_TOGETHER = 1 << 8  # parts that are encoded by one call


class Encoded(NamedTuple):
    """A block as ids (N,) of the tokens' dtype. ends: how many ids there are up to the end of each document that ends in it. empty,
    invalid, cut: as in ``prepare.Totals``.
    """

    ids: np.ndarray
    ends: list[int]
    empty: int
    invalid: int
    cut: int


class BlockEncoder(Cutter):
    """Tokenizes blocks; many threads may call it at once."""

    def __init__(self, tokenizer: TextTokenizer, end: int | None, sources: list[Source], key: str, skip_invalid: bool):
        self._tokenizer = tokenizer
        self._sources, self._key, self._skip_invalid = sources, key, skip_invalid
        self._end = end
        self._dtype = token_dtype(tokenizer.size)
        wide = tokenizer.unchanged_by_cuts(Cutter(True).is_place)
        super().__init__(wide or tokenizer.unchanged_by_cuts(Cutter(True, True).is_place), after_letters=not wide)

    def __call__(self, block: Block) -> Encoded:
        texts: list[str] = []
        documents: list[tuple[int, bool, bool]] = []  # number of texts up to its end; whether it begins here; whether it ends here
        invalid = cut = 0
        for piece in block.pieces:
            source = self._sources[piece.at.source]
            cut += piece.cut
            for document in texts_of(piece, source, self._key, self._skip_invalid):
                if document is None:
                    invalid += 1
                    continue
                cut += self._take_apart(document, texts)
                documents.append((len(texts), source.lines or piece.at.offset == 0, source.lines or piece.last))
        ids: list[np.ndarray] = []
        ends: list[int] = []
        empty = first = count = 0
        found = self._encode(texts)
        for last, begins, stops in documents:
            before = count
            for part in itertools.islice(found, last - first):
                ids.append(part)
                count += len(part)
            first = last
            if begins and stops and count == before:
                empty += 1
            elif stops:
                if self._end is not None:
                    ids.append(np.array([self._end], self._dtype))
                    count += 1
                ends.append(count)
        return Encoded(np.concatenate(ids or [np.empty(0, self._dtype)]), ends, empty, invalid, cut)

    def _encode(self, texts: list[str]) -> Iterator[np.ndarray]:
        """The ids of each text. A few texts at a time: results of `tokenizers`, and lists, take many times the memory of ids."""
        for first in range(0, len(texts), _TOGETHER):
            for ids in self._tokenizer.encode_batch(texts[first : first + _TOGETHER]):
                yield np.array(ids, self._dtype)

    def _take_apart(self, document: bytes, texts: list[str]) -> int:
        """Adds the parts of a document to ``texts``. Returns the number of cuts that may have changed ids."""
        start = badly_cut = 0
        least = _PART_BYTES if self.exact else self.least
        while start < len(document):
            stop, badly = self.cut(document, start, least)
            texts.append(document[start:stop].decode())
            start, badly_cut = stop, badly_cut + badly
        return badly_cut


@contextlib.contextmanager
def alone_in_a_thread() -> Iterator[None]:
    """Inside, ``tokenizers`` starts no threads of its own."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before
