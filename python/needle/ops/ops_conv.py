"""Convolution, and dilation."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from .. import dtype as dt
from ..autograd import Tensor, needs_gradient
from ..backend_ndarray import kernels
from ..backend_ndarray.ndarray import NDArray
from ..backend_ndarray.ndarray import check_one_device as _check_one_device
from ..backend_ndarray.ndarray import full as _full
from ..backend_ndarray.shapes import frozen
from ..errors import ShapeError, as_whole, check_count
from ._reads import _InputRead, _NoRead, _Product
from .ops_index import _Embed
from .ops_mathematic import summation

_MOST = 2**31 - 1  # pixels of stride or padding


class _Axis(NamedTuple):
    """The windows along an axis of n pixels: ``windows`` of them, of ``size`` pixels each, their starts ``stride`` pixels apart.

    before: how many pixels ahead of the image the first one starts; negative where it starts inside.
    """

    n: int
    size: int
    stride: int
    before: int
    windows: int

    def cut(self) -> tuple[int, _Axis]:
        """The windows without the pixels at their ends that are outside of the image in all of them, and where those left begin."""
        first = max(self.before - (self.windows - 1) * self.stride, 0)
        size = max(min(self.size, self.n + self.before) - first, 0)
        return first, self._replace(size=size, before=self.before - first)


def _axes(image: tuple[int, ...], size: tuple[int, ...], stride: int, padding: int) -> list[_Axis]:
    """The windows of the pixels of a kernel in an image (N, H, W, C), along H and W."""
    return [_Axis(n, k, stride, padding, (n + 2 * padding - k) // stride + 1) for n, k in zip(image[1:3], size)]


def _convolve(a: NDArray, b: NDArray, rows: _Axis, cols: _Axis) -> NDArray:
    """Each window of the image a (N, H, W, C) times the kernel b (K, L, C, O): (N, rows.windows, cols.windows, O)."""
    dtype = dt.promote(a.dtype, b.dtype)
    (row, rows), (col, cols) = rows.cut(), cols.cut()
    kernel = b[row : row + rows.size, col : col + cols.size].astype(dtype, copy=False)
    if 0 in kernel.shape[:3] or 0 in (rows.windows, cols.windows):
        return _full((len(a), rows.windows, cols.windows, b.shape[3]), 0, dtype, a.device)
    return kernels.conv(a.astype(dtype, copy=False), kernel, rows, cols)


def _check_conv(a: NDArray, b: NDArray, padding: int) -> None:
    """raises: ShapeError for an image and a kernel that do not fit."""
    if a.ndim != 4 or b.ndim != 4 or a.shape[3] != b.shape[2]:
        raise ShapeError(f"[conv] image is {a.shape}, kernel is {b.shape} (accepted: (N, H, W, Cin), (K, L, Cin, Cout))")
    (H, W), (K, L) = (n + 2 * padding for n in a.shape[1:3]), b.shape[:2]
    if H < K or W < L:
        raise ShapeError(f"[conv] kernel {K} x {L} is larger than the padded image {H} x {W}")


class Conv(_InputRead):
    """2-D convolution: the product of each window of an image with the kernel, plus a bias where there is a third input.

    a: (N, H, W, Cin); b: (K, L, Cin, Cout); bias: (Cout,); padding on both sides of H and W. Result: (N, H', W', Cout) with
    H' = (H + 2 padding - K) // stride + 1, W' likewise. raises: ShapeError for other ranks or unequal channels.
    """

    autocast = "lower"
    reads_inputs = ((1,), (0,), ())

    def __init__(self, stride: int = 1, padding: int = 0):
        self.stride = check_count("conv", "stride", stride, most=_MOST)
        self.padding = check_count("conv", "padding", padding, 0, most=_MOST)

    def compute(self, a, b, *bias):
        _check_conv(a, b, self.padding)
        out = _convolve(a, b, *_axes(a.shape, b.shape[:2], self.stride, self.padding))
        for added in bias:
            _check_one_device("conv", a, added)
            if added.shape != out.shape[3:]:
                raise ShapeError(f"[conv] bias is {added.shape}, kernel is {b.shape} (accepted: (Cout,), (K, L, Cin, Cout))")
            out.add_in_place(added)
        return out

    def gradient(self, out_grad, node):
        a, b, *bias = node.inputs
        grad_a = _ImageGradient(a.shape[1:3], self.stride, self.padding)(out_grad, b) if needs_gradient(a) else None
        grad_b = _KernelGradient(b.shape[:2], self.stride, self.padding)(a, out_grad) if needs_gradient(b) else None
        return grad_a, grad_b, *[summation(out_grad, (0, 1, 2)) if needs_gradient(added) else None for added in bias]


class _ImageGradient(_Product):
    """The gradient of a convolution's image, (N, H, W, Cin): each pixel's from the gradients of all windows that it is in.

    dy: (N, H', W', Cout); b: the kernel (K, L, Cin, Cout). Pixels that are ``stride`` apart meet the same pixels of the kernel:
    their gradient is a convolution of dy with those in reverse order. Linear in both, so that its own gradients are convolutions.
    """

    def __init__(self, size: tuple[int, ...], stride: int, padding: int):
        self.size, self.stride, self.padding = size, stride, padding

    def _axis(self, n: int, k: int, windows: int, first: int) -> tuple[slice, _Axis]:
        """The pixels of an axis of n that meet the pixels first, first + stride .. of k, and their windows of dy."""
        s, p = self.stride, self.padding
        size = len(range(first, k, s))
        start, stop = -((first - p) // s), (p + n - 1 - first) // s + 1  # of the last window that a pixel is in
        return slice(start * s + first - p, None, s), _Axis(windows, size, 1, size - 1 - start, max(stop - start, 0))

    def compute(self, dy, b):
        (H, W), (K, L), s = self.size, b.shape[:2], self.stride
        b = b.permute((0, 1, 3, 2))
        dtype, shape = dt.promote(dy.dtype, b.dtype), (len(dy), H, W, b.shape[3])
        if s == 1:
            (_, rows), (_, cols) = self._axis(H, K, dy.shape[1], 0), self._axis(W, L, dy.shape[2], 0)
            return _convolve(dy, b.flip((0, 1)), rows, cols)
        axes = [
            [self._axis(n, k, windows, first) for first in range(min(s, k))]
            for n, k, windows in zip(self.size, (K, L), dy.shape[1:3])
        ]
        out = _full(shape, 0, dtype, dy.device)
        for (row, (lines, rows)), (col, (places, cols)) in itertools.product(*map(enumerate, axes)):
            if rows.windows and cols.windows:
                out[:, lines, places] = _convolve(dy, b[row::s, col::s].flip((0, 1)), rows, cols)
        return out

    def gradient(self, out_grad, node):
        dy, b = node.inputs
        grad_dy = conv(out_grad, b, self.stride, self.padding) if needs_gradient(dy) else None
        grad_b = _KernelGradient(b.shape[:2], self.stride, self.padding)(out_grad, dy) if needs_gradient(b) else None
        return grad_dy, grad_b


class _KernelGradient(_Product):
    """The gradient of a convolution's kernel, (K, L, Cin, Cout): each window times its gradient, summed over all windows.

    a: the image (N, H, W, Cin); dy: (N, H', W', Cout). Linear in both, so that its own gradients are convolutions.
    """

    def __init__(self, size: tuple[int, ...], stride: int, padding: int):
        self.size, self.stride, self.padding = size, stride, padding

    def compute(self, a, dy):
        dtype = dt.promote(a.dtype, dy.dtype)
        (row, rows), (col, cols) = (axis.cut() for axis in _axes(a.shape, self.size, self.stride, self.padding))
        inside = (slice(row, row + rows.size), slice(col, col + cols.size))
        met = rows.size * cols.size * a.shape[3] * dy.shape[3] > 0  # any pixel of the kernel, by the image's
        if met:
            a, dy = a.astype(dtype, copy=False), dy.astype(dtype, copy=False)
            part = kernels.conv_backward(a, dy, rows, cols).astype(dtype, copy=False)
            if (rows.size, cols.size) == tuple(self.size):
                return part
        whole = _full((*self.size, a.shape[3], dy.shape[3]), 0, dtype, a.device)
        if met:
            whole[inside] = part
        return whole

    def gradient(self, out_grad, node):
        a, dy = node.inputs
        grad_a = _ImageGradient(a.shape[1:3], self.stride, self.padding)(dy, out_grad) if needs_gradient(a) else None
        grad_dy = conv(a, out_grad, self.stride, self.padding) if needs_gradient(dy) else None
        return grad_a, grad_dy


def conv(a: Tensor, b: Tensor, stride: int = 1, padding: int = 1, bias: Tensor | None = None) -> Tensor:
    """2-D convolution: a (N, H, W, Cin), b (K, L, Cin, Cout) -> (N, H', W', Cout), H' = (H + 2 padding - K) // stride + 1.

    padding: zeros on each side of H and W; the default is the course's. bias: (Cout,), cast and added to each pixel.
    raises: ShapeError.
    """
    return Conv(stride, padding)(a, b, *([] if bias is None else [bias]))


class _Dilation(_NoRead):
    """What Dilate and UnDilate share: the axes, and how many elements are put in or left out."""

    def __init__(self, axes, dilation: int):
        kept = frozen(axes)
        self.axes = kept if isinstance(kept, tuple) else (kept,)
        if any(as_whole(axis) is None for axis in self.axes):
            raise ShapeError(f"[{self.name.lower()}] axes are {axes!r} (accepted: a whole number, or several)")
        self.dilation = check_count(self.name.lower(), "dilation", dilation, 0)

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
