"""needle: a small deep-learning framework that never leaks a graph.

``Tensor`` and its ``backward``; devices: ``cpu``, ``cuda``, ``cuda_sim``, ``cpu_numpy``, ``meta``; ``ops``: what can be computed
with Tensors (the names are here, too); ``init``: constants and random numbers; ``nn``: layers; ``optim``; ``data``; ``amp``: mixed
precision; ``remat``: activation checkpointing; ``memory``: accounts, plans and leaks; ``models``: Pythia; ``checkpoints``: files.
"""

import importlib
from typing import TYPE_CHECKING, Any

from . import backend_ndarray, backend_numpy, backend_selection
from . import ops
from .ops import *  # noqa: F403
from .autograd import Tensor, TensorTuple, enable_grad, from_dlpack, no_grad
from . import init
from .init import ones, ones_like, zeros, zeros_like
from . import amp, data, nn, optim
from . import memory
from .nn import remat
from .backend_selection import *  # noqa: F403

if TYPE_CHECKING:
    from . import checkpoints, models

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """``needle.models`` and ``needle.checkpoints`` are imported when first used: many programs build their own models."""
    if name in ("checkpoints", "models"):
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
