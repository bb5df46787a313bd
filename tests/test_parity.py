"""Every op on every device and dtype against its definition in numpy float64, and its gradient against finite differences."""

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import needle as ndl
from making import array
from needle import nn, ops
from needle.autograd import TensorOp
from needle.backend_ndarray import BackendDevice, kernels, ndarray_backend_cpu, ndarray_backend_numpy
from needle.backend_ndarray.ndarray import NDArray, full
from needle.errors import NeedleTestError
from needle.testing import TOLERANCES, OpCase, assert_close, check_parity, check_second_derivative, gradcheck, gradients
from op_cases import CASES

by_name = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)


@pytest.mark.parametrize("case", [case for case in CASES if case.expected is not None], ids=lambda c: c.name)
def test_forward_equals_numpy(case, host):
    values = case.inputs()
    found = case.run(*[ndl.Tensor(v, device=host, dtype="float64") for v in values]).numpy()
    assert_close(found, case.expected(*values), TOLERANCES["float64"][0] * max(case.looser, 1), case.name)


@by_name
def test_gradient_equals_finite_differences(case, host):
    gradcheck(case, host)


@by_name
def test_second_derivative_equals_finite_differences(case, host):
    check_second_derivative(case, host)


@by_name
def test_second_derivative_of_its_square_equals_finite_differences(case, host):
    """Where the gradient of the op's output has a history too."""
    check_second_derivative(replace(case, run=lambda *inputs: (out := case.run(*inputs)) * out), host)


@by_name
def test_a_graph_that_is_kept_gives_its_gradients_again(case, host):
    """What comes after may use up what forward saved."""
    inputs = [ndl.Tensor(v, device=host) for v in case.inputs()]
    y, found = case.run(*inputs), []
    for kept in (True, True, False):
        y.backward(retain_graph=kept)
        found.append([x.grad.numpy() for x in inputs])
    for first, again, last in zip(*found):
        np.testing.assert_array_equal(again, first)
        assert_close(last, first, TOLERANCES["float32"][1] * max(case.looser, 1), case.name)


@pytest.mark.parametrize(
    ("case", "dtype"), [pytest.param(case, dtype, id=f"{case.name}-{dtype}") for case in CASES for dtype in case.dtypes]
)
def test_parity(case, device, dtype):
    check_parity(case, device, ndl.cpu_numpy(), dtype)


@by_name
def test_kernels_write_nothing_behind_their_workspace(case, device, monkeypatch):
    """Which is at the front of a larger array here: one of its own may be rounded up, and hide what is a little too small."""
    behind = []

    def workspace(shape, dtype, device):
        size = math.prod(shape)
        larger = full((size + 4096,), 77, dtype, device)
        part = larger[:size].reshape(shape)
        part._handle = larger._handle.view(0, size)
        behind.append(larger[size:])
        return part

    monkeypatch.setattr(kernels, "_workspace", workspace)
    gradients(case, case.inputs(), device, "float32")
    for spare in behind:
        np.testing.assert_array_equal(spare.numpy(), 77)


@pytest.mark.parametrize("dtype", CASES[0].dtypes)
def test_a_device_of_ones_own(dtype):
    """As docs/architecture.md has it: of the reference's functions under another name."""
    check_parity(CASES[0], BackendDevice("own_of_parity", ndarray_backend_numpy), ndl.cpu_numpy(), dtype)


class Cube(TensorOp):
    """a^3, whose gradient is 3 a^2 dy times ``wrong``; ``constant``: its second derivative knows nothing of a."""

    def __init__(self, wrong=1.0, constant=False):
        self.wrong, self.constant = wrong, constant

    def compute(self, a):
        return a * a * a

    def gradient(self, out_grad, node):
        a = node.inputs[0].detach() if self.constant else node.inputs[0]
        return out_grad * a * a * (3 * self.wrong)


