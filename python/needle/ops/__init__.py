"""Operations on Tensors: a class per op, a function that applies it."""

from .ops_attention import *  # noqa: F403
from .ops_blocksparse import *  # noqa: F403
from .ops_conv import *  # noqa: F403
from .ops_index import *  # noqa: F403
from .ops_logarithmic import *  # noqa: F403
from .ops_loss import *  # noqa: F403
from .ops_mathematic import *  # noqa: F403
from .ops_norm import *  # noqa: F403
from .ops_random import *  # noqa: F403
from .ops_recurrent import *  # noqa: F403
from .ops_shape import *  # noqa: F403
from .ops_tuple import *  # noqa: F403
