"""The reference backend: what every kernel means, in numpy. A row or a short function per op.

The contract (argument order, dtypes, which array is written) is ``src/common/kernel_api.h``; this module has the names
of a compiled backend and is what the others are compared with. Clarity before speed.
"""

from __future__ import annotations

import functools
import math
import types

import numpy as np

from .. import dtype as dt
from . import shapes
from .host_memory import ALLOCATOR_FUNCTIONS, HostAllocator, HostArray, Storage

__device_name__ = "numpy"
_allocator = HostAllocator("cpu_numpy")
globals().update({name: getattr(_allocator, name) for name in ALLOCATOR_FUNCTIONS})


def num_threads() -> int:
    return 1


def set_num_threads(n: int) -> None:
    """The reference runs on one thread whatever ``n``."""


def sync() -> None:
    """Every call here has finished when it returns."""


class Array(HostArray):
    """A flat numpy array with its storage's account."""

    __slots__ = ("array",)

    def __init__(self, size: int, dtype: str = "float32"):
        np_dtype = dt.to_numpy(dtype)
        nbytes = size * np_dtype.itemsize
        if not 0 <= nbytes < 1 << 63:
            raise ValueError(f"impossible array size {size}")
        try:
            self.array = np.empty(size, np_dtype)
        except MemoryError:
            raise _allocator.out_of_memory(nbytes) from None
        super().__init__(size, dtype, Storage(_allocator, nbytes))

    def view(self, offset: int, size: int) -> Array:
        """The elements offset .. offset + size, sharing this memory."""
        if offset < 0 or size < 0 or offset + size > self.size:
            raise IndexError("view outside its array")
        part = Array.__new__(Array)
        HostArray.__init__(part, size, self.dtype, self.storage)
        part.array = self.array[offset : offset + size]
        return part

    def ptr(self) -> int:
        return self.array.ctypes.data


def _strided(a: Array, shape, strides, offset=0) -> np.ndarray:
    """A view. raises: IndexError if it is not inside the array, where numpy would go on into other memory."""
    first, last = shapes.reach(shape, strides, offset)
    if first < 0 or last >= a.size:
        raise IndexError(f"a view reaches elements {first} to {last} of an array of {a.size}")
    item = a.array.itemsize
    return np.lib.stride_tricks.as_strided(a.array[offset:], shape, [s * item for s in strides])


def _up(x: np.ndarray) -> np.ndarray:
    """The type that arithmetic is done in: float32 for the 16-bit floats."""
    return x.astype(np.float32) if x.dtype.itemsize == 2 else x


def _column_sums(x: np.ndarray, axis: int = 0) -> np.ndarray:
    """The sum over an axis that is not the last: numpy adds in order there, in which float32 loses digits with every element."""
    return x.sum(axis=axis, dtype=np.float64 if x.dtype.kind == "f" else None)


def _put(out: Array, value) -> None:
    out.array[...] = np.asarray(value).reshape(-1).astype(out.array.dtype, copy=False)


# --- moving data ---


def to_numpy(a, shape, strides, offset):
    return np.array(_strided(a, shape, strides, offset), order="C", copy=True)


def from_numpy(a, out):
    """bfloat16 comes as its bits, uint16."""
    out.array[...] = (a.view(out.array.dtype) if out.dtype == "bfloat16" else a).reshape(-1)


def fill(out, value):
    out.array.fill(value)


def arange(out):
    _put(out, np.arange(out.size))


def strided_copy(a, a_strides, a_offset, out, out_strides, out_offset, shape):
    source = _up(_strided(a, shape, a_strides, a_offset))
    target = _strided(out, shape, out_strides, out_offset)
    if out.dtype == "uint8" and source.dtype.kind == "f":
        source = source.astype(np.int64)  # whose last byte it is; numpy itself may go by way of an int32
    target[...] = (source != 0) if out.dtype == "bool" else source.astype(target.dtype)


def strided_fill(out, strides, offset, shape, value):
    _strided(out, shape, strides, offset)[...] = value


def compact(a, out, shape, strides, offset):
    strided_copy(a, strides, offset, out, shapes.compact_strides(tuple(shape)), 0, shape)


def ewise_setitem(a, out, shape, strides, offset):
    strided_copy(a, shapes.compact_strides(tuple(shape)), 0, out, strides, offset, shape)


