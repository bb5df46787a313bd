"""Training text: which files it is in, which part is held out, and its characters piece by piece.

A corpus is two lists of pieces (a file, or a byte range of one), so that nothing has to fit in memory. The choice of
held-out text depends on names and sizes alone: it is the same in every run and on every machine with the same files.
"""

from __future__ import annotations

import codecs
import hashlib
import logging
import os
import shlex
import sysconfig
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from pathlib import Path

from ..errors import DataError
from ..files import home, write_whole

HELD_OUT_FRACTION = 0.05  # of the bytes
CORPORA = ("stdlib", "wikitext-2")  # names of data sets; a file of such a name is not looked for
_READ_BYTES = 1 << 20
# Tests; what is not the library's own; and "encodings", generated tables that are near copies of one another, so that
# a held-out one would have been seen in training all the same.
_STDLIB_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings"}
_WIKITEXT_SPLITS = {
    "train": ("wiki.train.tokens", "wiki.train.raw", "train.txt"),
    "held-out": ("wiki.valid.tokens", "wiki.valid.raw", "valid.txt", "validation.txt", "val.txt"),
}


@dataclass(frozen=True)
class Piece:
    """Bytes ``start`` to ``stop`` of a text file."""

    path: Path
    start: int
    stop: int

    def texts(self, name: str) -> Iterator[str]:
        """The text in parts of about 1 MiB that end at a line's end, with ``\\n`` line ends.

        raises: DataError if the bytes are no UTF-8 text; ``name`` is the data set's, for the message.
        """
        for text in decoded(self._parts(name), self.path, name, self.start):
            if "\0" in text:
                raise DataError(f"[{name}] binary data: {self.path} contains zero bytes (UTF-8 text)")
            yield text

    def _parts(self, name: str) -> Iterator[bytes]:
        left = self.stop - self.start
        with _open(self.path, name) as file:
            file.seek(self.start)
            while left > 0:
                raw = file.read(min(_READ_BYTES, left))
                raw += file.readline(min(_READ_BYTES, left - len(raw)))
                left = left - len(raw) if raw else 0  # nothing read: the file has become shorter
                yield raw


@dataclass(frozen=True)
class Corpus:
    """Training and held-out text. ``key``: SHA-256 over both; ``skipped``: files of a folder that are no usable text."""

    name: str
    train: tuple[Piece, ...]
    held_out: tuple[Piece, ...]
    key: str
    skipped: tuple[Path, ...] = ()

    @property
    def train_bytes(self) -> int:
        """Bytes of the training text, as it lies in its files."""
        return sum(piece.stop - piece.start for piece in self.train)


def check_dataset(dataset: str) -> None:
    """raises: DataError for what is neither the name of a data set nor a file or folder."""
    if dataset not in CORPORA and not any(is_one(home(dataset)) for is_one in (os.path.isdir, os.path.isfile)):
        raise DataError(f"[dataset] unknown data set: {dataset!r} (stdlib, wikitext-2, a file or folder of text, or a token file)")


def load_corpus(dataset: str, *, data_dir: str | Path = "data", cache_dir: str | Path) -> Corpus:
    """The corpus called ``dataset``: ``stdlib``, ``wikitext-2``, or the path of a text file or of a folder of them.

    ``wikitext-2`` is looked for in ``data_dir/wikitext-2`` and comes from the Hub otherwise (through ``datasets``, kept
    under ``cache_dir``). A folder that has a training and a validation file under WikiText's usual names is split as
    they say; of any other folder some whole files are held out, of a single large file its end.

    raises: DataError for an unknown name, for text that is missing, empty, binary or unreadable, and for JSON lines, which
    ``prepare`` reads.
    """
    if dataset == "stdlib":
        return _stdlib()
    if dataset == "wikitext-2":
        folder = Path(data_dir) / "wikitext-2"
        return _wikitext(folder if folder.is_dir() else _download_wikitext(folder, Path(cache_dir)))
    check_dataset(dataset)
    path = home(dataset)
    is_folder = path.is_dir()
    if is_folder and all(_first_present(path, names) for names in _WIKITEXT_SPLITS.values()):
        return _wikitext(path, path.name or str(path))
    files = walk(path, path.name) if is_folder else [path]
    lines = next(filter(is_json_lines, files), None)
    if lines is not None:
        command = f"python apps/prepare_data.py {shlex.quote(dataset)} --vocab_size N --output NAME"
        raise DataError(f"[dataset] no text but JSON lines: {lines} ({command} makes a token file of them, for --dataset NAME)")
    return _from_files(path.name or str(path), files, path if is_folder else path.parent, skip_binary=is_folder)


