"""The CUDA kernels, run by the emulated device and by a GPU, driven directly: the paths that the parity suite's small arrays do not
reach.

The definition is the reference backend in float64: the same call on the same values.
"""

import math
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Thread

import numpy as np
import pytest

import needle as ndl
from devices import DEVICES, usable
from needle import dtype as dt
from needle.backend_ndarray import kernels
from needle.backend_ndarray import ndarray_backend_numpy as reference
from needle.backend_ndarray.block_layout import BlockLayout
from needle.backend_ndarray.ndarray import NDArray

backend = None  # the module of the device under test


def use(name):
    """Makes a device the one under test."""
    global backend
    backend = usable(name).require()
    backend.reset_launch_counts()


@pytest.fixture(autouse=True, params=[name for name in ("cuda_sim", "cuda") if name in DEVICES])
def _device(request):
    use(request.param)
    library, _ = backend.cublaslt_in_use()
    backend.use_cublaslt("")
    yield
    backend.use_cublaslt(library)


@pytest.fixture
def tensor_cores(_device):
    if backend.device_properties()["compute_capability"] < (8, 0):
        pytest.skip("a GPU without the tensor cores of ptx.h")


@pytest.fixture
def capability(_device, monkeypatch):
    """Makes the emulated device one of another compute capability."""
    if backend.__device_name__ != "cuda_sim":
        pytest.skip("a GPU is what it is")
    return lambda wanted: monkeypatch.setenv("NEEDLE_SIM_SM", wanted)


TOLERANCE = {"float64": 1e-10, "float32": 3e-5, "float16": 5e-3, "bfloat16": 4e-2}
FLOATS = list(TOLERANCE)
every_float = pytest.mark.parametrize("dtype", FLOATS)
HALF_FLOATS = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])


def half_float(test):
    """A test of tensor cores."""
    return pytest.mark.usefixtures("tensor_cores")(HALF_FLOATS(test))


class In:
    """An array of the dtype under test, or of the one it accumulates in."""

    def __init__(self, values, accumulate=False):
        self.values, self.accumulate = np.asarray(values, np.float64), accumulate

    def dtype(self, tested):
        return ("float64" if tested == "float64" else "float32") if self.accumulate else tested


class Out(In):
    """The same, written by the kernel; starts as NaN unless values are given."""

    def __init__(self, shape, accumulate=False, values=None):
        super().__init__(np.full(shape, np.nan) if values is None else values, accumulate)


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
    handles = []
    for a in args:
        if isinstance(a, In):
            rounded = a.values.astype(dt.to_numpy(a.dtype(dtype)))
            handles.append(put(module, rounded, "float64" if module is reference else a.dtype(dtype)))
        elif isinstance(a, np.ndarray):
            handles.append(put(module, a, a.dtype.name))
        else:
            handles.append(a)
    getattr(module, name)(*handles)
    return [get(module, h).astype(np.float64) for h, a in zip(handles, args, strict=True) if isinstance(a, Out)]


def check(name, dtype, *args, looser=1.0):
    """The kernel equals its definition, twice with the same bits."""
    with np.errstate(all="ignore"):
        wanted = call(reference, name, dtype, args)
    found, again = call(backend, name, dtype, args), call(backend, name, dtype, args)
    for f, a, w in zip(found, again, wanted, strict=True):
        assert f.tobytes() == a.tobytes(), f"{name}: two runs differ"
        np.testing.assert_array_equal(np.isnan(f), np.isnan(w), err_msg=name)
        finite = np.isfinite(w)
        np.testing.assert_array_equal(f[~finite], w[~finite], err_msg=name)
        scale = max(1.0, np.sqrt(np.mean(w[finite] ** 2))) if finite.any() else 1.0
        worst = np.max(np.abs(f[finite] - w[finite]) / (scale + np.abs(w[finite])), initial=0)
        assert worst <= TOLERANCE[dtype] * looser, f"{name} {dtype}: off by {worst:.2e} of the value"


def ran(*names):
    counts = backend.launch_counts()
    return [counts.get(n, 0) for n in names]


RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.standard_normal(shape)


