"""The program's objects, as the garbage collector knows them, found beside threads that go on making some.

``gc.get_objects`` also gives the tuples that other threads are just making: a second reference to one of these, and that thread's
``tuple(...)`` fails with a SystemError. So they must be let go before another thread runs, which no bytecode can promise: here
all is done in one call, of functions that have none. Nor does it give what ``gc.freeze`` has put aside, a model for example: a
search takes that back.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, compress, starmap
from operator import not_
from typing import Any

from .locks import process_lock

PATIENCE_S = 30.0  # with which a search waits for its turn
searching = process_lock()  # two searches would find each other's lists, and a plan count what a search keeps alive


@contextmanager
def in_turn() -> Iterator[None]:
    """One search at a time, and none beside a plan. It does not wait for ever: who plans may wait for what this thread holds."""
    its_turn = searching.acquire(timeout=PATIENCE_S)
    try:
        yield
    finally:
        if its_turn:
            searching.release()


def objects_of(*kinds: type) -> list[Any]:
    """The objects of these types, and of types derived from them. By type alone: to ask an object for its class may run code."""
    return _chosen(kinds, False)


def objects_but(*kinds: type) -> list[Any]:
    """The objects that are neither of these types, or derived ones, nor just tuples. A tuple that is in use is in one of them, or
    in a tuple that is.
    """
    return _chosen(kinds, True)


def _chosen(kinds: tuple[type, ...], others: bool) -> list[Any]:
    types = list(kinds)
    for kind in types:  # which grows
        types.extend(type.__subclasses__(kind))
    if others:
        types.append(tuple)  # not those derived from it, which are made from a whole one
    everything: list[Any] = []
    found: list[Any] = []
    hits = map(frozenset(map(id, types)).__contains__, map(id, map(type, everything)))
    steps = (
        partial(gc.unfreeze),
        partial(everything.extend, chain.from_iterable(starmap(gc.get_objects, ((),)))),
        partial(found.extend, compress(everything, map(not_, hits) if others else hits)),
        partial(everything.clear),
    )
    deque(map(partial.__call__, steps), maxlen=0)
    chosen = [x for x in found if x is not found and x is not everything]
    found.clear()  # it is in itself, and in what it was made with
    return chosen
