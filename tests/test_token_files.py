"""Token files: what Megatron's own reader sees in ours, what ours sees in others', and what damaged ones say."""

import gc
import itertools
import json
import os
import shutil
import struct
import threading
import tracemalloc

import numpy as np
import pytest

from needle.data import text as text_module
from needle.data import token_files
from needle.data.prefetch import Prefetch
from needle.data.shuffle import shuffled
from needle.data.text import TokenBatches, load_text, unigram_entropy
from needle.data.token_files import TokenWriter, find_token_file, publish, read_token_file, sample
from needle.errors import DataError

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies


def megatron_documents(prefix):
    """Written from the published layout alone: Megatron-LM's indexed_dataset.py, gpt-neox's, and Pythia's utils/mmap_dataset.py."""
    raw = (prefix.parent / f"{prefix.name}.idx").read_bytes()
    assert raw[:9] == b"MMIDIDX\x00\x00"
    (version,) = struct.unpack("<Q", raw[9:17])
    (code,) = struct.unpack("<B", raw[17:18])
    dtype = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}[code]
    count, entries = struct.unpack("<Q", raw[18:26]) + struct.unpack("<Q", raw[26:34])
    sizes = np.frombuffer(raw, np.int32, count, 34)
    pointers = np.frombuffer(raw, np.int64, count, 34 + sizes.nbytes)
    doc_idx = np.frombuffer(raw, np.int64, entries, 34 + sizes.nbytes + pointers.nbytes)
    assert version == 1 and len(raw) == 34 + sizes.nbytes + pointers.nbytes + doc_idx.nbytes
    assert doc_idx[0] == 0 and doc_idx[-1] == count
    data = (prefix.parent / f"{prefix.name}.bin").read_bytes()
    sequences = [np.frombuffer(data, dtype, size, start) for size, start in zip(sizes, pointers)]
    return [np.concatenate(sequences[a:b]) for a, b in itertools.pairwise(doc_idx)], dtype, sizes


def write_pair(prefix, sequences, code=8, dtype="<u2", documents=None):
    """As Megatron's builder does."""
    sizes = np.array([len(s) for s in sequences], "<i4")
    starts = (np.cumsum(sizes, dtype="<i8") - sizes) * np.dtype(dtype).itemsize
    documents = np.arange(len(sizes) + 1) if documents is None else np.array(documents)
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(sizes), len(documents))
    index = header + sizes.tobytes() + starts.astype("<i8").tobytes() + documents.astype("<i8").tobytes()
    prefix.with_name(prefix.name + ".idx").write_bytes(index)
    prefix.with_name(prefix.name + ".bin").write_bytes(np.concatenate(sequences).astype(dtype).tobytes())
    return prefix.with_name(prefix.name + ".bin")


def write(folder, prefix, pieces, vocab_size=1000):
    folder.mkdir()
    writer = TokenWriter(folder, vocab_size)
    for ids, ends in pieces:
        writer.write(np.array(ids), ends)
    writer.finish(prefix)


# ---- the pair that is written


@pytest.mark.parametrize("vocab_size, dtype", [(1 << 16, np.uint16), ((1 << 16) + 1, np.int32)])
def test_what_is_written_is_what_megatron_reads(tmp_path, vocab_size, dtype):
    pieces = [([1, 2, 3, 4], [3]), ([5, 6], []), ([], []), ([7, 8, 9, 65_535], [1, 3, 4])]
    write(tmp_path / "part", tmp_path / "out", pieces, vocab_size)
    documents, found, sizes = megatron_documents(tmp_path / "out")
    assert found == dtype and [d.tolist() for d in documents] == [[1, 2, 3], [4, 5, 6, 7], [8, 9], [65_535]]
    assert sizes.tolist() == [3, 4, 2, 1] and not (tmp_path / "part").exists()
    file = read_token_file(tmp_path / "out.bin")
    assert len(file) == 4 and file[1].tolist() == [4, 5, 6, 7]
    assert file.tokens.tolist() == [*range(1, 10), 65_535] and not file.tokens.flags.writeable and file.sequence_tokens is None


