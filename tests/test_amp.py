"""Mixed precision: which op runs in which dtype, master weights, what is kept, the loss scale."""

import gc
from dataclasses import replace

import numpy as np
import pytest

import needle as ndl
from needle import amp, autograd, nn, ops
from needle.backend_ndarray.block_layout import BlockLayout
from needle.errors import DeviceError, DTypeError
from needle.models import Pythia, PythiaConfig
from needle.optim import AdamW

LOW = ("bfloat16", "float16")
CONFIG = PythiaConfig(layers=2, width=64, heads=4, feed_forward=128, vocab_size=300)
rng = np.random.default_rng(0)


def tensor(shape, device, dtype="float32", **kwargs):
    return ndl.Tensor(rng.standard_normal(shape), device=device, dtype=dtype, **kwargs)


def batch(device, rows=2, positions=64):
    tokens = np.random.default_rng(1).integers(0, 300, (rows, positions + 1)) % 37
    return [ndl.Tensor(x, device=device, dtype="int32", requires_grad=False) for x in (tokens[:, :-1], tokens[:, 1:])]


# --- which op runs in which dtype ---


def blocks_layout():
    return BlockLayout(np.tri(2, dtype=bool), 16)


LOWERED = {
    "matmul": lambda t: t((4, 5)) @ t((5, 3)),
    "linear": lambda t: ops.linear(t((4, 5)), t((5, 3)), t((3,))),
    "attention": lambda t: ops.attention(t((1, 2, 16, 8)), t((1, 2, 16, 8)), t((1, 2, 16, 8))),
    "conv": lambda t: ops.conv(t((1, 6, 6, 2)), t((3, 3, 2, 4))),
    "sdd": lambda t: ops.sdd(t((2, 32, 8)), t((2, 8, 32)), blocks_layout()),
    "dsd": lambda t: ops.dsd(t((2, 3, 16, 16)), t((2, 32, 8)), blocks_layout()),
    "dds": lambda t: ops.dds(t((2, 8, 32)), t((2, 3, 16, 16)), blocks_layout()),
}
RAISED = {
    "softmax": ops.softmax, "logsoftmax": ops.logsoftmax, "logsumexp": lambda x: ops.logsumexp(x, (1,)), "exp": ops.exp,
    "log": lambda x: ops.log(x * x + 1), "power_scalar": lambda x: x**2, "power": lambda x: (x * x + 1) ** x,
    "sum": lambda x: x.sum(), "mean": lambda x: x.mean(), "rdiv": lambda x: 1 / (x * x + 1),
    "layer_norm": lambda x: ops.layer_norm(x, ndl.ones(6, device=x.device), ndl.zeros(6, device=x.device)),
}  # fmt: skip
KEPT = {
    "add": lambda x: x + x, "gelu": ops.gelu, "relu": ops.relu, "tanh": ops.tanh, "transpose": ops.transpose, "max": ops.max,
    "scalar": lambda x: x * 0.5, "dropout": lambda x: ops.dropout(x, 0.5, 1), "stack": lambda x: ops.stack([x, x], 0),
}  # fmt: skip


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("name", LOWERED)
def test_products_run_in_16_bits_and_their_gradients_are_float32(host, name, low):
    made = []

    def leaf(shape):
        made.append(tensor(shape, host))
        return made[-1]

    with amp.autocast(host, low):
        out = LOWERED[name](leaf)
    assert out.dtype == low
    again = iter(made[:])
    whole = LOWERED[name](lambda shape: next(again))
    np.testing.assert_allclose(out.numpy().astype(np.float32), whole.numpy(), rtol=0.03, atol=0.06)
    out.sum().backward()
    found = [x.grad for x in made]
    assert [g.dtype for g in found] == ["float32"] * len(made)
    whole.sum().backward()
    for g, x in zip(found, made, strict=True):
        np.testing.assert_allclose(g.numpy(), x.grad.numpy(), rtol=0.03, atol=0.15)