def scalar_setitem(size, val, out, shape, strides, offset):
    strided_fill(out, strides, offset, shape, val)


# --- elementwise: the rows of ewise_ops.def ---

_erf = np.frompyfunc(math.erf, 1, 1)
_SQRT_HALF = math.sqrt(0.5)
_SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)


def _real_erf(x):
    return np.asarray(_erf(x.astype(np.float64))).astype(x.dtype)  # a 0-d array comes back as a Python float


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _gelu_tanh_share(x):
    """(1 + tanh(u)) / 2, which would lose digits below 0."""
    return _sigmoid(2 * _SQRT_2_OVER_PI * (x + 0.044715 * x * x * x))


def _gelu_erf_backward(x, dy):
    density = np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return dy * (0.5 * (1 + _real_erf(x * _SQRT_HALF)) + x * density)


def _gelu_tanh_backward(x, dy):
    s = _gelu_tanh_share(x)
    slope = 2 * _SQRT_2_OVER_PI * (1 + 3 * 0.044715 * x * x)
    return dy * (s + x * s * (1 - s) * slope)


def _silu_backward(x, dy):
    s = _sigmoid(x)
    return dy * s * (1 + x * (1 - s))


def _power(a, b):
    if np.result_type(a, b).kind != "i":
        return np.power(a, b)
    sign = np.where(np.abs(a) == 1, np.power(a, b & 1), 0)  # an integer's reciprocal, cut off; 0 for that of 0
    return np.where(np.less(b, 0), sign, np.power(a, np.maximum(b, 0)))


UNARY = {
    "negate": np.negative,
    "abs": np.abs,
    "sign": np.sign,
    "square": np.square,
    "relu": lambda x: np.where(x > 0, x, np.where(x != x, x, x.dtype.type(0))),
    "exp": np.exp,
    "log": np.log,
    "sqrt": np.sqrt,
    "reciprocal": lambda x: 1 / x,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "sigmoid": _sigmoid,
    "erf": _real_erf,
    "silu": lambda x: x * _sigmoid(x),
    "gelu_erf": lambda x: 0.5 * x * (1 + _real_erf(x * _SQRT_HALF)),
    "gelu_tanh": lambda x: x * _gelu_tanh_share(x),
    "isnan": np.isnan,
    "isinf": np.isinf,
    "isfinite": np.isfinite,
    "logical_not": np.logical_not,
}

BINARY = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "power": _power,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
    "logical_xor": np.logical_xor,
    "relu_backward": lambda x, dy: np.where(x <= 0, np.zeros_like(dy), dy),
    "tanh_backward": lambda y, dy: dy * (1 - y * y),
    "sigmoid_backward": lambda y, dy: dy * y * (1 - y),
    "silu_backward": _silu_backward,
    "gelu_erf_backward": _gelu_erf_backward,
    "gelu_tanh_backward": _gelu_tanh_backward,
}


# NUM in ewise_ops.def: numpy has a meaning for some of these on bool.
_OF_NUMBERS = {"negate", "abs", "sign", "square", "relu", "sub", "power", "relu_backward"}


def _check_kernel(name, dtype):
    if dtype == "bool" and name in _OF_NUMBERS:
        raise ValueError(f"[{name}] no kernel for dtype bool (astype gives another)")


def _operand(name, x):
    _check_kernel(name, x.dtype)
    return _up(x)


def _unary_entry(name, function):
    def entry(a, *rest):
        if len(rest) == 1:
            (out,) = rest
            x = a.array[: out.size]
        else:
            strides, offset, out, shape = rest
            x = _strided(a, shape, strides, offset)
        _put(out, function(_operand(name, x)))

    return entry


def _binary_entry(name, function):
    def entry(a, *rest):
        if len(rest) == 2:
            b, out = rest
            x, y = a.array[: out.size], b.array[: out.size]
        else:
            a_strides, a_offset, b, b_strides, b_offset, out, shape = rest
            x, y = _strided(a, shape, a_strides, a_offset), _strided(b, shape, b_strides, b_offset)
        _put(out, function(_operand(name, x), _operand(name, y)))

    return entry


