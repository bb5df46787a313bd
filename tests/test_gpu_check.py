"""make gpu-check without a GPU: what it says where it cannot run, and its whole road on the emulated device."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import types
from pathlib import Path

import pytest

from devices import usable

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def gpu_check(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu_check

    monkeypatch.setattr(gpu_check, "LOG", tmp_path / "log.txt")
    return gpu_check


def make(gpu_check, **changes):
    options = {
        "device": "cuda_sim",
        "arch": None,
        "build_only": False,
        "stages": gpu_check.STAGES,
        "no_build": True,
        "tests": "",
        "minutes": 5,
        "results": None,
    }
    return gpu_check.Check(types.SimpleNamespace(**{**options, **changes}))


def test_the_emulated_device_goes_the_whole_road(tmp_path):
    usable("cuda_sim")
    command = [sys.executable, "benchmarks/gpu_check.py", "--device", "cuda_sim", "--no-build", "--results", str(tmp_path)]
    done = subprocess.run(
        [*command, "--tests", r"test_parity\[.*softmax-float32"], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("gpu-check: everything held\n") and "left out: compute-sanitizer" in done.stdout
    (parity,) = (json.loads(line) for line in (tmp_path / "gpu_check.jsonl").read_text().splitlines())
    assert parity["case"] == "parity" and parity["passed"] == parity["tests"] > 1 and parity["failed"] == parity["skipped"] == []
    rows = [json.loads(line) for line in (tmp_path / "smoke.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["contestant"] == "needle"]
    assert [row["case"] for row in rows] == [*["pythia_step"] * 2, *["gemm"] * 2, *["attention"] * 2, *["product"] * 4]
    assert all(
        row["device_peak_reserved_bytes"] >= row["device_peak_bytes"] > 0 and row["versions"]["device"] == "needle cuda_sim"
        for row in rows
    )
    assert rows[0]["density"] < 1 and all(row["blocks"] for row in rows if row["case"] != "gemm")


def outcomes(gpu_check, tmp_path, monkeypatch, text, names, **changes):
    (tmp_path / "test_some.py").write_text(text)
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    verdicts = list(make(gpu_check, **changes).verdicts([f"test_some.py::test_{name}" for name in names]))
    assert [verdict.test for verdict in verdicts] == [f"test_some.py::test_{name}" for name in names[: len(verdicts)]]
    return [verdict.outcome for verdict in verdicts], [verdict.said for verdict in verdicts]


def test_a_test_that_crashes_takes_no_other_along(gpu_check, tmp_path, monkeypatch):
    text = "import os\ndef test_a(): pass\ndef test_b(): os._exit(3)\ndef test_c(): pass\ndef test_d(): assert 0\n"
    found, said = outcomes(gpu_check, tmp_path, monkeypatch, text, "abcd")
    assert found == ["passed", "failed", "passed", "failed"] and "assert 0" in said[3]
    assert outcomes(gpu_check, tmp_path, monkeypatch, text, "abcd", minutes=0) == ([], [])


SOME = """
import pytest
@pytest.fixture
def broken(): assert 0
@pytest.fixture
def breaks():
    yield
    assert 0
@pytest.mark.parametrize("x", ["a", "b - c", (1, 2)], ids=str)
def test_x(x):
    open("ran", "a").write(f"{x};")
    assert x != (1, 2)