@pytest.mark.parametrize("low", LOW)
def test_what_needs_range_runs_in_float32_and_the_rest_keeps(host, low):
    x = tensor((4, 6), host, low)
    with amp.autocast(host, low):
        assert {name: f(x).dtype for name, f in RAISED.items()} == dict.fromkeys(RAISED, "float32")
        assert {name: f(x).dtype for name, f in KEPT.items()} == dict.fromkeys(KEPT, low)
    assert {name: f(x).dtype for name, f in RAISED.items() if name != "layer_norm"} == {n: low for n in RAISED if n != "layer_norm"}


def test_mixed_operands_give_the_widest_and_gradients_of_their_own_dtype(host):
    for low in LOW:
        a, b = tensor((3, 4), host), tensor((3, 4), host, low)
        for out in (a + b, a * b, a / (b * b + 1), ops.maximum(a, b), ops.concatenate([b, a], 0), ops.stack([b, a], 0)):
            assert out.dtype == "float32"
            out.sum().backward()
            assert (a.grad.dtype, b.grad.dtype) == ("float32", low)
    assert (tensor((2,), host, "float16") + tensor((2,), host, "bfloat16")).dtype == "float32"


def test_float64_and_integers_are_left_alone(host):
    with amp.autocast(host, "bfloat16"):
        assert (tensor((2, 2), host, "float64") @ tensor((2, 2), host, "float64")).dtype == "float64"
        ids = ndl.Tensor([[1, 2]], device=host, dtype="int32", requires_grad=False)
        assert (ids @ ids.transpose()).dtype == "int32"
        assert ops.embedding(tensor((4, 3), host), ids).dtype == "float32"


@pytest.mark.parametrize("low", LOW)
def test_losses_are_float32(host, low):
    ids = ndl.Tensor(np.arange(6) % 5, device=host, dtype="int32", requires_grad=False)
    hidden, weight = tensor((6, 8), host), tensor((8, 5), host)
    exact = ops.linear_cross_entropy(hidden, weight, ids)
    exact.backward()
    expected = hidden.grad.numpy(), weight.grad.numpy()
    with amp.autocast(host, low):
        logits = hidden @ weight
        losses = ops.cross_entropy(logits, ids), ops.linear_cross_entropy(hidden, weight, ids)
    assert logits.dtype == low
    for loss in losses:
        assert loss.dtype == "float32" and abs(loss.item() - exact.item()) < 0.05
        (loss * 64).backward()
        for x, e in zip((hidden, weight), expected, strict=True):
            assert x.grad.dtype == "float32"
            np.testing.assert_allclose(x.grad.numpy(), e * 64, rtol=0.05, atol=0.6)


def test_linear_cross_entropy_in_float16_keeps_small_gradients(device):
    """A mean over rows of the softmax of many classes: in float16 most of these gradients would be zero without a scale."""
    rows, classes = 512, 2048
    hidden = ndl.Tensor(rng.standard_normal((rows, 4)) * 0.1, device=device)
    weight = ndl.Tensor(rng.standard_normal((4, classes)) * 0.1, device=device)
    ids = ndl.Tensor(np.arange(rows), device=device, dtype="int32", requires_grad=False)
    found = []
    for enabled in (False, True):
        with amp.autocast(device, "float16", enabled=enabled):
            ops.linear_cross_entropy(hidden, weight, ids, chunk_bytes=classes * 200).backward()
        found.append((hidden.grad.numpy(), weight.grad.numpy()))
    for exact, low in zip(*found, strict=True):
        assert np.abs(exact - low).max() < 0.01 * np.abs(exact).max()


# --- regions ---


def test_nesting_decorators_and_state(host):
    x = tensor((3, 3), host)
    assert not amp.is_autocast_enabled(host) and amp.get_autocast_dtype(host) is None
    with amp.autocast(host, "float16"):
        assert amp.is_autocast_enabled(host) and amp.get_autocast_dtype(host) == "float16"
        with amp.autocast(host, enabled=False):
            assert (x @ x).dtype == "float32" and not amp.is_autocast_enabled(host)
            with amp.autocast(host, "bfloat16"):
                assert (x @ x).dtype == "bfloat16"
        assert (x @ x).dtype == "float16"
    assert (x @ x).dtype == "float32"

    @amp.autocast(host, "bfloat16")
    def product(depth):
        """Docs stay."""
        return product(depth - 1) if depth else x @ x

    assert product(2).dtype == "bfloat16" and product.__doc__ == "Docs stay."
    with pytest.raises(KeyError), amp.autocast(host):
        raise KeyError
    assert (x @ x).dtype == "float32" and not amp.is_autocast_enabled(host)


