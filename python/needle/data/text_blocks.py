"""Reading text in blocks: which files, where blocks are cut, and the documents in them."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from .. import files
from ..errors import DataError
from .text_corpus import is_json_lines, walk

_BLOCK_BYTES = 1 << 18
_BLOCK_PIECES = 1 << 12
_WORD_BYTES = 1 << 20  # how far a place to cut is looked for
_LINE_BYTES = 64 << 20  # the longest line of a .jsonl
_SAMPLE_BYTES = 32 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Source:
    """A file, with its size and time when the run began."""

    path: Path
    size: int
    mtime_ns: int

    @property
    def lines(self) -> bool:
        """Whether each line is a document."""
        return is_json_lines(self.path)

    def stamp(self) -> Source | None:
        """The same file as it is now; None if it is gone."""
        try:
            now = self.path.stat()
        except OSError:
            return None
        return Source(self.path, now.st_size, now.st_mtime_ns)

    @contextlib.contextmanager
    def open(self) -> Iterator[tuple[BinaryIO, Callable[[], int]]]:
        """(the text as a binary file, a function that tells how many of the file's bytes on disk have been read).

        raises: DataError if it cannot be read.
        """
        try:
            with open(self.path, "rb") as raw:
                if self.path.suffix.lower() == ".gz":
                    with gzip.open(raw) as file:
                        yield file, raw.tell  # type: ignore[misc]
                else:
                    yield raw, raw.tell
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"[{self.path.name}] cannot read {self.path}: {files.reason(error)} (a readable file)") from error

    def check(self) -> None:
        """raises: DataError if it cannot be read, or is a text file that is no UTF-8; lines are looked at when they are taken."""
        with self.open() as (file, _):
            if self.lines:
                file.read(1)  # of a .gz, its header
                return
            offset, rest = 0, b""
            while raw := file.read(_WORD_BYTES):
                raw = rest + raw
                rest = _unfinished(raw)
                self.decode(raw[: len(raw) - len(rest)], offset)
                offset += len(raw) - len(rest)
            self.decode(rest, offset)

    def decode(self, raw: bytes, offset: int) -> str:
        """``raw``, which begins at byte ``offset`` of the text. raises: DataError for a zero byte and for what is no UTF-8."""
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            at = offset + error.start
            raise DataError(
                f"[{self.path.name}] not UTF-8 text: {error.reason} at byte {at} of {self.path} (UTF-8 text)"
            ) from error
        if "\0" in text:
            at = offset + raw.index(b"\0")
            raise DataError(f"[{self.path.name}] binary data: byte {at} of {self.path} is zero (UTF-8 text)")
        return text


class Place(NamedTuple):
    """Where reading continues: the source, the number of bytes of its text before this place, and the line, from 1."""

    source: int
    offset: int
    line: int


@dataclass(frozen=True)
class Piece:
    """A part of a source: whole lines of a .jsonl, or a stretch of a text file."""

    at: Place
    raw: bytes
    last: bool  # whether it ends its text file; always False for lines
    cut: bool = False  # whether it was cut where that may change ids
    left_out: int = 0  # bytes of the line after it, which is too long to be held and counts as invalid


@dataclass(frozen=True)
class Block:
    """What is encoded at once: ``nbytes`` of text in pieces. after: where reading goes on. done_bytes: of all files, as they lie on
    the disk, read by its end.
    """

    pieces: list[Piece]
    nbytes: int
    after: Place
    done_bytes: int


def find_sources(inputs: str | Path | Sequence[str | Path], made: Sequence[Path]) -> tuple[list[Source], set[int]]:
    """(the files, the indices of those found in folders). made: the run's own outputs, which are left out in folders."""
    sources: list[Source] = []
    in_folders: set[int] = set()
    own = {os.path.realpath(path) for path in made}  # the folder may be given through a link
    for given in [inputs] if isinstance(inputs, (str, Path)) else inputs:
        path = Path(os.path.abspath(files.home(given)))
        folder = os.path.isdir(path)
        if not folder and not os.path.isfile(path):
            raise DataError(f"[inputs] no such file or folder: {str(given)!r} (text files, .jsonl files and folders of them)")
        if os.path.realpath(path) in own:
            raise DataError(f"[inputs] {given} is what the output would replace (another output)")
        found = [file for file in walk(path, path.name) if os.path.realpath(file) not in own] if folder else [path]
        if not found:
            raise DataError(f"[inputs] no files: {given} (text files, .jsonl files and folders of them)")
        for file in found:
            if folder:
                in_folders.add(len(sources))
            now = Source(file, 0, 0).stamp()
            if now is None:
                raise DataError(f"[inputs] no such file any more: {file} (files that stay as they are)")
            sources.append(now)
    if not sources:
        raise DataError("[inputs] none are given (text files, .jsonl files and folders of them)")
    return sources, in_folders


def read_blocks(
    sources: list[Source], skipped: set[int], place: Place, cutter: Cutter, skip_invalid: bool = False
) -> Iterator[Block]:
    """The blocks from ``place`` on. Where a block ends depends only on the text after its start, so a run can continue there."""
    pieces: list[Piece] = []
    nbytes = before = 0
    after, done = place, 0
    for i, source in enumerate(sources):
        if i >= place.source and i not in skipped:
            start = place if i == place.source else Place(i, 0, 1)
            with source.open() as (file, position):
                file.seek(start.offset)
                found = _lines(file, start, source, skip_invalid) if source.lines else _parts(file, start, cutter)
                for piece, after in found:
                    pieces.append(piece)
                    nbytes += len(piece.raw) + piece.left_out
                    done = before + min(position(), source.size)
                    if nbytes >= _BLOCK_BYTES or len(pieces) >= _BLOCK_PIECES:
                        yield Block(pieces, nbytes, after, done)
                        pieces, nbytes = [], 0
        before += source.size
    if pieces:
        yield Block(pieces, nbytes, after, done)


def _parts(file: BinaryIO, at: Place, cutter: Cutter) -> Iterator[tuple[Piece, Place]]:
    """A text file, cut at places where that changes no id."""
    buffer, ended, last = b"", False, False
    while not last:
        while not ended and len(buffer) <= cutter.most:
            more = file.read(cutter.most + 1 - len(buffer))
            buffer, ended = buffer + more, not more
        stop, badly = cutter.cut(buffer, 0, cutter.least)
        last = ended and stop == len(buffer)
        after = Place(at.source + 1, 0, 1) if last else Place(at.source, at.offset + stop, at.line)
        yield Piece(at, buffer[:stop], last, badly), after
        at, buffer = after, buffer[stop:]


def _lines(file: BinaryIO, at: Place, source: Source, skip_invalid: bool) -> Iterator[tuple[Piece, Place]]:
    while raw := file.read(_BLOCK_BYTES):
        left_out = 0
        if not raw.endswith(b"\n"):
            rest = file.readline(_LINE_BYTES)
            raw += rest
            if len(rest) == _LINE_BYTES and not rest.endswith(b"\n"):
                if not skip_invalid:
                    line = at.line + raw.count(b"\n")
                    raise DataError(
                        f"[{source.path.name}] line {line} of {source.path} is too long ({_LINE_BYTES >> 20} MiB or less; "
                        "--skip_invalid leaves such lines out)"
                    )
                whole = raw.rfind(b"\n") + 1
                raw, left_out = raw[:whole], len(raw) - whole
                while rest and not rest.endswith(b"\n"):
                    rest = file.readline(_BLOCK_BYTES)
                    left_out += len(rest)
        after = Place(at.source, at.offset + len(raw) + left_out, at.line + raw.count(b"\n") + (left_out > 0))
        yield Piece(at, raw, False, left_out=left_out), after
        at = after


def _unfinished(raw: bytes) -> bytes:
    """The incomplete UTF-8 character at the end of ``raw``; empty if there is none."""
    for back in range(1, min(3, len(raw)) + 1):
        byte = raw[-back]
        if byte & 0xC0 == 0xC0:
            needs = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return raw[-back:] if needs > back else b""
        if byte < 0x80:
            return b""
    return b""


class Cutter:
    """Finds where text may be cut so that its parts have the ids of the whole.

    exact: the tokenizer has such places: before white space that follows something else (after_letters: only after ASCII letters
    and digits). Not exact: there are none; only documents too long for memory are cut, and those cuts are counted.
    """

    least, most = _BLOCK_BYTES, _WORD_BYTES

    def __init__(self, exact: bool, after_letters: bool = False):
        self.exact = exact
        self._place = re.compile(rb"(?<=[0-9A-Za-z])(?=[ \n\r\t])" if after_letters else rb"(?<=[!-~\x80-\xff])(?=[ \n\r\t])")
        if not exact:
            self.least, self.most = _WORD_BYTES, 2 * _WORD_BYTES

    def is_place(self, left: str, right: str) -> bool:
        """Whether ``left + right`` may be cut between them."""
        stop = len(left.encode())
        return self.cut((left + right).encode(), 0, stop)[0] == stop

    def cut(self, raw: bytes, start: int, least: int) -> tuple[int, bool]:
        """(place to cut ``raw`` at, whether that may change ids).

        It is the first good place at least ``least`` bytes after ``start``; the end if that comes sooner; else ``most`` bytes on.
        """
        if len(raw) - start <= least:
            return len(raw), False
        for found in self._place.finditer(raw, start + least, min(len(raw), start + self.most + 1)):
            if not raw[max(start, found.start() - 4) : found.start()].decode(errors="ignore")[-1:].isspace():
                return found.start(), not self.exact
        if len(raw) - start <= self.most:
            return len(raw), False
        stop = start + self.most
        stop -= raw[stop - 1 : stop + 1] == b"\r\n"  # which becomes one character
        return stop - len(_unfinished(raw[stop - 4 : stop])), True


def texts_of(piece: Piece, source: Source, key: str, skip_invalid: bool) -> Iterator[bytes | None]:
    """The text of each line, None for an invalid one; or of the part of a text file, with ``\\n`` line ends and no mark."""
    if not source.lines:
        raw = piece.raw.removeprefix(_BYTE_ORDER_MARK) if piece.at.offset == 0 else piece.raw
        source.decode(raw, piece.at.offset)
        yield raw.replace(b"\r\n", b"\n")
        return
    for number, line in enumerate(piece.raw.split(b"\n"), piece.at.line):
        if not line or line.isspace():
            continue
        try:
            yield _text_of(line, key)
        except (ValueError, RecursionError) as error:
            if not skip_invalid:
                reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
                raise DataError(
                    f"[{source.path.name}] line {number} of {source.path}: {reason} (an object with a text under {key!r}; "
                    "--key names another, --skip_invalid leaves such lines out)"
                ) from error
            yield None
    if piece.left_out:
        yield None


def _text_of(line: bytes, key: str) -> bytes:
    try:  # an integer of any length becomes a short one: none is a text
        found = json.loads(line.removeprefix(_BYTE_ORDER_MARK).decode(), parse_int=len)  # of bytes it would guess the encoding
    except json.JSONDecodeError as error:  # whose text speaks of line 1
        raise ValueError(f"{error.msg} (character {error.pos})") from error
    if not isinstance(found, dict):
        raise ValueError("no object")
    if not isinstance(found.get(key), str):
        raise ValueError(f"no text under {key!r}" if key in found else f"no {key!r}")
    return found[key].encode()  # a ValueError for half a character


def sample_text(sources: list[Source], skipped: set[int], key: str, skip_invalid: bool, all_bytes: int) -> Iterator[str]:
    """A sample of the text of some 32 MiB, from places spread over all of it."""
    every, taken = max(1, -(-all_bytes // _SAMPLE_BYTES)), 0
    for i, block in enumerate(read_blocks(sources, skipped, Place(0, 0, 1), Cutter(exact=True), skip_invalid)):
        if i % every == 0 and taken < 2 * _SAMPLE_BYTES:
            for piece in block.pieces:
                for document in texts_of(piece, sources[piece.at.source], key, skip_invalid):
                    if document is not None:
                        taken += len(document)
                        yield document.decode()
