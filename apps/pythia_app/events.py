"""The rows of metrics.jsonl for TensorBoard."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

FLUSHED_EVERY_SECONDS = 10.0


class Events:
    """An event file in ``folder``, written as rows come.

    tensorboardX's own SummaryWriter writes in a thread, which a full disk ends, and then waits for it for ever.

    first: the step that the run goes on from; TensorBoard drops later ones that other files in the folder have.
    raises: OSError where there is no room.
    """

    def __init__(self, folder: Path, first: int):
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self._event, self._flush_at = Event, 0.0
        folder.mkdir(parents=True, exist_ok=True)
        # Its name has only the second: a run that goes on in the same one would write over the file of the run before.
        self._file = EventsWriter(str(folder / "events"), f".{time.time_ns()}")
        self._put(first + 1, session_log=SessionLog(status=SessionLog.START))

    def add(self, row: dict[str, Any]) -> None:
        """The figures of a row, and its sample as text that Markdown leaves alone."""
        from tensorboardX.summary import scalar, text

        step, figures = row["step"], {name: x for name, x in row.items() if name not in ("step", "tokens", "seconds")}
        figures |= {f"peak_bytes/{name}": x for name, x in figures.pop("peak_by_category", {}).items()}
        if "sample" in figures:
            sample = figures.pop("prompt") + figures.pop("sample")
            self._put(step, summary=text("sample", "\n".join(f"    {line}" for line in sample.splitlines())))
        for name, value in figures.items():
            if value is not None:
                self._put(step, summary=scalar(name, value))
        if time.monotonic() >= self._flush_at:
            self.flush()

    def flush(self) -> None:
        """Waits until all is on the disk."""
        self._file.flush()
        self._flush_at = time.monotonic() + FLUSHED_EVERY_SECONDS

    def close(self) -> None:
        self._file.close()

    def _put(self, step: int, **content: Any) -> None:
        self._file.write_event(self._event(wall_time=time.time(), step=step, **content))
