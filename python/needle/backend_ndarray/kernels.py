"""The larger kernels: check the arguments, allocate outputs and workspace, call the device's function of the same name.

Kernels never allocate, so every byte that a step needs is asked for here or in ``ndarray.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from .. import dtype as dt
from ..errors import DTypeError, ShapeError, type_name
from .block_layout import BlockLayout
from .host_memory import GRADIENT, WORKSPACE
from .ndarray import NDArray, _new, check_one_device, full, matmul
from .shapes import as_shape

COLUMN_PARTIALS = 64  # kColumnPartials in backend.h
IGNORE_INDEX = -100
IGNORE_NOTHING = -(1 << 63)  # as an ignore_index: infinity, as an int32, is no such number
DEFAULT_CHUNK_BYTES = 100 << 20
IMAGE_BYTES = 4 << 20  # of images whose channels are no last axis: a copy stays in a processor's cache
PANEL_ROWS = 12  # of the CPU's matrix product (kRows in gemm_cpu.cc, or twice as many)
TILE_ROWS = 128  # of a GPU's, cuBLASLt's as needle's own: 516 rows are five tiles
MAX_HEAD = 256  # features of an attention head: what the kernels of cpu and of GPUs have room for
FLOAT16_GRADIENT_SCALE = 2.0**10  # of dlogits, which lie within -1..1, and would be below float16's range divided by the rows


def _workspace(shape: tuple[int, ...], dtype: str, device) -> NDArray:
    """An array that lives for one kernel or one op and holds no result."""
    out = _new(shape, dtype, device)
    out.category = WORKSPACE
    return out


def _check(op: str, *arrays: NDArray, others: Iterable[NDArray] = ()) -> None:
    """raises: DTypeError unless ``arrays`` are floating and of one dtype; DeviceError unless they and ``others`` share a device."""
    first = arrays[0]
    for x in (*arrays, *others):
        if not isinstance(x, NDArray):
            raise DTypeError(f"[{op}] an array is of type {type_name(x)} (accepted: an NDArray)")
        check_one_device(op, first, x)
    for x in arrays:
        if not dt.is_float(x._dtype):
            raise DTypeError(f"[{op}] needs floating arrays, got {x._dtype}")
        if x._dtype != first._dtype:
            raise DTypeError(f"[{op}] dtypes differ: {first._dtype} and {x._dtype} (cast one of them)")


def _check_layout(op: str, layout: BlockLayout) -> None:
    if not isinstance(layout, BlockLayout):
        raise DTypeError(f"[{op}] layout is of type {type_name(layout)} (accepted: a BlockLayout)")


def _from_first(x: NDArray) -> Any:
    """A handle that begins at x's first element and keeps the storage alive."""
    return x._handle.view(x._offset, x._handle.size - x._offset) if x._offset else x._handle


def _as_ids(ids: NDArray) -> NDArray:
    """Whole numbers as int32 or int64; floats (the course's data) are cast."""
    return ids if ids._dtype in ("int32", "int64") else ids.astype("int32")


def _whole_ids(op: str, ids: NDArray) -> NDArray:
    """``_as_ids``. raises: IndexError for a fraction, NaN or a number outside of int32, which a cast would make another id of: on
    CPU devices, where a look at the values waits for nothing.
    """
    if dt.is_float(ids._dtype) and ids._device.is_host:
        values = ids.numpy().reshape(-1).astype(np.float64)
        wrong = np.flatnonzero((values != np.trunc(values)) | (abs(values) >= 2.0**31))
        if len(wrong):
            value = values[wrong[0]]
            what = "outside of int32" if value == np.trunc(value) else "no whole number"
            raise IndexError(f"[{op}] {value} at position {wrong[0]} is {what} (accepted: ids)")
    return _as_ids(ids)


def _rows_cols(op: str, x: NDArray) -> tuple[int, int]:
    if x.ndim == 0:
        raise ShapeError(f"[{op}] needs at least one axis, got shape {x.shape}")
    return math.prod(x._shape[:-1]), x._shape[-1]


# --- convolution ---

Windows = tuple[int, int, int, int, int]  # along an axis of an image: n, size, stride, before, windows, as in windows.h


def _check_conv(*arrays: NDArray) -> None:
    check_one_device("conv", *arrays)
    if arrays[0]._dtype == "bool":
        raise DTypeError("[conv] no convolution of bool arrays (accepted: any number dtype)")


