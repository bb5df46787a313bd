"""Models that can be imported in a notebook."""

from . import pretrained
from .evaluation import TextScore, WordScore, score_endings, score_text
from .generation import GenerationConfig
from .published import load_published, published_state
from .pythia import SIZES, Pythia, PythiaConfig, size_name
from .training import check_blocks, checkpointed, layers_or_bytes, plannable, train_step

__all__ = [
    "SIZES", "GenerationConfig", "Pythia", "PythiaConfig", "TextScore", "WordScore", "check_blocks", "checkpointed",
    "layers_or_bytes", "load_published", "plannable", "pretrained", "published_state", "score_endings", "score_text", "size_name",
    "train_step",
]  # fmt: skip
