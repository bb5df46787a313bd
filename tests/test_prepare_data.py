"""apps/prepare_data.py: the same tokens as of whole documents, whatever the threads, the sizes of blocks and the moments of kills."""

import gzip
import io
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from needle import files
from needle.data import block_encoder, text_blocks
from needle.data import prepare as module
from needle.data.prepare import prepare
from needle.data.text import load_text
from needle.data.text_tokenizer import TextTokenizer, load_tokenizer
from needle.data.token_files import TokenWriter, read_token_file
from needle.errors import DataError

tokenizers = pytest.importorskip("tokenizers")

ROOT = Path(__file__).parent.parent
WORDS = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa don't naïve Größe 中文字 42 1999 ... -- (x) [y] 👍 e\u0301".split()
)
SPACES = [" "] * 12 + ["\n", "\n\n", "  ", "\t", " \n  ", "\u3000", "\u00a0"]


def make_text(seed, words):
    rng = random.Random(seed)
    return "".join(rng.choice(WORDS) + rng.choice(SPACES) for _ in range(words))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """As GPT-NeoX's: byte-level BPE over NFC, with tokens for runs of spaces."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.normalizer = tokenizers.normalizers.NFC()
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    made.train_from_iterator([make_text(0, 5000)], trainer)
    made.add_tokens([tokenizers.AddedToken(" " * n, normalized=True) for n in (2, 3, 4)])
    made.save(str(path))
    return path


@pytest.fixture
def small(monkeypatch):
    """Blocks, parts and words of a few bytes, so that a short text has every kind of border."""

    def set_sizes(block=50, part=7, word=200):
        monkeypatch.setattr(text_blocks, "_BLOCK_BYTES", block)
        monkeypatch.setattr(block_encoder, "_PART_BYTES", part)
        monkeypatch.setattr(block_encoder, "_TOGETHER", 3)
        monkeypatch.setattr(text_blocks, "_WORD_BYTES", word)
        monkeypatch.setattr(text_blocks.Cutter, "least", block)
        monkeypatch.setattr(text_blocks.Cutter, "most", word)

    set_sizes()
    return set_sizes


def write_inputs(folder):
    """A text file, an empty one, lines, both compressed; and the documents in them."""
    folder.mkdir()
    texts = [make_text(seed, words) for seed, words in ((1, 900), (2, 3), (3, 200), (4, 1), (5, 40), (6, 300))]
    (folder / "a b.txt").write_bytes(b"\xef\xbb\xbf" + texts[0].replace("\n", "\r\n").encode())
    (folder / "b.txt").write_text("")
    lines = [{"text": text, "meta": {"n": 1}} for text in texts[1:4]]
    (folder / "c.jsonl").write_text("\n".join(map(json.dumps, [lines[0], {"text": ""}, *lines[1:]])) + "\n\n  \n")
    with gzip.open(folder / "d.JSONL.gz", "wt") as file:
        file.write(json.dumps({"text": texts[4]}, ensure_ascii=False))  # the last line does not end
    with gzip.open(folder / "e.txt.GZ", "wb") as file:
        file.write(texts[5].encode())
    return texts


def expected(tokenizer, texts, end=(0,)):
    whole = tokenizers.Tokenizer.from_file(str(tokenizer))
    return [whole.encode(text, add_special_tokens=False).ids + list(end) for text in texts]


def found(prefix):
    file = read_token_file(prefix.with_name(prefix.name + ".bin"))
    return [file[i].tolist() for i in range(len(file))]


def pair(prefix):
    return [prefix.with_name(prefix.name + ending).read_bytes() for ending in (".bin", ".idx", ".tokenizer.json")]


def leftovers(folder):
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


# ---- what is written


@pytest.mark.parametrize("workers", [1, 3])
def test_tokens_are_those_of_the_whole_documents(tmp_path, tokenizer, small, workers):
    texts, read = write_inputs(tmp_path / "in put"), []
    report = lambda now: read.append((now.done_bytes, now.all_bytes))  # noqa: E731
    done = prepare([tmp_path / "in put"], tmp_path / "out" / "x", tokenizer=tokenizer, workers=workers, report=report)
    assert read == sorted(read) and read[-1] == (sum(path.stat().st_size for path in (tmp_path / "in put").iterdir()),) * 2
    assert read[0][0] < (tmp_path / "in put" / "a b.txt").stat().st_size
    assert found(tmp_path / "out" / "x") == expected(tokenizer, texts)
    assert done.totals.documents == 6 and done.totals.empty == 2 and done.totals.cut == 0 and done.skipped == []
    assert done.totals.tokens == sum(map(len, expected(tokenizer, texts)))
    raw = {path: path.read_bytes() for path in (tmp_path / "in put").iterdir()}
    assert done.totals.text_bytes == sum(len(gzip.decompress(b) if p.suffix.lower() == ".gz" else b) for p, b in raw.items())
    assert pair(tmp_path / "out" / "x")[2] == tokenizer.read_bytes() and leftovers(tmp_path / "out") == []
    plain = prepare([tmp_path / "in put"], tmp_path / "plain.idx", tokenizer=tokenizer, end_of_text=None)
    assert plain.prefix == tmp_path / "plain"
    assert found(plain.prefix) == expected(tokenizer, texts, ())
    files = [tmp_path / "in put" / "c.jsonl", tmp_path / "in put" / "a b.txt"]  # as often and in the order in which they are given
    twice = prepare([*files, files[1]], tmp_path / "twice.bin", tokenizer=tokenizer, end_of_text="alpha")
    end = expected(tokenizer, ["alpha"], ())[0]
    assert len(end) == 1 and found(twice.prefix) == expected(tokenizer, [*texts[1:4], texts[0], texts[0]], end)
    text = load_text(str(done.prefix))  # what training reads, with the tokenizer beside it
    assert text.tokenizer.decode(np.concatenate([text.train, text.held_out])).startswith(texts[0][:20])


def test_a_home_folder(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "one.txt").write_text("alpha")
    assert prepare("~/one.txt", "~/out", tokenizer=tokenizer).prefix == tmp_path / "out"
    assert found(tmp_path / "out") == expected(tokenizer, ["alpha"])


def test_the_files_of_a_folder_come_in_the_order_of_their_names(tmp_path, tokenizer):
    names = [f"{folder}/{file}" for folder in "bdacfe" for file in "cafedb"]
    for name in names:
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(name)
    done = prepare(tmp_path / "in", tmp_path / "out", tokenizer=tokenizer)
    assert found(done.prefix) == expected(tokenizer, sorted(names))


def test_the_sizes_of_blocks_change_nothing(tmp_path, tokenizer, small):
    texts = write_inputs(tmp_path / "in")
    for i, sizes in enumerate([(1, 1, 200), (30, 100, 200), (1000, 3, 5000), (10**6, 10**6, 10**6)]):
        small(*sizes)
        done = prepare([tmp_path / "in"], tmp_path / f"{i}", tokenizer=tokenizer, workers=2)
        assert found(done.prefix) == expected(tokenizer, texts)
        assert pair(done.prefix) == pair(tmp_path / "0")


def test_a_word_without_an_end_is_cut_and_counted(tmp_path, tokenizer, small):
    whole = "中" * 500 + " " + "b" * 100
    (tmp_path / "x.txt").write_text(whole)
    (tmp_path / "y.jsonl").write_text(json.dumps({"text": whole}))
    done = prepare([tmp_path / "x.txt", tmp_path / "y.jsonl"], tmp_path / "out", tokenizer=tokenizer)
    assert done.totals.cut == 7 + 7 and done.totals.documents == 2
    text = load_text(str(tmp_path / "out"))
    decoded = text.tokenizer.decode(np.concatenate([text.train, text.held_out]))
    assert decoded == (whole + "<|endoftext|>") * 2
    cut = text_blocks.Cutter(True).cut
    assert [cut(b"a" * n + b" b", 0, 50) for n in (199, 200, 201)] == [(199, False), (200, False), (200, True)]
    assert cut(b"a" * 200, 0, 50) == (200, False)


# The first and the last of each number of bytes, and some between.
@pytest.mark.parametrize("letter", "\u0080é\u07ff\u0800ก中\uffff\U00010000😀\U0010ffff")
def test_no_character_is_cut(small, letter):
    width = len(letter.encode())
    for before in range(width):
        cut = text_blocks.Cutter(True).cut(b"a" * before + letter.encode() * 200, 0, 50)
        assert cut == (200 - (200 - before) % width, True)


def test_white_space_is_not_cut():
    is_place = text_blocks.Cutter(True).is_place
    assert is_place("é", " x") and is_place(".", "\n")
    assert not any(is_place(f"abc{space}", "  y") for space in " \n\r\t\u00a0\u2003\u3000")


@pytest.mark.parametrize("before", ["a", "ab"])
def test_a_line_end_is_not_cut(tmp_path, tokenizer, small, before):
    (tmp_path / "x.txt").write_bytes(before.encode() + b"\r\n" * 500)
    prepare([tmp_path / "x.txt"], tmp_path / "out", tokenizer=tokenizer, end_of_text=None)
    assert load_tokenizer(tokenizer).decode(found(tmp_path / "out")[0]) == before + "\n" * 500


def variant(path, change):
    made = json.loads(path.read_text())
    change(made)
    return tokenizers.Tokenizer.from_str(json.dumps(made))


def split(pattern):
    pieces = [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}]
    bytes_alone = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return lambda made: made.update(pre_tokenizer={"type": "Sequence", "pretokenizers": [*pieces, bytes_alone]})


LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PREFIX = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
TOKEN = {"id": 900, "content": "a b", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
WORD = {**TOKEN, "single_word": True, "rstrip": True}


@pytest.mark.parametrize(
    "change, anywhere, after_letters",
    [
        (lambda made: None, True, True),
        (split(LLAMA3), False, True),  # a full stop and the line ends after it are one word
        (lambda made: made.update(pre_tokenizer=PREFIX), False, False),  # each part would get a space
        (lambda made: made.update(normalizer={"type": "Prepend", "prepend": "_"}), False, False),
        (lambda made: made.update(pre_tokenizer=None), False, False),  # a whole text is one word
        (lambda made: made["added_tokens"].append(TOKEN), False, False),
        (lambda made: made["added_tokens"].append({**TOKEN, "content": "<m>", "rstrip": True}), False, True),
        (
            lambda made: made["added_tokens"].append({**TOKEN, "content": "<m>", "lstrip": True}),
            True,
            True,
        ),  # it takes what stays with it
        (lambda made: made["added_tokens"].append({**WORD, "content": "<m>"}), False, True),
        (lambda made: made["added_tokens"].append({**WORD, "content": "bar"}), False, False),
        (lambda made: made["added_tokens"].append({**WORD, "content": "\t<m>", "rstrip": False}), False, False),  # none in "x\t<m>"
    ],
    ids="gpt-2,llama 3,prefix,prepend,one word,token,rstrip,lstrip,rstrip of a mark,rstrip of a word,space of a word".split(","),
)
def test_where_cutting_changes_nothing(tokenizer, change, anywhere, after_letters):
    made = TextTokenizer(variant(tokenizer, change))
    assert made.unchanged_by_cuts(text_blocks.Cutter(True).is_place) == anywhere
    assert made.unchanged_by_cuts(text_blocks.Cutter(True, True).is_place) == after_letters


def llama3(made):
    """With a token of a mark and the line end after it, which are one word."""
    split(LLAMA3)(made)
    made["model"]["vocab"][")Ċ"] = 900
    made["model"]["merges"].append([")", "Ċ"])


@pytest.mark.parametrize(
    "change, exact", [(llama3, True), (lambda made: made.update(normalizer={"type": "Prepend", "prepend": "_"}), False)]
)
def test_tokens_of_other_tokenizers(tmp_path, tokenizer, small, change, exact):
    texts = write_inputs(tmp_path / "in")
    made = tmp_path / "other.json"
    variant(tokenizer, change).save(str(made))
    small(50, 7, 1 << 20)  # nothing here is too long to be held
    done = prepare([tmp_path / "in"], tmp_path / "out", tokenizer=made)
    assert found(done.prefix) == expected(made, texts) and done.totals.cut == 0
    small(50, 7, 400)
    again = prepare([tmp_path / "in"], tmp_path / "again", tokenizer=made)
    same = [a == b for a, b in zip(found(again.prefix), expected(made, texts), strict=True)]
    short = [len(text.encode()) < 400 for text in texts]
    assert (same == [True] * 6 and again.totals.cut == 0) if exact else (same == short and again.totals.cut > 0)


def test_texts_are_whole_even_where_the_tokenizer_would_cut_them_off(tmp_path, tokenizer):
    made = tokenizers.Tokenizer.from_file(str(tokenizer))
    made.enable_truncation(5)
    made.enable_padding(length=9)
    made.save(str(tmp_path / "cuts.json"))
    (tmp_path / "x.txt").write_text(make_text(0, 100))
    prepare([tmp_path / "x.txt"], tmp_path / "out", tokenizer=tmp_path / "cuts.json")
    assert found(tmp_path / "out") == expected(tokenizer, [make_text(0, 100)])


def test_a_tokenizer_that_knows_some_words_alone(tmp_path, small):
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "<|endoftext|>": 2}))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.save(str(tmp_path / "words.json"))
    (tmp_path / "known.txt").write_text("a b b")
    (tmp_path / "other.txt").write_text("a b c")
    prepare([tmp_path / "known.txt"], tmp_path / "out", tokenizer=tmp_path / "words.json")
    assert found(tmp_path / "out") == [[0, 1, 1, 2]]
    with pytest.raises(DataError, match=r"\[tokenizer\] no ids for a text: .*Missing \[UNK\] token"):
        prepare([tmp_path / "other.txt"], tmp_path / "out2", tokenizer=tmp_path / "words.json")
    with pytest.raises(DataError, match=r"\[tokenizer\] no ids for a text: .*Missing \[UNK\] token"):
        load_tokenizer(tmp_path / "words.json").encode("c")
    for text in ("a b" + " " * 500, " " * 500 + "a b"):  # one of its blocks has no ids
        (tmp_path / "known.txt").write_text(text)
        done = prepare([tmp_path / "known.txt"], tmp_path / "out", tokenizer=tmp_path / "words.json", overwrite=True)
        assert found(tmp_path / "out") == [[0, 1, 2]] and (done.totals.empty, done.totals.cut) == (0, 1)


def test_a_sample_is_of_all_the_text(tmp_path, tokenizer, small, monkeypatch):
    monkeypatch.setattr(text_blocks, "_SAMPLE_BYTES", 1000)
    texts = [f"{i:02}".ljust(100, "x") for i in range(40)]
    for text in texts:
        (tmp_path / f"{text[:2]}.txt").write_text(text)
    sources, _ = text_blocks.find_sources([tmp_path / f"{text[:2]}.txt" for text in texts], [])
    assert list(text_blocks.sample_text(sources, set(), "text", False, 4000)) == texts[::4]
    assert list(text_blocks.sample_text(sources[:10], set(), "text", False, 1000)) == texts[:10]
    assert list(text_blocks.sample_text(sources, set(), "text", False, 1000)) == texts[:20]  # more than was said, as of a .gz
    blocks = text_blocks.read_blocks(sources, set(), text_blocks.Place(0, 0, 1), text_blocks.Cutter(exact=True))
    assert [block.done_bytes for block in blocks] == list(range(100, 4001, 100))


@pytest.mark.parametrize("ahead, most", [(module._AHEAD_BYTES, 2 * 3 + 1), (0, 2)])
def test_how_many_blocks_are_held(tmp_path, tokenizer, small, monkeypatch, ahead, most):
    """Enough for all threads, unless they are long: of these one, and the next."""
    write_inputs(tmp_path / "in")
    blocks, read, held = text_blocks.read_blocks, [], []
    monkeypatch.setattr(module, "_AHEAD_BYTES", ahead)
    monkeypatch.setattr(module, "read_blocks", lambda *given: (read.append(block) or block for block in blocks(*given)))
    report = lambda now: held.append(len(read) - len(held))  # noqa: E731
    prepare(tmp_path / "in", tmp_path / "out", tokenizer=tokenizer, workers=3, report=report)
    assert max(held) == most


@pytest.mark.parametrize("before", [None, "true"])
def test_the_threads_of_others_are_left_alone(tmp_path, tokenizer, monkeypatch, before):
    """``tokenizers`` reads from the environment whether it may start threads."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "")
    monkeypatch.delenv("TOKENIZERS_PARALLELISM") if before is None else monkeypatch.setenv("TOKENIZERS_PARALLELISM", before)
    meanwhile = []
    report = lambda now: meanwhile.append(os.environ["TOKENIZERS_PARALLELISM"])  # noqa: E731
    write_inputs(tmp_path / "in")
    prepare([tmp_path / "in"], tmp_path / "out", tokenizer=tokenizer, report=report)
    assert set(meanwhile) == {"false"} and os.environ.get("TOKENIZERS_PARALLELISM") == before


