"""Models that can be imported in a notebook."""

from .pythia import SIZES, Pythia, PythiaConfig, load_published, published_gradients, published_state

__all__ = ["SIZES", "Pythia", "PythiaConfig", "load_published", "published_gradients", "published_state"]
