"""Mixed precision: which op runs in which dtype, master weights, what is kept, the loss scale."""

import argparse
import gc
import math
import threading
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import needle as ndl
from devices import usable
from needle import amp, autograd, memory, nn, ops
from needle.backend_ndarray.block_layout import BlockLayout
from needle.errors import CheckpointError, DataError, DeviceError, DTypeError, GraphError
from needle.models import Pythia, PythiaConfig, train_step
from needle.optim import SGD, Adam, AdamW

LOW = ("bfloat16", "float16")
PRECISION = {"bfloat16": "bf16", "float16": "fp16"}
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
    "rnn": lambda t: ops.rnn(t((3, 2, 5)), t((2, 4)), t((5, 4)), t((4, 4)), t((4,))),
    "lstm": lambda t: ops.lstm(t((3, 2, 5)), t((2, 4)), t((2, 4)), t((5, 16)), t((4, 16)), t((16,)))[0],
    "attention": lambda t: ops.attention(t((1, 2, 16, 8)), t((1, 2, 16, 8)), t((1, 2, 16, 8))),
    "conv": lambda t: ops.conv(t((1, 6, 6, 2)), t((3, 3, 2, 4))),
    "conv_bias": lambda t: ops.conv(t((1, 6, 6, 2)), t((3, 3, 2, 4)), bias=t((4,))),
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
        targets = ndl.Tensor([1, 0], device=host, dtype="int32", requires_grad=False)
        x, w, beside = (tensor((2, 2), host, dtype) for dtype in ("float64", "float64", "float32"))
        run = lambda: (x @ w, beside @ w, ops.linear_cross_entropy(x, w, targets))  # noqa: E731
        found = run()
        with amp.autocast(host, enabled=False):
            for f, expected in zip(found, run()):
                assert f.dtype == "float64" and np.array_equal(f.numpy(), expected.numpy())
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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_logits_that_are_not_kept_are_of_the_lower_dtype(device, dtype):
    hidden, weight = (ndl.Tensor(rng.standard_normal(shape), device=device) for shape in ((5, 8), (8, 30)))
    ids = ndl.Tensor(np.arange(5), device=device, dtype="int32", requires_grad=False)
    with amp.autocast(device, dtype):
        found = ops.linear_cross_entropy(hidden, weight, ids)
    wanted = ops.linear_cross_entropy(ops.astype(hidden, dtype), ops.astype(weight, dtype), ids)
    assert found.dtype == "float32" and found.item() == wanted.item() != ops.linear_cross_entropy(hidden, weight, ids).item()


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


def test_each_thread_has_its_own_regions(host):
    a = tensor((2, 2), host)
    opened, go_on, seen = threading.Event(), threading.Event(), []

    def other():
        seen.append((a @ a).dtype)
        with amp.autocast(host, "float16"), autograd.rematerialize():
            opened.set()
            assert go_on.wait(60)
            seen.append((a @ a).dtype)
        seen.append((a @ a).dtype)

    thread = threading.Thread(target=other)
    with amp.autocast(host, "bfloat16"):
        thread.start()
        assert opened.wait(60)
        assert (a @ a).dtype == "bfloat16" and autograd.current_segment() is None
    go_on.set()
    thread.join()
    assert seen == ["float32", "float16", "float32"] and (a @ a).dtype == "float32"


def test_a_region_is_of_one_device():
    here, there = tensor((2, 2), ndl.cpu_numpy()), tensor((2, 2), ndl.meta())
    with amp.autocast("meta"):
        assert (here @ here).dtype == "float32" and (there @ there).dtype == "bfloat16"
        with amp.autocast("cpu_numpy", "float16"):
            assert (here @ here).dtype == "float16" and (there @ there).dtype == "bfloat16"
    assert (amp.autocast("cpu").dtype, amp.autocast("cuda").dtype) == ("bfloat16", "float16")
    assert amp.autocast("cpu", np.float16).dtype == "float16"


def test_a_device_of_ones_own_has_regions():
    own = ndl.backend_ndarray.BackendDevice("own_of_amp", ndl.cpu_numpy().mod)  # a name for each: devices are equal by it
    x = tensor((2, 2), own)
    with amp.autocast(own):
        assert (x @ x).dtype == amp.get_autocast_dtype(own) == "bfloat16"


