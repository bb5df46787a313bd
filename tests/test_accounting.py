"""needle.memory: the accounts of every byte, and the trace of a step."""

import gc
import sys
import threading

import numpy as np
import pytest

import needle as ndl
from devices import usable
from needle import amp, memory, nn, ops
from needle.backend_ndarray.host_memory import CATEGORIES, DATA, FREED, HostAllocator, Storage
from needle.backend_ndarray.ndarray import empty, from_dlpack
from needle.errors import GraphError, ShapeError
from needle.memory import accounting, sites
from needle.memory.trace import grouped, holders, module_table
from needle.models import Pythia, train_step
from needle.optim import SGD, Adam, AdamW
from op_cases import CASES
from tiny_pythia import TINY, tokens


def test_bytes_are_counted_by_category(device):
    gc.collect()
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


@pytest.mark.parametrize(
    ("make", "category"),
    [
        (lambda device: ndl.Tensor(np.ones(9000), device=device), "data"),
        (lambda device: nn.Parameter(np.ones(9000), device=device), "parameter"),
        (lambda device: ndl.init.ones(9000, device=device), "activation"),
    ],
)
def test_what_makes_the_peak_counts_there_by_the_category_that_it_gets(device, make, category):
    start = memory.stats(device).by_category[category]
    with memory.peak(device) as p, memory.trace(device) as t:
        make(device)
    (made,) = [holder for holder in t.holders() if holder.made >= 0]
    assert (made.nbytes, made.category) == (36_000, category)
    assert p.by_category[category] - start == 36_000 and sum(p.by_category.values()) == p.bytes == t.peak_bytes


def test_the_categories_at_the_peak_are_those_that_there_were(device):
    """Later ones, of as many bytes, or of the same memory when less is live, are of another moment."""
    other, start = empty((9000,), device=device), memory.stats(device).by_category
    with memory.peak(device) as p, memory.trace(device) as t:
        first = empty((9000,), device=device)
        del other
        first.category = DATA
        again = empty((9000,), device=device)
        again.category = DATA
    for found in (p.by_category, t.by_category()):
        assert found["data"] == start["data"] and found["activation"] == start["activation"] + 36_000
    assert sum(p.by_category.values()) == p.bytes == t.peak_bytes
    del first, again
    with memory.peak(device) as p:  # in which nothing is made
        pass
    assert p.by_category == memory.stats(device).by_category and sum(p.by_category.values()) == p.bytes


@pytest.mark.parametrize("name", ["cuda_sim", "cuda"])
def test_a_small_request_leaves_a_large_block_of_a_gpu_as_it_is(name):
    device = usable(name)
    gc.collect()
    memory.empty_cache(device)
    before, mib = memory.stats(device).reserved, 1 << 18
    empty((8 * mib,), "float32", device)
    small = empty((mib,), "float32", device)
    large = empty((8 * mib,), "float32", device)
    assert memory.stats(device).reserved - before == small.size * 4 + large.size * 4
    del small, large
    memory.empty_cache(device)


def test_a_peak_from_before_a_region_gets_no_category_in_it(device):
    with memory.peak(device):
        x = ndl.Tensor(np.ones(9000), device=device).realize_cached_data()  # makes the peak
    with memory.peak(device) as p:
        x.category = 0
    assert p.above_start == 0 and p.by_category["data"] >= 36_000


def test_what_is_assigned_to_grad_counts_as_gradient_unless_it_has_a_name(device):
    p, x = nn.Parameter(np.ones(9000), device=device), ndl.Tensor(np.ones(9000), device=device)
    start = memory.stats(device).by_category
    x.grad = p.detach()
    assert memory.stats(device).by_category == start
    x.grad = ndl.init.ones(9000, device=device)
    assert memory.stats(device).by_category["gradient"] - start["gradient"] == 36_000


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


