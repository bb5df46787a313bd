"""apps/train_pythia.py as a user runs it: tiny runs, resuming, interrupting, wrong arguments."""

import contextlib
import errno
import importlib.util
import itertools
import json
import os
import random
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import pythia_app
from devices import usable
from needle import memory
from needle.backend_ndarray import kernels
from needle.checkpoints import CheckpointFolder, read_folder
from needle.data import text as text_module
from needle.data import token_files
from needle.data.prepare import prepare
from needle.data.text import load_text, unigram_entropy
from needle.data.text_tokenizer import load_tokenizer, train_tokenizer
from needle.data.token_files import TokenWriter
from needle.models import GenerationConfig, Pythia, PythiaConfig, pretrained, pythia, score_text
from needle.models.training import Step
from pythia_app import events as events_module
from pythia_app import loop, options
from pythia_app.config_file import STARTED
from pythia_app.flops import published
from pythia_app.loading import tokenizer_of_run
from pythia_app.options import parse
from pythia_app.report import Reporter
from pythia_app.trainer import Trainer

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    words = "the quick brown fox jumps over a lazy dog while seven wizards quietly box".split()
    lines = [" ".join(words[(i * 7 + j * (i % 5 + 1)) % len(words)] for j in range(9)) for i in range(1000)]
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("\n".join(lines))
    return path


def command(text, *more):
    return [
        sys.executable, "apps/train_pythia.py", "--dataset", str(text), "--vocab-size", "300", "--model", "14m", "--seq_len", "64",
        "--block-size", "16", *map(str, more),
    ]  # fmt: skip


def outside(*arguments, **kwargs):
    """The app as a user runs it."""
    return subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, **kwargs)


def beside(text, *more):
    """The same, going on beside the test."""
    return subprocess.Popen(command(text, *more), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def until(process, start):
    """What the process says up to the line that starts so."""
    for line in process.stdout:
        if line.startswith(start):
            return line
    raise AssertionError(process.wait())


@pytest.fixture
def run(app, text):
    return lambda *arguments: app("train_pythia", *command(text, *arguments)[2:])


@pytest.fixture
def main(run):
    """(exit code, lines on stderr) of a run."""

    def call(*arguments):
        done = run(*arguments)
        return done.returncode, done.stderr.splitlines()

    return call


@pytest.fixture
def interrupted(run, monkeypatch):
    """A run that gets so many signals in its second step."""

    def call(*arguments, times=1):
        from pythia_app.trainer import Trainer

        train_step = Trainer.train_step

        def step(self):
            for _ in range(times if self.step == 1 else 0):
                signal.raise_signal(signal.SIGINT)
            return train_step(self)

        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "train_step", step)
            return run(*arguments)

    return call


def losses(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def test_a_run_learns_and_leaves_its_files(text, tmp_path):
    done = outside(*command(text, "--sparse", "--max_steps", 12, "--checkpoint_dir", tmp_path))
    assert done.returncode == 0, done.stderr
    assert "density 0.70" in done.stdout and "below token frequencies alone" in done.stdout
    for name in ("config.yaml", "metrics.jsonl", "report.html", "checkpoints.json", "step-000012/model.safetensors"):
        assert (tmp_path / name).is_file()
    curve = losses(tmp_path)
    assert len(curve) == 12 and curve[-1] < curve[0] - 0.3


def test_token_frequencies_are_judged_by_the_text_that_the_loss_is_of(run, tmp_path, monkeypatch):
    """Its part of the held-out text may be harder than the rest of it."""
    path = tmp_path / "words.txt"
    path.write_text("one two three four " * 5000 + "four " * 800)  # of which the end is held out
    monkeypatch.setattr(pythia_app.trainer, "EVAL_TOKENS", 200)
    for seq_len, tokens in ((64, 200), (256, 257)):
        done = run("--dataset", path, "--vocab_size", 266, "--eval_only", "--seq_len", seq_len)
        text = load_text(str(path), vocab_size=266)
        expected, other = (unigram_entropy(text.train, part, 266) for part in (text.held_out[:tokens], text.held_out))
        assert f"alone give {expected:.3f} nats" in done.stdout and f"alone ({expected:.3f})" in done.stdout
        assert abs(expected - other) > 0.01


def test_ctrl_c_and_going_on_is_bitwise(run, text, tmp_path):
    """Pattern, rate, batch and seed come from the checkpoint: the command that Ctrl-C prints gives none of them."""
    flags = [
        "--sparse",
        "--pattern",
        "global",
        "--lr",
        "3e-3",
        "--batch_size",
        3,
        "--seed",
        5,
        "--max_tokens",
        5000,
        "--max_steps",
        5,
    ]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run(*flags, "--checkpoint_dir", whole).returncode == 0
    with beside(text, *flags, "--checkpoint_dir", parts) as first:
        until(first, "step     1/")
        first.send_signal(signal.SIGINT)
        said, _ = first.communicate(timeout=300)
    assert first.returncode == 130 and f"go on with: python apps/train_pythia.py --load_checkpoint {parts}\n" in said
    assert 0 < len(losses(parts)) < 5
    done = outside(sys.executable, "apps/train_pythia.py", "--load_checkpoint", str(parts))
    assert done.returncode == 0, done.stderr
    assert "global attention" in done.stdout and "3 x 64 tokens" in done.stdout
    assert losses(parts) == losses(whole)


def test_a_second_ctrl_c_ends_at_once(interrupted, tmp_path):
    done = interrupted("--max_steps", 4, "--checkpoint_dir", tmp_path, times=2)
    assert done.returncode == 130 and "stopped at once; the last checkpoint is as it was" in done.stderr
    assert len(losses(tmp_path)) == 1 and not list(tmp_path.glob("*step-*")) and "go on with" not in done.stderr
    done = interrupted("--max_steps", 4, "--save_every", 1, "--checkpoint_dir", tmp_path / "saved", times=2)
    go_on = f"go on with: python apps/train_pythia.py --load_checkpoint {tmp_path / 'saved'}"
    assert done.returncode == 130 and done.stderr.splitlines()[-2:] == ["stopped at once; the last checkpoint is as it was", go_on]


def test_a_flag_that_cannot_change_is_said(main, tmp_path):
    assert main("--model", "Pythia-14M", "--max_steps", 1, "--checkpoint_dir", tmp_path)[0] == 0
    flags = ["--checkpoint_dir", tmp_path, "--resume", "--max_steps", 1, "--model", "14M"]
    assert main(*flags) == (0, [])
    code, lines = main(*flags, "--sparse", "--seq_len", 128)
    assert code == 0 and lines == [
        "note: --seq_len 128 is not taken: the checkpoint has 64",
        "note: --sparse True is not taken: the checkpoint has False",
    ]
    code, lines = main(*flags, "--sparse", "--seq_len", 32)  # which is no multiple of a block
    assert code == 0 and len(lines) == 2
    assert main(*flags, "--batch_size", 16384, "--plan") == (0, [])  # 64 tokens each; too many of the default of 512
    code, lines = main(*flags, "--seq_len", 512, "--no_sparse")  # its default, and what the checkpoint has
    assert code == 0 and lines == ["note: --seq_len 512 is not taken: the checkpoint has 64"]
    config = tmp_path / "flags.yaml"
    config.write_text("pattern: mixed\nwindow: 2\n")
    code, lines = main(*flags, "--config", config)
    assert code == 0 and lines == ["note: --pattern mixed is not taken: the checkpoint has local"]
    assert main("--config", config, "--plan") == (0, ["note: --pattern mixed has no effect without --sparse"])
    assert main("--config", config, "--plan", "--sparse") == (0, [])


def test_sigterm_saves_and_the_same_command_with_resume_goes_on(run, text, tmp_path):
    flags = ["--max_steps", 6, "--dropout", "0.1", "--accumulation_steps", 2, "--batch_size", 1, "--save_every", 2]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run(*flags, "--resume", "--checkpoint_dir", whole).returncode == 0  # there is nothing to resume
    assert [path.name for path in sorted(whole.glob("step-*"))] == ["step-000004", "step-000006"]
    assert losses(whole) != losses(whole)[::-1] and len(losses(whole)) == 6
    with beside(text, *flags, "--checkpoint_dir", parts) as first:
        until(first, "step     1/")
        first.send_signal(signal.SIGTERM)
        first.send_signal(signal.SIGTERM)
        said, _ = first.communicate(timeout=300)
    assert first.returncode == 143 and "saved" in said and 0 < len(losses(parts)) < 6
    done = run(*flags, "--resume", "--checkpoint_dir", parts)
    assert done.returncode == 0 and re.search(r"going on after step \d from .*step-00000\d", done.stdout), done.stderr
    assert losses(parts) == losses(whole)
    before = contents(parts / "step-000006")
    assert run(*flags, "--resume", "--checkpoint_dir", parts).returncode == 0  # nothing is left to do
    assert contents(parts / "step-000006") == before and losses(parts) == losses(whole)


def test_a_step_that_takes_too_long_is_given_up(run, tmp_path, monkeypatch):
    """Between two of its micro-batches: the run goes on as if nobody had stopped it. So is an evaluation, which is made up for."""
    from pythia_app import trainer

    flags = "--max_steps 4 --dropout 0.1 --accumulation_steps 3 --batch_size 1 --save_every 2 --checkpoint_dir".split()
    whole, tensors = tmp_path / "whole", trainer.Trainer.tensors
    assert run(*flags, whole).returncode == 0
    for at, step in ((5, 1), (7, 2)):  # the second batch of the second step; the first of the evaluation
        parts, made = tmp_path / str(at), []

        def interrupted(self, batch, at=at, made=made):
            made.append(batch)
            if len(made) == at:
                signal.raise_signal(signal.SIGTERM)
            return tensors(self, batch)

        with monkeypatch.context() as patch:
            patch.setattr(trainer.Trainer, "tensors", interrupted)
            patch.setattr(trainer, "PATIENCE_S", -1.0)
            done = run(*flags, parts)
        assert done.returncode == 143 and f"stopped after step {step}; saved" in done.stdout and len(made) == at
        assert losses(parts) == losses(whole)[:step] and b"held_out" not in (parts / "metrics.jsonl").read_bytes()
        assert run(*flags, parts, "--resume").returncode == 0 and losses(parts) == losses(whole)
        assert contents(parts / "step-000004").keys() == contents(whole / "step-000004").keys()
        for name in ("model.safetensors", "optimizer.safetensors"):
            assert contents(parts / "step-000004")[name] == contents(whole / "step-000004")[name]
        rows = [map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) for folder in (parts, whole)]
        held = [[(row["step"], row["held_out_loss"]) for row in of if "held_out_loss" in row] for of in rows]
        assert held[0] == held[1] and [step for step, _ in held[0]] == [2, 4]


def test_killed_and_resumed(run, text, tmp_path):
    """NEEDLE_TEST_KILLS: how many times it is killed at a random moment after the first step."""
    kills, rng, inside = int(os.environ.get("NEEDLE_TEST_KILLS", "2")), random.Random(0), 0
    flags = ["--max_steps", 3 * kills, "--save_every", 1, "--checkpoint_dir"]
    assert run(*flags, tmp_path / "whole").returncode == 0
    expected, folder, done = losses(tmp_path / "whole"), tmp_path / "parts", 0
    for _ in range(kills):
        with beside(text, *flags, folder, "--resume") as process:
            until(process, "Pythia-14m")
            while process.poll() is None and len(losses(folder) if (folder / "metrics.jsonl").exists() else ()) <= done:
                time.sleep(0.005)
            time.sleep(rng.uniform(0, 0.5))
            process.kill()
            _, complained = process.communicate()
        assert complained == ""
        inside += any(folder.glob(".step-*.partial"))
        saved = [int(path.name.split("-")[1]) for path in folder.glob("step-*")]
        done = max(saved, default=0)
    rest = run(*flags, folder, "--resume")
    assert rest.returncode == 0 and rest.stderr == ""
    assert losses(folder) == expected and len(list(folder.glob("step-*"))) <= 3 and not list(folder.glob(".*"))
    print(f"{kills} kills, {inside} of them while a checkpoint was written")


