"""Elementwise ops, broadcasting, sums and matrix products.

All raise DTypeError for an input that is no Tensor, where a number is not said to be accepted; ShapeError for shapes that do not
broadcast, and axes that are not there or come twice; DeviceError for inputs on different devices.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import reduce
from numbers import Real
from typing import Any

import numpy as np

from .. import dtype as dt
from ..autograd import (
    NDArray,
    Op,
    Tensor,
    TensorOp,
    TensorTuple,
    TensorTupleOp,
    Value,
    array_api,
    check_tensors,
    is_grad_enabled,
    needs_gradient,
)
from ..backend_ndarray.ndarray import full as _full
from ..backend_ndarray.ndarray import matmul as _matmul
from ..backend_ndarray.ndarray import where as _where
from ..backend_ndarray.shapes import frozen, normalize_axes, reduced_shape
from ..backend_selection import Device
from ..errors import DTypeError, ShapeError, shown, type_name
from ._reads import _InputRead, _NoRead, _OutputRead, _Product
from .ops_shape import reshape, transpose


def unbroadcast(grad: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Sums ``grad`` over the axes along which ``shape`` was broadcast to it."""
    if grad.shape == shape:
        return grad
    extra = len(grad.shape) - len(shape)
    axes = tuple(range(extra)) + tuple(extra + i for i, n in enumerate(shape) if n == 1 and grad.shape[extra + i] != 1)
    return reshape(summation(grad, axes) if axes else grad, shape)


class BroadcastTo(_NoRead):
    """The array repeated along axes of length 1 and new leading axes."""

    def __init__(self, shape):
        self.shape = frozen(shape)

    def compute(self, a):
        return a.broadcast_to(self.shape)

    def gradient(self, out_grad, node):
        return unbroadcast(out_grad, node.inputs[0].shape)


def broadcast_to(a: Tensor, shape) -> Tensor:
    """a repeated to ``shape`` along axes of length 1 and new leading axes. raises: ShapeError if it does not fit."""
    return a if isinstance(a, Tensor) and isinstance(shape, tuple) and a.shape == shape else BroadcastTo(shape)(a)


def _shared(x: Tensor, share: NDArray) -> Tensor:
    """x * share, but 0 where share is 0 even if x is infinite there: what was not taken has no part in a slope like sqrt's at 0."""
    weight = Tensor.make_const(share)
    return where(weight, x * weight, 0)


class _OfScalar(TensorOp):
    """An op with a number as its other operand."""

    def __init__(self, scalar):
        if not isinstance(scalar, (int, float)) and (
            isinstance(scalar, (Tensor, NDArray, list, tuple))
            or np.size(scalar) != 1
            or np.asarray(scalar).dtype.kind not in "biufV"
        ):
            raise DTypeError(f"[{type(self).__name__}] the scalar is of type {type_name(scalar)} (accepted: one number)")
        self.scalar = scalar


class EWiseAdd(_NoRead):
    """a + b, broadcasting. called: what errors name; a - b is an addition, too."""

    called = "add"  # also of a subclass that has an __init__ of its own

    def __init__(self, called: str = "add"):
        self.called = called

    def compute(self, a, b):
        return a + b if self.called == "add" else a._binary(b, "ewise_add", "scalar_add", op=self.called)

    def gradient(self, out_grad, node):
        shape = out_grad.shape
        return tuple([out_grad if s == shape else unbroadcast(out_grad, s) for s in node.input_shapes])


_ADD = EWiseAdd()  # ops without parameters hold no state: one object serves every node


def add(a: Tensor, b: Tensor) -> Tensor:
    """a + b, elementwise; the two broadcast."""
    return _ADD(a, b)


class AddScalar(_OfScalar, _NoRead):
    """a + scalar; with ``subtracted``, whose negative an integer dtype may not have, a - subtracted; where it ``negates``,
    scalar - a.
    """

    subtracted: float | None = None
    negates = False

    @classmethod
    def of_difference(cls, subtracted: float) -> AddScalar:
        """The op that Tensor's a - subtracted is."""
        op = cls(-subtracted)
        op.subtracted = +subtracted  # of True 1, as of its negative -1
        return op

    @classmethod
    def of_negative(cls, scalar: float) -> AddScalar:
        """The op that Tensor's scalar - a is, for floats."""
        op = cls(scalar)
        op.negates = True
        return op

    def compute(self, a):
        if self.negates:
            return self.scalar - a
        return a + self.scalar if self.subtracted is None else a - self.subtracted

    def gradient(self, out_grad, node):
        return negate(out_grad) if self.negates else out_grad


