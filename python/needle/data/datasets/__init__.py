"""The course's data sets."""

from .cifar10_dataset import *  # noqa: F403
from .mnist_dataset import *  # noqa: F403
from .ndarray_dataset import *  # noqa: F403
from .ptb_dataset import *  # noqa: F403