def test_training_on_a_token_file_is_resumed_bitwise(run, interrupted, tmp_path):
    """Batches come from a thread that is ahead; the run that goes on has the same ones all the same."""
    ids = np.random.default_rng(0).zipf(1.5, 40_000) % 300
    folder = tmp_path / "writing"
    folder.mkdir()
    writer = TokenWriter(folder, 300)
    writer.write(ids, range(1000, 40_001, 1000))
    writer.finish(tmp_path / "tokens 300")
    flags = ["--dataset", tmp_path / "tokens 300", "--max_steps", 6, "--accumulation_steps", 2, "--checkpoint_dir"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    done = run(*flags, whole)
    assert done.returncode == 0 and done.stderr == ""
    assert "tokens 300.bin: 38,000 training tokens, 2,000 held out, vocabulary 300" in done.stdout
    assert '"sample"' not in (whole / "metrics.jsonl").read_text()  # there is no tokenizer
    assert interrupted(*flags, parts, "--save_every", 2).returncode == 130 and len(losses(parts)) == 2
    assert "held_out_loss" not in (parts / "metrics.jsonl").read_text()  # though a checkpoint was due
    done = run(*flags, parts, "--resume")
    assert done.returncode == 0 and "\n1,024 tokens in " in done.stdout
    assert losses(parts) == losses(whole)
    rows = [json.loads(line) for line in (parts / "metrics.jsonl").read_text().splitlines()]
    assert [row["tokens"] for row in rows if "loss" in row] == [256, 512, 768, 1024, 1280, 1536]
    seconds = [row["seconds"] for row in rows if "loss" in row]
    assert sorted({0, *seconds}) == [0, *seconds]
    in_order = run(*flags, tmp_path / "in order", "--in_order", "--max_steps", 2)
    assert in_order.returncode == 0 and losses(tmp_path / "in order") != losses(whole)[:2]
    for wrong, said in (("--vocab_size=299", "token id outside the vocabulary: 299 (0 to 298"), ("--max_tokens=5", "too short")):
        done = run(*flags, tmp_path / "none", wrong)
        assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1
    (tmp_path / "short.bin").write_bytes(b"\1\0" * 1000)
    done = run("--dataset", tmp_path / "short.bin", "--checkpoint_dir", tmp_path / "none")
    assert done.returncode == 2 and "[short.bin, held out] too short for one sequence: 50 tokens (65 or more" in done.stderr
    assert not (tmp_path / "none").exists()
    plan = run("--dataset", tmp_path / "tokens 300.idx", "--plan")
    assert plan.returncode == 0 and f"fits: {options.device('auto')} has" in plan.stdout


def test_text_that_cannot_be_read_on_loses_no_step(run, tmp_path, monkeypatch):
    """An id in the middle of a step, of a file too long to be read whole before the run."""
    for module, name in ((text_module, "_LOOKED_AT_TOKENS"), (token_files, "_SAMPLE_TOKENS")):
        monkeypatch.setattr(module, name, 1000)
    ids, file = np.arange(40_000, dtype="<u2") % 300, tmp_path / "ids.bin"
    flags = ["--dataset", file, "--vocab_size", 300, "--in_order", "--accumulation_steps", 2, "--save_every", 0, "--max_steps", 6]
    flags += ["--dropout", 0.1]
    ids.tofile(file)
    assert run(*flags, "--checkpoint_dir", tmp_path / "whole").returncode == 0
    np.where(np.arange(40_000) == 1200, np.uint16(700), ids).tofile(file)  # in the second batch of the fifth step
    done = run(*flags, "--checkpoint_dir", tmp_path / "run")
    assert done.returncode == 2 and "token id outside the vocabulary: 700" in done.stderr and done.stderr.count("\n") == 1
    assert f"stopped after step 4; saved {tmp_path / 'run' / 'step-000004'}\n" in done.stdout
    assert run(*flags, "--checkpoint_dir", tmp_path / "run", "--resume").returncode == 2  # which has nothing new to save
    ids.tofile(file)
    assert run(*flags, "--checkpoint_dir", tmp_path / "run", "--resume").returncode == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "whole") and len(losses(tmp_path / "run")) == 6


def test_memory_that_runs_out_loses_no_step(run, tmp_path, monkeypatch):
    """In the middle of the fifth step."""
    flags = ["--accumulation_steps", 2, "--save_every", 0, "--max_steps", 6, "--dropout", 0.1, "--checkpoint_dir"]
    assert run(*flags, tmp_path / "whole").returncode == 0
    batches, tensors = [], Trainer.tensors

    def fewer(self, batch):
        batches.append(batch)
        if len(batches) == 10:
            memory.set_limit(memory.stats(self.device).live + 4096, self.device)
        return tensors(self, batch)

    try:
        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "tensors", fewer)
            done = run(*flags, tmp_path / "run")
    finally:
        memory.set_limit(None, options.device("auto"))
    assert done.returncode == 2 and "out of memory" in done.stderr
    assert f"stopped after step 4; saved {tmp_path / 'run' / 'step-000004'}\n" in done.stdout
    assert run(*flags, tmp_path / "run", "--resume").returncode == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "whole") and len(losses(tmp_path / "run")) == 6


def test_memory_that_runs_out_in_an_update_leaves_nothing_to_save(run, tmp_path, monkeypatch):
    calls, adam_step = [], kernels.adam_step

    def fail(*args, **kwargs):
        calls.append(args)
        if len(calls) == failing:
            raise MemoryError
        return adam_step(*args, **kwargs)

    monkeypatch.setattr(kernels, "adam_step", fail)
    failing = None
    assert run("--max_steps", 2, "--checkpoint_dir", tmp_path / "two").returncode == 0
    failing = 2 * len(calls) + 2  # of the next run's third step
    done = run("--max_steps", 4, "--save_every", 0, "--checkpoint_dir", tmp_path / "run")
    assert done.returncode == 2 and "out of memory" in done.stderr and len(calls) == failing
    assert "saved" not in done.stdout and not list((tmp_path / "run").glob("step-*"))


