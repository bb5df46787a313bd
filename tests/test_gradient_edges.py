"""What lies at the edges of ops and their gradients, on every device: infinite slopes, empty products, arguments that are none."""

import contextlib
import re
import threading

import numpy as np
import pytest

import needle as ndl
from making import array, gradients, leaf
from needle import nn, ops
from needle.backend_ndarray import kernels
from needle.backend_ndarray.block_layout import BlockLayout, dense_layout
from needle.errors import DeviceError, DTypeError, GraphError, ShapeError
from needle.optim import SGD, AdamW


def test_slopes_of_powers_at_0(device):
    base, exponent = gradients(lambda a, b: a**b, device, [0, 0, 2, 0, 0], [2, 0, 0, 1, 0.5])
    np.testing.assert_array_equal(base, [0, 0, 0, 1, np.inf])
    np.testing.assert_allclose(exponent, [0, 0, np.log(2), 0, 0], rtol=1e-6)
    np.testing.assert_array_equal((2 ** leaf([np.inf, -np.inf, 1], device)).numpy(), [np.inf, 0, 2])
    np.testing.assert_allclose(gradients(lambda x: 2**x, device, [3, -np.inf])[0], [8 * np.log(2), 0], rtol=1e-6)
    np.testing.assert_array_equal(gradients(lambda x: 0**x, device, [2, 0])[0], [0, 0])
    np.testing.assert_array_equal(gradients(lambda x: x**0, device, [2, 0])[0], [0, 0])
    np.testing.assert_array_equal(gradients(ops.absolute, device, [2, 0, -2])[0], [1, 0, -1])
    np.testing.assert_array_equal(gradients(abs, device, [2, 0, -2])[0], [1, 0, -1])
    base, exponent = gradients(lambda a, b: a**b, device, [np.nan, np.inf, 3], [0, 0, 0])
    np.testing.assert_array_equal(base, 0)
    tiny = ndl.Tensor([2, 6e-8], device=device, dtype="float16")  # its -1st power is infinite, too
    for dtype in ("float16", "uint8"):
        (tiny ** ndl.Tensor([0, 0], device=device, dtype=dtype)).backward()
        np.testing.assert_array_equal(tiny.grad.numpy(), [0, 0])


@pytest.mark.parametrize("op", [ops.tanh, ops.sigmoid, ops.silu, lambda x: ops.gelu(x, "tanh"), ops.gelu])
def test_differentiable_gradients_far_out(device, op):
    values = np.array([-200, -60, -12, 0, 12, 60, 200])
    (plain,), (with_graph,) = gradients(op, device, values), gradients(op, device, values, create_graph=True)
    np.testing.assert_allclose(with_graph, plain, rtol=1e-5, atol=1e-6)
    x = leaf(values, device)
    op(x).backward(create_graph=True)
    x.grad.backward()
    assert np.isfinite(x.grad.numpy()).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "op, shapes",
    [
        (ops.softmax, [(8, 64)]),
        (ops.attention, [(1, 2, 24, 16)] * 3),
        (ops.rnn, [(5, 3, 4), (3, 6), (4, 6), (6, 6)]),
        (lambda *inputs: ops.lstm(*inputs)[0], [(5, 3, 4), (3, 6), (3, 6), (4, 24), (6, 24)]),
    ],
    ids=["softmax", "attention", "rnn", "lstm"],
)
def test_differentiable_gradients_of_16_bits_are_rounded_once(device, op, shapes, dtype):
    """They come of several ops, in float32 as in the kernels that are one."""
    rng = np.random.default_rng(0)
    values = [leaf(3 * rng.standard_normal(shape), device, dtype).numpy().astype("float32") for shape in shapes]
    found = []
    for of in (dtype, "float32"):
        inputs = [leaf(x, device, of) for x in values]
        y = op(*inputs)
        y.backward(leaf(np.random.default_rng(1).choice([-1, 1, 2], y.shape), device, y.dtype), create_graph=True)
        found.append([x.grad.numpy().astype("float32") for x in inputs])
    bits = 11 if dtype == "float16" else 8
    for got, exact in zip(*found):
        np.testing.assert_allclose(got, exact, rtol=2.0**-bits, atol=2.0**-bits * np.abs(exact).max())


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


def test_slopes_of_quotients_whose_gradient_over_the_divisor_is_outside_the_dtype(device):
    a, b = leaf([0, 1e-6], device, "float16"), leaf([0.01, 1e-5], device, "float16")
    (a / b).backward(leaf([1024, 1], device, "float16"))
    np.testing.assert_allclose(b.grad.numpy(), [0, -a.numpy()[1] / np.float64(b.numpy()[1]) ** 2], rtol=2e-2)


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


@pytest.mark.parametrize("create_graph", [False, True])
def test_nan_lets_gradients_through(device, create_graph):
    """Or a layer below one that gives NaN would train on as if nothing were wrong."""
    (slope,) = gradients(ops.relu, device, [np.nan, 1, 0, -1], create_graph=create_graph)
    np.testing.assert_array_equal(slope, [1, 1, 0, 0])
    for op, of_a, of_b in (
        (ops.maximum, [1, 1, 0.5, 1, 0], [1, 1, 0.5, 0, 1]),
        (ops.minimum, [1, 1, 0.5, 0, 1], [1, 1, 0.5, 1, 0]),
    ):
        slopes = gradients(op, device, [np.nan, 0, 1, 2, 1], [0, np.nan, 1, 1, 2], create_graph=create_graph)
        np.testing.assert_array_equal(slopes, [of_a, of_b])
    x = leaf([1, 2], device)
    ops.relu(x).backward(leaf([np.nan, 1], device))
    np.testing.assert_array_equal(x.grad.numpy(), [np.nan, 1])


