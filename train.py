"""Train a mini-GPT: `python train.py position=alibi model.n_layer=6`; --help lists the rest.

Reading path: this file, then model/gpt.py, model/attention.py and model/position/base.py.
"""

from __future__ import annotations

import math
import re
import shlex
import time
from pathlib import Path
from typing import Any

from data.loader import TokenStream, TrainLoader
from data.masking import IGNORED, VALIDATION_SEED, Masking, examples
from data.prepare import prepare
from data.tasks import TaskStream, lessons
from data.tokenizer import vocab_size
from model import launch
from model.config import RunFailed, UserError, validate
from model.training import run_dir
from model.training.config import RunConfig


def main(values: dict[str, Any]) -> dict[str, Any]:
    """Validate the configuration, settle on a run directory, and train in it."""
    if values["resume"] is not None:
        if not values["resume"] or values["run_dir"] is not None:
            raise UserError("resume=<run_dir> takes a run directory, and goes on in it without run_dir=")
        path = Path(values["resume"]).expanduser()
        stored = run_dir.load_config(path)
        config, changes = run_dir.merge_for_resume(stored, values, launch.overridden())
        print("\n".join([f"Resuming {path}", *(f"  changed on request: {change}" for change in changes)]))
    else:
        group, tags = launch.sweep()
        logger = values["logger"]
        values["logger"] = logger | {"group": logger["group"] or group, "tags": [*logger["tags"], *tags]}
        path = None
        if values["init_from"] is not None:
            parent = Path(values["init_from"]).expanduser()
            config = run_dir.extend(run_dir.load_config(parent), values, launch.overridden())
        else:
            config = validate(RunConfig, values)
    from model.load import check_buildable  # torch, once the configuration is known to be right

    check_buildable(config, starts=path is None)
    # the shards of a run that goes on are where it had them, unless it is told of others
    earlier = path or (Path(config.init_from).expanduser() if config.init_from else None)
    if earlier is None or any(re.match(r"(data|tokenizer)\b", key) for key in launch.overridden()):
        folder = prepare(config.data, config.tokenizer.name)
    else:
        folder = run_dir.shards(earlier, config)
    streams = {split: TokenStream(folder, split) for split in ("train", "val")}
    for stream in streams.values():
        stream.check_fits(config.tokenizer.name, config.model.context_length)
    loader = make_loader(config, streams["train"])
    path, lock = (path, run_dir.lock(path)) if path else run_dir.create(config)
    with lock:
        return train(config, path, loader, streams["val"])


def make_loader(config: RunConfig, stream: TokenStream) -> TrainLoader:
    """The batches that `config` asks for; says what windows inside documents leave out."""
    loader = TrainLoader(
        stream,
        config.model.context_length,
        config.train.batch_size,
        config.seed,
        windows=config.data.windows,
        end_of_text=vocab_size(config.tokenizer.name) - 1,
        rewrite=None
        if config.data.task == "none"
        else lessons(config.data.task, config.data.task_rate, config.tokenizer.name, config.seed),
    )
    if config.data.windows == "within_document":
        print(
            f"Windows within documents train on {loader.coverage:.1%} of the tokens in an epoch; "
            f"{loader.n_documents - loader.n_long_documents:,} of {loader.n_documents:,} documents are shorter than "
            f"the {config.model.context_length + 1} tokens of a window"
        )
    return loader


