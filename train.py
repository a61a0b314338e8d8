"""Train a mini-GPT: `python train.py position=alibi model.n_layer=6`; --help lists the rest.

Reading path: this file, model/training/loop.py, model/gpt.py, model/attention.py and model/position/base.py.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from data.loader import TokenStream, TrainLoader
from data.prepare import prepare
from data.tasks import lessons
from data.tokenizer import vocab_size
from model import launch, sweep
from model.config import UserError, from_home, to_path, validate
from model.training import continued, run_dir
from model.training.config import RunConfig
from model.training.ranks import Ranks


def main(values: dict[str, Any]) -> dict[str, Any] | None:
    """Settle on configuration and run directory, and train there, alone or as one of torchrun's processes."""
    ranks, job = Ranks(), sweep.current()
    with ranks.joined():
        with ranks.together():
            config, path = settle_on_config(values, None if job is None else job.read().get("run"))
            from model.load import check_buildable  # torch, once the configuration is known to be right

            check_buildable(config, starts=path is None and ranks.leads)
            # the shards of a run that goes on are where it had them, unless it is told of others
            earlier = path or (to_path(config.init_from) if config.init_from else None)
            if earlier is None or any(re.match(r"(data|tokenizer)\b", key) for key in launch.overridden()):
                folder = prepare(config.data, config.tokenizer.name)
            else:
                folder = run_dir.shards(earlier, config)
            streams = {split: TokenStream(folder, split) for split in ("train", "val")}
            for stream in streams.values():
                stream.check_fits(config.tokenizer.name, config.model.context_length)
            loader = make_loader(config, streams["train"], ranks)
        with ExitStack() as held:

            def claim() -> Path:
                own, lock = (path, run_dir.lock(path)) if path else run_dir.create(config)
                held.enter_context(lock)
                if job is not None:
                    job.write(run=from_home(own))
                return own

            may_be_finished = values["resume"] == "auto" or job is not None
            return train(config, ranks.lead(claim), loader, streams["val"], ranks, may_be_finished)


def settle_on_config(values: dict[str, Any], earlier: str | None) -> tuple[RunConfig, Path | None]:
    """The configuration, and the directory of the run that it goes on, None for a new one.

    `earlier` is the run of an earlier attempt at this job of a sweep.
    """
    resume = values["resume"]
    if earlier is not None and (to_path(earlier) / "config.yaml").exists():
        resume = earlier
    elif resume == "auto":
        if values["run_dir"] is None:
            raise UserError("resume=auto needs the place to look for a run; give run_dir=runs/<name>")
        own = to_path(values["run_dir"])
        resume = values["run_dir"] if (own / "config.yaml").exists() else None
    elif resume is not None and (not resume or values["run_dir"] is not None):
        raise UserError("resume=<run_dir> takes a run directory, and goes on in it without run_dir=")
    if resume is not None:
        path = to_path(resume)
        config, changes = continued.merge_for_resume(run_dir.load_config(path), values, launch.overridden())
        print("\n".join([f"Resuming {path}", *(f"  changed on request: {change}" for change in changes)]))
        return config, path
    group, tags = launch.group()
    logger, values = values["logger"], values | {"resume": None}
    values["logger"] = logger | {"group": logger["group"] or group, "tags": [*logger["tags"], *tags]}
    if values["init_from"] is not None:
        parent = to_path(values["init_from"])
        return continued.extend(run_dir.load_config(parent), values, launch.overridden()), None
    return validate(RunConfig, values), None


def make_loader(config: RunConfig, stream: TokenStream, ranks: Ranks | None = None) -> TrainLoader:
    """This process's share of the batches that `config` asks for; says what windows inside documents leave out."""
    ranks = ranks or Ranks()
    ranks.check_divides(config.train.batch_size, config.train.micro_batch_size)
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
        rank=ranks.rank,
        world=ranks.world,
    )
    if config.data.windows == "within_document":
        print(
            f"Windows within documents train on {loader.coverage:.1%} of the tokens in an epoch; "
            f"{loader.n_documents - loader.n_long_documents:,} of {loader.n_documents:,} documents are shorter than "
            f"the {config.model.context_length + 1} tokens of a window"
        )
    return loader


def train(
    config: RunConfig,
    path: Path,
    loader: TrainLoader,
    val_stream: TokenStream,
    ranks: Ranks | None = None,
    may_be_finished: bool = False,
) -> dict[str, Any] | None:
    """Train in run directory `path`, from its newest checkpoint if it has one. Returns the final row.

    So it does for a run that is finished, where it `may_be_finished`; raises UserError where it may not.
    """
    # imported here, so that --help and a mistyped key are answered without loading torch
    from model.training.loop import Finished, Training

    try:
        return Training(config, path, loader, val_stream, ranks or Ranks()).run()
    except Finished as finished:
        if not may_be_finished:
            raise
        print(finished)
        return run_dir.final_row(path)


if __name__ == "__main__":
    launch.main("config", main)
