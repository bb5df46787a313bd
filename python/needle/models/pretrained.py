"""Folders that transformers and needle both load: config.json, model.safetensors, tokenizer.json; and the Hub, which has such."""

from __future__ import annotations

import json
import operator
import os
import re
import shutil
import tempfile
import warnings
from dataclasses import asdict, fields
from pathlib import Path

from .. import files
from ..backend_ndarray import BackendDevice
from ..backend_ndarray import meta as shapes_only
from ..backend_selection import as_device
from ..checkpoints import CheckpointFolder
from ..checkpoints.tensors import INDEX, is_weights, read_folder, write_folder
from ..data.text_tokenizer import END_OF_TEXT, TOKENIZER, TOKENIZER_CONFIG, TextTokenizer, load_tokenizer
from ..errors import CheckpointError, DataError, DTypeError, ShapeError, type_name
from ..memory.room import capacity
from ..memory.units import parse_bytes
from .generation import GenerationConfig
from .published import config_from_json, config_json, fitting, load_published, published_state
from .pythia import Pythia, PythiaConfig

CONFIG, GENERATION = "config.json", "generation_config.json"
_UNSET = {"temperature": 0, "top_k": -1, "pad_token_id": -1}  # in use for "none"; the first two where no token is drawn
_OTHER_WAYS = {  # keys of transformers that choose other tokens, and the values with which they do not
    "num_beams": 1, "num_beam_groups": 1, "length_penalty": 1.0, "penalty_alpha": 0, "no_repeat_ngram_size": 0, "min_p": 0,
    "typical_p": 1.0, "epsilon_cutoff": 0, "eta_cutoff": 0, "top_h": 0, "bad_words_ids": [], "suppress_tokens": [],
    "begin_suppress_tokens": [], "sequence_bias": {}, "forced_bos_token_id": (), "forced_eos_token_id": (), "min_length": 0,
    "min_new_tokens": 0, "max_length": 20, "exponential_decay_length_penalty": (), "guidance_scale": 1, "stop_strings": [],
}  # fmt: skip
_ON_THE_HUB = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def load(kind: type[Pythia], source: str | Path, device: BackendDevice | None, dtype: str, revision: str | None) -> Pythia:
    """``Pythia.from_pretrained``. The files are compared with config.json before anything is allocated."""
    folder = folder_of(source, revision)
    config = read_config(folder)
    state = read_folder(folder)
    if config.layers > len(state):
        raise CheckpointError(
            f"[from_pretrained] {folder / CONFIG} says {config.layers} layers: the files hold {len(state)} tensors"
        )
    device = as_device(device)
    generation = read_generation(folder)
    try:
        planned = kind(config, device=shapes_only(), dtype=dtype, seed=None)
        fitting(planned, state)
        _check_room(planned, device)
        model = kind(config, device=device, dtype=dtype, seed=None)
        load_published(model, state)
        model.generation_config = generation
        model.eval()
    except CheckpointError as error:
        raise CheckpointError(f"[from_pretrained] {folder}: {error}") from None
    return model


def read_config(folder: Path) -> PythiaConfig:
    """raises: CheckpointError if the folder's config.json is absent, damaged or of another kind of model."""
    try:
        found = files.parse_json(files.read_small(files.member(folder, CONFIG)))
    except (OSError, ValueError) as error:
        checkpoints = CheckpointFolder(folder).names() if isinstance(error, FileNotFoundError) else []
        accepted = f" (a checkpoint of this run, such as {folder / checkpoints[-1]})" if checkpoints else ""
        raise CheckpointError(f"[from_pretrained] cannot read {folder / CONFIG}: {files.reason(error)}{accepted}") from error
    return config_from_json(found)


def read_generation(folder: Path, or_config: bool = True) -> GenerationConfig:
    """The keys of the folder's generation_config.json that needle knows; a warning names others that would choose other tokens.
    Without one the defaults, and (or_config) what config.json says of the end of a sequence, as in transformers.
    raises: CheckpointError.
    """
    name, known = GENERATION, {field.name for field in fields(GenerationConfig)} - {"seed"}
    if not os.path.lexists(folder / GENERATION):
        if not or_config:
            return GenerationConfig()
        name, known = CONFIG, {"eos_token_id", "pad_token_id"}
    try:
        found = files.parse_json(files.read_small(files.member(folder, name)))
        given = {key: found[key] for key in known & found.keys() if found[key] is not None}
        unset = {key for key, none in _UNSET.items() if given.get(key) == none and not isinstance(given[key], bool)}
        if given.get("do_sample", False) is not False:
            unset -= {"temperature", "top_k"}
        made = GenerationConfig(**{key: value for key, value in given.items() if key not in unset})
    except (OSError, ValueError) as error:
        raise CheckpointError(f"[from_pretrained] cannot use {folder / name}: {files.reason(error)}") from error
    others = sorted(key for key, usual in _OTHER_WAYS.items() if name == GENERATION and found.get(key) not in (None, usual))
    if others:
        warnings.warn(f"[from_pretrained] {folder / name}: {', '.join(others)}: no effect here", stacklevel=2)
    return made


def _check_room(planned: Pythia, device: BackendDevice) -> None:
    """raises: CheckpointError for more parameters than fit: a sparse file can claim any size without taking room on a disk."""
    needed, there = sum(p.realize_cached_data().nbytes for p in planned.parameters()), capacity(device)
    if there and needed > there:
        raise CheckpointError(f"parameters take {needed:,} bytes ({device} has {there:,})")


