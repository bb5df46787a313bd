"""Convolution, and dilation."""

from __future__ import annotations

from ..autograd import Tensor
from ..backend_ndarray.ndarray import full as _full
from ..errors import ShapeError
from ._reads import _InputRead, _NoRead
from .ops_index import _Embed
from .ops_shape import flip, pad, permute, reshape, transpose


class Conv(_InputRead):
    """2-D convolution as a matrix product over windows (im2col by strides).

    a: (N, H, W, Cin); b: (K, L, Cin, Cout); padding on both sides of H and W. Result: (N, H', W', Cout) with
    H' = (H + 2 padding - K) // stride + 1, W' likewise. raises: ShapeError for other ranks or unequal channels.
    """

    autocast = "lower"

    def __init__(self, stride: int = 1, padding: int = 0):
        if any(not hasattr(n, "__index__") or n < least for n, least in ((stride, 1), (padding, 0))):
            raise ShapeError(f"[conv] stride is {stride}, padding is {padding} (accepted: whole numbers, at least 1, at least 0)")
        self.stride = stride
        self.padding = padding

    def compute(self, a, b):
        if a.ndim != 4 or b.ndim != 4 or a.shape[3] != b.shape[2]:
            raise ShapeError(f"[conv] image is {a.shape}, kernel is {b.shape} (accepted: (N, H, W, Cin), (K, L, Cin, Cout))")
        p, s = self.padding, self.stride
        padded = a.pad(((0, 0), (p, p), (p, p), (0, 0))) if p else a.compact()
        N, H, W, C = padded.shape
        K, L, _, out_channels = b.shape
        if H < K or W < L:
            raise ShapeError(f"[conv] kernel {K} x {L} is larger than the padded image {H} x {W}")
        rows, cols = (H - K) // s + 1, (W - L) // s + 1
        sn, sh, sw, sc = padded.strides
        windows = padded.as_strided((N, rows, cols, K, L, C), (sn, sh * s, sw * s, sh, sw, sc)).compact()
        product = windows.reshape((N * rows * cols, K * L * C)) @ b.compact().reshape((K * L * C, out_channels))
        return product.reshape((N, rows, cols, out_channels))

    def gradient(self, out_grad, node):
        a, b = node.inputs
        (H, W), (K, L), s, p = a.shape[1:3], b.shape[:2], self.stride, self.padding
        # With the s x s pixels of a block as the channels of one, the stride is 1; the kernel has as many blocks.
        K_blocks, L_blocks = -(-K // s), -(-L // s)
        grad_a = grad_b = None
        if a.requires_grad:
            kernel = _blocks(_span(b, 0, (0, K_blocks * s), (0, L_blocks * s)), 0, s)
            turned = transpose(flip(kernel, (0, 1)), (2, 3))
            # Of the padded image those blocks in which pixels of a are, each from the gradients of all windows that it is in.
            first, rows, cols = p // s, -(-(p + H) // s), -(-(p + W) // s)
            grad_a = conv(_span(out_grad, 1, (first - K_blocks + 1, rows), (first - L_blocks + 1, cols)), turned, 1, 0)
            grad_a = _span(_pixels(grad_a, 1, s), 1, (p % s, p % s + H), (p % s, p % s + W))
        if b.requires_grad:
            rows, cols = out_grad.shape[1] + K_blocks - 1, out_grad.shape[2] + L_blocks - 1
            image = _blocks(_span(a, 1, (-p, rows * s - p), (-p, cols * s - p)), 1, s)
            # dL/db[k, l, c, o] sums over images and positions: a convolution whose batch is c and whose channels are n.
            kernel = conv(transpose(image, (0, 3)), permute(out_grad, (1, 2, 0, 3)), 1, 0)
            grad_b = _span(_pixels(permute(kernel, (1, 2, 0, 3)), 0, s), 0, (0, K), (0, L))
        return grad_a, grad_b


def _span(x: Tensor, axis: int, rows: tuple[int, int], cols: tuple[int, int]) -> Tensor:
    """x from rows[0] to rows[1] along ``axis`` and from cols[0] to cols[1] along the next one, with zeros outside of x."""
    widths, cut = [(0, 0)] * x.ndim, [slice(None)] * x.ndim
    for i, (start, stop) in enumerate((rows, cols), axis):
        widths[i] = max(-start, 0), max(stop - x.shape[i], 0)
        cut[i] = slice(max(start, 0), max(start, 0) + stop - start)
    if widths != [(0, 0)] * x.ndim:
        x = pad(x, widths)
    wanted = [len(range(*part.indices(n))) for part, n in zip(cut, x.shape)]
    return x if wanted == list(x.shape) else x[tuple(cut)]


def _blocks(x: Tensor, axis: int, s: int) -> Tensor:
    """Space to depth: (.., R s, Q s, C, ..) -> (.., R, Q, s s C, ..), the first of these axes being ``axis``."""
    if s == 1:
        return x
    before, (h, w, c), after = x.shape[:axis], x.shape[axis : axis + 3], x.shape[axis + 3 :]
    x = reshape(x, (*before, h // s, s, w // s, s, c, *after))
    return reshape(transpose(x, (axis + 1, axis + 2)), (*before, h // s, w // s, s * s * c, *after))


def _pixels(x: Tensor, axis: int, s: int) -> Tensor:
    """Depth to space: undoes ``_blocks``."""
    if s == 1:
        return x
    before, (h, w, c), after = x.shape[:axis], x.shape[axis : axis + 3], x.shape[axis + 3 :]
    x = reshape(x, (*before, h, w, s, s, c // (s * s), *after))
    return reshape(transpose(x, (axis + 1, axis + 2)), (*before, h * s, w * s, c // (s * s), *after))


def conv(a: Tensor, b: Tensor, stride: int = 1, padding: int = 1) -> Tensor:
    """2-D convolution: a (N, H, W, Cin), b (K, L, Cin, Cout) -> (N, H', W', Cout), H' = (H + 2 padding - K) // stride + 1.

    padding: zeros on each side of H and W; the default is the course's. raises: ShapeError.
    """
    return Conv(stride, padding)(a, b)


class _Dilation(_NoRead):
    """What Dilate and UnDilate share: the axes, and how many elements are put in or left out."""

    def __init__(self, axes, dilation: int):
        self.axes = (axes,) if isinstance(axes, int) else tuple(axes)
        self.dilation = dilation
        if not hasattr(dilation, "__index__") or dilation < 0:
            raise ShapeError(f"[{self.name.lower()}] dilation is {dilation} (accepted: a whole number of at least 0)")

    def _every(self, ndim: int) -> tuple[slice, ...]:
        """The index of the original elements in a dilated array."""
        here = [i in self.axes or i - ndim in self.axes for i in range(ndim)]
        return tuple(slice(None, None, self.dilation + 1 if dilated else None) for dilated in here)


class Dilate(_Dilation):
    """``dilation`` zeros after every element along ``axes``; axes the array does not have are ignored."""

    def compute(self, a):
        every = self._every(a.ndim)
        out = _full([n * (part.step or 1) for n, part in zip(a.shape, every)], 0, a.dtype, a.device)
        out[every] = a
        return out

    def gradient(self, out_grad, node):
        return undilate(out_grad, self.axes, self.dilation)


def dilate(a: Tensor, axes, dilation: int) -> Tensor:
    """``dilation`` zeros after every element along ``axes``; axes that a does not have are ignored. raises: ShapeError."""
    return Dilate(axes, dilation)(a)


class UnDilate(_Dilation):
    """Every (dilation + 1)-th element along ``axes``: undoes dilate."""

    def compute(self, a):
        return a[self._every(a.ndim)].compact()

    def gradient(self, out_grad, node):
        shape = node.inputs[0].shape  # of lengths that need be no multiples of dilation + 1
        return _Embed(shape, self._every(len(shape)))(out_grad)


def undilate(a: Tensor, axes, dilation: int) -> Tensor:
    """Every (dilation + 1)-th element along ``axes``, from the first on: undoes dilate. raises: ShapeError."""
    return UnDilate(axes, dilation)(a)