def test_y(broken): pass
def test_z(breaks): open("ran", "a").write("z;")
def test_skipped(): pytest.skip("no (such) thing")
def test_last(): pass
"""


def test_what_failed_runs_again_only_if_the_device_may_be_lost(gpu_check, tmp_path, monkeypatch):
    names = ["x[a]", "x[b - c]", "x[(1, 2)]", "skipped", "y"]
    found, said = outcomes(gpu_check, tmp_path, monkeypatch, SOME, names)
    assert found == ["passed", "passed", "failed", "skipped", "failed"] and said[3] == "no (such) thing"
    assert (tmp_path / "ran").read_text() == "a;b - c;(1, 2);(1, 2);"
    (tmp_path / "ran").unlink()
    found, said = outcomes(gpu_check, tmp_path, monkeypatch, SOME, ["x[(1, 2)]", "z", "last"])
    assert found == ["failed", "failed", "passed"] and (tmp_path / "ran").read_text() == "(1, 2);z;"


def test_tests_after_one_that_loses_the_device_run_again_in_one_process(gpu_check, tmp_path, monkeypatch):
    text = "import os\nlost = []\ndef setup_function(f): open('ran', 'a').write(f'{f.__name__[5:]}:{len(lost)};')\n"
    text += "def test_a(): pass\n" + "".join(f"def test_{name}(): assert not lost\n" for name in "cde")
    text += "def test_b():\n    lost.append(1)\n    assert 0\n"
    found, said = outcomes(gpu_check, tmp_path, monkeypatch, text, "abcde")
    assert found == ["passed", "failed", "passed", "passed", "passed"]
    assert (tmp_path / "ran").read_text() == "a:0;b:0;c:1;d:1;e:1;" + "b:0;" + "c:0;d:0;e:0;"


def test_what_is_skipped_or_cannot_be_imported_is_said(gpu_check, tmp_path, monkeypatch, capsys):
    rows = []
    monkeypatch.setattr(gpu_check.Check, "record", lambda self, **row: rows.append(row))
    check = make(gpu_check)
    (tmp_path / "test_some.py").write_text(SOME)
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    check._collected = ["test_some.py::test_skipped", "test_some.py::test_last"], ["tests/test_other.py"]
    with pytest.raises(gpu_check.Failure, match=r"^tests/test_other\.py$"):
        check.parity()
    assert check.left_out == ["1 tests: no (such) thing"] and "1 of 2 tests passed, 1 skipped, 0 failed" in capsys.readouterr().out
    assert rows[0]["skipped"] == ["test_some.py::test_skipped"] and rows[0]["not_imported"] == ["tests/test_other.py"]


def test_only_tests_of_the_device_are_found(gpu_check):
    found, broken = make(gpu_check, device="cuda", tests="").tests()
    assert not broken and sum(test.startswith(gpu_check.SANITIZED) for test in found) > 30
    assert len(found) > 100 and all("cuda" in test and "cuda_sim" not in test.split("[", 1)[1] for test in found)
    for name in ("test_parity.py::test_parity[", "test_cuda_kernels.py::test_attention_on_tensor_cores["):
        assert any(name in test for test in found)


def test_modules_of_tests_need_no_package_that_is_not_asked_for(gpu_check, tmp_path):
    """Or one that has no test of the device would be a failure of that device, on a machine without psutil."""
    check = make(gpu_check, device="cuda", tests="")
    for name in ("hypothesis", "playwright", "plotly", "psutil", "safetensors", "tokenizers", "torch", "transformers", "yaml"):
        (tmp_path / f"{name}.py").write_text("raise ModuleNotFoundError(f'No module named {__name__!r}', name=__name__)\n")
    check.environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), check.environment["PYTHONPATH"]])
    found, broken = check.tests()
    assert not broken and len(found) > 100


def test_stages_can_be_chosen(gpu_check, monkeypatch, tmp_path):
    said = []
    monkeypatch.setattr(gpu_check, "BUILD", tmp_path)
    monkeypatch.setattr(gpu_check, "LOG", tmp_path / "log.txt")
    monkeypatch.setattr(gpu_check.Check, "requirements", lambda self: None)  # of those who test there is no CMake
    for name in gpu_check.STAGES:
        monkeypatch.setattr(gpu_check.Check, name, lambda self, name=name: said.append(name))
    for arguments, expected in (
        ([], gpu_check.STAGES),
        (["--no-build"], gpu_check.STAGES[1:]),
        (["--build-only"], ("build", "instructions")),
        (["--stages", "sanitizer", "parity"], ("parity", "sanitizer")),
    ):
        said.clear()
        assert gpu_check.main(["--device", "cuda_sim", *arguments]) == 0
        assert tuple(said) == expected


def test_what_is_missing_is_said_in_one_line(gpu_check, monkeypatch, capsys):
    monkeypatch.setattr(gpu_check.Check, "tool", lambda self, name: f"/bin/{name}" if name == "nvcc" else None)
    assert gpu_check.main([]) == 2
    said = capsys.readouterr().err
    assert "cmake" in said and "C++" in said and "nvcc" not in said and said.count("\n") == 1
    with monkeypatch.context() as patch:  # a system's Python without its headers
        patch.setattr(gpu_check.sysconfig, "get_path", lambda *_: "/nowhere")
        assert gpu_check.main([]) == 2 and "python3-dev" in capsys.readouterr().err
    monkeypatch.setattr(gpu_check.Check, "tool", lambda self, name: f"/bin/{name}")
    monkeypatch.setattr(gpu_check.Check, "run", lambda self, *_: (9, "NVIDIA-SMI has failed"))
    monkeypatch.setattr(gpu_check.importlib.util, "find_spec", lambda name: True)
    assert gpu_check.main([]) == 2
    assert "no GPU here" in capsys.readouterr().err


def test_it_builds_for_the_gpus_that_are_there(gpu_check, monkeypatch):
    monkeypatch.setattr(gpu_check.Check, "tool", lambda self, name: f"/bin/{name}")
    monkeypatch.setattr(gpu_check.Check, "record", lambda self, **row: None)
    monkeypatch.setattr(gpu_check, "BUILD", gpu_check.LOG.parent)
    commands, said = [], "NVIDIA B200, 10.0\nNVIDIA A10, 8.6\nNVIDIA A10, 8.6\n"
    monkeypatch.setattr(gpu_check.Check, "must", lambda self, command, limit_s: commands.append(command) or "")
    monkeypatch.setattr(gpu_check.Check, "run", lambda self, *_: (0, said))
    for arch, expected in ((None, "100;86"), ("75", "75")):
        commands.clear()
        check = make(gpu_check, device="cuda", arch=arch, build_only=True)
        check.build()
        assert f"-DNEEDLE_CUDA_ARCHITECTURES={expected}" in commands[0] and "--build" in commands[1]
        assert "Ninja" in commands[0]
        commands.clear()
        check.instructions()  # CUDA's first GPU may be any of them
        for command in commands:
            assert {part for part in command if "sm_" in str(part)} == {
                f"-gencode=arch=compute_{one},code=sm_{one}" for one in expected.split(";")
            }
        assert len(commands) == len(gpu_check.PROGRAMS)


def test_a_stage_that_takes_too_long_ends_with_its_children(gpu_check):
    code, output = make(gpu_check).run(["sh", "-c", "echo begun; sleep 1000 & kill -STOP $!; wait"], 0.5)
    assert code == -9 and output.startswith("begun") and "ended after" in output


@pytest.mark.parametrize("arch", ["75", "80"])
def test_the_instruction_programs_compile_for_a_gpu(gpu_check, monkeypatch, tmp_path, arch):
    check = make(gpu_check, device="cuda", arch=arch, build_only=True)
    if check.tool("nvcc") is None:
        pytest.skip("no nvcc here")
    monkeypatch.setattr(gpu_check, "BUILD", tmp_path)
    check.instructions()
    assert {path.name for path in tmp_path.iterdir()} >= set(gpu_check.PROGRAMS)


def configure(check, folder, *flags, source=ROOT, **environment):
    """What CMake says of the project, and its exit code."""
    if check.requirements():
        pytest.skip(check.requirements())
    check.environment |= {"CUDACXX": "", **environment}
    flags = [f"-DPython_EXECUTABLE={sys.executable}", f"-DNEEDLE_OUTPUT_DIR={folder}", "-DNEEDLE_CUDA_SIM=OFF", *flags]
    return check.run([check.tool("cmake"), "-S", source, "-B", folder / "build", *flags], 120)


@pytest.mark.parametrize(("wanted", "works"), [("ON", False), ("0", True)])
def test_a_build_says_what_is_wrong_with_the_cuda_compiler(gpu_check, tmp_path, wanted, works):
    """One that does not take the host's compiler, which is newer than it; where none is wanted, nothing is."""
    check = make(gpu_check, device="cuda", arch="90", no_build=False, build_only=True)
    host = tmp_path / "g++"
    host.write_text("#!/bin/sh\necho 'an unsupported version' >&2\nexit 1\n")
    host.chmod(0o755)
    code, said = configure(check, tmp_path, f"-DNEEDLE_CUDA={wanted}", CUDACXX=check.tool("nvcc") or "", CUDAHOSTCXX=str(host))
    assert (code == 0) is works and ("an unsupported version" in said) is not works


