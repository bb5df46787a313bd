"""NDArray: views, indexing, dtypes, reductions, products, interchange, errors, and the allocator's account."""

import copy
import itertools
import operator
import pickle
import sys
from types import ModuleType

import numpy as np
import pytest

import needle as ndl
from needle import dtype as dt
from needle.backend_ndarray import device as device_module
from needle.backend_ndarray import kernels
from needle.backend_ndarray.ndarray import NDArray, asarray, empty, from_dlpack, full, matmul, where
from needle.errors import DeviceError, DTypeError, OutOfMemoryError, ShapeError

X = np.random.default_rng(0).standard_normal((4, 5, 6)).astype(np.float32)
INDICES = [
    np.s_[1:3], np.s_[:, ::-1], np.s_[-3:-1, ..., ::2], np.s_[..., None, 2:4], np.s_[::-2, 1:], np.s_[3:1], np.s_[None, :, 4:0:-2],
]  # fmt: skip


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_indexing_reads_and_writes_as_numpy(device, index):
    a, expected = NDArray(X, device=device), X.copy()
    np.testing.assert_array_equal(a[index].numpy(), X[index])
    a[index] = 7.0
    expected[index] = 7.0
    np.testing.assert_array_equal(a.numpy(), expected)
    values = np.random.default_rng(1).standard_normal(X[index].shape).astype(np.float32)
    a[index] = NDArray(values, device=device)
    expected[index] = values
    np.testing.assert_array_equal(a.numpy(), expected)


def test_tensors_take_indices_and_axes_as_numpy_does(host):
    t = ndl.Tensor(X, device=host)
    for index in (np.s_[1], np.s_[-1, :, 2], np.s_[..., 0], np.s_[None, 2, 1:3, None, -1]):
        np.testing.assert_array_equal(t[index].numpy(), X[index])
    assert [row.shape for row in t] == [(5, 6)] * 4
    np.testing.assert_array_equal(t.T.numpy(), X.T)
    np.testing.assert_array_equal(t.permute((1, 2, 0)).numpy(), X.transpose(1, 2, 0))
    with pytest.raises(ShapeError, match="0-d"):
        list(ndl.Tensor(1.0, device=host))
    assert (t[0, 0] * np.array([[2.0]])).shape == (1, 6) and (t[0, 0] * np.array([2.0])).shape == (6,)
    with pytest.raises(IndexError, match="out of range for axis 0 of length 4"):
        t[4]
    with pytest.raises(IndexError, match="too many indices"):
        t[0, 0, 0, 0]


@pytest.mark.parametrize("a", list(dt.ROWS))
@pytest.mark.parametrize("b", list(dt.ROWS))
def test_every_pair_of_dtypes_converts_and_adds(device, a, b):
    x = NDArray([0, 1, 2, 3], device=device, dtype=a)
    np.testing.assert_array_equal(x.astype(b).numpy().astype(float), [0, 1, 1, 1] if "bool" in (a, b) else [0, 1, 2, 3])
    total = x + NDArray([0, 1, 1, 0], device=device, dtype=b)
    assert total.dtype == dt.promote(a, b) == dt.promote(b, a)
    if "bool" not in (a, b):
        np.testing.assert_array_equal(total.numpy().astype(float), [0, 2, 3, 3])


def test_scalars_do_not_widen(host):
    assert (NDArray([1], device=host, dtype="float16") * 2.5).dtype == "float16"
    assert (NDArray([1], device=host, dtype="int32") + 1).dtype == "int32"
    assert (NDArray([1], device=host, dtype="bool") + 1).dtype == "int64"
    assert where(NDArray([1], device=host), NDArray([1], device=host, dtype="int32"), np.True_).dtype == "int32"
    assert (NDArray([1], device=host, dtype="int32") * 0.5).dtype == "float32"
    assert (NDArray([3], device=host, dtype="int32") / 2).item() == 1.5
    big = NDArray([2**53 + 1], device=host, dtype="int64")
    assert (big + 2).item() == 2**53 + 3
    assert (big < 10**400).item() and (big > -(10**400)).item() and (big != 10**400).item()
    half = NDArray([1.5], device=host, dtype="bfloat16")
    number = half.numpy()[0]
    for found in (half * number, number * half):
        assert isinstance(found, NDArray) and found.dtype == "bfloat16" and found.item() == 2.25


@pytest.mark.parametrize("op", ["sum", "max", "min", "prod", "mean"])
@pytest.mark.parametrize("axis", [None, 0, 1, -1, (0, 1), (0, 2), (2, 0, 1)], ids=str)
def test_reductions_over_any_axes(device, op, axis):
    a = NDArray(X, device=device)
    for keepdims in (False, True):
        expected = getattr(X.astype(np.float64), op)(axis=axis, keepdims=keepdims)
        found = getattr(a, op)(axis=axis, keepdims=keepdims).numpy()
        assert found.shape == ((1,) if axis is None and not keepdims else expected.shape)
        np.testing.assert_allclose(found.reshape(expected.shape), expected, rtol=2e-5, atol=2e-5)


