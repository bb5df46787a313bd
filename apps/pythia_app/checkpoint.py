"""Checkpoints of a run: the model as transformers loads it, the optimizer's tensors, and the rest of the state as JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

from needle import files
from needle.checkpoints import CheckpointFolder, read_tensors, verify, write_tensors
from needle.data.text_tokenizer import TextTokenizer
from needle.errors import CheckpointError
from needle.models import Pythia, pretrained
from needle.optim import AdamW
from pythia_app.options import FIXED

STATE, OPTIMIZER = "state.json", "optimizer.safetensors"
KEYS = {"step", "steps", "data", "options", "optimizer_steps", "scaler", "random", "metrics"}


def save(folder: CheckpointFolder, model: Pythia, optimizer: AdamW, state: dict, tokenizer: TextTokenizer | None = None) -> Path:
    """The run's newest checkpoint from now on. raises: CheckpointError if there is no room; the one before then stays."""

    def write(path: Path) -> None:
        pretrained.write(model, path, tokenizer)
        write_tensors(path / OPTIMIZER, optimizer.named_states(_names(model, optimizer)))
        (path / STATE).write_text(json.dumps({**state, "optimizer_steps": optimizer.t}, allow_nan=False))

    return folder.save(state["step"], write)


class Found(NamedTuple):
    """A whole checkpoint, what is wrong with newer ones, and the names of all that its run had before it was looked for."""

    path: Path
    problems: list[str]
    names: list[str]


def find(path: Path) -> Found:
    """The newest whole checkpoint in a run's folder, or ``path`` itself. raises: CheckpointError if there is none."""
    run = CheckpointFolder(path)
    names, found = run.names(), run.newest()
    if found is not None:
        return Found(*found, names)
    real = Path(os.path.realpath(path))  # its run is where it lies, not where a link to it does
    names = CheckpointFolder(real.parent).names()
    verify(path)
    return Found(real, [], names)


def run_of(path: Path) -> Path | None:
    """The folder of the run that the checkpoint ``path`` is one of; None if it stands alone."""
    return path.parent if path.name in CheckpointFolder(path.parent).names() else None


def check_newest(saved: Path, asked: Path) -> None:
    """raises: CheckpointError if ``saved`` is just what was asked for, and its run has newer ones, which would be replaced."""
    newest = CheckpointFolder(saved.parent).names()[-1:] if run_of(saved) is not None else []
    if newest not in ([], [saved.name]) and asked.resolve() == saved.resolve():
        raise CheckpointError(
            f"[load_checkpoint] {saved.parent} went on to {newest[0]}, which a run from {saved.name} would take the place of "
            "(accepted: with --checkpoint_dir FOLDER, another one)"
        )


def read_state(path: Path) -> dict:
    """What was saved beside the tensors. raises: CheckpointError if it is not what ``save`` writes."""
    try:
        state = files.parse_json(files.read_small(path / STATE))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"[load_checkpoint] cannot read {path / STATE}: {files.reason(error)}") from error
    options = state.get("options")
    missing = KEYS - set(state)
    missing |= {name for name in FIXED if options.get(name) is None} if isinstance(options, dict) else {"options"}
    if missing:
        raise CheckpointError(f"[load_checkpoint] {path / STATE} lacks {', '.join(sorted(missing))}")
    for name in ("step", "steps", "optimizer_steps"):
        if type(state[name]) is not int or not 0 <= state[name] < 1 << 62:
            raise CheckpointError(f"[load_checkpoint] {name} in {path / STATE} is {state[name]!r} (accepted: a count)")
    return state


def load_optimizer(path: Path, model: Pythia, optimizer: AdamW) -> None:
    """Fills the optimizer's states. raises: CheckpointError for damaged or unfitting files."""
    steps, tensors, names = read_state(path)["optimizer_steps"], read_tensors(path / OPTIMIZER), _names(model, optimizer)
    for name in (f"m.{name}" for name in names) if steps else ():
        if name not in tensors:  # every parameter of a Pythia has had gradients
            raise CheckpointError(f"[load_checkpoint] {name} in {path / OPTIMIZER} is absent")
    try:
        optimizer.load_state_dict({**tensors, "t": steps}, names)
    except CheckpointError as error:
        raise CheckpointError(f"{error}, in {path / OPTIMIZER}") from None


def _names(model: Pythia, optimizer: AdamW) -> list[str]:
    paths = {p: path for path, p in model.named_parameters()}
    return [paths[p] for p in optimizer.params]