def train(config: RunConfig, path: Path, loader: TrainLoader, val_stream: TokenStream) -> dict[str, Any]:
    """Train in run directory `path`, from its newest checkpoint if it has one. Returns the final row."""
    # imported here, so that --help and a mistyped key are answered without loading torch
    import numpy as np
    import torch

    from model.evaluation.perplexity import evaluate, target_losses
    from model.load import build_model, identity, load_parent
    from model.training import checkpoint, report
    from model.training.device import autocast, keep_freed_memory, pick_device
    from model.training.interrupt import Interrupt
    from model.training.metrics import JsonLines, Wandb, mfu
    from model.training.optim import Optimizers, clip_gradients, is_finite, lr_factor

    if config.data.task != "none" and config.data.task_rate == 1:  # text would be strange to such a model
        val_stream = TaskStream(val_stream, config.data.task, config.tokenizer.name)
    device = pick_device(config.train.device, "train.device")
    if device.type == "cpu":
        keep_freed_memory()
    precision = autocast(device, config.train.precision)
    model = build_model(config).to(device)
    optimizers = Optimizers(model, config.optim)
    data = {"train": loader.stream.fingerprint(), "val": val_stream.fingerprint()}
    step, best_loss, parent = 0, math.inf, None
    state = checkpoint.read_newest(path, print)
    if state is None and config.init_from:
        parent = load_parent(model, config)
        print(f"Starting from {config.init_from} at step {parent['step']}")
    if state is not None:
        checkpoint.check_same(state, "data", data, path)
        checkpoint.load_weights(model, state, path)
        checkpoint.check_same(state, "config", identity(config), path)
        optimizers.load_state_dict(state["optimizers"])
        checkpoint.set_rng(state["rng"])
        step, best_loss = state["step"], state["best_loss"]
        if step >= config.train.steps:
            raise UserError(
                f"{path}: finished at step {step}; give train.steps={2 * step} to train on from there"
            )
    run_id = run_dir.record(path, config, loader.stream.folder, parent)
    if config.train.compile:
        model.compile()  # in place, so that the names of the weights stay as they are

    length, batch_size = config.model.context_length, config.train.batch_size
    micro_batch_size = config.train.micro_batch_size or batch_size
    masking = val_masking = None
    if config.objective == "mlm":
        vocabulary = vocab_size(config.tokenizer.name)
        masking, val_masking = Masking(vocabulary, config.seed), Masking(vocabulary, VALIDATION_SEED)
    step_tokens = batch_size * length
    step_flops = model.flops_per_token(length) * step_tokens
    report.started(path, model, device, precision)
    first, seconds, stopping = step, 0.0, False
    settings = config.model_dump(mode="json", exclude={"run_dir", "resume"}) | run_dir.environment()

    with (
        JsonLines(path / "metrics.jsonl", resumed_step=step) as metrics,
        Wandb(config.logger, path, run_id, settings) as wandb,
    ):
        with Interrupt() as interrupt, report.Progress(config.train.steps, step) as progress:
            while step < config.train.steps and not stopping:
                began = time.perf_counter()
                pairs = np.stack(examples(loader.batch(step), loader.samples(step), masking), axis=1)
                batch = torch.from_numpy(pairs).to(device, non_blocking=True)
                loss = 0.0
                for micro_batch in batch.split(micro_batch_size):
                    inputs, targets = micro_batch.unbind(1)
                    with precision():
                        # micro-batches have as many targets each, so the mean of their means is that over all
                        losses = target_losses(model, inputs, targets)[targets != IGNORED]
                        micro_loss = losses.mean() * len(micro_batch) / batch_size
                    micro_loss.backward()
                    loss += float(micro_loss.detach())
                grad_norm = clip_gradients(model, config.optim.grad_clip)
                if not math.isfinite(loss) or not math.isfinite(grad_norm):
                    raise RunFailed(
                        f"step {step + 1}: loss {loss}, gradient norm {grad_norm}; stopped before the update; "
                        f"earlier checkpoints of {path} are kept; try again with lower optim.lr and optim.muon_lr"
                    )
                factor = lr_factor(config.optim, step, config.train.steps)
                optimizers.step(factor)
                step += 1
                step_seconds = time.perf_counter() - began
                seconds += step_seconds
                progress.step(step, loss, step_tokens / step_seconds)

                last, val = step == config.train.steps, None
                # asked once a step, so that whenever a signal comes, what was said to be saved is
                stopping = interrupt.signal is not None
                row: dict[str, Any] = {"step": step, "tokens": step * step_tokens}
                if step == 1 or last or step % config.train.log_interval == 0:
                    row |= {
                        "train/loss": loss,
                        "optim/lr": config.optim.lr * factor,
                        "optim/grad_norm": grad_norm,
                    }
                    row |= {"perf/tokens_per_s": step_tokens / step_seconds}
                    row |= mfu(step_flops / step_seconds, device)
                validating = last or step % config.train.eval_interval == 0
                saving = last or stopping or step % config.train.save_interval == 0
                if validating:
                    val = evaluate(
                        model,
                        val_stream,
                        length,
                        max_tokens=config.train.eval_tokens,
                        masking=val_masking,
                        batch_tokens=micro_batch_size * length,
                        autocast=precision,
                        on_batch=progress.evaluating,
                    )
                if (validating or saving) and not (
                    is_finite(model) and (val is None or math.isfinite(val.loss))
                ):
                    raise RunFailed(
                        f"step {step}: the update left a model that is not finite; it was not saved, earlier "
                        f"checkpoints of {path} are kept; try again with lower optim.lr and optim.muon_lr"
                    )
                if val is not None:
                    row |= val.metrics()
                    progress.say(step, loss, val)
                if len(row) > 2:
                    metrics.write(row)
                    wandb.log(row)
                is_best = val is not None and val.loss < best_loss
                if saving or is_best:
                    best_loss = val.loss if val is not None and is_best else best_loss
                    state = {
                        "model": model.state_dict(),
                        "optimizers": optimizers.state_dict(),
                        "rng": checkpoint.get_rng(),
                        "best_loss": best_loss,
                        "data": data,
                        "config": identity(config),
                    }
                    checkpoint.save(path, step, state, config.train.keep, is_best)

        if stopping and step < config.train.steps:
            print(
                f"Stopped at step {step}, saved. Continue with: python train.py resume={shlex.quote(str(path))}"
            )
            raise SystemExit(128 + (interrupt.signal or 0))
        assert val is not None
        sample = report.sample(model, config)
        summary = {
            "parameters": model.parameter_count(),
            "perf/mean_tokens_per_s": step_tokens * (step - first) / seconds,
        }
        wandb.conclude(val.metrics() | summary, {"sample": sample} if sample else {})
    run_dir.write_json(path / "evaluation" / "val.json", val.as_dict() | {"step": step} | summary)
    report.finished(path, step, length, config.model.causal, val, summary, sample)
    return {
        "val loss": val.loss,
        "perplexity": val.perplexity,
        "bits/byte": val.bits_per_byte,
        "run": str(path),
    }


if __name__ == "__main__":
    launch.main("config", main)
