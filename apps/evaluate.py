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
import re
import sys
import time

import numpy as np

from needle import files
from needle.errors import DataError, ShapeError
from needle.models import score_endings, score_text
from pythia_app.command_line import Parser, exit_code, flag, standard_streams
from pythia_app.loading import MODEL_HELP, load_model
from pythia_app.options import DEVICES, device


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("evaluate.py", "Perplexity, bits per byte and last words of a trained Pythia.")
    parser.add_argument("--model", required=True, metavar="FOLDER", help=MODEL_HELP)
    parser.add_argument("--text", action="append", default=[], metavar="FILE", help="text in UTF-8; repeatable")
    parser.add_argument("--lambada", action="append", default=[], metavar="FILE", help='lines of {"text": ...}; repeatable')
    flag(parser, "window", type=int, help="positions that the model sees at a time (default: what it was made for)")
    flag(parser, "stride", type=int, help="how far the window moves on (default: half of it)")
    flag(parser, "batch_size", type=int, default=4, help="windows or texts at a time")
    flag(parser, "max_tokens", type=int, help="of each text use so many tokens (default: all)")
    flag(parser, "device", default="auto", help=f"auto (cuda if there is one, else cpu), {', '.join(DEVICES)}")
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
    where = device(options.device)
    texts = [(path, read(path)) for path in options.text]
    endings = [(path, last_words(path)) for path in options.lambada]
    model, tokenizer = load_model(options.model, where)
    window = options.window or model.config.max_seq_len
    stride = options.stride or max(window // 2, 1)
    if stride > window:
        raise ShapeError(f"[stride] is {stride} (accepted: at most the window, {window})")
    for path, text in texts:
        perplexity(path, text, model, tokenizer, window, stride, options)
    for path, examples in endings:
        words(path, examples, model, tokenizer, window, options)
    return 0


def perplexity(path: str, text: str, model, tokenizer, window: int, stride: int, options: argparse.Namespace) -> None:
    """A token for the beginning of a text, where the tokenizer has one, lets the first token be predicted too."""
    ids = tokenizer.encode(text)[: options.max_tokens]
    start = [] if tokenizer.end_of_text is None else [tokenizer.end_of_text]
    if len(start) + len(ids) < 2:
        raise DataError(f"[text] too short: {path} has {len(ids)} tokens (at least {2 - len(start)})")
    predicted = ids if start else ids[1:]
    text_bytes = len(tokenizer.decode(predicted).encode())
    began = time.perf_counter()
    live = sys.stderr.isatty()

    def progress(done: int) -> None:
        print(f"\r{path}: {done:,} of {len(predicted):,} tokens", end="", file=sys.stderr, flush=True)

    score = score_text(
        model, np.concatenate([start, ids]).astype(np.int64), window, stride, options.batch_size, progress if live else None
    )
    if live:
        print(file=sys.stderr)
    seconds = time.perf_counter() - began
    print(
        f"{path}: loss {score.loss:.4f} nats per token, perplexity {score.perplexity:,.2f}, bits per byte "
        f"{score.bits_per_byte(text_bytes):.4f}; {text_bytes:,} bytes, {score.tokens:,} tokens, window {window}, stride {stride}, "
        f"{score.tokens / seconds:,.0f} tokens/s",
        flush=True,
    )


def words(path: str, examples: list[tuple[str, str]], model, tokenizer, window: int, options: argparse.Namespace) -> None:
    pairs = [(tokenizer.encode(context), tokenizer.encode(word)) for context, word in examples]
    score = score_endings(model, pairs, window, options.batch_size)
    print(
        f"{path}: {score.correct:,} of {score.words:,} last words right, accuracy {score.accuracy:.2%}, perplexity per word "
        f"{score.perplexity:,.2f}",
        flush=True,
    )


def read(path: str) -> str:
    try:
        return files.home(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"[text] cannot read {path}: {error.strerror or error} (a text file)") from error
    except UnicodeDecodeError as error:
        raise DataError(f"[text] not UTF-8 text: {path}: {error}") from error


def last_words(path: str) -> list[tuple[str, str]]:
    """(all but the last word, the last word with the white space before it) of each line's text."""
    found = []
    for number, line in enumerate(read(path).split("\n"), start=1):
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
        found.append((parts[1], parts[2]))
    if not found:
        raise DataError(f'[lambada] no texts in {path} (lines of {{"text": ...}})')
    return found


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    standard_streams()
    sys.exit(main())
