"""For whoever has a GPU: build for it, run the parity suite on it, measure beside PyTorch, sanitize a part. Needs no network.

    make gpu-check
    python benchmarks/gpu_check.py --stages benchmarks sanitizer     # some of it, after a build
    python benchmarks/gpu_check.py --arch 90 --build-only            # compile for a GPU that is elsewhere
    python benchmarks/gpu_check.py --device cuda_sim --no-build      # the same road on the emulated device, in tiny shapes

Uses this machine's own C++ compiler and Python: its headers, numpy, ml_dtypes, pybind11 (or its headers, which torch has), cmake,
pytest; torch where it is. Every row is appended to benchmarks/results as it is found, and everything said to build/gpu/log.txt;
after --minutes what is left is not begun. What failed and what was left out is printed last; the exit code is 0, 1 where something
failed, or 2 where it cannot run at all. Where there is no git, rows have the commit that NEEDLE_COMMIT names.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
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
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from interleave import append_results, cores, gpu, machine

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "gpu"
LOG = BUILD / "log.txt"
PYTEST = [sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider"]
CHUNK = 48  # tests in one process
BENCHMARKS_S = 180  # that the tests leave for the benchmarks
SANITIZED = "tests/test_cuda_smallest.py::test_smallest"  # every kernel, with needle's own products
SANITIZER_FOUND = 99  # exit code; pytest's own are below
STAGES = ("build", "ready", "instructions", "parity", "benchmarks", "sanitizer")
PROGRAMS = ["tensor_cores", "semantics"]
GPU_GROUPS = ["gpu_step", "gpu_gemm", "gpu_attention", "gpu_products", "gpu_generation"]


class Failure(Exception):
    """A stage went wrong; the others still run."""


class Verdict(NamedTuple):
    """outcome: passed, skipped or failed; said: why, of the last two."""

    test: str
    outcome: str
    said: str = ""


def say(text: str) -> None:
    print(text, flush=True)
    with open(LOG, "a") as file:
        file.write(text + "\n")


class Check:
    """One run: its options, its deadline and the environment of its processes."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.device = options, options.device
        self.end = time.monotonic() + 60 * options.minutes
        self.left_out: list[str] = []
        self._running: set[subprocess.Popen] = set()
        self._collected: tuple[list[str], list[str]] | None = None
        places = [os.environ.get("PATH", ""), Path(sys.executable).parent, sysconfig.get_path("scripts", f"{os.name}_user")]
        places += [Path(os.environ[name]) / "bin" for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
        toolkits = ["/usr/local/cuda", *sorted(glob.glob("/usr/local/cuda-*"), reverse=True)]
        places += [f"{toolkit}/{part}" for part in ("bin", "compute-sanitizer") for toolkit in toolkits] + ["/usr/local/nvidia/bin"]
        others = filter(None, [os.environ.get("PYTHONPATH")])
        self.environment = {
            **os.environ,
            "PATH": os.pathsep.join(map(str, places)),
            "PYTHONPATH": os.pathsep.join([*(str(ROOT / part) for part in ("python", "tests", "apps", "")), *others]),
            "NEEDLE_REQUIRE_DEVICES": self.device,
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # what a machine has installed beside is read for seconds
            "COLUMNS": "250",
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
        self._running.add(process)
        try:
            output = process.communicate(timeout=limit_s)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return -9, process.communicate()[0] + f"\n(ended after {limit_s:.0f} s)"
        except BaseException:  # Ctrl-C among them
            os.killpg(process.pid, signal.SIGKILL)
            raise
        finally:
            self._running.discard(process)
        return process.returncode, output

    def end_processes(self) -> None:
        """Those that run, with their families: sessions of their own, which get neither Ctrl-C nor this process's end."""
        self.end = 0.0
        for process in list(self._running):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def leave_out(self, what: str) -> None:
        say(f"left out: {what}")
        self.left_out.append(what)

    def must(self, command: list, limit_s: float) -> str:
        code, output = self.run(command, limit_s)
        if code:
            say(output)
            raise Failure(f"exit code {code}")
        return output

    def record(self, **row) -> None:
        found = gpu() if self.device == "cuda" else {}
        append_results(self.options.results / "gpu_check.jsonl", [{**machine(), **found, "device": self.device, **row}])

    # ---- stages

    def requirements(self) -> str | None:
        """What is missing here, in one line, or None."""
        has, build = importlib.util.find_spec, not self.options.no_build
        wanted = {
            "numpy": has("numpy"),
            "ml_dtypes (bfloat16 in numpy)": has("ml_dtypes") or self.options.build_only,
            "pytest": has("pytest") or self.options.build_only,
            "pybind11 (or torch, which has its headers)": has("pybind11") or has("torch") or not build,
            "the headers of Python (python3-dev)": Path(sysconfig.get_path("include"), "Python.h").is_file() or not build,
            "cmake": self.tool("cmake") or not build,
            "a C++ compiler": any(map(self.tool, (os.environ.get("CXX", "c++"), "g++", "clang++"))) or not build,
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

    def architectures(self) -> list[str]:
        """What is built for: --arch, or those of the GPUs here, of which CUDA's first need not be nvidia-smi's."""
        return self.options.arch.split(";") if self.options.arch else sorted({arch for _, arch in self.gpus()})

    def build(self) -> None:
        start = time.monotonic()
        if self.device == "cuda":
            arch = ";".join(self.architectures())
            flags = ["NEEDLE_CUDA=ON", f"NEEDLE_CUDA_ARCHITECTURES={arch}", f"CMAKE_CUDA_COMPILER={self.tool('nvcc')}"]
            flags += ["NEEDLE_CUDA_SIM=OFF", "CMAKE_BUILD_TYPE=RelWithDebInfo"]  # compute-sanitizer names lines
        else:
            arch, flags = None, ["NEEDLE_CUDA=OFF", "NEEDLE_CUDA_SIM=ON"]
        (BUILD / "CMakeCache.txt").unlink(missing_ok=True)  # of another Python, toolkit or generator, perhaps
        flags = [f"-D{flag}" for flag in (f"Python_EXECUTABLE={sys.executable}", *flags)]
        generator = ["-G", "Ninja"] if self.tool("ninja") else []
        said = self.must([self.tool("cmake"), "-S", ROOT, "-B", BUILD, *generator, *flags], 120)
        say("\n".join(line for line in said.splitlines() if "needle:" in line))
        self.must([self.tool("cmake"), "--build", BUILD, "-j", os.cpu_count() or 2], 400)
        release = re.search(r"release (\S+),", self.must([self.tool("nvcc"), "--version"], 30)) if self.device == "cuda" else None
        self.record(case="build", arch=arch, nvcc=release and release[1], seconds=time.monotonic() - start)

    def ready(self) -> None:
        """The module loads, and finds a device."""
        code = f"import needle; d = needle.{self.device}(); print(d.require().device_properties(), d.cublaslt_in_use())"
        say(self.must([sys.executable, "-c", code], 180).strip())

    def tests(self) -> tuple[list[str], list[str]]:
        """The tests that run on the device, by the name it has among their parameters, and what could not be imported."""
        if self._collected is None:
            _, output = self.run([*PYTEST, "-q", "--collect-only", "--continue-on-collection-errors", "tests"], 180)
            named = re.compile(rf"^tests/\S+\.py::\S+\[(.*-)?{self.device}(-.*)?\]$")
            found = [line for line in output.splitlines() if named.match(line) and re.search(self.options.tests, line)]
            broken = re.findall(r"^ERROR (tests/\S+)", output, re.MULTILINE)
            if not found or broken:
                say(output[-4000:])
            if not found:
                raise Failure(f"no test runs on {self.device}")
            self._collected = found, broken
        return self._collected

    def verdicts(self, tests: list[str]) -> Iterator[Verdict]:
        """For as many as there is time.

        A test that loses the GPU takes those after it along: where the last one did not pass either, or the process did not come
        to its end, the first that did not pass runs again in a process of its own, and the others in another.
        """
        try:
            leave_s = BENCHMARKS_S if "benchmarks" in self.options.stages else 0
            code, output = self.run([*PYTEST, "-v", "--tb=short", *tests], 60 if len(tests) == 1 else 150, leave_s)
        except Failure:
            return
        lines = re.findall(r"^(\S+\.py::.+?) (PASSED|SKIPPED|FAILED|ERROR)(?: \((.*)\))?\s*(?:\[ *\d+%\])?$", output, re.MULTILINE)
        found = {test: Verdict(test, outcome.lower(), why) for test, outcome, why in lines if outcome in ("PASSED", "SKIPPED")}
        for test, outcome, _ in lines:
            if outcome in ("FAILED", "ERROR"):  # perhaps after it had passed, when what it used was put away
                found[test] = Verdict(test, "failed", output)
        stands = len(tests) == 1 or (code in (0, 1) and found.get(tests[-1], Verdict("", "failed")).outcome != "failed")
        found = {test: found.get(test, Verdict(test, "failed", output)) for test in tests}
        again = [] if stands else [test for test in tests if found[test].outcome == "failed"]
        later = {verdict.test: verdict for some in (again[:1], again[1:]) if some for verdict in self.verdicts(some)}
        yield from (later[test] if test in again else found[test] for test in tests if test not in again or test in later)

    def parity(self) -> None:
        (tests, broken), start = self.tests(), time.monotonic()
        chunks = [tests[i : i + CHUNK] for i in range(0, len(tests), CHUNK)]
        with ThreadPoolExecutor(min(8, cores())) as pool:
            try:
                verdicts = [verdict for chunk in pool.map(lambda chunk: list(self.verdicts(chunk)), chunks) for verdict in chunk]
            except BaseException:  # the pool waits for its threads, and they for their processes
                self.end_processes()
                raise
        failed, skipped = ([v for v in verdicts if v.outcome == outcome] for outcome in ("failed", "skipped"))
        for said in dict.fromkeys(v.said for v in failed):
            say("\n".join(f"--- {v.test}" for v in failed if v.said == said) + f"\n{said}")
        for why, count in collections.Counter(v.said for v in skipped).items():
            self.leave_out(f"{count} tests: {why}")
        passed, open_ = len(verdicts) - len(failed) - len(skipped), len(tests) - len(verdicts)
        self.record(
            case="parity", tests=len(tests), passed=passed, skipped=[v.test for v in skipped], failed=[v.test for v in failed],
            not_run=open_, not_imported=broken, seconds=time.monotonic() - start,
        )  # fmt: skip
        say(f"{passed} of {len(tests)} tests passed, {len(skipped)} skipped, {len(failed)} failed, {open_} not begun")
        reasons = [", ".join(v.test for v in failed[:5]), f"{open_} tests not run" if open_ else "", *broken]
        if any(reasons):
            raise Failure("; ".join(filter(None, reasons)))

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
        code, output = self.run([sys.executable, "-c", asked], 180)
        if code:
            why = (output.strip().splitlines() or ["it finds no GPU"])[-1]
            self.leave_out(f"PyTorch, beside which needle is measured: {why}")
        return code == 0

    def instructions(self) -> None:
        """The emulator's own test programs, run by the GPU: mma, ldmatrix, cp.async, ex2, shuffles, atomics, barriers."""
        nvcc = self.tool("nvcc")
        if nvcc is None or self.device != "cuda":
            self.leave_out("the instructions' programs, which nvcc compiles for a GPU; pytest runs them on the emulator")
            return
        sources = ROOT / "tests" / "cuda_sim"
        failed = []
        for name in PROGRAMS:
            program = BUILD / name
            flags = ["-std=c++17", "--expt-relaxed-constexpr"]
            flags += [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in self.architectures()]
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
            self.leave_out("compute-sanitizer, which is not here")
            return
        part = [test for test in self.tests()[0] if test.startswith(SANITIZED)]
        if not part:
            raise Failure(f"there is no test that begins with {SANITIZED}")
        failed = []
        for kind in ("memcheck", "racecheck", "synccheck", "initcheck"):
            start = time.monotonic()
            try:
                code, output = self.run([tool, "--tool", kind, "--error-exitcode", SANITIZER_FOUND, *PYTEST, "-v", *part], 150)
            except Failure as failure:
                failed.append(f"{kind}: {failure}")
                continue
            (BUILD / f"{kind}.txt").write_text(output)
            say("\n".join(output.splitlines()[-40:]))
            self.record(case=kind, tests=len(part), exit_code=code, seconds=time.monotonic() - start)
            why = "it found errors" if code == SANITIZER_FOUND else f"exit code {code}"
            failed += [f"{kind}: {why} ({BUILD / kind}.txt)"] if code else []
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
    os.environ["PATH"] = check.environment["PATH"]
    BUILD.mkdir(parents=True, exist_ok=True)
    LOG.write_text("")
    left_out = {"build"} if options.no_build else {"ready", "parity", "benchmarks", "sanitizer"} if options.build_only else set()
    stages = [getattr(check, name) for name in STAGES if name in options.stages and name not in left_out]
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    failed = []
    try:
        for stage in stages:
            say(f"--- {stage.__name__}")
            try:
                stage()
                continue
            except Failure as failure:
                failed.append(f"{stage.__name__}: {failure}")
            except Exception as error:  # the stages after it still have something to say
                say(traceback.format_exc())
                failed.append(f"{stage.__name__}: {type(error).__name__}: {error}")
            if stage in (check.build, check.ready):
                break
    finally:
        check.end_processes()
        signal.signal(signal.SIGTERM, before)
    for line in (*(f"left out: {what}" for what in check.left_out), *failed):
        say(line)
    if not failed:
        say("gpu-check: everything held")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