WORKSPACE = {  # of the shapes in op_cases.py: the bytes that an op takes for itself, forward and backward, one after the other
    "sum_outer": [4 * 3 * 4],  # of the last axis, then of the first
    "broadcast_to": [4 * 2 * 3],
    "batch_norm": [4 * 64 * 2 * 6] * 2,  # two sums of each column, in 64 parts
    "batch_norm_rows": [4 * 64 * 2 * 3] * 2,
    "layer_norm": [4 * 64 * 2 * 37],
    "layer_norm_rows": [4 * 64 * 2 * 3],
    "conv_planes": [4 * 2 * 5 * 4 * 3] * 2,  # the image with its channels last
    "embedding": [4 * (4 + 5 + 1)],  # the positions by id, and where each id's begin
    "getitem_arrays": [4 * (12 + 24 + 1)],
    "linear_cross_entropy": [4 * 2 * 7],  # two rows of logits
    "attention": [4 * 2 * 70],  # a number for each query
    "attention_sparse": [4 * 2 * 41],
    "attention_per_head": [4 * 4 * 20],
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_an_op_takes_for_itself_counts_as_workspace(device, case):
    inputs = [ndl.Tensor(x, device=device) for x in case.inputs()]
    with memory.trace(device) as trace:
        case.run(*inputs).backward()
    freed = [h.nbytes for kind, h in trace.events if kind == FREED and h.category == "workspace"]
    assert freed == WORKSPACE.get(case.name, [])


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


def test_two_threads_reset_the_peak_at_once(cpu, monkeypatch):
    begin_anew = accounting._begin_anew

    def meanwhile(device):
        begin_anew(device)
        monkeypatch.setattr(accounting, "_begin_anew", begin_anew)
        memory.reset_peak(device)

    monkeypatch.setattr(accounting, "_begin_anew", meanwhile)
    memory.reset_peak(cpu)
    assert memory.stats(cpu).peak == memory.stats(cpu).live


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
    found = memory.stats(cpu)
    assert found.peak >= outer.bytes  # a region's own peak does not hide the one before it
    assert sum(found.by_category_at_peak.values()) == found.peak
    del outer_array


def test_no_peak_is_lost_between_threads(cpu):
    def poll():
        while not stop:
            with memory.peak(cpu):
                pass

    stop, found, often = [], [], sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=poll) for _ in range(2)]
    try:
        for thread in threads:
            thread.start()
        for _ in range(1000):
            with memory.peak(cpu) as region:
                empty((1000,), device=cpu)
            found.append(region.above_start >= 4000)
    finally:
        stop.append(True)
        for thread in threads:
            thread.join()
        sys.setswitchinterval(often)
    assert all(found)


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
    high = empty((1 << 22,), device=cpu)
    with memory.peak(cpu):
        del high
    memory.empty_cache(cpu)
    memory.reset_peak(cpu)
    assert memory.stats(cpu).peak_reserved == memory.stats(cpu).reserved


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


def test_an_emptied_cache_has_none_of_what_is_kept_between_calls(cpu):
    memory.empty_cache(cpu)
    before = memory.stats(cpu).live
    Pythia(TINY, device=cpu).rotary_tables(8)
    assert memory.stats(cpu).live > before
    memory.empty_cache(cpu)
    assert memory.stats(cpu).live == before


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
    for nbytes in (900, 1_048_474, 3 << 29, 5 << 40):  # as an error names what would be enough
        assert abs(memory.parse_bytes(memory.readable(nbytes)) - nbytes) < 2 and memory.parse_bytes(f"{nbytes:,} bytes") == nbytes
    for wrong in (
        "1,5GiB",
        "1,234",
        "1,23 bytes",
        "12,34.00 KiB",
        "T5",
        "",
        "GiB",
        "G",
        "16i",
        "16GG",
        "-1GiB",
        "0",
        0,
        True,
        "9" * 400,
        "9999999TiB",
        1.5,
        "1.5 bytes",
        1 << 63,
    ):
        with pytest.raises(ShapeError, match="not an amount of memory"):
            memory.parse_bytes(wrong)
    with pytest.raises(ShapeError, match="not an amount of memory: ''"):
        memory.set_limit("")


def test_amounts_of_memory_are_written():
    written = {1023: "1023 bytes", 1024: "1.00 KiB", 1_048_570: "1,023.99 KiB", 1_048_575: "1.00 MiB", -(5 << 40): "-5,120.00 GiB"}
    assert [memory.readable(nbytes) for nbytes in written] == list(written.values())


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


def test_what_is_kept_does_not_lie_beside_what_does_not_fit_into_it(cpu):
    """Nor does a peak from before the cache was emptied leave room for it."""
    gc.collect()
    empty((200 << 18,), "float32", cpu)
    memory.empty_cache(cpu)
    before = memory.stats(cpu).reserved
    for mib in (40, 60, 80):
        empty((mib << 18,), "float32", cpu)
    assert 80 << 20 <= memory.stats(cpu).reserved - before < 100 << 20
    memory.empty_cache(cpu)


def test_memory_of_others_counts_for_as_long_as_it_is_held(cpu):
    gc.collect()
    before = memory.stats(cpu)
    whole = from_dlpack(np.zeros(1000))
    part = whole[5:]
    del whole
    assert memory.stats(cpu).borrowed - before.borrowed == 8000
    del part
    assert memory.stats(cpu).borrowed == before.borrowed
    capsule = empty((1000,), "float32", cpu).__dlpack__()
    assert memory.stats(cpu).live - before.live == 4000
    del capsule  # which nobody took
    assert memory.stats(cpu).live == before.live


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


# --- traces ---


