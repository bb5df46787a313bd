"""Tensors and reverse-mode differentiation.

A ``Tensor`` is the user's handle and owns its array. The graph is made of ``Node`` objects: op, input nodes, and a cell for
an array that is only a cache. A node keeps its array while some gradient that has declared it will read it has
not run; whatever else is asked for is recomputed from the inputs. So dropping an array is always right, and only ever a
matter of time against memory. Nodes know their live handle through a weak reference: nothing here is in a cycle, and memory
is back as soon as the last handle goes, without the garbage collector.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from .backend_ndarray.host_memory import ACTIVATION, GRADIENT
from .backend_ndarray.ndarray import from_dlpack as _array_from_dlpack
from .backend_ndarray.ndarray import write_stamp
from .backend_selection import Device, NDArray, array_api, default_device
from .errors import DTypeError, GraphError, ShapeError

LAZY_MODE = False  # True: ops that record a graph compute when their value is first asked for

_grad_enabled = True
_segment: Segment | None = None  # the innermost rematerialize() that is being run

# Called with each new node while needle.memory wants to know where graphs are made; sets its ``site``.
_node_made: Callable[[Node], None] | None = None


class no_grad:
    """Context manager and decorator: ops inside record no graph."""

    _enable = False

    def __enter__(self) -> None:
        global _grad_enabled
        self._before = _grad_enabled
        _grad_enabled = self._enable

    def __exit__(self, *exc: object) -> None:
        global _grad_enabled
        _grad_enabled = self._before

    def __call__(self, function: Callable) -> Callable:
        from functools import wraps

        @wraps(function)
        def wrapped(*args, **kwargs):
            with type(self)():
                return function(*args, **kwargs)

        return wrapped


class enable_grad(no_grad):
    """Context manager and decorator: ops inside record a graph, also within ``no_grad``."""

    _enable = True


def is_grad_enabled() -> bool:
    return _grad_enabled


def is_rematerializing() -> bool:
    return _segment is not None


class rematerialize:
    """Context manager: the graph made inside keeps no arrays of its own; backward computes them again when it comes there.

    What comes in from outside is kept until then, and what goes out as long as its readers need it. ``needle.remat`` is the
    form for functions and modules.
    """

    def __enter__(self) -> None:
        global _segment
        _segment = Segment(_segment)

    def __exit__(self, *exc: object) -> None:
        global _segment
        assert _segment is not None
        _segment.active = False
        _segment = _segment.parent


# While an autocast region is open: (op, inputs) -> the inputs, cast as ``op.autocast`` says.
_autocast: Callable[[Op, Sequence[Any]], Sequence[Any]] | None = None


def set_autocast(hook: Callable[[Op, Sequence[Any]], Sequence[Any]] | None) -> Any:
    """Makes ``hook`` what casts the inputs of ops (None: nothing does); returns the hook before."""
    global _autocast
    before, _autocast = _autocast, hook
    return before


class _NoAutocast:
    """Gradients run in the dtypes that forward recorded, wherever backward is called."""

    def __enter__(self) -> None:
        self._before = set_autocast(None)

    def __exit__(self, *exc: object) -> None:
        set_autocast(self._before)


def __getattr__(name: str) -> int:
    """``TENSOR_COUNTER``: live Tensors and TensorTuples, counted when asked for, so that making one costs nothing more."""
    if name != "TENSOR_COUNTER":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return sum(issubclass(type(found), Value) for found in gc.get_objects())


# --- ops ---


class Op:
    """One operation: ``compute`` on arrays, ``gradient`` on Tensors.

    reads_inputs: which inputs' values ``gradient`` reads: True (all), False (none), or a tuple of indices.
    reads_output: whether it reads the value of its own output.
    recomputes_output: the output is cheap to compute again, so it is not kept for gradients that read it.
    These decide how long arrays are kept, never whether a result is right: what is not there is recomputed.

    autocast: what a region of ``needle.amp.autocast`` does with the inputs: "lower": casts floats to the region's 16-bit dtype;
    "float32": casts 16-bit floats to float32; "inside": leaves them, and sets ``compute_dtype`` on the op, which lowers its own
    products; None: leaves them (elementwise ops give the widest dtype of their inputs).

    A fused op may offer ``reference(*inputs)``, the same value composed of ops that can be differentiated twice; it is used for
    gradients that themselves need a graph.

    makes_gradients: ``gradient`` gives arrays that are new and that nothing else holds, so that others are added to them in place.
    An op may offer ``accumulate_gradient(out_grad, node, sums)``: ``gradient``, but what would be added to ``sums[i]``, an array or
    None per input, may be added there, and None given for it; and ``consuming_gradient(out_grad, output)``, used when nobody else
    holds the arrays of its output or will read them: it may write into them, and give them away.
    """

    reads_inputs: bool | tuple[int, ...] = True
    reads_output: bool = True
    recomputes_output: bool = False
    autocast: str | None = None
    compute_dtype: str | None = None
    reference: Callable[..., Any] | None = None
    makes_gradients: bool = False
    accumulate_gradient: Callable[..., Any] | None = None
    consuming_gradient: Callable[..., Any] | None = None
    # True: gradient of a tuple-valued op takes None for outputs that nothing used, instead of zeros.
    accepts_missing_grads: bool = False
    # The index of the item that a tuple-selecting op gives; None for all others.
    selected_item: int | None = None

    def __call__(self, *args):
        raise NotImplementedError

    def compute(self, *args: NDArray):
        """The op on arrays."""
        raise NotImplementedError

    def gradient(self, out_grad: Any, node: Any):
        """The gradient for each input, given that of the output: a Tensor, or a tuple with one item per input."""
        raise NotImplementedError

    def gradient_as_tuple(self, out_grad: Any, node: Any) -> tuple:
        result = self.gradient(out_grad, node)
        if isinstance(result, tuple):
            return result
        if isinstance(result, list):
            return tuple(result)
        return (result,)

    @property
    def name(self) -> str:
        return type(self).__name__


class TensorOp(Op):
    """An op with one array as its value."""

    def __call__(self, *args: Value) -> Tensor:
        return Tensor.make_from_op(self, args)


class TensorTupleOp(Op):
    """An op with a tuple of arrays as its value."""

    def __call__(self, *args: Value) -> TensorTuple:
        return TensorTuple.make_from_op(self, args)


# --- graph ---


class Node:
    """A value in the graph. A leaf (op None) always holds its array; elsewhere ``array`` is a cache.

    spec: (shape, dtype, device) of the value, known also when the array is gone; a tuple of those for tuple ops.
    readers: gradients that have not run yet and will read ``array``; at 0 it is not kept.
    born: tick of the write clock when the node was made, after its inputs.
    time: tick when the value was computed, 0 before; an input written later must not be used to recompute.
    live_handle: gives the handle, or None when that has gone.
    segment: the innermost Segment that all readers are in, which is where ``array`` is dropped and brought back.
    site: where it was made, for needle.memory; None unless that was asked for.
    """

    __slots__ = (
        "op", "inputs", "array", "spec", "readers", "requires_grad", "released", "born", "time", "live_handle", "segment", "site",
        "__weakref__",
    )  # fmt: skip

    def __init__(self, op: Op | None, inputs: tuple[Node, ...], requires_grad: bool, handle: Value):
        self.op = op
        self.inputs = inputs
        self.array: Any = None
        self.spec: Any = None
        self.readers = 0
        self.requires_grad = requires_grad
        self.released = False
        self.born = write_stamp()
        self.time = 0
        self.live_handle = weakref.ref(handle)
        self.segment: Segment | None = None
        self.site: Any = None
        handle._node = self

    def peek(self) -> Any:
        """The array if it is anywhere: in the cache or in a live handle."""
        if self.array is not None:
            return self.array
        handle = self.live_handle()
        return handle._data if handle is not None else None

    def read_nodes(self) -> Iterable[Node]:
        """The nodes whose arrays this node's gradient reads, leaves left out since they always have theirs."""
        op = self.op
        assert op is not None
        reads = op.reads_inputs
        if reads is False and not op.reads_output:
            return ()
        if reads is True:
            chosen: Iterable[Node] = self.inputs
        elif reads is False:
            chosen = ()
        else:
            chosen = [self.inputs[i] for i in reads]
        found = [n for n in chosen if n.op is not None]
        if op.reads_output:
            found.append(self)
        return found

    def keep(self) -> None:
        """Announces this node's gradient as a reader (again, if it has run before)."""
        self.released = False
        for n in self.read_nodes():
            n.readers += 1

    def release(self) -> None:
        """This node's gradient has run: what no other gradient will read is dropped."""
        if self.released:
            return
        self.released = True
        for n in self.read_nodes():
            n.readers -= 1
            if n.readers == 0:
                n.array = None