VIEWS = {  # of (3, 4, 5, 2)
    "whole": lambda x: x, "channels last": lambda x: x.transpose(0, 2, 3, 1), "reversed": lambda x: x.T, "part": lambda x: x[1:],
    "part, permuted": lambda x: x[1:].transpose(2, 0, 1, 3), "with gaps": lambda x: x[:, ::2, :, :1], "flipped": lambda x: x[::-1],
    "repeated": lambda x: np.broadcast_to(x[:, :1], x.shape), "one long": lambda x: x[:, 1:2].transpose(3, 1, 0, 2),
}  # fmt: skip


def seen(view, values, device, dtype="float32"):
    """A view of an array of needle that shows what ``view`` shows of ``values``."""
    whole, wanted = NDArray(values, device=device, dtype=dtype), view(values)
    offset = wanted.__array_interface__["data"][0] - values.__array_interface__["data"][0]
    size = values.itemsize
    return NDArray.make(wanted.shape, tuple(s // size for s in wanted.strides), device, whole._handle, offset // size), wanted


@pytest.mark.parametrize("view", VIEWS)
def test_reductions_of_views_over_any_axes(device, view):
    x, values = seen(VIEWS[view], np.random.default_rng(0).standard_normal((3, 4, 5, 2)).astype(np.float32), device)
    np.testing.assert_array_equal(x.numpy(), values)
    for axis in (None, *(axes for n in range(1, 5) for axes in itertools.combinations(range(4), n))):
        for op in ("sum", "max", "min", "prod", "mean"):
            expected = getattr(values.astype(np.float64), op)(axis=axis, keepdims=True)
            np.testing.assert_allclose(getattr(x, op)(axis=axis, keepdims=True).numpy(), expected, rtol=2e-5, atol=2e-5)
        for op in ("argmax", "argmin") if axis is None or len(axis) == 1 else ():
            place = axis if axis is None else axis[0]
            np.testing.assert_array_equal(getattr(x, op)(place, True).numpy(), getattr(values, op)(place, keepdims=True))


@pytest.mark.parametrize("view", [name for name in VIEWS if name != "repeated"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_views_are_written_in_any_order_of_their_axes(device, view, dtype):
    values = np.arange(120, dtype=np.float32).reshape(3, 4, 5, 2)
    x, shown = seen(VIEWS[view], values, device, dtype)
    whole = NDArray.make(values.shape, None, device, x._handle)
    given = np.random.default_rng(0).integers(-9, 9, shown.shape).astype(np.float32)
    for source in (NDArray(given, device=device), NDArray(given.T, device=device, dtype=dtype).T, given, given[:1], 7.0):
        x[:] = source
        shown[...] = given if isinstance(source, NDArray) else source
        np.testing.assert_array_equal(whole.astype("float32").numpy(), values)


@pytest.mark.parametrize("channels", [2, 3, 4, 7, 8, 65])
@pytest.mark.parametrize(("dtype", "to"), [("float32", "float32"), ("float32", "bfloat16"), ("uint8", "uint8"), ("uint8", "float64"),
                                           ("float16", "float32"), ("float64", "float64")])  # fmt: skip
def test_channels_are_brought_to_the_last_axis(device, channels, dtype, to):
    values = np.random.default_rng(0).integers(0, 200, (3, channels, 5, 33)).astype(np.float64)
    images = NDArray(values, device=device, dtype=dtype).permute((0, 2, 3, 1))
    wanted = values.transpose(0, 2, 3, 1)
    np.testing.assert_array_equal(images.astype(to).astype("float64").numpy(), wanted)
    wide = full((3, 5, 33, channels + 1), 1.0, to, device)
    wide[:, :, :, 1:] = images
    np.testing.assert_array_equal(wide.astype("float64").numpy(), np.pad(wanted, ((0, 0),) * 3 + ((1, 0),), constant_values=1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_axes_that_are_apart_are_reduced_without_a_copy(device, dtype):
    """Of images (N, C, H, W), and of the same with their channels last: sums of 16-bit floats keep their digits in between."""
    values = np.random.default_rng(0).integers(-9, 99, (9, 20, 30, 14)) / (1 if dtype == "int32" else 8)
    images = NDArray(values, device=device, dtype=dtype)
    for op in ("sum", "max", "min", "mean"):
        wanted = getattr(values, op)((0, 2, 3))
        for x, axes in ((images, (0, 2, 3)), (images.permute((0, 2, 3, 1)), (0, 1, 2))):
            live = device.mod.memory_stats()["live"]
            device.mod.reset_peak()
            found = getattr(x, op)(axes)
            assert device.mod.memory_stats()["peak"] - live <= 8 * 9 * 20 + 8 * 20 + 1024  # of 302,400 bytes, or half of them
            np.testing.assert_array_equal(found.numpy(), NDArray(wanted, device=device, dtype=found.dtype).numpy())


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32", "bool"])
@pytest.mark.parametrize("given", [(1, 1, 1), (300, 1, 1), (1, 200, 1), (1, 1, 7), (300, 1, 7), (1, 200, 7)], ids=str)
def test_broadcast_arrays_are_reduced_without_a_copy(device, given, dtype):
    """Sums of 16-bit floats are rounded once, behind the product with how often an element is there."""
    values = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 9, given)
    x, wanted = NDArray(values, device=device, dtype=dtype).broadcast_to((300, 200, 7)), np.broadcast_to(values, (300, 200, 7))
    for axis in (None, *(axes for n in (1, 2, 3) for axes in itertools.combinations(range(3), n))):
        for op in ("sum", "max", "min", "mean"):
            live = device.mod.memory_stats()["live"]
            device.mod.reset_peak()
            found = getattr(x, op)(axis, True)
            assert device.mod.memory_stats()["peak"] - live <= 3 * 8 * found.size + 4 * 8 * values.size + 4096
            exact = getattr(wanted, op)(axis, keepdims=True)
            same = NDArray(exact.astype(np.float32) if op == "mean" else exact, device=device, dtype=found.dtype)
            np.testing.assert_array_equal(found.astype("float64").numpy(), same.astype("float64").numpy(), strict=True)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(3, 5000), (5000, 3), (40, 50), (7, 129, 6)], ids=str)
def test_nan_is_the_largest_and_the_least(device, shape, dtype):
    values = np.random.default_rng(0).integers(-9, 9, shape).astype(np.float64)
    values.reshape(-1)[:: 3 * shape[-1] + 7] = np.nan
    x = NDArray(values, device=device, dtype=dtype)
    for axis in (None, *range(len(shape)), (0, len(shape) - 1)):
        for op in ("max", "min"):
            found = getattr(x, op)(axis, True).astype("float64").numpy()
            np.testing.assert_array_equal(found, getattr(values, op)(axis, keepdims=True))


def test_sums_over_axes_that_are_apart_are_rounded_once(device):
    ones = full((3, 2, 257), 1.0, "bfloat16", device)  # which has 256 and 258, 768 and 772
    np.testing.assert_array_equal(ones.sum((0, 2)).astype("float32").numpy(), [772, 772])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_of_16_bit_floats_take_no_wider_copy(device, dtype):
    x = full((300, 500), 0.5, dtype, device)
    for reduced in (lambda: x.sum(0), lambda: x.mean(), lambda: x.mean(1), lambda: x.prod(1)):
        live = device.mod.memory_stats()["live"]
        device.mod.reset_peak()
        reduced()
        assert device.mod.memory_stats()["peak"] - live <= 2 * 4 * 500 + 1024


@pytest.mark.parametrize("op", ["argmax", "argmin"])
def test_places_of_the_largest_and_the_least(device, op):
    for axis in (None, 0, 1, -1):
        for keepdims in (False, True):
            expected = getattr(X, op)(axis=axis, keepdims=keepdims)
            found = getattr(NDArray(X, device=device), op)(axis=axis, keepdims=keepdims)
            assert found.dtype == "int64"
            assert found.shape == ((1,) if axis is None and not keepdims else expected.shape)
            np.testing.assert_array_equal(found.numpy().reshape(expected.shape), expected)


@pytest.mark.parametrize(("dtype", "end"), [("bool", 2), ("uint8", 256), ("int32", 2**31)])
@pytest.mark.parametrize("shape", [(70000,), (3, 2500), (300, 41)], ids=str)
def test_integers_sum_to_int64_without_a_wider_copy(device, dtype, end, shape):
    x = np.random.default_rng(0).integers(0, end, shape).astype(dtype)
    ones = np.where(np.arange(x.size) % 997 < 5, 3, 1).reshape(shape).astype(dtype)
    for axis in (None, 0, -1):
        for op, values in (("sum", x), ("prod", ones)):
            a = NDArray(values, device=device, dtype=dtype)
            live = device.mod.memory_stats()["live"]
            device.mod.reset_peak()
            found = getattr(a, op)(axis=axis)
            assert device.mod.memory_stats()["peak"] - live <= 8 * found.size + 512  # the result alone, in the allocator's steps
            assert found.dtype == "int64"
            np.testing.assert_array_equal(found.numpy().reshape(-1), getattr(values, op)(axis=axis, dtype=np.int64).reshape(-1))


def test_a_row_longer_than_its_pieces_are_many(cpu):
    """The CPU cuts a long row into 64 at most."""
    values = np.arange(2_200_001, dtype=np.float32) % 7
    values[-1] = 9
    x = NDArray(values, device=cpu)
    assert x.sum().item() == np.float32(values.sum(dtype=np.float64)) and x.max().item() == 9


SHAPES = [((3, 4), (4, 5)), ((2, 3, 4), (4, 5)), ((2, 1, 3, 4), (6, 4, 5)), ((4,), (4, 5)), ((3, 4), (4,)), ((1, 4), (4, 1)), ((0, 4), (4, 5)),
          ((3, 0), (0, 5))]  # fmt: skip


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "float16"])
def test_products(device, shapes, dtype):
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-3, 4, s).astype(dtype) for s in shapes)
    found = matmul(NDArray(a, device=device, dtype=dtype), NDArray(b, device=device, dtype=dtype))
    np.testing.assert_array_equal(found.numpy(), a @ b)
    if len(shapes[0]) == 2 and len(shapes[1]) == 2:
        turned = matmul(
            NDArray(b, device=device, dtype=dtype).permute((1, 0)), NDArray(a, device=device, dtype=dtype).permute((1, 0))
        )
        np.testing.assert_array_equal(turned.numpy(), (a @ b).T)


