"""The graph that backward runs over: nodes, whose arrays are caches, and the segments that drop and bring back theirs together."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from .backend_ndarray.host_memory import ACTIVATION
from .backend_ndarray.ndarray import NDArray, write_stamp
from .backend_selection import default_device
from .errors import DTypeError, GraphError, type_name

if TYPE_CHECKING:
    from .autograd import Op, Value


class Node:
    """A value in the graph. A leaf (op None) always holds its array; elsewhere ``array`` is a cache.

    spec: (shape, dtype, device) of the value, known also when the array is gone; a tuple of those for tuple ops.
    reads: the numbers of the inputs whose arrays its gradient reads, perhaps more than once.
    readers: gradients that have not run yet and will read ``array``; at 0 it is not kept. Of a tuple of which the op's gradient
    reads some items only, the others are None in it.
    born: tick of the write clock when the node was made. From an input that was written after it the value must not be recomputed.
    replaced: tick when the handle was given another array; 0: never.
    live_handle: gives the handle, or None when that has gone.
    segment: the innermost Segment that all readers are in, which is where ``array`` is dropped and brought back.
    site: where it was made, for needle.memory; None unless that was asked for.
    """

    __slots__ = (
        "op", "inputs", "array", "spec", "reads", "readers", "requires_grad", "released", "born", "replaced", "live_handle",
        "segment", "site", "__weakref__",
    )  # fmt: skip

    def __init__(self, op: Op | None, inputs: tuple[Node, ...], requires_grad: bool, handle: Value):
        self.op = op
        self.inputs = inputs
        self.array: Any = handle._data if op is None else None
        self.spec: Any = None
        self.reads = () if op is None else _reads(op, inputs)
        self.readers = 0
        self.requires_grad = requires_grad
        self.released = False
        self.born = write_stamp()
        self.replaced = 0
        self.live_handle = weakref.ref(handle)
        self.segment: Segment | None = None
        self.site: Any = None
        handle._node = self

    def whole(self) -> Any:
        """The cached array; None if items of it are missing."""
        array = self.array
        if type(array) is tuple:
            for part in array:
                if part is None:
                    return None
        return array

    def peek(self) -> Any:
        """The array if it is anywhere: in the cache or in a live handle."""
        array = self.whole()
        if array is not None:
            return array
        handle = self.live_handle()
        return handle._data if handle is not None else None

    def in_sight(self) -> list[Any]:
        """The arrays of which a gradient may find one: the cached one, and that of the live handle."""
        handle = self.live_handle()
        held = None if handle is None or handle._data is self.array else handle._data
        return [array for array in (self.array, held) if array is not None]

    def read_nodes(self) -> list[Node]:
        """The nodes whose arrays this node's gradient reads, leaves left out since they always have theirs."""
        inputs = self.inputs
        found = [inputs[i] for i in self.reads if inputs[i].op is not None]
        if self.op.reads_output:  # type: ignore[union-attr]
            found.append(self)
        return found

    def keep(self) -> None:
        """Announces this node's gradient as a reader (again, if it has run before)."""
        self.released = False
        for n in self.read_nodes():
            n.readers += 1

    def hold_if_written(self, array: Any) -> None:
        """Keeps ``array`` as long as this node if it was written in place since: the op would not give these values again."""
        if not isinstance(array, tuple) and max(array.last_write, self.replaced) > self.born:
            self.array, self.segment = array, None
            self.readers += 1

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

    parent: the segment that this one is in.
    boundary: the nodes from outside that ops in here take. The segment counts as one more reader of each.
    armed: whether it is counted as their reader now.
    active: whether its forward is running. open: whether its arrays have been brought back.
    casts: those that an autocast region has made while the segment was active.
    Nothing here refers to the segment's own nodes, so there is no cycle.
    """

    __slots__ = ("parent", "boundary", "armed", "active", "open", "casts")

    def __init__(self, parent: Segment | None):
        self.parent = parent
        self.boundary: dict[Node, None] = {}
        self.armed = self.active = True
        self.open = False
        self.casts: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()

    def leave(self) -> None:
        """Its forward is over."""
        self.active = False
        self.casts.clear()

    def take(self, node: Node) -> None:
        """Makes ``node`` of this segment and announces what it needs from outside."""
        node.segment = self
        for n in node.inputs:
            if n.op is None:
                continue
            home = home_of(n)
            inner: Segment | None = self
            while inner is not None and inner is not home:
                if n not in inner.boundary:
                    inner.boundary[n] = None
                    n.readers += 1
                inner = inner.parent

    def arm(self) -> None:
        """Counts this segment again as a reader of what comes in from outside."""
        if not self.armed:
            self.armed = True
            for n in self.boundary:
                n.readers += 1

    def disarm(self) -> None:
        """Stops counting this segment as a reader of what comes in from outside, and drops what no other reader needs."""
        if self.armed:
            self.armed = False
            for n in self.boundary:
                n.readers -= 1
                if n.readers == 0 and n.op is not None:  # lazy mode: a constant has become a leaf since
                    n.array = None


def _reads(op: Op, inputs: Sequence[Node]) -> Collection[int]:
    reads: Any = op.reads_inputs
    if reads is True:
        return range(len(inputs))
    if not reads or not isinstance(reads[0], tuple):
        return reads or ()
    return [i for n, of_n in zip(inputs, reads) if n.requires_grad for i in of_n]


def as_read(op: Op, value: Any) -> Any:
    """What the gradient of ``op`` reads of its output."""
    reads = op.reads_output
    return tuple([part if i in reads else None for i, part in enumerate(value)]) if type(reads) is tuple else value


def home_of(node: Node) -> Segment | None:
    """Moves ``node``, which is read here, out of the segments whose forward is over. Returns the segment that it is in then."""
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
    values: dict[Node, Any] = {}  # what was there and what is computed, until its last use: another thread may drop the node's
    order = list(dict.fromkeys(wanted))
    seen = set(order)
    for node in order:  # which grows
        for n in node.inputs:
            if n not in seen:
                seen.add(n)
                found = n.peek()
                if found is None:
                    order.append(n)
                else:
                    values[n] = found
    order.sort(key=attrgetter("born"))
    uses = Counter(wanted)  # by the ops computed here, and one for being wanted
    for node in order:
        uses.update(node.inputs)
    asked = set(wanted)
    for node in order:
        arrays = [values[n] for n in node.inputs]
        for n in node.inputs:
            uses[n] -= 1
            if not uses[n]:
                del values[n]
        check_unchanged(node, enumerate(arrays))
        value = values[node] = recompute(node, arrays)
        _date_back(value, node.born)
        if node.spec is None:  # lazy mode: the first time
            node.spec = spec_of(value)
            handle = node.live_handle()
            if handle is not None:
                handle._data = value
            if not node.requires_grad:  # a constant has no history
                node.op, node.inputs, node.array = None, (), value
                continue
        kept = node in asked or not node.op.recomputes_output  # type: ignore[union-attr]
        if kept and node.readers and (node.segment is None or node.segment.open):
            node.array = as_read(node.op, value)  # type: ignore[arg-type]
    return [values[n] for n in wanted]


def _date_back(value: Any, time: int) -> None:
    """Gives a computed value the age of its node: an op that writes into its own result must not make it look changed."""
    for part in value if isinstance(value, tuple) else (value,):
        if part.last_write > time:
            part.last_write = time


def restore(nodes: Iterable[Node]) -> None:
    """Brings back what readers wait for."""
    missing = []
    for n in nodes:
        if n.array is None and n.readers and n.op is not None and not n.op.recomputes_output:
            value = n.peek()
            if value is None:
                missing.append(n)
            else:
                n.array = as_read(n.op, value)
    _bring_back(missing)


def recompute(node: Node, arrays: Sequence[Any]) -> Any:
    """The op on ``arrays``, as an activation also in the middle of backward, where all else is gradients."""
    device = _first_part(arrays[0])._device if arrays else default_device()
    set_category, before = device.set_current_category, ACTIVATION
    try:
        before = set_category(ACTIVATION)
        out = node.op.compute(*arrays)  # type: ignore[union-attr]
        return out if isinstance(out, (NDArray, tuple)) else as_computed(node.op, out, arrays)
    finally:
        set_category(before)


def as_computed(op: Any, out: Any, arrays: Sequence[Any], wanted: type = NDArray) -> Any:
    """What ``compute`` gave that is not of the type ``wanted``, as an array: with numpy's semantics ops may use numpy's functions.
    raises: DTypeError for anything else."""
    device = _first_part(arrays[0])._device if arrays else default_device()
    if wanted is NDArray and device.numpy_semantics and isinstance(out, (np.ndarray, np.generic)):
        return NDArray(out, device=device)
    accepted = "an NDArray" if wanted is NDArray else "a tuple of NDArrays"
    raise DTypeError(f"[{op.name}] compute gave a {type_name(out)} (accepted: {accepted})")


def _first_part(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) else value


def spec_of(value: Any) -> Any:
    """(shape, dtype, device) of an array, or a tuple of those for a tuple of arrays."""
    if isinstance(value, tuple):
        return tuple([(part._shape, part._dtype, part._device) for part in value])
    return (value._shape, value._dtype, value._device)


def shape_of(node: Node) -> tuple[int, ...]:
    """The shape of a node that is one array, without bringing the array back."""
    return node.array._shape if node.op is None else (node.spec or spec_of(realize(node)))[0]


def check_unchanged(node: Node, arrays: Iterable[tuple[int, Any]], asked_by: str = "recompute") -> None:
    """raises: GraphError if one of ``arrays``, (number of the input, array), was changed in place after the node was made of them.

    The number behind the last input's is that of the node's own array. Of a tuple the items that are None are not looked at.
    """
    born, inputs = node.born, node.inputs
    for index, array in arrays:
        replaced = (inputs[index] if index < len(inputs) else node).replaced > born
        for part in array if isinstance(array, tuple) else (array,):
            if part is not None and (replaced or part.last_write > born):
                op = node.op and node.op.name
                what = f"input {index} of {op}" if index < len(inputs) else f"the result of {op}"
                needed = "its gradient reads it" if asked_by == "backward" else "a value computed from it is needed"
                raise GraphError(
                    f"[{asked_by}] {what}, shape {part.shape}, was changed in place after it was used, and {needed} (call backward "
                    "before changing it, or cut off an earlier step's graph by detach(): a recurrent state, for instance)"
                )


def differentiable_order(roots: Iterable[Node], stop: frozenset[Node] = frozenset()) -> list[Node]:
    """The nodes under ``roots`` that require a gradient, inputs before what is made of them: in the order they were born."""
    seen = set(roots)
    found = list(seen)
    for node in found:  # which grows
        if node not in stop:
            for n in node.inputs:
                if n.requires_grad and n not in seen:
                    seen.add(n)
                    found.append(n)
    found.sort(key=attrgetter("born"))
    return found
