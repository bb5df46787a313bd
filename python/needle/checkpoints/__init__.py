"""What is kept on disk: tensors as safetensors, and folders of checkpoints that a run survives with. Nothing is pickled."""

from .tensors import read_folder, read_tensors, write_folder, write_tensors

__all__ = ["read_folder", "read_tensors", "write_folder", "write_tensors"]
