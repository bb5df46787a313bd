"""One table of cases for every op: parity, gradient check and catalogue tests read it."""

import math

import numpy as np

import needle as ndl
from needle import ops
from needle.backend_ndarray import NDArray
from needle.backend_ndarray.block_layout import BlockLayout, dense_layout
from needle.testing import OpCase

_erf = np.vectorize(math.erf)


def positive(rng, shape):
    return rng.uniform(0.5, 2.0, shape)


def away_from_zero(rng, shape):
    x = rng.uniform(0.2, 2.0, shape)
    return np.where(rng.uniform(size=shape) < 0.5, -x, x)


def distinct(rng, shape):
    return rng.permutation(int(np.prod(shape))).reshape(shape) / 4.0


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def layer_norm(x, w, b):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * w + b


def batch_norm(x, w, b):
    y, mean, var = ops.batch_norm(x, w, b, 0.1)
    return y + mean * var


def batch_norm_reference(x, w, b):
    mean, var = x.mean(0), x.var(0)
    return (x - mean) / np.sqrt(var + 0.1) * w + b + mean * var


def ids(values, device):
    return ndl.Tensor(np.asarray(values), device=device, dtype="int32", requires_grad=False)


def tables(T, device):
    angle = np.arange(T)[:, None] / (10.0 ** np.arange(2))[None]
    return (NDArray(f(angle), device=device, dtype="float32") for f in (np.cos, np.sin))


def rotary_qkv(x):
    cos, sin = tables(x.shape[1], x.device)
    q, k, v = ops.rotary_qkv(x, cos, sin)
    return q * k + v


def rotary(x):
    return ops.rotary(x, *tables(x.shape[2], x.device))


SPARSE = BlockLayout(np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]]), 16, causal=True)
BLOCKS = BlockLayout(np.array([[1, 0, 1], [0, 0, 0]]), 16)
PER_HEAD = BlockLayout(np.array([[[1, 0, 1], [0, 0, 0]], [[0, 1, 0], [1, 0, 0]]]), 16)
CAUSAL_PER_HEAD = BlockLayout(np.array([[[1, 0], [1, 1]], [[1, 0], [0, 1]]]), 16, causal=True)


def reference_attention(layout):
    def run(q, k, v):
        s = q @ np.swapaxes(k, -1, -2) / math.sqrt(q.shape[-1])
        mask = layout.dense_mask(q.shape[2], k.shape[2])
        seen = np.stack([mask[head % layout.heads] for head in range(q.shape[1])])
        return softmax(np.where(seen, s, -1e30)) @ v

    return run


def cross_entropy(x, t):
    return -np.log(softmax(x))[np.arange(len(t)), t].mean(keepdims=True)


def rnn(nonlinearity):
    def run(x, h, w_ih, w_hh, bias):
        y = []
        for x_t in x:
            h = nonlinearity(x_t @ w_ih + h @ w_hh + bias)
            y.append(h)
        return np.stack(y)

    return run


def lstm(x, h, c, w_ih, w_hh, bias):
    y = []
    for x_t in x:
        i, f, g, o = np.split(x_t @ w_ih + h @ w_hh + bias, 4, axis=1)
        c = c / (1 + np.exp(-f)) + np.tanh(g) / (1 + np.exp(-i))
        h = np.tanh(c) / (1 + np.exp(-o))
        y.append(h)
    return np.concatenate([*y, c])


def lstm_output_and_state(*inputs):
    y, c = ops.lstm(*inputs)
    return ops.concatenate([ops.reshape(y, (-1, c.shape[1])), c])


TARGETS = [3, 0, 6, 3, 1]

