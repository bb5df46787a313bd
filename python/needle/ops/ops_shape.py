"""Ops that move elements about: views, stacking, padding with zeros."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from .. import dtype as dt
from ..autograd import Tensor, TensorOp, TensorTuple, TensorTupleOp
from ..backend_ndarray.ndarray import NDArray, empty, full
from ..backend_ndarray.shapes import normalize_axes, normalize_axis
from ..errors import DeviceError, ShapeError
from .ops_tuple import make_tuple


class _Move(TensorOp):
    """An op whose gradient needs only the incoming gradient."""

    reads_inputs = False
    reads_output = False


class BroadcastTo(_Move):
    """The array repeated along axes of length 1 and new leading axes."""

    def __init__(self, shape):
        self.shape = shape

    def compute(self, a):
        return a.broadcast_to(self.shape)

    def gradient(self, out_grad, node):
        from .ops_mathematic import unbroadcast

        return unbroadcast(out_grad, node.inputs[0].shape)


def broadcast_to(a: Tensor, shape) -> Tensor:
    """a repeated to ``shape`` along axes of length 1 and new leading axes. raises: ShapeError if it does not fit."""
    return a if a.shape == shape else BroadcastTo(shape)(a)


class Reshape(_Move):
    """The same elements in row-major order under another shape; one length may be -1."""

    def __init__(self, shape):
        self.shape = shape

    def compute(self, a):
        return (a if a._contiguous else a.compact()).reshape(self.shape)

    def gradient(self, out_grad, node):
        return reshape(out_grad, node.inputs[0].shape)


def reshape(a: Tensor, shape) -> Tensor:
    """The same elements in row-major order under another shape; one length may be -1. raises: ShapeError."""
    return Reshape(shape)(a)


class Transpose(_Move):
    """Swaps two axes, by default the last two."""

    def __init__(self, axes=None):
        self.axes = axes

    def compute(self, a):
        if self.axes is not None and (not isinstance(self.axes, (tuple, list)) or len(self.axes) != 2):
            raise ShapeError(f"[transpose] swaps exactly two axes, got {self.axes} (permute takes a whole order)")
        i, j = self.axes if self.axes is not None else (-2, -1)
        order = list(range(a.ndim))
        i, j = normalize_axis(i, a.ndim, "transpose"), normalize_axis(j, a.ndim, "transpose")
        order[i], order[j] = j, i
        return a.permute(order)

    def gradient(self, out_grad, node):
        return Transpose(self.axes)(out_grad)


def transpose(a: Tensor, axes=None) -> Tensor:
    """a with two axes swapped, by default the last two. raises: ShapeError for another number of axes."""
    return Transpose(axes)(a)


class Permute(_Move):
    """The axes in another order, numpy's transpose."""

    def __init__(self, axes):
        self.axes = axes

    def compute(self, a):
        return a.permute(self.axes)

    def gradient(self, out_grad, node):
        n = len(self.axes)
        order = [a % n for a in self.axes]
        return permute(out_grad, [order.index(i) for i in range(n)])


def permute(a: Tensor, axes) -> Tensor:
    """The axes in another order, numpy's transpose. raises: ShapeError if ``axes`` is no order of all of them."""
    return Permute(axes)(a)


class Flip(_Move):
    """The elements in reverse order along ``axes`` (None: all)."""

    def __init__(self, axes=None):
        self.axes = axes

    def compute(self, a):
        return a.flip(normalize_axes(self.axes, a.ndim, "flip"))

    def gradient(self, out_grad, node):
        return flip(out_grad, self.axes)


def flip(a: Tensor, axes=None) -> Tensor:
    """The elements in reverse order along ``axes``: an int, several, or None for all."""
    return Flip(axes)(a)


def _dilated(n: int, dilation: int) -> int:
    return n * (dilation + 1)


class Dilate(_Move):
    """``dilation`` zeros after every element along ``axes``; axes the array does not have are ignored."""

    def __init__(self, axes, dilation: int):
        self.axes = (axes,) if isinstance(axes, int) else tuple(axes)
        self.dilation = dilation
        if dilation < 0:
            raise ShapeError(f"[dilate] dilation is {dilation} (accepted: at least 0)")

    def compute(self, a):
        shape = tuple(_dilated(n, self.dilation) if i in self.axes else n for i, n in enumerate(a.shape))
        out = full(shape, 0, a.dtype, a.device)
        out[_every(self.axes, self.dilation, a.ndim)] = a
        return out

    def gradient(self, out_grad, node):
        return undilate(out_grad, self.axes, self.dilation)


