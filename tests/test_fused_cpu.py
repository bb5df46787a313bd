"""The fused kernels of the C++ CPU module, driven directly, against float64 definitions written in numpy.

Every run is repeated with one, three and four threads and must give the same bits.
"""

import ml_dtypes
import numpy as np
import pytest

from devices import usable

backend = usable("cpu").require()

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
TOLERANCE = {"float64": 1e-11, "float32": 3e-5, "float16": 5e-3, "bfloat16": 4e-2}
DTYPES = list(TOLERANCE)
IGNORE = -100


def np_dtype(name):
    return BFLOAT16 if name == "bfloat16" else np.dtype(name)


def accumulate_dtype(name):
    return "float64" if name == "float64" else "float32"


def to_device(array):
    array = np.ascontiguousarray(array)
    handle = backend.Array(array.size, array.dtype.name)
    backend.from_numpy((array.view(np.uint16) if array.dtype == BFLOAT16 else array).reshape(-1), handle)
    return handle


def to_host(handle, like):
    flat = backend.to_numpy(handle, [like.size], [1], 0)
    return (flat.view(BFLOAT16) if like.dtype == BFLOAT16 else flat).reshape(like.shape)


def elements(array):
    """Strides in elements."""
    return [s // array.itemsize for s in array.strides]


def call(name, *args, outputs):
    """Runs the kernel on copies of the arrays in args; returns those named by position in outputs, as float64."""
    threads = backend.num_threads()
    runs = []
    try:
        for n in (1, 3, 4):
            backend.set_num_threads(n)
            handles = [to_device(a) if isinstance(a, np.ndarray) else a for a in args]
            getattr(backend, name)(*handles)
            runs.append([to_host(handles[i], args[i]) for i in outputs])
    finally:
        backend.set_num_threads(threads)
    for other in runs[1:]:
        for a, b in zip(runs[0], other, strict=True):
            assert a.tobytes() == b.tobytes(), f"{name}: the number of threads changes the result"
    results = [a if a.dtype.kind in "iub" else a.astype(np.float64) for a in runs[0]]
    return results[0] if len(results) == 1 else results


def draw(rng, shape, dtype, scale=1.0):
    return (rng.standard_normal(shape) * scale).astype(np_dtype(dtype))


def blank(shape, dtype):
    """Output memory full of NaN: what a kernel does not write shows."""
    return np.full(shape, np.nan, np_dtype(dtype))


def f64(array):
    return array.astype(np.float64)


def check(got, want, dtype, factor=1.0):
    tolerance = TOLERANCE[dtype] * factor
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


def logsumexp(x):
    with np.errstate(invalid="ignore", divide="ignore"):
        shift = x.max(-1, keepdims=True)
        shift = np.where(np.isinf(shift), 0, shift)
        return np.log(np.exp(x - shift).sum(-1, keepdims=True)) + shift


# --- softmax family ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, cols", [(1, 1), (3, 2), (5, 31), (2, 33), (7, 255), (300, 64), (2, 5001), (0, 4), (4, 0)])
def test_softmax_family(dtype, rows, cols):
    rng = np.random.default_rng(rows + cols)
    x, dy = draw(rng, (rows, cols), dtype, 3), draw(rng, (rows, cols), dtype)
    empty = blank((rows, cols), dtype)
    lse = logsumexp(f64(x)) if cols else np.zeros((rows, 1))
    p = np.exp(f64(x) - lse)

    check(call("softmax_forward", x, empty, rows, cols, outputs=[1]), p, dtype)
    y = p.astype(x.dtype)
    want = f64(y) * (f64(dy) - (f64(dy) * f64(y)).sum(-1, keepdims=True))
    check(call("softmax_backward", y, dy, empty, rows, cols, outputs=[2]), want, dtype)

    check(call("log_softmax_forward", x, empty, rows, cols, outputs=[1]), f64(x) - lse, dtype, 3)
    logp = (f64(x) - lse).astype(x.dtype)
    want = f64(dy) - np.exp(f64(logp)) * f64(dy).sum(-1, keepdims=True)
    check(call("log_softmax_backward", logp, dy, empty, rows, cols, outputs=[2]), want, dtype, 10)

    if cols:
        check(call("logsumexp_forward", x, blank(rows, dtype), rows, cols, outputs=[1]), lse[:, 0], dtype)
        dlse, rounded = draw(rng, rows, dtype), lse[:, 0].astype(x.dtype)
        want = np.exp(f64(x) - f64(rounded)[:, None]) * f64(dlse)[:, None]
        check(call("logsumexp_backward", x, rounded, dlse, empty, rows, cols, outputs=[3]), want, dtype, 3)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_softmax_family_of_special_values(dtype):
    inf, nan = np.inf, np.nan
    x = np.tile(np.zeros((6, 37), np_dtype(dtype)), 1)
    x[0, :] = -inf
    x[1, 5] = -inf
    x[2, 36] = nan
    x[3, 0] = inf
    x[4, :] = [nan] + [-inf] * 36
    x[5, :] = 1e30 if dtype == "float32" else 1e300
    lse = call("logsumexp_forward", x, blank(6, dtype), 6, 37, outputs=[1])
    np.testing.assert_allclose(lse, [-inf, np.log(36), nan, inf, nan, f64(x)[5, 0]], rtol=1e-6)
    dx = call("logsumexp_backward", x, lse.astype(x.dtype), np.ones(6, x.dtype), blank(x.shape, dtype), 6, 37, outputs=[3])
    assert (dx[0] == 0).all() and dx[1, 5] == 0
    np.testing.assert_allclose(dx[1].sum(), 1, rtol=1e-5)
    y = call("softmax_forward", x, blank(x.shape, dtype), 6, 37, outputs=[1])
    assert np.isnan(y[[0, 2, 4]]).all() and np.isnan(y[3, 0]) and y[1, 5] == 0
    np.testing.assert_allclose(y[5], 1 / 37, rtol=1e-5)


# --- cross entropy -----------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", ["int32", "int64"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, cols", [(1, 1), (5, 17), (9, 50), (3, 50304), (0, 7)])
def test_cross_entropy(dtype, ids, rows, cols):
    rng = np.random.default_rng(cols)
    logits, targets = draw(rng, (rows, cols), dtype, 2), rng.integers(0, cols, rows).astype(ids)
    targets[1::3] = IGNORE
    kept = targets != IGNORE
    acc = accumulate_dtype(dtype)
    lse = logsumexp(f64(logits))
    at_target = np.take_along_axis(f64(logits), np.where(kept, targets, 0)[:, None], 1)
    loss, got_lse = call(
        "cross_entropy_forward", logits, targets, blank(rows, acc), blank((rows, 2), acc), rows, cols, IGNORE, outputs=[2, 3]
    )
    check(loss, np.where(kept, (lse - at_target)[:, 0], 0), acc)
    check(got_lse[:, 0], f64(logits).max(1), acc)
    check(got_lse.sum(1), lse[:, 0], acc)

    dloss = draw(rng, rows, acc)
    one_hot = np.eye(cols)[np.where(kept, targets, 0)] if cols < 1000 else np.zeros((rows, cols))
    one_hot[np.arange(rows), np.where(kept, targets, 0)] = 1
    want = (np.exp(f64(logits) - lse) - one_hot) * f64(dloss)[:, None] * kept[:, None]
    args = logits, targets, got_lse.astype(acc), dloss
    got = call("cross_entropy_backward", *args, blank(logits.shape, dtype), rows, cols, IGNORE, outputs=[4])
    check(got, want, dtype)
    handles = [to_device(a) for a in args]  # in place
    backend.cross_entropy_backward(*handles, handles[0], rows, cols, IGNORE)
    assert (f64(to_host(handles[0], logits)) == got).all()


def test_confident_rows_need_no_subnormals():
    """Logits far apart: probabilities beyond float32's range are 0, the others as exact as ever."""
    rng = np.random.default_rng(5)
    x, targets = draw(rng, (20, 1000), "float32", 60), rng.integers(0, 1000, 20)
    lse = logsumexp(f64(x))
    p, blank_x = np.exp(f64(x) - lse), blank(x.shape, "float32")
    assert ((p > 0) & (p < 1e-40)).any()
    check(call("softmax_forward", x, blank_x, 20, 1000, outputs=[1]), p, "float32")
    top = x.max(1, keepdims=True)
    parts, dloss = np.concatenate([top, lse - top], 1).astype(np.float32), np.full(20, 1e-3, np.float32)
    got = call("cross_entropy_backward", x, targets, parts, dloss, blank_x, 20, 1000, IGNORE, outputs=[4])
    check(got * 1e3, p - np.eye(1000)[targets], "float32")


def test_bad_ids_are_named_before_anything_is_written():
    weight, ids = np.ones((50, 4), np.float32), np.array([1, 2, 49, 51], np.int64)
    out = to_device(np.full((4, 4), 7, np.float32))
    with pytest.raises(IndexError, match=r"\[embedding\] id 51 at position 3 is outside the vocabulary \(0..49\)"):
        backend.embedding_forward(to_device(weight), to_device(ids), out, 4, 50, 4)
    assert (to_host(out, np.empty((4, 4), np.float32)) == 7).all()
    with pytest.raises(IndexError, match=r"\[embedding\] id -1 at position 0"):
        bad = to_device(np.array([-1], np.int32))
        backend.embedding_backward(out, bad, to_device(weight), to_device(np.zeros(52, np.int32)), 1, 50, 4, False)
    with pytest.raises(IndexError, match=r"\[one_hot\] id 5 at position 0 is outside the depth \(0..4\)"):
        backend.one_hot(to_device(np.array([5], np.int32)), out, 1, 5)
    with pytest.raises(IndexError, match=r"\[cross_entropy\] target 9 at position 1 is outside the classes \(0..3\)"):
        targets = to_device(np.array([IGNORE, 9], np.int32))
        loss, lse = to_device(np.zeros(2, np.float32)), to_device(np.zeros(4, np.float32))
        backend.cross_entropy_forward(to_device(np.zeros((2, 4), np.float32)), targets, loss, lse, 2, 4, IGNORE)
    with pytest.raises(ValueError, match=r"\[embedding\] ids have a bad dtype: float32"):
        backend.embedding_forward(to_device(weight), to_device(np.zeros(1, np.float32)), out, 1, 50, 4)


# --- layer norm, rotary, embedding, AdamW --------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, cols", [(1, 1), (3, 17), (64, 32), (65, 80), (257, 512), (0, 5)])
def test_layer_norm(dtype, rows, cols):
    rng = np.random.default_rng(cols)
    acc, eps = accumulate_dtype(dtype), 1e-5
    x, dy = draw(rng, (rows, cols), dtype, 2) + np_dtype(dtype).type(1), draw(rng, (rows, cols), dtype)
    weight, bias = draw(rng, cols, dtype), draw(rng, cols, dtype)
    mean = f64(x).mean(-1)
    rstd = 1 / np.sqrt(f64(x).var(-1) + eps)
    xhat = (f64(x) - mean[:, None]) * rstd[:, None]
    y, got_mean, got_rstd = call(
        "layer_norm_forward", x, weight, bias, blank(x.shape, dtype), blank(rows, acc), blank(rows, acc), rows, cols, eps,
        outputs=[3, 4, 5],
    )  # fmt: skip
    check(y, xhat * f64(weight) + f64(bias), dtype)
    check(got_mean, mean, acc)
    check(got_rstd, rstd, acc, 10)

    g = f64(dy) * f64(weight)
    dx = rstd[:, None] * (g - g.mean(-1, keepdims=True) - xhat * (g * xhat).mean(-1, keepdims=True))
    got = call(
        "layer_norm_backward", dy, x, weight, mean.astype(acc), rstd.astype(acc), blank(x.shape, dtype),
        blank(cols, dtype), blank(cols, dtype), blank(64 * 2 * cols, acc), rows, cols, outputs=[5, 6, 7],
    )  # fmt: skip
    for result, want in zip(got, (dx, (f64(dy) * xhat).sum(0), f64(dy).sum(0)), strict=True):
        check(result, want, dtype, 10)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T, D, rot", [(1, 8, 8), (33, 64, 16), (7, 10, 4), (5, 6, 0)])
def test_rotary(dtype, T, D, rot):
    rng = np.random.default_rng(D)
    B, H, half = 2, 3, rot // 2
    packed = draw(rng, (B, T, H, 3, D), dtype)  # k of packed qkv rows: a view with strides and an offset
    x = packed[:, :, :, 1].transpose(0, 2, 1, 3)
    angle = rng.standard_normal((T + 2, half))
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    out = blank((B, H, T, D), dtype)
    for inverse in (False, True):
        got = call("rotary", packed, elements(x), D, cos, sin, out, elements(out), B, H, T, D, rot, inverse, outputs=[5])
        c, s = f64(cos)[:T], f64(sin)[:T] * (-1 if inverse else 1)
        a, b, rest = f64(x)[..., :half], f64(x)[..., half:rot], f64(x)[..., rot:]
        check(got, np.concatenate([a * c - b * s, b * c + a * s, rest], -1), dtype)
    in_place = to_device(packed)
    view = in_place.view(D, packed.size - D)
    backend.rotary(view, elements(x), 0, to_device(cos), to_device(sin), view, elements(x), B, H, T, D, rot, True)
    assert (f64(to_host(in_place, packed))[:, :, :, 1].transpose(0, 2, 1, 3) == got).all()


@pytest.mark.parametrize("ids", ["int32", "int64"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n, vocab, dim", [(1, 1, 1), (40, 11, 17), (500, 300, 64), (0, 9, 5), (1000, 3, 40)])
def test_embedding_is_a_one_hot_product(dtype, ids, n, vocab, dim):
    rng = np.random.default_rng(n)
    weight, dy = draw(rng, (vocab, dim), dtype), draw(rng, (n, dim), dtype, 0.2)
    id_ = rng.integers(0, vocab, n).astype(ids)
    one_hot = f64(np.eye(vocab)[id_])
    got = call("embedding_forward", weight, id_, blank((n, dim), dtype), n, vocab, dim, outputs=[2])
    assert (got == one_hot @ f64(weight)).all()
    workspace = np.zeros(n + vocab + 1, np.int32)
    for accumulate in (False, True):
        before = weight if accumulate else blank(weight.shape, dtype)
        got = call("embedding_backward", dy, id_, before, workspace, n, vocab, dim, accumulate, outputs=[2])
        check(got, one_hot.T @ f64(dy) + (f64(weight) if accumulate else 0), dtype, 3)
    for out_dtype in (dtype, "uint8", "int64", "bool"):
        out = np.ones((n, vocab), np_dtype(out_dtype))
        assert (call("one_hot", id_, out, n, vocab, outputs=[1]) == one_hot).all()


@pytest.mark.parametrize("dtype, grad_dtype", [(d, d) for d in DTYPES] + [("float32", "bfloat16")])
def test_adamw(dtype, grad_dtype):
    rng = np.random.default_rng(0)
    lr, beta1, beta2, eps, decay, step, acc = 0.01, 0.9, 0.95, 1e-8, 0.1, 3, accumulate_dtype(dtype)
    for n in (0, 1, 37, 100_001):
        param, grad = draw(rng, n, dtype), draw(rng, n, grad_dtype)
        m, v, scale = draw(rng, n, acc), np.abs(draw(rng, n, acc)), np.array([0.5], np.float32)
        g = f64(grad) * 0.5
        m2, v2 = beta1 * f64(m) + (1 - beta1) * g, beta2 * f64(v) + (1 - beta2) * g * g
        update = m2 / (1 - beta1**step) / (np.sqrt(v2 / (1 - beta2**step)) + eps)
        want = f64(param) * (1 - lr * decay) - lr * update
        hyper = lr, beta1, beta2, eps, decay, step
        got = call("adamw_step", param, grad, m, v, scale, *hyper, outputs=[0, 2, 3])
        check(got[0], want, dtype)
        check(got[1], m2, acc)
        check(got[2], v2, acc)


@pytest.mark.parametrize("dtype", DTYPES)
def test_unscale(dtype):
    rng = np.random.default_rng(0)
    for n in (0, 1, 37, 100_001):
        grad = draw(rng, n, dtype)
        for place, value in ((None, 0), (0, np.inf), (n - 1, -np.inf), (n // 2, np.nan)):
            if place is not None:
                if n == 0:
                    continue
                grad = grad.copy()
                grad[place] = value
            got, flag = call("unscale", grad, 0.125, np.zeros(1, np.int32), outputs=[0, 2])
            np.testing.assert_array_equal(got, f64((f64(grad) * 0.125).astype(np_dtype(dtype))))
            assert flag == (place is not None)
        assert call("unscale", grad, 0.125, np.ones(1, np.int32), outputs=[2]) == 1  # what was found before stays


# --- attention -----------------------------------------------------------------------------------------


def index_of(mask, partial, block_entries=None):
    """(heads, rows, cols) block mask -> ptr, idx, flags, entry by rows and by columns."""

    def by_rows(m, flags, number):
        ptr = np.concatenate([[0], np.cumsum(m.sum(2).reshape(-1))])
        return [ptr.astype(np.int32), np.nonzero(m)[2].astype(np.int32), flags[m].astype(np.uint8), number[m].astype(np.int32)]

    number = np.zeros(mask.shape, np.int64)
    number[mask] = np.arange(mask.sum())
    swap = [a.transpose(0, 2, 1) for a in (mask, partial, number)]
    return by_rows(mask, partial, number), by_rows(*swap)


def layouts(rng, nq, nk, block, q_start):
    """Block masks by name; all causal but the last two."""
    row, col = q_start + np.arange(nq)[:, None] * block, np.arange(nk)[None] * block
    causal = (col <= row + block - 1)[None]
    yield "dense", causal
    yield "local", causal & (col + block > row - block)[None]
    yield "last", causal & (col > row - 1)[None]  # where q_start is no multiple of the block, its first queries see no key
    yield "random heads", causal & (rng.random((3, nq, nk)) < 0.5)
    yield "nothing", np.zeros((1, nq, nk), bool)
    yield "all", np.ones((1, nq, nk), bool)


CASES = [  # B, H, T, S, D, block, q_start
    (1, 1, 1, 1, 8, 16, 0),
    (1, 8, 63, 63, 16, 64, 0),
    (2, 6, 65, 65, 16, 16, 0),
    (1, 3, 130, 130, 80, 64, 0),
    (1, 2, 130, 130, 12, 32, 0),
    (2, 3, 200, 200, 64, 128, 0),
    (1, 4, 5, 133, 64, 64, 128),
    (1, 6, 70, 257, 24, 32, 187),
    (1, 6, 100, 200, 24, 64, 40),
    (1, 2, 1, 300, 256, 64, 299),
    (1, 3, 0, 5, 8, 16, 0),
    (0, 3, 5, 5, 8, 16, 0),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("B, H, T, S, D, block, q_start", CASES)
def test_attention(dtype, B, H, T, S, D, block, q_start):
    rng = np.random.default_rng(T + S)
    acc, scale = accumulate_dtype(dtype), 1 / np.sqrt(D)
    packed = draw(rng, (B, S, H, 2, D), dtype)  # k and v as views of one array
    q, dout = draw(rng, (B, H, T, D), dtype), draw(rng, (B, T, H, D), dtype).transpose(0, 2, 1, 3)
    k, v = packed[:, :, :, 0].transpose(0, 2, 1, 3), packed[:, :, :, 1].transpose(0, 2, 1, 3)
    strides = lambda a: elements(a)[:3]  # noqa: E731
    kq, kk = np.arange(T)[:, None] + q_start, np.arange(S)[None]
    for name, mask in layouts(rng, -(-T // block), -(-S // block), block, q_start):
        causal = name not in ("nothing", "all")
        row, col = np.arange(mask.shape[1])[:, None] * block, np.arange(mask.shape[2])[None] * block
        crosses = col + block - 1 > q_start + row if causal else np.zeros((1, 1), bool)
        partial = np.broadcast_to(crosses, mask.shape)
        rows, columns = index_of(mask, partial)
        allowed = mask.repeat(block, 1).repeat(block, 2)[:, :T, :S] & ((kk <= kq) | (not causal))
        allowed = allowed[np.arange(H) % mask.shape[0]]

        s = np.where(allowed, f64(q) @ f64(k).swapaxes(-1, -2) * scale, -np.inf)
        lse = logsumexp(s)
        p = np.where(allowed, np.exp(s - np.where(np.isinf(lse), 0, lse)), 0)
        out = p @ f64(v)
        dims = B, H, T, S, D, mask.shape[0], block, q_start, scale
        # v and k stand in one array; the kernel gets each as a flat copy with its own strides
        flat = [np.ascontiguousarray(a) for a in (k, v)]
        ins = q, strides(q), flat[0], strides(flat[0]), flat[1], strides(flat[1])
        blank_out, blank_lse = blank((B, T, H, D), dtype), blank((B, H, T), acc)
        out_strides = strides(blank_out.transpose(0, 2, 1, 3))
        got, got_lse = call("attention_forward", *ins, blank_out, out_strides, blank_lse, *rows[:3], *dims, outputs=[6, 8])
        check(got.transpose(0, 2, 1, 3), out, dtype)
        check(got_lse, lse[..., 0], acc)

        out16 = out.astype(q.dtype)
        g = f64(dout)
        ds = p * (g @ f64(v).swapaxes(-1, -2) - (g * f64(out16)).sum(-1, keepdims=True))
        want = ds @ f64(k) * scale, ds.swapaxes(-1, -2) @ f64(q) * scale, p.swapaxes(-1, -2) @ g
        dout_flat = np.ascontiguousarray(dout.transpose(0, 2, 1, 3))
        blanks = [blank((B, H, n, D), dtype) for n in (T, S, S)]
        grads = call(
            "attention_backward", dout_flat, strides(dout_flat.transpose(0, 2, 1, 3)), *ins, out16, strides(out16),
            lse[..., 0].astype(acc), blank((B, H, T), acc), *[x for b in blanks for x in (b, strides(b))],
            *rows[:3], *columns[:3], *dims, outputs=[12, 14, 16],
        )  # fmt: skip
        for gradient, expected in zip(grads, want, strict=True):
            check(gradient, expected, dtype, 5)


def test_attention_reads_strided_views_and_never_the_future():
    rng = np.random.default_rng(1)
    B, H, T, D, block = 1, 2, 100, 32, 32
    qkv = rng.standard_normal((B, T, H, 3, D)).astype(np.float32)
    nb = -(-T // block)
    mask = np.tril(np.ones((1, nb, nb), bool))
    rows, _ = index_of(mask, np.eye(nb, dtype=bool)[None])
    out, lse = blank((B, H, T, D), "float32"), blank((B, H, T), "float32")
    strides = elements(qkv[:, :, :, 0].transpose(0, 2, 1, 3))[:3]

    def run(values):
        whole = to_device(values)
        views = [whole.view(i * D, values.size - i * D) for i in range(3)]
        o, l = to_device(out), to_device(lse)
        args = [x for view in views for x in (view, strides)]
        backend.attention_forward(*args, o, elements(out)[:3], l, *map(to_device, rows[:3]), B, H, T, T, D, 1, block, 0, 0.2)
        return to_host(o, out)

    x = f64(qkv)
    s = np.einsum("bthd,bshd->bhts", x[..., 0, :], x[..., 1, :]) * 0.2
    s = np.where(np.tril(np.ones((T, T), bool)), s, -np.inf)
    want = np.einsum("bhts,bshd->bhtd", np.exp(s - logsumexp(s)), x[..., 2, :])
    first = run(qkv)
    check(first, want, "float32")
    for t in (0, 31, 50, 98):
        changed = qkv.copy()
        changed[:, t + 1 :] = rng.standard_normal(changed[:, t + 1 :].shape) * 10
        assert run(changed)[:, :, : t + 1].tobytes() == first[:, :, : t + 1].tobytes()


def test_attention_refuses_a_large_head():
    a, i, flag = (to_device(np.zeros(4, t)) for t in (np.float32, np.int32, np.uint8))
    with pytest.raises(ValueError, match=r"\[attention\] head size is too large: 300 \(at most 256\)"):
        backend.attention_forward(a, [0] * 3, a, [0] * 3, a, [0] * 3, a, [0] * 3, a, i, i, flag, 1, 1, 1, 1, 300, 1, 64, 0, 1.0)


# --- block-sparse products -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("trans", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("batch, heads, block, n_rows, n_cols, other", [(1, 1, 16, 3, 2, 7), (4, 2, 32, 5, 4, 150), (2, 1, 64, 2, 3, 65), (1, 1, 128, 3, 1, 200), (3, 3, 16, 4, 6, 0)])  # fmt: skip
def test_blocksparse_products(dtype, trans, batch, heads, block, n_rows, n_cols, other):
    rng = np.random.default_rng(block)
    mask = rng.random((heads, n_rows, n_cols)) < 0.5
    mask[0, 0] = False  # an empty row, and an empty column
    mask[:, :, -1] &= n_cols == 1
    rows, columns = index_of(mask, np.zeros_like(mask))
    per_head = mask.sum((1, 2))
    nnz, first = int(per_head.max()), np.concatenate([[0], np.cumsum(per_head)])
    m, n = n_rows * block, n_cols * block
    stored_shape = (batch, nnz, block, block)

    def stored(array, transposed):
        return np.ascontiguousarray(array.swapaxes(-1, -2)) if transposed else array

    def to_blocks(dense):
        result = np.zeros(stored_shape)
        for b in range(batch):
            for e, (i, j) in enumerate(np.argwhere(mask[b % heads])):
                result[b, e] = dense[b, i * block : (i + 1) * block, j * block : (j + 1) * block]
        return result

    def to_dense(blocks):
        result = np.zeros((batch, m, n))
        for b in range(batch):
            for e, (i, j) in enumerate(np.argwhere(mask[b % heads])):
                result[b, i * block : (i + 1) * block, j * block : (j + 1) * block] = blocks[b, e]
        return result

    assert first[-1] == mask.sum()
    scale = 0.3
    a, b = draw(rng, (batch, m, other), dtype, scale), draw(rng, (batch, other, n), dtype, scale)
    got = call(
        "blocksparse_sdd", stored(a, trans[0]), trans[0], stored(b, trans[1]), trans[1], blank(stored_shape, dtype),
        *rows[:2], batch, m, n, other, nnz, heads, block, outputs=[4],
    )  # fmt: skip
    check(got, to_blocks(f64(a) @ f64(b)), dtype, 3)

    blocks = draw(rng, stored_shape, dtype, scale)
    dense = to_dense(f64(blocks))
    for trans_s, (height, width), by_row, by_col in ((False, (m, n), rows, columns), (True, (n, m), columns, rows)):
        s = dense.swapaxes(1, 2) if trans_s else dense
        c = draw(rng, (batch, width, other), dtype, scale)
        got = call(
            "blocksparse_dsd", blocks, trans_s, stored(c, trans[1]), trans[1], blank((batch, height, other), dtype),
            *by_row[:2], by_row[3], batch, height, other, width, nnz, heads, block, outputs=[4],
        )  # fmt: skip
        check(got, s @ f64(c), dtype, 3)
        d = draw(rng, (batch, other, height), dtype, scale)
        got = call(
            "blocksparse_dds", stored(d, trans[0]), trans[0], blocks, trans_s, blank((batch, other, width), dtype),
            *by_col[:2], by_col[3], batch, other, width, height, nnz, heads, block, outputs=[4],
        )  # fmt: skip
        check(got, f64(d) @ s, dtype, 3)
