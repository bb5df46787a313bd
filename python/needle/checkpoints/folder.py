"""A run's checkpoints: each is whole or absent, whenever the process is killed, the machine stops or the disk is full."""

from __future__ import annotations

import functools
import itertools
import json
import math
import mmap
import os
import re
import shutil
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .. import files
from ..errors import CheckpointError, check_count
from ..locks import process_lock

INDEX, CHECKSUMS = "checkpoints.json", "checksums.json"
_NAME = re.compile(r"step-(\d{6,})(?:-(\d+))?")
_changing = process_lock()


def _one_at_a_time(method: Callable) -> Callable:
    """One thread at a time: what another has half written would look abandoned."""

    @functools.wraps(method)
    def in_turn(*args, **kwargs):
        with _changing:
            return method(*args, **kwargs)

    return in_turn


class CheckpointFolder:
    """Checkpoints of one run: the newest ``keep_last`` and the one with the lowest held-out loss.

    A checkpoint is written under a hidden name, with a checksum of each file, waited for until it is on the disk, and then
    renamed; after that checkpoints.json names it, and only then are older ones removed. A folder without checkpoints.json holds
    what its subfolders' names say. One process at a time saves; its threads wait for each other.
    """

    def __init__(self, path: str | Path, keep_last: int = 2):
        self.path, self.keep_last = Path(path), check_count("checkpoint", "keep_last", keep_last, error=CheckpointError)
        self._damaged: set[str] = set()  # names that the next ``save`` leaves out

    @_one_at_a_time
    def save(self, step: int, write: Callable[[Path], None]) -> Path:
        """Makes a new folder, calls ``write`` to put the files into it, and makes it the newest checkpoint. Returns its path.

        raises: CheckpointError if there is no room, if there are no files, or folders among them; ValueError for a step below 0.
        After these, and after any exception of ``write``, the earlier checkpoints are as they were.
        """
        step = check_count("checkpoint", "step", step, 0, error=ValueError)
        entries, indexed = [e for e in self._entries() if e["name"] not in self._damaged], (self.path / INDEX).is_file()
        names = itertools.chain([f"step-{step:06d}"], (f"step-{step:06d}-{n}" for n in itertools.count(2)))
        target = next(self.path / name for name in names if not os.path.lexists(self.path / name))
        partial = self.path / f".{target.name}.partial"
        try:
            for left in self.abandoned():  # its room may be needed
                _remove(left)
            partial.mkdir(parents=True)
            write(partial)
            _seal(partial)
            os.replace(partial, target)
            files.flush(self.path)
            others = [entry for entry in entries if entry["name"] != target.name]  # which was there if somebody removed its folder
            self._write_index([*others, {"name": target.name, "held_out_loss": None}])
        except OSError as error:
            raise CheckpointError(
                f"[checkpoint] cannot write {target}: {files.reason(error)} (room in a writable folder)"
            ) from error
        finally:  # after Ctrl-C, too
            _remove(partial)
            for left in self.abandoned() if indexed else ():  # what a new index does not name may be somebody else's
                _remove(left)
        return target

    @_one_at_a_time
    def mark(self, checkpoint: Path, held_out_loss: float) -> None:
        """Records the held-out loss of a checkpoint. raises: CheckpointError if that cannot be written, or if the checkpoint is not
        there any more; ValueError for NaN and infinities.
        """
        loss = float(held_out_loss)  # an int or a number of numpy would make an invalid index
        if not math.isfinite(loss):
            raise ValueError(f"[checkpoint] held_out_loss is {loss} (accepted: a finite number)")
        entries = self._entries()
        if checkpoint.name not in (names := [entry["name"] for entry in entries]):
            raise CheckpointError(f"[checkpoint] {checkpoint.name} is not in {self.path} (accepted: {', '.join(names) or 'none'})")
        for entry in entries:
            if entry["name"] == checkpoint.name:
                entry["held_out_loss"] = loss
        try:
            self._write_index(entries)
        except OSError as error:
            raise CheckpointError(f"[checkpoint] cannot write {self.path / INDEX}: {files.reason(error)}") from error
        for left in self.abandoned():
            _remove(left)

    def held_out_loss(self, checkpoint: Path) -> float | None:
        """The loss that ``mark`` has recorded, or None."""
        return next((entry["held_out_loss"] for entry in self._entries() if entry["name"] == checkpoint.name), None)

    def newest(self) -> tuple[Path, list[str]] | None:
        """The newest checkpoint that is whole, and what is wrong with newer ones; None if there has never been one.

        raises: CheckpointError if none is whole.
        """
        problems = []
        for entry in reversed(self._entries()):
            try:
                verify(self.path / entry["name"])
            except CheckpointError as error:
                problems.append(str(error))
            else:
                return self.path / entry["name"], problems
        if problems:
            raise CheckpointError(problems[0])
        return None

    def go_on_from(self, checkpoint: Path) -> None:
        """Has the next ``save`` remove the checkpoints after this one that are damaged. Kept among the newest, or as the best, they
        would take the place of whole ones. One that cannot be read now may be whole, and stays.
        """
        names = self.names()
        later = names[names.index(checkpoint.name) + 1 :] if checkpoint.name in names else []
        self._damaged = {name for name in later if _is_damaged(self.path / name)}

    def abandoned(self) -> list[Path]:
        """What the next ``save`` removes: half-written checkpoints of processes that were killed, and those that checkpoints.json,
        if there is one, does not name any more. raises: CheckpointError if that cannot be read.
        """
        found = list(self.path.glob(".step-*.partial"))
        if (self.path / INDEX).is_file():
            found += [self.path / name for name in set(self._folders()) - set(self.names())]
        return found

    def names(self) -> list[str]:
        """The names of all checkpoints, whole or not, the newest last."""
        return [entry["name"] for entry in self._entries()]

    def best(self) -> Path | None:
        """The checkpoint with the lowest held-out loss."""
        name = _best(self._entries())
        return self.path / name if name else None

    def _entries(self) -> list[dict[str, Any]]:
        """Name and held-out loss of each checkpoint, the newest last."""
        path = self.path / INDEX
        try:
            entries = files.parse_json(files.read_small(path)).get("checkpoints")
        except (FileNotFoundError, NotADirectoryError):
            found = [name for name in self._folders() if (self.path / name / CHECKSUMS).is_file()]
            return [{"name": name, "held_out_loss": None} for name in found]
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"[checkpoint] cannot read {path}: {files.reason(error)} (remove it: the folders' names will do)"
            ) from error
        if not isinstance(entries, list) or not all(map(_is_entry, entries)):
            raise CheckpointError(f"[checkpoint] {path} names no checkpoints (remove it: the folders' names will do)")
        return entries

    def _folders(self) -> list[str]:
        """Names of the checkpoints that are there, in the order of their steps."""
        try:
            found = [match for match in map(_NAME.fullmatch, os.listdir(self.path)) if match]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [match[0] for match in sorted(found, key=lambda match: (int(match[1]), int(match[2] or 0)))]

    def _write_index(self, entries: list[dict[str, Any]]) -> None:
        """Writes checkpoints.json with those of ``entries`` that are kept."""
        kept = {entry["name"] for entry in entries[-self.keep_last :]} | {_best(entries)}
        text = json.dumps({"checkpoints": [entry for entry in entries if entry["name"] in kept]}, indent=2, allow_nan=False)
        with files.write_atomically(self.path / INDEX) as file:
            file.write(text.encode())


