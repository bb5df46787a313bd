"""Tensors, and the ops that make them: the user's side of reverse-mode differentiation.

A ``Tensor`` is the user's handle and owns its array. The graph is made of ``Node`` objects: op, input nodes, and a cell for
an array that is only a cache. A node keeps its array until all gradients declared as its readers have run; whatever else is
asked for is recomputed from the inputs. So dropping an array changes no result: it saves memory and costs time. Nodes know
their live handle through a weak reference: nothing here is in a cycle, and memory is back as soon as the last handle goes,
without the garbage collector.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from copy import deepcopy
from functools import wraps
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from typing import Any

import numpy as np

from . import dtype as dt
from .backend_ndarray.host_memory import ACTIVATION, GRADIENT
from .backend_ndarray.ndarray import from_dlpack as _array_from_dlpack
from .backend_ndarray.ndarray import write_stamp, writes
from .backend_selection import Device, NDArray, array_api, as_device
from .errors import DeviceError, DTypeError, GraphError, ShapeError, type_name
from .graph import Node, Segment, as_computed, as_read, home_of, realize, shape_of, spec_of
from .locks import process_lock
from .objects import objects_of

LAZY_MODE = False  # True: ops that record a graph compute when their value is first asked for

# Each thread has its own of these: an evaluation beside a training step must not take the step's graph away. A generator that was
# begun in one context (of a thread or an asyncio task) may be closed in another: to leave there what was not entered does nothing.
_grad_enabled = ContextVar("grad_enabled", default=True)
_outer: ContextVar[tuple] = ContextVar("outer", default=())  # (_grad_enabled around the innermost no_grad, that of the next ...)
_segment: ContextVar[Segment | None] = ContextVar("segment", default=None)  # the innermost rematerialize() that is being run
# While an autocast region is open: (op, inputs) -> the inputs, cast as ``op.autocast`` says.
_autocast: ContextVar[Callable[[Op, Sequence[Any]], Sequence[Any]] | None] = ContextVar("autocast", default=None)

# While ``grad`` runs: the nodes that lead to its inputs.
_on_way: ContextVar[set[Node] | None] = ContextVar("on_way", default=None)

_first_use = process_lock()

# Called with each new node while needle.memory wants to know where graphs are made; sets its ``site``.
_node_made: Callable[[Node], None] | None = None
_data_given: Callable[[Value, NDArray], None] | None = None  # while memory is traced


def runs_in_its_call(function: Any) -> bool:
    """False for a generator or a coroutine, whose call runs nothing of its body."""
    return not (isgeneratorfunction(function) or iscoroutinefunction(function) or isasyncgenfunction(function))


def check_runs_in_its_call(decorator: str, function: Callable) -> None:
    """raises: TypeError for what cannot be called; for a class, which would be called to make an object, not to compute; for a
    generator or a coroutine: its body runs after the call, when the decorator has no effect any more."""
    if not callable(function) or isinstance(function, type):
        found = f"the class {function.__name__}" if isinstance(function, type) else f"of type {type_name(function)}"
        raise TypeError(f"[{decorator}] function is {found} (accepted: a Module, or another function)")
    if not runs_in_its_call(function):
        name = getattr(function, "__name__", type_name(function))
        raise TypeError(
            f"[{decorator}] {name} is a generator or coroutine, which runs after its call (accepted: a function, or {decorator} "
            "inside of it)"
        )


class Region(AbstractContextManager):
    """A context manager that decorates functions, too. raises: TypeError for a class, a generator or a coroutine."""

    def __call__(self, function: Callable) -> Callable:
        check_runs_in_its_call(type(self).__name__, function)

        @wraps(function)  # contextlib's ContextDecorator would be taken for the user's code where an array is made
        def wrapped(*args, **kwargs):
            with self:
                return function(*args, **kwargs)

        return wrapped


class no_grad(Region):
    """Context manager and decorator (``@no_grad()``, or ``@no_grad`` as in PyTorch): ops inside, in this thread, keep no graph."""

    _enable = False

    def __new__(cls, function: Callable | None = None):
        region = super().__new__(cls)
        return region if function is None else region(function)

    def __enter__(self) -> None:
        _outer.set((_grad_enabled.get(), _outer.get()))
        _grad_enabled.set(self._enable)

    def __exit__(self, *exc: object) -> None:
        if regions := _outer.get():
            before, outer = regions
            _grad_enabled.set(before)
            _outer.set(outer)


class enable_grad(no_grad):
    """Context manager and decorator: ops inside record a graph, also within ``no_grad``."""

    _enable = True


def is_grad_enabled() -> bool:
    """Whether ops called here record a graph: not within ``no_grad``."""
    return _grad_enabled.get()


current_segment: Callable[[], Segment | None] = _segment.get
current_autocast: Callable[[], Any] = _autocast.get


def needs_gradient(x: Value) -> bool:
    """Whether an op's ``gradient`` has to give one for its input x: if x requires one, and leads to what ``grad`` was asked for.
    One that is given all the same is dropped.
    """
    on_way = _on_way.get()
    return x._requires_grad and (on_way is None or x._node in on_way)


set_on_way: Callable[[set[Node] | None], Any] = _on_way.set


def set_autocast(hook: Callable[[Op, Sequence[Any]], Sequence[Any]] | None) -> None:
    """Makes ``hook`` what casts the inputs of ops in this thread; None: nothing does."""
    _autocast.set(hook)


class rematerialize(Region):
    """Context manager: the graph made inside keeps no arrays of its own; backward computes them again when it needs them.

    Arrays that come in from outside are kept until then, and results as long as gradients outside need them. ``needle.remat`` is
    the form for functions and modules.
    """

    def __enter__(self) -> None:
        _segment.set(Segment(_segment.get()))

    def __exit__(self, *exc: object) -> None:
        segment = _segment.get()
        if segment is not None:
            _segment.set(segment.parent)  # first: Ctrl-C may come at any moment
            segment.leave()


def __getattr__(name: str) -> int:
    """``TENSOR_COUNTER``: live Tensors and TensorTuples, counted when asked for, so that making one costs nothing more."""
    if name != "TENSOR_COUNTER":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return len(objects_of(Value))


# --- ops ---


class Op:
    """One operation: ``compute`` on arrays, ``gradient`` on Tensors.

    reads_inputs: which inputs' values ``gradient`` reads: True (all), False (none), a tuple of indices, or one such tuple for each
    input, of what the gradient of this one reads: ((1,), (0,)) of a product, so that what is multiplied by a constant is not kept.
    reads_output: whether it reads the value of its own output; of a tuple of arrays it may be the indices of those read, which
    are then all that ``gradient`` finds there; others are made again, from the inputs, if they are asked for.
    recomputes_output: the output is cheap to compute again, so it is not kept for gradients that read it.
    These decide how long arrays are kept, never whether a result is right: what is not there is recomputed.

    autocast: what a region of ``needle.amp.autocast`` does with the inputs: "lower": casts floats to the region's 16-bit dtype;
    "float32": casts 16-bit floats to float32; "inside": leaves them, and sets ``compute_dtype`` on the op, which lowers its own
    products; None: leaves them (elementwise ops give the widest dtype of their inputs).

    A fused op may offer ``reference(*inputs)``, the same value composed of ops that can be differentiated twice; it is used for
    gradients that themselves need a graph, with floats in float32 at least.

    makes_gradients: the arrays that ``gradient`` gives are new and nothing else holds them, so other gradients may be added to them
    in place.

    Two methods are optional:
    ``accumulate_gradient(out_grad, node, sums)`` replaces ``gradient``. ``sums`` has an array or None per input; the op may add
    the gradient of input i to ``sums[i]`` itself, and then gives None for it.
    ``consuming_gradient(out_grad, node, output)`` is called instead when nothing else holds or will read the arrays of the op's
    output: it may write into them and give them away as gradients.
    """

    reads_inputs: bool | tuple[int, ...] | tuple[tuple[int, ...], ...] = True
    reads_output: bool | tuple[int, ...] = True
    recomputes_output: bool = False
    autocast: str | None = None
    compute_dtype: str | None = None
    reference: Callable[..., Any] | None = None
    makes_gradients: bool = False
    accumulate_gradient: Callable[..., Any] | None = None
    consuming_gradient: Callable[..., Any] | None = None
    # True: gradient of a tuple-valued op takes None for outputs that nothing used, instead of zeros.
    accepts_missing_grads: bool = False
    # True: the input is a TensorTuple.
    takes_tuple: bool = False

    def __call__(self, *args):
        raise NotImplementedError

    def compute(self, *args: NDArray):
        """The op on arrays."""
        raise NotImplementedError(f"[{self.name}] has no compute")

    def gradient(self, out_grad: Any, node: Any):
        """The gradient of each input, given that of the output: a Tensor, or a tuple with one item per input (None: no gradient).

        node: the op's output; ``node.inputs`` and ``node.input_shapes`` are what it was made of. ``needs_gradient`` tells for
        which of the inputs one is of use.
        """
        if self.accumulate_gradient is None:
            raise NotImplementedError(f"[{self.name}] has no gradient")
        return self.accumulate_gradient(out_grad, node, [None] * len(node.inputs))

    def gradient_as_tuple(self, out_grad: Any, node: Any) -> tuple:
        """``gradient``, as a tuple in any case. raises: ShapeError for another shape than the output's, which kernels rely on."""
        given, shapes = ((out_grad,), (node.shape,)) if isinstance(node, Tensor) else (out_grad, node.shapes)
        for grad, shape in zip(given, shapes):
            if grad is not None and grad.shape != shape:
                raise ShapeError(f"[{self.name}] the gradient of the output is {grad.shape} (accepted: {shape}, the output's)")
        result = self.gradient(out_grad, node)
        return tuple(result) if isinstance(result, (tuple, list)) else (result,)

    @property
    def name(self) -> str:
        """What traces, plans and errors call it."""
        return type(self).__name__


