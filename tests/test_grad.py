"""autograd.grad: gradients with respect to chosen tensors, without ``.grad``."""

import gc

import numpy as np
import pytest

import needle as ndl
from making import leaf
from needle import autograd, memory, nn, ops
from needle.autograd import TensorOp, grad
from needle.errors import DTypeError, GraphError, ShapeError
from op_cases import CASES

X = np.random.default_rng(0).standard_normal((5, 8))


def network(device, again=False):
    """(the loss, the input, a result on the way, the parameters). again: a part is computed again in backward."""
    np.random.seed(0)
    first, norm, second = nn.Linear(8, 6, device=device), nn.LayerNorm1d(6, device=device), nn.Linear(6, 6, device=device)
    x = leaf(X, device)

    def hidden(x):
        return ops.softmax(norm(first(x)))

    h = ndl.remat(hidden, x) if again else hidden(x)
    return (second(h) ** 2).sum(), x, h, [*first.parameters(), *norm.parameters(), *second.parameters()]


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("lazy", [False, True])
def test_it_gives_what_backward_sets(device, monkeypatch, again, lazy):
    monkeypatch.setattr(autograd, "LAZY_MODE", lazy)
    loss, x, h, parameters = network(device, again)
    wanted = [x, *parameters, h, x]
    found = grad(loss, wanted)
    assert all(p.grad is None for p in wanted) and not any(g.requires_grad for g in found)
    assert len({g.cached_data.serial for g in found}) == len(found)
    (alone,) = grad(loss, x)  # a second time, of one Tensor
    np.testing.assert_array_equal(alone.numpy(), found[0].numpy())
    h.retain_grad()
    loss.backward()
    for value, p in zip(found, wanted):
        np.testing.assert_allclose(value.numpy(), p.grad.numpy(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_input_of_an_op_alone(cpu, case, create_graph):
    inputs = [leaf(values, cpu) for values in case.inputs()]
    out = case.run(*inputs)
    weights = leaf(np.random.default_rng(1).standard_normal(out.shape), cpu, requires_grad=False)
    out.backward(weights, create_graph=create_graph)
    for i in range(len(inputs)) if case.differentiable is None else case.differentiable:
        (found,) = grad(out, inputs[i], weights, create_graph=create_graph)
        np.testing.assert_array_equal(found.numpy(), inputs[i].grad.numpy())
    assert sum(x.grad is not None for x in inputs) >= len(case.differentiable or inputs)


def test_what_is_written_into_a_gradient_is_in_no_other(host):
    x, y = leaf([1.0, 2.0], host), leaf([3.0, 4.0], host)
    v = leaf([1.0, 10.0], host, requires_grad=False)
    for create_graph in (False, True):
        for found in (grad(x + y, [x, y, x], v, create_graph=create_graph), grad((x + y).sum(), [x, y], create_graph=create_graph)):
            expected = [g.numpy() for g in found[1:]]
            found[0].realize_cached_data()[0] = 7.0
            assert v.numpy().tolist() == [1, 10]
            for g, values in zip(found[1:], expected):
                np.testing.assert_array_equal(g.numpy(), values)


def test_gradients_with_a_graph_share_no_memory(host):
    """Nor those that backward sets, as if without a graph."""
    x, y = leaf([1.0, 2.0], host), leaf([1.0, 1.0], host)
    h = (x + y).retain_grad()
    (h * h * h).sum().backward(create_graph=True)
    with ndl.no_grad():
        x.grad[0] = 0.0
    assert y.grad.numpy().tolist() == h.grad.numpy().tolist() == [12, 27]
    y.grad.sum().backward()
    assert x.grad.numpy().tolist() == [12, 18]  # 6 (x + y)
    v = leaf([1.0, 10.0], host, requires_grad=False)
    (x + 1.0).backward(v, create_graph=True)
    x.grad.realize_cached_data()[0] = 7.0
    assert v.numpy().tolist() == [1, 10]


@pytest.mark.parametrize("again", [False, True])
def test_a_penalty_on_gradients_beside_accumulated_ones(device, again):
    """What is accumulated in ``.grad`` is left alone by the gradient that is a part of the loss."""
    w, v = leaf([[1.0], [2.0]], device), leaf(np.ones((2, 2)), device)
    layer = (lambda x: ndl.remat(lambda x: ops.tanh(x @ v), x)) if again else (lambda x: ops.tanh(x @ v))

    def penalty(x, leaves):
        (gx,) = grad(((layer(x) @ leaves[0]) ** 2).sum(), x, create_graph=True)
        assert gx.requires_grad
        return (gx * gx).sum()

    inputs = [leaf([[0.1 + i, 0.2]], device) for i in range(2)]
    for x in inputs:
        penalty(x, [w]).backward(accumulate=True)
    step = 1e-2
    for i in range(2):
        moved = [leaf(w.numpy() + sign * step * np.eye(2)[:, [i]], device) for sign in (1, -1)]
        up, down = (sum(penalty(x, [m]).item() for x in inputs) for m in moved)
        np.testing.assert_allclose(w.grad.numpy()[i, 0], (up - down) / (2 * step), rtol=2e-3)


def test_derivatives_of_any_order_and_a_derivative_that_is_zero(host):
    x = leaf([2.0], host)
    value, expected = x * x * x, [12.0, 12.0, 6.0]
    for n in expected:
        (value,) = grad(value, x, create_graph=True)
        assert value.item() == n
    assert grad(value * x, x)[0].item() == 6  # of what has become a constant
    w = leaf([[2.0]], host)
    (slope,) = grad(leaf([[1.0]], host, requires_grad=True) @ w, w, create_graph=True)
    assert grad(slope, w, allow_unused=True) == (None,)


def test_only_the_ways_to_the_inputs_are_gone(host):
    class Counted(TensorOp):
        def compute(self, a):
            return a + 0

        def gradient(self, out_grad, node):
            gone.append(self.name)
            return out_grad

    class Other(Counted):
        pass

    gone = []
    x, y = leaf([1.0], host), leaf([2.0], host)
    out = (Counted()(x) * Other()(y * 3)).sum()
    assert grad(out, x)[0].item() == 6 and gone == ["Counted"]
    assert [g.item() for g in grad(out, [y, x])] == [3, 6] and gone.count("Other") == 1


def test_what_has_no_gradient_is_said(host):
    x, y, unused = leaf([1.0, 2.0], host), leaf([1.0], host, requires_grad=False), leaf([3.0], host)
    out = x * 2
    with pytest.raises(GraphError, match=r"^\[grad\] input 1, of shape \(1,\), does not lead to the output \(allow_unused=True"):
        grad(out, [x, unused])
    for other in (unused, unused * 2):
        assert [g is None for g in grad(out, [x, other], allow_unused=True)] == [False, True]
    with pytest.raises(GraphError, match=r"^\[grad\] input 0, of shape \(1,\), requires no gradient"):
        grad(out, y)
    with pytest.raises(GraphError, match=r"^\[grad\] this tensor has no history"):
        grad(y * 2, x)
    with pytest.raises(DTypeError, match=r"^\[grad\] outputs is of type list \(accepted: a Tensor\)"):
        grad([out], x)
    with pytest.raises(DTypeError, match=r"^\[grad\] input 1 is of type float"):
        grad(out, [x, 1.0])
    for wrong in (np.ones(2), None):
        with pytest.raises(DTypeError, match=r"^\[grad\] inputs is of type .* \(accepted: a Tensor, or several\)"):
            grad(out, wrong)
    with pytest.raises(ShapeError, match=r"^\[grad\] grad_outputs is \(1,\) \(accepted: \(2,\)"):
        grad(out, x, y)
    np.testing.assert_array_equal(grad(out, x, leaf([1.0, 3.0], host))[0].numpy(), [2, 6])
    assert grad(out, out)[0].numpy().tolist() == [1, 1] and grad(x, x)[0].numpy().tolist() == [1, 1]
    assert grad(out, []) == ()


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("create_graph", [False, True])
def test_its_memory_is_planned_and_comes_back(host, again, create_graph):
    def build(device):
        def step():
            loss, x, _, parameters = network(device, again)
            g, *_ = grad(loss, [x, *parameters], create_graph=create_graph)
            if create_graph:
                (g * g).sum().backward()

        return step

    planned = memory.peak_bytes(build, device=host)
    step = build(host)
    step()
    gc.collect()
    gc.disable()
    try:
        live = memory.stats(host).live
        with memory.peak(host) as peak:
            step()
        assert memory.stats(host).live == live and peak.above_start == planned
    finally:
        gc.enable()


def test_its_arrays_count_as_gradients(host):
    x = leaf(np.ones((50, 20)), host)
    before = memory.stats(host).by_category["gradient"]
    found = grad((x * x).sum(), x)
    assert memory.stats(host).by_category["gradient"] - before == 4000 and len(found) == 1


def test_gradients_that_nobody_asked_for_are_not_made(host, monkeypatch):
    """Of a layer's weight, when that of its input is wanted, and of a constant."""
    products, plain = [], ops.ops_mathematic._matmul

    def counted(*args, **kwargs):
        products.append(args)
        return plain(*args, **kwargs)

    monkeypatch.setattr(ops.ops_mathematic, "_matmul", counted)
    x, w, b = leaf(np.ones((4, 3)), host), leaf(np.ones((3, 5)), host), leaf(np.ones(5), host)
    out = ops.linear(x, w, b)
    products.clear()
    for inputs, count in ((x, 1), (b, 0), ([x, b], 1)):
        grad(out, inputs)
        assert len(products) == count
        products.clear()
    a, c = leaf(np.ones(4000), host), leaf(np.ones(4000), host, requires_grad=False)
    for out in (a * c, a / c):
        with memory.peak(host) as peak:
            grad(out, a, c)
        assert peak.above_start == 4 * 4000
