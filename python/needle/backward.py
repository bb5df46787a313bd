"""Backward: gradients pushed from a root down to the leaves, arrays let go as their last reader has run."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from contextvars import copy_context
from typing import Any

from . import dtype as dt
from . import ops
from .autograd import Op, Tensor, TensorTupleOp, Value, enable_grad, no_grad, set_autocast, set_on_way
from .backend_ndarray.ndarray import NDArray, writes
from .backend_selection import array_api
from .errors import GraphError, type_name
from .graph import Node, Segment, as_read, check_unchanged, differentiable_order, realize, restore, shape_of, spec_of
from .locks import process_lock

_adding = process_lock()  # one thread at a time adds to a ``.grad``, or parts of sums would be lost


def set_gradients(
    tensor: Tensor,
    out_grad: Tensor | None,
    retain_graph: bool,
    accumulate: bool,
    create_graph: bool,
    source: GradientSource | None,
) -> None:
    """Sets or adds to ``.grad`` of the leaves under ``tensor``: what ``Tensor.backward`` does. source: what rebuilt ``tensor``."""
    root = tensor._as_node()
    found = run_backward(root, out_grad, retain_graph, create_graph, accumulate=accumulate, retained=True)
    call = _Call(root, out_grad, source)
    with _adding if accumulate else nullcontext():
        _set_gradients(found, call, accumulate, create_graph)


def _set_gradients(found: dict[Node, Tensor], call: _Call, accumulate: bool, create_graph: bool) -> None:
    given = _given_at_first(call.out_grad)
    done: set[Tensor] = set()
    for leaf, grad in found.items():
        handle = leaf.live_handle()
        if not isinstance(handle, Tensor) or not handle._requires_grad:
            continue
        # A leaf that stopped requiring a gradient for a while has a node from before and one from after.
        if (accumulate or handle in done) and handle._grad is not None:
            grad = _accumulated(handle._grad, grad, create_graph)
        else:
            apart = _apart(grad, given, create_graph)
            if not create_graph:
                own = apart is not grad or isinstance(grad._source, _Summed)
                apart = Tensor.make_const(apart)
                apart._source = GradientSource(call, leaf, own)
            grad = apart
        handle._grad = grad if grad._source is not ALL_ONES else grad.detach()
        done.add(handle)


def gradients(
    tensor: Tensor, inputs: Sequence[Tensor], out_grad: Tensor | None, retain_graph: bool, create_graph: bool
) -> list[Tensor | None]:
    """What ``autograd.grad`` gives: the gradient of each input, None for one that does not lead to ``tensor``."""
    wanted = frozenset(x._node for x in inputs if x._node is not None)  # None: a leaf that nothing was made of
    found = run_backward(tensor._as_node(), out_grad, retain_graph, create_graph, wanted=wanted)
    given = _given_at_first(out_grad)
    result: list[Tensor | None] = []
    for handle in inputs:
        grad = found.get(handle._node) if handle._node is not None else None
        if grad is not None:
            grad = _apart(grad, given, create_graph)
            grad = grad if create_graph else Tensor.make_const(grad)
        result.append(grad)
    return result


def _given_at_first(out_grad: Tensor | None) -> set[int]:
    """The memory that is no gradient's own: of ``out_grad``, and borrowed memory, whose number is 0."""
    return {0} if out_grad is None else {0, out_grad.realize_cached_data().serial}


def _apart(grad: Tensor, given: set[int], create_graph: bool) -> Tensor:
    """``grad``, or a copy of it with its graph: one array may be the gradient of two leaves (a + b), be cut from a larger one,
    which it would keep, or have one element in memory for many (a sum's). Each leaf gets its own, to be written to.

    given: the memory of those that have been given, and of this one then.
    """
    array = grad.realize_cached_data()
    if array.serial in given or array.is_part() or array.is_broadcast():
        grad = _copy(grad) if create_graph else Tensor.make_const(array.copy())
    given.add(grad.realize_cached_data().serial)
    return grad


def _copy(grad: Tensor) -> Tensor:
    """A copy, with a graph where ``grad`` has one."""
    if not grad.requires_grad:
        return Tensor.make_const(grad.realize_cached_data().copy())
    with enable_grad():
        return grad * 1.0


