"""Programs of ops drawn at random, of views of views and of results that are used twice: what they compute on each device, what
their plan says, and what they leave behind.
"""

import gc
import math

import numpy as np
import pytest

import needle as ndl
from making import leaf
from needle import autograd, memory, nn, ops
from needle.optim import AdamW
from needle.testing import assert_close

LARGEST = 600  # elements of a value
UNARY = (
    ops.tanh, ops.sigmoid, ops.gelu, ops.silu, ops.sin, ops.negate, ops.absolute, lambda x: x * x, lambda x: ops.exp(x * 0.3),
    lambda x: ops.log(x * x + 0.5), lambda x: 2.0 / (x * x + 0.5), lambda x: 1.5 - x, lambda x: ops.clip(x, -0.7, 1.1),
    lambda x: ops.maximum(x, 0.25), lambda x: x**3, lambda x: x + x,
)  # fmt: skip
BINARY = (
    ops.add, ops.multiply, ops.maximum, lambda x, y: x - y, lambda x, y: x / (y * y + 0.5), lambda x, y: ndl.remat(product, x, y),
)  # fmt: skip


def product(x, y):
    h = ops.tanh(x) * y
    return ops.sigmoid(h) + h * x


class Program:
    """Drawn while it runs, so that every op fits: ``steps`` of a function and the places of what it is given, among the leaves and
    the results before it.
    """

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.leaves = [self.rng.standard_normal(self.rng.integers(1, 6, self.rng.integers(1, 4))) for _ in range(4)]
        self.steps = []
        self.values = [leaf(x, ndl.cpu_numpy(), "float64") for x in self.leaves]
        kinds = (self.unary, self.binary, self.binary, self.matmul, self.view, self.view, self.reduction, self.joined, self.part)
        with ndl.no_grad():
            while len(self.steps) < 10:
                i = int(self.rng.integers(len(self.values)))
                drawn = self.rng.choice(kinds)(i, self.values[i].shape)
                if drawn is not None:
                    self.add(*drawn)

    def add(self, function, *places):
        value = function(*(self.values[i] for i in places))
        if value.size <= LARGEST and value.ndim <= 5 and (not value.size or abs(value.numpy()).max() < 100):
            self.steps.append((function, places))
            self.values.append(value)

    def one_of(self, items):
        return items[int(self.rng.integers(len(items)))] if len(items) else None

    def axes(self, shape):
        return tuple(map(int, self.rng.permutation(len(shape))[: self.rng.integers(1, len(shape) + 1)]))

    def index(self, shape):
        pick = {
            0: lambda n: int(self.rng.integers(-n, n)),
            1: lambda n: slice(None, None, int(self.rng.integers(1, 4))),
            2: lambda n: slice(int(self.rng.integers(0, n)), n),
            3: lambda n: slice(None),
            4: lambda n: self.rng.integers(-n, n, 3),
        }
        if self.rng.integers(6) == 0:
            return self.rng.random(shape[: self.rng.integers(1, len(shape) + 1)]) < 0.5
        return tuple(pick[int(self.rng.integers(len(pick)))](n) if n else slice(None) for n in shape)

    def unary(self, i, shape):
        return self.one_of(UNARY), i

    def binary(self, i, shape):
        def fits(other):
            try:
                return math.prod(np.broadcast_shapes(shape, other)) <= LARGEST
            except ValueError:
                return False

        return self.one_of(BINARY), i, self.one_of([j for j, v in enumerate(self.values) if fits(v.shape)])

    def matmul(self, i, shape):
        others = [
            j for j, v in enumerate(self.values)
            if len(shape) >= 2 and v.ndim >= 2 and shape[-1] == v.shape[-2] and (v.ndim == 2 or v.shape[:-2] == shape[:-2])
        ]  # fmt: skip
        return (ops.matmul, i, self.one_of(others)) if others else None

    def view(self, i, shape):
        if not shape:
            return None
        axes, index = self.axes(shape), self.index(shape)
        order = tuple(map(int, self.rng.permutation(len(shape))))
        wider = (2, *(3 if n == 1 else n for n in shape))
        widths = [tuple(map(int, self.rng.integers(0, 3, 2))) for _ in shape]
        views = (
            lambda x: x[index], lambda x: ops.permute(x, order), lambda x: ops.flip(x, axes), lambda x: ops.pad(x, widths),
            lambda x: ops.broadcast_to(x, wider), lambda x: ops.reshape(x, (-1,)), lambda x: ops.dilate(x, axes, 1),
            lambda x: ops.reshape(x, (1, *shape[::-1])),
        )  # fmt: skip
        return self.one_of(views), i

    def reduction(self, i, shape):
        if not shape:
            return None
        axes, keep = self.axes(shape), bool(self.rng.integers(2))
        reductions = [
            lambda x: ops.summation(x, axes, keep), lambda x: ops.mean(x, axes, keep), lambda x: ops.max(x, axes, keep),
            lambda x: ops.logsumexp(x, axes), lambda x: ops.softmax(x, axes[0]),
        ]  # fmt: skip
        if len(shape) == 2:
            rows, classes = shape
            targets = self.rng.integers(0, classes, rows)
            rows = self.rng.integers(0, rows, 7)
            reductions += [
                lambda x: ops.cross_entropy(x, leaf(targets, x.device, "int32", requires_grad=False)),
                lambda x: ops.embedding(x, leaf(rows, x.device, "int32", requires_grad=False)),
            ]
        return self.one_of(reductions), i

    def joined(self, i, shape):
        j = self.one_of([j for j, v in enumerate(self.values) if v.shape == shape])
        axis = int(self.rng.integers(-1, len(shape)))
        join = ops.concatenate if shape and axis >= 0 else ops.stack
        return (lambda x, y: join([x, y], axis)), i, j

    def part(self, i, shape):
        if not shape:
            return None
        axis, index = int(self.rng.integers(len(shape))), self.index(shape)
        inner = np.empty(shape)[index].shape
        others = [j for j, v in enumerate(self.values) if v.shape == inner]
        if others:
            return (lambda x, y: ops.setitem(x, index, y)), i, self.one_of(others)

        def first_and_last(x):
            parts = list(ops.split(x, axis))
            return parts[0] * parts[-1]

        return self.one_of([first_and_last, lambda x: ops.setitem(x, index, 1.25)]), i

    def run(self, leaves):
        """The sum of the squares of what nothing in the program uses."""
        values = list(leaves)
        for function, places in self.steps:
            values.append(function(*(values[i] for i in places)))
        used = {i for _, places in self.steps for i in places}
        ends = [ops.summation(v * v * 0.1) for i, v in enumerate(values) if i not in used]
        return autograd.sum_node_list(ends)