def add_scalar(a: Tensor, scalar) -> Tensor:
    """a + scalar, elementwise."""
    return AddScalar(scalar)(a)


class EWiseMul(_Product):
    """a * b, broadcasting."""

    def compute(self, a, b):
        return a * b

    def gradient(self, out_grad, node):
        a, b = node.inputs
        grad_a = unbroadcast(out_grad * b, a.shape) if needs_gradient(a) else None
        return grad_a, unbroadcast(out_grad * a, b.shape) if needs_gradient(b) else None


_MULTIPLY = EWiseMul()


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """a * b, elementwise; the two broadcast."""
    return _MULTIPLY(a, b)


class MulScalar(_OfScalar, _NoRead):
    """a * scalar."""

    def compute(self, a):
        return a * self.scalar

    def gradient(self, out_grad, node):
        return out_grad * self.scalar


def mul_scalar(a: Tensor, scalar) -> Tensor:
    """a * scalar, elementwise."""
    return MulScalar(scalar)(a)


class EWisePow(_InputRead):
    """a ** b, broadcasting. grad: b a^(b-1), log(a) a^b."""

    autocast = "float32"

    def compute(self, a, b):
        return a**b

    def gradient(self, out_grad, node):
        a, b = node.inputs
        x, y = a.realize_cached_data(), b.realize_cached_data()
        grad_a = grad_b = None
        # Slopes with a factor 0 are 0: by a for b = 0, also where a^-1 is none; by b for a = 0 and b >= 0, where log(a) is.
        if needs_gradient(a):
            flat = (1 / x).isfinite().logical_not().logical_and(y == 0)
            shift = Tensor.make_const(flat.astype(dt.promote(out_grad.dtype, "int32")) - 1)  # b of uint8 has no b - 1 at 0
            grad_a = unbroadcast(out_grad * b * a ** (b + shift), a.shape)
        if needs_gradient(b):
            shift = Tensor.make_const((x == 0).logical_and(y >= 0).astype(a.dtype))
            grad_b = unbroadcast(out_grad * log(a + shift) * a**b, b.shape)
        return grad_a, grad_b


def power(a: Tensor, b: Tensor) -> Tensor:
    """a ** b, elementwise; the two broadcast. The gradient of b is NaN where a is negative. raises: ValueError for two of bool."""
    return EWisePow()(a, b)


class PowerScalar(_OfScalar, _InputRead):
    """a ** scalar."""

    autocast = "float32"

    def compute(self, a):
        return a**self.scalar

    def gradient(self, out_grad, node):
        if self.scalar == 0:  # the slope of a constant, also where a^-1 is infinite
            return out_grad * 0
        x = node.inputs[0]
        lower = x if self.scalar == 2 else power_scalar(x, self.scalar - 1)
        return out_grad * (lower * self.scalar)


def power_scalar(a: Tensor, scalar) -> Tensor:
    """a ** scalar, elementwise."""
    return PowerScalar(scalar)(a)


class EWiseDiv(_InputRead):
    """a / b, broadcasting; integers divide to floats."""

    reads_inputs = ((1,), (0, 1))

    def compute(self, a, b):
        return a / b

    def gradient(self, out_grad, node):
        a, b = node.inputs
        grad_a = unbroadcast(out_grad / b, a.shape) if needs_gradient(a) else None
        grad_b = unbroadcast(-(out_grad * (a / b / b)), b.shape) if needs_gradient(b) else None  # b * b may be outside the dtype
        return grad_a, grad_b


def divide(a: Tensor, b: Tensor) -> Tensor:
    """a / b, elementwise; the two broadcast. Integers divide to floats."""
    return EWiseDiv()(a, b)


class DivScalar(_OfScalar, _NoRead):
    """a / scalar."""

    def compute(self, a):
        return a / self.scalar

    def gradient(self, out_grad, node):
        return out_grad / self.scalar


def divide_scalar(a: Tensor, scalar) -> Tensor:
    """a / scalar, elementwise."""
    return DivScalar(scalar)(a)


