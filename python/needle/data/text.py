"""Text for language models: a corpus becomes two memory-mapped token files, or is one already, and these become batches.

    text = load_text("stdlib", vocab_size=10_000)
    for ids, targets in TokenBatches(text.train, batch_size=2, seq_len=512, seed=0):   # endless; (2, 512) int32 each
        ...

Everything here is numpy. Batches are made when asked for, from a position that can be saved and restored.
"""

from __future__ import annotations

import hashlib
import mmap
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from .. import config
from ..errors import DataError, check_count
from ..files import home, try_folder, writing
from .shuffle import shuffled
from .text_corpus import HELD_OUT_FRACTION, Corpus, load_corpus
from .text_tokenizer import (
    DEFAULT_VOCABULARY,
    END_OF_TEXT,
    SMALLEST_VOCABULARY,
    TOKENIZER,
    TextTokenizer,
    load_tokenizer,
    train_tokenizer,
)
from .token_cache import is_as_written, read_tokens, write_checksum, write_tokens
from .token_files import find_token_file, read_token_file, sample, tokenizer_beside, tokenizer_for

_FORMAT = "5"  # part of the cache key: change it when the same input would give other tokens
_ORDER = 2  # part of a saved position: change it when the same seed would give another order
_LOOKED_AT_TOKENS = 1 << 24  # of a text, which may have more than can be read before every run
_MOST_HELD_OUT_TOKENS = 10_000_000


@dataclass(frozen=True)
class TextData:
    """A corpus as ids below ``vocab_size``: ``train`` and ``held_out`` are (tokens,) integers and memory-mapped.

    A token file has no ``corpus``, and a ``tokenizer`` only if one was given or lies beside it. sequence_tokens: the length of its
    sequences, if all have the same.
    """

    name: str
    train: np.ndarray
    held_out: np.ndarray
    vocab_size: int
    tokenizer: TextTokenizer | None
    corpus: Corpus | None
    sequence_tokens: int | None = None

    def stride(self, seq_len: int) -> int:
        """Tokens from one window to the next. If each sequence is as long as a window with its last target, like those of Pythia's
        own data, the windows are the sequences.
        """
        return seq_len + 1 if self.sequence_tokens == seq_len + 1 else seq_len