every_program = pytest.mark.parametrize("seed", range(40))


def loss_and_gradients(run, leaves):
    loss = run(leaves)
    loss.backward()
    return [loss.numpy(), *(np.zeros(x.shape) if x.grad is None else x.grad.numpy() for x in leaves)]


@every_program
def test_a_program_is_the_same_everywhere_and_with_everything_computed_again(device, seed):
    program = Program(seed)
    expected = loss_and_gradients(program.run, [leaf(x, ndl.cpu_numpy(), "float64") for x in program.leaves])
    found = loss_and_gradients(program.run, [leaf(x, device, "float64") for x in program.leaves])
    again = loss_and_gradients(
        lambda leaves: ndl.remat(lambda *given: program.run(given), *leaves), [leaf(x, device, "float64") for x in program.leaves]
    )
    for one, other, reference in zip(found, again, expected):
        assert_close(one, reference, 1e-9)
        np.testing.assert_array_equal(other, one)


@every_program
def test_the_gradients_of_a_program_are_its_slope(seed):
    program = Program(seed)
    device, rng, h = ndl.cpu_numpy(), np.random.default_rng(seed), 1e-5
    directions = [rng.standard_normal(x.shape) for x in program.leaves]
    _, *gradients = loss_and_gradients(program.run, [leaf(x, device, "float64") for x in program.leaves])
    ahead, behind = (
        program.run([leaf(x + step * d, device, "float64") for x, d in zip(program.leaves, directions)]).item() for step in (h, -h)
    )
    slope = sum((g * d).sum() for g, d in zip(gradients, directions))
    assert (ahead - behind) / (2 * h) == pytest.approx(slope, rel=1e-5, abs=1e-6)


@every_program
def test_a_programs_plan_is_right_to_the_byte_and_nothing_stays(device, seed):
    program = Program(seed)

    def build(where):
        leaves = [nn.Parameter(leaf(x, where)) for x in program.leaves]
        optimizer = AdamW(leaves, lr=0.01)

        def step():
            loss_and_gradients(program.run, leaves)
            optimizer.step()

        return step

    planned, real = memory.plan(build), memory.plan(build, device=device)
    assert (planned.peak_bytes, planned.step_bytes, planned.by_category) == (real.peak_bytes, real.step_bytes, real.by_category)

    step = build(device)
    step()
    gc.collect()
    gc.disable()
    try:
        live, tensors = device.memory_stats()["live"], autograd.TENSOR_COUNTER
        step()
        assert (device.memory_stats()["live"], autograd.TENSOR_COUNTER) == (live, tensors)
    finally:
        gc.enable()


def test_programs_are_not_all_alike():
    programs = [Program(seed) for seed in range(40)]
    gradients = [loss_and_gradients(p.run, [leaf(x, ndl.cpu_numpy(), "float64") for x in p.leaves])[1:] for p in programs]
    assert sum(any(abs(g).max(initial=0) > 0 for g in grads) for grads in gradients) == len(programs)
    assert len({sum(v.size for v in p.values) for p in programs}) > 30
