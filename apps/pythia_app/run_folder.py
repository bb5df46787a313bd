"""The folder of a training run: which it is, whether it can be written, and that no other process trains in it."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from needle import files
from needle.checkpoints import CheckpointFolder
from needle.errors import CheckpointError, DataError
from needle.memory import readable
from needle.models import PythiaConfig
from pythia_app import checkpoint, config_file


class RunFolder:
    """What the run will write into, tried out without leaving a trace; ``taken`` makes it.

    path: ``--checkpoint_dir``, else the folder of ``saved``'s run, else a new one by model and time. saved: the checkpoint that the
    run continues from, if any. is_here: whether that is in ``path``.
    raises: DataError if nothing can be written there, if it holds another run or is a checkpoint of one, or without the package
    that writes config.yaml; CheckpointError if its list of checkpoints cannot be read.
    """

    def __init__(self, options: argparse.Namespace, found: checkpoint.Found | None):
        config_file.yaml_package()
        self.options, self.saved = options, found.path if found else None
        given = options.checkpoint_dir or (self.saved and checkpoint.run_of(self.saved))
        self._is_new = not given
        self.path = path = Path(given or f"runs/pythia-{options.model}-{time.strftime('%Y%m%d-%H%M%S')}")
        try:
            files.try_folder(path)
            taken = any(path.glob("step-*")) and not (self.saved and path.samefile(self.saved.parent))
            real = Path(os.path.realpath(path))
            is_checkpoint = real.name.startswith("step-") and real.name in CheckpointFolder(real.parent).names()
        except (OSError, ValueError) as error:  # ValueError: no path at all
            reason = files.reason(error)
            raise DataError(f"[checkpoint_dir] cannot write into {path}: {reason} (a folder that can be written)") from error
        if taken and given:
            raise DataError(f"[checkpoint_dir] {path} holds a run (another folder, or --load_checkpoint {path} to go on with it)")
        if is_checkpoint:
            raise DataError(f"[checkpoint_dir] {path} is a checkpoint, which its run will remove (the run's folder, or another)")
        self.is_here = self.saved is not None and not lies_elsewhere(self.saved, path)
        self._names = found.names if found and self.is_here else CheckpointFolder(path).names()

    def check_room(self) -> None:
        """raises: DataError if there is none for a checkpoint, after what killed processes left in the folder has been removed."""
        disk = shutil.disk_usage(next(folder for folder in (self.path, *self.path.parents) if folder.exists()))
        free = disk.free + sum(map(nbytes, CheckpointFolder(self.path).abandoned()))
        # Weights and AdamW's two averages, in float32. A file system may not know how large it is.
        options = self.options
        needed = 3 * 4 * PythiaConfig.named(options.model, vocab_size=options.vocab_size).parameter_count()
        if free < needed and disk.total:
            there = f"{self.path} has {readable(free)} left"
            raise DataError(
                f"[checkpoint_dir] a checkpoint takes {readable(needed)}, and {there} (more room, or a folder on another disk)"
            )

    @contextlib.contextmanager
    def taken(self) -> Iterator[Path]:
        """Makes the folder and keeps other processes from training in it.

        raises: DataError if one does; CheckpointError if one has since the folder was looked at.
        """
        if self._is_new:
            self.path, self._names = new_folder(self.path), []
        self.path.mkdir(parents=True, exist_ok=True)
        with files.alone_in(self.path, f"[checkpoint_dir] another process is training in {self.path} (another folder)"):
            if CheckpointFolder(self.path).names() != self._names:
                trained = f"another process has trained in {self.path} meanwhile"
                raise CheckpointError(f"[checkpoint_dir] {trained} (this command again, or another folder)")
            yield self.path


def lies_elsewhere(saved: Path, folder: str | Path | None) -> bool:
    """Whether a folder is named for the run, and the checkpoint is not in it."""
    return folder is not None and not (os.path.isdir(folder) and saved.parent.samefile(folder))


def nbytes(folder: Path) -> int:
    """Of the files in ``folder``, which another process may be removing."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(path, name)).st_size
    return total


def new_folder(path: Path) -> Path:
    """Makes ``path``, or, where runs began in the same second or a clock was set back, path-2, path-3 and so on."""
    names = itertools.chain([path.name], (f"{path.name}-{n}" for n in itertools.count(2)))
    while True:
        made = path.with_name(next(names))
        with contextlib.suppress(FileExistsError):
            made.mkdir(parents=True)
            return made
