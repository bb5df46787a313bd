"""Modules: layers and their containers."""

from .nn_basic import *  # noqa: F403
from .nn_sparse import *  # noqa: F403
from .nn_basic import _child_modules, _unpack_params  # noqa: F401