def test_a_region_of_an_absent_device_warns():
    absent = ndl.backend_ndarray.BackendDevice("absent_from_amp", None)
    with pytest.warns(UserWarning, match=r"\[autocast\] absent_from_amp\(\) is absent, so that its region lowers nothing: it was"):
        with amp.autocast(absent):
            pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with amp.autocast(absent, enabled=False):
            pass


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
        with amp.autocast(host):
            assert (x @ w).inputs[1] is first.inputs[1]
        w.data = w.data * 2
        third = x @ w
        assert third.inputs[1] is not first.inputs[1]
        w.realize_cached_data()[0, 0] = 100.0
        assert (x @ w).inputs[1] is not third.inputs[1]
    with amp.autocast(host, cache_enabled=False):
        assert (x @ w).inputs[1] is not (x @ w).inputs[1]
    np.testing.assert_allclose(third.numpy().astype(np.float32), 2 * second.numpy().astype(np.float32), rtol=0.02)
    assert amp.current_autocast() is None


def test_only_parameters_are_cast_once(host):
    w, batch = tensor((3, 3), host), tensor((2, 3), host, requires_grad=False)
    inner = ops.tanh(w)[:2]
    with amp.autocast(host):
        y = batch @ w + inner @ w
        assert len(amp.kept_casts()) == 1, "a batch or an activation is kept"
    y.sum().backward()


def test_a_parameter_that_has_another_array_is_cast_again_without_a_graph(host):
    """As an evaluation of averaged weights gives it one, which may have been made before the region."""
    other = tensor((3, 3), host, requires_grad=False)
    w, x = tensor((3, 3), host), tensor((2, 3), host, requires_grad=False)
    with ndl.no_grad(), amp.autocast(host):
        x @ w
        w.data = other * 0
        assert (x @ w).numpy().tolist() == [[0] * 3] * 2
        w.data = other
        np.testing.assert_array_equal((x @ w).numpy(), (x @ other).numpy())


def test_casts_go_with_the_graph(cpu):
    w, x = tensor((100, 100), cpu), tensor((2, 100), cpu, requires_grad=False)
    gc.collect()  # errors of other tests, which may hold themselves and arrays
    before = cpu.memory_stats()["live"]
    with amp.autocast(cpu):
        loss = (x @ w).sum()
        assert cpu.memory_stats()["live"] - before >= 20_000
    loss.backward()
    del loss
    assert cpu.memory_stats()["live"] - before == 40_000  # the gradient


@pytest.mark.parametrize("training", [True, False])
def test_a_region_around_a_loop_keeps_no_batch(cpu, training):
    """Which requires a gradient unless told otherwise, as a parameter does."""
    w, live = tensor((100, 100), cpu), set()
    with amp.autocast(cpu):
        for _ in range(4):
            if training:
                (tensor((20, 100), cpu) @ w).sum().backward()
            else:
                with ndl.no_grad():
                    tensor((20, 100), cpu) @ w
            live.add(cpu.memory_stats()["live"])
    assert len(live) == 1


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


def test_checkpointing_casts_a_parameter_once_not_at_each_use(host):
    def build(device, again=False):
        cell = nn.LSTM(8, 64, device=device)
        x = ndl.Tensor(np.zeros((20, 1, 8)), device=device, requires_grad=False)
        if again:
            ndl.remat(cell)

        def step():
            with amp.autocast(device, "bfloat16"):
                loss = cell(x)[0].sum()
            loss.backward()

        return step

    plain, again = memory.peak_bytes(build, device=host), memory.peak_bytes(partial(build, again=True), device=host)
    assert again <= plain


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
    found = [train_step(model, optimizer, [(ids, targets)], precision=PRECISION[low]).loss for _ in range(6)]
    assert {x.dtype for x in optimizer.m.values()} == {"float32"}
    assert found[-1] < found[0] - 0.5


def test_nothing_stays_behind(cpu):
    model = Pythia(CONFIG, device=cpu)
    optimizer = AdamW(model.parameter_groups())
    ids, targets = batch(cpu)
    gc.collect()
    gc.disable()
    try:
        live = []
        for n in range(30):
            train_step(model, optimizer, [(ids, targets)], precision="bf16")
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


