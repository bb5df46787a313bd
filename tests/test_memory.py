"""needle.memory: accounts, traces, plans, explanations and leaks."""

import asyncio
import collections
import errno
import functools
import gc
import importlib.util
import os
import re
import subprocess
import sys
import threading
import traceback
import types
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

import needle as ndl
from devices import usable
from needle import amp, memory, nn, ops
from needle.backend_ndarray import kernels
from needle.backend_ndarray.block_layout import BlockLayout
from needle.backend_ndarray.ndarray import empty
from needle.errors import GraphError, OutOfMemoryError, ShapeError
from needle.memory import sites
from needle.memory.trace import holders
from needle.models import SIZES, Pythia, PythiaConfig, checkpointed, plannable, train_step
from needle.optim import SGD, Adam, AdamW

ROOT = Path(__file__).parent.parent
TINY = PythiaConfig(layers=2, width=32, heads=2, feed_forward=64, vocab_size=300)


def tokens(device, batch=2, T=32):
    return ndl.Tensor(np.zeros((batch, T)), device=device, dtype="int32", requires_grad=False)


@pytest.fixture
def limited(cpu):
    yield cpu
    memory.set_limit(None, cpu)


# --- accounts ---


def test_bytes_are_counted_by_category(device):
    memory.empty_cache(device)
    before = memory.stats(device).by_category
    count = lambda: {k: v - before[k] for k, v in memory.stats(device).by_category.items()}  # noqa: E731
    model = Pythia(TINY, device=device)
    parameters = 4 * TINY.parameter_count()
    assert count() == {**dict.fromkeys(before, 0), "parameter": parameters}
    ids = tokens(device)
    assert count()["data"] == ids.size * 4
    loss = model.loss(ids, ids)
    assert count()["activation"] > 0
    loss.backward()
    assert count()["gradient"] == parameters + 4 * (loss.size - 1)
    optimizer = AdamW(model.parameter_groups())
    optimizer.step()
    assert count()["optimizer state"] == 2 * parameters and count()["parameter"] == parameters
    del loss
    optimizer.reset_grad()
    assert count()["activation"] == count()["gradient"] == count()["workspace"] == 0


@pytest.mark.parametrize("make", [lambda p: SGD(p, momentum=0.9), lambda p: Adam(p), lambda p: AdamW(p)])
def test_parameters_and_states_keep_their_category_through_steps(cpu, make):
    before = memory.stats(cpu).by_category
    layer = nn.Linear(8, 16, device=cpu)
    optimizer = make(layer.parameters())
    for _ in range(3):
        layer(ndl.Tensor(np.ones((4, 8)), device=cpu, requires_grad=False)).sum().backward()
        optimizer.step()
        optimizer.reset_grad()
    now = memory.stats(cpu).by_category
    size = 4 * (8 * 16 + 16)
    assert now["parameter"] - before["parameter"] == size
    assert now["optimizer state"] - before["optimizer state"] == size * (1 if isinstance(optimizer, SGD) else 2)


@pytest.mark.parametrize("kind", [SGD, lambda p, **more: SGD(p, momentum=0.9, **more), Adam, AdamW])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_optimizers_update_in_place(cpu, kind, decay):
    p = nn.Parameter(np.ones(10_000), device=cpu)
    p.grad = ndl.Tensor(np.ones(10_000), device=cpu)
    optimizer = kind([p], weight_decay=decay)
    optimizer.step()  # makes the state
    before = p.realize_cached_data()
    with memory.peak(cpu) as peak:
        optimizer.step()
    assert p.realize_cached_data() is before and peak.above_start <= 1024


def test_reading_a_scalar_takes_no_memory(device):
    x = ndl.Tensor(np.arange(6.0).reshape(2, 3), device=device, requires_grad=False)
    with memory.peak(device) as peak:
        assert x[1:, 2].item() == 5 and x[:1].numpy().shape == (1, 3)
    assert peak.above_start == 0


def test_each_thread_has_its_own_category(host):
    inside, go_on = threading.Event(), threading.Event()

    class Waits(ops.Exp):
        def gradient(self, out_grad, node):
            inside.set()
            assert go_on.wait(60)
            return super().gradient(out_grad, node)

    x = ndl.Tensor(np.ones(3), device=host)
    thread = threading.Thread(target=lambda: Waits()(x).sum().backward())
    thread.start()
    assert inside.wait(60)
    during = empty((3,), device=host)
    go_on.set()
    thread.join()
    assert during.category == empty((3,), device=host).category == 0 and x.grad.realize_cached_data().category == 2


def test_peaks_nest(cpu):
    outer_array = empty((1000,), device=cpu)
    with memory.peak(cpu) as outer:
        high = empty((5000,), device=cpu)
        del high
        with memory.peak(cpu) as inner:
            low = empty((2000,), device=cpu)
        assert inner.above_start == 8000 and inner.by_category["activation"] >= 8000
        del low
    assert outer.above_start == 20_000
    assert memory.stats(cpu).peak >= outer.bytes  # a region's own peak does not hide the one before it
    del outer_array


def test_peaks_overlap(cpu):
    """As those of two threads do; and neither a reset nor a plan made in between takes anything from them."""
    memory.reset_peak(cpu)
    first, second, live = memory.peak(cpu), memory.peak(cpu), memory.stats(cpu).live
    first.__enter__()
    high = empty((5000,), device=cpu)
    del high
    second.__enter__()
    assert memory.stats(cpu).peak == live + 20_000
    low = empty((2000,), device=cpu)
    del low
    first.__exit__()
    assert memory.stats(cpu).peak_reserved >= memory.stats(cpu).peak == live + 20_000
    memory.reset_peak(cpu)
    memory.peak_bytes(lambda device: lambda: None, device=cpu)
    assert memory.stats(cpu).peak == live
    second.__exit__()
    assert (first.above_start, second.above_start) == (20_000, 8000)


