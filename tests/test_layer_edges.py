"""What lies at the edges of layers, optimizers and data: shared and moved parameters, wrong shapes and numbers, files that are
none."""

import gc
import gzip
import operator
import pickle
import struct
import threading
import time
import tracemalloc
import weakref
from dataclasses import dataclass

import numpy as np
import pytest

import needle as ndl
from devices import usable
from making import leaf
from needle import amp, data, init, memory, nn, ops
from needle.backend_ndarray.block_layout import BlockLayout
from needle.backend_ndarray.ndarray import NDArray
from needle.checkpoints.folder import CheckpointFolder
from needle.data.prefetch import Prefetch
from needle.data.text import TokenBatches
from needle.errors import CheckpointError, DataError, DeviceError, DTypeError, GraphError, OutOfMemoryError, ShapeError
from needle.models import GenerationConfig, Pythia, PythiaConfig, score_endings, score_text, train_step
from needle.optim import SGD, Adam, AdamW, Optimizer


@pytest.mark.parametrize("kind", [lambda ps: SGD(ps, momentum=0.5), Adam, AdamW])
@pytest.mark.parametrize("shape", [(4000,), (2, 2)])
def test_a_parameter_that_has_another_shape_than_its_states(device, kind, shape):
    first, p = (nn.Parameter(leaf(np.ones(4), device)) for _ in range(2))
    optimizer = kind([first, p])
    (first * p).sum().backward()
    optimizer.step()
    p.data = leaf(np.ones(shape), device)
    ((p * 2).sum() + first.sum()).backward()
    before = [x.numpy() for x in (first, p)], optimizer.state_dict()
    with pytest.raises(ShapeError, match=r"a state is \(4,\), its parameter is "):
        optimizer.step()
    after = [x.numpy() for x in (first, p)], optimizer.state_dict()
    np.testing.assert_equal(after, before)


@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
@pytest.mark.parametrize("with_gradient", [False, True])
def test_a_parameter_on_another_device_than_its_gradient_or_the_others(cpu, kind, with_gradient):
    first, second = (nn.Parameter(leaf(np.ones(2), cpu)) for _ in range(2))
    optimizer = kind([first, second])
    (first.sum() + second.sum()).backward()
    second.data = second.data.to("cpu_numpy")
    if with_gradient:
        second.grad = second.grad.to("cpu_numpy")
    if with_gradient and kind is SGD:  # which has nothing that is of all parameters
        optimizer.step()
        return
    with pytest.raises(DeviceError, match="different devices"):
        optimizer.step()
    assert np.all(first.numpy() == 1) and np.all(second.numpy() == 1) and getattr(optimizer, "t", 0) == 0


@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
def test_the_norm_of_no_gradients(device, kind):
    optimizer = kind([nn.Parameter(leaf([1.0, 2.0], device))])
    norm = optimizer.clip_grad_norm(1.0)
    optimizer.step()
    assert float(norm) == 0 and optimizer.params[0].numpy().tolist() == [1, 2]
    assert kind is not AdamW or (norm.device, norm.shape) == (device, (1,))


def test_adamw_clips_a_small_norm_as_pytorch_does(device):
    p = nn.Parameter(leaf([1.0, 2.0], device))
    p.grad = leaf([3e-6, 4e-6], device)
    optimizer = AdamW([p], betas=(0.5, 0.9))
    optimizer.clip_grad_norm(3e-6)
    optimizer.step()
    np.testing.assert_allclose(optimizer.m[p].numpy(), [0.75e-6, 1e-6], rtol=1e-5)  # 1e-6 is added to the norm


def test_a_state_on_another_device_than_its_parameter(cpu):
    first, second = (nn.Parameter(leaf(np.ones(2), cpu)) for _ in range(2))
    optimizer = SGD([first, second], momentum=0.5)
    (first.sum() + second.sum()).backward()
    optimizer.step()
    before = first.numpy(), second.numpy(), optimizer.u[first].numpy()
    second.data = second.data.to("cpu_numpy")
    second.grad = second.grad.to("cpu_numpy")
    with pytest.raises(DeviceError, match=r"\[optim\] .*different devices"):
        optimizer.step()
    np.testing.assert_equal((first.numpy(), second.numpy(), optimizer.u[first].numpy()), before)


@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
@pytest.mark.parametrize("shape", [(1,), (3,), (2, 1), (6,)])
def test_a_parameter_of_another_shape_than_its_gradient(device, kind, shape):
    p = nn.Parameter(leaf(np.ones((2, 3)), device))
    p.grad = leaf(np.ones((2, 3)), device)
    p.data = leaf(np.ones(shape), device)
    with pytest.raises(ShapeError, match=r"\[optim\] a gradient is \(2, 3\), its parameter is "):
        kind([p]).step()
    np.testing.assert_array_equal(p.numpy(), 1)


@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
def test_a_gradient_that_does_not_fit_leaves_all_parameters(device, kind):
    first, second = (nn.Parameter(leaf(np.ones(2), device)) for _ in range(2))
    first.grad, second.grad = leaf(np.ones(2), device), leaf(np.ones(2), device)
    second.data = leaf(np.ones(3), device)
    optimizer = kind([first, second])
    with pytest.raises(ShapeError, match=r"a gradient is \(2,\)"):
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
    before = nn.Parameter(leaf(np.ones(2), device))
    before.grad = leaf([1, 1], device)
    optimizer = kind([before, p], lr=1.0)
    with pytest.raises(DTypeError, match="param is int32"):
        optimizer.step()
    np.testing.assert_array_equal(before.numpy(), 1)
    assert getattr(optimizer, "t", 0) == 0


@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
def test_a_gradient_of_whole_numbers_is_one_of_floats(device, kind):
    whole, floats = (nn.Parameter(leaf([1, 1], device)) for _ in range(2))
    whole.grad, floats.grad = leaf([3, -1], device, "int64"), leaf([3, -1], device)
    kind([floats, whole], lr=0.25).step()
    np.testing.assert_array_equal(whole.numpy(), floats.numpy())
    assert whole.numpy()[0] < 1


@pytest.mark.parametrize(
    "kind, named",
    [
        (SGD, {"lr": 0.01, "momentum": 0.0, "weight_decay": 0.0}),
        (Adam, {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}),
        (AdamW, {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}),
    ],
)
def test_what_optimizers_take_for_what_they_are_not_given(host, kind, named):
    found = []
    for given in ({}, named):
        p = nn.Parameter([1.0, 0.0], device=host)
        optimizer = kind([p], **given)
        for grad in ([1.0, 1e-8], [3.0, 1e-8]):
            p.grad = leaf(grad, host)
            optimizer.step()
        found.append(p.numpy())
    np.testing.assert_array_equal(*found)


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
    frozen = nn.Parameter(leaf([1, 2], device), requires_grad=False)
    frozen[0] = 5.0
    np.testing.assert_array_equal(frozen.numpy(), [5, 2])
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_parameter_changes_in_place_without_another_array(device, dtype):
    p = nn.Parameter(leaf(np.random.default_rng(0).standard_normal((100, 70)), device, dtype))
    others = 0.3, p.detach() * 2.0, leaf(np.arange(1.0, 71), device, dtype), leaf([[-3.0]], device, dtype)
    wanted = p.detach() * 1.0
    for operation in (operator.iadd, operator.isub, operator.imul, operator.itruediv):
        for other in others:
            with ndl.no_grad(), memory.peak(device) as peak:
                operation(p, other)
            assert peak.above_start == 0
            wanted = getattr(operator, operation.__name__[1:])(wanted, other)
            np.testing.assert_array_equal(p.numpy().view(np.uint16), wanted.numpy().view(np.uint16))
            p.data, wanted = wanted * 0.5, wanted * 0.5
    wide = leaf(np.full((100, 70), 1 / 3), device, "float64" if dtype == "float32" and device.is_host else "float32")
    wanted = (wanted + wide).detach()
    with ndl.no_grad():
        p += wide  # is rounded once
        for wrong in (leaf(np.ones((2, 100, 70)), device), leaf(np.ones(3), device)):
            with pytest.raises(ShapeError):
                p *= wrong
    np.testing.assert_array_equal(p.numpy(), wanted.numpy().astype(p.numpy().dtype))


