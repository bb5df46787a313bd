"""What lies at the edges, on every device: impossible shapes, numbers outside a dtype, overlapping and empty arrays, infinities,
and arguments that are none. Each is done right or is one clear error."""

import gzip
import pickle
import struct
import threading

import numpy as np
import pytest

import needle as ndl
from devices import usable
from needle import amp, data, init, memory, nn, ops
from needle import dtype as dt
from needle.backend_ndarray import kernels, ndarray
from needle.backend_ndarray.block_layout import BlockLayout
from needle.backend_ndarray.ndarray import NDArray, from_dlpack, full, matmul, where
from needle.errors import CheckpointError, DataError, DeviceError, DTypeError, GraphError, OutOfMemoryError, ShapeError
from needle.optim import SGD, Adam, AdamW


def array(values, device, dtype="float32"):
    return NDArray(values, device=device, dtype=dtype)


def leaf(values, device, dtype="float32", **kwargs):
    return ndl.Tensor(np.asarray(values), device=device, dtype=dtype, **kwargs)


def gradients(f, device, *values, create_graph=False):
    leaves = [leaf(v, device) for v in values]
    f(*leaves).backward(create_graph=create_graph)
    return [x.grad.numpy() for x in leaves]


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


def test_more_memory_than_there_is(device):
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
        memory.set_limit(None, device)


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


def test_iterating_over_a_view(device):
    x = np.arange(6.0).reshape(2, 3)
    for view, wanted in ((array(x, device).permute((1, 0)), x.T), (array(x, device)[:, ::-2], x[:, ::-2])):
        np.testing.assert_array_equal([row.numpy() for row in view], wanted)


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

    check(forward, (n * n,))
    check(reverse, (n * n,))
    check(turn, (n, n))
    t = leaf(range(n * n), device, requires_grad=False)
    t[1:] = t[:-1]
    np.testing.assert_array_equal(t.numpy(), np.maximum(np.arange(n * n) - 1, 0))


# --- numbers and dtypes ---


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
        ("[one_hot] id 2 at position 0 is outside the depth (0..1)", lambda: kernels.one_hot(array([2], device, "int64"), 2)),
        (f"[one_hot] id {2**32} at position 0 is outside the depth (0..1)", lambda: init.one_hot(2, np.array([2**32]), device)),
        ("[cross_entropy] target 3 at position 1 is outside the classes (0..2)", lambda: kernels.cross_entropy(x, array([-100, 3], device))[0]),
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
            with pytest.raises(ValueError, match=rf"^\[{op}\] no kernel for dtype bool$"):
                make()


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


def test_integer_powers(device):
    for dtype in ("int32", "int64"):
        least = dt.LIMITS[dtype][0]
        found = array([0, 1, -1, -1, 2, -3, 3, -1, 2], device, dtype) ** array(
            [-1, -2, -2, -3, -1, 3, 19, least, least], device, dtype
        )
        assert found.numpy().tolist() == [0, 1, 1, -1, 0, -27, 3**19, 1, 0]
    both = array([3, 2], device, "int64") ** array([39, -1], device, "int64")
    assert both.numpy().tolist() == [3**39, 0]


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


@pytest.mark.parametrize("op", [ops.erf, ops.gelu, lambda x: ops.gelu(x, "tanh"), ops.silu, ops.tanh, ops.absolute])
def test_functions_of_a_0_d_array(device, op):
    (slope,) = gradients(op, device, 0.5)
    assert op(leaf(0.5, device)).shape == slope.shape == ()
    np.testing.assert_allclose(slope, gradients(op, device, [0.5])[0][0], rtol=1e-6)
    np.testing.assert_array_equal(abs(array([True, False], device, "bool")).numpy(), [True, False])


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


def test_memory_of_others_that_cannot_be_shared():
    odd = np.zeros(17, np.uint8)[1:].view(np.float32)
    with pytest.raises(ValueError, match="not aligned to its elements of 4 bytes"):
        from_dlpack(odd)
    with pytest.raises(ValueError, match="negative stride"):
        from_dlpack(np.arange(3.0)[::-1])
    assert from_dlpack(np.arange(3.0)[::-1][:1]).item() == 2  # which numpy takes for contiguous


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


@pytest.mark.parametrize("dtype", ["float32", "bool"])
def test_columns_that_are_no_whole_number_of_strips(device, dtype):
    x = np.random.default_rng(0).standard_normal((3000, 100)) > 0
    for op in ("max", "min", "sum"):
        np.testing.assert_array_equal(getattr(array(x, device, dtype), op)(axis=0).numpy(), getattr(x, op)(axis=0))


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FC00001, 0xFFFFFFFF], ids=hex)
def test_attention_loses_no_nan_whatever_its_bits(device, bits):
    x, v = np.random.default_rng(0).standard_normal((2, 1, 1, 40, 16)).astype(np.float32)
    x.view(np.uint32)[0, 0, 3, 2] = bits
    q, values, layout = array(x, device), array(v, device), BlockLayout(np.tri(2), 32, causal=True)
    out, lse = kernels.attention(q, q, values, layout, 0.25)
    for found in (out, lse, *kernels.attention_backward(values, q, q, values, out, lse, layout, 0.25)):
        assert np.isnan(found.numpy()[0, 0, 3:].reshape(37, -1)).all(axis=1).all()
    assert np.isfinite(out.numpy()[0, 0, :3]).all() and np.isfinite(lse.numpy()[0, 0, :3]).all()


# --- gradients ---


def test_slopes_of_powers_at_0(device):
    base, exponent = gradients(lambda a, b: a**b, device, [0, 0, 2, 0, 0], [2, 0, 0, 1, 0.5])
    np.testing.assert_array_equal(base, [0, 0, 0, 1, np.inf])
    np.testing.assert_allclose(exponent, [0, 0, np.log(2), 0, 0], rtol=1e-6)
    np.testing.assert_array_equal((2 ** leaf([np.inf, -np.inf, 1], device)).numpy(), [np.inf, 0, 2])
    np.testing.assert_allclose(gradients(lambda x: 2**x, device, [3, -np.inf])[0], [8 * np.log(2), 0], rtol=1e-6)
    np.testing.assert_array_equal(gradients(lambda x: 0**x, device, [2, 0])[0], [0, 0])
    np.testing.assert_array_equal(gradients(lambda x: x**0, device, [2, 0])[0], [0, 0])
    np.testing.assert_array_equal(gradients(ops.absolute, device, [2, 0, -2])[0], [1, 0, -1])


