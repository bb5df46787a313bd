"""Perplexity and last words against figures computed by hand from the logits, one token at a time."""

import math

import numpy as np
import pytest

import needle as ndl
from needle.errors import ShapeError
from needle.models import Pythia, PythiaConfig, score_endings, score_text
from needle.models.evaluation import TextScore, WordScore, windows

VOCABULARY = 61


@pytest.fixture(params=[None, "local"])
def model(request, host):
    config = PythiaConfig(layers=2, width=32, heads=4, feed_forward=64, vocab_size=VOCABULARY, max_seq_len=32)
    return Pythia(config.with_sparse(request.param, block=16) if request.param else config, device=host, seed=3)


def log_probabilities(model, ids):
    """(T, V) in float64: what the model says after each position."""
    with ndl.no_grad():
        logits = model(ndl.Tensor([ids], device=model.device, dtype="int32", requires_grad=False)).numpy()[0].astype(np.float64)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


@pytest.mark.parametrize(
    "window, stride, batch_size", [(32, 32, 1), (32, 8, 3), (32, 8, 4), (16, 5, 4), (16, 1, 8), (100, 100, 1), (100, 50, 10**30)]
)
def test_sliding_window_by_hand(model, window, stride, batch_size):
    ids = np.random.default_rng(0).integers(0, VOCABULARY, 75)
    nats, done, start = 0.0, 0, 0
    while done < len(ids) - 1:
        end = min(start + window, len(ids) - 1)
        said = log_probabilities(model, ids[start:end])
        for t in range(done + 1, end + 1):
            nats -= said[t - 1 - start, ids[t]]
        done, start = end, start + stride
    score = score_text(model, ids, window, stride, batch_size)
    assert score.tokens == 74
    assert score.nats == pytest.approx(nats, rel=1e-5)
    assert score.perplexity == pytest.approx(math.exp(nats / 74), rel=1e-4)
    assert score.bits_per_byte(200) == pytest.approx(nats / math.log(2) / 200, rel=1e-5)


@pytest.mark.parametrize("tokens", [2, 3, 16, 17, 18, 33, 50])
@pytest.mark.parametrize("window, stride", [(16, 16), (16, 4), (16, 1), (1, 1)])
def test_every_token_but_the_first_is_asked_for_once(tokens, window, stride):
    asked = []
    for first, last, scored in windows(tokens, window, stride):
        assert first <= scored < last <= first + window
        asked += range(scored + 1, last + 1)
    assert asked == list(range(1, tokens))


def test_the_default_window_is_the_models(model):
    ids = np.random.default_rng(1).integers(0, VOCABULARY, 70)
    assert score_text(model, ids).nats == score_text(model, ids, 32, 32).nats != score_text(model, ids, 70).nats
    done = []
    score_text(model, ids, batch_size=2, progress=done.append)
    assert done == [64, 69]


def test_endings_by_hand(model):
    rng = np.random.default_rng(2)
    examples = [
        (rng.integers(0, VOCABULARY, c), rng.integers(0, VOCABULARY, e)) for c, e in ((5, 1), (12, 3), (1, 2), (40, 2), (7, 1))
    ]
    for i in (0, 3, 4):  # endings that the model itself would write, so that some are right
        context, ending = examples[i]
        text = list(context[-(32 + 1 - len(ending)) :])
        for _ in ending:
            text.append(int(log_probabilities(model, text)[-1].argmax()))
        examples[i] = (context, np.array(text[-len(ending) :]))
    nats, correct = 0.0, 0
    for context, ending in examples:
        text = np.concatenate([context, ending])[-33:]
        said = log_probabilities(model, text[:-1])[-len(ending) :]
        nats -= said[np.arange(len(ending)), ending].sum()
        correct += bool((said.argmax(axis=1) == ending).all())
    assert 3 <= correct < 5
    for batch_size in (1, 2, 5):
        score = score_endings(model, examples, batch_size=batch_size)
        assert (score.words, score.correct) == (5, correct) and score.accuracy == correct / 5
        assert score.nats == pytest.approx(nats, rel=1e-5)
        assert score.perplexity == pytest.approx(math.exp(nats / 5), rel=1e-4)


def test_a_model_in_training_drops_nothing(host):
    config = PythiaConfig(layers=1, width=16, heads=2, feed_forward=32, vocab_size=VOCABULARY, max_seq_len=16, dropout=0.5)
    model, ids = Pythia(config, device=host), np.arange(40)
    examples = [(ids[:5], ids[5:7]), (ids[9:20], ids[20:21])]
    found = score_text(model, ids), score_endings(model, examples)
    assert model.training and model.dropout.drawn == 0
    model.eval()
    assert found == (score_text(model, ids), score_endings(model, examples))