class _Call(weakref.ref):
    """A call of backward, to be made once more with a graph: a reference to the node that it started from, with which
    ``out_grad`` is let go. source: of the gradient that it was called on, if it was one; the node is that gradient's then.
    """

    __slots__ = ("out_grad", "source")

    def __new__(cls, root: Node, out_grad: Tensor | None, source: GradientSource | None) -> _Call:
        return super().__new__(cls, source.call() or root if source else root, cls._forget)

    def __init__(self, root: Node, out_grad: Tensor | None, source: GradientSource | None):
        self.out_grad = out_grad
        self.source = source

    def _forget(self) -> None:
        self.out_grad = self.source = None


class GradientSource:
    """Where a gradient came from, so that its history can be made if somebody asks for it.

    leaf: whose gradient it is; it lives as long as the node that backward started from. in_place: whether the array is the
    gradient's alone.
    """

    __slots__ = ("call", "leaf", "in_place")

    def __init__(self, call: _Call, leaf: Node, in_place: bool):
        self.call = call
        self.leaf = weakref.ref(leaf)
        self.in_place = in_place

    def rebuild(self) -> Tensor:
        """The gradient once more, with a graph. raises: GraphError if the tensor that backward started from has been freed."""
        root, leaf, out_grad, source = self.call(), self.leaf(), self.call.out_grad, self.call.source
        if root is None or leaf is None:
            raise GraphError(
                "[backward] the tensor whose gradient this is has been freed, so the gradient has no history (keep that tensor, "
                "or call its backward with create_graph=True)"
            )
        if source is not None:
            gradient = source.rebuild()  # held until the end: it has the root's array
            root = gradient._as_node()
        return run_backward(root, out_grad, retain_graph=False, create_graph=True)[leaf]


