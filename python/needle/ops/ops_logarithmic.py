"""Logarithms of sums and softmaxes."""

from __future__ import annotations

import math

from ..autograd import NDArray, Tensor, TensorOp, check_tensors, is_grad_enabled
from ..backend_ndarray import kernels
from ..backend_ndarray.shapes import frozen, normalize_axes, normalize_axis, reduced_axes, reduced_shape
from .ops_mathematic import broadcast_to, exp, where
from .ops_shape import reshape, transpose


def _last(x: NDArray, axes: tuple[int, ...]) -> NDArray:
    """x with ``axes`` moved to the end and merged into one."""
    rest = [i for i in range(x.ndim) if i not in axes]
    moved = x.permute(rest + list(axes)).compact()
    return moved.reshape((*[x.shape[i] for i in rest], math.prod(x.shape[i] for i in axes)))


class LogSumExp(TensorOp):
    """log(sum(exp(a))) over axes (None: all), without overflow.

    grad: exp(a - y) dy. Result: the axes removed; shape (1,) for all, () with numpy's semantics.
    """

    autocast = "float32"

    def __init__(self, axes=None):
        self.axes = frozen(axes)

    def compute(self, Z):
        axes = reduced_axes(self.axes, Z.ndim, "logsumexp")
        shape = (1,) if self.axes is None and not Z.device.numpy_semantics else reduced_shape(Z.shape, axes)
        return kernels.logsumexp(_last(Z, axes)).reshape(shape)

    def gradient(self, out_grad, node):
        Z = node.inputs[0]
        axes = normalize_axes(self.axes, Z.ndim, "logsumexp")
        if not is_grad_enabled():
            array, order = Z.realize_cached_data(), [i for i in range(Z.ndim) if i not in axes] + list(axes)
            dx = kernels.logsumexp_backward(_last(array, axes), node.realize_cached_data(), out_grad.realize_cached_data())
            moved = dx.reshape([array.shape[i] for i in order])
            return Tensor.make_const(moved.permute([order.index(i) for i in range(Z.ndim)]))
        kept = reduced_shape(Z.shape, axes, keepdims=True)
        # Where all is -inf so is y, and the slope is 0 rather than exp(-inf + inf).
        lowest = Tensor.make_const(node.realize_cached_data() == -math.inf)
        y = where(lowest, 0, node)
        return broadcast_to(reshape(out_grad, kept), Z.shape) * exp(Z - broadcast_to(reshape(y, kept), Z.shape))


def logsumexp(a: Tensor, axes=None) -> Tensor:
    """log(sum(exp(a))), without overflow, over ``axes``: an int, several, or None for all, which gives shape (1,).

    raises: ShapeError for an axis that is not there, DTypeError for integers.
    """
    return LogSumExp(axes)(a)


class LogSoftmax(TensorOp):
    """log(softmax(a)) over the last axis. grad: dy - exp(y) sum(dy)."""

    autocast = "float32"
    reads_inputs = False

    def compute(self, Z):
        return kernels.log_softmax(Z)

    def gradient(self, out_grad, node):
        dx = kernels.log_softmax_backward(node.realize_cached_data(), out_grad.realize_cached_data())
        return Tensor.make_const(dx)

    @staticmethod
    def reference(Z):
        last = Z.ndim - 1
        largest = Z.realize_cached_data().max(last, keepdims=True)  # of large Z, what is left of Z - logsumexp(Z) has few digits
        Z = Z - Tensor.make_const(largest.broadcast_to(Z.shape))
        return Z - broadcast_to(reshape(logsumexp(Z, (last,)), Z.shape[:-1] + (1,)), Z.shape)


def logsoftmax(a: Tensor) -> Tensor:
    """log(softmax(a)) over the last axis. raises: DTypeError for integers."""
    return LogSoftmax()(a)


class Softmax(TensorOp):
    """y = softmax(x) over the last axis.

    x: (..., C) float. y: shape and dtype of x; accumulates in float32.
    grad: dx = y (dy - sum(dy y)).
    source: Milakov & Gimelshein 2018, arXiv:1805.02867.
    raises: DTypeError for integers, ShapeError for a 0-d x.
    """

    autocast = "float32"
    reads_inputs = False

    def compute(self, x):
        return kernels.softmax(x)

    def gradient(self, out_grad, node):
        return Tensor.make_const(kernels.softmax_backward(node.realize_cached_data(), out_grad.realize_cached_data()))

    @staticmethod
    def reference(x):
        return exp(LogSoftmax.reference(x))


def softmax(x: Tensor, axis: int = -1) -> Tensor:
    """exp(x) / sum(exp(x)) over ``axis``, in the shape and dtype of x. raises: DTypeError for integers, ShapeError for a 0-d x."""
    check_tensors("softmax", x)
    axis = normalize_axis(axis, x.ndim, "softmax")
    if axis == x.ndim - 1:
        return Softmax()(x)
    return transpose(Softmax()(transpose(x, (axis, -1))), (axis, -1))