@pytest.mark.parametrize("op", [ops.tanh, ops.sigmoid, ops.silu, lambda x: ops.gelu(x, "tanh"), ops.gelu])
def test_differentiable_gradients_far_out(device, op):
    values = np.array([-200, -60, -12, 0, 12, 60, 200])
    (plain,), (with_graph,) = gradients(op, device, values), gradients(op, device, values, create_graph=True)
    np.testing.assert_allclose(with_graph, plain, rtol=1e-5, atol=1e-6)
    x = leaf(values, device)
    op(x).backward(create_graph=True)
    x.grad.backward()
    assert np.isfinite(x.grad.numpy()).all()


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8", "bool"])
def test_the_slope_of_cutting_off_is_0(device, dtype):
    (slope,) = gradients(lambda x: ops.astype(ops.astype(x, dtype), "float32") * 3 + x, device, [0.5, 1.5])
    np.testing.assert_array_equal(slope, [1, 1])
    whole = leaf([1, 2], device, "int32")
    (ops.astype(whole, "float32") * 3).backward()
    assert whole.grad.dtype == "int32" and whole.grad.numpy().tolist() == [3, 3]
    (ops.astype(whole, "int64") * 2).backward()
    assert whole.grad.dtype == "int32" and whole.grad.numpy().tolist() == [2, 2]


def test_gradients_of_0_d_arrays(device):
    x = leaf(2.0, device)
    for f in (ops.max, ops.summation, ops.mean, lambda x: ops.where(x, x, 0.0), lambda x: ops.where(x, 1.5, x) + x):
        out = f(x)
        out.backward()
        assert x.grad.shape == () and x.grad.item() == 1
    assert ops.where(x, x, 0.0).shape == ()


def test_undilating_lengths_that_are_no_multiple(device):
    x = leaf(np.arange(15).reshape(3, 5), device)
    y = ops.undilate(x, (0, 1), 1)
    np.testing.assert_array_equal(y.numpy(), x.numpy()[::2, ::2])
    y.backward()
    assert x.grad.numpy().sum() == 6 and (x.grad.numpy()[::2, ::2] == 1).all()


@pytest.mark.parametrize("dtype, values", [("float16", [300, 400, 0.001]), ("float32", [1e20, 3e20, 1e-25])])
def test_slopes_of_quotients_by_numbers_whose_square_is_outside_the_dtype(device, dtype, values):
    a, b = leaf(values, device, dtype), leaf(values, device, dtype)
    (a / b).backward()
    np.testing.assert_allclose(b.grad.numpy(), -1 / b.numpy(), rtol=2e-3)


def test_numbers_divided_by_tensors(device):
    values = np.arange(1, 100, dtype=np.float32)
    for number in (1, 49, 0.1):
        np.testing.assert_array_equal((number / leaf(values, device)).numpy(), np.float32(number) / values)
    assert (0.5 / leaf([1e-5], device, "float16")).item() == np.float16(0.5 / np.float16(1e-5))
    assert (300 / leaf([4], device, "uint8")).item() == 75
    np.testing.assert_array_equal(gradients(lambda x: 3 / x, device, [1, -2, 0.5])[0], [-3, -0.75, -12])


@pytest.mark.parametrize("create_graph", [False, True])
def test_what_was_not_taken_has_no_part_in_an_infinite_slope(device, create_graph):
    for f in (ops.relu, lambda x: ops.clip(x, 0), lambda x: ops.maximum(x, 0), lambda x: -ops.minimum(-x, 0)):
        (slope,) = gradients(lambda x, f=f: ops.sqrt(f(x)), device, [-1, 4], create_graph=create_graph)
        np.testing.assert_array_equal(slope, [0, 0.25])
    (slope,) = gradients(lambda x: ops.max(x, 1), device, [[1, 3, 3], [2, 0, 1]], create_graph=create_graph)
    np.testing.assert_array_equal(slope, [[0, 0.5, 0.5], [1, 0, 0]])
    (slope,) = gradients(lambda x: ops.sqrt(ops.max(x)), device, [-1, 0], create_graph=create_graph)
    np.testing.assert_array_equal(slope, [0, np.inf])


