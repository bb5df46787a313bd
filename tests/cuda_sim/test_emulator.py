"""The SIMT emulator: what kernels may use means what it should, and what is wrong is found and named."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ORDERS = ["forward", "reverse", "random:1", "random:2", "random:3"]

# Each planted fault and the parts that its message must have.
FAULTS = {
    "divergent_barrier": ["divergent barrier: __syncthreads", "block (0,0,0), thread (16,0,0)", "faults.cu:", "wait"],
    "deadlock": ["deadlock", "block (0,0,0)", "wait at __syncthreads (", "wait at __syncwarp (", "thread"],
    "divergent_shuffle": ["divergent warp operation", "__shfl_xor_sync", "__shfl_down_sync", "faults.cu:"],
    "lane_not_in_mask": ["mask 0xf does not name the calling lane 4", "__syncwarp", "thread (4,0,0)", "faults.cu:"],
    "block_too_large": ["launch refused", "block (1025,1,1) has 1025 threads (at most 1024"],
    "block_axis_too_large": ["launch refused", "block (1,1,65)"],
    "grid_too_large": ["launch refused", "grid (1,65536,1)"],
    "empty_grid": ["launch refused", "empty grid (0,1,1)"],
    "empty_block": ["launch refused", "block (32,0,1)"],
    "shared_without_opt_in": ["49153 bytes of dynamic shared memory (at most 49152; allow_dynamic_shared"],
    "shared_beyond_device": ["232449 bytes of dynamic shared memory: invalid argument"],
    "static_shared_too_large": ["static shared memory: 50176 bytes with `wide` (at most 49152)"],
    "shared_beside_dynamic": ["shared memory: 49156 bytes, static and dynamic (at most 49152)"],
    "shared_beside_opted_in": ["shared memory: 232452 bytes, static and dynamic (at most 232448)"],
    "no_dynamic_shared": ["dynamic shared memory is used, but the launch asked for none"],
    "beyond_shared": ["outside_shared_kernel", "a write beyond shared memory `first`: block (0,0,0)"],
    "before_shared": ["a write before shared memory `first`: block (0,0,0)"],
    "farther_beyond_shared": ["a write beyond shared memory `second`: block (0,0,0)"],
    "far_beyond_shared": ["invalid address", "shared memory beyond `second`", "faults.cu:", "block (0,0,0), thread (0,0,0)"],
    "far_before_shared": ["invalid address", "shared memory before its variables", "faults.cu:"],
    "beyond_larger_shared": ["outside_shared_kernel", "a write beyond shared memory `second`: block (0,0,0)"],
    "copy_beyond_shared": ["cp.async of 16 bytes to shared memory `tile` + 16 bytes", "faults.cu:"],
    "beyond_dynamic_shared": ["outside_dynamic_shared_kernel", "a write beyond shared memory `dynamic shared memory`"],
    "null_pointer": ["invalid address", "faults.cu:", "block (1,0,0), thread (5,0,0)"],
    "impossible_pointer": [
        "invalid address 0x1" if platform.machine() == "aarch64" else "misaligned or impossible address at",
        "faults.cu:",
    ],
    "division_by_zero": ["integer division by zero at", "faults.cu:"],
    "stack_overflow": ["stack overflow", "128 KB"],
    "large_frame": ["stack overflow", "128 KB", "faults.cu:", "thread (31,0,0)"],
    "trap": ["__trap() was called", "thread (2,0,0)", "faults.cu:"],
    "misaligned_copy": ["misaligned address: cp.async of 16 bytes", "faults.cu:"],
    "misaligned_empty_copy": ["misaligned address: cp.async of 16 bytes", "faults.cu:"],
    "misaligned_atomic": ["misaligned address: atomic operation on 4 bytes", "thread (3,0,0)", "faults.cu:"],
    "misaligned_pair": ["misaligned address: atomic operation on 4 bytes", "faults.cu:"],
}

# For each race: the parts of its message. Every other case of races.cu must be clean, but for the one noted there.
RACES = {
    "block_sum": ["global memory", "block (1,0,0)", "block (0,0,0)"],  # its two blocks write one result
    "no_first_barrier": ["shared memory `part` + 4 bytes"],
    "no_second_barrier": ["shared memory `part`", "write", "read"],
    "no_syncwarp": ["shared memory `tile`", "write", "read"],
    "half_warp_reaches_out": ["shared memory `tile`"],
    "blocks_meet": ["global memory", "write", "block (0,0,0), thread (0,0,0)", "block (1,0,0), thread (0,0,0)"],
    "atomic_and_plain": ["global memory", "atomic write"],
    "counter_too_soon": ["shared memory `counter`", "atomic write", "earlier write"],
    "readers_and_writer": ["shared memory `value`", "write", "earlier read"],
    "copy_waits_after_barrier": ["shared memory `tile`"],
    "copy_overtakes": ["shared memory `stage`", "read (", "cp.async ("],
    "stale_stage": ["shared memory `stage`", "read (", "an earlier cp.async (", "that may still be under way"],
    "matrix_too_soon": ["shared memory `rows`", "write", "read"],
    "halves_too_soon": ["shared memory `halves`"],
    "last_block_unfenced": [
        "global memory",
        "read",
        "earlier write",
        "block (4,0,0), thread (40,0,0)",
        "block (0,0,0), thread (0,0,0)",
    ],
    "last_block_block_fence": [
        "global memory",
        "read",
        "earlier write",
        "block (4,0,0), thread (40,0,0)",
        "block (0,0,0), thread (0,0,0)",
    ],
    "all_results_unsynced": ["global memory", "read", "earlier write", "block (0,0,0), thread (63,0,0)"],
    "lock_unfenced": ["global memory", "read", "earlier write", "block (1,0,0)", "block (0,0,0)"],
    "chain_late": ["global memory", "read", "earlier write", "block (3,0,0)", "block (0,0,0)"],
    "last_thread_unfenced": ["shared memory `values`", "read", "earlier write"],
    "flag_asked_early": ["shared memory `value`", "read", "earlier write", "thread (1,0,0)"],
    "flag_asked_by_other": ["shared memory `value`", "read", "earlier write", "thread (1,0,0)"],
    "own_flag": ["global memory", "read", "earlier write", "block (1,0,0)", "block (0,0,0)"],
    "behind_fence": ["global memory", "read", "earlier atomic write", "block (1,0,0)", "block (0,0,0)"],
    "atomic_sum_unfenced": ["global memory", "read", "earlier atomic write", "block (3,0,0)", "block (0,0,0)"],
    "half_fenced": ["global memory", "read", "earlier write", "block (0,0,0), thread (63,0,0)"],
    "fenced_unsynced": ["global memory", "read", "earlier write", "block (0,0,0), thread (63,0,0)"],
    "half_fenced_in_warp": ["global memory", "read", "earlier write", "block (0,0,0), thread (31,0,0)"],
    "added_plain_look": ["global memory", "read", "earlier atomic write"],
    "raised_plain": ["global memory", "write", "earlier write"],
    "struct_meets": ["global memory", "thread (0,0,0)", "thread (1,0,0)"],
}
# Reads of shared memory that the block has not written, found by the same detector.
UNINITIALIZED = {
    "uninitialized": ["shared memory `tile` + 124 bytes", "no thread of the block has written", "thread (0,0,0)"],
    "count_of_nothing": ["shared memory `count`", "atomic read", "no thread of the block has written"],
    "beyond": ["uninitialized shared memory beyond `tile`", "thread (31,0,0)"],
    "before": ["uninitialized shared memory before its variables", "thread (0,0,0)"],
    "no_wait": ["shared memory `tile`", "a cp.async writes that has not been waited for"],
}
# Writes to shared memory that are in no variable.
BESIDE = {
    "write_beyond": ["write (", "to shared memory beyond `tile`", "thread (31,0,0)"],
    "write_far_beyond": ["write (", "to shared memory beyond `tile`", "thread (0,0,0)"],
    "write_far_before": ["write (", "to shared memory before its variables", "thread (0,0,0)"],
}
# A read that the first write should come before: which of the two comes first depends on the order of threads, and so the message.
READ_TOO_SOON = {
    "no_first_barrier", "half_warp_reaches_out", "copy_waits_after_barrier", "matrix_too_soon", "halves_too_soon", "counter_too_soon",
}  # fmt: skip


def lines_of(text: str) -> dict[str, str]:
    """Case -> its message; messages may go on in indented lines."""
    cases: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        if line.startswith(" "):
            cases[name] += line
        else:
            name, _, message = line.partition(": ")
            cases[name] = message
    return cases


def expect_ok(done) -> None:
    assert done.returncode == 0 and done.stdout.rstrip().endswith("ok"), done.stdout + done.stderr


@pytest.mark.parametrize("order", ["", *ORDERS])
@pytest.mark.parametrize("program", ["semantics", "tensor_cores"])
def test_meaning_in_every_order(programs, program, order):
    for cp_async in ("late", "early"):
        expect_ok(programs.run(program, "plain", NEEDLE_SIM_ORDER=order, NEEDLE_SIM_CP_ASYNC=cp_async))


@pytest.mark.parametrize(
    ("program", "mode"),
    [
        *[("semantics", mode) for mode in ("clang", "ucontext", "asan", "race", "arm64")],
        ("tensor_cores", "asan"),
        ("tensor_cores", "race"),
        ("tensor_cores", "ptx"),
    ],
)
def test_meaning_in_every_build(programs, program, mode):
    expect_ok(programs.run(program, mode))


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ('"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])', '"r"(a[0]), "r"(a[2]), "r"(a[1]), "r"(a[3])'),
        ("{%0,%1}, [%2]", "{%1,%0}, [%2]"),
        ('"n"(N)', '"n"(N + 2)'),
        ("[%0], [%1], 16, %2", "[%0], [%1], 16, 16"),
    ],
    ids=["mma", "ldmatrix", "wait_group", "source_bytes"],
)
def test_a_mistake_in_inline_ptx_is_found(programs, tmp_path, right, wrong):
    """Which the emulator, that has a body of its own for each wrapper, cannot see."""
    common = shutil.copytree(HERE.parents[1] / "src" / "common", tmp_path / "common")
    text = (common / "ptx.h").read_text()
    assert right in text
    (common / "ptx.h").write_text(text.replace(right, wrong))
    program = programs.compile("tensor_cores", "ptx", common)
    if program is None:
        pytest.skip("no nvcc here")
    done = subprocess.run([program], capture_output=True, text=True, timeout=120)
    found = done.stdout + done.stderr  # a CHECK's line, or a fault of the kernel
    assert done.returncode != 0 and ("tensor_cores.cu:" in found or "tensor_cores.ptx:" in found), found


@pytest.mark.parametrize(
    ("declared", "statement", "found"),
    [
        (".global .align 4 .u32 counter;", "mov.u64 %rd1, counter;", "a __device__ variable is not known"),
        (".visible .const .align 4 .b8 table[16];", "ld.const.f32 %f1, [table];", "a __constant__ variable is not known"),
        (".extern .func (.param .b32 r) vprintf\n(\n.param .b64 f\n)\n;", "call.uni (r0), vprintf, (p0);", "printf is not known"),
        (".extern .func __assertfail\n(\n.param .b64 m\n)\n;", "call.uni __assertfail, (p0);", "assert is not known"),
        ("", "lg2.approx.f32 %f1, %f2;", "op_lg2_approx is not in instructions.h"),
        ("", "ld.relaxed.gpu.global.f32 %f1, [%rd1];", "is not known"),
    ],
)
def test_ptx_that_is_not_known_is_named_with_its_kernel(declared, statement, found, tmp_path):
    source = tmp_path / "a.ptx"
    registers = ".reg .f32 %f<3>;\n.reg .b64 %rd<2>;\n"
    source.write_text(f".version 9.0\n{declared}\n.visible .entry kernel()\n{{\n{registers}membar.gl;\n{statement}\nret;\n}}\n")
    script = HERE.parents[1] / "src" / "common" / "cuda_sim" / "ptx" / "translate.py"
    done = subprocess.run([sys.executable, script, source, tmp_path / "a.cc"], capture_output=True, text=True)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    for part in ("a.ptx:", statement.rstrip(";"), found, "(in kernel)"):
        assert part in done.stderr, done.stderr


def test_lazy_streams_keep_the_meaning(programs):
    for program in ("semantics", "tensor_cores"):
        expect_ok(programs.run(program, "plain", NEEDLE_SIM_STREAMS="lazy"))


def test_threads_forks_and_errors(programs):
    """Not under qemu-user, which fails assertions of its own when a program with threads forks."""
    expect_ok(programs.run("lifecycle", "plain"))


@pytest.mark.parametrize("mode", ["plain", "clang"])
def test_faults_are_named_and_survived(programs, mode):
    done = programs.run("faults", mode, *FAULTS, NEEDLE_SIM_ORDER="forward")
    assert done.returncode == 0, done.stdout + done.stderr
    messages = lines_of(done.stdout)
    assert list(messages) == list(FAULTS)
    for name, parts in FAULTS.items():
        assert messages[name].startswith("["), messages[name]
        for part in parts:
            assert part in messages[name], f"{name}: {part!r} is not in {messages[name]!r}"


@pytest.mark.parametrize(
    ("setting", "value", "accepted"),
    [
        ("SIM_ORDER", "backwards", "forward, reverse, random:SEED"), ("SIM_CP_ASYNC", "soon", "late, early"),
        ("SIM_STREAMS", "Lazy", "eager, lazy"), ("SIM_SM", "70", "75, 80, 90, ..."), ("SIM_SM", "80a", "75, 80, 90, ..."),
        ("SIM_ORDER", "random:", "forward, reverse, random:SEED"), ("SIM_ORDER", "random:one", "forward, reverse, random:SEED"),
        ("SIM_MULTIPROCESSORS", "-1", "0, 1, 2, ..."), ("SIM_MEMORY", "0", "1 to 999999"), ("NUM_THREADS", "0", "1 to 4096"), ("NUM_THREADS", "two", "1 to 4096"),
    ],
)  # fmt: skip
def test_unknown_settings_are_refused(programs, setting, value, accepted):
    done = programs.run("semantics", "plain", **{f"NEEDLE_{setting}": value})
    assert done.returncode != 0 and f"NEEDLE_{setting} is '{value}' (accepted: {accepted})" in done.stderr


@pytest.mark.parametrize(
    ("case", "message", "kernel"),
    [
        ("global", "heap-buffer-overflow", "fill_kernel"),
        ("shared", "use-after-poison", "shared_overrun_kernel"),
        ("dynamic_shared", "use-after-poison", "dynamic_overrun_kernel"),
        ("bounds", "index 4 out of bounds for type 'float [4]'", "overruns.cu:"),
        ("misaligned", "misaligned address", "overruns.cu:"),
    ],
)
def test_overruns_end_in_a_report(programs, case, message, kernel):
    done = programs.run("overruns", "asan", case)
    assert done.returncode != 0 and "end" not in done.stdout
    assert message in done.stderr and kernel in done.stderr and "overruns.cu:" in done.stderr, done.stderr


def test_no_report_without_an_overrun(programs):
    done = programs.run("overruns", "asan", "clean")
    assert done.returncode == 0 and "end" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("mode", "order", "cp_async"),
    [
        *[("race", order, "late") for order in ORDERS[:3]],
        ("race", "forward", "early"),
        ("race_unoptimized", "forward", "late"),
    ],
)
def test_races_are_found_and_nothing_else(programs, mode, order, cp_async):
    done = programs.run("races", mode, NEEDLE_SIM_ORDER=order, NEEDLE_SIM_CP_ASYNC=cp_async)
    assert done.returncode == 0, done.stdout + done.stderr
    messages = lines_of(done.stdout)
    planted = RACES | UNINITIALIZED | BESIDE
    assert set(planted) < set(messages)
    for name, message in messages.items():
        if name not in planted:
            assert message == "clean", f"{name}: {message}"
            continue
        race = "data race on" in message
        assert race or name in BESIDE or "uninitialized shared memory" in message, f"{name}: {message}"
        assert name in READ_TOO_SOON or race == (name in RACES), f"{name}: {message}"
        # The kernel, and the line of each access: a race has two.
        assert message.startswith("[") and "_kernel]" in message, f"{name}: {message}"
        assert message.count("races.cu:") == (2 if race else 1), f"{name}: {message}"
        for part in planted[name] if order == "forward" else ():
            assert part in message, f"{name}: {part!r} is not in {message!r}"


# What nvcc takes, and what it refuses, with int* i, int64_t* n and so on.
TAKEN = """
    atomicAdd(i, 1.5); atomicAdd(u, 1); atomicAdd(ull, 1); atomicAdd(f, 1); atomicAdd(d, 1); atomicAdd(h, 1.0f); atomicAdd(b, *b)
    atomicSub(i, 1); atomicSub(u, 1); atomicExch(i, 1.5f); atomicExch(u, 1); atomicExch(ull, 1); atomicExch(f, 1)
    atomicMin(ll, 1); atomicMax(ull, 1); atomicAnd(ll, 1); atomicOr(ull, 1); atomicXor(i, 1); atomicCAS(i, 1, 2); atomicCAS(us, 1, 2)
    __shfl_sync(~0u, *n, 1); __shfl_xor_sync(~0u, *h, 1); __shfl_up_sync(~0u, true, 1); __shfl_down_sync(~0u, *us, 1)
    __match_any_sync(~0u, *d); __reduce_add_sync(~0u, *us); __reduce_and_sync(~0u, *n); __ldg(n); __ldg(f4); __ldcs(h); __stcg(f, 1)
    min(1, 2u); min(*n, *n); min(*ull, *ll); max(1.0f, 2.0); max('a', *us); max(*h, 1.0f); max(*n, size_t(1))
