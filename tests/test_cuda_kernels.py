"""The CUDA kernels, run by the emulated device and by a GPU: which of them a call takes, tensor cores, and what a device does besides."""

import math
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Thread

import numpy as np
import pytest

import needle as ndl
from devices import WATCHED
from kernel_calls import (
    FLOATS,
    TOLERANCE,
    In,
    Out,
    backend,
    call,
    check,
    check_blocksparse,
    check_random_attention,
    devices,
    every_float,
    get,
    head_strides,
    index_of,
    normal,
    put,
)
from needle import dtype as dt
from needle.backend_ndarray import kernels
from needle.backend_ndarray.block_layout import BlockLayout
from needle.backend_ndarray.ndarray import NDArray
from needle.errors import OutOfMemoryError

_device = devices("cuda_sim", "cuda")


@pytest.fixture
def tensor_cores(_device):
    if backend.device_properties()["compute_capability"] < (8, 0):
        pytest.skip("needs compute capability 8.0 or later")


@pytest.fixture
def capability(_device, monkeypatch):
    """Makes the emulated device one of another compute capability."""
    if backend.__device_name__ != "cuda_sim":
        pytest.skip("only the emulated device can change its compute capability")
    return lambda wanted: monkeypatch.setenv("NEEDLE_SIM_SM", wanted)


HALF_FLOATS = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])


def half_float(test):
    """A test of tensor cores."""
    return pytest.mark.usefixtures("tensor_cores")(HALF_FLOATS(test))


def ran(*names):
    counts = backend.launch_counts()
    return [counts.get(n, 0) for n in names]


def aligned(n):
    """The next multiple of 8 elements: 16 bytes of a 16-bit dtype."""
    return -(-n // 8) * 8


# --- movement and elementwise -------------------------------------------------------------------------------------------


def test_transposing_copy_goes_by_tiles():
    shape, x = (3, 45, 70), normal(3, 45, 70)
    for dtype in FLOATS + ["uint8", "bool"]:
        a = put(backend, x > 0 if dtype == "bool" else x * 3 % 100, dtype)
        out = backend.Array(a.size, dtype)
        backend.compact(a, out, (3, 70, 45), (45 * 70, 1, 70), 0)
        np.testing.assert_array_equal(get(backend, out), get(backend, a).reshape(shape).swapaxes(1, 2).reshape(-1), err_msg=dtype)
    assert ran("transpose_copy_kernel", "strided_copy_kernel") == [6, 0]


@every_float
@pytest.mark.parametrize(
    ("cols", "stride", "offset", "aligned"),
    [(64, 64, 0, True), (64, 80, 16, True), (64, 65, 0, False), (64, 80, 1, False), (61, 80, 0, False)],
)
def test_rows_in_vectors(dtype, cols, stride, offset, aligned):
    """16 bytes at a time where rows are aligned; rows, columns and numbers that are broadcast over them go along."""
    rows, x = 96, normal(offset + 96 * stride)
    shape = rows, cols

    def check_blocks(kernel, *dtypes):
        elements = 16 // max(dt.to_numpy(d).itemsize for d in dtypes) if aligned else 1
        blocks = math.ceil(rows * cols / elements / 256)
        assert backend.launch_extents()[kernel][0] == min(blocks, 16 * backend.device_properties()["multiprocessors"])
        backend.reset_launch_counts()

    backend.reset_launch_counts()
    for other, strides in ((normal(cols), (0, 1)), (normal(rows), (1, 0)), (normal(1), (0, 0))):
        operands = (In(x), (stride, 1), offset), (In(other), strides, 0)
        for a, b in (operands, operands[::-1]):
            check("ewise_sub", dtype, *a, *b, Out(rows * cols), shape)
            check_blocks("ewise_binary_kernel", dtype)
    a = put(backend, x, dtype)
    view = get(backend, a)[offset:].reshape(rows, stride)[:, :cols]
    for to in FLOATS:
        out = backend.Array(rows * cols, to)
        backend.compact(a, out, shape, (stride, 1), offset)
        np.testing.assert_array_equal(get(backend, out).reshape(shape), view.astype(dt.to_numpy(to)), err_msg=to)
        if to != dtype:
            check_blocks("convert_copy_kernel", dtype, to)
        elif cols != stride:  # else it is one copy without a kernel
            check_blocks("strided_copy_kernel", dtype)


@pytest.mark.parametrize(
    ("shape", "parts"),
    [((1, 70000, 1), 1), ((3, 5000, 1), 1), ((2, 9000, 3), 1), ((300, 9, 1), 0), ((1, 300, 40), 1), ((4, 33, 65), 0)],
)
def test_long_reductions_are_split(shape, parts):
    x, n = In(normal(*shape)), shape[0] * shape[2]
    check("reduce_sum", "float32", x, Out(n), *shape)
    assert ran("reduce_partials_kernel") == [2 * parts]


# --- matrix products ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "kernel", "k", "tail"), [("float32", "matmul_kernel", 50, 14), ("bfloat16", "matmul_kernel", 50, 14),
                                                            ("bfloat16", "matmul_mma_kernel", 56, 16)])  # fmt: skip
