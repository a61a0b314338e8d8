"""The training loop: exact resume, schedules, accumulation, faults, run directories, checkpoints."""

from __future__ import annotations

import json
import os
import signal
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from data.loader import TokenStream
from model.config import RunFailed, UserError
from model.load import build_model, check_buildable, load_parent, load_run
from model.training import checkpoint, continued, run_dir
from model.training.config import OptimConfig
from model.training.optim import Optimizers, lr_factor
from tests.conftest import (
    CONTEXT,
    POSITIONS,
    TINY,
    Train,
    assert_same,
    assert_same_run,
    compose_config,
    final,
    metrics,
    write_shards,
)

BUSY = ["model.dropout=0.1", "train.micro_batch_size=2", "train.eval_interval=3", "train.log_interval=1"]


@pytest.mark.parametrize("option", ["optim=muon", "optim=adamw", "objective=mlm"])
def test_resume_equals_one_straight_run_bit_for_bit(train_tiny: Train, option: str, monkeypatch: Any) -> None:
    options = [*BUSY, option, "train.steps=20", "train.save_interval=7", "train.keep=1"]
    straight = train_tiny(*options, name="straight")

    class Killed(Exception):
        pass

    save, saved = checkpoint.save, []

    def kill_after(path: Path, step: int, *args: Any) -> Path:
        result = save(path, step, *args)
        saved.append(step)
        if step in {7, 14} and saved.count(step) == 1:
            raise Killed
        return result

    monkeypatch.setattr(checkpoint, "save", kill_after)
    for _ in range(2):
        with pytest.raises(Killed):
            train_tiny(*options, name="pieces")
    pieces = train_tiny(*options, name="pieces")
    assert {7, 14, 20} <= set(saved)
    assert_same_run(straight, pieces)


def test_metrics_ahead_of_the_checkpoint_are_dropped_and_written_again(
    train_tiny: Train, monkeypatch: Any
) -> None:
    options = [*BUSY, "train.steps=12", "train.save_interval=5"]
    straight = train_tiny(*options, name="straight")
    save = checkpoint.save

    def kill(path: Path, step: int, *args: Any) -> Path:
        if step == 10:
            raise MemoryError
        return save(path, step, *args)

    monkeypatch.setattr(checkpoint, "save", kill)
    with pytest.raises(MemoryError):
        train_tiny(*options, name="pieces")
    with open(straight.parent / "pieces/metrics.jsonl", "a") as file:
        file.write('{"step": 11, "tok')  # a line cut short by the kill
    monkeypatch.setattr(checkpoint, "save", save)
    assert metrics(train_tiny(*options, name="pieces")) == metrics(straight)


def test_evaluation_and_logging_frequency_leave_the_weights_alone(train_tiny: Train) -> None:
    often = train_tiny(
        "model.dropout=0.5", "train.steps=8", "train.eval_interval=2", "train.log_interval=1", name="often"
    )
    never = train_tiny("model.dropout=0.5", "train.steps=8", name="never")
    assert_same(final(often)["model"], final(never)["model"])


def test_finished_run_is_not_trained_again(train_tiny: Train) -> None:
    train_tiny("train.steps=3")
    with pytest.raises(UserError, match=r"finished at step 3; give train.steps=6"):
        train_tiny("train.steps=3")


def test_loss_falls_and_seed_repeats_the_run(train_tiny: Train) -> None:
    a, b, c = (
        train_tiny("train.steps=40", f"seed={seed}", name=f"run{i}") for i, seed in enumerate((1, 1, 2))
    )
    assert metrics(a) == metrics(b) != metrics(c)
    losses = [line["train/loss"] for line in metrics(a) if "train/loss" in line]
    assert losses[0] == pytest.approx(5.55, abs=0.12) and losses[-1] < 2.5


@pytest.mark.parametrize("name", POSITIONS)
def test_every_position_trains_and_its_run_loads(train_tiny: Train, name: str) -> None:
    path = train_tiny(f"position={name}", "train.steps=3", name=name)
    config, model, *_ = load_run(path)
    assert config.position["_target_"] == POSITIONS[name]["_target_"]
    assert_same(model.state_dict(), final(path)["model"])


