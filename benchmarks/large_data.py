"""Seconds and memory from the name of a large token file to a run's first batch.

    python benchmarks/large_data.py --folder runs --tokens 10_000_000_000 --documents 20_000_000

Writes Megatron's pair of so many random ids, which takes two bytes each on the disk and 32 for a document, opens it as
train_pythia.py does, makes a batch, and removes it. Memory is what Python and numpy allocate at the most (tracemalloc, in a second
opening), without the pages of files. Appends a JSON line to benchmarks/results/large_data.jsonl.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

from interleave import HERE, append_results, machine

sys.path.insert(0, str(HERE.parent / "python"))

import numpy as np

from needle.data.text import TokenBatches, load_text
from needle.data.token_files import TokenWriter

VOCAB_SIZE = 50304
PIECE_DOCUMENTS = 20_000


def first_batch(path: str) -> np.ndarray:
    data = load_text(path, vocab_size=VOCAB_SIZE)
    ids, _ = next(TokenBatches(data.train, 8, 512, vocab_size=VOCAB_SIZE, stride=data.stride(512)))
    return ids


def write(prefix: Path, tokens: int, documents: int) -> None:
    """Documents of one length; their ids repeat from piece to piece."""
    length = tokens // documents
    folder = prefix.parent / "partial"
    folder.mkdir()
    writer = TokenWriter(folder, VOCAB_SIZE)
    ids = np.random.default_rng(0).integers(0, VOCAB_SIZE, PIECE_DOCUMENTS * length)
    for first in range(0, documents, PIECE_DOCUMENTS):
        count = min(PIECE_DOCUMENTS, documents - first)
        writer.write(ids[: count * length], np.arange(1, count + 1) * length)
    writer.finish(prefix)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="for the files that are made and removed (default: the system's)")
    parser.add_argument("--tokens", type=int, default=10**10)
    parser.add_argument("--documents", type=int, default=2 * 10**7)
    options = parser.parse_args()
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        prefix = Path(folder) / "large"
        write(prefix, options.tokens, options.documents)
        start = time.perf_counter()
        batch = first_batch(f"{prefix}.bin")
        seconds = time.perf_counter() - start
        tracemalloc.start()
        first_batch(f"{prefix}.bin")
        _, peak = tracemalloc.get_traced_memory()
    print(f"{options.tokens:,} tokens: a batch of {batch.shape} after {seconds:.1f} s, at most {peak / 1e6:.0f} MB")
    row = {"case": "load", "tokens": options.tokens, "documents": options.documents, "seconds": seconds, "peak_bytes": peak}
    append_results(HERE / "results" / "large_data.jsonl", [{**machine(), **row}])


if __name__ == "__main__":
    main()
