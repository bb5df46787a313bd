"""Models in the ecosystem's format: read, written, loaded by transformers where it is installed; hostile folders are refused."""

import hashlib
import http.server
import importlib.util
import json
import os
import struct
import subprocess
import sys
import threading
import tracemalloc
import types
import unicodedata
import warnings
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pytest

import needle as ndl
from golden.formula import PythiaShape, parameter_shapes
from needle import nn
from needle.checkpoints import CheckpointFolder, read_folder, read_tensors, write_folder, write_tensors
from needle.data.text_tokenizer import load_tokenizer, train_tokenizer
from needle.errors import CheckpointError, DataError, DTypeError
from needle.models import SIZES, GenerationConfig, Pythia, PythiaConfig, published_state
from needle.models.pretrained import parse_size, tokenizer_of

safetensors, hypothesis = pytest.importorskip("safetensors"), pytest.importorskip("hypothesis")
st = hypothesis.strategies
GOLDEN = Path(__file__).parent / "golden"
PUBLISHED = GOLDEN / "pythia_tiny_published"  # written by transformers, in three shards
TOLERANCE = 1e-4
TINY = PythiaConfig(layers=2, width=32, heads=4, feed_forward=64, vocab_size=97)
TEXT = Path(__file__).read_text() + "\n\tété, 漢字 and 🙂   spaces\n\n<|endoftext|>"


def relative(found, expected):
    return float(np.abs(np.asarray(found, np.float64) - expected).max() / np.abs(expected).max())


def logits(model, ids):
    with ndl.no_grad():
        return model(ndl.Tensor(ids, device=model.device, dtype="int32", requires_grad=False)).numpy()


