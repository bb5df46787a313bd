"""needle.memory.plan: what a step takes before it runs, and what is chosen by it."""

import errno
import functools
import gc
import itertools
import math
import os
import re
import subprocess
import sys
import textwrap
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

import needle as ndl
from devices import usable
from needle import amp, data, memory, nn, ops
from needle.backend_ndarray import kernels
from needle.backend_ndarray.block_layout import BlockLayout
from needle.errors import GraphError, ShapeError
from needle.memory import sites
from needle.memory.trace import holders
from needle.models import SIZES, Pythia, PythiaConfig, checkpointed, plannable
from needle.optim import SGD, Adam
from tiny_pythia import TINY, tokens

SPARSE = TINY.with_sparse("local", 16, 2)
CONFIGURATIONS = [
    (config, batch, T, accumulation, precision)
    for config in (
        TINY,
        SPARSE,
        TINY.with_sparse("mixed", 32, 2),
        replace(TINY, checkpoint_layers=1),
        replace(SPARSE, layers=3, checkpoint_layers=2),
        replace(TINY, layers=3, checkpoint_layers=(1, 1)),
        PythiaConfig(layers=1, width=48, heads=3, feed_forward=96, vocab_size=77),
    )
    for batch, T, accumulation, precision in (
        (1, 32, 1, "fp32"), (3, 64, 1, "bf16"), (2, 32, 2, "fp32"), (1, 64, 3, "fp16"), (2, 96, 1, "fp32"), (2, 32, 2, "bf16"),
        (2, 64, 1, "fp16"),
    )
]  # fmt: skip


@pytest.mark.usefixtures("few_objects")
@pytest.mark.parametrize("name", ["cpu", "cuda_sim", "cuda", "cpu_numpy"])
def test_the_plan_is_the_measured_peak_to_the_byte(name):
    """Every combination on cpu; elsewhere, where the same calls allocate, 25 of them, with each configuration and each run."""
    device = usable(name)
    for config, *run in CONFIGURATIONS if name == "cpu" else CONFIGURATIONS[::2]:
        build = plannable(config, *run)
        planned = memory.peak_bytes(build)
        assert planned == memory.peak_bytes(build, device=device) > 4 * config.parameter_count() * 3, (config, run)


@pytest.mark.usefixtures("few_objects")
@pytest.mark.parametrize(
    "kind, gates, numbers",
    [
        (nn.RNN, 1, 2),  # h, and the gradient of what went into the nonlinearity
        (nn.LSTM, 4, 6),  # h, c and four gates, whose gradients take their place
    ],
)
def test_what_a_recurrent_layer_keeps_per_hidden_unit_is_planned_to_the_byte(cpu, kind, gates, numbers):
    T, B, H = 200, 4, 32

    def build(device):
        model = kind(H, H, device=device)
        x = ndl.Tensor(np.zeros((T, B, H)), device=device, requires_grad=False)
        return lambda: model(x)[0].sum().backward()

    planned, weights = memory.peak_bytes(build), 4 * 2 * gates * (H * H + H)
    assert planned == memory.peak_bytes(build, device=cpu)
    # Beside x, the weights, and their gradients of this step and the last.
    assert planned - 3 * weights - 4 * T * B * H < (numbers + 0.1) * 4 * T * B * H


@pytest.mark.usefixtures("few_objects")
def test_pixels_of_a_kernel_that_meet_only_padding_take_no_memory():
    N, C = 512, 8

    def build(device):
        model, x = nn.Conv(C, C, 3, device=device), ndl.Tensor(np.zeros((N, C, 1, 1)), device=device)
        return lambda: model(x).sum().backward()

    assert memory.peak_bytes(build) < 5 * 4 * N * C  # the padded image would have 9 pixels, and its windows 9


@pytest.mark.usefixtures("few_objects")
@pytest.mark.parametrize("shape", [(64, 16, 32, 32), (1, 16, 256, 256)])
def test_the_windows_of_a_convolution_take_no_memory(shape):
    bytes_of_image = 4 * math.prod(shape)  # 4 MiB, and its windows 36

    def build(device):
        model, x = nn.Conv(16, 16, 3, device=device), ndl.Tensor(np.zeros(shape), device=device)
        return lambda: model(x).sum().backward()

    # The image, its gradient and the last one, what those are made of, and copies with the channels last.
    assert memory.peak_bytes(build) < 5.1 * bytes_of_image


@pytest.mark.usefixtures("few_objects")
def test_batch_norm_keeps_its_input_and_nothing_else_of_that_size():
    shape = 1000, 64

    def build(device):
        model = nn.Sequential(*[nn.BatchNorm1d(shape[1], device=device) for _ in range(4)])
        x = ndl.Tensor(np.zeros(shape), device=device, requires_grad=False)
        return lambda: model(x).sum().backward()

    assert memory.peak_bytes(build) < 7.3 * 4 * 64_000  # x, four that are kept, and what the gradients of one take


