"""Locks of the whole process."""

from __future__ import annotations

import os
from threading import RLock
from typing import Any


def process_lock() -> Any:
    """An RLock that a forked child does not wait for: the thread which held it then is not there to release it."""
    lock = RLock()

    def free_again() -> None:
        if lock.acquire(blocking=False):  # nobody's, or the thread's that forked
            lock.release()
        else:
            lock._at_fork_reinit()  # type: ignore[attr-defined]

    os.register_at_fork(after_in_child=free_again)
    return lock