class RDivScalar(_OfScalar):
    """scalar / a. grad: -y / a."""

    autocast = "float32"

    def compute(self, a):
        return self.scalar / a

    def gradient(self, out_grad, node):
        a = node.inputs[0]
        return -(out_grad / a) * node


class Negate(_NoRead):
    """-a. dtype: made of a in that dtype, in which there may be -a where that of a has none."""

    def __init__(self, dtype: str | None = None):
        self.dtype = dtype

    def compute(self, a):
        return -a if self.dtype is None else -a.astype(self.dtype, copy=False)

    def gradient(self, out_grad, node):
        return negate(out_grad)


def negate(a: Tensor) -> Tensor:
    """-a, elementwise."""
    return Negate()(a)


class Log(_InputRead):
    """Natural logarithm."""

    autocast = "float32"

    def compute(self, a):
        return a.log()

    def gradient(self, out_grad, node):
        return out_grad / node.inputs[0]


def log(a: Tensor) -> Tensor:
    """Natural logarithm, elementwise: -inf at 0, NaN below it."""
    return Log()(a)


class Exp(_OutputRead):
    """e ** a."""

    autocast = "float32"

    def compute(self, a):
        return a.exp()

    def gradient(self, out_grad, node):
        return out_grad * node


def exp(a: Tensor) -> Tensor:
    """e ** a, elementwise."""
    return Exp()(a)


class Sqrt(_OutputRead):
    """Square root. grad: dy / (2 y)."""

    def compute(self, a):
        return a.sqrt()

    def gradient(self, out_grad, node):
        return out_grad / (node * 2)


def sqrt(a: Tensor) -> Tensor:
    """Square root, elementwise: NaN below 0."""
    return Sqrt()(a)


class Sin(_InputRead):
    """Sine, of radians."""

    def compute(self, a):
        return a._float_unary("ewise_sin")

    def gradient(self, out_grad, node):
        return out_grad * cos(node.inputs[0])


def sin(a: Tensor) -> Tensor:
    """Sine, elementwise; a in radians."""
    return Sin()(a)


class Cos(_InputRead):
    """Cosine, of radians."""

    def compute(self, a):
        return a._float_unary("ewise_cos")

    def gradient(self, out_grad, node):
        return -(out_grad * sin(node.inputs[0]))


def cos(a: Tensor) -> Tensor:
    """Cosine, elementwise; a in radians."""
    return Cos()(a)


class Abs(_InputRead):
    """|a|; slope 0 at 0."""

    def compute(self, a):
        return abs(a)

    def gradient(self, out_grad, node):
        return out_grad * Tensor.make_const(node.inputs[0].realize_cached_data()._unary("ewise_sign"))


def absolute(a: Tensor) -> Tensor:
    """|a|, elementwise; its slope at 0 is 0."""
    return Abs()(a)


class _BackwardRow(_InputRead):
    """A gradient row of the op table as an op: (what forward saved, incoming gradient) -> outgoing gradient."""

    def __init__(self, row: str):
        self.row = row

    @property
    def name(self) -> str:
        return self.row

    def compute(self, saved, dy):
        return saved._binary(dy, f"ewise_{self.row}", f"scalar_{self.row}")


class ReLU(_OutputRead):
    """max(a, 0); slope 0 at 0, which the output shows as well."""

    def compute(self, a):
        return a._unary("ewise_relu")

    def gradient(self, out_grad, node):
        if is_grad_enabled():
            return where(Tensor.make_const((node.realize_cached_data() <= 0).logical_not()), out_grad, 0.0)  # NaN goes through
        return _BackwardRow("relu_backward")(node, out_grad)


def relu(a: Tensor) -> Tensor:
    """max(a, 0), elementwise; its slope at 0 is 0."""
    return ReLU()(a)


class Tanh(_OutputRead):
    """Hyperbolic tangent. grad: dy (1 - y^2)."""

    def compute(self, a):
        return a.tanh()

    def gradient(self, out_grad, node):
        if is_grad_enabled():
            return out_grad * (1 - node * node)
        return _BackwardRow("tanh_backward")(node, out_grad)


def tanh(a: Tensor) -> Tensor:
    """Hyperbolic tangent, elementwise."""
    return Tanh()(a)


