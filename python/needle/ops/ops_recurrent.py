"""Recurrent layers over a whole sequence as one op."""

from __future__ import annotations

from functools import reduce

from .. import dtype as dt
from ..autograd import Tensor, TensorOp, TensorTupleOp, check_tensors, needs_gradient
from ..backend_ndarray import kernels
from ..backend_ndarray.ndarray import NDArray
from ..backend_ndarray.ndarray import full as _full
from ..backend_ndarray.ndarray import matmul as _matmul
from ..errors import ShapeError
from .ops_mathematic import astype, relu, sigmoid, tanh
from .ops_shape import reshape, split, stack
from .ops_tuple import tuple_get_item


def lstm_cell(gates: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """(h', c'), c' = sig(f) c + sig(i) tanh(g) and h' = sig(o) tanh(c'): gates (B, 4 H) has i, f, g and o beside one another.

    raises: ShapeError unless c is (B, H).
    """
    check_tensors("lstm_cell", gates, c)
    if c.ndim != 2 or gates.shape != (c.shape[0], 4 * c.shape[1]):
        raise ShapeError(f"[lstm_cell] gates are {gates.shape}, c is {c.shape} (accepted: (B, 4 H), (B, H))")
    i, f, g, o = split(reshape(gates, (c.shape[0], 4, c.shape[1])), 1)
    c = sigmoid(f) * c + sigmoid(i) * tanh(g)
    return sigmoid(o) * tanh(c), c


def _inputs(op: str, x: Tensor, w_ih: Tensor, w_hh: Tensor, bias: Tensor | None, *states: Tensor) -> list[Tensor]:
    """What a layer takes, of one dtype; zeros for no bias."""
    check_tensors(op, x, *states, w_ih, w_hh, *([] if bias is None else [bias]))
    if bias is None:
        bias = Tensor.make_const(_full(w_hh.shape[-1:], 0, w_hh.dtype, w_hh.device))
    inputs = (x, *states, w_ih, w_hh, bias)
    dtype = reduce(dt.promote, [t.dtype for t in inputs])
    return [astype(t, dtype) for t in inputs]


def _input_and_weight_gradients(gates: NDArray, x: NDArray, h: NDArray, y: NDArray, w_ih: NDArray, wanted: list[bool]):
    """[dx, dw_ih, dw_hh, dbias], None where not wanted, given the gradient of x w_ih + h w_hh + bias of each position, ``gates``
    (T, B, G H). h: the first state; y: that after each position.
    """
    T, B, width = gates.shape
    rows = gates.reshape((T * B, width))
    dx = dw_ih = dw_hh = dbias = None
    if wanted[0]:
        dx = _matmul(gates, w_ih.T)
    if wanted[1]:
        dw_ih = _matmul(x.compact().reshape((T * B, x.shape[2])).T, rows)
    if wanted[2]:
        dw_hh = _matmul(h.T, rows[:B])
        if T > 1:
            _matmul(y[: T - 1].reshape(((T - 1) * B, y.shape[2])).T, rows[B:], out=dw_hh, accumulate=True)
    if wanted[3]:
        dbias = rows.sum(0)
    return [dx, dw_ih, dw_hh, dbias]


def _check_nonlinearity(op: str, nonlinearity: str) -> None:
    if nonlinearity not in ("tanh", "relu"):
        raise ValueError(f"[{op}] unknown nonlinearity: {nonlinearity} (accepted: tanh, relu)")


def rnn_cell(sums: Tensor, nonlinearity: str = "tanh") -> Tensor:
    """h' = tanh or relu(sums), of sums = x w_ih + h w_hh + bias (B, H). raises: ValueError for another nonlinearity."""
    _check_nonlinearity("rnn_cell", nonlinearity)
    return tanh(sums) if nonlinearity == "tanh" else relu(sums)


class RNN(TensorOp):
    """y: ``rnn_cell`` at each position of x, of x w_ih + h w_hh + bias.

    The products with x, and those of the weights' gradients, are of all positions at once. source: Elman 1990.
    """

    autocast = "lower"
    makes_gradients = True
    reads_inputs = (0, 1, 2, 3)

    def __init__(self, nonlinearity: str):
        _check_nonlinearity("rnn", nonlinearity)
        self.nonlinearity = nonlinearity

    def compute(self, x, h, w_ih, w_hh, bias):
        return kernels.rnn(x, h, w_ih, w_hh, bias, self.nonlinearity)

    def gradient(self, out_grad, node):
        x, h, w_ih, w_hh = (v.realize_cached_data() for v in node.inputs[:4])
        y = node.realize_cached_data()
        dh, dsums = kernels.rnn_backward(out_grad.realize_cached_data(), y, w_hh, self.nonlinearity)
        wanted = [needs_gradient(v) for v in node.inputs]
        dx, *weights = _input_and_weight_gradients(dsums, x, h, y, w_ih, wanted[:1] + wanted[2:])
        return [None if g is None else Tensor.make_const(g) for g in (dx, dh, *weights)]

    def reference(self, x, h, w_ih, w_hh, bias):
        steps = []
        for x_t in split(x, 0):
            h = rnn_cell(x_t @ w_ih + h @ w_hh + bias, self.nonlinearity)
            steps.append(h)
        return stack(steps, 0)


def rnn(x: Tensor, h: Tensor, w_ih: Tensor, w_hh: Tensor, bias: Tensor | None = None, nonlinearity: str = "tanh") -> Tensor:
    """h' = tanh or relu(x w_ih + h w_hh + bias) of each position, (T, B, H): x (T, B, C), h (B, H), w_ih (C, H), w_hh (H, H),
    bias (H,).

    raises: ShapeError if they do not fit, ValueError for another nonlinearity.
    """
    return RNN(nonlinearity)(*_inputs("rnn", x, w_ih, w_hh, bias, h))


class LSTM(TensorTupleOp):
    """(y, last c, cells, gates): ``lstm_cell`` at each position of x, of the gates x w_ih + h w_hh + bias.

    The products with x, and those of the weights' gradients, are of all positions at once. cells and gates are for backward, which
    turns the gates into their gradients in place. source: Hochreiter & Schmidhuber 1997.
    """

    autocast = "lower"
    makes_gradients = True
    reads_inputs = (0, 1, 2, 3, 4)
    reads_output = (0, 2, 3)
    accepts_missing_grads = True

    def compute(self, x, h, c, w_ih, w_hh, bias):
        return kernels.lstm(x, h, c, w_ih, w_hh, bias)

    def gradient(self, out_grad, node):
        y, last, cells, gates = node.realize_cached_data()
        return self.consuming_gradient(out_grad, node, (y, last, cells, gates.copy()))

    def consuming_gradient(self, out_grad, node, output):
        y, _, cells, gates = output
        dy, dc = (None if g is None else g.realize_cached_data() for g in out_grad[:2])
        wanted = [needs_gradient(v) for v in node.inputs]
        x, h, c, w_ih, w_hh = (v.realize_cached_data() for v in node.inputs[:5])
        dh, dc = kernels.lstm_backward(dy, dc, c, w_hh, cells, gates)
        dx, *weights = _input_and_weight_gradients(gates, x, h, y, w_ih, wanted[:1] + wanted[3:])
        return [None if g is None else Tensor.make_const(g) for g in (dx, dh, dc, *weights)]

    def reference(self, x, h, c, w_ih, w_hh, bias):
        steps = []
        for x_t in split(x, 0):
            h, c = lstm_cell(x_t @ w_ih + h @ w_hh + bias, c)
            steps.append(h)
        return stack(steps, 0), c


def lstm(x: Tensor, h: Tensor, c: Tensor, w_ih: Tensor, w_hh: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(h of each position (T, B, H), c of the last): x (T, B, C), h and c (B, H), w_ih (C, 4 H), w_hh (H, 4 H), bias (4 H,).

    raises: ShapeError if they do not fit.
    """
    found = LSTM()(*_inputs("lstm", x, w_ih, w_hh, bias, h, c))
    return tuple_get_item(found, 0), tuple_get_item(found, 1)