def test_more_equal_maxima_than_float16_counts_to_share_the_gradient(device):
    """A channel in which ReLU left nothing, of 256 x 256: it got none at all."""
    x = leaf(np.zeros((1, 1 << 16)), device, "float16")
    ops.max(x, 1).backward()
    np.testing.assert_array_equal(x.grad.numpy(), 2.0**-16)
    whole = leaf([[1, 3, 3], [2, 0, 1]], device, "int32")
    ops.max(whole, 1).backward()
    np.testing.assert_array_equal(whole.grad.numpy(), [[0, 0.5, 0.5], [1, 0, 0]])


def test_large_logits_keep_their_digits(device):
    """Near 10,000 float32 has steps of 0.001: the log-sum-exp itself is rounded to one."""
    x = (np.random.default_rng(0).standard_normal((3, 40)) + 1e4).astype(np.float32)
    wanted = x - np.float64(x.max(axis=1, keepdims=True))
    wanted -= np.log(np.exp(wanted).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(ops.logsoftmax(leaf(x, device)).numpy(), wanted, rtol=1e-6)
    targets, hidden = leaf([1, 2, 3], device, "int64"), leaf(np.eye(3), device)
    slope = (np.exp(wanted) - np.eye(40)[[1, 2, 3]]) / 3
    for f in (lambda logits: ops.cross_entropy(logits, targets), lambda logits: ops.linear_cross_entropy(hidden, logits, targets)):
        for create_graph in (False, True):
            logits = leaf(x, device)
            loss = f(logits)
            loss.backward(create_graph=create_graph)
            np.testing.assert_allclose(loss.item(), -wanted[np.arange(3), [1, 2, 3]].mean(), rtol=1e-6)
            np.testing.assert_allclose(logits.grad.numpy(), slope, rtol=1e-6, atol=1e-8)
    p = np.exp(wanted[0])
    for create_graph in (False, True):
        (dx,) = gradients(lambda x: ops.softmax(x)[0, 3], device, x[:1], create_graph=create_graph)
        np.testing.assert_allclose(dx[0], p[3] * (np.eye(40)[3] - p), rtol=1e-5)


@pytest.mark.parametrize("dtype, values", [("bfloat16", [1, 256, 1, 1, -256, 1]), ("float16", [250, 150, 250, 150, -20000, 55000])])
def test_a_linear_layers_sum_of_16_bits_is_rounded_once(device, dtype, values):
    """Its bias included: the product alone would be rounded to 256, or be infinite."""
    x0, w0, x1, w1, bias, wanted = values
    for b in ([bias], [[bias]]):
        layer = [leaf(v, device, dtype) for v in ([[x0, x1]], [[w0], [w1]], b)]
        assert ops.linear(*layer).item() == np.float16(wanted)
        assert ops.linear(leaf([x0, x1], device, dtype), *layer[1:]).item() == np.float16(wanted)


def test_gelu_by_tanh_keeps_its_digits_below_0(device):
    x = np.float64(np.float32([-4.82421875, -3, 0.5, 6]))
    u = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    share, slope = 1 / (1 + np.exp(-2 * u)), 2 * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x * x)
    np.testing.assert_allclose(ops.gelu(leaf(x, device), "tanh").numpy(), x * share, rtol=3e-6)
    (dx,) = gradients(lambda x: ops.gelu(x, "tanh"), device, x)
    np.testing.assert_allclose(dx, share + x * share * (1 - share) * slope, rtol=3e-6)


def test_sums_of_equal_numbers(device):
    """Each addition of 0.1 to a sum of 64 in float32 is rounded in the same direction."""
    exact = float(np.float32(0.1))
    for shape, axis in (((1 << 14,), 0), ((3, 1 << 13), 1), ((1 << 13, 5), 0), ((1 << 12, 130), 0)):
        sums = leaf(np.full(shape, 0.1), device).sum(axis).numpy()
        np.testing.assert_allclose(sums, exact * shape[axis], rtol=2.5e-7)


@pytest.mark.parametrize("norm", [ops.layer_norm, lambda *args: ops.batch_norm(*args)[0]])
def test_sums_over_rows_in_the_gradients_of_norms(host, norm):
    x = leaf(np.random.default_rng(0).standard_normal((1 << 13, 3)), host)
    weight, bias = leaf(np.ones(3), host), leaf(np.zeros(3), host)
    norm(x, weight, bias).backward(leaf(np.full(x.shape, 0.1), host))
    np.testing.assert_allclose(bias.grad.numpy(), float(np.float32(0.1)) * len(x.numpy()), rtol=1e-6)


def test_logsumexp_where_all_is_minus_infinity(device):
    x = [[-np.inf, -np.inf], [0, -np.inf]]
    for create_graph in (False, True):
        slopes = gradients(lambda x: ops.logsumexp(x, axes=(1,)), device, x, create_graph=create_graph)[0]
        np.testing.assert_array_equal(slopes, [[0, 0], [1, 0]])
    empty = ops.logsumexp(leaf(np.zeros((2, 0, 3)), device), axes=(1, 2))
    np.testing.assert_array_equal(empty.numpy(), [-np.inf, -np.inf])


def test_gradients_with_a_graph_of_rows_that_do_not_count(device):
    targets, x, w = leaf([1, -100, 0], device), np.arange(6.0).reshape(3, 2), np.arange(8.0).reshape(2, 4)
    for loss, values in (
        (lambda x: ops.cross_entropy(x, targets), [x]),
        (lambda x, w: ops.linear_cross_entropy(x, w, targets), [x, w]),
    ):
        for plain, with_graph in zip(gradients(loss, device, *values), gradients(loss, device, *values, create_graph=True)):
            np.testing.assert_allclose(with_graph, plain, rtol=1e-5, atol=1e-6)


