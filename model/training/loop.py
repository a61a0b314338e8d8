"""The training loop: steps, validations, checkpoints, and an end that can be taken up again."""

from __future__ import annotations

import math
import operator
import shlex
import time
from contextlib import ExitStack, suppress
from functools import partial, reduce
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from data.loader import TokenStream, TrainLoader
from data.masking import IGNORED, VALIDATION_SEED, Masking, examples
from data.tasks import TaskStream
from data.tokenizer import vocab_size
from model.errors import Diverged, UserError
from model.evaluation.perplexity import Score, tally, target_losses
from model.evaluation.windows import stream_windows
from model.load import build_model, check_fits, identity, load_parent
from model.training import checkpoint, report, run_dir
from model.training.config import RunConfig
from model.training.device import autocast, keep_freed_memory, pick_device
from model.training.interrupt import Interrupt
from model.training.metrics import JsonLines, Wandb, mfu
from model.training.optim import Optimizers, clip_gradients, is_finite, lr_factor
from model.training.ranks import Ranks


class Finished(UserError):
    """The run is at its last step already."""


class _Stopped(Exception):
    """A signal came in the middle of a validation."""


class Training:
    """A run in directory `path`, from its newest checkpoint if it has one. All ranks hold the same weights."""

    def __init__(
        self, config: RunConfig, path: Path, loader: TrainLoader, val_stream: TokenStream, ranks: Ranks
    ) -> None:
        self.config, self.path, self.loader, self.ranks = config, path, loader, ranks
        whole = (
            config.data.task != "none" and config.data.task_rate == 1
        )  # text would be strange to such a model
        self.val_stream = (
            TaskStream(val_stream, config.data.task, config.tokenizer.name) if whole else val_stream
        )
        self.device = ranks.device(pick_device(config.train.device, "train.device"))
        if self.device.type == "cpu":
            keep_freed_memory()
        self.precision = autocast(self.device, config.train.precision)
        self.masking = self.val_masking = None
        if config.objective == "mlm":
            vocabulary = vocab_size(config.tokenizer.name)
            self.masking, self.val_masking = (
                Masking(vocabulary, seed) for seed in (config.seed, VALIDATION_SEED)
            )
        self.rows = config.train.batch_size // ranks.world
        self.micro_batch_size = min(config.train.micro_batch_size or self.rows, self.rows)
        self.step, self.best_loss, self.skipped = 0, math.inf, 0  # skipped: steps in a row
        self.pending: dict[str, Any] | None = None  # the row of a step that is still to be validated
        self.stopping, self.seconds = False, 0.0
        self.val: Score | None = None
        self._restore()
        self.first = self.step

    def _restore(self) -> None:
        config, ranks = self.config, self.ranks
        self.data = {"train": self.loader.stream.fingerprint(), "val": self.val_stream.fingerprint()}
        state = ranks.lead(lambda: checkpoint.read_newest(self.path, print))
        parent = None
        with ranks.together():
            if state is not None:
                check_fits(config, state, self.path)
            self.model = build_model(config).to(self.device)
            if ranks.rank:
                torch.manual_seed(config.seed + ranks.rank)  # dropout masks of its own
            self.optimizers = Optimizers(self.model, config.optim)
            if state is None and config.init_from and ranks.leads:
                parent = load_parent(self.model, config)
                print(f"Starting from {config.init_from} at step {parent['step']}")
            if state is not None:
                checkpoint.check_same(state, "data", self.data, self.path)
                checkpoint.load_weights(self.model, state, self.path)
                checkpoint.check_same(state, "config", identity(config), self.path)
                checkpoint.load_optimizers(self.optimizers, state, self.path)
                checkpoint.set_rng(state, self.path, ranks.rank)
                self.step, self.best_loss = state["step"], state["best_loss"]
                self.skipped, self.pending = state.get("skipped", 0), state.get("pending")
        if self.step > config.train.steps or (self.step == config.train.steps and not self.pending):
            raise Finished(
                f"{self.path}: finished at step {self.step}; give train.steps={2 * self.step} to train on from there"
            )
        self.run_id = ranks.lead(lambda: run_dir.record(self.path, config, self.loader.stream.folder, parent))
        if config.train.compile:
            self.model.compile()  # in place, so that the names of the weights stay as they are
        self.parallel = ranks.parallel(self.model)

    def run(self) -> dict[str, Any] | None:
        """Train to the end, and return the final row. Raises SystemExit with 128 + n after signal n, all saved."""
        config, length = self.config, self.config.model.context_length
        settings = config.model_dump(mode="json", exclude={"run_dir", "resume"}) | run_dir.environment()
        report.started(self.path, self.model, self.device, self.precision, self.ranks.world)
        with ExitStack() as stack:
            if self.ranks.leads:
                metrics = JsonLines(self.path / "metrics.jsonl", resumed_step=self.step - bool(self.pending))
                self.metrics = stack.enter_context(metrics)
                if metrics.dropped_to > self.step:
                    print(
                        f"Steps {self.step + 1} to {metrics.dropped_to} are run again; W&B keeps the points that it has"
                    )
                self.wandb = stack.enter_context(Wandb(config.logger, self.path, self.run_id, settings))
            with (
                Interrupt(self.ranks.world > 1, self.ranks.leads) as self.interrupt,
                report.Progress(config.train.steps, self.first) as self.progress,
            ):
                while not self.stopping and (self.pending or self.step < config.train.steps):
                    self._settle(self.pending or self._advance())
            stopped = self.stopping and (self.pending is not None or self.step < config.train.steps)
            if self.ranks.leads and not stopped:
                assert self.val is not None
                sample, summary = report.sample(self.model, config), self._summary()
                self.wandb.conclude(self.val.metrics() | summary, {"sample": sample} if sample else {})
        # when all have got here: torchrun ends the others as soon as one has gone
        signals = self.ranks.gather(self.interrupt.signal or 0)
        if stopped:
            print(
                f"Stopped at step {self.step}, saved. Continue with: "
                f"python train.py resume={shlex.quote(str(self.path))}"
            )
            raise SystemExit(128 + max(signals))
        assert self.val is not None
        if self.ranks.leads:
            report.finished(self.path, self.step, length, config.model.causal, self.val, summary, sample)
        return run_dir.final_row(self.path)

    def _advance(self) -> dict[str, Any]:
        """One step: its row for the metrics."""
        config, train = self.config, self.config.train
        began = time.perf_counter()
        samples = self.loader.samples(self.step)
        pairs = np.stack(examples(self.loader.batch(self.step), samples, self.masking), axis=1)
        batch = torch.from_numpy(pairs).to(self.device, non_blocking=True)
        own_loss = accumulate(self.parallel, batch, self.micro_batch_size, self.precision)
        grad_norm = clip_gradients(self.model, config.optim.grad_clip)
        (loss,) = self.ranks.mean(own_loss)
        factor = lr_factor(config.optim, self.step, train.steps)
        is_good = math.isfinite(loss) and math.isfinite(grad_norm)
        if is_good:
            self.optimizers.step(factor)
            self.skipped = 0
        else:
            self._pass_over(loss, grad_norm)
        self.step += 1
        tokens = train.batch_size * config.model.context_length
        seconds = time.perf_counter() - began
        self.seconds += seconds
        self.progress.step(self.step, loss, tokens / seconds)
        row: dict[str, Any] = {"step": self.step, "tokens": self.step * tokens}
        if not is_good:
            row["train/skipped"] = self.skipped
        elif self.step in {1, train.steps} or self.step % train.log_interval == 0:
            flops = self.model.flops_per_token(config.model.context_length) * tokens
            row |= {"train/loss": loss, "optim/lr": config.optim.lr * factor, "optim/grad_norm": grad_norm}
            row |= {"perf/tokens_per_s": tokens / seconds}
            row |= mfu(flops / seconds / self.ranks.world, self.device)
        return row

    def _pass_over(self, loss: float, grad_norm: float) -> None:
        """Leave a step without an update, where that is asked for and has not become a habit."""
        train, what = self.config.train, f"step {self.step + 1}: loss {loss}, gradient norm {grad_norm}"
        self.skipped += 1
        advice = (
            f"earlier checkpoints of {self.path} are kept; try again with lower optim.lr and optim.muon_lr"
        )
        if train.on_nonfinite == "stop":
            self._diverged(f"{what}; stopped before the update; {advice}, or train.on_nonfinite=skip")
        if self.skipped > train.max_skips:
            self._diverged(f"{what}; {train.max_skips} steps before it were skipped as well; {advice}")
        self.model.zero_grad(set_to_none=True)
        self.progress.note(f"{what}; skipped, {self.skipped} in a row")

    def _diverged(self, sentence: str) -> NoReturn:
        """Raises Diverged on all ranks, of which one says why: each has the same weights."""
        error = Diverged(sentence)
        error.said = not self.ranks.leads
        raise error

    def _settle(self, row: dict[str, Any]) -> None:
        """Validate, log and save what is due after a step; on a signal, save and leave the rest for the next time."""
        train = self.config.train
        last = self.step == train.steps
        validating = last or self.step % train.eval_interval == 0
        # asked once a step, so that whenever a signal comes, what was said to be saved is
        self.stopping = self._any(self.interrupt.signal is not None)
        val = self._validate() if validating and not self.stopping else None
        self.stopping = self.stopping or (validating and val is None)
        self.pending = row if validating and val is None else None
        saving = last or self.stopping or self.step % train.save_interval == 0
        if (validating or saving) and self._any(
            not is_finite(self.model) or (val is not None and not math.isfinite(val.loss))
        ):
            self._diverged(
                f"step {self.step}: the update left a model that is not finite; it was not saved, earlier checkpoints "
                f"of {self.path} are kept; try again with lower optim.lr and optim.muon_lr"
            )
        if val is not None:
            row = row | val.metrics()
            self.val = val
            self.progress.say(self.step, row.get("train/loss"), val)
            if last and self.ranks.leads:
                values = val.as_dict() | {"step": self.step} | self._summary()
                run_dir.write_json(self.path / "evaluation" / "val.json", values)
        if self.ranks.leads and self.pending is None and len(row) > 2:
            self.metrics.write(row)
            self.wandb.log(row)
        is_best = val is not None and val.loss < self.best_loss
        if saving or is_best:
            self.best_loss = val.loss if val is not None and is_best else self.best_loss
            self._save(is_best)

    def _save(self, is_best: bool) -> None:
        rng = self.ranks.gather(checkpoint.get_rng())
        with self.ranks.together():
            if self.ranks.leads:
                state = {
                    "model": self.model.state_dict(),
                    "optimizers": self.optimizers.state_dict(),
                    "rng": rng,
                    "best_loss": self.best_loss,
                    "skipped": self.skipped,
                    "pending": self.pending,
                    "data": self.data,
                    "config": identity(self.config),
                }
                checkpoint.save(self.path, self.step, state, self.config.train.keep, is_best)

    def _validate(self) -> Score | None:
        """None when a signal came meanwhile."""

        def look(done: int, total: int) -> None:
            self.progress.evaluating(done, total)
            if self.interrupt.signal is not None:
                raise _Stopped

        stream, config, own = self.val_stream, self.config, None
        with suppress(_Stopped):
            own = tally(
                self.model,
                stream,
                stream_windows(len(stream), config.model.context_length, config.train.eval_tokens),
                part=slice(self.ranks.rank, None, self.ranks.world),
                masking=self.val_masking,
                batch_tokens=self.micro_batch_size * config.model.context_length,
                autocast=self.precision,
                on_batch=look,
            )
        found = self.ranks.gather(own)
        tallies = [part for part in found if part is not None]
        return reduce(operator.add, tallies).score() if len(tallies) == len(found) else None

    def _any(self, flag: bool) -> bool:
        """Whether it is so on any rank."""
        return self.ranks.mean(float(flag))[0] > 0

    def _summary(self) -> dict[str, Any]:
        tokens = self.config.train.batch_size * self.config.model.context_length * (self.step - self.first)
        return {
            "parameters": self.model.parameter_count(),
            "perf/mean_tokens_per_s": tokens / self.seconds if self.seconds else None,
        }


def accumulate(
    model: nn.Module, batch_B2T: Tensor, micro_batch_size: int, precision: partial[torch.autocast]
) -> float:
    """Leave the gradient of the mean loss of the inputs and targets (B, 2, T), and return that loss.

    Several processes exchange their gradients once, with the last micro-batch.
    """
    loss, micro_batches = 0.0, batch_B2T.split(micro_batch_size)
    for micro_batch in micro_batches:
        inputs, targets = micro_batch.unbind(1)
        with ExitStack() as stack:
            if micro_batch is not micro_batches[-1] and isinstance(model, DistributedDataParallel):
                stack.enter_context(model.no_sync())
            with precision():
                # micro-batches have as many targets each, so the mean of their means is that over all
                losses = target_losses(model, inputs, targets)[targets != IGNORED]  # type: ignore[arg-type]
                micro_loss = losses.mean() * len(micro_batch) / len(batch_B2T)
            micro_loss.backward()
        loss += float(micro_loss.detach())
    return loss