# --- the loss scale ---


def with_gradients(device, values, optimizer=SGD):
    """An optimizer of one parameter per entry, all 1, whose gradients are ``values``."""
    params = [nn.Parameter(np.ones(np.shape(v)), device=device) for v in values]
    opt = optimizer(params, lr=0.5)
    return opt, params, lambda scaler: give(params, values, scaler)


def give(params, values, scaler):
    for p, v in zip(params, values, strict=True):
        p.grad = ndl.Tensor(np.asarray(v) * scaler.get_scale(), device=p.device, dtype="float32", requires_grad=False)


def test_a_scaled_step_is_the_step_without(device):
    results = []
    for enabled in (True, False):
        w = nn.Parameter(np.linspace(-1, 1, 12).reshape(3, 4), device=device)
        x = ndl.Tensor(np.arange(6).reshape(2, 3), device=device, requires_grad=False)
        unused = nn.Parameter(np.ones(2), device=device)  # has no gradient
        optimizer, scaler = AdamW([w, unused], lr=0.1), amp.GradScaler(enabled=enabled)
        for _ in range(3):
            loss = ops.tanh(x @ w).sum()
            scaled = scaler.scale(loss)
            assert (scaled is loss) is not enabled
            for part in (scaled * 0.25, scaled * 0.75) if enabled else (loss,):  # accumulated, and at once
                part.backward(accumulate=enabled)
            scaler.unscale_(optimizer)
            norm = optimizer.clip_grad_norm(0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.reset_grad()
        results.append((w.numpy(), norm.numpy()))
        assert scaler.is_enabled() is enabled and scaler.get_scale() == (4096 if enabled else 1)
        assert scaler.skipped_steps == 0 and scaler.steps == (3 if enabled else 0)
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5)


@pytest.mark.parametrize("optimizer", [SGD, Adam, AdamW])
def test_clipping_goes_with_the_gradients_of_a_skipped_step(host, optimizer):
    opt, (p,), fill = with_gradients(host, [np.full(3, np.nan)], optimizer)
    scaler = amp.GradScaler()
    fill(scaler)
    scaler.unscale_(opt)
    opt.clip_grad_norm(1.0)
    scaler.step(opt)
    with pytest.warns(amp.SkippedStepWarning):
        scaler.update()
    (p * scaler.get_scale()).sum().backward()
    scaler.step(opt)
    assert (p.numpy() < 1).all()


@pytest.mark.parametrize("optimizer", [SGD, Adam, AdamW])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_gradients_that_are_not_finite_skip_the_step(device, optimizer, bad):
    values = [np.ones((3, 50)), np.array([1.0, bad, 2.0]), np.ones(4)]
    opt, params, fill = with_gradients(device, values, optimizer)
    scaler = amp.GradScaler(hysteresis=1)
    fill(scaler)
    scaler.unscale_(opt)
    opt.clip_grad_norm(1.0)
    scaler.step(opt)
    opt.reset_grad()
    with pytest.warns(amp.SkippedStepWarning, match="step skipped, 1 of 1; scale 4096 -> 2048"):
        scaler.update()
    assert all((p.numpy() == 1).all() for p in params) and scaler.get_scale() == 2048
    assert getattr(opt, "t", 0) == 0
    values[1][1] = 0.0
    fill(scaler)
    scaler.step(opt)
    scaler.update()
    assert all((p.numpy()[..., 0] < 1).all() for p in params)
    assert (scaler.steps, scaler.skipped_steps) == (2, 1)