def test_a_damaged_checkpoint_is_passed_over(run, tmp_path):
    flags = ["--max_steps", 4, "--save_every", 2, "--checkpoint_dir", tmp_path]
    assert run(*flags).returncode == 0
    expected = losses(tmp_path)
    with open(tmp_path / "step-000004" / "optimizer.safetensors", "r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(b"damage")
    done = run(*flags, "--resume")
    assert done.returncode == 0 and losses(tmp_path) == expected
    assert (
        done.stderr.count("\n") == 1
        and "optimizer.safetensors is damaged" in done.stderr
        and "going on from step-000002" in done.stderr
    )


def test_a_damaged_checkpoint_that_is_named_is_not_used(app, run, text, tmp_path):
    assert run("--max_steps", 1, "--checkpoint_dir", tmp_path).returncode == 0
    saved = tmp_path / "step-000001"
    with open(saved / "model.safetensors", "r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(b"damage")
    for done in (
        app("evaluate", "--model", saved, "--text", text), app("generate", "--model", saved, "--prompt", "a"),
        run("--max_steps", 2, "--init_from", saved, "--checkpoint_dir", tmp_path / "next"),
    ):  # fmt: skip
        assert done.returncode == 2 and re.search(r"model.safetensors is damaged: bytes: \d+, crc32: \w+ \(written", done.stderr)


def test_a_batch_of_another_size_leaves_the_number_of_epochs(run, text, tmp_path):
    """The steps before it may have been larger or smaller than those to come."""
    flags = ["--epochs", 1, "--max_tokens", 641, "--resume", "--checkpoint_dir"]
    assert run("--batch_size", 1, "--max_steps", 4, *flags[2:], tmp_path).returncode == 0
    for batch_size, steps in ((2, 7), (1, 10)):
        parts = tmp_path / str(batch_size)
        shutil.copytree(tmp_path / "step-000004", parts / "step-000004")
        done = run("--batch_size", batch_size, *flags, parts)
        assert done.returncode == 0, done.stderr
        assert json.loads((parts / f"step-{steps:06d}" / "state.json").read_text())["metrics"]["tokens"] == 640


def test_a_token_file_that_is_cut_off_meanwhile_ends_a_run_that_has_saved(tmp_path):
    ids = tmp_path / "ids.bin"
    np.random.default_rng(0).integers(0, 300, 30_000).astype("<u2").tofile(ids)
    with beside(ids, "--max_steps", 10**6, "--save_every", 0, "--checkpoint_dir", tmp_path / "run") as process:
        until(process, "step     1/")
        os.truncate(ids, 1000)
        said, wrong = process.communicate(timeout=300)
    assert process.returncode == 2 and "cut off meanwhile: 1000 bytes (60000 when it was opened)" in wrong and "saved" in said, (
        wrong
    )
    assert len(CheckpointFolder(tmp_path / "run").names()) == 1


def test_a_new_run_that_was_to_go_on_says_so(run, tmp_path):
    flags, said = ("--max_steps", 1, "--resume", "--checkpoint_dir", tmp_path), f"a new run: no checkpoint is in {tmp_path}\n"
    assert said in run(*flags).stdout
    assert said not in run(*flags).stdout and said not in run(*flags[:2], *flags[3:4], tmp_path / "new").stdout


def test_a_state_that_no_run_has_saved(main, tmp_path):
    """With checksums that fit, as somebody would make who wants harm."""
    assert main("--max_steps", 1, "--checkpoint_dir", tmp_path)[0] == 0
    saved, sums = tmp_path / "step-000001" / "state.json", tmp_path / "step-000001" / "checksums.json"
    good, before = saved.read_text(), json.loads(sums.read_text())
    for change in (
        {"data": []}, {"data": {**json.loads(good)["data"], "position_windows": "x"}}, {"random": 3}, {"metrics": {"tokens": "x"}},
        {"metrics": {"tokens": 1, "seconds": "nan"}}, {"metrics": {"tokens": 1, "seconds": "inf"}}, {"metrics": "x"}, {"step": "1"}, {"step": True}, {"steps": -1}, {"optimizer_steps": 10**30},
        {"data": {**json.loads(good)["data"], "position_windows": -1}}, {"options": []}, {"options": {**json.loads(good)["options"], "lr": "x"}},
        {"options": {**json.loads(good)["options"], "batch_size": [1]}}, {"options": {**json.loads(good)["options"], "betas": 1}},
        {"options": {**json.loads(good)["options"], "seq_len": "64"}}, {"options": {**json.loads(good)["options"], "sparse": 1}},
    ):  # fmt: skip
        saved.write_text(json.dumps({**json.loads(good), **change}))
        content = saved.read_bytes()
        sums.write_text(json.dumps({**before, "state.json": {"bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"}}))
        code, lines = main("--load_checkpoint", tmp_path)
        said = ("load_checkpoint", "random_state", "saved position")
        assert code == 2 and len(lines) == 1 and any(name in lines[0] for name in said), (change, lines)


def test_accumulation_eval_only_and_comparison(run, text, tmp_path):
    assert run("--max_steps", 2, "--accumulation-steps", 2, "--checkpoint_dir", tmp_path).returncode == 0
    only = run("--load_checkpoint", tmp_path, "--eval_only")
    assert only.returncode == 0 and "held-out loss" in only.stdout
    assert run("--checkpoint_dir", tmp_path, "--eval_only").stdout == only.stdout
    other = tmp_path / "other.txt"  # its own tokenizer would not be that of the model
    other.write_text(text.read_text()[::-1])
    shown = [
        run("--dataset", other, "--load_checkpoint", tmp_path, "--eval_only", *given).stdout.splitlines()[-1]
        for given in ([], ["--tokenizer", tmp_path / "step-000002" / "tokenizer.json"])
    ]
    assert shown[0] == shown[1] and shown[0].startswith("held-out loss")
    (tmp_path / "flags.yaml").write_text("save_every: 3\nkeep_last: 4\n")
    flags = "--config", tmp_path / "flags.yaml", "--keep_last", 2, "--checkpoint_dir", tmp_path / "none"
    table = run("--compare_dense", "--max_steps", 2, *flags)
    assert table.returncode == 0, table.stderr
    idle = [f"note: --{name} has no effect with --compare_dense" for name in ("checkpoint_dir", "save_every")]
    assert table.stderr.splitlines() == idle and not (tmp_path / "none").exists()
    assert "attention ms/step" in table.stdout
    for kind in (r"dense +1\.000", r"local +0\.700"):
        assert re.search(rf"^{kind}( +\d+){{4}}( +\d\.\d{{3}}){{2}}$", table.stdout, re.M), table.stdout


def test_the_loss_of_untrained_weights_is_named_so(main, tmp_path):
    for where, said in (([], "was named"), (["--checkpoint_dir", tmp_path / "no"], f"in {tmp_path / 'no'}")):
        assert main("--eval_only", *where) == (0, [f"note: the loss is that of untrained weights: no checkpoint {said}"])
    assert main("--eval_only", "--plan") == (0, [])


def test_a_run_begins_with_trained_weights(run, text, tmp_path):
    """With size, vocabulary and tokenizer of theirs, whatever the flags say; it goes on when they are gone."""
    first, second, other = tmp_path / "first", tmp_path / "second", tmp_path / "other.txt"
    other.write_text(text.read_text()[::-1])
    assert run("--max_steps", 4, "--checkpoint_dir", first, "--sparse").returncode == 0
    flags = ("--dataset", other, "--model", "31m", "--vocab_size", 400)
    only, loaded = (
        run(*flags, "--init_from", first, "--eval_only"),
        run("--dataset", other, "--load_checkpoint", first, "--eval_only"),
    )
    dense = "was trained with local attention; without --sparse it is dense"
    notes = [line.partition(": ")[2] for line in only.stderr.splitlines()]
    assert notes[0] == f"{first / 'step-000004'} {dense}" and notes[1:] == [
        "--model 31m is not taken: the checkpoint has 14m", "--vocab_size 400 is not taken: the checkpoint has 300",
    ]  # fmt: skip
    sparse = run(*flags, "--init_from", first, "--sparse", "--eval_only")
    assert dense not in sparse.stderr and sparse.stdout.splitlines()[-1] == loaded.stdout.splitlines()[-1]
    go = ("--dataset", other, "--init_from", first / "step-000004", "--sparse", "--checkpoint_dir", second, "--resume")
    begun = run(*go, "--max_steps", 2)
    assert begun.returncode == 0 and f"weights of {first / 'step-000004'}" in begun.stdout, begun.stderr
    assert run("--compare_dense", "--init_from", first, "--max_steps", 1).returncode == 0
    shutil.rmtree(first)
    gone_on = run(*go, "--max_steps", 3)
    assert gone_on.returncode == 0 and len(losses(second)) == 3, gone_on.stderr
    assert (second / "step-000003" / "tokenizer.json").read_bytes() == (second / "step-000002" / "tokenizer.json").read_bytes()


def test_a_run_that_began_with_weights_needs_no_other(run, text, tmp_path):
    """Not what lies in their place by now; its flags repeat it when the run that they are of has gone on."""
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    sparse = ("--sparse", "--pattern", "global", "--checkpoint_dir", first)
    assert run(*sparse, "--max_steps", 2, "--save_every", 1).returncode == 0
    other = run("--init_from", first, "--checkpoint_dir", second, "--max_steps", 2, "--sparse")
    assert f"{first / 'step-000002'} was trained with global attention; the flags say otherwise" in other.stderr
    assert run(*sparse, "--max_steps", 3, "--resume").returncode == 0
    assert run("--config", second / "config.yaml", "--checkpoint_dir", third).returncode == 0
    assert losses(second) == losses(third)
    changed = json.loads((first / "step-000002" / "tokenizer.json").read_text())
    changed["model"]["merges"] = []
    (first / "step-000002" / "tokenizer.json").write_text(json.dumps(changed))
    gone_on = run("--init_from", first, "--checkpoint_dir", second, "--max_steps", 3, "--resume")
    assert gone_on.returncode == 0 and "note" not in gone_on.stderr, gone_on.stderr
    assert f"init_from: {first / 'step-000002'}" in (second / "config-from-step-2.yaml").read_text()
    said = run("--load_checkpoint", second, "--init_from", third, "--eval_only").stderr
    assert f"--init_from {third} is not taken: a run goes on that began with {first / 'step-000002'}" in said


def test_a_checkpoint_with_a_lower_held_out_loss_than_the_last_is_named(run, tmp_path, monkeypatch):
    found = iter([2.0, 1.0, 3.0])
    monkeypatch.setattr(Trainer, "held_out_loss", lambda self, text: next(found))
    done = run("--max_steps", 3, "--save_every", 1, "--keep_last", 1, "--checkpoint_dir", tmp_path)
    assert done.returncode == 0 and f"\nlowest held-out loss so far: {tmp_path / 'step-000002'}\n" in done.stdout
    assert "held-out loss 3.000 nats, perplexity 20.1; " in done.stdout
    assert CheckpointFolder(tmp_path).names() == ["step-000002", "step-000003"]


def test_a_model_for_long_texts_stays_one(run, tmp_path):
    """And ends its texts as before."""
    model = Pythia(PythiaConfig.named("14m", vocab_size=300, max_seq_len=256))
    model.generation_config = GenerationConfig(eos_token_id=[0, 700])  # not for the samples
    model.save_pretrained(tmp_path / "first")
    assert run("--max_steps", 1, "--checkpoint_dir", tmp_path / "other").returncode == 0
    shutil.copy(tmp_path / "other" / "step-000001" / "tokenizer.json", tmp_path / "first")
    for seq_len, expected in ((64, 256), (272, 272)):
        made = tmp_path / f"of {seq_len}"
        for steps in (1, 2):  # the second goes on
            done = run(
                "--init_from", tmp_path / "first", "--checkpoint_dir", made, "--resume", "--seq_len", seq_len, "--max_steps", steps
            )
            assert done.returncode == 0 and done.stderr == "", done.stderr
            saved = made / f"step-{steps:06d}"
            assert pretrained.read_config(saved).max_seq_len == expected
            assert pretrained.read_generation(saved) == model.generation_config


def test_weights_that_are_loaded_are_not_drawn_before(run, tmp_path, monkeypatch):
    flags = ("--dropout", 0.1, "--seed", 5, "--checkpoint_dir")
    assert run("--max_steps", 1, *flags, tmp_path / "first").returncode == 0

    def normal(rng, shape, std, device, dtype, made=pythia._normal):
        assert rng is None or device.name == "meta"
        return made(rng, shape, std, device, dtype)

    def train_step(self, made=Trainer.train_step):
        assert self.model.dropout.seed == 5
        return made(self)

    monkeypatch.setattr(pythia, "_normal", normal)
    monkeypatch.setattr(Trainer, "train_step", train_step)
    for name, source in (("second", "--init_from"), ("third", "--load_checkpoint")):
        done = run(source, tmp_path / "first", *flags, tmp_path / name, "--max_steps", 2)
        assert done.returncode == 0, done.stderr
        assert run(source, tmp_path / "first", "--eval_only").returncode == 0


def test_a_run_goes_on_from_another_directory(app, text, tmp_path, monkeypatch):
    first, second, elsewhere = (tmp_path / name for name in ("first", "second", "elsewhere"))
    flags = ("--model", "14m", "--seq_len", 64, "--max_steps")
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    shutil.copy(text, "own.txt")
    begun = app("train_pythia", "--dataset", "own.txt", "--vocab_size", 300, "--checkpoint_dir", "first", *flags, 1)
    assert begun.returncode == 0, begun.stderr
    shutil.copy(first / "step-000001" / "tokenizer.json", "own.json")
    for more, gone in ((("--init_from", "first"), "first"), (("--tokenizer", "own.json", "--vocab_size", 300), "own.json")):
        go = ("--dataset", "own.txt", *more, "--checkpoint_dir", second, "--resume", *flags)
        assert app("train_pythia", *go, 1).returncode == 0
        with monkeypatch.context() as patch:
            patch.chdir(elsewhere)
            for again in (("--load_checkpoint", second), ("--config", second / "config.yaml", "--checkpoint_dir", "repeated")):
                done = app("train_pythia", *again, "--max_steps", 2)
                assert done.returncode == 0, done.stderr
            shutil.rmtree("repeated")
        os.rename(gone, f"{gone} of old")
        done = app("train_pythia", *go, 3)  # the same command, where it began
        assert done.returncode == 0 and not done.stderr, done.stderr
        shutil.rmtree(second)


def test_a_run_on_a_token_file_keeps_its_tokenizer(run, text, tmp_path):
    """Beside the file it may be gone, or be another one by now."""
    prepare([text], tmp_path / "ids", vocab_size=300)
    beside, kept = tmp_path / "ids.tokenizer.json", "tokenizer.json"
    flags = ("--dataset", tmp_path / "ids", "--vocab_size", 320, "--checkpoint_dir", tmp_path / "run", "--resume", "--max_steps")
    assert run(*flags, 1).returncode == 0
    its_own = beside.read_bytes()
    more = load_tokenizer(beside).tokenizer
    more.add_special_tokens(["<|pad|>"])
    beside.write_text(more.to_str())  # a token that the file's ids are none of
    assert run(*flags, 2).returncode == 0
    beside.unlink()
    done = run(*flags, 3)
    assert done.returncode == 0 and not done.stderr and "--- sample" in done.stdout
    saved = [tmp_path / "run" / name / kept for name in ("step-000002", "step-000003")]
    assert saved[0].read_bytes() == saved[1].read_bytes()
    other = json.loads(its_own)
    vocab = other["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    beside.write_text(json.dumps(other))
    done = run(*flags, 4)
    assert done.returncode == 2 and "[ids.bin] its ids are those of ids.tokenizer.json, not of " in done.stderr


def test_a_tokenizer_that_was_kept_as_a_relative_path(tmp_path):
    (tmp_path / "tokenizer.json").touch()
    options = parse(["--tokenizer", "gone.json"])
    assert tokenizer_of_run(options, None, tmp_path, {"options": {"tokenizer": "gone.json"}}) == tmp_path / "tokenizer.json"
    assert tokenizer_of_run(options, None, tmp_path, {"options": {"tokenizer": None}}) == Path("gone.json").absolute()
    assert tokenizer_of_run(options, None, tmp_path, {"options": {"tokenizer": "other.json"}}) == Path("gone.json").absolute()
    assert tokenizer_of_run(options, tmp_path, None, None) == Path("gone.json").absolute()


def test_the_name_of_a_data_set_stays_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stdlib").mkdir()
    assert parse([]).dataset == "stdlib" and parse(["--dataset", "./stdlib"]).dataset == str(tmp_path / "stdlib")


def test_weights_that_no_run_can_begin_with(main, tmp_path, monkeypatch):
    config = PythiaConfig(layers=1, width=16, heads=2, feed_forward=32, vocab_size=300)
    Pythia(config).save_pretrained(tmp_path / "small")
    Pythia(PythiaConfig.named("14m", vocab_size=300)).save_pretrained(tmp_path / "mute")
    shutil.copytree(tmp_path / "mute", tmp_path / "wider")
    config = json.loads((tmp_path / "wider" / "config.json").read_text())
    (tmp_path / "wider" / "config.json").write_text(json.dumps({**config, "vocab_size": 301}))
    (tmp_path / "writing").mkdir()
    writer = TokenWriter(tmp_path / "writing", 301)
    writer.write(np.arange(3000) % 301, [3000])
    writer.finish(tmp_path / "tokens")
    for folder, said, *more in (
        ("small", "has no published size: layers 1, width 16, heads 2, "),
        ("mute", "no tokenizer.json in"),
        ("wider", "wider: [load_published] gpt_neox.embed_in.weight is (300, 128)", "--dataset", tmp_path / "tokens"),
    ):
        code, lines = main("--init_from", tmp_path / folder, *more)
        assert code == 2 and said in lines[-1], lines
    assert main("--init_from", tmp_path / "mute", "--plan")[0] == 0  # it needs none
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointFolder, "newest", lambda _: os.listdir("no such folder"))
        code, lines = main("--init_from", tmp_path / "mute")
    assert code == 2 and f"[model] cannot read {tmp_path / 'mute'}: No such file" in lines[-1], lines
    (tmp_path / "mute" / "model.safetensors").write_bytes(b"")  # seen before any text is tokenized
    code, lines = main("--init_from", tmp_path / "mute", "--dataset", "no such text", "--tokenizer", "none")
    assert code == 2 and f"[init_from] {tmp_path / 'mute'}: [checkpoint] cannot read" in lines[-1], lines


def test_the_second_of_two_compared_runs_has_the_memory_of_its_plan(text):
    flags = ("--compare_dense", "--block_size", 16, "--max_steps", 2)
    planned = re.findall(r"^peak .* \(([\d,]+) bytes\)", outside(*command(text, *flags, "--plan")).stdout, re.M)
    assert len(planned) == 2
    done = outside(*command(text, *flags, "--memory_limit", max(int(peak.replace(",", "")) for peak in planned)))
    assert done.returncode == 0, done.stderr


def test_a_comparison_that_is_interrupted_has_no_row_of_what_was_not_trained(interrupted):
    done = interrupted("--compare_dense", "--max_steps", 4)
    assert done.returncode == 130 and "\ndense" in done.stdout and "\nlocal" not in done.stdout, done.stdout


def test_epochs_of_a_comparison(run, monkeypatch):
    steps = []
    train_step = Trainer.train_step
    monkeypatch.setattr(Trainer, "train_step", lambda self: steps.append(self.steps) or train_step(self))
    assert run("--compare_dense", "--epochs", 0.01).returncode == 0
    assert steps and steps[0] < 20 and len(steps) == 2 * steps[0]
    steps.clear()  # of a text of two windows, which batches run through several times
    assert run("--compare_dense", "--epochs", 8, "--max_tokens", 129, "--seq_len", 64, "--batch_size", 8).returncode == 0
    assert steps == [2] * 4


def test_steps_of_a_comparison(run, interrupted, monkeypatch):
    """By default it is short; Ctrl-C ends it after its step."""
    steps, train_step = [], Trainer.train_step
    monkeypatch.setattr(Trainer, "train_step", lambda self: steps.append(self.steps) or train_step(self))
    assert interrupted("--compare_dense").returncode == 130 and steps == [20, 20]


@pytest.fixture
def asked(monkeypatch):
    """What the steps of runs are asked for: (weights, optimizer, its rate, ids of the first micro-batch, other arguments) of each.
    None is made, and a run ends with the second.
    """
    found = []

    def train_step(model, optimizer, micro_batches, *rest):
        found.append((model.embed_in.numpy(), optimizer, optimizer.lr, next(micro_batches)[0].numpy(), rest))
        if len(found) % 2 == 0:
            raise KeyboardInterrupt
        return Step(1.0, 1.0)

    monkeypatch.setattr(pythia_app.trainer, "train_step", train_step)
    return found


def test_a_step_is_made_with_what_the_flags_say(run, asked, tmp_path):
    flags = (
        "--lr", 2e-3, "--warmup_steps", 0, "--min_lr_ratio", 0.5, "--max_steps", 2, "--betas", 0.8, 0.9, "--eps", 1e-5,
        "--weight_decay", 0.25, "--max_grad_norm", 0.75, "--accumulation_steps", 3, "--precision", "bf16",
    )  # fmt: skip
    assert run(*flags, "--checkpoint_dir", tmp_path / "run").returncode == 130
    _, optimizer, _, ids, rest = asked[0]
    assert [step[2] for step in asked] == pytest.approx([2e-3, 1.5e-3]) and ids.shape == (2, 64)
    assert optimizer.betas == (0.8, 0.9) and optimizer.eps == 1e-5 and rest[:3] == (3, 0.75, "bf16")
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.25, 0.0}


def test_weights_and_the_order_of_the_text_are_of_the_seed(run, asked, tmp_path):
    for n, seed in enumerate((3, 3, 4)):
        assert run("--seed", seed, "--checkpoint_dir", tmp_path / str(n)).returncode == 130
        assert f"max_steps: {options.STEPS}\n" in (tmp_path / str(n) / "config.yaml").read_text()
    first, same, other = asked[::2]
    for part in (0, 3):
        assert (first[part] == same[part]).all() and not (first[part] == other[part]).all()


def test_a_token_file_whose_sequences_have_their_last_target_is_taken_by_them(run, asked, tmp_path):
    (tmp_path / "writing").mkdir()
    writer = TokenWriter(tmp_path / "writing", 300)
    writer.write(np.arange(65 * 60) % 300, range(65, 65 * 60 + 1, 65))
    writer.finish(tmp_path / "tokens")
    assert run("--dataset", tmp_path / "tokens", "--in_order", "--checkpoint_dir", tmp_path / "run").returncode == 130
    assert asked[0][3][:, 0].tolist() == [0, 65]


def test_the_held_out_loss_is_the_mean_over_its_tokens(run, tmp_path):
    """Of sequences that have their last target, three in batches of two."""
    ids = np.random.default_rng(0).zipf(1.5, (60, 65)) % 300
    (tmp_path / "writing").mkdir()
    writer = TokenWriter(tmp_path / "writing", 300)
    writer.write(ids.ravel(), range(65, ids.size + 1, 65))
    writer.finish(tmp_path / "tokens")
    assert run("--dataset", tmp_path / "tokens", "--max_steps", 1, "--checkpoint_dir", tmp_path).returncode == 0
    (found,) = [row["held_out_loss"] for row in map(json.loads, open(tmp_path / "metrics.jsonl")) if "held_out_loss" in row]
    model = Pythia.from_pretrained(tmp_path / "step-000001")
    parts = [score_text(model, sequence, 64, 64).loss for sequence in ids[-3:].astype(np.int32)]
    assert found == pytest.approx(np.mean(parts), rel=1e-6) and np.std(parts) > 0.01


def test_checkpointing_changes_no_loss(run, tmp_path):
    plain, again = tmp_path / "plain", tmp_path / "again"
    assert run("--max_steps", 3, "--save_every", 0, "--checkpoint_dir", plain).returncode == 0
    assert run("--max_steps", 3, "--checkpoint_layers", 2, "--checkpoint_dir", again).returncode == 0
    assert losses(again) == losses(plain)
    chosen = run("--max_steps", 3, "--checkpoint_layers", "1GB", "--checkpoint_dir", tmp_path / "chosen")
    assert "computed again" not in chosen.stdout and losses(tmp_path / "chosen") == losses(plain)


def test_a_run_that_goes_on_keeps_what_it_was_asked_to_keep(run, tmp_path):
    folder = tmp_path / "run"
    kept = lambda: sorted(path.name for path in folder.glob("step-*"))  # noqa: E731
    assert (
        run("--max_steps", 3, "--save_every", 1, "--keep_last", 9, "--memory_limit", "4GiB", "--checkpoint_dir", folder).returncode
        == 0
    )
    assert len(kept()) == 3
    early = kept()[0]
    assert run("--load_checkpoint", folder, "--max_steps", 5).returncode == 0
    assert len(kept()) == 5 and "memory_limit: 4GiB" in (folder / "config.yaml").read_text()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    back = run("--load_checkpoint", folder / early)
    assert back.returncode == 2 and f"{folder} went on to {kept()[-1]}" in back.stderr and "--checkpoint_dir FOLDER" in back.stderr
    assert run("--load_checkpoint", folder / early, "--checkpoint_dir", folder).stderr == back.stderr
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert run("--load_checkpoint", folder / early, "--max_steps", 2, "--checkpoint_dir", tmp_path / "other").returncode == 0
    assert run("--load_checkpoint", folder / early, "--eval_only").returncode == 0


def test_precision_is_saved_and_resumed_bitwise(run, interrupted, tmp_path):
    flags = ("--seed", 3, "--max_steps", 5, "--accumulation_steps", 2, "--checkpoint_dir")
    for precision in ("fp32", "bf16", "fp16"):
        done = run("--precision", precision, *flags, tmp_path / precision)
        assert done.returncode == 0 and f"2 per step, {precision}" in done.stdout, done.stderr
    for low in ("bf16", "fp16"):
        pairs = list(zip(losses(tmp_path / "fp32"), losses(tmp_path / low), strict=True))
        assert all(a != b and abs(a - b) < 0.02 for a, b in pairs)
    # The rate follows the number of steps, so a run of 5 is interrupted rather than one of 3 made longer.
    parts = tmp_path / "parts"
    assert interrupted("--precision", "fp16", *flags, parts).returncode == 130 and len(losses(parts)) == 2
    state = json.loads((parts / "step-000002" / "state.json").read_text())
    assert state["options"]["precision"] == "fp16" and state["scaler"]["scale"] == 4096
    assert run("--load_checkpoint", parts).returncode == 0
    assert losses(parts) == losses(tmp_path / "fp16")


@pytest.mark.parametrize(
    "first_line, flag, stays",
    [
        ("mine", "--config", True),
        ("mine", "--checkpoint_dir", True),
        (STARTED, "--config", True),
        (STARTED, "--checkpoint_dir", False),
    ],
)
def test_a_config_of_ones_own_in_the_folder_stays(main, tmp_path, first_line, flag, stays):
    """With what is in it for people; what a killed run has left is replaced."""
    path = tmp_path / "config.yaml"
    path.write_text(f"# {first_line}\ncheckpoint_dir: {tmp_path}\n")
    before = path.read_text()
    assert main(flag, path if flag == "--config" else tmp_path, "--max_steps", 1)[0] == 0
    beside = tmp_path / "config-from-step-0.yaml"
    assert "max_steps: 1\n" in (beside if stays else path).read_text() and beside.is_file() == stays
    assert (path.read_text() == before) == stays


def test_where_a_run_goes_on_from_a_checkpoint(run, tmp_path, monkeypatch):
    """In the run's own folder, however the checkpoint is named; in a new one if it belongs to none."""
    parts, alone = tmp_path / "parts", tmp_path / "mine" / "best"
    assert run("--max_steps", 1, "--checkpoint_dir", parts).returncode == 0
    shutil.copytree(parts / "step-000001", alone)
    (tmp_path / "latest").symlink_to(parts / "step-000001")
    before = contents(alone.parent)
    done = run("--load_checkpoint", tmp_path / "latest", "--max_steps", 2)
    assert done.returncode == 0 and f"in {parts}: " in done.stdout
    monkeypatch.chdir(parts / "step-000002")
    done = run("--load_checkpoint", ".", "--max_steps", 3, "--keep_last", 3)
    assert done.returncode == 0 and f"in {parts}: " in done.stdout and "checkpoints.json" not in os.listdir(parts / "step-000002")
    monkeypatch.chdir(tmp_path)
    done = run("--load_checkpoint", alone, "--max_steps", 2)
    (made,) = (tmp_path / "runs").iterdir()
    assert done.returncode == 0 and f"in runs/{made.name}: " in done.stdout and (made / "step-000002").is_dir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "mine", "parts", "runs"]
    assert contents(alone.parent) == before
    # With --resume the same command goes on in its own folder, once that has a checkpoint.
    for steps in (2, 3):
        flags = ("--load_checkpoint", alone, "--checkpoint_dir", tmp_path / "new", "--resume", "--max_steps", steps)
        assert run(*flags).returncode == 0
    rows = [json.loads(line) for line in (tmp_path / "new" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [2, 3]


def test_a_step_whose_gradients_overflow_is_skipped_counted_and_said(run, tmp_path):
    assert run("--precision", "fp16", "--max_steps", 1, "--checkpoint_dir", tmp_path).returncode == 0
    folder = tmp_path / "step-000001"
    state, sums = (json.loads((folder / name).read_text()) for name in ("state.json", "checksums.json"))
    state["scaler"]["scale"], state["scaler"]["patience"] = 2.0**127, 1
    text_now = json.dumps(state)
    sums["state.json"] = {"bytes": len(text_now), "crc32": f"{zlib.crc32(text_now.encode()):08x}"}
    (folder / "state.json").write_text(text_now)
    (folder / "checksums.json").write_text(json.dumps(sums))
    done = run("--load_checkpoint", tmp_path, "--max_steps", 3)
    assert done.returncode == 0, done.stderr
    assert "gradients infinite or NaN: step skipped, 1 of 2; scale 1.70141e+38 -> 8.50706e+37\n" in done.stdout
    state = json.loads((tmp_path / "step-000003" / "state.json").read_text())
    assert state["optimizer_steps"] == 1 and state["scaler"]["skipped_steps"] == 2


WRONG = [
    (("--precision", "int8"), "unknown precision: int8"),
    (("--model", "70b"), "[model] unknown model: 70b ("),
    (("--pattern", "star"), "unknown pattern: star"),
    (("--device", "tpu"), "unknown device: tpu"),
    (("--sparse", "--seq_len", "50"), "no multiple of the block size"),
    (("--vocab_size", "2000"), "too little text for the vocabulary: 2000 ids asked"),
    (("--vocab_size", "1000000"), "too little text for the vocabulary: 1000000 ids asked"),
    (("--vocab_size", "256"), "[vocab_size] too small: 256"),
    (("--lr", "-1"), "[lr]"),
    (("--batch_size", "0"), "[batch_size]"),
    (("--batch_siz", "3"), "unrecognized arguments: --batch_siz 3"),
    (("--checkpoint_layers", "-1"), "checkpoint_layers is -1"),
    (("--checkpoint_layers", "some"), "[checkpoint_layers] not an amount of memory: 'some'"),
    (("--checkpoint_layers", "1MiB"), "[checkpoint_layers] 1.00 MiB is not enough (accepted: at least"),
    (("--memory_limit", "2 GiBs"), "[memory_limit] not an amount of memory: '2 GiBs'"),
    (("--memory_limit", "0"), "[memory_limit] not an amount of memory: '0'"),
    (("--seq_len", "4096000"), "4096000"),
    (("--load_checkpoint", "no/such/folder"), "no such folder"),
    (("--dataset", "no-such-data"), "no-such-data"),
    (("--checkpoint_dir", "/proc/none"), "/proc/none"),
    (("--tokenizer", "README.md"), "README.md"),
    (("--epochs", "many"), "--epochs"),
    (("--epochs", "nan"), "[epochs]"),
    (("--seed", "-1"), "[seed]"),
    (("--block_size", "40", "--sparse"), "[block_size]"),
    (("--block_size", "129", "--sparse"), "[block_size] is 129 (accepted: multiples of 16 up to 128)"),
    (("--eps", "1e-46"), "[eps] is 1e-46 (accepted: 1.4e-45 to 1)"),
    (("--eps", "nan"), "[eps] is nan"),
    (("--max_steps", "0"), "[max_steps]"),
    (("--resume",), "--checkpoint_dir"),
    (("--compare_dense", "--resume", "--checkpoint_dir", "no-such-run"), "trains from the start; resume was given"),
    (("--compare_dense", "--eval_only"), "trains from the start; eval_only was given"),
    (("--save_every", "-1"), "[save_every]"),
    (("--keep_last", "0"), "[keep_last]"),
    (("--dropout", "1"), "[dropout]"),
    (("--max_tokens", "60"), "too short for one sequence"),
    (("--dataset", ""), "[dataset] is empty"),
    (("--dataset", "/dev/null"), "/dev/null"),
    (("--checkpoint_dir", "README.md"), "README.md"),
    (("--checkpoint_dir", "n" * 300), "nnn"),
    (("--tokenizer", "tests"), "tests"),
    (("--batch_size", "1000000000"), "[batch_size]"),
    (("--batch_size", "100000"), "[batch_size] 100000 x 64 tokens are too many"),
    (("--load_checkpoint", "tests"), "no checkpoint in tests"),
    (("--load_checkpoint", "README.md"), "no such folder: README.md"),
    (("--load_checkpoint", "n" * 5000), "no such folder"),
    (("--init_from", "no/such/folder"), "no such folder"),
    (("--init_from", "tests"), "cannot read tests/config.json"),
    (("--init_from", ""), "[init_from] is empty"),
    (("--dataset", "n" * 5000), "unknown data set"),
    (("--checkpoint_dir", ""), "[checkpoint_dir] is empty"),
    (("--tokenizer", "no-such-file"), "no-such-file"),
    (("--no_such_flag",), "--no_such_flag"),
    (("--no_such\nflag",), "--no_such flag"),
    (("--sparse", "--pattern", ""), "unknown pattern"),
]


@pytest.mark.parametrize("arguments, said", WRONG, ids=[w[0][-1][:20] for w in WRONG])
def test_wrong_arguments_end_in_one_line(main, arguments, said):
    code, lines = main(*arguments)
    assert code == 2 and len(lines) == 1 and lines[0].startswith("train_pythia.py: error: ") and said in lines[0]


def test_numbers_out_of_range_end_in_one_line(main):
    from pythia_app.options import RANGES

    for name, (low, high) in RANGES.items():
        for value in (low - 1, high + 1, -(10**30), 10**30, "nan", "1e3", "", "x"):
            code, lines = main(f"--{name}", value)
            assert code == 2 and len(lines) == 1 and name in lines[0], (name, value, lines)
    for name in ("lr", "epochs"):
        for value in ("0", "-1", "nan", "inf", "1e300", "1e-400", "", "x"):
            code, lines = main(f"--{name}", value)
            assert code == 2 and len(lines) == 1 and name in lines[0], (name, value, lines)


@pytest.mark.parametrize("variable, device", [("NEEDLE_NUM_THREADS", "cpu"), ("NEEDLE_SIM_SM", "cuda_sim")])
def test_a_wrong_environment_variable_ends_in_one_line(text, tmp_path, variable, device):
    """Which the kernels read, as they first run."""
    usable(device)
    env = {**os.environ, variable: "as\nmany"}
    done = outside(*command(text, "--checkpoint_dir", tmp_path / "run", "--device", device), env=env)
    assert done.returncode == 2 and not (tmp_path / "run").exists()
    assert len(done.stderr.splitlines()) == 1 and variable in done.stderr, done.stderr


def test_wrong_arguments_leave_nothing(text, tmp_path):
    """The same as a user sees it, with an exit code and without a traceback."""
    cache = tmp_path / "cache"
    for arguments in (("--vocab_size", 10**6), ("--batch_size", "two")):
        env = {**os.environ, "NEEDLE_CACHE": str(cache)}
        done = outside(*command(text, "--checkpoint_dir", tmp_path / "run", *arguments), env=env)
        assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1, done.stderr
        assert list(tmp_path.rglob("*")) == []


def test_wikitext_without_a_network(text, tmp_path):
    """``datasets`` as it is without a network: warnings on the way, and an error of several lines."""
    (tmp_path / "datasets.py").write_text(
        "import logging\n"
        "def load_dataset(*args):\n"
        "    logging.getLogger('huggingface_hub').warning('retrying')\n"
        "    raise ConnectionError('cannot reach the Hub:\\n  no route to host')\n"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "python")])}
    done = outside(*command(text, "--dataset", "wikitext-2"), env=environ)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "cannot reach the Hub: no route to host; data/wikitext-2 does not exist (put wiki.train.tokens" in done.stderr


