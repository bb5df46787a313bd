"""A trained model and its tokenizer, as generate.py and evaluate.py take them."""

from __future__ import annotations

import sys

from needle import files
from needle.checkpoints import CheckpointFolder
from needle.data.text_tokenizer import TextTokenizer
from needle.models import Pythia
from needle.models.pretrained import tokenizer_of

MODEL_HELP = "a run's folder, a checkpoint in it, a folder that transformers wrote, or a name on the Hub"


def load_model(source: str, device) -> tuple[Pythia, TextTokenizer]:
    """The newest checkpoint of a run's folder, or what ``Pythia.from_pretrained`` takes, with its tokenizer.

    raises: DataError or CheckpointError, in one line, if it cannot be used.
    """
    path = files.home(source)
    newest = CheckpointFolder(path).newest() if path.is_dir() else None
    found, problems = newest or (source, [])
    for problem in problems:
        print(f"note: {problem}; taking {found}", file=sys.stderr)
    return Pythia.from_pretrained(found, device=device), tokenizer_of(found)
