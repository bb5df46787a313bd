"""The training run: steps, evaluation, and the comparison of sparse with dense."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import needle as ndl
from needle import amp, ops
from needle.backend_ndarray.device import drop_device_caches
from needle.checkpoints import random_state, read_folder, set_random_state
from needle.command_line import ending_signals
from needle.data.prefetch import Prefetch
from needle.data.text import TextData, TokenBatches
from needle.errors import CheckpointError, DataError
from needle.memory import stats
from needle.models import Pythia, PythiaConfig, checkpointed, load_published, train_step
from needle.models.generation import inference
from needle.models.pretrained import read_generation
from needle.models.training import Step
from needle.optim import AdamW
from pythia_app.options import CHANGEABLE, FIXED, STEPS

EVAL_TOKENS = 32_768
PATIENCE_S = 5.0  # with which a stop waits for the end of a step
COMPARED_STEPS = 20


def learning_rate(step: int, steps: int, peak: float, warmup_steps: int | None = None, min_ratio: float = 0.1) -> float:
    """The learning rate of ``step``: linear warmup (default: a tenth of the steps, at most 100), then a cosine down to
    ``min_ratio`` of the peak.
    """
    warmup = max(1, min(100, steps // 10)) if warmup_steps is None else warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (min_ratio + (1 - min_ratio) / 2 * (1 + math.cos(math.pi * min(done, 1.0))))


def make_config(options, vocab_size: int, sparse: bool) -> PythiaConfig:
    """The model that the options describe. raises: ShapeError if ``--checkpoint_layers`` is too little memory."""
    config = PythiaConfig.named(options.model, vocab_size=vocab_size, max_seq_len=options.seq_len, dropout=options.dropout)
    if sparse:
        config = config.with_sparse(options.pattern, options.block_size, options.window)
    return checkpointed(config, options.checkpoint_layers, *planned_run(options))


def planned_run(options) -> tuple[int, int, int, str]:
    """(batch size, sequence length, accumulation steps, precision): what a plan takes beside the model."""
    return options.batch_size, options.seq_len, options.accumulation_steps, options.precision


class GivenUp(Exception):
    """A step, or an evaluation, that a stop did not wait for."""


class StopRequest:
    """Ctrl-C, or a signal by which programs are told to end: the loop stops after its step, which is given up between two
    micro-batches if it takes longer than PATIENCE_S: who sent the signal may kill the process soon. A second Ctrl-C stops at once.

    asked: the signal's number, 0 before it.
    """

    def __init__(self) -> None:
        self.asked, self._since = 0, 0.0

    def check(self) -> None:
        """raises: GivenUp if a stop was asked for PATIENCE_S ago."""
        if self.asked and time.monotonic() - self._since > PATIENCE_S:
            raise GivenUp

    def __enter__(self) -> StopRequest:
        self._before = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, *ending_signals())}
        return self

    def __exit__(self, *exc) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    @property
    def exit_code(self) -> int:
        """As shells have it."""
        return 128 + self.asked

    def _ask(self, number: int, _) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.asked:
            with contextlib.suppress(OSError):  # of a stderr that the same Ctrl-C has closed, as in `2>&1 | tee`
                os.write(2, b"\nstopping after this step (Ctrl-C again: at once, without saving)\n")  # safe in a signal handler
            self.asked, self._since = number, time.monotonic()


def evaluated(text: TextData, seq_len: int, tokens: int | None = None) -> np.ndarray:
    """The part of the held-out text that its loss is of: the first ``tokens``, by default EVAL_TOKENS, or enough for a sequence."""
    return text.held_out[: max(tokens or EVAL_TOKENS, seq_len + 1)]


class Trainer:
    """A model, its optimizer and its place in the text. weights: the folder of a model to begin with, or of a checkpoint.

    halfway: memory ran out in the middle of an update, so that the weights are those of no step. stop: asked between batches.
    """

    def __init__(self, options, config: PythiaConfig, text: TextData, device, weights: Path | None = None):
        self.options, self.config, self.device = options, config, device
        self.model = Pythia(self.config, device=device, seed=options.seed if weights is None else None)
        if weights is not None:
            self.model.dropout.seed = options.seed
            load_published(self.model, read_folder(weights))
            self.model.generation_config = read_generation(weights, or_config=False)  # which may be of another tokenizer
        self.optimizer = AdamW(
            self.model.parameter_groups(options.weight_decay), lr=options.lr, betas=tuple(options.betas), eps=options.eps
        )
        self.scaler = amp.GradScaler(enabled=options.precision == "fp16")
        batches = TokenBatches(
            text.train, options.batch_size, options.seq_len, options.seed,
            vocab_size=text.vocab_size, max_tokens=options.max_tokens, shuffle=not options.in_order,
            stride=text.stride(options.seq_len), name=text.name,
        )  # fmt: skip
        self.batches = Prefetch(batches)
        self._held_out(text)  # what is too short is found before training
        self._windows = (options.epochs or 0) * batches.windows_per_epoch  # to train on
        self.steps = options.max_steps or self._steps_for(self._windows) or STEPS
        self.step, self.halfway, self.stop = 0, False, StopRequest()
        self.metrics = {"tokens": 0, "seconds": 0.0}  # of the whole run, however often it was resumed

    def _steps_for(self, windows: float) -> int:
        return math.ceil(windows / (self.options.batch_size * self.options.accumulation_steps))

    def state(self) -> dict:
        """Everything that a run must continue with, beside its tensors."""
        return {
            "step": self.step,
            "steps": self.steps,
            "data": self.batches.state_dict(),
            "options": {name: getattr(self.options, name) for name in CHANGEABLE + FIXED},
            "scaler": self.scaler.state_dict(),
            "random": random_state(self.model),
            "metrics": self.metrics,
        }

    def load_state(self, state: dict) -> None:
        """Continues from what ``state`` gave; the optimizer's tensors are loaded elsewhere.

        raises: CheckpointError for what is no state of a run; DataError if it belongs to other text.
        """
        if not self.options.max_steps and not self.options.epochs:
            self.steps = state["steps"]
        self.step = state["step"]
        try:
            self.batches.load_state_dict(state["data"])
            if self._windows and not self.options.max_steps:  # the steps before this may have been larger or smaller
                self.steps = max(1, self.step + self._steps_for(self._windows - state["data"]["position_windows"]))
            if state["scaler"]:
                self.scaler.load_state_dict(state["scaler"])
            set_random_state(self.model, state["random"])
            self.metrics = {name: kind(state["metrics"][name]) for name, kind in (("tokens", int), ("seconds", float))}
            if not math.isfinite(self.metrics["seconds"]):
                raise ValueError(f"seconds are {self.metrics['seconds']}")
        except (CheckpointError, DataError):
            raise
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise CheckpointError(f"[load_checkpoint] not the state of a run: {error!r}") from error

    def tensors(self, batch) -> tuple[ndl.Tensor, ...]:
        """(ids, targets), each (B, T), on the device."""
        return tuple(ndl.Tensor(x, device=self.device, dtype="int32", requires_grad=False) for x in batch)

    @property
    def step_tokens(self) -> int:
        return self.options.batch_size * self.options.seq_len * self.options.accumulation_steps

    def train_step(self) -> Step:
        """One optimizer step: the mean loss of its micro-batches, in nats, and the norm of its gradients.

        raises: DataError for text that cannot be read; MemoryError; GivenUp. Unless ``halfway``, ``state`` is that of before then.
        """
        start, options = time.perf_counter(), self.options
        place, drawn, updates = self.batches.state_dict(), self.model.dropout.drawn, self.optimizer.t
        self.optimizer.lr = learning_rate(self.step, self.steps, options.lr, options.warmup_steps, options.min_lr_ratio)
        try:
            found = train_step(
                self.model, self.optimizer, self._micro_batches(), options.accumulation_steps, options.max_grad_norm,
                options.precision, self.scaler,
            )  # fmt: skip
        except (DataError, MemoryError, GivenUp):
            self.halfway = self.optimizer.t != updates
            self.optimizer.reset_grad()
            self.batches.load_state_dict(place)
            self.model.dropout.drawn = drawn
            raise
        self.step += 1
        self.metrics["tokens"] += self.step_tokens
        self.metrics["seconds"] += time.perf_counter() - start
        return found

    def _micro_batches(self) -> Iterator[tuple[ndl.Tensor, ...]]:
        for batch in self.batches:
            self.stop.check()
            yield self.tensors(batch)

    def row(self, made: Step, seconds: float) -> dict[str, Any]:
        """What metrics.jsonl has of the step that was ``made`` last and took ``seconds``."""
        memory = stats(self.device)
        return {
            "step": self.step,
            "loss": made.loss,
            "grad_norm": made.grad_norm,
            "tokens_per_second": self.step_tokens / seconds,
            "live_bytes": memory.live,
            "peak_bytes": memory.peak,
            "peak_by_category": memory.by_category_at_peak,
            "lr": self.optimizer.lr,
            **self.metrics,
        }

    def _held_out(self, text: TextData, tokens: int | None = None) -> TokenBatches:
        """Batches of ``evaluated``, in their order."""
        options = self.options
        return TokenBatches(
            evaluated(text, options.seq_len, tokens), options.batch_size, options.seq_len,
            vocab_size=text.vocab_size, epochs=1, shuffle=False,
            stride=text.stride(options.seq_len), name=f"{text.name}, held out",
        )  # fmt: skip

    def held_out_loss(self, text: TextData, tokens: int | None = None) -> float:
        """Mean cross entropy in nats over ``evaluated``. raises: GivenUp."""
        total = count = 0.0
        with inference(), amp.autocast.named(self.options.precision, self.device):
            for batch in self._held_out(text, tokens):
                self.stop.check()
                ids, targets = self.tensors(batch)
                total += self.model.loss(ids, targets).item() * targets.size
                count += targets.size
        return total / count


def attention_seconds(config: PythiaConfig, batch: int, T: int, device, precision: str) -> float:
    """Seconds that the model's attention takes in one step: forward and backward of every layer, measured alone."""
    rng = np.random.default_rng(0)
    shape = (batch, config.heads, T, config.head_width)
    q, k, v = (ndl.Tensor(rng.standard_normal(shape, dtype=np.float32), device=device) for _ in range(3))
    layout, times = config.layout(T), []
    for _ in range(5):
        start = time.perf_counter()
        with amp.autocast.named(precision, device):
            out = ops.attention(q, k, v, layout)
        out.backward()
        device.sync()
        times.append(time.perf_counter() - start)
    return median(times) * config.layers