# --- batches and schedules ---------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", ["causal", "mlm"])
def test_micro_batches_change_neither_gradient_nor_logged_loss(train_tiny: Train, objective: str) -> None:
    options = ["train.steps=3", "train.batch_size=8", "train.log_interval=1", "optim=adamw"]
    options += [f"objective={objective}"]
    runs = [metrics(train_tiny(*options, f"train.micro_batch_size={n}", name=f"m{n}")) for n in (8, 4, 2, 1)]
    for run in runs[1:]:
        for ours, whole in zip(run, runs[0], strict=True):
            assert ours["train/loss"] == pytest.approx(whole["train/loss"], rel=1e-5)
            assert ours["optim/grad_norm"] == pytest.approx(whole["optim/grad_norm"], rel=1e-4)
        assert run[-1]["val/loss"] == pytest.approx(runs[0][-1]["val/loss"], rel=1e-4)


def schedule(steps: int, **changes: Any) -> list[float]:
    values = compose_config("optim=adamw").optim.model_dump() | changes
    return [lr_factor(OptimConfig(**values), step, steps) for step in range(steps)]


@pytest.mark.parametrize("shape", ["linear", "cosine"])
@pytest.mark.parametrize(
    ("steps", "warmup", "decay"), [(10, 0, 1), (10, 0.1, 0.9), (100, 0.1, 0.5), (2, 0.5, 0.5)]
)
def test_schedule_reaches_peak_and_ends_at_the_minimum(
    shape: str, steps: int, warmup: float, decay: float
) -> None:
    factors = schedule(steps, shape=shape, warmup=warmup, decay=decay, min_lr_ratio=0.1)
    assert all(0 < factor <= 1 for factor in factors)
    assert max(factors) == 1 and factors[-1] == pytest.approx(0.1)
    peak = factors.index(1)
    assert factors[:peak] == sorted(factors[:peak]) and factors[peak:] == sorted(factors[peak:], reverse=True)


def test_schedule_edges() -> None:
    assert schedule(1, warmup=0, decay=1) == [1]
    assert schedule(4, warmup=1, decay=0) == [0.25, 0.5, 0.75, 1]
    assert schedule(3, warmup=0, decay=1, min_lr_ratio=1) == [1, 1, 1]
    assert schedule(5, warmup=0, decay=0) == [1] * 5


def test_only_block_matrices_are_decayed_or_given_to_muon() -> None:
    for name in ("muon", "adamw"):
        model = build_model(compose_config(*TINY, "data.path=x", f"optim={name}", "position=learned"))
        optimizers = Optimizers(model, compose_config(f"optim={name}").optim)
        groups = [(type(o).__name__, g) for o, _ in optimizers.all for g in o.param_groups]
        covered = [id(p) for _, group in groups for p in group["params"]]
        assert sorted(covered) == sorted(id(p) for p in model.parameters())
        matrices = {id(p) for block in model.blocks for p in block.parameters() if p.ndim == 2}
        assert {id(p) for _, group in groups if group["weight_decay"] for p in group["params"]} == matrices
        assert {id(p) for kind, group in groups if kind == "Muon" for p in group["params"]} == (
            matrices if name == "muon" else set()
        )


# --- faults ------------------------------------------------------------------------------------------------


def test_nan_stops_with_the_good_checkpoints_kept(
    train_tiny: Train, tmp_path: Path, monkeypatch: Any
) -> None:
    step = Optimizers.step

    def poison(self: Optimizers, factor: float) -> None:
        step(self, factor)
        poison.count += 1  # type: ignore[attr-defined]
        if poison.count == 12:  # type: ignore[attr-defined]
            next(iter(self.all[0][0].param_groups[0]["params"])).data.fill_(float("nan"))

    poison.count = 0  # type: ignore[attr-defined]
    monkeypatch.setattr(Optimizers, "step", poison)
    with pytest.raises(RunFailed, match=r"step 13: loss nan"):
        train_tiny("train.steps=40", "train.save_interval=5", "train.keep=2", name="nan")
    kept = checkpoint.newest_first(tmp_path / "runs/nan")
    assert [checkpoint.read(path)["step"] for path in kept] == [10, 5]
    assert all(weight.isfinite().all() for path in kept for weight in checkpoint.read(path)["model"].values())