def load_text(
    dataset: str = "stdlib",
    *,
    vocab_size: int | None = None,
    tokenizer: str | Path | None = None,
    data_dir: str | Path = "data",
    cache_dir: str | Path | None = None,
) -> TextData:
    """Tokenize ``dataset`` (see ``load_corpus``), or find it tokenized in the cache; or map a token file (``find_token_file``).

    ``tokenizer`` is a tokenizer.json; without it, byte-level BPE with ``vocab_size`` ids (default 10,000) is trained on
    the training text. With it, ``vocab_size`` is the model's, which may be larger than the tokenizer's (the default).
    ``data_dir``: where ``wikitext-2`` is looked for. ``cache_dir``: default $NEEDLE_CACHE, or ~/.cache/needle. A cached file is
    complete or absent.

    Of a token file the end is held out: a twentieth, at most 10 million tokens, beginning with a sequence unless that would leave
    less than half of these. Its tokenizer is PREFIX.tokenizer.json; one that is given instead must have the same ids. The file's
    ids are checked in a sample of 16 million; every batch checks its own.

    raises: DataError, in one line, for a data set, text, tokenizer or vocabulary that cannot be used.
    """
    token_file = find_token_file(dataset)
    if token_file is not None:
        return _load_token_file(token_file, vocab_size, tokenizer)
    if tokenizer is not None:
        tokenizer = home(tokenizer)
        encoder = load_tokenizer(tokenizer)
        vocab_size = _vocabulary(vocab_size, encoder)
        tokenizer_key = hashlib.sha256(encoder.to_json().encode()).hexdigest()  # however it is written
        if encoder.end_of_text != encoder.tokenizer.token_to_id(END_OF_TEXT):
            tokenizer_key += f" {encoder.end_of_text}"
    else:
        vocab_size = DEFAULT_VOCABULARY if vocab_size is None else vocab_size
        tokenizer_key = f"bpe {vocab_size}"

    cache = home(cache_dir or config.get("NEEDLE_CACHE") or "~/.cache/needle")
    if cache.parts[:1] == ("~",):
        raise DataError("[NEEDLE_CACHE] there is no home folder to keep tokens in (a folder)")
    corpus = load_corpus(dataset, data_dir=data_dir, cache_dir=cache)
    key = hashlib.sha256(f"{_FORMAT} {corpus.key} {tokenizer_key}".encode()).hexdigest()[:16]
    folder = cache / "tokens" / f"{corpus.name[:50]}-{key}"  # a name has at most 255 bytes, four for a character
    if not (folder / "held_out.bin").is_file():  # the last to be written: a folder that takes no files is found before the work
        with writing(cache, "NEEDLE_CACHE" if cache_dir is None else "files"):
            try_folder(folder.parent)
    trained_path = folder / TOKENIZER
    cached = True
    if tokenizer is None:
        kept = _kept_tokenizer(trained_path)
        cached = kept is not None
        most = SMALLEST_VOCABULARY + corpus.train_bytes // 2  # what is merged occurs twice
        if vocab_size > most:
            asked = f"{vocab_size} ids asked (vocab_size: at most {most})"
            raise DataError(f"[{corpus.name}] too little text for the vocabulary: {asked}")
        texts = (part for piece in corpus.train for part in piece.texts(corpus.name))
        encoder = kept or train_tokenizer(trained_path, texts, vocab_size, corpus.name)
        if not cached:
            write_checksum(trained_path)

    arrays = {}
    for split, pieces in (("train", corpus.train), ("held_out", corpus.held_out)):
        path = folder / f"{split}.bin"
        ids = read_tokens(path) if cached else None
        if ids is None:
            documents = (piece.texts(corpus.name) for piece in pieces)
            ids = write_tokens(path, encoder.encode_documents(documents), encoder.size)
        arrays[split] = ids
    return TextData(corpus.name, arrays["train"], arrays["held_out"], vocab_size, encoder, corpus)


def _load_token_file(path: Path, vocab_size: int | None, tokenizer: str | Path | None) -> TextData:
    beside, found = tokenizer_beside(path), tokenizer_for(path, tokenizer)
    encoder = load_tokenizer(found) if found is not None else None
    if encoder is not None and found != beside and beside.is_file():
        its_own = load_tokenizer(beside)
        if not encoder.extends(its_own):
            wanted = "the tokenizer that it was made with"
            raise DataError(f"[{path.name}] its ids are those of {beside.name}, not of {found} ({wanted})")
        encoder.end_of_text = its_own.end_of_text  # with which its documents end
    if encoder is not None:
        vocab_size = _vocabulary(vocab_size, encoder)
    elif vocab_size is None:
        raise DataError(f"[{path.name}] neither a vocabulary nor a tokenizer (one of vocab_size, tokenizer and {beside.name})")
    file = read_token_file(path, vocab_size)
    for piece in sample(file.tokens, _LOOKED_AT_TOKENS):
        low, high = int(piece.min()), int(piece.max())
        if low < 0 or high >= vocab_size:
            raise DataError(
                f"[{path.name}] token id outside the vocabulary: {low if low < 0 else high} "
                f"(0 to {vocab_size - 1}; is vocab_size right?)"
            )
    count = len(file.tokens)
    held = min(max(int(count * HELD_OUT_FRACTION), 1), _MOST_HELD_OUT_TOKENS)
    cut = file.sequence_at(count - held)
    if count - cut < held / 2:  # long documents
        cut = count - held
    return TextData(path.name, file.tokens[:cut], file.tokens[cut:], vocab_size, encoder, None, file.sequence_tokens)


