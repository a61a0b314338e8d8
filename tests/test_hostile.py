"""What a stranger's run directory can do here: nothing but be refused with a sentence."""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from model.arguments import without_home
from model.config import UserError, from_home
from model.load import load_run
from model.training import checkpoint, run_dir
from model.training.archive import _check_pickle
from tests.conftest import ROOT, TINY, Train, compose_config, final, metrics

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


def repacked(file: Path, rename: Callable[[str], str] = str, edit: Callable[[bytes], bytes] = bytes) -> None:
    """Write an archive again, with other names and another pickle."""
    plain = zipfile.ZipFile(io.BytesIO(file.read_bytes()))
    with zipfile.ZipFile(file, "w") as archive:
        for name in plain.namelist():
            content = plain.read(name)
            archive.writestr(rename(name), edit(content) if name.endswith(".pkl") else content)


def test_entries_that_overlap_or_hide_are_refused(train_tiny: Train) -> None:
    file = checkpoint.newest_first(train_tiny("train.steps=1"))[0]
    state, content = checkpoint.read(file), file.read_bytes()
    torch.save(state | {"data": Call(bytearray, 10**15)}, file)
    repacked(file, rename=lambda name: name.replace("data.pkl", "DATA.PKL"))
    with pytest.raises(UserError, match="asks for __builtin__ bytearray"):
        checkpoint.read(file)
    file.write_bytes(content)
    with zipfile.ZipFile(file, "a") as archive:  # entries that are one and the same on disk
        largest = max(archive.infolist(), key=lambda entry: entry.file_size)
        for number in range(50):
            again = copy.copy(largest)
            again.filename = f"archive/data/{1000 + number}"
            archive.filelist.append(again)
            archive.NameToInfo[again.filename] = again
        archive._didModify = True  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="entries overlap"):
        checkpoint.read(file)


def deep_tuple(levels: int) -> bytes:
    return b"\x80\x02}(N" + b"\x85" * levels + b"K\x01u."


def shared_tuple(levels: int) -> bytes:
    """t = (t, t) over and over: as a key, hashed 2 ** levels times."""
    return b"\x80\x02}(N" + b"".join(b"q\x00h\x00\x86" for _ in range(levels)) + b"K\x01u."


@pytest.mark.parametrize("content", [deep_tuple(3_000_000), shared_tuple(60)])
def test_keys_without_an_end_are_refused(train_tiny: Train, content: bytes) -> None:
    file = checkpoint.newest_first(train_tiny("train.steps=1"))[0]
    repacked(file, edit=lambda _: content)
    with pytest.raises(UserError, match="nests tuples without an end"):
        checkpoint.read(file)


def test_pickle_is_followed_as_python_reads_it() -> None:
    """What is refused is the depth of tuples alone, also of those that are taken from the memo or copied."""
    for levels, refused in ((10, False), (11, True)):
        for content in (deep_tuple(levels), shared_tuple(levels), b"\x80\x02N" + b"2\x86" * levels + b"."):
            pickle.loads(content)
            with pytest.raises(ValueError, match="nests") if refused else nullcontext():
                _check_pickle(content)
    nested: Any = 0
    for _ in range(100):
        nested = [{"a": nested, "b": [(1, 2), (3, (4,))]}]
    _check_pickle(pickle.dumps(nested, 2))


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


def twice(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value, value]
    return value


def group(**values: Any) -> Callable[[State], State]:
    """Each optimizer's groups with these settings."""

    def edit(state: State) -> State:
        state = copy.deepcopy(state)
        for optimizer in state["optimizers"]:
            for settings in optimizer["param_groups"]:
                settings.update(values)
        return state

    return edit


def each_moment(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[State], State]:
    return moments(lambda kept: kept.update({name: change(value) for name, value in kept.items()}))


