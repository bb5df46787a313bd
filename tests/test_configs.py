"""Flags in YAML files: those of the published Pythia runs, what a file may say, and what is said of one that is wrong."""

import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import needle as ndl
from needle.checkpoints import CheckpointFolder
from needle.data.text import TokenBatches
from needle.data.text_corpus import CORPORA
from needle.errors import DataError, ShapeError
from needle.models import Pythia, PythiaConfig, train_step
from needle.optim import AdamW
from pythia_app import config_file
from pythia_app.memory import Budget
from pythia_app.options import RANGES, SMALLEST, _parser, parse
from pythia_app.trainer import evaluated, learning_rate, make_config

pytest.importorskip("yaml")
ROOT = Path(__file__).parent.parent
# Parameters and peak learning rate. source: Biderman et al. 2023, arXiv:2304.01373; of 14m and 31m, EleutherAI's list of models.
PUBLISHED = {
    "14m": (14_067_712, 1e-3), "31m": (30_494_720, 1e-3), "70m": (70_426_624, 1e-3), "160m": (162_322_944, 6e-4),
    "410m": (405_334_016, 3e-4),
}  # fmt: skip


def from_config(path, *more):
    return parse(["--config", str(path), *more])


@pytest.fixture
def file(tmp_path):
    def make(text):
        path = tmp_path / "flags.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return make


def test_every_config_is_of_a_published_run():
    assert {path.stem for path in (ROOT / "configs").glob("*.yaml")} == {f"pythia-{name}" for name in PUBLISHED}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_runs(name):
    parameters, lr = PUBLISHED[name]
    options = from_config(ROOT / "configs" / f"pythia-{name}.yaml")
    assert options.model == name and options.lr == lr and options.precision == "fp16"
    assert options.batch_size * options.accumulation_steps == 1024 and options.seq_len == 2048 and options.max_steps == 143_000
    assert options.betas == [0.9, 0.95] and options.eps == 1e-8 and options.weight_decay == 0.1 and options.max_grad_norm == 1
    rates = [learning_rate(s, 143_000, lr, options.warmup_steps, options.min_lr_ratio) for s in (0, 1429, 71_500, 142_999)]
    assert rates[:2] == pytest.approx([lr / 1430, lr]) and rates[3] == pytest.approx(lr / 10) and rates[1] > rates[2] > rates[3]
    config = make_config(options, options.vocab_size, options.sparse)
    model = Pythia(config, device=ndl.meta())
    assert config.parameter_count() == parameters == sum(p.size for p in model.parameters())
    assert Budget(options, options.vocab_size, ndl.meta(), False).peak() > 16 * parameters


def test_the_plan_of_a_config(capsys):
    """Needs no text, of which the machine may have none with such a vocabulary."""
    import train_pythia

    assert train_pythia.main(["--config", str(ROOT / "configs" / "pythia-14m.yaml"), "--plan", "--dataset", "none"]) == 0
    assert "layers.5" in capsys.readouterr().out
    # Without --vocab_size a token file has it: one that is not there must not be planned with the vocabulary of a text.
    assert train_pythia.main(["--model", "14m", "--plan", "--dataset", "no/such/tokens"]) == 2
    said = capsys.readouterr()
    assert not said.out and "unknown data set: 'no/such/tokens'" in said.err
    for name in CORPORA:  # whose text may have yet to be downloaded
        assert train_pythia.main(["--model", "14m", "--plan", "--dataset", name]) == 0
        assert "layers.5" in capsys.readouterr().out


def test_flags_have_the_defaults_of_what_they_are_given_to():
    options = parse([])
    of = lambda made: {name: found.default for name, found in inspect.signature(made).parameters.items()}  # noqa: E731
    adamw = {"lr": options.lr, "betas": tuple(options.betas), "eps": options.eps, "weight_decay": options.weight_decay}
    assert adamw.items() <= of(AdamW).items() and options.keep_last == of(CheckpointFolder)["keep_last"]
    assert options.max_grad_norm == of(train_step)["max_norm"] == of(AdamW.clip_grad_norm)["max_norm"]
    config = PythiaConfig()
    assert (options.block_size, options.window, options.dropout) == (config.block, config.window, config.dropout)
    assert options.seed == of(Pythia)["seed"] == of(TokenBatches)["seed"]


