"""What the command lines of needle and of its apps share: how flags are written, what errors say, how a program ends."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import warnings
from collections.abc import Callable
from typing import NoReturn

from .config import VARIABLES
from .errors import CheckpointError, DataError, DeviceError, ShapeError

# Errors that the user can mend. FloatingPointError: training or generating has driven numbers out of range.
EXPECTED = (ShapeError, DataError, DeviceError, CheckpointError, IndexError, MemoryError, FloatingPointError)


def flag(group, name: str, **kwargs) -> None:
    """Adds the flag --a_b, also spelt --a-b. A switch also gets --no_a_b, to switch off what a file has switched on."""
    if kwargs.get("type") in (int, float):
        kwargs.setdefault("metavar", "N" if kwargs["type"] is int else "X")
    group.add_argument(*_spellings(name), **kwargs)
    if kwargs.get("action") == "store_true":
        group.add_argument(*_spellings(f"no_{name}"), action="store_false", dest=name, default=False, help=argparse.SUPPRESS)


def _spellings(name: str) -> list[str]:
    return [f"--{name}"] + ([f"--{name.replace('_', '-')}"] if "_" in name else [])


class Parser(argparse.ArgumentParser):
    """An argument parser that says what is wrong in one line."""

    def __init__(self, prog: str, description: str, **kwargs):
        super().__init__(prog=prog, description=description, formatter_class=HelpFormatter, allow_abbrev=False, **kwargs)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        sys.stdout.flush()  # of the help, here as in exit_code
        super().exit(status, message)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {DataError(message)} (--help lists the flags)\n")  # DataError: in one line


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Appends the default to a flag's help if there is one; the other flags' help says what happens without them."""

    def _get_help_string(self, action):
        nothing = action.default is None or action.default is False or action.default == []
        return action.help if nothing else super()._get_help_string(action)


def exit_code(prog: str, program: Callable[[], int], interrupted: str = "") -> int:
    """Runs ``program`` and returns its exit code. An expected error prints one line on stderr and gives 2; Ctrl-C prints
    ``interrupted`` and what the exception says, and gives 130; stdout closed early, as in ``... | head``, gives 1.
    """
    try:
        code = program()
        sys.stdout.flush()  # here, so that a closed pipe or a full disk is noticed below
        return code
    except EXPECTED as error:
        print(f"{prog}: error: {str(error) or 'out of memory'}", file=sys.stderr)
        return 2
    except ValueError as error:
        if not str(error).lstrip("[").startswith(tuple(VARIABLES)):
            raise
        print(f"{prog}: error: {DataError(error)}", file=sys.stderr)  # an environment variable, read when kernels first run
        return 2
    except KeyboardInterrupt as error:
        if interrupted:
            print("", interrupted, *error.args, sep="\n", file=sys.stderr)
        return 130
    except OSError as error:
        gone = isinstance(error, BrokenPipeError)
        if not gone:  # stdout is a file on a full disk, for example
            what = error if error.filename is not None else f"[stdout] cannot be written: {error.strerror or error}"
            print(f"{prog}: error: {what}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python will try again to write what is buffered
        return 1 if gone else 2


def ending_signals() -> list[int]:
    """SIGTERM; SIGHUP, which a terminal sends as it is closed; SIGUSR1, SIGUSR2 and SIGXCPU, by which batch systems tell that the
    time is nearly over. Not those that are ignored, as nohup has SIGHUP."""
    told = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
    return [signal.SIGTERM, *[number for number in told if signal.getsignal(number) is not signal.SIG_IGN]]


def run_program(main: Callable[[], int]) -> NoReturn:
    """Runs ``main`` and ends the process. During ``main`` Ctrl-C is a KeyboardInterrupt and an ending signal a SystemExit, so that
    nothing half-written is left; after it, each ends the process at once, without a traceback.
    """

    def end(number: int, _: object) -> NoReturn:
        sys.exit(128 + number)  # as shells have it

    def line(message, category, *where):  # what needle warns of is the user's to know, without a line of its source
        return f"note: {message}\n" if category is UserWarning else formatwarning(message, category, *where)

    formatwarning, warnings.formatwarning = warnings.formatwarning, line
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ending = ending_signals()
    for number in ending:
        signal.signal(number, end)
    standard_streams()
    try:
        code = main()
        for number in (signal.SIGINT, *ending):
            signal.signal(number, signal.SIG_DFL)
    except KeyboardInterrupt:  # a second one, while the first was being told
        code = 130
    sys.exit(code)


def standard_streams() -> None:
    """Opens closed standard streams to /dev/null, and has characters that a stream cannot encode written as escapes."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
