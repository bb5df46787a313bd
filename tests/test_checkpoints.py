"""What a run survives: kills at any moment, a full disk, damage; and that it then goes on bit for bit."""

import contextlib
import errno
import io
import itertools
import json
import os
import random
import select
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
import tracemalloc
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import needle as ndl
from devices import usable
from needle import amp, files, nn
from needle.backend_ndarray.host_memory import OPTIMIZER_STATE
from needle.checkpoints import CheckpointFolder, random_state, read_folder, read_tensors, set_random_state, verify, write_tensors
from needle.checkpoints import folder as checkpoint_folder
from needle.data.text import TextData
from needle.errors import CheckpointError
from needle.models import GenerationConfig, Pythia, PythiaConfig, load_published
from needle.optim import SGD, Adam, AdamW
from pythia_app import checkpoint
from pythia_app import trainer as trainer_module
from pythia_app.options import CHANGEABLE, FIXED, parse
from pythia_app.trainer import Trainer

ROOT = Path(__file__).parent.parent


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write(value):
    """What a run would write: one file that says ``value``."""
    return lambda path: (path / "value").write_text(str(value))


def value(path):
    return int((path / "value").read_text())


# ---- going on bit for bit


CONFIG = PythiaConfig(
    layers=1, width=16, heads=2, feed_forward=32, vocab_size=40, max_seq_len=8, dropout=0.2, checkpoint_layers=(1,)
)  # fmt: skip


@pytest.fixture
def trainer():
    return make_trainer()


TOKENS = np.random.default_rng(0).integers(0, 40, 400).astype(np.uint16)
TEXT = TextData("toy", TOKENS[:300], TOKENS[300:], 40, None, None)


def make_trainer(*flags):
    """Makes the app's own, with a model that takes milliseconds."""
    sizes = ["--batch_size", "2", "--seq_len", "8", "--accumulation_steps", "2", "--vocab_size", "40"]
    options = parse(["--max_steps", "100", *sizes, *flags])
    return lambda device, weights=None: Trainer(options, CONFIG, TEXT, device, weights)


def load(path, model, optimizer):
    load_published(model, read_folder(path))
    checkpoint.load_optimizer(path, model, optimizer)


def resumed(made, path):
    np.random.seed(99)  # what another process has drawn
    load(path, made.model, made.optimizer)
    made.load_state(checkpoint.read_state(path))
    return made


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", ["cpu_numpy", "cpu", "cuda_sim", "cuda"])
def test_50_and_50_steps_are_100(name, precision, tmp_path):
    """With accumulation, dropout, recomputed layers, text that begins again, and in float16 a scale that grows every 30 steps."""
    device = usable(name)
    if name == "cuda":
        pytest.importorskip("safetensors")  # gpu-check works with what the machine has
    made = make_trainer("--precision", precision)

    def trainer(device):
        run = made(device)
        run.scaler.growth_interval = 30
        return run

    np.random.seed(1)
    whole = trainer(device)
    expected = [whole.train_step() for _ in range(100)]
    drawn = np.random.rand(3)
    np.random.seed(1)
    first = trainer(device)
    found = [first.train_step() for _ in range(50)]
    path = checkpoint.save(CheckpointFolder(tmp_path), first.model, first.optimizer, first.state())
    del first
    second = resumed(trainer(device), path)
    assert second.step == 50 and second.batches.source.epoch > 5
    found += [second.train_step() for _ in range(50)]
    losses = [step.loss for step in found]
    assert found == expected and sum(losses[-20:]) < sum(losses[:20])
    for (name, p), q in zip(whole.model.named_parameters(), second.model.parameters()):
        assert p.numpy().tobytes() == q.numpy().tobytes(), name
        for kept, also in ((whole.optimizer.m, second.optimizer.m), (whole.optimizer.v, second.optimizer.v)):
            assert kept[p].numpy().tobytes() == also[q].numpy().tobytes(), name
    np.testing.assert_array_equal(np.random.rand(3), drawn)
    assert second.metrics["tokens"] == whole.metrics["tokens"] == 100 * 2 * 2 * 8
    scale = 2.0 ** (12 + 3) if precision == "fp16" else 1
    assert second.scaler.get_scale() == whole.scaler.get_scale() == scale and whole.scaler.skipped_steps == 0


