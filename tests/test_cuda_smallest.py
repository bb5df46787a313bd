"""Every CUDA kernel once, as small as shows anything: two blocks, two warps, a tail. `make race SANITIZE=--smallest` runs it.

Each case runs under settings of the emulator that cover the pairs of thread order, streams and cp.async, and once on a GPU.
"""

import re
from pathlib import Path

import numpy as np
import pytest

from kernel_calls import (
    RNG,
    In,
    Out,
    acc,
    backend,
    check,
    check_blocksparse,
    check_random_attention,
    devices,
    get,
    index_of,
    normal,
    put,
)
from needle import dtype as dt

_device = devices("cuda_sim", "cuda")
SETTINGS = [  # order, streams, cp_async, multiprocessors: without any, one block loops over all that there is
    ("forward", "eager", "late", "4"),
    ("forward", "lazy", "early", "4"),
    ("reverse", "eager", "early", "4"),
    ("reverse", "lazy", "late", "4"),
    ("random:1", "eager", "late", "4"),
    ("random:2", "lazy", "early", "4"),
    ("forward", "eager", "late", "0"),
    ("reverse", "lazy", "early", "0"),
]
ONE_BLOCK = {"embedding_scan_kernel"}  # a running sum over the vocabulary
KERNELS = Path(__file__).parent.parent / "src" / "kernels"
# One block's worth of 16-byte vectors and a little more, in every dtype; of elements; of rows that a warp takes each.
VECTORS, ELEMENTS, ROWS, COLS = 256 * 8 + 5, 300, 9, 33


def fills(dtype):
    for make in (lambda a: backend.fill(a, 2.5), lambda a: backend.strided_fill(a, (1,), 0, (ELEMENTS,), 2.5)):
        made = backend.Array(ELEMENTS, dtype)
        make(made)
        np.testing.assert_array_equal(get(backend, made).astype(float), 2.5)
    for kind in (dtype, "int32"):
        made = backend.Array(ELEMENTS, kind)
        backend.arange(made)
        np.testing.assert_array_equal(get(backend, made), np.arange(ELEMENTS).astype(dt.to_numpy(kind)))


def copies(dtype):
    x = normal(ELEMENTS, 3).astype(dt.to_numpy(dtype))
    a, out = put(backend, x, dtype), backend.Array(ELEMENTS, dtype)
    backend.compact(a, out, (ELEMENTS,), (3,), 1)
    np.testing.assert_array_equal(get(backend, out), x[:, 1])
    other = backend.Array(ELEMENTS, "int32")
    backend.compact(a, other, (ELEMENTS,), (3,), 1)
    np.testing.assert_array_equal(get(backend, other), x[:, 1].astype(np.int32))
    wide = normal(33, 40).astype(dt.to_numpy(dtype))
    turned = backend.Array(wide.size, dtype)
    backend.compact(put(backend, wide, dtype), turned, (40, 33), (1, 40), 0)
    np.testing.assert_array_equal(get(backend, turned).reshape(40, 33), wide.T)
    rows = normal(33, 72).astype(dt.to_numpy(dtype))
    for kind in ("float32", "bfloat16"):  # a copy and a conversion, 16 bytes at a time
        part = backend.Array(33 * 64, kind)
        backend.compact(put(backend, rows, dtype), part, (33, 64), (72, 1), 0)
        np.testing.assert_array_equal(get(backend, part).reshape(33, 64), rows[:, :64].astype(dt.to_numpy(kind)))


def elementwise(dtype):
    a, b = normal(VECTORS), normal(VECTORS)
    check("ewise_gelu_erf", dtype, In(a), Out(VECTORS))
    check("ewise_mul", dtype, In(a), In(b), Out(VECTORS))
    n = ELEMENTS
    check("ewise_negate", dtype, In(a), (2,), 1, Out(n), (n,))
    check("ewise_add", dtype, In(a), (0,), 0, In(b), (1,), 0, Out(n), (n,))
    check("where", dtype, a[:n] > 0, (1,), 0, In(a), (1,), 0, In(b), (0,), 0, Out(n), (n,))