def test_a_build_finds_a_cuda_compiler_that_is_not_on_path(gpu_check, tmp_path):
    check = make(gpu_check, device="cuda", arch="90", no_build=False, build_only=True)
    nvcc, host, maker = (Path(check.tool(name) or "/nowhere/bin/tool") for name in ("nvcc", "c++", "make"))
    nowhere = [f"-DCMAKE_FIND_USE_{places}_PATH=OFF" for places in ("SYSTEM_ENVIRONMENT", "CMAKE_SYSTEM")]
    flags = ["-DNEEDLE_CUDA=ON", "-G", "Unix Makefiles", f"-DCMAKE_MAKE_PROGRAM={maker}", *nowhere]
    code, said = configure(check, tmp_path, *flags, CXX=str(host), CUDA_HOME=str(nvcc.parent.parent))
    assert code == 0 and "needle: CUDA backend by" in said, said


def test_the_cpu_is_built_for_where_the_cuda_compiler_is_too_old(gpu_check, tmp_path):
    """With a GPU: /dev/null in the place of its device. A newer compiler is found afterwards."""
    check = make(gpu_check, device="cuda", arch="90", no_build=False, build_only=True)
    for name in ("CMakeLists.txt", "src"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "cmake", tmp_path / "cmake")
    script = tmp_path / "cmake" / "cuda.cmake"
    script.write_text(script.read_text().replace("/dev/nvidia[0-9]*", "/dev/null"))
    for newest, expected in (("999", "no CUDA compiler that works"), ("90", "needle: CUDA backend by")):
        code, said = configure(check, tmp_path, f"-DNEEDLE_CUDA_ARCHITECTURES=80-real;{newest}", source=tmp_path)
        assert code == 0 and expected in said, said


