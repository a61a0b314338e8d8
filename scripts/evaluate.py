"""Loss of trained runs on held-out text: `python scripts/evaluate.py run=<run_dir> lengths=[256,512]`."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, Literal

from pydantic import PositiveInt

from data.loader import TokenStream
from model import launch
from model.config import LogitScale, Strict, UserError, validate

Protocol = Literal["non_overlapping", "sliding", "last"]


class EvaluateConfig(Strict):
    run: str | list[str]
    checkpoint: Literal["last", "best"]
    lengths: list[PositiveInt] | None
    protocol: Protocol | list[Protocol]
    stride: PositiveInt
    attention: bool
    split: Literal["train", "val"]
    max_tokens: PositiveInt | None
    batch_tokens: PositiveInt
    precision: Literal["auto", "fp32", "bf16"]
    logit_scale: LogitScale | None
    device: str
    name: str


def main(values: dict[str, Any]) -> None:
    scaling = launch.chosen_scaling(values.pop("position", None))
    config = validate(EvaluateConfig, values)
    if not re.fullmatch(r"[\w.-]+", config.name):
        raise UserError(
            f"name={config.name}: names a file in the run; expected letters, digits, '-', '_' and '.'"
        )
    paths = [Path(run).expanduser() for run in ([config.run] if isinstance(config.run, str) else config.run)]
    rows = [row for path in paths for row in evaluate_run(path, config, scaling)]
    # imported here, so that --help and a mistyped key are answered without loading torch
    from model.evaluation.lengths import draw

    for path in paths:
        draw(rows, path / "evaluation" / f"{config.name}.png")
    launch.print_table([shown(row) for row in rows], title=f"{config.split}, {rows[0]['precision']}")
    if config.attention:
        found = [row for path in paths for row in attention_of(path, config, scaling)]
        launch.print_table(found, title="attention, against attending to all keys alike")


def shown(row: dict[str, Any]) -> dict[str, Any]:
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


def attention_of(path: Path, config: EvaluateConfig, scaling: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Attention statistics in the longest window, over the starts of at most eight documents."""
    import torch

    from data.tokenizer import vocab_size
    from model.evaluation.attention import attention_statistics
    from model.load import load_run
    from model.training.device import pick_device
    from model.training.run_dir import shards, write_json

    run = load_run(path, config.checkpoint, scaling, config.logit_scale)
    stream = TokenStream(shards(path, run.config), config.split)
    limit = run.model.position.max_length or sys.maxsize
    starts, sizes = stream.documents(vocab_size(run.config.tokenizer.name) - 1)
    wanted = [n for n in config.lengths or [run.config.model.context_length] if n <= min(limit, sizes.max())]
    if not wanted:
        return []
    longest = max(wanted)
    ids = [torch.from_numpy(stream.read(int(start), longest)) for start in starts[sizes >= longest][:8]]
    device = pick_device(config.device)
    trained = run.config.model.context_length
    rows = attention_statistics(run.model.to(device), torch.stack(ids).to(device), trained)
    about = {"run": path.name, "length": longest, "documents": len(ids)}
    write_json(
        path / "evaluation" / f"{config.name}-attention.json", about | {"trained": trained, "rows": rows}
    )
    return [about | row for row in rows]


def evaluate_run(path: Path, config: EvaluateConfig, scaling: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Score one run at every length and protocol, and keep the rows in evaluation/<name>.json as they come."""
    from model.evaluation.lengths import Plan, read_rows, sweep, write_rows
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
        "run": path.name + "".join(f" +{name}" for name in changed(scaling, config.logit_scale)),
        "step": run.step,
        "split": config.split,
        "data": fingerprint,
        "position": run.config.position,
        "logit_scale": run.config.model.logit_scale,
        "max_tokens": config.max_tokens,
        "precision": "bf16" if precision.keywords["enabled"] else "fp32",
    }
    protocols = [config.protocol] if isinstance(config.protocol, str) else config.protocol
    lengths = sorted(set(config.lengths or [run.config.model.context_length]))
    plan = Plan(lengths, list(protocols), config.stride, config.max_tokens, settings)
    file = path / "evaluation" / f"{config.name}.json"
    known = read_rows(file)

    def progress(done: int, total: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{path.name}: {done / total:4.0%}", end="\r", file=sys.stderr, flush=True)

    rows: list[dict[str, Any]] = []
    for row in sweep(
        run,
        stream,
        plan,
        known,
        batch_tokens=config.batch_tokens,
        autocast=precision,
        on_batch=progress,
    ):
        rows.append(row)
        if row not in known:
            known.append(row)
            write_rows(file, known)
    return rows


def changed(scaling: dict[str, Any] | None, logit_scale: str | None) -> list[str]:
    """Names of what took the place of the run's own, for its label."""
    names = [] if scaling is None else [str(scaling["_target_"]).rpartition(".")[2]]
    if scaling and "factor" in scaling:
        names[0] += f"({scaling['factor']:g})"
    return names + ([f"logits {logit_scale}"] if logit_scale else [])


if __name__ == "__main__":
    launch.main("evaluate", main)
