"""Tensors indexed by arrays and masks: read and written as numpy does it, with gradients."""

import tracemalloc

import numpy as np
import pytest

import needle as ndl
from making import leaf
from needle import memory, nn, ops
from needle.errors import ShapeError

DATA = np.arange(1.0, 37).reshape(3, 3, 4)
MASK = DATA % 3 == 0
INDICES = {
    "rows": [2, 0, -1, 2],
    "range": range(2),
    "no rows": [],
    "rows in two axes": np.array([[0, 1], [1, 1]]),
    "one row": (np.array(1), [0, 2]),
    "places": ([0, 1, 1], [2, 2, 0]),
    "places with an int": (np.array([[0], [1]]), [1, 2, 0, 0], -1),
    "last axis": (..., [3, 0, 0]),
    "middle axis": (slice(None), [1, 1, 0]),
    "a slice between": ([1, 0], slice(None), [3, 1]),
    "a slice between int and array": (1, slice(2), np.array([0, 3])),
    "an empty ellipsis between": (1, ..., slice(None), [0, 3]),
    "mask of the last axis": (..., np.array([True, False, True, True])),
    "mask of the last axes": (slice(None), MASK[0]),
    "places of the last axis": (..., [3, 0, -4, 1, 2]),
    "places of the last axis behind a slice": (slice(1, None), slice(None), [3, 0, -4, 1]),
    "table of the last axis": (..., [[0, 3, 3, 1], [2, 2, 1, 0]]),
    "slices around": (slice(1, None), [[0, 1], [2, 2]], slice(None, None, -2)),
    "new axes": (None, [1, 0], None, slice(1, None)),
    "whole axes behind": (..., [0, 1], slice(None), slice(None)),
    "mask": MASK,
    "mask of rows": (np.array([False, True, True]),),
    "list of bools": [False, True, True],
    "mask of two axes": (MASK[..., 0], slice(1, 3)),
    "mask and array": (slice(None), np.array([True, False, True]), [1, 2]),
    "mask of nothing": np.zeros((3, 3), bool),
}
every_index = pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)


def written(x, index, value):
    x = x.copy()
    x[index] = value
    return x


def numbers(shape):
    """Others than in DATA."""
    return np.arange(100.0, 100 + np.prod(shape, dtype=int)).reshape(shape)


@every_index
def test_reading(device, index):
    x = leaf(DATA, device, "float64")
    weights = np.random.default_rng(0).standard_normal(DATA[index].shape)
    y = x[index]
    np.testing.assert_array_equal(y.numpy(), DATA[index])
    (y * leaf(weights, device, "float64")).sum().backward()
    wanted = np.zeros(DATA.shape)
    np.add.at(wanted, index, weights)
    np.testing.assert_allclose(x.grad.numpy(), wanted, rtol=1e-14)


@every_index
def test_reading_what_does_not_lie_in_order(device, index):
    """A view, as ops give it, and one whose elements are the same in memory."""
    turned = leaf(DATA.T, device)
    np.testing.assert_array_equal(ops.permute(turned, (2, 1, 0))[index].numpy(), DATA[index])
    np.testing.assert_array_equal(
        ops.broadcast_to(leaf(DATA[:1], device), DATA.shape)[index].numpy(), np.broadcast_to(DATA[:1], DATA.shape)[index]
    )


@every_index
def test_writing(device, index):
    shape = DATA[index].shape
    for value in (7.0, numbers(shape), np.full((1, *shape[1:]), 5.0)):
        wanted = written(DATA, index, value)
        plain, recorded = leaf(DATA, device, requires_grad=False), leaf(DATA, device) * 1
        array = plain.cached_data
        given = value if isinstance(value, float) else leaf(value, device, requires_grad=False)
        np.testing.assert_array_equal(ops.setitem(plain, index, given).numpy(), wanted)
        turned = ops.permute(leaf(DATA.T, device, requires_grad=False), (2, 1, 0))
        plain[index] = recorded[index] = turned[index] = given
        np.testing.assert_array_equal([plain.numpy(), recorded.numpy(), turned.numpy()], [wanted] * 3)
        assert plain.cached_data is array


@pytest.mark.parametrize("index", ["rows", "places of the last axis"])
def test_values_may_have_axes_of_length_1_in_front(device, index):
    x, index = leaf(DATA, device, requires_grad=False), INDICES[index]
    value = numbers((1, 1, *DATA[index].shape))
    x[index] = leaf(value, device, requires_grad=False)
    np.testing.assert_array_equal(x.numpy(), written(DATA, index, value))


@every_index
def test_gradients_of_writing(device, index):
    """Of several values for one element the last stays, and alone has a gradient."""
    shape = DATA[index].shape
    x, value = leaf(DATA, device), leaf(numbers(shape), device)
    weights = np.arange(1.0, 1 + DATA.size).reshape(DATA.shape)
    y = ops.setitem(x, index, value)
    (y * leaf(weights, device, requires_grad=False)).sum().backward()
    stays = y.numpy() == DATA
    np.testing.assert_array_equal(x.grad.numpy(), np.where(stays, weights, 0))
    wanted = np.where(value.numpy() == y.numpy()[index], weights[index], 0)
    np.testing.assert_array_equal(value.grad.numpy(), wanted)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int32", "int64", "uint8", "bool"])