def test_the_seconds_of_a_run_are_those_of_all_its_steps(trainer, cpu, monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(trainer_module, "time", types.SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    first, second = trainer(cpu), trainer(cpu)
    for _ in range(3):
        first.train_step()
    second.load_state(first.state())
    second.train_step()
    assert (first.metrics["seconds"], second.metrics["seconds"]) == (3, 4)


def test_a_run_that_goes_on_has_its_steps_unless_others_are_asked_for(trainer, cpu):
    state = trainer(cpu).state()
    for steps, epochs, expected in ((None, None, 100), (7, None, 7), (None, 2.0, 7)):
        run = trainer(cpu)
        run.options.max_steps, run.options.epochs, run.steps = steps, epochs, 7
        run.load_state(state)
        assert run.steps == expected


def test_the_end_of_a_text_that_weights_were_trained_on_is_not_that_of_the_run(trainer, tmp_path, cpu):
    """config.json has the id that the tokenizer of these weights ends a text with; another's id may be any word."""
    Pythia(CONFIG).save_pretrained(tmp_path)
    assert Pythia.from_pretrained(tmp_path).generation_config.eos_token_id == 0
    assert trainer(cpu, tmp_path).model.generation_config == GenerationConfig()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_held_out_loss_is_of_the_precision_that_is_trained_in(cpu, precision):
    run = make_trainer("--precision", precision)(cpu)
    run.options.batch_size = 5  # of 12 sequences: the last batch has two
    found, said = run.held_out_loss(TEXT), {}
    assert run.model.training and run.model.dropout.drawn == 0
    ids, targets = (
        ndl.Tensor(TEXT.held_out[i : i + 96].reshape(12, 8), device=cpu, dtype="int32", requires_grad=False) for i in (0, 1)
    )
    run.model.eval()
    for each in ("fp32", "bf16", "fp16"):
        with amp.autocast.named(each, cpu):
            said[each] = run.model.loss(ids, targets).item()
    assert min(said, key=lambda each: abs(said[each] - found)) == precision and found == pytest.approx(said[precision], rel=1e-6)


def test_a_checkpoint_is_a_model_that_loads(trainer, tmp_path, cpu):
    run = trainer(cpu)
    run.train_step()
    path = checkpoint.save(CheckpointFolder(tmp_path), run.model, run.optimizer, run.state())
    again = Pythia.from_pretrained(path)
    assert replace(again.config, checkpoint_layers=run.model.config.checkpoint_layers) == run.model.config
    again.eval(), run.model.eval()
    ids = ndl.Tensor([[1, 2, 3]], dtype="int32", requires_grad=False)
    np.testing.assert_array_equal(again(ids).numpy(), run.model(ids).numpy())


def test_flags_that_an_older_checkpoint_does_not_know(trainer, tmp_path, cpu):
    """They have their defaults, but for what makes the model."""
    state = {**trainer(cpu).state(), "optimizer_steps": 0}
    state["options"] = {name: state["options"][name] for name in FIXED}
    (tmp_path / checkpoint.STATE).write_text(json.dumps(state))
    options = parse([], checkpoint.read_state(tmp_path)["options"])
    assert options.seq_len == 8 and options.betas == [0.9, 0.95] and options.lr == 1e-3
    del state["options"]["seq_len"]
    state["options"]["vocab_size"] = None
    (tmp_path / checkpoint.STATE).write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match=r"state.json lacks seq_len, vocab_size"):
        checkpoint.read_state(tmp_path)


def test_resuming_takes_no_more_memory_than_running(trainer, tmp_path, cpu):
    """And every array is what it was: moments count as optimizer state."""
    run = trainer(cpu)
    run.train_step()
    path = checkpoint.save(CheckpointFolder(tmp_path), run.model, run.optimizer, run.state())
    before = cpu.memory_stats()
    again = resumed(trainer(cpu), path)
    after = cpu.memory_stats()
    size = sum(p.realize_cached_data().nbytes for p in again.model.parameters())
    grown = [b - a for a, b in zip(before["by_category"], after["by_category"])]
    assert grown[1] == size and grown[3] == 2 * size and sum(grown) == 3 * size


def test_a_file_that_takes_a_part_of_what_it_is_given_gets_the_rest(tmp_path, monkeypatch):
    """As the system may have it where a disk is nearly full, or a write is interrupted."""

    class Reluctant(io.FileIO):
        def write(self, content):
            return super().write(memoryview(content)[:1000])

    monkeypatch.setattr("needle.checkpoints.tensors.open", lambda path, mode, buffering: Reluctant(path, "x"), raising=False)
    values = np.arange(5000.0)
    write_tensors(tmp_path / "file", {"values": values})
    monkeypatch.undo()
    np.testing.assert_array_equal(read_tensors(tmp_path / "file")["values"], values)


def test_tensors_are_written_as_they_are(tmp_path, cpu):
    layer = nn.Linear(3, 2, device=cpu)
    ndl.checkpoints.write_tensors(tmp_path / "layer", dict(layer.named_parameters()))
    ndl.checkpoints.write_folder(tmp_path, dict(layer.named_parameters()), max_shard_bytes=8)
    for found in (ndl.checkpoints.read_tensors(tmp_path / "layer"), read_folder(tmp_path)):
        np.testing.assert_array_equal(found["weight"], layer.weight.numpy())
        np.testing.assert_array_equal(found["bias"], layer.bias.numpy())
    with pytest.raises(FileExistsError):
        ndl.checkpoints.write_tensors(tmp_path / "layer", {})


@pytest.mark.parametrize("sizes", [(1000, 8), (8, 1000), (8, 8)], ids=str)
def test_a_folder_has_one_model(tmp_path, sizes):
    for value, size in enumerate(sizes):
        with contextlib.nullcontext() if value == 0 else pytest.raises(FileExistsError):
            ndl.checkpoints.write_folder(tmp_path, {name: np.full(2, value) for name in "ab"}, size)
        assert all((values == 0).all() for values in read_folder(tmp_path).values())


@pytest.mark.parametrize(("most", "files"), [(48, 1), (47, 2), (32, 2), (31, 3), (1, 3)])
def test_as_many_tensors_as_fit_are_in_a_file(tmp_path, most, files):
    tensors = {name: np.full(4, value, "float32") for value, name in enumerate("abc")}  # of 16 bytes each
    ndl.checkpoints.write_folder(tmp_path, tensors, most)
    assert len(list(tmp_path.glob("*.safetensors"))) == files
    np.testing.assert_equal(read_folder(tmp_path), tensors)
    if files > 1:
        assert json.loads((tmp_path / "model.safetensors.index.json").read_text())["metadata"]["total_size"] == 48


@pytest.mark.parametrize("dtype", [">f4", ">f8", ">f2", ">i4", ">i8"])
def test_bytes_in_another_order_are_the_same_numbers(tmp_path, dtype):
    values = np.arange(6).astype(dtype).reshape(2, 3)
    write_tensors(tmp_path / "file", {"values": values, "turned": values.T})
    found = read_tensors(tmp_path / "file")
    np.testing.assert_array_equal(found["values"], values)
    np.testing.assert_array_equal(found["turned"], values.T)


def test_no_array_is_copied_as_a_whole(tmp_path, cpu):
    weight = ndl.ones(4096, 1024, device=cpu)  # 16 MiB
    tracemalloc.start()
    write_tensors(tmp_path / "file", {"weight": weight})
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


def test_what_is_no_array_is_not_written(tmp_path):
    for wrong in (0.1, [1, 2], None):
        with pytest.raises(TypeError, match=r"\[write_tensors\] lr is of type"):
            ndl.checkpoints.write_tensors(tmp_path / "run", {"weight": np.ones(2), "lr": wrong})
    for name in ("__metadata__", "\ud800", 1):
        with pytest.raises(CheckpointError, match=r"\[write_tensors\] a name is .* \(accepted: text other than __metadata__\)"):
            write_tensors(tmp_path / "run", {name: np.ones(2)})
    with pytest.raises(CheckpointError, match=r"\[write_tensors\] the names of 50000 arrays take \d+ bytes \(4194304 at most\)"):
        write_tensors(tmp_path / "run", {f"layers.{i}.weight": np.ones(1) for i in range(50_000)})
    assert not (tmp_path / "run").exists()
    assert not list(tmp_path.iterdir())


def test_random_numbers_go_on():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.SeededDropout(0.5, seed=1), [nn.SeededDropout(0.5, seed=2)]

        def forward(self, x):
            return self.b[0](self.a(x)) + nn.Dropout(0.5)(x)

    x = ndl.ones(3, 5, requires_grad=False)
    model = Two()
    model(x)
    state = json.loads(json.dumps(random_state(model)))
    expected = [model(x).numpy() for _ in range(3)]
    assert not np.array_equal(expected[0], expected[1])
    other = Two()
    set_random_state(other, state)
    np.testing.assert_array_equal([other(x).numpy() for _ in range(3)], expected)
    np.random.randn(3)  # which are drawn two at a time, so that one waits
    state = json.loads(json.dumps(random_state(model)))
    expected = np.random.randn(4)
    set_random_state(other, state)
    np.testing.assert_array_equal(np.random.randn(4), expected)
    model.eval()
    np.testing.assert_array_equal(model.a(x).numpy(), x.numpy())
    beyond = {**state["numpy"], "state": {**state["numpy"]["state"], "pos": 625}}  # of 624 numbers
    for wrong in (
        {}, {**state, "drawn": [1]}, {**state, "drawn": ["a", 1]}, {**state, "drawn": [-1, 1]}, {**state, "numpy": beyond},
        {**state, "numpy": {"bit_generator": "MT19937"}},
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match=r"\[random_state\]"):
            set_random_state(other, wrong)
    np.random.seed(0)  # of all its numbers none is left or used
    set_random_state(other, random_state(model))


# ---- which checkpoints are kept


def test_the_last_k_and_the_best_are_kept(tmp_path):
    folder = CheckpointFolder(tmp_path, keep_last=3)
    assert folder.newest() is None and folder.best() is None and folder.names() == []
    losses = [5.0, 3.0, 4.0, 4.5, 3.5, 6.0, 3.25, 7.0, 2.0]  # the last takes the place of a best that is none of the newest
    for step, loss in enumerate(losses):
        saved = folder.save(step, write(step))
        assert folder.newest() == (saved, [])
        assert folder.held_out_loss(saved) is None
        folder.mark(saved, loss)
        assert folder.held_out_loss(saved) == loss
        best = losses.index(min(losses[: step + 1]))
        kept = sorted({best} | set(range(max(0, step - 2), step + 1)))
        assert sorted(value(path) for path in tmp_path.glob("step-*")) == kept
        assert value(folder.best()) == best and [value(tmp_path / name) for name in folder.names()] == kept
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {"checkpoints.json"}


def test_two_are_kept_where_no_number_is_given(tmp_path):
    folder = CheckpointFolder(tmp_path)
    for step in range(4):
        folder.save(step, write(step))
    assert folder.names() == ["step-000002", "step-000003"]


def test_losses_that_are_no_float(tmp_path):
    folder = CheckpointFolder(tmp_path)
    saved = folder.save(0, write(0))
    for loss in (3, np.float32(2.5), np.array(2)):
        folder.mark(saved, loss)
        assert folder.held_out_loss(saved) == float(loss) and folder.newest() == (saved, [])
    with pytest.raises(ValueError, match=r"\[checkpoint\] held_out_loss is nan \(accepted: a finite number\)"):
        folder.mark(saved, float("nan"))
    with pytest.raises(ValueError, match="step is -1"):
        folder.save(-1, write(0))
    assert folder.newest() == (saved, []) and folder.best() == saved


def test_the_same_step_twice_and_an_older_one_later(tmp_path):
    folder = CheckpointFolder(tmp_path, keep_last=2)
    folder.save(7, write(1))
    assert folder.save(7, write(2)).name == "step-000007-2"
    assert folder.save(5, write(3)).name == "step-000005" and folder.names() == ["step-000007-2", "step-000005"]
    assert value(folder.newest()[0]) == 3
    (tmp_path / "checkpoints.json").unlink()
    assert folder.names() == ["step-000005", "step-000007-2"]  # by their names
    (tmp_path / "step-000009").mkdir()  # whose files are gone
    assert folder.names() == ["step-000005", "step-000007-2"]
    folder.save(8, write(4))
    assert [value(tmp_path / name) for name in folder.names()] == [2, 4]
    assert value(tmp_path / "step-000005") == 3  # an index that is new does not know the best: nothing is removed
    many = CheckpointFolder(tmp_path / "many", keep_last=20)
    for step in (1_000_000, *[7] * 10, 999_999):
        many.save(step, write(step))
    (many.path / "checkpoints.json").unlink()
    sevens = ["step-000007", *(f"step-000007-{n}" for n in range(2, 11))]
    assert many.names() == [*sevens, "step-999999", "step-1000000"]
    with pytest.raises(CheckpointError, match="keep_last"):
        CheckpointFolder(tmp_path, keep_last=0)


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name_and_the_index_names_it(tmp_path, monkeypatch):
    done, flush, replace = [], files.flush, os.replace
    monkeypatch.setattr(files, "flush", lambda path: (done.append(path.name), flush(path)))
    monkeypatch.setattr(os, "replace", lambda old, new: (done.append(f"-> {new.name}"), replace(old, new)))
    saved = CheckpointFolder(tmp_path / "run").save(1, lambda path: (write(1)(path), (path / "empty").touch()))
    sealed = ["-> checksums.json", ".step-000001.partial", "-> step-000001", "run", "-> checkpoints.json", "run"]
    assert sorted(done[:-6]) == ["empty", "value"] and done[-6:] == sealed
    verify(saved)


def test_a_checkpoint_takes_the_place_of_one_that_was_removed(tmp_path):
    folder = CheckpointFolder(tmp_path, keep_last=2)
    for step in (1, 2):
        folder.save(step, write(step))
    shutil.rmtree(tmp_path / "step-000002")
    folder.save(2, write(3))
    assert [value(tmp_path / name) for name in folder.names()] == [1, 3]


# ---- damage


@pytest.fixture
def two(tmp_path):
    """A folder with two checkpoints."""
    folder = CheckpointFolder(tmp_path)
    folder.save(1, write(111111))
    folder.save(2, write(222222))
    return folder


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: flip(path / "value"),
        lambda path: flip(path / "checksums.json"),
        lambda path: (path / "value").unlink(),
        lambda path: os.truncate(path / "value", 3),
        lambda path: os.truncate(path / "value", 0),
        lambda path: os.truncate(path / "checksums.json", 0),
        lambda path: (path / "checksums.json").unlink(),
        shutil.rmtree,
    ],
)
def test_the_newest_is_damaged(two, damage):
    damage(two.path / "step-000002")
    found, problems = two.newest()
    assert value(found) == 111111
    assert len(problems) == 1 and "step-000002" in problems[0] and "\n" not in problems[0]
    damage(two.path / "step-000001")
    with pytest.raises(CheckpointError, match="step-000002"):
        two.newest()


