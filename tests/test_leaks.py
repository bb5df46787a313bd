"""needle.memory.leaks: which graphs are kept by mistake, and by whom."""

import collections
import functools
import gc
import os
import re
import signal
import sys
import threading
import types
import weakref
from typing import ClassVar

import numpy as np
import pytest

import needle as ndl
from needle import amp, memory, nn, ops
from needle.errors import GraphError, ShapeError
from needle.objects import in_turn, objects_but, objects_of

pytestmark = pytest.mark.usefixtures("few_objects")
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


def leak_function(check):
    def remember(loss):
        remember.losses.append(loss)

    remember.losses = []
    for _ in range(6):
        remember(good_step())
        check.step()
    remember.losses = None  # it is its own closure


def leak_cache(check):
    @functools.lru_cache
    def remembered(step):
        return relu_of_layer()

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


def leak_class(check):
    class Shared:
        states: ClassVar[list] = []

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


def leak_executed(check):
    """In globals that are no module's, as a profiler and doctest have them."""
    lines = "sums = 0", "for _ in range(6):", "    sums = good_step() + sums", "    check.step()"
    globs = {"check": check, "good_step": good_step}
    exec(compile("\n".join(lines), __file__, "exec"), globs)
    return globs


LEAKS = [
    (leak_function, "remember.losses"), (leak_generator, "mean in the generator running_mean"), (leak_cache, "remembered"), (leak_class, "Shared.states"),
    (leak_callbacks, "later"), (leak_inside, "a kept traceback"), (leak_total, "total"), (leak_list, "history"), (leak_containers, "history"), (leak_attribute, "Recurrent.states"),
    (leak_closure, "y in the closure of <lambda>"), (leak_traceback, "out in failing, kept by a traceback"), (leak_executed, "sums"),
]  # fmt: skip


@pytest.fixture
def with_layer(cpu):
    global layer
    layer = nn.Linear(16, 16, device=cpu)
    yield
    layer = None


@pytest.mark.parametrize("run, name", LEAKS, ids=[run.__name__ for run, _ in LEAKS])
def test_a_leak_is_found_and_named(with_layer, run, name):
    with memory.LeakCheck() as check, pytest.warns(memory.LeakWarning) as warned:
        run(check)
    assert set(check.found) == {name}
    assert len(warned) == 1 and "`.detach()`" in str(warned[0].message) and "test_leaks.py:" in str(warned[0].message)
    assert check.found[name].steps >= 1 and check.found[name].nbytes > 0


@pytest.mark.parametrize("run, name", [(leak_total, "total"), (leak_generator, "mean in the generator running_mean")])
def test_a_copy_of_locals_that_a_debugger_had_made_is_no_leak(with_layer, looked_on, run, name):
    with memory.LeakCheck(warn=False) as check:
        run(check)
    assert set(check.found) == {name}


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


class Answers:
    """Has whatever it is asked for, and nothing of what its own slot is called."""

    __slots__ = ("losses",)

    def __getattr__(self, name):
        return lambda *args: np.zeros(2)


class Shadowed(Answers):
    losses = property(lambda self: 1 / 0)


class Unsure(dict):
    def __bool__(self):
        raise LookupError

    items = keys = values = __len__ = __bool__


class Key:
    def __str__(self):
        raise LookupError

    __repr__ = __str__


class Plain:
    pass


def holding(holder, losses):
    Answers.losses.__set__(holder, losses)
    return holder


def with_attributes(attributes):
    holder = Plain()
    holder.__dict__ = attributes
    return holder


@pytest.mark.parametrize(
    "make",
    [
        lambda losses: Table({"losses": losses}),
        lambda losses: [setattr(h := Hidden(), "losses", losses), h],
        lambda losses: holding(Answers(), losses),
        lambda losses: holding(Shadowed(), losses),
        lambda losses: with_attributes(Unsure(inside=losses)),
        lambda losses: with_attributes({Key(): losses}),
    ],
)
def test_a_class_that_fails_when_it_is_asked_ends_no_search(with_layer, make):
    losses = []
    holder = [make(losses)]
    with memory.LeakCheck(warn=False) as check:
        for _ in range(3):
            losses.append(relu_of_layer())
            check.step()
        del losses  # the nearest name, which the search would go no further than
        assert sum(leak.tensors for leak in memory.leaks()) >= 2 and holder


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


class OneSlot:
    __slots__ = "loss"

    def __init__(self, loss):
        self.loss = loss


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
        (OneSlot, "OneSlot.loss"),
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


def test_what_gc_freeze_has_put_aside_is_found(with_layer, cpu):
    history = [good_step() for _ in range(3)]
    modules = objects_of(nn.Module)
    gc.freeze()
    assert [leak.tensors for leak in memory.leaks() if leak.name == "history"] == [3]
    gc.freeze()
    assert objects_of(nn.Module) == modules != []
    history.clear()


