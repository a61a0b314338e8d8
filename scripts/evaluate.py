"""Loss of trained runs on held-out text: `python scripts/evaluate.py run=<run_dir> lengths=[256,512]`."""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import PositiveInt

from data.loader import TokenStream
from model import launch
from model.config import LogitScale, Strict, UserError, from_home, to_path, validate
from model.evaluation.kept import Kept, Row

if TYPE_CHECKING:  # --help and a mistyped key are answered without loading torch
    import torch

    from model.load import Run

Protocol = Literal["non_overlapping", "sliding", "last"]


class EvaluateConfig(Strict):
    run: str | list[str]
    checkpoint: Literal["last", "best"]
    lengths: list[PositiveInt] | None
    protocol: Protocol | list[Protocol]
    stride: PositiveInt
    attention: bool
    retrieval: bool
    split: Literal["train", "val"]
    max_tokens: PositiveInt | None
    batch_tokens: PositiveInt
    precision: Literal["auto", "fp32", "bf16"]
    logit_scale: LogitScale | None
    device: str
    name: str


class Subject(NamedTuple):
    """A run under evaluation. `settings` tell its rows apart from other runs' and from its own under other options."""

    path: Path
    run: Run
    stream: TokenStream
    precision: partial[torch.autocast]
    settings: dict[str, Any]


def main(values: dict[str, Any]) -> None:
    """Score every run; where asked for, measure its attention and what it retrieves; print the tables."""
    scaling = launch.chosen_scaling(values.pop("position", None))
    config = validate(EvaluateConfig, values)
    if not re.fullmatch(r"[\w.-]+", config.name) or config.name == "val":
        raise UserError(
            f"name={config.name}: names a file in the run; expected letters, digits, '-', '_' and '.', and not val"
        )
    from model.evaluation import lengths, retrieval
    from model.training.metrics import log_evaluation

    paths = [to_path(run) for run in ([config.run] if isinstance(config.run, str) else config.run)]
    scores: list[Row] = []
    attention: list[Row] = []
    found: list[Row] = []
    for path in paths:
        label = path.name if [p.name for p in paths].count(path.name) == 1 else from_home(path)
        subject = load(path, label, config, scaling)
        file = path / "evaluation" / f"{config.name}.json"
        kept = Kept(file)
        scores += (own := scores_of(subject, config, kept))
        metrics = lengths.metrics(own) if kept.new else {}
        lengths.draw(own, file.with_suffix(".png"))
        if config.attention:
            attention += attention_of(subject, config)
        if config.retrieval:
            kept = Kept(file.with_name(f"{config.name}-retrieval.json"))
            found += (own := retrieval_of(subject, config, kept))
            metrics |= retrieval.metrics(own) if kept.new else {}
        log_evaluation(path, metrics, file.with_suffix(".png"))
    for path in paths:  # again, with the lines of all
        lengths.draw(scores, path / "evaluation" / f"{config.name}.png")
        if found:
            retrieval.draw(found, path / "evaluation" / f"{config.name}-retrieval.png")
    launch.print_table([shown(row) for row in scores], title=f"{config.split}, {scores[0]['precision']}")
    if attention:
        launch.print_table(attention, title="attention, against attending to all keys alike")
    if found:
        launch.print_table(retrieval.summary(found), title="values found for keys")


def load(path: Path, label: str, config: EvaluateConfig, scaling: dict[str, Any] | None) -> Subject:
    """The run in `path`, called `label`, on its device, and the text that it is scored on."""
    from model.load import load_run
    from model.training.checkpoint import check_same
    from model.training.device import autocast, pick_device
    from model.training.run_dir import shards

    device = pick_device(config.device)
    run = load_run(path, config.checkpoint, scaling, config.logit_scale)
    run.model.to(device)
    stream = TokenStream(shards(path, run.config), config.split)
    stream.check_fits(run.config.tokenizer.name, 1)
    fingerprint = stream.fingerprint()
    check_same({"data": run.data}, "data", {config.split: fingerprint}, path)
    precision = autocast(device, config.precision)
    settings = {
        "run": label + "".join(f" +{name}" for name in changed(scaling, config.logit_scale)),
        "trained": run.config.model.context_length,
        "step": run.step,
        "split": config.split,
        "data": fingerprint,
        "position": run.config.position,
        "logit_scale": run.config.model.logit_scale,
        "precision": "bf16" if precision.keywords["enabled"] else "fp32",
    }
    return Subject(path, run, stream, precision, settings)


