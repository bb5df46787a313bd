"""needle's Pythia against the reference implementation's figures in tests/golden."""

import math
from pathlib import Path

import numpy as np
import pytest

import needle as ndl
from golden.formula import PYTHIA_70M, formula_weights, parameter_shapes, probe
from needle import nn, ops
from needle.errors import ShapeError
from needle.models import Pythia, PythiaConfig, load_published, published_state

GOLDEN = Path(__file__).parent / "golden"
TOLERANCE = 1e-4


def relative(found, expected) -> float:
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def ids_of(golden, name, device):
    return ndl.Tensor(golden[name], device=device, dtype="int32", requires_grad=False)


def gradients(model):
    """With the published names and layouts. The parameters are gone afterwards."""
    for p in model.parameters():
        p.data = p.grad
    return {name: array.numpy() for name, array in published_state(model).items()}


@pytest.fixture(params=["cpu_numpy", "cpu"])
def device(request):
    return getattr(ndl, request.param)()


@pytest.fixture
def tiny(device):
    golden = np.load(GOLDEN / "pythia_tiny.npz")
    config = PythiaConfig(layers=2, width=32, heads=4, feed_forward=64, vocab_size=97)
    model = Pythia(config, device=device)
    load_published(model, {k[len("weight/") :]: golden[k] for k in golden.files if k.startswith("weight/")})
    return golden, model


def test_tiny_logits(tiny):
    golden, model = tiny
    logits = model(ids_of(golden, "ids", model.device))
    assert relative(logits.numpy(), golden["logits"]) < TOLERANCE


@pytest.mark.parametrize("through_logits", [False, True])
def test_tiny_loss_and_every_gradient(tiny, through_logits):
    golden, model = tiny
    ids, targets = (ids_of(golden, name, model.device) for name in ("ids", "targets"))
    loss = ops.cross_entropy(model(ids), targets) if through_logits else model.loss(ids, targets)
    loss.backward()
    assert relative(loss.item(), golden["loss"]) < TOLERANCE
    grads = gradients(model)
    names = [k[len("grad/") :] for k in golden.files if k.startswith("grad/")]
    assert set(names) == set(grads)
    for name in names:
        assert relative(grads[name], golden[f"grad/{name}"]) < TOLERANCE, name


def test_published_state_round_trip(tiny):
    golden, model = tiny
    for name, values in published_state(model).items():
        np.testing.assert_array_equal(values, golden[f"weight/{name}"])


def test_70m_loss_logits_and_gradients():
    golden = np.load(GOLDEN / "pythia_70m.npz")
    device = ndl.cpu()
    model = Pythia(PythiaConfig.named("70m", vocab_size=50304), device=device)
    assert sum(p.size for p in model.parameters()) == 70_426_624 == model.config.parameter_count()
    shapes = parameter_shapes(PYTHIA_70M)
    load_published(model, {name: formula_weights(name, shape, PYTHIA_70M) for name, shape in shapes.items()})
    ids, targets = (ids_of(golden, name, device) for name in ("ids", "targets"))
    with ndl.no_grad():
        logits = model(ids).numpy()[0]
    sample = logits[np.ix_(golden["logits_rows"], golden["logits_cols"])]
    assert relative(sample, golden["logits_sample"]) < TOLERANCE
    loss = model.loss(ids, targets)
    loss.backward()
    assert relative(loss.item(), golden["loss"]) < TOLERANCE
    grads = gradients(model)
    for name, norm, probes in zip(golden["names"], golden["grad_norms"], golden["grad_probes"], strict=True):
        grad = grads[str(name)].astype(np.float64)
        assert abs(np.linalg.norm(grad) - norm) < TOLERANCE * norm, name
        for i, expected in enumerate(probes):
            assert abs((grad * probe(i, str(name), grad.shape)).sum() - expected) < TOLERANCE * norm, (name, i)


@pytest.mark.parametrize(
    "name, count", [("14m", 14_067_712), ("31m", 30_494_720), ("70m", 70_426_624), ("160m", 162_322_944), ("410m", 405_334_016)]
)
def test_published_sizes(name, count):
    assert PythiaConfig.named(name).parameter_count() == count
    assert PythiaConfig.named(name.upper()) == PythiaConfig.named(f"pythia-{name}") == PythiaConfig.named(name)


@pytest.mark.parametrize("name", ["layers", "width", "heads", "feed_forward", "vocab_size", "max_seq_len"])
def test_a_model_of_no_size(name):
    for value in (0, 1.5, "8"):
        with pytest.raises(ShapeError, match=rf"\[pythia\] {name} is {value!r} \(accepted: a whole number of at least 1\)"):
            PythiaConfig(**{name: value})
    for number in ("rotary_fraction", "rotary_base", "eps", "dropout"):
        for value in (-0.1, float("nan"), float("inf"), "0.1", True):
            with pytest.raises(ShapeError, match=rf"\[pythia\] {number} is {value!r} \(accepted: "):
                PythiaConfig(**{number: value})
    for layers in (-1, 1.5, 7, (3, 4), (1.5,)):
        with pytest.raises(ShapeError, match=r"\[pythia\] checkpoint_layers is .* \(accepted: 0 to 6 layers\)"):
            PythiaConfig(checkpoint_layers=layers)
    with pytest.raises(ShapeError, match=r"\[pythia\] width / heads is 512 \(accepted: heads of at most 256 features\)"):
        PythiaConfig(width=512, heads=1)
    assert PythiaConfig(width=512, heads=2).head_width == 256
    assert PythiaConfig(24, np.int32(2048)).flops_per_token(64) == PythiaConfig(24, 2048).flops_per_token(64) > 2**31


def test_biases_of_a_head_do_not_decay():
    model = Pythia(PythiaConfig(layers=1, width=32, heads=2, feed_forward=64, vocab_size=61))
    model.head = nn.Linear(32, 2)
    decay, rest = (group["params"] for group in model.parameter_groups(0.2))
    assert {p.ndim for p in rest} == {1, 2} and model.head.bias in rest and model.head.weight in decay
    assert len(decay) == 7 and set(decay) | set(rest) == set(model.parameters())
    assert [group["weight_decay"] for group in model.parameter_groups(0.2)] == [0.2, 0]
    assert [group["weight_decay"] for group in model.parameter_groups()] == [0.1, 0]


def test_models_of_other_seeds_drop_other_elements():
    config, x = PythiaConfig(layers=1, width=32, heads=2, feed_forward=64, vocab_size=61, dropout=0.5), ndl.ones(64)
    first, again, other = (Pythia(config, seed=seed).dropout(x).numpy() for seed in (1, 1, 2))
    assert np.array_equal(first, again) and not np.array_equal(first, other)


def test_the_scale_of_the_first_weights():
    """GPT-NeoX's small_init and wang_init."""
    model = Pythia(PythiaConfig(layers=3, width=64, heads=2, feed_forward=256, vocab_size=500, max_seq_len=8), device=ndl.cpu())
    small, output = math.sqrt(2 / (5 * 64)), 2 / (3 * 8)
    for name, p in model.named_parameters():
        if p.ndim == 2:
            expected = output if name.endswith(("dense.weight", "dense_4h_to_h.weight")) else small
            assert p.numpy().std() == pytest.approx(expected, rel=0.06), name
