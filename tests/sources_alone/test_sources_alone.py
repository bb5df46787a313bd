"""Parts of the CPU backend, each alone in a C++ program: the thread pool, under each sanitizer, and the allocator."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

import needle as ndl

HERE = Path(__file__).parent
COMMON = HERE.parents[1] / "src" / "common"
PRODUCTS = ("attention", "blocksparse", "conv", "few_rows", "lane_gemm", "matmul")


@pytest.fixture
def program(tmp_path):
    """Builds a program from a source of this folder and some of the backend's, with more flags; gives where it is."""

    def build(name, *sources, flags):
        made = tmp_path / name
        flags = ["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", *flags, f"-I{COMMON}"]
        files = [str(HERE / f"{name}.cc"), *map(str, sources)]
        built = subprocess.run(["c++", *flags, *files, "-o", made, "-lpthread"], capture_output=True, text=True)
        assert built.returncode == 0, built.stderr
        return made

    return build


on_x86 = pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="the processors are of x86-64, -z defs is of Linux"
)


@on_x86
@pytest.mark.parametrize("processor", ["x86-64", "skylake-avx512"])
def test_products_have_all_of_their_symbols_for_each_processor(processor, tmp_path):
    """What is built elsewhere is for this machine's processor, and one symbol that another lacks keeps a whole module from loading."""
    kernels = [HERE.parents[1] / "src" / "kernels" / f"{name}_cpu.cc" for name in PRODUCTS]
    sources = [COMMON / "gemm_cpu.cc", COMMON / "parallel.cc", COMMON / "allocator.cc", *kernels]
    flags = ["-std=c++17", "-O0", f"-march={processor}", "-fPIC", "-shared", "-Wl,-z,defs", "-DNEEDLE_DEVICE=cpu"]
    made = tmp_path / "products.so"
    built = subprocess.run(["c++", *flags, *map(str, sources), "-o", made, "-lpthread"], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr


@on_x86
def test_elementwise_functions_compile_without_optimization(tmp_path):
    """As in a debug build, for a processor with AVX-512, whose intrinsics then take no constant from a function's argument."""
    source = tmp_path / "functions.cc"
    source.write_text('#include "ewise_math_cpu.h"\nvoid f(needle::cpu::Floats& x) { x = needle::cpu::m_pow(x, x); }\n')
    flags = ["-std=c++17", "-O0", "-march=skylake-avx512", f"-I{COMMON}"]
    built = subprocess.run(["c++", *flags, "-c", source, "-o", tmp_path / "functions.o"], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr


def check(*command, **environment):
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout == "ok\n", done.stdout + done.stderr


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_the_pool_is_clean_under(sanitizer, program):
    made = program("pool", COMMON / "parallel.cc", flags=[f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"])
    # The thread sanitizer wants the usual address layout, and follows no fork of a process with threads.
    check(*(["setarch", platform.machine(), "-R", made, "no-fork"] if sanitizer == "thread" else [made]))


@pytest.mark.parametrize("caching", ["ranges", "blocks"])
def test_what_the_heap_refuses_costs_no_memory_and_not_the_process(caching, program):
    """Without sanitizers: under them the allocator keeps nothing."""
    made = program("allocator", HERE / "heap.cc", COMMON / "allocator.cc", COMMON / "parallel.cc", flags=[])
    check(made, *(["blocks"] if caching == "blocks" else []))


def test_an_array_that_the_heap_refuses_is_a_memory_error(cpu, program):
    """At each request of the heap that making one takes: its own, its account's and pybind11's."""
    heap = program("heap", flags=["-shared", "-fPIC"])
    code = """if True:
        import ctypes, gc, sys
        import needle as ndl
        heap, device = ctypes.CDLL(sys.argv[1]), ndl.cpu()
        Array = device.mod.Array
        Array(4)
        live = device.memory_stats()["live_arrays"]
        heap.refuse(0, False)
        Array(4)
        requests = heap.requests_since()
        for number in range(1, requests + 1):
            heap.refuse(number, False)
            try:
                Array(4)
            except MemoryError:
                requests -= 1
            heap.refuse(0, False)
            assert device.memory_stats()["live_arrays"] == live, number
        assert requests == 0 and number > 1, (requests, number)
        print("ok")
    """
    check(sys.executable, "-c", code, str(heap), LD_PRELOAD=str(heap), PYTHONPATH=str(Path(ndl.__file__).parents[1]))
