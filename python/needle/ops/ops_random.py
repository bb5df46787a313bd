"""Random ops that can be computed again: the numbers depend on a seed and a counter alone."""

from __future__ import annotations

from ..autograd import Tensor
from ..backend_ndarray import kernels
from ..errors import check_count, check_number
from ._reads import _NoRead


class Dropout(_NoRead):
    """x / (1 - p) where a uniform number is at least p, else 0. grad: the same op on dy, with the same numbers.

    seed, offset: which numbers of the Philox stream; ceil(size / 4) counters are used.
    source: Srivastava et al. 2014; Salmon et al. 2011 for the stream.
    """

    def __init__(self, p: float, seed: int, offset: int):
        check_number("dropout", "p", p, most=1)
        self.p = p
        # PyTorch has ``training`` in the place of the seed: False would drop, by the same mask each time.
        self.seed = check_count("dropout", "seed", seed, 0, 2**64 - 1, ValueError)
        self.offset = check_count("dropout", "offset", offset, 0, 2**64 - 1, ValueError)

    def compute(self, x):
        return kernels.dropout(x, self.p, self.seed, self.offset)

    def gradient(self, out_grad, node):
        return Dropout(self.p, self.seed, self.offset)(out_grad)


def dropout(x: Tensor, p: float, seed: int, offset: int = 0) -> Tensor:
    """x / (1 - p) with probability 1 - p, else 0: what ``nn.SeededDropout`` calls.

    p: 0 to 1. seed, offset: the same ones give the same mask on every device; a call uses ceil(x.size / 4) offsets.
    raises: ValueError for another p, seed or offset, TypeError for a p that is no number, DTypeError for integers.
    """
    return Dropout(p, seed, offset)(x)
