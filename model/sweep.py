"""The folder of a sweep: what its jobs are and how far each is, so that the same command can finish it."""

from __future__ import annotations

import fcntl
import json
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from data.files import parse_json, write_atomically
from model.errors import UserError

PLAN = "sweep.json"
STOP = "stopped"  # a file that asks the jobs that have not begun to wait for the next time
WHERE = Path("runs/.multirun")  # as conf/hydra_defaults.yaml has it
typed: list[str] = []  # the command as the user gave it
latest: Path | None = None  # the folder of this command's sweep
problem: str | None = None  # why its jobs cannot be run


class Plan(Callback):
    """Hydra calls it before the jobs of a sweep start: it writes down what they are."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        global latest, problem
        latest, problem = Path(config.hydra.sweep.dir), None
        overrides = OverridesParser.create().parse_overrides(_task(config.hydra))
        jobs = [job for batch in BasicSweeper.split_arguments(overrides, None) for job in batch]
        try:
            latest.mkdir(parents=True, exist_ok=True)
            (latest / STOP).unlink(missing_ok=True)
            if not (latest / PLAN).exists():
                _write(latest / PLAN, {"command": typed, "jobs": jobs})
        except OSError as error:
            problem = f"hydra.sweep.dir={latest}: cannot be written ({error}); give another"
        else:
            if _read(latest / PLAN).get("jobs") != jobs:
                problem = (
                    f"hydra.sweep.dir={latest}: holds a sweep of other jobs; finish that with the command it was "
                    f"started with, or leave hydra.sweep.dir out"
                )
        if side_by_side(config.hydra):
            signal.signal(
                signal.SIGINT, signal.SIG_IGN
            )  # joblib would kill workers that are saving; they get it too


def side_by_side(hydra: Any) -> bool:
    """Whether the jobs are processes on this machine that go on beside each other."""
    return "joblib" in str(hydra.launcher._target_)


class Job:
    """One job of a sweep; its file is read and written by whichever process runs it."""

    def __init__(self, folder: Path, number: int) -> None:
        self.folder, self.number, self.log = folder, number, folder / f"job_{number}.log"
        self._file, self._lock = folder / f"job_{number}.json", folder / f"job_{number}.lock"

    def read(self) -> dict[str, Any]:
        return _read(self._file)

    def write(self, **values: Any) -> None:
        _write(self._file, self.read() | values)

    @contextmanager
    def held(self) -> Iterator[bool]:
        """Whether this process has the job to itself, within the block."""
        with open(self._lock, "a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                yield False
            else:
                yield True

    def state(self) -> str:
        """done, failed, running, stopped or missing."""
        status = str(self.read().get("status", "missing"))
        if status != "running":
            return status
        with self.held() as free:
            return "stopped" if free else "running"


def current() -> Job | None:
    """The job that this process runs; None outside a sweep."""
    config = HydraConfig.get()
    if config.mode != RunMode.MULTIRUN:
        return None
    return Job(Path(config.sweep.dir), int(config.job.num))


def jobs(folder: Path) -> list[tuple[str, Job]]:
    """The jobs of a sweep with what tells them apart. Raises UserError when there is no sweep."""
    plan = _read(folder / PLAN)
    if "jobs" not in plan:
        raise UserError(f"{folder}: not the folder of a sweep, which are under {WHERE}")
    common = set.intersection(*map(set, plan["jobs"])) if len(plan["jobs"]) > 1 else set()
    labels = [" ".join(part for part in job if part not in common) for job in plan["jobs"]]
    return [(label, Job(folder, number)) for number, label in enumerate(labels)]


def command_to_finish(folder: Path) -> str:
    """The command that runs what is missing, resumes what was stopped, and leaves the rest alone."""
    command = [part for part in _read(folder / PLAN)["command"] if not part.startswith("hydra.sweep.dir=")]
    return f"{Path(sys.executable).name} {shlex.join([*command, f'hydra.sweep.dir={folder}'])}"


def _task(config: Any) -> list[str]:
    """The overrides as they were given, with interpolations such as ${hydra:job.num} left as they are."""
    found = OmegaConf.to_container(config.overrides.task, resolve=False)
    assert isinstance(found, list)
    return found


def _read(file: Path) -> dict[str, Any]:
    try:
        found = parse_json(file.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(file: Path, values: dict[str, Any]) -> None:
    write_atomically(file, (json.dumps(values, indent=1) + "\n").encode())
