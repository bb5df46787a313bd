"""Text generation with cached keys and values: what ``Pythia.generate`` and ``Pythia.stream`` are made of.

Sequences of unequal length lie left-aligned in one cache, each at its own positions, so that what a sequence becomes does not
depend on the others, and the block pattern of a sparse model is the one it was trained with. One decoded token of each sequence
runs through the layers as one sequence of B positions, and only attention knows that they belong to different ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, fields, replace
from functools import partial
from numbers import Real
from operator import is_
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import ops
from ..autograd import Tensor, no_grad
from ..backend_ndarray import kernels
from ..backend_ndarray.block_layout import BlockLayout
from ..backend_ndarray.host_memory import DATA
from ..backend_ndarray.ndarray import NDArray, empty
from ..backend_ndarray.recording import Recording
from ..errors import ShapeError, as_whole, check_count
from ..nn.nn_basic import no_dropout

if TYPE_CHECKING:
    from .pythia import Pythia


@dataclass(frozen=True)
class GenerationConfig:
    """How tokens are chosen. Names and meaning are those of transformers.

    max_new_tokens: the most tokens that are added, 1 or more.
    do_sample: draw tokens at random; else the likeliest one is taken, and temperature, top_k and top_p have no effect.
    temperature: logits are divided by it; 1e-100 to 1e100.
    top_k: only this many of the likeliest ids can be drawn (None or 0: all).
    top_p: of those, only the likeliest whose probabilities add up to it; above 0, at most 1.
    repetition_penalty: logits of ids that are in the sequence already are divided by it where positive, else multiplied by it.
    eos_token_id: an id, or several, that end a sequence (None: no id does).
    pad_token_id: what follows the end of a sequence that is shorter than the others (None: the first eos_token_id, or 0).
    seed: of the random numbers; each sequence has a stream of its own.
    raises: ShapeError for a value outside these ranges.
    """

    max_new_tokens: int = 20
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int | None = 50
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    eos_token_id: int | Sequence[int] | None = None
    pad_token_id: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.do_sample, (bool, np.bool_)):
            raise ShapeError(f"[generate] do_sample is {self.do_sample!r} (accepted: True or False)")
        self._count("max_new_tokens", 1, (1 << 31) - 1)  # positions are int32
        self._check("temperature", "1e-100 to 1e100; do_sample=False takes the likeliest", lambda x: 1e-100 <= x <= 1e100)
        self._check("top_p", "above 0, at most 1", lambda x: 0 < x <= 1)
        self._check("repetition_penalty", "1e-100 to 1e100; 1 is none", lambda x: 1e-100 <= x <= 1e100)
        self._count("seed", 0)
        for name in ("top_k", "pad_token_id"):
            if getattr(self, name) is not None:
                self._count(name, 0)
        if any(as_whole(i) is None or i < 0 for i in self.eos_ids):
            raise ShapeError(f"[generate] eos_token_id is {self.eos_token_id!r} (accepted: ids)")

    def _count(self, name: str, least: int, most: int | None = None) -> None:
        """As Python's int: in numpy's small ones sums wrap around."""
        object.__setattr__(self, name, check_count("generate", name, getattr(self, name), least, most))

    def _check(self, name: str, accepted: str, fits: Callable[[Any], bool]) -> None:
        value = getattr(self, name)
        if isinstance(value, np.generic):  # which would cast the bounds to its own dtype
            value = value.item()
        if not isinstance(value, Real) or isinstance(value, bool) or not fits(value):
            raise ShapeError(f"[generate] {name} is {value!r} (accepted: {accepted})")

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids that end a sequence."""
        ids: Any = self.eos_token_id
        return () if ids is None else tuple(ids) if isinstance(ids, (list, tuple)) else (ids,)

    @property
    def pad_id(self) -> int:
        """The id that stands after the end of a sequence."""
        return self.pad_token_id if self.pad_token_id is not None else (*self.eos_ids, 0)[0]


# --- choosing a token ---