def test_the_checks_refuse_what_is_wrong(host):
    def case(run):
        return OpCase("some", run, [(2, 3)])

    gradcheck(case(Cube()), host)
    check_second_derivative(case(Cube()), host)
    for check, run, said in (
        (gradcheck, Cube(1.00001), "some, gradient 0: at "),
        (gradcheck, lambda x: x * 0 + 1, "the output is constant"),
        (check_second_derivative, Cube(constant=True), r"some, second derivative \(of constants"),
        (check_second_derivative, lambda x: Cube(constant=True)(x * x), "some, second derivative: at "),
    ):
        with pytest.raises(NeedleTestError, match=said):
            check(case(run), host)
    with pytest.raises(NeedleTestError, match="gradient of input 1 is all zero"):
        gradcheck(OpCase("some", lambda x, y: x + y * 0, [(2, 3)] * 2), host)
    with pytest.raises(TypeError, match=r"case is of type function \(accepted: an OpCase"):
        gradcheck(ops.exp, host)


def test_parity_refuses_a_kernel_that_is_wrong(cpu):
    for run, dtype, said in (
        (lambda x: ops.exp(x) * (1 + (x.device == cpu) / 32), "bfloat16", "bfloat16: at .* accepted 1.60e-02"),
        (lambda x: ops.exp(x) * (1 + (x.device == cpu) * 1e-11), "float64", "float64: at .* accepted 1.00e-12"),
        (lambda x: Cube(1 + (x.device == cpu) * 1e-9)(x), "float64", "float64, gradient 0: at .* accepted 1.00e-10"),
    ):
        with pytest.raises(NeedleTestError, match=rf"^some on cpu\(\), {said}"):
            check_parity(OpCase("some", run, [(2, 3)]), cpu, ndl.cpu_numpy(), dtype)


@pytest.mark.parametrize(
    "found, said",
    [
        ([1, 2], r"^it: shape \(2,\), expected \(3,\)$"),
        ([1, np.nan, np.inf], r"^it: at \(1,\) nan, expected 2$"),
        ([1, 2, -np.inf], r"^it: at \(2,\) -inf, expected inf$"),
        ([1, np.inf, -np.inf], r"^it: at \(1,\) inf, expected 2$"),
        ([np.nan, 2, np.inf], r"^it: at \(0,\) nan, expected 1$"),
        ([1, 2, 3], r"^it: at \(2,\) 3, expected inf$"),
        ([1, 2.5, np.inf], r"^it: at \(1,\) 2.5, expected 2 \(error 2.50e-01, accepted 1.25e-01\)$"),
    ],
)
def test_numbers_that_are_not_close(found, said):
    assert_close([1.25, 2.25, np.inf], [1, 2, np.inf], 0.125)
    assert_close([np.nan, np.inf], [np.nan, np.inf], 0)
    with pytest.raises(NeedleTestError, match=said):
        assert_close(found, [1, 2, np.inf], 0.125, "it")


SIZES = (1, 2, 31, 33, 255, 257, 1000)
SPECIAL = [np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-40, 88.0, -104.0, 1e30, -1e30, 1.0, -1.0]


def kinds():
    """(arity, name, kind) of every row of the elementwise table."""
    text = (Path(__file__).parent.parent / "src/common/ewise_ops.def").read_text()
    return re.findall(r"^NEEDLE_(UNARY|BINARY)\((\w+), (\w+),", text, re.MULTILINE)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_elementwise_rows_on_special_values(device, dtype):
    reference = ndl.cpu_numpy()
    with np.errstate(all="ignore"):
        x, y = (axis.reshape(-1) for axis in np.meshgrid(*[np.array(SPECIAL, np.float32)] * 2))  # every pair
    wrong = []
    for arity, name, kind in kinds():
        results, to_bool = [], kind in ("TEST", "CMP", "LOGIC")
        for where in (reference, device):
            a, b = (NDArray(v, device=where, dtype=dtype) for v in (x, y))
            if arity == "UNARY":
                out = a._unary(f"ewise_{name}", "bool" if to_bool else None)
            else:
                out = a._binary(b, f"ewise_{name}", f"scalar_{name}", to_bool=to_bool)
            results.append(out.numpy().astype(np.float64))
        expected, found = results
        if name in ("maximum", "minimum") and device != reference:  # of two zeros the second; numpy's answer is the processor's
            first, second = (v.numpy().astype(np.float64) for v in (a, b))
            expected = np.where((first == 0) & (second == 0), second, expected)
        # Subnormals may count as zero; infinities and NaN must be where they are in numpy.
        finite = np.isfinite(expected)
        tolerance = 3 * TOLERANCES[dtype][0]
        same = np.where(finite, np.isclose(found, expected, rtol=tolerance, atol=tolerance), found == expected)
        same |= np.isnan(found) & np.isnan(expected)
        same &= (found != 0) | (expected != 0) | (np.signbit(found) == np.signbit(expected))
        if not same.all():
            i = int(np.flatnonzero(~same)[0])
            inputs = (x[i],) if arity == "UNARY" else (x[i], y[i])
            wrong.append(f"{name}{tuple(map(float, inputs))} = {found[i]}, numpy {expected[i]}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", ["sin", "cos"])
