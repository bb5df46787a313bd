"""Activation checkpointing: the same bits, fewer bytes."""

import gc
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

import needle as ndl
from devices import usable
from making import leaf
from needle import autograd, graph, memory, nn, ops
from needle.errors import GraphError
from needle.models import Pythia, PythiaConfig
from needle.optim import AdamW

SMALL = PythiaConfig(layers=4, width=32, heads=4, feed_forward=64, vocab_size=61)


def batch(device, B=2, T=32, V=61, seed=0):
    rng = np.random.default_rng(seed)
    return [ndl.Tensor(rng.integers(0, V, (B, T)), device=device, dtype="int32", requires_grad=False) for _ in range(2)]


class Block(nn.Module):
    """What a layer has: a norm, products, an activation, dropout of both kinds, and an op that writes into its result."""

    def __init__(self, device, seed):
        super().__init__()
        np.random.seed(seed)
        self.norm, self.seed = nn.LayerNorm(8, device=device), seed
        self.up, self.down = nn.Linear(8, 16, device=device), nn.Linear(16, 8, device=device)
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        h = self.drop(ops.gelu(self.up(self.norm(x))))
        y = ops.dropout(self.down(h), 0.25, self.seed)
        both = ops.stack([ops.tanh(y), y * y], 0)
        return x + ops.summation(ops.exp(both * 0.1), 0)


def network(device):
    return [Block(device, i) for i in range(4)]


def run_plain(blocks, x):
    for block in blocks:
        x = block(x)
    return x


def run_each(blocks, x):
    for block in blocks:
        x = ndl.remat(block, x)
    return x


def run_in_twos(blocks, x):
    return ndl.remat(run_plain, blocks[2:], ndl.remat(run_plain, blocks[:2], x))


def run_nested(blocks, x):
    return ndl.remat(run_each, blocks[2:], ndl.remat(run_each, blocks[:2], x))


def run_doubly(blocks, x):
    """A region that is all of another one."""
    return ndl.remat(ndl.remat(run_plain), blocks, x)


def run_modules(blocks, x):
    for block in blocks:
        assert ndl.remat(block) is block
    return run_plain(blocks, x)


WAYS = [run_each, run_in_twos, run_nested, run_doubly, run_modules]


def gradients(way, device, backward=lambda loss: loss.backward()):
    blocks, x = network(device), leaf(np.random.default_rng(5).standard_normal((3, 8)), device)
    np.random.seed(11)  # course dropout draws from here
    out = way(blocks, x)
    loss = (out * out).sum()
    backward(loss)
    return [loss.numpy(), out.numpy(), x.grad.numpy()] + [p.grad.numpy() for b in blocks for p in b.parameters()]


def assert_same(found, expected):
    assert len(found) == len(expected)
    for f, e in zip(found, expected):
        np.testing.assert_array_equal(f, e)


def twice(loss):
    loss.backward()
    loss.backward(accumulate=True)


def retained(loss):
    loss.backward(retain_graph=True)
    loss.backward()


BACKWARD = {
    "once": lambda loss: loss.backward(),
    "accumulated": twice,
    "retained": retained,
    "with a graph": lambda loss: loss.backward(create_graph=True),
}


@pytest.mark.parametrize("backward", BACKWARD.values(), ids=BACKWARD)
@pytest.mark.parametrize("way", WAYS)
def test_the_same_bits(device, way, backward):
    assert_same(gradients(way, device, backward), gradients(run_plain, device, backward))


@pytest.mark.parametrize("way", WAYS)
def test_the_same_bits_in_lazy_mode(host, way, monkeypatch):
    expected = gradients(run_plain, host)
    monkeypatch.setattr(autograd, "LAZY_MODE", True)
    assert_same(gradients(way, host), expected)


