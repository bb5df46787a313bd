"""What is kept on disk: tensors as safetensors, and folders of checkpoints that a run survives with. Nothing is pickled."""

from .folder import CheckpointFolder, verify
from .random_state import random_state, set_random_state
from .tensors import read_folder, read_tensors, write_folder, write_tensors

__all__ = [
    "CheckpointFolder", "random_state", "read_folder", "read_tensors", "set_random_state", "verify", "write_folder",
    "write_tensors",
]  # fmt: skip