class Sigmoid(_OutputRead):
    """1 / (1 + e^-a). grad: dy y (1 - y)."""

    def compute(self, a):
        return a._float_unary("ewise_sigmoid")

    def gradient(self, out_grad, node):
        if is_grad_enabled():
            return out_grad * node * (1 - node)
        return _BackwardRow("sigmoid_backward")(node, out_grad)


def sigmoid(a: Tensor) -> Tensor:
    """1 / (1 + e^-a), elementwise."""
    return Sigmoid()(a)


class SiLU(_InputRead):
    """a * sigmoid(a)."""

    recomputes_output = True

    def compute(self, a):
        return a._float_unary("ewise_silu")

    def gradient(self, out_grad, node):
        return _BackwardRow("silu_backward")(node.inputs[0], out_grad)

    @staticmethod
    def reference(a):
        return a * sigmoid(a)


def silu(a: Tensor) -> Tensor:
    """a * sigmoid(a), elementwise. source: Elfwing et al. 2018, arXiv:1702.03118."""
    return SiLU()(a)


class Erf(_InputRead):
    """The error function. grad: 2 / sqrt(pi) exp(-a^2)."""

    def compute(self, a):
        return a._float_unary("ewise_erf")

    def gradient(self, out_grad, node):
        a = node.inputs[0]
        return out_grad * exp(-(a * a)) * (2 / math.sqrt(math.pi))


def erf(a: Tensor) -> Tensor:
    """The error function, elementwise."""
    return Erf()(a)


class GELU(_InputRead):
    """Gaussian error linear unit: a Phi(a), or its tanh approximation.

    a: float. The output is recomputed for the gradient of what follows, not kept: it is cheap and as large as the input.
    source: Hendrycks & Gimpel 2016, arXiv:1606.08415.
    """

    recomputes_output = True

    def __init__(self, approximate: str = "none"):
        if approximate not in ("none", "tanh"):
            raise ValueError(f"[gelu] approximate is {shown(approximate)} (accepted: none, tanh)")
        self.row = "gelu_erf" if approximate == "none" else "gelu_tanh"

    def compute(self, a):
        return a._float_unary(f"ewise_{self.row}")

    def gradient(self, out_grad, node):
        return _BackwardRow(f"{self.row}_backward")(node.inputs[0], out_grad)

    def reference(self, a):
        if self.row == "gelu_erf":
            return a * 0.5 * (erf(a * math.sqrt(0.5)) + 1)
        return a * 0.5 * (tanh((a + a * a * a * 0.044715) * math.sqrt(2 / math.pi)) + 1)


def gelu(a: Tensor, approximate: str = "none") -> Tensor:
    """Gaussian error linear unit, elementwise; approximate: "none" (a Phi(a), by erf) or "tanh". raises: ValueError for another."""
    return GELU(approximate)(a)


class _Extremum(_InputRead):
    """One of two, elementwise, broadcasting: ``takes(a, b)`` tells where it is a. Equal ones share the gradient; both get it
    where one is NaN, so that none comes out clean.
    """

    takes: Callable[[NDArray, NDArray], NDArray]

    def gradient(self, out_grad, node):
        a, b = node.inputs
        x, y, dtype = a.realize_cached_data(), b.realize_cached_data(), out_grad.dtype
        rest = 1 - (x == y).astype(dtype) * 0.5
        return tuple(
            unbroadcast(_shared(out_grad, rest - other.astype(dtype)), shape)
            for other, shape in ((self.takes(y, x), a.shape), (self.takes(x, y), b.shape))
        )


class Maximum(_Extremum):
    """The larger of two."""

    takes = staticmethod(operator.gt)

    def compute(self, a, b):
        return a.maximum(b)


class Minimum(_Extremum):
    """The smaller of two."""

    takes = staticmethod(operator.lt)

    def compute(self, a, b):
        return a.minimum(b)


def _tensor_or_number(op: str, x: Tensor | float, dtype: str, device: Device) -> Tensor:
    """A number as a 0-d Tensor, which widens ``dtype`` as in ``+``; a Tensor as it is. raises: DTypeError for an array, and as
    ``dt.checked_number``.
    """
    if isinstance(x, Tensor):
        return x
    if math.prod(getattr(x, "shape", ())) != 1:
        raise DTypeError(f"[{op}] an input is of type {type_name(x)} (accepted: a Tensor, or a number)")
    dtype = dt.with_scalar(dtype, x, device.default_float)
    return Tensor.make_const(_full((), dt.checked_number(op, x, dtype), dtype, device))


