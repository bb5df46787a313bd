"""The course's transformer. B batch, H heads, T positions, D head width.

dropout: the probability with which elements are dropped in training. causal: whether a position sees only those up to its own.
"""

from __future__ import annotations

import numpy as np

from .. import dtype as dt
from .. import init, ops
from ..autograd import Tensor, check_tensors
from ..backend_ndarray import ndarray
from ..errors import DTypeError, ShapeError, check_count, check_flag
from .nn_basic import Dropout, LayerNorm1d, Linear, Module, ReLU, Sequential
from .nn_sequence import Embedding


def _sizes(op: str, x: Tensor) -> tuple[int, ...]:
    """(batch, positions, features) of x, or as its axes are ordered. raises: ShapeError unless it has three axes."""
    check_tensors(op, x)
    if x.ndim != 3:
        raise ShapeError(f"[{op}] x is {x.shape} (accepted: three axes, of batch, positions and features)")
    return x.shape


class MultiHeadAttention(Module):
    """(softmax(q k^T / sqrt(D)) v, the probabilities (B, H, T, S)): q (B, H, T, D), k and v (B, H, S, D).

    ``ops.attention`` computes the first of the two without storing the second; a position that is before all keys sees nothing
    there, and here the mean of all. dropout: of the probabilities. causal: by default no; the last query stands at the last key.
    device, dtype: without effect, as there are no parameters. source: Vaswani et al. 2017, arXiv:1706.03762.
    raises: ShapeError if the shapes do not fit, DTypeError for integers.
    """

    def __init__(self, *, dropout=0.0, causal=False, device=None, dtype="float32"):
        super().__init__()
        check_flag("MultiHeadAttention", "causal", causal)
        self.device, self.dtype = device, dtype
        self.causal = causal
        self.dropout = Dropout(dropout)

    def create_causal_mask(self, i, j, device):
        """(1, 1, i, j): the most negative float32 above the diagonal, else 0."""
        mask = -np.finfo(np.float32).max * np.triu(np.ones((1, 1, i, j), dtype=np.float32), j - i + 1)
        return ndarray.array(mask, device=device)

    def matmul(self, a: Tensor, b_transpose: Tensor) -> Tensor:
        """a (..., T, D) times the transpose of b_transpose (..., S, D)."""
        return ops.matmul(a, ops.transpose(b_transpose))

    def softmax(self, logit: Tensor) -> Tensor:
        """softmax over the last axis."""
        return ops.softmax(logit)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        check_tensors("MultiHeadAttention", q, k, v)
        if q.ndim != 4 or k.ndim != 4 or q.shape[3] != k.shape[3]:
            raise ShapeError(f"[MultiHeadAttention] q is {q.shape}, k is {k.shape} (accepted: (B, H, T, D), (B, H, S, D))")
        if not all(dt.is_float(x.dtype) for x in (q, k, v)):
            raise DTypeError(f"[MultiHeadAttention] q is {q.dtype}, k is {k.dtype}, v is {v.dtype} (accepted: floating)")
        scores = self.matmul(q, k) / (q.shape[-1] ** 0.5)
        if self.causal:
            mask = self.create_causal_mask(q.shape[2], k.shape[2], q.device)
            scores = scores + ops.broadcast_to(Tensor(mask, device=q.device, requires_grad=False), scores.shape)
        probs = self.dropout(self.softmax(scores))
        return ops.matmul(ops.astype(probs, v.dtype), v), probs  # the mask is float32