def test_the_parts_of_the_process_add_up(cpu):
    array = empty((1 << 22,), device=cpu)
    array.fill(1.0)
    parts = memory.process(cpu)
    assert parts["rss"] == sum(parts[name] for name in ("arrays", "cached", "libraries", "rest"))
    assert parts["arrays"] >= array.buffer_bytes
    nbytes, cached = array.buffer_bytes, parts["cached"]
    del array
    parts = memory.process(cpu)
    assert parts["rss"] == sum(parts[name] for name in ("arrays", "cached", "libraries", "rest"))
    assert parts["cached"] == cached + nbytes and min(parts.values()) >= 0


@pytest.mark.parametrize("name", ["cuda_sim", "cuda"])
def test_the_parts_of_a_card_add_up(name):
    device = usable(name)
    array = empty((1 << 26,), device=device)
    held, nbytes = memory.process(device), array.buffer_bytes
    assert held["device_framework"] == device.memory_stats()["live"] >= nbytes
    parts = [held["device_" + part] for part in ("framework", "cached", "context_and_others")]
    assert min(parts) >= 0 and sum(parts) <= held["device_total"]
    del array
    freed = memory.process(device)
    assert held["device_framework"] - freed["device_framework"] == freed["device_cached"] - held["device_cached"] == nbytes
    memory.empty_cache(device)
    # The driver gives back whole chunks, of which others may still hold a part.
    assert memory.process(device)["device_cached"] <= freed["device_cached"] - nbytes // 2


def test_an_emptied_cache_leaves_nothing_between_small_arrays(cpu):
    before = memory.process(cpu)["rss"]
    arrays = [ndl.init.ones(25_000, device=cpu) for _ in range(1000)]
    del arrays[1::2]
    del arrays[1::2]
    memory.empty_cache(cpu)
    assert memory.process(cpu)["rss"] - before < 50e6  # of 100 MB


def test_amounts_of_memory_are_read():
    assert (
        memory.parse_bytes("16GiB") == 16 << 30
        and memory.parse_bytes("1.5 MB") == 1_500_000
        and memory.parse_bytes("t4") == memory.GPUS["T4"]
    )
    assert memory.parse_bytes(7) == 7
    for same in ("16G", "16g", "16Gi", "16 gib"):  # Slurm's, Docker's, Kubernetes'
        assert memory.parse_bytes(same) == 16 << 30
    assert memory.parse_bytes("512M") == 512 << 20 and memory.parse_bytes("2k") == 2048 and memory.parse_bytes("1TB") == 10**12
    for wrong in ("T5", "", "GiB", "G", "16i", "16GG", "-1GiB", "0", 0, True, "9" * 400, "9999999TiB", 1 << 63):
        with pytest.raises(ShapeError, match="not an amount of memory"):
            memory.parse_bytes(wrong)
    with pytest.raises(ShapeError, match="not an amount of memory: ''"):
        memory.set_limit("")


def test_amounts_of_memory_are_written():
    written = {1023: "1023 bytes", 1024: "1.00 KiB", 1_048_570: "1,023.99 KiB", 1_048_575: "1.00 MiB", -(5 << 40): "-5,120.00 GiB"}
    assert [memory.readable(nbytes) for nbytes in written] == list(written.values())


# --- traces ---


def one_step(device, batch=2):
    model = Pythia(TINY, device=device)
    optimizer = AdamW(model.parameter_groups())
    ids = tokens(device, batch)
    for _ in range(2):
        train_step(model, optimizer, iter([(ids, ids)]))
    return model


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