def _extremum(op: _Extremum, a: Tensor | float, b: Tensor | float) -> Tensor:
    some: Any = a if isinstance(a, Tensor) else b
    check_tensors(op.name, some)
    return op(*[_tensor_or_number(op.name, x, some.dtype, some.device) for x in (a, b)])


def maximum(a: Tensor | float, b: Tensor | float) -> Tensor:
    """The larger of a and b, elementwise; the two broadcast, one may be a number. Equal ones get half of the gradient each.

    raises: DTypeError for two numbers; OverflowError for one outside the integer dtype of the other.
    """
    return _extremum(Maximum(), a, b)


def minimum(a: Tensor | float, b: Tensor | float) -> Tensor:
    """The smaller of a and b, elementwise; as ``maximum``."""
    return _extremum(Minimum(), a, b)


class Where(TensorOp):
    """condition ? a : b, broadcasting; the gradient goes to the one that was taken."""

    reads_inputs = (0,)
    reads_output = False

    def compute(self, condition, a, b):
        return _where(condition, a, b)

    def gradient(self, out_grad, node):
        condition, a, b = node.inputs
        zero = Tensor.make_const(_full((), 0, out_grad.dtype, out_grad.device))
        grad_a = unbroadcast(where(condition, out_grad, zero), a.shape) if needs_gradient(a) else None
        grad_b = unbroadcast(where(condition, zero, out_grad), b.shape) if needs_gradient(b) else None
        return None, grad_a, grad_b


def where(condition: Tensor, a: Tensor | float, b: Tensor | float) -> Tensor:
    """a where condition is not zero, else b; the three broadcast. A number widens the other as in ``+``; two are float32.

    raises: OverflowError for a number outside the integer dtype of the other.
    """
    if not isinstance(condition, Tensor):
        raise DTypeError(f"[where] condition is of type {type_name(condition)} (accepted: a Tensor)")
    device = condition.device
    dtype = next((x.dtype for x in (a, b) if isinstance(x, Tensor)), device.default_float)
    return Where()(condition, *[_tensor_or_number("where", x, dtype, device) for x in (a, b)])


class Clip(_InputRead):
    """The nearest value from low to high; either may be None."""

    def __init__(self, low: float | None, high: float | None):
        self.low, self.high = low, high

    def compute(self, a):
        a = a if self.low is None else a._method(self.low, "maximum", op="clip")
        return a if self.high is None else a._method(self.high, "minimum", op="clip")

    def gradient(self, out_grad, node):
        x = node.inputs[0].realize_cached_data()
        inside = [x >= self.low] if self.low is not None else []
        inside += [x <= self.high] if self.high is not None else []
        return _shared(out_grad, reduce(operator.mul, inside).astype(out_grad.dtype))


def clip(a: Tensor, min: float | None = None, max: float | None = None) -> Tensor:
    """The values below min and above max, one of which may be None, become these; their gradient is 0.

    raises: DTypeError for a bound that is no number; ValueError without any.
    """
    check_tensors("clip", a)
    if min is None and max is None:
        raise ValueError("[clip] neither min nor max is given (accepted: a number for one of them or both)")
    for name, bound in (("min", min), ("max", max)):
        if bound is not None and not isinstance(bound, Real):
            raise DTypeError(f"[clip] {name} is of type {type_name(bound)} (accepted: a number)")
    return Clip(min, max)(a)


class AsType(_NoRead):
    """The values in another dtype; the gradient comes back in the old one, 0 from floats cut off to integers or bools."""

    makes_gradients = True

    def __init__(self, dtype):
        self.dtype = dt.name_of(dtype)

    def compute(self, a):
        return a.astype(self.dtype)

    def gradient(self, out_grad, node):
        a = node.inputs[0]
        if dt.is_float(a.dtype) and not dt.is_float(self.dtype):
            return Tensor.make_const(_full(a.shape, 0, a.dtype, a.device))
        return AsType(a.dtype)(out_grad)


def astype(a: Tensor, dtype) -> Tensor:
    """The values in another dtype (``a`` itself if it has it); the gradient comes back in the old one."""
    return a if isinstance(a, Tensor) and a.dtype == dt.name_of(dtype) else AsType(dtype)(a)