def test_a_loop_without_a_leak_is_left_in_peace(with_layer, recwarn):
    total = 0.0
    with memory.LeakCheck() as check:
        for _ in range(6):
            total += good_step().item()
            assert check.step() == [] and len(check._ends) == 2  # however many steps there were
    assert not check.found and not [w for w in recwarn if issubclass(w.category, memory.LeakWarning)]


@pytest.mark.parametrize("train", [True, False])
def test_what_an_autocast_region_around_the_loop_keeps_is_no_leak(with_layer, recwarn, cpu, train):
    """A cast of each weight, until that changes."""
    history = []
    with amp.autocast(cpu, "bfloat16"), memory.LeakCheck() as check:
        for step in range(6):
            loss = relu_of_layer().sum()
            if train:
                loss.backward(accumulate=step > 0)
            check.step()
        assert check.found == {} and not recwarn.list
        del loss
        for _ in range(6):
            history.append(relu_of_layer())
            check.step()
        assert [*check.found] == ["history"]


def test_a_trace_inside_of_a_leak_check_ends_nothing(with_layer, cpu):
    with memory.LeakCheck(warn=False) as check:
        with memory.trace(cpu):
            good_step()
        leak_list(check)
    assert set(check.found) == {"history"}


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


@pytest.mark.skipif(
    sys.version_info < (3, 13) and sys.gettrace() is not None, reason="a tracer (coverage?) has copies of locals kept"
)
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