def test_freed_memory_is_cut_to_requests_and_joined_again(cpu):
    gc.collect()
    memory.empty_cache(cpu)
    make = lambda mib: empty((mib << 18,), "float32", cpu)  # noqa: E731
    before = memory.stats(cpu).reserved
    whole = make(8)
    del whole
    parts = [make(1), make(2), make(3), make(2)]
    assert memory.stats(cpu).reserved == before + (8 << 20)
    while parts:
        del parts[len(parts) // 2]  # from the middle, so that each is joined with a neighbour on either side
    whole = make(8)
    assert memory.stats(cpu).reserved == before + (8 << 20)
    del whole
    memory.empty_cache(cpu)
    assert memory.stats(cpu).reserved <= before


def test_arrays_never_share_what_was_cut(cpu):
    rng = np.random.default_rng(0)
    held = {}
    for number in range(600):
        if rng.random() < 0.45 and held:
            freed = rng.choice(list(held))
            assert (held.pop(freed).numpy() == freed).all()
        else:
            held[number] = empty((int(rng.integers(1 << 14, 1 << 19)),), "float32", cpu)
            held[number].fill(number)
        if number % 150 == 149:
            memory.empty_cache(cpu)
    for number, array in held.items():
        assert (array.numpy() == number).all()


def test_a_trace_names_who_holds_what(device):
    with memory.trace(device) as t:
        model = one_step(device)
    assert 0 < t.peak_bytes <= memory.stats(device).peak
    name = lambda h: h.module.removeprefix("Pythia.")  # noqa: E731  (while another test's model is alive)
    sizes, top = [h.nbytes for h in t.holders()], max(t.timeline(), key=lambda row: row["live"])
    assert sizes == sorted(sizes, reverse=True) and sum(sizes) == t.peak_bytes
    assert (top["live"], top["module"], top["op"]) == (t.peak_bytes, t.peak_module, t.peak_site.what)
    holders = [h for h in t.holders() if name(h) == "layers.1.dense_h_to_4h"]
    weight = next(h for h in holders if h.category == "parameter" and h.nbytes == 32 * 64 * 4)
    assert weight.site.place.startswith("pythia.py:")
    states = [h for h in holders if h.category == "optimizer state"]
    assert len(states) == 4 and {h.site.what for h in states} == {"AdamW"}
    ops_seen = {h.site.what for _, h in t.events}
    assert {"Linear", "gradient of Linear", "LayerNorm", "gradient of LayerNorm"} <= ops_seen
    gradient = next(h for _, h in t.events if h.site.what == "gradient of Linear" and name(h) == "layers.0.dense")
    assert gradient.site.forward.place.startswith("pythia.py:")
    assert (
        sum(row["bytes"] * {"made": 1, "freed": -1, "retagged": 0}[row["kind"]] for row in t.timeline()) == t.live[-1] - t.live[0]
    )
    assert sum(sum(row.values()) for row in t.by_module().values()) == t.peak_bytes == sum(t.by_category().values())
    del model


def test_a_trace_changes_no_lifetime(cpu):
    peaks = []
    for traced in (False, True, False):
        memory.empty_cache(cpu)
        with memory.peak(cpu) as p:
            if traced:
                with memory.trace(cpu) as t:
                    one_step(cpu)
            else:
                one_step(cpu)
        assert not traced or t.peak_bytes == p.bytes
        peaks.append(p.above_start)
    assert peaks[0] == peaks[1] == peaks[2]


def test_two_traces_of_one_device_are_refused(cpu):
    with memory.trace(cpu), pytest.raises(ndl.errors.GraphError, match="traced already"), memory.trace(cpu):
        pass


# --- plans ---

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


@pytest.fixture
def few_objects():
    """Keeps from the garbage collector, which each plan calls, what the process has: others of its tests may import PyTorch."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


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
def test_an_lstm_keeps_six_numbers_per_hidden_unit_and_is_planned_to_the_byte(cpu):
    T, B, H = 200, 4, 32

    def build(device):
        model = nn.LSTM(H, H, device=device)
        x = ndl.Tensor(np.zeros((T, B, H)), device=device, requires_grad=False)
        return lambda: model(x)[0].sum().backward()

    planned, weights = memory.peak_bytes(build), 4 * (8 * H * H + 8 * H)
    assert planned == memory.peak_bytes(build, device=cpu)
    # h, c and four gates, whose gradients take their place; beside x, the weights, and their gradients of this step and the last.
    assert planned - 3 * weights - 4 * T * B * H < 6.1 * 4 * T * B * H


@pytest.mark.usefixtures("few_objects")
def test_gradients_of_a_convolution_are_not_made_where_only_its_padding_is():
    N, C = 512, 8

    def build(device):
        model, x = nn.Conv(C, C, 3, device=device), ndl.Tensor(np.zeros((N, C, 1, 1)), device=device)
        return lambda: model(x).sum().backward()

    assert memory.peak_bytes(build) < 50 * 4 * N * C  # the padded image has 9 pixels, the windows over one pixel have 9


@pytest.mark.usefixtures("few_objects")
def test_batch_norm_keeps_its_input_and_nothing_else_of_that_size():
    shape = 1000, 64

    def build(device):
        model = nn.Sequential(*[nn.BatchNorm1d(shape[1], device=device) for _ in range(4)])
        x = ndl.Tensor(np.zeros(shape), device=device, requires_grad=False)
        return lambda: model(x).sum().backward()

    assert memory.peak_bytes(build) < 8.5 * 4 * 64_000  # x, four that are kept, and what the gradients of one take


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


def test_networks_keep_their_names_when_their_arrays_are_replaced(cpu):
    pair = [nn.Sequential(nn.Linear(10, width, device=cpu)) for width in (1000, 10)]

    def named():
        return [
            h.module for h in sorted(holders(cpu), key=lambda h: -h.nbytes) if h.category == "parameter" and "modules.0" in h.module
        ]

    before = named()
    pair[0].load_state_dict(pair[0].state_dict())
    assert before == named() and before[0] == "Sequential.modules.0"


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
    assert rows["modules.0"]["activation"] > 40_000 and rows["modules.1"]["activation"] > 2 * 40_000
    assert sum(rows[""].values()) <= 40_000 + 8  # what comes in


def test_a_plan_says_where_the_peak_is():
    p = memory.plan(plannable(TINY, 2, 32))
    assert p.peak_step == 2 and p.peak_bytes == sum(p.by_category.values()) == sum(sum(r.values()) for r in p.by_module.values())
    assert p.by_category["parameter"] == 4 * TINY.parameter_count()
    assert p.step_bytes >= 12 * TINY.parameter_count()
    assert "layers.1" in str(p) and f"{p.peak_bytes:,} bytes" in str(p)


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
    assert p.reads == [f"test_memory.py:{line}"] and f"values were read at test_memory.py:{line}" in str(p)
    careless = memory.plan(lambda device: build(device, careful=False))
    assert not careless.reads and "values" not in str(careless)
    assert memory.plan(build, device="cpu").reads == []


@pytest.mark.parametrize("plan", [memory.plan, memory.peak_bytes])
def test_a_build_that_is_none(plan, cpu):
    def overlooks_the_device(device):
        layer = nn.Linear(2, 2, device=cpu)
        return lambda: layer(ndl.ones(1, 2, device=cpu)).sum().backward()

    with pytest.raises(ShapeError, match=r"nothing was made on meta\(\) .*on the device it is given"):
        plan(overlooks_the_device)
    with pytest.raises(TypeError, match=r"build returned a NoneType .*one training step"):
        plan(lambda device: None)


def test_a_plan_of_a_large_model_allocates_nothing(cpu):
    before, random = memory.stats(cpu).allocations, np.random.get_state()[2]
    rss = memory.process(cpu)["rss"]
    p = memory.plan(plannable(PythiaConfig.named("410m"), 1, 256))
    assert p.by_category["parameter"] == 4 * 405_334_016
    assert memory.stats(cpu).allocations == before and np.random.get_state()[2] == random
    assert memory.process(cpu)["rss"] - rss < 200 << 20


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


@pytest.mark.parametrize("most", [0, 1, 5])
def test_the_fewest_that_fit_are_found(most):
    peak_of = lambda n: 100 - 10 * n  # noqa: E731
    for budget in range(100 - 10 * most, 111):
        assert memory.smallest(peak_of, budget, most) == min(n for n in range(most + 1) if peak_of(n) <= budget)
    with pytest.raises(ShapeError, match=f"at least {100 - 10 * most} bytes"):
        memory.smallest(peak_of, 99 - 10 * most, most)


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
    assert main(["plan", "--model", "15m"]) == 2 and main(["plan", "--gpu", "T5"]) == 2 and main(["plan", "--gpu", "1MiB"]) == 2
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 3 and "unknown model: 15m" in err[0] and "T5" in err[1]


def test_numbers_of_a_plan_and_where_it_is_drawn(tmp_path, capsys, small_plan):
    pytest.importorskip("plotly")
    from needle.__main__ import NUMBERS, main

    for name, (_, most, _) in NUMBERS.items():
        for value in (-1, 0, most + 1, 10**30):
            assert main(["plan", "--sparse", f"--{name}", str(value)]) == 2
            assert capsys.readouterr().err == f"python -m needle: error: [{name}] is {value} (accepted: 1 to {most:,})\n"
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


def test_half_a_picture_is_none(tmp_path, monkeypatch):
    pytest.importorskip("plotly")
    traced = memory.plan(plannable(TINY, 1, 32)).trace

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        memory.picture(traced, tmp_path / "memory.html")
    assert not list(tmp_path.iterdir())


# --- explanations ---


def test_out_of_memory_is_explained(limited):
    build_for = lambda batch=8: plannable(TINY, batch, 64)  # noqa: E731
    small, large = memory.peak_bytes(build_for(2)), memory.peak_bytes(build_for(8))
    live = memory.stats(limited).live
    memory.set_limit(live + (small + large) // 2, limited)
    changes = [("--batch_size 4", {"batch": 4}), ("--batch_size 2", {"batch": 2}), ("--batch_size 1", {"batch": 1})]
    with pytest.raises(OutOfMemoryError) as caught, memory.advise(build_for, changes):
        step = build_for(8)(limited)
        for _ in range(2):
            step()
    text = str(caught.value)
    assert "requested" in text and "largest holders:" in text and "pythia.py:" in text
    assert "live: activation" in text and "parameter" in text and "layers." in text
    assert f"the step needs {memory.readable(large)}" in text
    fitting = next(b for b in (4, 2, 1) if memory.peak_bytes(build_for(b)) <= (small + large) // 2)
    assert f"what fits: --batch_size {fitting}, peak {memory.readable(memory.peak_bytes(build_for(fitting)))}" in text
    assert caught.value.requested_bytes > 0


@pytest.mark.parametrize("room, asked", [(3.5, "gradient of MatMul"), (4.5, "SGD"), (5.5, "SGD")])
def test_gradients_are_held_in_the_name_of_their_layer(limited, room, asked):
    """Where there is room for so many matrices: not for all gradients, for no clipped one beside them, for no state."""
    width = 512
    model = nn.Sequential(*(nn.Linear(width, width, bias=False, device=limited) for _ in range(4)))
    optimizer = SGD(model.parameters(), momentum=0.9)
    memory.set_limit(memory.stats(limited).live + int(room * 4 * width**2), limited)
    with pytest.raises(OutOfMemoryError) as caught:
        model(ndl.Tensor(np.ones((4, width)), device=limited)).sum().backward()
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
    said = str(caught.value)
    assert re.search(rf"asked by {asked} of \S*modules\.\d", said) and re.search(r"MiB  gradient  \S*modules\.\d", said)
    assert "MiB  gradient  -" not in said


@pytest.mark.usefixtures("few_objects")
def test_advice_is_true_wherever_the_step_fails(limited):
    """In backward, where no graph is recorded, and inside remat and autocast; beside memory that is not of the run."""

    def build_for(rows=64):
        def build(device):
            layer, x = nn.Linear(64, 64, device=device), ndl.init.ones(rows, 64, device=device)
            inner = ndl.remat(lambda x: ops.exp(layer(x) * 0.1))

            def step():
                y = inner(x)
                with ndl.amp.autocast(device, "bfloat16"):
                    y = layer(ops.tanh(y) * y)
                (y * y).sum().backward()

            return step

        return build

    def failure(build):
        try:
            build(limited)()
        except OutOfMemoryError as error:
            return error

    needed, fits = (memory.peak_bytes(build_for(rows), steps=1) for rows in (64, 16))
    other, asked = empty((1 << 20,), device=limited), set()
    live = memory.stats(limited).live
    for limit in range(fits, needed, 512):
        memory.set_limit(live + limit, limited)
        with memory.advise(build_for, [("48 rows", {"rows": 48}), ("16 rows", {"rows": 16})], steps=1):
            text = str(failure(build_for()))
        asked.add(re.search(r"asked by (.*),", text)[1])
        assert f"{memory.readable(live)} were taken before the run" in text
        assert f"the step needs {memory.readable(needed)} at its peak (planned); {memory.readable(limit)} is there" in text
        rows = int(re.search(r"what fits: (\d+) rows", text)[1])
        assert failure(build_for(rows)) is None
    assert {"MulScalar", "AsType of Linear", "gradient of EWiseMul"} <= asked  # in remat, autocast, backward
    del other


def test_advice_that_cannot_help_says_so(limited):
    build_for = lambda batch=8: plannable(TINY, batch, 64)  # noqa: E731
    memory.set_limit(memory.stats(limited).live + 50_000, limited)
    least = f"none of the changes tried fits; the least is {memory.readable(memory.peak_bytes(build_for(1)))}, with 1 "
    for batches, said in (((4, 1, 2), least), ((16, 8), "none of the changes tried needs less: 16, 8")):
        changes = [(str(batch), {"batch": batch}) for batch in batches]
        with pytest.raises(OutOfMemoryError, match=said), memory.advise(build_for, changes):
            build_for()(limited)


def test_advice_where_the_plan_fits_is_that_something_else_is_held(limited):
    build_for = lambda batch=8: plannable(TINY, batch, 64)  # noqa: E731
    memory.set_limit(memory.stats(limited).live + memory.peak_bytes(build_for()), limited)
    history = []
    with pytest.raises(OutOfMemoryError) as caught, memory.advise(build_for, [("--batch_size 4", {"batch": 4})]):
        step = build_for()(limited)
        while True:
            step()
            history.append(empty((5000,), device=limited))
    assert "so it would fit: something is held that the plan does not have" in str(caught.value)
    assert "what fits" not in str(caught.value)


def test_the_line_that_asked_is_one_line(limited):
    x = ndl.Tensor(np.ones((200, 200)), device=limited)
    with memory.LeakCheck():
        y = (x * x).sum()  # made here
        memory.set_limit(memory.stats(limited).live + 1000, limited)
        with pytest.raises(OutOfMemoryError, match=r"asked by gradient of EWiseMul, test_memory.py:\d+: y = .*# made here"):
            y.backward()


def test_two_threads_that_fail_at_once_are_both_told(limited):
    held = ndl.ones(1000, device=limited)
    memory.set_limit(memory.stats(limited).live + 1000, limited)
    together, texts = threading.Barrier(2), []

    def fail():
        together.wait(10)
        with pytest.raises(OutOfMemoryError) as caught:
            empty((1000,), device=limited)
        texts.append(str(caught.value))

    threads = [threading.Thread(target=fail) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all("asked by fail" in text and "largest holders" in text for text in texts) and len(texts) == 2 and held.size


def test_states_that_could_not_all_be_made_are_not_there(limited):
    params = [nn.Parameter(np.ones((100, 100)), device=limited) for _ in range(3)]
    for p in params:
        p.grad = ndl.Tensor(np.ones((100, 100)), device=limited, requires_grad=False)
    optimizer = Adam(params)
    live = memory.stats(limited).live
    memory.set_limit(live + 130_000, limited)  # three of six
    with pytest.raises(OutOfMemoryError):
        optimizer.step()
    assert memory.stats(limited).live == live
    optimizer.load_state_dict(optimizer.state_dict())
    memory.set_limit(None, limited)
    optimizer.step()
    assert params[2].numpy()[0, 0] < 1


def test_sites_of_modules_that_have_gone_are_forgotten(limited):
    """Those that a forward makes for itself come by the thousand."""
    memory.set_limit(memory.stats(limited).live + (1 << 20), limited)
    x, kept = ndl.ones(64, 64, device=limited, requires_grad=False), nn.Linear(64, 64, device=limited)
    first = kept(x)
    for _ in range(3000):
        nn.ReLU()(x)
    assert len(sites._sites) < 2200
    (made,) = [h for h in holders(limited) if h.site.op == "Linear"]
    assert made.module == "weight" and first.shape == (64, 64)  # of the layer that is alone


def test_advice_that_fails_takes_nothing_from_the_rest(limited):
    memory.set_limit(memory.stats(limited).live + 50_000, limited)

    def broken():
        raise KeyError("of the user's own")

    with pytest.raises(OutOfMemoryError) as caught, memory.advise(broken):
        Pythia(TINY, device=limited)
    assert "asked by" in str(caught.value) and "no more could be said: KeyError" in str(caught.value)


def test_a_device_of_ones_own_is_explained_as_well():
    spec = importlib.util.find_spec("needle.backend_ndarray.ndarray_backend_numpy")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module._allocator.device_name = "own"
    own = ndl.backend_ndarray.BackendDevice("own", module)
    model = nn.Linear(100, 100, device=own)
    memory.set_limit(memory.stats(own).live + 100_000, own)
    with pytest.raises(OutOfMemoryError, match=r"largest holders:(.|\n)*activation"):
        model(model(ndl.init.ones(200, 100, device=own)))


def test_one_request_larger_than_the_device(limited):
    memory.set_limit("1MiB", limited)
    with pytest.raises(OutOfMemoryError, match="no allocator setting can help"):
        empty((1 << 20,), device=limited)


def test_memory_is_free_although_the_traceback_is_kept(limited):
    model = Pythia(TINY, device=limited)
    ids = tokens(limited, 8, 64)
    with ndl.no_grad():
        model.loss(ids, ids)  # makes what is cached between calls
    base = memory.stats(limited).live
    memory.set_limit(base + 600_000, limited)

    def forward():
        loss = model.loss(ids, ids)
        return loss

    kept = []
    try:
        forward().backward()
    except OutOfMemoryError as error:
        kept.append(error)
    assert kept and kept[0].__traceback__.tb_next is not None
    assert [frame.f_locals for frame, _ in traceback.walk_tb(kept[0].__traceback__)]  # as a notebook shows them
    assert memory.stats(limited).live == base
    memory.set_limit(None, limited)
    train_step(model, AdamW(model.parameters()), iter([(ids, ids)]))  # the process goes on
    assert memory.stats(limited).live == base


def test_what_functions_hold_is_free_although_the_traceback_is_kept(limited):
    """From Python 3.11 on the frames that a traceback keeps have their functions: with defaults, closures, what they wrap."""

    def run(keep=lambda function: None):
        model = nn.Linear(100, 100, device=limited)
        forward = lambda model=model: model(ndl.init.ones(1000, 100, device=limited))  # noqa: E731

        @ndl.remat
        def step():
            return forward(), model

        keep(step)
        step()

    def failure(*args):
        try:
            run(*args)
        except OutOfMemoryError as error:
            return error

    base, again = memory.stats(limited).live, []
    memory.set_limit(base + 200_000, limited)
    error = failure()
    assert error is not None and memory.stats(limited).live == base
    error = failure(again.append)
    assert memory.stats(limited).live > base
    memory.set_limit(None, limited)
    assert again[0]()[0].shape == (1000, 100)  # what can still be called has lost nothing
    assert error.__traceback__ is not None


def test_a_model_that_is_replaced_is_free_although_the_traceback_is_kept(limited):
    """The frames have the function that failed, and what has caught the error returns later."""

    def made(width):
        model = nn.Linear(width, width, device=limited)
        return lambda rows: model(ndl.init.ones(rows, width, device=limited)).shape

    def caught(step):
        model = nn.Linear(100, 100, device=limited)
        try:
            step(1000)
        except OutOfMemoryError as error:
            return error, model.in_features

    base = memory.stats(limited).live
    step, other = made(100), made(100)
    memory.set_limit(base + 300_000, limited)
    errors = [caught(step)[0], caught(other)[0]]
    assert step(2) == (2, 100) and memory.stats(limited).live > base
    step = other = made(10)
    assert memory.stats(limited).live == base + 4 * (10 * 10 + 10) and errors[0].__traceback__ is not None


@pytest.mark.parametrize("kind", ["generator", "coroutine"])
def test_what_waits_after_it_has_caught_an_error_goes_on(limited, kind):
    errors = []

    def rows():
        for n in (1000, 10):
            try:
                yield ndl.init.ones(n, 100, device=limited).shape
            except OutOfMemoryError as error:
                errors.append(error)
                yield None

    async def tries():
        for n in (1000, 10):
            try:
                return ndl.init.ones(n, 100, device=limited).shape
            except OutOfMemoryError as error:
                errors.append(error)
                await asyncio.sleep(0)

    memory.set_limit(memory.stats(limited).live + 200_000, limited)
    if kind == "generator":
        found = rows()
        assert next(found) is None and memory.stats(limited).live >= 0
        assert next(found) == (10, 100)
    else:
        waiting = tries()
        assert waiting.send(None) is None and memory.stats(limited).live >= 0
        with pytest.raises(StopIteration) as returned:
            waiting.send(None)
        assert returned.value.value == (10, 100)
    assert errors


def test_functions_of_a_frame_that_goes_on_keep_their_closures(limited):
    def made_elsewhere(model):
        return lambda rows: model(ndl.init.ones(rows, 100, device=limited)).shape

    forward = made_elsewhere(nn.Linear(100, 100, device=limited))
    memory.set_limit(memory.stats(limited).live + 200_000, limited)
    with pytest.raises(OutOfMemoryError) as kept:
        made_elsewhere(nn.Linear(100, 100, device=limited))(1000)
    memory.set_limit(None, limited)
    assert forward(2) == (2, 100) and kept.value.__traceback__ is not None


@pytest.mark.parametrize("make, states", [(lambda p, **more: SGD(p, momentum=0.9, **more), 1), (Adam, 2), (AdamW, 2)])
def test_a_step_that_runs_out_in_the_optimizer_has_changed_nothing(limited, make, states):
    model = Pythia(TINY, device=limited)
    optimizer = make(model.parameters(), weight_decay=0.1)
    ids = tokens(limited)
    model.loss(ids, ids).backward()
    before = model.state_dict()
    memory.set_limit(memory.stats(limited).live + 4 * states * TINY.parameter_count() - 4096, limited)
    with pytest.raises(OutOfMemoryError):
        optimizer.step()
    memory.set_limit(None, limited)
    assert all(np.array_equal(before[name], values) for name, values in model.state_dict().items())
    assert getattr(optimizer, "t", 0) == 0
    optimizer.step()
    memory.set_limit(memory.stats(limited).live, limited)
    if states == 1:
        optimizer.step()  # takes none
    else:
        with pytest.raises(OutOfMemoryError):  # of the gradients' scale
            optimizer.step()
        assert optimizer.t == 1


def test_a_full_gpu_has_room_for_what_its_kernels_leave_for_one_another():
    usable("cuda_sim")
    said = in_root(
        "-c",
        f"""
import resource
import needle as ndl
x = ndl.init.ones(2000, 200, device="cuda_sim")
x.numpy()
taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + {6 << 20},) * 2)
try:
    ndl.init.ones(8 << 20, device="cuda_sim")