def test_large_logits_keep_their_digits(device):
    """Near 10,000 float32 has steps of 0.001: the log-sum-exp itself is rounded to one."""
    x = (np.random.default_rng(0).standard_normal((3, 40)) + 1e4).astype(np.float32)
    wanted = x - np.float64(x.max(axis=1, keepdims=True))
    wanted -= np.log(np.exp(wanted).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(ops.logsoftmax(leaf(x, device)).numpy(), wanted, rtol=1e-6)
    targets, hidden = leaf([1, 2, 3], device, "int64"), leaf(np.eye(3), device)
    slope = (np.exp(wanted) - np.eye(40)[[1, 2, 3]]) / 3
    for f in (lambda logits: ops.cross_entropy(logits, targets), lambda logits: ops.linear_cross_entropy(hidden, logits, targets)):
        logits = leaf(x, device)
        loss = f(logits)
        loss.backward()
        np.testing.assert_allclose(loss.item(), -wanted[np.arange(3), [1, 2, 3]].mean(), rtol=1e-6)
        np.testing.assert_allclose(logits.grad.numpy(), slope, rtol=1e-6)


def test_logsumexp_where_all_is_minus_infinity(device):
    x = [[-np.inf, -np.inf], [0, -np.inf]]
    np.testing.assert_array_equal(gradients(lambda x: ops.logsumexp(x, axes=(1,)), device, x)[0], [[0, 0], [1, 0]])
    empty = ops.logsumexp(leaf(np.zeros((2, 0, 3)), device), axes=(1, 2))
    np.testing.assert_array_equal(empty.numpy(), [-np.inf, -np.inf])


EMPTY_PRODUCTS = [((2, 3, 0), (0, 4)), ((2, 3, 4), (4, 0)), ((0, 3, 4), (4, 2)), ((3, 0), (0, 2)), ((0, 2), (2, 3))]


@pytest.mark.parametrize("shapes", EMPTY_PRODUCTS, ids=str)
def test_gradients_of_empty_products(device, shapes):
    bias = np.ones(shapes[1][1])
    for f, values in ((ops.matmul, []), (ops.linear, [bias])):
        found = gradients(f, device, *[np.ones(s) for s in shapes], *values)
        assert [g.shape for g in found[:2]] == list(shapes)
        np.testing.assert_array_equal(found[1], np.full(shapes[1], np.prod(shapes[0][:-1])))


def test_layers_of_no_inputs(device):
    conv, linear = nn.Conv(0, 2, 3, device=device), nn.Linear(0, 2, device=device)
    found = conv(leaf(np.zeros((1, 0, 4, 4)), device)).numpy(), linear(leaf(np.zeros((3, 0)), device)).numpy()
    np.testing.assert_array_equal(found[0], np.broadcast_to(conv.bias.numpy().reshape(1, 2, 1, 1), (1, 2, 4, 4)))
    np.testing.assert_array_equal(found[1], np.broadcast_to(linear.bias.numpy(), (3, 2)))


def test_flattening_an_empty_batch(device):
    assert nn.Flatten()(leaf(np.zeros((0, 3, 4)), device)).shape == (0, 12)


@pytest.mark.parametrize("stride", [1, 2, 3, 4])
@pytest.mark.parametrize("padding", [0, 1])
def test_gradients_of_convolutions_with_kernels_that_are_not_square(stride, padding):
    device, rng = ndl.cpu_numpy(), np.random.default_rng(0)
    values = [rng.standard_normal((2, 5, 6, 2)), rng.standard_normal((3, 2, 2, 3))]

    def loss(image, kernel):
        out = ops.conv(*(ndl.Tensor(v, device=device, dtype="float64") for v in (image, kernel)), stride=stride, padding=padding)
        return (out.numpy() ** 2).sum()

    leaves = [ndl.Tensor(v, device=device, dtype="float64") for v in values]
    out = ops.conv(*leaves, stride=stride, padding=padding)
    (out * out).sum().backward()
    for which, x in enumerate(leaves):
        found = x.grad.numpy()
        assert found.shape == values[which].shape
        for i in [(0, 0, 0, 0), (1, 1, 0, 1), (-1, -1, -1, -1)]:
            up, down = [v.copy() for v in values], [v.copy() for v in values]
            up[which][i] += 1e-5
            down[which][i] -= 1e-5
            np.testing.assert_allclose(found[i], (loss(*up) - loss(*down)) / 2e-5, rtol=1e-6, atol=1e-8)


def test_views_without_elements(device):
    nothing = array(np.zeros((0, 3, 4, 2)), device)[:, 2:, 2:]
    x = ndl.Tensor.make_const(nothing, requires_grad=True)
    ops.attention(x, x, x).backward()
    assert x.grad.shape == (0, 1, 2, 2) and nothing.compact().size == 0


def test_attention_to_nothing(device):
    q, k = leaf(np.ones((1, 2, 3, 4)), device), leaf(np.ones((1, 2, 0, 4)), device)
    out = ops.attention(q, k, k, causal=False)
    np.testing.assert_array_equal(out.numpy(), np.zeros((1, 2, 3, 4)))


def test_what_a_missing_block_would_meet_is_not_read(device):
    layout = BlockLayout([[True, False]], 16)
    blocks, dense = array(np.ones((1, 1, 16, 16)), device), np.ones((1, 32, 2))
    dense[0, 20] = np.nan
    right = kernels.blocksparse_dsd(blocks, array(dense, device), layout)
    left = kernels.blocksparse_dds(array(dense.swapaxes(1, 2), device), blocks, layout, transpose=True)
    np.testing.assert_array_equal(right.numpy(), np.full((1, 16, 2), 16))
    np.testing.assert_array_equal(left.numpy(), np.full((1, 2, 16), 16))


def test_arguments_of_ops(device):
    x = leaf(np.ones((1, 4, 4, 1)), device)
    for stride, padding in ((0, 1), (-1, 1), (1, -1), ((2, 2), 1), (2.0, 1), (1, None)):
        with pytest.raises(ShapeError, match=r"\[conv\] stride is"):
            ops.conv(x, leaf(np.ones((3, 3, 1, 1)), device), stride, padding)
    for f in (ops.dilate, ops.undilate):
        with pytest.raises(ShapeError, match="dilation"):
            f(x, (1,), -1)
    with pytest.raises(ShapeError, match="non-negative"):
        x.cached_data.pad(((0, -1),) * 4)
    for widths in (1, (1, 1), ((1, 1, 1),) * 4, ((1.5, 1),) * 4, "wide"):
        with pytest.raises(ShapeError, match=r"\[pad\] .* are no widths"):
            ops.pad(x, widths)
    number, weight = leaf(np.float32(1), device), leaf(np.ones((1, 3)), device)
    for loss in (lambda t: ops.cross_entropy(number, t), lambda t: ops.linear_cross_entropy(number, weight, t)):
        with pytest.raises(ShapeError, match="cross_entropy"):
            loss(leaf([0], device))
    with pytest.raises(ShapeError, match=r"\[cross_entropy\] rows are \(2, 3\), targets \(2, 3\)"):  # as they were given
        ops.cross_entropy(leaf(np.ones((2, 3)), device), leaf(np.ones((2, 3)), device))
    logits, columns = leaf(np.ones((2, 3, 4)), device), leaf(np.ones((4, 5)), device)
    for loss in (lambda t: ops.cross_entropy(logits, t), lambda t: ops.linear_cross_entropy(logits, columns, t)):
        assert [loss(leaf(np.zeros(shape), device)).shape for shape in ((2, 3), (6,))] == [(1,)] * 2
        for shape in ((3, 2), (6, 1), (1, 6)):  # as many, but of which rows?
            with pytest.raises(ShapeError, match=r"rows are \(2, 3, 4\), targets"):
                loss(leaf(np.zeros(shape), device))
    for f in (ops.mean, ops.summation, ops.max):
        with pytest.raises(ShapeError, match="names no axis"):
            f(x, {})
    assert ops.mean(x, (i for i in (1, 2))).shape == (1, 1)
    with pytest.raises(DTypeError, match=r"\[tuple_get_item\] value is of type Tensor"):
        ops.tuple_get_item(x, 0)
    for join in (ops.stack, ops.concatenate):
        with pytest.raises(ShapeError, match="no arrays"):
            join([], 0)
        with pytest.raises(DeviceError, match="different devices"):
            join([x, x.to(ndl.cpu() if device != ndl.cpu() else ndl.cpu_numpy())], 0)
        with pytest.raises(ShapeError, match="shapes"):
            join([x, x.reshape(1, 4, 1, 4)], 0)
    for seed, offset in ((-1, 0), (2**64, 0), (1, -1)):
        with pytest.raises(ValueError, match=r"\[dropout\] seed is"):
            ops.dropout(x, 0.5, seed, offset)
    assert ops.make_tuple(x, x * 2)[np.int64(-1)].numpy()[0, 0, 0, 0] == 2
    with pytest.raises(DTypeError, match="condition is of type numpy"):
        ops.where(np.ones(1), x, 0.0)
    with pytest.raises(DTypeError, match="complex"):
        x + np.array([1j])
    with pytest.raises(DeviceError, match="cross_entropy"):
        elsewhere = ndl.cpu() if device != ndl.cpu() else ndl.cpu_numpy()
        ops.cross_entropy(leaf(np.ones((2, 3)), device), leaf([0, 1], elsewhere))
    with pytest.raises(DTypeError, match=r"\[embedding\] needs floating arrays, got int32"):
        ops.embedding(leaf(np.ones((2, 3)), device, "int32", requires_grad=False), leaf([0], device))
    with pytest.raises(DTypeError, match=r"\[rotary\] cos is float64"):
        ops.rotary(x, *[array(np.ones((4, 0)), device, "float64")] * 2)
    with pytest.raises(DTypeError, match=r"\[rotary\] an array is of type Tensor"):
        ops.rotary(x, *[leaf(np.ones((4, 0)), device)] * 2)
    for takes_layout in (
        ops.attention,
        lambda q, _, __, mask: ops.sdd(q[0], q[0], mask),
        lambda q, _, __, mask: ops.dsd(q, q[0], mask),
    ):
        with pytest.raises(DTypeError, match=r"\] layout is of type Tensor \(accepted: a BlockLayout\)"):
            takes_layout(x, x, x, leaf(np.ones((1, 1)), device))
    for loss, inputs in ((ops.cross_entropy, 1), (ops.linear_cross_entropy, 2)):
        with pytest.raises(DTypeError, match="ignore_index is of type Tensor"):  # where torch has weights of classes
            loss(*[leaf(np.ones((2, 2)), device)] * inputs, leaf([0, 1], device), leaf(np.ones(2), device))
    with pytest.raises(ShapeError, match="chunk_bytes is 0"):
        ops.linear_cross_entropy(x, x, leaf([0, 1], device), chunk_bytes=0)
    with pytest.raises(DTypeError, match="out_grad is numpy"):
        (x * 2).backward(np.ones(x.shape))
    with pytest.raises(DeviceError, match="out_grad is on"):
        (x * 2).backward(leaf(np.ones(x.shape), ndl.cpu() if device != ndl.cpu() else ndl.cpu_numpy()))


def test_cells_take_states_of_one_shape(device):
    x, ones = leaf(np.ones((2, 5)), device), lambda *shape: leaf(np.ones(shape), device)
    lstm, rnn = nn.LSTMCell(5, 3, device=device), nn.RNNCell(5, 3, device=device)
    for cell, state in (
        (lstm, ones(2, 3)), (lstm, ones(4, 3)), (lstm, (ones(2, 3), ones(3))), (rnn, ones(3)), (rnn, ones(1, 2, 3)),
    ):  # fmt: skip
        with pytest.raises(ShapeError, match=r"Cell\] a state is .* \(accepted: \(2, 3\)\)"):
            cell(x, state)
    for cell in (lstm, rnn):
        for wrong in (ones(5), ones(2, 4)):
            with pytest.raises(ShapeError, match=r"Cell\] X is .* \(accepted: \(batch, 5\)\)"):
                cell(wrong)


def test_an_op_asked_for_its_gradient_by_another_shape_than_its_output(device):
    """Kernels take the sizes from what forward saved: they would read what lies behind the gradient."""
    x, row, small = (leaf(np.ones(shape), device) for shape in ((4, 5), 5, (2, 1)))
    for y, grad in ((ops.softmax(x), small), (ops.LayerNorm()(x, row, row), [small, None, None])):
        with pytest.raises(ShapeError, match=r"\] the gradient of the output is \(2, 1\) \(accepted: \(4, 5\), the output's\)"):
            y.op.gradient_as_tuple(grad, y)


def test_numbers_that_ops_and_clipping_cannot_use(device):
    x = leaf(np.ones((2, 2)), device)
    for make in (ops.dilate, ops.undilate):
        for wrong in (1.5, -1):
            with pytest.raises(ShapeError, match=rf"^\[{make.__name__}\] dilation is {wrong} \(accepted: a whole number"):
                make(x, (0,), wrong)
    for numbers in ((1.5, 0), (0, -1), (2**64, 0)):
        with pytest.raises(ValueError, match=r"\[dropout\] seed is .* \(accepted: whole numbers, 0 to 2\*\*64 - 1\)"):
            ops.dropout(x, 0.5, *numbers)
    assert np.array_equal(ops.dropout(x, 0, 1).numpy(), x.numpy())
    with pytest.raises(ValueError, match=r"\[dropout\] p is 1.5"):
        ops.dropout(x, 1.5, 1)
    for kind in (SGD, AdamW):
        optimizer = kind([x])
        x.grad = x.detach()
        for wrong in (-1.0, np.nan, "1"):
            with pytest.raises(ValueError, match=r"\[clip_grad_norm\] max_norm is .* \(accepted: a number of at least 0\)"):
                optimizer.clip_grad_norm(wrong)
        assert float(optimizer.clip_grad_norm(np.inf)) == 2 and (x.grad.numpy() == 1).all()


def test_linear_takes_one_matrix(device):
    """A batch of them, or a vector, went as far as backward, which failed."""
    for x, weight, bias in (((2, 3, 4), (2, 4, 5), 5), ((3, 4), 4, 3), ((3, 4), (4, 5), 1)):
        with pytest.raises(ShapeError, match=r"\[linear\] weight is .*, bias is .* \(accepted: \(in, out\), \(out,\)\)"):
            ops.linear(*(leaf(np.ones(shape), device) for shape in (x, weight, bias)))


def test_gradients_that_do_not_fit(device):
    class First(ndl.autograd.TensorOp):
        def compute(self, a):
            return a[:1]

        def gradient(self, out_grad, node):
            return out_grad

    class Third(ndl.autograd.TensorOp):
        def __init__(self, given):
            self.given = given

        def compute(self, a):
            return a * 2

        def gradient(self, out_grad, node):
            return self.given(out_grad)

    x = leaf([1, 2, 3], device)
    for y in (First()(x), First()(x * leaf([1, 2, 3], device))):  # whose gradient would make (3,) of (1,)
        with pytest.raises(GraphError, match=r"First.gradient gave one of shape \(1,\) for an input of shape \(3,\)"):
            y.backward()
    with pytest.raises(GraphError, match=r"First.gradient gave one of shape \(1,\) for an input of shape \(3,\)"):
        First()(ops.split(x.reshape((1, 3)), 0)[0]).backward()
    for given in (ndl.Tensor.realize_cached_data, ndl.Tensor.numpy):
        for y in (Third(given)(x), Third(given)(x * 2)):
            with pytest.raises(GraphError, match=r"Third.gradient gave a .*rray for an input of shape \(3,\)"):
                y.backward()
    with pytest.raises(DTypeError, match="cannot assign numpy"):
        x.grad = np.ones(3)
    for missing, make in (("First", ndl.autograd.TensorOp), ("Network", nn.Module)):
        with pytest.raises(NotImplementedError, match=rf"\[{missing}\] has no"):
            type(missing, (make,), {})()(x)
    for y in (x, x.detach()):
        with pytest.raises(DTypeError, match=r"\[Second\] compute gave a numpy"):
            type("Second", (ndl.autograd.TensorOp,), {"compute": lambda self, a: a.numpy()})()(y)


def test_no_grad_holds_for_its_thread_alone(device):
    x, inside, outside, seen = leaf([1, 2], device), threading.Event(), threading.Event(), []

    def evaluate():
        with ndl.no_grad():
            inside.set()
            outside.wait()
            seen.append((x * 2).requires_grad)

    thread = threading.Thread(target=evaluate)
    thread.start()
    inside.wait()
    y = x * 2
    with ndl.no_grad():
        outside.set()
        thread.join()
    assert y.requires_grad and (x * 2).requires_grad and seen == [False]
    y.sum().backward()
    again = ndl.no_grad()
    with again, again:
        pass
    assert ndl.autograd.is_grad_enabled()


# --- layers and optimizers ---


@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_a_parameter_that_has_grown_under_its_optimizer(device, kind):
    p = nn.Parameter(leaf(np.ones(4), device))
    optimizer = kind([p])
    (p * 2).sum().backward()
    optimizer.step()
    p.data = leaf(np.ones(4000), device)
    (p * 2).sum().backward()
    with pytest.raises(ShapeError, match="sizes differ"):
        optimizer.step()


@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
@pytest.mark.parametrize("shape", [(1,), (3,), (2, 1), (6,)])
def test_a_gradient_of_another_shape(device, kind, shape):
    p = nn.Parameter(leaf(np.ones((2, 3)), device))
    p.grad = leaf(np.ones(shape), device)
    with pytest.raises(ShapeError, match=r"\[optim\] a gradient is .*, its parameter is \(2, 3\)"):
        kind([p]).step()
    np.testing.assert_array_equal(p.numpy(), 1)


@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
def test_a_gradient_that_does_not_fit_leaves_all_parameters(device, kind):
    first, second = (nn.Parameter(leaf(np.ones(2), device)) for _ in range(2))
    first.grad, second.grad = leaf(np.ones(2), device), leaf(np.ones(3), device)
    optimizer = kind([first, second])
    with pytest.raises(ShapeError, match=r"a gradient is \(3,\)"):
        optimizer.step()
    np.testing.assert_array_equal(first.numpy(), 1)
    assert getattr(optimizer, "t", 0) == 0


@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
@pytest.mark.parametrize(
    ("dtype", "of_gradient"), [("bfloat16", "float32"), ("float32", "float16"), ("float16", "float64"), ("float64", "float32")]
)
def test_a_gradient_of_another_dtype(device, kind, dtype, of_gradient):
    p = nn.Parameter(leaf([1, 1], device, dtype))
    p.grad = leaf([0.5, -0.5], device, of_gradient)
    kind([p], lr=0.25, weight_decay=0.0).step()
    down, up = p.numpy()
    assert p.dtype == dtype and 1 - down == up - 1 > 0


@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
def test_floats_alone_are_updated(device, kind):
    p = leaf([1, 2], device, "int32")
    p.grad = leaf([1, 1], device)
    with pytest.raises(DTypeError, match="param is int32"):
        kind([p], lr=1.0).step()


def test_the_first_step_of_adam_is_its_learning_rate(device):
    """What float32 has of 1 - beta is as good as beta: else the first steps are off by some 1e-5."""
    p = nn.Parameter(leaf([0, 0], device))
    p.grad = leaf([2, -3], device)
    Adam([p], lr=1.0, eps=0.0).step()
    np.testing.assert_allclose(p.numpy(), [-1, 1], rtol=5e-7)


def test_momentum_adds_up_what_16_bits_would_lose(device):
    p = nn.Parameter(leaf([0], device, "bfloat16"))
    optimizer = SGD([p], lr=0.0, momentum=0.99)
    for value in (1.0, *[1 / 512] * 20):  # each less than half of what bfloat16 has at 1
        p.grad = leaf([value], device, "bfloat16")
        optimizer.step()
    wanted = 0.01 * 0.99**20 + (1 - 0.99**20) / 512
    np.testing.assert_allclose(optimizer.u[p].numpy(), [wanted], rtol=1e-5)


def test_a_shared_parameter_is_updated_once(device):
    layer = nn.Linear(2, 2, bias=False, device=device)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    assert model.parameters() == [layer.weight]
    before = layer.weight.numpy()
    layer.weight.grad = leaf(np.ones((2, 2)), device)
    SGD(model.parameters(), lr=0.5).step()
    np.testing.assert_allclose(layer.weight.numpy(), before - 0.5, rtol=1e-6)


def test_a_parameter_stays_one_when_it_is_written(device):
    p = nn.Parameter(leaf([1, 2], device))
    with pytest.raises(GraphError, match="Parameter is a leaf"):
        p[0] = 5.0
    with ndl.no_grad():
        p[0] = 5.0
    (p * 2).sum().backward()
    SGD([p], lr=1.0).step()
    np.testing.assert_array_equal(p.numpy(), [3, 0])
    layer = nn.Linear(2, 2, bias=False, device=device)
    before, weight = layer.weight.numpy(), layer.weight
    with ndl.no_grad():
        layer.weight -= 0.5
        layer.weight *= leaf([2, 4], device)
        layer.weight /= 2
        layer.weight += layer.weight
    assert layer.weight is weight and layer.parameters() == [weight]
    np.testing.assert_allclose(weight.numpy(), (before - 0.5) * [2, 4], rtol=1e-6)
    with pytest.raises(GraphError, match="Parameter is a leaf"):
        layer.weight += 1.0


def test_a_loaded_state_is_a_copy(device):
    one, other = (nn.Linear(2, 2, device=device) for _ in range(2))
    other.load_state_dict(dict(one.named_parameters()))
    before = other.weight.numpy()
    one.weight.realize_cached_data().fill(7.0)
    np.testing.assert_array_equal(other.weight.numpy(), before)
    other.load_state_dict({"weight": [[1, 2], [3, 4]], "bias": np.zeros((1, 2))})
    np.testing.assert_array_equal(other.weight.numpy(), [[1, 2], [3, 4]])


@pytest.mark.parametrize("wrong", [np.full(2, 1j), [1, None], np.array(["a", "b"]), [[1], [2, 3]], [1, 2, 3]], ids=str)
def test_a_state_that_does_not_fit_changes_nothing(device, wrong):
    norm = nn.LayerNorm(2, device=device)
    before = norm.state_dict()
    for name in before:
        with pytest.raises((CheckpointError, DTypeError, ShapeError)):
            norm.load_state_dict({**{key: [3, 4] for key in before}, name: wrong})
        assert all(np.array_equal(before[name], values) for name, values in norm.state_dict().items())


def test_what_is_computed_in_the_place_of_a_buffer_is_state(host):
    class Averaged(nn.Module):
        def __init__(self):
            self.weight, self.mean = nn.Parameter([2.0], device=host), nn.Buffer([0.0], device=host)

        def forward(self, x):
            self.mean *= 0.5
            self.mean = self.mean + x * self.weight

    model = Averaged()
    for _ in range(2):
        model(leaf([3.0], host))
    assert not model.mean.requires_grad
    assert {name: value.tolist() for name, value in model.state_dict().items()} == {"weight": [2], "mean": [9]}


def test_a_state_has_running_statistics(device):
    def network():
        return nn.Sequential(nn.Linear(3, 3, device=device), nn.Residual(nn.BatchNorm1d(3, device=device)))

    x, (one, other) = leaf(np.random.default_rng(0).standard_normal((8, 3)), device), (network(), network())
    one(x)
    assert [name for name, _ in one.named_parameters()] == [
        "modules.0.weight",
        "modules.0.bias",
        "modules.1.fn.weight",
        "modules.1.fn.bias",
    ]
    assert len(one.parameters()) == 4
    state = one.state_dict()
    assert set(state) - dict(one.named_parameters()).keys() == {"modules.1.fn.running_mean", "modules.1.fn.running_var"}
    other.load_state_dict(state)
    np.testing.assert_array_equal(other.eval()(x).numpy(), one.eval()(x).numpy())
    del state["modules.1.fn.running_var"]
    with pytest.raises(CheckpointError, match=r"missing \['modules.1.fn.running_var'\]"):
        other.load_state_dict(state)


def test_a_module_moves_to_a_device(device):
    start = usable("cpu_numpy") if device.name == "cpu" else usable("cpu")
    layer = nn.Linear(3, 3, device=start)
    network = nn.Sequential(layer, nn.BatchNorm1d(3, device=start), nn.Residual(layer))
    x = np.random.default_rng(0).standard_normal((8, 3))
    network(leaf(x, start)).sum().backward()
    late = network(leaf(x, start)).sum()
    parameters, gradient, state = network.parameters(), layer.weight.grad.numpy(), network.state_dict()
    before = memory.stats(device).by_category
    assert network.to(device) is network and network.to(device.name) is network
    assert [*map(id, network.parameters())] == [*map(id, parameters)] and isinstance(network.modules[1].running_mean, nn.Buffer)
    assert {t.device for t in [*parameters, network.modules[1].running_var, layer.weight.grad]} == {device}
    np.testing.assert_array_equal(layer.weight.grad.numpy(), gradient)
    assert all(np.array_equal(values, state[name]) for name, values in network.state_dict().items())
    now = memory.stats(device).by_category
    floats = 9 + 3 + 3 + 3  # weight and bias of the layer, of the norm
    assert now["parameter"] - before["parameter"] == now["gradient"] - before["gradient"] == 4 * floats
    AdamW(network.parameters()).step()
    network(leaf(x, device)).sum().backward()
    with pytest.raises(DeviceError, match="unknown device: 'gpu'"):
        network.to("gpu")
    with pytest.raises(DeviceError, match="different devices"):
        late.backward()


def test_a_module_that_finds_no_room_stays_where_it_is(cpu):
    network = nn.Sequential(nn.Linear(100, 100, device=usable("cpu_numpy")), nn.Linear(100, 100, device=usable("cpu_numpy")))
    memory.set_limit(memory.stats(cpu).live + 60_000, cpu)
    try:
        with pytest.raises(OutOfMemoryError):
            network.to(cpu)
    finally:
        memory.set_limit(None, cpu)
    assert {p.device.name for p in network.parameters()} == {"cpu_numpy"}


@pytest.mark.parametrize("spread, weight_dtype", [(30, "float16"), (1000, "float16"), (1000, "float32")])
def test_batch_norm_of_sums_and_squares_beyond_float16(device, spread, weight_dtype):
    x = 2 + spread * np.random.default_rng(0).standard_normal((3000, 25))
    norm = nn.BatchNorm1d(25, device=device, dtype=weight_dtype)
    y = norm(leaf(x, device, "float16"))
    assert y.dtype == weight_dtype
    np.testing.assert_allclose(y.numpy(), (x - x.mean(axis=0)) / x.std(axis=0), rtol=0.01, atol=0.01)
    np.testing.assert_allclose(norm.running_var.numpy(), 0.9 + 0.1 * x.var(axis=0), rtol=0.01)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_softmax_loss_of_16_bits_is_cross_entropy(device, dtype):
    scores, classes = np.full((3000, 3), [30, 0, -10]), leaf(np.full(3000, 1), device, requires_grad=False)
    found = []
    for loss_of in (nn.SoftmaxLoss(), ops.cross_entropy):
        x = leaf(scores, device, dtype)
        loss = loss_of(x, classes)
        loss.backward()
        assert loss.dtype == "float32"
        np.testing.assert_allclose(loss.numpy(), [30], rtol=1e-5)
        found.append(x.grad.numpy().astype("float32"))
    np.testing.assert_allclose(*found, rtol=0.01, atol=1e-7)


def test_a_parameter_of_two_names(device):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.out = nn.Embedding(5, 3, device=device), [nn.Linear(3, 5, bias=False, device=device)]
            self.out[0].weight = self.embedding.weight

    model, other = Tied(), Tied()
    assert [name for name, _ in model.named_parameters()] == ["embedding.weight"]
    assert list(model.state_dict()) == ["embedding.weight", "out.0.weight"]
    other.load_state_dict(model.state_dict())
    np.testing.assert_array_equal(other.out[0].weight.numpy(), model.embedding.weight.numpy())
    assert other.out[0].weight is other.embedding.weight


def test_what_an_optimizer_takes(device):
    p, q = (nn.Parameter(leaf([1, 2], device)) for _ in range(2))
    for kind in (SGD, Adam, AdamW):
        with pytest.raises(ValueError, match=r"shape \(2,\) is there twice"):
            kind([p, q, p])
        for wrong in (p, {"weight": p}, None, [p, "weight"], [("weight", p)], [np.ones(2)], [p, {"params": [q]}]):
            with pytest.raises(TypeError, match=r"\[optim\] params"):
                kind(wrong)
        for wrong in ({"lr": 0.1}, {"params": [q], "betas": (0.5, 0.5)}, q):
            with pytest.raises(ValueError, match=rf"\[{kind.__name__}\] a group"):
                kind([{"params": [p]}, wrong])
        with pytest.raises(ValueError, match="twice"):
            kind([{"params": [p]}, {"params": [q, p], "lr": 0.1}])


@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
def test_groups_of_parameters(kind, device):
    """Each as an optimizer of its own would have it; lr and weight_decay are the first group's, and set those of all."""
    (p, q), (a, b) = ([nn.Parameter(leaf([1.0, -2.0], device)) for _ in range(2)] for _ in range(2))
    one = kind([{"params": [p], "lr": 0.5}, {"params": [q], "weight_decay": 0.25}], lr=0.125, weight_decay=0.0)
    two = [kind([a], lr=0.5, weight_decay=0.0), kind([b], lr=0.125, weight_decay=0.25)]
    for step in range(3):
        for x in (p, q, a, b):
            x.grad = leaf([0.5, step], device)
        one.step()
        for each in two:
            each.step()
    assert p.numpy().tolist() == a.numpy().tolist() != q.numpy().tolist() == b.numpy().tolist()
    assert (one.lr, one.weight_decay) == (0.5, 0.0)
    one.lr, one.weight_decay = 0.0, 0.0
    assert [(g["lr"], g["weight_decay"]) for g in one.param_groups] == [(0, 0)] * 2
    one.step()
    assert p.numpy().tolist() == a.numpy().tolist() and q.numpy().tolist() == b.numpy().tolist()
    for wrong in (None, "0.1"):
        with pytest.raises(TypeError, match=rf"\[{kind.__name__}\] lr is of type"):
            one.lr = wrong
    one = kind([p])
    one.params.append(q)
    assert one.param_groups[0]["params"] == [p, q]


@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
def test_an_optimizer_without_parameters_or_with_wrong_numbers(kind):
    for nothing in ([], iter(()), [{"params": []}]):
        with pytest.raises(ValueError, match="no parameters"):
            kind(nothing)
    p = nn.Parameter([1.0])
    names = {SGD: ("lr", "momentum", "weight_decay"), Adam: ("lr", "beta1", "beta2", "eps"), AdamW: ("lr", "eps", "weight_decay")}
    for name in names[kind]:
        for wrong in (-0.1, float("nan"), float("inf")):
            with pytest.raises(ValueError, match=rf"\[{kind.__name__}\] {name} is .*accepted: 0 or more, "):
                kind([p], **{name: wrong})
        with pytest.raises(TypeError, match=f"{name} is of type str"):
            kind([p], **{name: "0.1"})
        kind([p], **{name: 0})
    if kind is not SGD:
        with pytest.raises(ValueError, match=r"beta2 is 1.0 .*below 1"):
            kind([p], **({"beta2": 1.0} if kind is Adam else {"betas": (0.9, 1.0)}))
    for betas in ((0.9,), (0.9, 0.95, 0.99), 0.9) if kind is AdamW else ():
        with pytest.raises(ValueError, match=r"betas is .*accepted: two numbers"):
            AdamW([p], betas=betas)


def test_layers_are_of_the_dtype_and_on_the_device_asked_for(host):
    layout = BlockLayout(np.ones((1, 1)), 16)
    for kind, *sizes in (
        (nn.Linear, 2, 3), (nn.Conv, 2, 3, 3), (nn.Embedding, 2, 3), (nn.BatchNorm1d, 2), (nn.BatchNorm2d, 2), (nn.LayerNorm, 2),
        (nn.RNN, 2, 3), (nn.LSTM, 2, 3), (nn.Transformer, 4, 4, 1), (nn.BlockSparseLinear, 16, 16, layout),
    ):  # fmt: skip
        layer = kind(*sizes, device=host, dtype="float64")
        assert {p.device for p in layer.parameters()} == {host}
        assert {str(values.dtype) for values in layer.state_dict().values()} == {"float64"}
        layer.load_state_dict({name: values.tolist() for name, values in layer.state_dict().items()})
        assert {p.dtype for p in layer.parameters()} == {"float64"}


def test_sequences_without_a_batch():
    x = ndl.ones(5, 8)
    for module in (nn.AttentionLayer(8, 2, 4), nn.TransformerLayer(8, 2, 4, 8), nn.Transformer(8, 8, 1, num_head=2, dim_head=4)):
        with pytest.raises(ShapeError, match=rf"\[{type(module).__name__}\] x is \(5, 8\)"):
            module(x)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"kernel_size": k} for k in ((3, 5), 0, (), 2.5, "3")),
        {"kernel_size": 3, "stride": (1, 2)},
        {"kernel_size": 3, "padding": -1},
    ],
    ids=str,
)
def test_kernels_and_strides_of_a_convolution(wrong):
    with pytest.raises(ShapeError, match=r"\[Conv\] (kernel_size|stride|padding) is"):
        nn.Conv(2, 3, **wrong)
    assert nn.Conv(2, 3, (3, 3), [2, 2]).stride == 2


