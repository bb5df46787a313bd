"""apps/generate.py and apps/evaluate.py as a user runs them, on a model that apps/train_pythia.py has just made."""

import contextlib
import io
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import evaluate
import needle as ndl
import pythia_app
from needle import dtype
from needle.data.text_corpus import Piece
from needle.data.text_tokenizer import TextTokenizer, load_tokenizer
from needle.models import Pythia, pretrained, score_text

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def made(own_cache, tmp_path_factory):
    """A folder with words.txt, last.jsonl and the runs dense and sparse."""
    folder = tmp_path_factory.mktemp("made")
    words = "the quick brown fox jumps over a naïve dog while seven wizards quietly box 漢字".split()
    lines = [" ".join(words[(i * 7 + j * (i % 5 + 1)) % len(words)] for j in range(9)) for i in range(1000)]
    (folder / "words.txt").write_text("\n".join(lines), encoding="utf-8")
    (folder / "last.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines[:40]))
    for name, flags in (("dense", []), ("sparse", ["--sparse", "--block-size", "16"])):
        done = outside(
            "train_pythia", "--dataset", folder / "words.txt", "--vocab-size", 300, "--model", "14m", "--seq_len", 64,
            "--max_steps", 12, "--checkpoint_dir", folder / name, *flags,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    return folder


def command(name, *arguments):
    return [sys.executable, f"apps/{name}.py", *map(str, arguments)]


def outside(name, *arguments, **kwargs):
    """An app as a user runs it."""
    return subprocess.run(command(name, *arguments), cwd=ROOT, capture_output=True, text=True, **kwargs)


@pytest.mark.parametrize("run", ["dense", "sparse"])
def test_text_goes_on_from_the_prompt(app, made, run):
    done = app("generate", "--model", made / run, "--prompt", "the quick", "--max_new_tokens", 30, "--ignore-eos")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("the quick") and len(done.stdout) > len("the quick") + 30
    assert app("generate", "--model", made / run, "--prompt", "", "--max_new_tokens", 2).returncode == 0  # a new text
    assert re.search(r"^30 tokens in [\d.]+ s, [\d.,]+ tokens/s; reading \d+ took [\d.]+ s$", done.stderr, re.MULTILINE)


def test_an_empty_prompt_needs_a_token_to_begin_with(app, made, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(next((made / "dense").glob("step-*")), model)
    tokenizer = model / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("<|endoftext|>", "<|another|>"))
    done = app("generate", "--model", model, "--prompt", "", "--max_new_tokens", 2)
    assert (done.returncode, done.stdout) == (2, "") and "[prompt] empty, and the tokenizer has no token" in done.stderr
    assert app("generate", "--model", model, "--prompt", "the", "--max_new_tokens", 2).returncode == 0


def test_text_ends_where_the_folder_says(app, made, tmp_path):
    model, prompt = tmp_path / "model", ("--prompt", "the quick", "--max_new_tokens", 30)
    shutil.copytree(next((made / "dense").glob("step-*")), model)
    whole = app("generate", "--model", model, *prompt)
    tokenizer = load_tokenizer(model / "tokenizer.json")
    ends = [tokenizer.end_of_text, int(tokenizer.encode(whole.stdout[:-1])[-1])]
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    ended = app("generate", "--model", model, *prompt)
    assert whole.stdout.startswith(ended.stdout[:-1]) and len(ended.stdout) < len(whole.stdout), ended.stderr
    assert app("generate", "--model", model, *prompt, "--ignore_eos").stdout == whole.stdout
    (model / "generation_config.json").unlink()
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": tokenizer.tokenizer.id_to_token(ends[1])}))
    assert app("generate", "--model", model, *prompt).stdout == ended.stdout


def test_draws_repeat_with_their_seed(app, made):
    flags = ["--prompt", "the", "--do_sample", "--temperature", 1.5, "--top-p", 0.95, "--repetition_penalty", 1.1]
    draw = lambda seed: app("generate", "--model", made / "dense", *flags, "--seed", seed)  # noqa: E731
    assert draw(1).stdout == draw(1).stdout != draw(2).stdout
    assert "no effect" not in draw(1).stderr


def test_several_prompts_and_stdin(made):
    flags = ["--model", made / "dense", "--max_new_tokens", 8]
    two = outside("generate", *flags, "--prompt", "the quick brown", "--prompt", "a").stdout
    assert re.fullmatch(r"--- 1 of 2 ---\nthe quick brown.*\n--- 2 of 2 ---\na.*\n", two, re.DOTALL)
    alone = outside("generate", *flags, input="the quick brown").stdout
    assert two.startswith(f"--- 1 of 2 ---\n{alone}")


def test_of_several_texts_the_first_that_goes_on_is_written_as_it_is_made(loaded, capsys, monkeypatch):
    from generate import show

    clock = itertools.count(10)
    monkeypatch.setattr("generate.time", SimpleNamespace(perf_counter=lambda: next(clock)))

    _, tokenizer = loaded
    a, b, stop = tokenizer.encode("a")[0], tokenizer.encode("b")[0], tokenizer.end_of_text
    seen = []

    def source():
        for ids in ([a, b, b], [stop, b, stop], [stop, a, stop]):
            yield np.array(ids)
            seen.append(capsys.readouterr().out)

    assert show(source(), ["x", "y", "z"], [np.array([a])] * 3, [stop], tokenizer) == 0
    assert seen == ["--- 1 of 3 ---\nxa", "\n--- 2 of 3 ---\nybb", "a"]
    said = capsys.readouterr()
    assert said.out == "\n--- 3 of 3 ---\nzb\n"
    assert said.err == "7 tokens in 3.00 s, 2.3 tokens/s; reading 3 took 1.00 s\n"


def test_what_is_written_is_utf8_at_every_moment(made):
    """At any moment the bytes written so far are whole characters, of a model that draws bytes almost at random."""
    flags = ["--prompt", "漢字 naïve", "--do_sample", "--temperature", 50, "--top_k", 0, "--max_new_tokens", 150, "--ignore_eos"]
    source = subprocess.Popen(
        command("generate", "--model", made / "dense", *flags), cwd=ROOT, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
    )  # fmt: skip
    with source:
        seen = b""
        while part := os.read(source.stdout.fileno(), 1 << 16):
            seen += part
            seen.decode()  # strictly
    assert source.returncode == 0 and seen.startswith("漢字 naïve".encode()) and "\ufffd" in seen.decode()


def test_ctrl_c_keeps_what_is_there(made):
    source = subprocess.Popen(
        command("generate", "--model", made / "dense", "--prompt", "the", "--max_new_tokens", 100_000, "--ignore_eos"),
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    with source:
        while len(seen := os.read(source.stdout.fileno(), 100)) == 0:
            pass
        time.sleep(0.3)
        source.send_signal(signal.SIGINT)
        rest, said = source.communicate(timeout=60)
    assert source.returncode == 130 and b"Traceback" not in said and b"stopped" in said
    assert (seen + rest).decode().startswith("the") and rest.endswith(b"\n")


def piped(name, *arguments):
    done = subprocess.run(
        f"{shlex.join(command(name, *arguments))} | head -c 3", shell=True, cwd=ROOT, capture_output=True, text=True
    )
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr
    return done.stdout


def test_a_working_directory_that_is_gone(app, made, monkeypatch):
    (made / "gone").mkdir()
    monkeypatch.chdir(made / "gone")
    (made / "gone").rmdir()
    done = app("generate", "--model", "../dense", "--prompt", "the")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "no checkpoint in ../dense" in done.stderr


def test_a_reader_that_leaves(made):
    assert piped("generate", "--model", made / "dense", "--prompt", "the", "--ignore_eos") == "the"
    texts = ["--text", made / "words.txt"] * 2
    assert len(piped("evaluate", "--model", made / "dense", *texts, "--max_tokens", 60)) == 3


def test_notes_about_what_makes_no_difference(app, made):
    flags = ["--model", made / "dense", "--prompt", "the", "--max_new_tokens", 80, "--temperature", 0.5]
    said = app("generate", *flags).stderr
    assert "note: temperature, top_k, top_p have no effect without --do_sample" in said
    assert "and the model was made for 64" in said
    done = app("evaluate", "--model", made / "dense", "--text", made / "words.txt", "--max_tokens", 90, "--window", 65)
    assert done.stderr == "note: the window has 65 positions, and the model was made for 64\n" and "window 65" in done.stdout


def test_evaluation(app, made):
    done = app(
        "evaluate", "--model", made / "sparse", "--text", made / "words.txt", "--lambada", made / "last.jsonl",
        "--max_tokens", 900, "--stride", 16,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = re.search(
        r"loss ([\d.]+) nats per token, perplexity ([\d.,]+), bits per byte ([\d.]+); ([\d,]+) bytes, 900 tokens, window 64, stride 16",
        done.stdout,
    )
    loss, perplexity, bits, text_bytes = (float(x.replace(",", "")) for x in found.groups())
    assert perplexity == pytest.approx(math.exp(loss), rel=1e-3)
    assert bits == pytest.approx(900 * loss / math.log(2) / text_bytes, rel=1e-3)
    assert 0 < loss < math.log(300)
    right, accuracy = re.search(r"(\d+) of 40 last words right, accuracy ([\d.]+)%", done.stdout).groups()
    assert float(accuracy) == 100 * int(right) / 40


@pytest.mark.parametrize("run", ["dense", "sparse"])
def test_a_model_in_16_bits(app, made, run, monkeypatch):
    losses, dtypes, load = [], [], Pythia.from_pretrained

    def noted(*arguments):
        model = load(*arguments)
        dtypes.append({p.dtype for p in model.parameters()})
        return model

    monkeypatch.setattr(Pythia, "from_pretrained", noted)
    for precision in ("fp32", "bf16", "fp16"):
        given = "--model", made / run, "--precision", precision
        done = app("evaluate", *given, "--text", made / "words.txt", "--max_tokens", 900)
        losses.append(float(re.search(r"loss ([\d.]+)", done.stdout)[1]))
        done = app("generate", *given, "--prompt", "the quick", "--max_new_tokens", 20, "--ignore-eos")
        assert done.returncode == 0 and len(done.stdout) > len("the quick") + 20
    assert dtypes == [{name} for name in ("float32", "bfloat16", "float16") for _ in range(2)]
    exact, bf16, fp16 = losses
    assert abs(bf16 - exact) < 0.02 and abs(fp16 - exact) < 0.002


def test_bf16_without_its_package(app, made, monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    monkeypatch.delitem(dtype._NUMPY, "bfloat16", raising=False)
    done = app("generate", "--model", made / "dense", "--precision", "bf16", "--prompt", "a")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "pip install ml_dtypes" in done.stderr


def test_a_byte_order_mark_is_no_text(app, made, tmp_path):
    shown = {}
    for name, mark in (("plain", b""), ("marked", b"\xef\xbb\xbf")):
        (tmp_path / f"{name}.txt").write_bytes(mark + b"the quick brown fox\n")
        (tmp_path / f"{name}.jsonl").write_bytes(mark + b'{"text": "the quick brown fox"}\n')
        files = ["--text", tmp_path / f"{name}.txt", "--lambada", tmp_path / f"{name}.jsonl"]
        done = app("evaluate", "--model", made / "dense", *files)
        assert done.returncode == 0, done.stderr
        shown[name] = [re.search(r"perplexity [^;\n]*", line)[0] for line in done.stdout.splitlines()]
    assert shown["plain"] == shown["marked"] and len(shown["plain"]) == 2


def test_the_last_word_of_several_lines(tmp_path):
    (tmp_path / "lines").write_text(json.dumps({"text": "a\nb \n\n c\n"}))
    assert evaluate.last_words(str(tmp_path / "lines")) == [(1, "a\nb", " \n\n c")]


@pytest.mark.parametrize("left", [8, 9, 10])
@pytest.mark.parametrize("more", [0, 1 << 20])
def test_line_ends_are_those_of_training(tmp_path, left, more):
    text = "a\rb\r\nc\n" + "x" * ((1 << 20) - left + more) + "\r\r\n\r"  # a MiB or two end before a line's end, and within it
    (tmp_path / "text").write_text(text, newline="")
    size = (tmp_path / "text").stat().st_size
    read = "".join(evaluate.read(str(tmp_path / "text"), "text"))
    assert read == "".join(Piece(tmp_path / "text", 0, size).texts("text")) == text.replace("\r\n", "\n")


def test_what_is_no_utf8_is_found_where_it_is(app, made, tmp_path):
    line = "größer\r\n".encode()
    (tmp_path / "text").write_bytes(b"\xef\xbb\xbf" + line * 300_000 + b"\xe4\xb8")  # 3 MB, and a part of a character
    said = f"not UTF-8 text: unexpected end of data at byte {3 + 300_000 * len(line)} of {tmp_path / 'text'} (UTF-8 text)\n"
    for flag in ("--text", "--lambada"):
        done = app("evaluate", "--model", made / "dense", flag, tmp_path / "text")
        assert done.returncode == 2 and done.stderr == f"evaluate.py: error: [{flag[2:]}] {said}"


def test_bytes_are_those_of_the_text(app, made, tmp_path):
    """Also where a tokenizer makes fewer of them, as GPT-NeoX's, which composes accents; so bits per byte compare tokenizers."""
    shutil.copytree(next((made / "dense").glob("step-*")), tmp_path / "model")
    about = json.loads((tmp_path / "model" / "tokenizer.json").read_text())
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps({**about, "normalizer": {"type": "NFC"}}))
    (tmp_path / "text").write_text("de\u0301ja\u0300 vu\n" * 50, encoding="utf-8")
    for flags in ((), ("--max_tokens", 10_000)):
        done = app("evaluate", "--model", tmp_path / "model", "--text", tmp_path / "text", *flags)
        assert "; 600 bytes, " in done.stdout, done.stdout + done.stderr
    nothing = {"type": "Replace", "pattern": {"Regex": ".*"}, "content": ""}  # what a token of spaces alone may stand for
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps({**about, "decoder": nothing}))
    done = app("evaluate", "--model", tmp_path / "model", "--text", tmp_path / "text", "--max_tokens", 1)
    assert done.returncode == 0 and "bits per byte nan; 0 bytes, 1 tokens" in done.stdout, done.stdout + done.stderr
    plain = load_tokenizer(next((made / "dense").glob("step-*")) / "tokenizer.json")
    plain.end_of_text = None  # then the first token is not predicted
    whole = plain.encode((made / "words.txt").read_text(encoding="utf-8"))
    for most in (30, len(whole) - 3):  # of the first part that is encoded, and of the last
        ids, nbytes = evaluate.tokens(str(made / "words.txt"), plain, most)
        np.testing.assert_array_equal(ids, whole[:most])
        assert nbytes == len(plain.decode(ids[1:]).encode())
    for word, first in (("\u8a71", ""), ("\u8a71\u984c", ""), ("a\u8a71", "a")):  # of which no token is a whole character
        (tmp_path / "text").write_text(word, encoding="utf-8")
        assert evaluate.tokens(str(tmp_path / "text"), plain, None)[1] == len(word.encode()) - len(first)


def test_of_a_long_text_no_more_is_read_than_asked_for(made, tmp_path):
    os.mkfifo(tmp_path / "endless")

    def write():
        with contextlib.suppress(BrokenPipeError), open(tmp_path / "endless", "w") as file:
            while True:
                file.write("the quick brown fox\n" * 1000)

    threading.Thread(target=write, daemon=True).start()
    done = outside(
        "evaluate", "--model", made / "dense", "--text", tmp_path / "endless", "--max_tokens", 70, "--window", 64, timeout=100
    )
    assert done.returncode == 0 and " 70 tokens, window 64" in done.stdout, done.stderr


def test_names_that_the_output_cannot_hold(made, tmp_path):
    path = tmp_path / "größe.txt"
    path.write_bytes((made / "words.txt").read_bytes()[:500])
    environ = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = outside("evaluate", "--model", made / "dense", "--text", path, env=environ)
    assert done.returncode == 0 and "gr\\xf6\\xdfe.txt: loss" in done.stdout, done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize("name", ["generate", "evaluate"])
def test_no_room_for_the_output(made, name):
    flags = ["--prompt", "the", "--max_new_tokens", 9] if name == "generate" else ["--text", made / "words.txt", "--max_tokens", 20]
    with open("/dev/full", "w") as full:
        line = command(name, "--model", made / "dense", *flags)
        done = subprocess.run(line, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and done.stderr == f"{name}.py: error: [stdout] cannot be written: No space left on device\n"


def test_closed_streams(made):
    line = shlex.join(command("evaluate", "--model", made / "dense", "--text", made / "words.txt", "--max_tokens", 20))
    done = subprocess.run(f"{line} >&- <&-", shell=True, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0 and done.stderr == ""


@pytest.fixture
def loaded(made):
    """(model, tokenizer) of the dense run, as the apps load them."""
    from pythia_app.loading import load_model

    return load_model(str(made / "dense"), ndl.cpu())


def test_evaluation_through_the_library(app, made, loaded, monkeypatch):
    """What the app prints is the library's score of the end-of-text token and the text."""
    clock = itertools.count(10, 2)
    monkeypatch.setattr("evaluate.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    model, tokenizer = loaded
    text = (made / "words.txt").read_text(encoding="utf-8")
    ids = np.concatenate([[tokenizer.end_of_text], tokenizer.encode(text)[:500]])
    done = app("evaluate", "--model", made / "dense", "--text", made / "words.txt", "--max_tokens", 500, "--device", "cpu")
    assert f"loss {score_text(model, ids, 64, 32, 4).loss:.4f} " in done.stdout and ", 250 tokens/s\n" in done.stdout


@pytest.mark.parametrize(
    "flags, shown, given",
    [
        (("--window", 1), "window 1, stride 1", (1, 1)),
        (("--window", 8, "--stride", 8), "window 8, stride 8", (8, 8)),
        (("--batch-size", 1), "window 64, stride 32", (64, 32, 1)),
    ],
)
def test_windows_of_every_size(app, made, loaded, flags, shown, given):
    model, tokenizer = loaded
    ids = evaluate.tokens(str(made / "words.txt"), tokenizer, 100)[0]
    done = app("evaluate", "--model", made / "dense", "--text", made / "words.txt", "--max_tokens", 100, *flags, "--device", "cpu")
    assert f"loss {score_text(model, ids, *given).loss:.4f} " in done.stdout and f"{shown}, " in done.stdout, done.stderr


def test_progress_fits_into_a_line(made, monkeypatch, capsys):
    """Also with a long path, which is in the result."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    path = made.joinpath(*["dense", ".."] * 20, "words.txt")
    assert evaluate.main(["--model", str(made / "dense"), "--text", str(path), "--max_tokens", "900", "--device", "cpu"]) == 0
    said, progress = capsys.readouterr()
    assert str(path) in said and progress.count("\r") > 1 and progress.endswith("\r900 of 900 tokens\n")
    assert max(map(len, progress.split("\r"))) < 40


def test_a_word_of_many_tokens(app, made, tmp_path):
    """Its perplexity would have hundreds of digits."""
    (tmp_path / "x.jsonl").write_text('{"text": "a dog and a c%s"}' % ("at" * 99))
    said = app("evaluate", "--model", made / "dense", "--lambada", tmp_path / "x.jsonl", "--window", 300).stdout
    assert re.search(r"perplexity per word \d(\.\d+)?e\+\d+\n", said)


def test_a_last_word_has_the_ids_that_it_has_behind_its_context():
    """Alone it may have others: Llama 2's tokenizer puts a mark before each text."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate("_acdeghlnost")}, []))
    marks = [tokenizers.normalizers.Prepend("_"), tokenizers.normalizers.Replace(" ", "_")]
    tokenizer.normalizer = tokenizers.normalizers.Sequence(marks)
    ours = TextTokenizer(tokenizer)
    context, word = evaluate.split_ids(ours, "a dog and the", " castle")
    assert "".join(map(tokenizer.id_to_token, word)) == "_castle"
    np.testing.assert_array_equal(np.concatenate((context, word)), ours.encode("a dog and the castle"))
    assert ours.encode(" castle").tolist() != word.tolist()


def test_the_prompt_on_stdin_is_read_as_a_text_is(monkeypatch):
    import generate

    stdin = SimpleNamespace(isatty=lambda: False, buffer=io.BytesIO(b"\xef\xbb\xbfab\r\ncd\r"))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert generate.read_stdin() == "ab\ncd\r"


def test_a_word_as_long_as_the_window(app, made, loaded, tmp_path):
    count = len(loaded[1].encode(" catatat"))
    (tmp_path / "x.jsonl").write_text('{"text": "a dog and a catatat"}')
    given = ("--model", made / "dense", "--lambada", tmp_path / "x.jsonl", "--window")
    done = app("evaluate", *given, count)
    assert done.returncode == 0 and " of 1 last words right" in done.stdout, done.stderr
    done = app("evaluate", *given, count - 1)
    assert done.returncode == 2 and f"and {count} in it (accepted: at least 1, and 1 to the window, {count - 1})" in done.stderr


def test_words_that_a_tokenizer_leaves_out(app, made, tmp_path):
    shutil.copytree(next((made / "dense").glob("step-*")), tmp_path / "model")
    about = json.loads((tmp_path / "model" / "tokenizer.json").read_text())
    nothing = {"type": "Replace", "pattern": {"Regex": "\\s*fox"}, "content": ""}
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps({**about, "normalizer": nothing}))
    for text, said in (
        ("fox box", "has 0 tokens before its last word and"),
        ("box fox", "tokens before its last word and 0 in it"),
    ):
        (tmp_path / "x.jsonl").write_text(json.dumps({"text": text}))
        done = app("evaluate", "--model", tmp_path / "model", "--lambada", tmp_path / "x.jsonl")
        assert done.returncode == 2 and f"line 1 of {tmp_path / 'x.jsonl'} " in done.stderr and said in done.stderr


def test_a_folder_of_transformers_does_as_well(app, made, loaded, tmp_path):
    model, tokenizer = loaded
    model.save_pretrained(tmp_path, tokenizer)
    said = [app("generate", "--model", m, "--prompt", "the", "--max_new_tokens", 9).stdout for m in (tmp_path, made / "dense")]
    assert said[0] == said[1] and len(said[0]) > 4


def test_what_a_model_asks_for_that_is_not_there_is_one_line(made, tmp_path):
    shutil.copytree(next((made / "dense").glob("step-*")), tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"num_beams": 4}')
    done = outside("generate", "--model", tmp_path / "model", "--prompt", "the", "--max_new_tokens", 2)
    path = tmp_path / "model" / "generation_config.json"
    assert done.returncode == 0 and done.stderr.startswith(f"note: [from_pretrained] {path}: num_beams: no effect here\n")


def test_weights_that_are_no_numbers(app, made, tmp_path):
    model = Pythia.from_pretrained(next((made / "dense").glob("step-*")))
    model.embed_out.cached_data.fill(float("nan"))
    model.save_pretrained(tmp_path, pretrained.tokenizer_of(next((made / "dense").glob("step-*"))))
    for given in (["--text", made / "words.txt", "--max_tokens", 9], ["--lambada", made / "last.jsonl"]):
        done = app("evaluate", "--model", tmp_path, *given)
        assert (done.returncode, done.stdout) == (2, "") and f"the loss on {given[1]} is nan" in done.stderr


WRONG = [
    ("generate", ["--max_new_tokens", 0], "[generate] max_new_tokens is 0"),
    ("generate", ["--max_new_tokens", 10**12], "[generate] max_new_tokens is 1000000000000"),
    ("generate", ["--max_new_tokens", 10**6], "max_new_tokens is 1000000 after a prompt of 1: [BlockLayout] 15,625 x"),
    ("generate", ["--model", "~nobody.of.that.name/run"], "no such folder: ~nobody.of.that.name/run"),
    ("generate", ["--temperature", 0], "do_sample=False takes the likeliest"),
    ("generate", ["--top_p", 2], "top_p is 2.0"),
    ("generate", ["--top_k", -3], "top_k is -3"),
    ("generate", ["--repetition_penalty", -1], "repetition_penalty is -1.0"),
    ("generate", ["--seed", -1], "seed is -1"),
    ("generate", ["--eos_token_id", 99999], "eos_token_id 99999 is outside the vocabulary"),
    ("generate", ["--device", "tpu"], "unknown device: tpu"),
    ("generate", ["--precision", "int8"], "unknown precision: int8 (accepted: fp32, bf16, fp16)"),
    ("evaluate", ["--text", "README.md", "--precision", "half"], "unknown precision: half (accepted"),
    ("generate", ["--model", "no/such/folder"], "no such folder: no/such/folder"),
    ("generate", ["--model", "tests"], "cannot read tests/config.json"),
    ("generate", ["--model", ""], "[path] is empty"),
    ("generate", ["--prompt", b"\xff\xfe"], "not valid UTF-8"),
    ("generate", ["--max_new_tokens", "many"], "--max_new_tokens"),
    ("evaluate", [], "nothing to evaluate on"),
    ("evaluate", ["--text", "no-such-file"], "cannot read no-such-file: No such file or directory"),
    ("evaluate", ["--text", "no\nsuch\nfile"], "cannot read no such file: No such file or directory"),
    ("evaluate", ["--text", ""], "[path] is empty"),
    ("evaluate", ["--text", "texts.jsonl"], "no text but JSON lines: texts.jsonl"),
    ("evaluate", ["--text", "no\0path"], "cannot read no␀path: embedded null byte (a text file in UTF-8)"),
    ("evaluate", ["--text", "/dev/null"], "too short: /dev/null has 0 tokens (at least 1)"),
    ("evaluate", ["--text", "README.md", "--window", 0], "[window] is 0"),
    ("evaluate", ["--text", "README.md", "--window", 8, "--stride", 9], "[stride] is 9"),
    ("evaluate", ["--lambada", "README.md"], "line 1 of README.md is no JSON object"),
    ("evaluate", ["--lambada", "/dev/null"], "no texts in /dev/null"),
    ("evaluate", ["--text", sys.executable], "not UTF-8 text: invalid"),
    ("evaluate", ["--lambada", b'{"text": "a dog and a ca\\ud800t"}'], "line 1 of {file} is no JSON object"),
    (
        "evaluate",
        ["--lambada", b'\n{"text": "a dog and a c%s"}' % (b"at" * 99), "--window", 8],
        "line 2 of {file} has 8 tokens before its last word and 200",
    ),
    ("evaluate", ["--lambada", b"[" * 100_000], "line 1 of {file} is no JSON object"),
    ("evaluate", ["--lambada", b'{"text": "a b"}\n["text"]'], "line 2 of {file} is no JSON object"),
    ("evaluate", ["--lambada", b'{"body": "a b"}'], 'line 1 of {file} is no JSON object with a "text"'),
    ("evaluate", ["--lambada", b'{"text": ["a b"]}'], 'line 1 of {file} is no JSON object with a "text"'),
    ("evaluate", ["--lambada", b'{"text": " word "}'], "line 1 of {file} has fewer than two words"),
]


@pytest.mark.parametrize("name, arguments, said", WRONG, ids=[f"{w[0]}-{w[2][:24]}" for w in WRONG])
def test_wrong_arguments_end_in_one_line(app, made, tmp_path, name, arguments, said):
    """Bytes after --lambada are what the file has; others are as a shell gives them."""
    if arguments[0:1] == ["--lambada"] and isinstance(arguments[1], bytes):
        (tmp_path / "file").write_bytes(arguments[1])
        arguments, said = ["--lambada", tmp_path / "file", *arguments[2:]], said.format(file=tmp_path / "file")
    arguments = [os.fsdecode(a) if isinstance(a, bytes) else a for a in arguments]
    done = app(name, "--model", made / "dense", *(["--prompt", "a"] if name == "generate" else []), *arguments)
    assert done.returncode == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", ["generate", "evaluate"])
def test_a_model_is_needed(app, name):
    done = app(name)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "arguments are required: --model" in done.stderr


def test_what_a_model_writes_is_shown_on_a_terminal_and_not_obeyed(monkeypatch):
    text = "a\x1b[2J\x07b\x7f\n\tc\x90\x9b"
    assert pythia_app.printable(text) == text
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert pythia_app.printable(text) == "a␛[2J␇b␡\n\tc��"
