"""Token files: ids on the disk, read through memory maps and never as a whole.

Three kinds are read:
- Megatron's pair ``PREFIX.bin`` and ``PREFIX.idx``, which gpt-neox, Megatron-LM and Pythia's own data have;
- llm.c's ``.bin``: a header of 256 int32, then ids;
- a plain ``.bin`` of nothing but ids, 16 or 32 bits each, as nanoGPT writes it.

The first is written, too, by ``TokenWriter``. ``docs/data.md`` has the layouts.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from .. import files
from ..errors import DataError
from .text_corpus import CORPORA
from .text_tokenizer import LARGEST_VOCABULARY, TOKENIZER, TOKENIZER_CONFIG

# The files of one data set: name in an unfinished folder -> ending of the published file, in the order of publication.
ENDINGS = {TOKENIZER_CONFIG: f".{TOKENIZER_CONFIG}", TOKENIZER: f".{TOKENIZER}", "tokens": ".bin", "index": ".idx"}
_MAGIC, _VERSION = b"MMIDIDX\0\0", 1
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype, sequences, entries of the index of documents
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats, which are no ids
_LLMC = {20240520: (1, "<u2"), 20240801: (7, "<u4")}  # magic: version, dtype
_LLMC_HEADER_BYTES = 1024
_SAMPLE_TOKENS = 1 << 18
_ENTRIES = 1 << 18  # of an index, looked at or written at a time
_SEQUENCE_TOKENS = 1 << 30  # the most in a sequence that is written; its length is an int32


@dataclass(frozen=True)
class TokenFile:
    """A token file; one without an index is one sequence.

    tokens: (tokens,) integers, those of all sequences in a row. lengths: (sequences,) int32. starts: (sequences,) int64, in bytes.
    All are memory-mapped. sequence_tokens: how long every sequence is, if they are of one length.
    """

    path: Path
    tokens: np.ndarray
    lengths: np.ndarray
    starts: np.ndarray
    sequence_tokens: int | None

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, sequence: int) -> np.ndarray:
        """The ids of one sequence."""
        start = int(self.starts[sequence]) // self.tokens.itemsize
        return self.tokens[start : start + int(self.lengths[sequence])]

    def sequence_at(self, token: int) -> int:
        """Index of the first token, ``token`` or after it, at which a sequence begins; the number of tokens if there is none."""
        at = bisect.bisect_left(self.starts, token * self.tokens.itemsize)
        return int(self.starts[at]) // self.tokens.itemsize if at < len(self) else len(self.tokens)


def find_token_file(name: str) -> Path | None:
    """The .bin file that ``name`` names: itself, or its .idx, or both without their endings. None if it names none, or is the name
    of a data set.
    """
    if name in CORPORA:
        return None
    name = name and str(files.home(name))
    stem = name.removesuffix(".idx") if name.endswith(".idx") else name.removesuffix(".bin")
    given = name != stem
    if not stem or os.path.isdir(name) or (not given and os.path.isfile(name)):
        return None
    found = os.path.isfile(name) if given else os.path.isfile(f"{stem}.bin")  # unlike Path's, False for what can be no path
    return Path(f"{stem}.bin") if found else None


def tokenizer_beside(path: Path) -> Path:
    """Where the tokenizer of the token file ``path`` (a .bin) is, if it has one."""
    return path.with_name(path.name.removesuffix(".bin") + ENDINGS[TOKENIZER])


def tokenizer_for(path: Path | None, given: str | Path | None) -> Path | None:
    """The tokenizer.json to read the token file ``path`` with, if that is one: ``given``, else what lies beside it, if anything."""
    if given is not None:
        return files.home(given)
    beside = tokenizer_beside(path) if path is not None else None
    return beside if beside is not None and beside.is_file() else None


def read_token_file(path: str | Path, vocab_size: int | None = None) -> TokenFile:
    """The token file ``path`` (a .bin). An index is read once to its end and must describe just this file.

    vocab_size: tells the width of the ids of a plain file, 32 bits if its first 32-bit numbers all are ids below it, or are for a
    larger vocabulary; else 16.
    raises: DataError, in one line, for files that are truncated, damaged, do not belong together or hold no ids.
    """
    path = Path(path)
    index = path.with_name(path.name.removesuffix(".bin") + ".idx")
    try:
        nbytes = path.stat().st_size
        if not os.path.lexists(index):
            return _unindexed(path, nbytes, vocab_size)
        if not index.is_file():  # read as a plain file, the .bin would have ids of another width perhaps
            raise DataError(f"[{index.name}] no file, or a link to none: {index} (the index of {path.name}, or nothing there)")
        return _indexed(path, index, nbytes)
    except OSError as error:
        wrong = error.filename or path
        raise DataError(f"[{path.name}] cannot read {wrong}: {files.reason(error)} (a readable token file)") from error


def _indexed(path: Path, index: Path, nbytes: int) -> TokenFile:
    with open(index, "rb") as file:
        raw = file.read(_HEADER.size)
    if not raw.startswith(_MAGIC[: len(raw)]) or not raw:
        raise DataError(f"[{index.name}] no Megatron index: it begins with {raw[:9]!r} ({_MAGIC!r})")
    if len(raw) < _HEADER.size:
        raise DataError(f"[{index.name}] cut off: {len(raw)} bytes (a header of {_HEADER.size})")
    _, version, code, sequences, entries = _HEADER.unpack(raw)
    if version != _VERSION:
        raise DataError(f"[{index.name}] unknown version: {version} ({_VERSION})")
    if code not in _DTYPES:
        raise DataError(f"[{index.name}] no integers: dtype code {code} ({', '.join(map(str, _DTYPES))})")
    size, expected = index.stat().st_size, _HEADER.size + 12 * sequences + 8 * entries
    if size != expected:
        raise DataError(f"[{index.name}] cut off or damaged: {size} bytes ({expected} for {sequences} sequences, as it says)")
    if not sequences or not nbytes:
        raise DataError(f"[{path.name}] no tokens: {sequences} sequences, {nbytes} bytes (one token at least)")
    place, parts = _HEADER.size, []
    for dtype, count in (("<i4", sequences), ("<i8", sequences), ("<i8", entries)):
        parts.append(_map(index, dtype, place, count))
        place += count * np.dtype(dtype).itemsize
    lengths, starts, documents = parts
    itemsize = np.dtype(_DTYPES[code]).itemsize
    shortest, longest = _check_sequences(index.name, lengths, starts, itemsize, nbytes, path.name)
    _check_documents(index.name, documents, sequences)
    tokens = _map(path, _DTYPES[code], 0, nbytes // itemsize)
    return TokenFile(path, tokens, lengths, starts, longest if shortest == longest else None)


def _check_sequences(name: str, lengths: np.ndarray, starts: np.ndarray, itemsize: int, nbytes: int, data: str) -> tuple[int, int]:
    """Returns the shortest and the longest length. raises: DataError unless each sequence begins where the one before ends, and the
    last one ends with the data.
    """
    place, shortest, longest = 0, 1 << 31, 0
    for first in range(0, len(lengths), _ENTRIES):
        piece = np.asarray(lengths[first : first + _ENTRIES], np.int64)
        shortest, longest = min(shortest, int(piece.min())), max(longest, int(piece.max()))
        if shortest < 0:
            at = first + int(piece.argmin())
            raise DataError(f"[{name}] sequence {at} has a negative length: {shortest} (0 or more)")
        ends = place + np.cumsum(piece) * itemsize
        wrong = np.flatnonzero(starts[first : first + _ENTRIES] != ends - piece * itemsize)
        if len(wrong):
            at = int(wrong[0])
            raise DataError(
                f"[{name}] sequence {first + at} does not follow the one before: it begins at byte {int(starts[first + at])} "
                f"({int(ends[at] - piece[at] * itemsize)})"
            )
        place = int(ends[-1])
    if place != nbytes:
        raise DataError(f"[{data}] not the data of {name}: {nbytes} bytes ({place} in the index; is it cut off, or another's?)")
    return shortest, longest


def _check_documents(name: str, documents: np.ndarray, sequences: int) -> None:
    """raises: DataError unless the table of documents (the number of sequences before each, then of all) is in order. Training does
    not use it, but disorder means damage.
    """
    before = 0
    for first in range(0, len(documents), _ENTRIES):
        piece = np.asarray(documents[first : first + _ENTRIES])
        if int(piece[0]) < before or (piece[1:] < piece[:-1]).any() or (first == 0 and piece[0] != 0):
            raise DataError(f"[{name}] damaged: the documents are not in order (they begin at sequence 0 and never go back)")
        before = int(piece[-1])
    if before != sequences and len(documents) != 1:  # 0 alone: whoever wrote it with Megatron's library named no documents
        raise DataError(f"[{name}] damaged: the documents end at sequence {before} ({sequences})")


def _unindexed(path: Path, nbytes: int, vocab_size: int | None) -> TokenFile:
    with open(path, "rb") as file:
        magic, version, count = struct.unpack("<3i", file.read(12).ljust(12, b"\0"))
    place = 0
    if magic in _LLMC:
        known, dtype = _LLMC[magic]
        place = _LLMC_HEADER_BYTES
        if version != known:
            raise DataError(f"[{path.name}] unknown version of llm.c's format: {version} ({known})")
        if count < 0 or nbytes != place + count * np.dtype(dtype).itemsize:
            raise DataError(f"[{path.name}] cut off or damaged: {nbytes} bytes ({count} tokens after {place} bytes, as it says)")
    else:
        dtype = _width(path, nbytes, vocab_size)
        count, rest = divmod(nbytes, np.dtype(dtype).itemsize)
        if rest:
            raise DataError(f"[{path.name}] cut off: {nbytes} bytes (whole ids of {np.dtype(dtype).itemsize} bytes)")
    if not count:
        raise DataError(f"[{path.name}] no tokens: {nbytes} bytes (one token at least)")
    return TokenFile(path, _map(path, dtype, place, count), np.array([count]), np.array([0]), None)


def _width(path: Path, nbytes: int, vocab_size: int | None) -> str:
    """The dtype of a plain file's ids. Text of 16-bit ids, read as 32-bit numbers, soon has one above any vocabulary."""
    most = min(nbytes // 4, _SAMPLE_TOKENS)
    if nbytes % 4 or not most:
        return "<u2"
    if int(_map(path, "<u4", 0, most).max()) < (vocab_size or LARGEST_VOCABULARY):
        return "<u4"
    low, high = _map(path, "<u2", 0, 2 * most).reshape(-1, 2).max(axis=0)
    # Ids of 16 bits are alike at all places; halves of 32-bit ones, some of them above ``vocab_size``, are not.
    return "<u4" if high < LARGEST_VOCABULARY >> 16 <= low else "<u2"


def _map(path: Path, dtype: str, place: int, count: int) -> np.ndarray:
    return np.asarray(np.memmap(path, dtype, "r", place, (count,))) if count else np.empty(0, dtype)


def sample(tokens: np.ndarray, most: int) -> Iterator[np.ndarray]:
    """Pieces of ``tokens``, all of them if they are no more than ``most``, else so many from evenly spread places."""
    pieces = -(-min(len(tokens), most) // _SAMPLE_TOKENS)
    whole = len(tokens) <= most
    for i in range(pieces):
        start = i * _SAMPLE_TOKENS if whole else i * (len(tokens) - _SAMPLE_TOKENS) // max(pieces - 1, 1)
        yield np.asarray(tokens[start : start + _SAMPLE_TOKENS])


class TokenWriter:
    """Writes a Megatron pair little by little, so that a process that was killed goes on from its last ``flush``.

    What is there so far lies in ``folder`` in files of its own: ids, the lengths of sequences, and the ends of documents.
    ``finish`` makes the pair of them.

    vocab_size: ids are uint16 if they fit, else int32. state: what ``flush`` gave; what was written after it is dropped.
    raises: DataError for ids above int32, and for files that cannot be written, or are shorter than ``state`` says.
    """

    STATE = ("tokens", "sequences", "documents", "open")  # what is counted

    def __init__(self, folder: Path, vocab_size: int, state: Mapping[str, int] | None = None):
        if vocab_size > 1 << 31:
            raise DataError(f"[{folder.name}] ids up to {vocab_size - 1} (accepted: below 2^31)")
        self.folder, self._code = folder, 8 if vocab_size <= 1 << 16 else 4
        self.dtype = np.dtype(_DTYPES[self._code])
        self._state = dict(state or dict.fromkeys(self.STATE, 0))
        sizes = {
            "tokens": self._state["tokens"] * self.dtype.itemsize,
            "lengths": self._state["sequences"] * 4,
            "documents": self._state["documents"] * 8,
        }
        self._files: dict[str, BinaryIO] = {}
        try:
            with files.writing(folder):
                for name, size in sizes.items():
                    there = (folder / name).stat().st_size if state else 0
                    if there < size:
                        raise DataError(f"[{folder.name}] damaged: {folder / name} has {there} bytes ({size} when it was left)")
                    self._files[name] = open(folder / name, "r+b" if state else "w+b")
                    self._files[name].truncate(size)
                    self._files[name].seek(size)
        except BaseException:  # Ctrl-C among them: nobody else has these files to close
            self.close()
            raise

    @property
    def tokens(self) -> int:
        """Written so far."""
        return self._state["tokens"]

    @property
    def documents(self) -> int:
        """Ended so far."""
        return self._state["documents"]

    def write(self, ids: np.ndarray, ends: Sequence[int] | np.ndarray = ()) -> None:
        """More ids. A document ends before each of the places ``ends`` in them, which increase; the rest stays open."""
        state = self._state
        with files.writing(self.folder):
            if state["open"] and state["open"] + len(ids) > _SEQUENCE_TOKENS:
                self._files["lengths"].write(np.array([state["open"]], "<i4").tobytes())
                state["sequences"], state["open"] = state["sequences"] + 1, 0
            self._files["tokens"].write(ids.astype(self.dtype).tobytes())
            state["tokens"] += len(ids)
            if not len(ends):
                state["open"] += len(ids)
                return
            self._files["lengths"].write(np.diff(ends, prepend=-state["open"]).astype("<i4").tobytes())
            self._files["documents"].write((state["sequences"] + np.arange(1, len(ends) + 1)).astype("<i8").tobytes())
            state["sequences"] += len(ends)
            state["documents"] += len(ends)
            state["open"] = len(ids) - int(ends[-1])

    def flush(self) -> dict[str, int]:
        """Waits until all of it is on the disk. The state to go on from."""
        with files.writing(self.folder):
            for file in self._files.values():
                file.flush()
                files.sync(file.fileno())
        return dict(self._state)

    def finish(self, prefix: Path) -> None:
        """Makes ``prefix``.bin and .idx in place of what had these names, and removes the folder. No document may be open."""
        self.flush()
        self.close()
        state = self._state
        with files.write_whole(self.folder / "index") as index:
            index.write(_HEADER.pack(_MAGIC, _VERSION, self._code, state["sequences"], state["documents"] + 1))
            for lengths in self._pieces("lengths", "<i4"):
                index.write(lengths.tobytes())
            place = 0
            for lengths in self._pieces("lengths", "<i4"):
                ends = place + np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
                index.write((ends - lengths.astype(np.int64) * self.dtype.itemsize).astype("<i8").tobytes())
                place = int(ends[-1])
            index.write(bytes(8))
            for ends in self._pieces("documents", "<i8"):
                index.write(ends.tobytes())
        publish(self.folder, prefix)

    def close(self) -> None:
        """Closes the files; what was flushed can be gone on with."""
        for file in self._files.values():
            with contextlib.suppress(OSError):  # of the bytes that found no room; flush has said so
                file.close()

    def _pieces(self, name: str, dtype: str) -> Iterator[np.ndarray]:
        with open(self.folder / name, "rb") as file:
            while raw := file.read(_ENTRIES * np.dtype(dtype).itemsize):
                yield np.frombuffer(raw, dtype)


def publish(folder: Path, prefix: Path) -> bool:
    """The last part of ``TokenWriter.finish``, which may be repeated after a kill. False if the folder is not ready for it.

    Readers see the old pair, then no index, then the new pair. A tokenizer in the folder is published beside it.
    """
    with files.writing(prefix.parent):
        if (folder / "index").exists():
            if (folder / "tokens").exists():
                prefix.with_name(f"{prefix.name}.idx").unlink(missing_ok=True)
                files.flush(prefix.parent)
            for name, ending in ENDINGS.items():
                if (folder / name).exists():
                    os.replace(folder / name, prefix.with_name(prefix.name + ending))
            files.flush(prefix.parent)
        elif (folder / "tokens").exists():
            return False
        for path in sorted(folder.iterdir()):  # so state.json goes last: as long as there is run.json, it is read
            path.unlink()
        folder.rmdir()
    return True
