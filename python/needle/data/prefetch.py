"""Batches made ahead, in a thread."""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from ..errors import check_count


class Prefetch(Iterator):
    """The items of ``source`` in their order, made ahead by a thread: up to ``depth`` of them wait.

    source: an iterator with ``state_dict`` and ``load_state_dict``, like ``TokenBatches``. The thread starts with the first item;
    nothing else may use ``source`` until ``close``. ``state_dict`` is the state after the items given out, so items made ahead
    are made again after a resume. Several threads may take items: each goes to one of them.

    An error of ``source`` is raised where its item would have come. ``close`` ends the thread and sets ``source`` back to where
    this iterator is; the thread also ends when nothing refers to the ``Prefetch`` any more.
    raises: ValueError for a depth that is no whole number of at least 1, which a queue would take for no limit.
    """

    def __init__(self, source: Any, depth: int = 2):
        self.source, self.depth = source, check_count("Prefetch", "depth", depth, error=ValueError)
        self._state = source.state_dict()
        self._thread: threading.Thread | None = None
        self._turn = threading.RLock()  # one consumer at a time: an end, or an error, comes once

    def __next__(self) -> Any:
        with self._turn:
            return self._next_item()

    def _next_item(self) -> Any:
        if self._thread is not None and (not self._end.alive or (self._made.empty() and not self._thread.is_alive())):
            self.close()  # an end that was interrupted; or the thread did not start, or is in the parent of this process
        if self._thread is None:
            self._start()
        item, state, error = self._made.get()
        if error is not None:
            self.close()
            raise error
        self._state = state
        return item

    def state_dict(self) -> dict:
        """The state of ``source`` after the last item that was given out."""
        return self._state

    def load_state_dict(self, state: dict) -> None:
        """Goes on from ``state``; what was made ahead is dropped."""
        self.close()
        self.source.load_state_dict(state)
        self._state = self.source.state_dict()

    def close(self) -> None:
        """Ends the thread; the next item starts it again."""
        with self._turn:
            if self._thread is not None:
                self._end.detach()
                _end(self._made, self._asked_to_end)
                if self._thread.is_alive():  # one that did not start cannot be waited for
                    self._thread.join()
                self.source.load_state_dict(self._state)
                self._thread = None

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def _start(self) -> None:
        self._made: queue.Queue = queue.Queue(self.depth)
        self._asked_to_end = threading.Event()
        self._end = weakref.finalize(self, _end, self._made, self._asked_to_end)
        made_by = self.source, self._made, self._asked_to_end
        self._thread = threading.Thread(target=_make, args=made_by, name="Prefetch", daemon=True)
        self._thread.start()


def _make(source: Any, made: queue.Queue, asked_to_end: threading.Event) -> None:
    """What the thread runs. It must not refer to the ``Prefetch``, which would then never be freed."""
    while not asked_to_end.is_set():
        try:
            made.put((next(source), source.state_dict(), None))
        except BaseException as error:  # StopIteration, too
            made.put((None, None, error))
            return


def _end(made: queue.Queue, asked_to_end: threading.Event) -> None:
    asked_to_end.set()
    with contextlib.suppress(queue.Empty):
        while True:
            made.get_nowait()  # so that the thread, waiting for room, looks up
