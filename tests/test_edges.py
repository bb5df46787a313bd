"""What lies at the edges of arrays, on every device: impossible shapes, numbers outside a dtype, overlapping and empty arrays,
infinities. Each is done right or is one clear error."""

import ctypes
import itertools
import math
import operator
import re
from types import SimpleNamespace

import numpy as np
import pytest

import needle as ndl
from devices import usable
from making import array, gradients, leaf
from needle import amp, init, memory, nn, ops, optim
from needle import dtype as dt
from needle.backend_ndarray import kernels, ndarray
from needle.backend_ndarray.block_layout import BlockLayout
from needle.backend_ndarray.ndarray import NDArray, from_dlpack, full, matmul, where
from needle.errors import DeviceError, DTypeError, OutOfMemoryError, ShapeError

# --- what a value looks like, and what stands beside it ---


def test_matrix_products_with_numpy_arrays(device):
    x, w = np.arange(6.0).reshape(2, 3), np.arange(12.0).reshape(3, 4)
    a, t = array(x, device), leaf(x, device)
    for product in (a @ w, t @ w, t @ array(w, device)):
        assert product.dtype == "float32" and product.device == device
        np.testing.assert_array_equal(product.numpy(), x @ w)
    np.testing.assert_array_equal((w / array(w + 1, device)).numpy(), (w / (w + 1)).astype("float32"))
    for product in (w.T @ array(x.T, device), w.T @ leaf(x.T, device)):
        assert product.dtype == "float32"
        np.testing.assert_array_equal(product.numpy(), w.T @ x.T)
    (t @ w).backward(leaf(np.ones((2, 4)), device))
    np.testing.assert_array_equal(t.grad.numpy(), np.ones((2, 4)) @ w.T)
    for wrong in (lambda: t @ 2, lambda: 2 @ t, lambda: a @ 2, lambda: 2 @ a):
        with pytest.raises(TypeError):  # a DTypeError is one
            wrong()