def test_what_cannot_fit_is_refused_before_it_starts(main, run, monkeypatch, tmp_path):
    for there in ("capacity", "available"):  # of the machine, and of a GPU
        monkeypatch.setattr(memory, there, lambda device: 20 << 20)
    code, lines = main("--batch_size", 64, "--checkpoint_dir", tmp_path / "run")
    assert code == 2 and len(lines) == 1 and not (tmp_path / "run").exists()
    said = rf"at its peak \(planned\); {re.escape(str(options.device('auto')))} has 20.00 MiB( free)?; none of"
    assert re.search(said, lines[0]) and lines[0].startswith("train_pythia.py: error: [memory] ")
    plan = run("--batch_size", 64, "--plan")
    assert plan.returncode == 0 and re.search(said, plan.stdout) and "fits:" not in plan.stdout


def test_a_run_that_has_its_steps_says_that_nothing_is_left(run, tmp_path):
    flags = "--max_steps", 2, "--checkpoint_dir", tmp_path
    assert "nothing is left" not in run(*flags).stdout
    assert (
        f"going on after step 2 from {tmp_path / 'step-000002'}, of 2 steps: nothing is left to train"
        in run(*flags, "--resume").stdout
    )
    assert ", of 1 steps: nothing is left" in run("--epochs", 1e-6, "--resume", *flags[2:]).stdout