class Segment:
    """A part of the graph whose arrays are dropped after forward and brought back together by backward.

    parent: the segment that this one is in. boundary: nodes from outside that an op in here takes, each with one reader more, which
    is this segment. armed: those readers are counted. active: its forward is running. open: its arrays are back.
    Nothing here points at the segment's own nodes, so there is no cycle.
    """

    __slots__ = ("parent", "boundary", "armed", "active", "open")

    def __init__(self, parent: Segment | None):
        self.parent = parent
        self.boundary: dict[Node, None] = {}
        self.armed = self.active = True
        self.open = False

    def take(self, node: Node) -> None:
        """Makes ``node`` of this segment and announces what it needs from outside."""
        node.segment = self
        for n in node.inputs:
            if n.op is None:
                continue
            home = _home(n)
            inner: Segment | None = self
            while inner is not None and inner is not home:
                if n not in inner.boundary:
                    inner.boundary[n] = None
                    n.readers += 1
                inner = inner.parent

    def arm(self) -> None:
        if not self.armed:
            self.armed = True
            for n in self.boundary:
                n.readers += 1

    def disarm(self) -> None:
        """What came in from outside is not needed by this segment any more."""
        if self.armed:
            self.armed = False
            for n in self.boundary:
                n.readers -= 1
                if n.readers == 0:
                    n.array = None


