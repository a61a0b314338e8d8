"""What a training does when it is stopped or when a step goes wrong: nothing is lost, and nothing goes unsaid."""

from __future__ import annotations

import errno
import itertools
import math
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from model.config import RunFailed, UserError
from model.training import checkpoint, loop
from model.training.interrupt import Interrupt
from model.training.optim import Optimizers
from tests.conftest import ROOT, TINY, Train, assert_same_run, final, metrics

BUSY = ["model.dropout=0.1", "train.micro_batch_size=2", "train.eval_interval=3", "train.log_interval=1"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("at", [3, 12])  # a step in between, and the last
def test_signal_within_a_validation_stops_it_and_it_is_done_after_all(
    train_tiny: Train, monkeypatch: Any, number: signal.Signals, at: int
) -> None:
    options = [*BUSY, "train.steps=12", "train.micro_batch_size=1"]
    straight = train_tiny(*options, name="straight")
    tally, batches = loop.tally, []

    def interrupted(*args: Any, on_batch: Any, **kwargs: Any) -> Any:
        def count(done: int, total: int) -> None:
            batches.append(done)
            if len(batches) == 2 + 32 * (at // 3 - 1):
                os.kill(os.getpid(), number)
            on_batch(done, total)

        return tally(*args, on_batch=count, **kwargs)

    monkeypatch.setattr(loop, "tally", interrupted)
    with pytest.raises(SystemExit) as stopped:
        train_tiny(*options, name="pieces")
    assert stopped.value.code == 128 + number
    pieces = straight.parent / "pieces"
    assert final(pieces)["step"] == at and final(pieces)["pending"]["step"] == at
    assert metrics(pieces)[-1]["step"] == at - 1  # the row of the step waits for its validation
    monkeypatch.setattr(loop, "tally", tally)
    train_tiny(*options, name="pieces")
    assert_same_run(straight, pieces)


def poisoned(monkeypatch: pytest.MonkeyPatch, bad: set[int]) -> None:
    """The gradients of the given attempts at a step (1 is the first) are no numbers."""
    accumulate, count = loop.accumulate, [0]

    def spoil(model: Any, *args: Any) -> float:
        loss = accumulate(model, *args)
        count[0] += 1
        if count[0] in bad:
            next(model.parameters()).grad[0, 0] = math.nan
        return loss

    monkeypatch.setattr(loop, "accumulate", spoil)


def test_skipped_steps_are_seen_and_leave_no_trace_in_weights(
    train_tiny: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates = []
    step = Optimizers.step
    monkeypatch.setattr(
        Optimizers, "step", lambda self, factor: (updates.append(factor), step(self, factor))[1]
    )
    poisoned(monkeypatch, {3, 4, 8})
    path = train_tiny(*BUSY, "train.steps=10", "train.on_nonfinite=skip", "train.max_skips=2")
    rows = {row["step"]: row for row in metrics(path)}
    assert len(updates) == 7 and len(rows) == 10
    assert [rows[n].get("train/skipped") for n in (2, 3, 4, 5, 8)] == [None, 1, 2, None, 1]
    assert "train/loss" not in rows[3] and "val/loss" in rows[3]
    assert all(bool(w.isfinite().all()) for w in final(path)["model"].values())


def test_skips_in_a_row_are_bounded_also_over_a_resume(
    train_tiny: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [
        *BUSY,
        "train.steps=30",
        "train.on_nonfinite=skip",
        "train.max_skips=4",
        "train.save_interval=1",
    ]
    poisoned(monkeypatch, set(range(5, 100)))
    with pytest.raises(
        RunFailed, match=r"step 9: .*gradient norm nan; 4 steps before it were skipped as well"
    ):
        train_tiny(*options)
    with pytest.raises(RunFailed, match="step 9: "):  # step 8 was saved, with its four
        train_tiny(*options)


def test_second_signal_ends_at_once_unless_it_is_the_echo_of_the_first() -> None:
    with Interrupt(several=True, leads=False) as interrupt:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert interrupt.signal == signal.SIGINT
    with Interrupt() as interrupt:
        signal.raise_signal(signal.SIGUSR1)
        process = os.fork()
        if process == 0:
            signal.raise_signal(signal.SIGTERM)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGTERM
        assert interrupt.signal == signal.SIGUSR1


def test_checkpoint_of_several_processes_is_read_by_any_number(train_tiny: Train) -> None:
    path = train_tiny("train.steps=2")
    state = final(path)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    checkpoint.set_rng(state, path, rank=1)  # was not there
    assert torch.equal(torch.get_rng_state(), before)
    checkpoint.set_rng(state, path, rank=0)
    assert torch.equal(torch.get_rng_state(), state["rng"][0]["cpu"])


def test_best_is_replaced_before_the_step_so_that_a_kill_between_loses_neither(
    train_tiny: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [*BUSY, "train.steps=9", "train.save_interval=100"]
    straight = train_tiny(*options, name="straight")
    replace = os.replace

    def killed(source: Any, target: Any) -> None:
        if Path(target).name == "step_00000006.pt":
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        train_tiny(*options, name="pieces")
    monkeypatch.setattr(os, "replace", replace)
    pieces = train_tiny(*options, name="pieces")
    best = [checkpoint.read(path / "checkpoints/best.pt") for path in (straight, pieces)]
    assert best[0]["step"] == best[1]["step"] and best[0]["best_loss"] == best[1]["best_loss"]
    assert_same_run(straight, pieces)


def test_stopped_run_that_is_shortened_below_where_it_is_counts_as_finished(
    train_tiny: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop.Training, "_validate", lambda self: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit):
        train_tiny("train.steps=9", "train.eval_interval=5")
    with pytest.raises(UserError, match="finished at step 5"):
        train_tiny("train.steps=4")


def test_talking_to_a_closed_pipe_does_not_keep_a_signal_from_saving(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("builtins.print", broken)
    with Interrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        assert interrupt.signal == signal.SIGINT


# --- disks -------------------------------------------------------------------------------------------------


def limited(tmp_path: Path, shards: Path, largest: int, *options: str) -> subprocess.CompletedProcess[str]:
    """Train where no file can grow beyond `largest` bytes, which is what a full disk is like."""
    command = [sys.executable, str(ROOT / "train.py"), *TINY, f"data.path={shards}", "run_dir=run", *options]
    return subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest)),
    )


@pytest.mark.parametrize(
    ("largest", "what"),
    [
        (100, r"run/config.yaml"),
        (1_600, r"run/config.yaml|run/run.json|run/metrics.jsonl: cannot be written"),
        (20_000, r"step_00000020.pt: cannot write the checkpoint .*earlier checkpoints are intact"),
    ],
)
def test_full_disk_is_one_sentence_and_the_run_goes_on_when_there_is_room(
    tmp_path: Path, shards: Path, largest: int, what: str
) -> None:
    options = [
        "train.steps=60",
        "train.save_interval=20",
        "train.log_interval=1",
        "resume=auto",
        "data.prompt=",
    ]
    full = limited(tmp_path, shards, largest, *options)
    assert full.returncode == 1 and "Traceback" not in full.stderr
    assert full.stderr.startswith("error: ") and re.search(what, full.stderr), full.stderr
    assert not list((tmp_path / "run").rglob("*.tmp"))
    assert limited(tmp_path, shards, 10**8, *options).returncode == 0
    assert [row["step"] for row in metrics(tmp_path / "run")] == list(range(1, 61))


def test_directory_that_cannot_be_written_any_more_ends_with_the_reason(
    train_tiny: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace

    def denied(source: Any, target: Any) -> None:
        if "step_" in str(target):
            raise PermissionError(errno.EACCES, "Permission denied")
        replace(source, target)

    path = train_tiny("train.steps=2")
    monkeypatch.setattr(os, "replace", denied)
    with pytest.raises(RunFailed, match=r"step_00000004.pt: cannot write the checkpoint .*Permission denied"):
        train_tiny("train.steps=4")
    assert final(path)["step"] == 2
    monkeypatch.setattr(os, "replace", replace)
    assert final(train_tiny("train.steps=4"))["step"] == 4


def test_clock_that_jumps_back_changes_nothing(train_tiny: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    straight = train_tiny(*BUSY, "train.steps=6", name="straight")
    now, jump = time.time, itertools.count()
    monkeypatch.setattr(time, "time", lambda: now() - 3600 * next(jump))
    assert_same_run(straight, train_tiny(*BUSY, "train.steps=6", name="jumping"))