def check_tensors(op: str, *inputs: Any) -> None:
    """raises: DTypeError for an input that is no Tensor."""
    for i, x in enumerate(inputs):
        if not isinstance(x, Tensor):
            raise DTypeError(f"[{op}] input {i} is of type {type_name(x)} (accepted: a Tensor)")


class TensorOp(Op):
    """An op with one array as its value."""

    def __call__(self, *args: Value) -> Tensor:
        try:
            return Tensor.make_from_op(self, args)
        except (AttributeError, TypeError):  # looked at only now, so that what works does not pay for it
            if not self.takes_tuple:
                check_tensors(self.name, *args)
            raise


class TensorTupleOp(Op):
    """An op with a tuple of arrays as its value."""

    def __call__(self, *args: Value) -> TensorTuple:
        try:
            return TensorTuple.make_from_op(self, args)
        except (AttributeError, TypeError):
            check_tensors(self.name, *args)
            raise


# --- values ---


class Value:
    """A handle on a node: what Tensor and TensorTuple share."""

    __slots__ = ("_data", "_node", "_requires_grad", "__weakref__")
    _computed: type = NDArray  # what compute of its op gives

    def _init(self, op, inputs, *, num_outputs=1, cached_data=None, requires_grad=None) -> None:
        """The course's constructor: a handle on op(*inputs), or on a leaf when op is None."""
        if requires_grad is None:
            requires_grad = any(x.requires_grad for x in inputs)
        self._setup(cached_data, requires_grad)
        if op is not None:
            Node(op, tuple([x._as_node() for x in inputs]), requires_grad, self)

    def _setup(self, data, requires_grad: bool) -> None:
        self._data: Any = data
        self._node: Node | None = None
        self._requires_grad = requires_grad

    def _take_over(self, node: Node) -> None:
        """Become the handle on ``node``."""
        self._node = node
        node.live_handle = weakref.ref(self)

    def __copy__(self):
        """A leaf of the same kind on the same array. raises: GraphError for no leaf."""
        return self._copied(self._data)

    def __deepcopy__(self, memo: dict):
        """The same on a copy of the array: for ``copy.deepcopy`` of modules."""
        return self._copied(deepcopy(self._data, memo))

    def _copied(self, data):
        if self.op is not None:
            raise GraphError("[copy] this tensor was made by an op (accepted: leaves; detach() gives one)")
        copy = type(self).__new__(type(self))
        copy._setup(data, self._requires_grad)
        return copy

    def __reduce__(self):
        raise TypeError("[pickle] Tensors are not pickled (accepted: .numpy(); files: needle.checkpoints)")

    def _as_node(self) -> Node:
        """This value's node; a leaf gets one when a graph first needs it."""
        if self._node is None:
            with _first_use:  # threads that use it at once must agree on its node
                if self._node is None:
                    Node(None, (), self._requires_grad, self)
        return self._node  # type: ignore[return-value]

    @classmethod
    def _of(cls, node: Node) -> Value:
        """The live handle on ``node``, or a new one."""
        handle = node.live_handle()
        if handle is None:
            handle = cls._passing(node, node.whole())
            handle._take_over(node)
        elif handle._node is not node:  # it has stopped requiring a gradient since: another graph would have another node of it
            handle = cls._passing(node, node.whole())
        return handle

    @classmethod
    def _passing(cls, node: Node, array: Any) -> Value:
        """A new handle on ``node`` that the node does not know of: for one call of ``gradient``, which is where time counts."""
        kind = TensorTuple if isinstance(node.op, TensorTupleOp) else Tensor
        handle = kind.__new__(kind)
        handle._setup(array, node.requires_grad)
        handle._node = node
        return handle

    # The course's view of the node.

    @property
    def op(self) -> Op | None:
        """The op that made this value; None for a leaf."""
        return self._node.op if self._node is not None else None

    @property
    def inputs(self) -> list[Value]:
        """What ``op`` was applied to; empty for a leaf."""
        return [Value._of(n) for n in self._node.inputs] if self._node is not None else []

    @property
    def input_shapes(self) -> list[tuple[int, ...]]:
        """The inputs' shapes: all that most gradients need of them, without making a handle on each."""
        assert self._node is not None
        return [shape_of(n) for n in self._node.inputs]

    @property
    def num_outputs(self) -> int:
        """How many arrays the value is: 1 for a Tensor."""
        return 1

    @property
    def requires_grad(self) -> bool:
        """Whether backward gives this value a gradient. raises: GraphError for False on what is no leaf."""
        return self._requires_grad

    @requires_grad.setter
    def requires_grad(self, wanted: bool) -> None:
        wanted = bool(wanted)
        if self._node is not None and self._node.requires_grad != wanted:
            if self.op is not None and not wanted:
                raise GraphError("[requires_grad] only a leaf can stop requiring a gradient (use detach)")
            self.realize_cached_data()
            self._node = None  # graphs that have it keep it as it was for them
        self._requires_grad = wanted

    @property
    def cached_data(self):
        """The NDArray (for a TensorTuple, several); assigning one replaces it."""
        return self.realize_cached_data()

    @cached_data.setter
    def cached_data(self, array) -> None:
        self._replace(array)

    def _replace(self, array) -> None:
        if array is self._data:
            return
        if isinstance(array, NDArray) and isinstance(self._data, NDArray):
            array.category = self._data.category
            if _data_given is not None:
                _data_given(self, array)
        self._data = array
        node = self._node
        if node is not None:
            if node.op is None:
                node.array = array
            node.replaced = writes.last = write_stamp()  # what was made of the old array must not be recomputed from this one

    def realize_cached_data(self):
        """The array; recomputed if nothing holds it any more."""
        if self._data is None:
            assert self._node is not None
            self._data = realize(self._node)
        return self._data

    def is_leaf(self) -> bool:
        """Whether no op made this value, or none that is remembered."""
        return self.op is None

    @classmethod
    def make_const(cls, data, *, requires_grad: bool = False):
        """A leaf on ``data`` itself, without a copy."""
        value = cls.__new__(cls)
        value._setup(data.realize_cached_data() if isinstance(data, Value) else data, requires_grad)
        return value

    @classmethod
    def make_from_op(cls, op: Op, inputs: Sequence[Value]):
        """op(*inputs). Without an input that requires a gradient, or under no_grad, a constant with no history."""
        # Loops, not comprehensions: here a call more is a good part of the time of an op on small arrays.
        autocast = current_autocast()
        if autocast is not None:
            inputs = autocast(op, inputs)
        requires_grad = False
        if _grad_enabled.get():
            for x in inputs:
                if x._requires_grad:
                    requires_grad = True
                    break
        if LAZY_MODE and _grad_enabled.get():  # without a graph nothing is put off: gradients are summed in place
            value = cls.__new__(cls)
            value._put_off(op, inputs, requires_grad)
            return value
        arrays = []
        for x in inputs:
            arrays.append(x._data if x._data is not None else x.realize_cached_data())
        out = op.compute(*arrays)
        if type(out) is not cls._computed and not isinstance(out, cls._computed):
            out = as_computed(op, out, arrays, cls._computed)
        value = cls.__new__(cls)
        value._setup(out, requires_grad)
        if requires_grad:
            value._record(op, inputs, arrays, out)
        return value

    def _put_off(self, op: Op, inputs: Sequence[Value], requires_grad: bool) -> None:
        """Lazy mode: a node whose array is made when it is first asked for."""
        self._setup(None, requires_grad)
        node = Node(op, tuple([x._as_node() for x in inputs]), requires_grad, self)
        for x, n in zip(inputs, node.inputs):
            if x._data is not None:
                n.hold_if_written(x._data)
        if requires_grad:
            segment = current_segment()
            if segment is not None:
                segment.take(node)
            else:
                for n in node.inputs:
                    home_of(n)
            node.keep()
            if _node_made is not None:
                _node_made(node)

    def _record(self, op: Op, inputs: Sequence[Value], arrays: list, out: Any) -> None:
        """Makes this the value of a node, which keeps of ``arrays`` and ``out`` what gradients will read."""
        in_nodes, last_write = [], writes.last
        for x in inputs:
            n = x._node or x._as_node()
            in_nodes.append(n)
            if n.born < last_write and n.op is not None:
                n.hold_if_written(x._data)
        node = Node(op, tuple(in_nodes), True, self)
        node.spec = spec_of(out) if isinstance(out, tuple) else (out._shape, out._dtype, out._device)
        segment = current_segment()
        if segment is not None:
            segment.take(node)
            for n, array in zip(in_nodes, arrays):
                if n in segment.boundary and n.segment is None and not n.op.recomputes_output:  # type: ignore[union-attr]
                    n.array = array
        for i in node.reads:
            n = in_nodes[i]
            if n.op is not None:
                n.readers += 1
                if n.segment is not None and home_of(n) is not None:
                    continue  # an interior of a segment: brought back when backward comes there
                if not n.op.recomputes_output:
                    n.array = arrays[i]
        if op.reads_output:
            node.readers = 1
            if segment is None:
                node.array = as_read(op, out)
        if _node_made is not None:
            _node_made(node)