def test_a_damaged_one_takes_no_place_of_a_whole_one(two):
    """Neither among the newest nor as the best, once the run has gone on from the one before it."""
    two.mark(two.path / "step-000002", 0.5)
    flip(two.path / "step-000002" / "value")
    folder = CheckpointFolder(two.path, keep_last=2)
    folder.go_on_from(two.path / "step-000009")  # which the index does not name
    folder.go_on_from(folder.newest()[0])
    assert folder.names() == ["step-000001", "step-000002"]  # until there is another
    folder.save(3, write(333333))
    assert folder.names() == ["step-000001", "step-000003"] and folder.best() is None
    assert not (two.path / "step-000002").exists()
    folder.go_on_from(two.path / "step-000001")  # of one's own will: those after it are whole, and stay
    folder.save(2, write(222222))
    assert folder.names() == ["step-000003", "step-000002"]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "\0", '{"checkpoints": 3}', '{"checkpoints": [{"name": "../x", "held_out_loss": null}]}',
     '{"checkpoints": [{"name": "step-000001", "held_out_loss": "3"}]}', '{"checkpoints": [{"name": "step-000001", "held_out_loss": 1e400}]}',
     '{"checkpoints": [{"name": 1, "held_out_loss": null}]}', '{"checkpoints": ["step-000001"]}',
     '{"checkpoints": [{"name": "step-000001"}]}', "[" * 9999],
)  # fmt: skip
def test_a_damaged_index(two, text):
    (two.path / "checkpoints.json").write_text(text)
    for use in (two.newest, two.best, lambda: two.save(3, write(3))):
        with pytest.raises(CheckpointError, match=r"checkpoints\.json.*remove it"):
            use()
    assert value(two.path / "step-000001") == 111111 and value(two.path / "step-000002") == 222222
    (two.path / "checkpoints.json").unlink()
    assert value(two.newest()[0]) == 222222