def _scalar_entry(name, function, reverse):
    def entry(a, *rest):
        if len(rest) == 2:
            val, out = rest
            x = a.array[: out.size]
        else:
            strides, offset, val, out, shape = rest
            x = _strided(a, shape, strides, offset)
        x = _operand(name, x)
        val = x.dtype.type(val)
        _put(out, function(val, x) if reverse else function(x, val))

    return entry


for _name, _function in UNARY.items():
    globals()[f"ewise_{_name}"] = _unary_entry(_name, _function)
for _name, _function in BINARY.items():
    globals()[f"ewise_{_name}"] = _binary_entry(_name, _function)
    globals()[f"scalar_{_name}"] = _scalar_entry(_name, _function, reverse=False)
    globals()[f"rscalar_{_name}"] = _scalar_entry(_name, _function, reverse=True)


def where(condition, c_strides, c_offset, a, a_strides, a_offset, b, b_strides, b_offset, out, shape):
    x, y = _strided(a, shape, a_strides, a_offset), _strided(b, shape, b_strides, b_offset)
    _put(out, np.where(_strided(condition, shape, c_strides, c_offset), x, y))


# --- reductions over the middle axis of (outer, reduce, inner) ---


def _reduce_entry(function):
    def entry(a, out, outer, reduce=None, inner=1):
        if reduce is None:  # the course's form: rows of `outer` elements
            outer, reduce = out.size, outer
        _put(out, function(_up(a.array[: outer * reduce * inner].reshape(outer, reduce, inner))))

    return entry


def _middle_sums(x: np.ndarray) -> np.ndarray:
    return x[..., 0].sum(axis=1) if x.shape[-1] == 1 else _column_sums(x, axis=1)


reduce_sum = _reduce_entry(_middle_sums)
reduce_max = _reduce_entry(lambda x: x.max(axis=1))
reduce_min = _reduce_entry(lambda x: x.min(axis=1))
reduce_prod = _reduce_entry(lambda x: x.prod(axis=1))
reduce_sumsq = _reduce_entry(lambda x: _middle_sums(np.square(x)))
reduce_argmax = _reduce_entry(lambda x: x.argmax(axis=1))
reduce_argmin = _reduce_entry(lambda x: np.argmin(x, axis=1))


# --- matrix products ---


def matmul(a, *rest):
    if len(rest) == 5:  # the course's form
        b, out, m, n, p = rest
        _put(out, _up(a.array[: m * n].reshape(m, n)) @ _up(b.array[: n * p].reshape(n, p)))
        return
    (a_offset, a_batch_strides, lda, trans_a, b, b_offset, b_batch_strides, ldb, trans_b) = rest[:9]
    out, batch_shape, m, k, n, accumulate = rest[9:]
    a_rows, b_rows = ((1, lda) if trans_a else (lda, 1)), ((1, ldb) if trans_b else (ldb, 1))
    batch_shape = tuple(batch_shape)
    x = _strided(a, batch_shape + (m, k), tuple(a_batch_strides) + a_rows, a_offset)
    y = _strided(b, batch_shape + (k, n), tuple(b_batch_strides) + b_rows, b_offset)
    product = np.matmul(_up(x), _up(y))
    _put(out, product + _up(out.array.reshape(product.shape)) if accumulate else product)


# --- convolution ---


def _windows(image, images, channels, rows, cols):
    """A matrix (windows, elements)."""
    (H, K, row_stride, top, lines), (W, L, col_stride, left, places) = rows, cols
    pixels = image.array[: images * H * W * channels].reshape(images, H, W, channels)
    around = np.zeros((images, (lines - 1) * row_stride + K, (places - 1) * col_stride + L, channels), pixels.dtype)
    inside = pixels[:, max(-top, 0) : max(around.shape[1] - top, 0), max(-left, 0) : max(around.shape[2] - left, 0)]
    first, left = max(top, 0), max(left, 0)
    around[:, first : first + inside.shape[1], left : left + inside.shape[2]] = inside
    windows = np.lib.stride_tricks.sliding_window_view(around, (K, L), axis=(1, 2))[:, ::row_stride, ::col_stride]
    return _up(windows.transpose(0, 1, 2, 4, 5, 3).reshape(images * lines * places, K * L * channels))


