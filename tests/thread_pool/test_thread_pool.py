"""The CPU backend's thread pool, alone in a C++ program, under each sanitizer."""

import platform
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
COMMON = HERE.parents[1] / "src" / "common"


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_clean_under(sanitizer, tmp_path):
    program = tmp_path / "pool"
    flags = ["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    sources = [str(HERE / "pool.cc"), str(COMMON / "parallel.cc")]
    built = subprocess.run(["c++", *flags, f"-I{COMMON}", *sources, "-o", program, "-lpthread"], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    # The thread sanitizer wants the usual address layout, and follows no fork of a process with threads.
    command = ["setarch", platform.machine(), "-R", program, "no-fork"] if sanitizer == "thread" else [program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout == "ok\n", done.stdout + done.stderr