def test_searches_of_several_threads_leave_nothing_behind(with_layer, cpu):
    names = []

    def train(together):
        history = []
        with memory.LeakCheck(warn=False) as check:
            for _ in range(3):
                history.append(relu_of_layer())
                together.wait()
                check.step()
        names.extend(check.found)

    relu_of_layer()
    gc.collect()
    gc.disable()
    often, before = sys.getswitchinterval(), memory.stats(cpu).live
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(2):
            together = threading.Barrier(2)
            threads = [threading.Thread(target=train, args=(together,)) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            del thread, threads
        assert memory.stats(cpu).live == before and names == ["history"] * 4
    finally:
        sys.setswitchinterval(often)
        gc.enable()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_process_that_forks_while_another_thread_searches_can_search(with_layer):
    searching, over = threading.Event(), threading.Event()

    def search():
        with in_turn():
            searching.set()
            over.wait()

    thread = threading.Thread(target=search)
    thread.start()
    searching.wait()
    child = os.fork()
    if not child:
        signal.alarm(60)  # ends it, where it waits for a thread that it does not have
        os._exit(memory.leaks() != [])
    over.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


def test_tuples_of_tuples_may_be_deep_and_shared(with_layer):
    """Those that the garbage collector does not know, since they hold numbers alone."""
    deep, shared = (), (1,)
    for i in range(3000):
        deep = (float(i), deep)
        if i < 60:
            shared = (shared, shared)
        gc.collect(0)
    history = [relu_of_layer()]
    assert [leak.name for leak in memory.leaks()] == ["history"] and deep and shared and history


def test_what_keeps_a_gradient_keeps_a_graph(with_layer, cpu):
    """The gradient that backward was given can have one, and is needed as long as gradients can be found again."""
    x = ndl.Tensor([1.0, 2.0])
    y = x * 3
    y.backward(x * 2)
    assert sorted(leak.name for leak in memory.leaks()) == ["x.grad", "y"]
    del y
    assert memory.leaks() == []
    (x * x).sum().backward(create_graph=True)
    (leak,) = memory.leaks()
    assert str(leak).startswith("`x.grad` keeps 1 graph alive, ") and str(leak).endswith(": set it to None, as `reset_grad()` does")
    live = memory.stats(cpu).live
    slope, x.grad = x.grad, None
    assert [leak.name for leak in memory.leaks()] == ["slope"]
    del slope
    assert live - memory.stats(cpu).live == leak.nbytes


def test_the_search_for_leaks_takes_no_variable_from_the_program(with_layer):
    """Nor from the dict that ``locals()`` gave it; not in a debugger either, at whichever frame that looks."""

    def program():
        kept = relu_of_layer()
        mine = locals()
        memory.leaks()
        return kept, mine

    assert set(program()[1]) >= {"kept"}

    def stopped(frame, event, arg):
        if event == "line":
            memory.leaks()
        return stopped

    def traced():
        kept = relu_of_layer()
        more = 1
        return kept, more

    before = sys.gettrace()
    sys.settrace(lambda frame, *_: stopped if frame.f_code is traced.__code__ else None)
    try:
        traced()
    finally:
        sys.settrace(before)


def test_the_largest_leak_comes_first_and_says_where_the_latest_of_its_tensors_was_made(with_layer):
    small, large = [], []
    with memory.LeakCheck(warn=False) as check:
        small.append(ndl.Tensor([1.0]) * 2)
        large.append(ops.relu(layer.weight))
        check.step()
        large.append(layer.weight * 2)
        place = f"test_leaks.py:{sys._getframe().f_lineno - 1}"
        check.step()
        found = memory.leaks()
    assert [leak.name for leak in found] == ["large", "small"] and found[0].place == place
    assert "keeps the graph of 1 step alive" in str(memory.Leak("x", "", 1, 0, 1))


def test_a_tensor_that_could_not_be_made_ends_no_search():
    with pytest.raises(TypeError) as error:
        ndl.Tensor([1.0], dtype="nonsense")
    assert memory.leaks() == [] and error


def test_a_search_waits_until_what_survives_has_doubled(monkeypatch):
    module = sys.modules[memory.LeakCheck.__module__]
    searched, find, kept, x = [], module.find, [], ndl.Tensor([1.0])
    monkeypatch.setattr(module, "find", lambda nodes, ends: (searched.append(len(nodes)), find(nodes, ends))[1])
    with memory.LeakCheck(warn=False) as check:
        for _ in range(12):
            kept.append(x * 2)
            check.step()
        assert searched == [1, 3, 7]
        kept.clear()
        for _ in range(2):  # then the next leak is a first one
            kept.append(x * 2)
            check.step()
        assert searched == [1, 3, 7, 1]


def test_graphs_of_another_thread_are_its_own(with_layer):
    """Its step may be a long one; and a LeakCheck of its own finds its leaks."""
    made, over, found = threading.Event(), threading.Event(), []

    def other():
        with memory.LeakCheck(warn=False) as check:
            running = relu_of_layer()
            check.step()
            made.set()
            over.wait()
            check.step()
            found.extend(check.found)
        return running

    with memory.LeakCheck(warn=False) as check:
        thread = threading.Thread(target=other)
        thread.start()
        made.wait()
        for _ in range(4):
            good_step()
            check.step()
        assert memory.leaks() == []
        over.set()
        thread.join()
    assert not check.found and found == ["running"]


def test_the_example_finds_its_leak(in_root):
    said = in_root("examples/leak.py")
    assert "`Judged.history` (leak.py:28) keeps the graph of 12 steps alive" in said
    sizes = re.findall(r"step 2: (\S+ \S+), after step 12: (\S+ \S+)", said)
    assert sizes[0][0] != sizes[0][1] and float(sizes[1][1].split()[0]) < float(sizes[1][0].split()[0]) * 1.01


def test_a_search_disturbs_no_tuple_that_another_thread_is_making(with_layer, cpu):
    """While a search has such a tuple in its hands the thread that makes it cannot make it longer."""
    over, failed, made, history = threading.Event(), [], [], [relu_of_layer()]

    def make():
        while not over.is_set():
            try:
                made.append(len(tuple(i for i in range(2000))))
            except SystemError as error:
                failed.append(error)

    def build(device):
        return lambda: ndl.ones(10, device=device)

    thread = threading.Thread(target=make)
    thread.start()
    try:
        with memory.LeakCheck(warn=False) as check:
            for _ in range(25):
                history.append(relu_of_layer())
                check.step()
                with memory.trace(cpu):
                    pass
                assert memory.leaks() and memory.plan(build).peak_bytes == 40 and ndl.autograd.TENSOR_COUNTER
    finally:
        over.set()
        thread.join()
    assert made and not failed


def test_a_search_finds_no_objects_of_its_own():
    """A list of all objects that is among these would keep them until the garbage collector comes."""
    own = types.SimpleNamespace()
    gc.collect()
    gc.disable()
    try:
        for found in (objects_but(ndl.Tensor), objects_of(type, types.SimpleNamespace)):
            assert not any(x is found for x in found) and any(x is own for x in found)
            assert not any(type(x) in (tuple, ndl.Tensor) for x in found)
        del found
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_a_plan_beside_a_search_is_exact(with_layer):
    def build(device):
        layer = nn.Linear(30, 30, device=device)
        return lambda: ops.tanh(layer(ndl.ones(30, 30, device=device))).sum().backward()

    over, history, alone = threading.Event(), [relu_of_layer()], (memory.plan(build).peak_bytes, memory.peak_bytes(build))

    def search():
        while not over.is_set():
            memory.leaks()

    often = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    thread = threading.Thread(target=search)
    thread.start()
    try:
        for _ in range(8):
            assert (memory.plan(build).peak_bytes, memory.peak_bytes(build)) == alone
    finally:
        sys.setswitchinterval(often)
        over.set()
        thread.join()
    assert history


def test_casts_of_another_threads_region_are_no_leak(with_layer, cpu):
    kept, over = threading.Event(), threading.Event()

    def train():
        with amp.autocast(cpu, "bfloat16"):
            good_step().backward()
            kept.set()
            over.wait(60)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        assert kept.wait(60) and memory.leaks() == []
    finally:
        over.set()
        thread.join()


def test_detach_is_no_advice_for_a_part_of_an_array(with_layer):
    history = [relu_of_layer()[0, 0] for _ in range(3)]
    (leak,) = memory.leaks()
    assert leak.is_part and str(leak).endswith(
        "use `.item()` or `.numpy()` (`.detach()` would keep all of an array of which this is a part)"
    )
    history[:] = [relu_of_layer()]
    (leak,) = memory.leaks()
    assert not leak.is_part and str(leak).endswith("use `.detach()` or `.item()`")