def test_a_constant_that_lazy_mode_puts_off_outlives_the_segment_that_takes_it(host, monkeypatch):
    x, shift = leaf([1.0, 2.0], host), leaf([1.0, 0.0], host, requires_grad=False)
    monkeypatch.setattr(autograd, "LAZY_MODE", True)
    loss = ndl.remat(lambda c: ops.tanh(x + c), shift * 2).sum()
    found = []
    for _ in range(2):
        loss.backward()
        found.append(x.grad.numpy())
    assert_same(found, [found[0]] * 2)


@pytest.mark.parametrize("way", WAYS)
def test_second_derivatives(host, way):
    def penalty(way):
        w = leaf(np.random.default_rng(3).standard_normal((4, 4)), host)
        x = leaf(np.random.default_rng(4).standard_normal((2, 4)), host)
        out = way([lambda x: ops.tanh(x @ w)] * 4, x) if way is not run_modules else run_plain([lambda x: ops.tanh(x @ w)] * 4, x)
        out.sum().backward(create_graph=True)
        (x.grad * x.grad).sum().backward()
        return [w.grad.numpy(), x.grad.numpy()]

    assert_same(penalty(way), penalty(run_plain))


def test_a_gradient_asked_for_its_history(host):
    def curvature(way):
        x = leaf([0.3, -0.2], host)
        y = way([ops.tanh, ops.exp], x).sum()
        y.backward()
        x.grad.backward()
        return [x.grad.numpy()]

    assert_same(curvature(run_each), curvature(run_plain))


def test_without_a_graph_nothing_is_recorded(host):
    x = leaf([1.0, 2.0], host)
    with ndl.no_grad():
        assert ndl.remat(ops.exp, x).op is None
    assert ndl.remat(ops.exp, x.detach()).op is None


def test_backward_leaves_no_inner_arrays_in_a_graph_that_is_retained(host):
    x = leaf(np.ones(9000), host)
    loss = ndl.remat(lambda x: ops.tanh(ops.tanh(ops.tanh(x))), x).sum()
    before = memory.stats(host).by_category["activation"]
    loss.backward(retain_graph=True)
    assert memory.stats(host).by_category["activation"] == before


def test_a_region_that_raises_is_left(host):
    def wrong(x):
        raise KeyError("inside")

    x = leaf([1.0], host)
    with pytest.raises(KeyError):
        ndl.remat(wrong, x)
    assert autograd.current_segment() is None


