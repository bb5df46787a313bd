"""A trained model and its tokenizer, as the apps take them."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from needle import files
from needle.checkpoints import CheckpointFolder
from needle.data.text_tokenizer import TextTokenizer
from needle.data.token_files import find_token_file
from needle.errors import CheckpointError, DataError
from needle.models import SIZES, Pythia, PythiaConfig
from needle.models.pretrained import TOKENIZER, folder_of, read_config, tokenizer_of

MODEL_HELP = "a run's folder, a checkpoint in it, a folder that transformers wrote, or a name on the Hub"


def find_model(source: str) -> Path:
    """The folder with the model's files: of a run's folder that of the newest checkpoint. raises: DataError or CheckpointError."""
    path = files.home(source)
    newest = CheckpointFolder(path).newest() if path.is_dir() else None
    found, problems = newest or (source, [])
    for problem in problems:
        print(f"note: {problem}; taking {found}", file=sys.stderr)
    return folder_of(found)


def load_model(source: str, device) -> tuple[Pythia, TextTokenizer]:
    """The newest checkpoint of a run's folder, or what ``Pythia.from_pretrained`` takes, with its tokenizer.

    raises: DataError or CheckpointError, in one line, if it cannot be used.
    """
    found = find_model(source)
    return Pythia.from_pretrained(found, device=device), tokenizer_of(found)


def fit_options(options: argparse.Namespace, folder: Path) -> None:
    """Sets what the model in ``folder`` decides: its size, its vocabulary, and its tokenizer where none is given.

    raises: CheckpointError if it is of no published size; DataError if it has no tokenizer, and one is needed.
    """
    config = read_config(folder)
    of_the_run = {name: getattr(config, name) for name in ("vocab_size", "max_seq_len", "dropout", "pattern", "block", "window")}
    sizes = [name for name in SIZES if replace(PythiaConfig.named(name), **of_the_run) == config]
    if not sizes:
        raise CheckpointError(f"[init_from] the model in {folder} has no published size (accepted: {', '.join(SIZES)})")
    options.model, options.vocab_size = sizes[0], config.vocab_size
    if options.tokenizer is None and (folder / TOKENIZER).is_file():
        options.tokenizer = str(folder / TOKENIZER)
    if options.tokenizer is None and find_token_file(options.dataset) is None:
        raise DataError(f"[init_from] no {TOKENIZER} in {folder} (accepted: with --tokenizer FILE)")
    if config.pattern and not options.sparse:
        print(f"note: {folder} was trained with {config.pattern} attention; without --sparse it is dense", file=sys.stderr)
