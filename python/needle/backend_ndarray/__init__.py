"""NDArrays over swappable devices."""

from .ndarray import *  # noqa: F403
