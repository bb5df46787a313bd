"""apps/train_pythia.py as a user runs it: tiny runs, resuming, interrupting, wrong arguments."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    words = "the quick brown fox jumps over a lazy dog while seven wizards quietly box".split()
    lines = [" ".join(words[(i * 7 + j * (i % 5 + 1)) % len(words)] for j in range(9)) for i in range(3000)]
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("\n".join(lines))
    return path


def command(text, *more):
    return [
        sys.executable, "apps/train_pythia.py", "--dataset", str(text), "--vocab-size", "300", "--model", "14m", "--seq_len", "64",
        "--block-size", "16", *map(str, more),
    ]  # fmt: skip


def run(text, *more, **kwargs):
    return subprocess.run(command(text, *more), cwd=ROOT, capture_output=True, text=True, env=environment(), **kwargs)


def environment():
    return {**os.environ, "PYTHONPATH": str(ROOT / "python"), "NEEDLE_CACHE": os.environ.get("NEEDLE_TEST_CACHE", "/nonexistent")}


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    os.environ["NEEDLE_TEST_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    del os.environ["NEEDLE_TEST_CACHE"]


def losses(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def test_a_run_learns_and_leaves_its_files(text, tmp_path):
    done = run(text, "--sparse", "--max_steps", 12, "--checkpoint_dir", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "density 0.70" in done.stdout and "below token frequencies alone" in done.stdout
    for name in ("metrics.jsonl", "loss.png", "sample.txt", "latest", "step-000012/model.safetensors"):
        assert (tmp_path / name).is_file()
    curve = losses(tmp_path)
    assert len(curve) == 12 and curve[-1] < curve[0] - 0.3


def test_resuming_is_bitwise(text, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run(text, "--max_steps", 6, "--checkpoint_dir", whole).returncode == 0
    again = tmp_path / "again"
    assert run(text, "--max_steps", 6, "--checkpoint_dir", again).returncode == 0
    assert losses(again) == losses(whole)
    with subprocess.Popen(
        command(text, "--max_steps", 6, "--checkpoint_dir", parts), cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment()
    ) as first:
        for line in first.stdout:
            if line.startswith("step     1/"):
                first.send_signal(signal.SIGINT)
                break
        rest = first.stdout.read()
    assert first.returncode == 130 and "go on with: python apps/train_pythia.py --load_checkpoint" in rest
    assert len(losses(parts)) < 6
    assert run(text, "--load_checkpoint", parts).returncode == 0
    assert losses(parts) == losses(whole)


def test_resuming_keeps_what_made_the_run(text, tmp_path):
    """Pattern, rate, batch and seed come from the checkpoint: the command that Ctrl-C prints gives none of them."""
    flags = ["--sparse", "--pattern", "global", "--lr", "3e-3", "--batch_size", 3, "--seed", 5, "--max_tokens", 5000]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run(text, *flags, "--max_steps", 5, "--checkpoint_dir", whole).returncode == 0
    line = [sys.executable, "apps/train_pythia.py", "--load_checkpoint", str(parts)]
    with subprocess.Popen(
        command(text, *flags, "--max_steps", 5, "--checkpoint_dir", parts), cwd=ROOT, stdout=subprocess.PIPE, text=True,
        env=environment(),
    ) as first:  # fmt: skip
        for said in first.stdout:
            if said.startswith("step     1/"):
                first.send_signal(signal.SIGINT)
                break
        first.stdout.read()
    assert len(losses(parts)) < 5
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    assert "global attention" in done.stdout and "3 x 64 tokens" in done.stdout
    assert losses(parts) == losses(whole)


def test_accumulation_eval_only_and_comparison(text, tmp_path):
    assert run(text, "--max_steps", 2, "--accumulation-steps", 2, "--checkpoint_dir", tmp_path).returncode == 0
    only = run(text, "--load_checkpoint", tmp_path, "--eval_only")
    assert only.returncode == 0 and "held-out loss" in only.stdout
    table = run(text, "--compare_dense", "--max_steps", 2)
    assert table.returncode == 0, table.stderr
    assert "attention ms/step" in table.stdout and "dense" in table.stdout and "local" in table.stdout


WRONG = [
    (("--model", "70b"), "unknown model: 70b"),
    (("--pattern", "star"), "unknown pattern: star"),
    (("--device", "tpu"), "unknown device: tpu"),
    (("--sparse", "--seq_len", "50"), "no multiple of the block size"),
    (("--vocab_size", "50000"), "50000"),
    (("--lr", "-1"), "[lr]"),
    (("--batch_size", "0"), "[batch_size]"),
    (("--seq_len", "4096000"), "4096000"),
    (("--load_checkpoint", "no/such/folder"), "no such folder"),
    (("--dataset", "no-such-data"), "no-such-data"),
    (("--checkpoint_dir", "/proc/none"), "/proc/none"),
    (("--tokenizer", "README.md"), "README.md"),
    (("--epochs", "many"), "--epochs"),
    (("--epochs", "nan"), "[epochs]"),
]


@pytest.mark.parametrize("arguments, said", WRONG, ids=[w[0][-1] for w in WRONG])
def test_wrong_arguments_end_in_one_line(text, arguments, said):
    done = run(text, *arguments)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 or "usage:" in done.stderr


def test_cuda_without_a_gpu(text):
    import needle as ndl

    if ndl.cuda().enabled():
        pytest.skip("there is a GPU")
    done = run(text, "--device", "cuda")
    assert done.returncode == 2 and "cuda() cannot be used" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("content, said", [(b"", "no text"), (bytes(range(256)) * 64, "text"), (b"a few words", "too little text")])
def test_unusable_text(tmp_path, content, said):
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    done = run(path)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


def test_second_interrupt_and_damaged_checkpoint(text, tmp_path):
    start = time.monotonic()
    assert run(text, "--max_steps", 1, "--checkpoint_dir", tmp_path).returncode == 0
    (tmp_path / "step-000001" / "model.safetensors").write_bytes(b"\x00" * 100)
    done = run(text, "--load_checkpoint", tmp_path)
    assert done.returncode == 2 and "model.safetensors" in done.stderr and "Traceback" not in done.stderr
    assert time.monotonic() - start < 300
