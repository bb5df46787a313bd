"""Flags in a YAML file: ``--config``, and the config.yaml that a run leaves."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import reprlib
from pathlib import Path
from typing import Any

from needle import files
from needle.errors import DataError

CONFIG = "config.yaml"
STARTED = "What the run was started with; with --config and this file it is repeated."  # its first line
MOST_BYTES = 1 << 16  # of a file: PyYAML takes ten seconds for a megabyte
# Flags that say what to do or where, not what the run is: a run's config.yaml is without them.
LOCAL = ("config", "checkpoint_dir", "resume", "load_checkpoint", "plan", "eval_only", "compare_dense")


def read(path: str, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """The values of the flags that the file names, of the types that ``parser`` gives them.

    raises: DataError, in one line, for a file that cannot be read or is no YAML, for keys that are no flags or come twice, and for
    values of another type.
    """
    return checked(_mapping(path), parser, f"[config] {path}")


def checked(values: dict[Any, Any], parser: argparse.ArgumentParser, where: str) -> dict[str, Any]:
    """The values of flags, of the types that ``parser`` gives them. where: for error messages. raises: DataError, as ``read``."""
    actions: dict[str, argparse.Action] = {}
    for action in parser._actions:
        if action.dest not in ("help", "config"):
            actions.setdefault(action.dest, action)
    found = {}
    for key, value in values.items():
        if key not in actions:
            near = difflib.get_close_matches(str(key), actions, 1, 0.5)
            raise DataError(f"{where}: unknown key {reprlib.repr(key)} ({f'is it {near[0]}?' if near else '--help lists all'})")
        found[key] = _checked(actions[key], value, f"{where}: {key}")
    return found


def write(path: Path, options: argparse.Namespace, says: str) -> None:
    """All flags but the local ones, under a comment that ``says`` what they are of. raises: DataError."""
    text = "".join(f"# {line}\n" for line in says.splitlines()) + yaml_package().safe_dump(kept(options), sort_keys=False)
    with files.write_whole(path) as file:
        file.write(text.encode())


def keep(folder: Path, options: argparse.Namespace, first: int) -> None:
    """Writes the run's config.yaml. One that is the user's, or from which a run goes on at step ``first``, is left alone: flags
    that differ from it are written beside it.
    """
    path, says = folder / CONFIG, STARTED
    if path.is_file() and (first or _is_the_users(path, options)):
        with contextlib.suppress(DataError):
            if _mapping(str(path)) == kept(options):
                return
        path, says = folder / f"config-from-step-{first}.yaml", f"The flags from step {first} on."
    write(path, options, says)


def _is_the_users(path: Path, options: argparse.Namespace) -> bool:
    """False for what a run left that was killed before its first checkpoint."""
    given = options.config is not None and path.samefile(files.home(options.config))
    return given or not path.read_bytes().startswith(f"# {STARTED}".encode())


def kept(options: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(options).items() if name not in LOCAL}


def yaml_package():
    """raises: DataError if it is missing."""
    try:
        import yaml
    except ModuleNotFoundError:
        raise DataError("[config] the package PyYAML is missing (pip install PyYAML)") from None
    return yaml


def _mapping(path: str) -> dict[Any, Any]:
    yaml = yaml_package()

    class Loader(yaml.SafeLoader):
        """With errors of its own: for a key that comes twice, and where PyYAML has others than YAMLError."""

        def construct_mapping(self, node, deep=False):
            seen = set()
            for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
                if isinstance(key, yaml.ScalarNode) and (key.value in seen or seen.add(key.value)):
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {reprlib.repr(key.value)} comes twice", key.start_mark
                    )
            return super().construct_mapping(node, deep)

        def flatten_mapping(self, node):
            """Not done: mappings that merge others that do may become as large as they like, and flags need none."""

        def construct_object(self, node, deep=False):
            try:
                found = super().construct_object(node, deep)
                if isinstance(found, int):
                    str(found)  # Python refuses that of thousands of digits, as no message should have
                return found
            except (AttributeError, LookupError, TypeError, ValueError):  # of a tag that does not fit, of the 31st of February
                wrong = f"{reprlib.repr(node.value)} is no {node.tag.rpartition(':')[2]}"
                raise yaml.constructor.ConstructorError(None, None, wrong, node.start_mark) from None

    try:
        found = yaml.load(files.read_small(files.home(path), MOST_BYTES), Loader)
    except yaml.MarkedYAMLError as error:
        at = error.problem_mark and f" (line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1})"
        raise DataError(f"[config] {path}: {files.reason(ValueError(error.problem))}{at or ''}") from None
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        said = "nested too deeply" if isinstance(error, RecursionError) else files.reason(error)
        raise DataError(f"[config] cannot read {path}: {said}") from None
    if not isinstance(found, dict):
        raise DataError(f"[config] {path} is no mapping (accepted: lines like `lr: 0.001`)")
    return found


def _checked(action: argparse.Action, value: Any, where: str) -> Any:
    """The value as the command line would give it."""
    if value is None and action.default is None:
        return None
    accepted = {int: "a whole number", float: "a number", None: "a word"}[action.type]  # type: ignore[index]
    if action.nargs == 0:
        accepted = "true or false"
        if isinstance(value, bool):
            return value
    elif isinstance(action.nargs, int):
        accepted = f"[{', '.join([accepted] * action.nargs)}]"
        if isinstance(value, list) and len(value) == action.nargs:
            return [_scalar(action.type, each, f"{where} is {reprlib.repr(value)} (accepted: {accepted})") for each in value]
    else:
        return _scalar(action.type, value, f"{where} is {reprlib.repr(value)} (accepted: {accepted})")
    raise DataError(f"{where} is {reprlib.repr(value)} (accepted: {accepted})")


def _scalar(kind: Any, value: Any, wrong: str) -> Any:
    if not isinstance(value, bool):
        if kind is None and isinstance(value, (str, int)):
            return str(value)
        if kind is int and isinstance(value, int):
            return value
        if kind is float and isinstance(value, (int, float, str)):  # YAML takes 1e-3, without a point, for text
            try:
                return float(value)
            except (ValueError, OverflowError):
                pass
    raise DataError(wrong)