# Above the size from which `cpu` takes its own kernel; tails in every direction, more than one depth and one block of rows, and
# rows of 4 KiB, which it packs where it reads others in place; shallow ones. Or deep, which it cuts into parts of k.
@pytest.mark.parametrize(
    "shape",
    [(62, 1094, 1037), (1100, 130, 1000), (97, 1024, 2049), (512, 517, 100), (132, 200, 1024), (523, 1001, 7), (4201, 70, 1),
     (60, 75, 5003), (17, 30, 9001)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("extra", [0, 13, 1024], ids=lambda n: f"rows_{n}_longer")
def test_large_products_of_parts_and_of_transposes(cpu, shape, dtype, extra):
    m, n, k = shape
    rng = np.random.default_rng(0)
    for turn_a, turn_b in ((False, False), (True, False), (False, True), (True, True)):
        a, b = (
            rng.integers(-3, 4, (s[0], s[1] + extra)).astype(np.float64)
            for s in ((k, m) if turn_a else (m, k), (n, k) if turn_b else (k, n))
        )
        for v in (a, b):
            v[:, v.shape[1] - extra :] = np.nan  # beyond the rows: nothing that counts
        x, y = (NDArray(v, device=cpu, dtype=dtype)[:, : v.shape[1] - extra] for v in (a, b))
        a, b = a[:, : a.shape[1] - extra], b[:, : b.shape[1] - extra]
        x, y = x.permute((1, 0)) if turn_a else x, y.permute((1, 0)) if turn_b else y
        exact = (a.T if turn_a else a) @ (b.T if turn_b else b)
        found = matmul(x, y)
        np.testing.assert_array_equal(found.numpy(), exact.astype(found.numpy().dtype))
        for out in (found, full(exact.shape, 7, "float32" if "16" in dtype else dtype, cpu)):
            wanted = (out.numpy().astype(np.float64) + exact).astype(out.numpy().dtype)
            matmul(x, y, out=out, accumulate=True)
            np.testing.assert_array_equal(out.numpy(), wanted)


# Tiles of both sides of the result, each down to its last rows and columns; batches whose operands both go on, too large for tiles;
# more rows than are summed before 16 bits are rounded.
@pytest.mark.parametrize(
    "shapes",
    [((100, 500), (500, 100)), ((300, 20), (20, 600)), ((2, 1, 200, 330), (3, 330, 260)), ((1100, 1030), (1030, 70))],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int32"])
def test_products_of_tiles_and_of_batches(cpu, shapes, dtype):
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-3, 4, shape).astype(np.float64) for shape in shapes)
    found = matmul(NDArray(a, device=cpu, dtype=dtype), NDArray(b, device=cpu, dtype=dtype)).numpy()
    np.testing.assert_array_equal(found, (a @ b).astype(found.dtype))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_large_products_forget_what_was_packed_for_the_last_one(cpu, dtype):
    for k, value in ((1003, np.nan), (1001, 1.0)):
        found = matmul(full((100, k), value, dtype, cpu), full((k, 200), value, dtype, cpu))
    np.testing.assert_array_equal(found.numpy(), np.full((100, 200), 1001).astype(found.numpy().dtype))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_mean_is_rounded_once(device, dtype):
    x = NDArray(np.random.default_rng(0).standard_normal((1000, 7)), device=device, dtype=dtype)
    wide = NDArray(x.astype("float32").numpy().astype(np.float64).mean(1), device=device)
    np.testing.assert_array_equal(x.mean(1).astype("float32").numpy(), wide.astype(dtype).astype("float32").numpy())


@pytest.mark.parametrize("shapes", [((3, 4), (4, 5)), ((4,), (4, 5)), ((2, 3, 4), (4,)), ((4,), (4,))], ids=str)
def test_products_into_an_array_that_is_there(device, shapes):
    a, b = (np.arange(np.prod(s), dtype=np.float32).reshape(s) for s in shapes)
    x, y, out = NDArray(a, device=device), NDArray(b, device=device), full((a @ b).shape, 7.0, device=device)
    matmul(x, y, out=out, accumulate=True)
    np.testing.assert_array_equal(out.numpy(), a @ b + 7)
    matmul(x, y, out=out)
    np.testing.assert_array_equal(out.numpy(), a @ b)
    np.testing.assert_array_equal(matmul(x, y, accumulate=True).numpy(), a @ b)  # nothing is there
    with pytest.raises(ShapeError):
        matmul(x, y, out=full((9, 9), 0.0, device=device))


def test_products_of_what_one_element_in_memory_stands_for(device):
    row, column, x = NDArray([1, 2, 3, 4], device=device), NDArray([[1], [2], [3]], device=device), X[0, :4]
    for a, b in ((row.broadcast_to((3, 4)), x), (column.broadcast_to((3, 4)), x), (row.broadcast_to((2, 3, 4)), x)):
        np.testing.assert_allclose(matmul(a, NDArray(b, device=device)).numpy(), a.numpy() @ b, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(matmul(NDArray(b.T, device=device), a.permute((*range(a.ndim - 2), -1, -2))).numpy(),
                                   b.T @ a.numpy().swapaxes(-1, -2), rtol=1e-5, atol=1e-6)  # fmt: skip


def test_sums_in_place(device):
    a = np.arange(90000, dtype=np.float32).reshape(300, 300) % 1000
    x = NDArray(a, device=device)
    x.add_in_place(x.T)
    np.testing.assert_array_equal(x.numpy(), a + a.T)
    x.mul_in_place(x[0])
    np.testing.assert_array_equal(x.numpy(), (a + a.T) * (a + a.T)[0])
    y = NDArray([0, 1, 2, 3], device=device)
    before = y.last_write
    y.mul_in_place(2)
    assert y.numpy().tolist() == [0, 2, 4, 6] and y.last_write > before
    before = y.last_write
    kernels.unscale([y], 1.0)
    assert y.numpy().tolist() == [0, 2, 4, 6] and y.last_write > before
    for part in (y[2:], y[::2], y[:1].broadcast_to((4,))):
        for change in (part.add_in_place, part.mul_in_place):
            with pytest.raises(ShapeError, match="part of its memory"):
                change(3)
    assert y.numpy().tolist() == [0, 2, 4, 6]


def test_overlap_in_borrowed_memory():
    """Two arrays over one memory do not know of each other; the CPU would write a part before another thread has read it."""
    values = np.arange(200000, dtype=np.float32)
    own = NDArray(values, device=ndl.cpu())
    for a, b in ((own, from_dlpack(own)), (from_dlpack(values), from_dlpack(values))):
        b[1:] = a[:-1]
        np.testing.assert_array_equal(a.numpy(), np.r_[0, np.arange(199999)])
        a[::-1] = b
        np.testing.assert_array_equal(b.numpy(), np.r_[0, np.arange(199999)][::-1])
        wanted = np.r_[a.numpy()[:50000], a.numpy()[:150000]]
        b[50000:] = a[:150000]
        np.testing.assert_array_equal(a.numpy(), wanted)


def test_comparisons_with_nan(device):
    a, b = np.array([1, np.nan, np.nan, -0.0], np.float32), np.array([np.nan, np.nan, 1, 0.0], np.float32)
    x, y = NDArray(a, device=device), NDArray(b, device=device)
    for op in ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"):
        np.testing.assert_array_equal(getattr(x, op)(y).numpy(), getattr(a, op)(b))
    np.testing.assert_array_equal(where(x.isnan(), 0.0, x).numpy(), [1, 0, 0, 0])
    for op in ("logical_and", "logical_or", "logical_xor"):
        found = getattr(x, op)(y)
        assert found.dtype == "bool"
        np.testing.assert_array_equal(found.numpy(), getattr(np, op)(a, b))
    a[3], b[3] = np.inf, -np.inf
    for values in (a, b):
        for op in ("logical_not", "isnan", "isinf", "isfinite"):
            found = getattr(NDArray(values, device=device), op)()
            assert found.dtype == "bool"
            np.testing.assert_array_equal(found.numpy(), getattr(np, op)(values))


def test_an_array_of_one_element_is_a_number(device):
    for number in (0.0, 2.5):
        one = NDArray([number], device=device, dtype="float64")
        assert (bool(one), int(one), float(one), one.nbytes) == (bool(number), int(number), number, 8)
        assert (f"{one:.3f}", f"{one}") == (f"{number:.3f}", str(one))


def test_empty_and_zero_dimensional(device):
    e = NDArray(np.zeros((0, 3)), device=device)
    assert (e + 1).shape == (0, 3) and e.sum().item() == 0 and e.sum(axis=1).shape == (0,)
    np.testing.assert_array_equal(e.sum(axis=0).numpy(), np.zeros(3))
    np.testing.assert_array_equal(e.prod(axis=0).numpy(), np.ones(3))
    assert kernels.sumsq(e).numpy() == [0]
    assert e.flip((0, 1)).shape == (0, 3) and e[1:, ::-1].compact().shape == (0, 3)
    with pytest.raises(ShapeError, match="no elements"):
        e.max()
    s = NDArray(2.5, device=device)
    assert s.shape == () and (s * 2).item() == 5
    for reduced in (s.sum(), s.prod(), s.max(), s.min(), s.mean()):
        assert reduced.item() == 2.5 and reduced.shape == (() if device.numpy_semantics else (1,))


def test_another_dtype_is_a_copy_also_if_it_is_the_same(device):
    a = NDArray(X, device=device)
    a.astype("float32")[0] = 9.0
    np.testing.assert_array_equal(a.numpy(), X)
    assert a.astype("float32", copy=False) is a


def test_devices_by_name(device):
    a = NDArray(X, device=device.name)
    assert a.device is device and a.to(device.name) is a and ndl.init.zeros(2, device=device.name).device is device
    assert ndl.Tensor(X, device=device.name).device is device and ndl.as_device() is ndl.cpu()


@pytest.mark.parametrize("level", ["", "v4"])
def test_a_wheel_takes_its_build_for_the_processor(level, monkeypatch):
    plain, fast = ModuleType("plain"), ModuleType("fast")
    plain.Array = fast.Array = list
    plain.best_level = lambda: level
    monkeypatch.setattr(device_module, "when_loaded", None)
    for name, module in (("some", plain), ("some_v4", fast)):
        monkeypatch.setitem(sys.modules, f"needle.backend_ndarray.{name}", module)
    assert device_module.BackendDevice("some", "some").mod is (fast if level else plain)


def test_copies(host):
    a = NDArray(X, device=host)
    one, deep = copy.copy(a[1:, ::2]), copy.deepcopy([a, a])
    assert one._handle is not a._handle is not deep[0]._handle and deep[0] is deep[1]
    np.testing.assert_array_equal(one.numpy(), X[1:, ::2])
    np.testing.assert_array_equal(deep[0].numpy(), X)
    assert a.T._handle is a._handle
    np.testing.assert_array_equal(a.T.numpy(), X.T)


def test_interchange(host):
    a = NDArray(X, device=host)
    np.testing.assert_array_equal(np.asarray(a), X)
    shared = np.from_dlpack(a[1:, ::2])
    np.testing.assert_array_equal(shared, X[1:, ::2])
    a[1, 0, 0] = 99.0
    assert shared[0, 0, 0] == 99
    if np.lib.NumpyVersion(np.__version__) >= "2.1.0":  # before, numpy reads no DLPack that says it may be written to
        shared[0, 0, 1] = 98.0
        assert a[1, 0, 1].item() == 98
        capsules = [str(a.__dlpack__(max_version=version)).split('"')[1] for version in ((0, 8), (1, 0))]
        assert capsules == ["dltensor", "dltensor_versioned"]
    theirs = np.arange(6, dtype=np.int64).reshape(2, 3)
    ours = from_dlpack(theirs)
    assert ours.dtype == "int64" and ours.device == ndl.cpu()
    theirs[0, 1] = 50
    assert ours[0, 1].item() == 50
    tensor = ndl.from_dlpack(theirs)
    assert not tensor.requires_grad and np.shares_memory(np.from_dlpack(tensor), theirs)
    assert tensor.__dlpack_device__() == ours.__dlpack_device__() == a.__dlpack_device__() == (1, 0)
    with pytest.raises(DeviceError, match=r"\[dlpack\] meta\(\) has no memory to share"):
        NDArray(X, device=ndl.meta()).__dlpack__()
    assert asarray(np.float64(3)).dtype == "float64" and asarray(theirs).dtype == "int64"
    for values, dtype in (
        (np.uint32([2**32 - 1]), "int64"),
        (np.longdouble([0.5]), "float64"),
        (np.array([0.5, 1], object), "float64"),
    ):
        assert asarray(values).dtype == dtype and asarray(values).numpy().tolist() == values.tolist()
    assert asarray(a) is asarray(a, host) is a and asarray(a, ndl.meta()).device == ndl.meta()
    half = NDArray(X, device=host, dtype="bfloat16")
    assert half.numpy().dtype.name == "bfloat16"


def test_truth_values_of_another_kind_do_not_come_through_dlpack(cpu):
    """Bytes that are neither 0 nor 1 are true to numpy, and anything to C++."""
    given = np.array([2, 0, 1, 1, 0], np.uint8).view(bool)
    try:
        given.__dlpack__()
    except BufferError:
        pytest.skip("this numpy gives no bool through DLPack")
    with pytest.raises(ValueError, match="bytes of bool that are neither 0 nor 1"):
        from_dlpack(given)
    between = np.array([(1, 77), (0, 78)], [("flag", bool), ("other", np.uint8)])["flag"]
    assert (
        from_dlpack(between).sum().item() == 1
        and from_dlpack(given[:0]).size == 0
        and from_dlpack(given[3:4].reshape(())).item() is True
    )
    assert from_dlpack(given[1:]).sum().item() == 2 and NDArray(given, device=cpu).sum().item() == 3


def test_what_numpy_cannot_read_comes_through_dlpack():
    class Half:
        """Like bfloat16 of torch."""

        array = ndl.cpu().full((3,), 1.5, dtype="bfloat16")
        __dlpack__, __dlpack_device__ = array.__dlpack__, array.__dlpack_device__

        def __array__(self, dtype=None, copy=None):
            raise TypeError("numpy has no bfloat16")

    assert asarray(Half()).dtype == "bfloat16"
    np.testing.assert_array_equal(ndl.Tensor(Half(), requires_grad=False).numpy(), np.full(3, 1.5, np.float32))
    Half.__dlpack__, Half.__dlpack_device__ = np.ones(3, np.int8).__dlpack__, np.ones(3, np.int8).__dlpack_device__
    with pytest.raises(ValueError, match="unsupported dtype") as caught:
        NDArray(Half())
    assert not isinstance(caught.value, ShapeError)


def test_shapes_in_an_array_of_numpy(device):
    a, shape = NDArray(np.arange(6), device=device), np.array([2, 3])
    t = ndl.Tensor(a)
    for found in (a.reshape(shape), full(shape, 1.0, device=device), a[:1].broadcast_to(shape), ndl.ops.broadcast_to(t[:1], shape)):
        assert found.shape == (2, 3)
    assert ndl.ops.broadcast_to(t.reshape(shape), shape).shape == (2, 3) and empty(np.array(3), device=device).shape == (3,)


def test_errors_name_what_was_wrong(host):
    a, b = NDArray(X, device=host), NDArray(np.zeros((2, 3)), device=host)
    with pytest.raises(ShapeError, match=r"\(4, 5, 6\) and \(2, 3\)"):
        a + b
    with pytest.raises(ShapeError, match="inner dimensions differ: a is"):
        b @ b
    with pytest.raises(ShapeError, match="sizes differ"):
        a.reshape((7, 7))
    for shape in ((-1, -1), (-1, -1, -1), (-1, 0), (-1, 7)):
        with pytest.raises(ShapeError, match="cannot reshape"):
            a.reshape(shape)
    for widths in (((1, 1),), ((1, 1),) * 4):
        with pytest.raises(ShapeError, match="one pair of non-negative widths per axis"):
            a.pad(widths)
    for given in ({"dtype": "float64"}, {"out": np.zeros(())}):
        with pytest.raises(DTypeError, match=r"\[sum\] dtype or out is given"):
            np.sum(a, **given)
    with pytest.raises(DTypeError, match="cannot store these values as int64"):
        NDArray([2**70], dtype="int64")
    with pytest.raises(DTypeError, match="complex"):
        NDArray(np.zeros(3, complex), device=host)
    with pytest.raises(DTypeError, match="accepted: float32"):
        a.astype("float12")
    with pytest.raises(ShapeError, match="exactly one"):
        a.item()
    for wrong in (lambda: a.reshape((2.0, 60)), lambda: a.broadcast_to("a"), lambda: empty(2.5), lambda: NDArray.make(None)):
        with pytest.raises(ShapeError, match="is no shape"):
            wrong()
    for wrong in (lambda: empty((2**62, 2), device=host), lambda: empty((0, 2**40, 2**40), device=host)):
        with pytest.raises(ShapeError, match="2\\*\\*63 elements"):
            wrong()
    for wrong in (a.maximum, a.minimum, a.logical_and, a.logical_or, a.logical_xor):
        with pytest.raises(DTypeError, match="cannot combine an NDArray with NoneType"):
            wrong(None)
    for wrong in (lambda: asarray([[1], [2, 3]]), lambda: NDArray([[1], [2, 3]], device=host), lambda: a + [[1], [2, 3]]):
        with pytest.raises(ShapeError, match="inhomogeneous"):
            wrong()
    for wrong in (lambda: a.reshape((-4, -5, 6)), lambda: full((-2, -3), 1.0), lambda: b[:1].broadcast_to((-2, 3))):
        with pytest.raises(ShapeError, match="has a length below"):
            wrong()
    a.permute((0, 1, 2))  # which a cache must not take (0.0, 1, 2) for
    for wrong in (lambda: a.sum(1.0), lambda: a.max("a"), lambda: a.flip(0.5), lambda: a.permute((0.0, 1, 2))):
        with pytest.raises(ShapeError, match="is no whole number"):
            wrong()
    with pytest.raises(ShapeError, match="not an order of the axes"):
        a.permute(1)
    for axes in ((0, 0, 1), (0, 1), (0, 1, 2, 2)):
        with pytest.raises(ShapeError, match="not an order of the axes"):
            a.permute(axes)
    for other in (NDArray(np.zeros((4, 5, 0)), device=host), NDArray(np.zeros((0, 1, 1)), device=host)):
        with pytest.raises(ShapeError, match="do not broadcast"):
            a + other
    with pytest.raises(DeviceError, match=r"'gpu' \(accepted: a device, or its name: cpu, cuda"):
        a.to("gpu")
    absent = device_module.BackendDevice("absent", None)
    for wrong in (lambda: empty(2, device=absent), lambda: kernels.arange(2, "float32", absent), lambda: a.to(absent)):
        with pytest.raises(DeviceError, match=r"absent\(\) cannot be used: it was made without a module"):
            wrong()
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(a)
    with pytest.raises(DTypeError, match="no product of bool arrays"):
        matmul(b.astype("bool"), b.T.astype("bool"))
    for op in (operator.add, operator.matmul, lambda a, b: where(a, b, 0.0), lambda a, b: where(a, 0.0, b)):
        with pytest.raises(DeviceError, match="different devices"):
            op(NDArray([1.0], device=ndl.cpu()), NDArray([1.0], device=ndl.cpu_numpy()))


def test_devices_are_pickled_by_name():
    """A data set or a loader that has one may go to another process."""
    for name in ("cpu", "cuda", "meta"):
        device = ndl.as_device(name)
        assert device.enabled() or name == "cuda"
        assert pickle.loads(pickle.dumps(device)) is device
    for wrong in (["cpu"], {}, 0, "gpu"):
        with pytest.raises(DeviceError, match=r"unknown device: .* \(accepted: a device, or its name: cpu, "):
            ndl.as_device(wrong)
    with pytest.raises(TypeError, match=r"\[pickle\] mine\(\) is not pickled \(accepted: cpu, "):
        pickle.dumps(device_module.BackendDevice("mine", None))


def test_the_allocator_counts_every_byte_and_keeps_its_limit(host):
    stats = host.memory_stats
    before = stats()["live"]
    host.reset_peak()
    a = ndl.backend_ndarray.empty((1000, 100), device=host)
    b = a[5:10]
    assert stats()["live"] - before == 400_000 and stats()["peak"] - before == 400_000
    del a
    assert stats()["live"] - before == 400_000
    del b
    assert stats()["live"] == before
    host.set_limit(stats()["live"] + 1000)
    try:
        with pytest.raises(MemoryError):
            ndl.backend_ndarray.empty((10_000,), device=host)
        with pytest.raises(MemoryError):
            ndl.backend_ndarray.empty((251,), device=host)
        ndl.backend_ndarray.empty((250,), device=host)  # to the byte
    finally:
        host.set_limit(0)
    assert issubclass(OutOfMemoryError, MemoryError)


def test_matmul_of_rows_further_apart_than_int32(cpu):
    """The library behind it counts in int32. Of the 8 GiB only the pages of the two rows are ever touched: they are numpy's, since
    needle takes no memory that the machine does not have.
    """
    step = 2**31 + 16
    try:
        memory = from_dlpack(np.empty(step + 64, np.float32))
    except MemoryError:
        pytest.skip("this machine does not promise 8 GiB")
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 64), dtype=np.float32), rng.standard_normal((64, 70), dtype=np.float32)
    far = memory.as_strided((2, 64), (step, 1))
    far[:, :] = NDArray(x, device=cpu)
    np.testing.assert_allclose((far @ NDArray(y, device=cpu)).numpy(), x @ y, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose((NDArray(y.T, device=cpu) @ far.permute((1, 0))).numpy(), (x @ y).T, rtol=1e-5, atol=1e-5)


def test_float64_becomes_float16_in_one_rounding(device):
    """As in numpy: by way of float32 what lies beside the middle of two halves would become the middle, and then the even one."""
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
    middle = (halves[:-1] + halves[1:])[::5] / 2
    values = np.concatenate([[np.inf, np.nan, 65519, 65520, 1e300, 1e-300], middle, middle * (1 + 2**-40), middle * (1 - 2**-40)])
    values = np.concatenate([values, -values])
    found = NDArray(values, device=device, dtype="float64").astype("float16").numpy()
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(found, values.astype(np.float16))
    assert full((1,), 1 + 2**-11 + 2**-40, "float16", device).item() == 1 + 2**-10


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8", "bool"])
def test_arange_makes_every_dtype(device, dtype):
    for n in (100, 70_001):  # more than a thread of the CPU makes at a time
        with np.errstate(over="ignore"):
            expected = np.arange(n).astype(dt.to_numpy(dtype))
        np.testing.assert_array_equal(kernels.arange(n, dtype, device).numpy(), expected)


@pytest.mark.parametrize("source", ["float32", "float64", "float16", "bfloat16"])
def test_floats_that_no_integer_is_near_become_the_least_one(device, source):
    """On every device: a GPU's own instruction makes 0 of NaN, which as an id would pass for a token."""
    values = np.array(
        [np.nan, np.inf, -np.inf, 1e30, -1e30, 2.0**63, 2.0**31, -(2.0**31), 2.0**40 + 7.5, 300.75, -1.5, 255.0, -0.0]
    )
    with np.errstate(over="ignore"):
        x = NDArray(values, device=device, dtype="float64").astype(source)
    exact = x.astype("float64").numpy()
    for dtype, bits in (("int32", 31), ("int64", 63), ("uint8", 63)):
        fits = (exact >= -(2.0**bits)) & (exact < 2.0**bits)
        whole = [int(v) if fit else -(2**bits) for v, fit in zip(exact.tolist(), fits.tolist())]
        expected = [v % 256 for v in whole] if dtype == "uint8" else whole
        assert x.astype(dtype).numpy().tolist() == expected
    assert x.astype("bool").numpy().tolist() == (exact != 0).tolist()  # of NaN True
