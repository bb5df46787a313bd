"""What the gradient of an op reads, as base classes."""

from __future__ import annotations

from ..autograd import TensorOp


class _NoRead(TensorOp):
    """An op whose gradient needs only the incoming gradient."""

    reads_inputs = False
    reads_output = False


class _InputRead(TensorOp):
    """An op whose gradient reads its inputs, not its output."""

    reads_output = False


class _Product(_InputRead):
    """An op of two inputs, linear in each: the gradient of one reads the other."""

    reads_inputs = ((1,), (0,))


class _OutputRead(TensorOp):
    """An op whose gradient reads its output alone."""

    reads_inputs = False