def test_unscaled_gradients_are_divided_in_place_and_once(device):
    opt, params, fill = with_gradients(device, [np.arange(6.0).reshape(2, 3), [0.5]])
    w = nn.Parameter(np.ones((4, 5)), device=device)
    opt.params.append(w)
    scaler = amp.GradScaler()
    fill(scaler)
    scaler.scale(ops.transpose(w).sum()).backward()  # a broadcast view as the gradient
    before = [p.grad.realize_cached_data() for p in params]
    scaler.unscale_(opt)
    assert all(p.grad.realize_cached_data()._handle is array._handle for p, array in zip(params, before, strict=True))
    np.testing.assert_array_equal(params[0].grad.numpy(), np.arange(6).reshape(2, 3))
    np.testing.assert_array_equal(w.grad.numpy(), np.ones((4, 5)))
    with pytest.raises(GraphError, match="once"):
        scaler.unscale_(opt)
    scaler.step(opt)
    with pytest.raises(GraphError, match="once"):
        scaler.step(opt)
    scaler.update()
    np.testing.assert_array_equal(w.numpy(), np.full((4, 5), 0.5))


def schedule(scaler, results):
    """The scale after each of some steps, of which False is one with infinities."""
    opt, params, _ = with_gradients(ndl.cpu_numpy(), [[1.0]])
    scales = []
    for good in results:
        give(params, [[1.0 if good else np.inf]], scaler)
        scaler.step(opt)
        if good:
            scaler.update()
        else:
            with pytest.warns(amp.SkippedStepWarning):
                scaler.update()
        scales.append(scaler.get_scale())
    return scales


def test_unscaling_leaves_what_others_hold(host):
    h, w = (nn.Parameter(np.random.default_rng(0).standard_normal(s), device=host) for s in ((3, 4), (4, 5)))
    y, ids = (h * 2).retain_grad(), ndl.Tensor([0, 1, 2], device=host, dtype="int32", requires_grad=False)
    loss = ops.linear_cross_entropy(y, w, ids)  # its gradients are made in forward and belong to the graph
    loss.backward(retain_graph=True)
    first = [p.grad.numpy() for p in (w, y)]
    amp.GradScaler().unscale_(SGD([h, w]))
    np.testing.assert_array_equal(y.grad.numpy(), first[1])
    loss.backward()
    np.testing.assert_array_equal(w.grad.numpy(), first[0])


def test_gradients_with_a_graph_are_unscaled_once_and_their_graph_is_not(host):
    a, b, c = (nn.Parameter(np.full(2, x), device=host) for x in (1.0, 2.0, 3.0))
    scaler = amp.GradScaler(init_scale=8)
    scaler.scale((a + b + c * c * c).sum()).backward(create_graph=True)  # one array is the gradient of a and of b
    slope = c.grad
    scaler.unscale_(SGD([a, b, c]))
    for p, expected in ((a, 1), (b, 1), (c, 27)):
        np.testing.assert_array_equal(p.grad.numpy(), [expected] * 2)
    (slope * slope).sum().backward()
    np.testing.assert_array_equal(c.grad.numpy(), [2 * (8 * 27) * (8 * 18)] * 2)


def test_a_scaler_that_is_not_enabled_changes_nothing(host):
    scaler = amp.GradScaler(init_scale=64, enabled=False)
    loss = ndl.Tensor([3.0], device=host)
    assert scaler.scale(loss) is loss and scaler.get_scale() == 1 and not scaler.is_enabled() and scaler.state_dict() == {}
    for state in (amp.GradScaler().state_dict(), {}):
        scaler.load_state_dict(state)
    opt, params, fill = with_gradients(host, [[np.inf, 1.0]])
    fill(scaler)
    scaler.unscale_(opt)
    scaler.step(opt)
    scaler.update()
    np.testing.assert_array_equal(params[0].numpy(), [-np.inf, 0.5])
    assert (scaler.get_scale(), scaler.steps, scaler.skipped_steps) == (1, 0, 0)


def test_the_scale_follows_megatron():
    """Growth after an interval of good steps; the first overflow is forgiven, later ones are not until the scale has grown."""
    scaler = amp.GradScaler(init_scale=16, growth_interval=3, hysteresis=2)
    assert schedule(scaler, [True, True, False]) == [16, 16, 16]
    assert schedule(scaler, [True, True, False, False]) == [16, 16, 8, 4]
    assert schedule(scaler, [True, True, True]) == [4, 4, 8]
    assert schedule(scaler, [False, False]) == [8, 4]
    assert (scaler.steps, scaler.skipped_steps) == (12, 5)