def _is_entry(entry: object) -> bool:
    if not isinstance(entry, dict) or entry.keys() != {"name", "held_out_loss"}:
        return False
    known = entry["held_out_loss"] is None or isinstance(entry["held_out_loss"], float)
    return known and isinstance(entry["name"], str) and _NAME.fullmatch(entry["name"]) is not None


def _best(entries: list[dict[str, Any]]) -> str | None:
    known = [entry for entry in entries if entry["held_out_loss"] is not None]
    return min(known, key=lambda entry: entry["held_out_loss"])["name"] if known else None


def _seal(folder: Path) -> None:
    """Writes the files' checksums beside them and waits until all is on the disk. raises: CheckpointError for folders or none."""
    paths = sorted(folder.iterdir())
    wrong = [f"{path.name} is a folder" for path in paths if path.is_dir()] if paths else ["nothing was written"]
    if wrong:
        raise CheckpointError(f"[checkpoint] {wrong[0]} (accepted: files, in the folder that write is given)")
    with ThreadPoolExecutor(2 * len(paths) + 1) as pool:  # while the disk writes, the checksums are computed
        flushed = [pool.submit(files.flush, path) for path in paths]
        sums = {path.name: checksum for path, checksum in zip(paths, pool.map(_checksum, paths))}
        for waiting in flushed:
            waiting.result()
    with files.write_atomically(folder / CHECKSUMS) as file:
        file.write(json.dumps(sums, indent=2).encode())


def verify(folder: str | Path, names: Callable[[str], bool] | None = None) -> None:
    """Compares a checkpoint's files (those whose ``names`` are true) with their checksums.

    raises: CheckpointError if one is absent or not what was written.
    """
    folder = Path(folder)
    try:
        sums = files.parse_json(files.read_small(folder / CHECKSUMS))
        if not sums:
            raise ValueError("no files are named")
        sums = {name: checksum for name, checksum in sums.items() if names is None or names(name)}
        paths = [files.member(folder, name) for name in sums]
        with ThreadPoolExecutor(len(paths) + 1) as pool:
            found = dict(zip(sums, pool.map(_checksum, paths)))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"[checkpoint] no checkpoint in {folder}: {Path(error.filename or folder).name} is missing") from None
    except (OSError, ValueError) as error:
        path = getattr(error, "filename", None) or folder / CHECKSUMS
        raise CheckpointError(f"[checkpoint] cannot read {path}: {files.reason(error)}") from error
    for name, checksum in sums.items():
        if found[name] != checksum:
            is_there, written = (str(one).strip("{}").replace("'", "") for one in (found[name], checksum))
            raise CheckpointError(f"[checkpoint] {folder / name} is damaged: {is_there} (written: {written})")


def _is_damaged(folder: Path) -> bool:
    try:
        verify(folder)
    except CheckpointError as error:
        return not isinstance(error.__cause__, OSError)
    return False


def _remove(folder: Path) -> None:
    """Removes a folder, as far as that can be. What else is called so is not the run's; a pipe would be waited for."""
    if folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder, ignore_errors=True)


def _checksum(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    if not size:  # nothing to map
        return {"bytes": 0, "crc32": f"{0:08x}"}
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return {"bytes": size, "crc32": f"{zlib.crc32(content):08x}"}