def test_an_interrupt_while_a_segment_is_left_leaves_it(host, monkeypatch):
    def interrupted(segment):
        raise KeyboardInterrupt

    x = ndl.Tensor([1.0, 2.0], device=host)
    with monkeypatch.context() as patch:
        patch.setattr(graph.Segment, "leave", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ndl.remat(ops.exp, x)
    assert autograd.current_segment() is None


def test_each_op_is_computed_once_more_and_only_what_is_read(host):
    counts = {}

    class Counted(ops.Exp):
        def compute(self, a):
            counts[id(self)] = counts.get(id(self), 0) + 1
            return a.exp()

    marks = [Counted() for _ in range(6)]

    def region(x):
        for op in marks:
            x = op(x * 0.1)
        return x * 2  # the last value is read by its own gradient; this one by none

    x = leaf([0.5], host)
    ndl.remat(region, ndl.remat(region, x)).sum().backward()
    assert all(n == 4 for n in counts.values())  # twice forward, and once more for each of the two regions


def test_what_comes_into_a_region_goes_once_it_is_brought_back(host):
    """Backward through four regions: less is held in each, and a second one computes no op more than twice."""
    live, counts = [], Counter()

    class Probe(ops.Exp):
        def compute(self, a):
            counts[id(self)] += 1
            return a.exp()

        def gradient(self, out_grad, node):
            live.append(memory.stats(host).live)
            return super().gradient(out_grad, node)

    def region_of(probes):
        def region(x):
            for probe in probes:
                x = probe(x * 0.01)
            return x * 2

        return region

    x = leaf(np.ones((50, 20)), host)
    y, inputs_bytes = x, x.size * 4
    for _ in range(4):
        y = ndl.remat(region_of([Probe(), Probe()]), y)
    y = y.sum()
    for _ in range(2):
        live.clear()
        y.backward()
        assert np.all(np.diff(live[:6:2]) == -inputs_bytes), live  # what comes into the last of them is x, which stays
    assert max(counts.values()) == 4  # forward, backward, and twice in the second backward


def test_no_region_holds_what_comes_into_it_after_backward(host):
    x = leaf(np.ones(1000), host)
    held = {}
    for name, function in (
        ("none", lambda y: ops.exp(y)),
        ("one", lambda y: ndl.remat(ops.exp, y)),
        ("of a region alone", lambda y: ndl.remat(lambda y: ndl.remat(ops.exp, y), y)),
        ("that reads it twice", lambda y: ndl.remat(lambda y: ops.exp(y) + ops.sin(y), y)),
        ("that reads nothing", lambda y: ndl.remat(lambda y: y + 1, y)),
    ):
        loss = function(x * 2 + 1).sum()
        loss.backward()
        x.grad = None
        held[name] = memory.stats(host).live
        del loss
    assert len(set(held.values())) == 1, held


def test_a_region_brought_back_holds_only_what_gradients_read(host):
    live = []

    class Probe(ops.Exp):
        def gradient(self, out_grad, node):
            live.append(memory.stats(host).live)
            return super().gradient(out_grad, node)

    def region(y, count):
        for _ in range(count):
            y = y + 1
        return Probe()(y)

    x = leaf(np.ones(1000), host)
    for count in (1, 8):
        ndl.remat(region, ops.tanh(x), count).sum().backward()
        x.grad = None
    assert live[0] == live[1]


def counted():
    """(counts, an op that adds a number and counts in them how often that number was added)"""
    counts = Counter()

    class Probe(ops.AddScalar):
        def compute(self, a):
            counts[self.scalar] += 1
            return super().compute(a)

    return counts, Probe


def test_what_comes_into_a_region_beside_a_weight_is_not_computed_again(host):
    counts, Probe = counted()
    x, w = leaf(np.ones(10), host), leaf(np.ones(10), host)
    ndl.remat(lambda y: ops.sin(w + y), Probe(1)(x)).sum().backward()
    assert counts == {1: 1}


def test_a_second_backward_computes_nothing_that_no_gradient_reads(host):
    counts, Probe = counted()
    x = leaf(np.ones(10), host)
    loss = Probe(2)(ops.exp(Probe(1)(x))).sum()
    for _ in range(2):
        loss.backward()
    assert counts == {1: 2, 2: 1}  # the input of exp once more, for its output


def test_a_changed_parameter_is_refused(host):
    blocks, x = network(host), leaf(np.ones((3, 8)), host)
    loss = run_each(blocks, x).sum()
    blocks[1].up.weight.realize_cached_data()[0, 0] = 5.0
    with pytest.raises(GraphError, match="changed in place"):
        loss.backward()


def swapped(h):
    h.data = ndl.Tensor(np.full(h.shape, 0.25), device=h.device)
    return h


def written(h, view=lambda h: h):
    with ndl.no_grad():
        view(h)[0] = 0.0
    return h


WRITES = {
    "to it": written,
    "to a part of it": lambda h: written(h, lambda h: h[:, 1:]),
    "without history": lambda h: written(h, lambda h: h.detach()),
    "of its data": swapped,
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_what_was_written_to_an_inner_tensor_stays(host, write, monkeypatch):
    """Its op would not give these values again."""
    values, found = np.random.default_rng(1).standard_normal((3, 4)), []
    for lazy in (False, True):
        monkeypatch.setattr(autograd, "LAZY_MODE", lazy)
        for way in (lambda f, x: f(x), ndl.remat):
            x = leaf(values, host)
            out = way(lambda x: ops.tanh(write(x * 3) + 1) * 2, x)
            for _ in range(2):
                (out * out).sum().backward()
                found.append(x.grad.numpy())
    assert_same(found, [found[0]] * 8)


def test_an_inner_tensor_that_is_held_keeps_its_values(host):
    kept = []

    def region(x):
        kept.append(ops.exp(x))
        return kept[0] * kept[0]

    x = leaf([0.0, 1.0], host)
    out = ndl.remat(region, x)
    (out + kept[0]).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), 2 * np.exp([0, 2]) + np.exp([0, 1]), rtol=1e-6)
    np.testing.assert_allclose(kept[0].numpy(), np.exp([0, 1]), rtol=1e-6)