def one_step(device):
    model = Pythia(TINY, device=device)
    optimizer = AdamW(model.parameter_groups())
    ids = tokens(device)
    for _ in range(2):
        train_step(model, optimizer, iter([(ids, ids)]))
    return model


def test_a_line_of_a_notebook_is_named_by_its_cell(cpu, monkeypatch):
    class Compile:
        format_code_name = {"/tmp/ipykernel_7/123.py": ("Cell", "In[3]")}.get

    class Shell:
        compile = Compile

    def place_of(file):
        with memory.trace(cpu) as t:
            exec(compile("\nx = ndl.init.zeros(8, device=cpu)", file, "exec"), {"ndl": ndl, "cpu": cpu})
        return t.peak_site.place

    class IPython:
        get_ipython = staticmethod(lambda: Shell)

    monkeypatch.setitem(sys.modules, "IPython", IPython)
    assert [place_of(file) for file in ("/tmp/ipykernel_7/123.py", "/tmp/other.py")] == ["In[3]:2", "other.py:2"]
    for shell in (None, object()):  # IPython is there, but not in use; one before 8
        monkeypatch.setattr(IPython, "get_ipython", staticmethod(lambda shell=shell: shell))
        assert place_of("/tmp/ipykernel_7/123.py") == "123.py:2"


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


def test_a_trace_names_modules_that_have_names_of_modules_own(cpu):
    class Tree(nn.Module):
        def __init__(self, depth):
            self.layer = nn.Linear(4, 4)
            self._children = [Tree(depth - 1)] if depth else []

    tree = Tree(1)
    with memory.trace(cpu) as trace:
        out = tree._children[0].layer(ndl.init.ones(2, 4))
    assert any(h.module.endswith("_children.0.layer") for h in trace.holders()) and out.shape == (2, 4)


def test_a_trace_names_casts_as_such(cpu):
    x, w = (ndl.Tensor(np.ones((4, 4)), device=cpu) for _ in range(2))
    with memory.trace(cpu) as t, amp.autocast(cpu, "bfloat16"):
        y = x @ w
    assert [row["op"] for row in t.timeline()] == ["AsType", "AsType", "MatMul"] and y.shape == (4, 4)


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


def test_a_trace_that_is_entered_again_is_of_the_later_region(cpu):
    t, held = memory.trace(cpu), ndl.init.ones(5, device=cpu)
    for count in (1000, 10, 100):
        with t:
            start = memory.stats(cpu).live
            t.mark("made")
            ndl.init.ones(count, device=cpu)
        assert (t.peak_bytes, len(t.timeline()), t.mark_positions()) == (start + 4 * count, 2, [(0, "made")])
    with t:  # the most is live as it begins
        del held
    assert (t.peak_index, t.peak_bytes) == (0, t.start_bytes)


def test_a_region_that_has_not_ended_has_no_figures_yet(cpu):
    t = memory.trace(cpu)
    for _ in range(2):  # nor those of the one before
        with t:
            x = empty((1000,), device=cpu)
            for asked in (
                lambda: t.peak_bytes,
                lambda: t.start_bytes,
                t.holders,
                t.timeline,
                t.table,
                lambda: memory.picture(t, "x"),
            ):
                with pytest.raises(GraphError, match=r"\[memory.trace\] the region on cpu\(\) has not ended"):
                    asked()
        assert t.peak_bytes == t.start_bytes + 4 * x.size
        del x


def test_the_peak_is_that_of_the_memory_that_made_it(cpu):
    with memory.trace(cpu) as t:
        first, last = empty((1000,), device=cpu), empty((10,), device=cpu)
        first.category = DATA  # another's, and later its own
        del first
        last.category = DATA
    assert (t.peak_index, t.peak_bytes) == (2, t.start_bytes + 4040)


def test_rows_and_marks_of_a_trace(cpu):
    held = empty((1000,), device=cpu)
    with memory.trace(cpu) as t:
        first = empty((10,), device=cpu)
        t.mark("later")
        del held
        last = empty((20,), device=cpu)
    rows = [(row["kind"], row["bytes"], row["made"]) for row in t.timeline()]
    assert rows == [("made", 40, 0), ("freed", 4000, -1), ("made", 80, 2)] and first.size < last.size
    assert t.mark_positions() == [(2, "later")] and [t.mark_at(index) for index in (1, 2, 3)] == ["", "", "later"]


