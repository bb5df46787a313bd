"""needle: a small deep-learning framework that never leaks a graph."""

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