except ndl.errors.OutOfMemoryError:
    print(x.sum().item())
""",
    )
    assert said == "400000.0\n"


# --- leaks ---

layer = None


def relu_of_layer():
    return ops.relu(layer(ndl.Tensor(np.ones((64, 16)), requires_grad=False)))


def good_step():
    loss = relu_of_layer().sum()
    loss.backward()
    return loss


class Recurrent:
    def __init__(self):
        self.states = []
        self.last = None

    def __call__(self):
        y = relu_of_layer()
        self.states.append(y)
        return y


def leak_total(check):
    total = 0
    for _ in range(6):
        total = good_step() + total
        check.step()
    return total


def leak_list(check):
    history = []
    for _ in range(6):
        history.append(relu_of_layer())
        history[-1].sum().backward()
        check.step()


def leak_containers(check):
    """Of kinds of one's own: what a dictionary by name or a row of figures often is."""
    row = collections.namedtuple("row", "step, loss")
    history = collections.defaultdict(list)
    for step in range(6):
        history["loss"].append(row(step, good_step()))
        check.step()
    return history


def leak_attribute(check):
    model = Recurrent()
    for _ in range(6):
        model().sum().backward()
        check.step()


def leak_closure(check):
    def made():
        y = relu_of_layer()
        return lambda: y

    later = []
    for _ in range(6):
        later.append(made())
        later[-1]().sum().backward()
        check.step()


