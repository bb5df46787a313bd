"""The state of random numbers: numpy's global stream, which ``init`` and ``nn.Dropout`` draw from, and a model's counters."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import CheckpointError
from ..nn.nn_basic import Module, SeededDropout, _child_modules

_WORDS = 624  # of a Mersenne twister


def random_state(model: Module) -> dict[str, Any]:
    """The state of numpy's global stream and of the model's SeededDropout layers, as JSON can hold it."""
    numpy: dict[str, Any] = np.random.get_state(legacy=False)
    numpy["state"]["key"] = numpy["state"]["key"].tolist()
    return {"numpy": numpy, "drawn": [dropout.drawn for dropout in _dropouts(model)]}


def set_random_state(model: Module, state: dict[str, Any]) -> None:
    """Restores what ``random_state`` gave. raises: CheckpointError if ``state`` is no such state, or of another model."""
    dropouts = _dropouts(model)
    try:
        numpy, drawn = state["numpy"], [int(count) for count in state["drawn"]]
        key, place = np.array(numpy["state"]["key"], np.uint32), numpy["state"]["pos"]
        if key.shape != (_WORDS,) or not 0 <= place <= _WORDS:  # numpy would read memory that is not its own
            raise ValueError(f"place {place} among {key.size} numbers ({_WORDS} of them)")
        if len(drawn) != len(dropouts) or not all(0 <= count < 1 << 62 for count in drawn):
            raise ValueError(f"masks drawn by dropout layers: {drawn} (a count for each of {len(dropouts)})")
        np.random.set_state({**numpy, "state": {**numpy["state"], "key": key}})
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"[random_state] not a state of this model: {error}") from error
    for dropout, count in zip(dropouts, drawn):
        dropout.drawn = count


def _dropouts(model: Module) -> list[SeededDropout]:
    """The model's SeededDropout modules; a shared one once."""
    return list(dict.fromkeys(m for m in _child_modules(model.__dict__) if isinstance(m, SeededDropout)))