def test_the_padding_of_a_convolution(device):
    x = leaf(np.random.default_rng(0).standard_normal((2, 3, 6, 5)), device)
    same = nn.Conv(3, 4, 3, device=device)
    for padding in (0, 2, (2, 2)):
        other = nn.Conv(3, 4, 3, device=device, padding=padding)
        other.load_state_dict(same.state_dict())
        cut = 1 - other.padding
        inner, outer = (same(x), other(x)) if cut > 0 else (other(x), same(x))
        cut = abs(cut)
        np.testing.assert_allclose(inner.numpy()[:, :, cut:-cut, cut:-cut], outer.numpy(), rtol=1e-5, atol=1e-6)


def test_a_sequential_is_a_sequence():
    one, two, three = nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)
    model = nn.Sequential(one, two, three)
    assert list(model) == [one, two, three] and len(model) == 3 and model[-1] is three
    assert isinstance(model[:2], nn.Sequential) and list(model[:2]) == [one, two] and model[:2].parameters() == one.parameters()
    assert nn.Sequential() and not len(nn.Sequential())
    with pytest.raises(IndexError):
        model[3]


def test_dropout_of_everything(device):
    np.testing.assert_array_equal(nn.Dropout(1.0)(leaf([1, 2], device)).numpy(), [0, 0])
    for layer, more in ((nn.Dropout, {}), (nn.SeededDropout, {"seed": 1})):
        for p in (-0.1, 1.5):
            with pytest.raises(ValueError, match=rf"^\[{layer.__name__}\] p is .* \(accepted: 0 to 1\)"):
                layer(p, **more)