class Summation(_NoRead):
    """Sum over one axis, several, or all (None): shape (1,) for all, () with numpy's semantics."""

    autocast = "float32"

    def __init__(self, axes=None, keepdims: bool = False):
        self.axes = frozen(axes)
        self.keepdims = keepdims

    def compute(self, a):
        return a.sum(axis=self.axes, keepdims=self.keepdims)

    def gradient(self, out_grad, node):
        shape = node.inputs[0].shape
        axes = normalize_axes(self.axes, len(shape), "summation")
        kept = reduced_shape(shape, axes, keepdims=True)
        return broadcast_to(reshape(out_grad, kept), shape)


def summation(a: Tensor, axes=None, keepdims: bool = False) -> Tensor:
    """Sum over ``axes``: an int, several, or None for all, which gives shape (1,).

    keepdims: leave these axes, with length 1; TypeError for what is neither True nor False.
    """
    return Summation(axes, keepdims)(a)


class Mean(Summation):
    """Arithmetic mean over one axis, several, or all (None); shapes as those of Summation."""

    def compute(self, a):
        return a.mean(axis=self.axes, keepdims=self.keepdims)

    def gradient(self, out_grad, node):
        shape = node.inputs[0].shape
        count = math.prod(shape[i] for i in normalize_axes(self.axes, len(shape), "mean"))
        return super().gradient(out_grad / count, node)


def mean(a: Tensor, axes=None, keepdims: bool = False) -> Tensor:
    """Arithmetic mean over ``axes``: an int, several, or None for all, which gives shape (1,). keepdims: as in ``summation``."""
    return Mean(axes, keepdims)(a)


class Max(TensorOp):
    """Maximum over axes; the gradient goes to the largest elements, shared among equals."""

    def __init__(self, axes=None, keepdims: bool = False):
        self.axes = frozen(axes)
        self.keepdims = keepdims

    def compute(self, a):
        return a.max(axis=self.axes, keepdims=self.keepdims)

    def gradient(self, out_grad, node):
        a = node.inputs[0]
        axes = normalize_axes(self.axes, a.ndim, "max")
        kept = reduced_shape(a.shape, axes, keepdims=True)
        y = node.realize_cached_data().reshape(kept)
        hit = (a.realize_cached_data() < y).logical_not()  # with NaN, which no comparison is true of, all elements
        hits = hit.sum(axis=axes or None, keepdims=True)  # a 0-d array has no axis to name
        dtype = out_grad.dtype if dt.is_float(out_grad.dtype) else a.device.default_float
        share = (1.0 / hits.astype(dt.accumulator(dtype))).astype(dtype, copy=False)  # float16 has no count beyond 65504
        share = Tensor.make_const(_where(y == y, share, math.nan))
        return where(Tensor.make_const(hit), broadcast_to(reshape(out_grad, kept) * share, a.shape), 0)


def max(a: Tensor, axes=None, keepdims: bool = False) -> Tensor:
    """Maximum over ``axes``: an int, several, or None for all, which gives shape (1,). NaN wins.

    keepdims: leave these axes, with length 1. Equal maxima share the gradient.
    raises: ShapeError for an axis that is not there or has no elements.
    """
    return Max(axes, keepdims)(a)


class MatMul(_Product):
    """(..., m, k) @ (..., k, n), leading axes broadcast; 1-D operands as in numpy."""

    autocast = "lower"
    makes_gradients = True

    def compute(self, a, b):
        return _matmul(a, b)

    def accumulate_gradient(self, out_grad, node, sums):
        a, b = node.inputs
        if a.ndim == 1 or b.ndim == 1:
            return self._vector_gradient(out_grad, a, b)
        grad_a = grad_b = None
        if needs_gradient(a):
            grad_a = unbroadcast(matmul(out_grad, transpose(b)), a.shape)
        if needs_gradient(b):
            if b.ndim == 2 and a.ndim > 2:  # one large product instead of a batch of them and a sum
                a, out_grad = _rows(a), _rows(out_grad)
            if b.ndim == 2 and sums[1] is not None:
                grad_b = _product_into(transpose(a).realize_cached_data(), out_grad.realize_cached_data(), sums[1])
            else:
                grad_b = unbroadcast(matmul(transpose(a), out_grad), b.shape)
        return grad_a, grad_b

    @staticmethod
    def _vector_gradient(out_grad, a, b):
        wide_a = reshape(a, (1,) + a.shape) if a.ndim == 1 else a
        wide_b = reshape(b, b.shape + (1,)) if b.ndim == 1 else b
        shape = out_grad.shape
        if b.ndim == 1:
            shape = shape + (1,)
        if a.ndim == 1:
            shape = shape[:-1] + (1,) + shape[-1:]
        wide = reshape(out_grad, shape)
        grad_a = grad_b = None
        if needs_gradient(a):
            grad_a = reshape(unbroadcast(matmul(wide, transpose(wide_b)), wide_a.shape), a.shape)
        if needs_gradient(b):
            grad_b = reshape(unbroadcast(matmul(transpose(wide_a), wide), wide_b.shape), b.shape)
        return grad_a, grad_b