class AttentionLayer(Module):
    """Projections around MultiHeadAttention, each input normalized first: q (B, T, q_features), k and v, default q -> (B, T,
    out_features). ``probs``: the probabilities of the last call, without history.

    num_head, dim_head: H and D, of any number of features. k_features, v_features, out_features: default q_features. dropout:
    of the probabilities. causal: by default yes. raises: ShapeError for no heads, or empty ones.
    """

    def __init__(
        self, q_features, num_head, dim_head, *, k_features=None, v_features=None, out_features=None,
        dropout=0.0, causal=True, device=None, dtype="float32",
    ):  # fmt: skip
        super().__init__()
        num_head, dim_head = (check_count("AttentionLayer", n, v) for n, v in (("num_head", num_head), ("dim_head", dim_head)))
        k_features = q_features if k_features is None else k_features
        v_features = q_features if v_features is None else v_features
        out_features = q_features if out_features is None else out_features
        self.q_features, self.k_features, self.v_features = q_features, k_features, v_features
        self.out_features, self.num_head, self.dim_head = out_features, num_head, dim_head
        kwargs = {"device": device, "dtype": dtype}
        inner = num_head * dim_head
        self.prenorm_q = LayerNorm1d(q_features, **kwargs)
        self.prenorm_k = LayerNorm1d(k_features, **kwargs)
        self.prenorm_v = LayerNorm1d(v_features, **kwargs)
        self.q_projection = Linear(q_features, inner, bias=False, **kwargs)
        self.k_projection = Linear(k_features, inner, bias=False, **kwargs)
        self.v_projection = Linear(v_features, inner, bias=False, **kwargs)
        self.attn = MultiHeadAttention(dropout=dropout, causal=causal, **kwargs)
        self.out_projection = Linear(inner, out_features, bias=False, **kwargs)

    def _heads(self, x: Tensor, norm: Module, projection: Module) -> Tensor:
        B, T, C = _sizes("AttentionLayer", x)
        flat = projection(norm(ops.reshape(x, (B * T, C))))
        return ops.transpose(ops.reshape(flat, (B, T, self.num_head, self.dim_head)), (1, 2))  # (B, H, T, D)

    def forward(self, q: Tensor, k: Tensor | None = None, v: Tensor | None = None) -> Tensor:
        k = q if k is None else k
        v = q if v is None else v
        B, T, _ = _sizes("AttentionLayer", q)
        out, self.probs = self.attn(
            self._heads(q, self.prenorm_q, self.q_projection),
            self._heads(k, self.prenorm_k, self.k_projection),
            self._heads(v, self.prenorm_v, self.v_projection),
        )
        self.probs = self.probs.detach()
        flat = ops.reshape(ops.transpose(out, (1, 2)), (B * T, self.num_head * self.dim_head))
        return ops.reshape(self.out_projection(flat), (B, T, self.out_features))


class TransformerLayer(Module):
    """x + drop(attention(x)), then x + drop(linear(drop(relu(linear(norm(x)))))), on (B, T, q_features).

    num_head, dim_head, causal: of its AttentionLayer. hidden_size: features between the two linear layers.
    """

    def __init__(self, q_features, num_head, dim_head, hidden_size, *, dropout=0.0, causal=True, device=None, dtype="float32"):
        super().__init__()
        kwargs = {"device": device, "dtype": dtype}
        self.attention = AttentionLayer(q_features, num_head, dim_head, dropout=dropout, causal=causal, **kwargs)
        self.dropout = Dropout(dropout)
        self.norm = LayerNorm1d(q_features, **kwargs)
        self.mlp = Sequential(
            Linear(q_features, hidden_size, **kwargs),
            ReLU(),
            Dropout(dropout),
            Linear(hidden_size, q_features, **kwargs),
            Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = _sizes("TransformerLayer", x)
        x = x + self.dropout(self.attention(x))
        return x + ops.reshape(self.mlp(self.norm(ops.reshape(x, (B * T, C)))), (B, T, C))


class Transformer(Module):
    """Layers over embeddings (T, B, embedding_size), or (B, T, ...) with ``batch_first``, to which learned positions are added.

    hidden_size, num_head, dim_head, dropout, causal: of each TransformerLayer. sequence_len: the most positions. Gives the outputs,
    and zeros where a recurrent network gives its state.
    raises: ShapeError for no layers, heads or features of a head.
    """

    def __init__(
        self, embedding_size, hidden_size, num_layers, *, num_head=8, dim_head=32, dropout=0.0, causal=True,
        device=None, dtype="float32", batch_first=False, sequence_len=2048,
    ):  # fmt: skip
        super().__init__()
        check_flag("Transformer", "batch_first", batch_first)
        self.batch_first = batch_first
        self.positions = Embedding(sequence_len, embedding_size, device=device, dtype=dtype)
        self.layers = [
            TransformerLayer(
                embedding_size, num_head, dim_head, hidden_size, dropout=dropout, causal=causal, device=device, dtype=dtype
            )
            for _ in range(check_count("Transformer", "num_layers", num_layers))
        ]

    def forward(self, x: Tensor, h=None) -> tuple[Tensor, Tensor]:
        _sizes("Transformer", x)
        if not self.batch_first:
            x = ops.transpose(x, (0, 1))
        B, T, C = x.shape
        if C != self.positions.embedding_dim:
            raise ShapeError(f"[Transformer] {C} features (accepted: embedding_size, {self.positions.embedding_dim})")
        if T > self.positions.num_embeddings:
            raise ShapeError(f"[Transformer] {T} positions (accepted: at most sequence_len, {self.positions.num_embeddings})")
        ids = init.arange(T, device=x.device, dtype="int32")
        x = x + ops.broadcast_to(ops.reshape(self.positions(ids), (1, T, C)), x.shape)
        for layer in self.layers:
            x = layer(x)
        if not self.batch_first:
            x = ops.transpose(x, (0, 1))
        return x, init.zeros_like(x)
