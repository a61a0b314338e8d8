"""Sweeps: side by side, stopped and finished, each job told apart."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT, TINY, metrics

TRAIN = [
    sys.executable,
    str(ROOT / "train.py"),
    "-m",
    *TINY,
    "train.steps=6",
    "train.eval_interval=6",
    "data.prompt=",
]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def run(place: Path, *command: str) -> tuple[int, str, str]:
    result = subprocess.run(command, cwd=place, env=ENVIRONMENT, capture_output=True, text=True, timeout=180)
    assert "Traceback" not in result.stdout + result.stderr, result.stderr
    return result.returncode, result.stdout, result.stderr


def status(place: Path, *arguments: str) -> str:
    code, said, _ = run(place, sys.executable, str(ROOT / "scripts/sweep_status.py"), *arguments)
    assert code == 0
    return said


@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_jobs_run_in_processes_of_their_own_and_a_failed_one_is_reported(
    tmp_path: Path, shards: Path, launcher: str
) -> None:
    code, said, wrong = run(
        tmp_path, *TRAIN, f"data.path={shards}", "model.n_head=2,4,3", f"hydra/launcher={launcher}"
    )
    assert (
        code == 2
        and "1 of 3 jobs failed or were stopped: model.n_head=3" in wrong
        and "does not divide" in wrong + said
    )
    assert "model.n_head=2" in said and "model.n_head=4" in said
    assert len(list(tmp_path.glob("runs/*_seed0*/metrics.jsonl"))) == 2
    logs = sorted(tmp_path.glob("runs/.multirun/*/job_*.log"))
    assert [log.read_text().count("step 6/6") for log in logs] == [1, 1, 0] and "step 6/6" not in said
    listed = status(tmp_path)
    assert "2 done, 1 failed" in listed and "Finish it with: " in listed


def test_stopped_sweep_is_finished_by_the_command_that_its_status_gives(tmp_path: Path, shards: Path) -> None:
    command = [
        *TRAIN,
        f"data.path={shards}",
        "train.steps=300",
        "train.log_interval=1",
        "train.eval_interval=300",
    ]
    with subprocess.Popen(
        [*command, "seed=0,1,2"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        deadline = time.monotonic() + 90
        while not any(path.stat().st_size > 2000 for path in tmp_path.glob("runs/*_seed1/metrics.jsonl")):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(60) != 0
    listed = status(tmp_path)
    assert "1 done, 1 stopped, 1 missing" in listed
    again = shlex.split(listed.split("Finish it with: ")[1].replace("\n", " "))
    code, said, _ = run(tmp_path, sys.executable, *again[1:])
    assert code == 0 and "done before" in said and said.count("Resuming") == 1
    runs = sorted(tmp_path.glob("runs/*_seed*"))
    assert len(runs) == 3 and all(
        [row["step"] for row in metrics(run)] == list(range(1, 301)) for run in runs
    )
    assert "3 done" in status(tmp_path) and "Finish" not in status(tmp_path)
    # the folder belongs to these jobs
    folder = next(tmp_path.glob("runs/.multirun/*"))
    code, _, wrong = run(tmp_path, *command, "seed=5,6", f"hydra.sweep.dir={folder}")
    assert code == 2 and "holds a sweep of other jobs" in wrong
    assert json.loads((folder / "sweep.json").read_text())["jobs"][0][-1] == "seed=0"


def test_status_without_a_sweep_is_one_sentence(tmp_path: Path) -> None:
    script = str(ROOT / "scripts/sweep_status.py")
    for arguments in ([], ["sweep=nothing"]):
        code, _, wrong = run(tmp_path, sys.executable, script, *arguments)
        assert code == 2 and wrong.startswith("error: ") and len(wrong.splitlines()) == 1


def test_slurm_configuration_composes(tmp_path: Path) -> None:
    options = [
        "hydra/launcher=slurm",
        "hydra.launcher.partition=gpu",
        "--cfg",
        "hydra",
        "-p",
        "hydra.launcher",
    ]
    code, said, _ = run(tmp_path, sys.executable, str(ROOT / "train.py"), *options)
    assert (
        code == 0 and "SlurmLauncher" in said and "partition: gpu" in said and "signal_delay_s: 120" in said
    )
