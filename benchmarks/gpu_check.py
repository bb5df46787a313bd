"""For whoever has a GPU: build for it, run the parity suite on it, sanitize a part, and measure beside PyTorch. Needs no network.

    make gpu-check

Uses this Python's own packages (numpy, pybind11, pytest, cmake; torch where it is). Each benchmark row becomes one JSON line in
benchmarks/results; what failed is printed last and decides the exit code.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
SMALL = "softmax or matmul or layer_norm or attention_sparse or dsd"


def run(name: str, command: list, limit_s: int) -> str | None:
    """None if it went well, else what went wrong."""
    print(f"--- {name}", flush=True)
    try:
        done = subprocess.run([str(c) for c in command], cwd=ROOT, env=ENVIRONMENT, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return f"{name}: more than {limit_s} s"
    except OSError as error:
        return f"{name}: {error}"
    return None if done.returncode == 0 else f"{name}: exit code {done.returncode}"


def main() -> int:
    if shutil.which("nvcc") is None:
        print("gpu-check: no nvcc on PATH (the CUDA toolkit is needed)", file=sys.stderr)
        return 2
    build = ROOT / "build" / "gpu"
    failed = [
        run("configure", ["cmake", "-S", ROOT, "-B", build, f"-DPython_EXECUTABLE={sys.executable}", "-DNEEDLE_CUDA=ON",
                          "-DNEEDLE_CUDA_SIM=OFF", "-DNEEDLE_CUDA_ARCHITECTURES=native"], 120),
        run("build", ["cmake", "--build", build, "-j", os.cpu_count() or 2], 400),
    ]  # fmt: skip
    if not any(failed):
        pytest = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
        failed.append(run("parity", [*pytest, "tests/test_parity.py", "tests/test_ndarray.py", "-k", "cuda and not cuda_sim"], 240))
        if shutil.which("compute-sanitizer"):
            for tool in ("memcheck", "racecheck"):
                part = [*pytest, "tests/test_parity.py", "-k", f"test_parity and cuda and not cuda_sim and float32 and ({SMALL})"]
                failed.append(run(tool, ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1", *part], 120))
        only = [] if importlib.util.find_spec("torch") else ["--only", "needle"]
        failed.append(
            run("benchmarks", [sys.executable, "benchmarks/run.py", "step", "attention", "gemm", "--device", "cuda", *only], 240)
        )
    failed = [what for what in failed if what]
    print("\n".join(failed) if failed else "gpu-check: everything held")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