def leak_traceback(check):
    def failing():
        out = relu_of_layer()
        out.sum().backward()
        raise ValueError("kept")

    errors = []
    for _ in range(6):
        try:
            failing()
        except ValueError as error:
            errors.append(error)
        check.step()


def leak_generator(check):
    def running_mean():
        mean = 0
        while True:
            mean = mean * 0.9 + good_step() * 0.1
            yield mean.item()

    for _ in zip(range(6), running_mean()):
        check.step()


@functools.lru_cache
def remembered(step):
    return relu_of_layer()


def leak_function(check):
    def remember(loss):
        remember.losses.append(loss)

    remember.losses = []
    for _ in range(6):
        remember(good_step())
        check.step()
    remember.losses = None  # it is its own closure


def leak_cache(check):
    for step in range(6):
        remembered(step)
        check.step()


def leak_inside(check):
    """Where needle's own functions alone have a variable for it."""
    model = nn.Sequential(layer, nn.ReLU(), nn.Linear(3, 3))
    errors = []
    for _ in range(6):
        try:
            model(ndl.Tensor(np.ones((64, 16)), requires_grad=False))
        except ShapeError as error:
            errors.append(error)
        check.step()
    errors.clear()  # they hold this frame, which holds them


class Shared:
    states: ClassVar[list] = []