def _home(node: Node) -> Segment | None:
    """The segment of a node that is read from here: it leaves those whose forward is over."""
    segment = node.segment
    while segment is not None and not segment.active:
        segment = segment.parent
    node.segment = segment
    return segment


def realize(node: Node) -> Any:
    """The node's array (a tuple of arrays for tuple ops): the cached one, or recomputed from the nearest values there are.

    raises: GraphError if an input was changed in place after the value was first computed.
    """
    found = node.peek()
    return found if found is not None else _bring_back([node])[0]


def _bring_back(wanted: Sequence[Node]) -> list[Any]:
    """The arrays of nodes that have none, recomputed from the nearest values there are: each op once, and what no reader
    waits for dropped after its last use here.

    raises: GraphError if an input was changed in place after a value was first computed from it.
    """
    order: list[Node] = []
    uses: dict[Node, int] = {}  # by the ops computed here, and one for being wanted
    for target in wanted:
        uses[target] = uses.get(target, 0) + 1
        stack = [(target, iter(target.inputs))] if uses[target] == 1 else []
        while stack:
            node, inputs = stack[-1]
            for n in inputs:
                if n in uses:
                    uses[n] += 1
                elif n.peek() is None:
                    uses[n] = 1
                    stack.append((n, iter(n.inputs)))
                    break
            else:
                order.append(node)
                stack.pop()
    asked = set(wanted)
    fresh: dict[Node, Any] = {}
    for node in order:
        arrays = [fresh[n] if n in fresh else n.peek() for n in node.inputs]
        for n in node.inputs:
            if n in fresh:
                uses[n] -= 1
                if not uses[n]:
                    del fresh[n]
        if node.time:
            _check_unchanged(node, arrays)
        value = fresh[node] = _recompute(node, arrays)
        if node.time:
            _date_back(value, node.time)
        else:
            node.time, node.spec = write_stamp(), _spec_of(value)
        if node.readers and (node.segment is None or node.segment.open) and (node in asked or not node.op.recomputes_output):  # type: ignore[union-attr]
            node.array = value
    return [fresh[n] for n in wanted]


def _date_back(value: Any, time: int) -> None:
    """Gives a recomputed value the age of the first one: an op that writes into its own result must not make it look changed."""
    for part in value if isinstance(value, tuple) else (value,):
        if part.last_write > time:
            part.last_write = time


def _restore(nodes: Iterable[Node]) -> None:
    """Brings back what readers wait for."""
    missing = []
    for n in nodes:
        if n.array is None and n.readers and n.op is not None and not n.op.recomputes_output:
            n.array = n.peek()
            if n.array is None:
                missing.append(n)
    _bring_back(missing)


def _recompute(node: Node, arrays: Sequence[Any]) -> Any:
    """The op on ``arrays``, as an activation also in the middle of backward, where all else is gradients."""
    device = _first_part(arrays[0])._device if arrays else default_device()
    before = device.set_current_category(ACTIVATION)
    try:
        return node.op.compute(*arrays)  # type: ignore[union-attr]
    finally:
        device.set_current_category(before)


def _first_part(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) else value


