"""Tokenizes text into a token file: in parallel, in little memory, and so that a killed run can continue.

The text is read in blocks. Threads tokenize them (the package ``tokenizers`` works without Python's lock), and one thread writes
the results in order, so these depend on neither the number of threads nor interruptions. ``docs/data.md`` describes the formats.
"""

from __future__ import annotations

import contextlib
import filecmp
import gzip
import hashlib
import json
import os
import reprlib
import shutil
import time
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .. import files
from ..errors import DataError
from .block_encoder import BlockEncoder, Encoded, alone_in_a_thread
from .text_blocks import Block, Place, Source, find_sources, read_blocks, sample_text
from .text_tokenizer import END_OF_TEXT, TOKENIZER, TOKENIZER_CONFIG, TextTokenizer, load_tokenizer, train_tokenizer
from .token_files import ENDINGS, TokenWriter, publish

_FORMAT = 2  # of an unfinished run: change it when the same input would be cut or read in another way
_AHEAD_BYTES = 64 << 20  # the most bytes of blocks that wait to be written


@dataclass
class Totals:
    """What has been written, and what was left out."""

    text_bytes: int = 0
    tokens: int = 0
    documents: int = 0
    empty: int = 0  # documents without a token
    invalid: int = 0  # lines of a .jsonl, with ``skip_invalid``
    cut: int = 0  # places where a document was cut and its ids may not be those of the whole


@dataclass(frozen=True)
class Progress:
    """done_bytes of all_bytes are read (of the files as they lie on the disk); ``totals`` are of the whole run."""

    done_bytes: int
    all_bytes: int
    totals: Totals


@dataclass(frozen=True)
class Prepared:
    """What ``prepare`` has written: ``prefix``.bin, .idx and the tokenizer, of ``vocab_size`` ids."""

    prefix: Path
    totals: Totals
    vocab_size: int
    skipped: list[Path]  # files of a folder that are no text


def prepare(
    inputs: str | Path | Sequence[str | Path],
    output: str | Path,
    *,
    tokenizer: str | Path | None = None,
    vocab_size: int | None = None,
    key: str = "text",
    end_of_text: str | None = END_OF_TEXT,
    workers: int = 1,
    overwrite: bool = False,
    restart: bool = False,
    skip_invalid: bool = False,
    save_every_s: float = 10.0,
    report: Callable[[Progress], None] = lambda progress: None,
) -> Prepared:
    """Tokenizes ``inputs`` into ``output``.bin and .idx (Megatron's format), with the tokenizer and a
    tokenizer_config.json that names ``end_of_text`` beside them.

    inputs: one path or several, of text files, each one document; .jsonl files, in which each line is an object with a document
    under ``key``; both also as .gz; and folders of these.
    tokenizer: a tokenizer.json. Without it byte-level BPE with ``vocab_size`` ids is trained on a sample.
    end_of_text: the token after each document, None for none. workers: threads.
    overwrite: replace an older ``output``. skip_invalid: leave out lines that are no such object instead of stopping.
    save_every_s: seconds between saves, the most work that a kill can cost. report: called after each block.

    An unfinished run with the same inputs and options is continued; restart: it is dropped instead.

    raises: DataError, in one line; the run can be continued then unless the line says otherwise.
    """
    prefix = _prefix(output)
    folders = [path for path in _outputs(prefix) if os.path.isdir(path)]
    if folders:  # said now, not when its file would take its place
        raise DataError(f"[output] {folders[0]} is a folder (another name)")
    if workers < 1:
        raise DataError(f"[workers] is {workers} (accepted: 1 or more)")
    if tokenizer is not None and vocab_size is not None:
        raise DataError("[vocab_size] has no meaning with --tokenizer, which has its own (accepted: one of the two)")
    if tokenizer is None and vocab_size is None:
        raise DataError("[tokenizer] one of --tokenizer and --vocab_size is needed (a tokenizer.json, or how many ids to train)")
    if tokenizer is None and end_of_text not in (None, END_OF_TEXT):  # said before the training, which takes minutes
        accepted = f"{END_OF_TEXT}, a --tokenizer that has it, or --no_end_of_text"
        raise DataError(f"[end_of_text] a tokenizer that is trained here has no {end_of_text!r} ({accepted})")
    sources, in_folders = find_sources(inputs, _outputs(prefix))
    given = None if tokenizer is None else files.home(tokenizer)
    loaded = load_tokenizer(given) if given else None
    settings = {
        "format": _FORMAT,
        "key": key,
        "end_of_text": end_of_text,
        "tokenizer": None if given is None else hashlib.sha256(given.read_bytes()).hexdigest(),
        "vocab_size": vocab_size,
    }
    folder = prefix.with_name(f".{prefix.name}.partial")
    if folder.is_symlink():  # what is behind it would be emptied
        raise DataError(f"[output] {folder} is a link (a folder of its own, or none yet)")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"[output] cannot make {folder}: {files.reason(error)} (room in a writable folder)") from error
    with files.alone_in(folder, f"[output] another process is writing {prefix} (another name)"):
        try:
            if restart:
                _empty(folder)
            run = _Run(
                folder=folder, prefix=prefix, sources=sources, in_folders=in_folders, settings=settings, given=given, loaded=loaded,
                vocab_size=vocab_size, workers=workers, overwrite=overwrite, skip_invalid=skip_invalid, save_every_s=save_every_s,
                report=report,
            )  # fmt: skip
            return run.go()
        finally:  # not where another process holds it, which may have put nothing there yet
            with contextlib.suppress(OSError):
                folder.rmdir()  # if it is empty


