"""The command line: ``python -m needle plan`` says what training a Pythia takes before anything is allocated."""

from __future__ import annotations

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while the imports run: the end, without a traceback

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from . import __version__, files, memory
from .amp import PRECISIONS
from .backend_ndarray.block_layout import BLOCK_SIZES
from .command_line import Parser, exit_code, flag, run_program
from .errors import DataError, ShapeError
from .memory.units import readable, table
from .models import SIZES, PythiaConfig, check_blocks, checkpointed, layers_or_bytes, plannable, size_name
from .nn import PATTERNS

# What a GPU's memory holds beside the allocator's: the context and the libraries' code. Not measured by needle: a common size.
RESERVED = 512 << 20
# Whole numbers of the plan: default, the most, meaning. The most is far above what runs.
NUMBERS = {
    "vocab_size": (50304, 1 << 20, "token ids"),
    "batch_size": (8, 1 << 16, "sequences in a micro-batch"),
    "seq_len": (512, 1 << 17, "positions in a sequence"),
    "accumulation_steps": (1, 1 << 20, "micro-batches in a step"),
    "block_size": (64, BLOCK_SIZES[-1], "edge of a block in positions"),
    "window": (2, 1 << 20, "blocks of the local pattern: its own and those before it"),
    "depth": (2, 1 << 20, "names of a module's path that a row of the table stands for"),
}


def main(argv: list[str] | None = None) -> int:
    parser = Parser("python -m needle", "needle's command line.")
    parser.add_argument("--version", action="version", version=f"needle {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    add_plan(commands)

    def run() -> int:
        options = parser.parse_args(argv)
        return options.run(options)

    return exit_code(parser.prog, run)


def add_plan(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        help="what training a Pythia takes: to the byte, in seconds, allocating nothing",
        description="Runs two training steps on the device without data and says where every byte is at the peak.",
    )
    plan.add_argument("--model", type=size_name, default="70m", metavar="SIZE", help=f"one of {', '.join(SIZES)}")
    for name, (value, _, what) in NUMBERS.items():
        flag(plan, name, type=int, default=value, help=what)
    flag(
        plan, "checkpoint_layers", default="0", metavar="N|SIZE",
        help="compute layers again in backward, N at a time, instead of keeping their arrays (0: keep all); or as few as keep "
        "the peak within SIZE, like 2GiB",
    )  # fmt: skip
    plan.add_argument("--precision", default="fp32", choices=PRECISIONS, help="of products; parameters stay float32")
    plan.add_argument("--sparse", action="store_true", help="block-sparse attention instead of dense")
    plan.add_argument("--pattern", default="local", choices=PATTERNS, help="blocks that a block sees")
    plan.add_argument(
        "--gpu",
        action="append",
        default=[],
        metavar="NAME",
        help=f"say what fits there: {', '.join(memory.GPUS)}, or 16GiB; repeatable",
    )
    plan.add_argument("--html", default=None, metavar="FILE", help="draw the memory over time, of building and of both steps")
    plan.set_defaults(run=run_plan)


def run_plan(options: argparse.Namespace) -> int:
    for name, (_, most, _) in NUMBERS.items():
        if not 1 <= getattr(options, name) <= most:
            raise ShapeError(f"[{name}] is {getattr(options, name)} (accepted: 1 to {most:,})")
    budgets = [(name, memory.parse_bytes(name, "gpu")) for name in options.gpu]
    for name, budget in budgets:
        if budget <= RESERVED:
            raise ShapeError(
                f"[gpu] {name} is {readable(budget)} (accepted: more than the {readable(RESERVED)} that stay reserved)"
            )
    config = PythiaConfig.named(options.model, vocab_size=options.vocab_size, max_seq_len=options.seq_len)
    if options.sparse:
        check_blocks(options.seq_len, options.block_size)
        config = config.with_sparse(options.pattern, options.block_size, options.window)
    elif options.pattern != "local":
        print(f"note: --pattern {options.pattern} has no effect without --sparse", file=sys.stderr)
    shape = (options.batch_size, options.seq_len, options.accumulation_steps, options.precision)
    config = checkpointed(config, layers_or_bytes(options.checkpoint_layers), *shape)
    attention = f"{options.pattern if options.sparse else 'dense'} attention"
    found = memory.plan(plannable(config, *shape))
    print(
        f"Pythia-{options.model}, {config.parameter_count():,} parameters, {attention}, "
        f"micro-batches of {options.batch_size} x {options.seq_len} tokens, {options.accumulation_steps} per step, AdamW, "
        f"{options.precision}"
    )
    print(found.table(options.depth))
    print(found.where)
    print()
    print(checkpointing(config, shape, found.peak_bytes))
    peak_of = cache(
        lambda batch, precision, **changes: memory.peak_bytes(plannable(replace(config, **changes), batch, *shape[1:3], precision))
    )
    for name, budget in budgets:
        print()
        print(fits(config, peak_of, name, budget, found.peak_bytes))
    if options.html is not None:
        try:
            memory.picture(found.trace, files.home(options.html))
        except (OSError, ModuleNotFoundError) as error:
            raise DataError(f"[html] cannot draw {options.html}: {files.reason(error)} (plotly, and room for a file)") from error
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
    """The ways of checkpointing to show: none, that of ``config``, and all layers, 1 to ``most`` at a time."""
    wanted = [0, config.checkpoint_segments, *range(1, most + 1)]
    return list(dict.fromkeys(replace(config, checkpoint_layers=n).checkpoint_segments for n in wanted))


def fits(config: PythiaConfig, peak_of: Callable[..., int], name: str, budget: int, peak: int) -> str:
    """Whether the plan fits into ``budget`` bytes, and a table of the largest micro-batch that does, by setting."""
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
    run_program(main)
