"""Recurrent networks and embeddings. X is (positions, batch, features)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .. import init, ops
from ..autograd import Tensor, check_tensors
from ..errors import ShapeError, check_count, check_flag, type_name
from .nn_basic import Module, Parameter


class Sigmoid(Module):
    """1 / (1 + e^-x), elementwise."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.sigmoid(x)


class _Cell(Module):
    """What the cells share: W_ih (input, gates * hidden), W_hh, and two biases, all U(+-1 / sqrt(hidden)), drawn in this order."""

    gates = 1

    def __init__(self, input_size, hidden_size, bias, device, dtype):
        super().__init__()
        check_flag(type(self).__name__, "bias", bias)  # PyTorch's RNN has the nonlinearity in this place
        self.input_size = input_size = check_count(type(self).__name__, "input_size", input_size, 0)
        self.hidden_size = hidden_size = check_count(type(self).__name__, "hidden_size", hidden_size)
        bound = 1 / math.sqrt(hidden_size)
        kwargs = {"low": -bound, "high": bound, "device": device, "dtype": dtype}
        width = self.gates * hidden_size
        self.W_ih = Parameter(init.rand(input_size, width, **kwargs))
        self.W_hh = Parameter(init.rand(hidden_size, width, **kwargs))
        self.bias_ih = Parameter(init.rand(width, **kwargs)) if bias else None
        self.bias_hh = Parameter(init.rand(width, **kwargs)) if bias else None

    def _zero_state(self, X: Tensor) -> Tensor:
        return init.zeros(X.shape[0], self.hidden_size, device=X.device, dtype=X.dtype)

    def _check(self, X: Tensor, *states: Tensor) -> None:
        """raises: ShapeError unless X is (batch, input) and each state (batch, hidden); another could broadcast."""
        op = type(self).__name__
        check_tensors(op, X, *states)
        if X.ndim != 2 or X.shape[1] != self.input_size:
            raise ShapeError(f"[{op}] X is {X.shape} (accepted: (batch, {self.input_size}))")
        for state in states:
            if state.shape != (X.shape[0], self.hidden_size):
                raise ShapeError(f"[{op}] a state is {state.shape} (accepted: {(X.shape[0], self.hidden_size)})")

    def _of_input(self, X: Tensor) -> Tensor:
        """What X (..., batch, input) gives to the gates: (..., batch, gates * hidden)."""
        out, bias = X @ self.W_ih, self._bias()
        return out if bias is None else out + bias

    def _bias(self) -> Tensor | None:
        """(gates * hidden,): the sum of those that there are."""
        if self.bias_ih is None or self.bias_hh is None:
            return self.bias_hh if self.bias_ih is None else self.bias_ih
        return self.bias_ih + self.bias_hh


class RNNCell(_Cell):
    """h' = tanh or relu(x W_ih + b_ih + h W_hh + b_hh): x (batch, input), h (batch, hidden; default zeros) -> (batch, hidden).

    raises: ValueError for another nonlinearity.
    """

    def __init__(self, input_size, hidden_size, bias=True, nonlinearity="tanh", device=None, dtype="float32"):
        if str(nonlinearity) not in ("tanh", "relu"):  # an array, too, compares as text
            raise ValueError(f"[RNNCell] unknown nonlinearity: {nonlinearity} (accepted: tanh, relu)")
        super().__init__(input_size, hidden_size, bias, device, dtype)
        self.nonlinearity = nonlinearity

    def forward(self, X: Tensor, h: Tensor | None = None) -> Tensor:
        self._check(X, *([] if h is None else [h]))
        h = self._zero_state(X) if h is None else h
        return ops.rnn_cell(self._of_input(X) + h @ self.W_hh, self.nonlinearity)


def _check_sequence(op: str, X: Tensor, input_size: int, layers: int, hidden_size: int, states: Sequence[Tensor]) -> None:
    """raises: ShapeError unless X is (positions, batch, input), with a position, and each state (layers, batch, hidden)."""
    check_tensors(op, X, *states)
    if X.ndim != 3 or X.shape[2] != input_size or X.shape[0] == 0:
        raise ShapeError(f"[{op}] X is {X.shape} (accepted: (positions, batch, {input_size}), positions at least 1)")
    for state in states:
        if state.shape != (layers, X.shape[1], hidden_size):
            raise ShapeError(f"[{op}] a first state is {state.shape} (accepted: {(layers, X.shape[1], hidden_size)})")


def _input_sizes(op: str, input_size: int, hidden_size: int, num_layers: int) -> list[int]:
    """What comes into the cell of each layer. raises: ShapeError for a num_layers below 1."""
    return [input_size] + [hidden_size] * (check_count(op, "num_layers", num_layers) - 1)