def test_a_module_shows_what_is_in_it():
    block = lambda: nn.Residual(nn.Sequential(nn.Linear(2, 2, bias=False), nn.Dropout(0.1)))  # noqa: E731
    model = nn.Sequential(nn.Linear(3, 2), block(), block(), nn.ReLU()).eval()
    assert repr(model).splitlines() == [
        "Sequential()",
        "  modules.0: Linear(in_features=3, out_features=2, weight=(3, 2), bias=(1, 2))",
        "  modules.1 to modules.2: Residual()",
        "    fn: Sequential()",
        "      modules.0: Linear(in_features=2, out_features=2, weight=(2, 2))",
        "      modules.1: Dropout(p=0.1)",
        "  modules.3: ReLU()",
    ]
    model.first, model.last = nn.ReLU(), nn.ReLU()
    assert repr(model).splitlines()[-2:] == ["  first: ReLU()", "  last: ReLU()"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool"])
def test_large_arrays_are_shown_as_numpy_shows_them(device, dtype):
    rng = np.random.default_rng(0)
    for shape in ((2000,), (7, 200), (8, 3, 60), (1, 2000, 1)):
        x = array(rng.standard_normal(shape) * 10, device, dtype)
        for shown in (x, x.permute(tuple(reversed(range(x.ndim))))):
            assert str(shown) == str(shown.numpy()) and "..." in str(shown)
            with np.printoptions(edgeitems=1, threshold=5):
                assert str(shown) == str(shown.numpy())
            with np.printoptions(threshold=10**6):
                assert str(shown) == str(shown.numpy()) and "..." not in str(shown)


def test_the_middle_of_what_is_shown_is_not_read(device):
    x = leaf([1.0], device).broadcast_to((1 << 20, 1 << 20))  # 4 TiB
    assert repr(x).startswith("needle.Tensor([[1. 1. 1. ... 1. 1. 1.]")


# --- shapes and views ---


@pytest.mark.parametrize("shape", [(-2, -3), (2.0, 3), (6.5,), ("a",)], ids=str)
def test_a_shape_is_of_whole_numbers_from_0_on(device, shape):
    a = array(range(6), device)
    for make in (
        lambda: a.reshape(shape),
        lambda: a.reshape((1, 6)).broadcast_to(shape),
        lambda: ndarray.empty(shape, device=device),
        lambda: ops.reshape(leaf(range(6), device), shape),
        lambda: init.zeros(*shape, device=device),
    ):
        with pytest.raises(ShapeError, match=r"\[shape\]"):
            make()


def test_more_elements_than_can_be_counted(device):
    for make in (lambda: ndarray.empty((2**40, 2**40), device=device), lambda: array([1.0], device).broadcast_to((2**32, 2**31))):
        with pytest.raises(ShapeError, match="elements or more"):
            make()


@pytest.mark.parametrize("none", [None, 0])
def test_more_memory_than_there_is(device, none):
    live, peak = memory.stats(device).live, memory.stats(device).peak
    with pytest.raises(OutOfMemoryError, match=rf"\[{device.name}\] out of memory: .* requested, .* live") as caught:
        ndarray.empty((1 << 50,), device=device)
    assert caught.value.requested_bytes == 1 << 52
    assert (memory.stats(device).live, memory.stats(device).peak) == (live, peak)
    with pytest.raises(ValueError, match=f"impossible array size {1 << 61}"):
        ndarray.empty((1 << 61,), device=device)
    memory.set_limit(live + 400, device)
    try:
        with pytest.raises(OutOfMemoryError, match=rf"404 bytes requested, .* live, .*limit {live + 400} bytes"):
            ndarray.empty((101,), device=device)
    finally:
        memory.set_limit(none, device)
    ndarray.empty((101,), device=device)


def test_any_and_all_of_nothing(device):
    empty = array(np.zeros((2, 0)), device)
    for axis in (None, 1):
        assert not empty.any(axis=axis).numpy().any() and empty.all(axis=axis).numpy().all()
    assert empty.any(axis=1, keepdims=True).shape == (2, 1) and empty.all(axis=1).dtype == "bool"


def test_as_strided_stays_within_its_memory(device):
    a = array(range(12), device)[2:]
    np.testing.assert_array_equal(a.as_strided((3, 2), (3, 1)).numpy(), [[2, 3], [5, 6], [8, 9]])
    assert a.as_strided((0, 4), (100, 1)).size == 0
    for shape, strides in (((4, 4), (4, 1)), ((2, 2), (-3, 1)), ((2, 2), (1,)), ((-2, 2), (-8, 1))):
        with pytest.raises(ShapeError):
            a.as_strided(shape, strides)


def test_memory_given_to_an_array_holds_it(device):
    handle = array(range(12), device)._handle
    np.testing.assert_array_equal(NDArray.make((2, 2), (-4, 1), device, handle, 9).numpy(), [[9, 10], [5, 6]])
    assert NDArray.make((0, 4), device=device, handle=handle, offset=12).size == 0
    np.testing.assert_array_equal(NDArray.make((2, 2), device=device, handle=handle, offset=8).numpy(), [[8, 9], [10, 11]])
    for shape, strides, offset in (((5, 5), None, 0), ((2,), None, -1), ((12,), None, 1), ((2, 2), (1,), 0), ((2,), (-1,), 0)):
        with pytest.raises(ShapeError, match=r"\[view\]"):
            NDArray.make(shape, strides, device, handle, offset)
    with pytest.raises(IndexError, match="a view reaches elements -1 to 1 of an array of 12"):
        device.strided_fill(handle, (1,), -1, (3,), 7.0)
    with pytest.raises(IndexError, match="a view reaches elements 0 to 14 of an array of 12"):
        device.to_numpy(handle, (5, 3), (3, 1), 0)
    with pytest.raises(IndexError, match="a view reaches"):
        device.to_numpy(handle, (5,), (2**62,), 0)
    if device.name != "cpu_numpy":
        with pytest.raises(IndexError, match="view outside its array"):
            handle.view(2**62, 2**62)
        with pytest.raises(ValueError, match="a view has a length of -2"):
            device.to_numpy(handle, (-2, -3), (1, 1), 0)
        for outer, length, inner in ((2, 2**62, 2), (-1, -1, 5), (2**40, 1, 2**40)):
            with pytest.raises(IndexError, match=r"\[reduce\] an array is smaller"):
                device.reduce_sum(handle, handle, outer, length, inner)


def test_true_is_any_byte_but_zero(device):
    given, other = np.array([2, 0, 3], np.uint8).view(bool), array([True, False, True], device, dtype="bool")
    x = NDArray(given, device=device, dtype="bool")
    assert x.sum().item() == 2 and x.astype("int32").numpy().tolist() == [1, 0, 1]
    assert (x == other).numpy().all() and x.logical_and(other).numpy().tolist() == [True, False, True]


def test_a_product_goes_where_it_fits(device):
    a = array(np.ones((3, 4)), device)
    out = array(np.zeros((3, 3)), device)
    matmul(a, a.T, out=out)
    np.testing.assert_array_equal(out.numpy(), np.full((3, 3), 4))
    for wrong in (array([0], device), array(np.zeros((9,)), device), array(np.zeros((3, 6)), device)[:, ::2]):
        with pytest.raises(ShapeError, match=r"\[matmul\] out is"):
            matmul(a, a.T, out=wrong)


@pytest.mark.parametrize("n", [5, 300])
def test_a_product_goes_where_its_operands_are(device, n):
    values = np.random.default_rng(0).integers(-3, 4, (2, n, n)).astype(np.float32)
    x, y = values
    for write, wanted in (
        (lambda a: matmul(a[0:1], a[1:2], out=a[0:1]), x @ y),
        (lambda a: matmul(a[0:1], a[1:2].permute((0, 2, 1)), out=a[1:2]), x @ y.T),
        (lambda a: matmul(a[0:1], a[0:1], out=a[0:1], accumulate=True), x @ x + x),
        (lambda a: matmul(a, a[1:2], out=a), values @ y),
    ):
        a = array(values, device)
        before = a.last_write
        np.testing.assert_array_equal(write(a).numpy().reshape(np.shape(wanted)), wanted)
        assert a.last_write > before  # as after every other write in place


def test_a_broadcast_array_is_not_written(device):
    """One element in memory stands for several of its own."""
    wide = array([1, 2], device).broadcast_to((3, 2))
    for write in (lambda: wide.fill(5), lambda: wide.__setitem__(0, 5.0)):
        with pytest.raises(ShapeError, match=r"\[write\] the array is broadcast: \(3, 2\) with strides \(0, 1\)"):
            write()
    one = array([1, 2], device)[None]  # its first stride is 0, too
    before = one.last_write
    one.fill(5)
    assert one.numpy().tolist() == [[5, 5]] and one.last_write > before


def test_what_is_no_index(device):
    a = array(range(6), device).reshape((2, 3))
    for wrong in (True, np.True_, 1.0, "a", [0]):
        with pytest.raises(IndexError, match=rf"unsupported index of type {type(wrong).__name__} "):
            a[wrong]
    for index in ((0, 0, 0), (..., 0, 0, 0)):
        with pytest.raises(IndexError, match=r"too many indices for shape \(2, 3\)"):
            a[index]


def test_iterating_over_a_view(device):
    x = np.arange(6.0).reshape(2, 3)
    for view, wanted in ((array(x, device).permute((1, 0)), x.T), (array(x, device)[:, ::-2], x[:, ::-2])):
        np.testing.assert_array_equal([row.numpy() for row in view], wanted)


@pytest.mark.parametrize("dtype", ["int32", "float32", "int64"])
@pytest.mark.parametrize("shape", [(67, 45), (8, 8), (3, 64, 33)])
def test_a_transposition_moves_bits(device, dtype, shape):
    """Whatever they mean as floats: numbers may go through registers made for those."""
    bits = np.random.default_rng(0).integers(0, 256, (*shape, np.dtype(dtype).itemsize), dtype=np.uint8)
    x = bits.view(dtype)[..., 0]
    axes = tuple(range(x.ndim))[::-1]
    found = NDArray(x, device=device, dtype=dtype).permute(axes).compact().numpy()
    assert found.tobytes() == x.transpose(axes).tobytes()


@pytest.mark.parametrize("n", [7, 300])  # one row; several tasks
def test_assigning_a_view_of_the_array_to_the_array(device, n):
    def check(write, shape):
        expected = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        a = array(expected, device)
        write(a)
        write(expected)
        np.testing.assert_array_equal(a.numpy(), expected)

    def forward(x):
        x[1:] = x[:-1]

    def reverse(x):
        x[:] = x[::-1]

    def turn(x):
        x[:, :] = x.permute((1, 0)) if isinstance(x, NDArray) else x.T.copy()

    def itself(x):
        x[:] = x

    def every_other(x):
        x[2::2] = x[:-2:2]

    check(itself, (n * n,))
    check(every_other, (6,))  # one element is in both
    check(forward, (n * n,))
    check(reverse, (n * n,))
    check(turn, (n, n))
    t = leaf(range(n * n), device, requires_grad=False)
    t[1:] = t[:-1]
    np.testing.assert_array_equal(t.numpy(), np.maximum(np.arange(n * n) - 1, 0))


def test_parts_of_rows_are_added_where_they_lie(device):
    x = array(range(10), device)
    for a, b in ((x[2:5], x[7:]), (x[:3], x[2:5]), (x[2:5], x[:3]), (x[4:7], x[4:7])):
        np.testing.assert_array_equal((a + b).numpy(), a.numpy() + b.numpy())


# --- numbers and dtypes ---


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_comparing_16_bits_with_numbers(device, dtype):
    """As numpy and PyTorch compare them: with the element nearest to the number."""
    for number in (0.1, 1 / 3, -1e-8, 65519.9, 70000.0, 2049, 1e300, math.inf, math.nan):
        x = NDArray([number, 1.0], device=device, dtype="float32").astype(dtype)
        single = x.astype("float32").numpy()
        for compare in (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge):
            expected = compare(single, single[0])
            assert np.array_equal(compare(x, number).numpy(), expected), (number, compare)
            assert np.array_equal(compare(x[::-1], number).numpy(), expected[::-1])


def test_comparing_integers_with_numbers_outside_their_dtype(device):
    for dtype, values in (("uint8", [44, 156]), ("int32", [0, 2**31 - 1]), ("int64", [0, 2**63 - 1])):
        a = array(values, device, dtype)
        for number in (300, -100, 2**40, -(2**40), 2**63, -(2**70)):
            if number in {"uint8": (), "int32": (300, -100), "int64": (300, -100, 2**40, -(2**40))}[dtype]:
                continue
            for found, wanted in (
                (a == number, False), (a != number, True), (a < number, number > 0), (a <= number, number > 0), (a > number, number < 0),
                (a >= number, number < 0),
            ):  # fmt: skip
                assert found.numpy().tolist() == [wanted, wanted]


def test_whole_numbers_that_no_int64_holds_are_floats(device):
    for dtype in ("float32", "bfloat16"):
        a = full((2,), 2**70, dtype, device)
        a[0] = -(2**80)
        assert a.astype("float32").numpy().tolist() == [-(2.0**80), 2.0**70]
        with pytest.raises(OverflowError, match=rf"^\[full\] a whole number of 2001 bits is outside {dtype}$"):
            full((2,), 2**2000, dtype, device)


def test_no_dtype_is_the_default_of_a_maker(device):
    for make in (init.arange, init.zeros, init.rand, init.randn):
        assert make(3, device=device, dtype=None).dtype == "float32"


def test_in_asks_for_an_equal_element(device):
    for dtype in ("int64", "float32"):
        x = ndl.Tensor([[1, 2], [3, 4]], device=device, dtype=dtype)
        for holds in (x, x.realize_cached_data()):
            assert 3 in holds and np.int64(3) in holds and 5 not in holds and float("nan") not in holds
        assert x[0, 1] in x and x[0] * 9 not in x
    assert 0 not in ndl.Tensor(np.zeros((0, 2)), device=device)
    with pytest.raises(DTypeError, match=r"\[eq\] cannot combine an NDArray with str"):
        assert "3" in x


def test_numbers_outside_an_integer_dtype_are_refused(device):
    a, b = array([44], device, "uint8"), array([44], device, "int32")
    for make in (
        lambda: a + 300, lambda: a * -1, lambda: b - 2**31, lambda: 2**31 - b, lambda: full((2,), 300, "uint8", device), lambda: b.fill(2**31),
        lambda: a.__setitem__(0, -1), lambda: b.__setitem__(0, float("nan")), lambda: b.__setitem__(0, 1e20),
        lambda: full((2,), float("inf"), "int64", device), lambda: array([1, -1], device, "uint8"), lambda: array([2**63], device, "int64"),
        lambda: array(float("nan"), device, "int32"), lambda: ndl.Tensor([2**31], device=device, dtype="int32"),
        lambda: a.__setitem__(slice(None), [300]),
    ):  # fmt: skip
        with pytest.raises(OverflowError, match=r"is outside u?int"):
            make()
    b[0] = -2.7
    assert b.item() == -2
    assert array([2.9, -2.9], device, "int32").numpy().tolist() == [2, -2] and array([], device, "uint8").shape == (0,)
    assert full((1,), 255.9, "uint8", device).item() == 255


def test_an_error_is_one_line(device):
    square = np.eye(2)
    for make in (
        lambda: ops.summation(leaf(square, device), square), lambda: leaf(square, device).reshape(square), lambda: leaf([1], device)[square],
        lambda: ops.astype(leaf(1, device), square), lambda: init.rand(1.5, device=device), lambda: init.zeros(-1, device=device),
        lambda: ndl.Tensor([[1], [2, 3]], device=device), lambda: ndl.Tensor([object()], device=device), lambda: init.arange(-1, device),
        lambda: nn.RNN(2, 0, device=device), lambda: ops.add(leaf(1, device), square), lambda: init.one_hot(1.5, leaf(0, device), device),
    ):  # fmt: skip
        with pytest.raises((ShapeError, DTypeError, IndexError), match=r"^\[\w+\] .*$") as raised:
            make()
        assert "\n" not in str(raised.value)


def test_ids_outside_their_range_are_named(device):
    x = array(np.ones((2, 3)), device)
    for text, make in (
        ("[embedding] id -1 at position 1 is outside the vocabulary (0..1)", lambda: kernels.embedding(x, array([0, -1], device, "int32"))),
        ("[embedding] id 1 at position 0 is outside the vocabulary (0..0)", lambda: kernels.embedding(x[:1], array([1], device, "int32"))),
        ("[one_hot] id 2 at position 0 is outside the depth (0..1)", lambda: kernels.one_hot(array([2], device, "int64"), 2)),
        (f"[one_hot] id {2**32} at position 0 is outside the depth (0..1)", lambda: init.one_hot(2, np.array([2**32]), device)),
        ("[cross_entropy] target 3 at position 1 is outside the classes (0..2)", lambda: kernels.cross_entropy(x, array([-100, 3], device))[0]),
        *([("[embedding] 1099511627776.0 at position 1 is outside of int32 (accepted: ids)", lambda: kernels.embedding(x, array([0, 2.0**40], device))),
        ("[one_hot] inf at position 0 is outside of int32 (accepted: ids)", lambda: init.one_hot(2, leaf([np.inf], device)))] if device.is_host else []),
    ):  # fmt: skip
        with pytest.raises(IndexError) as raised:
            make().numpy()
        assert str(raised.value) == text


def test_truth_values_are_no_numbers(device):
    for a in (array(values, d, "bool") for values in ([True, False], []) for d in (device, ndl.meta())):
        for op, make in (
            ("sub", lambda a=a: a - a),
            ("power", lambda a=a: a**a),
            ("power", lambda a=a: a**True),
            ("relu", lambda a=a: ops.relu(ndl.Tensor.make_const(a))),
        ):
            with pytest.raises(ValueError, match=rf"^\[{op}\] no kernel for dtype bool \(astype gives another\)$"):
                make()


def test_to_join_arrays_is_no_write_in_place(device):
    """Each would have every later op look whether something that it needs was overwritten."""
    parts, before = [leaf(np.ones((2, 3)), device) for _ in range(2)], ndarray.writes.last
    assert ops.stack(parts, 1).shape == (2, 2, 3) and ops.concatenate(parts, 1).shape == (2, 6)
    assert ndarray.writes.last == before


def test_an_update_takes_arrays_of_one_size(device):
    w, g, scale, small = (array(np.ones(n), device) for n in (3, 3, 1, 2))
    for update in (
        lambda: kernels.sgd_step(w, small, None, 0.1, 0.0, 0.0),
        lambda: kernels.sgd_step(w, g, small, 0.1, 0.9, 0.0),
        lambda: kernels.adam_step(w, g, g * 1, small, scale, 0.1, 0.9, 0.99, 1e-8, 0.0, 0.0, 1),
    ):
        with pytest.raises(ShapeError, match=r"sizes differ: param is \(3,\)"):
            update()
    assert w.numpy().tolist() == [1, 1, 1]


def test_what_is_no_number(device):
    a = array([1.0], device)
    for make in (
        lambda: full((2,), "a", device=device),
        lambda: a.fill(None),
        lambda: a + np.complex64(1j),
        lambda: a @ np.ones(1, complex),
        lambda: ndarray.matmul(a, np.ones(1)),
    ):
        with pytest.raises(DTypeError):
            make()
    for values in (None, [1.0, None]):
        with pytest.raises(DTypeError, match="None"):
            ndl.Tensor(values, device=device)
        with pytest.raises(DTypeError, match="None"):
            a[:] = values


def test_arrays_of_numpy_beside_integers(device):
    a = array([1, 2], device, "int32")
    fractions = np.array([0.5, 1.5])
    np.testing.assert_array_equal((a + fractions).numpy(), [1.5, 3.5])
    np.testing.assert_array_equal((a == fractions + 0.5).numpy(), [True, True])
    np.testing.assert_array_equal((a == fractions).numpy(), [False, False])
    small = array([3, 2], device, "uint8")
    np.testing.assert_array_equal((fractions - small).numpy(), [-2.5, -0.5])
    np.testing.assert_array_equal((small + [300, 1]).numpy(), [303, 3])
    np.testing.assert_allclose((np.array([2.0, 3.0]) ** small).numpy(), [8, 9], rtol=1e-6)  # CUDA's powf need not be exact
    np.testing.assert_allclose((2.0**small).numpy(), [8, 4], rtol=1e-6)
    np.testing.assert_allclose((np.array([2.0, 3.0]) ** ndl.Tensor([3, 2], device=device)).numpy(), [8, 9], rtol=1e-6)
    assert (array([1.5], device) + np.array([0.5])).dtype == "float32"
    mask = array([1, 0], device, "bool")
    np.testing.assert_array_equal(where(mask, a, 0.5).numpy(), [1, 0.5])
    np.testing.assert_array_equal(ops.where(ndl.Tensor.make_const(mask), ndl.Tensor.make_const(a), 0.5).numpy(), [1, 0.5])


@pytest.mark.parametrize("mean", [NDArray.mean, lambda a: ops.mean(ndl.Tensor.make_const(a)).cached_data])
def test_a_mean_is_within_what_it_is_the_mean_of(device, mean):
    half = mean(array([60000, 60000, 30000, 30000], device, "float16"))
    assert half.dtype == "float16" and half.item() == 44992  # the nearest to 45000
    with amp.autocast(device, "float16"):
        widened = ops.mean(leaf([60000, 30000], device, "float16"))
    assert widened.dtype == "float32" and widened.item() == 45000
    whole = mean(array([2**30] * 4, device, "int32"))
    assert whole.dtype == "float32" and whole.item() == 2**30


@pytest.mark.parametrize("n", [3, 19])  # one by one; in vectors
def test_numbers_beside_16_bit_floats_are_not_rounded(device, n):
    a = array([60000] * n, device, "float16")
    for x in (a, a[::-1]):
        np.testing.assert_array_equal((x / 100000).numpy(), np.float16(0.6))
        np.testing.assert_array_equal((100000 - x).numpy(), 40000)
    np.testing.assert_array_equal((array([129] * n, device, "bfloat16") * 1.004).numpy(), 130)


def test_whole_numbers_beside_float64_are_exact(device):
    for number in (2**24 + 1, -(2**53) + 1):
        assert (array([0], device, "float64") + number).item() == full((1,), number, "float64", device).item() == number


def test_quotients_are_floats(device):
    seven, two = array([7], device, "int32"), array([2], device, "int32")
    for quotient in (
        seven / two,
        seven / array([2], device, "int64"),
        seven / 2,
        7 / two,
        seven / array([True], device, "bool") / 2,
    ):
        assert quotient.dtype == device.default_float and quotient.item() == 3.5
    assert (array([7], device, "float64") / two).dtype == (array([7], device) / array([2], device, "float64")).dtype == "float64"
    if not device.numpy_semantics:  # floats of numpy are taken as they would be stored
        assert (seven + np.array([0.5])).dtype == device.default_float


def test_integer_powers(device):
    for dtype in ("int32", "int64"):
        least = dt.LIMITS[dtype][0]
        found = array([0, 1, -1, -1, 2, -3, 3, -1, 2], device, dtype) ** array(
            [-1, -2, -2, -3, -1, 3, 19, least, least], device, dtype
        )
        assert found.numpy().tolist() == [0, 1, 1, -1, 0, -27, 3**19, 1, 0]
    both = array([3, 2], device, "int64") ** array([39, -1], device, "int64")
    assert both.numpy().tolist() == [3**39, 0]
    for power in (-1, np.int64(-1)):  # a number that is negative makes floats
        found = array([2, -4], device, "int32") ** power
        assert found.dtype == device.default_float and found.numpy().tolist() == [0.5, -0.25]
    ones = array([2, 0], device, "int32") ** 0
    assert ones.dtype == "int32" and ones.numpy().tolist() == [1, 1]
    for of in (array, leaf):  # as does a number that is no whole one under them
        x = of([2, 1], device, "int32")
        for base, dtype in ((3, "int32"), (2.5, device.default_float), (np.float32(2.5), device.default_float)):
            found = base**x
            assert found.dtype == dtype and found.numpy().tolist() == [base**2, base]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_the_power_of_a_half_is_the_square_root(device, dtype):
    """numpy and PyTorch have NaN for -inf too, where C's pow has inf."""
    x = array([-np.inf, -1, -0.0, 0, 2.25, np.inf], device, dtype)
    for half in (0.5, np.float32(0.5), np.float64(0.5)):
        found = x**half
        assert found.dtype == dtype
        np.testing.assert_array_equal(found.numpy().astype("float64"), [np.nan, np.nan, 0, 0, 1.5, np.inf])
        assert np.signbit(found.numpy().astype("float64")).tolist()[2:] == [True, False, False, False]
    integers = array([4, 9], device, "int32") ** 0.5
    assert integers.dtype == device.default_float and integers.numpy().tolist() == [2, 3]


def test_assigned_integers_do_not_pass_through_float32(device):
    a, b = array([0, 0], device, "int64"), array([0], device, "int32")
    a[:] = [2**53 + 1, -(2**53) - 1]
    b[:] = np.array([2**24 + 1])
    assert a.numpy().tolist() == [2**53 + 1, -(2**53) - 1] and b.item() == 2**24 + 1


def test_uint8_under_a_minus_does_not_wrap_around_before_it_is_widened(device):
    small = leaf([3, 200], device, "uint8", requires_grad=False)
    np.testing.assert_array_equal((leaf([1.5, 1.5], device) - small).numpy(), [-1.5, -198.5])
    np.testing.assert_array_equal((leaf([1, 1], device, "int32") - small).numpy(), [-2, -199])
    np.testing.assert_array_equal((1.5 - small).numpy(), [-1.5, -198.5])
    np.testing.assert_array_equal((np.array([1.5, 2.5]) - small).numpy(), [-1.5, -197.5])
    np.testing.assert_array_equal((small - 3).numpy(), [0, 197])
    np.testing.assert_array_equal((5 - small).numpy(), [2, 61])  # as numpy's uint8


def test_the_smallest_integer_under_a_minus_is_widened_before(device):
    least, other = 2.0**31, leaf([0], device, "int64", requires_grad=False)
    small = leaf([-least], device, "int32", requires_grad=False)
    for difference in (leaf([0], device) - small, 0.0 - small, other - small):
        assert difference.item() == least
    x = leaf([1, 2], device, "int32")
    (leaf([1, 1], device) - x).backward(leaf([0.5, 0.25], device))
    np.testing.assert_array_equal(x.grad.numpy(), [-0.5, -0.25])


def test_what_is_written_broadcasts_also_where_there_is_nothing_to_write(device):
    x = leaf(np.zeros(3), device, requires_grad=False)
    for shape in ((5, 0), (7, 3, 0)):
        with pytest.raises(ShapeError, match=r"\[setitem\] value is"):
            x[0:0] = leaf(np.zeros(shape), device)
    x[0:0] = leaf(np.zeros((1, 1, 0)), device)
    x[0:0] = leaf([1], device)
    assert x.numpy().tolist() == [0, 0, 0]


def test_flags_in_the_place_of_axes(device):
    x, t = array(np.ones((2, 3)), device), leaf(np.ones((2, 3)), device)
    for call in (x.sum, x.max, x.mean, x.argmax, t.sum, t.mean, lambda *a: ops.max(t, *a), lambda *a: ops.summation(t, *a)):
        with pytest.raises(TypeError, match=r"keepdims is 1 \(accepted: True or False\)"):
            call(0, 1)
        with pytest.raises(ShapeError, match="axis True is no whole number"):
            call(True)


def test_whole_numbers_that_int64_does_not_have(device):
    large = np.array([5, 2**63], "uint64")
    with pytest.raises(OverflowError, match="is outside int64"):
        ndarray.asarray(large, device)
    assert ndarray.asarray(large[:1], device).numpy().tolist() == [5] and ndarray.asarray(large[:0], device).shape == (0,)


def test_a_scalar_is_one_number(device):
    x = leaf([1, 2], device)
    for op in (ops.add_scalar, ops.mul_scalar, ops.divide_scalar, ops.power_scalar):
        for wrong in (x, x.realize_cached_data(), np.ones((4, 1, 2)), [2.0], (2.0,)):
            with pytest.raises(DTypeError, match=r"the scalar is of type .* \(accepted: one number\)"):
                op(x, wrong)
        assert op(x, np.float32(2)).shape == op(x, np.array([2.0])).shape == (2,)


@pytest.mark.parametrize("op", [ops.erf, ops.gelu, lambda x: ops.gelu(x, "tanh"), ops.silu, ops.tanh, ops.absolute])
def test_functions_of_a_0_d_array(device, op):
    (slope,) = gradients(op, device, 0.5)
    assert op(leaf(0.5, device)).shape == slope.shape == ()
    np.testing.assert_allclose(slope, gradients(op, device, [0.5])[0][0], rtol=1e-6)
    np.testing.assert_array_equal(abs(array([True, False], device, "bool")).numpy(), [True, False])
    np.testing.assert_array_equal((-array([True, False], device, "bool")).numpy(), [-1, 0])


# --- exchange ---


def test_a_copy_is_a_copy(device):
    if device.name == "cuda":
        return

    class Copy:  # numpy's from_dlpack has no ``copy`` before 2.1
        def __init__(self, x):
            self.x = x

        def __dlpack__(self, **asked):
            return self.x.__dlpack__(**{**asked, "copy": True})

        def __dlpack_device__(self):
            return self.x.__dlpack_device__()

    a = array([1.0, 2.0], device)
    copy = np.from_dlpack(Copy(a))
    a[0] = 9.0
    assert copy[0] == 1 and np.from_dlpack(a)[0] == 9
    with pytest.raises(BufferError, match="DLPack device"):
        a.__dlpack__(dl_device=(2, 0))
    with pytest.raises(BufferError, match="negative stride"):
        np.from_dlpack(a[::-1])
    assert np.from_dlpack(Copy(a[::-1]))[1] == np.from_dlpack(a[:1][::-1])[0] == 9
    for x in (a, ndl.Tensor.make_const(a)):
        with pytest.raises(ValueError, match="copy"):
            x.__array__(copy=False)
    with pytest.raises(DTypeError, match="list"):
        from_dlpack([1.0])


def test_memory_of_a_gpu_is_asked_for_in_the_order_of_the_default_stream(monkeypatch):
    """PyTorch's ``__dlpack__`` waits for nothing unless told on which stream its memory will be read."""
    there, asked = usable("cuda_sim"), []

    class Theirs:
        def __dlpack_device__(self):
            return 2, 0

        def __dlpack__(self, stream=-1):
            asked.append(stream)
            return np.arange(3.0).__dlpack__()

    monkeypatch.setattr("needle.backend_ndarray.ndarray.cuda", lambda: there)
    assert from_dlpack(Theirs()).numpy().tolist() == [0, 1, 2] and asked == [1]


@pytest.mark.parametrize("name", ["cuda_sim", "cuda"])
def test_memory_of_a_gpu_is_ready_for_the_stream_that_reads_it(name, monkeypatch):
    """JAX and PyTorch's side streams wait neither for the default stream nor for needle's."""
    device, waited = usable(name), []
    module, a = device.require(), array([1.0, 2.0], device) + 1
    sync = module.sync
    monkeypatch.setattr(module, "sync", lambda: waited.append(True) or sync())
    for stream, times in ((None, 0), (1, 0), (-1, 0), (2, 1), (1 << 40, 1)):
        waited.clear()
        a.__dlpack__(stream=stream)
        assert len(waited) == times, stream


@pytest.mark.parametrize("name", ["cuda"])
def test_pytorch_shares_memory_of_a_gpu(name):
    device, torch = usable(name), pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch has no GPU")
    ours = array(np.arange(1 << 20), device) + 1
    theirs = torch.from_dlpack(ours)
    assert theirs.is_cuda and theirs[-1].item() == 1 << 20
    theirs.mul_(2)
    np.testing.assert_array_equal(ours.numpy(), 2 * np.arange(1, (1 << 20) + 1))
    theirs = torch.arange(1 << 20, dtype=torch.float32, device="cuda") + 1
    shared = from_dlpack(theirs)
    assert shared.device == device and (shared + 1).numpy()[-1] == (1 << 20) + 1
    shared.fill(7)
    assert theirs.unique().tolist() == [7]
    with torch.cuda.stream(torch.cuda.Stream()):
        assert torch.from_dlpack(ours + 1).sum(dtype=torch.float64).item() == (1 << 40) + (1 << 21)


def test_memory_of_others_that_cannot_be_shared():
    odd = np.zeros(17, np.uint8)[1:].view(np.float32)
    with pytest.raises(ValueError, match="not aligned to its elements of 4 bytes"):
        from_dlpack(odd)
    with pytest.raises(ValueError, match="negative stride"):
        from_dlpack(np.arange(3.0)[::-1])
    elsewhere = SimpleNamespace(__dlpack_device__=lambda: (10, 0))
    with pytest.raises(DeviceError, match=r"memory of DLPack device type 10 \(accepted: CPU, CUDA\)"):
        from_dlpack(elsewhere)
    assert from_dlpack(np.arange(3.0)[::-1][:1]).item() == 2  # which numpy takes for contiguous


def test_memory_of_others_without_strides_and_behind_its_address(cpu):
    """DLPack says neither that rows next to each other have strides nor that data begins where it points."""
    a = array(np.arange(12).reshape(3, 4), cpu)
    capsule = a[:2].__dlpack__()
    address = ctypes.pythonapi.PyCapsule_GetPointer
    address.restype, address.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    strides, byte_offset = (ctypes.c_uint64.from_address(address(capsule, b"dltensor") + at) for at in (32, 40))
    strides.value, byte_offset.value = 0, 16
    theirs = SimpleNamespace(__dlpack__=lambda **_: capsule, __dlpack_device__=lambda: (1, 0))
    np.testing.assert_array_equal(from_dlpack(theirs).numpy(), [[4, 5, 6, 7], [8, 9, 10, 11]])
    before = memory.stats(cpu).borrowed
    nothing = from_dlpack(np.zeros((4, 5))[:0, :2])
    assert nothing.numpy().shape == (0, 2) and memory.stats(cpu).borrowed == before


def test_memory_of_others_of_other_elements_and_other_cards(cpu):
    """Elements of several numbers each, a card of another number, and memory that nobody wants to be told of."""

    def theirs(at, width, value):
        capsule = array(np.arange(6).reshape(2, 3), cpu).__dlpack__()
        address = ctypes.pythonapi.PyCapsule_GetPointer
        address.restype, address.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        width.from_address(address(capsule, b"dltensor") + at).value = value
        return SimpleNamespace(__dlpack__=lambda **_: capsule, __dlpack_device__=lambda: (1, 0))

    with pytest.raises(ValueError, match="unsupported dtype"):
        from_dlpack(theirs(22, ctypes.c_uint16, 2))
    with pytest.raises(ValueError, match="memory of device type 1, id 1"):
        from_dlpack(theirs(12, ctypes.c_int32, 1))
    assert from_dlpack(theirs(56, ctypes.c_void_p, None)).numpy().tolist() == [[0, 1, 2], [3, 4, 5]]
    before = memory.stats(cpu).borrowed
    part = from_dlpack(np.zeros((4, 5), np.float32)[:, :2])  # 17 numbers from its first to its last
    assert part.shape == (4, 2) and memory.stats(cpu).borrowed == before + 17 * 4


# --- functions of rows ---


def test_softmax_of_large_numbers(device):
    x = np.array([[1e38, 1e38, -1e38], [1e5, 1e5 + 1, 0], [-1e30, -3e38, -1e30]], np.float32)
    e = np.exp(np.float64(x) - x.max(axis=1, keepdims=True))
    wanted = e / e.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(ops.softmax(leaf(x, device)).numpy(), wanted, rtol=1e-6)
    np.testing.assert_allclose(ops.softmax(leaf([x.T], device), 1).numpy(), [wanted.T], rtol=1e-6)
    nothing = ops.softmax(leaf([[-np.inf, -np.inf], [np.nan, 0]], device))
    assert np.isnan(nothing.numpy()).all()
    assert ops.softmax(leaf(np.zeros((2, 0)), device)).shape == (2, 0)
    for wrong, axis in ((x, 2), (x, -3), (x, (0, 1)), (1.0, -1)):
        with pytest.raises(ShapeError, match=r"\[softmax\] axis"):
            ops.softmax(leaf(wrong, device), axis)


@pytest.mark.parametrize("shape", [(1, 3000, 100), (3, 5003, 10), (1, 20_001, 2), (2, 7, 3), (1, 64, 64)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bool"])
def test_columns_that_are_no_whole_number_of_strips(device, dtype, shape):
    x = np.random.default_rng(0).standard_normal(shape) > 0
    for op in ("max", "min", "sum"):
        np.testing.assert_array_equal(getattr(array(x, device, dtype), op)(axis=1).numpy(), getattr(x, op)(axis=1))


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FC00001, 0xFFFFFFFF], ids=hex)
def test_attention_loses_no_nan_whatever_its_bits(device, bits):
    x, v = np.random.default_rng(0).standard_normal((2, 1, 1, 40, 16)).astype(np.float32)
    x.view(np.uint32)[0, 0, 3, 2] = bits
    q, values, layout = array(x, device), array(v, device), BlockLayout(np.tri(2), 32, causal=True)
    out, lse = kernels.attention(q, q, values, layout, 0.25)
    for found in (out, lse, *kernels.attention_backward(values, q, q, values, out, lse, layout, 0.25)):
        assert np.isnan(found.numpy()[0, 0, 3:].reshape(37, -1)).all(axis=1).all()
    assert np.isfinite(out.numpy()[0, 0, :3]).all() and np.isfinite(lse.numpy()[0, 0, :3]).all()


@pytest.mark.filterwarnings("error")
def test_norms_of_rows_of_nothing(device):
    x, nothing = leaf(np.ones((3, 0)), device), leaf(np.ones(0), device)
    y = ops.layer_norm(x, nothing, nothing)
    y.backward()
    assert y.shape == x.grad.shape == (3, 0)


@pytest.mark.filterwarnings("error")
def test_infinities_are_nothing_to_warn_of(device):
    halves, x = array([1, 2], device, "float16"), leaf([[np.inf, 1.0], [3e38, -3e38]], device)
    halves.fill(1e6)
    halves[0:1] = -1e6
    assert halves.numpy().tolist() == [-np.inf, np.inf]
    assert (array([1, -1], device, "float32") * 1e300).numpy().tolist() == [np.inf, -np.inf]
    ones = leaf([1.0, 1.0], device)
    ops.layer_norm(x, ones, ones).sum().backward()
    ops.cross_entropy(x, leaf([0, 1], device, "int64", requires_grad=False)).backward()
    ops.dropout(x, 0.9, seed=1).sum().backward()
    x.grad = leaf(np.full((2, 2), np.inf), device)
    optimizer = optim.AdamW([x])
    optimizer.clip_grad_norm(1.0)
    optimizer.step()
    assert np.isnan(x.numpy()).all()


# --- what an error names ---


def check_names(calls):
    """Each call raises one of needle's errors, or Python's for a wrong number or slice, in one line that begins with the name beside it."""
    for name, call in calls:
        with pytest.raises((DTypeError, DeviceError, IndexError, OverflowError, TypeError, ValueError)) as caught:
            call()
        said = str(caught.value)
        assert said.startswith(f"[{name}] ") and "\n" not in said, (name, said)


def test_a_terminal_obeys_nothing_in_an_error():
    """What it names may come from a file, or be the name of one."""
    assert str(ShapeError("a\x1b[2J\tb\r\n c\x07\x9b")) == "a␛[2J b c␇�"


def test_what_an_index_of_ones_own_raises_stays():
    class Refused(ValueError):
        def __init__(self):
            super().__init__("refused")

    class Index:
        def __index__(self):
            raise Refused

    with pytest.raises(Refused, match="refused"):
        array(np.ones(3), ndl.cpu())[Index() :]


def test_an_addition_of_ones_own(device):
    class Add(ops.EWiseAdd):
        def __init__(self):
            pass

    x = leaf(np.ones(2), device)
    assert (Add()(x, x).numpy() == 2).all() and (ops.EWiseAdd().compute(np.ones(2), 1) == 2).all()


def test_errors_name_what_was_called(device):
    a, b, small = array(np.ones((2, 3)), device), array(np.ones(4), device), array([1, 2], device, "uint8")
    t, u = leaf(np.ones((2, 3)), device), leaf(np.ones(4), device)
    elsewhere = array(np.ones((2, 3)), ndl.meta())
    check_names(
        (name, lambda op=op, x=x, y=y: op(x, y))
        for name, op in (("add", operator.add), ("sub", operator.sub), ("mul", operator.mul), ("div", operator.truediv))
        for x, y in ((a, b), (t, u), (t, np.ones(4)), (a, elsewhere), (t, ndl.Tensor(elsewhere)))
    )
    check_names(
        (name, lambda name=name, axis=axis: getattr(a, name)(axis))
        for name in ("sum", "prod", "max", "min", "mean", "any", "all", "argmax", "argmin")
        for axis in (2, (), "a", (0, 0))
    )
    check_names([
        ("mul", lambda: small * -1), ("sub", lambda: small - 300), ("sub", lambda: 300 - small), ("add", lambda: a + np.complex64(1j)),
        ("power", lambda: a**b), ("eq", lambda: a == b), ("lt", lambda: a < b), ("maximum", lambda: a.maximum(b)),
        ("logical_or", lambda: a.logical_or(b)), ("mean", lambda: a.mean(0, 1)), ("mean", lambda: ops.mean(t, ())),
        ("max", lambda: array(np.ones((0, 3)), device).max(0)), ("clip", lambda: ops.clip(ndl.Tensor(small), -1)),
        ("clip", lambda: ops.clip(ndl.Tensor(small), None, 300)), ("setitem", lambda: a.__setitem__(0, b)),
        ("add_in_place", lambda: a.T.add_in_place(1)), ("add_in_place", lambda: a.add_in_place(b)),
        ("mul_in_place", lambda: a.mul_in_place("x")), ("mul_in_place", lambda: a.mul_in_place(elsewhere)),
    ])  # fmt: skip


def test_errors_of_products_show_the_shapes_that_were_given(device):
    def t(*shape):
        return leaf(np.ones(shape), device)

    heads = nn.MultiHeadAttention()
    for said, call in (
        ("[matmul] inner dimensions differ: a is (2, 3), b is (4,)", lambda: t(2, 3) @ t(4)),
        ("[matmul] inner dimensions differ: a is (4,), b is (5, 2, 3)", lambda: t(4) @ t(5, 2, 3)),
        ("[matmul] leading axes do not broadcast: a is (5, 2, 3), b is (4, 3, 2)", lambda: t(5, 2, 3) @ t(4, 3, 2)),
        (
            "[linear] x is (2, 5), weight is (3, 4) (accepted: (..., in), (in, out))",
            lambda: nn.Linear(3, 4, device=device)(t(2, 5)),
        ),
        ("[linear] x is (), weight is (3, 4) (accepted: (..., in), (in, out))", lambda: ops.linear(t(), t(3, 4), t(4))),
        ("[MultiHeadAttention] q is (1, 2, 3, 4), k is (1, 2, 3, 5) ", lambda: heads(t(1, 2, 3, 4), t(1, 2, 3, 5), t(1, 2, 3, 4))),
    ):
        with pytest.raises(ShapeError, match="^" + re.escape(said)):
            call()


def test_errors_of_views_indices_and_scalars(device):
    a, t = array(np.ones((2, 3)), device), leaf(np.ones((2, 3)), device)
    check_names(
        ("pad", lambda x=x, widths=widths: x(widths))
        for x in (a.pad, lambda widths: ops.pad(t, widths))
        for widths in (1, None, "ab", ((1,), (1,)), ((1.5, 1), (0, 0)))
    )
    check_names(
        ("getitem", lambda x=x, index=index: x[index])
        for x in (a, t)
        for index in (slice(None, None, 0), slice("a", None), (None, ..., ...))
    )
    with pytest.raises(IndexError, match=r"more than one \.\.\. for shape \(2, 3\)"):
        a[..., ...]
    check_names(
        (op.__name__, lambda op=op, args=args: op(args, 0)) for op in (ops.stack, ops.concatenate) for args in (3, [t, 3], [t, a])
    )
    check_names(
        (name, lambda op=op, number=number: op(t, number))
        for op, name in ((ops.add_scalar, "AddScalar"), (ops.divide_scalar, "DivScalar"), (ops.power_scalar, "PowerScalar"))
        for number in ("a", None, 1j)
    )
    check_names([
        ("getitem", lambda: t[[0], ::0]), ("getitem", lambda: t[[0, 1], [0, 1, 2]]),
        ("matmul", lambda: ndarray.matmul(np.ones((2, 3)), a.T)), ("matmul", lambda: ndarray.matmul(a, np.ones((3, 2)))),
        ("fused_add_scalars", lambda: ops.fused_add_scalars(t, "a", 1)), ("where", lambda: where(np.ones((2, 3)), a, a)),
        ("where", lambda: where(a, "a", 1)), ("where", lambda: where(a, array([1], device, "int32"), 2**40)),
        ("zeros_like", lambda: init.zeros_like([1, 2])), ("ones_like", lambda: init.ones_like(3)), ("shape", lambda: device.randn(-1)), ("shape", lambda: device.rand(2.5)),
    ])  # fmt: skip


def test_a_wrong_target_is_named_by_its_place_among_all(host):
    hidden, weight = leaf(np.ones((100, 4)), host), leaf(np.ones((4, 5)), host)
    targets = np.zeros(100)
    targets[[3, 70]] = -100, 9
    said = r"^\[linear_cross_entropy\] target 9 at position 70 is outside the classes \(0\.\.4\)$"
    for chunk_bytes in (200, 1 << 20):
        with pytest.raises(IndexError, match=said):
            ops.linear_cross_entropy(hidden, weight, leaf(targets, host, "int32", requires_grad=False), chunk_bytes=chunk_bytes)


def test_any_number_can_be_the_target_that_is_ignored(device):
    for classes, ignored in ((0, 0), (0, 7), (3, 0), (3, -1), (3, -(1 << 63))):
        targets = leaf(np.array([ignored, ignored]), device, "int64", requires_grad=False)
        assert ops.cross_entropy(leaf(np.ones((2, classes)), device), targets, ignored).item() == 0
    targets = leaf(np.array([ignored, 1]), device, "int64", requires_grad=False)
    assert ops.cross_entropy(leaf(np.zeros((2, 3)), device), targets, ignored).item() == pytest.approx(np.log(3), rel=1e-6)


@pytest.mark.parametrize("name", ["sum", "max", "min", "prod"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64", "int32"])
def test_rows_of_any_short_length(host, name, dtype):
    rng = np.random.default_rng(0)
    for n in (1, 2, 3, 7, 8, 15, 16, 17, 24, 31, 32, 33, 40):
        x = ndl.Tensor(rng.integers(-2, 3, (133, n)), device=host, dtype=dtype).realize_cached_data()
        found = getattr(x, name)(axis=1).astype("float64").numpy()
        np.testing.assert_allclose(
            found, getattr(np, name)(x.astype("float64").numpy(), axis=1), rtol=1e-2 if "16" in dtype else 1e-6
        )
        if name in ("max", "min") and "float" in dtype:
            x[5, n // 2] = float("nan")
            assert np.flatnonzero(np.isnan(getattr(x, name)(axis=1).astype("float64").numpy())).tolist() == [5]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_reductions_of_permuted_arrays(host, order):
    values = np.random.default_rng(0).standard_normal((3, 4, 5)).astype(np.float32)
    x, expected = leaf(values, host).realize_cached_data().permute(order), values.transpose(order)
    for count in (1, 2, 3):
        for axes in itertools.combinations(range(3), count):
            for keepdims in (False, True):
                np.testing.assert_allclose(
                    x.sum(axes, keepdims=keepdims).numpy(), expected.sum(axes, keepdims=keepdims), rtol=1e-5, atol=1e-6
                )
                assert np.array_equal(x.max(axes, keepdims=keepdims).numpy(), expected.max(axes, keepdims=keepdims))