_MATMUL = MatMul()


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Matrix product: (..., m, k) @ (..., k, n) -> (..., m, n), leading axes broadcast; 1-D as in numpy.

    Except in float64, subnormal numbers count as 0 in it where it is large. raises: ShapeError if the inner lengths differ.
    """
    return _MATMUL(a, b)


def _rows(x: Tensor) -> Tensor:
    """x (..., C) as (product of the rest, C)."""
    return reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))


def _array_rows(x: NDArray) -> NDArray:
    """``_rows`` of an array."""
    if x._contiguous and x.ndim == 2:
        return x
    return (x if x._contiguous else x.copy()).reshape((math.prod(x.shape[:-1]), x.shape[-1]))


def _product_into(a: NDArray, b: NDArray, out: NDArray | None) -> Tensor | None:
    """a @ b. If ``out`` is given and has the dtype of both, adds a @ b to it in place instead, and returns None."""
    if out is None or not out._dtype == a._dtype == b._dtype:
        return Tensor.make_const(_matmul(a, b))
    _matmul(a, b, out=out, accumulate=True)
    return None


class Linear(_InputRead):
    """x @ weight + bias in one op. x (..., K), weight (K, N), bias (N,) or (1, N) -> (..., N)."""

    autocast = "lower"
    makes_gradients = True
    reads_inputs = ((1,), (0,), ())

    def compute(self, x, weight, bias):
        if weight.ndim != 2 or bias.shape not in (weight.shape[1:], (1, *weight.shape[1:])):
            raise ShapeError(f"[linear] weight is {weight.shape}, bias is {bias.shape} (accepted: (in, out), (out,))")
        if x.ndim == 0 or x.shape[-1] != weight.shape[0]:
            raise ShapeError(f"[linear] x is {x.shape}, weight is {weight.shape} (accepted: (..., in), (in, out))")
        # The product is added to the bias, so that a 16-bit sum is rounded once.
        if not x._dtype == weight._dtype == bias._dtype:
            bias = bias.astype(dt.promote(x.dtype, weight.dtype))
        row = bias if bias.ndim <= x.ndim else bias.compact().reshape((bias.size,))
        return _matmul(x, weight, out=row.broadcast_to((*x.shape[:-1], bias.size)).copy(), accumulate=True)

    def accumulate_gradient(self, out_grad, node, sums):
        x, weight, bias = node.inputs  # on arrays: the ops would take as long as a small product
        dy = out_grad.realize_cached_data()
        rows = _array_rows(dy)
        grad_x = grad_w = grad_b = None
        if needs_gradient(x):
            grad_x = Tensor.make_const(_matmul(dy, weight.realize_cached_data().T))
        if needs_gradient(weight):
            grad_w = _product_into(_array_rows(x.realize_cached_data()).T, rows, sums[1])
        if needs_gradient(bias):
            grad_b = Tensor.make_const(rows.sum(0).reshape(bias.shape))
        return grad_x, grad_w, grad_b

    def gradient(self, out_grad, node):
        """As ``accumulate_gradient``, which is called where there is no graph to be made."""
        x, weight, bias = node.inputs
        rows = _rows(out_grad)
        grad_x = matmul(out_grad, transpose(weight)) if needs_gradient(x) else None
        grad_w = matmul(transpose(_rows(x)), rows) if needs_gradient(weight) else None
        return grad_x, grad_w, reshape(summation(rows, 0), bias.shape) if needs_gradient(bias) else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., in) @ weight (in, out), plus bias (out,) or (1, out) if there is one."""
    return matmul(x, weight) if bias is None else Linear()(x, weight, bias)