def test_a_tokenizer_is_trained_on_a_sample(tmp_path, monkeypatch):
    (tmp_path / "x.txt").write_text(make_text(0, 3000))
    (tmp_path / "y.jsonl").write_text(json.dumps({"text": make_text(1, 300)}) + "\nno json\n")
    inputs = [tmp_path / "x.txt", tmp_path / "y.jsonl"]
    done = prepare(inputs, tmp_path / "out", vocab_size=300, skip_invalid=True)
    assert done.vocab_size == 300 and done.totals.invalid == 1
    text = load_text(str(tmp_path / "out"))
    assert text.tokenizer.decode(np.concatenate([text.train, text.held_out])) == (
        make_text(0, 3000) + "<|endoftext|>" + make_text(1, 300) + "<|endoftext|>"
    )
    with pytest.raises(DataError, match=r"\[none\] too little text for the vocabulary"):
        prepare(inputs, tmp_path / "none", vocab_size=50_000, skip_invalid=True)
    for key, said in (("text", "line 2 of .*: Expecting value"), ("body", "line 1 of .*: no 'body'")):
        for given in (inputs, inputs[::-1]):
            with pytest.raises(DataError, match=rf"\[y.jsonl\] {said}"):
                prepare(given, tmp_path / "none", vocab_size=300, key=key)
    assert not list(tmp_path.glob("none*"))