def choose(logits: np.ndarray, seen: np.ndarray, config: GenerationConfig, rng: np.random.Generator) -> int:
    """The next id of one sequence from its logits (V,). seen: (V,) of bool, the ids that are there already."""
    if config.repetition_penalty != 1:
        logits, penalty = logits.astype(np.float64), float(config.repetition_penalty)
        there = logits[seen]
        logits[seen] = np.where(there < 0, there * penalty, there / penalty)
    if not config.do_sample:
        return int(logits.argmax())
    ids, p = distribution(logits, config)
    return int(ids[min(np.searchsorted(p.cumsum(), rng.random() * p.sum(), side="right"), len(ids) - 1)])


def distribution(logits: np.ndarray, config: GenerationConfig) -> tuple[np.ndarray, np.ndarray]:
    """(ids, probabilities) that temperature, top_k and top_p leave of logits (V,)."""
    ids = np.arange(len(logits))
    if config.top_k and config.top_k < len(logits):
        ids = np.flatnonzero(logits >= np.partition(logits, -config.top_k)[-config.top_k])
    scores = logits[ids].astype(np.float64)
    p = np.exp((scores - scores.max()) / config.temperature)
    p /= p.sum()
    if config.top_p < 1:
        kept = _nucleus(p, config.top_p)
        ids, p = ids[kept], p[kept] / p[kept].sum()
    return ids, p


def _nucleus(p: np.ndarray, top_p: float) -> np.ndarray:
    """The indices of the largest of ``p`` that together reach ``top_p``; of equal ones the first count. A trained model has few of
    them, and sorting all of ``p`` would take as long as computing the token.
    """
    for most in (4096, len(p)):
        few = np.flatnonzero(p >= np.partition(p, -most)[-most]) if most < len(p) else np.arange(len(p))
        order = few[np.argsort(-p[few], kind="stable")]
        reached = p[order].cumsum()
        if reached[-1] >= top_p:
            break
    return np.sort(order[reached - p[order] < top_p])


# --- the model with its cache ---


@contextmanager
def inference() -> Iterator[None]:
    """Inside, in this thread, no graph is recorded and nothing is dropped out."""
    with no_grad(), no_dropout():
        yield


def integers(model: Pythia, values: np.ndarray) -> Tensor:
    """Ids or positions on the model's device."""
    return Tensor(values, device=model.device, dtype="int32", requires_grad=False)


class KeyValueCache:
    """Keys and values of every position so far, by layer: (B, H, S, D) each, made once.

    positions: (B,) int32 on the device, where the token that is being decoded stands in each sequence.
    """

    def __init__(self, shape: tuple[int, int, int, int], positions: NDArray):
        self.shape, self.positions = shape, positions
        self.keys: list[NDArray] = []
        self.values: list[NDArray] = []

    def attend_prompt(self, layer: int, q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout) -> Tensor:
        """Attention among the positions 0 .. T - 1 of the prompts; q, k, v (B, H, T, D)."""
        for store, new in ((self.keys, k.realize_cached_data()), (self.values, v.realize_cached_data())):
            store.append(empty(self.shape, new.dtype, new.device))
            store[layer].category = DATA
            store[layer][:, :, : new.shape[2]] = new
        return ops.attention(q, k, v, layout)

    def attend_step(self, layer: int, q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout) -> Tensor:
        """Attention of one new position per sequence; q, k, v (1, H, B, D)."""
        query, key, value = (x.realize_cached_data().permute((2, 1, 0, 3)) for x in (q, k, v))
        keys, values, scale = self.keys[layer], self.values[layer], 1 / math.sqrt(self.shape[3])
        mixed = kernels.attention_decode(query, key, value, keys, values, self.positions, layout, scale)
        return Tensor.make_const(mixed.permute((2, 1, 0, 3)))


