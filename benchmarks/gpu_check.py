"""For whoever has a GPU: build for it, run the parity suite on it, measure beside PyTorch, sanitize a part. Needs no network.

    make gpu-check
    python benchmarks/gpu_check.py --stages benchmarks sanitizer     # some of it, after a build
    python benchmarks/gpu_check.py --arch 90 --build-only            # compile for a GPU that is elsewhere
    python benchmarks/gpu_check.py --device cuda_sim --no-build      # the same road on the emulated device, in tiny shapes

Uses this machine's own Python packages: numpy, ml_dtypes, pybind11 (or its headers, which torch has), cmake, pytest; torch where it
is. Every row is appended to benchmarks/results as it is found, and everything said to build/gpu/log.txt; after --minutes what is
left is not begun. What failed is printed last and decides the exit code: 0, 1, or 2 where it cannot run at all.
"""

from __future__ import annotations

import argparse
import glob
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from interleave import append_results, cores, machine

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "gpu"
LOG = BUILD / "log.txt"
PYTEST = [sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", "-q"]
CHUNK = 48  # tests in one process
BENCHMARKS_S = 180  # that the tests leave for the benchmarks
SANITIZED = re.compile(r"test_parity\[.*float32.*(softmax|matmul|layer_norm|attention_sparse|dsd)|_on_tensor_cores\[.*bfloat16")
STAGES = ("build", "ready", "instructions", "parity", "benchmarks", "sanitizer")
PROGRAMS = ["tensor_cores", "semantics"]
GPU_GROUPS = ["gpu_step", "gpu_gemm", "gpu_attention", "gpu_products", "gpu_generation"]


class Failure(Exception):
    """A stage went wrong; the others still run."""


def say(text: str) -> None:
    print(text, flush=True)
    with open(LOG, "a") as file:
        file.write(text + "\n")


class Check:
    """One run: its options, its deadline and the environment of its processes."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.device = options, options.device
        self.end = time.monotonic() + 60 * options.minutes
        places = [os.environ.get("PATH", ""), Path(sys.executable).parent, sysconfig.get_path("scripts", f"{os.name}_user")]
        places += [Path(os.environ[name]) / "bin" for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
        places += ["/usr/local/cuda/bin", *sorted(glob.glob("/usr/local/cuda-*/bin"), reverse=True), "/usr/local/nvidia/bin"]
        self.environment = {
            **os.environ,
            "PATH": os.pathsep.join(map(str, places)),
            "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("python", "tests", "apps", "")),
            "NEEDLE_REQUIRE_DEVICES": self.device,
        }

    def tool(self, name: str) -> str | None:
        return shutil.which(name, path=self.environment["PATH"])

    def run(self, command: list, limit_s: float, leave_s: float = 0) -> tuple[int, str]:
        """Exit code and output; -9 after the limit, or when only ``leave_s`` are left for what follows.

        The whole family of processes ends then, stopped ones included.
        """
        left_s = self.end - leave_s - time.monotonic()
        if left_s <= 0:
            raise Failure("no time left")
        limit_s = min(limit_s, left_s)
        process = subprocess.Popen(
            [str(part) for part in command], cwd=ROOT, env=self.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        try:
            output = process.communicate(timeout=limit_s)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return -9, process.communicate()[0] + f"\n(ended after {limit_s:.0f} s)"
        except BaseException:  # Ctrl-C among them, which the family of processes, a session of its own, does not get
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return process.returncode, output

    def must(self, command: list, limit_s: float) -> str:
        code, output = self.run(command, limit_s)
        if code:
            say(output)
            raise Failure(f"exit code {code}")
        return output

    def record(self, **row) -> None:
        append_results(self.options.results / "gpu_check.jsonl", [{**machine(), "device": self.device, **row}])

    # ---- stages

    def requirements(self) -> str | None:
        """What is missing here, in one line, or None."""
        has, build = importlib.util.find_spec, not self.options.no_build
        wanted = {
            "numpy": has("numpy"),
            "ml_dtypes (bfloat16 in numpy)": has("ml_dtypes") or self.options.build_only,
            "pytest": has("pytest") or self.options.build_only,
            "pybind11 (or torch, which has its headers)": has("pybind11") or has("torch") or not build,
            "cmake": self.tool("cmake") or not build,
            "nvcc (of the CUDA toolkit, on PATH or in /usr/local/cuda)": self.tool("nvcc") or not build or self.device != "cuda",
        }
        missing = [name for name, found in wanted.items() if not found]
        if missing:
            return f"missing for {sys.executable}: {', '.join(missing)}"
        if self.device == "cuda" and not self.options.build_only and not self.gpus():
            return "no GPU here: nvidia-smi names none (--arch N --build-only compiles for a GPU that is elsewhere)"
        return None

    def gpus(self) -> list[tuple[str, str]]:
        """(name, compute capability as CMake writes it, "90") of each."""
        if self.tool("nvidia-smi") is None:
            return []
        code, output = self.run([self.tool("nvidia-smi"), "--query-gpu=name,compute_cap", "--format=csv,noheader"], 30)
        rows = re.findall(r"^(.+), (\d+)\.(\d)\s*$", output, re.MULTILINE)
        return [(name, major + minor) for name, major, minor in rows] if code == 0 else []

    def build(self) -> None:
        start = time.monotonic()
        if self.device == "cuda":
            arch = self.options.arch or ";".join(sorted({arch for _, arch in self.gpus()}))
            flags = ["NEEDLE_CUDA=ON", f"NEEDLE_CUDA_ARCHITECTURES={arch}", f"CMAKE_CUDA_COMPILER={self.tool('nvcc')}"]
            flags += ["NEEDLE_CUDA_SIM=OFF", "CMAKE_BUILD_TYPE=RelWithDebInfo"]  # compute-sanitizer names lines
        else:
            arch, flags = None, ["NEEDLE_CUDA=OFF", "NEEDLE_CUDA_SIM=ON"]
        (BUILD / "CMakeCache.txt").unlink(missing_ok=True)  # of another Python or toolkit, perhaps
        flags = [f"-D{flag}" for flag in (f"Python_EXECUTABLE={sys.executable}", *flags)]
        said = self.must([self.tool("cmake"), "-S", ROOT, "-B", BUILD, *flags], 120)
        say("\n".join(line for line in said.splitlines() if "needle:" in line))
        self.must([self.tool("cmake"), "--build", BUILD, "-j", os.cpu_count() or 2], 400)
        self.record(case="build", arch=arch, seconds=time.monotonic() - start)

    def ready(self) -> None:
        """The module loads, and finds a device."""
        code = f"import needle; d = needle.{self.device}(); print(d.require().device_properties(), d.cublaslt_in_use())"
        say(self.must([sys.executable, "-c", code], 60).strip())

    def tests(self) -> list[str]:
        """The tests that run on the device, by the name it has among their parameters."""
        _, output = self.run([*PYTEST, "--collect-only", "--continue-on-collection-errors", "tests"], 180)
        named = re.compile(rf"^tests/\S+\.py::\S+\[(.*-)?{self.device}(-.*)?\]$")
        found = [line for line in output.splitlines() if named.match(line) and re.search(self.options.tests, line)]
        for line in output.splitlines():
            if line.startswith("ERROR"):
                say(line)  # a module that lacks a package here; its tests are not counted
        if not found:
            say(output[-2000:])
            raise Failure(f"no test runs on {self.device}")
        return found

    def verdicts(self, tests: list[str]) -> Iterator[tuple[str, str | None]]:
        """(test, what it said if it failed), for as many as there is time.

        A test that loses the GPU takes those after it along, so each that did not pass runs again in a process of its own; all do
        where the process did not come to its end.
        """
        try:
            leave_s = BENCHMARKS_S if "benchmarks" in self.options.stages else 0
            code, output = self.run([*PYTEST, "--tb=short", *tests], 60 if len(tests) == 1 else 150, leave_s)
        except Failure:
            return
        if code == 0 or len(tests) == 1:
            yield from ((test, output if code else None) for test in tests)
            return
        named = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
        again = [test for test in tests if test in named] if code == 1 else tests
        if not again or len(again) < len(set(named)):  # what failed is not known by its name
            again = tests
        yield from ((test, None) for test in tests if test not in again)
        for test in again:
            yield from self.verdicts([test])

    def parity(self) -> None:
        tests, start = self.tests(), time.monotonic()
        chunks = [tests[i : i + CHUNK] for i in range(0, len(tests), CHUNK)]
        with ThreadPoolExecutor(min(4, cores())) as pool:
            verdicts = [verdict for chunk in pool.map(lambda chunk: list(self.verdicts(chunk)), chunks) for verdict in chunk]
        failed = [test for test, output in verdicts if output is not None]
        for test, output in verdicts:
            if output is not None:
                say(f"--- {test}\n{output}")
        passed, open_ = len(verdicts) - len(failed), len(tests) - len(verdicts)
        self.record(case="parity", tests=len(tests), passed=passed, failed=failed, not_run=open_, seconds=time.monotonic() - start)
        say(f"{passed} of {len(tests)} tests passed, {len(failed)} failed, {open_} not run for lack of time")
        if passed < len(tests):
            raise Failure(", ".join(failed[:5]) or f"{open_} tests not run")

    def benchmarks(self) -> None:
        only = [] if self.has_torch() else ["--only", "needle"]
        groups = GPU_GROUPS if self.device == "cuda" else ["smoke"]
        left = self.end - time.monotonic()
        rounds = 3 if self.device == "cuda" else 1
        command = [sys.executable, "benchmarks/run.py", *groups, "--device", self.device, "--rounds", rounds, *only]
        code, output = self.run([*command, "--seconds", max(1, left - 60), "--results", self.options.results], left)
        say(output)
        if code:
            raise Failure(f"exit code {code}")

    def has_torch(self) -> bool:
        asked = "import torch; raise SystemExit(0 if torch.cuda.is_available() else 1)" if self.device == "cuda" else "import torch"
        found = self.run([sys.executable, "-c", asked], 60)[0] == 0
        if not found:
            say("no PyTorch here that can use the device: needle is measured alone")
        return found

    def instructions(self) -> None:
        """The emulator's own test programs, run by the GPU: mma, ldmatrix, cp.async, ex2, shuffles, atomics, barriers."""
        nvcc = self.tool("nvcc")
        if nvcc is None or self.device != "cuda":
            say("left out: these are compiled by nvcc for a GPU; pytest runs them on the emulator")
            return
        arch = self.options.arch.split(";")[0] if self.options.arch else self.gpus()[0][1]
        sources = ROOT / "tests" / "cuda_sim"
        failed = []
        for name in PROGRAMS:
            program = BUILD / name
            flags = ["-std=c++17", f"-arch=sm_{arch}", "--expt-relaxed-constexpr", "--extended-lambda"]
            includes = [f"-I{ROOT / 'src' / 'common'}", f"-I{sources}"]
            self.must([nvcc, *flags, *includes, sources / f"{name}.cu", "-o", program], 120)
            if self.options.build_only:
                continue
            code, output = self.run([program], 60)
            say(f"{name}: {output.strip()}")
            self.record(case=f"instructions: {name}", exit_code=code)
            failed += [name] if code else []
        if failed:
            raise Failure(", ".join(failed))

    def sanitizer(self) -> None:
        """Each tool of compute-sanitizer over a part of the parity suite."""
        tool = self.tool("compute-sanitizer")
        if tool is None or self.device != "cuda":
            say("no compute-sanitizer here: left out")
            return
        part = [test for test in self.tests() if SANITIZED.search(test)]
        failed = []
        for kind in ("memcheck", "racecheck", "synccheck", "initcheck"):
            start = time.monotonic()
            code, output = self.run([tool, "--tool", kind, "--error-exitcode", "1", *PYTEST, *part], 120)
            say("\n".join(output.splitlines()[-40:]))
            self.record(case=kind, tests=len(part), exit_code=code, seconds=time.monotonic() - start)
            failed += [f"{kind}: exit code {code}"] if code else []
        if failed:
            raise Failure("; ".join(failed))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cuda_sim"), default="cuda")
    parser.add_argument("--arch", help="compute capability to build for, as 90 (default: of the GPUs here)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--build-only", action="store_true", help="do not run anything (with --arch: needs no GPU)")
    what.add_argument("--no-build", action="store_true", help="the modules are there already")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES, help=f"of {', '.join(STAGES)} (default: all)")
    parser.add_argument("--tests", default="", help="only tests whose name has this regular expression")
    parser.add_argument("--minutes", type=float, default=8, help="begin nothing after so long (default: 8)")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results", help="folder for the JSON lines")
    options = parser.parse_args(argv)
    if options.build_only and options.device == "cuda" and not options.arch:
        parser.error("--build-only needs --arch")
    check = Check(options)
    missing = check.requirements()
    if missing:
        print(f"gpu-check: {missing}", file=sys.stderr)
        return 2
    BUILD.mkdir(parents=True, exist_ok=True)
    LOG.write_text("")
    left_out = {"build"} if options.no_build else {"ready", "parity", "benchmarks", "sanitizer"} if options.build_only else set()
    stages = [getattr(check, name) for name in STAGES if name in options.stages and name not in left_out]
    failed = []
    for stage in stages:
        say(f"--- {stage.__name__}")
        try:
            stage()
        except Failure as failure:
            failed.append(f"{stage.__name__}: {failure}")
            if stage in (check.build, check.ready):
                break
    say("\n".join(failed) if failed else "gpu-check: everything held")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
