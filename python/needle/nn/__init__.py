"""Modules: layers and their containers."""

from .nn_basic import *  # noqa: F403
from .nn_basic import _child_modules, _unpack_params  # noqa: F401
from .nn_conv import *  # noqa: F403
from .nn_remat import *  # noqa: F403
from .nn_sequence import *  # noqa: F403
from .nn_sparse import *  # noqa: F403
from .nn_transformer import *  # noqa: F403