class _Owned:
    """A gradient whose array nothing else holds, so that it may be added to in place."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor | None):
        self.tensor = tensor

    def array(self) -> NDArray | None:
        """To be added to."""
        assert self.tensor is not None
        return self.tensor.realize_cached_data()

    def add(self, grad: Tensor) -> None:
        array = self.array()
        assert array is not None
        array.add_in_place(grad.realize_cached_data())


class _InGrad(_Owned):
    """The ``.grad`` of a leaf, to which calls of backward in other threads may add too, and which they, or the user, may replace.

    leaf: None from then on. What came until then went with it, or into the sum that replaced it; the rest is summed apart.
    """

    __slots__ = ("leaf",)

    def __init__(self, leaf: Tensor):
        super().__init__(leaf._grad)
        self.leaf: Tensor | None = leaf

    def array(self) -> NDArray | None:
        """To be added to while ``_adding`` is held; None where there is no sum apart yet."""
        if self.leaf is not None and self.leaf._grad is not self.tensor:
            self.leaf = self.tensor = None
        return None if self.tensor is None else super().array()

    def add(self, grad: Tensor) -> None:
        with _adding:
            if self.array() is None:
                self.tensor = Tensor.make_const(grad.realize_cached_data().copy())
            else:
                super().add(grad)


def _add_gradient(grads: dict, key: Any, grad: Tensor, create_graph: bool, new: bool = False) -> None:
    """new: nothing else holds the array of ``grad``."""
    have = grads.get(key)
    if create_graph:
        grads[key] = grad if have is None else have + grad
    elif have is None:
        grads[key] = _Owned(grad) if new and grad.realize_cached_data().is_compact() else grad
    elif isinstance(have, _Owned):
        have.add(grad)
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
    if _takes_sums(have, spec_of(grad.realize_cached_data())):  # another thread has made it meanwhile, and others may have it
        have._source = _Summed()
        _Owned(have).add(grad)
        return have
    total = _sum(have, grad, isinstance(grad._source, _Summed))
    total._source = have._source and _Summed()  # where the user had set ``.grad``, the sum is no gradient of a backward either
    return total


def _takes_sums(have: Tensor, spec: Any) -> bool:
    """Whether a ``.grad`` is added to in place: its array is its own, and no graph holds it. spec: of the leaf."""
    return getattr(have._source, "in_place", False) and have._node is None and have._spec() == spec


def _sums_so_far(order: list[Node], root: Node, out_grad: Tensor | None) -> dict[Node, _Owned]:
    """The ``.grad`` of each leaf that may be added to in place: this backward does not read it, as ``out_grad`` or as a constant
    in its graph (``x.grad.detach()``).
    """
    read = {n.array.serial for node in order for n in node.inputs if n.op is None and not isinstance(n.array, tuple)}
    if out_grad is not None:
        read.add(out_grad.realize_cached_data().serial)
    found: dict[Node, _Owned] = {}
    for leaf in (n for n in order if n.op is None and n is not root):
        handle = leaf.live_handle()
        have = handle._grad if isinstance(handle, Tensor) and handle._requires_grad else None
        if have is None or not _takes_sums(have, spec_of(leaf.array)):  # the leaf may have moved since
            continue
        if have._data.serial in read:
            have._source.in_place = False
        else:
            have._source = _Summed()
            found[leaf] = _InGrad(handle)  # type: ignore[arg-type]
    return found


ALL_ONES = object()  # as a Tensor's _source: the gradient that backward starts from, known to be 1 without reading it


class _Summed:
    """Of a gradient that is summed over several backward calls: there is no one root to rebuild it from.

    in_place: whether the array is the gradient's alone.
    """

    __slots__ = ("in_place",)

    def __init__(self) -> None:
        self.in_place = True

    def rebuild(self) -> Tensor:
        raise GraphError("[backward] an accumulated gradient has no history (use create_graph=True)")


def run_backward(
    root: Node,
    out_grad: Tensor | None,
    retain_graph: bool,
    create_graph: bool,
    stop: frozenset[Node] = frozenset(),
    accumulate: bool = False,
    retained: bool = False,
    wanted: frozenset[Node] | None = None,
) -> dict[Node, Tensor]:
    """Gradients of the leaves (and of ``stop`` nodes) under ``root``.

    accumulate: what leaves have in ``.grad`` is added to in place where it can be, and is itself the gradient then; ``.grad`` of
    others is replaced by the sum. retained: set ``.grad`` where retain_grad() asked for it. wanted: give the gradients of these
    nodes instead, and run on the ways to them alone.
    """
    # In a context of its own, which ends wherever Ctrl-C falls: one as a ``with`` begins or ends would leave what it had set.
    return copy_context().run(_run_backward, root, out_grad, retain_graph, create_graph, stop, accumulate, retained, wanted)


def _run_backward(
    root: Node,
    out_grad: Tensor | None,
    retain_graph: bool,
    create_graph: bool,
    stop: frozenset[Node],
    accumulate: bool,
    retained: bool,
    wanted: frozenset[Node] | None,
) -> dict[Node, Tensor]:
    order = whole = differentiable_order([root], stop)
    on_way = None if wanted is None else _on_way_to(wanted, order)
    if on_way is not None:
        order = [node for node in order if node in on_way]
    _check_what_gradients_read(order, stop)
    keeps = retain_graph or create_graph
    segments = _Segments(_made_ready(root, whole, stop), keeps)
    set_on_way(on_way)
    set_autocast(None)  # gradients run in the dtypes that forward recorded, wherever backward is called
    with enable_grad() if create_graph else no_grad():
        if out_grad is None:
            seed = _constant(root.spec or spec_of(realize(root)), 1)
            seed._source = ALL_ONES
        else:
            seed = out_grad if create_graph else out_grad.detach()
        grads: dict[Any, Any] = {root: seed}
        if accumulate and not create_graph:
            grads.update(_sums_so_far(order, root, out_grad))
        found: dict[Node, Tensor] = {}
        while order:
            node = order.pop()
            op = node.op
            grad, own = _taken(grads, node)
            if op is None or node in stop:
                if grad is not None:
                    found[node] = grad
                    if own:
                        grad._source = _Summed()
                continue
            if grad is not None:
                handle = node.live_handle()
                if wanted is not None and node in wanted:
                    found[node] = grad
                if retained and isinstance(handle, Tensor) and handle._retains_grad:
                    kept = _copy(grad)
                    with _adding:
                        handle._grad = handle._grad + kept if accumulate and handle._grad is not None else kept
                segments.open_for(node)
                push_gradients(node, handle, grad, grads, keeps, create_graph, on_way)
            if not keeps and (op.reads_inputs or op.reads_output):
                node.release()
            segments.close_at(node)
        segments.end()
    return found


def _on_way_to(wanted: frozenset[Node], order: list[Node]) -> set[Node]:
    """The nodes of ``order`` that are among ``wanted``, or made of those."""
    found: set[Node] = set()
    for node in order:
        if node in wanted or not found.isdisjoint(node.inputs):
            found.add(node)
    return found


def _check_what_gradients_read(order: list[Node], stop: frozenset[Node]) -> None:
    """raises: GraphError if an array that a gradient reads was changed in place after the op had read or made it."""
    first = next((node for node in order if node.op is not None), None)
    if first is None or writes.last < first.born:  # nothing at all was written meanwhile
        return
    for node in order:
        op = node.op
        if op is None or node in stop:
            continue
        read = [(i, array) for i in node.reads for array in node.inputs[i].in_sight()]
        if op.reads_output:
            read += [(len(node.inputs), as_read(op, array)) for array in node.in_sight()]
        check_unchanged(node, read, "backward")


def _taken(grads: dict, node: Node) -> tuple[Any, bool]:
    """The gradient collected for ``node``, or None, and whether nothing else holds its array."""
    if isinstance(node.op, TensorTupleOp):
        return _tuple_gradient(grads, node), False
    grad = grads.pop(node, None)
    if isinstance(grad, _InGrad) and grad.leaf is not None:  # all of it is there
        return None, False
    own = isinstance(grad, _Owned)
    grad = grad.tensor if own else grad
    return (None if grad is None else _fitting(grad, node.spec[1] if node.spec else spec_of(realize(node))[1])), own


def _made_ready(root: Node, order: list[Node], stop: frozenset[Node]) -> dict[Segment, list[Node]]:
    """Brings back the arrays that gradients outside of segments will read. Returns the segments in ``order`` with their nodes."""
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
        restore(n for n in order if n.segment is None and n not in stop)
    return segments


class _Segments:
    """The segments that a backward comes to: the arrays of each are there from its first reader to its last node.

    waiting: those not come to yet, with their nodes in the order of birth. keeps: whether backward may come again.
    """

    def __init__(self, waiting: dict[Segment, list[Node]], keeps: bool):
        self.waiting, self.keeps = waiting, keeps
        self.closing: dict[Node, tuple[Segment, list[Node]]] = {}  # by the last of the nodes that backward comes to

    def open_for(self, node: Node) -> None:
        """Brings back what the gradient of ``node`` reads."""
        if self.waiting:
            for n in node.read_nodes():
                if n.segment in self.waiting:
                    self._open(n.segment)

    def _open(self, segment: Segment) -> None:
        """Brings back the arrays of a segment, after those of the segments around it."""
        if segment.parent in self.waiting:
            self._open(segment.parent)
        nodes = self.waiting.pop(segment)
        if nodes:
            segment.open = True
            restore(nodes)
            self.closing[nodes[0]] = (segment, nodes)
        if not self.keeps:
            segment.disarm()

    def close_at(self, node: Node) -> None:
        """Drops the arrays of the segment whose last node this is."""
        if node in self.closing:
            self._close(*self.closing.pop(node))

    def end(self) -> None:
        """Closes those whose last node is on no way, and lets go of what nobody read."""
        for segment, nodes in self.closing.values():
            self._close(segment, nodes)
        if not self.keeps:
            for segment in self.waiting:
                segment.disarm()

    @staticmethod
    def _close(segment: Segment, nodes: list[Node]) -> None:
        segment.open = False
        for n in nodes:
            if n.segment is segment:
                n.array = None


def push_gradients(
    node: Node, handle: Value | None, grad: Any, grads: dict, keeps: bool, create_graph: bool, on_way: set[Node] | None
) -> None:
    """Adds this node's contribution to the gradients of its inputs; where ``on_way`` is given, of those in it."""
    op = node.op
    assert op is not None
    inputs = node.inputs
    if isinstance(op, ops.TupleGetItem):
        _add_gradient(grads, (inputs[0], op.index), grad, create_graph)
        return
    new = op.makes_gradients
    parts: Sequence[Any]
    if create_graph and op.reference is not None:
        parts = _reference_gradients(node, grad, on_way)
    elif op.consuming_gradient is not None and not keeps and handle is None and node.readers == 1 and node.array is not None:
        output, node.array = node.array, None
        parts, new = op.consuming_gradient(grad, Value._passing(node, None), output), True
    else:
        value = Value._passing(node, node.array) if handle is None or handle._data is None else handle
        if op.accumulate_gradient is not None and not create_graph:
            haves = [grads.get(n) for n in inputs]
            with _adding if any([isinstance(have, _InGrad) for have in haves]) else nullcontext():
                sums = [have.array() if isinstance(have, _Owned) else None for have in haves]
                parts = op.accumulate_gradient(grad, value, sums)
        else:
            parts = op.gradient(grad, value)
            if parts is None:  # most likely a forgotten return
                raise GraphError(
                    f"[backward] {op.name}.gradient gave None (accepted: a Tensor, or a tuple with one or None per input)"
                )
            parts = parts if isinstance(parts, (tuple, list)) else (parts,)
    if len(parts) != len(inputs):
        raise GraphError(f"[backward] {op.name}.gradient gave {len(parts)} gradients for {len(inputs)} inputs")
    for n, part in zip(inputs, parts):
        if part is None or not n.requires_grad or (on_way is not None and n not in on_way):
            continue
        if isinstance(n.op, TensorTupleOp):
            for i, item in enumerate(part):
                if item is not None:
                    _check_gradient(op, item, (n.spec or spec_of(realize(n)))[i][0])
                    _add_gradient(grads, (n, i), item, create_graph)
            continue
        _check_gradient(op, part, shape_of(n))
        if new or n in grads:
            _add_gradient(grads, n, part, create_graph, new)
        else:
            grads[n] = part