class RNN(Module):
    """Layers of RNNCell over a sequence: (X, h0) -> (output, last h), see ``forward``. bias, nonlinearity: as those of RNNCell.

    raises: ShapeError for sizes or a num_layers below 1, ValueError for another nonlinearity.
    """

    def __init__(self, input_size, hidden_size, num_layers=1, bias=True, nonlinearity="tanh", device=None, dtype="float32"):
        super().__init__()
        self.hidden_size, self.num_layers = hidden_size, num_layers
        sizes = _input_sizes("RNN", input_size, hidden_size, num_layers)
        self.rnn_cells = [RNNCell(n, hidden_size, bias, nonlinearity, device, dtype) for n in sizes]

    def forward(self, X: Tensor, h0: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """X (positions, batch, input), h0 (layers, batch, hidden), default zeros -> output (positions, batch, hidden), last h of
        each layer (layers, batch, hidden). raises: ShapeError for other shapes, or no positions.
        """
        first = self.rnn_cells[0]
        _check_sequence("RNN", X, first.input_size, self.num_layers, self.hidden_size, [] if h0 is None else [h0])
        zeros = init.zeros(X.shape[1], self.hidden_size, device=X.device, dtype=X.dtype)
        states = [zeros] * self.num_layers if h0 is None else list(ops.split(h0, 0))
        last_h = []
        for cell, h in zip(self.rnn_cells, states):
            X = ops.rnn(X, h, cell.W_ih, cell.W_hh, cell._bias(), cell.nonlinearity)
            last_h.append(X[-1])
        return X, ops.stack(last_h, 0)


def _check_pair(op: str, h: object) -> None:
    """raises: ShapeError unless the first state is None or a pair: a Tensor would be taken apart along its first axis."""
    if h is not None and not (isinstance(h, (tuple, list)) and len(h) == 2):
        got = f"{len(h)} of them" if isinstance(h, (tuple, list)) else f"of type {type_name(h)}"
        raise ShapeError(f"[{op}] the first state is {got} (accepted: a pair of Tensors, (h, c))")


class LSTMCell(_Cell):
    """i, f, g, o = x W_ih + b_ih + h W_hh + b_hh; c' = sig(f) c + sig(i) tanh(g); h' = sig(o) tanh(c').

    x: (batch, input); (h, c): (batch, hidden) each, default zeros. Gives (h', c'). source: Hochreiter & Schmidhuber 1997.
    """

    gates = 4

    def __init__(self, input_size, hidden_size, bias=True, device=None, dtype="float32"):
        super().__init__(input_size, hidden_size, bias, device, dtype)

    def forward(self, X: Tensor, h: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        _check_pair("LSTMCell", h)
        self._check(X, *(h or ()))
        h0, c0 = (self._zero_state(X), self._zero_state(X)) if h is None else h
        return ops.lstm_cell(self._of_input(X) + h0 @ self.W_hh, c0)


class LSTM(Module):
    """Layers of LSTMCell over a sequence: (X, (h0, c0)) -> (output, (last h, last c)), see ``forward``. raises: as RNN."""

    def __init__(self, input_size, hidden_size, num_layers=1, bias=True, device=None, dtype="float32"):
        super().__init__()
        self.hidden_size, self.num_layers = hidden_size, num_layers
        sizes = _input_sizes("LSTM", input_size, hidden_size, num_layers)
        self.lstm_cells = [LSTMCell(n, hidden_size, bias, device, dtype) for n in sizes]

    def forward(self, X: Tensor, h: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """X (positions, batch, input), (h0, c0) each (layers, batch, hidden), default zeros -> output (positions, batch, hidden),
        and the last h and c of each layer (layers, batch, hidden). raises: ShapeError for other shapes, or no positions.
        """
        first = self.lstm_cells[0]
        _check_pair("LSTM", h)
        _check_sequence("LSTM", X, first.input_size, self.num_layers, self.hidden_size, h or ())
        if h is None:
            zeros = init.zeros(X.shape[1], self.hidden_size, device=X.device, dtype=X.dtype)
            states: list = [(zeros, zeros)] * self.num_layers
        else:
            h_first, c_first = h
            states = list(zip(ops.split(h_first, 0), ops.split(c_first, 0)))
        last_h, last_c = [], []
        for cell, (h0, c0) in zip(self.lstm_cells, states):
            X, c = ops.lstm(X, h0, c0, cell.W_ih, cell.W_hh, cell._bias())
            last_h.append(X[-1])
            last_c.append(c)
        return X, (ops.stack(last_h, 0), ops.stack(last_c, 0))


class Embedding(Module):
    """Rows of ``weight`` (num_embeddings, embedding_dim), normal, by id: x (...) of whole numbers -> (..., embedding_dim).

    raises, when called: as ``ops.embedding``.
    """

    def __init__(self, num_embeddings, embedding_dim, device=None, dtype="float32"):
        super().__init__()
        self.num_embeddings = check_count("Embedding", "num_embeddings", num_embeddings, 0)
        self.embedding_dim = check_count("Embedding", "embedding_dim", embedding_dim, 0)
        self.weight = Parameter(init.randn(num_embeddings, embedding_dim, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return ops.embedding(self.weight, x)
