"""Tensors in safetensors files: written as a stream, read through a memory map, and not trusted.

A file is 8 bytes with the length of its header, the header (JSON: name -> dtype, shape, offsets) and the data. The package
``safetensors`` judges what is read; it cannot write without having all arrays in memory at once, so that is done here.
source: https://huggingface.co/docs/safetensors, "Format".
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .. import dtype as dt
from .. import files
from ..autograd import Tensor
from ..backend_ndarray import NDArray
from ..errors import CheckpointError, DTypeError, type_name

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_SHARD = "model-{:05d}-of-{:05d}.safetensors"
_SHARD_PATTERN = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_BLOCK_BYTES = 1 << 20  # copied from the device at a time: it stays in the cache until it is written
_CODES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32", "uint8": "U8",
    "bool": "BOOL",
}  # fmt: skip
_NAMES = {code: name for name, code in _CODES.items()}
Arrays = Mapping[str, "Tensor | NDArray | np.ndarray"]


def _arrays(tensors: Arrays) -> dict[str, NDArray | np.ndarray]:
    arrays = {name: t.realize_cached_data() if isinstance(t, Tensor) else t for name, t in tensors.items()}
    for name, array in arrays.items():
        if not isinstance(array, (NDArray, np.ndarray, np.generic)):
            raise DTypeError(f"[write_tensors] {name} is of type {type_name(array)} (accepted: a Tensor or an array)")
    return arrays


def write_tensors(path: str | Path, tensors: Arrays) -> None:
    """Writes a new file, block by block: no array is copied as a whole.

    raises: OSError, for a file that is there already too; DTypeError for what is no array, or one of a dtype that needle
    does not have; CheckpointError for names, or more of them, that ``read_tensors`` would not read.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # whose layout the arrays have; transformers asks for it
    arrays, stop = _arrays(tensors), 0
    for name, array in arrays.items():
        start, stop = stop, stop + array.nbytes
        if not isinstance(name, str) or name == "__metadata__" or not _is_text(name):
            raise CheckpointError(f"[write_tensors] a name is {name!r} (accepted: text other than __metadata__)")
        code = _CODES[dt.name_of(array.dtype)]
        header[name] = {"dtype": code, "shape": list(array.shape), "data_offsets": [start, stop]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > files.SMALL_BYTES:
        most = f"{files.SMALL_BYTES} at most"
        raise CheckpointError(f"[write_tensors] the names of {len(arrays)} arrays take {len(text)} bytes ({most})")
    with open(path, "xb", buffering=0) as file:
        _write_all(file, len(text).to_bytes(8, "little") + text)
        for array in arrays.values():
            rows = array if array.ndim else array.reshape(1)
            step = max(1, _BLOCK_BYTES * len(rows) // max(1, array.nbytes))
            for i in range(0, len(rows), step):
                block = np.ascontiguousarray(np.asarray(rows[i : i + step]), dt.to_numpy(dt.name_of(array.dtype)))  # little-endian
                _write_all(file, block.reshape(-1).view(np.uint8))


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:  # half a pair of surrogates
        return False
    return True


def _write_all(file: Any, content: Any) -> None:
    """Writes all of ``content``: a raw file may take less than it is given, for instance when a disk is nearly full."""
    left = memoryview(content)
    while left:
        left = left[file.write(left) :]


def read_tensors(path: str | Path) -> dict[str, np.ndarray]:
    """Arrays on a memory map of the file: bytes are read from the disk when they are used. raises: CheckpointError."""
    try:
        import safetensors
    except ModuleNotFoundError:
        raise CheckpointError("[checkpoint] package missing: safetensors (pip install safetensors)") from None
    try:
        files.check_is_file(path)
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > files.SMALL_BYTES:
                raise ValueError(f"the header's length is {length} ({files.SMALL_BYTES} at most)")
            text = file.read(length)
            if not 0 < length == len(text):
                raise ValueError("cut off before the end of its header")
            header = files.parse_json(text)
        with safetensors.safe_open(path, "numpy"):
            pass  # dtypes, shapes and offsets fit: nothing overlaps, is left out or lies outside the file
        data = np.memmap(path, np.uint8, "r")
        header.pop("__metadata__", None)
        return {name: _view(data, 8 + length, entry) for name, entry in header.items()}
    except (OSError, ValueError, DTypeError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"[checkpoint] cannot read {path}: {files.reason(error)}") from error


def _view(data: np.ndarray, start: int, entry: dict[str, Any]) -> np.ndarray:
    if entry["dtype"] not in _NAMES:
        raise DTypeError(f"dtype {entry['dtype']} (accepted: {', '.join(_NAMES)})")
    return np.ndarray(entry["shape"], dt.to_numpy(_NAMES[entry["dtype"]]), data, start + entry["data_offsets"][0])


def write_folder(folder: str | Path, tensors: Arrays, max_shard_bytes: int) -> None:
    """Writes model.safetensors, or shards of at most ``max_shard_bytes`` (or one tensor) and their index.

    raises: OSError, for a folder that has weights already too: of two kinds of files one would be read.
    """
    folder = Path(folder)
    there = next((path for path in folder.iterdir() if is_weights(path.name)), None)
    if there is not None:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(there))
    shards: list[dict[str, NDArray | np.ndarray]] = [{}]
    arrays, used = _arrays(tensors), 0
    for name, array in arrays.items():
        if used and used + array.nbytes > max_shard_bytes:
            shards.append({})
            used = 0
        shards[-1][name] = array
        used += array.nbytes
    if len(shards) == 1:
        write_tensors(folder / WEIGHTS, arrays)
        return
    places: dict[str, str] = {}
    for i, shard in enumerate(shards):
        file = _SHARD.format(i + 1, len(shards))
        write_tensors(folder / file, shard)
        places |= dict.fromkeys(shard, file)
    total = sum(array.nbytes for array in arrays.values())
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2))


