"""Train Pythia on text: python apps/train_pythia.py --sparse

A run has one folder: checkpoints, config.yaml, metrics.jsonl, report.html. Ctrl-C saves and says how to go
on (exit code 130); SIGTERM (143) and SIGHUP, of a terminal that is closed, save, too. The same command with --resume goes on after
whatever ended it. A wrong argument or unusable text ends with one line and exit code 2.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while the imports run: the end, without a traceback

import math
import os
import sys
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

from needle.checkpoints import CheckpointFolder
from needle.command_line import exit_code, run_program
from needle.data.text import TextData, load_text, unigram_entropy
from needle.memory import reset_peak, set_limit, stats
from needle.memory.units import table
from needle.models import PythiaConfig
from needle.models.pretrained import read_config
from pythia_app import checkpoint, command, config_file, printable
from pythia_app.flops import peak_flops
from pythia_app.loading import default_vocabulary, find_model, fit_options, tokenizer_of_run
from pythia_app.loop import PROMPT_TOKENS, Loop
from pythia_app.memory import Budget
from pythia_app.options import check, device, notes, parse, read
from pythia_app.page import METRICS, PAGE, About, mask_picture
from pythia_app.report import Reporter, duration, mib
from pythia_app.run_folder import RunFolder, lies_elsewhere
from pythia_app.trainer import StopRequest, Trainer, compare_dense, evaluated


def main(argv: list[str] | None = None) -> int:
    return exit_code("train_pythia.py", lambda: start(argv), "stopped at once; the last checkpoint is as it was")


def start(argv: list[str] | None) -> int:
    """A new run, from trained weights if so told, or one that goes on from a checkpoint."""
    options = read(argv)  # not checked yet: a run that goes on has some from its checkpoint
    where = options.load_checkpoint
    its_own = options.resume or (options.eval_only and not (where or options.init_from))  # not weights that nobody has trained
    if its_own and options.checkpoint_dir and CheckpointFolder(options.checkpoint_dir).names():
        if where is not None and where != options.checkpoint_dir:
            print(f"note: --load_checkpoint has no effect: the run in {options.checkpoint_dir} goes on", file=sys.stderr)
        where = options.checkpoint_dir
    return go_on(argv, Path(where)) if where is not None and os.path.isdir(where) else begin(argv, options)


def begin(argv: list[str] | None, options: Namespace) -> int:
    """A new run, from trained weights if so told."""
    check(options)
    weights = find_model(options.init_from) if options.init_from else None
    if weights is not None:
        fit_options(options, weights)
    if options.vocab_size is None:
        options.vocab_size = default_vocabulary(options)
        check(options)
    for note in notes(argv, options):
        print(f"note: {note}", file=sys.stderr)
    if options.resume and not (options.eval_only or options.plan or options.compare_dense):
        print(f"a new run: no checkpoint is in {options.checkpoint_dir}")
    if options.eval_only and weights is None and not options.plan:
        there = f"in {options.checkpoint_dir}" if options.checkpoint_dir else "was named"
        print(f"note: the loss is that of untrained weights: no checkpoint {there}", file=sys.stderr)
    return run(options, weights=weights)


def go_on(argv: list[str] | None, where: Path) -> int:
    """A run that goes on from the newest whole checkpoint in the folder ``where``, with the options kept in it."""
    found = checkpoint.find(where)
    for problem in found.problems:
        print(f"{problem}; going on from {found.path.name}", file=sys.stderr)
    state = checkpoint.read_state(found.path)
    resumed = parse(argv, state["options"])
    if not (resumed.eval_only or resumed.plan or lies_elsewhere(found.path, resumed.checkpoint_dir)):
        checkpoint.check_newest(found.path, where)
    for note in notes(argv, resumed):
        print(f"note: {note}", file=sys.stderr)
    return run(resumed, found, state)


def run(options, found: checkpoint.Found | None = None, state: dict | None = None, weights: Path | None = None) -> int:
    """Prepares the run that ``options`` describe and trains, evaluates, compares or plans.

    found, state: the checkpoint to continue from, and its state. weights: the folder of a model to begin with.
    """
    saved = found.path if found else None
    where = device(options.device)
    kinds = (False, True) if options.compare_dense else (options.sparse,)
    if options.plan:
        for sparse in kinds:
            Budget(options, options.vocab_size, where, sparse).show()
        return 0
    folder = None if options.compare_dense or options.eval_only else RunFolder(options, found)
    if folder is not None and saved is None:
        folder.check_room()
    tokenizer = tokenizer_of_run(options, weights, saved, state)
    text = load_text(options.dataset, vocab_size=options.vocab_size, tokenizer=tokenizer)
    unigram = unigram_entropy(text.train, evaluated(text, options.seq_len), text.vocab_size)
    about_text = say_text(text, unigram)
    budgets = [Budget(options, text.vocab_size, where, sparse) for sparse in kinds]
    began = weights or saved
    longest = max(options.seq_len, read_config(began).max_seq_len if began else 0)  # training on less takes nothing from a model
    configs = [replace(budget.config, max_seq_len=longest) for budget in budgets]
    planned = 0 if options.eval_only else max(budget.peak() for budget in budgets)
    if note := budgets[0].caution(planned):
        print(f"note: {note}", file=sys.stderr)
    flops, known = peak_flops(where, options.precision) if folder else (0.0, "")
    reset_peak(where)
    set_limit(options.memory_limit, where)
    if options.compare_dense:
        return compare(options, configs, text, where, weights)
    trainer = Trainer(options, configs[0], text, where, began)
    if saved is not None and state is not None and not options.eval_only:
        checkpoint.load_optimizer(saved, trainer.model, trainer.optimizer)
        trainer.load_state(state)
    title, facts = f"Pythia-{options.model} on {where}", described(trainer, began, planned)
    print(f"{title}: {'; '.join(facts.values())}", flush=True)
    if folder is None:
        say_held_out(print, trainer.held_out_loss(text), unigram)
        return 0
    if saved is not None and (trainer.step < trainer.steps or not folder.is_here):  # else there is nothing to save
        folder.check_room()
    with folder.taken() as path, budgets[0].advice:
        facts |= {"text": about_text, "folder": str(path)}
        about = about_run(trainer, f"{title}, {path.name}", facts, flops, known)
        effective = Namespace(**{**vars(options), "max_steps": trainer.steps, "device": where.name})
        config_file.keep(path, effective, trainer.step if saved else 0)
        try:
            return train(options, folder, trainer, text, unigram, about)
        except KeyboardInterrupt:
            if CheckpointFolder(path).names():
                raise KeyboardInterrupt(f"go on with: {command('--load_checkpoint', path)}") from None
            raise


def compare(options, configs: list[PythiaConfig], text: TextData, where, weights: Path | None) -> int:
    """Trains the configurations and prints a row of figures for each. Returns the exit code."""
    with StopRequest() as stop:
        rows = compare_dense(options, configs, text, where, stop, weights)
    print(table([list(rows[0]), *(list(row.values()) for row in rows)]))
    return stop.exit_code if stop.asked else 0


def described(trainer: Trainer, began: Path | None, planned: int) -> dict[str, str]:
    """What is trained, in words: the parts of the first line by name. began: the folder of the weights that it begins with."""
    options, config = trainer.options, trainer.config
    kind, layout = config.pattern or "dense", config.layout(options.seq_len)
    tokens = f"micro-batches of {options.batch_size} x {options.seq_len} tokens"
    facts = {
        "model": f"{config.parameter_count():,} parameters",
        "attention": f"{kind} attention, {layout.nnz_total} blocks of {layout.block}, density {layout.density:.2f}",
        "batch": f"{tokens}, {options.accumulation_steps} per step, {options.precision}",
    }
    if again := sum(config.checkpoint_segments):
        facts["layers"] = f"{again} of {config.layers} layers computed again in backward"
    if planned:
        facts["memory"] = f"planned peak memory {mib(planned)}"
    if began is not None:
        facts["weights"] = f"going on after step {trainer.step} from {began}" if trainer.step else f"weights of {began}"
        if trainer.step >= trainer.steps:
            facts["weights"] += f", of {trainer.steps} steps: nothing is left to train"
    return facts


def about_run(trainer: Trainer, title: str, facts: dict[str, str], flops: float, known: str) -> About:
    """What the run's page says beside its metrics. flops, known: those of ``peak_flops``."""
    options, config = trainer.options, trainer.config
    per_token = config.flops_per_token(options.seq_len)
    if flops:
        facts = {**facts, "MFU": f"{per_token / 1e6:,.0f} million FLOPs per token (6 N + 12 L C T x density), of {known}"}
    mask = mask_picture(config.layout(options.seq_len))
    return About(title, trainer.steps, options.max_grad_norm, mask, facts, per_token / flops if flops else 0.0)