def _contiguous_images(image: NDArray) -> Iterator[tuple[slice, NDArray]]:
    """An image (N, H, W, C), or contiguous copies of some of the N at a time, of IMAGE_BYTES or one: which, and their pixels.

    The memory of one copy is that of the next.
    """
    N, *rest = image._shape
    if image._contiguous or not N:
        yield slice(0, N), image
        return
    most = min(max(IMAGE_BYTES // max(math.prod(rest) * dt.ROWS[image._dtype].itemsize, 1), 1), N)
    copies = _workspace((most, *rest), image._dtype, image._device)
    for start in range(0, N, most):
        part = copies[: min(most, N - start)]
        part[:] = image[start : start + most]
        yield slice(start, start + len(part)), part


def _as_pixels(image: NDArray) -> NDArray:
    """(N, H, W, C) -> (N H W, C), sharing memory where that is contiguous."""
    image = image if image._contiguous else image.compact()
    return image.reshape((math.prod(image._shape[:3]), image._shape[3]))


def _are_pixels(image: NDArray, rows: Windows, cols: Windows) -> bool:
    """Whether each pixel is a window, so that there is a product of matrices to be had."""
    _, H, W, _ = image._shape
    return (rows, cols) == ((H, 1, 1, 0, H), (W, 1, 1, 0, W))


def conv(image: NDArray, kernel: NDArray, rows: Windows, cols: Windows) -> NDArray:
    """Each window of the image (N, H, W, C) times the kernel (K, L, C, O): (N, windows along rows, windows along cols, O).

    rows, cols: the windows along H and W, of K and L pixels; pixels outside of the image are zero. image and kernel share a dtype.
    raises: DTypeError for bool.
    """
    _check_conv(image, kernel)
    C, O = kernel._shape[2:]  # noqa: E741
    out = _new((len(image), rows[4], cols[4], O), image._dtype, image._device)
    factors = kernel.compact().reshape((math.prod(kernel._shape[:3]), O))
    for which, part in _contiguous_images(image) if out.size else ():
        to = out[which]
        if _are_pixels(part, rows, cols):
            matmul(_as_pixels(part), factors, out=_as_pixels(to))
            continue
        image._device.conv_forward(
            part.contiguous_handle(), factors.contiguous_handle(), to.contiguous_handle(), len(part), C, rows, cols, O
        )
    return out


def conv_backward(image: NDArray, dy: NDArray, rows: Windows, cols: Windows) -> NDArray:
    """The gradient of ``conv``'s kernel, (K, L, C, O), given that of its result, (N, windows along rows, windows along cols, O).

    The image's is a convolution of dy. float32 of 16-bit floats, whose sums would lose what they add. raises: DTypeError for bool.
    """
    _check_conv(image, dy)
    C, O = image._shape[3], dy._shape[3]  # noqa: E741
    dtype = dt.accumulator(image._dtype) if dt.is_float(image._dtype) else image._dtype
    out = _new((rows[1], cols[1], C, O), dtype, image._device)
    for which, part in _contiguous_images(image):
        grad, accumulate = dy[which], which.start > 0
        if _are_pixels(part, rows, cols):
            matmul(_as_pixels(part).permute((1, 0)), _as_pixels(grad), out=_as_pixels(out), accumulate=accumulate)
            continue
        image._device.conv_backward(
            part.contiguous_handle(), grad.contiguous_handle(), out.contiguous_handle(), len(part), C, rows, cols, O, accumulate
        )
    return out


# --- softmax family, over the last axis ---


def _by_rows(op: str, function: str, *arrays: NDArray) -> NDArray:
    """The device's ``function`` of the rows of arrays of one shape; an array of that shape."""
    _check(op, *arrays)
    x = arrays[0]
    rows, cols = _rows_cols(op, x)
    out = _new(x._shape, x._dtype, x._device)
    getattr(x._device, function)(*[a.contiguous_handle() for a in arrays], out._handle, rows, cols)
    return out


def softmax(x: NDArray) -> NDArray:
    """(..., C) -> (..., C)."""
    return _by_rows("softmax", "softmax_forward", x)


def softmax_backward(y: NDArray, dy: NDArray) -> NDArray:
    """The gradient of the input, given the output y and its gradient, both (..., C)."""
    return _by_rows("softmax", "softmax_backward", y, dy)


def log_softmax(x: NDArray) -> NDArray:
    """(..., C) -> (..., C)."""
    return _by_rows("log_softmax", "log_softmax_forward", x)


def log_softmax_backward(y: NDArray, dy: NDArray) -> NDArray:
    """The gradient of the input, given the output y and its gradient, both (..., C)."""
    return _by_rows("log_softmax", "log_softmax_backward", y, dy)


def logsumexp(x: NDArray) -> NDArray:
    """(..., C) -> (...): log of the sum of exponentials over the last axis."""
    _check("logsumexp", x)
    rows, cols = _rows_cols("logsumexp", x)
    lse = _new(x._shape[:-1], x._dtype, x._device)
    x._device.logsumexp_forward(x.contiguous_handle(), lse._handle, rows, cols)
    return lse


def logsumexp_backward(x: NDArray, lse: NDArray, dlse: NDArray) -> NDArray:
    """The gradient of x, exp(x - lse) dlse: x (..., C), lse and dlse (...); 0 where lse is -inf."""
    rows, cols = _rows_cols("logsumexp", x)
    dx = _new(x._shape, x._dtype, x._device)
    x._device.logsumexp_backward(x.contiguous_handle(), lse.contiguous_handle(), dlse.contiguous_handle(), dx._handle, rows, cols)
    return dx


# --- layer norm ---


def layer_norm(x: NDArray, weight: NDArray, bias: NDArray, eps: float) -> tuple[NDArray, NDArray, NDArray]:
    """(y, mean, rstd): x normalized over its last axis, and its statistics (..., ) in float32 or wider."""
    _check("layer_norm", x, weight, bias)
    rows, cols = _rows_cols("layer_norm", x)
    if weight._shape != (cols,) or bias._shape != (cols,):
        raise ShapeError(f"[layer_norm] weight is {weight._shape}, bias is {bias._shape} (accepted: ({cols},))")
    wide = dt.accumulator(x._dtype)
    y = _new(x._shape, x._dtype, x._device)
    mean, rstd = _new(x._shape[:-1], wide, x._device), _new(x._shape[:-1], wide, x._device)
    x._device.layer_norm_forward(
        x.contiguous_handle(), weight.contiguous_handle(), bias.contiguous_handle(),
        y._handle, mean._handle, rstd._handle, rows, cols, eps,
    )  # fmt: skip
    return y, mean, rstd


def layer_norm_backward(dy: NDArray, x: NDArray, weight: NDArray, mean: NDArray, rstd: NDArray):
    """(dx (..., C), dweight (C,), dbias (C,)), given dy and x (..., C) and what ``layer_norm`` gave beside y."""
    rows, cols = _rows_cols("layer_norm", x)
    device = x._device
    dx = _new(x._shape, x._dtype, device)
    dweight, dbias = _new((cols,), x._dtype, device), _new((cols,), x._dtype, device)
    workspace = _workspace((COLUMN_PARTIALS, 2, cols), mean._dtype, device)
    device.layer_norm_backward(
        dy.contiguous_handle(), x.contiguous_handle(), weight.contiguous_handle(), mean.contiguous_handle(),
        rstd.contiguous_handle(), dx._handle, dweight._handle, dbias._handle, workspace._handle, rows, cols,
    )  # fmt: skip
    return dx, dweight, dbias


# --- batch norm ---


def batch_norm(x: NDArray, weight: NDArray, bias: NDArray, eps: float) -> tuple[NDArray, NDArray, NDArray]:
    """(y, mean, var): x (N, C) normalized over its first axis, and its statistics (C,) in float32 or wider."""
    _check("batch_norm", x, weight, bias)
    if x.ndim != 2 or len(x) == 0 or not x._shape[1:] == weight._shape == bias._shape:
        shapes = f"x is {x._shape}, weight is {weight._shape}, bias is {bias._shape}"
        raise ShapeError(f"[batch_norm] {shapes} (accepted: (N, C), (C,), (C,), N at least 1)")
    rows, cols = x._shape
    wide, device = dt.accumulator(x._dtype), x._device
    y, mean, var = _new(x._shape, x._dtype, device), _new((cols,), wide, device), _new((cols,), wide, device)
    workspace = _workspace((COLUMN_PARTIALS, 2, cols), wide, device)
    device.batch_norm_forward(
        x.contiguous_handle(), weight.contiguous_handle(), bias.contiguous_handle(),
        y._handle, mean._handle, var._handle, workspace._handle, rows, cols, eps,
    )  # fmt: skip
    return y, mean, var


def batch_norm_backward(dy: NDArray, x: NDArray, weight: NDArray, mean: NDArray, var: NDArray, eps: float):
    """(dx (N, C), dweight (C,), dbias (C,)), given dy and x (N, C) and what ``batch_norm`` gave beside y."""
    rows, cols = x._shape
    device = x._device
    dx, dweight, dbias = [_new(shape, x._dtype, device) for shape in (x._shape, (cols,), (cols,))]
    workspace = _workspace((COLUMN_PARTIALS, 2, cols), mean._dtype, device)
    device.batch_norm_backward(
        dy.contiguous_handle(), x.contiguous_handle(), weight.contiguous_handle(), mean.contiguous_handle(),
        var.contiguous_handle(), dx._handle, dweight._handle, dbias._handle, workspace._handle, rows, cols, eps,
    )  # fmt: skip
    return dx, dweight, dbias


# --- recurrent layers ---


def _check_recurrent(op: str, gates: int, x: NDArray, w_ih: NDArray, w_hh: NDArray, bias: NDArray, **states: NDArray) -> None:
    """raises: ShapeError, DTypeError and DeviceError for what does not fit."""
    arrays = [x, *states.values(), w_ih, w_hh, bias]
    _check(op, *arrays)
    shapes, h = [a._shape for a in arrays], states["h"]
    T, B, C, H = x._shape + h._shape[-1:] if x.ndim == 3 and h.ndim else (0, 0, 0, 0)
    if T == 0 or shapes != [(T, B, C), *[(B, H)] * len(states), (C, gates * H), (H, gates * H), (gates * H,)]:
        wide = f"{gates} H" if gates > 1 else "H"
        accepted = f"(T, B, C), {'(B, H), ' * len(states)}(C, {wide}), (H, {wide}), ({wide},), T at least 1"
        raise ShapeError(f"[{op}] shapes are {shapes} (accepted: {accepted})")


def _of_input(x: NDArray, w_ih: NDArray, bias: NDArray) -> NDArray:
    """x w_ih + bias for all positions at once: what each adds h w_hh to, in place."""
    out = matmul(x, w_ih)
    out.add_in_place(bias)
    return out


def rnn(x: NDArray, h: NDArray, w_ih: NDArray, w_hh: NDArray, bias: NDArray, nonlinearity: str) -> NDArray:
    """The h of each position of x (T, B, C) from the state h (B, H): (T, B, H).

    w_ih: (C, H); w_hh: (H, H); bias: (H,); nonlinearity: "tanh" or "relu".
    """
    _check_recurrent("rnn", 1, x, w_ih, w_hh, bias, h=h)
    y = _of_input(x, w_ih, bias)
    apply = getattr(x._device, f"ewise_{nonlinearity}")
    for h_t in y:
        matmul(h, w_hh, out=h_t, accumulate=True)
        handle = h_t.contiguous_handle()
        apply(handle, handle)
        h = h_t
    return y


def rnn_backward(dy: NDArray, y: NDArray, w_hh: NDArray, nonlinearity: str) -> tuple[NDArray, NDArray]:
    """(dh, dsums), given dy (T, B, H): the gradients of the first h (B, H) and of what went into the nonlinearity, (T, B, H)."""
    dsums = dy.copy()
    w_hh_turned = w_hh.T.compact()  # once, for T products, which read its rows then
    apply = getattr(y._device, f"ewise_{nonlinearity}_backward")
    states, gradients = list(y), list(dsums)
    for t in range(len(states) - 1, -1, -1):
        if t + 1 < len(states):
            matmul(gradients[t + 1], w_hh_turned, out=gradients[t], accumulate=True)
        handle = gradients[t].contiguous_handle()
        apply(states[t].contiguous_handle(), handle, handle)
    return matmul(gradients[0], w_hh_turned), dsums


def lstm(x: NDArray, h: NDArray, c: NDArray, w_ih: NDArray, w_hh: NDArray, bias: NDArray) -> tuple[NDArray, ...]:
    """(y, last c, cells, gates) of x (T, B, C) from the states h and c (B, H): y (T, B, H) is the h of each position. For backward:
    cells (T, B, H), the c of each, in float32 or wider, and gates (T, B, 4 H), what i, f, g and o were.

    w_ih: (C, 4 H); w_hh: (H, 4 H); bias: (4 H,).
    """
    _check_recurrent("lstm", 4, x, w_ih, w_hh, bias, h=h, c=c)
    (T, B), H = x._shape[:2], h._shape[1]
    gates = _of_input(x, w_ih, bias)
    y = _new((T, B, H), x._dtype, x._device)
    cells = _new((T, B, H), dt.accumulator(x._dtype), x._device)
    before = c.astype(cells._dtype, copy=False).contiguous_handle()
    for gate, cell, h_t in zip(gates, cells, y):
        matmul(h, w_hh, out=gate, accumulate=True)
        after = cell.contiguous_handle()
        x._device.lstm_cell_forward(gate.contiguous_handle(), before, after, h_t.contiguous_handle(), B, H)
        h, before = h_t, after
    return y, cell.astype(x._dtype), cells, gates


def lstm_backward(dy: NDArray | None, dc: NDArray | None, c: NDArray, w_hh: NDArray, cells: NDArray, gates: NDArray):
    """(dh, dc), the gradients of the first h and c, (B, H), given those of y (T, B, H) and of the last c; None is zeros.

    ``gates`` (T, B, 4 H) is overwritten with the gradients of what went into sigmoid and tanh.
    """
    T, B, H = cells._shape
    dtype, device = gates._dtype, gates._device
    dh = full((B, H), 0, dtype, device)
    dc = full((B, H), 0, cells._dtype, device) if dc is None else dc.astype(cells._dtype)
    dy = full((B, H), 0, dtype, device).broadcast_to(cells._shape) if dy is None else dy
    states = [c.astype(cells._dtype, copy=False), *cells]
    w_hh_turned = w_hh.T.compact()  # once, for T products, which read its rows then
    for t in range(T - 1, -1, -1):
        gate = gates[t : t + 1].reshape((B, 4 * H))
        device.lstm_cell_backward(
            gate.contiguous_handle(), states[t].contiguous_handle(), states[t + 1].contiguous_handle(),
            dy[t : t + 1].contiguous_handle(), dh._handle, dc._handle, B, H,
        )  # fmt: skip
        matmul(gate, w_hh_turned, out=dh)
    return dh, dc.astype(dtype, copy=False)


# --- rotary embedding ---


def rotary(x: NDArray, cos: NDArray, sin: NDArray, inverse: bool = False, out: NDArray | None = None) -> NDArray:
    """x (B, H, T, D), any strides, with the first 2 * cos.shape[1] of D rotated by position; cos, sin (>= T, rot / 2).

    out: where to put it, any view.
    """
    _check("rotary", x, others=(cos, sin))
    if x.ndim != 4 or cos.ndim != 2 or cos._shape != sin._shape:
        raise ShapeError(f"[rotary] x is {x._shape}, cos is {cos._shape}, sin is {sin._shape} (accepted: 4-D and equal 2-D)")
    if cos._dtype != "float32" or sin._dtype != "float32":
        raise DTypeError(f"[rotary] cos is {cos._dtype}, sin is {sin._dtype} (accepted: float32)")
    B, H, T, D = x._shape
    rot = 2 * cos._shape[1]
    if rot > D or cos._shape[0] < T:
        raise ShapeError(f"[rotary] tables {cos._shape} do not fit x {x._shape}: need at least T rows and rot <= D")
    if out is None:
        out = _new(x._shape, x._dtype, x._device)
    x._device.rotary(
        x._handle, x._strides, x._offset, cos.contiguous_handle(), sin.contiguous_handle(), _from_first(out), out._strides,
        B, H, T, D, rot, inverse,
    )  # fmt: skip
    return out


# --- embedding ---


def embedding(weight: NDArray, ids: NDArray) -> NDArray:
    """one_hot(ids) @ weight as a gather: weight (V, D), ids (...) -> (..., D). raises: IndexError for an id outside 0..V-1."""
    ids = _whole_ids("embedding", ids)
    _check("embedding", weight, others=(ids,))
    if weight.ndim != 2:
        raise ShapeError(f"[embedding] weight is {weight._shape} (accepted: (vocabulary, features))")
    return take_rows(weight, ids)


def take_rows(weight: NDArray, ids: NDArray) -> NDArray:
    """weight[ids]: weight (V, D) of any dtype, ids (...) int32 or int64 -> (..., D). raises: IndexError for an id outside them."""
    vocab, dim = weight._shape
    out = _new(ids._shape + (dim,), weight._dtype, weight._device)
    weight._device.embedding_forward(weight.contiguous_handle(), ids.contiguous_handle(), out._handle, ids.size, vocab, dim)
    return out


def embedding_backward(dy: NDArray, ids: NDArray, vocab: int, into: NDArray | None = None) -> NDArray:
    """The gradient of the weight, (V, D): rows of dy summed by id, in order of position. into: add to this instead."""
    ids = _as_ids(ids)
    dim = dy._shape[-1]
    dweight = into if into is not None else _new((vocab, dim), dy._dtype, dy._device)
    workspace = _workspace((ids.size + vocab + 1,), "int32", dy._device)
    dy._device.embedding_backward(
        dy.contiguous_handle(), ids.contiguous_handle(), dweight._handle, workspace._handle, ids.size, vocab, dim,
        into is not None,
    )  # fmt: skip
    if into is not None:
        into.mark_written()
    return dweight


def put_rows(rows: NDArray, ids: NDArray, weight: NDArray) -> None:
    """weight[ids] = rows (n, D) in place; weight (V, D) is contiguous; of ids (n), -1 puts none, and no other comes twice."""
    vocab, dim = weight._shape
    weight._device.embedding_put(rows.contiguous_handle(), ids._handle, weight.contiguous_handle(), ids.size, vocab, dim)
    weight.mark_written()


def one_hot(ids: NDArray, depth: int, dtype: str = "float32") -> NDArray:
    """(...) -> (..., depth). raises: IndexError for an id outside 0..depth-1."""
    ids = _whole_ids("one_hot", ids)
    out = _new(as_shape((*ids._shape, depth)), dt.name_of(dtype), ids._device)
    ids._device.require().one_hot(ids.contiguous_handle(), out._handle, ids.size, depth)
    return out


# --- cross entropy ---


def cross_entropy(logits: NDArray, targets: NDArray, ignore_index: int = IGNORE_INDEX) -> tuple[NDArray, NDArray]:
    """(loss (N), lse (N, 2)): logits (N, V), targets (N). Rows whose target is ignore_index have loss 0.

    lse is the sum of its two parts, the largest logit and the log of a sum of exponentials, which together keep the digits of both.
    """
    targets = _whole_ids("cross_entropy", targets)
    _check("cross_entropy", logits, others=(targets,))
    if logits.ndim != 2 or targets._shape != logits._shape[:1]:
        raise ShapeError(f"[cross_entropy] logits are {logits._shape}, targets {targets._shape} (accepted: (N, V) and (N,))")
    rows, cols = logits._shape
    loss = _new((rows,), dt.accumulator(logits._dtype), logits._device)
    lse = _new((rows, 2), dt.accumulator(logits._dtype), logits._device)
    logits._device.cross_entropy_forward(
        logits.contiguous_handle(), targets.contiguous_handle(), loss._handle, lse._handle, rows, cols, ignore_index
    )
    return loss, lse


def cross_entropy_backward(logits: NDArray, targets: NDArray, lse: NDArray, dloss: NDArray, ignore_index: int) -> NDArray:
    """(softmax(logits) - one_hot(targets)) dloss (N): logits (N, V); 0 in rows whose target is ignore_index."""
    targets = _as_ids(targets)
    rows, cols = logits._shape
    dlogits = _new(logits._shape, logits._dtype, logits._device)
    logits._device.cross_entropy_backward(
        logits.contiguous_handle(), targets.contiguous_handle(), lse.contiguous_handle(), dloss.contiguous_handle(),
        dlogits._handle, rows, cols, ignore_index,
    )  # fmt: skip
    return dlogits


def targets_that_count(targets: NDArray, ignore_index: int, dtype: str) -> NDArray:
    """() or (1,) of ``dtype``: how many targets are not ignore_index, at least 1, since it divides sums."""
    if ignore_index == IGNORE_NOTHING and targets._dtype != "int64":  # in which a user's targets may be that number
        return full((), max(targets.size, 1), dtype, targets._device)
    return (targets != ignore_index).astype(dtype).sum().maximum(1.0)


def _chunk_rows(rows: int, most: int) -> int:
    """How many rows are taken at a time, ``most`` at most: chunks of one size, the last perhaps shorter, in whole tiles where these
    are small beside ``most``, else in whole panels. The same on every device, or a plan would not know it."""
    panel = TILE_ROWS if most >= 4 * TILE_ROWS else min(most, PANEL_ROWS)
    chunks = max(1, -(-rows // (most - most % panel)))
    return max(1, min(rows, -(-rows // (chunks * panel)) * panel))


def _check_targets(op: str, targets: np.ndarray, vocab: int, ignore_index: int) -> None:
    wrong = np.flatnonzero(((targets < 0) | (targets >= vocab)) & (targets != ignore_index))
    if len(wrong):
        at = wrong[0]
        raise IndexError(f"[{op}] target {targets[at]} at position {at} is outside the classes (0..{vocab - 1})") from None


def linear_cross_entropy(
    hidden: NDArray,
    weight: NDArray,
    targets: NDArray,
    ignore_index: int,
    with_gradients: tuple[bool, bool],
    chunk_bytes: int,
    compute_dtype: str | None,
) -> tuple[NDArray, NDArray | None, NDArray | None]:
    """Mean cross entropy of ``hidden @ weight`` against ``targets`` without the (N, V) logits.

    hidden: (N, D); weight: (D, V); targets: (N). Returns (loss, dhidden, dweight), the gradients of the loss itself, None where
    ``with_gradients`` has False for it. Rows are taken in chunks whose logits stay within ``chunk_bytes``; one row is the least,
    so the hard cap is max(chunk_bytes, one row). Each logit is computed once: three matrix products at most.
    compute_dtype: what hidden, weight and logits are cast to; the gradients are float32 then, and with 16-bit inputs.
    """
    targets = _whole_ids("linear_cross_entropy", targets)
    if compute_dtype is not None:
        hidden, weight = hidden.astype(compute_dtype, copy=False), weight.astype(compute_dtype, copy=False)
    _check("linear_cross_entropy", hidden, weight, others=(targets,))
    if hidden.ndim != 2 or weight.ndim != 2 or hidden._shape[1] != weight._shape[0] or targets._shape != hidden._shape[:1]:
        raise ShapeError(
            f"[linear_cross_entropy] hidden is {hidden._shape}, weight {weight._shape}, targets {targets._shape} "
            "(accepted: (N, D), (D, V), (N,))"
        )
    rows, vocab = hidden._shape[0], weight._shape[1]
    device, dtype, wide = hidden._device, hidden._dtype, dt.accumulator(hidden._dtype)
    at_once = _chunk_rows(rows, max(1, chunk_bytes // max(1, vocab * dt.ROWS[dtype].itemsize)))
    hidden = hidden if hidden._contiguous else hidden.copy()
    counted = targets_that_count(targets, ignore_index, wide)
    losses = _new((rows,), wide, device)
    dhidden = dweight = scale = None
    if with_gradients[0]:
        dhidden = _new(hidden._shape, wide, device)
    if with_gradients[1]:
        dweight = full(weight._shape, 0, wide, device) if rows == 0 else _new(weight._shape, wide, device)
    made = [grad for grad in (dhidden, dweight) if grad is not None]
    for grad in made:
        grad.category = GRADIENT
    if made:
        if dtype == "float16":
            scale = full((at_once,), FLOAT16_GRADIENT_SCALE, wide, device)
        else:
            scale = (1.0 / counted).broadcast_to((at_once,)).compact()
    logits_buffer = _workspace((at_once, vocab), dtype, device)
    weight_t = weight.permute((1, 0))
    starts = range(0, rows, at_once)
    # Between the second chunk and the last all take the same memory: a plan of millions of rows need not go through them.
    for start in sorted({*starts[:2], *starts[-1:]}) if device.name == "meta" else starts:
        part = slice(start, min(start + at_once, rows))
        n = part.stop - part.start
        logits = logits_buffer[0:n]
        ids = targets[part]
        matmul(hidden[part], weight, out=logits)
        lse = _new((n, 2), wide, device)
        try:
            device.cross_entropy_forward(
                logits.contiguous_handle(), ids.contiguous_handle(), losses[part].contiguous_handle(), lse._handle,
                n, vocab, ignore_index,
            )  # fmt: skip
        except IndexError:  # whose position counts from the first row of the chunk
            _check_targets("linear_cross_entropy", targets.numpy(), vocab, ignore_index)
            raise
        if scale is not None:
            device.cross_entropy_backward(
                logits.contiguous_handle(), ids.contiguous_handle(), lse._handle, scale[:n].contiguous_handle(),
                logits.contiguous_handle(), n, vocab, ignore_index,
            )  # fmt: skip
        if dhidden is not None:
            matmul(logits, weight_t, out=dhidden[part])
        if dweight is not None:
            matmul(hidden[part].permute((1, 0)), logits, out=dweight, accumulate=start > 0)
    for grad in made if dtype == "float16" else ():
        grad.mul_in_place((1.0 / FLOAT16_GRADIENT_SCALE) / counted)
    loss = losses.sum()
    return loss / counted.reshape(loss.shape), dhidden, dweight


# --- optimizer ---


def _check_update(op: str, param: NDArray, grad: NDArray, *states: NDArray) -> None:
    """raises: ShapeError if the sizes differ; DTypeError for a param that is not floating."""
    _check(op, param, others=(grad, *states))
    size = param.size
    if any(array.size != size for array in (grad, *states)):
        shapes = " and ".join(str(state._shape) for state in states)
        raise ShapeError(f"[{op}] sizes differ: param is {param._shape}, grad is {grad._shape}, its state {shapes or 'nothing'}")


def sgd_step(param: NDArray, grad: NDArray, u: NDArray | None, lr: float, momentum: float, weight_decay: float) -> None:
    """One update of SGD in place on param and u, its momentum if it has one, all compact and of one size.

    raises: ShapeError if the sizes differ; DTypeError for a param that is not floating.
    """
    _check_update("sgd_step", param, grad, *([] if u is None else [u]))
    state = param._handle.view(0, 0) if u is None else u._handle
    param._device.sgd_step(param._handle, grad.contiguous_handle(), state, lr, momentum, weight_decay)
    param.mark_written()


def adam_step(
    param: NDArray, grad: NDArray, m: NDArray, v: NDArray, grad_scale: NDArray,
    lr: float, beta1: float, beta2: float, eps: float, l2: float, weight_decay: float, step: int,
) -> None:  # fmt: skip
    """One update of Adam or AdamW in place on param, m and v, all compact and of one size. grad_scale: (1,) float32.

    raises: ShapeError if the sizes differ; DTypeError for a param that is not floating.
    """
    _check_update("adam_step", param, grad, m, v)
    param._device.adam_step(
        param._handle, grad.contiguous_handle(), m._handle, v._handle, grad_scale._handle,
        lr, beta1, beta2, eps, l2, weight_decay, step,
    )  # fmt: skip
    param.mark_written()


def unscale(grads: Iterable[NDArray], factor: float) -> NDArray:
    """Multiplies compact arrays of one device by ``factor`` in place; (1,) int32: 1 if that leaves an infinity or a NaN in any."""
    nonfinite = None
    for grad in grads:
        if nonfinite is None:
            nonfinite = full((1,), 0, "int32", grad._device)
            nonfinite.category = WORKSPACE
        grad._device.unscale(grad._handle, factor, nonfinite._handle)
        grad.mark_written()
    assert nonfinite is not None
    return nonfinite


def sumsq(x: NDArray) -> NDArray:
    """Sum of the squares of all elements, (1,), float32 or float64."""
    out = _new((1,), dt.accumulator(x._dtype), x._device)
    x._device.reduce_sumsq(x.contiguous_handle(), out._handle, 1, x.size, 1)
    return out


# --- attention over a block layout ---


def _rows_form(x: NDArray) -> tuple[Any, tuple[int, ...]]:
    """(handle from the first element on, strides of B, H, T); the last axis made contiguous."""
    if (x._strides[3] != 1 and x._shape[3] != 1) or min(x._strides) < 0:
        x = x.copy()
    return _from_first(x), x._strides[:3]


def _check_head(op: str, head_dim: int) -> None:
    if head_dim > MAX_HEAD:
        raise ShapeError(f"[{op}] heads of {head_dim} features (accepted: at most {MAX_HEAD})")


def _check_attention(q: NDArray, k: NDArray, v: NDArray, layout: BlockLayout) -> tuple[int, ...]:
    _check("attention", q, k, v)
    if q.ndim != 4 or k._shape != v._shape or k.ndim != 4 or q._shape[:2] != k._shape[:2] or q._shape[3] != k._shape[3]:
        raise ShapeError(
            f"[attention] q is {q._shape}, k is {k._shape}, v is {v._shape} (accepted: (B, H, T, D), (B, H, S, D) twice)"
        )
    _check_layout("attention", layout)
    B, H, T, D = q._shape
    S = k._shape[2]
    _check_head("attention", D)
    if -(-T // layout.block) != layout.block_rows or -(-S // layout.block) != layout.block_cols:
        raise ShapeError(f"[attention] {layout} does not fit {T} queries and {S} keys")
    if H % layout.heads:
        raise ShapeError(f"[attention] a layout of {layout.heads} heads does not divide {H} heads")
    return B, H, T, S, D


def attention(q: NDArray, k: NDArray, v: NDArray, layout: BlockLayout, scale: float) -> tuple[NDArray, NDArray]:
    """(out (B, H, T, D), lse (B, H, T)): softmax(scale * q k^T) v over the layout's elements, with no (T, S) array.

    The memory of ``out`` is (B, T, H, D), so that merging the heads afterwards is a view.
    """
    B, H, T, S, D = _check_attention(q, k, v, layout)
    out = _new((B, T, H, D), q._dtype, q._device).permute((0, 2, 1, 3))
    lse = _new((B, H, T), dt.accumulator(q._dtype), q._device)
    index = layout.on(q._device)
    (q_h, q_s), (k_h, k_s), (v_h, v_s) = _rows_form(q), _rows_form(k), _rows_form(v)
    q._device.attention_forward(
        q_h, q_s, k_h, k_s, v_h, v_s, out._handle, out._strides[:3], lse._handle,
        index.row_ptr._handle, index.col_idx._handle, index.partial._handle,
        B, H, T, S, D, layout.heads, layout.block, layout.q_start, scale,
    )  # fmt: skip
    return out, lse


def attention_backward(
    dout: NDArray, q: NDArray, k: NDArray, v: NDArray, out: NDArray, lse: NDArray, layout: BlockLayout, scale: float
) -> tuple[NDArray, NDArray, NDArray]:
    """(dq, dk, dv), each of memory (B, H, T, D); scores are recomputed block by block from lse."""
    B, H, T, S, D = _check_attention(q, k, v, layout)
    device = q._device
    delta = _workspace((B, H, T), lse._dtype, device)
    dq, dk, dv = (_new(x._shape, q._dtype, device) for x in (q, k, v))
    index = layout.on(device)
    (do_h, do_s), (o_h, o_s) = _rows_form(dout), _rows_form(out)
    (q_h, q_s), (k_h, k_s), (v_h, v_s) = _rows_form(q), _rows_form(k), _rows_form(v)
    device.attention_backward(
        do_h, do_s, q_h, q_s, k_h, k_s, v_h, v_s, o_h, o_s, lse.contiguous_handle(), delta._handle,
        dq._handle, dq._strides[:3], dk._handle, dk._strides[:3], dv._handle, dv._strides[:3],
        index.row_ptr._handle, index.col_idx._handle, index.partial._handle,
        index.col_ptr._handle, index.row_idx._handle, index.t_partial._handle,
        B, H, T, S, D, layout.heads, layout.block, layout.q_start, scale,
    )  # fmt: skip
    return dq, dk, dv


def attention_decode(
    q: NDArray, k: NDArray, v: NDArray, key_cache: NDArray, value_cache: NDArray, positions: NDArray,
    layout: BlockLayout, scale: float,
) -> NDArray:  # fmt: skip
    """Attention of one new position of each sequence: q, k, v (B, H, 1, D) -> (B, H, 1, D), memory (B, 1, H, D).

    k and v become row positions[b] (int32) of sequence b in the caches (B, H, S, D); the rows up to it take part that lie in blocks
    which the causal ``layout`` of S x S positions names, and no other is read.
    """
    _check("attention_decode", q, k, v, key_cache, value_cache)
    B, H, S, D = key_cache._shape
    if any(x._shape != (B, H, 1, D) for x in (q, k, v)) or value_cache._shape != key_cache._shape or positions._shape != (B,):
        raise ShapeError(
            f"[attention_decode] q is {q._shape}, k {k._shape}, v {v._shape}, the caches {key_cache._shape} and "
            f"{value_cache._shape}, positions {positions._shape} (accepted: (B, H, 1, D), (B, H, S, D), (B,))"
        )
    _check_head("attention_decode", D)
    if not layout.causal or layout.q_start or {layout.block_rows, layout.block_cols} != {-(-S // layout.block)} or H % layout.heads:
        raise ShapeError(f"[attention_decode] {layout} does not fit {S} positions of {H} heads (accepted: a causal one that does)")
    out = _new((B, 1, H, D), q._dtype, q._device)
    index = layout.on(q._device)
    (q_h, q_s), (k_h, k_s), (v_h, v_s) = _rows_form(q), _rows_form(k), _rows_form(v)
    q._device.attention_decode(
        q_h, q_s[:2], k_h, k_s[:2], v_h, v_s[:2], key_cache._handle, value_cache._handle, positions.contiguous_handle(),
        out._handle, index.row_ptr._handle, index.col_idx._handle, B, H, S, D, layout.heads, layout.block, scale,
    )  # fmt: skip
    key_cache.mark_written()
    value_cache.mark_written()
    return out.permute((0, 2, 1, 3))


# --- block-sparse products ---


def _stored_form(x: NDArray) -> tuple[Any, bool]:
    """(handle, transposed): a (batch, rows, cols) array that may be a transposed view of a contiguous one."""
    swapped = x.permute((0, 2, 1))
    if not x._contiguous and swapped._contiguous:
        return swapped.contiguous_handle(), True
    return x.contiguous_handle(), False


def _check_blocks(op: str, blocks: NDArray, layout: BlockLayout) -> int:
    _check_layout(op, layout)
    expected = (layout.nnz, layout.block, layout.block)
    if blocks._shape[1:] != expected:
        raise ShapeError(f"[{op}] blocks are {blocks._shape} (accepted: (batch, {', '.join(map(str, expected))}))")
    if blocks._shape[0] % layout.heads:
        raise ShapeError(f"[{op}] a batch of {blocks._shape[0]} is no multiple of the layout's {layout.heads} heads")
    return blocks._shape[0]


def blocksparse_sdd(a: NDArray, b: NDArray, layout: BlockLayout) -> NDArray:
    """The layout's blocks of a @ b: a (batch, m, k), b (batch, k, n) -> (batch, nnz, block, block)."""
    _check("blocksparse_sdd", a, b)
    _check_layout("blocksparse_sdd", layout)
    rows, cols = layout.shape
    if a.ndim != 3 or b.ndim != 3 or a._shape[0] != b._shape[0] or a._shape[2] != b._shape[1]:
        raise ShapeError(f"[blocksparse_sdd] a is {a._shape}, b is {b._shape} (accepted: (batch, m, k) and (batch, k, n))")
    if (a._shape[1], b._shape[2]) != (rows, cols) or a._shape[0] % layout.heads:
        raise ShapeError(f"[blocksparse_sdd] a is {a._shape}, b is {b._shape}: {layout} needs m = {rows} and n = {cols}")
    batch, m, k = a._shape
    out = _new((batch, layout.nnz, layout.block, layout.block), a._dtype, a._device)
    index = layout.on(a._device)
    (a_h, trans_a), (b_h, trans_b) = _stored_form(a), _stored_form(b)
    a._device.blocksparse_sdd(
        a_h, trans_a, b_h, trans_b, out._handle, index.row_ptr._handle, index.col_idx._handle,
        batch, m, cols, k, layout.nnz, layout.heads, layout.block,
    )  # fmt: skip
    return out


def blocksparse_dsd(blocks: NDArray, b: NDArray, layout: BlockLayout, transpose: bool = False) -> NDArray:
    """S @ b, or S^T @ b: S block-sparse (batch, nnz, block, block), b (batch, k, n) -> (batch, m, n)."""
    _check("blocksparse_dsd", blocks, b)
    batch = _check_blocks("blocksparse_dsd", blocks, layout)
    m, k = layout.shape[::-1] if transpose else layout.shape
    if b.ndim != 3 or b._shape[:2] != (batch, k):
        raise ShapeError(f"[blocksparse_dsd] b is {b._shape} (accepted: ({batch}, {k}, n))")
    n = b._shape[2]
    out = _new((batch, m, n), b._dtype, b._device)
    i = layout.on(b._device)
    ptr, idx, entry = (i.col_ptr, i.row_idx, i.col_entry) if transpose else (i.row_ptr, i.col_idx, i.row_entry)
    b_h, trans_b = _stored_form(b)
    b._device.blocksparse_dsd(
        blocks.contiguous_handle(), transpose, b_h, trans_b, out._handle, ptr._handle, idx._handle, entry._handle,
        batch, m, n, k, layout.nnz, layout.heads, layout.block,
    )  # fmt: skip
    return out


def blocksparse_dds(a: NDArray, blocks: NDArray, layout: BlockLayout, transpose: bool = False) -> NDArray:
    """a @ S, or a @ S^T: a (batch, m, k), S block-sparse -> (batch, m, n)."""
    _check("blocksparse_dds", a, blocks)
    batch = _check_blocks("blocksparse_dds", blocks, layout)
    k, n = layout.shape[::-1] if transpose else layout.shape
    if a.ndim != 3 or (a._shape[0], a._shape[2]) != (batch, k):
        raise ShapeError(f"[blocksparse_dds] a is {a._shape} (accepted: ({batch}, m, {k}))")
    m = a._shape[1]
    out = _new((batch, m, n), a._dtype, a._device)
    i = layout.on(a._device)
    # op(S)'s block columns: S's own columns, or S's rows when it is used transposed.
    ptr, idx, entry = (i.row_ptr, i.col_idx, i.row_entry) if transpose else (i.col_ptr, i.row_idx, i.col_entry)
    a_h, trans_a = _stored_form(a)
    a._device.blocksparse_dds(
        a_h, trans_a, blocks.contiguous_handle(), transpose, out._handle, ptr._handle, idx._handle, entry._handle,
        batch, m, n, k, layout.nnz, layout.heads, layout.block,
    )  # fmt: skip
    return out


# --- random numbers ---


def dropout(x: NDArray, p: float, seed: int, offset: int) -> NDArray:
    """x / (1 - p) where uniform(seed, offset, i) >= p, else 0. The same call on dy is the gradient."""
    _check("dropout", x)
    out = _new(x._shape, x._dtype, x._device)
    x._device.dropout(x.contiguous_handle(), out._handle, p, seed, offset)
    return out


def arange(n: int, dtype: str, device) -> NDArray:
    """0, 1, ..., n - 1."""
    device.require()
    out = _new(as_shape(n), dt.name_of(dtype), device)
    device.arange(out._handle)
    return out
