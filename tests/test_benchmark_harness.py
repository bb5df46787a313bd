"""The benchmark harness with a contestant that does nothing: turns, stopping, records, and a contestant that fails."""

import json
import shutil
import subprocess
import sys
import textwrap
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

from tiny_pythia import TINY

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def interleave(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import interleave

    return interleave


@pytest.fixture
def script(tmp_path):
    """A worker whose steps take ``ms`` and whose value counts them; it also prints, which must do no harm."""
    path = tmp_path / "fake_worker.py"
    path.write_text(
        textwrap.dedent(
            f"""
            import os, sys, time
            sys.path.insert(0, {str(BENCHMARKS)!r})
            from worker import Case, serve

            def sleep(ms, fail_at=None):
                done = 0
                def step():
                    nonlocal done
                    done += 1
                    print("noise")
                    if done == fail_at:
                        raise ValueError("broken case")
                    time.sleep(ms / 1e3)
                    return float(done)
                return Case(step, {{"fake": "1.0"}}, int(os.environ["NEEDLE_NUM_THREADS"]))

            serve(sleep)
            """
        )
    )
    return path


def test_contestants_take_turns_and_are_recorded(interleave, script, tmp_path):
    row = interleave.Row("sleep", {"ms": 5}, tokens=10, steps=2, settle=1, warmup=2)
    contestants = [interleave.Contestant(name, sys.executable, script, "passive") for name in "AB"]
    records = interleave.measure(row, contestants, threads=3, rounds=4, busy=1)
    assert [r["contestant"] for r in records] == ["A", "B"]
    for r in records:
        assert r["samples"] == 8 and r["threads"] == 3 and r["busy_cores"] == 1
        assert (r["first_value"], r["last_value"]) == (1.0, 14.0)  # 2 warmup, 4 x (1 settle + 2 recorded)
        assert r["median_s"] >= 5e-3 and r["tokens_per_s"] == pytest.approx(10 / r["median_s"])
        assert 1e6 < r["peak_rss_bytes"] < 1e9 and r["versions"]["fake"] == "1.0"
    assert records[0]["time_over_first"] == 1.0
    interleave.append_results(tmp_path / "results" / "x.jsonl", [{**interleave.machine(), **r} for r in records])
    lines = (tmp_path / "results" / "x.jsonl").read_text().splitlines()
    assert {"date", "commit", "cpu", "cores", "case", "args"} <= json.loads(lines[1]).keys()


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
def test_figures_tell_the_commit_and_whether_the_code_was_another(interleave, monkeypatch, tmp_path):
    monkeypatch.setattr(interleave, "HERE", tmp_path / "benchmarks")
    code, results = tmp_path / "code.py", tmp_path / "benchmarks" / "results" / "x.jsonl"
    interleave.append_results(results, [{}])
    code.write_text("1")
    for command in ("init -q", "add .", "-c user.name=n -c user.email=e commit -qm m"):
        subprocess.run(["git", "-C", tmp_path, *command.split()], check=True)
    interleave.append_results(results, [{}])
    commit = interleave.machine()["commit"]
    assert len(commit) == 12 and int(commit, 16)
    code.write_text("2")
    assert interleave.machine()["commit"] == f"{commit}-dirty"


def test_a_waiting_contestant_is_stopped(interleave, script):
    """Otherwise a spinning thread pool would be measured as the slowness of the other one."""
    row = interleave.Row("sleep", {"ms": 0})
    worker = interleave.Worker(interleave.Contestant("A", sys.executable, script), threads=1)
    try:
        worker.begin(row)
        pid = worker._process.pid
        states = [_state_of(pid)]
        worker.turn()
        states.append(_state_of(pid))
        assert states == ["stopped"] * 2
    finally:
        worker.close()


def test_a_failing_contestant_is_named(interleave, script):
    row = interleave.Row("sleep", {"ms": 0}, steps=2)
    rows = {
        "A": interleave.Row("sleep", {"ms": 0, "fail_at": 4}, steps=2),
        "B": interleave.Row("nothing", {}),
        "C": row,
        "D": replace(row, repeat=3),
    }
    contestants = [interleave.Contestant(name, sys.executable, script, row=own) for name, own in rows.items()]
    a, b, c, d = interleave.measure(row, contestants, threads=1, rounds=2)
    assert a["error"] == "[A] ended with code 1 on: step 2 1" and b["error"].startswith("[B] ended with code 1 on: setup nothing")
    assert c["samples"] == d["samples"] == 4 and "time_over_first" not in c  # the others go on, without the first
    assert (c["last_value"], d["last_value"]) == (6.0, 14.0)  # 2 warmup, 2 x 2 recorded; each of 3


def test_a_kept_contestant_goes_on_with_the_next_row(interleave, script):
    row, kept = interleave.Row("sleep", {"ms": 1}, warmup=1), {}
    contestants = [interleave.Contestant("A", sys.executable, script)]
    try:
        first = interleave.measure(row, contestants, threads=1, rounds=2, kept=kept)
        process = kept["A"]._process
        second = interleave.measure(row, contestants, threads=1, rounds=2, kept=kept)
        assert kept["A"]._process is process and [r[0]["last_value"] for r in (first, second)] == [3.0, 3.0]
        broken = interleave.Row("sleep", {"ms": 0, "fail_at": 1})
        assert "error" in interleave.measure(broken, contestants, threads=1, rounds=1, kept=kept)[0]
        assert kept == {} and process.poll() == 1
    finally:
        for worker in kept.values():
            worker.close()


def test_a_contestant_that_hangs_is_ended(interleave, script):
    row = interleave.Row("sleep", {"ms": 60_000})
    (record,) = interleave.measure(row, [interleave.Contestant("A", sys.executable, script)], threads=1, rounds=1, limit_s=1.0)
    assert record["error"].startswith("[A] ended with code -9 on: step 1")


def _state_of(pid):
    """The process's state, once the signal has been delivered."""
    psutil = pytest.importorskip("psutil")  # gpu-check works with what the machine has
    for _ in range(100):
        state = psutil.Process(pid).status()
        if state == psutil.STATUS_STOPPED:
            break
        time.sleep(0.01)
    return state


def test_a_contestant_may_run_a_row_of_its_own(interleave, script):
    row = interleave.Row("sleep", {"ms": 1}, tokens=10)
    other = interleave.Row("sleep", {"ms": 20}, warmup=1)
    contestants = [interleave.Contestant(name, sys.executable, script, row=r) for name, r in (("A", None), ("B", other))]
    a, b = interleave.measure(row, contestants, threads=1, rounds=2)
    assert a["args"] == {"ms": 1} and b["args"] == {"ms": 20}
    assert "tokens_per_s" in a and "tokens_per_s" not in b and b["median_s"] >= 20e-3 and b["last_value"] == 3.0


def test_the_benchmark_of_checkpoints_loads_what_it_saves(interleave, tmp_path, monkeypatch):
    import checkpoint as benchmark

    records = []
    monkeypatch.setattr(benchmark.PythiaConfig, "named", lambda size: TINY)
    monkeypatch.setattr(benchmark, "append_results", lambda path, rows: records.extend(rows))
    benchmark.measure(Namespace(folder=tmp_path, model="tiny", rounds=1))
    assert [row["case"] for row in records] == ["save", "load from disk", "load from memory"]