def test_kernels_are_not_compiled_again_for_another_python(gpu_check, tmp_path):
    """Nor where pip builds in another folder: the commands that compile them name neither."""
    code, said = configure(make(gpu_check, device="cpu", no_build=False), tmp_path, "-DNEEDLE_CUDA=OFF")
    assert code == 0, said
    commands = json.loads((tmp_path / "build" / "compile_commands.json").read_text())
    assert len(commands) > 20
    for at in (sysconfig.get_path("include"), sysconfig.get_path("purelib")):
        naming = {Path(one["file"]).name for one in commands if at in one["command"]}
        assert naming <= {"ndarray_backend_cpu.cc"}, at


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_takes_no_other_python_than_its_environments(tmp_path):
    (tmp_path / "Makefile").symlink_to(ROOT / "Makefile")
    for name in ("CMakeLists.txt", "pyproject.toml", ".venv/bin/python", ".venv/.built", "other"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"#!/bin/sh\necho Python {'3.12.1' if name == 'other' else '3.11.2'}\n")
        (tmp_path / name).chmod(0o755)
    for named, code, said in (
        ([], 0, ""),
        (["PYTHON=.venv/bin/python"], 0, ""),
        (["PYTHON=./other"], 2, ".venv is of Python 3.11.2, not of PYTHON=./other (accepted: VENV=another, or after rm -r .venv)"),
    ):
        environment = {name: value for name, value in os.environ.items() if name != "PYTHON" and not name.startswith("MAKE")}
        done = subprocess.run(["make", "lib", *named], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == code and said in done.stderr, done.stderr


def test_a_build_in_a_folder_whose_name_is_a_pattern_says_so(gpu_check, tmp_path):
    source = tmp_path / "needle [1]"
    source.mkdir()
    for name in ("CMakeLists.txt", "src", "cmake"):
        (source / name).symlink_to(ROOT / name)
    code, said = configure(make(gpu_check, device="cpu", no_build=False), tmp_path, source=source)
    assert code != 0 and "needle [1] for a" in " ".join(said.split())


@pytest.mark.parametrize("name", ["needle (1)", "R&D", "its owner's", "a$HOME b"])
def test_openblas_is_copied_beside_the_module_in_a_folder_of_any_name(gpu_check, tmp_path, name):
    check = make(gpu_check, device="cpu", no_build=False)
    source, wheel, folder = (tmp_path / part for part in ("source", "wheel", name))
    source.mkdir()
    (source / "module.cc").write_text("")
    (source / "CMakeLists.txt").write_text(f"""
cmake_minimum_required(VERSION 3.21)
project(module LANGUAGES CXX)
set(Python_EXECUTABLE "{sys.executable}")
set(NEEDLE_OPENBLAS ON)
include("{ROOT}/cmake/openblas.cmake")
add_library(stub SHARED module.cc)
set_target_properties(stub PROPERTIES LIBRARY_OUTPUT_DIRECTORY "{wheel}")
add_library(module MODULE module.cc)
add_dependencies(module stub)
needle_use_openblas(module module)
""")
    (wheel / "scipy_openblas32-1.dist-info").mkdir(parents=True)
    (wheel / "scipy_openblas32-1.dist-info" / "LICENSE.txt").write_text("its licence")
    paths = {"get_lib_dir": wheel, "get_library": "libstub.so", "get_include_dir": wheel / "package" / "include"}
    functions = "".join(f"def {function}(*_): return {str(path)!r}\n" for function, path in paths.items())
    (wheel / "scipy_openblas32.py").write_text(functions)
    code, said = configure(check, folder, source=source, PYTHONPATH=str(wheel))
    assert code == 0, said
    code, said = check.run([check.tool("cmake"), "--build", folder / "build"], 60)
    assert code == 0, said
    assert (folder / "libstub.so").is_file() and (folder / "LICENSE.openblas.txt").read_text() == "its licence"
