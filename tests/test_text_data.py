"""Text to tokens to batches: what is held out, what is cached, what a batch holds, and what bad input says."""

import itertools
import json
import math
import os
import subprocess
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from needle.data import text as text_module
from needle.data import text_corpus, text_tokenizer, token_files
from needle.data.text import TokenBatches, load_text, unigram_entropy
from needle.data.text_corpus import Piece, load_corpus
from needle.data.text_tokenizer import TextTokenizer, _at_words, _to_learn_from, load_tokenizer
from needle.data.token_cache import read_tokens, write_tokens
from needle.errors import DataError
from needle.files import remove_abandoned, write_atomically

WORDS = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho sigma tau".split()


def make_text(seed, lines=200):
    rng = np.random.default_rng(seed)
    return "".join(" ".join(rng.choice(WORDS, 8)) + f" {seed}-{i}\n" for i in range(lines))


@pytest.fixture
def folder(tmp_path):
    """Forty files of text, one of them in a subfolder."""
    root = tmp_path / "texts"
    (root / "sub").mkdir(parents=True)
    for i in range(40):
        (root / ("sub" if i == 7 else "") / f"{i}.txt").write_text(make_text(i))
    return root


def whole_text(pieces):
    return "".join(part for piece in pieces for part in piece.texts("x"))


def cached_files(cache):
    return sorted(p.name for p in cache.rglob("*") if p.is_file())


# ---- corpora


def size(pieces):
    return sum(piece.stop - piece.start for piece in pieces)


def test_stdlib_is_this_pythons_source_without_tests_and_holds_out_whole_files(tmp_path):
    corpus = load_corpus("stdlib", cache_dir=tmp_path)
    train, held_out = ({piece.path for piece in pieces} for pieces in (corpus.train, corpus.held_out))
    assert not train & held_out
    assert all(piece.start == 0 and piece.stop == piece.path.stat().st_size for piece in corpus.train + corpus.held_out)
    assert not any({"test", "tests", "idle_test", "site-packages"} & set(path.parts) for path in train | held_out)
    assert any(path.name == "argparse.py" for path in train | held_out)
    assert not any(path.name.startswith("_sysconfigdata") for path in train | held_out)  # full of a machine's paths
    held, total = size(corpus.held_out), size(corpus.train + corpus.held_out)
    assert total > 5e6 and 0.03 < held / total < 0.08
    assert max(piece.stop for piece in corpus.held_out) < 0.3 * held
    assert load_corpus("stdlib", cache_dir=tmp_path) == corpus


def test_what_is_no_text_in_a_stdlib_is_left_out(folder, tmp_path, monkeypatch):
    for file in folder.rglob("*.txt"):
        file.rename(file.with_suffix(".py"))
    (folder / "binary.py").write_bytes(b"x = 1\0\xff\n" * 99)
    (folder / "LICENSE.txt").write_text(make_text(41))
    monkeypatch.setattr(text_corpus.sysconfig, "get_path", lambda name: str(folder))
    corpus = load_corpus("stdlib", cache_dir=tmp_path / "cache")
    assert {piece.path.name for piece in corpus.train + corpus.held_out} == {f"{i}.py" for i in range(40)}
    for file in folder.rglob("*.py"):
        file.unlink()
    with pytest.raises(DataError, match=rf"\[stdlib\] no Python source: {folder} has no .py files \(give a file or folder of text"):
        load_corpus("stdlib", cache_dir=tmp_path / "cache")


def test_folder_holds_out_whole_files_and_never_a_copy_of_one(folder, tmp_path):
    for file in list(folder.glob("*.txt")):
        (folder / f"copy-of-{file.name}").write_bytes(file.read_bytes())
    (folder / "picture.png").write_bytes(b"\x89PNG\0\0")
    (folder / "empty.txt").write_text("")
    for hidden in (folder / ".git" / "x.txt", folder / ".x.txt"):
        hidden.parent.mkdir(exist_ok=True)
        hidden.write_text("secret\n")
    (folder / "broken").symlink_to("nowhere")
    os.mkfifo(folder / "pipe")
    corpus = load_corpus(str(folder), cache_dir=tmp_path)
    assert len(corpus.train) + len(corpus.held_out) == 40
    assert corpus.skipped == (folder / "picture.png",)
    contents = [{piece.path.read_text() for piece in pieces} for pieces in (corpus.train, corpus.held_out)]
    assert contents[1] and not contents[0] & contents[1]


def test_a_folder_that_has_moved_holds_out_the_same_files(folder, tmp_path):
    before = load_corpus(str(folder), cache_dir=tmp_path)
    moved = folder.rename(tmp_path / "elsewhere")
    after = load_corpus(str(moved), cache_dir=tmp_path)
    for then, now in ((before.train, after.train), (before.held_out, after.held_out)):
        assert [piece.path.relative_to(folder) for piece in then] == [piece.path.relative_to(moved) for piece in now]
    assert after.key == before.key


@pytest.mark.parametrize("files", [200, 80])
def test_what_is_held_out_is_of_all_folders(tmp_path, files):
    """Not the first ones of the alphabet, which may be of a kind of their own."""
    for i in range(files):
        (tmp_path / f"{i // 20}").mkdir(exist_ok=True)
        (tmp_path / f"{i // 20}" / f"{i}.txt").write_text(f"{i:03} " * 25)
    corpus = load_corpus(str(tmp_path), cache_dir=tmp_path)
    assert len(corpus.held_out) == files // 20 and len({piece.path.parent for piece in corpus.held_out}) > 2


