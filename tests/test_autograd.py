"""The graph: what is kept, what is recomputed, what is freed."""

import contextlib
import copy
import gc
import math
import pickle
import threading
import weakref
from contextvars import copy_context

import numpy as np
import pytest

import needle as ndl
from making import leaf
from needle import amp, autograd, backward, graph, nn, ops
from needle.autograd import TensorTupleOp
from needle.backend_ndarray import kernels
from needle.backend_ndarray.block_layout import BlockLayout
from needle.backend_ndarray.host_memory import ACTIVATION, GRADIENT, OPTIMIZER_STATE
from needle.backend_ndarray.ndarray import full, matmul
from needle.errors import DeviceError, DTypeError, GraphError, ShapeError
from needle.models import Pythia, PythiaConfig
from needle.nn.nn_basic import no_dropout
from needle.optim import SGD, Adam, AdamW
from op_cases import CASES, tables


def test_backward_overwrites_and_accumulate_adds(host):
    x = leaf([1.0, 2.0, 3.0], host)
    for _ in range(2):
        (x * x).sum().backward()
        np.testing.assert_array_equal(x.grad.numpy(), [2, 4, 6])
    for k in (2, 3, 4):
        (x * x).sum().backward(accumulate=True)
        np.testing.assert_array_equal(x.grad.numpy(), np.array([2, 4, 6]) * k)
    for f in (lambda: x * x, lambda: x * 2):  # the first sum is of this backward's own parts, the second of two backwards alone
        f().backward()
        f().backward(accumulate=True)
        with pytest.raises(GraphError, match="accumulated gradient has no history"):
            x.grad.backward()


@pytest.mark.parametrize(
    ("op", "kept"),
    [
        *[(op, 0) for op in (ops.exp, ops.tanh, ops.sigmoid, ops.relu, ops.softmax, ops.logsoftmax)],
        *[(op, 1) for op in (ops.log, ops.gelu, ops.silu)],
        *[(lambda x, op=op: ops.relu(op(x)), 1) for op in (ops.gelu, ops.silu)],  # whose result is computed again
        (lambda x: ops.where(ndl.Tensor(x.numpy(), device=x.device, requires_grad=False), x, x * 2), 1),  # the condition
        (lambda x: ops.embedding(x, ndl.Tensor([0], device=x.device)), 0),
        (lambda x: ops.fused_add_scalars(x, 1.0, 2.0)[0], 0),
        (lambda x: ops.linear_cross_entropy(x[:2], x, ndl.Tensor([0, 1], device=x.device)), 1),  # the gradient of the weight
        (lambda x: ops.linear(x, x + 1, x[0]), 2),  # what was multiplied
        (lambda x: x @ (x + 1), 2),
        (lambda x: ops.conv(ops.reshape(x, (1, 128, 128, 1)), ops.reshape(x[:3, :3], (3, 3, 1, 1))), 1),  # the image
        (lambda x: ops.dropout(x, 0.5, seed=1), 0),  # its mask is made again
        (lambda x: ops.layer_norm(x, x[0], x[1]), 1),
        (lambda x: ops.batch_norm(x, x[0], x[1])[0], 1),
        (lambda x: ops.layer_norm(x, x[0], x[1]) * 2, 1),  # of what a norm gives the statistics
        (lambda x: ops.batch_norm(x, x[0], x[1])[0] * 2, 1),
        (lambda x: ops.rotary_qkv(ops.reshape(ops.stack([x, x, x], 0), (1, 128, 2, 3, 64)), *tables(128, x.device))[0], 0),
        (lambda x: ops.attention(*[ops.reshape(x + i, (1, 1, 128, 128)) for i in range(3)]), 3),  # queries, keys and values
    ],
)
def test_what_a_graph_keeps_beside_its_result(host, op, kept):
    """Of arrays of this size that nobody holds: what gradients read."""
    before = host.memory_stats()["live"]
    x = leaf(np.ones((128, 128)), host)
    y = op(x * 2)
    assert round((host.memory_stats()["live"] - before - y.cached_data.nbytes) / 65_536) == 1 + kept
    y.backward()