def test_a_document_too_long_for_a_sequence_becomes_several(tmp_path, monkeypatch):
    monkeypatch.setattr(token_files, "_SEQUENCE_TOKENS", 10)
    write(tmp_path / "part", tmp_path / "out", [(range(8), []), (range(8, 16), []), (range(16, 20), [2]), ([99] * 3, [3])])
    documents, _, sizes = megatron_documents(tmp_path / "out")
    assert [d.tolist() for d in documents] == [list(range(18)), [18, 19, 99, 99, 99]] and sizes.tolist() == [8, 8, 2, 5]
    assert len(read_token_file(tmp_path / "out.bin")) == 4


def test_an_index_longer_than_a_piece(tmp_path, monkeypatch):
    monkeypatch.setattr(token_files, "_ENTRIES", 7)
    lengths = np.random.default_rng(0).integers(0, 9, 100)
    pieces = [(range(n), [n]) for n in lengths]
    write(tmp_path / "part", tmp_path / "out", pieces)
    documents, _, _ = megatron_documents(tmp_path / "out")
    assert [len(d) for d in documents] == lengths.tolist()
    file = read_token_file(tmp_path / "out.bin")
    assert [file[i].tolist() for i in range(100)] == [list(range(n)) for n in lengths]


def test_a_writer_goes_on_from_its_last_flush(tmp_path):
    pieces = [([1, 2, 3], [2]), ([4, 5], [1]), ([6, 7], [2])]
    write(tmp_path / "whole", tmp_path / "a", pieces)
    folder = tmp_path / "part"
    folder.mkdir()
    first = TokenWriter(folder, 1000)
    first.write(np.array([1, 2, 3]), [2])
    state = json.loads(json.dumps(first.flush()))
    assert [(folder / name).stat().st_size for name in ("tokens", "lengths", "documents")] == [6, 4, 8]
    first.write(np.array([70, 80] * 9), [1, 2, 3, 4])  # lost, as if killed here: more than what comes in its place
    first.close()
    second = TokenWriter(folder, 1000, state)
    assert second.tokens == 3 and second.documents == 1
    for ids, ends in pieces[1:]:
        second.write(np.array(ids), ends)
    second.finish(tmp_path / "b")
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"a{ending}").read_bytes() == (tmp_path / f"b{ending}").read_bytes()
    folder.mkdir()
    TokenWriter(folder, 1000).close()
    with pytest.raises(DataError, match=r"\[part\] damaged: .*tokens has 0 bytes \(6 when it was left\)"):
        TokenWriter(folder, 1000, state)


def test_a_flush_waits_for_the_disk(tmp_path, monkeypatch):
    """For all three files, each with everything in it by then; so does the end, before the pair is there."""
    sizes = []
    monkeypatch.setattr(token_files.files, "sync", lambda descriptor: sizes.append(os.fstat(descriptor).st_size))
    writer = TokenWriter(tmp_path, 1000)
    writer.write(np.array([1, 2, 3]), [2])
    assert not sizes
    writer.flush()
    assert sizes == [6, 4, 8]
    writer.write(np.array([4]), [1])
    writer.finish(tmp_path.with_name("out"))
    assert sizes[3:6] == [8, 8, 16]


def test_readers_see_the_same_after_a_power_cut(tmp_path, monkeypatch):
    """What the disk is waited for: the old pair without its index, then the new pair."""
    write(tmp_path / "old", tmp_path / "out", [([1, 2, 3], [3])])
    seen, flush = [], token_files.files.flush

    def flushed(path):
        if path == tmp_path:
            seen.append({file.name: file.stat().st_size for file in path.iterdir() if file.is_file()})
        flush(path)

    monkeypatch.setattr(token_files.files, "flush", flushed)
    write(tmp_path / "new", tmp_path / "out", [([4, 5, 6, 7], [4])])
    assert seen == [{"out.bin": 6}, {"out.bin": 8, "out.idx": 34 + 4 + 8 + 16}]


