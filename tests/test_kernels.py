"""The kernels of each compiled device, driven directly: sizes, strides and special values that the parity suite's small arrays lack."""

import itertools

import numpy as np
import pytest

from kernel_calls import (
    FLOATS,
    RNG,
    TOLERANCE,
    In,
    Out,
    acc,
    backend,
    call,
    check,
    check_attention,
    check_blocksparse,
    check_random_attention,
    devices,
    every_float,
    get,
    index_of,
    normal,
    put,
    random_masks,
    reference,
)
from needle import dtype as dt
from needle.backend_ndarray.kernels import MAX_HEAD

_device = devices("cpu", "cuda_sim", "cuda")
on_cpu = pytest.mark.parametrize("_device", ["cpu"], indirect=True)
every_id = pytest.mark.parametrize("id_dtype", ["int32", "int64"])
IGNORE = -100


# --- movement and elementwise ---------------------------------------------------------------------------------------------


def test_strided_copy_of_negative_steps_and_many_dimensions():
    x = normal(2, 3, 2, 3, 2, 3).astype(np.float32)
    for view in (x[::-1, :, ::-1, 1:, :, ::2], x.transpose(5, 3, 1, 4, 2, 0)[::-1], x[0, ..., None].transpose()):
        strides = tuple(s // 4 for s in view.strides)
        offset = (view.__array_interface__["data"][0] - x.__array_interface__["data"][0]) // 4
        a, out = put(backend, x, "float32"), backend.Array(view.size, "float32")
        backend.compact(a, out, view.shape, strides, offset)
        np.testing.assert_array_equal(get(backend, out), view.reshape(-1))


def test_views_of_as_many_dimensions_as_there_may_be():
    """Of 16 that are not one, on a GPU of 12, and of any number of those that have one element."""
    most = 16 if backend.__device_name__ == "cpu" else 12
    x = np.arange(2**most, dtype=np.float32).reshape([2] * most)
    for view in (x.transpose(), np.expand_dims(x.transpose(), tuple(range(1, 2 * most, 2)))):
        a, out = put(backend, x, "float32"), backend.Array(view.size, "float32")
        backend.compact(a, out, view.shape, tuple(s // 4 for s in view.strides), 0)
        np.testing.assert_array_equal(get(backend, out), view.reshape(-1))


@pytest.mark.parametrize("shape", [(8, 9), (37, 70), (64, 128), (3, 33, 40)], ids=str)
def test_copies_of_transposes_keep_every_bit(shape):
    """Of NaN too, and of numbers that a float would hold otherwise."""
    for dtype, row in dt.ROWS.items():
        bits = RNG.integers(0, 2 if dtype == "bool" else 256, (*shape, row.itemsize), dtype=np.uint8)
        x = bits.view(dt.to_numpy(dtype))[..., 0]
        turned = x.swapaxes(-1, -2)
        a, out = put(backend, x, dtype), backend.Array(x.size, dtype)
        backend.compact(a, out, turned.shape, tuple(s // row.itemsize for s in turned.strides), 0)
        np.testing.assert_array_equal(get(backend, out).view(np.uint8), np.ascontiguousarray(turned).reshape(-1).view(np.uint8))


def test_conversions_between_all_dtypes():
    values = np.array([0, 1, 2, 3.75, 100.5, 0.25] * 7)
    for a in dt.ROWS:
        for b in dt.ROWS:
            x = put(backend, values, a), put(reference, values, a)
            y = backend.Array(42, b), reference.Array(42, b)
            for module, source, target in zip((backend, reference), x, y, strict=True):
                module.compact(source, target, (42,), (1,), 0)
            np.testing.assert_array_equal(get(backend, y[0]), get(reference, y[1]), err_msg=f"{a} -> {b}")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_nan_stays_one_in_16_bits(dtype):
    """Also those that differ from infinity in bits alone that 16 bits have no place for."""
    bits = np.array([0x7F800001, 0xFF800001, 0x7FBFFFFF, 0x7FC00000, 0xFFFFFFFF] * 9, np.uint32)
    for n in (1, 45):
        out, found = backend.Array(n, dtype), backend.Array(n, "float32")
        backend.compact(put(backend, bits[-n:].view(np.float32), "float32"), out, (n,), (1,), 0)
        backend.compact(out, found, (n,), (1,), 0)
        assert np.isnan(get(backend, found)).all()


@pytest.mark.parametrize("shape", [(8, 8), (37, 70), (64, 128)], ids=str)
def test_conversions_of_transposes_are_those_of_rows(shape):
    rows, cols = shape
    values = RNG.integers(0, 200, shape) / 4
    for a in dt.ROWS:
        for b in dt.ROWS:
            turned, plain = put(backend, values, a), put(backend, values.T, a)
            outs = backend.Array(values.size, b), backend.Array(values.size, b)
            backend.compact(turned, outs[0], (cols, rows), (1, cols), 0)
            backend.compact(plain, outs[1], (cols, rows), (rows, 1), 0)
            np.testing.assert_array_equal(get(backend, outs[0]), get(backend, outs[1]), err_msg=f"{a} -> {b}")


def test_conversions_of_elements_apart_are_those_of_neighbours():
    """Of more than the CPU converts at a time, from every other element, from the last on, to every third."""
    n = 601
    values = RNG.integers(0, 200, n) / 4
    for a in dt.ROWS:
        apart, plain = put(backend, np.repeat(values, 2), a), put(backend, values[::-1], a)
        for b in dt.ROWS:
            spread, wanted = put(backend, np.zeros(3 * n), b), backend.Array(n, b)
            backend.strided_copy(apart, (-2,), 2 * n - 2, spread, (3,), 1, (n,))
            backend.compact(plain, wanted, (n,), (1,), 0)
            rows = get(backend, spread).reshape(n, 3)
            np.testing.assert_array_equal(rows[:, 1], get(backend, wanted), err_msg=f"{a} -> {b}")
            assert not rows[:, ::2].any(), f"{a} -> {b}"


@every_float
def test_numbers_below_0_wrap_around_in_uint8(dtype):
    """Of their whole part; processors do so, GPUs only where they are told to."""
    x, out = put(backend, [-0.5, -1, -2.75, -255, -256, 300], dtype), backend.Array(6, "uint8")
    backend.compact(x, out, (6,), (1,), 0)
    assert get(backend, out).tolist() == [0, 255, 254, 1, 0, 44]


@every_float
@pytest.mark.parametrize("size", [1, 15, 16, 17, 4099])
def test_elementwise_vectors_and_tails(dtype, size):
    a, b = normal(size), normal(size)
    check("ewise_gelu_erf", dtype, In(a), Out(size))
    check("ewise_mul", dtype, In(a), In(b), Out(size))
    check("scalar_maximum", dtype, In(a), 0.25, Out(size))
    check("rscalar_sub", dtype, In(a), 0.25, Out(size))
    check("ewise_add", dtype, In(a[: size // 2 + 1]), (0,), 0, In(b), (1,), 0, Out(size), (size,))
    x, n = put(backend, a, dtype), size - size // 2  # from an address that vectors do not fit
    out = backend.Array(n, dtype)
    backend.ewise_negate(x.view(size // 2, n), out)
    np.testing.assert_array_equal(get(backend, out), -get(backend, x)[size // 2 :])


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "bool"])
@pytest.mark.parametrize(
    "shape", [(9000, 1, 5), (40, 90, 13), (520, 1, 127), (3, 100, 128), (2, 20, 1500), (1, 1, 40_000)], ids=str
)
def test_elementwise_of_rows_and_columns(dtype, shape):
    """Of one row for all, of a number for each, of rows and of every other element of rows, from either end."""
    rows, between, cols = shape
    values = RNG.integers(0, 2 if dtype == "bool" else 2048, rows * 2 * cols).astype(np.int64)
    memory = put(backend, values, dtype)
    walks = [((0, 0, 1), 3), ((0, 0, -1), cols + 3), ((1, 0, 0), 2), ((0, 1, 0), 1), ((2 * cols, 0, 1), 1), ((2 * cols, 0, 2), 0),
             ((2 * cols, 0, -2), 2 * cols - 1)]  # fmt: skip
    x = [(memory, strides, offset) for strides, offset in walks]
    at = [sum(s * i for s, i in zip(strides, np.indices(shape, sparse=True))) + offset for strides, offset in walks]
    views = [np.broadcast_to(values[i], shape).astype(dtype) for i in at]
    out, truth = backend.Array(rows * between * cols, dtype), backend.Array(rows * between * cols, "bool")
    for i, j in itertools.permutations(range(len(x)), 2):
        backend.ewise_maximum(*x[i], *x[j], out, shape)
        np.testing.assert_array_equal(get(backend, out), np.maximum(views[i], views[j]).reshape(-1))
        backend.ewise_lt(*x[i], *x[j], truth, shape)
        np.testing.assert_array_equal(get(backend, truth), (views[i] < views[j]).reshape(-1))


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "bool"])
def test_elementwise_of_transposed_operands(dtype):
    """Each element is where it belongs, whatever the sizes leave of the last tile and whichever operand is turned."""
    shape = (3, 37, 2, 70)
    values = RNG.permutation(int(np.prod(shape))) % (2 if dtype == "bool" else 2048)  # exact in every dtype

    def turned(*axes):
        memory = values.reshape([shape[i] for i in axes])
        return memory, memory.transpose(np.argsort(axes))

    operands = [turned(0, 1, 2, 3), turned(0, 3, 2, 1), turned(3, 0, 2, 1), turned(3, 2, 1, 0), turned(1, 3, 0, 2)]
    operands.append((values[:37], np.broadcast_to(values[:37, None, None], shape)))
    x = [(put(backend, memory, dtype), tuple(s // 8 for s in view.strides), 0) for memory, view in operands]
    views = [view.astype(dtype) for _, view in operands]
    for i, j, k in itertools.permutations(range(len(x)), 3):
        out, truth = backend.Array(values.size, dtype), backend.Array(values.size, "bool")
        backend.ewise_maximum(*x[i], *x[j], out, shape)
        np.testing.assert_array_equal(get(backend, out), np.maximum(views[i], views[j]).reshape(-1))
        backend.ewise_lt(*x[j], *x[k], truth, shape)
        np.testing.assert_array_equal(get(backend, truth), (views[j] < views[k]).reshape(-1))
        backend.scalar_ne(*x[k], 1, truth, shape)
        np.testing.assert_array_equal(get(backend, truth), (views[k] != 1).reshape(-1))
        condition = put(backend, operands[i][0] % 2 == 1, "bool"), *x[i][1:]
        backend.where(*condition, *x[j], *x[k], out, shape)
        np.testing.assert_array_equal(get(backend, out), np.where(operands[i][1] % 2 == 1, views[j], views[k]).reshape(-1))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rows_of_16_bit_floats_convert_as_single_ones_do(dtype):
    """With x = 1, -1, .., layer norm is weight + bias or bias - weight, computed in float32."""
    every = np.arange(1 << 16, dtype=np.uint16).view(dt.to_numpy(dtype)).astype(np.float32)
    x, others = np.tile([1.0, -1.0], 1 << 15), RNG.permutation(every)
    for weight in (0 * x, others):
        with np.errstate(all="ignore"):
            args = [put(backend, values, dtype) for values in (x, weight, every)]
            sums = put(backend, (every + (x * weight).astype(np.float32)).astype(np.float32), "float32")
        out, wanted = backend.Array(x.size, dtype), backend.Array(x.size, dtype)
        backend.layer_norm_forward(*args, out, backend.Array(1, "float32"), backend.Array(1, "float32"), 1, x.size, 0.0)
        backend.compact(sums, wanted, x.shape, (1,), 0)
        np.testing.assert_array_equal(get(backend, out).astype(np.float32), get(backend, wanted).astype(np.float32))


@every_float
def test_where_broadcasts(dtype):
    condition = normal(5, 1) > 0
    a, b = normal(5, 7), normal(1, 7)
    check("where", dtype, condition, (1, 0), 0, In(a), (7, 1), 0, In(b), (0, 1), 0, Out(35), (5, 7))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
@pytest.mark.parametrize("one_row", [0, 1, 2])
def test_where_of_one_row_beside_whole_arrays(dtype, one_row):
    shape = (6, 300)
    values = [RNG.integers(0, 2, shape), RNG.integers(0, 200, shape), RNG.integers(0, 200, shape)]
    values[one_row] = values[one_row][:1]
    operands = []
    for x, kind in zip(values, ("bool", dtype, dtype), strict=True):
        operands += [put(backend, x, kind), (300 if len(x) > 1 else 0, 1), 0]
    out = backend.Array(1800, dtype)
    backend.where(*operands, out, shape)
    np.testing.assert_array_equal(get(backend, out).reshape(shape).astype(np.int64), np.where(values[0] != 0, *values[1:]))


# --- reductions and matrix products ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [(2, 70000, 1), (3, 5000, 1), (2, 9000, 3), (2, 1100, 100), (300, 9, 1), (1, 300, 40), (4, 33, 65)]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_reductions(shape, dtype):
    x, n = normal(*shape), shape[0] * shape[2]
    for op in ("sum", "max", "min"):
        check(f"reduce_{op}", dtype, In(x), Out(n), *shape)
    check("reduce_sum", dtype, In(x), Out(n, accumulate=True), *shape)
    check("reduce_sumsq", dtype, In(x), Out(n, accumulate=True), *shape)
    few = RNG.permutation(x.size).reshape(shape) < 8
    check("reduce_prod", dtype, In(np.sign(x) * np.where(few, 2.0, 1.0)), Out(n), *shape)  # exact in every dtype
    check("reduce_prod", dtype, In(np.sign(x) * np.where(few, 2.0, 1.0)), Out(n, accumulate=True), *shape)


@pytest.mark.parametrize("shape", [(1, 70000, 1), (200, 5, 1), (70, 40, 1), (300, 1, 1), (2, 9000, 3), (5, 3, 130)])
@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8", "bool"])
def test_reductions_of_integers(shape, dtype):
    """Into int64 and into what they are of, where sums wrap around and those of bools are `or`."""
    x = RNG.integers(0, 2 if dtype == "bool" else 200, shape).astype(dtype)
    x.reshape(-1)[:3] = 0
    a, n = put(backend, x, dtype), shape[0] * shape[2]
    for op in ("sum", "prod", "max", "min"):
        for kind in {dtype} if op in ("max", "min") else {dtype, "int64"}:
            out = backend.Array(n, kind)
            getattr(backend, f"reduce_{op}")(a, out, *shape)
            expected = getattr(x.astype(np.int64), op)(1).astype(kind).reshape(-1)
            assert get(backend, out).tobytes() == expected.tobytes(), f"{op} into {kind}"  # True is 1


@pytest.mark.parametrize(("op", "dtype", "out"), [("sum", "int32", "float32"), ("max", "bool", "uint8"), ("sum", "float32", "float64"),
                                                  ("sumsq", "int32", "float32"), ("argmax", "float32", "float32")])  # fmt: skip
def test_a_reduction_into_another_dtype_is_refused(op, dtype, out):
    with pytest.raises(ValueError, match=dtype if op != "argmax" else out):
        getattr(backend, f"reduce_{op}")(backend.Array(6, dtype), backend.Array(2, out), 2, 3, 1)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "uint8"])
def test_argmax_takes_the_first_and_nan_wins(dtype):
    for outer, n, inner in ((2, 9000, 3), (6, 9000, 1), (6, 9, 1)):
        x = RNG.integers(0, 5, (outer, n, inner)).astype(np.float64)
        if dtype.startswith("float"):
            x[1, [n // 9, n // 2], inner - 1] = np.nan
        for op in ("argmax", "argmin"):
            a, out = put(backend, x, dtype), backend.Array(6, "int64")
            getattr(backend, f"reduce_{op}")(a, out, outer, n, inner)
            np.testing.assert_array_equal(get(backend, out), getattr(np, op)(x, axis=1).reshape(-1))


@pytest.mark.parametrize("shape", [(1, 70000, 1), (70, 40, 1), (300, 3, 1), (2, 9000, 3)])
@pytest.mark.parametrize("dtype", [*FLOATS, "int32", "int64", "uint8"])
def test_extremes_of_one_sign_and_of_the_ends_of_a_dtype(dtype, shape):
    """What a reduction begins with is no larger than its elements, or no smaller, whatever they are."""
    limits = np.iinfo(dtype) if dtype not in FLOATS else None
    least, most = (limits.min, limits.max) if limits else (-np.inf, np.inf)
    for op, values in (("max", {least, max(least, -7)}), ("min", {most, 7})):
        for value in values:
            a, out = backend.Array(int(np.prod(shape)), dtype), backend.Array(shape[0] * shape[2], dtype)
            backend.fill(a, value)
            getattr(backend, f"reduce_{op}")(a, out, *shape)
            assert (get(backend, out) == value).all(), (op, value)


@pytest.mark.parametrize("shape", [(1, 70000, 1), (6, 9000, 1), (6, 9, 1), (70, 1, 1), (2, 9000, 3), (2, 40, 70), (1, 300, 40)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_is_the_largest_and_the_least(dtype, shape):
    """Wherever it stands in what is reduced: in each block, vector and tail, first, or last."""
    x = RNG.integers(-5, 5, shape).astype(np.float64)
    places = [0, shape[1] - 1, shape[1] // 2, *RNG.integers(0, shape[1], 9)]
    for i, place in enumerate(places):
        one = x.copy()
        one[i % shape[0], place, i % shape[2]] = np.nan
        a, out = put(backend, one, dtype), backend.Array(shape[0] * shape[2], dtype)
        for op in ("max", "min"):
            getattr(backend, f"reduce_{op}")(a, out, *shape)
            np.testing.assert_array_equal(get(backend, out).astype(np.float64), getattr(one, op)(1).reshape(-1))


def test_integer_sums_wrap_in_64_bits():
    x = RNG.integers(-(2**31), 2**31, 5000).astype(np.int32)
    for out_dtype in ("int32", "int64"):
        out = backend.Array(1, out_dtype)
        backend.reduce_sum(put(backend, x, "int32"), out, 1, 5000, 1)
        assert get(backend, out)[0] == x.sum(dtype=np.int64).astype(out_dtype)


@every_float
@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize("trans_b", [False, True])
def test_matmul_tails_offsets_and_broadcast_batches(dtype, trans_a, trans_b):
    for m, k, n in ((1, 1, 1), (5, 17, 3), (16, 21, 37), (2, 90, 5), (33, 40, 70), (72, 24, 64)):
        lda, ldb = (m if trans_a else k) + 3, (k if trans_b else n) + 2
        a, b = normal(3, k if trans_a else m, lda), normal(2, n if trans_b else k, ldb)
        a[..., lda - 3 :] = b[..., ldb - 2 :] = np.nan  # which belongs to no row
        a, b = np.roll(a, 3), np.roll(b, 2)  # by the offsets
        for accumulate in (False, True):
            check("matmul", dtype, In(a), 3, (0, a.shape[1] * lda), lda, trans_a,
                  In(b), 2, (b.shape[1] * ldb, 0), ldb, trans_b,
                  Out((2, 2, m, n), values=normal(2, 2, m, n)), (2, 2), m, k, n, accumulate)  # fmt: skip


@every_float
@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("gap", [0, 2])
def test_matmul_with_a_vector_and_of_few_rows(dtype, trans_a, trans_b, gap):
    for m, k, n in ((1, 3, 1), (1, 700, 1), (7, 130, 1), (301, 300, 1), (1, 90, 9), (8, 70, 25), (16, 530, 518)):
        lda, ldb = (m if trans_a else k) + gap, (k if trans_b else n) + gap
        a, b = normal(k if trans_a else m, lda), normal(n if trans_b else k, ldb)
        for accumulate in (False, True):
            check("matmul", dtype, In(a), 0, (), lda, trans_a, In(b), 0, (), ldb, trans_b,
                  Out((m, n), values=normal(m, n)), (), m, k, n, accumulate)  # fmt: skip


@on_cpu
@every_float
def test_matmul_of_a_batch_that_is_cut(dtype):
    m, k, n = 260, 40, 300
    check("matmul", dtype, In(normal(2, m, k)), 0, (m * k,), k, False, In(normal(2, k, n)), 0, (k * n,), n, False,
          Out((2, m, n)), (2,), m, k, n, False)  # fmt: skip


@on_cpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("m", "k", "n"), [(48, 40, 80), (65, 33, 130), (17, 64, 48), (33, 700, 16)])
def test_products_into_float32_write_their_rows_alone(dtype, m, k, n):
    a, b = (normal(*shape).astype(dt.to_numpy(dtype)) for shape in ((m, k), (k, n)))
    for accumulate in (False, True):
        x, y, out = put(backend, a, dtype), put(backend, b, dtype), put(backend, np.full((m + 32, n), 7.0), "float32")
        backend.matmul(x, 0, (), k, False, y, 0, (), n, False, out, (), m, k, n, accumulate)
        found = get(backend, out).reshape(m + 32, n)
        wanted = a.astype(np.float64) @ b.astype(np.float64) + 7 * accumulate
        np.testing.assert_allclose(found[:m], wanted, rtol=1e-4, atol=1e-3)
        assert (found[m:] == 7).all()


@on_cpu
@every_float
@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize("trans_b", [False, True])
def test_products_see_nothing_of_the_one_before(dtype, trans_a, trans_b):
    """Operands are copied, with zeros around them, to where those of the last product lie: NaN times 0 would be NaN."""
    nan = put(backend, np.full(330 * 330, np.nan), dtype)
    for m, k, n in ((33, 41, 35), (261, 259, 263)):
        for depth in (k + 31, k):
            backend.matmul(nan, 0, (), m if trans_a else depth, trans_a, nan, 0, (), depth if trans_b else n, trans_b,
                           backend.Array(m * n, dtype), (), m, depth, n, False)  # fmt: skip
        lda, ldb = m if trans_a else k, k if trans_b else n
        a, b = (In(normal(k, m) if trans_a else normal(m, k)), In(normal(n, k) if trans_b else normal(k, n)))
        check("matmul", dtype, a, 0, (), lda, trans_a, b, 0, (), ldb, trans_b, Out((m, n)), (), m, k, n, False)


@on_cpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_matmul_of_many_rows_and_columns_and_of_great_depth(dtype):
    """Columns for many rows are packed as wide as there is room for, beside the sums of the depths."""
    m, k, n = 520, 4000, 512
    check("matmul", dtype, In(normal(m, k)), In(normal(k, n)), Out((m, n)), m, k, n)


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8"])
@pytest.mark.parametrize("k", [41, 512])
def test_matmul_of_integers_wraps(dtype, k):
    a = RNG.integers(0, 200, (37, k)).astype(dtype)
    b = RNG.integers(0, 200, (k, 35)).astype(dtype)
    out = backend.Array(37 * 35, dtype)
    backend.matmul(put(backend, a, dtype), put(backend, b, dtype), out, 37, k, 35)
    np.testing.assert_array_equal(get(backend, out), (a @ b).reshape(-1))


@every_float
@pytest.mark.parametrize("ldb", [3, 8])
def test_empty_inner_dimension_gives_zeros(dtype, ldb):
    check("matmul", dtype, In(normal(1)), 0, (), 8, False, In(normal(1)), 0, (), ldb, False, Out((4, 3)), (), 4, 0, 3, False)


# --- convolution ----------------------------------------------------------------------------------------------------------

# An image, windows along its rows and columns (n, size, stride, before, windows), and outputs.
CONVOLUTIONS = {
    "one of each": ((1, 1, 1, 1), (1, 1, 1, 0, 1), (1, 1, 1, 0, 1), 1),
    "odd": ((2, 5, 7, 3), (5, 3, 1, 1, 5), (7, 3, 1, 1, 7), 4),
    "strides": ((3, 9, 8, 8), (9, 3, 2, 1, 5), (8, 2, 3, 0, 3), 16),
    "from inside, from far outside": ((2, 6, 5, 16), (6, 3, 1, -2, 2), (5, 2, 1, 4, 10), 24),
    "larger than the image": ((1, 4, 4, 40), (4, 6, 1, 2, 3), (4, 6, 1, 3, 5), 136),
    "few, of many elements": ((1, 3, 3, 520), (3, 3, 1, 1, 3), (3, 3, 1, 1, 3), 33),
    "many": ((5, 17, 16, 8), (17, 3, 1, 1, 17), (16, 3, 1, 1, 16), 72),
    "many for a small result": ((17, 16, 16, 3), (16, 3, 1, 1, 16), (16, 3, 1, 1, 16), 5),
    "many for more sums than one task adds": ((33, 16, 16, 16), (16, 3, 1, 1, 16), (16, 3, 1, 1, 16), 40),
    "two windows": ((2, 3, 3, 300), (3, 3, 1, 0, 1), (3, 3, 1, 0, 1), 40),
    "many outputs": ((2, 3, 4, 8), (3, 2, 1, 0, 2), (4, 2, 1, 0, 3), 1104),
    "rows of many elements": ((2, 4, 5, 1100), (4, 2, 1, 0, 3), (5, 2, 1, 1, 6), 9),
    "rows as far apart as the sets of a cache": ((1, 5, 14, 1024), (5, 1, 1, 1, 7), (14, 1, 1, 1, 16), 5),
    "lines wider than a patch": ((1, 2, 4000, 9), (2, 2, 1, 1, 3), (4000, 3, 1, 0, 3998), 3),
    "lines of many windows": ((2, 3, 37, 32), (3, 3, 1, 1, 3), (37, 3, 1, 1, 37), 40),
    "lines of one window less than a tile": ((2, 3, 31, 32), (3, 3, 1, 1, 3), (31, 3, 1, 1, 31), 9),
    "lines of half the windows of a tile": ((3, 5, 16, 32), (5, 3, 1, 1, 5), (16, 3, 1, 1, 16), 40),
    "lines of a tile and a half": ((1, 3, 48, 32), (3, 3, 1, 1, 3), (48, 3, 1, 1, 48), 40),
    "lines of some more than half a tile": ((2, 5, 20, 32), (5, 3, 1, 1, 5), (20, 3, 1, 1, 20), 40),
    "lines of most of a tile": ((2, 3, 28, 32), (3, 3, 1, 1, 3), (28, 3, 1, 1, 28), 40),
    "lines of many windows, rows of no whole tiles": ((1, 3, 37, 20), (3, 3, 1, 1, 3), (37, 3, 1, 1, 37), 24),
    "strides over many channels": ((3, 17, 33, 32), (17, 3, 2, 1, 9), (33, 3, 2, 1, 17), 24),
    "many windows, many outputs": ((4, 16, 18, 12), (16, 1, 1, 0, 16), (18, 1, 1, 0, 18), 260),
    "windows far apart": ((1, 1, 3100, 1024), (1, 1, 1, 0, 1), (3100, 1, 3, 0, 1034), 2),
    "windows so far apart that a patch has an odd number": ((1, 1, 768, 1024), (1, 1, 1, 0, 1), (768, 1, 64, 0, 12), 2),
    "images of few windows": ((300, 2, 2, 5), (2, 3, 1, 1, 2), (2, 2, 1, 0, 1), 40),
    "no images": ((0, 4, 4, 8), (4, 3, 1, 1, 4), (4, 3, 1, 1, 4), 8),
    "no channels": ((2, 4, 4, 0), (4, 3, 1, 1, 4), (4, 3, 1, 1, 4), 8),
    "no outputs": ((2, 4, 4, 8), (4, 3, 1, 1, 4), (4, 3, 1, 1, 4), 0),
}
every_convolution = pytest.mark.parametrize(("image", "rows", "cols", "outputs"), CONVOLUTIONS.values(), ids=CONVOLUTIONS)


@every_float
@every_convolution
def test_convolution(dtype, image, rows, cols, outputs):
    check_convolution(dtype, image, rows, cols, outputs)


def check_convolution(dtype, image, rows, cols, outputs):
    images, channels = image[0], image[3]
    windows, elements = images * rows[4] * cols[4], rows[1] * cols[1] * channels
    x, about = In(normal(*image)), (images, channels, rows, cols, outputs)
    check("conv_forward", dtype, x, In(normal(elements, outputs)), Out((windows, outputs)), *about, looser=2)
    dy = In(normal(windows, outputs))
    for values in (None, normal(elements, outputs)):
        dkernel = Out((elements, outputs), True, values)
        check("conv_backward", dtype, x, dy, dkernel, *about, values is not None, looser=10)


@every_float
@pytest.mark.parametrize("case", ["many", "lines of many windows", "strides over many channels"])
def test_convolutions_see_nothing_of_the_one_before(dtype, case):
    """Windows, and what they are multiplied with, are copied to where those of the last product lie: NaN times 0 would be NaN."""
    image, rows, cols, outputs = CONVOLUTIONS[case]
    more = (image[0] + 1, *image[1:])
    windows, elements = more[0] * rows[4] * cols[4], rows[1] * cols[1] * more[3]
    x, kernel, dy = (put(backend, np.full(size, np.nan), dtype) for size in (more, (elements, outputs), (windows, outputs)))
    about, wide = (more[0], more[3], rows, cols, outputs), "float64" if dtype == "float64" else "float32"
    for _ in range(4):  # on each thread of a small pool, likely
        backend.conv_forward(x, kernel, backend.Array(windows * outputs, dtype), *about)
        backend.conv_backward(x, dy, backend.Array(elements * outputs, wide), *about, False)
    check_convolution(dtype, image, rows, cols, outputs)


@every_float
@pytest.mark.parametrize(("channels", "outputs"), [(3, 7), (16, 32)])
def test_a_nan_reaches_its_own_windows_in_convolution(dtype, channels, outputs):
    """Windows are read where they lie in the image, several at a time, and those at its end beside what is not theirs."""
    windows, elements = 3 * 5 * 14, 9 * channels
    x, at = np.ones((3, 5, 14, channels)), (1, 4, 6, 1)
    x[at] = np.nan
    image, about = put(backend, x, dtype), (3, channels, (5, 3, 1, 1, 5), (14, 3, 1, 1, 14), outputs)
    out = backend.Array(windows * outputs, dtype)
    backend.conv_forward(image, put(backend, np.ones((elements, outputs)), dtype), out, *about)
    reached = np.zeros((3, 5, 14, outputs), bool)
    reached[1, 3:, 5:8] = True
    np.testing.assert_array_equal(np.isnan(get(backend, out)).reshape(reached.shape), reached)
    dkernel = backend.Array(elements * outputs, "float64" if dtype == "float64" else "float32")
    backend.conv_backward(image, put(backend, np.ones((windows, outputs)), dtype), dkernel, *about, False)
    reached = np.zeros((3, 3, channels, outputs), bool)
    reached[1:, :, 1] = True  # below the last row there is no window to have it in its first
    np.testing.assert_array_equal(np.isnan(get(backend, dkernel)).reshape(reached.shape), reached)


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8"])
def test_convolution_of_integers_wraps(dtype):
    image, rows, cols, outputs = CONVOLUTIONS["odd"]
    x, kernel = (RNG.integers(0, 200, shape).astype(dtype) for shape in (image, (27, outputs)))
    dy = RNG.integers(0, 200, (70, outputs)).astype(dtype)
    for name, other, size in (("conv_forward", kernel, 70 * outputs), ("conv_backward", dy, 27 * outputs)):
        found = []
        for module in (backend, reference):
            out = module.Array(size, dtype)
            more = (False,) if name == "conv_backward" else ()
            getattr(module, name)(put(module, x, dtype), put(module, other, dtype), out, 2, 3, rows, cols, outputs, *more)
            found.append(get(module, out))
        np.testing.assert_array_equal(*found)


def test_windows_that_are_none_are_refused():
    x, out = put(backend, np.ones(16), "float32"), backend.Array(16, "float32")
    for axis in ((4, 1, 0, 0, 4), (4, 1, 1, 0), (4, -1, 1, 0, 4)):
        with pytest.raises(ValueError, match=r"^\[conv\] windows along an axis are n, size, stride, before, windows"):
            backend.conv_forward(x, x, out, 1, 1, axis, (4, 1, 1, 0, 4), 1)


# --- rows -----------------------------------------------------------------------------------------------------------------


def log_sum_exp(x):
    shift = x.max(1, initial=-np.inf)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.log(np.exp(x - shift[:, None]).sum(1)) + shift


def in_two_parts(x):
    """The log-sum-exp of each row as cross entropy keeps it: the largest element, and the rest."""
    top = x.max(1, initial=-np.inf)
    return np.stack([top, log_sum_exp(x) - top], 1)


SOFTMAX_SHAPES = [
    (1, 1),
    (5, 1),
    (3, 2),
    (5, 31),
    (2, 33),
    (70, 33),
    (300, 64),
    (7, 255),
    (3, 1025),
    (2, 3001),
    (2, 5001),
    (0, 4),
    (4, 0),
]


@every_float
@pytest.mark.parametrize("shape", SOFTMAX_SHAPES)
def test_softmax_family(dtype, shape):
    rows, cols = shape
    x, dy = normal(*shape) * 3, normal(*shape)
    lse = log_sum_exp(x)
    log_y = x - lse[:, None]
    check("softmax_forward", dtype, In(x), Out(shape), rows, cols)
    check("softmax_backward", dtype, In(np.exp(log_y)), In(dy), Out(shape), rows, cols)
    check("log_softmax_forward", dtype, In(x), Out(shape), rows, cols)
    check("log_softmax_backward", dtype, In(log_y), In(dy), Out(shape), rows, cols)
    if cols:
        check("logsumexp_forward", dtype, In(x), Out(rows), rows, cols)
        check("logsumexp_backward", dtype, In(x), In(lse), In(normal(rows)), Out(shape), rows, cols)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("cols", [1, 5, 37, 70])
def test_softmax_of_numbers_far_below_0(dtype, cols):
    """Whose exponentials are all 0 beside 1, which is that of no element."""
    x = -2000 - np.arange(2 * cols, dtype=np.float64).reshape(2, cols) % 7
    check("softmax_forward", dtype, In(x), Out(x.shape), 2, cols)
    check("logsumexp_forward", dtype, In(x), Out(2), 2, cols)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("cols", [37, 2000])
def test_softmax_of_infinities_and_nan(dtype, cols):
    inf, nan, large = np.inf, np.nan, 1e30 if dtype == "float32" else 1e300
    x = np.zeros((7, cols))
    x[0] = -inf
    x[1, 5] = -inf
    x[2, cols - 1] = nan
    x[3, 0] = inf
    x[4] = [nan] + [-inf] * (cols - 1)
    x[5] = large
    x[6, ::2] = -inf
    lse = np.array([-inf, np.log(cols - 1), nan, inf, nan, large, np.log(cols // 2)])
    out = put(backend, np.zeros(7), dtype)
    backend.logsumexp_forward(put(backend, x, dtype), out, 7, cols)
    np.testing.assert_allclose(get(backend, out), lse, rtol=1e-6)
    check("logsumexp_forward", dtype, In(x), Out(7), 7, cols)
    check("logsumexp_backward", dtype, In(x), In(lse), In(np.ones(7)), Out(x.shape), 7, cols)
    check("softmax_forward", dtype, In(x), Out(x.shape), 7, cols)


@every_float
@every_id
@pytest.mark.parametrize("shape", [(1, 1), (5, 17), (70, 33), (9, 50), (3, 2000), (3, 50304), (0, 7)])
def test_cross_entropy(dtype, id_dtype, shape):
    rows, cols = shape
    logits = normal(*shape) * 3
    targets = RNG.integers(0, cols, rows).astype(id_dtype)
    targets[1::3] = IGNORE
    check("cross_entropy_forward", dtype, In(logits), targets, Out(rows, True), Out((rows, 2), True), rows, cols, IGNORE)
    lse, dloss, in_place = acc(in_two_parts(logits)), acc(normal(rows)), Out(shape, values=logits)
    check("cross_entropy_backward", dtype, In(logits), targets, lse, dloss, Out(shape), rows, cols, IGNORE)
    check("cross_entropy_backward", dtype, in_place, targets, lse, dloss, in_place, rows, cols, IGNORE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cross_entropy_of_rows_that_are_sure(dtype):
    """Their losses and gradients are small differences: of large logits, of a probability and 1."""
    x, targets = np.zeros((3, 37)), np.array([5, 36, 0])
    x += [[512.0], [-2048.0], [0.0]]
    x[np.arange(3), targets] += [16, 16, 8]
    lse = in_two_parts(x)
    small = lse[:, 0] - x[np.arange(3), targets] + lse[:, 1]
    inputs, out = [put(backend, x, dtype), put(backend, targets, "int64")], [backend.Array(n, "float32") for n in (3, 6)]
    backend.cross_entropy_forward(*inputs, *out, 3, 37, IGNORE)
    np.testing.assert_allclose(get(backend, out[0]), small, rtol=1e-3)
    gradient = backend.Array(x.size, dtype)
    backend.cross_entropy_backward(*inputs, out[1], put(backend, np.ones(3), "float32"), gradient, 3, 37, IGNORE)
    found = get(backend, gradient).reshape(3, 37).astype(np.float64)[np.arange(3), targets]
    atol = 2 * 2.0**-24 if backend.__device_name__ == "cuda" else 0  # expf of a GPU may be two of float32's steps below 1 off
    np.testing.assert_allclose(found, np.expm1(-small), rtol=1e-2, atol=atol)


@every_float
def test_rows_that_are_ignored_may_have_any_logits(dtype):
    x, targets = np.zeros((4, 19)), np.array([IGNORE, 3, IGNORE, IGNORE])
    x[0, 3], x[2, 18], x[3] = np.nan, np.inf, -np.inf
    inputs, wide = [put(backend, x, dtype), put(backend, targets, "int64")], "float64" if dtype == "float64" else "float32"
    loss, lse, gradient = backend.Array(4, wide), backend.Array(8, wide), backend.Array(x.size, dtype)
    backend.cross_entropy_forward(*inputs, loss, lse, 4, 19, IGNORE)
    np.testing.assert_allclose(get(backend, loss), [0, np.log(19), 0, 0], rtol=1e-5)
    backend.cross_entropy_backward(*inputs, lse, put(backend, np.ones(4), wide), gradient, 4, 19, IGNORE)
    assert not get(backend, gradient).reshape(4, 19).astype(np.float64)[[0, 2, 3]].any()


def test_confident_rows_need_no_subnormals():
    """Logits far apart: probabilities beyond float32's range are 0, the others as exact as ever."""
    x, targets = normal(20, 1000) * 60, RNG.integers(0, 1000, 20)
    p = np.exp(x - log_sum_exp(x)[:, None])
    assert ((p > 0) & (p < 1e-40)).any()
    check("softmax_forward", "float32", In(x), Out(x.shape), 20, 1000)
    check("cross_entropy_backward", "float32", In(x), targets, In(in_two_parts(x)), In(np.full(20, 1e-3)), Out(x.shape), 20, 1000, IGNORE,
          looser=1e-3)  # fmt: skip


@every_float
@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (64, 32), (70, 33), (65, 80), (257, 512), (3, 1100), (0, 5)])
def test_layer_norm(dtype, shape):
    rows, cols = shape
    x, dy, weight, bias = normal(*shape) * 2 + 1, normal(*shape), normal(cols), normal(cols)
    mean, rstd = x.mean(1), 1 / np.sqrt(x.var(1) + 1e-5)
    check("layer_norm_forward", dtype, In(x), In(weight), In(bias), Out(shape), Out(rows, True), Out(rows, True, looser=10),
          rows, cols, 1e-5)  # fmt: skip
    check("layer_norm_backward", dtype, In(dy), In(x), In(weight), acc(mean), acc(rstd), Out(shape), Out(cols),
          Out(cols), acc(np.zeros(64 * 2 * cols)), rows, cols, looser=4)  # fmt: skip


def test_batch_norm_far_from_0():
    """The mean has an error by rounding, which neither the variance nor the result shows; one number alone has the variance 0."""
    rows, cols = 1001, 5
    x = np.float32(normal(rows, cols) * np.float32(0.01) + np.float32(30_000)).astype(np.float64)
    x[:, 0], x[:, 1] = 123_456_789, 1e12 / 3
    x[3, 4] = np.nan
    x = x.astype(np.float32).astype(np.float64)
    weight, bias, found = np.ones(cols), np.zeros(cols), [backend.Array(n, "float32") for n in (x.size, cols, cols)]
    inputs = [put(backend, values, "float32") for values in (x, weight, bias)]
    backend.batch_norm_forward(*inputs, *found, backend.Array(64 * 2 * cols, "float32"), rows, cols, 1e-5)
    y, mean, var = (get(backend, array) for array in found)
    np.testing.assert_allclose(var, x.var(0), rtol=1e-4, atol=1e-9)
    np.testing.assert_allclose(mean, x.mean(0), rtol=1e-7)
    wanted = (x - mean) / np.sqrt(x.var(0) + 1e-5)
    np.testing.assert_allclose(y.reshape(rows, cols), wanted, rtol=1e-4, atol=1e-6)


@every_float
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (3, 17), (64, 32), (70, 33), (65, 80), (257, 512), (1030, 5), (3, 1100), (5, 0)])
def test_batch_norm(dtype, shape):
    rows, cols = shape
    x, dy, weight, bias = normal(*shape) * 2 + 1, normal(*shape), normal(cols), normal(cols)
    mean, var, workspace = x.mean(0), x.var(0), acc(np.zeros(64 * 2 * cols))
    check("batch_norm_forward", dtype, In(x), In(weight), In(bias), Out(shape), Out(cols, True), Out(cols, True, looser=4), workspace,
          rows, cols, 1e-2)  # fmt: skip
    check("batch_norm_backward", dtype, In(dy), In(x), In(weight), acc(mean), acc(var), Out(shape), Out(cols), Out(cols), workspace,
          rows, cols, 1e-2, looser=4)  # fmt: skip


@every_float
@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (64, 100), (5, 1100), (0, 5)])
def test_lstm_cell(dtype, shape):
    rows, hidden = shape
    gates, before, c, dh, dc = normal(rows, 4 * hidden), normal(*shape), normal(*shape), normal(*shape), normal(*shape)
    gates[:, :2] = -200, 200
    check("lstm_cell_forward", dtype, Out(gates.shape, values=gates), acc(before), Out(shape, True), Out(shape), rows, hidden)
    check("lstm_cell_backward", dtype, Out(gates.shape, values=np.tanh(gates)), acc(before), acc(c), In(dh), In(dh * 2),
          Out(shape, True, dc), rows, hidden, looser=4)  # fmt: skip


@every_float
@pytest.mark.parametrize(("T", "D", "rot"), [(1, 8, 8), (33, 64, 16), (5, 10, 6), (7, 10, 4), (5, 6, 0)])
def test_rotary_of_views_and_in_place(dtype, T, D, rot):
    B, H = 2, 3
    packed = normal(B, T, H, 3, D)  # k of a packed projection: (B, H, T, D) seen through strides, at an offset
    strides = (T * H * 3 * D, 3 * D, H * 3 * D, 1)
    angle = np.arange(T + 2)[:, None] / 10.0 ** np.arange(rot // 2)
    tables = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    for inverse in (False, True):
        sizes = B, H, T, D, rot, inverse
        check("rotary", dtype, In(packed), strides, D, *tables, Out((B, H, T, D)), (H * T * D, T * D, D, 1), *sizes)
        in_place = Out(packed.shape, values=packed)
        check("rotary", dtype, in_place, strides, 0, *tables, in_place, strides, *sizes)
        for broadcast in ((H * T, T, 1, 0), (D, 0, 0, 1), (0, 0, 0, 0)):
            check("rotary", dtype, In(packed), broadcast, 0, *tables, Out((B, H, T, D)), (H * T * D, T * D, D, 1), *sizes)


# --- ids ------------------------------------------------------------------------------------------------------------------


@every_float
@every_id
@pytest.mark.parametrize(
    ("n", "vocab", "dim"), [(1, 1, 1), (40, 11, 17), (300, 40, 24), (300, 40, 5), (500, 300, 64), (0, 9, 5), (1000, 3, 40)]
)
def test_embedding(dtype, id_dtype, n, vocab, dim):
    ids = RNG.integers(0, vocab, n).astype(id_dtype)
    ids[::3] = 7 % vocab
    check("embedding_forward", dtype, In(normal(vocab, dim)), ids, Out((n, dim)), n, vocab, dim, looser=0)
    for accumulate in (False, True):
        gradient = Out((vocab, dim), values=normal(vocab, dim) if accumulate else None)
        check("embedding_backward", dtype, In(normal(n, dim)), ids, gradient, np.zeros(n + vocab + 1, np.int32),
              n, vocab, dim, accumulate, looser=2)  # fmt: skip


@pytest.mark.parametrize("dtype", dt.ROWS)
@every_id
@pytest.mark.parametrize(("n", "vocab", "dim"), [(1, 1, 1), (40, 41, 17), (1200, 1300, 32), (300, 300, 5), (0, 9, 5), (9, 9, 0)])
def test_embedding_put(dtype, id_dtype, n, vocab, dim):
    ids = np.where(np.arange(n) % 5 == 1, -1, RNG.permutation(vocab)[:n])
    rows, weight = (RNG.integers(0, 2, (count, dim)) for count in (n, vocab))
    array = put(backend, weight, dtype)
    backend.embedding_put(put(backend, rows, dtype), put(backend, ids, id_dtype), array, n, vocab, dim)
    weight[ids[ids >= 0]] = rows[ids >= 0]
    np.testing.assert_array_equal(get(backend, array).astype(int).reshape(vocab, dim), weight)


@pytest.mark.parametrize("order", ["forward", "reverse", "random:1"])
def test_embedding_gradient_adds_in_ascending_order(monkeypatch, order):
    """Beyond kShortRange positions CUDA finds the order another way, and of a vocabulary beyond 2048 its warps count more than two
    lines each; all must add as a plain loop does.
    """
    monkeypatch.setenv("NEEDLE_SIM_ORDER", order)
    n, vocab = 3000, 5000
    ids = np.where(np.arange(n) % 2, 3, RNG.integers(0, vocab, n)).astype(np.int32)
    dy = (normal(n, 1) * 10.0 ** RNG.integers(-3, 4, (n, 1))).astype(np.float32)
    wanted = np.zeros((vocab, 1), np.float32)
    for i in range(n):
        wanted[ids[i]] += dy[i]
    out = backend.Array(vocab, "float32")
    backend.embedding_backward(
        put(backend, dy, "float32"), put(backend, ids, "int32"), out, backend.Array(n + vocab + 1, "int32"), n, vocab, 1, False
    )
    assert get(backend, out).tobytes() == wanted.tobytes()


@every_id
def test_one_hot_of_every_dtype(id_dtype):
    for n, depth in ((11, 9), (1, 1), (0, 9), (1000, 3), (500, 300)):
        ids = RNG.integers(0, depth, n)
        for dtype in dt.ROWS:
            out = put(backend, np.ones(n * depth), dtype)
            backend.one_hot(put(backend, ids, id_dtype), out, n, depth)
            np.testing.assert_array_equal(get(backend, out).reshape(n, depth), np.eye(depth)[ids].astype(dt.to_numpy(dtype)))


@on_cpu
def test_bad_ids_are_named_before_anything_is_written():
    weight, out = put(backend, np.ones((50, 4)), "float32"), put(backend, np.full((4, 4), 7), "float32")
    with pytest.raises(IndexError, match=r"\[embedding\] id 51 at position 3 is outside the vocabulary \(0..49\)"):
        backend.embedding_forward(weight, put(backend, [1, 2, 49, 51], "int64"), out, 4, 50, 4)
    assert (get(backend, out) == 7).all()
    with pytest.raises(IndexError, match=r"\[embedding\] id -1 at position 0"):
        backend.embedding_backward(out, put(backend, [-1], "int32"), weight, put(backend, np.zeros(52), "int32"), 1, 50, 4, False)
    for ids, wrong in (([0, -2, 1], "-2 at position 1"), ([0, -1, 50], "50 at position 2")):
        with pytest.raises(IndexError, match=rf"\[embedding\] id {wrong}"):
            backend.embedding_put(out, put(backend, ids, "int32"), weight, 3, 50, 4)
    assert (get(backend, weight) == 1).all()
    with pytest.raises(IndexError, match=r"\[one_hot\] id 5 at position 0 is outside the depth \(0..4\)"):
        backend.one_hot(put(backend, [5], "int32"), out, 1, 5)
    with pytest.raises(IndexError, match=r"\[cross_entropy\] target 9 at position 1 is outside the classes \(0..3\)"):
        loss, lse = put(backend, np.zeros(2), "float32"), put(backend, np.zeros(4), "float32")
        backend.cross_entropy_forward(
            put(backend, np.zeros((2, 4)), "float32"), put(backend, [IGNORE, 9], "int32"), loss, lse, 2, 4, IGNORE
        )
    with pytest.raises(ValueError, match=r"\[embedding\] ids have a bad dtype: float32"):
        backend.embedding_forward(weight, put(backend, np.zeros(1), "float32"), out, 1, 50, 4)


# --- optimizer and random numbers -----------------------------------------------------------------------------------------


every_update = pytest.mark.parametrize(
    ("dtype", "grad_dtype"),
    [*((dtype, dtype) for dtype in FLOATS), ("float32", "bfloat16"), ("float16", "float32"), ("bfloat16", "float32")],
)


@every_update
@pytest.mark.parametrize("n", [0, 1, 37, 301, 100_001])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_sgd_step(dtype, grad_dtype, n, decay):
    for momentum, states in ((0.9, n), (0.0, 0)):
        check("sgd_step", dtype, Out(n, values=normal(n)), In(normal(n), dtype=grad_dtype), Out(states, True, normal(states)),
              1e-2, momentum, decay)  # fmt: skip


@every_update
@pytest.mark.parametrize("n", [0, 1, 37, 301, 100_001])
@pytest.mark.parametrize("l2, decay", [(0.0, 0.1), (0.1, 0.0)])
def test_adam_step(dtype, grad_dtype, n, l2, decay):
    check("adam_step", dtype, Out(n, values=normal(n)), In(normal(n), dtype=grad_dtype), Out(n, True, normal(n)),
          Out(n, True, normal(n) ** 2), np.array([0.5], np.float32), 1e-2, 0.9, 0.95, 1e-8, l2, decay, 3)  # fmt: skip


@every_float
def test_a_decay_of_0_does_not_meet_what_is_infinite(dtype):
    w, one = [np.inf, -np.inf, 1], In(np.ones(3))
    for momentum, states in ((0.9, 3), (0.0, 0)):
        check("sgd_step", dtype, Out(3, values=w), one, Out(states, True, np.zeros(states)), 1e-2, momentum, 0.0)
    check("adam_step", dtype, Out(3, values=w), one, Out(3, True, np.zeros(3)), Out(3, True, np.zeros(3)), np.ones(1, np.float32),
          1e-2, 0.9, 0.95, 1e-8, 0.0, 0.0, 1)  # fmt: skip


def test_the_first_step_of_adam_is_the_learning_rate():
    """To the last digits: 1 - beta2 is not what float32 leaves of it."""
    w, m, v = (put(backend, np.zeros(5), "float32") for _ in range(3))
    one = put(backend, np.ones(1), "float32")
    backend.adam_step(w, put(backend, np.ones(5), "float32"), m, v, one, 1e-2, 0.9, 0.9999, 1e-8, 0.0, 0.0, 1)
    np.testing.assert_allclose(get(backend, w), -0.01, rtol=1e-6)
    np.testing.assert_allclose(get(backend, v), 1e-4, rtol=1e-6)


@every_float
@pytest.mark.parametrize("n", [0, 1, 37, 301, 70_001, 100_001])
def test_unscale(dtype, n):
    for place, bad in ((None, 0), (0, np.inf), (-1, -np.inf), (n // 2, np.nan)):
        values = normal(n)
        if place is not None and n:
            values[place] = bad
        check("unscale", dtype, Out(n, values=values), 0.125, Out(1, values=[0], dtype="int32"))
        scaled, kind = put(backend, values, dtype), dt.to_numpy(dtype)
        backend.unscale(scaled, 0.125, put(backend, [0], "int32"))
        wanted = (values.astype(kind).astype(np.float64) * 0.125).astype(kind)
        np.testing.assert_array_equal(get(backend, scaled).astype(np.float64), wanted.astype(np.float64))
    check("unscale", dtype, In(normal(n)), 0.125, Out(1, values=[1], dtype="int32"))  # what was found before stays
    if n and dtype == "float16":  # what only scaling makes infinite
        found = put(backend, [0], "int32")
        backend.unscale(put(backend, np.where(np.arange(n) == n // 2, 6e4, 1), dtype), 4.0, found)
        assert get(backend, found)[0] == 1


@every_float
@pytest.mark.parametrize("size", [1, 6, 4097, 40_001])
def test_dropout(dtype, size):
    for p in (0.0, 0.3, 1.0):
        for seed, offset in ((11, 4), (2**40 + 17, 2**33 + 5)):
            check("dropout", dtype, In(normal(size)), Out(size), p, seed, offset)


@every_float
def test_dropout_keeps_what_draws_the_probability_itself(dtype):
    numbers = (reference.philox(10, 3, 0).reshape(-1)[:37] >> np.uint32(8)) / 2**24
    for p in map(float, np.sort(numbers)[[1, 17, 30]]):
        check("dropout", dtype, In(np.arange(1, 38)), Out(37), p, 3, 0)
    check("dropout", dtype, In(np.full(37, np.nan)), Out(37), 0.5, 3, 0)  # what is dropped is 0 whatever it was
    check("dropout", dtype, In(np.full(37, -np.inf)), Out(37), 0.5, 3, 0)


# --- attention and block-sparse products ----------------------------------------------------------------------------------


def layouts(rows, cols, block, q_start):
    """Block masks by name; all causal but the last two."""
    first_query, first_key = q_start + np.arange(rows)[:, None] * block, np.arange(cols)[None] * block
    causal = (first_key <= first_query + block - 1)[None]
    yield "dense", causal
    yield "local", causal & (first_key + block > first_query - block)[None]
    yield "last", causal & (first_key > first_query - 1)[None]  # whose first queries see no key where q_start is inside a block
    yield "random heads", causal & random_masks(3, rows, cols, 0.5)
    yield "nothing", np.zeros((1, rows, cols), bool)
    yield "all", np.ones((1, rows, cols), bool)


@every_float
@pytest.mark.parametrize(
    ("B", "H", "T", "S", "D", "block", "q_start"),
    [(1, 1, 1, 1, 8, 16, 0), (1, 8, 63, 63, 16, 64, 0), (2, 6, 65, 65, 16, 16, 0), (1, 3, 130, 130, 80, 64, 0), (1, 2, 130, 130, 12, 32, 0),
     (2, 3, 200, 200, 64, 128, 0), (1, 4, 5, 133, 64, 64, 128), (1, 6, 70, 257, 24, 32, 187), (1, 6, 100, 200, 24, 64, 40), (1, 2, 70, 90, 13, 32, 20),
     (1, 2, 1, 300, 256, 64, 299), (1, 1, 70, 70, 100, 64, 0), (1, 1, 40, 40, 200, 32, 0), (1, 3, 0, 5, 8, 16, 0), (0, 3, 5, 5, 8, 16, 0),
     (1, 2, 5, 0, 8, 16, 0), (1, 2, 5, 20, 0, 16, 0), (1, 1, 400, 400, 8, 130, 0)],
)  # fmt: skip
def test_attention(dtype, B, H, T, S, D, block, q_start):
    item, widest = (8 if dtype == "float64" else 4), 64 << (D > 64) << (D > 128)
    needed = item * (64 * (widest + 16 // item) + 32 * (16 + 16 // item) + 32)  # of the gradients' tiles, 16 x 16
    cuda = backend.__device_name__.startswith("cuda")
    if cuda and needed > backend.device_properties()["shared_bytes_per_block_optin"]:
        with pytest.raises(ValueError, match=r"a block needs .* bytes of shared memory"):
            check_random_attention(dtype, B, H, T, S, D, block, 1, q_start)
        return
    for name, masks in layouts(-(-T // block), -(-S // block), block, q_start):
        check_attention(dtype, B, H, T, S, D, block, q_start, masks, causal=name not in ("nothing", "all"))


@every_float
def test_attention_of_layout_heads(dtype):
    check_random_attention(dtype, 2, 4, 50, 50, 16, 16, 2, 0)
    check_random_attention(dtype, 1, 1, 37, 80, 24, 32, 1, 43)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("D", [32, 31])
def test_attention_reads_strided_views_and_never_the_future(dtype, D):
    B, H, T, block = 1, 2, 100, 32
    qkv = normal(B, T, H, 3, D).astype(dt.to_numpy(dtype))
    nb = -(-T // block)
    rows, _ = index_of(np.tri(nb, dtype=bool)[None], np.eye(nb, dtype=bool))
    strides, out_strides = (T * H * 3 * D, 3 * D, H * 3 * D), (H * T * D, T * D, D)

    def run(values):
        whole = put(backend, values, dtype)
        views = [part for i in range(3) for part in (whole.view(i * D, values.size - i * D), strides)]
        out, lse = put(backend, np.full(H * T * D, np.nan), dtype), put(backend, np.full(H * T, np.nan), "float32")
        index = [put(backend, array, array.dtype.name) for array in rows[:3]]
        backend.attention_forward(*views, out, out_strides, lse, *index, B, H, T, T, D, 1, block, 0, 0.2)
        return get(backend, out).reshape(B, H, T, D)

    x = qkv.astype(np.float64)
    s = np.einsum("bthd,bshd->bhts", x[..., 0, :], x[..., 1, :]) * 0.2
    p = np.exp(np.where(np.tri(T, dtype=bool), s, -np.inf))
    first = run(qkv)
    wanted = np.einsum("bhts,bshd->bhtd", p / p.sum(-1, keepdims=True), x[..., 2, :])
    np.testing.assert_allclose(first.astype(np.float64), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for t in (0, 31, 50, 98):
        changed = qkv.copy()
        changed[:, t + 1 :] = (normal(*changed[:, t + 1 :].shape) * 10).astype(changed.dtype)
        assert run(changed)[:, :, : t + 1].tobytes() == first[:, :, : t + 1].tobytes()


@every_float
@pytest.mark.parametrize("step", [8, 3])
def test_each_operand_of_attention_has_strides_of_its_own(dtype, step):
    """Rows of all arrays but lse and delta lie apart, by other gaps in each."""
    B, H, T, S, D, block, q_start = 2, 3, 40, 50, 16, 16, 10
    first_query, last_key = q_start + np.arange(3) * block, np.arange(4) * block + block - 1
    rows, columns = index_of(np.ones((1, 3, 4), bool), last_key > first_query[:, None])
    gaps = itertools.count(step, step)

    def apart(n, like=None):
        """An array of n positions with its strides; of NaN between the rows, and in them where nothing is given."""
        row = D + next(gaps)
        values = np.full((B, n, H, row), np.nan)
        values[..., :D] = np.nan if like is None else like
        return (Out(values.shape) if like is None else In(values)), (n * H * row, row, H * row)

    q, k, v, dout = (normal(B, n, H, D) for n in (T, S, S, T))
    inputs = *apart(T, q), *apart(S, k), *apart(S, v)
    sizes = B, H, T, S, D, 1, block, q_start, 0.25
    forward = *inputs, *apart(T), Out((B, H, T), True), *rows[:3], *sizes
    check("attention_forward", dtype, *forward)
    out, lse = call(reference, "attention_forward", dtype, forward)
    out = out.reshape(B, T, H, -1)[..., :D]
    check("attention_backward", dtype, *apart(T, dout), *inputs, *apart(T, out), acc(lse.reshape(B, H, T)), Out((B, H, T), True),
          *apart(T), *apart(S), *apart(S), *rows[:3], *columns[:3], *sizes, looser=4)  # fmt: skip


@on_cpu
@every_float
@pytest.mark.parametrize("D", [64, 13])
def test_attention_sees_nothing_of_the_call_before(dtype, D):
    T, block, strides = 130, 64, (130 * 64, 130 * 64, 64)
    rows, _ = index_of(np.tri(3, dtype=bool)[None], np.eye(3, dtype=bool))
    index = [put(backend, array, array.dtype.name) for array in rows[:3]]
    nan = put(backend, np.full(T * 64, np.nan), dtype)
    lse = backend.Array(T, "float64" if dtype == "float64" else "float32")
    for _ in range(4):  # on each thread of a small pool, likely
        backend.attention_forward(nan, strides, nan, strides, nan, strides, backend.Array(T * 64, dtype), strides, lse, *index,
                                  1, 1, T, T, 64, 1, block, 0, 0.2)  # fmt: skip
    check_random_attention(dtype, 1, 2, 70, 75, D, 16, 1, 5)


@on_cpu
def test_attention_refuses_a_large_head():
    """From where on Python refuses it, too."""
    a, i, flag = (put(backend, np.zeros(4), dtype) for dtype in ("float32", "int32", "uint8"))
    D = MAX_HEAD + 1
    with pytest.raises(ValueError, match=rf"\[attention\] head size is too large: {D} \(at most {MAX_HEAD}\)"):
        backend.attention_forward(a, [0] * 3, a, [0] * 3, a, [0] * 3, a, [0] * 3, a, i, i, flag, 1, 1, 1, 1, D, 1, 64, 0, 1.0)


@every_float
@pytest.mark.parametrize(
    ("block", "heads", "batch", "n_rows", "n_cols", "other"),
    [(16, 1, 1, 3, 2, 7), (16, 2, 4, 3, 2, 21), (16, 3, 3, 4, 6, 0), (32, 2, 4, 5, 4, 150), (32, 2, 4, 3, 2, 21), (64, 1, 2, 2, 3, 65),
     (64, 1, 1, 3, 2, 21), (128, 1, 1, 3, 1, 200), (128, 1, 1, 2, 2, 21)],
)  # fmt: skip
def test_blocksparse_products(dtype, block, heads, batch, n_rows, n_cols, other):
    check_blocksparse(dtype, block, heads, batch, n_rows, n_cols, other)


@on_cpu
@every_float
def test_blocksparse_products_see_nothing_of_the_one_before(dtype):
    nan, out, block = put(backend, np.full(128 * 128, np.nan), dtype), backend.Array(128 * 128, dtype), 128
    (ptr, idx, _, _), _ = index_of(np.ones((1, 1, 1), bool))
    for _ in range(4):  # on each thread of a small pool, likely
        backend.blocksparse_sdd(nan, True, nan, False, out, put(backend, ptr, "int32"), put(backend, idx, "int32"),
                                1, block, block, block, 1, 1, block)  # fmt: skip
    check_blocksparse(dtype, 16, 1, 1, 3, 2, 21)


# --- the device -----------------------------------------------------------------------------------------------------------


def test_memory_is_counted_limited_and_given_back():
    before = backend.memory_stats()
    array = backend.Array(1 << 20, "float32")
    assert backend.memory_stats()["live"] == before["live"] + (4 << 20)
    backend.set_limit(before["live"] + (5 << 20))
    try:
        with pytest.raises(MemoryError):
            backend.Array(1 << 20, "float32")
    finally:
        backend.set_limit(0)
    del array
    backend.empty_cache()
    after = backend.memory_stats()
    assert after["live"] == before["live"] and after["reserved"] <= before["reserved"] + (4 << 20)


def test_large_and_small_transfers():
    for size in (1, 1000, (1 << 18) + 5):
        x = normal(size).astype(np.float32)
        array = put(backend, x, "float32")
        x_copy = x.copy()
        x[:] = 0  # the device has its own copy, whenever the transfer happens
        np.testing.assert_array_equal(get(backend, array), x_copy)


def test_a_dtype_without_kernel_is_named():
    with pytest.raises(ValueError, match=r"\[exp\] .* int32"):
        backend.ewise_exp(backend.Array(3, "int32"), backend.Array(3, "int32"))