class TensorTuple(Value):
    """A tuple of Tensors as one value of the graph. ``grad`` is for algorithms of one's own; ``backward`` leaves it alone."""

    __slots__ = ("grad",)
    _computed = tuple

    @property
    def num_outputs(self) -> int:
        return len(self)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The items' shapes, without bringing back dropped arrays."""
        specs = self._node.spec if self._data is None and self._node is not None else None
        return [shape for shape, _, _ in specs or spec_of(self.realize_cached_data())]

    def __len__(self) -> int:
        return len(self.shapes)

    def __getitem__(self, index):
        return self.tuple()[index] if isinstance(index, slice) else ops.tuple_get_item(self, index)

    def tuple(self) -> tuple[Tensor, ...]:
        """The items, in Python's tuple."""
        return tuple([self[i] for i in range(len(self))])

    def __iter__(self):
        return iter(self.tuple())

    def __repr__(self) -> str:
        return "needle.TensorTuple" + str(self.tuple())

    __str__ = __repr__

    def __add__(self, other: TensorTuple) -> TensorTuple:
        if not isinstance(other, TensorTuple) or len(self) != len(other):
            raise ShapeError("[add] a TensorTuple adds to a TensorTuple of the same length")
        return ops.make_tuple(*[a + b for a, b in zip(self, other)])

    def detach(self) -> TensorTuple:
        """The same values without history; shares memory."""
        return TensorTuple.make_const(self.realize_cached_data())