def leak_class(check):
    for _ in range(6):
        Shared.states.append(relu_of_layer())
        check.step()


def leak_callbacks(check):
    """Held by objects that name nothing, in a list that has a name."""
    later = []
    for _ in range(6):
        later.append(functools.partial(print, relu_of_layer()))
        check.step()


def leak_of_two_in_a_closure(check):
    def made():
        first, second = good_step(), relu_of_layer()
        return lambda: (second.sum(), first)

    later = []
    for _ in range(6):
        later.append(made())
        check.step()


def leak_chain(check):
    """Each held by what holds the next one as well."""
    newest = None
    for _ in range(30):
        newest = (good_step(), newest)
        check.step()
    return newest


class Log:
    def __init__(self, steps):
        self.losses = np.empty(steps, object)


def leak_objects_of_numpy(check):
    """Which the collector does not look into, nor into a dict of nothing else."""
    log, rows = Log(6), np.empty(6, object)
    table, masked = np.zeros(6, [("step", int), ("of", [("loss", object)])]), np.ma.array(np.empty(6, object))
    for i in range(6):
        log.losses[i], rows[i], table["of"]["loss"][i], masked.data[i] = (good_step() for _ in range(4))
        check.step()


LEAKS = [
    (leak_function, "remember.losses"), (leak_generator, "mean in the generator running_mean"), (leak_cache, "remembered"), (leak_class, "Shared.states"),
    (leak_callbacks, "later"), (leak_inside, "a kept traceback"), (leak_total, "total"), (leak_list, "history"), (leak_containers, "history"), (leak_attribute, "Recurrent.states"),
    (leak_closure, "y in the closure of <lambda>"), (leak_traceback, "out in failing, kept by a traceback"),
]  # fmt: skip