def test_two_losses_share_a_region(host):
    def grads(remat):
        x = leaf([0.5, 1.5], host)
        y = remat(lambda x: ops.tanh(ops.exp(x * 0.5) * x), x)
        a, b = (y * y).sum(), ops.exp(y).sum()
        a.backward()
        b.backward(accumulate=True)
        a.backward(accumulate=True)
        return [x.grad.numpy()]

    assert_same(grads(ndl.remat), grads(lambda f, x: f(x)))


def test_running_statistics_are_updated_once(host):
    norms = [nn.BatchNorm1d(3, device=host) for _ in range(2)]
    x = leaf(np.random.default_rng(0).standard_normal((5, 3)), host)
    norms[0](x).sum().backward()
    ndl.remat(norms[1], x).sum().backward()
    assert_same([norms[1].running_mean.numpy()], [norms[0].running_mean.numpy()])


def train(device, checkpoint_layers, config=SMALL, steps=5, micro_batches=1):
    model = Pythia(replace(config, checkpoint_layers=checkpoint_layers), device=device)
    optimizer = AdamW(model.parameter_groups(), lr=1e-3)
    seen = []
    for i in range(steps):
        optimizer.reset_grad()
        for j in range(micro_batches):
            loss = model.loss(*batch(device, seed=10 * i + j))
            (loss * (1 / micro_batches)).backward(accumulate=micro_batches > 1)
            seen.append(loss.numpy())
        seen += [p.grad.numpy() for p in model.parameters()]
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
    return seen + [p.numpy() for p in model.parameters()]


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("layers", [1, 3])
def test_training_is_bitwise_the_same(host, layers, sparse):
    config = SMALL.with_sparse(block=16) if sparse else SMALL
    assert_same(train(host, layers, config), train(host, 0, config))


def test_accumulation_is_bitwise_the_same(cpu):
    assert_same(train(cpu, 2, steps=2, micro_batches=3), train(cpu, 0, steps=2, micro_batches=3))


def test_training_on_the_emulated_device():
    device, config = usable("cuda_sim"), PythiaConfig(layers=2, width=32, heads=2, feed_forward=32, vocab_size=61)
    assert_same(train(device, 1, config, steps=1), train(device, 0, config, steps=1))


def test_nothing_is_left_and_nothing_is_in_a_cycle(cpu):
    gc.unfreeze()  # what was put aside before may be garbage by now, and TENSOR_COUNTER brings it back
    gc.collect()
    gc.disable()
    try:
        blocks, counts = network(cpu), []
        for i in range(30):
            x = leaf(np.ones((3, 8)), cpu)
            for way in (run_each, run_nested, run_doubly):
                loss = way(blocks, x).sum()
                if i % 3:  # a graph that no backward runs through must go as well
                    loss.backward()
            del loss, x
            if i in (3, 29):
                counts.append((cpu.memory_stats()["live_arrays"], autograd.TENSOR_COUNTER))
        assert counts[0] == counts[1]
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_to_the_device_where_it_is_changes_nothing(host):
    model = nn.remat(nn.Sequential(nn.Linear(3, 4, device=host), nn.ReLU(), nn.Linear(4, 2, device=host)))
    x = ndl.init.rand(5, 3, device=host)
    loss = model(x).sum()
    model.to(host)
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
