"""The loop of a training run in its folder: steps, checkpoints, evaluations."""

from __future__ import annotations

import contextlib
import math
import time

import numpy as np

from needle.backend_ndarray.device import drop_device_caches
from needle.checkpoints import CheckpointFolder
from needle.data.text import TextData
from needle.errors import DataError
from needle.memory import LeakCheck, reset_peak
from needle.models import GenerationConfig
from needle.models.training import Step
from pythia_app import checkpoint
from pythia_app.report import Reporter
from pythia_app.run_folder import RunFolder
from pythia_app.trainer import GivenUp, StopRequest, Trainer

PROMPT_TOKENS, SAMPLE_TOKENS = 16, 48


class Loop:
    """Trains until the last step or a stop; saves and evaluates on the way.

    saved: the newest checkpoint, which is at first the one that the run continues from, if any. kept: the step that it is of, None
    while it is not in ``folder``. unigram: the entropy of token frequencies, in nats. peak: the most bytes that a step took.
    """

    def __init__(self, options, folder: RunFolder, trainer: Trainer, text: TextData, unigram: float, report: Reporter):
        self.trainer, self.text, self.unigram, self.report = trainer, text, unigram, report
        self.save_every, self.seed = options.save_every, options.seed
        self.started, self.first, self.peak = time.perf_counter(), trainer.step, 0
        self.saved, self.kept = folder.saved, self.first if folder.is_here else None
        self.checkpoints = CheckpointFolder(folder.path, options.keep_last)
        if folder.is_here:
            self.checkpoints.go_on_from(folder.saved)

    def run(self, stop: StopRequest) -> str:
        """Trains, and saves at the end. Returns what was wrong with the last step, of which then nothing is saved, or ""."""
        trainer = self.trainer
        trainer.stop = stop
        with LeakCheck() as leaks, contextlib.suppress(GivenUp):
            if self.kept is not None and self._due() and self.checkpoints.held_out_loss(self.saved) is None:
                self.evaluate()  # it was saved, and then the run was killed
            while trainer.step < trainer.steps and not self._ends(stop):
                if wrong := self._step(leaks):
                    return wrong
                if self._due() and not self._ends(stop):
                    self.save()
                    self.evaluate()
        if trainer.step != self.kept:
            self.save()
        return ""

    def save(self) -> None:
        trainer = self.trainer
        self.report.flush()
        self.saved = checkpoint.save(self.checkpoints, trainer.model, trainer.optimizer, trainer.state(), self.text.tokenizer)
        self.kept = trainer.step

    def evaluate(self) -> tuple[float, str]:
        """The held-out loss and, if there is a tokenizer, a sample. Done after saving: a kill meanwhile loses nothing."""
        step, held, prompt, sample = self.trainer.step, self.trainer.held_out_loss(self.text), "", ""
        if math.isfinite(held):
            self.report.record({"step": step, "held_out_loss": held, "unigram_entropy": self.unigram})
            if self.text.tokenizer is not None:
                prompt, sample = sampled(self.trainer, self.text, self.seed)
                self.report.record({"step": step, "prompt": prompt, "sample": sample})
            self.checkpoints.mark(self.saved, held)
        return held, prompt + sample

    def _ends(self, stop: StopRequest) -> bool:
        return bool(stop.asked) or self.report.unread

    def _due(self) -> bool:
        step = self.trainer.step
        return bool(self.save_every) and step % self.save_every == 0 and step < self.trainer.steps

    def _step(self, leaks: LeakCheck) -> str:
        """One step and its row. Returns what was wrong, or "".

        raises: GivenUp; DataError for text that cannot be read, or MemoryError, after saving what the steps before have made.
        """
        trainer, before = self.trainer, time.perf_counter()
        reset_peak(trainer.device)
        skipped = trainer.scaler.skipped_steps
        try:
            made = trainer.train_step()
        except (DataError, MemoryError):
            if trainer.step not in (self.first, self.kept) and not trainer.halfway:
                self.save()
                self.report.say(f"stopped after step {trainer.step}; saved {self.saved}")
            raise
        except FloatingPointError as error:
            return f"step {trainer.step + 1}: {error}; stopped, nothing saved"
        leaks.step()
        if wrong := not_finite(made, trainer.scaler.skipped_steps > skipped):
            return f"step {trainer.step}: {wrong}; stopped, nothing saved (a lower --lr may help)"
        now = time.perf_counter()
        row = trainer.row(made, now - before)
        self.peak = max(self.peak, row["peak_bytes"])
        self.report.step(row, (now - self.started) / (trainer.step - self.first) * (trainer.steps - trainer.step))
        return ""


def not_finite(made: Step, skipped: bool) -> str:
    """Which of a step's figures is no number, "" if all are. Of a norm that is none, clipping makes NaN of all gradients; but where
    the update was ``skipped``, that is the loss scale's affair.
    """
    figures = {"loss": made.loss} if skipped else {"loss": made.loss, "norm of the gradients": made.grad_norm}
    return next((f"the {name} is {value}" for name, value in figures.items() if not math.isfinite(value)), "")


def sampled(trainer: Trainer, text: TextData, seed: int) -> tuple[str, str]:
    """The start of the held-out text and how the model continues it. Frees what it cached on the device: the plan has none."""
    prompt = [int(i) for i in text.held_out[:PROMPT_TOKENS]]
    config = GenerationConfig(SAMPLE_TOKENS, do_sample=True, temperature=0.8, top_k=40, seed=seed)
    try:
        out = trainer.model.generate([prompt], config)[0]
    except FloatingPointError:  # the run may still recover
        out = np.array(prompt)
    drop_device_caches()
    return text.tokenizer.decode(prompt), text.tokenizer.decode(out[len(prompt) :])
