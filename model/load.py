"""From a configuration or a finished run to a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from data import tokenizer
from model.config import UserError, from_home, to_path, validate
from model.gpt import GPT
from model.position import build
from model.training import checkpoint, run_dir
from model.training.config import RunConfig
from model.training.device import pick_device


def build_model(config: RunConfig) -> GPT:
    """A freshly initialised model; the same one whenever `config.seed` is the same.

    Raises UserError when the position encoding cannot be made with its values.
    """
    torch.manual_seed(config.seed)
    mask_token = 1 if config.objective == "mlm" else 0
    vocabulary = tokenizer.vocab_size(config.tokenizer.name) + mask_token
    try:
        return GPT(config.model, vocabulary, build(config.position, config.model.dims))
    except ArithmeticError as error:
        raise UserError(f"position: cannot be computed with these values ({error})") from None


def check_fits(config: RunConfig, state: dict[str, Any], source: Path) -> None:
    """Raises UserError unless the checkpoint holds the weights of `config`, before memory is given to them."""
    with torch.device("meta"):
        checkpoint.check_weights(build_model(config), state, source)


def check_buildable(config: RunConfig, starts: bool = True) -> None:
    """Raises UserError when the model or device would fail later, without computing or writing anything.

    A run that `starts` needs its parent too, if it has one; one that is resumed may outlive it.
    """
    with torch.device("meta"):
        model = build_model(config)
    if config.init_from and starts:
        path = to_path(config.init_from)
        checkpoint.check_weights(model, _parent_state(path), path)
    pick_device(config.train.device, "train.device")


class Run(NamedTuple):
    config: RunConfig
    model: GPT
    step: int
    data: dict[str, str]  # fingerprint of each split that it was trained with


def load_run(
    path: Path,
    which: Literal["last", "best"] = "last",
    scaling: dict[str, Any] | None = None,
    logit_scale: str | None = None,
) -> Run:
    """The configuration and model of a run directory, on the CPU, in evaluation mode.

    `scaling` and `logit_scale`, where given, take the place of the run's own: they hold no weights. Raises
    UserError when it is no run, or has no intact checkpoint of its own configuration.
    """
    config = run_dir.load_config(path)
    best = path / "checkpoints" / "best.pt"
    state = checkpoint.read(best) if which == "best" else checkpoint.read_newest(path, say=print)
    if state is None:
        raise UserError(f"{path}: holds no checkpoint yet; train it on with: python train.py resume={path}")
    with torch.device("meta"):
        build(config.position, config.model.dims)  # a stranger's config may name anything: that is said first
    checkpoint.check_same(state, "config", identity(config), path)
    values = config.model_dump()
    if scaling is not None:
        values["position"]["scaling"] = scaling
    if logit_scale is not None:
        values["model"]["logit_scale"] = logit_scale
    config = validate(RunConfig, values)
    check_fits(config, state, path)
    model = build_model(config)
    checkpoint.load_weights(model, state, path)
    return Run(config, model.eval(), state["step"], state["data"])


def load_parent(model: GPT, config: RunConfig) -> dict[str, Any]:
    """Load the newest weights of `config.init_from` into `model`, strictly; returns what is recorded of the parent.

    Raises UserError when it has no checkpoint, or one of another shape.
    """
    path = to_path(str(config.init_from))
    state = _parent_state(path)
    checkpoint.load_weights(model, state, path)
    length = config.model.dims.original_length
    return {"run": from_home(path.resolve()), "step": state["step"], "original_length": length}


def _parent_state(path: Path) -> dict[str, Any]:
    state = checkpoint.read_newest(path, say=print)
    if state is None:
        raise UserError(f"init_from={path}: holds no checkpoint yet; train it first")
    return state


def identity(config: RunConfig) -> dict[str, Any]:
    """What a checkpoint records of the configuration: weights alone do not tell RoPE from ALiBi."""
    return {
        "model": config.model.model_dump(),
        "position": config.position,
        "tokenizer": config.tokenizer.name,
    }
