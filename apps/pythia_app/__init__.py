"""The parts of train_pythia.py: options, the training run, checkpoints, and what it prints and draws."""

import os
import shlex
from pathlib import Path


def command(*arguments: object) -> str:
    """What runs train_pythia.py from the current folder."""
    app = os.path.relpath(Path(__file__).resolve().parent.parent / "train_pythia.py")
    return shlex.join(["python", app, *map(str, arguments)])
