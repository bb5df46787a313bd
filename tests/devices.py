"""The devices that tests run on. One that is absent is skipped with its reason, unless NEEDLE_REQUIRE_DEVICES names it: then it fails."""

import os

import pytest

import needle as ndl

DEVICES = ("cpu_numpy", "cpu", "cuda_sim", "cuda")
REQUIRED = {name for name in os.environ.get("NEEDLE_REQUIRE_DEVICES", "").split(",") if name}


def usable(name):
    device = getattr(ndl, name)()
    if not device.enabled():
        reason = f"{name}: {device.why_absent()}"
        pytest.fail(reason) if name in REQUIRED else pytest.skip(reason)
    return device
