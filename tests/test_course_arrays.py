"""The course's array layer, line by line, on every device: the functions of a device module, devices, and NDArray."""

import inspect
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from needle import backend_ndarray as nd
from needle.backend_ndarray import ndarray
from needle.backend_ndarray.ndarray import compact_strides

A = np.arange(12, dtype=np.float32).reshape(3, 4) - 5
B = np.array([[0, -4, 2.5, 1], [np.nan, 0, 7, -1], [3, 3, 5, 6]], np.float32)


# --- functions of a device module, called as the course calls them: out last, everything compact ---


def handle(device, values):
    values = np.asarray(values)
    out = device.Array(values.size)
    device.from_numpy(values, out)
    return out


def values_of(device, array, shape):
    return device.to_numpy(array, shape, compact_strides(shape), 0)


def result(device, function, *args):
    """The array that ``function(*args, out)`` writes; arrays among ``args`` go to the device."""
    out = device.Array(A.size)
    getattr(device, function)(*(handle(device, a) if isinstance(a, np.ndarray) else a for a in args), out)
    return values_of(device, out, A.shape)


def test_names_and_sizes_of_a_module(device):
    assert device.__device_name__ == {"cpu_numpy": "numpy"}.get(device.name, device.name)
    assert getattr(device, "__tile_size__", None) == {"cpu": 8, "cuda": 4, "cuda_sim": 4}.get(device.name)
    assert hasattr(device, "matmul_tiled") == (device.name == "cpu")
    array = device.Array(12)
    assert array.size == 12
    assert isinstance(array.array, np.ndarray) if device.name == "cpu_numpy" else isinstance(array.ptr(), int)


@pytest.mark.parametrize("dtype", ["float64", "float16", "int64", "uint8", "bool"])
def test_from_numpy_casts_to_float32_and_to_numpy_copies(device, dtype):
    values = np.abs(A).astype(dtype)
    array = handle(device, values.T)
    back = values_of(device, array, (4, 3))
    np.testing.assert_array_equal(back, values.T.astype("float32"))
    back[:] = -1
    np.testing.assert_array_equal(values_of(device, array, (4, 3)), values.T.astype("float32"))
    np.testing.assert_array_equal(device.to_numpy(array, (2, 2), (-3, 1), 4), values.T.reshape(-1)[[[4, 5], [1, 2]]])


def test_filling_and_moving(device):
    out = device.Array(5)
    device.fill(out, 2.5)
    np.testing.assert_array_equal(values_of(device, out, (5,)), [2.5] * 5)
    packed = device.Array(12)
    device.compact(handle(device, A), packed, (4, 3), (1, 4), 0)
    np.testing.assert_array_equal(values_of(device, packed, (4, 3)), A.T)
    device.compact(handle(device, A), packed, (12,), (-1,), 11)  # what flip gives
    np.testing.assert_array_equal(values_of(device, packed, (12,)), A.reshape(-1)[::-1])
    seven = np.arange(2 * 2 * 3 * 2 * 2 * 3 * 2, dtype=np.float32).reshape(2, 2, 3, 2, 2, 3, 2)
    order = (6, 0, 5, 1, 4, 2, 3)
    strides = tuple(compact_strides(seven.shape)[i] for i in order)
    packed = device.Array(seven.size)
    device.compact(handle(device, seven), packed, tuple(seven.shape[i] for i in order), strides, 0)
    np.testing.assert_array_equal(values_of(device, packed, (seven.size,)), seven.transpose(order).reshape(-1))
    target = handle(device, A)
    device.ewise_setitem(handle(device, np.array([10.0, 20, 30])), target, (3, 1), (4, 1), 2)
    device.scalar_setitem(2, 7.0, target, (1, 2), (4, 2), 1)
    wanted = A.copy()
    wanted[:, 2], wanted[0, [1, 3]] = [10, 20, 30], 7
    np.testing.assert_array_equal(values_of(device, target, A.shape), wanted)