# ---- going on


class Stop(BaseException):
    pass


def stopped_after(blocks, error=KeyboardInterrupt):
    def report(progress):
        nonlocal blocks
        blocks -= 1
        if blocks < 0:
            raise error

    return report


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])  # SystemExit: SIGTERM
def test_interrupted_and_gone_on_with(tmp_path, tokenizer, small, error):
    write_inputs(tmp_path / "in")
    prepare([tmp_path / "in"], tmp_path / "whole", tokenizer=tokenizer)
    runs = 0
    while True:
        runs += 1
        try:
            prepare(
                [tmp_path / "in"],
                tmp_path / "parts",
                tokenizer=tokenizer,
                workers=1 + runs % 3,
                report=stopped_after(4 + runs % 7, error),
            )
            break
        except error:
            assert leftovers(tmp_path) == [".parts.partial"] and not (tmp_path / "parts.idx").exists()
    assert runs > 10 and pair(tmp_path / "parts") == pair(tmp_path / "whole") and leftovers(tmp_path) == []


def test_interrupted_between_two_files(tmp_path, tokenizer, small):
    (tmp_path / "in").mkdir()
    texts = [letter * 50 for letter in "ab"]  # a block each
    for text in texts:
        (tmp_path / "in" / f"{text[0]}.txt").write_text(text)
    (tmp_path / "in" / "c.jsonl").write_text('{"text": "gamma"}\n{\n')
    for _ in texts:
        with pytest.raises(KeyboardInterrupt):
            prepare(tmp_path / "in", tmp_path / "x", tokenizer=tokenizer, report=stopped_after(0))
    with pytest.raises(DataError, match=r"line 2 of .*c.jsonl"):
        prepare(tmp_path / "in", tmp_path / "x", tokenizer=tokenizer)
    prepare(tmp_path / "in", tmp_path / "x", tokenizer=tokenizer, skip_invalid=True)
    assert found(tmp_path / "x") == expected(tokenizer, [*texts, "gamma"])


def test_it_is_saved_every_so_many_seconds(tmp_path, tokenizer, small, monkeypatch):
    write_inputs(tmp_path / "in")
    clock, saved, state = [100], [], tmp_path / ".x.partial" / "state.json"
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def report(progress):
        clock[0] += 1
        saved.append(state.exists() and json.loads(state.read_text())["totals"]["text_bytes"])

    prepare([tmp_path / "in"], tmp_path / "x", tokenizer=tokenizer, save_every_s=3, report=report)
    assert saved[0] is False and [len(list(same)) for _, same in itertools.groupby(saved[:12])] == [3, 3, 3, 3]


@pytest.mark.parametrize("last", [1, 5])
def test_interrupted_when_tokens_were_written_of_which_nothing_is_noted_yet(tmp_path, tokenizer, small, monkeypatch, last):
    write_inputs(tmp_path / "in")
    prepare([tmp_path / "in"], tmp_path / "whole", tokenizer=tokenizer)
    write, written = module.TokenWriter.write, []

    def stop(*given):
        write(*given)
        written.append(given)
        if len(written) == last:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module.TokenWriter, "write", stop)
        prepare([tmp_path / "in"], tmp_path / "parts", tokenizer=tokenizer, save_every_s=0)
    names = {path.name for path in (tmp_path / ".parts.partial").iterdir()}
    assert {"run.json", "tokenizer.json"} < names and ("state.json" in names) == (last > 1)
    prepare([tmp_path / "in"], tmp_path / "parts", tokenizer=tokenizer)
    assert pair(tmp_path / "parts") == pair(tmp_path / "whole")


def test_ctrl_c_on_a_full_disk_is_told_as_one(tmp_path, tokenizer, small, monkeypatch):
    write_inputs(tmp_path / "in")
    write_whole = files.write_whole

    def full(path):
        if path.name == "state.json":
            raise DataError(f"[output] cannot write {path}: No space left on device")
        return write_whole(path)

    monkeypatch.setattr(files, "write_whole", full)
    with pytest.raises(KeyboardInterrupt):
        prepare([tmp_path / "in"], tmp_path / "x", tokenizer=tokenizer, report=stopped_after(2))