class Decoder:
    """A model on some sequences: ``start`` reads the prompts, ``step`` one more token of each. Both give logits (B, V).

    room: the most tokens that ``step`` will take; the cache is made for the prompts and them.
    The kernels of the first ``step`` are recorded, and later steps make the same calls on other ids and positions. They are
    recorded anew once a parameter has another array or was written in place: under ``amp.autocast`` the recording holds its cast.
    """

    def __init__(self, model: Pythia, prompts: Sequence[np.ndarray], room: int):
        config = model.config
        self.model, self.prompts = model, prompts
        self.lengths = np.array([len(p) for p in prompts], np.int32)
        most = int(self.lengths.max()) + room
        self.layout = config.layout(most)
        self.cos, self.sin = model.rotary_tables(most)
        self.ids = integers(model, np.zeros((1, len(prompts))))
        positions = integers(model, self.lengths).realize_cached_data()
        self.cache = KeyValueCache((len(prompts), config.heads, most, config.head_width), positions)
        self.parameters = model.parameters()
        self.recording: Recording | None = None
        self.recorded: list[NDArray] = []  # the weights of the recording
        self.written: list[int] = []  # and when each was last written

    def start(self) -> np.ndarray:
        """Reads the prompts. Logits (B, V) of what follows each."""
        B, T = len(self.prompts), int(self.lengths.max())
        ids = np.zeros((B, T), np.int32)  # what fills up a row comes after its end, where no position looks
        for row, prompt in zip(ids, self.prompts, strict=True):
            row[: len(prompt)] = prompt
        with inference():
            x = self._layers(integers(self.model, ids), self.cos, self.sin, self.model.config.layout(T), self.cache.attend_prompt)
            last = integers(self.model, np.arange(B, dtype=np.int32) * T + self.lengths - 1)
            return self._numbers(self._logits(ops.embedding(ops.reshape(x, (B * T, x.shape[2])), last)))

    def step(self, ids: np.ndarray, running: np.ndarray) -> np.ndarray:
        """Reads one more token of each sequence. Logits (B, V) of what follows it.

        ids: (B,), the tokens. running: (B,) of bool, the sequences that they are added to; the others stay as they are.
        """
        self.ids.realize_cached_data()[:] = ids
        self.cache.positions[:] = self.lengths
        self.lengths += running
        weights = [p.realize_cached_data() for p in self.parameters]
        written = [w.last_write for w in weights]
        if self.recording is not None and written == self.written and all(map(is_, weights, self.recorded)):
            self.recording.replay()
        else:
            recording = Recording(self.model.device)
            with inference():
                self.logits = recording.record(self._step)
            self.recording, self.recorded, self.written = recording, weights, written
        return self._numbers(self.logits)

    def _step(self) -> NDArray:
        cos, sin = (kernels.embedding(table, self.cache.positions) for table in (self.cos, self.sin))
        return self._logits(self._layers(self.ids, cos, sin, self.layout, self.cache.attend_step))

    def _layers(self, ids: Tensor, cos: NDArray, sin: NDArray, layout: BlockLayout, attend: Callable[..., Tensor]) -> Tensor:
        x = ops.embedding(self.model.embed_in, ids)
        for i, layer in enumerate(self.model.layers):
            x = layer(x, cos, sin, layout, partial(attend, i))
        return x

    def _logits(self, x: Tensor) -> NDArray:
        return ops.matmul(self.model.final_layer_norm(x), self.model.embed_out).realize_cached_data()

    def _numbers(self, logits: NDArray) -> np.ndarray:
        return logits.numpy().reshape(-1, logits.shape[-1]).astype(np.float32, copy=False)


def as_prompts(input_ids: Any, vocab_size: int) -> list[np.ndarray]:
    """The prompts as 1-D arrays. raises: ShapeError for none, an empty one or another rank, IndexError for an id that is none."""
    try:
        prompts = [np.asarray(p) for p in input_ids]
    except TypeError:
        prompts = []
    if not prompts or any(p.ndim != 1 or p.size == 0 for p in prompts):
        shapes = ", ".join(str(p.shape) for p in prompts[:8]) or "none"
        raise ShapeError(f"[generate] prompts are {shapes} (accepted: one or more sequences of ids, such as [[1, 2], [3]])")
    for p in prompts:
        if p.dtype.kind not in "iu":
            raise ShapeError(f"[generate] prompts are {p.dtype} (accepted: whole numbers)")
        check_ids("generate", "in a prompt ", p, vocab_size)
    return prompts