def test_sines_of_any_float(device, name):
    """Small ones, huge ones, and those beside the zeros, where every bit of the reduction counts."""
    rng = np.random.default_rng(0)
    some = rng.integers(0, 1 << 32, 50_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    x = np.concatenate([some[np.isfinite(some)], np.arange(50_000) * (np.pi / 2), rng.uniform(-10, 10, 50_000)]).astype(np.float32)
    exact = getattr(np, name)(x.astype(np.float64))
    found = getattr(ops, name)(ndl.Tensor(x, device=device, requires_grad=False)).numpy()
    last_place = np.spacing(np.maximum(abs(exact), 2.0**-126).astype(np.float32))
    assert (abs(found - exact) <= 2 * last_place).all()


def assert_last_places(found, exact, most):
    """``found`` differs from ``exact``, of a wider dtype, by at most so many units of its last place; subnormal ones may be 0."""
    dtype = found.dtype.type
    with np.errstate(over="ignore"):
        rounded = exact.astype(dtype)
    np.testing.assert_array_equal(found[~np.isfinite(rounded)], rounded[~np.isfinite(rounded)])
    finite = np.isfinite(rounded)
    last_place = np.spacing(np.maximum(abs(rounded[finite]), np.finfo(dtype).tiny))
    assert (abs(found[finite] - exact[finite]) <= most * last_place).all()


@pytest.mark.parametrize("exponents", ["any", -2.0, -1.5, -0.5, 1.5, 3.0])
def test_powers_of_any_floats(device, exponents):
    rng = np.random.default_rng(0)
    x = [10 ** rng.uniform(-37, 38, 5000), rng.uniform(0.5, 2, 5000), rng.uniform(-4, 0, 5000), SPECIAL]
    some = [rng.uniform(-3, 3, 5000), rng.uniform(-120, 120, 5000), rng.integers(-40, 40, 5000), np.full(len(SPECIAL), -3)]
    x, some = np.concatenate(x).astype(np.float32), np.concatenate(some).astype(np.float32)
    a = NDArray(x, device=device)
    with np.errstate(all="ignore"):
        found = (a ** NDArray(some, device=device) if exponents == "any" else a**exponents).numpy()
        exact = x.astype(np.float64) ** (some if exponents == "any" else exponents)
        near_the_end = abs(exact) > 3.40282e38  # one device's infinity may be another's largest number
    assert_last_places(found[~near_the_end], exact[~near_the_end], 4)


def test_powers_of_zeros(device):
    """A fraction has no sign to give; what is infinite belongs here, too."""
    x = NDArray(np.array([0.0, -0.0, np.inf]), device=device)
    for exponent in (-2.0, -1.5, -0.5):
        assert (x**exponent).numpy().tolist() == [np.inf, np.inf, 0]
    for exponent in (1.5, 2.0):
        found = (x**exponent).numpy()
        assert found.tolist() == [0, 0, np.inf] and not np.signbit(found).any()


def test_powers_of_minus_1_by_huge_exponents(device):
    """Floats from 2^24 on are even numbers."""
    exponents = 2.0 ** np.arange(24, 128)
    exponents = np.concatenate([exponents, -exponents, exponents[:-1] * 1.5]).astype(np.float32)
    found = NDArray(np.full(exponents.shape, -1.0), device=device) ** NDArray(exponents, device=device)
    np.testing.assert_array_equal(found.numpy(), 1)


def test_logarithms_of_subnormal_numbers(host):
    x = np.array([5e-324, 1e-320, 1e-310, 2.2e-308])
    found = ops.log(ndl.Tensor(x, device=host, dtype="float64", requires_grad=False)).numpy()
    np.testing.assert_allclose(found, [math.log(v) for v in x], rtol=1e-15)


@pytest.mark.parametrize("name", ["exp", "log", "tanh", "sigmoid", "sin", "cos"])
def test_functions_of_float64(host, name):
    rng, wide = np.random.default_rng(0), np.longdouble
    x = np.concatenate([rng.uniform(-700, 700, 5000), rng.normal(0, 1, 5000), 1 + rng.normal(0, 1e-4, 5000)])
    x = np.concatenate([x, 10 ** rng.uniform(-307, 307, 5000) * rng.choice([-1, 1], 5000), np.arange(70_000) * (np.pi / 2)])
    x = abs(x) if name == "log" else x
    with np.errstate(all="ignore"):
        e = np.exp(-abs(x.astype(wide)))
        exact = np.where(x < 0, e, 1) / (1 + e) if name == "sigmoid" else getattr(np, name)(x.astype(wide))
        found = getattr(ops, name)(ndl.Tensor(x, device=host, dtype="float64", requires_grad=False)).numpy()
    assert_last_places(found, exact, 3)


def test_gelu_is_accurate_everywhere(device):
    x = np.linspace(-12, 12, 4801, dtype=np.float32)
    phi = np.array([math.erfc(-v / math.sqrt(2)) / 2 for v in x.tolist()])
    density = np.exp(-(x.astype(np.float64) ** 2) / 2) / math.sqrt(2 * math.pi)
    t = ndl.Tensor(x, device=device, requires_grad=True)
    y = ops.gelu(t)
    y.backward(ndl.ones_like(y))
    assert (abs(y.numpy() - x * phi) <= 2e-7 * abs(x)).all()
    assert abs(t.grad.numpy() - (phi + x * density)).max() < 5e-7


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_softmax_of_rows_that_are_not_finite(device, dtype):
    inf, nan = math.inf, math.nan
    rows = [[1, 2, inf, 3], [nan, 1, 2, 3], [-inf] * 4, [inf] * 4, [-inf, 0, -inf, 0]]
    found = ops.softmax(ndl.Tensor(np.array(rows, np.float32), device=device, dtype=dtype)).numpy()
    assert np.isnan(found[:4]).all() and found[4].tolist() == [0, 0.5, 0, 0.5]  # as PyTorch's


@pytest.mark.parametrize("size", SIZES)
def test_tails(device, size):
    rng = np.random.default_rng(size)
    x = rng.standard_normal((3, size)).astype(np.float32)
    t = ndl.Tensor(x, device=device)
    assert_close(ops.gelu(t).numpy(), ops.gelu(ndl.Tensor(x, device=ndl.cpu_numpy(), dtype="float64")).numpy(), 2e-6)
    assert_close(ops.softmax(t).numpy(), np.exp(x) / np.exp(x).sum(1, keepdims=True), 2e-6)
    assert_close(t.sum(1).numpy(), x.astype(np.float64).sum(1), 1e-5)
    assert_close(t.sum(0).numpy(), x.astype(np.float64).sum(0), 1e-5)
    assert_close((t @ t.transpose()).numpy(), x.astype(np.float64) @ x.T.astype(np.float64), 2e-5)
    assert_close(t.realize_cached_data().max(axis=1).numpy(), x.max(1), 0)
    np.testing.assert_array_equal(t.realize_cached_data().argmax(axis=1).numpy(), x.argmax(1))


@pytest.mark.parametrize("kind", ["RNN", "LSTM"])
def test_recurrent_layers_equal_those_of_pytorch(host, kind):
    torch, rng = pytest.importorskip("torch"), np.random.default_rng(0)
    mine, theirs = getattr(nn, kind)(3, 5, num_layers=2, device=host), getattr(torch.nn, kind)(3, 5, num_layers=2)
    weights = {}
    for layer, cell in enumerate(mine.rnn_cells if kind == "RNN" else mine.lstm_cells):
        for name in ("W_ih", "W_hh", "bias_ih", "bias_hh"):
            weights[f"{name.replace('W', 'weight')}_l{layer}"] = getattr(cell, name)
    for name, p in theirs.named_parameters():
        p.data = torch.from_numpy(weights[name].numpy().T.copy())
    states = (2, 4, 5)
    values = [rng.standard_normal(s).astype(np.float32) for s in ((7, 4, 3), states, states)[: 2 if kind == "RNN" else 3]]
    outputs = []
    inputs = [ndl.Tensor(v, device=host) for v in values], [torch.tensor(v, requires_grad=True) for v in values]
    for module, (x, *h) in zip((mine, theirs), inputs):
        y, last = module(x, h[0] if kind == "RNN" else tuple(h))
        outputs.append([y, *(last if kind == "LSTM" else [last])])
        sum((t * t).sum() * (i + 1) for i, t in enumerate(outputs[-1])).backward()
    for a, b in zip(*outputs):
        assert_close(a.numpy(), b.detach().numpy(), 2e-6)
    for a, b in [*zip(*inputs), *((weights[name], p) for name, p in theirs.named_parameters())]:
        assert_close(a.grad.numpy(), b.grad.numpy().T if b.grad.ndim == 2 else b.grad.numpy(), 1e-5)


def test_batch_norm_equals_that_of_pytorch(host):
    torch, rng = pytest.importorskip("torch"), np.random.default_rng(0)
    mine, theirs = nn.BatchNorm2d(3, device=host), torch.nn.BatchNorm2d(3)
    x, weight, bias, dy = (rng.standard_normal(s).astype(np.float32) for s in ((4, 3, 5, 2), 3, 3, (4, 3, 5, 2)))
    theirs.weight.data, theirs.bias.data = torch.from_numpy(weight.copy()), torch.from_numpy(bias.copy())
    mine.weight, mine.bias = nn.Parameter(weight, device=host), nn.Parameter(bias, device=host)
    a, b = ndl.Tensor(x, device=host), torch.tensor(x, requires_grad=True)
    y, expected = mine(a), theirs(b)
    y.backward(ndl.Tensor(dy, device=host))
    expected.backward(torch.from_numpy(dy))
    assert_close(y.numpy(), expected.detach().numpy(), 1e-6)
    for found, wanted in ((a, b), (mine.weight, theirs.weight), (mine.bias, theirs.bias)):
        assert_close(found.grad.numpy(), wanted.grad.numpy(), 1e-5)


def test_views_permuted_sliced_broadcast(device):
    x = np.random.default_rng(0).standard_normal((4, 5, 6)).astype(np.float32)
    a = NDArray(x, device=device)
    views = {
        "permuted": (a.permute((2, 0, 1)), x.transpose(2, 0, 1)),
        "sliced": (a[1:, ::2, ::-1], x[1:, ::2, ::-1]),
        "broadcast": (a[:, 0:1].broadcast_to((4, 7, 6)), np.broadcast_to(x[:, 0:1], (4, 7, 6))),
    }
    for name, (view, expected) in views.items():
        np.testing.assert_array_equal(view.numpy(), expected, err_msg=name)
        assert_close((view * 2 + view).numpy(), expected * 3, 1e-6, name)
        assert_close(view.exp().numpy(), np.exp(expected), 2e-6, name)
        assert_close(view.sum(axis=(0, 2)).numpy(), expected.sum((0, 2)), 1e-5, name)
        assert_close(ops.softmax(ndl.Tensor.make_const(view)).numpy(),
                     np.exp(expected) / np.exp(expected).sum(-1, keepdims=True), 2e-6, name)  # fmt: skip


def test_operands_that_begin_within_16_bytes(device):
    """Kernels that move 16 bytes at a time must not here: a GPU would fault, and the address checks of the emulator."""
    rng = np.random.default_rng(0)
    wide, table, cos, sin = (rng.standard_normal(shape) for shape in ((1, 2, 4, 12), (5, 8), (4, 4), (4, 4)))

    def both(values):
        return array(values, device), array(np.append(0, values), device)[1:].reshape(values.shape)

    (x, _), (cos, odd_cos), (sin, odd_sin), rows = (both(values) for values in (wide[:, :, :, 1:9], cos, sin, table))
    part, out = array(wide, device)[:, :, :, 1:9], array(wide, device)[:, :, :, 1:9]
    wanted = kernels.rotary(x, cos, sin).numpy()
    for operands in ((part, cos, sin), (x, odd_cos, sin), (x, cos, odd_sin), (x, cos, sin, False, out)):
        np.testing.assert_array_equal(kernels.rotary(*operands).numpy(), wanted)
    ids = array([3, 0, 4], device, "int32")
    np.testing.assert_array_equal(*(kernels.embedding(weight, ids).numpy() for weight in rows))
    np.testing.assert_array_equal(part.compact().numpy(), x.numpy())
    out[:] = x + 1
    np.testing.assert_array_equal(out.numpy(), x.numpy() + 1)


@pytest.mark.parametrize("name", ["embedding", "one_hot", "cross_entropy"])
def test_ids_outside_the_vocabulary(host, name):
    w = ndl.Tensor(np.ones((5, 3)), device=host)
    bad = ndl.Tensor([1, 7], device=host, dtype="int32", requires_grad=False)
    with pytest.raises(IndexError, match="7"):
        if name == "embedding":
            ops.embedding(w, bad)
        elif name == "one_hot":
            ndl.init.one_hot(5, bad, device=host)
        else:
            ops.cross_entropy(ndl.Tensor(np.ones((2, 5)), device=host), bad)


def test_philox():
    """Of its authors' known answers, Random123's kat_vectors."""
    zeros, _ = ndarray_backend_numpy.philox(2, 0, 0)
    assert [f"{word:08x}" for word in zeros] == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]


