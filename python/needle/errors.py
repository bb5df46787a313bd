"""needle's exceptions. Each derives from the builtin that a numpy user would catch."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from numbers import Real
from typing import Any, ClassVar

# What a terminal would obey, as pictures (U+2400 and on), or U+FFFD where there are none.
CONTROLS = {i: 0x2400 + i for i in range(32) if chr(i) not in "\n\t"} | {127: 0x2421} | dict.fromkeys(range(128, 160), 0xFFFD)


def type_name(value: object) -> str:
    """The name of its type, with the package in front where that is neither Python nor needle: torch.Tensor."""
    package, kind = type(value).__module__.split(".")[0], type(value).__name__
    return kind if package in ("builtins", __package__) else f"{package}.{kind}"


def check_real(op: str, name: str, value: Any) -> None:
    """raises: TypeError for what is no number, as True and False are none: by place, another argument."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"[{op}] {name} is of type {type_name(value)} (accepted: a number)")


def check_number(op: str, name: str, value: Any, most: float | None = None, below: float = math.inf) -> None:
    """raises: TypeError as ``check_real``; ValueError for NaN, and for one outside 0 to ``most``, or else not ``below``."""
    check_real(op, name, value)
    if most is not None and not 0 <= float(value) <= most:
        raise ValueError(f"[{op}] {name} is {value} (accepted: 0 to {most})")
    if not 0 <= float(value) < below:
        raise ValueError(f"[{op}] {name} is {value} (accepted: 0 or more, {'finite' if below == math.inf else f'below {below}'})")


def as_whole(value: Any) -> int | None:
    """``value`` as an int; None for what is no whole number, as True and False are none, and arrays with an axis."""
    if getattr(value, "ndim", 0) or isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def shown(value: Any) -> str:
    """``value`` in an error: of an array with axes its type, not its numbers."""
    return f"of type {type_name(value)}" if getattr(value, "shape", ()) != () else repr(value)


def check_count(
    op: str, name: str, value: Any, least: int = 1, most: int | None = None, error: type[Exception] | None = None
) -> int:
    """``value`` as an int. raises: ``error``, default ShapeError, for what is none by ``as_whole``, or outside of the range."""
    count = as_whole(value)
    if count is None or count < least or (most is not None and count > most):
        accepted = f"of at least {least}" if most is None else f"from {least} to {most}"
        found = shown(value) if count is None else count
        raise (error or ShapeError)(f"[{op}] {name} is {found} (accepted: a whole number {accepted})")
    return count


def check_flag(op: str, name: str, value: Any) -> None:
    """raises: TypeError for what is neither True nor False: by place, another library's argument."""
    if not isinstance(value, bool):
        raise TypeError(f"[{op}] {name} is {shown(value)} (accepted: True or False)")


class _OneLine(Exception):
    """Its text is one line, also where a value in it would be printed on several, and no longer than can be read: what a file says
    may be a text of megabytes. Then its middle is left out. A terminal obeys nothing in it: a file may have any name.
    """

    def __init__(self, message: object = ""):
        text = " ".join(str(message).split()).translate(CONTROLS)
        super().__init__(text if len(text) <= 2000 else f"{text[:1200]} ... {text[-600:]}")


class ShapeError(_OneLine, ValueError):
    """Shapes or axes do not fit, or a setting is none of those accepted."""


class DTypeError(_OneLine, TypeError):
    """A dtype is unknown or not accepted by an op."""


class DeviceError(_OneLine, RuntimeError):
    """A device is absent, or arrays of one op are on different devices."""


class GraphError(RuntimeError):
    """Autograd cannot do what was asked: no graph, a dead root, a changed parameter."""


class DataError(_OneLine, ValueError):
    """A data set, a text or a tokenizer cannot be used."""


class CheckpointError(_OneLine, ValueError):
    """A checkpoint cannot be read or does not fit the model."""


def check_state(state: Any) -> None:
    """raises: CheckpointError for what is no dict: the path of a file, for example, whose letters would pass for names."""
    if not hasattr(state, "keys"):
        raise CheckpointError(f"[load_state_dict] the state is of type {type_name(state)} (accepted: what state_dict gives)")


class KernelError(RuntimeError):
    """A kernel failed while running."""


class OutOfMemoryError(MemoryError):
    """A device's allocator could not, or by its limit must not, give the memory.

    ``requested_bytes`` is what was asked, 0 where it was the driver that wanted some; ``stats`` is the allocator's account at that
    moment.
    """

    # Adds to the text who holds the memory and what would fit: needle.memory puts it here.
    explain: ClassVar[Callable[[OutOfMemoryError, str], str] | None] = None

    def __init__(self, message: str, requested_bytes: int = 0, stats: dict | None = None):
        self.requested_bytes = requested_bytes
        self.stats = stats or {}
        if OutOfMemoryError.explain is not None and stats is not None:
            try:
                message = OutOfMemoryError.explain(self, message)
            except Exception:  # near the limit of recursion, say: the failure is told without more
                pass
        super().__init__(message)


class NeedleTestError(AssertionError):
    """A check of ``needle.testing`` failed."""
