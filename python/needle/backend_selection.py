"""Which backend this process uses, by the course's switch NEEDLE_BACKEND (nd or np); fixed at import."""

from __future__ import annotations

from . import config
from .backend_ndarray import BackendDevice as Device
from .backend_ndarray import NDArray, as_device, default_device
from .backend_ndarray import device as _device

BACKEND = config.get("NEEDLE_BACKEND")

if BACKEND == "nd":
    from . import backend_ndarray as array_api
    from .backend_ndarray import all_devices, cpu, cpu_numpy, cuda, cuda_sim, meta
elif BACKEND == "np":
    from . import backend_numpy as array_api  # type: ignore[no-redef]
    from .backend_numpy import all_devices, cpu

    _device.by_name = {"cpu": cpu}
else:
    raise RuntimeError(f"NEEDLE_BACKEND is {BACKEND!r} (accepted: nd, np)")

__all__ = ["BACKEND", "array_api", "NDArray", "Device", "all_devices", "as_device", "cpu", "default_device"]
if BACKEND == "nd":
    __all__ += ["cuda", "cuda_sim", "cpu_numpy", "meta"]
