"""Block-sparse products. The three are closed under differentiation: each one's gradients are two of the three.

A block-sparse matrix is its blocks, (batch, nnz, block, block), and a ``BlockLayout``.
"""

from __future__ import annotations

from ..autograd import Tensor, needs_gradient
from ..backend_ndarray import kernels
from ..backend_ndarray.block_layout import BlockLayout
from ._reads import _Product
from .ops_shape import transpose


class BlockSparseMatmul(_Product):
    """What sdd, dsd and dds share: a layout, and on CUDA the kernel ``BlockSparseMatmulKernel``."""

    autocast = "lower"

    def __init__(self, layout: BlockLayout, transpose: bool = False):
        self.layout, self.transpose = layout, transpose


class SDD(BlockSparseMatmul):
    """The layout's blocks of a @ b. a: (batch, m, k); b: (batch, k, n). grad: da = dC b^T (dsd), db = a^T dC (dds)."""

    def __init__(self, layout: BlockLayout):
        super().__init__(layout)

    def compute(self, a, b):
        return kernels.blocksparse_sdd(a, b, self.layout)

    def gradient(self, out_grad, node):
        a, b = node.inputs
        grad_a = dsd(out_grad, transpose(b), self.layout) if needs_gradient(a) else None
        return grad_a, dds(transpose(a), out_grad, self.layout) if needs_gradient(b) else None


class DSD(BlockSparseMatmul):
    """op(S) @ b. grad: dS = dC b^T at the blocks (sdd), db = op(S)^T dC."""

    def compute(self, blocks, b):
        return kernels.blocksparse_dsd(blocks, b, self.layout, self.transpose)

    def gradient(self, out_grad, node):
        blocks, b = node.inputs
        left, right = (b, transpose(out_grad)) if self.transpose else (out_grad, transpose(b))
        grad_blocks = sdd(left, right, self.layout) if needs_gradient(blocks) else None
        return grad_blocks, dsd(blocks, out_grad, self.layout, not self.transpose) if needs_gradient(b) else None


class DDS(BlockSparseMatmul):
    """a @ op(S). grad: da = dC op(S)^T, dS = a^T dC at the blocks (sdd)."""

    def compute(self, a, blocks):
        return kernels.blocksparse_dds(a, blocks, self.layout, self.transpose)

    def gradient(self, out_grad, node):
        a, blocks = node.inputs
        left, right = (transpose(out_grad), a) if self.transpose else (transpose(a), out_grad)
        grad_a = dds(out_grad, blocks, self.layout, not self.transpose) if needs_gradient(a) else None
        return grad_a, sdd(left, right, self.layout) if needs_gradient(blocks) else None


def sdd(a: Tensor, b: Tensor, layout: BlockLayout) -> Tensor:
    """Dense @ dense at the layout's blocks: a (batch, m, k), b (batch, k, n) -> blocks (batch, nnz, block, block).

    m and n are those of ``layout.shape``. raises: ShapeError.
    """
    return SDD(layout)(a, b)


def dsd(blocks: Tensor, b: Tensor, layout: BlockLayout, transpose: bool = False) -> Tensor:
    """Sparse @ dense, S @ b or S^T @ b: blocks of S (batch, nnz, block, block), b (batch, k, n) -> (batch, m, n).

    raises: ShapeError.
    """
    return DSD(layout, transpose)(blocks, b)


def dds(a: Tensor, blocks: Tensor, layout: BlockLayout, transpose: bool = False) -> Tensor:
    """Dense @ sparse, a @ S or a @ S^T: a (batch, m, k), blocks of S (batch, nnz, block, block) -> (batch, m, n).

    raises: ShapeError.
    """
    return DDS(layout, transpose)(a, blocks)
