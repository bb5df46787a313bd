"""Each way in which this processor multiplies bfloat16. All other tests take the fastest of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def run(way, *command):
    environment = {**os.environ, "NEEDLE_BFLOAT16": way}
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, cwd=HERE.parent)


def is_refused(way):
    """Whether ``way`` is none that this processor has."""
    program = "from needle import Tensor; x = Tensor([[1.0] * 64] * 64, dtype='bfloat16'); x @ x"
    done = run(way, "-c", program)
    refusal = f'ValueError: NEEDLE_BFLOAT16 is "{way}" (accepted by this processor: float32'
    assert done.returncode == 0 or refusal in done.stderr, done.stderr
    return done.returncode != 0


def test_only_what_is_no_way_is_refused():
    assert is_refused("both") and is_refused("avx") and not is_refused("float32") and not is_refused("")


@pytest.mark.parametrize("way", ["float32", "pairs", "tiles"])
def test_kernels_pass_by_each_way(way):
    if is_refused(way):
        pytest.skip(f"this processor does not multiply bfloat16 by {way}")
    chosen = "cpu and bfloat16 and (matmul or products or attention or convolution)"
    done = run(way, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", chosen, str(HERE / "test_kernels.py"))
    assert done.returncode == 0, done.stdout + done.stderr