"""
REFUSED = """
    atomicAdd(n, 1); atomicAdd(ll, 1); atomicAdd(us, 1); atomicAdd(c, 1); atomicSub(ll, 1); atomicSub(ull, 1); atomicSub(f, 1)
    atomicMin(n, 1); atomicMax(s, 1); atomicMin(f, 1); atomicAnd(n, 1); atomicOr(f, 1); atomicXor(us, 1); atomicExch(d, 1)
    atomicExch(n, 1); atomicExch(ll, 1); atomicCAS(n, 1, 2); atomicCAS(ll, 1, 2); atomicCAS(f, 1, 2)
    __shfl_sync(~0u, *f4, 1); __shfl_xor_sync(~0u, i, 1); __match_any_sync(~0u, *h); __match_all_sync(~0u, i, i)
    __reduce_add_sync(~0u, *n); __ldg(own); __ldcg(&i); __stcs(own, *own)
    min(1, 1.0f); min(*s, 1); max(*n, 1); max(*n, *ll); max(*ull, 1); max(*h, *h); max(1.0, 1)
"""


@pytest.mark.parametrize("compiler", ["g++", "nvcc"])
def test_calls_that_nvcc_refuses_do_not_compile(compiler, tmp_path):
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler} here")
    names = {
        "i": "int", "u": "unsigned", "n": "int64_t", "s": "size_t", "ll": "long long", "ull": "unsigned long long", "c": "char",
        "us": "unsigned short", "f": "float", "d": "double", "h": "__half", "b": "__nv_bfloat16", "f4": "float4", "own": "Own",
    }  # fmt: skip
    arguments = ", ".join(f"{kind}* {name}" for name, kind in names.items())

    def calls(text):
        return [call for line in text.strip().splitlines() for call in line.strip().split("; ")]

    def errors(calls):
        source = tmp_path / "calls.cu"
        kernels = "".join(f"\n__global__ void kernel_{number}({arguments}) {{ {call}; }}" for number, call in enumerate(calls))
        source.write_text("struct Own { int a; };" + kernels)
        flags = ["-fsyntax-only", "-x", "c++"] if compiler == "g++" else ["-arch=sm_90", "-ptx", "-o", os.devnull]
        command = [compiler, "-std=c++17", f"-I{HERE.parents[1] / 'src' / 'common'}", "-include", "launch.h", *flags, source]
        return subprocess.run(command, capture_output=True, text=True).stderr

    assert "error" not in errors(calls(TAKEN))
    refused = calls(REFUSED)
    found = errors(refused)
    lines = {int(line) for line in re.findall(r"calls\.cu[:(](\d+)[:)]", found)}
    assert [call for line, call in enumerate(refused, 2) if line not in lines] == [], found


@pytest.mark.parametrize("streams", ["eager", "lazy"])
def test_silent_faults_change_the_result(programs, streams):
    done = programs.run("wrong_answers", "plain", NEEDLE_SIM_STREAMS=streams)
    assert done.returncode == 0, done.stdout + done.stderr
    lazy = streams == "lazy"
    assert lines_of(done.stdout) == {
        "uninitialized": "NaN",
        "warp_synchronous": "wrong",
        "no_wait": "NaN",
        "streams": "right",
        "streams_not_joined": "wrong" if lazy else "right",
        "streams_not_awaited": "wrong" if lazy else "right",
        "default_stream": "right",
    }


def test_the_bug_of_the_documentation(programs):
    """docs/cuda.md shows the kernel, what it answers in another order, and what the race detector says of it."""
    text = (HERE.parents[1] / "docs" / "cuda.md").read_text()
    assert (HERE / "row_sums.cu").read_text().startswith(text.split("```cuda\n")[1].split("```")[0])
    for order in ("forward", "reverse"):
        sums = programs.run("row_sums", "plain", NEEDLE_SIM_ORDER=order).stdout.strip()
        assert f"./row_sums\n{sums}\n" in text
        race = programs.run("row_sums", "race", NEEDLE_SIM_ORDER=order).stdout
        assert "data race on shared memory `part`" in race
        if order == "forward":
            assert " ".join(race.replace(f"{HERE}/", "").split()) in " ".join(text.split())