def _check_gradient(op: Op, grad: Any, shape: tuple[int, ...]) -> None:
    """raises: GraphError for a gradient that does not fit an input of ``shape``: further down it might broadcast, and be wrong."""
    if not isinstance(grad, Tensor) or grad.shape != shape:
        got = f"one of shape {grad.shape}" if isinstance(grad, Tensor) else f"a {type_name(grad)}"
        raise GraphError(
            f"[backward] {op.name}.gradient gave {got} for an input of shape {shape} (accepted: a Tensor of its shape)"
        )


def _reference_gradients(node: Node, grad: Any, on_way: set[Node] | None) -> list[Tensor | None]:
    """Gradients, with a graph, of a fused op's reference composition: a tuple op's is its first output, or several."""
    inputs = [Value._of(n) for n in node.inputs]
    check_unchanged(node, enumerate([x.realize_cached_data() for x in inputs]))  # the op is computed again, out of others
    # The kernels compute in float32 at least; here 16 bits would round after each of several ops.
    wide = [ops.astype(x, dt.accumulator(x.dtype)) if isinstance(x, Tensor) and dt.is_float(x.dtype) else x for x in inputs]
    found = node.op.reference(*wide)  # type: ignore[union-attr, misc]
    values = found if isinstance(found, tuple) else (found,)
    grads: dict[Any, Any] = {}
    stop = frozenset(node.inputs)
    wanted = None if on_way is None else stop & on_way
    for value, g in zip(values, (grad,) if isinstance(grad, Tensor) else grad):
        if g is not None:
            for n, part in run_backward(value._as_node(), g, True, True, stop=stop, wanted=wanted).items():
                _add_gradient(grads, n, part, create_graph=True)
    return [grads.pop(n, None) for n in node.inputs]  # a node that is there twice gets all of it once


def _fitting(grad: Tensor, dtype: str) -> Tensor:
    """The gradient of a float has its dtype, also where it met another one."""
    return ops.astype(grad, dtype) if grad.dtype != dtype and dt.is_float(dtype) else grad


def _tuple_gradient(grads: dict, node: Node) -> Any:
    """The gradient of a tuple-valued node out of its items': a TensorTuple, or a list with None where the op takes that."""
    specs = node.spec or spec_of(realize(node))
    items = []
    for i in range(len(specs)):
        item = grads.pop((node, i), None)
        item = item.tensor if isinstance(item, _Owned) else item
        items.append(None if item is None else _fitting(item, specs[i][1]))
    if all(item is None for item in items):
        return None
    if node.op.accepts_missing_grads:  # type: ignore[union-attr]
        return items
    return ops.make_tuple(*[_constant(spec, 0) if item is None else item for item, spec in zip(items, specs)])


def _constant(spec: Any, fill: float) -> Tensor:
    shape, dtype, device = spec
    return Tensor.make_const(array_api.full(shape, fill, dtype=dtype, device=device))