def stored(folder):
    """Every tensor of a folder, read by the package safetensors."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safetensors.safe_open(path, "numpy") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}
    return found


@pytest.fixture
def golden():
    with np.load(GOLDEN / "pythia_tiny.npz") as file:
        return dict(file)


@pytest.fixture
def folder(tmp_path):
    """A folder that loads, in one file."""
    Pythia.from_pretrained(PUBLISHED).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


# ---- both directions


def test_a_folder_that_transformers_wrote(host, golden):
    model = Pythia.from_pretrained(PUBLISHED, device=host)
    assert model.config == TINY and model.device == host
    assert relative(logits(model, golden["ids"]), golden["logits"]) < TOLERANCE


@pytest.mark.parametrize("size, files", [("5GB", 1), ("40KB", 3), (1, 28)])
def test_what_is_saved_is_what_transformers_saves(tmp_path, size, files):
    Pythia.from_pretrained(PUBLISHED).save_pretrained(tmp_path, max_shard_size=size)
    assert len(list(tmp_path.glob("*.safetensors"))) == files
    found, expected = stored(tmp_path), stored(PUBLISHED)
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name], strict=True)
    mine, theirs = (json.loads((path / "config.json").read_text()) for path in (tmp_path, PUBLISHED))
    known = {"classifier_dropout", "is_decoder", "pad_token_id", "transformers_version"}
    assert {key: value for key, value in theirs.items() if key not in known} == {key: mine[key] for key in theirs.keys() - known}
    if files > 1:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == expected.keys()
        assert index["metadata"]["total_size"] == sum(array.nbytes for array in expected.values())


def test_a_run_is_no_model_but_has_some(tmp_path):
    CheckpointFolder(tmp_path).save(3, Pythia(TINY, seed=3).save_pretrained)
    with pytest.raises(CheckpointError, match=r"cannot read .*config.json: .* \(a checkpoint of this run, such as .*step-000003\)"):
        Pythia.from_pretrained(tmp_path)
    Pythia.from_pretrained(tmp_path / "step-000003")


def test_wrong_arguments_are_named(tmp_path):
    model = Pythia(TINY, seed=3)
    with pytest.raises(TypeError, match=r"\[save_pretrained\] tokenizer is of type str"):
        model.save_pretrained(tmp_path / "model", "tokenizer.json")
    assert not list(tmp_path.iterdir())
    with pytest.raises(TypeError, match=r"\[pythia\] config is of type str .*PythiaConfig.named"):
        Pythia("70m")
    for ids in ([[1, 2]], np.ones((1, 2), np.int32)):
        with pytest.raises(TypeError, match=r"\[pythia\] input 0 is of type (list|numpy.ndarray)"):
            model(ids)


class Adapted(nn.Module):
    def __init__(self, base):
        self.base, self.scale = base, nn.Parameter(np.ones(1))

    def forward(self, x):
        return self.base(x) * ndl.broadcast_to(self.scale, x.shape)


def fewer_layers(model):
    model.layers = model.layers[:1]


def shared_layers(model):
    model.layers[1] = model.layers[0]


def adapter(model):
    model.layers[1].dense = Adapted(model.layers[1].dense)


def more_words(model):
    model.embed_out = ndl.ones(TINY.width, 99)


@pytest.mark.parametrize("change", [fewer_layers, shared_layers, adapter, more_words])
def test_a_model_without_the_parameters_of_its_config_is_not_saved(tmp_path, change):
    model = Pythia(TINY, seed=3)
    model.save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    change(model)
    with pytest.raises(
        CheckpointError, match=r"\[save_pretrained\] .* is (absent|\(99, 32\)) \(accepted: \(.*as the model's config says"
    ):
        model.save_pretrained(tmp_path)
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


def test_a_changed_model_is_saved_with_its_config(tmp_path):
    model = Pythia(TINY, seed=3)
    model.layers, model.embed_in, model.embed_out = model.layers[:1], ndl.ones(99, TINY.width), ndl.ones(TINY.width, 99)
    model.config = replace(model.config, layers=1, vocab_size=99)
    model.head = nn.Linear(2, 2)  # what else there is goes along
    model.save_pretrained(tmp_path)
    assert "gpt_neox.head.weight" in stored(tmp_path)


def test_saving_again_replaces_every_file(folder, golden):
    (folder / "README.md").write_text("mine")
    model = Pythia(TINY, seed=3)
    for size in (20_000, 40_000, "1GB", 30_000):
        model.save_pretrained(folder, max_shard_size=size)
        again = Pythia.from_pretrained(folder)
        for (name, p), q in zip(model.named_parameters(), again.parameters()):
            np.testing.assert_array_equal(p.numpy(), q.numpy(), err_msg=name)
        assert (folder / "README.md").read_text() == "mine" and not list(folder.glob(".*"))
        assert len(stored(folder)) == sum(len(read_tensors(path)) for path in folder.glob("*.safetensors")) == 28


def test_what_is_saved_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    done, flush, replace = [], ndl.files.flush, os.replace
    monkeypatch.setattr(ndl.files, "flush", lambda path: (done.append(path.name), flush(path)))
    monkeypatch.setattr(os, "replace", lambda old, new: (done.append(f"-> {new.name}"), replace(old, new)))
    Pythia(TINY, seed=3).save_pretrained(tmp_path / "model")
    assert done == ["config.json", "model.safetensors", "-> config.json", "-> model.safetensors", "model"]


def test_names_of_folders_may_be_texts(folder, tmp_path):
    write_folder(str(tmp_path), read_folder(str(folder)), 10**9)
    assert (tmp_path / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("dtype", [np.float16, np.dtype("float16"), "f2", "float16"])
def test_a_dtype_has_one_name_however_it_was_said(tmp_path, dtype):
    model = Pythia(PythiaConfig(layers=1, width=8, heads=2, feed_forward=8, vocab_size=11), dtype=dtype)
    model.save_pretrained(tmp_path)
    assert model.dtype == json.loads((tmp_path / "config.json").read_text())["dtype"] == "float16"
    assert Pythia.from_pretrained(tmp_path, dtype=dtype).dtype == "float16"


def test_names_that_no_folder_can_have(tmp_path):
    for name in ("x" * 300, "\ud800"):
        for call in (Pythia.from_pretrained, tokenizer_of, Pythia(TINY).save_pretrained):
            with pytest.raises(CheckpointError, match=r"folder|cannot write") as error:
                call(name)
            assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_old_folders_in_other_precisions(tmp_path, golden, dtype):
    """As published in 2023: constants in every layer, rotary_pct, no rope_parameters, half precision."""
    pytest.importorskip("ml_dtypes")
    arrays = {
        name: ndl.backend_ndarray.NDArray(values, dtype=dtype, device=ndl.cpu_numpy()) for name, values in stored(PUBLISHED).items()
    }
    for layer in range(2):
        place = f"gpt_neox.layers.{layer}.attention."
        arrays[place + "bias"] = np.tril(np.ones((1, 1, 64, 64), bool))
        arrays[place + "masked_bias"] = np.array(-1e9, np.float32)
        arrays[place + "rotary_emb.inv_freq"] = np.ones(1, np.float32)
    write_tensors(tmp_path / "model.safetensors", arrays)
    config = json.loads((PUBLISHED / "config.json").read_text())
    for key in ("rope_parameters", "attention_bias", "attention_dropout", "dtype"):
        del config[key]
    config |= {"rotary_pct": 0.25, "rotary_emb_base": 10000, "torch_dtype": dtype}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = Pythia.from_pretrained(tmp_path)
    assert model.config == TINY and model.dtype == "float32"
    rounding = {"float16": 5e-3, "bfloat16": 4e-2, "float64": TOLERANCE}[dtype]  # of the weights
    assert relative(logits(model, golden["ids"]), golden["logits"]) < rounding


def test_rotary_numbers_come_from_the_keys_that_transformers_reads(folder):
    """Version 4 wrote rope_theta and partial_rotary_factor as copies of rotary_emb_base and rotary_pct, which alone it reads again."""
    copies = {"rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    change_config(rope_parameters="absent", rotary_emb_base=500, rotary_pct=0.5, **copies)(folder)
    assert Pythia.from_pretrained(folder).config == replace(TINY, rotary_base=500.0, rotary_fraction=0.5)
    if importlib.util.find_spec("transformers") is not None:
        theirs = importlib.import_module("transformers").AutoConfig.from_pretrained(folder)
        rope = getattr(theirs, "rope_parameters", None) or {
            "rope_theta": theirs.rotary_emb_base, "partial_rotary_factor": theirs.rotary_pct
        }  # fmt: skip
        assert (rope["rope_theta"], rope["partial_rotary_factor"]) == (500, 0.5)


def test_a_sparse_model_keeps_its_pattern_and_dropout(tmp_path):
    config = replace(TINY.with_sparse("mixed", 16, 3), dropout=0.1)
    model = Pythia(config, seed=1)
    model.save_pretrained(tmp_path)
    again = Pythia.from_pretrained(tmp_path)
    assert again.config == config
    np.testing.assert_array_equal(logits(again, [[1, 2, 3]]), logits(model.eval(), [[1, 2, 3]]))  # which drops nothing out yet


@pytest.mark.parametrize("width, fraction", [(80, 0.25), (32, 0.1), (32, 0.0), (36, 0.4), (188, 0.13)])
def test_odd_heads_rotate_the_same_features_when_loaded(tmp_path, width, fraction):
    """Of 20 features a quarter would be 5; needle rotates 4, and says so in a way that transformers takes for 4."""
    model = Pythia(replace(TINY, width=width, rotary_fraction=fraction), seed=1)
    model.save_pretrained(tmp_path)
    again = Pythia.from_pretrained(tmp_path)
    ids = np.arange(12).reshape(1, 12)
    np.testing.assert_array_equal(logits(again, ids), logits(model, ids))
    said = json.loads((tmp_path / "config.json").read_text())["rope_parameters"]["partial_rotary_factor"]
    assert int(width // 4 * said) == model.config.rotary_width


@pytest.mark.parametrize("name", SIZES)
def test_every_size_has_the_published_names_and_shapes(name):
    layers, width, heads, feed_forward = SIZES[name]
    model = Pythia(PythiaConfig.named(name), device=ndl.meta(), seed=None)
    expected = parameter_shapes(PythiaShape(50304, width, heads, feed_forward, layers))
    assert {name: array.shape for name, array in published_state(model).items()} == expected


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_transformers_agrees_in_both_directions(tmp_path):
    torch, transformers = pytest.importorskip("torch"), importlib.import_module("transformers")
    ids = np.random.default_rng(0).integers(0, 97, (2, 40))
    reference = transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(
            vocab_size=97, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=256, initializer_range=0.1,
            max_position_embeddings=128,
        )
    ).eval()  # fmt: skip
    reference.save_pretrained(tmp_path / "theirs", max_shard_size="100KB")
    model = Pythia.from_pretrained(tmp_path / "theirs")
    with torch.no_grad():
        expected = reference(torch.from_numpy(ids)).logits.numpy()
    assert relative(logits(model, ids), expected) < TOLERANCE
    fresh = Pythia(PythiaConfig(layers=3, width=64, heads=4, feed_forward=256, vocab_size=300), seed=5)
    tokenizer = train_tokenizer(tmp_path / "tokenizer.json", [TEXT * 3], 300, "text")
    for size in ("5GB", "100KB"):
        fresh.save_pretrained(tmp_path / "mine", tokenizer, max_shard_size=size)
        theirs = transformers.GPTNeoXForCausalLM.from_pretrained(tmp_path / "mine").eval()
        assert theirs.dtype == torch.float32
        with torch.no_grad():
            found = theirs(torch.from_numpy(ids)).logits.numpy()
        assert relative(found, logits(fresh, ids)) < TOLERANCE
    tokens = transformers.AutoTokenizer.from_pretrained(tmp_path / "mine")
    assert tokens(TEXT)["input_ids"] == tokenizer.encode(TEXT).tolist() and tokens.eos_token == "<|endoftext|>"
    assert theirs.config.eos_token_id == tokens.eos_token_id == tokenizer.end_of_text


# ---- tokenizers


@pytest.mark.parametrize(
    "said, expected",
    [
        (
            {"eos_token_id": [5, 7], "pad_token_id": None, "temperature": None, "max_length": 20, "_from_model_config": True},
            {"eos_token_id": [5, 7]},
        ),
        ({"do_sample": True, "top_k": 3, "seed": 4}, {"do_sample": True, "top_k": 3}),
        (
            {"temperature": 0.0, "top_k": -1, "pad_token_id": -1, "eos_token_id": 5},
            {"eos_token_id": 5},
        ),  # as transformers takes them
        ({"temperature": 0.7, "top_k": 3, "do_sample": False}, {"temperature": 0.7, "top_k": 3}),
        ({"do_sample": True, "temperature": 0.0}, r"generation_config.json: \[generate\] temperature is 0.0"),
        ({"temperature": False}, r"generation_config.json: \[generate\] temperature is False"),
        ({"temperature": "hot"}, r"generation_config.json: \[generate\] temperature is 'hot'"),
        ({"eos_token_id": ["<|endoftext|>"]}, r"generation_config.json: \[generate\] eos_token_id is "),
        ([], r"generation_config.json: no JSON object"),
    ],
)
def test_tokens_are_chosen_as_the_folder_says(folder, said, expected):
    assert Pythia.from_pretrained(folder).generation_config == GenerationConfig(eos_token_id=0)
    (folder / "generation_config.json").write_text(json.dumps(said))
    if isinstance(expected, str):
        with pytest.raises(CheckpointError, match=expected):
            Pythia.from_pretrained(folder)
        return
    model, prompt = Pythia.from_pretrained(folder), [[1, 2, 3]]
    assert model.generation_config == GenerationConfig(**expected)
    other = GenerationConfig(max_new_tokens=9)
    np.testing.assert_array_equal(model.generate(prompt), model.generate(prompt, GenerationConfig(**expected)))
    np.testing.assert_array_equal(model.generate(prompt, other), Pythia.from_pretrained(PUBLISHED).generate(prompt, other))
    model.save_pretrained(folder)
    assert json.loads((folder / "generation_config.json").read_text()) == expected
    model.generation_config = GenerationConfig(seed=1, top_k=np.int64(50))
    model.save_pretrained(folder)
    assert not (folder / "generation_config.json").exists()
    model.generation_config = GenerationConfig(top_k=np.int64(3))
    model.save_pretrained(folder)
    assert Pythia.from_pretrained(folder).generation_config == GenerationConfig(top_k=3)
    model.generation_config = GenerationConfig(do_sample=True, top_k=None)  # all ids, as 0
    model.save_pretrained(folder)
    assert Pythia.from_pretrained(folder).generation_config == GenerationConfig(do_sample=True, top_k=0)


def test_ways_of_choosing_tokens_that_are_not_there_are_named(folder):
    others = {"num_beams": 3, "min_p": 0.1, "suppress_tokens": [1], "min_new_tokens": 4}
    usual = {"length_penalty": 1.0, "no_repeat_ngram_size": 0, "bos_token_id": 0, "max_length": 20, "transformers_version": "5.0"}
    (folder / "generation_config.json").write_text(json.dumps({**usual, "eos_token_id": 5}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Pythia.from_pretrained(folder).generation_config.eos_token_id == 5
    (folder / "generation_config.json").write_text(json.dumps({**usual, **others, "eos_token_id": 5}))
    with pytest.warns(
        UserWarning, match=r"generation_config.json: min_new_tokens, min_p, num_beams, suppress_tokens: no effect here"
    ):
        assert Pythia.from_pretrained(folder).generation_config.eos_token_id == 5


@pytest.mark.parametrize(
    "said, expected", [(5, 5), ([5, 7], [5, 7]), (None, None), ("5", r"config.json: \[generate\] eos_token_id is '5'")]
)
def test_without_a_generation_config_a_sequence_ends_as_config_json_says(folder, said, expected):
    """As in transformers; the published folders have none."""
    change_config(eos_token_id=said, pad_token_id=3)(folder)
    if isinstance(expected, str):
        with pytest.raises(CheckpointError, match=expected):
            Pythia.from_pretrained(folder)
        return
    assert Pythia.from_pretrained(folder).generation_config == GenerationConfig(eos_token_id=expected, pad_token_id=3)
    (folder / "generation_config.json").write_text("{}")
    assert Pythia.from_pretrained(folder).generation_config == GenerationConfig()


def test_the_tokenizer_goes_along(tmp_path):
    tokenizer = train_tokenizer(tmp_path / "tokenizer.json", [TEXT * 3], 300, "text")
    Pythia(replace(TINY, max_seq_len=96)).save_pretrained(tmp_path / "model", tokenizer)
    again = load_tokenizer(tmp_path / "model" / "tokenizer.json")
    np.testing.assert_array_equal(again.encode(TEXT), tokenizer.encode(TEXT))
    assert again.decode(again.encode(TEXT)) == TEXT
    about = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    assert about["eos_token"] == "<|endoftext|>" and about["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert about["model_max_length"] == 96


def test_what_transformers_hears_of_a_tokenizer_goes_along(tmp_path):
    train_tokenizer(tmp_path / "tokenizer.json", [TEXT * 3], 300, "text")
    kept = {"bos_token": "<s>", "pad_token": "<pad>", "padding_side": "left", "chat_template": "{{ messages[0] }}"}
    about = {
        **kept,
        "pad_token": {"content": "<pad>", "lstrip": False},
        "eos_token": "<|endoftext|>",
        "auto_map": {"A": ["b.C", None]},
    }
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({**about, "model_max_length": 7, "unk_token": None, "mask_token": 5})
    )
    for source, folder in ((tmp_path, tmp_path / "first"), (tmp_path / "first", tmp_path / "second")):
        Pythia(TINY).save_pretrained(folder, load_tokenizer(source / "tokenizer.json"))
        saved = json.loads((folder / "tokenizer_config.json").read_text())
        assert saved == {
            **kept, "eos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": TINY.max_seq_len,
            "clean_up_tokenization_spaces": False,
        }  # fmt: skip


def test_the_end_of_a_text_is_what_the_files_say(tmp_path):
    """Of a tokenizer without it transformers must hear that there is none, or it would stop at an ordinary token."""
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"the": 0, "<|endoftext|>": 1, "</s>": 2, "a": 3}, unk_token="a"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    config = PythiaConfig(layers=1, width=16, heads=2, feed_forward=32, vocab_size=4)
    for about, end in (
        (None, 1),
        ({}, 1),
        ({"eos_token": "</s>"}, 2),
        ({"eos_token": {"content": "</s>"}}, 2),
        ({"eos_token": "<pad>"}, None),
        ({"eos_token": None}, None),
    ):
        if about is not None:
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
        tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
        assert tokenizer.end_of_text == end
        Pythia(config).save_pretrained(tmp_path / "model", tokenizer)
        saved = json.loads((tmp_path / "model" / "config.json").read_text())
        assert saved["eos_token_id"] == saved["bos_token_id"] == end
        assert tokenizer_of(tmp_path / "model").end_of_text == end
        named = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
        assert named.get("unk_token") == ("<|endoftext|>" if end == 1 else None)  # as GPT-NeoX's says, and no other
    (tmp_path / "tokenizer_config.json").write_text("{")
    assert load_tokenizer(tmp_path / "tokenizer.json").end_of_text == 1


@pytest.mark.skipif("NEEDLE_TEST_TOKENIZER" not in os.environ, reason="NEEDLE_TEST_TOKENIZER names no 20B_tokenizer.json")
def test_the_published_tokenizer():
    """Ids that GPTNeoXTokenizer of transformers gives with the file published as 20B_tokenizer.json."""
    tokenizer = load_tokenizer(Path(os.environ["NEEDLE_TEST_TOKENIZER"]))
    golden = json.loads((GOLDEN / "published_tokenizer.json").read_text(encoding="utf-8"))
    assert tokenizer.size == golden["size"] and tokenizer.end_of_text == 0
    for text, ids in golden["texts"]:
        assert tokenizer.encode(text).tolist() == ids
        assert tokenizer.decode(ids) == unicodedata.normalize("NFC", text)  # as the tokenizer does with what it is given


# ---- memory


def test_memory_beyond_the_model_is_one_tensor(tmp_path):
    """numpy's arrays are seen by tracemalloc, the model's by its device."""
    device = ndl.cpu()
    model = Pythia(PythiaConfig(layers=4, width=256, heads=4, feed_forward=1024, vocab_size=8000), device=device)
    total = sum(array.nbytes for array in published_state(model).values())
    largest = 8000 * 256 * 4
    for size in ("5GB", "3MB"):
        tracemalloc.start()
        model.save_pretrained(tmp_path / size, max_shard_size=size)
        assert tracemalloc.get_traced_memory()[1] < largest + (12 << 20) < total
        tracemalloc.stop()
        before = device.memory_stats()["live"]
        device.reset_peak()
        tracemalloc.start()
        again = Pythia.from_pretrained(tmp_path / size)
        assert tracemalloc.get_traced_memory()[1] < largest + (4 << 20)
        tracemalloc.stop()
        assert device.memory_stats()["live"] - before == total
        assert device.memory_stats()["peak"] - before <= total + largest
        del again


# ---- the Hub


def test_a_name_on_the_hub(monkeypatch, tmp_path, folder):
    """The Hub's cache has links in snapshots/REVISION to files in blobs."""
    snapshot, blobs = (
        tmp_path / "models--EleutherAI--pythia" / "snapshots" / "abc",
        tmp_path / "models--EleutherAI--pythia" / "blobs",
    )
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / f"blob{i}")
        (snapshot / path.name).symlink_to(Path("..", "..", "blobs", f"blob{i}"))
    asked = []
    wanted = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
    wanted += ("model-00001-of-00002.safetensors", "model.safetensors.index.json")

    def download(name, revision, allow_patterns):
        asked.append((name, revision))
        assert not any("bin" in pattern or pattern == "*" for pattern in allow_patterns)
        for name in wanted:
            assert any(fnmatch(name, pattern) for pattern in allow_patterns), name
        return str(snapshot)

    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=download))
    assert Pythia.from_pretrained("EleutherAI/pythia", revision="step1000").config == TINY
    assert asked == [("EleutherAI/pythia", "step1000")]
    assert Pythia.from_pretrained(snapshot).config == TINY
    elsewhere = snapshot.parent.rename(snapshot.parent.with_name("others")) / snapshot.name  # not the Hub's cache
    with pytest.raises(CheckpointError, match=r"'config.json' is a link out of the folder, to .*blobs.blob"):
        Pythia.from_pretrained(elsewhere)


