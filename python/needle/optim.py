"""Optimizers: they update parameters in place and keep their state in float32, or float64 for float64."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from numbers import Real
from typing import Any

import numpy as np

from . import dtype as dt
from .autograd import Tensor
from .backend_ndarray import NDArray, kernels
from .backend_ndarray.host_memory import OPTIMIZER_STATE
from .backend_ndarray.ndarray import check_one_device, full
from .errors import CheckpointError, DeviceError, DTypeError, ShapeError, check_count, check_number, check_state, shown, type_name

_Update = tuple[dict[str, Any], Tensor, NDArray, NDArray]


def _several(params: Any) -> list:
    """``params`` as a list. raises: TypeError for a single Tensor, whose rows would pass for parameters, for a dict, and for what
    is not iterable.
    """
    if isinstance(params, (Tensor, dict)) or not isinstance(params, Iterable):
        kind = type(params).__name__
        raise TypeError(f"[optim] params is of type {kind} (accepted: several Tensors, such as model.parameters())")
    return list(params)


class Optimizer:
    """Holds the parameters that ``step`` updates in place. A parameter without a gradient is left as it is. One whose array is not
    row-major, or is a part of a larger one (a transposed view, say, or a slice), gets a copy of its own at its first step.

    raises: TypeError for what is no Tensor; ValueError for no parameter at all, one that is there twice, and the result of an op.
    """

    # A subclass names its attributes that are dicts of arrays by parameter: ``make_states`` fills them, a checkpoint has them.
    STATES: tuple[str, ...] = ()

    def __init__(self, params: Iterable[Tensor]):
        self.params: list[Tensor] = _several(params)
        for p in self.params:
            if not isinstance(p, Tensor):
                raise TypeError(f"[optim] params holds a {type_name(p)} (accepted: Tensors)")
            if p.op is not None:  # a Tensor of its own, which the next forward makes anew: the update would be lost
                raise ValueError(f"[optim] a parameter of shape {p.shape} is the result of {p.op.name} (accepted: no op's result)")
        if not self.params:
            raise ValueError("[optim] there are no parameters (accepted: at least one; a Module has those that are nn.Parameter)")
        if len(set(self.params)) < len(self.params):
            twice = next(p for p in self.params if self.params.count(p) > 1)
            raise ValueError(f"[optim] a parameter of shape {twice.shape} is there twice (accepted: each once)")

    def step(self) -> None:
        """Updates the parameters by their gradients, which stay."""
        raise NotImplementedError

    def reset_grad(self) -> None:
        """Drops every gradient."""
        for p in self.params:
            p.grad = None

    def skip_step(self) -> None:
        """Called where ``step`` would be, for gradients that are not to be used."""

    def state_spec(self, kind: str, p: Tensor) -> tuple[tuple[int, ...], str]:
        """Shape and dtype of the state ``kind``, a name in STATES, of a parameter: its own, floats at least as wide as float32. A
        subclass with other states, a number for each row for example, gives theirs.
        """
        return p.shape, dt.accumulator(p.dtype)

    def make_states(self, params: Iterable[Tensor]) -> None:
        """Makes those STATES that ``params`` have none of: zeros as ``state_spec`` has them, which count as optimizer state as long
        as they are changed in place (``m[:] = ..``). All are made at once: a ``step`` that calls this before its first update, and
        runs out of memory, has changed nothing.

        raises: ShapeError for a state of another shape than its parameter's should have by now, DeviceError for one on another
        device, TypeError for a name in STATES that is no dict's, and for a single Tensor.
        """
        states = self._states()
        made: dict[str, dict[Tensor, NDArray]] = {kind: {} for kind in states}
        for p in _several(params):
            w = p.realize_cached_data()
            for kind, of in states.items():
                have = of.get(p)
                shape, dtype = self.state_spec(kind, p)
                if have is not None:
                    if have.shape != shape:
                        found = f"a state is {have.shape}, its parameter is {w.shape}, whose should be {shape}"
                        raise ShapeError(f"[optim] {found} (accepted: a new optimizer, or another state_spec)")
                    check_one_device("optim", w, have)
                else:
                    state = made[kind][p] = full(shape, 0, dtype, w.device)
                    state.category = OPTIMIZER_STATE
        for kind, of in states.items():
            of.update(made[kind])

    def _states(self) -> dict[str, dict[Tensor, NDArray]]:
        """The dict of each of STATES. raises: TypeError for what is none."""
        states = {kind: getattr(self, kind, None) for kind in self.STATES}
        for kind, of in states.items():
            if not isinstance(of, dict):
                found = "absent" if of is None else f"of type {type_name(of)}"
                raise TypeError(f"[{type(self).__name__}] {kind}, which STATES names, is {found} (accepted: a dict)")
        return states  # type: ignore[return-value]

    def named_states(self, names: Sequence[str] | None = None) -> dict[str, NDArray]:
        """The state arrays themselves, which the next step changes, by name: ``m.0`` is the ``m`` of the first parameter.

        names: of ``params``, in their order, instead of numbers. raises: ValueError for another count of names.
        """
        by_name = self._by_name(names)
        return {f"{kind}.{name}": of[p] for kind, of in self._states().items() for name, p in by_name.items() if p in of}

    def state_dict(self, names: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        """A copy of ``named_states`` in numpy; of Adam and AdamW also ``t``, the count of steps, and ``t.0`` where the first
        parameter had a gradient in fewer.

        Hyperparameters such as the learning rate are not in it: give them to the constructor again.
        """
        return {name: array.numpy() for name, array in self.named_states(names).items()}

    def load_state_dict(self, state: Mapping[str, Any], names: Sequence[str] | None = None) -> None:
        """Continues from what ``state_dict`` gave. A parameter that is not in it starts anew, like one without a gradient so far.

        raises: CheckpointError if it is another optimizer's or another model's; nothing has changed then.
        """
        vars(self).update(self._read_state(state, names))

    def _read_state(self, state: Mapping[str, Any], names: Sequence[str] | None) -> dict[str, Any]:
        """The attributes that ``state`` gives. They are set in one go: an interrupt leaves the new ones or the old."""
        check_state(state)
        by_name = self._by_name(names)
        extra = sorted(map(str, set(state) - {f"{kind}.{name}" for kind in self.STATES for name in by_name}))
        if extra:
            raise CheckpointError(f"[load_state_dict] unexpected names: {', '.join(extra[:5])}")
        loaded: dict[str, dict[Tensor, NDArray]] = {kind: {} for kind in self._states()}
        for name, p in by_name.items():
            any_of_it = any(f"{kind}.{name}" in state for kind in self.STATES)
            for kind in self.STATES if any_of_it else ():
                values: Any = state.get(f"{kind}.{name}")
                shape, dtype = self.state_spec(kind, p)
                given = str(getattr(values, "dtype", type_name(values))).removeprefix("torch.")
                found, wanted = f"{tuple(np.shape(values))} {given}", f"{shape} {dtype}"
                if found != wanted:
                    found = "absent" if values is None else found
                    raise CheckpointError(f"[load_state_dict] {kind}.{name} is {found} (accepted: {wanted})")
                array = loaded[kind][p] = NDArray(values, device=p.device, dtype=dtype)
                array.category = OPTIMIZER_STATE
        return loaded

    def _by_name(self, names: Sequence[str] | None) -> dict[str, Tensor]:
        names = [str(i) for i in range(len(self.params))] if names is None else names
        if len(set(names)) != len(self.params) or len(names) != len(self.params):
            raise ValueError(f"[optim] {len(set(names))} names for {len(self.params)} parameters (accepted: one for each)")
        return dict(zip(names, self.params))

    def clip_grad_norm(self, max_norm: float = 0.25) -> float:
        """Scales the gradients so that their joint norm is at most ``max_norm``; returns the norm before.

        raises: ValueError. OutOfMemoryError leaves some of them scaled.
        """
        norm = math.sqrt(self._sumsq(max_norm).item())
        scale = min(max_norm / (norm + 1e-6), 1.0)  # in this order: a norm of NaN makes NaN of all
        for p in self.params:  # also by 1: a plan knows no norm, and so every step must take the same memory
            if p.grad is not None:
                p.grad = Tensor.make_const(p.grad.realize_cached_data() * scale)
        return norm

    def _sumsq(self, max_norm: Any) -> NDArray:
        """The sum of the squares of all gradients, (1,), on the device; 0 where there is none. raises: ValueError for what is no
        norm: with one below 0 steps would lead upwards.
        """
        if not isinstance(max_norm, Real) or not float(max_norm) >= 0:
            raise ValueError(f"[clip_grad_norm] max_norm is {shown(max_norm)} (accepted: a number of at least 0)")
        sums = [kernels.sumsq(p.grad.realize_cached_data()) for p in self.params if p.grad is not None]
        return reduce(operator.add, sums) if sums else full((1,), 0, "float32", self.params[0].device)


def _of_all_groups(name: str) -> Any:
    def get(optimizer: _Grouped) -> float:
        return optimizer.param_groups[0][name]

    def put(optimizer: _Grouped, value: float) -> None:
        check_number(type(optimizer).__name__, name, value)
        for group in optimizer.param_groups:
            group[name] = value

    return property(get, put, doc=f"The {name} of the first group; assigning sets that of all groups.")


class _Grouped(Optimizer):
    """Parameters in groups, each with a learning rate and a weight decay.

    params: Tensors, or groups ``{"params": [...], "lr": ..., "weight_decay": ...}``. raises: ValueError for other keys.
    """

    lr = _of_all_groups("lr")
    weight_decay = _of_all_groups("weight_decay")

    def __init__(self, params: Iterable[Tensor] | Iterable[dict[str, Any]], lr: float, weight_decay: float):
        op, groups = type(self).__name__, _several(params)
        if not groups or not isinstance(groups[0], dict):
            groups = [{"params": groups}]
        for g in groups:
            if not isinstance(g, dict) or not {"params"} <= g.keys() <= {"params", "lr", "weight_decay"}:
                found = f"has {', '.join(map(str, g))}" if isinstance(g, dict) else f"is a {type(g).__name__}"
                raise ValueError(f"[{op}] a group {found} (accepted: params, and if wanted lr and weight_decay)")
        self.param_groups: list[dict[str, Any]] = [
            {"lr": lr, "weight_decay": weight_decay, **g, "params": _several(g["params"])} for g in groups
        ]
        for g in self.param_groups:
            self._check(g)
        super().__init__(p for g in self.param_groups for p in g["params"])
        if len(self.param_groups) == 1:  # one list: what is appended to it is in both
            self.param_groups[0]["params"] = self.params

    def _check(self, group: dict[str, Any]) -> None:
        for name in group.keys() & {"momentum", "betas", "beta1", "beta2", "eps"}:  # put there by a schedule, to no effect
            raise ValueError(f"[{type(self).__name__}] a group has {name} (accepted: as an attribute of the optimizer)")
        for name in ("lr", "weight_decay"):
            check_number(type(self).__name__, name, group[name])

    def _updates(self) -> list[_Update]:
        """(group, parameter, array, array of the gradient) of each parameter with a gradient; arrays that are not compact are
        replaced by compact copies, to be updated in place.

        raises: ShapeError for a gradient of another shape, DeviceError for one on another device, DTypeError for a parameter that
        is not floating, TypeError or ValueError for a learning rate or weight decay that is no number, ValueError where the groups
        have other parameters than ``params``. They come before the first update, so nothing is updated then.
        """
        found, pairs = [], [(g, p) for g in self.param_groups for p in g["params"]]
        if [p for _, p in pairs] != self.params:  # gradients are reset, clipped and saved by params, updated by groups
            raise ValueError("[optim] params and the params of the groups differ (accepted: the same Tensors in both)")
        for group in self.param_groups:
            self._check(group)  # a schedule may have put anything there
        for group, p in pairs:
            if p.grad is None:
                continue
            w, g = p.realize_cached_data(), p.grad.realize_cached_data()
            if not dt.is_float(w.dtype):
                raise DTypeError(f"[optim] param is {w.dtype} (accepted: floating)")
            if g.shape != w.shape:
                raise ShapeError(f"[optim] a gradient is {g.shape}, its parameter is {w.shape}")
            check_one_device("optim", w, g)
            if "float64" in (g.dtype, w.dtype) or not dt.is_float(g.dtype):  # the kernels combine these with no other dtype
                g = g.astype(w.dtype, copy=False)
            g = g.compact()  # here, where running out of memory has changed nothing yet
            if not w.is_compact():
                w = w.compact()
                p.data = Tensor.make_const(w)
            found.append((group, p, w, g))
        return found


class SGD(_Grouped):
    """u = momentum u + (1 - momentum)(grad + weight_decay w); w -= lr u. PyTorch's has no factor 1 - momentum. With a momentum of 1
    nothing would move; ValueError for that.

    params: Tensors, or groups ``{"params": [...], "lr": ..., "weight_decay": ...}``.
    """

    STATES = ("u",)

    def __init__(self, params, lr=0.01, momentum=0.0, weight_decay=0.0) -> None:
        super().__init__(params, lr, weight_decay)
        self.momentum = momentum
        self._check_momentum()
        self.u: dict[Tensor, NDArray] = {}

    def _check_momentum(self) -> None:
        check_number("SGD", "momentum", self.momentum, below=1)

    def step(self) -> None:
        self._check_momentum()  # the user may have put anything there
        updates = self._updates()
        if self.momentum:
            self.make_states(p for _, p, _, _ in updates)
        for group, p, w, g in updates:
            kernels.sgd_step(w, g, self.u[p] if self.momentum else None, group["lr"], self.momentum, group["weight_decay"])


class _Moments(_Grouped):
    """What Adam and AdamW share: two moments per parameter, float32 (float64 for float64), and the fused update."""

    STATES = ("m", "v")

    def __init__(self, params, lr: float, weight_decay: float, beta1: float, beta2: float, eps: float):
        super().__init__(params, lr, weight_decay)
        self.eps = eps
        self._check_constants(beta1, beta2)
        devices = list(dict.fromkeys(p.device for p in self.params))
        if len(devices) > 1:
            raise DeviceError(f"[{type(self).__name__}] parameters are on {devices[0]} and {devices[1]} (accepted: one device)")
        self.t = 0
        self.steps: dict[Tensor, int] = {}  # of each parameter: a moment is as old as its parameter's first gradient
        self.m: dict[Tensor, NDArray] = {}
        self.v: dict[Tensor, NDArray] = {}

    def _check_constants(self, beta1: Any, beta2: Any) -> None:
        for name, value, below in (("beta1", beta1, 1), ("beta2", beta2, 1), ("eps", self.eps, math.inf)):
            check_number(type(self).__name__, name, value, below=below)

    def _update(self, beta1: float, beta2: float, decoupled: bool, scale: NDArray | None = None) -> None:
        """One step. decoupled: weight decay is not added to the gradient. scale: (1,), of the gradients; default 1."""
        self._check_constants(beta1, beta2)  # the user may have put anything there
        updates = self._updates()
        wide = scale is not None and scale.dtype == "float64"  # of which the kernel would take a float32
        factor = full((1,), 1, "float32", self.params[0].device) if scale is None or wide else scale
        for _, _, w, _ in updates:
            check_one_device("optim", factor, w)
        self.make_states(p for _, p, _, _ in updates)
        self.t += 1
        for group, p, w, g in updates:
            decay = group["weight_decay"]
            l2, decay = (0.0, decay) if decoupled else (decay, 0.0)
            t = self.steps[p] = self.steps.get(p, 0) + 1
            g = (g * scale).astype(w.dtype, copy=False) if wide else g
            kernels.adam_step(w, g, self.m[p], self.v[p], factor, group["lr"], beta1, beta2, self.eps, l2, decay, t)

    def state_dict(self, names: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        own = {f"t.{name}": self.steps.get(p, self.t) for name, p in self._by_name(names).items()}
        fewer = {name: np.array(t) for name, t in own.items() if t != self.t}
        return {**super().state_dict(names), "t": np.array(self.t), **fewer}

    def _read_state(self, state: Mapping[str, Any], names: Sequence[str] | None) -> dict[str, Any]:
        check_state(state)

        def count(name: str) -> int:
            return check_count("load_state_dict", name, state.get(name, "absent"), 0, (1 << 62) - 1, CheckpointError)

        t = count("t")
        own = {p: f"t.{name}" for name, p in self._by_name(names).items() if f"m.{name}" in state}
        steps = {p: count(name) if name in state else t for p, name in own.items()}
        moments = {name: values for name, values in state.items() if name not in {"t", *own.values()}}
        return {**super()._read_state(moments, names), "t": t, "steps": steps}


class Adam(_Moments):
    """g = grad + weight_decay w; m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) g^2; w -= lr m' / (sqrt(v') + eps).

    m' = m / (1 - beta1^t) and v' = v / (1 - beta2^t) at a parameter's t-th step with a gradient. params: Tensors, or groups
    ``{"params": [...], "lr": ..., "weight_decay": ...}``. source: Kingma & Ba 2014, arXiv:1412.6980.
    """

    def __init__(self, params, lr=0.01, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0) -> None:
        super().__init__(params, lr, weight_decay, beta1, beta2, eps)
        self.beta1, self.beta2 = beta1, beta2

    def step(self) -> None:
        self._update(self.beta1, self.beta2, decoupled=False)


class AdamW(_Moments):
    """Adam with decoupled weight decay: w -= lr (m' / (sqrt(v') + eps) + weight_decay w), one fused pass per parameter, in place.

    params: Tensors, or groups ``{"params": [...], "lr": ..., "weight_decay": ...}``. Moments are float32 (float64 for float64).
    raises: ValueError for a group with other keys, and for other than two betas.
    source: Loshchilov & Hutter 2019, arXiv:1711.05101.
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1) -> None:
        self.betas: tuple[float, float] = betas
        super().__init__(params, lr, weight_decay, *self._two_betas(), eps)
        self._scale: NDArray | None = None

    def _two_betas(self) -> tuple[float, float]:
        try:
            beta1, beta2 = self.betas
        except (TypeError, ValueError):
            raise ValueError(f"[AdamW] betas is {shown(self.betas)} (accepted: two numbers)") from None
        return beta1, beta2

    def clip_grad_norm(self, max_norm: float = 1.0) -> NDArray:  # type: ignore[override]
        """Has the next ``step`` scale the gradients to a joint norm of at most ``max_norm``. Returns the norm, (1,), on the device.

        Nothing is read back and the gradients are not touched. raises: ValueError.
        """
        norm = self._sumsq(max_norm).sqrt()
        self._scale = (max_norm / (norm + 1e-6)).minimum(1.0)
        return norm

    def reset_grad(self) -> None:
        """Drops every gradient, and the clipping that ``clip_grad_norm`` left to the next step."""
        super().reset_grad()
        self._scale = None

    def skip_step(self) -> None:
        """Drops the clipping that ``clip_grad_norm`` left to the next step."""
        self._scale = None

    def step(self) -> None:
        self._update(*self._two_betas(), decoupled=True, scale=self._scale)
        self._scale = None