def _every(axes, dilation: int, ndim: int) -> tuple[slice, ...]:
    return tuple(slice(None, None, dilation + 1) if i in axes else slice(None) for i in range(ndim))


def dilate(a: Tensor, axes, dilation: int) -> Tensor:
    """``dilation`` zeros after every element along ``axes``; axes that a does not have are ignored."""
    return Dilate(axes, dilation)(a)


class UnDilate(_Move):
    """Every (dilation + 1)-th element along ``axes``: undoes dilate."""

    def __init__(self, axes, dilation: int):
        self.axes = (axes,) if isinstance(axes, int) else tuple(axes)
        self.dilation = dilation

    def compute(self, a):
        return a[_every(self.axes, self.dilation, a.ndim)].compact()

    def gradient(self, out_grad, node):
        from .ops_index import _Embed

        shape = node.inputs[0].shape  # of lengths that need be no multiples of dilation + 1
        return _Embed(shape, _every(self.axes, self.dilation, len(shape)))(out_grad)


def undilate(a: Tensor, axes, dilation: int) -> Tensor:
    """Every (dilation + 1)-th element along ``axes``, from the first on: undoes dilate."""
    return UnDilate(axes, dilation)(a)


class Pad(_Move):
    """Zeros around the array: one (left, right) pair per axis."""

    def __init__(self, widths):
        try:
            self.widths = tuple((int(left), int(right)) for left, right in widths)
        except TypeError:
            raise ShapeError(f"[pad] {widths!r} are no widths (accepted: one (left, right) per axis)") from None

    def compute(self, a):
        return a.pad(self.widths)

    def gradient(self, out_grad, node):
        from .ops_index import getitem

        shape = node.inputs[0].shape
        return getitem(out_grad, tuple(slice(left, left + n) for n, (left, _) in zip(shape, self.widths)))


def pad(a: Tensor, widths) -> Tensor:
    """Zeros around a: ``widths`` is one (left, right) pair per axis. raises: ShapeError for other widths."""
    return Pad(widths)(a)


def _first(op: str, args: Sequence[NDArray]) -> NDArray:
    """The first array. raises: ShapeError if there is none; DeviceError if another is on another device."""
    if not args:
        raise ShapeError(f"[{op}] no arrays (accepted: at least one)")
    for a in args:
        if a.device != args[0].device:
            raise DeviceError(f"[{op}] arrays are on different devices: {args[0].device} and {a.device}")
    return args[0]


def _widest(args) -> str:
    return reduce(dt.promote, [a.dtype for a in args])


class Stack(TensorOp):
    """Equal-shaped arrays along a new axis, written into one array. Takes a TensorTuple."""

    reads_inputs = False
    reads_output = False

    def __init__(self, axis: int):
        self.axis = axis

    def compute(self, args):
        first = _first("stack", args)
        if any(a.shape != first.shape for a in args):
            raise ShapeError(f"[stack] shapes differ: {[a.shape for a in args]}")
        axis = normalize_axis(self.axis, first.ndim + 1, "stack")
        out = empty(first.shape[:axis] + (len(args),) + first.shape[axis:], _widest(args), first.device)
        for i, a in enumerate(args):
            out[(slice(None),) * axis + (slice(i, i + 1),)] = a
        return out

    def gradient(self, out_grad, node):
        return split(out_grad, self.axis)


def stack(args, axis: int) -> Tensor:
    """Tensors of one shape along a new axis ``axis``. raises: ShapeError if their shapes differ."""
    return Stack(axis)(args if isinstance(args, TensorTuple) else make_tuple(*args))


class Split(TensorTupleOp):
    """The slices along ``axis``, without it: undoes stack. The slices are views."""

    reads_inputs = False
    reads_output = False

    def __init__(self, axis: int):
        self.axis = axis

    def compute(self, a):
        axis = normalize_axis(self.axis, a.ndim, "split")
        shape = a.shape[:axis] + a.shape[axis + 1 :]
        strides = a.strides[:axis] + a.strides[axis + 1 :]
        return tuple(a._view(shape, strides, a._offset + i * a.strides[axis]) for i in range(a.shape[axis]))

    def gradient(self, out_grad, node):
        return stack(out_grad, self.axis)


def split(a: Tensor, axis: int) -> TensorTuple:
    """The slices of a along ``axis``, each without it."""
    return Split(axis)(a)