def test_what_is_advised_changes_no_step():
    options = parse(["--batch_size", "6", "--accumulation_steps", "5", "--seq_len", "64", "--model", "14m"])
    changes = [change for _, change in Budget(options, 300, ndl.meta(), False).advice.changes]
    assert {"checkpoint_layers": 1} in changes and len(changes) == 7
    smaller = [(change["batch_size"], change["accumulation_steps"]) for change in changes if "batch_size" in change]
    assert smaller == [(3, 10), (2, 15), (1, 30)] * 2
    options.checkpoint_layers = 1
    assert len(Budget(options, 300, ndl.meta(), False).advice.changes) == 3


def test_a_run_fits_where_nobody_knows_what_is_there(monkeypatch, capsys):
    monkeypatch.setattr("needle.memory.capacity", lambda device: 0)
    budget = Budget(parse(["--batch_size", "1", "--seq_len", "64", "--model", "14m"]), 300, ndl.meta(), False)
    assert budget.bytes == 0 and budget.peak() > 0
    budget.show()
    assert capsys.readouterr().out.endswith("fits: meta() has an unknown amount\n")
    limited = Budget(
        parse(["--batch_size", "1", "--seq_len", "64", "--model", "14m", "--memory_limit", "1MiB"]), 300, ndl.meta(), False
    )
    with pytest.raises(ShapeError, match=r"\[memory_limit\] .* the limit is 1.00 MiB"):
        limited.peak()


def test_flags_override_what_a_file_says(file):
    path = file("sparse: true\nlr: 3e-4\nmax_steps: 12\nbetas: [0, 0.5]\ndevice: cpu\ncheckpoint_layers: 2\nmemory_limit: 1GiB\n")
    options = from_config(path)
    assert options.sparse is True and options.lr == 3e-4 and options.max_steps == 12 and options.betas == [0.0, 0.5]
    assert options.checkpoint_layers == 2 and options.memory_limit == "1GiB"
    options = from_config(path, "--lr", "1", "--no_sparse", "--epochs", "2", "--betas", "0.1", "0.2")
    assert options.sparse is False and options.lr == 1 and options.betas == [0.1, 0.2]
    assert options.max_steps is None and options.epochs == 2  # which would have had no effect beside max_steps
    assert from_config(path, "--epochs", "2", "--max_steps", "3").max_steps == 3
    assert from_config(file("in_order: true"), "--no-in-order").in_order is False


def test_a_checkpoint_keeps_what_makes_the_model(file):
    saved = {**vars(parse([])), "lr": 0.5, "seq_len": 256, "seed": 7}
    options = parse(["--config", str(file("lr: 0.25\nseq_len: 64"))], saved)
    assert options.seq_len == 256 and options.lr == 0.25 and options.seed == 7
    older = {name: value for name, value in saved.items() if name not in ("in_order", "save_every")}  # from before those flags
    assert vars(parse([], older)) == vars(parse([], saved))


def test_what_is_written_is_what_is_read(tmp_path, file):
    given = [
        "--sparse",
        "--betas",
        "0.5",
        "0.75",
        "--epochs",
        "0.25",
        "--checkpoint_layers",
        "1GiB",
        "--eps",
        "1e-30",
        "--window",
        "7",
    ]
    options = parse([*given, "--dataset", "1e3", "--checkpoint_dir", str(tmp_path)])
    config_file.write(tmp_path / "written.yaml", options, "one line\nand another")
    again = from_config(tmp_path / "written.yaml")
    assert config_file.kept(again) == config_file.kept(options) and again.checkpoint_dir is None
    assert config_file.read(str(tmp_path / "written.yaml"), _parser()) == config_file.kept(options) | {"checkpoint_layers": "1GiB"}
    assert (tmp_path / "written.yaml").read_text().startswith("# one line\n# and another\nmodel: 70m\n")