def test_the_schedule_is_by_default_the_one_that_pythia_was_trained_with():
    scaler = amp.GradScaler()
    assert schedule(scaler, [False, False]) == [4096, 2048]
    scaler.load_state_dict({**scaler.state_dict(), "good_steps": 998})
    assert schedule(scaler, [True, True, False, False]) == [2048, 4096, 4096, 2048]
    scaler.load_state_dict({**scaler.state_dict(), "scale": 1.5})
    assert schedule(scaler, [False]) == [1]


def test_the_scale_does_not_grow_beyond_what_float32_holds():
    scaler = amp.GradScaler(init_scale=2.0**126, growth_interval=1)
    assert schedule(scaler, [True, True, True, False, False, True]) == [2.0**n for n in (127, 127, 127, 127, 126, 127)]


def test_a_shorter_interval_than_that_of_the_saved_state_is_kept_to():
    scaler = amp.GradScaler(init_scale=16, growth_interval=9)
    schedule(scaler, [True] * 8)
    shorter = amp.GradScaler(growth_interval=3)
    shorter.load_state_dict(scaler.state_dict())
    assert schedule(shorter, [True] * 4) == [32, 32, 32, 64]


def test_at_the_least_scale_there_is_no_going_on():
    scaler = amp.GradScaler(init_scale=4, min_scale=2, hysteresis=1)
    opt, params, _ = with_gradients(ndl.cpu_numpy(), [[1.0]])
    assert schedule(scaler, [False, True]) == [2, 2]
    give(params, [[np.nan]], scaler)
    scaler.step(opt)
    with pytest.raises(FloatingPointError, match="2 of 3 steps skipped"):
        scaler.update()


def test_two_optimizers_under_one_scale(host):
    (bad, bad_params, fill_bad), (good, good_params, fill_good) = (with_gradients(host, [[v]]) for v in (np.inf, 1.0))
    scaler = amp.GradScaler(hysteresis=1)
    fill_bad(scaler)
    fill_good(scaler)
    scaler.step(bad)
    scaler.step(good)
    with pytest.warns(amp.SkippedStepWarning):
        scaler.update()
    assert bad_params[0].item() == 1 and good_params[0].item() < 1 and scaler.get_scale() == 2048


def test_infinite_gradients_count_where_the_step_is_left_out(host):
    (bad, _, fill_bad), (good, good_params, fill_good) = (with_gradients(host, [[v]]) for v in (np.inf, 1.0))
    scaler = amp.GradScaler(hysteresis=1)
    for others in ([good], []):
        fill_bad(scaler)
        fill_good(scaler)
        scaler.unscale_(bad)
        for optimizer in others:
            scaler.step(optimizer)
        with pytest.warns(amp.SkippedStepWarning):
            scaler.update()
    assert good_params[0].item() < 1 and scaler.get_scale() == 1024 and scaler.skipped_steps == 2


def test_one_array_as_two_gradients_is_unscaled_once(host):
    optimizer, params, _ = with_gradients(host, [[0.0], [0.0]])
    scaler = amp.GradScaler(init_scale=4.0)
    params[0].grad = params[1].grad = tensor((1,), host, requires_grad=False) * 0 + 8
    scaler.unscale_(optimizer)
    assert [p.grad.item() for p in params] == [2, 2]


def test_a_gradient_that_is_a_part_of_an_array_leaves_the_rest_as_it_is(host):
    optimizer, (p,), _ = with_gradients(host, [[0.0, 0.0]])
    scaler = amp.GradScaler(init_scale=4.0)
    whole = tensor((4,), host, requires_grad=False) * 0 + 8
    p.grad = whole[1:3]
    scaler.unscale_(optimizer)
    assert p.grad.numpy().tolist() == [2, 2] and whole.numpy().tolist() == [8] * 4


def test_gradients_after_a_step_wait_for_update(host):
    optimizer, (p,), fill = with_gradients(host, [[1.0]])
    scaler = amp.GradScaler()
    fill(scaler)
    scaler.step(optimizer)
    (scaler.scale(p) * 2).backward()
    with pytest.raises(GraphError, match="between two calls of update"):
        scaler.unscale_(optimizer)
    scaler.update()
    scaler.unscale_(optimizer)
    assert p.grad.item() == 2