# What the formula of an op's gradient has in it: its inputs, a, b .. in their order, and y, its result, or items of that, 0, 1 ...
READ = {
    "": "AddScalar AsType BroadcastTo Concatenate Dilate DivScalar Dropout EWiseAdd Flip FusedAddScalars GetItem MakeTensorTuple Mean "
    "MulScalar Negate Pad Permute Reshape Rotary RotaryQKV SetItem Split Stack Summation Transpose TupleGetItem UnDilate",
    "a": "Abs Clip Cos Erf GELU Log PowerScalar SiLU Sin Where",
    "b": "Embedding",
    "ab": "Conv DDS DSD EWiseDiv EWiseMul EWisePow Linear MatMul Maximum Minimum SDD",
    "y": "Exp LogSoftmax ReLU Sigmoid Softmax Sqrt Tanh",
    "12": "LinearCrossEntropy",
    "ay": "LogSumExp Max RDivScalar",
    "ab1": "CrossEntropy",
    "ab12": "BatchNorm LayerNorm",
    "abc01": "Attention",
    "abcdy": "RNN",
    "abcde023": "LSTM",
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_graph_keeps_what_the_formulas_of_its_gradients_have_in_them(host, case):
    read = {name: letters for letters, names in READ.items() for name in names.split()}
    root = case.run(*[leaf(x, host) + 1 for x in case.inputs()])._as_node()  # no handle holds what goes in and what comes out
    nodes = [n for n in graph.differentiable_order([root]) if n.op is not None]
    named = [(n.op.name, letter, of, None) for n in nodes for letter, of in [*zip("abcdef", n.inputs), ("y", n)]]
    named += [(n.op.name, str(i), n, i) for n in nodes if isinstance(n.op, TensorTupleOp) for i in range(len(n.spec))]
    parts = [(n, i, part) for n in nodes for i, part in (enumerate(n.array) if type(n.array) is tuple else [(None, n.array)])]
    wanted = {(of, item) for op, letter, of, item in named if letter in read[op] and of.op is not None}
    assert {(n, item) for n, item, part in parts if part is not None} == wanted


BLOCKS = BlockLayout(np.eye(2, dtype=bool)[None], block=16)


@pytest.mark.parametrize(
    "op, shapes",
    [
        (ops.multiply, [(4, 3), (4, 3)]),
        (ops.divide, [(4, 3), (4, 3)]),
        (ops.matmul, [(4, 3), (3, 5)]),
        (ops.matmul, [(3,), (3, 5)]),
        (ops.linear, [(4, 3), (3, 5), (5,)]),
        (lambda a, b, bias: ops.conv(a, b, padding=1, bias=bias), [(2, 4, 4, 3), (3, 3, 3, 5), (5,)]),
        (lambda a, b: ops.sdd(a, b, BLOCKS), [(1, 32, 16), (1, 16, 32)]),
        (lambda a, b: ops.dsd(a, b, BLOCKS), [(1, 2, 16, 16), (1, 32, 4)]),
        (lambda a, b: ops.dds(a, b, BLOCKS), [(1, 4, 32), (1, 2, 16, 16)]),
    ],
    ids="mul div matmul vector linear conv sdd dsd dds".split(),
)
def test_what_only_the_gradient_of_a_constant_would_read_is_not_kept(host, op, shapes):
    leaves = [leaf(np.random.default_rng(i).random(shape) + 1, host) for i, shape in enumerate(shapes)]
    expected = autograd.grad(op(*leaves).sum(), leaves)
    for i in range(len(leaves)):
        y = op(*[x * 1 if k == i else x.detach() for k, x in enumerate(leaves)])
        kept = y._as_node().inputs[i].array is not None
        assert kept == (op is ops.divide and i == 1)
        y.sum().backward()
        np.testing.assert_allclose(leaves[i].grad.numpy(), expected[i].numpy(), rtol=1e-6)


def test_layers_that_are_frozen_keep_no_activations(cpu):
    frozen = [nn.Linear(64, 64, device=cpu) for _ in range(4)]
    for p in [p for layer in frozen for p in layer.parameters()]:
        p.requires_grad = False
    x = leaf(np.ones((256, 64)), cpu)
    start = ndl.memory.stats(cpu).live
    y = x * 2
    for layer in frozen:
        y = layer(y)
    assert ndl.memory.stats(cpu).live - start == y.size * 4
    y.sum().backward()
    expected = 2 * np.linalg.multi_dot([layer.weight.numpy() for layer in frozen]).sum(1)
    np.testing.assert_allclose(x.grad.numpy(), np.broadcast_to(expected, x.shape), rtol=1e-4, atol=1e-5)


def test_items_of_a_tuple_that_no_gradient_reads_are_made_again(host):
    x = leaf(np.arange(12.0).reshape(3, 4) ** 2, host)
    y = ops.layer_norm(x * 1, x[0], x[1])
    node = y._as_node().inputs[0]
    for held in (False, True):
        assert [part is not None for part in node.array] == [False, True, True]
        items = y.inputs[0]
        np.testing.assert_array_equal(items[0].numpy(), y.numpy())
        np.testing.assert_allclose(items[1].numpy(), x.numpy().mean(1), rtol=1e-6)
        y.backward()
        grad = x.grad.numpy()
        assert node.array is None
        if not held:
            del items
        y.backward(retain_graph=True)  # of which all is made again, or taken from what holds it
        np.testing.assert_array_equal(x.grad.numpy(), grad)
    assert [part is not None for part in node.array] == [False, True, True]


def counted(monkeypatch, op):
    """A list that grows with each ``compute`` of ``op``."""
    calls, compute = [], op.compute
    monkeypatch.setattr(op, "compute", lambda self, *args: (calls.append(op), compute(self, *args))[1])
    return calls


def test_a_tuple_that_a_segment_takes_from_outside_is_kept_whole(host, monkeypatch):
    computed = counted(monkeypatch, ops.BatchNorm)
    x = leaf(np.arange(12.0).reshape(4, 3) ** 2, host)
    items = ops.batch_norm(x * 1, x[0], x[1])
    with autograd.rematerialize():
        loss = (items[1] * items[1]).sum()
    del items
    loss.backward()
    assert len(computed) == 1


def test_backward_reads_a_tuple_where_the_graph_has_it_whoever_looks_at_it(host, monkeypatch):
    computed = counted(monkeypatch, ops.LinearCrossEntropy)
    x = leaf(np.eye(4), host)
    loss = ops.linear_cross_entropy(x * 1, x, leaf([1, 2, 3, 0], host, "int32", requires_grad=False))
    held = loss.inputs[0]
    loss.backward()
    assert len(computed) == 1
    assert held[0].item() == loss.item()


def test_batch_norm_of_16_bits_with_weights_of_32_has_gradients_of_32(host):
    values = np.random.default_rng(0).standard_normal((40, 3)).astype(np.float16)
    grads = []
    for dtype in ("float16", "float32"):
        x, w, b = leaf(values, host, dtype), leaf([0.1, 0.2, 0.3], host), leaf([1, 2, 3], host)
        y = ops.batch_norm(x, w, b)[0]
        (y * y).sum().backward()
        grads.append([w.grad.numpy(), b.grad.numpy()])
        assert x.grad.dtype == dtype
    np.testing.assert_array_equal(*grads)


def test_an_op_keeps_the_axes_it_was_given(host):
    """A list may change before backward, and a generator can be read once."""
    values = np.arange(24.0).reshape(2, 3, 4)
    weights = {order: leaf(np.arange(24.0).reshape(np.transpose(values, order).shape), host) for order in [(1, 2, 0), (2, 0, 1)]}
    for order, weight in weights.items():
        for given in (list, iter, tuple):
            x, axes = leaf(values, host), given(order)
            y = ops.permute(x, axes) * weight
            if isinstance(axes, list):
                axes[:] = [0, 1, 2]
            y.sum().backward()
            np.testing.assert_array_equal(x.grad.numpy(), np.transpose(weight.numpy(), np.argsort(order)))
    for make in (lambda x, n: x.sum(n), lambda x, n: x.mean(n), lambda x, n: ops.max(x, n), lambda x, n: ops.logsumexp(x, n),
                 lambda x, n: ops.flip(x, n)):  # fmt: skip
        gradients = []
        for axes in ([0, 2], (0, 2)):
            x = leaf(values, host)
            y = make(x, axes)
            if isinstance(axes, list):
                axes[:] = [1]
            (y * y).sum().backward()
            gradients.append(x.grad.numpy())
        np.testing.assert_array_equal(*gradients)
    with pytest.raises(ShapeError, match=r"\[sum\] both axes 0 and axis 1 are given"):
        leaf(values, host).sum(0, axis=1)


def test_a_scalar_is_a_number_to_python(host):
    x = leaf([1.5], host)
    assert float(x) == 1.5 and int(x) == 1 and f"{x:.2f}" == "1.50" and f"{x}" == str(x) and not math.isnan(x * 2)
    assert (leaf(1.5, host) + np.array([2.0])).shape == ()  # so is (1,) of numpy, as in the course
    with pytest.raises(ShapeError, match="exactly one"):
        float(leaf([1.0, 2.0], host))


def test_a_comparison_says_how_a_mask_is_made(host):
    x = leaf([1.5, -1.0], host)
    for compare in (lambda: x > 0, lambda: x <= x, lambda: np.zeros(2) < x, lambda: np.float32(1) >= x, lambda: max(x, x)):
        with pytest.raises(DTypeError, match=r"\[compare\] Tensors are not ordered \(accepted: what \.item\(\) or \.numpy"):
            compare()
    # np.mean of False would pass for an accuracy.
    for compare in (lambda: np.zeros(2) == x, lambda: x != np.zeros(2), lambda: x.cached_data == x):
        with pytest.raises(DTypeError, match=r"\[compare\] == of a Tensor and an array is identity \(accepted: \.numpy"):
            compare()
    assert x == x and x != leaf([1.5, -1.0], host) and (x == 1.5) is False and {x: 1}[x] == 1
    mask = ndl.Tensor(x.numpy() > 0, device=host, requires_grad=False)
    np.testing.assert_array_equal((x * mask).numpy(), [1.5, 0])


def test_a_module_and_its_optimizer_are_copied(host):
    model = nn.Sequential(nn.Linear(3, 4, device=host), nn.BatchNorm1d(4, device=host))
    assert model.eval() is model and not model.modules[1].training and model.train() is model
    optimizer = AdamW(model.parameters())
    (model(leaf(np.eye(3), host)) ** 2).sum().backward()
    optimizer.step()
    copied, copied_optimizer = copy.deepcopy((model, optimizer))
    before = [p.numpy() for p in model.parameters()]
    for p, q, kept in zip(model.parameters(), copied.parameters(), copied_optimizer.params):
        assert q is kept and type(q) is type(p) and q.requires_grad and q.cached_data.category == p.cached_data.category
        np.testing.assert_array_equal(p.numpy(), q.numpy())
        np.testing.assert_array_equal(p.grad.numpy(), q.grad.numpy())
        assert (q.grad.cached_data.category, copied_optimizer.m[q].category) == (GRADIENT, OPTIMIZER_STATE)
    copied_optimizer.step()
    assert all(np.array_equal(p.numpy(), values) for p, values in zip(model.parameters(), before))
    assert not all(np.array_equal(p.numpy(), values) for p, values in zip(copied.parameters(), before))
    for copying in (copy.copy, copy.deepcopy):
        with pytest.raises(GraphError, match="leaves"):
            copying(leaf([1.0], host) * 2)
        with pytest.raises(GraphError, match="leaves"):
            copying(ops.split(leaf([1.0], host) * 2, 0))
    with pytest.raises(TypeError, match="Tensors are not pickled"):
        pickle.dumps(model)


def test_a_copied_leaf_has_its_own_gradient(host):
    x = leaf([3.0], host)
    y = copy.copy(x)
    assert y.cached_data is x.cached_data and copy.copy(host) is host
    (x * x * y).backward()
    assert (x.grad.item(), y.grad.item()) == (18.0, 9.0)
    (x * x).backward(create_graph=True)
    z = copy.deepcopy(x)
    assert z.grad.item() == 6.0 and z.grad.op is None and z.grad.cached_data.category == GRADIENT


def test_a_tensor_on_another_device_requires_a_gradient_if_it_did(cpu):
    for wanted in (True, False):
        x = leaf([3.0, 4.0], cpu)
        x.requires_grad = wanted
        there = x.to("cpu_numpy")
        assert x.to(cpu) is x.to("cpu") is x and there.is_leaf()
        assert (there.device.name, there.dtype, there.requires_grad, there.numpy().tolist()) == (
            "cpu_numpy",
            "float32",
            wanted,
            [3, 4],
        )


def test_an_array_beside_a_tensor_is_a_constant(host):
    x, values = leaf([1.0, 2.0], host), np.array([3, 5], "float32")
    for other in (leaf(values, host).cached_data, values):
        for product in (x * other, other * x):
            product.backward()
            assert product.numpy().tolist() == [3, 10] and x.grad.numpy().tolist() == [3, 5]


def test_what_is_no_tensor_is_named(host):
    x = leaf(np.eye(2), host)
    with pytest.raises(DTypeError, match=r"\[MatMul\] input 1 is of type list \(accepted: a Tensor\)"):
        x @ [[1.0], [2.0]]
    with pytest.raises(DTypeError, match=r"\[Linear\] input 0 is of type int"):
        nn.Linear(2, 2)(3)
    for other in (None, np.eye(2)):
        for f in (
            lambda y: ops.add(x, y), lambda y: ops.multiply(y, x), ops.relu, ops.softmax, lambda y: ops.broadcast_to(y, (2, 2)),
            lambda y: ops.astype(y, "float32"), lambda y: ops.embedding(x, y), lambda y: ops.cross_entropy(y, x), ops.logsumexp,
            lambda y: ops.linear_cross_entropy(x, y, x), lambda y: ops.attention(x, y, x), nn.BatchNorm1d(2), nn.BatchNorm2d(2),
            nn.Conv(1, 1, 1), nn.Flatten(), nn.Dropout(0.0), nn.SeededDropout(0.5, 1), nn.LayerNorm(2), nn.RNN(2, 2), nn.LSTM(2, 2),
            lambda y: nn.BlockSparseAttention()(x, y, x), nn.BlockSparseLinear(16, 16, BlockLayout([[True]], 16)),
            lambda y: nn.MultiHeadAttention()(x, y, x), nn.AttentionLayer(2, 1, 2), nn.Transformer(2, 2, 1), lambda y: ops.setitem(y, 0, x),
        ):  # fmt: skip
            with pytest.raises(DTypeError, match=r"input [01] is of type [\w.]+ \(accepted: a Tensor\)"):
                f(other)
    with pytest.raises(DTypeError, match="input 0 is of type TensorTuple"):
        ops.relu(ops.make_tuple(x, x))
    for params in (x, None):
        with pytest.raises(TypeError, match="accepted: several Tensors"):
            AdamW(params)
    for make in (lambda: ndl.optim.SGD([x], lr="a"), lambda: ndl.optim.Adam([x], beta1=None), lambda: AdamW([x], weight_decay=[0])):
        with pytest.raises(TypeError, match=r"is of type \w+ \(accepted: a number\)"):
            make()
    assert ndl.optim.SGD([x]).clip_grad_norm() == 0 and AdamW([x]).clip_grad_norm().item() == 0


def test_where_takes_numbers(host):
    x = leaf([-1.0, 2.0], host)
    found = ops.where(leaf([1.0, 0.0], host), x, 0.5)
    found.sum().backward()
    np.testing.assert_array_equal(found.numpy(), [-1, 0.5])
    np.testing.assert_array_equal(x.grad.numpy(), [1, 0])
    for wrong in (lambda: ops.where(x, x, np.ones(2)), lambda: ops.maximum(np.ones(2), x), lambda: ops.minimum(x, np.ones(0))):
        with pytest.raises(DTypeError, match=r"\] an input is of type numpy.ndarray \(accepted: a Tensor, or a number\)"):
            wrong()
    with pytest.raises(DTypeError, match=r"\[where\] 'a' is no real number"):
        ops.where(x, x, "a")
    np.testing.assert_array_equal(ops.maximum(x, np.ones(1)).numpy(), [1, 2])
    with pytest.raises(ShapeError, match=r"\[concatenate\] axis of type Tensor is no whole number"):
        ops.concatenate(x, x)


def test_maximum_takes_a_number_on_either_side(host):
    x = leaf([-1.0, 0.5, 2.0], host)
    clamped = -ops.maximum(-1, -ops.maximum(x, 0.0))
    clamped.sum().backward()
    np.testing.assert_array_equal(clamped.numpy(), [0, 0.5, 1])
    np.testing.assert_array_equal(x.grad.numpy(), [0, 1, 0])
    whole = ndl.Tensor([1, 3], dtype="int32", device=host)
    assert ops.maximum(whole, 2).dtype == "int32" and ops.maximum(whole, 2.0).dtype == "float32"
    for wrong in ((1.0, 2.0), (np.ones(2), x), (x, np.ones(2)), (x, None)):
        with pytest.raises(DTypeError, match=r"\[Maximum\] "):
            ops.maximum(*wrong)
    with pytest.raises(OverflowError, match=r"\[Minimum\] 4294967296 is outside int32"):
        ops.minimum(whole, 2**32)


def test_differences_from_numbers_whose_negative_an_integer_dtype_does_not_have(host):
    for dtype, least in (("int32", -(2**31)), ("int64", -(2**63))):
        x = ndl.Tensor([-5], dtype=dtype, device=host)
        assert (x - least).item() == -5 - least and (x - least).dtype == dtype
    for dtype, value in (("int32", 2**40), ("int32", -(2**31) - 1), ("uint8", 300), ("uint8", -1)):
        with pytest.raises(OverflowError, match=rf"\[sub\] {value} is outside {dtype}"):
            ndl.Tensor([5], dtype=dtype, device=host) - value
    assert (ndl.Tensor([5], dtype="uint8", device=host) - 3).item() == 2
    for dtype, expected in (("bool", "int64"), ("uint8", "uint8"), ("float32", "float32")):
        found = ndl.Tensor([1], dtype=dtype, device=host) - True
        assert found.item() == 0 and found.dtype == expected


def test_clip_and_minimum(host):
    """As numpy has them, NaN included; between the bounds, and on them, the gradient passes."""
    values = [-2.0, -1.0, 0.5, 1.0, 3.0, np.nan]
    for low, high, slope in ((-1, 1.0, [0, 1, 1, 1, 0, 0]), (None, 1, [1, 1, 1, 1, 0, 0]), (-1.0, None, [0, 1, 1, 1, 1, 0])):
        x = leaf(values, host)
        out = ops.clip(x, low, high)
        (out * 2).sum().backward()
        np.testing.assert_array_equal(out.numpy(), np.clip(values, low, high))
        np.testing.assert_array_equal(x.grad.numpy(), np.array(slope) * 2)
    x = leaf([-1.0, 0.5, 2.0], host)
    ops.minimum(ops.minimum(x, 0.5), leaf([[5.0], [-5.0]], host)).sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), [1, 0.5, 0])
    whole = ndl.Tensor([1, 3], dtype="int32", device=host)
    assert ops.clip(whole, 2).dtype == "int32" and ops.clip(whole, max=2.5).numpy().tolist() == [1, 2.5]
    with pytest.raises(ValueError, match="neither min nor max"):
        ops.clip(x)
    for wrong in ((x, "1"), (x, x), (1.0, 1.0)):
        with pytest.raises(DTypeError):
            ops.clip(*wrong)


