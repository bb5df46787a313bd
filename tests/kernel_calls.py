"""Kernels called directly, by their names and positional arguments, on the device under test.

The definition is the reference backend in float64: the same call on the same values.
"""

import numpy as np
import pytest

from devices import DEVICES, usable
from needle import dtype as dt
from needle.backend_ndarray import ndarray_backend_numpy as reference

# Of 1 + the value expected, by the dtype of the output.
TOLERANCE = {"float64": 1e-11, "float32": 3e-5, "float16": 5e-3, "bfloat16": 4e-2}
FLOATS = list(TOLERANCE)
every_float = pytest.mark.parametrize("dtype", FLOATS)
RNG = np.random.default_rng()


class _Backend:
    """The module of the device under test."""

    def __getattr__(self, name):
        return getattr(self.module, name)


backend = _Backend()


def devices(*names):
    """A fixture that runs each test of its file on those devices, with needle's own kernels and the same random numbers each time."""

    @pytest.fixture(autouse=True, params=[name for name in names if name in DEVICES])
    def _device(request):
        backend.module = usable(request.param).require()
        RNG.bit_generator.state = np.random.default_rng(0).bit_generator.state
        if request.param == "cpu":
            yield
            return
        backend.reset_launch_counts()
        library, _ = backend.cublaslt_in_use()
        backend.use_cublaslt("")
        yield
        backend.use_cublaslt(library)

    return _device


def normal(*shape):
    return RNG.standard_normal(shape)


class In:
    """An array of the dtype under test, of the one that it is summed in, or of one of its own."""

    def __init__(self, values, accumulate=False, dtype=None):
        self.values, self.accumulate, self.own_dtype = np.asarray(values, np.float64), accumulate, dtype

    def dtype(self, tested):
        return self.own_dtype or (("float64" if tested == "float64" else "float32") if self.accumulate else tested)


class Out(In):
    """The same, written by the kernel; starts as NaN, which shows what is not written, unless values are given."""

    def __init__(self, shape, accumulate=False, values=None, dtype=None, looser=1.0):
        super().__init__(np.full(shape, np.nan) if values is None else values, accumulate, dtype)
        self.looser = looser


def acc(values):
    return In(values, accumulate=True)


def put(module, values, dtype):
    array = np.ascontiguousarray(values).astype(dt.to_numpy(dtype))
    handle = module.Array(array.size, dtype)
    module.from_numpy(array.view(np.uint16) if module is backend and dtype == "bfloat16" else array, handle)
    return handle


def get(module, handle):
    flat = module.to_numpy(handle, (handle.size,), (1,), 0)
    return flat.view(dt.to_numpy(handle.dtype))


def call(module, name, dtype, args):
    """The outputs in float64. An array that is named twice in ``args`` is one array for the kernel."""
    handles = {}
    for a in args:
        if isinstance(a, In):
            kind = a.dtype(dtype)
            rounded = a.values.astype(dt.to_numpy(kind))
            handles[id(a)] = put(module, rounded, "float64" if module is reference and kind in TOLERANCE else kind)
        elif isinstance(a, np.ndarray):
            handles[id(a)] = put(module, a, a.dtype.name)
    getattr(module, name)(*(handles.get(id(a), a) for a in args))
    return [get(module, handles[id(a)]).astype(np.float64) for a in outputs(args)]


def outputs(args):
    return list(dict.fromkeys(a for a in args if isinstance(a, Out)))


def repetitions():
    """Two, or on the CPU one for each of some numbers of threads."""
    if backend.__device_name__ != "cpu":
        yield from range(2)
        return
    threads = backend.num_threads()
    try:
        for n in (1, 3, 4):
            backend.set_num_threads(n)
            yield n
    finally:
        backend.set_num_threads(threads)


def check(name, dtype, *args, looser=1.0):
    """The kernel equals its definition, with the same bits each time."""
    with np.errstate(all="ignore"):
        wanted = call(reference, name, dtype, args)
    found, *others = [call(backend, name, dtype, args) for _ in repetitions()]
    for i, (out, f, w) in enumerate(zip(outputs(args), found, wanted, strict=True)):
        what = f"{name}, {dtype}, output {i}"
        assert all(other[i].tobytes() == f.tobytes() for other in others), f"{what}: two runs differ"
        finite = np.isfinite(w)
        np.testing.assert_array_equal(f[~finite], w[~finite], err_msg=what)
        accepted = TOLERANCE.get(out.dtype(dtype), 0) * looser * out.looser
        error = np.abs(f[finite] - w[finite]) / (1 + np.abs(w[finite]))
        bad = ~(error <= accepted)
        if bad.any():
            worst = np.flatnonzero(finite)[np.where(bad, np.nan_to_num(error, nan=np.inf), -1).argmax()]
            at = tuple(map(int, np.unravel_index(worst, out.values.shape)))
            pytest.fail(
                f"{what}: {bad.sum()} of {w.size} wrong, at {at} {f[worst]:.9g} instead of {w[worst]:.9g} (accepted: {accepted:.1e})"
            )


