"""Continue text with a trained Pythia: python apps/generate.py --model runs/my-run --prompt "def main("

The text goes to stdout as it is made, figures to stderr. Ctrl-C ends it after what is there (exit code 130). A wrong argument or an
unusable model ends with one line and exit code 2.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while the imports run: the end, without a traceback

import argparse
import sys
import time

import numpy as np

from needle.command_line import Parser, exit_code, flag, run_program
from needle.data.text_stream import TextStream
from needle.errors import DataError
from needle.models import GenerationConfig
from pythia_app import printable
from pythia_app.loading import MODEL_HELP, load_model
from pythia_app.options import DEVICE_HELP, PRECISION_HELP, device, model_dtype

SAMPLING = ("temperature", "top_k", "top_p")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("generate.py", "Continue text with a trained Pythia.")
    parser.add_argument("--model", required=True, metavar="FOLDER", help=MODEL_HELP)
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="what to continue; repeatable (default: stdin)")
    choosing = parser.add_argument_group("choosing tokens (names and meaning as in transformers)")
    flag(choosing, "max_new_tokens", type=int, default=128, help="the most tokens that are added")
    flag(choosing, "do_sample", action="store_true", help="draw tokens instead of taking the likeliest")
    flag(choosing, "temperature", type=float, default=1.0, help="below 1 sharper, above 1 flatter")
    flag(choosing, "top_k", type=int, default=50, help="draw only from this many of the likeliest (0: all)")
    flag(choosing, "top_p", type=float, default=1.0, help="draw only from the likeliest that have this probability together")
    flag(choosing, "repetition_penalty", type=float, default=1.0, help="above 1: tokens that are there already become less likely")
    flag(choosing, "eos_token_id", type=int, action="append", metavar="ID", help="stop at it; repeatable (default: end of a text)")
    flag(choosing, "ignore_eos", action="store_true", help="go on after the end of a text")
    flag(choosing, "seed", type=int, default=0, help="of the random numbers")
    flag(parser, "precision", default="fp32", help=PRECISION_HELP)
    flag(parser, "device", default="auto", help=DEVICE_HELP)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    return exit_code("generate.py", lambda: run(parse(argv)))


def run(options: argparse.Namespace) -> int:
    names = ("max_new_tokens", "do_sample", *SAMPLING, "repetition_penalty", "seed")
    config = GenerationConfig(**{name: getattr(options, name) for name in names})
    where, dtype = device(options.device), model_dtype(options.precision)
    texts = options.prompt if options.prompt is not None else [read_stdin()]
    for text in texts:
        if any("\ud800" <= c <= "\udfff" for c in text):
            raise DataError("[prompt] not valid UTF-8 (text in UTF-8)")
    model, tokenizer = load_model(options.model, where, dtype)
    ends = [i for i in (*model.generation_config.eos_ids, tokenizer.end_of_text) if i is not None]
    stops = [] if options.ignore_eos else options.eos_token_id or ends
    prompts = [tokenizer.encode(text) for text in texts]
    if any(len(p) == 0 for p in prompts) and tokenizer.end_of_text is None:
        raise DataError("[prompt] empty, and the tokenizer has no token to begin a text with (at least one character)")
    prompts = [p if len(p) else np.array([tokenizer.end_of_text]) for p in prompts]
    source = model.stream(prompts, config, eos_token_id=stops)
    if not config.do_sample and any(getattr(config, name) != getattr(GenerationConfig, name) for name in SAMPLING):
        note(f"{', '.join(SAMPLING)} have no effect without --do_sample")
    longest = max(map(len, prompts)) + config.max_new_tokens
    if longest > model.config.max_seq_len:
        note(f"up to {longest} positions, and the model was made for {model.config.max_seq_len}")
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    return show(source, texts, prompts, stops, tokenizer)


def read_stdin() -> str:
    if sys.stdin.isatty():
        note("reading the prompt from the terminal; end it with Ctrl-D")
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig").replace("\r\n", "\n")  # as texts are read that models learn from
    except UnicodeDecodeError as error:
        raise DataError(f"[prompt] stdin is not UTF-8 text: {error}") from error


def show(source, texts: list[str], prompts: list[np.ndarray], stops: list[int], tokenizer) -> int:
    """Writes the texts to stdout, one after the other: the first that has not ended as it grows, while later ones are collected."""
    streams = [TextStream(tokenizer.decode, prompt) for prompt in prompts]
    several = len(prompts) > 1
    waiting = [f"--- {b + 1} of {len(prompts)} ---\n{text}" if several else text for b, text in enumerate(texts)]
    running, made, steps, stopped = [True] * len(prompts), 0, 0, False
    shown = 0

    def say() -> None:
        nonlocal shown
        while shown < len(prompts):
            piece, waiting[shown] = waiting[shown], ""
            write(piece)
            if running[shown]:
                return
            shown += 1

    def end(b: int) -> None:
        running[b] = False
        waiting[b] += streams[b].end() + "\n"

    begin = first = now = time.perf_counter()
    say()
    try:
        for ids in source:
            now = time.perf_counter()
            first = first if steps else now
            steps += 1
            for b, token in enumerate(ids):
                if not running[b]:
                    continue
                made += 1
                if token in stops:
                    end(b)
                else:
                    waiting[b] += streams[b].put(token)
            say()
    except KeyboardInterrupt:
        stopped = True
    for b in np.flatnonzero(running):
        end(b)
    say()
    if steps:
        per_step = made / steps
        rate = f", {(steps - 1) * per_step / (now - first):,.1f} tokens/s" if steps > 1 else ""
        read = sum(map(len, prompts))
        print(f"{made} tokens in {now - begin:.2f} s{rate}; reading {read} took {first - begin:.2f} s", file=sys.stderr)
    if stopped:
        print("stopped", file=sys.stderr)
    return 130 if stopped else 0


def write(text: str) -> None:
    sys.stdout.write(printable(text))
    sys.stdout.flush()


def note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


if __name__ == "__main__":
    run_program(main)
