"""Tokenize text for training: python apps/prepare_data.py texts/ more.jsonl.gz --tokenizer tokenizer.json --output data/mine

makes data/mine.bin and data/mine.idx, Megatron's format, for `train_pythia.py --dataset data/mine`. Ctrl-C ends it (exit code 130);
the same command goes on after whatever ended it. What cannot work ends with one line and exit code 2.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while the imports run: the end, without a traceback

import argparse
import math
import os
import sys
import time

from needle import cpu
from needle.command_line import Parser, exit_code, flag, run_program
from needle.data.prepare import Prepared, Progress, prepare
from needle.data.text_tokenizer import END_OF_TEXT
from needle.errors import DataError
from pythia_app import command

SECONDS_A_LINE = 10  # where there is no terminal


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        "prepare_data.py", "Tokenize text files, .jsonl files and folders of them into a token file (Megatron's .bin and .idx)."
    )
    parser.add_argument(
        "inputs", nargs="+", metavar="INPUT",
        help="a text file (one document), a .jsonl (a document in each line), either as .gz, or a folder of such",
    )  # fmt: skip
    flag(
        parser, "output", required=True, metavar="PREFIX",
        help="what is made: PREFIX.bin, PREFIX.idx, and the tokenizer beside them",
    )  # fmt: skip
    flag(parser, "overwrite", action="store_true", help="replace a PREFIX that is there, once the new one is whole")
    tokens = parser.add_argument_group("tokens")
    flag(tokens, "tokenizer", metavar="FILE", help="a tokenizer.json")
    flag(tokens, "vocab_size", type=int, metavar="N", help="without --tokenizer: train byte-level BPE with N ids on a sample")
    flag(tokens, "end_of_text", default=END_OF_TEXT, metavar="TOKEN", help="the token after each document")
    flag(tokens, "no_end_of_text", action="store_true", help="put none there")
    reading = parser.add_argument_group("reading")
    flag(reading, "key", default="text", help="where the document is in the object of a .jsonl's line")
    flag(
        reading,
        "skip_invalid",
        action="store_true",
        help="leave out lines of a .jsonl that are no such object, instead of stopping",
    )
    running = parser.add_argument_group("running")
    flag(running, "workers", type=int, metavar="N", help="threads; the result does not depend on them (default: a core each)")
    flag(running, "save_every", type=float, default=10.0, metavar="SECONDS", help="of work that a kill can cost")
    flag(running, "restart", action="store_true", help="drop what an unfinished run of this PREFIX has made")
    options = parser.parse_args(argv)
    if not options.save_every >= 0 or math.isinf(options.save_every):
        raise DataError(f"[save_every] is {options.save_every} (accepted: 0 or more seconds)")
    if options.workers is None:  # a container's cores, or NEEDLE_NUM_THREADS, where needle has been compiled
        options.workers = cpu().num_threads() if cpu().enabled() else os.cpu_count() or 1
    return options


class Bar:
    """How far it is: a bar on a terminal, now and then a line elsewhere. On stderr."""

    def __init__(self) -> None:
        self._start = self._said = time.monotonic()
        self._first: tuple[int, int] | None = None  # bytes and tokens of the runs before
        self._bar = None
        if sys.stderr.isatty():
            try:
                from rich.console import Console
                from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

                columns = (
                    BarColumn(),
                    TextColumn("{task.percentage:.1f} %"),
                    TextColumn("{task.description}"),
                    TimeRemainingColumn(),
                )
                console = Console(stderr=True)
                if console.is_interactive:  # TERM=dumb is not: nothing would be seen
                    self._bar = Progress(*columns, console=console, transient=True)
            except ModuleNotFoundError:
                pass

    def __enter__(self) -> Bar:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("", total=None)
        return self

    def __exit__(self, *exc) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, now: Progress) -> None:
        self._first = self._first or (now.totals.text_bytes, now.totals.tokens)
        if self._bar is not None:
            self._bar.update(self._task, completed=now.done_bytes, total=now.all_bytes, description=self._line(now))
        elif time.monotonic() - self._said >= SECONDS_A_LINE:
            self._said = time.monotonic()
            print(f"{100 * now.done_bytes / max(now.all_bytes, 1):.1f} %  {self._line(now)}", file=sys.stderr, flush=True)

    def _line(self, now: Progress) -> str:
        assert self._first is not None
        seconds = max(time.monotonic() - self._start, 1e-9)
        text_bytes, tokens = now.totals.text_bytes - self._first[0], now.totals.tokens - self._first[1]
        return (
            f"{now.totals.documents:,} documents, {now.totals.tokens:,} tokens, {tokens / seconds:,.0f} tokens/s, "
            f"{text_bytes / seconds / 1e6:.2f} MB/s"
        )


def run(options: argparse.Namespace) -> int:
    start = time.monotonic()
    with Bar() as bar:
        done = prepare(
            options.inputs, options.output, tokenizer=options.tokenizer, vocab_size=options.vocab_size, key=options.key,
            end_of_text=None if options.no_end_of_text else options.end_of_text, workers=options.workers,
            overwrite=options.overwrite, restart=options.restart, skip_invalid=options.skip_invalid,
            save_every_s=options.save_every, report=bar,
        )  # fmt: skip
    say(done, time.monotonic() - start)
    return 0


def say(done: Prepared, seconds: float) -> None:
    totals = done.totals
    left_out = (
        (totals.empty, "empty documents"),
        (totals.invalid, "lines that are no object with a text"),
        (len(done.skipped), f"files that are no text: {done.skipped[0]}{' ...' * (len(done.skipped) > 1)}" if done.skipped else ""),
    )
    made = f"{totals.documents:,} documents, {totals.tokens:,} tokens of {totals.text_bytes:,} bytes"
    print(f"{done.prefix}.bin: {made} in {seconds:,.1f} s")
    for count, what in left_out:
        if count:
            print(f"left out: {count:,} {what}")
    if totals.cut:
        print(f"cut at {totals.cut:,} places of very long documents, where ids may not be those of the whole (docs/data.md)")
    print(f"train with: {command('--dataset', done.prefix, '--vocab_size', done.vocab_size)}")


def main(argv: list[str] | None = None) -> int:
    return exit_code("prepare_data.py", lambda: run(parse(argv)), "stopped; the same command goes on")


if __name__ == "__main__":
    run_program(main)