def test_a_pair_that_cannot_be_written(tmp_path):
    with pytest.raises(DataError, match=r"\[files\] cannot write .*none: No such file or directory"):
        TokenWriter(tmp_path / "none", 1000)
    (tmp_path / "out.bin").mkdir()
    with pytest.raises(DataError, match=rf"\[files\] cannot write {tmp_path}: Is a directory"):
        write(tmp_path / "part", tmp_path / "out", [([1, 2, 3], [3])])


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_ids_for_which_there_is_no_room(tmp_path):
    writer = TokenWriter(tmp_path, 1000)
    writer._files["tokens"].close()
    writer._files["tokens"] = open("/dev/full", "wb")
    writer.write(np.array([1, 2]))  # held until the flush
    with pytest.raises(DataError, match=rf"\[files\] cannot write {tmp_path}: No space left on device"):
        writer.flush()
    writer.close()  # which tries again


def test_finishing_can_be_cut_short_anywhere(tmp_path, monkeypatch):
    """Before each call that changes a name on the disk; what is seen then is the old pair, no index, or the new pair."""
    write(tmp_path / "old", tmp_path / "out", [([1, 2, 3], [3])])
    state = {"tokens": 2, "sequences": 2, "documents": 2, "open": 0}

    class Killed(BaseException):
        pass

    def finish(folder, prefix, calls_left):
        """True if that many calls were enough."""

        def counted(real):
            def call(*args, **kwargs):
                nonlocal calls_left
                calls_left -= 1
                if calls_left < 0:
                    raise Killed
                return real(*args, **kwargs)

            return call

        folder.mkdir()
        (folder / "tokenizer.json").write_text("{}")
        writer = TokenWriter(folder, 1000)
        writer.write(np.array([4, 5]), [1, 2])
        with monkeypatch.context() as patch:
            for owner, name in ((os, "replace"), (os, "unlink"), (shutil, "rmtree")):
                patch.setattr(owner, name, counted(getattr(owner, name)))
            try:
                writer.finish(prefix)
            except Killed:
                return False
        return True

    for calls in range(20):
        folder, prefix = tmp_path / f"part{calls}", tmp_path / f"out{calls}"
        index = prefix.with_name(prefix.name + ".idx")
        for ending in (".bin", ".idx"):
            shutil.copy(tmp_path / f"out{ending}", prefix.with_name(prefix.name + ending))
        done = finish(folder, prefix, calls)
        if index.exists():
            assert [d.tolist() for d in megatron_documents(prefix)[0]] in ([[1, 2, 3]], [[4], [5]])
        if not done and not publish(folder, prefix):  # the index was not whole
            TokenWriter(folder, 1000, state).finish(prefix)
        assert [d.tolist() for d in megatron_documents(prefix)[0]] == [[4], [5]] and not folder.exists()
        assert prefix.with_name(prefix.name + ".tokenizer.json").read_text() == "{}"
        if done:
            break
    assert 4 <= calls < 19


# ---- files of others


@pytest.mark.parametrize("code, dtype", [(1, "u1"), (2, "i1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2")])
def test_every_integer_dtype_of_megatron(tmp_path, code, dtype):
    file = read_token_file(write_pair(tmp_path / "x", [[1, 2, 3], [], [100, 127]], code, dtype, documents=[0, 2, 3]))
    assert file.tokens.dtype == np.dtype(dtype) and file.tokens.tolist() == [1, 2, 3, 100, 127]
    assert [file[i].tolist() for i in range(3)] == [[1, 2, 3], [], [100, 127]]
    assert [file.sequence_at(t) for t in (0, 1, 3, 4)] == [0, 3, 3, 5]
    assert read_token_file(write_pair(tmp_path / "y", [[1, 2, 3], [4]])).sequence_at(1) == 3  # where the last one begins