def compare_dense(
    options, configs: list[PythiaConfig], text: TextData, device, stop: StopRequest, weights: Path | None = None
) -> list[dict[str, str]]:
    """Trains the configurations on the same batches, one after the other; a row of figures for each that was begun."""
    rows = []
    for config in configs:
        if rows and stop.asked:
            break
        trainer = Trainer(options, config, text, device, weights)
        if not options.max_steps and not options.epochs:
            trainer.steps = COMPARED_STEPS
        device.reset_peak()
        times, loss = [], float("nan")
        while trainer.step < trainer.steps and not stop.asked:
            start = time.perf_counter()
            loss = trainer.train_step().loss
            times.append(time.perf_counter() - start)
        layout = trainer.config.layout(options.seq_len)
        attention = attention_seconds(trainer.config, options.batch_size, options.seq_len, device, options.precision)
        rows.append(
            {
                "attention": config.pattern or "dense",
                "density": f"{layout.density:.3f}",
                "blocks": f"{layout.nnz_total}",
                "ms/step": f"{median(times) * 1e3:.0f}" if times else "-",
                "attention ms/step": f"{attention * options.accumulation_steps * 1e3:.0f}",
                "peak MiB": f"{device.memory_stats()['peak'] / 2**20:.0f}",
                "loss": f"{loss:.3f}",
                "held-out loss": f"{trainer.held_out_loss(text, 8192):.3f}",
            }
        )
        del trainer
        drop_device_caches()  # the next plan has none
    return rows