def test_gradients_with_a_graph_have_the_same_eps(device):
    values = [np.random.default_rng(0).standard_normal(shape) for shape in ((5, 4), 4, 4)]
    for norm in (lambda x, w, b: ops.layer_norm(x, w, b, 0.5) ** 2, lambda x, w, b: ops.batch_norm(x, w, b, 0.5)[0] ** 2):
        for plain, with_graph in zip(gradients(norm, device, *values), gradients(norm, device, *values, create_graph=True)):
            np.testing.assert_allclose(with_graph, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "dtypes", [("float32", "float32"), ("float16", "float32"), ("float32", "bfloat16"), ("float16", "float16")]
)
def test_gradients_of_batch_norms_statistics_alone(device, dtypes):
    values = np.random.default_rng(0).standard_normal((7, 3)).astype("float32")
    weight, bias = (leaf(np.ones(3), device, dtypes[1]) for _ in range(2))
    deviations = values - values.mean(0)
    for item, expected in ((1, np.full((7, 3), 1 / 7)), (2, deviations * 2 / 7)):
        x = leaf(values, device, dtypes[0])
        ops.batch_norm(x, weight, bias)[item].sum().backward()
        assert (x.grad.dtype, weight.grad.dtype, bias.grad.dtype) == (dtypes[0], dtypes[1], dtypes[1])
        np.testing.assert_allclose(x.grad.numpy().astype("float32"), expected, rtol=2e-3, atol=2e-3)
        np.testing.assert_array_equal(weight.grad.numpy().astype("float32"), np.zeros(3))


def test_batch_norm_of_two_dtypes_is_that_of_the_wider(device):
    found = []
    for dtypes in (("float16", "float32"), ("float32", "float32")):
        x = leaf(np.arange(12.0).reshape(4, 3) / 8, device, dtypes[0])
        weight, bias = leaf([1.0, -2.0, 0.5], device, dtypes[1]), leaf([0.0, 1.0, 2.0], device, dtypes[1])
        y = ops.batch_norm(x, weight, bias)[0]
        (y * y).sum().backward()
        assert y.dtype == "float32"
        found.append([a.numpy() for a in (y, weight.grad, bias.grad)])
    for mixed, plain in zip(*found):
        np.testing.assert_array_equal(mixed, plain)


def test_the_eps_of_norms_that_are_given_none(device):
    one = leaf([1.0], device)
    x = np.array([[1e-3], [-1e-3]])
    for y in (
        ops.batch_norm(leaf(x, device), one, one * 0)[0],
        ops.layer_norm(leaf(x.T, device), leaf([1.0, 1.0], device), leaf([0.0, 0.0], device)),
    ):
        np.testing.assert_allclose(y.numpy().ravel(), x.ravel() / np.sqrt(1e-6 + 1e-5), rtol=1e-5)


def test_a_part_of_qkv_that_nothing_uses_has_no_gradient(device):
    x, tables = leaf(np.ones((1, 5, 2, 3, 4)), device), [array(np.ones((5, 2)), device)] * 2
    for used in range(3):
        array(np.full(x.shape, np.nan), device)  # in the memory that the gradient gets
        ops.rotary_qkv(x, *tables)[used].backward()
        found = x.grad.numpy() != 0
        assert [found[:, :, :, i].any() for i in range(3)] == [i == used for i in range(3)]


def test_a_loss_without_a_graph_makes_no_gradients(host):
    hidden, weight, targets = leaf(np.ones((4, 64)), host), leaf(np.ones((64, 1000)), host), leaf([0, 1, 2, 3], host)
    for inputs, enabled in (((hidden, weight), False), ((hidden.detach(), weight.detach()), True)):
        live = host.memory_stats()["live"]
        host.reset_peak()
        with contextlib.nullcontext() if enabled else ndl.no_grad():
            ops.linear_cross_entropy(*inputs, targets)
        assert host.memory_stats()["peak"] - live < 64_000  # a gradient of the weight takes 256,000


def test_gradients_of_a_loss_of_no_rows(device):
    weight = np.ones((3, 500))
    for _ in range(2):
        array(np.full(weight.shape, np.nan), device)  # in the memory that the gradient gets
        found = gradients(lambda x, w: ops.linear_cross_entropy(x, w, leaf(np.zeros(0), device)), device, np.ones((0, 3)), weight)
        assert found[0].shape == (0, 3) and not found[1].any()


def test_gradients_of_axes_that_count_from_the_end(device):
    x, y, slopes = np.ones((2, 3)), np.ones((2, 1)), leaf(np.arange(8.0).reshape(2, 4), device)
    turned = lambda x, y: ops.permute(ops.concatenate((x, y), -1), (-1, 0)) * ops.transpose(slopes)  # noqa: E731
    for found, wanted in zip(gradients(turned, device, x, y), np.split(slopes.numpy(), [3], axis=1)):
        np.testing.assert_array_equal(found, wanted)
    for axes in ((0, 1, 0), (0,)):
        with pytest.raises(ShapeError, match=r"\[transpose\] swaps exactly two axes"):
            ops.transpose(slopes, axes)


def test_a_bias_that_is_a_part_of_another(device):
    bias = leaf([[1, 2, 3, 4]], device)
    y = ops.linear(leaf(np.ones((3, 2)), device), leaf(np.zeros((2, 2)), device), bias[:, ::2])
    np.testing.assert_array_equal(y.numpy(), [[1, 3]] * 3)
    y.backward()
    np.testing.assert_array_equal(bias.grad.numpy(), [[3, 0, 3, 0]])


def test_a_value_written_where_no_gradient_is_wanted_has_one(device):
    a, value = leaf(np.zeros(3), device, requires_grad=False), leaf([2], device)
    a[1:2] = value * 3
    (a * 5).sum().backward()
    np.testing.assert_array_equal(value.grad.numpy(), [15])


def test_a_number_beside_the_other_part_of_where(device):
    condition = leaf([1, 0], device)
    whole, fine = leaf([5, 6], device, "int32", requires_grad=False), leaf([5, 6], device, "float64")
    assert ops.where(condition, whole, 2).dtype == ops.where(condition, 2, whole).dtype == "int32"
    np.testing.assert_array_equal(ops.where(condition, fine, 0.1).numpy(), [5, 0.1])


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