def test_files_without_an_index(tmp_path):
    path, ids = tmp_path / "x.bin", np.random.default_rng(0).integers(0, 300, 5002)
    for dtype, vocab_size in (("<u2", 300), ("<u4", 300), ("<u4", 100_000), ("<u2", None), ("<u4", None)):
        path.write_bytes(ids.astype(dtype).tobytes())
        file = read_token_file(str(path), vocab_size)
        assert file.tokens.dtype == np.dtype(dtype), (dtype, vocab_size)
        np.testing.assert_array_equal(file.tokens, ids)
        np.testing.assert_array_equal(file[0], ids)
    for dtype in ("<u2", "<u4"):
        for most in (16, 17):
            path.write_bytes((ids % most).astype(dtype).tobytes())
            assert read_token_file(path, most).tokens.dtype == np.dtype(dtype)
    (ids * 400).astype("<u4").tofile(path)
    for vocab_size in (300, 1 << 16, 100_000):  # too small: the halves of an id are not to be taken for ids of 16 bits
        with pytest.raises(DataError, match=rf"outside the vocabulary: 119600 \(0 to {vocab_size - 1}; is vocab_size right"):
            load_text(str(path), vocab_size=vocab_size)
    path.write_bytes(np.array([7], "<u4").tobytes())
    assert read_token_file(path, 300).tokens.tolist() == [7]
    path.write_bytes(np.array([1, 0, 2], "<u2").tobytes())  # its first four bytes are an id of 32 bits, too
    assert read_token_file(path, 300).tokens.tolist() == [1, 0, 2]
    for magic, version, dtype in ((20240520, 1, "<u2"), (20240801, 7, "<u4")):  # llm.c: GPT-2 and Llama 3
        header = np.zeros(256, "<i4")
        header[:3] = magic, version, len(ids)
        path.write_bytes(header.tobytes() + ids.astype(dtype).tobytes())
        file = read_token_file(path)
        assert file.tokens.dtype == np.dtype(dtype)
        np.testing.assert_array_equal(file.tokens, ids)


def test_names(tmp_path):
    path = write_pair(tmp_path / "a b.c", [[1, 2]])
    for name in ("a b.c", "a b.c.bin", "a b.c.idx"):
        assert find_token_file(str(tmp_path / name)) == path
    for name in ("a b", "a b.c.txt", "", ".bin", "none.bin", "a\0b.bin"):
        assert find_token_file(str(tmp_path / name) if name else name) is None
    (tmp_path / "a b.c").touch()
    assert find_token_file(str(tmp_path / "a b.c")) is None  # a file of text, which is what was named
    (tmp_path / "a b.c").unlink()
    (tmp_path / "a b.c").mkdir()
    assert find_token_file(str(tmp_path / "a b.c")) is None  # a folder of that name
    path.unlink()
    with pytest.raises(DataError, match=r"\[a b.c.bin\] cannot read .*a b.c.bin: No such file"):
        read_token_file(find_token_file(str(tmp_path / "a b.c.idx")))


def test_the_name_of_a_data_set_names_no_token_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stdlib.bin").touch()
    (tmp_path / ".bin").touch()
    assert find_token_file("stdlib") is find_token_file("") is find_token_file(".bin") is None
    assert str(find_token_file("./stdlib")) == str(find_token_file("stdlib.bin")) == "stdlib.bin"