def test_parameters_that_are_views_or_integers_change_in_place(device):
    whole = leaf(np.arange(12).reshape(3, 4), device)
    row, turned = nn.Parameter(whole[1]), nn.Parameter(ops.transpose(whole[:, :3]))
    square = nn.Parameter(leaf(np.arange(10_000).reshape(100, 100), device))
    counts = nn.Parameter(leaf([1, 2], device, "int32"), requires_grad=False)
    with ndl.no_grad():
        for p, other in ((row, 2.0), (row, leaf(np.ones(4), device)), (turned, leaf(np.arange(3), device)), (turned, turned)):
            wanted = p.numpy() * (other if isinstance(other, float) else other.numpy())
            p *= other
            np.testing.assert_array_equal(p.numpy(), wanted)
        np.testing.assert_array_equal(whole.numpy()[:, 3], [3, 14, 11])
        square += ops.transpose(square)
        counts /= 2
    np.testing.assert_array_equal(square.numpy(), 101 * np.add.outer(np.arange(100), np.arange(100)))
    assert counts.dtype == "int32" and counts.numpy().tolist() == [0, 1]


def test_a_parameter_that_was_multiplied_in_place_is_not_recomputed_from(device):
    first, second = nn.Linear(2, 2, device=device), nn.Linear(2, 2, device=device)
    loss = ndl.remat(nn.Sequential(first, nn.ReLU(), second), leaf([[1.0, 1.0]], device)).sum()
    with ndl.no_grad():
        first.weight *= 2
    with pytest.raises(GraphError, match="in place"):
        loss.backward()


def test_an_inner_module_keeps_a_part_of_it_in_evaluation(host):
    """By a train() of its own, as fine-tuning keeps statistics: train() of the module around it switched them on again."""

    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.dropout = nn.BatchNorm1d(2, device=host), nn.Dropout()

        def train(self, mode=True):
            super().train(mode)
            self.norm.eval()
            return self

        def forward(self, x):
            return self.norm(x)

    frozen = Frozen()
    model = nn.Sequential(nn.Linear(3, 2, device=host), nn.Residual(frozen)).train()
    assert model[1].training and frozen.training and frozen.dropout.training and not frozen.norm.training
    model(leaf(np.eye(3), host))
    np.testing.assert_array_equal(frozen.norm.running_mean.numpy(), 0)
    assert not model.eval()[1].training and not frozen.dropout.training


def test_the_path_of_a_file_is_no_state():
    model = nn.Linear(2, 2)
    for holder in (model, SGD(model.parameters()), AdamW(model.parameters()), amp.GradScaler()):
        with pytest.raises(
            CheckpointError, match=r"\[load_state_dict\] the state is of type str \(accepted: what state_dict gives"
        ):
            holder.load_state_dict("model.npz")


def test_two_tensors_of_one_path_are_no_state():
    for parts in ({"b.c": nn.Linear(1, 1), "b": {"c": nn.Linear(1, 1)}}, {1: nn.Linear(1, 1), "1": nn.Linear(1, 1)}):
        model = nn.Module()
        model.parts = parts
        for call in (model.state_dict, lambda m=model: m.load_state_dict({})):
            with pytest.raises(CheckpointError, match=r"two tensors have the path parts\.\S+ \(accepted: keys that differ"):
                call()
        assert len(model.parameters()) == 4


def test_a_key_put_into_a_group_is_not_passed_over(device):
    p = nn.Parameter(leaf([1.0, 2.0], device))
    optimizer = SGD([p], momentum=0.5)
    p.sum().backward()
    optimizer.param_groups[0] |= {"momentum": 0.9, "of my own": 1}
    with pytest.raises(ValueError, match=r"\[SGD\] a group has momentum \(accepted: as an attribute of the optimizer"):
        optimizer.step()
    np.testing.assert_array_equal(p.numpy(), [1, 2])
    del optimizer.param_groups[0]["momentum"]
    optimizer.step()


def test_a_loaded_state_is_a_copy(device):
    one, other = (nn.Linear(2, 2, device=device) for _ in range(2))
    other.load_state_dict(dict(one.named_parameters()))
    before = other.weight.numpy()
    one.weight.realize_cached_data().fill(7.0)
    np.testing.assert_array_equal(other.weight.numpy(), before)
    other.load_state_dict({"weight": [[1, 2], [3, 4]], "bias": np.zeros((1, 2))})
    np.testing.assert_array_equal(other.weight.numpy(), [[1, 2], [3, 4]])


def test_a_state_of_torch_that_requires_gradients():
    torch = pytest.importorskip("torch")
    layer = nn.Linear(2, 2)
    layer.load_state_dict({"weight": torch.ones((2, 2)), "bias": torch.nn.Parameter(torch.full((1, 2), 2.0))})
    assert layer.weight.numpy().tolist() == [[1, 1], [1, 1]] and layer.bias.numpy().tolist() == [[2, 2]]


@pytest.mark.parametrize("wrong", [np.full(2, 1j), [1, None], np.array(["a", "b"]), [[1], [2, 3]], [1, 2, 3]], ids=str)
def test_a_state_that_does_not_fit_changes_nothing(device, wrong):
    norm = nn.LayerNorm(2, device=device)
    before = norm.state_dict()
    for name in before:
        with pytest.raises((CheckpointError, DTypeError, ShapeError)):
            norm.load_state_dict({**{key: [3, 4] for key in before}, name: wrong})
        with pytest.raises(CheckpointError, match=r"missing \[\], unexpected \['more'\]"):
            norm.load_state_dict({**{key: [3, 4] for key in before}, "more": [1]})
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


def test_what_is_assigned_in_the_place_of_a_parameter(device):
    """It would be gone from parameters(), and be trained no more, without a word."""
    model = nn.Linear(2, 3, device=device)
    weight = leaf(np.ones((2, 3)), device)
    model.weight = weight
    assert [name for name, _ in model.named_parameters()] == ["weight", "bias"] and isinstance(model.weight, nn.Parameter)
    model(leaf([[1.0, 2.0]], device)).backward()
    SGD(model.parameters(), lr=1.0).step()
    assert model.weight.numpy().tolist() == [[0, 0, 0], [-1, -1, -1]] == weight.numpy().tolist()  # it has its memory
    model.weight = leaf(np.ones((2, 3)), device, requires_grad=False)
    assert not model.weight.requires_grad
    for wrong in (model.weight * 0.5 + leaf(np.ones((2, 3)), device), np.ones((2, 3)), ndl.NDArray([1.0]), False):
        with pytest.raises(TypeError, match=r"\[Linear\] weight would be .* in place of a Parameter"):
            model.weight = wrong
    model.bias = None
    assert model.parameters() == [model.weight] and model(leaf([[1.0, 2.0]], device)).numpy().tolist() == [[3, 3, 3]]
    before = model.weight
    del model.weight
    model.weight = before * 0.5  # PyTorch's way to say that it is a parameter no more
    assert model.parameters() == [] and type(model.weight) is ndl.Tensor
    model = nn.Linear(2, 3, device=device)
    model.weight = nn.Identity()
    assert model.parameters() == [model.bias]
    norm = nn.BatchNorm1d(2, device=device)
    with pytest.raises(TypeError, match=r"\[BatchNorm1d\] running_mean would be .* in place of a Buffer"):
        norm.running_mean = np.zeros(2)


def test_a_module_is_no_part_of_itself():
    """Its parameters would have no end."""

    class Block(nn.Module):
        def __init__(self, whole):
            self.whole = whole
            self.weight = nn.Parameter([1.0])

    model = nn.Sequential(nn.Linear(2, 2))
    for value in (model, Block(model), [nn.Identity(), {"inner": Block(model)}], nn.Sequential(Block(model))):
        with pytest.raises(TypeError, match=r"\[Sequential\] block would hold the module that it is part of"):
            model.block = value
    model.block = Block(weakref.ref(model))
    assert len(model.parameters()) == 3

    @dataclass
    class Alike(nn.Module):  # equal to others of its width
        inner: object
        width: int

    assert Alike(Alike(None, 1), 1).inner == Alike(None, 1)


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
    with pytest.raises(GraphError, match="was changed"):
        late.backward()