EDITS = {
    "without an end to be shown": changed(step=twice(40)),
    "parameters 5": group(params=5),
    "parameters in another order": lambda state: (
        state
        | {
            "optimizers": [
                o | {"param_groups": [g | {"params": g["params"][::-1]} for g in o["param_groups"]]}
                for o in state["optimizers"]
            ]
        }
    ),
    "rate of text": group(lr="x"),
    "settings of tensors": group(weight_decay=torch.ones(2)),
    "fused by a tensor": group(fused=torch.ones(2)),
    "moments of no shape": each_moment(lambda value: torch.zeros(())),
    "moments of one number": each_moment(
        lambda value: torch.zeros(1).expand(value.shape) if value.ndim else value
    ),
    "configuration of tensors": lambda state: (
        state
        | {"config": state["config"] | {"position": state["config"]["position"] | {"base": torch.ones(2)}}}
    ),
    "a row of a number without an end": lambda state: state | {"pending": {"step": 2, "train/loss": 10**400}},
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


@pytest.mark.parametrize(
    "entry", ["metrics.jsonl", "config.yaml", ".lock", "checkpoints", "evaluation", "checkpoints/step_1.pt"]
)
def test_links_and_pipes_in_a_run_are_refused(train_tiny: Train, tmp_path: Path, entry: str) -> None:
    path = train_tiny("train.steps=1")
    place, elsewhere = path / entry, tmp_path / "elsewhere"
    for make in (lambda: place.symlink_to(elsewhere), lambda: os.mkfifo(place)):
        if place.is_dir():
            shutil.rmtree(place)
        place.unlink(missing_ok=True)
        make()
        for act in (lambda: load_run(path), lambda: train_tiny("train.steps=2"), lambda: run_dir.lock(path)):
            with pytest.raises(UserError, match="a link or pipe"):
                act()
    assert not elsewhere.exists()


def test_weights_are_compared_before_memory_is_given_to_them(train_tiny: Train) -> None:
    path = train_tiny("train.steps=1")
    config = (path / "config.yaml").read_text()
    (path / "config.yaml").write_text(config.replace("n_embd: 32", "n_embd: 65536"))
    file = checkpoint.newest_first(path)[0]
    state = checkpoint.read(file)
    torch.save(
        state | {"config": state["config"] | {"model": state["config"]["model"] | {"n_embd": 65536}}}, file
    )
    with pytest.raises(UserError, match="another shape"):
        load_run(path)


ENDLESS = "[" * 100_000


@pytest.mark.parametrize(
    "text",
    [
        "name: 2001-13-45",
        "seed: " + "9" * 5000,
        f"name: {ENDLESS}",
        "a0: &a0 [x]\n"
        + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))
        + "name: *a39",
        "name: &a [*a]",
        'data: {source: text, path: x, out: "a\\0b"}',
    ],
)
def test_stored_config_without_an_end_is_refused(train_tiny: Train, text: str) -> None:
    path = train_tiny("train.steps=1")
    file = path / "config.yaml"
    kept = [line for line in file.read_text().splitlines() if not line.startswith(text.split(":")[0])]
    file.write_text("\n".join([*kept, text]))
    with pytest.raises(UserError):
        run_dir.load_config(path)


def test_broken_records_are_passed_over(train_tiny: Train) -> None:
    path = train_tiny("train.steps=2")
    for text in (ENDLESS, "[]", "5", '{"shards": "~\\u0000x", "id": 7, "step": []}'):
        (path / "run.json").write_text(text)
        (path / "evaluation/val.json").write_text(text)
        assert run_dir.wandb_id(path) is None and run_dir.final_row(path) is None
        assert run_dir.shards(path, compose_config("data=bin", f"data.path={path}")) == path
        with open(path / "metrics.jsonl", "ab") as file:
            file.write(b"\xff\n" + text.encode() + b"\n")
    assert [row["step"] for row in run_dir.metrics_rows(path)] == [1, 2]
    train_tiny("train.steps=3", "data.path=" + str(path.parent.parent / "shards"))
    assert [row["step"] for row in metrics(path)] == [1, 2, 3]


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
    (tmp_path / "disk").mkdir()
    (inside / "shards").symlink_to(tmp_path / "disk")  # the user's own, on a larger disk
    config = compose_config("data=text", "tokenizer=bytes", f"data.path={tmp_path / 'gone.txt'}")
    with pytest.raises(UserError, match="gone.txt"):  # it got as far as looking for the text
        run_dir.shards(path, config)


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


def test_home_is_a_tilde_however_it_is_written(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "disk/ada").mkdir(parents=True)
    (tmp_path / "ada").symlink_to(tmp_path / "disk/ada")
    home = tmp_path / "ada"
    monkeypatch.setenv("HOME", str(home))
    for given, told in {
        f"{home}/x": "~/x",
        f"/{home}/x": "~/x",
        f"{home.resolve()}/x": "~/x",
        f"{home}": "~",
        f"{home}2/x": f"{home}2/x",
        "x/../y": "x/../y",
        "-": "-",
    }.items():
        assert from_home(given) == told
    assert without_home(f"run=[{home}/a,'{home.resolve()}/b',c]") == "run=[~/a,'~/b',c]"
    assert without_home(f"+data.path={home}/a,{home}/b") == "+data.path=~/a,~/b"
    for kept in (f"prompt={home}/a", f"hydra.run.dir={home}/a", f"run={home}2", "-m"):
        assert without_home(kept) == kept
