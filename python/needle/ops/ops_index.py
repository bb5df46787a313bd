"""Reading and writing by index: slices, arrays, and rows by id."""

from __future__ import annotations

from .. import dtype as dt
from ..autograd import NDArray, Tensor, TensorOp, check_tensors, is_grad_enabled
from ..backend_ndarray import indexing, kernels
from ..backend_ndarray.ndarray import check_one_device as _check_one_device
from ..backend_ndarray.ndarray import full as _full
from ._reads import _NoRead
from .ops_mathematic import matmul, unbroadcast, where
from .ops_shape import reshape


def _frozen(index):
    """``index`` as an op keeps it until backward."""
    items = index if isinstance(index, tuple) else (index,)
    if indexing.is_basic(items):
        return index
    return indexing.on_host(tuple([x.realize_cached_data() if isinstance(x, Tensor) else x for x in items]))


class GetItem(_NoRead):
    """a[index] as numpy. A view, but a copy where the index has arrays. grad: zeros with dy added at index."""

    def __init__(self, index):
        self.index = _frozen(index)

    def compute(self, a):
        return indexing.read(a, self.index)

    def gradient(self, out_grad, node):
        return _Embed(node.inputs[0].shape, self.index)(out_grad)


def getitem(a: Tensor, index) -> Tensor:
    """a[index] as numpy: ints, slices, None and `...` give a view; arrays of whole numbers, lists and masks among them a copy.

    An index that is a Tensor is read by the host, which waits for a GPU; ``embedding`` takes ids where they are.
    raises: IndexError.
    """
    return GetItem(index)(a)


class _Embed(_NoRead):
    """Zeros of ``shape`` with a added at ``index``: what the gradient of getitem is."""

    def __init__(self, shape, index):
        self.shape, self.index = shape, index

    def compute(self, a):
        return indexing.spread(a, self.shape, self.index)

    def gradient(self, out_grad, node):
        return getitem(out_grad, self.index)


class SetItem(_NoRead):
    """A copy of a with b written at index. grad: dy with zeros there, and dy[index], 0 for what was written over."""

    def __init__(self, index):
        self.index = _frozen(index)

    def compute(self, a, b):
        _check_one_device("setitem", a, b)  # NDArray's assignment copies from any, from which no gradient comes back
        out = a.copy()
        indexing.assign(out, self.index, b)
        return out

    def gradient(self, out_grad, node):
        a, b = node.inputs
        part = getitem(out_grad, self.index)
        stays = indexing.written_last(a.shape, self.index)
        if stays is not None:
            part = where(Tensor.make_const(NDArray(stays, device=part.device, dtype="bool")), part, 0.0)
        extra = max(0, b.ndim - part.ndim)  # axes of length 1 in front
        part = reshape(unbroadcast(part, b.shape[extra:]), b.shape)
        zeros = Tensor.make_const(_full(b.shape, 0, out_grad.dtype, out_grad.device))
        if dt.is_float(b.dtype) and not dt.is_float(a.dtype):  # b was cut off to integers
            part = zeros
        return SetItem(self.index)(out_grad, zeros), part


def setitem(a: Tensor, index, value) -> Tensor:
    """A copy of ``a`` with ``value`` (Tensor, array or number) written at ``index``.

    raises: IndexError, ShapeError, DeviceError for a Tensor on another device.
    """
    check_tensors("setitem", a)
    if not isinstance(value, Tensor):
        value = Tensor(value, device=a.device, dtype=a.dtype, requires_grad=False)
    return SetItem(index)(a, value)


def _own_array(a: Tensor) -> NDArray:
    """The array of ``a``, to be written; a compact copy in its place if it is broadcast (the gradient of a sum is)."""
    array = a.realize_cached_data()
    if array.is_broadcast():
        array = array.compact()
        a.cached_data = array
    return array


def setitem_in_place(a: Tensor, index, value) -> None:
    """``a[index] = value``. With a graph the handle becomes the new value; without one the array is written."""
    if not isinstance(value, (int, float, Tensor)):
        value = Tensor(value, device=a.device, dtype=a.dtype, requires_grad=False)
    is_tensor = isinstance(value, Tensor)
    if not is_grad_enabled() or not (a.requires_grad or (is_tensor and value.requires_grad)):
        indexing.assign(_own_array(a), _frozen(index), value.realize_cached_data() if is_tensor else value)
        return
    before, new = a._as_node(), setitem(a, index, value)
    Tensor.make_const(a._data)._take_over(before)  # the old value lives on without a handle: this one moves to the new value
    a._data, a._requires_grad = new._data, new._requires_grad
    a._take_over(new._as_node())


class Embedding(TensorOp):
    """one_hot(ids) @ weight in meaning, a gather in cost; the gradient sums rows by id, in order of position.

    weight: (V, D); ids: (...), whole numbers of any dtype. Result: (..., D).
    raises: IndexError for an id outside 0..V-1 (on a GPU at the next synchronisation).
    """

    makes_gradients = True
    reads_inputs = (1,)
    reads_output = False

    def compute(self, weight, ids):
        return kernels.embedding(weight, ids)

    def accumulate_gradient(self, out_grad, node, sums):
        weight, ids = node.inputs
        dy, into = out_grad.realize_cached_data(), sums[0]
        if into is not None and into._dtype != dy._dtype:
            into = None
        dweight = kernels.embedding_backward(dy, ids.realize_cached_data(), weight.shape[0], into)
        return Tensor.make_const(dweight) if into is None else None, None

    @staticmethod
    def reference(weight, ids):
        one_hot = kernels.one_hot(ids.realize_cached_data(), weight.shape[0], weight.dtype)
        return matmul(Tensor.make_const(one_hot), weight)


def embedding(weight: Tensor, ids: Tensor) -> Tensor:
    """Rows of ``weight`` (V, D) by id: ids (...), whole numbers of any dtype -> (..., D).

    raises: IndexError for an id outside 0..V-1 (on a GPU at the next synchronisation) or, on a CPU, a fraction (a GPU cuts it off);
    ShapeError.
    """
    return Embedding()(weight, ids)