class Concatenate(TensorOp):
    """Arrays joined along an axis that they have, written into one array. Takes a TensorTuple."""

    reads_inputs = False
    reads_output = False

    def __init__(self, axis: int):
        self.axis = axis

    def compute(self, args):
        first = _first("concatenate", args)
        axis = normalize_axis(self.axis, first.ndim, "concatenate")
        rest = [a.shape[:axis] + a.shape[axis + 1 :] for a in args]
        if any(r != rest[0] for r in rest):
            raise ShapeError(f"[concatenate] shapes differ beside axis {axis}: {[a.shape for a in args]}")
        length = sum(a.shape[axis] for a in args)
        out = empty(first.shape[:axis] + (length,) + first.shape[axis + 1 :], _widest(args), first.device)
        start = 0
        for a in args:
            out[(slice(None),) * axis + (slice(start, start + a.shape[axis]),)] = a
            start += a.shape[axis]
        return out

    def gradient(self, out_grad, node):
        from .ops_index import getitem

        parts, start = [], 0
        axis = self.axis % out_grad.ndim
        for item in node.inputs[0].tuple():
            n = item.shape[axis]
            parts.append(getitem(out_grad, (slice(None),) * axis + (slice(start, start + n),)))
            start += n
        return make_tuple(*parts)


def concatenate(args, axis: int = 0) -> Tensor:
    """Tensors joined along an axis that they have. raises: ShapeError if they differ in another one."""
    return Concatenate(axis)(args if isinstance(args, TensorTuple) else make_tuple(*args))


class Conv(TensorOp):
    """2-D convolution as a matrix product over windows (im2col by strides).

    a: (N, H, W, Cin); b: (K, L, Cin, Cout); padding on both sides of H and W. Result: (N, H', W', Cout) with
    H' = (H + 2 padding - K) // stride + 1, W' likewise. raises: ShapeError for other ranks or unequal channels.
    """

    autocast = "lower"
    reads_output = False

    def __init__(self, stride: int = 1, padding: int = 0):
        if stride < 1 or padding < 0:
            raise ShapeError(f"[conv] stride is {stride}, padding is {padding} (accepted: at least 1, at least 0)")
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
        K, L = b.shape[:2]
        if self.stride > 1:
            out_grad = dilate(out_grad, (1, 2), self.stride - 1)
        # What the stride left over at the far edge was not read: its gradient is zero, so the dilated gradient is cut to the
        # length a stride of 1 would have given.
        rows = a.shape[1] + 2 * self.padding - K + 1
        cols = a.shape[2] + 2 * self.padding - L + 1
        out_grad = _resized(out_grad, rows, cols)
        turned = transpose(flip(b, (0, 1)), (2, 3))
        around = pad(out_grad, ((0, 0), (K - 1, K - 1), (L - 1, L - 1), (0, 0))) if K > 1 or L > 1 else out_grad
        grad_a = _cut(conv(around, turned, 1, 0), self.padding, a.shape[1], a.shape[2])
        # dL/db[k, l, c, o] sums over images and positions: a convolution whose batch is c and whose channels are n.
        image = transpose(a, (0, 3))
        kernel = permute(out_grad, (1, 2, 0, 3))
        grad_b = permute(conv(image, kernel, 1, self.padding), (1, 2, 0, 3))
        return grad_a, grad_b


def _resized(x: Tensor, rows: int, cols: int) -> Tensor:
    """Axes 1 and 2 cut or filled with zeros at their end to rows and cols."""
    from .ops_index import getitem

    more = (_larger(rows - x.shape[1], 0), _larger(cols - x.shape[2], 0))
    if any(more):
        x = pad(x, ((0, 0), (0, more[0]), (0, more[1]), (0, 0)))
    if x.shape[1:3] != (rows, cols):
        x = getitem(x, (slice(None), slice(0, rows), slice(0, cols)))
    return x


def _cut(x: Tensor, padding: int, rows: int, cols: int) -> Tensor:
    from .ops_index import getitem

    if not padding:
        return x
    return getitem(x, (slice(None), slice(padding, padding + rows), slice(padding, padding + cols)))


def _larger(a: int, b: int) -> int:
    return a if a > b else b


def conv(a: Tensor, b: Tensor, stride: int = 1, padding: int = 1) -> Tensor:
    """2-D convolution: a (N, H, W, Cin), b (K, L, Cin, Cout) -> (N, H', W', Cout), H' = (H + 2 padding - K) // stride + 1.

    padding: zeros on each side of H and W; the default is the course's. raises: ShapeError.
    """
    return Conv(stride, padding)(a, b)
