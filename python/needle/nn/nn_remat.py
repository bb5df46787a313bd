"""Activation checkpointing: less memory for one more forward pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from ..autograd import check_runs_in_its_call, rematerialize
from .nn_basic import Module


def remat(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)``, whose inner arrays are dropped and computed again when backward needs them.

    Without arguments nothing is called: a Module is changed so that its calls do this from now on, and returned; of another
    function a version that does so is returned. Kept are the values that come in and go out. The function itself runs once;
    its ops run again on what they had, so results are the same bits, dropout included, and whatever else it does (drawing
    random numbers, running statistics) happens once. May be nested. One exception: under ``amp.autocast`` each region casts
    a weight for itself, so a weight of several regions has its gradient summed in its own dtype, which rounds less.

    raises: TypeError for what cannot be called; from backward, GraphError if a parameter was changed in place in between.
    source: Chen et al. 2016, arXiv:1604.06174.
    """
    if not callable(function):
        raise TypeError(f"[remat] cannot call {type(function).__name__} (accepted: a Module, or another function)")
    check_runs_in_its_call("remat", function)
    if args or kwargs:
        with rematerialize():
            return function(*args, **kwargs)
    if isinstance(function, Module):
        function.rematerialized = True
        return function

    @wraps(function)
    def version(*args, **kwargs):
        with rematerialize():
            return function(*args, **kwargs)

    return version


__all__ = ["remat"]