def is_weights(name: str) -> bool:
    """Whether ``write_folder`` makes a file of that name."""
    return name in (WEIGHTS, INDEX) or _SHARD_PATTERN.fullmatch(name) is not None


def read_folder(folder: str | Path) -> dict[str, np.ndarray]:
    """What ``write_folder`` or another library wrote, through memory maps. raises: CheckpointError."""
    folder = Path(folder)
    try:
        weights = files.member(folder, WEIGHTS)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise CheckpointError(f"[checkpoint] cannot read {folder}: {files.reason(error)}") from error
    else:
        return read_tensors(weights)
    try:
        places = files.parse_json(files.read_small(files.member(folder, INDEX))).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
            raise ValueError("weight_map is no table of file names")
        shards = {file: files.member(folder, file) for file in sorted(set(places.values()))}
    except FileNotFoundError as error:
        if not (folder / INDEX).is_file():
            raise CheckpointError(
                f"[checkpoint] no weights in {folder}: {_found(folder)} ({WEIGHTS} or {INDEX}; no pickled ones)"
            ) from None
        raise CheckpointError(f"[checkpoint] {folder / INDEX} names a file that is missing: {error.filename}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"[checkpoint] cannot read {folder / INDEX}: {files.reason(error)}") from error
    tensors: dict[str, np.ndarray] = {}
    for file, path in shards.items():
        shard = read_tensors(path)
        for name in shard.keys() | {name for name, place in places.items() if place == file}:
            if name not in shard or places.get(name) != file:
                where = f"in {file}" if name in shard else f"not in {file}"
                raise CheckpointError(f"[checkpoint] {folder / INDEX} says {places.get(name)} for {name}, which is {where}")
        tensors |= shard
    return tensors


def _found(folder: Path) -> str:
    """What is there instead of weights, for an error. Pickled ones are refused: loading them runs any code that is in them."""
    pickled = sorted(path.name for path in folder.glob("*.bin")) + sorted(path.name for path in folder.glob("*.pt*"))
    return f"only {pickled[0]}, which is pickled and could run code" if pickled else "nothing that holds any"