# Each mapping merges the one before nine times.
MERGES = "a0: &a0 {k: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 9))
WRONG = {
    "learning_rate: 1": "unknown key 'learning_rate'",
    "batchsize: 1": "unknown key 'batchsize' (is it batch_size?)",
    "batch-size: 1": "is it batch_size?",
    "config: x": "unknown key 'config'",
    "help: x": "unknown key 'help'",
    "3: x": "unknown key 3",
    "~: x": "unknown key None",
    "lr: 1\nmodel: 14m\nlr: 2": "the key 'lr' comes twice (line 3, column 1)",
    "lr: fast": "lr is 'fast' (accepted: a number)",
    "lr: true": "lr is True (accepted: a number)",
    "lr: [1]": "lr is [1] (accepted: a number)",
    "lr:": "lr is None (accepted: a number)",
    "max_steps: 1.5": "max_steps is 1.5 (accepted: a whole number)",
    "max_steps: '3'": "max_steps is '3' (accepted: a whole number)",
    "sparse: 1": "sparse is 1 (accepted: true or false)",
    "model: true": "model is True (accepted: a word)",
    "model: {a: b}": "(accepted: a word)",
    "dataset: 2024-01-01": "dataset is datetime.date(2024, 1, 1) (accepted: a word)",
    "betas: 0.9": "betas is 0.9 (accepted: [a number, a number])",
    "betas: [0.9]": "(accepted: [a number, a number])",
    "betas: [0.9, x]": "(accepted: [a number, a number])",
    "lr: 0x" + "f" * 5000: "is no int (line 1, column 5)",
    "? 0x" + "f" * 5000 + "\n: 1": "is no int (line 1, column 3)",
    "lr: !!bool x": "'x' is no bool (line 1, column 5)",
    "lr: !!float ''": "'' is no float",
    "lr: !!timestamp x": "'x' is no timestamp",
    "betas: [2024-02-31, 1]": "'2024-02-31' is no timestamp (line 1, column 9)",
    "<<: {lr: 1}": "(line 1, column 1)",
    MERGES: "(line 2, column 10)",
    "- lr": "is no mapping",
    "": "is no mapping",
    "lr: [": "(line 1, column",
    "lr: 1\n\tmodel: 14m": "(line 2, column 1)",
    "a: &a [x, x]\nb: &b [*a, *a]\nlr: [*b, *b, *b]": "unknown key 'a'",
    "lr: &a [*a]": "lr is [[",
    "? [a, b]\n: c": "",
    "lr: !!python/object/apply:os.system [ls]": "could not determine a constructor for the tag",
    b"lr: \xff\xfe": "cannot read",
    b"lr: \x00": "cannot read",
    b"[" * 10_000: "nested too deeply",
    b"#" * (1 << 17): "larger than",
}


@pytest.mark.parametrize("text, said", WRONG.items(), ids=[str(n) for n in range(len(WRONG))])
def test_a_wrong_file_ends_in_one_line(file, text, said):
    path = file(text)
    with pytest.raises(DataError) as caught:
        from_config(path)
    message = str(caught.value)
    assert message.startswith("[config] ") and str(path) in message and said in message and "\n" not in message
    assert len(message) < 300 + len(str(path))


@pytest.mark.parametrize(
    "name, value", [("lr", 0), ("max_grad_norm", 0), ("min_lr_ratio", 1.01), ("eps", 0), ("weight_decay", "nan")]
)
def test_values_out_of_range_are_those_of_flags(file, name, value):
    for wrong in (lambda: parse([f"--{name}", str(value)]), lambda: from_config(file(f"{name}: {value}"))):
        with pytest.raises(ShapeError, match=rf"\[{name}\] is "):
            wrong()
    with pytest.raises(ShapeError, match="betas"):
        parse(["--betas", "0.9", "1"])


def test_the_ends_of_ranges_are_accepted():
    of_numbers = {"eps": (SMALLEST, 1), "min_lr_ratio": (0, 1), "weight_decay": (0, 1), "dropout": (0, 0.999), "lr": (1e-38, 1e38)}
    of_numbers |= {"max_grad_norm": (1e-38, 1e38), "epochs": (1e-38, 1e6)}
    for name, ends in (RANGES | of_numbers).items():
        for value in ends:
            assert getattr(parse(["--batch_size", "1", "--seq_len", "1", f"--{name}", str(value)]), name) == value


def test_no_such_file():
    for name in ("no-such-file", ".", "n" * 5000, ""):
        with pytest.raises(DataError, match=re.escape("[config] cannot read")):
            from_config(name)


def test_the_text_that_is_evaluated_is_what_is_asked_for():
    text = SimpleNamespace(held_out=range(99_999))
    assert [len(evaluated(text, *given)) for given in ((8,), (8, 100), (200, 100), (40_000,))] == [32_768, 100, 201, 40_001]


def test_the_default_rate_is_a_short_warmup_and_a_cosine_to_a_tenth():
    assert [learning_rate(s, 5, 1.0) for s in (0, 1, 4)] == pytest.approx([1, 1, 0.1 + 0.45 * (1 + 0.5 * -(2**0.5))], abs=1e-9)
    assert [learning_rate(s, 100, 1.0) for s in (0, 8, 9, 10)] == [0.1, 0.9, 1, 1]
    rates = [learning_rate(s, 2000, 1.0) for s in range(2000)]
    assert rates[0] == 0.01 and rates[99] == rates[100] == max(rates) == 1 and rates[-1] == pytest.approx(0.1, abs=1e-5)
