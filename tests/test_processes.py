"""The CPU device in its process: several Python threads, children, the end of the interpreter, and how many threads and how much
memory it may take.
"""

import contextlib
import functools
import math
import os
import resource
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import needle as ndl
from devices import usable
from needle.backend_ndarray.ndarray import NDArray


def run(program, preexec_fn=None, within=(), **environment):
    environment = {**os.environ, "PYTHONPATH": str(Path(ndl.__file__).parents[1]), **environment}
    command = [*within, sys.executable, "-c", program]
    return subprocess.run(command, env=environment, preexec_fn=preexec_fn, capture_output=True, text=True, timeout=120)


def test_several_python_threads_at_once(cpu):
    """Products, reductions and copies large enough to let other threads run, with arrays made and freed all along."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 300, 300), dtype=np.float32)
    live, wrong = cpu.memory_stats()["live"], []

    def work(scale):
        a, b = NDArray(x, device=cpu) * scale, NDArray(y, device=cpu)
        first = None
        for _ in range(20):
            found = ((a @ b).permute((1, 0)).compact() + a).sum(axis=0).numpy()
            first = found if first is None else first
            if not np.array_equal(found, first):
                wrong.append(scale)
        if not np.allclose(first, ((x * scale) @ y).T.sum(0) + (x * scale).sum(0), rtol=1e-3, atol=1e-2):
            wrong.append(scale)

    threads = [threading.Thread(target=work, args=(scale,)) for scale in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and cpu.memory_stats()["live"] == live


def test_children_of_a_process_that_has_used_its_threads(cpu):
    program = """
import multiprocessing, numpy as np, needle as ndl
a = ndl.Tensor(np.random.default_rng(0).standard_normal((300, 300)))
expected = (a @ a).numpy()
def same(_):
    return np.array_equal((a @ a).numpy(), expected)
with multiprocessing.get_context("fork").Pool(2) as pool:
    print(all(pool.map(same, range(4))) and same(0))
"""
    done = run(program, NEEDLE_NUM_THREADS="4")
    assert done.returncode == 0 and done.stdout == "True\n", done.stdout + done.stderr


def test_a_child_takes_another_number_of_threads(cpu):
    """It waits for none of its parent's, which it does not have."""
    program = """
import os, signal, needle as ndl
x = ndl.ones(1000, 1000)
(x * 2).sum().numpy()
child = os.fork()
if child == 0:
    signal.alarm(60)
    ndl.cpu().set_num_threads(3)
    os._exit(0 if float((x * 2).sum()) == 2e6 else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = run(program, NEEDLE_NUM_THREADS="4")
    assert done.returncode == 0 and done.stdout == "0\n", done.stdout + done.stderr


def test_children_made_while_another_thread_begins_with_other_threads(cpu):
    program = """
import itertools, os, signal, threading, needle as ndl
x, device = ndl.ones(300, 300).cached_data, ndl.cpu()
mod, out = device.mod, x.copy()
def work():
    for n in itertools.count():  # the pool begins anew in each turn, without the lock of Python
        device.set_num_threads(20 + n % 2)
        mod.ewise_eq(x._handle, x._handle, out._handle)