def test_matmul_of_large_tiles(dtype, kernel, k, tail):
    """Taken where they give every multiprocessor one."""
    properties = backend.device_properties()
    if kernel == "matmul_mma_kernel" and properties["compute_capability"] < (8, 0):
        pytest.skip("needs compute capability 8.0 or later")
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
                  Out((2, 2, m, n), wide, normal(2, 2, m, n)), (2, 2), m, k, n, accumulate, looser=10 if wide else 0.3)  # fmt: skip
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
                  Out((2, 2, m, n), wide, normal(2, 2, m, n)), (2, 2), m, k, n, accumulate, looser=3)  # fmt: skip
    assert ran("sum_parts_kernel") == [24 if parts > 1 else 0]


def test_matmul_of_more_than_is_counted():
    """Not run, but refused: an odd number of products, which cannot be cut into equal parts either."""
    x, out, k = put(backend, [1], "int32"), backend.Array(1, "int32"), 2**31 + 1
    with pytest.raises(ValueError, match=rf"^\[matmul\] an inner dimension of {k} has no kernel on this device"):
        backend.matmul(x, 0, (), k, False, x, 0, (), 1, False, out, (), 1, k, 1, False)


def test_more_ids_than_the_gradient_of_an_embedding_counts():
    dy, ids, workspace = backend.Array(1), backend.Array(1, "int32"), backend.Array(2, "int32")
    with pytest.raises(ValueError, match=rf"^\[embedding_backward\] {2**31} ids have no kernel on this device"):
        backend.embedding_backward(dy, ids, backend.Array(1), workspace, 2**31, 1, 1, False)


def test_no_elements_beside_a_long_dimension():
    a, out = backend.Array(64), backend.Array(1)
    backend.ewise_add(a, (4, 1), 0, a, (8, 1), 0, out, (0, 2**34))
    backend.sync()


# --- convolution ----------------------------------------------------------------------------------------------------------