def test_the_scale_is_saved_and_loaded():
    scaler = amp.GradScaler(init_scale=64, growth_interval=4)
    schedule(scaler, [True, False, True, True])
    other = amp.GradScaler(growth_interval=4)
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict()
    more = [True, False, True, False, True, True, True, True]
    assert schedule(other, more) == schedule(scaler, more)
    with pytest.raises(CheckpointError, match="patience"):
        other.load_state_dict({k: v for k, v in scaler.state_dict().items() if k != "patience"})
    for key, value in (("scale", np.nan), ("scale", -2.0), ("scale", 0), ("scale", np.inf), ("steps", -1), ("good_steps", "a")):
        with pytest.raises(CheckpointError, match=rf"{key} of the state is {value!r}"):
            other.load_state_dict({**scaler.state_dict(), key: value})
    assert other.state_dict() == scaler.state_dict()


def test_the_check_leaves_no_temporaries(cpu):
    opt, params, fill = with_gradients(cpu, [np.ones(100_000), np.ones(5)])
    scaler = amp.GradScaler()
    fill(scaler)
    start = cpu.memory_stats()["live"]
    cpu.reset_peak()
    scaler.unscale_(opt)
    assert cpu.memory_stats()["peak"] - start <= 64
    opt.params.clear()
    scaler.step(opt)
    scaler.update()
    assert cpu.memory_stats()["live"] == start


@pytest.mark.parametrize("arguments, said", [
    ({"init_scale": 0}, "init_scale"), ({"init_scale": "cuda"}, "init_scale"), ({"growth_factor": 0.5}, "growth_factor"),
    ({"backoff_factor": 1.0}, "backoff_factor"), ({"growth_interval": 0}, "growth_interval"), ({"hysteresis": 0}, "hysteresis"),
    ({"init_scale": np.nan}, "init_scale"), ({"min_scale": 0}, "min_scale"),
])  # fmt: skip
def test_bad_scales(arguments, said):
    with pytest.raises(ValueError, match=said):
        amp.GradScaler(**arguments)


def test_the_least_scales():
    assert amp.GradScaler(init_scale=2, growth_factor=1.0, min_scale=2).get_scale() == 2


def test_misuse_of_the_scaler(host):
    scaler = amp.GradScaler()
    with pytest.raises(GraphError, match="no step"):
        scaler.update()
    for call in (scaler.step, scaler.unscale_):
        with pytest.raises(TypeError, match=r"\[unscale_\] optimizer is of type Linear \(accepted: an Optimizer\)"):
            call(nn.Linear(1, 1))
    opt, params, _ = with_gradients(host, [[1.0]])
    with pytest.raises(GraphError, match="no parameter has a gradient"):
        scaler.step(opt)
    params[0].grad = ndl.Tensor([1.0], device=host, dtype="float16", requires_grad=False)
    with pytest.raises(DTypeError, match="float16"):
        scaler.unscale_(opt)


def test_gradients_of_two_devices_are_not_unscaled(host):
    others = usable("cpu" if host.name == "cpu_numpy" else "cpu_numpy")
    params = [nn.Parameter([1.0], device=device) for device in (host, others)]
    for p in params:
        p.grad = ndl.Tensor([4.0], device=p.device)
    with pytest.raises(DeviceError, match=r"\[unscale_\] arrays are on different devices"):
        amp.GradScaler(init_scale=2.0).unscale_(SGD(params))
    assert [p.grad.item() for p in params] == [4.0, 4.0]


def test_gradients_whose_unscaling_was_interrupted_are_not_used(host, monkeypatch):
    opt, params, fill = with_gradients(host, [[1.0]])
    scaler, unscale = amp.GradScaler(), amp.kernels.unscale

    def interrupted(grads, factor):
        unscale(grads, factor)
        raise KeyboardInterrupt

    fill(scaler)
    monkeypatch.setattr(amp.kernels, "unscale", interrupted)
    with pytest.raises(KeyboardInterrupt):
        scaler.step(opt)
    monkeypatch.undo()
    with pytest.raises(GraphError, match=r"unscale_ was interrupted, .* \(accepted: those of a new backward\)"):
        scaler.step(opt)
    scaler.forget()
    fill(scaler)
    scaler.step(opt)
    scaler.update()
    assert params[0].item() < 1 and scaler.skipped_steps == 0


