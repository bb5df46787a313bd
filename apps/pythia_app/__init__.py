"""The parts of train_pythia.py: options, the training run, checkpoints, and what it prints and draws."""

import contextlib
import os
import shlex
import sys
from pathlib import Path

from needle.errors import CONTROLS


def printable(text: str) -> str:
    """What a model wrote, for stdout: on a terminal control characters are shown, not obeyed."""
    return text.translate(CONTROLS) if sys.stdout.isatty() else text


def command(*arguments: object) -> str:
    """What runs train_pythia.py from the current folder."""
    app = str(Path(__file__).resolve().parent.parent / "train_pythia.py")
    with contextlib.suppress(OSError):  # the current folder has been removed
        app = os.path.relpath(app)
    return shlex.join(["python", app, *map(str, arguments)])