def test_what_kernels_take_of_a_gpu_is_no_room_for_arrays(text, tmp_path):
    """An emulated one of 60 MiB, of which 32 and a little are for scratch memory and flags, and a step that needs 34."""
    usable("cuda_sim")
    flags = "--device", "cuda_sim", "--batch_size", 8, "--checkpoint_dir", tmp_path / "run"
    done = outside(*command(text, *flags), env={**os.environ, "NEEDLE_SIM_MEMORY": "60"})
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and not (tmp_path / "run").exists()
    assert "cuda_sim() has 27.99 MiB free; what fits: --checkpoint_layers 1" in done.stderr


def test_a_plan_that_leaves_little_says_so(run, monkeypatch):
    planned = run("--plan")
    peak = int(re.search(r"\(([\d,]+) bytes\)", planned.stdout)[1].replace(",", ""))
    for free, said in ((peak + peak // 32 + (8 << 20), ""), (peak + (1 << 20), "note: the planned peak is ")):
        monkeypatch.setattr(memory, "available", lambda device, free=free: free)
        done = run("--plan")
        assert done.returncode == 0 and done.stderr[:26] == said
    done = run("--eval_only")
    assert done.returncode == 0 and "planned peak" not in done.stderr


def test_cuda_without_a_gpu(main):
    import needle as ndl

    if ndl.cuda().enabled():
        pytest.skip("this machine has a GPU")
    code, lines = main("--device", "cuda")
    assert code == 2 and len(lines) == 1 and "cuda() cannot be used" in lines[0]


def test_files_of_a_folder_that_are_no_text_are_named(run, text, tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "words.txt").write_bytes(text.read_bytes())
    for n, said in ((1, f"{folder / 'a.png'}\n"), (3, f"{folder / 'a.png'} and 2 more\n")):
        for name in "abc"[:n]:
            (folder / f"{name}.png").write_bytes(b"\x89PNG\0\0")
        done = run("--dataset", folder, "--max_steps", 1, "--checkpoint_dir", tmp_path / f"run {n}")
        assert done.returncode == 0 and f"left out, being no text: {said}" in done.stdout


@pytest.mark.parametrize("content, said", [(b"", "no text"), (bytes(range(256)) * 64, "text"), (b"a few words", "too little text")])
def test_unusable_text(main, tmp_path, content, said):
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    code, lines = main("--dataset", path)
    assert code == 2 and len(lines) == 1 and said in lines[0]


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_vocabulary_of_a_tokenizer_that_is_given(app, text, tmp_path):
    """It may be larger or smaller than the one that is trained where none is given."""
    tokenizer = json.loads(train_tokenizer(tmp_path / "small.json", [text.read_text()], 300, "words").to_json())
    tokenizer["model"]["vocab"] |= {f"word{i}": i for i in range(300, 10_300)}  # which no merge makes
    large, flags = tmp_path / "large.json", ["--model", "14m", "--seq_len", 64]
    large.write_text(json.dumps(tokenizer))
    prepare([text], tmp_path / "ids", tokenizer=large)
    for more, size in (
        (("--dataset", text, "--tokenizer", tmp_path / "small.json"), 300),
        (("--dataset", text, "--tokenizer", large), 10_300),
        (("--dataset", tmp_path / "ids"), 10_300),
        (("--dataset", text), 10_000),
    ):
        done = app("train_pythia", *flags, *more, "--plan")
        assert f" {PythiaConfig.named('14m', vocab_size=size).parameter_count() * 4 / 2**20:.2f} MiB " in done.stdout, done
    done = app(
        "train_pythia", *flags, "--dataset", text, "--tokenizer", large, "--max_steps", 1, "--checkpoint_dir", tmp_path / "run"
    )
    assert done.returncode == 0 and "vocabulary 10,300" in done.stdout
    assert "vocab_size: 10300\n" in (tmp_path / "run" / "config.yaml").read_text()
    done = app("train_pythia", *flags, "--dataset", text, "--tokenizer", large, "--vocab_size", 10_000)
    assert done.stderr.endswith("[vocab_size] smaller than the tokenizer's: 10000 (10300 or more)\n")
    tokenizer["model"]["vocab"]["word"] = 1 << 31
    large.write_text(json.dumps(tokenizer))
    assert "[vocab_size] is 2147483649" in app("train_pythia", *flags, "--dataset", text, "--tokenizer", large, "--plan").stderr


def test_a_second_run_leaves_the_first_alone(run, tmp_path):
    assert run("--max_steps", 2, "--checkpoint_dir", tmp_path).returncode == 0
    before = contents(tmp_path)
    done = run("--max_steps", 1, "--checkpoint_dir", tmp_path)
    assert done.returncode == 2 and "holds a run" in done.stderr and contents(tmp_path) == before
    # The checkpoint itself may be named; steps logged after it, and a torn line, are dropped.
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "loss": 9}\n{"step": 4, "lo')
    assert run("--load_checkpoint", tmp_path / "step-000002", "--max_steps", 3).returncode == 0
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3] and 9 not in losses(tmp_path)
    index = json.loads((tmp_path / "checkpoints.json").read_text())["checkpoints"]
    assert [entry["name"] for entry in index] == ["step-000002", "step-000003"]  # the last two


@pytest.mark.parametrize("begun", [False, True])
def test_a_run_that_ended_while_another_prepared_itself_is_not_replaced(main, tmp_path, monkeypatch, begun):
    """Neither by a new one nor by one that goes on from what was its newest checkpoint."""
    import train_pythia

    flags = ("--checkpoint_dir", tmp_path, "--save_every", 1, "--keep_last", 9, "--max_steps")
    if begun:
        assert main(*flags, 1)[0] == 0
        flags = ("--resume", *flags)
    prepare = train_pythia.load_text

    def meanwhile(*args, **kwargs):
        monkeypatch.setattr(train_pythia, "load_text", prepare)
        assert main(*flags, 3)[0] == 0
        before.update(contents(tmp_path))
        return prepare(*args, **kwargs)

    before = {}
    monkeypatch.setattr(train_pythia, "load_text", meanwhile)
    code, lines = main(*flags, 2)
    assert code == 2 and len(lines) == 1 and "another process has trained in" in lines[0]
    assert before and contents(tmp_path) == before


def test_a_checkpoint_is_no_place_for_a_run(main, tmp_path):
    """Its own run will remove it, and what is in it."""
    assert main("--max_steps", 1, "--checkpoint_dir", tmp_path)[0] == 0
    (tmp_path / "link").symlink_to("step-000001")
    before = contents(tmp_path)
    for more in (["--resume"], ["--load_checkpoint", tmp_path]):
        code, lines = main("--max_steps", 2, "--checkpoint_dir", tmp_path / "link", *more)
        assert code == 2 and len(lines) == 1 and "link is a checkpoint" in lines[0] and contents(tmp_path) == before
    assert main("--eval_only", "--load_checkpoint", tmp_path / "link")[0] == 0


def test_a_loss_that_is_no_number_ends_the_run(run, tmp_path):
    done = run("--max_steps", 20, "--lr", "1e30", "--checkpoint_dir", tmp_path)
    assert done.returncode == 1 and "a lower --lr may help" in done.stdout and "Traceback" not in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"config.yaml", "metrics.jsonl", "report.html"}
    first = losses(tmp_path)
    # That run saved nothing, so another one may take the folder; its metrics are its own.
    done = run("--max_steps", 1, "--lr", "1e30", "--checkpoint_dir", tmp_path)
    assert done.returncode == 1 and "the held-out loss is nan" in done.stdout and "Traceback" not in done.stderr
    assert losses(tmp_path) == first[:1]


