"""Mixed precision: products in 16 bits, everything else and the parameters in float32.

Casts are nodes of the graph, made as forward runs, so backward and recomputation give the same dtypes outside the region.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from . import dtype as dt
from . import ops
from .autograd import NDArray, Op, Tensor, is_grad_enabled, is_rematerializing, set_autocast, write_stamp
from .backend_ndarray import BackendDevice
from .errors import DeviceError, DTypeError

__all__ = ["autocast", "get_autocast_dtype", "is_autocast_enabled"]

LOW_DTYPES = ("float16", "bfloat16")
DEVICE_TYPES = ("cpu", "cuda", "cuda_sim", "cpu_numpy", "meta")

_dtypes: dict[str, str] = {}  # device type -> what products on it are lowered to; absent: nothing is
_depth = 0  # regions open, disabled ones included
_cache_enabled = True
# (parameter, dtype) -> (its cast, the array that was cast, when): emptied as the outermost region ends.
_cast_parameters: dict[tuple[Tensor, str], tuple[Tensor, NDArray, int]] = {}


def _device_type(device: str | BackendDevice) -> str:
    name = device.name if isinstance(device, BackendDevice) else device
    if name not in DEVICE_TYPES:
        raise DeviceError(f"[autocast] unknown device type: {device!r} (accepted: {', '.join(DEVICE_TYPES)})")
    return name


class autocast:
    """Context manager and decorator: products of float32 inside run in 16 bits, with the names and the meaning of PyTorch's.

    device_type: a device or its name; ops on other devices are left alone.
    dtype: "float16" or "bfloat16"; default: float16 on cuda and cuda_sim, bfloat16 elsewhere.
    enabled: False turns an outer region off inside this one.
    cache_enabled: a parameter is cast once per region, and again only after a write to it or where ``needle.remat`` drops the cast.

    Lowered are matrix products, linear, convolution, attention, block-sparse products and linear_cross_entropy. Softmax, layer
    norm, logsumexp, exp, log, powers and sums take float32. Other ops keep their inputs, and give the widest dtype of these.
    raises: DTypeError, DeviceError.
    """

    def __init__(self, device_type: str | BackendDevice, dtype: Any = None, enabled: bool = True, cache_enabled: bool = True):
        self.device_type = _device_type(device_type)
        if dtype is None:
            dtype = "float16" if self.device_type.startswith("cuda") else "bfloat16"
        self.dtype = dtype if isinstance(dtype, str) else dt.name_of(dtype)
        if self.dtype not in LOW_DTYPES:
            raise DTypeError(f"[autocast] dtype is {self.dtype} (accepted: {', '.join(LOW_DTYPES)}; enabled=False for none)")
        self.enabled, self.cache_enabled = enabled, cache_enabled
        self._before: list[tuple[str | None, bool]] = []  # one entry per entering: a region may be entered inside itself

    def __enter__(self) -> autocast:
        global _depth
        self._before.append((_dtypes.get(self.device_type), _cache_enabled))
        self._set(self.dtype if self.enabled else None, self.cache_enabled)
        _depth += 1
        return self

    def __exit__(self, *exc: object) -> None:
        global _depth
        _depth -= 1
        self._set(*self._before.pop())
        if _depth == 0:
            _cast_parameters.clear()

    def _set(self, dtype: str | None, cache_enabled: bool) -> None:
        global _cache_enabled
        _cache_enabled = cache_enabled
        if dtype is None:
            _dtypes.pop(self.device_type, None)
        else:
            _dtypes[self.device_type] = dtype
        set_autocast(_cast_inputs if _dtypes else None)

    def __call__(self, function: Callable) -> Callable:
        @wraps(function)
        def wrapped(*args, **kwargs):
            with self:
                return function(*args, **kwargs)

        return wrapped


def is_autocast_enabled(device_type: str | BackendDevice) -> bool:
    """Whether products on the device are lowered here and now."""
    return _device_type(device_type) in _dtypes


def get_autocast_dtype(device_type: str | BackendDevice) -> str | None:
    """What products on the device are lowered to here and now; None outside of a region."""
    return _dtypes.get(_device_type(device_type))


def _cast_inputs(op: Op, inputs: Sequence[Any]) -> Sequence[Any]:
    """The inputs as ``op.autocast`` asks for them."""
    policy = op.autocast
    if policy is None:
        return inputs
    low = _dtypes.get(inputs[0].device.name)
    if low is None:
        return inputs
    if policy == "inside":
        op.compute_dtype = low
        return inputs
    if policy == "lower":
        return [_lowered(x, low) for x in inputs]
    return [ops.astype(x, "float32") if x.dtype in LOW_DTYPES else x for x in inputs]


def _lowered(x: Tensor, low: str) -> Tensor:
    if x.dtype == low or x.dtype not in ("float32", *LOW_DTYPES):
        return x
    if not (_cache_enabled and x.requires_grad and x.is_leaf()) or is_rematerializing():
        return ops.astype(x, low)
    array = x.realize_cached_data()
    kept = _cast_parameters.get((x, low))
    if kept is not None:
        cast, source, time = kept
        if source is array and array.last_write <= time and cast.requires_grad == is_grad_enabled():
            return cast
    cast = ops.astype(x, low)
    _cast_parameters[x, low] = cast, array, write_stamp()
    return cast
