"""The command line: ``python -m needle plan`` says what training a Pythia takes before anything is allocated."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from . import memory
from .amp import PRECISIONS
from .errors import ShapeError
from .memory.units import readable, table
from .models import SIZES, PythiaConfig, checkpointed, layers_or_bytes, plannable
from .nn import PATTERNS

# What a GPU's memory holds beside the allocator's: the context and the libraries' code. Not measured by needle: a common size.
RESERVED = 512 << 20


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m needle", description="needle's command line.")
    commands = parser.add_subparsers(dest="command", required=True)
    add_plan(commands)
    options = parser.parse_args(argv)
    try:
        code = options.run(options)
        sys.stdout.flush()
        return code
    except ShapeError as error:
        print(f"needle: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # as in `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python still wants to write
        return 1


def add_plan(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        help="what training a Pythia takes: to the byte, in seconds, allocating nothing",
        description="Runs two training steps on the device without data and says where every byte is at the peak.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    plan.add_argument("--model", default="70m", metavar="SIZE", help=f"one of {', '.join(SIZES)}")
    for name, value, what in (
        ("vocab_size", 50304, "token ids"),
        ("batch_size", 8, "sequences in a micro-batch"),
        ("seq_len", 512, "positions in a sequence"),
        ("accumulation_steps", 1, "micro-batches in a step"),
        ("block_size", 64, "edge of a block in positions"),
        ("window", 2, "blocks of the local pattern"),
    ):
        plan.add_argument(*_spellings(name), type=int, default=value, help=what)
    plan.add_argument(
        *_spellings("checkpoint_layers"), default="0", metavar="N|SIZE",
        help="layers at a time that are computed again in backward, 0: none; or as few as keep the peak within SIZE, like 2GiB",
    )  # fmt: skip
    plan.add_argument("--precision", default="fp32", choices=PRECISIONS, help="of products; parameters are float32 in each")
    plan.add_argument("--sparse", action="store_true", help="block-sparse attention")
    plan.add_argument("--pattern", default="local", choices=PATTERNS, help="of block-sparse attention")
    plan.add_argument(
        "--gpu", action="append", default=[], metavar="NAME", help=f"what fits: {', '.join(memory.GPUS)}, or 16GiB; repeatable"
    )
    plan.add_argument("--depth", type=int, default=2, help="names of a module's path that a row stands for")
    plan.add_argument("--html", default=None, metavar="FILE", help="draw the memory of the second step over time")
    plan.set_defaults(run=run_plan)


def _spellings(name: str) -> list[str]:
    return [f"--{name}"] + ([f"--{name.replace('_', '-')}"] if "_" in name else [])


def run_plan(options: argparse.Namespace) -> int:
    for name in ("vocab_size", "batch_size", "seq_len", "accumulation_steps", "block_size", "window", "depth"):
        if getattr(options, name) < 1:
            raise ShapeError(f"[{name}] is {getattr(options, name)} (accepted: at least 1)")
    budgets = [(name, memory.parse_bytes(name)) for name in options.gpu]
    config = PythiaConfig.named(options.model, vocab_size=options.vocab_size, max_seq_len=options.seq_len)
    if options.sparse:
        config = config.with_sparse(options.pattern, options.block_size, options.window)
    shape = (options.batch_size, options.seq_len, options.accumulation_steps, options.precision)
    config = checkpointed(config, layers_or_bytes(options.checkpoint_layers), *shape)
    attention = f"{options.pattern if options.sparse else 'dense'} attention"
    found = memory.plan(plannable(config, *shape))
    print(
        f"Pythia-{options.model}, {config.parameter_count():,} parameters, {attention}, "
        f"{options.batch_size} x {options.seq_len} tokens, {options.accumulation_steps} per step, AdamW, {options.precision}"
    )
    print(found.table(options.depth))
    print(found.where)
    print()
    print(checkpointing(config, shape, found.peak_bytes))
    peak_of = cache(
        lambda batch, precision, **changes: memory.peak_bytes(
            plannable(replace(config, **changes), batch, options.seq_len, options.accumulation_steps, precision)
        )
    )
    for name, budget in budgets:
        print()
        print(fits(config, peak_of, name, budget, found.peak_bytes))
    if options.html:
        memory.picture(found.trace, options.html)
        print(f"drawn: {options.html}")
    return 0


def checkpointing(config: PythiaConfig, shape: tuple[int, int, int, str], peak: int) -> str:
    """The peak of the plan, and with other layers checkpointed, a row each."""
    rows = [["layers computed again", "at a time", "peak"]]
    for segments in _ways(config, 2):
        planned = segments == config.checkpoint_segments
        found = peak if planned else memory.peak_bytes(plannable(replace(config, checkpoint_layers=segments), *shape))
        again = f"{sum(segments)} of {config.layers}{' (planned above)' if planned else ''}"
        rows.append([again, str(max(segments, default="-")), readable(found)])
    return table(rows)


def _ways(config: PythiaConfig, most: int) -> list[tuple[int, ...]]:
    """What to checkpoint: nothing, what ``config`` says, and all layers, one up to ``most`` at a time."""
    wanted = [0, config.checkpoint_segments, *range(1, most + 1)]
    return list(dict.fromkeys(replace(config, checkpoint_layers=n).checkpoint_segments for n in wanted))


def fits(config: PythiaConfig, peak_of: Callable[..., int], name: str, budget: int, peak: int) -> str:
    """What of the plan, and how much more, fits into ``budget`` bytes."""
    verdict = "fits" if peak <= budget - RESERVED else "does not fit"
    settings = [
        (
            f"{precision}, {sum(segments)} of {config.layers} layers computed again",
            {"precision": precision, "checkpoint_layers": segments},
        )
        for precision in PRECISIONS
        for segments in _ways(config, 1)
    ]
    return (
        f"{name}: {readable(budget)}, less {readable(RESERVED)} assumed for the driver and libraries: this plan {verdict}\n"
        + memory.fitting_table(peak_of, budget, settings, RESERVED)
    )


if __name__ == "__main__":
    sys.exit(main())