def damaged(index, at=None, value=None, form="<Q"):
    return index[:at] + struct.pack(form, value) + index[at + struct.calcsize(form) :]


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda i, d: (b"", d), r"\[x.idx\] no Megatron index: it begins with b''"),
        (lambda i, d: (b"TNTIDX\0\0" + i, d), r"\[x.idx\] no Megatron index: it begins with b'TNTIDX"),
        (lambda i, d: (i[:20], d), r"\[x.idx\] cut off: 20 bytes \(a header of 34\)"),
        (lambda i, d: (i[:-1], d), r"\[x.idx\] cut off or damaged: 101 bytes \(102 for 3 sequences"),
        (lambda i, d: (i + b"\0", d), r"\[x.idx\] cut off or damaged: 103 bytes"),
        (lambda i, d: (damaged(i, 9, 2), d), r"\[x.idx\] unknown version: 2 \(1\)"),
        (lambda i, d: (damaged(i, 17, 6, "<B"), d), r"\[x.idx\] no integers: dtype code 6 \(1, 2, 3, 4, 5, 8\)"),
        (lambda i, d: (damaged(i, 17, 7, "<B"), d), r"\[x.idx\] no integers: dtype code 7"),
        (lambda i, d: (damaged(i, 18, 2**64 - 1), d), r"\[x.idx\] cut off or damaged: 102 bytes"),
        (lambda i, d: (damaged(i, 26, 2**62), d), r"\[x.idx\] cut off or damaged: 102 bytes"),
        (lambda i, d: (damaged(i, 38, -1, "<i"), d), r"\[x.idx\] sequence 1 has a negative length: -1"),
        (
            lambda i, d: (damaged(i, 34, 2, "<i"), d),
            r"\[x.idx\] sequence 1 does not follow the one before: it begins at byte 6 \(4\)",
        ),
        (lambda i, d: (damaged(i, 54, 10**15, "<q"), d), r"\[x.idx\] sequence 1 does not follow .* at byte 1000000000000000 \(6\)"),
        (
            lambda i, d: (damaged(i, 46, -2, "<q"), d),
            r"\[x.idx\] sequence 0 does not follow the one before: it begins at byte -2 \(0\)",
        ),
        (lambda i, d: (damaged(i, 70, 1, "<q"), d), r"\[x.idx\] damaged: the documents are not in order"),
        (lambda i, d: (damaged(i, 78, 3, "<q"), d), r"\[x.idx\] damaged: the documents are not in order"),
        (lambda i, d: (damaged(i, 94, 4, "<q"), d), r"\[x.idx\] damaged: the documents end at sequence 4 \(3\)"),
        (lambda i, d: (damaged(i[:70], 26, 0), d), r"\[x.idx\] damaged: the documents end at sequence 0 \(3\)"),
        (lambda i, d: (i, d[:-1]), r"\[x.bin\] not the data of x.idx: 11 bytes \(12 in the index"),
        (lambda i, d: (i, d + b"\0\0"), r"\[x.bin\] not the data of x.idx: 14 bytes \(12"),
        (lambda i, d: (i, b""), r"\[x.bin\] no tokens: 3 sequences, 0 bytes"),
        (lambda i, d: (i[:34].replace(struct.pack("<Q", 3), bytes(8)) + bytes(32), d), r"\[x.bin\] no tokens: 0 sequences"),
    ],
)
def test_damaged_pairs(tmp_path, spoil, message):
    path = write_pair(tmp_path / "x", [[1, 2, 3], [4, 5], [6]])
    assert len(path.with_suffix(".idx").read_bytes()) == 102
    index, data = spoil(path.with_suffix(".idx").read_bytes(), path.read_bytes())
    path.with_suffix(".idx").write_bytes(index)
    path.write_bytes(data)
    with pytest.raises(DataError, match=message) as info:
        read_token_file(path)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize("kind", ["folder", "pipe", "link to nothing", "link to itself"])
def test_an_index_that_is_no_file(tmp_path, kind):
    path = write_pair(tmp_path / "x", [[1, 2, 3], [4, 5]])
    index = tmp_path / "x.idx"
    index.unlink()
    if kind in ("folder", "pipe"):
        (os.mkdir if kind == "folder" else os.mkfifo)(index)
    else:
        index.symlink_to("gone" if kind == "link to nothing" else index)
    for read in (lambda: read_token_file(path), lambda: load_text(str(tmp_path / "x"), vocab_size=300)):
        with pytest.raises(DataError, match=r"\[x.idx\] no file, or a link to none: .*x.idx \(the index of x.bin, or nothing"):
            read()


def test_documents_that_are_empty_and_pieces_that_go_back(tmp_path, monkeypatch):
    path = write_pair(tmp_path / "x", [[1, 2, 3], [4, 5], [6]], documents=[0, 1, 1, 2, 3])
    assert read_token_file(path).tokens.tolist() == [1, 2, 3, 4, 5, 6]
    monkeypatch.setattr(token_files, "_ENTRIES", 2)
    write_pair(tmp_path / "x", [[1, 2, 3], [4, 5], [6]], documents=[0, 2, 1, 3])
    with pytest.raises(DataError, match=r"\[x.idx\] damaged: the documents are not in order"):
        read_token_file(path)