def reductions(dtype):
    check("reduce_sum", dtype, In(normal(70, 33)), Out(70), 70, 33, 1)
    check("reduce_sum", dtype, In(normal(70, 33)), Out(70, accumulate=True), 70, 33, 1)
    check("reduce_max", dtype, In(normal(129, 257)), Out(257), 1, 129, 257)  # split: two kernels
    out = backend.Array(70, "int64")
    x = RNG.integers(0, 9, (70, 33))
    backend.reduce_argmax(put(backend, x, dtype), out, 70, 33, 1)
    np.testing.assert_array_equal(get(backend, out), x.argmax(1))


def matmul(dtype):
    m, k, n = 19, 512, 15  # two parts of k
    check("matmul", dtype, In(normal(m, k)), In(normal(k, n)), Out((m, n)), m, k, n)
    m, k, n = 70, 37, 69
    for trans in (False, True):
        a, b = (normal(k, m) if trans else normal(m, k)), (normal(n, k) if trans else normal(k, n))
        check("matmul", dtype, In(a), 0, (0,), a.shape[1], trans, In(b), 0, (0,), b.shape[1], trans,
              Out((2, m, n)), (2,), m, k, n, False)  # fmt: skip


def tensor_cores(dtype):
    """As bfloat16: rows of whole 16 bytes, which ldmatrix and cp.async need."""
    m, k, n = 70, 40, 72
    for trans in (False, True):
        a, b = (normal(k, 72) if trans else normal(m, k)), (normal(n, k) if trans else normal(k, n))
        check("matmul", dtype, In(a), 0, (0,), a.shape[1], trans, In(b), 0, (0,), b.shape[1], trans,
              Out((2, m, n)), (2,), m, k, n, False)  # fmt: skip
    check_blocksparse(dtype, 16, heads=2, batch=2, n_rows=2, n_cols=2, other=24)


def convolution(dtype):
    about = 1, 8, (5, 3, 1, 1, 5), (14, 3, 1, 1, 14), 40  # images, channels, windows along rows and along columns, outputs
    x, kernel, dy = In(normal(5, 14, 8)), In(normal(72, 40)), In(normal(70, 40))
    check("conv_forward", dtype, x, kernel, Out((70, 40)), *about, looser=3)
    check("conv_backward", dtype, x, dy, Out((72, 40), True), *about, False, looser=3)


def softmax(dtype):
    for rows, cols in ((ROWS, COLS), (2, 1025)):  # a warp a row, a block a row
        x, dy = normal(rows, cols), normal(rows, cols)
        y = np.exp(x) / np.exp(x).sum(1, keepdims=True)
        lse = np.log(np.exp(x).sum(1))
        check("softmax_forward", dtype, In(x), Out(x.shape), rows, cols)
        check("softmax_backward", dtype, In(y), In(dy), Out(x.shape), rows, cols)
        check("log_softmax_forward", dtype, In(x), Out(x.shape), rows, cols)
        check("log_softmax_backward", dtype, In(np.log(y)), In(dy), Out(x.shape), rows, cols)
        check("logsumexp_forward", dtype, In(x), Out(rows), rows, cols)
        check("logsumexp_backward", dtype, In(x), In(lse), In(normal(rows)), Out(x.shape), rows, cols)
        targets = RNG.integers(0, cols, rows)
        parts = acc(np.stack([x.max(1), lse - x.max(1)], 1))
        check("cross_entropy_forward", dtype, In(x), targets, Out(rows, True), Out((rows, 2), True), rows, cols, -100)
        check("cross_entropy_backward", dtype, In(x), targets, parts, acc(normal(rows)), Out(x.shape), rows, cols, -100)