def check_ids(op: str, where: str, ids: np.ndarray, vocab_size: int) -> None:
    """raises: IndexError for an id outside the vocabulary: as an int32 it might be inside, or stand for none."""
    wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(wrong):
        raise IndexError(f"[{op}] id {ids[wrong[0]]} {where}is outside the vocabulary (0..{vocab_size - 1})")


def _vocabulary(model: Pythia) -> int:
    """The size of the model's vocabulary. raises: ShapeError if ``config`` has another than ``embed_out``."""
    size, columns = model.config.vocab_size, model.embed_out.shape[-1]
    if columns != size:
        raise ShapeError(f"[generate] embed_out has {columns} columns (accepted: {size}, the vocab_size of the model's config)")
    return size


def _config(model: Pythia, given: GenerationConfig | None, options: dict[str, Any]) -> GenerationConfig:
    """``given``, or else the model's, with ``options``. raises: TypeError for an option that is none."""
    names = [field.name for field in fields(GenerationConfig)]
    if unknown := [name for name in options if name not in names]:
        raise TypeError(f"[generate] unknown option: {', '.join(unknown)} (accepted: {', '.join(names)})")
    return replace(given or model.generation_config, **options)


def stream(
    model: Pythia, input_ids: Any, generation_config: GenerationConfig | None = None, **options: Any
) -> Iterator[np.ndarray]:
    """What ``Pythia.stream`` gives. Arguments are checked at once, and the prompts read when the first token is asked for."""
    config = _config(model, generation_config, options)
    vocab_size = _vocabulary(model)
    for name, ids in (("eos_token_id", config.eos_ids), ("pad_token_id", (config.pad_id,))):
        if any(i >= vocab_size for i in ids):
            raise IndexError(f"[generate] {name} {max(ids)} is outside the vocabulary (0..{vocab_size - 1})")
    prompts = as_prompts(input_ids, vocab_size)
    longest = max(map(len, prompts))
    try:
        model.config.layout(longest + config.max_new_tokens - 1)  # refuses too many positions; the decoder finds it made
    except ShapeError as error:
        raise ShapeError(f"[generate] max_new_tokens is {config.max_new_tokens} after a prompt of {longest}: {error}") from error
    return _tokens(model, prompts, config)


def _tokens(model: Pythia, prompts: list[np.ndarray], config: GenerationConfig) -> Iterator[np.ndarray]:
    B = len(prompts)
    decoder = Decoder(model, prompts, config.max_new_tokens - 1)
    rngs = [np.random.default_rng([config.seed, b]) for b in range(B)]
    seen = np.zeros((B, model.config.vocab_size), bool)
    for row, prompt in zip(seen, prompts, strict=True):
        row[prompt] = True
    running = np.ones(B, bool)
    # In contexts of their own, which end wherever Ctrl-C falls: one as a ``with`` begins or ends would leave what it had set.
    logits = copy_context().run(decoder.start)
    for left in reversed(range(config.max_new_tokens)):
        ids = np.full(B, config.pad_id)
        if model.device.name != "meta":  # there logits are no numbers, and every choice is as good
            if not np.isfinite(logits).all():
                raise FloatingPointError("[generate] the model's logits are infinite or NaN (its weights may be broken)")
            for b in np.flatnonzero(running):
                ids[b] = choose(logits[b], seen[b], config, rngs[b])
        seen[np.arange(B), ids] |= running
        running &= ~np.isin(ids, config.eos_ids)
        yield ids
        if left == 0 or not running.any():
            return
        logits = copy_context().run(decoder.step, ids, running)


def generate(model: Pythia, input_ids: Any, generation_config: GenerationConfig | None = None, **options) -> np.ndarray:
    """What ``Pythia.generate`` gives."""
    config = _config(model, generation_config, options)
    prompts = as_prompts(input_ids, _vocabulary(model))
    new = np.stack(list(stream(model, prompts, config)), axis=1)  # (B, new tokens)
    rows = [np.concatenate(pair) for pair in zip(prompts, new, strict=True)]
    out = np.full((len(rows), max(map(len, rows))), config.pad_id)
    for row, values in zip(out, rows, strict=True):
        row[: len(values)] = values
    return out