def test_an_index_that_names_no_documents(tmp_path):
    file = read_token_file(write_pair(tmp_path / "x", [[1, 2, 3], [4, 5], [6]], documents=[0]))
    assert file.tokens.tolist() == [1, 2, 3, 4, 5, 6] and len(file) == 3


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(st.data())
def test_any_change_of_an_index_is_noticed_or_harmless(tmp_path_factory, data):
    path = write_pair(tmp_path_factory.mktemp("fuzz") / "x", [[1, 2, 3], [4, 5], [6]])
    index = bytearray(path.with_suffix(".idx").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        index[data.draw(st.integers(0, len(index) - 1))] = data.draw(st.integers(0, 255))
    path.with_suffix(".idx").write_bytes(index[: data.draw(st.integers(len(index) - 3, len(index)))])
    try:
        file = read_token_file(path)
    except DataError:
        return
    assert sum(len(file[i]) for i in range(len(file))) == len(file.tokens)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", r"\[x.bin\] no tokens: 0 bytes"),
        (b"\1\2\3", r"\[x.bin\] cut off: 3 bytes \(whole ids of 2 bytes\)"),
        (struct.pack("<3i", 20240520, 1, 4), r"\[x.bin\] cut off or damaged: 12 bytes \(4 tokens after 1024"),
        (struct.pack("<3i", 20240520, 1, -506), r"\[x.bin\] cut off or damaged: 12 bytes \(-506 tokens"),
        (struct.pack("<256i", 20240520, 1, 4, *[0] * 253) + bytes(7), r"\[x.bin\] cut off or damaged: 1031 bytes \(4 tokens"),
        (struct.pack("<256i", 20240520, 2, 4, *[0] * 253) + bytes(8), r"\[x.bin\] unknown version of llm.c's format: 2 \(1\)"),
        (struct.pack("<256i", 20240520, 1, 0, *[0] * 253), r"\[x.bin\] no tokens"),
    ],
)
def test_damaged_files_without_an_index(tmp_path, content, message):
    (tmp_path / "x.bin").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_token_file(tmp_path / "x.bin")


# ---- as data to train on


def test_load_text_holds_out_the_end_from_the_start_of_a_document(tmp_path):
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 50, n) for n in rng.integers(1, 40, 500)]
    path = write_pair(tmp_path / "x", sequences)
    text = load_text(str(tmp_path / "x"), vocab_size=50)
    tokens = np.concatenate(sequences)
    np.testing.assert_array_equal(np.concatenate([text.train, text.held_out]), tokens)
    assert len(text.train) in np.cumsum([len(s) for s in sequences])
    assert 0 <= 0.05 * len(tokens) - len(text.held_out) < 41
    assert text.tokenizer is None and text.corpus is None and text.sequence_tokens is None and text.stride(8) == 8
    one = load_text(str(write_pair(tmp_path / "one", [tokens])), vocab_size=50)  # no document begins there
    assert len(one.held_out) == int(0.05 * len(tokens))
    few = load_text(str(write_pair(tmp_path / "few", [tokens[:10]])), vocab_size=50)  # what is too short for a model, that says
    assert (len(few.train), len(few.held_out)) == (9, 1)
    with pytest.raises(DataError, match=r"\[x.bin\] token id outside the vocabulary: 49 \(0 to 48; is vocab_size right\?\)"):
        load_text(str(path), vocab_size=49)
    with pytest.raises(DataError, match=r"\[x.bin\] neither a vocabulary nor a tokenizer .*x.tokenizer.json"):
        load_text(str(path))
    negative = write_pair(tmp_path / "negative", [[1, -2] * 100], 4, "<i4")
    with pytest.raises(DataError, match=r"outside the vocabulary: -2 \(0 to 49"):
        load_text(str(negative), vocab_size=50)


def test_sequences_that_were_cut_as_windows_stay_windows(tmp_path):
    """Pythia's own data: rows of 2,049 tokens, shuffled already."""
    rows = np.arange(900).reshape(100, 9)
    text = load_text(str(write_pair(tmp_path / "x", list(rows))), vocab_size=900)
    assert text.stride(8) == 9 and text.stride(16) == 16
    batches = TokenBatches(text.train, 5, 8, shuffle=False, stride=text.stride(8))
    for i in range(3):
        ids, targets = next(batches)
        np.testing.assert_array_equal(np.concatenate([ids, targets[:, -1:]], 1), rows[5 * i : 5 * i + 5])
    assert batches.windows_per_epoch == len(text.train) // 9 == 95
    with pytest.raises(DataError, match="stride was 9, is 8"):
        TokenBatches(text.train, 5, 8, shuffle=False).load_state_dict(batches.state_dict())


