"""Arrays of more than 2^31 elements, whose indices do not fit into 32 bits: on a GPU with room for them, or where NEEDLE_TEST_LARGE=1.

Elsewhere the same tests run with few rows. What is computed of a row must not depend on how many there are before it.
"""

import os

import numpy as np
import pytest

from devices import DEVICES, usable
from needle.backend_ndarray import kernels
from needle.backend_ndarray.ndarray import NDArray, matmul, where

COLS = 512
LARGE = 2**31 // COLS + 5
GPU_BYTES = 24 << 30  # that must be free


@pytest.fixture(params=[name for name in DEVICES if name != "cpu_numpy"])
def x(request):
    """(rows, COLS), zero but for the rows of ``picked``."""
    device = usable(request.param)
    large = os.environ.get("NEEDLE_TEST_LARGE") == "1"
    if request.param == "cuda":
        device.empty_cache()
        large = large or device.device_properties()["free_bytes"] >= GPU_BYTES
    rows = LARGE if large else 77
    x = device.full((rows, COLS), 0, dtype="float16")
    values = np.random.default_rng(0).standard_normal((3, COLS)).astype(np.float16)
    for row, value in zip(picked(x), values):
        x[row : row + 1, :] = NDArray(value[None], device=device, dtype="float16")
    return x


def picked(x):
    return 0, x.shape[0] // 2, x.shape[0] - 1


def rows_of(x):
    return np.concatenate([x[row : row + 1].numpy() for row in picked(x)])


def few(x):
    """An array of the picked rows alone."""
    return NDArray(rows_of(x), device=x.device, dtype=x.dtype)


def bias(x):
    return NDArray(np.linspace(-1, 1, COLS)[None], device=x.device, dtype=x.dtype)


def normalized(x):
    weight = bias(x).reshape((COLS,))
    return kernels.layer_norm(x, weight, weight, 1e-5)[0]


def product(x):
    return matmul(x, NDArray(np.random.default_rng(1).standard_normal((COLS, 8)), device=x.device, dtype=x.dtype))


BY_ROWS = {
    "exp": lambda x: x.exp(),
    "add": lambda x: x + x,
    "broadcast": lambda x: x * bias(x).broadcast_to(x.shape),
    "where": lambda x: where(x > 0, x, x * 2),
    "transposed": lambda x: x.permute((1, 0)).compact().permute((1, 0)),
    "every other column": lambda x: x[:, ::-2].compact(),
    "float32": lambda x: x[:, :256].astype("float32"),
    "sum": lambda x: x.sum(axis=1),
    "max": lambda x: x.max(axis=1),
    "softmax": kernels.softmax,
    "logsumexp": kernels.logsumexp,
    "layer norm": normalized,
    "product": product,
}


@pytest.mark.parametrize("name", BY_ROWS)
def test_a_row_does_not_depend_on_those_before_it(x, name):
    found, wanted = rows_of(BY_ROWS[name](x)), BY_ROWS[name](few(x)).numpy()
    assert np.abs(wanted).max() > 0
    np.testing.assert_allclose(found.astype(np.float64), wanted.astype(np.float64), rtol=2e-3, atol=2e-3)


def test_reductions_over_rows(x):
    values = rows_of(x).astype(np.float64)
    np.testing.assert_allclose(x.sum(axis=0).numpy(), values.sum(0), rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(x.max(axis=0).numpy(), np.maximum(values.max(0), 0), rtol=0)
    x[-1:, -1:] = 1000.0
    assert x.reshape((x.size,)).argmax().numpy() == x.size - 1


def test_rows_by_their_number(x):
    ids = NDArray(np.array(picked(x)[::-1]), device=x.device, dtype="int64")
    rows = kernels.embedding(x, ids)
    np.testing.assert_array_equal(rows.numpy(), rows_of(x)[::-1])
    gradient = kernels.embedding_backward(rows, ids, x.shape[0])
    np.testing.assert_array_equal(rows_of(gradient), rows_of(x))
    np.testing.assert_array_equal(gradient.max().numpy(), x.max().numpy())
