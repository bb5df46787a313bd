"""Compiles the emulator and a test program with the C++ compiler at hand, once per session and way of building."""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).parent
COMMON = HERE.parents[1] / "src" / "common"
BASE_FLAGS = ["-std=c++17", "-g", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", f"-I{COMMON}", f"-I{HERE}"]

# For each way of building: the compiler, flags of runtime and programs, flags of the programs alone, flags to link.
MODES = {
    "plain": ("g++", ["-O2"], [], []),
    "clang": ("clang++", ["-O2"], [], []),
    "ucontext": ("g++", ["-O1", "-DNEEDLE_SIM_FORCE_UCONTEXT"], [], []),
    "asan": (
        "g++",
        ["-O1", "-fsanitize=address,undefined,bounds,alignment", "-fno-sanitize-recover=undefined,bounds,alignment"],
        [],
        [],
    ),
    "race": (
        "g++",
        ["-O1", "-DNEEDLE_RACE"],
        ["-fsanitize=thread", "-fno-tree-loop-distribute-patterns"],
        [],
    ),
    "arm64": ("aarch64-linux-gnu-g++", ["-O1"], [], ["-static"]),
}


def _compile(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, " ".join(command) + "\n" + done.stderr


class Programs:
    """Builds programs and runs them."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.runtimes: dict[str, list[str]] = {}
        self.programs: dict[tuple[str, str], Path] = {}

    def runtime(self, mode: str) -> list[str]:
        if mode not in self.runtimes:
            compiler, flags, _, _ = MODES[mode]
            out = self.folder / mode
            out.mkdir()
            sources = sorted((COMMON / "cuda_sim").glob("*.cc"))
            objects = [str(out / f"{s.stem}.o") for s in sources]
            with ThreadPoolExecutor(2) as pool:
                commands = [[compiler, *BASE_FLAGS, *flags, "-c", str(s), "-o", o] for s, o in zip(sources, objects)]
                list(pool.map(_compile, commands))
            self.runtimes[mode] = objects
        return self.runtimes[mode]

    def build(self, name: str, mode: str) -> Path:
        compiler, flags, program_flags, link_flags = MODES[mode]
        if shutil.which(compiler) is None:
            pytest.skip(f"no {compiler} here")
        if (name, mode) not in self.programs:
            objects = self.runtime(mode)
            program = self.folder / mode / name
            source = ["-x", "c++", "-c", str(HERE / f"{name}.cu"), "-o", f"{program}.o"]
            _compile([compiler, *BASE_FLAGS, *flags, *program_flags, *source])
            _compile([compiler, *flags, *link_flags, f"{program}.o", *objects, "-o", str(program), "-lpthread", "-ldl"])
            self.programs[name, mode] = program
        return self.programs[name, mode]

    def run(self, name: str, mode: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        program = self.build(name, mode)
        launcher = []
        if mode == "arm64":
            emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
            if emulator is None:
                pytest.skip("no qemu-aarch64 here")
            launcher = [emulator]
        return subprocess.run(
            [*launcher, str(program), *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0", **environment},
        )


@pytest.fixture(scope="session")
def programs(tmp_path_factory) -> Programs:
    return Programs(tmp_path_factory.mktemp("cuda_sim"))