@pytest.mark.parametrize(
    "config",
    [TINY, SPARSE, replace(TINY, dropout=0.1), PythiaConfig(layers=3, width=48, heads=3, feed_forward=96, vocab_size=300)],
)
def test_a_pythia_keeps_what_its_gradients_read_and_no_more(config):
    B, T, L, V, C, F = 3, 64, config.layers, config.vocab_size, config.width, config.feed_forward

    def build(device):
        model, ids = Pythia(config, device=device), tokens(device, B, T)
        return lambda: model.loss(ids, ids).backward()

    # Numbers per token of a layer. Dropout makes its mask again, gelu its result; the rotation reads nothing.
    norms = C + 2 * (C + 2)  # the input of both, and for each its result, which is multiplied next, a mean and a deviation
    attention = 3 * C + C + config.heads  # q, k, v, the result, which is multiplied next, and a log-sum-exp for each head
    per_token = L * (norms + attention + F) + 2 * C + 2  # F: what goes into gelu; after the layers the input and result of a norm
    plan = memory.plan(build)
    found = plan.by_category
    assert plan.peak_module == "embed_out" and found["parameter"] == 4 * config.parameter_count()
    assert found["gradient"] == found["parameter"] + 4 * C * (B * T + V)  # of the step before, and what the loss makes
    assert found["workspace"] == 4 * B * T * V  # the logits
    of_the_loss = found["activation"] - 4 * B * T * per_token
    assert 0 <= of_the_loss < 4 * 5 * B * T  # per token its loss, its weight, and a log-sum-exp in two parts


@pytest.mark.usefixtures("few_objects")
def test_a_softmax_loss_takes_the_logits_gradient_and_no_more_of_that_size():
    shape = 500, 1000

    def build(device):
        logits = ndl.init.zeros(*shape, device=device, requires_grad=True)
        y = ndl.init.zeros(shape[0], device=device)

        def step():
            logits.grad = None
            nn.SoftmaxLoss()(logits, y).backward()

        return step

    assert memory.peak_bytes(build) < 2.1 * 4 * 500_000


@pytest.mark.usefixtures("few_objects")
def test_where_makes_no_gradient_that_nobody_asked_for():
    def build(device):
        x = ndl.init.zeros(100_000, device=device, requires_grad=True)
        chosen = ndl.init.zeros(100_000, device=device, dtype="bool")

        def step():
            x.grad = None
            ops.where(chosen, x, 0.0).sum().backward()

        return step

    assert memory.peak_bytes(build) < 2.5 * 4 * 100_000  # x, its gradient, and which


@pytest.mark.usefixtures("few_objects")
def test_a_plan_has_the_peak_of_the_counters():
    for config, *run in CONFIGURATIONS[::8]:
        build = plannable(config, *run)
        assert memory.plan(build).peak_bytes == memory.peak_bytes(build), (config, run)


def test_networks_of_one_type_have_rows_of_their_own():
    def build(device):
        discriminator, generator = (nn.Sequential(nn.Linear(10, width, device=device)) for width in (1000, 10))
        return lambda: discriminator(generator(ndl.init.ones(4, 10, device=device))).sum().backward()

    rows = memory.plan(build).by_module
    assert rows["Sequential.modules"]["parameter"] == 4 * 11_000 and rows["Sequential2.modules"]["parameter"] == 4 * 110


def test_a_buffer_is_its_modules():
    def build(device):
        model, x = nn.Sequential(nn.BatchNorm1d(100, device=device)).eval(), ndl.init.ones(4, 100, device=device)
        return lambda: model(x).sum().backward()

    assert sum(h.nbytes for h in memory.plan(build).holders if h.module == "modules.0" and h.site.op == "") == 4 * 400


def test_a_network_on_another_device_changes_no_name(cpu):
    other = Pythia(TINY, device=cpu)
    assert {"layers.0", "layers.1", "embed_in"} < memory.plan(plannable(TINY, 2, 32)).by_module.keys() and other.device == cpu


def test_networks_keep_their_names_when_their_arrays_are_replaced(cpu):
    pair = [nn.Sequential(nn.Linear(10, width, device=cpu)) for width in (1000, 10)]

    def named():
        return [
            h.module for h in sorted(holders(cpu), key=lambda h: -h.nbytes) if h.category == "parameter" and "modules.0" in h.module
        ]

    before = named()
    pair[0].load_state_dict(pair[0].state_dict())
    assert before == named() and before[0] == "Sequential.modules.0"


def test_parameters_keep_their_names_when_a_step_replaces_their_arrays(cpu):
    def build(device):
        layer = nn.Linear(64, 64, device=device)

        def step():
            layer(ndl.ones(400, 64, device=device)).sum().backward()
            for p in layer.parameters():
                p.data = p.data - 0.1 * p.grad.data

        return step

    for device in (cpu, ndl.meta()):
        parameters = {name: found["parameter"] for name, found in memory.plan(build, device=device).by_module.items()}
        assert parameters == {"": 0, "weight": 4 * 64 * 64, "bias": 4 * 64}
        assert ndl.autograd._data_given is None and not sites._given


