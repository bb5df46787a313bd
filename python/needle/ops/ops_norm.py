"""Normalization as one op."""

from __future__ import annotations

from functools import reduce

from .. import dtype as dt
from ..autograd import Tensor, TensorTuple, TensorTupleOp
from ..backend_ndarray import kernels
from ..backend_ndarray.ndarray import full as _full
from ..errors import check_number
from .ops_mathematic import broadcast_to, mean, sqrt
from .ops_shape import reshape
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
    reads_output = (1, 2)
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
    check_number("layer_norm", "eps", eps)
    return tuple_get_item(LayerNorm(eps)(x, weight, bias), 0)


class BatchNorm(TensorTupleOp):
    """(y, mean, var): y = (x - mean) / sqrt(var + eps) * weight + bias; statistics over the first axis, biased variance.

    x: (N, C); weight, bias: (C,). mean, var: (C,), float32 or wider: the squares of float16 values would overflow from 256 on.
    grad: with c = x - mean, r = 1 / sqrt(var + eps), s = weight r: dx = s dy + c (2 dvar - s r^2 sum(dy c)) / N
    + (dmean - s sum(dy)) / N.
    source: Ioffe & Szegedy 2015, arXiv:1502.03167.
    raises: ShapeError if weight or bias does not fit, or N is 0.
    """

    autocast = "float32"
    makes_gradients = True
    reads_inputs = (0, 1)
    reads_output = (1, 2)
    accepts_missing_grads = True

    def __init__(self, eps: float = 1e-5):
        self.eps = eps

    @staticmethod
    def _dtype(*inputs) -> str:
        return reduce(dt.promote, [v.dtype for v in inputs])

    def compute(self, x, weight, bias):
        dtype = self._dtype(x, weight, bias)
        return kernels.batch_norm(*[a.astype(dtype, copy=False) for a in (x, weight, bias)], self.eps)

    def gradient(self, out_grad, node):
        inputs = node.inputs
        x, weight = (v.realize_cached_data() for v in inputs[:2])
        _, mu, var = node.realize_cached_data()
        dtype = self._dtype(*inputs)
        dy, dmu, dvar = (g if g is None else g.realize_cached_data() for g in out_grad)
        dy = _full(x.shape, 0, dtype, x.device) if dy is None else dy
        same = (dy, x.astype(dtype, copy=False), weight.astype(dtype, copy=False))
        grads = kernels.batch_norm_backward(*same, mu, var, self.eps)
        if dmu is not None:
            grads[0].add_in_place(dmu / len(x))
        if dvar is not None:
            grads[0].add_in_place((x.astype(mu.dtype, copy=False) - mu) * (dvar * 2 / len(x)))
        return tuple(Tensor.make_const(g.astype(v.dtype, copy=False)) for g, v in zip(grads, inputs))

    def reference(self, x, weight, bias):
        mu = mean(x, 0)
        centred = x - mu
        var = mean(centred * centred, 0)
        return centred * (weight / sqrt(var + self.eps)) + bias, mu, var


def batch_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> TensorTuple:
    """(y, mean, var): x (N, C) with mean 0 and variance 1 over the first axis, times weight (C,), plus bias (C,).

    mean, var: (C,), what x had. The variance is the biased one, and ``eps`` is added to it.
    raises: ShapeError if weight or bias does not fit, or N is 0.
    """
    check_number("batch_norm", "eps", eps)
    return BatchNorm(eps)(x, weight, bias)