def _stdlib() -> Corpus:
    folder = Path(sysconfig.get_path("stdlib"))
    files = [
        file
        for file in walk(folder, "stdlib", leave_out=_STDLIB_LEFT_OUT)
        # Generated when this Python was built, full of that machine's paths.
        if file.suffix == ".py" and not file.name.startswith("_sysconfigdata")
    ]
    if not files:
        raise DataError(f"[stdlib] no Python source: {folder} has no .py files (give a file or folder of text instead)")
    return _from_files("stdlib", files, folder, skip_binary=True)


def _wikitext(folder: Path, name: str = "wikitext-2") -> Corpus:
    pieces = {}
    for split, names in _WIKITEXT_SPLITS.items():
        path = _first_present(folder, names)
        if path is None:
            found = ", ".join(file.name for file in walk(folder, name)) or "nothing"
            raise DataError(f"[{name}] no {split} text in {folder}: found {found} ({', '.join(names)})")
        pieces[split] = Piece(path, 0, path.stat().st_size)
    digests = [_digest(piece, name) for piece in pieces.values()]
    return Corpus(name, (pieces["train"],), (pieces["held-out"],), _key(digests))


def _download_wikitext(wanted: Path, cache_dir: Path) -> Path:
    folder = cache_dir / "wikitext-2"
    if all(_first_present(folder, names) for names in _WIKITEXT_SPLITS.values()):
        return folder
    where = f"{wanted} does not exist (put wiki.train.tokens and wiki.valid.tokens there"
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise DataError(f"[wikitext-2] no local copy: {where}, or `pip install datasets` to download it)") from error
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # the error below says it in one line
    try:
        splits = datasets.load_dataset("Salesforce/wikitext", "wikitext-2-raw-v1")
    except Exception as error:  # of several libraries; without a network not even an OSError in each of them
        reason = " ".join(str(error).split())
        raise DataError(f"[wikitext-2] no local copy and the download failed: {reason}; {where})") from error
    for split, file_name in (("validation", "wiki.valid.raw"), ("train", "wiki.train.raw")):
        with write_whole(folder / file_name) as file:
            file.write("".join(splits[split]["text"]).encode())
    return folder


def _from_files(name: str, files: list[Path], root: Path, skip_binary: bool) -> Corpus:
    """A corpus of files."""
    digests: dict[str, Path] = {}  # by content: a copy of a held-out file must not be trained on
    pieces = {file: Piece(file, 0, file.stat().st_size) for file in files}
    skipped = []
    for file, piece in pieces.items():
        try:
            if piece.stop > 0:
                digests.setdefault(_digest(piece, name), file)
        except DataError:
            if not skip_binary:
                raise
            skipped.append(file)
    if not digests:
        found = f"{len(files)} files, {len(skipped)} of them binary or closed"
        raise DataError(f"[{name}] no text: {found} (a non-empty UTF-8 text file)")
    pieces = {file: pieces[file] for file in digests.values()}
    # An order by hash of name is fixed, and unlike the alphabet makes every prefix a fair sample of the whole.
    order = sorted(pieces, key=lambda file: hashlib.sha256(os.fsencode(file.relative_to(root))).digest())
    train, held_out = _split([pieces[file] for file in order], name)
    digest_of = {file: digest for digest, file in digests.items()}
    return Corpus(name, train, held_out, _key([digest_of[file] for file in order]), tuple(skipped))


