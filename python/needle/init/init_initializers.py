"""Initializers by fan-in and fan-out; further arguments are those of ``rand`` and ``randn``.

source: Glorot & Bengio 2010 (xavier), He et al. 2015 (kaiming).
"""

from __future__ import annotations

import math

from ..backend_ndarray.shapes import as_shape
from ..errors import check_number, check_real
from .init_basic import rand, randn

__all__ = ["kaiming_normal", "kaiming_uniform", "xavier_normal", "xavier_uniform"]


def xavier_uniform(fan_in, fan_out, gain=1.0, **kwargs):
    """Uniform +-a with a = gain sqrt(6 / (fan_in + fan_out)), shape (fan_in, fan_out)."""
    shape = as_shape((fan_in, fan_out))
    check_number("xavier_uniform", "gain", gain)
    a = gain * math.sqrt(6.0 / max(sum(shape), 1))
    return rand(*shape, low=-a, high=a, **kwargs)


def xavier_normal(fan_in, fan_out, gain=1.0, **kwargs):
    """Normal with standard deviation gain sqrt(2 / (fan_in + fan_out)), shape (fan_in, fan_out)."""
    shape = as_shape((fan_in, fan_out))
    check_number("xavier_normal", "gain", gain)
    return randn(*shape, std=gain * math.sqrt(2.0 / max(sum(shape), 1)), **kwargs)


def _check_relu(nonlinearity):
    if nonlinearity != "relu":
        raise AssertionError("Only relu supported currently")  # the course asserts it; python -O would drop that


def kaiming_uniform(fan_in, fan_out, shape=None, nonlinearity="relu", **kwargs):
    """Uniform +-sqrt(6 / fan_in), of ``shape`` or (fan_in, fan_out).

    raises: AssertionError for another nonlinearity, as the course's does.
    """
    if isinstance(shape, str):  # homework 2 has nonlinearity as its third argument
        shape, nonlinearity = None, shape
    _check_relu(nonlinearity)
    shape = as_shape((fan_in, fan_out) if shape is None else shape)
    check_real("kaiming_uniform", "fan_in", fan_in)
    bound = math.sqrt(2.0) * math.sqrt(3.0 / max(fan_in, 1))
    return rand(*shape, low=-bound, high=bound, **kwargs)


def kaiming_normal(fan_in, fan_out, nonlinearity="relu", **kwargs):
    """Normal with standard deviation sqrt(2 / fan_in), shape (fan_in, fan_out). raises: as ``kaiming_uniform``."""
    _check_relu(nonlinearity)
    shape = as_shape((fan_in, fan_out))
    return randn(*shape, std=math.sqrt(2.0) / math.sqrt(max(fan_in, 1)), **kwargs)
