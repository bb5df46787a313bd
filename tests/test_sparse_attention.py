"""Block-sparse attention and its module: equal to dense under the same mask, blind to the future, small in memory."""

import re

import numpy as np
import pytest

import needle as ndl
from needle import nn, ops
from needle.backend_ndarray.block_layout import BlockLayout, dense_layout
from needle.backend_ndarray.device import drop_device_caches
from needle.errors import DTypeError, ShapeError
from needle.models import Pythia, PythiaConfig
from needle.nn import PATTERNS, causal_pattern
from needle.testing import TOLERANCES, assert_close


def random(shape, device, seed=0, **kwargs):
    return ndl.Tensor(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32), device=device, **kwargs)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_sparse_equals_dense_under_the_same_mask(device, pattern):
    layout = causal_pattern(pattern, 5, 16, window=2, stride=2)
    results = []
    for run in (lambda *x: ops.attention(*x, layout), ops.Attention(layout, 0.25).reference):
        q, k, v = (random((1, 2, 80, 16), device, i) for i in range(3))
        out = run(q, k, v)
        out.backward(random((1, 2, 80, 16), device, 9, requires_grad=False))
        results.append([out.numpy(), *(x.grad.numpy() for x in (q, k, v))])
    for found, expected in zip(*results, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_queries_of_fewer_positions_than_keys_are_the_last(device):
    q, k, v = (random((1, 2, n, 4), device, n) for n in (3, 7, 7))
    seen = np.arange(7) <= 4 + np.arange(3)[:, None]
    p = np.where(seen, np.exp(q.numpy() @ k.numpy().swapaxes(2, 3) / 2), 0)
    np.testing.assert_allclose(ops.attention(q, k, v).numpy(), p / p.sum(-1, keepdims=True) @ v.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("index", [(slice(None), slice(None, None, -1), slice(None, None, -1)), (..., slice(None, None, -1))])
def test_attention_of_reversed_views(device, index):
    x, dy = random((2, 3, 20, 8), device), random((2, 3, 20, 8), device, 1, requires_grad=False)
    results = []
    for taken in (lambda t: t[index], lambda t: ndl.Tensor(t.numpy()[index], device=device)):
        q, out_grad = taken(x), taken(dy)
        leaf = x if q.op else q
        out = ops.attention(q, q, q)
        out.backward(out_grad)
        results.append((out.numpy(), leaf.grad.numpy() if leaf is q else leaf.grad.numpy()[index]))
    for found, expected in zip(*results, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pattern", [None, *PATTERNS])
def test_the_future_never_leaks(cpu, pattern):
    """Changing token t + 1 leaves the logits up to t equal to the bit."""
    config = PythiaConfig(layers=2, width=32, heads=4, feed_forward=64, vocab_size=61)
    config = config.with_sparse(pattern, block=16) if pattern else config
    model = Pythia(config, device=cpu)
    ids = np.random.default_rng(0).integers(0, 61, (1, 64))
    with ndl.no_grad():
        before = model(ndl.Tensor(ids, device=cpu, dtype="int32")).numpy()
        for t in (0, 14, 15, 16, 31, 40, 62):
            changed = ids.copy()
            changed[0, t + 1] = (changed[0, t + 1] + 1) % 61
            after = model(ndl.Tensor(changed, device=cpu, dtype="int32")).numpy()
            np.testing.assert_array_equal(after[:, : t + 1], before[:, : t + 1])
            assert (after[:, t + 1] != before[:, t + 1]).any()


@pytest.mark.parametrize("backward", [False, True])
def test_no_array_of_all_scores(cpu, backward):
    """B 1, H 8, T 8192: the allocator's peak beyond inputs and outputs stays below 16 MiB."""
    shape, layout = (1, 8, 8192, 64), causal_pattern("local", 128, 64)
    q, k, v = (random(shape, cpu, i, requires_grad=backward) for i in range(3))
    grad = random(shape, cpu, 3, requires_grad=False)
    size = 4 * int(np.prod(shape))
    before = cpu.memory_stats()["live"]
    cpu.reset_peak()
    out = ops.attention(q, k, v, layout)
    if backward:
        out.backward(grad)
    outputs = size * (4 if backward else 1)
    assert cpu.memory_stats()["peak"] - before - outputs < 16 << 20


def test_block_sparse_attention(host):
    q, k, v = (random((1, 2, 60, 8), host, i) for i in range(3))
    layout = causal_pattern("local", 4, 16)
    expected = ops.attention(q, k, v, layout).numpy()
    assert nn.BlockSparseAttention().layout(200) == causal_pattern("local", 4, 64, window=2)
    assert nn.BlockSparseAttention("global").layout(400) == causal_pattern("global", 7, 64, stride=4)
    both_ways = layout.mask[0] | layout.mask[0].T  # the module leaves the future out
    for pattern in ("local", layout, both_ways, BlockLayout(both_ways, 16)):
        np.testing.assert_array_equal(nn.BlockSparseAttention(pattern, block=16)(q, k, v).numpy(), expected)
    for pattern in (layout, BlockLayout(both_ways, 16)):  # which says the size of its blocks itself
        np.testing.assert_array_equal(nn.BlockSparseAttention(pattern)(q, k, v).numpy(), expected)
    expected = ops.attention(q, k, v, causal_pattern("local", 4, 16, window=3)).numpy()
    np.testing.assert_array_equal(nn.BlockSparseAttention("local", block=16, window=3)(q, k, v).numpy(), expected)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_gradients_with_a_graph_of_rows_that_see_nothing(host, dtype):
    layout = BlockLayout([[[1, 0], [0, 0]], [[1, 0], [0, 1]]], 16, causal=True)
    inputs = [ndl.Tensor(random((1, 4, 32, 8), host, i), dtype=dtype) for i in range(3)]
    ops.attention(*inputs, layout).backward()
    plain = [x.grad.numpy() for x in inputs]
    ops.attention(*inputs, layout).backward(create_graph=True)
    for x, expected in zip(inputs, plain):
        assert_close(x.grad.numpy(), expected, TOLERANCES[dtype][1])


def test_block_sparse_linear(host):
    mask = np.array([[1, 0, 1], [0, 0, 0], [0, 1, 0], [1, 1, 0]])
    layer = nn.BlockSparseLinear(64, 48, BlockLayout(mask, 16), device=host)
    dense = np.zeros((64, 48))
    for block, (i, j) in zip(layer.weight.numpy()[0], np.argwhere(mask), strict=True):
        dense[i * 16 : i * 16 + 16, j * 16 : j * 16 + 16] = block
    x = random((3, 5, 64), host)
    y = layer(x)
    np.testing.assert_allclose(y.numpy(), x.numpy() @ dense, rtol=1e-4, atol=1e-5)
    y.backward()
    np.testing.assert_allclose(x.grad.numpy(), np.ones((3, 5, 48)) @ dense.T, rtol=1e-4, atol=1e-5)
    assert layer.weight.grad.shape == layer.weight.shape
    bound = np.sqrt(6 / (64 * mask.mean()))  # of the inputs that an output has on average
    assert 0.99 * bound < np.abs(layer.weight.numpy()).max() <= bound and not layer.bias.numpy().any()
    layer.bias.data = random(48, host)
    np.testing.assert_allclose(layer(x).numpy(), y.numpy() + layer.bias.numpy(), rtol=1e-4, atol=1e-5)
    assert nn.BlockSparseLinear(64, 48, BlockLayout(mask, 16), bias=False, device=host).bias is None
    for shape in ((), (2, 48), (0,)):
        with pytest.raises(ShapeError, match=re.escape(f"[BlockSparseLinear] x is {shape} (accepted: (..., 64))")):
            layer(ndl.init.ones(*shape, device=host))
    for layout in (BlockLayout(mask.T, 16), BlockLayout([mask, mask], 16)):
        with pytest.raises(ShapeError, match=r"\[BlockSparseLinear\] layout is .* \(accepted: one head of 64 x 48 elements\)"):
            nn.BlockSparseLinear(64, 48, layout)
    layout = BlockLayout(mask, 16)
    with pytest.raises(TypeError, match=r"\[BlockSparseLinear\] bias is "):
        nn.BlockSparseLinear(64, 48, layout, "cpu")
    with pytest.raises(ShapeError, match=r"\[BlockSparseLinear\] in_features is 64.0"):
        nn.BlockSparseLinear(64.0, 48, layout)
    bound = np.sqrt(6 / (64 * 5 / 12))
    assert -bound <= layer.weight.numpy().min() < -0.9 * bound and 0.9 * bound < layer.weight.numpy().max() <= bound


def test_a_causal_layout_has_the_blocks_of_which_a_part_is_past():
    """And masks single elements where a part is not, wherever the first query stands."""
    given = np.ones((2, 3), bool)
    for q_start in range(-20, 40):
        layout, past = BlockLayout(given, 16, True, q_start), np.arange(48) <= q_start + np.arange(32)[:, None]
        blocks = past.reshape(2, 16, 3, 16).swapaxes(1, 2)
        np.testing.assert_array_equal(layout.dense_mask()[0], past)
        assert layout.dense_mask(0, 5).shape == (1, 0, 5) and layout.dense_mask(5, 0).shape == (1, 5, 0)
        np.testing.assert_array_equal(layout.mask[0], blocks.any(axis=(2, 3)))
        np.testing.assert_array_equal(layout._index["partial"], ~blocks.all(axis=(2, 3))[layout.mask[0]])
    assert given.all()  # it is the caller's
    nothing = BlockLayout(given, 16, True, q_start=-32)
    assert (nothing.nnz, nothing.density) == (0, 0) and ops.sdd(*[ndl.ones(1, *n) for n in ((32, 4), (4, 48))], nothing).size == 0


def test_the_index_of_a_layout_is_made_once_until_the_caches_are_dropped(host):
    drop_device_caches()
    before, layout = host.memory_stats()["live"], BlockLayout(np.ones((2, 3)), 16)
    assert layout.on(host) is layout.on(host)
    assert host.memory_stats()["live"] > before
    drop_device_caches()
    assert host.memory_stats()["live"] == before


def test_layouts_say_what_is_wrong(host):
    for block in (24, 144, 16.0, "16"):
        with pytest.raises(ShapeError, match=f"block size {block!r} "):
            BlockLayout(np.ones((2, 2)), block)
    for q_start in (8.0, None):
        with pytest.raises(ShapeError, match=f"q_start is {q_start!r} "):
            BlockLayout(np.ones((2, 2)), 16, True, q_start)
    for mask in (np.ones(2), np.ones((0, 2, 2)), np.ones((1, 1, 2, 2))):
        with pytest.raises(ShapeError, match=r"mask has shape .* \(accepted: \(rows, cols\) or"):
            BlockLayout(mask, 16)
    q = random((1, 1, 100, 8), host)
    with pytest.raises(ShapeError, match="does not fit 100 queries"):
        ops.attention(q, q, q, dense_layout(64, 64))
    for where in (host, ndl.meta()):  # a plan says it too
        wide = random((1, 1, 64, 257), where)
        with pytest.raises(ShapeError, match=r"heads of 257 features \(accepted: at most 256\)"):
            ops.attention(wide, wide, wide, dense_layout(64, 64))
    with pytest.raises(ShapeError, match="accepted: local, global, mixed"):
        causal_pattern("diagonal", 4, 16)
    # Where it is written, not in forward.
    for wrong in ({"pattern": "diagonal"}, {"block": 0}, {"block": 20}, {"window": 0}, {"window": 1.5}, {"stride": 0}):
        for make in (nn.BlockSparseAttention, *([] if "stride" in wrong else [PythiaConfig().with_sparse])):
            with pytest.raises(ShapeError, match="accepted: "):
                make(**wrong)
    with pytest.raises(ShapeError, match=r"\[BlockSparseAttention\] q is \(100, 8\) \(accepted: \(batch, heads"):
        nn.BlockSparseAttention()(q[0, 0], q[0, 0], q[0, 0])
    with pytest.raises(ShapeError, match=r"\[MultiHeadAttention\] q is \(100, 8\), k is \(100, 8\) \(accepted: \(B, H, T, D\)"):
        nn.MultiHeadAttention(causal=True)(q[0, 0], q[0, 0], q[0, 0])
    with pytest.raises(DTypeError, match=r"\[BlockSparseLinear\] layout is of type numpy.ndarray \(accepted: a BlockLayout\)"):
        nn.BlockSparseLinear(32, 32, np.ones((2, 2)))
    with pytest.raises(ShapeError, match="stride is 0"):
        causal_pattern("global", 4, 16, stride=0)
    for too_many in (lambda: causal_pattern("local", 62_500, 16), lambda: dense_layout(10**6, 10**6, 16)):
        with pytest.raises(ShapeError, match=r"62,500 x 62,500 blocks of 16 positions are too many .* or 131,072 positions"):
            too_many()
    with pytest.raises(ShapeError, match=r"block size 0 \(accepted: multiples of 16"):
        dense_layout(32, 32, 0)


PATTERN_BLOCKS = {  # of 7, with a window of 2 and a stride of 3: the blocks that each sees
    "local": [[0], [0, 1], [1, 2], [2, 3], [3, 4], [4, 5], [5, 6]],
    "global": [[0], [0, 1], [0, 2], [0, 3], [0, 3, 4], [0, 3, 5], [0, 3, 6]],
    "mixed": [[0], [0, 1], [0, 1, 2], [0, 2, 3], [0, 3, 4], [0, 3, 4, 5], [0, 3, 5, 6]],
}


@pytest.mark.parametrize("pattern", nn.PATTERNS)
def test_which_blocks_a_pattern_has(pattern):
    layout = causal_pattern(pattern, 7, 16, window=2, stride=3)
    assert [np.flatnonzero(row).tolist() for row in layout.mask[0]] == PATTERN_BLOCKS[pattern]
    layer = nn.BlockSparseAttention(pattern, 16, window=2, stride=3)
    np.testing.assert_array_equal(layer.layout(7 * 16).mask, layout.mask)


def test_patterns_of_every_size():
    assert causal_pattern("local", 3, 16, window=10**30).density == 1
    assert causal_pattern("local", 8, 64).density == 15 / 36 and causal_pattern("global", 4, 16, stride=1).density == 1