def test_every_dtype(device, dtype):
    values = MASK if dtype == "bool" else DATA
    x = leaf(values, device, dtype, requires_grad=False)
    for index in (([2, 0], [1, 1]), MASK, [1]):
        np.testing.assert_array_equal(x[index].numpy().astype(np.float64), values[index].astype(np.float64))
        y = ops.setitem(x, index, 1.0)
        assert y.dtype == dtype
        np.testing.assert_array_equal(y.numpy().astype(np.float64), written(values, index, 1).astype(np.float64))


def test_few_of_many(device):
    """The right class of each sample takes time and memory for the samples, not for all classes, but for the gradient itself."""
    rows, classes = np.array([3, 0, -1, 3, 3]), np.array([49_999, 0, -2, 49_999, 1])
    x, weights = leaf(np.arange(4 * 50_000).reshape(4, 50_000), device), [1.0, 2.0, 4.0, 8.0, 16.0]
    tracemalloc.start()
    y = x[rows, classes]
    _, most_on_host = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    np.testing.assert_array_equal(y.numpy(), x.numpy()[rows, classes])
    loss = (y * leaf(weights, device)).sum()
    with memory.peak(device) as peak:
        loss.backward()
    wanted = np.zeros(x.shape)
    np.add.at(wanted, (rows, classes), weights)
    np.testing.assert_array_equal(x.grad.numpy(), wanted)
    assert most_on_host < 32 * 1024 and peak.above_start < x.grad.numpy().nbytes + 32 * 1024


def test_gradients_of_whole_numbers(device):
    x = leaf(DATA, device, "int64")
    x[[1, 0, 1]].sum().backward()
    np.testing.assert_array_equal(x.grad.numpy()[:, 0, 0], [1, 2, 0])


def test_the_last_of_several_values_stays(device):
    x = leaf([0.0, 0.0], device, requires_grad=False)
    x[[0, 0, 1, 0]] = np.array([1.0, 2.0, 3.0, 4.0])
    np.testing.assert_array_equal(x.numpy(), [4, 3])


def test_tensors_as_indices(device):
    """Tensors of numbers are floats unless told otherwise; one of one number is that number."""
    x = leaf(DATA, device)
    for rows in (ndl.Tensor([2, 0], device=device), leaf([2, 0], device, "int32"), leaf([2, 0], ndl.cpu())):
        np.testing.assert_array_equal(x[rows].numpy(), DATA[[2, 0]])
        np.testing.assert_array_equal(x[rows.realize_cached_data(), :, rows].numpy(), DATA[[2, 0], :, [2, 0]])
    np.testing.assert_array_equal(x[leaf(MASK, device, "bool")].numpy(), DATA[MASK])
    np.testing.assert_array_equal(x[leaf(1, device, "int64"), 0].numpy(), DATA[1, 0])


def test_writing_what_is_part_of_itself(device):
    x = leaf(DATA, device, requires_grad=False)
    x[[1, 2, 0]] = x
    np.testing.assert_array_equal(x.numpy(), DATA[[2, 0, 1]])
    x[[0, 1]] = x[1:]
    np.testing.assert_array_equal(x.numpy(), DATA[[0, 1, 1]])


def test_an_index_that_changes_after_it_was_used(device):
    x, rows, mask = leaf(DATA, device), np.array([1, 1]), np.array([False, False, True])
    y = x[rows]
    z = ops.setitem(x, rows, y * 2)
    last = x[mask]
    rows[:], mask[:] = 0, [True, False, False]
    (y.sum() + z.sum() * 10 + last.sum() * 100).backward()
    np.testing.assert_array_equal(x.grad.numpy()[:, 0, 0], [10, 2 + 20, 10 + 100])


def test_a_parameter_is_written_in_place(device):
    p = nn.Parameter(leaf(DATA, device))
    array = p.cached_data
    with ndl.no_grad():
        p[MASK] = 0.0
        p[[0, 1]] = p[[1, 0]]
    assert p.cached_data is array
    wanted = np.where(MASK, 0, DATA)
    np.testing.assert_array_equal(p.numpy(), wanted[[1, 0, 2]])


