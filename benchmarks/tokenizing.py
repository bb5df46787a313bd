"""Tokens per second of needle's ``prepare`` beside what the package ``tokenizers`` reaches alone, and the memory that it takes.

    python benchmarks/tokenizing.py speed --text FOLDER --tokenizer FILE --megabytes 200 --slices 10
    python benchmarks/tokenizing.py memory --text FOLDER --tokenizer FILE --megabytes 1000
    python benchmarks/tokenizing.py memory --text FOLDER --tokenizer FILE --megabytes 600 --characters 60000000

The text is that of FOLDER's .txt files over and over, each time with other words: documents of some thousand characters in .jsonl
files. Speed: slice by slice, with as many threads, ``encode_batch`` and ``encode_batch_fast`` of ``tokenizers`` on batches of 1,000
documents, and ``prepare`` from the file to the token file on the disk. Memory: half of the text as .jsonl, half as one text file
without a line end; the resident memory of the whole process at its peak, which has no other processes. Appends JSON lines to
benchmarks/results/tokenizing.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from interleave import HERE, append_results, cores, machine

ROOT = HERE.parent
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "apps")]


def documents(folder: Path, characters: int = 4000) -> Iterator[str]:
    """Without end. Each time round some of the words are others, so that no cache knows them all."""
    raw = "\n".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.txt")))
    raw *= -(-characters // max(1, len(raw)))
    cuts = [raw[i : i + characters] for i in range(0, len(raw), characters)]
    if not cuts:
        sys.exit(f"no text in {folder} (a folder of .txt files)")
    words, rng = sorted(set(re.findall(r"[a-z]{4,}", raw))), random.Random(0)
    while True:
        for cut in cuts:
            yield re.sub(r"[a-z]{4,}", lambda found: rng.choice(words) if rng.random() < 0.1 else found[0], cut)


def write_lines(path: Path, source: Iterator[str], nbytes: int) -> list[str]:
    """A .jsonl of about so many bytes, and its documents."""
    written, kept = 0, []
    with open(path, "w", encoding="utf-8") as file:
        while written < nbytes:
            kept.append(next(source))
            written += file.write(json.dumps({"text": kept[-1]}, ensure_ascii=False) + "\n")
    return kept


def speed(options: argparse.Namespace, folder: Path) -> list[dict]:
    os.environ["RAYON_NUM_THREADS"] = str(options.workers)
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    import tokenizers

    from needle.data.prepare import prepare

    alone = tokenizers.Tokenizer.from_file(str(options.tokenizer))
    source, times = documents(options.text), {"encode_batch": [], "encode_batch_fast": [], "prepare": []}
    cpu = {name: [] for name in times}
    tokens = 0
    for i in range(options.slices):
        path = folder / f"{i}.jsonl"
        texts = write_lines(path, source, options.megabytes * 10**6 // options.slices)
        for name in times:
            start, cpu_start = time.perf_counter(), time.process_time()
            if name == "prepare":
                done = prepare([path], folder / "out", tokenizer=options.tokenizer, workers=options.workers, overwrite=True)
                tokens += done.totals.tokens
            else:
                for first in range(0, len(texts), 1000):
                    getattr(alone, name)(texts[first : first + 1000], add_special_tokens=False)
            times[name].append(time.perf_counter() - start)
            cpu[name].append(time.process_time() - cpu_start)
        path.unlink()
        print({name: round(seconds[-1], 1) for name, seconds in times.items()}, flush=True)
    about, records = machine(), []
    for name in ("encode_batch", "encode_batch_fast"):
        ratio = statistics.median(a / b for a, b in zip(times[name], times["prepare"]))
        cpu_ratio = statistics.median(a / b for a, b in zip(cpu[name], cpu["prepare"]))
        print(f"prepare over {name}: {ratio:.2f} in tokens per second, {cpu_ratio:.2f} per second of processor time")
        row = {"case": "speed", "alone": name, "threads": options.workers, "megabytes": options.megabytes, "tokens": tokens}
        row |= {"seconds": times["prepare"], "alone_seconds": times[name], "ratio": ratio, "cpu_ratio": cpu_ratio}
        records.append({**about, **row})
    return records


def highest_resident(pid: int) -> int:
    """Bytes, since the program began (which ru_maxrss is not: it knows the process from before that)."""
    try:
        found = re.search(r"VmHWM:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except FileNotFoundError:
        found = None
    return int(found[1]) * 1024 if found else 0


def memory(options: argparse.Namespace, folder: Path) -> list[dict]:
    source, half = documents(options.text, options.characters), options.megabytes * 10**6 // 2
    write_lines(folder / "half.jsonl", source, half)
    with open(folder / "half.txt", "w", encoding="utf-8") as file:
        written = 0
        while written < half:
            written += file.write(next(source).replace("\n", " "))
    command = [sys.executable, str(ROOT / "apps" / "prepare_data.py"), str(folder / "half.jsonl"), str(folder / "half.txt")]
    command += ["--tokenizer", str(options.tokenizer), "--output", str(folder / "out"), "--workers", str(options.workers)]
    start, peak = time.perf_counter(), 0
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT / "python")}) as process:
        while process.poll() is None:
            time.sleep(0.1)
            peak = max(peak, highest_resident(process.pid))
    seconds, nbytes = time.perf_counter() - start, sum(path.stat().st_size for path in folder.glob("half.*"))
    print(f"{nbytes:,} bytes in {seconds:.0f} s, exit code {process.returncode}; peak {peak / 1e6:.0f} MB resident")
    row = {"case": "memory", "threads": options.workers, "bytes": nbytes, "characters": options.characters}
    row |= {"seconds": seconds, "peak_rss_bytes": peak}
    return [{**machine(), **row}] if process.returncode == 0 else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=("speed", "memory"))
    parser.add_argument("--text", type=Path, required=True, help="a folder of .txt files")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--slices", type=int, default=10)
    parser.add_argument("--characters", type=int, default=4000, help="of a document, in the case memory")
    parser.add_argument("--workers", type=int, default=cores())
    parser.add_argument("--folder", type=Path, help="for the files that are made and removed (default: the system's)")
    options = parser.parse_args()
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        append_results(
            HERE / "results" / "tokenizing.jsonl", {"speed": speed, "memory": memory}[options.case](options, Path(folder))
        )


if __name__ == "__main__":
    main()
