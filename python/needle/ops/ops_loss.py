"""Losses as one op."""

from __future__ import annotations

import math
from numbers import Real

from .. import dtype as dt
from ..autograd import Tensor, TensorTupleOp, check_tensors, is_grad_enabled
from ..backend_ndarray import kernels
from ..backward import ALL_ONES
from ..errors import DTypeError, ShapeError, as_whole, type_name
from .ops_logarithmic import logsoftmax
from .ops_mathematic import astype, matmul, summation
from .ops_shape import reshape
from .ops_tuple import tuple_get_item


def _check_ignored(op: str, ignore_index) -> None:
    """raises: DTypeError for what is no whole number: PyTorch has weights of classes here; ValueError for one of 65 bits."""
    whole = as_whole(ignore_index)
    if whole is None:
        raise DTypeError(f"[{op}] ignore_index is of type {type_name(ignore_index)} (accepted: a whole number)")
    if not -(1 << 63) <= whole < 1 << 63:
        raise ValueError(f"[{op}] ignore_index is {whole} (accepted: an int64)")


def _rows(op: str, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """x (..., D) as (N, D) and targets (...), or (N) already, as (N). raises: ShapeError, in the shapes that the user knows."""
    if not x.shape or targets.shape not in (x.shape[:-1], (math.prod(x.shape[:-1]),)):
        raise ShapeError(f"[{op}] rows are {x.shape}, targets {targets.shape} (accepted: (..., D), and whole numbers (...) or (N))")
    n = targets.size
    return x if x.ndim == 2 else reshape(x, (n, x.shape[-1])), targets if targets.ndim == 1 else reshape(targets, (n,))


def _reference_loss(logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    ids, dtype = targets.realize_cached_data(), dt.accumulator(logits.dtype)
    kept = ids != ignore_index
    weights = kept * (-1.0 / kernels.targets_that_count(ids, ignore_index, dtype))
    one_hot = kernels.one_hot(ids * kept, logits.shape[1], dtype) * weights.reshape((ids.size, 1))
    return summation(logsoftmax(astype(logits, dtype)) * Tensor.make_const(one_hot))


class CrossEntropy(TensorTupleOp):
    """(loss, lse): mean over rows of log(sum(exp(logits))) - logits[target].

    logits: (N, V) float; targets: (N), whole numbers; rows whose target is ignore_index do not count.
    loss: (1,), or () with numpy's semantics, float32 or wider; lse: (N, 2), in two parts.
    grad: (softmax(logits) - one_hot(targets)) / rows that count.
    raises: IndexError for a target outside 0..V-1; ShapeError.
    """

    reads_output = (1,)
    accepts_missing_grads = True

    def __init__(self, ignore_index: int):
        self.ignore_index = ignore_index

    def compute(self, logits, targets):
        losses, lse = kernels.cross_entropy(logits, targets, self.ignore_index)
        return losses.sum() / kernels.targets_that_count(targets, self.ignore_index, losses.dtype), lse

    def gradient(self, out_grad, node):
        logits, targets = (v.realize_cached_data() for v in node.inputs)
        _, lse = node.realize_cached_data()
        upstream = out_grad[0].realize_cached_data().astype(lse.dtype, copy=False)
        scale = upstream / kernels.targets_that_count(targets, self.ignore_index, lse.dtype)
        grad = kernels.cross_entropy_backward(logits, targets, lse, scale.broadcast_to(targets.shape), self.ignore_index)
        return Tensor.make_const(grad), None

    def reference(self, logits, targets):
        return _reference_loss(logits, targets, self.ignore_index)


def cross_entropy(logits: Tensor, targets: Tensor, ignore_index: int = kernels.IGNORE_INDEX) -> Tensor:
    """Mean cross entropy, in nats, shape (1,): logits (..., V), targets (...) of whole numbers, or (N) of them.

    Targets equal to ``ignore_index`` do not count; if none counts, the loss is 0.
    raises: ShapeError; DTypeError for logits that are no floats and for an ignore_index that is no whole number; IndexError for a
    target outside 0..V-1 or, on a CPU, a fraction (a GPU cuts it off).
    """
    check_tensors("cross_entropy", logits, targets)
    _check_ignored("cross_entropy", ignore_index)
    return tuple_get_item(CrossEntropy(ignore_index)(*_rows("cross_entropy", logits, targets)), 0)


class LinearCrossEntropy(TensorTupleOp):
    """(loss, dhidden, dweight): the cross entropy of hidden @ weight without its logits.

    hidden: (N, D); weight: (D, V); targets: (N). Logits exist for at most ``chunk_bytes`` at a time (or one row). The gradients
    are made in forward, from logits that are there anyway, so that each logit is computed once; they are float32 (or float64).
    train: for which of the first two inputs; the other's is left out.
    source: the idea of Wijmans et al. 2024, arXiv:2411.09009, and Hsu et al. 2024, arXiv:2410.10989.
    """

    autocast = "inside"
    reads_inputs = False
    accepts_missing_grads = True

    def __init__(
        self,
        ignore_index: int = kernels.IGNORE_INDEX,
        chunk_bytes: int = kernels.DEFAULT_CHUNK_BYTES,
        train: tuple[bool, bool] = (True, True),
    ):
        self.ignore_index, self.chunk_bytes, self.train = ignore_index, chunk_bytes, train
        self.reads_output = tuple(range(1, 1 + sum(train)))

    def compute(self, hidden, weight, targets):
        loss, *grads = kernels.linear_cross_entropy(
            hidden, weight, targets, self.ignore_index, self.train, self.chunk_bytes, self.compute_dtype
        )
        return (loss, *[g for g in grads if g is not None])

    def gradient(self, out_grad, node):
        _, *grads = node.realize_cached_data()
        upstream = out_grad[0].realize_cached_data()
        return self._in_place([g * upstream.astype(g.dtype, copy=False) for g in grads])

    def consuming_gradient(self, out_grad, node, output):
        _, *grads = output
        if out_grad[0]._source is not ALL_ONES:  # a loss is most often the root
            for g in grads:
                g.mul_in_place(out_grad[0].realize_cached_data())
        return self._in_place(grads)

    def _in_place(self, grads):
        """Each of those that there are in the place of its input."""
        left = iter(grads)
        return *[Tensor.make_const(next(left)) if wanted else None for wanted in self.train], None

    def reference(self, hidden, weight, targets):
        return _reference_loss(matmul(hidden, weight), targets, self.ignore_index)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int = kernels.IGNORE_INDEX,
    chunk_bytes: int = kernels.DEFAULT_CHUNK_BYTES,
) -> Tensor:
    """Mean cross entropy, in nats, shape (1,), of ``hidden @ weight``: hidden (..., D), weight (D, V), targets (...) or (N).

    At most max(chunk_bytes, one row) of logits exist at any time. Targets and ignore_index are those of ``cross_entropy``.
    raises: as it does; DTypeError also where hidden and weight differ in dtype, ShapeError for a chunk_bytes below 1.
    """
    check_tensors("linear_cross_entropy", hidden, weight, targets)
    _check_ignored("linear_cross_entropy", ignore_index)
    if not isinstance(chunk_bytes, Real) or not 1 <= chunk_bytes < math.inf:
        raise ShapeError(f"[linear_cross_entropy] chunk_bytes is {chunk_bytes!r} (accepted: a number of at least 1)")
    if weight.ndim != 2 or hidden.shape[-1:] != weight.shape[:1]:
        shapes = f"hidden is {hidden.shape}, weight {weight.shape}"
        raise ShapeError(f"[linear_cross_entropy] {shapes} (accepted: (..., D) and (D, V))")
    rows, columns = _rows("linear_cross_entropy", hidden, targets)
    train = (hidden.requires_grad, weight.requires_grad) if is_grad_enabled() else (False, False)
    return tuple_get_item(LinearCrossEntropy(ignore_index, int(chunk_bytes), train)(rows, weight, columns), 0)
