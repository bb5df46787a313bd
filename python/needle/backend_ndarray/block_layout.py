"""BlockLayout: which blocks of a matrix are there, as the index that block-sparse kernels read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import numpy as np

from ..errors import ShapeError, as_whole
from .device import BackendDevice, caches, device_cache
from .ndarray import NDArray

BLOCK_SIZES = range(16, 129, 16)  # edges of a block that the kernels take
MOST_BLOCKS = 1 << 26  # that a mask may have: making a layout of so many takes 2 GiB


@dataclass(frozen=True, eq=False)
class BlockIndex:
    """A layout's index on one device, all int32 but the flags. ``ptr`` counts over heads: entry range of line i of head h is
    ptr[h * lines + i] .. ptr[h * lines + i + 1]."""

    row_ptr: NDArray
    col_idx: NDArray
    partial: NDArray  # uint8: 1 where elements of the block must be masked
    row_entry: NDArray  # storage position of each entry, 0, 1, 2, ...
    col_ptr: NDArray
    row_idx: NDArray
    t_partial: NDArray
    col_entry: NDArray  # storage position of each entry of the transposed index


class BlockLayout:
    """The blocks of a (rows x cols) matrix that exist, per head or for all heads alike.

    mask: bool, (block rows, block cols) or (heads, block rows, block cols).
    block: edge of a block in elements, a multiple of 16 from 16 to 128.
    causal: drop what lies in the future and mark the blocks on the diagonal as partial. Element (r, c) is in the past when
        c <= q_start + r.

    Only partial blocks have single elements masked. The index is built once on the host, and once per device.
    raises: ShapeError for another rank or block size, and for a q_start that is no whole number.
    """

    def __init__(self, mask, block: int, causal: bool = False, q_start: int = 0):
        mask = np.array(mask, dtype=bool)
        if mask.ndim == 2:
            mask = mask[None]
        if mask.ndim != 3 or not len(mask):
            raise ShapeError(f"[BlockLayout] mask has shape {mask.shape} (accepted: (rows, cols) or (heads, rows, cols))")
        block, first = check_block(block), as_whole(q_start)
        if first is None:
            raise ShapeError(f"[BlockLayout] q_start is {q_start!r} (accepted: a whole number)")
        self.block, self.causal, self.q_start = block, causal, first
        self.heads, self.block_rows, self.block_cols = mask.shape
        partial = np.zeros_like(mask)
        possible = np.ones(mask.shape[1:], bool)
        if causal:
            row = first + np.arange(self.block_rows)[:, None] * block
            col = np.arange(self.block_cols)[None, :] * block
            possible = col <= row + block - 1
            mask &= possible
            partial[:] = col + block - 1 > row
        self.mask = mask
        self._possible = self.heads * int(possible.sum())
        head, rows, cols = np.nonzero(mask)
        per_head = mask.sum(axis=(1, 2))
        self.nnz_total = int(rows.size)
        self.nnz = int(per_head.max(initial=0))  # blocks stored per batch item

        order = np.lexsort((rows, cols, head))
        self._index = {
            "row_ptr": _pointers(head * self.block_rows + rows, self.heads * self.block_rows),
            "col_idx": cols.astype(np.int32),
            "partial": partial[head, rows, cols].astype(np.uint8),
            "row_entry": np.arange(self.nnz_total, dtype=np.int32),
            "col_ptr": _pointers(head * self.block_cols + cols, self.heads * self.block_cols),
            "row_idx": rows[order].astype(np.int32),
            "t_partial": partial[head, rows, cols][order].astype(np.uint8),
            "col_entry": order.astype(np.int32),
        }
        self._on_device: dict[BackendDevice, BlockIndex] = {}

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns in elements."""
        return self.block_rows * self.block, self.block_cols * self.block

    @property
    def density(self) -> float:
        """Blocks there are, over the blocks there could be (the causal ones where ``causal``)."""
        return self.nnz_total / self._possible if self._possible else 0.0

    def on(self, device: BackendDevice) -> BlockIndex:
        """The index on ``device``; made there once, until ``drop_device_caches``."""
        index = self._on_device.get(device)
        if index is None:
            arrays = {name: NDArray(values, device=device, dtype=str(values.dtype)) for name, values in self._index.items()}
            index = self._on_device[device] = BlockIndex(**arrays)
            _indexed.add(self)
        return index

    def dense_mask(self, rows: int | None = None, cols: int | None = None) -> np.ndarray:
        """(heads, rows, cols) of bool: the elements this layout lets through."""
        rows, cols = self.shape[0] if rows is None else rows, self.shape[1] if cols is None else cols
        wide = self.mask.repeat(self.block, axis=1).repeat(self.block, axis=2)[:, :rows, :cols]
        if self.causal:
            wide = wide & (np.arange(cols)[None, :] <= self.q_start + np.arange(rows)[:, None])
        return wide

    def __repr__(self) -> str:
        return (
            f"BlockLayout({self.heads} heads, {self.block_rows} x {self.block_cols} blocks of {self.block}, "
            f"{self.nnz_total} blocks, density {self.density:.3f}{', causal' if self.causal else ''})"
        )


_indexed: WeakSet[BlockLayout] = WeakSet()  # those that are on some device


def _drop_indices() -> None:
    for layout in list(_indexed):
        layout._on_device.clear()
    _indexed.clear()


caches.append(_drop_indices)


def _pointers(lines: np.ndarray, n_lines: int) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(np.bincount(lines, minlength=n_lines))]).astype(np.int32)


def check_block(block: Any) -> int:
    """``block`` as an int. raises: ShapeError for an edge that the kernels do not take."""
    size = as_whole(block)
    if size is None or size not in BLOCK_SIZES:
        raise ShapeError(f"[BlockLayout] block size {block!r} (accepted: multiples of 16 from 16 to 128)")
    return size


def check_size(rows: int, cols: int, block: int) -> None:
    """raises: ShapeError if a mask of rows x cols blocks would be too large to be made."""
    if rows * cols > MOST_BLOCKS:
        positions = math.isqrt(MOST_BLOCKS) * block
        raise ShapeError(
            f"[BlockLayout] {rows:,} x {cols:,} blocks of {block} positions are too many (accepted: {MOST_BLOCKS:,} blocks, or "
            f"{positions:,} positions)"
        )


@device_cache(maxsize=64)
def dense_layout(rows: int, cols: int, block: int = 64, causal: bool = True, q_start: int = 0) -> BlockLayout:
    """Every block of a (rows, cols) matrix in elements, tails included; causal drops the future."""
    block = check_block(block)
    shape = -(-rows // block), -(-cols // block)
    check_size(*shape, block)
    mask = np.ones(shape, bool)
    return BlockLayout(mask, block, causal, q_start)