def test_no_more_is_held_out_than_the_most(tmp_path, monkeypatch):
    monkeypatch.setattr(text_module, "_MOST_HELD_OUT_TOKENS", 3)
    text = load_text(str(write_pair(tmp_path / "x", [range(50), range(50)])), vocab_size=50)
    assert (len(text.train), len(text.held_out)) == (97, 3)


def test_samples_cover_short_files_and_spread_over_long_ones(monkeypatch):
    monkeypatch.setattr(token_files, "_SAMPLE_TOKENS", 10)
    tokens = np.arange(95)
    assert np.concatenate(list(sample(tokens, 95))).tolist() == list(range(95))
    pieces = list(sample(tokens, 40))
    assert [len(p) for p in pieces] == [10] * 4 and [int(p[0]) for p in pieces] == [0, 28, 56, 85]
    assert [int(p[0]) for p in sample(tokens, 20)] == [0, 85]
    assert [int(p[0]) for p in sample(tokens, 10)] == [0] and list(sample(tokens[:0], 40)) == []


def test_unigram_entropy_of_a_sample(monkeypatch):
    monkeypatch.setattr(text_module, "_LOOKED_AT_TOKENS", 1 << 18)
    tokens = np.arange(1 << 19, dtype=np.uint32) % 4
    assert unigram_entropy(tokens, tokens, 4) == pytest.approx(np.log(4), rel=1e-9)


