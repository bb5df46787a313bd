"""Data sets, transforms and loaders. Text for language models is in ``data.text``."""

from .data_basic import *  # noqa: F403
from .data_transforms import *  # noqa: F403
from .datasets import *  # noqa: F403
