"""The command line of train_pythia.py, and the checks that need no model and no text."""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Callable

import numpy as np

import needle as ndl
from needle import files
from needle.amp import PRECISIONS
from needle.backend_ndarray.block_layout import BLOCK_SIZES
from needle.backend_selection import BACKEND
from needle.command_line import Parser, flag
from needle.data.text_corpus import CORPORA
from needle.data.text_tokenizer import DEFAULT_VOCABULARY, LARGEST_VOCABULARY
from needle.data.token_files import find_token_file
from needle.dtype import to_numpy
from needle.errors import DataError, DeviceError, DTypeError, ShapeError
from needle.memory import parse_bytes
from needle.models import SIZES, check_blocks, layers_or_bytes, size_name
from needle.nn import PATTERNS
from pythia_app import config_file
from pythia_app.loading import MODEL_HELP

DEVICES = ("cpu", "cuda", "cuda_sim", "cpu_numpy")
PRECISION_HELP = f"what the model is kept and computed in: {', '.join(PRECISIONS)}"
DEVICE_HELP = f"auto (cuda if there is one, else cpu), {', '.join(DEVICES)}"
MOST_TOKENS = 1 << 22  # in a micro-batch
HUGE = (1 << 63) - 1
SMALLEST = float(np.finfo(np.float32).smallest_subnormal)
STEPS = 200  # with which the default run ends more than a nat below token frequencies alone, on any Python's library
# What a whole number may be; far above what runs, so that planning and tokenizing never meet a number they cannot hold.
RANGES = {
    "vocab_size": (1, LARGEST_VOCABULARY),
    "seed": (0, HUGE),
    "block_size": (1, BLOCK_SIZES[-1]),
    "window": (1, 1 << 20),
    "max_tokens": (1, HUGE),
    "max_steps": (1, HUGE),
    "batch_size": (1, MOST_TOKENS),
    "seq_len": (1, 1 << 17),
    "accumulation_steps": (1, 1 << 20),
    "warmup_steps": (0, HUGE),
    "save_every": (0, HUGE),
    "keep_last": (1, 1 << 20),
}
# What another number may be: a test, and its words.
NUMBERS: dict[str, tuple[Callable[[float], bool], str]] = {
    "epochs": (lambda value: 0 < value <= 1e6, "above 0, at most 1e+06"),
    "lr": (lambda value: 0 < value <= 1e38, "above 0, at most 1e+38"),
    "max_grad_norm": (lambda value: 0 < value <= 1e38, "above 0, at most 1e+38"),
    "eps": (lambda value: SMALLEST <= value <= 1, f"{SMALLEST:.2g} to 1"),  # 0 in float32 makes NaN of the first step
    "min_lr_ratio": (lambda value: 0 <= value <= 1, "0 to 1"),
    "weight_decay": (lambda value: 0 <= value <= 1, "0 to 1"),
    "dropout": (lambda value: 0 <= value < 1, "at least 0, below 1"),
}
# What a checkpoint keeps of the command line. A resumed run takes these from it; only the first may be changed then.
CHANGEABLE = (
    "dataset", "tokenizer", "max_tokens", "seed", "batch_size", "accumulation_steps", "checkpoint_layers", "precision", "lr",
    "warmup_steps", "min_lr_ratio", "betas", "eps", "weight_decay", "max_grad_norm", "dropout", "in_order", "init_from",
    "save_every", "keep_last", "tensorboard", "memory_limit", "device",
)  # fmt: skip
_KEEPING = ("checkpoint_dir", "save_every", "keep_last", "tensorboard")  # what a run keeps, and when
FIXED = ("model", "vocab_size", "seq_len", "sparse", "pattern", "block_size", "window")