@pytest.mark.parametrize("removed", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("given", [True, False])
def test_stopped_when_the_last_file_had_its_name(tmp_path, tokenizer, small, monkeypatch, removed, given):
    """So many of the run's own files were gone by then."""
    write_inputs(tmp_path / "in")
    options = {"tokenizer": tokenizer} if given else {"vocab_size": 300}
    whole = prepare([tmp_path / "in"], tmp_path / "whole", **options)
    unlink, rmdir, left = Path.unlink, Path.rmdir, removed

    def stop(really):
        def remove(path, *rest, **named):
            nonlocal left
            if path.name in ("documents", "lengths", "run.json", "state.json", ".x.partial") and path.exists():
                if left == 0:
                    raise Stop
                left -= 1
            really(path, *rest, **named)

        return remove

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(Path, "unlink", stop(unlink))
        patch.setattr(Path, "rmdir", stop(rmdir))
        prepare([tmp_path / "in"], tmp_path / "x", **options)
    if removed < 3:
        again = prepare([tmp_path / "in"], tmp_path / "x", **options)
        assert (again.totals, again.vocab_size) == (whole.totals, whole.vocab_size) and leftovers(tmp_path) == []
    else:  # then it has ended
        with pytest.raises(DataError, match=r"x\.bin exists"):
            prepare([tmp_path / "in"], tmp_path / "x", **options)
    assert pair(tmp_path / "x") == pair(tmp_path / "whole")


def test_what_changed_is_refused_and_restart_drops_it(tmp_path, tokenizer, small, monkeypatch):
    write_inputs(tmp_path / "in")

    def go(**changes):
        given = {
            "inputs": [tmp_path / "in"],
            "output": tmp_path / "x",
            "tokenizer": tokenizer,
            "report": stopped_after(2),
            **changes,
        }
        prepare(**given)

    with pytest.raises(KeyboardInterrupt):
        go()
    other = tmp_path / "other.json"
    other.write_text(tokenizer.read_text() + " ")
    for changes, said in (
        ({"tokenizer": other}, "--tokenizer"),
        ({"tokenizer": None, "vocab_size": 300}, "--tokenizer"),
        ({"key": "body"}, "--key"),
        ({"end_of_text": None}, "--end_of_text"),
        ({"inputs": [tmp_path / "in" / "a b.txt"]}, "the files are others"),
        ({"inputs": [tmp_path / "in" / "c.jsonl"]}, "the files are others"),
    ):
        with pytest.raises(DataError, match=rf"has an unfinished run of something else: {said} \(as before, or --restart\)"):
            go(**changes)
    with (
        monkeypatch.context() as patch,
        pytest.raises(DataError, match=r"that another version of needle began \(.*--restart begins"),
    ):
        patch.setattr(module, "_FORMAT", module._FORMAT + 1)
        go()
    (tmp_path / "in" / "c.jsonl").write_text('{"text": "new"}')
    with pytest.raises(DataError, match=r"something else: .*c.jsonl has changed \("):
        go()
    go(restart=True, report=lambda progress: None)
    assert found(tmp_path / "x")[1] == expected(tokenizer, ["new"])[0] and leftovers(tmp_path) == []
    trained = {"tokenizer": None, "output": tmp_path / "y"}
    with pytest.raises(KeyboardInterrupt):
        go(**trained, vocab_size=270)
    with pytest.raises(DataError, match=r"something else: --vocab_size \("):
        go(**trained, vocab_size=271)


def test_what_could_not_begin_is_not_in_the_way_of_a_corrected_command(tmp_path, tokenizer, small):
    (tmp_path / "x.jsonl").write_text('{"body": "one"}\n')
    with pytest.raises(DataError, match="no 'text'"):
        prepare(tmp_path / "x.jsonl", tmp_path / "y", tokenizer=tokenizer)
    assert leftovers(tmp_path) == []
    assert prepare(tmp_path / "x.jsonl", tmp_path / "y", tokenizer=tokenizer, key="body").totals.documents == 1


def test_what_a_run_left_may_be_damaged(tmp_path, tokenizer, small):
    write_inputs(tmp_path / "in")
    given = (tmp_path / "in", tmp_path / "x")
    for name in ("run.json", "state.json"):
        with pytest.raises(KeyboardInterrupt):
            prepare(*given, tokenizer=tokenizer, report=stopped_after(2), save_every_s=0)
        kept = (tmp_path / ".x.partial" / name).read_bytes()
        for damaged in (b"", b"[]", b"{}", kept.replace(b":", b": 1, ", 1), b'{"totals": 3, "skipped": 1, "sources": [1]}'):
            (tmp_path / ".x.partial" / name).write_bytes(damaged)
            with pytest.raises(DataError, match=rf"\[output\] cannot go on: .*{name}: .* \(--restart begins again\)"):
                prepare(*given, tokenizer=tokenizer)
        as_written = json.loads(kept)
        for field in {"run.json": ("skipped",), "state.json": ("totals", "place", "writer")}[name]:
            empty = type(as_written[field])()
            numbers = ("1", -1, None, 0.5, 1 << 70) if field in ("totals", "writer") else ()
            parts = [{**as_written[field], "tokens": n} for n in numbers]
            lists = [[[]], ["x", 0, 1], [-1], [5], [9] * 9]
            for wrong in (None, 3, "x", {"x": 1}, *lists, *parts, *([empty] if name == "state.json" else ())):
                (tmp_path / ".x.partial" / name).write_text(json.dumps({**as_written, field: wrong}))
                with pytest.raises(
                    DataError, match=rf"\[output\] cannot go on: .*{name}: {field} is .* \(--restart begins again\)"
                ):
                    prepare(*given, tokenizer=tokenizer)
        (tmp_path / ".x.partial" / name).unlink()
        (tmp_path / ".x.partial" / name).mkdir()
        with pytest.raises(DataError, match=rf"\[output\] cannot go on: .*{name}: Is a directory \(--restart begins again\)"):
            prepare(*given, tokenizer=tokenizer)
        (tmp_path / ".x.partial" / name).rmdir()
        (tmp_path / ".x.partial" / name).write_bytes(kept)
    prepare(*given, tokenizer=tokenizer)
    prepare(str(tmp_path / "in"), tmp_path / "y", tokenizer=tokenizer)
    assert pair(tmp_path / "x") == pair(tmp_path / "y")


def test_what_is_left_of_a_run_that_was_being_dropped_is_none(tmp_path, tokenizer, small):
    write_inputs(tmp_path / "in")
    with pytest.raises(KeyboardInterrupt):
        prepare([tmp_path / "in"], tmp_path / "x", tokenizer=tokenizer, report=stopped_after(4))
    (tmp_path / ".x.partial" / "run.json").unlink()  # which goes first; a kill then left the rest
    (tmp_path / "one.txt").write_text("alpha")
    prepare([tmp_path / "one.txt"], tmp_path / "x", tokenizer=tokenizer)
    assert found(tmp_path / "x") == expected(tokenizer, ["alpha"]) and leftovers(tmp_path) == []


def test_a_run_that_cannot_be_dropped(tmp_path, tokenizer, monkeypatch):
    (tmp_path / "x.txt").write_text("alpha")
    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path / "x.txt", tmp_path / "out", tokenizer=tokenizer, report=stopped_after(0))

    def closed(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", closed)
    with pytest.raises(DataError, match=r"\[output\] cannot empty .*out.partial: Permission denied \(a writable folder\)"):
        prepare(tmp_path / "x.txt", tmp_path / "out", tokenizer=tokenizer, restart=True)
    left = os.listdir(tmp_path / ".out.partial")
    assert "state.json" in left and "run.json" not in left  # without which the rest is not taken for a run


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda path: path.write_text(path.read_text() + "x"), "changed while it was read"),
        (lambda path: path.unlink(missing_ok=True), "changed while it was read"),
        (lambda path: path.write_bytes(b"\xff" * 30_000), "not UTF-8 text"),
    ],
    ids=["more", "gone", "no text"],
)
def test_a_file_that_changes_meanwhile(tmp_path, tokenizer, small, change, said):
    small(2000, 7, 5000)
    (tmp_path / "x.txt").write_text(make_text(0, 3000))
    report = lambda progress: change(tmp_path / "x.txt")  # noqa: E731
    with pytest.raises(DataError, match=rf"\[x.txt\] {said}"):
        prepare([tmp_path / "x.txt"], tmp_path / "out", tokenizer=tokenizer, report=report)
    assert not (tmp_path / "out.idx").exists()


