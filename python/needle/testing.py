"""How needle's kernels are checked, for its own tests and for whoever adds an op or a device.

Gradients are compared with finite differences in float64 only: in float32 the noise of the difference hides a mistake of a percent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .autograd import Tensor, sum_node_list
from .backend_ndarray import BackendDevice
from .errors import NeedleTestError, type_name

# dtype: (forward, gradient), relative to the largest magnitude expected. A case may loosen them with a reason.
TOLERANCES = {
    "float64": (1e-12, 1e-10),
    "float32": (2e-6, 2e-5),
    "float16": (2e-3, 1e-2),
    "bfloat16": (1.6e-2, 6e-2),
}


@dataclass
class OpCase:
    """An op on inputs: ``run(*tensors)`` gives a Tensor from inputs of ``shapes``; ``expected`` is the same in numpy float64.

    make: draws one input, default normal. looser: a factor on the tolerances, with ``reason``. ops: the Op classes it covers.
    dtypes: those it is compared in. differentiable: positions of the inputs whose gradients are checked, default all.
    """

    name: str
    run: Callable[..., Tensor]
    shapes: Sequence[tuple[int, ...]]
    ops: Sequence[str] = ()
    expected: Callable[..., np.ndarray] | None = None
    make: Callable[[np.random.Generator, tuple[int, ...]], np.ndarray] | None = None
    looser: float = 1.0
    reason: str = ""
    dtypes: Sequence[str] = ("float64", "float32", "float16", "bfloat16")
    differentiable: Sequence[int] | None = None

    def inputs(self, seed: int = 0) -> list[np.ndarray]:
        """The inputs in float64, rounded to bfloat16 so that every dtype is given the same numbers."""
        rng = np.random.default_rng(seed)
        make = self.make or (lambda r, shape: r.standard_normal(shape))
        return [_rounded(make(rng, shape)) for shape in self.shapes]


def _rounded(x: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return bits.view(np.float32).astype(np.float64).reshape(np.shape(x))


def assert_close(found, expected, tolerance: float, what: str = "") -> None:
    """|found - expected| <= tolerance * max(1, largest |expected|), NaN and infinities in the same places.

    raises: NeedleTestError (an AssertionError) that names the worst element.
    """
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    if found.shape != expected.shape:
        raise NeedleTestError(f"{what}: shape {found.shape}, expected {expected.shape}")
    finite = np.isfinite(expected)
    wrong = (finite != np.isfinite(found)) | ~(finite | (found == expected) | (np.isnan(found) & np.isnan(expected)))
    if wrong.any():
        at = np.unravel_index(int(wrong.argmax()), wrong.shape)
        raise NeedleTestError(f"{what}: at {tuple(map(int, at))} {found[at]:.9g}, expected {expected[at]:.9g}")
    if not finite.any():
        return
    scale = max(1.0, float(np.abs(expected[finite]).max()))
    error = np.where(finite, np.abs(np.where(finite, found, 0) - np.where(finite, expected, 0)), 0)
    worst = np.unravel_index(int(error.argmax()), error.shape)
    if error[worst] > tolerance * scale:
        raise NeedleTestError(
            f"{what}: at {tuple(map(int, worst))} {found[worst]:.9g}, expected {expected[worst]:.9g} "
            f"(error {error[worst] / scale:.2e}, accepted {tolerance:.2e})"
        )


def _tensors(values: Sequence[np.ndarray], device: BackendDevice, dtype: str, grad: bool = True) -> list[Tensor]:
    return [Tensor(v, device=device, dtype=dtype, requires_grad=grad) for v in values]


def _weights(shape: tuple[int, ...]) -> np.ndarray:
    """What outputs are multiplied with before they are summed: a plain sum would hide errors that cancel."""
    return _rounded(np.random.default_rng(99).uniform(0.5, 1.5, shape))


def gradients(case: OpCase, values: Sequence[np.ndarray], device: BackendDevice, dtype: str) -> tuple:
    """(output, gradient of each input), in numpy, of sum(weights * case)."""
    inputs = _tensors(values, device, dtype)
    out = case.run(*inputs)
    out.backward(Tensor(_weights(out.shape), device=device, dtype=out.dtype))
    grads = [x.grad.numpy() if x.grad is not None else np.zeros(x.shape) for x in inputs]
    return out.numpy(), grads


def gradcheck(case: OpCase, device: BackendDevice, eps: float = 1e-6, tolerance: float = 1e-6) -> None:
    """The op's gradients against central differences, in float64.

    eps: how far an element is moved each way. tolerance: as in ``assert_close``, times the case's ``looser``.
    raises: NeedleTestError if they differ, and for a case that could not tell: constant output, or a gradient that is all zero;
    TypeError for what is no OpCase.
    """
    if not isinstance(case, OpCase):  # PyTorch's takes a function and its inputs
        raise TypeError(f"[gradcheck] case is of type {type_name(case)} (accepted: an OpCase, as OpCase('exp', ops.exp, [(2, 3)]))")
    values = case.inputs()
    out, grads = gradients(case, values, device, "float64")
    if out.size > 1 and np.ptp(np.asarray(out, np.float64)) == 0:
        raise NeedleTestError(f"{case.name}: the output is constant, so the case shows nothing")

    def total(changed: Sequence[np.ndarray]) -> float:
        y = case.run(*_tensors(changed, device, "float64", grad=False)).numpy()
        return float((y * _weights(y.shape)).sum())

    for i in range(len(values)) if case.differentiable is None else case.differentiable:
        numeric = np.zeros(values[i].size)
        for j in range(values[i].size):
            moved = [v.copy() for v in values]
            flat = moved[i].reshape(-1)
            flat[j] += eps
            up = total(moved)
            flat[j] -= 2 * eps
            numeric[j] = (up - total(moved)) / (2 * eps)
        if values[i].size and not np.any(numeric):
            raise NeedleTestError(f"{case.name}: the gradient of input {i} is all zero, so the case shows nothing")
        assert_close(grads[i].reshape(-1), numeric, tolerance * max(case.looser, 1.0), f"{case.name}, gradient {i}")


def check_second_derivative(case: OpCase, device: BackendDevice, eps: float = 1e-5, tolerance: float = 1e-5) -> None:
    """The derivative of the op's gradients along one direction against a central difference, in float64.

    eps, tolerance: as in ``gradcheck``; eps is in units of the direction, which is normal.
    raises: NeedleTestError if they differ, as they do where ``gradient`` is not made of ops and the op has no ``reference``.
    """
    values = case.inputs()
    directions = [_normal(1, x.shape) for x in values]

    def slope(step: float, create_graph: bool = False) -> tuple[list[Tensor], list[Tensor]]:
        """The inputs, moved by ``step``, and the terms of a weighted sum of the gradients there."""
        inputs = _tensors([x + step * d for x, d in zip(values, directions)], device, "float64")
        out = case.run(*inputs)
        out.backward(Tensor(_weights(out.shape), device=device, dtype=out.dtype, requires_grad=False), create_graph=create_graph)
        weights = _tensors([_normal(2, x.shape) for x in values], device, "float64", grad=False)
        return inputs, [(x.grad * w).sum() for x, w in zip(inputs, weights) if x.grad is not None]

    up, down = (sum(part.item() for part in slope(step)[1]) for step in (eps, -eps))
    inputs, parts = slope(0.0, create_graph=True)
    for x in inputs:
        x.grad = None
    total = sum_node_list(parts)
    if total.requires_grad:
        total.backward()
    found = sum(float((x.grad.numpy() * d).sum()) for x, d in zip(inputs, directions) if x.grad is not None)
    what = f"{case.name}, second derivative" + ("" if total.requires_grad else " (of constants: does the op need a reference?)")
    assert_close(found, (up - down) / (2 * eps), tolerance * max(case.looser, 1.0), what)


def _normal(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def check_parity(case: OpCase, device: BackendDevice, reference: BackendDevice, dtype: str) -> None:
    """Output and gradients on ``device`` in ``dtype`` against ``reference`` in float64. raises: NeedleTestError."""
    values = case.inputs()
    found, found_grads = gradients(case, values, device, dtype)
    expected, expected_grads = gradients(case, values, reference, "float64")
    forward, backward = (t * case.looser for t in TOLERANCES[dtype])
    assert_close(found, expected, forward, f"{case.name} on {device}, {dtype}")
    for i, (f, e) in enumerate(zip(found_grads, expected_grads)):
        assert_close(f, e, backward, f"{case.name} on {device}, {dtype}, gradient {i}")


__all__ = ["TOLERANCES", "OpCase", "assert_close", "check_parity", "check_second_derivative", "gradcheck", "gradients"]