def test_a_module_that_has_gone_leaves_its_name_to_no_other(cpu):
    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(np.ones((8, 8)))

        def forward(self, x):
            return ops.exp(x @ self.weight)

    class Second(First):
        pass

    x = ndl.ones(8, 8, requires_grad=False)
    with memory.trace(cpu):
        for _ in range(20):  # until one of the second kind lies where one of the first was
            first = First()
            kept, place = first(x), id(first)
            del first
            others = [Second() for _ in range(50)]
            if any(id(m) == place for m in others):
                break
        (made,) = [h for h in holders(cpu) if h.site.op == "Exp"]
    assert made.module == ""
    del kept


def test_a_module_that_is_no_key_has_a_name(cpu):
    @dataclass
    class Net(nn.Module):
        width: int = 8

        def __post_init__(self):
            super().__init__()
            self.weight = nn.Parameter(np.ones((self.width, self.width)))

        def forward(self, x):
            return ops.exp(x @ self.weight)

    net, x = Net(), ndl.ones(8, 8, requires_grad=False)
    with memory.trace(cpu):
        y = net(x)
        (made,) = [h for h in holders(cpu) if h.site.op == "Exp"]
    assert made.module == "Net" and y.shape == (8, 8)


def test_a_network_whose_parameters_are_groups_ends_no_plan(cpu):
    class Tuned(nn.Sequential):
        def parameters(self):
            return [{"params": super().parameters()[:1], "lr": 1e-3}]

    model, x = Tuned(nn.Linear(8, 4, device=cpu)), ndl.ones(2, 8, requires_grad=False)
    assert "layers.0" in memory.plan(plannable(TINY, 2, 32)).by_module
    with memory.trace(cpu):
        y = model(x)
        (made,) = [h for h in holders(cpu) if h.site.op == "Linear"]
    assert made.module == "modules.0" and y.shape == (2, 4)


def test_a_network_that_grows_meanwhile_ends_no_plan(cpu):
    """As another thread may have it do."""

    class Name(str):
        def __str__(self):
            layers.setdefault("later", None)
            return "first"

    model = nn.Sequential(nn.Linear(8, 4, device=cpu))
    layers = model.layers = {Name(): nn.Linear(4, 4, device=cpu)}
    assert "layers.0" in memory.plan(plannable(TINY, 2, 32)).by_module and "later" in layers


