"""Checkpoints: weights and optimizer state as safetensors, the rest as JSON. A checkpoint is complete or absent."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np

from needle.backend_ndarray import NDArray
from needle.errors import CheckpointError
from needle.models import Pythia, load_published, published_state
from needle.optim import AdamW
from pythia_app.options import CHANGEABLE, FIXED

LATEST = "latest"


def _safetensors():
    try:
        import safetensors
        import safetensors.numpy
    except ModuleNotFoundError:
        raise CheckpointError("[checkpoint] package missing: safetensors (pip install 'needle[train]')") from None
    return safetensors


def save(folder: Path, model: Pythia, optimizer: AdamW, state: dict) -> Path:
    """Writes ``folder``/step-N and points ``folder``/latest at it; the checkpoint before it is removed afterwards.

    raises: CheckpointError if it cannot be written; the one before then stays.
    """
    name = f"step-{state['step']:06d}"
    target, partial = folder / name, folder / f".{name}.partial"
    before = (folder / LATEST).read_text().strip() if (folder / LATEST).is_file() else None
    moments = {}
    for p_name, p in model.named_parameters():
        if p in optimizer.m:
            moments[f"m.{p_name}"] = optimizer.m[p].numpy()
            moments[f"v.{p_name}"] = optimizer.v[p].numpy()
    library = _safetensors()
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        library.numpy.save_file(published_state(model), partial / "model.safetensors")
        library.numpy.save_file(moments or {"none": np.zeros(0, np.float32)}, partial / "optimizer.safetensors")
        (partial / "state.json").write_text(json.dumps({**state, "optimizer_steps": optimizer.t}))
        shutil.rmtree(target, ignore_errors=True)
        os.replace(partial, target)
        pointer = folder / f".{LATEST}.partial"
        pointer.write_text(name)
        os.replace(pointer, folder / LATEST)
    except (OSError, library.SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"[checkpoint] cannot write {target}: {getattr(error, 'strerror', None) or error}") from error
    if before and before != name:
        shutil.rmtree(folder / before, ignore_errors=True)
    return target


def find(path: Path) -> Path:
    """The checkpoint in a run's folder, or ``path`` itself. raises: CheckpointError if there is none."""
    if (path / LATEST).is_file():
        path = path / (path / LATEST).read_text().strip()
    for part in ("state.json", "model.safetensors"):
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
    if missing:
        raise CheckpointError(f"[load_checkpoint] {path / 'state.json'} lacks {', '.join(sorted(missing))}")
    return state


def load(path: Path, model: Pythia, optimizer: AdamW | None) -> None:
    """Fills the model, and the optimizer if given. raises: CheckpointError for damaged or unfitting files."""
    load_published(model, _read(path / "model.safetensors"))
    if optimizer is None:
        return
    moments = _read(path / "optimizer.safetensors")
    for name, p in model.named_parameters():
        for letter, kept in (("m", optimizer.m), ("v", optimizer.v)):
            values = moments.get(f"{letter}.{name}")
            if values is not None:
                kept[p] = NDArray(values, device=p.device, dtype=str(values.dtype))
    optimizer.t = read_state(path)["optimizer_steps"]


def _read(path: Path) -> dict[str, np.ndarray]:
    library = _safetensors()
    try:
        return library.numpy.load_file(path)
    except (OSError, library.SafetensorError) as error:
        raise CheckpointError(f"[load_checkpoint] cannot read {path}: {error}") from error
