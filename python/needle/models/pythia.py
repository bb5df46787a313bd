"""Pythia: GPT-NeoX with parallel residual, rotary positions on a quarter of each head, and untied embeddings.

B batch, T positions, C model width, H heads, D head width, F feed-forward width, V vocabulary.
source: Biderman et al. 2023, arXiv:2304.01373; Black et al. 2022, arXiv:2204.06745.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import dtype as dt
from .. import init, ops
from ..autograd import Tensor, check_tensors
from ..backend_ndarray.block_layout import BlockLayout, dense_layout
from ..backend_ndarray.device import device_cache
from ..backend_ndarray.kernels import DEFAULT_CHUNK_BYTES, MAX_HEAD
from ..backend_ndarray.ndarray import NDArray, empty
from ..backend_selection import Device, as_device
from ..errors import DTypeError, ShapeError, as_whole, check_count, type_name
from ..nn.nn_basic import LayerNorm, Module, Parameter, SeededDropout
from ..nn.nn_remat import remat
from ..nn.nn_sparse import causal_pattern
from . import generation
from .generation import GenerationConfig

if TYPE_CHECKING:
    from ..data.text_tokenizer import TextTokenizer

# name: (layers, width, heads, feed-forward width), as published
SIZES = {
    "14m": (6, 128, 4, 512),
    "31m": (6, 256, 8, 1024),
    "70m": (6, 512, 8, 2048),
    "160m": (12, 768, 12, 3072),
    "410m": (24, 1024, 16, 4096),
}


def size_name(name: str) -> str:
    """``name`` as SIZES has it: 70m, also for 70M and pythia-70m."""
    return name.lower().removeprefix("pythia-")


# Numbers of a PythiaConfig that are no counts: what is accepted, in words and as a test.
_NUMBERS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "rotary_fraction": ("0 to 1", lambda x: 0 <= x <= 1),
    "rotary_base": ("above 0, at most 1e38", lambda x: 0 < x <= 1e38),
    "eps": ("above 0, at most 1", lambda x: 0 < x <= 1),
    "dropout": ("at least 0, below 1", lambda x: 0 <= x < 1),
}


def accepted_instead(name: str, value: Any) -> str:
    """What a PythiaConfig accepts as its number ``name``, in words, if ``value`` is not that; else empty."""
    accepted, fits = _NUMBERS[name]
    return "" if isinstance(value, Real) and not isinstance(value, bool) and fits(value) else accepted


@dataclass(frozen=True)
class PythiaConfig:
    """The shape of a model.

    layers, heads, vocab_size: how many there are. width: features of a position, at most 256 of them per head. feed_forward:
    features between the two products of a layer's feed-forward part. max_seq_len: the positions that it is made for, of which
    ``needle.models.evaluation`` sees as many at a time; longer sequences are not refused.
    rotary_fraction: the share of a head's features that are rotated by position; rotary_base: of their angles. eps: of the layer
    norms. dropout: the probability that an element is dropped in training.
    pattern: a name of ``nn.PATTERNS``; None is dense causal attention. block: edge of a block in positions. window: as in
    ``nn.causal_pattern``.
    checkpoint_layers: 0: all arrays are kept for backward. n: layers are checkpointed n at a time, of which only the input of the
    first is kept; the rest is computed again in backward. A tuple has the number of layers of each such group, from the first
    layer on; the layers after them keep their arrays.
    raises: ShapeError for sizes that are not whole numbers of at least 1, or do not fit together, and for numbers out of range.
    """

    layers: int = 6
    width: int = 512
    heads: int = 8
    feed_forward: int = 2048
    vocab_size: int = 50304
    max_seq_len: int = 2048
    rotary_fraction: float = 0.25
    rotary_base: float = 10000.0
    eps: float = 1e-5
    dropout: float = 0.0
    pattern: str | None = None
    block: int = 64
    window: int = 2
    checkpoint_layers: int | tuple[int, ...] = 0

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "feed_forward", "vocab_size", "max_seq_len"):
            object.__setattr__(self, name, check_count("pythia", name, getattr(self, name)))  # numpy's would overflow in products
        for name in _NUMBERS:
            if accepted := accepted_instead(name, getattr(self, name)):
                raise ShapeError(f"[pythia] {name} is {getattr(self, name)!r} (accepted: {accepted})")
        if self.width % self.heads:
            raise ShapeError(f"[pythia] width {self.width} is no multiple of {self.heads} heads")
        if self.head_width > MAX_HEAD:
            raise ShapeError(f"[pythia] width / heads is {self.head_width} (accepted: heads of at most {MAX_HEAD} features)")
        if self.pattern is not None:
            causal_pattern(self.pattern, 1, self.block, self.window)  # refuses what there is not
            for name in ("block", "window"):
                object.__setattr__(self, name, int(getattr(self, name)))
        counts = self.checkpoint_layers if isinstance(self.checkpoint_layers, tuple) else (self.checkpoint_layers,)
        if any(as_whole(n) is None or n < 0 for n in counts) or sum(counts) > self.layers:
            raise ShapeError(f"[pythia] checkpoint_layers is {self.checkpoint_layers!r} (accepted: 0 to {self.layers} layers)")

    @classmethod
    def named(cls, name: str, **changes) -> PythiaConfig:
        """A published size: 14m, 31m, 70m, 160m or 410m. raises: ShapeError for another name."""
        name = size_name(name)
        if name not in SIZES:
            raise ShapeError(f"[pythia] unknown model: {name} (accepted: {', '.join(SIZES)})")
        layers, width, heads, feed_forward = SIZES[name]
        return cls(layers=layers, width=width, heads=heads, feed_forward=feed_forward, **changes)

    def with_sparse(self, pattern: str = "local", block: int = 64, window: int = 2) -> PythiaConfig:
        """The same model with block-sparse attention; pattern, block and window as in ``nn.causal_pattern``."""
        return replace(self, pattern=pattern, block=block, window=window)

    @property
    def head_width(self) -> int:
        """Features of a head."""
        return self.width // self.heads

    @property
    def rotary_width(self) -> int:
        """Features of a head that are rotated: even."""
        return int(self.head_width * self.rotary_fraction) // 2 * 2

    @property
    def checkpoint_segments(self) -> tuple[int, ...]:
        """How many layers are checkpointed together each time, from the first layer on."""
        n = self.checkpoint_layers
        if isinstance(n, tuple):
            return n
        return tuple([min(n, self.layers - i) for i in range(0, self.layers, n)]) if n else ()

    def parameter_count(self) -> int:
        """Number of parameters, embeddings included."""
        C, F = self.width, self.feed_forward
        layer = 4 * C + (3 * C * C + 3 * C) + (C * C + C) + (C * F + F) + (F * C + C)
        return 2 * self.vocab_size * C + self.layers * layer + 2 * C

    def flops_per_token(self, T: int) -> float:
        """Floating-point operations of one training step, forward and backward, per token of a sequence of T.

        6 for each parameter, without the input embedding, which is only looked up; and 12 L C T times the pattern's density for
        attention, counted as the whole T x T square, as is usual. What is computed again in backward does not count.
        source: Chowdhery et al. 2022, arXiv:2204.02311, appendix B.
        """
        parameters = self.parameter_count() - self.vocab_size * self.width
        return 6 * parameters + 12 * self.layers * self.width * T * self.layout(T).density

    def layout(self, T: int) -> BlockLayout:
        """Which key blocks each query block of a T-position sequence sees."""
        if self.pattern is None:
            return dense_layout(T, T, 64)
        return causal_pattern(self.pattern, -(-T // self.block), self.block, self.window)


@device_cache(maxsize=16)
def rotary_tables(positions: int, rotary_width: int, base: float, device):
    """(cos, sin), each (positions, rotary_width / 2) float32: angles position * base^(-2 i / rotary_width)."""
    frequency = base ** (-np.arange(0, rotary_width, 2) / rotary_width)
    angle = np.arange(positions)[:, None] * frequency[None, :]
    return NDArray(np.cos(angle), device, "float32"), NDArray(np.sin(angle), device, "float32")


class _Affine(Module):
    """x @ weight + bias, weight (in, out) normal with a given deviation, bias zero."""

    def __init__(self, rng, fan_in: int, fan_out: int, std: float, device, dtype: str):
        super().__init__()
        self.weight = _normal(rng, (fan_in, fan_out), std, device, dtype)
        self.bias = Parameter(init.zeros(fan_out, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, self.bias)


def _normal(rng, shape, std: float, device, dtype: str) -> Parameter:
    if rng is None or device.name == "meta":  # a plan of a large model makes no numbers either
        return Parameter(Tensor.make_const(empty(shape, dtype, device)))
    return Parameter(rng.standard_normal(shape, np.float32) * std, device=device, dtype=dtype)


class PythiaLayer(Module):
    """x + dropout(attention(ln1(x))) + dropout(mlp(ln2(x)))."""

    def __init__(self, config: PythiaConfig, dropout: SeededDropout, rng, device, dtype: str):
        super().__init__()
        C, F, L = config.width, config.feed_forward, config.layers
        small, output = math.sqrt(2 / (5 * C)), 2 / (L * math.sqrt(C))
        self.config, self.dropout = config, dropout
        self.input_layernorm = LayerNorm(C, config.eps, device=device, dtype=dtype)
        self.post_attention_layernorm = LayerNorm(C, config.eps, device=device, dtype=dtype)
        self.query_key_value = _Affine(rng, C, 3 * C, small, device, dtype)
        self.dense = _Affine(rng, C, C, output, device, dtype)
        self.dense_h_to_4h = _Affine(rng, C, F, small, device, dtype)
        self.dense_4h_to_h = _Affine(rng, F, C, output, device, dtype)

    def forward(self, x: Tensor, cos: NDArray, sin: NDArray, layout: BlockLayout, attend=ops.attention) -> Tensor:
        """x (B, T, C). attend: attention with a memory of its own, when tokens are decoded one by one."""
        B, T, C = x.shape
        H, D = self.config.heads, self.config.head_width
        qkv = self.query_key_value(self.input_layernorm(x))  # (B, T, 3C), per head q, k, v
        q, k, v = ops.rotary_qkv(ops.reshape(qkv, (B, T, H, 3, D)), cos, sin)  # each (B, H, T, D)
        mixed = attend(q, k, v, layout)  # (B, H, T, D), lying in memory as (B, T, H, D)
        attended = self.dense(ops.reshape(ops.transpose(mixed, (1, 2)), (B, T, C)))
        return x + (self.dropout(attended) + self.dropout(self.feed_forward(x)))

    def feed_forward(self, x: Tensor) -> Tensor:
        return self.dense_4h_to_h(ops.gelu(self.dense_h_to_4h(self.post_attention_layernorm(x))))


class Pythia(Module):
    """The language model. ``forward`` gives logits; ``loss`` does without them. Who gives it other layers, or embeddings of another
    size, assigns a ``config`` that says so: ``generate`` and ``save_pretrained`` go by that.

    device: default ``cpu()``. dtype: of parameters and activations. seed: of the initial weights; None leaves them uninitialised,
    to be loaded. raises: DTypeError for a dtype that is not floating, and for what is no PythiaConfig; ShapeError
    for a seed that is no whole number of at least 0.
    """

    def __init__(self, config: PythiaConfig, device=None, dtype: str = "float32", seed: int | None = 0):
        super().__init__()
        if not isinstance(config, PythiaConfig):
            accepted = "a PythiaConfig, such as PythiaConfig.named('70m')"
            raise DTypeError(f"[pythia] config is of type {type_name(config)} (accepted: {accepted})")
        dtype = dt.name_of(dtype)
        if not dt.is_float(dtype):
            raise DTypeError(f"[pythia] dtype is {dtype} (accepted: floats)")
        device = as_device(device)
        rng = None if seed is None else np.random.default_rng(check_count("pythia", "seed", seed, 0))
        self.config, self.dtype = config, dtype
        self.generation_config = GenerationConfig()
        std = math.sqrt(2 / (5 * config.width))
        self.embed_in = _normal(rng, (config.vocab_size, config.width), std, device, dtype)
        self.dropout = SeededDropout(config.dropout, seed or 0)
        self.layers = [PythiaLayer(config, self.dropout, rng, device, dtype) for _ in range(config.layers)]
        self.final_layer_norm = LayerNorm(config.width, config.eps, device=device, dtype=dtype)
        self.embed_out = _normal(rng, (config.width, config.vocab_size), std, device, dtype)

    @property
    def device(self) -> Device:
        """Where the parameters are."""
        return self.embed_in.device

    @classmethod
    def from_pretrained(cls, source: str | Path, device=None, dtype: str = "float32", revision: str | None = None) -> Pythia:
        """The model in ``source``: a folder that transformers or ``save_pretrained`` wrote, or a name such as
        ``"EleutherAI/pythia-70m"``, of which the Hub (through ``huggingface_hub``) has such a folder, in its ``revision``.

        Parameters are converted to ``dtype``. As with transformers the model is in evaluation mode, without dropout, until
        ``train()`` is called; ``generate`` follows the folder's generation_config.json, or without one ends as config.json says.
        raises: CheckpointError for what is absent, damaged or no Pythia.
        """
        from .pretrained import load

        return load(cls, source, device, dtype, revision)

    def save_pretrained(
        self, folder: str | Path, tokenizer: TextTokenizer | None = None, max_shard_size: int | str = "5GB"
    ) -> None:
        """Writes config.json, model.safetensors (several files above ``max_shard_size``) and the tokenizer's files: a folder that
        ``transformers`` loads as it is. A model that was there is replaced once this one is written.

        tokenizer: as ``pretrained.tokenizer_of`` gives it; DTypeError for another kind. raises: CheckpointError if it cannot be
        written, and if the model has not the parameters of its config: other layers, shared ones, or adapters around their weights.
        """
        from .pretrained import save

        save(self, folder, tokenizer, max_shard_size)

    def rotary_tables(self, positions: int) -> tuple[NDArray, NDArray]:
        """(cos, sin) of positions 0 .. positions - 1."""
        return rotary_tables(positions, self.config.rotary_width, self.config.rotary_base, self.device)

    def hidden(self, ids: Tensor) -> Tensor:
        """(B, T) ids -> (B, T, C) after the final layer norm."""
        check_tensors("pythia", ids)
        if ids.ndim != 2:
            raise ShapeError(f"[pythia] ids are {ids.shape} (accepted: (batch, positions))")
        T = ids.shape[1]
        cos, sin = self.rotary_tables(T)
        layout = self.config.layout(T)
        x = self.dropout(ops.embedding(self.embed_in, ids))
        start = 0
        for count in self.config.checkpoint_segments:
            x = remat(self._run, x, start, start + count, cos, sin, layout)
            start += count
        return self.final_layer_norm(self._run(x, start, len(self.layers), cos, sin, layout))

    def _run(self, x: Tensor, start: int, stop: int, cos: NDArray, sin: NDArray, layout: BlockLayout) -> Tensor:
        """Layers start .. stop - 1."""
        for layer in self.layers[start:stop]:
            x = layer(x, cos, sin, layout)
        return x

    def forward(self, ids: Tensor) -> Tensor:
        """(B, T) ids -> (B, T, V) logits. raises: ShapeError, IndexError for an id outside the vocabulary."""
        return ops.matmul(self.hidden(ids), self.embed_out)

    def loss(self, ids: Tensor, targets: Tensor, chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> Tensor:
        """Mean cross entropy in nats, shape (1,), of predicting ``targets`` (B, T) from ``ids`` (B, T).

        At most max(chunk_bytes, one row) of logits exist at any time.
        raises: ShapeError, IndexError for an id outside the vocabulary.
        """
        return ops.linear_cross_entropy(self.hidden(ids), self.embed_out, targets, chunk_bytes=chunk_bytes)

    def parameter_groups(self, weight_decay: float = 0.1) -> list[dict]:
        """For AdamW: matrices decay; norms and biases do not."""
        decays: dict[bool, list[Parameter]] = {True: [], False: []}
        for name, p in self.named_parameters():
            decays[p.ndim > 1 and not name.endswith("bias")].append(p)  # nn.Linear's bias has two axes
        return [{"params": decays[True], "weight_decay": weight_decay}, {"params": decays[False], "weight_decay": 0.0}]

    def generate(self, input_ids, generation_config: GenerationConfig | None = None, **options) -> np.ndarray:
        """(B, longest) int64: each prompt, what follows it, and then ``pad_token_id`` up to the longest.

        input_ids: (B, T), or B sequences of ids of any lengths. generation_config: default the model's ``generation_config``.
        options: the names of GenerationConfig, as in transformers: max_new_tokens, do_sample, temperature, top_k, top_p,
        repetition_penalty, eos_token_id, pad_token_id, seed. No graph is kept, keys and values are cached, and a sparse model reads
        only the blocks of them that its pattern names. It runs the embeddings, ``layers`` and ``final_layer_norm`` themselves: the
        ``hidden`` and ``forward`` of a subclass, with tied embeddings say, have no effect here.
        raises: ShapeError for a value that is not allowed, TypeError for an option that is none, IndexError for an id outside the
        vocabulary, FloatingPointError where the model's logits are infinite or NaN.
        """
        return generation.generate(self, input_ids, generation_config, **options)

    def stream(self, input_ids, generation_config: GenerationConfig | None = None, **options) -> Iterator[np.ndarray]:
        """The new tokens of ``generate`` as they are made: (B,) int64 each time, pad_token_id for sequences that have ended.

        raises: as ``generate``; FloatingPointError when the token is asked for, the rest at once.
        """
        return generation.stream(self, input_ids, generation_config, **options)
