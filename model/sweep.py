"""The folder of a sweep: what its jobs are and how far each is, so that the same command can finish it."""

from __future__ import annotations

import fcntl
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from data.files import write_atomically
from model.errors import UserError

PLAN = "sweep.json"
WHERE = Path("runs/.multirun")  # as conf/hydra_defaults.yaml has it
typed: list[str] = []  # the command as the user gave it
latest: Path | None = None  # the folder of this command's sweep


class Plan(Callback):
    """Hydra calls it before the jobs of a sweep start: it writes down what they are."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        global latest
        latest = Path(config.hydra.sweep.dir)
        latest.mkdir(parents=True, exist_ok=True)
        if not (latest / PLAN).exists():
            overrides = OverridesParser.create().parse_overrides(_task(config.hydra))
            jobs = [job for batch in BasicSweeper.split_arguments(overrides, None) for job in batch]
            _write(latest / PLAN, {"command": typed, "jobs": jobs})


class Job:
    """One job of a sweep; its file is read and written by whichever process runs it."""

    def __init__(self, folder: Path, number: int) -> None:
        self.number, self.log = number, folder / f"job_{number}.log"
        self._file = folder / f"job_{number}.json"

    def read(self) -> dict[str, Any]:
        return _read(self._file)

    def write(self, **values: Any) -> None:
        _write(self._file, self.read() | values)

    def state(self) -> str:
        """done, failed, running, stopped or missing."""
        known = self.read()
        status = known.get("status", "missing")
        if status == "running" and not _in_use(known.get("run")):
            return "stopped"
        return str(status)


def current() -> Job | None:
    """The job that this process runs; None outside a sweep. Raises UserError in the folder of another sweep."""
    config = HydraConfig.get()
    if config.mode != RunMode.MULTIRUN:
        return None
    folder, number = Path(config.sweep.dir), int(config.job.num)
    planned = _read(folder / PLAN).get("jobs", [])
    if number >= len(planned) or planned[number] != _task(config):
        raise UserError(
            f"hydra.sweep.dir={folder}: holds a sweep of other jobs; finish that with the command it was started "
            f"with, or leave hydra.sweep.dir out"
        )
    return Job(folder, number)


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


def _in_use(run: str | None) -> bool:
    """Whether a process holds the directory of a run; also where it is not known yet which that is."""
    if run is None:
        return True
    try:
        with open(Path(run) / ".lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(file: Path, values: dict[str, Any]) -> None:
    write_atomically(file, (json.dumps(values, indent=1) + "\n").encode())