class Tensor(Value):
    """An array with, where it requires one, a gradient.

    array: a Tensor (shares its data if device and dtype agree), or anything ``NDArray`` takes (copied).
    device: default: that of a Tensor or NDArray, else the default device.
    dtype: default: that of a Tensor or NDArray; float32 for the rest, integers included (numpy's own with NEEDLE_BACKEND=np).
    requires_grad: whether ``backward`` shall give it a gradient. Other keywords are ignored, as in the course.
    raises: DTypeError, DeviceError, ShapeError for lists of different lengths.
    """

    __slots__ = ("_grad", "_source", "_retains_grad")
    __array_ufunc__ = None  # numpy leaves `array * tensor` to __rmul__

    def __init__(
        self,
        array: Any,
        *,
        device: Device | str | None = None,
        dtype: str | None = None,
        requires_grad: bool = True,
        **kwargs: Any,
    ):
        if isinstance(array, Tensor):
            device = array.device if device is None else as_device(device)
            dtype = array.dtype if dtype is None else dt.name_of(dtype)
            data = array.realize_cached_data()
            if device != array.device or dtype != array.dtype:
                data = NDArray(data, device=device, dtype=dtype)
        else:
            data = NDArray(array, device=device, dtype=dtype)
        self._setup(data, requires_grad)

    def _setup(self, data, requires_grad: bool) -> None:
        self._data = data
        self._node = None
        self._requires_grad = requires_grad
        self._grad: Tensor | None = None
        self._source: Any = None
        self._retains_grad = False

    @staticmethod
    def make_const(data, requires_grad: bool = False) -> Tensor:
        """A leaf on ``data`` (an NDArray or a Tensor) itself, without a copy."""
        value = Tensor.__new__(Tensor)
        value._setup(data.realize_cached_data() if isinstance(data, Value) else data, requires_grad)
        return value

    # --- what it is --------------------------------------------------------------------------------------

    def _spec(self) -> tuple:
        """(shape, dtype, device), without bringing back a dropped array."""
        return (self._data is None and self._node and self._node.spec) or spec_of(self.realize_cached_data())

    @property
    def shape(self) -> tuple[int, ...]:
        """Length of each axis."""
        data = self._data
        return data._shape if data is not None else self._spec()[0]

    @property
    def dtype(self) -> str:
        """The dtype by name, as "float32"."""
        data = self._data
        return data._dtype if data is not None else self._spec()[1]

    @property
    def device(self) -> Device:
        """The device that holds the values."""
        return self._spec()[2]

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def T(self) -> Tensor:
        """The axes in reverse order."""
        return ops.permute(self, range(self.ndim)[::-1])

    @property
    def data(self) -> Tensor:
        """A view of the values without history."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, Tensor) or value.dtype != self.dtype:
            got = value.dtype if isinstance(value, Tensor) else type_name(value)
            raise DTypeError(f"[data] cannot assign {got} (accepted: a Tensor of {self.dtype})")
        self._replace(value.realize_cached_data())

    @property
    def grad(self) -> Tensor | None:
        """The gradient that the last backward found, a Tensor of this shape; None before.

        raises, when assigned: DTypeError for what is no Tensor, ShapeError and DeviceError for one that does not fit.
        """
        return self._grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            _check_gradient("[grad] the gradient", value, self)
        if value is not None and value._data is not None and value._data.category == ACTIVATION:  # that nobody has named yet
            value._data.category = GRADIENT
        self._grad = value

    def retain_grad(self) -> Tensor:
        """Have backward set ``.grad`` here too, though this is no leaf. Returns self."""
        self._retains_grad = True
        return self

    def detach(self) -> Tensor:
        """The same values without history; shares memory."""
        return Tensor.make_const(self.realize_cached_data())

    def numpy(self) -> np.ndarray:
        """A copy in numpy."""
        return self.realize_cached_data().numpy()

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return self.realize_cached_data().__array__(dtype, copy)

    def __dlpack__(self, **kwargs):
        return self.realize_cached_data().__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.realize_cached_data().__dlpack_device__()

    def item(self):
        """The one element as a Python number. raises: ShapeError if there is not exactly one."""
        return self.realize_cached_data().item()

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __format__(self, spec: str) -> str:
        return format(self.item() if spec else str(self), spec)

    def __copy__(self) -> Tensor:
        """As of any value, with the same ``.grad``."""
        copy = super().__copy__()
        copy._grad = self._grad
        return copy

    def __deepcopy__(self, memo: dict) -> Tensor:
        """As of any value, with a copy of ``.grad``, whose history there can be no copy of."""
        copy = super().__deepcopy__(memo)
        copy._grad = deepcopy(self._grad and self._grad.detach(), memo)
        return copy

    def to(self, device: Device | str) -> Tensor:
        """These values on ``device``, without history; itself if it is there."""
        device = as_device(device)
        return self if device == self.device else Tensor(self, device=device, requires_grad=self._requires_grad)

    def __repr__(self) -> str:
        return "needle.Tensor(" + str(self.realize_cached_data()) + ")"

    def __str__(self) -> str:
        return str(self.realize_cached_data())

    # --- differentiation -----------------------------------------------------------------------------------

    def backward(
        self,
        out_grad: Tensor | None = None,
        retain_graph: bool = False,
        accumulate: bool = False,
        create_graph: bool = False,
    ) -> None:
        """Sets ``.grad`` of the leaves under this tensor to the gradient of sum(self * out_grad).

        out_grad: shape of self; default ones. retain_graph: keep the saved arrays for another call (without it they are
        recomputed). accumulate: add to ``.grad``, in place, instead of overwriting it; if that fails midway it holds a part of
        the sum. create_graph: give the gradients a history of their own.
        raises: GraphError if nothing here requires a gradient, or what is needed was changed since; DTypeError, ShapeError or
        DeviceError for an ``out_grad`` unlike this tensor.
        """
        root, source = self._to_differentiate("backward")
        if out_grad is not None:
            _check_gradient("[backward] out_grad", out_grad, self)
        _as_gradients(self.device, set_gradients, root, out_grad, retain_graph, accumulate, create_graph, source)

    def _to_differentiate(self, name: str) -> tuple[Tensor, Any]:
        """(this tensor, or what it is with a history, by what that was made). raises: GraphError, in the name of ``name``."""
        # Of a gradient without a history, unless it was made a leaf that has one of its own.
        source = self._source if self.op is None and not self._requires_grad else None
        root = self if source is None else source.rebuild()
        if not root._requires_grad:
            raise GraphError(f"[{name}] this tensor has no history: no input required a gradient, or it was detached")
        return root, source

    # --- operators --------------------------------------------------------------------------------------------

    def _other(self, other: Any) -> Tensor | float | int:
        """A Tensor, or a Python number, out of what stands on the other side of an operator."""
        if isinstance(other, Tensor):
            return other
        if isinstance(other, NDArray) or (isinstance(other, np.ndarray) and (other.size != 1 or other.ndim > 1)):
            return self._constant(other)  # the course has (1,) of numpy as a number
        if isinstance(other, (np.ndarray, np.generic)):
            other = other.item()
        if isinstance(other, (int, float)):
            return other
        raise DTypeError(f"[operator] cannot combine a Tensor with {type_name(other)} (accepted: Tensor, array, number)")

    def _constant(self, array: Any) -> Any:
        """An array as a Tensor beside this one; what is none as it is."""
        if isinstance(array, NDArray):
            return Tensor(array, device=self.device, requires_grad=False)
        if isinstance(array, np.ndarray):
            return Tensor.make_const(self.realize_cached_data()._operand(array))
        return array

    def __add__(self, other):
        if isinstance(other, Tensor):
            return ops.add(self, other)
        other = self._other(other)
        return ops.add(self, other) if isinstance(other, Tensor) else ops.AddScalar(other)(self)

    __radd__ = __add__

    def __mul__(self, other):
        if isinstance(other, Tensor):
            return ops.multiply(self, other)
        other = self._other(other)
        return ops.multiply(self, other) if isinstance(other, Tensor) else ops.MulScalar(other)(self)

    __rmul__ = __mul__

    def __sub__(self, other):
        other = self._other(other)
        if not isinstance(other, Tensor):
            return ops.AddScalar.of_difference(other)(self)
        # Negated as it is, an integer may wrap around.
        narrow = not dt.is_float(other.dtype) and self.dtype not in (other.dtype, "bool")
        return ops.EWiseAdd("sub")(self, ops.Negate(dt.promote(self.dtype, other.dtype) if narrow else None)(other))

    def __rsub__(self, other):
        other = self._other(other)
        if isinstance(other, Tensor):
            return other - self
        if dt.is_float(self.dtype):
            return ops.AddScalar.of_negative(other)(self)
        wide = self.device.default_float if isinstance(other, float) and not dt.is_float(self.dtype) else None
        return ops.Negate(wide)(self) + other

    def __truediv__(self, other):
        other = self._other(other)
        return ops.EWiseDiv()(self, other) if isinstance(other, Tensor) else ops.DivScalar(other)(self)

    def __rtruediv__(self, other):
        other = self._other(other)
        return other / self if isinstance(other, Tensor) else ops.RDivScalar(other)(self)

    def __pow__(self, other):
        other = self._other(other)
        return ops.EWisePow()(self, other) if isinstance(other, Tensor) else ops.PowerScalar(other)(self)

    def __rpow__(self, other):
        base = self._other(other)
        if not isinstance(base, Tensor):
            dtype = dt.with_scalar(self.dtype, base, self.device.default_float)
            base = Tensor.make_const(array_api.full((1,) * self.ndim, base, dtype=dtype, device=self.device))
        return ops.EWisePow()(base, self)

    def __matmul__(self, other):
        return ops.matmul(self, self._constant(other))

    def __rmatmul__(self, other):
        return ops.matmul(self._constant(other), self)

    def __neg__(self):
        return ops.Negate()(self)

    def __abs__(self):
        return ops.absolute(self)

    def __eq__(self, other):
        """Identity, as the course has it. raises: DTypeError beside an array, where np.mean(classes == y) would be 0."""
        if isinstance(other, (np.ndarray, NDArray)):
            raise DTypeError("[compare] == of a Tensor and an array is identity (accepted: .numpy() of the Tensor, compared)")
        return NotImplemented

    __hash__ = Value.__hash__

    def _unordered(self, other):
        """raises: DTypeError. Elsewhere masks are made so, and Python's own TypeError does not say how they are made here."""
        raise DTypeError("[compare] Tensors are not ordered (accepted: what .item() or .numpy() gives; ops.maximum and ops.clip)")

    __lt__ = __le__ = __gt__ = __ge__ = _unordered

    def __iter__(self):
        if not self.shape:
            raise ShapeError("[iter] a 0-d tensor has no parts")
        return (self[i] for i in range(self.shape[0]))

    def __contains__(self, value: Any) -> bool:
        """Whether an element is equal to ``value``. Python would ask for a part that is the same object."""
        return (value.realize_cached_data() if isinstance(value, Tensor) else value) in self.realize_cached_data()

    def __getitem__(self, index) -> Tensor:
        """numpy's indexing (int, slice, None, ..., arrays, masks), with gradient."""
        return ops.getitem(self, index)

    def __setitem__(self, index, value) -> None:
        """Makes this handle the tensor with ``value`` written at ``index``; gradients flow to both."""
        ops.setitem_in_place(self, index, value)

    def matmul(self, other: Tensor) -> Tensor:
        """``self @ other``."""
        return ops.matmul(self, other)

    def sum(self, axes=None, keepdims: bool = False, axis=None, dtype=None, out=None) -> Tensor:
        """``ops.summation``: over an axis, several, or all (None), which gives shape (1,). axis: another name of axes.

        raises: ShapeError for an axis that is not there; DTypeError for dtype or out, which np.sum may pass.
        """
        return ops.summation(self, _axes("sum", axes, axis, dtype, out), keepdims)

    def mean(self, axes=None, keepdims: bool = False, axis=None, dtype=None, out=None) -> Tensor:
        """``ops.mean``: as ``sum``."""
        return ops.mean(self, _axes("mean", axes, axis, dtype, out), keepdims)

    def broadcast_to(self, shape) -> Tensor:
        """Repeated to ``shape`` along axes of length 1 and new leading axes."""
        return ops.BroadcastTo(shape)(self)

    def reshape(self, shape, *more) -> Tensor:
        """Under another shape, given as one or as several numbers."""
        return ops.Reshape((shape, *more) if more else shape)(self)

    def transpose(self, axes=None) -> Tensor:
        """Swaps two axes, by default the last two."""
        return ops.Transpose(axes)(self)

    def permute(self, axes) -> Tensor:
        """The axes in another order, numpy's transpose."""
        return ops.permute(self, axes)

    def astype(self, dtype) -> Tensor:
        """The values in another dtype; the gradient comes back in this one."""
        return ops.astype(self, dtype)


