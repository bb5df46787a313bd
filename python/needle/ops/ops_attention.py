"""Attention over a block layout, and the rotary embedding in front of it."""

from __future__ import annotations

import math
from numbers import Real

import numpy as np

from ..autograd import Tensor, TensorTupleOp, check_tensors
from ..backend_ndarray import kernels
from ..backend_ndarray.block_layout import BlockLayout, dense_layout
from ..backend_ndarray.ndarray import NDArray
from ..backend_ndarray.ndarray import empty as _empty
from ..errors import DTypeError, ShapeError, check_flag, type_name
from ._reads import _NoRead
from .ops_logarithmic import softmax
from .ops_mathematic import broadcast_to, matmul, where
from .ops_shape import permute, transpose
from .ops_tuple import tuple_get_item


class Attention(TensorTupleOp):
    """(out, lse): softmax(scale q k^T + mask) v over the layout's elements; lse is the log-sum-exp of each row.

    q: (B, H, T, D); k, v: (B, H, S, D). out: (B, H, T, D); lse: (B, H, T), float32 or wider. No (T, S) array exists: forward keeps
    out and lse, backward recomputes the scores block by block. A row that sees nothing gives 0.
    source: Dao 2023, arXiv:2307.08691; block layouts: Child et al. 2019, arXiv:1904.10509.
    raises: ShapeError if the layout does not fit.
    """

    autocast = "lower"
    makes_gradients = True
    accepts_missing_grads = True

    def __init__(self, layout: BlockLayout, scale: float):
        self.layout, self.scale = layout, scale

    def compute(self, q, k, v):
        return kernels.attention(q, k, v, self.layout, self.scale)

    def gradient(self, out_grad, node):
        q, k, v = (x.realize_cached_data() for x in node.inputs)
        out, lse = node.realize_cached_data()
        grads = kernels.attention_backward(out_grad[0].realize_cached_data(), q, k, v, out, lse, self.layout, self.scale)
        return tuple(Tensor.make_const(g) for g in grads)

    def reference(self, q, k, v):
        _, H, T, _ = q.shape
        seen = self.layout.dense_mask(T, k.shape[2])
        if self.layout.heads > 1:
            seen = np.tile(seen, (H // self.layout.heads, 1, 1))
        mask = Tensor(seen, device=q.device, dtype="bool", requires_grad=False)
        scores = matmul(q, transpose(k)) * self.scale
        low = Tensor([-1e30], device=q.device, dtype=q.dtype, requires_grad=False)  # finite, or a row that sees nothing were NaN
        p = softmax(where(mask, scores, low))
        some = Tensor(seen.any(axis=-1, keepdims=True), device=q.device, dtype=q.dtype, requires_grad=False)
        return matmul(p * broadcast_to(some, p.shape), v)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout | None = None,
    causal: bool = True,
    scale: float | None = None,
) -> Tensor:
    """Scaled dot-product attention: q (B, H, T, D), k and v (B, H, S, D) -> (B, H, T, D).

    layout: which blocks take part, and whether they are causal. None: all blocks, up to the diagonal if ``causal``, where query t
    stands at position S - T + t. causal: ignored if there is a layout. scale: of q k^T, default 1 / sqrt(D).
    No (T, S) array is made. raises: ShapeError if shapes or the layout do not fit, and for a D above 256; DTypeError for dtypes
    that differ and for a scale that is no number: a Tensor would get no gradient; TypeError for a causal that is neither True nor
    False, as PyTorch's dropout in its place.
    """
    check_tensors("attention", q, k, v)
    check_flag("attention", "causal", causal)
    if scale is not None and (not isinstance(scale, Real) or isinstance(scale, bool)):
        raise DTypeError(f"[attention] scale is of type {type_name(scale)} (accepted: a number)")
    if q.ndim != 4 or k.ndim != 4:
        raise ShapeError(f"[attention] q is {q.shape}, k is {k.shape} (accepted: (batch, heads, positions, features))")
    if layout is None:
        layout = dense_layout(q.shape[2], k.shape[2], 64, causal, k.shape[2] - q.shape[2] if causal else 0)
    scale = 1.0 / math.sqrt(max(q.shape[3], 1)) if scale is None else scale
    return tuple_get_item(Attention(layout, scale)(q, k, v), 0)


class RotaryQKV(TensorTupleOp):
    """(q, k, v), each (B, H, T, D), from packed qkv (B, T, H, 3, D); q and k rotated by position in their first features.

    cos, sin: (>= T, rot / 2) arrays; feature i < rot/2 turns with feature i + rot/2, as in GPT-NeoX.
    grad: the inverse rotation, written into one packed array. source: Su et al. 2021, arXiv:2104.09864.
    """

    reads_inputs = False
    reads_output = False
    accepts_missing_grads = True

    def __init__(self, cos: NDArray, sin: NDArray):
        self.cos, self.sin = cos, sin

    def compute(self, qkv):
        if qkv.ndim != 5 or qkv.shape[3] != 3:
            raise ShapeError(f"[rotary_qkv] qkv is {qkv.shape} (accepted: (B, T, H, 3, D))")
        q, k, v = (_head_view(qkv, i) for i in range(3))
        return kernels.rotary(q, self.cos, self.sin), kernels.rotary(k, self.cos, self.sin), v.copy()

    def gradient(self, out_grad, node):
        shape = node.inputs[0].shape
        dtype, device = node.inputs[0].dtype, node.inputs[0].device
        packed = _empty(shape, dtype, device)
        for i, grad in enumerate(out_grad):
            target = _head_view(packed, i)
            if grad is None:
                target.fill(0)
            elif i < 2:
                kernels.rotary(grad.realize_cached_data(), self.cos, self.sin, inverse=True, out=target)
            else:
                target[:, :, :, :] = grad.realize_cached_data()
        return Tensor.make_const(packed)

    def reference(self, qkv):
        q, k, v = (permute(qkv[:, :, :, i], (0, 2, 1, 3)) for i in range(3))
        return Rotary(self.cos, self.sin)(q), Rotary(self.cos, self.sin)(k), v


def _head_view(qkv: NDArray, i: int) -> NDArray:
    """(B, H, T, D): one of q, k, v inside packed (B, T, H, 3, D)."""
    B, T, H, _, D = qkv.shape
    sb, st, sh, s3, sd = qkv.strides
    return qkv._view((B, H, T, D), (sb, sh, st, sd), qkv._offset + i * s3)


def rotary_qkv(qkv: Tensor, cos: NDArray, sin: NDArray) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as (B, H, T, D) from packed qkv (B, T, H, 3, D), q and k rotated by position; cos, sin: (>= T, rot / 2).

    raises: ShapeError.
    """
    q, k, v = RotaryQKV(cos, sin)(qkv)
    return q, k, v


class Rotary(_NoRead):
    """x (B, H, T, D) with its first features rotated by position. grad: the inverse rotation."""

    def __init__(self, cos: NDArray, sin: NDArray, inverse: bool = False):
        self.cos, self.sin, self.inverse = cos, sin, inverse

    def compute(self, x):
        return kernels.rotary(x, self.cos, self.sin, self.inverse)

    def gradient(self, out_grad, node):
        return Rotary(self.cos, self.sin, not self.inverse)(out_grad)


def rotary(x: Tensor, cos: NDArray, sin: NDArray) -> Tensor:
    """Rotary position embedding: x (B, H, T, D) with feature i < rot / 2 turned together with feature i + rot / 2.

    cos, sin: (>= T, rot / 2), row t for position t. raises: ShapeError. source: Su et al. 2021, arXiv:2104.09864.
    """
    return Rotary(cos, sin)(x)
