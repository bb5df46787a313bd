"""The course's autograd, ops, init, modules, optimizers and apps, line by line: what its homeworks call, and how."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import needle as ndl
from needle import autograd, data, init, nn, ops, optim
from needle.autograd import Tensor, Value
from test_course_arrays import signature

A = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
B = np.array([[5.0, 6.0], [7.0, 8.0]], np.float32)

# The course's parameters by name, order and default. needle's own come after them.
SIGNATURES = {
    Value._init: "(self, op, inputs, *, num_outputs=1, cached_data=None, requires_grad=None)",
    Value.make_const: "(data, *, requires_grad=False)",
    Value.make_from_op: "(op, inputs)",
    Tensor: "(array, *, device=None, dtype=None, requires_grad=True, **kwargs)",
    Tensor.make_const: "(data, requires_grad=False)",
    Tensor.backward: "(self, out_grad=None)",
    Tensor.sum: "(self, axes=None)",
    Tensor.broadcast_to: "(self, shape)",
    Tensor.reshape: "(self, shape)",
    Tensor.transpose: "(self, axes=None)",
    Tensor.matmul: "(self, other)",
    ops.add: "(a, b)",
    ops.multiply: "(a, b)",
    ops.divide: "(a, b)",
    ops.power: "(a, b)",
    ops.add_scalar: "(a, scalar)",
    ops.mul_scalar: "(a, scalar)",
    ops.divide_scalar: "(a, scalar)",
    ops.power_scalar: "(a, scalar)",
    ops.matmul: "(a, b)",
    ops.summation: "(a, axes=None)",
    ops.broadcast_to: "(a, shape)",
    ops.reshape: "(a, shape)",
    ops.transpose: "(a, axes=None)",
    ops.logsumexp: "(a, axes=None)",
    ops.stack: "(args, axis)",
    ops.split: "(a, axis)",
    ops.flip: "(a, axes",
    ops.dilate: "(a, axes, dilation)",
    ops.conv: "(a, b, stride=1, padding=1)",
    ops.make_tuple: "(*args)",
    ops.fused_add_scalars: "(x, c0, c1)",
    ops.AddScalar: "(scalar)",
    ops.PowerScalar: "(scalar)",
    ops.Summation: "(axes=None)",
    ops.BroadcastTo: "(shape)",
    ops.Transpose: "(axes=None)",
    ops.LogSumExp: "(axes=None)",
    ops.Stack: "(axis)",
    ops.Flip: "(axes=None)",
    ops.Dilate: "(axes, dilation)",
    ops.Conv: "(stride=1, padding=0)",
    ops.TupleGetItem: "(index)",
    init.rand: "(*shape, low=0.0, high=1.0, device=None, dtype='float32', requires_grad=False)",
    init.randn: "(*shape, mean=0.0, std=1.0, device=None, dtype='float32', requires_grad=False)",
    init.constant: "(*shape, c=1.0, device=None, dtype='float32', requires_grad=False)",
    init.ones: "(*shape, device=None, dtype='float32', requires_grad=False)",
    init.randb: "(*shape, p=0.5, device=None, dtype='bool', requires_grad=False)",
    init.one_hot: "(n, i, device=None, dtype='float32', requires_grad=False)",
    init.zeros_like: "(array, *, device=None, requires_grad=False)",
    init.xavier_uniform: "(fan_in, fan_out, gain=1.0, **kwargs)",
    init.xavier_normal: "(fan_in, fan_out, gain=1.0, **kwargs)",
    init.kaiming_uniform: "(fan_in, fan_out, shape=None, nonlinearity='relu', **kwargs)",
    init.kaiming_normal: "(fan_in, fan_out, nonlinearity='relu', **kwargs)",
    nn.Linear: "(in_features, out_features, bias=True, device=None, dtype='float32')",
    nn.BatchNorm1d: "(dim, eps=1e-05, momentum=0.1, device=None, dtype='float32')",
    nn.LayerNorm1d: "(dim, eps=1e-05, device=None, dtype='float32')",
    nn.Dropout: "(p=0.5)",
    nn.Conv: "(in_channels, out_channels, kernel_size, stride=1, bias=True, device=None, dtype='float32')",
    nn.RNNCell: "(input_size, hidden_size, bias=True, nonlinearity='tanh', device=None, dtype='float32')",
    nn.RNN: "(input_size, hidden_size, num_layers=1, bias=True, nonlinearity='tanh', device=None, dtype='float32')",
    nn.LSTMCell: "(input_size, hidden_size, bias=True, device=None, dtype='float32')",
    nn.LSTM: "(input_size, hidden_size, num_layers=1, bias=True, device=None, dtype='float32')",
    nn.Embedding: "(num_embeddings, embedding_dim, device=None, dtype='float32')",
    nn.MultiHeadAttention: "(*, dropout=0.0, causal=False, device=None, dtype='float32')",
    nn.AttentionLayer: "(q_features, num_head, dim_head, *, k_features=None, v_features=None, out_features=None, dropout=0.0, "
    "causal=True, device=None, dtype='float32')",
    nn.TransformerLayer: "(q_features, num_head, dim_head, hidden_size, *, dropout=0.0, causal=True, device=None, dtype='float32')",
    nn.Transformer: "(embedding_size, hidden_size, num_layers, *, num_head=8, dim_head=32, dropout=0.0, causal=True, device=None, "
    "dtype='float32', batch_first=False, sequence_len=2048)",
    optim.Optimizer: "(params)",
    optim.SGD: "(params, lr=0.01, momentum=0.0, weight_decay=0.0)",
    optim.SGD.clip_grad_norm: "(self, max_norm=0.25)",
    optim.Adam: "(params, lr=0.01, beta1=0.9, beta2=0.999, eps=1e-08, weight_decay=0.0)",
    data.Dataset: "(transforms=None)",
    data.MNISTDataset: "(image_filename, label_filename, transforms=None)",
    data.CIFAR10Dataset: "(base_folder, train, p=0.5, transforms=None)",
    data.RandomFlipHorizontal: "(p=0.5)",
    data.RandomCrop: "(padding=3)",
    data.DataLoader: "(dataset, batch_size=1, shuffle=False)",
    data.Corpus: "(base_dir, max_lines=None)",
    data.batchify: "(data, batch_size, device, dtype)",
    data.get_batch: "(batches, i, bptt, device=None, dtype=None)",
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f.__qualname__)
def test_signature(function):
    course = SIGNATURES[function]
    assert signature(function).startswith(course[:-1] if course.endswith(")") else course)


def test_signatures_of_the_apps():
    import apps.models
    import apps.simple_ml

    import mlp_resnet
    import models

    def names(function):
        return " ".join(inspect.signature(function).parameters)

    assert names(apps.simple_ml.nn_epoch) == "X y W1 W2 lr batch" and names(apps.simple_ml.softmax_loss) == "Z y_one_hot"
    assert names(apps.simple_ml.epoch_general_cifar10) == "dataloader model loss_fn opt"
    assert names(apps.simple_ml.train_cifar10) == "model dataloader n_epochs optimizer lr weight_decay loss_fn"
    assert names(apps.simple_ml.evaluate_cifar10) == "model dataloader loss_fn"
    assert names(apps.simple_ml.epoch_general_ptb) == "data model seq_len loss_fn opt clip device dtype"
    assert names(apps.simple_ml.train_ptb) == "model data seq_len n_epochs optimizer lr weight_decay loss_fn clip device dtype"
    assert names(apps.simple_ml.evaluate_ptb) == "model data seq_len loss_fn device dtype"
    assert names(apps.simple_ml.parse_mnist) == "image_filename label_filename" and names(apps.simple_ml.loss_err) == "h y"
    assert apps.simple_ml.device == ndl.cpu() and not [n for n in dir(apps.simple_ml) if n.startswith("test_")]
    language_model = "embedding_size output_size hidden_size num_layers seq_model seq_len device dtype"
    assert names(apps.models.LanguageModel) == names(models.LanguageModel) == language_model and apps.models is not models
    assert names(apps.models.ResNet9) == "device dtype"
    assert names(mlp_resnet.ResidualBlock) == "dim hidden_dim norm drop_prob"
    assert names(mlp_resnet.MLPResNet) == "dim hidden_dim num_blocks num_classes norm drop_prob"
    assert names(mlp_resnet.epoch) == "dataloader model opt"
    assert names(mlp_resnet.train_mnist) == "batch_size epochs optimizer lr weight_decay hidden_dim data_dir"


# --- values and the graph ---


@pytest.fixture
def ab(device):
    return Tensor(A, device=device), Tensor(B, device=device)


def test_fields_of_a_value(ab):
    a, b = ab
    c = a + b
    assert isinstance(c.op, ops.EWiseAdd) and c.inputs[0] is a and c.inputs[1] is b and c.num_outputs == 1 and c.requires_grad
    assert a.op is None and a.inputs == [] and a.is_leaf() and not c.is_leaf()
    np.testing.assert_array_equal(c.cached_data.numpy(), A + B)
    np.testing.assert_array_equal(c.realize_cached_data().numpy(), A + B)
    constant = Tensor(a, requires_grad=False) + Tensor(b, requires_grad=False)
    assert constant.is_leaf() and not constant.requires_grad and Tensor.make_const(a.cached_data).cached_data is a.cached_data
    made = Tensor.__new__(Tensor)
    made._init(ops.EWiseMul(), [a, b])
    np.testing.assert_array_equal(made.numpy(), A * B)
    assert made.requires_grad is True
    made._init(ops.EWiseMul(), [constant, constant])
    assert made.requires_grad is False
    leaf = Tensor.__new__(Tensor)
    leaf._init(None, [], cached_data=a.cached_data, requires_grad=False)
    assert leaf.is_leaf() and not leaf.requires_grad and leaf.num_outputs == 1


def test_what_a_tensor_is_made_of(device):
    a = Tensor(A, device=device, unknown_keyword=1)
    assert Tensor(a, dtype=np.float32).cached_data is a.cached_data
    assert Tensor(a).cached_data is a.cached_data and Tensor(a, device=ndl.cpu_numpy()).device == ndl.cpu_numpy()
    for source in (A, A.tolist(), ndl.NDArray(A, device=device), a, A.astype("float64")):
        t = Tensor(source, device=device)
        assert (t.shape, t.dtype, t.device, t.grad, t.requires_grad) == ((2, 2), "float32", device, None, True)
        np.testing.assert_array_equal(t.numpy(), A)
    assert Tensor([1, 2], device=device, requires_grad=False).requires_grad is False
    assert Tensor(5, device=device).shape == () and Tensor(np.int64(3), device=device).item() == 3
    assert (
        str(a) == str(A)
        and repr(a) == f"needle.Tensor({A})"
        and repr((Tensor([[0.5]], device=device),)) == "(needle.Tensor([[0.5]]),)"
    )
    assert not hasattr(Tensor, "__bool__") and not hasattr(Tensor, "__len__")
    assert (a == a) is True and (a != Tensor(a)) is True and len({a: 1, Tensor(a): 2}) == 2
    assert a.detach().is_leaf() and not a.detach().requires_grad and a.data.cached_data is a.cached_data
    a.numpy()[:] = 0  # a copy
    np.testing.assert_array_equal(a.numpy(), A)


def test_data_may_change_shape_but_not_dtype(device):
    bias = nn.Parameter(np.zeros((1, 2)), device=device)
    bias.data = Tensor([1.0, 2.0], device=device)
    assert bias.shape == (2,)
    with pytest.raises(TypeError):
        bias.data = Tensor([1, 2], device=device, dtype="int32")


def test_operators_make_the_courses_nodes(ab):
    a, b = ab
    expected = [
        (a + b, "EWiseAdd", A + B), (a * b, "EWiseMul", A * B), (a / b, "EWiseDiv", A / B), (a**b, "EWisePow", A**B),
        (a @ b, "MatMul", A @ B), (-a, "Negate", -A), (a + 2, "AddScalar", A + 2), (2 + a, "AddScalar", A + 2),
        (3 * a, "MulScalar", 3 * A), (a * 3, "MulScalar", 3 * A), (a / 2, "DivScalar", A / 2), (a**2, "PowerScalar", A**2),
        (a - 2, "AddScalar", A - 2), (a - b, "EWiseAdd", A - B), (1 - a, "AddScalar", 1 - A), (a * np.random.randn(1), "MulScalar", None),
        (a.sum(), "Summation", [A.sum()]), (a.broadcast_to((3, 2, 2)), "BroadcastTo", np.broadcast_to(A, (3, 2, 2))),
        (a.reshape((4,)), "Reshape", A.reshape(4)), (a.reshape(shape=[4]), "Reshape", A.reshape(4)), (a.transpose(), "Transpose", A.T),
        (a.matmul(b), "MatMul", A @ B),
    ]  # fmt: skip
    for found, name, wanted in expected:
        assert type(found.op).__name__ == name
        if wanted is not None:
            np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-5)
    difference = a - b
    assert [type(v.op).__name__ for v in autograd.find_topo_sort([difference])] == ["NoneType", "NoneType", "Negate", "EWiseAdd"]
    assert autograd.find_topo_sort([difference]) == [a, b, difference.inputs[1], difference]
    visited, order = set(), []
    autograd.topo_sort_dfs(difference, visited, order)
    assert order == autograd.find_topo_sort([difference]) and visited == set(order)
    np.testing.assert_array_equal(autograd.sum_node_list([a, b, a]).numpy(), A + B + A)
    for value in autograd.find_topo_sort([ops.split(difference, 0)[0]]):  # as the course's own backward does
        value.grad = None
    with pytest.raises(TypeError, match=r"\[find_topo_sort\] node_list is of type Tensor \(accepted: a list of values\)"):
        autograd.find_topo_sort(difference)


def test_backward_overwrites(device):
    x = Tensor(A, device=device)
    (x * 3).backward()  # seeded with ones, also where it is no scalar
    (x * x).backward()
    np.testing.assert_array_equal(x.grad.numpy(), 2 * A)
    autograd.compute_gradient_of_variables(x * 4, Tensor(B, device=device))
    np.testing.assert_array_equal(x.grad.numpy(), 4 * B)
    y = (x**3).sum()
    y.backward()
    gradient = x.grad
    gradient.backward()  # gradients are themselves graph Tensors
    np.testing.assert_allclose(x.grad.numpy(), 6 * A, rtol=1e-5)


def test_gradients_asked_of_an_op(ab, device):
    a, b = ab
    product = a * b
    first, second = product.op.gradient_as_tuple(Tensor(A, device=device), product)
    np.testing.assert_array_equal(first.numpy(), A * B)
    np.testing.assert_array_equal(second.numpy(), A * A)
    for axes, grad in ((0, [1.0, 2.0]), (1, [1.0, 2.0]), (None, [5.0]), ((0, 1), 5.0)):
        total = ops.summation(a, axes=axes)
        (found,) = total.op.gradient_as_tuple(Tensor(grad, device=device), total)
        assert found.shape == (2, 2)
    stacked = ops.stack([a, b], 0)
    (pair,) = stacked.op.gradient_as_tuple(Tensor(np.stack([A, B]), device=device), stacked)
    assert isinstance(pair, ndl.TensorTuple)
    np.testing.assert_array_equal(pair.tuple()[1].numpy(), B)
    item = ops.fused_add_scalars(a, 1, 2)[1]
    (pair,) = item.op.gradient_as_tuple(Tensor(A, device=device), item)
    np.testing.assert_array_equal([part.numpy() for part in pair], [0 * A, A])


def test_tuples(ab):
    a, b = ab
    pair = ops.make_tuple(a, b)
    assert len(pair) == 2 and isinstance(pair, ndl.TensorTuple) and isinstance(pair.tuple(), tuple) and len(pair.tuple()) == 2
    np.testing.assert_array_equal(pair[1].numpy(), B)
    np.testing.assert_array_equal((pair + pair)[0].numpy(), 2 * A)
    np.testing.assert_array_equal(ops.tuple_get_item(pair.detach(), 1).numpy(), B)
    for other in (a, ops.make_tuple(a)):
        with pytest.raises(ValueError, match=r"\[add\] a TensorTuple adds to"):
            pair + other
    assert repr(pair).startswith("needle.TensorTuple")
    more, less = ops.fused_add_scalars(a, 1, -1).tuple()
    np.testing.assert_array_equal(more.numpy() - less.numpy(), np.full((2, 2), 2))
    (more * less).backward()
    np.testing.assert_array_equal(a.grad.numpy(), 2 * A)
    x = Tensor(np.arange(24.0).reshape(2, 3, 4), device=a.device)
    parts = ops.split(x, 1)
    assert len(parts) == 3 and parts[2].shape == (2, 4)
    np.testing.assert_array_equal(ops.stack(parts, 1).numpy(), x.numpy())


# --- ops with their arguments by name ---


def test_ops_by_keyword(device):
    a = Tensor(A, device=device)
    np.testing.assert_array_equal(ops.add_scalar(a, scalar=2).numpy(), A + 2)
    np.testing.assert_array_equal(ops.mul_scalar(a, scalar=2).numpy(), A * 2)
    np.testing.assert_array_equal(ops.divide_scalar(a, scalar=2).numpy(), A / 2)
    for scalar in (-1, 0.5, 0, 3):
        np.testing.assert_allclose(ops.power_scalar(a, scalar=scalar).numpy(), A**scalar, rtol=1e-5)
    for shape, wide in (((1,), (3, 3, 3)), ((), (3, 3, 3)), ((2, 1), [2, 5]), ((1, 2), (4, 2))):
        x = Tensor(np.ones(shape), device=device)
        y = ops.broadcast_to(x, shape=wide)
        y.backward()
        assert y.shape == tuple(wide) and x.grad.shape == shape and x.grad.numpy().sum() == np.prod(wide)
    assert ops.reshape(a.transpose(), shape=[4]).numpy().tolist() == [1, 3, 2, 4]
    cube = Tensor(np.zeros((2, 3, 4)), device=device)
    assert ops.transpose(cube).shape == (2, 4, 3) and ops.transpose(cube, axes=(0, 2)).shape == (4, 3, 2)
    assert (
        ops.summation(cube, axes=(0, 2)).shape == (3,)
        and ops.summation(cube).shape == (1,)
        and ops.summation(cube, axes=1).shape == (2, 4)
        and ops.Summation(1)(cube).shape == (2, 4)
    )
    np.testing.assert_array_equal(ops.flip(a, axes=(0,)).numpy(), A[::-1])
    dilated = ops.dilate(a, dilation=1, axes=(0, 1))
    np.testing.assert_array_equal(dilated.numpy(), [[1, 0, 2, 0], [0, 0, 0, 0], [3, 0, 4, 0], [0, 0, 0, 0]])
    np.testing.assert_array_equal(ops.undilate(dilated, axes=(0, 1), dilation=1).numpy(), A)
    assert ops.dilate(a, axes=(2,), dilation=1).shape == (2, 2)  # an axis that is not there
    for op in (ops.dilate, ops.undilate):
        np.testing.assert_array_equal(op(a, axes=(0, 1), dilation=0).numpy(), A)
    np.testing.assert_array_equal(ops.dilate(a, axes=-1, dilation=1).numpy(), [[1, 0, 2, 0], [3, 0, 4, 0]])
    np.testing.assert_array_equal(ops.undilate(dilated, axes=(-2,), dilation=1).numpy(), [[1, 0, 2, 0], [3, 0, 4, 0]])
    image, kernel = Tensor(np.ones((1, 4, 4, 2)), device=device), Tensor(np.ones((3, 3, 2, 5)), device=device)
    assert ops.conv(image, kernel).shape == (1, 4, 4, 5) and ops.Conv()(image, kernel).shape == (1, 2, 2, 5)
    assert ops.conv(image, kernel, stride=2, padding=1).shape == (1, 2, 2, 5)


def test_extreme_values(device):
    large = Tensor([[1e10, 9e9], [-1e10, -1e10]], device=device)
    np.testing.assert_array_equal(ops.logsumexp(large, axes=(1,)).numpy(), np.float32([1e10, -1e10]))
    x = Tensor(np.random.default_rng(0).standard_normal((3, 4)) * 1e5, device=device)
    np.testing.assert_allclose(np.exp(ops.logsoftmax(x).numpy()).sum(1), 1, rtol=1e-5)
    y = Tensor(A, device=device)
    ops.logsumexp(y, axes=0).backward()
    np.testing.assert_allclose(y.grad.numpy(), np.exp(A) / np.exp(A).sum(0), rtol=1e-5)
    edge = Tensor([-1.0, 0.0, 2.0], device=device)
    ops.relu(edge).backward()
    np.testing.assert_array_equal(edge.grad.numpy(), [0, 0, 1])


# --- init ---


def test_init(device):
    kwargs = {"device": device, "requires_grad": True}
    for made in (
        init.rand(2, 3, **kwargs),
        init.zeros(2, 3, **kwargs),
        init.kaiming_uniform(2, 3, **kwargs),
        init.ones_like(init.ones(2, 3), **kwargs),
        init.randn(2, 3, **kwargs),
        init.randb(2, 3, dtype="float32", **kwargs),
        init.constant(2, 3, c=0.5, **kwargs),
        init.one_hot(3, Tensor([2, 0], device=device), **kwargs),
        init.kaiming_normal(2, 3, **kwargs),
    ):
        assert (made.shape, made.dtype, made.device, made.requires_grad) == ((2, 3), "float32", device, True)
    assert init.rand(2).device == ndl.cpu() and not init.rand(2).requires_grad
    for maker, width in (
        (lambda: init.rand(3, 5, low=-2, high=1, device=device), None), (lambda: init.randb(3, 5, p=0.3, device=device), None),
        (lambda: init.xavier_uniform(3, 5, gain=2.0, device=device), 2 * np.sqrt(6 / 8)),
        (lambda: init.kaiming_uniform(3, 5, device=device), np.sqrt(6 / 3)),
    ):  # fmt: skip
        np.random.seed(5)
        found = maker().numpy()
        np.random.seed(5)
        u = np.random.rand(3, 5).astype("float32")
        if found.dtype == bool:
            np.testing.assert_array_equal(found, u <= 0.3)
        else:
            np.testing.assert_allclose(found, u * 3 - 2 if width is None else u * 2 * width - width, rtol=1e-5, atol=1e-6)
        assert np.random.rand() != u.flat[0]
    for maker, std in (
        (lambda: init.randn(3, 5, mean=1, std=2, device=device), 2), (lambda: init.xavier_normal(3, 5, 3.0, device=device), 3 * np.sqrt(2 / 8)),
        (lambda: init.kaiming_normal(3, 5, device=device), np.sqrt(2 / 3)),
    ):  # fmt: skip
        np.random.seed(5)
        found = maker().numpy()
        np.random.seed(5)
        np.testing.assert_allclose(found, np.random.randn(3, 5) * std + (std == 2), rtol=1e-5, atol=1e-6)
    assert init.kaiming_uniform(9, 4, shape=(3, 3, 1, 4), device=device).shape == (3, 3, 1, 4)
    assert (
        init.kaiming_uniform(9, 4, "relu", device=device).shape == (9, 4)
        and init.constant(2, c=3.0, device=device).numpy().sum() == 6
    )
    for initializer in (init.kaiming_uniform, init.kaiming_normal, init.xavier_uniform, init.xavier_normal):
        assert initializer(0, 0, device=device).shape == (0, 0)
    for made, number in (
        (init.rand(3, low=2, high=2, device=device), 2), (init.randn(3, mean=2, std=0, device=device), 2),
        (init.randb(3, p=0, device=device), 0), (init.randb(3, p=1, device=device), 1),
    ):  # fmt: skip
        np.testing.assert_array_equal(made.numpy(), number)
    for like in (init.zeros_like, init.ones_like):
        assert like(init.zeros(2, device=device, dtype="float64")).dtype == "float64"
    for initializer in (init.kaiming_uniform, init.kaiming_normal):
        with pytest.raises(AssertionError):
            initializer(3, 3, nonlinearity="tanh")
    for dtype in ("float32", "int32"):
        np.testing.assert_array_equal(
            init.one_hot(3, Tensor([2, 0], device=device, dtype=dtype), device=device).numpy(), np.eye(3)[[2, 0]]
        )


# --- modules ---


def test_modules_find_what_is_in_them():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(2, 3)
            self.rest = [nn.Linear(3, 3, bias=False), {"deep": nn.Dropout(0.3), "also": (nn.Linear(1, 1),)}]

        def forward(self, x):
            return x + 1

    net = Net()
    deep = net.rest[1]["deep"]
    assert net.training and net(1) == 2 and len(net._children()) == 4
    net.eval()
    assert not net.training and not deep.training and not net.rest[1]["also"][0].training
    net.train()
    assert deep.training
    found = net.parameters()
    assert len(found) == 5 and found[0] is net.first.weight and found[1] is net.first.bias and found[2] is net.rest[0].weight
    assert all(isinstance(p, nn.Parameter) for p in found) and nn._child_modules([net]) and nn._unpack_params({"x": [net]}) == found
    weight, bias = nn.Sequential(nn.Linear(2, 2)).parameters()
    assert weight.shape == (2, 2) and bias.shape == (1, 2) and isinstance(nn.Sequential(net, net).modules, tuple)


def test_linear_takes_any_leading_axes_and_a_flat_bias(device):
    layer = nn.Linear(2, 2, device=device)
    layer.weight = nn.Parameter(A, device=device)
    layer.bias = nn.Parameter([10.0, 20.0], device=device)
    for shape in ((3, 2), (4, 3, 2)):
        x = np.arange(np.prod(shape), dtype="float32").reshape(shape)
        np.testing.assert_allclose(layer(Tensor(x, device=device)).numpy(), x @ A + [10, 20], rtol=1e-6)


def test_loss_takes_classes_of_any_dtype(device):
    scores = np.random.default_rng(1).standard_normal((4, 3)).astype("float32")
    classes = [0, 2, 1, 2]
    wanted = np.mean(np.log(np.exp(scores).sum(1)) - scores[range(4), classes])
    for dtype in ("float32", "int32", "uint8"):
        loss = nn.SoftmaxLoss()(Tensor(scores, device=device), Tensor(classes, device=device, dtype=dtype))
        np.testing.assert_allclose(loss.numpy(), [wanted], rtol=1e-5)
    scores[:, 1] = [-np.inf, -np.inf, 0, -np.inf]  # classes that are not possible, and not the right ones
    wanted = np.mean(np.log(np.exp(scores).sum(1)) - scores[range(4), classes])
    logits = Tensor(scores, device=device)
    loss = nn.SoftmaxLoss()(logits, Tensor(classes, device=device))
    loss.backward()
    np.testing.assert_allclose(loss.numpy(), [wanted], rtol=1e-5)
    assert np.isfinite(logits.grad.numpy()).all()
    for wrong in (-1, 3, -100, np.inf, -np.inf, -(2**31), 2**32):
        with pytest.raises(IndexError):
            nn.SoftmaxLoss()(logits, Tensor([0, 2, 1, wrong], device=device)).numpy()


def test_normalization_keeps_its_statistics_out_of_the_graph(device):
    norm, x = nn.BatchNorm1d(3, device=device), np.random.default_rng(0).standard_normal((8, 3)).astype("float32")
    assert [t.shape for t in (norm.weight, norm.bias, norm.running_mean, norm.running_var)] == [(3,)] * 4 and len(
        norm.parameters()
    ) == 2
    norm(Tensor(x, device=device))
    assert norm.running_mean.is_leaf() and norm.running_var.is_leaf() and not norm.running_var.requires_grad
    np.testing.assert_allclose(norm.running_mean.numpy(), 0.1 * x.mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(norm.running_var.numpy(), 0.9 + 0.1 * x.var(0), rtol=1e-5)  # the biased variance
    norm(Tensor(2 * x, device=device))
    np.testing.assert_allclose(norm.running_mean.numpy(), 0.29 * x.mean(0), rtol=1e-4, atol=1e-6)
    norm.eval()
    wanted = (x - norm.running_mean.numpy()) / np.sqrt(norm.running_var.numpy() + 1e-5)
    np.testing.assert_allclose(norm(Tensor(x, device=device)).numpy(), wanted, rtol=1e-4, atol=1e-5)
    image = np.random.default_rng(0).standard_normal((2, 3, 4, 5)).astype("float32")
    flat = nn.BatchNorm2d(3, eps=0.25, device=device)(Tensor(image, device=device)).numpy()
    wanted = (image - image.mean((0, 2, 3), keepdims=True)) / np.sqrt(image.var((0, 2, 3), keepdims=True) + 0.25)
    np.testing.assert_allclose(flat, wanted, rtol=1e-3, atol=1e-4)
    rows = nn.LayerNorm1d(3, device=device)(Tensor(x, device=device)).numpy()
    np.testing.assert_allclose(rows, (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5), rtol=1e-3, atol=1e-4)


def test_small_modules(device):
    x = Tensor(A, device=device)
    assert nn.Identity()(x) is x and nn.Flatten()(Tensor(np.zeros((2, 3, 4)), device=device)).shape == (2, 12)
    np.testing.assert_array_equal(nn.Residual(nn.ReLU())(x).numpy(), 2 * A)
    np.testing.assert_array_equal(nn.GELU("tanh")(x).numpy(), ops.gelu(x, "tanh").numpy())
    np.testing.assert_allclose(nn.Sigmoid()(x).numpy(), 1 / (1 + np.exp(-A)), rtol=1e-5)
    np.testing.assert_allclose(nn.SiLU()(x).numpy(), A / (1 + np.exp(-A)), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(nn.Tanh()(x).numpy(), np.tanh(A), rtol=1e-5, atol=1e-6)
    dropout = nn.Dropout(0.25)
    np.random.seed(3)
    kept = dropout(x).numpy()
    np.random.seed(3)
    np.testing.assert_allclose(kept, A * (np.random.rand(2, 2).astype("float32") <= 0.75) / 0.75, rtol=1e-6)
    dropout.eval()
    np.testing.assert_array_equal(dropout(x).numpy(), A)
    conv = nn.Conv(3, 4, (3, 3), stride=(2, 2), device=device)
    assert (conv.in_channels, conv.out_channels, conv.kernel_size, conv.stride) == (3, 4, 3, 2)
    assert (
        conv.weight.shape == (3, 3, 3, 4) and conv.bias.shape == (4,) and nn.Conv(3, 4, 3, bias=False, device=device).bias is None
    )
    assert np.abs(conv.bias.numpy()).max() <= 1 / np.sqrt(27) and np.abs(conv.weight.numpy()).max() <= np.sqrt(6 / 27)
    table = nn.Embedding(5, 3, device=device)
    ids = np.array([[0, 4], [1, 1]])
    np.testing.assert_array_equal(table(Tensor(ids, device=device)).numpy(), table.weight.numpy()[ids])


def test_recurrent_modules(device):
    x = Tensor(np.random.default_rng(0).standard_normal((4, 2, 3)), device=device)
    for name, cells, gates in (("RNN", "rnn_cells", 1), ("LSTM", "lstm_cells", 4)):
        module = getattr(nn, name)(3, 5, num_layers=2, device=device)
        first, second = getattr(module, cells)
        assert [t.shape for t in (first.W_ih, first.W_hh, first.bias_ih, first.bias_hh)] == [
            (3, 5 * gates),
            (5, 5 * gates),
            (5 * gates,),
            (5 * gates,),
        ]
        assert second.W_ih.shape == (5, 5 * gates) and np.abs(first.W_ih.numpy()).max() <= 1 / np.sqrt(5)
        zeros = Tensor(np.zeros((2, 2, 5)), device=device)
        (out, state), (same, _) = module(x), module(x, zeros if gates == 1 else (zeros, zeros))
        assert out.shape == (4, 2, 5) and all(s.shape == (2, 2, 5) for s in (state if gates == 4 else (state,)))
        np.testing.assert_array_equal(out.numpy(), same.numpy())
        out.backward()
        assert all(p.grad is not None for p in module.parameters())
        for replaced in ("W_ih", "W_hh", "bias_ih", "bias_hh"):  # plain Tensors, put there after construction
            setattr(second, replaced, Tensor(np.zeros(getattr(second, replaced).shape), device=device))
        np.testing.assert_array_equal(module(x)[0].numpy(), np.zeros((4, 2, 5)))
    assert nn.RNNCell(3, 5, nonlinearity="relu", device=device)(Tensor(np.ones((2, 3)), device=device)).numpy().min() >= 0
    assert nn.RNN(3, 5, nonlinearity="relu", device=device)(Tensor(np.ones((4, 2, 3)), device=device))[0].numpy().min() >= 0
    for name, f in (("rnn", lambda: ops.rnn(x, x[0], x[0], x[0], None, "gelu")), ("rnn_cell", lambda: ops.rnn_cell(x[0], "gelu"))):
        with pytest.raises(ValueError, match=rf"^\[{name}\] unknown nonlinearity: gelu \(accepted: tanh, relu\)"):
            f()
    with pytest.raises(ValueError, match=r"^\[RNNCell\] unknown nonlinearity: .*\(accepted: tanh, relu\)"):
        nn.RNN(3, 5, nonlinearity=np.zeros(2))
    with pytest.raises(ValueError, match="unknown nonlinearity: Tanh"):
        nn.RNN(3, 5, nonlinearity="Tanh")
    lstm = nn.LSTM(3, 5, bias=False, device=device)
    hidden, cell = lstm.lstm_cells[0](x[0])
    assert hidden.shape == cell.shape == (2, 5)
    out, (_, last) = lstm(x[:1])
    np.testing.assert_allclose([out[0].numpy(), last[0].numpy()], [hidden.numpy(), cell.numpy()], rtol=1e-5, atol=1e-6)


def test_an_attention_layer_is_its_definition(device):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 5, 6))
    layer = nn.AttentionLayer(6, 2, 3, causal=True, device=device)
    out = layer(Tensor(x, device=device))
    assert len(layer.parameters()) == 10 and layer.probs.is_leaf()

    def heads(projection):
        centred = x - x.mean(-1, keepdims=True)
        normed = centred / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return (normed @ projection.weight.numpy()).reshape(2, 5, 2, 3).transpose(0, 2, 1, 3)

    q, k, v = map(heads, (layer.q_projection, layer.k_projection, layer.v_projection))
    scores = np.where(np.tri(5) > 0, q @ k.swapaxes(-1, -2) / np.sqrt(3), -np.inf)
    probs = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    np.testing.assert_allclose(layer.probs.numpy(), probs, rtol=1e-4, atol=1e-5)
    wanted = (probs @ v).transpose(0, 2, 1, 3).reshape(2, 5, 6) @ layer.out_projection.weight.numpy()
    np.testing.assert_allclose(out.numpy(), wanted, rtol=1e-3, atol=1e-4)


def test_transformer_modules(device):
    x = np.random.default_rng(0).standard_normal((2, 5, 8)).astype("float32")
    attention = nn.MultiHeadAttention(causal=True, device=device)
    q = Tensor(x.reshape(2, 5, 2, 4).transpose(0, 2, 1, 3), device=device)
    mask = attention.create_causal_mask(5, 5, device)
    assert isinstance(mask, ndl.NDArray) and mask.shape == (1, 1, 5, 5)
    np.testing.assert_array_equal(mask.numpy()[0, 0], np.triu(np.full((5, 5), -np.finfo("float32").max), 1))
    out, probs = attention(q, q, q)
    assert out.shape == (2, 2, 5, 4) and probs.shape == (2, 2, 5, 5) and np.triu(probs.numpy(), 1).max() == 0
    np.testing.assert_allclose(probs.numpy().sum(-1), 1, rtol=1e-5)
    np.testing.assert_allclose(attention.matmul(q, q).numpy(), q.numpy() @ q.numpy().swapaxes(-1, -2), rtol=1e-4, atol=1e-5)
    layer = nn.AttentionLayer(8, 2, 4, k_features=6, v_features=7, out_features=3, causal=False, device=device)
    for name in "prenorm_q prenorm_k prenorm_v q_projection k_projection v_projection attn out_projection".split():
        assert hasattr(layer, name)
    assert layer.q_projection.bias is None
    other = [Tensor(np.random.default_rng(1).standard_normal((2, 5, n)), device=device) for n in (6, 7)]
    assert layer(Tensor(x, device=device), *other).shape == (2, 5, 3)
    assert nn.AttentionLayer(8, 2, 4, device=device)(Tensor(x, device=device)).shape == (2, 5, 8)
    for dtype in ("float32", "float16", "float64"):
        out = nn.TransformerLayer(8, 2, 4, 16, device=device, dtype=dtype)(Tensor(x, device=device, dtype=dtype))
        assert out.shape == (2, 5, 8) and out.dtype == dtype
    layer = nn.TransformerLayer(8, 2, 4, 16, device=device)
    y = x + layer.attention(Tensor(x, device=device)).numpy()
    normed = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-5)
    inner, outer = ((linear.weight.numpy(), linear.bias.numpy()) for linear in (layer.mlp.modules[0], layer.mlp.modules[3]))
    y = y + np.maximum(normed @ inner[0] + inner[1], 0) @ outer[0] + outer[1]
    np.testing.assert_allclose(layer(Tensor(x, device=device)).numpy(), y, rtol=1e-4, atol=1e-5)
    for batch_first in (False, True):
        model = nn.Transformer(8, 16, 2, num_head=2, dim_head=4, sequence_len=10, batch_first=batch_first, device=device)
        out, state = model(Tensor(x, device=device))
        assert out.shape == state.shape == (2, 5, 8) and not state.numpy().any()
        later = x.copy()
        later[(slice(None), 4) if batch_first else 1] *= -1  # the last position: the others must not see it
        before = (slice(None), slice(0, 4)) if batch_first else slice(0, 1)
        np.testing.assert_array_equal(model(Tensor(later, device=device))[0].numpy()[before], out.numpy()[before])
    model = nn.Transformer(8, 16, 1, num_head=2, dim_head=4, causal=False, batch_first=True, device=device)
    out, changed = (model(Tensor(values, device=device))[0].numpy()[:, :4] for values in (x, later))
    assert (out != changed).any(axis=-1).all()
    model = nn.Transformer(8, 16, 1, num_head=2, dim_head=4, dropout=1.0, sequence_len=5, batch_first=True, device=device)
    np.testing.assert_array_equal(model(Tensor(x, device=device))[0].numpy(), x + model.positions.weight.numpy())


# --- optimizers ---


@pytest.mark.parametrize(
    "make", [lambda p: optim.SGD(p, momentum=0.9), lambda p: optim.Adam(p, weight_decay=0.1)], ids=["SGD", "Adam"]
)
def test_optimizers_keep_dtypes_and_gradients(device, make):
    p = nn.Parameter(np.ones(3), device=device)
    unused = nn.Parameter(np.ones(2), device=device)
    opt = make([p, unused])
    p.grad = Tensor([1.0, 2.0, 3.0], device=device)
    opt.step()
    np.testing.assert_array_equal(p.grad.numpy(), [1, 2, 3])
    assert p.dtype == "float32" and opt.params == [p, unused] and list(opt.u if hasattr(opt, "u") else opt.m) == [p]
    np.testing.assert_array_equal(unused.numpy(), [1, 1])
    p.grad = Tensor(np.ones(3), device=device, dtype="float64")  # float64 batches, as in a notebook
    opt.step()
    assert p.dtype == "float32"
    p.grad = Tensor([0.0, 3.0, 4.0], device=device)
    unused.grad = Tensor([0.0, 12.0], device=device)
    opt.clip_grad_norm(max_norm=1.0)
    np.testing.assert_allclose(p.grad.numpy(), np.array([0, 3, 4]) / 13, rtol=1e-4)
    opt.reset_grad()
    assert p.grad is None and unused.grad is None


def test_an_optimizer_takes_a_parameter_whose_values_are_a_view(device):
    p = nn.Parameter(np.zeros((3, 2)), device=device)
    values = Tensor(np.arange(6.0).reshape(2, 3), device=device)
    p.data = values.T
    p.grad = Tensor(np.arange(6.0).reshape(3, 2), device=device)
    optim.SGD([p], lr=0.5).step()
    np.testing.assert_array_equal(p.numpy(), np.arange(6.0).reshape(2, 3).T - 0.5 * np.arange(6.0).reshape(3, 2))


# --- data and apps ---


def test_words(tmp_path):
    (tmp_path / "train.txt").write_text("a b a\nc\n")
    (tmp_path / "test.txt").write_text("b d\n")
    corpus = data.Corpus(tmp_path)
    assert corpus.train == [0, 1, 0, 2, 3, 2] and corpus.test == [1, 4, 2] and len(corpus.dictionary) == 5
    assert corpus.dictionary.idx2word == ["a", "b", "<eos>", "c", "d"] and corpus.dictionary.word2idx["c"] == 3
    assert corpus.dictionary.add_word("new") == 5 == corpus.dictionary.add_word("new")
    assert data.Corpus(tmp_path, max_lines=1).train == [0, 1, 0, 2]
    batches = data.batchify(list(range(11)), 2, ndl.cpu(), "float32")
    np.testing.assert_array_equal(batches, [[0, 5], [1, 6], [2, 7], [3, 8], [4, 9]])
    assert batches.dtype == np.float32
    X, y = data.get_batch(batches, 0, 3, device=ndl.cpu_numpy(), dtype="float32")
    assert X.device == ndl.cpu_numpy() and X.dtype == "float32" and X.shape == (3, 2)
    assert y.numpy().tolist() == [1, 6, 2, 7, 3, 8]
    assert data.get_batch(batches, 3, 3)[0].shape == (1, 2)  # what is left


def test_image_data(tmp_path):
    import pickle

    images, labels = np.random.randint(0, 256, (3, 3072), dtype=np.uint8), [1, 2, 0]
    for protocol in range(6):  # 2 is that of the published files, 5 that of Python 3.14
        name = f"data_batch_{protocol}" if protocol else "test_batch"
        (tmp_path / name).write_bytes(pickle.dumps({b"data": images, b"labels": labels}, protocol))
    test, train = data.CIFAR10Dataset(str(tmp_path), train=False), data.CIFAR10Dataset(str(tmp_path), train=True, p=0.5)
    assert (len(test), len(train)) == (3, 15) and test.X.shape == (3, 3, 32, 32) and list(test.y) == labels
    image, label = test[1]
    np.testing.assert_allclose(image, images[1].reshape(3, 32, 32) / 255, rtol=1e-6)
    assert isinstance(test[1], tuple) and label == 2 and test[np.array([2, 0])][0].shape == (2, 3, 32, 32)
    batches = [(X.shape, y.shape) for X, y in data.DataLoader(dataset=train, batch_size=4, shuffle=True)]
    assert batches == [((4, 3, 32, 32), (4,))] * 3 + [((3, 3, 32, 32), (3,))]
    flipping = data.CIFAR10Dataset(str(tmp_path), train=False, transforms=[data.RandomFlipHorizontal(p=1.0)])
    np.testing.assert_array_equal(flipping[1][0], test[1][0][:, :, ::-1])
    picture = np.arange(5 * 4 * 2).reshape(5, 4, 2)
    np.random.seed(0)
    flipped, kept = data.RandomFlipHorizontal(p=1.0)(picture), data.RandomFlipHorizontal(p=0.0)(picture)
    np.testing.assert_array_equal(flipped, picture[:, ::-1])
    np.testing.assert_array_equal(kept, picture)
    np.random.seed(4)
    cropped = data.RandomCrop(padding=2)(picture)
    np.random.seed(4)
    x, y = np.random.randint(-2, 3, size=2)
    padded = np.pad(picture, ((2, 2), (2, 2), (0, 0)))
    np.testing.assert_array_equal(cropped, padded[2 + x : 7 + x, 2 + y : 6 + y])
    for transform in (data.RandomFlipHorizontal(1.0), data.RandomCrop(2)):
        assert transform(picture.astype(np.uint8)).dtype == np.uint8
        for images in (picture[0], picture[None]):
            with pytest.raises(ndl.errors.ShapeError, match=r"image has shape .* \(accepted: \(H, W, C\)"):
                transform(images)
    assert data.Dataset([lambda v: v + 1, lambda v: v * 2]).apply_transforms(1) == 4 and data.Dataset().apply_transforms(3) == 3


def test_cifar_loops():
    from apps.models import ResNet9
    from apps.simple_ml import evaluate_cifar10, train_cifar10

    rng = np.random.default_rng(0)
    loader = data.DataLoader(data.NDArrayDataset(rng.standard_normal((4, 3, 32, 32)).astype("float32"), rng.integers(0, 10, 4)), 4)
    model = ResNet9(device=ndl.cpu_numpy())  # the loader's Tensors are on the default device
    first = train_cifar10(model, loader, n_epochs=1, optimizer=optim.Adam, lr=0.01, weight_decay=0.0)
    later = train_cifar10(model, loader, n_epochs=3, optimizer=optim.Adam, lr=0.01, weight_decay=0.0)
    accuracy, loss = evaluate_cifar10(model, loader)
    assert later[1] < first[1] and 0 <= accuracy <= 1 and np.isfinite(loss) and not model.training


@pytest.mark.parametrize("initializer", ["kaiming_uniform", "kaiming_normal"])
def test_what_an_initializer_refuses_without_asserts(initializer):
    code = f"import needle as ndl; ndl.init.{initializer}(3, 3, nonlinearity='tanh')"
    env = {**os.environ, "PYTHONPATH": str(Path(ndl.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-O", "-c", code], env=env, capture_output=True, text=True)
    assert done.stderr.endswith("AssertionError: Only relu supported currently\n")
