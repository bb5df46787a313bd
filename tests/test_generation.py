"""Generation: the cache equals the full forward pass, choices follow their options, memory stays where it is."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

import needle as ndl
from needle import amp, memory
from needle.backend_ndarray import block_layout, kernels
from needle.backend_ndarray.block_layout import BlockLayout, dense_layout
from needle.backend_ndarray.ndarray import NDArray
from needle.errors import ShapeError
from needle.models import GenerationConfig, Pythia, PythiaConfig, generation
from needle.nn import PATTERNS, causal_pattern

VOCABULARY = 61
PROMPTS = [list(range(20)), [5], list(range(40, 57)), list(range(33))]


def small(pattern=None, device=None, **kwargs):
    config = PythiaConfig(layers=2, width=32, heads=4, feed_forward=64, vocab_size=VOCABULARY)
    return Pythia(config.with_sparse(pattern, block=16) if pattern else config, device=device, seed=3, **kwargs)


def all_logits(model, ids):
    """(T, V): the full forward pass on one sequence."""
    with ndl.no_grad():
        return model(ndl.Tensor([ids], device=model.device, dtype="int32", requires_grad=False)).numpy()[0]


@pytest.mark.parametrize("pattern", [None, *PATTERNS])
def test_cached_logits_equal_the_full_forward_pass(device, pattern):
    """At every position of every sequence, of prompts of unequal length, across block boundaries."""
    model = small(pattern, device)
    prompts = [np.array(p) for p in PROMPTS]
    steps = 6 if device.name == "cuda_sim" else 30
    following = np.random.default_rng(0).integers(0, VOCABULARY, (steps, len(prompts)))
    decoder = generation.Decoder(model, prompts, steps)
    found = [decoder.start()] + [decoder.step(ids, np.ones(len(prompts), bool)) for ids in following]
    for b, prompt in enumerate(prompts):
        expected = all_logits(model, np.concatenate([prompt, following[:, b]]))[len(prompt) - 1 :]
        np.testing.assert_allclose(np.array([step[b] for step in found]), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_sparse_decoding_reads_no_other_block(device, pattern):
    """Whatever lies in the blocks of the cache that the pattern does not name, even NaN, changes nothing."""
    model = small(pattern, device)
    prompts = [np.arange(61) % VOCABULARY, np.arange(50) % VOCABULARY]
    running = np.ones(2, bool)
    found = []
    for poisoned in (False, True):
        decoder = generation.Decoder(model, prompts, 8)
        decoder.start()
        if poisoned:
            layout = decoder.layout
            for cache in (*decoder.cache.keys, *decoder.cache.values):
                for b in range(2):
                    named = layout.mask[0, len(prompts[b]) // 16 : (len(prompts[b]) + 7) // 16 + 1].any(axis=0)
                    for block in np.flatnonzero(~named):
                        cache[b : b + 1, :, block * 16 : block * 16 + 16] = float("nan")
        found.append([decoder.step(np.array([1, 2]), running) for _ in range(8)])
    assert any(not layout.mask[0, len(p) // 16 : (len(p) + 7) // 16 + 1].any(axis=0).all() for p in prompts)
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("block, heads, D, S", [(16, 2, 8, 40), (64, 1, 100, 150), (128, 1, 33, 129), (16, 2, 20, 300)])
def test_the_kernel_equals_attention(device, dtype, block, heads, D, S):
    """attention_decode against attention over the same layout, with tails, layouts per head and strided operands.

    At the first and last positions of blocks, and of the parts of 128 keys that blocks of a GPU's threads take.
    """
    rng = np.random.default_rng(D)
    positions = np.array([at for at in (S - 1, 0, S // 2, block - 1, block, 127, 128, 255, 256) if at < S], np.int32)
    B, H, blocks = len(positions), 4, -(-S // block)
    layout = BlockLayout((rng.random((heads, blocks, blocks)) < 0.6) | np.eye(blocks, dtype=bool), block, causal=True)
    full = [rng.standard_normal((B, H, S, D)) for _ in range(3)]
    caches = [NDArray(x, device=device, dtype=dtype) for x in full[1:]]
    packed = np.stack([x[np.arange(B), :, positions] for x in full], axis=2)  # (B, H, 3, D)
    packed = NDArray(packed, device=device, dtype=dtype)
    views = [packed[:, :, i : i + 1] for i in range(3)]
    for b in range(B):  # the kernel itself must put the new rows there
        for cache in caches:
            cache[b : b + 1, :, positions[b] : positions[b] + 1] = 100.0
    before = caches[1].last_write
    found = kernels.attention_decode(*views, *caches, NDArray(positions, device=device, dtype="int32"), layout, 0.3).numpy()
    assert min(cache.last_write for cache in caches) > before
    q, k, v = (NDArray(x, device=ndl.cpu_numpy(), dtype=dtype) for x in full)
    expected, _ = kernels.attention(q, k, v, layout, 0.3)
    expected = expected.numpy()[np.arange(B), :, positions][:, :, None]
    tolerance = {"float32": 1e-5, "float64": 1e-12, "float16": 4e-3, "bfloat16": 3e-2}[dtype]
    np.testing.assert_allclose(found.astype(np.float64), expected.astype(np.float64), rtol=tolerance, atol=tolerance)
    for cache, values in zip(caches, (k, v), strict=True):
        np.testing.assert_array_equal(cache.numpy(), values.numpy())


def test_new_rows_that_lie_in_memory_each_in_its_own_order(device):
    rng = np.random.default_rng(0)
    rows = [NDArray(rng.standard_normal((2, 3, 1, 8)), device=device) for _ in range(3)]
    positions = NDArray(np.array([4, 9]), device=device, dtype="int32")

    def found(*rows):
        caches = [NDArray(np.ones((2, 3, 20, 8)), device=device) for _ in range(2)]
        out = kernels.attention_decode(*rows, *caches, positions, dense_layout(20, 20, 16), 0.3)
        return [x.numpy() for x in (out, *caches)]

    wanted = found(*rows)
    for i in range(3):
        turned = NDArray(rows[i].numpy().swapaxes(0, 1), device=device).permute((1, 0, 2, 3))
        for x, y in zip(found(*rows[:i], turned, *rows[i + 1 :]), wanted, strict=True):
            np.testing.assert_array_equal(x, y)


def test_a_key_of_no_weight_is_like_one_that_is_not_there(device):
    """Also where those that are read together with it have none either."""
    one, cache = (NDArray(np.ones(shape), device=device) for shape in ((1, 1, 1, 8), (1, 1, 20, 8)))
    late = NDArray(np.where(np.arange(20)[:, None] < 16, -np.inf, np.ones((1, 1, 20, 8))), device=device)
    for keys, position, wanted in ((cache, 3, 1), (cache, 4, 1), (cache, 12, 1), (late, 18, 1), (late, 14, 0)):
        at = NDArray(np.array([position]), device=device, dtype="int32")
        found = kernels.attention_decode(one, one * -np.inf, one * 5, keys.copy(), cache.copy(), at, dense_layout(20, 20, 16), 1.0)
        np.testing.assert_allclose(found.numpy(), one.numpy() * wanted, rtol=1e-6)


def test_the_kernel_refuses_what_does_not_fit(device):
    def call(positions, S=20, layout=None, values=20, D=8, new=1):
        x, cache, other = (NDArray(np.ones((2, 1, n, D)), device=device) for n in (new, S, values))
        at = NDArray(np.array(positions), device=device, dtype="int32")
        kernels.attention_decode(x, x, x, cache, other, at, layout or dense_layout(S, S, 64), 1.0)
        device.sync()

    with pytest.raises(IndexError, match=r"\[attention_decode\] position 20 of sequence 1 is outside the cache \(0..19\)"):
        call([0, 20])
    for wrong in (lambda: call([0]), lambda: call([0, 1], new=2)):
        with pytest.raises(ShapeError, match=r"\[attention_decode\] q is \(2, 1, ., 8\), .*accepted: \(B, H, 1, D\)"):
            wrong()
    with pytest.raises(ShapeError, match="does not fit 20 positions"):
        call([0, 1], layout=dense_layout(200, 200, 64))
    with pytest.raises(ShapeError, match="does not fit"):
        call([0, 1], layout=dense_layout(20, 20, 64, causal=False))
    for layout in (dense_layout(20, 20, 64, q_start=1), BlockLayout(np.ones((2, 1, 1)), 64, causal=True)):
        with pytest.raises(ShapeError, match="does not fit 20 positions of 1 heads"):
            call([0, 1], layout=layout)
    with pytest.raises(ShapeError, match=r"and \(2, 1, 19, 8\), positions"):
        call([0, 1], values=19)
    with pytest.raises(ShapeError, match=r"\[attention_decode\] heads of 257 features"):
        call([0, 1], D=257)
    with pytest.raises(ShapeError, match=r"positions \(3,\)"):
        call([0, 1, 2])


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("k, n", [(1, 1), (7, 5), (64, 2048), (500, 700), (2048, 130), (33, 5000), (130, 2100), (4500, 61)])
@pytest.mark.parametrize("apart", ["as wide", "a power of two"])
def test_products_of_few_rows(cpu, dtype, k, n, apart):
    """1 to 17 rows times a matrix, against float64; a row's bits do not depend on the other rows while they are few.

    apart: elements from one row of the matrix to the next; of rows a power of two apart few fit into a cache side by side.
    """
    row = n if apart == "as wide" else max(512, 1 << n.bit_length())
    rng = np.random.default_rng(n)
    a, b = (NDArray(rng.standard_normal(s) / 8, device=cpu, dtype=dtype) for s in ((17, k), (k, row)))
    b = b[:, :n]
    expected = a.numpy().astype(np.float64) @ b.numpy().astype(np.float64)
    tolerance = {"float32": 1e-5, "float64": 1e-12, "float16": 4e-3, "bfloat16": 4e-2}[dtype]
    few = 16 if n * k >= 1 << 18 and b.dtype in ("float32", "float64") else 8
    whole = (a[:few] @ b).numpy()
    for m in (1, 2, 3, 5, 8, 9, 15, 16, 17):
        found = (a[:m] @ b).numpy()
        np.testing.assert_allclose(found.astype(np.float64), expected[:m], rtol=tolerance, atol=tolerance)
        if m <= few:
            np.testing.assert_array_equal(found, whole[:m])
    transposed = (a[:few].permute((1, 0)).compact().permute((1, 0)) @ b).numpy()
    np.testing.assert_array_equal(transposed, whole)


@pytest.mark.parametrize("pattern", [None, "mixed"])
def test_greedy_text_is_that_of_the_full_forward_pass(device, pattern):
    model = small(pattern, device)
    steps = 3 if device.name == "cuda_sim" else 20
    out = model.generate(PROMPTS, max_new_tokens=steps, pad_token_id=60)
    np.testing.assert_array_equal(model.generate(iter(PROMPTS), max_new_tokens=steps, pad_token_id=60), out)
    assert out.shape == (4, 33 + steps) and out.dtype == np.int64
    for row, prompt in zip(out, PROMPTS, strict=True):
        expected = list(prompt)
        for _ in range(steps):
            expected.append(int(all_logits(model, expected)[-1].argmax()))
        np.testing.assert_array_equal(row[: len(expected)], expected)
        assert (row[len(expected) :] == 60).all()


def test_a_sequence_does_not_depend_on_the_others(cpu):
    model = small("local", cpu)
    options = {"max_new_tokens": 15, "do_sample": True, "seed": 4, "repetition_penalty": 1.2}
    together = model.generate(PROMPTS, **options)
    again = model.generate([PROMPTS[0], [1, 2, 3], [9]], **options)
    np.testing.assert_array_equal(again[0, :35], together[0, :35])


def test_seeds(cpu):
    model = small(device=cpu)
    draw = lambda seed: model.generate([[1, 2]], max_new_tokens=30, do_sample=True, seed=seed)  # noqa: E731
    np.testing.assert_array_equal(draw(1), draw(1))
    assert (draw(1) != draw(2)).any()
    same = model.generate([[1, 2]] * 2, max_new_tokens=30, do_sample=True)
    assert (same[0] != same[1]).any()  # two sequences of one prompt draw from streams of their own


def test_nothing_is_dropped_out(cpu):
    model = small(device=cpu)
    expected = model.generate(PROMPTS, max_new_tokens=10)
    dropping = Pythia(replace(model.config, dropout=0.5), device=cpu, seed=3)
    np.testing.assert_array_equal(dropping.generate(PROMPTS, max_new_tokens=10), expected)
    assert dropping.training and dropping.dropout.training and dropping.dropout.drawn == 0


def test_a_step_in_another_thread_drops_out_while_tokens_are_made(cpu):
    model = Pythia(replace(small(device=cpu).config, dropout=0.5), device=cpu)
    ids = generation.integers(model, np.ones((1, 4)))
    with generation.inference():
        assert not model.hidden(ids).requires_grad and model.dropout.drawn == 0
        with ThreadPoolExecutor(1) as beside:
            assert beside.submit(model.hidden, ids).result().requires_grad
        assert model.dropout.drawn > 0


def test_a_parameter_that_is_given_another_array_between_two_tokens_is_read_there(device):
    model, prompt, following = small(device=device), np.array(PROMPTS[0]), [7, 8, 9]
    decoder = generation.Decoder(model, [prompt], len(following))
    decoder.start()
    for count, token in enumerate(following, 1):
        model.embed_out.data = ndl.Tensor(model.embed_out.numpy() * count, device=device)  # no key or value depends on it
        found = decoder.step(np.array([token]), np.ones(1, bool))
        expected = all_logits(model, np.concatenate([prompt, following[:count]]))[-1]
        np.testing.assert_allclose(found[0], expected, rtol=1e-4, atol=2e-5)


def test_a_parameter_that_is_written_between_two_tokens_is_cast_again(device):
    model, prompt = small(device=device), np.array(PROMPTS[0])
    with amp.autocast(device, "bfloat16"):
        decoder = generation.Decoder(model, [prompt], 2)
        decoder.start()
        decoder.step(np.array([7]), np.ones(1, bool))
        recording = decoder.recording
        before = decoder.step(np.array([8]), np.zeros(1, bool))
        assert decoder.recording is recording
        model.embed_out.realize_cached_data().mul_in_place(2.0)  # as an optimizer does
        np.testing.assert_array_equal(decoder.step(np.array([8]), np.ones(1, bool)), before * 2)


def test_stop_tokens_and_padding(cpu):
    model = small(device=cpu)
    free = model.generate(PROMPTS[:2], max_new_tokens=12)
    stop = int(free[0, 20 + 4])
    first = [list(row[len(p) :]).index(stop) if stop in row[len(p) :] else None for row, p in zip(free, PROMPTS)]
    out = model.generate(PROMPTS[:2], max_new_tokens=12, eos_token_id=[stop, 60], pad_token_id=7)
    for row, kept, prompt, at in zip(out, free, PROMPTS, first):
        end = len(prompt) + (12 if at is None else at + 1)
        np.testing.assert_array_equal(row[:end], kept[:end])
        assert (row[end:] == 7).all()
    one = model.generate(PROMPTS[:1], max_new_tokens=12, eos_token_id=stop)
    assert one.shape == (1, 20 + first[0] + 1) and one[0, -1] == stop
    assert [GenerationConfig(eos_token_id=end).pad_id for end in (None, 0, 9, [8, 9])] == [0, 0, 9, 8]


def test_streaming_gives_the_same_tokens_as_they_come(cpu):
    model = small(device=cpu)
    whole = model.generate([[3, 4]], max_new_tokens=9)
    source = model.stream([[3, 4]], max_new_tokens=9)
    assert [int(ids[0]) for ids in source] == list(whole[0, 2:])
    source = model.stream([[3, 4]], max_new_tokens=9)
    next(source)
    assert ndl.autograd.is_grad_enabled()  # while a caller holds an unfinished stream


LOGITS = np.array([2.0, 1.0, 0.0, -1.0, 1.0], np.float32)


def probabilities(**options):
    ids, p = generation.distribution(LOGITS, GenerationConfig(do_sample=True, **options))
    return dict(zip(ids.tolist(), p.tolist(), strict=True))


def test_streams_taken_in_turns(host):
    """Each has arrays of its own; so have those of two threads."""
    model, options = small("local", host), {"max_new_tokens": 12, "do_sample": True}
    alone = [np.stack(list(model.stream([p], **options))) for p in PROMPTS]
    in_turns = zip(*(model.stream([p], **options) for p in PROMPTS), strict=True)
    np.testing.assert_array_equal(np.stack(list(in_turns), axis=1), alone)
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        at_once = threads.map(lambda p: np.stack(list(model.stream([p], **options))), PROMPTS)
        np.testing.assert_array_equal(list(at_once), alone)


def test_what_may_be_drawn_is_worked_out_by_hand():
    e = np.exp(1)
    total = e**2 + 2 * e + 1 + 1 / e
    assert probabilities() == pytest.approx({0: e**2 / total, 1: e / total, 2: 1 / total, 3: 1 / e / total, 4: e / total})
    assert probabilities() == probabilities(top_k=0) == probabilities(top_k=None)
    assert probabilities(top_k=1) == probabilities(top_k=1, top_p=0.5) == {0: 1.0}
    assert set(probabilities(top_k=2)) == {0, 1, 4}  # the second place is shared
    hot = probabilities(temperature=2.0, top_k=0)
    assert hot[0] / hot[3] == pytest.approx(np.exp(1.5))
    share = e**2 / total
    assert set(probabilities(top_p=share * 0.99)) == {0}
    assert set(probabilities(top_p=share * 1.01)) == {0, 1}
    assert set(probabilities(top_p=1e-9)) == {0}
    assert sum(probabilities(top_p=0.9, top_k=4).values()) == pytest.approx(1)
    equal = generation.distribution(np.zeros(4), GenerationConfig(do_sample=True, top_p=0.5))
    assert [x.tolist() for x in equal] == [[0, 1], [0.5, 0.5]]  # two reach it


def test_the_likeliest_of_many_tokens():
    logits = np.random.default_rng(0).standard_normal(20_000)
    ids, _ = generation.distribution(logits, GenerationConfig(do_sample=True, top_k=500))
    assert ids.tolist() == sorted(np.argsort(logits)[-500:])


def test_the_nucleus_of_many_equal_tokens_is_the_first_of_them():
    ids, p = generation.distribution(np.zeros(8192), GenerationConfig(do_sample=True, top_k=0, top_p=0.25))
    assert ids.tolist() == list(range(2048)) and (p == 1 / 2048).all()


@pytest.mark.parametrize("scale", [0.01, 1.0, 5.0, 50.0])
@pytest.mark.parametrize("top_p", [1e-9, 0.5, 0.9, 0.999])
def test_the_nucleus_of_many_tokens(scale, top_p):
    """A flat distribution, whose nucleus is most of it, and steep ones; with many equal values."""
    logits = np.round(np.random.default_rng(0).standard_normal(20_000) * scale, 2)
    ids, p = generation.distribution(logits, GenerationConfig(do_sample=True, top_k=0, top_p=top_p))
    every = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    taken = sorted(range(len(logits)), key=lambda i: (-every[i], i))[: len(ids)]
    assert ids.tolist() == sorted(taken)
    together = every[taken].cumsum()
    assert together[-1] >= top_p - 1e-12 and (len(ids) == 1 or together[-2] < top_p)
    np.testing.assert_allclose(p, every[ids] / every[ids].sum())


def test_repetition_penalty_by_hand():
    seen = np.array([True, False, False, True, False])
    logits = np.array([2.0, 1.5, 0.0, -1.0, 1.0], np.float32)
    pick = lambda penalty: generation.choose(logits, seen, GenerationConfig(repetition_penalty=penalty), None)  # noqa: E731
    assert pick(1.0) == 0 and pick(1.3) == 0 and pick(1.4) == 1
    drawn = GenerationConfig(do_sample=True, repetition_penalty=2.0)
    for value, wanted in ((0.5, 0.25), (0.0, 0.0), (-0.5, -1.0)):  # the other token, of logit 0, is not seen
        p = np.exp(wanted) / (np.exp(wanted) + 1)
        rngs = [SimpleNamespace(random=lambda at=at: at) for at in (p - 1e-6, p + 1e-6)]
        pair = np.array([value, 0.0], np.float32)
        assert [generation.choose(pair, np.array([True, False]), drawn, rng) for rng in rngs] == [0, 1]


def test_the_penalty_counts_the_prompt(host):
    model = small(device=host)
    pairs = [[j, i] for j in range(VOCABULARY) for i in (3, 17)]
    following = model.generate(pairs, max_new_tokens=1)[:, -1]
    repeating = [pair for pair, next_id in zip(pairs, following, strict=True) if next_id in pair]
    assert repeating
    for pair, other in zip(repeating, model.generate(repeating, max_new_tokens=1, repetition_penalty=1e9)[:, -1], strict=True):
        assert other not in pair


def test_the_penalty_counts_what_was_made(host):
    model = small(device=host)
    plain, penalized = (model.generate([[3], [17]], max_new_tokens=8, repetition_penalty=by) for by in (1.0, 1e9))
    assert any(len(set(row)) < 9 for row in plain.tolist()) and all(len(set(row)) == 9 for row in penalized.tolist())


@pytest.mark.filterwarnings("error")
def test_the_largest_and_the_smallest_values_overflow_nothing():
    logits = np.array([1e38, -1e38, 3.0, -4.0], np.float32)
    seen, rng = np.array([True, True, False, True]), np.random.default_rng(0)
    for temperature, penalty in itertools.product((1e-100, 1e100), repeat=2):
        config = GenerationConfig(do_sample=True, temperature=temperature, repetition_penalty=penalty)
        assert generation.choose(logits, seen, config, rng) in range(4)
    assert generation.choose(logits, seen, GenerationConfig(repetition_penalty=1e100), rng) == 2


def test_the_largest_draw_is_of_an_id():
    """Probabilities that are added up one by one may give less than their sum."""
    config, largest = GenerationConfig(do_sample=True, top_k=0), SimpleNamespace(random=lambda: 1 - 2**-53)
    for seed in range(20):
        logits = np.random.default_rng(seed).normal(size=50_000).astype(np.float32)
        assert generation.choose(logits, np.zeros(50_000, bool), config, largest) < 50_000


def test_the_smallest_draw_is_of_an_id_that_can_be_drawn():
    config, smallest = GenerationConfig(do_sample=True), SimpleNamespace(random=lambda: 0.0)
    assert generation.choose(np.array([-1e9, 0.0, 0.0]), np.zeros(3, bool), config, smallest) == 1


def test_draws_follow_the_distribution():
    config, rng = GenerationConfig(do_sample=True, temperature=0.7, top_k=4), np.random.default_rng(0)
    drawn = np.bincount([generation.choose(LOGITS, np.zeros(5, bool), config, rng) for _ in range(4000)], minlength=5) / 4000
    expected = np.zeros(5)
    for i, p in probabilities(temperature=0.7, top_k=4).items():
        expected[i] = p
    np.testing.assert_allclose(drawn, expected, atol=0.03)
    assert drawn[3] == 0


def test_no_graph_and_no_growth(host):
    """Between tokens nothing but the cache and one step's arrays is held, and it is the same at the tenth and the last token."""
    model = small("local", host)
    before = host.memory_stats()["live"]
    live, tensors, data = [], [], [memory.stats(host).by_category["data"]]
    for _ in model.stream(PROMPTS[:3], max_new_tokens=200, do_sample=True, repetition_penalty=1.1):
        live.append(host.memory_stats()["live"])
        if len(live) in (10, 200):
            data.append(memory.stats(host).by_category["data"])
            tensors.append(ndl.autograd.TENSOR_COUNTER)  # which looks at every object there is
    assert len(set(live[1:])) == 1 and tensors[0] == tensors[1]
    del _
    cache = 2 * 2 * 3 * 4 * (20 + 199) * 8 * 4  # keys and values, layers, sequences, heads, positions, features, bytes
    tables = 2 * (20 + 199) * 4 * 2  # cos and sin; rot / 2 is 1
    step = 3 * 4 * (VOCABULARY + 2 * (14 * 32 + 2 * 64))  # sequences, bytes, logits, layers, features of width 32 and of the MLP
    assert live[1] - before <= cache + 2 * tables + step + 4096
    assert data[1] - data[0] >= cache
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("pattern", [None, "global"])
def test_generation_is_planned_to_the_byte(pattern):
    def build(device):
        model = small(pattern, device)
        return lambda: model.generate(PROMPTS, max_new_tokens=12, do_sample=True)

    planned = memory.plan(build, steps=1)
    assert planned.peak_bytes == memory.peak_bytes(build, steps=1, device=ndl.cpu()) > 0