def test_a_file_that_is_gone_before_it_is_looked_at(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(text_blocks, "walk", lambda *_: [tmp_path / "x.txt"])
    with pytest.raises(DataError, match=r"\[inputs\] no such file any more: .*x.txt \(files that stay as they are\)"):
        prepare(tmp_path, tmp_path / "out", tokenizer=tokenizer)


def test_what_is_there_stays_until_the_new_one_is_whole(tmp_path, tokenizer, small):
    write_inputs(tmp_path / "in")
    (tmp_path / "one.txt").write_text("alpha")
    prepare([tmp_path / "one.txt"], tmp_path / "x", tokenizer=tokenizer)
    old = pair(tmp_path / "x")
    with pytest.raises(DataError, match=r"\[output\] .*x.bin exists \(accepted: another name, or --overwrite\)"):
        prepare([tmp_path / "in"], tmp_path / "x", tokenizer=tokenizer)
    with pytest.raises(KeyboardInterrupt):
        prepare([tmp_path / "in"], tmp_path / "x", tokenizer=tokenizer, overwrite=True, report=stopped_after(3))
    assert pair(tmp_path / "x") == old
    prepare([tmp_path / "in"], tmp_path / "x", tokenizer=tokenizer, overwrite=True)
    assert pair(tmp_path / "x") != old and len(found(tmp_path / "x")) == 6 and leftovers(tmp_path) == []


def test_what_was_put_there_during_a_run_stays(tmp_path, tokenizer, small):
    write_inputs(tmp_path / "in")
    with pytest.raises(KeyboardInterrupt):
        prepare([tmp_path / "in"], tmp_path / "x", tokenizer=tokenizer, report=stopped_after(3))
    (tmp_path / "x.bin").write_bytes(b"somebody's")
    with pytest.raises(DataError, match=r"\[output\] .*x.bin exists \(accepted: another name, or --overwrite\)"):
        prepare([tmp_path / "in"], tmp_path / "x", tokenizer=tokenizer)
    assert (tmp_path / "x.bin").read_bytes() == b"somebody's" and leftovers(tmp_path) != []
    (tmp_path / "x.bin").unlink()
    assert prepare([tmp_path / "in"], tmp_path / "x", tokenizer=tokenizer).totals.documents == 6


def test_who_reads_the_tokens_knows_what_ends_a_document(tmp_path, tokenizer):
    (tmp_path / "one.txt").write_text(make_text(1, 500))
    for end in ("alpha", "<|endoftext|>", None, "beta", " " * 4):  # the last is none of the model's, but added to them
        made = prepare([tmp_path / "one.txt"], tmp_path / "x", tokenizer=tokenizer, end_of_text=end, overwrite=True)
        for given in (None, tokenizer):
            text = load_text(str(made.prefix), tokenizer=given)
            assert text.tokenizer.end_of_text == (end and text.tokenizer.tokenizer.token_to_id(end))
        if end is not None:
            assert text.held_out[-1] == text.tokenizer.end_of_text
    prepare([tmp_path / "one.txt"], tmp_path / "y", tokenizer=tokenizer)
    (tmp_path / "y.tokenizer_config.json").write_text('{"eos_token": "mine"}')
    for ending in (".bin", ".idx", ".tokenizer.json"):
        (tmp_path / f"y{ending}").unlink()
    with pytest.raises(DataError, match=r"y.tokenizer_config.json exists"):
        prepare([tmp_path / "one.txt"], tmp_path / "y", tokenizer=tokenizer)


def test_what_is_made_among_the_texts_is_none_of_them(tmp_path, tokenizer, small):
    folder = tmp_path / "in"
    write_inputs(folder)
    prepare([folder], folder / "x", tokenizer=tokenizer)
    first = pair(folder / "x")
    with pytest.raises(KeyboardInterrupt):
        prepare([folder], folder / "x", tokenizer=tokenizer, overwrite=True, report=stopped_after(8))
    (folder / "x.bin").unlink()  # the run that goes on finds other files of its own than the one before
    prepare([folder], folder / "x", tokenizer=tokenizer)
    assert pair(folder / "x") == first and len(found(folder / "x")) == 6
    (tmp_path / "link").symlink_to(folder)
    prepare([tmp_path / "link"], folder / "x", tokenizer=tokenizer, overwrite=True)
    assert pair(folder / "x") == first


def test_a_tokenizer_that_lies_where_one_would_be_made_stays(tmp_path, tokenizer):
    beside = tmp_path / "x.tokenizer.json"
    beside.write_bytes(tokenizer.read_bytes())
    (tmp_path / "one.txt").write_text(make_text(1, 2000))
    with pytest.raises(DataError, match=r"\[output\] .*x.tokenizer.json exists \(accepted: another name, or --overwrite\)"):
        prepare([tmp_path / "one.txt"], tmp_path / "x", vocab_size=257)
    assert beside.read_bytes() == tokenizer.read_bytes() and leftovers(tmp_path) == []
    other = tmp_path / "other.json"  # as large and as old
    other.write_text(tokenizer.read_text().replace("<|endoftext|>", "<|ENDOFTEXT|>"))
    os.utime(other, ns=(beside.stat().st_mtime_ns,) * 2)
    with pytest.raises(DataError, match=r"\[output\] .*x.tokenizer.json exists"):
        prepare([tmp_path / "one.txt"], tmp_path / "x", tokenizer=other, end_of_text=None)
    for given in (beside, tokenizer):  # itself, or its like
        prepare([tmp_path / "one.txt"], tmp_path / "x", tokenizer=given)
        assert beside.read_bytes() == tokenizer.read_bytes()
        (tmp_path / "x.bin").unlink()
        (tmp_path / "x.idx").unlink()


def test_a_bad_line_can_be_left_out_by_the_run_that_goes_on(tmp_path, tokenizer, small):
    good = [json.dumps({"text": make_text(i, 20)}) for i in range(6)]
    (tmp_path / "x.jsonl").write_text("\n".join([*good[:3], '{"text": "half', *good[3:]]))
    with pytest.raises(DataError, match=r"\[x.jsonl\] line 4 of .*x.jsonl: Unterminated string"):
        prepare([tmp_path / "x.jsonl"], tmp_path / "out", tokenizer=tokenizer)
    done = prepare([tmp_path / "x.jsonl"], tmp_path / "out", tokenizer=tokenizer, skip_invalid=True)
    assert found(tmp_path / "out") == expected(tokenizer, [make_text(i, 20) for i in range(6)]) and done.totals.invalid == 1


# ---- bad input


@pytest.mark.parametrize(
    "line, said",
    [
        (b"{", "Expecting property name"),
        (b"[1]", "no object"),
        (b'{"body": "x"}', "no 'text'"),
        (b'{"text": null}', "no text under 'text'"),
        (b'{"text": ["x"]}', "no text under 'text'"),
        (b'{"text": 3}', "no text under 'text'"),
        (b'{"text": "\xff"}', "can't decode byte 0xff"),
        (b'{"text": "\\ud800"}', "surrogates not allowed"),
        (b"[" * 100_000, "nested too deeply"),
        ('{"text": "x"}'.encode("utf-16-le"), "Expecting property name"),
        ('{"text": "x"}'.encode("utf-16"), "can't decode byte 0xff"),
        (b'{"text": "x", "other": "\xed\xa0\x80"}', "can't decode byte 0xed"),
    ],
)
def test_bad_lines(tmp_path, tokenizer, line, said):
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "good"}\n\n' + line + b'\n{"text": "last"}\n')
    with pytest.raises(DataError) as info:
        prepare([tmp_path / "x.jsonl"], tmp_path / "out", tokenizer=tokenizer)
    assert "[x.jsonl] line 3 of " in str(info.value) and said in str(info.value) and "\n" not in str(info.value)
    done = prepare([tmp_path / "x.jsonl"], tmp_path / "out", tokenizer=tokenizer, skip_invalid=True)
    assert found(done.prefix) == expected(tokenizer, ["good", "last"]) and done.totals.invalid == 1


def test_lines_may_begin_with_a_byte_order_mark(tmp_path, tokenizer):
    (tmp_path / "x.jsonl").write_text('\ufeff{"text": "first"}\n\ufeff{"text": "last"}\n')  # two files in one
    done = prepare([tmp_path / "x.jsonl"], tmp_path / "out", tokenizer=tokenizer)
    assert found(done.prefix) == expected(tokenizer, ["first", "last"])