def test_shapes_of_sequences_and_images(device):
    X = np.ones((5, 2, 3))
    for layer, wrap in ((nn.RNN, lambda h: h), (nn.LSTM, lambda h: (h, h))):
        model = layer(3, 4, num_layers=2, device=device)
        for x, h in ((X[0], None), (X[..., :2], None), (X, (1, 2, 4)), (X, (2, 1, 4)), (X, (3, 2, 4)), (X, (2, 2, 3))):
            with pytest.raises(ShapeError, match=layer.__name__):
                model(leaf(x, device), None if h is None else wrap(leaf(np.ones(h), device)))
        model(leaf(X, device), wrap(leaf(np.ones((2, 2, 4)), device)))
        with pytest.raises(ShapeError, match="num_layers is 0"):
            layer(3, 4, num_layers=0)
    with pytest.raises(ShapeError, match="batch_norm"):
        nn.BatchNorm2d(2, device=device)(leaf(np.ones((1, 2, 3)), device))
    for shapes in ((2, 1), (1, 2)):
        with pytest.raises(ShapeError, match="batch_norm"):
            ops.batch_norm(leaf(np.ones((3, 2)), device), *[leaf(np.ones(n), device) for n in shapes])
    norm = nn.BatchNorm1d(2, device=device)
    with pytest.raises(ShapeError, match="N at least 1"):
        norm(leaf(np.ones((0, 2)), device))
    assert np.array_equal(norm.running_mean.numpy(), [0, 0])
    for shape in ((2, 5, 5), (1, 3, 5, 5)):
        with pytest.raises(ShapeError, match=r"\[Conv\] x is"):
            nn.Conv(2, 3, 3, device=device)(leaf(np.ones(shape), device))
    with pytest.raises(ShapeError, match=r"5 positions \(accepted: at most sequence_len, 4"):
        nn.Transformer(4, 4, 1, num_head=1, dim_head=4, sequence_len=4, device=device)(leaf(np.ones((5, 1, 4)), device))


