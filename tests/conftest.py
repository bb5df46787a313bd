"""Devices and apps as fixtures."""

import gc
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

# numpy's products and PyTorch: their threads spin while they wait, which is slow where several test processes share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

if folder := os.environ.get("NEEDLE_TEST_PACKAGE"):  # another build than the installed one; sanitize.py sets it
    # The finder of an editable install comes before every path.
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__module__ != "_editable_skbc_needle"]
    sys.path.insert(0, folder)
    import needle

    if not Path(needle.__file__).is_relative_to(folder):
        raise RuntimeError(f"the tests would run {needle.__file__}, not the build in {folder}")

from devices import DEVICES, usable

ROOT = Path(__file__).parent.parent

# Homework 1 and 2's tests, put into tests/hw1 and hw2, run with NEEDLE_BACKEND=np; all others here are for nd.
if os.environ.get("NEEDLE_BACKEND") == "np":
    collect_ignore = [path.name for path in Path(__file__).parent.iterdir() if not path.name.startswith("hw")]


@pytest.fixture(params=DEVICES)
def device(request):
    return usable(request.param)


@pytest.fixture(params=[name for name in ("cpu_numpy", "cpu") if name in DEVICES])
def host(request):
    return usable(request.param)


@pytest.fixture
def cpu():
    return usable("cpu")


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory):
    """What apps find in their environment: this package, and a cache that is empty at first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT / "python"))
        patch.setenv("NEEDLE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def app(monkeypatch, capsys):
    """Runs an app in this process, where it takes no second to start; its end is what ``subprocess.run`` gives."""
    monkeypatch.chdir(ROOT)

    def call(name, *arguments):
        try:
            code = importlib.import_module(name).main([*map(str, arguments)])
        except SystemExit as ended:
            code = ended.code
        said = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, code, said.out, said.err)

    return call


def keep_from_the_collector():
    gc.collect()
    gc.freeze()


def pytest_collection_finish():
    """Each plan calls the garbage collector and each search for leaks asks it: neither is to go through the thousands of tests that
    there are and the packages that they import.
    """
    keep_from_the_collector()


@pytest.fixture
def few_objects():
    """Nor through what tests before have brought: a search then finds the holders that the test itself makes."""
    keep_from_the_collector()


@pytest.fixture
def looked_on():
    """As under a debugger or coverage: before Python 3.13 a copy of a function's locals may be kept. Not of those that search."""
    before = sys.gettrace()

    def look(frame, *_):
        path = Path(frame.f_code.co_filename)
        return None if path.parent.name == "memory" or path.name == "objects.py" else look

    sys.settrace(look)
    yield
    sys.settrace(before)


@pytest.fixture
def in_root():
    """Runs Python in the project's folder, in a process of its own, and gives what it says."""

    def call(*arguments):
        environ = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
        done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, env=environ)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return call
