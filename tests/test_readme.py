"""What README shows is what happens: its Python prints what it says, its flags and commands exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "python"), os.environ.get("PYTHONPATH", "")])}


def run(*arguments):
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, env=ENVIRONMENT)


@pytest.mark.parametrize(
    "code, printed", re.findall(r"```python\n(.*?)```\n\nprints\n\n```\n(.*?)```", README, re.S), ids=["first", "network", "leak"]
)
def test_python(code, printed):
    done = run("-c", code)
    assert done.returncode == 0 and done.stdout == printed, done.stdout + done.stderr


def test_the_version_is_one():
    """What a wheel is called, which is read from the package, and what the package says."""
    source = re.search(r"^input = \"(.*)\"", (ROOT / "pyproject.toml").read_text(), re.M)[1]
    (version,) = re.findall(r"^__version__ = \"(\d+\.\d+\.\d+)\"$", (ROOT / source).read_text(), re.M)
    assert run("-m", "needle", "--version").stdout == f"needle {version}\n"


def test_every_python_block_is_run():
    assert README.count("```python\n") == 3


def test_the_plan():
    """Its rows and columns; the figures follow the code."""
    shown = re.search(r"    \$ python -m needle (plan .*)\n((?:    .*\n)+)", README)
    done = run("-m", "needle", *shown[1].split())
    assert done.returncode == 0, done.stderr
    title, header, *rows = (line.strip() for line in shown[2].splitlines())
    printed = [line.strip() for line in done.stdout.splitlines()]
    assert title in printed and header.split() in [line.split() for line in printed]
    assert {row.split()[0] for row in rows} - {"..."} <= {line.split()[0] for line in printed if line}


def test_a_plan_that_nobody_reads_to_its_end():
    """As in `python -m needle plan | head`."""
    command = [sys.executable, "-m", "needle", "plan", "--model", "14m", "--seq_len", "64", "--batch_size", "1"]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait() == 1


@pytest.mark.parametrize(
    "line", [["-m", "needle", "--version"], ["-m", "needle", "plan", "-h"], ["apps/generate.py", "-h"]], ids=lambda line: line[-2]
)
def test_help_that_nobody_reads(line):
    reading, writing = os.pipe()
    os.close(reading)
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run([sys.executable, *line], cwd=ROOT, env=environment, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert done.returncode == 1 and done.stderr == ""


def test_flags_and_targets():
    helps = run("apps/train_pythia.py", "--help").stdout + run("-m", "needle", "plan", "--help").stdout
    benchmarks = (ROOT / "benchmarks" / "run.py").read_text()
    for flag in re.findall(r"(?<![\w-])--[a-z][a-z_-]*", README):
        assert flag in helps + benchmarks, flag
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:`|    )make ([a-z-]+)", README):
        assert re.search(rf"^(?:[\w-]+ )*{target}(?: [\w-]+)*:", makefile, re.M), target


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.stem)
def test_files(page):
    folders = ("apps", "benchmarks", "docs", "examples", "python", "src", "tests")
    there = [str(path) for folder in folders for path in (ROOT / folder).rglob("*")]
    for name in re.findall(r"`([\w./-]+\.(?:md|py|cc|cuh?|h|def))`", page.read_text()):
        assert any(path.endswith(f"/{name}") for path in there), name