@pytest.mark.parametrize(
    "index, message",
    [
        ([0, 3], "index 3 is out of bounds for axis 0 with size 3"),
        ([-3, 3], "index 3 is out of bounds for axis 0 with size 3"),
        (([0], [-4]), "index -4 is out of bounds for axis 1 with size 3"),
        (([0, 1], [0, 1, 2]), "could not be broadcast together with shapes (2,) (3,)"),
        (([0], 0, 0, 0), "too many indices for shape (3, 3, 4)"),
        ((MASK, 0), "too many indices for shape (3, 3, 4)"),
        ((slice(None), [0, 4]), "index 4 is out of bounds for axis 1 with size 3"),
        ((..., [0, -5, 1, 2]), "index -5 is out of bounds for axis 2 with size 4"),
        ((slice(None), ..., [0, 1, 2], ...), "an index has more than one ..."),
        ((slice(None), slice(None), slice(None), [0, 0, 0, 0]), "too many indices for shape (3, 3, 4)"),
        ((..., np.ones(3, bool)), "boolean index did not match indexed array along axis 2: (3,) for (4,)"),
        (([0], ..., ...), "an index has more than one ..."),
        (np.array([True, False]), "boolean index did not match indexed array along axis 0"),
        (np.ones((3, 2), bool), "boolean index did not match indexed array along axis 1: (3, 2) for (3, 3)"),
        ([0.5], "an index is an array of float64 (accepted: whole numbers or bool)"),
        (np.array([1.0]), "an index is an array of float64 (accepted: whole numbers or bool)"),
        (ndl.Tensor([1.0, 1.5]), "1.5 in an index is no whole number"),
        (ndl.Tensor([1.0, np.nan]), "nan in an index is no whole number"),
        (ndl.Tensor([np.inf]), "inf in an index is no whole number of 64 bits"),
        (ndl.Tensor(True, dtype="bool"), "an index is an array of bool (accepted: whole numbers or bool)"),
        (ndl.Tensor([True, False]), "an index is float32 made of bools (accepted: whole numbers, or dtype='bool' for a mask)"),
        (["rows"], "an index is an array of <U4 (accepted: whole numbers or bool)"),
        ([[0], [1, 2]], "an index is a list of lists of different lengths (accepted: an array)"),
        ("rows", "unsupported index of type str (accepted: int, slice, None, ..., arrays of whole numbers, masks)"),
        (1.0, "unsupported index of type float"),
        ({0, 1}, "unsupported index of type set"),
        (True, "unsupported index of type bool"),
        (([0], True), "unsupported index of type bool"),
        (([0], np.bool_(True)), "unsupported index of type numpy.bool"),
    ],
)
def test_what_is_no_index(host, index, message):
    x = leaf(DATA, host)
    for use in (lambda: x[index], lambda: ops.setitem(x, index, 0.0), lambda: x.detach().__setitem__(index, 0.0)):
        with pytest.raises(IndexError) as caught:
            use()
        assert str(caught.value).startswith("[getitem] ") and message in str(caught.value)
    np.testing.assert_array_equal(x.numpy(), DATA)


def test_values_that_do_not_fit(host):
    x = leaf(DATA, host, requires_grad=False)
    for index, shape in (([0, 1], (3, 4, 1)), (MASK, (11,)), ([0, 1], (2, 2, 3, 4)), (MASK, (0,)), ([], (2, 3, 4))):
        with pytest.raises(ShapeError, match=r"\[setitem\] value is .*, a\[index\] is .* \(accepted: what broadcasts to it\)"):
            x[index] = leaf(np.ones(shape), host, requires_grad=False)
    for dtype, value in (("uint8", -1), ("int32", float("nan"))):
        with pytest.raises(OverflowError, match=rf"\[setitem\] {value} is outside {dtype}"):
            leaf(DATA, host, dtype, requires_grad=False)[[0]] = value
    np.testing.assert_array_equal(x.numpy(), DATA)


def test_without_data():
    x = leaf(DATA, ndl.meta())
    assert x[MASK].shape == (MASK.sum(),)
    assert x[[0, 1], :, leaf([3, 0], ndl.meta())].shape == (2, 3)
    assert ops.setitem(x, MASK, 0.0).shape == DATA.shape
    with pytest.raises(IndexError, match=r"\[getitem\] how many a mask on meta\(\) selects is not known"):
        x[leaf(MASK, ndl.meta(), "bool")]


def test_places_of_the_last_axis_need_no_number_for_each_element(device):
    x, places = leaf(np.ones((200, 300)), device), np.random.default_rng(0).permutation(300)
    size = x.cached_data.nbytes
    with memory.peak(device) as forward:
        y = x[:, places]
    with ndl.no_grad(), memory.peak(device) as write:
        x.detach()[:, places] = leaf(np.ones((200, 300)), device)
    weights = leaf(np.ones((200, 300)), device)
    with memory.peak(device) as backward:
        y.backward(weights)
    for peak, copies in ((forward, 2), (backward, 2), (write, 3)):
        assert peak.above_start <= copies * size + 8192  # numbers alone would be two


@pytest.mark.parametrize("width", [7, 30_000])
def test_a_plan_with_indices_is_right_to_the_byte(device, width):
    """-log p of the right class by an index, as many write it; and writing by a Tensor, whose numbers a plan does not know."""

    def build(where):
        w = nn.Parameter(leaf(np.ones((5, width)), where))
        x, rows, classes = leaf(np.ones((6, 5)), where), np.arange(6), np.array([0, 6, 3, 3, 1, 0])

        def step():
            losses = -ops.logsoftmax(x @ w)[rows, classes]
            turned = x[:, leaf([4, 2, 0, 1], where, "int32")].sum()
            (ops.setitem(losses * 2, leaf([4, 1, 4], where, "int32"), losses[:3]).sum() + turned).backward()

        return step

    planned, real = memory.plan(build), memory.plan(build, device=device)
    assert (planned.peak_bytes, planned.by_category) == (real.peak_bytes, real.by_category)