def test_micro_batches_give_the_gradient_of_the_whole_batch(host):
    rng = np.random.default_rng(0)
    data, w = rng.standard_normal((12, 5)), leaf(rng.standard_normal((5, 3)), host)
    ndl.mean(ops.tanh(leaf(data, host, requires_grad=False) @ w)).backward()
    whole = w.grad.numpy()
    w.grad = None
    for part in np.split(data, 4):
        (ndl.mean(ops.tanh(leaf(part, host, requires_grad=False) @ w)) / 4).backward(accumulate=True)
    np.testing.assert_allclose(w.grad.numpy(), whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("factor", [1, 2])  # 1: the array is the seed's too
def test_two_leaves_never_share_a_gradient_array(host, factor):
    a, b = leaf([1.0, 2.0], host), leaf([3.0, 4.0], host)
    seed, total = leaf([1.0, 1.0], host, requires_grad=False), a + b
    (total if factor == 1 else total * factor).backward(seed)
    a.grad.realize_cached_data()[0] = 9.0
    np.testing.assert_array_equal(b.grad.numpy(), [factor, factor])
    np.testing.assert_array_equal(seed.numpy(), [1, 1])


def test_a_gradient_that_goes_to_several_is_not_added_to(host):
    x, y, z = leaf([1.0, 2.0], host), leaf([3.0, 4.0], host), leaf([5.0, 6.0], host)
    seed = leaf([7.0, 8.0], host, requires_grad=False)
    ((x + y) + (x + z)).backward(seed)
    assert [v.numpy().tolist() for v in (x.grad, y.grad, z.grad, seed)] == [[14, 16], [7, 8], [7, 8], [7, 8]]


def test_each_element_of_a_gradient_has_its_own_memory(host):
    x = leaf([[1.0, 2.0, 3.0]], host)
    x.sum().backward()
    x.grad.realize_cached_data()[0, 0] = 9.0
    assert x.grad.numpy().tolist() == [[9, 1, 1]]


def test_gradient_of_a_gradient(host):
    x, y = leaf([6.0], host), leaf([0.0], host)
    out = x * x + x * y
    out.backward()
    grad_x, grad_y = x.grad, y.grad
    grad_x.backward()
    assert x.grad.item() == 2 and y.grad.item() == 1 and grad_y.item() == 6 and out.item() == 36
    (x * x).backward(y, create_graph=True)
    x.grad.backward()  # 2 x y
    assert x.grad.item() == 0 and y.grad.item() == 12


@pytest.mark.parametrize("lazy", [False, True])
def test_a_gradient_that_other_graphs_have_used_can_be_differentiated(host, monkeypatch, lazy):
    monkeypatch.setattr(autograd, "LAZY_MODE", lazy)
    x, w = leaf([1.0, 2.0], host), leaf([1.0, 1.0], host)
    y = (x * x * x).sum()
    y.backward()
    gradient = x.grad
    (gradient * w).sum().backward()
    assert w.grad.numpy().tolist() == [3, 12]
    gradient.backward()
    assert x.grad.numpy().tolist() == [6, 12]
    gradient.requires_grad = True  # a leaf like any other
    gradient.backward()
    assert gradient.grad.numpy().tolist() == [1, 1] and x.grad.numpy().tolist() == [6, 12]


@pytest.mark.parametrize("accumulate, expected", [(False, [6.0, 8.0]), (True, [9.0, 11.0])])
def test_the_gradient_of_a_gradient_leaves_retained_ones_alone(host, accumulate, expected):
    """Its history is a backward made once more, whose gradients nobody has asked for."""
    x, y = leaf([1.0, 2.0], host), leaf([3.0, 4.0], host)
    h, untouched = ops.tanh(x).retain_grad(), (x * 1).retain_grad()
    first = (h * y * y + untouched * 0).sum()
    first.backward()
    gradient = y.grad  # 2 h y
    (h * 3).sum().backward()
    untouched.grad = None
    gradient.backward(accumulate=accumulate)
    np.testing.assert_allclose(h.grad.numpy(), expected, rtol=1e-6)
    assert untouched.grad is None


def test_a_sum_of_gradients_with_graphs_can_be_differentiated(host):
    x = leaf([2.0], host)
    (x * x * x).backward(create_graph=True)
    (x * x).backward(accumulate=True, create_graph=True)
    x.grad.backward()
    assert x.grad.item() == 6 * 2 + 2


def test_derivatives_of_any_order(host):
    x = leaf([2.0], host)
    y = x * x * x * x
    y.backward()
    for expected in (32.0, 48.0, 48.0, 24.0):
        assert x.grad.item() == expected
        last = x.grad
        if expected != 24:
            last.backward(leaf([1.0], host, requires_grad=False))
    with pytest.raises(GraphError, match="no history"):
        last.backward()


def test_the_gradient_of_a_sum_is_a_constant(host):
    x = leaf([1.0, 2.0], host)
    (x + 1).backward(create_graph=True)
    with pytest.raises(GraphError, match="no history"):
        x.grad.backward()


def test_a_gradient_with_a_graph_counts_an_input_that_is_there_twice_once(host):
    """The gradients of fused ops come from a composition then, for each Tensor and not for each place of it."""
    values = np.random.default_rng(0).standard_normal((1, 1, 4, 4))

    def lstm(x):
        column, row = x[0, 0, :, :1], x[0, 0, :1]
        return ops.lstm(x[0, :, :, :1], column, column, row, row)[0]

    for f in (lambda x: ops.attention(x, x, x * 0.5), lambda x: ops.rnn(x[0], x[0, 0], x[0, 0], x[0, 0]), lstm):
        x = leaf(values, host)
        (f(x) * 2).backward()
        plain = x.grad.numpy()
        (f(x) * 2).backward(create_graph=True)
        np.testing.assert_allclose(x.grad.numpy(), plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_a_second_derivative_of_the_loss_needs_no_data(dtype):
    x = leaf(np.zeros((3, 4)), ndl.meta())
    targets = ndl.Tensor([0, -100, 2], device=ndl.meta(), dtype=dtype, requires_grad=False)
    ops.cross_entropy(x, targets).backward(create_graph=True)
    (x.grad * x.grad).sum().backward()
    assert x.grad.shape == (3, 4)


def test_a_gradient_whose_root_is_dead_says_so(host):
    x = leaf([2.0], host)
    (x * x).backward()
    with pytest.raises(GraphError, match="has been freed"):
        x.grad.backward()


def test_backward_twice_recomputes_what_was_dropped(host):
    x = leaf([0.5, 1.5], host)
    y = ops.exp(ops.tanh(x) * x).sum()
    y.backward()
    first = x.grad.numpy()
    y.backward()
    np.testing.assert_array_equal(x.grad.numpy(), first)


def test_a_first_backward_recomputes_nothing(cpu, monkeypatch):
    recompute, again = graph.recompute, []

    def noted(node, arrays):
        if not node.op.recomputes_output:
            again.append(node.op.name)
        return recompute(node, arrays)

    monkeypatch.setattr(graph, "recompute", noted)
    for case in CASES:
        inputs = [leaf(x, cpu) for x in case.inputs()]
        (case.run(*[x * 1.5 for x in inputs]) * 2).backward()  # no handle holds what goes in and what comes out
        assert not again, case.name
    x = leaf([1.0, 2.0], cpu)
    ops.tanh(ops.concatenate([x * 2, x + 1], 0)).backward(create_graph=True)
    assert not again and x.grad.requires_grad


def test_changing_a_parameter_that_is_needed_again_is_refused(host):
    x, w = leaf([[1.0, 2.0]], host, requires_grad=False), leaf([[3.0], [4.0]], host)
    y = ops.exp(ops.tanh(x @ w)).sum()
    y.backward()
    w.realize_cached_data()[0, 0] = 5.0
    with pytest.raises(GraphError, match="changed in place"):
        y.backward()
    assert np.isfinite(y.item())  # what a live Tensor holds is still there
    y = ops.exp(ops.tanh(x @ w)).sum()
    y.backward(retain_graph=True)
    first = w.grad.numpy()
    w.realize_cached_data()[0, 0] = 6.0
    y.backward()
    np.testing.assert_array_equal(w.grad.numpy(), first)  # which nothing but x, a constant, and results are read for


def test_changing_what_a_gradient_reads_is_refused(host):
    x, w = leaf([[1.0, 2.0]], host), leaf([[3.0], [4.0]], host)
    w.grad = leaf([[1.0], [1.0]], host)
    for differentiate in (lambda y: y.backward(retain_graph=True), lambda y: autograd.grad(y, [x])):
        y = (x @ w * 2).sum()
        ndl.optim.SGD([w], lr=0.5).step()  # of a GAN's discriminator, say, before the generator's backward
        with pytest.raises(GraphError, match=r"\[backward\] input 1 of MatMul, shape \(2, 1\), was changed in place"):
            differentiate(y)
        assert x.grad is None
    y = (x * w.reshape((1, 2))).sum()
    x.data = x.data * 2
    with pytest.raises(GraphError, match=r"\[backward\] input 0 of EWiseMul, shape \(1, 2\), was changed in place"):
        y.backward()
    for op in (ops.gelu, ops.exp):  # the one is computed again for backward, unless something holds it
        for write in (lambda y: y.__setitem__(..., 100.0), lambda y: setattr(y, "data", leaf([[9.0, 9.0]], host))):
            y = op(x)
            z = (y * w.reshape((1, 2))).sum()
            if op is ops.exp:
                z.backward()
            with ndl.no_grad():
                write(y)
            with pytest.raises(GraphError, match=r"shape \(1, 2\), was changed in place"):
                z.backward()
    held = []
    z = nn.remat(lambda x: (held.append(ops.exp(x)), held[-1] * w.reshape((1, 2)))[1], x)
    with ndl.no_grad():
        held[0][...] = 100.0
    with pytest.raises(GraphError, match=r"shape \(1, 2\), was changed in place"):
        z.sum().backward()
    y = ops.exp(x)
    y.realize_cached_data().add_in_place(1.0)
    with pytest.raises(GraphError, match=r"\[backward\] the result of Exp, shape \(1, 2\), was changed in place"):
        y.sum().backward()


def test_changing_what_no_gradient_reads_is_nothing(host):
    x, w = leaf([[1.0, 2.0]], host), leaf([[3.0], [4.0]], host)
    target = leaf([[0.0], [0.0]], host)
    y = x @ w + x.detach() @ target
    target.data = w.data  # on the same memory
    y.sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), [[3.0, 4.0]])
    target = leaf([[1.0, 2.0]], host)
    y = ops.exp(x @ (w * 0)) @ target
    with ndl.no_grad():
        w[...] = 5.0  # whose gradient is not asked for
    np.testing.assert_array_equal(autograd.grad(y.sum(), [target])[0].numpy(), [[1.0, 1.0]])
    w.data, x.grad = leaf([[3.0], [4.0]], host), None
    y = (x + w.reshape((1, 2))).sum() + x.detach() @ w
    w.data = w.data * 2
    y.sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), [[1.0, 1.0]])
    np.testing.assert_array_equal(w.grad.numpy(), [[2.0], [3.0]])