WRONG = [
    ({"max_new_tokens": 0}, "max_new_tokens is 0"),
    ({"max_new_tokens": 2.5}, "max_new_tokens is 2.5"),
    ({"temperature": 0}, "temperature is 0 .accepted: 1e-100 to 1e100; do_sample=False takes the likeliest"),
    ({"temperature": float("nan")}, "temperature is nan"),
    ({"temperature": "hot"}, "temperature is 'hot'"),
    ({"temperature": 5e-324}, "temperature is 5e-324"),
    ({"temperature": 1.1e100}, "temperature is 1.1e.100"),
    ({"temperature": np.float32(0)}, "temperature is 0.0"),
    ({"temperature": True}, "temperature is True"),
    ({"top_k": -1}, "top_k is -1"),
    ({"top_p": 0}, "top_p is 0"),
    ({"top_p": 1.5}, "top_p is 1.5"),
    ({"repetition_penalty": 0}, "repetition_penalty is 0"),
    ({"repetition_penalty": 1.1e100}, "repetition_penalty is 1.1e.100"),
    ({"eos_token_id": "stop"}, "eos_token_id is 'stop'"),
    ({"eos_token_id": -5}, "eos_token_id is -5"),
    ({"eos_token_id": True}, "eos_token_id is True"),
    ({"eos_token_id": [0, False]}, r"eos_token_id is \[0, False\]"),
    ({"pad_token_id": -1}, "pad_token_id is -1"),
    ({"seed": -1}, "seed is -1"),
    ({"seed": True}, "seed is True"),
    ({"do_sample": "false"}, "do_sample is 'false' .accepted: True or False"),
    ({"eos_token_id": range(3)}, r"eos_token_id is range\(0, 3\)"),
    ({"eos_token_id": b"\1"}, "eos_token_id is b"),
]