def layer_norm(dtype):
    for rows, cols in ((70, 133), (2, 1025)):
        x, dy, weight, bias = normal(rows, cols) + 2, normal(rows, cols), normal(cols), normal(cols)
        mean, rstd = x.mean(1), 1 / np.sqrt(x.var(1) + 1e-5)
        check("layer_norm_forward", dtype, In(x), In(weight), In(bias), Out(x.shape), Out(rows, True), Out(rows, True),
              rows, cols, 1e-5)  # fmt: skip
        check("layer_norm_backward", dtype, In(dy), In(x), In(weight), acc(mean), acc(rstd), Out(x.shape), Out(cols),
              Out(cols), acc(np.zeros(64 * 2 * cols)), rows, cols, looser=4)  # fmt: skip


def batch_norm(dtype):
    for rows, cols in ((70, COLS), (2, ELEMENTS)):  # two rows of some partial sums; columns of two blocks
        x, dy, weight, bias = normal(rows, cols) + 2, normal(rows, cols), normal(cols), normal(cols)
        workspace = acc(np.zeros(64 * 2 * cols))
        check("batch_norm_forward", dtype, In(x), In(weight), In(bias), Out(x.shape), Out(cols, True), Out(cols, True), workspace,
              rows, cols, 1e-2)  # fmt: skip
        check("batch_norm_backward", dtype, In(dy), In(x), In(weight), acc(x.mean(0)), acc(x.var(0)), Out(x.shape), Out(cols),
              Out(cols), workspace, rows, cols, 1e-2, looser=4)  # fmt: skip


def lstm(dtype):
    shape = ROWS, COLS
    gates, before, c, dh = normal(ROWS, 4 * COLS), acc(normal(*shape)), normal(*shape), normal(*shape)
    check("lstm_cell_forward", dtype, Out(gates.shape, values=gates), before, Out(shape, True), Out(shape), *shape)
    check("lstm_cell_backward", dtype, Out(gates.shape, values=np.tanh(gates)), before, acc(c), In(dh), In(dh * 2),
          Out(shape, True, c), *shape)  # fmt: skip