def _parser() -> Parser:
    parser = Parser("train_pythia.py", "Train a Pythia language model on text, with dense or block-sparse attention.")
    flag(
        parser,
        "config",
        default=None,
        metavar="FILE",
        help="flags in YAML, a line `name: value` each; the command line wins over them, --no_NAME over `NAME: true`",
    )
    model = parser.add_argument_group("model")
    flag(model, "model", default="70m", metavar="SIZE", help=f"one of {', '.join(SIZES)}")
    flag(
        model,
        "init_from",
        default=None,
        metavar="MODEL",
        help="begin with the weights, the size, the vocabulary and the tokenizer of a trained model: " + MODEL_HELP,
    )
    flag(
        model,
        "vocab_size",
        type=int,
        default=None,
        help=f"token ids the model and its tokenizer have (default: those of the tokenizer given, else {DEFAULT_VOCABULARY:,})",
    )
    flag(model, "seed", type=int, default=0, help="of the weights, dropout, the order of the text and the sample")
    sparse = parser.add_argument_group("attention")
    flag(sparse, "sparse", action="store_true", help="block-sparse attention instead of dense")
    flag(sparse, "pattern", default="local", help=f"blocks that a block sees: {', '.join(PATTERNS)}; never the future")
    flag(sparse, "block_size", type=int, default=64, help="edge of a block in positions, a multiple of 16 up to 128")
    flag(sparse, "window", type=int, default=2, help="blocks of the local pattern: its own and those before it")
    flag(sparse, "compare_dense", action="store_true", help="train both on the same batches (default: 20 steps) and print a table")
    data = parser.add_argument_group("data")
    flag(data, "dataset", default="stdlib", help="stdlib (Python's own source), wikitext-2, a text file or folder, or a token file")
    flag(data, "max_tokens", type=int, default=None, help="use this much of the training text (default: all)")
    flag(data, "tokenizer", default=None, metavar="FILE", help="a tokenizer.json (default: BPE trained on the text)")
    flag(data, "in_order", action="store_true", help="take the text as it lies, for what is shuffled already")
    training = parser.add_argument_group("training")
    flag(training, "epochs", type=float, default=None, help="passes over the text, if max_steps is not given")
    flag(training, "max_steps", type=int, default=None, help=f"optimizer steps (default: {STEPS}, or what epochs says)")
    flag(training, "batch_size", type=int, default=2, help="sequences in a micro-batch")
    flag(training, "seq_len", type=int, default=512, help="positions in a sequence")
    flag(training, "accumulation_steps", type=int, default=1, help="micro-batches in a step")
    flag(
        training, "checkpoint_layers", default="0", metavar="N|SIZE",
        help="compute layers again in backward, N at a time, instead of keeping their arrays (0: keep all); or as few as keep "
        "the run's peak within SIZE, like 2GiB",
    )  # fmt: skip
    flag(training, "precision", default="fp32", help=f"of products: {', '.join(PRECISIONS)}; parameters stay float32")
    flag(training, "lr", type=float, default=1e-3, help="peak learning rate: linear warmup, then a cosine")
    flag(
        training,
        "warmup_steps",
        type=int,
        default=None,
        help="steps in which the learning rate rises (default: a tenth of all, at most 100)",
    )
    flag(training, "min_lr_ratio", type=float, default=0.1, metavar="R", help="the last learning rate, as a part of the peak one")
    flag(training, "betas", type=float, nargs=2, default=[0.9, 0.95], metavar="BETA", help="AdamW's decay of its two averages")
    flag(training, "eps", type=float, default=1e-8, help="AdamW's, added to the root of the second average")
    flag(training, "weight_decay", type=float, default=0.1, help="AdamW's, of matrices and embeddings")
    flag(training, "max_grad_norm", type=float, default=1.0, metavar="NORM", help="gradients are clipped to this joint norm")
    flag(
        training,
        "dropout",
        type=float,
        default=0.0,
        metavar="P",
        help="of the embedding's output and of what each layer's attention and feed-forward add",
    )
    flag(training, "eval_only", action="store_true", help="only the held-out loss, of the run in checkpoint_dir if there is one")
    where = parser.add_argument_group("machine and files")
    flag(where, "device", default="auto", help=DEVICE_HELP)
    flag(where, "memory_limit", default=None, metavar="BYTES", help="the most that arrays may take: 2GiB, T4 (default: all)")
    flag(where, "plan", action="store_true", help="only say what the run takes and where every byte goes; allocates nothing")
    flag(where, "checkpoint_dir", default=None, metavar="FOLDER", help="the run's folder (default: runs/MODEL-TIME)")
    flag(where, "tensorboard", action="store_true", help="also write events for TensorBoard, into the run's folder")
    flag(where, "resume", action="store_true", help="go on from the newest checkpoint in checkpoint_dir, if it has one")
    flag(where, "save_every", type=int, default=500, metavar="N", help="steps between checkpoints (0: save only at the end)")
    flag(where, "keep_last", type=int, default=2, metavar="K", help="checkpoints kept beside the best one")
    flag(
        where,
        "load_checkpoint",
        default=None,
        metavar="FOLDER",
        help="go on from a run's folder or a checkpoint in it, there if checkpoint_dir is not given",
    )
    return parser