def test_a_module_that_finds_no_room_stays_where_it_is(cpu):
    network = nn.Sequential(nn.Linear(100, 100, device=usable("cpu_numpy")), nn.Linear(100, 100, device=usable("cpu_numpy")))
    gc.collect()  # what earlier tests have left may go at any moment
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
    assert norm.eval()(leaf(x, device, "float16")).dtype == weight_dtype


@pytest.mark.parametrize("momentum", [0.0, 0.25, 1.0])
def test_what_a_batch_counts_in_running_statistics(device, momentum):
    x = np.random.default_rng(0).standard_normal((8, 3))
    norm = nn.BatchNorm1d(3, momentum=momentum, device=device)
    norm(leaf(x, device))
    np.testing.assert_allclose(norm.running_mean.numpy(), momentum * x.mean(axis=0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(norm.running_var.numpy(), 1 - momentum + momentum * x.var(axis=0), rtol=1e-4)


def test_batch_norms_statistics_of_many_rows_that_are_one(device):
    constant = np.array([0.1, 1e4 / 3, -7e-3], "float32")
    _, mean, var = ops.batch_norm(leaf(np.tile(constant, (20_001, 1)), device), *(leaf(np.ones(3), device) for _ in range(2)))
    np.testing.assert_array_equal(mean.numpy(), constant)
    assert (var.numpy() >= 0).all() and (var.numpy() < 1e-12 * constant**2).all()


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


@pytest.mark.parametrize("kind, beta2", [(Adam, 0.999), (AdamW, 0.95)])
def test_moments_are_those_of_the_gradient_itself(host, kind, beta2):
    x = leaf([1.0, 1.0], host)
    x.grad = leaf([2.0, -3e-8], host, requires_grad=False)
    optimizer = kind([x], lr=0.5, eps=1e-8, weight_decay=0.0)
    optimizer.step()
    state = optimizer.state_dict()
    np.testing.assert_allclose(state["m.0"], [0.2, -3e-9], rtol=1e-5)
    np.testing.assert_allclose(state["v.0"], [4 * (1 - beta2), 9e-16 * (1 - beta2)], rtol=1e-4)
    np.testing.assert_allclose(x.numpy(), [0.5, 1 + 0.5 * 0.75], rtol=1e-5)  # 3e-8 / (3e-8 + eps)


@pytest.mark.parametrize("kind, moment, after", [(Adam, 0.2, 1.9), (AdamW, 0.1, 1.8)])
def test_adam_adds_decay_to_the_gradient_and_adamw_takes_it_off_the_weight(host, kind, moment, after):
    x = leaf([2.0], host)
    x.grad = leaf([1.0], host, requires_grad=False)
    optimizer = kind([x], lr=0.1, weight_decay=0.5)
    optimizer.step()
    np.testing.assert_allclose([optimizer.state_dict()["m.0"].item(), x.item()], [moment, after], rtol=1e-5)


def test_an_optimizer_of_ones_own_needs_no_states(cpu):
    class SignDescent(Optimizer):
        def step(self):
            for p in self.params:
                p.data = p.data - ndl.Tensor(np.sign(p.grad.numpy()), device=p.device, requires_grad=False)

    w = nn.Parameter(ndl.Tensor([1.0, -1.0], device=cpu))
    (w * w).sum().backward()
    optimizer = SignDescent([w])
    optimizer.step()
    assert w.numpy().tolist() == [0, 0] and optimizer.state_dict() == optimizer.named_states() == {}
    optimizer.load_state_dict({})


def test_an_optimizer_of_ones_own_makes_states_that_count_as_such(device):
    class Momentum(Optimizer):
        STATES = ("m",)

        def __init__(self, params):
            super().__init__(params)
            self.m = {}

        def step(self):
            self.make_states(p for p in self.params if p.grad is not None)
            for p in self.m:
                self.m[p][:] = 0.5 * self.m[p] + p.grad.realize_cached_data()
                p.data = p.data - ndl.Tensor(self.m[p].numpy(), device=device, requires_grad=False)

    class Misspelt(Momentum):
        STATES = ("mm",)

    w, unused = (nn.Parameter(leaf([1.0, -1.0], device)) for _ in range(2))
    gc.collect()  # what earlier tests have left may go at any moment
    before = memory.stats(device).by_category["optimizer state"]
    optimizer = Momentum([w, unused])
    for expected in ([0, 0], [-1.5, 1.5]):
        (w * ndl.Tensor([1.0, -1.0], device=device, requires_grad=False)).sum().backward()
        optimizer.step()
        assert w.numpy().tolist() == expected and list(optimizer.named_states()) == ["m.0"]
        assert memory.stats(device).by_category["optimizer state"] - before == w.cached_data.nbytes
    with pytest.raises(TypeError, match=r"\[optim\] params is of type Parameter"):
        optimizer.make_states(w)
    wrong = Misspelt([w])
    for use in (wrong.step, wrong.state_dict, wrong.named_states, lambda: wrong.load_state_dict({})):
        with pytest.raises(TypeError, match=r"\[Misspelt\] mm, which STATES names, is absent \(accepted: a dict\)"):
            use()


def test_states_that_are_no_copies_of_their_parameters(device):
    class ByRows(Optimizer):
        STATES = ("rows",)

        def __init__(self, params):
            super().__init__(params)
            self.rows = {}

    class Described(ByRows):
        def state_spec(self, kind, p):
            return p.shape[:1], "int32"

        def step(self):
            self.make_states(self.params)
            for p, state in self.rows.items():
                state[:] = state + p.shape[0]

    params = [nn.Parameter(leaf(np.ones(shape), device)) for shape in ((3, 2), (4,))]
    optimizer = Described(params)
    optimizer.step()
    state = optimizer.state_dict()
    assert {name: (x.dtype, x.tolist()) for name, x in state.items()} == {
        "rows.0": ("int32", [3] * 3), "rows.1": ("int32", [4] * 4)
    }  # fmt: skip
    again = Described(params)
    again.load_state_dict(state)
    again.step()
    assert again.state_dict()["rows.0"].tolist() == [6] * 3
    with pytest.raises(CheckpointError, match=r"rows.0 is \(3,\) int32 \(accepted: \(3, 2\) float32\)"):
        ByRows(params).load_state_dict(state)
    params[1].data = leaf(np.ones(5), device)
    with pytest.raises(
        ShapeError, match=r"a state is \(4,\), its parameter is \(5,\), whose should be \(5,\) \(accepted: a new opt"
    ):
        again.step()
    undescribed = ByRows(params[:1])
    undescribed.rows[params[0]] = NDArray([1.0, 1, 1], device=device)
    with pytest.raises(ShapeError, match=r"a state is \(3,\), its parameter is \(3, 2\), whose should be \(3, 2\)"):
        undescribed.make_states(params[:1])


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
    for wrong, error in (("0.1", TypeError), (leaf([0.1], device), TypeError), (float("nan"), ValueError)):
        one.param_groups[1]["lr"] = wrong  # as a schedule puts it there
        with pytest.raises(error, match=rf"\[{kind.__name__}\] lr is "):
            one.step()
    assert p.numpy().tolist() == a.numpy().tolist() and q.numpy().tolist() == b.numpy().tolist()
    one = kind([p])
    one.params.append(q)
    assert one.param_groups[0]["params"] == [p, q]
    one.params = [q]
    with pytest.raises(ValueError, match=r"\[optim\] params and the params of the groups differ"):
        one.step()


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
    of_one = {
        SGD: [{"momentum": 1.0}],
        Adam: [{"beta1": 1.0}, {"beta2": 1.0}],
        AdamW: [{"betas": (1.0, 0.9)}, {"betas": (0.9, 1.0)}],
    }
    for wrong in of_one[kind]:
        with pytest.raises(ValueError, match=r"(momentum|beta[12]) is 1.0 .*below 1"):
            kind([p], **wrong)
        with pytest.raises(ValueError, match=r"(momentum|beta[12]) is 1.0 .*below 1"):  # set later
            optimizer = kind([p])
            vars(optimizer).update(wrong)
            p.grad = ndl.Tensor([1.0])
            optimizer.step()
        assert p.item() == 1 and getattr(optimizer, "t", 0) == 0
    p.grad = None
    with pytest.raises(ValueError, match=r"a parameter of shape \(1,\) is the result of MulScalar"):
        kind([p * 2])
    kind([(p * 2).detach(), ndl.Tensor([1.0], requires_grad=False)])
    for betas in ((0.9,), (0.9, 0.95, 0.99), 0.9) if kind is AdamW else ():
        with pytest.raises(ValueError, match=r"betas is .*accepted: two numbers"):
            AdamW([p], betas=betas)
        optimizer = AdamW([p])
        optimizer.betas = betas
        with pytest.raises(ValueError, match=r"betas is .*accepted: two numbers"):
            optimizer.step()


@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
def test_a_gradient_that_needs_a_copy_which_does_not_fit_changes_nothing(cpu, kind):
    first, second = [nn.Parameter(np.ones(shape), device=cpu) for shape in ((2,), (300, 400))]
    optimizer = kind([first, second])
    for _ in range(2):  # the second time there are states
        first.grad = ndl.Tensor(np.ones(2), device=cpu)
        second.grad = ops.transpose(ndl.Tensor(np.ones((400, 300)), device=cpu, requires_grad=False))
        before = first.numpy(), getattr(optimizer, "t", 0)
        memory.set_limit(memory.stats(cpu).live + 300_000, cpu)
        try:
            with pytest.raises(OutOfMemoryError):
                optimizer.step()
        finally:
            memory.set_limit(None, cpu)
        assert np.array_equal(first.numpy(), before[0]) and getattr(optimizer, "t", 0) == before[1]
        optimizer.step()
    assert (second.numpy() < 1).all()


@pytest.mark.parametrize("make", [
    lambda dtype: nn.Linear(3, 4, dtype=dtype), lambda dtype: nn.Conv(3, 4, 3, dtype=dtype),
    lambda dtype: nn.BatchNorm1d(3, dtype=dtype), lambda dtype: nn.Embedding(3, 4, dtype=dtype),
    lambda dtype: nn.Parameter([1, 2], dtype=dtype),
])  # fmt: skip
def test_parameters_of_integers_cannot_be_trained(make):
    with pytest.raises(DTypeError, match=r"\[Parameter\] dtype is int32 \(accepted: floating, or requires_grad=False\)"):
        make("int32")
    assert nn.Parameter([1, 2], dtype="int32", requires_grad=False).dtype == "int32"


def test_running_statistics_follow_both_or_neither(cpu):
    norm, x = nn.BatchNorm1d(3, device=cpu), leaf(np.ones((2, 3)), cpu)
    before, followed = norm.state_dict(), norm._followed

    def first_only(running, found):
        if running is norm.running_var:
            raise OutOfMemoryError("no room")
        return followed(running, found)

    norm._followed = first_only
    with pytest.raises(OutOfMemoryError):
        norm(x)
    assert all(np.array_equal(values, before[name]) for name, values in norm.state_dict().items())


def test_layers_are_of_the_dtype_and_on_the_device_asked_for(host):
    layout = BlockLayout(np.ones((1, 1)), 16)
    for kind, *sizes in (
        (nn.Linear, 2, 3), (nn.Conv, 2, 3, 3), (nn.Embedding, 2, 3), (nn.BatchNorm1d, 2), (nn.BatchNorm2d, 2), (nn.LayerNorm, 2),
        (nn.RNN, 2, 3), (nn.LSTM, 2, 3), (nn.Transformer, 4, 4, 1), (nn.BlockSparseLinear, 16, 16, layout),
        (Pythia, PythiaConfig(layers=1, width=16, heads=2, feed_forward=16, vocab_size=8)),
    ):  # fmt: skip
        layer = kind(*sizes, device=host, dtype="float64")
        assert {p.dtype for p in layer.parameters()} == {"float64"}
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


def test_a_bias_is_true_or_false():
    """PyTorch has the padding of a convolution, and the nonlinearity of an RNN, in its place: 0 left the bias out without a word."""
    makers = (
        lambda: nn.Conv(3, 4, 3, 1, 0),
        lambda: nn.RNN(3, 4, 1, "relu"),
        lambda: nn.RNNCell(3, 4, "relu"),
        lambda: nn.LSTM(3, 4, 1, 1),
        lambda: nn.Linear(3, 4, "cpu"),
    )
    for make in makers:
        with pytest.raises(TypeError, match=r"\[\w+\] bias is .* \(accepted: True or False\)"):
            make()
    assert nn.Conv(3, 4, 3, 1, False).bias is None


def test_causal_is_true_or_false(device):
    """PyTorch has dropout in its place, and causal in that of the scale: 0.0 looked at all positions, and True was a scale of 1."""
    q = leaf(np.ones((1, 1, 4, 2)), device)
    for causal in (0.0, "no", None):
        with pytest.raises(TypeError, match=r"\[attention\] causal is .* \(accepted: True or False\)"):
            ops.attention(q, q, q, None, causal, True)
        with pytest.raises(TypeError, match=r"\[MultiHeadAttention\] causal is .* \(accepted: True or False\)"):
            nn.Transformer(8, 16, 1, causal=causal, device=device)
    with pytest.raises(DTypeError, match=r"\[attention\] scale is of type bool \(accepted: a number\)"):
        ops.attention(q, q, q, None, False, True)
    with pytest.raises(TypeError, match=r"\[Transformer\] batch_first is 'no' \(accepted: True or False\)"):
        nn.Transformer(8, 16, 1, batch_first="no", device=device)


def test_threads_that_take_batches_of_one_loader_get_each_once():
    class Slow(data.Dataset):
        def __len__(self):
            return 60

        def __getitem__(self, index):
            time.sleep(0.001)  # so that another thread comes
            if 30 in np.atleast_1d(index) and len(failed) < 2:  # the batch, then its items one by one
                failed.append(index)
                raise OSError("not now")
            return np.asarray(index, np.float32)

    def take():
        while True:
            try:
                batch = next(batches, None)
            except OSError:
                continue
            if batch is None:
                return
            found.extend(batch[0].numpy().tolist())

    found, failed = [], []
    batches = iter(data.DataLoader(Slow(), batch_size=2))
    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [*range(60)]


def test_what_a_loader_cannot_use_is_said_as_it_is_made():
    with pytest.raises(DeviceError, match="nope"):
        data.DataLoader(data.NDArrayDataset(np.arange(3.0)), device="nope")


@pytest.mark.parametrize("wrong, found", [(None, "fn is of type NoneType"), (nn.ReLU, "fn is the class ReLU")])
def test_a_residual_of_no_module(wrong, found):
    with pytest.raises(TypeError, match=rf"\[Residual\] {found} \(accepted: "):
        nn.Residual(wrong)


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
    with pytest.raises(TypeError, match=r"\[Sequential\] module 1 is of type list"):
        nn.Sequential(one, [two, three])
    with pytest.raises(TypeError, match=r"\[Sequential\] module 1 is the class BatchNorm1d"):
        nn.Sequential(one, nn.BatchNorm1d)
    with pytest.raises(IndexError):
        model[3]


def test_batch_norm_in_evaluation_has_its_eps(device):
    layer = nn.BatchNorm1d(2, eps=0.1, device=device)
    y = layer.eval()(leaf(np.ones((3, 2)), device))
    np.testing.assert_allclose(y.numpy(), 1 / np.sqrt(1.1), rtol=1e-6)  # a running mean of 0 and variance of 1
    layer.bias.data = leaf([0.5, -1.0], device)
    np.testing.assert_allclose(layer(leaf(np.ones((3, 2)), device)).numpy()[0], y.numpy()[0] + [0.5, -1], rtol=1e-6)


def test_dropout_of_everything(device):
    x = leaf([1, 2], device)
    np.testing.assert_array_equal(nn.Dropout(1.0)(x).numpy(), [0, 0])
    with nn.nn_basic.no_dropout():
        np.testing.assert_array_equal(nn.Dropout(1.0)(x).numpy(), [1, 2])
        with nn.nn_basic.no_dropout():
            pass
        np.testing.assert_array_equal(nn.Dropout(1.0)(x).numpy(), [1, 2])
    np.testing.assert_array_equal(nn.Dropout(1.0)(x).numpy(), [0, 0])
    model = nn.Sequential(nn.Residual(nn.Sequential(nn.Dropout(1.0))))
    for mode, wanted in ((True, [1, 2]), (False, [2, 4]), (True, [1, 2])):
        np.testing.assert_array_equal(model.train(mode)(x).numpy(), wanted)
    seeded = nn.SeededDropout(0.5, seed=1)
    for size, drawn in ((2, 1), (5, 3)):
        seeded(leaf(np.ones(size), device))
        assert seeded.drawn == drawn  # two masks share no numbers
    for layer, more in ((nn.Dropout, {}), (nn.SeededDropout, {"seed": 1})):
        for p in (-0.1, 1.5):
            with pytest.raises(ValueError, match=rf"^\[{layer.__name__}\] p is .* \(accepted: 0 to 1\)"):
                layer(p, **more)


def test_sizes_that_are_no_whole_numbers():
    for wrong in (
        lambda: ndl.init.xavier_uniform("4", 2), lambda: ndl.init.xavier_normal(4, "2"), lambda: ndl.init.kaiming_normal("4", 2),
    ):  # fmt: skip
        with pytest.raises(ShapeError, match="is no shape"):
            wrong()


TOKENS, TINY = np.arange(50) % 11, PythiaConfig(layers=2, width=16, heads=1, feed_forward=16, vocab_size=11)


def trained(count):
    model, ids = Pythia(TINY), ndl.Tensor(np.zeros((1, 4)), dtype="int32")
    return train_step(model, AdamW(model.parameters()), [(ids, ids)] * 2, count)


COUNTS = [  # what takes whole numbers, and which; then what else it takes in their place
    (nn.Linear, {"in_features": 2, "out_features": 2}),
    (nn.Conv, {"in_channels": 2, "out_channels": 2, "kernel_size": 2, "stride": 2, "padding": 2}, {"padding": None}),
    *[(norm, {"dim": 2}) for norm in (nn.BatchNorm1d, nn.BatchNorm2d, nn.LayerNorm1d, nn.LayerNorm)],
    (nn.Embedding, {"num_embeddings": 2, "embedding_dim": 2}),
    *[(cell, {"input_size": 2, "hidden_size": 2}) for cell in (nn.RNNCell, nn.LSTMCell)],
    *[(network, {"input_size": 2, "hidden_size": 2, "num_layers": 2}) for network in (nn.RNN, nn.LSTM)],
    (trained, {"count": 2}),
    (lambda **n: Pythia(TINY, **n), {"seed": 2}, {"seed": None}),
    (data.RandomCrop, {"padding": 2}),
    (lambda **n: nn.AttentionLayer(4, **n), {"num_head": 2, "dim_head": 2}),
    (lambda **n: nn.Transformer(4, 4, **n), {"num_layers": 2}),
    (nn.BlockSparseAttention, {"block": 16, "window": 2}),
    (lambda **n: nn.causal_pattern("mixed", **n), {"blocks": 2, "block": 16, "window": 2, "stride": 2}),
    (lambda **n: BlockLayout(np.ones((2, 2)), causal=True, **n), {"block": 16, "q_start": 2}, {"q_start": -1}),
    (lambda **n: ops.conv(init.ones(1, 4, 4, 2), init.ones(1, 1, 2, 2), **n), {"stride": 2, "padding": 2}),
    *[(lambda op=op, **n: op(init.ones(2, 2), 0, **n), {"dilation": 2}) for op in (ops.dilate, ops.undilate)],
    (lambda **n: ops.dropout(init.ones(2), 0.5, **n), {"seed": 2, "offset": 2}),
    (lambda **n: ops.cross_entropy(init.ones(2, 2), init.arange(2), **n), {"ignore_index": 2}, {"ignore_index": -1}),
    (PythiaConfig, {"layers": 2, "width": 16, "heads": 2, "feed_forward": 2, "vocab_size": 2, "max_seq_len": 2}),
    (PythiaConfig, {"checkpoint_layers": 2}),
    (TINY.with_sparse, {"block": 16, "window": 2}),
    (GenerationConfig, {"max_new_tokens": 2, "seed": 2}),
    *[(GenerationConfig, {name: 2}, {name: None}) for name in ("top_k", "eos_token_id", "pad_token_id")],
    (lambda **n: data.DataLoader(TOKENS, **n), {"batch_size": 2}, {"batch_size": None}),
    (lambda **n: TokenBatches(TOKENS, **n), {"batch_size": 2, "seq_len": 2, "seed": 2}),
    *[
        (lambda **n: TokenBatches(TOKENS, 2, 1, **n), {name: 2}, {name: None})
        for name in ("vocab_size", "max_tokens", "epochs", "stride")
    ],
    (lambda **n: Prefetch(TokenBatches(TOKENS, 2, 2), **n), {"depth": 2}),
    (lambda **n: data.batchify([1, 2, 3], device=None, dtype=None, **n), {"batch_size": 2}),
    (lambda **n: data.get_batch(np.ones((4, 2)), **n), {"i": 2, "bptt": 2}),
    (
        lambda **n: score_text(Pythia(TINY), TOKENS, **n),
        {"window": 2, "stride": 2, "batch_size": 2},
        {"window": None, "stride": None},
    ),
    (lambda **n: score_endings(Pythia(TINY), [(TOKENS, [2])], **n), {"window": 2, "batch_size": 2}, {"window": None}),
    *[
        (lambda plan=plan, **n: plan(lambda device: lambda: init.ones(1, device=device), **n), {"steps": 2})
        for plan in (memory.plan, memory.peak_bytes)
    ],
    (lambda **n: CheckpointFolder(".", **n), {"keep_last": 2}),
    (amp.GradScaler, {"growth_interval": 2, "hysteresis": 2}),
]


@pytest.mark.parametrize(
    "make, counts, also", [(*entry, {})[:3] for entry in COUNTS], ids=lambda part: "-".join(part) if type(part) is dict else ""
)
def test_a_count_is_a_whole_number(make, counts, also):
    make(**{name: np.int64(count) for name, count in counts.items()})
    for name in counts:
        for wrong in (True, 2.5, "2", np.array([1]), -1, None):
            if wrong is not also.get(name, ...):
                with pytest.raises((ValueError, DTypeError), match=rf"^\[\w+\] {name}\b.* \(accepted: "):
                    make(**{**counts, name: wrong})


def test_counts_in_other_forms():
    """Arrays without axes, and the tuple that PyTorch takes, are kept as Python's numbers."""
    layer = nn.Linear(np.array(3), np.array(4))
    assert layer(init.ones(2, 3)).shape == (2, 4) and type(layer.out_features) is int
    for norm in (nn.LayerNorm1d((4,)), nn.LayerNorm([np.int64(4)])):
        assert norm(init.ones(2, 4)).shape == (2, 4) and type(norm.dim) is int
    for wrong in ((), (4, 4), ("4",)):
        with pytest.raises(ShapeError, match=r"\[LayerNorm\] dim is "):
            nn.LayerNorm(wrong)
    generation = GenerationConfig(top_k=np.uint8(2), max_new_tokens=np.uint8(120), seed=np.array(2), pad_token_id=np.int32(0))
    assert all(type(getattr(generation, name)) is int for name in ("top_k", "max_new_tokens", "seed", "pad_token_id"))
    narrow = nn.BlockSparseAttention("local", block=np.uint8(16), window=np.uint8(2))
    for made in (narrow, PythiaConfig(pattern="local", block=np.uint8(16), window=np.array(2))):
        assert type(made.block) is type(made.window) is int
    assert narrow.layout(16 * 300).block_rows == 300


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
    for norm in (nn.BatchNorm1d(2, device=device), nn.BatchNorm1d(2, device=device).eval()):
        with pytest.raises(ShapeError, match=r"batch_norm\] x is \(3, 1\)"):
            norm(leaf(np.ones((3, 1)), device))
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


def test_numbers_that_a_layer_cannot_have():
    """They would train, and give something else, nothing, or NaN."""
    below, nan = -1e-5, float("nan")
    for make in (nn.BatchNorm1d, nn.BatchNorm2d, nn.LayerNorm1d, nn.LayerNorm):
        for wrong in (below, nan, float("inf")):
            with pytest.raises(ValueError, match=rf"\[{make.__name__}\] eps is .* \(accepted: 0 or more, finite\)"):
                make(3, eps=wrong)
        for wrong in (None, "1e-5"):
            with pytest.raises(TypeError, match=rf"\[{make.__name__}\] eps is of type .* \(accepted: a number\)"):
                make(3, eps=wrong)
    for make, name in (
        (lambda p: nn.BatchNorm1d(3, momentum=p), "momentum"),
        (nn.Dropout, "p"),
        (lambda p: nn.SeededDropout(p, 0), "p"),
    ):
        for wrong in (below, 1.5, nan):
            with pytest.raises(ValueError, match=rf"{name} is .* \(accepted: 0 to 1\)"):
                make(wrong)
        for wrong in (None, "0.5"):
            with pytest.raises(TypeError, match=rf"{name} is of type .* \(accepted: a number\)"):
                make(wrong)
    for wrong in ({"num_head": 0}, {"dim_head": 0}, {"num_layers": 0}, {"num_layers": -1}):
        with pytest.raises(ShapeError, match=rf"{next(iter(wrong))}.*\(accepted: a whole number of at least 1\)"):
            nn.Transformer(**{"embedding_size": 4, "hidden_size": 4, "num_layers": 1, **wrong})
    with pytest.raises(ValueError, match=r"\[gelu\] approximate is 'sigmoid'"):
        nn.GELU("sigmoid")
    model = nn.Linear(2, 2)
    for wrong in (None, "no", 0, [model]):  # a data set, in other libraries
        with pytest.raises(TypeError, match=r"\[Linear\] train\(\) was given a .* \(accepted: True or False\)"):
            model.train(wrong)
    assert model.training


@pytest.mark.parametrize(
    ("make", "wrong"),
    [(ndl.init.rand, {"low": 2.0, "high": 1.0}), (ndl.init.rand, {"low": -3e38, "high": 3e38}),
     (ndl.init.rand, {"low": -np.inf, "high": np.inf}), (ndl.init.rand, {"high": float("nan")}), (ndl.init.randn, {"std": -0.1}),
     (ndl.init.randn, {"std": float("nan")}), (ndl.init.randb, {"p": 1.5}), (ndl.init.randb, {"p": float("nan")})],
)  # fmt: skip
def test_random_numbers_that_there_are_not(host, make, wrong):
    before = np.random.get_state()[2]
    with pytest.raises(ValueError, match=rf"\[{make.__name__}\] .* \(accepted: "):
        make(3, **wrong, device=host)
    assert np.random.get_state()[2] == before


def test_random_numbers_of_float64_have_its_digits(host):
    np.random.seed(0)
    drawn = init.rand(1000, low=1e6, high=1e6 + 1, device=host, dtype="float64").numpy()
    normal = init.randn(1000, mean=1e6, std=1e-3, device=host, dtype="float64").numpy()
    np.random.seed(0)
    np.testing.assert_allclose(drawn - 1e6, np.random.rand(1000), atol=1e-9)
    np.testing.assert_allclose(normal - 1e6, np.random.randn(1000) * 1e-3, atol=1e-9)


@pytest.mark.parametrize("wrong", ["x", None, [0.5], True])
def test_numbers_that_are_none(cpu, wrong):
    x = leaf(np.ones(3), cpu)
    for op, name, make in (
        ("rand", "low", init.rand), ("rand", "high", init.rand), ("randn", "mean", init.randn), ("randn", "std", init.randn),
        ("randb", "p", init.randb), ("Dropout", "p", lambda n, **given: nn.Dropout(**given)),
        ("LayerNorm1d", "eps", nn.LayerNorm1d), ("SGD", "lr", lambda n, **given: SGD([x], **given)),
        ("dropout", "p", lambda n, p: ops.dropout(x, p, 1)),
        ("xavier_uniform", "gain", lambda n, gain: init.xavier_uniform(n, n, gain)),
        ("xavier_normal", "gain", lambda n, gain: init.xavier_normal(n, n, gain)),
        ("kaiming_uniform", "fan_in", lambda n, fan_in: init.kaiming_uniform(fan_in, n, shape=(n, n))),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=rf"\[{op}\] {name} is of type {type(wrong).__name__} \(accepted: a number\)"):
            make(3, **{name: wrong})


def test_random_tensors_are_made_once(device):
    for draw, dtype in ((init.rand, "float32"), (init.randn, "float32"), (init.randb, "bool"), (init.rand, "float64")):
        made = draw(4, 5, device=device, dtype=dtype, requires_grad=True)
        assert (made.device, made.dtype, made.requires_grad, made.shape) == (device, dtype, True, (4, 5))
    counts = [memory.stats(device).allocations]
    for draw in (lambda: device.rand(4) <= 0.5, lambda: init.randb(4, device=device)):
        assert draw().shape == (4,)
        counts.append(memory.stats(device).allocations)
    start, plain, end = counts
    assert end - plain == plain - start  # no copy


def test_images_of_other_channels(device):
    with pytest.raises(ShapeError, match=r"\[batch_norm\] x is \(2, 4, 5, 6\) \(accepted: \(N, 3, H, W\)\)"):
        nn.BatchNorm2d(3, device=device)(leaf(np.ones((2, 4, 5, 6)), device))


def test_positions_are_whole_numbers(device, monkeypatch):
    ids = []
    monkeypatch.setattr(nn.Embedding, "forward", lambda self, x: ids.append(x.dtype) or ops.embedding(self.weight, x))
    nn.Transformer(4, 4, 1, num_head=1, dim_head=2, device=device, sequence_len=8)(leaf(np.ones((3, 2, 4)), device))
    assert ids == ["int32"]


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM])
def test_each_bias_of_a_recurrent_network_counts_without_the_other(host, kind):
    x = leaf(np.ones((3, 2, 4)), host)
    both, one = kind(4, 5, device=host), kind(4, 5, device=host)
    one.load_state_dict(both.state_dict())
    for first, second in (("bias_ih", "bias_hh"), ("bias_hh", "bias_ih")):
        one.load_state_dict(both.state_dict())
        (cell,), (other,) = (next(iter(v for v in vars(m).values() if isinstance(v, list))) for m in (both, one))
        before = getattr(other, first)
        setattr(other, first, None)
        expected = cell._of_input(x) - before
        np.testing.assert_allclose(other._of_input(x).numpy(), expected.numpy(), rtol=1e-5, atol=1e-6)
        assert np.abs((other._of_input(x) - cell._of_input(x)).numpy()).max() > 1e-3 and getattr(other, second) is not None
        setattr(other, first, before)