def test_a_region_is_of_one_device():
    here, there = tensor((2, 2), ndl.cpu_numpy()), tensor((2, 2), ndl.meta())
    with amp.autocast("meta"):
        assert (here @ here).dtype == "float32" and (there @ there).dtype == "bfloat16"
        with amp.autocast("cpu_numpy", "float16"):
            assert (here @ here).dtype == "float16" and (there @ there).dtype == "bfloat16"
    assert (amp.autocast("cpu").dtype, amp.autocast("cuda").dtype) == ("bfloat16", "float16")


def test_no_grad_and_grad_do_not_share_a_cast(host):
    x, w = tensor((2, 3), host, requires_grad=False), tensor((3, 2), host)
    with amp.autocast(host):
        with ndl.no_grad():
            assert not (x @ w).requires_grad
        out = x @ w
        assert out.requires_grad
        with ndl.no_grad():
            assert not (x @ w).requires_grad
    out.sum().backward()
    np.testing.assert_allclose(w.grad.numpy(), x.numpy().sum(0)[:, None].repeat(2, 1), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("arguments, error, said", [
    (("cpu", "float32"), DTypeError, "float32"), (("cpu", "float8"), DTypeError, "float8"), (("cpu", np.int32), DTypeError, "int32"),
    (("tpu",), DeviceError, "tpu"), ((None,), DeviceError, "None"),
])  # fmt: skip
def test_bad_arguments(arguments, error, said):
    with pytest.raises(error, match=said) as found:
        amp.autocast(*arguments)
    assert "accepted" in str(found.value) and len(str(found.value).splitlines()) == 1


# --- casts of parameters ---


def test_a_parameter_is_cast_once_in_a_region(host):
    w, x = tensor((3, 3), host), tensor((2, 3), host, requires_grad=False)
    with amp.autocast(host):
        first, second = x @ w, x @ w
        assert first.inputs[1] is second.inputs[1]
        w.data = w.data * 2
        third = x @ w
        assert third.inputs[1] is not first.inputs[1]
        w.realize_cached_data()[0, 0] = 100.0
        assert (x @ w).inputs[1] is not third.inputs[1]
    with amp.autocast(host, cache_enabled=False):
        assert (x @ w).inputs[1] is not (x @ w).inputs[1]
    np.testing.assert_allclose(third.numpy().astype(np.float32), 2 * second.numpy().astype(np.float32), rtol=0.02)
    assert not amp._cast_parameters


def test_casts_go_with_the_graph(cpu):
    w, x = tensor((100, 100), cpu), tensor((2, 100), cpu, requires_grad=False)
    before = cpu.memory_stats()["live"]
    with amp.autocast(cpu):
        loss = (x @ w).sum()
        assert cpu.memory_stats()["live"] - before >= 20_000
    loss.backward()
    del loss
    assert cpu.memory_stats()["live"] - before == 40_000  # the gradient


@pytest.mark.parametrize("low", LOW)
def test_checkpointed_layers_keep_no_casts_and_give_the_same_bits(cpu, low):
    found = []
    for count in (0, 1, 2):
        model = Pythia(replace(CONFIG, checkpoint_layers=count), device=cpu)
        ids, targets = batch(cpu)
        model.loss(ids, targets)  # fills what is cached between calls
        before = cpu.memory_stats()["live"]
        with amp.autocast(cpu, low):
            hidden = model.hidden(ids)
            live = cpu.memory_stats()["live"] - before
            loss = ops.linear_cross_entropy(hidden, model.embed_out, targets)
        del hidden
        loss.backward()
        found.append((live, loss.item(), {name: p.grad.numpy() for name, p in model.named_parameters()}))
    (all_bytes, value, grads), *others = found
    casts = sum(2 * p.size for layer in model.layers for p in layer.parameters() if p.ndim == 2)
    for live, again, other_grads in others:
        assert all_bytes - live > casts and again == value
        for name, grad in grads.items():
            np.testing.assert_array_equal(other_grads[name], grad, err_msg=name)


@pytest.mark.parametrize("low", LOW)
def test_what_is_recomputed_has_the_dtype_it_had(host, low):
    w, x = tensor((4, 4), host), tensor((3, 4), host, requires_grad=False)
    with amp.autocast(host, low):
        y = ops.gelu(x @ w)
        out = (y @ w).sum()
    value = y.numpy()
    node = y._as_node()
    while node.op is not None:  # drop everything there is
        node.array = None
        node = node.inputs[0]
    y._data = None
    assert y.realize_cached_data().dtype == low
    np.testing.assert_array_equal(y.numpy().view(np.uint16), value.view(np.uint16))
    out.backward()
    assert w.grad.dtype == "float32"


def test_backward_inside_the_region_is_the_same(host):
    def run(inside):
        w, x = ndl.Tensor(values, device=host), ndl.Tensor(values, device=host, requires_grad=False)
        with amp.autocast(host):
            loss = ops.softmax(ops.gelu(x @ w) @ w)[:, 0].sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return w.grad.numpy()

    values = rng.standard_normal((5, 5))
    np.testing.assert_array_equal(run(True), run(False))


def test_second_derivatives_through_casts(host):
    w = ndl.Tensor([[3.0]], device=host)
    with amp.autocast(host):
        out = ((w @ w) @ w).sum()
    out.backward(create_graph=True)
    grad = w.grad
    grad.backward()
    assert w.grad.item() == 18 and w.grad.dtype == "float32"


# --- a model ---


def step(model, optimizer, ids, targets, low):
    with amp.autocast(model.device, low):
        loss = model.loss(ids, targets)
    loss.backward()
    optimizer.clip_grad_norm(1.0)
    optimizer.step()
    optimizer.reset_grad()
    return loss


@pytest.mark.parametrize("low", LOW)
def test_master_weights_learn(device, low):
    model = Pythia(CONFIG, device=device)
    optimizer = AdamW(model.parameter_groups(), lr=3e-3)
    ids, targets = batch(device, 1, 32)
    with amp.autocast(device, low):
        loss = model.loss(ids, targets)
    exact = model.loss(ids, targets)
    loss.backward()
    assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {"float32"}
    assert loss.dtype == "float32" and abs(loss.item() - exact.item()) < 0.02
    found = [step(model, optimizer, ids, targets, low).item() for _ in range(6)]
    assert {x.dtype for x in optimizer.m.values()} == {"float32"}
    assert found[-1] < found[0] - 0.5


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("pattern", [None, "local"])
def test_a_step_on_meta_makes_the_allocations_of_a_real_step(cpu, pattern, low):
    peaks = []
    for device in (cpu, ndl.meta()):
        model = Pythia(CONFIG.with_sparse(pattern, block=16) if pattern else CONFIG, device=device)
        optimizer = AdamW(model.parameter_groups())
        ids, targets = batch(device)
        for _ in range(2):
            start = device.memory_stats()["live"]
            device.reset_peak()
            step(model, optimizer, ids, targets, low)
        peaks.append(device.memory_stats()["peak"] - start)
        del model, optimizer, ids, targets
    assert peaks[0] == peaks[1] > 0


def test_nothing_stays_behind(cpu):
    model = Pythia(CONFIG, device=cpu)
    optimizer = AdamW(model.parameter_groups())
    ids, targets = batch(cpu)
    gc.collect()
    gc.disable()
    try:
        live = []
        for n in range(30):
            step(model, optimizer, ids, targets, "bfloat16")
            if n in (2, 29):
                live.append((cpu.memory_stats()["live"], autograd.TENSOR_COUNTER))
        assert live[0] == live[1]
    finally:
        gc.enable()


def test_layers_of_the_course_run_in_a_region(host):
    with amp.autocast(host):
        layer = nn.TransformerLayer(16, 2, 8, 32, device=host)
        out = layer(tensor((2, 5, 16), host))
        loss = (out * out).sum()
    loss.backward()
    assert out.dtype == loss.dtype == "float32"
    assert {p.grad.dtype for p in layer.parameters()} == {"float32"}