@pytest.fixture
def hub(folder):
    """A server of what huggingface_hub asks the Hub for: address, repository, what was asked."""
    repository, commit, asked = "EleutherAI/pythia", "0123456789abcdef0123456789abcdef01234567", []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def do_GET(self):
            path = self.path.split("?")[0]
            asked.append(path)
            files, headers, status = sorted(folder.iterdir()), {}, 200
            if path.startswith(f"/{repository}/resolve/") and (folder / Path(path).name).is_file():
                body = (folder / Path(path).name).read_bytes()
                headers = {"ETag": f'"{hashlib.sha256(body).hexdigest()}"', "X-Repo-Commit": commit}
            elif path.startswith(f"/api/models/{repository}/tree/"):
                answer = [{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": f.name} for f in files]
                body = json.dumps(answer).encode()
            elif path.startswith(f"/api/models/{repository}/revision/"):
                needed = {"private": False, "downloads": 0, "likes": 0, "tags": []}  # by huggingface_hub 0.20
                answer = {"id": repository, "sha": commit, "siblings": [{"rfilename": f.name} for f in files], **needed}
                body = json.dumps(answer).encode()
            else:
                body, headers, status = b'{"error": "none"}', {"X-Error-Code": "RepoNotFound"}, 404
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", repository, asked
        server.shutdown()


def test_a_download_by_huggingface_hub(hub, folder, tmp_path):
    """The real package, which reads its environment at import; the second time nothing but the revision is asked for."""
    pytest.importorskip("huggingface_hub")
    address, repository, asked = hub
    (folder / "pytorch_model.bin").write_bytes(b"a pickle, which nobody should ask for")
    ids = np.arange(24, dtype=np.int32).reshape(2, 12)
    code = """if True:
        import sys
        import numpy as np
        import needle as ndl
        try:
            model = ndl.models.Pythia.from_pretrained(sys.argv[1], device=ndl.cpu_numpy())
        except ndl.errors.CheckpointError as error:
            sys.exit(str(error))
        ids = ndl.Tensor(np.load(sys.argv[2]), device=model.device, dtype="int32", requires_grad=False)
        np.save(sys.argv[3], model(ids).numpy())
    """
    np.save(tmp_path / "ids.npy", ids)

    def load(name):
        environment = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
        arguments = [sys.executable, "-c", code, name, tmp_path / "ids.npy", tmp_path / "logits.npy"]
        return subprocess.run(arguments, env={**os.environ, **environment}, capture_output=True, text=True)

    for files in (["config.json", "model.safetensors"], []):
        asked.clear()
        done = load(repository)
        assert done.returncode == 0, done.stderr
        assert sorted({Path(path).name for path in asked if "/resolve/" in path}) == files
        (tmp_path / "logits.npy").rename(tmp_path / "found.npy")
        np.testing.assert_array_equal(
            np.load(tmp_path / "found.npy"), logits(Pythia.from_pretrained(folder, device=ndl.cpu_numpy()), ids)
        )
    refused = load("EleutherAI/absent")
    assert refused.returncode == 1 and "the Hub did not give EleutherAI/absent" in refused.stderr.splitlines()[-1]


def test_without_a_network_or_the_package(monkeypatch):
    def no_network(*_, **__):
        raise OSError("Got: ConnectError: Name or service not known\nPlease check your internet connection.")

    modules = __import__("sys").modules
    monkeypatch.setitem(modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=no_network))
    with pytest.raises(
        CheckpointError, match=r"Hub did not give EleutherAI/pythia-70m: .*Name or service not known Please"
    ) as caught:
        Pythia.from_pretrained("EleutherAI/pythia-70m")
    assert "\n" not in str(caught.value)
    monkeypatch.setitem(modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match="pip install huggingface_hub"):
        Pythia.from_pretrained("EleutherAI/pythia-70m")


@pytest.mark.parametrize("name", ["no/such/folder", "../up", "/absent", "a b/c", "x", "", ".hidden/x"])
def test_names_that_are_neither(name, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", types.SimpleNamespace())
    with pytest.raises(CheckpointError, match=r"no such folder|cannot read"):
        Pythia.from_pretrained(name)


# ---- hostile folders


def write_raw(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def entry(shape, start, stop, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


HEADERS = {
    "empty file": (b"", b"", 0),
    "overlapping offsets": ({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, bytes(12), None),
    "a hole": ({"a": entry([2], 4, 12)}, bytes(12), None),
    "beyond the end": ({"a": entry([4], 0, 16)}, bytes(8), None),
    "backwards": ({"a": entry([2], 8, 0)}, bytes(8), None),
    "negative offset": ({"a": entry([2], -8, 0)}, bytes(8), None),
    "bytes left over": ({"a": entry([2], 0, 8)}, bytes(12), None),
    "shape and bytes differ": ({"a": entry([3], 0, 8)}, bytes(8), None),
    "negative shape": ({"a": entry([-1, -2], 0, 8)}, bytes(8), None),
    "product overflows": ({"a": entry([1 << 62, 4], 0, 0)}, b"", None),
    "huge header": ({"a": entry([2], 0, 8)}, bytes(8), 1 << 60),
    "header beyond the file": ({"a": entry([2], 0, 8)}, bytes(8), 1000),
    "duplicate key": (b'{"a":%b,"a":%b}' % ((json.dumps(entry([2], 0, 8)).encode(),) * 2), bytes(8), None),
    "deep": (b"[" * 100_000, b"", None),
    "no object": (b"[]", b"", None),
    "no entry": ({"a": 1}, b"", None),
    "unknown dtype": ({"a": entry([8], 0, 8, "F8_E4M3")}, bytes(8), None),
    "no such dtype": ({"a": entry([8], 0, 8, "object")}, bytes(8), None),
    "a number's digits": (b'{"a": ' + b"9" * 100_000 + b"}", b"", None),
    "no UTF-8": (b'{"\xff": 1}', b"", None),
}


@pytest.mark.parametrize("size", [0, 5, 8, 100])
def test_a_file_that_is_cut_off_says_so(folder, size):
    os.truncate(folder / "model.safetensors", size)
    with pytest.raises(CheckpointError, match=r"cannot read .*model.safetensors: cut off before the end of its header"):
        read_folder(folder)


@pytest.mark.parametrize("case", HEADERS)
def test_lying_headers(tmp_path, case):
    path = tmp_path / "x.safetensors"
    write_raw(path, *HEADERS[case])
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        read_tensors(path)
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()


@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(data=st.data())
def test_whatever_safetensors_refuses_is_refused(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("mutant") / "x.safetensors"
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(4, np.float16), "c": np.array(7, np.int64)}
    write_tensors(path, arrays)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(len(content) - 3, len(content)))]
    path.write_bytes(content)
    try:
        with safetensors.safe_open(path, "numpy") as file:
            expected = {name: file.get_tensor(name) for name in file.keys()}
    except Exception:  # its own error, or numpy's for a dtype or a shape that numpy lacks
        with pytest.raises(CheckpointError):
            read_tensors(path)
        return
    try:
        found = read_tensors(path)
    except CheckpointError:
        return  # stricter
    assert found.keys() == expected.keys()
    for name in found:
        assert found[name].tobytes() == expected[name].tobytes() and found[name].dtype == expected[name].dtype


def replace_text(name, old, new):
    def change(folder):
        before = (folder / name).read_text()
        assert old in before
        (folder / name).write_text(before.replace(old, new))

    return change


def change_config(**changes):
    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        config.update(changes)
        (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))

    return change


def change_tensors(change):
    def changed(folder):
        arrays = {name: np.array(values) for name, values in read_tensors(folder / "model.safetensors").items()}
        change(arrays)
        (folder / "model.safetensors").unlink()
        write_tensors(folder / "model.safetensors", arrays)

    return changed


def change_index(change):
    def changed(folder):
        Pythia.from_pretrained(folder).save_pretrained(folder, max_shard_size=40_000)
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        change(index["weight_map"], folder)
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return changed


def first(places, folder, value):
    places[next(iter(places))] = value


def link_out(places, folder):
    """A shard that is a link to a good file elsewhere."""
    outside = folder.parent / "outside.safetensors"
    shard = folder / "model-00001-of-00003.safetensors"
    shard.rename(outside)
    shard.symlink_to(outside)


def no_table(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": ["model.safetensors"]}')


def pickled(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def write(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def replace_by_link(name, target):
    def change(folder):
        (folder / name).unlink()
        (folder / name).symlink_to(target)

    return change


NORM = "gpt_neox.final_layer_norm.weight"
HOSTILE = {
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "no weights"),
    "pickled weights": (pickled, "pickled and could run code"),
    "a pickled model": (lambda f: (f / "model.safetensors").rename(f / "model.pt"), "only model.pt, which is pickled"),
    "truncated weights": (lambda folder: os.truncate(folder / "model.safetensors", 50_000), "not fully covered|IncompleteBuffer"),
    "a tensor is missing": (change_tensors(lambda a: a.pop(NORM)), "missing .*final_layer_norm"),
    "a tensor more": (change_tensors(lambda a: a.update(evil=np.zeros(3))), "unexpected .*evil"),
    "needle's own name": (change_tensors(lambda a: a.update(embed_in=a.pop("gpt_neox.embed_in.weight"))), "unexpected .*embed_in"),
    "nearly a constant": (change_tensors(lambda a: a.update({"gpt_neox.layers.0.mlp.bias": np.zeros(3)})), "unexpected"),
    "wrong shape": (change_tensors(lambda a: a.update({NORM: np.zeros((4, 8), np.float32)})), r"\(4, 8\).*accepted: \(32,\)"),
    "transposed": (change_tensors(lambda a: a.update({"embed_out.weight": np.zeros((32, 97), np.float32)})), r"\(32, 97\)"),
    "integers": (change_tensors(lambda a: a.update({NORM: np.zeros(32, np.int32)})), "int32"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json: No such file"),
    "config is a folder": (lambda folder: ((folder / "config.json").unlink(), (folder / "config.json").mkdir()), "no file"),
    "config is no JSON": (write("config.json", b"{"), "config.json"),
    "config is large": (write("config.json", b" " * (5 << 20)), "larger than"),
    "config is deep": (write("config.json", b'{"a":' * 200_000), "too deeply"),
    "config says it twice": (write("config.json", b'{"vocab_size": 97, "vocab_size": 98}'), "'vocab_size' comes twice"),
    "another model": (change_config(model_type="llama"), "model_type is 'llama'"),
    "tied embeddings": (change_config(tie_word_embeddings=True), "tie_word_embeddings is True"),
    "another activation": (change_config(hidden_act="gelu_new"), "hidden_act"),
    "sequential residual": (change_config(use_parallel_residual=False), "use_parallel_residual"),
    "stretched rotary": (change_config(rope_parameters={"rope_type": "yarn"}), "rope_parameters"),
    "stretched rotary under its old name": (change_config(rope_parameters={"type": "linear", "factor": 2.0}), "rope_parameters"),
    "heads of another width": (change_config(head_dim=4), "head_dim is 4 .accepted: 8"),
    "old stretched rotary": (change_config(rope_scaling={"type": "linear", "factor": 2.0}), "rope_scaling"),
    "no size": (change_config(hidden_size="absent"), "hidden_size is None"),
    "a text as size": (change_config(hidden_size="32"), "hidden_size"),
    "true as size": (change_config(num_hidden_layers=True), "num_hidden_layers"),
    "negative layers": (change_config(num_hidden_layers=-2), "num_hidden_layers"),
    "a billion layers": (change_config(num_hidden_layers=10**9), "1000000000 layers"),
    "a huge vocabulary": (change_config(vocab_size=2**31 - 1), r"embed_in.weight is \(97, 32\)"),
    "too wide": (change_config(hidden_size=2**30, num_attention_heads=2**22), r"is \(97, 32\) .*accepted: \(97, 1073741824\)"),
    "a head too wide": (change_config(hidden_size=2**30), "width / heads is .*accepted"),
    "heads do not divide": (change_config(num_attention_heads=5), "no multiple of 5 heads"),
    "eps is no number": (change_config(layer_norm_eps="1"), "layer_norm_eps"),
    "a base without end": (replace_text("config.json", '"rope_theta": 10000.0', '"rope_theta": 1e400'), "1e400 is no number"),
    "a base that no float holds": (change_config(rope_parameters={"rope_theta": 10**400}), "rope_theta"),
    "rotary angles are no table": (change_config(rope_parameters=[]), "rope_parameters"),
    "attention that is no table": (change_config(needle_attention=0), "needle_attention"),
    "a name of a megabyte": (change_tensors(lambda t: t.update({"x" * 10**6: np.zeros(1)})), "names differ"),
    "all is dropped": (change_config(hidden_dropout=1.0), "hidden_dropout"),
    "rotary of three features": (change_config(rope_parameters={"partial_rotary_factor": 0.4}), "head's 8 features, not 3"),
    "rotary beyond the head": (change_config(rope_parameters={"partial_rotary_factor": 4}), "rotary_pct"),
    "a wrong pattern": (change_config(needle_attention={"pattern": "evil", "block": 16, "window": 1}), "needle_attention"),
    "a pattern alone": (change_config(needle_attention={"pattern": "local"}), "needle_attention"),
    "a window of text": (change_config(needle_attention={"pattern": "local", "block": 16, "window": "1"}), "window is '1'"),
    "a model of a megabyte": (change_config(model_type="x" * 10**6), r"model_type is 'x{79} \(accepted: 'gpt_neox'\)"),
    "a wrong block": (change_config(needle_attention={"pattern": "local", "block": 10**6, "window": 1}), "block"),
    "index leads up": (change_index(lambda p, f: first(p, f, "../outside.safetensors")), "leads out of the folder"),
    "index is absolute": (change_index(lambda p, f: first(p, f, "/etc/passwd")), "leads out of the folder"),
    "index names a folder": (change_index(lambda p, f: first(p, f, "..")), "leads out of the folder"),
    "index names nothing": (change_index(lambda p, f: first(p, f, "")), "leads out of the folder"),
    "index names a number": (change_index(lambda p, f: first(p, f, 3)), "no table of file names"),
    "index is no table": (no_table, "no table of file names"),
    "index is missing a file": (change_index(lambda p, f: first(p, f, "absent.safetensors")), "missing: .*absent"),
    "index names another file": (change_index(lambda p, f: first(p, f, "model-00002-of-00003.safetensors")), "which is"),
    "index lacks a tensor": (change_index(lambda p, f: p.popitem()), "says None"),
    "index has a tensor more": (change_index(lambda p, f: p.update(evil="model-00001-of-00003.safetensors")), "not in"),
    "zero bytes in the name": (change_index(lambda p, f: first(p, f, "a\0b")), "cannot read"),
    "a shard is a link out": (change_index(link_out), "link out of the folder"),
    "the weights are a link out": (replace_by_link("model.safetensors", "/etc/hostname"), "link out of the folder"),
    "the config is a device": (replace_by_link("config.json", "/dev/zero"), "link out of the folder"),
    "a link to itself": (replace_by_link("config.json", "config.json"), "config.json"),
    "a pipe": (lambda folder: ((folder / "config.json").unlink(), os.mkfifo(folder / "config.json")), "no file"),
}


@pytest.mark.parametrize("target", ["/dev/zero", "/etc/hostname", "tokenizer.json", "pipe", "large"])
def test_hostile_tokenizers(folder, target):

    path = folder / "tokenizer.json"
    path.unlink(missing_ok=True)
    if target == "pipe":
        os.mkfifo(path)
    elif target == "large":
        with open(path, "wb") as file:
            file.truncate(1 << 40)
    else:
        path.symlink_to(target)
    with pytest.raises(DataError, match=r"\[tokenizer\] cannot read .*tokenizer.json: .*"):
        tokenizer_of(folder)


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_folders(folder, case):
    change, said = HOSTILE[case]
    change(folder)
    tracemalloc.start()
    live = ndl.cpu().memory_stats()["live"]
    with pytest.raises(CheckpointError, match=said) as caught:
        Pythia.from_pretrained(folder)
    assert tracemalloc.get_traced_memory()[1] < 48 << 20 and ndl.cpu().memory_stats()["live"] == live
    tracemalloc.stop()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 2000 and str(caught.value).count("cannot read") <= 1


def test_a_sparse_file_larger_than_memory(folder):
    """It costs nothing on the disk and everything when it is read."""
    rows = 1 << 30
    header = {}
    stop = 0
    for name, array in read_tensors(folder / "model.safetensors").items():
        shape = [rows, 32] if "embed" in name else list(array.shape)
        start, stop = stop, stop + int(np.prod(shape)) * 4
        header[name] = entry(shape, start, stop)
    write_raw(folder / "model.safetensors", header)
    try:
        os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size + stop)
    except OSError as error:
        pytest.skip(f"no sparse files here: {error}")
    change_config(vocab_size=rows)(folder)
    with pytest.raises(CheckpointError, match=r"parameters take 274,.* bytes \(cpu\(\) has .*\)"):
        Pythia.from_pretrained(folder)


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"\[save_pretrained\] cannot write .*file"):
        Pythia(TINY).save_pretrained(tmp_path / "file")


@pytest.mark.parametrize("name, why", [("", "is empty"), ("~a\0b", "can be none")])
def test_what_is_no_name_is_no_folder_to_save_in(tmp_path, monkeypatch, name, why):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=rf"\[save_pretrained\] no folder: \[path\] .*{why}"):
        Pythia(TINY).save_pretrained(name)
    assert not list(tmp_path.iterdir())


def test_a_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    Pythia(TINY).save_pretrained("~/model")
    assert Pythia.from_pretrained("~/model").config == TINY and sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_parameters_are_floats(folder):
    for dtype in ("int32", "bool"):
        with pytest.raises(DTypeError, match=rf"\[pythia\] dtype is {dtype} \(accepted: floats\)"):
            Pythia.from_pretrained(folder, dtype=dtype)


@pytest.mark.parametrize("size, expected", [("5GB", 5 * 10**9), ("200MiB", 200 << 20), ("1.5 kb", 1500), (77, 77), ("12", 12)])
def test_sizes(size, expected):
    assert parse_size(size) == expected


@pytest.mark.parametrize("size", ["", "GB", "-5", "5XB", 0, "1e9", "nan"])
def test_wrong_sizes(size):
    with pytest.raises(CheckpointError, match="max_shard_size"):
        parse_size(size)
