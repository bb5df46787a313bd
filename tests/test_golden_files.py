"""The golden files mean what their README says: a plain numpy Pythia, written from that text, gives the stored figures.

Tests of needle read the same files; this one shows that the files can tell a right model from a nearly right one.
"""

import importlib.util
from math import erf
from pathlib import Path

import numpy as np
import pytest

GOLDEN = Path(__file__).parent / "golden"


def _load_formula():
    spec = importlib.util.spec_from_file_location("golden_formula", GOLDEN / "formula.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def formula():
    return _load_formula()


@pytest.fixture(scope="module")
def tiny():
    with np.load(GOLDEN / "pythia_tiny.npz") as file:
        return dict(file)


def _layer_norm(x, weight, bias, eps):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * weight + bias


def _gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _rotate(x, rotary, base):
    """x (B, H, T, D): the first ``rotary`` dimensions turned by position, halves paired as (i, i + rotary / 2)."""
    half = rotary // 2
    angles = np.arange(x.shape[2])[:, None] * base ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:rotary]
    turned = (a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles))
    return np.concatenate((*turned, x[..., rotary:]), axis=-1)


def _forward(arrays, heads=4, *, tanh=False, eps=1e-5, rotary=2, base=1e4, packed="h3d", causal=True, parallel=True):
    """(B, T, V) float64 logits; the keywords are the mistakes one could make."""
    w = {name[len("weight/gpt_neox.") :]: a.astype(np.float64) for name, a in arrays.items() if "weight/gpt_neox." in name}
    gelu = _gelu_tanh if tanh else lambda x: 0.5 * x * (1 + np.vectorize(erf)(x / np.sqrt(2)))
    x = w["embed_in.weight"][arrays["ids"]]  # (B, T, C)
    B, T, C = x.shape

    def linear(x, name):
        return x @ w[name + ".weight"].T + w[name + ".bias"]

    def norm(x, name):
        return _layer_norm(x, w[name + ".weight"], w[name + ".bias"], eps)

    for layer in ("layers.0.", "layers.1."):
        qkv = linear(norm(x, layer + "input_layernorm"), layer + "attention.query_key_value")
        if packed == "h3d":
            q, k, v = np.moveaxis(qkv.reshape(B, T, heads, 3, C // heads), 3, 0).transpose(0, 1, 3, 2, 4)
        else:
            q, k, v = qkv.reshape(B, T, 3, heads, C // heads).transpose(2, 0, 3, 1, 4)  # each (B, H, T, D)
        q, k = _rotate(q, rotary, base), _rotate(k, rotary, base)
        scores = q @ k.swapaxes(-1, -2) / np.sqrt(C // heads)
        if causal:
            scores = np.where(np.tri(T, dtype=bool), scores, -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        attended = (p / p.sum(-1, keepdims=True) @ v).transpose(0, 2, 1, 3).reshape(B, T, C)
        attended = linear(attended, layer + "attention.dense")
        mlp_in = norm(x if parallel else x + attended, layer + "post_attention_layernorm")
        x = x + attended + linear(gelu(linear(mlp_in, layer + "mlp.dense_h_to_4h")), layer + "mlp.dense_4h_to_h")
    return norm(x, "final_layer_norm") @ arrays["weight/embed_out.weight"].astype(np.float64).T


def _relative(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def test_plain_numpy_reproduces_the_stored_logits_and_loss(tiny):
    logits = _forward(tiny)
    assert _relative(logits, tiny["logits"]) < 1e-12
    log_z = np.log(np.exp(logits).sum(-1))
    token_losses = log_z - np.take_along_axis(logits, tiny["targets"][..., None].astype(np.int64), -1)[..., 0]
    np.testing.assert_allclose(token_losses, tiny["token_losses"], rtol=1e-12)
    np.testing.assert_allclose(token_losses.mean(), tiny["loss"], rtol=1e-12)


@pytest.mark.parametrize(
    "mistake",
    [
        {"tanh": True},
        {"eps": 1e-3},
        {"rotary": 4},
        {"base": 1e3, "rotary": 4},
        {"packed": "3hd"},
        {"causal": False},
        {"parallel": False},
    ],
    ids=str,
)
def test_a_mistake_shows_above_the_tolerance_of_1e_4(tiny, mistake):
    assert _relative(_forward(tiny, **mistake), tiny["logits"]) > 1e-4


def test_stored_gradient_is_the_slope_of_the_loss(tiny):
    """Central differences along one direction per parameter."""
    rng = np.random.default_rng(0)

    def loss(arrays):
        logits = _forward(arrays)
        targets = arrays["targets"][..., None].astype(np.int64)
        return (np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, targets, -1)[..., 0]).mean()

    for name in [n for n in tiny if n.startswith("weight/")]:
        direction = rng.standard_normal(tiny[name].shape)
        step = 1e-5
        up = loss({**tiny, name: tiny[name] + step * direction})
        down = loss({**tiny, name: tiny[name] - step * direction})
        grad = tiny["grad/" + name.removeprefix("weight/")]
        assert abs((up - down) / (2 * step) - np.vdot(grad, direction)) < 1e-6 * max(1.0, np.linalg.norm(grad))
        assert np.linalg.norm(grad) > 1e-3, name


def test_formula_weights_are_those_the_files_were_made_with(formula, tiny):
    shapes = formula.parameter_shapes(formula.PYTHIA_TINY)
    assert {"weight/" + n for n in shapes} == {n for n in tiny if n.startswith("weight/")}
    for name, shape in shapes.items():
        made = formula.formula_weights(name, shape, formula.PYTHIA_TINY)
        assert made.dtype == np.float32
        np.testing.assert_array_equal(made * np.float32(3) if made.ndim == 2 else made, tiny["weight/" + name])


def test_formula_counts_and_spread(formula):
    shapes = formula.parameter_shapes(formula.PYTHIA_70M)
    assert sum(int(np.prod(s)) for s in shapes.values()) == 70_426_624
    name = "gpt_neox.layers.0.mlp.dense_h_to_4h.weight"
    weight = formula.formula_weights(name, shapes[name], formula.PYTHIA_70M)
    assert abs(weight.std() / formula.weight_std(name, formula.PYTHIA_70M) - 1) < 1e-2
    # Rows and names do not repeat one another.
    other = formula.formula_weights(name.replace(".0.", ".1."), shapes[name], formula.PYTHIA_70M)
    for a, b in ((weight, other), (weight[1:], weight[:-1]), (weight[:, 1:], weight[:, :-1])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 5e-3


def test_70m_ids_and_figures_are_consistent(formula):
    with np.load(GOLDEN / "pythia_70m.npz") as file:
        tokens = formula.token_ids("70m/tokens", (1, 65), formula.PYTHIA_70M.vocab)
        np.testing.assert_array_equal(file["ids"], tokens[:, :-1])
        np.testing.assert_array_equal(file["targets"], tokens[:, 1:])
        np.testing.assert_allclose(file["token_losses"].mean(), file["loss"], rtol=1e-12)
        assert list(file["names"]) == list(formula.parameter_shapes(formula.PYTHIA_70M))
        assert (np.abs(file["grad_probes"]) < 6 * file["grad_norms"][:, None]).all()
        assert (file["grad_norms"] > 0).all()