def test_a_loss_that_is_no_number_is_no_matter_of_its_scale(run, tmp_path):
    """In fp16 steps are skipped while the scale is too large; weights that are too large would be saved meanwhile."""
    flags = ("--precision", "fp16", "--save_every", 2, "--warmup_steps", 0, "--checkpoint_dir", tmp_path)
    assert run("--max_steps", 4, *flags).returncode == 0
    done = run("--max_steps", 30, "--resume", "--lr", "1e5", *flags)
    assert done.returncode == 1 and re.search(r"step \d: the loss is \S+; stopped, nothing saved", done.stdout), done.stdout
    assert (tmp_path / "step-000004").is_dir()
    assert run("--max_steps", 6, "--load_checkpoint", tmp_path / "step-000004", *flags[:-1], tmp_path / "again").returncode == 0


def test_gradients_that_are_no_numbers_end_the_run_before_it_saves(run, tmp_path):
    """The loss of that step is a number still, but no weight is after it."""
    flags = ("--max_steps", 20, "--lr", "1e6", "--warmup_steps", 0, "--save_every", 1, "--keep_last", 1)
    done = run(*flags, "--checkpoint_dir", tmp_path)
    assert done.returncode == 1 and "step 2: the norm of the gradients is" in done.stdout and "a lower --lr may help" in done.stdout
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-000001"]
    assert all(np.isfinite(values).all() for values in read_folder(tmp_path / "step-000001").values())


def test_two_processes_cannot_share_a_folder(main, text, tmp_path):
    with beside(text, "--max_steps", 10**6, "--checkpoint_dir", tmp_path) as first:
        until(first, "step     1/")
        code, lines = main("--max_steps", 1, "--checkpoint_dir", tmp_path)
        first.send_signal(signal.SIGINT)
        first.communicate(timeout=300)
    assert code == 2 and len(lines) == 1 and "another process is training in" in lines[0]
    assert first.returncode == 130
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1))


def test_output_that_nobody_reads(text, tmp_path):
    with beside(text, "--max_steps", 30, "--checkpoint_dir", tmp_path) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


@pytest.mark.parametrize("ended", [(), (signal.SIGINT,), (signal.SIGTERM,), (signal.SIGHUP,), (signal.SIGUSR1,)])
def test_a_run_whose_output_is_cut_off_saves_before_it_ends(text, tmp_path, ended):
    """As in `2>&1 | tee log`, where Ctrl-C ends `tee` as well: what the steps had made was lost."""
    arguments = command(text, "--max_steps", 10**6, "--save_every", 0, "--checkpoint_dir", tmp_path)
    with subprocess.Popen(arguments, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        until(process, "step     1/")
        process.stdout.close()
        for number in ended:
            process.send_signal(number)
        assert process.wait(timeout=300) in (1, *(128 + number for number in ended))
    (saved,) = CheckpointFolder(tmp_path).names()
    assert json.loads((tmp_path / saved / "state.json").read_text())["step"] == len(losses(tmp_path)) > 0


class Terminal:
    """The app on a terminal of 60 columns; ``shown`` is what it has written there."""

    def __init__(self, command, term):
        fcntl, pty, termios = (pytest.importorskip(name) for name in ("fcntl", "pty", "termios"))
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 24, 60, 0, 0))
        environ = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=slave, stderr=slave, env={**environ, "TERM": term})
        os.close(slave)
        self.shown = b""

    def until(self, said):
        """True when it has been shown, False when the app has ended before."""
        while said not in self.shown:
            try:
                more = os.read(self._master, 1 << 16)
            except OSError:  # nobody has the other end any more
                more = b""
            if not more:
                self.close()
                self.process.wait()
                return False
            self.shown += more
        return True

    def close(self):
        os.close(self._master)


def test_what_is_said_on_a_terminal_is_neither_wrapped_nor_taken_for_markup(text, tmp_path):
    pytest.importorskip("rich")
    folder = tmp_path / "a [bold] run :cat:"
    terminal = Terminal(command(text, "--max_steps", 1000, "--checkpoint_dir", folder), "xterm")
    assert terminal.until(b"tokens/s")
    terminal.process.send_signal(signal.SIGINT)
    assert not terminal.until(b"\0") and terminal.process.returncode == 130
    assert f"go on with: python apps/train_pythia.py --load_checkpoint '{folder}'\r\n".encode() in terminal.shown