ELEMENTWISE = {
    "add": np.add,
    "mul": np.multiply,
    "div": np.divide,
    "maximum": np.maximum,
    "eq": lambda a, b: (a == b).astype("float32"),  # 0.0 or 1.0, as the course has it
    "ge": lambda a, b: (a >= b).astype("float32"),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_functions(device, name):
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(result(device, f"ewise_{name}", A, B), ELEMENTWISE[name](A, B), rtol=1e-6)
        np.testing.assert_allclose(result(device, f"scalar_{name}", A, 3.0), ELEMENTWISE[name](A, np.float32(3)), rtol=1e-6)


def test_powers_and_functions_of_one_array(device):
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(result(device, "scalar_power", A, 1.5), A**1.5, rtol=1e-5)  # NaN below 0
        for name in ("log", "exp", "tanh"):
            np.testing.assert_allclose(result(device, f"ewise_{name}", A), getattr(np, name)(A), rtol=1e-5, atol=1e-6)


def test_products_and_reductions(device):
    out = device.Array(9)
    device.fill(out, 1e9)  # matmul must not add to what is there
    device.matmul(handle(device, A), handle(device, A.T.copy()), out, 3, 4, 3)
    np.testing.assert_allclose(values_of(device, out, (3, 3)), A @ A.T, rtol=1e-5)
    for shape in ((3, 0, 2), (3, 2, 0), (0, 3, 2)):
        m, n, p = shape
        device.matmul(device.Array(m * n), device.Array(n * p), out := device.Array(m * p), *shape)
        np.testing.assert_array_equal(values_of(device, out, (m, p)), np.zeros((m, p)))
    np.testing.assert_array_equal(reduced(device, "reduce_max"), A.max(1))
    np.testing.assert_allclose(reduced(device, "reduce_sum"), A.sum(1), rtol=1e-6)
    for name in ("max", "min", "argmax", "argmin"):
        with pytest.raises(ValueError):
            getattr(device, f"reduce_{name}")(device.Array(0), device.Array(3, "int64" if name[:3] == "arg" else "float32"), 0)


def reduced(device, name):
    out = device.Array(3)
    getattr(device, name)(handle(device, A), out, 4)
    return values_of(device, out, (3,))


# --- devices ---


def test_devices():
    assert [d.name for d in nd.all_devices()][:3] == ["cpu", "cuda", "cpu_numpy"]
    assert [str(d) for d in nd.all_devices()][:3] == ["cpu()", "cuda()", "cpu_numpy()"] and repr(nd.cpu()) == "cpu()"
    assert nd.default_device() == nd.cpu() != nd.cpu_numpy() and len({nd.cpu(), nd.cpu(), nd.cpu_numpy()}) == 2
    assert nd.cpu() != "cpu()" and nd.cpu().enabled() and nd.cpu().mod is not None
    assert nd.cuda().enabled() == (nd.cuda().mod is not None)
    made = nd.BackendDevice("cpu", nd.cpu().mod)
    assert made == nd.cpu() and made.mod is nd.cpu().mod and made.__tile_size__ == 8
    absent = nd.BackendDevice(name="cuda", mod=None)
    assert not absent.enabled() and absent == nd.cuda() and not hasattr(absent, "matmul")
    for missing in ("__name__", "no_such_function"):
        with pytest.raises(AttributeError, match=rf"device cpu\(\) has no attribute '{missing}'"):
            getattr(nd.cpu(), missing)


def test_why_there_is_no_gpu(monkeypatch):
    """In CUDA's words: a driver that is too old looks like none otherwise."""
    for why, said in (("the driver is too old", "the driver is too old"), ("", "the driver names none")):
        module = SimpleNamespace(device_count=lambda: 0, why_absent=lambda why=why: why)
        monkeypatch.setitem(sys.modules, "needle.backend_ndarray.absent", module)
        device = nd.BackendDevice("cuda", "absent")
        assert not device.enabled() and device.why_absent() == f"no usable GPU was found: {said}"
        with pytest.raises(AttributeError, match=f"has no attribute 'matmul': no usable GPU was found: {said}"):
            device.matmul  # noqa: B018


def test_what_a_device_makes(device):
    np.random.seed(0)
    drawn = [device.randn(2, 3), device.rand(4), device.rand(2, dtype="float32")]
    np.random.seed(0)
    for array, values in zip(drawn, (np.random.randn(2, 3), np.random.rand(4), np.random.rand(2))):
        np.testing.assert_array_equal(array.numpy(), values.astype("float32"))
        assert array.device == device and array.dtype == "float32"
    for dtype in ("float32", None):
        rows = device.one_hot(3, np.array([2, 0]), dtype=dtype)
        np.testing.assert_array_equal(rows.numpy(), [[0, 0, 1], [1, 0, 0]])
        assert rows.dtype == "float32"
    assert device.empty((2, 3)).shape == (2, 3) and device.empty((2,), dtype=None).dtype == "float32"
    np.testing.assert_array_equal(device.full((2,), fill_value=1.5, dtype="float32").numpy(), [1.5, 1.5])


# --- NDArray ---


def test_signatures():
    """Parameters of the course by name, order and default; needle's own come after them."""
    course = {
        nd.NDArray: "(other, device=None)",
        nd.NDArray.make: "(shape, strides=None, device=None, handle=None, offset=0)",
        nd.NDArray.compact_strides: "(shape)",
        nd.NDArray.fill: "(self, value)",
        nd.NDArray.as_strided: "(self, shape, strides)",
        nd.NDArray.reshape: "(self, new_shape)",
        nd.NDArray.permute: "(self, new_axes)",
        nd.NDArray.broadcast_to: "(self, new_shape)",
        nd.NDArray.process_slice: "(self, sl, dim)",
        nd.NDArray.sum: "(self, axis=None, keepdims=False)",
        nd.NDArray.max: "(self, axis=None, keepdims=False)",
        nd.NDArray.flip: "(self, axes)",
        nd.NDArray.pad: "(self, axes)",
        nd.array: "(a, dtype='float32', device=None)",
        nd.empty: "(shape, dtype='float32', device=None)",
        nd.full: "(shape, fill_value, dtype='float32', device=None)",
        nd.broadcast_to: "(array, new_shape)",
        nd.reshape: "(array, new_shape)",
        nd.maximum: "(a, b)",
        nd.log: "(a)",
        nd.exp: "(a)",
        nd.tanh: "(a)",
        nd.sum: "(a, axis=None, keepdims=False)",
        nd.flip: "(a, axes)",
    }
    for function, wanted in course.items():
        assert signature(function).startswith(wanted[:-1]), function


def signature(function):
    found = inspect.signature(function)
    bare = [p.replace(annotation=p.empty) for p in found.parameters.values()]
    return str(found.replace(parameters=bare, return_annotation=found.empty))


def test_construction(device):
    for other in (A, A.astype("float64"), A.tolist(), A.astype(object), np.asfortranarray(A), nd.NDArray(A, device=device)):
        array = nd.NDArray(other, device=device)
        assert (array.shape, array.strides, array.dtype, array.ndim, array.size) == ((3, 4), (4, 1), "float32", 2, 12)
        assert array.device == device
        np.testing.assert_array_equal(array.numpy(), A)
    assert nd.NDArray(np.int64(3), device=device).shape == nd.NDArray(5, device=device).shape == ()
    copied = nd.NDArray(array)
    copied.fill(0)
    elsewhere = nd.NDArray(array, device=nd.cpu_numpy())
    assert copied.device == device and elsewhere.device == nd.cpu_numpy()
    np.testing.assert_array_equal(array.numpy(), A)
    np.testing.assert_array_equal(elsewhere.numpy(), A)
    for name in ("_shape", "_strides", "_offset", "_device", "_handle"):
        assert hasattr(array, name)
    made = nd.NDArray.make((2, 2), strides=(4, 1), device=device, handle=array._handle, offset=1)
    np.testing.assert_array_equal(made.numpy(), A[:2, 1:3])
    assert nd.NDArray.compact_strides((2, 3, 4)) == (12, 4, 1) and nd.NDArray.make((), device=device).shape == ()


def test_views_share_memory(device):
    array = nd.NDArray(A, device=device)
    assert array.is_compact() and array.compact().is_compact()
    turned = array.permute((1, 0))
    assert turned.shape == (4, 3) and turned.strides == (1, 4) and not turned.is_compact() and turned.compact().is_compact()
    assert not array[0].is_compact()  # compact strides, but not the whole of its buffer
    strided = array.as_strided((2, 2), (4, 2))
    np.testing.assert_array_equal(strided.numpy(), A[:2, [0, 2]])
    wide = array.reshape((3, 1, 4)).broadcast_to([3, 2, 4])
    assert wide.shape == (3, 2, 4) and wide.strides == (4, 0, 1)
    np.testing.assert_array_equal(wide.numpy(), np.broadcast_to(A[:, None], (3, 2, 4)))
    for view in (turned, array[1:, 2], array.reshape((4, 3)), wide, array.flat):
        assert view._handle is array._handle
    array.flat[6] = array.flat[6] + 100
    assert array.numpy()[1, 2] == A[1, 2] + 100 and turned.numpy()[2, 1] == A[1, 2] + 100
    with pytest.raises(ValueError):
        array.reshape((5, 2))
    with pytest.raises(ValueError):
        turned.reshape((12,))
    with pytest.raises(ValueError):
        array.broadcast_to((2, 4))


INDICES = [
    np.s_[1, 2], np.s_[1:3, 0:4:2], np.s_[:, 1], np.s_[2], np.s_[0:0, :], np.s_[:2], np.s_[::2, 3:0:-2], np.s_[-2:, -3:-1], np.s_[-1, ...],
]  # fmt: skip


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_indexing_keeps_dimensions(device, index):
    array = nd.NDArray(A, device=device)
    kept = tuple(slice(i, i + 1 or None) if isinstance(i, int) else i for i in (index if isinstance(index, tuple) else (index,)))
    assert array[index].shape == A[kept].shape
    np.testing.assert_array_equal(array[index].numpy(), A[kept])
    array[index] = 9.0
    wanted = A.copy()
    wanted[kept] = 9
    np.testing.assert_array_equal(array.numpy(), wanted)


def test_assignment(device):
    array = nd.NDArray(A, device=device)
    array[0:2, 1:2] = nd.NDArray([[50.0], [60.0]], device=device)
    array[2, 0:2] = nd.NDArray([70.0, 80.0], device=device)  # only the sizes have to agree
    array[0, 0] = nd.NDArray([5.0], device=device)
    wanted = A.copy()
    wanted[0:2, 1], wanted[2, 0:2], wanted[0, 0] = [50, 60], [70, 80], 5
    np.testing.assert_array_equal(array.numpy(), wanted)
    for wrong in (3, -4, (0, 4), (0, 0, 0)):
        with pytest.raises(IndexError):
            array[wrong]


def test_a_subclass_may_index_in_its_own_way(device):
    class Spans(nd.NDArray):
        def __getitem__(self, index):
            parts = [self.process_slice(s, i) if isinstance(s, slice) else slice(s, s + 1, 1) for i, s in enumerate(index)]
            return [(part.start, part.stop, part.step) for part in parts]

    spans = Spans(A, device=device)
    assert (
        spans[:, 1] == [(0, 3, 1), (1, 2, 1)]
        and spans[1:, ::2] == [(1, 3, 1), (0, 4, 2)]
        and spans[-2:, 0] == [(1, 3, 1), (0, 1, 1)]
    )


def test_operators(device):
    a, b = nd.NDArray(A, device=device), nd.NDArray(B, device=device)
    with np.errstate(all="ignore"):
        pairs = [
            (a + b, A + B), (a - b, A - B), (a * b, A * B), (a / b, A / B), (a + 2, A + 2), (2 + a, 2 + A), (a - 2, A - 2),
            (2 - a, 2 - A), (a * 2, A * 2), (2 * a, 2 * A), (a / 2, A / 2), (-a, -A), (a**2, A**2), (a**0.5, A**0.5),
            (a.maximum(b), np.maximum(A, B)), (a.maximum(1.0), np.maximum(A, 1)), (a.log(), np.log(A)), (a.exp(), np.exp(A)),
            (a.tanh(), np.tanh(A)), (a @ a.permute((1, 0)), A @ A.T), (nd.maximum(a, b), np.maximum(A, B)), (nd.log(a), np.log(A)),
            (nd.exp(a), np.exp(A)), (nd.tanh(a), np.tanh(A)),
        ]  # fmt: skip
        for found, wanted in pairs:
            assert found.dtype == "float32"
            np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-5, atol=1e-6)
        for found, wanted in (
            (a == b, A == B),
            (a != b, A != B),
            (a >= b, A >= B),
            (a > 1, A > 1),
            (a < b, A < B),
            (a <= 0, A <= 0),
        ):
            np.testing.assert_array_equal(found.numpy(), wanted)
    with pytest.raises(ValueError):
        a + nd.NDArray(A[:, :3], device=device)


