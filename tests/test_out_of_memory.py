"""OutOfMemoryError: what it says, what would help, and that the memory is free afterwards."""

import asyncio
import dataclasses
import gc
import importlib.util
import re
import sys
import threading
import traceback

import numpy as np
import pytest

import needle as ndl
from devices import usable
from needle import memory, nn, ops
from needle.backend_ndarray.ndarray import empty
from needle.errors import OutOfMemoryError
from needle.memory import sites
from needle.memory.trace import holders
from needle.models import Pythia, plannable, train_step
from needle.optim import SGD, Adam, AdamW
from tiny_pythia import TINY, tokens


@pytest.fixture
def limited(cpu):
    gc.collect()  # tests count from what is live as they begin: cycles that earlier ones have left may go at any moment
    yield cpu
    memory.set_limit(None, cpu)


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


@pytest.mark.parametrize(
    "nbytes, text", [(5 << 28, "1.25 GiB"), (1 << 30, "1.00 GiB"), (1 << 20, "1.00 MiB"), ((1 << 20) - 4, "1048572 bytes")]
)
def test_what_was_asked_for_is_said_and_what_there_is(limited, nbytes, text):
    memory.set_limit(memory.stats(limited).live + (1 << 19), limited)
    with pytest.raises(OutOfMemoryError, match=rf"out of memory: {text} requested, .+ live, .+ reserved, limit \d"):
        empty((nbytes >> 2,), device=limited)


def test_a_limit_that_is_a_rounded_plan(limited):
    build = plannable(TINY, 8, 64)
    needed, live = memory.peak_bytes(build), memory.stats(limited).live
    memory.set_limit(live + needed - 1, limited)
    with pytest.raises(OutOfMemoryError) as caught, memory.advise(lambda: build):
        step = build(limited)
        step(), step()
    assert f"the step needs {needed:,} bytes at its peak (planned); {needed - 1:,} bytes is there" in str(caught.value)


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


def test_the_least_that_is_needed_is_told_from_what_is_there(limited):
    def build_for(rows=64):
        def build(device):
            layer = nn.Linear(512, 512, device=device)
            return lambda: layer(ndl.ones(rows, 512, device=device)).sum().backward()

        return build

    needed, live = memory.peak_bytes(build_for(1)), memory.stats(limited).live
    memory.set_limit(live + needed - 1, limited)
    with memory.advise(build_for, [("a batch of 1", {"rows": 1})]), pytest.raises(OutOfMemoryError) as failure:
        step = build_for()(limited)
        step()
        step()
    assert f"the least is {needed:,} bytes, with a batch of 1" in str(failure.value)


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


def test_what_the_system_does_not_give_is_not_there(monkeypatch):
    """As under `ulimit -v`, or beside another process on one GPU: less than the device has."""

    def build_for(rows=64):
        def build(device):
            layer, x = nn.Linear(64, 64, device=device), ndl.init.ones(rows, 64, device=device)
            return lambda: layer(ops.tanh(layer(x))).sum().backward()

        return build

    gc.collect()  # as `limited` does
    numpy = usable("cpu_numpy")
    most = memory.stats(numpy).live + memory.peak_bytes(build_for(), steps=1) - 1
    really_empty = np.empty

    def empty_if_there(size, *rest):
        if isinstance(size, int) and memory.stats(numpy).live + 4 * size > most:
            raise MemoryError
        return really_empty(size, *rest)

    monkeypatch.setattr(np, "empty", empty_if_there)
    with pytest.raises(OutOfMemoryError) as caught, memory.advise(build_for, [("16 rows", {"rows": 16})], steps=1):
        build_for()(numpy)()
    assert "the system gave no more of" in str(caught.value) and "what fits: 16 rows" in str(caught.value)
    build_for(16)(numpy)()