def test_a_run_whose_terminal_is_closed_saves_before_it_ends(text, tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the app would inherit that it is ignored, where tests run under nohup
    try:
        terminal = Terminal(command(text, "--max_steps", 10**6, "--save_every", 0, "--checkpoint_dir", tmp_path), "xterm")
    finally:
        signal.signal(signal.SIGHUP, before)
    assert terminal.until(b"tokens/s")
    terminal.close()
    terminal.process.send_signal(signal.SIGHUP)
    terminal.process.wait(timeout=300)
    assert len(CheckpointFolder(tmp_path).names()) == 1


def test_a_terminal_that_is_closed_does_not_end_a_run_under_nohup(text, tmp_path):
    arguments = ["nohup", *command(text, "--max_steps", 5, "--checkpoint_dir", tmp_path)]
    with subprocess.Popen(arguments, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        until(process, "step     1/")
        process.send_signal(signal.SIGHUP)
        process.communicate(timeout=300)
    assert process.returncode == 0 and len(losses(tmp_path)) == 5


def test_a_terminal_that_has_no_live_line_gets_plain_ones(text, tmp_path):
    terminal = Terminal(command(text, "--max_steps", 2, "--checkpoint_dir", tmp_path), "dumb")
    assert not terminal.until(b"\0") and terminal.process.returncode == 0
    assert terminal.shown.count(b"\r\nstep     ") == 2 and b"\x1b" not in terminal.shown


def test_runs_that_begin_in_the_same_second_have_folders_of_their_own(main, tmp_path, monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda *_: "NOW")
    monkeypatch.chdir(tmp_path)
    for _ in range(3):
        assert main("--max_steps", 1) == (0, [])
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [f"pythia-14m-NOW{n}" for n in ("", "-2", "-3")]


def test_a_home_folder_in_a_file(main, tmp_path, monkeypatch):
    """Where no shell has replaced its sign."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "flags.yaml").write_text("checkpoint_dir: ~/run\nmax_steps: 1\n")
    assert main("--config=~/flags.yaml") == (0, [])
    assert (tmp_path / "run" / "step-000001").is_dir() and not (ROOT / "~").exists()
    assert main("--load_checkpoint=~/run", "--eval_only") == (0, [])


def test_interrupted_while_evaluating(main, tmp_path, monkeypatch):
    """What is saved already is not saved again."""
    from pythia_app.trainer import Trainer

    def interrupted(self, text, tokens=64):
        os.kill(os.getpid(), signal.SIGINT)
        return 1.0

    monkeypatch.setattr(Trainer, "held_out_loss", interrupted)
    code, _ = main("--max_steps", 4, "--save_every", 2, "--checkpoint_dir", tmp_path)
    assert code == 130 and [path.name for path in tmp_path.glob("step-*")] == ["step-000002"]


def test_an_evaluation_that_was_cut_short_is_made_up_for(main, tmp_path, monkeypatch):
    from pythia_app.trainer import Trainer

    def interrupted(self, text, tokens=64):
        raise KeyboardInterrupt

    def found(name):
        rows = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        kept = ("step", "loss", "held_out_loss", "sample")
        return [[row.get(key) for key in kept] for row in rows], (tmp_path / name / "checkpoints.json").read_text()

    flags = ("--max_steps", 4, "--save_every", 2, "--checkpoint_dir")
    assert main(*flags, tmp_path / "whole")[0] == 0
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "held_out_loss", interrupted)
        assert main(*flags, tmp_path / "parts")[0] == 130
    assert main(*flags, tmp_path / "parts", "--resume")[0] == 0
    assert found("parts") == found("whole") and "null" not in found("whole")[1]
    assert main(*flags, tmp_path / "parts", "--resume")[0] == 0  # there is nothing left to do
    assert found("parts") == found("whole")


def test_an_evaluation_that_was_not_marked_is_recorded_once(main, tmp_path, monkeypatch):
    from needle.checkpoints import CheckpointFolder

    def interrupted(self, checkpoint, held_out_loss):
        raise KeyboardInterrupt

    flags = ("--max_steps", 4, "--save_every", 2, "--checkpoint_dir", tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointFolder, "mark", interrupted)
        assert main(*flags)[0] == 130
    assert main(*flags, "--resume")[0] == 0
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "held_out_loss" in row] == [row["step"] for row in rows if "sample" in row] == [2, 4]


@pytest.fixture
def wait_for_library():
    """Waits until a process has a library of that name in its memory, looking every so many seconds."""
    psutil = pytest.importorskip("psutil")  # gpu-check works with what the machine has

    def wait(process, name, seconds):
        while not any(name in mapped.path for mapped in psutil.Process(process.pid).memory_maps()):
            time.sleep(seconds)

    return wait


def test_interrupted_before_training(text, tmp_path, wait_for_library):
    """While the tokenizer is trained: nothing is left, in the cache or the run's folder."""
    cache, folder = tmp_path / "cache", tmp_path / "run"
    with subprocess.Popen(
        [sys.executable, "apps/train_pythia.py", "--vocab_size", "30000", "--checkpoint_dir", str(folder)], cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "NEEDLE_CACHE": str(cache)},
    ) as process:  # fmt: skip
        wait_for_library(process, "tokenizers", 0.02)
        process.send_signal(signal.SIGINT)
        said, complained = process.communicate(timeout=120)
    assert process.returncode == 130 and "stopped at once" in complained and "Traceback" not in complained and said == ""
    assert not folder.exists() and not [path for path in cache.rglob("*") if path.is_file()]


def test_interrupted_while_importing(wait_for_library):
    with subprocess.Popen([sys.executable, "apps/train_pythia.py"], cwd=ROOT, stderr=subprocess.PIPE) as process:
        wait_for_library(process, "numpy", 0.005)
        process.send_signal(signal.SIGINT)
        assert b"Traceback" not in process.stderr.read() and process.wait() in (-signal.SIGINT, 130)


def test_interrupted_again_at_the_end():
    """When there is nothing left to stop, and Python's own clearing up would be."""
    program = """
import atexit, os, signal
from needle.command_line import run_program
atexit.register(os.kill, os.getpid(), signal.SIGINT)
run_program(lambda: 0)
"""
    done = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, cwd=ROOT / "python")
    assert done.returncode == -signal.SIGINT and done.stderr == b""


def test_interrupted_again_while_the_first_time_is_told():
    program = """
import os, signal, sys
from needle.command_line import exit_code, run_program

class Teller:
    def write(self, text):
        os.kill(os.getpid(), signal.SIGINT)

    def flush(self):
        pass

    def reconfigure(self, **_):
        pass

def main():
    raise KeyboardInterrupt

sys.stderr = Teller()
run_program(lambda: exit_code("prog", main, "stopped"))
"""
    done = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, cwd=ROOT / "python")
    assert done.returncode == 130 and done.stderr == b""


def test_terminated_while_a_file_is_written(tmp_path):
    """As the cache's while text is tokenized."""
    program = """
import os, pathlib, signal, sys
from needle.command_line import exit_code, run_program
from needle.files import write_whole

def main():
    with write_whole(pathlib.Path(sys.argv[1], "ids")) as file:
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
run_program(lambda: exit_code("prog", main))
"""
    done = subprocess.run([sys.executable, "-c", program, tmp_path], stderr=subprocess.PIPE, cwd=ROOT / "python")
    assert done.returncode == 143 and done.stderr == b"" and not list(tmp_path.iterdir())


def limited(megabytes):
    """Files above a size cannot be written, as on a full disk."""
    resource = pytest.importorskip("resource")
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (megabytes << 20, megabytes << 20))


def test_no_room_for_the_checkpoint(run, text, tmp_path):
    assert run("--max_steps", 1, "--checkpoint_dir", tmp_path).returncode == 0
    before = contents(tmp_path)
    done = outside(*command(text, "--load_checkpoint", tmp_path, "--max_steps", 2), preexec_fn=limited(1))
    assert done.returncode == 2 and "cannot write" in done.stderr and len(done.stderr.strip().splitlines()) == 1
    after = contents(tmp_path)
    assert "no report.html: [files] cannot write" in done.stdout and "max_steps: 2" in after.pop("config-from-step-1.yaml").decode()
    assert after.pop("metrics.jsonl") != before.pop("metrics.jsonl") and after == before


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_run_whose_output_has_no_room_says_so_once(capsys):
    from pythia_app.report import Reporter

    reporter = object.__new__(Reporter)
    reporter._live, reporter.unread = None, False
    with contextlib.suppress(OSError), open("/dev/full", "w") as full, contextlib.redirect_stdout(full):
        reporter.say("step 1")
        reporter.say("step 2")
    assert reporter.unread and capsys.readouterr().err == "stdout cannot be written: No space left on device\n"


def test_a_run_that_goes_on_says_that_other_weights_are_not_loaded(run, tmp_path):
    first, second = (("--checkpoint_dir", tmp_path / name) for name in "ab")
    for folder in (first, second):
        assert run("--max_steps", 1, *folder).returncode == 0
    said = run("--max_steps", 2, *first, "--resume", "--load_checkpoint", second[1]).stderr
    assert said == f"note: --load_checkpoint has no effect: the run in {first[1]} goes on\n"
    assert run("--max_steps", 2, *second, "--resume").stderr == ""


def test_a_disk_without_room_for_a_checkpoint_is_seen_before(main, tmp_path, monkeypatch):
    needed = 3 * 4 * PythiaConfig.named("14m", vocab_size=300).parameter_count()
    full = f"a checkpoint takes 14.50 MiB, and {tmp_path / 'run'} has 14.50 MiB left"
    # The last one is a file system that does not know.
    for total, free, said in ((1 << 40, needed - 1, full), (1 << 40, needed, "unknown data set"), (0, 0, "unknown data set")):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, total=total, free=free: SimpleNamespace(total=total, free=free))
        code, lines = main("--checkpoint_dir", tmp_path / "run", "--dataset", "no such text")
        assert code == 2 and len(lines) == 1 and said in lines[0], lines
    assert list(tmp_path.iterdir()) == []
    assert main("--checkpoint_dir", tmp_path / "run", "--max_steps", 1)[0] == 0  # the file system that does not know
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=1 << 40, free=needed - 1))
    before = contents(tmp_path / "run")
    for flags, code in ((["--max_steps", 1], 0), ([], 0), (["--epochs", "0.001"], 0), (["--max_steps", 2], 2)):
        assert main("--checkpoint_dir", tmp_path / "run", "--resume", *flags)[0] == code
    assert main("--checkpoint_dir", tmp_path / "other", "--load_checkpoint", tmp_path / "run")[1] == [
        f"train_pythia.py: error: [checkpoint_dir] {full.replace('run', 'other')} (more room, or a folder on another disk)"
    ]
    changed = {name for name, content in contents(tmp_path / "run").items() if content != before.get(name)}
    left = tmp_path / "run" / ".step-000002.partial"  # of a process that was killed; the next checkpoint takes its room
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"x")
    assert main("--checkpoint_dir", tmp_path / "run", "--resume", "--max_steps", 2)[0] == 0 and not left.exists()
    assert changed <= {"metrics.jsonl", "report.html", "config-from-step-1.yaml"} and not (tmp_path / "other").exists()


def test_no_room_for_the_tokens(tmp_path):
    path, cache = tmp_path / "long.txt", tmp_path / "cache"
    path.write_text("a bee sees the sea\n" * 100_000)
    environ = {**os.environ, "NEEDLE_CACHE": str(cache)}
    done = outside(*command(path)[:4], "--vocab_size", "260", env=environ, preexec_fn=limited(1))
    assert done.returncode == 2 and "train.bin" in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert {file.name for file in cache.rglob("*") if file.is_file()} == {"tokenizer.json", "tokenizer.json.json"}