def test_no_graph_is_kept(model):
    before = model.device.memory_stats()["live"]
    ids = np.arange(60) % VOCABULARY
    score_text(model, ids, 30)
    held = model.device.memory_stats()["live"]
    score_text(model, ids, 30)
    score_endings(model, [(ids[:20], ids[20:22])])
    assert model.device.memory_stats()["live"] - held < 4096 and held - before < 8192  # tables of angles, layouts
    assert all(p.grad is None for p in model.parameters())


def test_bad_arguments(model):
    ids = np.arange(10)
    for wrong, said in (
        ((ids[:1],), "at least two"),
        ((ids, 8, 9), "stride is 9"),
        ((ids, 8, 0), "stride is 0"),
        ((ids, 8, 8, 0), "batch_size is 0"),
        ((ids + 0.5, 8), "float64"),
        ((ids.reshape(2, 5), 8), r"\(2, 5\)"),
    ):
        with pytest.raises(ShapeError, match=said):
            score_text(model, *wrong)
    assert score_text(model, ids[:2].tolist()).tokens == 1
    with pytest.raises(ShapeError, match="0 examples"):
        score_endings(model, [])
    for name in ("window", "batch_size"):
        with pytest.raises(ShapeError, match=f"{name} is 0"):
            score_endings(model, [(ids, ids)], **{name: 0})
    with pytest.raises(ShapeError, match="example 0 has 10 context and 10 ending ids"):
        score_endings(model, [(ids, ids)], window=9)
    assert score_endings(model, [(ids, ids)], window=10).words == 1
    with pytest.raises(ShapeError, match="example 1 has 0 context"):
        score_endings(model, [(ids, ids), (ids[:0], ids)])
    for wrong in ((ids + 0.5, ids), (ids, [True]), (ids, [[1]])):
        with pytest.raises(ShapeError, match=r"example 0 is .*whole numbers in a row"):
            score_endings(model, [wrong])


def test_ids_that_are_none_are_named(model):
    """As an int32 they might be others, or stand for what does not count."""
    ids = np.arange(10)
    for wrong in (-100, -1, model.config.vocab_size, 2**32 + 3):
        for place in (0, 9):
            changed = np.where(ids == place, wrong, ids)
            with pytest.raises(IndexError, match=rf"\[score_text\] id {wrong} is outside the vocabulary"):
                score_text(model, changed)
            for example in ((ids, changed), (changed, ids)):
                with pytest.raises(IndexError, match=rf"\[score_endings\] id {wrong} in example 1 is outside the vocabulary"):
                    score_endings(model, [(ids, ids), example])


def test_figures_of_a_score():
    score = TextScore(nats=8 * math.log(2), tokens=4)
    assert score.loss == pytest.approx(2 * math.log(2)) and score.perplexity == pytest.approx(4) and score.bits_per_byte(8) == 1
    assert score.bits_per_byte(1) == 8
    assert math.isnan(score.bits_per_byte(0))
    assert TextScore(nats=1e9, tokens=1).perplexity == WordScore(1, 0, nats=1e9).perplexity == math.exp(700)  # no OverflowError


def test_equals_transformers_on_the_same_weights(tmp_path):
    """Perplexity, greedy text, sampled logits and left-padded batches against the reference implementation."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = PythiaConfig(layers=2, width=64, heads=4, feed_forward=128, vocab_size=VOCABULARY)
    model = Pythia(config, device=ndl.cpu(), seed=5)
    model.save_pretrained(tmp_path)
    theirs = transformers.GPTNeoXForCausalLM.from_pretrained(tmp_path).eval()

    ids = np.random.default_rng(0).integers(0, VOCABULARY, 60)
    for stride in (16, 7):
        nats, done = 0.0, 0
        for start in range(0, len(ids), stride):
            end = min(start + 16, len(ids) - 1)
            with torch.no_grad():
                said = theirs(torch.from_numpy(ids[None, start:end])).logits[0].double().log_softmax(-1)
            nats -= sum(float(said[t - 1 - start, ids[t]]) for t in range(done + 1, end + 1))
            done = end
            if done == len(ids) - 1:
                break
        assert score_text(model, ids, 16, stride, batch_size=2).perplexity == pytest.approx(math.exp(nats / 59), rel=1e-5)

    prompts = [[1, 2, 3, 4, 5, 6, 7], [8, 9], [10, 11, 12, 13]]
    padded = torch.tensor([[0] * (7 - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (7 - len(p)) + [1] * len(p) for p in prompts])
    options = {"max_new_tokens": 25, "eos_token_id": 60, "pad_token_id": 0}
    for more in ({}, {"repetition_penalty": 1.3}):
        if more:  # their penalty counts the padding too, so one prompt
            padded, mask, prompts = padded[:1], mask[:1], prompts[:1]
        expected = theirs.generate(padded, attention_mask=mask, do_sample=False, **options, **more).numpy()
        found = model.generate(prompts, **options, **more)
        for row, other, prompt in zip(found, expected, prompts, strict=True):
            np.testing.assert_array_equal(row[: len(prompt) + expected.shape[1] - 7], [*prompt, *other[7:]])
