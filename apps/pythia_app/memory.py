"""What a run takes before it is made: its plan, whether that fits, and what to change where it does not."""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import Any

from needle import memory
from needle.errors import ShapeError
from needle.memory import readable
from needle.memory.planning import Build
from needle.models import plannable
from pythia_app.trainer import make_config, planned_run


class Budget:
    """The plan of a run with these options on ``device``, and the memory that is there for it.

    bytes: ``--memory_limit``, or what the process may have, or what a GPU has left; 0: unknown. sparse: the kind of attention.
    """

    def __init__(self, options: Namespace, vocab_size: int, device, sparse: bool):
        self.options, self.vocab_size, self.sparse = options, vocab_size, sparse
        self.config = make_config(options, vocab_size, sparse)
        limit = memory.parse_bytes(options.memory_limit) if options.memory_limit else 0
        self._free = memory.available(device)
        there = self._free if device.is_gpu else memory.capacity(device)
        self.limited = 0 < limit <= (there or limit)
        self.bytes = limit if self.limited else there
        self._there = "the limit is {}" if self.limited else f"{device} has {{}}" + (" free" if device.is_gpu else "")
        self.advice = memory.advise(self.build_for, self._changes())

    def build_for(self, **changes: Any) -> Build:
        """The ``build`` of ``memory.plan`` for the run as it is, or with other values for some of its flags."""
        options = Namespace(**{**vars(self.options), **changes})
        config = make_config(options, self.vocab_size, self.sparse) if changes else self.config
        return plannable(config, *planned_run(options))

    def _changes(self) -> list[tuple[str, dict[str, Any]]]:
        """Changes that do not change a step's result: every layer computed again in backward, smaller micro-batches, or both."""
        batch, count = self.options.batch_size, self.options.accumulation_steps
        parts = [n for n in range(2, batch + 1) if batch % n == 0]
        smaller: list[dict[str, Any]] = [{"batch_size": batch // n, "accumulation_steps": count * n} for n in parts]
        found = smaller
        if self.options.checkpoint_layers != 1:
            again = {"checkpoint_layers": 1}
            found = [again, *smaller, *({**change, **again} for change in smaller)]
        return [(" ".join(f"--{name} {value}" for name, value in change.items()), change) for change in found]

    def peak(self) -> int:
        """Bytes that training will hold at its peak: the allocator's figure of a real run, exactly.

        raises: ShapeError, with a change that fits if there is one, if they are more than there are.
        """
        peak = memory.peak_bytes(self.build_for())
        if self.bytes and peak > self.bytes:
            name = "memory_limit" if self.limited else "memory"
            raise ShapeError(f"[{name}] {self._what_fits()} (`--plan` shows where it goes)")
        return peak

    def show(self) -> None:
        """The whole plan as a table, and whether it fits."""
        found = memory.plan(self.build_for())
        print(found)
        if self.bytes and found.peak_bytes > self.bytes:
            print(self._what_fits())
        else:
            print(f"fits: {self._there.format(readable(self.bytes) if self.bytes else 'an unknown amount')}")
            if note := self.caution(found.peak_bytes):
                print(f"note: {note}", file=sys.stderr)

    def caution(self, peak: int) -> str:
        """A note where ``peak`` may fit, but little would be left; else "". The allocator keeps up to 1/32 and 8 MiB for reuse."""
        if not (peak and 0 < self._free < peak + peak // 32 + (8 << 20)):
            return ""
        return f"the planned peak is {readable(peak)} of {readable(self._free)} free now; what libraries take comes on top"

    def _what_fits(self) -> str:
        return "; ".join(self.advice.text(self.bytes, self._there).splitlines())
