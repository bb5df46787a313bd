"""Weights, token ids and probe vectors made by a formula, the same on every machine. Needs numpy alone.

A golden file for a model of 70M parameters cannot hold its weights. So both sides make them: the script that ran the
reference implementation, and the test that runs needle. Everything here is integer arithmetic modulo 2**32 followed by
one float32 rounding, so it does not depend on the platform, on numpy's version or on the order of evaluation.

    weight = formula_weights("gpt_neox.layers.0.attention.dense.weight", (512, 512), PYTHIA_70M)   # (out, in) float32
"""

import zlib
from dataclasses import dataclass

import numpy as np

_CHUNK_ELEMENTS = 1 << 20  # hash in pieces, so that the 25.7M-element embedding needs no big temporaries


@dataclass(frozen=True)
class PythiaShape:
    """The sizes that fix every parameter shape (V, C, H, F and L of the README)."""

    vocab: int
    d_model: int
    n_heads: int
    d_ff: int
    n_layers: int


PYTHIA_TINY = PythiaShape(vocab=97, d_model=32, n_heads=4, d_ff=64, n_layers=2)
PYTHIA_70M = PythiaShape(vocab=50304, d_model=512, n_heads=8, d_ff=2048, n_layers=6)


def parameter_shapes(shape: PythiaShape) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every parameter, named and laid out as in the published checkpoints (Linear: (out, in))."""
    V, C, F = shape.vocab, shape.d_model, shape.d_ff
    shapes: dict[str, tuple[int, ...]] = {"gpt_neox.embed_in.weight": (V, C)}
    for layer in range(shape.n_layers):
        prefix = f"gpt_neox.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}{norm}.weight"] = (C,)
            shapes[f"{prefix}{norm}.bias"] = (C,)
        for linear, out_features, in_features in (
            ("attention.query_key_value", 3 * C, C),
            ("attention.dense", C, C),
            ("mlp.dense_h_to_4h", F, C),
            ("mlp.dense_4h_to_h", C, F),
        ):
            shapes[f"{prefix}{linear}.weight"] = (out_features, in_features)
            shapes[f"{prefix}{linear}.bias"] = (out_features,)
    shapes["gpt_neox.final_layer_norm.weight"] = (C,)
    shapes["gpt_neox.final_layer_norm.bias"] = (C,)
    shapes["embed_out.weight"] = (V, C)
    return shapes


def hash32(name: str, start: int, stop: int) -> np.ndarray:
    """(stop - start,) uint32: the MurmurHash3 finalizer of (flat index * odd constant + crc32(name)), modulo 2**32."""
    h = np.arange(start, stop, dtype=np.uint32)
    h *= np.uint32(0x9E3779B1)
    h += np.uint32(zlib.crc32(name.encode()))
    h ^= h >> np.uint32(16)
    h *= np.uint32(0x85EBCA6B)
    h ^= h >> np.uint32(13)
    h *= np.uint32(0xC2B2AE35)
    h ^= h >> np.uint32(16)
    return h


def uniform(name: str, shape: tuple[int, ...], std: float = 1.0) -> np.ndarray:
    """``shape`` float32, uniform with mean 0 and standard deviation ``std``; a function of name, flat index and std."""
    size = int(np.prod(shape, dtype=np.int64))
    out = np.empty(size, dtype=np.float32)
    scale = np.float32(np.sqrt(3.0) * std)
    for start in range(0, size, _CHUNK_ELEMENTS):
        stop = min(start + _CHUNK_ELEMENTS, size)
        # An odd integer over 2**24 in (-1, 1) is exact in float32: the product with scale is the only rounding.
        odd = (hash32(name, start, stop) >> np.uint32(8)).astype(np.int32) * 2 + (1 - (1 << 24))
        out[start:stop] = odd.astype(np.float32) * np.float32(2.0**-24) * scale
    return out.reshape(shape)


def weight_std(name: str, shape: PythiaShape) -> float:
    """Standard deviation for one parameter.

    Matrices follow Pythia's initialization: 2 / (L sqrt(C)) for the two projections into the residual stream,
    sqrt(2 / (5 C)) for the others. Biases and norms, which Pythia starts at 0 and 1, are spread too: a test must notice
    when one of them is left out.
    """
    if name.endswith(".bias"):
        return 0.05
    if "norm" in name:
        return 0.2  # around 1, see formula_weights
    if name.endswith(("attention.dense.weight", "mlp.dense_4h_to_h.weight")):
        return 2.0 / (shape.n_layers * shape.d_model**0.5)
    return (2.0 / (5.0 * shape.d_model)) ** 0.5


def formula_weights(name: str, parameter_shape: tuple[int, ...], shape: PythiaShape) -> np.ndarray:
    """The float32 value of one parameter."""
    values = uniform(name, parameter_shape, weight_std(name, shape))
    return values + np.float32(1.0) if "norm.weight" in name else values


def token_ids(name: str, shape: tuple[int, ...], vocab: int) -> np.ndarray:
    """``shape`` int64 token ids in [0, vocab)."""
    size = int(np.prod(shape, dtype=np.int64))
    return (hash32(name, 0, size).astype(np.int64) % vocab).reshape(shape)


def probe(index: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Probe vector ``index`` for the parameter (or array) ``name``: ``shape`` float32, mean 0, standard deviation 1.

    ``sum(grad * probe)`` is a random projection of the gradient: its size is about the norm of the gradient, so an
    error in it should be compared with that norm, not with the projection itself (which may be small by chance).
    """
    return uniform(f"probe{index}/{name}", shape)