def _split(pieces: list[Piece], name: str) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
    """(training pieces, held-out pieces).

    Files are held out in their order until the fraction is reached, except those above a quarter of it. If that gives less than a
    quarter of the fraction (a licence beside a book), the smallest of the other files is held out as well; if there is only one
    other file, its end.
    """
    target = HELD_OUT_FRACTION * sum(piece.stop for piece in pieces)
    train: list[Piece] = []
    held_out: list[Piece] = []
    held_bytes = 0
    for piece in pieces:
        fits = held_bytes < target and piece.stop <= target / 4
        (held_out if fits else train).append(piece)
        held_bytes += piece.stop * fits
    if held_bytes < target / 4:
        smallest = min(train, key=lambda piece: piece.stop)
        if len(train) > 1:
            train.remove(smallest)
            held_out.append(smallest)
        else:
            train[0], end = _cut(smallest, name)
            held_out.append(end)
    return tuple(train), tuple(held_out)


def _cut(piece: Piece, name: str) -> tuple[Piece, Piece]:
    """One file in two, at the line's end nearest after the cut (at a character's end if there is no such line)."""
    cut = int(piece.stop * (1 - HELD_OUT_FRACTION))
    with _open(piece.path, name) as file:
        file.seek(cut)
        after = file.read(_READ_BYTES)
    line_end = after.find(b"\n") + 1
    if not 0 < line_end < piece.stop - cut:
        line_end = next((i for i, byte in enumerate(after) if byte & 0xC0 != 0x80), 0)
    cut += line_end
    if not 0 < cut < piece.stop:
        raise DataError(f"[{name}] too short to hold some text out: {piece.stop} bytes (a few thousand at least)")
    return Piece(piece.path, 0, cut), Piece(piece.path, cut, piece.stop)


def decoded(parts: Iterable[bytes], path: str | Path, name: str, start: int = 0) -> Iterator[str]:
    """The text of a file from byte ``start`` on, which comes in parts that may end anywhere, with ``\\n`` line ends and no mark.

    raises: DataError that names the byte if they are no UTF-8; ``name``: as for ``Piece.texts``.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig" if start == 0 else "utf-8")()
    at, held = start, ""

    def take(raw: bytes, final: bool = False) -> str:
        nonlocal at, held
        at += len(raw)
        try:
            text = held + decoder.decode(raw, final)
        except UnicodeDecodeError as error:
            wrong = at - len(error.object) + error.start  # which may have begun in a part before
            raise DataError(f"[{name}] not UTF-8 text: {error.reason} at byte {wrong} of {path} (UTF-8 text)") from error
        held = "\r" if text.endswith("\r") and not final else ""  # perhaps the first half of a line's end
        return text.removesuffix(held).replace("\r\n", "\n")

    yield from map(take, parts)
    if rest := take(b"", final=True):
        yield rest


def is_json_lines(path: Path) -> bool:
    """Whether each line of a file is an object with a document in it, by the file's name."""
    return path.name.lower().removesuffix(".gz").endswith((".jsonl", ".ndjson"))


def walk(folder: Path, name: str, leave_out: Set[str] = frozenset()) -> list[Path]:
    """The files below ``folder`` in a fixed order, without hidden ones; links to folders are not followed."""

    def refuse(error: OSError) -> None:
        raise DataError(f"[{name}] cannot read {error.filename}: {error.strerror} (readable folders)") from error

    found = []
    for parent, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = sorted(f for f in folders if f not in leave_out and not f.startswith("."))
        found += [Path(parent, file) for file in sorted(files) if not file.startswith(".")]
    return [file for file in found if os.path.isfile(file)]


def _digest(piece: Piece, name: str) -> str:
    """SHA-256 of the text, read to its end so that bytes which are no text are found before anything is written."""
    digest = hashlib.sha256()
    for text in piece.texts(name):
        digest.update(text.encode())
    return digest.hexdigest()


def _key(digests: list[str]) -> str:
    return hashlib.sha256("\n".join([*digests, str(HELD_OUT_FRACTION)]).encode()).hexdigest()


def _first_present(folder: Path, names: tuple[str, ...]) -> Path | None:
    return next((folder / name for name in names if os.path.isfile(folder / name)), None)


def _open(path: Path, name: str):
    try:
        return open(path, "rb")
    except OSError as error:
        raise DataError(f"[{name}] cannot read {path}: {error.strerror} (a readable file)") from error
