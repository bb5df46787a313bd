"""Builds the compiled devices under a sanitizer and runs their tests: make asan, make race, make tsan, make ptx.

    asan   cpu and cuda_sim: addresses, undefined behaviour, bounds, alignment
    race   cuda_sim: data races between the threads of a kernel and reads of shared memory before writes, by the emulator's detector
    tsan   cpu: data races between the threads of the pool
    ptx    cuda_sim: the kernels as nvcc compiles them, inline PTX and all, in place of the C++ compiler's code

With --smallest: only the kernels' smallest cases on cuda_sim, compiled for the dtypes that they use.
The build is the preset of that name in build/KIND, beside a copy of the Python sources, so that the plain build stays as it is.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
DEVICES = {"asan": ["cpu", "cuda_sim"], "race": ["cuda_sim"], "tsan": ["cpu"], "ptx": ["cuda_sim"]}
SHARED_TESTS = ["test_parity.py", "test_array.py", "test_kernels.py"]
CUDA_TESTS = ["test_cuda_smallest.py", "test_cuda_kernels.py", "test_cublaslt.py"]
FEW = "-DNEEDLE_ONLY_DTYPES=float32;bfloat16;int32"
UNOPTIMIZED = ["-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-g1"]  # compiles faster: the address checks, and what was PTX
SMALLEST = {"asan": [FEW, *UNOPTIMIZED], "race": [FEW], "ptx": [FEW, *UNOPTIMIZED]}


def runtime(kind: str) -> dict[str, str]:
    """The environment that a sanitizer needs: its library must be the first of the process, which is Python."""
    if kind in ("race", "ptx"):
        return {}
    names = ("libasan.so", "libstdc++.so.6") if kind == "asan" else ("libtsan.so",)
    paths = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in names
    ]
    return {
        "LD_PRELOAD": " ".join(paths),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        "TSAN_OPTIONS": "halt_on_error=1",
        "OPENBLAS_NUM_THREADS": "1",  # numpy's: its threads are compiled without the sanitizer, which sees races in them
    }


OVERRUN = """
import sys, conftest, needle as ndl  # conftest sees to it that this is the build in question
mod, n = getattr(ndl, sys.argv[1])().mod, int(sys.argv[2])
mod.softmax_forward(mod.Array(n), mod.Array(n + 1), 1, n + 1)  # reads an element behind the first array
mod.sync()
"""


def blind_spots(devices: list[str], environment: dict[str, str]) -> list[str]:
    """Arrays, small and large, that a kernel may overrun by one element without the address sanitizer's saying so."""
    commands = [[sys.executable, "-c", OVERRUN, device, size] for device in devices for size in ("10", "1000001")]
    done = [subprocess.run(command, cwd=ROOT / "tests", env=environment, capture_output=True, text=True) for command in commands]
    return [" ".join(one.args[3:]) for one in done if "heap-buffer-overflow" not in one.stderr]


def build(kind: str, smallest: bool, devices: list[str], jobs: int) -> Path:
    """Returns the folder to import needle from."""
    folder = ROOT / "build" / (f"{kind}-smallest" if smallest else kind)
    package = folder / "python" / "needle"
    configure = [
        "cmake", "--preset", kind, "-B", folder, f"-DPython_EXECUTABLE={sys.executable}",
        f"-DNEEDLE_OUTPUT_DIR={package / 'backend_ndarray'}", *(SMALLEST[kind] if smallest else []),
    ]  # fmt: skip
    subprocess.run(configure, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    targets = [f"ndarray_backend_{device}" for device in devices]
    subprocess.run(["cmake", "--build", folder, "-j", str(jobs), "--target", *targets], check=True, stdout=subprocess.DEVNULL)
    built = [f"ndarray_backend_{device}.*" for device in (*devices, "cuda")]  # other modules come from the plain build
    ignored = shutil.ignore_patterns(*built, "__pycache__")
    shutil.copytree(ROOT / "python" / "needle", package, dirs_exist_ok=True, ignore=ignored)
    return package.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=list(DEVICES))
    parser.add_argument("--smallest", action="store_true", help="the kernels' smallest cases alone")
    parser.add_argument("-k", metavar="EXPRESSION", default="", help="the tests of these names alone, as in pytest")
    parser.add_argument("tests", nargs="*", help="passed on to pytest instead of the files that belong to KIND")
    options = parser.parse_intermixed_args()
    if options.smallest and options.kind not in SMALLEST:
        parser.error(f"--smallest: {options.kind} has none (accepted: {', '.join(SMALLEST)})")
    devices = ["cuda_sim"] if options.smallest else DEVICES[options.kind]
    if "cpu" not in devices and not list((ROOT / "python" / "needle" / "backend_ndarray").glob("ndarray_backend_cpu.*.so")):
        parser.error("the plain build is missing, whose cpu device these tests use too: run make lib first")
    jobs = len(os.sched_getaffinity(0))
    try:
        package = build(options.kind, options.smallest, devices, jobs)
    except subprocess.CalledProcessError as error:  # CMake and the compiler have said why
        return error.returncode
    files = CUDA_TESTS[:1] if options.smallest else SHARED_TESTS + (CUDA_TESTS if "cuda_sim" in devices else [])
    tests = options.tests or [f"tests/{name}" for name in files]
    command = [
        sys.executable, "-m", "pytest", "-n", str(jobs), "-p", "no:cacheprovider", "-o", f"pythonpath={package} apps tests .",
        "-k", options.k, *tests,
    ]  # fmt: skip
    if options.kind == "tsan":  # whose shadow does not fit addresses as random as Linux makes them
        command = ["setarch", platform.machine(), "-R", *command]
    environment = {
        "NEEDLE_TEST_DEVICES": ",".join(devices),
        "NEEDLE_REQUIRE_DEVICES": ",".join(devices),
        "NEEDLE_TEST_PACKAGE": str(package),
        "PYTHONPATH": str(package),
    }
    environment = {**os.environ, **environment, **runtime(options.kind)}
    if options.kind == "asan" and (unseen := blind_spots(devices, environment)):
        print(f"the sanitizer does not see an overrun of an array: {', '.join(unseen)}", file=sys.stderr)
        return 1
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
