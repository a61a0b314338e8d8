"""Loss of trained runs on held-out text: `python scripts/evaluate.py run=<run_dir> lengths=[256,512]`."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, Literal

from pydantic import PositiveInt

from data.loader import TokenStream
from model import launch
from model.config import Strict, UserError, validate


class EvaluateConfig(Strict):
    run: str | list[str]
    checkpoint: Literal["last", "best"]
    lengths: list[PositiveInt] | None
    split: Literal["train", "val"]
    max_tokens: PositiveInt | None
    batch_tokens: PositiveInt
    precision: Literal["auto", "fp32", "bf16"]
    device: str
    name: str


def main(values: dict[str, Any]) -> None:
    config = validate(EvaluateConfig, values)
    if not re.fullmatch(r"[\w.-]+", config.name):
        raise UserError(
            f"name={config.name}: names a file in the run; expected letters, digits, '-', '_' and '.'"
        )
    runs = [config.run] if isinstance(config.run, str) else config.run
    rows = [row for run in runs for row in evaluate_run(Path(run).expanduser(), config)]
    launch.print_table(rows, title=f"{config.split}, non-overlapping windows, every token scored once")


def evaluate_run(path: Path, config: EvaluateConfig) -> list[dict[str, Any]]:
    """Score one run at every length, write evaluation/<name>.json, and return a row per length."""
    # imported here, so that --help and a mistyped key are answered without loading torch
    from model.evaluation.perplexity import evaluate
    from model.load import load_run
    from model.training.checkpoint import check_same
    from model.training.device import autocast, pick_device
    from model.training.run_dir import shards, write_json

    device = pick_device(config.device)
    run, model, trained_on = load_run(path, config.checkpoint)
    model.to(device)
    stream = TokenStream(shards(path, run), config.split)
    stream.check_fits(run.tokenizer.name, 1)
    check_same({"data": trained_on}, "data", {config.split: stream.fingerprint()}, path)
    trained = run.model.context_length
    rows: list[dict[str, Any]] = []
    for length in config.lengths or [trained]:
        row: dict[str, Any] = {"run": path.name, "trained": trained, "length": length}
        limit = model.position.max_length
        if limit is not None and length > limit:
            rows.append(row | {"note": f"not defined beyond {limit}"})
            continue
        if length >= len(stream):
            rows.append(row | {"note": f"the split has {len(stream)} tokens"})
            continue

        def progress(done: int, total: int, length: int = length) -> None:
            if sys.stderr.isatty():
                print(
                    f"\r{path.name} at {length}: {done / total:4.0%}", end="\r", file=sys.stderr, flush=True
                )

        score = evaluate(
            model,
            stream,
            length,
            max_tokens=config.max_tokens,
            batch_tokens=config.batch_tokens,
            autocast=autocast(device, config.precision),
            on_batch=progress,
        )
        rows.append(row | score.as_dict())
    write_json(path / "evaluation" / f"{config.name}.json", {"split": config.split, "scores": rows})
    columns = {"standard_error": "± loss", "bits_per_byte": "bits/byte"}
    return [{columns.get(key, key): value for key, value in row.items() if key != "protocol"} for row in rows]


if __name__ == "__main__":
    launch.main("evaluate", main)