def test_a_step_that_failed_can_be_made_again(host):
    opt, params, fill = with_gradients(host, [[1.0]])
    scaler, step = amp.GradScaler(), opt.step
    fill(scaler)
    opt.step = lambda: (_ for _ in ()).throw(MemoryError)
    with pytest.raises(MemoryError):
        scaler.step(opt)
    opt.step = step
    scaler.step(opt)
    scaler.update()
    assert params[0].item() < 1 and scaler.skipped_steps == 0


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_step_after_one_that_failed_has_its_gradients_unscaled(host, unscale, micro_batches):
    w = nn.Parameter(np.ones(3), device=host)
    opt, scaler = SGD([w], lr=0.5), amp.GradScaler()
    step = opt.step

    def whole_step():
        opt.reset_grad()
        for _ in range(micro_batches):
            scaler.scale(w.sum() / micro_batches).backward(accumulate=True)
        if unscale:
            scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()

    opt.step = lambda: (_ for _ in ()).throw(MemoryError)
    for _ in range(2):
        with pytest.raises(MemoryError):
            whole_step()
    opt.step = step
    whole_step()
    np.testing.assert_allclose(w.numpy(), np.full(3, 0.5), rtol=1e-6)


def test_what_is_added_to_unscaled_gradients_is_no_reason_to_unscale_them_again(host):
    w = nn.Parameter(np.ones(3), device=host)
    opt, scaler = SGD([w]), amp.GradScaler()
    scaler.scale(w.sum()).backward()
    scaler.unscale_(opt)
    scaler.scale(w.sum()).backward(accumulate=True)
    with pytest.raises(GraphError, match="once"):
        scaler.unscale_(opt)


def test_float16_without_a_scale_loses_what_the_scale_keeps(host):
    """A gradient of 1e-8 is nothing in float16."""
    for enabled in (False, True):
        w = nn.Parameter(np.ones((1, 1)), device=host)
        x = ndl.Tensor([[1.0]], device=host, requires_grad=False)
        optimizer, scaler = SGD([w], lr=1.0), amp.GradScaler(enabled=enabled)
        with amp.autocast(host, "float16"):
            out = x @ w
        scaler.scale(out.astype("float32") * 1e-8).backward()
        scaler.unscale_(optimizer)
        assert (w.grad.item() == pytest.approx(1e-8, rel=1e-2)) is enabled


# --- the loss curve ---


def curve(text, precision, seed):
    """The losses of 60 steps of a small model on real text, a token per byte."""
    model = Pythia(PythiaConfig(layers=2, width=64, heads=4, feed_forward=256, vocab_size=128), device=ndl.cpu(), seed=seed)
    optimizer, scaler = AdamW(model.parameter_groups(), lr=3e-3), amp.GradScaler(enabled=precision == "fp16")
    places, found = np.random.default_rng(0), []
    for _ in range(60):
        rows = text[places.integers(0, len(text) - 65, 8)[:, None] + np.arange(65)]
        ids = [ndl.Tensor(x, device=ndl.cpu(), dtype="int32", requires_grad=False) for x in (rows[:, :-1], rows[:, 1:])]
        found.append(train_step(model, optimizer, [ids], precision=precision, scaler=scaler).loss)
    return np.array(found)


def test_the_loss_curve_is_that_of_float32(cpu):
    """Closer to it than another random start comes."""
    text = np.frombuffer(Path(argparse.__file__).read_bytes(), np.uint8)
    text = text[text < 128]
    exact, other = (curve(text, "fp32", seed) for seed in (0, 1))
    noise = np.abs(exact - other)[10:].mean()
    assert exact[-10:].mean() < exact[0] - 1.5
    for precision in ("bf16", "fp16"):
        low = curve(text, precision, 0)
        assert 0 < np.abs(low - exact)[10:].mean() < noise / 2
        assert abs((low - exact)[-10:].mean()) < noise / 2


