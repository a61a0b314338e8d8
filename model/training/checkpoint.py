"""Checkpoints: tensors and plain types, written atomically, checked on reading, never executing anything."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, JsonValue, NonNegativeInt, ValidationError, model_validator
from torch import Tensor

from data.files import write_atomically
from model.config import RunFailed, UserError
from model.gpt import GPT
from model.training.archive import check_archive
from model.training.optim import Optimizers

FORMAT = "ordinal-checkpoint-1"
MOMENTS = {"AdamW": {"step", "exp_avg", "exp_avg_sq"}, "Muon": {"momentum_buffer"}}
LOCAL = ("fused", "foreach")  # an optimizer's settings for its device


class _Plain(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True)


class _OptimizerState(_Plain):
    state: dict[int, dict[str, Tensor]]
    param_groups: list[dict[str, bool | int | float | str | list[int] | tuple[float, ...] | None]]


class _Rng(_Plain):
    cpu: Tensor
    cuda: list[Tensor]


class _State(_Plain):
    """What a checkpoint holds."""

    format: Literal["ordinal-checkpoint-1"]
    step: NonNegativeInt
    model: dict[str, Tensor]
    optimizers: list[_OptimizerState]
    rng: list[_Rng] | _Rng  # one for each process; older checkpoints have that of one
    best_loss: float = Field(ge=0)
    skipped: NonNegativeInt = 0
    pending: dict[str, Annotated[int, Field(ge=0, le=2**63)] | float] | None = None
    data: dict[str, str]
    config: dict[str, JsonValue]

    @model_validator(mode="after")
    def _pending_is_of_this_step(self) -> _State:
        if self.pending is not None and self.pending.get("step") != self.step:
            raise ValueError("a row of another step is pending")
        return self


def path_of(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step_{step:08d}.pt"


def newest_first(run_dir: Path) -> list[Path]:
    return sorted((run_dir / "checkpoints").glob("step_*.pt"), reverse=True)


def save(run_dir: Path, step: int, state: dict[str, Any], keep: int, is_best: bool) -> Path:
    """Write the checkpoint of `step`, then delete all but the newest `keep`; best.pt keeps the best apart.

    Files of later steps are damaged or stale, for `step` is where the training is, and go as well. Raises
    RunFailed when the new one cannot be written; the earlier checkpoints are then all still there.
    """
    path, best = path_of(run_dir, step), run_dir / "checkpoints" / "best.pt"
    content = io.BytesIO()
    torch.save({"format": FORMAT, "step": step, **state}, content)
    try:
        path.parent.mkdir(exist_ok=True)
        for stale in path.parent.glob(".*.tmp"):  # left by a kill in the middle of a save
            stale.unlink()
        if is_best:  # first: a kill in between then only repeats the step that is best
            write_atomically(best, content.getvalue())
            temporary = path.with_name(f".{path.name}.tmp")
            try:
                os.link(best, temporary)
            except OSError:  # a file system without hard links
                shutil.copyfile(best, temporary)
            os.replace(temporary, path)
        else:
            write_atomically(path, content.getvalue())
        later = [other for other in newest_first(run_dir) if other.name > path.name]
        for old in later + newest_first(run_dir)[len(later) + keep :]:
            old.unlink()
    except OSError as error:
        raise RunFailed(
            f"{path}: cannot write the checkpoint ({error}); earlier checkpoints are intact"
        ) from None
    return path


def read(path: Path) -> dict[str, Any]:
    """The content of one checkpoint on the CPU.

    Raises UserError when it is missing, damaged, or anything but tensors and plain types.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such checkpoint; expected a file that train.py wrote")
    try:
        check_archive(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
        _State.model_validate(state)
    except Exception as error:  # torch and zipfile raise a different type for each kind of damage
        if isinstance(error, ValidationError):  # whose own text would show all of what may be without an end
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"[:200]
        else:
            reason = str(error).split("\n")[0][:200]
        raise UserError(
            f"{path}: damaged or not a checkpoint of this project, not loaded ({type(error).__name__}: {reason}); "
            f"use an older one"
        ) from None
    return state


def read_newest(run_dir: Path, say: Callable[[str], None]) -> dict[str, Any] | None:
    """The newest intact checkpoint of a run, None when it has not written any.

    Damaged newer ones are named and passed over. Raises UserError when all are damaged.
    """
    paths = newest_first(run_dir)
    for path in paths:
        try:
            return read(path)
        except UserError as error:
            if path == paths[-1]:
                raise
            say(f"warning: {error}")
    return None


def check_weights(model: GPT, state: dict[str, Any], source: Path) -> None:
    """Raises UserError naming the first name or shape in which the checkpoint differs from the model."""
    weights, own = state.get("model"), model.state_dict()
    if not isinstance(weights, dict) or not all(isinstance(w, torch.Tensor) for w in weights.values()):
        raise UserError(f"{source}: holds no weights; expected a checkpoint that train.py wrote")
    for name in sorted(own.keys() | weights.keys()):
        here = _form(own[name]) if name in own else "absent"
        there = _form(weights[name]) if name in weights else "absent"
        if here != there:
            raise UserError(
                f"{source}: from a model of another shape, {name} is {there} there and {here} here; "
                f"use the config.yaml of the run that wrote it"
                + ("; a longer table is read with position/scaling=linear" if "table" in name else "")
            )


def _form(weight: Tensor) -> str:
    usual = weight.dtype == torch.float32 and weight.layout == torch.strided
    return str(tuple(weight.shape)) + ("" if usual else f" ({weight.dtype}, {weight.layout})")


def load_weights(model: GPT, state: dict[str, Any], source: Path) -> None:
    """Strictly load the model's weights. Raises UserError as `check_weights` does."""
    check_weights(model, state, source)
    model.load_state_dict(state["model"])


def load_optimizers(optimizers: Optimizers, state: dict[str, Any], source: Path) -> None:
    """Restore the optimizers. Raises UserError when the checkpoint has the state of others."""
    found, restored = state["optimizers"], []
    fits = len(found) == len(optimizers.all)
    for (optimizer, _), there in zip(optimizers.all, found, strict=False):
        own, groups = optimizer.state_dict()["param_groups"], []
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        fits = fits and len(own) == len(there["param_groups"])
        for here, group in zip(own, there["param_groups"], strict=False):
            groups.append(here | {key: value for key, value in group.items() if key not in LOCAL})
            # the rate is set at each step
            fits = fits and groups[-1] | {"lr": here["lr"]} == here and isinstance(groups[-1]["lr"], float)
        for number, moments in there["state"].items():
            fits = (
                fits and number in range(len(weights)) and moments.keys() == MOMENTS[type(optimizer).__name__]
            )
            fits = fits and all(
                moment.shape == (() if name == "step" else weights[number].shape)
                and moment.dtype == torch.float32
                and moment.is_contiguous()
                for name, moment in moments.items()
            )
        restored.append({"state": there["state"], "param_groups": groups})
    if not fits:
        raise UserError(f"{source}: its checkpoint has the state of another optimizer; start a new run")
    optimizers.load_state_dict(restored)


def check_same(state: dict[str, Any], part: str, here: dict[str, Any], source: Path) -> None:
    """Raises UserError unless what the checkpoint says of `part` ('data', 'config') is what is `here`."""
    there = state.get(part)
    changed = [key for key, value in here.items() if not isinstance(there, dict) or there.get(key) != value]
    if changed:
        raise UserError(
            f"{source}: its checkpoint was trained with other {part} ({', '.join(changed)}) than is here now; "
            f"bring the old one back, or start a new run"
        )


def get_rng() -> dict[str, Any]:
    """The state of every random generator that training draws from."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def set_rng(state: dict[str, Any], source: Path, rank: int = 0) -> None:
    """Restore what `get_rng` gave on this rank when `state` was saved; a rank that was not there keeps its own.

    A checkpoint from another number of GPUs restores the CPU's alone. Raises UserError when it is no such state.
    """
    ranks = (
        state["rng"] if isinstance(state["rng"], list) else [state["rng"]]
    )  # older ones have that of one process
    if rank >= len(ranks):
        return
    rng = ranks[rank]
    try:
        torch.set_rng_state(rng["cpu"])
        if torch.cuda.is_available() and len(rng["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(rng["cuda"])
    except (RuntimeError, TypeError) as error:
        raise UserError(
            f"{source}: the checkpoint's random state is none ({error}); use an older one"
        ) from None
