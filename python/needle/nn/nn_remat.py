"""Activation checkpointing: less memory for one more forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..autograd import check_runs_in_its_call, rematerialize
from .nn_basic import Module


def remat(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Calls ``function(*args, **kwargs)``. Its inner arrays are dropped, and computed again when backward needs them; what comes in
    and what goes out is kept.

    Without arguments nothing is called. A Module is then changed so that all its calls work like this, and returned; for another
    function, one that works like this is returned.

    The function itself runs once. Backward runs its recorded ops again on the same inputs, so results are the same to the bit,
    dropout included, and side effects (drawing random numbers, updating running statistics) happen once. Calls may be nested.
    One difference: under ``amp.autocast`` each region makes its own cast of a weight. The gradient of a weight that several
    regions use is then summed in the weight's own dtype, which rounds less.

    raises: TypeError for what cannot be called, and for a class; from backward, GraphError for what has to be computed again from a
    parameter that was changed in place in between.
    source: Chen et al. 2016, arXiv:1604.06174.
    """
    check_runs_in_its_call("remat", function)
    if args or kwargs:
        with rematerialize():
            return function(*args, **kwargs)
    if isinstance(function, Module):
        function.rematerialized = True
        return function
    return rematerialize()(function)


__all__ = ["remat"]