def rotary(dtype):
    B, H, T = 1, 4, 33
    for D, rot in ((10, 6), (24, 16)):  # elements, vectors of 16 bytes
        angle = np.arange(T)[:, None] / 10.0 ** np.arange(rot // 2)
        strides = (H * T * D, T * D, D, 1)
        check("rotary", dtype, In(normal(B, H, T, D)), strides, 0, np.cos(angle).astype(np.float32),
              np.sin(angle).astype(np.float32), Out((B, H, T, D)), strides, B, H, T, D, rot, False)  # fmt: skip


def embedding(dtype):
    n = vocab = ELEMENTS
    ids = RNG.integers(0, vocab, n).astype(np.int32)
    check("embedding_backward", dtype, In(normal(n, 5)), ids, Out((vocab, 5)), np.zeros(n + vocab + 1, np.int32),
          n, vocab, 5, False, looser=2)  # fmt: skip
    places = np.where(np.arange(n) % 3, np.arange(n)[::-1], -1).astype(np.int32)
    for dim in (5, 8):  # elements, vectors of 16 bytes
        check("embedding_forward", dtype, In(normal(vocab, dim)), ids, Out((n, dim)), n, vocab, dim)
        values = normal(vocab, dim)
        check("embedding_put", dtype, In(normal(n, dim)), places, Out((vocab, dim), values=values), n, vocab, dim)
    out = backend.Array(11 * COLS, dtype)
    backend.one_hot(put(backend, ids[:11] % COLS, "int32"), out, 11, COLS)
    np.testing.assert_array_equal(get(backend, out).reshape(11, COLS), np.eye(COLS)[ids[:11] % COLS])


def updates(dtype):
    n = ELEMENTS
    check("sgd_step", dtype, Out(n, values=normal(n)), In(normal(n)), Out(n, True, normal(n)), 1e-2, 0.9, 0.1)
    check("adam_step", dtype, Out(n, values=normal(n)), In(normal(n)), Out(n, True, normal(n)),
          Out(n, True, normal(n) ** 2), np.array([0.5], np.float32), 1e-2, 0.9, 0.95, 1e-8, 0.1, 0.1, 3)  # fmt: skip


def unscale(dtype):
    x = normal(ELEMENTS)
    for bad in (False, True):
        x[-1] = np.inf if bad else 1
        grad, flag = put(backend, x, dtype), put(backend, np.zeros(1), "int32")
        backend.unscale(grad, 0.25, flag)
        np.testing.assert_array_equal(get(backend, grad), x.astype(dt.to_numpy(dtype)) * np.float32(0.25))
        assert get(backend, flag)[0] == bad


def dropout(dtype):
    n = 4 * 256 + 5
    check("dropout", dtype, In(normal(n)), Out(n), 0.3, 11, 4)


def attention(dtype):
    for D in (16, 20):  # heads that ldmatrix can read, and others
        check_random_attention(dtype, 1, 2, 33, 33, D, 32, 1, 0)


def attention_decode(dtype):
    B, H, S, D, block = 2, 2, 130, 20, 128  # two parts
    masks = np.tril(np.ones((1, 2, 2), bool))
    (row_ptr, col_idx, *_), _ = index_of(masks)
    rows, strides = [normal(B, H, D) for _ in range(3)], (H * D, D)
    caches = [Out((B, H, S, D), values=normal(B, H, S, D)) for _ in range(2)]
    positions = np.array([S - 1, 17], np.int32)
    check("attention_decode", dtype, *(part for row in rows for part in (In(row), strides)), *caches, positions,
          Out((B, H, D)), row_ptr, col_idx, B, H, S, D, 1, block, D**-0.5)  # fmt: skip


def blocksparse(dtype):
    check_blocksparse(dtype, 16, heads=2, batch=2, n_rows=2, n_cols=2, other=21)


CASES = [fills, copies, elementwise, reductions, matmul, tensor_cores, convolution, softmax, layer_norm, batch_norm, lstm, rotary,
         embedding, updates, unscale, dropout, attention, attention_decode, blocksparse]  # fmt: skip


def run(case, dtype, monkeypatch):
    """The case under each setting. Returns kernel name -> (blocks, threads)."""
    backend.reset_launch_counts()
    settings = SETTINGS if backend.__device_name__ == "cuda_sim" else SETTINGS[:1]
    for order, streams, cp_async, multiprocessors in settings:
        monkeypatch.setenv("NEEDLE_SIM_ORDER", order)
        monkeypatch.setenv("NEEDLE_SIM_STREAMS", streams)
        monkeypatch.setenv("NEEDLE_SIM_CP_ASYNC", cp_async)
        monkeypatch.setenv("NEEDLE_SIM_MULTIPROCESSORS", multiprocessors)
        case(dtype)
        backend.sync()
    return backend.launch_extents()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_smallest(case, dtype, monkeypatch):
    for name, (blocks, threads) in run(case, dtype, monkeypatch).items():
        assert blocks >= 2 or name in ONE_BLOCK, f"{name} ran with one block"
        assert threads >= 64, f"{name} ran with {threads} threads"


def test_every_kernel_has_a_case(monkeypatch):
    text = "".join(path.read_text() for path in sorted(KERNELS.glob("*_cuda.cu*")))
    kernels = re.findall(r"__global__ void (?:__launch_bounds__\(.*?\)\s+)?(\w+)\(", text)
    assert len(kernels) == text.count("__global__"), "a kernel's declaration was not understood"
    if backend.device_properties()["compute_capability"] < (8, 0):  # where the plain twins of those on tensor cores are chosen
        kernels = [name for name in kernels if "mma" not in name.lower()]
    monkeypatch.setattr("test_cuda_smallest.SETTINGS", SETTINGS[:1])
    found = set()
    for dtype in ("float32", "bfloat16"):
        for case in CASES:
            found |= set(run(case, dtype, monkeypatch))
    missing = sorted(set(kernels) - found)
    assert not missing, f"kernels without a case: {', '.join(missing)}"