@pytest.mark.parametrize("most", [1, 700, 3000])
@pytest.mark.parametrize("padding, stride, size", [(0, 1, (3, 2)), (1, 1, (3, 2)), (2, 3, (3, 2)), (0, 1, (1, 1))])
def test_a_convolution_of_images_that_are_copied_some_at_a_time(device, monkeypatch, most, padding, stride, size):
    values = [np.random.default_rng(0).integers(-4, 5, shape) for shape in ((5, 2, 7, 6), (*size, 2, 3))]  # whose sums are exact

    def results(copied):
        image, kernel = (leaf(v, device) for v in values)
        channels_last = image.permute((0, 2, 3, 1))  # a view
        out = ops.conv(channels_last if copied else channels_last + 0, kernel, stride, padding)
        (out * out).sum().backward()
        return [x.numpy() for x in (out, image.grad, kernel.grad)]

    whole = results(copied=False)
    monkeypatch.setattr(kernels, "IMAGE_BYTES", most)
    for a, b in zip(results(copied=True), whole):
        np.testing.assert_array_equal(a, b)


def test_the_gradient_of_a_kernel_adds_up_what_16_bits_would_lose(device, monkeypatch):
    monkeypatch.setattr(kernels, "IMAGE_BYTES", 1)  # the sum of 600 images
    kernel, image = leaf(np.ones((1, 2, 1, 1)), device, "bfloat16"), leaf(np.ones((600, 2, 1, 2)), device, "bfloat16")
    ops.conv(image.permute((0, 2, 3, 1))[:, :, :, :1], kernel, padding=0).backward()
    np.testing.assert_array_equal(kernel.grad.numpy(), 600)