def test_attention_of_the_last_positions_and_of_other_keys(device):
    x = lambda *shape: leaf(np.random.default_rng(len(shape)).standard_normal(shape), device)  # noqa: E731
    q, k = x(1, 2, 5, 4)[:, :, -3:], x(1, 2, 5, 4)
    found = nn.MultiHeadAttention(causal=True)(q, k, k)[0]
    np.testing.assert_allclose(found.numpy(), ops.attention(q, k, k).numpy(), rtol=1e-4, atol=1e-5)
    layer, other = nn.AttentionLayer(4, 2, 3, device=device), x(2, 5, 4) * 2
    np.testing.assert_array_equal(layer(x(2, 5, 4), other).numpy(), layer(x(2, 5, 4), other, x(2, 5, 4)).numpy())


def test_where_a_transformer_drops(host, monkeypatch):
    shapes, draw = [], init.randb
    monkeypatch.setattr(init, "randb", lambda *shape, **kwargs: shapes.append(shape) or draw(*shape, **kwargs))
    x = leaf(np.ones((2, 5, 4)), host, "float16")
    y = nn.TransformerLayer(4, 2, 3, 8, dropout=0.5, causal=False, device=host, dtype="float16")(x)
    assert shapes == [(2, 2, 5, 5), (2, 5, 4), (10, 8), (10, 4)] and y.dtype == "float16"
    whole = nn.Transformer(4, 8, 1, num_head=2, dim_head=3, sequence_len=5, batch_first=True, device=host)
    assert whole(leaf(np.ones((2, 5, 4)), host))[0].shape == (2, 5, 4)