def test_a_small_file_has_as_many_bytes_as_it_may(tmp_path):
    (tmp_path / "file").write_bytes(b"1234")
    assert files.read_small(tmp_path / "file", limit=4) == b"1234"
    with pytest.raises(ValueError, match="larger than 3 bytes"):
        files.read_small(tmp_path / "file", limit=3)


def test_pipes_that_nobody_writes_into(two):
    """None is waited for."""

    def pipe_instead_of(path):
        path.unlink()
        os.mkfifo(path)

    pipe_instead_of(two.path / "step-000002" / "value")
    with pytest.raises(CheckpointError, match=r"value.*no file"):
        read_tensors(two.path / "step-000002" / "value")
    pipe_instead_of(two.path / "step-000002" / "checksums.json")
    found, problems = two.newest()
    assert value(found) == 111111 and "no file" in problems[0]
    pipe_instead_of(two.path / "checkpoints.json")
    with pytest.raises(CheckpointError, match=r"checkpoints\.json: no file \(remove it"):
        two.newest()


@pytest.mark.parametrize("error", [PermissionError(errno.EACCES, "no"), OSError(errno.EIO, "no")])
def test_one_that_cannot_be_read_may_be_whole(two, monkeypatch, error):
    error.filename = str(two.path / "step-000002" / "value")
    checksum = checkpoint_folder._checksum

    def refused(path):
        if str(path) == error.filename:
            raise error
        return checksum(path)

    monkeypatch.setattr(checkpoint_folder, "_checksum", refused)
    found, problems = two.newest()
    assert value(found) == 111111 and problems == [f"[checkpoint] cannot read {error.filename}: no"]
    two.go_on_from(found)
    two.save(2, write(3))
    assert two.names() == ["step-000002", "step-000002-2"] and value(two.path / "step-000002") == 222222