def folder_of(source: str | Path, revision: str | None = None) -> Path:
    """``source`` if it is a folder, else the folder that its files are downloaded to from the Hub. raises: CheckpointError."""
    try:
        path = files.home(source)
        if path.is_dir():
            return path
    except DataError as error:
        raise CheckpointError(f"[from_pretrained] no such folder: {error}") from None
    except OSError as error:  # a name that is too long for one
        raise CheckpointError(f"[from_pretrained] no such folder: {source}: {files.reason(error)}") from None
    if path.exists() or not _ON_THE_HUB.fullmatch(str(source)):
        raise CheckpointError(f"[from_pretrained] no such folder: {source} (or a name on the Hub, as EleutherAI/pythia-70m)")
    try:
        import huggingface_hub
    except ModuleNotFoundError:
        raise CheckpointError(
            f"[from_pretrained] no such folder: {source}; the Hub needs a package (pip install huggingface_hub)"
        ) from None
    wanted = [CONFIG, GENERATION, "model*.safetensors", INDEX, TOKENIZER, TOKENIZER_CONFIG]
    try:
        return Path(huggingface_hub.snapshot_download(str(source), revision=revision, allow_patterns=wanted))
    except Exception as error:  # of several libraries; without a network not even an OSError in each of them
        raise CheckpointError(
            f"[from_pretrained] no such folder, and the Hub did not give {source}: {files.reason(error)}"
        ) from error


def tokenizer_of(source: str | Path, revision: str | None = None) -> TextTokenizer:
    """The tokenizer beside the model that ``Pythia.from_pretrained(source, revision=revision)`` loads.

    raises: DataError for a tokenizer that is absent or damaged, CheckpointError for no such folder.
    """
    folder = folder_of(source, revision)
    try:
        path = files.member(folder, TOKENIZER)
    except (OSError, ValueError) as error:
        raise DataError(f"[tokenizer] cannot read {folder / TOKENIZER}: {files.reason(error)} (a tokenizer.json)") from error
    return load_tokenizer(path)


def save(model: Pythia, given: str | Path, tokenizer: TextTokenizer | None, max_shard_size: int | str) -> None:
    """``Pythia.save_pretrained``: all is written beside its place first, and then moved there."""
    if not isinstance(tokenizer, TextTokenizer | None):
        accepted = "a TextTokenizer, as pretrained.tokenizer_of gives it"
        raise DTypeError(f"[save_pretrained] tokenizer is of type {type_name(tokenizer)} (accepted: {accepted})")
    limit = parse_size(max_shard_size)
    _check_parts(model)
    try:
        folder, partial = files.home(given), None
        os.fsencode(folder)
    except (DataError, UnicodeEncodeError) as error:
        raise CheckpointError(f"[save_pretrained] no folder: {error}") from None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder))
        write(model, partial, tokenizer, limit)
        made = sorted(path.name for path in partial.iterdir())
        for name in made:
            files.flush(partial / name)
        for path in folder.iterdir():
            if (is_weights(path.name) or path.name == GENERATION) and path.name not in made:  # of the model that was there
                path.unlink()
        for name in made:
            os.replace(partial / name, folder / name)
        files.flush(folder)
    except OSError as error:
        raise CheckpointError(
            f"[save_pretrained] cannot write {folder}: {files.reason(error)} (room in a writable folder)"
        ) from error
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)


def _check_parts(model: Pythia) -> None:
    """raises: CheckpointError for a model that has not every parameter its config speaks of: who loads it would draw the others."""
    found = {name: array.shape for name, array in published_state(model).items()}
    for name, array in published_state(Pythia(model.config, device=shapes_only(), seed=None)).items():
        if found.get(name) != array.shape:
            raise CheckpointError(
                f"[save_pretrained] {name} is {found.get(name, 'absent')} (accepted: {array.shape}, as the model's config says)"
            )


def write(model: Pythia, folder: Path, tokenizer: TextTokenizer | None = None, max_shard_bytes: int = 5 * 10**9) -> None:
    """The files, into a folder that has none of them. raises: OSError."""
    write_folder(folder, published_state(model), max_shard_bytes)
    end = 0 if tokenizer is None else tokenizer.end_of_text  # 0: of the published tokenizer
    _write_json(folder / CONFIG, config_json(model.config, model.dtype, end))
    usual = asdict(GenerationConfig())
    chosen = {name: value for name, value in asdict(model.generation_config).items() if name != "seed" and value != usual[name]}
    if "top_k" in chosen:  # a null would be read as the default, here as in transformers
        chosen["top_k"] = chosen["top_k"] or 0
    if chosen and chosen != {"eos_token_id": end}:  # without the file config.json says that, here as in transformers
        _write_json(folder / GENERATION, chosen)
    if tokenizer is None:
        return
    (folder / TOKENIZER).write_text(tokenizer.to_json(), encoding="utf-8")
    name = None if end is None else tokenizer.tokenizer.id_to_token(end)
    special: dict[str, str | None] = {"bos_token": name}
    if name == END_OF_TEXT and not tokenizer.settings:
        special["unk_token"] = name
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": model.config.max_seq_len, **special}
    about = {**about, **tokenizer.settings, "eos_token": name, "clean_up_tokenization_spaces": False}
    _write_json(folder / TOKENIZER_CONFIG, about)


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, default=operator.methodcaller("item")) + "\n")  # numpy's numbers


def parse_size(size: int | str) -> int:
    """Bytes of a number, or of a text such as "5GB" or "200MiB". raises: CheckpointError."""
    try:
        return parse_bytes(size)
    except ShapeError:
        raise CheckpointError(
            f"[save_pretrained] max_shard_size is {size!r} (accepted: bytes, or a text such as '5GB' or '200MiB')"
        ) from None
