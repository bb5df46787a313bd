"""Devices as fixtures."""

import pytest

from devices import DEVICES, usable


@pytest.fixture(params=DEVICES)
def device(request):
    return usable(request.param)


@pytest.fixture(params=("cpu_numpy", "cpu"))
def host(request):
    return usable(request.param)


@pytest.fixture
def cpu():
    return usable("cpu")