def test_a_config_repeats_its_run(run, tmp_path):
    """And going on leaves it as it was."""
    import train_pythia

    first, again = tmp_path / "first", tmp_path / "again"
    flags = ["--sparse", "--max_steps", 3, "--seed", 4, "--betas", 0.8, 0.9, "--weight_decay", 0.5, "--warmup_steps", 2]
    assert run(*flags, "--checkpoint_dir", first).returncode == 0
    assert train_pythia.main(["--config", str(first / "config.yaml"), "--checkpoint_dir", str(again)]) == 0
    assert losses(again) == losses(first) and contents(again)["config.yaml"] == contents(first)["config.yaml"]
    before = contents(first)["config.yaml"]
    assert run("--resume", "--checkpoint_dir", first).returncode == 0
    assert "config-from-step-3.yaml" not in contents(first)
    assert run("--resume", "--checkpoint_dir", first, "--max_steps", 4, "--lr", "1e-4").returncode == 0
    after = contents(first)
    assert after["config.yaml"] == before and b"lr: 0.0001\n" in after["config-from-step-3.yaml"]


def test_what_is_measured_as_it_runs(text, tmp_path):
    """Samples and evaluations in between change nothing of what a step takes."""
    shape = ("--sparse", "--batch_size", 2, "--max_steps", 4)
    plan = outside(*command(text, *shape, "--plan"))
    peak = int(re.search(r"\(([\d,]+) bytes\)", plan.stdout)[1].replace(",", ""))
    done = outside(*command(text, *shape, "--save_every", 1, "--memory_limit", peak, "--checkpoint_dir", tmp_path))
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    where = options.device("auto")
    known = where.name != "cuda" or published(where.device_properties()["name"], "fp32")[0] > 0
    assert [row["peak_bytes"] for row in steps[1:]] == [peak] * 3
    for row in steps:
        assert row["grad_norm"] > 0 and row["lr"] > 0 and row["tokens_per_second"] > 0
        assert row["mfu"] > 0 if known else "mfu" not in row
        assert sum(row["peak_by_category"].values()) == row["peak_bytes"] > row["live_bytes"]
    samples = [row for row in rows if "sample" in row]
    assert [row["step"] for row in samples] == [row["step"] for row in rows if "held_out_loss" in row] == [1, 2, 3, 4]
    assert samples[-1]["prompt"] + samples[-1]["sample"] in done.stdout and len({row["prompt"] for row in samples}) == 1


def test_figures_of_time_are_of_the_steps_since_the_run_went_on(run, tmp_path, monkeypatch):
    """On a clock on which ten seconds pass from one look to the next: two looks in a step."""
    import train_pythia

    flags, left, seeds = ("--seed", 7, "--checkpoint_dir", tmp_path, "--max_steps"), [], []
    step, generate = Reporter.step, Pythia.generate
    monkeypatch.setattr(Reporter, "step", lambda self, row, seconds: left.append(seconds) or step(self, row, seconds))
    monkeypatch.setattr(Pythia, "generate", lambda self, ids, config: seeds.append(config.seed) or generate(self, ids, config))
    assert run(*flags, 2).returncode == 0
    left.clear()
    clock = itertools.count(1000, 10)
    for module in (loop, train_pythia):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(train_pythia, "peak_flops", lambda device, precision: (1e9, precision))
    done = run("--resume", *flags, 5)
    assert done.returncode == 0 and "\n384 tokens in 1:10, 5 tokens/s with evaluation; peak memory " in done.stdout
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["step"] > 2 and "loss" in row]
    assert [row["tokens_per_second"] for row in rows] == [12.8] * 3
    used = 12.8 * PythiaConfig.named("14m", vocab_size=300).flops_per_token(64) / 1e9
    assert [row["mfu"] for row in rows] == pytest.approx([used] * 3, rel=1e-12)
    assert ", of fp32<" in (tmp_path / "report.html").read_text()
    assert left == [40, 20, 0] and seeds == [7, 7]


def test_what_a_step_leaves_behind_is_said(run, tmp_path, monkeypatch):
    kept, train_step = [], Trainer.train_step
    monkeypatch.setattr(Trainer, "train_step", lambda self: kept.append(self.model.embed_out * 2) or train_step(self))
    done = run("--max_steps", 3, "--checkpoint_dir", tmp_path)
    assert done.returncode == 0 and "`kept` (test_train_app.py:" in done.stdout and "keeps the graph of 1 step" in done.stdout


def test_tensorboard_reads_the_events(run, tmp_path, monkeypatch):
    """With those of a run that was resumed, be it in the same second, and none of the steps that were lost."""
    event_file_writer = pytest.importorskip("tensorboardX.event_file_writer")
    monkeypatch.setattr(event_file_writer, "time", SimpleNamespace(time=lambda: 1.7e9))
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    flags = ("--tensorboard", "--checkpoint_dir", tmp_path)
    assert run(*flags, "--max_steps", 4, "--save_every", 2).returncode == 0
    shutil.rmtree(tmp_path / "step-000004")  # a run that was killed just before
    (tmp_path / "checkpoints.json").unlink()
    assert run(*flags, "--load_checkpoint", tmp_path / "step-000002", "--max_steps", 5).returncode == 0
    events = reader.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for name in ("loss", "lr", "grad_norm", "tokens_per_second", "peak_bytes", "held_out_loss"):
        expected = [(row["step"], pytest.approx(row[name])) for row in rows if name in row]
        assert [(event.step, event.value) for event in events.Scalars(name)] == expected, name
        assert all(event.wall_time > 1e9 for event in events.Scalars(name))
    assert [event.step for event in events.Scalars("peak_bytes/activation")] == [1, 2, 3, 4, 5]
    assert {2, 5} <= {event.step for event in events.Tensors("sample/text_summary")}  # this reader purges scalars alone


def test_events_come_as_the_run_goes_and_none_of_what_is_no_number(tmp_path, monkeypatch):
    pytest.importorskip("tensorboardX")
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    clock = SimpleNamespace(time=time.time, time_ns=time.time_ns, monotonic=lambda: 100.0)
    monkeypatch.setattr(events_module, "time", clock)
    events = events_module.Events(tmp_path, 0)
    for step, now, seen in ((1, 100.0, 1), (2, 105.0, 1), (3, 111.0, 3)):
        clock.monotonic = lambda now=now: now
        events.add({"step": step, "loss": 2.0, "grad_norm": None})
        found = reader.EventAccumulator(str(tmp_path)).Reload()
        assert found.Tags()["scalars"] == ["loss"] and len(found.Scalars("loss")) == seen
    events.close()


def test_events_are_on_the_disk_before_the_checkpoint_of_their_steps(run, tmp_path, monkeypatch):
    """A run that is killed after it goes on from there, and makes no event of them again."""
    pytest.importorskip("tensorboardX")
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from pythia_app import checkpoint

    save, found = checkpoint.save, []

    def look(*arguments):
        events = reader.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
        found.append([event.step for event in events.Scalars("loss")])
        return save(*arguments)

    monkeypatch.setattr(checkpoint, "save", look)
    assert run("--tensorboard", "--checkpoint_dir", tmp_path, "--max_steps", 5, "--save_every", 2).returncode == 0
    assert found == [[1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 5]]


def test_events_of_an_evaluation_are_on_the_disk_before_its_row(run, tmp_path, monkeypatch):
    """A run that goes on after it finds the row, and makes no event of it again."""
    pytest.importorskip("tensorboardX")
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from pythia_app import report

    found = []

    def look(row):
        if "held_out_loss" in row or "sample" in row:
            tags = reader.EventAccumulator(str(tmp_path / "tensorboard")).Reload().Tags()
            found.append(
                "held_out_loss" in tags["scalars"] if "held_out_loss" in row else any("sample" in tag for tag in tags["tensors"])
            )
        return dumps(row)

    dumps = json.dumps
    monkeypatch.setattr(report, "json", SimpleNamespace(dumps=look))
    assert run("--tensorboard", "--checkpoint_dir", tmp_path, "--max_steps", 2, "--save_every", 2).returncode == 0
    assert found == [True, True]


def test_no_room_for_the_events(main, tmp_path, monkeypatch):
    """One line, where tensorboardX's own writer would wait for ever."""
    record_writer = pytest.importorskip("tensorboardX.record_writer")

    def full(self):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    flags = ("--tensorboard", "--max_steps", 40, "--save_every", 2, "--checkpoint_dir", tmp_path)
    monkeypatch.setattr(record_writer.RecordWriter, "flush", full)
    code, lines = main(*flags)
    assert code == 2 and len(lines) == 1 and f"cannot write {tmp_path}/tensorboard: No space left" in lines[0]


def test_tensorboard_without_its_package(main, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "tensorboardX" else find(name, *more))
    code, lines = main("--tensorboard")
    assert code == 2 and len(lines) == 1 and "pip install tensorboardX" in lines[0]


def test_without_the_package_of_config_yaml(main, tmp_path, monkeypatch):
    """Said before the run has a folder."""
    monkeypatch.setitem(sys.modules, "yaml", None)
    code, lines = main("--checkpoint_dir", tmp_path / "run")
    assert code == 2 and len(lines) == 1 and "pip install PyYAML" in lines[0]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("app", ["train_pythia.py --plan", "generate.py --model none", "evaluate.py --model none --text none"])
def test_the_apps_are_not_for_the_backend_of_homework(app):
    name, *flags = app.split()
    done = outside(sys.executable, f"apps/{name}", *flags, env={**os.environ, "NEEDLE_BACKEND": "np"})
    assert done.returncode == 2 and done.stderr.startswith(f"{name}: error: [NEEDLE_BACKEND] is np"), done.stderr


def test_the_plan_is_what_the_run_takes(text, tmp_path):
    """To the byte, with nothing made by planning; a limit of just that much is kept, and one byte less is refused at once."""
    shape = ("--sparse", "--batch_size", 2, "--accumulation_steps", 3)
    done = outside(*command(text, *shape, "--plan", "--checkpoint_dir", tmp_path / "plan"))
    assert done.returncode == 0 and not (tmp_path / "plan").exists(), done.stderr
    assert f"fits: {options.device('auto')} has" in done.stdout and "layers.5" in done.stdout
    peak = int(re.search(r"\(([\d,]+) bytes\)", done.stdout)[1].replace(",", ""))
    done = outside(*command(text, *shape, "--max_steps", 3, "--memory_limit", peak, "--checkpoint_dir", tmp_path / "run"))
    assert done.returncode == 0 and f"planned peak memory {peak / 2**20:,.0f} MiB" in done.stdout, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(row.get("peak_bytes", 0) for row in rows) == peak
    assert f"with evaluation; peak memory {peak / 2**20:,.0f} MiB" in done.stdout
    done = outside(*command(text, *shape, "--max_steps", 3, "--memory_limit", peak - 1, "--checkpoint_dir", tmp_path / "less"))
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"[memory_limit] the step needs {peak:,} bytes at its peak (planned); the limit is {peak - 1:,} bytes;" in done.stderr
    assert "what fits: --" in done.stderr
    done = outside(*command(text, *shape, "--plan", "--memory_limit", "1000000GiB"))  # which nobody has
    assert done.returncode == 0 and f"fits: {options.device('auto')} has" in done.stdout


def test_the_command_that_goes_on_is_for_the_current_folder(tmp_path, monkeypatch):
    assert pythia_app.command() == "python apps/train_pythia.py"
    monkeypatch.chdir(tmp_path)
    _, app, *rest = shlex.split(pythia_app.command("--load_checkpoint", "a b"))
    assert Path(app).samefile(ROOT / "apps" / "train_pythia.py") and rest == ["--load_checkpoint", "a b"]
    os.rmdir(tmp_path)
    assert shlex.split(pythia_app.command()) == ["python", str((ROOT / "apps" / "train_pythia.py").resolve())]
