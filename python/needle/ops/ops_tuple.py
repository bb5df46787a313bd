"""Tuples of Tensors as values of the graph."""

from __future__ import annotations

import numpy as np

from ..autograd import Tensor, TensorTuple, TensorTupleOp
from ..errors import DTypeError, check_real, type_name
from ._reads import _NoRead


class MakeTensorTuple(TensorTupleOp):
    """Its inputs as a TensorTuple."""

    reads_inputs = False
    reads_output = False

    def compute(self, *args):
        return tuple(args)

    def gradient(self, out_grad, node):
        return tuple([out_grad[i] for i in range(len(out_grad))])


def make_tuple(*args: Tensor) -> TensorTuple:
    """Tensors as one value of the graph."""
    return MakeTensorTuple()(*args)


class TupleGetItem(_NoRead):
    """Item ``index`` of a TensorTuple. Shares the item's array."""

    takes_tuple = True

    def __init__(self, index: int):
        self.index = index

    def compute(self, a):
        return a[self.index]

    def gradient(self, out_grad, node):
        # backward adds out_grad to the item alone; this form, with zeros for the others, serves direct calls.
        items = node.inputs[0].tuple()
        return make_tuple(*[out_grad if i == self.index else item * 0 for i, item in enumerate(items)])


def tuple_get_item(value: TensorTuple, index: int) -> Tensor:
    """Item ``index``; an item of a tuple just made by make_tuple is that Tensor itself.

    raises: DTypeError for what is no TensorTuple, IndexError for an item that is not there.
    """
    if not isinstance(value, TensorTuple):
        raise DTypeError(f"[tuple_get_item] value is of type {type_name(value)} (accepted: a TensorTuple)")
    items = value.realize_cached_data()
    n = len(items)
    if not isinstance(index, (int, np.integer)) or not -n <= index < n:
        raise IndexError(f"[tuple_get_item] index {index} is out of range for {n} items")
    index = int(index) % n
    if value.op is None and not value.requires_grad:
        return Tensor.make_const(items[index])
    if isinstance(value.op, MakeTensorTuple):
        item = value.inputs[index]
        if item._data is None:  # its handle had gone, and the graph need not keep the array
            item._data = items[index]
        return item  # type: ignore[return-value]
    return TupleGetItem(index)(value)


class FusedAddScalars(TensorTupleOp):
    """(a + c0, a + c1)."""

    reads_inputs = False
    reads_output = False

    def __init__(self, c0: float, c1: float):
        check_real("fused_add_scalars", "c0", c0)
        check_real("fused_add_scalars", "c1", c1)
        self.c0, self.c1 = c0, c1

    def compute(self, a):
        return a + self.c0, a + self.c1

    def gradient(self, out_grad, node):
        return out_grad[0] + out_grad[1]


def fused_add_scalars(x: Tensor, c0: float, c1: float) -> TensorTuple:
    """(x + c0, x + c1)."""
    return FusedAddScalars(c0, c1)(x)