@dataclass(frozen=True)
class _Run:
    """One call of ``prepare``, in its folder.

    given, loaded: the tokenizer.json that was named, as a file and read; without them one of ``vocab_size`` ids is trained.
    settings: what an unfinished run must have in common with this one to be continued.
    """

    folder: Path
    prefix: Path
    sources: list[Source]
    in_folders: set[int]
    settings: dict[str, Any]
    given: Path | None
    loaded: TextTokenizer | None
    vocab_size: int | None
    workers: int
    overwrite: bool
    skip_invalid: bool
    save_every_s: float
    report: Callable[[Progress], None]

    @property
    def all_bytes(self) -> int:
        return sum(source.size for source in self.sources)

    def go(self) -> Prepared:
        """Begins the run or continues it, up to the published files."""
        if not self._begun():
            _empty(self.folder)
            with self._emptied_by_errors():
                self._begin()
        skipped, may_replace = _read_json(
            self.folder / "run.json", lambda run: (self._skipped(run), self.overwrite or run.get("overwrite") is True)
        )
        totals, place, written = Totals(), Place(0, 0, 1), None
        if (self.folder / "state.json").exists():
            totals, place, written = _read_json(self.folder / "state.json", _left)
        if written and publish(self.folder, self.prefix):  # it was killed at the very end
            published = self.prefix.with_name(self.prefix.name + ENDINGS[TOKENIZER])
            return self._prepared(totals, load_tokenizer(published).size, skipped)
        if not may_replace:  # what was not there when the run began
            self._check_outputs([self.folder / TOKENIZER_CONFIG, self.folder / TOKENIZER])
        tokenizer = self.loaded or load_tokenizer(self.folder / TOKENIZER)
        encoder = BlockEncoder(tokenizer, self._end(tokenizer), self.sources, self.settings["key"], self.skip_invalid)
        writer = TokenWriter(self.folder, tokenizer.size, written)
        try:
            self._write(writer, encoder, read_blocks(self.sources, skipped, place, encoder, self.skip_invalid), totals)
            with self._emptied_by_errors():
                self._check_result(totals)
            writer.finish(self.prefix)
        finally:
            writer.close()
        return self._prepared(totals, tokenizer.size, skipped)

    def _skipped(self, run: dict[str, Any]) -> set[int]:
        found = run["skipped"]
        if not isinstance(found, list) or not all(type(i) is int and 0 <= i < len(self.sources) for i in found):
            raise ValueError(f"skipped is {reprlib.repr(found)} (numbers of sources)")
        return set(found)

    def _prepared(self, totals: Totals, vocab_size: int, skipped: set[int]) -> Prepared:
        return Prepared(self.prefix, totals, vocab_size, [self.sources[i].path for i in sorted(skipped)])

    def _begun(self) -> bool:
        """Whether the folder holds an unfinished run of these inputs and options. raises: DataError if it holds another run."""
        if not (self.folder / "run.json").exists():
            return False
        run, before = _read_json(
            self.folder / "run.json", lambda run: (run, [Source(Path(path), size, stamp) for path, size, stamp in run["sources"]])
        )
        if run.get("format") != _FORMAT:
            begun = "has an unfinished run that another version of needle began"
            raise DataError(f"[output] {self.folder} {begun} (that version goes on with it, --restart begins again)")
        differs = next((f"--{name}" for name, value in self.settings.items() if run.get(name) != value), None)
        for now, then in zip(self.sources, before):
            if now.path == then.path and now != then:
                differs = differs or f"{now.path} has changed"
        if before != self.sources:
            differs = differs or "the files are others"
        if differs:
            raise DataError(f"[output] {self.folder} has an unfinished run of something else: {differs} (as before, or --restart)")
        return True

    @contextlib.contextmanager
    def _emptied_by_errors(self) -> Iterator[None]:
        """Around work after whose failure there is nothing to continue: any exception empties the folder."""
        try:
            yield
        except BaseException:  # Ctrl-C among them
            _empty(self.folder)
            raise

    def _begin(self) -> None:
        """Begins a run: checks that every file can be read and is text (in folders, what is none is left out; a .jsonl never is,
        nor a .gz that is damaged), stores the tokenizer, then run.json.
        """
        about = self.folder / TOKENIZER_CONFIG  # names the end-of-text token, for which a tokenizer.json has no place
        with files.write_whole(about) as file:
            file.write(json.dumps({"eos_token": self.settings["end_of_text"]}).encode())
        if not self.overwrite:
            self._check_outputs([about, self.given] if self.given else [about])
        skipped = []
        for i, source in enumerate(self.sources):
            try:
                source.check()
            except DataError as error:
                damaged = isinstance(error.__cause__, (EOFError, zlib.error, gzip.BadGzipFile))  # a .gz that did not come whole
                if source.lines or i not in self.in_folders or damaged:
                    raise
                skipped.append(i)
        if len(skipped) == len(self.sources):
            raise DataError(f"[inputs] no text: {len(self.sources)} files, all of them binary or closed (UTF-8 text or .jsonl)")
        path, tokenizer = self.folder / TOKENIZER, self.loaded
        if self.given is not None:
            with files.write_whole(path) as file:
                file.write(self.given.read_bytes())
        elif self.vocab_size is not None:
            texts = sample_text(self.sources, set(skipped), self.settings["key"], self.skip_invalid, self.all_bytes)
            tokenizer = train_tokenizer(path, texts, self.vocab_size, self.prefix.name)
        if tokenizer is not None:
            self._end(tokenizer)
        sources = [(str(source.path), source.size, source.mtime_ns) for source in self.sources]
        with files.write_whole(self.folder / "run.json") as file:
            run = {**self.settings, "overwrite": self.overwrite, "skipped": skipped, "sources": sources}
            file.write(json.dumps(run).encode())

    def _check_outputs(self, alike: list[Path]) -> None:
        """raises: DataError if an output is there that is not one of ``alike``, byte for byte."""
        there = [path for path in _outputs(self.prefix) if path.exists()]
        there = [path for path in there if not any(filecmp.cmp(path, other, shallow=False) for other in alike)]
        if there:
            raise DataError(f"[output] {min(there)} exists (accepted: another name, or --overwrite)")

    def _check_result(self, totals: Totals) -> None:
        """raises: DataError if a file changed while it was read, or there was no text in any."""
        for source in self.sources:
            if source.stamp() != source:
                raise DataError(f"[{source.path.name}] changed while it was read: {source.path} (files that stay as they are)")
        if not totals.documents:
            left_out = f"{totals.empty} empty documents, {totals.invalid} bad lines"
            raise DataError(f"[inputs] no text: {len(self.sources)} files, {left_out} (text)")

    def _end(self, tokenizer: TextTokenizer) -> int | None:
        """The id of the token after each document; None for none. raises: DataError if the tokenizer has no such token."""
        token = self.settings["end_of_text"]
        found = tokenizer.tokenizer.get_vocab(with_added_tokens=True).get(token)
        if token is not None and found is None:
            raise DataError(f"[end_of_text] the tokenizer has no {token!r} (--end_of_text TOKEN, or --no_end_of_text)")
        return found

    def _write(self, writer: TokenWriter, encoder: BlockEncoder, blocks: Iterator[Block], totals: Totals) -> None:
        """Has the threads encode the blocks and writes the results in order."""
        place: Place | None = None
        settled = True  # whether place, totals and the writer's state belong together
        all_bytes, saved = self.all_bytes, time.monotonic()

        def save() -> None:
            if place is not None:
                state = {"place": place, "totals": asdict(totals), "writer": writer.flush()}
                with files.write_whole(self.folder / "state.json") as file:
                    file.write(json.dumps(state).encode())

        try:
            with contextlib.closing(self._encoded(encoder, blocks)) as found:
                for block, encoded in found:
                    settled = False
                    writer.write(encoded.ids, encoded.ends)
                    place = block.after
                    totals.text_bytes += block.nbytes
                    totals.tokens, totals.documents = writer.tokens, writer.documents
                    totals.empty += encoded.empty
                    totals.invalid += encoded.invalid
                    totals.cut += encoded.cut
                    settled = True
                    self.report(Progress(block.done_bytes, all_bytes, totals))
                    if time.monotonic() - saved >= self.save_every_s:
                        save()
                        saved = time.monotonic()
            save()
        except (DataError, KeyboardInterrupt, SystemExit) as error:
            if settled:
                with contextlib.suppress(DataError):  # where there is no room, the state before stays
                    save()
            if isinstance(error, DataError) and not (self.folder / "state.json").exists():
                _empty(self.folder)  # nothing that a corrected command could go on with
            raise

    def _encoded(self, encoder: BlockEncoder, blocks: Iterator[Block]) -> Generator[tuple[Block, Encoded]]:
        """Each block and its encoding, in order. Threads work on later blocks meanwhile."""
        waiting: deque[tuple[Block, Future]] = deque()
        ahead = 0
        with alone_in_a_thread(), ThreadPoolExecutor(self.workers, "prepare") as pool:
            try:
                block = next(blocks, None)
                while block is not None or waiting:
                    if block is not None and (
                        not waiting or (len(waiting) < 2 * self.workers and ahead + block.nbytes < _AHEAD_BYTES)
                    ):
                        waiting.append((block, pool.submit(encoder, block)))
                        ahead += block.nbytes
                        block = next(blocks, None)
                    else:
                        oldest, future = waiting.popleft()
                        yield oldest, future.result()
                        ahead -= oldest.nbytes
            finally:
                for _, future in waiting:
                    future.cancel()