def test_a_leaf_that_was_used_can_stop_requiring_a_gradient_and_start_again(host):
    x, w = leaf([2.0], host), leaf([3.0], host)
    (x * w).sum().backward()
    x.grad = w.grad = None
    for wanted in (False, True):
        w.requires_grad = wanted
        y = (x * w).sum()
        y.backward()
        assert x.grad.numpy() == [3.0] and (w.grad is not None) is wanted
    w.requires_grad = False  # after its last use, before backward
    w.grad = None
    y.backward()
    assert w.grad is None


def test_a_leaf_that_is_frozen_for_a_while_is_a_constant_in_what_is_made_meanwhile(host):
    """As the discriminator of a GAN while its generator learns."""
    x, w = leaf([2.0], host), leaf([3.0], host)
    before = (x * w).sum()
    w.requires_grad = False
    meanwhile = (x * w).sum()
    w.requires_grad = True
    meanwhile.backward()
    assert x.grad.numpy() == [3.0] and w.grad is None
    before.backward(retain_graph=True)
    assert w.grad.numpy() == [2.0]
    for k in (1, 2):
        (before + meanwhile + (x * w * 5).sum()).backward(accumulate=k == 2)
        assert w.grad.numpy() == [12.0 * k]


def test_a_leaf_that_is_frozen_after_its_last_use_keeps_its_gradient_where_others_are_added_to(host):
    x, w = leaf([2.0], host), leaf([3.0], host)
    (x * w * w).sum().backward()
    y = (x * w * w).sum()
    w.requires_grad = False
    y.backward(accumulate=True)
    assert (x.grad.item(), w.grad.item()) == (18, 12)


@pytest.mark.parametrize("lazy", [False, True])
def test_a_graph_from_before_a_leaf_was_frozen_can_be_differentiated_twice(host, lazy, monkeypatch):
    monkeypatch.setattr(autograd, "LAZY_MODE", lazy)
    x, y = leaf([1.0, 2.0], host), leaf([3.0, 4.0], host)
    out = ops.silu(x) * y
    x.requires_grad = False
    out.backward(create_graph=True)
    assert x.grad is None
    x.requires_grad = True
    out.backward()
    first = x.grad.numpy()
    out.backward(create_graph=True)
    np.testing.assert_allclose(x.grad.numpy(), first, rtol=1e-6)
    x.grad.backward()
    s = 1 / (1 + np.exp(-np.array([1.0, 2.0])))
    np.testing.assert_allclose(y.grad.numpy(), s + [1.0, 2.0] * s * (1 - s), rtol=1e-6)


@pytest.mark.parametrize("op", [ops.softmax, ops.silu, ops.logsoftmax])
def test_a_differentiable_gradient_of_what_has_been_changed_since_is_refused(host, op):
    """It computes a fused op again."""
    x = leaf([1.0, 2.0], host)
    y = op(x)
    y.backward()
    with ndl.no_grad():
        x[...] = 5.0
    with pytest.raises(GraphError, match="changed in place"):
        y.backward(create_graph=True)
    with pytest.raises(GraphError, match="changed in place"):
        x.grad.backward()


def test_gradients_are_of_their_category_and_what_follows_is_not(host):
    w = leaf(np.ones(100), host)
    (w * 2).sum().backward()
    assert w.grad.realize_cached_data().category == GRADIENT
    assert (w * 2).realize_cached_data().category == ACTIVATION


@pytest.mark.parametrize("optimizer", [SGD, Adam, AdamW])
def test_backward_through_what_an_optimizer_has_changed_is_refused(host, optimizer):
    x, w = leaf([[1.0, 2.0]], host, requires_grad=False), leaf([[3.0], [4.0]], host)
    y = ops.exp(ops.tanh(x @ w)).sum()
    y.backward()
    optimizer([w]).step()
    with pytest.raises(GraphError, match="changed in place"):
        y.backward()


WRITES = {
    "a number": lambda a: a.__setitem__(slice(None), 5.0),
    "an array": lambda a: a.__setitem__(slice(None), np.ones((2, 1), "float32")),
    "a part": lambda a: a[1:].__setitem__((0, 0), a[:1, :1].copy()),
    "filled": lambda a: a.fill(5),
    "added": lambda a: a.add_in_place(1),
    "multiplied": lambda a: a.mul_in_place(2),
    "a product": lambda a: matmul(a.copy(), full((1, 1), 2.0, device=a.device), out=a),
    "unscaled": lambda a: kernels.unscale([a], 0.5),
}


@pytest.mark.parametrize("write", WRITES)
def test_backward_through_what_has_been_written_to_is_refused(host, write):
    w = leaf([[3.0], [4.0]], host)
    y = ops.exp(ops.tanh(w)).sum()
    y.backward()
    WRITES[write](w.cached_data)
    with pytest.raises(GraphError, match="changed in place"):
        y.backward()


def test_a_state_that_brings_the_graph_of_the_step_before_is_told_of_detach(host):
    model, x = nn.LSTM(2, 3, device=host), leaf(np.ones((2, 1, 2)), host, requires_grad=False)
    optimizer, state = SGD(model.parameters(), lr=0.1), None
    for _ in range(2):
        out, state = model(x, state)
        out.sum().backward()
        optimizer.step()
        kept, state = state, tuple(t.detach() for t in state)
    out, _ = model(x, kept)
    with pytest.raises(GraphError, match=r"changed in place .*detach\(\)"):
        out.sum().backward()


def test_values_of_live_tensors_survive_backward_and_step(host):
    model = nn.Linear(3, 2, device=host)
    out = model(leaf(np.ones((4, 3)), host))
    loss = (out * out).sum()
    expected = out.numpy()
    loss.backward()
    ndl.optim.SGD(model.parameters()).step()
    np.testing.assert_array_equal(out.numpy(), expected)
    np.testing.assert_array_equal(loss.cached_data.numpy().shape, (1,))