def conv_forward(image, kernel, out, images, channels, rows, cols, out_channels):
    windows = _windows(image, images, channels, rows, cols)
    _put(out, windows @ _rows(kernel, windows.shape[1], out_channels))


def conv_backward(image, dy, dkernel, images, channels, rows, cols, out_channels, accumulate):
    windows = _windows(image, images, channels, rows, cols)
    product = windows.T @ _rows(dy, windows.shape[0], out_channels)
    _put(dkernel, product + dkernel.array.reshape(product.shape) if accumulate else product)


# --- softmax family ---


def _rows(a, rows, cols):
    return _up(a.array[: rows * cols].reshape(rows, cols))


def _lse_parts(x):
    """(shift, log of the sum of exp(x - shift)): x less the one and then the other has the digits that x - lse would lose."""
    top = x.max(axis=1, keepdims=True) if x.shape[1] else np.full((x.shape[0], 1), -np.inf, x.dtype)
    shift = np.where(np.isinf(top), 0, top)
    return shift, np.log(np.exp(x - shift).sum(axis=1, keepdims=True))


def _lse(x):
    shift, log_sum = _lse_parts(x)
    return shift + log_sum


def softmax_forward(x, y, rows, cols):
    x = _rows(x, rows, cols)
    e = np.exp(x - x.max(axis=1, keepdims=True, initial=-np.inf))  # x - lse would lose the digits of a large x
    _put(y, e / e.sum(axis=1, keepdims=True))


def softmax_backward(y, dy, dx, rows, cols):
    y, dy = _rows(y, rows, cols), _rows(dy, rows, cols)
    _put(dx, y * (dy - (dy * y).sum(axis=1, keepdims=True)))


def log_softmax_forward(x, y, rows, cols):
    x = _rows(x, rows, cols)
    shift, log_sum = _lse_parts(x)
    _put(y, x - shift - log_sum)


def log_softmax_backward(y, dy, dx, rows, cols):
    y, dy = _rows(y, rows, cols), _rows(dy, rows, cols)
    _put(dx, dy - np.exp(y) * dy.sum(axis=1, keepdims=True))


def logsumexp_forward(x, lse, rows, cols):
    _put(lse, _lse(_rows(x, rows, cols)))


def logsumexp_backward(x, lse, dlse, dx, rows, cols):
    x, lse, dlse = _rows(x, rows, cols), _rows(lse, rows, 1), _rows(dlse, rows, 1)
    _put(dx, np.where(np.isneginf(lse), 0, np.exp(x - lse)) * dlse)


# --- layer norm ---


def _mean(x):
    """Of each row, (rows, 1); NaN of rows of nothing, of which numpy's mean warns."""
    return x.sum(axis=1, keepdims=True) / x.dtype.type(x.shape[1])


def layer_norm_forward(x, weight, bias, y, mean, rstd, rows, cols, eps):
    x = _rows(x, rows, cols)
    m = _mean(x)
    r = 1 / np.sqrt(_mean(np.square(x - m)) + x.dtype.type(eps))
    _put(mean, m)
    _put(rstd, r)
    _put(y, (x - m) * r * _up(weight.array) + _up(bias.array))


def layer_norm_backward(dy, x, weight, mean, rstd, dx, dweight, dbias, workspace, rows, cols):
    x, dy = _rows(x, rows, cols), _rows(dy, rows, cols)
    m, r = _rows(mean, rows, 1), _rows(rstd, rows, 1)
    normal = (x - m) * r
    g = dy * _up(weight.array)
    inner = _mean(g * normal)
    _put(dx, r * (g - _mean(g) - normal * inner))
    _put(dweight, _column_sums(dy * normal))
    _put(dbias, _column_sums(dy))


# --- batch norm over the rows ---


def batch_norm_forward(x, weight, bias, y, mean, var, workspace, rows, cols, eps):
    x = _rows(x, rows, cols)
    m = (_column_sums(x) / rows).astype(x.dtype)
    v = (_column_sums(np.square(x - m)) / rows).astype(x.dtype)
    _put(mean, m)
    _put(var, v)
    _put(y, (x - m) * (_up(weight.array) / np.sqrt(v + x.dtype.type(eps))) + _up(bias.array))


