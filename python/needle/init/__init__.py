"""Makers of Tensors: constants and random numbers."""

from .init_basic import *  # noqa: F403
from .init_initializers import *  # noqa: F403
