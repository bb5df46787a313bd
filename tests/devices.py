"""The devices that tests run on: all, or those that NEEDLE_TEST_DEVICES names. One that is absent is skipped with its reason,
unless NEEDLE_REQUIRE_DEVICES names it: then it fails."""

import os
from pathlib import Path

import pytest

import needle as ndl


def named_by(variable):
    return [name for name in os.environ.get(variable, "").split(",") if name]


DEVICES = named_by("NEEDLE_TEST_DEVICES") or ["cpu_numpy", "cpu", "cuda_sim", "cuda"]
REQUIRED = named_by("NEEDLE_REQUIRE_DEVICES")
# Of sanitize.py's build for the address sanitizer, whose allocators keep no memory that is free.
WATCHED = Path(os.environ.get("NEEDLE_TEST_PACKAGE", "")).parent.name.startswith("asan")


def usable(name):
    device = getattr(ndl, name)()
    if not device.enabled():
        reason = f"{name}: {device.why_absent()}"
        pytest.fail(reason) if name in REQUIRED else pytest.skip(reason, allow_module_level=True)
    return device