@pytest.mark.parametrize("size", [1, 3])
def test_the_gradient_of_a_kernel_of_integers(device, size):
    values = np.arange(96).reshape(2, 4, 4, 3)
    image, dy = (array(v, device, "int32") for v in (values, values[..., :2]))
    axis = (4, size, 1, size // 2, 4)
    found = kernels.conv_backward(image, dy, axis, axis)
    padded = np.pad(values, ((0, 0), (size // 2,) * 2, (size // 2,) * 2, (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (size, size), axis=(1, 2))
    assert found.dtype == "int32"
    np.testing.assert_array_equal(found.numpy(), np.einsum("nhwckl,nhwo->klco", windows, values[..., :2]))


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


# Image, kernel, stride, padding: pixels of the kernel, windows or whole classes of pixels that meet nothing but padding.
CONVOLUTIONS = [
    ((1, 1), (3, 3), 1, 1), ((2, 1), (3, 2), 2, 1), ((4, 5), (2, 3), 1, 4), ((3, 4), (1, 1), 2, 0), ((5, 4), (2, 1), 4, 3),
    ((1, 1), (1, 1), 9, 5), ((7, 3), (5, 2), 3, 2), ((2, 2), (4, 4), 5, 3),
]  # fmt: skip


@pytest.mark.parametrize("image, kernel, stride, padding", CONVOLUTIONS, ids=str)
def test_convolutions_that_meet_much_padding(device, image, kernel, stride, padding):
    """Against the definition; of whole numbers, so that all is exact."""
    rng, (K, L) = np.random.default_rng(0), kernel
    a, b = rng.integers(-4, 5, (2, *image, 3)).astype("float32"), rng.integers(-4, 5, (K, L, 3, 2)).astype("float32")
    padded = np.pad(a, [(0, 0), (padding, padding), (padding, padding), (0, 0)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, kernel, (1, 2))[:, ::stride, ::stride]  # N, H', W', C, K, L
    expected = np.einsum("nhwckl,klco->nhwo", windows, b)
    leaves = leaf(a, device), leaf(b, device)
    out = ops.conv(*leaves, stride=stride, padding=padding)
    np.testing.assert_array_equal(out.numpy(), expected)
    g = rng.integers(-4, 5, out.shape).astype("float32")
    out.backward(ndl.Tensor(g, device=device))
    np.testing.assert_array_equal(leaves[1].grad.numpy(), np.einsum("nhwckl,nhwo->klco", windows, g))
    # Of the image: what each pixel alone adds to the result.
    for index in np.ndindex(a.shape[1:3]):
        one = np.zeros_like(a)
        one[(slice(None), *index)] = 1
        of_pixel = np.pad(one, [(0, 0), (padding, padding), (padding, padding), (0, 0)])
        met = np.lib.stride_tricks.sliding_window_view(of_pixel, kernel, (1, 2))[:, ::stride, ::stride, 0]
        wanted = np.einsum("nhwkl,klco,nhwo->nc", met, b, g)
        np.testing.assert_array_equal(leaves[0].grad.numpy()[(slice(None), *index)], wanted)


def test_a_loss_of_no_classes_that_nobody_asks_for(device):
    logits = leaf(np.zeros((2, 0)), device)
    loss = ops.cross_entropy(logits, leaf([-100, -100], device, "int32", requires_grad=False))
    loss.backward()
    assert loss.item() == 0 and logits.grad.shape == (2, 0)


def test_a_number_that_is_cut_off_as_it_is_written_has_no_slope(device):
    whole, value = leaf([1, 2], device, "int32", requires_grad=False), leaf([1.7], device)
    whole[0:1] = value
    (whole * 2.0).sum().backward()
    assert whole.numpy().tolist() == [1, 2] and value.grad.item() == 0


@pytest.mark.parametrize("n", [3, 5, 9, 17])
def test_a_row_of_one_large_number_has_a_slope(device, n):
    """The square of what a vector has beyond the row's end would be infinite."""
    x, weight = leaf(np.full((1, n), 2.0**123), device), leaf(np.ones(n), device)
    ops.layer_norm(x, weight, leaf(np.zeros(n), device)).backward(leaf(np.arange(n).reshape(1, n), device))
    np.testing.assert_allclose(x.grad.numpy()[0], (np.arange(n) - (n - 1) / 2) / np.sqrt(1e-5), rtol=1e-4)


def test_views_without_elements(device):
    backward = leaf(np.zeros((1, 4)), device)[0:0, ::-1]
    assert [ops.softmax(column).shape for column in ops.split(backward, 1)] == [(0,)] * 4
    assert [column.sum().item() for column in backward.realize_cached_data().permute((1, 0))] == [0] * 4
    nothing = array(np.zeros((0, 3, 4, 2)), device)[:, 2:, 2:]
    x = ndl.Tensor.make_const(nothing, requires_grad=True)
    ops.attention(x, x, x).backward()
    assert x.grad.shape == (0, 1, 2, 2) and nothing.compact().size == 0


def test_attention_to_large_scores_that_are_alike(device):
    """Their weights sum to 1, though the scores have no digits for what tells them apart."""
    rng = np.random.default_rng(0)
    q, k = leaf(np.full((1, 1, 4, 2), 1e6), device), leaf(1 + rng.uniform(0, 1e-6, (1, 1, 24, 2)), device)
    v = leaf(np.ones((1, 1, 24, 2)), device)
    np.testing.assert_allclose(ops.attention(q, k, v, causal=False).numpy(), 1, rtol=1e-6)


def test_attention_to_nothing(device):
    q, k = leaf(np.ones((1, 2, 3, 4)), device), leaf(np.ones((1, 2, 0, 4)), device)
    out = ops.attention(q, k, k, causal=False)
    np.testing.assert_array_equal(out.numpy(), np.zeros((1, 2, 3, 4)))
    empty = leaf(np.ones((1, 2, 3, 0)), device)  # heads without features
    ops.attention(empty, empty, empty).sum().backward()
    assert empty.grad.shape == empty.shape


@pytest.mark.parametrize("causal", [False, True])
def test_attention_to_keys_of_no_weight(device, causal):
    """A query that all scores keep from everything has the output 0, and nothing of its gradient reaches keys and values."""
    one, key, value = (array(np.full((1, 1, 40, 8), x), device) for x in (1, -np.inf, 2))
    layout = dense_layout(40, 40, 16, causal=causal)
    out, lse = kernels.attention(one, key, value, layout, 1.0)
    _, dk, dv = kernels.attention_backward(one, one, key, value, out, lse, layout, 1.0)
    for found in (out, dk, dv):
        assert not found.numpy().any()


def test_attention_to_what_lies_in_another_order(device):
    values = np.random.default_rng(0).standard_normal((3, 1, 2, 20, 8))
    layout, plain = dense_layout(20, 20, 16), [array(v, device) for v in values]
    wanted = kernels.attention(*plain, layout, 0.5)
    for turned in (
        [array(v[:, ::-1, ::-1], device).flip((1, 2)) for v in values],
        [array(v[..., ::-1], device).flip((3,)) for v in values],
        [array(v.swapaxes(2, 3), device).permute((0, 1, 3, 2)) for v in values],
    ):
        for found, same in zip(kernels.attention(*turned, layout, 0.5), wanted):
            np.testing.assert_array_equal(found.numpy(), same.numpy())


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
    for stride, padding in ((0, 1), (-1, 1), (1, -1), ((2, 2), 1), (2.0, 1), (1, None), (2**70, 1), (1, 2**70)):
        with pytest.raises(ShapeError, match=r"\[conv\] (stride|padding) is"):
            ops.conv(x, leaf(np.ones((3, 3, 1, 1)), device), stride, padding)
    for kernel in ((7, 3), (3, 7)):
        with pytest.raises(ShapeError, match=r"\[conv\] kernel \d x \d is larger than the padded image 6 x 6"):
            ops.conv(x, leaf(np.ones((*kernel, 1, 1)), device))
    for bias in ((1,), (3,), (), (1, 2)):
        with pytest.raises(ShapeError, match=r"^\[conv\] bias is .* \(accepted: \(Cout,\), \(K, L, Cin, Cout\)\)"):
            ops.conv(x, leaf(np.ones((3, 3, 1, 2)), device), bias=leaf(np.ones(bias), device))
    for q, k in ((x[0], x), (x, x[0])):
        with pytest.raises(ShapeError, match=r"\[attention\] q is .* \(accepted: \(batch, heads, positions, features\)\)"):
            ops.attention(q, k, k)
    assert [ops.stack([x, x], axis).shape.index(2) for axis in (-1, 4, 0, -5)] == [4, 4, 0, 0]
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
    for f in (ops.mean, ops.summation, ops.max, ops.logsumexp):
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
        with pytest.raises(ValueError, match=r"\[dropout\] (seed|offset) is"):
            ops.dropout(x, 0.5, seed, offset)
    pair = ops.make_tuple(x, x * 2)
    assert pair[np.int64(-1)].numpy()[0, 0, 0, 0] == 2
    assert pair[1:] == (pair[1],) and pair[::-1] == (pair[1], pair[0]) and pair[2:] == ()
    for wrong in (2, -3, 0.0, "0"):
        with pytest.raises(IndexError, match=rf"\[tuple_get_item\] index {wrong} is out of range for 2 items"):
            pair[wrong]
    for bounds in ({"min": leaf([0], device)}, {"min": 0, "max": "1"}):
        with pytest.raises(DTypeError, match=r"\[clip\] (min|max) is of type .* \(accepted: a number\)"):
            ops.clip(x, **bounds)
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
    for scale in (leaf([2.0], device), "2"):  # a Tensor would get no gradient
        with pytest.raises(DTypeError, match=r"\[attention\] scale is of type .* \(accepted: a number\)"):
            ops.attention(x, x, x, scale=scale)
    for loss, inputs in ((ops.cross_entropy, 1), (ops.linear_cross_entropy, 2)):
        with pytest.raises(DTypeError, match="ignore_index is of type Tensor"):  # where torch has weights of classes
            loss(*[leaf(np.ones((2, 2)), device)] * inputs, leaf([0, 1], device), leaf(np.ones(2), device))
        with pytest.raises(DTypeError, match=r"ignore_index is of type numpy\.ndarray"):
            loss(*[leaf(np.ones((2, 2)), device)] * inputs, leaf([0, 1], device), np.ones(2))
    wrong = r"\[linear_cross_entropy\] hidden is \(2, 3, 4\), weight \(5, 4\) \(accepted: \(\.\.\., D\) and \(D, V\)\)"
    with pytest.raises(ShapeError, match=wrong):
        ops.linear_cross_entropy(*[leaf(np.ones(shape), device) for shape in ((2, 3, 4), (5, 4), (2, 3))])
    for size in (0, "64MiB", float("nan"), float("inf"), None):
        with pytest.raises(ShapeError, match=f"chunk_bytes is {size!r} .accepted: a number of at least 1"):
            ops.linear_cross_entropy(x, x, leaf([0, 1], device), chunk_bytes=size)
    hidden, weight = leaf(np.ones((4, 3)), device), leaf(np.ones((3, 5)), device)
    for size in (1e6, 45.5):  # bytes of all, and of two rows
        loss = ops.linear_cross_entropy(hidden, weight, leaf([0, 1, 2, 3], device), chunk_bytes=size)
        np.testing.assert_allclose(loss.numpy(), np.log([5]), rtol=1e-6)
    with pytest.raises(DTypeError, match="out_grad is of type numpy"):
        (x * 2).backward(np.ones(x.shape))
    with pytest.raises(DeviceError, match="out_grad is on"):
        (x * 2).backward(leaf(np.ones(x.shape), ndl.cpu() if device != ndl.cpu() else ndl.cpu_numpy()))


def test_shapes_that_kernels_cannot_take(device):
    """A kernel takes its sizes from one of its arrays: it would read beyond another, or leave a part of it out."""

    def rotary(x, cos, sin):
        return ops.rotary(x, cos.cached_data, sin.cached_data)

    def attention(layout):
        return lambda q, k, v: ops.attention(q, k, v, layout)

    def loss(hidden, weight):
        return ops.linear_cross_entropy(hidden, weight, leaf([0, 1], device))

    one, two = BlockLayout(np.ones((2, 3)), 16), BlockLayout(np.ones((2, 2, 3)), 16)
    q, columns, blocks = (1, 3, 32, 4), (1, 3, 48, 4), (1, 6, 16, 16)
    for name, op, *shapes in (
        ("softmax", ops.softmax, ()), ("log_softmax", ops.logsoftmax, ()),
        ("layer_norm", ops.layer_norm, (2, 3), (2,), (3,)), ("layer_norm", ops.layer_norm, (2, 3), (3,), (2,)),
        ("rnn", ops.rnn, (2, 1, 4), (1, 3), (4, 3), (3, 3), (1,)), ("rnn", ops.rnn, (2, 1, 4), (1, 3), (3, 3), (3, 3), (3,)),
        ("rnn", ops.rnn, (0, 1, 4), (1, 3), (4, 3), (3, 3), (3,)), ("rnn", ops.rnn, (2, 1, 4), (3,), (4, 3), (3, 3), (3,)),
        ("lstm", ops.lstm, (2, 1, 4), (1, 3), (1, 2), (4, 12), (3, 12), (12,)), ("lstm", ops.lstm, (2, 4), (1, 3), (1, 3), (4, 12), (3, 12), (12,)),
        ("lstm", ops.lstm, (0, 1, 4), (1, 3), (1, 3), (4, 12), (3, 12), (12,)), ("lstm", ops.lstm, (2, 1, 4), (), (1, 3), (4, 12), (3, 12), (12,)),
        ("rotary", rotary, (1, 2, 5, 4), (5, 2), (5, 1)), ("rotary", rotary, (1, 2, 5, 4), (5, 3), (5, 3)),
        ("rotary", rotary, (1, 2, 5, 4), (4, 2), (4, 2)), ("embedding", ops.embedding, (4,), (1,)),
        ("rotary_qkv", lambda x, cos: ops.rotary_qkv(x, *[cos.cached_data] * 2), (1, 5, 2, 2, 4), (5, 2)),
        ("linear_cross_entropy", loss, (2, 3), (4, 5)), ("linear_cross_entropy", loss, (2, 3), (3, 5, 1)),
        ("attention", ops.attention, q, q, columns), ("attention", ops.attention, q, (1, 2, 32, 4), (1, 2, 32, 4)),
        ("attention", ops.attention, q, (1, 3, 32, 5), (1, 3, 32, 5)), ("attention", attention(one), q, q, q),
        ("attention", attention(two), q, columns, columns),
        ("blocksparse_sdd", lambda a, b: ops.sdd(a, b, one), (2, 32, 5), (1, 5, 48)), ("blocksparse_sdd", lambda a, b: ops.sdd(a, b, one), (1, 32, 5), (1, 4, 48)),
        ("blocksparse_sdd", lambda a, b: ops.sdd(a, b, one), (1, 32, 5), (1, 5, 47)), ("blocksparse_sdd", lambda a, b: ops.sdd(a, b, two), (3, 32, 5), (3, 5, 48)),
        ("blocksparse_dsd", lambda s, b: ops.dsd(s, b, one), blocks, (1, 47, 2)), ("blocksparse_dsd", lambda s, b: ops.dsd(s, b, one), blocks, (2, 48, 2)),
        ("blocksparse_dsd", lambda s, b: ops.dsd(s, b, one), (1, 5, 16, 16), (1, 48, 2)), ("blocksparse_dsd", lambda s, b: ops.dsd(s, b, two), blocks, (1, 48, 2)),
        ("blocksparse_dds", lambda a, s: ops.dds(a, s, one), (1, 2, 33), blocks), ("blocksparse_dds", lambda a, s: ops.dds(a, s, one), (2, 2, 32), blocks),
    ):  # fmt: skip
        with pytest.raises(ShapeError, match=rf"^\[{name}\] "):
            op(*[leaf(np.ones(shape), device) for shape in shapes])


def test_dtypes_that_kernels_cannot_take(device):
    """A kernel takes its dtype from its first array."""
    x, row, whole = leaf(np.ones((2, 2)), device), leaf(np.ones(2), device), leaf([[1]], device, "int32", requires_grad=False)
    for op in (ops.softmax, ops.logsoftmax, ops.logsumexp, lambda x: ops.dropout(x, 0.5, 1)):
        with pytest.raises(DTypeError, match=r"^\[\w+\] needs floating arrays, got int32"):
            op(whole)
    for wrong in (leaf([1, 1], device, "float64"), leaf([1, 1], device, "float16")):
        with pytest.raises(DTypeError, match=rf"^\[layer_norm\] dtypes differ: float32 and {wrong.dtype}"):
            ops.layer_norm(x, row, wrong)
    layout = BlockLayout([[True]], 16)
    tile, wide = leaf(np.ones((1, 16, 16)), device), leaf(np.ones((1, 16, 16)), device, "float64")
    blocks = [ops.reshape(t, (1, 1, 16, 16)) for t in (tile, wide)]
    for name, product, operands in (
        ("sdd", ops.sdd, (tile, wide)), ("dsd", ops.dsd, (blocks[0], wide)), ("dds", ops.dds, (tile, blocks[1])),
    ):  # fmt: skip
        with pytest.raises(DTypeError, match=rf"^\[blocksparse_{name}\] dtypes differ: float32 and float64"):
            product(*operands, layout)
    loss = lambda hidden, weight: ops.linear_cross_entropy(hidden, weight, leaf([0, 1], device))  # noqa: E731
    for name, op, *shapes in (("attention", ops.attention, *[(1, 2, 3, 4)] * 3), ("linear_cross_entropy", loss, (2, 3), (3, 5))):
        for which in range(1, len(shapes)):
            inputs = [leaf(np.ones(shape), device, "float64" if i == which else "float32") for i, shape in enumerate(shapes)]
            with pytest.raises(DTypeError, match=rf"^\[{name}\] dtypes differ: float32 and float64"):
                op(*inputs)
    for kernel, arrays in (
        (kernels.sgd_step, (None, 0.1, 0.9, 0.0)),
        (kernels.adam_step, (*[array([1], device)] * 3, *[0.1] * 6, 1)),
    ):
        with pytest.raises(DTypeError, match=r"^\[\w+_step\] needs floating arrays, got int32"):
            kernel(array([1], device, "int32"), array([1], device), *arrays)
    image, kernel = (leaf(np.ones(shape), device, "bool", requires_grad=False) for shape in ((1, 3, 3, 1), (2, 2, 1, 1)))
    with pytest.raises(DTypeError, match=r"^\[conv\] no convolution of bool arrays"):
        ops.conv(image, kernel)


def test_devices_that_kernels_cannot_take(device):
    there = ndl.cpu() if device != ndl.cpu() else ndl.cpu_numpy()
    x, ids = leaf(np.ones((2, 2)), device), leaf([0, 1], there, "int32", requires_grad=False)
    for op in (ops.embedding, ops.cross_entropy, lambda x, ids: ops.linear_cross_entropy(x, x, ids)):
        with pytest.raises(DeviceError, match=rf"^\[\w+\] .*{re.escape(str(there))}"):
            op(x, ids)
    for name, op, *shapes in (
        ("batch_norm", ops.batch_norm, (2, 3), (3,), (3,)), ("attention", ops.attention, *[(1, 2, 3, 4)] * 3),
        ("rnn", ops.rnn, (2, 1, 4), (1, 3), (4, 3), (3, 3), (3,)),
        ("lstm", ops.lstm, (2, 1, 4), (1, 3), (1, 3), (4, 12), (3, 12), (12,)),
        ("conv", lambda a, b, bias: ops.conv(a, b, bias=bias), (1, 3, 3, 1), (2, 2, 1, 1), (1,)),
    ):  # fmt: skip
        for which in range(1, len(shapes)):
            with pytest.raises(DeviceError, match=rf"^\[{name}\] .*{re.escape(str(there))}"):
                op(*[leaf(np.ones(shape), there if i == which else device) for i, shape in enumerate(shapes)])
    with pytest.raises(DeviceError, match=r"^\[rotary\] "):
        ops.rotary(leaf(np.ones((1, 1, 2, 2)), device), *[array(np.ones((2, 1)), there)] * 2)
    with pytest.raises(DeviceError, match=r"^\[sgd_step\] "):
        kernels.sgd_step(x.cached_data, array(np.ones((2, 2)), there), None, 0.1, 0.9, 0.0)


def test_cells_take_states_of_one_shape(device):
    x, ones = leaf(np.ones((2, 5)), device), lambda *shape: leaf(np.ones(shape), device)
    lstm, rnn = nn.LSTMCell(5, 3, device=device), nn.RNNCell(5, 3, device=device)
    for cell, state in (
        (lstm, (ones(4, 3), ones(4, 3))), (lstm, (ones(2, 3), ones(3))), (rnn, ones(3)), (rnn, ones(1, 2, 3)),
    ):  # fmt: skip
        with pytest.raises(ShapeError, match=r"Cell\] a state is .* \(accepted: \(2, 3\)\)"):
            cell(x, state)
    several = nn.LSTM(5, 3, device=device)
    for state, said in ((ones(2, 3), "of type Tensor"), ((ones(2, 3),), "1 of them"), ((ones(2, 3),) * 3, "3 of them")):
        with pytest.raises(ShapeError, match=rf"\[LSTMCell\] the first state is {said} \(accepted: a pair of Tensors"):
            lstm(x, state)
        with pytest.raises(ShapeError, match=rf"\[LSTM\] the first state is {said} \(accepted: a pair of Tensors"):
            several(ops.stack([x, x], 0), state)
    for cell in (lstm, rnn):
        for wrong in (ones(5), ones(2, 4)):
            with pytest.raises(ShapeError, match=r"Cell\] X is .* \(accepted: \(batch, 5\)\)"):
                cell(wrong)


def test_layers_name_themselves_for_what_they_cannot_take(device):
    ones = lambda *shape: leaf(np.ones(shape), device)  # noqa: E731
    lstm, rnn = nn.LSTMCell(5, 3, device=device), nn.RNNCell(5, 3, device=device)
    for layer in (lstm, rnn, nn.Flatten()):
        name = type(layer).__name__
        with pytest.raises(DTypeError, match=rf"^\[{name}\] input 0 is of type list"):
            layer([[1.0] * 5])
        with pytest.raises(ShapeError, match=rf"^\[{name}\] X is \(\) \(accepted: \(batch, "):
            layer(ones())
    for kind in (nn.LSTM, nn.RNN):
        with pytest.raises(ShapeError, match=rf"^\[{kind.__name__}\] X is \(0, 2, 5\) \(accepted: .* positions at least 1\)"):
            kind(5, 3, device=device)(ones(0, 2, 5))
    with pytest.raises(DTypeError, match=r"^\[lstm\] input 5 is of type numpy\.ndarray"):
        ops.lstm(ones(1, 2, 5), ones(2, 3), ones(2, 3), lstm.W_ih, lstm.W_hh, np.ones(12))
    with pytest.raises(DTypeError, match=r"^\[lstm_cell\] input 1 is of type list"):
        ops.lstm_cell(ones(2, 12), [[1.0] * 3] * 2)
    for gates, c in ((ones(12, 2), ones(2, 3)), (ones(2, 12), ones(3))):  # the first has as many elements, in another order
        with pytest.raises(ShapeError, match=r"^\[lstm_cell\] gates are .* \(accepted: \(B, 4 H\), \(B, H\)\)"):
            ops.lstm_cell(gates, c)


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
        assert make(x, np.int64(0), 1).shape == make(x, 0, 1).shape
        for wrong in (None, 1.5, "0", True, (0, 1.0), (0, True)):
            with pytest.raises(ShapeError, match=rf"^\[{make.__name__}\] axes are .* \(accepted: a whole number, or several\)"):
                make(x, wrong, 1)
    for numbers in ((1.5, 0), (0, -1), (2**64, 0), (False,), (True,)):
        with pytest.raises(
            ValueError, match=rf"\[dropout\] (seed|offset) is .* \(accepted: a whole number from 0 to {2**64 - 1}\)"
        ):
            ops.dropout(x, 0.5, *numbers)
    assert np.array_equal(ops.dropout(x, 0, 1).numpy(), x.numpy()) and not ops.dropout(x, 1, 1).numpy().any()
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
    for x, weight, bias in (
        ((2, 3, 4), (2, 4, 5), 5), ((3, 4), 4, 3), ((3, 4), (4, 5), 1), ((2, 3), (3, 4), (2, 2)), ((2, 3), (3, 4), (4, 1))
    ):  # fmt: skip
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
    with pytest.raises(GraphError, match=r"Third.gradient gave 2 gradients for 1 inputs"):
        Third(lambda grad: (grad, grad))(x).backward()
    for y in (Third(lambda grad: None)(x), Third(lambda grad: None)(x * 2)):  # a forgotten return
        with pytest.raises(GraphError, match=r"Third.gradient gave None \(accepted: a Tensor, or a tuple"):
            y.backward()
    for given in (ndl.Tensor.realize_cached_data, ndl.Tensor.numpy):
        for y in (Third(given)(x), Third(given)(x * 2)):
            with pytest.raises(GraphError, match=r"Third.gradient gave a .*rray for an input of shape \(3,\)"):
                y.backward()
    with pytest.raises(DTypeError, match="is of type numpy"):
        x.grad = np.ones(3)
    for missing, make in (("First", ndl.autograd.TensorOp), ("Network", nn.Module)):
        with pytest.raises(NotImplementedError, match=rf"\[{missing}\] has no"):
            type(missing, (make,), {})()(x)
    for y in (x, x.detach()):
        with pytest.raises(DTypeError, match=r"\[Second\] compute gave a numpy"):
            type("Second", (ndl.autograd.TensorOp,), {"compute": lambda self, a: a.numpy()})()(y)
        with pytest.raises(DTypeError, match=r"\[Pair\] compute gave a tuple \(accepted: an NDArray\)"):
            type("Pair", (ndl.autograd.TensorOp,), {"compute": lambda self, a: (a, a)})()(y)
        with pytest.raises(DTypeError, match=r"\[Single\] compute gave a NDArray \(accepted: a tuple of NDArrays\)"):
            type("Single", (ndl.autograd.TensorTupleOp,), {"compute": lambda self, a: a})()(y)


def test_a_gradient_that_cannot_be_one_is_not_taken(device):
    x = leaf([[1, 2, 3], [4, 5, 6]], device)
    before = x.grad = leaf(np.ones((2, 3)), device)
    for shape in ((1,), (3,), (2, 1), (6,), (3, 2)):  # some of which would broadcast where gradients are summed
        with pytest.raises(ShapeError, match=r"\[grad\] the gradient is .* \(accepted: \(2, 3\)"):
            x.grad = leaf(np.ones(shape), device)
    elsewhere = ndl.cpu() if device == ndl.cpu_numpy() else ndl.cpu_numpy()
    with pytest.raises(DeviceError, match=r"\[grad\] the gradient is on "):
        x.grad = leaf(np.ones((2, 3)), elsewhere)
    assert x.grad is before
    x.grad = None


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
