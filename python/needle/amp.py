"""Mixed precision: products in 16 bits, everything else and the parameters in float32.

    scaler = amp.GradScaler()  # float16 alone needs one: gradients would fall below its range
    with amp.autocast(device, "float16"):
        loss = model.loss(ids, targets)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)  # only if the gradients are looked at, to clip them for example
    optimizer.clip_grad_norm(1.0)
    scaler.step(optimizer)
    scaler.update()

Casts are nodes of the graph, made as forward runs, so backward and recomputation give the same dtypes outside the region. On a CPU
products are stored in 16 bits and summed in 32.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from . import dtype as dt
from . import ops
from .autograd import NDArray, Op, Region, Tensor, current_autocast, current_segment, is_grad_enabled, set_autocast
from .backend_ndarray import BackendDevice, as_device, kernels
from .backend_ndarray.ndarray import check_one_device, write_stamp
from .errors import CheckpointError, DeviceError, DTypeError, GraphError, check_count, check_state, shown, type_name
from .objects import objects_of

__all__ = ["PRECISIONS", "GradScaler", "SkippedStepWarning", "autocast", "get_autocast_dtype", "is_autocast_enabled"]

LOW_DTYPES = ("float16", "bfloat16")
PRECISIONS = {"fp32": None, "bf16": "bfloat16", "fp16": "float16"}  # a model's precision, and what its products are lowered to


def _device(device: str | BackendDevice) -> BackendDevice:
    if device is None:  # elsewhere the default device; PyTorch wants it named
        raise DeviceError("[autocast] device_type is None (accepted: a device, or its name)")
    return as_device(device)


class autocast(Region):
    """Context manager and decorator: products of float32 inside run in 16 bits, with the names and the meaning of PyTorch's.

    device_type: a device or its name; ops on other devices are left alone.
    dtype: "float16" or "bfloat16"; default: float16 on cuda and cuda_sim, bfloat16 elsewhere, so also on ``meta``, where a run on
        cuda is planned.
    enabled: False turns an outer region off inside this one.
    cache_enabled: cast a parameter once per region (and per region of ``needle.remat``), and again only after it was written.

    As with ``no_grad`` each thread has its own. Like PyTorch's, the region of an absent device warns; so does that of another
    device around ops on ``meta``, which a plan runs on.

    Lowered are matrix products, linear, convolution, RNN, LSTM, attention, block-sparse products and linear_cross_entropy. Softmax
    and its logarithm, layer norm and batch norm, logsumexp, exp, log, powers, numbers divided by a Tensor, sums and means take
    float32. Other ops keep their inputs, and give the widest dtype of these.
    raises: DTypeError, DeviceError.
    """

    def __init__(self, device_type: str | BackendDevice, dtype: Any = None, enabled: bool = True, cache_enabled: bool = True):
        self._device = _device(device_type)
        self.device_type = self._device.name
        if dtype is None:
            dtype = "float16" if self._device.is_gpu else "bfloat16"
        self.dtype = dtype if isinstance(dtype, str) else dt.name_of(dtype)
        if self.dtype not in LOW_DTYPES:
            raise DTypeError(f"[autocast] dtype is {self.dtype} (accepted: {', '.join(LOW_DTYPES)}; enabled=False for none)")
        self.enabled, self.cache_enabled = enabled, cache_enabled

    @classmethod
    def named(cls, precision: str, device_type: str | BackendDevice) -> autocast:
        """The region of fp32, bf16 or fp16; that of fp32 lowers nothing. raises: DTypeError for another name."""
        if precision not in PRECISIONS:
            raise DTypeError(f"[precision] unknown precision: {precision} (accepted: {', '.join(PRECISIONS)})")
        return cls(device_type, PRECISIONS[precision], enabled=PRECISIONS[precision] is not None)

    def __enter__(self) -> autocast:
        if self.enabled and not self._device.enabled():
            absent = f"{self._device} is absent, so that its region lowers nothing: {self._device.why_absent()}"
            warnings.warn(f"[autocast] {absent}", stacklevel=2)
        set_autocast(_Region(current_autocast(), self.device_type, self.dtype if self.enabled else None, self.cache_enabled))
        return self

    def __exit__(self, *exc: object) -> None:
        region = current_autocast()
        set_autocast(region and region.outer)


def is_autocast_enabled(device_type: str | BackendDevice) -> bool:
    """Whether products on the device are lowered here and now."""
    return get_autocast_dtype(device_type) is not None


def get_autocast_dtype(device_type: str | BackendDevice) -> str | None:
    """What products on the device are lowered to here and now; None outside of a region."""
    name, region = _device(device_type).name, current_autocast()
    return None if region is None else region.dtypes.get(name)


class _Region:
    """One entry of an ``autocast``. It is called with the inputs of each op.

    outer: the region around it. dtypes: device type -> the dtype that products on it are lowered to; without an entry, none is.
    casts: leaf -> dtype -> (its cast, the array that was cast, when). All regions within the outermost one share it. It does not
    keep a leaf alive: a batch may be one.
    """

    __slots__ = ("outer", "dtypes", "cache_enabled", "casts")

    def __init__(self, outer: _Region | None, device_type: str, dtype: str | None, cache_enabled: bool):
        self.outer, self.cache_enabled = outer, cache_enabled
        self.dtypes: dict[str, str] = {} if outer is None else {**outer.dtypes}
        self.casts: WeakKeyDictionary[Tensor, dict[str, tuple[Tensor, NDArray, int]]]
        self.casts = WeakKeyDictionary() if outer is None else outer.casts
        self.dtypes.pop(device_type, None)
        if dtype is not None:
            self.dtypes[device_type] = dtype

    def __call__(self, op: Op, inputs: Sequence[Any]) -> Sequence[Any]:
        """The inputs as ``op.autocast`` asks for them. An op with one of float64 is left alone: its result has that precision."""
        policy = op.autocast
        if policy is None or any([x.dtype == "float64" for x in inputs]):
            return inputs
        where = inputs[0].device.name
        low = self.dtypes.get(where)
        if low is None:
            if where == "meta" and self.dtypes:  # a plan would be of another run, and say nothing
                region = f"[autocast] a region of {', '.join(self.dtypes)} lowers nothing on meta"
                warnings.warn(f"{region} (accepted in a plan: the device that build is given)", stacklevel=2)
            return inputs
        if policy == "inside":
            op.compute_dtype = low
            return inputs
        if policy == "lower":
            return [self._lowered(x, low) for x in inputs]
        return [ops.astype(x, "float32") if x.dtype in LOW_DTYPES else x for x in inputs]

    def _lowered(self, x: Tensor, low: str) -> Tensor:
        if x.dtype == low or x.dtype not in ("float32", *LOW_DTYPES):
            return x
        if not (self.cache_enabled and x.requires_grad and x.is_leaf()):
            return ops.astype(x, low)
        segment = current_segment()
        casts = (self.casts if segment is None else segment.casts).setdefault(x, {})
        array = x.realize_cached_data()
        kept = casts.get(low)
        if kept is not None:
            cast, source, time = kept
            if source is array and array.last_write <= time and cast.requires_grad == is_grad_enabled():
                return cast
        cast = ops.astype(x, low)
        casts[low] = cast, array, write_stamp()
        return cast


def kept_casts() -> list[Tensor]:
    """The casts of parameters that open regions, of any thread, keep for their ops to come."""
    kept = [casts for region in objects_of(_Region) for casts in list(region.casts.data.values())]
    return [cast for casts in kept for cast, _, _ in list(casts.values())]


class SkippedStepWarning(UserWarning):
    """An optimizer step was skipped, since gradients were infinite or NaN."""


class GradScaler:
    """Keeps float16 gradients within their range: the loss is multiplied by a scale, as large as it can be without infinities, and
    the gradients are divided by it before the optimizer sees them.

    A step whose gradients are infinite or NaN is skipped, counted in ``skipped_steps`` and reported by a SkippedStepWarning. From
    the ``hysteresis``-th of such steps on each one multiplies the scale by ``backoff_factor`` (to no less than ``min_scale``).
    ``growth_interval`` good steps in a row multiply it by ``growth_factor`` and reset the hysteresis.
    enabled=False: everything passes through unchanged, for code that also runs in other precisions.

    Names and meaning are PyTorch's, defaults and hysteresis those Pythia was trained with.
    source: Micikevicius et al. 2018, arXiv:1710.03740; Megatron-LM's DynamicGradScaler.
    """

    def __init__(
        self,
        init_scale: float = 2.0**12,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        min_scale: float = 1.0,
        enabled: bool = True,
    ):
        for name, value, least, most in (
            ("init_scale", init_scale, min_scale, math.inf), ("growth_factor", growth_factor, 1.0, math.inf),
            ("backoff_factor", backoff_factor, 0.0, 1.0), ("min_scale", min_scale, 0.0, math.inf),
        ):  # fmt: skip
            if not isinstance(value, (int, float)) or not (least <= value < most and value > 0):
                raise ValueError(f"[GradScaler] {name} is {shown(value)} (accepted: from {least:g} to below {most:g}, not 0)")
        self.growth_interval = check_count("GradScaler", "growth_interval", growth_interval, error=ValueError)
        self.hysteresis = check_count("GradScaler", "hysteresis", hysteresis, error=ValueError)
        self.growth_factor, self.backoff_factor, self.min_scale, self.enabled = growth_factor, backoff_factor, min_scale, enabled
        self.steps = self.skipped_steps = 0
        self._scale = float(init_scale)
        self._good_steps, self._patience = 0, self.hysteresis
        # optimizer: whether its gradients are not finite, on the device, or None while they are unscaled; until update()
        self._flags: dict[Any, NDArray | None] = {}
        self._stepped: dict[Any, bool] = {}  # optimizer: whether its step was skipped

    def is_enabled(self) -> bool:
        """Whether it does anything."""
        return self.enabled

    def get_scale(self) -> float:
        """What the loss is multiplied by now; 1 if it is not enabled."""
        return self._scale if self.enabled else 1.0

    def scale(self, loss: Tensor) -> Tensor:
        """loss * scale: what backward is to be called on."""
        return loss * self._scale if self.enabled else loss

    def unscale_(self, optimizer: Any) -> None:
        """Divides the gradients of the optimizer's parameters by the scale, in place. ``step`` calls it if you have not.

        raises: GraphError if there are no gradients, or for a second call before ``update``; DTypeError for float16 gradients,
        DeviceError for those of several devices.
        """
        if not self.enabled:
            return
        if not hasattr(optimizer, "params"):
            raise TypeError(f"[unscale_] optimizer is of type {type_name(optimizer)} (accepted: an Optimizer)")
        if optimizer in self._stepped or self._is_unscaled(optimizer):
            raise GraphError("[unscale_] the gradients are unscaled already (accepted: once between two calls of update)")
        grads: list[NDArray] = []
        seen = set()
        for p in optimizer.params:
            if p.grad is not None:
                if p.grad.dtype == "float16":
                    raise DTypeError("[unscale_] a gradient is float16 (accepted: parameters in float32, products by autocast)")
                array = p.grad.realize_cached_data()
                check_one_device("unscale_", grads[0] if grads else array, array)
                # A graph, the gradient's own too, or another gradient may hold the array.
                shared = not getattr(p.grad._source, "in_place", p.grad._node is None) or array.serial in seen
                seen.add(array.serial)
                grads.append(array.copy() if shared else array.compact())
                p.grad = Tensor.make_const(grads[-1])
        if not grads:
            raise GraphError("[unscale_] no parameter has a gradient (call backward of the scaled loss first)")
        self._flags[optimizer] = None  # Ctrl-C may leave some of them divided
        self._flags[optimizer] = kernels.unscale(grads, 1.0 / self._scale)

    def _is_unscaled(self, optimizer: Any) -> bool:
        """Whether its present gradients are. After a step that failed ``_flags`` still has the optimizer, though the gradients of a
        new backward are not unscaled.
        """
        return optimizer in self._flags and all(p.grad is None or p.grad._source is None for p in optimizer.params)

    def step(self, optimizer: Any) -> None:
        """``optimizer.step()``, if all its gradients are finite."""
        if not self.enabled:
            optimizer.step()
            return
        if optimizer in self._stepped:
            raise GraphError("[step] the optimizer's step is made already (accepted: once between two calls of update)")
        if not self._is_unscaled(optimizer):
            self.unscale_(optimizer)
        flag = self._flags[optimizer]
        if flag is None:
            raise GraphError(
                "[step] unscale_ was interrupted, the gradients are unscaled in part (accepted: those of a new backward)"
            )
        skipped = bool(flag.numpy()[0])
        optimizer.skip_step() if skipped else optimizer.step()
        self._stepped[optimizer] = skipped  # only now: a step that raises may be tried again

    def forget(self) -> None:
        """Begins anew after a step that did not come to its ``update``: the scale stays, and what was found is dropped."""
        self._flags.clear()
        self._stepped.clear()

    def update(self) -> None:
        """Chooses the next scale, by what ``step`` and ``unscale_`` have found since the last call: gradients that are not finite
        count also where the step was left out.

        raises: FloatingPointError where the scale would have to go below ``min_scale``.
        """
        if not self.enabled:
            return
        if not self._flags:
            raise GraphError("[update] there was no step since the last call (accepted: step, then update)")
        flags = self._flags.items()
        skipped = any([self._stepped[o] if o in self._stepped else flag is not None and bool(flag.numpy()[0]) for o, flag in flags])
        self.forget()
        self.steps += 1
        if skipped:
            self._back_off()
            return
        self._good_steps += 1
        if self._good_steps >= self.growth_interval:
            self._good_steps, self._patience = 0, self.hysteresis
            if self._scale * self.growth_factor < 2.0**128:  # else no float32 loss would be finite
                self._scale *= self.growth_factor

    def _back_off(self) -> None:
        self.skipped_steps += 1
        self._good_steps, self._patience = 0, max(0, self._patience - 1)
        before = self._scale
        if self._patience == 0:
            self._scale = max(before * self.backoff_factor, self.min_scale)
            if before == self.min_scale:
                raise FloatingPointError(
                    f"[GradScaler] gradients are infinite or NaN at the least scale, {before:g}: {self.skipped_steps} of "
                    f"{self.steps} steps skipped (a lower learning rate, or bfloat16, may help)"
                )
        warnings.warn(
            f"gradients infinite or NaN: step skipped, {self.skipped_steps} of {self.steps}; scale {before:g} -> {self._scale:g}",
            SkippedStepWarning,
            stacklevel=3,
        )

    _STATE = ("_scale", "_good_steps", "_patience", "steps", "skipped_steps")

    def state_dict(self) -> dict[str, float]:
        """Plain numbers: the scale and the counts; nothing if it is not enabled."""
        if not self.enabled:
            return {}
        return {name.lstrip("_"): getattr(self, name) for name in self._STATE}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continues from what ``state_dict`` gave. raises: CheckpointError if a number is missing or out of range."""
        if not self.enabled:
            return
        check_state(state)
        for name in self._STATE:
            key, least = name.lstrip("_"), self.min_scale if name == "_scale" else 0
            value = state.get(key)
            if not isinstance(value, (int, float)) or not least <= value < math.inf:
                raise CheckpointError(f"[GradScaler] {key} of the state is {value!r} (accepted: a number from {least:g} on)")
        for name in self._STATE:
            setattr(self, name, state[name.lstrip("_")])