def test_a_trace_of_two_layers(cpu):
    class Two(nn.Module):
        def __init__(self):
            self.narrow, self.wide = nn.Linear(4, 4, device=cpu), nn.Linear(4, 900, device=cpu)

    two, x = Two(), ndl.init.ones(2, 4, device=cpu)
    modules = {h.module.split(".")[-1] for h, _ in grouped(holders(cpu)) if h.nbytes}
    assert {"narrow", "wide"} <= modules  # although no line of either is known
    with memory.trace(cpu) as t:
        y = two.wide(two.narrow(x))
    assert t.peak_module.endswith("wide")
    with memory.trace(cpu) as t:
        y = two.narrow(x)
        loss = y.sum()
        loss.backward()
    places = [
        {row["place"] for row in t.timeline() if (row["kind"], row["op"]) == ("made", op)}
        for op in ("Linear", "gradient of Linear")
    ]
    assert len(places[0]) == 1 and places[0] == places[1]


def test_a_peak_as_a_trace_begins_is_made_by_nobody(cpu):
    layer, x, held = nn.Linear(4, 4, device=cpu), ndl.init.ones(2, 4, device=cpu), empty((1000,), device=cpu)
    with memory.trace(cpu) as t:
        del held
        y = layer(x)
    assert t.events[-1][1].module and y.size and t.peak_bytes == t.start_bytes
    assert t.peak_module == "" and t.peak_site == memory.sites.NOWHERE


def test_modules_of_a_table_are_in_the_order_of_their_numbers():
    rows = {name: {**dict.fromkeys(CATEGORIES, 0), "activation": 1} for name in ("", "layers.10", "layers.2", "embed")}
    names = [line.split()[0] for line in module_table(rows).splitlines()]
    assert names == ["module", "embed", "layers.2", "layers.10", "(elsewhere)", "all"]


def test_two_traces_of_one_device_are_refused(cpu):
    with pytest.raises(ndl.errors.GraphError, match="has not begun"):
        memory.trace(cpu).__exit__()
    with memory.trace(cpu), pytest.raises(ndl.errors.GraphError, match="traced already"), memory.trace(cpu):
        pass


def test_ctrl_c_as_a_region_begins_or_ends_leaves_nothing_on(cpu, monkeypatch):
    checks = sys.modules[memory.LeakCheck.__module__]._checks

    def interrupted(*args):
        raise KeyboardInterrupt

    def build(device):
        return lambda: ndl.ones(100, device=device)

    for owner, name, region in (
        (sites, "apply", lambda: memory.trace(cpu)),
        (sites, "mark_nodes", lambda: memory.LeakCheck()),
        (accounting, "by_name", lambda: memory.peak(cpu)),
        (memory.trace, "__exit__", lambda: memory.plan(build)),
        (np.random, "set_state", lambda: memory.plan(build)),
    ):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(owner, name, interrupted)
            with region():
                pass
        sites.apply(cpu)
        assert not sites._tracing and not sites.node_listeners and not checks and gc.isenabled()
        assert not any(accounting._regions.values())
        with memory.trace(cpu) as t:
            kept = ndl.ones(10, device=cpu)
        assert t.peak_bytes - t.start_bytes == kept.size * 4 and memory.plan(build).peak_bytes == 400


def test_ctrl_c_before_a_trace_has_ended(cpu, monkeypatch):
    end, calls = memory.trace._end, []

    def interrupted(self):
        calls.append(self)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return end(self)

    monkeypatch.setattr(memory.trace, "_end", interrupted)
    with pytest.raises(KeyboardInterrupt), memory.trace(cpu):
        pass
    assert not sites._tracing
    with memory.trace(cpu):
        pass


def test_ctrl_c_as_the_account_of_a_plan_ends(monkeypatch):
    def build(device):
        return lambda: ndl.ones(100, device=device)

    mod = ndl.meta().require()
    for name in ("count_with_everyones", "_count_with"):
        works, calls = getattr(mod, name), []

        def once(*args, calls=calls, works=works, at=2 if name == "_count_with" else 1):
            calls.append(args)
            if len(calls) == at:
                raise KeyboardInterrupt
            works(*args)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(mod, name, once)
            memory.plan(build)
        assert memory.plan(build).peak_bytes == 400


def test_memory_that_ctrl_c_comes_between_is_given_back():
    class Interrupted(HostAllocator):
        def _put(self, *args):
            super()._put(*args)
            raise KeyboardInterrupt

    allocator = Interrupted("own")
    with pytest.raises(KeyboardInterrupt):
        Storage(allocator, 100)
    assert allocator.live == sum(allocator.by_category) == 0 and not allocator.held


def test_memory_without_a_working_directory(device, tmp_path, monkeypatch):
    """For code whose file has a relative name."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    exec(compile("made = empty((3000, 3000), 'float32', device)", "relative.py", "exec"), {"empty": empty, "device": device})


def test_every_account_has_the_same_rules(device):
    """Of the backend in C++, of numpy's and of the plans' alike."""
    for one in (device, ndl.meta()):
        array = empty((4,), "float32", one)
        with memory.trace(one) as trace:
            array.category = array.category
        assert not trace.events
        one.require().set_limit(-1)
        assert memory.stats(one).limit == 0
