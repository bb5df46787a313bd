"""Where NVIDIA's cuBLASLt is on this machine: the CUDA backend's matrix products are its, where there is one."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from .. import config
from ..errors import DeviceError, KernelError


def open_for(mod: ModuleType) -> None:
    """Opens the library that NEEDLE_CUBLASLT names, or the first one installed, for the products of a module for GPUs.

    Where there is none, needle's own kernels do them. raises: DeviceError where the one named cannot be used.
    """
    wanted = config.get("NEEDLE_CUBLASLT")
    if wanted == "0" or mod.__device_name__ != "cuda":
        return
    for path in [wanted] if wanted else installed(f"libcublasLt.so.{mod.cudart_major}"):
        try:
            mod.use_cublaslt(path)
            return
        except KernelError as error:  # one that was found may be of another platform, or lack what it needs
            if wanted:
                raise DeviceError(f"[device] NEEDLE_CUBLASLT is {wanted!r}: {error} (accepted: the library's file, 0)") from None


def installed(name: str) -> Iterator[str]:
    """Where the library may be: in the wheels nvidia-cublas or nvidia-cublas-cu12, in the toolkit, or where the system looks."""
    wheels = importlib.util.find_spec("nvidia")
    folders = [Path(place) for place in (wheels.submodule_search_locations or ())] if wheels else []
    for folder in folders:
        yield from map(str, sorted(folder.glob(f"*/lib/{name}")))
    for toolkit in filter(None, (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")):
        for part in ("lib64", "targets/x86_64-linux/lib"):
            path = Path(toolkit) / part / name
            if path.is_file():
                yield str(path)
    yield name