def test_attention_of_features_that_differ(device):
    layer = nn.AttentionLayer(4, 2, 3, k_features=5, v_features=6, out_features=7, device=device)
    x = [leaf(np.random.default_rng(n).standard_normal((2, 3, n)), device) for n in (4, 5, 6)]
    assert layer(*x).shape == (2, 3, 7)
    names = ("prenorm_q", "prenorm_k", "prenorm_v", "q_projection", "k_projection", "v_projection", "out_projection")
    assert [getattr(layer, name).weight.shape for name in names] == [(4,), (5,), (6,), (4, 6), (5, 6), (6, 6), (6, 7)]
    assert [nn.AttentionLayer(4, 1, 3, k_features=5).v_projection.weight.shape[0], layer.out_features] == [4, 7]


def test_what_attention_and_a_transformer_cannot_take(device):
    x, whole = leaf(np.ones((1, 1, 3, 4)), device), leaf(np.ones((1, 1, 3, 4)), device, "int32")
    for wrong in ((whole, x, x), (x, whole, x), (x, x, whole)):
        with pytest.raises(DTypeError, match=r"\[MultiHeadAttention\] q is .*int32.* \(accepted: floating\)"):
            nn.MultiHeadAttention(device=device)(*wrong)
    with pytest.raises(ShapeError, match=r"\[Transformer\] 5 features \(accepted: embedding_size, 4\)"):
        nn.Transformer(4, 8, 1, device=device)(leaf(np.ones((2, 3, 5)), device))
    for norm in (ops.layer_norm, ops.batch_norm):
        for wrong, error in ((-1.0, ValueError), (None, TypeError), ("a", TypeError)):
            with pytest.raises(error, match=rf"\[{norm.__name__}\] eps is"):
                norm(x[0, 0], leaf(np.ones(4), device), leaf(np.ones(4), device), wrong)