@pytest.fixture
def with_layer(cpu):
    global layer
    layer = nn.Linear(16, 16, device=cpu)
    yield
    layer = None
    remembered.cache_clear()
    Shared.states.clear()


@pytest.mark.parametrize("run, name", LEAKS, ids=[run.__name__ for run, _ in LEAKS])
def test_a_leak_is_found_and_named(with_layer, run, name):
    with memory.LeakCheck() as check, pytest.warns(memory.LeakWarning) as warned:
        run(check)
    assert set(check.found) == {name}
    assert len(warned) == 1 and "`.detach()`" in str(warned[0].message) and "test_memory.py:" in str(warned[0].message)
    assert check.found[name].steps >= 1 and check.found[name].nbytes > 0


@pytest.mark.parametrize(
    "run, names",
    [
        (leak_of_two_in_a_closure, {"first in the closure of <lambda>", "second in the closure of <lambda>"}),
        (leak_chain, {"newest"}),
        (leak_objects_of_numpy, {"Log.losses", "rows", "table", "masked"}),
    ],
)
def test_each_leak_has_its_own_name(with_layer, run, names):
    gc.collect()  # errors of other tests that hold themselves
    with memory.LeakCheck(warn=False) as check:
        run(check)
    assert set(check.found) == names


def view_of_a_parameter():
    return layer.weight.reshape((-1,))


def dropped_out():
    return nn.Dropout(0.5)(layer(ndl.Tensor(np.ones((64, 16)))))


def with_its_gradient():
    y = relu_of_layer().retain_grad()
    (y * y).sum().backward()
    return y