def _link(path):
    path.symlink_to(path.name if path.name == "step-000003" else "/nonexistent")


@pytest.mark.parametrize("make", [_link, os.mkfifo, Path.touch])
def test_what_has_a_checkpoints_name_and_is_none(two, make):
    """It's left alone, and nothing waits for it."""
    for name in ("step-000001-2", "step-000003", "step-000004"):
        make(two.path / name)
    assert two.save(3, write(333333)).name == "step-000003-2"
    assert two.save(4, write(444444)).name == "step-000004-2"
    assert two.names() == ["step-000003-2", "step-000004-2"] and value(two.newest()[0]) == 444444
    assert all(os.path.lexists(two.path / name) for name in ("step-000001-2", "step-000003", "step-000004"))
    assert not (two.path / "step-000001").exists()


def test_a_loss_of_a_checkpoint_that_is_gone(tmp_path):
    folder = CheckpointFolder(tmp_path, keep_last=2)
    first, *_ = [folder.save(step, write(step)) for step in (1, 2, 3)]
    with pytest.raises(CheckpointError, match=r"step-000001 is not in .* \(accepted: step-000002, step-000003\)"):
        folder.mark(first, 0.5)


def test_a_checkpoint_is_some_files_and_no_folders(tmp_path):
    folder = CheckpointFolder(tmp_path, keep_last=1)
    first = folder.save(1, write(1))
    for wrong, said in ((lambda path: (path / "model").mkdir(), "model is a folder"), (lambda path: None, "nothing was written")):
        with pytest.raises(CheckpointError, match=rf"\[checkpoint\] {said} \(accepted: files"):
            folder.save(2, wrong)
        assert folder.newest() == (first, []) and sorted(os.listdir(tmp_path)) == ["checkpoints.json", first.name]


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(CheckpointError, match=r"no weights in .*nowhere: nothing that holds any"):
        read_folder(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    for path in (tmp_path / "nowhere", tmp_path / "file"):
        assert CheckpointFolder(path).newest() is None
        with pytest.raises(CheckpointError, match=r"no checkpoint in .*: checksums\.json is missing"):
            verify(path)


def test_checksums_do_not_lead_out(two):
    (two.path.parent / "outside").write_text("")
    for name in ("../../outside", "/etc/passwd", ".."):
        (two.path / "step-000002" / "checksums.json").write_text(json.dumps({name: {"bytes": 0, "crc32": "00000000"}}))
        with pytest.raises(CheckpointError, match="leads out"):
            verify(two.path / "step-000002")


@pytest.fixture
def small_run(tmp_path):
    """A tiny model with a checkpoint of its first step: (folder, model, optimizer, state)."""
    config = PythiaConfig(layers=1, width=16, heads=2, feed_forward=32, vocab_size=20, max_seq_len=16)
    model = Pythia(config, seed=0)
    optimizer = AdamW(model.parameter_groups(), lr=0.1)
    model.loss(*(ndl.Tensor([[1, 2, 3]], dtype="int32", requires_grad=False) for _ in range(2))).backward()
    optimizer.step()
    state = {"step": 1, "steps": 2, "data": {}, "options": dict.fromkeys(CHANGEABLE + FIXED, 1), "scaler": None, "metrics": {}}
    state["random"] = random_state(model)
    checkpoint.save(CheckpointFolder(tmp_path / "run", 1), model, optimizer, state)
    return tmp_path / "run", model, optimizer, state


def test_threads_that_save_into_one_folder_wait_for_each_other(tmp_path):
    begun = threading.Barrier(2)

    def save(step):
        def write(path):
            time.sleep(0.01)
            write_tensors(path / "m.safetensors", {"a": np.ones(10)})

        begun.wait()
        made.append(CheckpointFolder(tmp_path, keep_last=10).save(step, write))

    for turn in range(5):
        made = []
        threads = [threading.Thread(target=save, args=(2 * turn + i,)) for i in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for path in made:
            verify(path)
    assert len(made) == 2 and len(CheckpointFolder(tmp_path).names()) == 10


def test_damaged_checkpoints_of_a_run(small_run):
    folder, model, optimizer, _ = small_run
    good = folder / "step-000001"
    whole = contents(good)
    assert set(whole) == {"checksums.json", "config.json", "model.safetensors", "optimizer.safetensors", "state.json"}
    for name, content in whole.items():
        for damaged in (None, b"", content[: len(content) // 2], content[:-1], b"\xff" * 40, b"{}"):
            (good / name).unlink() if damaged is None else (good / name).write_bytes(damaged)
            with pytest.raises(CheckpointError, match=name.split(".")[0]):
                checkpoint.find(folder)
        (good / name).write_bytes(content)
    assert checkpoint.find(folder) == checkpoint.find(good) == (good, [], ["step-000001"])
    alone = good.rename(folder / "best")  # a run that goes on from it is another
    assert checkpoint.find(alone)[:2] == (alone, []) and checkpoint.run_of(good) == folder and checkpoint.run_of(alone) is None


@pytest.mark.parametrize(
    "name, change, said",
    [
        ("state.json", lambda c: json.dumps({**json.loads(c), "optimizer_steps": "1"}).encode(), "optimizer_steps"),
        ("state.json", lambda c: json.dumps({**json.loads(c), "options": 3}).encode(), "options"),
        ("state.json", lambda c: b"[]", "no JSON object"),
        ("state.json", lambda c: c.replace(b'"step"', b'"steps"'), "'steps' comes twice"),
        ("optimizer.safetensors", lambda c: c.replace(b'"m.embed_in"', b'"m.embed_on"'), r"m\.embed_in in .* is absent"),
        ("optimizer.safetensors", lambda c: c.replace(b'"F32"', b'"I32"'), r"int32 \(accepted: \(20, 16\) float32\)"),
        ("model.safetensors", lambda c: c.replace(b"gpt_neox.embed_in", b"gpt_neox.embed_on"), "names differ"),
    ],
)
def test_what_no_checksum_sees(small_run, name, change, said):
    """Somebody wrote it so: the checksums would fit."""
    folder, model, optimizer, _ = small_run
    path = folder / "step-000001"
    content = (path / name).read_bytes()
    (path / name).write_bytes(change(content))
    assert (path / name).read_bytes() != content
    with pytest.raises(CheckpointError, match=said):
        checkpoint.read_state(path)
        load(path, model, optimizer)


# ---- an optimizer of one's own


OPTIMIZERS = [
    lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    lambda p: Adam(p, lr=0.1, weight_decay=0.1),
    lambda p: AdamW([{"params": p[:1], "lr": 0.2}, {"params": p[1:]}], lr=0.1),
]


def train(device, make, steps, folder=None):
    """A linear layer's parameters after ``steps``, the bias having no gradient before the third; with ``folder``, saved and
    loaded into new ones after each step.
    """
    layer = nn.Linear(3, 2, device=device)
    optimizer = make(layer.parameters())
    rng = np.random.default_rng(0)
    for i in range(steps):
        x = ndl.Tensor(rng.standard_normal((4, 3)), device=device, requires_grad=False)
        loss = ndl.ops.summation(layer(x) ** 2) if i >= 2 else ndl.ops.summation((x @ layer.weight) ** 2)
        optimizer.reset_grad()
        loss.backward()
        optimizer.step()
        if folder is not None:
            write_tensors(folder / f"model-{i}", layer.state_dict())
            write_tensors(folder / f"optimizer-{i}", optimizer.state_dict())
            layer = nn.Linear(3, 2, device=device)
            optimizer = make(layer.parameters())
            layer.load_state_dict(read_tensors(folder / f"model-{i}"))
            optimizer.load_state_dict(read_tensors(folder / f"optimizer-{i}"))
            assert all(array.category == OPTIMIZER_STATE for array in optimizer.named_states().values())
    return [p.numpy() for p in layer.parameters()]


@pytest.mark.parametrize("make", OPTIMIZERS, ids=["SGD", "Adam", "AdamW"])
def test_an_optimizer_goes_on_bit_for_bit(device, make, tmp_path):
    np.random.seed(0)
    whole = train(device, make, 6)
    np.random.seed(0)
    for a, b in zip(whole, train(device, make, 6, tmp_path)):
        assert np.array_equal(a, b)


def test_the_state_of_an_optimizer():
    """It is a copy, by number or by name; steps that keep nothing have none."""
    p = [nn.Parameter(ndl.ones(2)), nn.Parameter(ndl.ones(3))]
    optimizer = Adam(p)
    assert list(optimizer.state_dict()) == ["t"]
    optimizer.load_state_dict(optimizer.state_dict())  # before the first step
    p[1].grad = ndl.ones(3)
    optimizer.step()
    state = optimizer.state_dict(["a", "b.c"])
    before = {name: values.copy() for name, values in state.items()}
    assert list(state) == ["m.b.c", "v.b.c", "t"] and list(optimizer.named_states()) == ["m.1", "v.1"]
    optimizer.step()
    assert all(np.array_equal(state[name], before[name]) for name in state)
    optimizer.load_state_dict(state, ["a", "b.c"])
    assert optimizer.t == 1 and np.array_equal(optimizer.m[p[1]].numpy(), before["m.b.c"]) and p[0] not in optimizer.m
    given = {"m.0": ndl.NDArray([1.0, 2.0]), "v.0": ndl.NDArray([1.0, 2.0]), "t": 3}
    optimizer.load_state_dict(given)
    p[0].grad, p[1].grad = ndl.ones(2), None
    optimizer.step()
    assert given["m.0"].numpy().tolist() == [1, 2] and list(optimizer.m) == p[:1]
    torch = pytest.importorskip("torch")
    optimizer.load_state_dict({name: torch.from_numpy(values) for name, values in before.items()}, ["a", "b.c"])
    assert optimizer.t == 1 and np.array_equal(optimizer.m[p[1]].numpy(), before["m.b.c"])
    plain = SGD(p)
    plain.step()
    assert plain.state_dict() == {}
    plain.load_state_dict({})
    with pytest.raises(ValueError, match="1 names for 2 parameters"):
        optimizer.state_dict(["a", "a"])


@pytest.mark.parametrize(
    "change, said",
    [
        ({"m.2": np.zeros(2, "float32")}, "unexpected names: m.2"),
        ({"u.0": np.zeros(2, "float32")}, "unexpected names: u.0"),
        ({"m.0": np.zeros(3, "float32")}, r"m.0 is \(3,\) float32 \(accepted: \(2,\) float32\)"),
        ({"m.0": np.zeros(2)}, r"m.0 is \(2,\) float64"),
        ({"v.0": [0.0, 0.0]}, r"v.0 is \(2,\) list"),
        ({"v.0": None}, "v.0 is absent"),
        ({"v.0": None, "t": np.array(7)}, "v.0 is absent"),
        ({"t": None}, "t is None"),
        ({"t": 1.0}, "t is 1.0"),
        ({"t": np.array(-1)}, "t is -1"),
        ({"t.0": np.array(-1)}, "t.0 is -1"),
        ({"t.2": np.array(1)}, "unexpected names: t.2"),
    ],
)
def test_a_state_that_is_another_optimizers(change, said):
    p = nn.Parameter(ndl.ones(2))
    optimizer = AdamW([p])
    p.grad = ndl.ones(2)
    optimizer.step()
    before = optimizer.state_dict()
    with pytest.raises(CheckpointError, match=said):
        optimizer.load_state_dict({**before, **change})
    assert all(np.array_equal(before[name], values) for name, values in optimizer.state_dict().items())


# ---- saves that fail


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("place", ["mkdir", "flush", "flush last", "replace", "replace last", "fsync"])
@pytest.mark.parametrize("error", [lambda: OSError(28, "No space left on device"), KeyboardInterrupt], ids=["full", "interrupted"])
def test_a_save_that_fails_anywhere_keeps_the_one_before(small_run, monkeypatch, place, error, step):
    folder, model, optimizer, state = small_run
    before = contents(folder)
    name, *last = place.split()
    target = {"mkdir": Path, "flush": files}.get(name, os)
    real, calls = getattr(target, name), []

    def count(*args, **kwargs):
        calls.append(args)
        return real(*args, **kwargs)

    def fail(*args, **kwargs):
        calls.append(args)
        if len(calls) == wanted:
            raise error()
        return real(*args, **kwargs)

    def save():
        return checkpoint.save(CheckpointFolder(folder, 1), model, optimizer, {**state, "step": step})

    spare = folder.parent / "spare"
    shutil.copytree(folder, spare)
    with monkeypatch.context() as patch:
        patch.setattr(target, name, count)
        checkpoint.save(CheckpointFolder(spare, 1), model, optimizer, {**state, "step": step})
    wanted = len(calls) - (name == "flush") if last else 1  # the very last flush is of names that are already changed
    assert wanted > 0
    calls.clear()
    with monkeypatch.context() as patch:
        patch.setattr(target, name, fail)
        with pytest.raises((CheckpointError, KeyboardInterrupt)):
            save()
    assert contents(folder) == before and len(list(folder.iterdir())) == 2
    # Saving the same step again replaces it only when the new one is whole.
    saved = save()
    assert checkpoint.find(folder)[:2] == (saved, []) and len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("there", [True, False])
def test_a_macs_disk_is_told_to_empty_its_own_cache(tmp_path, monkeypatch, there):
    """And where its file system cannot be told so, fsync has to do."""
    fcntl = pytest.importorskip("fcntl")
    told, synced = [], []

    def tell(descriptor, command):
        told.append(command)
        if not there:
            raise OSError(45, "Operation not supported")

    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        patch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
        patch.setattr(fcntl, "fcntl", tell)
        patch.setattr(os, "fsync", synced.append)
        with files.write_atomically(tmp_path / "a") as file:
            file.write(b"kept")
    assert told == [51, 51] and len(synced) == (0 if there else 2)  # the file and its folder
    assert (tmp_path / "a").read_bytes() == b"kept"


@pytest.mark.parametrize("error, where, kept", [("EINVAL", "folder", True), ("EINVAL", "file", False), ("EIO", "folder", False)])
def test_a_file_system_may_be_unable_to_wait_for_folders(tmp_path, monkeypatch, error, where, kept):
    number, real = getattr(errno, error), os.fsync

    def fsync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode) == (where == "folder"):
            raise OSError(number, os.strerror(number))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with contextlib.nullcontext() if kept else pytest.raises(CheckpointError, match=os.strerror(number)):
        CheckpointFolder(tmp_path).save(1, lambda path: (path / "x").write_bytes(b"x"))


def test_a_first_checkpoint_that_is_not_written_leaves_nothing(tmp_path):
    def write(path):
        (path / "x").write_bytes(b"x")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(CheckpointError, match="No space left on device"):
        CheckpointFolder(tmp_path / "run").save(1, write)
    assert [*(tmp_path / "run").iterdir()] == []


def test_leftovers_of_a_killed_process_go_with_the_next_save(two):
    shutil.copytree(two.path / "step-000002", two.path / "step-000009")  # renamed, and not yet in the index
    for step in (3, 10):
        shutil.copytree(two.path / "step-000002", two.path / f".step-{step:06}.partial")
    (two.path / "checkpoints.json.123-456.tmp").touch()
    assert value(two.newest()[0]) == 222222
    names = [".step-000003.partial", ".step-000010.partial", "step-000009"]
    assert sorted(two.abandoned()) == [two.path / name for name in names]

    def write_three(path):
        assert two.abandoned() == [path]  # the others have made room
        write(3)(path)

    two.save(3, write_three)
    assert sorted(path.name for path in two.path.iterdir()) == ["checkpoints.json", "step-000002", "step-000003"]
    assert two.abandoned() == []


SAVE_FOR_EVER = """
import itertools, sys
import numpy as np
from needle.checkpoints import CheckpointFolder, write_tensors

folder, tensors = CheckpointFolder(sys.argv[1]), {"x": np.arange(1 << 16, dtype=np.float32), "y": np.ones((300, 300), np.float32)}
print("ready", flush=True)
for step in itertools.count(int(sys.argv[2])):

    def write(path):
        write_tensors(path / "a.safetensors", tensors)
        write_tensors(path / "b.safetensors", tensors)
        (path / "value").write_text(str(step))

    folder.save(step, write)
    print(step, flush=True)
"""


def test_killed_at_random_moments(tmp_path):
    """Another process saves without a pause and says when a checkpoint is there. NEEDLE_TEST_KILLS: how many times it is killed."""
    kills, rng, said, inside = int(os.environ.get("NEEDLE_TEST_KILLS", "10")), random.Random(0), -1, 0
    for done in range(10 * kills):  # more where a slow disk or processor has let none come at such a moment
        if done >= kills and inside > 0 and said > 0:
            break
        command = [sys.executable, "-c", SAVE_FOR_EVER, str(tmp_path), str(said + 1)]
        with subprocess.Popen(command, cwd=ROOT / "python", stdout=subprocess.PIPE) as process:
            assert process.stdout.readline() == b"ready\n"
            end = time.monotonic() + rng.uniform(0, 0.15)
            while (left := end - time.monotonic()) > 0:
                if select.select([process.stdout], [], [], left)[0]:
                    said = int(process.stdout.readline())
            process.kill()
            for line in process.stdout:
                said = int(line)
        assert process.returncode == -signal.SIGKILL
        inside += any(tmp_path.glob(".step-*.partial"))
        found = CheckpointFolder(tmp_path).newest()
        assert (said == -1) if found is None else (found[1] == [] and value(found[0]) in (said, said + 1))
        said = said if found is None else value(found[0])
    print(f"{done} kills, {inside} of them while a checkpoint was written; {said} saved")
    assert inside > 0 and said > 0