@pytest.mark.parametrize(
    "content, said",
    [
        (b"alpha \xff", "not UTF-8 text: invalid start byte at byte 6 of"),
        (b"\x80", "not UTF-8 text: invalid start byte at byte 0 of"),
        (b"a" * 99 + "中".encode()[:2], "not UTF-8 text: unexpected end of data at byte 99 of"),
        ("中".encode() * 90 + b"\xff alpha", "not UTF-8 text: invalid start byte at byte 270 of"),
        ("中".encode() * 50 + b"\0", "binary data: byte 150 of"),
    ],
)
def test_what_is_no_text(tmp_path, tokenizer, small, content, said):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "bad.txt").write_bytes(content)
    for inputs in ([folder / "bad.txt"], [folder]):
        with pytest.raises(DataError, match=said if inputs == [folder / "bad.txt"] else "no text: 1 files, all of them"):
            prepare(inputs, tmp_path / "out", tokenizer=tokenizer)
        assert leftovers(tmp_path) == []
    good = "a" + " 😀" * 99  # one of them lies at the end of what is read at a time
    (folder / "good.txt").write_text(good)
    done = prepare([folder], tmp_path / "out", tokenizer=tokenizer)  # in a folder it is left out
    assert found(done.prefix) == expected(tokenizer, [good]) and done.skipped == [folder / "bad.txt"]


@pytest.mark.parametrize("block", [50, 3000])
def test_lines_that_are_too_long(tmp_path, tokenizer, small, monkeypatch, block):
    monkeypatch.setattr(text_blocks, "_LINE_BYTES", 1000)
    small(block)
    good, long = [make_text(i, 20) for i in range(9)], json.dumps({"text": "a " * 10_000})
    lines = [json.dumps({"text": text}) for text in good]
    (tmp_path / "x.jsonl").write_text("\n".join([*lines[:3], long, *lines[3:6], "{", long + " " * 5000, long, *lines[6:]]))
    (tmp_path / "y.jsonl").write_text(long)  # its line does not end
    inputs = [tmp_path / "x.jsonl", tmp_path / "y.jsonl"]
    with pytest.raises(DataError, match=r"\[x.jsonl\] line 4 of .*x.jsonl is too long \(.*--skip_invalid leaves such lines out\)"):
        prepare(inputs, tmp_path / "out", tokenizer=tokenizer)
    done = prepare(inputs, tmp_path / "out", tokenizer=tokenizer, skip_invalid=True)
    assert found(done.prefix) == expected(tokenizer, good) and done.totals.invalid == 5
    assert done.totals.text_bytes == sum(path.stat().st_size for path in inputs)
    raw = inputs[0].read_bytes()
    with open(inputs[0], "rb") as file:
        source = text_blocks.Source(inputs[0], 0, 0)
        pieces = [piece for piece, _ in text_blocks._lines(file, text_blocks.Place(0, 0, 1), source, skip_invalid=True)]
    assert all(piece.at.line == 1 + raw.count(b"\n", 0, piece.at.offset) for piece in pieces)
    longest = json.dumps({"text": "alpha"}).ljust(block + 999) + "\n"
    (tmp_path / "z.jsonl").write_text(longest + json.dumps({"text": "beta"}))
    prepare(tmp_path / "z.jsonl", tmp_path / "z", tokenizer=tokenizer)
    assert found(tmp_path / "z") == expected(tokenizer, ["alpha", "beta"])
    assert sum(len(piece.raw) for piece in pieces) < 9 * 1000 < sum(piece.left_out for piece in pieces)  # the rest is not held


def test_compressed_files_that_are_damaged(tmp_path, tokenizer):
    whole = gzip.compress(make_text(0, 2000).encode())
    for content, said in (
        (whole[:-20], "ended before"),
        (b"no gzip", "Not a gzipped file"),
        (whole[:50] + b"xxx" + whole[53:], ""),
    ):
        (tmp_path / "x.txt.gz").write_bytes(content)
        with pytest.raises(DataError, match=rf"\[x.txt.gz\] .*{said}"):
            prepare([tmp_path / "x.txt.gz"], tmp_path / "out", tokenizer=tokenizer)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text(make_text(0, 2000))
    for content, said in ((whole[:-20], "ended before"), (whole[:-8] + bytes(8), "CRC check failed")):
        (tmp_path / "in" / "x.txt.gz").write_bytes(content)
        with pytest.raises(DataError, match=rf"\[x.txt.gz\] .*{said}"):  # it is text, of which some would be missing
            prepare([tmp_path / "in"], tmp_path / "out", tokenizer=tokenizer)


def test_lines_that_cannot_be_read_are_found_before_the_work(tmp_path, tokenizer, small, monkeypatch):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.txt").write_text(make_text(0, 2000))
    (folder / "b.jsonl").write_text('{"text": "alpha"}')
    (folder / "c.jsonl.gz").write_bytes(b"no gzip")
    report = lambda now: pytest.fail("it has begun")  # noqa: E731

    def closed(path, *rest):
        if Path(path).name == "b.jsonl":
            raise PermissionError(13, "Permission denied", str(path))
        return open(path, *rest)

    for inputs in ([folder], [folder / "a.txt", folder / "c.jsonl.gz"]):
        with pytest.raises(DataError, match=r"\[c.jsonl.gz\] cannot read .*: Not a gzipped file"):
            prepare(inputs, tmp_path / "out", tokenizer=tokenizer, report=report)
    monkeypatch.setattr(text_blocks, "open", closed, raising=False)
    for inputs in ([folder], [folder / "a.txt", folder / "b.jsonl"]):
        with pytest.raises(DataError, match=r"\[b.jsonl\] cannot read .*b.jsonl: Permission denied"):
            prepare(inputs, tmp_path / "out", tokenizer=tokenizer, report=report)
    assert leftovers(tmp_path) == []


def test_other_bad_input(tmp_path, tokenizer):
    good, made = tmp_path / "x.txt", {"tokenizer": tokenizer}
    good.write_text("alpha")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "empty" / "self").symlink_to(tmp_path / "empty")
    for inputs, output, settings, said in (
        ([tmp_path / "none"], "out", made, r"\[inputs\] no such file or folder: "),
        ([tmp_path / "loop"], "out", made, r"\[inputs\] no such file or folder: "),
        ([tmp_path / "empty"], "out", made, r"\[inputs\] no files: "),
        ([tmp_path / "empty.txt"], "out", made, r"\[inputs\] no text: 1 files, 1 empty documents"),
        ([], "out", made, r"\[inputs\] none are given"),
        ([good], "out", {}, r"\[tokenizer\] one of --tokenizer and --vocab_size"),
        ([good], "out", {**made, "vocab_size": 300}, r"\[vocab_size\] has no meaning with --tokenizer"),
        ([good], "out", {"tokenizer": good}, r"\[tokenizer\] not a tokenizer file"),
        ([good], "out", {"vocab_size": 5}, r"\[vocab_size\] too small: 5"),
        ([good], "out", {"vocab_size": 10**12}, r"\[vocab_size\] too large: 1000000000000 \(1048576 or less\)"),
        ([""], "out", made, r"\[path\] is empty"),
        ([good], "out", {"tokenizer": ""}, r"\[path\] is empty"),
        (["~nobody.of.that.name/x"], "out", made, r"\[inputs\] no such file or folder: '~nobody"),
        ([good], "out", {"tokenizer": "~nobody.of.that.name/x"}, r"\[tokenizer\] cannot read ~nobody"),
        ([good], "out", {**made, "workers": 0}, r"\[workers\] is 0 \(accepted: 1 or more\)"),
        ([good], "out", {**made, "end_of_text": "</s>"}, r"\[end_of_text\] the tokenizer has no '</s>'"),
        ([good], "out", {"vocab_size": 300, "end_of_text": "</s>"}, r"\[end_of_text\] a tokenizer that is trained .* '</s>' \(<"),
        ([good], "out", {**made, "end_of_text": os.fsdecode(b"\xff")}, r"\[end_of_text\] the tokenizer has no '.udcff'"),
        ([good], "empty", made, r"\[output\] no name for files"),
        ([good], "new/", made, r"\[output\] no name for files"),
        ([good], "new\0", made, r"\[output\] no name for files"),
        ([good], "x.txt/out", made, r"\[output\] cannot make .*Not a directory"),
    ):
        with pytest.raises(DataError, match=said) as info:
            prepare(inputs, f"{tmp_path}/{output}", **settings)
        assert "\n" not in str(info.value)
    with pytest.raises(DataError, match=r"\[output\] no name for files: ''"):
        prepare([good], "", **made)
    (tmp_path / "new.idx").mkdir()
    with pytest.raises(DataError, match=r"\[output\] .*new.idx is a folder \(another name\)"):
        prepare([good], tmp_path / "new", overwrite=True, **made)


