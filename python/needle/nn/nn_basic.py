"""Modules: parameters by attribute, and the basic layers."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import NoneType
from typing import Any

import numpy as np

from .. import dtype as dt
from .. import init, ops
from ..autograd import Tensor, check_tensors, is_grad_enabled, rematerialize
from ..backend_ndarray import kernels
from ..backend_ndarray.host_memory import PARAMETER
from ..backend_ndarray.ndarray import NDArray
from ..backend_selection import Device
from ..errors import (
    CheckpointError,
    DTypeError,
    GraphError,
    ShapeError,
    check_count,
    check_flag,
    check_number,
    check_state,
    type_name,
)


def _in_place(name: str) -> Callable[[Any, Any], Any]:
    """The in-place form of an operator: without it ``p -= lr * p.grad`` would replace the Parameter by another Tensor."""
    operation = getattr(operator, {"div": "truediv"}.get(name, name))

    def write(self, other):
        given = other.realize_cached_data() if isinstance(other, Tensor) else other
        if is_grad_enabled() or not self.realize_cached_data().combine_in_place(name, given):
            self[...] = operation(self, other)
        return self

    return write


_next_number = itertools.count().__next__


class Parameter(Tensor):
    """A Tensor that a Module's ``parameters()`` finds. Its memory counts as ``parameter``.

    raises: DTypeError for integers, unless it requires no gradient.
    """

    _number: int  # Parameters are numbered in the order in which they are made

    __iadd__, __isub__, __imul__, __itruediv__ = map(_in_place, ("add", "sub", "mul", "div"))

    def _setup(self, data, requires_grad: bool) -> None:
        if requires_grad and not dt.is_float(data.dtype):
            raise DTypeError(f"[Parameter] dtype is {data.dtype} (accepted: floating, or requires_grad=False)")
        super()._setup(data, requires_grad)
        data.category = PARAMETER
        self._number = _next_number()

    def __setitem__(self, index, value) -> None:
        """Writes into the array. raises: GraphError while a graph is recorded: the Parameter would become the result of an op,
        which no optimizer updates.
        """
        if self.requires_grad and is_grad_enabled():
            raise GraphError("[setitem] a Parameter is a leaf (accepted: under no_grad, which writes into its array)")
        super().__setitem__(index, value)


class Buffer(Tensor):
    """A Tensor of a Module's state that is not trained, such as a running mean: in ``state_dict()``, not in ``parameters()``."""

    def __init__(self, array: Any, **kwargs: Any):
        super().__init__(array, requires_grad=False, **kwargs)


def _replacement_of(before: Parameter | Buffer, value: Any, what: str) -> Parameter | Buffer:
    """``value`` as a Parameter or a Buffer, whichever ``before`` is. raises: TypeError."""
    if isinstance(value, Tensor) and isinstance(before, Buffer):
        return Buffer(value)
    if isinstance(value, Tensor) and value.is_leaf():
        return Parameter(value, requires_grad=value.requires_grad)
    got = "the result of an op" if isinstance(value, Tensor) else f"of type {type_name(value)}"
    raise TypeError(f"{what} would be {got} in place of a {type(before).__name__} (accepted: a Tensor that no op made, or None)")


def _parts(value: object, path: str = "") -> Iterator[tuple[str, Parameter | Buffer | Module]]:
    """(path, part) of each Parameter, Buffer and Module in ``value``, also within lists, tuples and dicts; not inside modules."""
    if isinstance(value, (Parameter, Buffer, Module)):
        yield path, value
    elif isinstance(value, (dict, list, tuple)):
        items = list(value.items()) if isinstance(value, dict) else enumerate(value)  # another thread may add attributes
        for key, item in items:
            yield from _parts(item, f"{path}.{key}" if path else str(key))


def _all_parts(value: object, path: str = "") -> Iterator[tuple[str, Parameter | Buffer | Module]]:
    """As ``_parts``, and behind each module what is inside of it."""
    for inner, part in _parts(value, path):
        yield inner, part
        if isinstance(part, Module):
            yield from _all_parts(part.__dict__, inner)


def _named(value: object) -> Iterator[tuple[str, Parameter | Buffer]]:
    return ((path, part) for path, part in _all_parts(value) if not isinstance(part, Module))