def wanted_lengths(subject: Subject, config: EvaluateConfig) -> list[int]:
    return sorted(set(config.lengths or [subject.settings["trained"]]))


def scores_of(subject: Subject, config: EvaluateConfig, kept: Kept) -> list[Row]:
    """The loss at every length, under every protocol."""
    from model.evaluation.lengths import Plan, sweep

    protocols = [config.protocol] if isinstance(config.protocol, str) else config.protocol
    note = subject.settings | {"max_tokens": config.max_tokens}
    plan = Plan(wanted_lengths(subject, config), list(protocols), config.stride, config.max_tokens, note)

    def progress(done: int, total: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{subject.path.name}: {done / total:4.0%}", end="\r", file=sys.stderr, flush=True)

    return list(
        sweep(
            subject.run,
            subject.stream,
            plan,
            kept,
            batch_tokens=config.batch_tokens,
            autocast=subject.precision,
            on_batch=progress,
        )
    )


def attention_of(subject: Subject, config: EvaluateConfig) -> list[Row]:
    """Attention statistics in the longest window, over the starts of at most eight documents."""
    import torch

    from data.tokenizer import vocab_size
    from model.evaluation.attention import attention_statistics
    from model.training.run_dir import write_json

    model, stream, trained = subject.run.model, subject.stream, subject.settings["trained"]
    limit = model.position.max_length or sys.maxsize
    starts, sizes = stream.documents(vocab_size(subject.run.config.tokenizer.name) - 1)
    possible = [n for n in wanted_lengths(subject, config) if n <= min(limit, sizes.max())]
    if not possible:
        return []
    longest = max(possible)
    ids = [torch.from_numpy(stream.read(int(start), longest)) for start in starts[sizes >= longest][:8]]
    rows = attention_statistics(model, torch.stack(ids).to(next(model.parameters()).device), trained)
    about = {"run": subject.settings["run"], "length": longest, "documents": len(ids)}
    file = subject.path / "evaluation" / f"{config.name}-attention.json"
    write_json(file, about | {"trained": trained, "rows": rows})
    return [about | row for row in rows]


def retrieval_of(subject: Subject, config: EvaluateConfig, kept: Kept) -> list[Row]:
    """The fraction of keys found, at lengths up to the longest one asked for."""
    from model.evaluation.retrieval import evenly_spaced, sweep

    data = subject.run.config.data
    lengths = evenly_spaced(max(wanted_lengths(subject, config)))
    note = subject.settings | {"taught": data.task_rate if data.task == "recall" else 0.0}
    return list(
        sweep(subject.run, subject.stream, lengths, note, kept, config.batch_tokens, subject.precision)
    )


def shown(row: Row) -> Row:
    """What of a row fits a table for people."""
    columns = {
        "run": "run",
        "trained": "trained",
        "length": "length",
        "protocol": "protocol",
        "stride": "stride",
        "loss": "loss",
        "standard_error": "±",
        "perplexity": "perplexity",
        "bits_per_byte": "bits/byte",
        "tokens": "tokens",
        "clusters": "docs",
        "skipped": "skipped",
    }
    return {title: row[key] for key, title in columns.items() if key in row}


def changed(scaling: dict[str, Any] | None, logit_scale: str | None) -> list[str]:
    """Names of what took the place of the run's own, for its label."""
    names = [] if scaling is None else [str(scaling["_target_"]).rpartition(".")[2]]
    names = ["unscaled" if name == "Scaling" else name for name in names]  # position/scaling=none
    if scaling and "factor" in scaling:
        names[0] += f"({scaling['factor']:g})"
    return names + ([f"logits {logit_scale}"] if logit_scale else [])


if __name__ == "__main__":
    launch.main("evaluate", main)