# ---- order


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(st.integers(1, 3000), st.integers(0, 2**63 - 1), st.integers(0, 10**6))
def test_shuffled_is_a_permutation_wherever_it_is_asked(count, seed, epoch):
    whole = shuffled(np.arange(count), count, seed, epoch)
    assert sorted(whole.tolist()) == list(range(count))
    places = np.array([0, count // 2, count - 1])
    np.testing.assert_array_equal(shuffled(places, count, seed, epoch), whole[places])


def test_the_order_of_a_seed_stays():
    """Or a run that an earlier version began would go on in another order."""
    assert shuffled(np.arange(10), 10, 0, 0).tolist() == [6, 1, 7, 3, 9, 4, 5, 8, 2, 0]
    assert shuffled(np.arange(3), 10**12, 7, 3).tolist() == [842941757211, 519247377973, 263195462279]


def test_shuffled_is_fair():
    """Each order of four comes up about as often, and distant places of a long one are no nearer than chance has it."""
    orders = [tuple(shuffled(np.arange(4), 4, seed, 0)) for seed in range(4800)]
    counts = [orders.count(order) for order in set(orders)]
    assert len(counts) == 24 and sum((c - 200) ** 2 / 200 for c in counts) < 50  # chi-squared, 23 degrees: 1 in 1,000
    n = 1 << 16
    out = shuffled(np.arange(n), n, 1, 0) / n
    for lag in (1, 2, 255, 256, 257):
        assert abs(np.corrcoef(out[:-lag], out[lag:])[0, 1]) < 0.02
    assert abs(np.corrcoef(out, shuffled(np.arange(n), n, 1, 1) / n)[0, 1]) < 0.02


def test_a_shuffled_order_of_billions_takes_no_memory():
    tracemalloc.start()
    places = np.arange(10**11, 10**11 + 64)
    out = shuffled(places, 3 * 10**11, 0, 0)
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()
    assert len(set(out.tolist())) == 64 and 0 <= out.min() and out.max() < 3 * 10**11


# ---- made ahead

TOKENS = np.arange(1003, dtype=np.uint16)


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "Prefetch"]


def same(a, b):
    for x, y in zip(a, b, strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("depth", [1, 3])
def test_prefetched_batches_are_the_same_and_so_is_their_position(depth):
    plain = TokenBatches(TOKENS, 8, 10, seed=1)
    with Prefetch(TokenBatches(TOKENS, 8, 10, seed=1), depth) as ahead:
        for _ in range(30):
            assert ahead.state_dict() == plain.state_dict()
            same(next(ahead), next(plain))
        state = ahead.state_dict()
        assert len(threads()) == 1
        expected = next(plain)
        same(next(ahead), expected)
        ahead.load_state_dict(state)
        assert threads() == [] and ahead.state_dict() == state
        same(next(ahead), expected)
        ahead.close()
        assert ahead.source.state_dict() == ahead.state_dict() == plain.state_dict()
        same(next(ahead), next(plain))  # a closed one goes on
    assert threads() == []
    with pytest.raises(DataError, match="seed"):
        Prefetch(TokenBatches(TOKENS, 8, 10, seed=2)).load_state_dict(state)


def test_no_more_than_depth_is_made_ahead():
    made = threading.Semaphore(0)

    class Source(TokenBatches):
        def __next__(self):
            made.release()
            return super().__next__()

    with Prefetch(Source(TOKENS, 1, 10), depth=3) as ahead:
        for _ in range(4):
            next(ahead)
        for _ in range(4 + 3 + 1):  # given out, waiting, in the thread's hand
            assert made.acquire(timeout=60)
        assert not made.acquire(timeout=0.05)
    with pytest.raises(
        ValueError, match=r"\[Prefetch\] depth is 0 \(accepted: a whole number of at least 1\)"
    ):  # a queue of any length
        Prefetch(Source(TOKENS, 1, 10), depth=0)


def test_threads_that_take_batches_of_one_prefetch_all_come_to_the_end():
    def take():
        for ids, _ in batches:
            found.extend(ids[:, 0].tolist())

    found = []
    expected = [ids[:, 0].tolist() for ids, _ in TokenBatches(TOKENS, 1, 10, epochs=1, shuffle=False)]
    batches = Prefetch(TokenBatches(TOKENS, 1, 10, epochs=1, shuffle=False))
    takers = [threading.Thread(target=take, daemon=True) for _ in range(3)]
    for taker in takers:
        taker.start()
    for taker in takers:
        taker.join(60)
    assert not any(taker.is_alive() for taker in takers) and threads() == []
    assert sorted(found) == sorted(itertools.chain.from_iterable(expected))


def test_an_end_and_errors_come_where_the_batch_would_have():
    batches = Prefetch(TokenBatches(TOKENS, 64, 10, epochs=1, shuffle=False))
    assert [len(ids) for ids, _ in batches] == [64, 36]
    assert next(batches, None) is None and threads() == []
    tokens = TOKENS % 50
    tokens[523] = 50
    batches = Prefetch(TokenBatches(tokens, 10, 10, vocab_size=50, shuffle=False, name="train"), depth=10)
    for _ in range(5):
        next(batches)
    for _ in range(2):
        with pytest.raises(DataError, match="50 at position 523"):
            next(batches)
        assert threads() == [] and batches.state_dict()["position_windows"] == 50


@pytest.mark.parametrize("name, error", [("start", RuntimeError), ("join", KeyboardInterrupt)])
def test_a_thread_that_did_not_start_or_was_not_waited_for_is_not_waited_for_again(monkeypatch, name, error):
    """The system may have no more threads; and who interrupts an end may go on."""
    plain, ahead = (TokenBatches(TOKENS, 8, 10, seed=1) for _ in range(2))

    def fails(*_, **__):
        raise error

    with Prefetch(ahead) as ahead, monkeypatch.context() as patch:
        if name == "join":
            same(next(ahead), next(plain))
        patch.setattr(threading.Thread, name, fails)
        with pytest.raises(error):
            next(ahead) if name == "start" else ahead.close()
        patch.undo()
        for _ in range(5):
            same(next(ahead), next(plain))


def test_a_forgotten_prefetch_ends_its_thread():
    gc.disable()
    try:
        batches = Prefetch(TokenBatches(TOKENS, 8, 10))
        next(batches)
        (thread,) = threads()
        del batches
        thread.join(timeout=60)
        assert not thread.is_alive() and thread.daemon  # a program that ends while there is one does not wait for it
    finally:
        gc.enable()
