"""What a stranger's run directory can do here: nothing but be refused with a sentence."""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from model.config import UserError
from model.load import load_run
from model.training import checkpoint, run_dir
from tests.conftest import ROOT, TINY, Train, compose_config, final

State = dict[str, Any]


class Call:
    """Unpickled, it calls a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.called = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.called


@pytest.mark.parametrize("form", ["pickle", "torch zip", "torch old"])
def test_code_in_a_checkpoint_is_not_run(tmp_path: Path, form: str) -> None:
    marker, file = tmp_path / "marker", tmp_path / "step_00000001.pt"
    bomb = {"model": Call(os.system, f"touch {marker}")}
    if form == "pickle":
        file.write_bytes(pickle.dumps(bomb))
    else:
        torch.save(bomb, file, _use_new_zipfile_serialization=form == "torch zip")
    with pytest.raises(UserError, match="not loaded"):
        checkpoint.read(file)
    assert not marker.exists()


def test_what_unpacks_to_any_size_is_refused(train_tiny: Train) -> None:
    path = train_tiny("train.steps=1")
    file = checkpoint.newest_first(path)[0]
    state, packed, plain = checkpoint.read(file), io.BytesIO(), zipfile.ZipFile(file)
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in plain.namelist():
            archive.writestr(name, plain.read(name))
    file.write_bytes(packed.getvalue())
    with pytest.raises(UserError, match="not loaded .*compressed, and could unpack to any size"):
        checkpoint.read(file)
    torch.save(state | {"data": Call(bytearray, 10**15)}, file)
    with pytest.raises(UserError, match="not loaded .*asks for __builtin__ bytearray"):
        checkpoint.read(file)


def test_claim_of_ten_gigabytes_is_refused(train_tiny: Train) -> None:
    file = checkpoint.newest_first(train_tiny("train.steps=1"))[0]
    content = bytearray(file.read_bytes())
    entry = content.rindex(b"PK\x01\x02")  # of the archive's directory: two sizes from byte 20 on
    content[entry + 20 : entry + 28] = struct.pack("<II", 4_000_000_000, 4_000_000_000)
    file.write_bytes(content)
    with pytest.raises(UserError, match="not loaded"):
        checkpoint.read(file)


def changed(**parts: Any) -> Callable[[State], State]:
    return lambda state: state | parts


def without(part: str) -> Callable[[State], State]:
    return lambda state: {name: value for name, value in state.items() if name != part}


def first_weight(change: Callable[[torch.Tensor], Any]) -> Callable[[State], State]:
    def edit(state: State) -> State:
        name = next(iter(state["model"]))
        return state | {"model": state["model"] | {name: change(state["model"][name])}}

    return edit


def moments(change: Callable[[State], Any]) -> Callable[[State], State]:
    """`change` edits what each optimizer keeps for a weight."""

    def edit(state: State) -> State:
        state = copy.deepcopy(state)
        for optimizer in state["optimizers"]:
            for kept in optimizer["state"].values():
                change(kept)
        return state

    return edit


def setting(**values: Any) -> Callable[[State], State]:
    def edit(state: State) -> State:
        state = copy.deepcopy(state)
        state["optimizers"][0]["param_groups"][0].update(values)
        return state

    return edit


def cut(kept: State) -> None:
    kept.update({name: value[:1] if value.ndim else value for name, value in kept.items()})


EDITS = {
    **{
        f"no {part}": without(part)
        for part in ("step", "model", "optimizers", "rng", "best_loss", "data", "config")
    },
    **{
        f"{part} {value!r}": changed(**{part: value})
        for part in (
            "step",
            "model",
            "optimizers",
            "rng",
            "best_loss",
            "skipped",
            "pending",
            "data",
            "config",
        )
        for value in ("x", [1], {"a": "b"})
    },
    "step -3": changed(step=-3),
    "step true": changed(step=True),
    "step beyond": changed(step=10**9),
    "loss of no number": changed(best_loss=float("nan")),
    "another step's row": changed(pending={"step": 7}),
    "more": changed(more=1),
    "half precision": first_weight(lambda weight: weight.half()),
    "integers": first_weight(lambda weight: weight.long()),
    "complex": first_weight(lambda weight: weight.to(torch.complex64)),
    "sparse": first_weight(lambda weight: weight.to_sparse()),
    "on no device": first_weight(lambda weight: weight.to("meta")),
    "forty gigabytes of one number": first_weight(lambda weight: torch.zeros(1).expand(10**10)),
    "another shape": first_weight(lambda weight: weight[:1]),
    "a list": first_weight(lambda weight: weight.tolist()),
    "one weight more": lambda state: state | {"model": state["model"] | {"x": torch.zeros(1)}},
    "moments of another shape": moments(cut),
    "moments missing": moments(lambda kept: kept.popitem()),
    "moments as text": moments(lambda kept: kept.update(exp_avg="x")),
    "moments as integers": moments(
        lambda kept: kept.update({name: value.long() for name, value in kept.items()})
    ),
    "betas 3": setting(betas=3),
    "another decay": setting(weight_decay=7.0),
    "short random state": changed(rng=[{"cpu": torch.zeros(3, dtype=torch.uint8), "cuda": []}]),
    "random state of floats": changed(rng=[{"cpu": torch.zeros(5056), "cuda": []}]),
}


def test_content_that_training_did_not_write_is_refused(train_tiny: Train) -> None:
    """Each is an intact archive, as only somebody who means it can make."""
    path = train_tiny("train.steps=2")
    file = checkpoint.newest_first(path)[0]
    state = checkpoint.read(file)
    before = (path / "metrics.jsonl").read_bytes()
    for name, edit in EDITS.items():
        torch.save(edit(state), file)
        written = file.read_bytes()
        with pytest.raises(UserError):
            pytest.fail(f"{name}: {train_tiny('train.steps=3')}")
        assert file.read_bytes() == written and (path / "metrics.jsonl").read_bytes() == before, name
    torch.save(state, file)
    train_tiny("train.steps=3")
    assert final(path)["step"] == 3


def test_stored_config_cannot_name_foreign_code(train_tiny: Train) -> None:
    path = train_tiny("train.steps=1")
    text = (path / "config.yaml").read_text()
    (path / "config.yaml").write_text(text.replace("model.position.rotary.Rotary", "os.system"))
    with pytest.raises(UserError, match=r"expected a PositionEncoding below model\.position"):
        load_run(path)


def test_stored_config_cannot_write_elsewhere(train_tiny: Train, tmp_path: Path, monkeypatch: Any) -> None:
    path, inside = train_tiny("train.steps=1"), tmp_path / "inside"
    inside.mkdir()
    monkeypatch.chdir(inside)
    record = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps(record | {"shards": str(tmp_path / "gone")}))
    for out in (str(tmp_path / "outside"), "../outside"):
        config = compose_config("data=kjv", "tokenizer=bytes", f"data.out={out}")
        with pytest.raises(
            UserError, match="its shards are gone, and new ones would be written to .*outside"
        ):
            run_dir.shards(path, config)
    assert not (tmp_path / "outside").exists() and not list(inside.iterdir())


def test_nothing_that_is_kept_tells_whose_it_was(tmp_path: Path, shards: Path) -> None:
    """Neither the home directory, nor the user's name, nor what the environment holds."""
    home = tmp_path / "home" / "ada_l"
    home.mkdir(parents=True)
    (home / "shards").symlink_to(shards)
    told = {
        "WANDB_API_KEY": "0123456789" * 4,
        "HF_TOKEN": "hf_told",
        "SLURM_JOB_USER": "ada_l",
        "USER": "ada_l",
    }
    environment = {**os.environ, **told, "HOME": str(home), "WANDB_MODE": "offline"}
    options = [option for option in TINY if not option.startswith("logger")]
    first = [*options, f"data.path={home}/shards", f"run_dir={home}/runs/first"]
    for given in (first, [f"init_from={home}/runs/first"]):
        command = [sys.executable, str(ROOT / "train.py"), *given, "train.steps=2"]
        subprocess.run(command, env=environment, cwd=home, check=True, capture_output=True)
    kept = [
        file for file in (home / "runs").rglob("*") if file.is_file() and "debug" not in file.name
    ]  # W&B sends no logs
    assert len({file.suffix for file in kept} & {".pt", ".yaml", ".json", ".jsonl", ".wandb"}) == 5
    for file in kept:
        content = file.read_bytes()
        if file.suffix == ".wandb":  # where an offline run keeps its tables, for wandb sync to find them
            content = content.replace(f"{home}/.local/share/wandb/artifacts/staging/".encode(), b"")
        for secret in (str(home), *told.values()):
            assert secret.encode() not in content, f"{file}: {secret}"
    (on,) = (path for path in (home / "runs").iterdir() if path.name.endswith("on"))
    assert json.loads((on / "run.json").read_text())["parent"]["run"] == "~/runs/first"
    assert run_dir.load_config(on).data.path == "~/shards"