@pytest.mark.parametrize("options, said", WRONG, ids=lambda x: str(x)[:30])
def test_bad_values_are_one_clear_line(cpu, options, said):
    with pytest.raises(ShapeError, match=said) as error:
        small(device=cpu).stream([[1]], **options)  # before anything is computed
    assert "\n" not in str(error.value)


@pytest.mark.filterwarnings("error")
def test_what_is_made_by_default():
    """Names and values are those of transformers."""
    values = {"do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.0, "eos_token_id": None}
    assert asdict(GenerationConfig()) == {"max_new_tokens": 20, **values, "pad_token_id": None, "seed": 0}
    assert small().generate([[1]]).shape == (1, 21)


@pytest.mark.filterwarnings("error")
def test_numbers_of_numpy_are_numbers():
    """numpy casts what a float32 is compared with, and warned that 1e100 overflows."""
    config = GenerationConfig(temperature=np.float32(0.5), top_p=np.float16(0.5), repetition_penalty=np.float16(2))
    assert config == GenerationConfig(temperature=0.5, top_p=0.5, repetition_penalty=2.0)


@pytest.mark.parametrize("prompts", [[], [[]], [1, 2], 5, [[[1]]], [[0.5]], [np.arange(0)], [[1], np.arange(0)]], ids=str)
def test_bad_prompts(cpu, prompts):
    with pytest.raises(ShapeError, match=r"\[generate\] prompts are"):
        small(device=cpu).generate(prompts)


def test_positions_of_the_longest_prompt_and_of_what_comes_after_it(cpu, monkeypatch):
    monkeypatch.setattr(block_layout, "MOST_BLOCKS", 4)  # 128 positions
    stream = partial(small(device=cpu).stream, [[1], [2] * 100])
    stream(max_new_tokens=29)
    with pytest.raises(ShapeError, match=r"max_new_tokens is 30 after a prompt of 100: \[BlockLayout\] 3 x 3 blocks of 64"):
        stream(max_new_tokens=30)


def test_a_larger_vocabulary_belongs_into_the_config(cpu):
    model = small(device=cpu)
    rows = np.random.default_rng(0).standard_normal((70, model.config.width))
    model.embed_in, model.embed_out = ndl.Tensor(rows, device=cpu), ndl.Tensor(rows.T, device=cpu)
    for run in (model.generate, model.stream):
        with pytest.raises(ShapeError, match=r"embed_out has 70 columns \(accepted: 61, the vocab_size of the model's config\)"):
            run([[1, 2]], max_new_tokens=8)
    model.config = replace(model.config, vocab_size=70)
    assert model.generate([[1, 69]], max_new_tokens=8, repetition_penalty=1.1).shape == (1, 10)


def test_ids_outside_the_vocabulary(cpu):
    with pytest.raises(IndexError, match=r"id 61 in a prompt is outside the vocabulary \(0..60\)"):
        small(device=cpu).generate([[1, 61]])
    with pytest.raises(IndexError, match="id -1 in a prompt"):
        small(device=cpu).generate([[1, -1]])
    with pytest.raises(IndexError, match=r"eos_token_id 100 is outside the vocabulary \(0..60\)"):
        small(device=cpu).generate([[1]], eos_token_id=100)
    with pytest.raises(IndexError, match="pad_token_id 61 is outside"):
        small(device=cpu).generate([[1]], pad_token_id=61)


def test_an_option_that_there_is_not(cpu):
    model = small(device=cpu)
    for run in (model.generate, model.stream):
        with pytest.raises(TypeError, match=r"\[generate\] unknown option: num_beams \(accepted: max_new_tokens, "):
            run([[1, 2]], num_beams=2)


def test_broken_weights_are_said(cpu):
    model = small(device=cpu)
    for broken in ("nan", "inf"):
        model.embed_out.cached_data.fill(float(broken))
        with pytest.raises(FloatingPointError, match="logits are infinite or NaN"):
            model.generate([[1]])


def test_layouts_of_patterns_stay_what_decoding_assumes():
    """A prefix of a pattern is the pattern of a prefix, so decoding in a longer layout is decoding in the model's own."""
    for pattern in PATTERNS:
        longer = causal_pattern(pattern, 9, 16).mask[:, :5, :5]
        np.testing.assert_array_equal(longer, causal_pattern(pattern, 5, 16).mask)