def _by_path(module: Module) -> dict[str, Parameter | Buffer]:
    found: dict[str, Parameter | Buffer] = {}
    for path, t in _named(module):
        if path in found:
            raise CheckpointError(f"[state_dict] two tensors have the path {path} (accepted: keys that differ as text, no dots)")
        found[path] = t
    return found


def _unpack_params(value: object) -> list[Tensor]:
    parts = (part for _, part in _parts(value))
    return [p for part in parts for p in (part.parameters() if isinstance(part, Module) else [part]) if isinstance(p, Parameter)]


def _child_modules(value: object) -> list[Module]:
    return [part for _, part in _all_parts(value) if isinstance(part, Module)]


class Module:
    """A layer, or a network of them: it has parameters and a ``forward``, which calling it runs.

    Parameters are found in the attributes, in the order in which these were set. The layers of ``needle.nn`` take the ``device``
    (default ``cpu()``) and the ``dtype`` (default float32) of their parameters.
    They raise ShapeError for sizes that are none and inputs whose shape does not fit, DTypeError for an input that is no Tensor,
    and DeviceError for one on another device.
    """

    training = True  # set by train() and eval()
    rematerialized = False  # set by nn.remat: calls keep no inner arrays for backward

    def __setattr__(self, name: str, value: Any) -> None:
        """A Tensor assigned in place of a Parameter or a Buffer becomes one, on the same array: ``parameters()`` and the state have
        it then; an optimizer that was made before has the old one. A Parameter requires a gradient if that Tensor did.

        raises: TypeError in the place of either for what is no Tensor, None or Module; in that of a Parameter for what an op made,
        whose history would be lost (after ``del`` it can be assigned, and is no parameter then); and for what holds this module,
        whose parts there would be no end of.
        """
        if isinstance(value, (Module, dict, list, tuple)) and any(part is self for _, part in _all_parts(value)):
            name = f"[{type(self).__name__}] {name}"
            raise TypeError(f"{name} would hold the module that it is part of (accepted: modules that do not know theirs)")
        before = self.__dict__.get(name)
        if isinstance(before, (Parameter, Buffer)) and not isinstance(value, (Parameter, Buffer, Module, NoneType)):
            value = _replacement_of(before, value, f"[{type(self).__name__}] {name}")
        super().__setattr__(name, value)

    def parameters(self) -> list[Tensor]:
        """All parameters, also of modules in attributes, lists, tuples and dicts; a shared one is listed once."""
        return list(dict.fromkeys(_unpack_params(self.__dict__)))

    def named_parameters(self) -> list[tuple[str, Parameter]]:
        """(dotted attribute path, parameter) for each of ``parameters()``; a shared one has the first of its paths."""
        paths: dict[Parameter, str] = {}
        for path, t in _named(self):
            if isinstance(t, Parameter):
                paths.setdefault(t, path)
        return [(path, p) for p, path in paths.items()]

    def _children(self) -> list[Module]:
        return _child_modules(self.__dict__)

    def state_dict(self) -> dict[str, np.ndarray]:
        """A copy of every Parameter and Buffer in numpy, by path; a shared one is there under each of its paths.

        raises: CheckpointError where two have one path, by the keys of dicts.
        """
        return {name: t.numpy() for name, t in _by_path(self).items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copies the arrays into the Parameters and Buffers with these paths.

        raises: CheckpointError if paths or shapes differ, DTypeError for what is no number; nothing has changed then.
        """
        check_state(state)
        mine = _by_path(self)
        if set(mine) != set(state):
            missing, extra = sorted(set(mine) - set(state)), sorted(set(state) - set(mine))
            raise CheckpointError(f"[load_state_dict] names differ: missing {missing[:5]}, unexpected {extra[:5]}")
        found = {}
        for name, p in mine.items():
            values = state[name]
            if isinstance(values, Tensor):  # a Tensor of a Tensor would share its memory
                values = values.realize_cached_data()
            elif hasattr(values, "detach"):  # torch's, which numpy refuses as long as it requires a gradient
                values = values.detach()
            if str(getattr(values, "dtype", "")).removeprefix("torch.") not in dt.ROWS:  # lists, objects: made here, or refused
                values = NDArray(values, p.device, p.dtype)
            if np.shape(values) != p.shape:
                raise CheckpointError(f"[load_state_dict] {name} is {np.shape(values)} (accepted: {p.shape})")
            found[name] = values
        for name, p in mine.items():
            p.data = Tensor(found.pop(name), device=p.device, dtype=p.dtype, requires_grad=False)

    def to(self, device: Device | str) -> Module:
        """Moves every Parameter and Buffer, and their gradients, to ``device``; the objects stay the same. Returns self.

        An optimizer's states are not moved: make the optimizer afterwards. raises: DeviceError; OutOfMemoryError, after which
        nothing has moved.
        """
        mine = dict.fromkeys(t for _, t in _named(self))
        moved = [(t.realize_cached_data().to(device), t.grad and t.grad.to(device)) for t in mine]
        for t, (array, grad) in zip(mine, moved):
            t.cached_data, t.grad = array, grad
        return self

    def eval(self) -> Module:
        """Sets ``training`` to False here and in every module inside: Dropout then changes nothing, and BatchNorm uses its running
        statistics. Returns self.
        """
        return self.train(False)

    def train(self, mode: bool = True) -> Module:
        """Sets ``training`` here and, by their own ``train``, in the modules inside: one that defines it may keep a part of it in
        evaluation. Returns self. raises: TypeError for what is neither True nor False.
        """
        if not isinstance(mode, bool):
            raise TypeError(f"[{type(self).__name__}] train() was given a {type_name(mode)} (accepted: True or False)")
        self.training = mode
        for _, part in _parts(self.__dict__):
            if isinstance(part, Module):
                part.train(mode)
        return self

    def forward(self, *args, **kwargs):
        raise NotImplementedError(f"[{type(self).__name__}] has no forward")

    def __repr__(self) -> str:
        """The class, the numbers in its attributes, the shapes of its tensors, and the modules inside; of equal ones that follow
        one another in a list, the first.
        """
        told: dict[str, Any] = {
            k: v for k, v in vars(self).items() if isinstance(v, (bool, int, float, str)) and k not in vars(Module)
        }
        parts = list(_parts(self.__dict__))
        told.update((path, part.shape) for path, part in parts if isinstance(part, Tensor))
        inside = [(path, repr(part)) for path, part in parts if isinstance(part, Module)]
        text = f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in told.items())})"
        for (_, described), alike in itertools.groupby(inside, lambda part: (part[0].rstrip("0123456789"), part[1])):
            paths = [path for path, _ in alike]
            name = paths[0] if len(paths) == 1 else f"{paths[0]} to {paths[-1]}"
            text += f"\n{name}: {described}".replace("\n", "\n  ")
        return text

    def __call__(self, *args, **kwargs):
        if self.rematerialized:
            with rematerialize():
                return self.forward(*args, **kwargs)
        return self.forward(*args, **kwargs)


class Identity(Module):
    """forward(x) is x."""

    def forward(self, x):
        return x


class Linear(Module):
    """x (..., in) @ weight (in, out) + bias (1, out) -> (..., out); both Kaiming-uniform, the weight drawn first.

    raises: TypeError for a ``bias`` that is neither True nor False.
    """

    def __init__(self, in_features, out_features, bias=True, device=None, dtype="float32"):
        super().__init__()
        check_flag("Linear", "bias", bias)  # Embedding has the device in this place
        self.in_features = check_count("Linear", "in_features", in_features, 0)
        self.out_features = check_count("Linear", "out_features", out_features, 0)
        kwargs = {"device": device, "dtype": dtype}
        self.weight = Parameter(init.kaiming_uniform(self.in_features, self.out_features, **kwargs))
        self.bias = None
        if bias:
            self.bias = Parameter(ops.reshape(init.kaiming_uniform(self.out_features, 1, **kwargs), (1, self.out_features)))

    def forward(self, X: Tensor) -> Tensor:
        return ops.linear(X, self.weight, self.bias)


class Flatten(Module):
    """(B, ...) -> (B, product of the rest). raises: ShapeError for a 0-d input."""

    def forward(self, X: Tensor) -> Tensor:
        check_tensors("Flatten", X)
        if X.ndim == 0:
            raise ShapeError("[Flatten] X is () (accepted: (batch, ...))")
        return ops.reshape(X, (X.shape[0], math.prod(X.shape[1:])))


class ReLU(Module):
    """max(x, 0), elementwise."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.relu(x)


class Tanh(Module):
    """Hyperbolic tangent, elementwise."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.tanh(x)


class SiLU(Module):
    """x / (1 + e^-x), elementwise."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.silu(x)


class GELU(Module):
    """Gaussian error linear unit; approximate: "none" (erf) or "tanh". raises: ValueError for another."""

    def __init__(self, approximate: str = "none"):
        super().__init__()
        ops.GELU(approximate)  # refuses what there is not
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        return ops.gelu(x, self.approximate)


def _check_module(op: str, name: str, module: Any) -> None:
    """raises: TypeError for what cannot be called, such as a list of modules, and for a class of modules."""
    if isinstance(module, type):  # which can be called, but gives a module
        raise TypeError(f"[{op}] {name} is the class {module.__name__} (accepted: a module)")
    if not callable(module):
        raise TypeError(f"[{op}] {name} is of type {type_name(module)} (accepted: modules, not in a list)")


class Sequential(Module):
    """Modules one after the other, each applied to the result of the one before.

    ``len()``, indices and iteration give the modules; a slice is a Sequential of the same modules.
    raises: TypeError for what cannot be called, such as a list of modules, and for a class of modules.
    """

    def __init__(self, *modules: Module):
        super().__init__()
        for i, module in enumerate(modules):
            _check_module("Sequential", f"module {i}", module)
        self.modules = modules

    def __len__(self) -> int:
        return len(self.modules)

    def __bool__(self) -> bool:
        return True  # like every Module, also without any modules

    def __iter__(self) -> Iterator[Module]:
        return iter(self.modules)

    def __getitem__(self, index: int | slice) -> Module:
        return Sequential(*self.modules[index]) if isinstance(index, slice) else self.modules[index]

    def forward(self, x: Tensor) -> Tensor:
        for module in self.modules:
            x = module(x)
        return x


class SoftmaxLoss(Module):
    """Mean over the batch of logsumexp(logits) - logits[y], in nats: logits (N, C), y (N,) whole numbers -> (1,), as of a sum.

    ``ops.cross_entropy`` is the same over any axes in front, but leaves out targets of -100. Here every target counts.
    raises: ShapeError for other shapes; IndexError for a class outside 0..C-1; DTypeError for logits that are no floats.
    """

    def forward(self, logits: Tensor, y: Tensor) -> Tensor:
        check_tensors("SoftmaxLoss", logits, y)
        if logits.ndim != 2 or y.shape != logits.shape[:1]:
            raise ShapeError(f"[SoftmaxLoss] logits are {logits.shape}, y is {y.shape} (accepted: (N, C) and (N,))")
        return ops.cross_entropy(logits, y, ignore_index=kernels.IGNORE_NOTHING)


class BatchNorm1d(Module):
    """Batch normalization of (N, dim): by the batch's statistics in training, by the running ones in evaluation.

    momentum: how much one batch counts in the running statistics. Their variance is the biased one, as in the course. Statistics
    are float32 or wider: the squares of float16 values would overflow from 256 on.
    raises: ShapeError for another shape; TypeError or ValueError for a wrong eps (0 or more) or momentum (0 to 1).

    source: Ioffe & Szegedy 2015, arXiv:1502.03167.
    """

    def __init__(self, dim, eps=1e-5, momentum=0.1, device=None, dtype="float32"):
        super().__init__()
        check_number(type(self).__name__, "eps", eps)
        check_number(type(self).__name__, "momentum", momentum, most=1)
        self.dim, self.eps, self.momentum = check_count(type(self).__name__, "dim", dim, 0), eps, momentum
        self.weight = Parameter(init.ones(dim, device=device, dtype=dtype))
        self.bias = Parameter(init.zeros(dim, device=device, dtype=dtype))
        wide = dt.accumulator(self.weight.dtype)
        self.running_mean = Buffer(init.zeros(dim, device=device, dtype=wide))
        self.running_var = Buffer(init.ones(dim, device=device, dtype=wide))

    def forward(self, x: Tensor) -> Tensor:
        check_tensors("batch_norm", x)
        if x.ndim != 2 or x.shape[1] != self.dim:
            raise ShapeError(f"[batch_norm] x is {x.shape} (accepted: (N, {self.dim}))")
        if self.training:
            out = ops.batch_norm(x, self.weight, self.bias, self.eps)
            _, mean, var = out.realize_cached_data()
            mean, var = self._followed(self.running_mean, mean), self._followed(self.running_var, var)
            self.running_mean, self.running_var = mean, var  # both, or none where memory runs out
            return out[0]
        scale = self.weight / ops.sqrt(self.running_var + self.eps)  # so that one pass over x is enough
        y = (ops.astype(x, dt.accumulator(x.dtype)) - self.running_mean) * scale + self.bias
        return ops.astype(y, dt.promote(x.dtype, self.weight.dtype))

    def _followed(self, running: Tensor, found: NDArray) -> Tensor:
        """What a running statistic becomes; by arrays, since the time of a small batch goes into the calls of ops."""
        return Tensor.make_const(running.realize_cached_data() * (1 - self.momentum) + found * self.momentum)


class BatchNorm2d(BatchNorm1d):
    """BatchNorm1d over the channels of (N, C, H, W)."""

    def forward(self, x: Tensor) -> Tensor:
        check_tensors("batch_norm", x)
        if x.ndim != 4 or x.shape[1] != self.dim:
            raise ShapeError(f"[batch_norm] x is {x.shape} (accepted: (N, {self.dim}, H, W))")
        n, c, h, w = x.shape
        flat = ops.reshape(ops.permute(x, (0, 2, 3, 1)), (n * h * w, c))
        return ops.permute(ops.reshape(super().forward(flat), (n, h, w, c)), (0, 3, 1, 2))


class LayerNorm1d(Module):
    """Layer normalization of (N, dim) over dim, biased variance. source: Ba et al. 2016, arXiv:1607.06450.

    dim: its length, or as PyTorch has it a tuple of that.
    raises: TypeError or ValueError for an eps that is no number of at least 0.
    """

    def __init__(self, dim, eps=1e-5, device=None, dtype="float32"):
        super().__init__()
        check_number(type(self).__name__, "eps", eps)
        if isinstance(dim, (tuple, list)) and len(dim) == 1:
            (dim,) = dim
        self.dim, self.eps = check_count(type(self).__name__, "dim", dim, 0), eps
        self.weight = Parameter(init.ones(dim, device=device, dtype=dtype))
        self.bias = Parameter(init.zeros(dim, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        check_tensors("layer_norm", x)
        if x.dtype != self.weight.dtype:
            x = ops.astype(x, self.weight.dtype)
        return ops.layer_norm(x, self.weight, self.bias, self.eps)


class LayerNorm(LayerNorm1d):
    """Layer normalization over the last axis, of length dim, of any shape."""


_dropping = ContextVar("dropping", default=True)


@contextmanager
def no_dropout() -> Iterator[None]:
    """Inside, in this thread, Dropout changes nothing. ``eval()`` would also switch off the dropout of a step in another thread."""
    before = _dropping.get()
    _dropping.set(False)
    try:
        yield
    finally:
        _dropping.set(before)  # reset() wants the context that it was set in: a generator may be closed in another


class Dropout(Module):
    """In training x / (1 - p) with probability 1 - p, else 0; in evaluation x. Draws from numpy's global stream.

    raises: TypeError or ValueError for a p that is no number from 0 to 1.
    """

    def __init__(self, p=0.5):
        super().__init__()
        check_number(type(self).__name__, "p", p, most=1)
        self.p = p

    def _passes_all(self) -> bool:
        return not self.training or self.p == 0 or not _dropping.get()

    def forward(self, x: Tensor) -> Tensor:
        check_tensors("Dropout", x)
        if self._passes_all():
            return x
        if self.p == 1:
            return x * 0
        mask = init.randb(*x.shape, p=1 - self.p, device=x.device, dtype=x.dtype)
        return x * mask / (1 - self.p)


class SeededDropout(Dropout):
    """``ops.dropout`` in training. Its masks depend on two numbers alone: ``seed``, and ``drawn``, which counts the random numbers
    used so far in groups of four.

    So a mask can be computed again on any device, and a resumed run continues with the masks it would have had. Two objects with
    the same seed drop the same elements: the layers of a model share one object, or have different seeds.
    raises, when called: DTypeError for integers, ValueError for a seed that is no whole number from 0 to 2**64 - 1.
    """

    def __init__(self, p: float, seed: int):
        super().__init__(p)
        self.seed, self.drawn = seed, 0

    def forward(self, x: Tensor) -> Tensor:
        check_tensors("SeededDropout", x)
        if self._passes_all():
            return x
        offset, self.drawn = self.drawn, self.drawn + -(-x.size // 4)
        return ops.dropout(x, self.p, self.seed, offset)


class Residual(Module):
    """fn(x) + x; fn keeps the shape. raises: TypeError for what is no module, as Sequential does."""

    def __init__(self, fn: Module):
        super().__init__()
        _check_module("Residual", "fn", fn)
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x) + x
