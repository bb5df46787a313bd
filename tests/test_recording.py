"""Recorded kernel calls: made again they compute what the code would, and nothing of others is among them."""

import threading

import numpy as np
import pytest

import needle as ndl
from devices import usable
from needle import backend_ndarray as nd
from needle import ops
from needle.autograd import no_grad
from needle.backend_ndarray import recording
from needle.backend_ndarray.device import BackendDevice
from needle.backend_ndarray.recording import Recording
from needle.errors import DeviceError


def array(device, seed):
    return nd.array(np.random.default_rng(seed).standard_normal((6, 6), np.float32), device=device)


def compute(x, w):
    """Kernels, views, copies, numbers, what is done in place."""
    with no_grad():
        y = ops.gelu(ops.matmul(ndl.Tensor.make_const(x), ndl.Tensor.make_const(w)) + 1) * 2
    y = y.realize_cached_data()
    y[1:3] = y.permute((1, 0))[1:3]
    y.mul_in_place(x)
    return (y[:, ::-1] - y.sum(axis=1, keepdims=True)).astype("float64").max(axis=0)


def test_a_replay_computes_what_the_code_would(device):
    x, w = array(device, 0), array(device, 1)
    recording = Recording(device)
    y = recording.record(lambda: compute(x, w))
    for seed in (0, 2, 3):
        x[:] = array(device, seed)
        recording.replay()
        np.testing.assert_array_equal(y.numpy(), compute(array(device, seed), w).numpy())


def test_a_recording_holds_its_arrays_and_no_longer(host):
    x, w = array(host, 0), array(host, 1)
    before = host.memory_stats()["live_arrays"]
    recording = Recording(host)
    y = recording.record(lambda: compute(x, w))
    inside = host.memory_stats()
    for _ in range(3):
        recording.replay()
    after = host.memory_stats()
    assert after["allocations"] == inside["allocations"] and after["live_arrays"] > before + 4
    del recording, y
    assert host.memory_stats()["live_arrays"] == before


def test_arrays_from_elsewhere_are_constants(cpu):
    x, theirs = array(cpu, 0), np.ones((6, 6), np.float32)
    recording = Recording(cpu)
    y = recording.record(lambda: x * nd.from_dlpack(theirs) + nd.array(theirs, device=cpu))
    x[:] = 3.0
    recording.replay()
    assert (y.numpy() == 4).all()


def test_other_threads_are_not_recorded(host):
    x, w = array(host, 0), array(host, 1)
    go, done = threading.Event(), threading.Event()
    theirs = []

    def other():
        go.wait()
        a = array(host, 5)
        a.mul_in_place(2.0)
        theirs.extend((a, a.numpy()))  # reading is theirs to do
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    recording = Recording(host)

    def ours():
        found = compute(x, w)
        go.set()
        assert done.wait(20)
        return found

    y = recording.record(ours)
    thread.join()
    first = y.numpy()
    recording.replay()
    np.testing.assert_array_equal(theirs[0].numpy(), theirs[1])
    np.testing.assert_array_equal(y.numpy(), first)


def test_one_recording_inside_another(host):
    x = array(host, 0)
    outer, inner = Recording(host), Recording(host)

    def both():
        y = x + 1
        return inner.record(lambda: y * 2)

    z = outer.record(both)
    x[:] = 3.0
    inner.replay()
    assert (z.numpy() != 8).all()  # x + 1 is what it was
    outer.replay()
    assert (z.numpy() == 8).all()


def test_values_cannot_be_read_and_a_failure_leaves_the_device_as_it_was(host):
    x, mod = array(host, 0), host.mod
    for read in (lambda a: a.numpy(), np.from_dlpack):
        with pytest.raises(RuntimeError, match="values are read in a block that is recorded"):
            Recording(host).record(lambda read=read: read(x + 1))
    assert host.mod is mod
    np.testing.assert_array_equal((x + 1).numpy(), x.numpy() + 1)
    with pytest.raises(DeviceError, match="it was made without a module"):
        Recording(BackendDevice("absent", None)).record(lambda: None)
    # It waits while another thread records.
    thread = threading.Thread(target=Recording(host).record, args=(lambda: None,), daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()


@pytest.mark.parametrize("name", ["cpu", "cuda_sim"])
def test_only_what_computes_with_arrays_is_recorded(name):
    """The compiled modules say in their docstrings which functions take arrays."""
    device = usable(name)
    functions = {n: f.__doc__ or "" for n, f in vars(device.mod).items() if callable(f) and not n.startswith("_")}
    others = {n for n, said in functions.items() if "Array" not in said}
    assert {"sync", "memory_stats"} < others <= set(recording._NO_KERNELS)
    x, recorded = array(device, 0), Recording(device)
    y = recorded.record(lambda: (x + 1, device.sync(), device.num_threads())[0])
    assert len(recorded._calls) == 1 and y.shape == x.shape
