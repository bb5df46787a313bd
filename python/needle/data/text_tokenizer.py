"""Byte-level BPE: trained on a corpus and kept, or read from a file. Needs the package ``tokenizers``."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from .. import files
from ..errors import DataError

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
END_OF_TEXT = "<|endoftext|>"  # GPT-NeoX's name for the token after each document
SETTINGS = (
    "bos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token", "padding_side", "truncation_side",
    "chat_template",
)  # fmt: skip
DEFAULT_VOCABULARY = 10_000
SMALLEST_VOCABULARY = 257  # every byte, and END_OF_TEXT
LARGEST_VOCABULARY = 1 << 20  # far above what is in use: ``tokenizers`` takes room for all of it before it looks at the text
_LONGEST_WORD = 1 << 20  # characters that are held until they can be cut
_LONGEST_LEARNT = 1 << 15  # characters of a part that may be one word while a tokenizer is trained
_WORD_END = re.compile(r"(?<=[^\W_])[ \n\r\t]")
_FILE_BYTES = 128 << 20  # the largest that are published have 35 million


class TextTokenizer:
    """Text to ids and back. ``size``: how many ids it can make; ``end_of_text``: the id after a document, or None.

    tokenizer: of the package ``tokenizers``. A file may say that texts are cut off or filled up, which this one never does.
    end_of_text: the token after a document, where the tokenizer has it; None for none.
    settings: what else a tokenizer_config.json says to transformers: what is saved with a model says it again.
    """

    def __init__(self, tokenizer: Any, end_of_text: str | None = END_OF_TEXT, settings: dict[str, str] | None = None):
        self.settings = settings or {}
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.tokenizer = tokenizer
        self.end_of_text: int | None = None if end_of_text is None else tokenizer.token_to_id(end_of_text)
        self.size: int = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())

    def extends(self, other: TextTokenizer) -> bool:
        """Whether each id of ``other`` stands for the same here."""
        mine, others = (each.tokenizer.get_vocab(with_added_tokens=True) for each in (self, other))
        return others.items() <= mine.items()

    def encode(self, text: str) -> np.ndarray:
        """(tokens,) int64."""
        return np.array(self.encode_batch([text])[0], dtype=np.int64)

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text. raises: DataError for text that the tokenizer has no ids for."""
        with _library_errors("no ids for a text", "text that the tokenizer knows"):
            return [encoding.ids for encoding in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ``ids``; an id that only fills up the model's vocabulary gives nothing. raises: DataError."""
        with _library_errors("no text for ids", "a tokenizer.json that is whole"):
            return self.tokenizer.decode([int(i) for i in ids if i < self.size], skip_special_tokens=False)

    def to_json(self) -> str:
        """The content of a tokenizer.json. raises: DataError."""
        with _library_errors("cannot be saved", "a tokenizer.json that is whole"):
            return self.tokenizer.to_str()

    def encode_parts(self, parts: Iterable[str]) -> Iterator[np.ndarray]:
        """The ids of one text that comes in parts, which may end anywhere; a few parts are held at a time. More than a million
        characters that cannot be cut are cut where a part ends, and may have other ids there than the whole: those with no letter
        before white space, and all where the tokenizer does not end a word there (``unchanged_by_cuts``).
        """
        rest = ""
        for part in parts:
            *whole, rest = _at_words(rest + part)
            if whole and not self._ends_words:
                whole, rest = [], "".join((*whole, rest))
            if len(rest) > _LONGEST_WORD:
                whole, rest = [*whole, rest], ""
            for ids in self.encode_batch(whole):
                yield np.array(ids, dtype=np.int64)
        yield self.encode(rest)

    @cached_property
    def _ends_words(self) -> bool:
        """Whether text may be cut as ``_at_words`` does."""
        return self.unchanged_by_cuts(lambda left, right: _WORD_END.match(left + right, len(left)) is not None)

    def unchanged_by_cuts(self, is_place: Callable[[str, str], bool]) -> bool:
        """Whether cutting text leaves its ids as they are, where ``is_place`` says of the text before and after that it may be cut.
        This is tried out, around every kind of character and white space and around each special token.

        The pre-tokenizer's words are compared as well as ids, since equal ids for these few texts would prove little.
        """
        if self.tokenizer.pre_tokenizer is None:
            return False
        befores = "a Z 7 12 don't . , \" ) ... - _ é ß 中 。 \u0301 👍 … & \u200b a\u200d \u200e \ufeff \xad".split()
        spaces = (" ", "  ", "    ", "\n", "\n\n", "\r\n", "\t", " \n", "\n ", "\n\n  ", "\r", " \u3000")
        afters = ("", *"a 7 's . é 中 👍".split())
        pairs = [(f"x {b}", f"{s}{a} y") for b in befores for s in spaces for a in afters]
        for token in self.tokenizer.get_added_tokens_decoder().values():
            content = token.content
            for before in ("x", "x "):  # some are found only where they are words
                pairs += [(before + content, s + "y") for s in spaces]
            pairs += [("x", s + content) for s in ("", *spaces)]  # "": it may itself begin with white space
            if any(is_place(content[:i], content[i:]) for i in range(1, len(content))):
                return False
        pairs = [pair for pair in pairs if is_place(*pair)]

        def words(text: str) -> list[str]:
            if self.tokenizer.normalizer is not None:
                text = self.tokenizer.normalizer.normalize_str(text)
            return [word for word, _ in self.tokenizer.pre_tokenizer.pre_tokenize_str(text)]

        if any(words(left) + words(right) != words(left + right) for left, right in pairs):
            return False
        try:
            lefts, rights, wholes = (self.encode_batch(list(t)) for t in (*zip(*pairs), [a + b for a, b in pairs]))
        except DataError:  # it knows some words alone
            return False
        return all(left + right == whole for left, right, whole in zip(lefts, rights, wholes))

    def encode_documents(self, documents: Iterable[Iterable[str]]) -> Iterator[np.ndarray]:
        """Ids of each part of each document, and ``end_of_text`` after a document."""
        for parts in documents:
            yield from self.encode_parts(parts)
            if self.end_of_text is not None:
                yield np.array([self.end_of_text], dtype=np.int64)


def train_tokenizer(path: Path, texts: Iterable[str], vocab_size: int, name: str) -> TextTokenizer:
    """Train byte-level BPE with exactly ``vocab_size`` ids on ``texts`` and keep it in ``path`` (a tokenizer.json).

    raises: DataError if ``tokenizers`` is missing or the text does not support so many ids; ``name`` is the data set's.
    """
    tokenizers = _import_tokenizers()
    if vocab_size < SMALLEST_VOCABULARY:
        raise DataError(f"[vocab_size] too small: {vocab_size} ({SMALLEST_VOCABULARY} or more)")
    if vocab_size > LARGEST_VOCABULARY:
        raise DataError(f"[vocab_size] too large: {vocab_size} ({LARGEST_VOCABULARY} or less)")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Of the parts it is given, `tokenizers` has many in work at once: 24 MB in parts of 1 MiB take 620 MB, in these 80 MB.
    tokenizer.train_from_iterator((part for text in texts for part in _to_learn_from(text)), trainer)
    reached = tokenizer.get_vocab_size()
    if reached < vocab_size:
        raise DataError(f"[{name}] too little text for the vocabulary: {vocab_size} ids asked (vocab_size: at most {reached})")
    with files.write_whole(path) as file:
        file.write(tokenizer.to_str().encode())
    return TextTokenizer(tokenizer)


def load_tokenizer(path: str | Path) -> TextTokenizer:
    """The tokenizer of a tokenizer.json. A tokenizer_config.json beside it may name its end-of-text token, or say with null that
    there is none (beside x.tokenizer.json an x.tokenizer_config.json).

    raises: DataError if ``tokenizers`` is missing, or ``path`` is absent or not in that format.
    """
    tokenizers, path = _import_tokenizers(), Path(path)
    try:
        text = files.read_small(path, _FILE_BYTES).decode()
    except (OSError, ValueError) as error:
        raise DataError(f"[tokenizer] cannot read {path}: {files.reason(error)} (a tokenizer.json)") from error
    with _library_errors(f"not a tokenizer file: {path}", "a tokenizer.json"):
        return TextTokenizer(tokenizers.Tokenizer.from_str(text), *_config_beside(path))


def _config_beside(path: Path) -> tuple[str | None, dict[str, str]]:
    """The end-of-text token that a tokenizer_config.json beside ``path`` names as transformers does, END_OF_TEXT without one; and
    those of its SETTINGS that are text.
    """
    before = path.name.removesuffix(TOKENIZER)
    found: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        if before + TOKENIZER == path.name:
            found = files.parse_json(files.read_small(path.with_name(before + TOKENIZER_CONFIG)))
    given = {key: value.get("content") if isinstance(value, dict) else value for key, value in found.items()}
    end = given.get("eos_token", END_OF_TEXT)
    settings = {key: value for key, value in given.items() if key in SETTINGS and isinstance(value, str)}
    return end if end is None or isinstance(end, str) else END_OF_TEXT, settings


@contextlib.contextmanager
def _library_errors(what: str, accepted: str) -> Iterator[None]:
    """Turns errors of ``tokenizers`` into DataError: it raises bare Exception, and for some damaged files Rust's PanicException,
    which derives from BaseException alone.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DataError(f"[tokenizer] {what}: {files.reason(error)} ({accepted})") from error


def _import_tokenizers():
    try:
        import tokenizers
    except ModuleNotFoundError as error:
        raise DataError("[tokenizer] package missing: tokenizers (pip install tokenizers)") from error
    return tokenizers


def _at_words(text: str, characters: int = 1 << 14) -> list[str]:
    """``text`` in parts of about ``characters``, so that a batch of them runs on all cores.

    The cut is before white space that follows a letter or digit. There byte-level BPE ends a word anyway, so the ids are those
    of the whole text. (Not after a full stop: Llama 3's has it and the newlines after it in one word.)
    """
    parts, start = [], 0
    while (cut := _WORD_END.search(text, start + characters)) is not None:
        parts.append(text[start : cut.start()])
        start = cut.start()
    return [*parts, text[start:]]


def _to_learn_from(text: str) -> Iterator[str]:
    """``text`` as ``_at_words`` cuts it, and long parts, in which no word may end, in pieces: training takes the square of a word's
    length, most of an hour for a gene of a few million letters.
    """
    for part in _at_words(text):
        size = len(part) if len(part) < _LONGEST_LEARNT else _LONGEST_LEARNT // 8
        for start in range(0, len(part), size or 1):
            yield part[start : start + size]