def test_interior_arrays_are_dropped_by_backward(cpu):
    x = leaf(np.ones((1000, 100)), cpu)
    before = cpu.memory_stats()["live"]
    y = x
    for _ in range(10):
        y = ops.tanh(y)
    loss = y.sum()
    del y
    held = cpu.memory_stats()["live"] - before
    assert held >= 10 * x.size * 4
    loss.backward()
    assert cpu.memory_stats()["live"] - before <= x.size * 4 + 1024  # the gradient of x


def test_a_chain_of_100000_ops(cpu):
    x = leaf([1.0], cpu)
    y = x
    for _ in range(100_000):
        y = y + 1.0
    y.backward()
    assert x.grad.item() == 1
    del y


def test_no_grad_detach_and_retain_grad(host):
    x = leaf([2.0], host)
    with ndl.no_grad():
        assert (x * x).op is None
    y = (x * x).retain_grad()
    (y * 3).backward(accumulate=True)
    assert y.grad.item() == 3 and x.grad.item() == 12
    (y * 3).backward(accumulate=True)
    assert y.grad.item() == 6 and x.grad.item() == 24
    y.backward(retain_graph=True)
    assert y.grad.item() == 1
    y.backward(accumulate=True, create_graph=True)
    assert y.grad.item() == 2 and x.grad.item() == 8
    with pytest.raises(GraphError, match="no history"):
        y.grad.backward()
    with pytest.raises(GraphError, match="no history"):
        x.detach().__mul__(2).backward()
    with pytest.raises(ShapeError, match="out_grad"):
        (x * x).backward(leaf([1.0, 2.0], host))
    x.backward()
    assert x.grad.item() == 1


def test_regions_of_gradients_nest(host):
    x = leaf([2.0], host)
    records = lambda: (x * x).op is not None  # noqa: E731
    with ndl.no_grad():
        for inner, inside in ((ndl.no_grad, False), (ndl.enable_grad, True)):
            with inner():
                assert records() is inside
            assert not records()
        with ndl.enable_grad():
            with ndl.no_grad():
                pass
            assert records()
    assert records()


def test_a_decorated_function_takes_and_gives_all_that_it_did(host):
    def affine(x, scale, *, shift=0.0):
        return x * scale + shift

    x = leaf([2.0], host)
    without, again = ndl.no_grad()(affine), ndl.no_grad()(ndl.enable_grad()(affine))
    for function, recorded in ((without, False), (again, True), (ndl.no_grad(affine), False), (ndl.enable_grad(affine), True)):
        y = function(x, 3, shift=1.0)
        assert y.item() == 7 and (y.op is not None) == recorded and function.__name__ == "affine"
    assert (x * x).op is not None
    with pytest.raises(TypeError, match="other"):
        without(x, 3, other=1.0)
    assert (x * x).op is not None


def test_only_a_leaf_stops_requiring_a_gradient(host):
    x = leaf([2.0], host)
    y = x * 3
    with pytest.raises(GraphError, match="only a leaf can stop"):
        y.requires_grad = False
    x.requires_grad = False
    assert y.requires_grad and (x * 3).op is None


def test_what_requires_a_gradient_already_keeps_its_history(host):
    x = leaf([2.0], host)
    y = x * 3
    y.requires_grad = True
    (y * y).backward()
    assert x.grad.item() == 36


@pytest.mark.parametrize("decorator", [ndl.no_grad(), ndl.enable_grad(), ndl.remat, amp.autocast("cpu")])
def test_what_runs_after_its_call_is_not_decorated(decorator):
    def generator(x):
        yield x

    async def coroutine(x):
        return x

    async def both(x):
        yield x

    for function in (generator, coroutine, both):
        with pytest.raises(TypeError, match=rf"{function.__name__} is a generator or coroutine"):
            decorator(function)


def micro_batches(host):
    rng = np.random.default_rng(0)
    return [leaf(rng.standard_normal((6, 5)), host, requires_grad=False) for _ in range(4)]


def network_loss(x, weights):
    """Weights of each kind whose gradient is summed in place; the first is used twice."""
    w, b, scale, table, ids = weights
    h = ops.layer_norm(ops.linear(x, w, b), scale, b)
    h = ops.linear(h, w, b) + ops.embedding(table, ids)
    return ops.linear_cross_entropy(ops.tanh(h @ w), table.reshape((5, 7)), ids) * 0.25


def weights_of_each_kind(host):
    rng = np.random.default_rng(1)
    shapes = ((5, 5), (5,), (5,), (7, 5))
    ids = ndl.Tensor([0, 3, 3, 6, 1, 0], device=host, dtype="int32", requires_grad=False)
    return [*[leaf(rng.standard_normal(s), host) for s in shapes], ids]


def test_accumulating_adds_in_place_what_backward_gives(host):
    weights = weights_of_each_kind(host)
    expected = [0.0] * 4
    for x in micro_batches(host):
        network_loss(x, weights).backward()
        expected = [e + w.grad.numpy() for e, w in zip(expected, weights)]
    for w in weights[:4]:
        w.grad = None
    for i, x in enumerate(micro_batches(host)):
        before = [w.grad for w in weights[:4]]
        network_loss(x, weights).backward(accumulate=True)
        assert i == 0 or [w.grad for w in weights[:4]] == before  # Tensors compare by identity
    for w, e in zip(weights, expected):
        np.testing.assert_allclose(w.grad.numpy(), e, rtol=1e-4, atol=1e-5)


def test_accumulating_needs_no_second_gradient(cpu):
    w = leaf(np.ones((300, 400)), cpu)
    x = leaf(np.ones((8, 300)), cpu, requires_grad=False)
    ids = ndl.Tensor(np.arange(8), device=cpu, dtype="int32", requires_grad=False)
    for make in (
        lambda: (x @ w).sum(),
        lambda: ops.linear(x, w, leaf(np.ones(400), cpu)).sum(),
        lambda: ops.embedding(w, ids).sum(),
        lambda: ops.linear_cross_entropy(x, w, ids) * 0.5,
    ):
        w.grad = None
        make().backward()
        loss = make()
        with ndl.memory.peak(cpu) as p:
            loss.backward(accumulate=True)
        assert p.above_start < w.size * 4 / 2


def test_the_gradient_of_a_square_takes_no_power(host):
    x = leaf([1.0, -2.0, 0.0], host)
    (x**2).sum().backward(create_graph=True)
    np.testing.assert_array_equal(x.grad.numpy(), [2.0, -4.0, 0.0])
    assert not any(isinstance(value.op, ops.PowerScalar) for value in autograd.find_topo_sort([x.grad]))


def test_batch_norm_takes_its_output_two_gradients_and_nothing_else_of_that_size(cpu):
    x, norm = leaf(np.ones((1000, 40)), cpu), nn.BatchNorm1d(40, device=cpu)
    with ndl.memory.peak(cpu) as p:
        norm(x).sum().backward()
    assert p.above_start < 3.3 * x.size * 4


def test_what_is_written_to_a_gradient_is_there_and_nowhere_else(host):
    x, seed = leaf(np.ones((2, 3)), host), leaf(np.ones((2, 3)), host)
    y = (x + 1).retain_grad()
    y.backward(seed)
    y.grad[0] = 5.0
    x.grad.data[1] = 7.0
    for found, expected in ((seed, [1, 1]), (y.grad, [5, 1]), (x.grad, [1, 7])):
        np.testing.assert_array_equal(found.numpy()[:, 0], expected)
    x.sum().backward()  # one element in memory, to begin with
    for row in x.grad:
        row[0] = 9.0
    np.testing.assert_array_equal(x.grad.numpy(), [[9, 1, 1], [9, 1, 1]])


def test_a_gradient_does_not_keep_what_it_was_cut_from(host):
    x, y = leaf(np.ones(3), host), leaf(np.ones(1000), host)
    (ops.concatenate([x, y], 0) * 2).sum().backward()
    assert not x.grad.realize_cached_data().is_part() and not y.grad.realize_cached_data().is_part()
    x.grad[0] = 5.0
    np.testing.assert_array_equal(y.grad.numpy(), np.full(1000, 2.0))


def test_a_convolution_takes_the_memory_of_what_it_reads(cpu):
    image, kernel = leaf(np.ones((2, 64, 64, 3)), cpu), leaf(np.ones((16, 16, 3, 8)), cpu)
    peaks = []
    for needed in (True, False):
        image.requires_grad, image.grad, kernel.grad = needed, None, None
        with ndl.memory.peak(cpu) as p:
            ops.conv(image, kernel, stride=17, padding=0).sum().backward()
        peaks.append(p.above_start)
    assert peaks[0] < 1.5 * (image.size + kernel.size) * 4
    assert kernel.grad.realize_cached_data().is_compact()
    assert image.grad is None and peaks[0] - peaks[1] == image.size * 4  # that gradient, and nothing else


@pytest.mark.parametrize("op", [lambda y, b: y @ y, lambda y, b: ops.linear(y, y, b), lambda y, b: ops.layer_norm(y, b, b)])
def test_backward_drops_what_it_has_read_while_the_loss_is_there(host, op):
    x, b = leaf(np.ones((64, 64)), host), leaf(np.ones(64), host)
    activations = lambda: ndl.memory.stats(host).by_category["activation"]  # noqa: E731
    before = activations()
    loss = op(x @ x, b).sum()
    assert activations() >= before + x.size * 4
    loss.backward()
    assert activations() == before + 4


def test_what_the_program_still_holds_is_not_computed_again(host):
    computed = []

    class Counted(ops.MatMul):
        def compute(self, a, b):
            computed.append(self)
            return super().compute(a, b)

    x = leaf(np.ones((2, 2)), host)
    held = Counted()(x, x)
    loss = (held * held).sum()
    loss.backward()
    loss.backward()
    assert len(computed) == 1