out = (x == x)
threading.Thread(target=work, daemon=True).start()
codes = set()
for _ in range(40):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(0 if (x * 2).sum().item() == 180000 else 1)
    codes.add(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    if codes != {0}:
        break
print(codes, flush=True)
os._exit(0)
"""
    done = run(program, NEEDLE_NUM_THREADS="20")
    assert done.returncode == 0 and done.stdout == "{0}\n", done.stdout + done.stderr


@pytest.mark.parametrize("device", ["cpu", "cuda_sim"])
def test_children_of_a_process_whose_other_threads_are_at_work(device):
    usable(device)
    program = f"""
import os, signal, threading, needle as ndl
x = ndl.ones(600, 600, device="{device}").cached_data
mod, out = x.device.mod, x.copy()
def work():
    while True:  # allocates, frees and copies without Python's lock
        mod.ewise_eq(x._handle, x._handle, out._handle)
        x.T.numpy()
threading.Thread(target=work, daemon=True).start()
for _ in range(100):
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        os._exit(int((x[:2] + 1).numpy().sum()))
    assert os.waitpid(child, 0)[1] >> 8 == 2400 % 256
"""
    done = run(program)
    assert done.returncode == 0, done.stderr


def test_children_of_a_process_whose_other_threads_multiply(cpu):
    """Products that OpenBLAS makes: a lock of its own is not released in a child."""
    program = """
import os, signal, threading, needle as ndl
x = ndl.ones(200, 200, dtype="float64").cached_data
x @ x
def work():
    while True:
        x @ x
for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
for _ in range(300):
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        os._exit(int((x @ x)[0, 0].item()))
    assert os.waitpid(child, 0)[1] >> 8 == 200
os._exit(0)
"""
    done = run(program)
    assert done.returncode == 0, done.stderr


def test_ids_that_another_thread_changes_meanwhile(cpu):
    """As a loader does that fills its last batch's memory again: garbage or an IndexError, but nothing outside of the arrays."""
    program = """
import itertools, threading, numpy as np, needle as ndl
from needle import init, ops
buffer = np.zeros(20000, "int32")
ids, w = ndl.from_dlpack(buffer), ndl.Tensor(np.zeros((1000, 16)))
logits = ndl.Tensor(np.zeros((20000, 10)))
def change():
    while True:
        buffer[:] = 1 << 30
        buffer[:] = 0
threading.Thread(target=change, daemon=True).start()
calls = (
    lambda: ops.embedding(w, ids).sum().backward(),
    lambda: ops.cross_entropy(logits, ids).sum().backward(),
    lambda: init.one_hot(10, ids),
)
for call in itertools.islice(itertools.cycle(calls), 600):
    try:
        call()
    except IndexError:
        pass
print("whole")
"""
    done = run(program)
    assert (done.returncode, done.stdout) == (0, "whole\n"), done.stderr


def test_children_of_a_process_whose_other_thread_adds_to_a_gradient(cpu):
    program = """
import os, signal, threading, needle as ndl
class Waits(ndl.ops.TensorOp):
    def compute(self, a):
        return a
    def accumulate_gradient(self, out_grad, node, sums):
        inside.set()
        threading.Event().wait()
inside, x = threading.Event(), ndl.Tensor([1.0])
for _ in range(2):  # the second sum is added to in place
    (x * 1).backward(accumulate=True)
threading.Thread(target=lambda: Waits()(x).backward(accumulate=True), daemon=True).start()
inside.wait()
child = os.fork()
if child == 0:
    signal.alarm(30)
    (x * 2).backward(accumulate=True)
    os._exit(int(x.grad.item()))
print(os.waitpid(child, 0)[1] >> 8)
"""
    done = run(program)
    assert done.stdout == "4\n", done.stdout + done.stderr


@pytest.mark.parametrize(
    "doing", ["memory.plan(waits)", "memory.peak_bytes(waits)", "with memory.trace(): waits()", "with memory.LeakCheck(): waits()"]
)
def test_children_of_a_process_whose_other_thread_looks_at_its_memory(cpu, doing):
    """They can do the same, and nothing of what the thread had switched is on."""
    program = f"""
import gc, os, signal, threading, needle as ndl
from needle import autograd, memory
from needle.memory import sites
inside = threading.Event()
def waits(device=None):
    inside.set()
    threading.Event().wait()
def work():
    {doing}
threading.Thread(target=work, daemon=True).start()
inside.wait()
def build(device):
    w = ndl.nn.Parameter(ndl.ones(100, device=device))
    return lambda: (w * 2).sum().backward()
child = os.fork()
if child == 0:
    signal.alarm(30)
    assert gc.isenabled() and autograd._node_made is None and not sites.node_listeners
    mods = [ndl.cpu().mod, ndl.meta().mod]
    assert memory.plan(build).peak_bytes == memory.peak_bytes(build) > 0
    with memory.trace() as traced:
        x = ndl.ones(10)
    assert traced.peak_bytes - traced.start_bytes == 40 and memory.leaks() == []
    assert not any(mod.take_memory_log() for mod in mods)
    os._exit(7)
print(os.waitpid(child, 0)[1] >> 8)
"""
    done = run(program)
    assert done.stdout == "7\n", done.stdout + done.stderr


def test_a_child_of_a_process_whose_other_thread_records(cpu):
    program = """
import os, signal, threading, needle as ndl
from needle.backend_ndarray.recording import Recording
x, inside = ndl.ones(4).cached_data, threading.Event()
mod = x.device.mod
def waits():
    inside.set()
    threading.Event().wait()
threading.Thread(target=Recording(x.device).record, args=(waits,), daemon=True).start()
inside.wait()
child = os.fork()
if child == 0:
    signal.alarm(30)
    again = Recording(x.device)
    y = again.record(lambda: x + 1)
    again.replay()
    os._exit(7 * (x.device.mod is mod and y.numpy()[0] == 2))
print(os.waitpid(child, 0)[1] >> 8, x.device.mod is mod)
"""
    done = run(program)
    assert done.stdout == "7 False\n", done.stdout + done.stderr


def test_a_child_goes_on_with_what_its_own_thread_was_at(cpu):
    program = """
import os, signal, needle as ndl
from needle import memory
def build(device):
    def step():
        if not forked:
            forked.append(os.fork())
        return ndl.ones(100, device=device)
    return step
forked = []
with memory.trace() as traced:
    plan = memory.plan(build)
    x = ndl.ones(10)
if forked == [0]:
    os._exit(7 * (plan.peak_bytes == 400 and traced.peak_bytes - traced.start_bytes == 40))
print(os.waitpid(forked[0], 0)[1] >> 8, plan.peak_bytes)
"""
    done = run(program)
    assert done.stdout == "7 400\n", done.stdout + done.stderr


@pytest.mark.parametrize("doing", ["a + a", "a.T.numpy()"])  # the second holds an object of Python's meanwhile
def test_a_daemon_thread_may_compute_when_the_interpreter_ends(cpu, doing):
    program = f"""
import threading, needle as ndl
a, started = ndl.zeros(1000, 1000).cached_data, threading.Event()
def work():
    while True:
        {doing}
        started.set()
threading.Thread(target=work, daemon=True).start()
started.wait()
"""
    done = run(program)
    assert done.returncode == 0 and not done.stderr, done.stderr


COUNT = "import needle as ndl; print(float((ndl.ones(1000, 1000) * 2).sum()), ndl.cpu().num_threads())"


@pytest.mark.parametrize("number", ["many", "-3", "0", "2.5", "4097", "99999999999"])
def test_a_number_of_threads_that_is_none(cpu, number):
    done = run(COUNT, NEEDLE_NUM_THREADS=number)
    wanted = f"ValueError: [NEEDLE_NUM_THREADS] no such number of threads: {number} (1 to 4096)"
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == wanted
    with pytest.raises(ValueError, match=r"\[set_num_threads\] no such number of threads: -1"):
        cpu.set_num_threads(-1)


def quotas():
    """Cores that the control groups of this process, and those around them, may use."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        folder = Path("/sys/fs/cgroup", "cpu" if controllers else "", group[1:])
        for path in (folder, *folder.parents) if not controllers or "cpu" in controllers.split(",") else ():
            with contextlib.suppress(OSError, ValueError):  # "max": none
                files = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",)
                quota, period = map(int, " ".join((path / name).read_text() for name in files).split())
                if quota > 0:
                    yield math.ceil(quota / period)


def test_there_are_as_many_threads_as_cores(cpu):
    """Those that the process may use: of its affinity mask, less where its control groups have a quota."""
    cores = sorted(os.sched_getaffinity(0))
    cores = cores[: min(quotas(), default=None)]
    for wanted in (cores, cores[:1]):
        done = run(COUNT, preexec_fn=functools.partial(os.sched_setaffinity, 0, wanted), NEEDLE_NUM_THREADS="")
        assert done.stdout == f"2000000.0 {len(wanted)}\n", done.stderr
    assert run("import needle as ndl; print(ndl.cpu().num_threads())", NEEDLE_NUM_THREADS="4096").stdout == "4096\n"


def on_machine(folder, groups, limits, memory="", zfs=""):
    """The beginning of a command that finds these lines in /proc/self/cgroup, /proc/meminfo and a file of ZFS, nothing else in /proc,
    and of the control groups the files of these texts. raises: Skipped where it cannot have mounts of its own.
    """
    (folder / "cgroup").mkdir()
    proc = {"proc/self/cgroup": groups, "proc/meminfo": memory, "proc/spl/kstat/zfs/arcstats": zfs}
    for path, text in {**proc, **{f"cgroup/{name}": text for name, text in limits.items()}}.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    script = 'mount --bind "$0/cgroup" /sys/fs/cgroup && mount --bind "$0/proc" /proc && exec "$@"'
    within = ["unshare", "--map-root-user", "--mount", "sh", "-c", script, folder]
    if shutil.which("unshare") is None or subprocess.run([*within, "true"], capture_output=True).returncode:
        pytest.skip("this process cannot have mounts of its own (unshare)")
    return within


@pytest.mark.parametrize(
    "limits, wanted",
    [
        ({"job/step/cpu.max": "100000 100000"}, 1),
        ({"job/step/cpu.max": "max 100000", "job/cpu.max": "9999 10000", "cpu.max": "30000 10000"}, 1),
        ({"job/step/cpu.max": "20000 10000", "cpu.max": "5000 10000"}, 1),
        ({"cpu.max": "5000 10000"}, 1),  # in a container the name of the group may be the machine's
        ({"job/step/cpu.max": "100001 100000"}, 2),
        ({"job/step/cpu.max": "max 100000", "other/cpu.max": "100000 100000"}, 2),
        ({"cpu/a:b/cpu.cfs_quota_us": "100000", "cpu/a:b/cpu.cfs_period_us": "100000"}, 1),
        ({"cpu/a:b/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_quota_us": "10", "cpu/cpu.cfs_period_us": "100"}, 1),
        ({"cpu/a:b/cpu.cfs_quota_us": "-1", "cpu/a:b/cpu.cfs_period_us": "100000"}, 2),
        ({}, 2),
    ],
)
def test_there_are_as_many_threads_as_control_groups_have_cores(cpu, tmp_path, limits, wanted):
    cores = sorted(os.sched_getaffinity(0))[:2]
    within = on_machine(tmp_path, "2:cpuset:/other\n1:cpuacct,cpu:/a:b\n0::/job/step\nno group", limits)
    affinity = functools.partial(os.sched_setaffinity, 0, cores)
    done = run(COUNT, preexec_fn=affinity, within=within, NEEDLE_NUM_THREADS="")
    assert done.stdout == f"2000000.0 {min(wanted, len(cores))}\n", done.stderr


def memory_of(group, most, sums="", **more):
    """The files of a control group of version 2, or of 1 below "memory": 400 MiB are used, of which 30 can be
    had: of files, and what the kernel knows of them. more: in MiB.
    """
    limit, usage = ("limit_in_bytes", "usage_in_bytes") if group.startswith("memory/") else ("max", "current")
    stat = f"anon {370 << 20}\n{sums}inactive_file {20 << 20}\n{sums}active_file {9 << 20}\nslab_reclaimable {1 << 20}"
    files = {f"memory.{limit}": most, f"memory.{usage}": 400 << 20, "memory.stat": stat}
    files |= {f"memory.{name.replace('_', '.')}": value << 20 for name, value in more.items()}
    return {f"{group}/{name}": text for name, text in files.items()}


IN_GROUPS = "3:pids:/ä\n2:cpuset:/other\n1:hugetlb,memory:/a:b\n0::/job/step\n"


@pytest.mark.parametrize(
    "limits",
    [
        memory_of("job/step", 480 << 20),
        memory_of("job/step", 480 << 20) | memory_of("job", 640 << 20) | memory_of("other", 410 << 20),
        memory_of("job/step", "max") | memory_of("job", 480 << 20),
        memory_of("job/step", 640 << 20) | memory_of(".", 480 << 20),
        memory_of("job/step", "max", high=480) | memory_of("job", 640 << 20, high=560) | memory_of(".", 480 << 20, high=640),
        memory_of("memory/a:b", 480 << 20, "total_") | {"memory/a:b/cpu.max": ""},
        memory_of("memory/a:b", 2**63 - 4096, "total_") | memory_of("memory/.", 480 << 20, "total_"),
    ],
)
def test_there_is_as_much_memory_as_control_groups_have(cpu, tmp_path, limits):
    program = """
from needle import memory
for device in ("cpu_numpy", "cpu"):
    print(memory.capacity(device) >> 20, memory.available(device) >> 20)
"""
    assert run(program, within=on_machine(tmp_path, IN_GROUPS, limits)).stdout == "480 110\n" * 2


@pytest.mark.parametrize(
    "there, limits, files",
    [
        (110, memory_of("job/step", 480 << 20), {}),
        (110, memory_of("job/step", 480 << 20, swap_max=90, swap_current=90), {"memory": "SwapFree: 999999 kB"}),
        (170, memory_of("job/step", 480 << 20, swap_max=90, swap_current=30), {"memory": "SwapFree: 999999 kB"}),
        (130, memory_of("job/step", 480 << 20), {"memory": "SwapFree: 20480 kB"}),
        (310, memory_of("job/step", 480 << 20), {"memory": "SwapFree: 204800 kB"}),
        (130, memory_of("job/step", 480 << 20, swap_max=90, swap_current=30), {"memory": "SwapFree: 20480 kB"}),
        (150, {}, {"memory": "MemTotal: 409600 kB\nMemAvailable: 153600 kB"}),
        (170, {}, {"memory": "MemAvailable: 153600 kB\nSwapFree: 20480 kB"}),
        (110, memory_of("job/step", 480 << 20), {"memory": "MemAvailable: 153600 kB"}),
        (170, {}, {"memory": "MemAvailable: 153600 kB", "zfs": f"c_min 4 {10 << 20}\nsize 4 {30 << 20}"}),
        (550, memory_of("memory/a:b", 2**63 - 4096, "total_"), {"memory": "MemAvailable: 153600 kB\nSwapFree: 409600 kB"}),
        (150, {}, {"memory": "MemAvailable: 153600 kB", "zfs": f"c_min 4 {30 << 20}\nsize 4 {10 << 20}"}),
    ],
)
def test_memory_that_is_not_there_is_an_error_instead_of_the_end_of_the_process(cpu, tmp_path, there, limits, files):
    """32 MiB of it are left to others."""
    program = f"""
import needle as ndl
from needle import errors, memory
device = ndl.cpu()
held = device.empty(({there - 32 << 20},), dtype="uint8")
try:
    device.empty(({there - 31 << 20},), dtype="uint8")
except errors.OutOfMemoryError as error:
    print(error)
small, sizes = device.zeros(100), []
for again in range(2):
    sizes.append(memory.stats(device).reserved >> 20)
    del held
    sizes.append(memory.stats(device).reserved >> 20)
    held = device.empty((20 << 20,), dtype="uint8")
print(*sizes)
"""
    done = run(program, within=on_machine(tmp_path, IN_GROUPS, limits, **files))
    first, *_, last = done.stdout.splitlines()
    assert first.startswith(f"[cpu] out of memory: {there - 31}.00 MiB requested")
    free = 110 if "job/step/memory.max" in limits else 150  # without swap
    assert ("all of cpu() is 480.00 MiB" if there == 310 else f": {free}.00 MiB are free, a little of which") in done.stdout
    assert last == f"{there - 32} 0 20 20", done.stderr  # what was freed was given back, and is kept again after that


def test_the_machine_is_asked_again_for_much_more_and_once_memory_was_given_back(cpu, tmp_path):
    program = """
from pathlib import Path
import needle as ndl
from needle import errors, memory
device = ndl.cpu()
def refused(used, mebibytes):
    Path("/sys/fs/cgroup/job/step/memory.current").write_text(str(used << 20))
    try:
        held.append(device.empty((mebibytes << 20,), dtype="uint8"))
    except errors.OutOfMemoryError:
        return True
held = []
print(refused(400, 1), refused(480, 9), refused(480, 60), refused(400, 60))  # an eighth of what is there is not asked for again
held.clear()
print(refused(480, 60))
held.clear()
memory.empty_cache(device)
print(refused(480, 60))
"""
    done = run(program, within=on_machine(tmp_path, IN_GROUPS, memory_of("job/step", 480 << 20)))
    assert done.stdout == "None None True None\nNone\nTrue\n", done.stderr


@pytest.mark.parametrize("device", ["cpu", "cuda_sim"])
def test_fewer_threads_than_asked_for(device):
    """A thread's stack is as large as that of a process may grow: too large here for any thread."""
    most = resource.getrlimit(resource.RLIMIT_STACK)[1]
    limit = functools.partial(resource.setrlimit, resource.RLIMIT_STACK, (1 << 40, most))
    usable(device)
    program = f"import needle as ndl; print(float((ndl.ones(1000, 1000, device='{device}') * 2).sum()))"
    done = run(program, preexec_fn=limit, NEEDLE_NUM_THREADS="4", OPENBLAS_NUM_THREADS="1")
    assert done.returncode == 0 and done.stdout == "2000000.0\n", done.stderr


def test_ctrl_c_in_backward_leaves_nothing_switched(cpu):
    """At hundreds of moments: neither recording off nor the category of gradients on."""
    program = """
import random, signal, time
import numpy as np, needle as ndl
from needle import autograd, ops
device = ndl.cpu()
w = ndl.Tensor(np.ones((4, 4), "float32"), device=device)
signal.signal(signal.SIGALRM, signal.default_int_handler)
end, interrupts = time.monotonic() + 2, 0
while time.monotonic() < end:
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(2e-5, 6e-4))
        for _ in range(200):  # an interrupt may fall into a callback, where Python drops it
            ops.summation(ops.relu(w @ w) @ w).backward()
    except KeyboardInterrupt:
        interrupts += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert autograd.is_grad_enabled(), interrupts
    assert device.mod.set_current_category(0) == 0, interrupts
print(interrupts > 0)
"""
    done = run(program)
    assert done.stdout == "True\n", done.stderr


def test_ctrl_c_while_kernels_are_recorded_leaves_the_device_as_it_was(cpu):
    """At hundreds of moments: other threads may record, and what is read can be read."""
    program = """
import random, signal, sys, threading, time
import needle as ndl
from needle.backend_ndarray.recording import Recording
x = ndl.ones(4).cached_data
mod = x.device.mod
signal.signal(signal.SIGALRM, signal.default_int_handler)
end, interrupts = time.monotonic() + 2, 0
while time.monotonic() < end:
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(2e-5, 6e-4))
        for _ in range(200):
            Recording(x.device).record(lambda: x + 1)
    except KeyboardInterrupt:
        interrupts += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert x.device.mod is mod, interrupts
    if sys.version_info[:2] == (3, 14):
        continue  # there Ctrl-C leaves any lock taken that comes between its taking and the block of its ``with``
    thread = threading.Thread(target=Recording(x.device).record, args=(x.sum,), daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive(), interrupts
print(interrupts > 0)
"""
    done = run(program)
    assert done.stdout == "True\n", done.stderr