def test_two_runs_of_one_name(tmp_path, tokenizer, small):
    write_inputs(tmp_path / "in")
    inside, go_on = threading.Event(), threading.Event()

    def wait(progress):
        inside.set()
        go_on.wait(60)

    first = threading.Thread(
        target=prepare, args=([tmp_path / "in"], tmp_path / "x"), kwargs={"tokenizer": tokenizer, "report": wait}
    )
    first.start()
    try:
        assert inside.wait(60)
        with pytest.raises(DataError, match=r"\[output\] another process is writing .*x \(another name\)"):
            prepare([tmp_path / "in"], tmp_path / "x", tokenizer=tokenizer)
    finally:
        go_on.set()
        first.join()
    assert len(found(tmp_path / "x")) == 6
    (tmp_path / ".y.partial").mkdir()
    with files.alone_in(tmp_path / ".y.partial", ""):  # as by one that has just begun
        with pytest.raises(DataError, match="another process is writing"):
            prepare([tmp_path / "in"], tmp_path / "y", tokenizer=tokenizer)
        assert (tmp_path / ".y.partial").is_dir()


# ---- the app


def command(*arguments):
    return [sys.executable, "apps/prepare_data.py", *map(str, arguments)]


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "python")}


def run(*arguments, **kwargs):
    return subprocess.run(command(*arguments), cwd=ROOT, capture_output=True, text=True, env=ENVIRONMENT, **kwargs)


def test_the_app(app, tmp_path, tokenizer):
    texts = write_inputs(tmp_path / "in put")
    (tmp_path / "in put" / "f.png").write_bytes(b"\x89PNG\0")
    done = run(tmp_path / "in put", "--tokenizer", tokenizer, "--output", tmp_path / "out put" / "x", "--workers", 2)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert "x.bin: 6 documents, " in done.stdout and "left out: 2 empty documents" in done.stdout
    assert (
        "left out: 1 files that are no text: " in done.stdout
        and f"train with: python apps/train_pythia.py --dataset '{tmp_path}/out put/x' --vocab_size" in done.stdout
    )
    assert found(tmp_path / "out put" / "x") == expected(tokenizer, texts)
    plain = app("prepare_data", tmp_path / "in put", "--tokenizer", tokenizer, "--output", tmp_path / "plain", "--no_end_of_text")
    assert plain.returncode == 0 and found(tmp_path / "plain") == expected(tokenizer, texts, ())
    for arguments, said in (
        (("--workers", 0), "[workers] is 0"),
        (("--workers", "two"), "argument --workers: invalid int value: 'two'"),
        (("--save_every", "-1"), "[save_every] is -1.0"),
        (("--save_every", "nan"), "[save_every] is nan"),
        (("--save_every", "inf"), "[save_every] is inf"),
        ((), "exists (accepted: another name, or --overwrite)"),
    ):
        flags = (tmp_path / "in put", "--tokenizer", tokenizer, "--output", tmp_path / "out put" / "x")
        done = app("prepare_data", *flags, *arguments)
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and said in done.stderr and done.stdout == ""


@pytest.mark.parametrize("given, missing", [((), "INPUT, --output"), (("x.txt",), "--output"), (("--output", "x"), "INPUT")])
def test_what_must_be_given(app, given, missing):
    done = app("prepare_data", *given)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert f"the following arguments are required: {missing} (" in done.stderr


def test_what_the_flags_ask_for(app, monkeypatch):
    import prepare_data

    asked = {}

    def made(inputs, output, **options):
        asked.update(options, inputs=inputs, output=output)
        return module.Prepared(Path("x"), module.Totals(), 300, [])

    monkeypatch.setattr(prepare_data, "prepare", made)
    plain = {"inputs": ["a", "b"], "output": "x", "tokenizer": None, "vocab_size": 300, "key": "text", "workers": 2}
    plain |= {"end_of_text": "<|endoftext|>", "overwrite": False, "restart": False, "skip_invalid": False, "save_every_s": 10.0}
    for flags, changes in (
        ((), {}),
        (("--key", "body", "--save_every", 3), {"key": "body", "save_every_s": 3.0}),
        (("--end_of_text", "</s>"), {"end_of_text": "</s>"}),
        (("--overwrite",), {"overwrite": True}),
        (("--restart",), {"restart": True}),
        (("--skip_invalid",), {"skip_invalid": True}),
    ):
        assert app("prepare_data", "a", "b", "--output", "x", "--vocab_size", 300, "--workers", 2, *flags).returncode == 0
        assert isinstance(asked.pop("report"), prepare_data.Bar) and asked == {**plain, **changes}


def test_what_was_left_out_is_said(app, tmp_path, tokenizer, small):
    folder = tmp_path / "in"
    write_inputs(folder)
    given = folder, "--tokenizer", tokenizer, "--output"
    said = app("prepare_data", *given, tmp_path / "plain").stdout.splitlines()
    assert re.fullmatch(rf"{tmp_path}/plain.bin: 6 documents, [\d,]+ tokens of [\d,]+ bytes in \d+\.\d s", said[0])
    train = f"train with: python apps/train_pythia.py --dataset {tmp_path}/%s --vocab_size {load_tokenizer(tokenizer).size}"
    assert said[1:] == ["left out: 2 empty documents", train % "plain"]
    for name in ("f.png", "g.png"):
        (folder / name).write_bytes(b"\x89PNG\0")
    (folder / "h.jsonl").write_text('{"body": "alpha"}\n{"text": "beta"}\n')
    (folder / "i.txt").write_text("中" * 500)
    assert app("prepare_data", *given, tmp_path / "more", "--skip_invalid").stdout.splitlines()[1:] == [
        "left out: 2 empty documents",
        "left out: 1 lines that are no object with a text",
        f"left out: 2 files that are no text: {folder}/f.png ...",
        "cut at 7 places of very long documents, where ids may not be those of the whole (docs/data.md)",
        train % "more",
    ]


SMALL_BLOCKS = (
    "import sys; sys.path.insert(0, 'apps'); from needle.data import text_blocks; "
    "text_blocks._BLOCK_BYTES = text_blocks.Cutter.least = 2000; import prepare_data; "
    "prepare_data.SECONDS_A_LINE = 1e9; sys.exit(prepare_data.main())"  # on stderr is only what goes wrong, however slow the machine
)