@pytest.mark.parametrize("op", [ops.matmul, ops.linear, ops.power, lambda x, y: ops.conv(x[None, None], y[None, None])])
def test_a_gradient_that_nothing_asks_for_is_not_computed(host, op):
    count = 3 if op is ops.linear else 2
    for frozen in range(count):
        y = op(*[leaf(np.ones((2, 2) if i < 2 else 2), host, requires_grad=i != frozen) for i in range(count)])
        assert [g is None for g in y.op.gradient_as_tuple(y.detach(), y)] == [i == frozen for i in range(count)]


def test_a_gradient_that_something_else_holds_is_not_added_to(host):
    x, y = leaf([1.0, 2.0], host), leaf([3.0, 4.0], host)
    (x * y).sum().backward()
    held = x.grad
    used = held * y  # a graph that reads the gradient
    (x * 10).sum().backward(accumulate=True)
    np.testing.assert_array_equal(x.grad.numpy(), [13.0, 14.0])
    used.sum().backward(accumulate=True)
    np.testing.assert_array_equal(y.grad.numpy(), [4.0, 6.0])  # x + the gradient as it was
    pair = ops.fused_add_scalars(x, 1, 2)
    (pair[0] * 3 + (pair[-2] + y)).backward()  # the item's first gradient is y's as well
    np.testing.assert_array_equal(x.grad.numpy(), [4.0, 4.0])
    np.testing.assert_array_equal(y.grad.numpy(), [1.0, 1.0])
    (x + y).sum().backward()  # one array for both
    (x * 2 + y).sum().backward(accumulate=True)
    np.testing.assert_array_equal(x.grad.numpy(), [3.0, 3.0])
    np.testing.assert_array_equal(y.grad.numpy(), [2.0, 2.0])


def test_a_sum_of_gradients_that_a_graph_reads_is_not_added_to(host):
    x, y = leaf([1.0, 2.0], host), leaf([3.0, 4.0], host)
    (x * y + x * y).sum().backward()  # two parts, so that the array is the gradient's own
    used = x.grad * y
    (x * 10).sum().backward(accumulate=True)
    np.testing.assert_array_equal(x.grad.numpy(), [16.0, 18.0])
    used.sum().backward()
    np.testing.assert_array_equal(y.grad.numpy(), [6.0, 8.0])  # the gradient as it was


def test_gradients_are_added_in_the_wider_dtype(host):
    x = leaf([1.0, 2.0], host)
    x.grad = ndl.Tensor([1e300, 1e300], device=host, dtype="float64", requires_grad=False)
    (x * x + x).backward(accumulate=True)
    assert x.grad.dtype == "float64" and x.grad.numpy().tolist() == [1e300, 1e300]
    x = leaf([1.0], host)
    (x * x + x).backward()
    x.cached_data = ndl.Tensor([1e300], device=host, dtype="float64").cached_data
    (x * 1e305).backward(accumulate=True)
    assert x.grad.dtype == "float64" and x.grad.numpy().tolist() == [1e305]


def test_adding_to_a_gradient_beside_a_tuple_without_one(host):
    class TimesEach(autograd.TensorTupleOp):
        def compute(self, pair, x):
            return tuple(item * x for item in pair)

        def gradient(self, out_grad, node):
            pair = node.inputs[0]
            return None, out_grad[0] * pair[0] + out_grad[1] * pair[1]

    pair = ops.make_tuple(*[leaf([n], host, requires_grad=False) for n in (2.0, 5.0)])
    x = leaf([1.0], host)
    for _ in range(2):
        first, second = TimesEach()(pair, x)
        (first + second * 3).backward(accumulate=True)
    assert x.grad.item() == 2 * (2 + 3 * 5)


def test_an_op_without_a_gradient_is_named(host):
    class Double(autograd.TensorOp):
        def compute(self, a):
            return a * 2

    with pytest.raises(NotImplementedError, match=r"\[Double\] has no gradient"):
        Double()(leaf([1.0], host)).backward()


def test_a_gradient_that_does_not_fit_its_item_of_a_tuple_is_refused(host):
    class Sum(autograd.TensorOp):
        def compute(self, pair):
            return pair[0] + pair[1]

        def gradient(self, out_grad, node):
            return ops.make_tuple(out_grad, out_grad.sum())

    x = leaf([1.0, 2.0], host)
    with pytest.raises(GraphError, match=r"Sum.gradient gave one of shape \(1,\) for an input of shape \(2,\)"):
        Sum()(ops.make_tuple(x, x)).sum().backward()


def test_a_gradient_in_borrowed_memory_is_copied(host):
    theirs = np.array([1.0, 2.0], np.float32)

    class Dot(ops.EWiseMul):
        def gradient(self, out_grad, node):
            return node.inputs[1], None

    x = leaf([3.0, 4.0], host)
    Dot()(x, ndl.from_dlpack(theirs).to(host)).backward()
    x.grad[0] = 7
    assert theirs.tolist() == [1, 2]


def test_a_tuple_whose_items_have_no_gradient_gives_none(host):
    ids, w = leaf([[0, 1], [1, 1]], host), leaf(np.ones((2, 3)), host)
    ops.embedding(w, ops.split(ids, 0)[1]).sum().backward()
    assert ids.grad is None and w.grad.numpy().tolist() == [[0] * 3, [2] * 3]


@pytest.mark.parametrize("as_factor", [False, True])
def test_a_gradient_is_not_added_to_before_it_has_been_read(host, as_factor):
    x = leaf([1.0, 2.0], host)
    (x * x).backward()
    g = x.grad.detach()
    if as_factor:
        (x * g + x * g * x).backward(accumulate=True)  # 2 x + (2 x + 4 x^2)
    else:
        (x + x * x).backward(x.grad, accumulate=True)
    np.testing.assert_array_equal(x.grad.numpy(), [8.0, 24.0])


def test_a_loss_whose_gradients_forward_made_can_be_differentiated_again(host):
    weights = weights_of_each_kind(host)
    loss = network_loss(micro_batches(host)[0], weights)
    loss.backward(retain_graph=True)
    first = [w.grad.numpy() for w in weights[:4]]
    loss.backward()  # writes into the arrays that forward made
    assert all(np.array_equal(w.grad.numpy(), f) for w, f in zip(weights, first))
    loss.backward()  # and here they are made again
    assert all(np.array_equal(w.grad.numpy(), f) for w, f in zip(weights, first))


def test_gradients_of_a_loss_that_is_kept_are_not_what_it_keeps(host):
    h, w = leaf([[1.0, -2.0], [0.5, 1.5]], host), leaf([[1.0, 2.0, 0.0], [0.0, -1.0, 1.0]], host)
    loss = ops.linear_cross_entropy(h, w, ndl.Tensor([2, 0], device=host, dtype="int32", requires_grad=False))
    loss.backward(retain_graph=True)
    first = [h.grad.numpy(), w.grad.numpy()]
    loss.backward(leaf([2.0], host), accumulate=True)
    for x, g in zip((h, w), first):
        np.testing.assert_allclose(x.grad.numpy(), g * 3, rtol=1e-6)


def test_gradients_of_a_loss_whose_tuple_is_held_are_not_the_tuples(host):
    h, w = leaf([[1.0, -2.0]], host), leaf([[1.0, 2.0, 0.0], [0.0, -1.0, 1.0]], host)
    found = ops.LinearCrossEntropy()(h, w, ndl.Tensor([2], device=host, dtype="int32", requires_grad=False))
    before = [item.numpy() for item in found]
    (found[0] * 3).backward()
    assert all(np.array_equal(item.numpy(), b) for item, b in zip(found, before))
    np.testing.assert_allclose(h.grad.numpy(), before[1] * 3, rtol=1e-6)


def test_a_gradient_that_is_kept_keeps_nothing_else(host):
    x, given = leaf([3.0, 4.0], host), leaf([1.0, 2.0], host)
    y = x * x
    y.backward(given)
    first, alive = x.grad, [weakref.ref(x._as_node()), weakref.ref(given)]
    del x, given
    first.backward()  # its history can be made as long as there is y
    assert all(r() is not None for r in alive)
    del y
    assert all(r() is None for r in alive)
    with pytest.raises(GraphError, match="has been freed"):
        first.backward()


def test_lazy_mode(host, monkeypatch):
    monkeypatch.setattr(autograd, "LAZY_MODE", True)
    x = leaf([3.0], host)
    y = x * x + x
    assert y._data is None
    y.backward()
    assert x.grad.item() == 7 and y.item() == 12


def test_what_is_put_off_is_let_go_on_the_way(host, monkeypatch):
    monkeypatch.setattr(autograd, "LAZY_MODE", True)
    y = leaf(np.zeros(1000), host)
    for _ in range(9):
        y = y + 1
    live = host.memory_stats()["live"]
    host.reset_peak()
    assert y.numpy()[-1] == 9 and host.memory_stats()["peak"] - live <= 2 * 4000


def test_a_value_that_is_put_off_can_be_given(host, monkeypatch):
    monkeypatch.setattr(autograd, "LAZY_MODE", True)
    x = leaf([3.0], host)
    y = x * 2
    y.cached_data = leaf([5.0], host).cached_data
    assert y.item() == 5 and (y + 1).item() == 6


def test_what_is_put_off_without_a_gradient_has_no_history_once_it_is_there(host, monkeypatch):
    monkeypatch.setattr(autograd, "LAZY_MODE", True)
    total, c = (leaf([v], host, requires_grad=False) for v in (0.0, 1.0))
    passed = []
    for _ in range(5):
        total = total + c
        passed.append(weakref.ref(total))
    kept = total * 2
    assert total._data is None and total.item() == 5 and not total.inputs
    assert [x() is None for x in passed] == [True] * 4 + [False]
    x = leaf([3.0], host)
    y = x * kept
    del total, kept
    y.backward()
    assert x.grad.item() == 10


def test_what_is_put_off_is_computed_from_what_was_there(host, monkeypatch):
    monkeypatch.setattr(autograd, "LAZY_MODE", True)
    model, x = nn.Linear(3, 2, device=host), leaf(np.ones((4, 3)), host)
    loss = ops.exp(model(x)).sum()
    late = ops.exp(model(x))
    loss.backward()
    SGD(model.parameters()).step()
    assert np.isfinite(loss.item())
    with pytest.raises(GraphError, match="changed in place"):
        late.numpy()
    y = x * 2
    x.data = x.data * 3
    with pytest.raises(GraphError, match="changed in place"):
        y.numpy()


