"""Train Pythia on text: python apps/train_pythia.py --sparse

Everything it makes goes into one folder: checkpoints, metrics.jsonl, loss.png, sample.txt. Ctrl-C saves and says how to go on
(exit code 130), SIGTERM saves, too (143). The same command with --resume goes on after whatever ended it. A wrong argument or
unusable text ends with one line and exit code 2.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while the imports run: the end, without a traceback

import math
import shlex
import sys
import time
from pathlib import Path

from needle.checkpoints import CheckpointFolder
from needle.data.text import TextData, load_text, unigram_entropy
from needle.memory import LeakCheck, set_limit
from pythia_app import checkpoint
from pythia_app.command_line import exit_code
from pythia_app.memory import Budget
from pythia_app.options import device, parse, run_folder
from pythia_app.report import METRICS, Reporter, alone_in, duration, loss_picture, mib, table, writing
from pythia_app.trainer import StopRequest, Trainer, compare_dense


def main(argv: list[str] | None = None) -> int:
    return exit_code("train_pythia.py", lambda: start(argv), "stopped at once; the last checkpoint is as it was")


def start(argv: list[str] | None) -> int:
    """A new run, or one that goes on from a checkpoint."""
    options = parse(argv)
    where = options.load_checkpoint
    if where is None and options.resume and CheckpointFolder(options.checkpoint_dir).names():
        where = options.checkpoint_dir
    if where is None:
        return run(options)
    saved, problems = checkpoint.find(Path(where))
    for problem in problems:
        print(f"{problem}; going on from {saved.name}", file=sys.stderr)
    state = checkpoint.read_state(saved)
    return run(parse(argv, state["options"]), saved, state)


def run(options, saved: Path | None = None, state: dict | None = None) -> int:
    """saved, state: the checkpoint to go on from and what it says; ``options`` are made with it."""
    where = device(options.device)
    folder = None if options.compare_dense or options.eval_only or options.plan else run_folder(options, saved)
    kinds = (False, True) if options.compare_dense else (options.sparse,)
    if options.plan:
        for sparse in kinds:
            Budget(options, options.vocab_size, where, sparse).show()
        return 0
    text = load_text(options.dataset, vocab_size=options.vocab_size, tokenizer=options.tokenizer)
    unigram = unigram_entropy(text.train, text.heldout, text.vocab_size)
    print(
        f"{text.name}: {len(text.train):,} training tokens, {len(text.heldout):,} held out, vocabulary {text.vocab_size:,}; "
        f"token frequencies alone give {unigram:.3f} nats",
        flush=True,
    )
    budgets = [Budget(options, text.vocab_size, where, sparse) for sparse in kinds]
    configs = [budget.config for budget in budgets]
    planned = 0 if options.eval_only else max(budget.peak() for budget in budgets)
    set_limit(options.memory_limit, where)
    if options.compare_dense:
        with StopRequest() as stop:
            rows = compare_dense(options, configs, text, where, stop)
        print(table(rows, list(rows[0])))
        return stop.exit_code if stop.asked else 0
    trainer = Trainer(options, configs[0], text, where)
    if saved is not None and state is not None:
        checkpoint.load(saved, trainer.model, None if options.eval_only else trainer.optimizer)
        if not options.eval_only:
            trainer.load_state(state)
    layout, again = trainer.config.layout(options.seq_len), sum(trainer.config.checkpoint_segments)
    print(
        f"Pythia-{options.model} on {where}: {trainer.config.parameter_count():,} parameters; "
        f"{configs[0].pattern or 'dense'} attention, {layout.nnz_total} blocks of {layout.block}, density "
        f"{layout.density:.2f}; {options.batch_size} x {options.seq_len} tokens, {options.accumulation_steps} per step, "
        f"{options.precision}"
        + (f"; {again} of {trainer.config.layers} layers computed again in backward" if again else "")
        + (f"; planned peak memory {mib(planned)}" if planned else ""),
        flush=True,
    )
    if folder is None:
        say_held_out(print, trainer.held_out_loss(text), unigram)
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    with alone_in(folder), budgets[0].advice:
        return train(options, trainer, text, unigram, folder, saved)


def train(options, trainer: Trainer, text: TextData, unigram: float, folder: Path, saved: Path | None) -> int:
    """saved: the checkpoint that it goes on from."""
    start, first = time.perf_counter(), trainer.step
    checkpoints = CheckpointFolder(folder, options.keep_last)

    def save() -> Path:
        return checkpoint.save(checkpoints, trainer.model, trainer.optimizer, trainer.state(), text.tokenizer)

    def evaluate(saved: Path) -> float:
        """After saving, so that what is killed meanwhile has lost nothing."""
        held = trainer.held_out_loss(text)
        if math.isfinite(held):
            checkpoints.mark(saved, held)
            report.record({"step": trainer.step, "held_out_loss": held, "unigram_entropy": unigram})
        return held

    with Reporter(folder, trainer.steps, first) as report:
        with StopRequest() as stop, LeakCheck() as leaks:
            while trainer.step < trainer.steps and not stop.asked:
                before = time.perf_counter()
                skipped = trainer.scaler.skipped_steps
                try:
                    loss, grad_norm = trainer.train_step()
                except FloatingPointError as error:
                    report.say(f"step {trainer.step + 1}: {error}; stopped, nothing saved")
                    return 1
                leaks.step()
                if not math.isfinite(loss) and trainer.scaler.skipped_steps == skipped:
                    report.say(f"step {trainer.step}: the loss is {loss}; stopped, nothing saved (a lower --lr may help)")
                    return 1
                now, stats = time.perf_counter(), trainer.device.memory_stats()
                left = (now - start) / (trainer.step - first) * (trainer.steps - trainer.step)
                report.step(
                    {
                        "step": trainer.step,
                        "loss": loss,
                        "grad_norm": grad_norm,
                        "tokens_per_second": trainer.step_tokens / (now - before),
                        "live_bytes": stats["live"],
                        "peak_bytes": stats["peak"],
                        "lr": trainer.optimizer.lr,
                        **trainer.metrics,
                    },
                    left,
                )
                if (
                    options.save_every
                    and trainer.step % options.save_every == 0
                    and trainer.step < trainer.steps
                    and not stop.asked
                ):
                    evaluate(save())
            if saved is None or trainer.step > first or not saved.parent.samefile(folder):
                saved = save()
        if stop.asked:
            report.say(
                f"stopped after step {trainer.step}; saved {saved}\n"
                f"go on with: python apps/train_pythia.py --load_checkpoint {shlex.quote(str(folder))}"
            )
            return stop.exit_code
        held = evaluate(saved)
        if not math.isfinite(held):
            report.say(f"the held-out loss is {held}; the last step went too far (a lower --lr may help)")
            return 1
        say_held_out(report.say, held, unigram)
        seconds = time.perf_counter() - start
        done = (trainer.step - first) * trainer.step_tokens
        report.say(
            f"{done:,} tokens in {duration(seconds)}, {done / max(seconds, 1e-9):,.0f} tokens/s with evaluation; "
            f"peak memory {mib(trainer.device.memory_stats()['peak'])}"
        )
        best = checkpoints.best()
        if best is not None and best != saved:
            report.say(f"lowest held-out loss so far: {best}")
    if text.tokenizer is not None:
        write_sample(trainer, text, folder, options.seed)
    drawn = loss_picture(folder / "loss.png", unigram)
    made = ["checkpoint", METRICS] + (["sample.txt"] if text.tokenizer is not None else []) + (["loss.png"] if drawn else [])
    print(f"in {folder}: {', '.join(made)}")
    return 0


def say_held_out(say, held: float, unigram: float) -> None:
    say(
        f"held-out loss {held:.3f} nats, perplexity {math.exp(min(held, 50)):,.1f}; "
        f"{unigram - held:.3f} below token frequencies alone ({unigram:.3f})"
    )


def write_sample(trainer: Trainer, text: TextData, folder: Path, seed: int, tokens: int = 48) -> None:
    """Shows and keeps what the model makes of the start of the held-out text."""
    prompt = [int(i) for i in text.heldout[:16]]
    out = trainer.model.generate([prompt], max_new_tokens=tokens, do_sample=True, temperature=0.8, top_k=40, seed=seed)[0]
    sample = text.tokenizer.decode(out)
    with writing(folder / "sample.txt"):
        (folder / "sample.txt").write_text(sample, encoding="utf-8")
    print(f"--- sample, after {len(prompt)} tokens of held-out text ---\n{sample}\n---")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # samples and paths may have characters that the terminal has not
    sys.exit(main())