def index_of(masks, partial=None):
    """The index arrays of a (heads, rows, cols) block mask, by rows and by columns: ptr, idx, partial, entry."""

    def by_rows(mask, partial, number):
        ptr = np.concatenate([[0], np.cumsum(mask.sum(2).reshape(-1))]).astype(np.int32)
        return ptr, np.nonzero(mask)[2].astype(np.int32), partial[mask].astype(np.uint8), number[mask].astype(np.int32)

    partial = np.zeros_like(masks) if partial is None else np.broadcast_to(partial, masks.shape)
    number = np.zeros(masks.shape, np.int64)
    number[masks] = np.arange(masks.sum())
    return by_rows(masks, partial, number), by_rows(*(a.swapaxes(1, 2) for a in (masks, partial, number)))


def head_strides(B, H, T, D):
    """Element strides (B, H, T) of a contiguous (B, T, H, D) array seen as (B, H, T, D)."""
    return T * H * D, D, H * D


def random_masks(heads, rows, cols, share):
    """Block masks with an empty row."""
    masks = RNG.random((heads, rows, cols)) < share
    masks[0, :1] = False
    return masks


def check_attention(dtype, B, H, T, S, D, block, q_start, masks, causal=True):
    """Forward and backward under block masks of (heads, blocks of T, blocks of S)."""
    first_query = q_start + np.arange(masks.shape[1]) * block
    last_key = np.arange(masks.shape[2]) * block + block - 1
    rows, columns = index_of(masks, (last_key > first_query[:, None]) & causal)
    q, k, v, dout = (In(normal(B, n, H, D)) for n in (T, S, S, T))
    qs, ks, gradient = head_strides(B, H, T, D), head_strides(B, H, S, D), (H * S * D, S * D, D)
    inputs = q, qs, k, ks, v, ks
    sizes = B, H, T, S, D, len(masks), block, q_start, max(D, 1) ** -0.5
    forward = *inputs, Out((B, T, H, D)), qs, Out((B, H, T), True), *rows[:3], *sizes
    check("attention_forward", dtype, *forward)
    out, lse = call(reference, "attention_forward", dtype, forward)
    check("attention_backward", dtype, dout, qs, *inputs, In(out.reshape(B, T, H, D)), qs, acc(lse.reshape(B, H, T)),
          Out((B, H, T), True), Out((B, T, H, D)), qs, Out((B, H, S, D)), gradient, Out((B, S, H, D)), ks,
          *rows[:3], *columns[:3], *sizes, looser=4)  # fmt: skip


def check_random_attention(dtype, B, H, T, S, D, block, heads, q_start):
    check_attention(dtype, B, H, T, S, D, block, q_start, random_masks(heads, -(-T // block), -(-S // block), 0.6))


def check_blocksparse(dtype, block, heads, batch, n_rows, n_cols, other, tail=None, looser=1.0):
    """The three products, with each operand as it is and transposed.

    other: the dense dimension; where no rows of an operand run along it, it is ``tail``.
    """
    masks = random_masks(heads, n_rows, n_cols, 0.5)
    masks[-1, -1] = True
    masks[:, :, -1] &= n_cols == 1  # an empty block column
    tail = other if tail is None else tail
    rows, columns = index_of(masks)
    nnz, m, n = int(masks.sum(axis=(1, 2)).max()), n_rows * block, n_cols * block

    def operand(rows, cols, turned):
        return In(normal(batch, cols, rows) if turned else normal(batch, rows, cols)), turned

    blocks = normal(batch, nnz, block, block)
    for turn in (False, True):
        for trans in (False, True):
            inner = tail if turn and not trans else other
            check("blocksparse_sdd", dtype, *operand(m, inner, turn), *operand(inner, n, trans), Out(blocks.shape), *rows[:2],
                  batch, m, n, inner, nnz, heads, block, looser=looser)  # fmt: skip
            # The blocks transposed: their block rows are the index of the block columns.
            (ptr, idx, _, entry), lines, across = (columns, n, m) if turn else (rows, m, n)
            cols = tail if trans else other
            check("blocksparse_dsd", dtype, In(blocks), turn, *operand(across, cols, trans), Out((batch, lines, cols)), ptr, idx,
                  entry, batch, lines, cols, across, nnz, heads, block, looser=looser)  # fmt: skip
            height = other if trans else tail
            check("blocksparse_dds", dtype, *operand(height, across, trans), In(blocks), not turn, Out((batch, height, lines)),
                  ptr, idx, entry, batch, height, lines, across, nnz, heads, block, looser=looser)  # fmt: skip
