"""Models that can be imported in a notebook."""

from .pythia import SIZES, Pythia, PythiaConfig

__all__ = ["SIZES", "Pythia", "PythiaConfig"]