@pytest.mark.parametrize("steps", [1, 20])
def test_update_that_breaks_the_weights_is_never_saved(train_tiny: Train, tmp_path: Path, steps: int) -> None:
    """At the last step and at a save boundary, where no later loss would show it."""
    breaking = ["optim=adamw", "optim.lr=1e6", "optim.warmup=0", "optim.grad_clip=0", "position=learned"]
    with pytest.raises(RunFailed):
        train_tiny(*breaking, f"train.steps={steps}", "train.save_interval=1", "train.keep=1", name="broken")
    for path in checkpoint.newest_first(tmp_path / "runs/broken"):
        assert all(weight.isfinite().all() for weight in checkpoint.read(path)["model"].values())


def test_poisoned_update_at_a_save_boundary_keeps_the_good_checkpoint(
    train_tiny: Train, tmp_path: Path, monkeypatch: Any
) -> None:
    step, count = Optimizers.step, [0]

    def poison(self: Optimizers, factor: float) -> None:
        step(self, factor)
        count[0] += 1
        if count[0] == 10:
            next(iter(self.all[0][0].param_groups[0]["params"])).data.fill_(float("nan"))

    monkeypatch.setattr(Optimizers, "step", poison)
    with pytest.raises(RunFailed, match="step 10: the update left a model that is not finite"):
        train_tiny("train.steps=40", "train.save_interval=5", "train.keep=1", name="nan")
    assert [checkpoint.read(p)["step"] for p in checkpoint.newest_first(tmp_path / "runs/nan")] == [5]


def test_bf16_follows_the_loss_curve_of_fp32(train_tiny: Train) -> None:
    runs = [metrics(train_tiny("train.steps=40", f"train.precision={p}", name=p)) for p in ("fp32", "bf16")]
    for exact, ours in zip(*runs, strict=True):
        assert ours["train/loss"] == pytest.approx(exact["train/loss"], rel=0.02)


def test_checkpoint_after_a_fallback_replaces_the_damaged_ones(train_tiny: Train) -> None:
    path = train_tiny("train.steps=4", "train.save_interval=2")
    checkpoint.newest_first(path)[0].write_bytes(b"damaged")
    checkpoint.save(path, 3, {}, keep=1, is_best=False)
    assert [p.name for p in checkpoint.newest_first(path)] == ["step_00000003.pt"]


def test_checkpoint_of_another_encoding_is_refused(train_tiny: Train) -> None:
    rope, alibi = (train_tiny(f"position={name}", "train.steps=1", name=name) for name in ("rope", "alibi"))
    checkpoint.newest_first(alibi)[0].write_bytes(checkpoint.newest_first(rope)[0].read_bytes())
    with pytest.raises(UserError, match=r"trained with other config \(position\)"):
        load_run(alibi)


def test_interrupt_saves_at_the_step_boundary_and_resume_is_exact(
    train_tiny: Train, monkeypatch: Any
) -> None:
    options = [*BUSY, "train.steps=12"]
    straight = train_tiny(*options, name="straight")
    step = Optimizers.step

    def interrupted(self: Optimizers, factor: float) -> None:
        step(self, factor)
        interrupted.count += 1  # type: ignore[attr-defined]
        if interrupted.count == 5:  # type: ignore[attr-defined]
            os.kill(os.getpid(), signal.SIGTERM)

    interrupted.count = 0  # type: ignore[attr-defined]
    monkeypatch.setattr(Optimizers, "step", interrupted)
    with pytest.raises(SystemExit) as stopped:
        train_tiny(*options, name="pieces")
    assert stopped.value.code == 128 + signal.SIGTERM
    assert final(straight.parent / "pieces")["step"] == 5
    monkeypatch.setattr(Optimizers, "step", step)
    pieces = train_tiny(*options, name="pieces")
    assert_same_run(straight, pieces)


# --- checkpoints -------------------------------------------------------------------------------------------


def test_newest_and_best_checkpoints_are_kept(train_tiny: Train) -> None:
    path = train_tiny("train.steps=10", "train.save_interval=2", "train.eval_interval=2", "train.keep=3")
    names = sorted(p.name for p in (path / "checkpoints").iterdir())
    assert names == ["best.pt", "step_00000006.pt", "step_00000008.pt", "step_00000010.pt"]
    losses = {line["step"]: line["val/loss"] for line in metrics(path) if "val/loss" in line}
    best = checkpoint.read(path / "checkpoints/best.pt")
    assert best["step"] == min(losses, key=lambda step: losses[step])


