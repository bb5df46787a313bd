"""Checkpoints: weights and optimizer state as safetensors, the rest as JSON. A checkpoint is complete or absent."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from pathlib import Path

from needle import files
from needle.backend_ndarray import NDArray
from needle.checkpoints import read_tensors, write_tensors
from needle.errors import CheckpointError
from needle.models import Pythia, load_published, published_state
from needle.optim import AdamW
from pythia_app.options import CHANGEABLE, FIXED

LATEST = "latest"


def latest(folder: Path) -> str | None:
    """Name of the run's newest checkpoint, or None. raises: CheckpointError if the pointer to it is damaged."""
    try:
        name = (folder / LATEST).read_text().strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"[load_checkpoint] cannot read {folder / LATEST}: {error}") from error
    if Path(name).name != name:
        raise CheckpointError(f"[load_checkpoint] {folder / LATEST} names no checkpoint: {name!r} (a folder beside it)")
    return name


def save(folder: Path, model: Pythia, optimizer: AdamW, state: dict) -> Path:
    """Writes ``folder``/step-N and points ``folder``/latest at it; only then is the checkpoint before it removed.

    raises: CheckpointError if it cannot be written; the one before then stays, and nothing of the new one.
    """
    before, base = latest(folder), f"step-{state['step']:06d}"
    names = itertools.chain([base], (f"{base}-{n}" for n in itertools.count(2)))
    target = next(folder / name for name in names if not (folder / name).exists())
    partial, pointer = folder / f".{target.name}.partial", folder / f".{LATEST}.partial"
    moments = {}
    for p_name, p in model.named_parameters():
        if p in optimizer.m:
            moments[f"m.{p_name}"] = optimizer.m[p]
            moments[f"v.{p_name}"] = optimizer.v[p]
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write_tensors(partial / "model.safetensors", published_state(model))
        write_tensors(partial / "optimizer.safetensors", moments)
        (partial / "state.json").write_text(json.dumps({**state, "optimizer_steps": optimizer.t}))
        for file in partial.iterdir():
            files.flush(file)  # a machine that stops now must not keep the pointer and lose what it points to
        os.replace(partial, target)
        pointer.write_text(target.name)
        files.flush(pointer)
        os.replace(pointer, folder / LATEST)
    except OSError as error:
        raise CheckpointError(f"[checkpoint] cannot write {target}: {files.reason(error)} (room in a writable folder)") from error
    finally:  # after Ctrl-C, too
        shutil.rmtree(partial, ignore_errors=True)
        pointer.unlink(missing_ok=True)
        stale = before if latest(folder) == target.name else target.name
        if stale:
            shutil.rmtree(folder / stale, ignore_errors=True)
    return target


def find(path: Path) -> Path:
    """The checkpoint in a run's folder, or ``path`` itself. raises: CheckpointError if there is none."""
    path = path / (latest(path) or "")
    for part in ("state.json", "model.safetensors", "optimizer.safetensors"):
        if not (path / part).is_file():
            raise CheckpointError(f"[load_checkpoint] no checkpoint in {path}: {part} is missing")
    return path


def read_state(path: Path) -> dict:
    """What was saved beside the weights. raises: CheckpointError for a damaged file."""
    try:
        state = json.loads((path / "state.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"[load_checkpoint] cannot read {path / 'state.json'}: {error}") from error
    state = state if isinstance(state, dict) else {}
    options = state.get("options")
    missing = {"step", "steps", "data", "optimizer_steps"} - set(state)
    missing |= set(CHANGEABLE + FIXED) - set(options) if isinstance(options, dict) else {"options"}
    missing |= {name for name in ("step", "steps", "optimizer_steps") if not isinstance(state.get(name), int)}
    if missing:
        raise CheckpointError(f"[load_checkpoint] {path / 'state.json'} lacks {', '.join(sorted(missing))}")
    return state


def load(path: Path, model: Pythia, optimizer: AdamW | None) -> None:
    """Fills the model, and the optimizer if given. raises: CheckpointError for damaged or unfitting files."""
    load_published(model, read_tensors(path / "model.safetensors"))
    if optimizer is None:
        return
    file, steps = path / "optimizer.safetensors", read_state(path)["optimizer_steps"]
    moments = read_tensors(file)
    for name, p in model.named_parameters() if steps else ():
        for letter, kept in (("m", optimizer.m), ("v", optimizer.v)):
            values = moments.get(f"{letter}.{name}")
            if values is None or values.shape != p.shape:
                found = "absent" if values is None else values.shape
                raise CheckpointError(f"[load_checkpoint] {letter}.{name} in {file} is {found} (accepted: {p.shape})")
            kept[p] = NDArray(values, device=p.device, dtype=str(values.dtype))
    optimizer.t = steps