def test_the_current_folder(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    here, named = load_corpus(".", cache_dir=tmp_path), load_corpus(str(folder), cache_dir=tmp_path)
    assert (here.name, named.name, here.key) == (".", "texts", named.key)


def test_a_name_that_is_no_utf8(folder, tmp_path):
    named = (folder / "1.txt").rename(folder / os.fsdecode(b"caf\xe9.txt"))
    corpus = load_corpus(str(folder), cache_dir=tmp_path)
    assert named in {piece.path for piece in (*corpus.train, *corpus.held_out)}


@pytest.mark.parametrize("name", ["x" * 255, "\u8a71" * 85, "\U0001f642" * 63], ids=["one byte", "three bytes", "four bytes"])
def test_a_name_as_long_as_a_file_can_have(tmp_path, name):
    (tmp_path / name).write_text(make_text(0))
    text = load_text(str(tmp_path / name), cache_dir=tmp_path / "cache", vocab_size=300)
    assert text.name == name and len(text.train)


def test_two_files_hold_out_the_smaller(tmp_path):
    (tmp_path / "a.txt").write_text(make_text(0, 50))
    (tmp_path / "b.txt").write_text(make_text(1, 90))
    corpus = load_corpus(str(tmp_path), cache_dir=tmp_path)
    assert [p.path.name for p in corpus.train + corpus.held_out] == ["b.txt", "a.txt"]


@pytest.mark.parametrize("books", [1, 3])
def test_a_licence_beside_books_is_not_all_that_is_held_out(tmp_path, books):
    for i in range(books):
        (tmp_path / f"{i}.txt").write_text(make_text(i, 1000 + i))
    (tmp_path / "LICENSE").write_text("all rights reserved\n")
    corpus = load_corpus(str(tmp_path), cache_dir=tmp_path)
    assert [piece.path.name for piece in corpus.held_out] == ["LICENSE", "0.txt"]
    assert 0.04 < size(corpus.held_out) / size(corpus.train + corpus.held_out) < (0.06 if books == 1 else 0.35)
    whole = sorted(make_text(i, 1000 + i) for i in range(books))
    assert sorted(map(len, whole)) == sorted(
        sum(piece.stop - piece.start for piece in corpus.train + corpus.held_out if piece.path.name == f"{i}.txt")
        for i in range(books)
    )


@pytest.mark.parametrize(
    "text",
    [make_text(3), ("x" * 19 + "\n") * 21, "ein Wort über Größe " * 500, "é" * 5001],
    ids=["lines", "a line's end at the cut", "words", "é"],
)
def test_one_file_holds_out_its_end(tmp_path, text):
    file = tmp_path / "book.txt"
    file.write_text(text, encoding="utf-8")
    corpus = load_corpus(str(file), cache_dir=tmp_path)
    train, held_out = whole_text(corpus.train), whole_text(corpus.held_out)
    assert train + held_out == text
    assert 0.02 < len(held_out) / len(text) < 0.06
    assert "\n" not in text or train.endswith("\n")


def test_pieces_are_read_in_parts_without_loss(tmp_path):
    text = "\ufeff" + "".join(f"zeile {i} größer\r\n" for i in range(150_000))  # 3 MB, BOM, Windows line ends
    (tmp_path / "big.txt").write_bytes(text.encode())
    corpus = load_corpus(str(tmp_path / "big.txt"), cache_dir=tmp_path)
    parts = list(corpus.train[0].texts("x"))
    assert len(parts) > 2 and all(part.endswith("\n") for part in parts)
    assert whole_text(corpus.train + corpus.held_out) == text[1:].replace("\r\n", "\n")
    with open(tmp_path / "big.txt", "ab") as file:
        file.write(b"more")
    assert whole_text(corpus.train + corpus.held_out) == text[1:].replace("\r\n", "\n")
    (tmp_path / "big.txt").write_text("abc")  # shorter than it was
    assert list(itertools.islice(corpus.train[0].texts("x"), 3)) == ["abc", ""]
    (tmp_path / "big.txt").unlink()
    with pytest.raises(DataError, match=r"\[x\] cannot read .*big.txt: No such file or directory \(a readable file\)"):
        whole_text(corpus.train)


@pytest.mark.parametrize("most", [1, 2, 3, 5, 8])
def test_where_parts_end_changes_neither_line_ends_nor_what_is_said_of_bad_bytes(tmp_path, monkeypatch, most):
    monkeypatch.setattr(text_corpus, "_READ_BYTES", most)
    path = tmp_path / "x"
    for text in ("a\r\n\r\n\r\r\nb\r", "\ufeff" + "größer " * 3 + "\r\n中文\r\n"):
        path.write_bytes(text.encode())
        assert whole_text([Piece(path, 0, path.stat().st_size)]) == text.removeprefix("\ufeff").replace("\r\n", "\n")
        for bad, reason in ((b"\xff", "invalid start byte"), ("中".encode()[:2], "unexpected end of data")):
            path.write_bytes(text.encode() + bad)
            at = len(text.encode())
            for start in (0, len("\ufeff".encode())):
                with pytest.raises(DataError, match=rf"\[x\] not UTF-8 text: {reason} at byte {at} of {path} \("):
                    whole_text([Piece(path, start, path.stat().st_size)])


@pytest.mark.parametrize("name", ["x.jsonl", "x.ndjson", "x.jsonl.gz", "X.JSONL"])
def test_json_lines_are_left_to_prepare_data(folder, tmp_path, name):
    """As text they would be learnt with their keys and quotes."""
    (folder / name).write_text('{"text": "alpha"}\n' * 1000)
    for dataset in (folder / name, folder):
        said = rf"\[dataset\] no text but JSON lines: .*{name} \(python apps/prepare_data.py {dataset} --vocab_size N --output NAME"
        with pytest.raises(DataError, match=said):
            load_text(str(dataset), cache_dir=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_wikitext_from_a_local_folder(tmp_path):
    local = tmp_path / "data" / "wikitext-2"
    local.mkdir(parents=True)
    with pytest.raises(DataError, match=r"\[wikitext-2\] no train text in .*found nothing \(wiki.train.tokens"):
        load_corpus("wikitext-2", data_dir=tmp_path / "data", cache_dir=tmp_path)
    (local / "valid.txt").write_text(make_text(1))
    with pytest.raises(DataError, match=r"\[wikitext-2\] no train text in .*found valid.txt \(wiki.train.tokens"):
        load_corpus("wikitext-2", data_dir=tmp_path / "data", cache_dir=tmp_path)
    corpus = load_corpus(str(local), cache_dir=tmp_path)  # by its path a folder like any other
    assert whole_text(corpus.train + corpus.held_out) == make_text(1)
    (local / "wiki.train.tokens").write_text(make_text(0))
    (local / "test.txt").write_text(make_text(2))
    for name in ("wikitext-2", str(local)):
        corpus = load_corpus(name, data_dir=tmp_path / "data", cache_dir=tmp_path)
        assert whole_text(corpus.train) == make_text(0)
        assert whole_text(corpus.held_out) == make_text(1)


def test_wikitext_from_the_hub(tmp_path, monkeypatch):
    lines = {"train": make_text(0), "validation": make_text(1), "test": make_text(2)}
    splits = {name: {"text": text.splitlines(keepends=True)} for name, text in lines.items()}
    fake = types.SimpleNamespace(load_dataset=lambda path, name: splits)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    corpus = load_corpus("wikitext-2", data_dir=tmp_path / "data", cache_dir=tmp_path)
    assert whole_text(corpus.train) == lines["train"] and whole_text(corpus.held_out) == lines["validation"]
    corpus.train[0].path.unlink()  # as of a download that was killed
    assert load_corpus("wikitext-2", data_dir=tmp_path / "data", cache_dir=tmp_path) == corpus

    def offline(path, name):
        raise RuntimeError("no network\n  tried 5 times")

    fake.load_dataset = offline
    assert load_corpus("wikitext-2", data_dir=tmp_path / "data", cache_dir=tmp_path) == corpus
    with pytest.raises(DataError, match=r"\[wikitext-2\] .*no network tried 5 times; "):
        load_corpus("wikitext-2", data_dir=tmp_path / "data", cache_dir=tmp_path / "other")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"\[wikitext-2\] no local copy.*pip install datasets"):
        load_corpus("wikitext-2", data_dir=tmp_path / "data", cache_dir=tmp_path / "other")


# ---- tokens


def test_load_text_round_trips_and_is_cached(folder, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    first = load_text(str(folder), vocab_size=300, cache_dir=cache)
    assert first.tokenizer.size == first.vocab_size == 300
    assert isinstance(first.train, np.memmap) and first.train.dtype == np.uint16
    assert first.train.max() < 300
    end = "<|endoftext|>"
    for tokens, pieces in ((first.train, first.corpus.train), (first.held_out, first.corpus.held_out)):
        assert first.tokenizer.decode(tokens) == "".join(whole_text([piece]) + end for piece in pieces)
    assert cached_files(cache) == sorted(
        name + more for name in ("held_out.bin", "tokenizer.json", "train.bin") for more in ("", ".json")
    )

    def must_not_run(*args):
        raise AssertionError("tokenized again")

    monkeypatch.setattr(text_module, "train_tokenizer", must_not_run)
    monkeypatch.setattr(text_module, "write_tokens", must_not_run)
    second = load_text(str(folder), vocab_size=300, cache_dir=cache)
    np.testing.assert_array_equal(first.train, second.train)
    next(cache.rglob("tokenizer.json.json")).unlink()  # earlier versions had none, and the folder may take no files
    np.testing.assert_array_equal(load_text(str(folder), vocab_size=300, cache_dir=cache).train, first.train)
    with pytest.raises(AssertionError, match="tokenized again"):  # another vocabulary is another entry
        load_text(str(folder), vocab_size=301, cache_dir=cache)
    next(folder.glob("*.txt")).write_text(make_text(99))
    with pytest.raises(AssertionError, match="tokenized again"):  # and so is changed text
        load_text(str(folder), vocab_size=300, cache_dir=cache)


def test_training_the_tokenizer_is_deterministic_and_sees_no_held_out_text(folder, tmp_path):
    a = load_text(str(folder), vocab_size=320, cache_dir=tmp_path / "a")
    held = a.corpus.held_out[0].path
    held.write_text(held.read_text().replace("alpha", "omega"))
    b = load_text(str(folder), vocab_size=320, cache_dir=tmp_path / "b")
    (x,), (y,) = ((tmp_path / c).rglob("tokenizer.json") for c in "ab")
    assert x.read_bytes() == y.read_bytes()
    np.testing.assert_array_equal(a.train, b.train)


def test_given_tokenizer_file_and_larger_model_vocabulary(folder, tmp_path):
    load_text(str(folder), vocab_size=300, cache_dir=tmp_path / "c")
    (path,) = (tmp_path / "c").rglob("tokenizer.json")
    text = load_text(str(folder), tokenizer=path, vocab_size=70_000, cache_dir=tmp_path / "d")
    assert text.vocab_size == 70_000 and text.tokenizer.size == 300
    assert text.tokenizer.decode([*text.tokenizer.encode("alpha beta"), 69_999]) == "alpha beta"
    for of_the_tokenizer in (None, 300):
        assert load_text(str(folder), tokenizer=path, vocab_size=of_the_tokenizer, cache_dir=tmp_path / "d").vocab_size == 300
    with pytest.raises(DataError, match=r"\[vocab_size\] smaller than the tokenizer's: 299 \(300 or more\)"):
        load_text(str(folder), tokenizer=path, vocab_size=299, cache_dir=tmp_path / "d")
    path.write_text("{}")
    with pytest.raises(DataError, match=r"\[tokenizer\] not a tokenizer file"):
        load_tokenizer(path)
    with pytest.raises(DataError, match=r"\[tokenizer\] cannot read"):
        load_tokenizer(tmp_path / "absent.json")


def test_tokens_are_kept_for_a_tokenizer_however_its_file_is_written(folder, tmp_path):
    load_text(str(folder), vocab_size=300, cache_dir=tmp_path / "c")
    (path,) = (tmp_path / "c").rglob("tokenizer.json")
    spread = path.with_name("spread.json")
    spread.write_text(json.dumps(json.loads(path.read_text()), indent=2))
    for each in (path, spread):
        load_text(str(folder), tokenizer=each, cache_dir=tmp_path / "d")
    assert len(list((tmp_path / "d").rglob("train.bin"))) == 1
    for end in "ab":  # then other ids end the documents
        path.with_name("tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
        text = load_text(str(folder), tokenizer=path, cache_dir=tmp_path / "d")
        assert text.train[-1] == text.tokenizer.end_of_text == text.tokenizer.encode(end)[0]


def test_token_files_of_another_tokenizer(folder, tmp_path):
    """Ids would stand for other text. A tokenizer that only has more of them will do."""
    text = load_text(str(folder), vocab_size=300, cache_dir=tmp_path)
    write_tokens(tmp_path / "ids.bin", [np.array(text.train)], 300)
    made_with = tmp_path / "ids.tokenizer.json"
    made_with.write_text(text.tokenizer.to_json())
    text.tokenizer.tokenizer.add_tokens(["<one more>"])
    (tmp_path / "more.json").write_text(text.tokenizer.to_json())
    assert load_text(tmp_path / "ids.bin", tokenizer=tmp_path / "more.json").vocab_size == 301
    (tmp_path / "same.json").write_text(made_with.read_text())
    assert load_text(tmp_path / "ids.bin", tokenizer=tmp_path / "same.json").vocab_size == 300
    other = json.loads(made_with.read_text())
    a, b = list(other["model"]["vocab"])[5:7]
    vocab = other["model"]["vocab"]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    (tmp_path / "other.json").write_text(json.dumps(other))
    with pytest.raises(DataError, match=r"\[ids.bin\] its ids are those of ids.tokenizer.json, not of .*other.json"):
        load_text(tmp_path / "ids.bin", tokenizer=tmp_path / "other.json")
    made_with.write_text((tmp_path / "more.json").read_text())
    with pytest.raises(DataError, match=r"\[ids.bin\] its ids are those of ids.tokenizer.json, not of .*same.json"):
        load_text(tmp_path / "ids.bin", tokenizer=tmp_path / "same.json")


def test_a_home_and_where_there_is_none(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("NEEDLE_CACHE", raising=False)
    text = load_text("~/texts", vocab_size=300)
    (path,) = (tmp_path / ".cache" / "needle").rglob("tokenizer.json")
    path.rename(tmp_path / "t.json")
    write_tokens(tmp_path / "ids.bin", [np.array(text.train)], 300)
    assert len(load_text("~/ids.bin", tokenizer="~/t.json").train) > 0.9 * len(text.train)
    with pytest.raises(DataError, match=r"\[dataset\] unknown data set: '~nobody.of.that.name/x'"):
        load_text("~nobody.of.that.name/x")
    with pytest.raises(DataError, match=r"\[path\] '~\\x00' can be none: .*null byte"):
        load_text("~\0")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(DataError, match=r"\[NEEDLE_CACHE\] there is no home folder"):
        load_text(str(folder))


def test_a_tokenizer_that_would_cut_texts_off_or_fill_them_up(folder, tmp_path):
    """As files on the Hub often say: neither a corpus nor a prompt may lose text for it, or get a token before it."""
    tokenizers = pytest.importorskip("tokenizers")
    text = load_text(str(folder), vocab_size=300, cache_dir=tmp_path)
    text.tokenizer.tokenizer.enable_truncation(5)
    text.tokenizer.tokenizer.enable_padding(length=9)
    begin = ("<|endoftext|>", text.tokenizer.end_of_text)
    text.tokenizer.tokenizer.post_processor = tokenizers.processors.TemplateProcessing(f"{begin[0]} $A", special_tokens=[begin])
    (tmp_path / "cuts.json").write_text(text.tokenizer.to_json())
    again = load_text(str(folder), tokenizer=tmp_path / "cuts.json", cache_dir=tmp_path)
    np.testing.assert_array_equal(again.train, text.train)
    np.testing.assert_array_equal(again.held_out, text.held_out)
    assert again.tokenizer.decode(again.tokenizer.encode("alpha beta gamma delta")) == "alpha beta gamma delta"
    assert len(again.tokenizer.encode("")) == 0 and again.tokenizer.encode("").dtype == np.int64


def test_cutting_text_for_parallel_encoding_changes_no_id(folder, tmp_path):
    tokenizer = load_text(str(folder), vocab_size=320, cache_dir=tmp_path).tokenizer
    text = "\n\n  alpha beta\n\n\n\tgamma\r\n delta \n" * 50
    parts = _at_words(text, characters=10)
    assert len(parts) > 20 and "".join(parts) == text
    np.testing.assert_array_equal(np.concatenate([tokenizer.encode(p) for p in parts]), tokenizer.encode(text))


def test_newlines_that_are_of_one_word_with_a_full_stop_stay_with_it():
    """As in Llama 3's tokenizer."""
    tokenizers = pytest.importorskip("tokenizers")
    pre, made = tokenizers.pre_tokenizers, tokenizers.Tokenizer(tokenizers.models.BPE())
    words = pre.Split(tokenizers.Regex(r" ?\p{L}+|[^\s\p{L}]+[\r\n]*|\s+"), "isolated")
    made.pre_tokenizer = pre.Sequence([words, pre.ByteLevel(add_prefix_space=False, use_regex=False)])
    text = "alpha.\n\nbeta (gamma)\ndelta\nepsilon;\n" * 50
    made.train_from_iterator([text], tokenizers.trainers.BpeTrainer(vocab_size=300, show_progress=False))
    tokenizer, parts = TextTokenizer(made), _at_words(text, characters=10)
    assert len(parts) > 20 and "".join(parts) == text
    np.testing.assert_array_equal(np.concatenate([tokenizer.encode(p) for p in parts]), tokenizer.encode(text))


@pytest.mark.parametrize("size", [1, 7, 100])
def test_a_text_that_comes_in_parts_has_the_ids_of_the_whole(folder, tmp_path, monkeypatch, size):
    monkeypatch.setattr(_at_words, "__defaults__", (20,))
    tokenizer = load_text(str(folder), vocab_size=320, cache_dir=tmp_path).tokenizer
    text = "alpha beta\n    gamma\n\n\tdelta Größe \n" * 20
    parts = [text[i : i + size] for i in range(0, len(text), size)]
    found = list(tokenizer.encode_parts(iter(parts)))
    assert len(found) > 20
    np.testing.assert_array_equal(np.concatenate(found), tokenizer.encode(text))
    monkeypatch.setattr(text_tokenizer, "_LONGEST_WORD", 30)  # of a text that is one word no more is held
    found = list(tokenizer.encode_parts(["alpha_beta."] * 50))
    assert max(map(len, found)) <= 44 and tokenizer.decode(np.concatenate(found)) == "alpha_beta." * 50


def test_a_tokenizer_that_ends_no_word_where_text_is_cut(folder, tmp_path, monkeypatch):
    tokenizers = pytest.importorskip("tokenizers")
    monkeypatch.setattr(_at_words, "__defaults__", (20,))
    made = load_text(str(folder), vocab_size=320, cache_dir=tmp_path).tokenizer.tokenizer
    made.normalizer = tokenizers.normalizers.Prepend("_")  # to each text that it is given, as Llama 2's
    tokenizer, text = TextTokenizer(made), "alpha beta\n    gamma\n\n\tdelta Größe \n" * 20
    cut = np.concatenate([tokenizer.encode(part) for part in _at_words(text)])
    found = np.concatenate(list(tokenizer.encode_parts([text[:100], text[100:]])))
    np.testing.assert_array_equal(found, tokenizer.encode(text))
    assert len(cut) > len(found)
    monkeypatch.setattr(text_tokenizer, "_LONGEST_WORD", 300)  # no more is held
    assert len(list(tokenizer.encode_parts(text))) == 1 + len(text) // 301


def test_a_tokenizer_learns_from_no_very_long_word():
    """That takes the square of its length, and no Ctrl-C comes through meanwhile."""
    for text in ("acgt" * 50_000, " " * 100_000 + "alpha beta", "alpha beta " * 3000 + "acgt" * 20_000, ""):
        parts = list(_to_learn_from(text))
        assert "".join(parts) == text and max(map(len, parts), default=0) < 1 << 15
    text = make_text(0, lines=2000)
    assert list(_to_learn_from(text)) == _at_words(text) and len(_at_words(text)) > 3


def test_a_pipe_is_no_tokenizer(folder, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match=r"cannot read .*: no file"):  # and does not wait for a writer
        load_text(str(folder), tokenizer=tmp_path / "pipe", cache_dir=tmp_path)
    load_text(str(folder), vocab_size=320, cache_dir=tmp_path)
    (described,) = tmp_path.rglob("train.bin.json")
    for path in (described, *(described.with_name(name) for name in ("tokenizer.json", "tokenizer_config.json"))):
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    load_text(str(folder), vocab_size=320, cache_dir=tmp_path)
    assert described.is_file()


def test_a_tokenizer_that_its_library_panics_over(folder, tmp_path):
    whole = json.loads(load_text(str(folder), vocab_size=320, cache_dir=tmp_path).tokenizer.to_json())
    whole["decoder"] = {"type": "Strip", "content": "a", "start": 0, "stop": 5}
    (tmp_path / "panics.json").write_text(json.dumps(whole))
    tokenizer = load_tokenizer(tmp_path / "panics.json")
    with pytest.raises(DataError, match=r"\[tokenizer\] no text for ids: .*index"):
        tokenizer.decode([tokenizer.tokenizer.token_to_id("a")])


def test_token_files_hold_large_ids(tmp_path):
    ids = np.array([0, 65_535, 65_536, 99_999])
    write_tokens(tmp_path / "x.bin", [ids[:2], ids[2:]], 100_000)
    back = read_tokens(tmp_path / "x.bin")
    assert back.dtype == np.uint32 and not back.flags.writeable
    np.testing.assert_array_equal(back, ids)
    assert len(write_tokens(tmp_path / "none.bin", [], 300)) == 0  # which cannot be mapped


# ---- bad input


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no text: 1 files, 0 of them binary or closed"),
        (b"ab\0cd" * 1000, "binary data"),
        ("naïve café".encode("latin-1") * 100, "not UTF-8"),
        (make_text(0).encode("utf-16"), "not UTF-8"),
        (b"a", "too short to hold some text out"),
        (make_text(0, 3).encode(), "too little text for the vocabulary: 10000 ids asked .vocab_size: at most"),
        (make_text(0).encode() * 400 + b"\0", "binary data"),
    ],
    ids=["empty", "zeros", "latin-1", "utf-16", "short", "vocabulary", "late zeros"],
)
def test_unusable_text_is_one_clear_line_and_leaves_nothing(tmp_path, content, message):
    (tmp_path / "bad.txt").write_bytes(content)
    with pytest.raises(DataError, match=message) as info:
        load_text(str(tmp_path / "bad.txt"), cache_dir=tmp_path / "cache", vocab_size=10_000)
    assert str(info.value).startswith("[bad.txt] ") and "\n" not in str(info.value)
    assert not any("train" in name or "tmp" in name for name in cached_files(tmp_path / "cache"))


def test_other_bad_input(folder, tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"\[dataset\] unknown data set: 'nowhere' \(stdlib, wikitext-2, a file"):
        load_text("nowhere", cache_dir=tmp_path)
    with pytest.raises(DataError, match=r"\[vocab_size\] too small: 256 \(257 or more\)"):
        load_text(str(folder), vocab_size=256, cache_dir=tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"\[files\] cannot write"):
        load_text(str(folder), vocab_size=300, cache_dir=tmp_path / "file")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(DataError, match=r"\[empty\] no text: 0 files"):
        load_text(str(empty), cache_dir=tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match=r"package missing: tokenizers \(pip install tokenizers\)"):
        load_text(str(folder), vocab_size=300, cache_dir=tmp_path)


def test_a_cache_that_takes_no_files_is_found_before_the_work_and_named(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(text_module, "train_tokenizer", lambda *_: pytest.fail("trained in vain"))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NEEDLE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(DataError, match=r"\[NEEDLE_CACHE\] cannot write .*cache: Not a directory \(room in a writable folder\)$"):
        load_text(str(folder), vocab_size=300)


@pytest.fixture
def closed(tmp_path):
    folder = tmp_path / "text" / "closed"
    folder.mkdir(parents=True)
    (tmp_path / "text" / "open.txt").write_text(make_text(0))
    folder.chmod(0)
    yield folder
    folder.chmod(0o700)


def test_closed_folders(closed, tmp_path):
    if os.access(closed, os.R_OK):
        pytest.skip("this user may read every folder")
    for dataset in (closed, closed.parent):
        with pytest.raises(DataError, match=r"\[(closed|text)\] cannot read .*closed: Permission denied"):
            load_corpus(str(dataset), cache_dir=tmp_path / "cache")
    with pytest.raises(DataError, match=r"cannot write .*closed.*: Permission denied"):
        load_text(str(closed.parent / "open.txt"), vocab_size=300, cache_dir=closed)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "wikitext-2").symlink_to(closed)
    with pytest.raises(DataError, match=r"\[wikitext-2\] cannot read"):
        load_corpus("wikitext-2", data_dir=tmp_path / "data", cache_dir=tmp_path / "cache")


def test_a_damaged_cache_is_made_again(tmp_path):
    path, cache = tmp_path / "words.txt", tmp_path / "cache"
    path.write_text(make_text(0))
    load_text(str(path), vocab_size=300, cache_dir=cache)
    files = [file for file in cache.rglob("*") if file.is_file()]
    whole = {file: file.read_bytes() for file in files}
    assert len(files) == 6
    for file in files:
        middle = len(whole[file]) // 2
        turned = whole[file][:middle] + bytes([whole[file][middle] ^ 1]) + whole[file][middle + 1 :]  # one bit
        sizes = [whole[file].replace(b'"vocab_size": 300', b'"vocab_size": ' + size) for size in (b"70000", b"null")]
        for damaged in (b"", whole[file][:-1], b"\xff\xfe", b"[]", b"{}", turned, *sizes):
            file.write_bytes(damaged)
            load_text(str(path), vocab_size=300, cache_dir=cache)
            assert {file: file.read_bytes() for file in files} == whole


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with pytest.raises(RuntimeError), write_atomically(path) as file:
        file.write(b"half")
        raise RuntimeError
    assert cached_files(tmp_path) == ["x"] and path.read_bytes() == b"old"


def test_what_killed_processes_left_half_written_goes_when_the_file_is_written_next(tmp_path):
    path = tmp_path / "[x]"
    begin = "import pathlib, sys, time; from needle.files import write_atomically"
    begin += "\nwith write_atomically(pathlib.Path(sys.argv[1])): print(flush=True); time.sleep(600)"
    writers = [subprocess.Popen([sys.executable, "-c", begin, path], stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for writer in writers:
            writer.stdout.readline()
        writers[0].kill()
        writers[0].wait()
        (tmp_path / "[x].y").touch()
        with write_atomically(path) as file:
            file.write(b"whole")
        assert sorted(cached_files(tmp_path))[::2] == ["[x]", "[x].y"] and len(cached_files(tmp_path)) == 3  # the other one goes on
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()


def test_a_file_that_another_process_takes_for_abandoned_is_begun_anew(tmp_path):
    fcntl, path = pytest.importorskip("fcntl"), tmp_path / "x"
    mine = tmp_path / "x.draft.tmp"
    mine.touch()
    remove_abandoned(tmp_path / "x")
    mine.unlink()  # and so it was there
    temporary = tmp_path / f"x.{os.getpid()}-{threading.get_ident()}.tmp"
    other = open(temporary, "wb")
    fcntl.flock(other, fcntl.LOCK_EX)

    def remove():
        temporary.unlink()
        other.close()

    removal = threading.Timer(0.2, remove)
    removal.start()
    with write_atomically(path) as file:
        removal.join()
        file.write(b"whole")
    assert cached_files(tmp_path) == ["x"] and path.read_bytes() == b"whole"


def test_threads_that_write_one_file_leave_one_of_theirs(tmp_path):
    path, begun = tmp_path / "x", threading.Barrier(2)

    def write(content):
        with write_atomically(path) as file:
            begun.wait(10)
            file.write(content)

    contents = [letter * 100_000 for letter in (b"a", b"b")]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, contents))
    assert path.read_bytes() in contents and cached_files(tmp_path) == ["x"]


# ---- batches

TOKENS = np.arange(1003, dtype=np.uint16)  # 100 windows of 10 and a tail


def test_batches_hold_each_window_once_per_epoch_and_targets_are_one_later():
    batches = TokenBatches(TOKENS, 8, 10, seed=1)
    seen = []
    for _ in range(25):  # two epochs
        ids, targets = next(batches)
        assert ids.shape == targets.shape == (8, 10) and ids.dtype == targets.dtype == np.int32
        np.testing.assert_array_equal(targets, ids + 1)
        seen += list(ids[:, 0])
    assert batches.epoch == 2.0
    first, second = seen[:100], seen[100:]
    assert sorted(first) == sorted(second) == list(range(0, 1000, 10))
    assert first != second and first != sorted(first)
    again = TokenBatches(TOKENS, 100, 10, seed=1)
    assert list(next(again)[0][:, 0]) == first  # the order does not depend on the batch size
    assert list(next(TokenBatches(TOKENS, 100, 10, seed=2))[0][:, 0]) != first


def test_finite_batches_end_with_a_shorter_one():
    for batch_size, rows in ((64, [64, 36]), (99, [99, 1]), (100, [100])):
        got = list(TokenBatches(TOKENS, batch_size, 10, epochs=1, shuffle=False))
        assert [len(ids) for ids, _ in got] == rows
        np.testing.assert_array_equal(np.concatenate([t for _, t in got]).ravel(), np.arange(1, 1001))


@pytest.mark.parametrize("resumed_batch_size", [8, 4])
def test_a_saved_position_goes_on_with_the_next_window(resumed_batch_size):
    whole = TokenBatches(TOKENS, 8, 10, seed=3)
    for _ in range(14):  # into the second epoch
        next(whole)
    state = whole.state_dict()
    resumed = TokenBatches(TOKENS, resumed_batch_size, 10, seed=3)
    resumed.load_state_dict(state)
    got = np.concatenate([next(resumed)[0] for _ in range(8 // resumed_batch_size)])
    np.testing.assert_array_equal(got, next(whole)[0])
    with pytest.raises(DataError, match=r"saved position is in other data: seed was 3, is 4 "):
        TokenBatches(TOKENS, 8, 10, seed=4).load_state_dict(state)
    with pytest.raises(DataError, match=r"saved position is in other data: tokens_crc32"):  # as many ids of a tokenizer made anew
        TokenBatches(TOKENS[::-1], 8, 10, seed=3).load_state_dict(state)
    with pytest.raises(DataError, match="shuffle was 1, is 0"):
        TokenBatches(TOKENS, 8, 10, seed=3, shuffle=False).load_state_dict(state)
    with pytest.raises(DataError, match="order was 1, is 2"):  # of a version that had another for the same seed
        resumed.load_state_dict({**state, "order": 1})
    for position in (-1, 1.5, "8", 1 << 62):
        with pytest.raises(DataError, match="saved position is no position"):
            resumed.load_state_dict({**state, "position_windows": position})
    resumed.load_state_dict({name: value for name, value in state.items() if name != "tokens_crc32"})  # of an older version
    resumed.load_state_dict(TokenBatches(TOKENS, 8, 10, seed=3).state_dict())
    np.testing.assert_array_equal(next(resumed)[0], next(TokenBatches(TOKENS, resumed_batch_size, 10, seed=3))[0])
    with pytest.raises(DataError, match="seq_len was 10, is 20"):
        TokenBatches(TOKENS, 8, 20, seed=3).load_state_dict(state)


@pytest.mark.parametrize("most, changed", [(1 << 24, 3), (1 << 24, 444), (50, 3), (50, -3), (50, len(TOKENS) // 2)])
def test_a_saved_position_is_in_text_of_which_no_token_has_changed(monkeypatch, most, changed):
    """Of text that is longer than can be read whole, none in a piece that is looked at."""
    monkeypatch.setattr(text_module, "_LOOKED_AT_TOKENS", most)
    monkeypatch.setattr(token_files, "_SAMPLE_TOKENS", 10)
    other = TOKENS.copy()
    other[changed] += 1
    with pytest.raises(DataError, match=r"saved position is in other data: tokens_crc32"):
        TokenBatches(other, 8, 10).load_state_dict(TokenBatches(TOKENS, 8, 10).state_dict())


def test_max_tokens_and_bad_sizes():
    batches = TokenBatches(TOKENS, 2, 10, max_tokens=51, epochs=1)
    assert max(int(targets.max()) for _, targets in batches) == 50
    with pytest.raises(DataError, match=r"\[train\] too short for one sequence: 10 tokens \(11 or more"):
        TokenBatches(TOKENS[:10], 2, 10, name="train")
    with pytest.raises(DataError, match=r"\[text\] batch_size is 0 \(accepted: a whole number of at least 1\)"):
        TokenBatches(TOKENS, 0, 10)
    with pytest.raises(DataError, match=r"\[text\] epochs is 0 \(accepted: a whole number of at least 1\)"):
        TokenBatches(TOKENS, 2, 10, epochs=0)


def test_an_id_outside_the_vocabulary_is_named_with_its_position():
    tokens = TOKENS % 50
    tokens[523] = 50
    batches = TokenBatches(tokens, 10, 10, vocab_size=50, epochs=1, name="train")
    message = r"\[train\] token id outside the vocabulary: 50 at position 523 \(0 to 49\)"
    with pytest.raises(DataError, match=message):
        list(batches)
    list(TokenBatches(tokens, 10, 10, vocab_size=51, epochs=1))
    with pytest.raises(DataError, match="-1 at position 4"):
        next(TokenBatches(np.array([0, 1, 2, 3, -1, 5]), 1, 5, vocab_size=50))


def test_batches_take_whole_numbers_in_a_row():
    found, expected = (next(TokenBatches(tokens, 2, 10, seed=1)) for tokens in (TOKENS.tolist(), TOKENS))
    np.testing.assert_array_equal(found, expected)
    for wrong in (TOKENS.astype(np.float32), TOKENS[None], TOKENS[:, None], 5, []):
        with pytest.raises(DataError, match=r"\[text\] tokens are .* \(whole numbers in a row\)"):
            TokenBatches(wrong, 2, 1)


def test_batches_do_not_alias_the_tokens():
    tokens = np.arange(11, dtype=np.int32)
    ids, targets = next(TokenBatches(tokens, 1, 10))
    ids[:] = 0
    assert targets[0, 0] == 1 and tokens[5] == 5


def test_unigram_entropy_is_add_one_smoothed_cross_entropy():
    train, held_out = np.array([0, 0, 0, 1], np.uint16), np.array([0, 1, 2], np.uint16)
    expected = -(math.log(4 / 7) + math.log(2 / 7) + math.log(1 / 7)) / 3
    assert unigram_entropy(train, held_out, 3) == pytest.approx(expected, rel=1e-12)
    uniform = np.arange(100).repeat(7)
    assert unigram_entropy(uniform, uniform, 100) == pytest.approx(math.log(100), rel=1e-12)
    with pytest.raises(DataError, match=r"outside the vocabulary: ids 0 to 2 \(0 to 1\)"):
        unigram_entropy(train, held_out, 2)
    with pytest.raises(DataError, match=r"outside the vocabulary: ids -1 to 0 \(0 to 2\)"):
        unigram_entropy(train, np.array([0, -1]), 3)
    with pytest.raises(DataError, match="no held-out tokens"):
        unigram_entropy(train, held_out[:0], 3)
