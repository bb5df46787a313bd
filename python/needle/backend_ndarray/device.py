"""Devices: a name, the module with its kernels, and the makers of arrays that the course's init calls."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cached_property, lru_cache
from types import ModuleType
from typing import Any

import numpy as np

from ..errors import DeviceError
from . import cublaslt
from .host_memory import DATA
from .shapes import as_shape

caches: list[Callable[[], None]] = []  # each empties one that holds device memory
when_loaded: Callable[[BackendDevice], None] | None = None  # told of each device that is used for the first time: needle.memory


def device_cache(maxsize: int) -> Callable[[Callable], Any]:
    """lru_cache for a function whose values hold device memory. ``drop_device_caches`` empties them all."""

    def wrap(function: Callable) -> Any:
        cached = lru_cache(maxsize=maxsize)(function)
        caches.append(cached.cache_clear)
        return cached

    return wrap


def drop_device_caches() -> None:
    """Gives back what needle keeps on devices between calls: the indices of block layouts, tables of angles."""
    for clear in caches:
        clear()


class BackendDevice:
    """A device by name. Equal by name, hashable; missing attributes are looked up in the module of its kernels.

    mod: a module, or None for an absent device; or the name of one in this package. That one is imported when first needed, so that
    naming a device costs nothing and an absent one is a clear error only where it is used. numpy_semantics (the course's
    NEEDLE_BACKEND=np) keeps numpy's dtypes and gives full reductions the shape ``()``; otherwise array-likes become float32 and
    full reductions have shape ``(1,)``.
    """

    def __init__(self, name: str, mod: ModuleType | str | None, numpy_semantics: bool = False, label: str | None = None):
        self.name = name
        self.numpy_semantics = numpy_semantics
        self.default_float = "float64" if numpy_semantics else "float32"
        self._source = mod
        self._label = label or f"{name}()"
        self._why_absent = ""

    def __repr__(self) -> str:
        return self._label

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, BackendDevice) and self._label == other._label)

    def __hash__(self) -> int:
        return hash(self._label)

    def __copy__(self) -> BackendDevice:
        return self

    def __deepcopy__(self, memo: dict) -> BackendDevice:
        return self

    def __reduce__(self) -> tuple:
        name = next((name for name, make in by_name.items() if make() is self), None)
        if name is None:
            raise TypeError(f"[pickle] {self._label} is not pickled (accepted: {', '.join(by_name)})")
        return as_device, (name,)

    @cached_property
    def mod(self) -> ModuleType | None:
        """The module of kernels, or None where the device is absent (``why_absent()`` says why)."""
        mod = self._load()
        if mod is not None:
            if not hasattr(mod, "Array"):
                raise DeviceError(f"[device] the module of {self._label} has no Array (accepted: a module of kernels)")
            self.mod, self.Array = mod, mod.Array
            if when_loaded is not None:
                when_loaded(self)
        return mod

    @property
    def is_host(self) -> bool:
        """Whether arrays are host memory, and kernels have done their work when they return."""
        return self.name in ("cpu", "cpu_numpy")

    @property
    def is_gpu(self) -> bool:
        """Whether arrays are a GPU's memory, or that of the emulated one."""
        return self.name in ("cuda", "cuda_sim")

    @property
    def is_loaded(self) -> bool:
        """Whether the device has been used."""
        return self.__dict__.get("mod") is not None

    def _load(self) -> ModuleType | None:
        if not isinstance(self._source, str):
            self._why_absent = "it was made without a module"
            return self._source
        full_name = f"{__package__}.{self._source}"
        try:
            mod = importlib.import_module(full_name)
            if hasattr(mod, "best_level") and mod.best_level():  # a wheel's
                mod = importlib.import_module(f"{full_name}_{mod.best_level()}")
        except ModuleNotFoundError as error:
            if error.name != full_name:
                raise
            where = " where nvcc and a GPU are" if self.name == "cuda" else ""
            self._why_absent = f"the extension {self._source} is not built (make lib builds it{where})"
            return None
        # A CUDA module imports happily on a machine without a GPU.
        if hasattr(mod, "device_count") and mod.device_count() == 0:
            self._why_absent = f"no usable GPU was found: {mod.why_absent() or 'the driver names none'}"
            return None
        if hasattr(mod, "use_cublaslt"):
            cublaslt.open_for(mod)
        return mod

    def __getattr__(self, name: str) -> Any:
        is_kernels = not name.startswith("__") or name in ("__tile_size__", "__device_name__")
        mod = self.mod if is_kernels else None
        if mod is None:
            absent = f": {self._why_absent}" if is_kernels else ""
            raise AttributeError(f"device {self._label} has no attribute {name!r}{absent}")
        if not hasattr(mod, name):
            raise AttributeError(f"device {self._label} has no attribute {name!r} (if it is a new kernel: make lib)")
        return getattr(mod, name)

    def enabled(self) -> bool:
        """Whether the device can be used here."""
        return self.mod is not None

    def why_absent(self) -> str:
        """Why ``enabled()`` is False; empty when it is True."""
        return "" if self.mod is not None else self._why_absent

    def require(self) -> ModuleType:
        """The module of kernels. raises: DeviceError that says why there is none."""
        mod = self.mod
        if mod is None:
            raise DeviceError(f"[device] {self._label} cannot be used: {self._why_absent}")
        return mod

    # Random numbers come from numpy's global stream, those of a narrower dtype by way of float32, also before any scaling: the
    # course's golden values need both.
    def randn(self, *shape: int, dtype: str = "float32"):
        """Normal numbers with mean 0 and deviation 1, of ``shape``."""
        return self._drawn(np.random.randn, shape, dtype)

    def rand(self, *shape: int, dtype: str = "float32"):
        """Uniform numbers from 0 to 1, which rounding may reach, of ``shape``."""
        return self._drawn(np.random.rand, shape, dtype)

    def _drawn(self, draw: Callable, shape: tuple[int, ...], dtype: str):
        from .ndarray import NDArray, empty

        if self.name == "meta":  # a plan of a large model makes no numbers
            out = empty(shape, self.default_float if self.numpy_semantics else dtype, self)
            out.category = DATA  # as what comes from numpy
            return out
        values = np.asarray(draw(*as_shape(shape)))
        if self.numpy_semantics:
            return NDArray(values, self)
        dtype = dtype or "float32"
        return NDArray(values if dtype == "float64" else values.astype(np.float32), self, dtype)

    def one_hot(self, n: int, i: Any, dtype: str = "float32"):
        """(*i.shape, n): 1 where the last index equals ``i``, made on the device. raises: IndexError for an i outside 0..n-1."""
        from . import kernels
        from .ndarray import asarray

        return kernels.one_hot(asarray(i, self), n, dtype or "float32")

    def empty(self, shape, dtype: str | None = "float32"):
        """An uninitialised array."""
        from .ndarray import empty

        return empty(shape, dtype or "float32", device=self)

    def full(self, shape, fill_value, dtype: str | None = "float32"):
        """An array of ``fill_value``."""
        from .ndarray import full

        return full(shape, fill_value, dtype or "float32", device=self)

    def zeros(self, *shape: int, dtype: str | None = "float32"):
        """An array of zeros."""
        return self.full(shape, 0.0, dtype)

    def ones(self, *shape: int, dtype: str | None = "float32"):
        """An array of ones."""
        return self.full(shape, 1.0, dtype)