def batch_norm_backward(dy, x, weight, mean, var, dx, dweight, dbias, workspace, rows, cols, eps):
    x, dy = _rows(x, rows, cols), _rows(dy, rows, cols)
    r = 1 / np.sqrt(_up(var.array) + x.dtype.type(eps))
    normal = (x - _up(mean.array)) * r
    of_weight, of_bias = (_column_sums(part).astype(x.dtype) for part in (dy * normal, dy))
    _put(dweight, of_weight)
    _put(dbias, of_bias)
    _put(dx, _up(weight.array) * r * (dy - of_bias / rows - normal * (of_weight / rows)))


# --- one position of an LSTM ---


def lstm_cell_forward(gates, c_before, c, h, rows, hidden):
    i, f, g, o = _rows(gates, rows, 4 * hidden).reshape(rows, 4, hidden).swapaxes(0, 1)
    i, f, g, o = _sigmoid(i), _sigmoid(f), np.tanh(g), _sigmoid(o)
    state = f * _rows(c_before, rows, hidden) + i * g
    _put(gates, np.concatenate([i, f, g, o], axis=1))
    _put(c, state)
    _put(h, o * np.tanh(state))


def lstm_cell_backward(gates, c_before, c, dh, dh_next, dc, rows, hidden):
    i, f, g, o = _rows(gates, rows, 4 * hidden).reshape(rows, 4, hidden).swapaxes(0, 1)
    before, tanh_c, dc_after = _rows(c_before, rows, hidden), np.tanh(_rows(c, rows, hidden)), _rows(dc, rows, hidden)
    dy = _rows(dh, rows, hidden) + _rows(dh_next, rows, hidden)
    d = dc_after + dy * o * (1 - tanh_c * tanh_c)
    parts = [d * g * i * (1 - i), d * before * f * (1 - f), d * i * (1 - g * g), dy * tanh_c * o * (1 - o)]
    _put(dc, d * f)
    _put(gates, np.concatenate(parts, axis=1))


# --- rotary embedding ---


def rotary(x, x_strides, x_offset, cos, sin, out, out_strides, B, H, T, D, rot, inverse):
    source = _up(_strided(x, (B, H, T, D), x_strides, x_offset))
    half = rot // 2
    c = cos.array[: T * half].reshape(T, half)
    s = sin.array[: T * half].reshape(T, half) * (-1 if inverse else 1)
    first, second = source[..., :half], source[..., half:rot]
    turned = np.concatenate([first * c - second * s, second * c + first * s, source[..., rot:]], axis=-1)
    target = _strided(out, (B, H, T, D), out_strides)
    target[...] = turned.astype(target.dtype)


# --- embedding ---


def _checked_ids(op, ids, n, limit, range_name, id_name="id", ignored=None):
    ids = ids.array[:n]
    bad = np.flatnonzero(((ids < 0) | (ids >= limit)) & (ids != ignored))
    if bad.size:
        at = int(bad[0])
        raise IndexError(f"[{op}] {id_name} {int(ids[at])} at position {at} is outside the {range_name} (0..{limit - 1})")
    return ids


def embedding_forward(weight, ids, out, n, vocab, dim):
    ids = _checked_ids("embedding", ids, n, vocab, "vocabulary")
    _put(out, weight.array.reshape(vocab, dim)[ids])


def embedding_backward(dy, ids, dweight, workspace, n, vocab, dim, accumulate):
    ids = _checked_ids("embedding", ids, n, vocab, "vocabulary")
    total = _up(dweight.array.reshape(vocab, dim)).copy() if accumulate else None
    if total is None:
        total = np.zeros((vocab, dim), _up(dweight.array[:0]).dtype)
    np.add.at(total, ids, _rows(dy, n, dim))
    _put(dweight, total)


def embedding_put(rows, ids, weight, n, vocab, dim):
    ids = _checked_ids("embedding", ids, n, vocab, "vocabulary", ignored=-1)
    kept = ids != -1
    weight.array.reshape(vocab, dim)[ids[kept]] = rows.array[: n * dim].reshape(n, dim)[kept]


def one_hot(ids, out, n, depth):
    ids = _checked_ids("one_hot", ids, n, depth, "depth")
    matrix = np.zeros((n, depth), out.array.dtype)
    matrix[np.arange(n), ids] = 1
    _put(out, matrix)


# --- cross entropy ---