def _check_gradient(what: str, grad: Any, of: Tensor) -> None:
    """raises: DTypeError, ShapeError or DeviceError for what cannot be a gradient of ``of``. Its dtype may be another."""
    if not isinstance(grad, Tensor):
        raise DTypeError(f"{what} is of type {type_name(grad)} (accepted: a Tensor, or None)")
    if grad.shape != of.shape:
        raise ShapeError(f"{what} is {grad.shape} (accepted: {of.shape}, the shape of the tensor)")
    if grad.device != of.device:
        raise DeviceError(f"{what} is on {grad.device} (accepted: {of.device}, where the tensor is)")


def _axes(op: str, axes: Any, axis: Any, dtype: Any, out: Any) -> Any:
    """The axes by either name. raises: DTypeError for the rest of what numpy passes."""
    if dtype is not None or out is not None:
        raise DTypeError(f"[{op}] dtype or out is given (accepted: axes, or axis, and keepdims)")
    if axes is not None and axis is not None:
        raise ShapeError(f"[{op}] both axes {axes!r} and axis {axis!r} are given (accepted: one of them)")
    return axes if axis is None else axis


def from_dlpack(x: Any) -> Tensor:
    """A Tensor that shares the memory of ``x`` (numpy, torch, ...), with its dtype; requires no gradient."""
    return Tensor.make_const(_array_from_dlpack(x))


