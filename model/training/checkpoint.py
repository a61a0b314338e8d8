"""Checkpoints: tensors and plain types, written atomically, checked on reading, never executing anything."""

from __future__ import annotations

import io
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from data.files import write_atomically
from model.config import RunFailed, UserError
from model.gpt import GPT

FORMAT = "ordinal-checkpoint-1"


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
        with zipfile.ZipFile(path) as archive:
            if any(info.compress_type != zipfile.ZIP_STORED for info in archive.infolist()):
                raise ValueError("compressed, and could unpack to any size")
            broken = archive.testzip()
        if broken is not None:
            raise ValueError(f"{broken} fails its checksum")
        state = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(state, dict) or state.get("format") != FORMAT:
            raise ValueError(f"not of format {FORMAT}")
    except Exception as error:  # torch and zipfile raise a different type for each kind of damage
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
        here = tuple(own[name].shape) if name in own else "absent"
        there = tuple(weights[name].shape) if name in weights else "absent"
        if here != there:
            raise UserError(
                f"{source}: from a model of another shape, {name} is {there} there and {here} here; "
                f"use the config.yaml of the run that wrote it"
                + ("; a longer table is read with position/scaling=linear" if "table" in name else "")
            )


def load_weights(model: GPT, state: dict[str, Any], source: Path) -> None:
    """Strictly load the model's weights. Raises UserError as `check_weights` does."""
    check_weights(model, state, source)
    model.load_state_dict(state["model"])


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


def set_rng(state: dict[str, Any], rank: int = 0) -> None:
    """Restore what `get_rng` gave on this rank when `state` was saved; a rank that was not there keeps its own.

    A checkpoint from another number of GPUs restores the CPU's alone.
    """
    ranks = (
        state["rng"] if isinstance(state["rng"], list) else [state["rng"]]
    )  # older ones have that of one process
    if rank >= len(ranks):
        return
    rng = ranks[rank]
    torch.set_rng_state(rng["cpu"])
    if torch.cuda.is_available() and len(rng["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(rng["cuda"])