CASES = [
    OpCase("add", lambda a, b: a + b, [(3, 1, 5), (4, 5)], ["EWiseAdd"], lambda a, b: a + b),
    OpCase("add_scalar", lambda a: a + 1.5, [(3, 5)], ["AddScalar"], lambda a: a + 1.5),
    OpCase("rsub_scalar", lambda a: 1.5 - a, [(3, 5)], ["AddScalar"], lambda a: 1.5 - a),
    OpCase("multiply", lambda a, b: a * b, [(3, 1, 5), (4, 5)], ["EWiseMul"], lambda a, b: a * b),
    OpCase("mul_scalar", lambda a: a * -2.5, [(3, 5)], ["MulScalar"], lambda a: a * -2.5),
    OpCase("divide", lambda a, b: a / b, [(3, 5), (3, 5)], ["EWiseDiv"], lambda a, b: a / b, away_from_zero, 4, "b near 0.2"),
    OpCase("div_scalar", lambda a: a / 4, [(3, 5)], ["DivScalar"], lambda a: a / 4),
    OpCase("rdiv_scalar", lambda a: 4 / a, [(3, 5)], ["RDivScalar"], lambda a: 4 / a, away_from_zero),
    OpCase("power", lambda a, b: a**b, [(3, 5), (5,)], ["EWisePow"], lambda a, b: a**b, positive, 4, "powers up to 2"),
    OpCase("power_scalar", lambda a: a**3, [(3, 5)], ["PowerScalar"], lambda a: a**3, away_from_zero),
    OpCase("negate", lambda a: -a, [(3, 5)], ["Negate"], lambda a: -a),
    OpCase("log", ops.log, [(3, 5)], ["Log"], np.log, positive),
    OpCase("exp", ops.exp, [(3, 5)], ["Exp"], np.exp),
    OpCase("sqrt", ops.sqrt, [(3, 5)], ["Sqrt"], np.sqrt, positive),
    OpCase("sin", ops.sin, [(3, 5)], ["Sin"], np.sin),
    OpCase("cos", ops.cos, [(3, 5)], ["Cos"], np.cos),
    OpCase("absolute", ops.absolute, [(3, 5)], ["Abs"], np.abs, away_from_zero),
    OpCase("relu", ops.relu, [(3, 5)], ["ReLU"], lambda a: np.maximum(a, 0), away_from_zero),
    OpCase("tanh", ops.tanh, [(3, 5)], ["Tanh"], np.tanh),
    OpCase("sigmoid", ops.sigmoid, [(3, 5)], ["Sigmoid"], lambda a: 1 / (1 + np.exp(-a))),
    OpCase("silu", ops.silu, [(3, 5)], ["SiLU"], lambda a: a / (1 + np.exp(-a))),
    OpCase("erf", ops.erf, [(3, 5)], ["Erf"], _erf),
    OpCase("gelu", ops.gelu, [(3, 5)], ["GELU"], lambda a: 0.5 * a * (1 + _erf(a / math.sqrt(2)))),
    OpCase(
        "gelu_tanh", lambda a: ops.gelu(a, "tanh"), [(3, 5)], ["GELU"],
        lambda a: 0.5 * a * (1 + np.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a**3))),
    ),
    OpCase("maximum", ops.maximum, [(3, 5), (3, 5)], ["Maximum"], np.maximum),
    OpCase("minimum", ops.minimum, [(3, 1, 5), (4, 5)], ["Minimum"], np.minimum),
    OpCase("clip", lambda a: ops.clip(a, -0.5, 0.75), [(3, 5)], ["Clip"], lambda a: np.clip(a, -0.5, 0.75)),
    OpCase("astype", lambda a: ops.astype(a * 1, "float64"), [(3, 5)], ["AsType"], lambda a: a),
    OpCase("where", lambda a, b: ops.where(ops.relu(a.detach() * 1e30), a, b), [(3, 5), (3, 5)], ["Where"],
           lambda a, b: np.where(a > 0, a, b), away_from_zero, dtypes=("float64", "float32", "bfloat16")),
    OpCase("sum_all", lambda a: a.sum(), [(3, 5)], ["Summation"], lambda a: a.sum().reshape(1)),
    OpCase("sum_first", lambda a: a.sum(0), [(3, 4, 5)], ["Summation"], lambda a: a.sum(0)),
    OpCase("sum_middle", lambda a: a.sum((1,)), [(3, 4, 5)], ["Summation"], lambda a: a.sum(1)),
    OpCase("sum_outer", lambda a: a.sum((0, 2)), [(3, 4, 5)], ["Summation"], lambda a: a.sum((0, 2))),
    OpCase("mean", lambda a: ops.mean(a, 1, keepdims=True), [(3, 5)], ["Mean"], lambda a: a.mean(1, keepdims=True)),
    OpCase("max", lambda a: ops.max(a, 1), [(3, 5)], ["Max"], lambda a: a.max(1), distinct),
    OpCase("matmul", ops.matmul, [(5, 7), (7, 3)], ["MatMul"], np.matmul, looser=4, reason="sums of 7 products"),
    OpCase("matmul_batched", ops.matmul, [(2, 1, 5, 7), (3, 7, 3)], ["MatMul"], np.matmul, looser=4, reason="sums"),
    OpCase("matmul_rows", ops.matmul, [(2, 4, 7), (7, 3)], ["MatMul"], np.matmul, looser=4, reason="sums"),
    OpCase("matmul_vector", ops.matmul, [(4, 7), (7,)], ["MatMul"], np.matmul, looser=4, reason="sums"),
    OpCase("vector_matrix", ops.matmul, [(7,), (7, 3)], ["MatMul"], np.matmul, looser=4, reason="sums"),
    OpCase("vector_matmul", ops.matmul, [(7,), (2, 7, 3)], ["MatMul"], np.matmul, looser=4, reason="sums"),
    OpCase("dot", ops.matmul, [(7,), (7,)], ["MatMul"], np.matmul, looser=4, reason="sums"),
    OpCase("linear", ops.linear, [(2, 4, 7), (7, 3), (3,)], ["Linear"], lambda x, w, b: x @ w + b, looser=4, reason="sums"),
    OpCase("broadcast_to", lambda a: ops.broadcast_to(a, (2, 3, 5)), [(3, 1)], ["BroadcastTo"],
           lambda a: np.broadcast_to(a, (2, 3, 5))),
    OpCase("reshape", lambda a: ops.reshape(ops.transpose(a), (5, 3)), [(3, 5)], ["Reshape", "Transpose"],
           lambda a: a.T.reshape(5, 3)),
    OpCase("permute", lambda a: ops.permute(a, (2, 0, 1)), [(2, 3, 4)], ["Permute"], lambda a: a.transpose(2, 0, 1)),
    OpCase("flip", lambda a: ops.flip(a, (0, 2)), [(2, 3, 4)], ["Flip"], lambda a: a[::-1, :, ::-1]),
    OpCase("dilate", lambda a: ops.dilate(a, (0, 1), 1) * 2 + 1, [(2, 3)], ["Dilate"]),
    OpCase("undilate", lambda a: ops.undilate(a, (1,), 1), [(2, 6)], ["UnDilate"], lambda a: a[:, ::2]),
    OpCase("pad", lambda a: ops.pad(a, ((1, 2), (0, 1))), [(2, 3)], ["Pad"], lambda a: np.pad(a, ((1, 2), (0, 1)))),
    OpCase("stack", lambda a, b: ops.stack((a, b), 1), [(2, 3), (2, 3)], ["Stack", "MakeTensorTuple"],
           lambda a, b: np.stack((a, b), 1)),
    OpCase("split", lambda a: ops.split(a, 1)[2] * ops.split(a, 1)[0], [(2, 3)], ["Split", "TupleGetItem"],
           lambda a: a[:, 2] * a[:, 0]),
    OpCase("fused_add_scalars", lambda a: ops.fused_add_scalars(a, 1.0, 2.0)[1] * a, [(2, 3)], ["FusedAddScalars"],
           lambda a: (a + 2) * a),
    OpCase("concatenate", lambda a, b: ops.concatenate((a, b), 1), [(2, 3), (2, 1)], ["Concatenate"],
           lambda a, b: np.concatenate((a, b), 1)),
    OpCase("conv", lambda a, b: ops.conv(a, b, 1, 1), [(2, 5, 4, 3), (3, 3, 3, 2)], ["Conv"], looser=8, reason="sums of 27"),
    OpCase("conv_bias", lambda a, b, bias: ops.conv(a, b, 1, 1, bias), [(2, 5, 4, 3), (3, 3, 3, 2), (2,)], ["Conv"], looser=8, reason="sums"),
    OpCase("conv_oblong", lambda a, b: ops.conv(a, b, 1, 1), [(2, 5, 4, 3), (2, 3, 3, 2)], ["Conv"], looser=8, reason="sums of 18"),
    OpCase("conv_stride", lambda a, b: ops.conv(a, b, 2, 1), [(1, 6, 5, 2), (3, 3, 2, 2)], ["Conv"], looser=8, reason="sums"),
    OpCase("conv_planes", lambda a, b: ops.conv(ops.permute(a, (0, 2, 3, 1)), b), [(2, 3, 5, 4), (3, 3, 3, 2)], ["Conv", "Permute"],
           looser=8, reason="sums of 27"),
    OpCase("getitem", lambda a: a[1, :, ::-2], [(2, 3, 5)], ["GetItem", "_Embed"], lambda a: a[1, :, ::-2]),
    OpCase("getitem_arrays", lambda a: a[[2, 0, 2], :, [[1], [-1]]], [(3, 2, 4)], ["GetItem", "_Embed"],
           lambda a: a[[2, 0, 2], :, [[1], [-1]]]),
    OpCase("setitem", lambda a, b: ops.setitem(a, (slice(None), 1), b), [(2, 3), (2,)], ["SetItem"]),
    OpCase("setitem_arrays", lambda a, b: ops.setitem(a, ([2, 0, 2],), b), [(4, 2), (3, 2)], ["SetItem"]),
    OpCase("embedding", lambda w: ops.embedding(w, ids([[3, 0], [3, 2]], w.device)), [(5, 4)], ["Embedding"],
           lambda w: w[np.array([[3, 0], [3, 2]])]),
    OpCase("logsumexp", lambda a: ops.logsumexp(a, (0, 2)), [(3, 4, 5)], ["LogSumExp"],
           lambda a: np.log(np.exp(a).sum((0, 2))), looser=2, reason="16-bit lse is read back by the gradient"),
    OpCase("logsoftmax", ops.logsoftmax, [(3, 37)], ["LogSoftmax"], lambda a: np.log(softmax(a))),
    OpCase("softmax", ops.softmax, [(3, 37)], ["Softmax"], softmax),
    OpCase("layer_norm", ops.layer_norm, [(6, 37), (37,), (37,)], ["LayerNorm"], layer_norm, looser=4, reason="a quotient of sums"),
    OpCase("layer_norm_rows", ops.layer_norm, [(520, 3), (3,), (3,)], ["LayerNorm"], layer_norm, looser=4, reason="sums of 520"),
    OpCase("batch_norm", batch_norm, [(37, 6), (6,), (6,)], ["BatchNorm"], batch_norm_reference, looser=4, reason="a quotient of sums"),
    OpCase("batch_norm_rows", batch_norm, [(520, 3), (3,), (3,)], ["BatchNorm"], batch_norm_reference, looser=4, reason="sums of 520"),
    OpCase("cross_entropy", lambda a: ops.cross_entropy(a, ids(TARGETS, a.device)), [(5, 7)], ["CrossEntropy"],
           lambda a: cross_entropy(a, TARGETS)),
    OpCase("linear_cross_entropy", lambda h, w: ops.linear_cross_entropy(h, w, ids(TARGETS, h.device), chunk_bytes=60),
           [(5, 4), (4, 7)], ["LinearCrossEntropy"], lambda h, w: cross_entropy(h @ w, TARGETS), looser=4, reason="sums"),
    OpCase("rnn", ops.rnn, [(3, 2, 5), (2, 4), (5, 4), (4, 4), (4,)], ["RNN"], rnn(np.tanh), looser=8,
           reason="products of 3 positions"),
    OpCase("rnn_relu", lambda *inputs: ops.rnn(*inputs, nonlinearity="relu"), [(2, 3, 4), (3, 5), (4, 5), (5, 5), (5,)], ["RNN"],
           rnn(lambda x: np.maximum(x, 0)), looser=8, reason="products of 2 positions"),
    OpCase("lstm", lstm_output_and_state, [(3, 2, 5), (2, 4), (2, 4), (5, 16), (4, 16), (16,)], ["LSTM"], lstm, looser=8,
           reason="products of 3 positions"),
    OpCase("lstm_state", lambda *inputs: ops.lstm(*inputs)[1], [(1, 2, 5), (2, 4), (2, 4), (5, 16), (4, 16), (16,)], ["LSTM"],
           lambda *inputs: lstm(*inputs)[2:], looser=4, reason="sums"),
    OpCase("rotary", rotary, [(1, 2, 5, 6)], ["Rotary"], looser=2, reason="tables are float32"),
    OpCase("rotary_qkv", rotary_qkv, [(1, 5, 2, 3, 6)], ["RotaryQKV"], looser=4, reason="a product of two rotations"),
    OpCase("attention", ops.attention, [(1, 2, 70, 8)] * 3, ["Attention"], reference_attention(dense_layout(70, 70)),
           looser=8, reason="an online sum of 70 terms"),
    OpCase("attention_sparse", lambda q, k, v: ops.attention(q, k, v, SPARSE), [(2, 1, 41, 16)] * 3, ["Attention"],
           reference_attention(SPARSE), looser=8, reason="an online sum"),
    OpCase("attention_per_head", lambda q, k, v: ops.attention(q, k, v, CAUSAL_PER_HEAD), [(1, 4, 20, 4)] * 3, ["Attention"],
           reference_attention(CAUSAL_PER_HEAD), looser=8, reason="an online sum"),
    OpCase("sdd", lambda a, b: ops.sdd(a, b, BLOCKS), [(2, 32, 5), (2, 5, 48)], ["SDD"], looser=4, reason="sums"),
    OpCase("dsd", lambda s, b: ops.dsd(s, b, BLOCKS), [(1, 2, 16, 16), (1, 48, 3)], ["DSD"], looser=8, reason="sums of 32"),
    OpCase("dsd_transposed", lambda s, b: ops.dsd(s, b, PER_HEAD, True), [(2, 2, 16, 16), (2, 32, 3)], ["DSD"], looser=8,
           reason="sums of 32"),
    OpCase("dds", lambda a, s: ops.dds(a, s, PER_HEAD), [(2, 3, 32), (2, 2, 16, 16)], ["DDS"], looser=8, reason="sums"),
    OpCase("dds_transposed", lambda a, s: ops.dds(a, s, BLOCKS, True), [(1, 3, 48), (1, 2, 16, 16)], ["DDS"], looser=8,
           reason="sums"),
    OpCase("dropout", lambda a: ops.dropout(a, 0.3, seed=7, offset=5), [(9, 13)], ["Dropout"]),
]  # fmt: skip