@pytest.mark.parametrize("count", [1, 2])
def test_the_norm_is_that_of_all_gradients(device, count):
    config = PythiaConfig(layers=1, width=16, heads=2, feed_forward=32, vocab_size=40, max_seq_len=8)
    rng = np.random.default_rng(0)
    batches = [
        tuple(ndl.Tensor(rng.integers(0, 40, (2, 8)), device=device, dtype="int32", requires_grad=False) for _ in range(2))
        for _ in range(count)
    ]
    model = Pythia(config, device=device)
    losses = [model.loss(ids, targets) for ids, targets in batches]
    for loss in losses:
        (loss * (1 / count)).backward(accumulate=True)
    mean = sum(loss.item() for loss in losses) / count
    expected = math.sqrt(sum(float((p.grad.numpy().astype(np.float64) ** 2).sum()) for p in model.parameters()))
    updated = []
    for scaler in (None, ndl.amp.GradScaler()):
        again = Pythia(config, device=device)
        step = train_step(again, AdamW(again.parameters(), eps=1e-3), batches, count, max_norm=1e-3, scaler=scaler)
        assert step.grad_norm == pytest.approx(expected, rel=1e-5)
        assert step.loss == pytest.approx(mean, rel=1e-6) and 3 < mean < 5
        updated.append(again.embed_out.numpy())
    np.testing.assert_allclose(*updated, rtol=0, atol=1e-7)
    updated = []
    for more in ({}, {"max_norm": 1.0}):
        again = Pythia(config, device=device)
        assert train_step(again, SGD(again.parameters(), lr=1.0), batches, count, **more).grad_norm > 0.5
        updated.append(again.embed_out.numpy())
    np.testing.assert_array_equal(*updated)


def test_a_step_that_failed_leaves_nothing_to_the_next(host):
    config = PythiaConfig(layers=1, width=16, heads=2, feed_forward=32, vocab_size=40, max_seq_len=8)
    ids = ndl.Tensor(np.arange(16).reshape(2, 8) % 7, device=host, dtype="int32", requires_grad=False)
    bad = ndl.Tensor(np.full((2, 8), 99), device=host, dtype="int32", requires_grad=False)
    model, fresh = (Pythia(config, device=host) for _ in range(2))
    optimizer = AdamW(model.parameters())
    short = r"\[train_step\] micro_batches ended after 1 \(accepted: at least count, 2\)"
    for batches, error, said in (([(ids, ids), (bad, ids)], IndexError, "99"), ([(ids, ids)], DataError, short)):
        with pytest.raises(error, match=said):
            train_step(model, optimizer, batches, 2)
    step = train_step(model, optimizer, [(ids, ids)] * 2, 2)
    assert step == train_step(fresh, AdamW(fresh.parameters()), [(ids, ids)] * 2, 2)


def test_the_step_after_one_that_was_interrupted(host):
    """By Ctrl-C behind the optimizer's step, before the scaler's update."""
    config = PythiaConfig(layers=1, width=16, heads=2, feed_forward=32, vocab_size=40, max_seq_len=8)
    ids = ndl.Tensor(np.arange(16).reshape(2, 8) % 7, device=host, dtype="int32", requires_grad=False)
    model, scaler = Pythia(config, device=host), amp.GradScaler()
    optimizer, update = AdamW(model.parameters()), scaler.update
    scaler.update = lambda: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        train_step(model, optimizer, [(ids, ids)], precision="fp16", scaler=scaler)
    scaler.update = update
    train_step(model, optimizer, [(ids, ids)], precision="fp16", scaler=scaler)
    assert optimizer.t == 2 and scaler.steps == 1


def test_every_optimizer_can_take_a_step_of_a_model(cpu):
    config = PythiaConfig(layers=1, width=16, heads=2, feed_forward=32, vocab_size=40, max_seq_len=8)
    ids = ndl.Tensor(np.arange(16).reshape(2, 8) % 7, device=cpu, dtype="int32", requires_grad=False)
    norms = [
        train_step(m, kind(m.parameters()), [(ids, ids)]).grad_norm
        for kind in (SGD, Adam, AdamW)
        for m in [Pythia(config, device=cpu)]
    ]
    assert norms[0] == pytest.approx(norms[2], rel=1e-6) and norms[1] == norms[0]
