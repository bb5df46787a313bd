"""Block-sparse layers and the attention patterns they use."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .. import init, ops
from ..autograd import Tensor, check_tensors
from ..backend_ndarray.block_layout import BlockLayout, check_block, check_size
from ..backend_ndarray.device import device_cache
from ..errors import DTypeError, ShapeError, check_count, check_flag, type_name
from .nn_basic import Module, Parameter

# Which blocks ``col`` of the past a block ``row`` sees beside itself.
_SEEN: dict[str, Callable[[np.ndarray, np.ndarray, int, int], np.ndarray]] = {
    "local": lambda row, col, window, stride: col > row - window,
    "global": lambda row, col, window, stride: col % stride == 0,
    "mixed": lambda row, col, window, stride: (col > row - window) | (col % stride == 0),
}
PATTERNS = tuple(_SEEN)


def causal_pattern(pattern: str, blocks: int, block: int, window: int = 2, stride: int = 4) -> BlockLayout:
    """The (blocks x blocks) layout of a named pattern; never a block of the future.

    local: each block of queries sees itself and the ``window`` - 1 blocks before it.
    global: itself, and of those before it each whose index is a multiple of ``stride``: 0, stride, 2 stride, ...
    mixed: local and global together. ``window`` has no part in global, nor ``stride`` in local.
    raises: ShapeError for another name, a window or stride that is no whole number of at least 1, a block size that BlockLayout
    does not take, and more blocks than a mask can have.
    """
    if pattern not in PATTERNS:
        raise ShapeError(f"[pattern] unknown pattern: {pattern} (accepted: {', '.join(PATTERNS)})")
    blocks, block = check_count("pattern", "blocks", blocks, 0), check_block(block)
    window, stride = check_count("pattern", "window", window), check_count("pattern", "stride", stride)
    check_size(blocks, blocks, block)
    return _causal_pattern(pattern, blocks, block, window, stride)


@device_cache(maxsize=64)
def _causal_pattern(pattern: str, blocks: int, block: int, window: int, stride: int) -> BlockLayout:
    row, col = np.arange(blocks)[:, None], np.arange(blocks)[None, :]
    mask = (row == col) | _SEEN[pattern](row, col, min(window, blocks), stride)
    return BlockLayout(mask, block, causal=True)  # which has no block of the future


class BlockSparseAttention(Module):
    """Causal attention over a pattern: q, k, v (B, H, T, D) -> (B, H, T, D).

    pattern: a name of PATTERNS, with ``window`` and ``stride`` as ``causal_pattern`` has them; or the blocks that take part, as a
    BlockLayout or its mask, of which the future is left out.
    raises: ShapeError as ``causal_pattern`` and BlockLayout do; DTypeError for what is no Tensor.
    """

    def __init__(self, pattern="local", block: int = 64, window: int = 2, stride: int = 4):
        super().__init__()
        if isinstance(pattern, BlockLayout) and not pattern.causal:
            pattern, block = pattern.mask, pattern.block
        if not isinstance(pattern, (str, BlockLayout)):
            pattern = BlockLayout(pattern, block, causal=True)
        if isinstance(pattern, str):
            causal_pattern(pattern, 1, block, window, stride)  # so that a misspelt name fails here and not at the first call
            block, window, stride = int(block), int(window), int(stride)
        self.pattern, self.block, self.window, self.stride = pattern, block, window, stride

    def layout(self, T: int) -> BlockLayout:
        """The blocks for T positions."""
        if isinstance(self.pattern, BlockLayout):
            return self.pattern
        return causal_pattern(self.pattern, -(-T // self.block), self.block, self.window, self.stride)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        check_tensors("BlockSparseAttention", q, k, v)
        if q.ndim != 4:
            raise ShapeError(f"[BlockSparseAttention] q is {q.shape} (accepted: (batch, heads, positions, features))")
        return ops.attention(q, k, v, self.layout(q.shape[2]))


class BlockSparseLinear(Module):
    """x @ S + bias with a block-sparse weight S (in, out) of which only the layout's blocks exist.

    layout: a BlockLayout of in_features x out_features elements. weight: (1, nnz, block, block), uniform with the bound that
    Kaiming gives for the inputs an output has on average. x: (..., in) -> (..., out).
    raises: DTypeError for a layout of another type and an x of integers, ShapeError for a layout of other sizes or several heads.
    """

    def __init__(self, in_features: int, out_features: int, layout: BlockLayout, bias=True, device=None, dtype="float32"):
        super().__init__()
        check_flag("BlockSparseLinear", "bias", bias)
        sizes = (("in_features", in_features), ("out_features", out_features))
        in_features, out_features = [check_count("BlockSparseLinear", name, size, 0) for name, size in sizes]
        if not isinstance(layout, BlockLayout):
            raise DTypeError(f"[BlockSparseLinear] layout is of type {type_name(layout)} (accepted: a BlockLayout)")
        if layout.shape != (in_features, out_features) or layout.heads != 1:
            accepted = f"one head of {in_features} x {out_features} elements"
            raise ShapeError(f"[BlockSparseLinear] layout is {layout} (accepted: {accepted})")
        self.layout = layout
        share = layout.nnz_total / max(layout.block_rows * layout.block_cols, 1)
        bound = (6.0 / max(in_features * share, 1)) ** 0.5
        shape = (1, layout.nnz, layout.block, layout.block)
        self.weight = Parameter(init.rand(*shape, low=-bound, high=bound, device=device, dtype=dtype))
        self.bias = Parameter(init.zeros(out_features, device=device, dtype=dtype)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        check_tensors("BlockSparseLinear", x)
        if x.shape[-1:] != self.layout.shape[:1]:
            raise ShapeError(f"[BlockSparseLinear] x is {x.shape} (accepted: (..., {self.layout.shape[0]}))")
        rows = ops.reshape(x, (1, -1, x.shape[-1]))
        out = ops.reshape(ops.dds(rows, self.weight, self.layout), (*x.shape[:-1], self.layout.shape[1]))
        return out if self.bias is None else out + self.bias