def test_dropout_is_the_same_everywhere(device):
    x = np.ones(40_001, np.float32)
    expected = ops.dropout(ndl.Tensor(x, device=ndl.cpu_numpy()), 0.3, 42, 7).numpy()
    np.testing.assert_array_equal(ops.dropout(ndl.Tensor(x, device=device), 0.3, 42, 7).numpy(), expected)
    assert abs((expected == 0).mean() - 0.3) < 0.01 and abs(expected.mean() - 1) < 0.01


def test_catalogue_every_op_has_a_case():
    covered = {name for case in CASES for name in case.ops}
    found = {
        cls.__name__
        for cls in vars(ops).values()
        if isinstance(cls, type) and issubclass(cls, ops.Op) and "compute" in vars(cls) and cls is not ops.Op
    }
    assert found - covered == set()


def test_catalogue_every_backend_has_every_kernel():
    names = {n for n in dir(ndarray_backend_numpy) if callable(getattr(ndarray_backend_numpy, n)) and not n.startswith("_")}
    names -= {"HostAllocator", "HostArray", "Storage", "philox"}
    backends = [ndl.cpu(), ndl.meta()] + [d for d in (ndl.cuda_sim(), ndl.cuda()) if d.enabled()]
    assert ndarray_backend_cpu is ndl.cpu().mod
    for device in backends:
        assert {n for n in names if not hasattr(device.mod, n)} == set(), device


def test_catalogue_table_rows():
    rows = {name for _, name, _ in kinds()}
    assert rows == set(ndarray_backend_numpy.UNARY) | set(ndarray_backend_numpy.BINARY)
    assert {name for _, name, kind in kinds() if kind == "NUM"} == ndarray_backend_numpy._OF_NUMBERS