def aligned(n):
    """The next multiple of 8 elements: 16 bytes of a 16-bit dtype."""
    return -(-n // 8) * 8


# --- movement and elementwise ---------------------------------------------------------------------------------------------


def test_transposing_copy_goes_by_tiles():
    shape, x = (3, 45, 70), normal(3, 45, 70)
    for dtype in FLOATS + ["uint8", "bool"]:
        a = put(backend, x > 0 if dtype == "bool" else x * 3 % 100, dtype)
        out = backend.Array(a.size, dtype)
        backend.compact(a, out, (3, 70, 45), (45 * 70, 1, 70), 0)
        np.testing.assert_array_equal(get(backend, out), get(backend, a).reshape(shape).swapaxes(1, 2).reshape(-1), err_msg=dtype)
    assert ran("transpose_copy_kernel", "strided_copy_kernel") == [6, 0]


def test_strided_copy_of_negative_steps_and_many_dimensions():
    x = normal(2, 3, 2, 3, 2, 3).astype(np.float32)
    for view in (x[::-1, :, ::-1, 1:, :, ::2], x.transpose(5, 3, 1, 4, 2, 0)[::-1], x[0, ..., None].transpose()):
        strides = tuple(s // 4 for s in view.strides)
        offset = (view.__array_interface__["data"][0] - x.__array_interface__["data"][0]) // 4
        a, out = put(backend, x, "float32"), backend.Array(view.size, "float32")
        backend.compact(a, out, view.shape, strides, offset)
        np.testing.assert_array_equal(get(backend, out), view.reshape(-1))


def test_conversions_between_all_dtypes():
    values = np.array([0, 1, 2, 3.75, 100.5, 0.25] * 7)
    for a in dt.ROWS:
        for b in dt.ROWS:
            x = put(backend, values, a), put(reference, values, a)
            y = backend.Array(42, b), reference.Array(42, b)
            for module, source, target in zip((backend, reference), x, y, strict=True):
                module.compact(source, target, (42,), (1,), 0)
            np.testing.assert_array_equal(get(backend, y[0]), get(reference, y[1]), err_msg=f"{a} -> {b}")


@pytest.mark.parametrize("size", [1, 15, 16, 17, 4099])
def test_elementwise_vectors_and_tails(size):
    a, b = normal(size), normal(size)
    for dtype in FLOATS:
        check("ewise_gelu_erf", dtype, In(a), Out(size))
        check("ewise_mul", dtype, In(a), In(b), Out(size))
        check("scalar_maximum", dtype, In(a), 0.25, Out(size))
        check("rscalar_sub", dtype, In(a), 0.25, Out(size))
        check("ewise_add", dtype, In(a[: size // 2 + 1]), (0,), 0, In(b), (1,), 0, Out(size), (size,))
    backend.ewise_negate(put(backend, a, "float32").view(size // 2, size - size // 2), backend.Array(size - size // 2))


def test_where_broadcasts():
    condition = normal(5, 1) > 0
    a, b = normal(5, 7), normal(1, 7)
    for dtype in FLOATS:
        check("where", dtype, condition, (1, 0), 0, In(a), (7, 1), 0, In(b), (0, 1), 0, Out(35), (5, 7))


# --- reductions -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 70000, 1), (3, 5000, 1), (2, 9000, 3), (300, 9, 1), (1, 300, 40), (4, 33, 65)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_reductions_split_and_unsplit(shape, dtype):
    x, n = normal(*shape), shape[0] * shape[2]
    for op in ("sum", "max", "min"):
        check(f"reduce_{op}", dtype, In(x), Out(n), *shape)
    check("reduce_sumsq", dtype, In(x), Out(n, accumulate=True), *shape)
    few = RNG.permutation(x.size).reshape(shape) < 8
    check("reduce_prod", dtype, In(np.sign(x) * np.where(few, 2.0, 1.0)), Out(n), *shape)  # exact in every dtype
    assert (ran("reduce_partials_kernel") != [0]) == (shape[1] >= 300)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "uint8"])
def test_argmax_takes_the_first_and_nan_wins(dtype):
    x = RNG.integers(0, 5, (2, 9000, 3)).astype(np.float64)
    if dtype.startswith("float"):
        x[1, [77, 400], 2] = np.nan
    for op in ("argmax", "argmin"):
        a, out = put(backend, x, dtype), backend.Array(6, "int64")
        getattr(backend, f"reduce_{op}")(a, out, 2, 9000, 3)
        np.testing.assert_array_equal(get(backend, out), getattr(np, op)(x, axis=1).reshape(-1))


def test_integer_sums_wrap_in_64_bits():
    x = RNG.integers(-(2**31), 2**31, 5000).astype(np.int32)
    for out_dtype in ("int32", "int64"):
        out = backend.Array(1, out_dtype)
        backend.reduce_sum(put(backend, x, "int32"), out, 1, 5000, 1)
        assert get(backend, out)[0] == x.sum(dtype=np.int64).astype(out_dtype)


# --- matrix products ------------------------------------------------------------------------------------------------------------


@every_float
@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize("trans_b", [False, True])
def test_matmul_tails_offsets_and_broadcast_batches(dtype, trans_a, trans_b):
    for m, k, n in ((1, 1, 1), (5, 17, 3), (33, 40, 70), (72, 24, 64)):
        lda, ldb = (m if trans_a else k) + 3, (k if trans_b else n) + 2
        a, b = normal(3, k if trans_a else m, lda), normal(2, n if trans_b else k, ldb)
        for accumulate in (False, True):
            check("matmul", dtype, In(a), 3, (0, a.shape[1] * lda), lda, trans_a,
                  In(b), 2, (b.shape[1] * ldb, 0), ldb, trans_b,
                  Out((2, 2, m, n), values=normal(2, 2, m, n)), (2, 2), m, k, n, accumulate)  # fmt: skip


@pytest.mark.parametrize(("dtype", "kernel", "k", "tail"), [("float32", "matmul_kernel", 50, 14), ("bfloat16", "matmul_kernel", 50, 14),
                                                            ("bfloat16", "matmul_mma_kernel", 56, 16)])  # fmt: skip
def test_matmul_of_large_tiles(dtype, kernel, k, tail):
    """Taken where they give every multiprocessor one."""
    properties = backend.device_properties()
    if kernel == "matmul_mma_kernel" and properties["compute_capability"] < (8, 0):
        pytest.skip("a GPU without the tensor cores of ptx.h")
    whole = 128 * math.ceil(properties["multiprocessors"] ** 0.5)
    m, n = whole + 4, whole + tail
    a, b = normal(m, k), normal(k, n)
    check("matmul", dtype, In(a), 0, (), k, False, In(b), 0, (), n, False, Out((m, n)), (), m, k, n, False)
    assert {name: threads for name, (_, threads) in backend.launch_extents().items()} == {kernel: 256}


@half_float
@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize("trans_b", [False, True])
def test_matmul_on_tensor_cores(dtype, trans_a, trans_b):
    """Tails of m, k and n in tiles of every size; rows and batches apart, but aligned to 16 bytes."""
    sizes = ((1, 1, 1), (17, 33, 9), (65, 40, 70), (130, 97, 136))
    for m, k, n in sizes:
        lda, ldb = aligned(m if trans_a else k) + 8, aligned(k if trans_b else n) + 16
        a, b = normal(3, k if trans_a else m, lda), normal(2, n if trans_b else k, ldb)
        for accumulate, wide in ((False, False), (True, False), (True, True)):
            check("matmul", dtype, In(a), 8, (0, a.shape[1] * lda), lda, trans_a,
                  In(b), 16, (b.shape[1] * ldb, 0), ldb, trans_b,
                  Out((2, 2, m, n), wide, normal(2, 2, m, n)), (2, 2), m, k, n, accumulate, looser=0.3)  # fmt: skip
    assert ran("matmul_mma_kernel", "matmul_kernel") == [6 * len(sizes), 0]


@half_float
def test_matmul_of_special_values_on_tensor_cores(dtype):
    """A tail is filled with zeros, which must not meet the infinities of the other operand."""
    m, k, n = 20, 17, 24
    a, b = normal(m, 24), normal(k, n)
    a[3, 5], a[4, 16], a[5, 0] = np.nan, np.inf, -np.inf
    b[16, 2], b[0, 3], b[7, 7] = 0, np.inf, np.nan
    a[:, k:] = np.nan  # beyond the matrix
    check("matmul", dtype, In(a), 0, (), 24, False, In(b), 0, (), n, False, Out((m, n)), (), m, k, n, False)
    assert ran("matmul_mma_kernel") == [2]


@pytest.mark.parametrize(
    ("why", "dtype", "offset", "lda", "batch_stride"),
    [("offset", "float16", 4, 40, 1600), ("row stride", "bfloat16", 8, 44, 1600), ("batch stride", "float16", 8, 40, 1604),
     ("dtype", "float32", 8, 40, 1600), ("capability", "bfloat16", 8, 40, 1600)],
)  # fmt: skip
def test_matmul_that_tensor_cores_cannot_take(request, why, dtype, offset, lda, batch_stride):
    if why == "capability":
        request.getfixturevalue("capability")("75")
    m, k, n = 40, 33, 48
    for swap in (False, True):  # the same operand on the left and, transposed, on the right
        odd = (In(normal(4000)), offset, (batch_stride,), lda)
        plain = (In(normal(2, k, n)), 0, (k * n,), n)
        operands = (*plain, True, *odd, True) if swap else (*odd, False, *plain, False)
        rows, cols = (n, m) if swap else (m, n)
        check("matmul", dtype, *operands, Out((2, rows, cols)), (2,), rows, k, cols, False)
    assert ran("matmul_mma_kernel", "matmul_kernel") == [0, 4]


@every_float
@pytest.mark.parametrize(("k", "parts"), [(544, 1), (576, 2), (1024, 4)])
def test_matmul_of_few_tiles_and_long_sums(dtype, k, parts):
    """k is cut into equal parts of whole slices: every layout, rows and batches apart, with and without accumulation."""
    m, n = 24, 40
    for trans_a, trans_b in ((False, False), (True, False), (False, True), (True, True)):
        lda, ldb = (m if trans_a else k) + 8, (k if trans_b else n) + 16
        a, b = normal(3, k if trans_a else m, lda), normal(2, n if trans_b else k, ldb)
        for accumulate, wide in ((False, False), (True, False), (True, True)):
            check("matmul", dtype, In(a), 8, (0, a.shape[1] * lda), lda, trans_a,
                  In(b), 16, (b.shape[1] * ldb, 0), ldb, trans_b,
                  Out((2, 2, m, n), wide, normal(2, 2, m, n)), (2, 2), m, k, n, accumulate)  # fmt: skip
    assert ran("matmul_sum_kernel") == [24 if parts > 1 else 0]


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8"])
@pytest.mark.parametrize("k", [41, 512])
def test_matmul_of_integers_wraps(dtype, k):
    a = RNG.integers(0, 200, (37, k)).astype(dtype)
    b = RNG.integers(0, 200, (k, 35)).astype(dtype)
    out = backend.Array(37 * 35, dtype)
    backend.matmul(put(backend, a, dtype), put(backend, b, dtype), out, 37, k, 35)
    np.testing.assert_array_equal(get(backend, out), (a @ b).reshape(-1))


@every_float
@pytest.mark.parametrize("ldb", [3, 8])
def test_empty_inner_dimension_gives_zeros(dtype, ldb):
    check("matmul", dtype, In(normal(1)), 0, (), 8, False, In(normal(1)), 0, (), ldb, False, Out((4, 3)), (), 4, 0, 3, False)


# --- rows -------------------------------------------------------------------------------------------------------------------------


@every_float
@pytest.mark.parametrize("shape", [(5, 1), (70, 33), (3, 1025), (2, 3001)])
def test_softmax_family(dtype, shape):
    rows, cols = shape
    x, dy = normal(*shape) * 3, normal(*shape)
    y = np.exp(x) / np.exp(x).sum(1, keepdims=True)
    check("softmax_forward", dtype, In(x), Out(shape), rows, cols)
    check("softmax_backward", dtype, In(y), In(dy), Out(shape), rows, cols)
    check("log_softmax_forward", dtype, In(x), Out(shape), rows, cols)
    check("log_softmax_backward", dtype, In(np.log(y)), In(dy), Out(shape), rows, cols)
    check("logsumexp_forward", dtype, In(x), Out(rows), rows, cols)
    lse = np.log(np.exp(x).sum(1))
    check("logsumexp_backward", dtype, In(x), In(lse), In(normal(rows)), Out(shape), rows, cols)


def test_softmax_of_infinities_and_nan():
    x = normal(5, 40)
    x[0] = -np.inf
    x[1, 3], x[2, 4], x[3, ::2] = np.inf, np.nan, -np.inf
    for cols in (40, 2000):
        wide = np.resize(np.tile(x, (1, 50)), (5, 2000))[:, :cols]
        check("softmax_forward", "float32", In(wide), Out(wide.shape), 5, cols)
        check("logsumexp_forward", "float32", In(wide), Out(5), 5, cols)


@every_float
@pytest.mark.parametrize("shape", [(1, 1), (70, 33), (3, 1100)])
def test_layer_norm(dtype, shape):
    rows, cols = shape
    x, dy, weight, bias = normal(*shape) + 2, normal(*shape), normal(cols), normal(cols)
    mean = x.mean(1)
    rstd = 1 / np.sqrt(x.var(1) + 1e-5)
    check("layer_norm_forward", dtype, In(x), In(weight), In(bias), Out(shape), Out(rows, True), Out(rows, True),
          rows, cols, 1e-5, looser=1 if cols > 1 else 400)  # fmt: skip
    if cols > 1:
        check("layer_norm_backward", dtype, In(dy), In(x), In(weight), acc(mean), acc(rstd), Out(shape), Out(cols),
              Out(cols), acc(np.zeros(64 * 2 * cols)), rows, cols, looser=4)  # fmt: skip


@every_float
def test_rotary_of_views_and_in_place(dtype):
    B, H, T, D, rot = 2, 3, 5, 10, 6
    x = normal(B, T, H, D)  # (B, H, T, D) seen through strides, as from a packed projection
    strides = (T * H * D, D, H * D, 1)
    angle = np.arange(T)[:, None] / 10.0 ** np.arange(rot // 2)
    for inverse in (False, True):
        check("rotary", dtype, In(x), strides, 0, np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32),
              Out((B, H, T, D)), (H * T * D, T * D, D, 1), B, H, T, D, rot, inverse)  # fmt: skip


# --- ids ------------------------------------------------------------------------------------------------------------------------------


@every_float
@pytest.mark.parametrize("id_dtype", [np.int32, np.int64])
def test_embedding(dtype, id_dtype):
    n, vocab, dim = 300, 40, 24
    ids = RNG.integers(0, vocab, n).astype(id_dtype)
    ids[::3] = 7
    check("embedding_forward", dtype, In(normal(vocab, dim)), ids, Out((n, dim)), n, vocab, dim)
    check("embedding_forward", dtype, In(normal(vocab, 5)), ids, Out((n, 5)), n, vocab, 5)
    for accumulate in (False, True):
        check("embedding_backward", dtype, In(normal(n, dim)), ids, Out((vocab, dim), values=normal(vocab, dim)),
              np.zeros(n + vocab + 1, np.int32), n, vocab, dim, accumulate, looser=2)  # fmt: skip


def test_embedding_gradient_adds_in_ascending_order():
    """Beyond kShortRange positions the order is found another way; both must add as a plain loop does."""
    n, vocab = 3000, 1030
    ids = np.where(np.arange(n) % 2, 3, RNG.integers(0, vocab, n)).astype(np.int32)
    dy = (normal(n, 1) * 10.0 ** RNG.integers(-3, 4, (n, 1))).astype(np.float32)
    wanted = np.zeros((vocab, 1), np.float32)
    for i in range(n):
        wanted[ids[i]] += dy[i]
    out = backend.Array(vocab, "float32")
    backend.embedding_backward(
        put(backend, dy, "float32"), put(backend, ids, "int32"), out, backend.Array(n + vocab + 1, "int32"), n, vocab, 1, False
    )
    assert get(backend, out).tobytes() == wanted.tobytes()


def test_one_hot_of_every_dtype():
    ids = RNG.integers(0, 9, 11)
    for dtype in dt.ROWS:
        out = backend.Array(99, dtype)
        backend.one_hot(put(backend, ids, "int64"), out, 11, 9)
        np.testing.assert_array_equal(get(backend, out).reshape(11, 9), np.eye(9)[ids].astype(dt.to_numpy(dtype)))


def test_an_id_out_of_range_is_raised_at_the_next_sync_once():
    weight, out = put(backend, normal(5, 4), "float32"), backend.Array(8, "float32")
    backend.embedding_forward(weight, put(backend, np.array([1, 5]), "int64"), out, 2, 5, 4)
    with pytest.raises(IndexError, match=r"\[embedding\] id 5 at position 1 is outside the vocabulary \(0\.\.4\)"):
        backend.sync()
    backend.sync()
    assert np.isnan(get(backend, out)[4:]).all() and np.isfinite(get(backend, out)[:4]).all()
    backend.one_hot(put(backend, np.array([-1]), "int64"), backend.Array(3, "float32"), 1, 3)
    with pytest.raises(IndexError, match=r"\[one_hot\] id -1 at position 0 is outside the depth \(0\.\.2\)"):
        backend.sync()
    loss, lse = backend.Array(1, "float32"), backend.Array(2, "float32")
    backend.cross_entropy_forward(weight, put(backend, np.array([9]), "int32"), loss, lse, 1, 4, -100)
    with pytest.raises(IndexError, match=r"\[cross_entropy\] target 9 at position 0 is outside the classes \(0\.\.3\)"):
        get(backend, loss)


@every_float
@pytest.mark.parametrize("shape", [(70, 33), (3, 2000)])
def test_cross_entropy(dtype, shape):
    rows, cols = shape
    logits = normal(*shape) * 3
    targets = RNG.integers(0, cols, rows)
    targets[1] = -100
    lse = acc(np.stack([logits.max(1), np.log(np.exp(logits).sum(1)) - logits.max(1)], 1))
    check("cross_entropy_forward", dtype, In(logits), targets, Out(rows, True), Out((rows, 2), True), rows, cols, -100)
    check("cross_entropy_backward", dtype, In(logits), targets, lse, acc(normal(rows)), Out(shape), rows, cols, -100)


# --- optimizer and random numbers ---------------------------------------------------------------------------------------------------------


@every_float
@pytest.mark.parametrize("wide_grad", [False, True])
def test_adamw_step(dtype, wide_grad):
    n = 301
    check("adamw_step", dtype, Out(n, values=normal(n)), In(normal(n), wide_grad), Out(n, True, normal(n)),
          Out(n, True, normal(n) ** 2), np.array([0.5], np.float32), 1e-2, 0.9, 0.95, 1e-8, 0.1, 3)  # fmt: skip


@every_float
@pytest.mark.parametrize("bad", [None, np.inf, -np.inf, np.nan])
def test_unscale(dtype, bad):
    for n in (1, 301, 70_001):
        values, flag = normal(n), np.zeros(1, np.int32)
        if bad is not None:
            values[-1] = bad
        check("unscale", dtype, Out(n, values=values), 0.125, flag)
        handles = [put(backend, values, dtype), put(backend, flag, "int32")]
        backend.unscale(handles[0], 0.125, handles[1])
        assert get(backend, handles[1])[0] == (bad is not None)


@every_float
@pytest.mark.parametrize("size", [1, 6, 4097])
def test_random_numbers_are_the_reference_s(dtype, size):
    for name in ("random_uniform", "random_normal"):
        made = [module.Array(size, dtype) for module in (backend, reference)]
        for module, array in zip((backend, reference), made, strict=True):
            getattr(module, name)(array, 2**40 + 17, 2**33 + 5)
        found, wanted = (get(m, a).astype(np.float64) for m, a in zip((backend, reference), made, strict=True))
        if name == "random_uniform":
            np.testing.assert_array_equal(found, wanted)
        else:
            np.testing.assert_allclose(found, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for p in (0.0, 0.3, 1.0):
        check("dropout", dtype, In(normal(size)), Out(size), p, 11, 4)


# --- attention and block-sparse products -----------------------------------------------------------------------------------------------------


def layout_of(masks, partial=None):
    """Index arrays of a (heads, rows, cols) block mask and of its transpose."""

    def index(m, p):
        ptr = np.concatenate([[0], np.cumsum(m.sum(axis=2).reshape(-1))]).astype(np.int32)
        head, row, col = np.nonzero(m)
        number = np.full(m.shape, -1)
        number[head, row, col] = np.arange(len(col))
        return ptr, col.astype(np.int32), p[head, row, col].astype(np.uint8), number

    partial = np.zeros_like(masks) if partial is None else partial
    rows = index(masks, partial)
    cols = index(masks.swapaxes(1, 2), partial.swapaxes(1, 2))
    head, col, row = np.nonzero(masks.swapaxes(1, 2))
    return rows[:3], cols[:3], np.arange(len(rows[1]), dtype=np.int32), rows[3][head, row, col].astype(np.int32)


def heads_strides(*shape):
    """Element strides (B, H, T) of a contiguous (B, T, H, D) array seen as (B, H, T, D)."""
    B, H, T, D = shape
    return (T * H * D, D, H * D)


def check_attention(dtype, B, H, T, S, D, block, heads, q_start):
    nq, nk = -(-T // block), -(-S // block)
    masks = RNG.random((heads, nq, nk)) < 0.6
    partial = np.zeros_like(masks)
    first_query = q_start + np.arange(nq) * block
    first_key = np.arange(nk) * block
    partial[:] = first_key[None, None, :] + block - 1 > first_query[None, :, None]
    masks[0, 0] = False  # queries with no key at all
    (row_ptr, col_idx, part, *_), (col_ptr, row_idx, t_part), _, _ = layout_of(masks, partial)
    q, k, v = normal(B, T, H, D), normal(B, S, H, D), normal(B, S, H, D)
    qs, ks = heads_strides(B, H, T, D), heads_strides(B, H, S, D)
    scale = D**-0.5
    sizes = (B, H, T, S, D, heads, block, q_start, scale)
    check("attention_forward", dtype, In(q), qs, In(k), ks, In(v), ks, Out((B, T, H, D)), qs, Out((B, H, T), True),
          row_ptr, col_idx, part, *sizes)  # fmt: skip
    out, lse = call(
        reference, "attention_forward", "float64",
        (In(q), qs, In(k), ks, In(v), ks, Out((B, T, H, D)), qs, Out((B, H, T), True), row_ptr, col_idx, part, *sizes),
    )  # fmt: skip
    dout = normal(B, T, H, D)
    check("attention_backward", dtype, In(dout), qs, In(q), qs, In(k), ks, In(v), ks, In(out.reshape(B, T, H, D)), qs,
          acc(lse.reshape(B, H, T)), Out((B, H, T), True), Out((B, T, H, D)), qs, Out((B, S, H, D)), ks,
          Out((B, S, H, D)), ks, row_ptr, col_idx, part, col_ptr, row_idx, t_part, *sizes, looser=4)  # fmt: skip


@every_float
def test_attention_with_tails_and_layout_heads(dtype):
    check_attention(dtype, 2, 4, 50, 50, 16, 16, 2, 0)
    check_attention(dtype, 1, 1, 37, 80, 24, 32, 1, 43)


@pytest.mark.parametrize("D", [64, 100, 200])
def test_attention_of_larger_heads(D):
    check_attention("float32", 1, 1, 70, 70, D, 64, 1, 0)
    check_attention("bfloat16", 1, 1, 40, 40, D, 32, 1, 0)


ATTENTION_KERNELS = [f"attention_{part}_{kind}" for kind in ("mma_kernel", "kernel") for part in ("forward", "dq", "dkdv")]


@half_float
@pytest.mark.parametrize(
    ("B", "H", "T", "S", "D", "block", "heads", "q_start"),
    [(2, 4, 50, 50, 16, 16, 2, 0), (1, 2, 37, 80, 24, 32, 1, 43), (1, 1, 70, 70, 64, 64, 1, 0), (1, 1, 130, 140, 72, 128, 1, 10),
     (1, 2, 60, 60, 128, 48, 2, 0), (1, 1, 40, 40, 200, 16, 1, 0), (1, 1, 1, 90, 256, 64, 1, 89)],
)  # fmt: skip
def test_attention_on_tensor_cores(dtype, B, H, T, S, D, block, heads, q_start):
    check_attention(dtype, B, H, T, S, D, block, heads, q_start)
    assert ran(*ATTENTION_KERNELS) == [2, 2, 2, 0, 0, 0]


@half_float
def test_attention_of_special_values_on_tensor_cores(dtype):
    B, H, T, D, block = 1, 2, 40, 16, 32
    (row_ptr, col_idx, part, *_), _, _, _ = layout_of(np.ones((1, 2, 2), bool))
    q, k, v = (normal(B, T, H, D) for _ in range(3))
    strides = heads_strides(B, H, T, D)
    q[0, 2, 0, 1], k[0, 35, 1, 0], v[0, 5, 0, 3], v[0, 39, 0, 4] = np.nan, np.nan, np.nan, np.inf
    check("attention_forward", dtype, In(q), strides, In(k), strides, In(v), strides, Out((B, T, H, D)), strides,
          Out((B, H, T), True), row_ptr, col_idx, part, B, H, T, T, D, 1, block, 0, 0.25)  # fmt: skip
    assert ran(*ATTENTION_KERNELS)[0] == 2


@pytest.mark.parametrize(("dtype", "D", "sm"), [("float32", 16, None), ("bfloat16", 20, None), ("float16", 16, "75")])
def test_attention_that_tensor_cores_cannot_take(request, dtype, D, sm):
    if sm:
        request.getfixturevalue("capability")(sm)
    check_attention(dtype, 1, 2, 37, 37, D, 16, 1, 0)
    assert ran(*ATTENTION_KERNELS) == [0, 0, 0, 2, 2, 2]


@pytest.mark.parametrize(("sm", "dtype", "most"), [("75", "float32", 65536), ("86", "float64", 101376)])
def test_heads_that_shared_memory_cannot_hold(capability, sm, dtype, most):
    """One clear error, and the device goes on."""
    capability(sm)
    with pytest.raises(ValueError, match=rf"attention_dq_kernel\] a block needs \d+ bytes of shared memory .at most {most} on"):
        check_attention(dtype, 1, 1, 16, 16, 200, 16, 1, 0)
    check_attention(dtype, 1, 1, 16, 16, 64, 16, 1, 0)


def test_attention_of_a_view_that_is_not_aligned(tensor_cores):
    x = NDArray(normal(1, 2, 40, 24), device=getattr(ndl, backend.__device_name__)(), dtype="bfloat16")[:, :, :, 4:20]
    layout = BlockLayout(np.ones((3, 3)), 16, causal=True)
    found = [kernels.attention(y, y, y, layout, 0.25)[0].numpy().astype(np.float64) for y in (x, x.copy())]
    np.testing.assert_allclose(*found, atol=TOLERANCE["bfloat16"])
    assert ran(*ATTENTION_KERNELS) == [1, 0, 0, 1, 0, 0]


def check_blocksparse(dtype, block, heads, batch, nb, cross, other):
    masks = RNG.random((heads, nb, cross)) < 0.5
    masks[0, 0], masks[-1, -1] = False, True  # an empty block row; at least one block
    (row_ptr, col_idx, _), (col_ptr, row_idx, _), same, turned = layout_of(masks)
    nnz = int(masks.sum(axis=(1, 2)).max())
    m, n = nb * block, cross * block
    S = normal(batch, nnz, block, block)
    for trans in (False, True):
        a, b = normal(batch, other, m) if trans else normal(batch, m, other), normal(batch, n, other)
        check("blocksparse_sdd", dtype, In(a), trans, In(b), True, Out((batch, nnz, block, block)), row_ptr, col_idx,
              batch, m, n, other, nnz, heads, block)  # fmt: skip
        dense = normal(batch, other, n) if trans else normal(batch, n, other)
        check("blocksparse_dsd", dtype, In(S), False, In(dense), trans, Out((batch, m, other)), row_ptr, col_idx, same,
              batch, m, other, n, nnz, heads, block)  # fmt: skip
        dense = normal(batch, m, other) if trans else normal(batch, other, m)
        check("blocksparse_dds", dtype, In(dense), trans, In(S), False, Out((batch, other, n)), col_ptr, row_idx, turned,
              batch, other, n, m, nnz, heads, block)  # fmt: skip
        # The transposed matrix from the same blocks: its block rows are the index of S's block columns.
        dense = normal(batch, other, m) if trans else normal(batch, m, other)
        check("blocksparse_dsd", dtype, In(S), True, In(dense), trans, Out((batch, n, other)), col_ptr, row_idx, turned,
              batch, n, other, m, nnz, heads, block)  # fmt: skip


@every_float
@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_blocksparse_products(dtype, block):
    heads, batch = (2, 4) if block < 64 else (1, 1)
    check_blocksparse(dtype, block, heads, batch, 3 if block < 128 else 2, 2, 21)
    assert ran("BlockSparseMatmulKernel")[0] > 0


@half_float
@pytest.mark.parametrize("block", [16, 32, 48, 64, 128])
def test_blocksparse_products_on_tensor_cores(dtype, block):
    """Every operand as it is and transposed; the dense dimension with a tail where its rows stay aligned."""
    heads, batch = (2, 4) if block < 64 else (1, 2)
    rows, cols = (3, 2) if block < 128 else (2, 2)
    masks = RNG.random((heads, rows, cols)) < 0.5
    masks[0, 0], masks[-1, -1] = False, True  # an empty block row; at least one block
    (row_ptr, col_idx, _), (col_ptr, row_idx, _), same, turned = layout_of(masks)
    nnz, m, n = int(masks.sum(axis=(1, 2)).max()), rows * block, cols * block
    S = normal(batch, nnz, block, block)
    for trans in (False, True):
        inner = 21 if trans else 40  # a is (m, inner), or stored as (inner, m)
        a, b = normal(batch, inner, m) if trans else normal(batch, m, inner), normal(batch, inner, n)
        check("blocksparse_sdd", dtype, In(a), trans, In(b), False, Out((batch, nnz, block, block)), row_ptr, col_idx,
              batch, m, n, inner, nnz, heads, block, looser=0.3)  # fmt: skip
        a, b = normal(batch, m, 40), normal(batch, n, 40) if trans else normal(batch, 40, n)
        check("blocksparse_sdd", dtype, In(a), False, In(b), trans, Out((batch, nnz, block, block)), row_ptr, col_idx,
              batch, m, n, 40, nnz, heads, block, looser=0.3)  # fmt: skip
        for turn in (False, True):  # of the blocks
            ptr, idx, entry, lines, across = (col_ptr, row_idx, turned, n, m) if turn else (row_ptr, col_idx, same, m, n)
            other = 69 if trans else 72  # stored as (other, across), or (across, other)
            dense = normal(batch, other, across) if trans else normal(batch, across, other)
            check("blocksparse_dsd", dtype, In(S), turn, In(dense), trans, Out((batch, lines, other)), ptr, idx, entry,
                  batch, lines, other, across, nnz, heads, block, looser=0.3)  # fmt: skip
            other = 72 if trans else 69
            dense = normal(batch, across, other) if trans else normal(batch, other, across)
            check("blocksparse_dds", dtype, In(dense), trans, In(S), not turn, Out((batch, other, lines)), ptr, idx, entry,
                  batch, other, lines, across, nnz, heads, block, looser=0.3)  # fmt: skip
    assert ran("BlockSparseMatmulKernelMma", "BlockSparseMatmulKernel") == [24, 0]


@half_float
def test_blocksparse_products_of_special_values_on_tensor_cores(dtype):
    masks = np.array([[[True, False], [True, True]]])
    (row_ptr, col_idx, _), _, same, _ = layout_of(masks)
    S, dense = normal(1, 3, 16, 16), normal(1, 32, 8)
    S[0, 1, 2, 3], dense[0, 5, 4] = np.nan, np.inf  # in a block column that every block row has
    check("blocksparse_dsd", dtype, In(S), False, In(dense), False, Out((1, 32, 8)), row_ptr, col_idx, same,
          1, 32, 8, 32, 3, 1, 16)  # fmt: skip
    assert ran("BlockSparseMatmulKernelMma") == [2]


def test_blocksparse_products_that_tensor_cores_cannot_take(request):
    masks = np.ones((1, 2, 2), bool)
    (row_ptr, col_idx, _), _, same, _ = layout_of(masks)
    S = normal(1, 4, 16, 16)

    def dsd(dtype, n):
        check("blocksparse_dsd", dtype, In(S), False, In(normal(1, 32, n)), False, Out((1, 32, n)), row_ptr, col_idx, same,
              1, 32, n, 32, 4, 1, 16)  # fmt: skip

    dsd("float32", 8)
    dsd("bfloat16", 12)  # rows of 24 bytes
    assert ran("BlockSparseMatmulKernelMma", "BlockSparseMatmulKernel") == [0, 4]
    request.getfixturevalue("capability")("75")
    dsd("bfloat16", 8)
    assert ran("BlockSparseMatmulKernelMma", "BlockSparseMatmulKernel") == [0, 6]


def matmul_case(dtype):
    m, k, n = 66, 120, 72
    return "matmul", dtype, (In(normal(m, k)), In(normal(k, n)), Out((m, n)), m, k, n)


def blocksparse_case(dtype):
    (row_ptr, col_idx, _), _, same, _ = layout_of(np.array([[[True, True], [False, True]]]))
    args = (In(normal(1, 3, 48, 48)), False, In(normal(1, 96, 72)), False, Out((1, 96, 72)), row_ptr, col_idx, same)
    return "blocksparse_dsd", dtype, (*args, 1, 96, 72, 96, 3, 1, 48)


def attention_case(dtype):
    B, H, T, D, block = 1, 2, 70, 64, 16
    (row_ptr, col_idx, part, *_), cols, _, _ = layout_of(np.tri(5, dtype=bool)[None], np.eye(5, dtype=bool)[None])
    strides = heads_strides(B, H, T, D)
    x = [In(normal(B, T, H, D)) for _ in range(4)]
    lse = In(np.full((B, H, T), 5.0), accumulate=True)
    inputs = [y for pair in zip(x, [strides] * 4, strict=True) for y in pair]
    outputs = [y for _ in range(3) for y in (Out((B, T, H, D)), strides)]
    args = (*inputs, In(normal(B, T, H, D)), strides, lse, Out((B, H, T), True), *outputs, row_ptr, col_idx, part, *cols)
    return "attention_backward", dtype, (*args, B, H, T, T, D, 1, block, 0, 0.125)


@half_float
@pytest.mark.parametrize("case", [matmul_case, blocksparse_case, attention_case])
def test_tensor_core_kernels_in_every_order(monkeypatch, case, dtype):
    """More steps than the pipeline has stages: another order of threads or time of copying must not change a bit."""
    name, dtype, args = case(dtype)
    wanted = [found.tobytes() for found in call(backend, name, dtype, args)]
    for order, copies in (("reverse", "early"), ("random:1", "late"), ("random:2", "early")):
        monkeypatch.setenv("NEEDLE_SIM_ORDER", order)
        monkeypatch.setenv("NEEDLE_SIM_CP_ASYNC", copies)
        assert [found.tobytes() for found in call(backend, name, dtype, args)] == wanted, (order, copies)
    assert any(kernel.lower().endswith(("mma", "mma_kernel")) for kernel in backend.launch_counts())


# --- the device ---------------------------------------------------------------------------------------------------------------------------------


def test_memory_is_counted_limited_and_given_back():
    before = backend.memory_stats()
    array = backend.Array(1 << 20, "float32")
    assert backend.memory_stats()["live"] == before["live"] + (4 << 20)
    backend.set_limit(before["live"] + (5 << 20))
    try:
        with pytest.raises(MemoryError):
            backend.Array(1 << 20, "float32")
    finally:
        backend.set_limit(0)
    del array
    backend.empty_cache()
    after = backend.memory_stats()
    assert after["live"] == before["live"] and after["reserved"] <= before["reserved"] + (4 << 20)


def test_threads_of_the_host_do_not_share_partial_results():
    n = 1 << 17  # cut into parts, and large enough for the interpreter's lock to be released meanwhile
    arrays = {value: put(backend, np.full(n, value), "float32") for value in (1, 2)}

    def sums(value):
        found = set()
        for _ in range(50):
            out = backend.Array(1, "float32")
            backend.reduce_sum(arrays[value], out, 1, n, 1)
            found.add(get(backend, out)[0])
            backend.matmul(arrays[1], arrays[value], out, 1, 4096, 1)
            found.add(get(backend, out)[0] * n / 4096)
        return found

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(sums, arrays)) == [{n}, {2 * n}]
    assert ran("reduce_partials_kernel", "matmul_sum_kernel") == [100, 100]


@pytest.mark.parametrize("wait", ["sync", "to_numpy"])
def test_other_threads_run_while_one_waits_for_the_device(wait, monkeypatch):
    monkeypatch.setenv("NEEDLE_SIM_STREAMS", "lazy")
    n, times = (4096, 40) if backend.__device_name__ == "cuda" else (96, 100)
    x, out = put(backend, np.ones((n, n)), "float32"), backend.Array(n * n)
    backend.sync()
    started, done = Event(), Event()

    def other():
        started.wait()
        for _ in range(3):
            time.sleep(1e-3)
        done.set()

    thread = Thread(target=other)
    thread.start()
    for _ in range(times):
        backend.matmul(x, x, out, n, n, n)
    started.set()
    backend.sync() if wait == "sync" else backend.to_numpy(out, (4,), (1,), 0)
    assert done.is_set()
    thread.join()


def test_large_and_small_transfers():
    for size in (1, 1000, (1 << 18) + 5):
        x = normal(size).astype(np.float32)
        array = put(backend, x, "float32")
        x_copy = x.copy()
        x[:] = 0  # the device has its own copy, whenever the transfer happens
        np.testing.assert_array_equal(get(backend, array), x_copy)


def test_device_properties_and_enabled():
    assert backend.enabled() and backend.device_count() >= 1
    properties = backend.device_properties()
    assert properties["warp_size"] == 32 and properties["multiprocessors"] > 0 and properties["total_bytes"] > 0


def test_a_dtype_without_kernel_is_named():
    with pytest.raises(ValueError, match=r"\[exp\] needs a floating dtype, got int32"):
        backend.ewise_exp(backend.Array(3, "int32"), backend.Array(3, "int32"))