@half_float
def test_convolution_on_tensor_cores(dtype):
    """Tiles of every size, their tails, windows that end on any side of the image; parts of the windows."""
    properties = backend.device_properties()
    large = math.ceil(128 * properties["multiprocessors"] ** 0.5 / 12)  # whose square has a tile for every multiprocessor
    sizes = [(1, 1, 8, 8), (3, 9, 16, 24), (2, 19, 8, 72), (2, large, 8, 136)]
    for images, side, channels, outputs in sizes:
        rows, cols = (side, 3, 1, 1, side), (side + 1, 4, 2, 3, side // 2 + 2)
        windows, elements, about = images * rows[4] * cols[4], 12 * channels, (images, channels, rows, cols, outputs)
        x, kernel = In(normal(images, side, side + 1, channels)), In(normal(elements, outputs))
        check("conv_forward", dtype, x, kernel, Out((windows, outputs)), *about)
        dkernel = Out((elements, outputs), True, normal(elements, outputs))
        check("conv_backward", dtype, x, In(normal(windows, outputs)), dkernel, *about, True, looser=10)
    assert ran("conv_forward_mma_kernel", "conv_backward_mma_kernel") == [2 * len(sizes)] * 2
    assert ran("conv_forward_kernel", "conv_backward_kernel") == [0, 0]


@pytest.mark.parametrize(
    ("why", "dtype", "channels", "outputs"),
    [
        ("channels", "float16", 4, 16),
        ("outputs", "bfloat16", 8, 12),
        ("dtype", "float32", 8, 16),
        ("capability", "bfloat16", 8, 16),
    ],
)
def test_convolution_that_tensor_cores_cannot_take(request, why, dtype, channels, outputs):
    if why == "capability":
        request.getfixturevalue("capability")("75")
    about = 2, channels, (5, 3, 1, 1, 5), (4, 3, 1, 1, 4), outputs
    x = In(normal(2, 5, 4, channels))
    check("conv_forward", dtype, x, In(normal(9 * channels, outputs)), Out((40, outputs)), *about, looser=3)
    check("conv_backward", dtype, x, In(normal(40, outputs)), Out((9 * channels, outputs), True), *about, False, looser=10)
    assert ran("conv_forward_mma_kernel", "conv_forward_kernel", "conv_backward_mma_kernel", "conv_backward_kernel") == [0, 2, 0, 2]


@every_float
@pytest.mark.parametrize(("images", "parts"), [(15, 1), (16, 2), (25, 3)])
def test_the_gradient_of_a_kernel_by_parts(dtype, images, parts):
    """Of 32 windows an image, 256 or a few more to a part, the last of which may have fewer; with and without accumulation."""
    for channels, outputs in ((3, 5), (8, 16)):  # the second on tensor cores, where there are any
        elements, about = 9 * channels, (images, channels, (4, 3, 1, 1, 4), (8, 3, 1, 1, 8), outputs)
        x, dy = In(normal(images, 4, 8, channels)), In(normal(images * 32, outputs))
        for values in (None, normal(elements, outputs)):
            check("conv_backward", dtype, x, dy, Out((elements, outputs), True, values), *about, values is not None, looser=10)
    assert ran("sum_parts_kernel") == [8 if parts > 1 else 0]


def test_more_windows_than_are_counted():
    x, out = put(backend, [1], "float32"), backend.Array(1, "float32")
    with pytest.raises(ValueError, match=r"^\[conv\] 2147483648 windows of 1 elements have no kernel on this device"):
        backend.conv_forward(x, x, out, 1, 1, (1, 1, 1, 0, 2**31), (1, 1, 1, 0, 1), 1)


# --- ids ----------------------------------------------------------------------------------------------------------------


def test_an_id_out_of_range_is_raised_in_the_thread_that_gave_it():
    """And where its array may be read: in the thread that waits first. Each of two threads has its own error."""

    def one_hot(value):
        backend.one_hot(put(backend, np.array([value]), "int64"), backend.Array(3, "float32"), 1, 3)

    with ThreadPoolExecutor(1) as other:
        for wrong in (7, 8):  # it never waits: each is raised here
            other.submit(one_hot, wrong).result()
            with pytest.raises(IndexError, match=rf"\[one_hot\] id {wrong} "):
                backend.sync()
            backend.sync()
        with pytest.raises(IndexError, match="id 8 "):
            other.submit(backend.sync).result()
        other.submit(backend.sync).result()
        one_hot(3)
        other.submit(one_hot, 4).result()
        with pytest.raises(IndexError, match="id 4 "):
            other.submit(backend.sync).result()
        with pytest.raises(IndexError, match="id 3 "):
            backend.sync()
        for sync in (backend.sync, other.submit(backend.sync).result):
            sync()


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


# --- attention and block-sparse products --------------------------------------------------------------------------------


ATTENTION_KERNELS = [f"attention_{part}_{kind}" for kind in ("mma_kernel", "kernel") for part in ("forward", "dq", "dkdv")]


@half_float
@pytest.mark.parametrize(
    ("B", "H", "T", "S", "D", "block", "heads", "q_start"),
    [(2, 4, 50, 50, 16, 16, 2, 0), (1, 2, 37, 80, 24, 32, 1, 43), (1, 1, 70, 70, 64, 64, 1, 0), (1, 1, 130, 140, 72, 128, 1, 10),
     (1, 2, 60, 60, 128, 48, 2, 0), (1, 1, 40, 40, 200, 16, 1, 0), (1, 1, 1, 90, 256, 64, 1, 89)],
)  # fmt: skip
def test_attention_on_tensor_cores(dtype, B, H, T, S, D, block, heads, q_start):
    check_random_attention(dtype, B, H, T, S, D, block, heads, q_start)
    assert ran(*ATTENTION_KERNELS) == [2, 2, 2, 0, 0, 0]


@half_float
def test_attention_of_special_values_on_tensor_cores(dtype):
    B, H, T, D, block = 1, 2, 40, 16, 32
    (row_ptr, col_idx, part, _), _ = index_of(np.ones((1, 2, 2), bool))
    q, k, v = (normal(B, T, H, D) for _ in range(3))
    strides = head_strides(B, H, T, D)
    q[0, 2, 0, 1], k[0, 35, 1, 0], v[0, 5, 0, 3], v[0, 39, 0, 4] = np.nan, np.nan, np.nan, np.inf
    check("attention_forward", dtype, In(q), strides, In(k), strides, In(v), strides, Out((B, T, H, D)), strides,
          Out((B, H, T), True), row_ptr, col_idx, part, B, H, T, T, D, 1, block, 0, 0.25)  # fmt: skip
    assert ran(*ATTENTION_KERNELS)[0] == 2


@pytest.mark.parametrize(("dtype", "D", "sm"), [("float32", 16, None), ("bfloat16", 20, None), ("float16", 16, "75")])
def test_attention_that_tensor_cores_cannot_take(request, dtype, D, sm):
    if sm:
        request.getfixturevalue("capability")(sm)
    check_random_attention(dtype, 1, 2, 37, 37, D, 16, 1, 0)
    assert ran(*ATTENTION_KERNELS) == [0, 0, 0, 2, 2, 2]


@pytest.mark.parametrize(("sm", "dtype", "most"), [("75", "float32", 65536), ("86", "float64", 101376)])
def test_heads_that_shared_memory_cannot_hold(capability, sm, dtype, most):
    """One clear error, and the device goes on."""
    capability(sm)
    with pytest.raises(ValueError, match=rf"attention_dq_kernel\] a block needs \d+ bytes of shared memory .at most {most} on"):
        check_random_attention(dtype, 1, 1, 16, 16, 200, 16, 1, 0)
    check_random_attention(dtype, 1, 1, 16, 16, 64, 16, 1, 0)


def test_attention_of_a_view_that_is_not_aligned(tensor_cores):
    x = NDArray(normal(1, 2, 40, 24), device=getattr(ndl, backend.__device_name__)(), dtype="bfloat16")[:, :, :, 4:20]
    layout = BlockLayout(np.ones((3, 3)), 16, causal=True)
    found = [kernels.attention(y, y, y, layout, 0.25)[0].numpy().astype(np.float64) for y in (x, x.copy())]
    np.testing.assert_allclose(*found, atol=TOLERANCE["bfloat16"])
    assert ran(*ATTENTION_KERNELS) == [1, 0, 0, 1, 0, 0]


@half_float
@pytest.mark.parametrize("block", [16, 32, 48, 64, 128])
def test_blocksparse_products_on_tensor_cores(dtype, block):
    """The dense dimension has a tail where no aligned rows run along it."""
    heads, batch = (2, 4) if block < 64 else (1, 2)
    check_blocksparse(dtype, block, heads, batch, 3 if block < 128 else 2, 2, other=72, tail=69, looser=0.3)
    assert ran("BlockSparseMatmulKernelMma", "BlockSparseMatmulKernel") == [24, 0]


@pytest.mark.parametrize("product", ["sdd", "dsd", "dds"])
@pytest.mark.parametrize("shifted", [(4, 0), (0, 4), (0, 0)])
def test_blocksparse_products_of_views_that_are_not_aligned(tensor_cores, product, shifted):
    """Tensor cores take none of which an operand begins 8 bytes after a multiple of 16."""
    layout, device = BlockLayout(np.tril(np.ones((2, 2))), 16), getattr(ndl, backend.__device_name__)()
    blocks = (1, 3, 16, 16)
    shapes = {"sdd": ((1, 32, 24), (1, 24, 32)), "dsd": (blocks, (1, 32, 24)), "dds": ((1, 24, 32), blocks)}[product]
    flat = [NDArray(normal(by + math.prod(shape)), device=device, dtype="bfloat16") for by, shape in zip(shifted, shapes)]
    operands = [x[by:].reshape(shape) for x, by, shape in zip(flat, shifted, shapes)]
    multiply = getattr(kernels, f"blocksparse_{product}")
    found = [multiply(*xs, layout).numpy().astype(np.float64) for xs in (operands, [x.copy() for x in operands])]
    np.testing.assert_allclose(*found, atol=TOLERANCE["bfloat16"])
    taken = 2 if shifted == (0, 0) else 1
    assert ran("BlockSparseMatmulKernelMma", "BlockSparseMatmulKernel") == [taken, 2 - taken]


@half_float
def test_blocksparse_products_of_special_values_on_tensor_cores(dtype):
    masks = np.array([[[True, False], [True, True]]])
    (row_ptr, col_idx, _, entry), _ = index_of(masks)
    S, dense = normal(1, 3, 16, 16), normal(1, 32, 8)
    S[0, 1, 2, 3], dense[0, 5, 4] = np.nan, np.inf  # in a block column that every block row has
    check("blocksparse_dsd", dtype, In(S), False, In(dense), False, Out((1, 32, 8)), row_ptr, col_idx, entry,
          1, 32, 8, 32, 3, 1, 16)  # fmt: skip
    assert ran("BlockSparseMatmulKernelMma") == [2]


def test_blocksparse_products_that_tensor_cores_cannot_take(request):
    masks = np.ones((1, 2, 2), bool)
    (row_ptr, col_idx, _, entry), _ = index_of(masks)
    S = normal(1, 4, 16, 16)

    def dsd(dtype, n):
        check("blocksparse_dsd", dtype, In(S), False, In(normal(1, 32, n)), False, Out((1, 32, n)), row_ptr, col_idx, entry,
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
    (row_ptr, col_idx, _, entry), _ = index_of(np.array([[[True, True], [False, True]]]))
    args = (In(normal(1, 3, 48, 48)), False, In(normal(1, 96, 72)), False, Out((1, 96, 72)), row_ptr, col_idx, entry)
    return "blocksparse_dsd", dtype, (*args, 1, 96, 72, 96, 3, 1, 48)


def attention_case(dtype):
    B, H, T, D, block = 1, 2, 70, 64, 16
    rows, cols = index_of(np.tri(5, dtype=bool)[None], np.eye(5, dtype=bool))
    strides = head_strides(B, H, T, D)
    x = [In(normal(B, T, H, D)) for _ in range(4)]
    lse = In(np.full((B, H, T), 5.0), accumulate=True)
    inputs = [y for pair in zip(x, [strides] * 4, strict=True) for y in pair]
    outputs = [y for _ in range(3) for y in (Out((B, T, H, D)), strides)]
    args = (*inputs, In(normal(B, T, H, D)), strides, lse, Out((B, H, T), True), *outputs, *rows[:3], *cols[:3])
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


# --- the device ---------------------------------------------------------------------------------------------------------


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
    assert ran("reduce_partials_kernel", "sum_parts_kernel") == [100, 100]


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


def test_device_properties():
    assert backend.device_count() >= 1
    properties = backend.device_properties()
    assert properties["warp_size"] == 32 and properties["multiprocessors"] > 0 and properties["total_bytes"] > 0


# --- memory that is not the allocator's ---------------------------------------------------------------------------------


@pytest.fixture
def leave(_device, monkeypatch):
    """Gives the emulated device so many bytes more than are taken, to within a MiB."""
    if backend.__device_name__ != "cuda_sim":
        pytest.skip("only the emulated device can change its memory")

    def give(spare):
        properties = backend.device_properties()
        taken = properties["total_bytes"] - properties["free_bytes"]
        monkeypatch.setenv("NEEDLE_SIM_MEMORY", str((taken + spare) >> 20))

    backend.empty_cache()
    yield give
    backend.sync()


@pytest.mark.parametrize("n", [1, 1 << 20])  # of the second sum the partial ones go through scratch memory
def test_a_launch_without_memory_gets_what_is_kept(leave, n):
    x, out = put(backend, np.ones(n), "float32"), backend.Array(1)
    backend.Array(1 << 22)
    kept = backend.memory_stats()["reserved"]
    if WATCHED:
        pytest.skip("an allocator that a sanitizer watches keeps nothing")
    leave(0)
    backend.reset_launch_counts()
    backend.reduce_sum(x, out, 1, n, 1)
    assert get(backend, out)[0] == n and backend.memory_stats()["reserved"] < kept
    assert set(backend.launch_counts().values()) == {1}


def test_an_array_without_memory_gets_what_is_kept(leave):
    """Together with what is free: neither alone has room for it."""
    backend.Array(1 << 20)
    if WATCHED:
        pytest.skip("an allocator that a sanitizer watches keeps nothing")
    leave(3 << 20)
    large = backend.Array(5 << 18)
    backend.fill(large, 2.0)
    assert get(backend, large)[-1] == 2


def test_a_launch_without_memory_is_out_of_memory(leave, monkeypatch):
    out = backend.Array(1 << 20)
    backend.fill(out, 1.0)
    leave(0)
    with pytest.raises(OutOfMemoryError, match=r"fill_kernel(<float>)?\] launch failed: out of memory, .* live") as caught:
        backend.fill(out, 2.0)
    assert caught.value.requested_bytes == 0 and caught.value.stats["live"] >= 4 << 20
    monkeypatch.delenv("NEEDLE_SIM_MEMORY")
    assert get(backend, out)[0] == 1
    backend.fill(out, 2.0)
    assert get(backend, out)[0] == 2


def test_a_device_that_begins_without_memory(leave):
    """Its own memory has no room; later it has."""
    code = """if True:
        import os
        import needle
        from needle.errors import OutOfMemoryError
        device = needle.cuda_sim()
        os.environ["NEEDLE_SIM_SM"] = "90"  # which the 32 MiB belong to
        assert device.enabled()
        for _ in range(2):
            os.environ["NEEDLE_SIM_MEMORY"] = "16"
            try:
                device.zeros(3)
            except OutOfMemoryError as error:
                print(str(error).splitlines()[0])
        os.environ["NEEDLE_SIM_MEMORY"] = "64"
        print(device.ones(3).numpy().sum())
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    refused = (
        "[cuda_sim] out of memory: the first use takes 32 MiB for kernels; 16 of 16 MiB are free, 0 bytes live, 0 bytes reserved"
    )
    assert done.stdout.splitlines() == [refused, refused, "3.0"], done.stderr