def test_the_norm_of_a_row_so_long_that_float32_would_count_no_further(cpu):
    """Also beside a mean that is far larger than the spread."""
    n = 3_000_000
    x = np.full(n, 1001, np.float32)
    x[::2] += 2
    y = ops.layer_norm(*(ndl.Tensor(values, device=cpu, requires_grad=False) for values in (x, np.ones(n), np.zeros(n))))
    np.testing.assert_allclose(y.numpy()[:2], [1, -1], atol=1e-3)


def test_labels_that_do_not_fit_the_logits(device):
    logits = leaf(np.ones((3, 3)), device)
    for labels in (0, [0], [[0], [1], [2]], [0, 1]):
        with pytest.raises(ShapeError, match="SoftmaxLoss"):
            nn.SoftmaxLoss()(logits, leaf(labels, device))
    with pytest.raises(IndexError, match="target -100 at position 1"):  # what ops.cross_entropy leaves out
        nn.SoftmaxLoss()(logits, leaf([0, -100, 1], device)).numpy()


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_first_states_do_not_widen_what_comes_in(host, dtype):
    x = leaf(np.ones((2, 3, 4)), host, dtype)
    for layer, cell in ((nn.RNN, nn.RNNCell), (nn.LSTM, nn.LSTMCell)):
        y, last = layer(4, 5, device=host, dtype=dtype)(x)
        after = cell(4, 5, device=host, dtype=dtype)(x[0])
        parts = [last, after] if layer is nn.RNN else [*last, *after]
        assert {part.dtype for part in (y, *parts)} == {dtype}
    narrow = nn.LSTM(4, 5, device=host, dtype="float32")
    assert narrow(x)[0].dtype == ("float64" if dtype == "float64" else "float32")
    assert nn.LayerNorm(4, device=host)(x).dtype == "float32"