def _vocabulary(vocab_size: int | None, tokenizer: TextTokenizer) -> int:
    """The model's vocabulary, by default the tokenizer's. raises: DataError if it is smaller."""
    if vocab_size is not None and vocab_size < tokenizer.size:
        raise DataError(f"[vocab_size] smaller than the tokenizer's: {vocab_size} ({tokenizer.size} or more)")
    return tokenizer.size if vocab_size is None else vocab_size


def _kept_tokenizer(path: Path) -> TextTokenizer | None:
    """The tokenizer in the cache; None if the file is absent or damaged, and is to be made again."""
    try:
        return load_tokenizer(path) if is_as_written(path) else None
    except DataError:
        return None


class TokenBatches(Iterator):
    """Batches (ids, targets), each (B, T) int32, from a flat array of tokens; ``targets`` are ``ids`` one token later.

    The tokens are cut into windows of T that follow one another, so each token but the first is a target once per
    epoch (a tail shorter than T is left out). Epochs differ in the order of windows, which depends on ``seed`` and the
    epoch alone. Windows run on from one epoch into the next, so every batch is full; with ``epochs`` given, the last
    batch may have fewer rows.

    tokens: (tokens,) integers, for instance memory-mapped. vocab_size: ids must be below it; checked as batches are
    made. max_tokens: use only so many tokens from the start. epochs: None runs for ever. shuffle: False takes the windows as they
    lie. stride: tokens from one window to the next, default T. name: for error messages.
    raises: DataError for too few tokens, what are no whole numbers and counts below 1, and from ``next`` for an id outside the
    vocabulary and for a file that has become shorter.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        batch_size: int,
        seq_len: int,
        seed: int = 0,
        *,
        vocab_size: int | None = None,
        max_tokens: int | None = None,
        epochs: int | None = None,
        shuffle: bool = True,
        stride: int | None = None,
        name: str = "text",
    ):
        count = partial(check_count, name, error=DataError)
        self.batch_size, self.seq_len = count("batch_size", batch_size), count("seq_len", seq_len)
        self.stride = self.seq_len if stride is None else count("stride", stride)
        self.epochs = None if epochs is None else count("epochs", epochs)
        self.vocab_size = None if vocab_size is None else count("vocab_size", vocab_size)
        self.seed, self.shuffle, self.name = count("seed", seed, 0), shuffle, name
        tokens = np.asanyarray(tokens)
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise DataError(f"[{name}] tokens are {tokens.shape} {tokens.dtype} (whole numbers in a row)")
        self.tokens = tokens if max_tokens is None else tokens[: count("max_tokens", max_tokens)]
        self.windows_per_epoch = (len(self.tokens) - 1 - self.seq_len) // self.stride + 1
        if self.windows_per_epoch < 1:
            raise DataError(
                f"[{name}] too short for one sequence: {len(self.tokens)} tokens "
                f"({self.seq_len + 1} or more for a sequence length of {self.seq_len})"
            )
        self._checksum = _checksum(self.tokens)
        self.position_windows = 0  # how many windows were given out since the start of epoch 0

    @property
    def epoch(self) -> float:
        """How many times the text has been gone through, with its fraction."""
        return self.position_windows / self.windows_per_epoch

    def __next__(self) -> tuple[np.ndarray, np.ndarray]:
        rows = self.batch_size
        if self.epochs is not None:
            rows = min(rows, self.epochs * self.windows_per_epoch - self.position_windows)
            if rows <= 0:
                raise StopIteration
        starts = self._window_starts(np.arange(self.position_windows, self.position_windows + rows))  # (B,)
        positions = starts[:, None] + np.arange(self.seq_len + 1)  # (B, T + 1)
        self._check_file()
        block = self.tokens[positions].astype(np.int64)
        self._check_ids(block, positions)
        self.position_windows += rows
        block = block.astype(np.int32)
        return block[:, :-1].copy(), block[:, 1:].copy()

    def state_dict(self) -> dict[str, int]:
        """The position, and what it is a position in. The batch size may change between saving and loading."""
        return {"position_windows": self.position_windows, **self._identity()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where ``state`` was saved. raises: DataError if it belongs to other text, seed or sequence length."""
        for key, value in self._identity().items():
            if state.get(key, value) != value:  # an older state may lack some
                raise DataError(
                    f"[{self.name}] the saved position is in other data: {key} was {state[key]}, is {value} "
                    "(accepted: the text, seed, order and sequence length it was saved with)"
                )
        position = state.get("position_windows")
        if type(position) is not int or not 0 <= position < 1 << 62:
            raise DataError(f"[{self.name}] the saved position is no position: {position!r} (a count of windows)")
        self.position_windows = position

    def _identity(self) -> dict[str, int]:
        return {
            "tokens": len(self.tokens),
            "seq_len": self.seq_len,
            "stride": self.stride,
            "seed": self.seed,
            "shuffle": int(self.shuffle),
            "order": _ORDER,
            "tokens_crc32": self._checksum,
        }

    def _window_starts(self, positions: np.ndarray) -> np.ndarray:
        """Indices of the first tokens of the windows at ``positions`` in the endless sequence of windows."""
        epochs, windows = np.divmod(positions, self.windows_per_epoch)
        for epoch in np.unique(epochs) if self.shuffle else ():
            windows[epochs == epoch] = shuffled(windows[epochs == epoch], self.windows_per_epoch, self.seed, int(epoch))
        return windows * self.stride

    def _check_file(self) -> None:
        """raises: DataError if the file was cut off under the run: to read on from its map would end the process by SIGBUS."""
        base: object = self.tokens
        while isinstance(base, np.ndarray):
            base = base.base
        if isinstance(base, mmap.mmap) and base.size() < len(base):
            raise DataError(f"[{self.name}] cut off meanwhile: {base.size()} bytes ({len(base)} when it was opened)")

    def _check_ids(self, block: np.ndarray, positions: np.ndarray) -> None:
        if self.vocab_size is None:
            return
        bad = (block < 0) | (block >= self.vocab_size)
        if bad.any():
            raise DataError(
                f"[{self.name}] token id outside the vocabulary: {block[bad][0]} at position {positions[bad][0]} "
                f"(0 to {self.vocab_size - 1})"
            )