@lru_cache(maxsize=None)
def cpu() -> BackendDevice:
    """The C++ backend: vectorized kernels on needle's thread pool."""
    return BackendDevice("cpu", "ndarray_backend_cpu")


@lru_cache(maxsize=None)
def cuda() -> BackendDevice:
    """The CUDA backend on the GPU that was the current one at its first use."""
    return BackendDevice("cuda", "ndarray_backend_cuda")


@lru_cache(maxsize=None)
def cuda_sim() -> BackendDevice:
    """The CUDA sources, run without a GPU by an emulator."""
    return BackendDevice("cuda_sim", "ndarray_backend_cuda_sim")


@lru_cache(maxsize=None)
def cpu_numpy() -> BackendDevice:
    """The reference backend, in numpy."""
    return BackendDevice("cpu_numpy", "ndarray_backend_numpy")


@lru_cache(maxsize=None)
def meta() -> BackendDevice:
    """Shapes, dtypes and byte counts without data, those of the default device; reading values gives NaN, or 0 where a dtype has
    none.
    """
    return BackendDevice("meta", "ndarray_backend_meta", default_device().numpy_semantics)


# What the names of devices mean. The course's NEEDLE_BACKEND=np has a ``cpu`` of its own, and no other.
by_name: dict[str, Callable[[], BackendDevice]] = {make.__name__: make for make in (cpu, cuda, cuda_sim, cpu_numpy, meta)}


def as_device(device: BackendDevice | str | None = None) -> BackendDevice:
    """A device, or the one of that name ("cpu"), or the default (None). raises: DeviceError for anything else."""
    if isinstance(device, BackendDevice):
        return device
    if device is None:
        return default_device()
    if not isinstance(device, str) or device not in by_name:
        raise DeviceError(f"[device] unknown device: {device!r} (accepted: a device, or its name: {', '.join(by_name)})")
    return by_name[device]()


def default_device() -> BackendDevice:
    """Where arrays go that are made without a device: ``cpu()``."""
    return by_name["cpu"]()


def all_devices() -> list[BackendDevice]:
    """Every device that holds data, enabled or not, those of the course first."""
    return [cpu(), cuda(), cpu_numpy(), cuda_sim()]