def test_reductions_flips_and_pads(device):
    array = nd.NDArray(A, device=device)
    for name in ("sum", "max"):
        reduce, wanted = getattr(array, name), getattr(A, name)
        assert reduce().shape == (1,) and reduce(axis=(0, 1)).numpy() == wanted() == reduce().numpy()[0]
        for axis in (0, 1, -1, (1,), [0]):
            along = axis if isinstance(axis, int) else axis[0]
            np.testing.assert_allclose(reduce(axis=axis).numpy(), wanted(axis=along))
            np.testing.assert_allclose(reduce(axis=axis, keepdims=True).numpy(), wanted(axis=along, keepdims=True))
        with pytest.raises(ValueError):
            reduce(axis=())
    np.testing.assert_array_equal(nd.sum(array, axis=1, keepdims=True).numpy(), A.sum(1, keepdims=True))
    for axes in ((0,), (1,), (0, 1)):
        flipped = array.flip(axes)
        assert flipped.is_compact()
        np.testing.assert_array_equal(flipped.numpy(), np.flip(A, axes))
        np.testing.assert_array_equal(nd.flip(array, axes).numpy(), np.flip(A, axes))
    np.testing.assert_array_equal(array.pad(((1, 0), (0, 2))).numpy(), np.pad(A, ((1, 0), (0, 2))))


def test_functions_of_the_package(device):
    array = nd.array(A, dtype=None, device=device)
    assert array.dtype == "float32" and nd.array(array).device == device
    assert nd.empty((2, 3), "float32", device).shape == (2, 3) and nd.prod((2, 3, 4)) == 24
    np.testing.assert_array_equal(nd.full((2, 2), 3.0, "float32", device).numpy(), np.full((2, 2), 3))
    assert nd.full((2,), 1, dtype="int32", device=device).dtype == "int32"  # the GAN notebooks make such
    np.testing.assert_array_equal(nd.broadcast_to(nd.reshape(array, (3, 4, 1)), (3, 4, 2)).numpy(), np.repeat(A[:, :, None], 2, 2))
    assert ndarray.array(A, device=device).device == device and set(nd.__dict__) >= {"NDArray", "cuda", "default_device"}
