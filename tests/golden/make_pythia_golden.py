"""Make the golden arrays of Pythia from ``GPTNeoXForCausalLM`` of ``transformers``. Needs torch and transformers.

    python tests/golden/make_pythia_golden.py

writes pythia_tiny.npz and pythia_70m.npz beside this file. All arithmetic is float64 (see ``exact_model``).
"""

import platform
from pathlib import Path

import formula
import numpy as np
import torch
import transformers
from torch.nn import functional as F

HERE = Path(__file__).parent
N_PROBES = 3


def checkpoint_parameters(model: transformers.GPTNeoXForCausalLM) -> dict[str, torch.nn.Parameter]:
    """Parameters under the names of the published checkpoints; in memory transformers 5 says lm_head for embed_out."""
    return {name.replace("lm_head.", "embed_out."): p for name, p in model.named_parameters()}


def exact_model(shape: formula.PythiaShape, weights: dict[str, np.ndarray]) -> transformers.GPTNeoXForCausalLM:
    """The reference model in float64, without the two places where transformers computes in float32 regardless.

    Its eager attention takes the softmax in float32, hence ``sdpa``; its rotary tables are float32, hence the
    replaced ``forward``.
    """
    config = transformers.GPTNeoXConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.d_model,
        num_hidden_layers=shape.n_layers,
        num_attention_heads=shape.n_heads,
        intermediate_size=shape.d_ff,
        hidden_act="gelu",
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        layer_norm_eps=1e-5,
        use_parallel_residual=True,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    model = transformers.GPTNeoXForCausalLM(config).double().eval()
    parameters = checkpoint_parameters(model)
    if {name: tuple(p.shape) for name, p in parameters.items()} != {name: a.shape for name, a in weights.items()}:
        raise ValueError("[golden] parameter names or shapes differ from those of transformers")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(torch.from_numpy(weights[name]))

    rotary_dims = shape.d_model // shape.n_heads // 4

    def rotary_tables(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inv_freq = 10000.0 ** (-torch.arange(0, rotary_dims, 2, dtype=torch.float64) / rotary_dims)
        angles = position_ids[..., None].double() * inv_freq  # (B, T, rotary_dims / 2)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()

    model.gpt_neox.rotary_emb.forward = rotary_tables
    return model


def run(model: transformers.GPTNeoXForCausalLM, ids: np.ndarray, targets: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, T, V) logits and (B, T) token losses; the gradient of the mean token loss is left in ``.grad``."""
    logits = model(torch.from_numpy(ids), use_cache=False).logits
    token_losses = F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(targets).flatten(), reduction="none")
    token_losses.mean().backward()
    if logits.dtype != torch.float64:
        raise TypeError(f"[golden] logits are {logits.dtype} (float64 is wanted)")
    return logits.detach(), token_losses.detach().view(ids.shape)


def versions() -> np.ndarray:
    text = f"python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"
    return np.array(f"{text}, numpy {np.__version__}")


def make_tiny() -> None:
    """Everything in full. The weights are wider than an initialization, so that attention is far from uniform."""
    shape = formula.PYTHIA_TINY
    weights = {}
    for name, parameter_shape in formula.parameter_shapes(shape).items():
        array = formula.formula_weights(name, parameter_shape, shape)
        weights[name] = array * np.float32(3.0) if array.ndim == 2 else array
    tokens = formula.token_ids("tiny/tokens", (2, 14), shape.vocab)  # (B, T + 1)
    ids, targets = tokens[:, :-1], tokens[:, 1:]
    model = exact_model(shape, weights)
    logits, token_losses = run(model, ids, targets)
    arrays = {f"weight/{name}": array for name, array in weights.items()}
    arrays |= {f"grad/{name}": p.grad.numpy() for name, p in checkpoint_parameters(model).items()}
    np.savez_compressed(
        HERE / "pythia_tiny.npz",
        ids=ids.astype(np.int32),
        targets=targets.astype(np.int32),
        logits=logits.numpy(),
        token_losses=token_losses.numpy(),
        loss=token_losses.mean().numpy(),
        versions=versions(),
        **arrays,
    )


def make_70m() -> None:
    """Weights by formula; of logits and gradients only norms, projections and a few entries."""
    shape = formula.PYTHIA_70M
    shapes = formula.parameter_shapes(shape)
    weights = {name: formula.formula_weights(name, s, shape) for name, s in shapes.items()}
    tokens = formula.token_ids("70m/tokens", (1, 65), shape.vocab)  # (B, T + 1)
    ids, targets = tokens[:, :-1], tokens[:, 1:]
    model = exact_model(shape, weights)
    logits, token_losses = run(model, ids, targets)
    names = list(shapes)
    grads = {name: p.grad.numpy() for name, p in checkpoint_parameters(model).items()}
    logits_rows = np.array([0, 1, 31, 63])
    logits_cols = np.arange(0, shape.vocab, 524)
    np.savez_compressed(
        HERE / "pythia_70m.npz",
        ids=ids.astype(np.int32),
        targets=targets.astype(np.int32),
        loss=token_losses.mean().numpy(),
        token_losses=token_losses.numpy(),
        logits_norm=logits.norm().numpy(),
        logits_probes=_projections("logits", logits.numpy()),
        logits_rows=logits_rows,
        logits_cols=logits_cols,
        logits_sample=logits.numpy()[0][np.ix_(logits_rows, logits_cols)],
        names=np.array(names),
        grad_norms=np.array([np.linalg.norm(grads[name].ravel()) for name in names]),
        grad_probes=np.stack([_projections(name, grads[name]) for name in names]),
        versions=versions(),
    )


def _projections(name: str, array: np.ndarray) -> np.ndarray:
    """(N_PROBES,) float64: sums of array * probe."""
    return np.array([np.vdot(formula.probe(i, name, array.shape).astype(np.float64), array) for i in range(N_PROBES)])


if __name__ == "__main__":
    make_tiny()
    make_70m()
    for path in sorted(HERE.glob("*.npz")):
        with np.load(path) as file:
            print(f"{path.name}: {path.stat().st_size} bytes, loss {float(file['loss']):.9f}, {file['versions']}")