def test_a_value_on_the_way_to_one_that_was_put_off_is_there_too(host, monkeypatch):
    monkeypatch.setattr(autograd, "LAZY_MODE", True)
    x = leaf([1.0], host)
    y = x * 2
    assert (y + 1).item() == 3
    x.data = x.data * 3
    assert y.item() == 2


def test_threads_that_use_a_leaf_at_once_agree_on_its_node(host, monkeypatch):
    x, results, threads = leaf([3.0], host), [], []

    def made(op, inputs, requires_grad, handle):
        if op is None and not threads:
            threads.append(threading.Thread(target=lambda: results.append(x * 5)))
            threads[0].start()
            threads[0].join(0.2)
        return graph.Node(op, inputs, requires_grad, handle)

    monkeypatch.setattr(autograd, "Node", made)
    y = x * 2
    threads[0].join()
    (y * results[0]).backward()
    np.testing.assert_array_equal(x.grad.numpy(), [60.0])


def test_threads_that_accumulate_at_once_lose_nothing(host, monkeypatch):
    x, threads, add = leaf([1.0], host), [], backward._sum

    def summed(*args):
        if not threads:
            threads.append(threading.Thread(target=lambda: (x * 3).backward(accumulate=True)))
            threads[0].start()
            threads[0].join(0.2)
        return add(*args)

    x.grad = leaf([10.0], host)
    monkeypatch.setattr(backward, "_sum", summed)
    (x * 2).backward(accumulate=True)
    threads[0].join()
    assert x.grad.numpy() == [15.0]


def test_threads_that_add_to_one_sum_lose_nothing(host):
    x = leaf(np.zeros(20_000), host)

    def accumulate():
        for _ in range(30):
            (x * 1).backward(accumulate=True)
            (x.reshape((100, 200)) @ ones).sum().backward(accumulate=True)

    ones = leaf(np.ones((200, 1)), host, requires_grad=False)
    threads = [threading.Thread(target=accumulate) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(x.grad.numpy(), 240.0)


def test_a_gradient_may_wait_for_one_that_another_thread_accumulates(host):
    class Waits(ops.TensorOp):
        def compute(self, a):
            return a

        def gradient(self, out_grad, node):
            thread = threading.Thread(target=lambda: (x * 3).backward(accumulate=True), daemon=True)
            thread.start()
            thread.join(30)
            return out_grad * 2

    x = leaf([1.0], host)
    Waits()(x).backward(accumulate=True)
    assert x.grad.numpy() == [5.0]
    Waits()(x).backward(accumulate=True)
    assert x.grad.numpy() == [10.0]


@pytest.mark.parametrize("replaced_by", [lambda x: (x * 100 * x.grad.detach()).sum().backward(accumulate=True), None])
def test_a_sum_that_is_replaced_while_another_thread_adds_to_it(host, replaced_by):
    class Waits(ops.TensorOp):
        def compute(self, a):
            return a

        def gradient(self, out_grad, node):
            inside.set()
            assert replaced.wait(30)
            return out_grad

    x, inside, replaced = leaf([0.0], host), threading.Event(), threading.Event()
    for _ in range(2):
        x.backward(accumulate=True)
    two = ops.add(Waits()(x * 10), x * 3)  # the second part is added before the wait
    thread = threading.Thread(target=lambda: two.backward(accumulate=True))
    thread.start()
    assert inside.wait(30)
    if replaced_by is None:
        x.grad = None
    else:
        replaced_by(x)
    replaced.set()
    thread.join(30)
    expected = 10 if replaced_by is None else 100 * (2 + 3) + (2 + 3) + 10
    assert x.grad.item() == expected
    x.backward(accumulate=True)
    assert x.grad.item() == expected + 1


def test_what_an_embedding_adds_to_a_gradient_is_a_write(host):
    w, v = leaf(np.eye(3), host), leaf(np.ones((3, 3)), host)
    ids = ndl.Tensor([0, 1], device=host, dtype="int32", requires_grad=False)
    for _ in range(2):
        ops.embedding(w, ids).sum().backward(accumulate=True)
    z = (w.grad.detach() * v).sum()
    ops.embedding(w, ids).sum().backward(accumulate=True)
    with pytest.raises(GraphError, match="input 0 of EWiseMul"):
        z.backward()


@pytest.mark.parametrize("trained", [0, 1])
@pytest.mark.parametrize("low", [None, "float16", "bfloat16"])
def test_a_loss_makes_no_gradient_of_frozen_weights_nor_of_given_features(host, low, trained):
    rng = np.random.default_rng(0)
    values = rng.standard_normal((40, 16)), rng.standard_normal((16, 50))
    ids = ndl.Tensor(np.arange(40), device=host, dtype="int32", requires_grad=False)
    grads = []
    for frozen in (False, True):
        inputs = [leaf(v, host, requires_grad=not frozen or i == trained) for i, v in enumerate(values)]
        with amp.autocast(host, low) if low else contextlib.nullcontext():
            loss = ops.linear_cross_entropy(*inputs, ids)
        kept = [a.shape for a in loss._as_node().inputs[0].array if a is not None]
        assert kept == ([values[trained].shape] if frozen else [v.shape for v in values])
        (loss * 2).backward(retain_graph=True)
        first = inputs[trained].grad.numpy()
        loss.backward()
        np.testing.assert_allclose(inputs[trained].grad.numpy() * 2, first, rtol=1e-6)
        assert not frozen or inputs[1 - trained].grad is None
        grads.append(first)
    np.testing.assert_array_equal(*grads)


def test_a_sum_that_a_graph_reads_is_not_added_to_in_place(host):
    x = leaf([1.0, 2.0], host)
    (x * 3).backward(accumulate=True)
    before = x.grad
    kept = x * x.grad.detach()
    kept.backward(retain_graph=True, accumulate=True)
    (x * 2).backward(accumulate=True)
    np.testing.assert_array_equal(x.grad.numpy(), [8.0, 8.0])
    np.testing.assert_array_equal(before.numpy(), [3.0, 3.0])
    kept.backward(accumulate=True)
    np.testing.assert_array_equal(x.grad.numpy(), [11.0, 11.0])


def test_what_is_dropped_while_it_is_recomputed_from(host):
    """By the backward of another thread, or here of an op, that shares a part of the graph."""
    meanwhile = []

    class Copy(ops.ops_shape.Reshape):
        def compute(self, a):
            if len(meanwhile) == 2:
                meanwhile.pop()()
            return super().compute(a)

    x = leaf([0.5, 1.0], host)
    shared = ops.sin(x)
    loss, other = ops.exp(Copy((2,))(shared) + shared).sum(), shared * shared
    del shared
    loss.backward()
    first = x.grad.numpy()
    meanwhile += [None, other.backward]
    loss.backward()
    assert len(meanwhile) == 1
    np.testing.assert_array_equal(x.grad.numpy(), first)


def test_a_gradient_of_a_leaf_that_has_moved_is_not_added_to(cpu):
    x = leaf([1.0, 2.0], cpu)
    for _ in range(2):
        (x * x).backward(accumulate=True)
    x.data = ndl.Tensor(x.data, device="cpu_numpy")
    with pytest.raises(DeviceError, match="different devices"):
        (x * x).backward(accumulate=True)
    (x * x).backward()
    np.testing.assert_array_equal(x.grad.numpy(), [2, 4])


def test_recomputing_an_op_that_writes_into_its_result(host):
    x = leaf([1.0, 2.0], host)
    y = ops.exp(ops.concatenate([x, x * 2], 0))
    z = ops.tanh(y * 0.1).sum()
    z.backward()
    first = x.grad.numpy()
    del y
    z.backward()
    np.testing.assert_array_equal(x.grad.numpy(), first)


def test_setitem_with_gradient(host):
    x, y = leaf(np.zeros((2, 3)), host), leaf([5.0, 6.0], host)
    old = x * 2
    old[:, 1] = y
    (old * old).sum().backward()
    np.testing.assert_array_equal(y.grad.numpy(), [10, 12])
    np.testing.assert_array_equal(x.grad.numpy()[:, 1], [0, 0])
    new = x * 2
    new[0], new[:, 2] = 7.0, np.array([3.0, 4.0])
    new.backward()
    np.testing.assert_array_equal(new.numpy(), [[7, 7, 3], [0, 0, 4]])
    np.testing.assert_array_equal(x.grad.numpy(), [[0, 0, 0], [2, 2, 0]])
    for value in (7.0, np.full(3, 7.0)):
        np.testing.assert_array_equal(ops.setitem(x, 0, value).numpy(), [[7, 7, 7], [0, 0, 0]])
    x.sum().backward(create_graph=True)
    x.grad[0] = 9.0  # one element in memory for all
    np.testing.assert_array_equal(x.grad.numpy()[:, 0], [9, 1])


def test_setitem_broadcasts_as_numpy_does(host):
    """An int drops its axis before the value is broadcast."""
    for index, shape in (
        ((slice(None), slice(None), 1), (2, 1)), ((0, ..., 1), (3,)), ((..., -1), (1, 3)), ((None, 1), (3, 1)), (1, (1, 1, 4)),
    ):  # fmt: skip
        zeros, value = np.zeros((2, 3, 4)), np.arange(1.0, np.prod(shape) + 1).reshape(shape)
        wanted = zeros.copy()
        wanted[index] = value
        x, y = leaf(zeros, host), leaf(value, host)
        ops.setitem(x, index, y).backward()
        strided = leaf(np.repeat(value, 2, axis=-1), host)[..., ::2]
        np.testing.assert_array_equal([ops.setitem(x, index, v).numpy() for v in (y, strided)], [wanted, wanted])
        np.testing.assert_array_equal(y.grad.numpy(), np.full(shape, (wanted != 0).sum() / value.size))
        np.testing.assert_array_equal(x.grad.numpy(), wanted == 0)
        with_graph, without = x * 1, leaf(zeros, host, requires_grad=False)
        with_graph[index] = y
        without[index] = y.detach()
        np.testing.assert_array_equal([with_graph.numpy(), without.numpy()], [wanted, wanted])


@pytest.mark.parametrize("shape", [(3, 2), (6,), (2,), (2, 2, 3), (0, 2, 3)])
def test_setitem_refuses_what_does_not_broadcast(host, shape):
    x, y = leaf(np.zeros((2, 3)), host), leaf(np.ones(shape), host)
    for write in (
        lambda: ops.setitem(x, ..., y),
        lambda: (x * 1).__setitem__(slice(None), y),
        lambda: x.detach().__setitem__(..., y.detach()),
    ):
        with pytest.raises(ShapeError, match=r"\[setitem\] value is .*, a\[index\] is \(2, 3\)"):
            write()


def test_setitem_with_a_history_stays_on_one_device(host):
    """The gradient of the value would be where the other tensor is, and no optimizer could take it."""
    elsewhere = ndl.cpu() if host == ndl.cpu_numpy() else ndl.cpu_numpy()
    x, y = leaf(np.zeros((2, 3)), host), leaf(np.ones(3), elsewhere)
    for write in (lambda: ops.setitem(x, 0, y), lambda: (x * 1).__setitem__(0, y)):
        with pytest.raises(DeviceError, match=r"\[setitem\] arrays are on different devices"):
            write()
    with ndl.no_grad():
        x[0] = y  # a copy of the numbers alone
    np.testing.assert_array_equal(x.numpy(), [[1, 1, 1], [0, 0, 0]])


def test_a_setitem_that_is_refused_changes_nothing(host):
    x = leaf([1.0, 2.0, 3.0], host)
    before = x * 2
    for index, value in ((7, 0.0), (slice(2), leaf(np.ones(3), host))):
        with pytest.raises((IndexError, ShapeError)):
            x[index] = value
    (before + x).sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), [3, 3, 3])


