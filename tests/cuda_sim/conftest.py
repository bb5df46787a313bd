"""Compiles the emulator and a test program with the C++ compiler at hand, once per session and way of building."""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).parent
COMMON = HERE.parents[1] / "src" / "common"
SIM = COMMON / "cuda_sim"
BASE_FLAGS = ["-std=c++17", "-g1", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", f"-I{HERE}"]

# For each way of building: the compiler, flags of runtime and programs, flags of the programs alone, flags to link.
MODES = {
    "plain": ("g++", ["-O2"], [], []),
    "clang": ("clang++", ["-O1"], [], []),
    "ucontext": ("g++", ["-O0", "-DNEEDLE_SIM_FORCE_UCONTEXT"], [], []),
    "asan": (
        "g++",
        ["-O0", "-fsanitize=address,undefined,bounds,alignment", "-fno-sanitize-recover=undefined,bounds,alignment"],
        [],
        [],
    ),
    "race": (
        "g++",
        ["-O1", "-DNEEDLE_RACE"],
        ["-fsanitize=thread", "-fno-tree-loop-distribute-patterns"],
        [],
    ),
    # As docs/cuda.md compiles a file alone: each access has its line all the same.
    "race_unoptimized": ("g++", ["-O0", "-DNEEDLE_RACE"], ["-fsanitize=thread"], []),
    "arm64": ("aarch64-linux-gnu-g++", ["-O1"], [], ["-static"]),
    "ptx": ("g++", ["-O1", "-DNEEDLE_PTX=1", "-fwrapv", "-ffp-contract=off"], [], []),  # the kernels as nvcc compiles them
}
# What a whole run needs, in the order of its tests: built ahead by two threads.
NEEDED = [
    *[("semantics", mode) for mode in MODES if mode not in ("race_unoptimized", "ptx")],
    *[("tensor_cores", mode) for mode in ("plain", "asan", "race", "ptx")],
    ("lifecycle", "plain"),
    *[("faults", mode) for mode in ("plain", "clang")],
    ("overruns", "asan"),
    *[("races", mode) for mode in ("race", "race_unoptimized")],
    ("wrong_answers", "plain"),
    *[("row_sums", mode) for mode in ("plain", "race")],
]


def missing(mode: str) -> str | None:
    """A compiler that the mode needs and that is not here."""
    return next((name for name in (MODES[mode][0], *(["nvcc"] if mode == "ptx" else [])) if shutil.which(name) is None), None)


def _compile(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, " ".join(command) + "\n" + done.stderr


class Programs:
    """Builds programs, each once, and runs them. folder: several test processes may share it."""

    def __init__(self, folder: Path, ahead: list[tuple[str, str]]):
        self.folder = folder
        self.pool = ThreadPoolExecutor(2)
        self.programs: dict[tuple[str, str], Future] = {}
        for name, mode in ahead:
            self.submit(name, mode)

    def submit(self, name: str, mode: str) -> Future:
        if (name, mode) not in self.programs:
            self.programs[name, mode] = self.pool.submit(self.compile, name, mode)
        return self.programs[name, mode]

    def once(self, path: Path, *commands: list[str]) -> Path:
        """The file that the last of the commands makes. The first to ask runs them, other threads and processes wait."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(f"{path}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                for command in commands:
                    _compile(command)
        return path

    def runtime(self, mode: str) -> Path:
        """The emulator, its sources compiled as one: each alone takes most of its time for the headers that all include."""
        compiler, flags, _, _ = MODES[mode]
        out = self.folder / mode / "runtime.o"
        files = [file for pattern in ("*.cc", *(["ptx/*.cc"] if mode == "ptx" else [])) for file in sorted(SIM.glob(pattern))]
        sources = [word for file in files for word in ("-include", str(file))]
        return self.once(
            out, [compiler, *BASE_FLAGS, f"-I{COMMON}", *flags, *sources, "-x", "c++", "-c", os.devnull, "-o", str(out)]
        )

    def compile(self, name: str, mode: str, common: Path = COMMON) -> Path | None:
        """common: a copy of src/common, beside which the program then is."""
        compiler, flags, program_flags, link_flags = MODES[mode]
        if missing(mode):
            return None
        runtime = self.runtime(mode)
        program = (self.folder / mode if common == COMMON else common.parent) / name
        flags = [*BASE_FLAGS, f"-I{common}", *flags]
        source = str(HERE / f"{name}.cu")
        commands = [[compiler, *flags, *program_flags, "-x", "c++", "-c", source, "-o", f"{program}.o"]]
        objects = [f"{program}.o", str(runtime)]
        if mode == "ptx":
            ptx, translated = f"{program}.ptx", f"{program}.ptx.cc"
            objects.append(f"{translated}.o")
            commands += [
                ["nvcc", "-std=c++17", f"-I{common}", "-arch=compute_80", "-ptx", source, "-o", ptx],
                [sys.executable, str(SIM / "ptx" / "translate.py"), ptx, translated],
                [compiler, *flags, "-c", translated, "-o", objects[-1]],
            ]
        return self.once(program, *commands, [compiler, *flags, *link_flags, *objects, "-o", str(program), "-lpthread", "-ldl"])

    def run(self, name: str, mode: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        launcher = []
        if mode == "arm64" and platform.machine() != "aarch64":
            emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
            if emulator is None:
                pytest.skip("no qemu-aarch64 here")
            launcher = [emulator]
        program = self.submit(name, mode).result()
        if program is None:
            pytest.skip(f"no {missing(mode)} here")
        return subprocess.run(
            [*launcher, str(program), *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0", **environment},
        )


@pytest.fixture(scope="session")
def programs(tmp_path_factory, request):
    whole_run = sum(item.path.parent == HERE for item in request.session.items) > 20
    mine = tmp_path_factory.getbasetemp()
    shared = mine.parent if "PYTEST_XDIST_WORKER" in os.environ else mine
    built = Programs(shared / "cuda_sim", NEEDED if whole_run else [])
    yield built
    built.pool.shutdown(cancel_futures=True)
