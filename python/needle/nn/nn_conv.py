"""Convolution as a module."""

from __future__ import annotations

import math

from .. import init, ops
from ..autograd import Tensor, check_tensors
from ..errors import ShapeError, as_whole, check_count, check_flag
from .nn_basic import Module, Parameter


def _side(name: str, value, least: int = 1) -> int:
    """``value`` as one number: a tuple must hold the same number throughout. raises: ShapeError for anything else."""
    sides = {as_whole(side) for side in (value if isinstance(value, (tuple, list)) else [value])}
    side = sides.pop() if len(sides) == 1 else None
    if side is None or side < least:
        raise ShapeError(f"[Conv] {name} is {value!r} (accepted: a whole number of at least {least}, the same along both axes)")
    return side


class Conv(Module):
    """2-D convolution of (N, in, H, W) -> (N, out, H', W'), H' = (H + 2 padding - K) // stride + 1.

    weight: (K, K, in, out), Kaiming-uniform with fan-in in * K * K; bias: (out,), uniform +-1 / sqrt(in * K * K).
    kernel_size, stride: a number of at least 1, or a tuple of equal ones. padding: how many zeros are put on each side of H and W;
    the default, (K - 1) // 2, keeps H and W if K is odd and the stride is 1. raises: ShapeError for other values, TypeError for a
    bias that is neither True nor False.
    """

    def __init__(self, in_channels, out_channels, kernel_size, stride=1, bias=True, device=None, dtype="float32", padding=None):
        super().__init__()
        check_flag("Conv", "bias", bias)  # PyTorch has the padding in this place
        self.in_channels = in_channels = check_count("Conv", "in_channels", in_channels, 0)
        self.out_channels = out_channels = check_count("Conv", "out_channels", out_channels, 0)
        self.kernel_size, self.stride = _side("kernel_size", kernel_size), _side("stride", stride)
        self.padding = (self.kernel_size - 1) // 2 if padding is None else _side("padding", padding, 0)
        k, fan_in = self.kernel_size, in_channels * self.kernel_size**2
        shape = (k, k, in_channels, out_channels)
        self.weight = Parameter(init.kaiming_uniform(fan_in, out_channels * k * k, shape=shape, device=device, dtype=dtype))
        bound = 1 / math.sqrt(max(fan_in, 1))
        self.bias = None
        if bias:
            self.bias = Parameter(init.rand(out_channels, low=-bound, high=bound, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        check_tensors("Conv", x)
        if x.ndim != 4 or x.shape[1] != self.in_channels:
            raise ShapeError(f"[Conv] x is {x.shape} (accepted: (N, {self.in_channels}, H, W))")
        image = ops.permute(x, (0, 2, 3, 1))
        out = ops.conv(image, self.weight, self.stride, self.padding, self.bias)
        return ops.permute(out, (0, 3, 1, 2))