def train(options, folder: RunFolder, trainer: Trainer, text: TextData, unigram: float, about: About) -> int:
    """Trains, saves, evaluates and reports until the last step or a stop. Returns the exit code."""
    with Reporter(folder.path, about, trainer.step, tensorboard=options.tensorboard) as report:
        loop = Loop(options, folder, trainer, text, unigram, report)
        with StopRequest() as stop:
            wrong = loop.run(stop)
        if wrong:
            report.say(wrong)
            return 1
        if stop.asked:
            go_on = command("--load_checkpoint", folder.path)
            report.say(f"stopped after step {trainer.step}; saved {loop.saved}\ngo on with: {go_on}")
            return stop.exit_code
        if report.unread:
            return 1
        held, sample = loop.evaluate()
        if not math.isfinite(held):
            report.say(f"the held-out loss is {held}; the last step went too far (a lower --lr may help)")
            return 1
        say_held_out(report.say, held, unigram)
        seconds = time.perf_counter() - loop.started
        done = (trainer.step - loop.first) * trainer.step_tokens
        report.say(
            f"{done:,} tokens in {duration(seconds)}, {done / max(seconds, 1e-9):,.0f} tokens/s with evaluation; "
            f"peak memory {mib(max(loop.peak, stats(trainer.device).peak))}"
        )
        best = loop.checkpoints.best()
        if best is not None and best != loop.saved:
            report.say(f"lowest held-out loss so far: {best}")
    if sample:
        print(f"--- sample, after {PROMPT_TOKENS} tokens of held-out text ---\n{printable(sample)}\n---")
    made_files = [name for name in (config_file.CONFIG, METRICS, PAGE) if (folder.path / name).is_file()]
    print(f"in {folder.path}: checkpoint, {', '.join(made_files)}")
    return 0


def say_text(text: TextData, unigram: float) -> str:
    """Prints what there is to train on, and returns it. unigram: the entropy of token frequencies, in nats."""
    said = (
        f"{text.name}: {len(text.train):,} training tokens, {len(text.held_out):,} held out, vocabulary {text.vocab_size:,}; "
        f"token frequencies alone give {unigram:.3f} nats"
    )
    print(said, flush=True)
    if text.corpus is not None and text.corpus.skipped:
        first, *others = text.corpus.skipped
        print(f"left out, being no text: {first}" + (f" and {len(others)} more" if others else ""), flush=True)
    return said


def say_held_out(say, held: float, unigram: float) -> None:
    say(
        f"held-out loss {held:.3f} nats, perplexity {math.exp(min(held, 50)):,.1f}; "
        f"{abs(unigram - held):.3f} {'below' if held <= unigram else 'above'} token frequencies alone ({unigram:.3f})"
    )


if __name__ == "__main__":
    run_program(main)
