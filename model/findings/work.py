"""One job: train, then measure. Killed at any instant, it goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import train
from data.loader import TokenStream
from data.prepare import prepare
from model.config import validate
from model.errors import Diverged
from model.findings.jobs import Job, Results
from model.findings.measure import LOSSES, RETRIEVAL, measure, measure_id
from model.findings.pool import has_weights
from model.findings.spec import Measure, Scale
from model.load import Run, build_model
from model.training import checkpoint, run_dir
from model.training.config import RunConfig
from model.training.device import pick_device

FIRST_STEPS = 10  # whose losses are kept, for a test to repeat


def main(what: dict[str, Any]) -> None:
    """Train unless that is done, then take each measure that is missing; every result is kept at once."""
    torch.set_num_threads(what["threads"])
    config, scale = validate(RunConfig, what["config"]), validate(Scale, what["scale"])
    measures = [validate(Measure, values) for values in what["measures"]]
    job = Job(what["key"], what["name"], config, None, what["trains"], measures)
    results = Results(Path(what["results"]), scale)
    folder = prepare(config.data, config.tokenizer.name)
    own, weights = Path(what["work"]) / job.key, Path(what["weights"])
    own.mkdir(parents=True, exist_ok=True)
    with run_dir.lock(own):
        if not results.read(job).get("trained") or (job.trains and not has_weights(job, Path(what["work"]))):
            found: dict[str, Any] = {
                "name": job.name,
                "trained": True,
                "trains": job.trains,
                "threads": what["threads"],
                "environment": run_dir.environment(),
                "data": {split: TokenStream(folder, split).fingerprint() for split in ("train", "val")},
                "config": config.model_dump(mode="json", exclude={"run_dir", "resume", "init_from"}),
                "measures": {},  # those of weights that were lost belong to these no more
            }
            if job.trains:
                for kept in (LOSSES, RETRIEVAL):
                    (own / kept).unlink(missing_ok=True)
                try:
                    found |= trained(config.model_copy(update={"init_from": what["parent"]}), own, folder)
                except Diverged as error:
                    results.add(job, **found, diverged=str(error))
                    return
            results.add(job, **found)
        measured(job, results, weights, folder, own)


def measured(job: Job, results: Results, weights: Path, folder: Path, own: Path) -> None:
    """Take the measures that are missing, each kept at once."""
    state = checkpoint.read_newest(weights, print)
    assert state is not None, weights
    model = build_model(job.config)
    checkpoint.load_weights(model, state, weights)
    model.eval().to(pick_device(job.config.train.device, "train.device"))
    run = Run(job.config, model, state["step"], state["data"])
    stream = TokenStream(folder, "val")
    for missing in results.missing(job):
        values = measure(run, stream, missing, results.scale, own)
        known = results.read(job).get("measures", {})
        results.add(job, measures=known | {measure_id(missing, results.scale): values})


def trained(config: RunConfig, path: Path, folder: Path) -> dict[str, Any]:
    """Train in `path`, or on from its newest checkpoint; the curve of validation and what it took."""
    loader = train.make_loader(config, TokenStream(folder, "train"))
    state = checkpoint.read_newest(path, print)
    if state is None or state["step"] < config.train.steps or state.get("pending"):
        train.train(config, path, loader, TokenStream(folder, "val"))
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    validations = [row for row in rows if "val/loss" in row]
    speed = sorted(row["perf/tokens_per_s"] for row in rows if "perf/tokens_per_s" in row)
    return {
        "first_losses": [
            [row["step"], row["train/loss"]]
            for row in rows
            if row["step"] <= FIRST_STEPS and "train/loss" in row
        ],
        "val_loss": validations[-1]["val/loss"],
        "curve": [[row["tokens"], row["val/loss"]] for row in validations],
        "tokens": rows[-1]["tokens"],
        "tokens_per_s": speed[len(speed) // 2],
    }
