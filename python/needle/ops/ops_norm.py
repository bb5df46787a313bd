"""Normalization as one op."""

from __future__ import annotations

from ..autograd import Tensor, TensorTupleOp
from ..backend_ndarray import kernels
from .ops_mathematic import mean, sqrt
from .ops_shape import broadcast_to, reshape
from .ops_tuple import tuple_get_item


class LayerNorm(TensorTupleOp):
    """(y, mean, rstd): y = (x - mean) * rstd * weight + bias over the last axis, biased variance.

    x: (..., C); weight, bias: (C,). mean, rstd: (...), float32 or wider.
    grad: with n = (x - mean) rstd and g = dy weight: dx = rstd (g - mean(g) - n mean(g n)).
    source: Ba et al. 2016, arXiv:1607.06450.
    raises: ShapeError if weight or bias does not fit; DTypeError for integers.
    """

    autocast = "float32"
    makes_gradients = True
    reads_inputs = (0, 1)
    accepts_missing_grads = True

    def __init__(self, eps: float = 1e-5):
        self.eps = eps

    def compute(self, x, weight, bias):
        return kernels.layer_norm(x, weight, bias, self.eps)

    def gradient(self, out_grad, node):
        x, weight = (v.realize_cached_data() for v in node.inputs[:2])
        _, mu, rstd = node.realize_cached_data()
        grads = kernels.layer_norm_backward(out_grad[0].realize_cached_data(), x, weight, mu, rstd)
        return tuple(Tensor.make_const(g) for g in grads)

    def reference(self, x, weight, bias):
        last, kept = x.ndim - 1, x.shape[:-1] + (1,)
        centred = x - broadcast_to(reshape(mean(x, last), kept), x.shape)
        variance = reshape(mean(centred * centred, last), kept)
        return centred / broadcast_to(sqrt(variance + self.eps), x.shape) * weight + bias


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """x (..., C) with mean 0 and variance 1 over its last axis, times weight (C,), plus bias (C,).

    The variance is the biased one, and ``eps`` is added to it. raises: ShapeError if weight or bias does not fit, DTypeError.
    """
    return tuple_get_item(LayerNorm(eps)(x, weight, bias), 0)
