"""How well a trained Pythia knows text: python apps/evaluate.py --model runs/my-run --text book.txt --lambada lambada.jsonl

--text: perplexity by a sliding window, and bits per byte, which compare models of different vocabularies. --lambada: how often the
model finds the last word; each line of the file is a JSON object with a "text". A wrong argument or an unusable file ends with one
line and exit code 2.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while the imports run: the end, without a traceback

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from needle import files
from needle.command_line import Parser, exit_code, flag, run_program
from needle.data.text_corpus import decoded, is_json_lines
from needle.data.text_stream import UNFINISHED
from needle.errors import DataError, ShapeError
from needle.models import score_endings, score_text
from pythia_app.loading import MODEL_HELP, load_model
from pythia_app.options import DEVICE_HELP, PRECISION_HELP, device, model_dtype


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("evaluate.py", "Perplexity, bits per byte and last words of a trained Pythia.")
    parser.add_argument("--model", required=True, metavar="FOLDER", help=MODEL_HELP)
    parser.add_argument(
        "--text", action="append", default=[], metavar="FILE", help="text in UTF-8, scored behind an end-of-text token; repeatable"
    )
    parser.add_argument("--lambada", action="append", default=[], metavar="FILE", help='lines of {"text": ...}; repeatable')
    flag(parser, "window", type=int, help="positions that the model sees at a time (default: the most it was made for)")
    flag(parser, "stride", type=int, help="positions from one window to the next (default: half a window)")
    flag(parser, "batch_size", type=int, default=4, help="windows or texts at a time")
    flag(parser, "max_tokens", type=int, help="use only this many tokens of each text (default: all)")
    flag(parser, "precision", default="fp32", help=PRECISION_HELP)
    flag(parser, "device", default="auto", help=DEVICE_HELP)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    return exit_code("evaluate.py", lambda: run(parse(argv)), "stopped")


def run(options: argparse.Namespace) -> int:
    for name in ("window", "stride", "batch_size", "max_tokens"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ShapeError(f"[{name}] is {value} (accepted: at least 1)")
    if not options.text and not options.lambada:
        raise DataError("[evaluate] nothing to evaluate on (--text FILE, --lambada FILE, or both)")
    where, dtype = device(options.device), model_dtype(options.precision)
    endings = [(path, last_words(path)) for path in options.lambada]
    model, tokenizer = load_model(options.model, where, dtype)
    texts = [(path, *tokens(path, tokenizer, options.max_tokens)) for path in options.text]
    window = options.window or model.config.max_seq_len
    if window > model.config.max_seq_len:
        print(f"note: the window has {window} positions, and the model was made for {model.config.max_seq_len}", file=sys.stderr)
    stride = options.stride or max(window // 2, 1)
    if stride > window:
        raise ShapeError(f"[stride] is {stride} (accepted: at most the window, {window})")
    for path, ids, text_bytes in texts:
        perplexity(path, ids, text_bytes, model, window, stride, options)
    for path, examples in endings:
        words(path, examples, model, tokenizer, window, options)
    return 0


def tokens(path: str, tokenizer, most: int | None) -> tuple[np.ndarray, int]:
    """The ids of a text, at most ``most`` of them, and how many bytes of text all ids but the first stand for.

    If the tokenizer has an end-of-text token, that comes first, so that the text's own first token is predicted, too.
    """
    start = [] if tokenizer.end_of_text is None else [tokenizer.end_of_text]
    found, count, read_bytes, decoded_bytes = [np.array(start, np.int32)], 0, 0, 0

    def parts() -> Iterator[str]:
        nonlocal read_bytes
        for part in read(path, "text"):
            read_bytes += len(part.encode())
            yield part

    for ids in tokenizer.encode_parts(parts()):
        ids = ids[: None if most is None else most - count].astype(np.int32)
        if most is not None:
            decoded_bytes += len(tokenizer.decode(ids).encode())
        found.append(ids)
        count += len(ids)
        if count == most:
            break
    if len(start) + count < 2:
        raise DataError(f"[text] too short: {path} has {count} tokens (at least {2 - len(start)})")
    ids = np.concatenate(found)
    # Of the first token, where it is only read; the part of a character, as which it may end, is the next tokens'.
    unasked = 0 if start else len(tokenizer.decode(ids[:1]).rstrip(UNFINISHED).encode())
    # A whole text counts with its own bytes, the same for every tokenizer: one that normalizes decodes to other bytes.
    return ids, (decoded_bytes if count == most else read_bytes) - unasked


def perplexity(path: str, ids: np.ndarray, text_bytes: int, model, window: int, stride: int, options: argparse.Namespace) -> None:
    began = time.perf_counter()
    live = sys.stderr.isatty()

    def progress(done: int) -> None:
        # Without the path, as a line that is longer than the terminal would scroll.
        print(f"\r{done:,} of {len(ids) - 1:,} tokens", end="", file=sys.stderr, flush=True)

    score = score_text(model, ids, window, stride, options.batch_size, progress if live else None)
    if live:
        print(file=sys.stderr)
    seconds = time.perf_counter() - began
    check(path, score.nats)
    print(
        f"{path}: loss {score.loss:.4f} nats per token, perplexity {readable(score.perplexity)}, bits per byte "
        f"{score.bits_per_byte(text_bytes):.4f}; {text_bytes:,} bytes, {score.tokens:,} tokens, window {window}, stride {stride}, "
        f"{score.tokens / seconds:,.0f} tokens/s",
        flush=True,
    )


def words(path: str, examples: list[tuple[int, str, str]], model, tokenizer, window: int, options: argparse.Namespace) -> None:
    pairs = [split_ids(tokenizer, context, word) for _, context, word in examples]
    for (number, *_), (context, word) in zip(examples, pairs):
        if not len(context) or not 1 <= len(word) <= window:
            raise DataError(
                f"[lambada] line {number} of {path} has {len(context)} tokens before its last word and {len(word)} in it "
                f"(accepted: at least 1, and 1 to the window, {window})"
            )
    score = score_endings(model, pairs, window, options.batch_size)
    check(path, score.nats)
    print(
        f"{path}: {score.correct:,} of {score.words:,} last words right, accuracy {score.accuracy:.2%}, perplexity per word "
        f"{readable(score.perplexity)}",
        flush=True,
    )


def split_ids(tokenizer, context: str, word: str) -> tuple[np.ndarray, np.ndarray]:
    """The ids of a context, and those that the word adds to them: alone it may have others than behind it."""
    before = tokenizer.encode(context)
    return before, tokenizer.encode(context + word)[len(before) :]


def readable(perplexity: float) -> str:
    return f"{perplexity:,.2f}" if perplexity < 1e9 else f"{perplexity:.3g}"


def check(path: str, nats: float) -> None:
    if not math.isfinite(nats):
        raise FloatingPointError(f"[evaluate] the loss on {path} is {nats} (the model's weights may be broken)")


def read(path: str, flag: str) -> Iterator[str]:
    """The text of a file, some at a time, with line ends as in training."""

    def parts() -> Iterator[bytes]:
        if flag == "text" and is_json_lines(Path(path)):
            raise DataError(f"[text] no text but JSON lines: {path} (a text file; --lambada takes such lines)")
        try:
            with open(files.home(path), "rb") as file:
                while part := file.read(1 << 20):
                    yield part + file.readline(1 << 20)
        except (OSError, ValueError) as error:  # ValueError: no path at all
            raise DataError(f"[{flag}] cannot read {path}: {files.reason(error)} (a text file in UTF-8)") from error

    return decoded(parts(), path, flag)


def last_words(path: str) -> list[tuple[int, str, str]]:
    """(number of the line, all but the last word, the last word with the white space before it) of each line's text."""
    found = []
    for number, line in enumerate("".join(read(path, "lambada")).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"].strip()
            text.encode()  # JSON may hold half a character
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise DataError(f'[lambada] line {number} of {path} is no JSON object with a "text" of whole characters') from None
        parts = re.fullmatch(r"(.*\S)(\s+\S+)", text, re.DOTALL)
        if parts is None:
            raise DataError(f"[lambada] line {number} of {path} has fewer than two words")
        found.append((number, parts[1], parts[2]))
    if not found:
        raise DataError(f'[lambada] no texts in {path} (lines of {{"text": ...}})')
    return found


if __name__ == "__main__":
    run_program(main)
