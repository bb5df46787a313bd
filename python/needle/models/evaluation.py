"""How well a model knows a text: perplexity and bits per byte over a sliding window, and the accuracy of last words."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .. import ops
from ..backend_ndarray import kernels
from ..errors import ShapeError, check_count
from .generation import check_ids, inference, integers
from .pythia import Pythia


@dataclass(frozen=True)
class TextScore:
    """nats: minus the log probability of the text, all of it. tokens: how many were predicted."""

    nats: float
    tokens: int

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """e ** loss."""
        return math.exp(min(self.loss, 700.0))

    def bits_per_byte(self, text_bytes: int) -> float:
        """text_bytes: of the predicted text, in UTF-8; NaN for none. Comparable between vocabularies, as nats per token are not."""
        return self.nats / math.log(2) / text_bytes if text_bytes > 0 else math.nan


def windows(tokens: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(first, last, scored) of each window: the model reads tokens first .. last - 1 and predicts tokens scored + 1 .. last.

    Every token but the first is predicted once. In all windows but the first, ``window`` - ``stride`` tokens come before the
    predicted ones as context.
    """
    done = 0
    for first in range(0, tokens - 1, stride):
        last = min(first + window, tokens - 1)
        yield first, last, done
        done = last
        if last == tokens - 1:
            return


def score_text(
    model: Pythia,
    ids: np.ndarray,
    window: int | None = None,
    stride: int | None = None,
    batch_size: int = 1,
    progress: Callable[[int], None] | None = None,
) -> TextScore:
    """The score of ``ids`` (tokens,), the first of which is only read, never predicted.

    window: positions that the model sees at a time, default ``max_seq_len``. stride: tokens from one window to the next,
    default the window; a smaller one gives each token more context and costs window / stride times as much.
    batch_size: windows at a time. progress: called with the number of tokens predicted so far.
    raises: ShapeError for fewer than two tokens, for what are no whole numbers, or a stride outside 1 .. window; IndexError for an
    id outside the vocabulary.
    """
    window = check_count("score_text", "window", model.config.max_seq_len if window is None else window)
    stride = check_count("score_text", "stride", window if stride is None else stride, 1, window)
    batch_size = check_count("score_text", "batch_size", batch_size)
    ids = np.asarray(ids)
    if ids.ndim != 1 or len(ids) < 2 or ids.dtype.kind not in "iu":
        raise ShapeError(f"[score_text] ids are {ids.shape} {ids.dtype} (accepted: at least two whole numbers in a row)")
    check_ids("score_text", "", ids, model.config.vocab_size)
    nats, counted = 0.0, 0
    todo = windows(len(ids), window, stride)
    while part := list(itertools.islice(todo, min(batch_size, len(ids)))):
        T = max(last - first for first, last, _ in part)
        inputs = np.zeros((len(part), T), np.int32)
        targets = np.full((len(part), T), kernels.IGNORE_INDEX, np.int32)
        for row, (first, last, scored) in enumerate(part):
            inputs[row, : last - first] = ids[first:last]
            targets[row, scored - first : last - first] = ids[scored + 1 : last + 1]
        count = int((targets != kernels.IGNORE_INDEX).sum())
        with inference():
            nats += model.loss(integers(model, inputs), integers(model, targets)).item() * count
        counted += count
        if progress is not None:
            progress(counted)
    return TextScore(nats, counted)


@dataclass(frozen=True)
class WordScore:
    """words: how many were predicted. correct: how many of which every token was the likeliest. nats: minus the log probability of
    all of them.
    """

    words: int
    correct: int
    nats: float

    @property
    def accuracy(self) -> float:
        """Share of the words that were predicted correctly, 0 to 1."""
        return self.correct / self.words

    @property
    def perplexity(self) -> float:
        """Per word."""
        return math.exp(min(self.nats / self.words, 700.0))


def score_endings(
    model: Pythia, examples: Sequence[tuple[np.ndarray, np.ndarray]], window: int | None = None, batch_size: int = 8
) -> WordScore:
    """How often the model predicts the ending of a text. examples: (context ids, ending ids), each of at least one id.

    Contexts longer than ``window`` (default ``max_seq_len``) lose their beginning. source: Paperno et al. 2016, arXiv:1606.06031.
    raises: ShapeError for no examples, an empty context or ending, or what are no whole numbers; IndexError for an id outside the
    vocabulary.
    """
    window = check_count("score_endings", "window", model.config.max_seq_len if window is None else window)
    batch_size = check_count("score_endings", "batch_size", batch_size)
    if not examples:
        raise ShapeError("[score_endings] 0 examples (accepted: at least 1)")
    for i, (context, ending) in enumerate(examples):
        if len(context) < 1 or not 1 <= len(ending) <= window:
            sizes = f"{len(context)} context and {len(ending)} ending ids"
            raise ShapeError(f"[score_endings] example {i} has {sizes} (accepted: 1 or more, 1..{window})")
        both = [np.asarray(ids) for ids in (context, ending)]
        if any(ids.ndim != 1 or ids.dtype.kind not in "iu" for ids in both):
            kinds = " and ".join(f"{ids.shape} {ids.dtype}" for ids in both)
            raise ShapeError(f"[score_endings] example {i} is {kinds} (accepted: whole numbers in a row)")
        for ids in both:
            check_ids("score_endings", f"in example {i} ", ids, model.config.vocab_size)
    order = sorted(range(len(examples)), key=lambda i: len(examples[i][0]) + len(examples[i][1]))
    nats, correct = 0.0, 0
    for start in range(0, len(order), batch_size):
        part = [examples[i] for i in order[start : start + batch_size]]
        rows = [np.concatenate(example)[-window - 1 :] for example in part]
        T = max(map(len, rows)) - 1
        inputs = np.zeros((len(rows), T), np.int32)
        asked = []  # rows of the (B T, C) hidden states that predict an ending
        for b, (row, (_, ending)) in enumerate(zip(rows, part, strict=True)):
            inputs[b, : len(row) - 1] = row[:-1]
            asked.append(b * T + np.arange(len(row) - 1 - len(ending), len(row) - 1))
        with inference():
            hidden = model.hidden(integers(model, inputs))
            flat = ops.reshape(hidden, (-1, hidden.shape[2]))
            rows_asked = ops.embedding(flat, integers(model, np.concatenate(asked)))
            logits = ops.matmul(rows_asked, model.embed_out).realize_cached_data()
        targets = np.concatenate([ending for _, ending in part])
        losses, _ = kernels.cross_entropy(logits, integers(model, targets).realize_cached_data())
        nats += float(losses.numpy().sum(dtype=np.float64))
        hits = logits.argmax(axis=1).numpy() == targets
        ends = np.cumsum([len(ending) for _, ending in part])
        correct += sum(bool(found.all()) for found in np.split(hits, ends[:-1]))
    return WordScore(len(examples), correct, nats)