@pytest.mark.parametrize("dtypes", [("float32", "float64"), ("float64", "float32"), ("bfloat16", "float64")])
def test_a_gradient_has_the_dtype_of_its_tensor(host, dtypes):
    """Also within the graph, whose kernels take arrays of one dtype."""
    rng = np.random.default_rng(0)
    a, b, w = (leaf(rng.standard_normal((2, 3)), host, dtype=d) for d in (*dtypes, dtypes[0]))
    (ops.softmax(a) * b + ops.layer_norm(a, w[0], w[1]) * b + ops.logsoftmax(a) + ops.setitem(b, 0, a[0])).sum().backward()
    assert [x.grad.dtype for x in (a, b, w)] == [*dtypes, dtypes[0]]


def test_arrays_of_numpy_beside_a_tensor_take_its_precision(host):
    third = np.array([1 / 3, 2 / 3])
    x = leaf([1.0, 2.0], host, dtype="float64")
    np.testing.assert_array_equal([(x * third).numpy(), (third * x).numpy()], [[1 / 3, 4 / 3]] * 2)
    assert (leaf([1.0, 2.0], host, dtype="float16") * third).dtype == "float16"
    assert (leaf([1, 2], host, dtype="int32", requires_grad=False) + np.array([1, 2])).dtype == "int64"


def test_arrays_of_numpy_are_operands_of_each_operator(host):
    x, a = leaf([1.0, 2.0], host), np.array([3.0, 4.0], np.float32)
    for y, expected, grad in (
        (x - a, [-2, -2], [1, 1]),
        (a - x, [2, 2], [-1, -1]),
        (x / a, [1 / 3, 1 / 2], [1 / 3, 1 / 4]),
        (a / x, [3, 2], [-3, -1]),
        (x**a, [1, 16], [3, 32]),
        (a**x, [3, 16], [3 * math.log(3), 16 * math.log(4)]),
    ):
        y.sum().backward()
        np.testing.assert_allclose([y.numpy(), x.grad.numpy()], [expected, grad], rtol=1e-5)
        assert y.dtype == "float32"


def test_sums_that_numpy_asks_for(host):
    x = leaf([[1.0, 2.0], [3.0, 4.0]], host)
    for found, expected in ((np.sum(x), [10]), (np.mean(x), [2.5]), (np.sum(x, axis=0), [4, 6]), (x.mean(axis=1), [1.5, 3.5])):
        assert isinstance(found, ndl.Tensor)
        np.testing.assert_array_equal(found.numpy(), expected)
    total = np.sum(x, axis=0, keepdims=True)
    total.backward()
    assert total.shape == (1, 2)
    np.testing.assert_array_equal(x.grad.numpy(), np.ones((2, 2)))
    array = x.cached_data
    for found, expected in (
        (np.sum(array), [10]), (np.prod(array), [24]), (np.max(array), [4]), (np.min(array), [1]), (np.mean(array), [2.5]),
        (np.any(array), [True]), (np.all(array), [True]), (np.max(array, axis=1), [2, 4]), (np.sum(array, 0, keepdims=True), [[4, 6]]),
    ):  # fmt: skip
        assert isinstance(found, ndl.NDArray)
        np.testing.assert_array_equal(found.numpy(), expected)
    for reduced in (x, array):
        with pytest.raises(DTypeError, match=r"\[sum\] dtype or out"):
            np.sum(reduced, dtype="float64")


@pytest.mark.parametrize("sparse", [False, True])
def test_nothing_is_left_after_a_training_step(cpu, sparse):
    """With the collector off, 200 steps leave as much behind as 2."""
    config = PythiaConfig(layers=2, width=32, heads=4, feed_forward=64, vocab_size=61)
    config = config.with_sparse(block=16) if sparse else config
    model = Pythia(config, device=cpu)
    optimizer = AdamW(model.parameter_groups(), lr=1e-3)
    rng = np.random.default_rng(0)

    def step():
        ids, targets = (ndl.Tensor(rng.integers(0, 61, (2, 32)), device=cpu, dtype="int32", requires_grad=False) for _ in range(2))
        optimizer.reset_grad()
        loss = model.loss(ids, targets)
        loss.backward()
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
        return loss.item()

    gc.collect()
    gc.disable()
    try:
        counts = []
        for i in range(200):
            step()
            if i in (1, 199):
                stats = cpu.memory_stats()
                counts.append((stats["live"], stats["live_arrays"], autograd.TENSOR_COUNTER))
        assert counts[0] == counts[1]
    finally:
        gc.enable()


def test_no_reference_cycles(cpu):
    gc.collect()
    gc.disable()
    try:
        model = nn.Sequential(nn.Linear(4, 8, device=cpu), nn.ReLU(), nn.Linear(8, 2, device=cpu))
        for _ in range(3):
            model(leaf(np.ones((3, 4)), cpu)).sum().backward()
        del model
        assert gc.collect() == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("enter", [autograd.no_grad, autograd.rematerialize, lambda: amp.autocast("cpu"), no_dropout])
def test_a_generator_may_be_closed_in_another_context_than_it_was_begun_in(enter):
    """As a web server runs one, each item in some thread, or pytest a fixture with async def."""

    def items():
        with enter():
            yield

    def state():
        return autograd.is_grad_enabled(), autograd.current_segment(), autograd.current_autocast(), nn.nn_basic._dropping.get()

    before, begun = state(), items()
    copy_context().run(next, begun)
    begun.close()
    assert state() == before


def test_one_no_grad_serves_two_threads(host):
    shared, inside, leave = ndl.no_grad(), threading.Event(), threading.Event()
    found = []

    def other():
        with shared:
            inside.set()
            leave.wait(10)
        found.append(autograd.is_grad_enabled())

    thread = threading.Thread(target=other)
    with shared:
        thread.start()
        inside.wait(10)
    assert autograd.is_grad_enabled()
    leave.set()
    thread.join()
    assert found == [True]


def test_a_bool_is_taken_from_whole_numbers(host):
    a, b = (ndl.Tensor(v, device=host, dtype=d) for v, d in (([3, 4], "int32"), ([True, False], "bool")))
    assert (a - b).dtype == "int32" and (a - b).numpy().tolist() == [2, 4]


def test_a_gradient_of_nan_is_not_clipped_away(host):
    for kind in (SGD, Adam, AdamW):
        params = [leaf([1.0], host), leaf([2.0], host)]
        params[0].grad, params[1].grad = leaf([math.nan], host), leaf([100.0], host)
        optimizer = kind(params)
        assert math.isnan(float(optimizer.clip_grad_norm(1.0)))
        optimizer.step()
        assert [math.isnan(p.item()) for p in params] == [True, True]


@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_gradients_outside_float32_are_clipped_in_float64(host, kind):
    """Beside a parameter of float32, which takes the same steps as alone."""
    rng = np.random.default_rng(0)
    p, narrow, alone = leaf(np.ones(5), host, "float64"), leaf([1.0], host), leaf(np.ones(5), host, "float64")
    both, one = kind([p, narrow], lr=0.1), kind([alone], lr=0.1)
    for factor in (1, 3, 0.25):
        g = rng.standard_normal(5) * factor
        p.grad, narrow.grad, alone.grad = (
            leaf(g * 1e45, host, "float64"),
            leaf([0.0], host),
            leaf(0.5 * g / np.linalg.norm(g), host, "float64"),
        )
        both.clip_grad_norm(0.5)
        both.step()
        one.step()
    np.testing.assert_allclose(p.numpy(), alone.numpy(), rtol=1e-12)


def test_moments_are_of_one_device(cpu):
    params = [leaf([1.0], device) for device in (cpu, ndl.cpu_numpy())]
    for kind in (Adam, AdamW):
        with pytest.raises(DeviceError, match=rf"\[{kind.__name__}\] parameters are on cpu\(\) and cpu_numpy\(\) \(accepted: one"):
            kind(params)


@pytest.mark.parametrize("decorator", [ndl.remat, ndl.no_grad, ndl.no_grad(), ndl.enable_grad, amp.autocast("cpu")])
def test_what_cannot_be_called_is_not_decorated(decorator):
    name = getattr(decorator, "__name__", type(decorator).__name__)
    for wrong, found in ((5, "of type int"), (ndl.nn.ReLU, "the class ReLU")):
        with pytest.raises(TypeError, match=rf"\[{name}\] function is {found} \(accepted: a Module"):
            decorator(wrong)