def test_a_limit_below_what_is_held_leaves_nothing(limited):
    def build_for():
        return lambda device: lambda: ndl.init.ones(10, 10, device=device)

    held = ndl.init.ones(1000, 100, device=limited)
    memory.set_limit(held.cached_data.nbytes // 2, limited)
    with (
        pytest.raises(OutOfMemoryError, match=r"400 bytes at its peak .*; 0 bytes is there"),
        memory.advise(build_for, [], steps=1),
    ):
        build_for()(limited)()


def test_the_line_that_asked_is_one_line(limited):
    x = ndl.Tensor(np.ones((200, 200)), device=limited)
    with memory.LeakCheck():
        y = (x * x).sum()  # made here
        memory.set_limit(memory.stats(limited).live + 1000, limited)
        with pytest.raises(OutOfMemoryError, match=r"asked by gradient of EWiseMul, test_out_of_memory.py:\d+: y = .*# made here"):
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


def test_a_thread_is_advised_about_its_own_run(limited):
    def build_for(size):
        return lambda: lambda device: lambda: empty((size,), device=device)

    memory.set_limit(memory.stats(limited).live + 1000, limited)
    entered, texts = threading.Barrier(3), {}

    def run(size):
        with memory.advise(build_for(size)):
            entered.wait(10)
            fail(size)
            entered.wait(10)

    def fail(size):
        with pytest.raises(OutOfMemoryError) as caught:
            empty((size,), device=limited)
        texts[size] = str(caught.value)

    threads = [threading.Thread(target=run, args=(size,)) for size in (1 << 18, 2 << 18)]
    for thread in threads:
        thread.start()
    entered.wait(10)
    fail(3 << 18)
    entered.wait(10)
    for thread in threads:
        thread.join()
    assert "the step needs 1.00 MiB" in texts[1 << 18] and "the step needs 2.00 MiB" in texts[2 << 18]
    assert "the step needs" in texts[3 << 18]  # which has none of its own


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
    first, second = kept(x), nn.ReLU()(x)
    for _ in range(3000):
        nn.ReLU()(x)
    assert len(sites._sites) < 2200
    (made,) = [h for h in holders(limited) if h.site.op == "Linear"]
    assert made.module == "weight" and first.shape == (64, 64)  # of the layer that is alone
    (made,) = [h for h in holders(limited) if h.site.op == "ReLU"]  # whose memory is there yet
    assert made.serial == second.realize_cached_data().serial


def test_a_failure_while_gradients_are_added_does_not_wait_for_a_plan_that_adds_some(limited, monkeypatch):
    """Each of the two threads has the lock that the other one wants next."""
    monkeypatch.setattr(memory.explain, "PATIENCE_S", 0.1)
    memory.set_limit(memory.stats(limited).live + (1 << 20), limited)
    failing, planning, texts, plans = threading.Event(), threading.Event(), [], []

    class Large(ops.MulScalar):
        def accumulate_gradient(self, out_grad, node, sums):
            failing.set()
            assert planning.wait(60)
            return ndl.zeros(1 << 20, device=limited)

    def build(device):
        w = nn.Parameter(ndl.ones(1000, device=device))

        def step():
            loss = (w * 2).sum()
            planning.set()
            assert failing.wait(60)
            loss.backward(accumulate=True)

        return step

    def train():
        x = ndl.Tensor([1.0, 2.0], device=limited)
        for _ in range(2):  # the second sum is added to in place
            (x * 2).backward(accumulate=True)
        with memory.advise(lambda: build), pytest.raises(OutOfMemoryError) as caught:
            Large(2.0)(x).sum().backward(accumulate=True)
        texts.append(str(caught.value))

    threads = [threading.Thread(target=run, daemon=True) for run in (train, lambda: plans.append(memory.plan(build)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(plans) == 1 and "another thread is planning" in texts[0]


def test_failures_are_looked_through_while_another_thread_fails():
    """At whatever line the other comes in between."""
    errors = [OutOfMemoryError("one"), OutOfMemoryError("two")]
    for error in errors:
        sites.remember_failure(error)

    def meanwhile(frame, event, arg):
        errors.append(OutOfMemoryError("more"))
        sites.remember_failure(errors[-1])
        return meanwhile

    before = sys.gettrace()
    sys.settrace(meanwhile)
    try:
        sites.free_failed_frames()
    finally:
        sys.settrace(before)
    assert len(errors) > 2


def test_two_threads_forget_sites_at_once(monkeypatch):
    """Both are in an allocation, which must not fail by it."""

    class Layer(nn.Module):
        pass

    found = sites.Site("a.py", 1, "f", modules=(sites.Reference(Layer()),))
    number = sites.number(found)
    has_gone = sites.Site.has_gone

    def meanwhile(site):
        monkeypatch.setattr(sites.Site, "has_gone", has_gone)
        sites._forget_what_has_gone()
        return has_gone(site)

    monkeypatch.setattr(sites.Site, "has_gone", meanwhile)
    sites._forget_what_has_gone()
    assert number not in sites._sites and found not in sites._numbers


def test_parameters_are_held_in_the_name_of_their_layer_whatever_their_size(limited):
    model = nn.Sequential(*(nn.Linear(16, 16, device=limited) for _ in range(3)))
    memory.set_limit(memory.stats(limited).live + 10, limited)
    with pytest.raises(OutOfMemoryError, match=r"modules\.0: its line was not recorded(.|\n)*modules\.1: (.|\n)*modules\.2: "):
        model(ndl.Tensor(np.ones((4, 16)), device=limited))


def test_advice_that_fails_takes_nothing_from_the_rest(limited):
    memory.set_limit(memory.stats(limited).live + 50_000, limited)

    def broken():
        raise KeyError("of the user's own")

    with pytest.raises(OutOfMemoryError) as caught, memory.advise(broken):
        Pythia(TINY, device=limited)
    assert "asked by" in str(caught.value) and "no more could be said: KeyError" in str(caught.value)


def test_ctrl_c_in_an_explanation_arrives(limited):
    memory.set_limit(memory.stats(limited).live + 50_000, limited)

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), memory.advise(interrupted):
        Pythia(TINY, device=limited)
    with pytest.raises(OutOfMemoryError, match="asked by"):  # which is explained again
        Pythia(TINY, device=limited)


def test_a_failure_near_the_limit_of_recursion_has_its_class(limited, monkeypatch):
    memory.set_limit(memory.stats(limited).live + 1000, limited)

    def deep(calls):
        return deep(calls - 1) if calls else ndl.zeros(100_000, device=limited)

    raised = set()
    for calls in range(sys.getrecursionlimit() - 300, sys.getrecursionlimit()):
        try:
            deep(calls)
        except (MemoryError, RecursionError) as error:
            raised.add(type(error))
    assert raised == {OutOfMemoryError, RecursionError}
    monkeypatch.setattr(OutOfMemoryError, "explain", lambda error, message: deep(-1))  # as it is where few calls are left
    with pytest.raises(OutOfMemoryError, match="400000 bytes requested"):
        deep(0)


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


def test_memory_is_free_although_a_debugger_looked_on(limited, looked_on):
    test_memory_is_free_although_the_traceback_is_kept(limited)


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


def failure(run, *args):
    try:
        run(*args)
    except OutOfMemoryError as error:
        return error


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

    base, again = memory.stats(limited).live, []
    memory.set_limit(base + 200_000, limited)
    error = failure(run)
    assert error is not None and memory.stats(limited).live == base
    error = failure(run, again.append)
    assert memory.stats(limited).live > base
    memory.set_limit(None, limited)
    assert again[0]()[0].shape == (1000, 100)  # what can still be called has lost nothing
    assert error.__traceback__ is not None


def calling_each_other(model):
    def layers(n, x):
        return model(x) if n == 0 else two_layers(n - 1, x)

    def two_layers(n, x):
        return two_layers(n - 1, layers(0, x)) if n else layers(0, x)

    return lambda rows: layers(8, ndl.init.ones(rows, 100))


def helping_each_other(model):
    def forward(x, *, bias=model.bias):
        return model(x) + bias

    def twice(x):
        return forward(model(x))

    def thrice(x):
        return twice(forward(x))

    return lambda rows: model(thrice(twice(forward(ndl.init.ones(rows, 100)))))


@pytest.mark.parametrize("make", [calling_each_other, helping_each_other])
def test_what_local_functions_share_is_free_although_the_traceback_is_kept(limited, make):
    def run(keep=lambda function: None):
        step = make(nn.Linear(100, 100, device=limited))
        keep(step)
        step(1000)

    base, again = memory.stats(limited).live, []
    memory.set_limit(base + 1_000_000, limited)
    error = failure(run)
    memory.stats(limited)  # clears the frames: before Python 3.11 the functions are then in nothing but a cycle
    gc.collect()
    assert error is not None and memory.stats(limited).live == base
    error = failure(run, again.append)
    memory.set_limit(None, limited)
    gc.collect()
    assert memory.stats(limited).live > base
    assert again[0](10).shape == (10, 100)  # what can still be called has lost nothing
    assert error.__traceback__ is not None


def test_a_second_try_that_fails_as_well_leaves_nothing(limited):
    def run():
        model = nn.Linear(100, 100, device=limited)

        def step(rows):
            return model(ndl.init.ones(rows, 100, device=limited)), model

        try:
            step(1000)
        except OutOfMemoryError:
            step(500)

    base = memory.stats(limited).live
    memory.set_limit(base + 200_000, limited)
    with pytest.raises(OutOfMemoryError) as kept:
        run()
    assert memory.stats(limited).live == base and isinstance(kept.value.__context__, OutOfMemoryError)


@dataclasses.dataclass
class StepFailed(RuntimeError):
    """Not hashable, as dataclasses are."""

    step: int


@pytest.mark.parametrize("shown", [True, False])
def test_what_was_raised_from_a_failure_keeps_no_memory_either(limited, monkeypatch, shown):
    def step(rows):
        return ndl.init.ones(rows, 100, device=limited)

    def run():
        held = ndl.init.ones(100, 100, device=limited)
        try:
            step(1000)
        except OutOfMemoryError as error:
            raise StepFailed(1) from error
        return held

    def outer():
        held = ndl.init.ones(100, 100, device=limited)
        run()
        return held

    base = memory.stats(limited).live
    memory.set_limit(base + 200_000, limited)
    kept = None
    try:
        outer()
    except StepFailed as error:
        kept = error
        if not shown:
            assert memory.stats(limited).live == base and step(400).shape == (400, 100)
    if shown:  # by a notebook or the interpreter
        monkeypatch.setattr(sys, "last_value", kept, raising=False)
    assert memory.stats(limited).live == base and kept.__traceback__ is not None


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


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", ["generator", "coroutine"])
def test_what_waits_after_it_has_caught_an_error_goes_on(limited, kind, frozen):
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
        if frozen:  # as servers do before they fork
            gc.freeze()
        assert next(found) is None and memory.stats(limited).live >= 0
        assert next(found) == (10, 100)
    else:
        waiting = tries()
        if frozen:
            gc.freeze()
        assert waiting.send(None) is None and memory.stats(limited).live >= 0
        with pytest.raises(StopIteration) as returned:
            waiting.send(None)
        assert returned.value.value == (10, 100)
    assert errors


def test_all_that_wait_after_they_have_caught_one_error_go_on(limited):
    """In whatever order they have come into its traceback, and what is over is let go."""

    def rows():
        for n in (1000, 10):
            try:
                item = ndl.init.ones(n, 100, device=limited)
            except OutOfMemoryError as error:
                item = error
            yield item

    def reader():
        held, result = ndl.init.ones(100, device=limited), None
        while True:
            try:
                result = yield result
            except OutOfMemoryError as error:
                result = error
            del held

    base = memory.stats(limited).live
    memory.set_limit(base + 200_000, limited)
    source, readers = rows(), [reader(), reader()]

    def over():
        kept = ndl.init.ones(100, device=limited)
        yield next(readers[0])
        raise next(source)  # which it gives away, and waits
        yield kept

    next(readers[1])
    errors = []
    try:
        list(over())
    except OutOfMemoryError as error:
        errors.append(error)
        assert [r.throw(error) for r in readers] == [error, error]
    assert memory.stats(limited).live == base
    assert next(source).shape == (10, 100) and [gen.gi_frame is not None for gen in readers] == [True, True]


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


def test_a_full_gpu_has_room_for_what_its_kernels_leave_for_one_another(in_root):
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