def _spec_of(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple([(part._shape, part._dtype, part._device) for part in value])
    return (value._shape, value._dtype, value._device)


def _constant(spec: Any, fill: float) -> Tensor:
    shape, dtype, device = spec
    return Tensor.make_const(array_api.full(shape, fill, dtype=dtype, device=device))


def _check_unchanged(node: Node, arrays: Sequence[Any]) -> None:
    for index, array in enumerate(arrays):
        for part in array if isinstance(array, tuple) else (array,):
            if part.last_write > node.time:
                raise GraphError(
                    f"[recompute] input {index} of {node.op and node.op.name}, shape {part.shape}, was changed in place "
                    "after it was used, and a value computed from it is needed again (call backward before changing it, or "
                    "keep the graph with retain_graph=True)"
                )


# --- values ---


class Value:
    """A handle on a node: what Tensor and TensorTuple share."""

    __slots__ = ("_data", "_node", "_requires_grad", "__weakref__")

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

    def _as_node(self) -> Node:
        """This value's node; a leaf gets one when a graph first needs it."""
        node = self._node
        if node is None:
            node = Node(None, (), self._requires_grad, self)
            node.array = self._data
        return node

    @classmethod
    def _of(cls, node: Node) -> Value:
        """The live handle on ``node``, or a new one."""
        handle = node.live_handle()
        if handle is None:
            handle = cls._passing(node)
            handle._take_over(node)
        return handle

    @classmethod
    def _passing(cls, node: Node) -> Value:
        """A new handle on ``node`` that the node does not know of: for one call of ``gradient``, which is where time counts."""
        kind = TensorTuple if isinstance(node.op, TensorTupleOp) else Tensor
        handle = kind.__new__(kind)
        handle._setup(node.array, node.requires_grad)
        handle._node = node
        return handle

    # The course's view of the node.

    @property
    def op(self) -> Op | None:
        return self._node.op if self._node is not None else None

    @property
    def inputs(self) -> list[Value]:
        return [Value._of(n) for n in self._node.inputs] if self._node is not None else []

    @property
    def input_shapes(self) -> list[tuple[int, ...]]:
        """The inputs' shapes, without a handle on each: what most gradients need of them."""
        assert self._node is not None
        return [n.array._shape if n.op is None else (n.spec or _spec_of(realize(n)))[0] for n in self._node.inputs]

    @property
    def num_outputs(self) -> int:
        return 1

    @property
    def requires_grad(self) -> bool:
        return self._requires_grad

    @requires_grad.setter
    def requires_grad(self, wanted: bool) -> None:
        if self.op is not None and not wanted:
            raise GraphError("[requires_grad] only a leaf can stop requiring a gradient (use detach)")
        self._requires_grad = bool(wanted)
        if self._node is not None:
            self._node.requires_grad = bool(wanted)

    @property
    def cached_data(self):
        return self.realize_cached_data()

    @cached_data.setter
    def cached_data(self, array) -> None:
        self._replace(array)

    def _replace(self, array) -> None:
        if isinstance(array, NDArray) and isinstance(self._data, NDArray):
            array.category = self._data.category
        self._data = array
        if self._node is not None and self._node.op is None:
            self._node.array = array
            if isinstance(array, NDArray):
                array.mark_written()  # graphs that used the old array must not recompute from this one

    def realize_cached_data(self):
        """The array; recomputed if nothing holds it any more."""
        if self._data is None:
            assert self._node is not None
            self._data = realize(self._node)
        return self._data

    def is_leaf(self) -> bool:
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
        if _autocast is not None:
            inputs = _autocast(op, inputs)
        value = cls.__new__(cls)
        requires_grad = False
        if _grad_enabled:
            for x in inputs:
                if x._requires_grad:
                    requires_grad = True
                    break
        if LAZY_MODE and _grad_enabled:  # without a graph nothing is put off: gradients are summed in place
            value._setup(None, requires_grad)
            node = Node(op, tuple([x._as_node() for x in inputs]), requires_grad, value)
            if requires_grad:
                if _segment is not None:
                    _segment.take(node)
                else:
                    for n in node.inputs:
                        _home(n)
                node.keep()
            return value
        arrays = []
        for x in inputs:
            arrays.append(x._data if x._data is not None else x.realize_cached_data())
        out = op.compute(*arrays)
        value._setup(out, requires_grad)
        if requires_grad:
            in_nodes = []
            for x in inputs:
                in_nodes.append(x._node or x._as_node())
            node = Node(op, tuple(in_nodes), True, value)
            node.time = node.born
            node.spec = _spec_of(out) if isinstance(out, tuple) else (out._shape, out._dtype, out._device)
            if _segment is not None:
                _segment.take(node)
                for n, array in zip(in_nodes, arrays):
                    if n in _segment.boundary and n.segment is None and not n.op.recomputes_output:  # type: ignore[union-attr]
                        n.array = array
            reads = op.reads_inputs
            if reads:
                for i in range(len(in_nodes)) if reads is True else reads:  # type: ignore[union-attr]
                    n = in_nodes[i]
                    if n.op is not None:
                        n.readers += 1
                        if n.segment is not None and _home(n) is not None:
                            continue  # an interior of a segment: brought back when backward comes there
                        if not n.op.recomputes_output:
                            n.array = arrays[i]
            if op.reads_output:
                node.readers = 1
                if _segment is None:
                    node.array = out
            if _node_made is not None:
                _node_made(node)
        return value


class TensorTuple(Value):
    """A tuple of Tensors as one value of the graph."""

    __slots__ = ()

    @property
    def num_outputs(self) -> int:
        return len(self)

    def __len__(self) -> int:
        return len(self.realize_cached_data())

    def __getitem__(self, index: int) -> Tensor:
        return ops.tuple_get_item(self, index)

    def tuple(self) -> tuple[Tensor, ...]:
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
        return TensorTuple.make_const(self.realize_cached_data())


class _GradientSource:
    """Where a gradient came from, so that its own history can be made when somebody asks for it."""

    __slots__ = ("root", "leaf", "out_grad", "in_place")

    def __init__(self, root: Node, leaf: Node, out_grad: Tensor | None, in_place: bool):
        self.root = weakref.ref(root)
        self.leaf = leaf
        self.out_grad = out_grad
        self.in_place = in_place  # the array is the gradient's alone

    def rebuild(self) -> Tensor:
        root = self.root()
        if root is None:
            raise GraphError(
                "[backward] the tensor whose gradient this is has been freed, so the gradient has no history (keep that tensor, "
                "or call its backward with create_graph=True)"
            )
        return _run_backward(root, self.out_grad, retain_graph=False, create_graph=True)[self.leaf]


class Tensor(Value):
    """An array with, where it requires one, a gradient.

    array: a Tensor (shares its data if device and dtype agree), or anything ``NDArray`` takes (copied).
    device: default: that of a Tensor or NDArray, else the default device.
    dtype: default: that of a Tensor or NDArray; float32 for the rest (numpy's own with NEEDLE_BACKEND=np).
    """

    __slots__ = ("_grad", "_source", "_retains_grad")
    __array_ufunc__ = None  # numpy leaves `array * tensor` to __rmul__

    def __init__(
        self,
        array: Any,
        *,
        device: Device | None = None,
        dtype: str | None = None,
        requires_grad: bool = True,
        **kwargs: Any,
    ):
        if isinstance(array, Tensor):
            device = device or array.device
            dtype = dtype or array.dtype
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
    def make_const(data, requires_grad: bool = False) -> Tensor:  # type: ignore[override]
        """A leaf on ``data`` (an NDArray or a Tensor) itself, without a copy."""
        value = Tensor.__new__(Tensor)
        value._setup(data.realize_cached_data() if isinstance(data, Value) else data, requires_grad)
        return value

    # --- what it is --------------------------------------------------------------------------------------

    def _spec(self) -> tuple:
        """(shape, dtype, device), without bringing back a dropped array."""
        data = self._data
        if data is not None:
            return data._shape, data._dtype, data._device
        return (self._node and self._node.spec) or _spec_of(self.realize_cached_data())

    @property
    def shape(self) -> tuple[int, ...]:
        data = self._data
        return data._shape if data is not None else self._spec()[0]

    @property
    def dtype(self) -> str:
        return self._spec()[1]

    @property
    def device(self) -> Device:
        return self._spec()[2]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def data(self) -> Tensor:
        """A view of the values without history."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, Tensor) or value.dtype != self.dtype:
            got = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise DTypeError(f"[data] cannot assign {got} (accepted: a Tensor of {self.dtype})")
        self._replace(value.realize_cached_data())

    @property
    def grad(self) -> Tensor | None:
        return self._grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
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
        return self.realize_cached_data().__array__(dtype)

    def __dlpack__(self, **kwargs):
        return self.realize_cached_data().__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.realize_cached_data().__dlpack_device__()

    def item(self):
        """The one element as a Python number. raises: ShapeError if there is not exactly one."""
        return self.realize_cached_data().item()

    def to(self, device: Device) -> Tensor:
        """These values on ``device``, without history; itself if it is there."""
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
        raises: GraphError if nothing here requires a gradient, or a changed parameter would be needed again.
        """
        if self._source is not None and self._node is None:
            self._source.rebuild().backward(out_grad, retain_graph, accumulate, create_graph)
            return
        if not self._requires_grad:
            raise GraphError("[backward] this tensor has no history: no input required a gradient, or it was detached")
        if out_grad is not None and tuple(out_grad.shape) != tuple(self.shape):
            raise ShapeError(f"[backward] out_grad is {out_grad.shape} (accepted: {self.shape}, the shape of the tensor)")
        device = self.device
        before = device.set_current_category(GRADIENT)
        try:
            self._set_gradients(out_grad, retain_graph, accumulate, create_graph)
        finally:
            device.set_current_category(before)

    def _set_gradients(self, out_grad: Tensor | None, retain_graph: bool, accumulate: bool, create_graph: bool) -> None:
        root = self._as_node()
        found = _run_backward(root, out_grad, retain_graph, create_graph, accumulate=accumulate)
        # Memory that a leaf has been given already; 0 is borrowed memory, which has no number of its own.
        given = {0} if out_grad is None else {0, out_grad.realize_cached_data().serial}
        for leaf, grad in found.items():
            handle = leaf.live_handle()
            if not isinstance(handle, Tensor) or grad is handle._grad:  # the sum has been made there
                continue
            if accumulate and handle._grad is not None:
                grad = _accumulated(handle._grad, grad, create_graph)
            elif not create_graph:
                array = grad.realize_cached_data()
                # One array may be the gradient of two leaves (a + b); each leaf gets its own.
                own = isinstance(grad._source, _Summed)
                if array.serial in given:
                    array, own = array.copy(), True
                given.add(array.serial)
                grad = Tensor.make_const(array)
                grad._source = _GradientSource(root, leaf, out_grad, own)
            handle._grad = grad

    # --- operators --------------------------------------------------------------------------------------------

    def _other(self, other: Any) -> Tensor | float | int:
        """A Tensor, or a Python number, out of what stands on the other side of an operator."""
        if isinstance(other, Tensor):
            return other
        if isinstance(other, (np.ndarray, NDArray)):
            if other.size == 1 and not isinstance(other, NDArray):
                return other.item()
            return Tensor(other, device=self.device, requires_grad=False)
        if isinstance(other, np.generic):
            return other.item()
        if isinstance(other, (int, float)):
            return other
        raise DTypeError(f"[operator] cannot combine a Tensor with {type(other).__name__} (accepted: Tensor, array, number)")

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
        return ops.EWiseAdd()(self, ops.Negate()(other)) if isinstance(other, Tensor) else ops.AddScalar(-other)(self)

    def __rsub__(self, other):
        return ops.Negate()(self) + other

    def __truediv__(self, other):
        other = self._other(other)
        return ops.EWiseDiv()(self, other) if isinstance(other, Tensor) else ops.DivScalar(other)(self)

    def __rtruediv__(self, other):
        return ops.PowerScalar(-1)(self) * other

    def __pow__(self, other):
        other = self._other(other)
        return ops.EWisePow()(self, other) if isinstance(other, Tensor) else ops.PowerScalar(other)(self)

    def __rpow__(self, other):
        base = ops.MulScalar(0)(self) + other
        return ops.EWisePow()(base, self)

    def __matmul__(self, other):
        return ops.MatMul()(self, other)

    def __neg__(self):
        return ops.Negate()(self)

    def __getitem__(self, index) -> Tensor:
        """numpy's basic indexing (int, slice, None, ...), with gradient."""
        return ops.getitem(self, index)

    def __setitem__(self, index, value) -> None:
        """Makes this handle the tensor with ``value`` written at ``index``; gradients flow to both."""
        ops.setitem_in_place(self, index, value)

    def matmul(self, other: Tensor) -> Tensor:
        return ops.MatMul()(self, other)

    def sum(self, axes=None, keepdims: bool = False) -> Tensor:
        return ops.summation(self, axes, keepdims)

    def mean(self, axes=None, keepdims: bool = False) -> Tensor:
        return ops.mean(self, axes, keepdims)

    def broadcast_to(self, shape) -> Tensor:
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
        return ops.astype(self, dtype)


def from_dlpack(x: Any) -> Tensor:
    """A Tensor that shares the memory of ``x`` (numpy, torch, ...), with its dtype; requires no gradient."""
    return Tensor.make_const(_array_from_dlpack(x))


# --- backward ---


def _differentiable_order(root: Node, stop: frozenset[Node] = frozenset()) -> list[Node]:
    """The nodes under ``root`` that require a gradient, inputs before what is made of them: in the order they were born."""
    found = [root]
    seen = {root}
    for node in found:  # which grows
        if node not in stop:
            for n in node.inputs:
                if n.requires_grad and n not in seen:
                    seen.add(n)
                    found.append(n)
    found.sort(key=attrgetter("born"))
    return found


class _Owned:
    """A gradient whose array nothing else holds, so that it may be added to in place."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor):
        self.tensor = tensor


def _add_gradient(grads: dict, key: Any, grad: Tensor, create_graph: bool, new: bool = False) -> None:
    """new: nothing else holds the array of ``grad``."""
    have = grads.get(key)
    if create_graph:
        grads[key] = grad if have is None else have + grad
    elif have is None:
        grads[key] = _Owned(grad) if new and grad.realize_cached_data().is_compact() else grad
    elif isinstance(have, _Owned):
        have.tensor.realize_cached_data().add_in_place(grad.realize_cached_data())
    else:
        grads[key] = _Owned(_sum(have, grad, new))


def _sum(have: Tensor, grad: Tensor, own: bool) -> Tensor:
    """have + grad, in the array of ``grad`` if that is its ``own``."""
    a, b = have.realize_cached_data(), grad.realize_cached_data()
    if own and b.is_compact() and a.dtype == b.dtype and a.shape == b.shape:
        b.add_in_place(a)
        return grad
    return Tensor.make_const(a + b)


def _accumulated(have: Tensor, grad: Tensor, create_graph: bool) -> Tensor:
    """have + grad. A sum made here belongs to ``.grad`` alone, so the next one is added to it in place."""
    if create_graph:
        return have + grad
    total = _sum(have, grad, isinstance(grad._source, _Summed))
    total._source = _Summed()
    return total


def _sums_so_far(leaves: Iterable[Node]) -> dict[Node, _Owned]:
    """The leaves' gradients that what comes next may be added to in place: no graph and nothing but ``.grad`` holds them."""
    found = {}
    for leaf in leaves:
        handle = leaf.live_handle()
        have = handle._grad if isinstance(handle, Tensor) else None
        if have is not None and have._node is None and getattr(have._source, "in_place", False):
            have._source = _Summed()
            found[leaf] = _Owned(have)
    return found


ALL_ONES = object()  # as a Tensor's _source: the gradient that backward starts from, known to be 1 without reading it


class _Summed:
    """Marks a gradient whose array is its own: one summed over several backward calls has no one root to be rebuilt from."""

    __slots__ = ()
    in_place = True

    def rebuild(self) -> Tensor:
        raise GraphError("[backward] an accumulated gradient has no history (use create_graph=True)")


def _run_backward(
    root: Node,
    out_grad: Tensor | None,
    retain_graph: bool,
    create_graph: bool,
    stop: frozenset[Node] = frozenset(),
    accumulate: bool = False,
) -> dict[Node, Tensor]:
    """Gradients of the leaves (and of ``stop`` nodes) under ``root``. Sets ``.grad`` where retain_grad() asked for it.

    accumulate: what leaves have in ``.grad`` is added to in place where it can be, and is itself the gradient then.
    """
    order = _differentiable_order(root, stop)
    segments: dict[Segment, list[Node]] = {}
    incomplete = root.peek() is None
    for node in order:
        if node.op is None or node in stop:
            continue
        if node.released:
            node.keep()
            incomplete = True
        if node.segment is not None:
            segments.setdefault(node.segment, []).append(node)
            outer = node.segment.parent
            while outer is not None:
                segments.setdefault(outer, [])
                outer = outer.parent
    if incomplete:  # a second call, or lazy mode: all in one pass, not op by op
        for segment in segments:
            segment.arm()
        _restore(n for n in order if n.segment is None and n not in stop)
    closing: dict[Node, tuple[Segment, list[Node]]] = {}
    keeps = retain_graph or create_graph
    with enable_grad() if create_graph else no_grad(), _NoAutocast():
        if out_grad is None:
            seed = _constant(root.spec or _spec_of(realize(root)), 1)
            seed._source = ALL_ONES
        else:
            seed = out_grad if create_graph else out_grad.detach()
        grads: dict[Any, Any] = {root: seed}
        if accumulate and not create_graph:
            grads.update(_sums_so_far(n for n in order if n.op is None and n is not root))
        found: dict[Node, Tensor] = {}
        while order:
            node = order.pop()
            op = node.op
            if isinstance(op, TensorTupleOp):
                grad = _tuple_gradient(grads, node)
            else:
                grad = grads.pop(node, None)
                own = isinstance(grad, _Owned)
                if own:
                    grad = grad.tensor
                if grad is not None:
                    grad = _narrowed(grad, node.spec[1] if node.spec else getattr(node.peek(), "_dtype", ""))
            if op is None or node in stop:
                if grad is not None:
                    found[node] = grad
                    if own:
                        grad._source = _Summed()
                continue
            if grad is not None:
                handle = node.live_handle()
                if isinstance(handle, Tensor) and handle._retains_grad:
                    handle._grad = grad
                if segments:
                    for n in node.read_nodes():
                        if n.segment in segments:
                            _open_segment(n.segment, segments, closing, disarm=not keeps)
                _push_gradients(node, handle, grad, grads, keeps, create_graph)
            if not keeps and (op.reads_inputs or op.reads_output):
                node.release()
            if node in closing:
                _close_segment(*closing.pop(node))
        if not keeps:
            for segment in segments:  # whose arrays nobody read
                segment.disarm()
    return found


def _open_segment(segment: Segment, waiting: dict[Segment, list[Node]], closing: dict, disarm: bool) -> None:
    """Brings back the arrays of a segment, after those of the segments around it."""
    if segment.parent in waiting:
        _open_segment(segment.parent, waiting, closing, disarm)
    nodes = waiting.pop(segment)
    if nodes:
        segment.open = True
        _restore(nodes)
        closing[nodes[0]] = (segment, nodes)  # the last of them that backward comes to
    if disarm:
        segment.disarm()


def _close_segment(segment: Segment, nodes: list[Node]) -> None:
    segment.open = False
    for n in nodes:
        if n.segment is segment:
            n.array = None


def _push_gradients(node: Node, handle: Value | None, grad: Any, grads: dict, keeps: bool, create_graph: bool) -> None:
    """Adds this node's contribution to the gradients of its inputs."""
    op = node.op
    assert op is not None
    inputs = node.inputs
    if op.selected_item is not None:
        _add_gradient(grads, (inputs[0], op.selected_item), grad, create_graph)
        return
    new = op.makes_gradients
    parts: Sequence[Any]
    if create_graph and op.reference is not None:
        parts = _reference_gradients(node, grad)
    elif op.consuming_gradient is not None and not keeps and handle is None and node.readers == 1 and node.array is not None:
        output, node.array = node.array, None
        parts, new = op.consuming_gradient(grad, output), True
    else:
        value = Value._passing(node) if handle is None else handle
        if op.accumulate_gradient is not None and not create_graph:
            sums = [have.tensor._data if isinstance(have, _Owned) else None for have in map(grads.get, inputs)]
            parts = op.accumulate_gradient(grad, value, sums)
        else:
            parts = op.gradient_as_tuple(grad, value)
    if len(parts) != len(inputs):
        raise GraphError(f"[backward] {op.name}.gradient gave {len(parts)} gradients for {len(inputs)} inputs")
    for n, part in zip(inputs, parts):
        if part is None or not n.requires_grad:
            continue
        if isinstance(n.op, TensorTupleOp):
            for i, item in enumerate(part):
                if item is not None:
                    _add_gradient(grads, (n, i), item, create_graph)
        elif new or n in grads:
            _add_gradient(grads, n, part, create_graph, new)
        else:
            grads[n] = part


def _reference_gradients(node: Node, grad: Any) -> list[Tensor | None]:
    """Gradients, with a graph, of a fused op's reference composition. A tuple op's reference is its first output."""
    inputs = [Value._of(n) for n in node.inputs]
    value = node.op.reference(*inputs)  # type: ignore[union-attr, misc]
    if isinstance(grad, (tuple, list)):
        grad = grad[0]
    found = _run_backward(value._as_node(), grad, True, True, stop=frozenset(node.inputs))
    return [found.get(n) for n in node.inputs]


def _narrowed(grad: Tensor, dtype: str) -> Tensor:
    """The gradient of a 16-bit value has 16 bits, also where that value met a wider one."""
    return ops.astype(grad, dtype) if dtype in ("float16", "bfloat16") and grad.dtype != dtype else grad


def _tuple_gradient(grads: dict, node: Node) -> Any:
    """The gradient of a tuple-valued node out of its items': a TensorTuple, or a list with None where the op takes that."""
    whole = grads.pop(node, None)
    if whole is not None:  # backward was called on the tuple's own seed
        return whole
    specs = node.spec or _spec_of(realize(node))
    items = []
    for i in range(len(specs)):
        item = grads.pop((node, i), None)
        item = item.tensor if isinstance(item, _Owned) else item
        items.append(None if item is None else _narrowed(item, specs[i][1]))
    if all(item is None for item in items):
        return None
    if node.op.accepts_missing_grads:  # type: ignore[union-attr]
        return items
    return ops.make_tuple(*[_constant(spec, 0) if item is None else item for item, spec in zip(items, specs)])


# --- the course's functions ---


def compute_gradient_of_variables(output_tensor: Tensor, out_grad: Tensor | None) -> None:
    """Sets ``.grad`` of the leaves under ``output_tensor``: ``output_tensor.backward(out_grad)``."""
    output_tensor.backward(out_grad)


def find_topo_sort(node_list: Iterable[Value]) -> list[Value]:
    """The values under ``node_list`` in post-order: inputs, left to right, before what is made of them; each once."""
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


from . import ops
