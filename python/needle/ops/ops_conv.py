"""Convolution, and dilation."""

from __future__ import annotations

import math
from collections.abc import Iterator

from .. import dtype as dt
from ..autograd import Tensor
from ..backend_ndarray.host_memory import WORKSPACE
from ..backend_ndarray.ndarray import NDArray
from ..backend_ndarray.ndarray import empty as _empty
from ..backend_ndarray.ndarray import full as _full
from ..backend_ndarray.ndarray import matmul as _matmul
from ..errors import ShapeError
from ._reads import _InputRead, _NoRead
from .ops_index import _Embed
from .ops_shape import flip, pad, reshape, transpose

_WINDOWS_BYTES = 4 << 20  # of windows are copied at a time: they stay in a processor's cache, and take this memory at most


def _windows(a: NDArray, K: int, L: int, stride: int, padding: int) -> Iterator[tuple[slice, NDArray]]:
    """The windows of K x L pixels of an image (N, H, W, C) as rows of a matrix (windows, K L C), some of them at a time.

    Gives which of the windows they are, and their matrix, in memory that the next ones are copied to. Of images of which one has
    too many, some lines of windows at a time; a line is never divided.
    """
    N, H, W, C = a.shape
    lines, cols = (H + 2 * padding - K) // stride + 1, (W + 2 * padding - L) // stride + 1
    if K == L == stride == 1 and not padding:  # each pixel is a window
        yield slice(0, N * H * W), a.compact().reshape((N * H * W, C))
        return
    most = _WINDOWS_BYTES // max(cols * K * L * C * dt.ROWS[a.dtype].itemsize, 1)  # lines
    images = min(max(most // lines, 1), N)
    lines_at_once = lines if images > 1 else min(max(most, 1), lines)
    copies = _empty((images, lines_at_once, cols, K, L, C), a.dtype, a.device)
    copies.category = WORKSPACE
    if padding:
        padded = _full((images, H + 2 * padding, W + 2 * padding, C), 0, a.dtype, a.device)
        padded.category = WORKSPACE
    for i in range(0, N, max(images, 1)):
        image = a[i : i + images]
        n = image.shape[0]
        if padding:
            padded[:n, padding : padding + H, padding : padding + W] = image
            image = padded
        else:
            image = image.compact()
        sn, sh, sw, sc = image.strides
        for first in range(0, lines, lines_at_once):
            m = min(lines_at_once, lines - first)
            views = image[:, first * stride :].as_strided((n, m, cols, K, L, C), (sn, sh * stride, sw * stride, sh, sw, sc))
            part = copies[:n, :m]
            part[:] = views
            start = (i * lines + first) * cols
            yield slice(start, start + n * m * cols), part.reshape((n * m * cols, K * L * C))


def _check_conv(a: NDArray, b: NDArray, padding: int) -> None:
    """raises: ShapeError for an image and a kernel that do not fit."""
    if a.ndim != 4 or b.ndim != 4 or a.shape[3] != b.shape[2]:
        raise ShapeError(f"[conv] image is {a.shape}, kernel is {b.shape} (accepted: (N, H, W, Cin), (K, L, Cin, Cout))")
    (H, W), (K, L) = (n + 2 * padding for n in a.shape[1:3]), b.shape[:2]
    if H < K or W < L:
        raise ShapeError(f"[conv] kernel {K} x {L} is larger than the padded image {H} x {W}")


class Conv(_InputRead):
    """2-D convolution as products of windows, copied some at a time (im2col), with the kernel.

    a: (N, H, W, Cin); b: (K, L, Cin, Cout); padding on both sides of H and W. Result: (N, H', W', Cout) with
    H' = (H + 2 padding - K) // stride + 1, W' likewise. raises: ShapeError for other ranks or unequal channels.
    """

    autocast = "lower"

    def __init__(self, stride: int = 1, padding: int = 0):
        if any(not hasattr(n, "__index__") or n < least for n, least in ((stride, 1), (padding, 0))):
            raise ShapeError(f"[conv] stride is {stride}, padding is {padding} (accepted: whole numbers, at least 1, at least 0)")
        self.stride = stride
        self.padding = padding

    def compute(self, a, b):
        _check_conv(a, b, self.padding)
        dtype = dt.promote(a.dtype, b.dtype)
        a, b = a.astype(dtype, copy=False), b.astype(dtype, copy=False)
        (N, H, W, C), (K, L, _, O), s, p = a.shape, b.shape, self.stride, self.padding  # noqa: E741
        kernel = b.compact().reshape((K * L * C, O))
        out = _empty((N, (H + 2 * p - K) // s + 1, (W + 2 * p - L) // s + 1, O), dtype, a.device)
        rows = out.reshape((math.prod(out.shape[:3]), O))
        for which, windows in _windows(a, K, L, s, p):
            _matmul(windows, kernel, out=rows[which])
        return out

    def gradient(self, out_grad, node):
        a, b = node.inputs
        grad_a = _image_gradient(a.shape, b, out_grad, self.stride, self.padding) if a.requires_grad else None
        grad_b = _KernelGradient(b.shape[:2], self.stride, self.padding)(a, out_grad) if b.requires_grad else None
        return grad_a, grad_b


def _image_gradient(shape: tuple[int, ...], b: Tensor, out_grad: Tensor, s: int, p: int) -> Tensor:
    """The gradient of the image, of that ``shape``, in a convolution with kernel ``b``."""
    (H, W), (K, L) = shape[1:3], b.shape[:2]
    # With the s x s pixels of a block as the channels of one, the stride is 1; the kernel has as many blocks.
    K_blocks, L_blocks = -(-K // s), -(-L // s)
    kernel = _blocks(_span(b, 0, (0, K_blocks * s), (0, L_blocks * s)), 0, s)
    turned = transpose(flip(kernel, (0, 1)), (2, 3))
    # Of the padded image those blocks in which pixels of it are, each from the gradients of all windows that it is in.
    first, rows, cols = p // s, -(-(p + H) // s), -(-(p + W) // s)
    grad = conv(_span(out_grad, 1, (first - K_blocks + 1, rows), (first - L_blocks + 1, cols)), turned, 1, 0)
    return _span(_pixels(grad, 1, s), 1, (p % s, p % s + H), (p % s, p % s + W))


class _KernelGradient(_InputRead):
    """The gradient of a convolution's kernel, (K, L, Cin, Cout): each window times its gradient, summed over all windows.

    a: the image (N, H, W, Cin); dy: (N, H', W', Cout). Linear in both, so that its own gradients are convolutions.
    """

    def __init__(self, size: tuple[int, ...], stride: int, padding: int):
        self.size, self.stride, self.padding = size, stride, padding

    def compute(self, a, dy):
        (K, L), C, O = self.size, a.shape[3], dy.shape[3]  # noqa: E741
        dtype = dt.promote(a.dtype, dy.dtype)
        out = _full((K * L * C, O), 0, dt.accumulator(dtype), a.device)  # also of 16-bit floats: it is a sum of several products
        dy = dy.compact().reshape((math.prod(dy.shape[:3]), O))
        for which, windows in _windows(a, K, L, self.stride, self.padding):
            _matmul(windows.T, dy[which], out=out, accumulate=True)
        return out.astype(dtype, copy=False).reshape((K, L, C, O))

    def gradient(self, out_grad, node):
        a, dy = node.inputs
        grad_a = _image_gradient(a.shape, out_grad, dy, self.stride, self.padding) if a.requires_grad else None
        grad_dy = conv(a, out_grad, self.stride, self.padding) if dy.requires_grad else None
        return grad_a, grad_dy


def _span(x: Tensor, axis: int, rows: tuple[int, int], cols: tuple[int, int]) -> Tensor:
    """x from rows[0] to rows[1] along ``axis`` and from cols[0] to cols[1] along the next one, with zeros outside of x."""
    widths, cut = [(0, 0)] * x.ndim, [slice(None)] * x.ndim
    for i, (start, stop) in enumerate((rows, cols), axis):
        widths[i] = max(-start, 0), max(stop - x.shape[i], 0)
        cut[i] = slice(max(start, 0), max(start, 0) + stop - start)
    if widths != [(0, 0)] * x.ndim:
        x = pad(x, widths)
    wanted = [len(range(*part.indices(n))) for part, n in zip(cut, x.shape)]
    return x if wanted == list(x.shape) else x[tuple(cut)]


def _blocks(x: Tensor, axis: int, s: int) -> Tensor:
    """Space to depth: (.., R s, Q s, C, ..) -> (.., R, Q, s s C, ..), the first of these axes being ``axis``."""
    if s == 1:
        return x
    before, (h, w, c), after = x.shape[:axis], x.shape[axis : axis + 3], x.shape[axis + 3 :]
    x = reshape(x, (*before, h // s, s, w // s, s, c, *after))
    return reshape(transpose(x, (axis + 1, axis + 2)), (*before, h // s, w // s, s * s * c, *after))


def _pixels(x: Tensor, axis: int, s: int) -> Tensor:
    """Depth to space: undoes ``_blocks``."""
    if s == 1:
        return x
    before, (h, w, c), after = x.shape[:axis], x.shape[axis : axis + 3], x.shape[axis + 3 :]
    x = reshape(x, (*before, h, w, s, s, c // (s * s), *after))
    return reshape(transpose(x, (axis + 1, axis + 2)), (*before, h * s, w * s, c // (s * s), *after))


def conv(a: Tensor, b: Tensor, stride: int = 1, padding: int = 1) -> Tensor:
    """2-D convolution: a (N, H, W, Cin), b (K, L, Cin, Cout) -> (N, H', W', Cout), H' = (H + 2 padding - K) // stride + 1.

    padding: zeros on each side of H and W; the default is the course's. raises: ShapeError.
    """
    return Conv(stride, padding)(a, b)


class _Dilation(_NoRead):
    """What Dilate and UnDilate share: the axes, and how many elements are put in or left out."""

    def __init__(self, axes, dilation: int):
        self.axes = (axes,) if isinstance(axes, int) else tuple(axes)
        self.dilation = dilation
        if not hasattr(dilation, "__index__") or dilation < 0:
            raise ShapeError(f"[{self.name.lower()}] dilation is {dilation} (accepted: a whole number of at least 0)")

    def _every(self, ndim: int) -> tuple[slice, ...]:
        """The index of the original elements in a dilated array."""
        here = [i in self.axes or i - ndim in self.axes for i in range(ndim)]
        return tuple(slice(None, None, self.dilation + 1 if dilated else None) for dilated in here)


class Dilate(_Dilation):
    """``dilation`` zeros after every element along ``axes``; axes the array does not have are ignored."""

    def compute(self, a):
        every = self._every(a.ndim)
        out = _full([n * (part.step or 1) for n, part in zip(a.shape, every)], 0, a.dtype, a.device)
        out[every] = a
        return out

    def gradient(self, out_grad, node):
        return undilate(out_grad, self.axes, self.dilation)


def dilate(a: Tensor, axes, dilation: int) -> Tensor:
    """``dilation`` zeros after every element along ``axes``; axes that a does not have are ignored. raises: ShapeError."""
    return Dilate(axes, dilation)(a)


class UnDilate(_Dilation):
    """Every (dilation + 1)-th element along ``axes``: undoes dilate."""

    def compute(self, a):
        return a[self._every(a.ndim)].compact()

    def gradient(self, out_grad, node):
        shape = node.inputs[0].shape  # of lengths that need be no multiples of dilation + 1
        return _Embed(shape, self._every(len(shape)))(out_grad)


def undilate(a: Tensor, axes, dilation: int) -> Tensor:
    """Every (dilation + 1)-th element along ``axes``, from the first on: undoes dilate. raises: ShapeError."""
    return UnDilate(axes, dilation)(a)
