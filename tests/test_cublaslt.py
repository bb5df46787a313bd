"""Products by cuBLASLt: on a GPU by the library itself, elsewhere by a stand-in of plain loops (cuda_sim/cublaslt_stand_in.cc) that the
emulated device opens in the same way."""

import itertools
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import needle as ndl
from devices import DEVICES, WATCHED, usable
from needle.backend_ndarray import cublaslt, matmul
from needle.backend_ndarray.ndarray import NDArray
from needle.errors import DeviceError, KernelError, OutOfMemoryError
from test_cuda_sim_training import losses

SOURCES = Path(__file__).parent / "cuda_sim"
COMMON = Path(__file__).parent.parent / "src" / "common"
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}
RNG = np.random.default_rng(0)
every_device = pytest.mark.parametrize("device", [name for name in ("cuda_sim", "cuda") if name in DEVICES], indirect=True)


def compiler():
    found = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    return found or pytest.skip("no C++ compiler here")


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    """The path of the stand-in, compiled."""
    library = tmp_path_factory.mktemp("cublaslt") / "stand_in.so"
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-fvisibility=hidden", f"-I{COMMON}"]
    command = [compiler(), *flags, SOURCES / "cublaslt_stand_in.cc", "-o", library]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return str(library)


@pytest.fixture
def device(request):
    """A device whose products are the library's."""
    found = usable(request.param)
    before, _ = found.cublaslt_in_use()
    if request.param == "cuda_sim":
        found.use_cublaslt(request.getfixturevalue("stand_in"))
    elif not before:
        pytest.skip("no cuBLASLt here")
    found.reset_launch_counts()
    yield found
    found.use_cublaslt(before)


def of_library(device):
    """How many products it has done."""
    return device.launch_counts().get("cublaslt_matmul", 0)


def normal(device, dtype, *shape):
    return NDArray(RNG.standard_normal(shape).astype(np.float32), device=device, dtype=dtype)


def values(array):
    return np.asarray(array.numpy(), np.float64)


def check(a, b, **more):
    """a @ b equals numpy's, to the rounding of the result's dtype; ``more``: of matmul, whose ``out`` holds the result."""
    before = values(more["out"]) if more.get("accumulate") else 0.0
    wanted = before + values(a) @ values(b)
    found = matmul(a, b, **more)
    tolerance = TOLERANCE[found.dtype]
    np.testing.assert_allclose(values(found), wanted, rtol=tolerance, atol=tolerance * max(1, np.abs(wanted).max()))


@every_device
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_products(device, dtype):
    """Each way round, with rows apart, beginning anywhere; k beyond 64 needs the workspace."""
    shapes = [(3, 5, 7), (33, 70, 17), (64, 128, 32), (2, 1, 2), (5, 9, 1)]
    done = 0
    for (m, k, n), trans_a, trans_b in itertools.product(shapes, (False, True), (False, True)):
        a = normal(device, dtype, *((k, m) if trans_a else (m, k)))
        b = normal(device, dtype, *((n, k) if trans_b else (k, n)))
        check(a.permute((1, 0)) if trans_a else a, b.permute((1, 0)) if trans_b else b)
        done += 1
        assert of_library(device) == done
        wide_a, wide_b = normal(device, dtype, m + 2, k + 3), normal(device, dtype, k + 1, n + 5)
        check(wide_a[1 : m + 1, 2 : k + 2], wide_b[1 : k + 1, 3 : n + 3])
        done += 1
    assert of_library(device) == done


@every_device
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_batches(device, dtype):
    a, b = normal(device, dtype, 2, 3, 4, 5), normal(device, dtype, 2, 3, 5, 6)
    check(a, b)
    check(a, b[0, 0])
    check(a[0, 0], b)
    check(a, b[:, ::2, :, :][:, :1, :, :].broadcast_to((2, 3, 5, 6)).compact())
    check(a.permute((0, 1, 3, 2)), b.permute((0, 1, 3, 2)).permute((0, 1, 3, 2))[..., :4, :])
    assert of_library(device) == 5
    check(a.permute((1, 0, 2, 3)), b.permute((1, 0, 2, 3)))  # two strides of the batch: needle's own
    check(a, b[0])  # one of them broadcast
    assert of_library(device) == 5


@every_device
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_out_and_accumulate(device, dtype):
    a, b = normal(device, dtype, 9, 80), normal(device, dtype, 80, 12)
    for out_dtype in {dtype, "float32"}:
        check(a, b, out=normal(device, out_dtype, 9, 12))
        check(a, b, out=normal(device, out_dtype, 9, 12), accumulate=True)
    nan = NDArray(np.full((9, 12), np.nan, np.float32), device=device, dtype=dtype)
    check(a, b, out=nan)  # what was there is not read
    assert of_library(device) == 2 * len({dtype, "float32"}) + 1


@every_device
def test_what_it_has_no_way_for_is_done_by_needle(device):
    check(normal(device, "float32", 4, 0), normal(device, "float32", 0, 3))
    whole = NDArray(RNG.integers(-9, 9, (4, 4)), device=device, dtype="int32")
    np.testing.assert_array_equal((whole @ whole).numpy(), whole.numpy() @ whole.numpy())
    backwards = normal(device, "float32", 3, 4, 5)[::-1, :, :]
    check(backwards, normal(device, "float32", 3, 5, 2))
    if device.name == "cuda_sim":
        check(normal(device, "float32", 1, 5), normal(device, "float32", 5, 7))  # its heuristic says so
    assert of_library(device) == 0


