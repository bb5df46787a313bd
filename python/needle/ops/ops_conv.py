"""Convolution."""

from __future__ import annotations

from ..autograd import Tensor
from ..errors import ShapeError
from ._reads import _InputRead
from .ops_shape import dilate, flip, pad, permute, transpose


class Conv(_InputRead):
    """2-D convolution as a matrix product over windows (im2col by strides).

    a: (N, H, W, Cin); b: (K, L, Cin, Cout); padding on both sides of H and W. Result: (N, H', W', Cout) with
    H' = (H + 2 padding - K) // stride + 1, W' likewise. raises: ShapeError for other ranks or unequal channels.
    """

    autocast = "lower"

    def __init__(self, stride: int = 1, padding: int = 0):
        if stride < 1 or padding < 0:
            raise ShapeError(f"[conv] stride is {stride}, padding is {padding} (accepted: at least 1, at least 0)")
        self.stride = stride
        self.padding = padding

    def compute(self, a, b):
        if a.ndim != 4 or b.ndim != 4 or a.shape[3] != b.shape[2]:
            raise ShapeError(f"[conv] image is {a.shape}, kernel is {b.shape} (accepted: (N, H, W, Cin), (K, L, Cin, Cout))")
        p, s = self.padding, self.stride
        padded = a.pad(((0, 0), (p, p), (p, p), (0, 0))) if p else a.compact()
        N, H, W, C = padded.shape
        K, L, _, out_channels = b.shape
        if H < K or W < L:
            raise ShapeError(f"[conv] kernel {K} x {L} is larger than the padded image {H} x {W}")
        rows, cols = (H - K) // s + 1, (W - L) // s + 1
        sn, sh, sw, sc = padded.strides
        windows = padded.as_strided((N, rows, cols, K, L, C), (sn, sh * s, sw * s, sh, sw, sc)).compact()
        product = windows.reshape((N * rows * cols, K * L * C)) @ b.compact().reshape((K * L * C, out_channels))
        return product.reshape((N, rows, cols, out_channels))

    def gradient(self, out_grad, node):
        a, b = node.inputs
        K, L = b.shape[:2]
        if self.stride > 1:
            out_grad = dilate(out_grad, (1, 2), self.stride - 1)
        # What the stride left over at the far edge was not read: its gradient is zero, so the dilated gradient is cut to the
        # length a stride of 1 would have given.
        rows = a.shape[1] + 2 * self.padding - K + 1
        cols = a.shape[2] + 2 * self.padding - L + 1
        out_grad = _resized(out_grad, rows, cols)
        turned = transpose(flip(b, (0, 1)), (2, 3))
        around = pad(out_grad, ((0, 0), (K - 1, K - 1), (L - 1, L - 1), (0, 0))) if K > 1 or L > 1 else out_grad
        grad_a = _cut(conv(around, turned, 1, 0), self.padding, a.shape[1], a.shape[2])
        # dL/db[k, l, c, o] sums over images and positions: a convolution whose batch is c and whose channels are n.
        image = transpose(a, (0, 3))
        kernel = permute(out_grad, (1, 2, 0, 3))
        grad_b = permute(conv(image, kernel, 1, self.padding), (1, 2, 0, 3))
        return grad_a, grad_b


def _resized(x: Tensor, rows: int, cols: int) -> Tensor:
    """Axes 1 and 2 cut or filled with zeros at their end to rows and cols."""
    more = (max(rows - x.shape[1], 0), max(cols - x.shape[2], 0))
    if any(more):
        x = pad(x, ((0, 0), (0, more[0]), (0, more[1]), (0, 0)))
    return x[:, :rows, :cols] if x.shape[1:3] != (rows, cols) else x


def _cut(x: Tensor, padding: int, rows: int, cols: int) -> Tensor:
    return x[:, padding : padding + rows, padding : padding + cols] if padding else x


def conv(a: Tensor, b: Tensor, stride: int = 1, padding: int = 1) -> Tensor:
    """2-D convolution: a (N, H, W, Cin), b (K, L, Cin, Cout) -> (N, H', W', Cout), H' = (H + 2 padding - K) // stride + 1.

    padding: zeros on each side of H and W; the default is the course's. raises: ShapeError.
    """
    return Conv(stride, padding)(a, b)
