"""Devices as fixtures."""

import pytest

from devices import DEVICES, usable


@pytest.fixture(params=DEVICES)
def device(request):
    return usable(request.param)


@pytest.fixture(params=[name for name in ("cpu_numpy", "cpu") if name in DEVICES])
def host(request):
    return usable(request.param)


@pytest.fixture
def cpu():
    return usable("cpu")