@pytest.mark.parametrize("make", [good_step, relu_of_layer, view_of_a_parameter, dropped_out, with_its_gradient])
def test_the_bytes_of_a_leak_are_those_that_come_free(with_layer, cpu, make):
    """Those of the model's own parameters are none; data, masks and gradients that nothing else has are some."""
    good_step()  # makes the layer's gradients
    before, history = memory.stats(cpu).live, []
    with memory.LeakCheck(warn=False) as check:
        for _ in range(4):
            history.append(make())
            check.step()
        found = {leak.name: leak.nbytes for leak in memory.leaks()}
    assert found["history"] == memory.stats(cpu).live - before
    history.clear()
    assert memory.stats(cpu).live == before


class Refuses(type):
    @property
    def __name__(cls):
        raise LookupError


class Table:
    """Finds attributes where it likes."""

    __slots__ = ("_values",)

    def __init__(self, values):
        self._values = values

    def __getattr__(self, name):
        return self._values[name]


class Hidden(metaclass=Refuses):
    __class__ = property(lambda self: 1 / 0)


@pytest.mark.parametrize(
    "make", [lambda losses: Table({"losses": losses}), lambda losses: [setattr(h := Hidden(), "losses", losses), h]]
)
def test_a_class_that_fails_when_it_is_asked_ends_no_search(with_layer, make):
    losses = []
    holder = [make(losses)]
    with memory.LeakCheck(warn=False) as check:
        for _ in range(3):
            losses.append(relu_of_layer())
            check.step()
    assert sum(leak.tensors for leak in check.found.values()) >= 1 and holder


def test_objects_that_are_none_of_needles_are_not_asked_what_they_are(with_layer):
    """Some answer with a warning, as PyTorch's, or with another class."""
    asked = []

    class Proxy:
        def __init__(self):
            self.seen_by_the_collector = []

        @property
        def __class__(self):
            asked.append(True)
            return Proxy

    proxy, history = Proxy(), [relu_of_layer()]
    asked.clear()
    assert "history" in [leak.name for leak in memory.leaks()] and proxy.seen_by_the_collector == []
    with memory.trace():
        relu_of_layer()
    assert not asked
    history.clear()


def failed(y):
    try:
        raise ValueError("kept")
    except ValueError as error:
        return error


@pytest.mark.parametrize(
    "keep, name",
    [
        (lambda y: lambda y=y: y, "history"),
        (lambda y: {"loss": y, "step": 1}, "history"),
        (lambda y: types.SimpleNamespace(loss=[y]), "SimpleNamespace.loss"),
        (failed, "y in failed, kept by a traceback"),
    ],
)
def test_many_leaks_cost_one_search(with_layer, monkeypatch, keep, name):
    gc.collect()  # errors of other tests that hold themselves
    history = [keep(relu_of_layer()) for _ in range(50)]
    passes = []
    for search_name in ("get_objects", "get_referrers"):
        search = getattr(gc, search_name)
        monkeypatch.setattr(gc, search_name, lambda *args, search=search: passes.append(1) or search(*args))
    found = [leak for leak in memory.leaks() if leak.name == name]
    assert found[0].tensors == 50 and len(passes) < 25
    history.clear()


def test_a_failed_op_is_no_hindrance(with_layer):
    try:
        relu_of_layer() @ relu_of_layer()
    except ShapeError as error:
        kept = error
    assert isinstance(memory.leaks(), list) and kept.__traceback__ is not None


def test_leaks_now(with_layer):
    history = [good_step() for _ in range(3)]
    found = [leak for leak in memory.leaks() if leak.name == "history"]
    assert len(found) == 1 and found[0].tensors == 3
    history.clear()
    assert not [leak for leak in memory.leaks() if leak.name == "history"]


def test_a_loop_without_a_leak_is_left_in_peace(with_layer, recwarn):
    total = 0.0
    with memory.LeakCheck() as check:
        for _ in range(6):
            total += good_step().item()
            assert check.step() == [] and len(check._ends) == 2  # however many steps there were
    assert not check.found and not [w for w in recwarn if issubclass(w.category, memory.LeakWarning)]


def test_a_leak_check_out_of_its_context_says_so():
    check = memory.LeakCheck()
    for _ in range(2):
        with pytest.raises(GraphError, match="with LeakCheck"):
            check.step()
        with check:
            check.step()


def test_a_graph_from_before_the_loop_is_none_of_its_leaks(with_layer):
    tried = good_step()
    with memory.LeakCheck(warn=False) as check:
        assert memory.leaks() == []
        leak_list(check)
    assert set(check.found) == {"history"} and tried.op is not None


def test_the_search_for_leaks_leaves_nothing_behind(with_layer, cpu):
    good_step()  # makes the layer's gradients
    gc.collect()
    gc.disable()
    try:
        before = memory.stats(cpu).live
        with memory.LeakCheck(warn=False) as check:
            leak_list(check)
            leak_objects_of_numpy(check)
        assert memory.stats(cpu).live == before
        y = relu_of_layer()
        alive = weakref.ref(y)
        memory.leaks()
        del y
        assert alive() is None
    finally:
        gc.enable()


# --- what is shown to others ---


def in_root(*command):
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_finds_its_leak():
    said = in_root("examples/leak.py")
    assert "`Judged.history` (leak.py:28) keeps the graph of 12 steps alive" in said
    sizes = re.findall(r"step 2: (\S+ \S+), after step 12: (\S+ \S+)", said)
    assert sizes[0][0] != sizes[0][1] and float(sizes[1][1].split()[0]) < float(sizes[1][0].split()[0]) * 1.01


def test_the_page_plans_the_model_that_did_not_fit():
    said = in_root("benchmarks/memory_page.py", "--only", "budget")
    assert "179.7M parameters" in said and "32.00 GiB in fp32" in said and said.count("GiB |") >= 4