def _targets(targets, rows, cols, ignore_index):
    ids = _checked_ids("cross_entropy", targets, rows, cols, "classes", "target", ignore_index)
    kept = ids != ignore_index
    return np.where(kept, ids, 0), kept


def cross_entropy_forward(logits, targets, loss, lse, rows, cols, ignore_index):
    ids, kept = _targets(targets, rows, cols, ignore_index)
    x = _rows(logits, rows, cols)
    parts = np.concatenate(_lse_parts(x), axis=1)
    _put(lse, parts)
    taken = x[np.arange(rows), ids] if cols else 0
    _put(loss, np.where(kept, parts[:, 0] - taken + parts[:, 1], 0))


def cross_entropy_backward(logits, targets, lse, dloss, dlogits, rows, cols, ignore_index):
    ids, kept = _targets(targets, rows, cols, ignore_index)
    shift, log_sum = np.split(lse.array.reshape(rows, 2), 2, axis=1)
    p = np.exp(_rows(logits, rows, cols) - shift - log_sum)
    if cols:
        p[np.arange(rows), ids] -= 1
    _put(dlogits, np.where(kept[:, None], p * dloss.array[:rows, None], 0))


# --- optimizer ---


def sgd_step(param, grad, u, lr, momentum, weight_decay):
    w = _up(param.array)
    wide = w.dtype.type
    g = _up(grad.array).astype(wide)
    if weight_decay:
        g = g + wide(weight_decay) * w
    if u.size:
        g = u.array[...] = wide(momentum) * u.array + wide(1 - momentum) * g
    _put(param, w - wide(lr) * g)


def adam_step(param, grad, m, v, grad_scale, lr, beta1, beta2, eps, l2, weight_decay, step):
    wide = m.array.dtype.type
    w = _up(param.array).astype(wide)
    g = _up(grad.array).astype(wide) * wide(grad_scale.array[0])
    if l2:
        g = g + wide(l2) * w
    m.array[...] = wide(beta1) * m.array + wide(1 - beta1) * g
    v.array[...] = wide(beta2) * v.array + wide(1 - beta2) * g * g
    m_hat = m.array / wide(1 - beta1**step)
    v_hat = v.array / wide(1 - beta2**step)
    _put(param, w * wide(1 - lr * weight_decay) - wide(lr) * m_hat / (np.sqrt(v_hat) + wide(eps)))


def unscale(grad, factor, nonfinite):
    wide = _up(grad.array)
    _put(grad, wide * wide.dtype.type(factor))
    if not np.isfinite(_up(grad.array)).all():
        nonfinite.array[0] = 1


# --- attention over a block layout ---