# --- the course's functions ---


def compute_gradient_of_variables(output_tensor: Tensor, out_grad: Tensor | None) -> None:
    """Sets ``.grad`` of the leaves under ``output_tensor``: ``output_tensor.backward(out_grad)``."""
    output_tensor.backward(out_grad)


def find_topo_sort(node_list: Iterable[Value]) -> list[Value]:
    """The values under ``node_list`` in post-order: inputs, left to right, before what is made of them; each once."""
    if isinstance(node_list, Value):  # whose parts would be sorted
        raise TypeError(f"[find_topo_sort] node_list is of type {type_name(node_list)} (accepted: a list of values)")
    visited: set[Value] = set()
    order: list[Value] = []
    for node in node_list:
        topo_sort_dfs(node, visited, order)
    return order


def topo_sort_dfs(node: Value, visited: set[Value], topo_order: list[Value]) -> None:
    """Appends what is under ``node`` and not yet in ``visited`` to ``topo_order``, then ``node``."""
    if node in visited:
        return
    visited.add(node)
    stack = [(node, iter(node.inputs))]
    while stack:
        top, inputs = stack[-1]
        for value in inputs:
            if value not in visited:
                visited.add(value)
                stack.append((value, iter(value.inputs)))
                break
        else:
            topo_order.append(top)
            stack.pop()


