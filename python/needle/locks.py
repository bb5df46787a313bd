"""Locks of the whole process."""

from __future__ import annotations

import os
from collections.abc import Callable
from threading import RLock
from typing import Any


def process_lock(put_right: Callable[[], None] | None = None) -> Any:
    """An RLock that a forked child does not wait for: the thread which held it then is not there to release it.

    put_right: called in that child, for what the thread had changed until it would have released the lock.
    """
    lock = RLock()

    def free_again() -> None:
        if lock.acquire(blocking=False):  # nobody's, or the thread's that forked
            lock.release()
        else:
            lock._at_fork_reinit()  # type: ignore[attr-defined]
            if put_right is not None:
                put_right()

    os.register_at_fork(after_in_child=free_again)
    return lock