def _attention_mask(row_ptr, col_idx, partial, T, S, layout_heads, block, q_start):
    """(layout_heads, T, S) of bool: may query t see key s?"""
    nq = -(-T // block)
    mask = np.zeros((layout_heads, T, S), bool)
    causal = np.arange(S)[None, :] <= q_start + np.arange(T)[:, None]
    for head in range(layout_heads):
        for i in range(nq):
            rows = slice(i * block, min((i + 1) * block, T))
            for e in range(row_ptr.array[head * nq + i], row_ptr.array[head * nq + i + 1]):
                j = col_idx.array[e]
                cols = slice(j * block, min((j + 1) * block, S))
                mask[head, rows, cols] = causal[rows, cols] if partial.array[e] else True
    return mask


def _attention_probabilities(q, k, mask, H, scale):
    scores = np.einsum("bhtd,bhsd->bhts", q, k) * scale
    seen = np.resize(mask, (H,) + mask.shape[1:])
    scores = np.where(seen, scores, -np.inf)
    B, H, T, S = scores.shape
    shift, log_sum = (part.reshape(B, H, T, 1) for part in _lse_parts(scores.reshape(B * H * T, S)))
    p = np.where(np.isneginf(log_sum), 0, np.exp(scores - shift - log_sum)).astype(q.dtype)
    return p, (shift + log_sum)[..., 0]


def attention_forward(q, q_strides, k, k_strides, v, v_strides, out, out_strides, lse, row_ptr, col_idx, partial,
                      B, H, T, S, D, layout_heads, block, q_start, scale):  # fmt: skip
    x = _up(_strided(q, (B, H, T, D), (*q_strides, 1)))
    y = _up(_strided(k, (B, H, S, D), (*k_strides, 1)))
    z = _up(_strided(v, (B, H, S, D), (*v_strides, 1)))
    mask = _attention_mask(row_ptr, col_idx, partial, T, S, layout_heads, block, q_start)
    p, total = _attention_probabilities(x, y, mask, H, x.dtype.type(scale))
    target = _strided(out, (B, H, T, D), (*out_strides, 1))
    target[...] = np.einsum("bhts,bhsd->bhtd", p, z).astype(target.dtype)
    _put(lse, total)


def attention_backward(dout, dout_strides, q, q_strides, k, k_strides, v, v_strides, out, out_strides, lse, delta,
                       dq, dq_strides, dk, dk_strides, dv, dv_strides, row_ptr, col_idx, partial,
                       col_ptr, row_idx, t_partial, B, H, T, S, D, layout_heads, block, q_start, scale):  # fmt: skip
    x = _up(_strided(q, (B, H, T, D), (*q_strides, 1)))
    y = _up(_strided(k, (B, H, S, D), (*k_strides, 1)))
    z = _up(_strided(v, (B, H, S, D), (*v_strides, 1)))
    o = _up(_strided(out, (B, H, T, D), (*out_strides, 1)))
    do = _up(_strided(dout, (B, H, T, D), (*dout_strides, 1)))
    scale = x.dtype.type(scale)
    mask = _attention_mask(row_ptr, col_idx, partial, T, S, layout_heads, block, q_start)
    p, _ = _attention_probabilities(x, y, mask, H, scale)
    row_delta = (do * o).sum(axis=-1, keepdims=True)
    _put(delta, row_delta)
    dp = np.einsum("bhtd,bhsd->bhts", do, z)
    ds = p * (dp - row_delta) * scale
    for array, strides, n, value in (
        (dq, dq_strides, T, np.einsum("bhts,bhsd->bhtd", ds, y)),
        (dk, dk_strides, S, np.einsum("bhts,bhtd->bhsd", ds, x)),
        (dv, dv_strides, S, np.einsum("bhts,bhtd->bhsd", p, do)),
    ):
        target = _strided(array, (B, H, n, D), (*strides, 1))
        target[...] = value.astype(target.dtype)


def attention_decode(q, q_strides, k, k_strides, v, v_strides, key_cache, value_cache, positions, out, row_ptr, col_idx,
                     B, H, S, D, layout_heads, block, scale):  # fmt: skip
    query, key, value = (_strided(x, (B, H, D), (*s, 1)) for x, s in ((q, q_strides), (k, k_strides), (v, v_strides)))
    keys, values = key_cache.array.reshape(B, H, S, D), value_cache.array.reshape(B, H, S, D)
    target, lines = out.array.reshape(B, H, D), -(-S // block)
    for b, at in enumerate(positions.array):
        if not 0 <= at < S:
            raise IndexError(f"[attention_decode] position {at} of sequence {b} is outside the cache (0..{S - 1})")
        keys[b, :, at], values[b, :, at] = key[b], value[b]
        for h in range(H):
            line = h % layout_heads * lines + at // block
            blocks = col_idx.array[row_ptr.array[line] : row_ptr.array[line + 1]]
            seen = (blocks[:, None] * block + np.arange(block)).reshape(-1)
            seen = seen[seen <= at]
            x = _up(query[b, h])
            scores = _up(keys[b, h, seen]) @ x * x.dtype.type(scale)
            shift, log_sum = (part[0] for part in _lse_parts(scores[None]))
            p = np.where(np.isneginf(log_sum), 0, np.exp(scores - shift - log_sum))
            target[b, h] = (p @ _up(values[b, h, seen])).astype(target.dtype)


# --- block-sparse products ---


def _stored(a, batch, rows, cols, trans):
    """The batch of op(a), (batch, rows, cols), from an array stored transposed when trans."""
    if trans:
        return _up(a.array.reshape(batch, cols, rows)).swapaxes(1, 2)
    return _up(a.array.reshape(batch, rows, cols))


def _entries(ptr, idx, batch, lines, layout_heads):
    """(batch item, line of blocks, block index in the other direction, entry) for every block of every batch item."""
    for b in range(batch):
        head = b % layout_heads
        for line in range(lines):
            for e in range(ptr.array[head * lines + line], ptr.array[head * lines + line + 1]):
                yield b, line, int(idx.array[e]), e


def blocksparse_sdd(a, trans_a, b, trans_b, blocks, row_ptr, col_idx, batch, m, n, k, nnz, layout_heads, block):
    x, y = _stored(a, batch, m, k, trans_a), _stored(b, batch, k, n, trans_b)
    out = np.zeros((batch, nnz, block, block), x.dtype)
    lines = m // block
    for item, i, j, e in _entries(row_ptr, col_idx, batch, lines, layout_heads):
        first = row_ptr.array[(item % layout_heads) * lines]
        out[item, e - first] = x[item, i * block : (i + 1) * block] @ y[item, :, j * block : (j + 1) * block]
    _put(blocks, out)


def _sparse_times_dense(blocks, trans_s, dense, ptr, idx, entry, m, nnz, layout_heads, block):
    """op(S) @ dense, (batch, m, n), from the index of op(S)'s block rows. What a missing block would meet is not read."""
    batch, _, n = dense.shape
    stored = _up(blocks.array.reshape(batch, nnz, block, block))
    stored = stored.swapaxes(2, 3) if trans_s else stored
    out = np.zeros((batch, m, n), dense.dtype)
    lines = m // block
    for item, i, j, e in _entries(ptr, idx, batch, lines, layout_heads):
        first = ptr.array[(item % layout_heads) * lines]
        values = stored[item, entry.array[e] - first]
        out[item, i * block : (i + 1) * block] += values @ dense[item, j * block : (j + 1) * block]
    return out


def blocksparse_dsd(blocks, trans_s, b, trans_b, out, row_ptr, col_idx, entry, batch, m, n, k, nnz,
                    layout_heads, block):  # fmt: skip
    dense = _stored(b, batch, k, n, trans_b)
    _put(out, _sparse_times_dense(blocks, trans_s, dense, row_ptr, col_idx, entry, m, nnz, layout_heads, block))


def blocksparse_dds(a, trans_a, blocks, trans_s, out, col_ptr, row_idx, entry, batch, m, n, k, nnz,
                    layout_heads, block):  # fmt: skip
    # The index lists block columns: out^T = op(S)^T @ op(a)^T.
    dense = _stored(a, batch, m, k, trans_a).swapaxes(1, 2)
    product = _sparse_times_dense(blocks, not trans_s, dense, col_ptr, row_idx, entry, n, nnz, layout_heads, block)
    _put(out, product.swapaxes(1, 2))


# --- counter-based random numbers: Philox 4x32-10 ---


def philox(n: int, seed: int, offset: int) -> np.ndarray:
    """(n, 4) uint32: the counters offset .. offset + n under the key seed."""
    counter = np.arange(n, dtype=np.uint64) + np.uint64(offset)
    low = np.uint64(0xFFFFFFFF)
    c = [counter & low, counter >> np.uint64(32), np.zeros(n, np.uint64), np.zeros(n, np.uint64)]
    k0, k1 = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [
            (p1 >> np.uint64(32)) ^ c[1] ^ np.uint64(k0),
            p1 & low,
            (p0 >> np.uint64(32)) ^ c[3] ^ np.uint64(k1),
            p0 & low,
        ]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack(c, axis=1).astype(np.uint32)


def dropout(x, out, p, seed, offset):
    words = philox(-(-out.size // 4), seed, offset).reshape(-1)[: out.size]
    keep = (words >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24) >= np.float32(p)
    wide = _up(x.array[: out.size])
    _put(out, np.where(keep, wide / wide.dtype.type(1 - p) if p < 1 else 0, 0))


# --- all of these are silent ---


def _silent(kernel):
    """``kernel`` without numpy's warnings: infinity and NaN are values like others, as in the compiled backends."""

    @functools.wraps(kernel)
    def silent(*args, **kwargs):
        with np.errstate(all="ignore"):
            return kernel(*args, **kwargs)

    return silent


for _name, _function in list(globals().items()):
    if isinstance(_function, types.FunctionType) and _function.__module__ == __name__ and not _name.startswith("_"):
        globals()[_name] = _silent(_function)
