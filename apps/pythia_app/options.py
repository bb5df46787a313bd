"""The command line of train_pythia.py, and the checks that need no model and no text."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

import needle as ndl
from needle.errors import DataError, DeviceError, ShapeError
from needle.models import SIZES
from needle.nn import PATTERNS

DEVICES = ("cpu", "cuda", "cuda_sim", "cpu_numpy")
# What a checkpoint keeps of the command line. A resumed run takes these from it; only the first may be changed then.
CHANGEABLE = ("dataset", "tokenizer", "max_tokens", "seed", "batch_size", "accumulation_steps", "lr")
FIXED = ("model", "vocab_size", "seq_len", "sparse", "pattern", "block_size", "window")


def _flag(group, name: str, **kwargs) -> None:
    """--a_b and --a-b."""
    names = [f"--{name}"] + ([f"--{name.replace('_', '-')}"] if "_" in name else [])
    group.add_argument(*names, **kwargs)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train_pythia.py",
        description="Train a Pythia language model on text, with dense or block-sparse attention.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    model = parser.add_argument_group("model")
    _flag(model, "model", default="70m", metavar="SIZE", help=f"one of {', '.join(SIZES)}")
    _flag(model, "vocab_size", type=int, default=10_000, help="token ids the model and its tokenizer have")
    _flag(model, "seed", type=int, default=0, help="of the weights, the order of the text and the sample")
    sparse = parser.add_argument_group("attention")
    _flag(sparse, "sparse", action="store_true", help="block-sparse attention instead of dense")
    _flag(sparse, "pattern", default="local", help=f"blocks that a block sees: {', '.join(PATTERNS)}; never the future")
    _flag(sparse, "block_size", type=int, default=64, help="edge of a block in positions, a multiple of 16 up to 128")
    _flag(sparse, "window", type=int, default=2, help="blocks of the local pattern: its own and those before it")
    _flag(sparse, "compare_dense", action="store_true", help="train both on the same batches and print a table")
    data = parser.add_argument_group("data")
    _flag(data, "dataset", default="stdlib", help="stdlib (Python's own source), wikitext-2, or a text file or folder")
    _flag(data, "max_tokens", type=int, default=None, help="use this much of the training text")
    _flag(data, "tokenizer", default=None, metavar="FILE", help="a tokenizer.json; without one BPE is trained")
    training = parser.add_argument_group("training")
    _flag(training, "epochs", type=float, default=None, help="passes over the text, where max_steps is not given")
    _flag(training, "max_steps", type=int, default=None, help="optimizer steps (150 where epochs is not given either)")
    _flag(training, "batch_size", type=int, default=2, help="sequences in a micro-batch")
    _flag(training, "seq_len", type=int, default=512, help="positions in a sequence")
    _flag(training, "accumulation_steps", type=int, default=1, help="micro-batches in a step")
    _flag(training, "lr", type=float, default=1e-3, help="peak learning rate (warmup, then cosine to a tenth)")
    _flag(training, "eval_only", action="store_true", help="only the loss on held-out text")
    where = parser.add_argument_group("machine and files")
    _flag(where, "device", default="auto", help=f"auto (cuda if there is one, else cpu), {', '.join(DEVICES)}")
    _flag(where, "checkpoint_dir", default=None, metavar="FOLDER", help="the run's folder (default: runs/MODEL-TIME)")
    _flag(where, "load_checkpoint", default=None, metavar="FOLDER", help="go on from a run's folder or a checkpoint")
    return parser


def parse(argv: list[str] | None = None, saved: dict | None = None) -> argparse.Namespace:
    """The options, checked. Ends with exit code 2 and one line for a wrong one.

    saved: a checkpoint's options, which replace the defaults; the ones that make the model replace what was given, too.
    """
    parser = _parser()
    if saved is not None:
        parser.set_defaults(**{name: saved[name] for name in CHANGEABLE})
    options = parser.parse_args(argv)
    if saved is not None:
        for name in FIXED:
            setattr(options, name, saved[name])
    check(options)
    return options


def check(options: argparse.Namespace) -> None:
    """raises: ShapeError, DataError or DeviceError in one line for what cannot work."""
    for name in ("vocab_size", "block_size", "window", "batch_size", "seq_len", "accumulation_steps"):
        if getattr(options, name) < 1:
            raise ShapeError(f"[{name}] is {getattr(options, name)} (accepted: at least 1)")
    for name in ("max_tokens", "max_steps", "epochs"):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise ShapeError(f"[{name}] is {value} (accepted: above 0)")
    if not 0 < options.lr < float("inf"):
        raise ShapeError(f"[lr] is {options.lr} (accepted: above 0)")
    if options.model not in SIZES:
        raise ShapeError(f"[model] unknown model: {options.model} (accepted: {', '.join(SIZES)})")
    if options.pattern not in PATTERNS:
        raise ShapeError(f"[pattern] unknown pattern: {options.pattern} (accepted: {', '.join(PATTERNS)})")
    if options.sparse or options.compare_dense:
        if options.block_size % 16 or options.block_size > 128:
            raise ShapeError(f"[block_size] is {options.block_size} (accepted: multiples of 16 up to 128)")
        if options.seq_len % options.block_size:
            raise ShapeError(
                f"[seq_len] is {options.seq_len}, no multiple of the block size {options.block_size} (accepted: "
                f"{max(options.seq_len // options.block_size, 1) * options.block_size}, for example)"
            )
    if options.load_checkpoint is not None and not Path(options.load_checkpoint).is_dir():
        raise DataError(f"[load_checkpoint] no such folder: {options.load_checkpoint} (a run's folder or a checkpoint in it)")
    device(options.device)


def device(name: str):
    """The device of that name, ready. raises: DeviceError if it is unknown or absent."""
    if name == "auto":
        return ndl.cuda() if ndl.cuda().enabled() else ndl.cpu()
    if name not in DEVICES:
        raise DeviceError(f"[device] unknown device: {name} (accepted: auto, {', '.join(DEVICES)})")
    chosen = getattr(ndl, name)()
    chosen.require()
    return chosen


def writable_folder(path: Path) -> Path:
    """``path``, made if need be. raises: DataError if nothing can be written there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"[checkpoint_dir] cannot make {path}: {error.strerror} (a folder that can be written)") from error
    if not os.access(path, os.W_OK):
        raise DataError(f"[checkpoint_dir] cannot write into {path} (a folder that can be written)")
    return path