def _checksum(tokens: np.ndarray) -> int:
    """CRC-32 of the ids; of very long text, of pieces at evenly spread places, the first and the last among them."""
    checksum = 0
    for piece in sample(tokens, _LOOKED_AT_TOKENS):
        checksum = zlib.crc32(np.asarray(piece, "<i8").tobytes(), checksum)
    return checksum


def unigram_entropy(train: np.ndarray, held_out: np.ndarray, vocab_size: int) -> float:
    """Nats per token that a model knowing only token frequencies would get on ``held_out``.

    The cross entropy -mean(log p(token)) over ``held_out``, with p(v) = (count of v in train + 1) / (len(train) +
    vocab_size): add-one smoothing, so that a token never trained on has a finite loss. Of arrays with more than 16 million
    tokens so many count, evenly spread.

    raises: DataError if ``held_out`` is empty or an id is outside the vocabulary.
    """
    if len(held_out) == 0:
        raise DataError("[unigram_entropy] no held-out tokens: 0 (1 or more)")
    train_counts, held_out_counts = _counts(train, vocab_size), _counts(held_out, vocab_size)
    log_p = np.log(train_counts + 1.0) - np.log(train_counts.sum() + float(vocab_size))
    return float(-(held_out_counts @ log_p) / held_out_counts.sum())


def _counts(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """(vocab_size,) int64, in pieces because numpy's bincount widens its input to int64."""
    counts = np.zeros(vocab_size, np.int64)
    for part in sample(tokens, _LOOKED_AT_TOKENS):
        low, high = int(part.min()), int(part.max())
        if low < 0 or high >= vocab_size:
            raise DataError(f"[unigram_entropy] token id outside the vocabulary: ids {low} to {high} (0 to {vocab_size - 1})")
        counts += np.bincount(part, minlength=vocab_size)
    return counts
