"""Files of the cache, complete or absent, each with a checksum; most are flat arrays of ids, which are read through memory maps."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from ..files import check_is_file, parse_json, read_small, write_whole


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest unsigned dtype for ids below ``vocab_size``: uint16 or uint32."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def write_checksum(path: Path) -> None:
    """Writes ``path``.json, of a file that is there, for ``is_as_written``."""
    with write_whole(_description(path)) as file:
        file.write(json.dumps({"crc32": _checksum(path)}).encode())


def is_as_written(path: Path) -> bool:
    """Whether a file is what it was when ``write_checksum`` was called, or that was not done; False if it is absent."""
    try:
        check_is_file(path)
        return not os.path.lexists(_description(path)) or parse_json(read_small(_description(path))).get("crc32") == _checksum(path)
    except (OSError, ValueError):
        return False


def write_tokens(path: Path, ids: Iterable[np.ndarray], vocab_size: int) -> np.ndarray:
    """Writes ``path`` (little-endian ids), then ``path``.json with its checksum. Returns what ``read_tokens`` does."""
    dtype = token_dtype(vocab_size).newbyteorder("<")
    count = checksum = 0
    with write_whole(path) as file:
        for part in ids:
            raw = part.astype(dtype).tobytes()
            file.write(raw)
            count, checksum = count + len(part), zlib.crc32(raw, checksum)
    with write_whole(_description(path)) as file:
        file.write(json.dumps({"tokens": count, "vocab_size": vocab_size, "crc32": checksum}).encode())
    return _map(path, dtype, count)


def read_tokens(path: Path) -> np.ndarray | None:
    """(tokens,) uint16 or uint32, memory-mapped and read-only; None if the file is absent or damaged."""
    try:
        description = parse_json(read_small(_description(path)))
        dtype, count = token_dtype(int(description["vocab_size"])).newbyteorder("<"), int(description["tokens"])
        if path.stat().st_size != count * dtype.itemsize or _checksum(path) != description["crc32"]:
            return None
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return _map(path, dtype, count)


def _checksum(path: Path) -> int:
    checksum = 0
    with open(path, "rb") as file:
        while raw := file.read(1 << 20):
            checksum = zlib.crc32(raw, checksum)
    return checksum


def _map(path: Path, dtype: np.dtype, count: int) -> np.ndarray:
    return np.memmap(path, dtype, mode="r") if count else np.empty(0, dtype)  # an empty file cannot be mapped


def _description(path: Path) -> Path:
    return path.with_name(path.name + ".json")