def test_killed_at_any_moment(tmp_path, tokenizer):
    """NEEDLE_TEST_KILLS: how many times. The pair is that of a run that nothing disturbed, with large blocks and one thread."""
    kills, rng, inside = int(os.environ.get("NEEDLE_TEST_KILLS", "3")), random.Random(0), 0
    folder, state = tmp_path / "in", tmp_path / ".parts.partial" / "state.json"
    folder.mkdir()
    for i in range(4):
        (folder / f"{i}.txt").write_text(make_text(i, 4000))
    (folder / "4.jsonl").write_text("".join(json.dumps({"text": make_text(i, 50)}) + "\n" for i in range(250 + 50 * kills)))
    flags = [folder, "--tokenizer", tokenizer, "--save_every", 0, "--output"]
    assert run(*flags, tmp_path / "whole", "--workers", 1).returncode == 0

    def tokens():
        return json.loads(state.read_text())["totals"]["tokens"] if state.exists() else 0

    for _ in range(kills):
        before = tokens()
        line = [sys.executable, "-c", SMALL_BLOCKS, *map(str, flags), str(tmp_path / "parts"), "--workers", "3"]
        with subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT) as process:
            while process.poll() is None and tokens() <= before:
                time.sleep(0.001)
            time.sleep(rng.uniform(0, 0.05))
            process.kill()
            _, complained = process.communicate()
        assert complained == b"" or b"parts.bin exists" in complained
        inside += state.exists()
    done = run(*flags, tmp_path / "parts", "--workers", 2)
    assert inside and (done.returncode == 0 or "parts.bin exists" in done.stderr), done.stderr
    assert pair(tmp_path / "parts") == pair(tmp_path / "whole") and leftovers(tmp_path) == []
    print(f"{kills} kills, {inside} of them with something to go on from")


def test_ctrl_c_says_how_to_go_on(tmp_path, tokenizer):
    text = make_text(0, 120_000)
    (tmp_path / "x.txt").write_text(text)
    flags = [tmp_path / "x.txt", "--tokenizer", tokenizer, "--output", tmp_path / "out", "--workers", 1, "--save_every", 0]
    line = [sys.executable, "-c", SMALL_BLOCKS, *map(str, flags)]  # after the first of them, most of the work is yet to come
    with subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT) as process:
        state = tmp_path / ".out.partial" / "state.json"  # Ctrl-C while tokens are written costs those since the last one
        while not state.exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        said, complained = process.communicate(timeout=120)
    assert process.returncode == 130 and said == "" and complained == "\nstopped; the same command goes on\n"
    assert json.loads(state.read_text())["totals"]["tokens"] > 0
    assert run(*flags).returncode == 0 and found(tmp_path / "out") == expected(tokenizer, [text])


def test_no_room(tmp_path, tokenizer):
    """Files above a size cannot be written, as on a full disk; afterwards there is room."""
    resource = pytest.importorskip("resource")
    (tmp_path / "x.txt").write_text(make_text(0, 60_000))
    flags = [tmp_path / "x.txt", "--tokenizer", tokenizer, "--output", tmp_path / "out", "--save_every", 0]
    room = 200_000
    done = run(*flags, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (room, room)))
    said = done.stderr.splitlines()[-1]  # a slow machine says before how far it is
    assert done.returncode == 2 and "cannot write" in said and "File too large" in said
    assert leftovers(tmp_path) == [".out.partial"] and not (tmp_path / "out.bin").exists()
    assert json.loads((tmp_path / ".out.partial" / "state.json").read_text())["totals"]["tokens"] > 0
    done = run(*flags)
    assert done.returncode == 0, done.stderr
    assert found(tmp_path / "out") == expected(tokenizer, [make_text(0, 60_000)])


def test_a_folder_that_cannot_be_written(tmp_path, tokenizer):
    (tmp_path / "x.txt").write_text("alpha")
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    if os.access(closed, os.W_OK):
        pytest.skip("this user may write everywhere")
    with pytest.raises(DataError, match=r"\[output\] cannot make .*: Permission denied"):
        prepare([tmp_path / "x.txt"], closed / "out", tokenizer=tokenizer)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_how_far_it_is_is_said_now_and_then(monkeypatch, capsys):
    """At the pace of this run: what those before have made took none of its time."""
    import prepare_data

    clock, said = [100], []
    monkeypatch.setattr(prepare_data, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    with prepare_data.Bar() as bar:
        for clock[0], tokens in ((100, 5000), (109, 6000), (110, 7000), (119, 8000), (120, 9000)):
            bar(module.Progress(tokens // 100, 300, module.Totals(text_bytes=1000 * tokens, tokens=tokens, documents=2)))
            said.append(capsys.readouterr().err)
    assert said == [
        "",
        "",
        "23.3 %  2 documents, 7,000 tokens, 200 tokens/s, 0.20 MB/s\n",
        "",
        "30.0 %  2 documents, 9,000 tokens, 200 tokens/s, 0.20 MB/s\n",
    ]


def test_a_bar_on_a_terminal(monkeypatch):
    import prepare_data

    pytest.importorskip("rich")
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    with prepare_data.Bar() as bar:
        bar(module.Progress(5, 10, module.Totals(tokens=7)))
    shown = sys.stderr.getvalue()
    assert "━" in shown and re.search(r"50\.0 % .*0 documents, 7 tokens, ", shown), shown
    assert shown.endswith("\x1b[2K"), shown  # it is gone at the end


@pytest.mark.parametrize("without", ["rich", "a terminal that can go back"])
def test_a_terminal_without_a_bar_gets_lines(monkeypatch, without):
    import prepare_data

    monkeypatch.setattr(prepare_data, "SECONDS_A_LINE", 0)
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm" if without == "rich" else "dumb")
    if without == "rich":
        monkeypatch.setitem(sys.modules, "rich.console", None)
    with prepare_data.Bar() as bar:
        bar(module.Progress(5, 10, module.Totals(tokens=7)))
    assert sys.stderr.getvalue().startswith("50.0 %  0 documents, 7 tokens")


def test_nothing_behind_a_link_in_the_place_of_a_runs_folder_is_removed(tmp_path, tokenizer):
    (tmp_path / "theirs" / "more").mkdir(parents=True)
    (tmp_path / "theirs" / "thesis.txt").write_text("long")
    (tmp_path / ".out.partial").symlink_to(tmp_path / "theirs")
    (tmp_path / "in.txt").write_text("hello")
    with pytest.raises(DataError, match=r"\[output\] .*\.out\.partial is a link"):
        prepare(tmp_path / "in.txt", tmp_path / "out", tokenizer=tokenizer)
    assert (tmp_path / "theirs" / "more").exists() and (tmp_path / "theirs" / "thesis.txt").exists()


def test_a_text_is_not_replaced_by_its_own_ids(tmp_path, tokenizer):
    (tmp_path / "a.bin").write_text("hello")
    with pytest.raises(DataError, match=r"\[inputs\] .*a\.bin is what the output would replace"):
        prepare(tmp_path / "a.bin", tmp_path / "a", tokenizer=tokenizer, overwrite=True)
    assert (tmp_path / "a.bin").read_text() == "hello"


def test_spaces_that_a_normalizer_joins_over_characters_of_no_width(tmp_path):
    """As SentencePiece's do: a zero-width space becomes a space, and of two spaces one is left."""
    made = tokenizers.Tokenizer(tokenizers.models.Unigram([("<unk>", 0), ("\u2581", -2), *((c, -3) for c in "abcdefgh")], 0))
    steps = [
        tokenizers.normalizers.Nmt(),
        tokenizers.normalizers.NFKC(),
        tokenizers.normalizers.Replace(tokenizers.Regex(" {2,}"), " "),
    ]
    made.normalizer, made.pre_tokenizer = tokenizers.normalizers.Sequence(steps), tokenizers.pre_tokenizers.Metaspace()
    made.add_special_tokens(["<|endoftext|>"])
    made.save(str(tmp_path / "tokenizer.json"))
    text = "abc\u200b def " * 20000
    (tmp_path / "in.txt").write_text(text)
    done = prepare(tmp_path / "in.txt", tmp_path / "out", tokenizer=tmp_path / "tokenizer.json")
    assert found(done.prefix) == expected(tmp_path / "tokenizer.json", [text], (made.token_to_id("<|endoftext|>"),))


def test_ids_that_int32_cannot_hold(tmp_path):
    with pytest.raises(DataError, match=r"ids up to 2147483648 \(accepted: below 2\^31\)"):
        TokenWriter(tmp_path, (1 << 31) + 1)