# ---- files and settings


def _prefix(output: str | Path) -> Path:
    name = os.path.expanduser(output)
    for ending in (".bin", ".idx"):
        name = name.removesuffix(ending)
    if not name or "\0" in name or name.endswith(("/", os.sep)) or os.path.isdir(name):
        raise DataError(f"[output] no name for files: {str(output)!r} (FOLDER/NAME, which becomes NAME.bin and NAME.idx)")
    return Path(os.path.abspath(name))


def _outputs(prefix: Path) -> list[Path]:
    return [prefix.with_name(prefix.name + ending) for ending in ENDINGS.values()]


def _read_json(path: Path, take: Callable[[dict[str, Any]], Any]) -> Any:
    """``take`` of the JSON object in a file. raises: DataError if the file cannot be read or ``take`` does not find its keys."""
    try:
        return take(files.parse_json(path.read_bytes()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"[output] cannot go on: {path}: {files.reason(error)} (--restart begins again)") from error


def _left(state: dict[str, Any]) -> tuple[Totals, Place, dict[str, int]]:
    """What ``save`` has written of an unfinished run. raises: ValueError for anything else."""

    def counts(name: str, keys: Sequence[str]) -> dict[str, int]:
        found = state.get(name)
        by_key = dict(zip(keys, found)) if isinstance(found, list) and len(found) == len(keys) else found
        if not isinstance(by_key, dict) or set(by_key) != set(keys):
            raise ValueError(f"{name} is {reprlib.repr(found)} ({', '.join(keys)})")
        if not all(type(n) is int and 0 <= n < 1 << 62 for n in by_key.values()):
            raise ValueError(f"{name} is {reprlib.repr(found)} (counts)")
        return by_key

    totals = Totals(**counts("totals", list(asdict(Totals()))))
    return totals, Place(**counts("place", Place._fields)), counts("writer", TokenWriter.STATE)


def _empty(folder: Path) -> None:
    """Removes all files of the folder, run.json first: without it the rest is not taken for a run."""
    try:
        (folder / "run.json").unlink(missing_ok=True)
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    except OSError as error:
        raise DataError(f"[output] cannot empty {folder}: {files.reason(error)} (a writable folder)") from error