def test_checkpoint_holds_plain_types_and_no_compile_prefix(train_tiny: Train) -> None:
    path = train_tiny("train.steps=2")
    state = torch.load(checkpoint.newest_first(path)[0], weights_only=True)
    assert all(not name.startswith(("_orig_mod", "module")) for name in state["model"])


@pytest.mark.parametrize("damage", ["empty", "ten bytes", "half", "one byte short", "flipped", "text"])
def test_damaged_newest_checkpoint_falls_back_to_the_one_before(
    train_tiny: Train, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = train_tiny("train.steps=4", "train.save_interval=2")
    newest, before = checkpoint.newest_first(path)
    content = newest.read_bytes()
    cut = {"empty": 0, "ten bytes": 10, "half": len(content) // 2, "one byte short": len(content) - 1}
    changed = bytearray(content[: cut.get(damage, len(content))])
    if damage == "flipped":
        changed[len(content) // 2] ^= 1
    newest.write_bytes(b"not a checkpoint" if damage == "text" else bytes(changed))
    state = checkpoint.read_newest(path, print)
    assert state is not None and state["step"] == 2
    assert newest.name in capsys.readouterr().out
    before.unlink()
    with pytest.raises(UserError, match=f"{newest.name}: damaged"):
        checkpoint.read_newest(path, print)


def test_checkpoint_of_another_shape_is_refused_naming_the_tensor(train_tiny: Train) -> None:
    path = train_tiny("train.steps=1")
    other = build_model(compose_config(*TINY, "data.path=x", "model.n_embd=64"))
    with pytest.raises(
        UserError, match=r"another shape, blocks.0.attn.proj.weight is \(32, 32\) there and \(64, 64\)"
    ):
        checkpoint.load_weights(other, final(path), path)
    deeper = build_model(compose_config(*TINY, "data.path=x", "model.n_layer=3"))
    with pytest.raises(UserError, match="absent there"):
        checkpoint.load_weights(deeper, final(path), path)


def test_full_disk_is_said_and_earlier_checkpoints_stay(train_tiny: Train, monkeypatch: Any) -> None:
    path = train_tiny("train.steps=2")
    before = {p.name: p.read_bytes() for p in (path / "checkpoints").iterdir()}

    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunFailed, match=r"step_00000003.pt: cannot write.*No space left"):
        checkpoint.save(path, 3, {}, keep=1, is_best=True)
    assert {p.name: p.read_bytes() for p in (path / "checkpoints").iterdir()} == before


def test_stale_temporary_files_are_removed(train_tiny: Train) -> None:
    path = train_tiny("train.steps=1")
    stale = path / "checkpoints/.step_00000009.pt.123.tmp"
    stale.write_bytes(b"x")
    checkpoint.save(path, 2, {}, keep=5, is_best=False)
    assert not stale.exists()


def test_checkpoint_crc_covers_every_byte_of_the_weights(train_tiny: Train) -> None:
    path = checkpoint.newest_first(train_tiny("train.steps=1"))[0]
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert all(info.CRC for info in archive.infolist() if info.file_size > 8)


# --- run directories ---------------------------------------------------------------------------------------


def test_run_directories_made_in_the_same_second_differ(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    config = compose_config()
    paths = [run_dir.create(config)[0] for _ in range(5)]
    assert len(set(paths)) == 5 and all(path.parent == Path("runs") for path in paths)


def test_directory_of_a_run_or_of_other_files_is_refused(train_tiny: Train, tmp_path: Path) -> None:
    path = train_tiny("train.steps=1")
    with pytest.raises(UserError, match=f"already holds a run; continue it with resume={path} or"):
        run_dir.create(compose_config(f"run_dir={path}"))
    with pytest.raises(UserError, match="already holds files"):
        run_dir.create(compose_config(f"run_dir={tmp_path / 'shards'}"))
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="is a file"):
        run_dir.create(compose_config(f"run_dir={tmp_path / 'file'}"))


def test_directory_in_use_is_refused(tmp_path: Path) -> None:
    with run_dir.lock(tmp_path), pytest.raises(UserError, match="in use by another training"):
        run_dir.lock(tmp_path)
    run_dir.lock(tmp_path).close()


def test_resume_allows_length_and_refuses_another_experiment() -> None:
    stored = compose_config("train.steps=10")
    values = stored.model_dump()
    longer = values | {"train": values["train"] | {"steps": 30}}
    config, said = continued.merge_for_resume(stored, longer, ["resume", "train.steps"])
    assert config.train.steps == 30 and said == ["train.steps: 10 -> 30"]
    other = values | {"position": POSITIONS["alibi"], "model": values["model"] | {"n_layer": 6}}
    with pytest.raises(
        UserError, match=r"cannot change model.n_layer \(4 -> 6\), .*position._target_ \(.*ALiBi\)"
    ):
        continued.merge_for_resume(stored, other, ["position", "model.n_layer"])
    masked = values | {"objective": "mlm"}
    with pytest.raises(
        UserError, match=r"change objective \(causal -> mlm\), model.causal \(True -> False\)"
    ):
        continued.merge_for_resume(stored, masked, ["objective"])
    config, said = continued.merge_for_resume(stored, other, [])
    extended = stored.model_copy(update={"model": stored.model.model_copy(update={"original_length": 16})})
    config, said = continued.merge_for_resume(extended, stored.model_dump(), ["model"])
    assert config.model.original_length == 16 and not said  # a group of models knows nothing of it
    config, said = continued.merge_for_resume(stored, other, [])
    assert config.model.n_layer == 4 and said == []


def test_resume_on_changed_data_is_refused(train_tiny: Train, shards: Path) -> None:
    options = ["train.steps=4", "train.save_interval=2"]
    path = train_tiny(*options)
    checkpoint.newest_first(path)[0].unlink()
    tokens = TokenStream(shards, "train").read(0, 15_000)
    write_shards(shards, tokens, tokens[:1000])
    with pytest.raises(UserError, match=r"trained with other data \(train, val\)"):
        train_tiny(*options)


def test_environment_names_versions_and_no_path_or_user() -> None:
    text = json.dumps(run_dir.environment())
    assert torch.__version__.split("+")[0] in text
    assert str(Path.home()) not in text and str(Path.cwd()) not in text


@pytest.mark.slow
def test_compiled_run_has_the_same_losses_and_loads_uncompiled(train_tiny: Train) -> None:
    options = ["train.steps=5", "train.log_interval=1"]
    compiled, eager = (
        train_tiny(*options, "train.compile=true", name="compiled"),
        train_tiny(*options, name="eager"),
    )
    for ours, theirs in zip(metrics(compiled), metrics(eager), strict=True):
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], rel=1e-3)
    assert load_run(compiled).model.state_dict().keys() == load_run(eager).model.state_dict().keys()