def parse(argv: list[str] | None = None, saved: dict | None = None) -> argparse.Namespace:
    """The options, checked. Ends with exit code 2 and one line for a wrong one. saved: those of a checkpoint."""
    options = read(argv, saved)
    check(options)
    return options


def read(argv: list[str] | None, saved: dict | None = None) -> argparse.Namespace:
    """The options, not checked.

    The command line wins over the file of ``--config``, that over ``saved``, the options of a checkpoint, and these over the
    defaults. Only the options that make the model are always those of ``saved``.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    if saved is not None:
        known = {name: saved[name] for name in CHANGEABLE + FIXED if name in saved}
        saved = config_file.checked(known, parser, "[load_checkpoint] the checkpoint's options")
        parser.set_defaults(**{name: saved[name] for name in CHANGEABLE if name in saved})
    if options.config is not None:
        values = config_file.read(options.config, parser)
        if options.epochs is not None:  # on the command line, where it wins over the file's number of steps
            values.pop("max_steps", None)
        parser.set_defaults(**values)
    options = parser.parse_args(argv)
    if saved is not None:
        for name in FIXED:
            setattr(options, name, saved[name])
        options.init_from = saved.get("init_from")
    for name in ("checkpoint_dir", "load_checkpoint"):  # in a file, and after `=`, no shell replaces a ~
        if getattr(options, name):
            setattr(options, name, str(files.home(getattr(options, name))))
    text = options.dataset
    if text and text not in CORPORA and (os.path.exists(files.home(text)) or find_token_file(text)):
        options.dataset = os.path.abspath(files.home(text))  # a run may go on from another directory
    if options.tokenizer:
        options.tokenizer = os.path.abspath(files.home(options.tokenizer))
    return options


def notes(argv: list[str] | None, options: argparse.Namespace) -> list[str]:
    """A note for each flag that has no effect: the saved model has another value, which is in ``options``, or nothing uses it."""
    parser = _parser()
    parser.set_defaults(**dict.fromkeys(FIXED))
    given = parser.parse_args(argv)
    if given.config is not None:
        parser.set_defaults(**config_file.read(given.config, _parser()))
        given = parser.parse_args(argv)
    given.model = given.model and size_name(given.model)
    said = [
        f"--{name} {getattr(given, name)} is not taken: the checkpoint has {getattr(options, name)}"
        for name in FIXED
        if getattr(given, name) not in (None, getattr(options, name))
    ]
    began, asked = options.init_from, given.init_from
    if asked is not None and not {asked, os.path.abspath(files.home(asked))} & {began, os.path.dirname(began or "")}:
        said.append(f"--init_from {asked} is not taken: a run goes on that began with {began or 'new weights'}")
    defaults = _parser()
    if options.compare_dense:  # which keeps nothing
        idle = [name for name in _KEEPING if getattr(options, name) != defaults.get_default(name)]
        said += [f"--{name} has no effect with --compare_dense" for name in idle]
    if not said and options.pattern != defaults.get_default("pattern") and not (options.sparse or options.compare_dense):
        said.append(f"--pattern {options.pattern} has no effect without --sparse")
    return said


def check(options: argparse.Namespace) -> None:
    """raises: ShapeError, DataError or DeviceError in one line for what cannot work."""
    if options.sparse or options.compare_dense:
        check_blocks(options.seq_len, options.block_size)
    for name, (low, high) in RANGES.items():
        value = getattr(options, name)
        if value is not None and not low <= value <= high:
            raise ShapeError(f"[{name}] is {value} (accepted: {low} to {high:,})")
    for name, (fits, accepted) in NUMBERS.items():
        value = getattr(options, name)
        if value is not None and not fits(value):
            raise ShapeError(f"[{name}] is {value} (accepted: {accepted})")
    if not all(0 <= beta < 1 for beta in options.betas):
        raise ShapeError(f"[betas] are {options.betas} (accepted: at least 0, below 1)")
    for name in ("dataset", "tokenizer", "checkpoint_dir", "load_checkpoint", "init_from"):
        if getattr(options, name) == "":
            raise DataError(f"[{name}] is empty (accepted: a name)")
    for name in ("load_checkpoint", "resume", "eval_only"):
        if options.compare_dense and getattr(options, name):
            raise ShapeError(f"[compare_dense] trains from the start; {name} was given (accepted: one of the two)")
    if options.resume and options.checkpoint_dir is None:
        raise ShapeError("[resume] needs to know where the run is (accepted: with --checkpoint_dir FOLDER)")
    if options.batch_size * options.seq_len > MOST_TOKENS:
        raise ShapeError(f"[batch_size] {options.batch_size} x {options.seq_len} tokens are too many (accepted: {MOST_TOKENS:,})")
    options.checkpoint_layers = layers_or_bytes(str(options.checkpoint_layers))
    options.model = size_name(options.model)
    if options.model not in SIZES:
        raise ShapeError(f"[model] unknown model: {options.model} (accepted: {', '.join(SIZES)})")
    check_precision(options.precision)
    if options.pattern not in PATTERNS:
        raise ShapeError(f"[pattern] unknown pattern: {options.pattern} (accepted: {', '.join(PATTERNS)})")
    if options.load_checkpoint is not None and not os.path.isdir(options.load_checkpoint):
        raise DataError(f"[load_checkpoint] no such folder: {options.load_checkpoint} (a run's folder or a checkpoint in it)")
    if options.tensorboard and importlib.util.find_spec("tensorboardX") is None:
        raise DataError("[tensorboard] the package tensorboardX is missing (pip install tensorboardX)")
    if options.memory_limit is not None:
        parse_bytes(options.memory_limit, "memory_limit")
    device(options.device)


def check_precision(precision: str) -> None:
    """raises: ShapeError if it is unknown."""
    if precision not in PRECISIONS:
        raise ShapeError(f"[precision] unknown precision: {precision} (accepted: {', '.join(PRECISIONS)})")


def model_dtype(precision: str) -> str:
    """Of a model that is kept in that precision. raises: ShapeError if it is unknown, DataError without what it needs."""
    check_precision(precision)
    dtype = PRECISIONS[precision] or "float32"
    try:
        to_numpy(dtype)  # through which weights are loaded
    except DTypeError as error:
        raise DataError(error) from None
    return dtype


def device(name: str):
    """The device of that name, ready. raises: DeviceError if it is unknown or absent."""
    if BACKEND != "nd":
        raise DeviceError(f"[NEEDLE_BACKEND] is {BACKEND}, for the course's homework (accepted: nd, or not set)")
    if name == "auto":
        return ndl.cuda() if ndl.cuda().enabled() else ndl.cpu()
    if name not in DEVICES:
        raise DeviceError(f"[device] unknown device: {name} (accepted: auto, {', '.join(DEVICES)})")
    chosen = ndl.as_device(name)
    chosen.require()
    return chosen