def test_labels_that_do_not_fit_the_logits(device):
    logits = leaf(np.ones((3, 3)), device)
    for labels in (0, [0], [[0], [1], [2]], [0, 1]):
        with pytest.raises(ShapeError, match="SoftmaxLoss"):
            nn.SoftmaxLoss()(logits, leaf(labels, device))


# --- data ---


class Pairs(data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return np.arange(12.0).reshape(6, 2)[index]


def test_a_loader_is_its_own_iterator():
    """As the course has it. The order is drawn when a pass begins."""
    mixed = data.NDArrayDataset(np.arange(3), [4, 5, 6], ndl.Tensor([7, 8, 9]))
    assert [[part.numpy().tolist() for part in batch] for batch in data.DataLoader(mixed, 2)] == [
        [[0, 1], [4, 5], [7, 8]],
        [[2], [6], [9]],
    ]
    loader = data.DataLoader(data.NDArrayDataset(np.arange(5)), 2, shuffle=True)
    np.random.seed(0)
    assert iter(loader) is loader
    np.random.rand(7)
    found = np.concatenate([next(loader)[0].numpy() for _ in range(3)])
    np.random.seed(0)
    assert found.tolist() == np.random.permutation(5).tolist()
    with pytest.raises(StopIteration):
        next(loader)


def test_what_a_loader_takes():
    assert [x.shape for (x,) in data.DataLoader(Pairs(), 4)] == [(4, 2), (2, 2)]  # of one part, not of four
    empty = data.DataLoader(data.NDArrayDataset(np.zeros((0, 3))), 4)
    assert len(empty) == 0 and list(empty) == []
    for wrong in (-1, 2.5, "a"):
        with pytest.raises(ValueError, match=r"\[DataLoader\] batch_size"):
            data.DataLoader(Pairs(), wrong)
    for arrays in ((np.ones(3), np.ones(5)), ()):
        with pytest.raises(DataError, match="NDArrayDataset"):
            data.NDArrayDataset(*arrays)


class Touch:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return type(self.path).touch, (self.path,)


def test_files_that_are_no_cifar_10(tmp_path):
    image, path = np.zeros((2, 3072), np.uint8), tmp_path / "test_batch"
    for content in (
        b"garbage", b"", [1, 2], {b"data": image}, {b"data": image[:, :9], b"labels": [0, 1]}, {b"data": image, b"labels": [0]},
        Touch(tmp_path / "touched"),
    ):  # fmt: skip
        path.write_bytes(content if isinstance(content, bytes) else pickle.dumps(content, protocol=2))
        with pytest.raises(DataError, match=r"\[cifar10\] cannot read"):
            data.CIFAR10Dataset(str(tmp_path), train=False)
    assert not (tmp_path / "touched").exists()


def test_files_that_are_no_mnist_or_text(tmp_path):
    def files(side, count, damage=lambda content: content):
        images = gzip.compress(struct.pack(">IIII", 2051, count, side, side) + bytes(count * side * side))
        (tmp_path / "x.gz").write_bytes(damage(images))
        (tmp_path / "y.gz").write_bytes(gzip.compress(struct.pack(">II", 2049, count) + bytes(count)))
        return str(tmp_path / "x.gz"), str(tmp_path / "y.gz")

    assert len(data.MNISTDataset(*files(28, 4))) == 4
    for names in (files(14, 4), files(28, 4, lambda content: content[:12] + b"\xff" * 8 + content[20:])):
        with pytest.raises(DataError, match=r"\[mnist\]"):
            data.MNISTDataset(*names)
    (tmp_path / "train.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"\[ptb\] cannot read"):
        data.Corpus(str(tmp_path))