# --- starting from another run -----------------------------------------------------------------------------


def test_extended_run_has_the_parents_configuration_and_weights(
    train_tiny: Callable[..., Path],
) -> None:
    parent = train_tiny("train.steps=5", "optim.lr=0.004", name="parent")
    given = {"position.scaling", "model.context_length", "train.steps", "init_from"}
    composed = compose_config(
        *("position/scaling=linear", "position.scaling.factor=4", "data=bin", "data.path=x"),
        *("model.context_length=128", "train.steps=7", f"init_from={parent}"),
    ).model_dump()
    config = continued.extend(run_dir.load_config(parent), composed, ["position/scaling", *sorted(given)])
    assert config.model.context_length == 128 and config.model.original_length == CONTEXT
    assert config.position["scaling"]["factor"] == 4 and config.optim.lr == 0.004
    assert config.model.n_embd == 32 and config.tokenizer.name == "bytes" and config.train.steps == 7
    again = continued.extend(config, composed | {"model": {"context_length": 512}}, ["model.context_length"])
    assert again.model.original_length == CONTEXT  # that of the pretraining, not of the parent

    model = build_model(config)
    record = load_parent(model, config)
    assert record == {"run": str(parent.resolve()), "step": 5, "original_length": CONTEXT}
    state = checkpoint.read_newest(parent, print)
    assert state is not None
    assert all(torch.equal(state["model"][name], weight) for name, weight in model.state_dict().items())


@pytest.mark.parametrize("change", ["model.n_embd=64", "position=learned"])
def test_parent_of_another_shape_is_refused_before_anything_is_made(
    train_tiny: Callable[..., Path], change: str
) -> None:
    parent = train_tiny("train.steps=1", name="parent")
    with pytest.raises(UserError, match=r"parent: from a model of another shape"):
        check_buildable(compose_config(*TINY, "data.path=x", change, f"init_from={parent}"))