# --- data ---


class Pairs(data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return np.arange(12.0).reshape(6, 2)[index]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_ids_that_are_no_whole_numbers(host, dtype):
    """The course has whole ones in floats; the rows of others would be those of another id."""
    rows = leaf(np.eye(3), host)
    uses = {
        "embedding": lambda ids: ops.embedding(rows, ids),
        "one_hot": lambda ids: ndl.init.one_hot(3, ids, device=host),
        "cross_entropy": lambda ids: ops.cross_entropy(rows[:2], ids),
        "linear_cross_entropy": lambda ids: ops.linear_cross_entropy(rows[:2], rows, ids),
    }
    for name, use in uses.items():
        for wrong in (1.5, -0.5, float("nan")):
            with pytest.raises(IndexError, match=rf"\[{name}\] {wrong} at position 1 is no whole number"):
                use(leaf([1, wrong], host, dtype))
        np.testing.assert_array_equal(use(leaf([1, 2], host, dtype)).numpy(), use(leaf([1, 2], host, "int32")).numpy())


def test_a_loader_is_its_own_iterator():
    """As the course has it. The order is drawn when a pass begins."""
    mixed = data.NDArrayDataset(np.arange(3), [4, 5, 6], ndl.Tensor([7, 8, 9]))
    assert [[part.numpy().tolist() for part in batch] for batch in data.DataLoader(mixed, 2)] == [
        [[0, 1], [4, 5], [7, 8]],
        [[2], [6], [9]],
    ]
    for given in (None, ndl.cpu_numpy()):
        for part in next(iter(data.DataLoader(mixed, 2, device=given))):
            assert (part.dtype, part.device, part.requires_grad) == ("float32", given or ndl.cpu(), False)
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
    assert len(data.DataLoader(Pairs(), None)) == 6
    for wrong in (-1, 0, 2.5, "a"):
        with pytest.raises(ValueError, match=r"\[DataLoader\] batch_size"):
            data.DataLoader(Pairs(), wrong)
    for wrong in (-1, 0, 4):
        with pytest.raises(DataError, match=rf"\[batchify\] batch_size is {wrong} \(accepted: a whole number from 1 to 3\)"):
            data.batchify([1, 2, 3], wrong, None, "float32")
    for arrays in ((np.ones(3), np.ones(5)), (), (np.ones(()),), (np.ones(3), (i for i in range(3)))):
        with pytest.raises(DataError, match="NDArrayDataset"):
            data.NDArrayDataset(*arrays)


class OneByOne(data.Dataset):
    """As data sets are elsewhere: by one index, from a list or from files."""

    def __init__(self, items):
        super().__init__()
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[int(index)] if index < 5 else self.missing


def test_a_data_set_that_takes_one_index_is_said_to():
    for wrong in (OneByOne([1.0, 2.0, 3.0]), [1.0, 2.0, 3.0]):
        with pytest.raises(TypeError, match=rf"\[DataLoader\] {type(wrong).__name__} takes one index, no array"):
            next(iter(data.DataLoader(wrong, 2)))
    with pytest.raises(AttributeError, match="missing"):  # one of the items fails by itself: that is what is wrong
        next(iter(data.DataLoader(OneByOne(range(8)), 8)))


def test_a_data_set_that_takes_an_array_for_one_index():
    """What it computes of an array is no batch: one item, or the items along another axis."""

    class Computed(Pairs):
        def __init__(self, item):
            self.item = item

        def __getitem__(self, index):
            return self.item(index)

    for item, gave in (
        (lambda i: (np.ones(3), i), r"a part of shape \(3,\)"),
        (lambda i: (np.array([np.sin(i), np.cos(i)]), i), r"a part of shape \(2, 4\)"),
        (lambda i: (i, 1), r"a part of shape \(\)"),
        (lambda i: (ndl.Tensor([1.0]), i), r"a part of shape \(1,\)"),
    ):
        with pytest.raises(TypeError, match=rf"\[DataLoader\] Computed gave {gave} for 4 items \(accepted: all items of a batch"):
            next(iter(data.DataLoader(Computed(item), 4)))
    with pytest.raises(TypeError, match=r"\[DataLoader\] Computed gave a dict \(accepted: an array, or a tuple of arrays\)"):
        next(iter(data.DataLoader(Computed(lambda i: {"x": i}), 4)))
    (x,) = next(iter(data.DataLoader(Computed(lambda i: [np.array([np.sin(i), np.cos(i)]).T]), 4)))
    assert x.shape == (4, 2)


class FromIterator(Pairs):
    def __getitem__(self, index):
        return next(iter(()))


def test_an_item_that_is_not_there_does_not_end_a_pass():
    with pytest.raises(RuntimeError, match=r"\[DataLoader\] FromIterator raised StopIteration"):
        list(data.DataLoader(FromIterator(), 2))


class Touch:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return type(self.path).touch, (self.path,)


def test_arguments_in_another_data_sets_places(tmp_path):
    flip = [data.RandomFlipHorizontal(1.0)]
    with pytest.raises(TypeError, match=r"\[CIFAR10Dataset\] p is of type list"):
        data.CIFAR10Dataset(str(tmp_path), True, flip)
    with pytest.raises(TypeError, match=r"\[CIFAR10Dataset\] train is 'test'"):
        data.CIFAR10Dataset(str(tmp_path), "test")
    with pytest.raises(TypeError, match=r"\[DataLoader\] shuffle is 'cpu'"):
        data.DataLoader(data.NDArrayDataset(np.zeros(3)), 2, "cpu")
    with pytest.raises(TypeError, match=r"\[DataLoader\] dataset is of type int \(accepted: a Dataset"):
        data.DataLoader(2, data.NDArrayDataset(np.zeros(3)).__len__())
    for p, error in (("0.5", TypeError), (2, ValueError)):
        with pytest.raises(error, match=r"\[RandomFlipHorizontal\] p is"):
            data.RandomFlipHorizontal(p)
    for padding in (-1, 1.5, "same"):
        with pytest.raises(ValueError, match=r"\[RandomCrop\] padding is .* \(accepted: a whole number of at least 0\)"):
            data.RandomCrop(padding)
    images = data.Dataset([data.RandomCrop(2)])
    assert images._transformed(np.zeros((0, 8, 8, 1))).shape == (0, 8, 8, 1)
    batches = data.batchify(list(range(20)), 2, None, "float32")
    for i, bptt in ((0, -1), (0, 0), (-1, 3), (9, 3)):
        with pytest.raises(DataError, match=rf"\[get_batch\] (i is {i} \(accepted: .* 0 to 8\)|bptt is {bptt} \(accepted: )"):
            data.get_batch(batches, i, bptt)
    assert [part.shape for part in data.get_batch(batches, 8, 3)] == [(1, 2), (2,)]


def test_files_that_are_not_there(tmp_path):
    absent = str(tmp_path / "absent")
    for read, name in (
        (lambda: data.MNISTDataset(absent, absent), absent),
        (lambda: data.CIFAR10Dataset(absent, True), f"{absent}/data_batch_1"),
        (lambda: data.Corpus(absent), f"{absent}/train.txt"),
    ):
        with pytest.raises(DataError, match=r"cannot read .*: No such file or directory") as caught:
            read()
        assert str(caught.value).count(name) == 1 and "Errno" not in str(caught.value)


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


class Hostile:
    """What is pickled as an array of numpy's whose type says how it is to be read."""

    def __init__(self, make, arguments, state):
        self.parts = make, arguments, state

    def __reduce__(self):
        return self.parts


@pytest.mark.parametrize(
    ("code", "state"),
    [("O8", (3, "|", None, None, None, -1, -1, 0)), ("V4", (3, "|", None, ("f",), {"f": ("<i4", 1 << 20)}, 4, 1, 0)),
     ("S1", (3, "|", None, None, None, 1 << 30, 1, 0)), ("u8", (3, "|", None, None, None, -1, -1, 0))],
)  # fmt: skip
def test_cifar_10_whose_arrays_would_read_other_memory(tmp_path, code, state):
    """numpy's own types do what such a state says: the process ended with a segmentation fault."""

    def read(code, state):
        kind = Hostile(np.dtype, (code, False, True), state)
        image = Hostile(np.zeros(1).__reduce__()[0], (np.ndarray, (0,), b"b"), (1, (1, 3072), kind, False, b"A" * 3072))
        (tmp_path / "test_batch").write_bytes(pickle.dumps({b"data": image, b"labels": [1]}, protocol=2))
        return data.CIFAR10Dataset(str(tmp_path), train=False)

    assert (read("u1", (3, "|", None, None, None, -1, -1, 0)).X == np.float32(ord("A")) / 255).all()
    with pytest.raises(DataError, match=r"\[cifar10\] cannot read"):
        read(code, state)


def test_cifar_10_as_python_2_wrote_it(tmp_path):
    image, labels = (pickle.dumps(x, protocol=2)[2:-1] for x in (np.full((2, 3072), 255, np.uint8), [3, 4]))
    (tmp_path / "test_batch").write_bytes(b"\x80\x02}U\x04data" + image + b"sU\x06labels" + labels + b"s.")  # its str is bytes
    dataset = data.CIFAR10Dataset(str(tmp_path), train=False)
    assert dataset.y.tolist() == [3, 4] and dataset.X.shape == (2, 3, 32, 32) and (dataset.X == 1).all()


def test_files_that_are_no_mnist_or_text(tmp_path):
    def files(side, count, damage=lambda content: content):
        images = gzip.compress(struct.pack(">IIII", 2051, count, side, side) + bytes(count * side * side))
        (tmp_path / "x.gz").write_bytes(damage(images))
        (tmp_path / "y.gz").write_bytes(gzip.compress(struct.pack(">II", 2049, count) + bytes(count)))
        return str(tmp_path / "x.gz"), str(tmp_path / "y.gz")

    assert len(data.MNISTDataset(*files(28, 4))) == 4
    bomb = gzip.compress(struct.pack(">IIII", 2051, 1, 28, 28) + bytes(1 << 28), compresslevel=1)  # 256 MiB behind one image
    labels = files(28, 1)[1]
    (tmp_path / "x.gz").write_bytes(bomb)
    tracemalloc.start()
    with pytest.raises(DataError, match=r"x\.gz goes on behind its end"):
        data.MNISTDataset(str(tmp_path / "x.gz"), labels)
    assert tracemalloc.get_traced_memory()[1] < 1 << 24
    tracemalloc.stop()
    for side, count, damage, says in (
        (14, 4, bytes, "are not images and labels of one MNIST set"),
        (28, 4, lambda content: content[:12] + b"\xff" * 8 + content[20:], r"cannot read .*x\.gz"),
        (28, 4, lambda content: gzip.compress(gzip.decompress(content)[:15]), "is truncated"),
        (28, 4, lambda content: gzip.compress(gzip.decompress(content)[:-1]), "is truncated"),
        (28, 4, lambda content: content + gzip.compress(b"more"), r"x\.gz goes on behind its end"),
    ):
        with pytest.raises(DataError, match=rf"\[mnist\] .*{says}"):
            data.MNISTDataset(*files(side, count, damage))
    (tmp_path / "train.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"\[ptb\] cannot read"):
        data.Corpus(str(tmp_path))
