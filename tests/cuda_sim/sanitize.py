"""Builds the emulated device under a sanitizer and runs the parity suite on it: make asan, make race.

    asan   addresses, undefined behaviour, bounds, alignment
    race   data races between the threads of a kernel, found by the emulator's own detector

The build goes into build/KIND beside a copy of the Python sources, so that the plain build stays as it is.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
OPTIONS = {"asan": ["-DNEEDLE_SANITIZE=address,undefined,bounds,alignment"], "race": ["-DNEEDLE_RACE=ON"]}


def preload() -> dict[str, str]:
    """libasan must be the first library of the process, which is Python."""
    paths = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libstdc++.so.6")
    ]
    return {"LD_PRELOAD": " ".join(paths), "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1"}


def main() -> int:
    if len(sys.argv) != 2 or sys.argv[1] not in OPTIONS:
        print(f"usage: sanitize.py {'|'.join(OPTIONS)}", file=sys.stderr)
        return 2
    kind = sys.argv[1]
    build, package = ROOT / "build" / kind, ROOT / "build" / kind / "python"
    shutil.rmtree(package / "needle", ignore_errors=True)
    shutil.copytree(
        ROOT / "python" / "needle", package / "needle", ignore=shutil.ignore_patterns("ndarray_backend_cuda*.so", "__pycache__")
    )
    configure = [
        "cmake", "-S", ROOT, "-B", build, f"-DPython_EXECUTABLE={sys.executable}", "-DNEEDLE_CUDA=OFF", "-DNEEDLE_CUDA_SIM=ON",
        f"-DNEEDLE_OUTPUT_DIR={package / 'needle' / 'backend_ndarray'}", *OPTIONS[kind],
    ]  # fmt: skip
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    jobs = str(os.cpu_count() or 2)
    subprocess.run(
        ["cmake", "--build", build, "--target", "ndarray_backend_cuda_sim", "-j", jobs], check=True, stdout=subprocess.DEVNULL
    )
    tests = ["tests/test_parity.py", "-k", "cuda_sim", "-o", f"pythonpath={package} apps . tests", "-p", "no:cacheprovider"]
    environment = {**os.environ, "NEEDLE_REQUIRE_DEVICES": "cuda_sim", "PYTHONPATH": str(package)}
    environment |= preload() if kind == "asan" else {}
    return subprocess.run([sys.executable, "-m", "pytest", *tests], cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