@every_device
def test_a_transformer_trains_alike(device):
    found, expected = losses(device, sparse=False), losses(ndl.cpu(), sparse=False)
    np.testing.assert_allclose(found, expected, rtol=2e-3)
    assert of_library(device) > 100 and "matmul_kernel" not in device.launch_counts()


@pytest.mark.parametrize("device", ["cuda_sim"], indirect=True)
def test_its_errors_name_it(device, stand_in, tmp_path, monkeypatch):
    nothing, other = tmp_path / "libcublasLt.so.13", str(shutil.copy(stand_in, tmp_path / "fails.so"))
    for library, said in ((nothing, "libcublasLt.so.13: cannot open"), (Path(__file__), "invalid ELF header")):
        with pytest.raises(KernelError, match=said):
            device.use_cublaslt(str(library))
        assert device.cublaslt_in_use() == (stand_in, 130000)
    with pytest.raises(KernelError, match="has no function cublasLtCreate"):
        device.use_cublaslt(device.require().__file__)
    monkeypatch.setenv("CUBLASLT_STAND_IN_FAILS", "1")
    device.use_cublaslt(other)
    with pytest.raises(KernelError, match=r"\[cublasLtCreate\] stand-in status 1 \(.*fails.so; NEEDLE_CUBLASLT=0 "):
        normal(device, "float32", 2, 3) @ normal(device, "float32", 3, 2)
    device.use_cublaslt("")
    assert device.cublaslt_in_use() == ("", 0)
    check(normal(device, "float32", 2, 3), normal(device, "float32", 3, 2))
    assert of_library(device) == 0


@pytest.mark.parametrize("device", ["cuda_sim"], indirect=True)
@pytest.mark.parametrize("refused", [1, 2])
def test_its_lack_of_memory(device, stand_in, tmp_path, monkeypatch, refused):
    """What needle keeps is given back, and the product done again: once."""
    monkeypatch.setenv("CUBLASLT_STAND_IN_REFUSES", str(refused))
    device.use_cublaslt(str(shutil.copy(stand_in, tmp_path / f"refuses_{refused}.so")))
    a, b = normal(device, "float32", 2, 100), normal(device, "float32", 100, 2)
    device.empty(1 << 22)
    kept = device.memory_stats()["reserved"]
    if WATCHED:
        pytest.skip("an allocator that a sanitizer watches keeps nothing")
    if refused == 1:
        check(a, b)
    else:
        with pytest.raises(OutOfMemoryError, match=r"\[cublasLtMatmul\] stand-in status 3"):
            a @ b
        check(a, b)
    assert device.memory_stats()["reserved"] < kept


@pytest.mark.parametrize("device", ["cuda_sim"], indirect=True)
def test_what_it_advised_and_then_declines(device, stand_in, tmp_path, monkeypatch):
    """needle's own kernel does it, and later products of that shape without another question."""
    declining = str(shutil.copy(stand_in, tmp_path / "declines.so"))
    monkeypatch.setenv("CUBLASLT_STAND_IN_DECLINES", "1")
    device.use_cublaslt(declining)
    a, b = normal(device, "float32", 2, 100), normal(device, "float32", 100, 2)
    check(a, b)
    monkeypatch.delenv("CUBLASLT_STAND_IN_DECLINES")
    check(a, b)
    assert of_library(device) == 0
    check(a, normal(device, "float32", 100, 3))
    assert of_library(device) == 1


class Module(SimpleNamespace):
    """A device's module as the search sees it."""

    __device_name__ = "cuda"
    cudart_major = 13

    def use_cublaslt(self, path):
        self.asked.append(path)
        if path not in self.good:
            raise KernelError(f"[cublasLt] {path}: no such thing")


def test_the_library_is_looked_for(monkeypatch, tmp_path):
    def opened(*good):
        module = Module(asked=[], good=good)
        cublaslt.open_for(module)
        return module.asked

    monkeypatch.delenv("NEEDLE_CUBLASLT", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])  # alone: this environment may have wheels of NVIDIA's itself
    wheel, toolkit = tmp_path / "site/nvidia/cu13/lib/libcublasLt.so.13", tmp_path / "lib64/libcublasLt.so.13"
    for file in (wheel, toolkit):
        file.parent.mkdir(parents=True)
        file.touch()
    everywhere = opened()
    assert everywhere[:2] == [str(wheel), str(toolkit)] and everywhere[-1] == "libcublasLt.so.13"
    assert opened(str(toolkit)) == [str(wheel), str(toolkit)]
    monkeypatch.setenv("NEEDLE_CUBLASLT", "0")
    assert opened() == []
    monkeypatch.setenv("NEEDLE_CUBLASLT", "/mine.so")
    assert opened("/mine.so") == ["/mine.so"]
    with pytest.raises(DeviceError, match=r"NEEDLE_CUBLASLT is '/mine.so': .* no such thing \(accepted: the library's file, 0\)"):
        opened(str(toolkit))


def test_declarations_are_those_of_the_header():
    """Where NVIDIA's header is, in a toolkit or a wheel."""
    places = [Path("/usr/local/cuda/include")]
    for library in cublaslt.installed("libcublasLt.so.*"):
        places.append(Path(library).parent.parent / "include")
    headers = [place for place in places if (place / "cublasLt.h").exists()]
    if not headers:
        pytest.skip("no cublasLt.h here")
    flags = ["-std=c++17", "-fsyntax-only", f"-I{COMMON}", f"-I{headers[0]}", *(f"-I{place}" for place in places)]
    done = subprocess.run([compiler(), *flags, SOURCES / "cublaslt_header.cc"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
