"""Parts of the CPU backend, each alone in a C++ program: the thread pool, under each sanitizer, and the allocator."""

import platform
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
COMMON = HERE.parents[1] / "src" / "common"


@pytest.fixture
def program(tmp_path):
    """Builds a program from a source of this folder and some of the backend's, with more flags; gives where it is."""

    def build(name, *sources, flags):
        made = tmp_path / name
        flags = ["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", *flags, f"-I{COMMON}"]
        files = [str(HERE / f"{name}.cc"), *(str(COMMON / source) for source in sources)]
        built = subprocess.run(["c++", *flags, *files, "-o", made, "-lpthread"], capture_output=True, text=True)
        assert built.returncode == 0, built.stderr
        return made

    return build


def check(*command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout == "ok\n", done.stdout + done.stderr


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_the_pool_is_clean_under(sanitizer, program):
    made = program("pool", "parallel.cc", flags=[f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"])
    # The thread sanitizer wants the usual address layout, and follows no fork of a process with threads.
    check(*(["setarch", platform.machine(), "-R", made, "no-fork"] if sanitizer == "thread" else [made]))


@pytest.mark.parametrize("caching", ["ranges", "blocks"])
def test_what_the_heap_refuses_costs_no_memory_and_not_the_process(caching, program):
    """Without sanitizers: under them the allocator keeps nothing."""
    made = program("allocator", "allocator.cc", "parallel.cc", flags=[])
    check(made, *(["blocks"] if caching == "blocks" else []))
