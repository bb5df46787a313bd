"""Files that are either whole or absent, and small files that are read without trusting them."""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import math
import os
import re
import stat
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from threading import get_ident
from typing import Any, BinaryIO

from .errors import DataError

SMALL_BYTES = 4 << 20  # more than any description of a model or a run


@contextlib.contextmanager
def write_atomically(path: Path) -> Iterator[BinaryIO]:
    """Opens a file for writing, which is on the disk as ``path`` if the block ends well; otherwise ``path`` stays as it was.

    raises: OSError if the folder cannot be made, or the file cannot be written to its end.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{get_ident()}.tmp")
    remove_abandoned(path)
    try:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path.parent)) from None
        with _open_locked(temporary) as file:
            yield file
            file.flush()
            sync(file.fileno())
        os.replace(temporary, path)
        flush(path.parent)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)  # gone already if it was renamed


def remove_abandoned(path: Path) -> None:
    """Removes what killed processes have left of writing ``path``: temporary files that no process has locked."""
    for found in path.parent.glob(f"{glob.escape(path.name)}.*.tmp"):
        if not re.fullmatch(r"\d+-\d+", found.name.removeprefix(f"{path.name}.").removesuffix(".tmp")):
            continue  # somebody else's
        with contextlib.suppress(OSError), open(found, "r+b") as file:
            if _lock(file.fileno()):
                found.unlink()


def _open_locked(path: Path) -> BinaryIO:
    while True:
        file = open(path, "wb")
        locked = _lock(file.fileno())
        if locked is None or (locked and path.exists() and os.path.samestat(path.stat(), os.fstat(file.fileno()))):
            return file
        file.close()  # another process took it for abandoned before it was locked
        time.sleep(0.001)  # it may not have removed it yet


def _lock(place: int) -> bool | None:
    """Whether the open file or folder is locked from now on: False if another process has locked it, None where nothing can be."""
    try:
        import fcntl
    except ModuleNotFoundError:  # Windows
        return None
    try:
        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return None
    return True


@contextlib.contextmanager
def writing(path: Path, what: str = "files") -> Iterator[None]:
    """Turns an OSError inside into a DataError of one line: ``path`` cannot be written. what: the flag that named it."""
    try:
        yield
    except OSError as error:
        raise DataError(f"[{what}] cannot write {path}: {reason(error)} (room in a writable folder)") from error


def try_folder(folder: Path) -> None:
    """Makes a file in ``folder``, and what is missing of its path, and takes both away again. raises: OSError where that fails."""
    import tempfile  # not with `import needle`

    missing = [part for part in (folder, *folder.parents) if not part.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    finally:
        for part in missing:
            with contextlib.suppress(OSError):
                part.rmdir()


@contextlib.contextmanager
def write_whole(path: Path) -> Iterator[BinaryIO]:
    """``write_atomically``. raises: DataError if the folder cannot be made, or the file cannot be written to its end."""
    with writing(path), write_atomically(path) as file:
        yield file


def home(path: str | Path) -> Path:
    """The path with a leading ``~`` or ``~name`` replaced, as in a shell; unchanged if there is no such user.

    raises: DataError for an empty name, as an unset variable gives it (Path would take it for the working directory), and for the
    home of what can be no name.
    """
    if not str(path):
        raise DataError("[path] is empty (the name of a file or folder)")
    try:
        return Path(os.path.expanduser(path))
    except ValueError as error:
        raise DataError(f"[path] {str(path)!r} can be none: {reason(error)} (the name of a file or folder)") from None


def flush(path: Path) -> None:
    """Waits until a file's content, or a folder's list of names, is on the disk, so that a power cut cannot undo it.

    Nothing is waited for where the file system takes no folder for that, as those of shared folders may not.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def sync(descriptor: int) -> None:
    """``os.fsync`` as it is meant: on macOS that alone leaves the data in the disk's own cache, which a power cut empties."""
    if sys.platform == "darwin":
        import fcntl

        with contextlib.suppress(OSError):  # some file systems lack it: SMB, FAT
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
    os.fsync(descriptor)


@contextlib.contextmanager
def alone_in(folder: Path, otherwise: str) -> Iterator[None]:
    """Locks a folder, so that two processes cannot mix their files. raises: DataError with the text ``otherwise`` if another
    process has locked it.
    """
    if sys.platform == "win32":  # where a folder cannot be opened
        yield
        return
    place = os.open(folder, os.O_RDONLY)
    try:
        if _lock(place) is False:
            raise DataError(otherwise)
        yield
    finally:
        os.close(place)


def reason(error: BaseException) -> str:
    """What went wrong, in one line without the path, which the caller's sentence has."""
    return " ".join(str(getattr(error, "strerror", None) or error).split())


def member(folder: Path, name: str) -> Path:
    """The path of the file ``name`` in ``folder``. A link may lead to another file there, or to where the Hub's cache keeps files.

    raises: ValueError for a name or link that leads elsewhere, or to what is no file; FileNotFoundError.
    """
    if name in ("", ".", "..") or Path(name).name != name:
        raise ValueError(f"{name!r} leads out of the folder (the name of a file in it)")
    home, real = folder.resolve(), Path(os.path.realpath(folder / name, strict=True))
    kept_in = {home, home.parent.parent / "blobs"} if home.parent.name == "snapshots" else {home}
    if real.parent not in kept_in:
        raise ValueError(f"{name!r} is a link out of the folder, to {real}")
    if not real.is_file():
        raise ValueError(f"{name!r} is no file")
    return real


def check_is_file(path: str | Path) -> None:
    """raises: ValueError for a pipe, whose other end may never come, and for whatever else is no file; OSError."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError("no file")


def read_small(path: Path, limit: int = SMALL_BYTES) -> bytes:
    """The content of a file. raises: OSError; ValueError if it is no file or has more than ``limit`` bytes."""
    check_is_file(path)
    with open(path, "rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"larger than {limit} bytes")
    return content


def parse_json(content: bytes) -> dict[str, Any]:
    """A JSON object as a dict. raises: ValueError for anything else, for a repeated key, and for NaN and infinities."""
    try:
        found = json.loads(content, object_pairs_hook=_once, parse_constant=_finite, parse_float=_finite)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("no JSON object")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{twice!r} comes twice")
    return found


def _finite(text: str) -> float:
    found = float(text)
    if not math.isfinite(found):
        raise ValueError(f"{text} is no number, or too large")
    return found
