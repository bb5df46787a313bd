"""TextStream: what it gives out is final, valid text at every moment, and together all of it."""

import random

import numpy as np
import pytest

from needle.data.text_stream import TextStream

TEXTS = [
    "plain words, and more of them",
    "naïve café — 漢字 and 日本語",
    "👩‍👩‍👧 🤷🏽‍♂️ flags 🇩🇪🇫🇷",
    "",
    "é" * 50,
    "x" * 100,
    "𝄞" * 40,
]


def bytes_decoder(ids):
    """A byte-level tokenizer's way: a token is one byte or more."""
    return b"".join(VOCABULARY[i] for i in ids).decode(errors="replace")


VOCABULARY = [bytes([i]) for i in range(256)] + ["é".encode(), "漢".encode()[:2], "👩".encode()[1:3], b"the ", b" and"]


def fallback_decoder(ids):
    """The way of ByteFallback, which Llama's first tokenizers have: bytes in a row that are no text are a mark each."""
    raw = bytes(ids)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "\ufffd" * len(raw)


def stream(ids, decode=bytes_decoder):
    source = TextStream(decode)
    pieces = [source.put(i) for i in ids]
    return pieces, source.end()


@pytest.mark.parametrize("decode", [bytes_decoder, fallback_decoder])
@pytest.mark.parametrize("text", TEXTS)
def test_whole_characters_byte_by_byte(text, decode):
    pieces, rest = stream(text.encode(), decode)
    assert "".join(pieces) == text and rest == ""
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces[: len(text.encode()) // 2]) == text.encode()[: len(text.encode()) // 2].decode(errors="ignore")


def test_a_text_that_goes_on_begins_with_its_space():
    """Which decoders of words leave out at the beginning of a text."""
    words = lambda ids: " ".join(f"w{i}" for i in ids)  # noqa: E731
    for before in ([], [7], list(range(40))):
        source = TextStream(words, np.array(before, np.int64))
        text = words(before) + "".join([source.put(i) for i in range(100)]) + source.end()
        assert text == words([*before, *range(100)])


def test_any_tokens_give_what_decoding_all_of_them_gives():
    """Valid or not: nothing is lost, doubled or taken back."""
    rng = random.Random(0)
    for _ in range(300):
        kinds = rng.choice([range(256), range(128, 256), range(0x80, 0xC0), range(len(VOCABULARY)), [0xF0, 0x9F, 0x91, 0xA9]])
        ids = [rng.choice(list(kinds)) for _ in range(rng.randrange(120))]
        pieces, rest = stream(ids)
        assert "".join(pieces) + rest == bytes_decoder(ids)


def test_bytes_that_are_no_text_stay_marks_also_when_the_first_are_forgotten():
    ids = [0xF0, 0xF0, *"é".encode() * 40]
    pieces, rest = stream(ids, fallback_decoder)
    assert "".join(pieces) + rest == fallback_decoder(ids) == "\ufffd" * len(ids)


def test_a_token_costs_the_same_however_long_the_text_is():
    seen = []

    def decode(ids):
        seen.append(len(ids))
        return bytes_decoder(ids)

    for ids in ([0x80] * 2000, "añb漢".encode() * 300, [0xF0] * 1000):
        stream(ids, decode)
    assert max(seen) <= 40


def test_nor_does_it_where_a_decoder_leaves_out_the_first_space():
    seen = []

    def decode(ids):
        seen.append(len(ids))
        return "".join(f" {i}" for i in ids)[1:]

    pieces, rest = stream(range(300), decode)
    assert "".join(pieces) + rest == " ".join(map(str, range(300))) and max(seen) <= 40


def test_tokens_that_stand_for_no_text():
    decode = lambda ids: bytes_decoder([i for i in ids if i < 256])  # noqa: E731
    ids = [*b"a" * 20, 0xF0, *[300] * 40, *b"b"]
    pieces, rest = stream(ids, decode)
    assert "".join(pieces) + rest == decode(ids) == "a" * 20 + "\ufffdb"


def test_a_real_tokenizer(tmp_path):
    pytest.importorskip("tokenizers")
    from needle.data.text_tokenizer import train_tokenizer

    words = [" ".join(f"word{i % 17} naïve 漢字 {i}" for i in range(300))]
    tokenizer = train_tokenizer(tmp_path / "tokenizer.json", words, 300, "test")
    text = "naïve words 漢字 日本 👩 done"
    pieces, rest = stream(tokenizer.encode(text), tokenizer.decode)
    assert "".join(pieces) + rest == text and not any("\ufffd" in p for p in pieces)
