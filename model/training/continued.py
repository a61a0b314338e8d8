"""The configuration of a run that goes on, and of one that starts from another's weights."""

from __future__ import annotations

from typing import Any

from model.config import UserError, flat_keys, validate
from model.training.config import RunConfig

# what may differ between a run and its continuation; all else would make it another experiment
CHANGEABLE: tuple[str, ...] = (
    "train.steps",
    "train.eval_interval",
    "train.eval_tokens",
    "train.save_interval",
    "train.keep",
    "train.log_interval",
    "train.device",
    "train.compile",
    "train.on_nonfinite",
    "train.max_skips",
    "logger.",
    # where the tokens come from; whether they are the same is told by their checksums
    "data.source",
    "data.path",
    "data.out",
    "data.shards",
    "data.workers",
    "data.prompt",
)


def differences(old: RunConfig, new: RunConfig) -> list[tuple[str, Any, Any]]:
    """(key, old value, new value) of all keys in which two configurations differ."""
    a, b = old.model_dump(), new.model_dump()
    keys = dict.fromkeys([*flat_keys(a), *flat_keys(b)])
    pairs = [(key, _look_up(a, key), _look_up(b, key)) for key in keys]
    return [(key, x, y) for key, x, y in pairs if x != y]


def merge_for_resume(
    stored: RunConfig, composed: dict[str, Any], overridden: list[str]
) -> tuple[RunConfig, list[str]]:
    """The stored configuration with what was given on the command line, and a sentence for each change.

    Raises UserError with the difference when a change would make it another experiment.
    """
    values = _overridden(stored, composed, overridden)
    if "model.original_length" not in overridden:  # a group of models knows nothing of it
        values["model"]["original_length"] = stored.model.original_length
    asked = validate(RunConfig, values | {"resume": None, "run_dir": None})
    changes = differences(stored, asked)
    refused = [f"{key} ({old} -> {new})" for key, old, new in changes if not key.startswith(CHANGEABLE)]
    if refused:
        raise UserError(
            f"resume: a continued run cannot change {', '.join(refused)}; drop the override or start a new run"
        )
    return asked, [f"{key}: {old} -> {new}" for key, old, new in changes]


def extend(parent: RunConfig, composed: dict[str, Any], overridden: list[str]) -> RunConfig:
    """The configuration of a run that starts from `parent`'s weights: the parent's, with what was given now.

    The window of the pretraining is kept as `model.original_length`, so that scalings know it. Raises UserError
    as validation does.
    """
    values = _overridden(parent, composed, overridden)
    values["model"]["original_length"] = parent.model.dims.original_length
    if "name" not in overridden:
        values["name"] = f"{parent.name}-on"
    values["logger"] = composed["logger"]
    return validate(RunConfig, values | {"run_dir": composed["run_dir"], "resume": None})


def _overridden(stored: RunConfig, composed: dict[str, Any], overridden: list[str]) -> dict[str, Any]:
    """The stored values, with those of the keys and groups that were given replaced by the composed ones."""
    values = stored.model_dump()
    for key in overridden:
        *parents, leaf = key.replace("/", ".").split(".")
        target, source = values, composed
        for parent in parents:
            target, source = target.setdefault(parent, {}), source.get(parent, {})
        target[leaf] = source.get(leaf)
    return values


def _look_up(values: Any, key: str) -> Any:
    for part in key.split("."):
        if not isinstance(values, dict) or part not in values:
            return None
        values = values[part]
    return values