def sum_node_list(node_list: Sequence[Tensor]) -> Tensor:
    """The sum of several Tensors, without a starting zero."""
    total = node_list[0]
    for node in node_list[1:]:
        total = total + node
    return total


def grad(
    outputs: Tensor,
    inputs: Tensor | Sequence[Tensor],
    grad_outputs: Tensor | None = None,
    retain_graph: bool = False,
    create_graph: bool = False,
    allow_unused: bool = False,
) -> tuple[Tensor | None, ...]:
    """The gradient of sum(outputs * grad_outputs) with respect to each of ``inputs``. No ``.grad`` is set or added to.

    inputs: leaves, or results on the way to ``outputs``, which require a gradient. grad_outputs: shape of ``outputs``; default
    ones. retain_graph, create_graph: as in ``Tensor.backward``; without the latter the gradients are constants.
    allow_unused: give None for an input that does not lead to ``outputs``, instead of an error.
    raises: GraphError if ``outputs`` has no history, an input requires no gradient or is not used, or what is needed was changed
    since; DTypeError for what is no Tensor; ShapeError or DeviceError for ``grad_outputs`` unlike ``outputs``.
    source: torch.autograd.grad.
    """
    if not isinstance(outputs, Tensor):
        raise DTypeError(f"[grad] outputs is of type {type_name(outputs)} (accepted: a Tensor)")
    if not isinstance(inputs, (Tensor, Iterable)) or isinstance(inputs, (np.ndarray, NDArray)):
        raise DTypeError(f"[grad] inputs is of type {type_name(inputs)} (accepted: a Tensor, or several)")
    wanted = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    check_tensors("grad", *wanted)
    root, _ = outputs._to_differentiate("grad")
    for i, x in enumerate(wanted):
        if not x._requires_grad:
            raise GraphError(f"[grad] input {i}, of shape {x.shape}, requires no gradient")
    if grad_outputs is not None:
        _check_gradient("[grad] grad_outputs", grad_outputs, outputs)
    found = _as_gradients(outputs.device, gradients, root, wanted, grad_outputs, retain_graph, create_graph)
    for i, (x, value) in enumerate(zip(wanted, found)):
        if value is None and not allow_unused:
            unused = f"input {i}, of shape {x.shape}, does not lead to the output"
            raise GraphError(f"[grad] {unused} (allow_unused=True gives None for it)")
    return tuple(found)


def _as_gradients(device: Any, make: Callable, *args: Any) -> Any:
    """make(*args), where arrays that are made count as gradients."""
    set_category, before = device.set_current_category, ACTIVATION
    try:  # Ctrl-C may come before the name has its value: what is around this has a ``finally`` of its own
        before = set_category(GRADIENT)
        return make(*args)
    finally:
        set_category(before)


from . import ops
from .backward import gradients, set_gradients
