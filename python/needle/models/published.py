"""Pythia as it is published: names and layouts of the tensors, and config.json. source: GPTNeoX in transformers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from .. import dtype as dt
from ..backend_ndarray import NDArray
from ..errors import CheckpointError, ShapeError
from ..nn.nn_sparse import PATTERNS
from .pythia import Pythia, PythiaConfig, accepted_instead

_FOLDERS = {
    "query_key_value": "attention.query_key_value",
    "dense": "attention.dense",
    "dense_h_to_4h": "mlp.dense_h_to_4h",
    "dense_4h_to_h": "mlp.dense_4h_to_h",
}
# Constants that older versions of transformers kept in every layer.
_CONSTANTS = re.compile(r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)")
_SPARSE = "needle_attention"  # a key of config.json that transformers keeps and does not look at
# config.json's keys of the sizes; of what is the same in every Pythia, with what an absent key means.
_SIZES = {
    "hidden_size": "width",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "intermediate_size": "feed_forward",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_seq_len",
}
_FIXED = {
    "hidden_act": "gelu",
    "use_parallel_residual": True,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "attention_dropout": 0.0,
    "rope_scaling": None,
}


def published_name(name: str) -> str:
    """The published checkpoints' name of a parameter: layers.0.dense.weight -> gpt_neox.layers.0.attention.dense.weight."""
    if name == "embed_out":
        return "embed_out.weight"
    if name == "embed_in":
        return "gpt_neox.embed_in.weight"
    parts = name.split(".")
    if parts[0] == "layers":
        parts[2] = _FOLDERS.get(parts[2], parts[2])
    return "gpt_neox." + ".".join(parts)


def _is_transposed(name: str) -> bool:
    """Published linear weights are (out, in); needle's are (in, out)."""
    return name == "embed_out" or (name.endswith("weight") and name.split(".")[-2] in _FOLDERS)


def load_published(model: Pythia, state: Mapping[str, np.ndarray]) -> None:
    """Fills ``model`` from arrays with the published names and layouts, as ``fitting`` takes them."""
    model.load_state_dict(fitting(model, state))


def fitting(model: Pythia, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays under needle's names and in its layouts, as views; constants of old versions are left out.

    raises: CheckpointError if names, shapes or dtypes do not fit ``model``.
    """
    shapes = {name: p.shape[::-1] if _is_transposed(name) else p.shape for name, p in model.named_parameters()}
    wanted, found = set(map(published_name, shapes)), {name for name in state if not _CONSTANTS.fullmatch(name)}
    if wanted != found:
        missing, extra = sorted(wanted - found), sorted(found - wanted)
        raise CheckpointError(f"[load_published] names differ: missing {missing[:5]}, unexpected {extra[:5]}")
    mine = {}
    for name, shape in shapes.items():
        values = state[published_name(name)]
        if values.shape != shape or not dt.is_float(dt.name_of(values.dtype)):
            raise CheckpointError(
                f"[load_published] {published_name(name)} is {values.shape} {values.dtype} (accepted: {shape}, floats)"
            )
        mine[name] = values.T if _is_transposed(name) else values
    return mine


def published_state(model: Pythia) -> dict[str, NDArray]:
    """The parameters with the published names and layouts, as views on them."""
    arrays = {name: p.realize_cached_data() for name, p in model.named_parameters()}
    return {published_name(name): array.permute((1, 0)) if _is_transposed(name) else array for name, array in arrays.items()}


def config_json(config: PythiaConfig, dtype: str, end_of_text: int | None) -> dict[str, Any]:
    """config.json of a model, for old and new versions of transformers."""
    D, rotated, fraction = config.head_width, config.rotary_width, config.rotary_fraction
    if int(D * fraction) != rotated:  # odd: transformers would rotate that one, too
        fraction = (rotated + 0.5) / D
    rope = {"rope_type": "default", "rope_theta": config.rotary_base, "partial_rotary_factor": fraction}
    made: dict[str, Any] = {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        **{key: getattr(config, name) for key, name in _SIZES.items()},
        **{key: value for key, value in _FIXED.items() if value is not None},
        "layer_norm_eps": config.eps,
        "hidden_dropout": config.dropout,
        "rope_parameters": rope,
        "rotary_pct": fraction,
        "rotary_emb_base": config.rotary_base,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "dtype": dtype,
        "torch_dtype": dtype,
        "initializer_range": 0.02,
        "use_cache": True,
    }
    if config.pattern is not None:
        made[_SPARSE] = {"pattern": config.pattern, "block": config.block, "window": config.window}
    return made


def config_from_json(found: Mapping[str, Any]) -> PythiaConfig:
    """The model that a config.json describes. raises: CheckpointError if it is no Pythia."""
    if found.get("model_type") != "gpt_neox":
        raise _wrong("model_type", found.get("model_type"), "'gpt_neox'")
    for key, value in _FIXED.items():
        if found.get(key, value) != value:
            raise _wrong(key, found[key], repr(value))
    sizes: dict[str, Any] = {name: _whole_number(key, found.get(key)) for key, name in _SIZES.items()}
    rope, sparse = ({} if found.get(key) is None else found[key] for key in ("rope_parameters", _SPARSE))
    if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type", "default")) != "default":
        raise _wrong("rope_parameters", rope, "rope_type 'default'")
    # As transformers: its version 4 wrote copies of rotary_pct and rotary_emb_base under newer names, and never read them.
    fraction = _first((rope, "partial_rotary_factor"), (found, "rotary_pct"), default=0.25)
    base = _first((rope, "rope_theta"), (found, "rotary_emb_base"), default=10000.0)
    eps = _first((found, "layer_norm_eps"), default=1e-5)
    dropout = _first((found, "hidden_dropout"), default=0.0)
    for key, name, value in (
        ("rotary_pct", "rotary_fraction", fraction), ("rope_theta", "rotary_base", base), ("layer_norm_eps", "eps", eps),
        ("hidden_dropout", "dropout", dropout),
    ):  # fmt: skip
        if accepted := accepted_instead(name, value):
            raise _wrong(key, value, accepted)
    if sparse != {}:
        if not isinstance(sparse, dict) or set(sparse) != {"pattern", "block", "window"} or sparse["pattern"] not in PATTERNS:
            raise _wrong(_SPARSE, sparse, f"pattern ({', '.join(PATTERNS)}), block and window")
    try:
        config = PythiaConfig(
            **sizes, rotary_fraction=float(fraction), rotary_base=float(base), eps=float(eps), dropout=float(dropout), **sparse
        )
    except ShapeError as error:
        raise CheckpointError(f"[config.json] {error}") from None
    if found.get("head_dim") not in (None, config.head_width):
        raise _wrong("head_dim", found["head_dim"], f"{config.head_width}, hidden_size over num_attention_heads")
    rotated = int(config.head_width * config.rotary_fraction)
    if rotated % 2:  # what an odd one means differs between versions of transformers
        raise _wrong("rotary_pct", fraction, f"what rotates an even number of a head's {config.head_width} features, not {rotated}")
    return config


def _first(*places: tuple[Mapping[str, Any], str], default: float) -> Any:
    """The first value that is there."""
    return next((found[key] for found, key in places if found.get(key) is not None), default)


def _whole_number(key: str, value: object) -> int:
    if type(value) is not int or not 0 < value < 1 << 31:
        raise _wrong(key, value, "a whole number above 0")
    return value


def _wrong(key: str, value: object, accepted: str) -> CheckpointError:
    return CheckpointError(f"[config.json] {key} is {repr(value)[:80]} (accepted: {accepted})")
