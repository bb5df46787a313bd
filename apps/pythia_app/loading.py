"""A trained model and its tokenizer, as the apps take them."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

from needle import files
from needle.backend_ndarray import meta
from needle.checkpoints import CheckpointFolder, read_folder, verify
from needle.checkpoints.folder import CHECKSUMS
from needle.checkpoints.tensors import is_weights
from needle.data.text_corpus import check_dataset
from needle.data.text_tokenizer import DEFAULT_VOCABULARY, TextTokenizer, load_tokenizer
from needle.data.token_files import find_token_file, tokenizer_for
from needle.errors import CheckpointError, DataError
from needle.models import SIZES, Pythia, PythiaConfig
from needle.models.pretrained import TOKENIZER, folder_of, read_config, tokenizer_of
from needle.models.published import fitting

# Fields of PythiaConfig that do not belong to a published size.
OF_THE_RUN = ("vocab_size", "max_seq_len", "dropout", "pattern", "block", "window", "checkpoint_layers")
MODEL_HELP = "a run's folder, a checkpoint in it, a folder that transformers wrote, or a name on the Hub"


def find_model(source: str) -> Path:
    """The folder with the model's files; for a run's folder, its newest checkpoint. raises: DataError or CheckpointError."""
    path = files.home(source)
    try:
        newest = CheckpointFolder(path).newest() if path.is_dir() else None
    except OSError as error:
        raise CheckpointError(f"[model] cannot read {path}: {files.reason(error)} ({MODEL_HELP})") from error
    found, problems = newest or (source, [])
    for problem in problems:
        print(f"note: {problem}; taking {found}", file=sys.stderr)
    folder = folder_of(found)
    if newest is None and (folder / CHECKSUMS).is_file():  # a checkpoint, named by itself; its JSON may have been edited
        verify(folder, is_weights)
    return folder


def load_model(source: str, device, dtype: str = "float32") -> tuple[Pythia, TextTokenizer]:
    """The newest checkpoint of a run's folder, or what ``Pythia.from_pretrained`` takes, in ``dtype``, with its tokenizer.

    raises: DataError or CheckpointError, in one line, if it cannot be used.
    """
    found = find_model(source)
    return Pythia.from_pretrained(found, device, dtype), tokenizer_of(found)


def fit_options(options: argparse.Namespace, folder: Path) -> None:
    """Sets the options that the model in ``folder`` decides: size, vocabulary, and the checkpoint that ``init_from`` names.

    raises: CheckpointError if the model has no published size, or its weights do not fit its config.json; DataError if it has no
    tokenizer and one is needed.
    """
    config = read_config(folder)
    of_the_run = {name: getattr(config, name) for name in OF_THE_RUN}
    sizes = [name for name in SIZES if replace(PythiaConfig.named(name), **of_the_run) == config]
    if not sizes:
        numbers = ", ".join(f"{name} {value}" for name, value in vars(config).items() if name not in of_the_run)
        raise CheckpointError(f"[init_from] the model in {folder} has no published size: {numbers} (accepted: {', '.join(SIZES)})")
    there = options.tokenizer is not None or (folder / TOKENIZER).is_file()
    if not (there or options.plan or find_token_file(options.dataset) is not None):
        raise DataError(f"[init_from] no {TOKENIZER} in {folder} (accepted: with --tokenizer FILE)")
    try:
        fitting(Pythia(config, device=meta(), seed=None), read_folder(folder))
    except CheckpointError as error:
        raise CheckpointError(f"[init_from] {folder}: {error}") from None
    options.model, options.vocab_size = sizes[0], config.vocab_size
    if files.home(options.init_from).is_dir():
        options.init_from = os.path.abspath(folder)
    trained, flags = (config.pattern, config.block, config.window), (options.pattern, options.block_size, options.window)
    if config.pattern and not options.compare_dense and not (options.sparse and trained == flags):
        now = "the flags say otherwise" if options.sparse else "without --sparse it is dense"
        print(f"note: {folder} was trained with {config.pattern} attention; {now}", file=sys.stderr)


def default_vocabulary(options: argparse.Namespace) -> int:
    """The vocabulary of a new run that was given none: the tokenizer's, where one is given or lies beside a token file.

    raises: DataError, also for a data set that is not there, though a plan needs none: it may be a token file, whose tokenizer
    says how large the model is.
    """
    token_file = find_token_file(options.dataset)
    tokenizer = tokenizer_for(token_file, options.tokenizer)
    if tokenizer is not None:
        return load_tokenizer(tokenizer).size
    if token_file is None:
        check_dataset(options.dataset)
    return DEFAULT_VOCABULARY


def tokenizer_of_run(options: argparse.Namespace, weights: Path | None, saved: Path | None, state: dict | None) -> Path | None:
    """The tokenizer.json to use; None: train one on the text.

    weights: the folder of a model to begin with. saved, state: a checkpoint to continue from. That keeps the run's own tokenizer,
    since the file that was given at first may be gone or changed by now.
    """
    given, folder = options.tokenizer and files.home(options.tokenizer), weights or saved
    if folder is None or not (folder / TOKENIZER).is_file():
        return given
    if given is not None:
        kept = state and state["options"].get("tokenizer")  # an older one may be relative
        its_own = kept and options.tokenizer == os.path.abspath(files.home(str(kept)))
    else:
        token_file = find_token_file(options.dataset)  # else the text is the one that it was made of
        beside = tokenizer_for(token_file, None)
        gone = token_file is not None and (beside is None or not load_tokenizer(beside).extends(load_tokenizer(folder / TOKENIZER)))
        its_own = options.init_from or options.eval_only or gone
    return folder / TOKENIZER if its_own else given