@pytest.mark.parametrize("plan", [memory.plan, memory.peak_bytes])
def test_a_region_that_names_another_device_than_the_plans_is_not_passed_over(cpu, plan):
    def build_for(region):
        def build(device):
            model = nn.Linear(8, 8, device=device)

            @amp.autocast(region or device, "bfloat16")
            def step():
                model(ndl.init.ones(4, 8, device=device)).sum().backward()

            return step

        return build

    with pytest.warns(UserWarning, match=r"\[autocast\] a region of cpu lowers nothing on meta"):
        plan(build_for("cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan(build_for(None))
        plan(build_for("cpu"), device=cpu)


class Trainer:
    """Whose second model takes the place of the first."""

    def build(self, device, batch=8):
        self.model = nn.Sequential(nn.Linear(64, 256, device=device), nn.ReLU(), nn.Linear(256, 10, device=device))
        self.optimizer, self.x = Adam(self.model.parameters()), ndl.init.ones(batch, 64, device=device)
        return self.step

    def step(self):
        self.loss = self.model(self.x).sum()
        self.loss.backward()
        self.optimizer.step()


def test_what_an_earlier_plan_has_left_changes_no_plan():
    trainer, measured = Trainer(), memory.peak_bytes(Trainer().build, device=ndl.cpu())
    for _ in range(2):
        assert memory.peak_bytes(trainer.build) == memory.plan(trainer.build).peak_bytes == measured
    assert trainer.loss.device == ndl.meta() and memory.stats(ndl.meta()).live == 0


def test_what_is_kept_between_calls_changes_no_plan(cpu):
    build = plannable(TINY, 2, 32)
    expected = memory.peak_bytes(build)
    build(cpu)()  # angles, layouts
    assert memory.peak_bytes(build, device=cpu) == expected


@pytest.mark.parametrize("plan", [memory.plan, memory.peak_bytes])
def test_the_collector_is_off_while_a_plan_runs(plan):
    def build(device):
        assert not gc.isenabled()
        return Trainer().build(device)

    plan(build)
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        plan(lambda device: 1 // 0)
    assert gc.isenabled()
    gc.disable()
    try:
        plan(build)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_plan_inside_of_a_plan_is_refused():
    def build(device):
        assert memory.peak_bytes(Trainer().build) > 0
        return Trainer().build(device)

    for plan in (memory.plan, memory.peak_bytes):
        with pytest.raises(GraphError, match="one plan after the other"):
            plan(build)
        assert plan(build, device=ndl.cpu())  # where it does no harm


@pytest.mark.parametrize("lists", [0, 1, 2])
def test_a_step_that_fails_deep_in_a_network_ends_its_plan_and_not_the_process(lists):
    """In a process of its own. How deep what is being freed is nested decides in which order the interpreter frees it."""
    code = f"""
        from needle import init, memory, nn
        def build(device):
            layers = nn.Sequential(*(nn.Linear(4, 4, device=device) for _ in range(30)))
            def step():
                kept = {"[" * lists}layers(init.ones(2, 4, device=device)){"]" * lists}
                raise ValueError("the step's own")
            return step
        try:
            memory.plan(build)
        except ValueError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "the step's own\n"), done.stderr


def test_threads_plan_in_turns():
    plan = functools.partial(
        memory.plan, plannable(PythiaConfig(layers=1, width=16, heads=2, feed_forward=32, vocab_size=40), 2, 8)
    )
    expected = plan()
    with ThreadPoolExecutor(4) as pool:
        found = [future.result() for future in [pool.submit(plan) for _ in range(12)]]
    assert {(p.peak_bytes, p.step_bytes) for p in found} == {(expected.peak_bytes, expected.step_bytes)}


def test_what_a_module_made_for_its_call_takes_is_that_of_the_one_around_it():
    class Layer(nn.Module):
        def __init__(self, device):
            super().__init__()
            self.inner = nn.Linear(10, 10, device=device)

        def forward(self, x):
            return nn.Dropout(0.5)(nn.ReLU()(self.inner(x)))

    def build(device):
        model = nn.Sequential(Layer(device), Layer(device))
        return lambda: model(ndl.init.ones(1000, 10, device=device)).sum().backward()

    rows = memory.plan(build).by_module
    assert rows["modules.0"]["activation"] > 40_000 and rows["modules.1"]["activation"] >= 2 * 40_000  # results of ReLU and Dropout
    assert sum(rows[""].values()) <= 40_000 + 8  # what comes in


def test_a_plan_says_where_the_peak_is():
    p = memory.plan(plannable(TINY, 2, 32))
    assert p.peak_step == 2 and p.peak_bytes == sum(p.by_category.values()) == sum(sum(r.values()) for r in p.by_module.values())
    assert p.by_category["parameter"] == 4 * TINY.parameter_count()
    assert p.step_bytes >= 12 * TINY.parameter_count()
    assert p.reads == []  # train_step is needle's, and reads what it gives
    assert "layers.1" in str(p) and f"{p.peak_bytes:,} bytes" in str(p) and repr(p) == str(p)
    assert f"step 2: {p.peak_op} of {p.peak_module}, {p.peak_place}; " in p.where and p.peak_module


def test_the_peak_of_a_gradient_is_where_its_op_was_called(cpu):
    before = ndl.ones(1000, device=cpu)  # no part of it

    def build(device):
        w = nn.Parameter(ndl.ones(1000, device=device))

        def step():
            y = ops.exp(w)
            y.sum().backward()

        return step

    p = memory.plan(build, device=cpu)
    assert (p.peak_op, p.peak_place) == ("gradient of Exp", f"test_plan.py:{build.__code__.co_firstlineno + 4}")
    assert sum(p.by_category.values()) == sum(h.nbytes for h in p.holders) == p.peak_bytes and before.size == 1000


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes")
@pytest.mark.parametrize("plan", [memory.plan, memory.peak_bytes])
def test_a_step_that_a_plan_cannot_take_is_told_where_it_ran(plan):
    with pytest.raises(ValueError, match="NaN") as caught:
        plan(lambda device: lambda: range(int(ndl.init.ones(2, device=device).sum().item())))
    assert ".item() and .numpy() give NaN" in caught.value.__notes__[0]


def test_a_plan_says_where_a_run_may_go_another_way():
    def build(device, careful=True):
        w = nn.Parameter(ndl.init.ones(64, 64, device=device))
        optimizer, scaler = Adam([w]), amp.GradScaler()

        def step():
            loss = scaler.scale(ops.relu(w).sum())
            loss.backward()
            if careful and not np.isfinite(optimizer.clip_grad_norm(1.0)):
                return
            scaler.step(optimizer)
            scaler.update()

        return step

    p = memory.plan(build)
    assert p.peak_bytes < memory.plan(build, device="cpu").peak_bytes
    line = next(i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "if careful and" in text)
    assert p.reads == [f"test_plan.py:{line}"] and f"values were read at test_plan.py:{line}" in str(p)
    careless = memory.plan(lambda device: build(device, careful=False))
    assert not careless.reads and "values" not in str(careless)
    assert memory.plan(build, device="cpu").reads == []


def test_the_line_that_reads_is_the_programs_however_the_package_was_found():
    """``sys.path.append("../python")`` leaves the dots in the names of needle's files."""
    own = {}
    exec(compile("def read(x): return x.item()", f"/..{ndl.__file__}", "exec"), own)
    p = memory.plan(lambda device: lambda: own["read"](ndl.init.ones(1, device=device)))
    line = next(i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1) if 'lambda: own["read"]' in text)
    assert p.reads == [f"test_plan.py:{line}"]


def test_what_is_typed_in_needles_own_folder_is_the_programs(monkeypatch):
    monkeypatch.chdir(Path(ndl.__file__).parent)
    typed = {"ndl": ndl}
    exec(compile("def build(device):\n    return lambda: ndl.init.ones(1, device=device).item()", "<typed>", "exec"), typed)
    p = memory.plan(typed["build"])
    assert (p.peak_place, p.reads) == ("<typed>:2", ["<typed>:2"])


@pytest.mark.parametrize("plan", [memory.plan, memory.peak_bytes])
@pytest.mark.parametrize("steps", [-1, 1.5, "2", None])
def test_steps_that_cannot_be(plan, steps):
    with pytest.raises(ShapeError, match=rf"\[plan\] steps is {steps!r} \(accepted: a whole number of at least 0\)"):
        plan(lambda device: lambda: ndl.init.ones(1, device=device), steps)


@pytest.mark.parametrize("plan", [memory.plan, memory.peak_bytes])
def test_a_build_that_is_none(plan, cpu):
    def overlooks_the_device(device):
        layer = nn.Linear(2, 2, device=cpu)
        return lambda: layer(ndl.ones(1, 2, device=cpu)).sum().backward()

    with pytest.raises(ShapeError, match=r"nothing was made on meta\(\) .*on the device it is given"):
        plan(overlooks_the_device)
    with pytest.raises(TypeError, match=r"build returned a NoneType .*one training step"):
        plan(lambda device: None)
    for model in (nn.Linear(2, 2, device=cpu), "14m"):
        with pytest.raises(TypeError, match=r"build is of type (Linear|str) \(accepted: a function of a device"):
            plan(model)

    def generator(device):
        layer = nn.Linear(2, 2, device=device)

        def step():
            yield layer(ndl.ones(1, 2, device=device)).sum().backward()

        return step

    with pytest.raises(TypeError, match=r"build returned a generator or coroutine .*one training step"):
        plan(generator)


def test_a_plan_draws_no_numbers():
    """None that a run which follows would have had; on a device the plan's model draws its weights, and Dropout its mask."""
    np.random.seed(7)
    expected = np.random.rand(3)

    def build(device):
        layer, dropout = nn.Linear(4, 5, device=device), nn.Dropout()
        return lambda: dropout(layer(ndl.ones(2, 4, device=device))).sum().backward()

    for measured, device in itertools.product((memory.plan, memory.peak_bytes), (None, ndl.cpu_numpy())):
        np.random.seed(7)
        measured(build, device=device)
        np.testing.assert_array_equal(np.random.rand(3), expected)


def test_a_plan_of_a_large_model_allocates_nothing(cpu):
    before, random = memory.stats(cpu).allocations, np.random.get_state()[2]
    rss = memory.process(cpu)["rss"]
    p = memory.plan(plannable(PythiaConfig.named("410m"), 1, 256))
    assert p.by_category["parameter"] == 4 * 405_334_016
    assert memory.stats(cpu).allocations == before and np.random.get_state()[2] == random
    assert memory.process(cpu)["rss"] - rss < 200 << 20
    assert memory.peak_bytes(plannable(replace(TINY, max_seq_len=1 << 17), 1 << 24, 1 << 17)) > 1 << 50  # whose ids fit nowhere


@pytest.mark.parametrize("slope, bend", [(1, 0), (37, 5), (1000, 0), (3, 400)])
@pytest.mark.parametrize("least", [0, 5000])
def test_the_largest_micro_batch_is_found(slope, bend, least):
    asked = []

    def peak_of(n):
        asked.append(n)
        return max(least, 500 + slope * n + bend * (n // 7))

    for budget in (1, 499 + slope, 500 + slope, 5000, 123_456, 10**9):
        asked.clear()
        best = memory.largest(peak_of, budget, 1000)
        fitting = [n for n in range(1, 1001) if max(least, 500 + slope * n + bend * (n // 7)) <= budget]
        assert best == max(fitting, default=0)
        assert len(asked) == len(set(asked)) <= (10 if budget > least else 30)


def test_a_batch_beyond_a_dip_is_found():
    peaks = [100, 220, 190, 310, 380, 470, 440, 430, 420, 600]
    for budget in range(100, 650):
        expected = max(n for n in range(1, 11) if peaks[n - 1] <= budget)
        assert memory.largest(lambda n: peaks[n - 1], budget, 10) == expected


@pytest.mark.parametrize("most", [0, 1, 5])
def test_the_fewest_that_fit_are_found(most):
    peak_of = lambda n: 100 - 10 * n  # noqa: E731
    for budget in range(100 - 10 * most, 111):
        assert memory.smallest(peak_of, budget, most) == min(n for n in range(most + 1) if peak_of(n) <= budget)
    with pytest.raises(ShapeError, match=f"at least {100 - 10 * most} bytes"):
        memory.smallest(peak_of, 99 - 10 * most, most)


def test_a_table_of_what_fits():
    peak_of = lambda batch, more=0: (10 * batch + more) << 20  # noqa: E731
    settings = [("plain", {}), ("more", {"more": 30}), ("too much", {"more": 55})]
    rows = [re.split(" {2,}", row.strip()) for row in memory.fitting_table(peak_of, "64MiB", settings, 4 << 20, 5).splitlines()]
    assert rows[0] == ["setting", "largest micro-batch", "its peak", "peak of 1"]
    assert rows[-3:] == [
        ["plain", "5 or more", "50.00 MiB", "10.00 MiB"],
        ["more", "3", "60.00 MiB", "40.00 MiB"],
        ["too much", "none", "-", "65.00 MiB"],
    ]
    with pytest.raises(ShapeError, match=r"\[plan\] 64.00 MiB is not more than the reserve of 64.00 MiB"):
        memory.fitting_table(peak_of, "64MiB", settings, 64 << 20)


@pytest.mark.parametrize("rows", [1, 4, 5, 9, 10, 11, 63])
def test_the_chunks_that_a_plan_leaves_out_change_nothing(cpu, rows):
    def build(device):
        model = nn.Linear(32, 300, bias=False, device=device)
        hidden = ndl.Tensor(np.zeros((rows, 32)), device=device)
        targets = ndl.Tensor(np.zeros(rows), device=device, dtype="int32", requires_grad=False)
        return lambda: ops.linear_cross_entropy(hidden, model.weight, targets, chunk_bytes=5 * 300 * 4).backward()

    assert memory.peak_bytes(build) == memory.peak_bytes(build, device=cpu)


def test_devices_by_name(cpu):
    def build(device):
        assert device == cpu
        return lambda: nn.Linear(2, 2, device=device)

    assert memory.plan(build, device="cpu").device == "cpu" and memory.peak_bytes(build, device="cpu") > 0
    assert memory.capacity("cpu") == memory.capacity(cpu) and memory.stats("cpu").device == "cpu"


@pytest.mark.parametrize("decorated", [nn.remat(ops.matmul), ndl.enable_grad()(ops.matmul), amp.autocast("cpu")(ops.matmul)])
def test_the_place_of_a_decorated_op_is_its_users(cpu, decorated):
    def build(device):
        x = ndl.Tensor(np.zeros((300, 300)), device=device)
        return lambda: decorated(x, x).sum().backward()

    assert "test_plan.py" in memory.plan(build, device=cpu).where


@pytest.mark.parametrize("name", ["cpu", "cuda_sim", "cuda"])
def test_what_is_available_does_not_depend_on_what_is_held(name):
    device = usable(name)
    before, there = memory.available(device), memory.capacity(device)
    assert 0 < before <= there and (device.is_host or before <= there - (8 << 20))  # of which kernels have scratch memory
    for left in reversed(range(10 if name == "cuda" else 1)):  # of a GPU's memory other processes take some, and give it back
        before = memory.available(device)
        held = device.zeros(32 << 20)
        after = memory.available(device)
        if device.is_host or abs(after - before) <= held.nbytes // 2:
            break
        assert left, (before, after)
    memory.set_limit(64 << 20, device)
    try:
        assert memory.available(device) == memory.capacity(device) == 64 << 20
    finally:
        memory.set_limit(None, device)


@pytest.mark.parametrize("max_norm", [1e-3, 1e3])
def test_a_clipped_step_is_planned_to_the_byte(cpu, max_norm):
    def build(device):
        model = nn.Linear(40, 30, device=device)
        x, optimizer = ndl.init.ones(2, 40, device=device), SGD(model.parameters(), lr=0.1)

        def step():
            model(x).sum().backward()
            optimizer.clip_grad_norm(max_norm)
            optimizer.step()

        return step

    assert memory.peak_bytes(build) == memory.peak_bytes(build, device=cpu)


def test_a_step_that_loads_its_data_is_planned_to_the_byte(device):
    def build(device):
        model, loss_fn = nn.Linear(40, 10, device=device), nn.SoftmaxLoss()
        loader = data.DataLoader(data.NDArrayDataset(np.ones((8, 40), np.float32), np.arange(8)), 4, device=device)

        def step():
            for x, y in loader:
                loss_fn(model(x), y).backward()

        return step

    assert memory.peak_bytes(build) == memory.peak_bytes(build, device=device)


def test_plans_of_a_layout_of_ones_own_are_all_alike(cpu):
    """Its index is on a device from its first use there on."""
    layout = BlockLayout(np.ones((2, 2)), 16)

    def build(device):
        layer, x = nn.BlockSparseLinear(32, 32, layout, device=device), ndl.init.ones(4, 32, device=device)
        return lambda: layer(x).sum().backward()

    first = memory.peak_bytes(build)
    assert memory.plan(build).peak_bytes == memory.peak_bytes(build) == first
    assert memory.peak_bytes(build, device=cpu) == memory.peak_bytes(build, device=cpu) == first


def test_categories_of_a_plan_are_the_measured_ones(cpu):
    """Random numbers are data; gradients stay gradients where a step assigns them."""

    def build(device):
        layer, dropout = nn.Linear(40, 30, device=device), nn.Dropout(0.5)
        optimizer = SGD(layer.parameters(), lr=0.1)

        def step():
            dropout(layer(ndl.init.randn(20, 40, device=device))).sum().backward()
            optimizer.clip_grad_norm(1.0)
            for p in layer.parameters():
                p.grad = p.grad * 0.5
            seen.append(memory.stats(device).by_category["gradient"] - memory.stats(device).by_category["parameter"])

        return step

    seen = []
    planned, measured = memory.plan(build), memory.plan(build, device=cpu)
    kinds = lambda p: [(kind, h.nbytes, h.category) for kind, h in p.trace.events]  # noqa: E731
    assert kinds(planned) == kinds(measured) and planned.by_category == measured.by_category
    assert seen == [0] * 4


@pytest.mark.parametrize("rows", [1 << 13, 1 << 18])
def test_a_loss_takes_its_chunk_and_no_more(rows):
    width, vocab_size = 512, 50_257

    def build(device):
        weight = nn.Parameter(ndl.init.zeros(width, vocab_size, device=device))
        hidden = ndl.init.zeros(rows, width, device=device, requires_grad=True)
        targets = ndl.init.zeros(rows, device=device, dtype="int32")
        return lambda: ops.linear_cross_entropy(hidden, weight, targets, chunk_bytes=64 << 20).backward()

    given_and_gradients = 4 * (2 * width * (rows + vocab_size) + rows)
    assert memory.peak_bytes(build, steps=1) - given_and_gradients <= 64 << 20


@pytest.mark.parametrize(
    ("rows", "most", "expected"), [(4096, 521, 512), (16384, 1042, 1024), (300, 521, 300), (4096, 400, 384), (9, 5, 5)]
)
def test_the_chunks_of_a_loss_are_whole_tiles(rows, most, expected):
    """Of a GPU, 128 rows each, where a chunk has several; else of the CPU."""
    assert kernels._chunk_rows(rows, most) == expected


@pytest.mark.usefixtures("few_objects")
def test_a_budget_chooses_how_many_layers_are_checkpointed():
    config = replace(TINY, layers=4)
    peaks = [memory.peak_bytes(plannable(replace(config, checkpoint_layers=(1,) * n), 8, 64)) for n in range(5)]
    assert peaks == sorted(set(peaks), reverse=True)
    for n in range(5):
        chosen = checkpointed(config, f"{peaks[n]}", 8, 64)
        assert chosen.checkpoint_segments == (1,) * n
    with pytest.raises(ShapeError, match=f"{peaks[4]:,} bytes"):
        checkpointed(config, f"{peaks[4] - 1}", 8, 64)
    assert checkpointed(config, np.int64(2), 8, 64).checkpoint_segments == (2, 2)  # a count, and no two bytes
    config = replace(
        TINY, layers=6, vocab_size=2000
    )  # whose peak is at the end of forward: what lies between segments counts there
    peaks = [memory.peak_bytes(plannable(replace(config, checkpoint_layers=n), 8, 64)) for n in range(1, 7)]
    least = min(peaks)
    assert least < peaks[0]
    for budget in (peaks[0], peaks[0] - 1, least):
        chosen = checkpointed(config, f"{budget}", 8, 64)
        assert memory.peak_bytes(plannable(chosen, 8, 64)) <= budget
    with pytest.raises(ShapeError, match=f"{least:,} bytes"):
        checkpointed(config, f"{least - 1}", 8, 64)


@pytest.fixture
def small_plan(few_objects, monkeypatch):
    """The command, for a model of two small layers: README.md's is of a large one."""
    monkeypatch.setitem(SIZES, "tiny", (2, 32, 2, 64))
    return ["plan", "--model", "tiny", "--vocab_size", "500", "--batch-size", "2", "--seq_len", "64"]


def test_the_command_line_plans(capsys, small_plan):
    from needle.__main__ import main

    assert main([*small_plan, "--gpu", "T4", "--gpu", "600M"]) == 0
    out = capsys.readouterr().out
    assert "layers.1" in out and "T4: 15.00 GiB" in out and "600M: 600.00 MiB" in out and "largest micro-batch" in out
    assert "0 of 2 (planned above)" in out and all(f"{p}, 2 of 2 layers computed again" in out for p in ("fp32", "bf16", "fp16"))
    assert main([*small_plan, "--precision", "bf16"]) == 0
    assert "AdamW, bf16" in capsys.readouterr().out
    assert main([*small_plan, "--pattern", "mixed"]) == 0
    printed = capsys.readouterr()
    assert ", dense attention," in printed.out and printed.err == "note: --pattern mixed has no effect without --sparse\n"
    assert main(["plan", "--model", "15m"]) == 2 and main(["plan", "--gpu", "T5"]) == 2 and main(["plan", "--gpu", "1MiB"]) == 2
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 3 and "unknown model: 15m" in err[0] and "T5" in err[1]
    assert "[gpu] 1MiB is 1.00 MiB (accepted: more than the 512.00 MiB that stay reserved)" in err[2]


def test_numbers_of_a_plan_and_where_it_is_drawn(tmp_path, capsys, small_plan):
    pytest.importorskip("plotly")
    from needle.__main__ import NUMBERS, main

    for name, (_, most, _) in NUMBERS.items():
        for value in (-1, 0, most + 1, 10**30):
            assert main(["plan", "--sparse", f"--{name}", str(value)]) == 2
            assert capsys.readouterr().err == f"python -m needle: error: [{name}] is {value} (accepted: 1 to {most:,})\n"
    assert main([*small_plan, "--sparse", "--seq_len", "100"]) == 2  # as train_pythia.py does
    assert "[seq_len] is 100, no multiple of the block size 64 (accepted: 64" in capsys.readouterr().err
    for wrong in ([], ["plain"], ["plan", "--precision", "x"]):
        with pytest.raises(SystemExit, match="2"):
            main(wrong)
        assert re.fullmatch(r"python -m needle.*: error: .*\n", capsys.readouterr().err)
    (tmp_path / "file").write_text("")
    assert main([*small_plan, "--html", ""]) == 2 and "[path] is empty" in capsys.readouterr().err
    assert main([*small_plan, "--html", str(tmp_path / "file" / "x.html")]) == 2
    assert re.fullmatch(r"python -m needle: error: \[html\] cannot draw .*: Not a directory \(.*\)\n", capsys.readouterr().err)
    assert main([*small_plan, "--accumulation_steps", "2"]) == 0
    two = capsys.readouterr().out
    assert main([*small_plan, "--accumulation_steps", str(1 << 20)]) == 0  # which is not the work of so many
    assert capsys.readouterr().out.splitlines()[1:] == two.splitlines()[1:]


def test_the_picture_is_one_page_without_network(tmp_path, cpu):
    pytest.importorskip("plotly")
    p = memory.plan(plannable(TINY, 1, 32))
    page = memory.picture(p.trace, tmp_path / "memory.html").read_text()
    assert "gradient of Linear" in page and "lt;genexpr" in page and "layers.1.dense" in page and "peak" in page
    assert not re.search(r"<script[^>]*\ssrc=|<link\s", page)


def test_a_picture_shows_the_categories_that_there_are(tmp_path, cpu):
    pytest.importorskip("plotly")
    with memory.trace(cpu) as t:
        x = nn.Parameter(ndl.ones(1000, device=cpu))
    page = memory.picture(t, tmp_path / "memory.html").read_text()
    assert x.requires_grad and '"name":"parameter"' in page and '"name":"optimizer state"' not in page


def test_a_mark_of_a_picture_is_shown_as_it_is_written(tmp_path, cpu):
    pytest.importorskip("plotly")
    with memory.trace(cpu) as t:
        t.mark("loss<0.5> & <lambda>")
    page = memory.picture(t, tmp_path / "memory.html").read_text()
    assert "loss&lt;0.5&gt; &amp; &lt;lambda&gt;" in page  # plotly takes it for HTML


def test_half_a_picture_is_none(tmp_path, monkeypatch):
    pytest.importorskip("plotly")
    traced = memory.plan(plannable(TINY, 1, 32)).trace

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        memory.picture(traced, tmp_path / "memory.html")
    assert not list(tmp_path.iterdir())


def test_the_page_plans_the_model_that_did_not_fit(in_root):
    said = in_root("benchmarks/memory_page.py", "--only", "budget")
    assert "179.7M parameters" in said and "32.00 GiB in fp32" in said and said.count("GiB |") >= 4


@pytest.mark.parametrize("write", [False, True])
def test_an_index_without_axes_is_planned_as_the_number_it_is(device, write):
    def build(where):
        table = ndl.init.ones(8, 50, device=where, requires_grad=False)
        i = ndl.Tensor(2, device=where, dtype="int32", requires_grad=False)

        def step():
            if write:
                table[i] = table[i] + 1
            return [table[i] for _ in range(5)]

        return step

    assert memory.peak_bytes(build) == memory.peak_bytes(build, device=device)
