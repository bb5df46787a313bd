"""A toy transformer trained on the emulated GPU follows the one trained on the CPU, dense and block-sparse."""

import numpy as np
import pytest

import needle as ndl
from devices import usable
from needle.models import Pythia, PythiaConfig, train_step
from needle.optim import AdamW

STEPS = 20


def losses(device, sparse):
    config = PythiaConfig(layers=2, width=64, heads=4, feed_forward=128, vocab_size=256)
    config = config.with_sparse(block=16) if sparse else config
    model = Pythia(config, device=device, seed=1)
    optimizer = AdamW(model.parameter_groups(), lr=3e-3)
    tokens = np.random.default_rng(0).integers(0, 256, (1, 65)) % 17
    ids, targets = (ndl.Tensor(x, device=device, dtype="int32", requires_grad=False) for x in (tokens[:, :-1], tokens[:, 1:]))
    found = []
    for _ in range(STEPS):
        optimizer.reset_grad()
        loss = model.loss(ids, targets)
        loss.backward()
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
        found.append(loss.item())
    return np.array(found)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("name", ["cuda_sim", "cuda"])
def test_a_toy_transformer_trains_alike(name, sparse):
    device = usable(name)
    device.reset_launch_counts()
    found, expected = losses(device, sparse), losses(ndl.cpu(), sparse)
    np.testing.assert_allclose(found, expected, rtol=2e-3)
    assert expected[-1] < 0.7 * expected[0]
    kernels = " ".join(device.launch_counts())
    assert all(part in kernels for part in ("attention", "matmul", "layer_norm", "adam_step", "cross_entropy")), kernels


@pytest.mark.parametrize("name", ["cuda_sim", "cuda"])
def test_a_step_waits_for_the_device_when_all_is_asked_of_it(name, monkeypatch):
    """A GPU that is waited for in between has nothing to do until the next kernels come."""
    device, updates = usable(name), []
    model = Pythia(PythiaConfig(layers=1, width=16, heads=2, feed_forward=32, vocab_size=31), device=device, seed=1)
    optimizer = AdamW(model.parameter_groups())
    ids = ndl.Tensor(np.arange(9).reshape(1, 9), device=device, dtype="int32", requires_grad=False)
    module = device.require()

    def noting(call):
        return lambda *arguments: updates.append(device.launch_counts().get("adam_step_kernel", 0)) or call(*arguments)

    for waits in ("to_numpy", "sync"):
        monkeypatch.setattr(module, waits, noting(getattr(module, waits)))
    device.reset_launch_counts()
    step = train_step(model, optimizer, [(ids, ids)])
    assert set(updates) == {len(optimizer.params)} and step.loss == pytest.approx(np.log(31), rel=0.1)
